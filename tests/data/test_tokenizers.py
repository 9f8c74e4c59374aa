"""Tokenizers of other people's folders: the ids of their tokenizer.json, and the text that a completion's ids say."""

import json

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from jaxrl.data import completion_texts
from jaxrl.data.tokenizer import PROBE, opened
from jaxrl.errors import ConfigError

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<end>", "<think>", "</think>"]
TYPES = ["qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text", "phi3", "qwen3_moe", "olmo2", "gpt_oss", "glm4_moe", "deepseek_v3", "mixtral"]


def made(folder):
    """A tokenizer of characters."""
    words = [*SPECIAL, " ", "\n", *map(chr, range(33, 127))]
    core = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    core.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>", unk_token="<unk>")
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("name", [None, "PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", "LlamaTokenizer"])
def test_the_ids_are_those_of_the_file_whatever_class_the_model_asks_for(tmp_path, name):
    """A folder with a config.json of each type, under each class that tokenizer_config.json may name."""
    made(tmp_path)
    own = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("tokenizer_class", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | ({"tokenizer_class": name} if name else {})))
    for kind in TYPES:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        found = opened(str(tmp_path))
        for text in (PROBE, "a b", "<think>a</think><end>"):
            assert found(text, add_special_tokens=False)["input_ids"] == own.encode(text, add_special_tokens=False).ids, kind
        assert (found.eos_token, found.pad_token) == ("<eos>", "<pad>"), kind


def test_a_file_that_no_class_reads_as_it_is_is_refused(tmp_path, monkeypatch):
    made(tmp_path)
    monkeypatch.setattr("jaxrl.data.tokenizer._difference", lambda tokenizer, file: ("a b", [1, 2], [3]))
    with pytest.raises(ConfigError, match=r"and tokenizer.json make other ids of one text, 'a b': \[1, 2\] and \[3\]"):
        opened(str(tmp_path))


def test_a_completion_says_all_but_its_end_and_padding(tmp_path):
    """Special tokens that carry meaning stay; the end of a turn and padding go, wherever they stand."""
    tokenizer = made(tmp_path)
    ids = tokenizer("<think>b</think>c", add_special_tokens=False)["input_ids"]
    end, eos, pad = (tokenizer.convert_tokens_to_ids(t) for t in ("<end>", "<eos>", "<pad>"))
    said = completion_texts(tokenizer, (end, tokenizer.convert_tokens_to_ids("c")))  # a letter that ends an answer is said
    assert said([ids, [*ids, end], [*ids, eos, pad, pad], [end], []]) == ["<think>b</think>c"] * 3 + ["", ""]
    assert completion_texts(tokenizer)([[*ids, end]]) == ["<think>b</think>c<end>"]


def test_a_template_that_asks_for_the_time_is_told_the_runs_day(tmp_path):
    """Any format, in ids and in texts alike, of a run that goes on on another day, too; other templates are left alone."""
    import datetime

    from helpers.data_cases import make_config, write_jsonl

    from jaxrl.data import day_of, load_tokenizer, load_train

    tokenizer = made(tmp_path / "t")
    tokenizer.chat_template = "\n{{ strftime_now('%d %b %Y') }}{{ strftime_now('%Y-%m-%d %H:%M') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "t")
    config = make_config(tmp_path / "t", write_jsonl(tmp_path / "x.jsonl", [{"prompt": "q", "answer": "a"}]), data__cache=str(tmp_path / "cache"))
    for day in ("2024-07-26", "2025-01-02", "2024-07-26"):  # the second time from the cache
        tokenizer = load_tokenizer(config)
        assert day_of(tokenizer, day) == day
        example = load_train(config, tokenizer)[0]
        want = datetime.date.fromisoformat(day).strftime("\n%d %b %Y%Y-%m-%d 00:00q")
        assert example.prompt_text == tokenizer.decode(example.prompt_ids) == want
    today = load_tokenizer(config)
    before = datetime.date.today().isoformat()
    assert before <= day_of(today) == day_of(today) <= datetime.date.today().isoformat()
    today.chat_template = "{{ messages }}"
    assert day_of(today) == ""
