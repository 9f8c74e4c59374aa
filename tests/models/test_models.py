"""The decoder against transformers, and against itself in its other forms."""

import copy
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import model_cases
from helpers.tiers import first_cases
from helpers.tiny_models import ARCHITECTURES, SIZES, edit_config

from jaxrl.errors import ConfigError
from jaxrl.models import FAMILIES, build, rope
from jaxrl.models.config import model_config
from jaxrl.models.io import hf

pytestmark = pytest.mark.torch  # the checkpoints are made by transformers' own models
SMALL = {**SIZES, "model_type": "qwen3", "head_dim": 8}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.slow
def test_logits_equal_transformers(folder, architecture):
    """Plain, padded, packed, shared prompt, and prefill + decode; all beyond the windows.

    Scanned for a block of one layer, and of two with a remainder (evidence/models.py scans them all).
    """
    path = folder(architecture)
    want = model_cases.reference(path)
    for scan_layers in (False, True) if architecture in ("qwen2", "gemma3", "olmo3", "smollm3") else (False,):
        worst = model_cases.differences(path, scan_layers, want)
        assert set(worst) == set(model_cases.CASES)
        assert max(worst.values()) < 1e-4, (scan_layers, worst)


@first_cases(1, "architecture, entry", [
    ("mistral", {"sliding_window": 7}), ("qwen2_window", {"sliding_window": 6}),
    ("qwen2_window", {"layer_types": ["sliding_attention", "full_attention"]}),
    ("gemma2", {"attn_logit_softcapping": 3.3}), ("gemma2", {"final_logit_softcapping": 4.4}),
    ("gemma2", {"query_pre_attn_scalar": 24}), ("gemma2", {"hidden_activation": "silu"}),
    ("llama3", {"rms_norm_eps": 1e-2}), ("llama3", {"rope_theta": 600.0}),
    ("qwen2_yarn", {"rope_scaling": {"attention_factor": 1.0}}), ("gemma3", {"rope_scaling": {"factor": 3.0}}),
])
def test_every_entry_matters_and_agrees(folder, tmp_path, architecture, entry):
    """Changing one config entry moves our logits, and moves them to where transformers' go."""
    path = folder(architecture)
    config = hf.load_config(path, overrides=entry)
    arrays, _ = model_cases.batch()
    row = tuple(x[:1] for x in arrays)

    def logits(config):
        model = build(config, compute_dtype=jnp.float32, scan_layers=False)
        params = hf.load_params(model, path)
        return np.asarray(model_cases.forward(model, params, *row))[0]

    changed = logits(config)
    assert np.abs(changed - logits(hf.load_config(path))).max() > 1e-3
    (tmp_path / "model.safetensors").symlink_to(f"{path}/model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    edit_config(tmp_path, **{k: v for k, v in config.items() if k != hf.SOURCE})
    assert np.abs(changed - model_cases.reference(tmp_path)(row[0][0])).max() < 1e-4


@pytest.mark.full
def test_float64_forms_agree():
    """Scanned and unrolled, packed and alone in a row: 1e-12 in float64."""
    with jax.enable_x64(True):
        config = {**SMALL, "model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 5}
        arrays, checks = model_cases.batch()
        alone = np.zeros((4, len(checks), model_cases.LENGTH), np.int32)  # tokens, positions, segments, prefixes
        for i, (_, _, _, sequence) in enumerate(checks):
            n = len(sequence)
            alone[0, i, :n], alone[1, i, :n], alone[2, i, :n] = sequence, np.arange(n), 1
        both = [np.concatenate([a, b]) for a, b in zip(arrays, alone, strict=True)]
        results = []
        for scan_layers in (False, True):
            model = build(config, compute_dtype=jnp.float64, scan_layers=scan_layers)
            params = jax.tree.map(lambda x: x.astype(jnp.float64), init(model, 7))
            results.append(np.asarray(model_cases.forward(model, params, *both)))
        assert results[0].dtype == np.float64
        np.testing.assert_allclose(results[0], results[1], rtol=0, atol=1e-12)
        for i, (case, row, columns, sequence) in enumerate(checks):
            want = results[0][len(arrays[0]) + i, :len(sequence)]
            np.testing.assert_allclose(results[0][row, columns], want[-len(columns):], rtol=0, atol=1e-12, err_msg=case)


def init(model, seed=0):
    return jax.jit(model.init, compiler_options=model_cases.QUICK)(jax.random.key(seed))


@pytest.mark.full
def test_padding_content_does_not_matter():
    """Other padding tokens: the same hidden states and gradients, all finite."""
    model = build(SMALL, compute_dtype=jnp.float32, scan_layers=False)
    params = init(model)
    (tokens, positions, segments, prefixes), _ = model_cases.batch()
    real = (segments > 0)[..., None]

    def loss(params, tokens):
        hidden = model.hidden(params, tokens, positions, segments, prefixes)
        return jnp.sum(jnp.where(real, hidden, 0) ** 2), hidden

    run = jax.jit(jax.grad(loss, has_aux=True), compiler_options=model_cases.QUICK)
    grads, hidden = run(params, tokens)
    other_grads, other_hidden = run(params, np.where(segments > 0, tokens, (tokens + 11) % 90))
    assert np.isfinite(hidden).all() and not np.array_equal(hidden, other_hidden)
    np.testing.assert_array_equal(np.where(real, hidden, 0), np.where(real, other_hidden, 0))
    jax.tree.map(np.testing.assert_array_equal, grads, other_grads)


@pytest.mark.parametrize("scan_layers, policies", [
    (False, ("full", "full 2")), pytest.param(True, ("full", "dots", "offload", "full 3"), marks=pytest.mark.slow)])
@pytest.mark.slow
def test_remat_recomputes_and_keeps_the_gradient(scan_layers, policies):
    """More operations for the same gradient; less memory where scanned (see build for the unrolled CPU). `full 3`: in groups of
    three layers. (The CPU counts what is offloaded as its own memory.)"""
    config = {**SMALL, "num_hidden_layers": 6 if scan_layers else 3}
    arrays = tuple(np.repeat(x, 4, axis=0) for x in model_cases.batch()[0])
    memory, flops, grads = {}, {}, {}
    with jax.enable_x64(True):
        params = init(build(config, compute_dtype=jnp.float64, scan_layers=scan_layers))
        for remat in ("none", *policies):
            policy, _, every = remat.partition(" ")
            model = build(config, compute_dtype=jnp.float64, scan_layers=scan_layers, remat=policy, remat_every=int(every or 1))
            grad = jax.grad(lambda p, m=model: (m.hidden(p, *arrays) ** 2).mean())
            run = jax.jit(grad, compiler_options=model_cases.QUICK).lower(params).compile()
            memory[remat], flops[remat] = run.memory_analysis().temp_size_in_bytes, run.cost_analysis()["flops"]
            grads[remat] = run(params)
    for remat in policies:  # the parameters are fp32, and so are their gradients
        assert flops["none"] < 0.95 * flops[remat]
        assert not scan_layers or memory["full"] <= memory[remat] * 1.01 < 0.8 * memory["none"]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-12), grads["none"], grads[remat])


