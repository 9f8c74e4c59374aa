"""Uploads: what lies elsewhere afterwards, and that a run neither waits for them nor fails by them."""

import base64
import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from huggingface_hub import constants

import jaxrl
from jaxrl.checkpoint.uploads import MARKER, Uploads
from jaxrl.config.load import default_config, put
from jaxrl.errors import ConfigError
from jaxrl.resolve.checks.common import check


def options(*to, **changes):
    o = default_config().checkpoint.upload
    o.to = to
    for name, value in changes.items():
        o[name] = value
    return o


def tree(folder) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def whole(files: dict[str, bytes], step: int) -> bool:
    """Whether the marker among the files says what they are."""
    marker, rest = json.loads(files[MARKER]), {name: data for name, data in files.items() if name != MARKER}
    return marker == {"step": step, "files": {n: [len(d), hashlib.sha256(d).hexdigest()] for n, d in rest.items()}}


@pytest.fixture
def export(tmp_path):
    folder = tmp_path / "run" / "export"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 5000)
    (folder / "sub" / "config.json").write_text("{}")
    return folder


# -- stores ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_whole_where_it_was_sent(export, tmp_path):
    """In two places of different kinds; again without a change nothing is written, with one all is as it is now."""
    memory = fsspec.filesystem("memory")
    up, before = Uploads(options(f"file://{tmp_path}/there", "memory://bucket/prefix")), tree(export)
    for step in (3, 3, 4):
        if step == 4:
            (export / "sub" / "config.json").write_text('{"a": 1}')
        up.add(export, "export", step)
        told = up.end(300)
        assert not told["failed"] and not told["unfinished"] and up.metrics()["upload/waiting"] == 0
        there = tree(tmp_path / "there" / "export")
        stamp = (tmp_path / "there" / "export" / "model.safetensors").stat().st_mtime_ns
        assert {n: d for n, d in there.items() if n != MARKER} == tree(export) and whole(there, step)
        assert {n: memory.cat_file(f"/bucket/prefix/export/{n}") for n in there} == there
        assert step == 4 or before == tree(export)
        if up.metrics()["upload/done"] == 2:
            first = stamp
        elif step == 3:
            assert stamp == first  # not sent again
    assert told["done"] == 6
    up.close()


def test_without_its_marker_a_folder_is_not_whole(export, tmp_path, caplog):
    """A file that cannot be written: no marker, also where an older one was; said once, tried again, and whole once it can be."""
    there = tmp_path / "there" / "export"
    (there / "sub" / "config.json" / "in the way").mkdir(parents=True)
    (there / MARKER).write_text("{}")
    up = Uploads(options(f"file://{tmp_path}/there", attempts=50), first_wait=0.01)
    up.add(export, "export", 1)
    while len([r for r in caplog.records if "upload of export" in r.message]) < 1:
        time.sleep(0.01)
    assert up.holds(export) and not (there / MARKER).exists() and (there / "model.safetensors").exists()
    (there / "sub" / "config.json" / "in the way").rmdir()
    (there / "sub" / "config.json").rmdir()
    assert up.end(300)["done"] == 1 and whole(tree(there), 1) and not up.holds(export)
    assert len(caplog.records) == 1
    up.close()


def test_what_is_given_up_is_counted_and_said(export, tmp_path, caplog):
    (tmp_path / "there").write_text("a file")
    up = Uploads(options(f"file://{tmp_path}/there", attempts=3), first_wait=0.01)
    up.add(export, "export_00000002", 2)
    up.add(tmp_path / "gone", "export_00000004", 4)
    told = up.end(300)
    assert up.metrics() == {"upload/done": 0.0, "upload/failed": 2.0, "upload/waiting": 0.0}
    assert "export_00000002 to file://" in told["failed"][0] and "deleted before it was sent" in told["failed"][1]
    assert [r.levelname for r in caplog.records] == ["WARNING", "ERROR", "ERROR"]
    up.close()


