"""Conversations that go on in their slots: the same samples as with every turn prefilled, from the new tokens alone."""

import dataclasses
import functools
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_job
from helpers.rollout_helpers import END, HF, VOCAB, config, log_softmax, prompt, random_params, tokenizer
from helpers.tiers import first_cases, nightly

from jaxrl import models
from jaxrl.config.load import default_config
from jaxrl.errors import ConfigError
from jaxrl.planning import case as cases
from jaxrl.planning import memory
from jaxrl.planning.programs import lower
from jaxrl.rollout import Request, SamplingParams, generate
from jaxrl.rollout.embedded import EmbeddedEngine
from jaxrl.rollout.shapes import PROGRAMS, from_config
from jaxrl.rollout.threaded import ThreadedEngine
from jaxrl.sharding import data_shards, make_mesh

TIMEOUT, ROOM = 600.0, 96
GEMMA = dict(model_type="gemma2", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
             num_attention_heads=4, num_key_value_heads=2, head_dim=12, query_pre_attn_scalar=20, sliding_window=5,
             attn_logit_softcapping=3.0, final_logit_softcapping=4.0)
HYBRID = dict(model_type="qwen3_5_text", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
              num_key_value_heads=2, head_dim=16, full_attention_interval=2, linear_num_key_heads=2, linear_num_value_heads=4,
              linear_key_head_dim=8, linear_value_head_dim=6)
MAMBA = dict(model_type="falcon_h1", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, mamba_d_ssm=24, mamba_n_heads=4, mamba_d_state=8, mamba_rms_norm=True)
TURNS = (3, 9, 30, 1, 17)  # new tokens of each conversation's turns: less than a call of 8 holds, more, and 1


@functools.cache
def built(hf="plain", scan=False):
    return models.build({"plain": HF, "windows": GEMMA, "hybrid": HYBRID, "mamba": MAMBA}[hf], compute_dtype=jnp.float32, scan_layers=scan)


@functools.cache
def weights(hf="plain", scan=False, seed=0):
    return random_params(built(hf, scan), seed, 0.1)


def made(hf="plain", scan=False, mesh=None, extend=(2, 8), **rollout):
    """The embedded sampler with calls of 2 slots x 8 new tokens."""
    cfg = config(**{"slots": 8, "compaction": False, "prompt_lengths": (ROOM - 8,), "cache_lengths": (ROOM,), **rollout})
    cfg.data.max_prompt_tokens, cfg.train.max_sequence_tokens = ROOM - 8, ROOM
    mesh = mesh or make_mesh(cfg.mesh, jax.local_devices()[:1])
    shapes = from_config(cfg, data_shards(mesh), 1)
    engine = EmbeddedEngine(built(hf, scan), dataclasses.replace(shapes, extend=extend), mesh, tokenizer(), (END,))
    engine.publish(weights(hf, scan), 0)
    return engine


def talk(engine, keep=True, which=range(len(TURNS)), turns=3, between=lambda turn: None, **sampling):
    """[turn][conversation] (request, result); `between` is called before every turn behind the first."""
    sampling = SamplingParams(**{"max_new_tokens": 6, "min_new_tokens": 3, **sampling})
    said, history = [], {i: prompt(i, 4 + 3 * i) for i in which}
    for turn in range(turns):
        if turn:
            between(turn)
        asked = [Request(f"c{i}/{turn}", ids, sampling, seed=100 * turn + i, keep=keep, after=f"c{i}/{turn - 1}" if turn else "")
                 for i, ids in history.items()]
        said.append(list(zip(asked, generate(engine, asked, TIMEOUT), strict=True)))
        history = {i: np.concatenate([q.prompt, r.tokens, prompt(50 * turn + i, TURNS[i])])
                   for i, (q, r) in zip(which, said[-1], strict=True)}
    return said


def scored(q, r, hf="plain", scan=False, seed=0):
    """Log-probs of a completion by the model as the trainer runs it."""
    return _logprobs(hf, scan, seed, q.prompt, r.tokens)


