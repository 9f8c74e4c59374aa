"""Images in packed rows: any layout gives the log-probs and gradients of each sequence alone, and a model learns to look."""

import dataclasses
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import vision_cases as cases
from helpers.training_helpers import gradient, policy_objective

from jaxrl import training
from jaxrl.errors import ConfigError
from jaxrl.models import build
from jaxrl.models.families import IMAGES
from jaxrl.models.vision.positions import Placed, image_rows
from jaxrl.rl import precompile
from jaxrl.rl.metrics import mean_metrics
from jaxrl.sharding import batch_sharding, make_mesh, replicated
from jaxrl.training.layout import RowShapes, make_layout, row_patches
from jaxrl.training.pack import pack
from jaxrl.types import Pictures, Trajectories

PROMPTS = ([3, (4, 4), 2], [8], [(2, 2), 1, (2, 4), 1], [2, (4, 2), 3])  # text and images by turns
VISION = {"depth": 2, "deepstack_visual_indexes": [0]}


def model_of(layers=2, dtype=jnp.float32, **options):
    return build({**cases.TEXT, "num_hidden_layers": layers, IMAGES: {**cases.VISION, **VISION}}, compute_dtype=dtype, scan_layers=False, **options)


@pytest.fixture(scope="module")
def model_and_params():
    model = model_of()
    return model, jax.jit(model.init)(jax.random.key(1))


def batch(group=3, seed=0):
    """Groups of completions of each of PROMPTS; the last prompt's completions hold an image themselves."""
    rng = np.random.default_rng(seed)
    tokens, mask, prompts, offsets, groups, images = [], [], [], [0], [], []
    for g, pieces in enumerate(PROMPTS):
        prompt, firsts, grids = cases.sequence(g, pieces)
        for k in range(group):
            more = [int(rng.integers(2, 6)), *([(2, 2), 2] if g == 3 else [])]
            completion, later, own = cases.sequence(100 + 10 * g + k, more)
            every = [(f, grid, 10 * g + i) for i, (f, grid) in enumerate(zip(firsts, grids, strict=True))]
            every += [(len(prompt) + f, grid, 50 + k) for f, grid in zip(later, own, strict=True)]
            images += [(len(tokens), *one) for one in every]
            tokens.append(np.concatenate([prompt, completion]))
            mask.append((np.arange(len(tokens[-1])) >= len(prompt)) & (tokens[-1] != cases.PAD))
            prompts.append(len(prompt))
            offsets.append(offsets[-1] + len(tokens[-1]))
            groups.append(g)
    n, total = len(tokens), offsets[-1]
    sequences, firsts, grids, numbers = zip(*images, strict=True)
    grid_of = dict(zip(numbers, grids, strict=True))
    pictures = Pictures(np.array(sequences), np.array(firsts), np.array(grids), np.array(numbers), 2, 48,
                        lambda wanted: [cases.pixels(int(i), grid_of[i]) for i in wanted.tolist()])
    return Trajectories(tokens=np.concatenate(tokens), offsets=np.array(offsets), loss_mask=np.concatenate(mask),
                        logprobs=np.zeros(total, np.float32), versions=np.zeros(total, np.int32) - 1, prompt_lengths=np.array(prompts, np.int32),
                        group=np.array(groups), sample=np.zeros(n, np.int32), seed=np.zeros(n, np.uint32), finish=np.zeros(n, np.int8),
                        pictures=pictures)


def layouts(traj):
    """Name -> layout: each sequence alone, packed, with one prompt copy per group, and with room for few patches a row."""
    most = int(traj.patches.sum(axis=1).max())
    wide = RowShapes((48,), ((4, 1),), patches=(96,))
    yield "alone", make_layout(traj.sizes, RowShapes((16,), ((1,),), patches=(most,)), share_prompts=False)
    yield "packed", make_layout(traj.sizes, wide, share_prompts=False)
    yield "shared", make_layout(traj.sizes, wide)
    yield "tight", make_layout(traj.sizes, dataclasses.replace(wide, patches=(most,)))
    yield "two lengths", make_layout(traj.sizes, RowShapes((24, 48), ((4, 1), (4, 1)), patches=(most, 2 * most)))


