"""From logits to a token: pure functions over slots, one program for every mix of options.

Every option is an array with one entry per slot. Work that no slot needs is skipped (a branch for the whole
batch), arranged so that a slot's numbers never depend on what its neighbours ask for: the skipped branch and the
taken one give bitwise the same values to a slot that does not use the option.

Legend: S slots, V vocabulary, L history length, E end-token columns, N lanes, M = V / N rows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.rollout.shapes import ALL

NEG_INF = -jnp.inf
INT_MIN = jnp.iinfo(jnp.int32).min
INT_MAX = jnp.iinfo(jnp.int32).max


class Controls(NamedTuple):
    """Sampling options per slot; see `protocol.SamplingParams`."""

    temperature: Any  # [S] float32, 0 = greedy
    top_p: Any        # [S] float32
    top_k: Any        # [S] int32, -1 = all
    min_p: Any        # [S] float32
    repetition: Any   # [S] float32
    frequency: Any    # [S] float32
    minimum: Any      # [S] int32, tokens before an end token may be drawn
    end_ids: Any      # [S, E] int32, -1 = unused
    seed: Any         # [S] uint32


def sample(logits_SxV, produced_S, position_S, history_SxL, controls: Controls, support: int = 0, work: int = ALL):
    """Draws one token per slot.

    Args:
      logits_SxV: float32 logits of the policy, soft-cap applied, not yet divided by the temperature.
      produced_S: int32 tokens the completion has so far; picks the random bits and ends the ban on end tokens.
      position_S: int32 position of the newest token of prompt and completion.
      history_SxL: int32 tokens by position; read only where a slot has a penalty.
      controls: sampling options, one entry per slot.
      support: K, most token ids of the support to return; 0 = none.
      work: PLAIN, BANS or ALL (`shapes.work_of`), all that the program contains; options beyond it have no effect.

    Returns:
      token_S int32.
      logprob_S float32, nats: log softmax(logits / temperature)[token] over the whole vocabulary, without penalties.
        Greedy slots at temperature 1.
      kept_S float32, nats: log of the mass of that softmax inside the support the token was drawn from; exactly 0
        where nothing is cut off, and for greedy slots.
      support_SxK int32: the K likeliest tokens of that support, the drawn one among them; -1 = unused."""
    greedy_S = controls.temperature == 0
    scaled_SxV = logits_SxV / jnp.where(greedy_S, 1.0, controls.temperature)[:, None]
    peak_S = jnp.max(scaled_SxV, axis=-1)
    mass_SxN = lane_mass(scaled_SxV, peak_S)
    logz_S = peak_S + jnp.log(jnp.sum(mass_SxN, axis=-1))

    barred_S = produced_S < controls.minimum
    penal_S = (controls.repetition != 1) | (controls.frequency != 0)
    cut_S = ~greedy_S & ((controls.top_p < 1) | (controls.top_k > 0) | (controls.min_p > 0))

    def barred():
        q_SxV = bar_end_tokens(scaled_SxV, barred_S, controls.end_ids)
        return weighed(q_SxV, q_SxV, barred_S, barred_S)

    def processed():
        q_SxV = jnp.where(penal_S[:, None],
                          penalise(logits_SxV, produced_S, position_S, history_SxL, controls), logits_SxV)
        q_SxV = bar_end_tokens(q_SxV, barred_S, controls.end_ids)
        q_SxV = q_SxV / jnp.where(greedy_S, 1.0, controls.temperature)[:, None]
        floor_S = jnp.where(cut_S, support_floor(q_SxV, controls), NEG_INF)
        q_SxV = jnp.where(q_SxV >= floor_S[:, None], q_SxV, NEG_INF)
        inside_SxV = jnp.where(q_SxV > NEG_INF, scaled_SxV, NEG_INF)
        return weighed(q_SxV, inside_SxV, barred_S | penal_S | cut_S, barred_S | cut_S)

    def weighed(q_SxV, inside_SxV, changed_S, less_S):
        kept_S = peak_S + jnp.log(jnp.sum(lane_mass(inside_SxV, peak_S), axis=-1)) - logz_S
        own_SxN = lane_mass(q_SxV, jnp.max(q_SxV, axis=-1))
        mass = jnp.where(changed_S[:, None], own_SxN, mass_SxN)
        return q_SxV, mass, jnp.where(less_S, jnp.minimum(kept_S, 0.0), 0.0)

    # The draw is in every branch, so that no [S, V] array leaves one: GPUs would copy it. A GPU's search for the top
    # tokens does not fit its launch graph, and would keep a branch with it out.
    branch = jnp.where(jnp.any(penal_S | cut_S), 2, jnp.any(barred_S).astype(jnp.int32))
    pick = functools.partial(choose_tokens, random_words(controls.seed, produced_S), greedy_S, support)
    ways = ((lambda: (scaled_SxV, mass_SxN, jnp.zeros_like(peak_S))), barred, processed)[:work + 1]
    if support:
        token_S, kept_S, support_SxK = pick(*lax.switch(branch, ways))
    else:
        token_S, kept_S, support_SxK = lax.switch(branch, [lambda way=way: pick(*way()) for way in ways])
    logprob_S = jnp.take_along_axis(scaled_SxV, token_S[:, None], axis=-1)[:, 0] - logz_S
    return token_S, logprob_S, jnp.where(greedy_S, 0.0, kept_S), support_SxK


def choose_tokens(words_Sx2, greedy_S, support: int, q_SxV, mass_SxN, kept_S):
    """Returns (token [S] int32, kept_S unchanged, ids [S, support] int32 of `top_tokens`).

    Tokens are drawn by `draw` from lanes with these masses; a greedy slot takes the first largest entry of q.

    Args:
      words_Sx2: uint32 of `random_words`.
      greedy_S: bool.
      support: number of ids to return, 0 = none.
      q_SxV: float32 logits over the temperature, -inf outside the support.
      mass_SxN: float32 of `lane_mass` of q.
      kept_S: passed through, so that it leaves the same branch as the token."""
    drawn_S = draw(q_SxV, mass_SxN, words_Sx2)
    best_S = lax.cond(jnp.any(greedy_S), first_argmax, lambda q: jnp.zeros(q.shape[0], jnp.int32), q_SxV)
    token_S = jnp.where(greedy_S, best_S, drawn_S)
    return token_S, kept_S, top_tokens(q_SxV, token_S, support)


def top_tokens(q_SxV, token_S, count: int):
    """Returns the ids [S, count] int32 of the largest finite entries of each row, the largest first, -1 beyond.

    The drawn token takes the last place if it is not among them (the support may hold more, by ties for example).

    q_SxV: float32 logits, -inf outside the support. token_S: int32, the drawn tokens. count: at most V; 0 = none, [S,
    0]."""
    if not count:
        return jnp.zeros((q_SxV.shape[0], 0), jnp.int32)
    value_SxK, id_SxK = lax.top_k(q_SxV, count)
    id_SxK = jnp.where(value_SxK > NEG_INF, id_SxK, -1)
    there_S = jnp.any(id_SxK == token_S[:, None], axis=-1)
    return id_SxK.at[:, -1].set(jnp.where(there_S, id_SxK[:, -1], token_S)).astype(jnp.int32)


# ---- the support ----------------------------------------------------------------------------------------------


def penalise(logits_SxV, produced_S, position_S, history_SxL, controls: Controls):
    """Returns float32 logits [S, V] after the repetition penalty (tokens of prompt and completion) and the frequency
    penalty (tokens of the completion, by count).

    The first divides positive logits of tokens seen by controls.repetition and multiplies the others by it; the second
    subtracts controls.frequency times the token's count. Applied before the temperature.

    Args:
      logits_SxV: float32.
      produced_S, position_S: int32, tokens of the completion so far and position of the newest token.
      history_SxL: int32 tokens by position, read up to position_S; the last produced_S of them are the completion.
      controls: repetition and frequency are read; 1 and 0 change nothing."""
    slots, vocab = logits_SxV.shape
    column_L = jnp.arange(history_SxL.shape[1])[None, :]
    seen_SxL = column_L <= position_S[:, None]
    own_SxL = seen_SxL & (column_L > (position_S - produced_S)[:, None])
    row_Sx1 = jnp.arange(slots)[:, None]
    seen_SxV = jnp.zeros((slots, vocab), bool).at[row_Sx1, jnp.where(seen_SxL, history_SxL, vocab)].set(
        True, mode="drop")
    count_SxV = jnp.zeros((slots, vocab), logits_SxV.dtype).at[row_Sx1, jnp.where(own_SxL, history_SxL, vocab)].add(
        1.0, mode="drop")
    factor_Sx1 = controls.repetition[:, None]
    repeated_SxV = jnp.where(logits_SxV > 0, logits_SxV / factor_Sx1, logits_SxV * factor_Sx1)
    return jnp.where(seen_SxV, repeated_SxV, logits_SxV) - controls.frequency[:, None] * count_SxV


def bar_end_tokens(q_SxV, barred_S, end_ids_SxE):
    """Returns q [S, V] float32 with -inf at end tokens in the slots that may not end yet, elementwise: XLA fuses it
    into its readers.

    q_SxV: float32 logits. barred_S: [S] bool. end_ids_SxE: [S, E] int32, -1 = unused."""
    column_SxV = lax.broadcasted_iota(jnp.int32, q_SxV.shape, 1)
    ends_SxV = functools.reduce(jnp.logical_or, [column_SxV == end_S[:, None] for end_S in end_ids_SxE.T], False)
    return jnp.where(barred_S[:, None] & ends_SxV, NEG_INF, q_SxV)


def support_floor(q_SxV, controls: Controls):
    """Returns [S] float32, a threshold: the scaled logits at or above it stay after min_p, then top_k, then top_p, all
    that tie with the last one too. -inf where these cut nothing off.

    Each of the three keeps a set {q >= t}, so the floors combine by maximum. top_p's share is of the mass that min_p
    and top_k leave. The floors of top_k and top_p are found among the ordered bits of a float32 (`largest_true`):
    exact, no sort.

    q_SxV: float32 logits over the temperature. controls: min_p, top_k and top_p are read."""
    peak_S = jnp.max(q_SxV, axis=-1)
    floor_S = jnp.where(controls.min_p > 0, peak_S + jnp.log(controls.min_p), NEG_INF)
    limits_k = controls.top_k > 0

    def by_count(floor_S):
        key_SxV = ordered_bits(q_SxV)
        found_S = largest_true(key_SxV, jnp.int32(1), lambda count_S: count_S >= controls.top_k, peak_S)
        return jnp.where(limits_k, jnp.maximum(floor_S, found_S), floor_S)

    def by_mass(floor_S):
        p_SxV = jnp.where(q_SxV >= floor_S[:, None], jnp.exp(q_SxV - peak_S[:, None]), 0.0)
        key_SxV = ordered_bits(q_SxV)
        target_S = controls.top_p * jnp.sum(p_SxV, axis=-1)
        found_S = largest_true(key_SxV, p_SxV, lambda mass_S: mass_S >= target_S, peak_S)
        return jnp.where(controls.top_p < 1, jnp.maximum(floor_S, found_S), floor_S)

    floor_S = lax.cond(jnp.any(limits_k), by_count, lambda f: f, floor_S)
    return lax.cond(jnp.any(controls.top_p < 1), by_mass, lambda f: f, floor_S)


def ordered_bits(x):
    """Returns int32 values in the order of the float32 values, any shape (-0 just below +0); see from_ordered_bits."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return bits ^ ((bits >> 31) & INT_MAX)


