"""Hugging Face folders in and out: bit-exact, whole or not at all, wrong ones refused by name."""

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import model_cases
from helpers.rollout_helpers import random_params
from helpers.tiers import first_cases
from helpers.tiny_models import ARCHITECTURES, EXPERTS, SIZES, edit_config, make_tiny, make_tokenizer
from safetensors import safe_open
from transformers import PreTrainedTokenizerFast

from jaxrl.errors import ConfigError
from jaxrl.models import build
from jaxrl.models.io import hf, tensorfile

pytestmark = pytest.mark.torch  # the checkpoints are made by transformers' own models


def model_of(path, scan_layers=True, **overrides):
    return build(hf.load_config(path, overrides=overrides), compute_dtype=jnp.float32, scan_layers=scan_layers)


def raw(folder):
    """tensor name -> (dtype, shape, bytes), through the safetensors library."""
    import torch
    out = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            for name in f.keys():  # noqa: SIM118
                tensor = f.get_tensor(name)
                data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
                out[name] = str(tensor.dtype), tuple(tensor.shape), data
    return out


def rewrite(folder, change):
    """Rewrites the single safetensors file of a folder with `change(dict of torch tensors)` applied."""
    from safetensors.torch import load_file, save_file
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, file, {"format": "pt"})


@first_cases(1, "dtype", ["bfloat16", "float32", "float16"])
@first_cases(1, "architecture", ["llama", "llama_bias", "gemma3"])
def test_import_and_export_are_bit_exact(tmp_path, architecture, dtype):
    """Every tensor comes back with its dtype, shape and bytes; tied heads as the source wrote them; both layouts."""
    source = make_tiny(architecture, tmp_path / "source", dtype=dtype, tokenizer=False)
    assert ("lm_head.weight" in raw(source)) == (architecture == "llama_bias")
    config = hf.load_config(source)
    for scan_layers in (False, True):
        model = model_of(source, scan_layers)
        params = hf.load_params(model, source)
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
        hf.export(model, params, tmp_path / "out", config)
        assert raw(tmp_path / "out") == raw(source)
    theirs, written = (json.loads((p / "config.json").read_text()) for p in (Path(source), tmp_path / "out"))
    assert written == theirs
    generation = "generation_config.json"
    assert (tmp_path / "out" / generation).read_text() == (Path(source) / generation).read_text()


def test_stored_tied_head_and_mixed_dtypes_come_back(tmp_path):
    source = make_tiny("qwen2", tmp_path / "source", dtype="bfloat16", tokenizer=False)

    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.norm.weight"] = tensors["model.norm.weight"].float() * 1.0001
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = tensors["model.norm.weight"][:4].clone()

    rewrite(source, change)
    model = model_of(source)
    hf.export(model, hf.load_params(model, source), tmp_path / "out", hf.load_config(source))
    want = raw(source)
    want.pop("model.layers.1.self_attn.rotary_emb.inv_freq")  # computed, not a weight
    assert raw(tmp_path / "out") == want


