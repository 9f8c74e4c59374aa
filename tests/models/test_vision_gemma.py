"""Gemma 3 with its tower against transformers' model: logits and gradients, the mask of images, folders in and out."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import model_cases
from helpers import vision_cases as cases
from helpers.tiers import first_cases

from jaxrl.errors import ConfigError
from jaxrl.models import build, rope
from jaxrl.models.io import hf, tensorfile
from jaxrl.models.vision import tower
from jaxrl.models.vision.positions import Placed, image_rows, reach_positions

pytestmark = pytest.mark.torch
LIMIT, GRID = 1e-5, cases.GEMMA_GRID  # of logits in fp32
PIECES = ([5, GRID, 3, GRID, 4], [9], [3, GRID, 6], [2, GRID, 1, GRID, 2])


def sequences(pieces=PIECES, grid=GRID, merge=4, patch=4):
    out = []
    for i, own in enumerate(pieces):
        ids, firsts, grids = cases.sequence(i, [piece if isinstance(piece, int) else grid for piece in own], merge)
        out.append((ids, firsts, grids, [cases.pixels(10 * i + k, grid, patch) for k, grid in enumerate(grids)]))
    return out


def rows_for(sequences, merge=4, room=192, **options):
    return cases.rows(sequences, merge=merge, two_way=True, room=room, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """(folder, transformers' model)."""
    path = tmp_path_factory.mktemp("gemma3")
    return path, cases.make(path, kind="gemma3")


@pytest.fixture(scope="module")
def want(folder):
    return [cases.theirs(folder[1], *own) for own in sequences()]


@pytest.mark.full
@first_cases(1, "scan_layers", [True, False])
def test_logits_equal_transformers(folder, want, scan_layers):
    """0, 1 and 2 images in a row of their own, and several sequences with images packed into one row. The window is
    shorter than an image."""
    model, params = cases.ours(folder[0], scan_layers)
    for into in (None, [0, 0, 1, 1]):
        arrays, images, places = rows_for(sequences(), rows=into)
        got = np.asarray(cases.logits(model, params, arrays, images))
        for expected, place in zip(want, places, strict=True):
            np.testing.assert_allclose(got[place], expected, atol=LIMIT)


@contextlib.contextmanager
def in_double():
    """Context in which transformers computes norms, rotary angles and softmax in float64, too."""
    import torch
    softmax = torch.nn.functional.softmax
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double), mock.patch.object(
            torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim)):
        yield


@pytest.mark.full
def test_gradients_equal_transformers_in_double(folder, tmp_path):
    """Of every parameter of tower, projector and decoder, to 1e-10 of the largest; each has some."""
    import torch
    path, theirs = folder
    theirs = cases.make(kind="gemma3").double()
    language = theirs.model.language_model  # its scale and its frequencies were rounded to float32, the latter otherwise than here
    language.embed_tokens.embed_scale = torch.tensor(32.0, dtype=torch.float64).sqrt()
    for kind, theta in (("full", 700.0), ("sliding", 90.0)):
        ours = torch.tensor(rope.frequencies(rope.Rope(theta=theta), 12).astype(np.float64))
        assert torch.allclose(getattr(language.rotary_emb, f"{kind}_attention_inv_freq"), ours, rtol=1e-6)
        setattr(language.rotary_emb, f"{kind}_attention_inv_freq", ours)
    with in_double():
        for own in sequences():
            torch.log_softmax(cases.theirs(theirs, *own, grad=True), -1).sin().sum().backward()
    names = {**{f"model.{n}": p for n, p in theirs.model.named_parameters()}, "lm_head.weight": theirs.lm_head.weight}
    stored = {stored_name(n): weight.grad.numpy() for n, weight in names.items()}
    with jax.enable_x64(True):
        model, params = cases.ours(path, True, dtype=jnp.float64, remat="full")
        arrays, images, _ = rows_for(sequences(), rows=[0, 0, 1, 1])
        _, grads = value_and_gradients(model, params, arrays, images)
        hf.export(model, grads, tmp_path / "grads", hf.load_config(str(path), images=True), dtype="float64")
    got = {name: t.read() for name, t in tensorfile.list_folder(tmp_path / "grads").items()}
    assert got.keys() == stored.keys()
    for name, expected in stored.items():
        assert np.abs(expected).max() > 1e-4 or name.endswith("k_proj.bias"), name
        np.testing.assert_allclose(got[name], expected, rtol=0, atol=1e-10 * max(1, np.abs(expected).max()), err_msg=name)


