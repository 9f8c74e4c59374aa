"""GRPO of a small hybrid (three layers with a recurrence, one with attention) on the embedded task, after a warm start.

Command:   jaxrl train --config=configs/grpo_hybrid.py
Hardware:  any; two CPU cores.
Expected:  held-out accuracy 13.8 -> 89.2, 86.2, 87.6 % (step 40, seeds 0, 1, 2 from one warm start; 89.4, 87.0, 87.3 % at step 60); with
           shuffled rewards 12.4 %. 9 minutes of warm start on a very busy machine (load 12 to 20 on 2 cores, jax 0.10.2);
           docs/explanations/kernels.md has the kinds of problems.

Variants:  tiny (learns next to nothing; for tests).
"""

from jaxrl.config import load_config


def get_config(arg=None):
    """arg: None or 'tiny'."""
    c = load_config("grpo" + (f":{arg}" if arg else ""))
    c.run.dir = ""  # its own
    c.run.warm_start = "sft_hybrid" + (f":{arg}" if arg else "")
    return c