@pytest.mark.parametrize("changes, message", [
    ({"to": ("bucket/x",)}, "'bucket/x': expected hf://owner/name"), ({"to": ("hf://name",)}, "expected hf://owner/name"),
    ({"to": ("nosuch://x",)}, "Protocol not known: nosuch"), ({"exports": "all"}, "exports='all' has no effect without"),
    ({"to": ("memory://x",), "exports": "none"}, "nothing is sent there"),
    ({"to": ("memory://x",), "checkpoints": "final", "at_end": False}, "checkpoint.at_end=False: the last checkpoint is not"),
])
def test_uploads_that_cannot_be_are_refused_at_the_start(changes, message):
    c = default_config()
    c.model.path, c.data.path = "some/model", ("some.jsonl",)
    for name, value in changes.items():
        put(c, f"checkpoint.{name}" if name == "at_end" else f"checkpoint.upload.{name}", value)
    with pytest.raises(ConfigError, match=message):
        check(c)


# -- the hub ---------------------------------------------------------------------------------------------------------


class HubStandIn(BaseHTTPRequestHandler):
    """The endpoints that HfApi's commits need, over real HTTP, large files by git-lfs's basic transfer: repositories and branches
    are made, contents kept by commit."""

    def do_POST(self):
        hub, body = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        if hub.refuse:
            hub.refuse -= 1
            return self._answer(403, {"error": "not now"})
        if self.path == "/api/repos/create":
            hub.made.append(json.loads(body))
            return self._answer(200, {"url": f"{hub.url}/owner/name"})
        if "/branch/" in self.path:
            return self._answer(200, {})
        if "/preupload/" in self.path:
            mode = lambda f: "lfs" if f["path"].endswith(".safetensors") else "regular"  # noqa: E731
            return self._answer(200, {"files": [{"path": f["path"], "uploadMode": mode(f), "shouldIgnore": False}
                                                for f in json.loads(body)["files"]]})
        if self.path.endswith("/objects/batch"):
            missing = [o for o in json.loads(body)["objects"] if o["oid"] not in hub.blobs]
            return self._answer(200, {"transfer": "basic", "objects": [
                {**o, "actions": {"upload": {"href": f"{hub.url}/blob/{o['oid']}"}}} for o in missing]})
        files = {}
        for entry in map(json.loads, body.splitlines()):
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = hub.blobs[value["oid"]]
        hub.commits.append((self.path, self.headers["authorization"], files))
        return self._answer(200, {"commitUrl": f"{hub.url}/owner/name/commit/{'0' * 40}", "commitOid": "0" * 40, "success": True})

    def do_PUT(self):
        self.server.blobs[self.path.rsplit("/", 1)[1]] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, {})

    def _answer(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubStandIn)
    server.url, server.made, server.commits, server.blobs, server.refuse = f"http://127.0.0.1:{server.server_port}", [], [], {}, 0
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.full
def test_a_commit_of_the_hub_has_all_files_and_the_marker(hub, export, tmp_path):
    """The run's export at the top, other folders below their names; private unless told otherwise; a refusal is tried again."""
    up = Uploads(options("hf://owner/name", private=False), first_wait=0.01)
    hub.refuse = 2
    up.add(export, "export", 7)
    assert up.end(60)["done"] == 1
    ((path, token, files),) = hub.commits
    assert path == "/api/models/owner/name/commit/main" and token == "Bearer hf_test"
    assert {n: d for n, d in files.items() if n != MARKER} == tree(export) and whole(files, 7)
    assert list(hub.blobs.values()) == [files["model.safetensors"]]
    up.add(export, "export_00000004", 4)
    assert up.end(60)["done"] == 2 and set(hub.commits[1][2]) == {f"export_00000004/{name}" for name in files}
    up.close()

    below = Uploads(options("hf://owner/name@try/runs/a"))
    below.add(export, "export", 7)
    assert below.end(60)["done"] == 1
    assert hub.commits[2][0].endswith("/commit/try") and f"runs/a/{MARKER}" in hub.commits[2][2]
    private = lambda made: made.get("visibility") == "private" or bool(made.get("private"))  # noqa: E731
    assert [private(made) for made in hub.made] == [False, True]
    below.close()


