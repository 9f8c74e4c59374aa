"""Rollouts: the engine protocol, the embedded sampler, and vLLM."""

from jaxrl.rollout.engines import ENGINES, EngineContext, chosen_engine, engine_of, make_engine
from jaxrl.rollout.protocol import (
    Engine,
    EngineInfo,
    EngineLost,
    Health,
    Key,
    Outcome,
    Request,
    Result,
    SamplingParams,
    Turn,
    generate,
)

__all__ = ["ENGINES", "Engine", "EngineContext", "EngineInfo", "EngineLost", "Health", "Key", "Outcome", "Request",
           "Result", "SamplingParams", "Turn", "chosen_engine", "engine_of", "generate", "make_engine"]
