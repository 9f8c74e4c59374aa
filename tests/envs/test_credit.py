"""Credit in episodes of several turns: unbiased where the policy chooses how many, GiGPO by hand, and blind to how a
trajectory is cut into sequences.

The enumerated problem: at most three turns of one action each; action 0 ends the episode (or does not, `fixed`). Every turn has
a reward. Its policy is a table of logits, one row per history.
"""

import functools
import itertools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_job
from helpers.preset_losses import loss_of
from helpers.training_helpers import batch_of_groups, cut, params_of, policy_objective, tiny_model, worst

from jaxrl import algorithms as alg
from jaxrl import training
from jaxrl.config.load import default_config, put
from jaxrl.errors import ConfigError
from jaxrl.models.value import ValueModel
from jaxrl.resolve.checks import common
from jaxrl.resolve.spec import resolve
from jaxrl.rewards import shape
from jaxrl.rl import advantages as estimators
from jaxrl.training.layout import RowShapes
from jaxrl.training.objective import Outputs, Value
from jaxrl.types import Trajectories

close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12)


def options_of(changes):
    """The options of an algorithm, decided."""
    c = default_config()
    for name, value in changes.items():
        put(c, f"algorithm.{name}", value)
    return resolve(c, engine="jax").algorithm


def advantages(traj, scores, changes, **given):
    return estimators.advantages(options_of(changes), traj, np.asarray(scores, np.float64), **given)


def episodes(groups, turns, opening=2, observed=1):
    """Trajectories of one sequence each. turns: per trajectory its turns as (sampled tokens, reward, anchor), with `observed`
    tokens between two."""
    tokens, parts, offsets = np.random.default_rng(5), [], [0]
    openings = {g: tokens.integers(1, 61, opening) for g in dict.fromkeys(groups)}
    blank = lambda ids: [(t, False, -1, 0.0, 0) for t in ids]  # noqa: E731
    for g, mine in zip(groups, turns, strict=True):
        rows = blank(openings[g])
        for k, (size, reward, anchor) in enumerate(mine):
            rows += blank(tokens.integers(1, 61, observed if k else 0))
            rows += [(t, True, k, reward * (i == size - 1), anchor) for i, t in enumerate(tokens.integers(1, 61, size))]
        parts += rows
        offsets.append(len(parts))
    ids, mask, turn, reward, anchor = (np.array(c) for c in zip(*parts, strict=True))
    n, count = len(groups), len(ids)
    return Trajectories(
        tokens=ids.astype(np.int32), offsets=np.array(offsets), loss_mask=mask, logprobs=np.zeros(count, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32), prompt_lengths=np.full(n, opening, np.int32), group=np.array(groups),
        sample=np.arange(n, dtype=np.int32), seed=np.arange(n, dtype=np.uint32), finish=np.zeros(n, np.int8),
        columns={"turn": turn.astype(np.int32), "reward": reward.astype(np.float64), "anchor": anchor.astype(np.int64)})


# -- unbiased, by enumeration ------------------------------------------------------------------------------------------

ACTIONS, TURNS = 3, 3
RNG = np.random.default_rng(11)
HISTORIES = [h for size in range(TURNS) for h in itertools.product(range(ACTIONS), repeat=size)]
STATE = {h: s for s, h in enumerate(HISTORIES)}
THETA = RNG.normal(size=(len(HISTORIES), ACTIONS))
REWARD = RNG.normal(size=(len(HISTORIES), ACTIONS)) + [0.5, 0.0, -0.5]


@functools.cache
def paths(fixed):
    """Every episode as its (state, action) pairs."""
    out = []

    def walk(history):
        if len(history) == TURNS or (not fixed and history and history[-1] == 0):
            out.append(tuple((STATE[history[:k]], a) for k, a in enumerate(history)))
        else:
            for a in range(ACTIONS):
                walk((*history, a))

    walk(())
    return out


def objective(theta, fixed, value):
    """sum over episodes of probability * value(episode)."""
    logp = jax.nn.log_softmax(jnp.asarray(theta))
    return sum(jnp.exp(sum(logp[s, a] for s, a in path)) * value(path) for path in paths(fixed))


def true_gradient(fixed, value):
    with jax.enable_x64(True):
        return np.asarray(jax.grad(objective)(jnp.asarray(THETA), fixed, value))


