"""Computes recorded steps again, without an engine: replay (bitwise verdicts), explain, what_if, fork. parity compares
the engine's log-probs with the trainer's.
"""
