"""The data sets of a job: loads them. Where they hold images, the model is read with its tower, and packed rows have
room for patches. Called by setup."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl import data as jaxrl_data
from jaxrl import models
from jaxrl.config.load import get
from jaxrl.data.images import video
from jaxrl.data.images.read import shown_image, shows_video
from jaxrl.data.images.resize import RULES, as_fields
from jaxrl.data.images.source import COLUMN, SINGLE, ImageSource
from jaxrl.errors import ConfigError
from jaxrl.models.families import IMAGES
from jaxrl.models.io import hf, nested
from jaxrl.rewards.services import service_options
from jaxrl.roles.parameters import source_of
from jaxrl.training.layout import row_patches

log = logging.getLogger("jaxrl")
LOOKED_AT = 16  # first rows of a set that are looked at for images a model does not see


def sets_to_complete(c, eval_sets: dict) -> dict:
    """Returns the held-out sets that need completions, name -> Dataset: all; in jobs of pairs those whose rows are
    prompts alone. Raises ConfigError for a set that mixes both."""
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

    Warns of held-out sets whose prompts are training prompts, too, unless the job has episodes or trains on pairs or
    scores.

    Args:
      c: the Spec. inputs: PythonInputs, whose rows replace those of the config. tokenizer: of the policy.
      eos: token that ends supervised completions.
      tools: schemas of the tools that prompts offer.
      images: the job's ImageSource, or None.

    Raises DataError or ConfigError for data that cannot be used."""
    train_set: Any = None
    if c.run.mode != "eval":
        train_set = jaxrl_data.load_train(c, tokenizer, eos, inputs.data, tools, images)
    eval_sets = jaxrl_data.load_eval_sets(c, tokenizer, eos, train_set, inputs.eval, inputs.data, tools, images)
    if train_set is not None and not (c.episodes or c.recipe.pairs or c.recipe.scores):  # where a row is its prompt
        warn_of_trained_prompts(train_set, eval_sets)
    return train_set, eval_sets


def warn_of_trained_prompts(train_set, eval_sets: dict) -> None:
    """Warns of each held-out set at least half of whose prompts are prompts of the training data, too.

    Prompts are equal if their token ids are. Rows with images are left out: their text is the same for many images."""
    found = {name: list(_prompts(dataset)) for name, dataset in eval_sets.items()}
    wanted = set().union(*found.values())
    lengths = np.unique([len(ids) for ids in wanted]) // np.dtype(np.int32).itemsize
    parts = getattr(train_set, "parts", {"": train_set}).values()
    trained = {ids for part in parts for ids in _prompts(part, lengths) if ids in wanted}
    for name, prompts in found.items():
        count = sum(ids in trained for ids in prompts)
        if count and 2 * count >= len(prompts):
            log.warning("eval set %s: %d of its %d prompts are prompts of the training data, too: its accuracy is not "
                        "held-out accuracy; name other rows in eval.sets, or hold out a share of the training rows "
                        "with data.eval_fraction", name, count, len(prompts))


def _prompts(dataset, lengths=None) -> Iterator[bytes]:
    """Yields the token ids of the prompts without images, as bytes; only those of some lengths if these are given."""
    offsets, ids = np.asarray(dataset.arrays["offsets"]), np.asarray(dataset.arrays["ids"], np.int32)
    kept = np.diff(dataset.arrays["image_offsets"]) == 0
    kept &= True if lengths is None else np.isin(dataset.prompt_lengths, lengths)
    for i in np.flatnonzero(kept):
        yield ids[offsets[3 * i]:offsets[3 * i + 1]].tobytes()


def open_images(config, hf_config: dict, tokenizer) -> ImageSource | None:
    """Returns the ImageSource of a job, None if its model has no tower for images or data.image_column is empty.

    Raises ConfigError for a column, or env.image_tokens, that was set for a model without a tower, and for
    env.image_tokens in a job that does not train on images."""
    m, outer = config.model, _outer(config, hf_config)
    if not _has_tower(outer):
        if config.env.image_tokens and config.episodes:
            raise ConfigError(f"env.image_tokens={config.env.image_tokens}: {_towerless(hf_config)} (model.path), or "
                              "set env.image_tokens=0 and data.image_column='' for turns of text")
        if config.data.image_column not in ("", COLUMN):
            raise ConfigError(f"data.image_column={config.data.image_column!r}: {_towerless(hf_config)} (model.path), "
                              "or set data.image_column='' to train on text alone")
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
            raise ConfigError(f"env.image_tokens={config.env.image_tokens}: {refused} does not train on images yet; "
                              "change one of them")
        images.use(f"env.image_tokens={config.env.image_tokens}")
    return images


