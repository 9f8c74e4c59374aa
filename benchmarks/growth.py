"""Time and memory as the work of a step grows, with fitted exponents.

    python benchmarks/growth.py --out benchmarks/results/growth.json      # and growth.md beside it; about twenty minutes on two cores

Steps of the job itself (GRPO on a model of 0.5 M parameters, random weights, answers of a fixed length, old log-probs scored), every
point in a process of its own. Seven series: `tokens`, the prompts of a step x1 to x8; `length`, of an answer, 256 to 8192; `group`,
answers to a prompt, 2 to 64; `turns` of an episode, 1 to 16, each of 32 tokens with a short reply of the environment behind it;
`adapters` trained side by side on the same rows, 1 to 16, each of rank 8; `experts` of a layer, 4 to 64, two of which a token goes
through; `hosts`, 1 to 4 processes on this machine, of one device each, that share the same rows, which is what being several costs
and not what more machines gain. Seconds: the fastest of a phase's steps after the first, which compiles. Memory:
the highest resident set within a phase of those steps, less what the process held before its first step; the compiled programs stay
in it, as something that all points have; of `hosts`, of the first process. An exponent is the slope of a straight line through
(log x, log y): 1 = linear; where y is mostly what every step costs, below 1. Attention's share grows with
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
sys.path[:0] = [str(ROOT), str(ROOT / "evidence")]
from common import commit  # noqa: E402

PHASES = {"rollout": "generation", "score": "scoring", "update": "update"}
MODEL = {"model_type": "qwen2", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16384, "tie_word_embeddings": True}
EXPERTS = {**MODEL, "model_type": "qwen3_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
PLAIN = {"prompts": 16, "group": 8, "answer": 64}
SERIES = {  # name -> (what of a point grows, points, how that is called)
    "tokens": ("tokens", [{**PLAIN, "prompts": 8 * n} for n in (1, 2, 4, 8)], "tokens of a step"),
    "length": ("answer", [{"prompts": 1, "group": 4, "answer": n} for n in (256, 512, 1024, 2048, 4096, 8192)], "tokens of an answer"),
    "group": ("group", [{"prompts": 4, "group": n, "answer": 64} for n in (2, 4, 8, 16, 32, 64)], "answers to a prompt"),
    "turns": ("turns", [{"prompts": 8, "group": 4, "answer": 32, "turns": n} for n in (1, 2, 4, 8, 16)], "turns of an episode"),
    "adapters": ("adapters", [{**PLAIN, "adapters": n} for n in (1, 2, 4, 8, 16)], "adapters, of the same rows"),
    "experts": ("experts", [{**PLAIN, "experts": n} for n in (4, 8, 16, 32, 64)], "experts of a layer"),
    "hosts": ("hosts", [{**PLAIN, "hosts": n} for n in (1, 2, 4)], "processes of one device each for the same work"),
}
TINY = {name: (SERIES[name][0], points, SERIES[name][2]) for name, points in {
    "tokens": [{"prompts": 2 * n, "group": 2, "answer": 8} for n in (1, 2)],
    "turns": [{"prompts": 2, "group": 2, "answer": 8, "turns": n} for n in (1, 2)],
    "adapters": [{"prompts": 2, "group": 2, "answer": 8, "adapters": 2}],
    "experts": [{"prompts": 2, "group": 2, "answer": 8, "experts": 4}],
    "hosts": [{"prompts": 2, "group": 2, "answer": 8, "hosts": 2}]}.items()}
REPLY = 16  # tokens of a reply with what the template puts around it, at most


async def episode(task, chat):
    """Says the same until its turns are over, whatever is answered; members of a group have rewards that differ."""
    said = [(await chat.send("guess")).text for _ in range(task.user["turns"])]
    return {"env": float(sum("".join(said).encode()) % 2)}


def config_of(work: dict, folder: str, steps: int):
    """The job of one point."""
    from jaxrl.config.load import default_config

    c, turns, adapters = default_config(), work.get("turns", 0), work.get("adapters", 0)
    experts = work.get("experts", 0)
    c.model.init, c.model.config, c.model.tokenizer = "random", MODEL, "jaxrl://arith/tokenizer"
    if experts:
        c.model.config = {**EXPERTS, "num_experts": experts}
    c.data.path, c.data.prompts_per_step, c.data.max_prompt_tokens = ("jaxrl://arith/train.jsonl",), work["prompts"], 40
    c.rollout.group_size, c.rollout.max_new_tokens, c.rollout.min_new_tokens = work["group"], work["answer"], work["answer"]
    c.algorithm.old_logprobs = "recompute"
    c.reward.functions, c.reward.workers, c.train.steps = ("boxed",), 1, steps
    if turns:
        c.model.tokenizer, c.data.path, c.env.parser = "jaxrl://chat/tokenizer", ("jaxrl://guess/train.jsonl",), "pythonic"
        c.reward.functions, c.data.answer_column = (), ""
        c.env.function, c.env.max_turns, c.env.workers = f"{Path(__file__).resolve()}:episode", turns, 1
        c.user.turns, c.train.max_sequence_tokens = turns, (turns > 1) * (40 + turns * (work["answer"] + REPLY))
    if adapters:
        names = [f"a{k}" for k in range(adapters)]
        c.data.path, c.lora.rank, c.optimizer.lr = (), 8, 1e-4
        c.data.sources = {name: {"path": "jaxrl://arith/train.jsonl", "rewards": ("boxed",)} for name in names}
        c.lora.adapters = {name: {"sources": (name,)} for name in names}
    if "hosts" in work:
        c.mesh.fsdp = work["hosts"]
    c.run.dir, c.log.console, c.log.tensorboard, c.log.level = folder, "off", False, "error"
    c.checkpoint.every_steps, c.checkpoint.at_end, c.checkpoint.export_at_end = 0, False, False
    return c


def resident(name: str) -> int:
    """Bytes of a line of /proc/self/status: VmRSS now, VmHWM at its highest since it was last cleared."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def point(work: dict, folder: str) -> dict:
    """Seconds and bytes by phase of one point, measured in this process; empty where another one tells them."""
    import jaxrl
    from jaxrl.processes.group import peers
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
    jaxrl.train(config_of(work, folder, 4 if work["answer"] <= 1024 else 3))
    if peers().index:
        return {}
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "rollout/tokens" in line]
    sampled = work["prompts"] * work["group"] * work["answer"] * work.get("turns", 1)
    assert all(row["rollout/tokens"] == sampled and row.get("env/turns", 1) == work.get("turns", 1) for row in rows), rows
    out = {**work, "tokens": int(rows[-1]["rollout/tokens"])}
    for phase, name in PHASES.items():
        out[name] = {"seconds": min(row["time"][phase] for row in rows[1:]), "bytes": peaks[phase] - now["before"]}
    return out


