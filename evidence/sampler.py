"""Showing 3: sampler and scorer agree, samples are right in distribution and bitwise reproducible, slots stay busy.

    python evidence/sampler.py

Random weights, large enough that distributions are far from flat. Log-probs are compared with the trainer's own
scorer on packed rows with shared prompts; supports and frequencies with float64 oracles by sorting. The last table is
the speed of the two shapes of the peers' comparison; its wall time means something on a quiet machine only.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [os.path.dirname(__file__), str(Path(__file__).parent.parent / "tests")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from common import record, table  # noqa: E402
from helpers.rollout_helpers import log_softmax, random_params, redraw, sampled_logprobs, support  # noqa: E402
from scipy import stats  # noqa: E402

from jaxrl import models, training  # noqa: E402
from jaxrl.config.load import default_config  # noqa: E402
from jaxrl.rl.trajectories import collect  # noqa: E402
from jaxrl.rollout import EngineContext, Key, Request, SamplingParams, generate, make_engine  # noqa: E402

VOCAB, END, PROMPT, ANSWER, TIMEOUT = 1024, 1, 48, 128, 3600.0
MODEL = dict(model_type="qwen2", vocab_size=VOCAB, hidden_size=128, intermediate_size=352, num_hidden_layers=4,
             num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
PEERS = {  # prompts, samples, prompt tokens, answer tokens, HF config
    "5.05 M parameters, 16 x 8 x (64 + 64)": (16, 8, 64, 64, dict(
        vocab_size=8192, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2)),
    "0.34 M parameters, 16 x 16 x (15 + 28)": (16, 16, 15, 28, dict(
        vocab_size=87, hidden_size=96, intermediate_size=384, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=3)),
}
OPTIONS = [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05},
           {"temperature": 1.3, "top_p": 0.95, "top_k": 50, "min_p": 0.01}]

model = models.build(MODEL, compute_dtype=jnp.float32, scan_layers=False)


def engine(slots, weights, eos=(END,), **rollout):
    cfg = default_config()
    cfg.data.max_prompt_tokens = PROMPT
    cfg.rollout.update({"max_new_tokens": ANSWER, "slots": slots, "group_size": 8, **rollout})
    made = make_engine(EngineContext(cfg, model, eos_ids=eos))
    made.publish(weights, 0)
    return made


def requests(groups, samples, stream, **options):
    rng = np.random.default_rng(Key(stream, 0, 0, 0).seed(0))
    prompts = [rng.integers(4, VOCAB, rng.integers(4, PROMPT + 1)).astype(np.int32) for _ in range(groups)]
    sampling = SamplingParams(**{"max_new_tokens": ANSWER, **options})
    return [Request(str(key := Key(stream, 0, g, k)), prompt, sampling, key.seed(0), g, key)
            for g, prompt in enumerate(prompts) for k in range(samples)]


def all_logits(weights, traj):
    """Float64 logits [N, L, V] of every sequence, one padded row each."""
    length = int(traj.lengths.max())
    rows = np.zeros((traj.num_sequences, length), np.int32)
    for i, (a, n) in enumerate(zip(traj.offsets, traj.lengths, strict=False)):
        rows[i, :n] = traj.tokens[a:a + n]
    where = np.broadcast_to(np.arange(length), rows.shape)
    program = jax.jit(lambda w, r, p: model.logits(w, model.hidden(w, r, p, jnp.ones_like(r), jnp.zeros_like(r))))
    parts = [np.asarray(program(weights, rows[i:i + 8], where[i:i + 8]), np.float64) for i in range(0, len(rows), 8)]
    return np.concatenate(parts)


def agreement(made, weights):
    """Largest gaps over all tokens, per option set: sampler - scorer, and (scorer - kept) - float64 oracle.

    Where a token lies on the edge of the support within fp32 rounding, the oracle with and without it is compared.
    """
    shapes = training.row_shapes((), PROMPT + ANSWER, 8192, 1)
    rows = []
    for options in OPTIONS:
        asked = requests(8, 8, f"agree {options}", **options)
        traj = collect(asked, generate(made, asked, TIMEOUT))
        layout = training.make_layout(traj.sizes, shapes)
        temperature = options.get("temperature", 1.0)
        score = training.make_score(model, temperature=temperature, chunk=1024, put=jax.device_put)
        scored = score(weights, traj, layout)
        mask = traj.loss_mask
        gap = np.abs(scored - traj.logprobs)[mask].max()
        logits, worst, border = all_logits(weights, traj), 0.0, 0
        for i, start in enumerate(traj.offsets[:-1]):
            for t in range(traj.prompt_lengths[i], traj.lengths[i]):
                at = start + t
                ours = float(scored[at]) - float(traj.columns["kept"][at])
                gaps = [abs(ours - want) for want in
                        sampled_logprobs(logits[i, t - 1], asked[i].sampling, traj.tokens[at])]
                worst, border = max(worst, min(gaps)), border + int(gaps[0] >= 1e-4)
        rows.append([options, int(mask.sum()), float(gap), float(worst), border])
    table(["options", "tokens", "max |sampler - scorer|", "max |scorer - kept - oracle|", "on the border"],
          [[str(o), n, f"{g:.1e}", f"{w:.1e}", k] for o, n, g, w, k in rows])
    print("on the border: steps whose support has a token within 5e-5 of its edge, so that fp32 and the oracle differ by it")
    return rows


def frequencies(made, weights, count=8192):
    """Chi-square of first tokens under each option set, rare tokens (expected < 5) pooled."""
    rows = []
    for options in OPTIONS:
        asked = requests(1, count, f"chi {options}", **{**options, "max_new_tokens": 1})
        results = generate(made, asked, TIMEOUT)
        logits = all_logits(weights, collect(asked[:1], results[:1]))[0, len(asked[0].prompt) - 1]
        logp, keep = log_softmax(logits / options.get("temperature", 1.0)), support(logits, asked[0].sampling)
        expected = count * np.where(keep, np.exp(logp), 0) / np.exp(logp)[keep].sum()
        seen = np.bincount([int(r.tokens[0]) for r in results], minlength=VOCAB)
        rare = expected < 5
        seen, expected = np.append(seen[~rare], seen[rare].sum()), np.append(expected[~rare], expected[rare].sum())
        seen, expected = seen[expected > 0], expected[expected > 0]
        statistic = float(((seen - expected) ** 2 / expected).sum())
        rows.append([options, count, len(seen), statistic, float(stats.chi2.sf(statistic, len(seen) - 1))])
    table(["options", "samples", "cells", "chi-square", "p"],
          [[str(o), n, c, f"{s:.1f}", f"{p:.3f}"] for o, n, c, s, p in rows])
    return rows


def reproducibility(weights):
    """Samples that are not bitwise the same in another order, among others, alone; and at batch 1 against 64."""
    fixed = engine(64, weights, compaction=False)
    asked = requests(32, 8, "bitwise")
    first = {r.id: r for r in generate(fixed, asked, TIMEOUT)}
    other = [dataclasses.replace(r, sampling=SamplingParams(max_new_tokens=ANSWER, top_p=0.8)) for r in
             requests(32, 8, "others")]
    rng = np.random.default_rng(0)
    orders = {"reversed": asked[::-1], "shuffled": [asked[i] for i in rng.permutation(len(asked))],
              "every ninth": asked[::9], "among others": [r for pair in zip(other, asked, strict=True) for r in pair]}
    rows = []
    for name, order in orders.items():
        pairs = [(r, first[r.id]) for r in generate(fixed, order, TIMEOUT) if r.id in first]
        unequal = sum(a.tokens.tobytes() != b.tokens.tobytes() or a.logprobs.tobytes() != b.logprobs.tobytes()
                      for a, b in pairs)
        rows.append([name, len(pairs), unequal])
    table(["64 slots", "samples", "not bitwise equal"], rows)
    single = engine(1, weights, compaction=False)
    asked = requests(64, 1, "batch")
    wide, margins = generate(fixed, asked, TIMEOUT), []
    logits = None
    for i, (a, r) in enumerate(zip(asked, wide, strict=True)):
        one = generate(single, [a], TIMEOUT)[0]
        n = min(len(one.tokens), len(r.tokens))
        differ = np.flatnonzero(one.tokens[:n] != r.tokens[:n])
        if len(differ):
            logits = all_logits(weights, collect(asked, wide)) if logits is None else logits
            at = int(differ[0])
            margins.append(float(redraw(logits[i, len(a.prompt) - 1 + at], a.sampling, a.seed, at)[1]))
    tokens = int(sum(len(r.tokens) for r in wide))
    print(f"\nbatch 1 against 64: {len(margins)} of 64 answers differ ({tokens} tokens); margins at the first "
          f"difference: {[f'{m:.1e}' for m in margins]}")
    return {"orders": rows, "batch": {"answers": 64, "tokens": tokens, "differ": len(margins), "margins": margins}}


def occupancy(weights):
    """Slot-steps per token while requests wait, for long-tailed lengths (log-normal, 1 to 128 tokens)."""
    made = engine(64, weights, eos=())
    lengths = np.clip(np.random.default_rng(1).lognormal(3.0, 0.9, 1024), 1, ANSWER).astype(int)
    asked = [dataclasses.replace(r, sampling=SamplingParams(max_new_tokens=int(n)))
             for r, n in zip(requests(128, 8, "tail"), lengths, strict=True)]
    generate(made, asked, TIMEOUT)
    c = made.counters()
    ratio = c["slot_steps_queued"] / c["tokens_queued"]
    print(f"1024 answers of {lengths.mean():.1f} tokens on average, median {np.median(lengths):.0f}, longest "
          f"{lengths.max()}; 64 slots:\nslot-steps per token before the queue is empty {ratio:.3f} "
          f"({c['tokens_queued']} tokens), over all {c['slot_steps'] / c['tokens']:.3f}; {c['compiled']} programs")
    return {"before_queue_empties": ratio, "overall": c["slot_steps"] / c["tokens"], "programs": c["compiled"],
            "length_mean": float(lengths.mean()), "length_max": int(lengths.max())}


def speed():
    """Seconds per batch after the first, new weights before each: median of 7, process time beside it."""
    rows = []
    for name, (prompts, samples, prompt, answer, hf) in PEERS.items():
        m = models.build({"model_type": "qwen2", "tie_word_embeddings": True, **hf}, compute_dtype=jnp.float32,
                         scan_layers=False)
        cfg = default_config()
        cfg.data.update({"max_prompt_tokens": prompt, "prompts_per_step": prompts})
        cfg.rollout.update({"max_new_tokens": answer, "group_size": samples})
        made, weights, rng = make_engine(EngineContext(cfg, m)), random_params(m, 0, 0.02), np.random.default_rng(0)
        batch = [rng.integers(0, m.config.vocab_size, prompt).astype(np.int32) for _ in range(prompts)]
        took = []
        for step in range(8):
            sampling = SamplingParams(max_new_tokens=answer)
            asked = [Request(f"{p}/{k}", batch[p], sampling, Key("speed", step, p, k).seed(0))
                     for p in range(prompts) for k in range(samples)]
            wall, cpu = time.perf_counter(), time.process_time()
            made.publish(weights, step)
            results = generate(made, asked, TIMEOUT)
            took.append((time.perf_counter() - wall, time.process_time() - cpu))
        tokens = sum(len(r.tokens) for r in results)
        wall, cpu = np.median(np.array(took[1:]), axis=0)
        rows.append([name, tokens, took[0][0], float(wall), float(cpu), tokens / float(wall)])
    load = os.getloadavg()[0]
    table(["shape", "tokens", "first s", "wall s", "process s", "tokens/s"],
          [[n, t, f"{f:.2f}", f"{w:.3f}", f"{c:.3f}", f"{r:.0f}"] for n, t, f, w, c, r in rows])
    print(f"load average at the end: {load:.1f} on {os.cpu_count()} cores")
    return {"rows": rows, "load_average": load}


def main():
    jax.config.update("jax_default_matmul_precision", "highest")
    weights = random_params(model, 0, 0.09)
    made = engine(64, weights)
    parts = {"agreement": lambda: agreement(made, weights), "frequencies": lambda: frequencies(made, weights),
             "reproducibility": lambda: reproducibility(weights), "occupancy": lambda: occupancy(weights), "speed": speed}
    results = {}
    for name, part in parts.items():
        print(f"\n== {name} ==")
        results[name] = part()
    record("sampler", results)


if __name__ == "__main__":
    main()