def _outer(config, hf_config: dict) -> dict:
    """Returns the model's config.json as it was read, with vision_config if it has a tower for images."""
    return hf_config.get(hf.SOURCE, {}).get("outer") or config.model.config.to_dict()


def _has_tower(outer: dict) -> bool:
    return outer.get("model_type") in RULES and bool(outer.get("vision_config"))


def _towerless(hf_config: dict) -> str:
    return (f"model_type={hf_config['model_type']} is read without a tower for images: choose a model with one, of "
            f"{', '.join(RULES)}")


def _check_towerless(spec, hf_config: dict, train_set, eval_sets: dict) -> None:
    """Raises ConfigError where rows have images in the column of data.image_column, and the model has no tower."""
    names = (COLUMN, SINGLE) if spec.data.image_column == COLUMN else (spec.data.image_column,)
    parts = [] if train_set is None else getattr(train_set, "parts", {"": train_set}).values()
    for dataset in (*parts, *eval_sets.values()):
        for at in dataset.arrays["rows"][:LOOKED_AT]:
            row, where = dataset.tables[int(at)]
            name = next((n for n in names if n and shown_image(row.get(n))), None)
            if name is not None:
                raise ConfigError(f"{where}: the column {name!r} holds an image ({shown_image(row[name])}), and "
                                  f"{_towerless(hf_config)} (model.path), or set data.image_column='' to train on "
                                  "text alone")


def check_column(spec, images: ImageSource | None, train_set, eval_sets: dict, hf_config: dict) -> None:
    """Raises ConfigError where rows seem to hold images or videos that no option names, or that a model without a tower
    would not see, so that a job would train without them, and where a column that data.image_column names holds none.

    It looks at the first row of each set, for a model without a tower at the first LOOKED_AT; jobs whose environments
    show images are not checked. train_set: Dataset, Mixture or None. images: the job's ImageSource, after the rows were
    read. hf_config: the model's."""
    if images is None and not _has_tower(_outer(spec, hf_config)):
        _check_towerless(spec, hf_config, train_set, eval_sets)
    if images is None or (spec.env.image_tokens and spec.episodes):
        return
    parts = [] if train_set is None else getattr(train_set, "parts", {"": train_set}).values()
    for dataset in (sets := [*parts, *eval_sets.values()]):
        row, where = dataset.tables[int(dataset.arrays["rows"][0])]
        reader = dataset.reader
        text = (reader.prompt, reader.completion, reader.answer)
        found = {name: (shown_image(cell), bool(spec.data.video_column) and shows_video(cell))
                 for name, cell in row.items() if name not in text}
        name = next((name for name, seems in found.items() if any(seems)), None)
        if name is not None and not dataset.patches.any():
            shown, of_video = found[name]
            held = f"an image ({shown})" if shown else "a video"
            ways = [f"data.image_column={name!r}"] * bool(shown)
            left = "data.image_column='' to leave " + ("images out" if shown else "videos out")
            ways += [f"data.video_column={name!r}" + " if these are frames of a video" * bool(shown)] * of_video
            raise ConfigError(f"{where}: the column {name!r} holds {held} that nothing reads: set "
                              f"{', or '.join(ways)}, or {left}")
    if sets and not images.used and images.column != COLUMN:
        columns = ", ".join(map(str, sets[0].tables[int(sets[0].arrays["rows"][0])][0]))
        raise ConfigError(f"data.image_column={images.column!r}: no row has an image there or in its messages; columns "
                          f"found: {columns}; data.image_column='' leaves images out")


def image_lines(job) -> list[str]:
    """Returns the line of the start-up summary on a job's images: rows that have one, sizes and tokens; on a model with
    a tower whose rows have none, that it trains without; [] for other models."""
    if job.images is None:
        if not job.config.data.image_column or not _has_tower(_outer(job.config, job.hf_config)):
            return []
        return ["images    none in the rows: the model trains on text alone, without its tower (data.image_column)"]
    sets = {} if job.stream is None else {"": job.stream.dataset}
    lines = [f"{name and name + ': '}{_images_in(one, job.images)}" for name, one in (sets | job.eval_sets).items()]
    return [f"images    {'; '.join(lines)}"]