@functools.cache
def _scorer(hf, scan):
    model, ones = built(hf, scan), np.ones((1, ROOM), np.int32)
    return jax.jit(lambda params, row: model.logits(params, model.hidden(params, row, np.arange(ROOM)[None], ones, 0 * ones)))


def _logprobs(hf, scan, seed, ids, tokens):
    row = np.zeros((1, ROOM), np.int32)
    row[0, :len(ids) + len(tokens)] = np.concatenate([ids, tokens])
    logits = np.asarray(_scorer(hf, scan)(weights(hf, scan, seed), row)[0], np.float64)
    return log_softmax(logits)[len(ids) - 1 + np.arange(len(tokens)), tokens]


def assert_equal(said, others, atol=1e-5):
    for ours, theirs in zip(said, others, strict=True):
        for (q, r), (p, s) in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(q.prompt, p.prompt)
            np.testing.assert_array_equal(r.tokens, s.tokens)
            np.testing.assert_allclose(r.logprobs, s.logprobs, atol=atol, rtol=0)


def new_tokens(said):
    """Prompt tokens whose keys and values no turn before has left in the slot; the last one is decoding's."""
    return sum(len(q.prompt) - len(p.prompt) - len(r.tokens) for before, now in zip(said, said[1:], strict=False)
               for (p, r), (q, _) in zip(before, now, strict=True))


@first_cases(1, "hf,scan", [("plain", False), ("windows", False), ("hybrid", False), nightly("mamba", False),
                            pytest.param("windows", True, marks=pytest.mark.slow)])
def test_a_conversation_is_what_prefilling_every_turn_gives(hf, scan):
    """Tokens, log-probs, the trainer's recomputation of them; and only new tokens are run."""
    engine = made(hf, scan)
    said = talk(engine)
    counts = engine.counters()
    assert counts["extended_prompts"] == 2 * len(TURNS) and counts["extended_tokens"] == new_tokens(said) == 2 * sum(TURNS)
    assert counts["prefilled_tokens"] == sum(len(q.prompt) for q, _ in said[0]) and counts["evicted"] == 0
    assert counts["extend_calls"] == 2 * 6 and engine.health().parked == len(TURNS)  # 11 pieces, two in a call
    whole = made(hf, scan)  # the same programs
    assert_equal(said, talk(whole, keep=False))
    assert whole.counters()["extended_tokens"] == whole.counters()["parked"] == 0
    for q, r in (pair for turn in said for pair in turn):
        np.testing.assert_allclose(r.logprobs, scored(q, r, hf, scan), atol=1e-5, rtol=0)
    alone = made(hf, scan)  # neighbours in a call, or in the cache, move no bit
    assert_equal([[turn[2]] for turn in said], talk(alone, which=[2]), atol=0)


@pytest.mark.full
def test_a_state_behind_a_stop_string_is_not_parked():
    """A recurrence does not go back: the next turn is prefilled, and is what prefilling every turn gives."""
    engine, stop = made("hybrid", decode_steps=8), dict(stop=("a", "b"))
    said = talk(engine, **stop)
    assert engine.counters()["parked_past"] > 0 and engine.counters()["parked"] > 0
    assert_equal(said, talk(made("hybrid", decode_steps=8), keep=False, **stop))


def wandering(rng, count):
    """Conversations of one to three turns: [(prompt, sampling of each turn, new tokens behind each)]."""
    out = []
    for i in range(count):
        turns = int(rng.integers(1, 4))
        sampling = [SamplingParams(max_new_tokens=int(rng.integers(1, 9)), stop=("a", "b") if rng.random() < 0.3 else ()) for _ in range(turns)]
        new = [prompt(2000 + 10 * i + t, int(rng.integers(1, 12))) for t in range(turns)]
        out.append((prompt(1000 + i, int(rng.integers(1, 14))), sampling, new))
    return out


