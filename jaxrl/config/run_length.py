"""What ends a run: the first of train.steps, data.epochs and train.max_samples that is set."""

from __future__ import annotations

from jaxrl.config.load import get
from jaxrl.config.registry import sequences

DEFAULT_STEPS = 100  # of a run that nothing else ends


def ends(cfg, passes: int | None = None) -> dict[str, int]:
    """Returns what may end a run -> after how many steps; the first one ends it.

    Keys are train.steps, data.epochs (`passes`: steps of all passes; None: the rows are not known, and it is left out)
    and train.max_samples (divided by the sequences of a step, rounded up), as far as set; train.steps with its default
    if none is set. {} if data.epochs alone is set and `passes` is None.
    """
    out = {"train.steps": cfg.train.steps} if cfg.train.steps else {}
    if cfg.data.epochs and passes is not None:
        out["data.epochs"] = passes
    if cfg.train.max_samples:
        out["train.max_samples"] = -(-cfg.train.max_samples // sequences(cfg))
    return out if out or cfg.data.epochs else {"train.steps": DEFAULT_STEPS}


def end(cfg, passes: int | None = None) -> tuple[int, str]:
    """Returns (steps of the run, the option that ends it and its origin: "train.steps=50 (config)"), as far as they are
    known before the first step.

    passes: steps of all data.epochs, if the rows are known; without them data.epochs alone counts as DEFAULT_STEPS.
    """
    known = ends(cfg, passes) or {"train.steps": DEFAULT_STEPS}  # data.epochs alone, and rows that nobody has counted
    name = min(known, key=known.__getitem__)
    origin = "config" if get(cfg, name) else "default"
    return known[name], f"{name}={get(cfg, name) or DEFAULT_STEPS} ({origin})"
