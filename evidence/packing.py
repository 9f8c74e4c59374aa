"""How full the packed rows are, and how even the data shards, at long-tailed lengths and default options.

Answers are drawn from lognormal distributions (sigma 0.9) cut at the longest, prompts from one around 150 tokens; 64 prompts, 8 answers
each, one optimizer step. `rows`: share of tokens in the rows that hold any; `microbatches`: in all rows, those the last microbatch leaves
empty included; `needed`: in the former, without the copies of a prompt whose group lies in several rows. `work` and `tokens`: what the
slowest shard has of attention's pairs and of tokens, over the mean, summed over microbatches. Lengths alone decide; no device is used.

    python evidence/packing.py
"""

from __future__ import annotations

import sys

import numpy as np
from common import record, table

from jaxrl import training
from jaxrl.config.lengths import longest_sequence
from jaxrl.config.load import default_config
from jaxrl.resolve.spec import Platform, resolve
from jaxrl.training.layout import attention_work
from jaxrl.types import Sizes

PROMPTS, GROUP, LONGEST_PROMPT = 64, 8, 512
SHAPES = ((64, 512), (300, 1024), (600, 2048), (1500, 8192), (4000, 32768))  # median and longest answer


def lengths(median: int, longest: int, seed: int):
    rng = np.random.default_rng(seed)
    answers = np.clip(rng.lognormal(np.log(median), 0.9, PROMPTS * GROUP).astype(int), 8, longest)
    prompts = np.clip(rng.lognormal(np.log(150), 0.5, PROMPTS).astype(int), 16, LONGEST_PROMPT)
    return np.repeat(prompts, GROUP), answers, np.repeat(np.arange(PROMPTS), GROUP)


def one(platform: str, shards: int, median: int, longest: int, seeds=(0, 1, 2)) -> dict:
    """Means over seeds."""
    c = default_config()
    c.data.max_prompt_tokens, c.rollout.max_new_tokens, c.rollout.group_size = LONGEST_PROMPT, longest, GROUP
    t = resolve(c, Platform(platform, "fp32")).train
    shapes = training.row_shapes(t.row_lengths, longest_sequence(c), t.tokens_per_microbatch, shards, t.row_counts)
    found = []
    for seed in seeds:
        prompts, answers, groups = lengths(median, longest, seed)
        layout = training.make_layout(Sizes(prompts, answers, groups, groups), shapes, share_prompts=t.share_prompts)
        micros = layout.minibatches[0].microbatches
        filled = sum(m.row_length for m in micros for row in m.rows if row)
        per_shard = [np.array([(sum(attention_work(b, prompts, answers) for b in row), sum(b.tokens for b in row)) for row in m.rows])
                     .reshape(shards, -1, 2).sum(1) for m in micros]
        slowest, mean = sum(x.max(0) for x in per_shard), sum(x.mean(0) for x in per_shard)
        needed = answers.sum() + prompts[::GROUP].sum()
        found.append((layout.used_tokens / filled, layout.efficiency, needed / filled, *(slowest / mean), len(micros)))
    names = ("rows", "microbatches", "needed", "work", "tokens", "count")
    return {"row": shapes.lengths[-1], **dict(zip(names, np.mean(found, axis=0).round(3).tolist(), strict=True))}


def main() -> int:
    rows = [{"platform": platform, "shards": shards, "median": median, "longest": longest, **one(platform, shards, median, longest)}
            for platform, shards in (("tpu", 1), ("tpu", 8), ("cpu", 1)) for median, longest in SHAPES]
    table(list(rows[0]), [list(row.values()) for row in rows])
    record("packing", rows)
    return int(any(row["rows"] < 0.95 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
