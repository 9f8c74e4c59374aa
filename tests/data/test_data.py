"""Sources, columns, templates, limits, sets."""

import datetime
import decimal
import json
import logging
import re
import shutil
import subprocess
import sys
import traceback

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from helpers.data_cases import TEMPLATE, make_config, make_tokenizer, questions, write_jsonl

from jaxrl.data import DataError, load_eval_sets, load_tokenizer, load_train, resolve
from jaxrl.data.sources import BadRows, from_memory, read
from jaxrl.data.tokenizer import tokenizer_class
from jaxrl.errors import ConfigError
from jaxrl.run.data import warn_of_trained_prompts

EOS = 2


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("chat"), template=TEMPLATE)


def train(tokenizer, *paths, **options):
    config = make_config(tokenizer, *paths, **options)
    return load_train(config, load_tokenizer(config), EOS)


def one(tokenizer, tmp_path, row, **options):
    return train(tokenizer, write_jsonl(tmp_path / "one.jsonl", [row]), **options)[0]


# -- sources ---------------------------------------------------------------------------------------------------------


def write_csv(path):
    path.write_text("prompt,answer,id\n" + "".join(f'"{r["prompt"]}",{r["answer"]},{r["id"]}\n' for r in questions(5)))


def save_hf(path):
    import datasets
    datasets.Dataset.from_list(questions(5)).save_to_disk(path)


def folder_of_parquet(path):
    path.mkdir()
    pa.parquet.write_table(pa.Table.from_pylist(questions(5)), path / "train-00000.parquet")


KINDS = {
    "a.jsonl": lambda p: write_jsonl(p, questions(5)),
    "list.json": lambda p: p.write_text(json.dumps(questions(5), indent=1)),
    "wrapped.json": lambda p: p.write_text(json.dumps({"version": 1, "data": questions(5)})),
    "lines.json": lambda p: write_jsonl(p, questions(5)),
    "a.csv": write_csv,
    "a.parquet": lambda p: pa.parquet.write_table(pa.Table.from_pylist(questions(5)), p),
    "saved": save_hf,
    "folder": folder_of_parquet,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_gives_the_same_rows(plain, tmp_path, kind, monkeypatch):
    import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / kind
    KINDS[kind](path)
    ds = train(plain, path)
    assert [(e.prompt, e.prompt_text, e.answer) for e in ds] == [(f"{i}+1", f"{i}+1", str(i + 1)) for i in range(5)]
    assert [int(e.columns["id"]) for e in ds] == list(range(5)) and set(ds[0].columns) == {"answer", "id"}
    assert ds[0].prompt_ids.dtype == np.int32 and ds[0].target_ids is None
    assert all(e.where.startswith(str(path)) for e in ds) and len({e.where for e in ds}) == 5


def test_places_are_file_and_line(plain, tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "a", "answer": 1}\n\n{"prompt": "b\u2028c", "answer": 2}\n', "utf-8")
    (tmp_path / "b.json").write_text('[\n {"prompt": "a",\n  "answer": 1},\n {"prompt": "b", "answer": 2}]')
    (tmp_path / "c.csv").write_text('prompt,answer\n"two\nlines",1\nx,2\n')
    ds = train(plain, *(tmp_path / n for n in ("a.jsonl", "b.json", "c.csv")))
    places = ["a.jsonl:2", "a.jsonl:4", "b.json:2", "b.json:4", "c.csv:2", "c.csv:4"]
    assert [e.where.rsplit("/", 1)[1] for e in ds] == places and ds[1].prompt == "b\u2028c"


def test_urls_through_fsspec(plain):
    import fsspec
    with fsspec.open("memory://jaxrl-test/rows.jsonl", "w") as f:
        f.write('{"prompt": "p", "answer": 1}\n')
    assert train(plain, "memory://jaxrl-test/rows.jsonl")[0].prompt == "p"
    with pytest.raises(DataError, match="data.path=memory://jaxrl-test/none.jsonl: cannot be opened"):
        train(plain, "memory://jaxrl-test/none.jsonl")


def test_splits_are_chosen_and_concatenated(plain, tmp_path):
    import datasets
    rows = questions(6)
    splits = {"train": rows[:3], "more": rows[3:5], "test": rows[5:]}
    datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in splits.items()}).save_to_disk(tmp_path / "d")
    assert [e.answer for e in train(plain, tmp_path / "d", data__split=("train", "more"))] == ["1", "2", "3", "4", "5"]
    first = train(plain, tmp_path / "d", data__split=("train", "more"), data__max_rows=4)
    assert [e.answer for e in first] == ["1", "2", "3", "4"]
    config = make_config(plain, tmp_path / "d", eval__sets=(f"held={tmp_path / 'd'}", f"other={tmp_path / 'd'}@more"))
    sets = load_eval_sets(config, load_tokenizer(config))
    assert [e.answer for e in sets["held"]] == ["6"] and [e.answer for e in sets["other"]] == ["4", "5"]
    with pytest.raises(DataError, match="no split 'dev'; it has train, more, test"):
        train(plain, tmp_path / "d", data__split=("dev",))


