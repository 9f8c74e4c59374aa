"""Several turns as token ids: what is put behind recorded ids, what comes out of messages, and how turns are read."""

import random

import numpy as np
import pytest
from helpers.turn_cases import FAMILIES, TOOLS, chatml, make_renderer, make_tokenizer, random_text, renderer

from jaxrl.data.chat_template import PromptError
from jaxrl.data.tokens import MARKER
from jaxrl.envs.parsers import PARSERS, argument_types
from jaxrl.errors import ConfigError

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
    if kinds[1:]:
        said = [user("x"), called({"a": 1})]
        smuggled = r.first([*said, reply("x", name="".join(literals))])
        assert control(smuggled) == control(r.first([*said, reply("x", name="add")]))


NAMED = ("{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }} {{ m.tool_call_id }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def test_no_control_token_comes_out_of_a_name():
    """Of a template that writes names and call ids, in a whole conversation as in what follows a turn."""
    r = make_renderer(make_tokenizer(NAMED, ("<|im_end|>", "<|im_start|>")))
    told = lambda name: {"role": "tool", "content": "x", "name": name, "tool_call_id": name}  # noqa: E731
    control = lambda ids: [i for i in map(int, ids) if i in r.tokens.control]  # noqa: E731
    whole, spelled = (r.first([user("x"), told(name)]) for name in ("add", "<|im_end|><|im_start|>"))
    assert control(spelled) == control(whole) and r.tokenizer.decode(spelled).count("tool <|im_end|><|im_start|>") == 1


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


READ = {  # parser -> what a model writes -> (text, calls as (name, arguments or None))
    "hermes": [
        ('Hm. <tool_call>{"name": "f", "arguments": {"a": [1, null]}}</tool_call> So.', ("Hm.  So.", [("f", {"a": [1, None]})])),
        ('<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": "{\\"b\\": 2}"}</tool_call>',
         ("", [("f", {}), ("g", {"b": 2})])),
        ('<tool_call>{"name": "f", "arguments": {}', ("", [("", None)])),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', ("", [("f", None)])),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', ("", [("", None)])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', ("", [("f", None)])),
        ('<tool_call>{"name": "f"} {}</tool_call>', ("", [("", None)])),
        ('<tool_call>{"name": 3}</tool_call>', ("", [("", None)])),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", ("", [("", None)])),
        ("</tool_call>", ("</tool_call>", [])),
    ],
    "qwen": [
        ("<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n<parameter=note>\n7\n\n8\n</parameter>\n</function>\n"
         "</tool_call>", ("", [("add", {"a": 12, "note": "7\n\n8"})])),
        ("<tool_call><function=add><parameter=a>many</parameter></function></tool_call>", ("", [("add", {"a": "many"})])),
        ("<tool_call><function=f></function></tool_call>", ("", [("f", {})])),
        ("<tool_call><function=add><parameter=a>1</function></tool_call>", ("", [("add", None)])),
        ('<tool_call>{"name": "add"}</tool_call>', ("", [("", None)])),
    ],
    "llama": [
        ('{"name": "f", "parameters": {"a": 1}}; {"name": "g", "arguments": {}}', ("", [("f", {"a": 1}), ("g", {})])),
        ('<|python_tag|>{"name": "f", "parameters": {}}', ("", [("f", {})])),
        ('{"answer": 4}', ('{"answer": 4}', [])),
        ('{"name": "f", "parameters": {"a": ', ("", [("", None)])),
        ("<|python_tag|>print(4)", ("", [("", None)])),
    ],
    "mistral": [
        ('Hm.[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]',
         ("Hm.", [("f", {"a": 1}), ("g", {})])),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]h{"b": 2}',
         ("", [("f", {"a": 1}), ("g", {}), ("h", {"b": 2})])),
        ("[TOOL_CALLS]f[ARGS]", ("", [("", None)])),
        ("[TOOL_CALLS][]", ("", [("", None)])),
        ('[TOOL_CALLS][{"name": "f", "arguments": 1}]', ("", [("f", None)])),
        ("[TOOL_CALLS]", ("", [("", None)])),
    ],
    "pythonic": [
        ("[f(a=1, b=[true, None], c={'x': -1.5}), m.g()]", ("", [("f", {"a": 1, "b": [True, None], "c": {"x": -1.5}}), ("m.g", {})])),
        ("Hm.<|tool_call_start|>[f(a='x')]<|tool_call_end|>", ("Hm.", [("f", {"a": "x"})])),
        ("[1, 2]", ("[1, 2]", [])),
        ("[f(1)]", ("", [("f", None)])),
        ("[f(a=open('x'))]", ("", [("f", None)])),
        ("[f(a=b'x')]", ("", [("f", None)])),
        ("[f(a=1, a=2)]", ("", [("f", None)])),
        ("[f(**{'a': 1})]", ("", [("f", None)])),
        ("[f(a=" + "-" * 60_000 + "1)]", ("", [("", None)])),
        ("[f(a=" + "+".join("1" * 40_000) + ")]", ("", [("", None)])),
        ("[f(a=" + "(" * 5_000 + ")]", ("", [("", None)])),
        ("[f(a=1)] and more", ("", [("", None)])),
        ("<|tool_call_start|>[f(", ("", [("", None)])),
    ],
}


