"""Eight pairs of runs that differ in one thing: what `python -m jaxrl.diff` says of each.

python evidence/diff.py          (some two minutes)

A is always the same tiny job of three steps; B is the same but for one thing. Exits with 1 where the boundary named is
not the one that this thing acts on first.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from common import record, table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

SAME = "nothing: equal within rounding"
PAIRS = {  # what differs -> options of B, or an edit of the folder they share; the boundary where the two should part
    "nothing": ((), SAME),
    "the seed": (("run.seed=1",), "prompts"),
    "the data": (("data.max_rows=12",), "prompts"),
    "the sampling temperature": (("rollout.temperature=0.9",), "completions"),
    "the code of the reward": (("reward.functions={folder}/other.py:digits",), "code of the rewards"),
    "the bound of advantages": (("algorithm.advantage_high=0.2",), "advantages"),
    "the clip of gradients": (("optimizer.max_grad_norm=0.05",), "the sampler's log-probs"),
    "the learning rate": (("optimizer.lr=0.02",), "gradient and learning rate"),
    "the packing": (("train.tokens_per_microbatch=1024",), SAME),
}


def main() -> int:
    from helpers.run_tools import run

    from jaxrl import diff

    rows, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        plain = (ROOT / "tests" / "helpers" / "tiny_job.py").read_text("utf-8")
        Path(folder, "other.py").write_text(plain.replace("max(len(completion), 1)", "max(len(completion), 2)"), "utf-8")
        common = ("train.steps=3", "eval.every_steps=0", "eval.sets=", "checkpoint.every_steps=0", "checkpoint.at_end=False")
        for name, (options, _) in {"A": ((), ""), **PAIRS}.items():
            status, said = run(Path(folder, name), *common, *(o.format(folder=folder) for o in options))
            if status:
                sys.exit(f"{name}: {said[-2000:]}")
        for name, (_, wanted) in PAIRS.items():
            a, b = diff.Run(Path(folder, "A")), diff.Run(Path(folder, name))
            where = diff.first_divergence(diff.compare(a, b))
            found = where[0] if where else SAME
            place = where[1].parts[1] if where else "; ".join(
                f"{n} up to {f.largest:.1e}" for n, f in diff.compare(a, b).items() if f.first) or "equal bit by bit"
            options = [text.replace(f"{ROOT}/", "").replace(f"{folder}/", "") for text in diff.differing_options(a, b)]
            rows.append({"differs": name, "options": options, "parts_at": found, "first": place, "wanted": wanted})
            failed += [name] * (found != wanted)
    table(["B differs in", "the runs part at", "first difference"], [[r["differs"], r["parts_at"], r["first"]] for r in rows])
    record("diff", {"command": "python evidence/diff.py", "pairs": rows, "failed": failed})
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
