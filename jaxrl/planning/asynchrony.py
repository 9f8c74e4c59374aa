"""A job's clockwork in virtual time: the runs' own admission (rollout/queue.py) between a simulated engine and trainer.

Simulated: an engine with a number of slots, whose decode steps take `fixed + each * completions` seconds, and a
trainer whose step takes `train + train_token * tokens`. Real: which completions are requested when, what waits for
what, and what a weight sync does to unfinished completions. Speeds are those of a recorded run (`read_recorded_run`)
or of a roofline (`planned`); lengths are recorded, set, or the longest.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from jaxrl.errors import ConfigError
from jaxrl.planning import roofline, workload
from jaxrl.rollout import engine_row, protocol
from jaxrl.rollout.protocol import Health, Key, Request, Result
from jaxrl.rollout.queue import RolloutQueue, staleness
from jaxrl.sharding import ROLLOUT_RULES

NEARBY = (0, 1, 2, 4, 8)  # values of rollout.max_staleness that a plan compares
WARM_UP = 3               # lines of a recorded run that hold compilations
EVENTS = 40_000           # completions that one simulation asks for, about
TURNS = ("rollout and update take turns on the same devices: staleness only fills slots that would wait for the "
         "longest completion")
PROMPT = np.ones(1, np.int32)


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Speeds of a job in seconds.

    Attributes:
      slots: completions that the engine decodes at once.
      fixed, each: of a decode step, which takes fixed + each x completions that are being decoded.
      prompt: of the engine per completion it starts, during which it decodes nothing.
      reward: after the last completion if nothing is requested ahead; else rewards run during the rollout.
      train, train_token: of the trainer per step, and per token of prompts and completions.
      publish: of a weight sync, which the engine waits for.
    """

    slots: int
    fixed: float
    each: float = 0.0
    prompt: float = 0.0
    reward: float = 0.0
    train: float = 0.0
    train_token: float = 0.0
    publish: float = 0.0


class Engine(protocol.Engine):
    """A rollout engine in virtual time.

    Args:
      speeds: seconds of its work. Requests start in order as slots become free.
      length: request -> tokens of its completion.
      beside: it works while the trainer does (on its own devices); else only while polled.

    Attributes:
      now: simulated seconds since the start. busy: seconds in which it computed.
      slot_seconds: sum over completions of the seconds in which they had a slot and the engine computed.
    """

    def __init__(self, speeds: Speeds, length, beside: bool):
        self.speeds, self.length, self.beside = speeds, length, beside
        self.now = self.busy = self.slot_seconds = 0.0
        self._waiting: collections.deque = collections.deque()
        self._running: list[tuple] = []  # heap of (mark at which it ends, number, id, version it began under)
        # tokens that a slot has decoded since the start; seconds of prompts still to compute
        self._mark = self._owed = 0.0
        self._done: list[Result] = []
        self._held, self._version, self._count = False, -1, itertools.count()

    @property
    def info(self) -> protocol.EngineInfo:
        """The engine's abilities: `holds`, and `concurrent` if it has devices of its own."""
        return protocol.EngineInfo(concurrent=self.beside, holds=True)

    def abort(self, ids=None) -> None:
        """Drops all requests, whichever `ids` names; results that wait to be polled stay."""
        self._waiting.clear()
        self._running.clear()

    def close(self) -> None:
        """Drops all requests."""
        self.abort()

    def clock(self) -> float:
        """Returns the simulated time in seconds."""
        return self.now

    def submit(self, requests) -> None:
        """Queues requests."""
        self._waiting.extend(requests)

    def poll(self, deadline_s: float) -> list[Result]:
        """Advances the time until a request is done, by at most deadline_s seconds, and not at all if none is being
        computed. Returns the results, whose tokens and log-probs are empty."""
        self._work(self.now + deadline_s, until_done=True)
        done, self._done = self._done, []
        return done

    def elapse(self, seconds: float) -> None:
        """Advances the time by `seconds` of the trainer; the engine works meanwhile if it has devices of its own."""
        end = self.now + seconds
        if self.beside:
            self._work(end)
        self.now = end

    def hold(self, on: bool) -> None:
        """Prevents waiting requests from starting while on; those that have started go on."""
        self._held = on

    def publish(self, params, version: int) -> None:
        """Advances the time by that of a weight sync; requests go on under the new version. params: not read."""
        self.now += self.speeds.publish
        self._version = version

    def health(self) -> Health:
        """Returns the state of the simulated engine."""
        return Health(True, version=self._version, running=len(self._running))

    def _work(self, end: float, until_done: bool = False) -> None:
        while self.now < end and not (until_done and self._done):
            while self._waiting and len(self._running) < self.speeds.slots and not self._held:
                request = self._waiting.popleft()
                heapq.heappush(self._running, (self._mark + self.length(request), next(self._count), request.id,
                                               self._version))
                self._owed += self.speeds.prompt
            if not self._running:
                return
            if self._owed > 0:
                spent = min(self._owed, end - self.now)
                self._owed -= spent
            else:
                step = self.speeds.fixed + self.speeds.each * len(self._running)
                spent = (self._running[0][0] - self._mark) * step
                if self.now + spent > end:
                    spent = end - self.now
                    self._mark += spent / step
                else:
                    self._mark = self._running[0][0]
                    self._finish()
            self.now += spent
            self.busy += spent
            self.slot_seconds += spent * len(self._running)

    def _finish(self) -> None:
        while self._running and self._running[0][0] <= self._mark:
            _, _, name, version = heapq.heappop(self._running)
            none = np.zeros(0, np.float32)
            self._done.append(Result(name, np.zeros(0, np.int32), none, none, np.array([version, self._version]),
                                     "stop", 0))