@pytest.mark.parametrize("others", [(), ("model.norm.weight",)], ids=["one dtype", "several"])
def test_rows_that_are_computed_in_fp32_come_back_in_the_dtype_of_the_source(tmp_path, others):
    """A router's correction, of a folder that stores it in bf16 as all other tensors, or all but one; where training has moved it to
    a number that bf16 does not have, it is written in fp32, to the bit."""
    config = {**SIZES, **EXPERTS["glm4_moe"][1], "model_type": "glm4_moe"}
    model = build(config, compute_dtype=jnp.float32, scan_layers=True)
    hf.export(model, random_params(model, 0, 0.1), tmp_path / "made", config, dtype="fp32")
    stored = tensorfile.list_folder(tmp_path / "made")
    kinds = {name: np.dtype(np.float32 if name in others else jnp.bfloat16) for name in stored}
    (tmp_path / "in").mkdir()
    tensorfile.write_folder(tmp_path / "in", [tensorfile.Planned(name, kinds[name], t.shape, lambda t=t, name=name: t.read().astype(kinds[name]))
                                              for name, t in stored.items()], 1e9)
    (tmp_path / "in" / "config.json").write_text((tmp_path / "made" / "config.json").read_text())
    config = hf.load_config(str(tmp_path / "in"))
    params = hf.load_params(model, str(tmp_path / "in"))
    hf.export(model, params, tmp_path / "out", config)
    before, corrections = raw(tmp_path / "in"), [name for name in stored if name.endswith("e_score_correction_bias")]
    assert raw(tmp_path / "out") == before and len(corrections) == 3
    moved = model.tree(lambda e: e.of(params).at[0].add(1e-5) if e.row.fixed else e.of(params))  # of the first layer with experts
    hf.export(model, moved, tmp_path / "out", config)
    after = raw(tmp_path / "out")
    changed = [name for name in before if after[name] != before[name]]
    assert changed == corrections[:1] and after[changed[0]][0] == "torch.float32"
    (correction,) = (e.of(moved)[0] for e in model.entries if e.row.fixed)
    assert after[changed[0]][2] == np.asarray(correction).tobytes()


