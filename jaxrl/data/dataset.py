"""Rows of data as examples: columns, chat templates, token ids.

`dataset[i]` is one Example. `loading` builds data sets from files, with length limits and held-out shares.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import logging
import re
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxrl.data.chat_template import EXTRA_FIELDS, PromptError, Template, check_messages, check_tools
from jaxrl.errors import ConfigError, type_of
from jaxrl.types import Places

if TYPE_CHECKING:
    from jaxrl.data.images.source import ImageSource, RowImages

log = logging.getLogger(__name__)
RESERVED = {  # argument names of rewards and environments that are not columns -> what they hold
    "prompt": "the prompt", "completion": "the completion", "prompts": "the prompts", "completions": "the completions",
    "token_ids": "the completion's ids", "context_ids": "the ids before it", "finish": "why it ended",
    "image_sizes": "the sizes of its images", "group": "the number of its group", "sample": "its number in the group",
    "user": "the value of reward.user",
    "format_pattern": "the value of reward.format_pattern", "code_score": "the value of reward.code_score",
    "answer": "the column of data.answer_column"}


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """One row, ready to use.

    Attributes:
      prompt_ids: [P] int32, P <= data.max_prompt_tokens.
      prompt_text: the text of `prompt_ids`.
      prompt: the row's text or messages.
      answer: the reference answer.
      columns: what rewards receive by name: every column except prompt, completion, images and videos, plus `answer`.
        Reserved names have an underscore appended.
      where: the row's location, "file:line".
      target_ids: [C] int32, supervised jobs only: the completion (of a pair the chosen one) as the chat template
        writes it after the prompt, with its end-of-turn token. Without a chat template: its text and the end token.
        With data.train_turns=all: every later turn and the text between them.
      trained: [C] bool, which target tokens the model learns; None for all.
      rejected_ids: as target_ids, for the rejected completion of a pair; else None.
      source: name in data.sources, "" without sources.
      rewards: names of the reward functions that score it; None for all, or those of `reward.column`.
      images: where the prompt's images stand, one image token per feature in `prompt_ids`, one per image in
        `prompt_text`; None without images.
      grey: whether pictures that its episode shows are grey ones (eval.controls=blank).
      own_images: the row's own images where `images` shows another row's (eval.controls=swapped); else None.
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
    images: Places | None = None
    grey: bool = False
    own_images: Places | None = None


def assistant_content(message: dict):
    """Returns an assistant message's content, or a dict of the whole message if it has more (tool calls, thinking);
    without `train`, and without tool calls or thinking that are empty."""
    fields = {k: v for k, v in message.items() if k != "train" and (v or k not in EXTRA_FIELDS)}
    return fields["content"] if set(fields) <= {"role", "content"} else fields


def prompt_column(row: dict, name: str) -> str:
    """Returns the name of the column that holds a row's prompt: `name`, or "messages" if `name` is "prompt" (the
    default of data.prompt_column) and the row has messages and no prompt.
    """
    return "messages" if name == "prompt" and row.get(name) is None and row.get("messages") is not None else name


class Tables:
    """Rows of several sources in sequence: `tables[i]` is (row, location as "file:line").

    Args:
      parts: sequences of such pairs; parts loaded from the hub have `commits`.
    """

    def __init__(self, parts: list):
        self._parts = parts
        self._starts = [0]
        for part in parts:
            self._starts.append(self._starts[-1] + len(part))

    @property
    def commits(self) -> list[str]:
        """Hub commits of the rows, without duplicates."""
        return list(dict.fromkeys(commit for part in self._parts for commit in getattr(part, "commits", ())))

    @property
    def parts(self) -> list:
        """The sequences of rows, in order."""
        return self._parts

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, i: int) -> tuple[dict[str, Any], str]:
        k = bisect.bisect_right(self._starts, i) - 1
        return self._parts[k][i - self._starts[k]]