@pytest.mark.full
@first_cases(1, "scan_layers", [False, True])
def test_decoding_updates_the_cache_in_place(scan_layers):
    """A jitted loop over decode needs no second cache: scratch memory stays below one layer's share of it (unrolled),
    or two of them (scanned: the slice a layer reads)."""
    model = build({**SMALL, "num_hidden_layers": 6}, compute_dtype=jnp.float32, scan_layers=scan_layers)
    slots, length = 4, 4096
    cache = jax.eval_shape(lambda: model.init_cache(slots, length, jnp.float32))
    params = jax.eval_shape(model.init, jax.random.key(0))
    row = jax.ShapeDtypeStruct((slots,), jnp.int32)

    def loop(params, cache, tokens):
        def body(i, carry):
            tokens, cache = carry
            hidden, cache = model.decode(params, tokens, jnp.full(slots, i), cache)
            return jnp.argmax(model.logits(params, hidden), -1).astype(jnp.int32), cache
        return jax.lax.fori_loop(0, 9, body, (tokens, cache))

    memory = jax.jit(loop, donate_argnums=1).lower(params, cache, row).compile().memory_analysis()
    size = sum(x.size * 4 for x in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < (2 if scan_layers else 1) * size / 6


@pytest.mark.full
def test_cache_slots():
    """insert copies rows into slots (dropping slots beyond the cache), take picks slots, longer prompts are refused."""
    model = build(SMALL, compute_dtype=jnp.float32, scan_layers=True)
    params = init(model)
    _, kv = jax.jit(model.prefill, compiler_options=model_cases.QUICK)(params, np.arange(8).reshape(2, 4), np.array([4, 3]))
    empty = model.init_cache(3, 6, jnp.bfloat16)
    cache = model.insert(empty, kv, np.array([1, 0, 0]), np.array([0, 2, 3]))
    for into, values in zip(jax.tree.leaves(cache), jax.tree.leaves(kv), strict=True):
        assert into.dtype == jnp.bfloat16
        np.testing.assert_array_equal(into[:, 0, :4], values[:, 1].astype(jnp.bfloat16))
        np.testing.assert_array_equal(into[:, 2, :4], values[:, 0].astype(jnp.bfloat16))
        assert not into[:, 1].any() and not into[:, :, 4:].any()
    taken = model.take(cache, np.array([2, 1]))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:, 0], b[:, 2]), taken, cache)
    with pytest.raises(ValueError, match="prompts of 4 tokens do not fit a cache of length 3"):
        model.insert(model.init_cache(2, 3, jnp.float32), kv, np.array([0]), np.array([0]))


