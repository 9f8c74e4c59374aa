"""python -m jaxrl.report: what a run left, as one page. Without a browser, but for the last test."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import jaxrl.report
from jaxrl.records import files
from jaxrl.report import content, page, report_of
from jaxrl.report.__main__ import main
from jaxrl.report.samples import EMBEDDED, Speaker
from jaxrl.report.thin import kept
from jaxrl.report.watch import Watched, server

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> \u2028 \x00 & &lt; ]]> \ud800"
SHOWN = HOSTILE.replace("\ud800", "?")
STEPS = 400
CONFIG = {"run": {"seed": 0, "dir": "there"}, "algorithm": {"preset": "grpo"}, "rollout": {"group_size": 2, "temperature": 1.0},
          "reward": {"functions": [HOSTILE]}, "model": {"path": "", "tokenizer": "jaxrl://arith/tokenizer"}}


def make_run(folder, seed=0, completions=(HOSTILE, "6"), **more):
    """A run directory as a run leaves it, with a spike, a step that is not finite and an error."""
    folder.mkdir()
    draw = np.random.default_rng(seed)
    lines = []
    for step in range(1, STEPS + 1):
        grad = "nan" if step == 77 else 50.0 if step == 211 else float(draw.uniform(0.1, 0.2))
        lines.append({"step": step, "reward/mean": step / STEPS + float(draw.normal()) / 50, "optim/grad_norm": grad,
                      "rollout/zero_signal_fraction": 1.0 if step in (5, 6, 7, 90) else 0.5, "optim/lr": 1e-5,
                      "time": {"step": 2.5, "rollout": 1.5, "update": 0.75, "other": 0.25, "wall": 1e9 + step}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 401, "rew')
    config = {**CONFIG, "run": {"seed": seed, "dir": str(folder)}, **more}
    (folder / "config.json").write_text(json.dumps({"config": config, "versions": {"jax": "1.2.3"}}))
    (folder / "summary.json").write_text(json.dumps({"finished": False, "error": f"RunStopped: {HOSTILE}", "planned": {
        "step_seconds": 1.0, "rollout_seconds": 0.5}, "measured": {"step_seconds": 2.5, "rollout_seconds": 1.5}, "tried": [
            {"step": 211, "rows": [{"setting": name, "step": 0.5, "angle": 0.0, "kl": kl, "outside_clip": 0.1, "predicted": None if kl > 1 else 0.2,
                                    "realised": 0.1, "others": -0.1} for name, kl in (("as recorded", 0.01), (f"optimizer.lr={HOSTILE}", 0.04),
                                                                                     ("optimizer.lr=9", 9.0))]}]}))
    (folder / "rollouts").mkdir()
    records = [{"group": 3, "sample": i, "prompt": HOSTILE, "completion": text, "score": float(i), "advantage": i - 0.5,
                "reward": {"parts": {HOSTILE: float(i)}}, "finish": "stop", "tokens": [], "logprobs": [], "answer": "6",
                "version": 0, "last_version": 0} for i, text in enumerate(completions)]
    (folder / "rollouts" / "step_00000001.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "explain").mkdir()
    answer = {"group": 3, "sample": 1, "score": 9.0, "advantage": 8.5, "length": 4, "gap": 0.1, "change": 0.5, "share": 0.75, "text": HOSTILE}
    told = {"step": 211, "why": f"one answer: {HOSTILE}", "replay": {"result": "bitwise"}, "step_length": 0.5, "kl": "nan",
            "anomalies": [{"step": 211, "name": "optim/grad_norm", "called": "gradient norm", "value": 50.0, "usual": 0.15, "deviations": 900.0}],
            "groups": [{"group": 4, "share": 0.25}, {"group": 3, "share": 0.75}], "heaviest": [{**answer, "sample": 0}], "answers": [answer],
            "suspects": [{**answer, "reasons": ["score 9, usual are 1"]}]}
    (folder / "explain" / "step_00000211.json").write_text(json.dumps(told))
    (folder / "explain" / "step_00000212.json").write_text("{")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("report") / "a")


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.opened, self.scripts, self.styles, self.held, self.policy = [], [], [], {}, ""

    def handle_starttag(self, tag, attributes):
        self.opened.append(tag)
        self.attributes = dict(attributes)
        assert not any(v and v.startswith(("http", "//")) for v in self.attributes.values())
        if self.attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = self.attributes["content"]

    def handle_data(self, data):
        last = self.opened[-1] if self.opened else ""
        if last in ("script", "style") and data.strip():
            (self.scripts if last == "script" else self.styles).append((self.attributes.get("type"), data))


def test_the_page_stands_alone_and_no_text_of_a_run_is_markup(run, capsys):
    assert main([str(run)]) == 0
    text = (run / "report.html").read_text("utf-8")
    seen = Tags()
    seen.feed(text)
    assert sorted(set(seen.opened)) == ["body", "head", "html", "link", "main", "meta", "noscript", "p", "script", "style", "title"]
    (kind, data), *code = seen.scripts
    assert kind == "application/json" and len(code) == 2 and seen.opened.count("script") == 3
    held = json.loads(data)
    assert held["samples"][0]["rows"][0]["prompt"] == SHOWN and SHOWN in held["findings"][0][0]["text"]
    digest = lambda t: f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'"  # noqa: E731
    assert f"script-src {' '.join(digest(t) for _, t in code)};" in seen.policy
    assert f"style-src {' '.join(digest(t) for _, t in seen.styles)};" in seen.policy
    assert "default-src 'none'" in seen.policy and "connect-src 'none'" in seen.policy
    assert not re.findall(r"(?:src|href)=.?https?:|@import|url\(", text) and str(run / "report.html") in capsys.readouterr().out


def test_the_vendored_library_is_the_release():
    folder = page.ASSETS
    told = dict(re.findall(r"\| `(\S+)` \| `([0-9a-f]{64})` \|", (folder / "README.md").read_text()))
    assert set(told) == {"uPlot.iife.min.js", "uPlot.min.css"}
    assert {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in told} == told


@pytest.mark.parametrize("points", [10, 100, 999])
def test_thinning_keeps_every_extreme_and_the_ends(points):
    draw = np.random.default_rng(points)
    a, b = draw.normal(size=(2, 5000))
    a[1234], b[77] = 40.0, np.nan
    at = kept([a, b], points)
    assert len(at) <= 2 * points + 20 and {0, 4999, 1234, 77} <= set(at) and (np.diff(at) > 0).all()
    assert a[at].min() == a.min() and np.nanmax(b[at]) == np.nanmax(b) and np.nanmin(b[at]) == np.nanmin(b)
    assert kept([np.ones(50)], points).tolist() == [0, 49] and kept([np.zeros(0)], points).tolist() == []


def test_runs_that_differ_in_their_seed_are_one_curve_with_a_band(run, tmp_path):
    other, third = make_run(tmp_path / "b", 1), make_run(tmp_path / "c", 1, algorithm={"preset": "dapo"})
    held = content([run, other, third])
    assert [g["runs"] for g in held["groups"]] == [[0, 1], [2]]
    assert [row[0] for row in held["differ"]] == ["algorithm.preset", "run.seed"]
    band, single = held["charts"]["reward/mean"]["lines"]
    raw = [[json.loads(t)["reward/mean"] for t in (f / "metrics.jsonl").read_text().split("\n")[:STEPS]] for f in (run, other)]
    assert band["x"] == list(range(1, STEPS + 1)) and "lo" not in single
    assert len(band["tx"]) == 100 and band["per"] == 4
    np.testing.assert_allclose(band["ty"], np.mean(raw, 0).reshape(100, 4).mean(1), rtol=1e-4)
    for name, of in (("y", np.mean), ("lo", np.min), ("hi", np.max)):
        np.testing.assert_allclose(band[name], of(raw, 0), rtol=1e-4)


def test_what_deserves_a_look_is_said(run):
    held = content([run])
    said = {f["text"][:40]: f for f in held["findings"][0]}
    assert "the run ended by an error" in held["findings"][0][0]["text"]
    assert any("1 lines of metrics.jsonl" in t for t in said)
    equal, = (f for t, f in said.items() if t.startswith("all rewards within every group"))
    assert (equal["steps"], equal["count"], equal["grave"]) == ("5-7, 90", 4, False) and "group_size (now 2)" in equal["text"]
    assert [f["steps"] for t, f in said.items() if t.startswith("optim/grad_norm is not")] == ["77"]
    assert any("a step took 2.5 s where 1 s" in t for t in said)
    grad, = held["charts"]["optim/grad_norm"]["lines"]
    assert max(x for x in grad["y"] if x is not None) == 50 and grad["y"][grad["x"].index(77)] is None
    assert held["plan"][0][:1] == [["step", "s", 1, 2.5]]
    p = held["phases"][0]
    assert p["names"] == ["rollout", "update", "other"] and np.allclose(np.sum(p["y"], 0), 2.5)


def test_what_was_explained_and_tried_is_shown(run):
    """The guilty answer first, once; a metric's anomaly in words; what is no number, and a file that is none, left out."""
    held = content([run])
    step, = held["explained"][0]
    assert step["groups"] == [[3, 0.75], [4, 0.25]] and step["facts"]["kl"] is None and step["replay"] == "bitwise"
    assert step["anomalies"] == ["gradient norm (optim/grad_norm) is 50, usual were 0.15, 900 deviations away"]
    assert [(a["sample"], a["reason"]) for a in step["answers"]] == [(1, "score 9, usual are 1"), (0, "")]
    table, = held["tried"][0]
    assert [r["predicted"] for r in table["rows"]] == [0.2, 0.2, None] and table["rows"][1]["kl"] == 0.04
    (run.parent / "bare").mkdir()
    (run.parent / "bare" / "metrics.jsonl").touch()
    assert content([run.parent / "bare"])["explained"] == [[]]


