"""The embedded sampler: bitwise independence, static shapes, scheduling, weights, devices."""

import dataclasses
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.rollout_helpers import (
    END,
    config,
    engine,
    log_softmax,
    model,
    params,
    prompt,
    random_params,
    redraw,
    requests,
    teacher_logits,
)

from jaxrl import models
from jaxrl.config.load import default_config
from jaxrl.errors import ConfigError
from jaxrl.rollout import EngineContext, Key, Request, SamplingParams, generate, make_engine
from jaxrl.rollout.programs import compiles_ahead, programs
from jaxrl.rollout.shapes import ALL, PLAIN, from_config, work_of
from jaxrl.telemetry.compilations import Compilations

TIMEOUT = 600.0


@pytest.fixture(scope="module")
def fixed():
    """One slot count, one cache length: the shapes under which samples are bitwise reproducible."""
    made = engine(compaction=False)
    yield made
    made.close()


@pytest.fixture(scope="module")
def compact():
    made = engine(slots=64, prompt_lengths=(8, 20), cache_lengths=(32, 44), decode_steps=8)
    yield made
    made.close()


def assert_same(a, b):
    assert a.id == b.id and a.finish == b.finish
    for x, y in ((a.tokens, b.tokens), (a.logprobs, b.logprobs), (a.log_kept_mass, b.log_kept_mass)):
        np.testing.assert_array_equal(x, y)


