"""Conversations to train on: which tokens of a rendered conversation are trained.

`data.assistant_mask` selects the method. `turns`: every assistant message is rendered after the messages before it,
and the tokens between two of them are those an episode would put there; so templates that rewrite earlier turns (drop
their thinking, for example) are trained on exactly as they are sampled. `template`: the conversation is rendered
once, and the template marks the assistant messages with {% generation %}.

In both cases the generation prompt is masked and a turn's end token is trained on. A message with
train=false is context only.
"""

from __future__ import annotations

import json
import re

import numpy as np

from jaxrl.data.chat_template import PromptError
from jaxrl.data.dataset import Row
from jaxrl.data.images.expand import Tokens as ImageTokens
from jaxrl.data.images.expand import escape, spelled
from jaxrl.data.suffixes import QUESTION
from jaxrl.data.turns import TurnRenderer, continuation_ids
from jaxrl.errors import ConfigError


class Demonstrations:
    """Tokenizes rows with `messages` (data.train_turns=all). Raises ConfigError if the chat
    template cannot render them, or lacks {% generation %} with data.assistant_mask=template.

    Args:
      config, tokenizer: of the job. tools: JSON schemas passed to the chat template; a row's own come instead of these.
      images: what the model's family writes for an image; None = rows hold text."""

    def __init__(self, config, tokenizer, tools=(), images: ImageTokens | None = None):
        self.config, self.tokenizer, self.images = config, tokenizer, images
        self.first = TurnRenderer(config, tokenizer, tools, images=images)
        self.marked = config.data.assistant_mask == "template"
        if not self.marked:
            self.first.check(bool(tools))
        elif "generation" not in _jinja_tags(tokenizer.chat_template):
            raise ConfigError("data.assistant_mask=template: the chat template has no {% generation %} ... "
                              "{% endgeneration %}; set data.assistant_mask=turns")
        self._by_tools = {"null": self.first}

    def __call__(self, row: Row, prompt: list[int]) -> tuple[list[int], list[int], np.ndarray]:
        """Returns (prompt ids, ids after the prompt, [C] bool which of those are trained on). Raises PromptError."""
        return self.with_images(row, prompt, ())[:3]

    def with_images(self, row: Row, prompt: list[int], counts) -> tuple[list[int], list[int], np.ndarray, list[int]]:
        """Returns (prompt ids, ids after the prompt up to the last trained one, [C] bool which of those are trained on,
        indices in prompt and target of the first tokens of the images after the prompt).

        Args:
          row: has `messages`, the whole conversation. prompt: ids of the messages before the first assistant message.
          counts: image tokens of each image after the prompt.

        With data.assistant_mask=template the prompt returned is all that precedes the first trained token.

        Raises PromptError for a conversation that cannot be rendered or has no trained token, with
        data.assistant_mask=turns for two assistant messages with none between them, and with template for images."""
        renderer = self._renderer(row.tools)
        conversation = row.messages or ()
        own = [message.get("train", True) for message in conversation]
        messages = [{k: v for k, v in m.items() if k != "train"} for m in conversation]
        if self.marked:
            if row.images:
                raise PromptError("images with data.assistant_mask=template; set data.assistant_mask=turns")
            return *self._by_marks(renderer, row, messages, own), []
        ids, trained, at, firsts, left = [*prompt], [], len(row.prompt), [], iter(counts)
        while at < len(messages):
            after = next((k for k in range(at + 1, len(messages)) if messages[k]["role"] == "assistant"), len(messages))
            between = messages[at + 1:after]
            if not between and after < len(messages):
                raise PromptError(f"messages {at} and {after} are both assistant messages with none between them")
            turn = renderer.turn(messages[:at], messages[at], between)
            ids += turn
            trained += [own[at]] * len(turn)
            if between:
                following, places = renderer.extend_with_images(np.array(ids), between)
                repeats = np.ones(len(following), int)
                repeats[places] = [next(left) for _ in places]
                firsts += (len(ids) + np.cumsum(repeats) - repeats)[places].tolist()
                following = np.repeat(following, repeats).tolist()
                ids += following
                trained += [False] * len(following)
            at = after
        target, mask = _until_last_trained(ids[len(prompt):], np.array(trained, bool))
        return prompt, target, mask, [first for first in firsts if first < len(prompt) + len(target)]

    def _by_marks(self, renderer: TurnRenderer, row: Row, messages, own):
        """Returns the same as `__call__`, with the mask from the template. Rendering the whole conversation cannot
        keep control tokens in message text apart, so those are rejected.
        """
        for i, message in enumerate(messages):
            if message["role"] != "assistant" and (token := renderer.control_token_in(message["content"])):
                raise PromptError(f"message {i} ({message['role']}) spells the control token {token!r}, which would "
                                  "become one; set data.assistant_mask=turns, which keeps them apart")
        ids, mask = renderer.template.render_with_mask(messages, **({"tools": row.tools} if row.tools else {}))
        assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        spans = _true_runs(mask)
        if not all(own[i] for i in assistant):
            if len(spans) != len(assistant):
                raise PromptError(f"the chat template marks {len(spans)} spans for {len(assistant)} assistant "
                                  "messages, so train=false cannot be matched to a span; set data.assistant_mask=turns")
            spans = [span for span, i in zip(spans, assistant, strict=True) if own[i]]
        trained = np.zeros(len(ids), bool)
        opening = renderer.tokens.written(_opening(renderer))
        for start, end in spans:
            if opening and ids[start:start + len(opening)] == opening:
                start += len(opening)
            inside, after = ids[end - 1] in renderer.end_of_turn_ids, ids[end:end + 1]
            ended = inside or not renderer.end_of_turn_ids.isdisjoint(after)
            trained[start:end + (ended and not inside)] = True
            if not ended and not after:  # the template writes no end: the tokenizer's
                ids, trained = [*ids, self.tokenizer.eos_token_id], np.append(trained, True)
            elif not ended:
                text = self.tokenizer.decode(ids[start:end])[-40:]
                raise PromptError(f"no end token follows the assistant message {text!r} that the template marks: the "
                                  "model would never learn to end it; set data.assistant_mask=turns")
        ids, trained = _until_last_trained(ids, trained)
        first = int(np.argmax(trained))
        return ids[:first], ids[first:], trained[first:]

    def _renderer(self, tools) -> TurnRenderer:
        key = json.dumps(tools, sort_keys=True)
        if key not in self._by_tools:
            self._by_tools[key] = TurnRenderer(self.config, self.tokenizer, tools, self.first.tokens, self.images)
        return self._by_tools[key]