def total(path):
    return sum(REWARD[s, a] for s, a in path)


def estimated(size, fixed, credit):
    """Expectation of mean_i sum_k A_ik * gradient log pi(a_ik) over all groups of `size`.

    credit(group's indices [G, size]) -> A [G, size, TURNS], 0 behind an episode's end.
    """
    all_paths, pi = paths(fixed), np.exp(THETA) / np.exp(THETA).sum(1, keepdims=True)
    p = np.array([math.prod(pi[s, a] for s, a in path) for path in all_paths])
    groups = np.array(list(itertools.product(range(len(all_paths)), repeat=size)))
    weights = p[groups].prod(1)
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    a, out = credit(groups), np.zeros_like(THETA)
    for i in range(size):
        for k in range(TURNS):
            for index, path in enumerate(all_paths):
                if k < len(path):
                    (s, action), here = path[k], groups[:, i] == index
                    out[s] += (weights * a[:, i, k])[here].sum() * (np.eye(ACTIONS)[action] - pi[s]) / size
    return out


def by_advantages(changes, fixed, absent=0):
    """What jaxrl makes of all groups at once; the last `absent` members of each have no score."""

    def credit(groups):
        mine = [paths(fixed)[i] for i in groups.ravel()]
        traj = episodes(np.repeat(np.arange(len(groups)), groups.shape[1]),
                        [[(1, REWARD[s, a], 0) for s, a in path] for path in mine])
        scores = np.array([total(path) for path in mine]).reshape(groups.shape)
        scores[:, groups.shape[1] - absent:] = np.nan
        found, out = advantages(traj, scores.ravel(), changes).tokens, np.zeros((*groups.shape, TURNS))
        for i, at in enumerate(traj.sampled()):
            out[i // groups.shape[1], i % groups.shape[1], :len(at)] = found[at]
        return out

    return credit


def to_go(path, gamma):
    return [sum(gamma ** (l - k) * REWARD[path[l]] for l in range(k, len(path))) for k in range(len(path))]


@pytest.mark.full
@pytest.mark.parametrize("size, absent", [(2, 0), (3, 0), (3, 1)])
def test_turn_has_the_gradient_of_the_expected_sum_of_rewards(size, absent):
    """Also where the policy decides how many turns there are; a member without a score is as if it had not been asked."""
    got = estimated(size, False, by_advantages({"advantage": "turn"}, False, absent))
    want = true_gradient(False, total) * (size - absent) / size
    assert np.abs(want).max() > 0.01
    close(got, want)


def test_the_baseline_of_turn_has_no_gradient_whatever_the_discount():
    def alone(groups):
        out = np.zeros((*groups.shape, TURNS))
        for index, path in enumerate(paths(False)):
            out[groups == index, :len(path)] = to_go(path, 0.5)
        return out

    close(estimated(2, False, by_advantages({"advantage": "turn", "turn_gamma": 0.5}, False)), estimated(1, False, alone))


def first_normalised(fixed):
    """The rule of verl#7244: rewards less their mean over the others, turn by turn; then summed to what is to go. (Without a
    scale, and with a mean that one's own reward is not in, so that nothing else could be to blame.)"""

    def credit(groups):
        rewards, there = np.zeros((len(paths(fixed)), TURNS)), np.zeros((len(paths(fixed)), TURNS), bool)
        for index, path in enumerate(paths(fixed)):
            rewards[index, :len(path)], there[index, :len(path)] = [REWARD[step] for step in path], True
        own = rewards[groups]
        less = (own - (own.sum(1, keepdims=True) - own) / (groups.shape[1] - 1)) * there[groups]
        return np.cumsum(less[..., ::-1], -1)[..., ::-1]

    return credit


@pytest.mark.full
def test_normalising_by_turn_before_summing_is_biased_where_the_policy_ends_episodes():
    """Exactly: every turn taken costs what such turns bring on average. Without the choice it is unbiased."""
    close(estimated(2, True, first_normalised(True)), true_gradient(True, total))
    with jax.enable_x64(True):
        means = [float(objective(THETA, False, lambda path, k=k: REWARD[path[k]] if k < len(path) else 0.0)) for k in range(TURNS)]
    got, want = estimated(2, False, first_normalised(False)), true_gradient(False, total)
    close(got, true_gradient(False, lambda path: total(path) - sum(means[:len(path)])))
    slope = (got * want).sum() / (want * want).sum()
    assert np.abs(got - slope * want).max() > 0.01  # another direction, not only another length


def test_one_turn_each_is_the_leave_one_out_baseline():
    """So `turn` in a run without episodes is RLOO's; a KL in the reward is subtracted as for `outcome`."""
    traj, columns = batch_of_groups()
    assert "turn" not in traj.columns
    scores, kl = RNG.normal(size=20), columns["ref"]
    scores[[3, 8, 9, 10, 11]] = np.nan  # of the last group one, of the third all
    with_kl = {"kl.coef": 0.1, "kl.placement": "reward", "kl.estimator": "k1"}
    want = advantages(traj, scores, with_kl | {"advantage_mean": "leave_one_out", "advantage_std": "none"}, kl=kl)
    got = advantages(traj, scores, with_kl | {"advantage": "turn"}, kl=kl)
    close(got.tokens, want.tokens)
    assert got.zero_signal.tolist() == want.zero_signal.tolist() == [False] * 8 + [True] * 4 + [False] * 8


# -- rewards of turns --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed():
    """(trajectories, scores, KL [T], values [T]): three groups, 1 to 4 turns, absent scores, junk where not sampled."""
    rng = np.random.default_rng(3)
    turns = [[(int(rng.integers(1, 5)), rng.normal(), int(rng.integers(0, 4))) for _ in range(1 + i % 4)] for i in range(12)]
    traj = episodes(np.repeat([4, 7, 9], 4), turns, observed=2)
    kl, values = (np.where(traj.loss_mask, rng.normal(size=len(traj.tokens)), np.nan) for _ in range(2))
    traj.columns["reward"] = np.where(traj.loss_mask, traj.columns["reward"], np.nan)
    scores = rng.normal(size=12)
    scores[[2, 8]] = np.nan
    return traj, scores, kl, values


def of_tokens(traj, scores, kl, coef, scale=1.0):
    """Rewards of each trajectory's sampled tokens, written out."""
    out = []
    for at, score in zip(traj.sampled(), scores, strict=True):
        own = [scale * traj.columns["reward"][t] for t in at]
        rest = score - sum(own)
        own[-1] += rest
        out.append([r - coef * kl[t] for r, t in zip(own, at, strict=True)])
    return out


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_returns_and_gae_with_rewards_of_turns_are_the_double_sums(mixed, scale):
    """sum_{l >= t} gamma^(l-t) r_l, and sum_{l >= t} (gamma lam)^(l-t) delta_l, over sampled tokens."""
    traj, scores, kl, values = mixed
    changes = {"advantage_mean": "none", "advantage_std": "none", "kl.coef": 0.2, "kl.placement": "reward", "gamma": 0.9}
    by_returns = advantages(traj, scores, changes | {"advantage": "returns"}, kl=kl, scale=scale)
    by_gae = advantages(traj, scores, changes | {"advantage": "gae", "lam": 0.8}, kl=kl, values=values, scale=scale)
    for at, score, r in zip(traj.sampled(), scores, of_tokens(traj, scores, kl, 0.2, scale), strict=True):
        v = [*values[at], 0.0]
        for t, token in enumerate(at):
            go = sum(0.9 ** (l - t) * r[l] for l in range(t, len(at)))
            a = sum(0.72 ** (l - t) * (r[l] + 0.9 * v[l + 1] - v[l]) for l in range(t, len(at)))
            known = np.isfinite(score)
            assert by_returns.tokens[token] == pytest.approx(go if known else 0, abs=1e-12)
            assert by_gae.tokens[token] == pytest.approx(a if known else 0, abs=1e-12)
            assert by_gae.returns[token] == pytest.approx(a + v[t] if known else v[t], abs=1e-12)
    assert not by_returns.tokens[~traj.loss_mask].any()


def test_turn_and_its_discount_written_out(mixed):
    """A turn's reward is that of its tokens, their KL too; the last one has what the rewards do not explain of the score."""
    traj, scores, kl, _ = mixed
    changes = {"advantage": "turn", "turn_gamma": 0.7, "kl.coef": 0.2, "kl.placement": "reward"}
    got = advantages(traj, scores, changes, kl=kl).tokens
    go = []
    for at, r in zip(traj.sampled(), of_tokens(traj, scores, kl, 0.2), strict=True):
        number = traj.columns["turn"][at]
        sums = [sum(x for x, k in zip(r, number, strict=True) if k == turn) for turn in range(number[-1] + 1)]
        go.append([sum(0.7 ** (l - k) * sums[l] for l in range(k, len(sums))) for k in range(len(sums))])
    want = np.zeros(len(traj.tokens))
    for i, at in enumerate(traj.sampled()):
        others = [j for j in range(12) if j != i and traj.group[j] == traj.group[i] and np.isfinite(scores[j])]
        for t in at if np.isfinite(scores[i]) else ():
            k = traj.columns["turn"][t]
            want[t] = go[i][k] - np.mean([go[j][k] if k < len(go[j]) else 0.0 for j in others])
    close(got, want)
    with pytest.raises(ValueError, match="turn=-1 on a sampled token"):
        alg.turn_advantages(want, np.full(len(want), -1), traj.loss_mask, traj.spans, traj.group, np.isfinite(scores), 1.0)


def test_rewards_in_fp32_leave_no_rest():
    """0.7 and 0.1 are no numbers of fp32: the rest of their sum would be 1e-8, and over a std that is a signal."""
    traj = episodes([0, 0], [[(1, 0.7, 1), (1, 0.1, 2)], [(1, 0.7, 1), (1, 0.1, 2)]])
    traj.columns["reward"] = traj.columns["reward"].astype(np.float32)
    rewards = alg.token_rewards([0.7 + 0.1, 1.8], traj.loss_mask, traj.spans, turn_rewards_T=traj.columns["reward"])
    assert rewards[traj.loss_mask][:2].tolist() == [np.float32(0.7), np.float32(0.1)]
    close(rewards[traj.loss_mask][2:], [0.7, 1.1], atol=1e-7)


def test_a_function_of_the_users_sees_the_turns(mixed):
    traj, scores, _, _ = mixed
    seen = []

    def own(inputs):
        seen.append(inputs)
        return np.where(inputs.mask, inputs.columns["turn"], 0)

    alg.ADVANTAGES["turn_numbers"] = own
    try:
        found = advantages(traj, scores, {"advantage": "turn_numbers"}, columns={"behaviour": traj.logprobs})
    finally:
        del alg.ADVANTAGES["turn_numbers"]
    assert sorted(seen[0].columns) == ["anchor", "behaviour", "reward", "turn"]
    known = traj.loss_mask & traj.spread(np.isfinite(scores))
    np.testing.assert_array_equal(found.tokens, np.where(known, traj.columns["turn"], 0))


# -- GiGPO -------------------------------------------------------------------------------------------------------------

# Group 0: the first comes through states 7 and 8 and gets 1 in the end; the second is in 7 twice, then in 9; the third failed.
# Group 5: state 7 is another one there; turns without a state.
STATES = [[(2, 0.0, 7), (1, 0.0, 8)], [(1, 0.0, 7), (1, 0.0, 7), (3, 0.0, 9)], [(1, 0.0, 7)], [(1, 0.0, 7), (1, 0.0, 0)], [(1, 0.0, 0)]]
GROUPS, SCORES = [0, 0, 0, 5, 5], [1.0, 0.0, np.nan, 1.0, 0.0]


def test_gigpo_by_hand():
    """With gamma 0.5 the first trajectory has (0.5, 1) to go, so state 7 of group 0 holds 0.5, 0 and 0: mean 1/6, std
    sqrt(1/12). Turns that are alone in their state, or in none, have the episode's advantage only."""
    traj, by_hand = episodes(GROUPS, STATES), {"preset": "gigpo", "turn_gamma": 0.5}
    plain = advantages(traj, SCORES, by_hand | {"advantage_std": "none"})
    close(plain.tokens[traj.loss_mask],
          [1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 2, -1 / 2 - 1 / 6, -1 / 2 - 1 / 6, *[-1 / 2] * 3, 0, 1 / 2, 1 / 2, -1 / 2])
    assert plain.metrics == {"advantage/anchored_fraction": 4 / 12} and not plain.zero_signal.any()
    scaled = advantages(traj, SCORES, by_hand).tokens[traj.loss_mask]
    half, third = 0.7071057812, 1.1547005384 - 4e-6  # 0.5 / (sqrt(0.5) + 1e-6), (1/3) / (sqrt(1/12) + 1e-6)
    np.testing.assert_allclose(scaled[:5], [half + third, half + third, half, *[-half - third / 2] * 2], atol=1e-9)
    np.testing.assert_allclose(scaled[5:], [*[-half] * 3, 0, half, half, -half], atol=1e-9)


def test_gigpos_weight_and_discount():
    traj = episodes(GROUPS, STATES)
    first = lambda changes: advantages(traj, SCORES, {"preset": "gigpo", "advantage_std": "none"} | changes).tokens[2]  # noqa: E731
    assert first({}) == pytest.approx(0.5 + 0.95 * 2 / 3)
    assert first({"anchor_coef": 0.25}) == pytest.approx(0.5 + 0.25 * 0.95 * 2 / 3)
    assert first({"turn_gamma": 0.1}) == pytest.approx(0.5 + 0.1 * 2 / 3)
    assert first({"advantage_mean": "leave_one_out"}) == pytest.approx(2 * 0.5 + 0.95)  # G/(G-1) of either
    assert advantages(traj, SCORES, {"preset": "grpo", "advantage_std": "none"}).tokens[2] == 0.5


def test_gigpo_without_states_is_grpo(mixed):
    traj, scores, _, _ = mixed
    nowhere = SimpleNamespace(**{n: getattr(traj, n) for n in ("loss_mask", "spans", "group", "tokens", "total", "spread")},
                              columns=traj.columns | {"anchor": 0 * traj.columns["anchor"]})
    found = advantages(nowhere, scores, {"preset": "gigpo"})
    np.testing.assert_array_equal(found.tokens, advantages(traj, scores, {"preset": "grpo"}).tokens)
    assert found.metrics == {"advantage/anchored_fraction": 0.0}
    assert advantages(traj, scores, {"preset": "gigpo"}).metrics["advantage/anchored_fraction"] > 0.3


# -- segments ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(mixed):
    """(whole, where, parts): parts[t] is whole[where[t]]; each turn a sequence whose prompt is all that went before."""
    whole = mixed[0]
    where, parts = cut(whole)
    assert whole.num_trajectories == parts.num_trajectories == whole.num_sequences == 12 and parts.num_sequences == 30
    return whole, where, parts


SHAPES = RowShapes((64,), ((1,),))


def test_each_sampled_token_has_one_slot(pair):
    """Of all rows of all microbatches together, with the loss's weight, shared prompts or not."""
    whole, where, parts = pair
    for share in (True, False):
        layout = training.make_layout(parts.sizes, SHAPES, num_minibatches=2, share_prompts=share)
        slots = np.zeros(len(whole.tokens), int)
        for mini in layout.minibatches:
            weights = training.loss_weights(parts, mini.sequences, "token_mean")
            for micro in mini.microbatches:
                batch = training.pack(parts, micro, {"from": where}, weights)
                used = batch.sequences > 0
                assert (batch.weights["policy"] > 0).tolist() == used.tolist()
                np.testing.assert_array_equal(batch.targets[used], whole.tokens[batch.columns["from"][used]])
                np.add.at(slots, batch.columns["from"][used], 1)
        np.testing.assert_array_equal(slots, whole.loss_mask)


@pytest.fixture(scope="module")
def passes():
    """(forward, backward) of a tiny model in float64, as the update computes log-probs, entropies and values of a batch; of one
    shape, so compiled once."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        model = tiny_model(jnp.float64)
        params = ValueModel(model, keep_head=True).with_head(params_of(model, jnp.float64))
        params["value"]["kernel"] += np.random.default_rng(0).normal(size=32)

        def speak(params, batch):
            outputs = Outputs(model, params, batch, policy_objective(chunk=64))
            return *outputs.logprobs()[:2], outputs.values()

        forward = jax.jit(speak)
        backward = jax.jit(lambda batch, signals: jax.vjp(lambda p: speak(p, batch), params)[1](signals)[0])
        yield functools.partial(forward, params), backward
    jax.config.update("jax_disable_most_optimizations", before)


def shaped(traj, scores):
    """Scores with a penalty on the length of all turns together."""
    c = default_config()
    c.reward.overlong_penalty = 0.5
    return shape(SimpleNamespace(total=scores), traj.total(), traj.finish == 1, c.reward, 12, buffer=10)


CASES = {name: {"preset": name} for name, row in alg.PRESETS.items() if row["ratio"] == "token"}
CASES |= {"turn": {"preset": "grpo", "advantage": "turn"}, "gspo": {"preset": "gspo"}}


def loss_and_gradient(case, traj, scores, tokens, passes):
    """Of one optimizer step: advantages, weights, layout, packing, and the preset's objective over what the model says.

    tokens: name -> [T] what others say of each token.
    """
    forward, backward = passes
    v, objectives = alg.PRESETS[CASES[case]["preset"]], [loss_of(CASES[case]["preset"])]
    kl = tokens["old"] - tokens["ref"] if v["kl.placement"] == "reward" else None
    found = advantages(traj, shaped(traj, scores), CASES[case], kl=kl, values=tokens["old_value"],
                       baseline=np.nan_to_num(scores) / 2)
    columns = tokens | {"advantage": found.tokens}
    if found.returns is not None:
        columns["return"] = np.where(traj.loss_mask, found.returns, 0)
        objectives.append(Value(clip=0.2))
    n = np.arange(traj.num_trajectories)
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), v["aggregation"], max_tokens=14, dropped=n == 4,
                                    positive=n % 3 == 0 if v["positive_nll_coef"] else None)
    layout, loss, grads = training.make_layout(traj.sizes, SHAPES), 0.0, None
    assert len(layout.minibatches[0].microbatches) > 1
    for micro in layout.minibatches[0].microbatches:
        batch = jax.tree.map(jnp.asarray, training.pack(traj, micro, columns, weights, np.float64))
        plain = batch.replace(columns={}, weights={"token": batch.weights["token"]})

        def terms(said, batch=batch):
            out = SimpleNamespace(logprobs=lambda: (*said[:2], {}), values=lambda: said[2], token=batch.weights["token"],
                                  mask=batch.weights["token"] > 0)
            return sum(o.loss(out, batch)[0] for o in objectives)

        value, signals = jax.value_and_grad(terms)(forward(plain))
        new = backward(plain, signals)
        loss, grads = loss + float(value), new if grads is None else jax.tree.map(jnp.add, grads, new)
    return loss, {"/".join(map(str, path)): np.asarray(g) for path, g in jax.tree_util.tree_leaves_with_path(grads)}


@pytest.fixture(scope="module")
def cut_twice(mixed, pair, passes):
    """case -> (loss, gradient) of whole trajectories and of their parts."""
    whole, where, parts = pair
    scores, rng = mixed[1], np.random.default_rng(2)
    blank = lambda x: np.where(whole.loss_mask, x, 0)  # noqa: E731
    said = {n: blank(-4.1 + 0.3 * rng.normal(size=len(whole.tokens))) for n in ("old", "ref", "behaviour")}
    said["old_value"] = blank(rng.normal(size=len(whole.tokens)))
    of_parts = {n: np.where(parts.loss_mask, x[where], 0) for n, x in said.items()}
    return lambda case: (loss_and_gradient(case, whole, scores, said, passes),
                         loss_and_gradient(case, parts, scores, of_parts, passes))


@pytest.mark.parametrize("case", [case for case in CASES if case != "gspo"])
@pytest.mark.slow
def test_cutting_a_trajectory_changes_neither_loss_nor_gradient(cut_twice, case):
    """Of any preset whose ratios are of tokens. 1e-12 are some thousand roundings in float64, as elsewhere."""
    (a, of_whole), (b, of_parts) = cut_twice(case)
    assert b == pytest.approx(a, rel=1e-12, abs=1e-13)
    moved = {name: g for name, g in of_whole.items() if g.any()}
    assert len(moved) > 10 and max(np.abs(g).max() for g in moved.values()) > 1e-5
    assert worst({name: of_parts[name] for name in moved}, moved) < 1e-12
    assert not any(of_parts[name].any() for name in of_whole.keys() - moved.keys())


@pytest.mark.full
def test_a_ratio_of_sequences_is_of_segments(cut_twice):
    """GSPO sees the cut: documented, and the test above can fail."""
    (_, of_whole), (_, of_parts) = cut_twice("gspo")
    moved = {name: g for name, g in of_whole.items() if g.any()}
    assert worst({name: of_parts[name] for name in moved}, moved) > 1e-3


# -- what is refused ---------------------------------------------------------------------------------------------------

EPISODES = {"env.function": "guess"}
TURN, GIGPO = {"algorithm.advantage": "turn"}, {"algorithm.preset": "gigpo", **EPISODES}
REFUSED = [
    ({"algorithm.turn_gamma": 0.9}, "algorithm.turn_gamma=0.9 has no effect with algorithm.advantage=outcome; set algorithm.advantage=turn or gigpo"),
    (TURN | {"algorithm.turn_gamma": 0.9}, "algorithm.turn_gamma=0.9 has no effect with algorithm.advantage=turn and without env.function, "
     "env.program, env.tools and env.mcp; set algorithm.advantage=gigpo, env.function"),
    (TURN | EPISODES | {"algorithm.turn_gamma": 1.5}, "algorithm.turn_gamma=1.5: must lie in 0..1"),
    (TURN | EPISODES | {"algorithm.anchor_coef": 0.5}, "algorithm.anchor_coef=0.5 has no effect with algorithm.advantage=turn; set "
     "algorithm.advantage=gigpo"),
    (GIGPO | {"algorithm.anchor_coef": 0.0}, "algorithm.anchor_coef=0.0: must be above 0"),
    ({"algorithm.preset": "gigpo"}, "set env.function, or take algorithm.preset=grpo, which is the same without states"),
    (GIGPO | {"algorithm.advantage_mean": "batch"}, "algorithm.advantage_mean=batch with algorithm.advantage=gigpo: both its "
     "advantages are relative to a group; set group or leave_one_out"),
    (TURN | {"algorithm.advantage_std": "group"}, "algorithm.advantage_std=group with algorithm.advantage=turn: its baseline is the "
     "mean of the group's others, without a scale; set none"),
    (TURN | {"algorithm.advantage_mean": "batch"}, "algorithm.advantage_mean=batch with algorithm.advantage=turn: its baseline is "
     "the mean of the group's others, without a scale; set leave_one_out"),
    (TURN | {"algorithm.preset": "remax", "algorithm.advantage_mean": "greedy"}, "algorithm.advantage_mean=greedy with "
     "algorithm.advantage=turn"),
    (TURN | {"rollout.group_size": 1, "algorithm.preset": "ppo"}, "rollout.group_size=1: a group baseline needs"),
    (TURN | EPISODES | {"reward.norm_std": "group"}, "reward.norm_std=group with algorithm.advantage=turn: it compares within the "
     "group by itself, and the rewards of turns would not be normalised; set none"),
    (GIGPO | {"reward.norm_mean": "batch"}, "reward.norm_mean=batch with algorithm.advantage=gigpo"),
    (EPISODES | {"algorithm.advantage": "returns"}, "algorithm.advantage_std=group with algorithm.advantage=returns: the rewards of "
     "turns would not be divided, only their sum; set none"),
    (EPISODES | {"algorithm.preset": "ppo", "reward.norm_std": "batch"}, "reward.norm_std=batch with algorithm.advantage=gae"),
    (TURN | {"algorithm.gamma": 0.9}, "algorithm.gamma=0.9 has no effect with algorithm.advantage=turn; set algorithm.advantage=returns or gae"),
]


def checked(changes):
    c = tiny_job.get_config()
    for name, value in changes.items():
        put(c, name, value)
    common.check(c)
    return c


@pytest.mark.parametrize("changes, message", REFUSED, ids=[", ".join(f"{k}={v}" for k, v in c.items()) for c, _ in REFUSED])
def test_what_cannot_work_is_refused_with_its_remedy(changes, message):
    with pytest.raises(ConfigError) as error:
        checked(changes)
    assert message in str(error.value)


def test_what_can_is_not():
    for changes in (TURN, TURN | {"algorithm.advantage_mean": "leave_one_out", "algorithm.advantage_std": "none"},
                    TURN | {"algorithm.preset": "ppo"}, {"algorithm.advantage": "returns"}):
        checked(changes)
    row = resolve(checked(TURN | {"algorithm.preset": "remax"}), engine="jax").row()  # no greedy answer is asked for
    assert row["advantage_mean"] == ("leave_one_out", "advantage turn") and row["policy_loss"] == ("pg", "preset remax")