def finished(engine, conversations, together: int, name: str):
    """Results by (conversation, turn), up to `together` requests at once; who waits longest for a next turn may wait longer."""
    rng, fresh, waiting = np.random.default_rng(0), list(range(len(conversations))), []
    at, history, results, running = [0] * len(conversations), [ids for ids, _, _ in conversations], {}, {}
    while fresh or waiting or running:
        most = together if rng.random() < 0.5 else 1  # a tail of few, whose slots are moved together, before many come again
        while (fresh or waiting) and len(running) < most:
            i = (waiting if waiting and (not fresh or together == 1 or rng.random() < 0.4) else fresh).pop(0)
            t, sampling = at[i], conversations[i][1]
            request = Request(f"{name}{i}/{t}", history[i], sampling[t], seed=10 * i + t, keep=t + 1 < len(sampling),
                              after=f"{name}{i}/{t - 1}" if t else "")
            running[request.id] = i
            engine.submit([request])
        for r in engine.poll(0.1):
            i = running.pop(r.id)
            results[i, at[i]] = r
            history[i] = np.concatenate([history[i], r.tokens, conversations[i][2][at[i]]])
            at[i] += 1
            waiting += [i] * (at[i] < len(conversations[i][1]))
    return results


@pytest.mark.full
@pytest.mark.parametrize("hf, slots, count", [
    ("hybrid", 4, 20), nightly("hybrid", 8, 30), nightly("mamba", 4, 20), pytest.param("hybrid", 8, 3000, marks=pytest.mark.nightly)])
def test_a_slot_knows_nothing_of_who_had_it_before(hf, slots, count):
    """States in few slots that are admitted to, stopped in the middle of a call, parked, given up and used again, beside changing neighbours;
    of eight, decoded in four where no more are at work: each turn is what it is with nobody else; a first turn, whose prompt is prefilled in
    both, to the bit."""
    conversations, engine = wandering(np.random.default_rng(3), count), made(hf, slots=slots, compaction=True)
    got = finished(engine, conversations, slots - 1, "crowd")
    counts = engine.counters()
    assert counts["parked"] and counts["extended_prompts"] and counts["evicted"] and counts["parked_past"], counts
    assert (counts["slot_steps"] < counts["decode_steps"] * slots) == (slots > 4), counts
    assert count < 3000 or counts["requests"] + counts["parked"] + counts["parked_past"] + counts["evicted"] > 10_000, counts
    want = finished(engine, conversations, 1, "alone")
    assert got.keys() == want.keys() and len(got) > count
    for (i, turn), r in want.items():
        np.testing.assert_array_equal(got[i, turn].tokens, r.tokens, err_msg=f"{i}/{turn}")
        np.testing.assert_allclose(got[i, turn].logprobs, r.logprobs, rtol=0, atol=1e-5 * (turn > 0), err_msg=f"{i}/{turn}")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["blockwise", "tpu"])
def test_every_attention_extends_a_cache(implementation):
    """Rows of different lengths, padding, a slot that is not there: keys and values are those of prefilling the whole. (TPU's
    kernel interpreted.)"""
    model = models.build(GEMMA | {"num_hidden_layers": 2, "head_dim": 16}, compute_dtype=jnp.float32, scan_layers=False,
                         attention=implementation)
    params, length, (known, new) = random_params(model, 0, 0.1), 48, ((11, 30), (16, 5))
    plain, tokens = dataclasses.replace(model, attention="reference"), np.stack([prompt(i, length) for i in range(2)])
    want = plain.prefill(params, tokens, np.full(2, length))[1]
    start = plain.prefill(params, tokens, np.array(known))[1]
    cache = model.insert(model.init_cache(4, length, jnp.float32), start, np.arange(2), np.array([3, 1]))
    new_ids, positions = np.zeros((3, 16), np.int32), np.tile(length + np.arange(16, dtype=np.int32), (3, 1))
    for row, (i, first, n) in enumerate(zip((0, 1), known, new, strict=True)):
        new_ids[row, :n], positions[row, :n] = tokens[i, first:first + n], first + np.arange(n)
    got = jax.jit(model.extend)(params, new_ids, positions, cache, np.array([3, 1, 4], np.int32))
    for a, b, before in zip(*map(jax.tree.leaves, (got, want, cache)), strict=True):
        for slot, i, end in ((3, 0, 27), (1, 1, 35)):
            np.testing.assert_allclose(a[slot, :end], b[i, :end], atol=1e-5, rtol=1e-5)
        np.testing.assert_array_equal(a[jnp.array([0, 2])], before[jnp.array([0, 2])])


