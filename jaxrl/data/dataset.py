"""Rows of data as a run takes them: columns, chat templates, token ids.

`dataset[i]` is one Example. How data sets are made of files, with limits and held-out shares: `loading.py`.
"""

from __future__ import annotations

import bisect
import dataclasses
import datetime
import functools
import hashlib
import json
import logging
import re
from typing import Any, NamedTuple

import numpy as np

from jaxrl.errors import ConfigError

log = logging.getLogger(__name__)
RESERVED = {  # names under which rewards and environments get something else than a column -> what they get
    "prompt": "the prompt", "completion": "the completion", "prompts": "the prompts", "completions": "the completions",
    "token_ids": "the completion's ids", "context_ids": "the ids before it", "finish": "why it ended",
    "group": "the number of its group", "sample": "its number in the group", "user": "the options of reward.user",
    "format_pattern": "the option of this name", "code_score": "the option of this name",
    "answer": "the column of data.answer_column"}


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """One row, ready to use.

    prompt_ids: [P] int32, P <= data.max_prompt_tokens. prompt_text: what they spell. prompt: the row's own text or
    messages. answer: the reference answer. columns: what rewards receive by name: every column of the row but the
    prompt and the completion, and `answer`. where: the place, "file:line". target_ids: supervised jobs only, [C] int32,
    the completion (of a pair the chosen one) as the chat template writes it behind the prompt, with its end of turn
    (its text and the end token where there is no template), or with data.train_turns=all the turns and what stands
    between them. trained: [C] bool, which of them are the model's; None:
    all. rejected_ids: as target_ids, the rejected completion of a pair; None without one. source: of data.sources, ""
    where there are none. rewards: names of the functions that judge it; None: all, or those of `reward.column`.
    """

    prompt_ids: np.ndarray
    prompt_text: str
    prompt: Any
    answer: Any
    columns: dict[str, Any]
    where: str
    target_ids: np.ndarray | None = None
    trained: np.ndarray | None = None
    rejected_ids: np.ndarray | None = None
    source: str = ""
    rewards: tuple[str, ...] | None = None


MORE = ("tool_calls", "reasoning_content", "thinking")  # what an assistant's message has beside its content


def answer_of(message: dict):
    """The text of an assistant's message, or the message where it has calls, thoughts or whatever else."""
    kept = {k: v for k, v in message.items() if k != "train" and (v or k not in MORE)}
    return kept["content"] if set(kept) <= {"role", "content"} else kept


def prompt_column(row: dict, name: str) -> str:
    """The column that holds a row's prompt: that of data.prompt_column, or `messages` where rows with the default name,
    "prompt", have no such column."""
    return "messages" if name == "prompt" and row.get(name) is None and row.get("messages") is not None else name


class Tables:
    """Rows of several sources, one after the other: `tables[i]` is (row, its place, as "file:line").

    parts: sequences of such pairs; what came from the hub has `commits`.
    """

    def __init__(self, parts: list):
        self._parts = parts
        self._starts = [0]
        for part in parts:
            self._starts.append(self._starts[-1] + len(part))

    @property
    def commits(self) -> list[str]:
        """Hub commits behind the rows, each once."""
        return list(dict.fromkeys(commit for part in self._parts for commit in getattr(part, "commits", ())))

    @property
    def parts(self) -> list:
        return self._parts

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, i: int) -> tuple[dict[str, Any], str]:
        k = bisect.bisect_right(self._starts, i) - 1
        return self._parts[k][i - self._starts[k]]


class Row(NamedTuple):
    """What `Reader` reads. completion: the text that is trained on, the assistant's message where that is more than a
    text (calls, thoughts), or None. messages: with data.train_turns=all, the whole conversation, whose answers behind
    the prompt are trained on. tools: the schemas that the template is told. rejected: of a pair, whose chosen answer is
    the completion."""

    prompt: Any
    text: str
    answer: Any
    columns: dict[str, Any]
    completion: str | dict | None
    messages: list[dict] | None = None
    tools: list[dict] | None = None
    rejected: str | dict | None = None


class Kept(NamedTuple):
    """Of a row, by its number: ids of its prompt, ids of the target or None, which of those are trained on or None:
    all, ids of the rejected completion or None. piece: the prompt is not what the row's text spells."""

    row: int
    prompt: Any
    target: Any = None
    trained: np.ndarray | None = None
    rejected: Any = None
    piece: bool = False


