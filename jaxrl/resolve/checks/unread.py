"""Options that were set and that nothing reads: one rule for the conditions `needs` and `read_by` of all options.

Conditions are read before any "auto" is decided. Of an option below `algorithm` that nobody set they
see the preset's value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxrl.algorithms import POLICY_LOSSES
from jaxrl.algorithms.preference import LOSSES
from jaxrl.config.load import get
from jaxrl.config.option import Option, no_effect
from jaxrl.config.registry import BUILT_IN, recipe_of
from jaxrl.config.schema import options
from jaxrl.resolve.spec import algorithm_row
from jaxrl.training.optimizer import BY_NUMBER, DECOUPLED_DECAY

# Options that choose rows of a table, which say what else they read.
SELECTORS = {"algorithm.policy_loss": POLICY_LOSSES, "preference.loss": LOSSES}
TABLES = ("reward.remote.", "reward.judge.")  # a reward's table may stand on top of these: see services


class Term(NamedTuple):
    """One term of a condition: `option`, `not option`, `option=a|b`, `option!=a|b`, `option>1`, `option<1`.

    Attributes:
      negated: it has `not`. name: dotted name of the option.
      relation: "", "=", "!=", "<" or ">". values: what it is compared with, as text.
    """

    negated: bool
    name: str
    relation: str
    values: tuple[str, ...]

    def holds(self, value) -> bool:
        """Returns whether a value of the option fulfils the term; recipes of the user's own fulfil every term on
        run.recipe."""
        if self.name == "run.recipe" and value not in BUILT_IN:  # one of the user's own may read any option
            return True
        if not self.relation:
            return bool(value) != self.negated
        if self.relation in "<>":
            bound = float(self.values[0])
            return value < bound if self.relation == "<" else value > bound
        return (str(value) in self.values) == (self.relation == "=")

    def remedy(self) -> tuple[str, str]:
        """Returns (verb, object) of a change that makes the term hold."""
        if self.relation in ("<", ">"):
            return "lower" if self.relation == "<" else "raise", self.name
        if not self.relation:
            return "leave out" if self.negated else "set", self.name
        values, choices = self.values, options()[self.name].choices or ()
        if self.relation == "!=":
            values = tuple(str(c) for c in choices if str(c) not in (*values, "auto"))
        return "set", f"{self.name}={_listed(values)}"


def terms(needs: str) -> list[list[Term]]:
    """Parses a condition: clauses, all of which must hold, of terms, one of which must; "" -> [].

    Raises ValueError for other text, and for an option that does not exist.
    """
    out = []
    for clause in needs.split(" and ") if needs else ():
        out.append([])
        for text in clause.split(" or "):
            found = re.fullmatch(r"(not )?([a-z_0-9.]+)(?:(!=|=|<|>)([\w.|]+))?", text)
            if not found or found[2] not in options() or found[1] and found[3]:
                raise ValueError(f"{needs!r}: {text!r} is no condition on an option")
            out[-1].append(Term(bool(found[1]), found[2], found[3] or "", tuple((found[4] or "").split("|"))))
    return out


def is_set(option: Option, value) -> bool:
    """Returns whether an option's value is not its default; of a table, whether it has entries."""
    if option.default is None or isinstance(option.default, dict):
        return value is not None if option.default is None else bool(value)
    return (tuple(value) if isinstance(option.default, tuple) else value) != option.default


def missing(option: Option, value_of: Callable) -> tuple[str, str] | None:
    """Returns (what is missing of the first clause of an option's condition that does not hold, remedy), or None if all
    hold. value_of: value of an option by name."""
    for clause in terms(option.needs):
        values = {term.name: value_of(term.name) for term in clause}
        if any(term.holds(values[term.name]) for term in clause):
            continue
        shown = [term for term in clause if term.name != "run.recipe"] or clause  # the recipe is no mistake
        empty = [t.name for t in shown if not values[t.name] and not isinstance(values[t.name], int | float)]
        other = [f"{term.name}={_short(values[term.name])}" for term in shown if term.name not in empty]
        lacks = [word + _listed(names, "and") for word, names in (("with ", other), ("without ", empty)) if names]
        verbs = {verb: [what for v, what in (term.remedy() for term in shown) if v == verb]
                 for verb, _ in (term.remedy() for term in shown)}
        return " and ".join(lacks), ", or ".join(f"{verb} {_listed(whats)}" for verb, whats in verbs.items())
    return None


