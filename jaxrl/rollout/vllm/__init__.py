"""Rollouts through vLLM: servers of our own or given as URLs, behind the same protocol as the embedded sampler."""
