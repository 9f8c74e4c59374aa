"""What a chat template writes after an assistant's turn: the end of turn, new messages, the next generation prompt.

`turns` calls it. The template is asked once per shape of the new messages (their roles and fields): it
renders a short conversation in which the assistant's turn and every field of the new messages are sentinels.
Images of new messages are written as the template writes them, one image token each.
What it writes after the assistant's sentinel does not depend on how it rewrites earlier turns, for example
by deleting their thinking.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable

from jaxrl.data.chat_template import PromptError, Template
from jaxrl.data.images.expand import Tokens as ImageTokens
from jaxrl.data.tokens import Tokens

SENTINEL = re.compile(r"QZ([abcni])(\d{3})ZXQ")  # nine letters and digits, the call id that some templates require
MOST_MESSAGES = 999
PAD, NASTY = "\t \t", '"\\\n\té<&\'{%'  # reveal whether a template trims contents or writes them as JSON
CONTENT_EDITS = {  # how a template writes contents -> the same transformation
    "as it is": lambda text: text,
    "as JSON": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "as ASCII JSON": lambda text: json.dumps(text)[1:-1],
}
QUESTION = {"role": "user", "content": "Hello?"}
EARLIER = (QUESTION, {"role": "assistant", "content": "Hello."})
TEXT, IMAGE = "t", "i"  # kinds of the parts of a content


def sentinel(kind: str, index: int = 0) -> str:
    """Returns a placeholder text that no template writes by itself, such as "QZa000ZXQ", to find a content in rendered
    text.

    Args:
      kind: what it stands for: "a" an assistant's turn, "c" and "b" the begin and end of a content, "n" a tool's name,
        "i" a call's id.
      index: distinguishes placeholders of one kind."""
    return f"QZ{kind}{index:03d}ZXQ"


@dataclasses.dataclass(frozen=True)
class Shape:
    """What follows an assistant's turn, for new messages of one shape.

    Attributes:
      close: ids from the end of the turn's text up to and including its end token.
      own_end: whether the template writes that token as the turn's end; else it is the first token of what follows,
        or the tokenizer's end token.
      end: text of the end token.
      pieces: what follows: texts of the template, and what to fill in: (message, field), or (text, "content") of the
        contents' texts, of which a message without parts has one.
      edit: the template's transformation of each of these texts.
      text: all of it, with sentinels.
      tail: what the template writes after a turn's text if nothing follows.
    """

    close: tuple[int, ...]
    own_end: bool
    end: str
    pieces: tuple[str | tuple[int, str], ...]
    edit: tuple[Callable[[str], str], ...]
    text: str
    tail: str


def parts_of(message: dict) -> list[dict]:
    """Returns a message's content as a list of parts {"type": "text", "text"} and {"type": "image"}; text becomes
    one part."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Suffixes:
    """Shapes of new messages, each rendered once.

    Args:
      template: renders the conversations of sentinels.
      tokens: encodes what it writes, and names the control tokens.
      images: how the model's family writes an image; None = messages are text.

    Attributes:
      arguments_as_text: whether the template expects call arguments as JSON text.
      is_calls: (text, number) -> whether a text is exactly so many complete calls; None if calls are not parsed."""

    def __init__(self, template: Template, tokens: Tokens, images: ImageTokens | None = None):
        self.template, self.tokens, self.images = template, tokens, images
        self.arguments_as_text = False  # whether the template expects call arguments as JSON text
        self.is_calls: Callable[[str, int], bool] | None = None  # whether a text is exactly so many complete calls
        self._shapes: dict[tuple, Shape] = {}

    def of(self, messages: list[dict]) -> Shape:
        """Returns the Shape of new messages. Raises PromptError if the template cannot write them after a turn."""
        return self.shape(tuple(
            (m["role"], "name" in m, "tool_call_id" in m, *([] if isinstance(m["content"], str) else ["".join(
                TEXT if part["type"] == "text" else IMAGE for part in m["content"])])) for m in messages))

    def shape(self, key) -> Shape:
        """Returns the Shape for a key: (role, has a name, has a call id) of each message, and the kinds of its parts,
        as "ti", where its content is a list of them. Raises PromptError as `of`.
        """
        if key not in self._shapes:
            self._shapes[key] = self._build(key)
        return self._shapes[key]

    def render_calls(self, calls: int) -> tuple[str, list[int]]:
        """Returns (text of a question and an assistant's turn with `calls` calls, positions in it where that turn
        may begin, in characters). Raises PromptError if the template rejects calls."""
        text = self.template.conversation([QUESTION, self.turn(calls)], False)
        prompt = self.template.conversation([QUESTION], True)
        at = text.rfind(QUESTION["content"], 0, text.find(sentinel("n"))) + len(QUESTION["content"])
        return text, [len(prompt)] * text.startswith(prompt) + [at]

    def turn(self, calls: int, **fields) -> dict:
        """Returns an assistant's message that ends with the sentinel "a": a text, or with `calls` > 0 that many calls,
        the last of which has it as its argument. fields: further fields of the message."""
        if not calls:
            return {"role": "assistant", "content": sentinel("a"), **fields}
        def call(i, value):
            arguments = {"x": value}
            function = {"name": sentinel("n", i),
                        "arguments": json.dumps(arguments) if self.arguments_as_text else arguments}
            return {"id": sentinel("i", i), "type": "function", "function": function}
        made = [call(i, sentinel("a") if i == calls - 1 else "1") for i in range(calls)]
        return {"role": "assistant", "content": "", "tool_calls": made, **fields}

    def text_after(self, key, calls: int, history=(QUESTION,), generation_prompt: bool | None = None, more=(), **fields
                   ) -> str:
        """Renders a conversation of sentinels and returns the text after its assistant's turn, the new messages and the
        generation prompt included, the latter with data.response_prefix.

        Args:
          history: messages before the turn.
          generation_prompt: whether one is written; None = as data.add_generation_prompt says.
          key: roles and fields of the new messages.
          calls: number of tool calls in the assistant's turn; 0 for a text.
          more: further messages.
          fields: further fields of the assistant's message.

        Raises PromptError if the template rejects the messages, or does not write the assistant's turn once."""
        new: list[dict] = []
        texts = (PAD + sentinel("c", i) + NASTY + sentinel("b", i) + PAD for i in itertools.count())
        for i, (role, named, answers, *kinds) in enumerate(key):
            content = next(texts) if not kinds else [
                {"type": "text", "text": next(texts)} if kind == TEXT else {"type": "image"} for kind in kinds[0]]
            new.append({"role": role, "content": content, **({"name": sentinel("n", i)} if named else {}),
                        **({"tool_call_id": sentinel("i", i)} if answers else {})})
        if generation_prompt is None:
            generation_prompt = bool(self.template.generation_prompt)
        text = self.template.conversation([*history, self.turn(calls, **fields), *new, *more], generation_prompt)
        if (times := text.count(sentinel("a"))) != 1:
            what = f"{calls} calls" if calls else "a text"
            remedy = "; take one that writes a message's tool_calls (model.chat_template)" if calls else ""
            raise PromptError(f"the chat template writes an assistant's turn of {what} {times} times{remedy}")
        return text.partition(sentinel("a"))[2] + (self.template.prefix if generation_prompt else "")

    def _build(self, key) -> Shape:
        if len(_contents(key)) > MOST_MESSAGES:
            raise PromptError(f"{len(key)} new messages at once; at most {MOST_MESSAGES}, counting parts")
        calls, refused = sum(role == "tool" for role, *_ in key), None
        # some templates write one call at most, but several replies
        for count in dict.fromkeys((calls, min(calls, 1))):
            try:
                return self._shape(key, count)
            except PromptError as e:
                refused = refused or e
        raise PromptError(f"{', '.join(role for role, *_ in key)} after an assistant's turn: {refused}")

    def _shape(self, key, calls: int) -> Shape:
        text = self.text_after(key, calls)
        alone = self.text_after((), calls, generation_prompt=False)
        start, end, stop, own = self._end(text, alone, calls)
        pieces, edit = self._pieces(text[stop:], key)
        close = self.tokens.written(text[start:stop] if stop > start else end)
        return Shape(tuple(close), own, end, pieces, edit, text, alone[start:])

    def _end(self, text: str, alone: str, calls: int) -> tuple[int, str, int, bool]:
        """Returns (end of the turn's text, text of the end token, position after it, whether it belongs to the turn).

        `alone` is the same turn with nothing after it. Their common prefix is how the template ends the turn:
        the tokenizer's end token in it, else its last control token, is the turn's end token. Without one,
        the control token that begins the next message ends the turn (such models stop at it); without that,
        the tokenizer's end token.
        """
        start = self._calls_end(calls, self.is_calls) if calls and self.is_calls else 0
        control = sorted(self.tokens.control.values(), key=len, reverse=True)
        tokens = list(re.finditer("|".join(map(re.escape, control)), text)) if control else []
        shorter = min(len(text), len(alone))
        same = next((k for k in range(shorter) if text[k] != alone[k]), shorter)
        same = next((m.start() for m in tokens if m.start() < same < m.end()), same)
        if own := [m for m in tokens if start <= m.start() and m.end() <= same]:
            last = next((m for m in own if m.group() == self.template.tokenizer.eos_token), own[-1])
            return start, last.group(), last.end(), True
        following = next((m for m in tokens if m.start() >= same), None)
        if following and not text[same:following.start()].strip():
            return min(start, following.start()), following.group(), following.end(), False
        end = self.template.tokenizer.eos_token
        if not end:
            raise PromptError("neither the chat template nor the tokenizer has an end token")
        return start, end, start, False

    def _calls_end(self, calls: int, is_calls: Callable[[str, int], bool]) -> int:
        """Returns how far after the sentinel the last call ends, in characters."""
        text, begins = self.render_calls(calls)
        place = text.find(sentinel("a")) + len(sentinel("a"))
        ends = (k for k in range(place, len(text) + 1) if any(is_calls(text[at:k], calls) for at in begins))
        return next(ends, place) - place

    def _pieces(self, text: str, key):
        """Splits the text after the end token at its sentinels. Returns (pieces, transformation of each text)."""
        wanted, number = [], itertools.count()
        for kind in _contents(key):
            wanted += [IMAGE] if kind == IMAGE else [side + f"{i:03d}" for i in [next(number)] for side in "cb"]
        of_images = [re.escape(self.images.written)] if self.images else []
        pattern = re.compile("|".join([SENTINEL.pattern, *of_images]))
        written = [IMAGE if m[1] is None else m[1] + m[2] for m in pattern.finditer(text) if m[1] in ("c", "b", None)]
        if written.count(IMAGE) != wanted.count(IMAGE):
            raise PromptError(f"the chat template writes {written.count(IMAGE)} of {wanted.count(IMAGE)} images")
        if written != wanted:
            raise PromptError("the chat template does not write each new message's content once and in order")
        edits = [self._edit(text, i) for i in range(next(number))]
        for i, (edit, left, right) in enumerate(edits):
            for pad, side in ((left, "c"), (right, "b")):
                written = edit(PAD) if pad else ""
                whole = written + sentinel(side, i) if side == "c" else sentinel(side, i) + written
                text = text.replace(whole, sentinel(side, i))
            text = text.replace(sentinel("c", i) + edit(NASTY) + sentinel("b", i), sentinel("c", i))
        pieces, at, names = [], 0, {"c": "content", "n": "name", "i": "tool_call_id"}
        for match in SENTINEL.finditer(text):
            pieces += [text[at:match.start()], (int(match[2]), names[match[1]])]
            at = match.end()
        pieces.append(text[at:])
        if self.images:
            own = self.images
            pieces = [p.replace(own.written, own.expanded) if isinstance(p, str) else p for p in pieces]
        return tuple(p for p in pieces if p), tuple(self._editor(*e) for e in edits)

    def _edit(self, text: str, i: int):
        """Returns (transformation, whether leading white space of the content stays, whether
        trailing white space stays).
        """
        before, _, rest = text.partition(sentinel("c", i))
        inside, _, after = rest.partition(sentinel("b", i))
        for edit in CONTENT_EDITS.values():
            if inside == edit(NASTY):
                return edit, before.endswith(edit(PAD)), after.startswith(edit(PAD))
        raise PromptError(f"the chat template writes a content as neither text nor JSON: {NASTY!r} as {inside[:60]!r}")

    @staticmethod
    def _editor(edit, left: bool, right: bool):
        def edited(text):
            text = text if left else text.lstrip()
            return edit(text if right else text.rstrip())
        return edited


def _contents(key) -> list[str]:
    """Returns the kinds of all parts of messages with this key, in order."""
    return [kind for _, _, _, *kinds in key for kind in (kinds[0] if kinds else TEXT)]
