"""Python objects that a caller passes to jaxrl.train besides the config: rows, a tokenizer, reward functions,
environments, tools, callbacks.

jaxrl.api makes PythonInputs, a Session carries them, run.setup reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl.data import IN_MEMORY
from jaxrl.errors import ConfigError, type_of
from jaxrl.run.callbacks import check_callbacks


class PythonInputs(NamedTuple):
    """The Python objects of jaxrl.train that replace options of the config; None where the option applies.

    Attributes:
      rewards, data, tokenizer, env, tools, callbacks: as jaxrl.train takes them.
      eval: set name -> rows.
      comparison: (spec, job, step) -> object that predicts the run and records what it measures
        (planning.comparison)."""

    rewards: Sequence | None = None
    data: Any = None
    eval: Mapping[str, Any] | None = None
    tokenizer: Any = None
    callbacks: tuple = ()
    comparison: Callable | None = None
    env: Callable | None = None
    tools: Sequence[Callable | str] | None = None


def apply_python_inputs(config, model=None, data=None, rewards=None, tokenizer=None, eval=None, callbacks=(), env=None,
                        tools=None) -> PythonInputs:
    """Sets the options that the arguments of jaxrl.train replace, in place, and returns the objects among them.

    Args:
      config: editable config. None for any argument below leaves its options alone.
      model: folder or hub id. tokenizer: folder, hub id or a tokenizer of transformers.
      data: path, or rows. eval: rows or a path, or set name -> one of them; without names the set is "eval".
      rewards: function, name or a sequence of them; reward.weights is reset. env: function or name.
      tools: function, name or a sequence of them. callbacks: see run.callbacks.

    Raises ConfigError for an argument of the wrong type, and for a model beside run.warm_start."""
    if model is not None:
        if not isinstance(model, str):
            raise ConfigError(f"model is {type_of(model)}: expected a Hugging Face folder or hub id")
        if config.run.warm_start:
            raise ConfigError(f"model={model!r} with run.warm_start={config.run.warm_start!r}, which makes the model "
                              "itself: leave one of them out (run.warm_start='')")
        config.model.path, config.model.init = model, "pretrained"
    if tokenizer is not None:
        own = not isinstance(tokenizer, str)
        if own and not (callable(tokenizer) and hasattr(tokenizer, "get_vocab")):
            raise ConfigError(f"tokenizer is {type_of(tokenizer)}: expected a folder, a hub id or a tokenizer "
                              "of transformers")
        config.model.tokenizer, tokenizer = (IN_MEMORY + "tokenizer", tokenizer) if own else (tokenizer, None)
    if data is not None:
        if isinstance(data, str):
            config.data.path, data = (data,), None
        else:
            config.data.path = (IN_MEMORY + "data",)
    if eval is not None:
        eval = dict(eval) if isinstance(eval, Mapping) else {"eval": eval}
        config.eval.sets = tuple(f"{name}={rows if isinstance(rows, str) else IN_MEMORY + str(name)}"
                                 for name, rows in eval.items())
        eval = {name: rows for name, rows in eval.items() if not isinstance(rows, str)}
    if callable(rewards) or isinstance(rewards, str):
        rewards = [rewards]
    if rewards is not None:
        config.reward.functions, config.reward.weights = tuple(map(_name, rewards)), ()
    if env is not None:
        config.env.function = _name(env)
    if tools is not None:
        tools = [tools] if callable(tools) or isinstance(tools, str) else list(tools)
        config.env.tools = tuple(map(_name, tools))
    return PythonInputs(rewards, data, eval, tokenizer, check_callbacks(callbacks), env=env, tools=tools)


def _name(function) -> str:
    return function if isinstance(function, str) else getattr(function, "__name__", repr(function))
