"""Models beside the policy that see a job's images: a teacher, a reward model. They get the policy's patches, so their
towers must cut and normalise images alike.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxrl import models
from jaxrl.data.images.resize import RULES, rule_of
from jaxrl.errors import ConfigError
from jaxrl.models.families import IMAGES
from jaxrl.models.io import hf

SAME = ("patch", "merge", "frames", "mean", "std")  # fields of a Rule that decide what a patch is


def read_tower_config(source: str, revision: str | None, images=None, weights: bool = True) -> dict:
    """Returns the HF config of a model that sees a job's images, with its tower.

    Args:
      source, revision: a folder or hub id, and the hub's revision.
      images: the job's ImageSource; None: a job of text, whose models are read without a tower.
      weights: also look at (and from the hub fetch) the weights' headers.

    Raises ConfigError for a model without a tower, for one whose tower sees other patches (SAME, or windows), and for
    files that cannot be read."""
    out = hf.load_config(source, revision, weights=weights, images=images is not None)
    if images is None:
        return out
    kind = (out[hf.SOURCE].get("outer") or {}).get("model_type")
    if kind not in RULES or not out.get(IMAGES):
        raise ConfigError(f"the data holds images, and this model (model_type={out['model_type']}) is read without a "
                          "tower for them; choose one with a tower, or leave the images out with data.image_column=''")
    rule = rule_of(kind, hf.folder_of(source, revision, hf.TEXT_FILES), tower=out[IMAGES])
    differs = [f"{name} is {getattr(rule, name)} and the policy's {getattr(images.rule, name)}" for name in SAME
               if getattr(rule, name) != getattr(images.rule, name)]
    out[IMAGES] = {**out[IMAGES], "mean": images.mean, "std": images.std, "video": images.videos}
    vision = models.build(out, compute_dtype=jnp.float32, scan_layers=True).config.vision
    if vision is not None and vision.window != images.window:
        differs.append(f"windows have {vision.window} image tokens a side and the policy's {images.window}")
    if differs:
        raise ConfigError(f"its tower sees other images than the policy's: {'; '.join(differs)}; take a model of the "
                          "policy's family")
    return out


def with_room(shapes, job, patches: int):
    """Returns RowShapes with room for image patches, for a model that reads the policy's images; unchanged in a job
    without images.

    Each length has as large a share of patches as the policy's rows, at least `patches` (the most of one sequence),
    rounded up to a multiple of 8 merge^2 per rank.

    shapes: training.RowShapes without that room. job: run.setup.Job, whose row_shapes are the policy's."""
    if job.images is None:
        return shapes
    own, unit = job.row_shapes, 8 * job.images.merge**2 * shapes.ranks
    share = own.patches[-1] / own.lengths[-1] if own.patches else 0.0
    return dataclasses.replace(shapes, patches=tuple(
        -(-max(patches, int(share * length)) // unit) * unit for length in shapes.lengths))
