"""run.mode=explain: explains what a recorded update did, and which completions caused it (docs/guides/replay.md).

    steps    <- replay.steps, or those whose metrics are anomalous (records.anomalies)
    for each <- its state and batch (replay.py); the step itself, with the functions that made it; then
                log-probs before and after it; the gradients of every group, of the completions of the heaviest groups,
                and of the log-probs that changed most

A group's share of a step is <g_u, g> / <g, g>, where g is the gradient of the loss at the state before the step and g_u
the part from the group's tokens. Shares add up to 1; a negative one pulls against the step. The optimizer comes after:
clipping the norm changes no share, Adam's scaling may. With several updates per batch, shares are those of the first
pass as if it were one update.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl import diff, training
from jaxrl.algorithms import mismatch_ratio, mismatch_weight
from jaxrl.errors import ConfigError
from jaxrl.records import anomalies, files
from jaxrl.replay.replay import Plan, ranges
from jaxrl.replay.what_if import copied, difference, dot, holds, likelihood, logprobs, number
from jaxrl.rl.recording import restore_batch
from jaxrl.rl.step import make_loss_weigher
from jaxrl.telemetry.run_dir import dumps, write_atomic
from jaxrl.types import FINISH

MOST = 3         # steps explained if replay.steps is empty
HEAVY = 2        # groups whose completions are measured one by one
NAMED = 5        # completions, groups and tokens that are listed
EARLIER = 10     # earlier records whose scores define the usual range


def run(config, inputs=None) -> dict:
    """Explains steps. Process 0 writes <run.dir>/explain/step_<step>.json. Returns the entries of summary.json.

    They are {"explained": [Explained.summary() of each step], "anomalies": [...]}. inputs: what the run was started
    with from Python (PythonInputs), or None.

    Raises ConfigError for a run with lora.adapters, and for steps that cannot be computed again (replay.Plan)."""
    found = anomalies.of_run(list(diff.Run(config.run.dir).lines.values()))
    plan = Plan(config, chosen(config, found))
    if not config.replay.steps:
        plan.wanted = [step for step in plan.wanted if plan.nearest(step) is not None]
    with contextlib.ExitStack() as open_ones:
        said, out = heading(plan, found), []
        for start, wanted in plan.chains():
            open_ones.close()
            replay = plan.open(open_ones, inputs, start, wanted[0])
            if replay.s.spec.lora.adapters:
                raise ConfigError("run.mode=explain with lora.adapters: the shares of a step are of one set of "
                                  "adapters; use run.mode=replay")
            replay.s.open_telemetry(read_only=True, step=replay.s.step)
            while replay.s.step < wanted[-1]:
                if replay.s.step + 1 not in wanted:
                    replay.replay_step()
                    continue
                step = Explained(replay, [a for a in found if a.step == replay.s.step + 1])
                replay.s.say(said + step.text())
                said = ""
                out.append(step.summary())
                if replay.s.peers.first:
                    path = plan.folder / "explain" / f"step_{step.number:08d}.json"
                    write_atomic(path, dumps(out[-1], indent=1) + "\n")
        told = {"explained": out, "anomalies": [a._asdict() for a in found]}
        if out:
            replay.s.telemetry.summary(told)
            replay.s.report()
        else:
            print(said + "no replayable step is anomalous; name one with --config.replay.steps")
    return told


def chosen(config, found) -> list[int] | None:
    """Returns the numbers of the MOST most anomalous recorded steps, ascending; None if replay.steps names steps.

    A step ranks by its largest deviation from the median, an earlier one first where they are equal. found: all
    anomalies of the run (records.anomalies.Anomaly); those of steps that were not recorded do not count."""
    if config.replay.steps:
        return None
    recorded = files.steps(Path(config.run.dir) / files.FOLDER)
    worst = {}
    for a in found:
        if a.step in recorded:
            worst[a.step] = max(worst.get(a.step, 0.0), a.deviations)
    first = sorted(worst, key=lambda step: (-worst[step], step))[:MOST]
    return sorted(first)


def heading(plan, found) -> str:
    """Returns the first lines for the console: the recorded steps and the anomalies found.

    plan: the replay.Plan of the steps. found: anomalies of the run (records.anomalies.Anomaly)."""
    lines = [f"explanation of {plan.folder}, recorded {ranges(list(plan.paths))}"]
    lines += [f"  step {a.step}: {a.text}" for a in found]
    return "\n".join(lines) + "\n"


@dataclasses.dataclass
class Answers:
    """Measurements of N completions, each [N]: floats, integers for `length` and `age`, bool for `masked` and
    `truncated`. Log-probs are in nats; means and shares are over a completion's loss tokens."""

    score: np.ndarray
    advantage: np.ndarray   # mean per token
    length: np.ndarray
    gap: np.ndarray         # mean |engine's - trainer's log-prob| before the step
    age: np.ndarray         # weight syncs between its oldest token and the step
    change: np.ndarray      # mean change of log-prob per token
    outside: np.ndarray     # share of tokens whose ratio ends outside the clip range
    corrected: np.ndarray   # share of tokens that the mismatch correction changes
    masked: np.ndarray      # bool: no policy loss
    truncated: np.ndarray   # bool


