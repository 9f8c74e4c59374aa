"""Kinds of job, as rows: what the rest of jaxrl has to know of each of them, so that nothing else asks
for a recipe's name.

A new recipe is a file with `run(spec, given)`, a row here, and its options in `schema`. One of a user's own has its row
in its file: run.recipe=./my_file.py:RECIPE; its options are below `user`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxrl.config.user_code import imported


class Recipe(NamedTuple):
    """One kind of job: a row of RECIPES, or the object that run.recipe=./my_file.py:NAME names."""

    run: str | Callable      # run(spec, given), or the module that has it
    lr: float                # optimizer.lr where nobody sets it
    # it learns from completions that an engine samples and rewards score; else from those in the rows
    samples: bool
    modes: tuple[str, ...]   # values of run.mode that it has
    roles: tuple[str, ...] = ("policy",)  # parameters and programs that mesh.roles may place
    starts_others: bool = False  # its export may be another job's run.warm_start
    pairs: bool = False  # its rows hold a chosen and a rejected completion, or one with a label (data/pairs.py)
    judged: bool = True      # rewards decide what is learnt from samples; else they are metrics
    sampled: str = ""        # the option that says which share of prompts is sampled; the other rows bring completions
    again: str = ""  # the package of the modules with run(spec, given) of the modes that compute recorded steps again
    scores: bool = False  # its model has a score head, read behind the last token: a row has a slot more


# Learning rates: supervised learning on a pretrained model takes 2e-5, as TRL does; reinforcement learning breaks
# there.
RECIPES = {
    "rl": Recipe("jaxrl.recipes.rl", 1e-6, samples=True, modes=("train", "eval", "parity", "plan", "replay", "explain",
                                                             "certify"),
                 roles=("policy", "reference", "critic", "sampler", "reward_model"), again="jaxrl.replay"),
    "preference": Recipe("jaxrl.recipes.preference", 1e-6, samples=False, modes=("train", "eval"),
                         roles=("policy", "reference"), pairs=True),
    "distill": Recipe("jaxrl.recipes.distill", 1e-6, samples=True, modes=("train", "eval"),
                      roles=("policy", "teacher", "sampler"), judged=False, sampled="distill.on_policy"),
    "sft": Recipe("jaxrl.recipes.sft", 2e-5, samples=False, modes=("train", "eval", "plan"), starts_others=True),
    "reward_model": Recipe("jaxrl.recipes.reward_model", 2e-5, samples=False, modes=("train",), pairs=True,
                           scores=True),
}

BUILT_IN = frozenset(RECIPES)  # without those that a program adds


def recipe_of(config) -> Recipe:
    """Returns the registry entry of a config's run.recipe. Raises KeyError for an unknown name; for an import path what
    its import raises."""
    name = config.run.recipe
    return imported(name) if ":" in name else RECIPES[name]


def from_rows(config) -> bool:
    """Returns whether a config's job learns from completions that stand in the rows, be it for a part of them."""
    recipe = recipe_of(config)
    group, _, name = recipe.sampled.partition(".")
    return not recipe.samples or bool(name) and config[group][name] < 1


def sequences(config) -> int:
    """Returns the number of sequences of a step: completions for jobs that sample, else rows (a pair counts once).

    Of a job that samples for a part of its prompts (distill.on_policy), the completions of these and the other rows.
    """
    recipe, size = recipe_of(config), config.data.prompts_per_step
    if not recipe.samples:
        return size
    group, _, name = recipe.sampled.partition(".")
    drawn = round(config[group][name] * size) if name else size
    return drawn * config.rollout.group_size + size - drawn


def short_name(recipe: str) -> str:
    """Returns rl for "rl", my_file for "./folder/my_file.py:RECIPE", module for "package.module:RECIPE"."""
    where = recipe.partition(":")[0]
    return Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]
