"""Adapters in the model: the factored product is the merged one, its gradients are those of the dense matrix put through A and B, and
what is frozen costs nothing. (tests/helpers/lora_cases.py)"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers.lora_cases import GEMMA, HF, LINEAR, all_linear, batch, build, gradient, hidden, init, merged, started

from jaxrl.errors import ConfigError
from jaxrl.models import adapters
from jaxrl.models.adapters import Adapter, Target
from jaxrl.models.placement import embed

SKIPPED = ((1, "mlp.up_proj"), (2, "self_attn.o_proj"))
LAYOUTS = [(HF, False), (HF, True), pytest.param({**HF, "attention_bias": True, "tie_word_embeddings": False, "model_type": "llama"}, True,
                                                marks=pytest.mark.slow), pytest.param(GEMMA, True, marks=pytest.mark.slow)]


def layers(hf):
    return hf["num_hidden_layers"]


@pytest.mark.full
@pytest.mark.parametrize("hf, scan", LAYOUTS)
def test_the_factored_product_is_the_merged_one_and_so_are_its_gradients(hf, scan):
    """In float64, with ranks that differ along a scanned stack and modules without adapter: loss and hidden states to 1e-12, and
    dL/dA = scale dL/dW B^T, dL/dB = scale A^T dL/dW with dL/dW the gradient at W + scale A B."""
    with jax.enable_x64(True):
        model = build(all_linear(layers(hf), skip=SKIPPED), hf, scan, jnp.float64)
        params = started(model, dtype=jnp.float64)
        whole, rows = merged(model, params), batch()
        np.testing.assert_allclose(hidden(model, params, *rows), hidden(model.base, whole, *rows), rtol=0, atol=1e-12)
        ours, dense = (flatten_dict(gradient(*given, *rows), sep="/") for given in ((model, params), (model.base, whole)))
        values, checked = flatten_dict(params, sep="/"), 0
        for entry in model.entries:
            name = "/".join(entry.path)
            if entry.path[-1] not in ("a", "b"):
                continue
            module = name.rpartition("/lora/")[0]
            lead, rank = entry.stacked, model_rank(entry)
            flat = functools.partial(flattened, lead)
            a, b, g = values[f"{module}/lora/a"], values[f"{module}/lora/b"], dense[f"{module}/kernel"]
            a, b = flat(a, (-1, rank)), flat(b, (rank, -1))
            g = flat(g, (a.shape[-2], b.shape[-1]))
            scale = np.asarray(values[f"{module}/lora/scale"]).reshape(*a.shape[:lead], 1, 1)
            want = scale * (g @ np.swapaxes(b, -1, -2) if entry.path[-1] == "a" else np.swapaxes(a, -1, -2) @ g)
            np.testing.assert_allclose(flat(ours[name], want.shape[lead:]), want, rtol=0, atol=1e-12)
            checked += np.abs(want).max() > 1e-4
        assert checked >= 14


def flattened(lead, x, inner):
    return np.asarray(x).reshape(*x.shape[:lead], *inner)


def model_rank(entry):
    return entry.shape[-1] if entry.path[-1] == "a" else entry.shape[entry.stacked]


@pytest.mark.slow
def test_scanned_and_unrolled_layers_are_the_same_model():
    """Start values, hidden states and gradients do not depend on how the layers are laid out, and padding stays zero."""
    adapter, rows, out = all_linear(skip=SKIPPED), batch(), []
    for scan in (False, True):
        model = build(adapter, scan=scan)
        params = started(model)
        found = gradient(model, params, *rows)
        named = {}
        for entry in model.entries:
            if entry.row.init == "adapter" and entry.path[-1] != "scale":
                kernel = next(e for e in model.base.entries if e.path == (*entry.path[:-2], "kernel"))
                for i, name in zip(kernel.indices, kernel.hf_names, strict=True):
                    named[name, entry.path[-1]] = [np.asarray(entry.of(tree)[i]) for tree in (params, found)]
        out.append((np.asarray(hidden(model, params, *rows)), named))
    (states, unrolled), (same, scanned) = out
    np.testing.assert_allclose(same, states, rtol=0, atol=1e-5)
    ranks = {target.name: target.rank for target in adapter.targets}
    for (name, leaf), (value, found) in scanned.items():
        rank = ranks.get(adapters.module_of(name), 0)
        cut = (..., slice(0, rank)) if leaf == "a" else slice(0, rank)
        rest = (..., slice(rank, None)) if leaf == "a" else slice(rank, None)
        assert not np.any(value[rest]) and not np.any(found[rest])
        if rank:
            np.testing.assert_array_equal(value[cut], unrolled[name, leaf][0])
            np.testing.assert_allclose(found[cut], unrolled[name, leaf][1], rtol=0, atol=1e-5)


@pytest.mark.full
def test_an_adapter_that_starts_changes_nothing_and_off_is_the_base_bitwise():
    """B is zero: with it the model computes the base's numbers, and without its leaves the very same program does."""
    model = build(all_linear())
    params, rows = init(model, jax.random.key(7)), batch()
    base = init(model.base, jax.random.key(7))
    jax.tree.map(np.testing.assert_array_equal, adapters.without(params), base)
    plain = hidden(model.base, base, *rows)
    np.testing.assert_array_equal(hidden(model.base, adapters.without(params), *rows), plain)
    np.testing.assert_array_equal(hidden(model, params, *rows), plain)
    jax.tree.map(np.testing.assert_array_equal, merged(model, params), base)