def test_a_run_that_goes_on_or_holds_nothing(tmp_path, capsys):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").touch()
    assert content([tmp_path / "new"])["findings"][0][0]["text"].startswith("the run has not finished")
    assert main([str(tmp_path)]) == 2 and "no run directory" in capsys.readouterr().err


def test_completions_are_shown_by_token_where_the_tokens_spell_them(run):
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "arith" / "tokenizer" / "tokenizer.json"))
    speak = Speaker(jaxrl.report.runs.read_run(run))
    ids = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    text = "Eva has 2 apples: a) counts 4, b) buys 4"
    record = {"completion": text, "tokens": ids(text), "logprobs": [-0.5] * len(ids(text))}
    piece, = speak.pieces(record)
    assert "".join(piece["tokens"]) == text and len(piece["tokens"]) == len(piece["logprobs"]) == len(ids(text)) > 3
    assert speak.pieces(record | {"completion": "has 2"}) == [{"trained": True, "text": "has 2"}]
    turns = [ids("buys 4"), ids("buys 3")]
    episode = [{"text": "Q", "trained": False, "opens": True}, {"text": "buys 4", "trained": True, "turn": 0, "reward": 0.0},
               {"text": "tool", "trained": False}, {"text": "buys 3", "trained": True, "turn": 1, "reward": 1.0}]
    first, put, last = speak.pieces({"episode": episode, "completion": "buys 3", "tokens": sum(turns, []),
                                     "logprobs": [*range(-len(sum(turns, [])), 0)]})
    assert put == {"trained": False, "text": "tool"} and last["reward"] == 1
    assert ["".join(p["tokens"]) for p in (first, last)] == ["buys 4", "buys 3"]
    assert first["logprobs"] + last["logprobs"] == [*range(-len(sum(turns, [])), 0)]


