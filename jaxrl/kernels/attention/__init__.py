"""Attention over packed rows and over a key-value cache."""

from jaxrl.kernels.attention.api import attention

__all__ = ["attention"]
