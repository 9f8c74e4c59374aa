"""Episodes through the real pool, renderer and embedded sampler: tokens, log-probs, publications, faults, resumes."""

import dataclasses
import time

import numpy as np
import pytest
from helpers.episode_cases import params, playing, requests, rescored, tokenizer

from jaxrl.data import completion_texts
from jaxrl.errors import RunStopped
from jaxrl.rl.episodes import check_failures, conversations, episode_metrics
from jaxrl.rl.trajectories import collect
from jaxrl.rollout import generate
from jaxrl.rollout.protocol import UNFINISHED


def same(a, b):
    """Two results are equal in all but what clocks say."""
    def plain(r):
        outcome = r.outcome and dataclasses.replace(
            r.outcome, counts={k: v for k, v in r.outcome.counts.items() if not k.endswith("seconds")})
        return dataclasses.asdict(dataclasses.replace(r, outcome=outcome))

    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        np.testing.assert_equal(plain(one), plain(other))


@pytest.mark.parametrize("function, segments, keep", [("several", 1, False), ("several", 1, True), ("rewritten", 2, False)])
@pytest.mark.slow
def test_what_is_trained_is_what_was_sampled(function, segments, keep):
    """Over all turns: the trainer's log-probs of the recorded ids are the sampler's, each sampled token stands in the loss
    once, between turns stands what the template writes, and scores are the environment's."""
    asked = requests()
    with playing(function, keep) as engine:
        results = generate(engine, asked, 600.0)
        extended = engine.engine.counters()["extended_tokens"]
    assert (extended > 0) == keep
    traj = collect(asked, results)
    assert np.bincount(traj.trajectory).tolist() == [segments] * 6
    np.testing.assert_array_equal(traj.tokens[traj.loss_mask], np.concatenate([r.tokens for r in results]))
    np.testing.assert_allclose(rescored(traj, {0: params()})[traj.loss_mask], traj.logprobs[traj.loss_mask], atol=1e-5)
    for result, pieces in zip(results, conversations(traj, tokenizer()), strict=True):
        texts = [p["text"] for p in pieces if p["trained"]]
        assert len(texts) == len(result.turns) > 1
        if function == "several":
            assert all("Max has " in p["text"] and p["text"].endswith("=") for p in pieces if not p["trained"])
            said = completion_texts(tokenizer())([result.tokens[a:b] for a, b in spans(result)])
            digits = [sum(c.isdigit() for c in text) / max(len(text), 1) / 4 for text in said]
            np.testing.assert_allclose([t.reward for t in result.turns], digits, rtol=1e-12)
            assert result.outcome.value == pytest.approx(0.25 + sum(digits))
    if not keep:
        with playing(function) as engine:  # the same again, though its workers answer in another order
            same(results, generate(engine, asked, 600.0))


def spans(result):
    ends = np.cumsum([t.size for t in result.turns])
    return zip(ends - [t.size for t in result.turns], ends, strict=True)


@pytest.mark.parametrize("publish", ["episode", "turn"])
@pytest.mark.slow
def test_a_publication_falls_between_episodes_or_between_turns(publish):
    """Held, the engine begins no episode (episode) or no turn (turn); tokens carry the version that drew them, and their
    log-probs are that version's."""
    asked = requests(groups=4)
    with playing("slow", publish=publish, in_flight=3) as engine:
        engine.submit(asked)
        done = engine.poll(0.0)
        while not any(len(e.turns) == 1 and not e.pending and not e.first for e in engine._begun.values()):  # it has another to come
            done += engine.poll(0.0)
        engine.hold(True)
        end = time.monotonic() + 600
        while engine.health().running:
            assert time.monotonic() < end
            done += engine.poll(0.1)
        unfinished = len(asked) - len(done)
        assert 0 < engine.health().waiting <= unfinished
        assert (engine.health().waiting == unfinished) == (publish == "episode")
        engine.publish(params(1), 1)
        engine.hold(False)
        while len(done) < len(asked):
            assert time.monotonic() < end
            done += engine.poll(1.0)
    results = {r.id: r for r in done}
    traj = collect(asked, [results[q.id] for q in asked])
    scored = rescored(traj, {0: params(), 1: params(1)})
    np.testing.assert_allclose(scored[traj.loss_mask], traj.logprobs[traj.loss_mask], atol=1e-5)
    mixed = [len(set(r.versions.tolist())) == 2 for r in results.values()]
    assert any(mixed) if publish == "turn" else not any(mixed)


