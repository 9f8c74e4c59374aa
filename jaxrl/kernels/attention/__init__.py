"""Attention over packed rows and over a key-value cache."""

from jaxrl.kernels.attention.api import attention, cached_attention, cached_work_of, shares_prompts, work_of
from jaxrl.kernels.attention.shared import Shared, share

__all__ = ["Shared", "attention", "cached_attention", "cached_work_of", "share", "shares_prompts", "work_of"]
