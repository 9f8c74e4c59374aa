"""Jobs. `train` is the one entry: `python -m jaxrl.main` and notebooks both call it."""

from __future__ import annotations

import importlib
import json
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
    from jaxrl import config_checks
    from jaxrl.recipes import setup

    config = load_config(config) if isinstance(config, str) else config.copy_and_resolve_references()
    if not config.run.dir:
        config.run.dir = f"runs/{config.run.recipe}"
    if rewards is not None:
        config.reward.functions, config.reward.weights = (
            tuple(f if isinstance(f, str) else f.__name__ for f in rewards),
            (),
        )
    config_checks.check(config)
    setup.start_jax(config)
    if config.run.warm_start:
        config = _after_warm_start(config)
    return importlib.import_module(f"jaxrl.recipes.{config.run.recipe}").run(config, rewards)


def _after_warm_start(config):
    """Runs the warm-start job unless its export is already there; the job then starts from that export."""
    first = load_config(config.run.warm_start)
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
    if not _finished(folder):
        if config.run.mode == "eval":
            raise ConfigError(f"run.mode=eval: the warm start in {folder} has not finished; train first")
        train(first)
    if not _finished(folder):
        raise SystemExit(0)  # the warm start was asked to stop; the same command goes on from its checkpoint
    config.model.path, config.model.init = str(export), "pretrained"
    config.model.tokenizer = config.model.tokenizer or str(export)
    return config


def _finished(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.is_file() and bool(json.loads(summary.read_text()).get("finished")) and (folder / "export").is_dir()