def simulate(speeds: Speeds, lengths, *, per_step: int, group_size: int, steps: int, max_staleness: int = 0,
             sync_every: int = 1,
             partial: bool = False, beside: bool = True, prompt: float = 0.0) -> dict:
    """Simulates an endless run and measures `steps` steps after the pipeline has filled.

    Args:
      speeds: of engine and trainer.
      lengths: tokens of the completions in the order of the data, repeated; at least one.
      per_step: prompts of a step. group_size: completions of a prompt.
      max_staleness, sync_every, partial: the options below `rollout`.
      beside: the engine has devices of its own.
      prompt: tokens of one prompt.

    Returns:
      {"seconds": of each step from the first on; of the measured steps: "step_seconds" mean, "trainer", "engine"
      shares of the time in which each works; "staleness": the highest of all steps, in weight syncs}.
    """
    number = lambda request: request.key.prompt * group_size + request.key.sample  # noqa: E731
    length = lambda request: int(lengths[number(request) % len(lengths)])  # noqa: E731
    engine = Engine(speeds, length, beside)
    queue = RolloutQueue(
        engine, per_step=per_step, max_staleness=max_staleness, sync_every=sync_every, partial=partial,
        clock=engine.clock, steps=1 << 60,
        draw=lambda cursor, count: ([(p, None) for p in range(cursor, cursor + count)], cursor + count),
        requests=lambda prompts, step: [Request(str(key), PROMPT, group=p, key=key) for p, _ in prompts
                                        for i in range(group_size) for key in [Key("train", step, p, i)]])
    queue.publish(None, 0)
    first, cursor, trained, oldest, ends = (max_staleness + 1) * sync_every, 0, 0.0, 0, []
    for step in range(first + steps):
        if step == first:
            began = engine.now, engine.busy, trained
        groups, cursor = queue.request_groups(step, cursor)
        queue.wait(groups, float("inf"))
        oldest = max(oldest, *(int(staleness(step, r.versions.min(), sync_every)) for g in groups
                               for r in g.results.values()))
        tokens = sum(length(r) + prompt for g in groups for r in g.requests)
        work = speeds.train + speeds.train_token * tokens
        engine.elapse((0.0 if max_staleness or sync_every > 1 else speeds.reward) + work)
        trained += work
        queue.poll()
        queue.release(cursor)
        if (step + 1) % sync_every == 0:
            queue.publish(None, step + 1)
        ends.append(engine.now)
    span = ends[-1] - began[0]
    return {"seconds": np.diff([speeds.publish, *ends]).tolist(), "step_seconds": span / steps,
            "trainer": (trained - began[2]) / span, "engine": (engine.busy - began[1]) / span, "staleness": oldest}


