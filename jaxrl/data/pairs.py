"""Rows of preferences: a prompt with a chosen and a rejected completion, or with one completion and a
label (good or not).

Accepted formats, each completion as text or as chat messages:

    {"prompt": ..., "chosen": ..., "rejected": ...}     completions alone, or as messages that include the prompt
    {"chosen": ..., "rejected": ...}                    both begin with the prompt: the messages they share, or the
                                                        words if they are texts
    {"prompt": ..., "completion": ..., "label": true}

An Example has `target_ids` (chosen, or the completion) and `rejected_ids` (None with a label); its columns hold the
label as a bool, and the margin, if the row has one, as a float.
"""

from __future__ import annotations

import os

import numpy as np

from jaxrl.algorithms.preference import LOSSES
from jaxrl.config.option import is_finite
from jaxrl.data.chat_template import PromptError, check_messages
from jaxrl.data.dataset import Reader, Row, assistant_content, missing_column, prompt_column


class PairReader(Reader):
    """Reads preference rows.

    Rows with one completion and a label are accepted if every preference.loss is for unpaired completions (kto).

    Args:
      config: of the job. tokenizer: the job's. tools: JSON schemas passed to the chat template.
      targets: 'required', or 'optional' for held-out sets, whose rows may be prompts alone.
    """

    def __init__(self, config, tokenizer, targets: str, tools=()):
        super().__init__(config, tokenizer, targets, tools)
        self.data, self.losses = config.data, config.preference.loss
        self.labels = all(name in LOSSES and LOSSES[name].unpaired for name in self.losses)

    def __call__(self, row: dict, where: str = "") -> Row:
        """Returns the Row of a raw row; in its columns a label is a bool, a margin a float. With targets='optional' a
        completion without a label is left out. Raises PromptError naming the column and the remedy, and what Reader
        raises."""
        data = self.data
        plain, rejected = self._plain(row)
        if is_pair(row, data):
            pass
        elif self.targets == "optional" and not is_labelled(row, data):
            plain.pop(data.completion_column, None)
        else:
            plain[data.label_column] = self._label(row)
        if plain.get(data.margin_column) is not None:
            plain[data.margin_column] = margin_of(plain[data.margin_column], data.margin_column)
        return super().__call__(plain, where)._replace(rejected=rejected)

    def images_in(self, row: dict, where: str) -> list:
        """Returns the images of a raw row's prompt, which both completions share, and the groups of frames of its
        videos, not decoded; [] in a job of text. where: "file:line". Raises PromptError for completions that do not
        make a pair, and for images that cannot be used; ConfigError for images that the options do not allow."""
        return super().images_in(self._plain(row)[0], where)

    def _plain(self, row: dict) -> tuple[dict, str | dict | None]:
        """Returns (a row with prompt and chosen completion, the rejected one) of a pair; (row, None) of others."""
        data = self.data
        plain = {name: row[name] for name in row if name not in (data.chosen_column, data.rejected_column)}
        if not is_pair(row, data):
            return plain, None
        plain[data.prompt_column], plain[data.completion_column], rejected = split_pair(row, data,
                                                                                        self.images is not None)
        return plain, rejected

    def _label(self, row: dict) -> bool:
        data = self.data
        if not self.labels:
            if not is_labelled(row, data):
                raise missing_column(row, data.chosen_column, "data.chosen_column")
            raise PromptError(
                f"one completion with a label (data.label_column), but preference.loss={', '.join(self.losses)} "
                f"compares two: provide {data.chosen_column!r} and {data.rejected_column!r}, or set "
                "preference.loss=kto")
        for option in ("completion_column", "label_column"):
            if row.get(data[option]) is None:
                raise missing_column(row, data[option], f"data.{option}")
        return label_of(row[data.label_column], data.label_column)


def is_labelled(row: dict, data) -> bool:
    """Returns whether a row has a completion with a label. data: config.data, which names the columns."""
    return row.get(data.completion_column) is not None and row.get(data.label_column) is not None


def is_pair(row: dict, data) -> bool:
    """Returns whether a row has a chosen or a rejected completion. data: config.data, which names the columns."""
    return row.get(data.chosen_column) is not None or row.get(data.rejected_column) is not None