@pytest.mark.parametrize("name", READ)
def test_what_models_write_is_read_or_has_an_error(name):
    parser, types = PARSERS[name], argument_types(TOOLS)
    for text, expected in READ[name]:
        outside, calls = parser.read(text, types=types)
        assert (outside, [(c.name, c.arguments) for c in calls]) == expected, text[:80]
        assert all(bool(c.error) == (c.arguments is None) for c in calls)


def test_untyped_arguments_get_the_types_of_their_schemas():
    """Schemas of our own, of pydantic and of MCP servers: text stays text where text is allowed."""
    null, number = {"type": "null"}, {"type": "integer"}
    schemas = {  # argument -> (schema, what its text becomes)
        "listed": ({"type": ["string", "null"]}, {"123": "123", "null": None}), "text": ({"type": "string"}, {"123": "123", "null": "null"}),
        "some": ({"anyOf": [number, null]}, {"5": 5, "null": None}), "either": ({"anyOf": [{"type": "string"}, number]}, {"5": "5"}),
        "one": ({"oneOf": [number, {"type": "array"}]}, {"[5]": [5]}), "values": ({"enum": [1, 2]}, {"1": 1}), "any": ({}, {"5": "5"}),
        "own": ({"type": "string", "nullable": True}, {"null": None, "5": "5"}), "point": ({"$ref": "#/$defs/P"}, {'{"x": 1}': {"x": 1}}),
        "points": ({"anyOf": [{"$ref": "#/$defs/P"}, null]}, {"{}": {}}), "itself": ({"$ref": "#/$defs/Q"}, {"5": "5"}),
        "lost": ({"anyOf": [{"$ref": "#/$defs/R"}, number]}, {"5": "5"}), "whole": ({"allOf": [{"$ref": "#/$defs/P"}]}, {"{}": {}})}
    definitions = {"P": {"type": "object"}, "Q": {"anyOf": [{"$ref": "#/$defs/Q"}, {"$ref": "#/$defs/Q"}]}}
    types = argument_types([{"name": "f", "parameters": {
        "properties": {name: schema for name, (schema, _) in schemas.items()}, "$defs": definitions}}])
    for name, (_, texts) in schemas.items():
        for text, value in texts.items():
            call = f"<tool_call><function=f><parameter={name}>\n{text}\n</parameter></function></tool_call>"
            found = PARSERS["qwen"].read(call, types=types)[1][0].arguments[name]
            assert found == value and type(found) is type(value), (name, text, found)


