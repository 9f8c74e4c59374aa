"""Small PNG files of the images that a run's completions are about, as the model saw them, for its report.

    images/<digest>.png    of pixels and grid: an evaluation of other rows in the same run directory has other files
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import numpy as np

from jaxrl.data.images.decode import thumbnail
from jaxrl.data.images.resize import join
from jaxrl.records.files import THUMBNAILS as FOLDER
from jaxrl.types import Pictures, Trajectories

LONGEST = 256  # pixels per side

log = logging.getLogger("jaxrl")


def file_names(traj: Trajectories, kept: dict[int, str]) -> list[list[str]]:
    """Returns the names of each trajectory's files, in the order of its images; "" for those that are not in `kept`. An
    image that several sequences of a trajectory show occurs once. kept: number of a picture -> name, of `save`. traj:
    without pictures, each trajectory has an empty list."""
    return [[kept.get(number, "") for number in numbers] for numbers in _numbers(traj)]


def save(folder: Path, traj: Trajectories, scores, most: int) -> dict[int, str]:
    """Writes the files that are missing, of at most `most` different images: those of groups with different scores come
    first, as in the report. What cannot be written or read is logged.

    Args:
      folder: run directory.
      traj: trajectories with pictures (`traj.pictures`).
      scores: [N] of the trajectories.
      most: number of different images; 0 writes none.

    Returns:
      Number of a picture -> name of its file, relative to the run directory; {} if files cannot be written.
    """
    assert traj.pictures is not None
    if not most:
        return {}
    try:
        return _save(folder, traj.pictures, _first(traj, np.asarray(scores), most))
    except Exception as e:  # a report without a picture is no reason to end a run
        log.warning("%s: pictures for the report are not written: %s", folder / FOLDER, e)
        return {}


def _save(folder: Path, pictures: Pictures, numbers: list[int]) -> dict[int, str]:
    grids = dict(zip(pictures.numbers.tolist(), pictures.grids.tolist(), strict=True))
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    kept = {}
    for number, patches in zip(numbers, pictures.patches(np.array(numbers)), strict=True):
        digest = hashlib.blake2b(repr(grids[number]).encode() + patches.tobytes(), digest_size=8).hexdigest()
        kept[number] = f"{FOLDER}/{digest}.png"
        if not (path := folder / kept[number]).exists():
            unnamed = path.with_suffix(".tmp")
            unnamed.write_bytes(thumbnail(join(patches, grids[number], pictures.merge, pictures.frames), LONGEST))
            unnamed.replace(path)
    return kept


def _first(traj: Trajectories, scores, most: int) -> list[int]:
    """Returns the numbers of the first images, of groups with different scores before the others."""
    alike = {group: len({str(s) for s in scores[traj.group == group]}) <= 1 for group in np.unique(traj.group).tolist()}
    order = sorted(range(traj.num_trajectories), key=lambda i: alike[int(traj.group[i])])  # stable
    numbers = _numbers(traj)
    return list(dict.fromkeys(n for i in order for n in numbers[i]))[:most]


def _numbers(traj: Trajectories) -> list[list[int]]:
    """Returns the numbers of each trajectory's images; several sequences may show the same."""
    out: list[dict[int, None]] = [{} for _ in range(traj.num_trajectories)]
    if traj.pictures is not None:
        owners = traj.pictures.sequences if traj.trajectory is None else traj.trajectory[traj.pictures.sequences]
        for owner, number in zip(owners.tolist(), traj.pictures.numbers.tolist(), strict=True):
            out[owner][number] = None
    return [list(one) for one in out]
