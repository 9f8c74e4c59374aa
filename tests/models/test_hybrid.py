"""Models with recurrent layers: transformers' logits in every layout of rows, packed folders in and out, nested ones."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import model_cases
from helpers.rollout_helpers import random_params
from helpers.tiers import first_cases, nightly
from helpers.tiny_models import ARCHITECTURES, HYBRIDS, SIZES

from jaxrl.errors import ConfigError
from jaxrl.models import build
from jaxrl.models.io import hf, tensorfile
from jaxrl.training.optimizer import _decays as decays

pytestmark = pytest.mark.torch
LIMIT = 1e-4  # of logits up to 10 in fp32


@first_cases(1, "name", [nightly(name) if name == "qwen3_5_moe" else name for name in HYBRIDS])  # see test_experts_as_they_lie_on_a_disk
def test_logits_equal_transformers(folder, name):
    """Plain, padded, packed and with shared prompts, each sequence against transformers alone."""
    want = model_cases.reference(folder(name))
    model, params = model_cases.ours(folder(name), scan_layers=name == "qwen3_5")
    arrays, checks = model_cases.batch()
    got = np.asarray(model_cases.forward(model, params, *arrays))
    for case, row, columns, sequence in checks:
        np.testing.assert_allclose(got[row, columns], want(sequence)[-len(columns):], atol=LIMIT, err_msg=case)


@pytest.mark.full
def test_a_packed_sequence_is_the_sequence_alone(folder):
    """float64: log-probs and gradients of a row of prompts and completions are the sums of those of each alone."""
    with jax.enable_x64(True):
        model, params = model_cases.ours(folder("qwen3_5"), True, jnp.float64)
        (tokens, positions, segments, prefixes), checks = model_cases.batch()

        def loss(params, tokens, positions, segments, prefixes, weights):
            out = jax.nn.log_softmax(model.logits(params, model.hidden(params, tokens, positions, segments, prefixes)))
            return jnp.sum(weights * jnp.sin(out).sum(-1))

        graded, row = jax.jit(jax.value_and_grad(loss)), 3
        packed = graded(params, *(x[row:row + 1] for x in (tokens, positions, segments, prefixes)),
                        (segments[row:row + 1] > 0).astype(float))
        alone, length = [], tokens.shape[1]
        for _, r, columns, sequence in checks:
            if r == row:
                place = np.arange(length)
                one = (place < len(sequence)).astype(np.int32)
                ids = np.zeros(length, np.int32)
                ids[:len(sequence)] = sequence
                weights = one * (place >= len(sequence) - len(columns))
                alone.append(graded(params, ids[None], place[None] * one[None], one[None], 0 * one[None], weights[None].astype(float)))
        assert abs(packed[0] - sum(value for value, _ in alone)) < 1e-12 * abs(packed[0])
        for got, *parts in zip(*map(jax.tree.leaves, (packed[1], *(g for _, g in alone))), strict=True):
            np.testing.assert_allclose(got, sum(parts), rtol=0, atol=1e-12 * (1 + np.abs(got).max()))


@pytest.mark.full
@first_cases(1, "name", ["qwen3_5", "nemotron_h_dense"], full=0)
def test_gradients_are_those_of_the_recurrence_token_by_token(folder, name):
    """float64, packed rows with shared prompts: by every parameter, rates, shifts and taps among them, through chunks as through tokens."""
    with jax.enable_x64(True):
        arrays = model_cases.batch()[0]
        ones = (arrays[2] > 0).astype(float)

        def gradients(recurrence):
            model, params = model_cases.ours(folder(name), True, jnp.float64, recurrence=recurrence)
            run = lambda p: jax.nn.log_softmax(model.logits(p, model.hidden(p, *arrays)))  # noqa: E731
            return jax.jit(jax.grad(lambda p: jnp.sum(ones * jnp.sin(run(p)).sum(-1))))(params)

        got, want = gradients("xla"), gradients("reference")
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
            assert 0 < np.linalg.norm(b) and np.linalg.norm(a - b) <= 1e-12 * np.linalg.norm(b), path


@pytest.mark.full
@first_cases(1, "name", ["qwen3_5", "qwen3_next"], full=0)
def test_export_is_the_folder_that_was_read(folder, tmp_path, name):
    """Every tensor's name, dtype and bytes, of a bf16 folder with A_log and the gated norms in F32, as published."""
    source = folder(name, dtype="bfloat16")
    stored = tensorfile.list_folder(Path(source))
    wide = [t for t in stored if t.endswith(("A_log", "linear_attn.norm.weight"))]
    planned = [tensorfile.Planned(n, np.dtype(np.float32) if n in wide else tensorfile.DTYPES[t.dtype], t.shape,
                                  lambda t=t, n=n: t.read().astype(np.float32) if n in wide else t.read()) for n, t in stored.items()]
    (tmp_path / "in").mkdir()
    tensorfile.write_folder(tmp_path / "in", planned, 1e9)
    (tmp_path / "in" / "config.json").write_text((Path(source) / "config.json").read_text())
    config = hf.load_config(str(tmp_path / "in"))
    model = build(config, compute_dtype=jnp.bfloat16, scan_layers=True)
    params = hf.load_params(model, str(tmp_path / "in"), dtype=jnp.bfloat16)
    rates = [a for path, a in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "rate"]
    assert rates and all(a.dtype == jnp.float32 for a in rates)
    hf.export(model, params, tmp_path / "out", config)
    same_tensors(tmp_path / "in", tmp_path / "out")