@pytest.mark.full
def test_the_start_is_peft_s():
    """A is uniform in +-1/sqrt(inputs) (default) or normal with deviation 1/r (gaussian), drawn by module."""
    model = build(Adapter(tuple(Target(f"model.layers.{i}.{name}", 16, 1.0) for i in range(3) for name in LINEAR)), {**HF, "hidden_size": 64})
    for name, deviation, bound in (("default", 1 / np.sqrt(3 * 64), 1 / 8), ("gaussian", 1 / 16, 1)):
        start = jax.jit(functools.partial(adapters.initial, model, name=name))(jax.random.key(0))
        a = [np.asarray(start[f"layer_{i}/attention/query/lora/a"]) for i in range(3)]
        assert np.abs(a).max() <= bound and not np.array_equal(a[0], a[1])
        assert abs(np.std(a) / deviation - 1) < 0.06
        assert all(not np.any(x) for path, x in start.items() if path.endswith("/b"))
        assert {x.dtype for x in start.values()} == {np.dtype("float32")}
    with pytest.raises(ConfigError, match="lora.init='he_uniform': choose default, gaussian"):
        adapters.initial(model, jax.random.key(0), "he_uniform")


@pytest.mark.full
def test_shifted_adapters_subtract_their_start():
    with jax.enable_x64(True):
        model = build(dataclasses.replace(all_linear(), shifted=True), dtype=jnp.float64)
        params, rows = started(model, dtype=jnp.float64), batch()
        np.testing.assert_allclose(hidden(model, params, *rows), hidden(model.base, merged(model, params), *rows), rtol=0, atol=1e-12)
        start = {n[:-1]: x for n, x in flatten_dict(params, sep="/").items() if n.endswith(("/a0", "/b0"))}
        same = adapters.joined(params, start)
        np.testing.assert_allclose(hidden(model, same, *rows), hidden(model.base, adapters.without(params), *rows), rtol=0, atol=1e-12)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.slow
def test_decomposed_adapters_have_the_lengths_that_they_train(scan):
    """DoRA in float64: the factored product is the merged one, whose columns are as long as m says; at the start, and where a
    repetition of a stack has no adapter, it is the base. The gradient takes the lengths for constants."""
    with jax.enable_x64(True):
        model = build(dataclasses.replace(all_linear(skip=SKIPPED), decomposed=True), scan=scan, dtype=jnp.float64)
        rows, start = batch(), jax.tree.map(lambda x: x.astype(jnp.float64), init(model, jax.random.key(0)))
        np.testing.assert_allclose(hidden(model, start, *rows), hidden(model.base, adapters.without(start), *rows), rtol=0, atol=1e-5)
        params = started(model, dtype=jnp.float64)
        whole = merged(model, params)
        np.testing.assert_allclose(hidden(model, params, *rows), hidden(model.base, whole, *rows), rtol=0, atol=1e-12)
        flat, kernels, found = (flatten_dict(x, sep="/") for x in (params, whole, gradient(model, params, *rows)))
        for entry in model.base.entries:
            name, m = "/".join(entry.path), "/".join((*entry.path[:-1], "lora/m"))
            if entry.path[-1] == "kernel" and m in flat:
                lengths = np.linalg.norm(flattened(entry.stacked, kernels[name], (-1, np.prod(flat[m].shape[entry.stacked:]))), axis=-2)
                has = np.broadcast_to(np.asarray(flat[f"{m[:-1]}scale"] != 0)[..., None], lengths.shape)
                np.testing.assert_allclose(lengths[has], np.abs(flattened(entry.stacked, flat[m], (-1,)))[has], rtol=1e-12)
                assert (np.abs(flattened(entry.stacked, found[m], (-1,))) > 0)[has].all() and not np.any(
                    flattened(entry.stacked, found[m], (-1,))[~has])
                assert name != "layers/sub_0/mlp/up/kernel" or (~has).any()


