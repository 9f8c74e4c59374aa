"""Attention: `packed` over packed rows, with gradients, and `cached` of one query per slot over a key-value cache."""

from jaxrl.kernels.attention.cached.api import cached_attention, cached_work_of, shares_prompts
from jaxrl.kernels.attention.cached.shared import Shared, share
from jaxrl.kernels.attention.packed.api import attention, work_of

__all__ = ["Shared", "attention", "cached_attention", "cached_work_of", "share", "shares_prompts", "work_of"]
