"""Kinds of job, as rows: what the rest of jaxrl has to know of each of them, so that nothing else asks for a recipe's name.

A new recipe is a file with `run(spec, given)`, a row here, and its options in `schema`.
"""

from __future__ import annotations

from typing import NamedTuple


class Recipe(NamedTuple):
    """One kind of job."""

    module: str              # of its run(spec, given)
    lr: float                # optimizer.lr where nobody sets it
    samples: bool            # it learns from completions that an engine samples and rewards score; else from those in the rows
    modes: tuple[str, ...]   # values of run.mode that it has
    roles: tuple[str, ...] = ("policy",)  # parameters and programs that mesh.roles may place
    starts_others: bool = False  # its export may be another job's run.warm_start


# Learning rates: supervised learning on a pretrained model takes 2e-5, as TRL does; reinforcement learning breaks there.
RECIPES = {
    "rl": Recipe("jaxrl.recipes.rl", 1e-6, samples=True, modes=("train", "eval", "parity", "plan"),
                 roles=("policy", "reference", "critic", "sampler")),
    "sft": Recipe("jaxrl.recipes.sft", 2e-5, samples=False, modes=("train", "eval", "plan"), starts_others=True),
}


def recipe_of(config) -> Recipe:
    """The row of a config's run.recipe."""
    return RECIPES[config.run.recipe]
