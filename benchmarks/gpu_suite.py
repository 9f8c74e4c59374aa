"""What can only be shown on an accelerator, in parts of at most three minutes:

    python benchmarks/gpu_suite.py                   all parts, in the order of PARTS
    python benchmarks/gpu_suite.py 1.5B vllm-0.5B    these, in this order
      --missing      leaves out what came to its end at this commit on this kind of device
      --minutes N    begins no part that would not be done in N minutes from now
      --tiny         the same at a tiny shape, also on a CPU
      --out FOLDER   where the rows go (benchmarks/results; with --tiny a folder that is deleted)
      --merge FILE   only adds the rows of a file from another machine
      --list         what the parts measure

Rows of all runs stand in one file for each kind of device, suite_<device>.jsonl, each with commit, date, card and
versions (gpu/rows.py), and as a page beside it, suite_<device>.md. A row is written as soon as it is measured: a part
that fails or is cut off leaves those that it had, and says why it ended. Every part has a process of its own, since a
device's highest memory is kept per process and a kernel that fails may take its process along. Without git, name the
commit in $JAXRL_COMMIT.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu import card  # noqa: E402
from gpu import rows as results  # noqa: E402

SECONDS, GRACE = 180.0, 20.0  # of a part; of one that was told to end
UNLIMITED = 3600.0            # seconds of a tiny part
WHOLE = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}     # jax has the device alone
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}    # other processes or libraries need memory, too
NO_DEVICE = {"JAX_PLATFORMS": "cpu"}
WHILE = "--xla_gpu_enable_command_buffer=+WHILE"
CUBLAS = "--xla_gpu_enable_triton_gemm=false --xla_gpu_dot_merger_threshold_mb=0"


class Part(NamedTuple):
    """function: module:name in benchmarks/gpu, called with a Report and the arguments. environment: of its process, set
    before jax starts."""

    about: str
    function: str
    arguments: tuple
    tiny: tuple
    environment: dict = WHOLE


def attention(*models: str) -> Part:
    return Part(f"attention forward and backward, beside cuDNN, jax.nn, torch's SDPA: {', '.join(models)}", "kernels:timed",
                ("attention", False, models), ("attention", True), SHARED)


def kernels(about: str, part: str) -> Part:
    return Part(about, "kernels:timed", (part, False), (part, True), SHARED)


def layers(*names: str) -> Part:
    return Part(f"layers of experts beside XLA's blocks and ragged_dot: {', '.join(names)}", "kernels:timed", ("experts", False, names),
                ("experts", True), SHARED)


def decoding(about: str, flags: str = "") -> Part:
    return Part(f"rollouts of the 1.5B case alone, {about}", "decoding:run", ("1.5B",), ("tiny",), WHOLE | {"XLA_FLAGS": flags} if flags else WHOLE)


def server(about: str, case: str, way: str) -> Part:
    return Part(f"five steps with a vLLM server on the card: {about}", "servers:run", (case, way), ("tiny vllm", way), {})


PARTS = {
    "1.5B": Part("GRPO steps: phases, decoding beside its roofline, update's MFU, memory, a trace", "training:run", ("1.5B",), ("tiny",)),
    "0.5B": Part("the same: twenty steps", "training:run", ("0.5B",), ("tiny",)),
    "decode": decoding("to be beside the next three"),
    "decode-while": decoding("the loop over tokens in one CUDA graph", WHILE),
    "decode-cublas": decoding("products by cuBLAS", CUBLAS),
    "decode-both": decoding("both", f"{WHILE} {CUBLAS}"),
    "first-0.5B": Part("the first step with an empty and with a filled cache of compiled programs", "training:first_steps", ("0.5B",), ("tiny",)),
    "first-1.5B": Part("the same", "training:first_steps", ("1.5B",), ("tiny",)),
    "vllm-0.5B": server("gap, seconds by phase, weights by shared memory", "0.5B", "shm"),
    "vllm-1.5B": server("the same", "1.5B", "shm"),
    "vllm-network": server("weights over HTTP", "0.5B", "network"),
    "vllm-nccl": server("weights by NCCL from GPU to GPU; needs two GPUs", "0.5B", "nccl"),
    "vllm-asleep": server("asleep during the update", "0.5B", "asleep"),
    "vllm-adapters": server("adapters of rank 16, published apart", "0.5B", "adapters"),
    "vllm-lora": server("adapters of rank 16, merged at publish", "0.5B", "lora"),
    "vllm-ahead": server("max_staleness=2 beside the trainer", "0.5B", "ahead"),
    "vllm-alone-0.5B": Part("vLLM's own throughput at that shape", "peers:vllm_alone", ("0.5B",), ("tiny vllm",), {}),
    "vllm-alone-1.5B": Part("the same", "peers:vllm_alone", ("1.5B",), ("tiny vllm",), {}),
    "attention-1.5B": attention("Qwen2.5-1.5B"),
    "attention-8B": attention("Qwen3-8B"),
    "attention-gemma": attention("Gemma-3-4B"),
    "attention-others": attention("Qwen2.5-0.5B", "Qwen2.5-7B", "Llama-3.1-8B"),
    "attention-masks": kernels("windows and sinks, training and decoding", "masks"),
    "attention-cache": kernels("attention over a cache, shared prompts read once", "decoding"),
    "lora": Part("1.5B with adapters of rank 16 on all linear maps: the update", "training:run", ("lora",), ("tiny lora",)),
    "dpo": Part("0.5B on 64 pairs of 40 + 256 tokens, with the reference's scores", "training:run", ("dpo",), ("tiny dpo",)),
    "0.6B": Part("tokens/s of training", "training:run", ("0.6B",), ("tiny",)),
    "torch-update": Part("a torch loop's update of the 1.5B case", "peers:update", ("1.5B",), ("tiny",), {}),
    "torch-generate": Part("transformers' generate, 0.5B case", "peers:generate", ("0.5B",), ("tiny",), {}),
    "experts": Part("a model of 64 experts, 8 to a token, 1.1B parameters: the update", "training:run", ("experts",), ("tiny experts",)),
    "experts-layers": layers("Qwen3-30B-A3B", "gpt-oss-20b"),
    "experts-counts": layers("8 experts", "128 experts", "16 experts", "64 experts", "32 experts"),
    "recurrence": kernels("recurrences of Qwen3.5 and Nemotron 3, rows of 8k and 32k", "recurrence"),
    "ahead": Part("max_staleness=2 with the embedded sampler on the trainer's device", "training:ahead", ("0.5B", 6), ("tiny", 4)),
    "logprob": kernels("log-probs and gradients of a head, chunked and whole", "logprob"),
    "correctness": Part("every kernel beside float64", "kernels:correctness", (), (), SHARED),
    "plan": Part("run.mode=plan beside what 0.5B and 1.5B measured; needs no device", "training:planned", ("0.5B", "1.5B"), ("0.5B",),
                 NO_DEVICE),
}


def one(name: str, file: Path, tiny: bool, share: str, origin: dict) -> int:
    """Runs a part in this process."""
    import importlib

    part, report = PARTS[name], results.Report(name, file, origin)
    module, function = part.function.split(":")
    call = getattr(importlib.import_module(f"gpu.{module}"), function)
    if share:
        call(report, share)
        return 0
    with card.watched(report):
        call(report, *(part.tiny if tiny else part.arguments))
    report.end()
    return int(bool(report.failed))


def in_a_process(name: str, file: Path, tiny: bool, seconds: float, origin: dict) -> str:
    """Runs a part in a process of its own. Returns its state (rows.py)."""
    report = results.Report(name, file, origin)
    results.write(file, lambda rows: [r for r in rows if results.key(r) != (name, results.END, origin["commit"])])
    command = [sys.executable, __file__, "--one", name, "--file", str(file), *["--tiny"] * tiny]
    environment = {**os.environ, **PARTS[name].environment, "JAXRL_SUITE_ORIGIN": json.dumps(origin)}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=environment, stderr=said, start_new_session=True)
        ended = ""
        try:
            code = process.wait(seconds)
            ended = f"its process ended with {code}" * bool(code)
        except subprocess.TimeoutExpired:
            ended = f"cut off after {seconds:.0f} s"
        finally:
            stop(process)
        rows = [r for r in results.read(file) if results.key(r) == (name, results.END, origin["commit"])]
        if not rows:
            said.seek(0)
            report.end(f"{ended}: {said.read()[-1500:]}".rstrip(": \n"))
            rows = report.rows
    return rows[-1]["state"]


def stop(process) -> None:
    """Ends a part's process and those that it started."""
    for number, wait in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def about_here(tiny: bool) -> dict:
    """The origin of rows from this machine, asked in a process of its own: this one leaves the device to the parts. Tiny shapes
    have a file of their own."""
    done = subprocess.run([sys.executable, __file__, "--origin"], capture_output=True, text=True, env={**os.environ, **SHARED})
    if done.returncode:
        raise SystemExit(f"jax does not start here: {done.stderr[-1500:]}")
    origin = json.loads(done.stdout.splitlines()[-1])
    return origin | {"device": f"{origin['device']} tiny"} if tiny else origin


