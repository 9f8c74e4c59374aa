"""Prompts with images in the embedded sampler: its log-probs are those of the trainer's scoring with the same pictures."""

import dataclasses
import functools
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import vision_cases as cases
from helpers.rollout_helpers import config, random_params
from helpers.rollout_helpers import model as text_model
from helpers.tiers import first_cases

from jaxrl import training
from jaxrl.errors import ConfigError
from jaxrl.models import build, unstacked
from jaxrl.models.families import IMAGES
from jaxrl.models.io import hf
from jaxrl.models.vision.positions import rotary_positions, rotary_shift
from jaxrl.rollout import EngineContext, Request, SamplingParams, generate
from jaxrl.rollout.embedded import _empty_table
from jaxrl.rollout.embedded import make_engine as make_embedded
from jaxrl.rollout.engines import make_engine
from jaxrl.rollout.shapes import Shapes
from jaxrl.training.layout import RowShapes, make_layout
from jaxrl.types import Pictures, Trajectories

TIMEOUT, END, PATCHES, LONGEST = 120.0, 1, 48, 56
KINDS = {  # model_type -> what the tiny models of helpers.vision_cases have less of here
    "qwen3_vl": {"depth": 2, "deepstack_visual_indexes": [0]}, "qwen2_5_vl": {"depth": 2, "fullatt_block_indexes": [1]}, "qwen2_vl": {"depth": 2}}
KINDS["qwen3_vl_moe"] = KINDS["qwen3_vl"]
HF = {**cases.TEXT, "num_hidden_layers": 2, IMAGES: {**cases.VISION, **KINDS["qwen3_vl"]}}
PROMPTS = ([5], [3, (4, 4), 2], [2, (2, 2), 1, (2, 4), 1, (8, 2), 3])  # text and images by turns
SAMPLING = SamplingParams(max_new_tokens=7, min_new_tokens=4)


class Source:
    """Pictures by number: of a number's last digit the grid, of all of it the pixels."""

    def __init__(self):
        self.grids, self.read = {}, []

    def patches(self, numbers):
        self.read += numbers.tolist()
        return [cases.pixels(n, self.grids[n]) for n in numbers.tolist()]


SOURCE = Source()


@functools.cache
def built(kind="qwen3_vl", **options):
    described = hf.load_config("", overrides=cases.config({"num_hidden_layers": 2}, KINDS[kind], kind), images=True)
    return build(HF if kind == "qwen3_vl" else described, compute_dtype=jnp.float32, **{"scan_layers": False, **options})


@functools.cache
def weights(model):
    """Random ones, of which the image token (a marker that a policy may sample as text) gets logits of some size."""
    tree = random_params(model, 0, 0.15)
    tree["head"]["kernel"] = (3 * tree["head"]["kernel"]).at[:, cases.PAD].mul(2.0)
    return tree


def made(model=None, mesh=None, patches=PATCHES, longest=LONGEST, **rollout):
    cfg = config(**{"slots": 8, "prompt_lengths": (8, longest), "max_new_tokens": 24, "compaction": False, **rollout})
    cfg.data.max_prompt_tokens = longest
    model = model or built()
    engine = make_embedded(EngineContext(cfg, model, None, mesh, (END,), HF, patches))
    engine.publish(weights(model), 0)
    return engine


def prompt(pieces, seed=0, first=0):
    """(ids, Pictures) of text and images by turns; the images are number `first` and those after it."""
    ids, firsts, grids = cases.sequence(seed, pieces)
    if not grids:
        return ids, None
    numbers = first + np.arange(len(grids))
    SOURCE.grids |= dict(zip(numbers.tolist(), grids, strict=True))
    return ids, Pictures(np.zeros(len(grids), int), np.array(firsts), np.array(grids), numbers, 2, 48, SOURCE.patches)  # the trainer's has a window


def request(name, ids, pictures, seed=0, sampling=SAMPLING, **more):
    return Request(str(name), ids, sampling, seed, pictures=pictures, **more)


