"""The lists of blocks that hold work, against the mask itself."""

import numpy as np
import pytest
from helpers.attention_cases import CASES, Case, inputs

from jaxrl.kernels.attention.packed.blocks import active_blocks, block_lists
from jaxrl.kernels.attention.packed.reference import visible


@pytest.mark.parametrize("sizes", [(16, 32), (128, 128)])
@pytest.mark.parametrize("case", [c for c in CASES if c.size == 64 and c.dtype == "float32"], ids=str)
@pytest.mark.slow
def test_lists_are_the_masks_own_blocks(case: Case, sizes):
    """Active is a block with a visible pair of a real query, and no other; lists ascend and repeat their last entry."""
    ids = inputs(case)[2]
    block_q, block_k = sizes
    mask = np.asarray(visible(ids, case.window))
    if ids[2] is not None:
        mask = mask & (ids[2] != 0)[..., None]
    mask = np.pad(mask, [(0, 0), (0, -mask.shape[1] % block_q), (0, -mask.shape[2] % block_k)])
    want = mask.reshape(len(mask), mask.shape[1] // block_q, block_q, -1, block_k).any(axis=(2, 4))
    active = active_blocks(ids, window=case.window, block_q=block_q, block_k=block_k)
    np.testing.assert_array_equal(active, want)
    for lists, own in ((block_lists(active), want), (block_lists(active.swapaxes(1, 2)), want.swapaxes(1, 2))):
        assert lists.blocks.shape == own.shape
        for blocks, count, row in zip(*(np.asarray(x).reshape(-1, *x.shape[2:]) for x in lists),
                                      own.reshape(-1, own.shape[2]), strict=True):
            here = np.flatnonzero(row)
            assert count == len(here)
            np.testing.assert_array_equal(blocks[:count], here)
            assert (blocks[count:] == (here[-1] if count else 0)).all()
