"""Attention over packed rows and over a key-value cache."""

from jaxrl.kernels.attention.api import attention, cached_attention, cached_work_of, work_of

__all__ = ["attention", "cached_attention", "cached_work_of", "work_of"]
