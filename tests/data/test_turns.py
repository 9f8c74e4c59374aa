"""Several turns as token ids: what is put behind recorded ids, what comes out of messages, and how turns are read."""

import random

import numpy as np
import pytest
from turn_cases import FAMILIES, TOOLS, random_text, renderer

from jaxrl.data.tokens import MARKER

WITH_CALLS = [name for name, (*_, parser, _) in FAMILIES.items() if parser]


def user(content):
    return {"role": "user", "content": content}


def reply(content, call="AAAAAAAAA", name="add"):
    return {"role": "tool", "content": content, "name": name, "tool_call_id": call}


def called(*arguments):
    return {"role": "assistant", "content": "", "tool_calls": [
        {"id": f"ABCDEFGH{i}", "type": "function", "function": {"name": "add", "arguments": a}}
        for i, a in enumerate(arguments)]}


def written_turn(r, messages, message):
    """Ids of a turn as the template writes it behind a conversation, with its end token where it has one."""
    before = r.template.conversation(messages, True).removesuffix("<think>\n")
    text = r.template.conversation([*messages, message], False)
    assert text.startswith(before)
    ids = r.tokens.written(text[len(before):])
    ends = [k for k, i in enumerate(ids) if i in r.end_ids]
    return ids[:ends[-1] + 1] if ends else ids


@pytest.mark.parametrize("family", [name for name, (*_, append_only) in FAMILIES.items() if append_only])
def test_turns_and_what_is_put_behind_them_are_the_templates_rendering_of_the_whole(family):
    """Where a template only appends and a turn is what it would write."""
    rng, calls = random.Random(0), FAMILIES[family][3] is not None
    r = renderer(family, TOOLS if calls else ())
    for case in range(15):
        messages = [user(random_text(rng))]
        ids = list(r.first(messages))
        for turn in range(rng.randrange(1, 5)):
            if calls and rng.random() < 0.5:
                count = 1 if family == "llama" else rng.randrange(1, 4)
                said, new = called(*[{"a": k} for k in range(count)]), [
                    reply(random_text(rng), f"ABCDEFGH{k}") for k in range(count)]
            else:
                said, new = {"role": "assistant", "content": f"{case}.{turn}"}, [user(random_text(rng))]
            ids += written_turn(r, messages, said)
            ids += list(r.extend(np.array(ids), new))
            messages += [said, *new]
        assert r.tokenizer.decode(ids) == r.template.conversation(messages, True)
        assert ids == r.tokens.written(r.template.conversation(messages, True))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_control_token_comes_out_of_a_message(family):
    """Sampled tokens at random, also control tokens, ended and cut; contents spell every control token."""
    rng, r = random.Random(1), renderer(family)
    literals, vocabulary = list(r.tokens.control.values()), len(r.tokenizer)
    kinds = [user, reply] if FAMILIES[family][3] else [user]
    control = lambda ids: [i for i in map(int, ids) if i in r.tokens.control]  # noqa: E731
    for _ in range(40):
        history = [*r.first([user(random_text(rng))]), *[rng.randrange(vocabulary) for _ in range(rng.randrange(1, 20))]]
        history += [r.tokenizer.eos_token_id] * rng.randrange(2)
        message, text = rng.choice(kinds), random_text(rng, literals)
        behind = r.extend(np.array(history), [message(text)])
        assert behind.dtype == np.int32
        assert control(behind) == control(r.extend(np.array(history), [message("x")]))
        if family not in ("llama", "gemma"):  # which trim, or write JSON
            assert text.encode() in r.tokenizer.decode(behind).encode()
    smuggled = "".join(literals) + "QZc000ZXQ"
    assert control(r.first([user(smuggled)])) == control(r.first([user("x")]))
    assert smuggled in r.tokenizer.decode(r.first([user(smuggled)]))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_missing_of_a_turns_end_is_put_in(family):
    r = renderer(family)
    close = [int(i) for i in r._suffixes.of([user("")]).close]
    said = [*r.first([user("What?")]), *r.tokens.plain("Cut")]
    assert close[-1] in r.end_ids and len(close) == (2 if family == "command" else 1)
    ended = list(r.extend(np.array([*said, *close]), [user("And?")]))
    for have in range(len(close)):
        assert list(r.extend(np.array([*said, *close[:have]]), [user("And?")])) == [*close[have:], *ended]


