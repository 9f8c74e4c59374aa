"""A layer of experts computed in three ways: tokens per second, forward, and forward with gradients.

    python benchmarks/experts.py --json FILE      (--experts 8,16,32,64,128 --tokens 2048 --rounds 5 --tiny)

blocks: jaxrl's, sorted and padded to blocks (jaxrl/kernels/experts); ragged_dot: the same sorting around jax.lax.ragged_dot; dense:
every expert on every token, then the chosen ones. All get the same tokens, weights and routing, uniform and 4 experts to a token, so
that the products that are needed are the same for every number of experts; all compute the same function, which is checked. fp32.
They run in turn, round after round, in one process; the fastest round of each is given, since what else runs on the cores only adds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "evidence")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from common import commit, machine, table  # noqa: E402

from jaxrl.kernels.experts import experts  # noqa: E402
from jaxrl.models.feed_forward import GATED  # noqa: E402

SLOTS, SIZE, WIDTH = 4, 256, 128
GATE = GATED["silu"]


def blocks(x, ids, gates, *weights):
    return experts(x, ids, gates, *weights, activation=GATE, implementation="blocks")


def dense(x, ids, gates, *weights):
    return experts(x, ids, gates, *weights, activation=GATE, implementation="reference")


def ragged_dot(x, ids, gates, gate, up, down):
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    rows, counts = x[order // ids.shape[1]], jnp.bincount(flat, length=len(gate)).astype(jnp.int32)
    hidden = GATE(jax.lax.ragged_dot(rows, gate, counts), jax.lax.ragged_dot(rows, up, counts))
    out = jnp.zeros_like(rows).at[order].set(jax.lax.ragged_dot(hidden, down, counts), unique_indices=True)
    return jnp.sum(out.reshape(*ids.shape, -1) * gates[..., None], axis=1)


WAYS = {"blocks": blocks, "ragged_dot": ragged_dot, "dense": dense}


def arrays(count: int, tokens: int):
    """(ids, {x, gates and weights})"""
    rng = np.random.default_rng(count)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)  # noqa: E731
    ids = jnp.asarray(np.stack([rng.permutation(count)[:SLOTS] for _ in range(tokens)]), jnp.int32)
    gates = jnp.asarray(rng.dirichlet(np.ones(SLOTS), tokens), jnp.float32)
    return ids, (normal(tokens, SIZE), gates, normal(count, SIZE, WIDTH), normal(count, SIZE, WIDTH), normal(count, WIDTH, SIZE))


def programs(way):
    """{what: compiled function of (ids, arrays)}"""
    run = lambda ids, a: way(a[0], ids, *a[1:])  # noqa: E731
    return {"forward": jax.jit(run), "with gradients": jax.jit(jax.grad(lambda a, ids: jnp.sum(jnp.sin(run(ids, a)))))}


def measured(count: int, tokens: int, rounds: int) -> tuple[dict, dict]:
    """({way: {what: tokens per second, None where it does not run}}, {(way, what): why it does not}) of so many experts."""
    ids, given = arrays(count, tokens)
    made, best, results, failed = {name: programs(way) for name, way in WAYS.items()}, {}, {}, {}
    for turn in range(rounds + 1):  # the first one compiles
        for name, what in ((n, w) for n, own in made.items() for w in own if (n, w) not in failed):
            order = (ids, given) if what == "forward" else (given, ids)
            start = time.perf_counter()
            try:
                out = jax.block_until_ready(made[name][what](*order))
            except jax.errors.JaxRuntimeError as e:  # out of memory, most of all
                failed[name, what] = str(e).splitlines()[0][:200]
                continue
            took = time.perf_counter() - start
            if turn:
                best[name, what] = min(best.get((name, what), took), took)
            else:
                results[name, what] = jax.tree.leaves(out)
    compared = "blocks" if any(name == "dense" for name, _ in failed) else "dense"
    for (name, what), found in results.items():
        for a, b in zip(found, results[compared, what], strict=True):
            error = float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
            assert error < 1e-5, f"{name}, {what}: another function ({error:.1e})"
    speeds = {name: {what: tokens / best[name, what] if (name, what) in best else None for what in made[name]} for name in WAYS}
    return speeds, failed


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", default="8,16,32,64,128")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="runs in seconds, and says nothing")
    parser.add_argument("--json", default="")
    args = parser.parse_args(argv)
    counts, tokens, rounds = ([4, 8], 64, 1) if args.tiny else ([*map(int, args.experts.split(","))], args.tokens, args.rounds)
    at, found, failed = commit(), {}, {}
    for count in counts:
        found[str(count)], failed[str(count)] = measured(count, tokens, rounds)
        print(count, {n: {w: t and round(t) for w, t in own.items()} for n, own in found[str(count)].items()}, file=sys.stderr, flush=True)

    def cell(value, form):
        return "does not run" if value is None else format(value, form)

    def ratio(own, what):
        ours, theirs = own["blocks"][what], own["ragged_dot"][what]
        return cell(ours / theirs if ours and theirs else None, ".1f")

    rows = [[count, *(cell(own[n][w], ",.0f") for w in own["blocks"] for n in WAYS), *(ratio(own, w) for w in own["blocks"])]
            for count, own in found.items()]
    table(["experts", *(f"{n} {w}" for w in ("forward", "with gradients") for n in WAYS), "blocks / ragged_dot", "with gradients"], rows)
    for count, own in failed.items():
        for (name, what), why in own.items():
            print(f"{count} experts, {name} {what}: {why}")
    if args.json:
        Path(args.json).write_text(json.dumps({
            "commit": at, "machine": machine(), "device": jax.devices()[0].device_kind, "tokens": tokens, "slots": SLOTS, "size": SIZE,
            "width": WIDTH, "rounds": rounds, "tokens_per_second": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
