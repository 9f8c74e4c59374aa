"""data.cache: how long training rows take to be prepared, without it, at the start that fills it, and at the next one.

    python evidence/data_cache.py

Every figure is of a process of its own: seconds of load_train, imports and tokenizer left out. Rows are those that
ship, told apart by a further column so that no two are equal: conversations with all turns trained on, texts, prompts
of RL. The batches of 50 steps are bitwise the same three times (every id, mask, column and place), and a row more than
before is never taken from the cache.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import record, table

from jaxrl.config.load import default_config, put
from jaxrl.data import Stream, load_tokenizer, load_train, resolve

CASES = {  # name -> files, options, rows
    "conversations, all turns": (("calc", "library", "lake", "guess"), {
        "run.recipe": "sft", "model.tokenizer": "jaxrl://chat/tokenizer", "data.train_turns": "all"}, 6_000),
    "texts": (("arith",), {"run.recipe": "sft", "model.tokenizer": "jaxrl://arith/tokenizer"}, 20_000),
    "prompts": (("arith",), {"model.tokenizer": "jaxrl://arith/tokenizer"}, 20_000),
}
STEPS = 50


def made(names, count: int, path: Path) -> None:
    rows = [json.loads(line) for name in names for line in Path(resolve(f"jaxrl://{name}/sft.jsonl")).read_text().splitlines()]
    with path.open("w") as out:
        for i in range(count):
            out.write(json.dumps(rows[i % len(rows)] | {"number": i, "answer": str(i)}) + "\n")


def child(options: dict) -> None:
    config = default_config()
    for name, value in options.items():
        put(config, name, value)
    tokenizer = load_tokenizer(config)
    began = time.perf_counter()
    dataset = load_train(config, tokenizer, tokenizer.eos_token_id)
    seconds = time.perf_counter() - began
    stream, digest, cursor = Stream.from_config(config, dataset), hashlib.sha256(), 0
    for _ in range(STEPS):
        rows, cursor = stream.take(cursor)
        for position, e in rows:
            digest.update(f"{position} {e.where} {e.prompt_text} {e.answer} {e.columns}".encode())
            for ids in (e.prompt_ids, e.target_ids, e.trained):
                digest.update(b"none" if ids is None else ids.tobytes())
    print(json.dumps({"seconds": seconds, "batches": digest.hexdigest(), "rows": len(dataset), "fingerprint": dataset.fingerprint}))


def started(options: dict) -> dict:
    done = subprocess.run([sys.executable, __file__, json.dumps(options)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    out, failed = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for name, (files, options, count) in CASES.items():
            path = Path(folder) / "rows.jsonl"
            made(files, count, path)
            options = options | {"data.path": [str(path)], "data.max_prompt_tokens": 64, "rollout.max_new_tokens": 256}
            cached = options | {"data.cache": f"{folder}/cache"}
            without, first, second = started(options), started(cached), started(cached)
            made(files, count + 1, path)
            more = started(cached)
            same = len({r["batches"] for r in (without, first, second)}) == len({r["fingerprint"] for r in (without, first, second)}) == 1
            if not same or more["rows"] != without["rows"] + 1:
                failed.append(name)
            out[name] = {"rows": without["rows"], "without": without["seconds"], "first": first["seconds"],
                         "second": second["seconds"], "ratio": without["seconds"] / second["seconds"], "bitwise": same}
    table(["rows", "", "without s", "first s", "second s", "times faster"],
          [[name, r["rows"], *(f"{r[k]:.2f}" for k in ("without", "first", "second")), f"{r['ratio']:.0f}"] for name, r in out.items()])
    record("data_cache", out)
    if failed:
        sys.exit(f"FAILED: {failed}")


if __name__ == "__main__":
    child(json.loads(sys.argv[1])) if len(sys.argv) > 1 else main()
