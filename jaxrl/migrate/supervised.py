"""Meanings of jobs that learn from rows (SFT, preferences, reward models), for the joint rules of several systems."""

from __future__ import annotations

import re

from jaxrl.migrate import common
from jaxrl.migrate.table import Joint, Migration

UNBOUND = 8192  # tokens of a sequence where the source has no bound


def recipe(name: str) -> Joint:
    """Returns the rule that sets run.recipe to `name`."""
    return Joint("job", (), lambda m: m.set("run.recipe", name))


def sequence(m: Migration, longest: int | None, *keys: str, cut: str = "") -> None:
    """Sets the bound of prompt and completion together: train.max_sequence_tokens=longest, and data.max_prompt_tokens
    and rollout.max_new_tokens one less. Without a bound (None, 0) it is UNBOUND, and the user is asked for one.

    cut: for SFT alone, data.overlong_completion: what becomes of a longer row (truncate, filter); "" = not set. Raises
    Unreadable for fewer than 2 tokens."""
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
    """Sets model.path by the key; where that is null or empty the user is asked for it."""
    if m.text(key):
        m.set("model.path", m.text(key), key)
    else:
        m.needs(f"model.path: {key} is not set")


def rows(m: Migration, count: int, what: str, *keys: str) -> None:
    """Sets data.prompts_per_step: the rows of a step, which is an optimizer step. what: their name, for the report's
    facts. Raises Unreadable for a count below 1."""
    if count < 1:
        raise m.wrong(keys[0], "at least 1")
    m.set("data.prompts_per_step", count, *keys)
    m.facts[f"{what} per optimizer step"] = count


def memory(m: Migration, sequences: int, *keys: str) -> None:
    """Sets train.tokens_per_microbatch to so many sequences (at least 1) of train.max_sequence_tokens, which has been
    set."""
    m.set("train.tokens_per_microbatch", max(sequences, 1) * m.options["train.max_sequence_tokens"][0], *keys)


def no_loss_of_held_out_rows(m: Migration, *keys: str) -> None:
    """Sets eval.before and eval.after to False and records the first key that is set (else the first) as not carried
    over: SFT in jaxrl measures no loss on held-out rows."""
    m.set("eval.after", False, *keys)
    m.set("eval.before", False, *keys)
    m.lacks(
        next((key for key in keys if m.given(key)), keys[0]),
        "the loss on held-out rows is not measured: eval.sets with reward.functions samples completions and scores "
        "them",
    )


def mixture(m: Migration, sets: list[dict], *keys: str) -> None:
    """Sets the data sets, each a dict of path, weight, split and further options of a set. One sets data.path,
    data.split ..., without its weight; several set data.sources.NAME, mixed by weight, NAME made of the path, and a
    fact of the report."""
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
    """Removes what is made of rewards, and has no effect beside a teacher: critic.*, algorithm.* but the options in
    `names` (their first parts), mesh.roles.reference, and the report's facts of advantages and KL. An
    algorithm.temperature is recorded as not carried over."""
    common.leave_out_temperature(m)
    for option in list(m.options):
        table, _, name = option.partition(".")
        if table == "critic" or table == "algorithm" and name.partition(".")[0] not in names:
            del m.options[option]
    m.options.pop("mesh.roles.reference", None)
    for fact in ("advantage", "KL to the reference"):
        m.facts.pop(fact, None)
