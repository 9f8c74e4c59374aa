"""Rows cut over mesh.cp: how even attention's work is on packed rows, and that numbers are those of one device.

Balance: lengths as in evidence/packing.py (lognormal answers, 64 prompts with 8 answers each, shared prompts), rows as they are packed for a TPU; of
each cp the pairs of query and key that the busiest device of a row computes, over the mean, rows after one another. Beside what is done
(`dealt`): tiles in turns from both ends of the row (`zigzag`), and equal pieces (`pieces`). `window`: half of the layers see 128 keys. Lengths alone
decide; no device is used.

Numbers: tests/sharding's `cut` on eight simulated devices, one update in fp32 and float64.

    python evidence/context_parallel.py            # the balance takes seconds, the numbers some 10 quiet minutes
    python evidence/context_parallel.py balance
    python evidence/context_parallel.py recorded RUN_DIR ...   # of the lengths that runs wrote (log.rollouts), added to the file
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(Path(__file__).parent), *map(str, (TESTS, TESTS / "sharding"))]

from common import RESULTS, commit, record, table  # noqa: E402
from packing import lengths  # noqa: E402
from test_sharding import CUT, on_eight, relative  # noqa: E402

from jaxrl import training  # noqa: E402
from jaxrl.training import ranks  # noqa: E402
from jaxrl.types import Sizes  # noqa: E402

CASES = ((600, 2048, 4096), (1500, 8192, 9216), (4000, 32768, 33792), (16000, 130000, 131072))  # median, longest answer, row


def positions(micro, prompts, answers):
    """([R, L] position of each token, [R, L] whether there is one), of rows before they are cut."""
    at, real = np.zeros((2, len(micro.rows), micro.row_length), np.int64)
    for r, row in enumerate(micro.rows):
        parts = []
        for block in row:
            prompt = prompts[block.sequences[0]]
            parts += [np.arange(prompt), *(prompt + np.arange(answers[i]) for i in block.sequences)]
        found = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        at[r, :len(found)], real[r, :len(found)] = found, 1
    return at, real > 0


def zigzag(length: int, count: int) -> np.ndarray:
    """Where tokens go if each device has the k-th of 2 cp equal pieces from the front and the k-th from the end."""
    owner = np.r_[np.arange(count), np.arange(count)[::-1]]
    places = np.empty(2 * count, np.int64)
    places[np.argsort(owner, kind="stable")] = np.arange(2 * count)
    piece = length // (2 * count)
    return (places[:, None] * piece + np.arange(piece)).reshape(-1)


def written(folder: Path):
    """(prompts, answers, groups) of each step of a run, in tokens; of episodes all turns are the answer."""
    from transformers import AutoTokenizer

    config = json.loads((folder / "config.json").read_text())["config"]
    tokenizer = AutoTokenizer.from_pretrained(config["model"]["tokenizer"] or config["model"]["path"])
    for file in sorted((folder / "rollouts").glob("step_*.jsonl")):
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        known = {r["prompt"]: len(tokenizer(r["prompt"], add_special_tokens=False).input_ids) for r in rows}
        yield tuple(map(np.array, ([known[r["prompt"]] for r in rows], [len(r["tokens"]) for r in rows], [r["group"] for r in rows])))


def recorded(folders: list[Path]) -> list[dict]:
    """All steps of each run, its windows none, in rows as long as its longest sequences want for so many devices, and in longer ones."""
    out = []
    for folder in folders:
        steps = list(written(folder))
        longest = max(int((p + a).max()) for p, a, _ in steps)
        for count in (2, 4):
            for row in (-(-longest // (128 * count)) * 128 * count, 2048):
                found = even(steps, row, count, (0,))
                out.append({"run": folder.name, "steps": len(steps), "longest": longest, "row": row, "cp": count, **found})
    return out


def balance(median: int, longest: int, row: int, count: int, windows, seeds=(0, 1)) -> dict:
    """Means over seeds."""
    return even([lengths(median, longest, seed) for seed in seeds], row, count, windows)


def even(batches, row: int, count: int, windows) -> dict:
    """Means over batches."""
    found = []
    for prompts, answers, groups in batches:
        shapes = training.row_shapes((row,), int((prompts + answers).max()), row, 1, 1, count, windows)
        micros = training.make_layout(Sizes(prompts, answers, groups, groups), shapes).minibatches[0].microbatches
        pairs = np.concatenate([ranks.count_keys(*positions(m, prompts, answers), windows) for m in micros])
        whole = np.arange(row)[None].repeat(len(pairs), 0)
        found.append([ranks.imbalance(pairs, places, count) for places in
                      (ranks.assign_tokens(pairs, count), zigzag(row, count)[None].repeat(len(pairs), 0), whole)])
    return dict(zip(("dealt", "zigzag", "pieces"), np.mean(found, axis=0).round(4).tolist(), strict=True))


def numbers() -> list[dict]:
    """The largest relative difference from one device, by mesh."""
    with tempfile.TemporaryDirectory(prefix="cut") as folder:
        _, stderr = on_eight("cut", folder, *CUT)
        rows = [{"rematerialisations": stderr.count("rematerialization")}]
        for mesh in CUT[1:]:
            row = {"mesh": mesh}
            for kind, name in (("", "fp32"), (".float64", "float64")):
                whole, other = (dict(np.load(f"{folder}/{m}{kind}.npz")) for m in (CUT[0], mesh))
                of = {k: float(relative(other[k], x)) for k, x in whole.items() if k != "routes" and np.linalg.norm(x)}
                row |= {name: max(of.values()), f"{name}_logprob": of["logprob"], f"{name}_loss": of["metric:loss"],
                        f"{name}_routes_equal": bool((other["routes"] == whole["routes"]).all())}
            rows.append(row)
    return rows


def main() -> int:
    at = commit()
    if sys.argv[1:2] == ["recorded"]:
        rows = recorded([Path(folder) for folder in sys.argv[2:]])
        table(list(rows[0]), [list(row.values()) for row in rows])
        known = json.loads((RESULTS / "context_parallel.json").read_text())  # of its own commit
        record("context_parallel", known["results"] | {"recorded": {"commit": at, "rows": rows}}, known["commit"])
        return int(not all(row["dealt"] <= 1.05 for row in rows if row["row"] // row["cp"] >= 1024))
    rows = [{"median": median, "longest": longest, "row": row, "cp": count, "window": len(windows) > 1,
             **balance(median, longest, row, count, windows)}
            for median, longest, row in CASES for count in (2, 4, 8) for windows in ((0,), (0, 128))]
    table(list(rows[0]), [list(row.values()) for row in rows])
    good = all(row["dealt"] <= 1.05 for row in rows if row["row"] // row["cp"] >= 1024)
    result = {"balance": rows}
    if sys.argv[1:] != ["balance"]:
        first, *meshes = result["numbers"] = numbers()
        table(list(meshes[0]), [list(row.values()) for row in meshes])
        good &= not first["rematerialisations"] and all(r["fp32"] < 1e-5 and r["float64"] < 1e-12 for r in meshes)
        record("context_parallel", result, at)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
