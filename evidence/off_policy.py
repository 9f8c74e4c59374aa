"""Showing 6 of the algorithms: off-policy corrections on off-policy data, and a critic that learns.

    python evidence/off_policy.py      # about 15 quiet minutes

Answers come from weights that were published 0, 4 or 16 publishes ago (stale_engine.py). tests/helpers/tiny_job.py, 100 steps, three
seeds, two learning rates, everything else alike. The reward is the share of the ten digits that an answer of twelve tokens
holds; the share of digits itself would not do, since there staleness only delays: all of it is learnt without correction,
too. Final reward: of the newest policy, sampled at temperature 1 on held-out prompts, mean of the evaluations at steps 80,
90 and 100. A correction recovers (its reward - uncorrected) / (fresh - uncorrected) of what staleness costs. On fresh answers
all weights are 1 and nothing is masked, so staleness 0 is run without correction only.

Token weights (decoupled PPO, token TIS, AIPO) correct a token's own probability, not that of what stands before it, nor that
the answer is finished by another policy than when it was scored: where these moved far, they recover little. Weights of whole
answers do, at more variance.

The critic's explained variance is that of PPO where values can be known: the reward is the share of digits among the first
four characters of an answer of twelve. The policy's learning rate is low, so that answers still differ at the end: where all
are right the returns have no variance left to explain.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(__file__))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from common import commit, record, table  # noqa: E402
from tiny_runs import HERE, column, train  # noqa: E402

SEEDS, STALENESS, RATES = (0, 1, 2), (4, 16), (5e-3, 1e-2)
EVERYWHERE = {
    "rollout.engine": f"{HERE / 'stale_engine.py'}:make_engine", "train.steps": 100,
    "eval.sets": ("test=jaxrl://arith/test.jsonl",), "eval.max_rows": 16, "eval.samples": 8, "eval.temperature": 1.0,
    "eval.every_steps": 10, "reward.functions": (f"{HERE / 'tiny_runs.py'}:distinct_digits",),
}
CORRECTIONS = {
    "uncorrected": {"algorithm.mismatch.correction": "none"},
    "decoupled PPO": {"algorithm.preset": "decoupled_ppo"},
    "token TIS": {"algorithm.mismatch.correction": "token_tis"},
    "AIPO": {"algorithm.preset": "aipo"},
    "sequence mask": {"algorithm.mismatch.correction": "none", "algorithm.mismatch.sequence_delta": 0.1},
    "sequence TIS": {"algorithm.mismatch.correction": "sequence_tis"},
    "geometric MIS": {"algorithm.mismatch.correction": "geometric_mis", "algorithm.mismatch.low": 0.8,
                      "algorithm.mismatch.cap": 1.2},
    "clip around the sampler": {"algorithm.mismatch.correction": "none", "algorithm.old_logprobs": "rollout"},
}
METRICS = ("gap/mean", "gap/ratio_mean", "gap/corrected_fraction", "policy/sequence_masked_fraction", "policy/ratio_mean",
           "policy/clip_fraction")
LOST = 0.02  # less than this of the reward is no loss
PPO = {
    "algorithm.preset": "ppo", "reward.functions": (f"{HERE / 'tiny_runs.py'}:first_digits",), "train.steps": 150,
    "data.prompts_per_step": 16, "train.tokens_per_microbatch": 4096, "optimizer.lr": 5e-4, "critic.lr": 3e-3,
    "critic.num_minibatches": 4, "critic.normalize": True,
}


def staleness_runs(rate: float, top: Path, cache: Path) -> list[dict]:
    """Every correction at every staleness with one learning rate, and the share it recovers."""
    results, finals = [], {}
    for stale, name in [(0, "uncorrected"), *((k, n) for k in STALENESS for n in CORRECTIONS)]:
        given = EVERYWHERE | {"optimizer.lr": rate, "user.staleness": stale} | CORRECTIONS[name]
        runs = [train(top / f"{rate}_{name}_{stale}_{seed}", cache, seed, given) for seed in SEEDS]
        finals[name, stale] = np.array([np.nanmean(column(r, "eval/test/reward_mean")[-30:]) for r in runs])
        metrics = {m: float(np.mean([np.nanmean(column(r, m)) for r in runs])) for m in METRICS if m in runs[0]["rows"][-1]}
        results.append({"rate": rate, "correction": name, "staleness": stale, "final": finals[name, stale].tolist(),
                        "recovered": recovered(finals, name, stale), "metrics": metrics,
                        "seconds": float(np.mean([r["seconds"] for r in runs]))})
        print(*shown(results[-1]), flush=True)
    jax.clear_caches()
    return results


def recovered(finals: dict, name: str, stale: int) -> float | None:
    """Share of the loss that staleness causes without correction; None where nothing is lost or nothing is corrected."""
    fresh, lost = finals["uncorrected", 0].mean(), finals["uncorrected", stale].mean()
    if name == "uncorrected" or fresh - lost < LOST:
        return None
    return float((finals[name, stale].mean() - lost) / (fresh - lost))


def shown(r: dict) -> list:
    m, share = r["metrics"], r["recovered"]
    number = lambda name: f"{m[name]:.3f}" if name in m else ""  # noqa: E731
    verdict = "" if share is None else f"{share:.0%}" + (", less than half" if share < 0.5 else "")
    touched = number("gap/corrected_fraction") or number("policy/sequence_masked_fraction") or number("policy/clip_fraction")
    seeds = " ".join(f"{x:.2f}" for x in r["final"])
    return [f"{r['rate']:g}", r["staleness"], r["correction"], f"{np.mean(r['final']):.3f}", seeds, verdict,
            number("gap/mean"), number("gap/ratio_mean"), touched, f"{r['seconds']:.0f}"]


def critic_runs(top: Path, cache: Path) -> list[dict]:
    """Explained variance of PPO's critic in the first tenth, from the middle on, and in the last tenth of the run."""
    results = []
    for seed in SEEDS:
        run = train(top / f"ppo_{seed}", cache, seed, PPO)
        explained, reward = column(run, "value/explained_variance"), column(run, "reward/mean")
        tenth = len(explained) // 10
        results.append({"seed": seed, "start": float(explained[:tenth].mean()),
                        "middle": float(explained[len(explained) // 2 :][:tenth].mean()),
                        "end": float(explained[-tenth:].mean()),
                        "reward_start": float(reward[:tenth].mean()), "reward_end": float(reward[-tenth:].mean()),
                        "seconds": run["seconds"]})
        print(results[-1], flush=True)
    return results


def main():
    at = commit()
    with tempfile.TemporaryDirectory(prefix="off_policy") as top:
        results = [r for rate in RATES for r in staleness_runs(rate, Path(top), Path(top) / "xla")]
        critic = critic_runs(Path(top), Path(top) / "xla")
    print()
    table(["lr", "staleness", "correction", "final reward", "by seed", "recovered", "|log ratio|", "ratio", "touched",
           "seconds"], [shown(r) for r in results])
    print()
    table(["PPO, seed", "explained variance: start", "middle", "end", "reward: start", "end", "seconds"],
          [[r["seed"], *(f"{r[k]:.2f}" for k in ("start", "middle", "end", "reward_start", "reward_end")),
            f"{r['seconds']:.0f}"] for r in critic])
    record("off_policy", {"options": {k: v for k, v in EVERYWHERE.items() if ".py" not in str(v)}, "corrections": CORRECTIONS,
                          "runs": results, "critic": critic}, at)
    return 0 if min(r["end"] for r in critic) > 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