class CompletionRenderer:
    """Renders completions after their prompts as the chat template writes them (data.train_turns=last, pairs, held-out
    rows).

    Without a chat template a prompt is followed by the completion's text and `eos_id`.

    Args:
      config, tokenizer: of the job. template: the Template that rendered the prompts.
      eos_id: token that ends a completion without a chat template."""

    def __init__(self, config, tokenizer, template, eos_id: int):
        self.template, self.eos = template, [int(eos_id)]
        self.renderer = TurnRenderer(config, tokenizer) if template.chat else None

    def __call__(self, row: Row, completion) -> tuple[str, str, list[int]]:
        """Returns (text before the completion, text up to and including the completion, ids to append); without a chat
        template ("", the completion, [eos_id]). Raises PromptError.
        """
        if self.renderer is None:
            return "", completion, self.eos
        messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        if isinstance(completion, str):
            completion = {"role": "assistant", "content": self.template.prefix + completion}
        if row.images is None:
            return self.renderer.render_turn(messages, completion, tools=row.tools)
        clean = escape([*messages, completion], row.images.tokens)
        before, body, end = self.renderer.render_turn(clean.messages[:-1], clean.messages[-1], tools=row.tools)
        before, body = (spelled(text, clean.stand_ins, row.images.tokens) for text in (before, body))
        return before, body, end

    def ids(self, texts, known: dict[str, list[int]]) -> list[np.ndarray]:
        """Returns the [C] int32 ids of each completion, with its end token, tokenized in one call.

        Args:
          texts: (text before the completion, text up to and including it, ids to append) of each, from `__call__`.
          known: prompt text -> ids that are already known.
        """
        encode = self.template.encode
        heads = known | {"": []}
        new = [before for before, *_ in texts if before not in heads]
        heads |= zip(new, encode(new), strict=True)
        out = []
        for (before, body, end), whole in zip(texts, encode([body for _, body, _ in texts]), strict=True):
            completion = continuation_ids(heads[before], whole, before, body, lambda text: encode([text])[0])
            out.append(np.array(completion if completion[-1:] == end else [*completion, *end], np.int32))
        return out


def _until_last_trained(ids: list[int], trained: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Returns ids and mask up to the last trained token. Raises PromptError if no token is trained."""
    if not trained.any():
        raise PromptError("no token of this conversation is trained on: no assistant message is marked, or all have "
                          "train=false")
    last = int(np.flatnonzero(trained)[-1]) + 1
    return ids[:last], trained[:last]


def _opening(renderer: TurnRenderer) -> str:
    """Returns the template's generation prompt."""
    template = renderer.template
    whole, alone = template.conversation([QUESTION], True), template.conversation([QUESTION], False)
    return whole[len(alone):] if whole.startswith(alone) else ""


def _true_runs(mask) -> list[tuple[int, int]]:
    """Returns (begin, end) of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(mask, np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _jinja_tags(template) -> set[str]:
    """Returns the names of the Jinja tags in a chat template."""
    return set(re.findall(r"\{%-?\s*(\w+)", str(template)))
