"""Adapters beside PEFT's own: which modules they are on, what they start from and compute, their files byte by byte. (tests/helpers/peft_cases.py)"""

import dataclasses
import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import peft_cases as cases
from helpers.peft_cases import theirs, torch
from helpers.tiers import first_cases
from safetensors.numpy import load_file, save_file

from jaxrl.errors import ConfigError
from jaxrl.models import adapters
from jaxrl.models.adapters import initialization, peft
from jaxrl.models.io import hf

pytestmark = pytest.mark.torch
OPTIMIZERS = ("sgd", "adamw")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return cases.checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return cases.checkpoint(tmp_path_factory.mktemp("tied"), "llama")


@pytest.mark.full
@pytest.mark.parametrize("name", cases.SELECTIONS)
def test_the_modules_ranks_and_scales_are_pefts(path, name):
    ours, config = cases.SELECTIONS[name]
    model, _ = cases.our_model(path, cases.options(**ours))
    other = cases.wrapped(cases.torch_model(path), cases.lora_config(**config))
    assert {t.name: (t.rank, t.scale) for t in model.adapter.targets} == cases.chosen(other)
    assert set(model.adapter.saved) == cases.saved(other)


@pytest.mark.parametrize("given, said", [
    ({"targets": ("q_proj", "qproj")}, r"lora.targets: 'qproj' matches no module; names are .*q_proj"),
    ({"targets": ("q_proj$",)}, r"lora.targets: 'q_proj\$' matches no module"),  # a pattern is for the whole name
    ({"targets": ("(",)}, "lora.targets: '\\(' is not a regular expression"),
    ({"exclude": ("fc1",)}, "lora.exclude: 'fc1' matches no module"),
    ({"targets": ("q_proj",), "layers": (0, 3)}, "lora.layers: there is no layer 3; they are 0 to 2"),
    ({"targets": (".*q_proj",), "layers": (0,)}, "lora.layers=.*PEFT has no such adapter"),
    ({"rank_pattern": ("fc2=3",)}, "lora.rank_pattern: 'fc2' matches no module"),
    ({"rank_pattern": ("q_proj=0",)}, "lora.rank_pattern entry 'q_proj=0': write 'pattern=number'"),
    ({"alpha_pattern": ("(=1",)}, "lora.alpha_pattern entry '\\(=1': write"),
    ({"alpha_pattern": ("layers.9=3",)}, "lora.alpha_pattern: 'layers.9' matches no module"),
    ({"modules_to_save": ("score",)}, "lora.modules_to_save: 'score' matches no module; names are model"),
    ({"targets": ("q_proj", "embed_tokens")}, "takes model.embed_tokens in: .*lora.modules_to_save"),
    ({"targets": (r".*(q_proj|lm_head)",)}, "takes lm_head in"),
    ({"targets": ("q_proj",), "exclude": ("self_attn.q_proj",)}, "nothing is left after lora.exclude"),
])
def test_what_fits_nothing_is_refused_by_option_value_and_names(path, given, said):
    with pytest.raises(ConfigError, match=said):
        cases.our_model(path, cases.options(**given))


# ---- the same numbers ------------------------------------------------------------------------------------------------

SAME = [("rank and alpha patterns", "default", True), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
    ("dora", "default", True), ("dora", "gaussian", False), ("rslora", "gaussian", False), ("modules_to_save", "default", True),
    ("all-linear", "orthogonal", True), ("list", "pissa", True), ("list", "olora", False)))]


@pytest.mark.parametrize("selection, init, scan", SAME)
@pytest.mark.slow
def test_outputs_and_a_step_are_pefts(path, selection, init, scan):
    """Both from the same numbers: float64 to 1e-12. Adam divides by the root of its second moment, so where a gradient is all but zero
    its step magnifies rounding; with it the adapters are within 1e-9 (evidence/peft_parity.py has all cases)."""
    ours, config = cases.SELECTIONS[selection]
    given = cases.options(**ours, init=init)
    config = cases.lora_config(**config, init_lora_weights=True if init == "default" else init)
    for optimizer in OPTIMIZERS:
        found = cases.differences(path, given, config, optimizer, double=True, scan=scan)
        assert found.pop("moved") > 1e-4
        assert found["logits"] < 1e-12 and max(found.values()) < (1e-12 if optimizer == "sgd" else 1e-9), (optimizer, found)


