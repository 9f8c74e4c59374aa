"""Recorded steps computed again, without an engine: replay (bitwise verdicts), explain, what_if and fork; parity
compares the engine's log-probs with the trainer's.
"""