def test_export_in_another_dtype(tmp_path):
    """fp32 masters to bf16: each value rounded to the nearest, and the config says so."""
    source = make_tiny("qwen3", tmp_path / "source", tokenizer=False)
    model = model_of(source)
    hf.export(model, hf.load_params(model, source), tmp_path / "out", hf.load_config(source), dtype="bf16")
    import torch
    from safetensors.torch import load_file
    want, got = load_file(f"{source}/model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name in want:
        assert torch.equal(got[name], want[name].to(torch.bfloat16)), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(ConfigError, match="checkpoint.export_dtype='int8': choose auto, fp32, bf16, fp16"):
        hf.export(model, hf.load_params(model, source), tmp_path / "out", hf.load_config(source), dtype="int8")


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3", "gemma2", "gemma3"])
@pytest.mark.slow
def test_exported_folder_opens_in_transformers(tmp_path, architecture):
    """A model that was changed here: sharded export with tokenizer, the same logits there as here."""
    from transformers import AutoTokenizer
    source = make_tiny(architecture, tmp_path / "source")
    model = model_of(source)
    params = jax.tree.map(lambda x: x * 1.03 + 0.01, hf.load_params(model, source))
    tokenizer = AutoTokenizer.from_pretrained(source)
    hf.export(model, params, tmp_path / "out", hf.load_config(source), tokenizer=tokenizer, shard_gb=2e-5)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    assert max(f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors")) < 2.5e4
    arrays, _ = model_cases.batch()
    row = tuple(x[:1] for x in arrays)
    ours = model_cases.forward(model, params, *row)[0]
    theirs = model_cases.reference(tmp_path / "out")(arrays[0][0])
    assert np.abs(np.asarray(ours) - theirs).max() < 1e-4
    assert np.abs(theirs - model_cases.reference(source)(arrays[0][0])).max() > 1e-2
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again("2+2=4").input_ids == tokenizer("2+2=4").input_ids and again.chat_template == tokenizer.chat_template
    restored = hf.load_params(model, tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, restored, params)


def test_random_model_exports_without_a_source(tmp_path):
    """A config that never was a folder: float32, architecture and token ids filled in, opens in transformers, which wants a number
    that may be broken to be written so."""
    config = hf.load_config("", overrides={**SIZES, "model_type": "qwen2", "eos_token_id": [2, 7], "rms_norm_eps": 1})
    model = build(config, compute_dtype=jnp.float32, scan_layers=False)
    params = jax.jit(model.init, compiler_options=model_cases.QUICK)(jax.random.key(0))
    hf.export(model, params, tmp_path / "out", config)
    arrays, _ = model_cases.batch()
    ours = model_cases.forward(model, params, *(x[:1] for x in arrays))[0]
    assert np.abs(np.asarray(ours) - model_cases.reference(tmp_path / "out")(arrays[0][0])).max() < 1e-4
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["Qwen2ForCausalLM"] and written["dtype"] == "float32"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [2, 7]


@pytest.mark.full
@pytest.mark.parametrize("source_names", ["nothing", "another end"])
def test_exported_model_stops_where_it_stopped_here(tmp_path, source_names):
    """transformers' generate ends at the tokens that ended answers in the run, whatever the family's default is (llama: 2)."""
    import torch
    from transformers import AutoModelForCausalLM
    make_tokenizer(tmp_path / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    named = {"eos_token_id": 9, "pad_token_id": 0} if source_names == "another end" else {}
    sizes = {k: v for k, v in SIZES.items() if not k.endswith("token_id")}
    config = hf.load_config("", overrides={**sizes, "model_type": "llama", **named})
    model = build(config, compute_dtype=jnp.float32, scan_layers=False)
    params = jax.jit(model.init, compiler_options=model_cases.QUICK)(jax.random.key(0))
    hf.export(model, params, tmp_path / "plain", config, tokenizer=tokenizer)
    prompt = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}

    def generated(folder):
        model = AutoModelForCausalLM.from_pretrained(folder)
        return model.generate(**prompt, do_sample=False, max_new_tokens=12)[0, 2:].tolist()

    tokens = generated(tmp_path / "plain")
    end = next(t for i, t in enumerate(tokens) if i > 2 and t not in tokens[:i])  # what it says anyhow is now the end
    hf.export(model, params, tmp_path / "out", config, tokenizer=tokenizer, eos_ids=(end,))
    assert generated(tmp_path / "out") == tokens[:tokens.index(end) + 1]
    written, generation = (json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("config", "generation_config"))
    assert written["pad_token_id"] == 0 and generation["eos_token_id"] == ([9, end] if named else end)
    assert written["eos_token_id"] == named.get("eos_token_id", end)


def test_export_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    source = make_tiny("llama", tmp_path / "source", tokenizer=False)
    model, config = model_of(source), hf.load_config(source)
    params = hf.load_params(model, source)
    hf.export(model, params, tmp_path / "runs" / "out", config)
    first = raw(tmp_path / "runs" / "out")
    (tmp_path / "runs" / "out" / "stale").touch()
    calls = []

    def broken(*args):
        calls.append(args)
        if len(calls) == 5:
            raise OSError("disk full")
        return original(*args)

    original = hf._host
    monkeypatch.setattr(hf, "_host", broken)
    with pytest.raises(OSError, match="disk full"):
        hf.export(model, params, tmp_path / "runs" / "out", config)
    assert os.listdir(tmp_path / "runs") == ["out"] and raw(tmp_path / "runs" / "out") == first
    monkeypatch.undo()
    hf.export(model, params, tmp_path / "runs" / "out", config)
    assert os.listdir(tmp_path / "runs") == ["out"] and not (tmp_path / "runs" / "out" / "stale").exists()


def test_loading_holds_one_tensor_at_a_time(tmp_path):
    """Host memory beside the destination arrays stays below one of the twelve layers."""
    source = make_tiny("llama", tmp_path / "source", tokenizer=False, num_hidden_layers=12, hidden_size=256,
                       intermediate_size=1024, num_attention_heads=4)
    model = model_of(source)
    hf.load_params(model, source)  # compiled programs are not what is measured
    tracemalloc.start()
    params = hf.load_params(model, source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    layer = sum(x.nbytes for x in jax.tree.leaves(params["layers"])) / 12
    assert layer > 3.5e6 and peak < layer


def test_dtype_of_loading(tmp_path):
    source = make_tiny("llama", tmp_path / "source", tokenizer=False)
    model = model_of(source)
    low = hf.load_params(model, source, dtype=jnp.bfloat16)
    full = hf.load_params(model, source)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), low, full)


def test_parameter_map_goes_both_ways(tmp_path):
    """The table alone, applied with numpy, rebuilds the checkpoint from our arrays and our arrays from the checkpoint."""
    from safetensors.numpy import load_file
    source = make_tiny("llama_bias", tmp_path / "source", tokenizer=False)
    theirs = load_file(f"{source}/model.safetensors")
    for scan_layers in (False, True):
        model = model_of(source, scan_layers)
        params = hf.load_params(model, source)
        seen = set()
        for entry in model.entries:
            for index, hf_name in zip(entry.indices, entry.hf_names, strict=True):
                array = np.asarray(entry.of(params)[index])
                np.testing.assert_array_equal(entry.to_hf(array), theirs[hf_name])
                np.testing.assert_array_equal(entry.from_hf(theirs[hf_name]), array)
                seen.add(hf_name)
        assert seen == set(theirs)


def test_end_tokens(tmp_path):
    class Tokenizer:
        eos_token_id = 9

    assert hf.eos_token_ids({"eos_token_id": 3}) == (3,)
    assert hf.eos_token_ids({"eos_token_id": [3, 4]}, Tokenizer()) == (3, 4, 9)
    assert hf.eos_token_ids({"eos_token_id": None}) == ()
    source = make_tiny("llama", tmp_path / "source", tokenizer=False)
    (Path(source) / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert hf.eos_token_ids(hf.load_config(source), Tokenizer()) == (7, 2, 9)


def _drop(name):
    return lambda tensors: tensors.pop(name)


def _resize(tensors):
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:-1]


def _quantize(tensors):
    import torch
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)


