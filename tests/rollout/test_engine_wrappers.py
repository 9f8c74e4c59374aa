"""Engines around an engine: every method of the protocol reaches the engine within, or is named here as left out."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxrl
from jaxrl.config.load import default_config
from jaxrl.rl.fork_source import CachedEngine
from jaxrl.rollout import Engine, EngineInfo, Health, Key, Request
from jaxrl.rollout.episodes import EpisodeEngine
from jaxrl.rollout.threaded import ThreadedEngine

METHODS = [name for name, own in vars(Engine).items() if inspect.isfunction(own)]
ARGUMENTS = {"submit": ([],), "poll": (0.0,), "abort": (None,), "publish": ({"w": 1}, 3), "health": (), "close": (), "hold": (True,),
             "forget": (["a"],), "unfinished_results": (), "restore_unfinished": ([],), "sleep": (), "weights_moved": ({"w": 1},),
             "metrics": ()}
# What a wrapper does not pass on, and why.
LEFT_OUT = {
    (EpisodeEngine, "submit"): "its workers ask for turns, which are the requests of the engine within",
    (EpisodeEngine, "poll"): "polls the engine within while a turn is sampled",
    (EpisodeEngine, "abort"): "ends the turns of the episodes that it aborts",
    (EpisodeEngine, "forget"): "no request goes on from an episode; it forgets an episode's turns itself",
    (EpisodeEngine, "unfinished_results"): "it has the finished turns itself",
    (EpisodeEngine, "restore_unfinished"): "it replays the turns itself",
    (ThreadedEngine, "poll"): "returns what its thread has polled",
}


class Recorder(Engine):
    """Notes the calls that reach it; closed it refuses them, as the protocol has it."""

    info = EngineInfo(holds=True, sleeps=True)

    def __init__(self):
        self.calls, self.closed = [], False

    def health(self):
        return Health(not self.closed, self.closed)


def recorded(name):
    def method(self, *arguments):
        if self.closed:
            raise RuntimeError("the engine within is closed")
        self.calls.append((name, *arguments))
        self.closed = name == "close"
        return {"within": 1.0} if name == "metrics" else []
    return method


for each in METHODS:
    if each != "health":
        setattr(Recorder, each, recorded(each))
Recorder.__abstractmethods__ = frozenset()


def episodes(engine):
    pool = SimpleNamespace(events=lambda seconds: [], cancel=lambda ids: None, close=lambda: None)
    env = default_config().env
    env.publish = "turn"
    return EpisodeEngine(engine, pool, None, env, longest=8, seed=0)


def cached(engine):
    fork = SimpleNamespace(find_result=lambda r: None, on_publish=lambda version: None, metrics=dict)
    return CachedEngine(engine, fork)


WRAPPERS = {ThreadedEngine: ThreadedEngine, EpisodeEngine: episodes, CachedEngine: cached}


@pytest.fixture(params=WRAPPERS, ids=lambda kind: kind.__name__)
def wrapper(request):
    """(class, engine, the Recorder within)."""
    within = Recorder()
    made = WRAPPERS[request.param](within)
    yield request.param, made, within
    if not made.health().closed:
        made.close()


def test_all_wrappers_are_here():
    """A class of jaxrl's that is an Engine made of an engine."""
    pattern = re.compile(r"^class (\w+)\([\w.]*Engine\):(?:\n(?: .*)?)*?\n    def __init__\(self, engine\b", re.M)
    found = {name for file in Path(jaxrl.__file__).parent.rglob("*.py") for name in pattern.findall(file.read_text("utf-8"))}
    assert found == {kind.__name__ for kind in WRAPPERS}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_reaches_the_engine_within(wrapper, name):
    kind, engine, within = wrapper
    arguments = ARGUMENTS[name]
    assert engine.info.holds and engine.info.sleeps
    before = len(within.calls)
    got = getattr(engine, name)(*arguments)
    if name == "health":
        assert got.ok and not got.closed
    elif (kind, name) not in LEFT_OUT:
        assert (name, *arguments) in within.calls[before:]
    else:
        assert name == "poll" or name not in [call[0] for call in within.calls[before:]]
    if name == "metrics":
        assert got == {"within": 1.0}


@pytest.mark.parametrize("name", METHODS)
def test_a_closed_engine_refuses(wrapper, name):
    """Also what would not reach the engine within; `forget` does nothing in an EpisodeEngine."""
    kind, engine, _ = wrapper
    engine.close()
    arguments = ([Request("a", [1], key=Key("train", 0, 0, 0))],) if name == "submit" else ARGUMENTS[name]
    if name == "health":
        health = engine.health()
        assert health.closed and not health.ok
    elif name != "close" and (kind, name) != (EpisodeEngine, "forget"):
        with pytest.raises(RuntimeError, match="is closed"):
            getattr(engine, name)(*arguments)
