"""What reward functions of TRL and open-r1 become: built-in rewards, calls of your own, stubs. See systems/trl.py."""

from __future__ import annotations

import keyword

from jaxrl.migrate import common, episodes
from jaxrl.migrate.table import Migration

ADAPTER = '''"""Reward functions of TRL, called as it calls them: whole batches, conversations where prompts are."""

import importlib
import os
import sys

sys.path.insert(0, os.getcwd())


def _called(place, prompts, completions, columns):
    module, _, name = place.rpartition(".")
    spoken = bool(prompts) and not isinstance(prompts[0], str)
    said = [[{"role": "assistant", "content": c}] for c in completions] if spoken else list(completions)
    return getattr(importlib.import_module(module), name)(prompts=prompts, completions=said, **columns)
'''
ONE = """

def {own}(prompts, completions, **columns):
    columns.setdefault("solution", columns.get("answer"))
    return _called({place!r}, prompts, completions, columns)
"""
UNKNOWN = """

def {own}(prompts, completions, **columns):
    raise RuntimeError("{own}: write this reward; it returns a number per completion")
"""

CHARACTERS = {"unit": "characters"}
NAMED = {  # name there -> (reward here, its arguments, those by keys of the source)
    "accuracy_reward": ("math", {}, {}),
    "accuracy": ("math", {}, {}),
    "reasoning_accuracy_reward": ("math", {}, {}),
    "think_format_reward": ("think_format", {}, {}),
    "format": ("answer_format", {}, {}),
    "tag_count": ("tag_count", {}, {}),
    "reasoning_steps": ("reasoning_steps", {}, {}),
    "length": ("length_ranked", CHARACTERS, {}),
    "cosine": ("cosine", {**CHARACTERS, "bounded": False}, {"max_length": "cosine_max_len"}),
    "repetition_penalty": ("repetition", {}, {"size": "repetition_n_grams", "penalty": "repetition_max_penalty"}),
    "soft_overlong_punishment": (
        "soft_overlong",
        {},
        {"max_length": "max_completion_len", "buffer": "soft_punish_cache"},
    ),
    "get_soft_overlong_punishment": ("soft_overlong", {"max_length": 1280, "buffer": 256}, {}),
}
CODE_FORMAT = r"<think>\n.*?\n</think>\n<answer>\n.*?```{language}.*?```.*?\n</answer>"


def rewards(m: Migration):
    """Sets reward.functions by reward_funcs, with reward.arguments.*, reward.format_pattern, reward.weights and
    reward.model.path.

    Names of TRL and open-r1 are built-in rewards; places of functions (`module.name`) are called from NAME_reward.py
    beside the config, which the user is told; names with a slash are reward models, of which a second one refuses the
    job; other names, and none at all, are stubs that the user is asked to write. Functions of one name (`a.f` and
    `b.f`) are `f` and `b_f` in that file. Rewards that are one here (accuracy and accuracy_reward are math) are one
    function with the sum of their weights. Weights that do not fit the functions are recorded as not carried over."""
    names, file = [str(n) for n in m.list("reward_funcs")], f"{m.name}_reward.py"
    text, functions, weights = "", [], m.list("reward_weights")
    names, weights = _model(m, names, weights)
    places: dict[str, str] = {}  # name there -> function in the file
    for name in names:
        if name in NAMED:
            functions.append(_named(m, name))
        elif name == "code_format":
            functions.append("format")
            pattern = CODE_FORMAT.replace("{language}", m.text("code_language"))
            m.set("reward.format_pattern", pattern, "reward_funcs", "code_language")
        else:
            new = name not in places
            own = places.setdefault(name, _own(name, {*places.values(), *USED}))
            functions.append(f"./{file}:{own}")
            if new:
                text += ONE.format(own=own, place=name) if "." in name else UNKNOWN.format(own=own)
            if new and "." not in name:
                m.needs(f"{file}: write the reward {ascii(name)}; until then the run stops at its start")
    if text:
        m.files[file] = ADAPTER + text
        m.needs(f"{file} calls your reward functions in a process without jax, from the folder where you start")
    if not names and "reward.model.path" not in m.options:
        common.reward_stub(m, "the run", "reward_funcs is not set: the script has it in Python", "reward_funcs")
        return
    _weighed(m, names, functions, weights)


