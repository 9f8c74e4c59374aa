"""Models with experts: against transformers, against themselves in other forms, in and out of both layouts."""

import dataclasses
import functools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import model_cases, tiny_job
from helpers.tiers import first_cases
from helpers.tiny_models import EXPERTS, SIZES, make_tiny

from jaxrl.errors import ConfigError
from jaxrl.models import adapters, build, decoder, placement
from jaxrl.models.adapters import quantized
from jaxrl.models.adapters.selection import Selection, resolved
from jaxrl.models.config import model_config
from jaxrl.models.feed_forward import ROUTES
from jaxrl.models.io import hf, scaled, tensorfile
from jaxrl.planning import memory
from jaxrl.run.setup import read_model_inputs

SMALL = {**SIZES, **EXPERTS["qwen2_moe"][1], "model_type": "qwen2_moe", "num_hidden_layers": 5}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(architecture, whether fused) -> folder, made once."""
    @functools.cache
    def get(architecture, fused=False):
        folder = tmp_path_factory.mktemp(architecture)
        return make_tiny(architecture, folder, tokenizer=False, fused=fused)

    return get


def logits_of(config, path, change=None):
    """Of a row of model_cases; change(model) is computed instead of the model."""
    arrays, _ = model_cases.batch()
    model = build(config, compute_dtype=jnp.float32, scan_layers=False)
    params = hf.load_params(model, path)
    model = model if change is None else change(model)
    return np.asarray(model_cases.forward(model, params, *(x[:1] for x in arrays)))[0]


@pytest.mark.torch
@pytest.mark.parametrize("architecture", ["qwen3_moe_mixed", *(pytest.param(a, marks=pytest.mark.slow) for a in EXPERTS
                                                               if a != "qwen3_moe_mixed")])
def test_logits_equal_transformers(checkpoints, architecture):
    """Plain, padded, packed, shared prompt, and prefill + decode. Scanned where a block of two layers repeats, and
    behind a dense first one."""
    path = checkpoints(architecture)
    scan_layers = architecture in ("qwen3_moe_mixed", "qwen2_moe")
    want = model_cases.reference(path)
    worst = model_cases.differences(path, scan_layers, want)
    assert set(worst) == set(model_cases.CASES)
    assert max(worst.values()) < 1e-5 * np.abs(want(model_cases.batch()[0][0][0])).max(), worst
    model, _ = model_cases.ours(path, scan_layers)
    assert bool(decoder.spans(model.config, True)[1]) == (architecture != "qwen3_moe_mixed" or scan_layers)


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.parametrize("architecture, entry", [
    ("qwen3_moe", {"norm_topk_prob": False}), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("qwen3_moe", {"num_experts_per_tok": 2}), ("qwen2_moe", {"norm_topk_prob": False}), ("olmoe", {"norm_topk_prob": False}),
        ("mixtral", {"num_experts_per_tok": 3}), ("glm4_moe", {"topk_group": 3}), ("glm4_moe", {"topk_group": 1, "num_experts_per_tok": 2}),
        ("glm4_moe", {"n_group": 2}), ("glm4_moe", {"n_group": 1, "topk_group": 1}), ("glm4_moe", {"routed_scaling_factor": 0.6}),
        ("glm4_moe", {"norm_topk_prob": False}), ("glm4_moe", {"num_experts_per_tok": 2}), ("deepseek_v3", {"topk_group": 3}),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1}), ("deepseek_v3", {"routed_scaling_factor": 0.6}),
        ("deepseek_v3", {"norm_topk_prob": False}), ("deepseek_v3", {"rope_interleave": False}), ("moonlight", {"rope_interleave": True}),
        ("glm4_moe_lite", {"norm_topk_prob": False}), ("glm4_moe_lite", {"routed_scaling_factor": 0.6}), ("gpt_oss", {"swiglu_limit": 7.0}),
        ("gpt_oss", {"swiglu_alpha": 1.702}), ("gpt_oss", {"num_experts_per_tok": 2}), ("gpt_oss", {"sliding_window": 3}),
        ("gpt_oss", {"layer_types": ["full_attention"] * 5}),
        ("gpt_oss", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": True, "original_max_position_embeddings": 32}}))),
])
def test_every_flag_of_the_router_matters_and_agrees(checkpoints, tmp_path, architecture, entry):
    """Changing one entry moves our logits, and moves them to where transformers' go."""
    path = checkpoints(architecture)
    config = hf.load_config(path, overrides=entry)
    changed, row = logits_of(config, path), model_cases.batch()[0][0][0]
    assert np.abs(changed - logits_of(hf.load_config(path), path)).max() > 1e-2
    (tmp_path / "model.safetensors").symlink_to(f"{path}/model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != hf.SOURCE}))  # null means something
    assert np.abs(changed - model_cases.reference(tmp_path)(row)).max() < 1e-4


@pytest.mark.slow
@pytest.mark.torch
def test_what_no_entry_says_is_seen_too(checkpoints):
    """Mixtral always divides by the sum; OLMoE norms all heads together; GLM-4.5's scores are sigmoids, half of a head
    turns, the shared expert has no gate. The comparison would not pass without."""
    for architecture, change in (("mixtral", {"norm_topk": False}), ("olmoe", {"norm_eps": 0.1}), ("glm4_moe", {"rotary_size": 0}),
                                 ("glm4_moe", {"routed_scale": 1.0}), ("glm4_moe", {"rotary_size": 4}), ("gpt_oss", {"sinks": False}),
                                 ("gpt_oss", {"norm_topk": False}), ("gpt_oss", {"router_bias": False}), ("gpt_oss", {"expert_bias": False}),
                                 ("gpt_oss", {"gate_limit": 0.0})):
        path = checkpoints(architecture)
        other = lambda model, change=change: dataclasses.replace(  # noqa: E731
            model, config=dataclasses.replace(model.config, **change))
        config = hf.load_config(path)
        assert np.abs(logits_of(config, path) - logits_of(config, path, other)).max() > 1e-2, architecture


@pytest.mark.torch
@pytest.mark.parametrize("architecture", ["mixtral", *(pytest.param(a, marks=pytest.mark.slow)
                                                       for a in ("qwen2_moe", "glm4_moe", "deepseek_v3", "moonlight", "minimax_m2"))])
def test_both_layouts_are_read_and_the_original_is_written(checkpoints, tmp_path, architecture):
    """Per expert, and fused as transformers holds them: the same parameters, and each comes back byte by byte, scanned or
    not; transformers opens what was written."""
    from safetensors.numpy import load_file

    params, names = {}, {}
    for fused in (False, True):
        source = Path(checkpoints(architecture, fused))
        config, want = hf.load_config(str(source)), load_file(source / "model.safetensors")
        for scan_layers in (False, True):
            model = build(config, compute_dtype=jnp.float32, scan_layers=scan_layers)
            params[fused, scan_layers] = hf.load_params(model, str(source))
            hf.check_weights(model, str(source))
            hf.export(model, params[fused, scan_layers], tmp_path / "out", config)
            got = load_file(tmp_path / "out" / "model.safetensors")
            assert set(got) == set(want)
            for name, tensor in want.items():
                np.testing.assert_array_equal(got[name], tensor, err_msg=name)
        names[fused] = set(want)
        ours, theirs = (model_cases.loaded(folder).state_dict() for folder in (tmp_path / "out", source))
        assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in theirs)
    assert any("experts.gate_up_proj" in name for name in names[True]) and not names[True] & {
        name for name in names[False] if ".experts." in name}
    for scan_layers in (False, True):
        jax.tree.map(np.testing.assert_array_equal, params[False, scan_layers], params[True, scan_layers])


