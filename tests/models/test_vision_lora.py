"""Adapters of models with a tower beside PEFT's: which modules, outputs, gradients, files; with the tower read and without."""

import dataclasses
import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import model_cases
from helpers import peft_cases as peft_case
from helpers import vision_cases as cases
from helpers.peft_cases import theirs, torch
from helpers.tiers import first_cases, nightly

from jaxrl.errors import ConfigError
from jaxrl.models import adapters
from jaxrl.models.adapters import initialization, peft
from jaxrl.models.adapters.selection import outer_name
from jaxrl.models.io import hf
from jaxrl.run.model_checks import check_tower

pytestmark = pytest.mark.torch
PIECES = ([5, (4, 6), 3, (2, 2), 4], [3, (8, 2), 6])
KINDS = ["qwen2_5_vl", "qwen3_vl", "qwen2_vl", "qwen3_vl_moe", "gemma3"]
OF_TOWER = {"gemma3": ".*(vision_tower|multi_modal_projector).*"}  # pattern of the names of a tower's modules, else .*visual.*


def sequences(tower):
    out = []
    for i, pieces in enumerate(PIECES):
        pieces = [cases.GEMMA_GRID if tower.two_way and not isinstance(piece, int) else piece for piece in pieces]
        ids, firsts, grids = cases.sequence(i, pieces, tower.merge)
        out.append((ids, firsts, grids, [cases.pixels(10 * i + k, grid) for k, grid in enumerate(grids)]))
    return out


def wrapped(model, **given):
    """PEFT's model around a model of images, with B that are not zero."""
    return peft_case.wrapped(model, theirs.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **given}))


def attached(path, images=True, **given):
    """(our model with the adapter of these options, its base's parameters)."""
    model, params = cases.ours(path) if images else model_cases.ours(str(path), scan_layers=False)
    return dataclasses.replace(model, adapter=peft.resolve(peft_case.options(**given), model)), params


def logits_and_gradients(model, params):
    tower = model.config.vision
    arrays, images, places = cases.rows(sequences(tower), window=tower.window, merge=tower.merge, two_way=tower.two_way, room=128)
    real = jnp.asarray(arrays[2] > 0)[..., None]

    def loss(params):
        logits = model.logits(params, model.hidden(params, *arrays, images=images))
        return jnp.sum(jnp.where(real, jnp.sin(jax.nn.log_softmax(logits)), 0)), logits

    (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=model_cases.QUICK)(params)
    return [np.asarray(logits)[place] for place in places], grads


@pytest.mark.full
@first_cases(3, "kind, options", [
    ("gemma3", {}), ("qwen2_5_vl", {}), ("qwen3_vl", {"exclude_modules": ".*visual.*"}),
    ("qwen2_5_vl", {"target_modules": ["qkv", "mlp.0", "q_proj"], "rank_pattern": {"visual.*qkv": 2}}),
    ("qwen2_5_vl", {"exclude_modules": ".*visual.*"}), ("qwen2_vl", {}), ("qwen3_vl", {}), ("qwen3_vl_moe", {}),
    ("gemma3", {"exclude_modules": OF_TOWER["gemma3"]})], full=0, ids=json.dumps)
def test_outputs_gradients_and_files_are_pefts(tmp_path, kind, options):
    """Of prompts with images, for every A and B; what PEFT saved is written again to the byte."""
    other = wrapped(cases.make(tmp_path / "base", kind=kind), **options)
    saved = peft_case.save(other, tmp_path / "theirs")
    model, base = cases.ours(tmp_path / "base")
    adapter, leaves = peft.read(saved, model)
    own = peft_case.options(targets=tuple(options.get("target_modules", ["all-linear"])),
                            exclude=tuple(filter(None, [options.get("exclude_modules")])),
                            rank_pattern=tuple(f"{k}={v}" for k, v in options.get("rank_pattern", {}).items()))
    assert adapter == peft.resolve(own, model)
    model = dataclasses.replace(model, adapter=adapter)
    assert {outer_name(model, t.name): (t.rank, t.scale) for t in adapter.targets} == peft_case.chosen(other)
    params = adapters.joined(base, leaves)
    got, grads = logits_and_gradients(model, params)
    for logits, one in zip(got, sequences(model.config.vision), strict=True):
        want = cases.theirs(other, *one, grad=True)
        np.testing.assert_allclose(logits, want.detach().numpy(), atol=3e-5)
        torch.log_softmax(want, -1).sin().sum().backward()
    expected = {name.replace(".default", ""): w.grad.numpy() for name, w in other.named_parameters() if w.grad is not None}
    found = peft.hf_tensors(model, grads, np.float32, {})
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        np.testing.assert_allclose(found[name], one, rtol=0, atol=5e-5 * max(1, np.abs(one).max()), err_msg=name)
    peft.write(tmp_path / "ours", model, params, peft_case.options(path=saved), "elsewhere")
    assert peft_case.digests(tmp_path / "ours") == peft_case.digests(saved)


