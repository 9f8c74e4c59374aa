"""Several hundred hostile requests over a socket: each is refused with 4xx, nothing is read, nothing of any user changes.

One user, Anna, has a run with gradients in its window, saved weights, a sampler and results. Another one, Ben, and some without a key, send what
hostile_requests makes by kind: hostile values for every field of every body, paths, names, keys, verbs, encodings, replays. What each spoils is a
request that is accepted as it is.
"""

import collections
import hashlib
import http.client
import json
import socket
import threading
import time

import numpy as np
import pytest
import uvicorn
from helpers.hostile_requests import ANNA, BEN, ROW, accepted, hostile_bodies, hostile_http, hostile_messages
from helpers.tinker_cases import PROTO, Client, forward_backward, served

from jaxrl.errors import ConfigError
from jaxrl.service import owners

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("the_mesh_as_it_was")]
SECRET = "the-secret-of-anna"
MARKS = (SECRET, "Traceback", 'File "', "root:", "PK\x03\x04", "incident")  # of what no answer may have

encoded = lambda value: json.dumps(value).encode()  # noqa: E731


class Listener(http.client.HTTPConnection):
    """What Client needs of an HTTP library, over one connection that is made again when the server closed it."""

    def send_request(self, method, path, headers, body=None):
        try:
            self.request(method, path, body, headers)
            found = self.getresponse()
            found.content = found.read()
        except (ConnectionError, http.client.HTTPException):  # refused before the body was read
            self.close()
            raise
        found.status_code, found.text = found.status, found.content.decode("utf-8", "replace")
        found.json = lambda: json.loads(found.content)
        return found

    def post(self, path, headers, content=None, json=None):
        body = content if json is None else encoded(json)
        return self.send_request("POST", path, {"Content-Type": "application/json"} | headers, body)

    def get(self, path, headers):
        return self.send_request("GET", path, headers)


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    """(server, port): a server with two users that listens on a socket."""
    folder = tmp_path_factory.mktemp("town")
    with served(folder, {ANNA: "anna", BEN: "ben"}) as (server, _):
        listener = uvicorn.Server(uvicorn.Config(server.app, "127.0.0.1", 0, log_level="critical", lifespan="off", timeout_keep_alive=600))
        thread = threading.Thread(target=listener.run, daemon=True)
        thread.start()
        while not listener.started:
            time.sleep(0.01)
        yield server, listener.servers[0].sockets[0].getsockname()[1]
        listener.should_exit = True
        thread.join(10)


def client_of(port, key) -> Client:
    return Client(Listener("127.0.0.1", port, timeout=30), key)


def household(client, name: str) -> dict:
    """What a user has: ids and paths; a run whose window has gradients, saved weights, a sampler, answers."""
    session = client.ok(
        "create_session", {"tags": [], "user_metadata": {"note": name}, "sdk_version": "0.38.0"}, headers={"X-Idempotency-Key": f"first of {name}"}
    )["session_id"]
    run = client.run(session)
    answered = client.forward_backward(run, 1, [ROW])
    client.result(client.optim_step(run, 2))
    body = {"model_id": run, "seq_id": 3, "path": "secret", "user_metadata": {"note": name}}
    path = client.result(client.ok("save_weights", body))["path"]
    sampler = client.sampler(session, 0)
    client.result(client.forward_backward(run, 4, [ROW]))
    return {"session": session, "run": run, "path": path, "sampler": sampler, "future": answered["request_id"], "next": 5}


def state(server, folder, of: dict) -> dict:
    """Everything that the server has of a user, bit for bit, on the devices, in memory and on the disk."""
    operations, worker = server.app.state.operations, server.worker
    line = worker._lines[of["run"]]
    arrays = {name: x.tobytes() for name, x in worker.trainer.arrays(line.run).items()}
    files = {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and "journal" not in file.parts
    }
    mine = lambda table: {k: repr(v) for k, v in table.items() if of["session"] in k}  # noqa: E731
    promises = {k: (p.digest, p.future.done()) for k, p in operations.promises.items() if of["session"] in k}
    return {
        "arrays": arrays,
        "line": (line.next, line.failure, sorted(line.held)),
        "files": files,
        "promises": promises,
        "sessions": mine(operations.sessions),
        "models": {k: m.options for k, m in operations.models.items() if of["session"] in k},
        "samplers": {k: (s.version, s.path) for k, s in operations.samplers.items() if of["session"] in k},
    }


