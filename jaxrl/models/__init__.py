"""Decoder-only language models: one implementation, the families as data."""

from jaxrl.models.config import ModelConfig
from jaxrl.models.families import FAMILIES
from jaxrl.models.model import Model, build

__all__ = ["FAMILIES", "Model", "ModelConfig", "build"]