def mixed_requests(count):
    """Groups of four; every third request truncated, every fifth penalised, every seventh greedy."""
    out = []
    for i, r in enumerate(requests(count, seed=21, prompts=count // 4)):
        options = {"top_p": 0.8, "top_k": 11} if i % 3 == 0 else {"repetition_penalty": 1.3} if i % 5 == 0 else {}
        options |= {"temperature": 0.0} if i % 7 == 0 else {}
        sampling = dataclasses.replace(r.sampling, max_new_tokens=1 + i % 24, **options)
        out.append(dataclasses.replace(r, sampling=sampling))
    return out


def test_samples_are_bitwise_the_same_under_permutation_refill_and_other_neighbours(fixed):
    asked = mixed_requests(60)  # 16 slots: most requests enter a slot that another one left
    first = {r.id: r for r in generate(fixed, asked, TIMEOUT)}
    rng = np.random.default_rng(0)
    shuffled = [asked[i] for i in rng.permutation(len(asked))]
    for order in (asked[::-1], shuffled, asked[17:24], [asked[40]]):
        for r in generate(fixed, order, TIMEOUT):
            assert_same(r, first[r.id])
    others = [dataclasses.replace(r, id=f"other {i}", prompt=prompt(900 + i), seed=i) for i, r in enumerate(asked)]
    between = [r for pair in zip(others, asked, strict=True) for r in pair]
    for r in generate(fixed, between, TIMEOUT):
        if r.id in first:
            assert_same(r, first[r.id])


@pytest.mark.slow
def test_programs_hold_what_the_options_ask_for_and_a_request_may_ask_for_more(fixed):
    """A run without penalties and cut-offs does not compile them; requests of one's own may still use them."""
    plainest = config(compaction=False)
    plainest.eval.top_p = 1.0
    asked, least = mixed_requests(24), make_engine(EngineContext(plainest, model(), eos_ids=(END,)))
    least.publish(params(), 0)
    plain = [r for r in asked if work_of(r.sampling, 0) == PLAIN]
    assert (least.shapes.work, len(plain) > 4) == (PLAIN, True)
    want = {r.id: r for r in generate(fixed, asked, TIMEOUT)}
    for some, work in ((plain, PLAIN), (asked, ALL), (plain, ALL)):
        for r in generate(least, some, TIMEOUT):
            assert_same(r, want[r.id])
        assert least.shapes.work == work
        kinds = {key[0] for key in least._programs.compiled}
        assert {"caches", "publish", "prefill", "insert", "decode"} <= kinds  # what does not sample is not compiled again
    least.close()


@pytest.mark.full
def test_the_draw_repeated_in_float64_gives_the_same_tokens_beyond_a_margin(fixed):
    asked = requests(40, seed=22, top_p=0.9)
    close = total = 0
    for a, r in zip(asked, generate(fixed, asked, TIMEOUT), strict=True):
        for i, (token, logits) in enumerate(zip(r.tokens, teacher_logits(a.prompt, r.tokens), strict=True)):
            again, margin = redraw(logits, a.sampling, a.seed, i)
            assert again == token or margin < 1e-4
            close += margin < 1e-4
            total += 1
    assert total > 300 and close < 0.01 * total


@pytest.mark.slow
def test_batch_one_and_sixty_four_agree_to_the_margin(compact):
    asked = requests(64, seed=23)
    narrow = engine(slots=1, decode_steps=24, prompt_lengths=(20,))
    for a, b in zip(asked, generate(compact, asked, TIMEOUT), strict=True):
        one = generate(narrow, [a], TIMEOUT)[0]
        n = min(len(one.tokens), len(b.tokens))
        differ = np.flatnonzero(one.tokens[:n] != b.tokens[:n])
        if len(differ):
            n = int(differ[0])
            assert redraw(teacher_logits(a.prompt, b.tokens)[n], a.sampling, a.seed, n)[1] < 1e-4
        else:
            assert len(one.tokens) == len(b.tokens)
        np.testing.assert_allclose(one.logprobs[:n], b.logprobs[:n], atol=1e-4)
    narrow.close()


@pytest.mark.slow
def test_nothing_compiles_after_warm_up(compact):
    """Listens to jax itself: training, evaluation, every option, other batch sizes and new weights share programs."""
    compiled, listening = [], [True]

    def listen(event, *_, **__):
        if listening[0] and event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.jit(lambda x: x + 12345)(1.0)
    assert compiled  # it does hear compilations
    other = params(1)
    for asked in (mixed_requests(160), requests(40, seed=24), mixed_requests(4)):
        generate(compact, asked, TIMEOUT)
    programs, compiled[:] = compact.counters()["compiled"], []
    for weights in (params(0), other, params(0)):
        compact.publish(weights, 1)
        for asked in (requests(150, seed=24), requests(3, seed=25), mixed_requests(36),
                      requests(90, seed=26, temperature=0.0, stop=("a", "cu"), min_new_tokens=2)):
            generate(compact, asked, TIMEOUT)
    listening[0] = False
    assert compiled == [] and compact.counters()["compiled"] == programs
    assert programs == 10  # caches, publish, insert; 2 prompt lengths; 64 and 32 slots with 2 cache lengths each, 8 with one


def test_a_groups_prompt_is_prefilled_once(fixed):
    before = fixed.counters()
    generate(fixed, requests(48, seed=27, prompts=6), TIMEOUT)
    grown = {k: v - before[k] for k, v in fixed.counters().items()}
    assert grown["prefilled_prompts"] == 6


@pytest.mark.slow
def test_the_tail_moves_through_smaller_slot_counts(compact):
    """64 answers of 1 to 24 tokens, together: 24 steps of 64 slots without compaction."""
    lengths = [1 + i * 24 // 64 for i in range(64)]
    asked = [dataclasses.replace(r, sampling=SamplingParams(max_new_tokens=n, min_new_tokens=n))
             for r, n in zip(requests(64, seed=28, prompts=16), lengths, strict=True)]
    before = compact.counters()
    results = generate(compact, asked, TIMEOUT)
    grown = {k: v - before[k] for k, v in compact.counters().items()}
    assert grown["tokens"] == sum(len(r.tokens) for r in results) == sum(lengths)
    assert grown["slot_steps"] < 0.75 * 24 * 64 and grown["decode_steps"] == 24
    for a, r in zip(asked, results, strict=True):
        want = log_softmax(teacher_logits(a.prompt, r.tokens))
        np.testing.assert_allclose(r.logprobs, want[np.arange(len(r.tokens)), r.tokens], atol=1e-4)


@pytest.mark.full
def test_slots_stay_busy_while_requests_wait(compact):
    """Long-tailed lengths: at most 1.15 slot-steps per token before the queue is empty."""
    lengths = np.clip(np.random.default_rng(3).lognormal(1.8, 0.8, 600), 1, 24).astype(int)
    asked = [dataclasses.replace(r, sampling=SamplingParams(max_new_tokens=int(n), min_new_tokens=int(n))) for r, n in
             zip(requests(600, seed=29, prompts=150), lengths, strict=True)]
    before = compact.counters()
    results = generate(compact, asked, TIMEOUT)
    assert [len(r.tokens) for r in results] == lengths.tolist()
    grown = {k: v - before[k] for k, v in compact.counters().items()}
    assert grown["tokens_queued"] > 0.8 * lengths.sum()
    assert grown["slot_steps_queued"] / grown["tokens_queued"] <= 1.15


@pytest.mark.full
def test_every_static_length_agrees_with_the_scorer(compact):
    compact.publish(params(), 2)
    asked = [Request(f"r{n}", prompt(n, n), SamplingParams(max_new_tokens=24), seed=n) for n in range(1, 21)]
    for a, r in zip(asked, generate(compact, asked, TIMEOUT), strict=True):
        want = log_softmax(teacher_logits(a.prompt, r.tokens))
        np.testing.assert_allclose(r.logprobs, want[np.arange(len(r.tokens)), r.tokens], atol=1e-4)
    assert {("prefill", 8), ("prefill", 20), ("decode", 64, 32), ("decode", 64, 44)} <= set(compact._programs.compiled)


@pytest.mark.slow
def test_once_requests_differ_every_program_is_there_before_it_is_needed():
    made, beside = engine(slots=16, prompt_lengths=(4, 8, 20), cache_lengths=(32, 44)), Compilations()
    generate(made, [Request("alone", prompt(3, 6), SamplingParams(max_new_tokens=4), seed=1)], TIMEOUT)
    made.publish(params(), 0)
    assert not made._programs.compiler.coming, "nothing is known of what else may come"
    other = [dataclasses.replace(requests(1)[0], id=f"other{n}", prompt=prompt(3, n)) for n in (20, 6)]
    first = generate(made, other, TIMEOUT)
    made.publish(params(), 1)
    assert all(coming.result() for coming in made._programs.compiler.coming.values())
    before = Compilations()
    lengths = {f"r{n}": n for n in (3, 12, 20)}  # of both prompt lengths and with both cache lengths
    asked = [Request(id, prompt(n, n), SamplingParams(max_new_tokens=24, min_new_tokens=24), seed=n) for id, n in lengths.items()]
    asked += [Request(f"short{i}", prompt(i, 5), SamplingParams(max_new_tokens=3), seed=i) for i in range(13)]
    results = generate(made, asked, TIMEOUT)
    for a, b in zip(generate(made, other, TIMEOUT), first, strict=True):
        assert_same(a, b)
    assert before.total.waited == 0 < beside.total.background, "compiled when it was needed"
    assert [len(r.tokens) for r in results[:3]] == [24] * 3
    assert {("prefill", 4), ("prefill", 8), ("prefill", 20), ("decode", 16, 32), ("decode", 8, 44)} <= set(made._programs.compiled)
    made.close()
    other = engine(slots=32, prompt_lengths=(20,), cache_lengths=(32, 44))
    generate(other, [Request(f"r{n}", prompt(n, 3), SamplingParams(max_new_tokens=n), seed=n) for n in range(1, 9)], TIMEOUT)
    other.publish(params(), 1)
    assert all(coming.result() for coming in other._programs.compiler.coming.values())
    assert set(other._programs.compiler.coming) >= {("decode", 32, 32), ("decode", 32, 44), ("decode", 4, 44)} - set(other._programs.compiled)
    other.close()


def test_the_first_programs_are_compiled_while_the_weights_are_published(fixed, monkeypatch):
    """As on accelerators of one process: decoding, and the prefill of the one prompt length."""
    assert not fixed._programs.ahead and compiles_ahead("gpu", 1) and not compiles_ahead("gpu", 2) and not compiles_ahead("cpu", 1)
    made = engine(publish=False, compaction=False, cache_lengths=(48,), prompt_lengths=(20,))
    monkeypatch.setattr(made._programs, "ahead", True)
    begun: list = []
    monkeypatch.setattr(made._programs.compiler, "begin", lambda key, *_: begun.append(key))
    made.publish(params(), 0)
    assert begun == [("decode", 16, 48), ("prefill", 20)] and not {"decode", "prefill"} & {kind for kind, *_ in made._programs.compiled}
    made.close()


def test_an_engine_whose_first_weights_did_not_come_is_not_ready_and_closes(monkeypatch):
    def full(params):
        raise MemoryError("no room for the weights")

    made = engine(publish=False, compaction=False, cache_lengths=(48,), prompt_lengths=(20,))
    for name, value in (("ahead", True), ("publish", full)):
        monkeypatch.setattr(made._programs, name, value)
    monkeypatch.setattr(made._programs.compiler, "begin", lambda key, *_: None)
    with pytest.raises(MemoryError, match="no room"):
        made.publish(params(), 0)
    assert not made.health().ok
    made.close()


@pytest.mark.full
def test_samples_do_not_depend_on_who_compiles(monkeypatch):
    found, count = [], Compilations()
    for ahead in (True, False):
        programs.cache_clear()
        made = engine(publish=False, compaction=False, cache_lengths=(48,), prompt_lengths=(20,))
        monkeypatch.setattr(made._programs, "ahead", ahead)
        made.publish(params(), 0)
        for coming in made._programs.compiler.coming.values():
            coming.result()
        count.take()
        found.append(generate(made, requests(16, prompts=4), TIMEOUT))
        assert count.take().waited == (1 if ahead else 3)  # insert alone, or prefill and decode, too
        made.close()
    for a, b in zip(*found, strict=True):
        assert_same(a, b)


@pytest.mark.full
def test_the_cache_is_updated_in_place(compact):
    held = sum(a.nbytes for a in jax.tree.leaves(compact._cache))
    programs = compact._programs.compiled
    for key in (("decode", 64, 44), ("decode", 64, 32), ("decode", 32, 44), ("decode", 8, 44), ("insert",)):
        assert programs[key].memory_analysis().alias_size_in_bytes == held
    before = jax.tree.leaves(compact._cache)
    generate(compact, requests(1), TIMEOUT)
    assert all(a.is_deleted() for a in before)


@pytest.mark.slow
def test_bf16_engine_with_a_copy_of_the_weights_and_a_bound_on_total_length():
    cfg = config(slots=8, dtype="bf16", prompt_lengths=(20,))
    cfg.train.max_sequence_tokens = 25
    made = make_engine(EngineContext(cfg, model()))
    source = jax.tree.map(jnp.array, params())
    made.publish(source, 0)
    jax.tree.map(lambda a: a.delete(), source)  # what donation to the update does
    asked = [Request(f"r{n}", prompt(n, n), SamplingParams(max_new_tokens=24), seed=n) for n in (1, 5, 20)]
    results = generate(made, asked, TIMEOUT)
    assert [(len(r.tokens), r.finish) for r in results] == [(24, "length"), (20, "length"), (5, "length")]
    for a, r in zip(asked, results, strict=True):
        want = log_softmax(teacher_logits(a.prompt, r.tokens))[np.arange(len(r.tokens)), r.tokens]
        assert 1e-6 < np.abs(r.logprobs - want).max() < 1.0  # it did decode in bf16
    assert all(a.dtype == jnp.bfloat16 for a in jax.tree.leaves((made._params, made._cache)))
    with pytest.raises(ValueError, match="tokenizer"):
        made.submit([Request("s", prompt(1), SamplingParams(stop=("a",)))])
    made.close()


def test_weights_that_are_not_finite_are_an_error_and_leave_nothing_behind(fixed):
    bad = jax.tree.map(lambda a: a * jnp.nan, params())
    good = generate(fixed, requests(8, seed=31), TIMEOUT)
    fixed.publish(bad, 5)
    with pytest.raises(RuntimeError, match="non-finite log-probs under weight version 5"):
        generate(fixed, requests(8, seed=31), TIMEOUT)
    assert all(r.finish == "abort" for r in fixed.poll(0.0))
    fixed.publish(params(), 0)
    for a, b in zip(good, generate(fixed, requests(8, seed=31), TIMEOUT), strict=True):
        assert_same(a, b)


@pytest.mark.slow
def test_windows_soft_caps_and_scanned_layers_agree_with_the_scorer():
    m = models.build(dict(model_type="gemma2", vocab_size=100, hidden_size=32, intermediate_size=48,
                          num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
                          head_dim=12, query_pre_attn_scalar=20, sliding_window=5, attn_logit_softcapping=3.0,
                          final_logit_softcapping=4.0), compute_dtype=jnp.float32, scan_layers=True)
    weights = random_params(m, 2, 0.3)
    made = make_engine(EngineContext(config(slots=16, compaction=False, prompt_lengths=(20,)), m, eos_ids=(END,)))
    made.publish(weights, 0)
    asked = requests(20, seed=32)
    results = generate(made, asked, TIMEOUT)
    whole = np.zeros((20, 48), np.int32)
    for i, (a, r) in enumerate(zip(asked, results, strict=True)):
        whole[i, :len(a.prompt) + len(r.tokens)] = np.concatenate([a.prompt, r.tokens])
    where = np.broadcast_to(np.arange(48), whole.shape)
    logits = jax.jit(lambda *a: m.logits(weights, m.hidden(weights, *a)))(whole, where, np.ones_like(whole), 0 * whole)
    logp = log_softmax(np.asarray(logits, np.float64))
    for i, (a, r) in enumerate(zip(asked, results, strict=True)):
        at = len(a.prompt) - 1 + np.arange(len(r.tokens))
        np.testing.assert_allclose(r.logprobs, logp[i, at, r.tokens], atol=1e-4)
    made.close()


SHARDED = """
    import jax, numpy as np
    jax.config.update("jax_default_matmul_precision", "highest")
    from helpers.rollout_helpers import config, engine, log_softmax, requests, teacher_logits
    from jaxrl.rollout import generate
    from jaxrl.sharding import make_mesh
    cfg = config()
    cfg.mesh.update({"dp": 2, "fsdp": 1, "tp": 2})
    made = engine(mesh=make_mesh(cfg.mesh), prompt_lengths=(20,))
    asked = requests(40, seed=33, prompts=10)
    gap = 0.0
    for a, r in zip(asked, generate(made, asked, 300)):
        want = log_softmax(teacher_logits(a.prompt, r.tokens))[np.arange(len(r.tokens)), r.tokens]
        gap = max(gap, np.abs(want - r.logprobs).max())
    held = lambda tree: (sum(a.addressable_shards[0].data.size for a in jax.tree.leaves(tree))
                         / sum(a.size for a in jax.tree.leaves(tree)))
    print("RESULT", gap, held(made._cache), held(made._params), made.counters()["compiled"])
"""


@pytest.mark.slow
def test_slots_over_data_axes_and_heads_over_tp():
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu",
           "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))}
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(SHARDED)], env=env, capture_output=True, text=True,
                         timeout=300)
    assert out.returncode == 0, out.stderr[-3000:]
    gap, cache, weights, compiled = map(float, out.stdout.split("RESULT")[1].split())
    assert gap < 1e-4 and cache == 0.25 and 0.5 <= weights < 0.55  # dp x tp; tp, with the norms whole
    assert compiled == 6  # caches, publish, prefill, insert, two slot counts


def shapes(shards=1, reads_all=False, **rollout):
    cfg = default_config()
    cfg.rollout.update(rollout)
    return from_config(cfg, shards, 1, reads_all=reads_all)


def test_shapes_come_from_the_config():
    s = shapes()
    assert s.slot_counts == (8, 32, 128, 256) and s.prompt_lengths == (128, 256, 512) and s.cache_lengths == (1536,)
    assert s.prefill_rows == 32 and s.insert_width == 16 and s.max_total == 1536
    assert shapes(compaction=False).slot_counts == (256,)
    assert shapes(slots=10, shards=4).slots == 12 and all(n % 4 == 0 for n in shapes(slots=100, shards=4).slot_counts)
    assert shapes(prompt_lengths=(512, 64), cache_lengths=(2000, 256)).cache_lengths == (256, 2000)
    assert shapes(reads_all=True).cache_lengths == (512 + 384, 1536)  # a prompt and three eighths of the longest answer
    assert shapes(reads_all=True, compaction=False).cache_lengths == (1536,)
    assert shapes(reads_all=True, max_new_tokens=255).cache_lengths == (768,)


@pytest.mark.parametrize("rollout,message", [
    (dict(prompt_lengths=(64,)), "rollout.prompt_lengths=.*data.max_prompt_tokens=512"),
    (dict(cache_lengths=(512, 1024)), "rollout.cache_lengths=.*1536 tokens"),
    (dict(cache_lengths=(1, 2, 3, 1536)), "rollout.cache_lengths=.*at most 3"),
    (dict(prompt_lengths=(0, 512)), "rollout.prompt_lengths=.*positive")])
def test_lengths_that_cannot_work_are_refused(rollout, message):
    with pytest.raises(ConfigError, match=message):
        shapes(**rollout)


def test_request_seeds_are_fixed_forever_and_differ_everywhere():
    assert Key("train", 1, 2, 3).seed(0) == 2991110303 and str(Key("train", 1, 2, 3)) == "train/1/2/3"
    keys = [Key(n, s, p, k, t) for n in ("train", "eval/test") for s in range(5) for p in range(20) for k in range(4) for t in range(2)]
    seeds = {key.seed(r) for r in (0, 1) for key in keys}
    assert len(seeds) == 2 * len(keys) and all(0 <= s < 2**32 for s in seeds) and len({str(key) for key in keys}) == len(keys)
    assert Key("a", 2, 3, 4).seed(1) != Key("a", 23, 3, 4).seed(1)


def test_more_stop_tokens_than_the_static_shapes_hold_are_refused(fixed):
    with pytest.raises(ValueError, match="'r0': 30 stop_token_ids, at most"):
        fixed.submit(requests(1, stop_token_ids=tuple(range(30))))


def test_counters_add_up(fixed):
    before = fixed.counters()
    results = generate(fixed, requests(20, seed=14), 600.0)
    grown = {k: v - before[k] for k, v in fixed.counters().items()}
    assert grown["requests"] == grown["finished"] == 20 and grown["aborted"] == 0
    assert grown["tokens"] == sum(len(r.tokens) for r in results) <= grown["slot_steps"]
