"""The tokenizer, and how a prompt becomes text and the text becomes ids."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

from jaxrl.data.sources import GIVEN, offline_if_unreachable, resolve
from jaxrl.errors import ConfigError

log = logging.getLogger(__name__)
TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "*.model.v*", "tekken.json")  # of any kind that transformers reads


def load_tokenizer(config):
    """The Hugging Face tokenizer of `model.tokenizer` (or `model.path`), with the config's overrides applied.

    `model.chat_template` (a Jinja file) replaces the template; `model.pad_token` and the first of `model.eos_tokens`
    replace the special tokens and must be single tokens of the vocabulary. A tokenizer without a pad token pads with
    its end token. Remote code runs only with `model.trust_remote_code`. Errors: ConfigError.
    """
    field = "model.tokenizer" if config.model.tokenizer else "model.path"
    shown = config.model.tokenizer or config.model.path
    if not shown:
        raise ConfigError("model.tokenizer and model.path are empty: name a folder or hub id that holds a tokenizer")
    if shown.startswith(GIVEN):
        raise ConfigError(f"{field}={shown}: a tokenizer that a call from Python held; give it again, jaxrl.train(..., tokenizer=), or "
                          "name a folder or hub id")
    if not Path(resolve(shown)).is_dir():
        offline_if_unreachable()
    nothing = f"{field}={shown!r} holds no tokenizer: name a folder or hub id that holds the model's own in model.tokenizer"
    if Path(resolve(shown)).is_dir() and not any(any(Path(resolve(shown)).glob(name)) for name in TOKENIZER_FILES):
        raise ConfigError(nothing)
    revision = tokenizer_revision(config)
    try:
        tokenizer = reader_of(resolve(shown)).from_pretrained(resolve(shown), revision=revision or "main",
                                                              trust_remote_code=config.model.trust_remote_code)
    except ConfigError:
        raise
    except Exception as e:  # transformers raises OSError, ValueError, KeyError, ... for the same few mistakes
        folder = Path(resolve(shown)).is_dir()
        what = "holds no readable tokenizer" if folder else "is neither a folder nor a hub id in reach"
        raise ConfigError(f"{field}={shown!r} {what}: {type(e).__name__}: {str(e).splitlines()[0]}") from None
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):  # what transformers makes of a hub id without one
        raise ConfigError(nothing)
    return prepared(config, tokenizer)


def prepared(config, tokenizer):
    """The tokenizer (changed in place) with `model.chat_template` and the overrides of special tokens. Errors:
    ConfigError."""
    if config.model.chat_template:
        path = Path(resolve(config.model.chat_template))
        if not path.is_file():
            raise ConfigError(f"model.chat_template={config.model.chat_template!r}: no such file")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    _override_tokens(config, tokenizer)
    return tokenizer


def tokenizer_revision(config) -> str | None:
    """The hub revision of the tokenizer: its own, or the model's where it lies with the model."""
    return config.model.tokenizer_revision or (None if config.model.tokenizer else config.model.revision)


PROBE = ("The quick brown fox, 3.14159 x 2026-01-02T03:04:05Z\n\tdef f(x): return x**2  # naïve café Größe\n\n"
         "Привет мир, 你好世界, こんにちは, مرحبا, नमस्ते 🙂 \\boxed{42} <|im_start|>user</s>")


