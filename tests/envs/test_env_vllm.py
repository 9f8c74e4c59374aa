"""Episodes through real vLLM: tokens in, tokens out over all turns, and the gap to the trainer's log-probs."""

import numpy as np
import pytest
from helpers.episode_cases import WORLDS
from helpers.rollout_helpers import (
    END,
    HF,
    config,
    log_softmax,
    model,
    params,
    prompt,
    teacher_logits,
    tokenizer,
    vllm_server,
)
from helpers.worlds import LETTERS

from jaxrl.data.turns import TurnRenderer
from jaxrl.envs.pool import EpisodePool
from jaxrl.resolve.spec import resolve
from jaxrl.rl.trajectories import collect
from jaxrl.rollout import EngineContext, Key, Request, SamplingParams, generate, make_engine
from jaxrl.rollout.episodes import EpisodeEngine

pytestmark = pytest.mark.vllm


class Task:
    prompt, answer, columns = "abc", "", {}


def test_turns_are_what_the_trainer_scores():
    c = config(engine="vllm", servers=(vllm_server(),), seeded="true", max_new_tokens=6)
    c.env.function, c.env.max_turns, c.env.max_observation_tokens = f"{WORLDS}:letters", 3, 4
    c, speaks = resolve(c), tokenizer()
    speaks.chat_template = LETTERS
    keys = [Key("train", 0, g, k) for g in range(4) for k in range(4)]
    asked = [Request(str(k), prompt(k.prompt, 6), SamplingParams(max_new_tokens=6), k.seed(0), k.prompt, k, Task) for k in keys]
    with EpisodePool(c.env, c.user) as pool:
        pool.ready()
        within = make_engine(EngineContext(c, model(), speaks, None, (END,), HF))
        engine = EpisodeEngine(within, pool, TurnRenderer(c, speaks, ()), c.env, longest=c.longest, seed=0)
        engine.publish(params(), 0)
        results = generate(engine, asked, 120)
        engine.close()
    assert all(r.finish != "abort" and len(r.turns) in (2, 3) for r in results) and len({len(r.turns) for r in results}) == 2
    traj = collect(asked, results)
    gaps = []
    for a, b in zip(traj.offsets, traj.offsets[1:], strict=False):
        ids = traj.tokens[a:b]
        scored = log_softmax(teacher_logits(ids[:1], ids[1:]))
        at = np.flatnonzero(traj.loss_mask[a:b])
        gaps.append(np.abs(scored[at - 1, ids[at]] - traj.logprobs[a:b][at]))
    assert np.concatenate(gaps).max() < 1e-4 and np.concatenate(gaps).mean() < 1e-5
