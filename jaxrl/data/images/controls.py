"""Blind controls: held-out rows with other pictures, which show whether a policy looks at its images at all."""

from __future__ import annotations

import dataclasses
import logging

from jaxrl.data.images.source import BLANK

log = logging.getLogger("jaxrl")


def blank(batch: list, episodes: bool = False) -> list:
    """Returns the rows that have images, each with grey pictures of the same sizes in their place.

    batch: [(position, Example)], as is the result. episodes: whether episodes show images: then all rows, and what they
    show is grey. A picture is grey by a bit of its number (source.BLANK), every pixel having the value source.GREY.
    """
    grey = [(i, e if e.images is None else _with(e, e.images.numbers | BLANK)) for i, e in batch
            if episodes or e.images is not None]
    return [(i, dataclasses.replace(e, grey=episodes)) for i, e in grey]


def swapped(batch: list, episodes: bool = False) -> list:
    """Returns the rows that have images, each with the pictures of another row of the same grids of patches in their
    place, in the order of their positions; rows without a partner are left out. `own_images` keeps the row's.

    batch: [(position, Example)], as is the result. episodes: not read: what episodes show is not swapped."""
    alike: dict[bytes, list] = {}
    for i, example in batch:
        if example.images is not None:
            alike.setdefault(example.images.grids.tobytes(), []).append((i, example))
    out = []
    for rows in alike.values():
        shift = len(rows) // 2  # neighbours in the data often ask about one picture
        out += [(i, dataclasses.replace(_with(e, rows[(k + shift) % len(rows)][1].images.numbers), own_images=e.images))
                for k, (i, e) in enumerate(rows) if len(rows) > 1]
    return sorted(out, key=lambda row: row[0])


CONTROLS = {"blank": blank, "swapped": swapped}


def with_own_pictures(traj, examples):
    """Returns the Trajectories of a control with the rows' own pictures, for those who judge completions: grey ones
    are shown again, and swapped ones exchanged for Example.own_images. Unchanged without pictures.

    traj: with the pictures of the control. examples: Example of each trajectory. The i-th is taken for the i-th
    sequence, so a swapped trajectory must be one sequence.
    """
    if traj.pictures is None:
        return traj
    numbers = traj.pictures.numbers & ~BLANK
    for i, example in enumerate(examples):
        if example.own_images is not None:
            numbers[traj.pictures.sequences == i] = example.own_images.numbers
    return dataclasses.replace(traj, pictures=traj.pictures._replace(numbers=numbers))


def controlled(config, name: str, batch: list) -> dict[str, list]:
    """Returns {"": the rows, "/<control>": those of each of eval.controls that has any}.

    config: a Spec. batch: [(position, Example)] of the held-out set `name`. Warns of a control that has no rows; raises
    KeyError for one that is not in CONTROLS.
    """
    out = {"": batch}
    for control in config.eval.controls:
        episodes = config.episodes and config.env.image_tokens > 0
        other = CONTROLS[control](batch, episodes)
        if other:
            out[f"/{control}"] = other
        else:
            log.warning("eval.controls: no two rows of %s have images of the same sizes: none is %s", name, control)
    return out


def _with(example, numbers):
    return dataclasses.replace(example, images=example.images._replace(numbers=numbers))
