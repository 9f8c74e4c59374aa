"""Rollouts: the engine protocol, the embedded sampler, and vLLM."""

from jaxrl.rollout.protocol import (
    Engine,
    EngineInfo,
    EngineLost,
    Health,
    Key,
    Request,
    Result,
    SamplingParams,
    generate,
)
from jaxrl.rollout.select import chosen_engine, make_engine

__all__ = ["Engine", "EngineInfo", "EngineLost", "Health", "Key", "Request", "Result", "SamplingParams", "chosen_engine", "generate", "make_engine"]
