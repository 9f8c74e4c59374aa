"""The sizes of training's pieces that a config leaves to jaxrl, by model and platform."""

from __future__ import annotations

from jaxrl.config_checks import longest_sequence

ROW = 2048               # a row is made longer than the longest sequence up to this, to hold a group and its one prompt
MICROBATCH = 16384       # tokens held at once by an accelerator
CPU_NUMBERS = 1 << 20     # numbers of one MLP activation that stay in a CPU's cache from one operation to the next
CHUNK = {"cpu": 256}     # tokens whose logits exist at once; elsewhere:
CHUNK_ELSEWHERE = 1024


def decided(config, mlp_size: int, platform: str):
    """A copy of `config` in which train.row_lengths, tokens_per_microbatch and logprob_chunk are set.

    Rows: the longest sequence; longer, for a whole group that shares its prompt, up to ROW and the microbatch. Attention's work
    follows the documents in a row, not its length, so that long rows cost nothing and waste less at their ends. On CPUs the microbatch is
    what the cache holds (W1 of benchmarks/peers, 2 cores: 4096 tokens at once take 1.4 times as long as 1024).
    """
    c = config.copy_and_resolve_references()
    t, longest = c.train, longest_sequence(c)
    if not t.row_lengths:
        prompt = min(c.data.max_prompt_tokens, longest - 1)
        shared = c.rollout.group_size if c.run.recipe == "rl" and t.share_prompts else 1
        whole = prompt + shared * (longest - prompt)
        t.row_lengths = (-(-max(longest, min(whole, t.tokens_per_microbatch or ROW, ROW)) // 8) * 8,)
    if not t.tokens_per_microbatch:
        t.tokens_per_microbatch = max(max(t.row_lengths), CPU_NUMBERS // mlp_size if platform == "cpu" else MICROBATCH)
    if not t.logprob_chunk:
        t.logprob_chunk = CHUNK.get(platform, CHUNK_ELSEWHERE)
    return c
