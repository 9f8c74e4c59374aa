"""run.mode=parity: measures the log-prob gap between engine and trainer on this host, and its cause. Trains nothing.

Samples completions to a few prompts with the training options and scores them as training would. Then it tests each
possible cause alone: rounding of the trainer's dtype, truncated support, temperature, the prefix cache, the engine's
weights. Called by recipes.rl.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxrl import training
from jaxrl.processes.exchange import owner_process
from jaxrl.rl.evaluation import publish_latest
from jaxrl.rl.trajectories import collect, exchange_results, make_requests, sampling_params
from jaxrl.rollout import generate
from jaxrl.training.score import make_score

PROMPTS = 8


def report(s, job) -> dict:
    """Measures the gaps, prints the table and returns it as in summary.json. Collective: every process samples its
    part.

    Samples rollout.group_size completions to each of the first PROMPTS rows, with the newest weights of the run. s: the
    Session. job: its Job with engine and data.

    Returns {"engine", "gap": {setting: `difference` of it}, "bound": gap in nats per token up to which they agree (1e-3
    if both compute in fp32, else 0.05), "verdict": list of sentences; "probe" if the engine measures it}."""
    c, peers = job.config, s.peers
    params, where = publish_latest(s, job)
    examples = [(i, job.stream.dataset[i]) for i in range(min(PROMPTS, len(job.stream.dataset)))]
    sampling = sampling_params(c.rollout, c.rollout.max_new_tokens, (), c.rollout.stop_token_ids)
    plain = dataclasses.replace(sampling, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0)

    def ask(name, how):
        asked = make_requests(examples, c.rollout.group_size, how, c.run.seed, f"parity-{name}", 0)
        mine = [a for a in asked if owner_process(a.group, peers.count) == peers.index]
        found = s.together(f"answers {name}", lambda: generate(job.engine, mine, c.rollout.timeout_seconds))
        known, _ = exchange_results(s, f"sizes of completions {name}", found, [[]] * len(found))
        return collect(asked, [known[a.id][0] for a in asked])

    def gap(traj, temperature, model=job.model):
        layout = training.make_layout(traj.sizes, job.row_shapes)
        score = make_score(model, temperature=temperature, chunk=job.config.train.logprob_chunk, put=job.put)
        return difference(score(params, traj, layout), traj)

    now, one = ask("now", sampling), dataclasses.replace(plain, temperature=1.0)
    in_fp32 = dataclasses.replace(job.model, compute_dtype=jnp.dtype(jnp.float32))
    rows = {
        "as training samples": gap(now, c.rollout.temperature),
        "trainer in fp32": gap(now, c.rollout.temperature, in_fp32),
        "whole support, no penalties": gap(ask("plain", plain), c.rollout.temperature),
        "temperature 1, whole support": gap(ask("one", one), 1.0),
        "the same again, prefixes cached": gap(ask("one", one), 1.0),
    }
    bound = 1e-3 if job.compute_dtype == jnp.float32 and c.rollout.dtype == "fp32" else 0.05
    out = {"engine": c.rollout.engine, "gap": rows, "bound": bound, "verdict": verdict(rows, bound, c)}
    if (probe := job.engine.metrics().get("publish/probe")) is not None:
        out["probe"] = probe
    lines = [f"  {name:34s} mean {g['mean']:.2e}  max {g['max']:.2e}  k3 {g['k3']:.2e}  outside clip {g['outside']:.2%}"
             for name, g in rows.items()]
    s.say("\n".join([f"parity of {out['engine']} and trainer, nats per token over "
                     f"{rows['as training samples']['tokens']} tokens",
                     f"  weights: {where}",
                     *lines, *(f"  {v}" for v in out["verdict"])]))
    s.telemetry.summary(out)
    return out


def difference(scored_T, traj) -> dict[str, float]:
    """Compares log-probs of sampled tokens, d = trainer - engine, in nats.

    scored_T: [T] float log-probs of the trainer. traj: Trajectories of T tokens with those of the engine.

    Returns, over the loss tokens, {"mean" and "max" of |d|; "k3": the estimate of the KL, the mean of e^d - 1 - d, d
    within +-50 in e^d; "outside": the share whose ratio e^d is more than 0.2 from 1; "tokens": their number}."""
    d = np.asarray(scored_T, np.float64)[traj.loss_mask] - traj.logprobs[traj.loss_mask]
    ratio = np.exp(np.clip(d, -50, 50))
    return {"mean": float(np.abs(d).mean()), "max": float(np.abs(d).max()), "k3": float((ratio - 1 - d).mean()),
            "outside": float((np.abs(ratio - 1) > 0.2).mean()), "tokens": int(len(d))}


def verdict(rows, bound: float, config) -> list[str]:
    """Returns the causes of a gap as sentences, most likely first.

    rows: setting -> `difference` of it, the five of `report` in its order. bound: mean |d| (nats per token) that counts
    as agreement. config: the run's, for the texts."""
    mean = {name: g["mean"] for name, g in rows.items()}
    now, fp32, plain, one, cached = mean.values()
    said = []
    if now <= bound:
        said.append(f"engine and trainer agree: {now:.2e} is within {bound:g}")
    if plain < 0.5 * now and now > bound:
        said.append("sampling support: top_p, top_k, min_p or penalties cut the distribution the engine draws from; "
                    "train with rollout.top_p=1, top_k=-1, min_p=0, or keep token_tis")
    if one < 0.5 * plain and plain > bound:
        said.append(f"temperature: at rollout.temperature={config.rollout.temperature:g} they differ more than at 1; "
                    "check the engine's logprobs mode")
    if fp32 < 0.5 * now and now > bound:
        said.append("dtype of the trainer: scoring in fp32 closes half of the gap or more; try "
                    "train.compute_dtype=fp32")
    if cached > 2 * one + bound:
        said.append("cache: completions after a cached prefix differ more; check the engine's KV cache dtype, or "
                    "turn rollout.vllm.prefix_caching off")
    if now > bound and not said:
        said.append("dtype of the engine, or its weights: nothing else explains it; try rollout.dtype=fp32, and "
                    "rollout.verify_weights=always")
    return said