def groups(samples=3, first=0):
    """Groups of requests of PROMPTS; their pictures are number `first` + 10 * prompt and those after it."""
    return [request(f"{g}/{k}", *prompt(pieces, g, first + 10 * g), seed=10 * g + k)
            for g, pieces in enumerate(PROMPTS) for k in range(samples)]


@functools.cache
def _score(model):
    return training.make_score(model, temperature=1.0, chunk=512, put=lambda x: x)


def scored(pairs, shared=True, pictures=lambda q: q.pictures, model=None):
    """Log-probs of the completions by the trainer, [completion]."""
    model, sizes = model or built(), [len(q.prompt) for q, _ in pairs]
    tokens = [np.concatenate([q.prompt, r.tokens]) for q, r in pairs]
    offsets, rows = np.cumsum([0, *map(len, tokens)]), [pictures(q) for q, _ in pairs]
    own = [(i, p) for i, p in enumerate(rows) if p is not None]
    joined = None if not own else Pictures(np.repeat([i for i, _ in own], [len(p.firsts) for _, p in own]),
                                           *(np.concatenate([getattr(p, name) for _, p in own]) for name in ("firsts", "grids", "numbers")),
                                           2, 48, SOURCE.patches, model.config.vision.window)
    mask = np.concatenate([np.arange(len(t)) >= n for t, n in zip(tokens, sizes, strict=True)])
    names = [q.id.split("/")[0] for q, _ in pairs]
    n, total = len(pairs), int(offsets[-1])
    traj = Trajectories(np.concatenate(tokens), offsets, mask, np.zeros(total, np.float32), np.zeros(total, np.int32), np.array(sizes),
                        np.unique(names, return_inverse=True)[1], np.arange(n), np.zeros(n, np.uint32), np.zeros(n, np.int8), pictures=joined)
    layout = make_layout(traj.sizes, RowShapes((96,), ((4,),), patches=(96,)), share_prompts=shared)
    values = _score(model)(weights(model), traj, layout)
    return [values[a:b][mask[a:b]] for a, b in zip(offsets, offsets[1:], strict=False)]


def others(q):
    """The same places with other pictures."""
    if q.pictures is None:
        return None
    SOURCE.grids |= {n + 5000: SOURCE.grids[n] for n in q.pictures.numbers.tolist()}
    return q.pictures._replace(numbers=q.pictures.numbers + 5000)


def assert_scored(pairs, atol=2e-5, **options):
    for (_, r), own in zip(pairs, scored(pairs, **options), strict=True):
        np.testing.assert_allclose(r.logprobs, own, atol=atol, rtol=0)


def run(engine, requests):
    return list(zip(requests, generate(engine, requests, TIMEOUT), strict=True))


@pytest.mark.full
@first_cases(2, "kind", ["qwen2_5_vl", "qwen3_vl", "qwen2_vl", "qwen3_vl_moe"], full=0)
def test_log_probs_are_the_trainers(kind):
    """Of 0, 1 and 3 images of unlike shape with text behind them, in one batch and in groups; a group's prompt is read once."""
    model, SOURCE.read = built(kind), []
    engine = made(model)
    pairs = run(engine, groups())
    assert sorted(SOURCE.read) == [10, 20, 21, 22] and engine.counters()["prefilled_prompts"] == len(PROMPTS)
    assert_scored(pairs, model=model)
    sampled = np.concatenate([r.tokens for _, r in pairs])
    assert (sampled == cases.PAD).any() or kind != "qwen3_vl", "the image token that a policy samples is text"
    for (q, r), other in zip(pairs, scored(pairs, pictures=others, model=model), strict=True):
        assert (np.abs(r.logprobs - other).max() > 1e-3) == (q.pictures is not None)


