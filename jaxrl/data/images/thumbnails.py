"""Small PNG files of the images that a run's completions are about, as the model saw them, for its report.

    images/<number>.png    number: hexadecimal, of Pictures.numbers; records name their files
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from jaxrl.data.images.decode import thumbnail
from jaxrl.data.images.resize import join
from jaxrl.records.files import THUMBNAILS as FOLDER
from jaxrl.types import Pictures, Trajectories

LONGEST = 256  # pixels per side

log = logging.getLogger("jaxrl")


def file_names(traj: Trajectories) -> list[list[str]]:
    """Returns the names of each trajectory's files, relative to the run directory, in the order of its images."""
    return [[f"{FOLDER}/{number:x}.png" for number in numbers] for numbers in _numbers(traj)]


def save(folder: Path, traj: Trajectories, scores, most: int) -> None:
    """Writes the files that are missing, of at most `most` different images: those of groups with different scores come
    first, as in the report. What cannot be written or read is logged.

    Args:
      folder: run directory. scores: [N] of the trajectories.
    """
    if traj.pictures is None or not most:
        return
    try:
        _save(folder, traj.pictures, _first(traj, np.asarray(scores), most))
    except Exception as e:  # a report without a picture is no reason to end a run
        log.warning("%s: pictures for the report are not written: %s", folder / FOLDER, e)


def _save(folder: Path, pictures: Pictures, numbers: list[int]) -> None:
    missing = [n for n in numbers if not (folder / FOLDER / f"{n:x}.png").exists()]
    if not missing:
        return
    grids = dict(zip(pictures.numbers.tolist(), pictures.grids.tolist(), strict=True))
    (folder / FOLDER).mkdir(exist_ok=True)
    for number, patches in zip(missing, pictures.patches(np.array(missing)), strict=True):
        made = thumbnail(join(patches, grids[number], pictures.merge), LONGEST)
        unnamed = folder / FOLDER / f".{number:x}.tmp"
        unnamed.write_bytes(made)
        unnamed.replace(folder / FOLDER / f"{number:x}.png")


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