def run(names, folder: Path, tiny: bool, missing: bool, minutes: float, origin: dict) -> int:
    """Runs parts one after the other and writes the page after each. Returns how many did not come to their end."""
    file, bad = results.file_of(folder, origin["device"]), 0
    deadline = time.monotonic() + 60 * minutes if minutes else float("inf")
    for name in names:
        limit = UNLIMITED if tiny else SECONDS
        if missing and results.is_done(results.read(file), name, origin["commit"]):
            print(f"{name}: done at {origin['commit']}", flush=True)
            continue
        if time.monotonic() + limit > deadline:
            print(f"{name}: not begun, {max(0.0, deadline - time.monotonic()):.0f} s are left of --minutes={minutes:g}", flush=True)
            bad += 1
            continue
        bad += not in_a_process(name, file, tiny, limit, origin).startswith((results.DONE, results.NOT_RUN))
        file.with_suffix(".md").write_text(results.markdown(results.read(file), origin["device"]))
    return bad


def merge(files, folder: Path) -> None:
    for file in files:
        for device in dict.fromkeys(row["device"] for row in results.read(file)):
            new = [row for row in results.read(file) if row["device"] == device]
            out = results.file_of(folder, device)
            rows = results.write(out, lambda rows, new=new: results.merged(rows, new))
            out.with_suffix(".md").write_text(results.markdown(rows, device))
            print(f"{out}: {len(rows)} rows")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part")
    for flag in ("tiny", "missing", "list", "origin"):
        parser.add_argument(f"--{flag}", action="store_true", help=argparse.SUPPRESS)
    for flag, kind, default in (("minutes", float, 0.0), ("out", Path, None), ("one", str, ""), ("share", str, ""), ("file", Path, None)):
        parser.add_argument(f"--{flag}", type=kind, default=default, help=argparse.SUPPRESS)
    parser.add_argument("--merge", nargs="+", type=Path, default=[], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := [name for name in (*args.parts, *[args.one] * bool(args.one)) if name not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if args.one:
        code = one(args.one, args.file, args.tiny, args.share, json.loads(os.environ["JAXRL_SUITE_ORIGIN"]))
        sys.stdout.flush()
        os._exit(code)  # vLLM's engine in this process may never let it end
    if args.origin:
        print(json.dumps(results.origin(os.environ.get("JAXRL_COMMIT", ""))))
    elif args.list:
        print("\n".join(f"{name:18s}{part.about}" for name, part in PARTS.items()))
    elif args.merge:
        merge(args.merge, args.out or results.RESULTS)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of `finally`, which ends the part's processes
        with tempfile.TemporaryDirectory() as folder:
            out = args.out or (Path(folder) if args.tiny else results.RESULTS)
            return int(run(args.parts or PARTS, out, args.tiny, args.missing, args.minutes, about_here(args.tiny)) > 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
