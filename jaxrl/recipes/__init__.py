"""Jobs. `train` is the one entry: `python -m jaxrl.main` and notebooks both call it."""

from __future__ import annotations

import importlib
from pathlib import Path

from jaxrl.config import ConfigError, load_config


def train(config, rewards=None) -> dict:
    """Runs the job a config describes and returns the content of its summary.json.

    Args:
      config: a ConfigDict from `load_config` / a config file, or the name of a config ('configs/grpo.py:tiny', 'grpo').
      rewards: reward functions `(prompt, completion, **columns) -> float | None` that replace reward.functions.

    Raises:
      ConfigError: before any device work, naming field, value and remedy of every problem.
    """
    from jaxrl import config_checks, data, telemetry

    config = load_config(config) if isinstance(config, str) else config.copy_and_resolve_references()
    if not config.run.dir:
        config.run.dir = f"runs/{config.run.recipe}"
    if rewards is not None:
        config.reward.functions, config.reward.weights = (
            tuple(f if isinstance(f, str) else f.__name__ for f in rewards),
            (),
        )
    config_checks.check(config)
    if config.run.mode == "plan":  # of devices that are not here: nothing is read but the model's description
        from jaxrl.recipes import plan

        return plan.run(config)
    data.check_paths(config)
    telemetry.setup_logging(config.log.level)
    from jaxrl.sharding import distributed

    distributed.start(config)
    try:
        return _train(config, rewards, distributed.peers())
    except (Exception, KeyboardInterrupt) as e:
        reason = distributed.peers().explain(e)
        distributed.peers().report(reason)
        if reason is e:
            raise
        raise reason from e


def _train(config, rewards, peers) -> dict:
    """`train` in a process that has met its peers."""
    from jaxrl import telemetry
    from jaxrl.config import redacted
    from jaxrl.recipes import setup
    from jaxrl.sharding.exchange import check_equal, facts

    if not peers.first:
        telemetry.setup_logging(config.log.level, peers.who(peers.index))
    check_equal(peers, facts(redacted(config)) if peers.count > 1 else {})
    peers.decide(f"{config.run.dir} is free", telemetry.require_free, config.run.dir, config.run.mode == "train")
    setup.start_jax(config)
    if config.run.warm_start:
        config = _after_warm_start(config, rewards)
    out = importlib.import_module(f"jaxrl.recipes.{config.run.recipe}").run(config, rewards)
    peers.meet(f"the end of {config.run.dir}")  # the others may still be writing
    return out


def _after_warm_start(config, rewards):
    """Runs the warm-start job unless its export is already there; the job then starts from that export."""
    from jaxrl.sharding.distributed import peers

    try:
        first = load_config(config.run.warm_start)
    except ConfigError as e:
        raise ConfigError(f"run.warm_start={config.run.warm_start!r}: {e}") from e
    if first.run.recipe != "sft" or first.run.warm_start:
        raise ConfigError(
            f"run.warm_start={config.run.warm_start!r}: must be an SFT config without a warm start of its own"
        )
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
        _check_before(first, config, rewards)
        train(first)
    if not peers().decide(f"{folder} is finished now", _finished, folder):
        raise SystemExit(0)  # the warm start was asked to stop; the same command goes on from its checkpoint
    config.model.path, config.model.init = str(export), "pretrained"
    config.model.tokenizer = config.model.tokenizer or str(export)
    return config


def _check_before(first, config, rewards) -> None:
    """Raises ConfigError for what the job after the warm start could not work with, before any time is spent on it."""
    from jaxrl.recipes.run import Run

    later = config.copy_and_resolve_references()
    for name in ("path", "init", "config"):
        later.model[name] = first.model[name]
    later.model.tokenizer = config.model.tokenizer or first.model.tokenizer or first.model.path
    Run(later, rewards).check()


def _finished(folder: Path) -> bool:
    from jaxrl.telemetry import read_json

    return bool(read_json(folder / "summary.json").get("finished")) and (folder / "export").is_dir()