@pytest.mark.full
@pytest.mark.parametrize("init, rslora", [("pissa", False), ("pissa", True), ("olora", False)])
def test_decomposed_starts_are_pefts(path, init, rslora):
    """The product and what PEFT leaves of the base, from PEFT's own decomposition; ours leaves the base as it is, so the start computes
    the base exactly."""
    given = cases.options(init=init, rslora=rslora, targets=("q_proj", "down_proj"), rank_pattern=("layers.1.mlp.down_proj=6",))
    model, base = cases.our_model(path, given)
    other = cases.wrapped(cases.torch_model(path), cases.lora_config(
        init_lora_weights=init, use_rslora=rslora, target_modules=["q_proj", "down_proj"],
        rank_pattern={"layers.1.mlp.down_proj": 6}), spread=False)
    leaves = jax.jit(initialization.initial, static_argnums=(0, 3))(model, jax.random.key(0), base, init)
    want, plain = cases.their_adapter(other), dataclasses.replace(model, adapter=dataclasses.replace(model.adapter, shifted=False))
    got = peft.hf_tensors(plain, adapters.joined(base, leaves), np.dtype(np.float32), {})
    for t in model.adapter.targets:
        a, b = (f"{peft.PREFIX}{t.name}.lora_{x}.weight" for x in "AB")
        assert got[a].shape == want[a].shape
        np.testing.assert_allclose(got[b] @ got[a], want[b] @ want[a], rtol=0, atol=1e-5)  # two fp32 decompositions
        np.testing.assert_allclose(np.linalg.norm(got[a], axis=1), np.linalg.norm(want[a], axis=1), rtol=1e-4)
    np.testing.assert_array_equal(cases.logits(model, adapters.joined(base, leaves)), cases.logits(model.base, base))


@pytest.mark.slow
def test_drawn_starts_have_pefts_distributions(path):
    """default: uniform up to 1/sqrt(inputs); gaussian: standard deviation 1/r; orthogonal: B A = 0 with neither zero; the subspace
    iteration keeps as much of W as PEFT's; none depends on how layers are laid out."""
    start = jax.jit(initialization.initial, static_argnums=(0, 3))
    for init in ("default", "gaussian", "orthogonal", "pissa_niter_8"):
        starts = []
        for scan in (True, False):
            model, base = cases.our_model(path, cases.options(init=init, rank=8, targets=("q_proj", "down_proj")), scan=scan)
            params = adapters.joined(base, start(model, jax.random.key(1), base, init))
            plain = dataclasses.replace(model, adapter=dataclasses.replace(model.adapter, shifted=False))
            starts.append(peft.hf_tensors(plain, params, np.dtype(np.float32), {}))
        ours = starts[0]
        assert max(np.abs(ours[name] - starts[1][name]).max() for name in ours) < (1e-5 if "pissa" in init else 1e-12)
        torch.manual_seed(0)
        other = cases.wrapped(cases.torch_model(path), cases.lora_config(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights={
            "default": True}.get(init, init)), spread=False)
        want = cases.their_adapter(other)
        for name in ours:
            assert ours[name].shape == want[name].shape
            if "lora_A" in name and init in ("default", "gaussian"):
                bound = 1 / np.sqrt(ours[name].shape[1])
                assert init == "gaussian" or 0.95 * bound < np.abs(ours[name]).max() <= bound
                assert ours[name].std() == pytest.approx(want[name].std(), rel=0.2) and not ours[name.replace("lora_A", "lora_B")].any()
            if "lora_A" in name and init == "orthogonal":
                product = ours[name.replace("lora_A", "lora_B")] @ ours[name]
                assert np.abs(product).max() < 1e-6 and ours[name].std() == pytest.approx(want[name].std(), rel=0.3)
            if "lora_A" in name and "pissa" in init:
                other_b, b = want[name.replace("lora_A", "lora_B")], ours[name.replace("lora_A", "lora_B")]
                assert np.linalg.norm(b @ ours[name]) == pytest.approx(np.linalg.norm(other_b @ want[name]), rel=0.01)
    for init, rank, said in (("orthogonal", 3, "odd"), ("pissa", 33, "above what its matrix"), ("loftq", 4, "choose default")):
        with pytest.raises(ConfigError, match=said):
            model, base = cases.our_model(path, cases.options(init=init, rank=rank))
            initialization.initial(model, jax.random.key(0), base, init)


