"""GRPO of a small hybrid (three layers with a recurrence, one with attention) on the embedded task, after a warm start.

Command:   jaxrl train --config=configs/grpo_hybrid.py
Hardware:  any; two CPU cores.
Expected:  not measured in full yet.

Variants:  tiny (learns next to nothing; for tests).
"""

from jaxrl.config import load_config


def get_config(arg=None):
    """arg: None or 'tiny'."""
    c = load_config("grpo" + (f":{arg}" if arg else ""))
    c.run.warm_start = "sft_hybrid" + (f":{arg}" if arg else "")
    return c
