"""Every family beside transformers: published configs, greedy tokens, gradients, folders out and in again; and the table of
families in docs/reference/models.md, whose cells are tests."""

import csv
import dataclasses
import importlib.util
import inspect
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from helpers import lora_cases, model_cases, tiny_job
from helpers.rollout_helpers import config
from helpers.tiers import first_cases, nightly
from helpers.tiny_models import ARCHITECTURES, EXPERTS, HYBRIDS, SIZES, edit_config, make_tiny

from jaxrl.errors import ConfigError
from jaxrl.models import FAMILIES, build
from jaxrl.models.adapters.selection import Selection, resolved
from jaxrl.models.config import model_config
from jaxrl.models.families import ALIASES, text_part
from jaxrl.models.io import hf, tensorfile
from jaxrl.rollout import EngineContext, Request, SamplingParams, generate, make_engine
from jaxrl.run.setup import read_model_inputs

TIMEOUT = 600.0
ROWS = [  # of helpers.tiny_models, one or more of each family
    "seed_oss", "gemma", "olmo2", "olmo3", "smollm3", "ministral3", "glm", "glm4", "phi3", "phi4_mini",
    "granite", "ernie4_5", "hunyuan", "minimax_m2",
    "llama_bias", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe",
    "deepseek_v3", "glm4_moe_lite", "mixtral", "gpt_oss", "qwen3_5", "qwen3_5_moe", "qwen3_next",
    "nemotron_h", "nemotron_h_dense", "granite4", "granite4_dense", "falcon_h1", "falcon_h1_plain"]
# One of each kind of layer, norm, head and router. What the others do beside their logits is nightly.
KINDS = ("seed_oss", "olmo2", "olmo3", "glm4", "phi3", "granite", "gemma2", "gemma3", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_5", "nemotron_h",
         "granite4", "falcon_h1")
CACHES = ("seed_oss", "gemma2", "gemma3", "deepseek_v3", "gpt_oss", "falcon_h1")  # one of each kind of cache; qwen3_5 and nemotron_h: test_hybrid.py
BACKWARD = ("seed_oss", "gemma2", "deepseek_v3", "gpt_oss", "qwen3_5", "nemotron_h")  # one of each kernel with a backward pass of its own


def others_nightly(names, rows=ROWS):
    return [name if name in names else nightly(name) for name in rows]


PUBLISHED = {  # parameters in units of 1e9, as their authors or the folders' indices give them
    "Kimi-K2-Instruct": 1026.4, "MiMo-7B-RL": 7.6, "Seed-OSS-36B-Instruct": 36.2, "gemma-7b-it": 8.5,
    "OLMo-2-1124-7B-Instruct": 7.3, "Olmo-3-7B-Instruct": 7.3, "SmolLM3-3B": 3.1, "Ministral-3-8B-Instruct-2512-BF16": 8.5,
    "GLM-4-9B-0414": 9.4, "glm-4-9b-chat-hf": 9.4, "phi-4": 14.7, "Phi-4-mini-instruct": 3.8,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6, "NVIDIA-Nemotron-3-Nano-4B-BF16": 4.0, "granite-4.0-h-tiny": 6.9, "Falcon-H1-0.5B-Instruct": 0.5,
    "granite-3.3-8b-instruct": 8.2, "ERNIE-4.5-0.3B-PT": 0.4, "Hunyuan-7B-Instruct": 7.5, "MiniMax-M2": 228.7,
    "Qwen3.5-0.8B": 0.8, "Qwen3.8-27B": 26.9, "Qwen3.5-397B-A17B": 396.3, "Qwen3-Next-80B-A3B-Thinking": 79.7,
    "Qwen2.5-VL-7B-Instruct": 7.6, "Qwen3-VL-30B-A3B-Instruct": 30.5, "gemma-3-4b-it": 3.9, "gemma-3-27b-it": 27.0,
}
# published.csv says what each of them was compared with, and in which fields.
WITH_TOWER = {"Qwen2.5-VL-7B-Instruct": 8.29, "Qwen3-VL-30B-A3B-Instruct": 31.07, "gemma-3-4b-it": 4.30,
              "gemma-3-27b-it": 27.43}  # the same of the whole model


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    """A published config.json is read field by field as transformers reads it, and has the published size."""
    from transformers import AutoConfig

    given = json.loads((Path(__file__).parent / "published" / f"{name}.json").read_text())
    model = build(given, compute_dtype=jnp.bfloat16, scan_layers=True)
    assert round(model.num_parameters / 1e9, 1) == PUBLISHED[name]
    text = {k: v for k, v in text_part(given).items() if k not in ("auto_map", "architectures", "quantization_config")}
    if stored := FAMILIES[text["model_type"]].stored_type:
        text["model_type"] = stored
    read = model_config(AutoConfig.for_model(**text).to_dict())
    assert dataclasses.replace(read, family=model.config.family) == model.config
    if name in WITH_TOWER:
        whole = build(hf.load_config("", overrides=given, images=True), compute_dtype=jnp.bfloat16, scan_layers=True)
        assert round(whole.num_parameters / 1e9, 2) == WITH_TOWER[name]