@pytest.mark.full
def test_initial_parameters():
    """normal(init_std), zero biases, unit norms; the same numbers scanned and unrolled; pure and traceable."""
    config = {**SIZES, "model_type": "qwen2", "vocab_size": 500, "initializer_range": 0.05, "num_hidden_layers": 3}
    flat = build(config, compute_dtype=jnp.bfloat16, scan_layers=False)
    deep = build(config, compute_dtype=jnp.bfloat16, scan_layers=True)
    a, b = init(flat, 3), init(deep, 3)
    for i in range(3):
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x, y[i], rtol=1e-6),
                     a[f"layer_{i}"], b["layers"]["sub_0"])
    assert abs(float(a["embed"]["embedding"].std()) - 0.05) < 1e-3
    assert not np.array_equal(a["layer_0"]["mlp"]["up"]["kernel"], a["layer_1"]["mlp"]["up"]["kernel"])
    assert (a["final_norm"]["scale"] == 1).all() and not a["layer_0"]["attention"]["query"]["bias"].any()
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(a))
    hidden = jax.eval_shape(flat.hidden, a, *model_cases.batch()[0])
    assert hidden.dtype == jnp.bfloat16 and jax.eval_shape(flat.logits, a, hidden).dtype == jnp.float32


@pytest.mark.full
def test_initial_parameters_of_large_models(monkeypatch):
    """Beyond AT_ONCE every tensor is a normal draw of the key folded with its HF name, wherever it is stacked."""
    from jaxrl.models import model as room
    monkeypatch.setattr(room, "AT_ONCE", 0)
    model = build({**SIZES, "model_type": "llama"}, compute_dtype=jnp.float32, scan_layers=True)
    params = init(model, 3)
    mlp = params["layers"]["sub_0"]["mlp"]
    for name, array in (("model.layers.0.mlp.up_proj.weight", mlp["up"]["kernel"][0]),
                        ("model.layers.1.mlp.gate_proj.weight", mlp["gate"]["kernel"][1]),
                        ("lm_head.weight", params["head"]["kernel"])):
        key = jax.random.fold_in(jax.random.key(3), np.uint32(zlib.crc32(name.encode())))
        np.testing.assert_allclose(array, 0.2 * jax.random.normal(key, array.shape), rtol=1e-5, err_msg=name)


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["llama_bias", "gemma3"])
def test_logical_axes_and_counts(folder, architecture):
    """Every dimension has a name and names mean one size each; parameters are counted as transformers counts them."""
    from transformers import AutoModelForCausalLM
    path = folder(architecture)
    theirs = AutoModelForCausalLM.from_pretrained(path)
    cfg = model_config(hf.load_config(path))
    sizes = {"vocab": cfg.vocab_size, "embed": cfg.hidden_size, "heads": cfg.num_heads, "kv_heads": cfg.num_kv_heads,
             "head_dim": cfg.head_dim, "mlp": cfg.mlp_size}
    for scan_layers in (False, True):
        model, params = model_cases.ours(path, scan_layers)
        assert model.num_parameters == theirs.num_parameters() == sum(x.size for x in jax.tree.leaves(params))
        axes = jax.tree.leaves(model.logical_axes(), is_leaf=lambda x: isinstance(x, tuple))
        for names, array in zip(axes, jax.tree.leaves(params), strict=True):
            assert len(names) == array.ndim
            for name, size in zip(names, array.shape, strict=True):
                assert name in ("norm", "layers") or sizes[name] == size