def split_pair(row: dict, data, images: bool = False) -> tuple:
    """Returns (prompt, chosen completion, rejected completion) of a pair: the prompt as text or messages, a completion
    as text, or as a message (dict) if it has more than content.

    Args:
      row: has both completions: texts, which begin with the prompt if the row has no prompt column, or messages.
      data: config.data, which names the columns.
      images: messages of the prompt may have image parts, which stay as they are.

    Raises PromptError naming the columns if one is empty, only one is text, one does not end with an assistant's text,
    there is no prompt, the prompts differ, or both completions are equal.
    """
    for option in ("chosen_column", "rejected_column"):
        if row.get(data[option]) is None:
            raise missing_column(row, data[option], f"data.{option}")
    chosen, rejected, prompt = row[data.chosen_column], row[data.rejected_column], row.get(data.prompt_column)
    names = f"columns {data.chosen_column!r} and {data.rejected_column!r}"
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise PromptError(f"{names}: one is text, the other is not")
    if not isinstance(chosen, str):
        (before, chosen), (other, rejected) = (_answer(row[data[f"{name}_column"]], data[f"{name}_column"], images)
                                               for name in ("chosen", "rejected"))
        if not _equal(before, other):
            raise PromptError(f"{names}: the messages before the completion differ; expected the same prompt "
                              "and one completion each")
        prompt = pair_prompt(prompt, before, data.prompt_column, images)
    elif prompt is None:
        prompt, chosen, rejected = shared_text(chosen, rejected, data.prompt_column)
    if chosen == rejected:
        raise PromptError(f"{names} hold the same completion; drop the row")
    return prompt, chosen, rejected


def _answer(messages, name: str, images: bool) -> tuple[list[dict], str | dict]:
    """Returns (messages before the last, the last message's content as `assistant_content` returns it)."""
    try:
        messages = check_messages(messages, images)
    except PromptError as e:
        raise PromptError(f"column {name!r}: {e}") from None
    if messages[-1]["role"] != "assistant":
        raise PromptError(f"column {name!r} ends with the role {messages[-1]['role']!r}, expected the "
                          "assistant's")
    if not isinstance(messages[-1]["content"], str):
        raise PromptError(f"column {name!r}: the completion holds an image: models write text alone")
    return messages[:-1], assistant_content(messages[-1])


def holdout_prompt(row: dict, data, images: bool = False):
    """Returns the prompt that decides on which side of the held-out split a row falls; None if it cannot be read.

    data: config.data, which names the columns. images: whether messages of the prompt may have image parts.
    """
    if row.get(data.prompt_column) is not None or not is_pair(row, data):
        return row.get(prompt_column(row, data.prompt_column))
    try:
        return split_pair(row, data, images)[0]
    except PromptError:  # reported when the row is read
        return None


def _equal(a, b) -> bool:
    """Whether two values of rows are the same; images in memory may be arrays."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray) and a == b


def _text(message: dict) -> str:
    """Returns the text of a message, without its images."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def pair_prompt(prompt, before: list[dict], name: str, images: bool = False):
    """Returns the prompt of a row whose completions are messages with `before` in front of them: `before`, or the
    prompt column's value if there are none.

    Args:
      prompt: value of the prompt column, text or messages; None without one.
      before: messages before the completion. name: of the prompt column, for messages.
      images: whether messages of the prompt may have image parts.

    Raises PromptError if there is no prompt, or the column's is not that of the messages.
    """
    if not before:
        if prompt is None:
            raise PromptError(f"there is no prompt: neither a column {name!r} (data.prompt_column) nor messages before "
                              "the completion")
        return prompt
    if isinstance(prompt, str):
        same = any(_text(message).strip() == prompt.strip() for message in before)
    else:
        same = prompt is None or _equal(check_messages(prompt, images), before)
    if not same:
        raise PromptError(f"the messages before the completion are not those of column {name!r} (data.prompt_column)")
    return before


def shared_text(chosen: str, rejected: str, name: str) -> tuple[str, str, str]:
    """Splits two texts that begin with the prompt into (prompt, chosen, rejected): the prompt is the words that both
    begin with, white space after each included; the white space after the last goes to the completions, as tokenizers
    expect. Raises PromptError if they share no word with the white space after it. name: of the prompt column, for that
    message.
    """
    end = len(os.path.commonprefix([chosen, rejected]))
    while end and not chosen[end - 1].isspace():
        end -= 1
    prompt = chosen[:end].rstrip()
    if not prompt:
        raise PromptError(f"there is no prompt: neither a column {name!r} (data.prompt_column) nor a common beginning "
                          "of both completions")
    return prompt, chosen[len(prompt):], rejected[len(prompt):]


def label_of(value, name: str) -> bool:
    """Returns a label as a bool. Raises PromptError, naming the column, unless it is a bool, 0 or 1."""
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise PromptError(f"column {name!r} (data.label_column) holds {value!r}, expected true or false")
    return bool(value)


def margin_of(value, name: str) -> float:
    """Returns a margin as a float. Raises PromptError, naming the column, unless it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
        shown = "an integer beyond float64" if isinstance(value, int) and not isinstance(value, bool) else repr(value)
        raise PromptError(f"column {name!r} (data.margin_column) holds {shown}, expected a number")
    return float(value)
