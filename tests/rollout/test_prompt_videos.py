"""Prompts with videos: the embedded sampler's log-probs are those of the trainer's rows, alone, packed and with one copy of a group's prompt."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import video_cases as cases
from helpers import vision_cases
from helpers.rollout_helpers import config, random_params
from helpers.tiers import first_cases
from helpers.video_cases import Video

from jaxrl import training
from jaxrl.models import build
from jaxrl.models.families import IMAGES
from jaxrl.models.io import hf
from jaxrl.rollout import EngineContext, Request, SamplingParams, generate
from jaxrl.rollout.embedded import make_engine
from jaxrl.training.layout import RowShapes, make_layout
from jaxrl.types import Pictures, Trajectories

KINDS = {"qwen2_5_vl": {"depth": 2, "fullatt_block_indexes": [1]}, "qwen3_vl": {"depth": 2, "deepstack_visual_indexes": [0]},
         "qwen2_vl": {"depth": 2}}
PIECES = ([3, Video((4, 4), 3, 3.0), 2], [2, (2, 2), 1, Video((2, 2), 4, 2.0), 3])


def built(kind):
    found = hf.load_config("", overrides=vision_cases.config({"num_hidden_layers": 2}, KINDS[kind], kind), images=True)
    found[IMAGES] = {**found[IMAGES], "video": True}
    return found, build(found, compute_dtype=jnp.float32, scan_layers=False)


def pictures_of(number, one):
    """(ids, Pictures) of a sequence of video_cases, whose pictures are 10 * number and those after it."""
    ids, firsts, grids, delays, _, patches = one
    shown = {10 * number + k: p for k, p in enumerate(patches)}
    return ids, Pictures(np.zeros(len(firsts), int), np.array(firsts), np.array(grids), np.array(list(shown)), 2, 96,
                         lambda numbers: [ALL[int(n)] for n in numbers], frames=2, delays=delays), shown


ALL = {}


@pytest.mark.full
@first_cases(1, "kind", list(KINDS))
def test_log_probs_are_the_trainers_in_every_layout(kind):
    """Videos that last longer than their sides are wide, and one beside an image; greyed pixels and other times give others."""
    found, model = built(kind)
    params, cfg = random_params(model, 0, 0.15), config(slots=4, prompt_lengths=(40,), max_new_tokens=8, compaction=False)
    cfg.data.max_prompt_tokens = 40
    engine = make_engine(EngineContext(cfg, model, None, None, (1,), found, 80))
    engine.publish(params, 0)
    asked = []
    for g, pieces in enumerate(PIECES):
        ids, pictures, shown = pictures_of(g + 1, cases.sequence(g, pieces, kind.startswith("qwen3")))
        ALL.update(shown)
        asked += [Request(f"{g}/{k}", ids, SamplingParams(max_new_tokens=6, min_new_tokens=4), 10 * g + k, pictures=pictures) for k in range(2)]
    results = generate(engine, asked, 300.0)
    assert engine.counters()["prefilled_prompts"] == 2
    tokens = [np.concatenate([q.prompt, r.tokens]) for q, r in zip(asked, results, strict=True)]
    offsets, sizes = np.cumsum([0, *map(len, tokens)]), np.array([len(q.prompt) for q in asked])
    mask = np.concatenate([np.arange(len(t)) >= n for t, n in zip(tokens, sizes, strict=True)])
    n, total = len(asked), int(offsets[-1])
    traj = Trajectories(np.concatenate(tokens), offsets, mask, np.zeros(total, np.float32), np.zeros(total, np.int32), sizes, np.arange(n) // 2,
                        np.arange(n), np.zeros(n, np.uint32), np.zeros(n, np.int8),
                        pictures=Pictures.of([q.pictures for q in asked], asked[0].pictures._replace(window=model.config.vision.window)))
    score = training.make_score(model, temperature=1.0, chunk=512, put=lambda x: x)
    wide = RowShapes((96,), ((2,),), patches=(160,))
    shared = make_layout(traj.sizes, wide)
    sampled = np.concatenate([r.logprobs for r in results])
    for layout in (shared, make_layout(traj.sizes, wide, share_prompts=False)):
        np.testing.assert_allclose(score(params, traj, layout)[mask], sampled, atol=2e-5, rtol=0)
    traj.pictures = traj.pictures._replace(patches=lambda numbers: [np.full_like(ALL[int(n)], 128) for n in numbers])
    assert np.abs(score(params, traj, shared)[mask] - sampled).min() > 0
    if not kind.startswith("qwen3"):
        traj.pictures = Pictures.of([q.pictures._replace(delays=np.where(q.pictures.delays > 0, q.pictures.delays + 5, q.pictures.delays))
                                               for q in asked], asked[0].pictures._replace(window=model.config.vision.window))
        assert np.abs(score(params, traj, shared)[mask] - sampled).max() > 1e-4


@pytest.mark.parametrize("share", [True, False])
def test_packed_positions_are_those_of_the_sequence(share):
    """Of every token, in rows with one copy of a prompt and with several."""
    ids, pictures, shown = pictures_of(7, cases.sequence(0, PIECES[1], False))
    ALL.update(shown)
    tokens = [np.append(ids, [5] * (2 + k)) for k in range(3)]
    offsets, n = np.cumsum([0, *map(len, tokens)]), len(tokens)
    total = int(offsets[-1])
    mask = np.concatenate([np.arange(len(t)) >= len(ids) for t in tokens])
    traj = Trajectories(np.concatenate(tokens), offsets, mask, np.zeros(total, np.float32), np.zeros(total, np.int32), np.full(n, len(ids)),
                        np.zeros(n, int), np.arange(n), np.zeros(n, np.uint32), np.zeros(n, np.int8), pictures=Pictures.of([pictures] * n, pictures))
    layout = make_layout(traj.sizes, RowShapes((128,), ((1,),), patches=(160,)), share_prompts=share)
    micro, = layout.minibatches[0].microbatches
    packed = training.pack(traj, micro, {}, {})
    copies = 1 if share else 3
    assert (packed.images.segments > 0).sum() == copies * pictures.counts.sum() and packed.images.patches.shape[2] == 96
    want = cases.rotary_positions(len(ids) + 4, pictures.firsts, pictures.grids, 2, pictures.delays)
    real = packed.segments[0] > 0
    for at, got in zip(packed.positions[0][real], packed.images.rotary[0][real], strict=True):
        assert got.tolist() == want[at].tolist()
