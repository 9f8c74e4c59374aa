"""Rows of models with recurrent layers: every one has room for its chunks, whatever the sequences."""

import numpy as np
import pytest

from jaxrl.kernels.recurrence import room, tokens_per_chunk
from jaxrl.training.layout import make_layout, row_shapes
from jaxrl.types import Sizes


@pytest.mark.full
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("lengths", [(96,), (2048,), (256, 1536)])
def test_rows_have_room_for_their_chunks(lengths, share):
    """Sequences as long as the row, prompts of one token, completions of one: no chunk too many, all of them placed; and
    by tokens alone some row would be too full."""
    rng, longest, count = np.random.default_rng(0), lengths[-1], 400
    groups = np.repeat(np.arange(count // 8), 8)
    prompts = np.repeat(rng.choice([1, 3, 17, longest // 3], count // 8), 8)
    completions = np.minimum(rng.choice([1, 2, 5, 70, longest], count), longest - prompts)
    sizes = Sizes(prompts, completions, groups, groups)

    def chunks(micro, row):
        size = tokens_per_chunk(micro.row_length)
        return sum(-(-prompts[b.sequences[0]] // size) + sum(-(-completions[i] // size) for i in b.sequences) for b in row)

    def rows(recurrent):
        shapes = row_shapes(lengths, longest, 4 * longest, 1, recurrent=recurrent)
        layout = make_layout(sizes, shapes, share_prompts=share)
        found = [(micro, row) for m in layout.minibatches for micro in m.microbatches for row in micro.rows]
        assert sorted(i for _, row in found for b in row for i in b.sequences) == list(range(count))
        own = sum(prompts[b.sequences[0]] + completions[list(b.sequences)].sum() for _, row in found for b in row)
        assert layout.used_tokens == own
        places = sum(chunks(micro, row) * tokens_per_chunk(micro.row_length) for micro, row in found)
        assert layout.metrics().get("packing/chunk_fill") == (own / places if recurrent else None)
        for micro, row in found:
            assert sum(prompts[b.sequences[0]] + completions[list(b.sequences)].sum() for b in row) <= micro.row_length
        return max(chunks(micro, row) - room(micro.row_length) for micro, row in found)

    assert rows(True) <= 0
    if lengths == (2048,) and share:
        assert rows(False) > 0