@pytest.mark.full
@pytest.mark.parametrize("kind", [kind if kind in ("gemma3", "qwen2_5_vl") else nightly(kind) for kind in KINDS])
def test_a_text_job_adapts_the_language_model_and_peft_opens_it_there(tmp_path, kind):
    """Its options may name the tower, which it does not read; PEFT finds the same modules in the whole model, and the same logits."""
    other = cases.make(tmp_path / "base", kind=kind)
    of_tower = OF_TOWER.get(kind, ".*visual.*")
    model, base = attached(tmp_path / "base", images=False, exclude=(of_tower,))
    whole, _ = attached(tmp_path / "base", exclude=(of_tower,))
    assert model.adapter == whole.adapter
    model, _ = attached(tmp_path / "base", images=False)
    assert model.adapter == whole.adapter
    with pytest.raises(ConfigError, match="lora.exclude: '.\\*audio.\\*' matches no module"):
        attached(tmp_path / "base", images=False, exclude=(".*audio.*",))
    rng = np.random.default_rng(0)
    leaves = {n: x if n.endswith("scale") else jnp.asarray(rng.normal(size=x.shape) * 0.1, jnp.float32)
              for n, x in initialization.initial(model, jax.random.key(0), base, "default").items()}
    peft.write(tmp_path / "ours", model, params := adapters.joined(base, leaves), peft_case.options(), str(tmp_path / "base"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        other = theirs.PeftModel.from_pretrained(other, tmp_path / "ours")
    assert not [n for n in peft_case.chosen(other) if re.fullmatch(of_tower, n)]
    ids, *rest = cases.sequence(0, [9])
    arrays, _, places = cases.rows([(ids, *rest, [])])
    got = np.asarray(cases.logits(model, params, arrays, None))[places[0]]
    np.testing.assert_allclose(got, cases.theirs(other, ids, *rest, []), atol=3e-5)


def test_several_adapters_share_a_tower(tmp_path):
    cases.make(tmp_path, kind="qwen2_5_vl")
    for exclude, refused in (((), True), ((".*visual.*",), False)):
        model, _ = attached(tmp_path, exclude=exclude)
        together = dataclasses.replace(model, adapter=adapters.adapter_set.combine_adapters({"a": model.adapter, "b": model.adapter}))
        if refused:
            with pytest.raises(ConfigError, match="lora.adapters with images: .*lora.exclude"):
                check_tower(together)
        else:
            check_tower(together)


@pytest.mark.full
def test_a_merged_adapter_is_the_model(tmp_path):
    """Tower and decoder in one, scanned; and an export of it is what transformers computes."""
    cases.make(tmp_path / "base", kind="qwen2_5_vl")
    model, base = cases.ours(tmp_path / "base", scan_layers=True)
    model = dataclasses.replace(model, adapter=peft.resolve(peft_case.options(layers=(1, 2)), model))
    rng = np.random.default_rng(0)
    leaves = {n: x if n.endswith("scale") else jnp.asarray(rng.normal(size=x.shape) * 0.1, jnp.float32)
              for n, x in initialization.initial(model, jax.random.key(0), base, "default").items()}
    params = adapters.joined(base, leaves)
    merged = adapters.merged(model, params)
    (want, _), (got, _) = logits_and_gradients(model, params), logits_and_gradients(model.base, merged)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)
    hf.export(model.base, merged, tmp_path / "out", hf.load_config(str(tmp_path / "base"), images=True))
    again = cases.ours(tmp_path / "out", scan_layers=True)[1]
    jax.tree.map(np.testing.assert_array_equal, merged, again)
