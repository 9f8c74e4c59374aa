"""What a run reads is the same on all its hosts, and the same as when its checkpoint was written."""

import json
import logging
import os
import re
import subprocess
import sys

import pytest
from helpers.data_cases import TEMPLATE, make_config, make_tokenizer, questions, write_jsonl
from helpers.run_tools import ROOT, environment
from helpers.tiny_job import MODEL

from jaxrl.checkpoint import fingerprints as inputs
from jaxrl.checkpoint.checkpointer import Checkpointer
from jaxrl.checkpoint.resume import READ, input_changes
from jaxrl.config.load import put, redacted
from jaxrl.data import fingerprint, load_tokenizer, load_train
from jaxrl.errors import ConfigError
from jaxrl.models.io import hf
from jaxrl.processes.group import Peers
from jaxrl.resolve.spec import resolve
from jaxrl.rewards import RewardPool
from jaxrl.run import setup
from jaxrl.run.data import load_data
from jaxrl.run.session import Session
from jaxrl.run.setup import check_inputs

HOST = """
import os, sys
os.chdir(f"{sys.argv[1]}/{os.environ['JAXRL_PROCESS']}")
from jaxrl.main import main, peers
status = main(sys.argv[2:])
peers().leave(status)
sys.exit(status)
"""


def host(folder, rows, template=TEMPLATE):
    """What a host holds under the same relative names."""
    folder.mkdir(exist_ok=True)
    make_tokenizer(folder / "tokenizer", template=template)
    for name, part in (("train", rows[:12]), ("test", rows[12:])):
        write_jsonl(folder / f"{name}.jsonl", [{**row, "completion": "4"} for row in part])


@pytest.mark.slow
def test_hosts_with_other_files_are_named_before_the_first_step(tmp_path):
    """Two processes of one command whose working directories hold other rows and another template under the same names."""
    host(tmp_path / "0", questions(16))
    other = questions(16)
    other[3]["answer"], other[13]["answer"] = "5", "15"
    host(tmp_path / "1", other, template=" " + TEMPLATE)
    (tmp_path / "host.py").write_text(HOST)
    flags = {"data.path": "train.jsonl,", "eval.sets": "test=test.jsonl,", "model.tokenizer": "tokenizer", "model.config.vocab_size": 264,
             "train.steps": 1, "data.prompts_per_step": 2, "eval.before": "false", "eval.after": "false", "log.console": "plain",
             "checkpoint.export_at_end": "false", "data.max_rows": 0, "run.dir": tmp_path / "run"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl.launch", "--processes=2", "--", str(tmp_path / "host.py"), str(tmp_path),
         f"--config={ROOT}/tests/helpers/tiny_job.py:sft", *[f"--config.{k}={v}" for k, v in flags.items()]],
        capture_output=True, text=True, timeout=600, env=environment())
    said = done.stdout + done.stderr
    assert done.returncode == 2 and "the processes of this run differ" in said, said
    for name in ("training data", "eval set test", "chat template"):
        assert re.search(rf"- {name}: \w+(, \d+ rows)? on process 1 on .*, \w+(, \d+ rows)? on process 0 on ", said), said
    assert "- tokenizer:" not in said and not (tmp_path / "run" / "metrics.jsonl").exists()


class Two(Peers):
    """Process 0 of two; what the other one says is made of what this one does."""

    def __init__(self, other):
        super().__init__(0, 2, names=("a", "b"))
        self.other = other

    def all_gather(self, what, value=None):
        return [value, "" if isinstance(value, str) else self.other(value)]


def test_a_host_that_reads_something_else_is_named(job):
    run = Session(resolve(job()))
    for name in ("training data", "eval set test", "tokenizer", "chat template", "model config"):
        run.peers = Two(lambda facts, name=name: facts | {name: "else"})
        with pytest.raises(ConfigError, match=rf"of this run differ:\n  - {name}: else on process 1 on b, [^\n]+ on process 0 on a$"):
            inputs.compare_inputs(run.spec, run.peers, *read(run), None)


def test_a_host_whose_rewards_are_written_otherwise_is_named(job, tmp_path):
    (tmp_path / "mine.py").write_text("def score(completion, **row):\n    return 1.0\n")
    run = Session(resolve(job()))
    run.peers = Two(lambda facts: facts | {"the code of reward.functions": "else"})
    with RewardPool(job(reward__functions=(f"{tmp_path}/mine.py:score",))) as rewards:
        with pytest.raises(ConfigError, match=r"of this run differ:\n  - the code of reward.functions: else on process 1 on b, \w{16} on process 0"):
            inputs.compare_inputs(run.spec, run.peers, *read(run), None, {"reward.functions": rewards})


def read(run):
    found = setup.read_model_inputs(run.spec)
    return found, *load_data(run.spec, run.inputs, found.tokenizer, found.eos_ids[0])


