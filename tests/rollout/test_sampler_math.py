"""The pure sampling functions against oracles: supports, penalties, draws, independence of neighbours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.rollout_helpers import log_softmax, support
from helpers.tiers import first_cases, nightly
from scipy import stats

from jaxrl.rollout import SamplingParams
from jaxrl.rollout.sampling import (
    Controls,
    fold_lanes,
    from_ordered_bits,
    invert,
    lanes_for,
    ordered_bits,
    penalise,
    random_words,
    sample,
    support_floor,
)
from jaxrl.rollout.shapes import BANS, PLAIN


def controls(count, **values):
    base = dict(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, repetition=1.0, frequency=0.0, minimum=0, seed=0)
    kinds = dict(top_k=np.int32, minimum=np.int32, seed=np.uint32)
    rows = {k: np.broadcast_to(np.asarray(v, kinds.get(k, np.float32)), (count,)) for k, v in (base | values).items()
            if k != "end_ids"}
    return Controls(**rows, end_ids=np.asarray(values.get("end_ids", np.full((count, 3), -1)), np.int32))


jitted = jax.jit(sample)


def draw_many(logits, count, **options):
    """`count` tokens of one distribution [V], each with its own seed, 512 slots at a time."""
    out = [[], [], []]
    for start in range(0, count, 512):
        rows = np.broadcast_to(np.asarray(logits, np.float32), (512, len(logits)))
        got = jitted(rows, np.zeros(512, np.int32), np.zeros(512, np.int32), np.zeros((512, 8), np.int32),
                     controls(512, seed=np.arange(start, start + 512), **options))
        for column, values in zip(out, got[:3], strict=True):
            column.append(np.asarray(values))
    return [np.concatenate(column)[:count] for column in out]


def chi_square(tokens, prob):
    """p-value of the counts under `prob`, rare tokens pooled."""
    counts, expected = np.bincount(tokens, minlength=len(prob)), prob * len(tokens)
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    return stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1) if len(counts) > 1 else 1.0


OPTIONS = [{}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.05},
           {"temperature": 1.3, "top_p": 0.9, "top_k": 20, "min_p": 0.01}]


@first_cases(1, "vocab, options", [(97, OPTIONS[-1]), *((97, options) for options in OPTIONS[:-1]), *(nightly(256, options) for options in OPTIONS)],
             ids=str)
def test_draws_follow_the_truncated_distribution(vocab, options):
    logits = np.random.default_rng(vocab).normal(size=vocab) * 2
    p = SamplingParams(**options)
    keep = support(logits, p)
    logp = log_softmax(logits / p.temperature)
    prob = np.where(keep, np.exp(logp), 0) / np.exp(logp)[keep].sum()
    tokens, logprobs, kept = draw_many(logits, 20000, **options)
    assert keep[tokens].all()
    assert chi_square(tokens, prob) > 1e-3
    np.testing.assert_allclose(logprobs, logp[tokens], atol=2e-6)
    np.testing.assert_allclose(kept, np.log(np.exp(logp)[keep].sum()) if p.truncated else 0.0, atol=2e-6)


def test_wrong_distribution_fails_the_chi_square():
    logits = np.random.default_rng(0).normal(size=97) * 2
    tokens, _, _ = draw_many(logits, 20000)
    assert chi_square(tokens, np.exp(log_softmax(logits * 1.05))) < 1e-6


@pytest.mark.full
def test_floor_matches_a_sort_on_random_options():
    rng, count, vocab = np.random.default_rng(1), 200, 97
    logits = (rng.normal(size=(count, vocab)) * rng.uniform(0.1, 8, (count, 1))).astype(np.float32)
    top_p, top_k = rng.choice([1.0, 0.1, 0.5, 0.99], count), rng.choice([-1, 1, 5, 97, 500], count)
    min_p = rng.choice([0.0, 0.02, 0.5, 1.0], count)
    floor = jax.jit(support_floor)(logits, controls(count, top_p=top_p, top_k=top_k, min_p=min_p))
    for i in range(count):
        p = SamplingParams(top_p=top_p[i], top_k=int(top_k[i]), min_p=min_p[i])
        got = logits[i] >= np.asarray(floor)[i]
        want = support(logits[i].astype(np.float64), p)
        np.testing.assert_array_equal(got, want, err_msg=f"row {i}: {p}")


@pytest.mark.full
def test_ties_with_the_last_kept_token_stay():
    logits = np.array([[3.0, 1.0, 1.0, 1.0, 0.0]], np.float32)
    floor = support_floor(jnp.asarray(logits), controls(1, top_k=2))
    np.testing.assert_array_equal(logits[0] >= np.asarray(floor)[0], [True, True, True, True, False])


def test_ordered_bits_keep_the_order_of_floats():
    x = np.concatenate([np.random.default_rng(0).normal(size=500) * 10.0 ** np.arange(-25, 25).repeat(10),
                        [-np.inf, np.inf, -0.0, 0.0]]).astype(np.float32)
    x = x[np.lexsort((~np.signbit(x), x))]  # -0.0 before 0.0: the order of equal values is the processor's otherwise
    keys = np.asarray(ordered_bits(jnp.asarray(x)))
    assert (np.diff(keys.astype(np.int64)) >= 0).all() and (np.diff(keys)[np.diff(x) > 0] > 0).all()
    np.testing.assert_array_equal(np.asarray(from_ordered_bits(jnp.asarray(keys))), x)


def test_invert_never_returns_a_weightless_index():
    """Also at both ends of the word's range, where u rounds to 0 and to 1, and with tiny weights (normal floats)."""
    rng = np.random.default_rng(2)
    sizes = (1 + rng.random((4000, 37))) * 10.0 ** rng.integers(-37, 3, (4000, 37))
    weights = np.where(rng.random((4000, 37)) < 0.3, sizes, 0)
    weights[:, 5] = np.maximum(weights[:, 5], 1e-30)
    words = rng.choice([0, 1, 2**31, 2**32 - 2**7, 2**32 - 1], 4000).astype(np.uint32)
    weights = weights.astype(np.float32)
    index = np.asarray(jax.jit(invert)(weights, words))
    assert (weights[np.arange(4000), index] > 0).all()
    low, high = words == 0, words == 2**32 - 1
    np.testing.assert_array_equal(index[low], (weights[low] > 0).argmax(1))
    heavy = weights > 1e-6 * weights.sum(1, keepdims=True)  # the last index that a running sum can still see
    assert (index[high] >= 36 - heavy[high, ::-1].argmax(1)).all()


