"""Rollouts through vLLM: our own servers or given URLs, with the same protocol as the embedded sampler."""
