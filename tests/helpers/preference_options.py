"""The options of a preference loss, as its function takes them."""

from types import SimpleNamespace

from jaxrl.algorithms.preference import LOSSES
from jaxrl.config.schema import SCHEMA

DEFAULTS = {name: option.default for name, option in SCHEMA["preference"].items()}


def options(*loss, **changes):
    smoothing = 0.1 if any(LOSSES[name].needs == "label_smoothing" for name in loss) else 0.0
    return SimpleNamespace(**DEFAULTS | {"loss": loss, "label_smoothing": smoothing} | changes)
