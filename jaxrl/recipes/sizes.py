"""The sizes of training's pieces that a config leaves to jaxrl, by platform."""

from __future__ import annotations

from jaxrl.config import settled
from jaxrl.config_checks import longest_sequence

ROW = 2048  # a row is made longer than the longest sequence up to this, to hold a group and its one prompt
MICROBATCH, MICROBATCH_CPU = 16384, 2048  # tokens held at once
CHUNK, CHUNK_CPU = 1024, 512  # tokens that meet the head at once: the last chunk of a microbatch is rarely full


def decided(config, platform: str):
    """A copy of `config` in which the recipe's defaults, train.row_lengths, tokens_per_microbatch and logprob_chunk are set.

    Rows: the longest sequence; longer, for a whole group that shares its prompt, up to ROW and the microbatch. Attention's work
    follows the documents in a row, not its length, so that long rows cost nothing and waste less at their ends. CPUs are fast while a
    microbatch stays in their cache, and slow where gradients of all weights are added up too often (benchmarks/peers, 2 cores).
    """
    c = settled(config)
    t, longest = c.train, longest_sequence(c)
    if not t.row_lengths:
        prompt = min(c.data.max_prompt_tokens, longest - 1)
        shared = c.rollout.group_size if c.run.recipe == "rl" and t.share_prompts else 1
        whole = prompt + shared * (longest - prompt)
        t.row_lengths = (-(-max(longest, min(whole, t.tokens_per_microbatch or ROW, ROW)) // 8) * 8,)
    if not t.tokens_per_microbatch:
        t.tokens_per_microbatch = max(max(t.row_lengths), MICROBATCH_CPU if platform == "cpu" else MICROBATCH)
    t.logprob_chunk = t.logprob_chunk or (CHUNK_CPU if platform == "cpu" else CHUNK)
    return c