@pytest.fixture
def job(tmp_path):
    """make(name=value, ...) -> an SFT config with a checkpoint of its step 1 (no arrays in it) beside rows, eval set, tokenizer."""
    host(tmp_path, questions(16))

    def make(**options):
        c = make_config(tmp_path / "tokenizer", tmp_path / "train.jsonl", data__prompts_per_step=2,
                        eval__sets=(f"test={tmp_path / 'test.jsonl'}",))
        c.run.recipe, c.run.dir, c.model.init, c.model.config = "sft", str(tmp_path / "run"), "random", {**MODEL, "vocab_size": 264}
        for name, value in options.items():
            put(c, name.replace("__", "."), value)
        return c

    spec = resolve(make())
    with Session(spec) as session:
        setup.read_job_inputs(session, with_rewards=False)
    saved = Checkpointer(spec.run.dir, spec)
    saved.save(1, {}, {"config": redacted(spec.asked), "read": session.fingerprints, "parts": {}})
    saved.close()
    return make


def change_rows(folder, name):
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    rows[1]["answer"] = "another"
    write_jsonl(folder / f"{name}.jsonl", rows)


def test_other_inputs_than_the_checkpoints_are_refused_unless_accepted(tmp_path, job, caplog):
    check_inputs(job(), with_rewards=False)
    os.utime(tmp_path / "train.jsonl", (0, 0))
    check_inputs(job(), with_rewards=False)  # content counts, not time
    changes = {"data": lambda: change_rows(tmp_path, "train"), "eval": lambda: change_rows(tmp_path, "test"),
               "tokenizer": lambda: make_tokenizer(tmp_path / "tokenizer", template=" " + TEMPLATE)}
    named = {"data": "training data: ", "eval": "eval set test: ", "tokenizer": "chat template: "}
    for accepted, change in changes.items():
        change()
        with pytest.raises(ConfigError, match=f"resuming .*00000001: .*{named[accepted]}.*run.accept_changed={accepted}"):
            check_inputs(job(), with_rewards=False)
        caplog.clear()
        check_inputs(job(run__accept_changed=(accepted,)), with_rewards=False)
        assert any(f"changed since the checkpoint was written: {named[accepted]}" in m for m in caplog.messages)
        host(tmp_path, questions(16))
    check_inputs(job(eval__sets=(f"test={tmp_path / 'train.jsonl'}",)), with_rewards=False)  # asked for by an option


