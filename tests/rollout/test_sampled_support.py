"""algorithm.sampled_support: the trainer's log-probs are those of the distribution the answer was drawn from."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_job
from helpers.rollout_helpers import END, HF, config, model, params, requests, support, teacher_logits, tokenizer

from jaxrl import training
from jaxrl.errors import ConfigError
from jaxrl.resolve.checks.common import check
from jaxrl.resolve.spec import resolve
from jaxrl.rl.roles import Roles
from jaxrl.rl.rollouts import Rollouts
from jaxrl.rl.trajectories import collect
from jaxrl.rollout import EngineContext, EngineInfo, Key, generate, make_engine

OPTIONS = dict(top_k=7, top_p=0.8, temperature=1.3)


@pytest.fixture(scope="module")
def answered():
    cfg = config(**OPTIONS)
    cfg.algorithm.sampled_support = True
    engine = make_engine(EngineContext(cfg, model(), tokenizer(), None, (END,), HF))
    engine.publish(params(), 0)
    asked = [dataclasses.replace(r, key=Key("t", 0, i // 4, i % 4), group=i // 4)
             for i, r in enumerate(requests(24, seed=3, prompts=6, **OPTIONS))]
    results = generate(engine, asked, 600.0)
    engine.close()
    return asked, results


@pytest.mark.slow
def test_the_engine_tells_its_support(answered):
    seen = set()
    for a, r in zip(*answered, strict=True):
        assert r.support.shape == (len(r.tokens), 7)
        for i, logits in enumerate(teacher_logits(a.prompt, r.tokens)):
            read_urls = r.support[i][r.support[i] >= 0]
            assert r.tokens[i] in read_urls
            if set(read_urls) == set(np.flatnonzero(support(logits, a.sampling))):  # but for a border within rounding
                scaled = logits / 1.3
                own = scaled[r.tokens[i]] - np.log(np.exp(scaled[read_urls]).sum())
                assert r.logprobs[i] - r.log_kept_mass[i] == pytest.approx(own, abs=1e-4)
                seen.add(len(read_urls))
    assert len(seen) > 2  # top_p leaves supports of many sizes


@pytest.mark.full
def test_the_scorer_takes_it_over(answered):
    """Log-probs of draw and scorer agree; without the support they are apart by the mass that was cut."""
    asked, results = answered
    traj = collect(asked, results)
    shapes = training.row_shapes((), 48, 256, 1, 1)
    layout = training.make_layout(traj.sizes, shapes)
    score = training.make_score(model(), temperature=1.3, chunk=64, put=lambda b: jax.tree.map(jnp.asarray, b))
    drawn = (traj.logprobs - traj.columns["kept"])[traj.loss_mask]
    np.testing.assert_allclose(score(params(), traj, layout)[traj.loss_mask], drawn, atol=1e-4)
    del traj.columns["support"]
    whole = score(params(), traj, layout)[traj.loss_mask]
    np.testing.assert_allclose(whole, traj.logprobs[traj.loss_mask], atol=1e-4)
    assert np.abs(whole - drawn).max() > 0.1


def test_ties_keep_the_token_that_was_drawn():
    from jaxrl.rollout.sampling import top_tokens

    logits = jnp.array([[1.0, 1.0, 1.0, -jnp.inf], [3.0, -jnp.inf, -jnp.inf, -jnp.inf]])
    assert np.asarray(top_tokens(logits, jnp.array([2, 0]), 2)).tolist() == [[0, 2], [0, -1]]


def refused_by(cfg, engine):
    """Where a support cannot be had: by the config's check, by the algorithm, or by what drives the engine."""
    check(cfg)
    job = SimpleNamespace(config=resolve(cfg), model=model())
    if cfg.rollout.top_k > job.model.config.vocab_size:
        return Roles(job, 5)
    return Rollouts(job.config, SimpleNamespace(peers=None), engine=engine, stream=None, rewards=None, decode=None,
                    steps=1)


@pytest.mark.parametrize("changes,message", [
    (dict(engine="vllm", top_k=7), "rollout.engine=vllm: vLLM does not tell its support; set jax"),
    (dict(engine="jax", top_k=100), "rollout.top_k=100: the vocabulary has 64 tokens"),
    (dict(engine="./mine.py:make", top_k=7), "the engine ./mine.py:make does not return its support"),
])
def test_what_cannot_be_had_is_refused(changes, message):
    cfg = tiny_job.get_config()
    cfg.rollout.update(changes)
    cfg.algorithm.sampled_support = True
    with pytest.raises(ConfigError, match=message):
        refused_by(cfg, SimpleNamespace(info=EngineInfo()))