@pytest.mark.slow
def test_eva_starts_along_the_principal_directions_of_the_inputs(path):
    """PEFT's, of one batch, up to sign; B is zero, so nothing changes yet; padding has no say."""
    given = cases.options(init="eva", rank_pattern=("k_proj=2",))
    ids = torch.tensor(cases.TOKENS).long()
    config = cases.lora_config(init_lora_weights="eva", eva_config=theirs.EvaConfig(rho=1.0, tau=0.9, use_label_mask=False))
    other = cases.wrapped(cases.torch_model(path), config, spread=False)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = theirs.get_eva_state_dict(other, [batch] * 3, show_progress_bar=False)
    for scan in (True, False):
        model, base = cases.our_model(path, given, scan=scan)
        rows = [np.pad(x, ((0, 0), (0, 5)), constant_values=v) for x, v in (
            (cases.TOKENS, 7), (np.broadcast_to(np.arange(17, dtype=np.int32), cases.TOKENS.shape), 0), (np.ones_like(cases.TOKENS), 0))]
        found = initialization.principal_inputs(model, base, *rows)
        assert set(found) == {t.name for t in model.adapter.targets} == {n.removeprefix("base_model.model.") for n in want}
        for t in model.adapter.targets:
            ours, theirs_ = np.asarray(found[t.name]).T, want["base_model.model." + t.name].numpy()[:t.rank]
            assert ours.shape == (t.rank, ours.shape[1]) and np.abs((ours * theirs_).sum(1)).min() > 0.99
        leaves = initialization.initial(model, jax.random.key(0), base, "eva", found)
        np.testing.assert_array_equal(cases.logits(model, adapters.joined(base, leaves)), cases.logits(model.base, base))
        a = peft.hf_tensors(model, adapters.joined(base, leaves), np.dtype(np.float32), {})
        t = model.adapter.targets[1]
        np.testing.assert_array_equal(a[f"{peft.PREFIX}{t.name}.lora_A.weight"], np.asarray(found[t.name]).T)
    with pytest.raises(ConfigError, match="4 tokens do not tell the 4 directions"):
        initialization.principal_inputs(model, base, *(x[:1, :4] for x in rows))


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("selection, dtype", [("rank and alpha patterns", "float32"), ("modules_to_save", "bfloat16"), ("rslora", "float16"),
                                              ("dora", "float32")])
@pytest.mark.slow
def test_a_folder_of_pefts_comes_back_byte_for_byte(path, tmp_path, selection, dtype):
    """With a field that nobody knows; into scanned and unrolled layers; and its numbers are those that PEFT computes with."""
    _, config = cases.SELECTIONS[selection]
    other = cases.wrapped(cases.torch_model(path), cases.lora_config(**config))
    for name, weight in other.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            weight.data = weight.data.to(getattr(torch, dtype))
    folder = Path(cases.save(other, tmp_path / "theirs"))
    table = json.loads((folder / peft.CONFIG).read_text())
    (folder / peft.CONFIG).write_text(json.dumps(table | {"a_field_of_tomorrow": {"x": 1}}, indent=2, sort_keys=True))
    given = cases.options(path=str(folder))
    for scan in (True, False):
        model, base = cases.our_model(path, given, scan=scan)
        adapter, leaves = peft.read(folder, model)
        assert adapter == model.adapter
        params = adapters.joined(base, leaves)
        peft.write(tmp_path / "ours", model, params, given, "elsewhere")
        for name in (peft.CONFIG, peft.WEIGHTS):
            assert (tmp_path / "ours" / name).read_bytes() == (folder / name).read_bytes()
        with torch.no_grad():
            want = other.float()(torch.tensor(cases.TOKENS).long()).logits.numpy()
        np.testing.assert_allclose(cases.logits(model, params), want, rtol=0, atol=2e-5)


