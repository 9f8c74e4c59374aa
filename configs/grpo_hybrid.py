"""GRPO of a small hybrid (three layers with a recurrence, one with attention) on the embedded task, after a warm start.

Command:   jaxrl train --config=configs/grpo_hybrid.py
Hardware:  any; two CPU cores.
Expected:  held-out accuracy 13.0 -> 92.6, 91.3, 90.7 % (seeds 0, 1, 2 from one warm start); with shuffled rewards 12.7 %
           (CPU, jax 0.10.2); docs/explanations/kernels.md has the kinds of problems.
           261 seconds on two cores, 192 of them the warm start.

Variants:  tiny (learns next to nothing; for tests).
"""

from jaxrl.config import load_config


def get_config(arg=None):
    """arg: None or 'tiny'."""
    c = load_config("grpo" + (f":{arg}" if arg else ""))
    c.run.dir = ""  # its own
    c.run.warm_start = "sft_hybrid" + (f":{arg}" if arg else "")
    return c
