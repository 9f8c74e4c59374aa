"""Rollouts: the engine protocol, the embedded sampler, and vLLM."""

from jaxrl.rollout.protocol import Engine, EngineLost, Request, Result, SamplingParams, generate, request_seed
from jaxrl.rollout.select import chosen_engine, make_engine

__all__ = ["Engine", "EngineLost", "Request", "Result", "SamplingParams", "chosen_engine", "generate", "make_engine", "request_seed"]