@pytest.mark.full
def test_flops_match_the_compiled_program():
    """The formula is XLA's count for a row of the same length, up to the elementwise part."""
    config = {**SMALL, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2048, "head_dim": 64}
    model = build(config, compute_dtype=jnp.float32, scan_layers=False)
    length = 32
    row = jax.ShapeDtypeStruct((1, length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0))
    run = jax.jit(lambda p, *a: model.logits(p, model.hidden(p, *a))).lower(params, row, row, row, row).compile()
    assert run.cost_analysis()["flops"] == pytest.approx(length * model.flops_per_token(length), rel=0.02)
    config |= {"model_type": "mistral", "sliding_window": 8}
    windowed = build(config, compute_dtype=jnp.float32, scan_layers=False)
    assert windowed.flops_per_token(8) == windowed.flops_per_token(100)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gemma3_vision_text"])  # our name for Gemma 3's text part behind a tower
def test_defaults_are_those_of_transformers(family):
    """A config that leaves out all that may be left out means the same to both."""
    from transformers import AutoConfig
    required = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8,
                "num_attention_heads": 8}
    if family in ("qwen2_5_vl_text", "qwen2_vl_text"):  # whose default sections are those of heads of 128
        required["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 0, 1]}
    required |= {"nemotron_h": {"hybrid_override_pattern": "M-*EM-*E"}, "granitemoehybrid": {"mamba_n_heads": 8}}.get(family, {})
    theirs = AutoConfig.for_model(family, **copy.deepcopy(required)).to_dict()
    if family == "qwen2":  # transformers' own default is its 32 heads, whatever num_attention_heads says
        required["num_key_value_heads"] = theirs["num_key_value_heads"] = 8
    if family in ("qwen3", "gemma", "gemma2", "gemma3_text"):
        required["num_key_value_heads"] = theirs["num_key_value_heads"] = 4
    if family in ("qwen2_moe", "deepseek_v3", "glm4_moe_lite", "qwen3_vl_text", "qwen3_vl_moe_text"):
        required["num_key_value_heads"] = theirs["num_key_value_heads"] = 8
    assert model_config({"model_type": family, **required}) == model_config(theirs)


@pytest.mark.parametrize("old, new", [
    ({"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {
        "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}},
     {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
    ({"model_type": "gemma3_text", "rope_theta": 2e6, "rope_local_base_freq": 3e4, "sliding_window_pattern": 2,
      "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
     {"layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {
         "full_attention": {"rope_type": "linear", "rope_theta": 2e6, "factor": 8.0},
         "sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}}),
    ({"model_type": "qwen2", "rope_theta": 1e6, "use_sliding_window": True, "sliding_window": 9,
      "max_window_layers": 1},
     {"rope_parameters": {"rope_theta": 1e6}, "use_sliding_window": True, "sliding_window": 9,
      "layer_types": ["full_attention", "sliding_attention"]}),
])
def test_old_and_new_spellings(old, new):
    from transformers import AutoConfig
    first = model_config({**SIZES, **old})
    assert first == model_config({**SIZES, "model_type": old["model_type"], **new})
    assert first == model_config(AutoConfig.for_model(**{**SIZES, **old}).to_dict())


def test_repeating_blocks():
    """The scan's block is the shortest pattern that repeats; a model where nothing repeats twice is unrolled."""
    def keys(scan_layers=True, **entries):
        model = build({**SIZES, "head_dim": 8, **entries}, compute_dtype=jnp.float32, scan_layers=scan_layers)
        paths = [entry.path for entry in model.entries if entry.path[0].startswith("layer")]
        return sorted({"/".join(path[:2] if path[0] == "layers" else path[:1]) for path in paths})

    assert keys(model_type="llama") == ["layers/sub_0"]
    assert keys(model_type="gemma2", num_hidden_layers=5) == ["layer_4", "layers/sub_0", "layers/sub_1"]
    assert keys(model_type="gemma3_text", num_hidden_layers=14) == [
        "layer_12", "layer_13", *(f"layers/sub_{j}" for j in range(6))]
    assert keys(model_type="gemma3_text", num_hidden_layers=7) == [f"layer_{i}" for i in range(7)]
    assert keys(model_type="llama", scan_layers=False) == ["layer_0", "layer_1"]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("plain, change", [
    ({"rope_type": "default"}, {"rope_theta": 5e5}), ({"rope_type": "linear", "factor": 2.0}, {"factor": 3.0}),
    (LLAMA3, {"factor": 32.0}), (LLAMA3, {"low_freq_factor": 2.0}), (LLAMA3, {"high_freq_factor": 8.0}),
    (LLAMA3, {"original_max_position_embeddings": 4096}), (YARN, {"factor": 8.0}), (YARN, {"beta_fast": 16.0}),
    (YARN, {"beta_slow": 2.0}), (YARN, {"truncate": False}), (YARN, {"original_max_position_embeddings": 8192}),
    (YARN, {"attention_factor": 1.5}), (YARN, {"mscale": 0.7, "mscale_all_dim": 0.3}),
])
def test_rotary_scalings_equal_transformers(plain, change):
    """Frequencies and magnitude of every scaling at real sizes; every entry matters."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    found = []
    for entries in (plain, {**plain, **change}):
        parameters = {"rope_theta": 1e6, **entries}
        config = {"model_type": "llama", **SIZES, "hidden_size": 512, "max_position_embeddings": 131072}
        layer = model_config({**config, "rope_parameters": parameters}).layers[0].rope
        ours = rope.frequencies(layer, 128), rope.magnitude(layer)
        theirs = LlamaConfig(**{**config, "rope_parameters": dict(parameters)})
        if entries["rope_type"] == "default":
            want = 1 / parameters["rope_theta"] ** (np.arange(0, 128, 2) / 128), 1.0
        else:
            want = ROPE_INIT_FUNCTIONS[entries["rope_type"]](theirs, None)
        np.testing.assert_allclose(ours[0], np.asarray(want[0]), rtol=2e-6)
        assert ours[1] == pytest.approx(want[1])
        found.append(ours)
    assert not np.allclose(found[0][0], found[1][0]) or found[0][1] != found[1][1]


@pytest.mark.parametrize("family, entries, want", [
    ("llama", {}, 128), ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 256),
    ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 512),
    ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}, 128),
    ("llama", {"rope_scaling": LLAMA3}, 128), ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 128),
    ("gemma3_text", {"head_dim": 8, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 128),
])
def test_longest_sequence_a_model_is_made_for(family, entries, want):
    assert model_config({**SIZES, "model_type": family, **entries}).context == want


def test_dynamic_rope_beyond_its_window_names_yarn():
    model = build({**SIZES, "model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
                  compute_dtype=jnp.float32, scan_layers=False)
    model.check_length(128)
    for refused in (lambda: model.check_length(129), lambda: model.init_cache(1, 129, jnp.float32)):
        with pytest.raises(ConfigError, match="rope_type=dynamic .* 128 tokens, not 129; set rope_type=yarn"):
            refused()


@pytest.mark.parametrize("entries, message", [
    ({"model_type": "mamba"}, r"model_type='mamba' is not supported; choose a checkpoint of: llama, mistral, qwen2"),
    ({"model_type": None}, r"model_type=None is not supported"),
    ({"model_type": "gemma3"}, r"text_config=None; give a table whose model_type is gemma3_text"),
    ({"architectures": ["Qwen3ForTokenClassification"]}, r"architectures=.* is not supported; take a Qwen3ForCausalLM"),
    ({"vocab_size": None}, r"vocab_size missing"),
    ({"hidden_size": "32"}, r"hidden_size='32'; give a positive integer"),
    ({"num_key_value_heads": 3}, r"num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    ({"head_dim": 7}, r"head_dim=7; rotary embeddings need an even head size"),
    ({"model_type": "llama", "head_dim": None, "hidden_size": 30}, r"hidden_size=30 is not a multiple of num_attention"),
    ({"hidden_act": "relu6"}, r"hidden_act='relu6'; choose silu"),
    ({"use_bidirectional_attention": True}, r"use_bidirectional_attention=True"),
    ({"quantization_config": {"bits": 4}}, r"quantization_config is set; take the unquantized checkpoint"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, r"rope_type='longrope' is not supported; choose default"),
    ({"rope_scaling": {"rope_type": "linear"}}, r"rope_type=linear needs factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, r"rope_type=llama3 needs low_freq_factor, high_freq"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is not supported"),
    ({"use_sliding_window": True, "layer_types": ["full_attention"]}, r"layer_types=\['full_attention'\]; give 2 entries"),
])
def test_configs_that_cannot_work(entries, message):
    with pytest.raises(ConfigError, match=message):
        build({**SMALL, **entries}, compute_dtype=jnp.float32, scan_layers=False)


def test_unknown_remat():
    with pytest.raises(ConfigError, match="model.remat='most': choose none, full, dots, offload"):
        build(SMALL, compute_dtype=jnp.float32, scan_layers=False, remat="most")
    with pytest.raises(ConfigError, match="model.remat_every=4: 6 layers are scanned, which are cut into equal groups of 1 or 2 or 3 or 6"):
        build({**SMALL, "num_hidden_layers": 6}, compute_dtype=jnp.float32, scan_layers=True, remat="full", remat_every=4)
