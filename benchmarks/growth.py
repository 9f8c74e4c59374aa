"""Time and memory as the work of a step grows, with fitted exponents.

    python benchmarks/growth.py --out benchmarks/results/growth.json      # and growth.md beside it; about ten minutes on two cores

Steps of the job itself (GRPO on a model of 0.5 M parameters, random weights, answers of a fixed length, old log-probs scored), every
point in a process of its own. Three series: `tokens`, the prompts of a step x1 to x8; `length`, of an answer, 256 to 8192;
`group`, answers to a prompt, 2 to 64. Seconds: the fastest of a phase's steps after the first, which compiles. Memory: the highest
resident set within a phase of those steps, less what the process held before its first step; the compiled programs stay in it, as
something that all points have. An exponent is the slope of a
straight line through (log x, log y): 1 = linear; where y is mostly what every step costs, below 1. Attention's share grows with
the length, so that there more than 1 is right. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PHASES = {"rollout": "generation", "score": "scoring", "update": "update"}
MODEL = {"model_type": "qwen2", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16384, "tie_word_embeddings": True}
SERIES = {  # name -> points of (prompts, answers to each, tokens of an answer), and what grows
    "tokens": ([(8 * n, 8, 64) for n in (1, 2, 4, 8)], "tokens of a step"),
    "length": ([(1, 4, n) for n in (256, 512, 1024, 2048, 4096, 8192)], "tokens of an answer"),
    "group": ([(4, n, 64) for n in (2, 4, 8, 16, 32, 64)], "answers to a prompt"),
}
TINY = {"tokens": ([(2, 2, 8), (4, 2, 8)], "tokens of a step")}


def config_of(prompts: int, group: int, answer: int, folder: str, steps: int):
    """The job of one point."""
    from jaxrl.config import default_config

    c = default_config()
    c.model.init, c.model.config, c.model.tokenizer = "random", MODEL, "jaxrl://arith/tokenizer"
    c.data.path, c.data.prompts_per_step, c.data.max_prompt_tokens = ("jaxrl://arith/train.jsonl",), prompts, 40
    c.rollout.group_size, c.rollout.max_new_tokens, c.rollout.min_new_tokens = group, answer, answer
    c.algorithm.old_logprobs = "recompute"
    c.reward.functions, c.reward.workers, c.train.steps = ("boxed",), 1, steps
    c.run.dir, c.log.console, c.log.tensorboard, c.log.level = folder, "off", False, "error"
    c.checkpoint.every_steps, c.checkpoint.at_end, c.checkpoint.export_at_end = 0, False, False
    return c


def resident(name: str) -> int:
    """Bytes of a line of /proc/self/status: VmRSS now, VmHWM at its highest since it was last cleared."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def point(prompts: int, group: int, answer: int) -> dict:
    """Seconds and bytes by phase of one point, measured in this process."""
    import jaxrl
    from jaxrl.telemetry.compilations import give_back
    from jaxrl.telemetry.console import SilentConsole

    told, peaks, now = SilentConsole.phase, {}, {"phase": "", "step": 0}

    def watch(self, name):  # called where a phase begins, and with "" where it ends
        if "before" not in now:
            now["before"] = resident("VmRSS")
        if now["step"] > 0 and now["phase"] in PHASES:
            peaks[now["phase"]] = max(peaks.get(now["phase"], 0), resident("VmHWM"))
        if now["phase"] == "update":
            now["step"] += 1
            give_back()  # what compiling and the phases before left unused in the heap
        Path("/proc/self/clear_refs").write_text("5")
        now["phase"] = name
        return told(self, name)

    SilentConsole.phase = watch
    with tempfile.TemporaryDirectory() as folder:
        jaxrl.train(config_of(prompts, group, answer, folder, 4 if answer <= 1024 else 3))
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "rollout/tokens" in line]
    assert all(row["length/min"] == row["length/max"] == answer for row in rows)
    out = {"prompts": prompts, "group": group, "answer": answer, "tokens": int(rows[-1]["rollout/tokens"])}
    for phase, name in PHASES.items():
        out[name] = {"seconds": min(row["time"][phase] for row in rows[1:]), "bytes": peaks[phase] - now["before"]}
    return out


def exponent(xs, ys) -> float | None:
    """Slope of the straight line through (log x, log y) by least squares; None where a y is not positive."""
    import numpy as np

    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0]) if min(ys) > 0 else None


def fitted(name: str, rows: list[dict]) -> dict:
    """Exponents by phase: of all points, and between the last two."""
    xs = [row[{"tokens": "tokens", "length": "answer", "group": "group"}[name]] for row in rows]
    return {phase: {what: {"all": exponent(xs, ys), "last": exponent(xs[-2:], ys[-2:])}
                    for what in ("seconds", "bytes") for ys in [[row[phase][what] for row in rows]]} for phase in PHASES.values()}


def table(found: dict) -> str:
    """The same as Markdown."""
    lines = ["<!-- written by benchmarks/growth.py -->"]
    for name, series in found["series"].items():
        lines += ["", f"**{name}**: {series['grows']}", "", "| prompts x answers x tokens | "
                  + " | ".join(f"{phase}, s | MiB" for phase in PHASES.values()) + " |", "|" + "---|" * (1 + 2 * len(PHASES))]
        lines += [f"| {row['prompts']} x {row['group']} x {row['answer']} | " + " | ".join(
            f"{row[phase]['seconds']:.3f} | {row[phase]['bytes'] / 2**20:.0f}" for phase in PHASES.values()) + " |" for row in series["points"]]
        for kind, said in (("all", "exponent, all points"), ("last", "exponent, last two")):
            cells = [series["exponents"][phase][what][kind] for phase in PHASES.values() for what in ("seconds", "bytes")]
            lines.append(f"| {said} | " + " | ".join("-" if x is None else f"{x:.2f}" for x in cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv=None) -> int:
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--point", help="prompts,answers,tokens: one point in this process")
    args.add_argument("--series", default="")
    args.add_argument("--tiny", action="store_true", help="two small points, to see that it runs")
    args.add_argument("--out", type=Path)
    args = args.parse_args(argv)
    if args.point:
        print("POINT" + json.dumps(point(*map(int, args.point.split(",")))))
        return 0
    chosen = TINY if args.tiny else {name: SERIES[name] for name in args.series.split(",") if name} or SERIES
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib")}
    found = {"machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}", "python": platform.python_version(),
             "versions": versions, "series": {}}
    for name, (points, grows) in chosen.items():
        rows = []
        for sizes in points:
            done = subprocess.run([sys.executable, __file__, "--point", ",".join(map(str, sizes))], capture_output=True, text=True,
                                  env={**os.environ, "JAX_PLATFORMS": "cpu",
                                       "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])})
            if done.returncode:
                raise RuntimeError(f"{name} {sizes}:\n{done.stdout}{done.stderr}")
            rows.append(json.loads(done.stdout.split("POINT")[1]))
            print(name, sizes, {p: {k: round(v, 3) for k, v in rows[-1][p].items()} for p in PHASES.values()}, file=sys.stderr, flush=True)
        found["series"][name] = {"grows": grows, "points": rows, "exponents": fitted(name, rows)}
    print(table(found))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