@pytest.mark.full
def test_what_is_spoiled_is_accepted_as_it_is(town):
    """So a refusal is of what was spoiled. Bodies without a number first: the others are tasks of the run, in order."""
    _, port = town
    ben = client_of(port, BEN)
    b = household(ben, "whole")
    for path, body in accepted(b).items():
        if "model_id" in body and "seq_id" in body:
            body = body | {"seq_id": b["next"]}
            b["next"] += 1
        answer = ben.post(path, body)
        assert answer.status_code == 200, (path, answer.text)
        if path != "retrieve_future" and "request_id" in answer.json():
            ben.result(answer.json())
    two = (np.array([3, 4]), {"target_tokens": np.array([4, 5])})
    ben.result(ben.ok("forward_backward", forward_backward(b["run"], b["next"], [two]), headers=PROTO))


def test_hostile_requests_are_refused_and_change_nothing(town, caplog):
    server, port = town
    folder, anna, ben = server.app.state.operations.store.folder, client_of(port, ANNA), client_of(port, BEN)
    a, b = household(anna, SECRET), household(ben, "ben")
    (folder / "link").symlink_to(folder / a["run"].replace(":", "_"))
    (folder / b["run"].replace(":", "_") / "weights/link").symlink_to(folder / a["run"].replace(":", "_") / "weights/secret")
    before, promised, count, faults, own = [state(server, folder, of) for of in (a, b)], [], collections.Counter(), [], {"X-API-Key": BEN}

    def send(what, method, path, headers, body) -> bool:
        """Whether it was accepted, and uses a number up: its result has to be an error."""
        count[what] += 1
        kind = {} if body is None or method != "POST" else {"Content-Type": "application/json"}
        try:
            answer = ben.http.send_request(method, path if path.startswith("/") else f"/api/v1/{path}", kind | headers, body)
        except ConnectionError:  # refused while the body was sent
            assert what == "large body"
            return False
        told = (what, method, path[:200], None if body is None else body[:300], answer.status_code, answer.text[:500])
        if answer.status_code == 200 and answer.text.startswith('{"request_id"'):
            promised.append((told, answer.json()))
            return "model_id" in answer.json()
        if not 400 <= answer.status_code < 500 or answer.status_code in (402, 409) or any(mark in answer.text for mark in MARKS):
            faults.append(told)
        return False

    for what, path, body in hostile_bodies(a, b):
        numbered = body.get("seq_id") == 0 and body.get("model_id") == b["run"]
        b["next"] += numbered & send(what, "POST", path, own, json.dumps(body | ({"seq_id": b["next"]} if numbered else {})).encode())
    for what, raw in hostile_messages(a, b):
        b["next"] += send(what, "POST", "forward_backward", own | PROTO, raw)
    for what, method, path, headers, body in hostile_http(a, b):
        send(what, method, path, headers, body)
    for told, promise in promised:
        answer = ben.retrieve(promise)
        found = answer.json() if answer.headers["content-type"].startswith("application/json") else {}
        if found.get("category") != "user" or any(mark in answer.text for mark in MARKS):
            faults.append((*told, answer.text[:500]))
    assert not faults, "\n".join(map(str, faults))
    assert sum(count.values()) > 1000 and len(count) > 50, count
    assert not [record for record in caplog.records if "incident" in record.getMessage()]
    after = [state(server, folder, of) for of in (a, b)]
    assert after[0] == before[0]
    weights = [{name: x for name, x in of["arrays"].items() if not name.startswith("window/")} for of in (before[1], after[1])]
    assert weights[0] == weights[1] and after[1]["files"] == before[1]["files"] and after[1]["samplers"] == before[1]["samplers"]
    written = [r.header["name"] for r in server.app.state.operations.journal.records() if r.header["kind"] == "request"]
    assert len(written) == len(set(written)) and set(written) <= set(server.app.state.operations.promises)
    for client, other in ((anna, b), (ben, a)):  # each sees its own
        found = client.get("training_runs?limit=100").text + client.get("checkpoints").text
        assert other["run"] not in found and client.get("training_runs").status_code == 200
    assert anna.result(anna.optim_step(a["run"], a["next"]))["metrics"]["optim/step"] == 2
    assert anna.get(f"training_runs/{a['run']}/checkpoints").json()["checkpoints"][0]["user_metadata"] == {"note": SECRET}