def exponent(xs, ys) -> float | None:
    """Slope of the straight line through (log x, log y) by least squares; None where a y is not positive, and of one point."""
    import numpy as np

    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0]) if min(ys) > 0 and len(xs) > 1 else None


def fitted(name: str, rows: list[dict]) -> dict:
    """Exponents by phase: of all points, and between the last two."""
    xs = [row[SERIES[name][0]] for row in rows]
    return {phase: {what: {"all": exponent(xs, ys), "last": exponent(xs[-2:], ys[-2:])}
                    for what in ("seconds", "bytes") for ys in [[row[phase][what] for row in rows]]} for phase in PHASES.values()}


def table(found: dict) -> str:
    """The same as Markdown."""
    lines = ["<!-- written by benchmarks/growth.py -->"]
    for name, series in found["series"].items():
        grows = SERIES[name][0]
        lines += ["", f"**{name}**: {series['grows']}", "", f"| prompts x answers x tokens{'' if grows in (*PLAIN, 'tokens') else ', ' + grows} | "
                  + " | ".join(f"{phase}, s | MiB" for phase in PHASES.values()) + " |", "|" + "---|" * (1 + 2 * len(PHASES))]
        lines += [f"| {row['prompts']} x {row['group']} x {row['answer']}{'' if grows in (*PLAIN, 'tokens') else f', {row[grows]}'} | " + " | ".join(
            f"{row[phase]['seconds']:.3f} | {row[phase]['bytes'] / 2**20:.0f}" for phase in PHASES.values()) + " |" for row in series["points"]]
        for kind, said in (("all", "exponent, all points"), ("last", "exponent, last two")):
            cells = [series["exponents"][phase][what][kind] for phase in PHASES.values() for what in ("seconds", "bytes")]
            lines.append(f"| {said} | " + " | ".join("-" if x is None else f"{x:.2f}" for x in cells) + " |")
    return "\n".join(lines) + "\n"


def measured(work: dict) -> dict:
    """One point in a process of its own, or in several."""
    hosts = work.get("hosts", 0)
    with tempfile.TemporaryDirectory() as folder:
        alone = [sys.executable, __file__, "--point", json.dumps(work), "--folder", folder]
        launcher = [sys.executable, "-m", "jaxrl.launch", f"--processes={hosts}", "--devices=1", "--", *alone[1:]]
        done = subprocess.run(launcher if hosts else alone, capture_output=True, text=True,
                              env={**os.environ, "JAX_PLATFORMS": "cpu",
                                   "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])})
        if done.returncode:
            raise RuntimeError(f"{work}:\n{done.stdout}{done.stderr}")
        found = json.loads((Path(folder) / "point.json").read_text())
    print(work, {p: {k: round(v, 3) for k, v in found[p].items()} for p in PHASES.values()}, file=sys.stderr, flush=True)
    return found


def main(argv=None) -> int:
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--point", help="JSON: one point in this process")
    args.add_argument("--folder", help="of the run of that point")
    args.add_argument("--series", default="", help="of these alone, added to what --out holds already")
    args.add_argument("--tiny", action="store_true", help="two small points of each, to see that it runs")
    args.add_argument("--out", type=Path)
    args = args.parse_args(argv)
    if args.point:
        if found := point(json.loads(args.point), args.folder):
            (Path(args.folder) / "point.json").write_text(json.dumps(found))
        return 0
    of = TINY if args.tiny else SERIES
    chosen = {name: of[name] for name in args.series.split(",") if name} or of
    at, versions = commit(), {name: metadata.version(name) for name in ("jax", "jaxlib")}
    before = json.loads(args.out.read_text())["series"] if args.series and args.out and args.out.exists() else {}
    found = {"machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}", "python": platform.python_version(),
             "versions": versions, "series": before}
    for name, (_, points, grows) in chosen.items():
        rows = [measured(work) for work in points]
        found["series"][name] = {"grows": grows, "commit": at, "points": rows, "exponents": fitted(name, rows)}
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n")
            args.out.with_suffix(".md").write_text(table(found))
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
