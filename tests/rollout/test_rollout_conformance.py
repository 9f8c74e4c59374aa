"""What every engine must do, whatever runs behind it. A new engine is one more row of ENGINES."""

import dataclasses
import functools
import json
import os

import numpy as np
import pytest
from helpers import numpy_engine, tiny_job
from helpers.rollout_helpers import (
    END,
    VOCAB,
    engine,
    ids,
    log_softmax,
    params,
    prompt,
    requests,
    sampled_logprobs,
    teacher_logits,
    tokenizer,
    vllm_server,
)
from helpers.tiers import first_cases

import jaxrl
from jaxrl.errors import ConfigError
from jaxrl.rollout import Engine, EngineContext, Request, SamplingParams, generate, make_engine
from jaxrl.rollout.threaded import ThreadedEngine

NUMPY = f"{numpy_engine.__file__}:NumpyEngine"
ENGINES = {
    "embedded": functools.partial(engine, compaction=False),
    "import path": functools.partial(engine, engine=f"{os.path.abspath(__file__)}:own_engine", compaction=False),
    "numpy": functools.partial(engine, engine=NUMPY),
    "driven": lambda **options: ThreadedEngine(engine(compaction=False, **options)),
    "vllm": lambda **options: engine(engine="vllm", servers=(vllm_server(),), seeded="true", **options),
}
# The quickest is the everyday case. It is a user's engine by import path, too: another one around the embedded engine is nightly.
MARKS = {"vllm": pytest.mark.vllm, "numpy": (), "import path": pytest.mark.nightly}
ROWS = [pytest.param(name, marks=MARKS.get(name, pytest.mark.full)) for name in ENGINES]
TIMEOUT = 600.0


def own_engine(context: EngineContext):
    """An engine of the user's, named by an import path; as good as any."""
    context.config.rollout.engine = "jax"
    return make_engine(context)


@pytest.fixture(scope="module", params=ROWS)
def shared(request):
    """One engine for the tests that leave it idle and under weights 0."""
    made = ENGINES[request.param]()
    yield made
    made.close()


@pytest.fixture(scope="module", params=[row for row in ROWS if row.values[0] in ("embedded", "import path", "numpy")])
def shared_here(request):
    """The same for what is not promised of servers: work inside poll alone, log-probs before truncation."""
    made = ENGINES[request.param]()
    yield made
    made.close()


def left_idle(made):
    yield made
    made.abort()
    made.poll(0.0)
    if made.health().version != 0:
        made.publish(params(), 0)


@pytest.fixture
def idle(shared):
    yield from left_idle(shared)


@pytest.fixture
def here(shared_here):
    yield from left_idle(shared_here)


def decode(tokens):
    return tokenizer().decode(list(tokens), skip_special_tokens=False)


def ended_by(result, limit):
    return "stop" if result.tokens[-1] == END else "length" if len(result.tokens) == limit else "?"


def test_is_an_engine(idle):
    assert isinstance(idle, Engine)


@pytest.mark.full
def test_every_request_is_answered_once_in_request_order(idle):
    asked = requests(41, seed=1)
    asked = [dataclasses.replace(r, sampling=SamplingParams(max_new_tokens=1 + i % 24)) for i, r in enumerate(asked)]
    results = generate(idle, asked, TIMEOUT)
    assert [r.id for r in results] == [r.id for r in asked]
    for r, a in zip(results, asked, strict=True):
        assert r.seed == a.seed and 1 <= len(r.tokens) <= a.sampling.max_new_tokens
        assert len(r.logprobs) == len(r.log_kept_mass) == len(r.versions) == len(r.tokens)
        assert r.tokens.dtype == r.versions.dtype == np.int32 and r.logprobs.dtype == r.log_kept_mass.dtype == np.float32
        assert END not in r.tokens[:-1] and (r.versions == 0).all()
        assert r.finish == ended_by(r, a.sampling.max_new_tokens)
    assert {r.finish for r in results} == {"stop", "length"}
    assert idle.poll(0.0) == []


