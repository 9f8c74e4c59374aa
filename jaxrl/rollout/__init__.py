"""Rollouts: the engine protocol, the embedded sampler, episodes, and vLLM."""

from jaxrl.rollout.engines import ENGINES, EngineContext, engine_name, engine_row, make_engine
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
    TurnImage,
    generate,
)

__all__ = ["ENGINES", "Engine", "EngineContext", "EngineInfo", "EngineLost", "Health", "Key", "Outcome", "Request",
           "Result", "SamplingParams", "Turn", "TurnImage", "engine_name", "engine_row", "generate", "make_engine"]
