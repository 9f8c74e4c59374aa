"""Evaluation: completes every row of every held-out set, scores the completions, reports accuracy, mean@k and pass@k.

Recipes call `Evaluation` during a run and `evaluate_only` for run.mode=eval. Rewards are those of reward.* and
eval.rewards; nothing here trains.
"""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path

import numpy as np

from jaxrl.config import adapter_table
from jaxrl.data.images.controls import controlled, with_own_pictures
from jaxrl.data.images.thumbnails import save
from jaxrl.processes.exchange import owner_process
from jaxrl.rl.episodes import add_episode_rewards, check_failures, conversations
from jaxrl.rl.metrics import accuracy_rewards
from jaxrl.rl.trajectories import (
    collect,
    exchange_results,
    make_requests,
    records,
    reward_items,
    sampling_params,
)
from jaxrl.roles import parameters
from jaxrl.roles.role import policy_params
from jaxrl.rollout import generate
from jaxrl.telemetry import dumps, write_atomic


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Returns the unbiased estimate of the chance that at least one of k completions is right: 1 - C(n-c, k) / C(n, k).

    Args:
      correct: c of the n completions. samples: n. k: at most n.

    Source: arXiv 2107.03374, eq. 1."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


class Evaluation:
    """Completes and scores all rows of all held-out sets with the current weights.

    Args:
      s, job: session and job.
      sync: roles.role.WeightSync of the engine.
      receive: takes results of requests that were in flight before the evaluation, or None.
    """

    def __init__(self, s, job, sync, receive=None):
        self.s, self.job, self.sync, self.receive = s, job, sync, receive

    def __call__(self) -> tuple[dict[str, float], dict[str, list[dict]], dict]:
        """Evaluates, and writes the records on process 0.

        Returns (metrics, records by set, entry of summary.json). After a stop metrics and records are empty, the entry
        is {"sets": {}}.
        """
        self.sync.catch_up()  # the accuracy of a step is that of its weights
        metrics, rows = evaluate(self.s, self.job, self.receive)
        if metrics and self.s.peers.first:
            write_records(self.s.run_dir, self.s.step, rows)
        return metrics, rows, summary(metrics)


def evaluate(s, job, receive=None) -> tuple[dict[str, float], dict[str, list[dict]]]:
    """Completes and scores all rows of all eval sets with the engine's weights.

    accuracy = share of rows whose named reward (eval.accuracy_from, else the row's first) reaches reward.pass_mark,
    unweighted and unshaped; with several samples, the mean over them (mean@k). A completion whose reward failed counts
    as not accurate; failed_fraction is the share of these. Metrics over all sets weigh every row equally. Blind
    controls (eval.controls) are scored as further sets, outside the metrics over all sets. A control, and all sets
    together, have accuracy, mean@k and pass@k alone. At least one set is needed.

    Args:
      s, job: session and job.
      receive: takes results of requests that were in flight before the evaluation, or None.

    Returns:
      (metrics "eval/<set>/<name>", of a control "eval/<set>/<control>/<name>", over all sets "eval/<name>"; records per
      set, without the controls'). Both are the same on every process, but for the names of image files, which process
      0 alone has; both are empty if a stop was requested.

    Raises:
      RunStopped: too many episodes failed because of their environment, or too many rewards failed.
      TimeoutError: a set's completions are missing after rollout.timeout_seconds (RunStopped on other processes)."""
    c = job.config
    longest = c.eval.max_new_tokens or c.rollout.max_new_tokens
    sampling = sampling_params(c.eval, longest, c.eval.stop or c.rollout.stop, c.rollout.stop_token_ids,
                               c.rollout.keep_stop)
    metrics, rows, hits_of = {}, {}, {}
    for name, dataset in job.eval_sets.items():
        batch = [(i, dataset[i]) for i in range(len(dataset))]
        scored = complete_rows(s, job, name, batch, sampling, receive)
        if scored is None:
            return {}, {}
        traj, examples, texts, result = scored
        result, scores, hits = accurate(job, *scored)
        hits_of[name] = hits
        metrics |= {f"eval/{name}/{k}": v for k, v in _scores(hits).items()}
        metrics[f"eval/{name}/length_mean"] = float(traj.total().mean())
        metrics[f"eval/{name}/truncated_fraction"] = float((traj.finish == 1).mean())
        metrics[f"eval/{name}/failed_fraction"] = float(np.isnan(scores).mean())
        total = result.total
        metrics[f"eval/{name}/reward_mean"] = float(np.nanmean(total)) if np.isfinite(total).any() else 0.0
        metrics |= {f"eval/{name}/reward/{k}": v for k, v in _rewards(result).items()}
        kept = save(s.run_dir, traj, scores, c.log.thumbnails) if traj.pictures is not None and s.peers.first else {}
        rows[name] = records(traj, examples, texts, result,
                             episodes=conversations(traj, job.tokenizer) if c.episodes else None, kept=kept)
        for record, hit in zip(rows[name], hits.ravel(), strict=True):
            record["accurate"] = bool(hit)
        for control, other in list(controlled(c, name, batch).items())[1:]:
            scored = complete_rows(s, job, name, other, sampling, receive, control[1:])
            if scored is None:
                return {}, {}
            metrics |= {f"eval/{name}{control}/{k}": v for k, v in _scores(accurate(job, *scored)[2]).items()}
    together = np.concatenate(list(hits_of.values()))
    metrics |= {f"eval/{k}": v for k, v in _scores(together).items()}
    return metrics, rows


