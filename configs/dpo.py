"""DPO on the embedded task: the warm start of configs/grpo.py learns from pairs of its own completions, no engine in between.

Command:   jaxrl train --config=configs/dpo.py
Hardware:  any; two CPU cores.
Expected:  docs/guides/preferences.md.

The pairs are completions that the warm start (seed 0) sampled, eight to a prompt, judged by `boxed`; docs/guides/preferences.md has the commands
that made them. Half of the right completions are guesses, which no rule tells from wrong ones.

Variants:  tiny (a few seconds, learns next to nothing; for tests).
"""

from jaxrl.config import default_config
from jaxrl.errors import ConfigError


def get_config(arg=None):
    """arg: None or 'tiny'."""
    if arg not in (None, "tiny"):
        raise ConfigError(f"dpo has the variant 'tiny', not {arg!r}")
    c = default_config()
    c.run.recipe = "preference"
    c.run.warm_start = "grpo_sft" + (f":{arg}" if arg else "")

    c.data.path = ("jaxrl://arith/pairs.jsonl",)
    c.data.prompts_per_step = 16
    c.data.max_prompt_tokens = 40
    c.rollout.max_new_tokens = 72
    c.preference.loss = ("dpo",)
    c.preference.beta = 0.1
    c.reference.dtype = "fp32"  # as the policy is computed on CPUs: it begins at its reference exactly

    c.optimizer.lr = 1e-4
    c.optimizer.warmup_steps = 10

    c.train.steps = 80
    c.train.row_lengths = (192,)  # a prompt and both completions
    c.train.tokens_per_microbatch = 1536
    c.train.row_counts = 1

    c.eval.sets = ("pairs=jaxrl://arith/pairs_test.jsonl", "test=jaxrl://arith/test.jsonl")
    c.eval.every_steps = 20
    c.reward.functions = ("boxed",)
    c.rollout.engine = "jax"  # completes the held-out prompts
    c.rollout.prompt_lengths = (40,)
    c.rollout.slots = 128
    c.rollout.compaction = False
    if arg == "tiny":
        c.data.prompts_per_step, c.data.max_rows, c.rollout.slots = 4, 32, 16
        c.train.steps = 3
        c.eval.every_steps, c.eval.max_rows = 0, 16
        c.reward.workers = 1
        c.checkpoint.every_steps = 2
    return c
