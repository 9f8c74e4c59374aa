"""GRPO on the embedded task with low-rank adapters: configs/grpo.py, and rank-8 LoRA on every linear map of the layers.

Command:   jaxrl train --config=configs/lora.py
Hardware:  any; two CPU cores.
Expected:  20.1 -> 91.8 % in one and a half minutes with the warm start done (seed 0, busy cores); all
           parameters reach 92.1 % there, rank 1 92.3 %. Its state is 46 % of full training's. python evidence/lora.py
           compares them.

The warm start trains the whole model; then it is frozen and the adapters train, at ten times the learning rate. The
reference of a KL term (algorithm.kl.coef) would be the frozen base, with no second copy.

Variants:  tiny (a few seconds, learns next to nothing; for tests).
"""

from jaxrl.config import load_config
from jaxrl.errors import ConfigError


def get_config(arg=None):
    """arg: None or 'tiny'."""
    if arg not in (None, "tiny"):
        raise ConfigError(f"lora has the variant 'tiny', not {arg!r}")
    c = load_config("grpo" + (f":{arg}" if arg else ""))
    c.run.dir = ""  # runs/lora
    c.lora.rank = 8
    c.optimizer.lr = 2e-3
    return c
