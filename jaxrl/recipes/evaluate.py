"""Evaluation: answer every row of every held-out set, score, report accuracy, mean@k and pass@k, per set and together."""

from __future__ import annotations

import json
import math

import numpy as np

from jaxrl.recipes.trajectories import answers, collect, make_requests, records, reward_items, sampling_params
from jaxrl.rollout import generate
from jaxrl.telemetry import write_atomic


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right: 1 - C(n-c, k) / C(n, k)   (arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def evaluate(job, engine, rewards, sets, stop=lambda: False) -> tuple[dict[str, float], dict[str, list[dict]]]:
    """Answers all rows of all sets with the engine's current weights.

    accuracy = share of rows whose named reward (eval.accuracy_from, default the first) reaches reward.pass_mark,
    unweighted and unshaped; with several samples, the mean over them (mean@k). A row whose reward failed counts as not
    accurate, and the share of such rows is reported. "all" weighs every row equally.

    Returns:
      (metrics "eval/<set>/<name>", records per set); both empty when `stop()` turned true on the way.
    """
    c = job.config
    sampling = sampling_params(
        c.eval,
        c.eval.max_new_tokens or c.rollout.max_new_tokens,
        c.rollout.stop,
        c.rollout.stop_token_ids,
        c.rollout.keep_stop,
    )
    metrics, rows, hits_of = {}, {}, {}
    for name, dataset in sets.items():
        batch = [(i, dataset[i]) for i in range(len(dataset))]
        requests = make_requests(batch, c.eval.samples, sampling, c.run.seed, f"eval/{name}", 0)
        results = generate(engine, requests, c.rollout.timeout_seconds, stop)
        if results is None:
            return {}, {}
        traj = collect(requests, results)
        examples = [e for _, e in batch for _ in range(c.eval.samples)]
        texts = answers(traj, job.tokenizer)
        result = rewards.score(reward_items(traj, examples, texts, c.data.response_prefix))
        source = c.eval.accuracy_from or next(iter(result.parts))
        scores = np.where(traj.finish == 2, np.nan, result.parts[source])  # not answered: failed, not wrong
        hits = (np.nan_to_num(scores, nan=-np.inf) >= c.reward.pass_mark).reshape(len(batch), c.eval.samples)
        hits_of[name] = hits
        metrics |= {f"eval/{name}/{k}": v for k, v in _scores(hits).items()}
        metrics[f"eval/{name}/length_mean"] = float(traj.answer_lengths.mean())
        metrics[f"eval/{name}/truncated_fraction"] = float((traj.finish == 1).mean())
        metrics[f"eval/{name}/failed_fraction"] = float(np.isnan(scores).mean())
        metrics[f"eval/{name}/reward_mean"] = (
            float(np.nanmean(result.total)) if np.isfinite(result.total).any() else 0.0
        )
        rows[name] = records(traj, examples, texts, result)
        for record, hit in zip(rows[name], hits.ravel(), strict=True):
            record["accurate"] = bool(hit)
    together = np.concatenate(list(hits_of.values()))
    metrics |= {f"eval/{k}": v for k, v in _scores(together).items()}
    return metrics, rows


def _scores(hits):
    """hits [rows, samples] -> accuracy (= mean@k) and pass@k."""
    samples = hits.shape[1]
    out = {"accuracy": float(hits.mean())}
    if samples > 1:
        out[f"mean@{samples}"] = out["accuracy"]
        for k in sorted({2**j for j in range(1, samples.bit_length())} | {samples}):
            if k <= samples:
                out[f"pass@{k}"] = float(np.mean([pass_at_k(int(h.sum()), samples, k) for h in hits]))
    return out


def write_rows(run_dir, step: int, rows: dict[str, list[dict]]) -> None:
    """Answers and scores per row in <run_dir>/eval/step_<step>_<set>.jsonl, each file written whole or not at all."""
    folder = run_dir / "eval"
    for name, records_ in rows.items():
        text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records_)
        write_atomic(folder / f"step_{step:08d}_{name}.jsonl", text)


def summary(metrics: dict[str, float]) -> dict:
    """The entry `eval_before` / `eval_after` of summary.json: accuracy over all and per set, with the other scores."""
    out: dict = {"sets": {}}
    for key, value in metrics.items():
        parts = key.split("/")[1:]
        if len(parts) == 1:
            out[parts[0]] = value
        else:
            out["sets"].setdefault(parts[0], {})[parts[1]] = value
    return out