class Reader:
    """Reads one row by `data.*`. targets: 'none', 'optional' or 'required' (a completion to train on). tools: as of a
    Template."""

    def __init__(self, config, tokenizer, targets: str, tools=()):
        data = config.data
        self.template, self.targets = Template(config, tokenizer, tools), targets
        self.with_tools = self.template.chat and not tools  # else an environment's
        self.all_turns = data.train_turns == "all" and targets == "required"
        self.prompt, self.answer, self.completion = data.prompt_column, data.answer_column, data.completion_column
        self.pattern, self._renamed, self._said = None, set(), False
        if data.answer_pattern:
            try:
                self.pattern = re.compile(data.answer_pattern)
            except re.error as e:
                raise ConfigError(f"data.answer_pattern={data.answer_pattern!r} is no regex: {e}") from None
            if self.pattern.groups < 1:
                raise ConfigError(f"data.answer_pattern={data.answer_pattern!r} has no group: put what is to be cut "
                                  "out in parentheses, e.g. '#### (.*)'")

    def __call__(self, row: dict[str, Any]) -> Row:
        """Raises PromptError saying what is wrong with the row."""
        column = prompt_column(row, self.prompt)
        prompt, completion, messages = row.get(column), None, None
        if prompt is None:
            raise missing(row, self.prompt, "data.prompt_column")
        if not isinstance(prompt, str):
            try:
                prompt = check_messages(prompt)
            except PromptError as e:
                raise PromptError(f"column {column!r} (data.prompt_column): {e}") from None
        if self.all_turns and isinstance(prompt, list):
            prompt, messages = self._conversation(row, prompt)
        elif self.targets != "none":
            prompt, completion = self._completion(row, prompt)
        elif isinstance(prompt, list):
            prompt = self._asked(prompt, column)
        if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            raise PromptError("the messages before the completion end with an assistant turn; put it and the"
                              " completion into one message (data.response_prefix starts every completion)")
        columns = self._columns(row, column)
        answer = None
        if self.answer:
            answer = nested(row, self.answer)
            if answer is None or self.pattern is not None:
                answer = self._answer(row, answer)
            columns["answer"] = answer
        tools = check_tools(row["tools"]) if self.with_tools and row.get("tools") else None
        text = self.template.render(prompt, **({"tools": tools} if tools else {}))
        return Row(prompt, text, answer, columns, completion, messages, tools)

    def _asked(self, messages, column) -> list[dict]:
        """What is asked by messages that may end with answers of the assistant, which a run that samples its own leaves
        out."""
        last = next((i for i in range(len(messages), 0, -1) if messages[i - 1]["role"] != "assistant"), 0)
        if not last:
            raise PromptError("the messages hold an assistant turn and nothing before it")
        if last < len(messages) and not self._said:
            self._said = True
            log.warning("column %r: messages that end with an answer of the assistant: it is left out of the prompt,"
                        " since this run samples its own (data.response_prefix starts every completion; run.recipe=sft"
                        " trains on answers)", column)
        return messages[:last]

    def _columns(self, row, prompt) -> dict[str, Any]:
        """What rewards receive of a row: every column but prompt and completion, those of a reserved name with an
        underscore behind it."""
        out = {}
        for name, value in row.items():
            if name in (prompt, self.completion):
                continue
            if name in RESERVED and (name != "answer" or self.answer != "answer"):
                if f"{name}_" in row:
                    raise PromptError(f"columns {name!r} and '{name}_': rewards get {RESERVED[name]} as {name!r}, and "
                                      f"would get the first as '{name}_'; give it another name")
                if name not in self._renamed:
                    self._renamed.add(name)
                    log.warning("column %r: rewards and environments get %s under this name, and the column's values "
                                "as '%s_'", name, RESERVED[name], name)
                name = f"{name}_"
            out[name] = value
        return out

    def _conversation(self, row, messages):
        """(messages before the first answer, all messages)."""
        completion = row.get(self.completion)
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        if completion is not None:
            messages = [*messages, *check_messages(completion)]
        for i, message in enumerate(messages):
            flag = message.get("train", message["role"] == "assistant")
            if not isinstance(flag, bool) or (flag and message["role"] != "assistant"):
                raise PromptError(f"message {i} ({message['role']}) has train={flag!r}: it is true or false, and only "
                                  "answers of the assistant are trained on")
        roles = [message["role"] for message in messages]
        if roles[-1] != "assistant":
            raise PromptError(f"the messages end with the role {roles[-1]!r}, not with an answer of the assistant to"
                              " train on (data.train_turns=all)")
        if roles[0] == "assistant":
            raise PromptError("the messages begin with an answer of the assistant and nothing before it")
        return messages[:roles.index("assistant")], messages

    def _completion(self, row, prompt):
        """(prompt without the target, target text or None)."""
        completion = row.get(self.completion)
        if completion is None and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            if len(prompt) == 1:
                raise PromptError("the messages hold an assistant turn and nothing before it")
            if prompt[-1].get("train", True) is not True:
                raise PromptError("the last answer has train=false: nothing is left to train on "
                                  "(data.train_turns=last)")
            return prompt[:-1], answer_of(prompt[-1])
        if completion is None and self.targets == "optional":
            return prompt, None
        if completion is None:
            raise missing(row, self.completion, "data.completion_column")
        if isinstance(completion, list | dict):
            messages = check_messages([completion] if isinstance(completion, dict) else completion)
            if len(messages) > 1 or messages[0]["role"] != "assistant":
                raise PromptError(f"column {self.completion!r} (data.completion_column) holds messages of "
                                  f"{', '.join(m['role'] for m in messages)}, expected one of the assistant; "
                                  "data.train_turns=all trains on every answer of a conversation")
            completion = answer_of(messages[0])
        if not isinstance(completion, str | dict):
            raise PromptError(f"column {self.completion!r} holds {type(completion).__name__}, expected text")
        if isinstance(completion, dict) and not self.template.chat:
            raise PromptError(f"the answer has {' and '.join(k for k in completion if k not in ('role', 'content'))}, "
                              "which only a chat template can write: give model.chat_template=FILE, and leave "
                              "data.chat=auto")
        return prompt, completion

    def _answer(self, row, answer):
        """What data.answer_pattern cuts out of a reference answer; None where SFT has none."""
        if answer is None and self.targets == "none":
            raise PromptError(f"{missing(row, self.answer, 'data.answer_column')}, or '' where there are none")
        if answer is None:
            return None
        match = self.pattern.search(str(answer))
        if match is None or match.group(1) is None:
            raise PromptError(f"data.answer_pattern={self.pattern.pattern!r} finds nothing in column {self.answer!r}: "
                              f"{str(answer)[-80:]!r}")
        return match.group(1).strip()