def test_values_without_json_form_become_text_and_binary_is_left_out(plain, tmp_path, caplog):
    row = {"prompt": "p", "answer": decimal.Decimal("1.50"), "when": datetime.date(2026, 1, 2)}
    row["image"] = {"bytes": b"x"}
    pa.parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    example = train(plain, tmp_path / "a.parquet")[0]
    assert example.columns == {"answer": "1.50", "when": "2026-01-02"}
    assert json.loads(json.dumps(example.columns)) == example.columns
    assert "image" in caplog.text


def test_package_paths():
    assert resolve("gs://bucket/x.jsonl") == "gs://bucket/x.jsonl" and resolve("some/hub-id") == "some/hub-id"
    for path in ("jaxrl://not-there.jsonl", "jaxrl://../sources.py"):
        with pytest.raises(DataError, match="no such file in the package"):
            resolve(path)


def test_shipped_files_resolve(monkeypatch, tmp_path):
    import jaxrl.data.sources as sources
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "train.jsonl").write_text("{}\n")
    monkeypatch.setattr(sources, "EMBEDDED", tmp_path)
    assert resolve("jaxrl://task/train.jsonl") == str(tmp_path / "task" / "train.jsonl")


# -- bad data --------------------------------------------------------------------------------------------------------


BAD = [
    ("a.jsonl", '{"prompt": "p", "answer": 1}\n{"prompt": \n', "a.jsonl:2: not JSON"),
    ("a.jsonl", b'{"prompt": "\xff", "answer": 1}\n', "a.jsonl:1: not JSON.*utf-8"),
    ("a.jsonl", '["p"]\n', "a.jsonl:1: a row must be a JSON object, not list"),
    ("a.jsonl", '{"question": "p", "answer": 1}\n',
     "a.jsonl:1: column 'prompt' is missing.*columns found: question, answer; data.prompt_column"),
    ("a.jsonl", '{"prompt": "p"}\n', "a.jsonl:1: column 'answer' is missing.*found: prompt; data.answer_column"),
    ("a.jsonl", '{"prompt": null, "answer": 1}\n', "a.jsonl:1: column 'prompt' is empty"),
    ("a.jsonl", '{"prompt": "", "answer": 1}\n', "a.jsonl:1: the prompt has no tokens"),
    ("a.jsonl", '{"prompt": 3, "answer": 1}\n', "a.jsonl:1: column 'prompt' .*: expected text or a list of chat messages, found int"),
    ("a.jsonl", '{"prompt": [], "answer": 1}\n', "a.jsonl:1: column 'prompt' .*: the list of chat messages is empty"),
    ("a.jsonl", '{"prompt": [{"role": "user"}], "answer": 1}\n', r"a.jsonl:1: column 'prompt' .*: message 0 \(user\) has no text content"),
    ("a.jsonl", '{"prompt": ["hi"], "answer": 1}\n', "a.jsonl:1: column 'prompt' .*: message 0 is not {role"),
    ("a.jsonl", '{"prompt": [{"role": "user", "content": "x"}], "answer": 1}\n', "a.jsonl:1: .*need a chat template"),
    ("a.json", '[{"prompt": "p", "answer": 1}, 3]', "a.json:1: a row must be a JSON object, not int"),
    ("a.csv", "prompt,answer\na,1,2\n", "a.csv:2: 3 fields, but the header has 2"),
    ("a.csv", "prompt,answer\na,1\nb\n", "a.csv:3: 1 fields, but the header has 2"),
]


@pytest.mark.parametrize("name, content, text", BAD)
def test_bad_rows_are_errors_with_their_place(plain, tmp_path, name, content, text):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=text) as found:
        train(plain, tmp_path / name)
    assert "During handling" not in "".join(traceback.format_exception(found.value))


@pytest.mark.parametrize("name, content, text", BAD)
def test_bad_rows_are_skipped_and_counted(plain, tmp_path, name, content, text, caplog):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    good = write_jsonl(tmp_path / "good.jsonl", questions(2))
    ds = train(plain, good, tmp_path / name, data__bad_rows="skip")
    assert ds.bad_rows.count == 1 and [e.answer for e in ds][:2] == ["1", "2"]
    assert name in ds.bad_rows.messages[0] and "1 bad rows skipped" in ds.describe() and ds.bad_rows.messages[0] in caplog.text


def test_nothing_usable_is_an_error(plain, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "x"}] * 3)
    with pytest.raises(DataError, match=r"no usable row among 3\n.*a.jsonl:1: column 'prompt' is missing"):
        train(plain, path, data__bad_rows="skip")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match=r"data.path=.*empty.jsonl: no readable rows"):
        train(plain, tmp_path / "empty.jsonl")