@pytest.mark.slow
@pytest.mark.torch
def test_experts_whose_columns_take_turns(checkpoints, tmp_path):
    """gpt-oss's one layout: a folder comes back byte by byte, in fp32 and in bf16, scanned or not, and one is written in it
    where nothing was read. Gate and up stand in the places that transformers looks for them."""
    from safetensors.numpy import load_file

    source = Path(checkpoints("gpt_oss"))
    config, want = hf.load_config(str(source)), load_file(source / "model.safetensors")
    for scan_layers, dtype in ((False, "auto"), (True, "auto"), (True, "bf16")):
        model = build(config, compute_dtype=jnp.float32, scan_layers=scan_layers)
        params = hf.load_params(model, str(source))
        hf.export(model, params, tmp_path / "out", config, dtype=dtype)
        got = load_file(tmp_path / "out" / "model.safetensors")
        assert set(got) == set(want)
        for name, tensor in want.items():
            np.testing.assert_array_equal(got[name], tensor.astype(got[name].dtype), err_msg=name)
    fresh = build({k: v for k, v in config.items() if k != hf.SOURCE}, compute_dtype=jnp.float32, scan_layers=True)
    hf.export(fresh, init(fresh, jnp.float32), tmp_path / "new", {k: v for k, v in config.items() if k != hf.SOURCE})
    assert {n: x.shape for n, x in load_file(tmp_path / "new" / "model.safetensors").items()} == {n: x.shape for n, x in want.items()}
    again, row = hf.load_config(str(tmp_path / "new")), model_cases.batch()[0][0][0]
    np.testing.assert_allclose(model_cases.reference(tmp_path / "new")(row), logits_of(again, tmp_path / "new"), atol=1e-4)
    wrong = {**want, "model.layers.1.mlp.experts.down_proj_bias": want["model.layers.1.mlp.experts.down_proj_bias"][:, :-1]}
    save(wrong, tmp_path / "wrong", config)
    with pytest.raises(ConfigError, match=r"down_proj_bias has shape \(6, 31\), the config needs \(6, 32\)"):
        hf.check_weights(fresh, str(tmp_path / "wrong"))


def save(tensors, folder, config):
    from safetensors.numpy import save_file

    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != hf.SOURCE}))


