"""The admission of groups ahead of the trainer: the bound, the order, nothing lost or doubled, killed and resumed."""

import collections

import numpy as np
import pytest
from helpers.tiers import first_cases

from jaxrl.rollout.protocol import Engine, EngineInfo, Health, Request, Result
from jaxrl.rollout.queue import RolloutQueue, last_step, staleness

ROWS = 1000


class RandomEngine(Engine):
    """Answers in random order, tokens under the version of their moment; an answer may span publishes."""

    info = EngineInfo(concurrent=True, holds=True)

    def __init__(self, seed, lengths=6):
        self.random, self.lengths = np.random.default_rng(seed), lengths
        self.left, self.drawn, self.held, self.version, self.calls = {}, {}, False, -1, []
        self.begun = set()

    def submit(self, requests):
        self.calls.append(("submit", [r.id for r in requests]))
        for r in requests:
            assert r.id not in self.left
            self.left[r.id], self.drawn[r.id] = int(self.random.integers(1, self.lengths + 1)), []

    def poll(self, deadline_s):
        for i in list(self.left):
            if i in self.begun or (not self.held and self.random.random() < 0.5):
                self.begun.add(i)
                self.drawn[i].append(self.version)
                self.left[i] -= 1
        done = [i for i, n in self.left.items() if n == 0]
        for i in done:
            del self.left[i]
            self.begun.discard(i)
        return [self.result(i) for i in done]

    def result(self, i):
        versions = np.array(self.drawn.pop(i), np.int32)
        zeros = np.zeros(len(versions), np.float32)
        return Result(i, versions * 0, zeros, zeros, versions, "stop", 0)

    def abort(self, ids=None):
        for i in list(ids):
            self.left.pop(i, None)

    def hold(self, on):
        self.held = on

    def close(self):
        self.left.clear()

    def publish(self, params, version):
        self.version = version
        self.calls.append(("publish", version))

    def health(self):
        return Health(True, version=self.version, running=len(self.begun & set(self.left)))


def make(engine, k, n, steps, partial=True, per_step=4, **more):
    def draw(cursor, count):
        stop = min(cursor + count, ROWS)
        return [(p, f"row {p}") for p in range(cursor, stop)], max(cursor, stop)

    def requests(prompts, step):
        return [Request(f"{step}/{p}/{i}", np.ones(1, np.int32), seed=step, group=p) for p, _ in prompts for i in range(2)]

    return RolloutQueue(engine, per_step=per_step, max_staleness=k, sync_every=n, partial=partial, steps=steps, draw=draw,
                        requests=requests, **more)


def train(queue, start, cursor, stop, n, random, refill=0.0, ledger=None):
    """Steps start..stop-1 as the recipe makes them; returns (cursor, ledger: [(step, position, id, versions, planned)])."""
    ledger = [] if ledger is None else ledger
    for step in range(start, stop):
        groups, after = queue.request_groups(step, cursor)
        assert queue.wait(groups, 100.0)
        if random.random() < refill:
            more, after = queue.request_groups(step, after, int(random.integers(1, 5)))
            assert queue.wait(more, 100.0)
            groups += more
        ledger += [(step, g.position, r.id, r.versions, g) for g in groups for r in g.results.values()]
        for _ in range(3):
            queue.poll()
        queue.release(after)
        cursor = after
        if (step + 1) % n == 0:
            queue.publish(None, step + 1)
    return cursor, ledger


def check(ledger, k, n):
    assert max(collections.Counter((p, i.split("/")[2]) for _, p, i, *_ in ledger).values()) == 1  # no sample twice
    used = sorted({p for _, p, *_ in ledger})
    assert used == list(range(len(used))) and len(ledger) == 2 * len(used)  # and none left out
    assert [p for _, p, *_ in ledger] == sorted(p for _, p, *_ in ledger)  # in the order of the data
    for step, _, _, versions, group in ledger:
        assert group.planned >= step and group.admitted <= versions.min()
        assert 0 <= staleness(step, versions, n).min() and staleness(step, versions, n).max() <= k


@pytest.mark.parametrize("k,n", [(0, 1), (1, 1), (2, 1), (8, 1), (0, 4), (1, 3), (2, 2)])
@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("refill", [0.0, 0.5])
def test_every_group_is_used_once_in_order_within_the_bound(k, n, partial, refill):
    queue = make(RandomEngine(k), k, n, 20, partial)
    queue.publish(None, 0)
    _, ledger = train(queue, 0, 0, 20, n, np.random.default_rng(n), refill)
    check(ledger, k, n)
    assert queue.counts["used_groups"] == len(ledger) // 2
    if not refill:
        assert not queue.groups and queue.counts["admitted_groups"] == 80  # nothing was asked for beyond the last step
    if not partial:
        assert all(len(set(versions)) <= 1 for _, _, _, versions, _ in ledger)
    elif k:
        assert any(len(set(versions)) > 1 for _, _, _, versions, _ in ledger)  # answers went on across a publish
    reached = {int(s) for step, _, _, versions, _ in ledger for s in staleness(step, versions, n)}
    assert refill or reached >= set(range(min(k, 3) + 1))  # it does run ahead


