"""The order of training data: permutations, reshuffling, exact resumption, reading ahead."""

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
from helpers import tiny_job
from helpers.data_cases import make_config, make_tokenizer, questions, write_jsonl

from jaxrl.config.help import page
from jaxrl.config.load import default_config, put
from jaxrl.config.registry import RECIPES
from jaxrl.data import Interrupted, Stream, load_tokenizer, load_train
from jaxrl.errors import ConfigError
from jaxrl.processes.group import Peers
from jaxrl.resolve.spec import resolve
from jaxrl.rl.rollouts import Rollouts
from jaxrl.run import setup
from jaxrl.run.session import Session


class Numbers:
    """Example i is i; remembers who read what."""

    def __init__(self, n):
        self.n, self.read = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.read.append((i, threading.current_thread() is threading.main_thread()))
        return i


def walk(stream, cursor=0, steps=None):
    out = []
    while steps is None or len(out) < steps:
        batch, following = stream.take(cursor)
        if not batch:
            assert following == cursor
            break
        assert [p for p, _ in batch] == list(range(cursor, following))
        out.append([e for _, e in batch])
        cursor = following
    return out


def flat(steps):
    return [e for step in steps for e in step]


def test_each_epoch_is_a_permutation_drawn_anew():
    order = flat(walk(Stream(Numbers(50), 10, seed=3), steps=15))
    epochs = [order[k:k + 50] for k in (0, 50, 100)]
    assert all(sorted(e) == list(range(50)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] and epochs[0] != list(range(50))


def test_seeds_share_no_epochs():
    """Not even shifted: seed s + 1 must not begin with the second epoch of seed s."""
    orders = [flat(walk(Stream(Numbers(50), 50, seed=s), steps=3)) for s in range(6)]
    epochs = [tuple(o[k:k + 50]) for o in orders for k in (0, 50, 100)]
    assert len(set(epochs)) == len(epochs)
    assert flat(walk(Stream(Numbers(50), 50, seed=2), steps=3)) == orders[2]


def test_unshuffled_keeps_file_order():
    assert flat(walk(Stream(Numbers(5), 2, seed=0, shuffle=False, epochs=2))) == [0, 1, 2, 3, 4] * 2


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("per_step, epochs, drop_last", [(4, 3, True), (4, 3, False), (5, 2, True), (20, 3, True),
                                                         (11, 1, False)])
def test_a_cursor_resumes_exactly(workers, per_step, epochs, drop_last):
    """For every step k, edges of epochs included: a new stream at the cursor of k gives the rest, to the last row."""
    def stream():
        return Stream(Numbers(10), per_step, 7, True, epochs, drop_last, workers=workers)

    first = stream()
    whole = walk(first)
    assert len(whole) == first.total_steps
    assert len(flat(whole)) == (10 * epochs // per_step * per_step if drop_last else 10 * epochs)
    for k in range(len(whole) + 1):
        again = stream()
        assert walk(again, cursor=min(k * per_step, len(flat(whole)))) == whole[k:]
        again.close()
    first.close()


def test_a_cursor_may_jump():
    ahead, plain = Stream(Numbers(13), 3, 5, workers=2), Stream(Numbers(13), 3, 5)
    for cursor in (0, 3, 30, 6, 9, 9, 0, 12):
        assert ahead.take(cursor) == plain.take(cursor)
    ahead.close()


def test_workers_prepare_the_next_steps_ahead():
    """data.workers threads read data.prefetch steps ahead; without them the caller reads what it asks for."""
    data, config = Numbers(100), default_config()
    config.data.prompts_per_step, config.data.workers, config.data.prefetch = 4, 2, 3
    stream = Stream.from_config(config, data)
    first, _ = stream.take(0)
    end = time.monotonic() + 300
    while len(data.read) < 16:  # the step asked for and three more, with nobody asking
        assert time.monotonic() < end, data.read
        time.sleep(0.01)
    assert not any(main for _, main in data.read)
    stream.close()
    data, config.data.workers = Numbers(100), 0
    assert Stream.from_config(config, data).take(0)[0] == first
    assert len(data.read) == 4 and all(main for _, main in data.read)


def test_epoch_numbers():
    stream = Stream(Numbers(8), 4, 0)
    assert [stream.epoch(c) for c in (0, 4, 8, 12)] == [0.0, 0.5, 1.0, 1.5] and stream.total_steps is None


def test_fewer_rows_than_a_step():
    assert sorted(walk(Stream(Numbers(3), 9, 0), steps=1)[0]) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len(walk(Stream(Numbers(3), 9, 0, epochs=1, drop_last=False))[0]) == 3
    with pytest.raises(ConfigError, match="data.prompts_per_step=9 is more than data.epochs=2 x 3 rows"):
        Stream(Numbers(3), 9, 0, epochs=2)


@pytest.mark.parametrize("recipe, given, rate", [("rl", None, 1e-6), ("sft", None, 2e-5), ("sft", 1e-6, 1e-6)])
def test_a_recipe_has_a_learning_rate_of_its_own(recipe, given, rate):
    c = tiny_job.get_config(recipe)
    c.optimizer.lr = given
    spec = resolve(c)
    assert spec.optimizer.lr == spec.asked.optimizer.lr == rate and c.optimizer.lr == given
    assert spec.origin("optimizer.lr") == ("config" if given else f"default of {recipe}")
    c.lora.rank = 4
    assert resolve(c).optimizer.lr == (given or 10 * rate)  # adapters take more
    c.lora.rank, c.lora.path = 0, "adapter"
    assert resolve(c).optimizer.lr == (given or 10 * rate)
    told = ", ".join(f"{n} {r.lr:g}" for n, r in RECIPES.items())
    assert f"optimizer.lr=None peak learning rate; None = by recipe: {told}" in " ".join(page("optimizer.lr", "train", "").split())


@pytest.mark.parametrize("options, expected", [
    ({}, (100, "train.steps=100 (default)")),
    ({"data.epochs": 60}, (360, "data.epochs=60 (config)")),  # 24 rows, 4 a step
    ({"data.epochs": 60, "train.steps": 7}, (7, "train.steps=7 (config)")),
    ({"data.epochs": 1, "train.steps": 7}, (6, "data.epochs=1 (config)")),
    ({"train.max_samples": 801}, (201, "train.max_samples=801 (config)")),
    ({"train.max_samples": 801, "data.epochs": 2, "train.steps": 300}, (12, "data.epochs=2 (config)")),
])
def test_a_run_ends_at_the_first_limit_that_is_set(tmp_path, options, expected):
    c = tiny_job.get_config("sft")
    c.train.steps, c.run.dir = None, str(tmp_path)
    for name, value in options.items():
        put(c, name, value)
    with Session(resolve(c)) as run:
        setup.read_job_inputs(run, with_rewards=False)
    assert (run.total_steps, run.ending) == expected


def test_a_step_of_many_passes_is_refused_with_its_size(caplog):
    c = tiny_job.get_config()  # groups of 8, up to 108 tokens
    c.data.prompts_per_step = 30
    Stream.from_config(c, Numbers(20))
    assert "every prompt would occur 1.5 times in one step of 240 sequences with up to 25,920 tokens" in caplog.text
    c.data.prompts_per_step = 1_000_000
    with pytest.raises(ConfigError, match="data.prompts_per_step=1000000 is 2,000 times the 500 rows.*8,000,000 sequences.*lower it"):
        Stream.from_config(c, Numbers(500))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stop_does_not_wait_for_a_long_steps_rows(workers):
    data = Numbers(4_000)
    stream = Stream(data, 2_000, seed=0, workers=workers, prefetch=1)
    stream.interrupted = lambda: len(data.read) > 500
    with pytest.raises(Interrupted):
        stream.take(0)
    stream.interrupted = lambda: False
    assert stream.take(0, 3)[0] == Stream(Numbers(4_000), 3, seed=0).take(0)[0]  # it begins there anew
    stream.close()
    assert workers or len(data.read) < 500 + 256 + 4
    session = SimpleNamespace(phase=lambda name: contextlib.nullcontext(), fault=lambda component: None, peers=Peers())
    config = default_config()
    config.data.prompts_per_step = 512
    rollouts = Rollouts(resolve(config), session, engine=None, stream=stream, rewards=None, decode=None, steps=1)
    stream.interrupted = lambda: True
    assert rollouts.next(SimpleNamespace(step=0, cursor=0)) is None


@pytest.mark.parametrize("workers", [0, 2])
def test_from_config(tmp_path, workers):
    config = make_config(make_tokenizer(tmp_path / "t"), write_jsonl(tmp_path / "a.jsonl", questions(20)), run__seed=4,
                         data__prompts_per_step=8, data__epochs=2, data__workers=workers, data__drop_last=False)
    dataset = load_train(config, load_tokenizer(config))

    def ids():
        stream = Stream.from_config(config, dataset)
        out = [[e.columns["id"] for e in step] for step in walk(stream)]
        stream.close()
        return out

    by_run_seed = ids()
    assert [len(s) for s in by_run_seed] == [8] * 5 and sorted(flat(by_run_seed)) == sorted(list(range(20)) * 2)
    config.data.seed = 4
    assert ids() == by_run_seed
    config.data.seed = 5
    assert ids() != by_run_seed
    config.data.shuffle = False
    assert flat(ids()) == list(range(20)) * 2
    config.data.prompts_per_step = 12
    assert [len(step) for step in ids()] == [12, 12, 12, 4]
    config.data.drop_last = True
    assert [len(step) for step in ids()] == [12, 12, 12]


@pytest.mark.parametrize("drop_last,cursors", [(True, {0: False, 8: False, 9: True, 12: True}), (False, {9: False, 11: False, 12: True})])
def test_exhausted_says_that_no_step_starts_here(drop_last, cursors):
    """12 positions in steps of 4; a cursor off the steps' edges is dynamic sampling's."""
    stream = Stream(Numbers(6), 4, seed=0, epochs=2, drop_last=drop_last)
    assert {cursor: stream.exhausted(cursor) for cursor in cursors} == cursors
    assert not Stream(Numbers(6), 4, seed=0).exhausted(10**9)


def test_part_of_a_step_can_be_taken():
    stream = Stream(Numbers(6), 4, seed=0)
    assert stream.take(3, 2) == (stream.take(3)[0][:2], 5)