@pytest.fixture(scope="module")
def plain():
    """What prefilling every turn gives of the plain model's conversations."""
    return talk(made(), keep=False)


@pytest.mark.full
def test_new_weights_end_what_is_parked():
    engine, seen = made(), []

    def publish(turn):
        seen.append(engine.health().parked)
        engine.publish(weights(seed=turn), turn)
        seen.append(engine.health().parked)

    said = talk(engine, between=publish)
    assert seen == [len(TURNS), 0] * 2 and engine.counters()["extended_prompts"] == 0
    for turn, pairs in enumerate(said):
        for q, r in pairs:
            assert set(r.versions) == {turn}
            np.testing.assert_allclose(r.logprobs, scored(q, r, seed=turn), atol=1e-5, rtol=0)


@pytest.mark.full
def test_a_turn_across_a_publish_is_not_kept():
    """Its keys and values are of both weights."""
    engine, ids = made(), prompt(3, 9)
    engine.submit([Request("a", ids, SamplingParams(max_new_tokens=8, min_new_tokens=8), seed=1, keep=True)])
    engine.poll(0.0)
    engine.publish(weights(seed=1), 1)
    first = engine.poll(TIMEOUT)[0]
    assert set(first.versions) == {0, 1} and engine.health().parked == 0
    later = Request("b", np.concatenate([ids, first.tokens, prompt(4, 5)]), SamplingParams(max_new_tokens=8), seed=2, after="a")
    result = generate(engine, [later], TIMEOUT)[0]
    np.testing.assert_allclose(result.logprobs, scored(later, result, seed=1), atol=1e-5, rtol=0)


@pytest.mark.full
def test_parked_slots_are_given_up_to_requests_that_wait_the_oldest_first(plain):
    engine = made(slots=3)
    old = [Request(f"old{i}", prompt(i), SamplingParams(max_new_tokens=14 - 4 * i, min_new_tokens=9 - 4 * i), seed=i, keep=True)
           for i in range(3)]
    results = generate(engine, old, TIMEOUT)
    assert [*engine._parked] == ["old2", "old1", "old0"]
    more = Request("more", np.append(np.concatenate([old[2].prompt, results[2].tokens]), 9), old[0].sampling, after="old2", keep=True)
    generate(engine, [more, Request("new", prompt(7), SamplingParams(max_new_tokens=1))], TIMEOUT)
    assert [*engine._parked] == ["old0", "more"], "what waits for a slot does not take that of a conversation that goes on"
    assert engine.counters()["evicted"] == engine.counters()["extended_prompts"] == 1
    assert_equal(talk(engine), plain)  # five conversations, which take each other's slots
    assert 1 < engine.counters()["extended_prompts"] < 2 * len(TURNS) and engine.counters()["evicted"] > 4


@pytest.mark.full
def test_slots_are_free_again_once_nobody_will_come(plain):
    engine = made()

    def parked(how=lambda: None):
        talk(engine, turns=1)
        how()
        return engine.health().parked

    assert parked() == 5 and parked() == 5  # a request of the same id takes the older one's place
    assert parked(lambda: engine.forget(["c0/0", "c3/0", "nobody"])) == 3 and parked(lambda: engine.abort(["c1/0"])) == 4
    assert parked(engine.abort) == parked(engine.sleep) == 0
    engine.publish(weights(), 0)
    engine.submit([Request("cut", prompt(1), SamplingParams(max_new_tokens=20), keep=True)])
    engine.poll(0.0)
    engine.abort()
    assert engine.poll(0.0)[0].finish == "abort" and engine.health().parked == 0
    assert_equal(talk(engine, keep=False), plain)
    driven = ThreadedEngine(engine)
    talk(driven, turns=1)
    driven.forget(["c0/0"])
    assert driven.health().parked == 4
    driven.close()