def test_what_published_configs_were_compared_with():
    with open(Path(__file__).parent / "published.csv", encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f, strict=True))
    assert sorted(row["file"] for row in rows) == sorted(PUBLISHED)
    assert all(len(row) == 4 and row["compared with"] and row["fields"] for row in rows)


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.parametrize("name", others_nightly(CACHES))
def test_greedy_tokens_of_the_embedded_sampler(folder, name):
    """Prompts of several lengths, side by side, against transformers' greedy decoding of each."""
    import torch

    count = 32 if name in HYBRIDS else 20
    model, params = model_cases.ours(folder(name), scan_layers=True)
    engine = make_engine(EngineContext(config(slots=4, max_new_tokens=count, prompt_lengths=(20,)), model, eos_ids=()))
    engine.publish(params, 0)
    theirs, rng = model_cases.loaded(folder(name)), np.random.default_rng(1)
    prompts = [rng.integers(3, 96, n).astype(np.int32) for n in (1, 7, 13, 20)]
    greedy = SamplingParams(temperature=0.0, max_new_tokens=count)
    for prompt, result in zip(prompts, generate(engine, [Request(str(i), p, greedy, seed=0) for i, p in enumerate(prompts)], TIMEOUT),
                              strict=True):
        ids = torch.tensor(prompt)[None].long()
        for _ in range(count):
            with torch.no_grad():
                ids = torch.cat([ids, theirs(ids).logits[:, -1:].argmax(-1)], dim=1)
        np.testing.assert_array_equal(result.tokens, ids[0, len(prompt):].numpy())
    engine.close()


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.parametrize("name", others_nightly(BACKWARD))
def test_gradients_equal_transformers(folder, name):
    """Of the log-probability of the next tokens, by every parameter, against autograd."""
    import torch

    model, params = model_cases.ours(folder(name), scan_layers=False)
    theirs, ids = model_cases.loaded(folder(name)), np.random.default_rng(2).integers(3, 96, 30)
    loss = torch.log_softmax(theirs(torch.tensor(ids)[None], use_cache=False).logits[0], -1)[range(29), ids[1:]].sum()
    loss.backward()
    with torch.no_grad():  # the gradients as a folder, which is read as the weights are
        for weight in theirs.parameters():
            weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
        for key, buffer in theirs.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.zero_()
    theirs.save_pretrained(path := Path(folder(name)) / "gradients")
    want = hf.load_params(model, str(path))
    row = jnp.asarray(ids, jnp.int32)[None]

    def ours(params):
        hidden = model.hidden(params, row, jnp.arange(30)[None], jnp.ones_like(row), jnp.zeros_like(row))
        return jnp.sum(jax.nn.log_softmax(model.logits(params, hidden)[0])[np.arange(29), ids[1:]])

    got = jax.jit(jax.grad(ours), compiler_options=model_cases.QUICK)(params)
    scale, bound = max(np.abs(x).max() for x in jax.tree.leaves(want)), 1e-4 if name in HYBRIDS else 2e-5  # theirs, too, is in fp32
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=bound * scale), got, want)


@pytest.mark.torch
@first_cases(1, "name", ROWS)
def test_an_export_is_the_folder_that_was_read(folder, tmp_path, name):
    """Every tensor by name, dtype and bytes, scanned or not; transformers opens it and has the same state."""
    source = folder(name)
    stored = hf.load_config(source)
    for scan_layers in (False, True):
        model, params = model_cases.ours(source, scan_layers)
        hf.export(model, params, tmp_path / "out", stored)
        same_tensors(source, tmp_path / "out")
        jax.tree.map(np.testing.assert_array_equal, hf.load_params(model, str(tmp_path / "out")), params)
    ours, theirs = (model_cases.loaded(path).state_dict() for path in (tmp_path / "out", source))
    assert ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in theirs)


