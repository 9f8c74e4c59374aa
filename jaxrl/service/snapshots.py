"""Copies of runs on the disk, from which a server goes on: adapter, moments, gradients not applied yet, next number.

    <folder>/runs/<run>.npz        the newest snapshot of a run
    <folder>/versions/<name>.npz   weights of a sampling session that were saved without a path

Each file appears at once, by rename. Knows values only. Called by service.worker and service.operations.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl.service.files import DAMAGED, replace
from jaxrl.service.trainer import LoraOptions

ABOUT = "about"


class Snapshot(NamedTuple):
    """A run as it was before the task `next`.

    Attributes:
      run: service.trainer.Run. next: number of its next task.
      failure: why its window of gradients was emptied, "" = it was not.
    """

    run: Any
    next: int
    failure: str


class Snapshots:
    """The snapshots of a folder.

    Args:
      trainer: service.trainer.Trainer, which makes runs of arrays.
      sync: called before a snapshot is written: the disk has the journal of what it holds before it has the snapshot.
    """

    def __init__(self, folder: Path, trainer, sync: Callable[[], None] = lambda: None):
        self.sync = sync
        self.runs, self.versions, self.trainer = folder / "runs", folder / "versions", trainer
        self._next: dict[str, int] = {}
        for path in (self.runs, self.versions):
            path.mkdir(parents=True, exist_ok=True)

    def save(self, model_id: str, run, number: int, failure: str) -> None:
        """Writes the snapshot of a run to the disk, replacing its earlier one.

        model_id: of the run. run: service.trainer.Run. number: of its next task. failure: why its window of gradients
        was emptied, "" = it was not. Raises OSError."""
        self.sync()
        about = {"lora": run.options._asdict(), "next": number, "failure": failure, "loss": run.loss}
        _write(self._run(model_id), self.trainer.arrays(run) | {ABOUT: np.array(json.dumps(about))})
        self._next[model_id] = number

    def about(self, model_id: str) -> dict | None:
        """Returns {"lora", "next", "failure", "loss"} of a run's snapshot without its arrays; None = there is none.
        Raises OSError for a damaged file."""
        arrays = _read(self._run(model_id), (ABOUT,))
        return None if arrays is None else json.loads(str(arrays[ABOUT]))

    def next(self, model_id: str) -> int:
        """Returns the number of the first task that a run's snapshot does not hold; 0 = there is no snapshot. Raises
        OSError for a damaged file."""
        if model_id not in self._next:
            about = self.about(model_id)
            self._next[model_id] = 0 if about is None else about["next"]
        return self._next[model_id]

    def load(self, model_id: str) -> Snapshot | None:
        """Returns the snapshot of a run, on the devices; None = there is none. Raises OSError for a damaged file."""
        if (arrays := _read(self._run(model_id))) is None:
            return None
        about = json.loads(str(arrays.pop(ABOUT)))
        run = self.trainer.from_arrays(LoraOptions(**about["lora"]), arrays)
        run.loss = about["loss"]
        return Snapshot(run, about["next"], about["failure"])

    def keep_version(self, name: str, leaves: dict) -> None:
        """Writes the weights of a sampling session, flat name -> array in host memory. Raises OSError."""
        _write(self._version(name), leaves)

    def version(self, name: str) -> dict | None:
        """Returns the weights of a sampling session, flat name -> array; None = there are none. Raises OSError for a
        damaged file."""
        return _read(self._version(name))

    def has_version(self, name: str) -> bool:
        """Returns whether the disk has the weights of a sampling session of this name."""
        return self._version(name).exists()

    def prune(self, most: int) -> None:
        """Deletes the oldest weights of sampling sessions beyond `most` files."""
        found = sorted(self.versions.glob("*.npz"), key=lambda path: path.stat().st_mtime_ns)
        for path in found[:max(0, len(found) - most)]:
            path.unlink()

    def forget_version(self, name: str) -> None:
        """Deletes the weights of a sampling session."""
        self._version(name).unlink(missing_ok=True)

    def _run(self, model_id: str) -> Path:
        return self.runs / f"{model_id.replace(':', '_')}.npz"

    def _version(self, name: str) -> Path:
        return self.versions / f"{name.replace(':', '_')}.npz"


def _write(path: Path, arrays: dict) -> None:
    temporary = path.with_suffix(".new")
    with open(temporary, "wb") as f:
        np.savez(f, **arrays)
        f.flush()
        os.fsync(f.fileno())
    replace(temporary, path)


def _read(path: Path, names: tuple[str, ...] = ()) -> dict | None:
    try:
        with np.load(path, allow_pickle=False) as found:
            return {name: found[name] for name in names or found.files}
    except FileNotFoundError:
        return None
    except DAMAGED as e:
        raise OSError(f"{path}: {type(e).__name__}: {e}; the snapshot is damaged: restore the file, or move it away and"
                      " lose this run") from None
