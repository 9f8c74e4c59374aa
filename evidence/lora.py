"""Adapters: what they reach on the embedded task, what they hold and cost, and that the base stays what it was.

python evidence/lora.py                     (three seeds, and the rest: about 20 minutes on two cores)
python evidence/lora.py --only learning --seeds 0 --trainings "rank 8,rank 1"
python evidence/lora.py --only w2|base

What is run takes its place in evidence/results/lora.json, with its commit and the load that the machine had before; the rest stays.

learning   configs/lora.py at rank 8 and rank 1 beside configs/grpo.py, all from one warm start of each seed: held-out accuracy,
           bytes of the state (parameters, moments, frozen base), seconds of an update.
w2         The update of benchmarks/peers' W2 (39.3 M parameters, 16 sequences of 512 tokens, fp32) with r=16 on every linear map
           beside full training, each in a process of its own: bytes of the state and of the compiled programs (the compiler's count),
           peak resident memory, seconds of an update (best of three).
base       After updates of the adapters, the scores with them switched off are bitwise those of a fresh model without adapters;
           after 1,000 publishes, each of other adapters, the base's digest is what it was.

Exits with 1 where a bound is missed. Without full training the bounds of `learning` take its accuracy from evidence/results/quickstart.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import RESULTS, commit, record, table

ROOT = Path(__file__).resolve().parent.parent
PUBLISHES = 1000
BOUNDS = {"points below full training, rank 8": 2.0, "share of the state, rank 8": 0.40, "share of the state, W2": 0.30,
          "share of the memory of state and update, W2": 0.30, "share of the peak resident memory, W2": 0.30, "time of an update, W2": 0.8,
          "time of an update": 1.05}


# ---- the embedded task


def learning(seeds, trainings) -> list[dict]:
    """The first of a seed's trainings makes its warm start."""
    from quickstart import launch

    known = {"full": ("configs/grpo.py",), "rank 8": ("configs/lora.py",), "rank 1": ("configs/lora.py", "lora.rank=1")}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            start = ()
            for name in trainings:
                config, *more = known[name]
                run_dir = Path(folder) / f"{seed}_{name.replace(' ', '')}"
                done = launch(sys.executable, ROOT, run_dir, f"run.seed={seed}", *start, *more, config=config)
                start = start or (f"model.path={run_dir / 'warm_start' / 'export'}", "run.warm_start=")
                lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
                update = [line["time"]["update"] for line in lines if line.get("time", {}).get("update")]
                rows.append({"seed": seed, "training": name, "before": done["summary"]["eval_before"]["accuracy"],
                             "after": done["summary"]["eval_after"]["accuracy"], "state_bytes": state_bytes(run_dir),
                             "update_s": float(np.median(update[2:])), "wall_s": done["wall_s"], "processor_s": done["processor_s"]})
                print(rows[-1], flush=True)
    return rows


def state_bytes(run_dir) -> int:
    """Parameters and optimizer state as the run held them, the frozen base included, counted from its config."""
    from jaxrl.config.load import default_config, put
    from jaxrl.config.schema import options

    asked, c = json.loads((Path(run_dir) / "config.json").read_text()), default_config()
    asked = asked.get("config", asked)
    for name in options():
        node = asked
        for part in name.split("."):
            node = node[part]
        put(c, name, tuple(node) if isinstance(node, list) else node)
    return size(policy_of(c)[1].abstract_state)


def size(state) -> int:
    import jax

    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves((state.trainable, state.frozen, state.opt_state)))


# ---- one policy


def policy_of(c):
    """(job, policy whose state is not made yet, algorithm)."""
    from jaxrl.resolve.spec import resolve
    from jaxrl.rl.roles import Roles
    from jaxrl.roles import parameters
    from jaxrl.run import setup

    job = setup.open_job(resolve(c))
    roles = Roles(job, 100)
    policy = roles.policy
    policy.abstract()
    policy.abstract_state = parameters.abstract_state(job, policy.optimizer)
    return job, policy, roles


def config_of(hf: dict, rank: int, longest=(256, 256)):
    from jaxrl.config.load import default_config

    c = default_config()
    c.model.init, c.model.tokenizer, c.data.path = "random", "jaxrl://arith/tokenizer", ("none.jsonl",)
    c.model.config.update(hf)
    c.data.max_prompt_tokens, c.rollout.max_new_tokens = longest
    c.rollout.engine, c.train.compute_dtype, c.lora.rank = "jax", "fp32", rank
    return c


