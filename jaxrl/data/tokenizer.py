"""The tokenizer: loaded, with the config's overrides, and its fingerprint."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import string
from pathlib import Path

from jaxrl.data.sources import GIVEN, offline_if_unreachable, resolve
from jaxrl.errors import ConfigError

log = logging.getLogger(__name__)
TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "*.model.v*", "tekken.json")  # of any kind that transformers reads


def load_tokenizer(config):
    """The Hugging Face tokenizer of `model.tokenizer` (or `model.path`), with the config's overrides applied.

    `model.chat_template` (a Jinja file) replaces the template; `model.pad_token` and the first of `model.eos_tokens`
    replace the special tokens and must be single tokens of the vocabulary. A tokenizer without a pad token pads with
    its end token. Its ids are those of the folder's tokenizer.json (see `opened`). Remote code runs only with
    `model.trust_remote_code`. Errors: ConfigError.
    """
    field = "model.tokenizer" if config.model.tokenizer else "model.path"
    shown = config.model.tokenizer or config.model.path
    if not shown:
        raise ConfigError("model.tokenizer and model.path are empty: name a folder or hub id that holds a tokenizer")
    if shown.startswith(GIVEN):
        raise ConfigError(f"{field}={shown}: a tokenizer that a call from Python held; give it again,"
                          " jaxrl.train(..., tokenizer=), or name a folder or hub id")
    source = resolve(shown)
    local = Path(source).is_dir()
    if not local:
        offline_if_unreachable()
    nothing = (f"{field}={shown!r} holds no tokenizer: name a folder or hub id that holds the model's own in"
               " model.tokenizer")
    if local and not any(any(Path(source).glob(name)) for name in TOKENIZER_FILES):
        raise ConfigError(nothing)
    try:
        tokenizer = opened(source, revision=tokenizer_revision(config) or "main",
                           trust_remote_code=config.model.trust_remote_code)
    except ConfigError:
        raise
    except Exception as e:  # transformers raises OSError, ValueError, KeyError, ... for the same few mistakes
        what = "holds no readable tokenizer" if local else "is neither a folder nor a hub id in reach"
        raise ConfigError(f"{field}={shown!r} {what}: {type(e).__name__}: {str(e).splitlines()[0]}") from None
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):  # transformers' for a hub id without one
        raise ConfigError(nothing)
    return prepared(config, tokenizer)


def prepared(config, tokenizer):
    """The tokenizer, changed in place: `model.chat_template`, overrides of special tokens. Errors: ConfigError."""
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
PROBES = (PROBE.partition(" <|im")[0], " leading and  double  spaces ", "a", string.printable.strip())


def fingerprint(tokenizer) -> dict[str, str]:
    """Hashes of what decides how messages become ids: 'tokenizer' (vocabulary, special tokens, the ids of a text of
    many scripts) and 'chat template'."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token]
    found = {"tokenizer": [vocabulary, special, tokenizer(PROBE)["input_ids"]],
             "chat template": tokenizer.chat_template}
    return {name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
            for name, value in found.items()}


def opened(source: str, **options):
    """The tokenizer of a folder or hub id, whose ids are those of its tokenizer.json, where it has one.

    AutoTokenizer takes a class by the model's type, which may build another tokenizer than the file holds (transformers
    5: Qwen2Tokenizer for any folder of a qwen2 model). Where its ids of a probe text are not the file's, the file is
    read by itself. options: of from_pretrained. Raises ConfigError where no class gives the file's ids, and what
    from_pretrained raises.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import cached_file

    tokenizer = reader_of(source).from_pretrained(source, **options)
    file = cached_file(source, "tokenizer.json", revision=options.get("revision"),
                       _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)
    if file is None or (other := _difference(tokenizer, file)) is None:
        return tokenizer
    found = PreTrainedTokenizerFast.from_pretrained(source, **options)
    if (still := _difference(found, file)) is not None:
        raise ConfigError(f"{source}: transformers' {type(tokenizer).__name__} and tokenizer.json make other ids of"
                          f" one text, {still[0]!r}: {still[1][:8]} and {still[2][:8]}; save the tokenizer again with"
                          " save_pretrained, so that both agree")
    log.warning("%s: transformers takes %s for it by the model's type, which makes other ids than its tokenizer.json"
                " (of %r: %s for %s); tokenizer.json is read", source, type(tokenizer).__name__,
                *(part[:8] for part in other))
    return found


def _difference(tokenizer, file: str) -> tuple[str, list[int], list[int]] | None:
    """(A text, the tokenizer's ids of it, those of a tokenizer.json), or None where they agree, there and back."""
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(file)
    own.no_truncation()
    own.no_padding()
    added = [token.content for token in own.get_added_tokens_decoder().values() if token.content.strip()][:64]
    for text in (*PROBES, *(f"a{token}b" for token in added)):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        want = own.encode(text, add_special_tokens=False).ids
        same = tokenizer.decode(want, skip_special_tokens=False, clean_up_tokenization_spaces=False) == own.decode(
            want, skip_special_tokens=False)
        if ids != want or not same:
            return text, ids, want
    return None


def completion_texts(tokenizer, ends=()):
    """ids of completions -> their texts, as rewards, records, judges and environments see them: every token that was
    sampled, special ones too (`<think>` is one in some vocabularies), but the end of a turn and padding. ends: ids that
    end an answer; special ones among them and the tokenizer's own end and padding are left out, wherever they stand.
    """
    special = {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    out = {i for i in (tokenizer.eos_token_id, tokenizer.pad_token_id) if i is not None}
    out |= {int(i) for i in ends if i in special}

    def texts(completions) -> list[str]:
        kept = [[i for i in map(int, ids) if i not in out] for ids in completions]
        return tokenizer.batch_decode(kept, skip_special_tokens=False)

    return texts


def reader_of(source: str):
    """The class of transformers that reads a tokenizer: AutoTokenizer, which imports torch where that is installed, or,
    for a folder of nothing but a tokenizer of no particular model, the class that it would take."""
    folder, known = Path(source), {}
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing: nothing here needs it
    own = all((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    if own and not (folder / "config.json").exists():
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