@pytest.mark.full
@pytest.mark.parametrize("pattern", [{"hybrid_override_pattern": "M-M"}])
def test_a_completion_is_its_own_to_the_bit(pattern):
    """fp32, one program, no attention: log-probs of completions of a shared prompt, packed behind another prompt, are the same bits when
    the neighbours hold other tokens, and those that they have behind a copy of the prompt of their own."""
    kind, entries = HYBRIDS["nemotron_h_dense"]
    model = build({**SIZES, **entries, **pattern, "model_type": kind}, compute_dtype=jnp.float32, scan_layers=False)
    params, rng = jax.jit(model.init)(jax.random.key(0)), np.random.default_rng(0)
    prompt, completions, length = rng.integers(3, 90, 19), [rng.integers(3, 90, n) for n in (21, 5, 16)], 96

    @jax.jit
    def scores(tokens, positions, segments, prefixes):
        return jax.nn.log_softmax(model.logits(params, model.hidden(params, tokens, positions, segments, prefixes)))

    def packed(pieces):
        """pieces: (tokens, segment, prefix, first position). Returns each piece's log-probs."""
        arrays, at, where = np.zeros((4, 1, length), np.int32), 0, []
        for tokens, segment, prefix, first in pieces:
            own = slice(at, at + len(tokens))
            arrays[:, 0, own] = tokens, first + np.arange(len(tokens)), np.full(len(tokens), segment), np.full(len(tokens), prefix)
            where, at = [*where, own], at + len(tokens)
        out = np.asarray(scores(*arrays))[0]
        return [out[own] for own in where]

    other = [rng.integers(3, 90, 11), rng.integers(3, 90, 11)]
    shared = [(prompt, 2, 0, 0), *((c, 3 + i, 2, 19) for i, c in enumerate(completions))]
    one, two = (packed([(o, 1, 0, 0), *shared])[1:] for o in other)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)
    for i, c in enumerate(completions):
        alone = packed([(prompt, 1, 0, 0), (c, 2, 1, 19)])
        np.testing.assert_array_equal(alone[1], one[1 + i])
        np.testing.assert_array_equal(alone[0], one[0])


@pytest.mark.full
@first_cases(1, "name", ["qwen3_5", "nemotron_h"])
def test_decoding_and_extending_are_the_forward_pass(folder, name):
    """Two rows prefilled and decoded beside an idle slot against transformers; then the same tokens extended in pieces,
    beside padding, and decoded again: what an idle slot holds does not change by a bit."""
    path = folder(name)
    want, (model, params) = model_cases.reference(path), model_cases.ours(path, True)
    rows = model_cases.batch()[0][0][:2]
    for row, prompt, logits in zip(rows, model_cases.PROMPTS, np.asarray(model_cases.decoded(model, params, rows)), strict=True):
        np.testing.assert_allclose(logits[prompt - 1:], want(row)[prompt - 1:], atol=LIMIT)

    length, prompts = model_cases.LENGTH, np.array(model_cases.PROMPTS)
    _, kv = jax.jit(model.prefill)(params, np.where(np.arange(14) < prompts[:, None], rows[:, :14], 5), prompts)
    cache = model.insert(model.init_cache(3, length, jnp.float32), kv, np.arange(2), np.array([2, 0]))
    extend, decode = jax.jit(model.extend), jax.jit(model.decode)
    starts = prompts - 1
    for counts in ((3, 5), (1, 0), (4, 2)):  # row 1 waits once
        tokens, positions = np.full((2, 5), 7, np.int32), length + np.tile(np.arange(5, dtype=np.int32), (2, 1))
        for i, n in enumerate(counts):
            tokens[i, :n], positions[i, :n] = rows[i, starts[i]:starts[i] + n], starts[i] + np.arange(n)
        cache = extend(params, tokens, positions, cache, np.array([2, 0], np.int32))
        starts = starts + counts
    at = starts
    tokens = np.array([rows[1, at[1]], 0, rows[0, at[0]]], np.int32)
    hidden, after = decode(params, tokens, np.array([at[1], length, at[0]], np.int32), cache)
    got = np.asarray(model.logits(params, hidden))
    for slot, i in ((2, 0), (0, 1)):
        np.testing.assert_allclose(got[slot], want(rows[i])[at[i]], atol=LIMIT)
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(cache), jax.tree.leaves(after), strict=True):
        axis = int(path[0].key == "layers")
        np.testing.assert_array_equal(np.take(np.asarray(old), 1, axis), np.take(np.asarray(new), 1, axis))


