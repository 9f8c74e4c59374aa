"""Options that nothing would read are refused by one rule, from the condition that each option has."""

import pytest

from jaxrl.config.help import conditions, option_lines
from jaxrl.config.load import default_config, get, put
from jaxrl.config.option import BOUNDS, Option, Rows, not_chosen, shared
from jaxrl.config.registry import RECIPES
from jaxrl.config.schema import SCHEMA, element_kind, options
from jaxrl.config.user_code import imported
from jaxrl.errors import ConfigError
from jaxrl.resolve.checks import common
from jaxrl.resolve.checks.algorithm import resolved_algorithm
from jaxrl.resolve.checks.unread import SELECTORS, owned, terms, unread

BASE = default_config()
CONDITIONAL = sorted(name for name, option in options().items() if option.needs or option.read_by)


def other_value(name):
    """A value of an option that is not its default and that its choices and bound admit."""
    option = options()[name]
    kind = option.kind or type(option.default)
    if option.choices:
        values = [c for c in option.choices if c != option.default]
        return tuple(values[-1:]) if isinstance(option.default, tuple) else values[-1]
    if kind is tuple:
        return ("7",) if element_kind(name) is str else (7,)
    tries = {bool: [not option.default], str: ["x"], dict: [{"x": {}}], int: [0, 2, 7], float: [0.5, 0.0, 3.0, 0.25]}[kind]
    return next(v for v in tries if v != option.default and (not option.bound or BOUNDS[option.bound][0](v)))


def config(*changes):
    c = BASE.copy_and_resolve_references()
    c.model.path, c.data.path = "some/model", ("some.jsonl",)
    for name, value in changes:
        put(c, name, value)
    return c


def settle(term, c, holds):
    """Sets the option of a term so that the term holds, or does not."""
    option = options()[term.name]
    if term.relation in ("=", "!="):
        among = (term.relation == "=") == holds
        value = next(v for v in option.choices or (*term.values, "x") if (v in term.values) == among)
    elif term.relation:
        value = type(option.default or 1)(float(term.values[0]) + (1 if (term.relation == ">") == holds else -0.5) * holds)
    else:
        on = option.default or other_value(term.name)
        value = on if holds != term.negated else (option.kind or type(option.default))()
    put(c, term.name, value)


def value_of(c, name):
    preset = resolved_algorithm(c)
    return preset[name.removeprefix("algorithm.")] if name.removeprefix("algorithm.") in preset else get(c, name)


def satisfied(name, c):
    """Changes a config until something reads an option: what `needs` and `read_by` ask for."""
    option = options()[name]
    if option.read_by and c.run.recipe not in option.read_by:
        c.run.recipe = option.read_by[0]
    for clause in terms(option.needs):
        if not any(term.holds(value_of(c, term.name)) for term in clause):
            settle(next(t for t in clause if t.name != "run.recipe"), c, True)
    selector, rows = owned().get(name, ("", ()))
    if rows:
        put(c, selector, (rows[0],) if isinstance(options()[selector].default, tuple) else rows[0])
    return c


def said(name, c):
    return [p for p in unread(c, (name,)) if p.startswith(f"{name}=")]


@pytest.mark.parametrize("name", CONDITIONAL)
def test_an_option_is_refused_exactly_where_its_condition_does_not_hold(name):
    """By name, value and remedy, for each clause and for the recipes. At its default it is never refused."""
    option, value = options()[name], other_value(name)
    c = satisfied(name, config((name, value)))
    assert not said(name, c)
    other = [recipe for recipe in RECIPES if option.read_by and recipe not in option.read_by][:1]
    for clause in terms(option.needs) + [None] * len(other):
        c = satisfied(name, config((name, value)))
        for term in clause or ():
            if term.name == "run.recipe":
                c.run.recipe = next(recipe for recipe in option.read_by if recipe not in term.values)
            else:
                settle(term, c, False)
        c.run.recipe = c.run.recipe if clause else other[0]
        (problem,) = said(name, c)
        assert " has no effect with" in problem and problem.endswith("leave it out")
        put(c, name, option.default)
        assert not said(name, c)