def _untie(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def _extra(tensors):
    tensors["vision.weight"] = tensors["model.norm.weight"].clone()


@pytest.mark.parametrize("change, message", [
    (_drop("model.layers.1.mlp.up_proj.weight"), r"lacks 1 tensors: model.layers.1.mlp.up_proj.weight; is config.json"),
    (_extra, r"1 tensors have no place in a llama model: vision.weight; is config.json"),
    (_resize, r"model.layers.0.mlp.up_proj.weight has shape \(55, 32\), the config needs \(56, 32\); is config.json"),
    (_quantize, r"tensor model.norm.weight has dtype I8; only unquantized checkpoints"),
    (_untie, r"lm_head.weight differs from model.embed_tokens.weight although tie_word_embeddings=True"),
])
def test_wrong_tensors_are_named(tmp_path, change, message):
    source = make_tiny("llama", tmp_path, tokenizer=False)
    rewrite(source, change)
    with pytest.raises(ConfigError, match=message):
        hf.load_params(model_of(source), source)


@pytest.mark.parametrize("overrides, message", [
    ({"num_hidden_layers": 3}, r"lacks 9 tensors: model.layers.2.input_layernorm.weight, .* and 4 more; is config"),
    ({"num_hidden_layers": 1}, r"9 tensors have no place in a llama model: model.layers.1"),
    ({"vocab_size": 97}, r"model.embed_tokens.weight has shape \(96, 32\), the config needs \(97, 32\)"),
    ({"tie_word_embeddings": False}, r"lacks 1 tensors: lm_head.weight"),
])
def test_config_and_weights_that_do_not_fit(tmp_path, overrides, message):
    source = make_tiny("llama", tmp_path, tokenizer=False)
    with pytest.raises(ConfigError, match=message):
        hf.load_params(model_of(source, **overrides), source)


def _cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _index(folder, text):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize("damage, message", [
    (_cut, r"model.safetensors: cut short: \d+ bytes where its header promises \d+; fetch it again"),
    (lambda f: (f / "model.safetensors").write_bytes(b"<html>not here</html>"), r"not a safetensors file, or cut short"),
    (lambda f: (f / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]"), r"not a safetensors file"),
    (lambda f: (f / "model.safetensors").write_bytes(b""), r"not a safetensors file, or cut short \(0 bytes\)"),
    (lambda f: (f / "model.safetensors").unlink(), r"no model.safetensors and no model.safetensors.index.json; convert"),
    (lambda f: _index(f, '{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'),
     r"names model-00002-of-00002.safetensors, not in the folder"),
    (lambda f: _index(f, '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
     r"lists tensors that no file holds: a"),
    (lambda f: _index(f, '{"weights": 1}'), r"no weight_map that can be read"),
    (lambda f: (f / "config.json").write_text("{"), r"config.json: not valid JSON"),
    (lambda f: (f / "config.json").write_text("[]"), r"a JSON object is expected, not list"),
    (lambda f: (f / "config.json").unlink(), r"no config.json; give a folder with an HF checkpoint"),
    (lambda f: edit_config(f, model_type="bert"), r"model_type='bert' is not supported"),
])
def test_damaged_folders_are_named(tmp_path, damage, message):
    source = make_tiny("llama", tmp_path, tokenizer=False)
    damage(tmp_path)
    with pytest.raises(ConfigError, match=message):
        hf.load_params(model_of(source), source)


@pytest.mark.parametrize("path, message", [
    ("/no/such/folder", r"model.path='/no/such/folder': no such folder"),
    ("./runs/x/export", r"no such folder"),
    ("nobody/nothing", r"model.path='nobody/nothing' \(revision main\) is no folder and cannot be fetched from the hub"),
])
def test_paths_that_do_not_exist(path, message):
    with pytest.raises(ConfigError, match=message):
        hf.load_config(path)


def test_overrides_of_rotary_scaling_reach_new_and_old_spellings(tmp_path):
    """rope_scaling given by the user wins over rope_parameters in the file and keeps the file's theta."""
    source = make_tiny("llama", tmp_path, tokenizer=False)
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    config = hf.load_config(source, overrides={"rope_scaling": scaling, "max_position_embeddings": 128})
    assert config["rope_parameters"] == {**ARCHITECTURES["llama"][1]["rope_parameters"], **scaling}
    assert "rope_scaling" not in config and config["max_position_embeddings"] == 128
    assert build(config, compute_dtype=jnp.float32, scan_layers=False).config.layers[0].rope.theta == 700.0


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 500.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("file, overrides, want", [
    ({"rope_scaling": YARN}, {"rope_parameters": {**LINEAR, "rope_theta": 9.0}}, ("linear", 9.0, 2.0)),
    ({"rope_scaling": YARN}, {"rope_theta": 9.0}, ("yarn", 9.0, 4.0)),
    ({"rope_parameters": YARN}, {"rope_scaling": {"type": "linear", "factor": 2.0}}, ("linear", 500.0, 2.0)),
    ({"rope_parameters": YARN}, {"rope_scaling": None}, ("default", 500.0, 1.0)),
    ({"rope_parameters": LINEAR, "original_max_position_embeddings": 8}, {"rope_scaling": YARN}, ("yarn", 500.0, 4.0)),
])
def test_no_entry_of_the_file_hides_a_rotary_override(tmp_path, file, overrides, want):
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "llama", "rope_theta": 7.0, **file}))
    config = hf.load_config(tmp_path, overrides=overrides, weights=False)
    rope = build(config, compute_dtype=jnp.float32, scan_layers=False).config.layers[0].rope
    assert (rope.kind, rope.theta, rope.factor) == want and rope.original_max in (0, 32, 128)