def score_of(model):
    return training.make_score(model, temperature=1.0, chunk=512, put=lambda x: x)


@pytest.mark.full
def test_every_layout_gives_the_same_log_probs(model_and_params):
    """And those of rows without their pixels are others, of every completion that has an image before it."""
    model, params = model_and_params
    traj, score, found = batch(), score_of(model), {}
    for name, layout in layouts(traj):
        found[name] = score(params, traj, layout)
        rows = [row for mini in layout.minibatches for micro in mini.microbatches for row in micro.rows if row]
        used = sum(traj.patches[b.sequences[0], 0] + traj.patches[list(b.sequences), 1].sum() for row in rows for b in row)
        room = sum(m.patches * len(m.rows) for mini in layout.minibatches for m in mini.microbatches
                   if any(traj.patches[list(b.sequences)].any() for row in m.rows for b in row))
        assert layout.metrics()["packing/patch_fill"] == used / room and 0 < used <= room
        if name in ("alone", "packed"):
            assert all(traj.patches[[i for b in row for i in b.sequences]].sum() <= 96 for row in rows)
        assert name != "alone" or len(rows) == traj.num_sequences
    for name, got in found.items():
        np.testing.assert_allclose(got, found["alone"], atol=2e-5, err_msg=name)
        assert np.array_equal(got != 0, traj.loss_mask)
    grey = dataclasses.replace(traj, pictures=traj.pictures._replace(
        patches=lambda wanted: [np.full_like(own, 128) for own in traj.pictures.patches(wanted)]))
    moved = np.abs(score(params, grey, layout) - found[name])
    first = np.flatnonzero(traj.loss_mask)
    has_image = np.isin(np.repeat(np.arange(traj.num_sequences), traj.lengths), traj.pictures.sequences[traj.pictures.firsts < 9])
    assert moved[first[has_image[first]]].min() > 1e-4 and not moved[first[~has_image[first]]].any()


@pytest.mark.full
def test_gradients_do_not_depend_on_the_layout(model_and_params):
    """Of one optimizer step over microbatches with and without images; every parameter of tower and taps has one."""
    model, params = model_and_params
    traj, grads = batch(), {}
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    for name, layout in layouts(traj):
        if name in ("alone", "tight"):
            grads[name] = gradient(model, params, traj, {}, weights, layout, np.float32, training.NextToken(chunk=512))[0]
    kinds = {pack(traj, micro, {}, weights).images is None for micro in next(layouts(traj))[1].minibatches[0].microbatches}
    assert kinds == {True, False}
    for name, expected in grads["alone"].items():
        size = np.abs(expected).max()
        assert size > 1e-7, name
        np.testing.assert_allclose(grads["tight"][name], expected, rtol=0, atol=1e-6 + 3e-5 * size, err_msg=name)


@pytest.mark.nightly  # configs/vision.py learns, too; its numbers are those of the tests above
def test_a_model_learns_to_look():
    """Which of two colours a noisy picture has: the loss falls near 0, and to no less than ln 2 without the pixels."""
    model = model_of(layers=1)
    params = jax.jit(model.init)(jax.random.key(1))
    rng, n = np.random.default_rng(0), 16
    kinds = rng.permutation(np.arange(n) % 2)
    colours = np.array([[200, 60, 60], [60, 60, 200]])
    pixels = [np.clip(np.repeat(colours[k], 16) + rng.normal(0, 40, (4, 48)), 0, 255).astype(np.uint8) for k in kinds]
    tokens = np.array([[3, cases.PAD, 4, 10 + k] for k in kinds], np.int32)
    places = np.arange(n)

    def rows(patches):
        pictures = Pictures(places, np.ones(n, int), np.full((n, 2), 2), places, 2, 48, lambda wanted: [patches[i] for i in wanted])
        flat = np.zeros(4 * n, np.float32)
        return Trajectories(tokens=tokens.ravel(), offsets=4 * np.arange(n + 1), loss_mask=np.tile([False, False, False, True], n), logprobs=flat,
                            versions=flat.astype(np.int32), prompt_lengths=np.full(n, 3), group=places, sample=np.zeros(n, int),
                            seed=np.zeros(n, np.uint32), finish=np.zeros(n, np.int8), pictures=pictures)

    def loss_after(traj, steps=60):
        optimizer = optax.adam(3e-3)
        update = training.make_update(model, optimizer, lambda i: 3e-3, training.NextToken(chunk=64, max_grad_norm=1.0))
        trainable, frozen = training.partition(jax.tree.map(jnp.array, params), (".*",), ())
        state = training.init_state(trainable, frozen, optimizer)
        layout = make_layout(traj.sizes, RowShapes((32,), ((2,),), patches=(32,)))
        packed = [jax.tree.map(jnp.asarray, pack(traj, m, {}, training.loss_weights(traj, np.arange(n), "token_mean")))
                  for m in layout.minibatches[0].microbatches]
        for _ in range(steps):
            state, metrics = update(state, packed)
        return -score_of(model)(training.merge(state.trainable, state.frozen), traj, layout)[traj.loss_mask].mean()

    assert loss_after(rows(pixels)) < 0.1
    assert abs(loss_after(rows([np.full_like(own, 128) for own in pixels])) - np.log(2)) < 0.05


