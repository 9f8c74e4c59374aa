"""Conversations to train on: all turns of the assistant, and between them what an episode would put there."""

from __future__ import annotations

import json

import numpy as np

from jaxrl.data.dataset import PromptError, Row
from jaxrl.data.turns import TurnRenderer


class Demonstrations:
    """Turns of rows with `messages` (data.train_turns=all), rendered with the code that episodes use. Raises
    ConfigError where the chat template cannot."""

    def __init__(self, config, tokenizer, tools=()):
        self.config, self.tokenizer = config, tokenizer
        self.first = TurnRenderer(config, tokenizer, tools)
        self.first.check(bool(tools))
        self._by_tools = {"null": self.first}

    def __call__(self, row: Row, prompt: list[int]) -> tuple[list[int], np.ndarray]:
        """(ids behind the prompt, [C] bool which of them are trained on): each answer as the template writes it, its
        end token included, and masked what stands between two of them. Raises PromptError."""
        renderer = self._renderer(row.tools)
        messages = [renderer.adapted(message) for message in row.messages]
        ids, trained, at = [*prompt], [], len(row.prompt)
        while at < len(messages):
            after = next((k for k in range(at + 1, len(messages)) if messages[k]["role"] == "assistant"), len(messages))
            between = messages[at + 1:after]
            if not between and after < len(messages):
                raise PromptError(f"messages {at} and {after} are both answers of the assistant, nothing between them")
            said = renderer.turn(messages[:at], messages[at], between)
            ids += said
            trained += [True] * len(said)
            if between:
                behind = renderer.extend(np.array(ids), between).tolist()
                ids += behind
                trained += [False] * len(behind)
            at = after
        return ids[len(prompt):], np.array(trained, bool)

    def _renderer(self, tools) -> TurnRenderer:
        key = json.dumps(tools, sort_keys=True)
        if key not in self._by_tools:
            self._by_tools[key] = TurnRenderer(self.config, self.tokenizer, tools, self.first.tokens)
        return self._by_tools[key]
