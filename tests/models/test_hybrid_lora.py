"""Adapters on modules that pack several maps, of recurrent layers, Phi and GLM, beside PEFT's: outputs, one step of SGD, files."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import model_cases
from helpers import peft_cases as cases
from helpers.peft_cases import theirs, torch
from helpers.tiers import first_cases

from jaxrl.errors import ConfigError
from jaxrl.models import adapters
from jaxrl.models.adapters import initialization, peft
from jaxrl.models.io import hf

pytestmark = pytest.mark.torch
NAMES = {"qwen3_5": {"in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
         "qwen3_next": {"in_proj_qkvz", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
                        "shared_expert_gate"},
         "qwen3_5_moe": {"in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
                         "shared_expert_gate"},
         "nemotron_h_dense": {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"},
         "granite4_dense": {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "input_linear", "output_linear"},
         "falcon_h1": {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
         "phi3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
         "glm4": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"}}
MLP = {"gate_proj", "up_proj", "down_proj"}
DECIDE = {"qwen3_5": ("in_proj_a", "in_proj_b"), "qwen3_5_moe": ("in_proj_a", "in_proj_b"), "qwen3_next": ("in_proj_ba",)}


@pytest.mark.full
@first_cases(2, "name, dora", [("qwen3_next", False), ("phi3", False), ("nemotron_h_dense", True), ("qwen3_5", True), ("glm4", True),
                               ("granite4_dense", False), ("falcon_h1", False), ("qwen3_5_moe", False)], full=0)
def test_outputs_a_step_and_files_are_pefts(folder, tmp_path, name, dora):
    """all-linear and the two maps that it leaves out; the packed modules are one adapter each."""
    targets = (*(n for n in NAMES[name] if n not in MLP), *DECIDE.get(name, ()))  # of a model with experts PEFT takes an MLP's for theirs
    packed = "gate_up_proj" if name in ("phi3", "glm4") else "in_proj_qkv.*" if name in DECIDE else "in_proj"
    given = cases.options(targets=targets, dora=dora, rank_pattern=(f"{packed}=3", "o_proj=2"))
    config = cases.lora_config(target_modules=list(targets), use_dora=dora, rank_pattern={packed: 3, "o_proj": 2})
    other = cases.wrapped(cases.torch_model(folder(name)), config)
    saved = cases.save(other, tmp_path / "theirs")
    model, base = cases.our_model(folder(name), given)
    whole = cases.our_model(folder(name), cases.options())[0].adapter  # all-linear
    assert {t.name.rpartition(".")[2] for t in whole.targets} == NAMES[name]
    adapter, leaves = peft.read(saved, model)
    assert adapter == model.adapter
    assert {t.name: (t.rank, t.scale) for t in adapter.targets} == cases.chosen(other)
    params = adapters.joined(base, leaves)
    logits, after = cases.our_step(model, params, "sgd")
    np.testing.assert_allclose(logits, cases.their_step(other, "sgd"), rtol=0, atol=1e-4)
    moved, want = cases.hf_tensors(model, after), cases.their_adapter(other)
    start = cases.hf_tensors(model, params)
    assert moved.keys() == want.keys()
    largest = max(np.abs(want[n] - start[n]).max() for n in want)
    for n in want:
        np.testing.assert_allclose(moved[n] - start[n], want[n] - start[n], rtol=0, atol=1e-4 * largest, err_msg=n)
    source = cases.options(path=saved, dora=dora)
    peft.write(tmp_path / "ours", model, params, source, "elsewhere")
    assert cases.digests(tmp_path / "ours") == cases.digests(saved)


@pytest.mark.full
@first_cases(1, "name", ["qwen3_5", "qwen3_next"], full=0)
def test_merged_and_scanned_and_saved_whole(folder, tmp_path, name):
    """all-linear leaves out what decides; a module saved whole is one tensor of PEFT's; the merged model computes the same."""
    given = cases.options(modules_to_save=("linear_attn.conv1d",))
    made = {scan: cases.our_model(folder(name), given, scan=scan) for scan in (True, False)}
    model, base = made[True]
    assert {t.name.rpartition(".")[2] for t in model.adapter.targets} == NAMES[name]
    rng = np.random.default_rng(0)
    leaves = {n: jnp.asarray(rng.normal(size=x.shape) * 0.1, jnp.float32) if not n.endswith("scale") else x
              for n, x in initialization.initial(model, jax.random.key(0), base, "default").items()}
    taps = next(n for n in flatten_dict(base, sep="/") if n.endswith("key_taps/weight"))
    params = adapters.joined(base, leaves | {taps: flatten_dict(base, sep="/")[taps] + 0.1})
    want = cases.logits(model, params)
    np.testing.assert_allclose(cases.logits(model.base, adapters.merged(model, params)), want, rtol=0, atol=2e-5)
    peft.write(tmp_path / "ours", model, params, given, folder(name))
    if name == "qwen3_5":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = theirs.PeftModel.from_pretrained(cases.torch_model(folder(name)), tmp_path / "ours")
            again = cases.save(other, tmp_path / "theirs")
        assert cases.digests(again) == cases.digests(tmp_path / "ours")
        with torch.no_grad():
            np.testing.assert_allclose(other(torch.tensor(cases.TOKENS).long()).logits.numpy(), want, rtol=0, atol=1e-4)
    model, base = made[False]
    unrolled = adapters.joined(base, peft.read(tmp_path / "ours", model)[1])
    np.testing.assert_allclose(cases.logits(model, unrolled), want, rtol=0, atol=2e-5)


