"""Loads the tokenizer with the config's overrides, fingerprints it, and decodes completions."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import string
from pathlib import Path

from jaxrl.data.sources import IN_MEMORY, offline_if_unreachable, resolve
from jaxrl.errors import ConfigError

log = logging.getLogger(__name__)
TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "*.model.v*", "tekken.json")  # every format that transformers reads


def load_tokenizer(config, role: str = ""):
    """Loads the Hugging Face tokenizer of `model.tokenizer` (or `model.path`) and applies the config's overrides.

    `model.chat_template` (a Jinja file) replaces the template. `model.pad_token` and the first of
    `model.eos_tokens` replace the special tokens; these and the other end tokens must be single tokens of the
    vocabulary. A tokenizer without a pad token pads with its end token. Ids are those of the folder's tokenizer.json
    (see `open_tokenizer`). Remote code runs only with `model.trust_remote_code`.

    role: the option that names another model (teacher.path), for messages; that one's folder has its own tokenizer.

    Raises:
      ConfigError: the source has no readable tokenizer, or an override does not fit it.
    """
    field = role or ("model.tokenizer" if config.model.tokenizer else "model.path")
    shown = config.model.tokenizer or config.model.path
    if not shown:
        raise ConfigError("model.tokenizer and model.path are empty: name a folder or hub id that holds a tokenizer")
    if shown.startswith(IN_MEMORY):
        raise ConfigError(f"{field}={shown}: a tokenizer that was passed from Python; pass it again,"
                          " jaxrl.train(..., tokenizer=), or name a folder or hub id")
    source = resolve(shown)
    local = Path(source).is_dir()
    if not local:
        offline_if_unreachable()
    nothing = f"{field}={shown!r} has no tokenizer: " + (
        "put the model's tokenizer files into its folder, too" if role else
        "set model.tokenizer to a folder or hub id that has the model's tokenizer")
    if local and not any(any(Path(source).glob(name)) for name in TOKENIZER_FILES):
        raise ConfigError(nothing)
    try:
        tokenizer = open_tokenizer(source, revision=tokenizer_revision(config) or "main",
                                   trust_remote_code=config.model.trust_remote_code)
    except ConfigError:
        raise
    except Exception as e:  # transformers raises OSError, ValueError, KeyError, ... for the same few mistakes
        what = "has no readable tokenizer" if local else "is neither a folder nor a reachable hub id"
        raise ConfigError(f"{field}={shown!r} {what}: {type(e).__name__}: {str(e).splitlines()[0]}") from None
    # what transformers returns for a hub id without a tokenizer
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ConfigError(nothing)
    return apply_overrides(config, tokenizer)


def apply_overrides(config, tokenizer):
    """Applies `model.chat_template` and the overrides of special tokens to a tokenizer in place, and returns it.
    config: of the job.

    The overrides are model.pad_token and the first of model.eos_tokens. Without model.pad_token a tokenizer that has no
    pad token gets its end token as one.

    Raises ConfigError for a missing file, or a token of these options that is not in the vocabulary."""
    if config.model.chat_template:
        path = Path(resolve(config.model.chat_template))
        if not path.is_file():
            raise ConfigError(f"model.chat_template={config.model.chat_template!r}: no such file")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    _override_tokens(config, tokenizer)
    return tokenizer


def tokenizer_revision(config) -> str | None:
    """Returns the hub revision of the tokenizer: model.tokenizer_revision, else model.revision if model.tokenizer is
    empty, so that the tokenizer is the model's; "" or None if neither is set.
    """
    return config.model.tokenizer_revision or (None if config.model.tokenizer else config.model.revision)


PROBE = ("The quick brown fox, 3.14159 x 2026-01-02T03:04:05Z\n\tdef f(x): return x**2  # naïve café Größe\n\n"
         "Привет мир, 你好世界, こんにちは, مرحبا, नमस्ते 🙂 \\boxed{42} <|im_start|>user</s>")
PROBES = (PROBE.partition(" <|im")[0], " leading and  double  spaces ", "a", string.printable.strip())


def fingerprint(tokenizer) -> dict[str, str]:
    """Returns hashes (SHA-256, the first 16 hex digits) of what decides how messages become ids: 'tokenizer'
    (vocabulary, special tokens, the ids of a sample text in many scripts) and 'chat template'.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token]
    loaded = {"tokenizer": [vocabulary, special, tokenizer(PROBE)["input_ids"]],
             "chat template": tokenizer.chat_template}
    return {name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
            for name, value in loaded.items()}


