"""Checks of reward models' options: the role in rl (reward.model.*) and the recipe (reward_model.*)."""

from __future__ import annotations

import re

from jaxrl.config.registry import recipe_of
from jaxrl.resolve.checks.algorithm import resolved_algorithm

PART = "reward_model"  # the name that its score has among the rewards


def reward_models(cfg) -> list[str]:
    """Returns every problem of reward models, and of the names of score and value heads: field, value, remedy."""
    out = [f"{name}={value!r}: a module's name in HF's files, such as score" for name, value in
           (("reward.model.head", cfg.reward.model.head), ("reward_model.head", cfg.reward_model.head),
            ("critic.head", cfg.critic.head)) if not re.fullmatch(r"\w+(\.\w+)*", value)]
    return out + (_trained(cfg) if recipe_of(cfg).scores else []) + _used(cfg)


def _trained(cfg) -> list[str]:
    """Returns the problems of run.recipe=reward_model."""
    o = cfg.reward_model
    if o.kind == "steps" and (not o.steps_column or not o.labels_column or o.steps_column == o.labels_column):
        return [f"reward_model.steps_column={o.steps_column!r}, reward_model.labels_column={o.labels_column!r}: two "
                "columns must be named"]
    return []


def _used(cfg) -> list[str]:
    """Returns the problems of reward.model.*."""
    o, out = cfg.reward.model, []
    if not o.path or not recipe_of(cfg).samples:
        return []
    row, a = resolved_algorithm(cfg), cfg.algorithm
    named = {f.rpartition(":")[2] for f in (*cfg.reward.functions, *cfg.eval.rewards)}
    if PART in named:
        out.append(f"reward.functions={cfg.reward.functions}: {PART} is the name of reward.model's score; rename the "
                   "function")
    if row["dynamic_sampling"] != "off" and a.keep_group in ("", PART):
        mode = row["dynamic_sampling"]
        out.append(f"algorithm.dynamic_sampling={mode} with reward.model.path={o.path!r}: groups are kept or left out "
                   "before the reward model scores a batch; name a function of reward.functions in "
                   "algorithm.keep_group, or set algorithm.dynamic_sampling=off")
    if row["advantage_mean"] == "greedy":
        out.append(f"algorithm.advantage_mean=greedy with reward.model.path={o.path!r}: greedy answers are scored by "
                   "functions alone; choose group, batch, leave_one_out or none")
    if cfg.run.mode == "plan":
        out.append(f"run.mode=plan with reward.model.path={o.path!r}: the plan does not count a reward model; leave it "
                   "out and keep room for its weights and one forward pass")
    return out
