"""Rows of batches with images: how many, and the shares of their tokens and patches that are used. Counted, nothing runs.

    python evidence/image_rows.py        # seconds; docs/guides/vision.md has the table, beside the layout of 11273bf7
"""

import numpy as np
from common import table

from jaxrl.training.layout import RowShapes, make_layout, row_patches
from jaxrl.types import Sizes

GROUP, UNIT = 8, 32


def counted(prompts, completions, patches, rows, expected):
    """Returns the table's row of a batch of groups. prompts, patches: of each group. completions: of each sequence. rows: (length, counts).
    expected: tokens of a prompt with its completions, as a job expects them."""
    group, nothing = np.repeat(np.arange(len(prompts)), GROUP), np.zeros(len(prompts), int)
    length, counts = rows
    room = row_patches((length,), np.stack([patches, nothing], 1), expected, UNIT)
    sizes = Sizes(prompts[group], completions, group, group, np.stack([patches, nothing], 1)[group])
    layout = make_layout(sizes, RowShapes((length,), (counts,), patches=room))
    used = sum(bool(row) for mini in layout.minibatches for micro in mini.microbatches for row in micro.rows)
    return [used, *(f"{share:.0%}" for share in layout.metrics().values())]


def main():
    rng = np.random.default_rng(0)
    few, many = 32, 64
    cases = {
        "benchmarks/vision.py": (np.full(2, 164), np.full(16, 64), np.full(2, 576), (768, (2,)), np.full(2, 676)),
        "configs/vision.py": (rng.integers(20, 30, few), rng.integers(4, 13, few * GROUP), np.full(few, 36), (256, (16,)), np.full(few, 25 + 48)),
        "photographs of 768 tokens": (np.full(many, 868), rng.integers(50, 500, many * GROUP), np.full(many, 3072), (4096, (16, 4)),
                                      np.full(many, 868 + GROUP * 250)),
    }
    sides = rng.integers(50, 1500, many)
    cases["images of 50 to 1,500 tokens in 7 of 10 prompts"] = (
        sides + 100, rng.integers(20, 400, many * GROUP), 4 * sides * (rng.random(many) < 0.7), (4096, (16, 4)), sides + 100 + GROUP * 200)
    table(["batch", "rows", "tokens", "patches"], [[name, *counted(*case)] for name, case in cases.items()])


if __name__ == "__main__":
    main()
