"""A server that goes on from what a killed one left on the disk: nothing applied twice, nothing lost, the same bits."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest
from helpers.tiers import nightly
from helpers.tinker_cases import PROTO, Client, forward_backward, next_tokens, served, text
from starlette.testclient import TestClient

from jaxrl.errors import ConfigError
from jaxrl.service import files, journal, wire
from jaxrl.service.journal import Journal
from jaxrl.service.operations import Operations
from jaxrl.service.recovery import recover
from jaxrl.service.routes import make_app
from jaxrl.service.sampler import BASE, Sampler
from jaxrl.service.snapshots import Snapshots
from jaxrl.service.store import Address, Store
from jaxrl.service.worker import Pass, Worker

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("the_mesh_as_it_was")]
ROWS = [next_tokens([3, 10, 11, 12, 13, 14]), next_tokens([3, 20, 21, 22])]
OTHERS = [next_tokens([3, 30, 31, 32, 33])]


def script(session: str) -> list[tuple[str, object, dict]]:
    """(path, body, headers) of a client's requests in their order: steps, a failure, saves, samples."""
    run, out = f"{session}:train:0", []

    def learn(seq, rows, **more):
        out.append(("forward_backward", forward_backward(run, seq, rows, **more), PROTO))

    def step(seq, **adam):
        out.append(("optim_step", {"model_id": run, "seq_id": seq, "adam_params": {"learning_rate": 1e-2, **adam}}, {}))

    lora = {"rank": 3, "seed": 5, "train_unembed": False}
    out.append(("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}, {}))
    learn(1, ROWS)
    step(2)
    learn(3, OTHERS)
    learn(4, ROWS)  # adds to the window
    step(5, grad_clip_norm=1.0)
    out.append(("save_weights_for_sampler", {"model_id": run, "seq_id": 6, "sampling_session_seq_id": 0}, {}))
    out.append(("asample", {"sampling_session_id": f"{session}:sample:0", "seq_id": 0, "prompt": text([3, 10]), "num_samples": 2,
                            "sampling_params": {"max_tokens": 5, "seed": 3}}, {}))
    learn(7, [(np.array([3]), {"target_tokens": np.array([4096])})])  # is refused, and empties the window
    step(8)
    out.append(("save_weights", {"model_id": run, "seq_id": 9, "path": "kept"}, {}))
    learn(10, ROWS)
    step(11, weight_decay=0.1)
    learn(12, OTHERS + ROWS, forward_only=True)
    return out


def answered(client: Client, path, body, headers) -> bytes:
    """The result of a request, which is sent again until there is one."""
    promise = client.ok(path, body, headers=headers)
    return client.retrieve(promise).content


def play(client: Client, answers: list, session: str = "", key: str = "one") -> list[bytes]:
    """Sends all requests whose results are not in `answers`, the client's own memory, and adds these."""
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
    session = session or client.ok("create_session", body, headers={"X-Idempotency-Key": key})["session_id"]
    if not answers:
        answers.append(session.encode())
    for request in script(session)[len(answers) - 1:]:
        answers.append(answered(client, *request))
    return answers


class Restarted:
    """A server over the files that another one left, with the programs of that one."""

    def __init__(self, server, folder: Path):
        old, self.mesh = server.worker, jax.sharding.get_mesh()
        was, sampler = server.app.state.operations, old.sampler
        self.journal = Journal(folder / "journal")
        fresh = Sampler(sampler.engine, sampler.read, sampler.row_shapes, sampler.params, sampler.versions[BASE])
        self.worker = Worker(old.trainer, fresh, Snapshots(folder / "journal", old.trainer))
        self.operations = Operations(self.worker, Store(folder), was.names, was.eos_ids, was.longest, was.vocab, journal=self.journal)
        recover(self.operations, self.journal)
        self.thread = threading.Thread(target=lambda: (jax.set_mesh(self.mesh), self.worker.serve()), daemon=True)

    def __enter__(self) -> Client:
        self.thread.start()
        self.http = TestClient(make_app(self.operations), base_url="http://localhost").__enter__()
        return Client(self.http)

    def __exit__(self, *failure):
        self.worker.stop()
        self.thread.join(60)
        self.http.__exit__(*failure)
        self.journal.close()


def anonymous(answers: list[bytes]) -> list[bytes]:
    """Answers without the session's id, which is drawn."""
    return [answer.replace(answers[0], b"SESSION") for answer in answers[1:]]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that has stopped; its programs are used on."""
    folder = tmp_path_factory.mktemp("restart")
    with served(folder) as (found, client):
        found.worker.sampler.engine.close, close = lambda: None, found.worker.sampler.engine.close
        play(client, [])
    yield found
    close()


@pytest.mark.full
@pytest.mark.parametrize("seconds", [-1.0, nightly(1e9)], ids=["a snapshot behind every task", "none"])
def test_killed_at_any_point_a_run_is_the_run_without(server, tmp_path, monkeypatch, seconds):
    """A copy of the folder before and after every write is what a kill there leaves. From each the client goes on with the
    results that it had: the same answers, to the last bit."""
    monkeypatch.setattr("jaxrl.service.worker.SNAPSHOT_SECONDS", seconds)
    folder, copies, answers, lock = tmp_path / "whole", [], [], threading.Lock()

    def copied(where):
        with lock:
            to = tmp_path / str(len(copies))
            shutil.copytree(folder, to)
            copies.append((to, list(answers), where))

    append, replace = Journal.append, os.replace

    def watched_append(self, header, body=b""):
        copied(f"before {header['kind']}")
        append(self, header, body)
        copied(f"after {header['kind']}")

    def watched_replace(a, b):
        copied(f"before {Path(b).name}")
        replace(a, b)
        copied(f"after {Path(b).name}")

    with Restarted(server, folder) as client:
        monkeypatch.setattr(Journal, "append", watched_append)
        monkeypatch.setattr(files.os, "replace", watched_replace)
        play(client, answers)
        monkeypatch.undo()
        monkeypatch.setattr("jaxrl.service.worker.SNAPSHOT_SECONDS", seconds)
    assert len(copies) > 50 and {where for *_, where in copies} >= {"before request", "after request", "before result", "after result"}
    assert any(where.endswith("train_0.npz") for *_, where in copies) == (seconds < 0)
    for place, known, where in copies[1::5]:
        with Restarted(server, place) as client:
            again = play(client, list(known), known[0].decode() if known else "")
            assert anonymous(again) == anonymous(answers), where
            saved = client.get("checkpoints").json()["checkpoints"]
            assert [c["checkpoint_id"] for c in saved] == ["weights/kept"]


def rounds(session: str) -> list[list[tuple[str, object, dict]]]:
    """Requests of two runs: those of a round are sent together."""
    runs = [f"{session}:train:{k}" for k in range(2)]
    out = [[("create_model", {"session_id": session, "model_seq_id": k, "base_model": "tiny",
                              "lora_config": {"rank": 2 + k, "seed": k, "train_unembed": False}}, {}) for k in range(2)]]
    for seq, (kind, rows) in enumerate((("learn", (ROWS, OTHERS)), ("learn", (OTHERS, ROWS)), ("step", (1e-2, 3e-2)),
                                        ("learn", (ROWS + OTHERS, ROWS)), ("step", (1e-2, 1e-3)), ("learn", (OTHERS, OTHERS))), 1):
        if kind == "learn":
            out.append([("forward_backward", forward_backward(run, seq, own), PROTO) for run, own in zip(runs, rows, strict=True)])
        else:
            out.append([("optim_step", {"model_id": run, "seq_id": seq, "adam_params": {"learning_rate": lr}}, {})
                        for run, lr in zip(runs, rows, strict=True)])
    return out


def play_rounds(client: Client, answers: list, session: str = "") -> list[bytes]:
    """As `play`, for both runs at once."""
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
    session = session or client.ok("create_session", body, headers={"X-Idempotency-Key": "one"})["session_id"]
    if not answers:
        answers.append(session.encode())
    for requests in rounds(session)[(len(answers) - 1) // 2:]:
        promises = [client.ok(path, body, headers=headers) for path, body, headers in requests]
        for promise in promises:
            answers.append(client.retrieve(promise).content)
            assert b'"error"' not in answers[-1], answers[-1]
    return answers


def ready_in_pairs(ready):
    """Worker._ready, which lets a pass that was not computed yet wait for that of the other run: so passes are always computed
    together, in whichever order requests arrive."""
    def new(self):
        def waits(model_id):
            line = self._lines[model_id]
            work = line.held[line.next].work
            return isinstance(work, Pass) and work.placement is None

        found = ready(self)
        return [m for m in found if not waits(m) or len(self._lines) == 2 and all(
            other.next > self._lines[m].next or n in found and waits(n) for n, other in self._lines.items() if n != m)]

    return new


@pytest.mark.full
@pytest.mark.parametrize("seconds", [-1.0, nightly(1e9)], ids=["a snapshot behind every task", "none"])
def test_two_runs_that_share_passes_survive_a_kill_anywhere(server, tmp_path, monkeypatch, seconds):
    """As above, with two runs whose passes are computed together: a restart computes them apart, with the same bits."""
    monkeypatch.setattr("jaxrl.service.worker.SNAPSHOT_SECONDS", seconds)
    monkeypatch.setattr(Worker, "_ready", ready_in_pairs(Worker._ready))
    folder, copies, answers, lock, append = tmp_path / "whole", [], [], threading.Lock(), Journal.append

    def copied(self, header, body=b""):
        append(self, header, body)
        with lock:
            if self.path.parent.parent == folder:
                shutil.copytree(folder, tmp_path / str(len(copies)))
                done = {r.header["name"] for r in self.records() if r.header["kind"] == "result"}
                copies.append((tmp_path / str(len(copies)), len(answers) // 2 * 2 + 1 if answers else 0, done))

    with Restarted(server, folder) as client:
        monkeypatch.setattr(Journal, "append", copied)
        play_rounds(client, answers)
        monkeypatch.setattr(Journal, "append", append)
        names = {r.header["name"]: r.header for r in client.http.app.state.operations.journal.records() if r.header["kind"] == "result"}
        assert sum("placement" in header for header in names.values()) == 8
    for place, known, done in copies[2::3]:
        with Restarted(server, place) as client:
            again = play_rounds(client, answers[:known], answers[0].decode() if known else "")
        torn = any(f":train:{k}:{seq}" in "".join(done) and not any(name.endswith(f":train:{1 - k}:{seq}") for name in done)
                   for k in range(2) for seq in (1, 2, 4, 6))  # of a pass only one result was written: the other is computed alone
        assert torn or anonymous(again) == anonymous(answers), (known, sorted(done))
        for one, other in zip(again[1:], answers[1:], strict=True):
            if one[:1] != b"{":
                parsed = [wire.parse("ForwardBackwardOutput", x) for x in (one, other)]
                assert parsed[0].metrics["loss:sum"] == pytest.approx(parsed[1].metrics["loss:sum"], rel=1e-5)


@pytest.mark.full
def test_what_was_accepted_is_done_without_the_client(server, tmp_path):
    """And a second restart, over the compacted journal, delivers the same."""
    folder = tmp_path / "one"
    with Restarted(server, folder) as client:
        session = client.session()
        run = client.run(session)
        client.result(client.forward_backward(run, 1, ROWS))
        step = client.optim_step(run, 3)  # waits for number 2
    with Restarted(server, folder) as client:
        client.forward_backward(run, 2, OTHERS)
        found = client.result(step)
        assert client.get(f"sessions/{session}").json()["training_run_ids"] == [run]
        assert client.ok("get_info", {"model_id": run})["lora_rank"] == 3
    with Restarted(server, folder) as client:
        assert client.result(step) == found and client.result(client.optim_step(run, 3)) == found
        assert "another request with this number" in client.refused("optim_step", {"model_id": run, "seq_id": 3, "adam_params": {}})
        assert client.loss(run, 4, ROWS) > 0


def test_a_damaged_end_is_dropped_and_a_second_server_is_refused(tmp_path, caplog):
    one = Journal(tmp_path / "journal")
    for number in range(3):
        one.append({"kind": "request", "n": number}, bytes(range(100)))
    with pytest.raises(ConfigError, match="another server works in this folder"):
        Journal(tmp_path / "journal")
    one.close()
    whole = one.path.read_bytes()
    for data, left in ((whole[:-1], 2), (whole[:-120], 2), (whole[:5], 0), (whole[:140] + b"\x00" + whole[141:], 1), (whole + b"\xff" * 40, 3)):
        one.path.write_bytes(data)
        again = Journal(tmp_path / "journal")
        assert [r.header["n"] for r in again.records()] == list(range(left))
        assert ("damaged record" in caplog.text) == (left != 3 or data != whole)
        again.compact(lambda record: record)
        again.append({"kind": "request", "n": 9})
        assert [r.header["n"] for r in again.records()] == [*range(left), 9]
        again.close()
    assert journal.HEAD.size == 12


def test_a_damaged_snapshot_is_told_by_its_path(tmp_path):
    """Empty, cut off anywhere, with any byte changed: the snapshot as it was, or an OSError that names the file."""
    snapshots = Snapshots(tmp_path, None)
    snapshots.keep_version("a", {"w": np.arange(3.0)})
    path = tmp_path / "versions" / "a.npz"
    whole = path.read_bytes()
    changed = [whole[:i] + bytes([whole[i] ^ bit]) + whole[i + 1:] for i in range(len(whole)) for bit in (1, 0xFF)]
    told = set()
    for content in (*changed, *(whole[:i] for i in range(len(whole)))):
        path.write_bytes(content)
        try:
            snapshots.version("a")
        except OSError as e:
            assert str(path) in str(e)
            told.add(str(e).split(": ")[1])
    assert {"EOFError", "BadZipFile", "NotImplementedError"} <= told


@pytest.mark.parametrize("sync", [0, 0.01, None])
def test_what_a_power_failure_leaves(tmp_path, monkeypatch, sync):
    """The disk has a record before `append` returns, soon, or whenever the system likes; a compacted journal at once."""
    fsync, on_disk = os.fsync, {}

    def watched(number):
        fsync(number)
        on_disk[os.fstat(number).st_ino] = os.fstat(number).st_size

    monkeypatch.setattr(os, "fsync", watched)
    one = Journal(tmp_path / "journal", sync)

    def kept():
        return on_disk.get(one.path.stat().st_ino, 0)

    for number in range(3):
        one.append({"kind": "request", "n": number}, bytes(100))
        assert sync != 0 or kept() == one.bytes
    if sync:
        deadline = time.monotonic() + 60
        while kept() < one.bytes and time.monotonic() < deadline:
            time.sleep(0.01)
    assert (kept() == one.bytes) == (sync is not None)
    one.append({"kind": "request", "n": 3})
    one.sync()  # before a snapshot
    assert (kept() == one.bytes) == (sync is not None)
    one.compact(lambda record: record)
    assert kept() == one.bytes

    def broken(number):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    if sync == 0:
        before = one.path.read_bytes()
        with pytest.raises(OSError, match="Input/output"):
            one.append({"kind": "request", "n": 4})
        assert one.path.read_bytes() == before
    elif sync:
        deadline = time.monotonic() + 60
        with pytest.raises(OSError, match="Input/output"):
            while time.monotonic() < deadline:
                one.append({"kind": "request", "n": 5})
                time.sleep(0.01)
    one.close()


def test_saved_files_are_on_the_disk_before_their_name(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(files.os, "fsync", lambda number: order.append(os.readlink(f"/proc/self/fd/{number}").rpartition("/")[2]))
    replace = os.replace
    monkeypatch.setattr(files.os, "replace", lambda a, b: (order.append("rename"), replace(a, b)))

    def adapter(folder):
        folder.mkdir(parents=True)
        (folder / "adapter.bin").write_bytes(bytes(10))

    store = Store(tmp_path)
    store.write(Address("run", "weights", "one"), {"request": "a", "expires": None}, adapter, {"count": np.zeros(1)})
    assert set(order[:order.index("rename")]) == {"adapter.bin", "about.json", "optimizer.npz", ".one.new"} and order[-1] == "weights"
    assert sorted(store.moments(Address("run", "weights", "one"))) == ["count"]


@pytest.mark.full
def test_a_full_disk_accepts_nothing_and_loses_nothing(server, tmp_path, monkeypatch):
    """A request that cannot be written down is answered 503, and the file is as before; it is accepted when sent again."""
    with Restarted(server, tmp_path / "full") as client:
        run = client.run(client.session())
        before = client.loss(run, 1, ROWS)
        file = client.http.app.state.operations.journal._file
        whole = Path(file.name).read_bytes()

        class Full:
            def __getattr__(self, name):
                return getattr(file, name)

            def write(self, data):
                file.write(data[:7])
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(client.http.app.state.operations.journal, "_file", Full())
        answer = client.post("forward_backward", forward_backward(run, 2, ROWS), headers=PROTO)
        assert answer.status_code == 503 and "No space left on device; free space" in answer.json()["error"]
        assert Path(file.name).read_bytes() == whole
        monkeypatch.undo()
        client.forward_backward(run, 2, ROWS)
        client.result(client.optim_step(run, 3))
        assert client.loss(run, 4, ROWS) < before


@pytest.mark.slow
def test_a_process_that_is_killed_goes_on(tmp_path):
    """kill -9 of real servers while a client works; it sends again what was not answered."""
    from helpers.tiny_models import make_tiny

    model, answers, kills = make_tiny("llama", tmp_path / "model"), [], 4
    command = [sys.executable, "-m", "jaxrl", "serve", "tinker", f"--model={model}", "--name=tiny", "--rank=4", "--max-length=48", "--port=0",
               f"--dir={tmp_path / 'saved'}", "--config.train.row_counts=1", "--config.rollout.slots=4"]
    found = []
    for kill in [*range(kills), None]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
        url = process.stdout.readline().split("=", 1)[1].strip()
        timer = threading.Timer(1.5 + 0.7 * (kill or 0), process.kill)
        if kill is not None:
            timer.start()
        try:
            with httpx.Client(base_url=url, timeout=120) as http:
                found = play(Client(http), answers, answers[0].decode() if answers else "")
        except httpx.TransportError:
            assert kill is not None
        finally:
            timer.cancel()
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    alone = subprocess.Popen([*command[:-3], f"--dir={tmp_path / 'alone'}", *command[-2:]], stdout=subprocess.PIPE, text=True,
                             env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    try:
        with httpx.Client(base_url=alone.stdout.readline().split("=", 1)[1].strip(), timeout=120) as http:
            assert anonymous(play(Client(http), [])) == anonymous(found)
    finally:
        alone.kill()