def test_a_replay_with_another_body_is_refused(town):
    _, port = town
    ben = client_of(port, BEN)
    b = household(ben, "twice")
    sample = accepted(b)["asample"]
    ben.result(ben.ok("asample", sample))
    for path, body in (
        ("asample", sample | {"num_samples": 2}),
        ("optim_step", {"model_id": b["run"], "seq_id": 2, "adam_params": {"eps": 1}}),
        ("create_model", accepted(b)["create_model"] | {"model_seq_id": 0}),
        ("create_sampling_session", {"session_id": b["session"], "sampling_session_seq_id": 0, "model_path": b["path"]}),
        ("save_weights_for_sampler", {"model_id": b["run"], "seq_id": 5, "sampling_session_seq_id": 0}),
    ):
        assert "came before" in ben.refused(path, body), path
    assert "came before" in ben.refused("forward_backward", forward_backward(b["run"], 1, [ROW, ROW]), headers=PROTO)
    assert "came before" in ben.refused("create_session", {"tags": ["x"]}, headers={"X-Idempotency-Key": "first of twice"})
    anna = client_of(port, ANNA)  # keys of another user are another user's
    body = {"tags": [], "user_metadata": {"note": "twice"}, "sdk_version": "0.38.0"}
    assert anna.post("create_session", body, headers={"X-Idempotency-Key": "first of twice"}).json()["session_id"] != b["session"]
    assert ben.get(f"samplers/{b['sampler']}").json()["model_path"] is None


def test_what_is_no_http_is_refused_and_the_server_goes_on(town, monkeypatch, caplog):
    _, port = town
    monkeypatch.setattr("jaxrl.service.routes.BODY_SECONDS", 0.2)
    head = f"POST /api/v1/create_session HTTP/1.1\r\nHost: a\r\nX-API-Key: {BEN}\r\n".encode()

    def answer(data: bytes, end=False) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as s:
            s.sendall(data)
            if end:
                return b""
            return s.recv(1 << 16)

    assert answer(head + b"Content-Length: 100\r\n\r\n{").startswith(b"HTTP/1.1 408")  # a body that does not come
    answer(head + b"Content-Length: 100\r\n\r\n{", end=True)  # and a client that goes away
    for junk in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64,
        b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n\r\n\r\nno http\r\n\r\n",
        head + b"Content-Length: -1\r\n\r\n",
        head + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        head + b"Content-Length: 1e3\r\n\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        head.replace(b"POST ", b"POST\x00 ") + b"\r\n",
        b"GET " + b"/" * 200_000 + b" HTTP/1.1\r\n\r\n",
    ):
        found = answer(junk)
        assert found[:10] in (b"HTTP/1.1 4", b""), found[:200]
    assert client_of(port, BEN).get("healthz").json() == {"status": "ok"}
    assert not [record for record in caplog.records if "incident" in record.getMessage()]


@pytest.mark.full
def test_users_keep_what_is_theirs_over_a_restart(tmp_path):
    keys = {ANNA: "anna", BEN: "ben"}
    with served(tmp_path, keys) as (server, client):
        a = household(Client(client.http, ANNA), SECRET)
    server.app.state.operations.journal.close()
    with served(tmp_path, keys) as (server, client):
        anna, ben = Client(client.http, ANNA), Client(client.http, BEN)
        assert anna.get(f"sessions/{a['session']}").json()["training_run_ids"] == [a["run"]]
        assert anna.result(anna.optim_step(a["run"], a["next"]))["metrics"]["optim/step"] == 2
        for path, body in (
            ("get_info", {"model_id": a["run"]}),
            ("weights_info", {"tinker_path": a["path"]}),
            ("retrieve_future", {"request_id": a["future"]}),
            ("optim_step", {"model_id": a["run"], "seq_id": 6, "adam_params": {}}),
        ):
            assert SECRET not in ben.refused(path, body)
        session = ben.session()  # refused before the restart, and refused when the journal is replayed
        body = {"session_id": session, "model_seq_id": 0, "path": a["path"], "optimizer": True}
        assert "no such weights" in ben.refused("load_weights", body)
        assert ben.get("training_runs").json()["training_runs"] == [] == ben.get("checkpoints").json()["checkpoints"]
    server.app.state.operations.journal.close()
    with served(tmp_path) as (_, client):  # without keys all of it is this machine's
        assert a["path"] in client.get("checkpoints").text and client.get(f"sessions/{a['session']}").status_code == 200


def test_users_of_keys():
    assert owners.parse_keys("anna:tml-a,ben:tml-b,tml-c,anna:tml-d") == {"tml-a": "anna", "tml-b": "ben", "tml-c": "", "tml-d": "anna"}
    for text_of_keys, what in (
        ("anna:x", "does not begin with tml-"),
        ("a b:tml-x", "the user 'a b' of a key"),
        ("a:tml-x,b:tml-x", "have the same key"),
        (":x", "the user '' of a key"),
    ):
        with pytest.raises(ConfigError, match=what):
            owners.parse_keys(text_of_keys)