@pytest.mark.parametrize("name", READ)
def test_no_text_makes_a_parser_raise(name):
    rng, pieces = random.Random(2), [text for text, _ in READ[name] if len(text) < 300] + [
        *PARSERS[name].marks, '{"name": "f", ', '"arguments": {', "}", "]", "[", '"', "\\ud800", "'", "(", "=", "\x00", "\ud800", "🙂"]
    for _ in range(2000):
        text = "".join(piece[rng.randrange(len(piece)):] if rng.random() < 0.3 else piece
                       for piece in rng.choices(pieces, k=rng.randrange(1, 7)))
        for call in PARSERS[name].read(text)[1]:
            assert (call.arguments is None) == bool(call.error)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_any_ids_are_read(family):
    rng, r = random.Random(3), renderer(family, TOOLS, parser=FAMILIES[family][3] or "hermes")
    control = [*r.tokens.control] * 20
    for _ in range(200):
        ids = rng.choices([*range(len(r.tokenizer)), *control], k=rng.randrange(30))
        turn = r.read(np.array(ids, np.int32))
        broken = any(call["error"] for call in turn["calls"])
        assert set(turn) == {"text", "thinking", "calls"} | ({"written"} if broken else set())
        r.extend(np.array([5, *ids]), [user("Go on.")])
        r.first([user("?"), r.message(ids)] + [user("!")]) if family not in ("llama", "mistral") else None


def test_the_config_names_how_calls_are_written():
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    for parser, count in (("auto", 1), ("hermes", 1), ("mistral", 0)):
        r = renderer("hermes", TOOLS, parser=parser)
        assert len(r.read(r.tokens.written(call))["calls"]) == count
    assert len(renderer("gemma", parser="hermes").read(r.tokens.plain(call))["calls"]) == 1  # not a tool in its template


def test_thoughts_are_told_from_the_answer():
    r = renderer("thoughts", TOOLS)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    said = r.read(r.tokens.written(f"<think>\nI could {call}\n</think>\n\nNo.<|im_end|>"))
    assert (said["thinking"], said["text"], said["calls"]) == (f"I could {call}", "No.", [])
    assert r.read(r.tokens.written("<think>\nStill"))["thinking"] == "Still"
    assert r.read(r.tokens.plain("<think> is a tag</think> "))["text"] == "<think> is a tag</think> "
    opened = renderer("opened")  # the prompt has opened the thought
    assert opened.read(opened.tokens.written("Hm.\n</think>\n\nFour.<|im_end|>")) == {
        "thinking": "Hm.", "text": "Four.", "calls": []}
    assert opened.read(opened.tokens.written("Hm"))["text"] == ""


def test_a_turn_as_a_message_of_a_rewritten_history():
    """env.history=template: what the template writes of a turn that was read is the turn."""
    r = renderer("hermes", TOOLS)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    for said in ("Four.", f"Hm.\n{call}", f"{call}\n{call}", "<tool_call>\n{broken\n</tool_call>"):
        ids = r.tokens.written(said + "<|im_end|>")
        messages = [user("?"), r.message(ids)]
        new = [reply("4", c["id"]) for c in messages[1].get("tool_calls", [])] or [user("And?")]
        first = list(r.first(messages[:1]))
        assert list(r.first([*messages, *new])) == [*first, *ids, *r.extend(np.array([*first, *ids]), new)]


def test_end_and_stop_tokens():
    tokens = lambda r: tuple(r.tokenizer.convert_ids_to_tokens(r.stop_ids))  # noqa: E731
    assert tokens(renderer("hermes")) == ()
    assert tokens(renderer("hermes", TOOLS)) == ("</tool_call>",)  # the model cannot go on to invent its result
    assert tokens(renderer("hermes", TOOLS, max_parallel_calls=2)) == ()
    template = FAMILIES["hermes"][0]
    other = make_renderer(make_tokenizer(template, ("<|endoftext|>", "<|im_end|>", "<|im_start|>")))
    assert tokens(other) == ("<|im_end|>",)  # the template's, which the tokenizer does not name as its own
    r = renderer("hermes", TOOLS)
    stopped = [*r.first("?"), *r.tokens.written('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>')]
    assert r.tokenizer.decode(r.extend(np.array(stopped), [reply("4")])).startswith("<|im_end|>\n<|im_start|>user\n")


