"""What the data tests share: a byte-level tokenizer made on the spot, a config, files."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxrl.config.load import default_config

TEMPLATE = ("{% if think is defined and think %}<think>{% endif %}{% for m in messages %}"
            "{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
            "<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
SPECIAL = ["<pad>", "<bos>", "<eos>", "<end>"]


def make_tokenizer(folder, *, begin=False, end=False, template=None):
    """One token per byte. `begin`/`end`: the tokenizer adds <bos>/<eos> to texts by itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate(SPECIAL + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if begin or end:
        single = ("<bos> " if begin else "") + "$A" + (" <eos>" if end else "")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<bos>", vocab["<bos>"]), ("<eos>", vocab["<eos>"])])
    out = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>",
                                  additional_special_tokens=["<end>"])
    out.chat_template = template
    out.save_pretrained(folder)
    return str(folder)


def make_config(tokenizer, *paths, **options):
    """Options are 'group__name=value'; paths are data.path."""
    config = default_config()
    config.model.tokenizer = str(tokenizer)
    config.data.path = tuple(map(str, paths))
    for key, value in options.items():
        group, name = key.split("__")
        if isinstance(value, dict):
            for k, v in value.items():
                config[group][name][k] = v
        else:
            config[group][name] = value
    return config


def write_jsonl(path, rows) -> Path:
    Path(path).write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return Path(path)


def questions(n, **more):
    return [{"prompt": f"{i}+1", "answer": str(i + 1), "id": i, **more} for i in range(n)]
