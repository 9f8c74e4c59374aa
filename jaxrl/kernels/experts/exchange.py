"""How tokens reach experts that lie on several devices: every device of a mesh axis is given the tokens of all of them,
computes its own experts' part of each, and the parts are added up where the token came from.

It moves P / K times as much as sending each token to its K experts' devices would, P devices: as much or less where
P <= K, and with sizes that no routing changes. Within a shard_map; the devices call it together and equally often.

Legend: t tokens of one device, P devices of the axis.
"""

from __future__ import annotations

from typing import NamedTuple

import jax


class Exchange(NamedTuple):
    """Moves tokens between the devices of a mesh axis, over which experts lie: P devices, t tokens on each.

    axis: name of the mesh axis; None = all experts are on every device, and nothing moves. With an axis,
    use it within a shard_map, and on all of its devices alike: moves are collective."""

    axis: str | None = None

    @property
    def size(self) -> int:
        """Number of devices P; 1 without an axis."""
        return 1 if self.axis is None else jax.lax.axis_size(self.axis)

    def gathered(self, *arrays):
        """Gathers each array [t, ...] as [P t, ...], device after device; unchanged without an axis."""
        if self.axis is None:
            return arrays
        return tuple(jax.lax.all_gather(a, self.axis, tiled=True) for a in arrays)

    def returned(self, x):
        """Sums [P t, ...] over the devices and returns each one's own [t, ...]."""
        return x if self.axis is None else jax.lax.psum_scatter(x, self.axis, tiled=True)

    def own(self, ids, experts: int):
        """Returns ids of all experts as ids of this device's `experts`, in their shape; others are below 0 or too
        large."""
        return ids if self.axis is None else ids - jax.lax.axis_index(self.axis) * experts
