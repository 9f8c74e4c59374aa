"""Python objects that a caller passes to jaxrl.train besides the config: rows, a tokenizer, reward functions,
environments, tools, callbacks; and the calls of those callbacks.

jaxrl.api makes PythonInputs, a Session carries them, run.setup reads them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl.data import GIVEN
from jaxrl.errors import ConfigError, RunStopped, type_of


class PythonInputs(NamedTuple):
    """Objects of jaxrl.train that replace options of the config; None where the option applies.

    Attributes:
      eval: set name -> rows.
      comparison: (spec, job, step) -> object that predicts the run and records what it measures (planning.comparison).
    """

    rewards: Sequence | None = None
    data: Any = None
    eval: Mapping[str, Any] | None = None
    tokenizer: Any = None
    callbacks: tuple[Callable, ...] = ()
    comparison: Callable | None = None
    env: Callable | None = None
    tools: Sequence[Callable | str] | None = None


class Step:
    """The argument of a callback, which is called after each line of metrics.

    Attributes:
      number: completed steps; 0 for the evaluation before the first step.
      total: steps the run aims at.
      metrics: name -> float, as in metrics.jsonl.
      samples: records of the step's training completions, as in rollouts/ (prompt, completion, answer, score, reward,
        advantage, tokens ...); [] in SFT and for step 0.
      run_dir: the run's directory.
    """

    def __init__(self, number: int, total: int, metrics: dict[str, float], samples: list[dict], run_dir: str):
        self.number, self.total, self.metrics, self.samples, self.run_dir = number, total, metrics, samples, run_dir
        self.stopped = ""

    def stop(self, reason: str = "a callback") -> None:
        """Ends the run after this step as if it were the last one: evaluation, checkpoint and export follow."""
        self.stopped = self.stopped or str(reason) or "a callback"


def run_callbacks(session, metrics: dict[str, float], records=()) -> str:
    """Calls the run's callbacks on process 0. Collective.

    Returns, on every process, the reason for which a callback ends the run, or "". Raises RunStopped on every process
    if a callback fails.
    """
    step = Step(session.step, session.total_steps, metrics, list(records), str(session.run_dir))
    session.together("callbacks", lambda: call_each(session.inputs.callbacks if session.peers.first else (), step))
    return session.decide("end?", lambda: step.stopped)


def call_each(callbacks, step: Step) -> bool:
    """Calls callbacks in order; returns True. Raises RunStopped if one fails, naming its file and line."""
    for callback in callbacks:
        try:
            callback(step)
        except Exception as e:  # it is the user's code
            name = getattr(callback, "__name__", type(callback).__name__)
            frame = traceback.extract_tb(e.__traceback__)[-1]
            raise RunStopped(f"the callback {name!r} failed after step {step.number}: {type(e).__name__}: {e} (line "
                             f"{frame.lineno} of {frame.filename}). Fix it and repeat the call to resume from the "
                             "latest checkpoint") from e
    return True


def apply_python_inputs(config, model=None, data=None, rewards=None, tokenizer=None, eval=None, callbacks=(), env=None,
                        tools=None) -> PythonInputs:
    """Sets the options that the arguments of jaxrl.train replace, in place, and returns the objects among them.

    Raises ConfigError for an argument of the wrong type.
    """
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
        config.model.tokenizer, tokenizer = (GIVEN + "tokenizer", tokenizer) if own else (tokenizer, None)
    if data is not None:
        if isinstance(data, str):
            config.data.path, data = (data,), None
        else:
            config.data.path = (GIVEN + "data",)
    if eval is not None:
        eval = dict(eval) if isinstance(eval, Mapping) else {"eval": eval}
        config.eval.sets = tuple(f"{name}={rows if isinstance(rows, str) else GIVEN + str(name)}"
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
    callbacks = (callbacks,) if callable(callbacks) else tuple(callbacks)
    for callback in callbacks:
        if not callable(callback):
            raise ConfigError(f"callbacks holds {type_of(callback)}: expected functions that take one step")
    return PythonInputs(rewards, data, eval, tokenizer, callbacks, env=env, tools=tools)


def _name(function) -> str:
    return function if isinstance(function, str) else getattr(function, "__name__", repr(function))
