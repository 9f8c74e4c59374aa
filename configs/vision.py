"""GRPO on questions about pictures: a small decoder with a tower for images, an SFT warm start, then reinforcement learning.

Command:   jaxrl train --config=configs/vision.py
Hardware:  any; two CPU cores.
Expected:  held-out accuracy 39.0 -> 96.7, 37.0 -> 99.0, 29.3 -> 100 % (seeds 0, 1 and 2, each with a warm start of its own), about
           5.5 processor minutes; 17 to 23 % with grey or exchanged pictures (docs/guides/vision.md).

The warm start has learnt to look, and its last steps are on wrong completions, so most of its answers are wrong. GRPO makes them right
by a reward that reads the final box alone.

Variants:  tiny (a few seconds, learns next to nothing; for tests); qwen2_5, qwen2_5_tiny: with a Qwen2.5-VL, after a warm start that just
           ends early; gemma3, gemma3_tiny: likewise with a Gemma 3.
"""

from jaxrl.config import default_config
from jaxrl.errors import ConfigError


def get_config(arg=None):
    """arg: None, 'tiny', 'qwen2_5', 'qwen2_5_tiny', 'gemma3' or 'gemma3_tiny'."""
    if arg not in (None, "tiny", "qwen2_5", "qwen2_5_tiny", "gemma3", "gemma3_tiny"):
        raise ConfigError(f"vision has the variants 'tiny', 'qwen2_5', 'qwen2_5_tiny', 'gemma3' and 'gemma3_tiny', not {arg!r}")
    kind = next((kind for kind in ("qwen2_5", "gemma3") if (arg or "").startswith(kind)), "")
    size = "tiny" if (arg or "").endswith("tiny") else "short"
    c = default_config()
    c.run.recipe = "rl"
    c.run.warm_start = "vision_sft:" + ((f"{kind}_" if kind else "") + size if arg else "wrong")

    c.data.path = ("jaxrl://shapes/train.parquet",)
    if kind != "gemma3":
        c.data.image_min_pixels = c.data.image_max_pixels = 24 * 24  # as the warm start
    c.data.prompts_per_step = 32
    c.data.max_prompt_tokens = 32

    c.rollout.engine = "jax"
    c.rollout.group_size = 8
    c.rollout.max_new_tokens = 12
    c.rollout.prompt_lengths = (32,)
    c.rollout.slots = 256
    c.rollout.compaction = False

    c.reward.functions = ("boxed",)
    c.optimizer.lr = 1e-4
    c.optimizer.warmup_steps = 10

    c.train.steps = 200
    c.train.row_lengths = (256,)
    c.train.tokens_per_microbatch = 4096
    c.train.row_counts = 1

    c.eval.sets = ("test=jaxrl://shapes/test.parquet",)
    c.eval.every_steps = 0
    c.eval.controls = ("blank", "swapped")
    if size == "tiny":
        c.data.prompts_per_step, c.rollout.group_size, c.rollout.slots = 4, 4, 16
        c.train.steps = 2
        c.train.tokens_per_microbatch = 1024
        c.eval.max_rows = 16
        c.reward.workers = 1
        c.checkpoint.every_steps = 1
    return c