class Explained:
    """Computes the next step of a replay again and measures what it did; `summary` returns the measurements.

    Making one runs the step, so the replay is one step further afterwards.

    Args:
      replay: the opened replay, before the step.
      found: anomalies of that step (records.anomalies.Anomaly).

    Attributes:
      number: of the step. traj: its Trajectories.
      before, after: [T] float64 log-probs (nats) of the loss tokens at the state before and after the step, 0
        elsewhere.
      way: the step in parameters, a flat dict in fp32; length: its L2 norm.
      answers: Answers of all completions.
      groups: of each group its share (see the module), norm of its gradient and component along the step.
      norm: L2 norm of the gradient g. pushed: of the NAMED completions that changed most, number -> {group: change of
        its mean log-prob (nats) along minus the group's gradient, to first order}.
      shares: completion -> share of the step, for completions of the HEAVY heaviest groups.
      suspects: anomalous completions with reasons, the worst first.
    """

    def __init__(self, replay, found):
        self.replay, self.found, self.options = replay, found, replay.s.spec.algorithm
        self.earlier = earlier_scores(replay)
        state = copied(replay.roles.policy.state)
        self.done = done = replay.replay_step()
        self.number, self.traj = replay.s.step, done.batch.traj
        self.verdict = replay.compare(done)
        self.before = logprobs(replay, state, self.traj, done.prepared)
        self.after = logprobs(replay, replay.roles.policy.state, self.traj, done.prepared)
        self.way = difference(replay.roles.policy.state.trainable, state.trainable)
        self.length = number(dot(self.way, self.way)) ** 0.5
        self.answers = self._answers()
        self._gradients(state)
        self.suspects = self._suspects()

    # ---- log-probs, host only

    def _answers(self) -> Answers:
        traj, columns, mask = self.traj, self.done.prepared.columns, self.traj.loss_mask
        mean = lambda x: traj.total(x) / np.maximum(traj.total(), 1)  # noqa: E731
        old = columns.get("old", self.before)
        ratio = np.exp(np.clip(self.after - old, -50, 50))
        outside = (ratio > 1 + self.options.clip_high) | (ratio < 1 - self.options.clip_low)
        age = self.number - 1 - np.where(mask, traj.versions, self.number - 1)
        batch = self.done.batch
        return Answers(
            score=batch.scores, advantage=mean(columns["advantage"]), length=traj.total(),
            gap=mean(np.abs(columns["behaviour"] - self.before)), age=np.maximum.reduceat(age, traj.spans[:-1]),
            change=mean(self.after - self.before), outside=mean(outside), corrected=mean(self._corrected(old)),
            masked=batch.dropped | (self.options.mask_truncated & (traj.finish == 1)), truncated=traj.finish == 1)

    def _corrected(self, old) -> np.ndarray:
        """Returns [T] bool: tokens whose weight the mismatch correction changes."""
        m, traj = self.options.mismatch, self.traj
        if m.correction == "none":
            return np.zeros(len(traj.tokens), bool)
        level, _, action = m.correction.partition("_")
        whose = 1 + traj.spread(np.arange(traj.num_trajectories))
        sampled = self.done.prepared.columns["behaviour"].astype(np.float64)
        row = old[None], sampled[None], traj.loss_mask[None]
        how: dict[str, Any] = dict(sequences=whose[None], level=level)
        weight = mismatch_weight(*row, m.cap, action={"tis": "truncate", "mis": "mask"}[action], low=m.low, **how)
        ratio = mismatch_ratio(*row, **how)
        return np.asarray((ratio > m.cap) | (weight == 0))[0] & traj.loss_mask

    # ---- gradients

    def _gradients(self, state) -> None:
        """Computes shares of groups, of completions of the heaviest groups, and the groups' effect on the completions
        that changed most."""
        traj, replay = self.traj, self.replay
        units, group = np.unique(traj.group, return_inverse=True)
        weights = self._weights()
        whole = self._gradient(state, weights, None)
        size = max(number(dot(whole, whole)), 1e-30)
        moved = np.argsort(-np.abs(self.answers.change * self.answers.length), kind="stable")[:NAMED]
        likelier = likelihood(replay)
        pulls = {int(i): likelier(state, traj, self.done.prepared.layout.update,
                                  np.where(traj.spread(np.arange(traj.num_trajectories) == i) & traj.loss_mask,
                                           1.0 / max(int(self.answers.length[i]), 1), 0.0)) for i in moved}
        self.pushed = {i: {} for i in pulls}
        self.groups = []
        for k, name in enumerate(units):
            own = self._gradient(state, weights, group == k)
            self.groups.append({"group": int(name), "share": number(dot(own, whole)) / size,
                                "norm": number(dot(own, own)) ** 0.5,
                                "along_step": -number(dot(own, self.way)) / max(self.length, 1e-30)})
            for i, likely in pulls.items():
                self.pushed[i][int(name)] = -number(dot(own, likely))
        self.norm = size ** 0.5
        heavy = sorted(self.groups, key=lambda g: -abs(g["share"]))[:HEAVY]
        looked = [int(i) for g in heavy for i in np.flatnonzero(traj.group == g["group"])]
        self.shares = {}
        for i in looked:
            own = self._gradient(state, weights, np.arange(traj.num_trajectories) == i)
            self.shares[i] = number(dot(own, whole)) / size

    def _weights(self):
        weigh, _ = make_loss_weigher(self.replay.s.spec, self.done.batch, self.done.prepared.columns)
        return [(mini, weigh(mini.sequences)) for mini in self.done.prepared.layout.update.minibatches]

    def _gradient(self, state, weights, chosen) -> dict:
        """Returns the gradient of the loss on the tokens of the trajectories `chosen` ([N] bool; None = all)."""
        traj, columns, put = self.traj, self.done.prepared.columns, self.replay.roles.policy.put
        keep = traj.loss_mask if chosen is None else traj.spread(chosen) & traj.loss_mask

        def packed():
            for mini, terms in weights:
                own = {name: np.where(keep, w, 0.0) for name, w in terms.items()}
                for micro in mini.microbatches:
                    if holds(traj, micro, own["token"]):
                        yield put(training.pack(traj, micro, columns, own))

        found = self.replay.roles.policy.gradients(state, packed())
        if found is None:  # nobody has a weight: no gradient
            return jax.tree.map(lambda x: x.astype(np.float32) * 0, state.trainable)
        scale = np.float32(state.stats.get("loss_scale", 1.0))  # of fp16
        return jax.tree.map(lambda x: x / scale, found[0]) if scale != 1 else found[0]

    # ---- anomalous completions

    def _suspects(self) -> list[dict]:
        """Returns anomalous completions of the step with reasons, the worst first."""
        a, out = self.answers, {}

        def add(where, reason, how_far):
            for i in np.flatnonzero(where):
                known = out.setdefault(int(i), {"reasons": [], "worst": 0.0})
                known["reasons"].append(reason(i))
                known["worst"] = max(known["worst"], float(how_far[i]))

        if self.earlier is not None:
            known, low, high = self.earlier, self.earlier.min(), self.earlier.max()
            usual = f"those of earlier steps lie between {low:.4g} and {high:.4g}"
            room = max(high - low, self.replay.s.spec.reward.pass_mark) / 4  # a first success is nothing strange
            far = np.array([abs(anomalies.deviations(x, known, anomalies.LIMIT * room)[0])
                            if np.isfinite(x) else 0.0 for x in a.score])
            add(far > anomalies.LIMIT, lambda i: f"score {a.score[i]:.4g}; {usual}", far)
        far = anomalies.outliers(a.gap, 1e-3)
        middle = np.median(a.gap)
        add(far > anomalies.LIMIT, lambda i: f"its log-probs are {a.gap[i]:.3g} nats away from those of these weights "
                                             f"(median {middle:.2g})", far)
        far = a.age - np.median(a.age)
        add(far > 1, lambda i: f"sampled from weights {a.age[i]} weight syncs old (median {np.median(a.age):.0f})", far)
        return [{"answer": i, **out[i]} for i in sorted(out, key=lambda i: -out[i]["worst"])]

    def why(self) -> str:
        """Returns one sentence with the most likely cause of what the step did."""
        names = {a.name for a in self.found}
        if self.suspects:
            groups = sorted({int(self.traj.group[s["answer"]]) for s in self.suspects})
            whole = len(groups) == 1 and len(self.suspects) == int((self.traj.group == groups[0]).sum())
            which = f"group {groups[0]}, all of it" if whole else "; ".join(
                self.named(s["answer"]) for s in self.suspects[:NAMED])
            more = f" and {len(self.suspects) - NAMED} more" if not whole and len(self.suspects) > NAMED else ""
            return f"anomalous completions: {which}{more} ({self.suspects[0]['reasons'][0]})"
        if "optim/lr" in names:
            return "no completion is anomalous: the learning rate made the step long"
        if names & {"gap/mean", "gap/max"}:
            return ("the log-probs of all completions differ from those of these weights, none more than the others: "
                    "the engine had other weights than its versions say")
        if "eval/accuracy" in names:
            best = "; ".join(self.named(i) for i in self.heaviest())
            return f"the reward rises and the held-out accuracy falls; what was rewarded: {best}"
        return f"no completion is anomalous; the heaviest: {'; '.join(self.named(i) for i in self.heaviest())}"

    def heaviest(self) -> list[int]:
        """Returns numbers of at most NAMED completions with the largest shares, the largest first.

        Only completions with a measured share count, and of them those with a positive advantage if there are any."""
        liked = [i for i in self.shares if self.answers.advantage[i] > 0] or list(self.shares)
        return sorted(liked, key=lambda i: -self.shares[i])[:NAMED]

    def named(self, i: int) -> str:
        """Returns "group G sample K" of the i-th completion."""
        return f"group {self.traj.group[i]} sample {self.traj.sample[i]}"

    # ---- reports

    def _row(self, i: int) -> dict[str, Any]:
        at = self.traj.sampled()[i]
        a = {field.name: getattr(self.answers, field.name)[i].item() for field in dataclasses.fields(Answers)}
        return {"group": int(self.traj.group[i]), "sample": int(self.traj.sample[i]), **a,
                **({"share": self.shares[i]} if i in self.shares else {}), "finish": FINISH[self.traj.finish[i]],
                "text": self.replay.job.tokenizer.decode(self.traj.tokens[at])}

    def _tokens(self) -> list[dict]:
        """Returns the tokens whose log-prob changed most."""
        traj, decode = self.traj, self.replay.job.tokenizer.decode
        change = np.where(traj.loss_mask, self.after - self.before, 0)
        out = []
        for at in np.argsort(-np.abs(change), kind="stable")[:NAMED]:
            i = int(np.searchsorted(traj.spans, at, "right")) - 1
            out.append({"group": int(traj.group[i]), "sample": int(traj.sample[i]),
                        "token": int(traj.loss_mask[traj.spans[i]:at].sum()), "text": decode([int(traj.tokens[at])]),
                        "before": float(self.before[at]), "after": float(self.after[at]),
                        "advantage": float(self.done.prepared.columns["advantage"][at])})
        return out

    def summary(self) -> dict:
        """Returns the measurements as a JSON-able dict, the content of explain/step_<step>.json.

        `kl` is the k3 estimate in nats, a mean over loss tokens of e^d - 1 - d, d = after - before within +-50.
        `clipped_fraction` and `corrected_fraction` are shares of all loss tokens, `score` the mean over completions
        that have one."""
        a = self.answers
        d = (self.after - self.before)[self.traj.loss_mask]
        suspects = [s["answer"] for s in self.suspects]
        listed = list(dict.fromkeys([*suspects, *self.pushed, *self.heaviest()]))[:3 * NAMED]
        most = lambda by: dict(sorted(by.items(), key=lambda x: -abs(x[1]))[:NAMED])  # noqa: E731
        pushes = [{"group": int(self.traj.group[i]), "sample": int(self.traj.sample[i]), "change": float(a.change[i]),
                   "by_group": most(by)} for i, by in self.pushed.items()]
        return {"step": self.number, "why": self.why(), "anomalies": [x._asdict() for x in self.found],
                "replay": self.verdict.summary(), "step_length": self.length, "gradient_norm": self.norm,
                "kl": float(np.mean(np.exp(np.clip(d, -50, 50)) - 1 - d)), "groups": self.groups,
                "clipped_fraction": float(a.outside @ a.length / max(a.length.sum(), 1)),
                "corrected_fraction": float(a.corrected @ a.length / max(a.length.sum(), 1)),
                "masked_answers": int(a.masked.sum()), "truncated_answers": int(a.truncated.sum()),
                "suspects": [{**self._row(s["answer"]), "reasons": s["reasons"]} for s in self.suspects],
                "heaviest": [self._row(i) for i in self.heaviest()], "score": float(np.nanmean(a.score)),
                "answers": [self._row(i) for i in listed], "pushed": pushes, "tokens": self._tokens()}

    def text(self) -> str:
        """Returns the explanation as lines for the console."""
        told = self.summary()
        heavy = sorted(self.groups, key=lambda g: -abs(g["share"]))[:NAMED]
        lines = [f"step {self.number} ({told['replay']['result']}): {told['why']}"]
        lines += [f"  {a.text}" for a in self.found]
        lines += [f"  step of length {self.length:.4g}, KL {told['kl']:.3g} per token; {told['clipped_fraction']:.2%} "
                  f"of tokens outside the clip range, {told['corrected_fraction']:.2%} corrected, "
                  f"{told['masked_answers']} completions masked, {told['truncated_answers']} truncated",
                  "  groups by share: " + ", ".join(f"{g['group']} {g['share']:+.1%}" for g in heavy)]
        for row in [*told["suspects"][:NAMED], *(told["answers"][:NAMED] if not told["suspects"] else ())]:
            share = f", share {row['share']:+.1%}" if "share" in row else ""
            lines.append(f"  group {row['group']} sample {row['sample']}: score {row['score']:.4g}, advantage "
                         f"{row['advantage']:+.3g}, {row['length']} tokens, gap {row['gap']:.2g}, log-prob "
                         f"{row['change']:+.3g} per token{share}: {shortened(row['text'])}")
        for row in told["tokens"]:
            lines.append(f"  token {row['text']!r} ({row['token']} of group {row['group']} sample {row['sample']}): "
                         f"{row['before']:.3g} -> {row['after']:.3g}, advantage {row['advantage']:+.3g}")
        for push in told["pushed"][:2]:
            by = ", ".join(f"{g} {x:+.2g}" for g, x in list(push["by_group"].items())[:3])
            lines.append(f"  group {push['group']} sample {push['sample']} ({push['change']:+.3g} per token) was "
                         f"pushed by groups {by}")
        return "\n".join(lines)


def shortened(text: str) -> str:
    """Returns the repr of a text that is cut to 60 characters."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def earlier_scores(replay) -> np.ndarray | None:
    """Returns the finite scores of all completions of the last EARLIER recorded steps up to the replay's present one,
    [n] float; None without any."""
    before = [step for step in replay.paths if step <= replay.s.step][-EARLIER:]
    scores = [restore_batch(files.read(replay.paths[step])).scores for step in before]
    known = np.concatenate([s[np.isfinite(s)] for s in scores]) if scores else np.zeros(0)
    return known if len(known) else None