@pytest.mark.full
def test_places_in_few_bits_and_in_turns_are_read(tmp_path):
    """A matrix in fp8, experts in mxfp4, and gpt-oss's columns in turns, from folders without torch."""
    codes, scale = np.array([[1, 2, -4, 8]], np.float32), np.array([[2, 3]], np.float32)
    fours = {"e_blocks": np.full((2, 3, 1, 16), 0x21, np.uint8), "e_scales": np.full((2, 3, 1), 128, np.uint8)}
    eights = {"w": codes.astype(ml_dtypes.float8_e4m3fn), "w_scale_inv": scale}
    for name, tensors in (("fours", fours), ("eights", eights)):
        save(tensors, tmp_path / name, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 2]}})
    eight, four = (scaled.plain(tensorfile.list_folder(tmp_path / name), tmp_path / name) for name in ("eights", "fours"))
    np.testing.assert_array_equal(eight["w"].read(), codes * np.repeat(scale, 2, axis=1))
    np.testing.assert_array_equal(four["e"].read(), np.tile(np.array([1, 2], np.float32), 16)[:, None].repeat(3, 1)[None].repeat(2, 0))
    config = {**SIZES, **EXPERTS["gpt_oss"][1], "model_type": "gpt_oss"}
    model = build(config, compute_dtype=jnp.float32, scan_layers=True)
    params = init(model, jnp.float32)
    hf.export(model, params, tmp_path / "turns", config)
    jax.tree.map(np.testing.assert_array_equal, hf.load_params(model, str(tmp_path / "turns")), params)