@pytest.mark.parametrize("how", ["filter", "split"])
def test_limits_that_leave_another_number_of_examples_are_refused(tmp_path, job, how):
    """The place in the data would mean other rows. Eval sets have no place, and one row is one row in however many pieces."""
    def limited(tokens):
        return resolve(job(data__overlong_completion=how, rollout__max_new_tokens=tokens, run__dir=str(tmp_path / "other")))

    for name in ("train", "test"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        write_jsonl(tmp_path / f"{name}.jsonl", [{**row, "completion": "4" * (20 if i == 1 else 2)} for i, row in enumerate(rows)])
    prints = []
    for tokens in (15, 40):
        with Session(limited(tokens)) as run:
            prints.append(inputs.fingerprints(run.spec, *read(run)))
    short, long = prints
    assert {name for name in long if long[name] != short[name]} == {"training examples"}
    assert long["training examples"].startswith("12 ") and short["training examples"].startswith("11 " if how == "filter" else "13 ")
    refused, accepted = (input_changes(short, long, entries)[k] for k, entries in enumerate(((), ("data",))))
    assert len(refused) == len(accepted) == 1 and "(run.accept_changed=data accepts it)" in refused[0]


def test_other_code_and_other_initial_weights_are_said(tmp_path, job, monkeypatch, caplog):
    """A resumed run reads its checkpoint: that the folder of model.path was trained on meanwhile changes nothing, and is said."""
    (tmp_path / "mine.py").write_text("def score(completion, **row):\n    return 1.0\n")
    spec = resolve(job(reward__functions=(f"{tmp_path}/mine.py:score",)))

    def compared(chosen, weights):
        monkeypatch.setattr(inputs, "weights_print", lambda *source: weights)
        monkeypatch.setattr(inputs, "_policy", lambda config: ("folder", None))
        with Session(spec) as run, RewardPool(spec) as rewards:
            return inputs.compare_inputs(run.spec, run.peers, *read(run), chosen, {"reward.functions": rewards})

    class Chosen:
        path = "step_1"
        host = {"config": redacted(spec.asked), "read": compared(None, "first")}

    compared(Chosen, "first")
    assert "changed since the checkpoint was written" not in caplog.text and "others than" not in caplog.text
    (tmp_path / "mine.py").write_text("def score(completion, **row):\n    return 2.0\n")
    Chosen.host["read"] = compared(Chosen, "second")
    for _ in range(2):  # the weights are compared with those it began with, not with those of the last start
        assert "weights of the policy are others than those that this run began with" in caplog.text
        assert ("changed since the checkpoint was written: the code of reward.functions" in caplog.text) == (_ == 0)
        caplog.clear()
        compared(Chosen, "second")


def test_a_checkpoint_without_fingerprints_goes_on_with_a_notice(tmp_path, job, caplog):
    c = job(run__dir=str(tmp_path / "old"))
    old = Checkpointer(c.run.dir, c)
    old.save(1, {}, {"config": redacted(c), "parts": {}})
    old.close()
    with caplog.at_level(logging.WARNING):
        check_inputs(c, with_rewards=False)
    assert any("was written by an older jaxrl, which stored no fingerprints: data" in m for m in caplog.messages)


def test_what_a_fingerprint_sees(tmp_path):
    """Content in its order; not the kind of file, its name, the tokenizer or a limit."""
    rows = questions(6)
    plain, begin = make_tokenizer(tmp_path / "a"), make_tokenizer(tmp_path / "b", begin=True)

    def of(rows, name="x.jsonl", tokenizer=plain, **options):
        file = tmp_path / name
        write_jsonl(file, rows) if name.endswith("l") else file.write_text(json.dumps(rows))
        config = make_config(tokenizer, file, **options)
        return load_train(config, load_tokenizer(config)).fingerprint

    same = of(rows)
    assert same == of(rows, "y.json") == of(rows, tokenizer=begin) == of([{k: row[k] for k in reversed(row)} for row in rows])
    assert re.fullmatch(r"[0-9a-f]{16}, 6 rows", same)
    for i, (column, value) in enumerate((("prompt", "other"), ("answer", "7"), ("id", 9))):
        assert of([*rows[:i], {**rows[i], column: value}, *rows[i + 1:]]) != same
    assert len({same, of(rows[::-1]), of(rows[:5])}) == 3
    a, b = (fingerprint(load_tokenizer(make_config(t))) for t in (plain, begin))
    assert a["tokenizer"] != b["tokenizer"] and a["chat template"] == b["chat template"]


def test_weights_are_told_apart_and_commits_of_the_hub_are_kept(tmp_path, monkeypatch):
    import huggingface_hub.constants
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repo, prints = tmp_path / "models--somebody--tiny", {}
    for name, commit, last in (("main", "a" * 40, 0), ("v2", "b" * 40, 1)):
        (repo / "refs").mkdir(parents=True, exist_ok=True)
        (repo / "refs" / name).write_text(commit)
        folder = repo / "snapshots" / commit
        make_tokenizer(folder, template=name)
        (folder / "config.json").write_text(json.dumps(MODEL | {"vocab_size": 264}))
        head = json.dumps({"w": {"dtype": "F32", "shape": [99999], "data_offsets": [0, 399996]}}).encode()
        (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(399995) + bytes([last]))  # the last byte tells
        prints[name] = inputs.weights_print("somebody/tiny", name)
        assert inputs.weights_print(str(folder), None) == prints[name]
        c = make_config("somebody/tiny", model__path="jaxrl://arith/tokenizer", model__tokenizer_revision=name, reference__revision=name)
        c.reference.path = "somebody/tiny"
        assert inputs.commits(c, None, {}) == {"tokenizer": [commit], "reference": [commit]}
        c.algorithm.kl.coef = 0.1
        tokenizer, asked = load_tokenizer(c), []
        assert tokenizer.chat_template == name
        found = setup.ModelInputs(tokenizer, {**MODEL, hf.SOURCE: {}}, (2,), None)
        assert inputs.fingerprints(resolve(c), found, None, {})["weights of the reference"] == prints[name]
        c.critic.path, c.critic.revision, c.model.init = "somebody/tiny", name, "random"
        for check in ("check_weights", "check_critic"):
            monkeypatch.setattr(hf, check, lambda table, path, revision: asked.append(revision))  # noqa: B023
        setup.check_weights(c, found)
        assert asked == [name, name]
        c.model.init, c.model.path, c.model.revision = "pretrained", "somebody/tiny", name
        assert inputs.weights_of_hosts(c) == dict.fromkeys(("weights of the policy", "weights of the critic"), prints[name])
    assert prints["main"] != prints["v2"]
    assert {e for begins in READ.values() for e in begins} >= {"weights of the reference"}


def test_the_commit_of_a_hub_data_set_is_kept(tmp_path, monkeypatch):
    import datasets
    rows = datasets.Dataset.from_list(questions(4))
    rows.info.download_checksums = {f"hf://datasets/somebody/rows@{'c' * 40}/data/train.parquet": {}}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    c = make_config(make_tokenizer(tmp_path / "t"), "somebody/rows")
    train = load_train(c, load_tokenizer(c))
    assert inputs.commits(c, train, {}) == {"training data": ["c" * 40]}
    assert train.fingerprint == load_train(c, load_tokenizer(c), rows=questions(4)).fingerprint