@pytest.mark.parametrize("name, content, text", [
    ("missing.jsonl", None, "no such file or folder"),
    ("dir/missing", None, "no such file or folder"),
    ("a.txt", "x", "unknown kind of file '.txt'; known: .jsonl"),
    ("a.json", "[{} {", "a.json:1: not JSON"),
    ("a.json", "3", "expected a JSON list"),
    ("a.parquet", "x", "cannot be read as Parquet"),
])
def test_unreadable_sources(plain, tmp_path, name, content, text):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=text):
        train(plain, tmp_path / name, data__bad_rows="skip")


def test_unknown_hub_ids(plain):
    with pytest.raises(DataError, match="data.path=nobody/nothing-here.*nor a loadable hub id"):
        train(plain, "nobody/nothing-here")


def test_without_a_network_the_hub_is_given_up_at_once(plain, monkeypatch, caplog):
    import datasets
    import huggingface_hub
    for name in ("https_proxy", "http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://no-such-host.invalid")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(DataError, match="nor a loadable hub id"):
        train(plain, "nobody/nothing-here")
    assert huggingface_hub.constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE
    assert caplog.text.count("no-such-host.invalid cannot be reached") == 1 and "Retry" not in caplog.text


def test_no_path_at_all(plain):
    with pytest.raises(ConfigError, match="data.path is empty"):
        train(plain)


# -- columns and templates -------------------------------------------------------------------------------------------


def test_columns_are_mapped(plain, tmp_path):
    row = {"question": "q", "solution": "work\n#### 1,234 ", "difficulty": [1, 2], "completion": "c", "finish": "x"}  # "finish" is ours
    e = one(plain, tmp_path, row, data__prompt_column="question", data__answer_column="solution",
            data__answer_pattern="#### (.*)")
    assert e.answer == "1,234"
    assert e.columns == {"answer": "1,234", "solution": row["solution"], "difficulty": [1, 2], "finish_": "x"}
    with pytest.raises(DataError, match="columns 'finish' and 'finish_'"):
        one(plain, tmp_path, {"prompt": "p", "answer": "a", "finish": 1, "finish_": 2})
    assert one(plain, tmp_path, {"prompt": "p"}, data__answer_column="").columns == {}


def test_an_answer_may_be_a_field_of_a_column(plain, tmp_path):
    row = {"prompt": "p", "spec": {"inner": {"truth": "7"}, "rule": "x"}}
    e = one(plain, tmp_path, row, data__answer_column="spec.inner.truth")
    assert e.answer == "7" and e.columns == {"answer": "7", "spec": row["spec"]}
    assert one(plain, tmp_path, {"prompt": "p", "a.b": "8"}, data__answer_column="a.b").answer == "8"
    with pytest.raises(DataError, match="spec.gone"):
        one(plain, tmp_path, row, data__answer_column="spec.gone")


def test_answer_pattern_errors(plain, tmp_path):
    for pattern, text in (("(", "is not a valid regex"), ("####.*", "has no group"), ("#### (.*)", "finds nothing in column")):
        with pytest.raises(ConfigError, match=text):
            one(plain, tmp_path, {"prompt": "p", "answer": "no mark"}, data__answer_pattern=pattern)


def test_chat_template(chat, tmp_path):
    row = {"prompt": "hi", "answer": 1}
    e = one(chat, tmp_path, row)
    assert e.prompt_text == "<user>hi<end><assistant>" and e.prompt == "hi"
    tokenizer = load_tokenizer(make_config(chat))
    assert tokenizer.decode(e.prompt_ids) == e.prompt_text and 3 in e.prompt_ids  # <end> is one token
    text = one(chat, tmp_path, row, data__system_prompt="sys", data__response_prefix="So",
               data__add_generation_prompt=False, data__chat_template_kwargs={"think": True}).prompt_text
    assert text == "<think><system>sys<end><user>hi<end>So"
    messages = [{"role": "system", "content": "own"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}]
    e = one(chat, tmp_path, {"prompt": messages, "answer": 1}, data__system_prompt="sys")
    assert e.prompt_text == "<system>own<end><user>ab<end><assistant>"
    assert one(chat, tmp_path, row, data__chat="false").prompt_text == "hi"
    with pytest.raises(DataError, match="one.jsonl:1: the chat template rejects it: .*no robots"):
        one(chat, tmp_path, {"prompt": [{"role": "robot", "content": "x"}], "answer": 1})
    with pytest.raises(DataError, match="an assistant turn and nothing before it"):
        one(chat, tmp_path, {"prompt": [{"role": "assistant", "content": "x"}], "answer": 1})


