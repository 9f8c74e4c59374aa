"""Stop strings: the window of recent tokens finds what a search of the whole text finds."""

import numpy as np
import pytest
from helpers.rollout_helpers import VOCAB, ids, tokenizer

from jaxrl.rollout.stops import find_stop, text_decoder

decode = text_decoder(tokenizer())


def brute_force(tokens, stops):
    """(kept, cut) of the first completion anywhere, over the whole text."""
    texts = [decode(tokens[:n]) for n in range(len(tokens) + 1)]
    for done, text in enumerate(texts):
        at = [text.find(s) for s in stops if s in text]
        if at:
            return done, max(n for n in range(done) if len(texts[n]) <= min(at))
    return None


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunked_search_equals_a_search_of_everything(chunk):
    rng, found = np.random.default_rng(chunk), 0
    for _ in range(60):
        tokens = rng.integers(4, VOCAB, 48).tolist()
        stops = [decode(rng.integers(4, VOCAB, rng.integers(1, 4)).tolist()) for _ in range(3)]
        got = None
        for end in range(chunk, 49, chunk):
            got = find_stop(decode, tokens[:end], chunk, stops)
            if got:
                break
        assert got == brute_force(tokens, stops)
        found += got is not None
    assert 10 < found < 60


def test_a_character_in_two_tokens_completes_with_its_last_byte():
    a, b = ids("<0xC3>", "<0xA9>")
    x, y = ids("x", "y")
    assert find_stop(decode, [x, a, b, y], 4, ["é"]) == (3, 1)
    assert find_stop(decode, [x, a, b], 1, ["é"]) == (3, 1)
    assert find_stop(decode, [x, a], 2, ["é"]) is None


def test_tokens_that_hold_part_of_the_string_are_cut():
    tokens = ids("x", "au", "v", "y")
    assert find_stop(decode, tokens, 4, ["uv"]) == (3, 1)  # 'au' goes: it holds the u
    assert find_stop(decode, tokens, 1, ["uv"]) is None    # looked at before
    assert find_stop(decode, tokens, 2, ["uv"]) == (3, 1)  # completed now, begun before


def test_the_string_that_begins_first_decides_the_cut():
    tokens = ids("x", "y", "z")
    assert find_stop(decode, tokens, 3, ["z", "yz"]) == (3, 1)


def test_completion_before_the_minimum_does_not_count():
    tokens = ids("x", "y", "x", "y", "x", "y")
    assert find_stop(decode, tokens, 6, ["xy"]) == (2, 0)
    assert find_stop(decode, tokens, 6, ["xy"], minimum=3) == (4, 2)
    assert find_stop(decode, tokens, 6, ["xy"], minimum=4) == (4, 2)
    assert find_stop(decode, tokens, 6, ["xy"], minimum=7) is None