def stored_name(name: str) -> str:
    """transformers' name of a parameter on disk."""
    name = name.removeprefix("model.") if ".vision_tower." in name or ".multi_modal_" in name else name
    return name.replace("model.language_model.", "language_model.model.").replace("lm_head", "language_model.lm_head")


def value_and_gradients(model, params, arrays, images):
    """Of a function of all log-probabilities of all real tokens."""
    def loss(params):
        out = jax.nn.log_softmax(model.logits(params, model.hidden(params, *arrays, images=images)))
        return jnp.sum(jnp.where(jnp.asarray(arrays[2] > 0)[..., None], jnp.sin(out), 0))

    return jax.jit(jax.value_and_grad(loss), compiler_options=model_cases.QUICK)(params)


TEXT = [{"sliding_window": 9}, {"sliding_window_pattern": 2}, {"rope_theta": 90.0}, {"rope_local_base_freq": 7.0}, {"query_pre_attn_scalar": 3},
        {"rms_norm_eps": 0.5}, {"num_key_value_heads": 4}, {"hidden_activation": "silu"},
        {"attention_bias": True}, {"layer_types": ["full_attention"] * 3}, {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}]
VISION = [{"hidden_act": "silu"}, {"layer_norm_eps": 0.5}, {"num_attention_heads": 2}, {"num_hidden_layers": 2}, {"intermediate_size": 7},
          {"image_size": 16}, {"patch_size": 2}]
FIELDS = [{"text": TEXT[0]}, {"vision": VISION[0]}, {"mm_tokens_per_image": 16}, *({"text": t} for t in TEXT[1:]),
          *({"vision": v} for v in VISION[1:]), {"tie_word_embeddings": True, "text": {"tie_word_embeddings": True}}]


@pytest.mark.nightly
@first_cases(2, "change", FIELDS, ids=json.dumps)
def test_every_field_is_read(tmp_path, want, change):
    """With the field flipped our logits are transformers' again, and differ from those before."""
    vision = {**cases.SIGLIP, **change.get("vision", {})}
    patch, side = vision["patch_size"], vision["image_size"] // vision["patch_size"]
    merge = side // int(change.get("mm_tokens_per_image", 4)**0.5)
    own = sequences(PIECES[:1], (side, side), merge, patch)
    theirs = cases.make(tmp_path, kind="gemma3", **change)
    model, params = cases.ours(tmp_path)
    expected = cases.theirs(theirs, *own[0])
    arrays, images, places = rows_for(own, merge, 2 * side**2, length=64)
    np.testing.assert_allclose(np.asarray(cases.logits(model, params, arrays, images))[places[0]], expected, atol=2 * LIMIT)
    assert expected.shape != want[0].shape or np.abs(expected - want[0]).max() > 50 * LIMIT


REFUSED = [({"vision": {"vision_use_head": True}}, "vision_use_head=True"), ({"vision": {"attention_dropout": 0.1}}, "attention_dropout=0.1"),
           ({"vision": {"image_size": 30}}, "image_size=30"), ({"mm_tokens_per_image": 5}, "mm_tokens_per_image=5"),
           ({"mm_tokens_per_image": 9}, "mm_tokens_per_image=9"), ({"vision": {"image_size": [32, 32]}}, "image_size"),
           ({"vision": {"num_channels": 1}}, "num_channels=1"), ({"vision": {"num_attention_heads": 5}}, "num_heads=5"),
           ({"vision": {"window_size": 4}}, "window_size"), ({"vision": {"hidden_act": "relu"}}, "hidden_act='relu'"),
           ({"text": {"model_type": "gemma2"}}, "model_type is gemma3_text"), ({"text": {"use_bidirectional_attention": True}}, "use_bidirectional"),
           ({"text": {"final_logit_softcapping": 0.3}}, "final_logit_softcapping=0.3")]


@pytest.mark.parametrize("change, message", REFUSED, ids=[message for _, message in REFUSED])
def test_other_functions_are_refused(tmp_path, change, message):
    (tmp_path / "config.json").write_text(json.dumps(cases.config(kind="gemma3", **change)))
    with pytest.raises(ConfigError, match=message):
        build(hf.load_config(str(tmp_path), images=True), compute_dtype=jnp.float32, scan_layers=False)


# -- the mask --------------------------------------------------------------------------------------------------------


def test_reach():
    assert reach_positions(11, [1, 6], [(4, 4), (4, 4)], 2).tolist() == [0, 4, 4, 4, 4, 5, 9, 9, 9, 9, 10]