def accurate(job, traj, examples, texts, result):
    """Adds the reward model's scores, if there is one, and decides which completions are accurate.

    A completion is accurate if its raw value of the reward eval.accuracy_from, or of its row's first function where
    that one does not apply, is at least reward.pass_mark. Aborted completions have the score NaN and are not accurate,
    nor are those whose reward failed or gave no score.

    Args:
      job: the job. traj: Trajectories of rows * eval.samples completions, row by row.
      examples, texts: Example and completion text of each. result: their RewardResult.

    Returns:
      (RewardResult, scores [N] float64: that reward, NaN = absent; accurate [rows, eval.samples] bool).
    """
    c = job.config
    if job.reward_model is not None:
        result = job.reward_model.add_scores(with_own_pictures(traj, examples), examples, texts, result)
    scores = np.where(traj.finish == 2, np.nan, accuracy_rewards(c, result))  # no completion: failed, not wrong
    hits = np.nan_to_num(scores, nan=-np.inf) >= c.reward.pass_mark
    return result, scores, hits.reshape(-1, c.eval.samples)


def complete_rows(s, job, name: str, batch, sampling, receive=None, control: str = ""):
    """Completes and scores the rows of one held-out set.

    Each process samples completions of its own rows and runs their rewards; then every process gets all, in row order,
    eval.samples completions of a row one after the other. Collective.

    Args:
      s, job: session and job.
      name: of the set. batch: [(position, Example)]. sampling: SamplingParams.
      receive: takes results of requests that were in flight before the evaluation, or None.
      control: name of the blind control whose pictures the rows have; "" = their own.

    Returns:
      (Trajectories, Example of each, completion texts, RewardResult), or None if a stop was requested, and in a single
      process for an empty batch.

    Raises:
      RunStopped: more than env.max_failed_fraction of a process's episodes failed because of their environment, or too
        many of its rewards failed.
      TimeoutError: completions are missing after rollout.timeout_seconds (RunStopped on the other processes)."""
    c, mine = job.config, [(i, e) for i, e in batch if owner_process(i, s.peers.count) == s.peers.index]

    adapter, name = adapter_table.number_of(c, "eval", name), "/".join(filter(None, (name, control)))

    def ask(rows):
        return make_requests(rows, c.eval.samples, sampling, c.run.seed, f"eval/{name}", 0, lambda example: adapter,
                             job.images)

    def score(rows, results, texts=None, recorded=None):
        traj = collect(ask(rows), results, images=job.images)
        examples = [e for _, e in rows for _ in range(c.eval.samples)]
        texts, items = reward_items(traj, examples, job.decode, c.data.response_prefix, texts, job.images)
        result = job.eval_rewards.score(items, recorded=recorded, stop=stop_overdue(s))
        outcomes = [r.outcome for r in results]
        check_failures(c.env, s.step, outcomes, len(outcomes))
        result = add_episode_rewards(result, outcomes, c.env)
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
    known, _ = exchange_results(s, f"sizes of completions to eval set {name}", results, own)
    return score(batch, *map(list, zip(*(known[request.id] for request in ask(batch)), strict=True)))


def stop_overdue(s):
    """Returns a function () -> bool: whether run.stop_seconds have passed since its first call after a stop was
    requested. s: session.
    """
    seen = []

    def overdue() -> bool:
        if s.interrupted():
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() - seen[0] >= s.spec.run.stop_seconds

    return overdue


def _scores(hits):
    """Returns accuracy (= mean@k) and pass@k of hits [rows, samples]."""
    samples = hits.shape[1]
    out = {"accuracy": float(hits.mean())}
    if samples > 1:
        out[f"mean@{samples}"] = out["accuracy"]
        for k in sorted({2**j for j in range(1, samples.bit_length())} | {samples}):
            if k <= samples:
                out[f"pass@{k}"] = float(np.mean([pass_at_k(int(h.sum()), samples, k) for h in hits]))
    return out


