"""Searches stop strings in text, on the host, between decode chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


def text_decoder(tokenizer) -> Decode:
    """Returns a function token ids -> text as produced: special tokens visible, spaces untouched.

    tokenizer: anything with Hugging Face's `decode`."""
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def find_stop(decode: Decode, tokens: Sequence[int], new: int, stops: Sequence[str],
              minimum: int = 0) -> tuple[int, int] | None:
    """Returns the first token among the last `new` that completes a stop string.

    Args:
      decode: token ids -> text.
      tokens: the completion so far.
      new: number of its last tokens not yet searched.
      stops: the strings, at least one.
      minimum: a string completed before this many tokens does not count.

    Returns:
      (kept, cut): completion lengths with the whole string (`kept`, up to and including the token that completes it)
      and without any token that holds a character of it (`cut`); None if no string is complete. Of several strings
      completed by the same token the one that begins first decides `cut`.
    """
    # A string of n bytes spans at most n tokens that have text, so a short window of earlier tokens is enough.
    reach = max(len(s.encode()) for s in stops) + 8
    begin = max(0, len(tokens) - new - reach)
    window = tokens[begin:]
    first = len(tokens) - new - begin
    if not any(s in decode(window) for s in stops):
        return None
    for size in range(max(first, minimum - 1 - begin), len(window)):
        # A character still in pieces shows as U+FFFD and is not text yet.
        before, text = decode(window[:size]).rstrip("\ufffd"), decode(window[:size + 1])
        starts = [at for s in stops if (at := text.find(s, max(0, len(before) - len(s) + 1))) >= 0]
        if starts:
            cut = next(n for n in range(size, -1, -1) if len(decode(window[:n])) <= min(starts))
            return begin + size + 1, begin + cut
    return None
