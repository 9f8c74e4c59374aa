"""Evaluation: complete every row of every held-out set, score, report accuracy, mean@k and pass@k."""

from __future__ import annotations

import math
import time

import numpy as np

from jaxrl.config import adapter_table
from jaxrl.processes.exchange import owner_process
from jaxrl.rl.episodes import check_failures, conversations, with_outcomes
from jaxrl.rl.trajectories import (
    collect,
    exchanged,
    make_requests,
    records,
    reward_items,
    sampling_params,
)
from jaxrl.roles import parameters
from jaxrl.rollout import generate
from jaxrl.telemetry import dumps, write_atomic


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Unbiased chance that one of k samples is right: 1 - C(n-c, k) / C(n, k)   (arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


class Evaluation:
    """Answers all rows of all held-out sets with the current weights.

    Args:
      s, job: session and job. sync: roles.WeightSync. receive: takes results of requests that were under way before, or
      None.
    """

    def __init__(self, s, job, sync, receive=None):
        self.s, self.job, self.sync, self.receive = s, job, sync, receive

    def __call__(self) -> tuple[dict[str, float], dict[str, list[dict]], dict]:
        """(metrics, records by set, entry of summary.json); all empty after a stop. Process 0 writes the records."""
        self.sync.catch_up()  # the accuracy of a step is that of its weights
        metrics, rows = evaluate(self.s, self.job, self.receive)
        if metrics and self.s.peers.first:
            write_rows(self.s.run_dir, self.s.step, rows)
        return metrics, rows, summary(metrics)


def evaluate(s, job, receive=None) -> tuple[dict[str, float], dict[str, list[dict]]]:
    """Answers all rows of all eval sets with the engine's weights.

    accuracy = share of rows whose named reward (eval.accuracy_from, default the first) reaches reward.pass_mark,
    unweighted and unshaped; with several samples, the mean over them (mean@k). A row whose reward failed counts as not
    accurate, and the share of such rows is reported. "all" weighs every row equally.

    Returns:
      (metrics "eval/<set>/<name>", records per set), the same on every process; both empty when a stop came on the way.
    """
    c = job.config
    longest = c.eval.max_new_tokens or c.rollout.max_new_tokens
    sampling = sampling_params(c.eval, longest, c.eval.stop or c.rollout.stop, c.rollout.stop_token_ids,
                               c.rollout.keep_stop)
    metrics, rows, hits_of = {}, {}, {}
    for name, dataset in job.eval_sets.items():
        batch = [(i, dataset[i]) for i in range(len(dataset))]
        scored = answer(s, job, name, batch, sampling, receive)
        if scored is None:
            return {}, {}
        traj, examples, texts, result = scored
        if job.judge is not None:
            result = job.judge.judged(traj, examples, texts, result)
        source = c.eval.accuracy_from or next(iter(result.parts))
        scores = np.where(traj.finish == 2, np.nan, result.parts[source])  # not answered: failed, not wrong
        hits = (np.nan_to_num(scores, nan=-np.inf) >= c.reward.pass_mark).reshape(len(batch), c.eval.samples)
        hits_of[name] = hits
        metrics |= {f"eval/{name}/{k}": v for k, v in _scores(hits).items()}
        metrics[f"eval/{name}/length_mean"] = float(traj.total().mean())
        metrics[f"eval/{name}/truncated_fraction"] = float((traj.finish == 1).mean())
        metrics[f"eval/{name}/failed_fraction"] = float(np.isnan(scores).mean())
        total = result.total
        metrics[f"eval/{name}/reward_mean"] = float(np.nanmean(total)) if np.isfinite(total).any() else 0.0
        metrics |= {f"eval/{name}/reward/{k}": v for k, v in _rewards(result).items()}
        rows[name] = records(traj, examples, texts, result,
                             episodes=conversations(traj, job.tokenizer) if c.episodes else None)
        for record, hit in zip(rows[name], hits.ravel(), strict=True):
            record["accurate"] = bool(hit)
    together = np.concatenate(list(hits_of.values()))
    metrics |= {f"eval/{k}": v for k, v in _scores(together).items()}
    return metrics, rows


def answer(s, job, name: str, batch, sampling, receive=None):
    """(trajectories, example of each sequence, texts, RewardResult) of all rows; None when a stop came on the way.

    Each process answers and scores the rows it owns, then all hold all of them, in the order of the rows.
    """
    c, mine = job.config, [(i, e) for i, e in batch if owner_process(i, s.peers.count) == s.peers.index]

    adapter = adapter_table.number_of(c, "eval", name)

    def ask(rows):
        return make_requests(rows, c.eval.samples, sampling, c.run.seed, f"eval/{name}", 0, lambda example: adapter)

    def score(rows, results, texts=None, recorded=None):
        traj = collect(ask(rows), results)
        examples = [e for _, e in rows for _ in range(c.eval.samples)]
        texts, items = reward_items(traj, examples, job.decode, c.data.response_prefix, texts)
        result = job.eval_rewards.score(items, recorded=recorded, stop=out_of_patience(s))
        outcomes = [r.outcome for r in results]
        check_failures(c.env, s.step, outcomes, len(outcomes))
        result = with_outcomes(result, outcomes, c.env)
        return result and (traj, examples, texts, result)

    def work():
        if not mine:
            return [], None
        results = generate(job.engine, ask(mine), c.rollout.timeout_seconds, s.interrupted, receive)
        scored = results and score(mine, results)
        return None if scored is None else (results, scored)

    done = s.together(f"answers to eval set {name}", work)
    if done is None or s.peers.count == 1:
        return done and done[1]
    results, scored = done
    own = zip(scored[2], scored[3].records(), strict=True) if scored else []
    known, _ = exchanged(s, f"sizes of completions to eval set {name}", results, own)
    return score(batch, *map(list, zip(*(known[request.id] for request in ask(batch)), strict=True)))


def out_of_patience(s):
    """Tells whether a stop was asked for run.stop_seconds ago (or that long after this was first asked)."""
    asked = []

    def over() -> bool:
        if s.interrupted():
            asked.append(time.monotonic())
        return bool(asked) and time.monotonic() - asked[0] >= s.spec.run.stop_seconds

    return over


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


def _rewards(result) -> dict[str, float]:
    """Mean raw score of each reward function where it gave one, shares of what is missing, and the functions' own
    metrics; named as in training, without its "reward/"."""
    means = {name: float(np.nanmean(part)) for name, part in result.parts.items() if np.isfinite(part).any()}
    return means | {name.removeprefix("reward/"): value for name, value in result.metrics.items()}


def write_rows(run_dir, step: int, rows: dict[str, list[dict]]) -> None:
    """Answers and scores per row in <run_dir>/eval/step_<step>_<set>.jsonl, each file written whole or not at all."""
    folder = run_dir / "eval"
    for name, records_ in rows.items():
        text = "".join(dumps(r) + "\n" for r in records_)
        write_atomic(folder / f"step_{step:08d}_{name}.jsonl", text)


def summary(metrics: dict[str, float]) -> dict:
    """The entry `eval_before` / `eval_after` of summary.json: accuracy over all and per set, with the other scores."""
    out: dict = {"sets": {}}
    for key, value in metrics.items():
        name, _, of_set = key.removeprefix("eval/").partition("/")
        if of_set:
            out["sets"].setdefault(name, {})[of_set] = value
        else:
            out[name] = value
    return out


def publish_newest(s, job):
    """(parameters, where they come from): the newest checkpoint's if there is one, else the model as given; the engine,
    where there is one, has them. Opens telemetry that writes no metrics."""
    c = job.config
    optimizer, _ = parameters.policy_optimizer(job, 1)
    state = parameters.abstract_state(job, optimizer)
    wanted = parameters.kept(job, {"trainable": state.trainable, "frozen": state.frozen})
    wanted |= {} if job.model.adapter is None else {"base_digest": np.zeros(32, np.uint8)}
    restored = s.checkpointer.restore(wanted, c.run.resume, partial=True)
    if restored is None:
        params = parameters.policy_start(job)
    else:
        arrays = dict(restored.arrays)
        was = arrays.pop("base_digest", None)
        arrays = parameters.restored(job, state, arrays)
        if was is not None:
            parameters.check_base(parameters.base_digest(arrays["frozen"]), was)
        params = parameters.policy_params(**arrays)
        s.resume_at(restored.host)
    s.open_telemetry(read_only=True, step=s.step)
    if job.engine is not None:
        job.engine.publish(parameters.published(job, params), s.step)
    return params, restored.path if restored else (c.model.path or "random initialisation")


def evaluate_only(s, job) -> dict:
    """run.mode=eval: the newest checkpoint of run.dir if there is one, else the model as given."""
    _, where = publish_newest(s, job)
    s.console.start("eval")
    metrics, rows = evaluate(s, job)
    if s.peers.first:
        write_rows(s.run_dir, s.step, rows)
    s.telemetry.samples(s.step, rows)
    note = "" if s.step else f" ({s.run_dir / 'checkpoints'} holds no checkpoint)"
    s.say(f"evaluation of {where}{note}\n" + "\n".join(f"  {k:40s} {v:.4f}" for k, v in sorted(metrics.items())))
    out = {"evaluated": str(where), "eval": summary(metrics)}
    s.telemetry.summary(out)
    return out