class Dataset:
    """Examples by index: `len(ds)`, `ds[i]`. Ids are made once, at the start; the rest of a row when it is asked for.

    name. bad: BadRows of what could not be read. filtered: places ("file:line") left out for their length.
    filtered_rows: their row numbers. filtered_fraction: their share. unknown: (row number, share of its tokens) of
    prompts with text that the tokenizer has no token for. truncated: how many prompts were cut on the left.
    prompt_lengths, target_lengths, rejected_lengths: [N] tokens of each prompt, target and rejected completion, 0
    where there is none. shortened, split: places of rows whose completion was cut, or went into several. heldout: the
    carved-out eval set or None. fingerprint: hash of what the rows say, in order (prompt, completion, reference answer
    and the columns that rewards receive), and their count. It depends neither on the file's name, kind and time nor on
    tokenizer and limits.
    """

    def __init__(self, name: str, tables: Tables, reader: Reader, bad):
        self.name, self.bad, self.heldout = name, bad, None
        self.tables, self.reader, self.content = tables, reader, hashlib.sha256()
        self.filtered: list[str] = []
        self.filtered_rows: list[int] = []
        self.unknown: list[tuple[int, float]] = []
        self.asked = 0  # rows that were looked at
        self.shortened: list[str] = []
        self.split: list[str] = []

    def fill(self, kept: list[Kept], limit: int) -> None:
        """Takes what is kept. Prompts keep their last `limit` ids."""
        none = np.zeros(0, np.int32)
        pieces = [none if ids is None else np.asarray(ids, np.int32) for one in kept
                  for ids in (one.prompt[-limit:], one.target, one.rejected)]
        trained = {i: one.trained for i, one in enumerate(kept) if one.trained is not None}
        offsets = np.cumsum([0, *map(len, pieces)])  # of each prompt, target and rejected one, by turns
        mask = np.ones(offsets[-1] if trained else 0, bool)
        for i, own in trained.items():
            mask[offsets[3 * i + 1]:offsets[3 * i + 2]] = own
        self.truncated = sum(len(one.prompt) > limit for one in kept)
        self.take({
            "offsets": offsets, "ids": np.concatenate(pieces), "mask": mask,
            "masked": np.array([one.trained is not None for one in kept], bool),
            "rows": np.array([one.row for one in kept], np.int64),
            "cut": np.array([one.piece or len(one.prompt) > limit for one in kept], bool)})

    def take(self, arrays: dict[str, np.ndarray]) -> None:
        """Takes all ids as arrays, as `fill` makes them: offsets [3 N + 1] into ids and mask, masked, rows, cut [N]."""
        self.arrays = arrays
        self.prompt_lengths, self.target_lengths, self.rejected_lengths = np.diff(arrays["offsets"]).reshape(-1, 3).T
        self.filtered_fraction = len(self.filtered) / (len(self.filtered) + len(np.unique(arrays["rows"])))

    def __len__(self) -> int:
        return len(self.arrays["rows"])

    def __getitem__(self, i: int) -> Example:
        arrays = self.arrays
        raw, where = self.tables[int(arrays["rows"][i])]
        row = self.reader(raw)
        at = arrays["offsets"][3 * i:3 * i + 4]
        prompt, target, rejected = (arrays["ids"][a:b] for a, b in zip(at[:-1], at[1:], strict=True))
        text = self.reader.template.tokenizer.decode(prompt) if arrays["cut"][i] else row.text
        trained = arrays["mask"][at[1]:at[2]] if arrays["masked"][i] else None
        return Example(prompt, text, row.prompt, row.answer, row.columns, where, target if len(target) else None,
                       trained, rejected if len(rejected) else None)

    def numbers(self, column: str) -> np.ndarray:
        """[N] float64: what a column of each row holds. Raises ConfigError naming a row where it is no number."""
        out = np.zeros(len(self))
        for i, row in enumerate(self.arrays["rows"]):
            raw, where = self.tables[int(row)]
            value = raw.get(column)
            try:
                out[i] = float(value)
            except (TypeError, ValueError):
                out[i] = np.nan
            if not np.isfinite(out[i]):
                raise ConfigError(f"{where}: column {column!r} (data.difficulty) holds {value!r}, expected a number")
        return out

    @property
    def firsts(self) -> range:
        """Numbers of the first rows, to try functions on."""
        return range(min(2, len(self)))

    @property
    def fingerprint(self) -> str:
        return f"{self.content.hexdigest()[:16]}, {len(self) + len(self.filtered)} rows"

    @property
    def commits(self) -> list[str]:
        """Hub commits that the rows came from; none for files, folders and rows in memory."""
        return self.tables.commits

    def describe(self) -> str:
        """One line: rows, lengths, and what was left out or cut."""
        n = self.prompt_lengths
        text = f"{self.name}: {len(self)} rows, prompts {n.min()} to {n.max()} tokens (mean {n.mean():.1f})"
        for count, what in ((len(self.filtered), "left out for their length"), (self.truncated, "cut on the left"),
                            (len(self.shortened), "completions cut"), (len(self.split), "rows split"),
                            (self.bad.count, "bad rows skipped")):
            text += f", {count} {what}" if count else ""
        return text