def test_a_recorded_step_tells_advantages_and_gaps_by_token(run, tmp_path):
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "arith" / "tokenizer" / "tokenizer.json"))
    ids = tokenizer.encode("buys 4", add_special_tokens=False).ids
    folder, n = make_run(tmp_path / "recorded"), len(ids)
    rows = [{"group": 3, "sample": i, "prompt": "?", "completion": "buys 4", "tokens": ids, "logprobs": [-1.0] * n, "score": i}
            for i in range(2)]
    (folder / "rollouts" / "step_00000001.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    tokens = np.array([7, *ids, 7, 7, *ids], np.int32)  # a prompt token, and two of them
    mask = np.array([False, *[True] * n, False, False, *[True] * n])
    old, advantage = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.float32)
    old[mask], advantage[mask] = np.arange(2 * n) / 8, np.arange(2 * n)
    files.write(folder / "record", files.Record(1, {}, {
        "traj/tokens": tokens, "traj/offsets": np.array([0, 1 + n, len(tokens)]), "traj/loss_mask": mask,
        "traj/logprobs": np.zeros(len(tokens), np.float32), "traj/group": np.array([3, 3]), "traj/sample": np.array([0, 1]),
        "traj/trajectory": np.array([0, 1]), "column/old": old, "column/advantage": advantage}))
    shown = [row["pieces"][0] for row in content([folder])["samples"][0]["rows"]]
    assert [p["advantages"] for p in shown] == [[*range(n)], [*range(n, 2 * n)]]
    assert [p["gaps"] for p in shown] == [[i / 8 for i in range(n)], [i / 8 for i in range(n, 2 * n)]]
    for file in (folder / "record").glob("*.npz"):
        file.write_bytes(file.read_bytes()[:-40])
    assert "gaps" not in content([folder])["samples"][0]["rows"][0]["pieces"][0]  # a damaged record is not read