@pytest.mark.full
def test_equal_words_with_other_pictures_share_nothing():
    """In one batch: the two groups have other log-probs, each those of its own pictures; text is what it is without images."""
    engine, pairs = made(slots=16), []
    asked = [dataclasses.replace(q, id=f"{side}{q.id}", pictures=others(q) if side else q.pictures) for side in ("", "x") for q in groups(2)]
    pairs = run(engine, asked)
    assert engine.counters()["prefilled_prompts"] == 5 and engine.counters()["prefill_calls"] == 2
    assert_scored(pairs)
    for (q, r), (_, s) in zip(pairs[:6], pairs[6:], strict=True):
        moved = np.abs(r.logprobs[0] - s.logprobs[0]) if r.tokens[0] == s.tokens[0] else 1.0
        assert (moved > 1e-3) == (q.pictures is not None)
    text = [request(f"t{i}", *prompt([4 + i], i), seed=i) for i in range(4)]
    plain = made(patches=0)
    for (_, r), (_, s) in zip(run(engine, text), run(plain, text), strict=True):
        np.testing.assert_array_equal(r.tokens, s.tokens)
        np.testing.assert_allclose(r.logprobs, s.logprobs, atol=1e-5)
    kinds = [{kind for kind, *_ in made_by._programs.compiled} for made_by in (engine, plain)]
    assert kinds[0] - kinds[1] == {"prefill_images"} and _empty_table(plain.shapes)[0].shift is None


@pytest.mark.full
def test_a_conversation_goes_on_behind_its_images():
    """In its slot (extend), after new weights have ended it (prefill), and not where the next turn shows another picture."""
    engine, asked = made(), [dataclasses.replace(q, keep=True) for q in groups(1)]
    pairs = run(engine, asked)

    def turn(k, pictures=lambda q: q.pictures):
        return [dataclasses.replace(q, id=f"{q.id}/{k}", after=q.id, pictures=pictures(q),
                                    prompt=np.concatenate([q.prompt, r.tokens, cases.sequence(50 + i, [3 + i])[0]]))
                for i, (q, r) in enumerate(pairs)]

    second = run(engine, turn(1))
    assert engine.counters()["extended_prompts"] == 3 and engine.counters()["prefilled_prompts"] == 3
    assert_scored(second)
    pairs = second
    third = run(engine, turn(2, others))
    assert engine.counters()["extended_prompts"] == 4 and engine.counters()["prefilled_prompts"] == 5
    assert_scored(third)
    pairs = third
    engine.publish(weights(built()), 1)
    assert_scored(run(engine, turn(3, others)))


def with_more(pictures, ids, pieces, seed, first):
    """(ids and then new pieces, the images of both); those of the pieces are number `first` and those after it."""
    new, more = prompt(pieces, seed, first)
    if more is None:
        return np.concatenate([ids, new]), pictures
    more = more._replace(firsts=more.firsts + len(ids))
    own = [p for p in (pictures, more) if p is not None]
    return np.concatenate([ids, new]), more._replace(
        sequences=np.zeros(sum(len(p.firsts) for p in own), int),
        **{name: np.concatenate([getattr(p, name) for p in own]) for name in ("firsts", "grids", "numbers")})


TURNS = [([2, (4, 4), 3], [1, (2, 2), 2], [5]), ([7], [1, (4, 6), 2, (2, 4), 1], [2, (2, 2), 1]), ([1, (8, 2), 1], [3], [4, (4, 4), 9])]