@pytest.mark.slow
def test_an_episode_goes_on_from_its_recorded_turns():
    """What `unfinished_results` gives is not sampled again, and the end is bitwise that of an unbroken run."""
    asked = requests(groups=4)
    with playing() as engine:
        whole = generate(engine, asked, 600.0)
    for moment in range(1, 6):
        with playing() as engine:
            engine.submit(asked)
            done = []
            for _ in range(40 * moment):
                done += engine.poll(0.0)
                if engine.unfinished_results() and len(done) + sum(len(r.turns) for r in engine.unfinished_results()) >= 3 * moment:
                    break
            begun = engine.unfinished_results()
        known = {r.id for r in done}
        assert all(r.finish == UNFINISHED and r.turns for r in begun) and known.isdisjoint(r.id for r in begun)
        with playing() as engine:
            engine.restore_unfinished(begun)
            rest = generate(engine, [q for q in asked if q.id not in known], 600.0)
            sampled = engine.engine.counters()["requests"]
        results = {r.id: r for r in done + rest}
        same([results[q.id] for q in asked], whole)
        recorded = sum(len(r.turns) for r in begun) + sum(len(results[i].turns) for i in known)
        assert sampled == sum(len(r.turns) for r in whole) - recorded


@pytest.mark.full
def test_failures_of_the_environment_are_tried_again_or_absent(tmp_path, monkeypatch):
    """An exception, a killed worker, a hang and a NaN: the further try repeats the episode, so that no token differs from a
    run without failures."""
    monkeypatch.setenv("WORLD", str(tmp_path))
    asked = requests(groups=10, samples=1)
    with playing() as engine:
        want = generate(engine, asked, 600.0)
    with playing("broken_sometimes", variables=("WORLD",), step_seconds=20.0) as engine:
        got = generate(engine, asked, 600.0)
    assert list(tmp_path.iterdir())
    same(want, got)


def test_a_broken_environment_stops_the_run_and_names_the_cause():
    asked = requests(groups=12, samples=1)
    with playing("broken_resets", retries=0) as engine:
        results = generate(engine, asked, 600.0)
        env = engine.env
    failed = [r for r in results if r.finish == "abort"]
    assert len(failed) > 6 and all(not len(r.tokens) and not r.turns and r.outcome.value is None for r in failed)
    with pytest.raises(RunStopped, match=r"(?s)step 3: the environment failed in \d+ of 12 episodes.*env.max_failed_fraction=0.2"
                                         r".*ConnectionError.*no simulator"):
        check_failures(env, 3, [r.outcome for r in results], len(results))
    kept = [(q, r) for q, r in zip(asked, results, strict=True) if r.finish != "abort"]
    if kept:
        metrics = episode_metrics(collect(*zip(*kept, strict=True)), [r.outcome for _, r in kept], {"x": len(failed)}, 12)
        assert metrics["env/absent_fraction"] == len(failed) / 12


@pytest.mark.parametrize("limit, turns", [({"max_turns": 2}, 2), ({"max_sampled_tokens": 9}, None), ({"max_input_tokens": 20}, None)])
@pytest.mark.slow
def test_limits_end_an_episode_as_cut_and_it_is_scored(limit, turns):
    asked = requests(groups=4)
    with playing(**limit) as engine:
        results = generate(engine, asked, 600.0)
    with playing() as engine:
        whole = generate(engine, asked, 600.0)
    cut = [r for r in results if r.finish == "length"]
    assert cut and all(r.outcome.value is not None for r in results)
    for short, long in zip(results, whole, strict=True):
        np.testing.assert_array_equal(short.tokens, long.tokens[:len(short.tokens)])
        assert turns is None or len(short.turns) <= turns
    if "max_sampled_tokens" in limit:
        assert max(len(r.tokens) for r in results) <= 9
    if "max_input_tokens" in limit:
        for result in results:
            sizes = np.cumsum([len(t.added) + t.size for t in result.turns])
            assert all(before + len(t.added) <= 20 for before, t in zip([0, *sizes], result.turns, strict=False))


@pytest.mark.full
def test_an_environment_that_does_not_repeat_itself_is_said_to(caplog, tmp_path):
    world = tmp_path / "world.py"
    world.write_text("import itertools\ncount = itertools.count()\n"
                     "async def play(task, chat):\n    await chat.send(task.prompt)\n"
                     "    await chat.send(f'Max has {next(count) % 10} apples')\n    return 1.0\n")
    for function, told in (("several", False), (f"{world}:play", True)):
        with playing(function, workers=1) as engine:
            generate(engine, requests(), 600.0)
            end = time.monotonic() + 300
            while engine._begun and time.monotonic() < end:  # the second playing of the first episode
                engine.poll(0.05)
        assert ("is not deterministic" in caplog.text) == told
