r"""GRPO on GSM8K with Qwen3-30B-A3B, a mixture of 128 experts of which a token has 8.

Command:   sbatch --nodes=2 launch/slurm.sbatch --config=configs/grpo_qwen3_30b.py --config.run.dir=/shared/run
           What it needs, without a GPU: jaxrl plan --config=configs/grpo_qwen3_30b.py
Hardware:  16 H100 (two hosts of 8). Experts lie over the devices of a host (mesh.ep), everything over both (mesh.fsdp);
           two vLLM servers of four GPUs on each host take turns with the trainer on its GPUs.
Expected:  not known. docs/guides/plan.md has what the plan says of it.

What was never run: this config with the real weights, or on any GPU; mesh.ep on anything but simulated CPU devices;
vLLM with experts on a GPU. What is tested: that it is planned, and that a small model of the same family trains alike
with and without mesh.ep (tests/sharding, tests/processes/test_hosts_job.py).

No variants.
"""

from jaxrl.config import load_config
from jaxrl.errors import ConfigError


def get_config(arg=None):
    """Takes no argument."""
    if arg is not None:
        raise ConfigError(f"grpo_qwen3_30b has no variants, not {arg!r}")
    c = load_config("grpo_gsm8k")
    c.run.dir = ""
    c.model.path = "Qwen/Qwen3-30B-A3B"
    c.plan.target = "h100:16"

    c.data.prompts_per_step, c.rollout.group_size = 64, 16
    c.data.max_prompt_tokens, c.rollout.max_new_tokens = 1024, 7168
    c.train.row_lengths, c.train.tokens_per_microbatch = (8192,), 16384
    c.algorithm.num_minibatches, c.algorithm.kl.coef = 1, 0.0

    c.mesh.ep = 8
    c.rollout.engine, c.rollout.placement = "vllm", "colocated"
    c.rollout.vllm.tensor_parallel, c.rollout.vllm.replicas, c.rollout.vllm.memory_fraction = 4, 2, 0.4
    return c
