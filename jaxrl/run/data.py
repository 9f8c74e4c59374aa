"""The data sets of a job: loads them. Where they hold images, the model is read with its tower, and packed rows have
room for patches. Called by setup."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl import data as jaxrl_data
from jaxrl import models
from jaxrl.config.load import get
from jaxrl.data.images import video
from jaxrl.data.images.resize import RULES, as_fields
from jaxrl.data.images.source import ImageSource
from jaxrl.errors import ConfigError
from jaxrl.models.families import IMAGES
from jaxrl.models.io import hf, nested
from jaxrl.rewards.services import service_options
from jaxrl.roles.parameters import source_of
from jaxrl.training.layout import row_patches

DEFAULT_COLUMN = "images"


def sets_to_complete(c, eval_sets: dict) -> dict:
    """Returns the held-out sets that need completions: all; in jobs of pairs those whose rows are prompts alone. Raises
    ConfigError for a set that mixes both."""
    if not c.recipe.pairs:
        return eval_sets
    out = {}
    for name, dataset in eval_sets.items():
        whole = dataset.target_lengths > 0
        if whole.any() and not whole.all():
            raise ConfigError(f"eval set {name}: {int(whole.sum())} of its {len(dataset)} rows hold pairs or labels, "
                              "the others prompts alone; split it into two sets")
        out |= {} if whole.any() else {name: dataset}
    return out


def load_data(c, inputs, tokenizer, eos: int, tools=(), images: ImageSource | None = None):
    """Reads the job's data. Returns (training Dataset or None in run.mode=eval, held-out Datasets by name).

    eos: token that ends supervised completions. tools: schemas of the tools that prompts offer. images: the job's
    ImageSource, or None. Raises DataError or ConfigError for data that cannot be used."""
    train_set: Any = None
    if c.run.mode != "eval":
        train_set = jaxrl_data.load_train(c, tokenizer, eos, inputs.data, tools, images)
    return train_set, jaxrl_data.load_eval_sets(c, tokenizer, eos, train_set, inputs.eval, inputs.data, tools, images)


def open_images(config, hf_config: dict, tokenizer) -> ImageSource | None:
    """Returns the ImageSource of a job, None if its model has no tower for images or data.image_column is empty.

    Raises ConfigError for a column that was set for a model without a tower.
    """
    m = config.model
    outer = hf_config.get(hf.SOURCE, {}).get("outer") or m.config.to_dict()
    if outer.get("model_type") not in RULES or not outer.get("vision_config"):
        if config.env.image_tokens and config.episodes:
            raise ConfigError(f"env.image_tokens={config.env.image_tokens}: model_type={hf_config['model_type']} is "
                              f"read without a tower for images; towers of {', '.join(RULES)} are read")
        if config.data.image_column not in ("", DEFAULT_COLUMN):
            raise ConfigError(f"data.image_column={config.data.image_column!r}: model_type={hf_config['model_type']} "
                              f"is read without a tower for images; towers of {', '.join(RULES)} are read")
        return None
    if not config.data.image_column:
        return None
    folder = hf.folder_of(source_of(m.path), m.revision, hf.TEXT_FILES) if m.path else None
    refused = _refused(config)
    tower = nested.tower_config(outer, hf_config["model_type"])
    images = ImageSource(config, outer["model_type"], tokenizer, folder, tower, refused)
    if config.env.image_tokens and config.episodes:
        if refused:
            images.close()
            raise ConfigError(f"env.image_tokens={config.env.image_tokens}: {refused} does not train on images yet")
        images.use(f"env.image_tokens={config.env.image_tokens}")
    return images


def _refused(spec) -> str:
    """Returns what of a job does not take images, as "option=value"; "" if everything does."""
    known = spec.run.recipe in ("sft", "rl", "preference", "reward_model", "distill")
    for name, does_not in (("run.recipe", not known),
                           ("teacher.servers", spec.run.recipe == "distill" and bool(spec.teacher.servers)),
                           ("fork.run", bool(spec.fork.run)),
                           ("run.mode", spec.run.mode not in ("train", "eval"))):
        if does_not:
            return f"{name}={get(spec, name)!r}"
    return ""


def with_tower(config, inputs, images: ImageSource):
    """Returns ModelInputs of the model with its vision tower, for a job whose rows hold images."""
    m = config.model
    hf_config = hf.load_config(source_of(m.path), m.revision, m.config.to_dict(), weights=m.init == "pretrained",
                               images=True)
    hf_config[IMAGES] = {**hf_config[IMAGES], "mean": images.mean, "std": images.std, "video": images.videos}
    source = hf_config[hf.SOURCE]
    source["processors"] = nested.with_images(source.get("processors", {}), as_fields(images.rule))
    if images.videos and images.sampling is not None:
        source["processors"] = nested.with_videos(source["processors"], video.as_fields(images.sampling))
    table = models.build(hf_config, compute_dtype=jnp.float32, scan_layers=True)
    assert table.config.vision is not None
    images.window, images.two_way = table.config.vision.window, table.config.vision.two_way
    return inputs._replace(hf_config=hf_config, table=table, images=images)


def check_controls(spec, eval_sets: dict) -> None:
    """Raises ConfigError for eval.controls where no held-out row has an image, and for swapped ones of environments."""
    if spec.env.image_tokens and spec.episodes:
        if "swapped" in spec.eval.controls:
            raise ConfigError("eval.controls=swapped: what an environment shows depends on the model's turns, so no "
                              "other row has its pictures; set eval.controls=('blank',)")
        return
    if spec.eval.controls and not any(one.patches.any() for one in eval_sets.values()):
        raise ConfigError(f"eval.controls={tuple(spec.eval.controls)}: no row of eval.sets has an image; leave it out")


def check_judges(spec, images: ImageSource | None) -> None:
    """Raises ConfigError for a judge that is shown images where no row has one, or rows have videos."""
    for name, (kind, o) in service_options(spec.reward).items():
        if kind != "judge" or not o["show_images"] or name not in (*spec.reward.functions, *spec.eval.rewards):
            continue
        if images is not None and images.videos:
            raise ConfigError(f"the judge {name!r} has show_images=True (reward.judge.show_images), and the rows hold "
                              "videos, which judges are not shown; leave it out")
        if images is None or not images.used:
            raise ConfigError(f"the judge {name!r} has show_images=True (reward.judge.show_images), and no row has an "
                              "image; leave it out")


def most_patches(stream, eval_sets: dict, images: ImageSource | None = None, image_tokens: int = 0) -> int:
    """Returns the largest number of patches that the images of one prompt have; 0 without images.

    image_tokens: the most of an episode, if environments show images (times merge^2 patches each); 0 = none."""
    if images is not None and image_tokens:
        return image_tokens * images.merge**2
    datasets = [*([] if stream is None else [stream.dataset]), *eval_sets.values()]
    return max((int(one.patches.max(initial=0)) for one in datasets), default=0)


def with_room(job, dataset, held_out=()):
    """Returns the job with packed rows that have room for the images of its training data (None: it has none) and of
    held-out sets, where their completions are laid out in rows, too."""
    c, unit, whole = job.config, 8 * job.images.merge**2 * job.row_shapes.ranks, []
    for one in [*([] if dataset is None else [dataset]), *(held_out if c.recipe.pairs else ())]:
        own = one.target_lengths + one.rejected_lengths
        if c.recipe.samples:  # a prompt stands once before completions of unknown length
            own = np.full_like(own, c.rollout.group_size * c.rollout.max_new_tokens // 2)
        elif c.recipe.pairs and not c.train.share_prompts:  # and twice
            own = own // 2
        whole.append((one.patches, own + one.prompt_lengths))
    if not whole:
        return job
    patches, tokens = (np.concatenate(values) for values in zip(*whole, strict=True))
    pairs = np.stack([patches, 0 * patches], axis=1)
    if c.env.image_tokens and c.episodes:  # as many as an episode may show
        tokens, pairs = np.array([c.longest]), np.array([[0, c.env.image_tokens * job.images.merge**2]])

    def roomy(shapes):
        return dataclasses.replace(shapes, patches=row_patches(shapes.lengths, pairs, tokens, unit))

    return dataclasses.replace(job, row_shapes=roomy(job.row_shapes), score_shapes=roomy(job.score_shapes))