def _images_in(dataset, images: ImageSource) -> str:
    """Returns what the images of a data set are, as "60 of 60 rows, 1 a row, 256 x 288 to 320 x 224 pixels"."""
    has, parts = dataset.patches > 0, getattr(dataset, "parts", {"": dataset}).values()
    out = f"{int(has.sum())} of {len(dataset)} rows"
    if not has.any():
        return out
    number = np.concatenate([np.diff(part.arrays["image_offsets"]) for part in parts])[has]
    grids = np.concatenate([part.arrays["images"][:, 1:3] for part in parts]) * images.rule.patch
    small, large = (grids[pick(grids.prod(-1))] for pick in (np.argmin, np.argmax))
    tokens = dataset.patches[has] // images.merge**2
    sizes = _range(*(f"{width} x {height}" for height, width in (small, large)))
    unit = " images or groups of a video's frames" if images.videos else ""
    return (f"{out}, {_range(number.min(), number.max())}{unit} a row, {sizes} pixels after resizing, "
            f"{_range(tokens.min(), tokens.max())} image tokens a row")


def _range(low, high) -> str:
    return f"{low}" if low == high else f"{low} to {high}"


def _refused(spec) -> str:
    """Returns what of a job does not take images, as "option=value"; "" if everything does."""
    known = spec.run.recipe in ("sft", "rl", "preference", "reward_model", "distill")
    for name, does_not in (("run.recipe", not known),
                           ("teacher.servers", spec.run.recipe == "distill" and bool(spec.teacher.servers)),
                           ("fork.run", bool(spec.fork.run)),
                           ("lora.init", spec.lora.init == "eva" and spec.run.mode == "train"),  # it reads text alone
                           ("record.every", bool(spec.record.every) and spec.run.mode == "train"),
                           ("run.mode", spec.run.mode not in ("train", "eval"))):
        if does_not:
            return f"{name}={get(spec, name)!r}"
    return ""


def with_tower(config, inputs, images: ImageSource):
    """Returns ModelInputs of the model with its vision tower, for a job whose rows hold images.

    inputs: ModelInputs without it. images: the job's ImageSource; its `window` and `two_way` are set to the tower's."""
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
        controls = f"eval.controls={tuple(spec.eval.controls)}"
        if not eval_sets:
            raise ConfigError(f"{controls} needs held-out rows with images, and there are none: set eval.sets, such as "
                              "eval.sets='test=FILE,', or eval.controls=()")
        raise ConfigError(f"{controls}: no row of eval.sets has an image; set eval.controls=()")


def check_services(spec, images: ImageSource | None, datasets: list) -> None:
    """Raises ConfigError for a judge that is shown images where no row has one, or rows have videos; and for a column
    that a service is sent (columns of a remote, rubric_column of a judge) and that no row of the data has.

    datasets: Datasets and Mixtures of the job. All their rows are read if a column is not found before."""
    for name, (kind, o) in service_options(spec.reward).items():
        if name not in (*spec.reward.functions, *spec.eval.rewards):
            continue
        if datasets and o.get("format", "") not in ("classify", "pooling"):  # which send no columns
            _check_columns(name, "rubric_column" if kind == "judge" else "columns", o, datasets)
        if kind != "judge" or not o["show_images"]:
            continue
        if images is not None and images.videos:
            raise ConfigError(f"the judge {name!r} has show_images=True (reward.judge.show_images), and the rows hold "
                              "videos, which judges are not shown; leave it out")
        if images is None or not images.used:
            raise ConfigError(f"the judge {name!r} has show_images=True (reward.judge.show_images), and no row has an "
                              "image; leave it out")


def _check_columns(name: str, option: str, o: dict, datasets: list) -> None:
    """Raises ConfigError for a column of a service's option that no row has."""
    found: dict[str, None] = {"answer": None}
    wanted = {o[option]} if isinstance(o[option], str) else set(o[option])
    wanted -= {"", *found}
    for dataset in datasets:
        for i in range(len(dataset) if wanted else 0):
            found |= dict.fromkeys(dataset[i].columns)
            if not (wanted := wanted.difference(found)):
                break
    if wanted:
        raise ConfigError(f"reward {name!r}: {option}: no row has the column {min(wanted)!r}; columns that rewards get:"
                          f" {', '.join(map(str, found))}; correct the name, or leave it out")


def most_patches(stream, eval_sets: dict, images: ImageSource | None = None, image_tokens: int = 0) -> int:
    """Returns the largest number of patches that the images of one prompt have; 0 without images.

    image_tokens: the most of an episode, if environments show images (times merge^2 patches each); 0 = none."""
    if images is not None and image_tokens:
        return image_tokens * images.merge**2
    datasets = [*([] if stream is None else [stream.dataset]), *eval_sets.values()]
    return max((int(one.patches.max(initial=0)) for one in datasets), default=0)


def with_room(job, dataset, held_out=()):
    """Returns the job with packed rows that have room for the images of its training data and of held-out sets, where
    their completions are laid out in rows, too. Without a data set the job is returned as it is.

    job: run.setup.Job with `images`. dataset: training Dataset; None = there is none. held_out: Datasets, read in jobs
    of pairs alone."""
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