def same_tensors(a, b):
    one, two = map(tensorfile.list_folder, (Path(a), Path(b)))
    assert one.keys() == two.keys()
    for name, t in one.items():
        assert (t.dtype, t.shape) == (two[name].dtype, two[name].shape), name
        assert t.read().tobytes() == two[name].read().tobytes(), name


@pytest.mark.full
@pytest.mark.parametrize("name", others_nightly(KINDS, [name for name in ROWS if name not in HYBRIDS]))
def test_an_adapter_is_the_matrix_it_is_merged_into(name):
    """lora.targets=all-linear: hidden states with the adapter are those of the merged weights, and not those of the base."""
    kind, entries = (ARCHITECTURES | EXPERTS)[name]
    base = build({**SIZES, **entries, "model_type": kind}, compute_dtype=jnp.float32, scan_layers=True)
    model = dataclasses.replace(base, adapter=resolved(Selection(2, 4.0), base, strict=True))
    params, rows = lora_cases.started(model), lora_cases.batch(rows=2)
    whole = lora_cases.merged(model, params)
    got, want = (np.asarray(lora_cases.hidden(m, p, *rows)) for m, p in ((model, params), (base, whole)))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)
    plain = {k: v for k, v in flatten_dict(params).items() if "lora" not in k}
    assert np.abs(want - np.asarray(lora_cases.hidden(base, unflatten_dict(plain), *rows))).max() > 1e-2


@pytest.mark.parametrize("name, options, said", [
    ("phi3", {"lora__rank": 4, "lora__publish": "adapter", "rollout__engine": "vllm"},
     "lora.publish=adapter with matrices that share one tensor"),
    ("falcon_h1", {"rollout__engine": "vllm"}, "rollout.engine=vllm with mamba_rms_norm=True: vLLM computes models"),
    ("phi4_mini", {"data__max_prompt_tokens": 80}, "rope_type=longrope: sequences of .* beyond 64 tokens other factors hold")])
def test_what_is_not_built_for_a_family_is_refused(name, options, said):
    c, (kind, entries) = tiny_job.get_config(), (ARCHITECTURES | HYBRIDS)[name]
    c.model.config = {**c.model.config.to_dict(), **SIZES, **entries, "model_type": kind}
    for option, value in options.items():
        group, _, leaf = option.partition("__")
        c[group][leaf] = value
    with pytest.raises(ConfigError, match=said):
        read_model_inputs(c)


def test_longrope_has_one_length_if_its_factors_are_equal():
    kind, entries = ARCHITECTURES["phi4_mini"]
    both = {**entries["rope_parameters"], "long_factor": entries["rope_parameters"]["short_factor"]}
    models = [build({**SIZES, **entries, "model_type": kind, "rope_parameters": table}, compute_dtype=jnp.float32, scan_layers=False)
              for table in (entries["rope_parameters"], both)]
    assert [model.config.context for model in models] == [64, 128]
    models[1].check_length(128)
    with pytest.raises(ConfigError, match="sequences of 65 tokens, and beyond 64"):
        models[0].check_length(65)


# ---- families under another name -------------------------------------------------------------------------------------

@pytest.mark.full
@pytest.mark.torch
@pytest.mark.parametrize("alias, made_as, architecture, entries", [
    ("kimi_k2", "deepseek_v3", "DeepseekV3ForCausalLM", {"aux_loss_alpha": 0.001}),
    ("mimo", "qwen2", "MiMoForCausalLM", {"num_nextn_predict_layers": 1, "attention_bias": True})])