def test_the_tokens_of_an_image_see_each_other(folder, want):
    """Read causally the logits are others, in the layers with a window and in those without; text before the first
    image is the same to the bit."""
    model, params = cases.ours(folder[0])
    arrays, images, places = rows_for(sequences()[:1])
    causal = images.replace(reach=arrays[1])
    both = np.asarray(cases.logits(model, params, arrays, images))[places[0]]
    one = np.asarray(cases.logits(model, params, arrays, causal))[places[0]]
    assert np.array_equal(both[:5], one[:5])
    assert np.abs(one - want[0])[5:].max() > 1e-2 and np.abs(one - want[0])[5:9].max(-1).min() > 1e-3


@pytest.mark.full
@pytest.mark.parametrize("pattern", [1, 9], ids=["full", "sliding"])
def test_the_mask_of_each_kind_of_layer(tmp_path, pattern):
    """All layers without a window, and all with one: transformers' logits, which the causal mask does not give."""
    theirs = cases.make(tmp_path, kind="gemma3", text={"sliding_window_pattern": pattern})
    model, params = cases.ours(tmp_path)
    own = sequences()[:1]
    expected = cases.theirs(theirs, *own[0])
    arrays, images, places = rows_for(own)
    for implementation in ("reference", "blockwise"):
        of = build(hf.load_config(str(tmp_path), images=True), compute_dtype=jnp.float32, scan_layers=False, attention=implementation)
        np.testing.assert_allclose(np.asarray(cases.logits(of, params, arrays, images))[places[0]], expected, atol=LIMIT)
    causal = np.asarray(cases.logits(model, params, arrays, images.replace(reach=arrays[1])))[places[0]]
    assert np.abs(causal - expected).max() > 1e-2


# -- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_packed_sequence_is_the_sequence_alone(folder):
    """float64: log-probabilities and gradients of packed rows are the sums of those of each sequence alone."""
    with jax.enable_x64(True):
        model, params = cases.ours(folder[0], dtype=jnp.float64)
        own = sequences(PIECES[::3])
        packed = value_and_gradients(model, params, *rows_for(own, rows=[0, 0], room=256)[:2])
        alone = [value_and_gradients(model, params, *rows_for([one])[:2]) for one in own]
        assert abs(packed[0] - sum(value for value, _ in alone)) < 1e-12 * abs(packed[0])
        for got, *parts in zip(*map(jax.tree.leaves, (packed[1], *(g for _, g in alone))), strict=True):
            np.testing.assert_allclose(got, sum(parts), rtol=0, atol=1e-11 * (1 + np.abs(got).max()))


def test_an_image_is_seen_by_its_sequence_alone(folder):
    """Other pixels of one image move its tokens and every later one of its sequence, and no other sequence of its row by
    a bit."""
    model, params = cases.ours(folder[0])
    arrays, images, places = rows_for(sequences(), rows=[0, 0, 1, 1])
    before = np.asarray(cases.logits(model, params, arrays, images))
    patches = images.patches.copy()
    patches[0, :64] ^= 0x3F  # the first image of the first sequence
    after = np.asarray(cases.logits(model, params, arrays, images.replace(patches=patches)))
    (row, columns), others = places[0], places[1:]
    assert np.abs(after - before)[row, columns[5:]].max(-1).min() > 1e-5 and np.array_equal(after[row, columns[:5]], before[row, columns[:5]])
    for place in others:
        assert np.array_equal(after[place], before[place])


@pytest.mark.full
def test_text_of_a_model_with_a_tower_is_the_text_models(folder):
    """To the bit, with rows of text beside rows of images too."""
    model, params = cases.ours(folder[0])
    text, text_params = model_cases.ours(str(folder[0]), scan_layers=False)
    assert text.config.vision is None and "vision" not in text_params
    arrays, images, places = rows_for(sequences())
    alone = np.asarray(cases.logits(text, text_params, tuple(a[1:2] for a in arrays), None))[0, :9]
    assert np.array_equal(alone, np.asarray(cases.logits(model, params, tuple(a[1:2] for a in arrays), None))[0, :9])
    np.testing.assert_allclose(alone, np.asarray(cases.logits(model, params, arrays, images))[places[1]], atol=LIMIT)


# -- folders ---------------------------------------------------------------------------------------------------------


def content(path):
    return {name: (t.dtype, t.shape, t.read().tobytes()) for name, t in tensorfile.list_folder(path).items()}


