"""Other jobs on questions about pictures: a policy that sees learns from pairs (DPO), a reward model, or a teacher.

Command:   jaxrl train --config=configs/vision_jobs.py:dpo
           jaxrl train --config=configs/vision_jobs.py:reward_model
           jaxrl train --config=configs/vision_jobs.py:rl
           jaxrl train --config=configs/vision_sft.py     # the teacher of the next
           jaxrl train --config=configs/vision_jobs.py:distill
Hardware:  any; two CPU cores.
Expected:  docs/guides/vision.md.

All start from configs/vision_sft.py:short, which answers many questions wrong. A pair is a right and a wrong completion
of one form, so that only the picture tells them apart.

The reward model learns from the same pairs; `rl` starts from the same warm start and sees the score of the reward model's export,
whether a completion is right (`boxed`) is logged as well, with weight 0.

Variants:  dpo, reward_model, rl, distill, and each with '_tiny' appended (a few seconds, learns next to nothing; for tests).
"""

from jaxrl.config import default_config, load_config
from jaxrl.errors import ConfigError

JOBS = ("dpo", "reward_model", "rl", "distill")


def get_config(arg=None):
    """arg: one of JOBS, optionally with '_tiny' appended."""
    job, tiny = (arg or "").removesuffix("_tiny"), (arg or "").endswith("_tiny")
    if job not in JOBS:
        raise ConfigError(f"vision_jobs has the variants {', '.join(JOBS)}, optionally with '_tiny' appended, not {arg!r}")
    if job == "rl":
        return rl(tiny)
    c = default_config()
    c.run.warm_start = "vision_sft:" + ("tiny" if tiny else "short")
    c.data.image_min_pixels = c.data.image_max_pixels = 24 * 24  # as the warm start
    c.data.prompts_per_step = 16
    c.data.max_prompt_tokens = 32
    c.rollout.max_new_tokens = 12
    c.optimizer.warmup_steps = 10
    c.train.row_lengths = (256,)
    c.train.tokens_per_microbatch = 2048
    c.train.row_counts = 1
    c.eval.controls = ("blank", "swapped")
    {"dpo": dpo, "reward_model": reward_model, "distill": distill}[job](c)
    if tiny:
        c.data.prompts_per_step, c.data.max_rows = 4, 32
        c.train.steps = 3
        c.eval.every_steps, c.eval.max_rows = 0, 16
        c.reward.workers = 1
        c.checkpoint.every_steps = 2
    return c


def dpo(c):
    c.run.recipe = "preference"
    c.data.path = ("jaxrl://shapes/pairs.parquet",)
    c.preference.loss = ("dpo",)
    c.preference.beta = 0.1
    c.reference.dtype = "fp32"  # as the policy is computed on CPUs: it begins at its reference exactly
    c.optimizer.lr = 1e-4
    c.train.steps = 75
    c.eval.sets = ("pairs=jaxrl://shapes/pairs_test.parquet", "test=jaxrl://shapes/test.parquet")
    c.eval.every_steps = 25
    completes(c)


def reward_model(c):
    c.run.recipe = "reward_model"
    c.data.path = ("jaxrl://shapes/pairs.parquet",)
    c.data.prompts_per_step = 32
    c.optimizer.lr = 3e-4
    c.optimizer.schedule = "cosine"
    c.train.steps = 400
    c.eval.sets = ("pairs=jaxrl://shapes/pairs_test.parquet",)
    c.eval.every_steps = 100


def distill(c):
    c.run.recipe = "distill"
    c.distill.loss = "sampled"
    c.teacher.path = "runs/vision_sft/export"
    c.teacher.dtype = "fp32"  # as small models on the CPU compute
    c.data.path = ("jaxrl://shapes/train.parquet",)
    c.data.prompts_per_step = 32
    c.rollout.group_size = 4
    c.optimizer.lr = 3e-4
    c.train.steps = 40
    c.eval.sets = ("test=jaxrl://shapes/test.parquet",)
    c.eval.every_steps = 20
    completes(c)


def completes(c):
    """Sets the sampler, and the reward that says which completions are right."""
    c.reward.functions = ("boxed",)
    c.rollout.engine = "jax"
    c.rollout.prompt_lengths = (32,)
    c.rollout.slots = 128
    c.rollout.compaction = False


def rl(tiny):
    c = load_config("vision" + ":tiny" * tiny)
    c.run.dir = ""  # runs/vision_jobs_rl
    c.run.warm_start = "vision_sft:" + ("tiny" if tiny else "short")
    c.reward.model.path = f"runs/vision_jobs_reward_model{'_tiny' * tiny}/export"
    c.reward.model.dtype = "fp32"
    c.reward.weights = (0.0,)
    return c
