"""GRPO of a small hybrid (three layers with a recurrence, one with attention) on the embedded task, after a warm start.

Command:   jaxrl train --config=configs/grpo_hybrid.py
Hardware:  any; two CPU cores.
Expected:  held-out accuracy 10.1 -> 58.5 % (step 20) -> 88.1 % (step 40), seed 0; 8.5 minutes of warm start and 4.2 of
           GRPO on a very busy machine (load 14 on 2 cores, jax 0.10.2).

Variants:  tiny (learns next to nothing; for tests).
"""

from jaxrl.config import load_config


def get_config(arg=None):
    """arg: None or 'tiny'."""
    c = load_config("grpo" + (f":{arg}" if arg else ""))
    c.run.dir = ""  # its own
    c.run.warm_start = "sft_hybrid" + (f":{arg}" if arg else "")
    return c
