"""Shared by the tests of episodes: the real pool, renderer and embedded sampler around the tiny job's model."""

import contextlib
import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from helpers.rollout_helpers import random_params
from helpers.tiny_job import MODEL
from helpers.worlds import TEMPLATE
from jaxrl import data, models
from jaxrl.config.load import default_config
from jaxrl.data.turns import TurnRenderer
from jaxrl.envs.pool import EpisodePool
from jaxrl.resolve.spec import resolve
from jaxrl.rollout import Engine, EngineContext, Health, Key, Request, Result, SamplingParams, make_engine
from jaxrl.rollout.episodes import EpisodeEngine

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
    c.env.function = function if ":" in function or not function else f"{WORLDS}:{function}"
    c.env.workers, c.env.max_observation_tokens, c.env.max_turns = 2, 8, 4
    for name, value in env.items():
        c.env[name] = value
    return c


@contextlib.contextmanager
def playing(function="several", keep=False, says=None, speaks=None, **env):
    """An EpisodeEngine of weights params(0). keep: later turns go on from what the engine kept, which differs in the last bits.
    says: a Scripted engine of these texts instead. speaks: another tokenizer."""
    c, speaks = resolve(config(function, **env)), speaks or tokenizer()
    pool = EpisodePool(c.env, c.user)
    try:
        pool.ready()
        renderer = TurnRenderer(c, speaks, pool.tools)
        engine = Scripted(says, speaks) if says else make_engine(EngineContext(c, model(), speaks, None, (1,), MODEL))
        episodes = EpisodeEngine(engine, pool, renderer, c.env, longest=c.longest, seed=0, keep=keep)
        episodes.publish(params(), 0)
        yield episodes
        episodes.close()
    finally:
        pool.close()


class Scripted(Engine):
    """Says the texts of `says` in turn, one per turn of an episode, each text a list of tokens or a string of one per character,
    with the end token where it fits."""

    def __init__(self, says, speaks):
        self.speaks = speaks
        self.says, self.waiting, self.asked, self.version = says, [], [], -1

    def submit(self, requests):
        self.waiting += requests
        self.asked += requests

    def poll(self, deadline_s):
        done, self.waiting = self.waiting, []
        return [self.said(r) for r in done]

    def said(self, request):
        text = self.says[min(request.key.turn, len(self.says) - 1)]
        end = self.speaks.eos_token_id
        ids = [i for piece in text for i in self.speaks(piece, add_special_tokens=False)["input_ids"]] + [end]
        ids, most = np.array(ids, np.int32), request.sampling.max_new_tokens
        n = min(len(ids), most)
        zeros = np.zeros(n, np.float32)
        return Result(request.id, ids[:n], zeros, zeros, np.full(n, self.version, np.int32),
                      "stop" if ids[n - 1] == end else "length", request.seed)

    def abort(self, ids=None):
        self.waiting = [r for r in self.waiting if ids is not None and r.id not in ids]

    def publish(self, params, version):
        self.version = version

    def health(self):
        return Health(self.version >= 0, False, self.version, len(self.waiting))

    def close(self):
        pass


def requests(groups=3, samples=2, stream="train", speaks=None, **sampling):
    """Of one prompt for all, so that groups differ by their environment's seed alone."""
    prompt = np.array((speaks or tokenizer())(QUESTION + "\n=")["input_ids"], np.int32)
    how = SamplingParams(**{"max_new_tokens": 6, **sampling})
    task = SimpleNamespace(prompt=QUESTION, answer="3", columns={}, prompt_text=QUESTION)
    keys = [Key(stream, 0, g, k) for g in range(groups) for k in range(samples)]
    return [Request(str(key), prompt, how, key.seed(0), key.prompt, key, task) for key in keys]


def rescored(traj, versions_params):
    """[T] log-probs of every sampled token, each sequence run alone through the model, under its version's weights."""
    out = np.zeros(len(traj.tokens))
    for a, b in zip(traj.offsets, traj.offsets[1:], strict=False):
        ids = jnp.asarray(traj.tokens[None, a:b])
        at = jnp.arange(b - a)[None]
        for version, weights in versions_params.items():
            hidden = model().hidden(weights, ids, at, at * 0 + 1, at * 0)
            logprobs = jax.nn.log_softmax(model().logits(weights, hidden)[0], -1)
            own = np.flatnonzero(traj.loss_mask[a:b] & (traj.versions[a:b] == version))
            out[a + own] = np.asarray(logprobs)[own - 1, traj.tokens[a + own]]
    return out