def _rewards(result) -> dict[str, float]:
    """Returns the mean raw score of each reward function over the rows where it gave one, the shares of missing scores,
    and the functions' own metrics; named as in training, without "reward/"."""
    means = {name: float(np.nanmean(part)) for name, part in result.parts.items() if np.isfinite(part).any()}
    return means | {name.removeprefix("reward/"): value for name, value in result.metrics.items()}


def write_records(run_dir, step: int, rows: dict[str, list[dict]], keep: bool = False) -> list[Path]:
    """Writes completions and scores per row to <run_dir>/eval/step_<step>_<set>.jsonl, each file atomically.

    Args:
      run_dir: Path. step: completed steps, written with eight digits.
      rows: set -> its records, one line each.
      keep: a file that is there with other content stays; the new one is <set>_2, or the next number that is free.

    Returns the files.
    """
    files = []
    for name, records_ in rows.items():
        text = "".join(dumps(r) + "\n" for r in records_)
        stems = (f"step_{step:08d}_{name}{f'_{n}' * (n > 1)}" for n in itertools.count(1))
        paths = (run_dir / "eval" / f"{stem}.jsonl" for stem in stems)
        path = next(p for p in paths if not (keep and p.exists() and p.read_text("utf-8") != text))
        write_atomic(path, text)
        files.append(path)
    return files


def summary(metrics: dict[str, float]) -> dict:
    """Returns metrics "eval/<name>" and "eval/<set>/<name>" as summary.json nests them: {name: value, "sets": {set:
    {name: value}}}."""
    out: dict = {"sets": {}}
    for key, value in metrics.items():
        name, _, of_set = key.removeprefix("eval/").partition("/")
        if of_set:
            out["sets"].setdefault(name, {})[of_set] = value
        else:
            out[name] = value
    return out


def publish_latest(s, job):
    """Loads the weights of the checkpoint that run.resume chooses (auto: the latest of run.dir), or else the model of
    the config, and publishes them to the engine if there is one.

    Also sets the session's progress from the checkpoint and opens telemetry, which then writes no metrics.

    Args:
      s, job: session and job.

    Returns:
      (nested tree of the language model's parameters on the devices, without a value head; the checkpoint's path,
      model.path, or "random initialisation").

    Raises:
      CheckpointError: the checkpoint that run.resume requires is missing or damaged, or its arrays differ in name,
        shape or dtype.
      ConfigError: its adapters were trained on another base."""
    c = job.config
    optimizer, _ = parameters.policy_optimizer(job, 1)
    state = parameters.abstract_state(job, optimizer)
    wanted = parameters.checkpoint_fields(job, {"trainable": state.trainable, "frozen": state.frozen})
    wanted |= {} if job.model.adapter is None else {"base_digest": np.zeros(32, np.uint8)}
    restored = s.checkpointer.restore(wanted, c.run.resume, partial=True)
    if restored is None:
        params = parameters.initial_policy(job)
    else:
        arrays = dict(restored.arrays)
        was = arrays.pop("base_digest", None)
        arrays = parameters.fields_from_checkpoint(job, state, arrays)
        if was is not None:
            parameters.check_base(parameters.base_digest(arrays["frozen"]), was)
        params = policy_params(**arrays)
        s.resume_at(restored.host)
    s.open_telemetry(read_only=True, step=s.step)
    if job.engine is not None:
        job.engine.publish(parameters.engine_params(job, params), s.step)
    return params, restored.path if restored else (c.model.path or "random initialisation")


def evaluate_only(s, job) -> dict:
    """Runs run.mode=eval: evaluates what `publish_latest` loads, a checkpoint or else the model of the config; writes
    the records and prints the metrics.

    s, job: session and job. Returns the content of summary.json: "evaluated", where the weights are from, and "eval",
    the metrics as `summary` nests them, {"sets": {}} after a stop. Records that an earlier evaluation wrote stay.

    Raises CheckpointError or ConfigError for a checkpoint that cannot be loaded (`publish_latest`), and what `evaluate`
    raises.
    """
    _, where = publish_latest(s, job)
    s.console.start("eval")
    metrics, rows = evaluate(s, job)
    files = write_records(s.run_dir, s.step, rows, keep=True) if s.peers.first else []
    s.telemetry.samples(s.step, rows)
    note = "" if s.step else f" ({s.run_dir / 'checkpoints'} holds no checkpoint)"
    s.say(f"evaluation of {where}{note}\n" + "\n".join(f"  {k:40s} {v:.4f}" for k, v in sorted(metrics.items())))
    s.say("".join(f"completions and scores: {path}\n" for path in files).rstrip())
    out = {"evaluated": str(where), "eval": summary(metrics)}
    s.telemetry.summary(out)
    return out
