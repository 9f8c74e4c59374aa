"""PPO with a critic on the embedded task: configs/grpo.py, but for the algorithm.

Command:   jaxrl train --config=configs/ppo.py
Hardware:  any; two CPU cores.
Expected:  18.5 % after the warm start, 91.8 % after 40 steps; 3.5 minutes on two busy CPU cores.

GAE over tokens with a critic that starts from the warm-started policy's trunk and a value head at zero; four optimizer
steps per batch, so that ratios are clipped. The first steps train the critic alone.

Variants:  tiny (a few seconds, learns next to nothing; for tests).
"""

from jaxrl.config import load_config
from jaxrl.errors import ConfigError


def get_config(arg=None):
    """arg: None or 'tiny'."""
    if arg not in (None, "tiny"):
        raise ConfigError(f"ppo has the variant 'tiny', not {arg!r}")
    c = load_config("grpo" + (f":{arg}" if arg else ""))
    c.run.dir = ""  # runs/ppo
    c.algorithm.preset = "ppo"
    c.algorithm.num_minibatches = 4
    c.critic.lr = 1e-3
    c.critic.warmup_steps = 2
    if arg == "tiny":
        c.algorithm.num_minibatches, c.critic.warmup_steps = 2, 1
    return c