@pytest.mark.parametrize("vocab", [5, 97, 128, 256, 8192, 151936])
def test_lanes_hold_every_token_once(vocab):
    lanes = lanes_for(vocab)
    folded = np.asarray(fold_lanes(jnp.arange(vocab, dtype=jnp.float32)[None]))[0]
    row, lane = np.divmod(np.arange(vocab), lanes)
    np.testing.assert_array_equal(folded[row, lane], np.arange(vocab))
    assert np.isneginf(folded).sum() == folded.size - vocab


def test_random_words_depend_on_seed_and_index_alone():
    seed, index = np.array([3, 4, 3, 3], np.uint32), np.array([0, 0, 1, 0], np.int32)
    words = np.asarray(random_words(seed, index))
    key = jax.random.fold_in(jax.random.key(4, impl="threefry2x32"), 0)
    np.testing.assert_array_equal(words[1], jax.random.key_data(key))
    np.testing.assert_array_equal(words[0], words[3])
    assert len({tuple(w) for w in words.tolist()}) == 3
    seeds, indices = np.arange(4096, dtype=np.uint32).repeat(16), np.tile(np.arange(16, dtype=np.int32), 4096)
    many = np.asarray(random_words(seeds, indices))
    for column in many.T / 2.0**32:  # uniform over seeds and indices, and the two words of a draw unrelated
        assert stats.kstest(column, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(many.T.astype(float))[0, 1]) < 4 / np.sqrt(len(many))


@pytest.mark.full
def test_penalties_match_a_loop():
    rng, slots, vocab, length = np.random.default_rng(3), 6, 20, 12
    logits = rng.normal(size=(slots, vocab)).astype(np.float32)
    history, position = rng.integers(0, vocab, (slots, length)).astype(np.int32), np.array([0, 3, 11, 7, 5, 5])
    produced = np.array([0, 2, 5, 7, 0, 3])
    repetition, frequency = np.array([1.3, 2.0, 0.7, 1.0, 1.5, 1.0]), np.array([0, 0.5, -0.25, 1.0, 2.0, 0.0])
    got = penalise(logits, produced, position, history, controls(slots, repetition=repetition, frequency=frequency))
    for s in range(slots):
        want = logits[s].astype(np.float64)
        for v in set(history[s, :position[s] + 1].tolist()):  # prompt and answer
            want[v] = want[v] / repetition[s] if want[v] > 0 else want[v] * repetition[s]
        for v in history[s, position[s] + 1 - produced[s]:position[s] + 1]:  # answer only
            want[v] -= frequency[s]
        np.testing.assert_allclose(np.asarray(got)[s], want, atol=1e-6)


def test_end_tokens_are_barred_before_the_minimum_and_counted_in_kept():
    logits = np.zeros(97)
    logits[5] = 6.0
    end_ids = np.broadcast_to([5, 9, -1], (512, 3))
    tokens, logprobs, kept = draw_many(logits, 2048, minimum=1, end_ids=end_ids)
    logp = log_softmax(logits)
    assert not np.isin(tokens, [5, 9]).any() and (tokens == 96).any()
    np.testing.assert_allclose(logprobs, logp[tokens], atol=2e-6)
    np.testing.assert_allclose(kept, np.log(1 - np.exp(logp[5]) - np.exp(logp[9])), atol=2e-6)
    assert (draw_many(logits, 512, minimum=0, end_ids=end_ids)[0] == 5).mean() > 0.7


