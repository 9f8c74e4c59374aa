"""The update's gradient does not depend on how the batch is laid out; scoring agrees with it; nothing leaks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.training_helpers import (
    HF,
    LAYOUTS,
    LOSS,
    batch_of_groups,
    conversation,
    cut,
    gradient,
    layout_of,
    one_at_a_time,
    params_of,
    policy_objective,
    tiny_model,
    worst,
)

from jaxrl import models, training
from jaxrl.config.load import default_config
from jaxrl.errors import ConfigError
from jaxrl.rl.trajectories import collect
from jaxrl.roles.parameters import flat_axes, flat_layers
from jaxrl.training.layout import Block, RowShapes, attention_work
from jaxrl.training.optimizer import make_schedule, schedule_text
from jaxrl.training.score import forward_logprobs
from jaxrl.training.update import _group_microbatches
from jaxrl.types import Sizes


@pytest.fixture(scope="module", autouse=True)
def compiled_in_haste():
    """Without LLVM's dear passes: nothing here is about speed, and compiling is what it takes time for."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)










@pytest.mark.parametrize("aggregation", ["token_mean", pytest.param("sequence_mean", marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_gradients_do_not_depend_on_the_layout_float64(aggregation):
    with jax.enable_x64(True):
        model = tiny_model(jnp.float64)
        params = params_of(model, jnp.float64)
        traj, columns = batch_of_groups(groups=3, size=3)
        weights = training.loss_weights(traj, np.arange(traj.num_sequences), aggregation)
        truth, _ = gradient(model, params, traj, columns, weights, one_at_a_time(traj), np.float64)
        for name in ("padded", "packed", "packed_shared_2_microbatches"):
            layout = layout_of(traj, name)
            got, _ = gradient(model, params, traj, columns, weights, layout, np.float64, dirty=name != "padded")
            assert worst(got, truth) < 1e-12, name


@pytest.mark.nightly
def test_gradients_do_not_depend_on_the_layout_float32():
    model, (traj, columns) = tiny_model(), batch_of_groups()
    params = params_of(model)
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    truth, metrics = gradient(model, params, traj, columns, weights, one_at_a_time(traj), np.float32)
    for name in LAYOUTS:
        got, m = gradient(model, params, traj, columns, weights, layout_of(traj, name), np.float32)
        assert worst(got, truth) < 1e-5, name
        for key in metrics:
            assert float(m[key]) == pytest.approx(float(metrics[key]), rel=1e-4, abs=1e-6), (name, key)


@pytest.mark.slow
def test_remat_does_not_change_the_gradient():
    traj, columns = batch_of_groups()
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    plain = tiny_model()
    truth, _ = gradient(plain, params_of(plain), traj, columns, weights, layout_of(traj, "packed"), np.float32)
    remat = tiny_model(remat="full")
    got, _ = gradient(remat, params_of(remat), traj, columns, weights, layout_of(traj, "packed"), np.float32)
    assert worst(got, truth) < 1e-5


def test_scoring_agrees_with_the_update_forward_on_the_same_layout():
    model, (traj, columns) = tiny_model(), batch_of_groups()
    params = params_of(model)
    layout = layout_of(traj, "packed_shared_2_microbatches")
    score = training.make_score(model, temperature=1.0, chunk=LOSS.chunk, put=lambda b: jax.tree.map(jnp.asarray, b))
    columns["old"] = score(params, traj, layout)
    assert (columns["old"][traj.loss_mask] < 0).all() and (columns["old"][~traj.loss_mask] == 0).all()
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    _, metrics = gradient(model, params, traj, columns, weights, layout, np.float32)
    assert float(metrics["old_gap/max"]) < 1e-6  # another fusion of the same arithmetic
    assert float(metrics["policy/ratio_mean"]) == pytest.approx(1.0, abs=1e-6)
    assert float(metrics["policy/clip_fraction"]) == 0.0


@pytest.mark.full
def test_scoring_equals_each_sequence_alone():
    model, (traj, _) = tiny_model(), batch_of_groups()
    params = params_of(model)
    score = training.make_score(model, temperature=0.7, chunk=32, put=lambda b: jax.tree.map(jnp.asarray, b))
    got = score(params, traj, layout_of(traj, "packed_shared"))
    longest = int(traj.lengths.max())

    @jax.jit
    def alone(row):  # a causal model: what fills the row up is behind the sequence
        ones, zeros = jnp.ones_like(row), jnp.zeros_like(row)
        hidden = model.hidden(params, row, jnp.arange(longest)[None], ones, zeros)
        return jax.nn.log_softmax(model.logits(params, hidden) / 0.7)[0]

    for i in range(0, traj.num_sequences, 3):
        ids = traj.tokens[traj.offsets[i] : traj.offsets[i + 1]]
        logp = alone(jnp.asarray(np.pad(ids, (0, longest - len(ids))))[None])
        p = traj.prompt_lengths[i]
        want = [logp[t - 1, ids[t]] for t in range(p, len(ids))]
        np.testing.assert_allclose(got[traj.offsets[i] + p : traj.offsets[i + 1]], want, atol=2e-5)


def test_the_first_answer_token_and_the_last_are_scored_and_no_prompt_token_is():
    traj, columns = batch_of_groups(groups=2, size=3)
    layout = layout_of(traj, "one_row")
    micro = layout.minibatches[0].microbatches[0]
    ones = {"token": np.ones(len(traj.tokens))}
    batch = training.pack(traj, micro, columns, ones)
    scored = batch.weights["token"][0] > 0
    assert scored.sum() == traj.completion_lengths.sum() == traj.loss_mask.sum()
    # what is predicted follows, in its own answer or from the shared prompt, what predicts it
    for source, target in zip(batch.sources[0][scored], batch.targets[0][scored], strict=True):
        here = batch.positions[0, source] + 1
        hits = [
            (k, batch.tokens[0, k])
            for k in range(batch.tokens.shape[1])
            if batch.positions[0, k] == here and batch.segments[0, k]
        ]
        assert target in [t for _, t in hits]
    back = np.zeros(len(traj.tokens))
    training.unpack(traj, micro, batch.columns["behaviour"], back)
    np.testing.assert_allclose(back, np.where(traj.loss_mask, traj.logprobs, 0), rtol=1e-6)


def test_layout_invariants():
    rng = np.random.default_rng(3)
    groups = np.repeat(np.arange(17), 6)
    prompts = np.repeat(rng.integers(3, 40, 17), 6)
    answers = rng.integers(1, 60, len(groups))
    shapes = training.row_shapes((64, 128), 100, 512, 1)
    layout = training.make_layout(Sizes(prompts, answers, groups, groups), shapes, num_minibatches=4, seed=5)
    seen = []
    for mini in layout.minibatches:
        mine = [i for m in mini.microbatches for row in m.rows for b in row for i in b.sequences]
        assert sorted(mine) == sorted(mini.sequences.tolist())
        for m in mini.microbatches:
            assert len(m.rows) in shapes.counts[shapes.lengths.index(m.row_length)]
            for row in m.rows:
                assert sum(b.tokens for b in row) <= m.row_length
                for b in row:
                    assert len({groups[i] for i in b.sequences}) == 1
        seen += mine
    assert sorted(seen) == list(range(len(groups)))
    for g in range(17):  # a group lies in one minibatch
        assert sum(bool(np.isin(np.flatnonzero(groups == g), m.sequences).any()) for m in layout.minibatches) == 1
    again = training.make_layout(Sizes(prompts, answers, groups, groups), shapes, num_minibatches=4, seed=5)
    assert [m.sequences.tolist() for m in again.minibatches] == [m.sequences.tolist() for m in layout.minibatches]


def test_row_counts_bound_the_programs():
    assert training.row_shapes((64,), 60, 512, 2).counts == ((16, 4),)
    c = default_config()
    c.train.row_counts = 1
    whole = training.row_shapes((64,), 60, 512, 2, c.train.row_counts)
    assert whole.counts == ((16,),)
    layout = training.make_layout(Sizes([30] * 20, [30] * 20, np.arange(20), np.arange(20)), whole)
    assert [len(m.rows) for m in layout.minibatches[0].microbatches] == [16, 16]


@pytest.mark.parametrize("shared", [True, False])
def test_packing_fills_rows_of_long_tailed_lengths(shared):
    """A group may lie in several rows, each with a copy of its prompt; copies are not counted as use here."""
    rng = np.random.default_rng(0)
    answers, groups = np.clip(rng.lognormal(4.3, 0.9, 512).astype(int), 8, 512), np.repeat(np.arange(64), 8)
    shapes = training.row_shapes((2048,), 576, 8192, 1)
    layout = training.make_layout(Sizes(np.full(512, 64), answers, groups, groups), shapes, share_prompts=shared)
    placed = [row for m in layout.minibatches[0].microbatches for row in m.rows]
    blocks = [b for row in placed for b in row]
    assert sorted(i for b in blocks for i in b.sequences) == list(range(512))
    assert all(b.tokens == 64 + answers[list(b.sequences)].sum() for b in blocks)
    assert all(sum(b.tokens for b in row) <= 2048 for row in placed)
    assert all(len(set(groups[list(b.sequences)])) == 1 and (shared or len(b.sequences) == 1) for b in blocks)
    needed = answers.sum() + 64 * (64 if shared else 512)
    assert needed / layout.total_tokens > 0.95


@pytest.mark.parametrize("size, median, longest, row, microbatch", [
    (8, 300, 1024, 2048, 16384), (8, 1500, 8192, 8704, 16384), (16, 100, 512, 2048, 2048), (8, 40, 512, 2048, 16384)])
def test_rows_of_groups_are_filled_and_shards_have_equal_work(size, median, longest, row, microbatch):
    """Groups of long-tailed answers, in rows and microbatches as accelerators and CPUs have them by default: no more than one in
    twenty positions of the rows that hold anything is empty, every answer lies in one place, and over eight shards attention's work
    differs by a tenth."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(64), size)
    answers = np.clip(rng.lognormal(np.log(median), 0.9, len(groups)).astype(int), 8, longest)
    prompts = np.repeat(rng.integers(40, 300, 64), size)
    for shards in (1, 8):
        shapes = training.row_shapes((row,), 300 + longest, microbatch, shards)
        layout = training.make_layout(Sizes(prompts, answers, groups, groups), shapes)
        micros = layout.minibatches[0].microbatches
        rows = [r for m in micros for r in m.rows]
        blocks = [b for r in rows for b in r]
        assert sorted(i for b in blocks for i in b.sequences) == list(range(len(groups)))
        assert all(len(set(groups[list(b.sequences)])) == 1 for b in blocks)
        assert all(b.tokens == prompts[b.sequences[0]] + answers[list(b.sequences)].sum() for b in blocks)
        assert all(sum(b.tokens for b in r) <= row for r in rows) and layout.used_tokens == sum(b.tokens for b in blocks)
        assert layout.used_tokens / (row * sum(bool(r) for r in rows)) > 0.95
        if shards == 1:
            continue
        work = [np.array([sum(attention_work(b, prompts, answers) for b in r) for r in m.rows]).reshape(8, -1).sum(1) for m in micros]
        full = [w for w in work if w.min() > 0] or work
        assert sum(w.max() for w in full) / sum(w.mean() for w in full) < 1.1


def test_the_work_of_attention_by_hand():
    """A prompt of 3 and answers of 2 and 1, one copy and two: pairs that see each other."""
    prompts, answers = np.array([3, 3]), np.array([2, 1])
    assert attention_work(Block((0, 1), 6), prompts, answers) == 6 + (4 + 5) + 4
    assert attention_work(Block((0,), 5), prompts, answers) == 15


def _update(optimizer, loss, columns_patch=None, steps=1):
    model, (traj, columns) = tiny_model(), batch_of_groups()
    columns |= columns_patch or {}
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    update = training.make_update(model, optimizer, lambda i: 1e-2, loss)
    trainable, frozen = training.partition(params_of(model), (".*",), ("embed",))
    state = training.init_state(trainable, frozen, optimizer)
    before = jax.tree.map(np.asarray, state)
    layout = layout_of(traj, "packed_shared_2_microbatches")
    for _ in range(steps):
        batches = (
            jax.tree.map(jnp.asarray, training.pack(traj, m, columns, weights))
            for m in layout.minibatches[0].microbatches
        )
        state, metrics = update(state, batches)
    return before, jax.tree.map(np.asarray, state), metrics


@pytest.mark.slow
def test_a_non_finite_update_changes_nothing_but_its_counters():
    bad = {"advantage": np.full(10_000, np.nan)}
    before, after, metrics = _update(optax.adamw(1e-2), LOSS, bad, steps=2)
    for a, b in zip(
        jax.tree.leaves((before.trainable, before.opt_state)),
        jax.tree.leaves((after.trainable, after.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    assert after.step == 0 and after.stats["skipped"] == 2 and after.stats["nonfinite_streak"] == 2
    assert metrics["optim/skipped"] == 1


@pytest.mark.slow
def test_one_compilation_serves_every_microbatch_and_step(caplog):
    """Gradients lie on the mesh as their parameters do from the start; otherwise the second microbatch compiles again."""
    model, (traj, columns) = tiny_model(), batch_of_groups()
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    optimizer = optax.adamw(1e-2)
    mesh = jax.make_mesh((1,) * 5, ("dp", "fsdp", "cp", "ep", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 5)
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("dp", "fsdp")))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    trainable, frozen = training.partition(params_of(model), (".*",), ())
    state = jax.device_put(training.init_state(trainable, frozen, optimizer), whole)
    state = state.replace(trainable=dict(reversed(state.trainable.items())))  # jit returns dicts sorted
    update = training.make_update(model, optimizer, lambda i: 1e-2, LOSS)
    micros = layout_of(traj, "packed_shared_2_microbatches").minibatches[0].microbatches
    assert len(micros) > 1
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for _ in range(2):
            state, _ = update(state, [jax.device_put(training.pack(traj, m, columns, weights), split) for m in micros])
    compiled = [r.getMessage() for r in caplog.records if "Finished XLA compilation" in r.getMessage()]
    for name in ("_zero_sums", "accumulate", "apply"):
        assert sum(f"jit({name})" in text for text in compiled) == 1, compiled


def test_neighbours_of_one_shape_go_together():
    batches = [np.full(shape, i) for i, shape in enumerate((3, 3, 3, 4, 3))]
    found = [([int(b[0]) for b in some], count) for some, count in _group_microbatches(iter(batches), 2)]
    assert found == [([0, 1], 2), ([2, 2], 1), ([3, 3], 1), ([4, 4], 1)]


@pytest.mark.slow
def test_frozen_parameters_have_no_optimizer_state_and_do_not_move():
    before, after, _ = _update(optax.adamw(1e-2), LOSS)
    np.testing.assert_array_equal(before.frozen["embed/embedding"], after.frozen["embed/embedding"])
    assert not any("embed" in str(path) for path, _ in jax.tree_util.tree_leaves_with_path(after.opt_state))
    assert any((a != b).any() for a, b in zip(before.trainable.values(), after.trainable.values(), strict=True))


@pytest.mark.slow
def test_gradient_clipping_bounds_the_update():
    loss = policy_objective(old="column", max_grad_norm=1e-3, chunk=32)
    before, after, metrics = _update(optax.sgd(1.0), loss)
    moved = np.sqrt(sum(np.square(after.trainable[k] - before.trainable[k]).sum() for k in before.trainable))
    assert float(metrics["optim/grad_norm"]) > 1e-3 and moved == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.slow
def test_fp16_loss_scale_halves_on_overflow_and_the_step_is_skipped():
    model = tiny_model(jnp.float16)
    traj, columns = batch_of_groups()
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    loss = policy_objective(old="current", chunk=32, fp16=True)
    update = training.make_update(model, optax.sgd(1e-2), lambda i: 1e-2, loss)
    trainable, frozen = training.partition(params_of(model), (".*",), ())
    state = training.init_state(trainable, frozen, optax.sgd(1e-2), fp16=True)
    state = state.replace(stats={**state.stats, "loss_scale": jnp.float32(2.0**24)})
    columns["advantage"] = columns["advantage"] * 1e4
    layout = layout_of(traj, "packed")

    def batches():
        return (
            jax.tree.map(jnp.asarray, training.pack(traj, m, columns, weights))
            for m in layout.minibatches[0].microbatches
        )

    state, metrics = update(state, batches())
    assert float(metrics["optim/skipped"]) == 1 and float(state.stats["loss_scale"]) == 2.0**23
    for _ in range(20):
        state, metrics = update(state, batches())
    assert int(state.step) > 0 and np.isfinite(float(metrics["optim/grad_norm"]))


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_schedules(name):
    c = default_config().optimizer
    c.lr, c.schedule, c.warmup_steps, c.floor, c.decay_steps = 1.0, name, 4, 0.1, 10 if name == "wsd" else 0
    f = make_schedule(c, 24)
    assert [float(f(i)) for i in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert float(f(4)) == pytest.approx(1.0)
    assert float(f(24)) == pytest.approx(1.0 if name == "constant" else 0.1)
    assert float(f(13)) == pytest.approx(
        {
            "constant": 1.0,
            "wsd": 1.0,
            "linear": 1 - 0.9 * 9 / 20,
            "cosine": 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * 9 / 20)),
        }[name]
    )


@pytest.mark.parametrize("name, halfway", [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - 0.5**0.5)])
def test_shapes_of_the_decay_after_a_stable_phase(name, halfway):
    """Ten of twenty updates of decay from 1 to 0.1; a quarter of the way tells cosine from linear."""
    c = default_config().optimizer
    c.lr, c.schedule, c.warmup_steps, c.floor, c.decay_steps, c.decay_shape = 1.0, "wsd", 0, 0.1, 8, name
    f = make_schedule(c, 20)
    quarter = {"linear": 0.75, "cosine": (1 + np.cos(np.pi / 4)) / 2, "sqrt": 0.5}[name]
    assert [float(f(i)) for i in (0, 12, 14, 16, 20, 30)] == pytest.approx(
        [1, 1, *(0.1 + 0.9 * x for x in (quarter, halfway)), 0.1, 0.1])


def test_the_decay_has_a_length_of_its_own():
    """optimizer.decay_steps is not what the schedule would take: all of the rest, or wsd's last tenth."""
    def at(i, schedule, steps):
        c = default_config().optimizer
        c.lr, c.schedule, c.warmup_steps, c.decay_steps = 1.0, schedule, 0, steps
        return float(make_schedule(c, 40)(i))

    assert [at(10, "linear", n) for n in (0, 20)] == pytest.approx([0.75, 0.5])
    assert [at(10, "cosine", n) for n in (0, 20)] == pytest.approx([(1 + np.cos(np.pi / 4)) / 2, 0.5])
    assert [at(30, "wsd", n) for n in (0, 20)] == pytest.approx([1.0, 0.5])


def test_the_start_says_how_long_the_rate_rises_and_whether_the_run_ends_before():
    c = default_config().optimizer
    c.schedule, c.warmup_steps = "cosine", 0
    assert schedule_text(c, 3) == "cosine"
    c.warmup_steps = 20
    assert schedule_text(c, 100) == "cosine after 20 updates of warm-up"
    assert schedule_text(c, 20) == "cosine after 20 updates of warm-up, which this run of 20 does not leave"
    c.warmup_fraction = 0.1
    assert schedule_text(c, 100) == "cosine after 10 updates of warm-up"


def test_optimizer_groups_and_decay_spare_vectors():
    c = default_config().optimizer
    c.lr, c.warmup_steps, c.weight_decay, c.name = 0.1, 0, 0.5, "adamw"
    c.groups = {"embed": {"lr": 0.0}, "head": {"weight_decay": 0.0}}
    axes = {"embed": ("vocab", "embed"), "norm": ("layers", "norm"), "w": ("embed", "mlp"), "head": ("embed", "vocab")}
    optimizer, _ = training.make_optimizer(c, 10, axes)
    params = {k: jnp.ones((2, 3)) for k in axes}
    state = optimizer.init(params)
    updates, _ = optimizer.update({k: jnp.zeros((2, 3)) for k in axes}, state, params)
    assert (updates["embed"] == 0).all() and (updates["norm"] == 0).all() and (updates["head"] == 0).all()
    np.testing.assert_allclose(updates["w"], -0.05, rtol=1e-6)


@pytest.mark.full
def test_deeper_layers_learn_faster_by_layer_decay():
    """lr x 0.5^(L - l) with a group's multiplier beside it, by the layer that HF's names say, in layers that a scan repeats (two
    times two), in the one behind them and unrolled; the embedding is layer 0, the rest learns at lr. The state is the same
    without."""
    c = default_config().optimizer
    c.lr, c.warmup_steps, c.name, c.b1, c.groups = 0.1, 0, "sgd", 0.0, {"mlp/": {"lr": 3.0}}
    config = HF | {"model_type": "gemma2", "num_hidden_layers": 5, "head_dim": 8, "sliding_window": 8, "tie_word_embeddings": False}
    found, forms = {}, {}
    for scanned, decay in ((True, 0.5), (False, 0.5), (True, 1.0)):
        c.layer_decay = decay
        model = models.build(config, compute_dtype=jnp.float32, scan_layers=scanned)
        params = training.merge({"/".join(e.path): jnp.ones(e.shape) for e in model.entries}, {})
        flat = training.partition(params, (".*",), ())[0]
        optimizer, _ = training.make_optimizer(c, 10, flat_axes(model), flat_layers(model, model))
        state = optimizer.init(flat)
        updates, _ = optimizer.update(flat, state, flat)
        forms[decay] = jax.tree.structure(state)
        for e in model.entries:
            ours = updates["/".join(e.path)]
            for i, name in zip(e.indices, e.hf_names, strict=True):
                found[scanned, decay, name] = {float(x) for x in np.unique(ours[i])}
    assert len(found) == 3 * (3 + 5 * 11) and forms[0.5] == forms[1.0]
    for (_, decay, name), steps in found.items():
        layer = int(name.split(".")[2]) + 1 if ".layers." in name else 0 if "embed_tokens" in name else 5
        want = -0.1 * decay ** (5 - layer) * (3 if ".mlp." in name else 1)
        assert list(steps) == pytest.approx([want], rel=1e-6), name


@pytest.mark.full
def test_optimizer_names_and_imports():
    c = default_config().optimizer
    c.lr = 1e-6
    axes = {"w": ("embed", "mlp")}
    for name in ("adamw", "adam", "sgd", "lion", "adafactor", "optax.rmsprop"):
        c.name = name
        optimizer, _ = training.make_optimizer(c, 10, axes)
        params = {"w": jnp.ones((4, 4))}
        updates, _ = optimizer.update({"w": jnp.ones((4, 4))}, optimizer.init(params), params)
        assert float(jnp.abs(updates["w"]).sum()) > 0, name
    c.name = "adamv"
    with pytest.raises(ConfigError, match="optimizer.name='adamv'"):
        training.make_optimizer(c, 10, axes)


def test_patterns_that_match_nothing_are_errors():
    params = params_of(tiny_model())
    with pytest.raises(ConfigError, match="lm_hed"):
        training.partition(params, (".*",), ("lm_hed",))
    with pytest.raises(ConfigError, match="no parameter to train"):
        training.partition(params, (".*",), (".*",))


@pytest.mark.slow
def test_entropy_and_kl_metrics_are_those_of_the_distribution():
    model, (traj, columns) = tiny_model(), batch_of_groups()
    params = params_of(model)
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    layout = layout_of(traj, "padded")
    _, metrics = gradient(model, params, traj, columns, weights, layout, np.float32)
    batch = training.pack(traj, layout.minibatches[0].microbatches[0], columns, weights)
    logp, entropy = forward_logprobs(
        model, params, jax.tree.map(jnp.asarray, batch), temperature=1.0, chunk=32, valid_RxS=batch.weights["token"] > 0
    )
    w = batch.weights["token"]
    assert float(metrics["policy/entropy"]) == pytest.approx(float((w * entropy).sum()), rel=1e-5)
    d = np.asarray(logp) - batch.columns["ref"]
    assert float(metrics["policy/kl"]) == pytest.approx(float((w * (np.exp(-d) + d - 1)).sum()), rel=1e-4)


@pytest.mark.slow
def test_gradient_is_the_same_however_trajectories_are_cut_into_sequences():
    """With a mean over trajectories of their token means; each turn is a sequence, or all turns are one."""
    whole = collect(*conversation(rewrite=False))
    where, parts = cut(whole)
    model, random, found = tiny_model(), np.random.default_rng(2), []
    columns = {name: random.normal(size=len(whole.tokens)) for name in ("ref", "advantage")}
    columns |= {"old": whole.logprobs, "behaviour": whole.logprobs}
    for traj, own in ((whole, columns), (parts, {k: v[where] for k, v in columns.items()})):
        layout = training.make_layout(traj.sizes, RowShapes((64,), ((2,),)), num_minibatches=2, seed=1)
        weights = training.loss_weights(traj, layout.minibatches[0].sequences, "sequence_mean")
        grads, _ = gradient(model, params_of(model), traj, own, weights, layout, np.float32)
        found.append((set(traj.trajectory[layout.minibatches[0].sequences]), grads))
    assert found[0][0] == found[1][0] and worst(found[1][1], found[0][1]) < 2e-5
