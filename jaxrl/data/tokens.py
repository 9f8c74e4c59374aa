"""Encodes texts with control tokens only where they are meant: in a template's text, never in the
content of a message.
"""

from __future__ import annotations

import functools
import json

from jaxrl.errors import ConfigError

MARKER = "\n[...]\n"  # replaces the middle of a truncated text
LONGEST_TOKEN = 64  # characters; texts are cut to this many per token before they are encoded


class Tokens:
    """Encodes template and message texts.

    Args:
      tokenizer: of Hugging Face. Cutting texts and encoding a message's text need one with a tokenizer.json.
      marks: texts of added tokens that only templates may write, in addition to those that the chat template names.

    Attributes:
      added: text -> id of every added token.
      control: id -> text of every token that only templates may write: special tokens (except the one for unknown
        text), and other added tokens that the chat template or `marks` name, such as `<tool_call>`.
    """

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
        """Returns the tokenizer without control tokens."""
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
        """Returns the token ids of text that a template writes, in which control tokens are single ids."""
        return self.tokenizer(text, add_special_tokens=False, return_attention_mask=False,
                              return_token_type_ids=False)["input_ids"]

    def plain(self, text: str) -> list[int]:
        """Returns the token ids of a message's text; what looks like a control token is spelled with other tokens.

        Raises ConfigError for a tokenizer without a tokenizer.json."""
        encoded = self._plain.encode(text, add_special_tokens=False)
        if self.control.keys().isdisjoint(encoded.ids):
            return encoded.ids
        # a word-level vocabulary may also have such a token as a word, which is then spelled by characters
        out: list[int] = []
        for i, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
            if i in self.control:
                spelled = self._plain.encode_batch(list(text[start:stop]), add_special_tokens=False)
                out += [k for letter in spelled for k in letter.ids if k not in self.control]
            else:
                out.append(i)
        return out

    def encode_pieces(self, pieces: list[tuple[str, bool]]) -> list[int]:
        """Returns the ids of consecutive pieces (text, whether a template wrote it), with no control
        token from a message.

        The pieces are tokenized as one text, as the template's rendering would be. If that yields control tokens that
        are not the template's, each piece is tokenized alone, and tokens do not reach over the borders of pieces. Then
        raises ConfigError for a tokenizer without a tokenizer.json.
        """
        ids = self.written("".join(text for text, _ in pieces))
        own = [i for text, ours in pieces if ours for i in self.written(text) if i in self.control]
        if [i for i in ids if i in self.control] == own:
            return ids
        return [i for text, ours in pieces for i in (self.written(text) if ours else self.plain(text))]

    def cut(self, text: str, limit: int) -> str:
        """Returns a text of at most `limit` tokens (0: no limit): unchanged, or its head and tail with MARKER
        between them, as far as the limit has room for MARKER; "" if no cut is short enough.

        Texts of more than LONGEST_TOKEN characters per allowed token are cut before they are tokenized. With a limit,
        raises ConfigError for a tokenizer without a tokenizer.json."""
        if limit <= 0:
            return text
        if len(text) > LONGEST_TOKEN * limit:
            half = LONGEST_TOKEN * limit // 2
            text = text[:half] + MARKER + text[-half:]
        encoded, room = self._plain.encode(text, add_special_tokens=False), limit
        while len(encoded.ids) > limit and room > 0:
            size, marker = room - len(self.plain(MARKER)), MARKER
            if size < 2:
                size, marker = room, ""
            head, tail = (size + 1) // 2, size // 2
            cut = text[:encoded.offsets[head - 1][1]] + marker + (text[encoded.offsets[-tail][0]:] if tail else "")
            if (over := len(self.plain(cut)) - limit) <= 0:
                return cut
            room -= over
        return text if room > 0 else ""
