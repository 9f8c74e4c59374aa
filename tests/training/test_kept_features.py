"""Features of images that are kept: they are the tower's, made once per image, and read by every pass; a tower that trains has none."""

import contextlib
import dataclasses
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import vision_cases as cases
from helpers.tiers import first_cases
from helpers.training_helpers import gradient
from training.test_packed_images import batch, layouts, model_of, score_of

from jaxrl import training
from jaxrl.models import build
from jaxrl.models.families import IMAGES
from jaxrl.rl import precompile
from jaxrl.roles.kept_features import KeptFeatures, keeps_features
from jaxrl.sharding import batch_sharding, make_mesh
from jaxrl.training.layout import RowShapes
from jaxrl.training.pack import pack


def job_of(model, gb=1.0, trainable=(".*",), frozen=("vision/.*",), images="auto", patches=96):
    c = SimpleNamespace(train=SimpleNamespace(image_features=images, image_cache_gb=gb), model=SimpleNamespace(trainable=trainable, frozen=frozen))
    at_once = contextlib.nullcontext()
    return SimpleNamespace(config=c, model=model, tree=model, images=object(), row_shapes=RowShapes((48,), ((4, 2),), patches=(patches,)),
                           on=lambda role: at_once)


def windowed():
    text, tower = cases.KINDS["qwen2_5_vl"]
    return build({**text, "num_hidden_layers": 2, "model_type": "qwen2_5_vl_text", IMAGES: {**tower, "depth": 2, "fullatt_block_indexes": [1]}},
                 compute_dtype=jnp.float32, scan_layers=False)


@pytest.mark.full
@first_cases(1, "kind", ["quick", "windows", "taps"], full=0)  # taps in a run: recipes/test_vision_jobs.py
def test_kept_features_score_and_train_as_fresh_ones(kind):
    """Log-probs and the gradient of what trains agree in every layout; each picture goes through the tower once, whatever reads it."""
    model = windowed() if kind == "windows" else model_of()
    params, traj = jax.jit(model.init)(jax.random.key(1)), batch()
    if kind == "windows":
        traj = dataclasses.replace(traj, pictures=traj.pictures._replace(window=model.config.vision.window))
    read = []
    pictures = traj.pictures._replace(patches=lambda wanted, own=traj.pictures.patches: (read.extend(wanted.tolist()), own(wanted))[1])
    kept = KeptFeatures(job_of(model), lambda: params["vision"], lambda x: jax.tree.map(jnp.asarray, x))
    shown, score = kept.shown(dataclasses.replace(traj, pictures=pictures)), score_of(model)
    distinct = np.unique(traj.pictures.numbers)
    assert kept.made == len(distinct) and sorted(read) == distinct.tolist()
    for name, layout in list(layouts(traj))[:1 if kind == "quick" else None]:
        fresh = score(params, traj, layout)
        np.testing.assert_allclose(score(params, shown, layout), fresh, atol=2e-6, err_msg=name)
    if kind == "quick":
        return
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    layout, loss = dict(layouts(traj))["shared"], training.NextToken(chunk=512)
    again = kept.shown(traj)
    assert kept.made == len(distinct) and again.pictures.features(distinct[:1])[0] is shown.pictures.features(distinct[:1])[0]
    one, two = (gradient(model, params, own, {}, weights, layout, np.float32, loss)[0] for own in (traj, shown))
    for name in one:
        if name.startswith("vision/"):
            assert not np.abs(two[name]).max(), name  # the tower is not in the program
        else:
            np.testing.assert_allclose(two[name], one[name], rtol=0, atol=1e-6 + 1e-5 * np.abs(one[name]).max(), err_msg=name)


def test_memory_is_bounded_and_too_little_of_it_is_said(caplog):
    """train.image_cache_gb: the least recently used ones leave; a step always has its own, and a limit below that is warned of once."""
    model = model_of()
    params, traj = jax.jit(model.init)(jax.random.key(1)), batch()
    size = 4 * 2 * model.config.vision.out_size  # bytes of a feature with its tap
    one, rest = traj.pictures.select([0]), traj.pictures.select(range(3, traj.num_sequences))
    first, second = (dataclasses.replace(traj, pictures=own) for own in (one, rest))
    kept = KeptFeatures(job_of(model, gb=(int(one.counts.sum()) // 4 * size + 1) / 1e9), lambda: params["vision"],
                        lambda x: jax.tree.map(jnp.asarray, x))
    kept.shown(first)
    kept.shown(first)
    assert kept.made == 1 and not caplog.records
    with caplog.at_level(logging.WARNING, "jaxrl"):
        shown = kept.shown(second)
        kept.shown(second)
    numbers = np.unique(rest.numbers)
    assert [len(f) for f in shown.pictures.features(numbers)] == [int(rest.counts[rest.numbers == n][0]) // 4 for n in numbers]
    assert kept.made > 1 + len(numbers) and kept._bytes <= kept.limit
    assert len(caplog.records) == 1 and "is less than the features of one step's images" in caplog.records[0].getMessage()


@pytest.mark.parametrize("options, kept", [({}, True), ({"images": "fresh"}, False), ({"frozen": ()}, False),
                                           ({"trainable": ("^layer_.*",), "frozen": ()}, True), ({"frozen": ("vision/layer_0/.*",)}, False)])
def test_only_a_tower_of_which_nothing_trains_is_kept(options, kept):
    assert keeps_features(job_of(model_of(), **options).config, model_of()) == kept
    text = build(cases.TEXT, compute_dtype=jnp.float32, scan_layers=False)
    assert not keeps_features(job_of(text, frozen=()).config, text)


def test_rows_of_features_are_what_is_compiled_ahead():
    """train.image_features=auto and fresh: shapes and dtypes of packed rows are those of rl.precompile."""
    model, mesh = model_of(), make_mesh({"dp": 1, "fsdp": 1, "tp": 1}, jax.devices()[:1])
    params, traj = jax.jit(model.init)(jax.random.key(1)), batch()
    for images in ("auto", "fresh"):
        job = job_of(model, images=images)
        job.mesh = mesh
        own = traj
        if images == "auto":
            own = KeptFeatures(job, lambda: params["vision"], lambda x: jax.tree.map(jnp.asarray, x)).shown(traj)
        micro = dict(layouts(traj))["shared"].minibatches[0].microbatches[0]
        weights = {"token": np.ones(len(traj.tokens), np.float32)}
        packed, shapes = pack(own, micro, {}, weights), precompile.batch(job, precompile.shape_of(micro, traj.patches), {}, ("token",))
        assert jax.tree.structure(packed) == jax.tree.structure(shapes) and batch_sharding(mesh)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(packed)] == [(x.shape, x.dtype) for x in jax.tree.leaves(shapes)]
