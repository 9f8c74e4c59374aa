"""Kinds of job, one file each: an objective, its batch and an explicit loop (config/registry.py lists them)."""
