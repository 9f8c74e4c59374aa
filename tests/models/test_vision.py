"""Towers and their decoders against transformers' models: logits and gradients, packed and alone, folders in and out."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import model_cases
from helpers import vision_cases as cases
from helpers.tiers import first_cases, nightly
from helpers.vision_cases import PIECES, rows_for, sequences, value_and_gradients

from jaxrl.errors import ConfigError
from jaxrl.models import build, rope
from jaxrl.models.io import hf, tensorfile
from jaxrl.models.vision import tower
from jaxrl.models.vision.positions import Placed, image_rows, patch_places, rotary_positions, window_order

pytestmark = pytest.mark.torch
LIMIT = 1e-5  # of logits up to 5 in fp32


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """(folder, transformers' model) of a kind."""
    def make(kind):
        path = tmp_path_factory.mktemp(kind)
        return path, cases.make(path, kind=kind)

    return functools.cache(make)


@pytest.fixture(scope="module")
def want_of(folder_of):
    return functools.cache(lambda kind: [cases.theirs(folder_of(kind)[1], *own) for own in sequences()])


@pytest.fixture(scope="module")
def folder(folder_of):
    return folder_of("qwen3_vl")


@pytest.fixture(scope="module")
def want(want_of):
    return want_of("qwen3_vl")


@first_cases(1, "kind, scan_layers", [("qwen3_vl", True), ("qwen2_5_vl", True), ("qwen2_vl", True), ("qwen3_vl", False),
                                       ("qwen3_vl_moe", True), nightly("qwen2_5_vl", False), nightly("qwen3_vl_moe", False)])
def test_logits_equal_transformers(folder_of, want_of, kind, scan_layers):
    """0, 1 and 2 images in a row of their own, and several sequences with images packed into one row."""
    model, params = cases.ours(folder_of(kind)[0], scan_layers)
    for into in (None, [0, 0, 1, 1]):
        arrays, images, places = rows_for(model, sequences(), rows=into)
        got = np.asarray(cases.logits(model, params, arrays, images))
        for expected, place in zip(want_of(kind), places, strict=True):
            np.testing.assert_allclose(got[place], expected, atol=LIMIT)


@pytest.mark.full  # of the other kinds in test_vision_float64
@first_cases(2, "kind, scan_layers, remat", [("qwen3_vl", True, "full"), ("qwen2_5_vl", False, "dots"), ("qwen2_5_vl", True, "full"),
                                             ("qwen2_vl", True, "none"), ("qwen3_vl", False, "none"), ("qwen3_vl", True, "dots"),
                                             ("qwen3_vl_moe", True, "none")], full=0)
def test_gradients_equal_transformers(folder_of, tmp_path, kind, scan_layers, remat):
    """Of every parameter of tower, mergers, taps and decoder; each has some."""
    import torch
    path, theirs = folder_of(kind)
    theirs.zero_grad()
    for own in sequences():
        torch.log_softmax(cases.theirs(theirs, *own, grad=True), -1).sin().sum().backward()
    stored = {name: weight.grad.numpy() for name, weight in theirs.named_parameters()}
    model, params = cases.ours(path, scan_layers, remat=remat)
    arrays, images, _ = rows_for(model, sequences(), rows=[0, 0, 1, 1])
    _, grads = value_and_gradients(model, params, arrays, images)
    hf.export(model, grads, tmp_path / "grads", hf.load_config(str(path), images=True))
    got = {name: t.read() for name, t in tensorfile.list_folder(tmp_path / "grads").items()}
    stored = {cases.stored_name(kind, name): gradient for name, gradient in stored.items()}
    assert got.keys() == stored.keys()
    for name, expected in stored.items():
        assert np.abs(expected).max() > 1e-3 or name.endswith(("k_proj.bias", "attn.qkv.bias")), name
        np.testing.assert_allclose(got[name], expected, rtol=0, atol=3e-5 * max(1, np.abs(expected).max()), err_msg=name)


TEXT = [{"rope_parameters": {**cases.TEXT["rope_parameters"], "mrope_section": [4, 1, 1]}}, {"attention_bias": True}, {"hidden_act": "gelu"},
        {"rope_parameters": {**cases.TEXT["rope_parameters"], "rope_theta": 90.0}}, {"rms_norm_eps": 0.5}, {"num_key_value_heads": 4}]
VISION = [{"deepstack_visual_indexes": [0, 3]}, {"deepstack_visual_indexes": [4]}, {"deepstack_visual_indexes": []}, {"hidden_act": "gelu"},
          {"num_position_embeddings": 9}, {"rope_parameters": {"rope_type": "axial", "rope_theta": 7.0}}, {"num_heads": 6}, {"depth": 4},
          {"patch_size": 2}, {"temporal_patch_size": 1}, {"intermediate_size": 7}, {"spatial_merge_size": 1}]
TEXT_2 = [{"rope_scaling": {**cases.ROPE, "mrope_section": [2, 1, 1]}}, {"rope_scaling": {**cases.ROPE, "rope_theta": 90.0}},
          {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
          {"rope_scaling": {**cases.ROPE, "rope_type": "linear", "type": "linear", "factor": 3.0}}, {"num_hidden_layers": 2}]
TEXT_BOTH = [{"hidden_act": "gelu"}, {"rms_norm_eps": 0.5}, {"num_key_value_heads": 4}]  # in TEXT, too
TOWER_2_5 = [{"window_size": 8}, {"window_size": 32}, {"fullatt_block_indexes": [0]}, {"fullatt_block_indexes": []}]
TOWER_BOTH = [{"hidden_act": "gelu"}, {"depth": 4}, {"intermediate_size": 7}, {"rope_parameters": {"rope_type": "axial", "rope_theta": 7.0}},
              {"num_heads": 6}, {"temporal_patch_size": 1}, {"spatial_merge_size": 1}, {"patch_size": 2}]  # in VISION, too
TOWER_2 = [{"mlp_ratio": 2}, {"embed_dim": 12}]
TOWER_2_BOTH = [{"hidden_act": "gelu"}, {"num_heads": 2}, {"depth": 4}, {"spatial_merge_size": 1}]
TEXT_MOE = [{"num_experts": 4}, {"num_experts_per_tok": 3}, {"moe_intermediate_size": 8}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}]
FIELDS = [({"vision": VISION[0]}, "qwen3_vl"), ({"text": TEXT[0]}, "qwen3_vl"), ({"vision": TOWER_2_5[0]}, "qwen2_5_vl"),
          ({"text": TEXT_2[0]}, "qwen2_5_vl"), *(({"vision": v}, "qwen3_vl") for v in VISION[1:]), *(({"text": t}, "qwen3_vl") for t in TEXT[1:]),
          *(({"vision": v}, "qwen2_5_vl") for v in TOWER_2_5[1:]), *(({"text": t}, "qwen2_5_vl") for t in TEXT_2[1:]),
          *(nightly({"vision": v}, "qwen2_5_vl") for v in TOWER_BOTH), *(nightly({"text": t}, "qwen2_5_vl") for t in TEXT_BOTH),
          *(({"vision": v}, "qwen2_vl") for v in TOWER_2), *(nightly({"vision": v}, "qwen2_vl") for v in TOWER_2_BOTH),
          *(({"text": t}, "qwen3_vl_moe") for t in TEXT_MOE), nightly({"vision": VISION[1]}, "qwen3_vl_moe"),
          ({"tie_word_embeddings": True}, "qwen3_vl"),
          *(nightly({"tie_word_embeddings": True}, kind) for kind in ("qwen3_vl_moe", "qwen2_5_vl", "qwen2_vl"))]


@pytest.mark.full
@first_cases(4, "change, kind", FIELDS, ids=json.dumps)
def test_every_field_is_read(tmp_path, want_of, change, kind):
    """With the field flipped our logits are transformers' again, and differ from those before."""
    vision, want = change.get("vision", {}), want_of(kind)
    own = sequences(vision.get("spatial_merge_size", 2), vision.get("patch_size", 4), PIECES[:1])
    theirs = cases.make(tmp_path, kind=kind, **change)
    model, params = cases.ours(tmp_path)
    expected = cases.theirs(theirs, *own[0], frames=vision.get("temporal_patch_size", 2))
    arrays, images, places = rows_for(model, own)
    np.testing.assert_allclose(np.asarray(cases.logits(model, params, arrays, images))[places[0]], expected, atol=2 * LIMIT)
    assert expected.shape != want[0].shape or np.abs(expected - want[0]).max() > 50 * LIMIT


REFUSED = [({"vision": {"num_position_embeddings": 24}}, "num_position_embeddings=24"), ({"vision": {"out_hidden_size": 16}}, "out_hidden_size=16"),
           ({"vision": {"deepstack_visual_indexes": [3, 1]}}, "deepstack_visual_indexes"), ({"vision": {"deepstack_visual_indexes": [5]}}, "deepst"),
           ({"vision": {"deepstack_visual_indexes": [0, 1, 2, 3]}}, "at most as many"), ({"vision": {"in_channels": 1}}, "in_channels=1"),
           ({"vision": {"num_heads": 4}}, "num_heads=4"), ({"vision": {"hidden_act": "relu"}}, "hidden_act='relu'"),
           ({"vision": {"window_size": 112}}, "window_size"), ({"vision": {"patch_size": [4, 4]}}, "patch_size"),
           ({"vision": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_parameters"),
           ({"text": {"rope_parameters": {"mrope_section": [2, 2, 3]}}}, "mrope_section"),
           ({"text": {"rope_parameters": {"mrope_section": [2, 2, 2], "mrope_interleaved": False}}}, "mrope_interleaved=False"),
           *(({"kind": "qwen2_5_vl", **change}, message) for change, message in (
               ({"vision": {"window_size": 4}}, "window_size=4"), ({"vision": {"fullatt_block_indexes": 7}}, "fullatt_block_indexes=7"),
               ({"vision": {"num_position_embeddings": 25}}, "num_position_embeddings"), ({"vision": {"in_chans": 1}}, "in_chans=1"),
               ({"vision": {"out_hidden_size": 16}}, "out_hidden_size=16"), ({"text": {"head_dim": 12}}, "head_dim=12"),
               ({"text": {"rope_scaling": {**cases.ROPE, "mrope_section": [2, 2, 2]}}}, "mrope_section"),
               ({"text": {"rope_scaling": {**cases.ROPE, "mrope_interleaved": True}}}, "mrope_interleaved=True"))),
           ({"kind": "qwen3_vl_moe", "text": {"norm_topk_prob": False}}, "norm_topk_prob=False"),
           *(({"kind": "qwen2_vl", **change}, message) for change, message in (
               ({"vision": {"hidden_size": 16}}, "hidden_size=16"), ({"vision": {"mlp_ratio": 0.5}}, "mlp_ratio=0.5"),
               ({"vision": {"window_size": 16}}, "window_size")))]


@pytest.mark.parametrize("change, message", REFUSED, ids=[message for _, message in REFUSED])
def test_other_functions_are_refused(tmp_path, change, message):
    (tmp_path / "config.json").write_text(json.dumps(cases.config(**change)))
    with pytest.raises(ConfigError, match=message.replace("[", "\\[")):
        build(hf.load_config(str(tmp_path), images=True), compute_dtype=jnp.float32, scan_layers=False)


# -- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
@first_cases(2, "kind", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl_moe"], full=0)
def test_a_packed_sequence_is_the_sequence_alone(folder_of, kind):
    """float64: log-probabilities and gradients of packed rows are the sums of those of each sequence alone."""
    with jax.enable_x64(True):
        model, params = cases.ours(folder_of(kind)[0], dtype=jnp.float64)
        own = sequences(pieces=PIECES[::3])
        arrays, images, _ = rows_for(model, own, rows=[0, 0])
        packed = value_and_gradients(model, params, arrays, images)
        alone = []
        for one in own:
            arrays, images, _ = rows_for(model, [one])
            alone.append(value_and_gradients(model, params, arrays, images))
        assert abs(packed[0] - sum(value for value, _ in alone)) < 1e-12 * abs(packed[0])
        for got, *parts in zip(*map(jax.tree.leaves, (packed[1], *(g for _, g in alone))), strict=True):
            np.testing.assert_allclose(got, sum(parts), rtol=0, atol=1e-11 * (1 + np.abs(got).max()))


@first_cases(1, "kind", ["qwen2_5_vl", "qwen3_vl", "qwen2_vl"], full=1)
def test_an_image_is_seen_by_its_sequence_alone(folder_of, kind):
    """Other pixels of one image move every later token of its sequence, and no other sequence of its row by a bit."""
    model, params = cases.ours(folder_of(kind)[0])
    arrays, images, places = rows_for(model, sequences(), rows=[0, 0, 1, 1])
    before = np.asarray(cases.logits(model, params, arrays, images))
    patches = images.patches.copy()
    patches[0, :24] ^= 0x3F  # the first image of the first sequence
    after = np.asarray(cases.logits(model, params, arrays, images.replace(patches=patches)))
    (row, columns), others = places[0], places[1:]
    assert np.abs(after - before)[row, columns[5:]].max(-1).min() > 1e-4 and np.array_equal(after[row, columns[:5]], before[row, columns[:5]])
    for place in others:
        assert np.array_equal(after[place], before[place])


def test_each_tap_counts(folder, want):
    """Without its features the logits are others."""
    model, params = cases.ours(folder[0])
    arrays, images, places = cases.rows(sequences()[:1])
    for name in ("tap_0", "tap_1"):
        less = {**params, "vision": {**params["vision"], name: jax.tree.map(jnp.zeros_like, params["vision"][name])}}
        assert np.abs(np.asarray(cases.logits(model, less, arrays, images))[places[0]] - want[0]).max() > 1e-2


@pytest.mark.full
def test_the_image_token_of_a_text_is_text(folder):
    """An id that a policy sampled or a user wrote is no image: transformers refuses such ids, here it is a word."""
    model, params = cases.ours(folder[0])
    arrays, images, places = cases.rows(sequences())
    arrays[0][1, 4] = cases.PAD
    one = np.asarray(cases.logits(model, params, arrays, images))[places[1]]
    two = np.asarray(cases.logits(model, params, tuple(a[1:2] for a in arrays), None))[0, :9]
    np.testing.assert_allclose(one, two, atol=LIMIT)


@first_cases(1, "kind", ["qwen2_5_vl", "qwen3_vl", "qwen2_vl"])
def test_rotary_positions_equal_transformers(folder_of, kind):
    import torch
    _, theirs = folder_of(kind)
    for i, pieces in enumerate([*PIECES, [(2, 2), 1], [1, (6, 10), 1, (2, 2), 1, (4, 2), 7]]):
        ids, firsts, grids = cases.sequence(i, pieces)
        kinds = torch.tensor((ids == cases.PAD).astype(int))[None]
        grid = torch.tensor([(1, *g) for g in grids]) if grids else None
        expected, delta = theirs.model.get_rope_index(torch.tensor(ids)[None], kinds, grid)
        got = rotary_positions(len(ids), firsts, grids, 2)
        assert np.array_equal(got, expected[:, 0].T) and got.max() + 1 - len(ids) == int(delta)
    assert patch_places((4, 4), 2)[:6].tolist() == [[0, 0, 4, 4], [0, 1, 4, 4], [1, 0, 4, 4], [1, 1, 4, 4], [0, 2, 4, 4], [0, 3, 4, 4]]


def test_windows_equal_transformers():
    """Order and sizes, of windows that fit and of those that the border cuts."""
    import torch
    from transformers.vision_utils import get_vision_window_index
    for grid in [(2, 2), (8, 8), (8, 12), (10, 6), (22, 4), (4, 34)]:
        index, ends = get_vision_window_index(torch.tensor([(1, *grid)]), spatial_merge_size=2, window_size=48, patch_size=8)
        order, numbers = window_order(grid, 2, 3)
        assert order.tolist() == index.tolist() and np.array_equal(np.diff(ends.numpy()), 4 * np.bincount(numbers))


@pytest.mark.parametrize("kind, lengths", [("qwen2_5_vl", [5]), ("qwen3_vl", [2, 2, 1])])
def test_layers_are_as_few_loops_as_taps_allow(kind, lengths):
    """A compiler takes its time for each: layers with windows and those without are one (which of them is which:
    test_logits_equal_transformers)."""
    model = build(hf.load_config("", overrides=cases.config(kind=kind), images=True), compute_dtype=jnp.float32, scan_layers=True,
                  attention="reference")
    params, (_, images, _) = jax.eval_shape(model.init, jax.random.key(0)), rows_for(model, sequences())
    traced = jax.make_jaxpr(lambda params: tower.see(model, params, images)[:2])(params).eqns
    of_angles, *of_layers = (one.params["length"] for one in traced if one.primitive.name == "scan")
    assert of_angles == 2 and of_layers == lengths


@pytest.mark.parametrize("size", [12, 6])
def test_equal_positions_are_one_position(size):
    """To the bit, where the loop over halves serves and where it does not."""
    at = np.arange(40, dtype=np.int32)[None] * 37
    own = rope.Rope(theta=700.0, axes=tuple(i % 3 for i in range(size // 2)))
    for one, three in zip(*(jax.jit(rope.rotations, static_argnums=(0, 1, 3))(own, size, positions, jnp.float32)
                            for positions in (at, np.stack([at] * 3, -1))), strict=True):
        assert np.array_equal(one, three)


@pytest.mark.full
@first_cases(2, "kind", ["qwen2_5_vl", "qwen3_vl", "qwen2_vl"], full=0)
def test_text_of_a_model_with_a_tower_is_the_text_models(folder_of, kind):
    """To the bit, with rows of text beside rows of images too."""
    path, _ = folder_of(kind)
    model, params = cases.ours(path, scan_layers=False)
    text, text_params = model_cases.ours(str(path), scan_layers=False)
    assert text.config.vision is None and "vision" not in text_params
    arrays, images, places = rows_for(model, sequences())
    alone = np.asarray(cases.logits(text, text_params, tuple(a[1:2] for a in arrays), None))[0, :9]
    assert np.array_equal(alone, np.asarray(cases.logits(model, params, tuple(a[1:2] for a in arrays), None))[0, :9])
    np.testing.assert_allclose(alone, np.asarray(cases.logits(model, params, arrays, images))[places[1]], atol=LIMIT)
    case = model_cases.batch()[0]
    assert np.array_equal(model_cases.forward(text, text_params, *case), model_cases.forward(model, params, *case))


# -- folders ---------------------------------------------------------------------------------------------------------


def content(path):
    return {name: (t.dtype, t.shape, t.read().tobytes()) for name, t in tensorfile.list_folder(path).items()}


def published(folder):
    """Makes a folder's config.json as Qwen2.5-VL is published: the fields of the text part beside the others."""
    given = json.loads((folder / "config.json").read_text())
    text = {k: v for k, v in given.pop("text_config").items() if k not in ("model_type", "dtype", "tie_word_embeddings")}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": cases.ROPE["mrope_section"]}
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    given["vision_config"] |= {"in_chans": 3, "spatial_patch_size": 4, "model_type": given["model_type"]}
    (folder / "config.json").write_text(json.dumps({**given, **text}))


@first_cases(2, "kind, dtype, flat, images", [
    ("qwen3_vl", "bfloat16", False, True), ("qwen2_5_vl", "bfloat16", True, True), ("qwen3_vl", "bfloat16", True, False),
    ("qwen2_5_vl", "float32", False, False), ("qwen2_vl", "bfloat16", True, True), ("qwen3_vl_moe", "bfloat16", False, True),
    ("qwen3_vl", "bfloat16", True, True), ("qwen3_vl", "float32", False, False), ("qwen2_5_vl", "bfloat16", False, True),
    ("qwen2_5_vl", "bfloat16", True, False)], full=4)
def test_export_is_the_folder_that_was_read(tmp_path, kind, dtype, flat, images):
    """In both layouts, with the tower read and with it copied, stacked and not; config and processor files are the source's."""
    source, written = tmp_path / "in", tmp_path / "out"
    cases.make(source, dtype, kind=kind)
    (source / "preprocessor_config.json").write_text('{"patch_size": 4, "min_pixels": 64}')
    written_flat = kind.startswith("qwen2")  # by transformers
    if flat != written_flat:
        long = [("model.", "model.language_model."), ("visual.", "model.visual.")]
        back = lambda n: next((b + n.removeprefix(a) for a, b in long if n.startswith(a)), n)  # noqa: E731
        names = {n: n.replace("model.language_model.", "model.").replace("model.visual.", "visual.") if flat else back(n) for n in content(source)}
        stored = tensorfile.list_folder(source)
        planned = [tensorfile.Planned(names[n], tensorfile.DTYPES[t.dtype], t.shape, lambda a=np.array(t.read()): a) for n, t in stored.items()]
        tensorfile.write_folder(source, planned, 1e9)
    if flat and written_flat:
        published(source)
    given = hf.load_config(str(source), images=images)
    for scan_layers in (False, True):
        model = build(given, compute_dtype=jnp.float32, scan_layers=scan_layers)
        assert (model.config.vision is None) != images
        hf.export(model, hf.load_params(model, str(source)), written, given)
        assert content(written) == content(source)
    one, two = (json.loads((path / "config.json").read_text()) for path in (source, written))
    assert {k: v for k, v in two.items() if k != "text_config"} == {k: v for k, v in one.items() if k != "text_config"}
    assert all(two["text_config"][k] == v for k, v in one.get("text_config", {}).items()
               if k not in ("dtype", "tie_word_embeddings"))
    assert ("text_config" in two) == ("text_config" in one) == (not flat or not written_flat)
    assert json.loads((written / "preprocessor_config.json").read_text()) == {"patch_size": 4, "min_pixels": 64}


def test_experts_lie_transposed_on_a_disk(tmp_path, folder_of):
    """As Qwen3-VL-30B-A3B was published: the same parameters, and an export has the layout of its source."""
    source, _ = folder_of("qwen3_vl_moe")
    shutil.copytree(source, tmp_path / "in")
    stored = {n: np.array(t.read()) for n, t in tensorfile.list_folder(source).items()}
    across = {n: np.ascontiguousarray(x.swapaxes(1, 2)) if ".experts." in n else x for n, x in stored.items()}
    tensorfile.write_folder(tmp_path / "in", [tensorfile.Planned(n, x.dtype, x.shape, lambda x=x: x) for n, x in across.items()], 1e9)
    (_, one), (model, two) = cases.ours(source), cases.ours(tmp_path / "in")
    jax.tree.map(np.testing.assert_array_equal, one, two)
    hf.export(model, two, tmp_path / "out", hf.load_config(str(tmp_path / "in"), images=True))
    assert content(tmp_path / "out") == content(tmp_path / "in") != content(source)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("share", [1, 2])  # the hidden size is an expert's width, or that of its gate and up
def test_square_experts_are_read_as_they_lie(tmp_path, share, transposed):
    """One of a layer's two tensors has the same shape in both layouts; the other tells."""
    size = cases.KINDS["qwen3_vl_moe"][0]["hidden_size"] // share
    given = hf.load_config("", overrides=cases.config(kind="qwen3_vl_moe", text={"moe_intermediate_size": size}), images=True)
    model = build(given, compute_dtype=jnp.float32, scan_layers=True)
    params = jax.jit(model.init)(jax.random.key(0))
    hf.export(model, params, tmp_path, given)  # transposed
    if not transposed:
        stored = {n: np.array(t.read()) for n, t in tensorfile.list_folder(tmp_path).items()}
        turned = {n: np.ascontiguousarray(x.swapaxes(1, 2)) if ".experts." in n else x for n, x in stored.items()}
        tensorfile.write_folder(tmp_path, [tensorfile.Planned(n, x.dtype, x.shape, lambda x=x: x) for n, x in turned.items()], 1e9)
    (first, *_) = (t.shape for n, t in tensorfile.list_folder(tmp_path).items() if n.endswith("down_proj"))
    assert first[1:] == ((size, size * share) if transposed else (size * share, size))
    read, two = cases.ours(tmp_path, scan_layers=True)
    jax.tree.map(np.testing.assert_array_equal, params, two)
    hf.export(read, two, tmp_path / "out", hf.load_config(str(tmp_path), images=True))
    assert content(tmp_path / "out") == content(tmp_path)


@pytest.mark.parametrize("kind, tower", [("qwen3_vl", 0.5), ("gemma3", 0.2)])
def test_a_random_tower_has_its_own_spread(kind, tower):
    """initializer_range of vision_config where the tower's kind has it, as in transformers; SigLIP's has none, and takes the decoder's."""
    given = cases.config(kind=kind, vision={"initializer_range": tower} if kind == "qwen3_vl" else {})
    model = build(hf.load_config("", overrides=given, images=True), compute_dtype=jnp.float32, scan_layers=True)
    params = jax.jit(model.init)(jax.random.key(0))
    drawn = [e for e in model.entries if e.row.init == "normal"]
    for own, std in ((True, tower), (False, 0.2)):
        values = np.concatenate([np.asarray(e.of(params)).ravel() for e in drawn if (e.path[0] == "vision") == own])
        assert values.size > 1000 and abs(values.std() / std - 1) < 0.05


@pytest.mark.full
@first_cases(2, "kind", ["qwen2_5_vl", "qwen3_vl_moe", "qwen3_vl", "qwen2_vl"], full=0)
def test_transformers_opens_an_export_of_a_random_model(tmp_path, kind):
    """A model made from model.config alone, its tower drawn as its decoder is: the same logits there."""
    from transformers import AutoModelForImageTextToText
    given = hf.load_config("", overrides=cases.config(kind=kind), images=True)
    model = build(given, compute_dtype=jnp.float32, scan_layers=True)
    params = jax.jit(model.init)(jax.random.key(0))
    std = {k: float(jnp.std(params["vision"][k[0]][k[1]])) for k in (("patch", "kernel"), ("positions", "embedding")) if k[0] in params["vision"]}
    assert all(0.15 < value < 0.25 for value in std.values()), std
    hf.export(model, params, tmp_path, given)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager").eval()
    own = sequences()[:1]
    arrays, images, places = rows_for(model, own)
    np.testing.assert_allclose(np.asarray(cases.logits(model, params, arrays, images))[places[0]], cases.theirs(theirs, *own[0]), atol=2 * LIMIT)


def test_a_folder_without_its_tower_is_refused(tmp_path):
    cases.make(tmp_path)
    planned = [tensorfile.Planned(n, tensorfile.DTYPES[t.dtype], t.shape, lambda a=np.array(t.read()): a)
               for n, t in tensorfile.list_folder(tmp_path).items() if "merger.norm" not in n]
    tensorfile.write_folder(tmp_path, planned, 1e9)
    with pytest.raises(ConfigError, match="lacks 2 tensors: model.visual.merger.norm.bias"):
        cases.ours(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl"])
def test_flops_match_the_compiled_tower(kind):
    """The formula is XLA's count for one image, up to the elementwise part and the learned positions."""
    large = {"depth": 3, "num_heads": 4} | ({"embed_dim": 256, "mlp_ratio": 4} if kind == "qwen2_vl" else {
        "hidden_size": 256, "intermediate_size": 1024}) | ({"deepstack_visual_indexes": [1]} if kind == "qwen3_vl" else {})
    model = build(hf.load_config("", overrides=cases.config(vision=large, kind=kind), images=True), compute_dtype=jnp.float32,
                  scan_layers=False, attention="reference")
    tower_config, grid, params = model.config.vision, (8, 8), jax.eval_shape(model.init, jax.random.key(0))
    placed = [Placed(0, np.arange(16), grid, np.zeros((64, 48), np.uint8))]
    images = image_rows(placed, np.zeros((1, 16, 3), np.int32), 64, 2, 48, tower_config.window)
    run = jax.jit(lambda p, images: tower.see(model, p, images)[:2]).lower(params, images).compile()
    # the reference computes all pairs and hides those of other windows
    whole = dataclasses.replace(tower_config, window=0).pair_flops(grid)
    assert run.cost_analysis()["flops"] == pytest.approx(64 * model.flops_per_patch + whole, rel=0.03)
    assert tower_config.pair_flops(grid) == (whole if kind != "qwen2_5_vl" else whole * (1 + 2 / 4) / 3)