def test_hub_ids_resolve_through_the_cache(tmp_path, monkeypatch):
    """A hub id that the local hub cache holds loads like a folder, at its revision."""
    import huggingface_hub
    commit = "0" * 40
    base = tmp_path / "models--someone--tiny"
    make_tiny("qwen2", base / "snapshots" / commit, tokenizer=False)
    (base / "refs").mkdir()
    (base / "refs" / "v1").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", __import__("functools").partial(
        huggingface_hub.snapshot_download, cache_dir=tmp_path))
    config = hf.load_config("someone/tiny", revision="v1")
    params = hf.load_params(build(config, compute_dtype=jnp.float32, scan_layers=True), "someone/tiny", revision="v1")
    assert params["layers"]["sub_0"]["mlp"]["up"]["kernel"].shape == (2, 32, 56)
    with pytest.raises(ConfigError, match=r"'someone/tiny' \(revision v2\)"):
        hf.load_config("someone/tiny", revision="v2")


@pytest.mark.slow
def test_sharded_loading_and_running(tmp_path):
    """On eight simulated devices: see sharded_models.py, which runs in a process of its own."""
    source = make_tiny("gemma2", tmp_path / "source", dtype="bfloat16", tokenizer=False, num_hidden_layers=4)
    worker = Path(__file__).parents[1] / "helpers" / "sharded_models.py"
    command = [sys.executable, worker, source, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert raw(tmp_path / "out") == raw(source)
    assert found["devices"] == 8 and found["sharded"] == 15
    assert found["largest_share"] <= 0.27, "a parameter that can be split lies whole on a device"
    assert found["logits"] < 1e-4 and found["gradient"] < 1e-5 and found["decode"] < 1e-4
    assert found["decode_gathers"] == 0
    assert "full rematerialization" not in done.stderr


def test_a_single_file_is_read_before_the_shards_as_transformers_does(tmp_path, caplog):
    """Also where the index is stale and its shards are gone."""
    from safetensors.numpy import save_file

    from jaxrl.models.io.tensorfile import list_folder
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    assert list_folder(tmp_path)["a"].read().tolist() == [1, 1]
    assert "model.safetensors and model.safetensors.index.json" in caplog.text
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    assert list_folder(tmp_path)["a"].read().tolist() == [1, 1]


def test_tensors_of_any_shape_and_order_are_written_as_they_are(tmp_path):
    """A scalar, as CLIP's logit_scale, stays one; transposed ones are written in C order; empty ones have no bytes."""
    from safetensors.numpy import load_file

    from jaxrl.models.io.tensorfile import Planned, list_folder, write_folder
    arrays = {"scalar": np.array(1.5, np.float32), "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T, "none": np.zeros((0, 3), np.float32)}
    write_folder(tmp_path, [Planned(name, a.dtype, a.shape, lambda a=a: a) for name, a in arrays.items()], 1e9)
    write_folder(tmp_path, [Planned(t.name, np.dtype(np.float32), t.shape, lambda a=np.array(t.read()): a)
                            for t in list_folder(tmp_path).values()], 1e9)
    for found in (load_file(tmp_path / "model.safetensors"), {name: t.read() for name, t in list_folder(tmp_path).items()}):
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            assert found[name].shape == array.shape and np.array_equal(found[name], array)


ROW = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize("header, said", [
    ({"a": ROW | {"data_offsets": [-8, 0]}}, "tensor a has data_offsets"),
    ({"a": ROW | {"data_offsets": [0.0, 8.0]}}, "tensor a has data_offsets"),
    ({"a": ROW | {"shape": [True, 2]}}, "tensor a has shape"),
    ({"a": ROW | {"shape": [-2]}}, "tensor a has shape"),
    ({"a": ROW | {"dtype": "I64"}}, "tensor a has 8 bytes"),
    ({"a": ROW, "b": ROW}, "tensor b overlaps tensor a"),
    ({"a": ROW | {"data_offsets": [8, 16]}}, "tensor a leaves a gap behind the header"),
    ({"a": ROW | {"data_offsets": [0, 10**30], "shape": [10**30]}}, "tensor a has shape"),
    ({"a": None}, "tensor a is described by None"),
    ([1], "its header is a list"),
    (f'{{"a": {json.dumps(ROW)}, "a": {json.dumps(ROW)}}}', "'a' more than once"),
    ('{"a":' * 30000 + "1" + "}" * 30000, "nested too deeply"),
])
def test_a_forged_header_is_an_error_that_names_file_and_tensor(tmp_path, header, said):
    from jaxrl.models.io.tensorfile import read_header
    text, file = (header if isinstance(header, str) else json.dumps(header)).encode(), tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ConfigError, match=f"model.safetensors: not a safetensors file .*{said}"):
        read_header(file)


@pytest.mark.parametrize("table", [{"a": "../x"}, {"a": "/etc/passwd"}, {"a": 5}, [1], {"a": "."}, {"a": "x" * 5000}])
def test_an_index_that_names_no_file_of_the_folder_is_refused(tmp_path, table):
    from jaxrl.models.io.tensorfile import list_folder
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    with pytest.raises(ConfigError, match="model.safetensors.index.json"):
        list_folder(tmp_path)