@pytest.mark.full
def test_modules_that_train_whole():
    """Of a tied head both uses train; a scanned array trains in all of its repetitions or is refused."""
    saved = lambda *names, **more: adapters.trains(build(dataclasses.replace(all_linear(), saved=names), **more))  # noqa: E731
    assert {n for n in saved("lm_head", "model.norm") if not adapters.is_adapter(n)} == {"embed/embedding", "final_norm/scale"}
    assert "head/kernel" in saved("lm_head", hf={**HF, "tie_word_embeddings": False})
    norms = tuple(f"model.layers.{i}.input_layernorm" for i in range(3))
    assert "layers/sub_0/attention_norm/scale" in saved(*norms, scan=True)
    with pytest.raises(ConfigError, match="model.scan_layers=false"):
        saved(*norms[:2], scan=True)
    with pytest.raises(ConfigError, match="model.layers.0.self_attn.q_proj is a target, too"):
        saved("model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize("name, said", [
    ("model.layers.9.mlp.up_proj", "is not in this model"), ("model.embed_tokens", "lora.modules_to_save trains a module whole"),
    ("model.norm", "is no linear map")])
def test_what_cannot_be_a_target_is_refused(name, said):
    with pytest.raises(ConfigError, match=said):
        build(Adapter((Target(name, 4, 1.0),))).entries  # noqa: B018


@pytest.mark.full
def test_a_frozen_embedding_gets_no_gradient():
    """Neither the scatter that would give it nor the table among what the backward pass keeps."""
    def lookup(table, factor, tokens):
        return (embed(table, tokens, jnp.float32) * factor).sum()

    table, tokens = jnp.ones((50, 8)), np.zeros((2, 3), np.int32)
    learns = str(jax.make_jaxpr(jax.grad(lookup, argnums=(0, 1)))(table, 1.0, tokens))
    frozen = str(jax.make_jaxpr(jax.grad(lookup, argnums=1))(table, 1.0, tokens))
    assert "scatter-add" in learns and "scatter-add" not in frozen
    grad = jax.grad(lookup)(table, 1.0, tokens)
    assert grad[0].tolist() == [6.0] * 8 and not np.any(grad[1:])


@pytest.mark.full
def test_the_digest_of_a_base_sees_every_bit_and_no_layout():
    params = init(build(), jax.random.key(0))
    first = adapters.digest(params)
    assert first.shape == (32,) and np.array_equal(adapters.digest(jax.tree.map(jnp.copy, params)), first)
    table = np.array(params["embed"]["embedding"])
    table[3, 5] = np.nextafter(table[3, 5], 9.0, dtype=np.float32)
    changed = adapters.joined(params, {"embed/embedding": jnp.asarray(table)})
    swapped = adapters.joined(params, {"embed/embedding": params["embed"]["embedding"][::-1]})
    halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    prints = {adapters.digest(p).tobytes() for p in (params, changed, swapped, halved)}
    assert len(prints) == 4


@pytest.mark.full
def test_dropout_drops_its_share_and_keeps_the_mean():
    x, keep = np.ones((400, 50), np.float32), np.float32(0.75)
    out = np.asarray(adapters.dropped(x, jax.random.key_data(jax.random.key(1)), keep))
    assert set(np.unique(out)) == {np.float32(0), np.float32(1) / keep}
    assert abs((out == 0).mean() - 0.25) < 0.01


@pytest.mark.slow
def test_sharded_adapters_are_those_of_one_device():
    """On eight simulated devices, dp x fsdp x tp = 2 x 2 x 2 (sharded_lora.py): A lies as the kernel's inputs, B as its outputs."""
    worker = Path(__file__).parents[1] / "helpers" / "sharded_lora.py"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, worker.parents[1:3]))}
    done = subprocess.run([sys.executable, worker], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.splitlines()[-1])
    assert out["devices"] == 8 and out["start"] and out["digest"]
    assert out["specs"] == {"attention/query/lora/a": [None, "fsdp", None], "attention/query/lora/b": [None, None, "tp", None],
                            "attention/out/lora/a": [None, "tp", None, None], "attention/out/lora/b": [None, None, "fsdp"],
                            "mlp/down/lora/a": [None, "tp", None], "mlp/down/lora/b": [None, None, "fsdp"]}
    assert max(worst for worst, _ in out["few"].values()) < 5e-6
    assert out["few"]["nf4"][1] == {"down/kernel/codes": [None, "tp", None, "fsdp"], "down/kernel/scale": [None, "tp", "fsdp"],
                                    "up/kernel/codes": [None, "fsdp", None, "tp"]}
    assert out["few"]["int8"][1] == {"down/kernel/codes": [None, "tp", "fsdp"], "down/kernel/scale": [None, "fsdp"],
                                     "up/kernel/codes": [None, "fsdp", "tp"]}
    assert out["hidden"] < 2e-6 and out["gradient"] < 2e-6 and out["merged"] < 1e-6