class Row(NamedTuple):
    """One row as `Reader` returns it.

    Attributes:
      prompt: text or chat messages before the completion.
      text: the prompt as the model sees it, written by the chat template if one is in use, data.response_prefix
        included.
      answer: the reference answer, after data.answer_pattern; None without one.
      columns: what rewards receive by name, as Example.columns.
      completion: the text to train on, the whole assistant message if it has tool calls or thinking, or None.
      messages: with data.train_turns=all, the whole conversation, of which every assistant message after the prompt
        without train=false is trained on; of StepReader the steps; else None.
      tools: JSON schemas of the row's column `tools` for the chat template; None = those of the job.
      rejected: the rejected completion of a pair, whose chosen one is `completion`.
      images: the prompt's images, whose tokens in `text` are one each, and those of `messages`; None without images.
    """

    prompt: Any
    text: str
    answer: Any
    columns: dict[str, Any]
    completion: str | dict | None
    messages: list[dict] | None = None
    tools: list[dict] | None = None
    rejected: str | dict | None = None
    images: RowImages | None = None


class TokenizedRow(NamedTuple):
    """Token ids of one row within the length limits.

    Attributes:
      row: the row's number in its tables.
      prompt: ids of the prompt.
      target: [C] int32 ids of the completion, or None.
      trained: [C] bool, which target ids are trained on; None for all.
      rejected: int32 ids of the rejected completion, or None.
      prompt_cut: whether the prompt is not the whole text of the row.
      images: [I, 4] int64, of each image: index of its first token in prompt and target, rows and columns of patches,
        and the delay of a group of video frames (-1 for an image; see ImageSource.grids).
    """

    row: int
    prompt: Any
    target: Any = None
    trained: np.ndarray | None = None
    rejected: Any = None
    prompt_cut: bool = False
    images: Any = ()


