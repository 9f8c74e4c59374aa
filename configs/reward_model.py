"""A reward model on the embedded task, and GRPO that learns from it alone.

Command:   jaxrl train --config=configs/reward_model.py
           jaxrl train --config=configs/reward_model.py:rl
Hardware:  any; two CPU cores.
Expected:  76 % of held-out pairs in the right order; then 20.1 -> 88.1 % held-out accuracy (seed 0; docs/guides/reward_models.md).

Each pair is a right completion, worked out, and a wrong one (a box alone, one slip on the way, or a wrong box). The second
command starts from the same warm start and sees the score of the first one's export; whether a completion is right (`boxed`)
is shown beside it with weight 0.

Variants:  weak (24 pairs), rl_weak (GRPO with that one), tiny (a few seconds, learns next to nothing; for tests).
"""

from jaxrl.config import default_config, load_config
from jaxrl.errors import ConfigError

NAMES = (None, "weak", "rl", "rl_weak", "tiny")


def get_config(arg=None):
    """arg: one of NAMES."""
    if arg not in NAMES:
        raise ConfigError(f"reward_model has the variants {', '.join(NAMES[1:])}, not {arg!r}")
    return policy(arg) if arg in ("rl", "rl_weak") else scorer(arg)


def scorer(arg):
    c, tiny = default_config(), arg == "tiny"
    c.run.recipe = "reward_model"
    c.run.warm_start = "grpo_sft" + ":tiny" * tiny
    c.data.path = ("jaxrl://arith/compared.jsonl",)
    c.data.prompts_per_step = 32
    c.data.max_prompt_tokens = 40
    c.rollout.max_new_tokens = 72
    c.optimizer.lr = 1e-3
    c.optimizer.schedule = "cosine"
    c.optimizer.warmup_steps = 10
    c.train.steps = 400
    c.train.row_lengths = (256,)
    c.train.tokens_per_microbatch = 2048
    c.train.row_counts = 1
    c.eval.sets = ("test=jaxrl://arith/compared_test.jsonl",)
    c.eval.every_steps = 100
    c.checkpoint.every_steps = 0
    if arg == "weak":
        c.data.max_rows, c.data.prompts_per_step, c.train.steps = 24, 24, 40
    if tiny:
        c.data.max_rows, c.eval.max_rows, c.data.prompts_per_step, c.train.steps = 64, 16, 8, 3
    return c


def policy(arg):
    c = load_config("grpo")
    c.run.dir = ""  # runs/reward_model_rl
    c.reward.model.path = "runs/reward_model" + arg.removeprefix("rl") + "/export"
    c.reward.model.dtype = "fp32"
    c.reward.weights = (0.0,)
    return c