# -- runs ------------------------------------------------------------------------------------------------------------


def config(folder):
    c = default_config()
    c.run.recipe, c.run.dir, c.model.init, c.model.tokenizer = "sft", str(folder), "random", "jaxrl://arith/tokenizer"
    c.model.config = {"model_type": "llama", "vocab_size": 97, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                      "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    c.data.path, c.data.max_rows, c.data.prompts_per_step, c.train.steps = ("jaxrl://arith/sft.jsonl",), 16, 2, 3
    c.log.console, c.log.tensorboard, c.run.stop_seconds, c.checkpoint.keep = "off", False, 0.0, 1
    c.checkpoint.every_steps = c.checkpoint.export_every_steps = 1
    return c


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run(folder, **changes):
    c = config(folder)
    for name, value in changes.items():
        put(c, f"checkpoint.upload.{name}", value)
    return jaxrl.train(c), lines(folder)


def numbers(metrics):
    return [{name: value for name, value in line.items() if name != "time"} for line in metrics]


@pytest.mark.slow
def test_a_run_sends_what_it_is_asked_to_and_is_the_same(tmp_path, monkeypatch):
    """none, final or all exports and checkpoints; a store that fails makes no difference but in summary.json and its metrics."""
    monkeypatch.setattr("jaxrl.checkpoint.uploads.FIRST_WAIT", 0.01)
    _, plain = run(tmp_path / "plain")
    (tmp_path / "file").write_text("in the way")
    wanted = {("final", "none"): {"export"}, ("none", "final"): {"checkpoints/00000003"}, ("all", "all"): {
        "export", *(f"{kind}{i:08d}" for i in (1, 2, 3) for kind in ("checkpoints/", "export_"))}}
    for i, ((exports, checkpoints), names) in enumerate(wanted.items()):
        folder, there = tmp_path / f"run{i}", tmp_path / f"there{i}"
        summary, metrics = run(folder, to=(f"file://{there}", f"file://{tmp_path}/file"), exports=exports, checkpoints=checkpoints,
                             attempts=2)
        found = {p.parent.relative_to(there).as_posix() for p in there.rglob(MARKER)}
        assert found == names and numbers(metrics) == numbers(plain) and summary["finished"]
        told = summary["uploads"]
        assert (told["done"], len(told["failed"]), told["unfinished"]) == (len(names), len(names), [])
        assert {"upload/done", "upload/failed", "upload/waiting"} <= set(metrics[-1]["time"])
        assert [p.name for p in sorted((folder / "checkpoints").iterdir())] == ["00000003"]  # checkpoint.keep=1 in the end
        for name in names & {"export", "checkpoints/00000003"}:
            sent = tree(there / name)
            assert whole(sent, 3) and {n: d for n, d in sent.items() if n != MARKER} == tree(folder / name)
    again, _ = run(tmp_path / "late", to=(f"file://{tmp_path}/file",), wait_seconds=0.0, attempts=1000)
    assert again["finished"] and len(again["uploads"]["unfinished"]) == 1


@pytest.mark.slow
def test_a_sent_checkpoint_is_one_to_resume_from(tmp_path):
    run(tmp_path / "run", to=(f"file://{tmp_path}/there",), checkpoints="final")
    c = config(tmp_path / "other")
    c.run.resume, c.train.steps = str(tmp_path / "there" / "checkpoints" / "00000003"), 4
    assert jaxrl.train(c)["steps"] == 4
    assert [line["step"] for line in lines(tmp_path / "other")] == [4]