class Reader:
    """Reads rows according to `data.*`; calling it with a raw row returns a Row.

    Args:
      config: of the job. tokenizer: the job's, with a chat template or without.
      targets: whether rows have a completion to train on: 'none', 'optional' or 'required'.
      tools: JSON schemas passed to the chat template. With them, or without a chat template, a row's column `tools` is
        not passed to it.

    Attributes:
      images: the job's ImageSource; None, until it is set, reads no images.
      template: the Template that renders prompts. targets: as given.
      all_turns: whether Row.messages hold a conversation (data.train_turns=all, targets required).

    Raises ConfigError if data.answer_pattern is no regex with a group, or data.chat=true lacks a chat template."""

    images: ImageSource | None = None

    def __init__(self, config, tokenizer, targets: str, tools=()):
        data = config.data
        self.template, self.targets = Template(config, tokenizer, tools), targets
        self.with_tools = self.template.chat and not tools  # else an environment's
        self.all_turns = data.train_turns == "all" and targets == "required"
        self.prompt, self.answer, self.completion = data.prompt_column, data.answer_column, data.completion_column
        self._reserved = RESERVED.keys() - ({"answer"} if self.answer == "answer" else set())
        self.pattern, self._renamed, self._warned = None, set(), False
        if data.answer_pattern:
            try:
                self.pattern = re.compile(data.answer_pattern)
            except re.error as e:
                raise ConfigError(f"data.answer_pattern={data.answer_pattern!r} is not a valid regex: {e}") from None
            if self.pattern.groups < 1:
                raise ConfigError(f"data.answer_pattern={data.answer_pattern!r} has no group: put the part to "
                                  "extract in parentheses, e.g. '#### (.*)'")

    def __call__(self, row: dict[str, Any], where: str = "") -> Row:
        """Returns the Row of a raw row. Raises PromptError with the reason for a row that cannot be used, ImageError
        for its images, and ConfigError for images that the options do not allow.

        where: place of the row, "file:line", for paths of images.
        """
        column = prompt_column(row, self.prompt)
        prompt, completion, messages = row.get(column), None, None
        if prompt is None:
            raise missing_column(row, self.prompt, "data.prompt_column")
        plain = isinstance(prompt, str) and not self.template.chat
        prompt, found = (prompt, []) if self.images is None else self.images.split(row, prompt, where)
        if not isinstance(prompt, str):
            try:
                prompt = check_messages(prompt, images=bool(found))
            except PromptError as e:
                raise PromptError(f"column {column!r} (data.prompt_column): {e}") from None
        if self.all_turns and isinstance(prompt, list):
            prompt, messages = self._conversation(row, prompt)
        elif self.targets != "none":
            prompt, completion = self._completion(row, prompt)
        elif isinstance(prompt, list):
            prompt = self._sampled_prompt(prompt, column)
        if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            raise PromptError("the messages before the completion end with an assistant turn; put it and the"
                              " completion into one message (data.response_prefix starts every completion)")
        shown = (*self.images.columns, *self.images.video_columns) if self.images else ()
        columns = self._columns(row, (column, self.completion, *shown))
        answer = None
        if self.answer:
            answer = column_value(row, self.answer)
            if answer is None or self.pattern is not None:
                answer = self._answer(row, answer)
            columns["answer"] = answer
        tools = check_tools(row["tools"]) if self.with_tools and row.get("tools") else None
        render = partial(self.template.render, **({"tools": tools} if tools else {}))
        images = None
        if found and self.images is not None:
            text, images = self.images.rendered(found, prompt, self._render_plain if plain else render)
        else:
            text = render(prompt)
        return Row(prompt, text, answer, columns, completion, messages, tools, images=images)

    def _render_plain(self, messages) -> str:
        """Returns a text prompt with images, which `split` made one message, as text: no chat template is in use."""
        assert self.images is not None
        return self.template.render(self.images.written(messages[0]["content"]))

    def images_in(self, row: dict[str, Any], where: str) -> list:
        """Returns the images of a raw row's prompt and the groups of frames of its videos, not decoded; [] in a job of
        text. where: "file:line".

        Raises PromptError for markers and images that do not match, and images in no known form; ConfigError for images
        that the options do not allow."""
        prompt = row.get(prompt_column(row, self.prompt))
        return [] if self.images is None else self.images.flat(self.images.split(row, prompt, where)[1])

    def _sampled_prompt(self, messages, column) -> list[dict]:
        """Returns the messages without trailing assistant messages, which a run that samples completions leaves out."""
        last = next((i for i in range(len(messages), 0, -1) if messages[i - 1]["role"] != "assistant"), 0)
        if not last:
            raise PromptError("the messages hold an assistant turn and nothing before it")
        if last < len(messages) and not self._warned:
            self._warned = True
            log.warning("column %r: the messages end with an assistant message; it is left out of the prompt because"
                        " this run samples completions (data.response_prefix starts every completion; run.recipe=sft"
                        " trains on assistant messages)", column)
        return messages[:last]

    def _columns(self, row, but) -> dict[str, Any]:
        """Returns what rewards receive of a row: every column except `but` (prompt, completion, images); a reserved
        name gets an underscore appended.
        """
        return {self._other_name(name, row) if name in self._reserved else name: value
                for name, value in row.items() if name not in but}

    def _other_name(self, name: str, row) -> str:
        """Returns the name under which rewards receive a column whose own name is reserved; warns once of each."""
        if f"{name}_" in row:
            raise PromptError(f"columns {name!r} and '{name}_': rewards get {RESERVED[name]} as {name!r}, and "
                              f"would get the first as '{name}_'; give it another name")
        if name not in self._renamed:
            self._renamed.add(name)
            log.warning("column %r: rewards and environments get %s under this name, and the column's values "
                        "as '%s_'", name, RESERVED[name], name)
        return f"{name}_"

    def _conversation(self, row, messages):
        """Returns (messages before the first assistant message, all messages)."""
        completion = row.get(self.completion)
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        if completion is not None:
            messages = [*messages, *check_messages(completion)]
        for i, message in enumerate(messages):
            flag = message.get("train", message["role"] == "assistant")
            if not isinstance(flag, bool) or (flag and message["role"] != "assistant"):
                raise PromptError(f"message {i} ({message['role']}) has train={flag!r}: it is true or false, and only "
                                  "assistant messages are trained on")
        roles = [message["role"] for message in messages]
        if roles[-1] != "assistant":
            raise PromptError(f"the messages end with the role {roles[-1]!r}, not with an assistant message to"
                              " train on (data.train_turns=all)")
        if roles[0] == "assistant":
            raise PromptError("the messages begin with an assistant message; put a user message before it")
        return messages[:roles.index("assistant")], messages

    def _completion(self, row, prompt):
        """Returns (prompt without the completion, completion or None)."""
        completion = row.get(self.completion)
        if completion is None and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            if len(prompt) == 1:
                raise PromptError("the messages hold an assistant turn and nothing before it")
            if prompt[-1].get("train", True) is not True:
                raise PromptError("the last assistant message has train=false: no message is left to train on "
                                  "(data.train_turns=last)")
            return prompt[:-1], assistant_content(prompt[-1])
        if completion is None and self.targets == "optional":
            return prompt, None
        if completion is None:
            raise missing_column(row, self.completion, "data.completion_column")
        if isinstance(completion, list | dict):
            messages = check_messages([completion] if isinstance(completion, dict) else completion)
            if len(messages) > 1 or messages[0]["role"] != "assistant":
                raise PromptError(f"column {self.completion!r} (data.completion_column) holds messages of "
                                  f"{', '.join(m['role'] for m in messages)}, expected one of the assistant; "
                                  "data.train_turns=all trains on every assistant message of a conversation")
            completion = assistant_content(messages[0])
        if not isinstance(completion, str | dict):
            as_text = f': write {completion} as "{completion}"' if isinstance(completion, int | float) else ""
            raise PromptError(f"column {self.completion!r} holds {type_of(completion)}, expected text{as_text}")
        if isinstance(completion, dict) and not self.template.chat:
            raise PromptError(f"the completion has "
                              f"{' and '.join(k for k in completion if k not in ('role', 'content'))}, "
                              "which only a chat template can write: set model.chat_template=FILE, and leave "
                              "data.chat=auto")
        return prompt, completion

    def _answer(self, row, answer):
        """Returns what data.answer_pattern extracts from a reference answer; None if a supervised row has none."""
        if answer is None and self.targets == "none":
            raise PromptError(f"{missing_column(row, self.answer, 'data.answer_column')}, or '' where there are none")
        if answer is None:
            return None
        assert self.pattern is not None  # this method is called where data.answer_pattern is set
        match = self.pattern.search(str(answer))
        if match is None or match.group(1) is None:
            raise PromptError(f"data.answer_pattern={self.pattern.pattern!r} finds nothing in column {self.answer!r}: "
                              f"{str(answer)[-80:]!r}")
        return match.group(1).strip()


