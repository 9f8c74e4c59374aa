"""Parts of a step of the tiny job under an algorithm row: its checked config, advantages of given scores, the batch of given
completions. Fixtures, too: a test file imports those that it uses."""


import contextlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from helpers import tiny_job
from helpers.algorithm_runs import decided
from jaxrl.config.load import put
from jaxrl.data.stream import Stream
from jaxrl.processes.group import Peers
from jaxrl.resolve.checks import common
from jaxrl.rewards.pool import RewardResult
from jaxrl.rl.advantages import advantages
from jaxrl.rl.rollouts import Rollouts
from jaxrl.rollout import Engine, Health, Result
from jaxrl.types import Trajectories


@pytest.fixture(scope="module", autouse=True)
def jax_as_it_was(tmp_path_factory):
    """`open_job` and runs set jax up for the whole process. Programs compiled here serve the runs after."""
    names = ("jax_default_matmul_precision", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
             "jax_persistent_cache_min_entry_size_bytes")
    before, mesh = {n: getattr(jax.config, n) for n in names}, jax.sharding.get_mesh()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax.set_mesh(mesh)
    compilation_cache.reset_cache()


def config(changes=None):
    """The tiny job with changes (dotted name -> value), checked."""
    c = tiny_job.get_config()
    for name, value in (changes or {}).items():
        put(c, name, value)
    common.check(c)
    return c


def row(changes=None):
    return common.resolved_algorithm(config(changes))


def trajectories(lengths, groups):
    """Prompts of one token, answers of `lengths`."""
    n, offsets = len(lengths), np.concatenate([[0], np.cumsum(np.asarray(lengths) + 1)]).astype(np.int64)
    mask = ~np.isin(np.arange(offsets[-1]), offsets[:-1])
    zeros = np.zeros(offsets[-1])
    return Trajectories(
        tokens=np.arange(offsets[-1], dtype=np.int32), offsets=offsets, loss_mask=mask, logprobs=zeros.astype(np.float32),
        versions=zeros.astype(np.int32), prompt_lengths=np.ones(n, np.int32), group=np.asarray(groups, np.int64),
        sample=np.arange(n, dtype=np.int32), seed=np.arange(n, dtype=np.uint32), finish=np.zeros(n, np.int8))


PLAIN = {"algorithm.advantage_mean": "none", "algorithm.advantage_std": "none", "algorithm.whiten": False}


def of_tokens(changes, scores, lengths, **given):
    """Advantages of the answers' tokens under an algorithm row, and the critic's returns."""
    traj = trajectories(lengths, range(len(lengths)))
    given = {k: np.where(traj.loss_mask, np.resize(np.insert(v, 0, 9.0), len(traj.tokens)), 9.0) for k, v in given.items()}
    found = advantages(decided(config({**PLAIN, **changes})).algorithm, traj, np.asarray(scores, float), **given)
    return found.tokens[traj.loss_mask], None if found.returns is None else found.returns[traj.loss_mask]


class Prompts:
    """A data set of `rows` prompts."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, i):
        return SimpleNamespace(prompt_ids=np.array([7]), prompt=f"p{i}", prompt_text=f"p{i}", columns={}, answer=None)


class Echo(Engine):
    """An engine whose answer to prompt g, sample k is the tokens answer(g, k); `asked` holds the requests."""

    def __init__(self, answer):
        self.answer, self.asked, self.waiting = answer, [], []

    def health(self):
        return Health(True)

    def submit(self, requests):
        self.asked += requests
        self.waiting += requests

    def poll(self, deadline_s):
        out, self.waiting = [self.result(r) for r in self.waiting], []
        return out

    abort = publish = close = None  # never called here

    def result(self, r):
        k = "greedy" if r.sampling.temperature == 0 else r.key.sample
        tokens = np.asarray(self.answer(r.group, k), np.int32)
        zeros = np.zeros(len(tokens), np.float32)
        return Result(r.id, tokens, zeros, zeros, 0 * tokens, "length" if len(tokens) >= 10 else "stop", r.seed)


class Scores:
    """Rewards by name, of an answer's tokens; `called` counts the answers that had no recorded outcome."""

    def __init__(self, **functions):
        self.functions, self.called = functions, 0

    def score(self, items, recorded, stop):
        self.called += sum(r is None for r in recorded)
        parts = {n: np.array([float(f(i.token_ids)) for i in items]) for n, f in self.functions.items()}
        ok = {n: "ok" for n in parts}
        return RewardResult(sum(parts.values()), parts, [ok] * len(items), [{}] * len(items), {})


def batch_of(changes, answer, rows=100, start=0, **functions):
    """(batch, engine, rewards) of one step: 4 prompts, 2 answers each. Position in the data = group."""
    base = {"rollout.group_size": 2, "rollout.max_new_tokens": 10, "data.epochs": 1}
    engine, rewards = Echo(answer), Scores(**(functions or {"digits": lambda tokens: tokens[0]}))
    session = SimpleNamespace(
        interrupted=lambda: False, fault=lambda name: None, peers=Peers(), together=lambda what, work: work(),
        phase=lambda name: contextlib.nullcontext(), telemetry=SimpleNamespace(earlier_rollouts=()))
    source = Rollouts(
        decided(config({**base, **changes})), session, engine=engine, rewards=rewards, steps=100,
        stream=Stream(Prompts(rows), 4, 0, shuffle=False, epochs=1, drop_last=False),
        decode=lambda ids: [str(list(i)) for i in ids])
    return source.next(SimpleNamespace(step=0, cursor=start)), engine, rewards


def thirds(g, k):
    """Every third prompt is always answered alike."""
    return [5, 1] if g % 3 == 0 else [5 + k, 1]