@pytest.mark.nightly
def test_decoding_and_a_base_in_few_bits(folder):
    """Prefill and decode with the adapter are those of the merged model, and so is a base whose kernels, but for those that decide,
    are int8."""
    model, base = cases.our_model(folder("qwen3_5"), cases.options(targets=("in_proj_qkv", "in_proj_a", "q_proj", "out_proj")))
    rng = np.random.default_rng(1)
    leaves = {n: jnp.asarray(rng.normal(size=x.shape) * 0.1, jnp.float32) if not n.endswith("scale") else x
              for n, x in initialization.initial(model, jax.random.key(0), base, "default").items()}
    params, rows = adapters.joined(base, leaves), model_cases.batch()[0][0][:2]
    whole = adapters.merged(model, params)
    want, got = (np.asarray(model_cases.decoded(*given, rows)) for given in ((model.base, whole), (model, params)))
    for i, prompt in enumerate(model_cases.PROMPTS):
        np.testing.assert_allclose(got[i, prompt - 1:], want[i, prompt - 1:], rtol=0, atol=1e-4)
    few = dataclasses.replace(model, adapter=dataclasses.replace(model.adapter, quantized="int8"))
    codes = {"/".join(e.path[-3:-1]) for e in few.entries if e.path[-1] == "codes"}
    assert "query/kernel" in codes and not {"beta/kernel", "decay/kernel"} & codes
    params = adapters.joined(adapters.base_in_few_bits(few, base), leaves)
    merged = adapters.merged(few, params)
    np.testing.assert_allclose(cases.logits(few, params), cases.logits(model.base, merged), rtol=0, atol=2e-5)
    assert np.abs(cases.logits(few, params) - cases.logits(model.base, whole)).max() > 1e-3


@pytest.mark.nightly
@first_cases(1, "init", ["pissa", "eva", "olora", "orthogonal"], full=0)
def test_starts_of_packed_modules_are_those_of_the_whole_matrix(folder, init):
    model, base = cases.our_model(folder("qwen3_5"), cases.options(init=init, rank=4))
    found = None
    if init == "eva":
        rows = cases.TOKENS, np.broadcast_to(np.arange(17, dtype=np.int32), cases.TOKENS.shape), np.ones_like(cases.TOKENS)
        found = initialization.principal_inputs(model, base, *rows)
        assert set(found) == {t.name for t in model.adapter.targets}
    leaves = jax.jit(initialization.initial, static_argnums=(0, 3))(model, jax.random.key(0), base, init, found)
    params = adapters.joined(base, leaves)
    if init != "orthogonal":  # whose product is rounded
        np.testing.assert_array_equal(cases.logits(model, params), cases.logits(model.base, base))
    if init in ("pissa", "olora"):
        module = "model.layers.0.linear_attn.in_proj_qkv"
        plain = cases.without_start(model)
        a, b = (cases.hf_tensors(plain, params)[f"{peft.PREFIX}{module}.lora_{x}.weight"] for x in "AB")
        stored = hf.tensorfile.list_folder(hf.folder_of(folder("qwen3_5")))[f"{module}.weight"].read()
        u, s, v = np.linalg.svd(stored, full_matrices=False)
        best = (u[:, :4] * s[:4]) @ v[:4]
        q, r = np.linalg.qr(stored)
        np.testing.assert_allclose(2 * b @ a, best if init == "pissa" else 2 * q[:, :4] @ r[:4], rtol=0, atol=1e-4)


def test_experts_and_gates_by_name(folder):
    with pytest.raises(ConfigError, match="adapters on experts and their routers are not supported"):
        cases.our_model(folder("qwen3_next"), cases.options(targets=("gate_proj", "gate"), exclude=()))