class Dataset:
    """Examples by index: `len(dataset)`, `dataset[i]`. Token ids are computed once at start-up; the rest of a row is
    read on access. N is the number of examples; a row that was split has several.

    Args:
      tables: the raw rows, by number. reader: the Reader of these rows.

    Attributes:
      name: "train", "heldout" or the name of an eval set or of a source.
      tables, reader: as given. arrays: ids and lengths by name, see `set_arrays`.
      content: hash of the rows' content in order, with `hexdigest`; part of `fingerprint`.
      bad_rows: BadRows, the rows that could not be read.
      filtered: locations ("file:line") of the rows dropped for their length; filtered_why: of the first ones the limit
        that they exceed (empty from a cache); filtered_rows: their row numbers; kept_rows: number of the rows that
        stay, a row that was split once; filtered_fraction: share of those dropped among both, bad rows not counted.
      image_files: whether rows name files of images, whose content the rows do not tell.
      unknown_prompts: (row number, share of its tokens) of prompts with text the tokenizer has no token for.
      empty: locations of rows whose completion is the empty text, in jobs that sample completions whose answer is.
      truncated: number of prompts cut on the left.
      prompt_lengths, target_lengths, rejected_lengths: [N] int64 tokens of each prompt, target and rejected
        completion, 0 where there is none. patches: [N] int64 patches of its images.
      shortened, split: locations of rows whose completion was cut, or split into several rows.
      heldout: the held-out Dataset, or None.
      rows_read: number of rows read, bad ones and dropped ones included.
      fingerprint: hash of the rows' content in order (prompt, completion, reference answer and the columns rewards
        receive; with data.train_turns=all the conversation; the content of images) and their count. The hash is
        independent of file name, file format, time, tokenizer and limits.
    """

    def __init__(self, name: str, tables: Tables, reader: Reader, bad):
        self.name, self.bad_rows, self.tables, self.reader = name, bad, tables, reader
        self.number = reader.images.register(self) if reader.images else 0
        self.heldout: Dataset | None = None
        self.content: Any = hashlib.sha256()  # or cache.KnownDigest
        self.filtered: list[str] = []
        self.filtered_rows: list[int] = []
        self.filtered_why: list[str] = []
        self.image_files = False
        self.unknown_prompts: list[tuple[int, float]] = []
        self.empty: list[str] = []
        self.rows_read = 0
        self.shortened: list[str] = []
        self.split: list[str] = []

    def fill(self, rows: list[TokenizedRow], limit: int) -> None:
        """Stores tokenized rows as arrays (see `set_arrays`). Prompts keep their last `limit` ids; `truncated` counts
        those that were longer."""
        none = np.zeros(0, np.int32)
        pieces = [none if ids is None else np.asarray(ids, np.int32) for one in rows
                  for ids in (one.prompt[-limit:], one.target, one.rejected)]
        trained = {i: one.trained for i, one in enumerate(rows) if one.trained is not None}
        offsets = np.cumsum([0, *map(len, pieces)])  # of each row's prompt, target and rejected completion
        mask = np.ones(offsets[-1] if trained else 0, bool)
        for i, own in trained.items():
            mask[offsets[3 * i + 1]:offsets[3 * i + 2]] = own
        self.truncated = sum(len(one.prompt) > limit for one in rows)
        self.set_arrays({
            "offsets": offsets, "ids": np.concatenate(pieces), "mask": mask,
            "masked": np.array([one.trained is not None for one in rows], bool),
            "rows": np.array([one.row for one in rows], np.int64),
            "cut": np.array([one.prompt_cut or len(one.prompt) > limit for one in rows], bool),
            "image_offsets": np.cumsum([0, *(len(one.images) for one in rows)]),
            "images": np.concatenate([np.zeros((0, 4), np.int64), *(one.images for one in rows if len(one.images))])})

    def set_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Stores all ids as arrays, as `fill` builds them, and computes lengths, patches, kept_rows and
        filtered_fraction.

        Args:
          arrays: by name. offsets: [3 N + 1] int64, begins in `ids` of each row's prompt, target and rejected
            completion in turn. ids: [T] int32. mask: [T] bool, False at target ids of masked rows that are not
            trained on; [0] if no row is masked. masked: [N] bool, whether a row has a mask; without one all its
            target ids are trained on. rows: [N] int64 row numbers. cut: [N] bool, whether the prompt is not the row's
            whole text. image_offsets: [N + 1] int64 into images: [I, 4] int64, see TokenizedRow.images.

        Raises ConfigError for groups of video frames in a job that does not read videos.
        """
        self.arrays = arrays
        if self.reader.images is not None and (arrays["images"][:, 3] != -1).any():
            self.reader.images.use_videos()  # of a cache, whose rows are not read now
        each = np.append(0, np.cumsum(arrays["images"][:, 1] * arrays["images"][:, 2]))
        self.patches = np.diff(each[arrays["image_offsets"]])
        self.prompt_lengths, self.target_lengths, self.rejected_lengths = np.diff(arrays["offsets"]).reshape(-1, 3).T
        self.kept_rows = len(np.unique(arrays["rows"]))
        self.filtered_fraction = len(self.filtered) / (len(self.filtered) + self.kept_rows)

    def __len__(self) -> int:
        return len(self.arrays["rows"])

    def __getitem__(self, i: int) -> Example:
        arrays = self.arrays
        number = int(arrays["rows"][i])
        raw, where = self.tables[number]
        row = self.reader(raw, where)
        at = arrays["offsets"][3 * i:3 * i + 4]
        prompt, target, rejected = (arrays["ids"][a:b] for a, b in zip(at[:-1], at[1:], strict=True))
        text = self.reader.template.tokenizer.decode(prompt) if arrays["cut"][i] else row.text
        trained = arrays["mask"][at[1]:at[2]] if arrays["masked"][i] else None
        own, images = arrays["images"][slice(*arrays["image_offsets"][i:i + 2])], None
        if len(own) and self.reader.images is not None:
            images = self.reader.images.places(self.number, number, own[:, 0], own[:, 1:])
        return Example(prompt, text, row.prompt, row.answer, row.columns, where, target if len(target) else None,
                       trained, rejected if len(rejected) else None, images=images)

    def grid_of(self, row: int, image: int) -> tuple[int, int]:
        """Returns (rows, columns) of patches of an image, as they were when the data set was prepared.

        row: number of a raw row, which has examples. image: number of the image in it, from 0."""
        at = self.arrays["image_offsets"][int(np.searchsorted(self.arrays["rows"], row))]
        _, rows, columns, _ = self.arrays["images"][at + image].tolist()
        return rows, columns

    def numbers(self, column: str) -> np.ndarray:
        """Returns a column's value for each example as [N] float64; text that spells a number counts as one. Raises
        ConfigError naming the first row whose value is not a finite number, or is missing.
        """
        out = np.zeros(len(self))
        for i, row in enumerate(self.arrays["rows"]):
            raw, where = self.tables[int(row)]
            value: Any = raw.get(column)
            try:
                out[i] = float(value)
            except (TypeError, ValueError, OverflowError):
                out[i] = np.nan
            if not np.isfinite(out[i]):
                raise ConfigError(f"{where}: column {column!r} (data.difficulty) holds {value!r}, expected a number")
        return out

    @property
    def first_rows(self) -> range:
        """Indices of the first two rows at most, used to try out reward functions."""
        return range(min(2, len(self)))

    @property
    def fingerprint(self) -> str:
        """Hash of the rows' content in order (first 16 hex digits) and their count, rows dropped for their length
        included, as text; a row that was split counts once."""
        return f"{self.content.hexdigest()[:16]}, {self.kept_rows + len(self.filtered)} rows"

    @property
    def commits(self) -> list[str]:
        """Hub commits of the rows; empty for files, folders and rows in memory."""
        return self.tables.commits

    def describe(self) -> str:
        """Returns one line: number of examples, shortest, longest and mean prompt in tokens, and how many rows were
        dropped, cut, split or bad."""
        n = self.prompt_lengths
        text = f"{self.name}: {len(self)} rows, prompts {n.min()} to {n.max()} tokens (mean {n.mean():.1f})"
        for count, what in ((len(self.filtered), "dropped for their length"), (self.truncated, "cut on the left"),
                            (len(self.shortened), "completions cut"), (len(self.split), "rows split"),
                            (self.bad_rows.count, "bad rows skipped")):
            text += f", {count} {what}" if count else ""
        return text


def column_value(row, name: str):
    """Returns the value of a row's column `name`; for a name a.b without such a column, field b of column a; None if
    there is neither."""
    if name in row or "." not in name:
        return row.get(name)
    for part in name.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def missing_column(row, name: str, option: str) -> PromptError:
    """Returns the PromptError for a column `name` that is missing or empty in a row; its text names the columns that
    the row has, and `option`, the one to change."""
    state = "is empty in" if name in row else "is missing in"
    return PromptError(f"column {name!r} {state} this row; columns found: {', '.join(map(str, row))}; "
                       f"{option} names the column to read")
