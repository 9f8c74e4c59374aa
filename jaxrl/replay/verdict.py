"""Compares a step that was computed again with its record, stage by stage, in the order of a step's computation.

    bitwise          every hash of parameters and optimizer, every column and every metric is equal
    within rounding  numbers a and b of columns and metrics differ by at most rounding * max(1, |a|, |b|), gradient norm
                     and learning rate by at most rounding * max(|a|, |b|); and the way that a sample of the parameters
                     has gone since the checkpoint differs from the recorded one by at most DRIFT of its own length
    different        anything else; reported is the first stage beyond its bound
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxrl import diff
from jaxrl.records.states import differing
from jaxrl.telemetry.run_dir import jsonable

ROUNDING = diff.ROUNDING  # in fp32 another packing, mesh or processor moves log-probs by up to some 1e-5
COARSE = 2e-2  # in place of ROUNDING where the model is not computed in fp32
DRIFT = 0.01
COLUMNS = {"old": "log-probs of the proximal policy", "ref": "log-probs of the reference", "old_value": "values",
           "advantage": "advantages", "return": "returns"}


@dataclasses.dataclass(frozen=True)
class Place:
    """The comparison of one stage.

    Attributes:
      name: of the stage. text: the first or largest difference, "" if there is none.
      away: 0 if equal, at most 1 within its bound (as a share of the bound), else inf.
    """

    name: str
    away: float = 0.0
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The comparison of a replayed step with its record, stage by stage in the order of computation."""

    step: int
    places: tuple[Place, ...]

    @property
    def kind(self) -> str:
        """"bitwise" if every stage is equal, "within rounding" if each is within its bound, else "different"."""
        worst = max(place.away for place in self.places)
        return "different" if math.isinf(worst) else "within rounding" if worst else "bitwise"

    @property
    def first(self) -> Place | None:
        """Returns the first stage that differs, beyond its bound if any does; None if all are equal."""
        beyond = [place for place in self.places if math.isinf(place.away)]
        return next(iter(beyond or [place for place in self.places if place.away]), None)

    def summary(self) -> dict:
        """Returns {"step", "result", and, unless bitwise, "first" stage that differs and "where"}."""
        first = self.first
        where = {} if first is None else {"first": first.name, "where": first.text}
        return {"step": self.step, "result": self.kind, **where}


def of_step(record, prepared, metrics, before, after, begin, traj, rounding: float) -> Verdict:
    """Compares a step with its record, stage by stage.

    Columns are compared at loss tokens only; two NaN are equal.

    Args:
      record: records.files.Record. prepared: rl.step.Prepared, the update's inputs. metrics: of the update.
      before, after: states.Look on the host, of the states before and after the update.
      begin: [n] sample of the parameters that the replay started from (a checkpoint).
      traj: Trajectories of the step.
      rounding: relative difference that counts as rounding.
    """
    columns = record.part("column")
    places = [_state("weights and optimizer before", record, before, "before", begin)]
    places += [_column(title, columns[name], prepared.columns.get(name), traj, rounding)
               for name, title in COLUMNS.items() if name in columns]
    then, now = record.header["metrics"], jsonable(metrics)
    size = lambda table: {k: x for k, x in table.items() if k.startswith("optim/")}  # noqa: E731
    rest = lambda table: {k: x for k, x in table.items() if not k.startswith("optim/")}  # noqa: E731
    for title, part, floor in (("the update's metrics", rest, 1.0), ("gradient and learning rate", size, 1e-30)):
        away, text = diff.difference(part(then), part(now), rounding, floor)
        places.append(Place(title, away / rounding if away else 0.0, text))
    return Verdict(record.step, (*places, _state("weights and optimizer after", record, after, "after", begin)))


def _state(title, record, look, when: str, begin) -> Place:
    hashes, sample = record.arrays[f"state/{when}"], record.arrays[f"state/sample_{when}"]
    names = record.header["states"]
    if names != look.names:
        other = sorted(set(names) ^ set(look.names))
        return Place(title, math.inf, f": other arrays than recorded: {', '.join(other[:3])}")
    other = differing(names, hashes, look.hashes)
    if not other:
        return Place(title)
    way = np.linalg.norm(sample.astype(np.float64) - begin)
    apart = np.linalg.norm(sample.astype(np.float64) - look.sample)
    share = apart / max(way, 1e-30)
    if not way:  # nothing has moved yet: only equal numbers are within rounding of each other
        share = math.inf if apart else DRIFT
    said = f"{len(other)} of {len(names)} arrays, first {other[0]}; {share:.1e} of the way since the checkpoint apart"
    return Place(title, float(share / DRIFT) if share <= DRIFT else math.inf, said)


def _column(title, then, now, traj, rounding) -> Place:
    if now is None:
        return Place(title, math.inf, ": not computed under these options")
    mask = traj.loss_mask
    a, b = then.astype(np.float64), np.asarray(now, np.float64)
    equal = (then == now) | (np.isnan(a) & np.isnan(b)) | ~mask
    if equal.all():
        return Place(title)
    share = np.where(equal, 0.0, np.abs(a - b) / np.maximum(1.0, np.maximum(np.abs(a), np.abs(b))))
    share = np.where(np.isnan(share), np.inf, share)
    beyond = np.flatnonzero(share > rounding)
    at = int(beyond[0]) if len(beyond) else int(share.argmax())
    number = int(np.searchsorted(traj.spans, at, "right")) - 1
    token = int(mask[traj.spans[number]:at].sum())
    text = (f"completion {number + 1} (group {traj.group[number]}, sample {traj.sample[number]}), token {token}: "
            f"{a[at]:.7g} and {b[at]:.7g}")
    return Place(title, math.inf if len(beyond) else float(share.max()) / rounding, text)