@pytest.mark.full
@first_cases(1, "kind", ["qwen2_5_vl", "qwen3_vl", "qwen2_vl", "qwen3_vl_moe"], full=1)
def test_turns_with_images_go_on_in_their_slot(kind, monkeypatch):
    """Text alone, an image in calls of 8 tokens, several and none: log-probs are the trainer's, and those of prompts that are prefilled
    whole; each image is read once; the tower runs in the smaller of its two rooms where that is enough."""
    model = built(kind)
    engine, whole = (made(model, patches=96, longest=80) for _ in range(2))
    monkeypatch.setattr(engine, "shapes", dataclasses.replace(engine.shapes, extend=(2, 8)))
    pairs = run(engine, [dataclasses.replace(q, keep=True) for q in groups(1)])
    for turn, new in enumerate(TURNS):
        SOURCE.read = []
        asked = []
        for i, (q, r) in enumerate(pairs):
            ids, pictures = with_more(q.pictures, np.concatenate([q.prompt, r.tokens]), new[i], 50 + 9 * turn + i, 1000 + 100 * turn + 10 * i)
            asked.append(dataclasses.replace(q, id=f"{i}/{turn}", after=q.id, prompt=ids, pictures=pictures))
        pairs = run(engine, asked)
        assert sorted(SOURCE.read) == [1000 + 100 * turn + 10 * i + k for i, n in enumerate(new) for k in range(sum(isinstance(p, tuple) for p in n))]
        assert_scored(pairs, model=model)
        for (_, r), (_, again) in zip(pairs, run(whole, [dataclasses.replace(q, after="", keep=False) for q in asked]), strict=True):
            np.testing.assert_array_equal(r.tokens, again.tokens)
            np.testing.assert_allclose(r.logprobs, again.logprobs, atol=1e-5)
    assert engine.counters()["extended_prompts"] == 9 and engine.counters()["prefilled_prompts"] == 3
    assert {key for key in engine._programs.compiled if key[0] == "encode"} == {("encode", n) for n in engine.shapes.turn_rooms(2)}
    for (_, r), other in zip(pairs, scored(pairs, pictures=others, model=model), strict=True):
        assert np.abs(r.logprobs - other).max() > 1e-3, "a picture of a turn is not looked at"


@pytest.mark.full
@pytest.mark.parametrize("scan", [False, True])
def test_a_sampler_of_gpus_has_a_tower_layer_by_layer(scan, monkeypatch):
    """The layout of weights that GPUs decode with: unstacked and joined, the tower too."""
    model, gpus = built(scan_layers=scan), SimpleNamespace(shape={"tp": 1}, devices=np.array([SimpleNamespace(platform="gpu")]))
    target = unstacked.for_decoding(model, gpus)
    monkeypatch.setattr(unstacked, "for_decoding", lambda *_: target)
    laid = unstacked.laid_out(model, target, weights(model))
    assert jax.tree.map(jnp.shape, laid) == target.tree(lambda entry: entry.shape)
    assert "query_key_value" in laid["vision"]["layer_1"]["attention"]
    assert_scored(run(made(model, decode_steps=5), groups(1)), model=model)


@pytest.mark.full
@pytest.mark.torch
@first_cases(2, "kind", ["qwen2_5_vl", "qwen3_vl", "qwen2_vl", "qwen3_vl_moe"], full=0)
def test_greedy_completions_are_those_of_transformers(tmp_path, kind):
    """32 tokens of generate, of prompts with 0, 1 and 3 images."""
    import torch

    theirs = cases.make(tmp_path, text={"num_hidden_layers": 2}, vision=KINDS[kind], kind=kind)
    model, params = cases.ours(tmp_path)
    engine = made(model, max_new_tokens=32)
    engine.publish(params, 1)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=32)
    for q, r in run(engine, [dataclasses.replace(q, sampling=greedy) for q in groups(1)]):
        values = {}
        if q.pictures is not None:
            flat = np.concatenate(SOURCE.patches(q.pictures.numbers)).reshape(-1, 3, 1, 16) / np.float32(255)
            flat = np.broadcast_to((flat - np.float32(0.5)) / np.float32(0.5), (len(flat), 3, 2, 16)).reshape(len(flat), -1)
            values = {"pixel_values": torch.tensor(flat, dtype=torch.float32),
                      "image_grid_thw": torch.tensor([(1, *grid) for grid in q.pictures.grids.tolist()]),
                      "mm_token_type_ids": torch.tensor((q.prompt == cases.PAD).astype(np.int64))[None]}
        ids = torch.tensor(q.prompt)[None].long()
        with torch.no_grad():
            out = theirs.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32, eos_token_id=END,
                                  pad_token_id=0, **values)[0, len(q.prompt):]
        assert out.tolist() == r.tokens.tolist()