@first_cases(1, "temperature", [0.6, 1.0])
def test_logprobs_are_the_scorers_at_that_temperature(idle, temperature):
    asked = requests(24, seed=2, temperature=temperature)
    for a, r in zip(asked, generate(idle, asked, TIMEOUT), strict=True):
        want = log_softmax(teacher_logits(a.prompt, r.tokens) / temperature)
        np.testing.assert_allclose(r.logprobs, want[np.arange(len(r.tokens)), r.tokens], atol=1e-4)
        assert (r.log_kept_mass == 0).all()


@pytest.mark.full
@first_cases(1, "options", [{"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.9, "temperature": 1.4}],
                         ids=str)
def test_scorer_minus_kept_is_the_sampled_logprob(here, options):
    asked = requests(24, seed=3, **options)
    for a, r in zip(asked, generate(here, asked, TIMEOUT), strict=True):
        logits = teacher_logits(a.prompt, r.tokens)
        for i, token in enumerate(r.tokens):
            assert abs(r.logprobs[i] - log_softmax(logits[i] / a.sampling.temperature)[token]) < 1e-4
            sampled = sampled_logprobs(logits[i], a.sampling, token)
            assert min(abs(r.logprobs[i] - r.log_kept_mass[i] - want) for want in sampled) < 1e-4


@pytest.mark.full
def test_greedy_is_the_scorers_argmax_with_logprobs_of_temperature_one(idle):
    asked = requests(12, seed=4, temperature=0.0)
    for a, r in zip(asked, generate(idle, asked, TIMEOUT), strict=True):
        logits = teacher_logits(a.prompt, r.tokens)
        np.testing.assert_array_equal(r.tokens, logits.argmax(-1))
        np.testing.assert_allclose(r.logprobs, log_softmax(logits)[np.arange(len(r.tokens)), r.tokens], atol=1e-4)
        assert (r.log_kept_mass == 0).all()


@pytest.mark.full
def test_seeds_decide_the_answer(idle):
    one = Request("one", prompt(5), SamplingParams(max_new_tokens=24, min_new_tokens=8), seed=11)
    same, other = dataclasses.replace(one, id="same"), dataclasses.replace(one, id="other", seed=12)
    a, b, c = generate(idle, [one, same, other], TIMEOUT)
    np.testing.assert_array_equal(a.tokens, b.tokens)
    assert a.tokens.tolist() != c.tokens.tolist() and a.seed == b.seed == 11 and c.seed == 12
    np.testing.assert_array_equal(a.tokens, generate(idle, [one], TIMEOUT)[0].tokens)


@pytest.mark.full
def test_minimum_and_maximum_length(idle):
    asked = requests(64, seed=6, max_new_tokens=20, min_new_tokens=12)
    results = generate(idle, asked, TIMEOUT)
    assert all(12 <= len(r.tokens) <= 20 and END not in r.tokens[:11] for r in results)
    assert any(r.finish == "stop" for r in results)
    for r in results:
        assert r.finish == ended_by(r, 20) and (r.log_kept_mass[12:] == 0).all()


@pytest.mark.full
def test_forbidding_the_end_is_part_of_the_support(here):
    results = generate(here, requests(64, seed=6, max_new_tokens=20, min_new_tokens=12), TIMEOUT)
    assert any((r.log_kept_mass < 0).any() for r in results) and all((r.log_kept_mass[12:] == 0).all() for r in results)


@pytest.mark.full
def test_stop_token_ids_end_the_answer_and_stay(idle):
    ends = tuple(ids("e", "q", "v"))
    results = generate(idle, requests(32, seed=7, stop_token_ids=ends), TIMEOUT)
    stopped = [r for r in results if r.finish == "stop"]
    assert {int(r.tokens[-1]) for r in stopped} >= set(ends[:2])
    for r in results:
        assert not np.isin(r.tokens[:-1], (*ends, END)).any()
        assert (r.finish == "stop") == (r.tokens[-1] in (*ends, END))


@pytest.mark.full
@first_cases(1, "keep_stop", [True, False])
def test_stop_strings_cut_at_the_token_that_completes_them(idle, keep_stop):
    free = generate(idle, requests(48, seed=8), TIMEOUT)
    stops = tuple(decode(r.tokens[4:6]) for r in free if len(r.tokens) > 12)[:3]
    held = generate(idle, requests(48, seed=8, stop=stops, keep_stop=keep_stop), TIMEOUT)
    stopped = 0
    for whole, cut in zip(free, held, strict=True):
        texts = [decode(whole.tokens[:n]) for n in range(len(whole.tokens) + 1)]
        done = next((n for n, text in enumerate(texts) if any(s in text for s in stops)), None)
        if done is None:
            np.testing.assert_array_equal(cut.tokens, whole.tokens)
            continue
        stopped += 1
        assert cut.finish == "stop"
        begin = min(texts[done].find(s) for s in stops if s in texts[done])
        want = done if keep_stop else max(n for n in range(done) if len(texts[n]) <= begin)
        np.testing.assert_array_equal(cut.tokens, whole.tokens[:want])
        np.testing.assert_allclose(cut.logprobs, whole.logprobs[:want], atol=1e-4)
    assert 3 <= stopped < len(free)


def test_stop_strings_wait_for_the_minimum(idle):
    results = generate(idle, requests(24, seed=9, stop=tuple("abcdefgh"), min_new_tokens=6), TIMEOUT)
    assert all(len(r.tokens) >= 6 for r in results) and any(r.finish == "stop" for r in results)
    for r in results:
        late = [n for n in range(6, len(r.tokens) + 1) if set(decode(r.tokens[n - 1:n])) & set("abcdefgh")
                and r.tokens[n - 1] != END]
        assert late == [] or late == [len(r.tokens)]


@pytest.mark.full
@first_cases(1, "options", [{"repetition_penalty": 1.4}, {"frequency_penalty": 0.8},
                                     {"repetition_penalty": 1.2, "frequency_penalty": 0.3}], ids=str)
def test_penalties_match_an_oracle(here, options):
    """Greedy, so that every token is the argmax of the penalised logits; reported log-probs stay without penalty."""
    asked = requests(16, seed=10, temperature=0.0, **options)
    p, bent = asked[0].sampling, 0
    for a, r in zip(asked, generate(here, asked, TIMEOUT), strict=True):
        logits = teacher_logits(a.prompt, r.tokens)
        for i, token in enumerate(r.tokens):
            want = logits[i].copy()
            seen = np.unique(np.concatenate([a.prompt, r.tokens[:i]]))
            want[seen] = np.where(want[seen] > 0, want[seen] / p.repetition_penalty, want[seen] * p.repetition_penalty)
            want -= p.frequency_penalty * np.bincount(r.tokens[:i], minlength=VOCAB)
            assert want[token] > want.max() - 1e-4
            bent += token != logits[i].argmax()
            assert abs(r.logprobs[i] - log_softmax(logits[i])[token]) < 1e-4
    assert bent > 5


def long_requests(count, **more):
    """Requests that cannot end before 20 tokens."""
    return requests(count, seed=11, min_new_tokens=20, **more)


def test_abort_returns_what_is_there(here):
    asked = long_requests(20)  # more than the slots: some wait
    here.submit(asked)
    assert here.poll(0.0) == []
    here.abort(["r0", "r19", "never heard of"])
    gone = {r.id: r for r in here.poll(0.0)}
    assert set(gone) == {"r0", "r19"} and all(r.finish == "abort" for r in gone.values())
    assert 0 < len(gone["r0"].tokens) < 20 and len(gone["r19"].tokens) == 0
    here.abort()
    rest = here.poll(0.0)
    assert {r.id for r in rest} == {f"r{i}" for i in range(1, 19)} and all(r.finish == "abort" for r in rest)
    assert here.health().waiting == here.health().running == 0
    whole = generate(here, asked[:1], TIMEOUT)[0]
    np.testing.assert_array_equal(gone["r0"].tokens, whole.tokens[:len(gone["r0"].tokens)])


@pytest.mark.full
def test_on_hold_what_is_begun_is_finished_and_the_rest_waits(here):
    assert here.info.holds
    asked, got = long_requests(20), {}
    undisturbed = generate(here, asked, TIMEOUT)
    here.submit(asked)
    here.poll(0.0)
    begun = here.health().running
    here.hold(True)
    while here.health().running:
        got |= {r.id: r for r in here.poll(TIMEOUT)}
    assert list(sorted(got)) == sorted(a.id for a in asked[:begun]) and 0 < begun < 20
    assert here.poll(0.0) == [] and here.health().waiting == 20 - begun
    here.hold(False)
    while len(got) < 20:
        got |= {r.id: r for r in here.poll(TIMEOUT)}
    for want in undisturbed:
        np.testing.assert_array_equal(got[want.id].tokens, want.tokens)


@pytest.mark.full
def test_a_rest_drops_the_weights_until_the_next_publish(here):
    assert here.info.sleeps
    before = generate(here, requests(4, seed=15), TIMEOUT)
    here.sleep()
    assert not here.health().ok
    here.publish(params(), 0)
    for a, b in zip(before, generate(here, requests(4, seed=15), TIMEOUT), strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)


@pytest.mark.full
def test_publish_in_flight_marks_the_version_of_every_token(here):
    here.submit(long_requests(4))
    here.poll(0.0)
    here.publish(params(1), 7)
    got = []
    while len(got) < 4:
        got += here.poll(TIMEOUT)
    for r in got:
        assert set(r.versions) == {0, 7} and (np.diff(r.versions) >= 0).all()
    fresh = requests(8, seed=12)
    for a, r in zip(fresh, generate(here, fresh, TIMEOUT), strict=True):
        want = log_softmax(teacher_logits(a.prompt, r.tokens, seed=1))
        np.testing.assert_allclose(r.logprobs, want[np.arange(len(r.tokens)), r.tokens], atol=1e-4)
        assert (r.versions == 7).all()
    assert here.health().version == 7


BAD = [
    (dict(prompt=np.zeros(0, np.int32)), "empty"),
    (dict(prompt=prompt(0, 21)), "21 tokens.*20.*max_prompt_tokens"),
    (dict(prompt=np.array([3, VOCAB], np.int32)), f"token {VOCAB}.*vocabulary"),
    (dict(seed=-1), "seed"),
    (dict(sampling=SamplingParams(stop_token_ids=(VOCAB,))), "stop_token_ids"),
    (dict(id="r0"), "same id"),
]


@pytest.mark.full
@pytest.mark.parametrize("change,message", BAD, ids=[m for _, m in BAD])
def test_a_bad_request_is_refused_by_name_and_nothing_is_queued(idle, change, message):
    good = requests(2)
    bad = dataclasses.replace(good[1], **{"id": "bad one", **change})
    with pytest.raises(ValueError, match=message) as error:
        idle.submit([good[0], bad])
    assert repr(bad.id) in str(error.value)
    assert idle.health().waiting == 0 and len(generate(idle, good, TIMEOUT)) == 2


def test_an_unfinished_id_cannot_be_submitted_again(idle):
    idle.submit(long_requests(1))
    with pytest.raises(ValueError, match="'r0'.*same id"):
        idle.submit(long_requests(1))


def test_generate_gives_up_at_the_deadline_and_cleans_up(idle):
    with pytest.raises(TimeoutError, match="20 of 20 completions.*timeout_seconds"):
        generate(idle, long_requests(20), 0.0)
    assert idle.health().waiting == idle.health().running == 0
    assert idle.poll(0.0) == [] and len(generate(idle, requests(2), TIMEOUT)) == 2


@pytest.mark.full
def test_generate_can_be_stopped(idle):
    asked = iter([False, False, True])
    assert generate(idle, long_requests(40), TIMEOUT, lambda: next(asked)) is None
    assert idle.health().waiting == idle.health().running == 0
    assert idle.poll(0.0) == [] and len(generate(idle, requests(2), TIMEOUT)) == 2


@pytest.mark.full
def test_generate_refuses_answers_it_did_not_ask_for(idle):
    idle.submit(requests(1, seed=13))
    with pytest.raises(RuntimeError, match="'r0'"):
        generate(idle, [dataclasses.replace(long_requests(1)[0], id="mine")], TIMEOUT)


@pytest.mark.parametrize("name", ROWS)
def test_life_begins_with_publish_and_ends_with_close(name):
    made = ENGINES[name](publish=False)
    assert not made.health().ok
    made.submit(requests(1))
    with pytest.raises(RuntimeError, match="publish"):
        made.poll(0.0)
    made.publish(params(), 3)
    assert made.health().ok and made.health().version == 3
    made.close()
    made.close()
    assert made.health().closed and not made.health().ok
    for call in (lambda: made.submit([]), lambda: made.poll(0.0), made.abort, lambda: made.hold(True),
                 lambda: made.publish(params(), 4)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


@pytest.mark.parametrize("field,value", [
    ("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.1), ("top_k", 0), ("min_p", 1.5), ("repetition_penalty", 0.0),
    ("frequency_penalty", float("nan")), ("max_new_tokens", 0), ("min_new_tokens", 2000), ("stop", "text"),
    ("stop", ("",))])
def test_impossible_sampling_is_refused(field, value):
    with pytest.raises(ValueError, match=f"SamplingParams.{field}="):
        SamplingParams(**{field: value})


@pytest.mark.full
def test_engines_of_old_factories_and_of_none(tmp_path):
    """A function of the six fields of a context works as before; one of something else is told what it should be."""
    (tmp_path / "mine.py").write_text("""
from jaxrl.rollout import embedded

def old(config, model, tokenizer, mesh, eos_ids, hf_config):
    config.rollout.slots = 4
    made = embedded.make_engine(config, model, tokenizer, mesh, eos_ids)
    assert hf_config["model_type"] == "qwen2" and made.shapes.slots == 4
    return made

def other(config, model):
    raise AssertionError

def no_engine(context):
    return context
""")
    made = engine(engine=f"{tmp_path}/mine.py:old")
    assert len(generate(made, requests(2), TIMEOUT)) == 2
    made.close()
    for name, said in (("other", "of one argument, a jaxrl.rollout.EngineContext"),
                       ("no_engine", "returned an EngineContext without `info`")):
        with pytest.raises(ConfigError, match=said):
            engine(engine=f"{tmp_path}/mine.py:{name}")


@pytest.mark.slow
def test_a_run_on_somebody_elses_engine(tmp_path):
    """Its log-probs are the trainer's, the reward rises from weights that arrive, what it does not have is absent."""
    c = tiny_job.get_config()
    c.run.dir, c.run.compile_cache, c.log.console = str(tmp_path), "", "off"
    c.rollout.engine, c.rollout.placement, c.train.steps, c.eval.sets = NUMPY, "colocated", 3, ()
    jaxrl.train(c)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and all(line["gap/max"] < 1e-4 for line in lines)
    assert lines[-1]["reward/mean"] > lines[0]["reward/mean"] and "flops/rollout" not in lines[0]
    rows = [json.loads(row) for row in (tmp_path / "rollouts" / "step_00000003.jsonl").read_text().splitlines()]
    assert len(rows) == 32 and {row["version"] for row in rows} == {2}
