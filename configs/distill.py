"""Distillation on the embedded task: the policy that GRPO ended with teaches the one that GRPO began with.

Command:   jaxrl train --config=configs/grpo.py        # makes teacher and student, a minute and a half
           jaxrl train --config=configs/distill.py
Hardware:  any; two CPU cores.
Expected:  see docs/guides/distillation.md.

Variants:  sampled (the default), forward, reverse, jsd (over the whole vocabulary).
"""

from jaxrl.config import default_config
from jaxrl.errors import ConfigError

VARIANTS = ("sampled", "forward", "reverse", "jsd")


def get_config(arg=None):
    """arg: None or a variant."""
    if arg not in (None, *VARIANTS):
        raise ConfigError(f"distill has the variants {', '.join(VARIANTS)}, not {arg!r}")
    c = default_config()
    c.run.recipe = "distill"
    c.distill.loss = arg or "sampled"
    c.teacher.path = "runs/grpo/export"
    c.teacher.dtype = "fp32"  # as small models on the CPU compute
    c.model.path = "runs/grpo/warm_start/export"

    c.data.path = ("jaxrl://arith/train.jsonl",)
    c.data.prompts_per_step = 16
    c.data.max_prompt_tokens = 40

    c.rollout.engine = "jax"  # for a model this small
    c.rollout.group_size = 8
    c.rollout.max_new_tokens = 72
    c.rollout.prompt_lengths = (40,)
    c.rollout.slots = 128
    c.rollout.compaction = False

    c.reward.functions = ("boxed",)  # a metric here, and what evaluation counts
    c.optimizer.lr = 1e-3
    c.optimizer.warmup_steps = 2

    c.train.steps = 20
    c.train.row_lengths = (256,)
    c.train.tokens_per_microbatch = 2048
    c.train.row_counts = 1

    c.eval.sets = ("test=jaxrl://arith/test.jsonl",)
    c.eval.every_steps = 2
    return c