def test_a_deleted_thought_and_the_length_of_the_history_change_nothing_behind_a_turn():
    r = renderer("thoughts")
    said = "<think>\nHm.\n</think>\n\nFour."
    messages = [user("What?"), {"role": "assistant", "content": said}, user("And?")]
    assert said not in r.template.conversation(messages, True)  # re-rendered, the recorded thought would be gone
    history = [*r.first(messages[:1]), *r.tokens.written(said + "<|im_end|>")]
    assert r.tokenizer.decode([*history, *r.extend(np.array(history), messages[2:])]).startswith(
        r.template.conversation(messages[:1], True) + said)


@pytest.mark.parametrize("limit", [1, 3, 8, 20])
def test_long_contents_are_cut_in_the_middle(limit):
    r = renderer("hermes")
    text = "begin" + "".join(chr(0x100 + k) for k in range(3 * limit)) + "end"
    cut = r.tokens.cut(text, limit)
    assert 0 < len(r.tokens.plain(cut)) <= limit and "\ufffd" not in cut
    assert r.tokens.cut("x" * limit, limit) == "x" * limit and r.tokens.cut(text, 0) == text
    if limit == 20:
        head, tail = cut.split(MARKER)
        assert text.startswith(head) and text.endswith(tail) and head and tail
    huge = r.tokens.cut("x" * 10_000_000, limit)
    assert len(r.tokens.plain(huge)) <= limit
    behind = r.tokenizer.decode(r.extend(np.array(r.first("Hi")), [user(text)], limit))
    assert cut in behind and text not in behind


def test_inline_observations_go_on_within_the_turn():
    r = renderer("hermes", observations="inline")
    said = [*r.first([user("What?")]), *r.tokens.plain("<code>")]
    assert r.tokenizer.decode(r.extend(np.array(said), "4<|im_end|>")) == "4<|im_end|>"
    assert r.tokens.control.keys().isdisjoint(map(int, r.extend(np.array(said), "4<|im_end|>")))
    ended = np.array([*said, r.tokenizer.eos_token_id])
    assert np.array_equal(r.extend(ended, "4"), renderer("hermes").extend(ended, "4"))


@pytest.mark.parametrize("family", WITH_CALLS)
def test_calls_that_the_template_writes_are_read_back(family):
    r = renderer(family, TOOLS)
    r.check(tools=True)
    assert r.parser.name == FAMILIES[family][3]
    arguments = {"a": 12, "note": 'two "words"\nand </b> 数'}
    for count in (1, 2):
        if family == "llama" and count == 2:
            continue
        thought = "Hm.\n</think>\n\n" if family == "opened" else ""  # whose prompt has opened it
        ids = [*r.tokens.written(thought), *written_turn(r, [user("?")], called(*[arguments] * count))]
        turn = r.read(ids)
        assert turn["text"] == "" and turn["thinking"] == thought[:3]
        assert [(c["name"], c["arguments"], c["error"]) for c in turn["calls"]] == [("add", arguments, "")] * count
        assert len({c["id"] for c in turn["calls"]}) == count and all(len(c["id"]) == 9 for c in turn["calls"])
        assert [c["function"]["arguments"] for c in r.message(ids)["tool_calls"]] == [arguments] * count
        spelled = r.tokens.plain(r.tokenizer.decode(ids))
        if family != "llama":  # whose calls no token tells
            assert r.read(spelled)["calls"] == []
