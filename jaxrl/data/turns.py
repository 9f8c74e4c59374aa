"""Multi-turn conversations as token ids: sampled ids stay as they are, only new messages are rendered after them.

A conversation is never tokenized again, since re-rendering a completion gives other tokens than were
sampled. The next prompt is the recorded ids, then what is missing of the turn's end, then the new messages
and the generation prompt.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from functools import cached_property, partial
from typing import Any

import numpy as np

from jaxrl.data.chat_template import PromptError, Template, check_messages
from jaxrl.data.images.expand import Tokens as ImageTokens
from jaxrl.data.images.expand import escape, restore
from jaxrl.data.images.read import ImageError
from jaxrl.data.suffixes import EARLIER, IMAGE, QUESTION, TEXT, Shape, Suffixes, parts_of, sentinel
from jaxrl.data.tokenizer import completion_texts
from jaxrl.data.tokens import Tokens
from jaxrl.envs.parsers import PARSERS, Call, Parser, argument_types
from jaxrl.errors import ConfigError

THINK = ("<think>", "</think>")
HIDDEN = re.compile(r"QZc(\d{3,})ZXQ")
STAND_INS = (*range(0xE000, 0xF8FF), *range(0xF0000, 0xFFFFE))  # private-use characters that stand for marker tokens
USER, TOOL = ("user", False, False), ("tool", True, True)
SHOWN = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hello?"}]}
FOLLOWS = "The image follows."  # reply of a tool that gave nothing else, where an image cannot be in a reply


class TurnRenderer:
    """Renders messages after recorded ids, and parses sampled turns.

    Args:
      config, tokenizer: of the job.
      tools: JSON schemas passed to the chat template.
      tokens: Tokens of another renderer with the same tokenizer, to share.
      images: what the model's family writes for an image; None = messages are text.

    Attributes:
      stop_ids: end tokens in addition to the tokenizer's: the one with which the template ends a turn, and with
        env.max_parallel_calls=1, if calls are read, the one that ends a call, so that a model cannot continue and
        invent the call's result.

    Raises:
      ConfigError: there is no chat template. `first` and `extend` raise it, too, for a tokenizer without a
        tokenizer.json, where a text spells a control token or has to be cut.
      PromptError: the template rejects a user's message.
    """

    def __init__(self, config, tokenizer, tools=(), tokens: Tokens | None = None, images: ImageTokens | None = None):
        self.config, self.tokenizer, self.tools, self.images = config, tokenizer, list(tools or ()), images
        self.template = Template(config, tokenizer, self.tools)
        if not self.template.chat:
            why = "the tokenizer has no chat template" if config.data.chat != "false" else "data.chat=false"
            raise ConfigError(f"several turns (env.*, data.train_turns=all) need a chat template, and {why}: give"
                              " model.chat_template=FILE and leave data.chat=auto")
        marks = (*THINK, *(mark for parser in PARSERS.values() for mark in parser.marks))
        self.tokens = tokens or Tokens(tokenizer, marks)
        self.types, self.inline = argument_types(self.tools), config.env.observations == "inline"
        self._suffixes = Suffixes(self.template, self.tokens, images)
        self._reads_calls = bool(self.tools) or config.env.parser != "auto"
        self._alone = {mark: self.tokens.added[mark] for mark in marks if mark in self.tokens.added
                       and self.tokens.written(mark) == [self.tokens.added[mark]]}
        self.parser = self._choose_parser()
        self._thinks = self.template.render([QUESTION]).rstrip().endswith(THINK[0])

    # What comes before a turn.

    def first(self, messages, tools=None) -> np.ndarray:
        """Returns the [P] int32 ids of a whole conversation (a text is one user turn), ending
        with the generation prompt.

        No control token comes from the content of a message that is not the assistant's, or from a message's name or
        tool_call_id.

        Args:
          messages: text or chat messages.
          tools: JSON schemas of this conversation; None for the renderer's.

        Raises PromptError if the template rejects the messages, ImageError as `first_with_images`.
        """
        return self.first_with_images(messages, tools)[0]

    def first_with_images(self, messages, tools=None) -> tuple[np.ndarray, np.ndarray]:
        """Returns ([P] int32 ids of a whole conversation, ending with the generation prompt, with one image token for
        each image; [I] the index of each of these).

        A content may be a list of parts {"type": "text", "text"} and {"type": "image"}; images are in their order. Of
        tools' replies they follow in a user's message where the template would leave them out.

        messages: text or chat messages. tools: JSON schemas of this conversation; None for the renderer's. Raises
        PromptError if the template rejects the messages; ImageError for an image in a job of text, and if the tokenizer
        does not make one id of each image token.
        """
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        hidden: list[str] = []
        marked, count = [self._hide(m, hidden) for m in self._placed(messages)], _count_images(messages)
        kwargs = {} if tools is None else {"tools": list(tools) or None}
        clean = escape(marked, self._image_tokens()) if count else None
        text = self.template.conversation(clean.messages if clean else marked, self.template.generation_prompt,
                                          **kwargs) + self.template.prefix
        text, marks = restore(text, clean.stand_ins, self._image_tokens(), count) if clean else (text, [])
        ids, at = [], 0
        for match in HIDDEN.finditer(text):
            ids += [*self.tokens.written(text[at:match.start()]), *self.tokens.plain(hidden[int(match[1])])]
            at = match.end()
        ids = np.array([*ids, *self.tokens.written(text[at:])], np.int32)
        return ids, self._image_places(ids, count, marks)

    def _image_tokens(self) -> ImageTokens:
        if self.images is None:
            raise ImageError("a message holds an image, and the model has no tower for images, or data.image_column=''")
        return self.images

    def _image_places(self, ids, count: int, marks=()) -> np.ndarray:
        """Returns the indices of `count` images' tokens. marks: whether each image token is an image's; () = all."""
        if not count:
            return np.zeros(0, np.int64)
        pad = self.tokenizer.convert_tokens_to_ids(self._image_tokens().pad)
        at, own = np.flatnonzero(ids == pad), np.array(marks or [True] * count)
        if len(at) != len(own):
            raise ImageError(f"the tokenizer makes {len(at)} image tokens (id {pad}) of {len(own)}; the image token "
                             "must be one special token of it")
        return at[own]

    def _placed(self, messages: list[dict]) -> list[dict]:
        """Returns the messages with images of tools' replies in a user's message after these, where the template would
        leave them out.
        """
        replies = [m["role"] == "tool" and _count_images([m]) > 0 for m in messages]
        if not any(replies) or self.tool_images:
            return messages
        out, moved = [], []
        for i, (message, shows) in enumerate(zip(messages, replies, strict=True)):
            if shows:
                moved += [part for part in message["content"] if part["type"] == "image"]
                text = "".join(part["text"] for part in message["content"] if part["type"] == "text")
                message = {**message, "content": text or FOLLOWS}
            out.append(message)
            if moved and (i + 1 == len(messages) or messages[i + 1]["role"] != "tool"):
                out.append({"role": "user", "content": moved})
                moved = []
        return out

    @cached_property
    def tool_images(self) -> bool:
        """Whether the template writes the images of a tool's reply."""
        try:
            self._suffixes.shape(((*TOOL, TEXT + IMAGE),))
            return True
        except PromptError:
            return False

    def _hide(self, message: dict, hidden: list[str]) -> dict:
        """Returns the message with sentinels in place of control tokens in its content, unless it is the assistant's,
        and in its name and tool_call_id; the originals are appended to `hidden`.
        """
        def stand_in(match):
            hidden.append(match.group())
            return sentinel("c", len(hidden) - 1)

        def without(text):
            return self._spelled_control.sub(stand_in, _without_surrogates(text))
        names = {field: without(message[field]) for field in ("name", "tool_call_id")
                 if isinstance(message.get(field), str)}
        message, content = {**message, **names}, message.get("content")
        if message["role"] == "assistant" or not isinstance(content, str | list):
            return message
        if isinstance(content, str):
            return {**message, "content": without(content)}
        return {**message, "content": [{**part, "text": without(part["text"])} if part.get("type") == "text" else part
                                       for part in content]}

    @cached_property
    def _spelled_control(self) -> re.Pattern:
        """Pattern of what must not reach the template unchanged: control tokens, and texts that look like a sentinel.
        """
        literals = sorted(self.tokens.control.values(), key=len, reverse=True)
        return re.compile("|".join([*map(re.escape, literals), HIDDEN.pattern]))

    def control_token_in(self, text: str) -> str:
        """Returns a control token that a text spells; "" if there is none."""
        return next((token for token in self.tokens.control.values() if token in text), "")

    def extend(self, history: np.ndarray, messages, limit: int = 0) -> np.ndarray:
        """Returns the [A] int32 ids to append to recorded ids so that the next turn follows: the missing part of the
        last turn's end, the new messages, the generation prompt.

        With env.observations=inline and a turn that did not end: the contents alone.

        Args:
          history: ids of prompt and turns so far, ending with sampled ids.
          messages: [{"role", "content"}], those of role `tool` with `name` and `tool_call_id`; a text
            is one user turn.
          limit: most tokens of a content, whose middle is cut; 0 for no limit.

        Raises PromptError if the template cannot write these messages after a turn, ImageError as `first_with_images`.
        """
        return self.extend_with_images(history, messages, limit)[0]

    def extend_with_images(self, history: np.ndarray, messages, limit: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Returns ([A] int32 ids to append to recorded ids, as `extend` returns them, with one image token for each
        image; [I] the index of each of these).

        Args:
          history: ids of prompt and turns so far, ending with sampled ids.
          messages: [{"role", "content"}], those of role `tool` with `name` and `tool_call_id`; a text is one user turn.
            A content may be a list of parts {"type": "text", "text"} and {"type": "image"}.
          limit: most tokens of each text of a content, whose middle is cut; 0 for no limit.

        Raises PromptError if the template cannot write these messages after a turn, ImageError as `first_with_images`.
        """
        messages = self._placed(_messages(messages, self.images is not None))
        count, parts = _count_images(messages), [part for m in messages for part in parts_of(m)]
        contents = [self.tokens.cut(_without_surrogates(part["text"]), limit) for part in parts
                    if part["type"] == "text"]
        if self.inline and not (len(history) and int(history[-1]) in self.end_ids):
            texts = iter(contents)
            ids = np.array([i for part in parts for i in (self.tokens.plain(next(texts)) if part["type"] == "text" else
                                                          self.tokens.written(self._image_tokens().text))], np.int32)
            return ids, self._image_places(ids, count)
        shape = self._suffixes.of(messages)
        pieces = [(shape.end, True)]
        for piece in shape.pieces:
            if isinstance(piece, str):
                pieces.append((piece, True))
            elif piece[1] == "content":
                pieces.append((shape.edit[piece[0]](contents[piece[0]]), False))
            else:
                pieces.append((_without_surrogates(messages[piece[0]][piece[1]]), False))
        behind = self.tokens.encode_pieces(pieces)[1:]
        ids = np.array([*_missing(history, shape.close), *behind], np.int32)
        return ids, self._image_places(ids, count)

    # What a turn says.

    def read(self, ids, tools=None) -> dict:
        """Parses sampled ids into {"text", "thinking",
        "calls": [{"id", "name", "arguments": dict or None, "error"}]}.

        Never raises. A call that cannot be parsed has `error`; the turn's text, calls included, is then in `written`.

        Args:
          ids: of the turn; end tokens at its end are left out.
          tools: JSON schemas of this conversation; None for the renderer's.
        """
        thinking, text, marks = self._parts(ids)
        calls, whole, types = [], text, argument_types(tools) if tools else self.types
        if self.parser is not None and (tools or self._reads_calls):
            outside, calls = self.parser.read(text, tuple(marks.get(m, m) for m in self.parser.marks), types)
            text = outside if calls else text
        written = {"written": _spelled(whole, marks)} if any(call.error for call in calls) else {}
        own = Counter(call.id for call in calls)
        content_hash = hashlib.sha256(np.asarray(ids, np.int64).tobytes()) if calls else None
        return {"text": _spelled(text, marks), "thinking": _spelled(thinking, marks), **written,
                "calls": [_call_record(call, i, content_hash, marks, own) for i, call in enumerate(calls)]}

    def message(self, ids, tools=None) -> dict:
        """Returns a sampled turn as the assistant's message, for a history that is rendered as a whole (`first`).

        ids: of the turn. tools: JSON schemas of this conversation; None for the renderer's. If a call cannot be parsed,
        all calls stay in the content unchanged."""
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
        """Returns the token ids of an assistant's message as the template writes it after `messages`, with its end
        token.

        Args:
          messages: before the turn. answer: the assistant's message. following: messages after the turn.
          tools: JSON schemas of this conversation; None for the renderer's.

        Raises PromptError if the template does not write the turn after its own generation prompt."""
        before, body, end = self.render_turn(messages, answer, following, tools)
        written = self.tokens.written
        return [*continuation_ids(written(before), written(body), before, body, written), *end]

    def render_turn(self, messages, answer: dict, following=(), tools=None) -> tuple[str, str, list[int]]:
        """Returns (text before a turn, text including the turn, ids to append).

        The text ends with the turn's end token if the template writes one. Else the ids hold it: the token that begins
        the following messages if model.eos_tokens names it or the tokenizer has no end token, else the tokenizer's.

        Args:
          messages: before the turn. answer: the assistant's message.
          following: messages after the turn.
          tools: JSON schemas of this conversation; None for the renderer's.

        Raises:
          PromptError: the template does not write the turn after its own generation prompt.
        """
        kwargs = {} if tools is None else {"tools": list(tools) or None}
        before = self.template.conversation(messages, self.template.generation_prompt, **kwargs) + self.template.prefix
        text = self.template.conversation([*messages, answer], False, **kwargs)
        if not text.startswith(before):
            raise PromptError("the chat template does not write the turn after its generation prompt,"
                              f" {before[-40:]!r}: {text[len(before) - 40:][:80]!r}; training would see other"
                              " tokens than sampling: use another model.chat_template, or data.chat_template_kwargs"
                              " that change this")
        calls = (TOOL,) * len(answer.get("tool_calls") or ())
        new = self._placed(_messages(following, self.images is not None)) if following else []
        shape = self._suffixes.of(new) if new else self._suffixes.shape(calls or (USER,))
        place = text.rfind(shape.end, len(before)) + len(shape.end)
        if shape.own_end and place > len(before):
            return before, text[:place], []
        named = {self.tokenizer.convert_tokens_to_ids(token) for token in self.config.model.eos_tokens}
        eos, follows = self.tokenizer.eos_token_id, bool(following) and shape.close[-1] in named
        return before, text.removesuffix(shape.tail), [shape.close[-1] if follows or eos is None else eos]

    def _parts(self, ids) -> tuple[str, str, dict[str, str]]:
        """Returns (thinking, the rest, marker -> how it appears in both) of sampled ids without their end tokens."""
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

    # Properties of the template and the tokenizer.

    def _choose_parser(self) -> Parser | None:
        """Returns the parser of tool calls: `env.parser`, or the one that parses what the template writes;
        None if no parser does or the template writes no calls. Also determines whether the template expects
        call arguments as text.
        """
        named = self.config.env.parser
        candidates = list(PARSERS.values()) if named == "auto" else [PARSERS[named]]
        for as_text in (False, True):
            self._suffixes.arguments_as_text = as_text
            try:
                text, begins = self._suffixes.render_calls(1)
            except PromptError:
                continue
            last = text.find(sentinel("a"))
            ends = [k for k in range(last, len(text)) for c in self.tokens.control.values() if text.startswith(c, k)]
            for parser in candidates:
                if any(_is_whole_calls(parser, text[at:k], 1) for k in [*ends, len(text)] for at in begins):
                    self._suffixes.is_calls = partial(_is_whole_calls, parser)
                    return parser
        self._suffixes.arguments_as_text = False
        return None if named == "auto" else PARSERS[named]

    @cached_property
    def _thinking_field(self) -> str | None:
        """The message field from which the template writes thinking; None if thinking is part of the content."""
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
        """How turns end, for texts and calls, as far as the template can write them."""
        shapes = []
        for key in ((USER,), (TOOL,)) if self.parser is not None else ((USER,),):
            try:
                shapes.append(self._suffixes.shape(key))
            except PromptError:
                continue  # check() raises if it matters
        return shapes

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a turn: the tokenizer's, the config's and the template's."""
        return self.end_of_turn_ids | {shape.close[-1] for shape in self._ends}

    @cached_property
    def end_of_turn_ids(self) -> frozenset[int]:
        """Stop tokens that close a turn, excluding those that open the next message."""
        own = [self.tokenizer.convert_tokens_to_ids(token) for token in self.config.model.eos_tokens]
        own += [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        return frozenset([*own, *(shape.close[-1] for shape in self._ends if shape.own_end)])

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Stop tokens in addition to the tokenizer's end token: the one with which the template ends a turn, and with
        env.max_parallel_calls=1 the one that ends a call, if the job has tools or names env.parser."""
        return self.stop_ids_with(False)

    def stop_ids_with(self, tools: bool) -> tuple[int, ...]:
        """Returns the stop tokens in addition to the tokenizer's end token: the one with which the template ends a
        turn, and with env.max_parallel_calls=1 the one that ends a call, if calls are read: of a conversation with its
        own tools (`tools` true), or in a job that has tools or names env.parser."""
        out = [shape.close[-1] for shape in self._ends if shape.own_end]
        reads = tools or self._reads_calls
        if self.parser is not None and reads and self.config.env.max_parallel_calls == 1:
            mark = self.parser.marks[self.parser.end] if self.parser.end >= 0 else ""
            out += [self._alone[mark]] if mark in self._alone else []
        return tuple(dict.fromkeys(i for i in out if i != self.tokenizer.eos_token_id))

    # Checks at start-up.

    def check(self, tools: bool, images: bool = False) -> None:
        """Renders test conversations and checks that the template can write them. Raises ConfigError with the reason
        and remedies. With `tools` the renderer reads calls from now on.

        Args:
          tools: also check calls and their replies, several at once with env.max_parallel_calls > 1.
          images: also check a message with an image.
        """
        self._reads_calls = self._reads_calls or tools
        name = f"model.chat_template={self.config.model.chat_template}" if self.config.model.chat_template else (
            f"the chat template of {self.config.model.tokenizer or self.config.model.path}")
        doing = "a text"
        try:
            self._check_shape((USER,))
            if images:
                doing = "an image"
                self._check_shape(((*USER, IMAGE + TEXT),))
            if tools:
                doing = "a tool call"
                if self.parser is None:
                    raise PromptError("no parser (" + ", ".join(PARSERS) + ") parses the call that it writes, or it"
                                      " writes none")
                doing = "a tool call and its reply"
                self._check_shape((TOOL,))
            if tools and self.config.env.max_parallel_calls > 1:
                doing = "two tool calls and their replies"
                self._check_shape((TOOL, TOOL))
        except PromptError as e:
            remedies = ["another model.chat_template"]
            if doing == "an image":
                remedies += ["env.image_tokens=0 and an environment of text"]
            elif doing != "a text":
                remedies += ["replies as user messages (an env.function instead of env.tools)"]
                remedies += ["env.parser=" + "|".join(PARSERS) if self.parser is None else "env.max_parallel_calls=1"]
            raise ConfigError(f"{name}: several turns do not work with it ({doing}): {e}. Use "
                              + ", or ".join(remedies)) from None

    def _check_shape(self, key) -> None:
        """Raises PromptError if what follows a turn depends on more than the new messages, or is not what the
        template writes before an assistant's turn.
        """
        suffixes, shape = self._suffixes, self._suffixes.shape(key)
        calls = sum(role == "tool" for role, *_ in key)
        longer = (*EARLIER, SHOWN if len(key[0]) > len(USER) else QUESTION)
        thought = f"{THINK[0]}\nHm.\n{THINK[1]}\n\n"
        if suffixes.text_after(key, calls, longer) != shape.text:
            raise PromptError("what it writes after a turn depends on the number of earlier turns")
        if not calls:
            with_thinking: dict[str, Any] = {"content": thought + sentinel("a")}
            if suffixes.text_after(key, 0, **with_thinking) != shape.text:
                raise PromptError("what it writes after a turn depends on whether the turn has thinking")
        alone = self.template.conversation([QUESTION], False)
        prompt = self.template.conversation([QUESTION], self.template.generation_prompt)
        opening = prompt.removeprefix(alone) + self.template.prefix
        if not shape.text.endswith(opening):
            answer = {"role": "assistant", "content": sentinel("n", 998)}
            written = suffixes.text_after(key, calls, generation_prompt=False, more=(answer,))
            if written.partition(answer["content"])[0] + self.template.prefix != shape.text:
                raise PromptError("it writes no generation prompt after new messages, though it has one:"
                                  f" {opening!r}")
        if not calls and not _missing(np.zeros(1, np.int32) - 1, shape.close):
            raise PromptError("a turn that is cut by the length limit cannot be closed")


def end_of_turn(config, tokenizer) -> int | None:
    """Returns the id of the token with which the chat template ends an assistant's turn.

    None without a template (of the job's tokenizer, or with data.chat=false), or if it writes none. Raises PromptError
    if the template rejects a user's message, ConfigError if data.chat=true lacks a template."""
    if not Template(config, tokenizer).chat:
        return None
    renderer = TurnRenderer(config, tokenizer)
    return next((shape.close[-1] for shape in renderer._ends if shape.own_end), None)


def continuation_ids(head: list[int], whole: list[int], before: str, body: str, written) -> list[int]:
    """Returns the ids of the part of a text after its prefix: the whole text's ids after the prefix's if they begin
    with those, else the ids of the rest encoded alone.

    Args:
      head: ids of `before`, the prefix.
      whole: ids of `body`, the text.
      written: text -> ids.
    """
    return whole[len(head):] if whole[:len(head)] == head else written(body[len(before):])


def _missing(history, close: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the part of a turn's end that is not yet at the end of the recorded ids."""
    if len(history) and int(history[-1]) == close[-1]:
        return ()
    tail = [int(i) for i in history[-len(close):]]
    overlaps = (k for k in range(min(len(close) - 1, len(tail)), 0, -1) if tuple(tail[-k:]) == close[:k])
    return close[next(overlaps, 0):]


def _is_whole_calls(parser: Parser, text: str, calls: int) -> bool:
    """Returns whether a text is exactly `calls` calls as `Suffixes.turn` builds them, with nothing outside them
    unless markers delimit the calls.
    """
    outside, parsed = parser.read(text)
    if outside and parser.marks[0] not in text:
        return False
    good = len(parsed) == calls and not any(call.error for call in parsed)
    return good and parsed[-1].arguments == {"x": sentinel("a")} and parsed[0].name == sentinel("n")


def _count_images(messages) -> int:
    return sum(isinstance(part, dict) and part.get("type") == "image" for m in messages
               if isinstance(m.get("content"), list) for part in m["content"])


def _messages(messages, images: bool = False) -> list[dict]:
    """Returns new messages as the renderer takes them. images: contents may hold images. Raises PromptError."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    elif isinstance(messages, dict):
        messages = [messages]
    out = []
    for message in check_messages(messages, images):
        new = {"role": message["role"], "content": message["content"]}
        if message["role"] == "tool":
            new |= {"name": str(message.get("name") or "tool"), "tool_call_id": str(message.get("tool_call_id") or "")}
        out.append(new)
    return out


def _without_surrogates(text: str) -> str:
    """Returns the text without unpaired surrogates, which no tokenizer accepts."""
    return text.encode("utf-8", "replace").decode()


def _spelled(text: str, marks: dict[str, str]) -> str:
    for mark, stand_in in marks.items():
        text = text.replace(stand_in, mark)
    return text


def _call_record(call: Call, i: int, content_hash, marks, own: Counter) -> dict:
    """Returns a call as an episode receives it.

    Its id is the call's own if no other call has it, else one derived from the turn's tokens: nine letters and
    digits, as some templates require. content_hash: of the turn's tokens.
    """
    arguments = call.arguments
    if arguments is not None:
        arguments = json.loads(_spelled(json.dumps(arguments, ensure_ascii=False), marks))
    content_hash = content_hash.copy()
    content_hash.update(i.to_bytes(8, "little"))
    made = base64.b32encode(content_hash.digest())[:9].decode()
    return {"id": _spelled(call.id, marks) if call.id and own[call.id] == 1 else made,
            "name": _spelled(call.name, marks), "arguments": arguments, "error": _spelled(call.error, marks)}
