"""Seconds per turn of conversations that go on in their slots, and of the same ones prefilled whole at every turn.

    python benchmarks/parked.py [--history 2048] [--new 64] [--out benchmarks/results/parked.json]      # two minutes on two cores

The embedded sampler with random weights; `--conversations` of them at once, all in step. A turn is from `submit` to the last result:
`--new` tokens behind all that came before, then an answer of `--answer` tokens, always so long. The first prompt, of `--history`
tokens, and the first further turn, which compiles, are not counted; the figure is the median of the other turns. Both ways give the
same tokens but where two of them tie within rounding; how many are the same is told. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
SIZES = {  # (hidden size, MLP, layers, query heads, key-value heads)
    "0.3 M": (96, 256, 3, 3, 3),
    "7 M": (256, 768, 8, 4, 2),
}


def model_of(size: str):
    """(model, HF config) of a row of SIZES."""
    import jax.numpy as jnp

    from jaxrl import models

    hidden, mlp, layers, heads, groups = SIZES[size]
    hf = {"model_type": "qwen3", "vocab_size": 512, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
          "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": hidden // heads, "max_position_embeddings": 1 << 16,
          "tie_word_embeddings": True}
    return models.build(hf, compute_dtype=jnp.float32, scan_layers=False), hf


def engine_row(size: str, args):
    """The embedded sampler for episodes of so long conversations, under random weights."""
    import jax

    from jaxrl.config.load import default_config
    from jaxrl.rollout import EngineContext, make_engine

    model, hf = model_of(size)
    c = default_config()
    c.env.function, c.data.max_prompt_tokens, c.rollout.max_new_tokens = "calc", args.history, args.answer
    c.rollout.slots, c.rollout.group_size = args.conversations, 1
    c.train.max_sequence_tokens = args.history + args.answer + (args.turns + 1) * (args.new + args.answer)
    made = make_engine(EngineContext(c, model, None, None, (), hf))
    made.publish(model.init(jax.random.key(0)), 0)
    return made


def talk(engine, args, keep: bool) -> tuple[list[float], list]:
    """(seconds of every turn behind the first, results of the last) of the conversations."""
    import numpy as np

    from jaxrl.rollout import Request, SamplingParams, generate

    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(1, 512, n).astype(np.int32)  # noqa: E731
    sampling = SamplingParams(max_new_tokens=args.answer, min_new_tokens=args.answer)
    history, seconds, results = [draw(args.history) for _ in range(args.conversations)], [], []
    for turn in range(args.turns + 2):
        asked = [Request(f"{keep}.{i}.{turn}", ids, sampling, seed=1000 * turn + i, keep=keep,
                         after=f"{keep}.{i}.{turn - 1}" if keep and turn else "") for i, ids in enumerate(history)]
        began = time.perf_counter()
        results = generate(engine, asked, 3600.0)
        seconds.append(time.perf_counter() - began)
        history = [np.concatenate([ids, r.tokens, draw(args.new)]) for ids, r in zip(history, results, strict=True)]
    engine.abort()
    return seconds[2:], results


def measured(size: str, args) -> dict:
    """Seconds of a turn both ways, and the prompt tokens that one ran."""
    import numpy as np

    engine, row = engine_row(size, args), {"parameters": model_of(size)[0].num_parameters}
    last = {}
    for name, keep, counter in (("prefilled", False, "prefilled_tokens"), ("parked", True, "extended_tokens")):
        before = engine.counters()[counter]
        seconds, last[name] = talk(engine, args, keep)
        first = 0 if keep else args.history * args.conversations
        row[name] = {"seconds": float(np.median(seconds)), "turns": seconds,
                     "tokens": (engine.counters()[counter] - before - first) // (args.turns + 1)}
    row["same"] = float(np.mean([np.mean(a.tokens == b.tokens) for a, b in zip(*last.values(), strict=True)]))
    row["programs"] = engine.health().compiled
    engine.close()
    return row


def table(rows: dict, args) -> str:
    """The same as Markdown."""
    lines = ["<!-- written by benchmarks/parked.py -->",
             f"{args.conversations} conversations of {args.history} tokens, {args.new} new ones and an answer of {args.answer} per turn",
             "", "| parameters | prefilled, s per turn | parked, s per turn | times | prompt tokens run per turn | same tokens |",
             "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        a, b = row["prefilled"], row["parked"]
        lines.append(f"| {name} | {a['seconds']:.3f} | {b['seconds']:.3f} | {a['seconds'] / b['seconds']:.1f} | "
                     f"{a['tokens']} and {b['tokens']} | {row['same']:.1%} |")
    return "\n".join(lines) + "\n"


def main(argv=None) -> int:
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("history", 2048), ("new", 64), ("answer", 32), ("turns", 5), ("conversations", 8)):
        args.add_argument(f"--{name}", type=int, default=value)
    args.add_argument("--sizes", default=",".join(SIZES))
    args.add_argument("--out", type=Path)
    args = args.parse_args(argv)
    rows = {name: measured(name, args) for name in args.sizes.split(",")}
    print(table(rows, args))
    if args.out:
        versions = {name: metadata.version(name) for name in ("jax", "jaxlib")}
        args.out.write_text(json.dumps({"machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}",
                                        "python": platform.python_version(), "versions": versions, "rows": rows}, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(table(rows, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
