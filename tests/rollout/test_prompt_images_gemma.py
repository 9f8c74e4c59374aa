"""Gemma 3 from a prompt with images to its scored completions: sampler, packed rows with shared prompts and meshes against transformers."""

import functools

import numpy as np
import pytest
from helpers import vision_cases as cases
from helpers.rollout_helpers import config

from jaxrl import training
from jaxrl.models.io import hf
from jaxrl.rollout import EngineContext, Request, SamplingParams, generate
from jaxrl.rollout.embedded import make_engine
from jaxrl.training.layout import RowShapes, make_layout
from jaxrl.training.pack import pack
from jaxrl.types import Pictures, Trajectories

pytestmark = pytest.mark.torch
END, NEW, GRID = 1, 32, cases.GEMMA_GRID
PROMPTS = ([5], [3, GRID, 2], [2, GRID, 1, GRID, 3])  # text and images by turns


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(folder, transformers' model), which never says the end or the image token."""
    import torch
    path = tmp_path_factory.mktemp("gemma3")
    theirs = cases.make(kind="gemma3", text={"sliding_window": 5})
    with torch.no_grad():
        theirs.lm_head.weight[[END, cases.PAD]] = 0.0
    theirs.save_pretrained(path)
    return path, theirs


def pixels_of(numbers):
    return [cases.pixels(int(n), GRID) for n in numbers]


def prompt(number: int, pieces):
    """(ids, Pictures or None)"""
    ids, firsts, grids = cases.sequence(number, pieces, 4)
    numbers = 10 * number + np.arange(len(grids))
    return ids, Pictures(np.zeros(len(grids), int), np.array(firsts), np.array(grids), numbers, 4, 48, pixels_of, two_way=True) if grids else None


def logits_of(theirs, ids, pictures):
    """transformers' logits of a sequence."""
    if pictures is None:
        return cases.theirs(theirs, ids, [], [], [])
    return cases.theirs(theirs, ids, pictures.firsts.tolist(), pictures.grids.tolist(), pixels_of(pictures.numbers))


@pytest.mark.full
def test_greedy_tokens_are_transformers(both):
    """Of 0, 1 and 2 images side by side, prefilled once for the two samples of a group. (That log-probs of sampler and trainer agree:
    tests/recipes/test_vision_runs.py.)"""
    path, theirs = both
    model, params = cases.ours(path, True)
    cfg = config(slots=8, prompt_lengths=(8, 24), max_new_tokens=NEW, compaction=False)
    cfg.data.max_prompt_tokens = 24
    engine = make_engine(EngineContext(cfg, model, None, None, (END,), hf.load_config(str(path), images=True), 128))
    engine.publish(params, 0)
    asked = [Request(f"{i}/{k}", ids, SamplingParams(max_new_tokens=NEW, temperature=0.0), 0, pictures=pictures)
             for i, (ids, pictures) in enumerate(prompt(i, pieces) for i, pieces in enumerate(PROMPTS)) for k in range(2)]
    results = generate(engine, asked, 240.0)
    assert engine.counters()["prefilled_prompts"] == len(PROMPTS)
    for q, r in zip(asked[::2], results[::2], strict=True):
        ids = q.prompt
        for _ in range(NEW):
            ids = np.append(ids, logits_of(theirs, ids, q.pictures)[-1].argmax()).astype(np.int32)
        assert r.tokens.tolist() == ids[len(q.prompt):].tolist()
    assert [r.tokens.tolist() for r in results[::2]] == [r.tokens.tolist() for r in results[1::2]]


@functools.cache
def batch(samples=3):
    """(Trajectories of groups of completions of PROMPTS, [ids] and [pictures] of each sequence)."""
    rng, ids, pictures, prompts, groups = np.random.default_rng(0), [], [], [], []
    for g, pieces in enumerate(PROMPTS):
        own, shown = prompt(g, pieces)
        for _ in range(samples):
            ids.append(np.concatenate([own, rng.integers(3, 89, rng.integers(2, 6))]).astype(np.int32))
            pictures.append(shown)
            prompts.append(len(own))
            groups.append(g)
    offsets, n = np.cumsum([0, *map(len, ids)]), len(ids)
    mask = np.concatenate([np.arange(len(t)) >= p for t, p in zip(ids, prompts, strict=True)])
    total = int(offsets[-1])
    source = next(p for p in pictures if p is not None)
    traj = Trajectories(np.concatenate(ids), offsets, mask, np.zeros(total, np.float32), np.zeros(total, np.int32), np.array(prompts),
                        np.array(groups), np.arange(n), np.zeros(n, np.uint32), np.zeros(n, np.int8), pictures=Pictures.of(pictures, source))
    return traj, ids, pictures


def layout(shared, ranks=1):
    return make_layout(batch()[0].sizes, RowShapes((96,), ((2,),), patches=(384,), ranks=ranks), share_prompts=shared)


@pytest.mark.full
@pytest.mark.parametrize("shared", [True, False])
def test_scored_log_probs_are_transformers(both, shared):
    """In packed rows, a group's prompt standing once before its completions or before each."""
    path, theirs = both
    model, params = cases.ours(path)
    traj, ids, pictures = batch()
    values = training.make_score(model, temperature=1.0, chunk=512, put=lambda x: x)(params, traj, layout(shared))
    for i, own in enumerate(ids):
        logits = logits_of(theirs, own, pictures[i])
        logp = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1, keepdims=True)
        begin, span = traj.prompt_lengths[i], slice(traj.offsets[i] + traj.prompt_lengths[i], traj.offsets[i + 1])
        np.testing.assert_allclose(values[span], logp[np.arange(begin - 1, len(own) - 1), own[begin:]], atol=2e-5)


def test_a_cut_row_has_the_reach_of_its_tokens():
    """Over two parts of a row the tokens are dealt; each has its own position and reach still."""
    traj = batch()[0]
    whole, cut = (pack(traj, layout(True, ranks).minibatches[0].microbatches[0], {}, {}) for ranks in (1, 2))
    for one in (whole, cut):
        image = one.images.inserts >= 0
        assert (one.images.reach[image] >= one.positions[image]).all() and np.array_equal(one.images.reach[~image], one.positions[~image])
    key = lambda b: sorted(zip(*(x.ravel().tolist() for x in (b.segments, b.positions, b.images.reach, b.tokens)), strict=True))  # noqa: E731
    assert key(whole) == key(cut)
