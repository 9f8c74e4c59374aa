"""A trajectory is one or more sequences: its numbers do not see how it is cut; each sampled token is trained once."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.training_helpers import conversation, cut

from jaxrl import training
from jaxrl.algorithms.aggregation import AGGREGATIONS
from jaxrl.config.load import default_config
from jaxrl.errors import ConfigError
from jaxrl.resolve.spec import resolve
from jaxrl.rl.advantages import advantages
from jaxrl.rl.trajectories import collect, results_from_bytes, results_to_bytes, reward_items
from jaxrl.training.layout import RowShapes
from jaxrl.types import Sizes

SCORES = np.array([1.0, 0.0, 0.5, 2.0, np.nan, 1.0])


@pytest.fixture(scope="module")
def pair():
    whole = collect(*conversation(rewrite=False))
    where, parts = cut(whole)
    assert whole.num_sequences == whole.num_trajectories == parts.num_trajectories == 6 and parts.num_sequences == 12
    return whole, where, parts


@pytest.mark.parametrize("rewrite", [False, True])
def test_turns_become_trajectories(rewrite):
    requests, results = conversation(rewrite)
    traj = collect(requests, results)
    assert traj.num_sequences == (12 if rewrite else 6) and traj.num_trajectories == 6
    assert traj.group.tolist() == [0, 0, 1, 1, 2, 2] and traj.sample.tolist() == [0, 1] * 3
    last = {}
    for i, at in enumerate(traj.sampled()):  # each sampled token once, in order, with what the sampler said of it
        own = results[i]
        np.testing.assert_array_equal(traj.tokens[at], own.tokens)
        np.testing.assert_array_equal(traj.logprobs[at], own.logprobs)
        np.testing.assert_array_equal(traj.versions[at], traj.columns["turn"][at])
        last[i] = own.tokens[len(own.tokens) - own.turns[-1].size:].tolist()
    begins = iter(traj.offsets)
    for turn in (t for r in results for t in r.turns if t.opens):
        start = next(begins)
        np.testing.assert_array_equal(traj.tokens[start:start + len(turn.added)], turn.added)
        assert not traj.loss_mask[start:start + len(turn.added)].any()
    again, meta = results_from_bytes(results_to_bytes(results, "meta"))
    assert meta == "meta"
    np.testing.assert_equal([dataclasses.asdict(r) for r in again], [dataclasses.asdict(r) for r in results])
    same = traj.prefix[:, None] == traj.prefix  # a copy of a prompt is shared where it is the same
    heads = [traj.tokens[o:o + n].tolist() for o, n in zip(traj.offsets, traj.prompt_lengths, strict=False)]
    assert same.tolist() == [[a == b for b in heads] for a in heads]
    example = SimpleNamespace(prompt="p", answer=None, columns={})
    decode = lambda ids: [str(i.tolist()) for i in ids]  # noqa: E731
    texts, items = reward_items(traj, [example] * 6, decode)
    assert [item.token_ids for item in items] == list(last.values())
    assert texts == [item.completion for item in items] == [str(ids) for ids in last.values()]


def test_numbers_of_trajectories_do_not_see_how_they_are_cut(pair):
    """Weights, advantages, statistics and lengths; and a sum over tokens is the same whatever the cut."""
    whole, where, parts = pair
    mask = parts.loss_mask
    assert np.bincount(where[mask], minlength=len(whole.tokens)).tolist() == whole.loss_mask.astype(int).tolist()
    np.testing.assert_array_equal(whole.total(), parts.total())
    np.testing.assert_allclose(whole.total(whole.logprobs), parts.total(parts.logprobs), rtol=1e-6)
    every = [np.arange(t.num_sequences) for t in (whole, parts)]
    dropped = np.arange(6) == 3
    for aggregation in AGGREGATIONS:
        a, b = (training.loss_weights(t, q, aggregation, max_tokens=7, dropped=dropped, positive=~dropped)
                for t, q in zip((whole, parts), every, strict=True))
        for name in a:
            np.testing.assert_array_equal(b[name], np.where(mask, a[name][where], 0))
    values = np.random.default_rng(1).normal(size=len(whole.tokens))
    for preset, extra in (("grpo", {}), ("reinforce_pp", {"kl": values}), ("ppo", {"values": values})):
        config = default_config()
        config.algorithm.preset = preset
        given = [{k: v if t is whole else v[where] for k, v in extra.items()} for t in (whole, parts)]
        a, b = (advantages(resolve(config).algorithm, t, SCORES, **more) for t, more in zip((whole, parts), given, strict=True))
        np.testing.assert_allclose(b.tokens, np.where(mask, a.tokens[where], 0), rtol=1e-12, atol=1e-15, err_msg=preset)
        assert a.zero_signal.tolist() == b.zero_signal.tolist()


def test_sequence_means_by_enumeration(pair):
    """1 / (n |y|): |y| are the tokens a trajectory sampled in all its turns, n the trajectories."""
    _, _, parts = pair
    weights = training.loss_weights(parts, np.arange(12), "sequence_mean")["policy"]
    lengths = [0] * 6
    for q, (start, end) in enumerate(zip(parts.offsets, parts.offsets[1:], strict=False)):
        lengths[parts.trajectory[q]] += int(parts.loss_mask[start:end].sum())
    for q in range(12):
        for t in range(parts.offsets[q], parts.offsets[q + 1]):
            assert weights[t] == (1 / (6 * lengths[parts.trajectory[q]]) if parts.loss_mask[t] else 0)


def test_a_group_that_is_kept_lies_in_one_microbatch():
    random = np.random.default_rng(0)
    groups = np.repeat(np.arange(30), 2)
    prompts, answers = np.repeat(random.integers(2, 20, 30), 2), random.integers(1, 40, 60)
    sizes, shapes = Sizes(prompts, answers, groups, groups), RowShapes((64, 96), ((4, 1), (4, 1)))
    for share in (True, False):
        layout = training.make_layout(sizes, shapes, num_minibatches=3, keep_groups=True, share_prompts=share)
        micros = [m for mini in layout.minibatches for m in mini.microbatches]
        held = [sorted(i for row in m.rows for b in row for i in b.sequences) for m in micros]
        assert sorted(i for part in held for i in part) == list(range(60))
        assert all(len(part) == 2 * len(set(groups[part])) for part in held)
    with pytest.raises(ConfigError, match="train.tokens_per_microbatch: a group needs 2 rows of 64 tokens at once"):
        training.make_layout(Sizes([9] * 2, [40] * 2, [0] * 2, [0, 1]), RowShapes((64,), ((1,),)), keep_groups=True)