@pytest.mark.slow
@pytest.mark.torch
def test_mxfp4_is_read_as_what_it_stands_for(tmp_path):
    """Blocks and scales of experts, as gpt-oss is published, against transformers' own reading of the same folder: all 16
    codes, scales of every size; the export is plain. Blocks without scales are refused."""
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM, Mxfp4Config

    source = Path(make_tiny("gpt_oss", tmp_path / "source", tokenizer=False, intermediate_size=32, num_hidden_layers=3))
    rng = np.random.default_rng(0)
    config, tensors = hf.load_config(str(source)), {}
    for name, x in load_file(source / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, outputs = x.shape[0], x.shape[2]
            tensors[f"{name}_blocks"] = rng.integers(0, 256, (count, outputs, 1, 16)).astype(np.uint8)
            tensors[f"{name}_scales"] = rng.integers(118, 126, (count, outputs, 1)).astype(np.uint8)
        else:
            tensors[name] = x
    config |= {"quantization_config": {"quant_method": "mxfp4"}}
    save(tensors, tmp_path / "few", config)
    read = hf.load_config(str(tmp_path / "few"))
    model = build(read, compute_dtype=jnp.float32, scan_layers=True)
    params = hf.load_params(model, str(tmp_path / "few"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "few", dtype="float32", quantization_config=Mxfp4Config(dequantize=True))
    hf.export(model, params, tmp_path / "out", read)
    out = load_file(tmp_path / "out" / "model.safetensors")
    own = {name: x.float().numpy() for name, x in theirs.state_dict().items()}
    assert set(out) == set(own) and len(np.unique(out["model.layers.0.mlp.experts.down_proj"])) > 40
    for name, x in own.items():
        np.testing.assert_array_equal(out[name], x, err_msg=name)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    gone = {name: x for name, x in tensors.items() if name != "model.layers.2.mlp.experts.down_proj_scales"}
    save(gone, tmp_path / "gone", config)
    with pytest.raises(ConfigError, match="layers.2.mlp.experts.down_proj in mxfp4"):
        hf.check_weights(model, str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="quantization_config=.*quant_method=mxfp4"):
        model_config({**config, "quantization_config": {"quant_method": "fp8"}})


@pytest.mark.slow
@pytest.mark.torch
def test_the_correction_chooses_and_does_not_weigh(checkpoints, tmp_path):
    """Equal corrections are none; others choose other experts; it has no gradient, does not train, and stays in fp32
    where everything else is in bf16, on a disk too."""
    from safetensors.numpy import load_file

    path = checkpoints("glm4_moe")
    config, (arrays, _) = hf.load_config(path), model_cases.batch()
    model = build(config, compute_dtype=jnp.float32, scan_layers=False)
    params = hf.load_params(model, path)

    def with_correction(change):
        return model.tree(lambda e: change(e.of(params)) if e.row.fixed else e.of(params))

    same, none, other = (np.asarray(model_cases.forward(model, with_correction(f), *arrays)) for f in (
        lambda x: x * 0 + 0.25, lambda x: x * 0, lambda x: x[::-1]))
    np.testing.assert_array_equal(same, none)
    assert np.abs(other - none).max() > 1e-2
    grads = jax.grad(lambda p: jnp.sum(model.hidden(p, *arrays) ** 2))(params)
    assert not any(np.any(e.of(grads)) for e in model.entries if e.row.fixed) and np.any(grads["layer_1"]["mlp"]["router"]["kernel"])
    half = hf.load_params(model, path, dtype=jnp.bfloat16)
    kinds = {e.of(half).dtype.name for e in model.entries if e.row.fixed}, {e.of(half).dtype.name for e in model.entries if not e.row.fixed}
    assert kinds == ({"float32"}, {"bfloat16"})
    for cast in (quantized.cast(params, jnp.bfloat16), half):
        assert all(np.array_equal(e.of(cast), e.of(params)) for e in model.entries if e.row.fixed)
    hf.export(model, half, tmp_path / "out", config, dtype="bf16")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {x.dtype.name for name, x in stored.items() if name.endswith("correction_bias")} == {"float32"}


@pytest.mark.slow
@pytest.mark.torch
def test_layers_behind_the_last_are_not_read(checkpoints, tmp_path):
    """A layer that predicts tokens behind the next one lies on disk: its tensors are left out, and the export says so."""
    from safetensors.numpy import load_file, save_file

    source = Path(checkpoints("glm4_moe"))
    tensors = load_file(source / "model.safetensors")
    more = {name.replace("layers.3.", "layers.4."): x for name, x in tensors.items() if "layers.3." in name}
    save_file({**tensors, **more, "model.layers.4.eh_proj.weight": np.zeros((32, 64), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    config = hf.load_config(str(tmp_path))
    for wanted in (0, 1):
        model = build({**config, "num_nextn_predict_layers": wanted}, compute_dtype=jnp.float32, scan_layers=True)
        if not wanted:
            with pytest.raises(ConfigError, match="have no place in a glm4_moe model: model.layers.4."):
                hf.load_params(model, str(tmp_path))
    params = hf.load_params(model, str(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, params, hf.load_params(model, str(source)))
    hf.export(model, params, tmp_path / "out", config)
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    row = model_cases.batch()[0][0][0]
    np.testing.assert_array_equal(model_cases.reference(tmp_path / "out")(row), model_cases.reference(source)(row))


@pytest.mark.full
def test_what_chooses_never_trains():
    """Whatever model.trainable says, with adapters too."""
    from types import SimpleNamespace

    from jaxrl.roles import parameters

    model = build({**SIZES, **EXPERTS["glm4_moe"][1], "model_type": "glm4_moe"}, compute_dtype=jnp.float32, scan_layers=True)
    name = "layers/sub_0/mlp/router/correction"
    params = model.tree(lambda e: jax.ShapeDtypeStruct(e.shape, e.dtype(jnp.bfloat16)))
    config = tiny_job.get_config()
    job = SimpleNamespace(model=model, tree=model, config=config)
    for everything in (False, True):
        trainable, frozen = parameters._parts(job, params, everything)
        assert set(frozen) == {name} == parameters.untrained_names(model) and frozen[name].dtype == np.float32 and "head/kernel" in trainable
    whole = resolved(Selection(2, 4.0, target_modules=("q_proj",), modules_to_save=("mlp.gate",)), model, strict=True)
    model = dataclasses.replace(model, adapter=whole)
    names = parameters.trained_names(SimpleNamespace(model=model, tree=model, config=config))
    assert name not in names and "layers/sub_0/mlp/router/kernel" in names


@pytest.mark.slow
def test_fp8_in_blocks_is_read_as_what_it_stands_for(tmp_path):
    """Codes times the scale of their block, also in blocks that are cut short; the export is plain, in bf16."""
    import ml_dtypes

    config = {**SIZES, **EXPERTS["deepseek_v3"][1], "model_type": "deepseek_v3", "num_nextn_predict_layers": 0}
    model = build(config, compute_dtype=jnp.float32, scan_layers=True)
    hf.export(model, init(model, jnp.float32), tmp_path / "plain", config, dtype="bf16")
    stored, rng = tensorfile.list_folder(tmp_path / "plain"), np.random.default_rng(0)
    want, planned = {}, []
    for name, t in stored.items():
        want[name] = value = t.read()
        few = "_proj" in name and name.endswith("weight")
        if few:
            shape = tuple(-(-n // 16) for n in t.shape)
            codes, scale = np.asarray(value, ml_dtypes.float8_e4m3fn), rng.uniform(0.5, 2, shape).astype(np.float32)
            want[name] = codes.astype(np.float32) * np.kron(scale, np.ones((16, 16), np.float32))[:t.shape[0], :t.shape[1]]
            planned += [(name, "F8_E4M3", codes), (f"{name}_scale_inv", "F32", scale)]
        else:
            planned.append((name, t.dtype, np.asarray(value)))
    few = tmp_path / "few"
    few.mkdir()
    header, data = {}, b""
    for name, kind, x in planned:
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [len(data), len(data) + x.nbytes]}
        data += x.tobytes()
    text = json.dumps(header).encode()
    (few / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    (few / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    read = hf.load_config(str(few))
    params = hf.load_params(build(read, compute_dtype=jnp.float32, scan_layers=True), str(few))
    for entry in model.entries:
        for index, name in zip(entry.indices, entry.hf_names, strict=True):
            array = np.asarray(entry.of(params))[index] if index else np.asarray(entry.of(params))
            np.testing.assert_array_equal(entry.to_hf(array), want[name].astype(np.float32), err_msg=name)
    hf.export(model, params, tmp_path / "out", read)
    out = {name: t.dtype for name, t in tensorfile.list_folder(tmp_path / "out").items()}
    assert out == {name: t.dtype for name, t in stored.items()}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    (few / "config.json").write_text(json.dumps({**config, "quantization_config": {**said, "weight_block_size": [8, 8]}}))
    with pytest.raises(ConfigError, match="_scale_inv has shape .* blocks of .8, 8. need"):
        hf.check_weights(model, str(few))
    for other in ({"quant_method": "gptq"}, {**said, "fmt": "e5m2"}, {**said, "weight_block_size": None}):
        with pytest.raises(ConfigError, match="quantization_config"):
            model_config({**config, "quantization_config": other})


@pytest.mark.slow
def test_latents_expanded_through_an_adapter():
    """Decoding brings queries to the latents by the expanding matrix as its adapter makes it: what packed rows compute."""
    base = build({**SIZES, **EXPERTS["deepseek_v3"][1], "model_type": "deepseek_v3"}, compute_dtype=jnp.float32, scan_layers=True)
    model = dataclasses.replace(base, adapter=resolved(Selection(2, 4.0), base, strict=True))
    assert {"kv_b_proj", "kv_a_proj_with_mqa", "q_a_proj", "q_b_proj"} <= {t.name.rpartition(".")[2] for t in model.adapter.targets}
    params, arrays = init(model, jnp.float32), model_cases.batch()[0]
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: x + 0.1 * jnp.cos(jnp.arange(x.size).reshape(x.shape)) if path[-1].key == "b" else x, params)
    want = np.asarray(model_cases.forward(model, params, *arrays))
    got = np.asarray(model_cases.decoded(model, params, arrays[0][:2]))
    at = np.s_[0, model_cases.PROMPTS[0] - 1:]
    assert np.abs(got[at] - want[at]).max() < 1e-5 * np.abs(want).max()
    without = adapters.without(params)
    assert np.abs(np.asarray(model_cases.forward(base, without, *arrays))[at] - want[at]).max() > 1e-2


def test_latent_caches_are_counted():
    """Of DeepSeek-V3 one token's cache is 576 numbers per layer, whatever mesh.tp is; attention of rows is counted by keys'
    and values' sizes."""
    model = build({**SIZES, **EXPERTS["deepseek_v3"][1], "model_type": "deepseek_v3"}, compute_dtype=jnp.float32, scan_layers=True)
    cache = jax.eval_shape(lambda: model.init_cache(3, 8, jnp.float32))
    numbers = sum(x.size for x in jax.tree.leaves(cache))
    assert numbers == 3 * 8 * 4 * (16 + 6) and {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(cache)} == {"latent"}
    for tp in (1, 2):
        assert memory.cache_bytes(model, {"dp": 1, "fsdp": 1, "ep": 1, "tp": tp}, 3, 8, 2) == 2 * numbers
    assert model.flops_per_token(9) - model.flops_per_token(8) == 4 * 2 * 4 * (14 + 10)


@pytest.mark.torch
def test_a_wrong_fused_tensor_is_refused(checkpoints, tmp_path):
    from safetensors.numpy import load_file, save_file

    source = Path(checkpoints("qwen3_moe", True))
    tensors, name = load_file(source / "model.safetensors"), "model.layers.1.mlp.experts.gate_up_proj"
    model = build(hf.load_config(str(source)), compute_dtype=jnp.float32, scan_layers=False)
    one = "model.layers.1.mlp.experts.2.up_proj.weight"
    for change, said in (({name: tensors[name][:-1]}, r"gate_up_proj has shape \(5, 48, 32\), the config needs \(6, 48, 32\)"),
                         ({one: np.zeros((24, 32), np.float32)}, f"{name} stands beside {one}")):
        save_file({**tensors, **change}, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=said):
            hf.load_params(model, str(tmp_path))


@pytest.mark.parametrize("entry, said", [
    ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than num_experts=6"),
    ({"num_experts": 6, "num_local_experts": 8}, "num_local_experts=8"), ({"mlp_only_layers": [0.5]}, "mlp_only_layers"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"), ({"moe_intermediate_size": 0}, "moe_intermediate_size=0"),
    ({"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"), ({"routed_scaling_factor": 2.5}, "routed_scaling_factor=2.5"),
    ({"n_shared_experts": 1}, "n_shared_experts=1"), ({"norm_topk_prob": 1}, "norm_topk_prob=1"), ({"n_group": 8}, "n_group=8"),
    ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv=8.0"), ({"model_type": "olmoe", "num_experts": 0}, "num_experts=0"),
    ({"model_type": "qwen3", "norm_topk_prob": True}, "norm_topk_prob=True"), ({"model_type": "deepseek_v2"}, "Qwen3-MoE"),
    *(({"model_type": "glm4_moe", **entry}, said) for entry, said in (
        ({"n_group": 4}, "n_group=4 does not cut n_routed_experts=6"), ({"n_group": 6}, "n_group=6"), ({"topk_group": 4}, "topk_group=4"),
        ({"topk_group": 1}, "num_experts_per_tok=3"), ({"n_shared_experts": 0}, "n_shared_experts=0"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"), ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"), ({"partial_rotary_factor": 0.3}, "partial_rotary_factor=0.3"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor=2"), ({"first_k_dense_replace": -1}, "first_k_dense_replace=-1"),
        ({"num_nextn_predict_layers": True}, "num_nextn_predict_layers=True"), ({"routed_scaling_factor": 0}, "routed_scaling_factor=0"))),
    *(({"model_type": "gpt_oss", **entry}, said) for entry, said in (
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"), ({"swiglu_limit": 0}, "swiglu_limit=0"), ({"swiglu_alpha": None}, "swiglu_alpha=None"),
        ({"experts_per_token": 2, "num_experts_per_tok": 4}, "experts_per_token=2"), ({"norm_topk_prob": True}, "norm_topk_prob=True"),
        ({"sliding_window_pattern": 4}, "sliding_window_pattern=4"), ({"num_experts": 3, "num_local_experts": 6}, "num_experts=3"))),
    ({"model_type": "qwen3", "swiglu_alpha": 1.702}, "swiglu_alpha=1.702"),
])
def test_what_is_not_computed_is_refused_by_name(entry, said):
    kind = entry.get("model_type", "qwen2_moe")
    base = {**SIZES, **EXPERTS["glm4_moe"][1], "head_dim": 12} if kind == "glm4_moe" else SMALL if kind == "qwen2_moe" else SIZES
    with pytest.raises(ConfigError, match=re.escape(said)):
        model_config({**base, **entry})


def test_what_has_no_effect_or_no_engine_with_experts_is_refused():
    c = tiny_job.get_config()
    c.train.router_z = 0.1
    with pytest.raises(ConfigError, match="train.router_z=0.1 has no effect"):
        read_model_inputs(c)
    c.model.config = {**c.model.config.to_dict(), **SIZES, "model_type": "mixtral"}
    c.rollout.engine = "vllm"
    oss = tiny_job.get_config()
    oss.train.router_z, oss.rollout.engine = 0.0, "vllm"
    for name, other, theirs in (("swiglu_limit", 5.0, 7.0), ("rms_norm_eps", 1e-6, 1e-5), ("layer_types", ["full_attention"] * 2, ".*")):
        served = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "num_hidden_layers": 2, "model_type": "gpt_oss"}
        oss.model.config = {**SIZES, **EXPERTS["gpt_oss"][1], **served, name: other}
        with pytest.raises(ConfigError, match=rf"rollout.engine=vllm with {name}=.*vLLM computes .*gpt_oss with {theirs}.*set rollout.engine=jax"):
            read_model_inputs(oss)
    c.lora.rank, c.lora.publish = 4, "adapter"
    with pytest.raises(ConfigError, match="lora.publish=adapter with experts .model_type=mixtral.*set lora.publish=merged"):
        read_model_inputs(c)


def test_both_names_of_the_count_and_models_without_experts():
    """transformers writes num_local_experts where the published files have num_experts; 0 experts are a dense model."""
    count = SMALL["num_experts"]
    other = {k: v for k, v in SMALL.items() if k != "num_experts"} | {"num_local_experts": count}
    assert model_config(other) == model_config(SMALL) and model_config(SMALL).num_experts == count
    dense = build({**SMALL, "num_experts": 0}, compute_dtype=jnp.float32, scan_layers=True)
    assert dense.num_active == dense.num_parameters and not any("expert" in "/".join(e.path) for e in dense.entries)


def test_counts_of_the_real_models():
    """By hand, and as their authors give them: 30.5 B parameters of which 3.3 B are active; 46.7 and 12.9; 6.9 and 1.3;
    14.3 and 2.7; 106 and 12 (GLM-4.5-Air, whose authors do not count the embedding and the head as active); 671 and
    37; 16 and 3; 30 and 3; 20.9 and 3.6, 116.8 and 5.1 (gpt-oss, whose authors count the head but not the embedding)."""
    def model(**entries):
        return build({"max_position_embeddings": 4096, "tie_word_embeddings": False, **entries}, compute_dtype=jnp.float32,
                     scan_layers=True)

    qwen3 = model(model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
                  num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
                  moe_intermediate_size=768, norm_topk_prob=True)
    attention, expert, table = 2048 * 128 * (32 + 4 + 4 + 32), 3 * 2048 * 768, 151936 * 2048
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    assert qwen3.num_parameters == 48 * (attention + 2048 * 128 + 128 * expert) + 2 * table + norms == 30_532_122_624
    assert qwen3.num_active == 48 * (attention + 2048 * 128 + 8 * expert) + 2 * table + norms
    matrices = 48 * (attention + 2048 * 128 + 8 * expert) + table
    assert qwen3.flops_per_token(100) == 2 * matrices + 48 * 4 * 32 * 128 * 100
    mixtral = model(model_type="mixtral", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                    num_attention_heads=32, num_key_value_heads=8)
    olmoe = model(model_type="olmoe", vocab_size=50304, hidden_size=2048, intermediate_size=1024, num_hidden_layers=16,
                  num_attention_heads=16)
    qwen2 = model(model_type="qwen2_moe", vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24,
                  num_attention_heads=16, num_key_value_heads=16)
    glm = model(model_type="glm4_moe", vocab_size=151552, hidden_size=4096, intermediate_size=10944, num_hidden_layers=46,
                num_attention_heads=96, num_key_value_heads=8, head_dim=128, attention_bias=True)
    assert (glm.config.prefix, glm.config.period) == (1, 1)
    deepseek = model(model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
                     num_attention_heads=128, num_key_value_heads=128)
    moonlight = model(model_type="deepseek_v3", vocab_size=163840, hidden_size=2048, intermediate_size=11264, num_hidden_layers=27,
                      num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, moe_intermediate_size=1408, n_routed_experts=64,
                      n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, n_group=1, topk_group=1)
    flash = model(model_type="glm4_moe_lite", vocab_size=154880, hidden_size=2048, intermediate_size=10240, num_hidden_layers=47,
                  num_attention_heads=20, num_key_value_heads=20)
    assert (deepseek.config.prefix, deepseek.config.period, deepseek.config.cache_widths) == (3, 1, {"latent": 576})
    oss = dict(model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_attention_heads=64)
    small, large = model(**oss, num_hidden_layers=24, num_local_experts=32), model(**oss, num_hidden_layers=36)
    assert (small.config.prefix, small.config.period) == (0, 2)
    for context, seen in ((100, 24 * 100), (1000, 12 * 1000 + 12 * 128)):  # every second layer has a window
        assert small.flops_per_token(context) - small.flops_per_token(0) == 4 * 64 * 64 * seen
    assert [round((m.num_active - 201088 * 2880) / 1e9, 1) for m in (small, large)] == [3.6, 5.1]
    models = qwen3, mixtral, olmoe, qwen2, glm, deepseek, moonlight, flash, small, large
    found = [(round(m.num_parameters / 1e9, 1), round(m.num_active / 1e9, 1)) for m in models]
    assert found == [(30.5, 3.4), (46.7, 12.9), (6.9, 1.3), (14.3, 2.7), (106.9, 13.4), (671.0, 37.6), (16.0, 2.9), (29.9, 3.9),
                     (20.9, 4.2), (116.8, 5.7)]


def init(model, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), jax.jit(model.init, compiler_options=model_cases.QUICK)(jax.random.key(1)))


@pytest.mark.slow
def test_gradients_are_those_of_every_expert_on_every_token(monkeypatch):
    """Sorted blocks against the reference through the whole model, packed rows with padding: 1e-12 per tensor, float64."""
    with jax.enable_x64(True):
        model = build({**SMALL, "num_hidden_layers": 3}, compute_dtype=jnp.float64, scan_layers=True, remat="full")
        params, (arrays, _) = init(model, jnp.float64), model_cases.batch()
        real = (arrays[2] > 0)[..., None]

        def loss(params):
            logits = model.logits(params, jnp.where(real, model.hidden(params, *arrays), 0))
            return jnp.sum(jax.nn.log_softmax(logits)[..., 7])

        found = {}
        for name in ("reference", "blocks"):
            monkeypatch.setattr(placement, "experts", functools.partial(placement.experts, implementation=name))
            found[name] = jax.jit(jax.grad(lambda p: loss(p)))(params)
        apart = jax.tree.map(lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b)), found["blocks"], found["reference"])
        assert max(jax.tree.leaves(apart)) < 1e-12 and jax.tree.leaves(found["blocks"])[0].dtype == np.float64
        router = found["blocks"]["layers"]["sub_0"]["mlp"]["router"]["kernel"]
        assert np.abs(router).max() > 0


def primitives(jaxpr, name):
    """How often a primitive stands in a jaxpr and in those within it."""
    inner = (x for eqn in jaxpr.eqns for p in eqn.params.values() for x in (p if isinstance(p, tuple | list) else (p,)))
    within = (getattr(x, "jaxpr", x) for x in inner if hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns"))
    return sum(eqn.primitive.name == name for eqn in jaxpr.eqns) + sum(primitives(x, name) for x in within)


@pytest.mark.full
@first_cases(1, "remat", ["none", "full", "dots"])
def test_routes_are_never_computed_twice(remat):
    """A tie that falls otherwise in the backward pass would differentiate another function."""
    model = build(SMALL, compute_dtype=jnp.float32, scan_layers=False, remat=remat)
    params = jax.eval_shape(model.init, jax.random.key(0))
    arrays, _ = model_cases.batch()
    jaxpr = jax.make_jaxpr(jax.grad(lambda p: jnp.sum(model.hidden(p, *arrays))))(params).jaxpr
    assert primitives(jaxpr, "top_k") == model.config.num_expert_layers == 4
    assert ROUTES in str(jaxpr)


@pytest.mark.slow
def test_routes_are_told_in_the_order_of_layers():
    """[layers, B, L, K], scanned and unrolled alike, recomputed alone and in groups; entropies and z are sums over layers."""
    arrays, _ = model_cases.batch()
    base = build(SMALL, compute_dtype=jnp.float32, scan_layers=False)
    flat, real = init(base, jnp.float32), arrays[2] > 0
    want = base.forward(flat, *arrays)[1]
    assert want["routes"].shape == (4, *arrays[0].shape, 3) and want["router_z"].shape == arrays[0].shape
    assert len(np.unique(np.sort(np.asarray(want["routes"])[:, real], axis=-1), axis=0)) > 1
    for remat, every in (("none", 1), ("full", 2)):
        model = dataclasses.replace(base, scan_layers=True, remat=remat, remat_every=every)
        got = jax.jit(model.forward)(init(model, jnp.float32), *arrays)[1]
        np.testing.assert_array_equal(np.asarray(got["routes"])[:, real], np.asarray(want["routes"])[:, real])
        for name in ("router_z", "router_entropy"):
            np.testing.assert_allclose(np.where(real, got[name], 0), np.where(real, want[name], 0), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_padding_reaches_no_expert():
    """Other padding tokens: the same hidden states and gradients, bit by bit."""
    model = build(SMALL, compute_dtype=jnp.float32, scan_layers=True)
    params, (tokens, positions, segments, prefixes) = init(model, jnp.float32), model_cases.batch()[0]
    real = (segments > 0)[..., None]

    def loss(params, tokens):
        hidden = model.hidden(params, tokens, positions, segments, prefixes)
        return jnp.sum(jnp.where(real, hidden, 0) ** 2), hidden

    run = jax.jit(jax.grad(loss, has_aux=True), compiler_options=model_cases.QUICK)
    (grads, hidden), (others, other) = run(params, tokens), run(params, np.where(segments > 0, tokens, (tokens + 11) % 90))
    assert np.isfinite(hidden).all() and not np.array_equal(hidden, other)
    np.testing.assert_array_equal(np.where(real, hidden, 0), np.where(real, other, 0))
    jax.tree.map(np.testing.assert_array_equal, grads, others)


@pytest.mark.parametrize("names", [
    ("gate_proj", "q_proj"), ".*experts.*up_proj", ("mlp.gate",),
])
def test_adapters_on_experts_are_refused(names):
    model = build(SMALL, compute_dtype=jnp.float32, scan_layers=True)
    with pytest.raises(ConfigError, match="adapters on experts and their routers are not supported"):
        resolved(Selection(2, 4.0, target_modules=names), model, strict=True)


@pytest.mark.full
def test_adapters_beside_experts():
    """all-linear: attention, dense layers and the shared expert; as do names with the experts left out."""
    model = build(SMALL, compute_dtype=jnp.float32, scan_layers=True)
    every = {t.name for t in resolved(Selection(2, 4.0), model, strict=True).targets}
    assert "model.layers.1.mlp.shared_expert.up_proj" in every and "model.layers.0.mlp.up_proj" in every
    assert not any(".experts." in name or name.endswith("mlp.gate") for name in every)
    some = Selection(2, 4.0, target_modules=("up_proj",), exclude_modules=r".*\.experts\..*")
    assert {t.name for t in resolved(some, model, strict=True).targets} == {n for n in every if n.endswith("up_proj")}


@pytest.mark.full
@pytest.mark.parametrize("architecture, kinds", [("olmoe", {"scale"}), ("gpt_oss", {"scale", "bias", "sinks"})])
def test_decay_spares_the_vectors_of_experts_models(architecture, kinds):
    """Those of all heads and experts too, which are arrays of two axes."""
    from jaxrl import training
    from jaxrl.config.load import default_config, editable

    config = editable(default_config()).optimizer
    config.lr, config.weight_decay, config.warmup_steps, config.warmup_fraction = 1.0, 0.5, 0, 0.0
    model = build({**SIZES, **EXPERTS[architecture][1], "model_type": architecture}, compute_dtype=jnp.float32, scan_layers=True)
    axes = {"/".join(e.path): e.axes for e in model.entries}
    params = {"/".join(e.path): np.ones(e.shape, np.float32) for e in model.entries}
    optimizer, _ = training.make_optimizer(config, 10, axes)
    steps, _ = jax.jit(lambda p: optimizer.update(jax.tree.map(jnp.zeros_like, p), optimizer.init(p), p),
                       compiler_options=model_cases.QUICK)(params)
    still = {name for name, step in steps.items() if not np.any(step)}
    assert still == {name for name in params if name.rpartition("/")[2] in kinds} and {n.rpartition("/")[2] for n in still} == kinds


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("architecture", ["qwen2_moe", "qwen3_next", *(
    pytest.param(name, marks=pytest.mark.nightly) for name in ("deepseek_v3", "gpt_oss"))])
def test_sharded_as_on_one_device(checkpoints, tmp_path, architecture):
    """Eight simulated devices, dp x fsdp x tp: forward, gradients, decode and export."""
    from safetensors.numpy import load_file

    source = make_tiny(architecture, tmp_path / "source", tokenizer=False, num_attention_heads=4,
                       **({"num_key_value_heads": 2} if architecture != "deepseek_v3" else {}),
                       **({"linear_num_key_heads": 2, "linear_num_value_heads": 4} if architecture == "qwen3_next" else {}))
    script = Path(__file__).parent.parent / "helpers" / "sharded_models.py"
    done = subprocess.run([sys.executable, script, source, tmp_path / "out"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["devices"] == 8 and said["logits"] < 1e-4 and said["gradient"] < 1e-5 and said["decode"] < 1e-4
    want, got = (load_file(f"{folder}/model.safetensors") for folder in (source, tmp_path / "out"))
    assert {k: v.tobytes() for k, v in got.items()} == {k: v.tobytes() for k, v in want.items()}
    assert math.isclose(said["largest_share"], 0.25) or said["largest_share"] <= 0.5
