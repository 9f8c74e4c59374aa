"""Attention: `packed` over packed rows, with gradients, and `cached` of one query per slot over a key-value cache."""

from jaxrl.kernels.attention.cached.api import cached_attention, cached_work_of, least_shared, shares_prompts
from jaxrl.kernels.attention.cached.shared import Shared, share
from jaxrl.kernels.attention.packed.api import attention, work_of
from jaxrl.kernels.attention.packed.ring import Ring
from jaxrl.kernels.attention.packed.ring import attention as ring_attention
from jaxrl.kernels.attention.packed.ring import work_of as ring_work_of

__all__ = ["Ring", "Shared", "attention", "cached_attention", "cached_work_of", "least_shared", "ring_attention",
           "ring_work_of", "share", "shares_prompts", "work_of"]
