"""What the training service costs besides the computation on devices: HTTP, order and journal of a call, and the memory of a run.

    python benchmarks/service_costs.py [--calls 200] [--out benchmarks/results/service_costs.json]      # two minutes on two cores

The whole server of `jaxrl serve tinker` on a random Qwen3 of two layers, its HTTP on a socket, its journal on the disk; the client is another
process that sends a request, asks for its result, and sends the next one. Processor time is of the server's own threads, so another process on
the machine does not change it much; latencies are what the client waited, and need a quiet machine. `trainer` is the call of the jitted
functions and what waits for them, which a loop without a service has, too.

The memory of a run is what `jax.live_arrays` holds with it and did not hold without it, and the formula for it: 4 bytes for each number of an
adapter of the server's largest rank, its two moments and, between forward_backward and optim_step, its gradient. Needs torch and transformers
(extra `test`), which make the model.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "evidence"), str(ROOT / "tests/service"), str(ROOT / "tests")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax  # noqa: E402
import numpy as np  # noqa: E402
from common import commit, machine  # noqa: E402
from helpers.tinker_cases import PROTO, forward_backward, next_tokens  # noqa: E402

from jaxrl.service import app  # noqa: E402

LONGEST, RANK = 512, 16
KEY = {"X-API-Key": "tml-local", "Content-Type": "application/json"}
CALLS = {
    "session_heartbeat": (),
    "forward_backward, 8 tokens": (1, 8),
    "forward_backward, 2048 tokens": (8, 256),
    "forward_backward, 16384 tokens": (64, 256),
}


class Calls:
    """A client: one connection, one request at a time."""

    def __init__(self, port: int):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)

    def post(self, path: str, body, headers=None) -> bytes:
        """Returns the body of an answer. Raises RuntimeError unless it is a result."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.connection.request("POST", f"/api/v1/{path}", raw, KEY | (headers or {}))
        answer = self.connection.getresponse()
        found = answer.read()
        if answer.status == 408:  # it is not done yet
            return self.post(path, body, headers)
        if answer.status != 200 or found.startswith(b'{"error"'):
            raise RuntimeError(f"{path}: {answer.status} {found[:500]!r}")
        return found

    def done(self, path: str, body, headers=None) -> bytes:
        """Sends a request and waits for its result."""
        return self.post("retrieve_future", {"request_id": json.loads(self.post(path, body, headers))["request_id"]})

    def run(self, number: int, session: str) -> str:
        """Creates a run; returns its id."""
        return json.loads(
            self.done("create_model", {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": RANK}})
        )["model_id"]

    def session(self) -> str:
        """Creates a session; returns its id."""
        return json.loads(self.post("create_session", {"tags": [], "sdk_version": "0.38.0"}))["session_id"]


def batch(run: str, number: int, count: int, length: int) -> bytes:
    """A forward_backward of random tokens."""
    ids = np.random.default_rng(number).integers(0, 256, (count, length + 1))
    return forward_backward(run, number, [next_tokens(row) for row in ids])


def client_main(port: int, calls: int) -> None:
    """The client's process: for each kind of CALLS prints the latencies, and waits for a line before the next one."""
    client = Calls(port)
    session = client.session()
    run, number = client.run(0, session), 1
    for kind, data in CALLS.items():
        many = calls if not data or data[0] == 1 else max(4, calls // data[0] // 4)
        seconds = []
        for k in range(many + 3):
            if k == 3:  # warm: the server's counters begin
                print("begin", flush=True)
                sys.stdin.readline()
            body = batch(run, number, *data) if data else b""
            begin = time.perf_counter()
            if data:
                client.done("forward_backward", body, PROTO)
                number += 1
            else:
                client.post(kind, {"session_id": session})
            seconds.append(time.perf_counter() - begin)
        print(json.dumps(seconds[3:]), flush=True)
        sys.stdin.readline()


def processor_seconds(thread: threading.Thread) -> float:
    """Returns the processor time of a thread of this process."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


class Counted:
    """Adds up seconds and thread seconds of a method, which it replaces."""

    def __init__(self, owner, name: str):
        self.work, self.seconds, self.processor = getattr(owner, name), 0.0, 0.0
        setattr(owner, name, self)

    def __call__(self, *args, **more):
        wall, own = time.perf_counter(), time.thread_time()
        try:
            return self.work(*args, **more)
        finally:
            self.seconds += time.perf_counter() - wall
            self.processor += time.thread_time() - own


def counters(journal, threads, counted) -> np.ndarray:
    """Returns processor seconds of the process and its threads, (processor, passed) seconds of `counted`, bytes of the journal."""
    times = [x for c in counted for x in (c.processor, c.seconds)]
    return np.array([time.process_time(), *map(processor_seconds, threads), *times, journal.bytes])


def measure_calls(server, port: int, threads, calls: int) -> dict:
    """Returns figures of each kind of CALLS; times in ms a call. threads: (of HTTP, of the worker)."""
    journal = server.app.state.operations.journal
    counted = Counted(server.worker.trainer, "forward_backward"), Counted(journal, "append")
    command = [sys.executable, __file__, "--client", str(port), "--calls", str(calls)]
    rows = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:

        def go_on() -> str:
            client.stdin.write("\n")
            client.stdin.flush()
            return client.stdout.readline()

        line = client.stdout.readline()
        for kind in CALLS:
            if line != "begin\n":
                raise RuntimeError(f"the client ended: {line}")
            before = counters(journal, threads, counted)
            latencies = json.loads(go_on())
            spent = (counters(journal, threads, counted) - before) / len(latencies)
            whole, http_, worker, trainer, trainer_wall, append, _, size = spent
            median, own = float(np.median(latencies)), http_ + worker - trainer
            rows[kind] = {
                "calls": len(latencies),
                "processor: HTTP": 1e3 * http_,
                "processor: worker without trainer": 1e3 * (worker - trainer),
                "processor: of both, journal": 1e3 * append,
                "processor: all of the server": 1e3 * whole,
                "share of the service": own / whole,
                "seconds passed in the trainer": 1e3 * trainer_wall,
                "latency, median": 1e3 * median,
                "latency, p99": 1e3 * float(np.quantile(latencies, 0.99)),
                "latency without the trainer, mean": 1e3 * (float(np.mean(latencies)) - trainer_wall),
                "journal, bytes": size,
            }
            line = go_on()
    return rows


def live_bytes() -> int:
    """Returns the bytes of all device arrays."""
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


def measure_memory(server, client: Calls) -> dict:
    """Returns bytes of a run: by the formula, and of live arrays; mean of three runs."""
    trainer, session = server.worker.trainer, client.session()
    numbers = sum(int(np.prod(e.shape)) for e in trainer.model.entries if e.row.init == "adapter" and e.path[-1] != "scale")
    found, before = {"without gradient": [], "with gradient": []}, None
    for number in range(4):  # the first one has the tables that all share
        run = client.run(number, session)
        start, before = before, live_bytes()
        if start is not None:
            found["without gradient"].append(before - start)
        client.done("forward_backward", batch(run, 1, 1, 8), PROTO)
        if start is not None:
            found["with gradient"].append(live_bytes() - start)
        before = live_bytes()
        client.done("optim_step", {"model_id": run, "seq_id": 2, "adam_params": {}})
        before = live_bytes()
    wide = trainer.model.base
    return {
        "adapter numbers": numbers,
        "formula": {"without gradient": 12 * numbers, "with gradient": 16 * numbers},
        "live arrays": {name: float(np.mean(sizes)) for name, sizes in found.items()},
        "base parameters": wide.num_parameters,
        "a pass of `together` runs more": {"formula": 8 * numbers * trainer.together},
    }


def main() -> None:
    """Prints figures, and writes them if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--out", default="")
    parser.add_argument("--client", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client_main(options.client, options.calls)
        return
    import uvicorn
    from test_sdk import make_model

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place) / "model")
        server = app.build(app.Options(str(Path(place) / "model"), ("tiny",), rank=RANK, max_length=LONGEST, dir=f"{place}/saved"))
        mesh = jax.sharding.get_mesh()
        worker = threading.Thread(target=lambda: (jax.set_mesh(mesh), server.worker.serve()), daemon=True)
        listener = uvicorn.Server(uvicorn.Config(server.app, "127.0.0.1", 0, log_level="warning", lifespan="off", timeout_keep_alive=600))
        listening = threading.Thread(target=listener.run, daemon=True)
        for thread in (worker, listening):
            thread.start()
        while not listener.started:
            time.sleep(0.01)
        port = listener.servers[0].sockets[0].getsockname()[1]
        try:
            memory = measure_memory(server, Calls(port))
            rows = measure_calls(server, port, (listening, worker), options.calls)
        finally:
            server.worker.stop()
            worker.join(60)
            listener.should_exit = True
            listening.join(10)
            server.worker.sampler.engine.close()
            server.app.state.operations.journal.close()
    found = {"commit": commit(), **machine(), "load before": load, "calls, ms each": rows, "memory of a run, bytes": memory}
    print(json.dumps(found, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
