"""Rows that reward models are trained on: pairs of completions (as `data/pairs.py` reads them), or
completions in labelled steps.

    {"prompt": ..., "chosen": ..., "rejected": ..., "margin": 1.0}
    {"prompt": ..., "completions": ["first step", "second step"], "labels": [true, false]}

An Example of the second kind has all steps as `target_ids`, each followed by the separator, marks in `trained` the
tokens that end a step, and has one number per step in the column `labels`.
"""

from __future__ import annotations

import numpy as np

from jaxrl.data.chat_template import PromptError
from jaxrl.data.dataset import Reader, Row, missing_column
from jaxrl.data.pairs import PairReader, is_pair


def scored_reader(config):
    """Returns the Reader class for reward_model.kind: StepReader for "steps", else ComparedReader. config: of the
    job."""
    return StepReader if config.reward_model.kind == "steps" else ComparedReader


class ComparedReader(PairReader):
    """Reads rows that must be preference pairs, also in held-out sets; calling it raises PromptError for others.

    config, tokenizer: of the job. tools: JSON schemas passed to the chat template. targets: not read."""

    def __init__(self, config, tokenizer, targets: str, tools=()):
        super().__init__(config, tokenizer, "required", tools)

    def __call__(self, row: dict, where: str = "") -> Row:
        if not is_pair(row, self.data):
            why = missing_column(row, self.data.rejected_column, "data.rejected_column")
            raise PromptError(f"a reward model learns from pairs: {why}")
        return super().__call__(row, where)


class StepReader(Reader):
    """Reads completions in labelled steps. Row.messages are the steps, one assistant message each with
    reward_model.separator appended; Row.columns["labels"] are their labels, floats in 0..1.

    config, tokenizer: of the job. tools: JSON schemas passed to the chat template. targets: not read."""

    def __init__(self, config, tokenizer, targets: str, tools=()):
        super().__init__(config, tokenizer, "none", tools)
        self.options = config.reward_model

    def __call__(self, row: dict, where: str = "") -> Row:
        """Returns the Row of a raw row. Raises PromptError naming the column and the expected value."""
        o = self.options
        steps, labels = (self._list(row, o[name], f"reward_model.{name}") for name in ("steps_column", "labels_column"))
        if not all(isinstance(step, str) for step in steps) or not all(step + o.separator for step in steps):
            raise PromptError(f"column {o.steps_column!r} (reward_model.steps_column): every step must be "
                              "non-empty text")
        if not all(isinstance(x, bool | int | float) and 0 <= x <= 1 for x in labels):
            raise PromptError(f"column {o.labels_column!r} (reward_model.labels_column) holds {labels!r}, expected "
                              "true, false or probabilities")
        if len(steps) != len(labels):
            raise PromptError(f"{len(steps)} steps in column {o.steps_column!r}, {len(labels)} labels in column "
                              f"{o.labels_column!r}")
        own = (o.steps_column, o.labels_column)
        out = super().__call__({name: value for name, value in row.items() if name not in own}, where)
        return out._replace(columns=out.columns | {"labels": [float(x) for x in labels]},
                            messages=[{"role": "assistant", "content": step + o.separator} for step in steps])

    def _answer(self, row, answer):
        """Returns the reference answer as Reader does, or None if the row has none."""
        return None if answer is None else super()._answer(row, answer)

    @staticmethod
    def _list(row, name: str, option: str) -> list:
        if row.get(name) is None:
            raise missing_column(row, name, option)
        if not isinstance(row[name], list) or not row[name]:
            raise PromptError(f"column {name!r} ({option}) holds {row[name]!r}, expected a non-empty list")
        return row[name]


class Steps:
    """Tokenizes each step of a row alone, so that steps end at token boundaries. template: a Template."""

    def __init__(self, template):
        self.template = template

    def __call__(self, row: Row, prompt: list[int]) -> tuple[list[int], list[int], np.ndarray]:
        """Returns (prompt ids, ids after the prompt, which of those end a step). Raises PromptError."""
        pieces = self.template.encode([message["content"] for message in row.messages or ()])
        if not all(pieces):
            raise PromptError("a step has no tokens")
        ends = np.array([i == len(piece) - 1 for piece in pieces for i in range(len(piece))])
        return prompt, [i for piece in pieces for i in piece], ends

    def with_images(self, row: Row, prompt: list[int], counts) -> tuple:
        """Returns (prompt ids, ids after the prompt, [C] bool which of those end a step, []): the last are the first
        tokens of images after the prompt, of which there are none. counts: not read. Raises PromptError for a step
        without tokens."""
        return *self(row, prompt), []
