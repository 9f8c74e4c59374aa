"""algorithm.routes: experts that sampling or scoring chose are those of the update, and nothing else changes."""

import base64
import dataclasses
import functools
import io
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.rollout_helpers import END, config, random_params, tokenizer
from helpers.training_helpers import HF, batch_of_groups, params_of, policy_objective

from jaxrl import training
from jaxrl.errors import ConfigError
from jaxrl.kernels.experts import reference
from jaxrl.kernels.experts.exchange import Exchange
from jaxrl.models import build, feed_forward
from jaxrl.resolve.checks.common import check
from jaxrl.rl.roles import Roles
from jaxrl.rl.trajectories import collect, results_from_bytes, results_to_bytes
from jaxrl.rollout import EngineContext, Key, Request, SamplingParams, Turn, generate, make_engine
from jaxrl.rollout.vllm import adapter
from jaxrl.training import router
from jaxrl.training.layout import RowShapes
from jaxrl.training.update import loss_and_metrics

MOE = {**HF, "model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [0],
       "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 8}
LAYOUTS = {"padded": (24, 20, False), "packed": (48, 16, False), "shared": (48, 16, True), "8 microbatches": (48, 1, True)}
LOSS = policy_objective(max_grad_norm=0.0)
PUT = functools.partial(jax.tree.map, jnp.asarray)


def batches_of(traj, columns, name, dtype=np.float32):
    length, rows, share = LAYOUTS[name]
    layout = training.make_layout(traj.sizes, RowShapes((length,), ((rows,),)), share_prompts=share)
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    return [PUT(training.pack(traj, m, columns, weights, dtype)) for m in layout.minibatches[0].microbatches]


def random_routes(traj, model, seed=0, unknown=0.2):
    """Distinct experts of every token and layer, some tokens without; those of a prompt are the same in its group."""
    cfg, rng = model.config, np.random.default_rng(seed)
    draw = lambda: np.concatenate([rng.permutation(cfg.num_experts)[:cfg.experts_per_token]  # noqa: E731
                                   for _ in range(cfg.num_expert_layers)])
    routes = np.array([draw() for _ in traj.tokens], np.int16)
    routes[rng.random(len(routes)) < unknown] = -1
    for group in np.unique(traj.group):
        first, *others = traj.offsets[:-1][traj.group == group]
        prompt = traj.prompt_lengths[traj.group == group][0]
        for other in others:
            routes[other:other + prompt] = routes[first:first + prompt]
    return routes


def fixed(model, batch):
    """A router that has the batch's experts, written anew: gates by a one-hot sum, and its own choice by sorting."""
    layers = iter(np.moveaxis(np.asarray(batch.routes).reshape(*batch.tokens.shape, -1, 2), 2, 0))

    def route(own, x):
        given, kernel = next(layers), own.values["mlp/router/kernel"]
        logits = jnp.einsum("bld,de->ble", x, kernel)
        best = jnp.argsort(-jax.lax.stop_gradient(logits), axis=-1)[..., :2]
        ids = jnp.where(given[..., :1] < 0, best, given)
        chosen = jnp.einsum("blke,ble->blk", jax.nn.one_hot(ids, 6, dtype=x.dtype), jnp.exp(logits))
        return feed_forward.Routing(ids, chosen / chosen.sum(-1, keepdims=True), best, logits)

    return route


def every(x, ids, gates, *weights, activation, matmul, biases, implementation):
    """All experts on all tokens."""
    flat = (a.reshape(-1, a.shape[-1]) for a in (x, ids, gates))
    return reference.experts(*flat, (*weights, *biases), activation, Exchange()).reshape(x.shape)


@pytest.mark.slow
@pytest.mark.parametrize("scan", (False, True))
def test_the_gradient_is_that_of_fixed_experts(monkeypatch, scan):
    """1e-12 in float64 per tensor, routers included, for scanned and unrolled layers, with tokens that have no ids."""
    with jax.enable_x64(True):
        model = build(MOE, compute_dtype=jnp.float64, scan_layers=scan)
        plain = build(MOE, compute_dtype=jnp.float64, scan_layers=False)
        params, (traj, columns) = params_of(plain, jnp.float64), batch_of_groups(groups=2, size=2)
        batch = batches_of(traj, {**columns, "routes": random_routes(traj, model)}, "shared", np.float64)[0]

        def gradient(m, values, batch):
            trainable, _ = training.partition(values, (".*",), ())
            return jax.jit(jax.grad(lambda t: loss_and_metrics(t, {}, batch, m, LOSS)[0]))(trainable)

        found = gradient(model, params if not scan else params_of(model, jnp.float64), batch)
        monkeypatch.setattr(feed_forward, "route", fixed(plain, batch))
        monkeypatch.setattr(feed_forward, "routed", every)
        want = gradient(plain, params, batch.replace(routes=None))
        monkeypatch.undo()
        own = gradient(plain, params, batch.replace(routes=None))
        if scan:
            stack = lambda name: jnp.stack([want[name.replace("layers/sub_0", f"layer_{i}")] for i in (1, 2)])  # noqa: E731
            want = {name: stack(name) if name.startswith("layers/") else want[name] for name in found}
        for name, x in found.items():
            assert np.linalg.norm(x - want[name]) <= 1e-12 * np.linalg.norm(want[name]), name
        assert any(np.linalg.norm(want[n] - own[n]) > 1e-3 * np.linalg.norm(own[n]) for n in want if n in own)
        assert any(np.abs(x).max() > 0 for name, x in found.items() if "router" in name)


@pytest.mark.slow
def test_no_layout_changes_the_gradient():
    with jax.enable_x64(True):
        model = build(MOE, compute_dtype=jnp.float64, scan_layers=True)
        params, (traj, columns) = params_of(model, jnp.float64), batch_of_groups(groups=5, size=4)
        columns["routes"] = random_routes(traj, model)
        trainable, _ = training.partition(params, (".*",), ())
        step = jax.jit(jax.value_and_grad(lambda t, b: loss_and_metrics(t, {}, b, model, LOSS), has_aux=True))
        found = {}
        for name in LAYOUTS:
            parts = [step(trainable, b) for b in batches_of(traj, columns, name, np.float64)]
            found[name] = jax.tree.map(lambda *x: sum(x), *((told, grads) for (_, told), grads in parts))
        (told, grads) = found.pop("padded")
        assert 0.5 < told["router/replayed"] < 0.95 and 0.3 < told["router/mismatch"]
        for name, (own, other) in found.items():
            assert np.isclose(own["router/mismatch"], told["router/mismatch"], atol=1e-12)
            for key, want in grads.items():
                assert np.linalg.norm(other[key] - want) < 1e-12 * np.linalg.norm(want), (name, key)


@functools.cache
def sampled():
    """(model, weights, requests, results) of a sampler that tells its experts."""
    m = build({**MOE, "vocab_size": 64}, compute_dtype=jnp.float32, scan_layers=True)
    weights = random_params(m, 0, 0.3)
    cfg = config(slots=8, max_new_tokens=10)
    cfg.algorithm.routes = "sampled"
    engine = make_engine(EngineContext(cfg, m, tokenizer(), None, (END,), MOE))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(4, 64, n) for n in (3, 9, 1)]
    keys = [Key("t", 0, i // 4, i % 4) for i in range(12)]
    asked = [Request(str(k), prompts[k.prompt], SamplingParams(max_new_tokens=4 + k.sample), seed=i, group=k.prompt, key=k)
             for i, k in enumerate(keys)]
    told = []
    for noise in (0.0, 2.0):
        engine.publish(noisy(weights, noise), 0)
        told.append(generate(engine, asked, 600.0))
    engine.close()
    return m, weights, asked, *told


def noisy(params, scale, seed=5):
    """The weights with noise in the routers."""
    rng = np.random.default_rng(seed)
    change = lambda path, x: x + scale * jnp.asarray(rng.normal(size=x.shape) * x.std(), x.dtype) if any(  # noqa: E731
        k.key == "router" for k in path) else x
    return jax.tree_util.tree_map_with_path(change, params)


def scored(m, weights, traj, **how):
    layout = training.make_layout(traj.sizes, training.row_shapes((), 24, 96, 1, 1))
    score = training.make_score(m, temperature=1.0, chunk=64, put=PUT, **how)
    return lambda **columns: score(weights, traj, layout, columns or None)


@pytest.mark.slow
def test_sampled_experts_are_the_trainers_own():
    """With equal weights, in fp32: of every token but the last, prompts included, as the scoring pass chooses them."""
    m, weights, asked, results, _ = sampled()
    traj = collect(asked, results)
    routes, last = traj.columns["routes"], traj.offsets[1:] - 1
    assert routes.shape == (len(traj.tokens), 4) and (routes[last] == -1).all()
    found = scored(m, weights, traj, routes=True)()
    known = np.ones(len(routes), bool)
    known[last] = False
    np.testing.assert_array_equal(routes[known], found["routes"][known])
    assert len(np.unique(found["routes"][known], axis=0)) > 10
    replayed = scored(m, weights, traj)(routes=routes)
    np.testing.assert_allclose(replayed, found["logprob"], atol=1e-6)
    np.testing.assert_allclose(replayed[traj.loss_mask], traj.logprobs[traj.loss_mask], atol=1e-4)


@pytest.mark.full
def test_noise_in_the_samplers_router():
    """A sampler that routes otherwise is farther from the trainer; replayed experts bring them together."""
    m, weights, asked, _, results = sampled()
    traj = collect(asked, results)
    score = scored(m, weights, traj)
    own, sampled_ = (np.abs(found - traj.logprobs)[traj.loss_mask].mean() for found in (
        score(), score(routes=traj.columns["routes"])))
    assert own > 0.01 and sampled_ < 0.8 * own, (own, sampled_)


def test_scored_experts_are_replayed_whole():
    """Of shared prompts and completions in whatever row; the update that replays them has ratios of 1 and no mismatch."""
    m, weights, asked, results, _ = sampled()
    traj = collect(asked, results)
    del traj.columns["routes"]
    found = scored(m, weights, traj, routes=True)()
    columns = {"advantage": np.ones(len(traj.tokens)), "behaviour": traj.logprobs, "old": found["logprob"], "ref": found["logprob"],
               "routes": found["routes"]}
    trainable, _ = training.partition(weights, (".*",), ())
    objective = policy_objective(old="column", max_grad_norm=0.0)
    _, told = jax.jit(lambda b: loss_and_metrics(trainable, {}, b, m, objective))(batches_of(traj, columns, "shared")[0])
    told = router.summarize_load(told)
    assert told["router/mismatch"] == 0 and np.isclose(told["router/replayed"], 1) and told["old_gap/max"] < 1e-5


def test_a_batch_keeps_them_on_its_way():
    """Between processes and in checkpoints; completions that are cut; results that tell none beside others."""
    _, _, asked, results, _ = sampled()
    results = [dataclasses.replace(results[0], routes=None), *results[1:]]
    again, meta = results_from_bytes(results_to_bytes(results, ["x"]))
    assert meta == ["x"] and again[0].routes is None
    for a, b in zip(results[1:], again[1:], strict=True):
        np.testing.assert_array_equal(a.routes, b.routes)
        np.testing.assert_array_equal(a.tokens, b.tokens)
    traj = collect(asked, again, max_sequence_tokens=11)
    rows = np.split(traj.columns["routes"], traj.offsets[1:-1])
    assert (rows[0] == -1).all() and len(rows[5]) == 11 < len(results[5].routes)
    np.testing.assert_array_equal(rows[5], results[5].routes[:11])


def test_conversations_keep_them_by_turn():
    """A turn's last token is run with the next prompt; what a rewritten history opens begins anew."""
    from jaxrl.rollout.episode_results import join_results, recorded_turns

    _, _, asked, results, _ = sampled()
    part = lambda routes, n: dataclasses.replace(  # noqa: E731
        results[0], **{k: getattr(results[0], k)[:n] for k in ("tokens", "logprobs", "log_kept_mass", "versions")}, routes=routes)
    count = lambda start, n: np.append(np.arange(start, start + n - 1), -1).astype(np.int16)[:, None]  # noqa: E731
    parts = [part(count(0, 5), 2), part(count(0, 9), 3), part(count(50, 4), 1)]
    turns = [Turn(np.arange(3), True, 2), Turn(np.arange(1), False, 3), Turn(np.arange(3), True, 1)]
    joined = join_results(asked[0], parts, turns, "stop")
    assert joined.routes[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, -1, 50, 51, 52, -1]
    again = join_results(asked[0], [p for _, p in recorded_turns(joined)], turns, "stop")
    np.testing.assert_array_equal(again.routes, joined.routes)
    traj = collect(asked[:1], [joined])
    np.testing.assert_array_equal(traj.columns["routes"], joined.routes)


def recorded(array):
    """As vLLM's GenerateTokensChoice documents `routed_experts`: base64 of a .npy file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def test_vllm_tells_them():
    """[tokens - 1, all layers, K] in uint8 or uint16; rows that are missing make a completion route by itself."""
    routed = adapter.ExpertRouting.of(build(MOE, compute_dtype=jnp.float32, scan_layers=False).config)
    assert routed == adapter.ExpertRouting((1, 2), 3, 6, 2)
    told = np.arange(7 * 3 * 2).reshape(7, 3, 2) % 6
    for kind in (np.uint8, np.uint16, np.int32):
        found = routed.parse(recorded(told.astype(kind)), 8)
        assert found.dtype == np.int16 and (found[-1] == -1).all()
        np.testing.assert_array_equal(found[:-1], told[:, 1:].reshape(7, 4))
    assert (routed.parse(recorded(told[:5].astype(np.uint8)), 8) == -1).all()
    for wrong in (None, recorded(told[:, :2].astype(np.uint8)), recorded((told + 1).astype(np.uint8))):
        with pytest.raises(adapter.Refused, match="algorithm.routes=sampled"):
            routed.parse(wrong, 8)
    cfg = config()
    cfg.algorithm.routes = "sampled"
    launch = lambda cpu: adapter.launch(cfg, "m", "float32", 64, 1, cpu, "")  # noqa: E731
    assert "--enable-return-routed-experts" in launch(False)[0]
    with pytest.raises(ConfigError, match="build for CPUs"):
        launch(True)


@pytest.mark.full
def test_what_cannot_be_had_is_refused():
    def refused(text, **options):
        cfg = config()
        cfg.run.recipe, cfg.reward.functions = "rl", ("math",)
        for name, value in options.items():
            cfg[name].update(value)
        with pytest.raises(ConfigError, match=text):
            check(cfg)

    refused("old_logprobs=recompute", algorithm={"routes": "scored"})
    refused("critic.shared", algorithm={"routes": "sampled", "preset": "ppo"}, critic={"shared": True})
    refused("stop_token_ids", algorithm={"routes": "sampled"}, rollout={"engine": "vllm", "stop": ("x",)})
    cfg = config()
    cfg.algorithm.routes = "sampled"
    dense = build(HF, compute_dtype=jnp.float32, scan_layers=False)
    with pytest.raises(ConfigError, match="no experts"):
        Roles(types.SimpleNamespace(config=cfg, model=dense), 1)
