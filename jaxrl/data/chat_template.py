"""Chat templates: turns messages into the text a model sees, and checks messages and tool schemas.

`dataset`, `turns` and `suffixes` call it. Which tokens of a conversation are trained on: `demonstrations`.
"""

from __future__ import annotations

import datetime
import functools
import json

from jaxrl.errors import ConfigError

EXTRA_FIELDS = ("tool_calls", "reasoning_content", "thinking")  # what an assistant's message has beside its content


class PromptError(ValueError):
    """A prompt that cannot be rendered. The row is counted as a bad row."""


def template_date(tokenizer, day: str = "") -> str:
    """Returns the date, such as "2026-11-26", that a tokenizer's chat template writes; "" if it writes none.

    Args:
      day: the date to use from now on; "" keeps the tokenizer's, today at the first call. A run keeps its first day,
        which is stored in its checkpoints.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str) or "strftime_now" not in template:
        return ""
    if day or not getattr(tokenizer, "day", ""):
        tokenizer.day = day or datetime.date.today().isoformat()
    return tokenizer.day


def pin_date(template: str, day: str) -> str:
    """Returns a chat template with a `strftime_now` macro that always returns the start of a day, "YYYY-MM-DD".

    (transformers 5.24 passes templates no functions, only messages.)"""
    when = datetime.datetime.fromisoformat(day)
    directives = [f"%{flag}{letter}" for flag in ("-", "") for letter in "aAwdbBmyYHIpMSfjUWcxXZzeDFTRGVu"]
    edits = "".join(f" | replace({d!r}, {when.strftime(d)!r})" for d in directives)
    return "{%- macro strftime_now(format) -%}{{ format" + edits + " }}{%- endmacro %}{{ '' }}" + template


class Template:
    """Turns a raw prompt (text or chat messages) into the text the model sees, and texts into ids.

    With a chat template: the template renders the messages (plain text becomes one user turn; `data.system_prompt`
    goes first unless the first message is a system message) and writes its special tokens. Without one:
    `data.system_prompt`, a blank line and the text, after the tokenizer's leading special tokens; its trailing
    special tokens are never added. `data.response_prefix` is appended in both cases.

    Args:
      config: options `data.*`. tokenizer: of Hugging Face, with a chat template or without.
      tools: JSON schemas passed to the chat template.

    Attributes:
      chat: whether a chat template is in use: the tokenizer has one, and data.chat is not false.
      no_token: id of the token for unknown text; None if the tokenizer has none.
      tokenizer, prefix, generation_prompt: the tokenizer, data.response_prefix and data.add_generation_prompt.

    Raises ConfigError if data.chat=true and the tokenizer has no chat template.
    """

    def __init__(self, config, tokenizer, tools=()):
        data, self.tokenizer = config.data, tokenizer
        has = bool(getattr(tokenizer, "chat_template", None))
        if data.chat == "true" and not has:
            raise ConfigError("data.chat=true, but the tokenizer has no chat template: give model.chat_template=FILE, "
                              "or data.chat=false")
        self.chat = has and data.chat != "false"
        self.system, self.prefix = data.system_prompt, data.response_prefix
        self.generation_prompt = data.add_generation_prompt
        self.kwargs = data.chat_template_kwargs.to_dict() | ({"tools": list(tools)} if tools else {})
        if day := template_date(tokenizer):
            self.kwargs["chat_template"] = pin_date(tokenizer.chat_template, day)
        self.start = () if self.chat else _leading_ids(tokenizer)
        ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)  # some tokenizers without unknown text name these
        self.no_token = None if tokenizer.unk_token_id in ends else tokenizer.unk_token_id

    def unknown_in(self, text: str) -> str:
        """Returns the first piece of a text that the tokenizer has no token for; the first 60 characters if there is
        none, or if the tokenizer has no offsets.
        """
        try:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError:
            return text[:60]
        places = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return next((text[a:b] for token, (a, b) in places if token == self.no_token), text[:60])

    def render(self, prompt: str | list[dict], **kwargs) -> str:
        """Returns the text of a prompt, data.response_prefix included. Without a chat template the tokenizer's leading
        special tokens are left to `encode_prompts`.

        prompt: text, or chat messages, which need a chat template. kwargs: template arguments, which override
        data.chat_template_kwargs; not read without a chat template. Raises PromptError if it cannot be rendered."""
        if not self.chat:
            if not isinstance(prompt, str):
                raise PromptError("chat messages need a chat template: give model.chat_template=FILE"
                                  + (" and leave data.chat=auto" if self.tokenizer.chat_template else ""))
            return (self.system + "\n\n" if self.system else "") + prompt + self.prefix
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return self.conversation(messages, self.generation_prompt, **kwargs) + self.prefix

    def conversation(self, messages: list[dict], generation_prompt: bool, **kwargs) -> str:
        """Returns the chat template's text for messages; tool-call arguments become JSON text or objects
        as the template expects. data.response_prefix is not appended.

        Args:
          messages: chat messages; data.system_prompt goes first unless the first one is a system message.
          generation_prompt: whether the text ends with the begin of an assistant's turn.
          kwargs: template arguments, which override data.chat_template_kwargs.

        Raises:
          PromptError: the template rejects the messages, or `tool_calls` are no list of calls with JSON arguments.
        """
        return self._written([self._adapted(m) for m in messages], generation_prompt, **kwargs)

    @functools.cached_property
    def wants_text(self) -> bool:
        """Whether the template expects tool-call arguments as JSON text: it writes an object as Python does,
        unchanged, or rejects an object and accepts text."""
        call = {"id": "ABCDEFGH1", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            return "{'x': 'y'}" in self._written(messages, False)
        except PromptError as e:
            refused = str(e)
        call["function"]["arguments"] = '{"x": "y"}'
        try:
            self._written(messages, False)
        except PromptError:
            return False
        return bool(refused)

    def _adapted(self, message: dict) -> dict:
        """Returns the message with tool-call arguments as objects or JSON text, whichever the template expects."""
        if not (isinstance(message, dict) and message.get("tool_calls")):
            return message
        if not isinstance(message["tool_calls"], list):
            raise PromptError("tool_calls is not a list of calls")
        calls = []
        for call in message["tool_calls"]:
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise PromptError('tool_calls: a call is {"type": "function", "function": {"name", "arguments"}}')
            arguments = function.get("arguments") or {}
            if isinstance(arguments, str) and not self.wants_text:
                try:
                    arguments = json.loads(arguments)
                except ValueError as e:
                    raise PromptError(f"tool_calls: the arguments of {function['name']!r} are not JSON: {e}") from None
            elif not isinstance(arguments, str) and self.wants_text:
                arguments = json.dumps(arguments)
            calls.append({**call, "function": {**function, "arguments": arguments}})
        return {**message, "tool_calls": calls}

    def _written(self, messages: list[dict], generation_prompt: bool, **kwargs) -> str:
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt,
                                                      **{**self.kwargs, **kwargs})
        except Exception as e:  # a template may raise anything about the messages it is given
            raise PromptError(f"the chat template rejects it: {type(e).__name__}: {e}") from None

    def render_with_mask(self, messages: list[dict], **kwargs) -> tuple[list[int], list[int]]:
        """Returns (ids of a conversation, 1 for each id inside {% generation %} ... {% endgeneration %}, else 0).

        Args:
          messages: chat messages; data.system_prompt goes first unless the first one is a system message.
          kwargs: template arguments, which override data.chat_template_kwargs.

        Raises PromptError as `conversation`."""
        messages = [self._adapted(m) for m in messages]
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True, **{**self.kwargs, **kwargs})
        except Exception as e:
            raise PromptError(f"the chat template rejects it: {type(e).__name__}: {e}") from None
        return list(rendered["input_ids"]), list(rendered["assistant_masks"])

    def encode_prompts(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each rendered prompt, a list per text, preceded by the tokenizer's leading special tokens
        if no chat template is in use."""
        return [[*self.start, *ids] for ids in self.encode(texts)]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Returns the token ids of each text, a list per text, without special tokens added."""
        if not texts:
            return []
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False,
                              return_token_type_ids=False)["input_ids"]


def check_messages(value, images: bool = False) -> list[dict]:
    """Returns chat messages with text contents (lists of text parts are joined). Raises PromptError naming the message.

    Fields whose value is None are dropped. A content of None is "" in a message with tool calls or thinking.

    value: a list of {role, content, ...}. images: contents may be lists with images, as data.images.source makes them.
    """
    if not isinstance(value, list) or not value:
        raise PromptError(f"expected text or a list of chat messages, found {type(value).__name__}"
                          if value != [] else "the list of chat messages is empty")
    out = []
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptError(f"message {i} is not {{role: ..., content: ...}}")
        message = {k: v for k, v in message.items() if v is not None or k == "content"}
        content = message.get("content")
        if content is None and any(message.get(field) for field in EXTRA_FIELDS):
            content = ""
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            content = "".join(p["text"] for p in content)
        if not isinstance(content, str) and not (images and isinstance(content, list)):
            raise PromptError(f"message {i} ({message['role']}) has no text content")
        out.append({**message, "content": content})
    return out


def check_tools(value) -> list[dict]:
    """Returns the JSON schemas of tools given as a list or as JSON text. Raises PromptError if they are neither."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as e:
            raise PromptError(f"column 'tools' is not JSON: {e}") from None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise PromptError("column 'tools' is not a list of JSON schemas; rename the column if it holds something else")
    return value


def _leading_ids(tokenizer) -> tuple[int, ...]:
    """Returns the special tokens a tokenizer puts before a text (usually a begin token), without those it puts after.
    """
    bare = tokenizer("x", add_special_tokens=False)["input_ids"]
    full = tokenizer("x")["input_ids"]
    for at in range(len(full) - len(bare) + 1):
        if bare and full[at:at + len(bare)] == bare:
            return tuple(full[:at])
    return ()