def test_conditions_name_options_and_recipes():
    for option in options().values():
        assert all(clause for clause in terms(option.needs)) and set(option.read_by) <= set(RECIPES)
    for wrong in ("algorithm.nothing", "not algorithm.lam=1", "algorithm.advantage = gae", "and", "x or "):
        with pytest.raises(ValueError, match="is no condition on an option"):
            terms(wrong)
    for selector, table in SELECTORS.items():
        group = selector.partition(".")[0]
        assert all(f"{group}.{name}" in options() for row in table.values() for name in row.options or ())


def test_all_clauses_must_hold_and_one_term_of_each():
    both, either = (("eval.patience", 3),), (("data.eval_fraction", 0.1), ("eval.sets", ("a=b",)))
    assert "without eval.sets" in said("eval.patience", config(*both))[0]
    for one in either:
        assert not said("eval.patience", config(*both, one))
    assert "eval.every_steps=0" in said("eval.patience", config(*both, either[0], ("eval.every_steps", 0)))[0]
    assert not said("eval.patience", config(*both, either[0], ("eval.every_steps", 0), ("eval.every_epochs", 1.0)))


def test_the_preset_s_choice_counts_where_nobody_chose():
    assert said("algorithm.lam", config(("algorithm.lam", 0.9)))
    assert not said("algorithm.lam", config(("algorithm.lam", 0.9), ("algorithm.preset", "ppo")))
    assert said("algorithm.lam", config(("algorithm.lam", 0.9), ("algorithm.preset", "ppo"), ("algorithm.advantage", "outcome")))


def test_a_recipe_and_a_loss_of_one_s_own_may_read_any_option(tmp_path):
    (tmp_path / "mine.py").write_text("from jaxrl.config.registry import Recipe\nR = Recipe(None, 1e-3, samples=False, modes=('train',))\n"
                                      "def loss(tokens, cfg): ...\n")
    own = ("run.recipe", f"{tmp_path}/mine.py:R")
    for name in ("algorithm.lam", "critic.lr", "train.loss_on_prompt", "preference.simpo_gamma", "log.every_steps"):
        assert not said(name, config(own, (name, other_value(name))))
    assert said("optimizer.decay_shape", config(own, ("optimizer.decay_shape", "sqrt")))
    dual = ("algorithm.dual_clip", 3.0)
    assert "belongs to clip" in said("algorithm.dual_clip", config(dual, ("algorithm.policy_loss", "pg")))[0]
    assert not said("algorithm.dual_clip", config(dual, ("algorithm.policy_loss", f"{tmp_path}/mine.py:loss")))


def test_names_of_rows_are_those_of_their_tables():
    """They are read from the source, so that --help and migrations need no jax."""
    for name, tables in (("algorithm.preset", ["jaxrl.algorithms.presets:PRESETS"]), ("preference.loss", ["jaxrl.algorithms.preference:LOSSES"]),
                         ("algorithm.policy_loss", ["jaxrl.algorithms.losses:POLICY_LOSSES"]),
                         ("algorithm.advantage", ["jaxrl.rl.advantages:ESTIMATORS"])):
        rows = options()[name].choices
        assert isinstance(rows, Rows) and list(rows) == [row for table in tables for row in imported(table)]
    with pytest.raises(LookupError, match="jaxrl.rl.advantages:NOTHING"):
        list(Rows("jaxrl.rl.advantages:NOTHING"))


def test_a_value_beside_the_choices_is_refused_with_them():
    for name, value, text in (("algorithm.policy_loss", "klip", "choose one of clip, cispo"), ("algorithm.advantage", "gea", "or an import path"),
                              ("algorithm.advantage", "no.module:f", "cannot be imported")):
        with pytest.raises(ConfigError, match=f"{name}='{value}'.*{text}"):
            common.check(config((name, value)))
    listed = Option(("a",), "letters", choices=("a", "b"))
    assert not not_chosen(listed, ("b", "a")) and "choose one of a, b" in not_chosen(listed, ("a", "c"))


def test_help_shows_conditions():
    text = option_lines(options())
    assert "Needs reward_model.kind=steps" in " ".join(text.split())
    common_ones, further = conditions("critic")
    assert common_ones == {"run.recipe=rl": [], "algorithm.advantage=gae": []} and further["critic.head"] == ["critic.path"]
    assert set(conditions("env")[0]["run.recipe=rl|distill"]) == set()
    assert shared({"a": Option(1, "x", needs="b")}, "c", ("rl",))["a"] == Option(1, "x", needs="c and b", read_by=("rl",))
    assert SCHEMA["critic"]["path"].needs == "algorithm.advantage=gae and not critic.shared"
