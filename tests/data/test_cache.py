"""data.cache: what a second start takes from it is bitwise the same, and never anything that is not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.data_cases import TEMPLATE, make_config, make_tokenizer, write_jsonl
from helpers.run_tools import environment

from jaxrl.data import Stream, cache, load_eval_sets, load_tokenizer, load_train, loading
from jaxrl.data.cache import Cache

TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "Four."}, {"role": "user", "content": "3?"},
         {"role": "assistant", "content": "Three, of course."}]
ROWS = [{"prompt": f"{i}+1?", "completion": f"It is {i + 1}.", "id": i, "note": None} for i in range(6)]
ROWS += [{"prompt": TURNS, "id": 6}, {"prompt": "long " * 30, "completion": "x"},
         {"completion": "no prompt"}, {"prompt": "é🙂", "completion": "ü"}]
SCORED = [{"prompt": f"{i}?", "completions": [str(i), "a"], "labels": [True, False], "parts": ["b", "c"], "good": [0, 0.5], "note": "",
           "chosen": "y", "rejected": "n"} for i in range(8)]


@pytest.fixture
def made(tmp_path):
    """A config of a run with a cache; its files may be changed."""
    make_tokenizer(tmp_path / "t", template=TEMPLATE)
    config = make_config(tmp_path / "t", write_jsonl(tmp_path / "rows.jsonl", ROWS), run__recipe="sft", data__bad_rows="skip",
                         data__max_prompt_tokens=64, data__prompts_per_step=3, data__cache=str(tmp_path / "cache"))
    config.eval.sets = (f"held={tmp_path}/rows.jsonl",)
    return config


def loaded(config):
    tokenizer = load_tokenizer(config)
    return load_train(config, tokenizer, tokenizer.eos_token_id)


def said(dataset):
    """All that a run can see of a data set."""
    rows = [{**vars(e), **{k: None if v is None else (str(v.dtype), v.tolist()) for k, v in vars(e).items() if k.endswith("ids") or k == "trained"}}
            for e in (dataset[i] for i in range(len(dataset)))]
    lists = {name: getattr(dataset, name) for name in cache.LISTS}
    return [rows, lists, dataset.fingerprint, dataset.describe(), dataset.filtered_fraction, dataset.bad_rows.count, dataset.bad_rows.messages,
            dataset.truncated, dataset.prompt_lengths.tolist(), dataset.commits]


def entries(config):
    return sorted(p.name for p in Path(config.data.cache).iterdir() if p.is_dir())


def test_a_second_start_has_the_same_rows_and_reads_none(made, monkeypatch):
    first = said(loaded(made))
    assert len(first[0]) == 8 and first[5] == 1 and entries(made)

    def never(*args, **kwargs):
        raise AssertionError("read or tokenised again")

    monkeypatch.setattr(loading, "read", never)
    monkeypatch.setattr(loading, "_chunk", never)
    again = loaded(made)
    assert said(again) == first and isinstance(again.arrays["ids"], np.memmap)
    steps = [Stream.from_config(made, again).take(cursor)[0] for cursor in (0, 3)]
    made.data.cache = ""
    monkeypatch.undo()
    without = loaded(made)
    assert said(without) == first
    for (p, a), (q, b) in zip(sum(steps, []), sum([Stream.from_config(made, without).take(c)[0] for c in (0, 3)], []), strict=True):
        assert p == q and a.where == b.where and np.array_equal(a.target_ids, b.target_ids)


CHANGES = {
    "a row": lambda config, folder: write_jsonl(folder / "rows.jsonl", [{**ROWS[0], "completion": "It is 2."}, *ROWS[1:]]),
    "the order": lambda config, folder: write_jsonl(folder / "rows.jsonl", ROWS[::-1]),
    "the template": lambda config, folder: make_tokenizer(folder / "t", template=TEMPLATE.replace("<end>", "<pad>")),
    "the tokenizer": lambda config, folder: make_tokenizer(folder / "t", template=TEMPLATE, begin=True),
    "a limit": lambda config, folder: config.rollout.update(max_new_tokens=9),
    "a column": lambda config, folder: config.data.update(answer_column="note"),
    "a text": lambda config, folder: config.data.update(system_prompt="password=a"),
    "a secret text": lambda config, folder: config.data.update(system_prompt="password=b"),
    "a variable": lambda config, folder: setattr(config.data.chat_template_kwargs, "think", True),
    "masks": lambda config, folder: config.data.update(train_turns="all"),
    "the number of rows": lambda config, folder: config.data.update(max_rows=5),
    "whether labels will do": lambda config, folder: config.preference.update(loss=("kto",)),
    "what is held out": lambda config, folder: config.data.update(eval_fraction=2.0),
    "answers in steps": lambda config, folder: (config.run.update(recipe="reward_model"), config.reward_model.update(kind="steps"),
                                                write_jsonl(folder / "rows.jsonl", SCORED)),
    "the steps": lambda config, folder: config.reward_model.update(steps_column="parts"),
    "their labels": lambda config, folder: config.reward_model.update(labels_column="good"),
    "what is behind a step": lambda config, folder: config.reward_model.update(separator=";"),
    "pairs instead of steps": lambda config, folder: config.reward_model.update(kind="pairs"),
}


def test_what_is_changed_is_never_served(made, tmp_path):
    """Each change, on top of those before it, makes an entry of its own, which says what a run without a cache sees."""
    loaded(made)
    for what, change in CHANGES.items():
        before = set(entries(made))
        change(made, tmp_path)
        try:
            kept = said(loaded(made))
        except Exception as e:
            raise AssertionError(what) from e
        assert set(entries(made)) > before, what
        folder, made.data.cache = made.data.cache, ""
        assert said(loaded(made)) == kept, what
        made.data.cache = folder
        assert said(loaded(made)) == kept, what


def test_a_file_with_its_old_time_and_size_is_not_taken_for_the_old_one(made, tmp_path):
    file = tmp_path / "rows.jsonl"
    loaded(made)
    old = file.stat()
    file.write_text(file.read_text().replace("It is 3.", "It is 9."))
    os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert file.stat().st_size == old.st_size
    tokenizer = load_tokenizer(made)
    assert "9" in tokenizer.decode(loaded(made)[2].target_ids)


def test_code_and_libraries_count(made, monkeypatch):
    loaded(made)
    (key,) = entries(made)
    monkeypatch.setattr(cache, "_code_digest", lambda: "another jaxrl")
    loaded(made)
    assert len(entries(made)) == 2 and key in entries(made)


def test_a_broken_entry_is_made_anew(made, caplog):
    whole = said(loaded(made))
    folder = Path(made.data.cache) / entries(made)[0]
    for name in ("ids.npy", "text.npy", "meta.json"):
        content = (folder / name).read_bytes()
        for broken in (content[:-3], content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]):  # cut; of the same size
            (folder / name).write_bytes(broken)
            caplog.clear()
            assert said(loaded(made)) == whole and "is rebuilt" in caplog.text
            assert said(loaded(made)) == whole
    shutil.rmtree(folder)
    Path(made.data.cache).chmod(0o500)
    try:
        assert said(loaded(made)) == whole
    finally:
        Path(made.data.cache).chmod(0o700)


def test_a_file_that_changes_while_it_is_read_is_not_kept(made, tmp_path, monkeypatch):
    def reads(self, dataset, write=Cache.write):
        write_jsonl(tmp_path / "rows.jsonl", ROWS[:4])
        write(self, dataset)

    monkeypatch.setattr(Cache, "write", reads)
    loaded(made)
    assert entries(made) == []


def test_one_process_writes(made, monkeypatch):
    """While another has the lock nothing is written, and nobody waits."""
    monkeypatch.setattr(cache, "_try_lock", locked(cache._try_lock))
    loaded(made)
    assert entries(made) == []
    monkeypatch.undo()
    loaded(made)
    assert len(entries(made)) == 1 and not list(Path(made.data.cache).glob("*.draft"))


def locked(alone):
    import contextlib

    @contextlib.contextmanager
    def twice(path):
        with alone(path) as first, alone(path) as second:
            assert first and not second
            yield second
    return twice


def test_held_out_sets_and_rows_without_files_are_kept_too(made, tmp_path):
    tokenizer = load_tokenizer(made)
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d", "x": [1.5, {"y": None}]}]
    for _ in range(2):
        held = load_eval_sets(made, tokenizer, tokenizer.eos_token_id)["held"]
        given = load_train(made, tokenizer, tokenizer.eos_token_id, rows=rows)
        assert len(held) == 8 and given[1].columns["x"] == [1.5, {"y": None}]
    assert len(entries(made)) == 2


SECOND = """
import hashlib, json, sys
from ml_collections import ConfigDict
from jaxrl.config.load import default_config, put
from jaxrl.data import Stream, load_tokenizer, load_train
c = default_config()
for name, value in json.loads(sys.argv[1]).items():
    put(c, name, value)
t = load_tokenizer(c)
stream = Stream.from_config(c, load_train(c, t, t.eos_token_id))
digest, cursor = hashlib.sha256(), 0
for _ in range(4):
    rows, cursor = stream.take(cursor)
    for p, e in rows:
        digest.update(f"{p} {e.where} {e.columns}".encode() + e.prompt_ids.tobytes() + e.target_ids.tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_batches_of_another_process_are_bitwise_the_same(made, tmp_path):
    options = {"run.recipe": "sft", "model.tokenizer": str(tmp_path / "t"), "data.path": [str(tmp_path / "rows.jsonl")],
               "data.bad_rows": "skip", "data.max_prompt_tokens": 64, "data.prompts_per_step": 3}
    out = []
    for folder in ("", str(tmp_path / "cache"), str(tmp_path / "cache")):
        done = subprocess.run([sys.executable, "-c", SECOND, json.dumps(options | {"data.cache": folder})], env=environment(),
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        out.append(done.stdout)
    assert len(set(out)) == 1 and len(entries(made)) == 1