def test_without_staleness_the_engine_sees_one_step_at_a_time():
    engine = RandomEngine(0)
    queue = make(engine, 0, 1, 3)
    queue.publish(None, 0)
    train(queue, 0, 0, 3, 1, np.random.default_rng(0))
    asked = [[f"{s}/{p}/{i}" for p in range(4 * s, 4 * s + 4) for i in range(2)] for s in range(3)]
    assert engine.calls == [("publish", 0), ("submit", asked[0]), ("publish", 1), ("submit", asked[1]), ("publish", 2),
                            ("submit", asked[2]), ("publish", 3)]


@pytest.mark.parametrize("k,n", [(4, 1), (1, 3)])
@first_cases(4, "at", range(1, 9))
def test_killed_and_resumed_nothing_is_lost_or_doubled(k, n, at):
    queue, random = make(RandomEngine(at), k, n, 12), np.random.default_rng(at)
    queue.publish(None, 0)
    cursor, ledger = train(queue, 0, 0, at, n, random, 0.3)
    state, results = queue.state()
    finished = {r.id: r for r in results}
    again = make(RandomEngine(100 + at), k, n, 12)
    again.restore(state, results, at, cursor, {})
    again.publish(None, at)
    seeds = {g.position: g.planned for g in queue.groups.values()}
    _, ledger = train(again, at, cursor, 12, n, random, 0.3, ledger)
    check(ledger, k, n)
    assert all(group.planned == seeds[p] for step, p, _, _, group in ledger if step >= at and p in seeds)  # the same seeds
    assert all(versions is finished[i].versions for step, _, i, versions, _ in ledger if i in finished)  # used as they were
    assert again.counts["used_groups"] == len(ledger) // 2
    assert again.counts["asked_again"] == 2 * len(seeds) - len(finished)


def test_resumed_with_a_tighter_bound_asks_again_for_what_would_be_too_old():
    queue = make(RandomEngine(1), 8, 1, 12)
    queue.publish(None, 0)
    cursor, ledger = train(queue, 0, 0, 4, 1, np.random.default_rng(0))
    state, results = queue.state()
    again = make(RandomEngine(2), 1, 1, 12)
    again.restore(state, results, 4, cursor, {})
    again.publish(None, 4)
    assert len(again.groups) == 8  # two steps' groups; the others are not to be asked for yet
    _, late = train(again, 4, cursor, 12, 1, np.random.default_rng(0))
    assert all(staleness(step, v, 1).max() <= 1 for step, _, _, v, _ in late)
    assert [p for _, p, *_ in ledger + late][::2] == list(range(48))


def test_late_answers_end_the_wait_and_strangers_are_refused():
    seconds = iter(range(100))
    engine = RandomEngine(0, lengths=10**6)
    queue = make(engine, 1, 1, 3, clock=lambda: next(seconds))
    queue.publish(None, 0)
    groups, _ = queue.request_groups(0, 0)
    with pytest.raises(TimeoutError, match="8 completions are missing after 5 s; raise rollout.timeout_seconds"):
        queue.wait(groups, 5.0)
    assert not engine.left  # aborted
    groups, _ = queue.request_groups(0, 0)  # and asked for again
    assert len(engine.left) == 16 and not queue.wait(groups, 50.0, stop=lambda: True)
    with pytest.raises(RuntimeError, match="'x', which was not requested"):
        queue.receive([Result("x", *[np.zeros(0)] * 4, "stop", 0)])


def test_the_last_step_that_may_be_asked_for():
    assert [last_step(s, 0, 1, 100) for s in range(3)] == [0, 1, 2]
    assert [last_step(s, 2, 1, 100) for s in range(3)] == [2, 3, 4]
    assert [last_step(s, 2, 1, 4) for s in range(3)] == [2, 3, 3]
    assert [last_step(s, 0, 4, 100) for s in range(6)] == [3, 3, 3, 3, 7, 7]
    assert [last_step(s, 1, 2, 100) for s in range(4)] == [3, 3, 5, 5]
    assert staleness(7, np.array([4, 3, 0]), 4).tolist() == [0, 1, 1]