@pytest.mark.full
@pytest.mark.parametrize("change", ["earlier", "shorter", "other", "twice"])
def test_a_prompt_that_goes_on_otherwise_is_prefilled(change):
    engine = made()
    (q, r), = talk(engine, which=[2], turns=1)[0]
    ids = np.concatenate([q.prompt, r.tokens, prompt(9, 7)])
    if change == "earlier":
        ids[5] ^= 1
    ids = ids[:len(q.prompt) + len(r.tokens) - 1] if change == "shorter" else ids
    name = {"other": "nobody"}.get(change, q.id)
    asked = [Request(f"n{i}", ids, SamplingParams(max_new_tokens=6), seed=i, after=name) for i in range(1 + (change == "twice"))]
    for p, s in zip(asked, generate(engine, asked, TIMEOUT), strict=True):
        np.testing.assert_allclose(s.logprobs, scored(p, s), atol=1e-5, rtol=0)
    counts = engine.counters()
    assert counts["extended_prompts"] == (change == "twice") and counts["prefilled_tokens"] == len(q.prompt) + len(ids)
    assert engine.health().parked == (change == "other")


@pytest.mark.full
def test_what_a_stop_string_cut_off_is_forgotten():
    """The slot holds keys and values of tokens behind the cut; the next turn writes over them."""
    engine, sampling = made(), SamplingParams(max_new_tokens=24, stop=("a", "b", "c", "d"), keep_stop=False)
    ids, kept = prompt(5, 10), 0
    for turn in range(4):
        q = Request(f"s{turn}", ids, sampling, seed=turn, keep=True, after=f"s{turn - 1}" if turn else "")
        r = generate(engine, [q], TIMEOUT)[0]
        kept += r.finish == "stop"
        np.testing.assert_allclose(r.logprobs, scored(q, r), atol=1e-5, rtol=0)
        ids = np.concatenate([ids, r.tokens, prompt(70 + turn, 2)])
    assert kept >= 3 and engine.counters()["extended_prompts"] == 3


@pytest.mark.full
def test_conversations_share_no_tile(monkeypatch):
    """Two with the same tokens: their keys were computed by different calls."""
    engine = made()
    ids, sampling = prompt(1, 9), SamplingParams(max_new_tokens=3, temperature=0.0)
    asked = [Request(f"t{i}", ids, sampling, keep=True) for i in range(2)]
    results = generate(engine, asked, TIMEOUT)
    ids = np.concatenate([ids, results[0].tokens, prompt(2, 4)])
    engine.submit([Request(f"u{i}", ids, sampling, after=f"t{i}") for i in range(2)]
                  + [Request(f"v{i}", ids, sampling) for i in range(2)])
    monkeypatch.setattr(engine._programs, "shares", True)
    engine._admit()
    assert sorted((engine._shared(np.arange(8)).tiles >= 0).sum(axis=1).tolist(), reverse=True) == [2, 1, 1, 0, 0, 0, 0, 0]
    engine.abort()


def many(**options):
    """A config of episodes that would have most programs: three prompt and two cache lengths, four slot counts."""
    cfg = default_config()
    cfg.env.function, cfg.train.max_sequence_tokens = "calc", 4096
    cfg.eval.top_p = 0.9  # programs hold all of sampling
    for name, value in options.items():
        group, _, option = name.partition("__")
        cfg[group][option] = value
    return cfg


def test_lengths_and_programs_of_episodes():
    shapes = from_config(many(), 1, 1, reads_all=True)
    assert shapes.prompt_lengths == (512, 1456, 4095) and shapes.max_total == 4096 and shapes.cache_lengths[-1] == 4096
    assert len(shapes.cache_lengths) == 2 and shapes.slot_counts == (32, 128, 256)  # no program for 8 slots
    assert from_config(many(), 1, 1).slot_counts == (8, 32, 128, 256) and shapes.extend == (8, 64)
    assert from_config(many(env__max_input_tokens=600), 1, 1).prompt_lengths == (512, 600)
    assert from_config(many(train__max_sequence_tokens=0, env__max_turns=2), 1, 1).max_total == 512 + 2 * 1024 + 1024
    assert from_config(many(rollout__prompt_lengths=(64, 512)), 1, 1).prompt_lengths == (64, 512, 4095)
    assert from_config(many(rollout__slots=6), 4, 1).extend == (4, 64)  # whole slots of every data shard
    with pytest.raises(ConfigError, match="later turn of an episode has up to 4095 tokens"):
        from_config(many(rollout__prompt_lengths=(64, 128, 512)), 1, 1)


