"""The public API: `train`, which the command line, scripts and notebooks share, and the names for a user's own loop
(OWN_LOOP; docs/reference/python.md). Nothing heavy is imported until a function needs it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from jaxrl.config.load import config_of, load_config
from jaxrl.config.registry import recipe_of, short_name
from jaxrl.config.suggest import unknown_argument
from jaxrl.errors import ConfigError

if TYPE_CHECKING:
    from ml_collections import ConfigDict

OWN_LOOP = {  # name -> module; they import jax, so each loads on first use
    "check": "jaxrl.resolve.checks.common",
    "resolve": "jaxrl.resolve.spec",
    "start_jax": "jaxrl.run.setup",
    "Session": "jaxrl.run.session",
    "open_run": "jaxrl.run.setup",
    "Roles": "jaxrl.rl.roles",
    "Rollouts": "jaxrl.rl.rollouts",
    "lay_out": "jaxrl.rl.step",
    "prepare": "jaxrl.rl.step",
    "learn": "jaxrl.rl.step",
    "fit": "jaxrl.run.fit",
    "StepResult": "jaxrl.run.fit",
}


def __getattr__(name):
    if name in OWN_LOOP:
        return getattr(importlib.import_module(OWN_LOOP[name]), name)
    raise AttributeError(f"module 'jaxrl.api' has no attribute {name!r}; it has train, {', '.join(OWN_LOOP)}")


def train(config: str | Mapping[str, Any] | ConfigDict | None = None,
          rewards: Sequence[Callable | str] | Callable | str | None = None, *, model: str | None = None,
          data: Any = None, tokenizer: Any = None, eval: Any = None,
          callbacks: Any = (),
          env: Callable | str | None = None, tools: Sequence[Callable | str] | Callable | str | None = None,
          **unknown: Never) -> dict:
    """Runs the job a config describes, in run.dir (default runs/<recipe>), and returns the content of its summary.json.

        jaxrl.train({"train.steps": 50}, model="Qwen/Qwen2.5-0.5B-Instruct", data=rows, rewards=[reward])

    Arguments override the options of the same meaning. The same call resumes; it refuses other rows or tokenizers.
    With run.mode=plan the plan is returned, with certify the verdicts of certify.json.

    Args:
      config: options by name, {"optimizer.lr": 1e-6}, on top of the defaults (GRPO's); None = the defaults; or a
        ConfigDict of `load_config` or `default_config`; or the name of a config ('grpo', 'configs/grpo.py:tiny').
      rewards: reward functions `(prompt, completion, **columns) -> float | None`, or names of built-in ones.
      data: rows to train on, a list of dicts or a datasets.Dataset; or a path or hub id.
      model: a Hugging Face folder or hub id. tokenizer: one of transformers, or a folder or hub id.
      eval: rows to evaluate, or a dict of such sets by name.
      callbacks: functions called with a `jaxrl.Step` after each line of metrics, and objects with any of the hooks
        on_step, on_evaluation, on_save, on_end; one or a sequence. Called on process 0; `step.stop()` ends the run.
      env: what an episode is, an episode function (task, chat) or a class with reset and step, or its name.
      tools: plain typed functions that the model may call, or their names.

    Raises:
      ConfigError: names field, value and remedy; every problem of the options at once, before any device work.
      RunStopped: the run had to stop, or a callback failed; repeat the call to resume from the latest checkpoint.
      TimeoutError: late completions. OSError: a disk. SystemExit: run.warm_start stopped on request. Repeat the call.
    """
    _check_call(unknown)
    from jaxrl import data as jaxrl_data
    from jaxrl import telemetry
    from jaxrl.resolve.checks import common, replay
    from jaxrl.run.python_api import apply_python_inputs

    config = config_of(config)
    if not config.run.dir:
        config.run.dir = f"runs/{short_name(config.run.recipe)}"
    inputs = apply_python_inputs(config, model, data, rewards, tokenizer, eval, callbacks, env, tools)
    replay.use_recorded_folder(config)
    common.check(config)
    if config.run.mode in ("plan", "certify"):
        return _run_without_devices(config, inputs)
    if config.run.mode not in replay.AGAIN:  # recorded steps need no data
        jaxrl_data.check_paths(config, inputs.data is not None, inputs.eval or ())
    telemetry.setup_logging(config.log.level)
    from jaxrl.processes import group

    group.start(config)
    try:
        return _train(config, inputs, group.peers())
    except (Exception, KeyboardInterrupt) as e:
        from jaxrl.planning import plan

        reason = plan.out_of_memory(e, config) or group.peers().explain(e)
        group.peers().report(reason)
        if reason is e:
            raise
        raise reason from e


def _check_call(unknown: Mapping[str, Any]) -> None:
    """Raises ConfigError for arguments that `train` does not have, and inside worker processes."""
    if kind := getattr(sys.modules.get("jaxrl.workers.streams"), "RUNNING", ""):
        raise ConfigError(f"jaxrl.train is called by a file that {kind} workers import: put the call under if __name__ "
                          f"== '__main__':, or the {kind} function into a file of its own")
    for name, value in unknown.items():
        raise ConfigError(unknown_argument(name, value, [*inspect.signature(train).parameters]))


def _run_without_devices(config, inputs) -> dict:
    """Runs a mode that needs no accelerator: plan or certify. Returns its summary."""
    if config.run.mode == "plan":  # reads the model's config only
        from jaxrl.planning import plan
        from jaxrl.resolve.checks.services import missing_logger

        if missing := missing_logger(config):
            print(f"warning: training on this machine would fail: {missing}", flush=True)
        return plan.run(config)
    from jaxrl.certify import run as certify
    from jaxrl.telemetry import setup_logging

    setup_logging(config.log.level)
    return certify.run(config, inputs)


def _train(config, inputs, peers) -> dict:
    """Runs the job of `train` in a process that has joined its group. Returns its summary."""
    from jaxrl import telemetry
    from jaxrl.config.load import redacted
    from jaxrl.planning.comparison import comparison
    from jaxrl.processes.exchange import check_equal, facts
    from jaxrl.resolve.checks import replay
    from jaxrl.resolve.spec import resolve
    from jaxrl.run import setup

    if not peers.first:
        telemetry.setup_logging(config.log.level, peers.who(peers.index))
    check_equal(peers, facts(redacted(config)) if peers.count > 1 else {})
    peers.decide(f"{config.run.dir} is free", telemetry.require_free, config.run.dir, config.run.mode == "train")
    setup.start_jax(resolve(config))
    if config.fork.run and config.run.mode == "train":
        from jaxrl.replay import fork

        config = fork.start_fork(config, inputs)
    elif config.run.warm_start:
        config = _after_warm_start(config, inputs)
    inputs = inputs._replace(comparison=comparison)
    recipe = recipe_of(config)
    run = f"{recipe.again}.{config.run.mode}" if config.run.mode in replay.AGAIN else recipe.run
    out = (run if callable(run) else importlib.import_module(run).run)(config, inputs)
    peers.all_gather(f"the end of {config.run.dir}")  # the others may still be writing
    return out


def _after_warm_start(config, inputs):
    """Runs the warm-start job unless it has finished; returns the config with the export as the model."""
    from jaxrl.processes.group import peers

    try:
        first = load_config(config.run.warm_start)
    except ConfigError as e:
        raise ConfigError(f"run.warm_start={config.run.warm_start!r}: {e}") from e
    if not recipe_of(first).starts_others or first.run.warm_start:
        raise ConfigError(
            f"run.warm_start={config.run.warm_start!r}: must be an SFT config that has no run.warm_start itself"
        )
    if first.lora.adapters:
        raise ConfigError(f"run.warm_start={config.run.warm_start!r}: with lora.adapters its export is a folder for "
                          "each adapter; run it separately and start from one of them (model.path, or lora.path)")
    folder = Path(config.run.dir) / "warm_start"
    for name in ("seed", "compile_cache", "matmul_precision", "deterministic"):
        first.run[name] = config.run[name]
    first.run.dir, first.run.resume = str(folder), "auto"
    first.log.console = config.log.console
    first.checkpoint.export_at_end = True
    export = folder / "export"
    if not peers().decide(f"{folder} is finished", _finished, folder):
        if config.run.mode != "train":
            raise ConfigError(f"run.mode={config.run.mode}: the warm start in {folder} has not finished; train first")
        _check_before(first, config, inputs)
        train(first)
    if not peers().decide(f"{folder} is finished now", _finished, folder):
        raise SystemExit(0)  # the warm start was stopped on request; the same command resumes it
    config.model.path, config.model.init = str(export), "pretrained"
    config.model.tokenizer = config.model.tokenizer or str(export)
    return config


def _check_before(first, config, inputs) -> None:
    """Raises ConfigError for inputs that the job after the warm start would reject, before the warm start runs."""
    from jaxrl import sharding
    from jaxrl.run.setup import check_inputs

    later = config.copy_and_resolve_references()
    for name in ("path", "init", "config"):
        later.model[name] = first.model[name]
    later.model.tokenizer = config.model.tokenizer or first.model.tokenizer or first.model.path
    check_inputs(later, inputs)
    sharding.role_meshes(config.mesh)  # raises if these devices do not fit


def _finished(folder: Path) -> bool:
    from jaxrl.telemetry import read_json

    return bool(read_json(folder / "summary.json").get("finished")) and (folder / "export").is_dir()