# -- speeds and lengths ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """Measurements of a recorded run.

    Attributes:
      lengths: tokens of the completions of each step, an integer array [completions] each.
      seconds: [steps] of each step without evaluation, checkpoints, exports.
      speeds: fitted to these. per_step: prompts of a step. group_size: completions of a prompt.
    """

    lengths: list[np.ndarray]
    seconds: np.ndarray
    speeds: Speeds
    per_step: int
    group_size: int


def read_recorded_run(folder, steps: slice = slice(WARM_UP, None)) -> RecordedRun:
    """Reads rollouts/ and metrics.jsonl of a synchronous run and fits the speeds, all at least 0, to these steps:

        rollout = fixed * decode steps + each * tokens + prompt * completions
        score + update + other = train + train_token * tokens

    Tokens are completion tokens. The fits are of least absolute deviation; reward and publish are medians.

    steps: of the lines with rollouts; by default those after WARM_UP, which holds compilations.

    Raises ConfigError for a folder without config.json and metrics.jsonl, a run whose times overlap
    (rollout.max_staleness, sync_every), or fewer than two steps with rollouts.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))["config"]
        roll, per_step, group = config["rollout"], config["data"]["prompts_per_step"], config["rollout"]["group_size"]
        lengths, times = _recorded_steps(folder)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"plan.run={str(folder)!r}: no config.json and metrics.jsonl of a run there "
                          f"({type(e).__name__}: {e})") from None
    if roll.get("max_staleness", 0) or roll.get("sync_every", 1) > 1:
        raise ConfigError(f"plan.run={str(folder)!r}: its phases overlap; name a run with rollout.max_staleness=0 and "
                          "sync_every=1")
    lengths, times = lengths[steps], times[steps]
    if len(lengths) < 2:
        raise ConfigError(f"plan.run={str(folder)!r}: {len(lengths)} steps with rollouts after the first {WARM_UP}; "
                          "name a longer run with log.rollouts=True")
    engine = engine_row(SimpleNamespace(rollout=SimpleNamespace(**roll)), here=False)
    slots = engine.slots(roll, per_step * group)
    of = lambda *names: np.array([sum(t.get(n, 0.0) for n in names) for t in times])  # noqa: E731
    seconds = of("step") - of("eval", "checkpoint", "export")
    tokens, answers = np.array([n.sum() for n in lengths], float), np.array([len(n) for n in lengths], float)
    decode = np.array([_decode_steps(n, slots) for n in lengths], float)
    fixed, each, prompt = _fitted(of("rollout"), decode, tokens, answers)
    train, train_token = _fitted(seconds - of("rollout", "reward", "publish"), np.ones_like(tokens), tokens)
    reward, publish = float(np.median(of("reward"))), float(np.median(of("publish")))
    speeds = Speeds(slots, fixed, each, prompt, reward, train, train_token, publish)
    return RecordedRun(lengths, seconds, speeds, per_step, group)


def _recorded_steps(folder: Path) -> tuple[list[np.ndarray], list[dict]]:
    """Returns (completion tokens [n] of each step with rollouts, seconds by phase of each). Raises OSError, ValueError,
    KeyError or TypeError for files of another form."""
    lengths, times = [], []
    for line in map(json.loads, filter(None, (folder / "metrics.jsonl").read_text("utf-8").split("\n"))):
        path = folder / "rollouts" / f"step_{line['step']:08d}.jsonl"
        if "rollout/tokens" in line and path.is_file():
            rows = path.read_text("utf-8").split("\n")
            lengths.append(np.array([len(json.loads(row)["tokens"]) for row in rows if row]))
            times.append(dict(line["time"]))
    return lengths, times