def test_rows_have_room_for_their_patches():
    """Over random sizes no row has more patches or tokens than it has room for, with one row length and two; a sequence that never fits is
    named."""
    rng = np.random.default_rng(0)
    for case in range(60):
        n = int(rng.integers(1, 30))
        prompts, completions = rng.integers(2, 30, n), rng.integers(1, 18, n)
        groups = np.sort(rng.integers(0, n, n))
        prompts = prompts[groups]
        patches = np.stack([(rng.integers(0, 2, n) * rng.integers(0, 20, n) * 4)[groups], rng.integers(0, 4, n) // 3 * 4 * (case % 4)], axis=1)
        lengths = ((48,), (32, 48))[case % 2]
        room = row_patches(lengths, patches, prompts + completions, 8)
        if not room:
            continue
        shapes = RowShapes(lengths, ((16, 4),) * len(lengths), patches=room)
        for share, whole in ((True, False), (False, False), (True, True)):
            sizes = training.layout.Sizes(prompts, completions, groups, groups, patches)
            try:
                micros = make_layout(sizes, shapes, share_prompts=share, keep_groups=whole).minibatches[0].microbatches
            except ConfigError:  # a group that no microbatch holds
                assert whole
                continue
            assert sorted(i for m in micros for row in m.rows for b in row for i in b.sequences) == list(range(n)), case
            for micro, row in ((m, row) for m in micros for row in m.rows):
                first, own = [b.sequences[0] for b in row], [i for b in row for i in b.sequences]
                assert prompts[first].sum() + completions[own].sum() == sum(b.tokens for b in row) <= micro.row_length
                assert patches[first, 0].sum() + patches[own, 1].sum() == sum(b.patches for b in row) <= micro.patches
                assert micro.patches == room[lengths.index(micro.row_length)]
    for there in (32, None):
        with pytest.raises(ValueError, match=f"sequence 0 has images of 40 patches, rows have room for {there or 0}"):
            make_layout(training.layout.Sizes(np.array([5]), np.array([5]), np.array([0]), None, np.array([[40, 0]])),
                        RowShapes((48,), ((1,),), patches=(there,) if there else ()))
    assert row_patches((48,), np.zeros((3, 2), int), np.ones(3), 8) == ()
    with pytest.raises(ValueError, match="row 0 has images of 8 patches or more, a row has room for 4"):
        image_rows([Placed(0, np.array([0, 1]), (2, 4), np.zeros((8, 48), np.uint8))], np.zeros((1, 4, 3), np.int32), 4, 2, 48)


def test_rows_are_closed_by_tokens_or_by_patches_alone():
    """A group whose image fills half of a row's patches and a fifth of its tokens leaves its completions the other tokens; a row closes at
    patches where texts are short; rows without images share microbatches; and rooms for patches change no row of text."""
    groups, eight = np.arange(16) // 8, np.full(16, 8)

    def layout(tokens, completion, patches, room, length=768):
        sizes = training.layout.Sizes(np.full(16, tokens), np.full(16, completion), groups, groups, np.stack([np.full(16, patches), 0 * eight], 1))
        return make_layout(sizes, RowShapes((length,), ((4, 1),), patches=room))

    room = row_patches((768,), np.array([[576, 0]]), np.array([164 + 8 * 64]), 32)  # as benchmarks/vision.py
    assert room == (576,)
    by_tokens = layout(164, 64, 576, room)
    assert by_tokens.metrics() == {"packing/efficiency": 2 * 676 / (2 * 768), "packing/patch_fill": 1.0}
    assert [len(row) for m in by_tokens.minibatches[0].microbatches for row in m.rows] == [1, 1]
    by_patches = layout(20, 4, 576, room)
    assert [len(row) for m in by_patches.minibatches[0].microbatches for row in m.rows] == [1, 1]
    assert [len(row) for m in layout(20, 4, 288, room).minibatches[0].microbatches for row in m.rows] == [2]

    mixed = training.layout.Sizes(np.full(16, 30), np.full(16, 10), np.arange(16), np.arange(16), np.stack([np.arange(16) % 2 * 4, 0 * eight], 1))
    micros = make_layout(mixed, RowShapes((40,), ((4, 1),), patches=(4,))).minibatches[0].microbatches
    assert [{b.patches for row in m.rows for b in row} for m in micros] == [{4}, {4}, {0}, {0}]  # those of text have no tower's work

    rng = np.random.default_rng(1)
    for case in range(20):
        n = int(rng.integers(1, 60))
        group = np.sort(rng.integers(0, n // 4 + 1, n))
        sizes = training.layout.Sizes(rng.integers(1, 20, n)[group], rng.integers(1, 25, n), group, group)
        text, roomy = (make_layout(sizes, RowShapes((24, 48), ((8, 2),) * 2, patches=patches), share_prompts=case % 2 == 0, seed=case)
                       for patches in ((), (8, 40)))
        rows = [[m.rows for mini in one.minibatches for m in mini.microbatches] for one in (text, roomy)]
        assert rows[0] == rows[1] and text.used_tokens == roomy.used_tokens


def test_the_gap_is_told_apart_by_images():
    """gap/images and gap/text are means of |trainer - sampler| over the tokens behind an image and over the others, whatever microbatches these
    are in; a bucket without tokens has no mean, and a job of text neither."""
    traj, rng = batch(), np.random.default_rng(2)
    starts = np.repeat(traj.offsets[:-1], traj.lengths)
    begins = {s: f for s, f in zip(traj.pictures.sequences[::-1].tolist(), traj.pictures.firsts[::-1].tolist(), strict=True)}
    behind = np.arange(len(starts)) - starts > np.repeat([begins.get(q, 10**6) for q in range(traj.num_sequences)], traj.lengths)
    assert np.array_equal(traj.behind_image, behind) and not dataclasses.replace(traj, pictures=None).behind_image.any()
    columns = {"behaviour": rng.normal(size=len(starts)).astype(np.float32), "advantage": np.ones(len(starts), np.float32),
               "behind_image": behind.astype(np.float32)}
    expected = {name: np.abs(columns["behaviour"])[traj.loss_mask & kind].mean() for name, kind in (("gap/images", behind), ("gap/text", ~behind))}

    def found(sequences, images=True):
        objective, total = policy_objective(images=images), {}
        weights = training.loss_weights(traj, sequences, "token_mean")
        for micro in dict(layouts(traj))["tight"].minibatches[0].microbatches:
            packed = pack(traj, micro, columns, weights)
            zeros = jnp.zeros(packed.targets.shape)
            _, metrics = objective.policy_terms(zeros, zeros, packed, packed.weights["token"], packed.sequences > 0, None)
            total = {name: value + total.get(name, 0) for name, value in metrics.items()}
        return mean_metrics([{name: float(value) for name, value in total.items()}])

    both = found(np.arange(traj.num_sequences))
    assert {name: both[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert both["rollout/image_fraction"] == pytest.approx(behind[traj.loss_mask].mean()) and "rollout/text_fraction" not in both
    of_text = np.flatnonzero(traj.group == 1)
    assert {"gap/text"} == {"gap/images", "gap/text"} & found(of_text).keys() and found(of_text)["gap/text"] > 0.1
    assert not {"gap/images", "gap/text", "rollout/image_fraction"} & found(of_text, images=False).keys()


def test_rows_without_images_are_what_they_were(model_and_params):
    """A microbatch of text has no rows of patches, and an image changes no token, position or weight of a row."""
    traj = batch()
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    micro = make_layout(traj.sizes, RowShapes((48,), ((16,),), patches=(96,))).minibatches[0].microbatches[0]
    one, two = pack(traj, micro, {}, weights), pack(dataclasses.replace(traj, pictures=None), dataclasses.replace(micro, patches=0), {}, weights)
    assert two.images is None and one.images.patches.shape == (16, 96, 48)
    jax.tree.map(np.testing.assert_array_equal, one.replace(images=None), two)
    text = np.flatnonzero(one.images.segments.max(axis=1) == 0)
    assert np.array_equal(one.images.rotary[text], np.repeat(one.positions[text][..., None], 3, axis=2)) and len(text)


@pytest.mark.full
def test_a_cut_row_has_its_images_where_its_tokens_are(model_and_params):
    """Rows that are dealt to two parts (mesh.cp): each token's feature and position go with it."""
    model, params = model_and_params
    traj, score = batch(), score_of(model)
    whole = make_layout(traj.sizes, RowShapes((48,), ((4,),), patches=(96,)))
    cut = make_layout(traj.sizes, RowShapes((48,), ((4,),), ranks=2, patches=(96,)))
    np.testing.assert_allclose(score(params, traj, cut), score(params, traj, whole), atol=2e-5)


@pytest.mark.full
def test_updates_of_rows_with_and_without_images_are_compiled_ahead(model_and_params, caplog, monkeypatch):
    """Their two programs are what the update calls; and no program is compiled for images that no row has."""
    model, params = model_and_params
    traj, objective, optimizer = batch(), training.NextToken(chunk=64), optax.sgd(1.0)
    mesh = make_mesh({"dp": 1, "fsdp": 1, "tp": 1}, jax.devices()[:1])
    monkeypatch.setattr("jaxrl.training.update.MICROBATCHES_PER_CALL_CPU", 1)
    most = int(traj.patches.sum(axis=1).max())
    shapes = RowShapes((16,), ((1,),), patches=(most,))
    layout, text = make_layout(traj.sizes, shapes, share_prompts=False), np.zeros_like(traj.patches)
    rules = SimpleNamespace(rollout=SimpleNamespace(top_k=-1, group_size=3), algorithm=SimpleNamespace(routes="none"), longest=16,
                            train=SimpleNamespace(image_features="fresh"), data=SimpleNamespace(max_prompt_tokens=12, prompts_per_step=4))
    job = SimpleNamespace(config=rules, model=model, mesh=mesh, row_shapes=shapes, mesh_of=lambda role: mesh)
    with jax.set_mesh(mesh):
        update = training.make_update(model, optimizer, lambda i: 1.0, objective)
        state = jax.device_put(training.init_state(*training.partition(params, (".*",), ()), optimizer), replicated(mesh))
        precompiler = precompile.UpdatePrecompiler(job, SimpleNamespace(rests=False, state=state, program=update), objective)
        precompiler.compile_for(layout, traj.patches)
        assert precompiler.there == {(1, 16, most), (1, 16, 0), None}
        assert {precompile.shape_of(m, text) for m in layout.minibatches[0].microbatches} == {(1, 16, 0)}
        weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
        packed = [jax.device_put(pack(traj, m, {}, {name: weights[name] for name in objective.weights}), batch_sharding(mesh))
                  for m in layout.minibatches[0].microbatches]
        jax.config.update("jax_log_compiles", True)
        with caplog.at_level(logging.WARNING):
            update(state, packed)
        jax.config.update("jax_log_compiles", False)
        precompiler.close()
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith(("Compiling jit(accumulate)", "Compiling jit(apply)"))]
    assert not told and precompile.max_rows(dataclasses.replace(shapes, patches=())) == (1, 16, 0)
