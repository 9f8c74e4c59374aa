"""Training requests to `jaxrl serve tinker` and to skyrl's server in turns: tokens a second, processor time, and where their numbers differ.

    python benchmarks/service_peers.py --peer=VENV/bin/python [--out benchmarks/results/service_peers.json]     # ten minutes on two cores

VENV (Python 3.12) has `pip install torch "skyrl[tinker,jax]==0.4.0" aiohttp`; its tinker SDK, 0.25, is the client of both servers. Both have the
same random Qwen3 of two layers, adapters of rank 16 on attention and MLP (skyrl has none on the output matrix by these requests), CPUs. A round
is one forward_backward (cross_entropy) and one optim_step of each of 1, 4 or 8 runs, which all have an equal part of the same data and are sent
at once; the servers take turns. `even`: all data have one length; `mixed`: 8 to 500 tokens. Figures are medians of the rounds; processor seconds
are those of the server's processes, and change less where the machine has other work.

The second table asks questions of both: log-probs before and after one step of AdamW whose eps is so large that the step is in proportion to
the gradient (learning_rate / eps times it), and whose answer is known from the documented sum over tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA, ROUNDS, TENANTS, EPS = 32, 5, (1, 4, 8), 1e4


def processor_seconds(pid: int) -> float:
    """Returns the processor time of a process and of its children, of those that live."""
    children, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        number = int(stat.parent.name)
        children.setdefault(int(fields[1]), []).append(number)
        ticks[number] = int(fields[11]) + int(fields[12])
    waiting, total = [pid], 0
    while waiting:
        total += ticks.get(own := waiting.pop(), 0)
        waiting += children.get(own, [])
    return total / os.sysconf("SC_CLK_TCK")


# ---- the client, with the peer's interpreter: it imports tinker


def data_of(lengths, seed: int) -> list:
    """Returns data of random tokens of these lengths."""
    import random

    from tinker import types

    rng = random.Random(seed)
    out = []
    for length in lengths:
        ids = [rng.randrange(256) for _ in range(length + 1)]
        out.append(
            types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * length})
        )
    return out


def weighted(data, weight: float) -> list:
    """Returns the same data with another weight of every token."""
    from tinker import types

    return [
        types.Datum(
            model_input=d.model_input,
            loss_fn_inputs={"target_tokens": d.loss_fn_inputs["target_tokens"].tolist(), "weights": [weight] * d.model_input.length},
        )
        for d in data
    ]


class Client:
    """A server, and runs of it."""

    def __init__(self, url: str, model: str, pid: int):
        import tinker

        self.service, self.model, self.pid, self.runs = tinker.ServiceClient(base_url=url), model, pid, []

    def new(self):
        """Creates a run."""
        return self.service.create_lora_training_client(self.model, rank=16, seed=len(self.runs), train_unembed=False)

    def round(self, parts) -> tuple[float, float]:
        """Sends one step of each part; returns (seconds, processor seconds) until all have been applied."""
        from tinker import types

        while len(self.runs) < len(parts):
            self.runs.append(self.new())
        begin, used = time.perf_counter(), processor_seconds(self.pid)
        waiting = []
        for run, part in zip(self.runs, parts, strict=False):
            waiting += [run.forward_backward(part, "cross_entropy"), run.optim_step(types.AdamParams(learning_rate=1e-4))]
        for future in waiting:
            future.result()
        return time.perf_counter() - begin, processor_seconds(self.pid) - used


def losses(run, data) -> list[float]:
    """Returns the sum of -log-probs of each datum."""
    found = run.forward(data, "cross_entropy").result()
    return [-sum(out["logprobs"].tolist()) for out in found.loss_fn_outputs]


def moved(client: Client, passes, watched, **adam) -> float:
    """Returns by how much the loss of `watched` falls in one step along the gradient of (data, weight) passes."""
    from tinker import types

    run = client.new()
    before = sum(losses(run, watched))
    for data, weight in passes:
        run.forward_backward(weighted(data, weight), "cross_entropy").result()
    run.optim_step(types.AdamParams(**({"learning_rate": EPS * 1e-4, "eps": EPS} | adam))).result()
    return before - sum(losses(run, watched))


def questions(client: Client) -> dict:
    """Returns what a server answers to each question."""
    from tinker import types

    one, long = data_of([40], 1), data_of([160], 2)
    once = moved(client, [(one, 1.0)], one)
    out = {
        "fall of the loss with weights 1": once,
        "with weights 10, in its multiple (the sum: 10)": moved(client, [(one, 10.0)], one) / once,
        "with weights -0.5, in its multiple (the sum: -0.5)": moved(client, [(one, -0.5)], one) / once,
        "weights 1 twice, in its multiple (the sum: 2)": moved(client, [(one, 1.0), (one, 1.0)], one) / once,
        "grad_clip_norm 1e-9, in its multiple (0)": moved(client, [(one, 1.0)], one, grad_clip_norm=1e-9) / once,
    }
    run = client.new()
    found = run.forward_backward(one + long, "cross_entropy").result()
    out["metrics of forward_backward"] = sorted(found.metrics)
    other = client.new()
    for each in (run, other):
        each.forward_backward(one, "cross_entropy").result()
        each.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    before = losses(other, one)
    run = client.new()
    run.forward_backward(one, "cross_entropy").result()
    run.optim_step(types.AdamParams(learning_rate=0.5, weight_decay=0.5)).result()
    out["change of a run's loss by another run's step with weight decay (0)"] = losses(other, one)[0] - before[0]
    return out


def asked(question) -> object:
    """Returns the answer, or the error in its place."""
    try:
        return question()
    except Exception as e:  # what a server refuses is an answer
        return f"{type(e).__name__}: {str(e)[:300]}"


def throughput(clients: dict) -> dict:
    """Returns server -> data and runs -> tokens a second and processor time, measured in turns."""
    shapes = {"even": [256] * DATA, "mixed": [8 + (k * 37) % 493 for k in range(DATA)]}
    rows = {}
    for shape, lengths in shapes.items():
        for count in TENANTS:
            data = data_of(lengths, 0)
            parts, seconds = [data[k::count] for k in range(count)], {}
            for k in range(ROUNDS + 2):  # the first two compile
                for name, client in clients.items():
                    spent = client.round(parts)
                    if k > 1:
                        seconds.setdefault(name, []).append(spent)
            for name, spent in seconds.items():
                middle = [sorted(values)[len(spent) // 2] for values in zip(*spent, strict=True)]
                rows.setdefault(name, {})[f"{shape}, {count}"] = {
                    "tokens": sum(lengths),
                    "tokens a second": sum(lengths) / middle[0],
                    "processor ms a 1000 tokens": 1e6 * middle[1] / sum(lengths),
                }
            print(shape, count, {name: row[f"{shape}, {count}"] for name, row in rows.items()}, file=sys.stderr, flush=True)
    return rows


def answers(clients: dict) -> dict:
    """Returns server -> what it answers to the questions."""
    return {name: asked(lambda client=client: questions(client)) for name, client in clients.items()}


def client_main(part: str, servers: dict) -> None:
    """Prints the figures of servers (name -> (url, model, process)), as JSON."""
    parts = {"throughput": throughput, "answers": answers}
    print(json.dumps(parts[part]({name: Client(*about) for name, about in servers.items()})))


# ---- the servers


def started(command: list, log, **more):
    """Starts a server."""
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(list(map(str, command)), env=environ, stderr=log, start_new_session=True, **more)


def wait_for(url: str, process) -> None:
    """Waits until a server answers. Raises RuntimeError if it ended."""
    import urllib.request

    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=2)
            return
        except OSError:
            if process.poll() is not None:
                raise RuntimeError(f"the server at {url} ended with status {process.returncode}") from None
            time.sleep(1)
    raise RuntimeError(f"the server at {url} does not answer")


def measured(part: str, peer: str, port: int) -> dict:
    """Returns the figures of one part, "throughput" or "answers", by servers of its own: skyrl's takes at most ten runs."""
    sys.path[:0] = [str(ROOT / "evidence"), str(ROOT / "tests/service")]
    from test_sdk import make_model

    with tempfile.TemporaryDirectory() as place, open(f"{place}/log", "w") as log:
        model = f"{place}/model"
        make_model(Path(model))
        flags = [f"--model={model}", "--rank=16", "--unembed=leave-out", "--max-length=512", "--port=0", f"--dir={place}/saved"]
        ours = started([sys.executable, "-m", "jaxrl", "serve", "tinker", *flags], log, stdout=subprocess.PIPE, text=True)
        theirs = started([peer, ROOT / "benchmarks/peers/skyrl_serve.py", model, port, place], log, stdout=log)
        try:
            url = re.search(r"TINKER_BASE_URL=(\S+)", ours.stdout.readline())[1]
            servers = {"jaxrl": (url, model, ours.pid), "skyrl": (f"http://127.0.0.1:{port}", model, theirs.pid)}
            for name, process in (("jaxrl", ours), ("skyrl", theirs)):
                wait_for(servers[name][0], process)
            environ = {**os.environ, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
            client = [peer, __file__, f"--client={part}", f"--servers={json.dumps(servers)}"]
            done = subprocess.run(client, env=environ, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"the client ended with status {done.returncode}; the servers said:\n{Path(log.name).read_text()[-3000:]}")
        finally:
            for process in (ours, theirs):
                os.killpg(process.pid, signal.SIGTERM)
            for process in (ours, theirs):
                process.wait(60)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Starts both servers and the client, prints the figures, and writes them if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default="", help="interpreter of the environment with skyrl")
    parser.add_argument("--port", type=int, default=8431)
    parser.add_argument("--out", default="")
    parser.add_argument("--client", default="", help=argparse.SUPPRESS)
    parser.add_argument("--servers", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client_main(options.client, json.loads(options.servers))
        return
    load = os.getloadavg()[0]
    found = {part: measured(part, options.peer, options.port + k) for k, part in enumerate(("throughput", "answers"))}
    from common import commit, machine

    versions = subprocess.run([options.peer, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True).stdout
    theirs_has = {row["name"]: row["version"] for row in json.loads(versions) if row["name"] in ("skyrl", "tinker", "jax", "flax", "optax")}
    found = {"commit": commit(), **machine(), "load before": load, "peer": theirs_has, **found}
    print(json.dumps(found, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