def from_ordered_bits(key):
    """Returns the float32 values of int32 values of `ordered_bits`, its inverse."""
    return lax.bitcast_convert_type(key ^ ((key >> 31) & INT_MAX), jnp.float32)


def largest_true(key_SxV, weight_SxV, enough, peak_S):
    """Returns [S] float32, per slot the largest threshold, at most peak_S, at which `enough` is true; -inf if it never
    is.

    The sum of the weights of the keys at or above a threshold changes only at values that occur, so the result is one
    of them. A pass finds four bits of it, the highest first, with 15 thresholds; the eight passes come in a row,
    without a loop, so that a GPU's launch graph can hold them.

    Args:
      key_SxV: int32 of `ordered_bits`.
      weight_SxV: at least 0, of the dtype of the sum; may be a scalar.
      enough: that sum [S] -> bool [S]; once true, it stays true for larger sums.
      peak_S: float32, the largest value of each row.
    """
    signed = lambda bits: lax.bitcast_convert_type(bits ^ jnp.uint32(1 << 31), jnp.int32)  # noqa: E731
    found_S = jnp.zeros(peak_S.shape, jnp.uint32)  # above INT_MIN
    for shift in range(28, -1, -4):
        thresholds = [signed(found_S | jnp.uint32(n << shift)) for n in range(1, 16)]
        sums = sums_above(key_SxV, weight_SxV, thresholds)
        found_S |= sum(enough(sum_S).astype(jnp.uint32) for sum_S in sums) << shift
    low_S = jnp.minimum(signed(found_S), ordered_bits(peak_S))
    return jnp.where(low_S == INT_MIN, NEG_INF, from_ordered_bits(low_S))


