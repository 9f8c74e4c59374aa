"""Names of reward functions. Standard library only: workers import this file."""

from __future__ import annotations

from collections.abc import Callable

from jaxrl.rewards import builtin

_FUNCTIONS: dict[str, Callable] = {
    "math": builtin.math_reward,
    "boxed": builtin.boxed_reward,
    "exact": builtin.exact_reward,
    "choice": builtin.choice_reward,
    "format": builtin.format_reward,
}


def register_reward(name: str):
    """Decorator: makes a reward function known as `name` in `reward.functions`.

    The function takes (prompt, completion, **columns) for one completion, or (prompts, completions, **columns) for a
    whole batch, sync or async, and may name further arguments: token_ids, finish, group, sample, user (config.user).
    It returns a float, None (this function has nothing to say about this row), or (float, {metric: number}); in a
    batch a list of these. It runs in worker processes, so it must be importable there.
    """
    def add(fn):
        known = _FUNCTIONS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (fn.__module__, fn.__qualname__):
            raise ValueError(f"reward {name!r} is registered already, by {known.__module__}:{known.__qualname__}")
        _FUNCTIONS[name] = fn
        return fn
    return add


def registered() -> dict[str, Callable]:
    """name -> function: the built-in ones and what this process registered."""
    return dict(_FUNCTIONS)