@pytest.mark.slow
def test_a_run_of_several_turns_has_at_most_twelve_programs():
    """What a run compiled, and what it would if all else that may come did."""
    cfg = many(data__max_prompt_tokens=16, train__max_sequence_tokens=480, rollout__max_new_tokens=320, rollout__slots=128)
    shapes = from_config(cfg, 1, 1, reads_all=True)
    assert len(shapes.prompt_lengths) == 3 and len(shapes.cache_lengths) == 2
    engine = EmbeddedEngine(built(), shapes, make_mesh(cfg.mesh, jax.local_devices()[:1]), None, (END,))
    engine.publish(weights(), 0)
    said = talk(engine, turns=2)
    assert ("extend",) in engine._programs.compiled and engine.counters()["extended_tokens"] == new_tokens(said)
    for coming in engine._programs.compiler.coming.values():
        coming.cancel()
    engine._programs.compiler.coming.clear()
    assert engine.health().compiled + len(list(engine._calls(0))) == PROGRAMS == 12


@pytest.mark.full
def test_a_plan_counts_the_program():
    c = tiny_job.get_config()
    c.run.mode, c.plan.target = "plan", "cpu:2"
    assert "extend" not in cases.open_case(c).programs
    c.env.function = "calc"
    case = cases.open_case(c)
    assert case.programs[-2:] == ["extend", "decode"]
    counted = memory.counted_programs(case.config, case.model, case.mesh, case.rollout, ["extend"])["extend"]["temporaries"]
    mesh = make_mesh(case.config.mesh, jax.local_devices()[:1])
    found = lower(case.config, case.hf_config, mesh, mesh, wanted={"extend"}).programs["extend"].compile().memory_analysis()
    assert found.temp_size_in_bytes / 2 < counted < 3 * found.temp_size_in_bytes


SHARDED = """
    import jax, numpy as np
    jax.config.update("jax_default_matmul_precision", "highest")
    from helpers.rollout_helpers import config
    from test_parked import made, scored, talk, new_tokens
    from jaxrl.sharding import make_mesh
    cfg = config()
    cfg.mesh.update({"dp": 1, "fsdp": 1, "tp": 1, AXIS: 2})
    engine = made(mesh=make_mesh(cfg.mesh))
    said = talk(engine)
    gap = max(np.abs(r.logprobs - scored(q, r)).max() for turn in said for q, r in turn)
    held = sum(a.nbytes for a in jax.tree.leaves(engine._cache)) / 2
    program, counts = engine._programs.compiled[("extend",)], engine.counters()
    whole = f"{engine.shapes.slots // cfg.mesh.dp},{engine.shapes.cache_lengths[-1]},"
    copied = sum("all-gather" in line and whole in line for line in program.as_text().splitlines())
    print("RESULT", gap, counts["extended_tokens"] - new_tokens(said), counts["prefilled_prompts"], counts["compiled"],
          program.memory_analysis().alias_size_in_bytes / held, program.memory_analysis().temp_size_in_bytes / held, copied)
"""


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["dp", pytest.param("tp", marks=pytest.mark.nightly)])
def test_on_a_mesh_of_two_devices(axis):
    """Slots over dp, heads over tp: the cache is extended in place, each device its own part."""
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu",
           "PYTHONPATH": os.pathsep.join(sys.path)}
    code = textwrap.dedent(SHARDED).replace("AXIS", repr(axis))
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-3000:]
    gap, extra, prefilled, compiled, alias, temp, copied = map(float, out.stdout.split("RESULT")[1].split())
    assert gap < 1e-5 and extra == 0 and prefilled == 5 and compiled == 6 and alias == 1 and temp < 1 and copied == 0
