"""A claim, its verdict, and how verdicts are written."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl.telemetry.run_dir import dumps, jsonable, write_atomic

VERDICTS = HOLDS, FAILS, NONE = "holds", "does not hold", "not applicable"

# Name -> what is claimed, in the order of the table.
CLAIMS = {
    "microbatches": "an update does not depend on how it is cut into microbatches",
    "packing": "nor on which answers share a row, nor on whether they share a copy of their prompt",
    "padding": "nor on the length of rows, nor on rows without answers",
    "order": "nor on the order of the groups, nor on that of the answers of a group",
    "meshes": "nor on the mesh of devices",
    "scoring": "the log-prob of a packed token is that of the answer alone, read from what stands before it",
    "repeat": "the same batch twice, from the same state, is the same update",
    "resume": "the update after a kill and a resume is bitwise the one without",
    "mask": "what stands in slots without a sampled token changes neither loss nor gradient",
    "tokens": "tokens of an answer with one advantage are learnt from alike, none is left out",
    "objective": "the expected update raises the expected score",
    "terms": "every term of the loss has a gradient, in the direction that it is there for",
    "groups": "the advantage of an answer depends on its own group alone",
    "reward_twice": "a reward says the same when it is asked again",
    "reward_columns": "a reward does not depend on the order of the row's columns",
    "reward_rows": "nor on the other rows that it is asked with, nor on their order",
    "reward_hostile": "a reward has a finite number, or None, for any text",
}


@dataclasses.dataclass
class Claim:
    """The result of testing one claim.

    Attributes:
      name: of CLAIMS. verdict: one of VERDICTS.
      told: figures, or the reason why it fails or does not apply. case: the smallest counterexample found, JSON-able;
        None = there is none.
      accepted: certify.accept names the claim.
    """

    name: str
    verdict: str
    told: str
    case: Any = None
    accepted: bool = False

    @property
    def broken(self) -> bool:
        """Whether the claim fails and is not accepted."""
        return self.verdict == FAILS and not self.accepted

    def shown(self) -> str:
        """Returns the verdict as text, with "(accepted)" for an accepted failure."""
        return self.verdict + " (accepted)" * (self.accepted and self.verdict == FAILS)


class Broken(Exception):
    """Raised if a claim does not hold. told: what is wrong. case: the counterexample, JSON-able; None = there is none.
    """

    def __init__(self, told: str, case=None):
        super().__init__(told)
        self.told, self.case = told, case


class NotApplicable(Exception):
    """Raised if a claim does not apply to a config; the text is the reason."""


def found(name: str, check: Callable[[], str], accept=()) -> Claim:
    """Runs one check, which returns its figures or raises Broken or NotApplicable, and returns the Claim.

    Any other exception breaks the claim, too: it comes from user code, called with values that a run may pass.

    name: of CLAIMS. accept: names of claims whose failure is accepted (certify.accept)."""
    try:
        return Claim(name, HOLDS, check())
    except Broken as e:
        return Claim(name, FAILS, e.told, e.case, name in accept)
    except NotApplicable as e:
        return Claim(name, NONE, str(e))
    except Exception as e:
        frame = traceback.extract_tb(e.__traceback__)[-1]
        where = f"{Path(frame.filename).name}, line {frame.lineno}"
        return Claim(name, FAILS, f"{type(e).__name__}: {str(e)[:500]} ({where})", None, name in accept)


def table(claims: list[Claim]) -> str:
    """Formats the claims as a table for the console."""
    rows = [(c.name, c.shown(), c.told) for c in claims]
    wide = [max(len(row[k]) for row in rows) for k in (0, 1)]
    lines = [f"  {name:<{wide[0]}}  {verdict:<{wide[1]}}  {told}" for name, verdict, told in rows]
    return "\n".join(lines)


def markdown(title: str, claims: list[Claim]) -> str:
    """Returns the content of certify.md under this title: a table of the claims, and their counterexamples as JSON."""
    clean = lambda text: text.replace("|", "\\|").replace("\n", " ")  # noqa: E731
    lines = [f"# {title}", "", "| claim | | verdict | |", "|---|---|---|---|"]
    lines += [f"| {c.name} | {clean(CLAIMS[c.name])} | {c.shown()} | {clean(c.told)} |" for c in claims]
    for c in claims:
        if c.case is not None:
            lines += ["", f"## {c.name}: the counterexample", "", "```json", dumps(jsonable(c.case), indent=1), "```"]
    return "\n".join(lines) + "\n"


def write(folder: Path, title: str, about: dict, claims: list[Claim]) -> None:
    """Writes the claims to certify.json and certify.md in the folder, each atomically. title: of certify.md. about:
    further entries of certify.json."""
    told = about | {"claims": [dataclasses.asdict(c) | {"says": CLAIMS[c.name]} for c in claims]}
    write_atomic(folder / "certify.json", dumps(jsonable(told), indent=1) + "\n")
    write_atomic(folder / "certify.md", markdown(title, claims))