def batches(job, policy, sequences: int, prompt: int, answer: int):
    """Packed microbatches of random tokens, one answer to a prompt."""
    from jaxrl import training
    from jaxrl.types import Trajectories

    rng, length = np.random.default_rng(0), prompt + answer
    total, n = sequences * length, sequences
    mask = np.tile(np.arange(length) >= prompt, n)
    traj = Trajectories(
        tokens=rng.integers(3, job.model.config.vocab_size, total).astype(np.int32), offsets=np.arange(n + 1) * length, loss_mask=mask,
        logprobs=np.zeros(total, np.float32), versions=np.zeros(total, np.int32), prompt_lengths=np.full(n, prompt, np.int32),
        group=np.arange(n), sample=np.zeros(n, np.int32), seed=np.zeros(n, np.uint32), finish=np.zeros(n, np.int8))
    layout = training.make_layout(traj.sizes, job.row_shapes)
    weights = training.loss_weights(traj, np.arange(n), "token_mean")
    columns = {"advantage": rng.normal(size=total).astype(np.float32), "behaviour": np.zeros(total, np.float32)}
    packed = [policy.put(training.pack(traj, m, columns, weights)) for m in layout.minibatches[0].microbatches]
    return traj, layout, packed


# ---- W2


def w2_one(rank: int) -> dict:
    """In a process of its own."""
    import jax

    c = config_of(dict(model_type="qwen2", vocab_size=32768, hidden_size=512, intermediate_size=1408, num_hidden_layers=8,
                       num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=1024), rank)
    job, policy, _ = policy_of(c)
    policy.start(None)
    _, _, packed = batches(job, policy, 16, 256, 256)
    state, seconds = policy.state, []
    empty, accumulate, apply = policy.program.compiled(state)
    grads, metrics = jax.eval_shape(empty, state.trainable, state.frozen, packed[0])
    from jaxrl.training import microbatches_per_call

    together = tuple(packed[:microbatches_per_call(state)])
    together += together[-1:] * (microbatches_per_call(state) - len(together))
    lowered = {"update": accumulate.lower(state.trainable, state.frozen, state.stats, grads, metrics, together, 1),
               "apply": apply.lower(state, grads, metrics)}
    programs = {name: program.compile().memory_analysis() for name, program in lowered.items()}
    peak = {name: m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes for name, m in programs.items()}
    moments = sum(x.nbytes for x in jax.tree.leaves(policy.state.opt_state))
    for _ in range(4):
        started = time.monotonic()
        jax.block_until_ready(policy.update(iter(packed)))
        seconds.append(time.monotonic() - started)
    return {"rank": rank, "parameters": job.model.base.num_parameters, "adapters": job.model.num_parameters - job.model.base.num_parameters,
            "state_bytes": size(policy.abstract_state),
            "update_bytes": peak["update"] + moments, "temporary_bytes": programs["update"].temp_size_in_bytes, "apply_bytes": peak["apply"],
            "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "update_s": min(seconds[1:])}


def w2() -> list[dict]:
    rows = []
    for rank in (0, 16):
        out = subprocess.run([sys.executable, __file__, "--w2", str(rank)], capture_output=True, text=True)
        if out.returncode:
            raise SystemExit(out.stderr[-3000:])
        rows.append(json.loads(out.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    return rows


# ---- the base


def base() -> dict:
    """Twenty updates, then a thousand publishes into the embedded sampler's copy."""
    import jax

    from jaxrl.roles import parameters
    from jaxrl.roles.role import policy_params
    from jaxrl.rollout import EngineContext, make_engine

    hf = dict(model_type="qwen2", vocab_size=192, hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
              num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=256)
    c = config_of(hf, 8, (40, 72))
    c.algorithm.kl.coef, c.optimizer.lr, c.optimizer.warmup_steps = 0.01, 2e-3, 0
    job, policy, algorithm = policy_of(c)
    policy.start(None)
    algorithm.reference.start(None, None)
    plain = config_of(hf, 0, (40, 72))
    _, fresh, _ = policy_of(plain)
    fresh.start(None)
    traj, layout, packed = batches(job, policy, 32, 30, 60)
    packed = [b.replace(columns={**b.columns, "ref": b.columns["behaviour"]}) for b in packed]
    want, digest = fresh.score(traj, layout), policy.base_digest
    for _ in range(20):
        policy.update(iter(packed))
    off, on = algorithm.reference.score(traj, layout), policy.score(traj, layout)
    engine = make_engine(EngineContext(job.config, parameters.engine_model(job), job.tokenizer, job.mesh, job.eos_ids, job.hf_config))
    started = time.monotonic()
    for i in range(PUBLISHES):
        state = policy.state
        policy.state = state.replace(trainable=jax.tree.map(lambda x: x + 1e-4, state.trainable))
        engine.publish(policy.weights(), i)
    seconds = (time.monotonic() - started) / PUBLISHES
    last = parameters.merge_adapters(job, policy_params(policy.state.trainable, policy.state.frozen))
    drift = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in
                zip(jax.tree.leaves(engine._params), jax.tree.leaves(last), strict=True))
    engine.close()
    return {"off_equals_fresh_bitwise": bool(np.array_equal(off, want)), "on_differs_by": float(np.abs(on - want).max()),
            "publishes": PUBLISHES, "digest_unchanged": bool(np.array_equal(parameters.base_digest(policy.state.frozen), digest)),
            "engine_differs_from_merge": drift, "publish_s": seconds}


def verdict(results: dict) -> dict[str, dict]:
    out = {}
    if rows := results.get("learning"):
        of = lambda name, what: np.mean([r[what] for r in rows if r["training"] == name])  # noqa: E731
        seeds = {r["seed"] for r in rows if r["training"] == "rank 8"}
        full = {r["seed"]: r["after"] for r in rows if r["training"] == "full"}
        full = {r["seed"]: r["after"] for r in json.loads((RESULTS / "quickstart.json").read_text())["results"]["runs"]} | full
        if seeds:
            out["points below full training, rank 8"] = 100 * (np.mean([full[s] for s in seeds]) - of("rank 8", "after"))
        if seeds and any(r["training"] == "full" for r in rows):
            out["share of the state, rank 8"] = of("rank 8", "state_bytes") / of("full", "state_bytes")
            out["time of an update"] = of("rank 8", "update_s") / of("full", "update_s")
    if rows := results.get("w2"):
        for name, what in (("share of the state, W2", "state_bytes"), ("share of the memory of state and update, W2", "update_bytes"),
                           ("share of the peak resident memory, W2", "peak_rss"), ("time of an update, W2", "update_s")):
            out[name] = rows[1][what] / rows[0][what]
    return {name: {"found": float(x), "bound": BOUNDS[name], "kept": bool(x <= BOUNDS[name])} for name, x in out.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--trainings", default="full,rank 8,rank 1")
    parser.add_argument("--only", choices=("learning", "w2", "base"))
    parser.add_argument("--w2", type=int)
    args = parser.parse_args()
    if args.w2 is not None:
        print(json.dumps(w2_one(args.w2)))
        return
    path = RESULTS / "lora.json"
    results = json.loads(path.read_text())["results"] if path.exists() else {"measured": {}}
    parts = {"base": base, "w2": w2, "learning": lambda: learning([int(s) for s in args.seeds.split(",")], args.trainings.split(","))}
    for name, part in parts.items():
        if args.only in (None, name):
            what = name if name != "learning" else f"learning: {args.trainings}, seeds {args.seeds}"
            results["measured"][what] = {"commit": commit(), "load_before": [round(x, 1) for x in os.getloadavg()]}
            found = part()
            if name == "learning":
                fresh = {(r["seed"], r["training"]) for r in found}
                found = [r for r in results.get(name, []) if (r["seed"], r["training"]) not in fresh] + found
            results[name] = found
    results["bounds"] = verdict(results)
    table(["bound", "found", "at most", "kept"], [[n, f"{v['found']:.3f}", v["bound"], v["kept"]] for n, v in results["bounds"].items()])
    fine = all(v["kept"] for v in results["bounds"].values())
    if found := results.get("base"):
        print(found)
        fine &= found["off_equals_fresh_bitwise"] and found["digest_unchanged"] and found["engine_differs_from_merge"] == 0
    record("lora", results)
    raise SystemExit(not fine)


if __name__ == "__main__":
    main()