def open_tokenizer(source: str, **options):
    """Loads the tokenizer of a folder or hub id so that its ids are those of its tokenizer.json, if it has one.

    AutoTokenizer picks a class by the model's type, which may build a different tokenizer than the file describes
    (transformers 5: Qwen2Tokenizer for any folder of a qwen2 model). If its ids of a sample text differ from the
    file's, the file is loaded directly.

    Args:
      source: folder or hub id. options: arguments of from_pretrained.

    Raises:
      ConfigError: no class gives the file's ids. Also what from_pretrained raises.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import cached_file

    tokenizer = tokenizer_class(source).from_pretrained(source, **options)
    file = cached_file(source, "tokenizer.json", revision=options.get("revision"),
                       _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)
    if file is None or (other := _difference(tokenizer, file)) is None:
        return tokenizer
    loaded = PreTrainedTokenizerFast.from_pretrained(source, **options)
    if (still := _difference(loaded, file)) is not None:
        raise ConfigError(f"{source}: transformers' {type(tokenizer).__name__} and tokenizer.json give different ids "
                          f"for one text, {still[0]!r}: {still[1][:8]} and {still[2][:8]}; save the tokenizer again "
                          "with save_pretrained, so that both agree")
    log.warning("%s: transformers picks %s by the model's type, whose ids differ from those of tokenizer.json"
                " (for %r: %s instead of %s); tokenizer.json is used", source, type(tokenizer).__name__,
                *(part[:8] for part in other))
    return loaded


def _difference(tokenizer, file: str) -> tuple[str, list[int], list[int]] | None:
    """Returns (text, the tokenizer's ids, the ids of a tokenizer.json) of the first sample that differs, or None.
    Encoding and decoding are compared.
    """
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
    """Returns a function that decodes the ids of completions into the texts that rewards, records,
    judges and environments see.

    The texts keep every sampled token, including special ones (`<think>` is one in some vocabularies), except
    end-of-turn tokens and padding. The function takes a list of sequences of ids and returns a text for each.

    Args:
      ends: ids that end a completion; the special ones among them and the tokenizer's end and pad tokens are dropped
        wherever they occur.
    """
    special = {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    out = {i for i in (tokenizer.eos_token_id, tokenizer.pad_token_id) if i is not None}
    out |= {int(i) for i in ends if i in special}

    def texts(completions) -> list[str]:
        visible = [[i for i in map(int, ids) if i not in out] for ids in completions]
        return tokenizer.batch_decode(visible, skip_special_tokens=False)

    return texts


def tokenizer_class(source: str):
    """Returns the transformers class that loads a tokenizer: PreTrainedTokenizerFast for a folder with tokenizer.json
    and without config.json whose tokenizer_config.json names it and no code of its own, so that torch is not imported;
    else AutoTokenizer, which imports torch if it is installed. Also turns off transformers' advice about a missing
    torch.

    source: folder or hub id.
    """
    folder, known = Path(source), {}
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # about a missing torch, which is not needed here
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
            raise ConfigError(f"{field}={token!r} is not a single token of the tokenizer ({len(vocabulary)} entries); "
                              f"its special tokens: {', '.join(map(str, tokenizer.all_special_tokens)) or 'none'}")
    if config.model.eos_tokens:
        tokenizer.eos_token = config.model.eos_tokens[0]
    if config.model.pad_token:
        tokenizer.pad_token = config.model.pad_token
    elif tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
