"""Shared by the tests of episodes: the real pool, renderer and embedded sampler around the tiny job's model."""

import contextlib
import functools
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
from rollout_helpers import random_params
from tiny_job import MODEL
from worlds import TEMPLATE

from jaxrl import data, models
from jaxrl.config import default_config
from jaxrl.data.turns import TurnRenderer
from jaxrl.envs.pool import EpisodePool
from jaxrl.rollout import EngineContext, Key, Request, SamplingParams, make_engine
from jaxrl.rollout.episodes import EpisodeEngine
from jaxrl.spec import resolve

WORLDS = Path(__file__).with_name("worlds.py").resolve()
QUESTION = "Max has 3 apples"


@functools.cache
def model():
    return models.build(MODEL, compute_dtype=jnp.float32, scan_layers=False)


@functools.cache
def params(seed=0):
    return random_params(model(), seed, 0.15)


@functools.cache
def tokenizer():
    loaded = data.load_tokenizer(config())
    loaded.chat_template = TEMPLATE
    return loaded


def config(function="several", **env):
    c = default_config()
    c.model.init, c.model.config, c.model.tokenizer = "random", MODEL, "jaxrl://arith/tokenizer"
    c.data.max_prompt_tokens, c.rollout.max_new_tokens, c.rollout.slots = 16, 6, 8
    c.rollout.compaction, c.rollout.engine, c.train.compute_dtype, c.rollout.dtype = False, "jax", "fp32", "fp32"
    c.env.function = function if ":" in function else f"{WORLDS}:{function}"
    c.env.workers, c.env.max_observation_tokens, c.env.max_turns = 2, 8, 4
    for name, value in env.items():
        c.env[name] = value
    return c


@contextlib.contextmanager
def playing(function="several", keep=False, **env):
    """An EpisodeEngine of weights params(0). keep: later turns go on from what the engine kept, which differs in the last bits."""
    c = resolve(config(function, **env))
    pool = EpisodePool(c.env, c.user)
    try:
        pool.ready()
        renderer = TurnRenderer(c, tokenizer(), pool.tools)
        engine = make_engine(EngineContext(c, model(), tokenizer(), None, (1,), MODEL))
        episodes = EpisodeEngine(engine, pool, renderer, c.env, longest=c.longest, seed=0, keep=keep)
        episodes.publish(params(), 0)
        yield episodes
        episodes.close()
    finally:
        pool.close()


def requests(groups=3, samples=2, stream="train", **sampling):
    """Of one prompt for all, so that groups differ by their environment's seed alone."""
    prompt = np.array(tokenizer()(QUESTION + "\n=")["input_ids"], np.int32)
    how = SamplingParams(**{"max_new_tokens": 6, **sampling})
    task = SimpleNamespace(prompt=QUESTION, answer="3", columns={}, prompt_text=QUESTION)
    keys = [Key(stream, 0, g, k) for g in range(groups) for k in range(samples)]
    return [Request(str(key), prompt, how, key.seed(0), key.prompt, key, task) for key in keys]
