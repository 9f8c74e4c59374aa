"""Rollouts: the engine protocol and the embedded sampler."""

from jaxrl.rollout.embedded import make_engine
from jaxrl.rollout.protocol import Engine, Request, Result, SamplingParams, generate, request_seed

__all__ = ["Engine", "Request", "Result", "SamplingParams", "generate", "make_engine", "request_seed"]
