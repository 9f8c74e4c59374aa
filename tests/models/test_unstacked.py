"""The sampler's layout of weights on GPUs, on CPUs: the same model, layer by layer, with fewer products."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.lora_cases import GEMMA, HF, all_linear, build, started
from helpers.rollout_helpers import END, config, params, prompt, tokenizer
from helpers.rollout_helpers import HF as SAMPLED
from helpers.tiers import first_cases

from jaxrl import models
from jaxrl.models import unstacked
from jaxrl.rollout import EngineContext, Request, SamplingParams, generate, make_engine

QWEN3 = {**HF, "model_type": "qwen3", "head_dim": 8}
LLAMA = {**HF, "model_type": "llama", "mlp_bias": True}
EXPERTS = {**HF, "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1, "norm_topk_prob": True}


class OnGpu:
    """A mesh that says that it is of GPUs."""

    def __init__(self, tp=1):
        self.shape = {"tp": tp}
        self.devices = np.array([type("Device", (), {"platform": "gpu"})])


@pytest.mark.full
@first_cases(3, "hf", [HF, GEMMA, EXPERTS, QWEN3, LLAMA], ids=["qwen2", "gemma3", "experts", "qwen3", "llama"], full=0)
def test_the_layout_for_decoding_is_the_same_model(hf):
    """Prefill and three decoding steps give the scanned model's hidden states; every array is as its entry says."""
    source = models.build(hf, compute_dtype=jnp.float32, scan_layers=True)
    target = unstacked.for_decoding(source, OnGpu())
    assert target.joined and not target.scan_layers
    weights = source.init(jax.random.key(0))
    weights = jax.tree.map(lambda a: a + 0.02 * jnp.arange(a.size).reshape(a.shape) % 0.11, weights)  # biases count
    laid = unstacked.laid_out(source, target, weights)
    assert jax.tree.map(jnp.shape, laid) == target.tree(lambda entry: entry.shape)
    joined = [entry.path[1:] for entry in target.entries if entry.path[-2] in ("query_key_value", "gate_up")]
    assert ("attention", "query_key_value", "kernel") in joined
    assert hf is EXPERTS or ("mlp", "gate_up", "kernel") in joined
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 61)
    lengths = jnp.array([9, 6])
    found = {}
    for name, model, p in (("source", source, weights), ("target", target, laid)):
        hidden, kv = model.prefill(p, tokens[:, :9], lengths)
        cache = model.insert(model.init_cache(2, 16, jnp.float32), kv, jnp.arange(2), jnp.arange(2))
        seen = [hidden]
        for step in range(3):
            hidden, cache = model.decode(p, tokens[:, 9 + step], lengths + step, cache)
            seen.append(hidden)
        found[name] = np.stack(seen)
    np.testing.assert_allclose(found["target"], found["source"], rtol=0, atol=2e-5)


def test_layers_of_a_kind_are_lowered_once():
    """So their kernels are compiled once. No weights are cut out of an array of all layers; a layer has 4 products."""
    deep = models.build({**HF, "num_hidden_layers": 5}, compute_dtype=jnp.float32, scan_layers=True)
    model = unstacked.for_decoding(deep, OnGpu())
    shapes = model.tree(lambda entry: jax.ShapeDtypeStruct(entry.shape, jnp.float32))
    cache = jax.eval_shape(lambda: model.init_cache(4, 32, jnp.float32))
    ids = jax.ShapeDtypeStruct((4,), jnp.int32)
    text = jax.jit(model.decode).lower(shapes, ids, ids, cache).as_text()
    assert len(re.findall(r"func.func private @_layer\b", text)) == 1
    assert len(re.findall(r"call @_layer\b", text)) == 5
    layer = text[text.index("func.func private @_layer"):]
    layer = layer[:layer.index("\n  }")]
    weights = [line for line in layer.splitlines() if "dot_general" in line and "batching_dims" not in line]
    assert len(weights) == 4, weights
    assert not re.findall(r"dynamic_slice.*tensor<5x", text)


@pytest.mark.full
def test_adapters_are_cut_out_where_every_layer_has_them():
    """With adapters products stay apart; ranks that a scan filled up stay so. Where a layer has none the scan stays."""
    even = build(all_linear(3, rank=2), scan=True)
    target = unstacked.for_decoding(even, OnGpu())
    assert not target.scan_layers and not target.joined
    weights = started(even)
    laid = unstacked.laid_out(even, target, weights)
    tokens, lengths = jax.random.randint(jax.random.key(1), (2, 9), 0, 61), jnp.array([9, 6])
    hidden = [model.prefill(p, tokens, lengths)[0] for model, p in ((target, laid), (even, weights))]
    np.testing.assert_allclose(*hidden, rtol=0, atol=2e-5)
    uneven = build(all_linear(3, rank=2, skip=((1, "mlp.up_proj"),)), scan=True)
    assert unstacked.for_decoding(uneven, OnGpu()) == uneven
    assert not unstacked.for_decoding(build(scan=True), OnGpu(tp=2)).joined


@pytest.mark.full
def test_an_engine_samples_the_same_in_either_layout(monkeypatch):
    """Weights come as a trainer has them, scanned: the same tokens, and their log-probs to rounding."""
    scanned = models.build(SAMPLED, compute_dtype=jnp.float32, scan_layers=True)
    stacked = dict(params())
    layers = [stacked.pop(f"layer_{i}") for i in range(2)]
    stacked["layers"] = {"sub_0": jax.tree.map(lambda *a: jnp.stack(a), *layers)}
    said = {}
    for own in (False, True):
        if own:
            monkeypatch.setattr(unstacked, "for_decoding",
                                lambda model, mesh: dataclasses.replace(model, scan_layers=False, joined=True))
        c = config(slots=8, compaction=False, prompt_lengths=(20,), cache_lengths=(44,), decode_steps=8 + own)
        engine = make_engine(EngineContext(c, scanned, tokenizer(), None, (END,), SAMPLED))
        engine.publish(stacked, 0)
        assert ("layer_0" in engine._params) == own
        asked = [Request(f"{i}", prompt(i, 5 + 2 * i), SamplingParams(max_new_tokens=12, top_p=1 - 0.1 * i), seed=i)
                 for i in range(4)]
        said[own] = generate(engine, asked, 600.0)
        engine.publish(stacked, 1)
        engine.close()
    for a, b in zip(said[False], said[True], strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-5)