@first_cases(1, "selection", ["all-linear", "pattern", "modules_to_save", "layers", "excluded", "dora"])
def test_a_folder_of_ours_comes_back_from_peft_byte_for_byte(path, tmp_path, selection):
    given = cases.options(**cases.SELECTIONS[selection][0])
    model, base = cases.our_model(path, given)
    rng = np.random.default_rng(0)
    leaves = {name: jnp.asarray(rng.normal(size=x.shape) * 0.1, jnp.float32) if not name.endswith("scale") else x
              for name, x in initialization.initial(model, jax.random.key(0), base, "default").items()}
    params = adapters.joined(base, leaves)
    peft.write(tmp_path / "ours", model, params, given, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = theirs.PeftModel.from_pretrained(cases.torch_model(path), tmp_path / "ours")
        again = cases.save(other, tmp_path / "theirs")
    assert cases.digests(again) == cases.digests(tmp_path / "ours")
    if selection == "pattern":  # nothing that PEFT keeps as a set
        assert (Path(again) / peft.CONFIG).read_bytes() == (tmp_path / "ours" / peft.CONFIG).read_bytes()
    with torch.no_grad():
        np.testing.assert_allclose(other(torch.tensor(cases.TOKENS).long()).logits.numpy(), cases.logits(model, params), rtol=0, atol=2e-5)
    read, back = peft.read(tmp_path / "ours", model)
    assert read == model.adapter
    again, first = (peft.hf_tensors(model, adapters.joined(base, x), np.dtype(np.float32), {}) for x in (back, leaves))
    assert again.keys() == first.keys() and all(np.array_equal(again[n], first[n]) for n in first)


@pytest.mark.full
@pytest.mark.parametrize("init, rslora", [("pissa", False), ("olora", True)])
def test_what_began_as_a_part_of_the_base_is_written_as_plain_lora(path, tmp_path, init, rslora):
    """Twice the rank, PEFT's conversion: opened on the untouched base, PEFT computes what the trained model did."""
    given = cases.options(init=init, rslora=rslora, targets=ATTENTION_DOWN, **({} if rslora else {"rank_pattern": ("q_proj=3",),
                                                                                                  "alpha_pattern": ("q_proj=6",)}))
    model, base = cases.our_model(path, given)
    leaves = initialization.initial(model, jax.random.key(0), base, init)
    rng = np.random.default_rng(1)
    trained = {n: x + 0.05 * jnp.asarray(rng.normal(size=x.shape), x.dtype) if n.endswith(("/a", "/b")) else x for n, x in leaves.items()}
    params = adapters.joined(base, trained)
    peft.write(tmp_path / "ours", model, params, given, path)
    other = theirs.PeftModel.from_pretrained(cases.torch_model(path), tmp_path / "ours")
    assert {r for r, _ in cases.chosen(other).values()} == ({8} if rslora else {8, 6})
    with torch.no_grad():
        np.testing.assert_allclose(other(torch.tensor(cases.TOKENS).long()).logits.numpy(), cases.logits(model, params), rtol=0, atol=5e-5)
    with pytest.raises(ConfigError, match="PEFT has no plain LoRA for it"):
        peft.check_written(cases.options(init=init, rslora=True, rank_pattern=("q_proj=3",)))


ATTENTION_DOWN = ("q_proj", "down_proj")


@pytest.mark.full
def test_a_tied_matrix_is_saved_for_both_of_its_uses(tied, tmp_path):
    """PEFT's two copies hold the same numbers, and compute what we do; a folder with one of the two is refused."""
    given = cases.options(targets=("q_proj",), modules_to_save=("embed_tokens",))
    model, base = cases.our_model(tied, given)
    assert model.adapter.saved == ("model.embed_tokens", "lm_head")
    params = jax.tree.map(lambda x: x, adapters.joined(base, adapters.initial(model, jax.random.key(0))))
    params["embed"]["embedding"] = params["embed"]["embedding"] * 1.1
    peft.write(tmp_path / "ours", model, params, given, tied)
    assert json.loads((tmp_path / "ours" / peft.CONFIG).read_text())["modules_to_save"] == ["embed_tokens", "lm_head"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = theirs.PeftModel.from_pretrained(cases.torch_model(tied), tmp_path / "ours")
        with torch.no_grad():
            want = other(torch.tensor(cases.TOKENS).long()).logits.numpy()
        one = cases.wrapped(cases.torch_model(tied), cases.lora_config(target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
        half = cases.save(one, tmp_path / "half")
    np.testing.assert_allclose(cases.logits(model, params), want, rtol=0, atol=2e-5)
    _, back = peft.read(tmp_path / "ours", model)
    np.testing.assert_array_equal(back["embed/embedding"], params["embed"]["embedding"])
    with pytest.raises(ConfigError, match="model.embed_tokens alone"):
        peft.read(half, model.base)


CHANGES = [({"use_dora": True}, "lacks what its config names: .*lora_magnitude_vector"), ({"lora_bias": True}, "lora_bias=True, which is not served"),
           ({"bias": "all"}, "only 'none' is served"),
           ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"), ({"peft_type": "IA3"}, "only LORA is served"),
           ({"r": 5}, "has other shapes"), ({"target_modules": ["q_proj"]}, "has what its config does not name"),
           ({"target_modules": ["q_proj", "v_proj", "down_proj"]}, "lacks what its config names"),
           ({"trainable_token_indices": [1]}, "not served"), ({"layers_pattern": "h", "layers_to_transform": [0]}, "layers_pattern='h'")]


@pytest.fixture(scope="module")
def folder(path, tmp_path_factory):
    other = cases.wrapped(cases.torch_model(path), cases.lora_config(target_modules=["q_proj", "v_proj"]))
    return Path(cases.save(other, tmp_path_factory.mktemp("adapter") / "theirs"))


@pytest.mark.parametrize("entries, said", CHANGES)
def test_a_folder_that_means_something_else_is_refused(path, folder, tmp_path, entries, said):
    table = json.loads((folder / peft.CONFIG).read_text())
    (tmp_path / peft.CONFIG).write_text(json.dumps(table | entries))
    (tmp_path / peft.WEIGHTS).write_bytes((folder / peft.WEIGHTS).read_bytes())
    with pytest.raises(ConfigError, match=said):
        cases.our_model(path, cases.options(path=str(tmp_path)))


def test_a_folder_without_its_files_or_of_another_model_is_refused(path, folder, tmp_path):
    with pytest.raises(ConfigError, match=r"^lora.path='nobody/nothing' \(revision main\) is no folder and cannot be fetched"):
        cases.our_model(path, cases.options(path="nobody/nothing"))
    with pytest.raises(ConfigError, match="^lora.path='./nothing': no such folder"):
        cases.our_model(path, cases.options(path="./nothing"))
    with pytest.raises(ConfigError, match="no adapter_config.json"):
        cases.our_model(path, cases.options(path=str(tmp_path)))
    (tmp_path / peft.CONFIG).write_bytes((folder / peft.CONFIG).read_bytes())
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="is a pickle"):
        cases.our_model(path, cases.options(path=str(tmp_path)))
    tensors = load_file(folder / peft.WEIGHTS)
    name = next(n for n in tensors if "lora_A" in n)
    save_file(tensors | {name: np.ascontiguousarray(tensors[name][:, :-1])}, tmp_path / peft.WEIGHTS)
    with pytest.raises(ConfigError, match="has other shapes than config and model say: .*lora_A"):
        cases.our_model(path, cases.options(path=str(tmp_path)))


def test_another_layout_of_the_file_is_kept(path, folder, tmp_path):
    """A file whose tensors stand in another order, as other writers have it, is written back as it was."""
    rows = peft.tensorfile.read_header(folder / peft.WEIGHTS)
    order, head, end, data = sorted(rows, reverse=True), {}, 0, b""
    for name in order:
        part = np.asarray(rows[name].read()).tobytes()
        head[name] = {"dtype": rows[name].dtype, "shape": list(rows[name].shape), "data_offsets": [end, end + len(part)]}
        end, data = end + len(part), data + part
    text = json.dumps(head).encode() + b"   "
    (tmp_path / peft.WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data)
    (tmp_path / peft.CONFIG).write_bytes((folder / peft.CONFIG).read_bytes())
    given = cases.options(path=str(tmp_path))
    model, base = cases.our_model(path, given)
    peft.write(tmp_path / "out", model, adapters.joined(base, peft.read(tmp_path, model)[1]), given, "")
    assert (tmp_path / "out" / peft.WEIGHTS).read_bytes() == (tmp_path / peft.WEIGHTS).read_bytes()
    assert flatten_dict(hf.load_params(model.base, path), sep="/").keys() == flatten_dict(base, sep="/").keys()


def test_an_adapter_whose_folder_changed_meanwhile_is_written_with_its_own_ranks(path, tmp_path, caplog):
    """lora.path alone says nothing of ranks: the modules, ranks, scales and whole modules are the adapter's, here and for PEFT."""
    first = cases.options(targets=("q_proj", "down_proj"), exclude=("layers.0.mlp.down_proj",), rank_pattern=("q_proj=3",), dora=True,
                          alpha_pattern=("down_proj=6",), modules_to_save=("lm_head", "layers.1.input_layernorm"))
    model, base = cases.our_model(path, first, scan=False)
    params = adapters.joined(base, initialization.initial(model, jax.random.key(0), base, "gaussian"))
    peft.write(tmp_path / "start", model, params, first, path)
    given = cases.options(path=str(tmp_path / "start"), rank=0, alpha=None)
    model, _ = cases.our_model(path, given, scan=False)
    config = tmp_path / "start" / peft.CONFIG
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    peft.write(tmp_path / "ours", model, params, given, path)
    assert "is no longer the one that was read" in caplog.text
    adapter, leaves = peft.read(tmp_path / "ours", model)
    assert adapter == model.adapter and {t.rank for t in adapter.targets} == {3, 4} and len(adapter.saved) == 2
    written, before = (load_file(tmp_path / name / peft.WEIGHTS) for name in ("ours", "start"))
    assert written.keys() == before.keys() and all(np.array_equal(written[n], before[n]) for n in before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = theirs.PeftModel.from_pretrained(cases.torch_model(path), tmp_path / "ours")
    assert {t.name: (t.rank, t.scale) for t in adapter.targets} == cases.chosen(other) and set(adapter.saved) == cases.saved(other)


@pytest.mark.full
def test_a_rewritten_folder_is_read_anew(path, folder, tmp_path):
    """Within one process: the scale is that of the folder as it is now."""
    for name in (peft.CONFIG, peft.WEIGHTS):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    before = cases.our_model(path, cases.options(path=str(tmp_path)))[0].adapter.targets[0].scale
    table = json.loads((folder / peft.CONFIG).read_text())
    (tmp_path / peft.CONFIG).write_text(json.dumps(table | {"lora_alpha": 8 * table["lora_alpha"], "alpha_pattern": {}}))
    after = cases.our_model(path, cases.options(path=str(tmp_path)))[0].adapter.targets[0].scale
    assert after == 8 * before