def test_an_alias_is_its_family(folder, tmp_path, caplog, alias, made_as, architecture, entries):
    """The same parameters and configuration; an export is a folder of the family, which transformers opens, without MiMo's
    layers that predict further tokens, and the log says that they are left out."""
    source, kind = tmp_path / "in", ALIASES[alias][0]
    make_tiny(made_as, source, tokenizer=False)
    edit_config(source, model_type=alias, architectures=[architecture], auto_map={"AutoConfig": "configuration_x.X"}, **entries)
    stored = tensorfile.list_folder(source)
    arrays = {name: np.array(t.read()) for name, t in stored.items()}
    more = {"model.mtp_layers.0.input_proj.weight": np.ones((32, 64), np.float32)} if alias == "mimo" else {}
    tensorfile.write_folder(source, [tensorfile.Planned(n, a.dtype, a.shape, lambda a=a: a) for n, a in {**arrays, **more}.items()], 1e9)

    config = hf.load_config(str(source))
    model, (plain, want) = build(config, compute_dtype=jnp.float32, scan_layers=True), model_cases.ours(folder(made_as), True)
    assert config["model_type"] == kind and "auto_map" not in config and model.config == plain.config
    with caplog.at_level("INFO"):
        params = hf.load_params(model, str(source))
    assert ("left out: model.mtp_layers (1 tensors)" in caplog.text) == bool(more)
    jax.tree.map(np.testing.assert_array_equal, params, want)
    hf.export(model, params, tmp_path / "out", config)
    same_tensors(folder(made_as), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["model_type"] == kind and written["architectures"] == [type(model_cases.loaded(tmp_path / "out")).__name__]


def test_aliases_of_another_architecture_are_refused():
    with pytest.raises(ConfigError, match="architectures=.'MiMoV2ForCausalLM'. is not supported; take a MiMoForCausalLM"):
        model_config({"model_type": "mimo", "architectures": ["MiMoV2ForCausalLM"]})


# ---- folders of several parts ----------------------------------------------------------------------------------------

@pytest.mark.full
@pytest.mark.torch
def test_the_text_part_of_ministral(tmp_path):
    """Of Mistral3ForConditionalGeneration: its logits, beyond the window before scaling, and every tensor of an export."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    kind, entries = ARCHITECTURES["ministral3"]
    config = AutoConfig.for_model("mistral3", text_config={**SIZES, **entries, "model_type": kind}, image_token_index=5, vision_config={
        "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
        "image_size": 16, "patch_size": 4}, tie_word_embeddings=False)
    theirs = AutoModelForImageTextToText.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "in")
    model, params = model_cases.ours(str(tmp_path / "in"), scan_layers=True)
    ids = np.random.default_rng(1).integers(9, 90, 30).astype(np.int32)
    with torch.no_grad():
        want = theirs(input_ids=torch.tensor(ids)[None].long()).logits[0].numpy()
    row = ids[None]
    got = model_cases.forward(model, params, row, np.arange(30, dtype=np.int32)[None], np.ones_like(row), np.zeros_like(row))[0]
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    hf.export(model, params, tmp_path / "out", hf.load_config(str(tmp_path / "in")))
    same_tensors(tmp_path / "in", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["model_type"] == "mistral3" and written["text_config"]["model_type"] == "ministral3"


# ---- the table -------------------------------------------------------------------------------------------------------

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reference" / "models.md"
COLUMNS = ["model_type", "read", "trained", "sampled", "exported", "LoRA", "vLLM", "sharded"]


def test_every_cell_of_the_table_is_a_test_of_that_family():
    page = PAGE.read_text("utf-8")
    legend = {key: row for key, *row in re.findall(r"^\| ([a-z]+) \| `(\S+::\w+)` \| [^|]*?(?:`(tests/\S+)`)? \|$", page, re.M)}
    assert "| " + " | ".join(COLUMNS) + " |" in page
    rows = {kind: cells.split(" | ") for kind, cells in re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.M)}
    assert rows.keys() == FAMILIES.keys() | ALIASES.keys()
    used = set()
    for kind, cells in rows.items():
        assert len(cells) == len(COLUMNS) - 1
        for letter in {letter for cell in cells if cell not in ("no test", "refused") for letter in cell.split(", ")}:
            assert kind in families_of(*legend[letter]), (kind, legend[letter])
            used.add(letter)
    assert used == legend.keys()


def families_of(name: str, helper: str) -> set[str]:
    """model_type of everything that a test names: in its parameters, in its source, or in the helper that has its models."""
    file, _, function = name.partition("::")
    spec = importlib.util.spec_from_file_location(Path(file).stem, TESTS.parent / file)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    given = [mark.args[1] for mark in getattr(getattr(module, function), "pytestmark", []) if mark.name == "parametrize"]
    known = {name: kind for name, (kind, _) in (ARCHITECTURES | EXPERTS | HYBRIDS).items()}
    source = (TESTS.parent / helper).read_text() if helper else inspect.getsource(getattr(module, function))
    words = set(re.findall(r"\w+", source)) if helper or not given else set(strings(given))
    return {known.get(word, word) for word in words}


def strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from strings([*value, *value.values()])
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from strings(each)
    elif hasattr(value, "values"):
        yield from strings(list(value.values))