def sums_above(key_SxV, weight_SxV, thresholds):
    """Returns for each of the thresholds ([S] int32) the sum [S] of the weights whose keys are at or above it.

    The keys are read once. key_SxV: int32 of `ordered_bits`. weight_SxV: [S, V] or a scalar, of the sums' dtype."""
    zero = jnp.zeros((), jnp.result_type(weight_SxV))
    parts = tuple(jnp.where(key_SxV >= t_S[:, None], weight_SxV, zero) for t_S in thresholds)
    add = lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))  # noqa: E731
    return lax.reduce(parts, (zero,) * len(parts), add, (1,))


def first_argmax(q_SxV):
    """Returns the index [S] int32 of each row's first largest entry (a plain min-reduction, which vectorises where
    argmax does not)."""
    column_V = lax.iota(jnp.int32, q_SxV.shape[-1])
    at_peak_SxV = q_SxV == jnp.max(q_SxV, axis=-1, keepdims=True)
    return jnp.min(jnp.where(at_peak_SxV, column_V, q_SxV.shape[-1] - 1), axis=-1)


# ---- the draw -------------------------------------------------------------------------------------------------


def lanes_for(vocab: int) -> int:
    """Returns the number of lanes the vocabulary is folded into: a power of two from 64 to 512, near its root, that
    divides it, or 128 with padding."""
    for lanes in (512, 256, 128, 64):
        if vocab % lanes == 0 and (lanes * lanes <= 2 * vocab or lanes == 64):
            return lanes
    return 128