LAYOUTS = {  # transformers 5 writes the first, the hub has the second, transformers keeps the third to itself
    "saved": lambda name: name,
    "published": lambda name: name.replace("vision_tower.", "vision_tower.vision_model."),
    "own": lambda name: ("lm_head.weight" if "lm_head" in name else "model." + name.replace("language_model.model.", "language_model.")),
    "before 5": lambda name: LAYOUTS["own"](LAYOUTS["published"](name)),
}


@first_cases(2, "layout, dtype, images", [("published", "bfloat16", True), ("own", "float32", True), ("saved", "float32", True),
                                          ("before 5", "float32", True), ("published", "bfloat16", False), ("own", "bfloat16", False)])
def test_export_is_the_folder_that_was_read(tmp_path, layout, dtype, images):
    """In every layout, with the tower read and with it copied, stacked and not; config and processor files are the source's."""
    source, written = tmp_path / "in", tmp_path / "out"
    cases.make(source, dtype, kind="gemma3")
    (source / "preprocessor_config.json").write_text('{"size": {"height": 32, "width": 32}}')
    stored = tensorfile.list_folder(source)
    tensorfile.write_folder(source, [tensorfile.Planned(LAYOUTS[layout](n), tensorfile.DTYPES[t.dtype], t.shape, lambda a=np.array(t.read()): a)
                                     for n, t in stored.items()], 1e9)
    given = hf.load_config(str(source), images=images)
    for scan_layers in (False, True):
        model = build(given, compute_dtype=jnp.float32, scan_layers=scan_layers)
        assert (model.config.vision is None) != images
        hf.export(model, hf.load_params(model, str(source)), written, given)
        assert content(written) == content(source)
    one, two = (json.loads((path / "config.json").read_text()) for path in (source, written))
    assert {k: v for k, v in two.items() if k != "text_config"} == {k: v for k, v in one.items() if k != "text_config"}
    assert all(two["text_config"][k] == v for k, v in one["text_config"].items() if k not in ("dtype", "tie_word_embeddings"))
    assert json.loads((written / "preprocessor_config.json").read_text()) == {"size": {"height": 32, "width": 32}}


@pytest.mark.full
def test_transformers_opens_an_export_of_a_random_model(tmp_path):
    """A model made from model.config alone, its tower drawn as its decoder is: the same logits there."""
    from transformers import AutoModelForImageTextToText
    given = hf.load_config("", overrides=cases.config(kind="gemma3"), images=True)
    model = build(given, compute_dtype=jnp.float32, scan_layers=True)
    params = jax.jit(model.init)(jax.random.key(0))
    std = {k: float(jnp.std(params["vision"][k[0]][k[1]])) for k in (("patch", "kernel"), ("positions", "embedding"))}
    assert all(0.15 < value < 0.25 for value in std.values()), std
    assert not params["vision"]["merger"]["soft_norm"]["scale"].any() and params["vision"]["merger"]["norm"]["scale"].all()
    hf.export(model, params, tmp_path, given)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager").eval()
    own = sequences()[:1]
    arrays, images, places = rows_for(own)
    np.testing.assert_allclose(np.asarray(cases.logits(model, params, arrays, images))[places[0]], cases.theirs(theirs, *own[0]), atol=2 * LIMIT)


@pytest.mark.full
def test_flops_match_the_compiled_tower():
    """The formula is XLA's count for one image, up to the elementwise part and the learned positions."""
    large = {"num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 1024}
    model = build(hf.load_config("", overrides=cases.config(vision=large, kind="gemma3"), images=True), compute_dtype=jnp.float32,
                  scan_layers=False, attention="reference")
    params = jax.eval_shape(model.init, jax.random.key(0))
    images = image_rows([Placed(0, np.arange(4), GRID, np.zeros((64, 48), np.uint8))], np.zeros((1, 4), np.int32), 64, 4, 48)
    run = jax.jit(lambda p, images: tower.see(model, p, images)[:2]).lower(params, images).compile()
    whole = model.config.vision.pair_flops(GRID)
    assert run.cost_analysis()["flops"] == pytest.approx(64 * model.flops_per_patch + whole, rel=0.03)


@pytest.mark.nightly  # other towers on meshes: test_vision_meshes.py
def test_meshes_compute_what_one_device_does(folder):
    """Rows over dp and fsdp, tokens over cp (gathered, and in a ring), heads over tp; some devices have no image."""
    tests = Path(__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    done = subprocess.run([sys.executable, str(tests / "helpers" / "sharded_gemma.py"), str(folder[0])], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 4 and all(logits < LIMIT and gradients < 3e-5 for logits, gradients in found), found
