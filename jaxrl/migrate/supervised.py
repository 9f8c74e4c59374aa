"""Meanings of jobs that learn from rows (SFT, preferences, reward models), for the joint rules of several systems."""

from __future__ import annotations

import re

from jaxrl.migrate import common
from jaxrl.migrate.table import Joint, Migration

UNBOUND = 8192  # tokens of a sequence where the source has no bound


def recipe(name: str) -> Joint:
    """Returns the rule that sets the recipe."""
    return Joint("job", (), lambda m: m.set("run.recipe", name))


def sequence(m: Migration, longest: int | None, *keys: str, cut: str = "") -> None:
    """Sets the bound of prompt and completion together. cut: SFT alone, what becomes of a longer row (truncate,
    filter)."""
    if not longest:
        longest = UNBOUND
        m.needs(
            f"{keys[0]} is not set, and rows have no bound there: data.max_prompt_tokens and rollout.max_new_tokens "
            "are "
            f"written for {UNBOUND} tokens; give the length of your longest row"
        )
    if longest < 2:
        raise m.wrong(keys[0], "at least 2")
    m.set("data.max_prompt_tokens", longest - 1, *keys)
    m.set("rollout.max_new_tokens", longest - 1, *keys)
    m.set("train.max_sequence_tokens", longest, *keys)
    if cut:
        m.set("data.overlong_completion", cut, *keys)
    m.facts["longest prompt and completion"] = longest


def model_path(m: Migration, key: str) -> None:
    """Sets the model, or asks for it."""
    if m.text(key):
        m.set("model.path", m.text(key), key)
    else:
        m.needs(f"model.path: {key} is not set")


def rows(m: Migration, count: int, what: str, *keys: str) -> None:
    """Sets the rows of a step, which is an optimizer step."""
    if count < 1:
        raise m.wrong(keys[0], "at least 1")
    m.set("data.prompts_per_step", count, *keys)
    m.facts[f"{what} per optimizer step"] = count


def memory(m: Migration, sequences: int, *keys: str) -> None:
    """Sets the microbatch of so many sequences of the longest kind."""
    m.set("train.tokens_per_microbatch", max(sequences, 1) * m.options["train.max_sequence_tokens"][0], *keys)


def no_loss_of_held_out_rows(m: Migration, *keys: str) -> None:
    """Says that SFT has no evaluation of the source's kind."""
    m.set("eval.after", False, *keys)
    m.set("eval.before", False, *keys)
    m.lacks(
        next((key for key in keys if m.given(key)), keys[0]),
        "the loss on held-out rows is not measured: eval.sets with reward.functions samples completions and scores "
        "them",
    )


def mixture(m: Migration, sets: list[dict], *keys: str) -> None:
    """Sets one data set, or several, mixed by weight. sets: path, weight, split and columns of each."""
    if len(sets) == 1:
        for option, value in sets[0].items():
            if option != "weight":
                m.set(f"data.{option}", (value,) if option == "path" else value, *keys)
        return
    names: list[str] = []
    for table in sets:
        stem = re.sub(r"\W", "_", table["path"].rstrip("/").rpartition("/")[2], flags=re.ASCII) or "data"
        names.append(stem if stem not in names else f"{stem}_{len(names)}")
        m.set(f"data.sources.{names[-1]}", table, *keys)
    m.facts["data"] = ", ".join(f"{table['path']} {table['weight']:g}" for table in sets)


def without_rewards(m: Migration, names: tuple[str, ...]) -> None:
    """Leaves out what is made of rewards, and has no effect beside a teacher. names: options of `algorithm` to keep."""
    common.leave_out_temperature(m)
    for option in list(m.options):
        table, _, name = option.partition(".")
        if table == "critic" or table == "algorithm" and name.partition(".")[0] not in names:
            del m.options[option]
    m.options.pop("mesh.roles.reference", None)
    for fact in ("advantage", "KL to the reference"):
        m.facts.pop(fact, None)