def nonnegative_lstsq(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns x >= 0 [K] float64 that minimises |matrix x - target|^2; for few columns: it solves 2^K - 1 problems.

    Solves the unbounded problem on every subset of the K columns. The solution of the bounded problem is that of its
    positive columns, so it is the feasible one with the smallest residual.

    matrix: [n, K]. target: [n].
    """
    count = matrix.shape[1]
    best, least = np.zeros(count), float(target @ target)
    for columns in itertools.chain.from_iterable(itertools.combinations(range(count), n) for n in range(1, count + 1)):
        x = np.zeros(count)
        x[list(columns)] = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
        residual = float(np.sum((matrix @ x - target) ** 2))
        if x.min() >= 0 and residual < least:
            best, least = x, residual
    return best


def _fitted(seconds, *columns) -> list[float]:
    """Coefficients, at least 0, of the least absolute deviation: a step during which the machine did something else
    weighs little. (Least squares, weighted by the last residuals' inverse.)"""
    matrix, weights = np.stack(columns, 1), np.ones_like(seconds)
    for _ in range(30):
        found = nonnegative_lstsq(matrix * weights[:, None], seconds * weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(matrix @ found - seconds), 1e-3 * seconds.mean()))
    return [float(x) for x in found]


def _decode_steps(lengths, slots: int) -> float:
    """Returns the decode steps until all completions are done."""
    return simulate(Speeds(slots, 1.0), lengths, per_step=len(lengths), group_size=1, steps=1)["seconds"][0]


def planned(case, phases: dict) -> Speeds:
    """Returns the Speeds of the target by its roofline. vLLM's servers count as devices of the same kind.

    A decode step takes the seconds of reading the weights at 0 completions, rising linearly to those of full slots.
    Training has no fixed part: its seconds are spread over the tokens of longest sequences. Rewards take no time.

    Args:
      case: planning.case.Case.
      phases: name -> {"seconds", ...} of plan.times.
    """
    c, chip = case.config, case.target.chip
    (inner, shapes, width), servers = case.sampler, case.samplers
    decode, prefill = workload.rollout_work(c, case.model, inner, shapes, servers, width)
    weights = workload.Work(0.0, workload.weight_bytes(case.model, inner, ROLLOUT_RULES, width),
                            launches=decode.launches)
    seconds = lambda work: roofline.phase(chip, [(work, 1)], 0.0)["seconds"]  # noqa: E731
    least, full = sorted((seconds(weights), seconds(decode)))
    slots = shapes.slots * servers
    train = sum(phases[name]["seconds"] for name in ("score", "critic", "update") if name in phases)
    tokens = c.data.prompts_per_step * c.rollout.group_size * sum(workload.lengths(c))
    return Speeds(slots, least, (full - least) / slots,
                  seconds(prefill) / (shapes.prefill_rows * c.rollout.group_size * servers),
                  train_token=train / tokens, publish=phases["publish"]["seconds"] if "publish" in phases else 0.0)


def compare(config, speeds: Speeds, lengths, beside: bool, prompt: float) -> list[dict]:
    """Returns one row per value of rollout.max_staleness, the config's and those of NEARBY, ascending.

    A row is {"max_staleness", "step_seconds", "trainer", "engine"}; the last two are shares of the time in which each
    works. lengths: tokens of completions, repeated. beside: the engine has devices of its own. prompt: tokens of a
    prompt.
    """
    c = config
    own, every = c.rollout.max_staleness, c.rollout.sync_every
    batch = c.data.prompts_per_step * c.rollout.group_size
    rows = []
    for k in sorted({own, *NEARBY}):
        steps = max(8, min(48, EVENTS // batch))
        found = simulate(speeds, lengths, per_step=c.data.prompts_per_step, group_size=c.rollout.group_size,
                         steps=steps, max_staleness=k,
                         sync_every=every, partial=c.rollout.partial, beside=beside, prompt=prompt)
        rows.append({"max_staleness": k, **{name: found[name] for name in ("step_seconds", "trainer", "engine")}})
    return rows


def plan_asynchrony(case, phases: dict) -> dict:
    """Returns {"basis", "beside", "rows", "balance"} of a plan.

    basis: where speeds and lengths come from, as text. beside: whether the engine has devices of its own. rows: of
    `compare`. balance: {"engine", "trainer", "has"}, how to split the same number of devices so that neither side
    waits, by the seconds each is busy at the smallest staleness; {} if both share theirs.

    phases: name -> {"seconds", ...} of plan.times. With plan.run it raises what read_recorded_run raises.
    """
    c = case.config
    own = bool(c.rollout.servers or c.rollout.vllm.devices) and c.rollout.placement != "colocated"
    beside = case.rollout is None and own
    if c.plan.run:
        run = read_recorded_run(c.plan.run)
        speeds, prompt = run.speeds, 0.0
        lengths, basis = np.concatenate(run.lengths), f"speeds and lengths of {c.plan.run}"
    else:
        speeds, prompt = planned(case, phases), workload.lengths(c)[0]
        lengths, basis = (workload.lengths(c)[1],), "every answer at its longest"
        if c.plan.lengths:
            lengths, basis = c.plan.lengths, "plan.lengths"
    rows = compare(c, speeds, lengths, beside, prompt)
    out = {"basis": basis, "beside": beside, "rows": rows, "balance": {}}
    if beside:
        has = {"trainer": case.target.count, "engine": case.samplers * c.rollout.vllm.tensor_parallel}
        work = {side: rows[0][side] * rows[0]["step_seconds"] * n for side, n in has.items()}
        share = work["engine"] / sum(work.values())
        out["balance"] = {"engine": share * sum(has.values()), "trainer": (1 - share) * sum(has.values()), "has": has}
    return out


def table(found: dict) -> list[str]:
    """Returns the lines of a plan's text about running ahead. found: of `plan_asynchrony`."""
    lines = ["", "running ahead, simulated (" + found["basis"] + "; "
             + ("the engine on devices of its own)" if found["beside"] else "the engine on the trainer's devices)"),
             f"  {'max_staleness':>14s}{'step s':>10s}{'trainer':>10s}{'engine':>10s}   busy"]
    lines += [f"  {r['max_staleness']:14d}{r['step_seconds']:10.3g}{r['trainer']:10.0%}{r['engine']:10.0%}"
              for r in found["rows"]]
    if not found["beside"]:
        lines.append(f"  {TURNS}")
    if b := found["balance"]:
        lines.append(f"  balanced at {b['trainer']:.1f} devices of the trainer to {b['engine']:.1f} of the engine "
                     f"(this plan has {b['has']['trainer']} to {b['has']['engine']})")
    return lines