def fold_lanes(q_SxV):
    """Folds logits [S, V] -> [S, M, N] of the same dtype; lane n holds the tokens n, n + N, n + 2 N ...; padding is
    -inf. N is `lanes_for(V)`."""
    slots, vocab = q_SxV.shape
    lanes = lanes_for(vocab)
    rows = -(-vocab // lanes)
    if rows * lanes != vocab:
        q_SxV = jnp.pad(q_SxV, ((0, 0), (0, rows * lanes - vocab)), constant_values=NEG_INF)
    return q_SxV.reshape(slots, rows, lanes)


def lane_mass(q_SxV, peak_S):
    """Returns [S, N] float32, the sum of exp(q - peak) over each lane of `fold_lanes`; -inf entries count 0.

    q_SxV: float32. peak_S: float32, subtracted so that nothing overflows; at least the row's maximum."""
    return jnp.sum(jnp.exp(fold_lanes(q_SxV) - peak_S[:, None, None]), axis=1)


def random_words(seed_S, index_S):
    """Returns two uint32 words [S, 2] of fold_in(key(seed), index) of threefry2x32, whatever jax's default PRNG is.

    No other number comes from that key. seed_S: uint32 of the request. index_S: int32, tokens of the completion so
    far, so that a token's bits depend on these two alone."""
    def words(seed, index):
        return jax.random.key_data(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), index))

    return jax.vmap(words)(seed_S, index_S)


def draw(q_SxV, mass_SxN, words_Sx2):
    """Draws a token per slot ([S] int32) from softmax(q) by its inverse distribution function: a lane by its mass, then
    a token within the lane.

    Two uniforms instead of one per token; no running sum is longer than a lane or the number of lanes.

    Args:
      q_SxV: float32 logits over the temperature, -inf where a token is excluded.
      mass_SxN: float32 of `lane_mass` of q.
      words_Sx2: uint32 of `random_words`; one chooses the lane, the other the token."""
    lane_S = invert(mass_SxN, words_Sx2[:, 0])
    folded_SxMxN = fold_lanes(q_SxV)
    column_SxM = jnp.take_along_axis(folded_SxMxN, lane_S[:, None, None], axis=2)[..., 0]
    column_SxM = jnp.exp(column_SxM - jnp.max(column_SxM, axis=-1, keepdims=True))
    row_S = invert(column_SxM, words_Sx2[:, 1])
    return row_S * folded_SxMxN.shape[2] + lane_S


def invert(weight_SxN, word_S):
    """Returns [S] int32, the first index whose running sum exceeds u * total, u = word / 2^32. An index of weight
    0 is never returned, unless all are 0. weight_SxN: float32, at least 0. word_S: uint32.

    Rounding cannot break that promise: an index is eligible only if its weight is positive, and if none passes (u
    rounds to 1) the last eligible one is taken.
    """
    running_SxN = jnp.cumsum(weight_SxN, axis=-1)
    target_S = word_S.astype(jnp.float32) * jnp.float32(2.0 ** -32) * running_SxN[:, -1]
    positive_SxN = weight_SxN > 0
    column_N = lax.iota(jnp.int32, weight_SxN.shape[-1])
    past_SxN = positive_SxN & (running_SxN > target_S[:, None])
    first_S = jnp.min(jnp.where(past_SxN, column_N, INT_MAX), axis=-1)
    last_S = jnp.max(jnp.where(positive_SxN, column_N, 0), axis=-1)
    return jnp.minimum(first_S, last_S)