def test_characters_of_several_tokens_are_shown_once(tmp_path):
    """A byte-level vocabulary: a character's text stands at the token that completes it."""
    from tokenizers import decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    folder = make_run(tmp_path / "bytes", model={"path": str(tmp_path / "model"), "tokenizer": ""})
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    text = "né 🙂 ok"
    ids = tokenizer.encode(text).ids
    piece, = Speaker(jaxrl.report.runs.read_run(folder)).pieces({"completion": text, "tokens": ids, "logprobs": [-1.0] * len(ids)})
    assert piece["tokens"] == ["n", "", "é", " ", "", "", "", "🙂", " ", "o", "k"]


def test_a_page_that_cannot_be_written_is_said_and_ends_nothing(run, tmp_path, caplog):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink(missing_ok=True)
    (tmp_path / "run" / "report.html").mkdir()
    report_of(tmp_path / "run")
    assert "no report of" in caplog.text


def test_watching_follows_a_run_and_answers_this_machine_only(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    serving = server(Watched([tmp_path / "run"], None, 5.0), 0)
    assert serving.host == "127.0.0.1"
    serving.start("watch")
    place = f"http://127.0.0.1:{serving.port}"
    get = lambda path, **h: urllib.request.urlopen(urllib.request.Request(place + path, headers=h)).read().decode()  # noqa: E731
    try:
        assert "connect-src 'self'" in get("/")
        assert json.loads(get("/data.json"))["runs"][0]["facts"]["steps"] == STEPS
        whole = (run / "metrics.jsonl").read_text().rpartition("\n")[0]
        (tmp_path / "run" / "metrics.jsonl").write_text(whole + '\n{"step": 401, "time": {"step": 1.0}}\n')
        assert json.loads(get("/data.json"))["runs"][0]["facts"]["steps"] == 401
        for path, headers, status in (("/", {"Host": "elsewhere.example"}, 403), ("/config.json", {}, 404)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                get(path, **headers)
            assert refused.value.code == status
    finally:
        serving.close()


@pytest.mark.browser
def test_a_browser_draws_it_without_complaint(run, tmp_path):
    path = page.write_report([run, make_run(tmp_path / "b", 1)], tmp_path / "page.html")
    flags = ["--headless=new", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=5000",
             f"--user-data-dir={tmp_path}/profile", "--window-size=1200,6000"]
    flags += ["--no-sandbox"] if os.getuid() == 0 else []
    done = subprocess.run([shutil.which("chromium") or "chromium", *flags, "--dump-dom", Path(path).as_uri()], text=True,
                          capture_output=True, timeout=600)
    assert "CONSOLE" not in done.stderr and "data-errors" not in done.stdout and "data-drawn" in done.stdout
    shown = done.stdout.partition('<script type="application/json"')[0]
    assert "score 9, usual are 1: " in shown and "what each setting gained" in shown
    assert shown.count("<canvas") >= 5 and "alert(1)&lt;/script&gt;" in shown and "<img" not in shown
    assert "the run ended by an error" in shown and "5-7, 90" in shown and "mean of 2" in shown
