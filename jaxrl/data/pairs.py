"""Rows of preferences: a prompt with a chosen and a rejected answer, or with one answer and a label (good or not).

Read are, each answer as text or as chat messages:

    {"prompt": ..., "chosen": ..., "rejected": ...}     the answers alone, or as messages with the prompt before them
    {"chosen": ..., "rejected": ...}                    both begin with the prompt: the messages that they share, or of
                                                        texts the words
    {"prompt": ..., "completion": ..., "label": true}

An Example then has `target_ids` (chosen, or the completion) and `rejected_ids` (None where there is a label), and in
its columns the label as a bool and the margin, where a row has one, as a float.
"""

from __future__ import annotations

import math
import os

from jaxrl.algorithms.preference import LOSSES
from jaxrl.data.dataset import PromptError, Reader, Row, answer_of, check_messages, missing, prompt_column


class PairReader(Reader):
    """A Reader of such rows. targets: 'required', or 'optional' for held-out sets, whose rows may be prompts alone."""

    def __init__(self, config, tokenizer, targets: str, tools=()):
        super().__init__(config, tokenizer, targets, tools)
        self.data, self.losses = config.data, config.preference.loss
        self.labels = all(name in LOSSES and LOSSES[name].unpaired for name in self.losses)

    def __call__(self, row: dict) -> Row:
        """Raises PromptError saying what is wrong with the row."""
        data, rejected = self.data, None
        plain = {name: row[name] for name in row if name not in (data.chosen_column, data.rejected_column)}
        if is_pair(row, data):
            plain[data.prompt_column], plain[data.completion_column], rejected = separated(row, data)
        elif self.targets == "optional" and not is_labelled(row, data):
            plain.pop(data.completion_column, None)
        else:
            plain[data.label_column] = self._label(row)
        if plain.get(data.margin_column) is not None:
            plain[data.margin_column] = margin_of(plain[data.margin_column], data.margin_column)
        return super().__call__(plain)._replace(rejected=rejected)


    def _label(self, row: dict) -> bool:
        data = self.data
        if not self.labels:
            raise missing(row, data.chosen_column, "data.chosen_column") if not is_labelled(row, data) else PromptError(
                f"one answer with a label (data.label_column), but preference.loss={', '.join(self.losses)} compares "
                f"two: give {data.chosen_column!r} and {data.rejected_column!r}, or set preference.loss=kto")
        for option in ("completion_column", "label_column"):
            if row.get(data[option]) is None:
                raise missing(row, data[option], f"data.{option}")
        return label_of(row[data.label_column], data.label_column)


def is_labelled(row: dict, data) -> bool:
    """Whether a row has an answer with a label."""
    return row.get(data.completion_column) is not None and row.get(data.label_column) is not None


def is_pair(row: dict, data) -> bool:
    """Whether a row has a chosen or a rejected answer. data: config.data, which names the columns."""
    return row.get(data.chosen_column) is not None or row.get(data.rejected_column) is not None


def separated(row: dict, data) -> tuple:
    """(prompt, chosen answer, rejected answer) of a pair: texts, or messages that are more. Raises PromptError."""
    for option in ("chosen_column", "rejected_column"):
        if row.get(data[option]) is None:
            raise missing(row, data[option], f"data.{option}")
    chosen, rejected, prompt = row[data.chosen_column], row[data.rejected_column], row.get(data.prompt_column)
    names = f"columns {data.chosen_column!r} and {data.rejected_column!r}"
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise PromptError(f"{names}: one is text, the other is not")
    if not isinstance(chosen, str):
        (before, chosen), (other, rejected) = _answer(chosen, data.chosen_column), _answer(rejected,
                                                                                           data.rejected_column)
        if before != other:
            raise PromptError(f"{names}: the messages before the answer differ; expected one prompt and one answer "
                              "each")
        prompt = prompt_of(prompt, before, data.prompt_column)
    elif prompt is None:
        prompt, chosen, rejected = shared_text(chosen, rejected, data.prompt_column)
    if chosen == rejected:
        raise PromptError(f"{names} hold the same answer, from which nothing can be learnt")
    return prompt, chosen, rejected


def _answer(messages, name: str) -> tuple[list[dict], str]:
    """(messages before the last one, the last one as `answer_of` has it, which is the assistant's)."""
    try:
        messages = check_messages(messages)
    except PromptError as e:
        raise PromptError(f"column {name!r}: {e}") from None
    if messages[-1]["role"] != "assistant":
        raise PromptError(f"column {name!r} ends with the role {messages[-1]['role']!r}, not with an answer of the "
                          "assistant")
    return messages[:-1], answer_of(messages[-1])


def carved_by(row: dict, data):
    """The prompt of a row: rows of one prompt are either trained on or held out."""
    if row.get(data.prompt_column) is not None or not is_pair(row, data):
        return row.get(prompt_column(row, data.prompt_column))
    try:
        return separated(row, data)[0]
    except PromptError:  # as will be said when it is read
        return None


def prompt_of(prompt, before: list[dict], name: str):
    """The prompt of a row whose answers are messages with `before` in front of them."""
    if not before:
        if prompt is None:
            raise PromptError(f"there is no prompt: neither a column {name!r} (data.prompt_column) nor messages before "
                              "the answer")
        return prompt
    if isinstance(prompt, str):
        same = any(message["content"].strip() == prompt.strip() for message in before)
    else:
        same = prompt is None or check_messages(prompt) == before
    if not same:
        raise PromptError(f"the messages before the answer are not those of column {name!r} (data.prompt_column)")
    return before


def shared_text(chosen: str, rejected: str, name: str) -> tuple[str, str, str]:
    """(prompt, chosen, rejected) of two texts that begin with the prompt: the words they share. White space at its end
    belongs to the answers, as tokenizers have it."""
    end = len(os.path.commonprefix([chosen, rejected]))
    while end and not chosen[end - 1].isspace():
        end -= 1
    prompt = chosen[:end].rstrip()
    if not prompt:
        raise PromptError(f"there is no prompt: neither a column {name!r} (data.prompt_column) nor a common beginning "
                          "of both answers")
    return prompt, chosen[len(prompt):], rejected[len(prompt):]


def label_of(value, name: str) -> bool:
    """A label as a bool. Raises PromptError for anything but a bool, 0 and 1."""
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise PromptError(f"column {name!r} (data.label_column) holds {value!r}, expected true or false")
    return bool(value)


def margin_of(value, name: str) -> float:
    """A margin as a float. Raises PromptError for anything but a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise PromptError(f"column {name!r} (data.margin_column) holds {value!r}, expected a number")
    return float(value)