USED = ("_called", "importlib", "os", "sys")  # names of ADAPTER


def _own(name: str, taken: set[str]) -> str:
    """Returns the name of a function for a reward of the source: its last part if that is free, else more of it."""
    whole = "".join(c if c.isalnum() and c.isascii() else "_" for c in name) or "reward"
    last = whole if "." not in name else whole[name.rindex(".") + 1 :]
    valid = [n if n.isidentifier() and not keyword.iskeyword(n) else f"reward_{n}" for n in (last, whole)]
    return next(n for n in (*valid, *(f"{valid[1]}_{i}" for i in range(2, len(taken) + 3))) if n not in taken)


def _weighed(m: Migration, names: list[str], functions: list[str], weights: list) -> None:
    """Sets reward.functions, each function once, and reward.weights where they are given or a function stands for
    several rewards: then it has the sum of their weights."""
    once = tuple(dict.fromkeys(functions))
    m.set("reward.functions", once, "reward_funcs")
    if weights and len(weights) != len(functions):
        m.lacks("reward_weights", f"{len(weights)} weights for {len(functions)} functions that are carried over")
        weights = []
    if len(once) < len(functions):
        twice = [n for n, f in zip(names, functions, strict=True) if functions.count(f) > 1]
        m.differs(f"{', '.join(twice)}: one reward here has the sum of the weights of those that are the same")
    if weights or len(once) < len(functions):
        each = [float(w) for w in weights or [1] * len(functions)]
        sums = tuple(sum(w for f, w in zip(functions, each, strict=True) if f == one) for one in once)
        m.set("reward.weights", sums, "reward_weights" if weights else "reward_funcs")


def _model(m: Migration, names: list[str], weights: list) -> tuple[list[str], list]:
    """Sets the reward model, which TRL has among its functions, in a script before them. Returns the others and their
    weights."""
    key = "reward_model_name_or_path"
    given = [m.text(key)] if m.text(key) else []
    found, key = ([*given, *(n for n in names if "/" in n)], key if given else "reward_funcs")
    if not found:
        return names, weights
    m.set("reward.model.path", found[0], key)
    if len(found) > 1:
        m.lacks("reward_funcs", f"{', '.join(found)}: one reward model is asked", refuse=True)
    every = [*given, *names]
    if len(weights) == len(every):
        m.set("reward.model.weight", float(weights[every.index(found[0])]), "reward_weights")
        weights = [w for n, w in zip(every, weights, strict=True) if n not in found]
    return [n for n in names if "/" not in n], weights


def _named(m: Migration, name: str) -> str:
    """Returns the built-in reward of a name, with its arguments set."""
    ours, fixed, by_key = NAMED[name]
    found = {**fixed, **{argument: m.number(key) for argument, key in by_key.items()}}
    keys = ("reward_funcs", *by_key.values())
    if ours == "cosine":
        for argument in ("wrong", "right"):
            ends = [f"cosine_{end}_value_{'wrong' if argument == 'wrong' else 'correct'}" for end in ("min", "max")]
            found[argument] = [float(m.number(key)) for key in ends]
            keys = (*keys, *ends)
    if found:
        m.set(f"reward.arguments.{ours}", found, *keys)
    if ours == "length_ranked":
        m.differs("open-r1's `length` compares all completions of a call, here (as in the paper) those of a prompt")
    if ours in ("length_ranked", "cosine"):
        m.differs(f"{name}: an answer that cannot be read as mathematics is compared as text here, and skipped there")
    return ours


def turns(m: Migration):
    """Sets env.max_turns by max_tool_calling_iterations and, for tools, a rollout_func or an environment_factory of a
    script, an episode that the user is asked to write (`episodes.episode`)."""
    found = [
        (key, m.text(key))
        for key in ("tools", "rollout_func", "environment_factory")
        if m.text(key) not in ("", "None")
    ]
    most = m.integer("max_tool_calling_iterations")
    if most:
        m.set("env.max_turns", most, "max_tool_calling_iterations")
    if not found:
        return
    if most:
        m.options.pop("env.max_turns")
    episodes.episode(m, f"the script's {found[0][0]}", found, most, found[0][0], "max_tool_calling_iterations")
    m.needs(
        "env.tools takes TRL's tools as they are, typed functions with a docstring, as module:name or ./file.py:name"
    )