def tiny(name, **options):
    kind, entries = (ARCHITECTURES | HYBRIDS)[name]
    return build({k: v for k, v in {**SIZES, **entries, "model_type": kind}.items() if v is not None}, scan_layers=False, **options)


@pytest.mark.full
@first_cases(1, "name", ["qwen3_5", "nemotron_h_dense"])
def test_no_program_has_a_state_in_bf16(name):
    """Of a model in bf16: forward, backward, prefill, insert, extend and decode, before a compiler has seen them. Keys of 5, values of 7."""
    model = tiny(name, compute_dtype=jnp.bfloat16)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), jax.eval_shape(model.init, jax.random.key(0)))
    ids, row = jax.ShapeDtypeStruct((2, 48), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    cache = jax.eval_shape(lambda: model.init_cache(2, 48, jnp.bfloat16))
    states = [x for x in jax.tree.leaves(cache) if x.shape[-2:] == (5, 7)]
    assert states and all(x.dtype == jnp.float32 for x in states)
    programs = {
        "forward, backward": jax.jit(jax.grad(lambda p, *a: model.hidden(p, *a).astype(jnp.float32).sum())).lower(params, ids, ids, ids, ids),
        "prefill": jax.jit(lambda p, t, n: model.insert(model.init_cache(2, 48, jnp.bfloat16), model.prefill(p, t, n)[1], n, n)).lower(
            params, ids, row),
        "extend": jax.jit(model.extend).lower(params, ids, ids, cache, row), "decode": jax.jit(model.decode).lower(params, row, row, cache)}
    for program, lowered in programs.items():
        text = lowered.as_text()
        assert "x5x7xf32>" in text and "x5x7xbf16>" not in text, program


@pytest.mark.full
def test_a_token_that_runs_twice_is_seen():
    """Harmless in a model of attention alone, whose keys are written again; a state has taken it twice. So a prefill leaves out the last token."""
    found = {}
    for name in ("qwen3", "qwen3_5"):
        model, tokens = tiny(name, compute_dtype=jnp.float32), np.random.default_rng(0).integers(3, 90, (1, 12)).astype(np.int32)
        params = jax.jit(model.init)(jax.random.key(0))
        last, kv = jax.jit(model.prefill)(params, tokens, np.array([12]))
        cache, decode = model.insert(model.init_cache(1, 16, jnp.float32), kv, np.array([0]), np.array([0])), jax.jit(model.decode)
        once, cache = decode(params, tokens[:, 11], np.array([11]), cache)
        twice, _ = decode(params, tokens[:, 11], np.array([11]), cache)
        np.testing.assert_allclose(once, last, rtol=0, atol=1e-5)
        found[name] = np.abs(twice - once).max()
    assert found["qwen3"] == 0 and found["qwen3_5"] > 1e-2, found


@pytest.mark.full
@first_cases(1, "name", ["qwen3_5", "nemotron_h_dense"])
def test_recurrences_of_random_weights_count(name):
    """rollout_helpers.random_params makes the weights of the tests of engines: each recurrent layer's input and output matrices move the logits."""
    model, tokens = tiny(name, compute_dtype=jnp.float32), np.random.default_rng(0).integers(3, 90, (1, 12)).astype(np.int32)
    params, ones = random_params(model, 0, 0.15), np.ones((1, 12), np.int32)
    run = jax.jit(lambda p: model.logits(p, model.hidden(p, tokens, np.arange(12, dtype=np.int32)[None], ones, 0 * ones)))
    want, moved = run(params), {}
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        keys = [key.key for key in path]
        if "recurrent" in keys and keys[-1] == "kernel":
            changed = jax.tree_util.tree_map_with_path(lambda other, x, path=path: x * 0.5 if other == path else x, params)
            moved["/".join(keys)] = float(np.abs(run(changed) - want).max())
    assert moved and min(moved.values()) > 1e-3, moved


def test_weight_decay_takes_matrices_only():
    """Of a recurrent layer: neither the convolution's taps nor rates, shifts and norms."""
    model = build({"model_type": "qwen3_5_text", **SIZES, **HYBRIDS["qwen3_5"][1]}, compute_dtype=jnp.float32, scan_layers=True)
    names = {"/".join(e.path): e.axes for e in model.entries if "recurrent" in e.path}
    skipped = {name.split("recurrent/")[1] for name, axes in names.items() if not decays(name, axes)}
    taps = {"query_taps/weight", "key_taps/weight", "value_taps/weight"}
    assert skipped == {"rate", "shift", "norm/scale", *taps}
    model = build({"model_type": "nemotron_h", **SIZES, **HYBRIDS["nemotron_h"][1]}, compute_dtype=jnp.float32, scan_layers=True)
    names = {"/".join(e.path): e.axes for e in model.entries if "recurrent" in e.path}
    skipped = {name.split("recurrent/")[1] for name, axes in names.items() if not decays(name, axes)}
    assert skipped == {"rate", "shift", "skip", "norm/scale", *taps, *(t.replace("weight", "bias") for t in taps)}


def same_tensors(a, b):
    one, two = map(tensorfile.list_folder, (a, b))
    assert one.keys() == two.keys()
    for name, t in one.items():
        assert (t.dtype, t.shape) == (two[name].dtype, two[name].shape), name
        assert t.read().tobytes() == two[name].read().tobytes(), name


@pytest.mark.full
@first_cases(1, "name, options", [("qwen3_5_moe", {"fused": True}),
                                  ("qwen3_next", {"decoder_sparse_step": 2, "mlp_only_layers": None, "norm_topk_prob": True}),
                                  ("qwen3_next", {"fused": True})], full=0)
def test_experts_as_they_lie_on_a_disk(folder, tmp_path, name, options):
    """Fused or one by one, every second layer or all: logits, and an export of the same bytes."""
    path = folder(name, **options)
    want, config = model_cases.reference(path), hf.load_config(path)
    model, params = model_cases.ours(path, scan_layers=True)
    row = model_cases.batch()[0][0][:1]
    ones = np.ones_like(row)
    got = model_cases.forward(model, params, row, np.arange(row.shape[1], dtype=np.int32)[None], ones, 0 * ones)
    np.testing.assert_allclose(got[0], want(row[0]), atol=LIMIT)
    rows = model_cases.batch()[0][0][:2]
    logits = np.asarray(model_cases.decoded(model, params, rows))
    for i, prompt in enumerate(model_cases.PROMPTS):
        np.testing.assert_allclose(logits[i, prompt - 1:], want(rows[i])[prompt - 1:], atol=LIMIT)
    hf.export(model, params, tmp_path / "out", config)
    same_tensors(Path(path), tmp_path / "out")


def test_router_weights_are_always_normalised():
    """In qwen3_5_moe, which has no field for it; Qwen3-Next has one, true where it is left out."""
    def built(kind, **entries):
        return build({"model_type": kind, **SIZES, **HYBRIDS["qwen3_next"][1], "norm_topk_prob": None, "mlp_only_layers": None, **entries},
                     compute_dtype=jnp.float32, scan_layers=False).config.norm_topk

    assert built("qwen3_5_moe_text")
    entries = {k: v for k, v in HYBRIDS["qwen3_next"][1].items() if k != "norm_topk_prob"}
    assert build({"model_type": "qwen3_next", **SIZES, **entries}, compute_dtype=jnp.float32, scan_layers=False).config.norm_topk
    with pytest.raises(ConfigError, match="norm_topk_prob"):
        built("qwen3_5_moe_text", norm_topk_prob=False)


@pytest.fixture(scope="module", params=[pytest.param("qwen3_5"), pytest.param("qwen3_5_moe", marks=pytest.mark.nightly)])
def nested(tmp_path_factory, request):
    """A folder of text model, image tower and `mtp` tensors, as transformers writes them."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    kind = request.param
    text = {**SIZES, **HYBRIDS[kind][1], "tie_word_embeddings": False, "model_type": f"{kind}_text"}
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, num_position_embeddings=4,
                  model_type=f"{kind}_vision")
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, image_token_id=5, video_token_id=6,
                                  vision_start_token_id=7, vision_end_token_id=8)
    model = AutoModelForImageTextToText.from_config(config).eval()
    path = tmp_path_factory.mktemp(kind)
    model.save_pretrained(path)
    stored = tensorfile.list_folder(path)
    planned = [tensorfile.Planned(n, tensorfile.DTYPES[t.dtype], t.shape, lambda t=t: np.array(t.read())) for n, t in stored.items()]
    planned.append(tensorfile.Planned("mtp.fc.weight", np.dtype(np.float32), (3,), lambda: np.arange(3, dtype=np.float32)))
    tensors = [tensorfile.Planned(t.name, t.dtype, t.shape, lambda a=t.get(): a) for t in planned]
    tensorfile.write_folder(path, tensors, 1e9)
    ids = np.random.default_rng(1).integers(9, 90, 30)
    with torch.no_grad():
        return path, ids, model(input_ids=torch.tensor(ids)[None]).logits[0].numpy()


@pytest.mark.full
def test_the_text_part_of_a_nested_folder(nested, tmp_path, caplog):
    """Its logits, what is said to be left out, and an export that has tower and `mtp` as they were."""
    path, ids, want = nested
    config = hf.load_config(str(path))
    kind = config["model_type"]
    assert kind in ("qwen3_5_text", "qwen3_5_moe_text")
    model = build(config, compute_dtype=jnp.float32, scan_layers=False)
    with caplog.at_level("INFO"):
        params = hf.load_params(model, str(path))
    assert "left out: model.visual" in caplog.text and "mtp (1 tensors)" in caplog.text
    row = np.asarray(ids, np.int32)[None]
    got = model_cases.forward(model, params, row, np.arange(30, dtype=np.int32)[None], np.ones_like(row), np.zeros_like(row))
    np.testing.assert_allclose(got[0], want, atol=LIMIT)
    hf.export(model, params, tmp_path / "out", config)
    assert "mtp" in caplog.text.splitlines()[-1]
    same_tensors(path, tmp_path / "out")
    one, two = (json.loads((folder / "config.json").read_text()) for folder in (path, tmp_path / "out"))
    assert two["architectures"] == one["architectures"] and one["vision_config"] == two["vision_config"]
    assert {k: two["text_config"][k] for k in SIZES} == {k: one["text_config"][k] for k in SIZES}


def test_an_export_whose_source_is_gone_keeps_its_names(tmp_path, caplog):
    """The `mtp` tensors are lost; the others have the source's names, which are those that transformers and vLLM look for."""
    given = {"model_type": "nemotron_h", **SIZES, **HYBRIDS["nemotron_h_dense"][1], "hybrid_override_pattern": "M-*"}
    config, source = hf.load_config("", overrides=given), tmp_path / "source"
    model = build(config, compute_dtype=jnp.float32, scan_layers=True)
    params = jax.jit(model.init)(jax.random.key(0))
    hf.export(model, params, tmp_path / "made", config)
    names = tensorfile.list_folder(tmp_path / "made")
    shutil.copytree(tmp_path / "made", source)
    planned = [tensorfile.Planned(t.name, tensorfile.DTYPES[t.dtype], t.shape, t.read) for t in names.values()]
    more = tensorfile.Planned("mtp.fc.weight", np.dtype(np.float32), (3,), lambda: np.arange(3, dtype=np.float32))
    tensorfile.write_folder(source, [*planned, more], 1e9)
    config = hf.load_config(str(source))
    shutil.rmtree(source)
    hf.export(model, params, tmp_path / "out", config)
    assert "source, the source of the exported model, cannot be read" in caplog.text
    assert "backbone.embeddings.weight" in names and tensorfile.list_folder(tmp_path / "out").keys() == names.keys()


@pytest.mark.parametrize("change, message", [
    ({"tie_word_embeddings": True}, "tie_word_embeddings=True"), ({"text_config": None}, "text_config=None"),
    ({"architectures": ["SomethingElse"]}, "SomethingElse")])
def test_nested_configs_that_are_refused(nested, change, message):
    config = json.loads((nested[0] / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        build({**config, **change}, compute_dtype=jnp.float32, scan_layers=False)
