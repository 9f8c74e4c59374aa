"""The record of a run: what every step read and what it came to, so that steps can be computed again without an engine.

    files.py   one file for each step, named by its own checksum (numpy; no jax)
    states.py  what a state of parameters and optimizer is told apart by, the same on every mesh
    verdict.py whether a step that was computed again is the one that was recorded

Recipes decide what is recorded (recipes/recording.py) and use it (recipes/replay.py, what_if.py, explain.py).
"""
