"""Conversations of several turns as token ids: what was sampled stays, only new messages are rendered behind it.

A conversation is never tokenised again: re-rendering what a model said gives other tokens than it sampled. The next
prompt is the recorded ids, then whatever of the turn's end is missing, then the new messages and the generation prompt.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from functools import cached_property, partial

import numpy as np

from jaxrl.data.dataset import PromptError, Template, check_messages
from jaxrl.data.suffixes import EARLIER, QUESTION, Shape, Suffixes, sentinel
from jaxrl.data.tokenizer import completion_texts
from jaxrl.data.tokens import Tokens
from jaxrl.envs.parsers import PARSERS, Call, Parser, types_of
from jaxrl.errors import ConfigError

THINK = ("<think>", "</think>")
HIDDEN = re.compile(r"QZc(\d{3,})ZXQ")
STAND_INS = (*range(0xE000, 0xF8FF), *range(0xF0000, 0xFFFFE))  # of private use, which stand for a marker's token
USER, TOOL = ("user", False, False), ("tool", True, True)


class TurnRenderer:
    """Renders messages behind recorded ids, and reads turns.

    tools: JSON schemas that the chat template is told. tokens: of another renderer of the same tokenizer. stop_ids: end
    tokens beside the tokenizer's: that with which the template ends a turn, and with env.max_parallel_calls=1 that
    which ends a call, so that a model that goes on after a call cannot invent its result. Errors: ConfigError where
    there is no chat template or no fast tokenizer, PromptError where the template refuses messages.
    """

    def __init__(self, config, tokenizer, tools=(), tokens: Tokens | None = None):
        self.config, self.tokenizer, self.tools = config, tokenizer, list(tools or ())
        self.template = Template(config, tokenizer, self.tools)
        if not self.template.chat:
            why = "the tokenizer has no chat template" if config.data.chat != "false" else "data.chat=false"
            raise ConfigError(f"several turns (env.*, data.train_turns=all) need a chat template, and {why}: give"
                              " model.chat_template=FILE and leave data.chat=auto")
        marks = (*THINK, *(mark for parser in PARSERS.values() for mark in parser.marks))
        self.tokens = tokens or Tokens(tokenizer, marks)
        self.types, self.inline = types_of(self.tools), config.env.observations == "inline"
        self._suffixes = Suffixes(self.template, self.tokens)
        self._reads_calls = bool(self.tools) or config.env.parser != "auto"
        self._alone = {mark: self.tokens.added[mark] for mark in marks if mark in self.tokens.added
                       and self.tokens.written(mark) == [self.tokens.added[mark]]}
        self.parser = self._found_parser()
        self._thinks = self.template.render([QUESTION]).rstrip().endswith(THINK[0])

    # What comes before a turn.

    def first(self, messages, tools=None) -> np.ndarray:
        """[P] int32: a whole conversation (text: one user turn), ending with the generation prompt. tools: of this
        conversation, None = the renderer's. No control token comes out of a message that is not the assistant's."""
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        hidden: list[str] = []
        kept = [self._hide(m, hidden) for m in messages]
        kwargs = {} if tools is None else {"tools": list(tools) or None}
        text = self.template.conversation(kept, self.template.generation_prompt, **kwargs) + self.template.prefix
        ids, at = [], 0
        for match in HIDDEN.finditer(text):
            ids += [*self.tokens.written(text[at:match.start()]), *self.tokens.plain(hidden[int(match[1])])]
            at = match.end()
        return np.array([*ids, *self.tokens.written(text[at:])], np.int32)

    def _hide(self, message: dict, hidden: list[str]) -> dict:
        """The message with sentinels where its content spells control tokens, which go to `hidden`."""
        content = message.get("content")
        if message["role"] == "assistant" or not isinstance(content, str):
            return message

        def stand_in(match):
            hidden.append(match.group())
            return sentinel("c", len(hidden) - 1)
        return {**message, "content": self._spelled_control.sub(stand_in, _clean(content))}

    @cached_property
    def _spelled_control(self) -> re.Pattern:
        """Whatever must not reach the template as it is: control tokens, and what looks like a stand-in for one."""
        literals = sorted(self.tokens.control.values(), key=len, reverse=True)
        return re.compile("|".join([*map(re.escape, literals), HIDDEN.pattern]))

    def control_in(self, text: str) -> str:
        """A control token that a text spells; "" where there is none."""
        return next((token for token in self.tokens.control.values() if token in text), "")

    def extend(self, history: np.ndarray, messages, limit: int = 0) -> np.ndarray:
        """[A] int32: what comes behind recorded ids so that the next turn follows: what is missing of the last turn's
        end, the new messages, the generation prompt.

        history: prompt and turns so far, ending with what was sampled. messages: [{"role", "content"}], those of role
        `tool` with `name` and `tool_call_id`; a text is one user turn. limit: tokens of a content, more is cut in the
        middle (0: any). With env.observations=inline and a turn that was not ended: the contents alone.
        """
        messages = _messages(messages)
        contents = [self.tokens.cut(_clean(m["content"]), limit) for m in messages]
        if self.inline and not (len(history) and int(history[-1]) in self.end_ids):
            return np.array([i for content in contents for i in self.tokens.plain(content)], np.int32)
        shape = self._suffixes.of(messages)
        pieces = [(shape.end, True)]
        for piece in shape.pieces:
            if isinstance(piece, str):
                pieces.append((piece, True))
            elif piece[1] == "content":
                pieces.append((shape.edit[piece[0]](contents[piece[0]]), False))
            else:
                pieces.append((_clean(messages[piece[0]][piece[1]]), False))
        behind = self.tokens.joined(pieces)[1:]
        return np.array([*_missing(history, shape.close), *behind], np.int32)

    # What a turn says.

    def read(self, ids, tools=None) -> dict:
        """{"text", "thinking", "calls": [{"id", "name", "arguments": dict or None, "error"}]} of sampled ids. Never
        raises: what cannot be read as a call is one with `error`; the turn's text with all its calls is then there as
        `written`. tools: schemas of this conversation, None = the renderer's."""
        thinking, text, marks = self._parts(ids)
        calls, whole, types = [], text, types_of(tools) if tools else self.types
        if self.parser is not None and (tools or self._reads_calls):
            outside, calls = self.parser.read(text, tuple(marks.get(m, m) for m in self.parser.marks), types)
            text = outside if calls else text
        told = {"written": _spelled(whole, marks)} if any(call.error for call in calls) else {}
        own = Counter(call.id for call in calls)
        said = hashlib.sha256(np.asarray(ids, np.int64).tobytes()) if calls else None
        return {"text": _spelled(text, marks), "thinking": _spelled(thinking, marks), **told,
                "calls": [_reported(call, i, said, marks, own) for i, call in enumerate(calls)]}

    def message(self, ids, tools=None) -> dict:
        """A turn as the assistant's message of a history that is rendered as a whole (`first`). Calls that cannot be
        read stay in the content as they were written."""
        turn = self.read(ids, tools)
        content, calls = turn["text"], turn["calls"]
        if "written" in turn:
            content, calls = turn["written"], []
        out = {"role": "assistant", "content": content}
        if turn["thinking"] and self._thinking_field:
            out[self._thinking_field] = turn["thinking"]
        elif turn["thinking"]:
            out["content"] = f"{THINK[0]}\n{turn['thinking']}\n{THINK[1]}\n\n{content}"
        if calls:
            out["tool_calls"] = [{"id": call["id"], "type": "function", "function": {
                "name": call["name"], "arguments": call["arguments"]}} for call in calls]
        return out

    def turn(self, messages, answer: dict, following=(), tools=None) -> list[int]:
        """Ids of a turn as the template writes it behind messages, with its end token. As `spoken`."""
        before, body, end = self.spoken(messages, answer, following, tools)
        written = self.tokens.written
        return [*rest_of(written(before), written(body), before, body, written), *end]

    def spoken(self, messages, answer: dict, following=(), tools=None) -> tuple[str, str, list[int]]:
        """(text before a turn, the same with the turn as the template writes it, ids behind it): up to its end token,
        which the text has or, where the template writes none, the ids: the tokenizer's, or what begins the following
        messages if model.eos_tokens names that. tools: of this conversation, None = the renderer's. Raises PromptError
        where the template does not write the turn behind its own generation prompt.
        """
        kwargs = {} if tools is None else {"tools": list(tools) or None}
        before = self.template.conversation(messages, self.template.generation_prompt, **kwargs) + self.template.prefix
        text = self.template.conversation([*messages, answer], False, **kwargs)
        if not text.startswith(before):
            raise PromptError("the chat template does not write the turn behind what a turn begins with,"
                              f" {before[-40:]!r}: {text[len(before) - 40:][:80]!r}; what would be trained on is not"
                              " what is sampled: take another model.chat_template, or data.chat_template_kwargs with"
                              " which it does")
        calls = (TOOL,) * len(answer.get("tool_calls") or ())
        shape = self._suffixes.of(_messages(following)) if following else self._suffixes.shape(calls or (USER,))
        place = text.rfind(shape.end, len(before)) + len(shape.end)
        if shape.own_end and place > len(before):
            return before, text[:place], []
        named = {self.tokenizer.convert_tokens_to_ids(token) for token in self.config.model.eos_tokens}
        eos, follows = self.tokenizer.eos_token_id, bool(following) and shape.close[-1] in named
        return before, text.removesuffix(shape.tail), [shape.close[-1] if follows or eos is None else eos]

    def _parts(self, ids) -> tuple[str, str, dict[str, str]]:
        """(thoughts, the rest, marker -> how it appears in both) of sampled ids without their end tokens."""
        ids = [int(i) for i in ids]
        while ids and ids[-1] in self.end_ids:
            ids.pop()
        whole, marks = self._decoded(ids), {}
        used = set(whole)
        free = (chr(c) for c in STAND_INS if chr(c) not in used)
        marks = {mark: next(free) for mark in self._alone}
        here = {i: marks[mark] for mark, i in self._alone.items()}
        if not here.keys().isdisjoint(ids):
            whole, run = "", []
            for i in [*ids, None]:
                if i is None or i in here:
                    whole, run = whole + self._decoded(run) + here.get(i, ""), []
                else:
                    run.append(i)
        begin, end = (marks.get(mark, mark) for mark in THINK)
        before, opened, inside = whole.partition(begin)
        if not (opened and not before.strip()):
            if not self._thinks:
                return "", whole, marks
            inside = whole
        thinking, _, rest = inside.partition(end)
        return thinking.strip(), rest.strip(), marks

    def _decoded(self, ids: list[int]) -> str:
        return self._texts([ids])[0]

    @cached_property
    def _texts(self):
        return completion_texts(self.tokenizer, self.end_ids)

    # What the template and the tokenizer decide.

    def _found_parser(self) -> Parser | None:
        """How calls are written: `env.parser`, or the parser that reads back what the template writes; None where no
        parser does or the template writes none. Finds out, too, whether it wants a call's arguments as text."""
        named = self.config.env.parser
        candidates = list(PARSERS.values()) if named == "auto" else [PARSERS[named]]
        for as_text in (False, True):
            self._suffixes.arguments_as_text = as_text
            try:
                text, begins = self._suffixes.written_call(1)
            except PromptError:
                continue
            last = text.find(sentinel("a"))
            ends = [k for k in range(last, len(text)) for c in self.tokens.control.values() if text.startswith(c, k)]
            for parser in candidates:
                if any(_whole(parser, text[at:k], 1) for k in [*ends, len(text)] for at in begins):
                    self._suffixes.reads = partial(_whole, parser)
                    return parser
        self._suffixes.arguments_as_text = False
        return None if named == "auto" else PARSERS[named]

    @cached_property
    def _thinking_field(self) -> str | None:
        """The message's field from which the template writes thoughts; None: they stand in the content."""
        for field in ("reasoning_content", "thinking"):
            message = {"role": "assistant", "content": "Hello.", field: sentinel("a")}
            try:
                if sentinel("a") in self.template.conversation([QUESTION, message], False):
                    return field
            except PromptError:
                continue
        return None

    @cached_property
    def _ends(self) -> list[Shape]:
        """How turns end, texts and calls, as far as the template can write them."""
        found = []
        for key in ((USER,), (TOOL,)) if self.parser is not None else ((USER,),):
            try:
                found.append(self._suffixes.shape(key))
            except PromptError:
                continue  # check() says so where it matters
        return found

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a turn: the tokenizer's and the config's, and the template's."""
        return self.own_ends | {shape.close[-1] for shape in self._ends}

    @cached_property
    def own_ends(self) -> frozenset[int]:
        """Those of them that stand at the end of a turn, not at the begin of what follows."""
        own = [self.tokenizer.convert_tokens_to_ids(token) for token in self.config.model.eos_tokens]
        own += [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        return frozenset([*own, *(shape.close[-1] for shape in self._ends if shape.own_end)])

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.stops(False)

    def stops(self, tools: bool) -> tuple[int, ...]:
        """The same where a conversation has tools of its own."""
        out = [shape.close[-1] for shape in self._ends if shape.own_end]
        reads = tools or self._reads_calls
        if self.parser is not None and reads and self.config.env.max_parallel_calls == 1:
            mark = self.parser.marks[self.parser.end] if self.parser.end >= 0 else ""
            out += [self._alone[mark]] if mark in self._alone else []
        return tuple(dict.fromkeys(i for i in out if i != self.tokenizer.eos_token_id))

    # Whether it can work.

    def check(self, tools: bool) -> None:
        """Renders conversations in which every piece is known, and says what the template cannot do. tools: also calls
        and their replies, several at once with env.max_parallel_calls > 1. Raises ConfigError."""
        self._reads_calls = self._reads_calls or tools
        name = f"model.chat_template={self.config.model.chat_template}" if self.config.model.chat_template else (
            f"the chat template of {self.config.model.tokenizer or self.config.model.path}")
        doing = "a text"
        try:
            self._check_shape((USER,))
            if tools:
                doing = "a tool call"
                if self.parser is None:
                    raise PromptError("no parser (" + ", ".join(PARSERS) + ") reads back the call that it writes, or it"
                                      " writes none")
                doing = "a tool call and its reply"
                self._check_shape((TOOL,))
            if tools and self.config.env.max_parallel_calls > 1:
                doing = "two tool calls and their replies"
                self._check_shape((TOOL, TOOL))
        except PromptError as e:
            remedies = ["another model.chat_template"]
            if doing != "a text":
                remedies += ["replies as user messages (an env.function instead of env.tools)"]
                remedies += ["env.parser=" + "|".join(PARSERS) if self.parser is None else "env.max_parallel_calls=1"]
            raise ConfigError(f"{name}: several turns do not work with it ({doing}): {e}. Take "
                              + ", or ".join(remedies)) from None

    def _check_shape(self, key) -> None:
        """Raises PromptError where what comes behind a turn depends on more than the new messages, or is not what the
        template writes before an assistant's turn."""
        suffixes, shape = self._suffixes, self._suffixes.shape(key)
        calls = sum(role == "tool" for role, *_ in key)
        longer = (*EARLIER, QUESTION)
        thought = f"{THINK[0]}\nHm.\n{THINK[1]}\n\n"
        if suffixes.behind(key, calls, longer) != shape.text:
            raise PromptError("what it writes behind a turn depends on how many turns came before")
        if not calls:
            said = {"content": thought + sentinel("a")}
            if suffixes.behind(key, 0, **said) != shape.text:
                raise PromptError("what it writes behind a turn with thoughts differs from that behind one without")
        alone = self.template.conversation([QUESTION], False)
        prompt = self.template.conversation([QUESTION], self.template.generation_prompt)
        opening = prompt.removeprefix(alone) + self.template.prefix
        if not shape.text.endswith(opening):
            answer = {"role": "assistant", "content": sentinel("n", 998)}
            written = suffixes.behind(key, calls, generation_prompt=False, more=(answer,))
            if written.partition(answer["content"])[0] + self.template.prefix != shape.text:
                raise PromptError("it ends with no generation prompt behind new messages, though it has one:"
                                  f" {opening!r}")
        if not calls and not _missing(np.zeros(1, np.int32) - 1, shape.close):
            raise PromptError("a turn that is cut by the length limit cannot be closed")


def end_of_turn(config, tokenizer) -> int | None:
    """The token with which the chat template ends an assistant's turn; None where there is no template, or none that
    writes one."""
    if not Template(config, tokenizer).chat:
        return None
    renderer = TurnRenderer(config, tokenizer)
    return next((shape.close[-1] for shape in renderer._ends if shape.own_end), None)


def rest_of(head: list[int], whole: list[int], before: str, body: str, written) -> list[int]:
    """Ids of what a text says behind another that it begins with, given the ids of both: those of the whole text where
    they begin with those of the other, else those of the rest by itself. written: text -> ids."""
    return whole[len(head):] if whole[:len(head)] == head else written(body[len(before):])


def _missing(history, close: tuple[int, ...]) -> tuple[int, ...]:
    """What of a turn's end is not at the end of the recorded ids."""
    if len(history) and int(history[-1]) == close[-1]:
        return ()
    tail = [int(i) for i in history[-len(close):]]
    overlaps = (k for k in range(min(len(close) - 1, len(tail)), 0, -1) if tuple(tail[-k:]) == close[:k])
    return close[next(overlaps, 0):]


def _whole(parser: Parser, text: str, calls: int) -> bool:
    """Whether a text is `calls` calls as Suffixes.turn has them, and nothing else where no marker tells them."""
    outside, found = parser.read(text)
    if outside and parser.marks[0] not in text:
        return False
    good = len(found) == calls and not any(call.error for call in found)
    return good and found[-1].arguments == {"x": sentinel("a")} and found[0].name == sentinel("n")


def _messages(messages) -> list[dict]:
    """New messages as the renderer takes them. Raises PromptError."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    elif isinstance(messages, dict):
        messages = [messages]
    out = []
    for message in check_messages(messages):
        kept = {"role": message["role"], "content": message["content"]}
        if message["role"] == "tool":
            kept |= {"name": str(message.get("name") or "tool"), "tool_call_id": str(message.get("tool_call_id") or "")}
        out.append(kept)
    return out


def _clean(text: str) -> str:
    """The text without halves of surrogate pairs, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


def _spelled(text: str, marks: dict[str, str]) -> str:
    for mark, stand_in in marks.items():
        text = text.replace(stand_in, mark)
    return text


def _reported(call: Call, i: int, said, marks, own: Counter) -> dict:
    """What an episode is told of a call: its own id where no other call has it, else one made of the turn's tokens,
    nine letters and digits, as some templates want it. said: hash of the turn's tokens."""
    arguments = call.arguments
    if arguments is not None:
        arguments = json.loads(_spelled(json.dumps(arguments, ensure_ascii=False), marks))
    said = said.copy()
    said.update(i.to_bytes(8, "little"))
    made = base64.b32encode(said.digest())[:9].decode()
    return {"id": _spelled(call.id, marks) if call.id and own[call.id] == 1 else made,
            "name": _spelled(call.name, marks), "arguments": arguments, "error": _spelled(call.error, marks)}
