"""GRPO on the embedded task: a small decoder from scratch, a short SFT warm start, then reinforcement learning.

Command:   jaxrl train --config=configs/grpo.py
Hardware:  any; two CPU cores.
Expected:  docs/measurements/quickstart.md.

The reward reads the final box alone. The warm start ends on demonstrations that give only the boxed answer, and is mostly wrong; the
policy discovers that working pays. `reverse` problems, almost absent from the demonstrations, stay a failing class.

Variants:  tiny (a few seconds, learns next to nothing; for tests and notebooks/custom_loss.ipynb).
"""

from jaxrl.config import default_config
from jaxrl.errors import ConfigError


def get_config(arg=None):
    """arg: None or 'tiny'."""
    if arg not in (None, "tiny"):
        raise ConfigError(f"grpo has the variant 'tiny', not {arg!r}")
    c = default_config()
    c.run.recipe = "rl"
    c.run.warm_start = "grpo_sft" + (f":{arg}" if arg else "")

    c.data.path = ("jaxrl://arith/train.jsonl",)
    c.data.prompts_per_step = 16
    c.data.max_prompt_tokens = 40

    c.rollout.engine = "jax"  # for a model this small
    c.rollout.group_size = 8
    c.rollout.max_new_tokens = 72
    c.rollout.prompt_lengths = (40,)  # one length: every further one is compiled
    c.rollout.slots = 128
    c.rollout.compaction = False  # another slot count is another program, and a tiny model gains little from it

    c.reward.functions = ("boxed",)
    c.optimizer.lr = 2e-4
    c.optimizer.warmup_steps = 10

    c.train.steps = 40
    c.train.row_lengths = (256,)
    c.train.tokens_per_microbatch = 2048
    c.train.row_counts = 1  # the quarter-size program would take longer to compile than it saves

    c.eval.sets = ("test=jaxrl://arith/test.jsonl",)
    c.eval.every_steps = 20
    if arg == "tiny":
        c.data.prompts_per_step, c.rollout.group_size, c.rollout.slots = 4, 4, 16
        c.train.steps = 3
        c.train.tokens_per_microbatch = 1024
        c.eval.every_steps, c.eval.max_rows = 0, 16
        c.reward.workers = 1
        c.checkpoint.every_steps = 2
    return c
