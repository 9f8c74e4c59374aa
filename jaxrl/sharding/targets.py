"""Parses plan.target, the hardware that a plan is made for: `v5p:4x4x8`, `h100:64`, `cpu:8`."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re

from jaxrl.errors import ConfigError
from jaxrl.sharding.chips import CHIPS, Chip

MOST = 1 << 16


@dataclasses.dataclass(frozen=True)
class Target:
    """`count` devices called `name`; `topology` is the shape of a TPU slice, () elsewhere."""

    name: str
    count: int
    topology: tuple[int, ...]

    @property
    def chip(self) -> Chip:
        """The Chip of this name."""
        return CHIPS[self.name]

    @property
    def kind(self) -> str:
        """Kind of the devices: cpu, gpu or tpu."""
        return self.chip.kind

    @property
    def per_host(self) -> int:
        """Number of devices of one host, which is one process: the chip's, at most `count`."""
        return min(self.chip.host, self.count)

    @property
    def hosts(self) -> int:
        """Number of hosts that hold the devices."""
        return -(-self.count // self.per_host)

    def __str__(self) -> str:
        return f"{self.name}:{'x'.join(map(str, self.topology)) or self.count}"


def parse(text: str) -> Target:
    """Parses plan.target into a Target.

    A TPU slice is given by its shape (v5p:4x4x8) or its number of chips (then the most cubic shape is taken); GPUs and
    CPU devices by their number; 1 where it is left out. Raises ConfigError for anything else, for an unknown chip
    (naming the nearest), and for more than MOST (65,536) devices.
    """
    name, colon, size = text.strip().lower().partition(":")
    if name not in CHIPS:
        near = difflib.get_close_matches(name, CHIPS, n=1, cutoff=0.5)
        raise ConfigError(f"plan.target={text!r}: no chip {name!r}{f', did you mean {near[0]}' if near else ''}; known "
                          f"are {', '.join(CHIPS)}, for example v5p:4x4x8, h100:64 or cpu:8")
    chip = CHIPS[name]
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size or "1") or (colon and not size):
        raise ConfigError(f"plan.target={text!r}: after the chip comes a number of devices, or the shape of a TPU "
                          f"slice: {name}:{'4x4x8' if chip.axes == 3 else '4x4' if chip.axes else 8}")
    sides = tuple(map(int, (size or "1").split("x")))
    count = math.prod(sides)
    if count > MOST:
        raise ConfigError(f"plan.target={text!r}: {count} devices; at most {MOST}")
    if not chip.axes:
        if len(sides) > 1:
            raise ConfigError(f"plan.target={text!r}: only TPU slices have a shape; write {name}:{count}")
        return Target(name, count, ())
    if len(sides) == 1:
        sides = slice_shape(count, chip.axes)
    if len(sides) != chip.axes:
        raise ConfigError(f"plan.target={text!r}: a {name} slice has {chip.axes} axes; write {name}:"
                          f"{'x'.join(map(str, slice_shape(count, chip.axes)))}")
    return Target(name, count, sides)


def slice_shape(count: int, axes: int) -> tuple[int, ...]:
    """Returns the most cubic shape of a TPU slice with `count` chips and `axes` axes, ascending."""
    if axes == 1:
        return (count,)
    shapes = [tuple(sorted((first, *slice_shape(count // first, axes - 1)))) for first in range(1, count + 1)
              if count % first == 0 and first ** axes <= count]
    return min(shapes, key=lambda shape: (shape[-1], -shape[0]))


def name_of(device) -> str | None:
    """Returns the name of a jax device in CHIPS, None if it is not in the table."""
    kind = device.device_kind.lower()
    if device.platform in ("cpu", "tpu"):
        return {"cpu": "cpu", "tpu v5": "v5p", "tpu v5p": "v5p", "tpu v5 lite": "v5e", "tpu v5e": "v5e",
                "tpu v6 lite": "v6e", "tpu v6e": "v6e"}.get(kind)
    return next((name for name in CHIPS if CHIPS[name].kind == "gpu" and name in kind), None)