def fingerprint(tokenizer) -> dict[str, str]:
    """Hashes of what decides how messages become ids: 'tokenizer' (vocabulary, special tokens, the ids of a text of
    many scripts) and 'chat template'."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token]
    found = {"tokenizer": [vocabulary, special, tokenizer(PROBE)["input_ids"]], "chat template": tokenizer.chat_template}
    return {name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16] for name, value in found.items()}


def reader_of(source: str):
    """The class of transformers that reads a tokenizer: AutoTokenizer, which brings torch along where that is installed
    and so takes a second, or for a folder of nothing but a tokenizer of no particular model the one that AutoTokenizer
    would take."""
    folder, known = Path(source), {}
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing, when it is imported: nothing here needs torch
    if (folder / "tokenizer.json").is_file() and (folder / "tokenizer_config.json").is_file() and not (folder / "config.json").exists():
        known = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    if known.get("tokenizer_class") == "PreTrainedTokenizerFast" and "auto_map" not in known:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _override_tokens(config, tokenizer) -> None:
    vocabulary = tokenizer.get_vocab()
    overrides = [("model.pad_token", config.model.pad_token)] if config.model.pad_token else []
    overrides += [("model.eos_tokens", token) for token in config.model.eos_tokens]
    for field, token in overrides:
        if token not in vocabulary:
            raise ConfigError(f"{field}={token!r} is not one token of the tokenizer ({len(vocabulary)} entries); "
                              f"special tokens there: {', '.join(map(str, tokenizer.all_special_tokens)) or 'none'}")
    if config.model.eos_tokens:
        tokenizer.eos_token = config.model.eos_tokens[0]
    if config.model.pad_token:
        tokenizer.pad_token = config.model.pad_token
    elif tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


class PromptError(ValueError):
    """A prompt that cannot be rendered; becomes a bad row."""


class Template:
    """Turns a raw prompt (text or chat messages) into the text the model sees, and texts into ids.

    With a chat template: the template renders it (plain text becomes one user turn; `data.system_prompt` goes first
    unless the messages bring their own system turn) and writes its own special tokens. Without one: the text as it
    is, after `data.system_prompt` and a blank line, behind whatever the tokenizer puts at the start of a text (never
    what it puts at the end). `data.response_prefix` is appended in both cases.
    """

    def __init__(self, config, tokenizer):
        data, self.tokenizer = config.data, tokenizer
        has = bool(getattr(tokenizer, "chat_template", None))
        if data.chat == "true" and not has:
            raise ConfigError("data.chat=true, but the tokenizer has no chat template: give model.chat_template=FILE, "
                              "or data.chat=false")
        self.chat = has and data.chat != "false"
        self.system, self.prefix = data.system_prompt, data.response_prefix
        self.generation_prompt = data.add_generation_prompt
        self.kwargs = data.chat_template_kwargs.to_dict()
        self.start = () if self.chat else _leading_ids(tokenizer)
        ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)  # some tokenizers, which know every text, give it one of these names
        self.no_token = None if tokenizer.unk_token_id in ends else tokenizer.unk_token_id

    def unknown_in(self, text: str) -> str:
        """The first piece of a text that the tokenizer has no token for; of tokenizers that cannot tell where, the
        text's begin."""
        try:
            found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError:
            return text[:60]
        return next((text[a:b] for token, (a, b) in zip(found["input_ids"], found["offset_mapping"], strict=True) if token == self.no_token),
                    text[:60])

    def render(self, prompt: str | list[dict]) -> str:
        """The text of a prompt. Raises PromptError where there is none."""
        if not self.chat:
            if not isinstance(prompt, str):
                raise PromptError("chat messages need a chat template: give model.chat_template=FILE"
                                  + (" and leave data.chat=auto" if self.tokenizer.chat_template else ""))
            return (self.system + "\n\n" if self.system else "") + prompt + self.prefix
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False,
                                                      add_generation_prompt=self.generation_prompt, **self.kwargs)
        except Exception as e:  # a template may raise anything about the messages it is given
            raise PromptError(f"the chat template refuses it: {type(e).__name__}: {e}") from None
        return text + self.prefix

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
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            content = "".join(p["text"] for p in content)
        if not isinstance(content, str):
            raise PromptError(f"message {i} ({message['role']}) has no text content")
        out.append({**message, "content": content})
    return out


def _leading_ids(tokenizer) -> tuple[int, ...]:
    """Special tokens the tokenizer puts before a text (a begin token, usually), without those it puts after."""
    bare = tokenizer("x", add_special_tokens=False)["input_ids"]
    full = tokenizer("x")["input_ids"]
    for at in range(len(full) - len(bare) + 1):
        if bare and full[at:at + len(bare)] == bare:
            return tuple(full[:at])
    return ()
