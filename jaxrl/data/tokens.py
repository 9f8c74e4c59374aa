"""Texts to ids with control tokens only where they are meant: what a template writes may hold them, what stands in a
message may not."""

from __future__ import annotations

import functools
import json

from jaxrl.errors import ConfigError

MARKER = "\n[...]\n"  # where the middle of a text was cut out
LONGEST_TOKEN = 64  # characters; texts are cut to so many per token before anything else


class Tokens:
    """control: id -> text of every token that may come from templates alone: special tokens (but the one for unknown
    text), and other added tokens that the chat template or `marks` name, such as `<tool_call>`."""

    def __init__(self, tokenizer, marks=()):
        self.tokenizer = tokenizer
        source, special = str(tokenizer.chat_template), set(tokenizer.all_special_ids)
        ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        unknown = {tokenizer.unk_token_id} - set(ends)
        self.added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
        self.control = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if i not in unknown
                        and (token.special or i in special or token.content in marks
                             or (token.content.strip() and token.content in source))}

    @functools.cached_property
    def _plain(self):
        """The tokenizer without control tokens."""
        from tokenizers import Tokenizer

        if not self.tokenizer.is_fast:
            raise ConfigError("model.tokenizer: several turns need a tokenizer with a tokenizer.json (of Hugging"
                              " Face's tokenizers library)")
        spec = json.loads(self.tokenizer.backend_tokenizer.to_str())
        for token in spec["added_tokens"]:
            token["special"] = token["id"] in self.control
        plain = Tokenizer.from_str(json.dumps(spec))
        plain.no_truncation()
        plain.no_padding()
        plain.encode_special_tokens = True  # which means that they are split like other text
        return plain

    def written(self, text: str) -> list[int]:
        """Ids of a template's own text."""
        return self.tokenizer(text, add_special_tokens=False, return_attention_mask=False,
                              return_token_type_ids=False)["input_ids"]

    def plain(self, text: str) -> list[int]:
        """Ids of a message's text: what looks like a control token is spelled in others."""
        found = self._plain.encode(text, add_special_tokens=False)
        if self.control.keys().isdisjoint(found.ids):
            return found.ids
        out: list[int] = []  # a vocabulary of whole words may hold such a token as a word, too: spelled by characters
        for i, (start, stop) in zip(found.ids, found.offsets, strict=True):
            if i in self.control:
                spelled = self._plain.encode_batch(list(text[start:stop]), add_special_tokens=False)
                out += [k for letter in spelled for k in letter.ids if k not in self.control]
            else:
                out.append(i)
        return out

    def joined(self, pieces: list[tuple[str, bool]]) -> list[int]:
        """Ids of pieces (text, whether a template wrote it) one behind the other, no control token out of a message.

        They are tokenised as one text, as the template's rendering would be, unless that finds control tokens which
        are not the template's own: then each piece alone.
        """
        ids = self.written("".join(text for text, _ in pieces))
        own = [i for text, ours in pieces if ours for i in self.written(text) if i in self.control]
        if [i for i in ids if i in self.control] == own:
            return ids
        return [i for text, ours in pieces for i in (self.written(text) if ours else self.plain(text))]

    def cut(self, text: str, limit: int) -> str:
        """The text, or its head and tail with MARKER between them: at most `limit` tokens of its own (0: any)."""
        if limit <= 0:
            return text
        if len(text) > LONGEST_TOKEN * limit:
            half = LONGEST_TOKEN * limit // 2
            text = text[:half] + MARKER + text[-half:]
        found, room = self._plain.encode(text, add_special_tokens=False), limit
        while len(found.ids) > limit and room > 0:
            kept, marker = room - len(self.plain(MARKER)), MARKER
            if kept < 2:
                kept, marker = room, ""
            head, tail = (kept + 1) // 2, kept // 2
            cut = text[:found.offsets[head - 1][1]] + marker + (text[found.offsets[-tail][0]:] if tail else "")
            if (over := len(self.plain(cut)) - limit) <= 0:
                return cut
            room -= over
        return text if room > 0 else ""