class PromptError(ValueError):
    """A prompt that cannot be rendered; becomes a bad row."""


def nested(row, name: str):
    """What a column holds; where there is no column a.b, field b of column a."""
    if name in row or "." not in name:
        return row.get(name)
    for part in name.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def missing(row, name: str, option: str) -> PromptError:
    state = "is empty in" if name in row else "is missing in"
    return PromptError(f"column {name!r} {state} this row; columns found: {', '.join(map(str, row))}; "
                       f"{option} names the column to read")


def day_of(tokenizer, day: str = "") -> str:
    """The day, such as "2026-11-26", that a tokenizer's chat template writes wherever it asks for the time; "" where it
    does not. It is the one given, else today, from the first call on: of a run its first day, which its checkpoints
    keep.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str) or "strftime_now" not in template:
        return ""
    if day or not getattr(tokenizer, "day", ""):
        tokenizer.day = day or datetime.date.today().isoformat()
    return tokenizer.day


def dated(template: str, day: str) -> str:
    """The template with a `strftime_now` of its own, that of the begin of a day. (transformers 5.24 takes no functions
    beside the messages.)"""
    when = datetime.datetime.fromisoformat(day)
    directives = [f"%{flag}{letter}" for flag in ("-", "") for letter in "aAwdbBmyYHIpMSfjUWcxXZzeDFTRGVu"]
    edits = "".join(f" | replace({d!r}, {when.strftime(d)!r})" for d in directives)
    return "{%- macro strftime_now(format) -%}{{ format" + edits + " }}{%- endmacro %}{{ '' }}" + template


class Template:
    """Turns a raw prompt (text or chat messages) into the text the model sees, and texts into ids.

    With a chat template: the template renders it (plain text becomes one user turn; `data.system_prompt` goes first
    unless the messages bring their own system turn) and writes its own special tokens. Without one: the text as it
    is, after `data.system_prompt` and a blank line, behind whatever the tokenizer puts at the start of a text (never
    what it puts at the end). `data.response_prefix` is appended in both cases. tools: JSON schemas that the template is
    told.
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
        if day := day_of(tokenizer):
            self.kwargs["chat_template"] = dated(tokenizer.chat_template, day)
        self.start = () if self.chat else _leading_ids(tokenizer)
        ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)  # so some name it that have a token for every text
        self.no_token = None if tokenizer.unk_token_id in ends else tokenizer.unk_token_id

    def unknown_in(self, text: str) -> str:
        """The first piece of a text that the tokenizer has no token for; the begin where it cannot tell which."""
        try:
            found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError:
            return text[:60]
        places = zip(found["input_ids"], found["offset_mapping"], strict=True)
        return next((text[a:b] for token, (a, b) in places if token == self.no_token), text[:60])

    def render(self, prompt: str | list[dict], **kwargs) -> str:
        """The text of a prompt. kwargs: as of `conversation`. Raises PromptError where there is none."""
        if not self.chat:
            if not isinstance(prompt, str):
                raise PromptError("chat messages need a chat template: give model.chat_template=FILE"
                                  + (" and leave data.chat=auto" if self.tokenizer.chat_template else ""))
            return (self.system + "\n\n" if self.system else "") + prompt + self.prefix
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return self.conversation(messages, self.generation_prompt, **kwargs) + self.prefix

    def conversation(self, messages: list[dict], generation_prompt: bool, **kwargs) -> str:
        """What the chat template writes for messages, the arguments of their calls as it wants them. kwargs: of the
        template, over data.chat_template_kwargs. Raises PromptError."""
        return self._written([self._adapted(m) for m in messages], generation_prompt, **kwargs)

    @functools.cached_property
    def wants_text(self) -> bool:
        """Whether the template writes a call's arguments as it is given them, and so wants JSON text."""
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
        """The message, the arguments of whose calls are objects or JSON text as the template wants them."""
        if not (isinstance(message, dict) and message.get("tool_calls")):
            return message
        if not isinstance(message["tool_calls"], list):
            raise PromptError("tool_calls is no list of calls")
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
                    raise PromptError(f"tool_calls: the arguments of {function['name']!r} are no JSON: {e}") from None
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
            raise PromptError(f"the chat template refuses it: {type(e).__name__}: {e}") from None

    def marked(self, messages: list[dict], **kwargs) -> tuple[list[int], list[int]]:
        """(ids of a conversation, 1 for each inside {% generation %} ... {% endgeneration %}). As `conversation`."""
        messages = [self._adapted(m) for m in messages]
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        try:
            found = self.tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True, **{**self.kwargs, **kwargs})
        except Exception as e:
            raise PromptError(f"the chat template refuses it: {type(e).__name__}: {e}") from None
        return list(found["input_ids"]), list(found["assistant_masks"])

    def encode_prompts(self, texts: list[str]) -> list[list[int]]:
        return [[*self.start, *ids] for ids in self.encode(texts)]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text alone, nothing added."""
        if not texts:
            return []
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False,
                              return_token_type_ids=False)["input_ids"]


def check_messages(value) -> list[dict]:
    """Chat messages with text contents (lists of text parts are joined). Raises PromptError saying what is wrong."""
    if not isinstance(value, list) or not value:
        raise PromptError(f"expected text or a list of chat messages, found {type(value).__name__}"
                          if value != [] else "the list of chat messages is empty")
    out = []
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptError(f"message {i} is not {{role: ..., content: ...}}")
        message = {k: v for k, v in message.items() if v is not None or k == "content"}
        content = message.get("content")
        if content is None and any(message.get(field) for field in MORE):
            content = ""
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            content = "".join(p["text"] for p in content)
        if not isinstance(content, str):
            raise PromptError(f"message {i} ({message['role']}) has no text content")
        out.append({**message, "content": content})
    return out


def check_tools(value) -> list[dict]:
    """JSON schemas of tools, as a list or as JSON text. Raises PromptError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as e:
            raise PromptError(f"column 'tools' is no JSON: {e}") from None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise PromptError("column 'tools' is no list of JSON schemas; give it another name if it is something else")
    return value


def _leading_ids(tokenizer) -> tuple[int, ...]:
    """Special tokens the tokenizer puts before a text (a begin token, usually), without those it puts after."""
    bare = tokenizer("x", add_special_tokens=False)["input_ids"]
    full = tokenizer("x")["input_ids"]
    for at in range(len(full) - len(bare) + 1):
        if bare and full[at:at + len(bare)] == bare:
            return tuple(full[:at])
    return ()
