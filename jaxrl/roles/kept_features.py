"""Features of images under a tower that does not train: made once per image, kept in host memory, and read by all
passes of the policy and of a reference that begins as the policy (train.image_features).

roles.role.Policy makes one. Roles with a tower of their own (critic, teacher, reward model) and the sampler compute
their features anew.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models import adapters
from jaxrl.models.vision import tower
from jaxrl.models.vision.positions import Placed, image_rows
from jaxrl.processes.exchange import to_host
from jaxrl.types import Pictures

log = logging.getLogger("jaxrl")


def keeps_features(config, model) -> bool:
    """Returns whether a job keeps features: its model has a tower of which nothing trains, and train.image_features is
    not "fresh"."""
    if model.config.vision is None or config.train.image_features == "fresh":
        return False
    names = ["/".join(entry.path) for entry in model.entries if entry.path[0] == "vision"]
    if model.adapter is not None:
        return not adapters.trains(model) & set(names)
    matches = lambda patterns, name: any(re.search(p, name) for p in patterns)  # noqa: E731
    return not any(matches(config.model.trainable, n) and not matches(config.model.frozen, n) for n in names)


class KeptFeatures:
    """Features by a picture's number, in host memory up to train.image_cache_gb (1e9 bytes each); the least recently
    used are dropped first. Those of a batch (`shown`) also stay as long as the batch.

    Args:
      job: run.setup.Job, with room for images in its rows.
      parameters_of_tower: () -> the tower's parameters (nested), on the policy's devices.
      put: puts rows on the policy's devices.

    Attributes:
      made: features of how many pictures were computed since the start.
    """

    def __init__(self, job, parameters_of_tower: Callable[[], dict], put):
        shapes = job.row_shapes
        self.job, self._tower, self._put, self.made = job, parameters_of_tower, put, 0
        self.limit = int(job.config.train.image_cache_gb * 1e9)
        self._kept, self._bytes, self._warned = collections.OrderedDict[int, np.ndarray](), 0, False
        self._rows, self._patches = shapes.counts[-1][-1], shapes.patches[-1]

        def program(params, images):
            seen = tower.see(job.model, {"vision": params}, images)
            return jnp.concatenate([seen.features, *seen.taps], axis=-1)

        self._program = jax.jit(program)

    def shown(self, traj):
        """Returns the Trajectories with features in the place of their pictures' patches. Collective.

        Features of a picture are [F, (1 + taps) * E] in the compute dtype: F image tokens, the tower's output and its
        taps side by side. Missing ones are computed. Without pictures the batch is returned as it is."""
        if traj.pictures is None:
            return traj
        found = self._of(traj.pictures)
        pictures = traj.pictures._replace(features=lambda wanted: [found[int(number)] for number in wanted])
        return dataclasses.replace(traj, pictures=pictures)

    def _of(self, pictures: Pictures) -> dict[int, np.ndarray]:
        """Returns number -> features [F, (1 + taps) * E] of a batch's pictures; the missing ones are made."""
        numbers, at = np.unique(pictures.numbers, return_index=True)
        missing = [i for number, i in zip(numbers.tolist(), at.tolist(), strict=True) if number not in self._kept]
        for batch in self._batches(pictures.counts, missing):
            self._make(pictures, batch)
        found = {}
        for number in numbers.tolist():
            self._kept.move_to_end(number)
            found[number] = self._kept[number]
        while self._bytes > self.limit and self._kept:
            number, features = self._kept.popitem(last=False)
            self._bytes -= features.nbytes
            if number in found and not self._warned:
                self._warned = True
                log.warning("train.image_cache_gb=%g is less than the features of one step's images: they are made "
                            "again for each pass; raise it", self.job.config.train.image_cache_gb)
        return found

    def _batches(self, counts, wanted: list[int]):
        """Yields lists of rows, each a list of pictures whose patches fit it."""
        rows: list[list[int]] = []
        free = 0
        for i in sorted(wanted, key=lambda i: -counts[i]):
            if not rows or counts[i] > free:
                if len(rows) == self._rows:
                    yield rows
                    rows = []
                rows.append([])
                free = self._patches
            rows[-1].append(i)
            free -= int(counts[i])
        if rows:
            yield rows

    def _make(self, pictures: Pictures, rows: list[list[int]]) -> None:
        merge, whole = pictures.merge, [i for row in rows for i in row]
        patches = dict(zip(whole, pictures.patches(pictures.numbers[whole]), strict=True))
        features, placed = self._patches // merge**2, []
        for number, row in enumerate(rows):
            begin = 0
            for i in row:
                columns = begin + np.arange(len(patches[i]) // merge**2)
                placed.append(Placed(number, columns, pictures.grids[i], patches[i]))
                begin += len(columns)
        rotary = np.zeros((self._rows, features, 3), np.int32)
        images = image_rows(placed, rotary, self._patches, merge, pictures.width, pictures.window)
        with self.job.on("policy"):
            out = to_host(self._program(self._tower(), self._put(images)))
        for one, i in zip(placed, whole, strict=True):
            own = self._kept[int(pictures.numbers[i])] = out[one.row, images.inserts[one.row, one.columns]]
            self._bytes += own.nbytes
        self.made += len(whole)
