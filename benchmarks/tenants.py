"""What several runs of the training service cost together: seconds a token against one run with the same tokens.

    python benchmarks/tenants.py [--hidden 256] [--out benchmarks/results/tenants.json]      # five minutes on two cores

The trainer of `jaxrl serve tinker` without HTTP: a random model, adapters of rank 16 on every linear map, data of mixed lengths. Each
measurement is forward_backward and optim_step of all tokens: `one`, one run in one request; `together`, eight runs with an eighth of
the data each, in one pass; `apart`, the same eight requests one after the other. The three are measured in turn in one process, a few
rounds; figures are medians of the rounds, ratios of those of the same round. Three amounts of data: `large`, 64 data of up to 500
tokens; `small`, 8 of them; `short`, 64 of up to 60. Another process on the machine slows all three; the ratios of processor time
("cpu") suffer less from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "evidence")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax  # noqa: E402
import numpy as np  # noqa: E402
from common import commit, machine  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jaxrl import sharding, training  # noqa: E402
from jaxrl.models import build  # noqa: E402
from jaxrl.models.adapters import Adapter, Target  # noqa: E402
from jaxrl.models.adapters.selection import linears  # noqa: E402
from jaxrl.models.parameters import flattened  # noqa: E402
from jaxrl.service import bodies  # noqa: E402
from jaxrl.service.trainer import AdamSettings, LoraOptions, Trainer  # noqa: E402
from jaxrl.service.wire import Datum  # noqa: E402

RUNS, RANK, LONGEST, VOCAB = 8, 16, 512, 1024
AMOUNTS = {"large": (64, 500), "small": (8, 500), "short": (64, 60)}  # data, most tokens of one


def make_trainer(hidden: int, layers: int) -> Trainer:
    """Returns a trainer of RUNS together on random weights."""
    base = build({"model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 11 * hidden // 4,
                  "num_hidden_layers": layers, "num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64,
                  "max_position_embeddings": LONGEST, "tie_word_embeddings": True},
                 compute_dtype=np.float32, scan_layers=True)
    model = dataclasses.replace(base, adapter=Adapter(tuple(Target(name, RANK, 1.0) for name in linears(base))))
    mesh = sharding.make_mesh({"dp": 1, "fsdp": 1, "tp": 1, "cp": 1, "ep": 1}, jax.devices()[:1])
    jax.set_mesh(mesh)
    everywhere = NamedSharding(mesh, P())
    names = {"/".join(entry.path) for entry in model.entries}
    shapes = training.row_shapes((LONGEST // 4, LONGEST), LONGEST, 8 * LONGEST, 1)
    params = jax.device_put(flattened(jax.jit(base.init)(jax.random.key(0))), everywhere)
    return Trainer(model, params, dict.fromkeys(names, everywhere), everywhere, shapes,
                   functools.partial(jax.device_put, device=everywhere), together=RUNS)


def make_batches(count: int, longest: int) -> list:
    """Returns RUNS requests and, last, one with the data of all of them."""
    rng, rows = np.random.default_rng(0), []
    for n in rng.integers(longest // 4, longest, count):
        ids = rng.integers(3, VOCAB, n + 1)
        rows.append(Datum(ids[:-1].astype(np.int32), {"target_tokens": ids[1:]}))
    parts = [rows[k::RUNS] for k in range(RUNS)] + [rows]
    return [bodies.batch(part, "cross_entropy", {}, LONGEST, VOCAB) for part in parts]


def measure(trainer: Trainer, batches: list, rounds: int) -> dict:
    """Returns seconds of each way, medians over rounds, and the medians of their ratios to `one`."""
    runs, settings = [trainer.start(LoraOptions(RANK, seed=k)) for k in range(RUNS)], AdamSettings(1e-4)

    def step(some):
        for run in some:
            trainer.optim_step(run, settings)
        jax.block_until_ready([run.state.trainable for run in some])

    def one():
        trainer.forward_backward(runs[0], batches[-1], True)
        step(runs[:1])

    def together():
        trainer.forward_backward_together(list(zip(runs, batches[:-1], strict=True)), True)
        step(runs)

    def apart():
        for run, batch in zip(runs, batches[:-1], strict=True):
            trainer.forward_backward(run, batch, True)
        step(runs)

    ways, seconds, processor = {"one": one, "together": together, "apart": apart}, {}, {}
    for k in range(rounds + 1):
        for name, way in ways.items():
            begin, used = time.perf_counter(), time.process_time()
            way()
            if k:  # the first one compiles
                seconds.setdefault(name, []).append(time.perf_counter() - begin)
                processor.setdefault(name, []).append(time.process_time() - used)
    found = {name: float(np.median(times)) for name, times in seconds.items()}
    ratios = {f"{name}{kind}": float(np.median(np.array(times[name]) / np.array(times["one"])))
              for kind, times in (("", seconds), (", cpu", processor)) for name in ("together", "apart")}
    tokens = sum(len(x) for x in batches[-1].tokens)
    return {"tokens": tokens, "seconds": found, "processor seconds": {name: float(np.median(times)) for name, times in processor.items()},
            "ratios": ratios, "rounds": rounds}


def main() -> None:
    """Prints a table, and writes the figures if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--amounts", default=",".join(AMOUNTS))
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    trainer, load, rows = make_trainer(options.hidden, options.layers), os.getloadavg()[0], {}
    names = ("data", "tokens", "one run, s", "8 together, s", "8 apart, s",
             *(f"{way} / one{kind}" for kind in ("", ", cpu") for way in ("together", "apart")))
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    for name in options.amounts.split(","):
        rows[name] = found = measure(trainer, make_batches(*AMOUNTS[name]), options.rounds)
        print(f"| {name} | {found['tokens']} | " + " | ".join(f"{x:.3f}" for x in found["seconds"].values()) + " | "
              + " | ".join(f"{x:.2f}" for x in found["ratios"].values()) + " |", flush=True)
    if options.out:
        what = {"commit": commit(), **machine(), "load before": load, "hidden": options.hidden, "layers": options.layers, "rows": rows}
        Path(options.out).write_text(json.dumps(what, indent=1) + "\n")


if __name__ == "__main__":
    main()