SHARDED = """
    import jax, numpy as np
    jax.config.update("jax_default_matmul_precision", "highest")
    from test_prompt_images import built, config, groups, made, run, scored
    from jaxrl.sharding import make_mesh
    cfg = config()
    cfg.mesh.update({"dp": 2, "fsdp": 1, "tp": 2})
    pairs = run(made(mesh=make_mesh(cfg.mesh)), groups())
    print("RESULT", max(np.abs(r.logprobs - own).max() for (_, r), own in zip(pairs, scored(pairs), strict=True)))
"""


@pytest.mark.slow
def test_on_a_mesh_of_four_devices():
    """Prompts and their patches over dp, heads over tp: the log-probs are the trainer's of one device."""
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(SHARDED)], env=env, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-3000:]
    assert float(out.stdout.split("RESULT")[1]) < 2e-5


def test_what_is_refused():
    ids, pictures = prompt([3, (4, 4), 2])
    one = request("a", ids, pictures)
    with pytest.raises(ValueError, match="request 'a': the prompt has images, and this engine serves text only"):
        made(patches=0).submit([one])
    engine = made(patches=16)
    with pytest.raises(ValueError, match="request 'b': the prompt's images have 32 patches, at most 16 are served"):
        engine.submit([one, request("b", *prompt([3, (4, 8), 2]))])
    with pytest.raises(ValueError, match="request 'c': the last image ends at token 7 of 7; a prompt ends with a token of text"):
        engine.submit([request("c", *prompt([3, (4, 4)]))])
    assert engine.health().waiting == 0
    with pytest.raises(ConfigError, match="the model has no tower"):
        make_embedded(EngineContext(config(), text_model(), patches=4))
    with pytest.raises(ConfigError, match=r"serves prompts of text, and the data \(or an environment, env.image_tokens\) has images: set"):
        make_engine(EngineContext(config(engine="tests/helpers/numpy_engine.py:NumpyEngine"), built(), hf_config=HF, patches=4))


@pytest.mark.full
def test_models_of_text_decode_as_before():
    """Without a shift no operation is added to decoding; one of zeros changes no bit; it is that of text behind images."""
    model = text_model()
    params, cache = random_params(model, 0, 0.15), model.init_cache(2, 8, jnp.float32)
    tokens, positions, zeros = jnp.array([5, 9]), jnp.array([3, 6]), jnp.zeros(2, jnp.int32)

    def step(positions, shift):
        return model.decode(params, tokens, positions, cache, shift_S=shift)

    plain, moved = (jax.make_jaxpr(step)(positions, shift).jaxpr for shift in (None, zeros))
    assert len(plain.invars) == 1 and len(plain.eqns) < len(moved.eqns)
    for one, other in zip(*(jax.tree.leaves(step(positions, shift)) for shift in (None, zeros)), strict=True):
        np.testing.assert_array_equal(one, other)
    rng = np.random.default_rng(0)
    for _ in range(20):
        grids = 2 * rng.integers(1, 6, (int(rng.integers(0, 4)), 2))
        firsts, length = [], 1
        for h, w in grids:
            firsts.append(length)
            length += h * w // 4 + int(rng.integers(0, 3))
        assert rotary_positions(length + 2, firsts, grids, 2)[-1].tolist() == [length + 1 + rotary_shift(grids, 2)] * 3
    shapes = Shapes((8,), (16, 64), (96,), 2, 2, 4, 1, 96, patches=100)
    assert [shapes.patch_room(n, 2) for n in shapes.prompt_lengths] == [64, 100] and shapes.patch_room(64, 3) == 108
