"""Decoder-only language models: one implementation, the families as data."""

from jaxrl.models.config import FAMILIES, ModelConfig
from jaxrl.models.model import Model, build

__all__ = ["FAMILIES", "Model", "ModelConfig", "build"]