def test_plain_prompts(plain, tmp_path):
    e = one(plain, tmp_path, {"prompt": "p", "answer": 1}, data__system_prompt="sys", data__response_prefix=" So")
    assert e.prompt_text == "sys\n\np So"
    with pytest.raises(ConfigError, match="data.chat=true, but the tokenizer has no chat template"):
        one(plain, tmp_path, {"prompt": "p", "answer": 1}, data__chat="true")


@pytest.mark.parametrize("begin, end, ids", [(False, False, []), (True, False, [1]), (False, True, []),
                                             (True, True, [1])])
def test_plain_prompts_begin_as_the_tokenizer_does_and_never_end(tmp_path, begin, end, ids):
    tokenizer = make_tokenizer(tmp_path / "t", begin=begin, end=end)
    bare = one(make_tokenizer(tmp_path / "b"), tmp_path, {"prompt": "p", "answer": 1}).prompt_ids
    assert one(tokenizer, tmp_path, {"prompt": "p", "answer": 1}).prompt_ids.tolist() == [*ids, *bare]


# -- tokenizer -------------------------------------------------------------------------------------------------------


def test_tokenizer_overrides(plain, tmp_path):
    assert load_tokenizer(make_config(plain)).pad_token == "<eos>"
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}!")
    config = make_config(plain, model__pad_token="<pad>", model__eos_tokens=("<end>", "<eos>"),
                         model__chat_template=str(tmp_path / "t.jinja"))
    tokenizer = load_tokenizer(config)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 3)
    path = write_jsonl(tmp_path / "a.jsonl", questions(1))
    config.data.path = (str(path),)
    assert load_train(config, tokenizer)[0].prompt_text == "0+1!"
    config = make_config("unused")
    config.model.tokenizer, config.model.path = "", plain
    assert len(load_tokenizer(config)) == 260


@pytest.mark.parametrize("options, text", [
    ({"model__pad_token": "<nope>"}, "model.pad_token='<nope>' is not a single token"),
    ({"model__eos_tokens": ("ab",)}, "model.eos_tokens='ab' is not a single token"),
    ({"model__chat_template": "no/such.jinja"}, "model.chat_template='no/such.jinja': no such file"),
    ({"model__tokenizer": ""}, "model.tokenizer and model.path are empty"),
    ({"model__tokenizer": "no/thing"}, "model.tokenizer='no/thing' is neither a folder nor a reachable hub id"),
])
def test_tokenizer_errors(plain, options, text):
    with pytest.raises(ConfigError, match=text):
        load_tokenizer(make_config(plain, **options))