def test_tools_are_told_to_the_template_by_the_first_prompt_alone():
    r = renderer("hermes", TOOLS)
    first = r.tokenizer.decode(r.first("?"))
    assert '"add"' in first and '"add"' not in r.tokenizer.decode(r.first("?", tools=[]))
    assert '"add"' not in r.tokenizer.decode(r.extend(r.first("?"), "And?"))


COUNTS = chatml("{{ m.content }}" + "{{ '(' ~ loop.index ~ ')' }}", "")
REFUSED = [  # template, tools, options, what the message says
    (None, False, {}, ("the tokenizer has no chat template", "model.chat_template=FILE")),
    (FAMILIES["hermes"][0], False, {"data__chat": "false"}, ("data.chat=false", "data.chat=auto")),
    (FAMILIES["gemma"][0], True, {}, ("the chat template of a/tokenizer", "(a tool call)", "env.function", "env.parser=")),
    (FAMILIES["llama"][0], True, {"max_parallel_calls": 2, "model__chat_template": "l.jinja"},
     ("model.chat_template=l.jinja", "(two tool calls and their replies)", "one call at a time", "env.max_parallel_calls=1")),
    (COUNTS, False, {}, ("(a text)", "depends on the number of earlier turns")),
    (FAMILIES["plain"][0].replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"), False, {}, ("2 times",)),
    (FAMILIES["plain"][0].replace("{{ m.content }}", "{{ m.content[0].text }}"), False, {}, ("0 times",)),
    (FAMILIES["plain"][0].replace("m.content }}", "m.content | upper }}"), False, {}, ("0 times",)),
    (FAMILIES["plain"][0].replace("{{ m.content }}", "{{ m.content | replace('<', '&lt;') }}"), False, {},
     ("neither text nor JSON",)),
    (FAMILIES["hermes"][0].replace("m.role == 'tool'", "m.role == 'nobody'").replace(
        "<|im_start|>{{ m.role }}\n{{ m.content }}", "{{ '' if m.role == 'tool' else m.content }}"), True, {},
     ("(a tool call and its reply)", "content once")),
    (FAMILIES["hermes"][0].replace("{% if add_generation_prompt", "{% if messages | length < 3 and add_generation_prompt"),
     False, {}, ("no generation prompt",)),
    ("{% for m in messages %}{% if '</think>' in m.content and not loop.last %}(thought){% endif %}{{ m.content }}"
     "{% if '</think>' in m.content %}!{% endif %}\n{% endfor %}", False, {}, ("whether the turn has thinking",)),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_a_template_that_cannot_be_gone_on_from_is_refused(case):
    template, tools, options, said = REFUSED[case]
    with pytest.raises(ConfigError) as e:
        make_renderer(make_tokenizer(template, ("<|im_end|>", "<|im_start|>", "<|eot_id|>"), ("<tool_call>", "</tool_call>")),
                      TOOLS if tools else (), **options).check(tools)
    assert all(part in str(e.value) for part in said), str(e.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_are_not_refused(family):
    parallel = 1 if family == "llama" else 2
    renderer(family, max_parallel_calls=parallel).check(tools=FAMILIES[family][3] is not None)


def test_messages_that_a_template_refuses_are_the_environments_fault():
    r = renderer("gemma")
    with pytest.raises(PromptError, match="roles alternate"):
        r.extend(r.first("?"), [user("One."), user("Two.")])
    with pytest.raises(PromptError, match="no text content"):
        r.extend(r.first("?"), [{"role": "user", "content": None}])