def _short(value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def unread(cfg, prefixes: Iterable[str] = (), value_of: Callable | None = None) -> list[str]:
    """Returns a problem for every option that is set and that nothing would read.

    Of a recipe of the user's own that does not learn from rewards of samples, no option with a `read_by` is a problem.

    Args:
      prefixes: of the options that are asked about; () = all but those of TABLES.
      value_of: value of an option by name; None = the config's, with the preset's choices.
    """
    row = {f"algorithm.{name}": value for name, (value, _) in algorithm_row(cfg).items()}
    value_of = value_of or (lambda name: row[name] if name in row else get(cfg, name))
    own, out, owners = cfg.run.recipe not in BUILT_IN, [], owned()
    trains_by_reward = recipe_of(cfg).samples and recipe_of(cfg).judged
    for name, option in options().items():
        if not (name.startswith(tuple(prefixes)) if prefixes else not name.startswith(TABLES)):
            continue
        value = value_of(name) if name.startswith(TABLES) else get(cfg, name)
        if not is_set(option, value) or own and option.read_by and not trains_by_reward:
            continue
        if option.read_by and not own and cfg.run.recipe not in option.read_by:
            lacks = f"with run.recipe={cfg.run.recipe}", f"set run.recipe={_listed(option.read_by)}, or leave it out"
        elif lacks := missing(option, value_of):
            lacks = lacks[0], f"{lacks[1]}, or leave it out"
        elif name in owners:
            lacks = _not_chosen(value_of(owners[name][0]), *owners[name])
        if lacks:
            out.append(no_effect(name, sorted(value) if hasattr(value, "keys") else value, *lacks))
    return out


def unread_decay(o) -> list[str]:
    """Returns the problems of weight decay, of all parameters or of a group's, beside an optimizer that has none.

    0 is no mistake beside adam and sgd; of an import path it is, whose factory has its own. o: config.optimizer.
    """
    if o.name in DECOUPLED_DECAY:
        return []
    built_in = o.name in BY_NUMBER
    found = {f"optimizer.groups[{pattern!r}]['weight_decay']": group["weight_decay"] for pattern, group
             in o.groups.items() if hasattr(group, "items") and "weight_decay" in group}
    if built_in and is_set(options()["optimizer.weight_decay"], o.weight_decay):  # else its condition refuses it
        found["optimizer.weight_decay"] = o.weight_decay
    remedy = f"set optimizer.name={_listed(DECOUPLED_DECAY)}, or leave it out"
    return [no_effect(name, value, f"with optimizer.name={o.name}", remedy) for name, value in found.items()
            if value or not built_in]


def owned() -> dict[str, tuple[str, list[str]]]:
    """Returns option that some entries of a table read -> (the option that chooses the entry, the
    names of these entries).
    """
    out: dict[str, tuple[str, list[str]]] = {}
    for selector, table in SELECTORS.items():
        for name, row in table.items():
            for option in row.options or ():
                out.setdefault(f"{selector.rpartition('.')[0]}.{option}", (selector, []))[1].append(name)
    return out


def _not_chosen(chosen, selector: str, owners: list[str]) -> tuple[str, str] | None:
    """Returns (the chosen entry, the owner of the option) if no chosen entry reads it. An entry whose `options` is
    None, and a user's loss, may read any.
    """
    names, table = (chosen,) if isinstance(chosen, str) else tuple(chosen), SELECTORS[selector]
    if any(name not in table or table[name].options is None or name in owners for name in names):
        return None
    return f"with {selector}={', '.join(names)}", f"it belongs to {', '.join(owners)}"


def _listed(values: Sequence[str], last: str = "or") -> str:
    return f" {last} ".join(filter(None, (", ".join(values[:-1]), values[-1])))