@pytest.mark.parametrize("field", ["tokenizer", "path"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_folder_without_a_tokenizer_is_told_from_one_that_cannot_be_read(tmp_path, field, file):
    """transformers makes a tokenizer of one token of such a folder."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / file).write_text('{"model_type": "qwen2"}')
    config = make_config(tmp_path if field == "tokenizer" else "")
    config.model.path = str(tmp_path)
    with pytest.raises(ConfigError, match=f"model.{field}='.*' has no tokenizer: set model.tokenizer to a folder .* model's tokenizer"):
        load_tokenizer(config)


@pytest.mark.full
@pytest.mark.torch
def test_a_tokenizer_of_no_model_is_the_same_without_torch(plain, tmp_path):
    """The class that AutoTokenizer takes, and it is asked where a model's config or code of its own might decide. Neither it nor
    TensorBoard's sink brings torch, which is there when it is wanted."""
    from transformers import AutoTokenizer

    shipped, wanted = resolve("jaxrl://arith/tokenizer"), AutoTokenizer.from_pretrained(resolve("jaxrl://arith/tokenizer"))
    found = tokenizer_class(shipped).from_pretrained(shipped)
    assert tokenizer_class(shipped) is not AutoTokenizer and type(found) is type(wanted) and str(vars(found)) == str(vars(wanted))
    own = shutil.copytree(shipped, tmp_path / "own")
    (own / "config.json").write_text('{"model_type": "qwen2"}')
    assert tokenizer_class(str(own)) is AutoTokenizer and tokenizer_class("some/hub-id") is AutoTokenizer
    code = f"""if True:
        import sys
        from jaxrl.data.tokenizer import tokenizer_class
        from jaxrl.telemetry.sinks import TensorBoard
        tokenizer_class({shipped!r}).from_pretrained({shipped!r})
        TensorBoard({str(tmp_path / "events")!r}, 0).close()
        assert "torch" not in sys.modules
        import torch"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_tokenizer_code_does_not_run_unasked(tmp_path):
    trace = tmp_path / "ran"
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "code.py").write_text(f"open({str(trace)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast\n"
                                    "class Own(PreTrainedTokenizerFast): pass\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "code.Own"]}}))
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no readable tokenizer"):
        load_tokenizer(make_config(folder))
    assert not trace.exists()


# -- limits ----------------------------------------------------------------------------------------------------------


def lengths_file(tmp_path, lengths):
    return write_jsonl(tmp_path / "lengths.jsonl", [{"prompt": "x" * (n - 1) + "y", "answer": n} for n in lengths])


def test_overlong_prompts(plain, tmp_path, caplog):
    path = lengths_file(tmp_path, [3, 9, 8, 20])
    ds = train(plain, path, data__max_prompt_tokens=8)
    assert [e.answer for e in ds] == [3, 8] and ds.prompt_lengths.tolist() == [3, 8]
    assert ds.filtered_rows == [1, 3] and [w.rsplit(":")[-1] for w in ds.filtered] == ["2", "4"]
    assert "2 of 4 rows (50 %) are too long" in caplog.text and "2 dropped" in ds.describe()
    ds = train(plain, path, data__max_prompt_tokens=8, data__overlong_prompt="truncate_left")
    assert [e.prompt_text for e in ds] == ["xxy", "xxxxxxxy", "xxxxxxxy", "xxxxxxxy"] and ds.truncated == 2
    assert all(len(e.prompt_ids) <= 8 for e in ds) and ds[3].prompt == "x" * 19 + "y"
    with pytest.raises(DataError, match="lengths.jsonl:2: the prompt has 9 tokens, data.max_prompt_tokens=8"):
        train(plain, path, data__max_prompt_tokens=8, data__overlong_prompt="error")


@pytest.mark.parametrize("long, level", [(5, logging.INFO), (6, logging.WARNING)])
def test_the_warning_begins_above_five_percent(plain, tmp_path, caplog, long, level):
    with caplog.at_level("INFO", logger="jaxrl"):
        train(plain, lengths_file(tmp_path, [3] * (100 - long) + [9] * long), data__max_prompt_tokens=8)
    assert [r.levelno for r in caplog.records if "too long" in r.message] == [level]


# -- SFT -------------------------------------------------------------------------------------------------------------


def sft(tokenizer, path, **options):
    return train(tokenizer, path, run__recipe="sft", **options)


def test_targets_are_tokenised_alone_and_end_once(plain, tmp_path):
    path = write_jsonl(tmp_path / "s.jsonl", [{"prompt": "ab", "completion": c} for c in ("cd", "cd<eos>", "")])
    ds = sft(plain, path)
    bare = load_tokenizer(make_config(plain))("cd", add_special_tokens=False)["input_ids"]
    assert [e.target_ids.tolist() for e in ds] == [[*bare, EOS], [*bare, EOS], [EOS]]
    assert ds[0].target_ids.dtype == np.int32 and ds[0].columns == {"answer": None}
    assert [len(e.target_ids) for e in ds] == [3, 3, 1]


@pytest.mark.parametrize(("load", "what"), [(sft, "empty completion, so the model learns to end at once"),
                                           (train, "empty reference answer, so rewards compare its completions with ''")])
def test_empty_cells_are_counted_and_named(plain, tmp_path, caplog, load, what):
    """Of a CSV a cell without text, which reads as ''; not where all are, which says that there are no answers."""
    path, none = tmp_path / "s.csv", tmp_path / "none.csv"
    path.write_text("prompt,completion,answer\nab,cd,e\nab,,\n")
    none.write_text("prompt,completion,answer\nab,cd,\nab,cd,\n")
    load(plain, path)
    assert f"train: 1 of 2 rows have an {what}: {path}:3; take them out" in caplog.text
    caplog.clear()
    load(plain, none)
    assert "empty" not in caplog.text


def test_targets_from_messages(chat, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]
    e = sft(chat, write_jsonl(tmp_path / "s.jsonl", rows))[0]
    tokenizer = load_tokenizer(make_config(chat))
    assert e.prompt_text == "<user>q<end><assistant>" and tokenizer.decode(e.target_ids) == "a<end>"
    rows = [{"prompt": "q", "completion": [{"role": "assistant", "content": "a"}]}]
    assert tokenizer.decode(sft(chat, write_jsonl(tmp_path / "s.jsonl", rows))[0].target_ids) == "a<end>"


@pytest.mark.parametrize("row, text", [
    ({"prompt": "p", "text": "x"}, "column 'completion' is missing.*found: prompt, text; data.completion_column"),
    ({"prompt": "p", "completion": 3}, "column 'completion' holds an int, expected text: write 3 as \"3\""),
    ({"prompt": [{"role": "assistant", "content": "x"}]}, "an assistant turn and nothing before it"),
])
def test_bad_targets(chat, tmp_path, row, text):
    with pytest.raises(DataError, match=text):
        sft(chat, write_jsonl(tmp_path / "s.jsonl", [row]))


def test_overlong_targets_are_left_out_never_cut(plain, tmp_path):
    rows = [{"prompt": "ab", "completion": "x" * n} for n in (7, 8, 9)]
    path = write_jsonl(tmp_path / "s.jsonl", rows)
    assert len(sft(plain, path, rollout__max_new_tokens=9, data__overlong_prompt="truncate_left")) == 2
    assert len(sft(plain, path, rollout__max_new_tokens=99, train__max_sequence_tokens=10)) == 1
    with pytest.raises(DataError, match="s.jsonl:3: the completion has 10 tokens, rollout.max_new_tokens=9"):
        sft(plain, path, rollout__max_new_tokens=9, data__overlong_prompt="error")


# -- sets ------------------------------------------------------------------------------------------------------------


def test_an_eval_set_of_training_prompts_is_named(plain, tmp_path, caplog):
    """From half of its prompts on, over all sources; not a set with fewer, and not what data.eval_fraction holds out."""
    rows = {name: [{"prompt": p, "answer": "x"} for p in prompts]
            for name, prompts in {"one": ("ab", "cd"), "two": ("ef",), "same": ("cd", "ab", "ab"), "half": ("ef", "abcd"),
                                  "few": ("ab", "abef", "efef"), "none": ("ba",)}.items()}
    path = {name: write_jsonl(tmp_path / f"{name}.jsonl", own) for name, own in rows.items()}
    held = tuple(f"{name}={path[name]}" for name in ("same", "half", "few", "none"))
    config = make_config(plain, eval__sets=held, data__sources={name: {"path": (str(path[name]),)} for name in ("one", "two")})
    both = load_train(config, load_tokenizer(config), EOS)
    warn_of_trained_prompts(both, load_eval_sets(config, load_tokenizer(config)))
    assert re.findall(r"eval set (\w+): (\d) of its (\d) prompts are prompts of the training data", caplog.text) == [
        ("same", "3", "3"), ("half", "1", "2")]
    caplog.clear()
    carved = train(plain, path["same"], data__eval_fraction=1)
    warn_of_trained_prompts(carved, {"heldout": carved.heldout})
    warn_of_trained_prompts(carved, {})
    assert not caplog.records


def test_eval_sets_hold_every_row_once_in_order(plain, tmp_path):
    a, b = write_jsonl(tmp_path / "a.jsonl", questions(7)), write_jsonl(tmp_path / "b.jsonl", questions(3))
    config = make_config(plain, a, eval__sets=(f"first={a}", f"second={b}"))
    sets = load_eval_sets(config, load_tokenizer(config))
    assert list(sets) == ["first", "second"]
    assert [e.columns["id"] for e in sets["first"]] == list(range(7)) and len(sets["second"]) == 3
    config.eval.max_rows = 2
    assert [len(s) for s in load_eval_sets(config, load_tokenizer(config)).values()] == [2, 2]


@pytest.mark.parametrize("sets, text", [
    (("no-name.jsonl",), "'no-name.jsonl' is not 'name=path'"), (("a b=x.jsonl",), "is not 'name=path'"),
    (("x={0}", "x={0}"), "the name 'x' is used twice"),
    (("heldout={0}",), "data.eval_fraction makes a set of that name"),
    (("x=gone.jsonl",), "eval.sets x=gone.jsonl: no such file"),
])
def test_eval_set_errors(plain, tmp_path, sets, text):
    path = write_jsonl(tmp_path / "a.jsonl", questions(4))
    config = make_config(plain, path, eval__sets=tuple(s.format(path) for s in sets), data__eval_fraction=0.5)
    with pytest.raises(ConfigError, match=text):
        load_eval_sets(config, load_tokenizer(config))


def test_carved_out_rows_are_disjoint_by_prompt(plain, tmp_path):
    rows = questions(60) + questions(20)  # the first twenty prompts come twice
    config = make_config(plain, write_jsonl(tmp_path / "a.jsonl", rows), data__eval_fraction=0.25)
    tokenizer = load_tokenizer(config)

    def carve():
        ds = load_train(config, tokenizer)
        return ds, [e.where for e in ds], [e.where for e in ds.heldout]

    ds, train_rows, held = carve()
    assert not {e.prompt for e in ds} & {e.prompt for e in ds.heldout}
    assert len(train_rows) + len(held) == 80 and len(set(train_rows) | set(held)) == 80 and 20 <= len(held) <= 21
    assert carve()[1:] == (train_rows, held)
    assert [e.where for e in load_eval_sets(config, tokenizer)["heldout"]] == held
    assert load_eval_sets(config, tokenizer, train=ds)["heldout"] is ds.heldout
    config.data.seed = 1
    assert carve()[2] != held
    config.data.eval_fraction = 1.0
    assert len(carve()[2]) in (1, 2)  # one row, with its twin where it has one
    config.data.eval_fraction = 30
    assert 30 <= len(carve()[2]) <= 31 and len(carve()[1]) == 80 - len(carve()[2])
    for fraction in (0.001, 0.999, 80):
        config.data.eval_fraction = fraction
        with pytest.raises(ConfigError, match="data.eval_fraction"):
            carve()


def test_fingerprint_follows_content_and_order(plain, tmp_path):
    rows = questions(5)
    prints = {train(plain, write_jsonl(tmp_path / f"{k}.jsonl", r)).fingerprint
              for k, r in enumerate([rows, rows, rows[::-1], rows[:4], [*rows[:4], {"prompt": "other", "answer": 1}]])}
    assert len(prints) == 4


def test_max_rows_counts_rows_that_can_be_read(plain, tmp_path):
    """Of rows in memory as of a file, with bad rows before them."""
    rows = ["no row", *questions(5), 7, *questions(3)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    file = train(plain, path, data__max_rows=6, data__bad_rows="skip")
    config = make_config(plain, data__max_rows=6, data__bad_rows="skip")
    memory = load_train(config, load_tokenizer(config), EOS, rows)
    assert len(file) == len(memory) == 6 and file.fingerprint == memory.fingerprint and memory.bad_rows.count == file.bad_rows.count == 2


def test_rows_that_a_caller_holds_are_read_like_files(plain, tmp_path):
    import datasets
    rows = [{**row, "when": datetime.date(2026, 1, 2)} for row in questions(8)]
    file = train(plain, write_jsonl(tmp_path / "a.jsonl", [{**row, "when": "2026-01-02"} for row in rows]), data__max_rows=6)
    config = make_config(plain, data__max_rows=6)
    tokenizer = load_tokenizer(config)
    for given in (rows, (row for row in rows), datasets.Dataset.from_list(rows), datasets.Dataset.from_list(rows).to_iterable_dataset()):
        ds = load_train(config, tokenizer, EOS, given)
        assert ds.fingerprint == file.fingerprint and [e.columns for e in ds] == [e.columns for e in file]
        assert [e.prompt for e in ds] == [e.prompt for e in file] and ds[5].where == "data[5]"
    config.data.eval_fraction = 0.5
    sets = load_eval_sets(config, tokenizer, EOS, sets={"own": rows[:2]}, rows=rows)
    assert {name: len(s) for name, s in sets.items()} == {"own": 2, "heldout": 3}
    both = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
    for wrong, text in ((both, "DatasetDict: expected rows.*one of its splits: train"), ([], "data holds no rows"), (3, "data is an int"),
                        (["x"], r"data\[0\]: a row must be a JSON object, not str")):
        with pytest.raises(DataError, match=text):
            load_train(config, tokenizer, EOS, wrong)


DEEP = "[" * 5000 + "]" * 5000
LONG = "7" * 5000
UNREADABLE = {
    "half.jsonl": ('{"prompt": "a \\ud83d b", "answer": "1"}', 2, r"half a surrogate pair, '\\ud83d', which is not valid text, after '\[\"a '"),
    "answer.jsonl": ('{"prompt": "p", "answer": "\\udc00"}', 2, "half a surrogate pair"),
    "half.csv": (b'"\xed\xa0\xbd",1', 3, "not UTF-8"),
    "long.jsonl": (f'{{"prompt": "p", "answer": {LONG}}}', 2, "not JSON: an integer of more than 4300 digits"),
    "long.json": (f'{{"prompt": "p", "answer": {LONG}}}', 2, "an integer of more than 4300 digits"),
    "deep.jsonl": ('{"prompt": "p", "answer": %s}' % ("[" * 200 + "]" * 200), 2, "nested deeper than 100 levels"),
    "deeper.jsonl": ('{"prompt": "p", "answer": %s}' % ("[" * 200_000 + "]" * 200_000), 2, "not JSON: nested too deeply"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_rows_that_no_one_could_tokenise_or_write_are_named_by_line_and_skipped(plain, tmp_path, name):
    """In training and in evaluation data."""
    row, line, text = UNREADABLE[name]
    good, path = '{"prompt": "%s", "answer": "1"}', tmp_path / name
    if name.endswith("csv"):
        path.write_bytes(b"prompt,answer\nx,1\n" + row + b"\ny,1\n")
    else:
        lines = [good % "x", row, good % "y"]
        path.write_text("[" + ",\n".join(lines) + "]" if name.endswith("json") else "\n".join(lines))
    with pytest.raises(DataError, match=rf"{name}:{line}: {text}"):
        train(plain, path)
    assert [e.prompt for e in train(plain, path, data__bad_rows="skip")] == ["x", "y"]
    config = make_config(plain, eval__sets=(f"test={path}",))
    with pytest.raises(DataError, match=f"{name}:{line}: {text}"):
        load_eval_sets(config, load_tokenizer(config))


@pytest.mark.parametrize("name, content, text", [
    ("a.csv", bytes(range(256)) * 4, "a.csv:1: not UTF-8; is it a text file"),
    ("a.json", ("[" + DEEP * 40 + "]").encode(), r"a.json:1: (not JSON: nested too deeply|a row must be a JSON object)"),
    ("a.json", f'{{"prompt": "p", "answer": {LONG}}}'.encode(), "a.json:1: cannot be read: an integer of more than 4300 digits"),
])
def test_files_that_are_something_else_say_so(plain, tmp_path, name, content, text):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=text):
        train(plain, tmp_path / name)


def test_text_that_the_tokenizer_has_no_token_for_is_said_and_never_learnt(tmp_path, caplog):
    """A model saw <unk> for words and learnt to write it, while the loss fell."""
    rows = [{"prompt": "How many apples?", "completion": "12"}, {"prompt": "How many zebras?", "completion": "7"},
            {"prompt": "How many eggs?", "completion": "4711"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))

    def load(**options):
        config = make_config("jaxrl://arith/tokenizer", path, data__answer_column="", **options)
        tokenizer = load_tokenizer(config)
        return load_train(config, tokenizer, tokenizer.eos_token_id)

    load()
    (said,) = [r.getMessage() for r in caplog.records if "no token for" in r.getMessage()]
    assert "1 of 3 prompts" in said and "'zebras'" in said and f"{path.name}:2" in said and "'<unk>'" in said and "25 %" in said
    with pytest.raises(DataError, match="rows.jsonl:3: the tokenizer has no token for '4711' in the completion"):
        load(run__recipe="sft")
    assert len(load(run__recipe="sft", data__bad_rows="skip")) == 2


def test_padding_of_arrow_reaches_nobody(tmp_path):
    """Parquet, a saved data set, a folder of Parquet, a data set in memory and a stream give the rows of the JSON lines."""
    import datasets

    call = lambda name, **given: {"type": "function", "function": {"name": name, "arguments": given}}  # noqa: E731
    said = lambda *calls: {"role": "assistant", "content": None, "tool_calls": list(calls)}  # noqa: E731
    schema = lambda **more: {"type": "function", "function": {"name": "f", "parameters": {"properties": more}}}  # noqa: E731
    rows = [{"prompt": [{"role": "user", "content": "a"}, said(call("add", x=1, y=2))], "tools": [schema(x={"type": "number"})],
             "answer": {"value": 1, "none": None}, "marks": [1, None]},
            {"prompt": [{"role": "user", "content": "b"}, said(call("sky", city="Rome"))], "tools": [schema(city={"type": "string"})],
             "answer": {"value": 2, "none": None, "unit": "m"}, "marks": []}]
    held = datasets.Dataset.from_list(rows)
    held.save_to_disk(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    held.to_parquet(tmp_path / "folder" / "train.parquet")
    bad = BadRows("error")
    for table in (read(str(write_jsonl(tmp_path / "x.jsonl", rows)), bad, field="f"), from_memory(held, bad, field="f"),
                  *(read(str(tmp_path / name), bad, field="f") for name in ("folder/train.parquet", "saved", "folder")),
                  from_memory(held.to_iterable_dataset(), bad, field="f")):
        assert [table[i][0] for i in range(2)] == rows


@pytest.mark.parametrize("name, text", [("x.csv", "a,b,a\n1,2,3\n"), ("x.jsonl", '{"a": 1, "a": 2}\n'), ("z.jsonl", '{"b": [{"a": 1, "a": 2}]}\n'),
                                        ("x.json", '[{"a": 1, "a": 2}]'), ("y.json", '{"a": 1, "a": 2}')])
def test_a_doubled_column_is_named(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match="the (column|key) 'a' occurs"):
        read(str(tmp_path / name), BadRows("error"), field="f")
    table = pa.Table.from_arrays([pa.array(["1"]), pa.array(["2"])], names=["a", "a"])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(DataError, match="the column 'a' occurs 2 times"):
        read(str(tmp_path / "x.parquet"), BadRows("error"), field="f")


def test_names_of_our_own_are_in_one_table():
    """What rewards are called with is what a column may not be called."""
    from jaxrl.data.dataset import RESERVED
    from jaxrl.rewards.calling import EXTRAS, SHARED

    images = {"images"}  # data.image_column has them
    assert set(RESERVED) == {"prompt", "completion", "prompts", "completions", "answer", *EXTRAS, *SHARED} - images


def test_rows_of_messages_are_prompts_without_their_last_answer(chat, tmp_path, caplog):
    """As TRL's rows: the column is found by its name, and a run that samples leaves out what it would sample."""
    asked = [{"role": "user", "content": "q"}]
    rows = [{"messages": [*asked, {"role": "assistant", "content": "a"}], "answer": "1"}, {"messages": asked, "answer": "1"}]
    first, second = train(chat, write_jsonl(tmp_path / "m.jsonl", rows))
    assert first.prompt == second.prompt == asked and first.prompt_text == second.prompt_text
    assert sum("left out of the prompt" in m for m in caplog.messages) == 1 and "messages" not in first.columns
    assert load_tokenizer(make_config(chat)).decode(sft(chat, tmp_path / "m.jsonl", data__max_rows=1)[0].target_ids) == "a<end>"
