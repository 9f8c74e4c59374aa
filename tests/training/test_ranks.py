"""Rows that are cut over mesh.cp: what each rank has, that nothing is lost on the way, how even it is, what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.training_helpers import batch_of_groups

from jaxrl import training
from jaxrl.algorithms.numerics import sequence_sum
from jaxrl.config.load import default_config, load_config
from jaxrl.errors import ConfigError
from jaxrl.resolve.checks import common
from jaxrl.resolve.spec import Platform, resolve
from jaxrl.sharding.mesh import row_parts
from jaxrl.training import ranks
from jaxrl.training.layout import RowShapes


def packed(count, traj, columns):
    layout = training.make_layout(traj.sizes, RowShapes((512,), ((2,),), 1, count, (0, 16)))
    ones = {"token": np.ones(len(traj.tokens), np.float32)}
    return [(micro, training.pack(traj, micro, columns, ones)) for micro in layout.minibatches[0].microbatches]


def test_cut_rows_hold_the_same_tokens_slots_and_sources():
    """Wherever a token goes, its slots find it: what predicts it, its sequence, its columns. Every rank has as many slots."""
    traj, columns = batch_of_groups(groups=10, size=4, max_prompt=60, max_answer=120)
    columns = {"old": columns["old"], "routes": np.arange(2 * len(traj.tokens), dtype=np.int16).reshape(-1, 2)}
    for count in (2, 4):
        for (_, whole), (micro, cut) in zip(packed(1, traj, columns), packed(count, traj, columns), strict=True):
            assert not np.array_equal(cut.tokens, whole.tokens)
            for row in range(2):
                def tokens(batch, row=row):
                    held = np.column_stack([batch.tokens[row], batch.positions[row], batch.segments[row], batch.prefixes[row], batch.routes[row]])
                    used = batch.sequences[row] > 0
                    told = np.column_stack([batch.targets[row], batch.sequences[row], held[batch.sources[row]]])[used]
                    return held[np.lexsort(held.T)], told, batch.columns["old"][row][used]

                for a, b in zip(tokens(whole), tokens(cut), strict=True):
                    np.testing.assert_array_equal(a, b)
                each = (cut.sequences[row].reshape(count, -1) > 0).sum(axis=1)
                assert each.max() == -(-each.sum() // count) > 0
            back = np.zeros(len(traj.tokens), np.float32)
            training.unpack(traj, micro, cut.columns["old"], back)
            assert np.isin(back[back != 0], columns["old"].astype(np.float32)).all() and (back != 0).sum() == (cut.sequences > 0).sum()
            np.testing.assert_array_equal(back[back != 0], columns["old"].astype(np.float32)[back != 0])


@pytest.mark.parametrize("count", [2, 4, 8])
def test_ranks_are_even(count):
    """One long sequence, several, a prompt of many answers and padding: visible pairs of the busiest rank within 5 % of the
    mean, where contiguous parts of a causal row would have (2 - 1 / ranks) times."""
    length = 1024 * count
    at, end = np.arange(length), length * 4 // 5
    rows = [at, at % 1500, np.where(at < 700, at, 700 + (at - 700) % 550)]
    real = np.stack([at < length, at < length, at < end])
    pairs = ranks.count_keys(np.stack(rows), real, (0,))
    places = ranks.assign_tokens(pairs, count)
    assert (np.sort(places, axis=1) == np.arange(length)).all()
    assert (places.reshape(3, -1, ranks.TILE) == places[:, ::ranks.TILE, None] + np.arange(ranks.TILE)).all(), "tiles stay whole"
    assert all(ranks.imbalance(pairs[i:i + 1], places[i:i + 1], count) < 1.05 for i in range(3))
    contiguous = ranks.imbalance(pairs[:1], np.arange(length)[None], count)
    assert contiguous == pytest.approx(2 - 1 / count, rel=1e-3)
    windowed = ranks.count_keys(np.stack(rows), real, (0, 128, 128))
    np.testing.assert_array_equal(windowed, pairs + 2 * np.minimum(pairs, 128))


def test_unused_slots_between_sequences_count_nothing():
    """As in a cut row: the sum of a sequence that goes on behind them is whole."""
    sequences = jnp.array([[1, 1, 2, 0, 2, 3, 0, 0], [0, 0, 1, 1, 0, 0, 2, 2]])
    x = jnp.array([[1.0, 2, 3, np.nan, 4, 5, np.inf, 7], [9, 9, 1, 2, 9, 9, 3, 4]])
    np.testing.assert_array_equal(sequence_sum(x, sequences), [[3, 3, 7, 0, 7, 5, 0, 0], [0, 0, 3, 3, 0, 0, 7, 7]])


def test_lengths_of_cut_rows():
    """Decided ones are whole tiles on every rank; given ones that are not equal parts are refused."""
    c = default_config()
    c.mesh.cp, c.data.max_prompt_tokens, c.rollout.max_new_tokens = 4, 300, 3000
    (length,) = resolve(c, Platform("tpu", "bf16")).train.row_lengths
    assert length % (4 * ranks.TILE) == 0 and 3300 <= length < 3300 + 4 * ranks.TILE
    c.mesh.roles = {"reference": {"devices": "0-5", "cp": 6}}
    assert row_parts(c.mesh) == 12
    with pytest.raises(ConfigError, match=r"train.row_lengths=\(3304,\): mesh.cp=4 cuts rows into equal parts.*multiples of 32, best of 512"):
        training.row_shapes((3304,), 3300, 8192, 1, ranks=4)
    with pytest.raises(ConfigError, match="mesh.cp=-1: rows are cut.*-1 to mesh.fsdp"):
        common.check(load_config("grpo", {"mesh.cp": -1, "mesh.fsdp": 1}))
    with pytest.raises(ConfigError, match="mesh.roles.policy.cp=-1"):
        common.check(load_config("grpo", {"mesh.roles": {"policy": {"cp": -1}}}))