def test_greedy_takes_the_first_best_token_and_reports_temperature_one():
    logits = np.random.default_rng(4).normal(size=97)
    logits[[11, 40]] = logits.max() + 1
    tokens, logprobs, kept = draw_many(logits, 512, temperature=0.0, top_p=0.5, top_k=3)
    assert (tokens == 11).all() and (kept == 0).all()
    np.testing.assert_allclose(logprobs, log_softmax(logits)[11], atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("vocab", [97, 256])
def test_a_slot_never_feels_what_its_neighbours_ask_for(vocab):
    """Bitwise: plain slots alone, then among slots that use every option there is, then in another order."""
    rng, slot = np.random.default_rng(5), np.arange(512)
    odd = slot % 2 == 1
    logits = (rng.normal(size=(512, vocab)) * 3).astype(np.float32)
    plain = dict(temperature=np.full(512, 0.8), seed=slot)
    mixed = dict(plain, top_p=np.where(odd, 0.7, 1), top_k=np.where(odd, 9, -1), min_p=np.where(odd, 0.1, 0),
                 repetition=np.where(odd, 1.5, 1), frequency=np.where(odd, 0.5, 0), minimum=np.where(odd, 9, 0),
                 end_ids=np.tile([3, 4, -1], (512, 1)))
    mixed["temperature"] = np.where(slot % 4 == 3, 0, 0.8)
    where = (np.full(512, 2, np.int32), np.full(512, 6, np.int32), rng.integers(0, vocab, (512, 8)).astype(np.int32))
    alone = jitted(logits, *where, controls(512, **plain))
    among = jitted(logits, *where, controls(512, **mixed))
    for a, b in zip(alone, among, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[::2], np.asarray(b)[::2])
    least = jax.jit(functools.partial(sample, work=PLAIN))(logits, *where, controls(512, **plain))
    for a, b in zip(alone, least, strict=True):
        np.testing.assert_array_equal(a, b)
    turned = jitted(logits[::-1], where[0], where[1], where[2][::-1],
                    Controls(*(c[::-1] for c in controls(512, **mixed))))
    for a, b in zip(turned, among, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[::-1], np.asarray(b))


@pytest.mark.full
@pytest.mark.parametrize("support", [0, 4])
def test_a_slot_that_may_not_end_never_feels_what_its_neighbours_ask_for(support):
    """Bitwise: slots with nothing but barred end tokens alone, then among slots with cut-offs and penalties. The end
    token has nearly all of the mass, or all that a float32 can hold."""
    rng, slot = np.random.default_rng(6), np.arange(512)
    odd, draw = slot % 2 == 1, jax.jit(sample, static_argnums=(5, 6))
    logits = (rng.normal(size=(512, 256)) * 3).astype(np.float32)
    logits[:, 4] = np.where(slot % 4 == 0, 30, 300)
    ends = np.stack([np.full(512, 4), np.where(slot % 8 < 4, 7, -1), np.full(512, -1)], axis=1)
    plain = dict(temperature=np.where(slot % 16 == 2, 0, 0.8), seed=slot, minimum=9, end_ids=ends)
    mixed = dict(plain, top_k=np.where(odd, 9, -1), repetition=np.where(odd, 1.5, 1))
    where = (np.full(512, 2, np.int32), np.full(512, 6, np.int32), rng.integers(0, 256, (512, 8)).astype(np.int32))
    alone, among = (draw(logits, *where, controls(512, **own), support) for own in (plain, mixed))
    for a, b in zip(alone, among, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[::2], np.asarray(b)[::2])
    for a, b in zip(alone, draw(logits, *where, controls(512, **plain), support, BANS), strict=True):
        np.testing.assert_array_equal(a, b)
    tokens, logprobs, kept, ids = map(np.asarray, alone)
    assert not (tokens[:, None] == ends).any() and not (ids[:, :, None] == ends[:, None]).any()
    logp = log_softmax(logits.astype(np.float64) / np.where(plain["temperature"] == 0, 1, 0.8)[:, None])
    np.testing.assert_allclose(logprobs, logp[slot, tokens], rtol=2e-6)
    inside = np.where((np.arange(256) == ends[..., None]).any(axis=1), 0, np.exp(logp)).sum(axis=1)
    sampled = (plain["temperature"] > 0) & (inside > 1e-30)
    np.testing.assert_allclose(kept[sampled], np.log(inside)[sampled], rtol=1e-5)


@pytest.mark.full
def test_no_branch_returns_an_array_over_the_vocabulary():
    """GPUs copy what a branch returns: 156 MB at 256 slots of 151,936 tokens."""
    arguments = (np.zeros((8, 1000), np.float32), *np.zeros((2, 8), np.int32), np.zeros((8, 4), np.int32), controls(8))
    branches = [eqn for eqn in jax.make_jaxpr(sample)(*arguments).eqns if eqn.primitive.name == "cond"]
    assert len(branches) == 1 and max(out.aval.size for out in branches[0].outvars) == 8
