"""What may change between a checkpoint and its resumption."""

import pytest

from jaxrl.checkpoint.resume import FUTURE, PAST, config_changes, refusal_reason
from jaxrl.config.load import default_config, put, redacted
from jaxrl.config.schema import options
from jaxrl.data.mixture import OWN, SOURCE_ONLY


@pytest.mark.parametrize("name", list(options()) + ["user.anything", "model.config.hidden_size"])
def test_every_option_is_classified(name):
    why = refusal_reason(name)
    assert why is None or len(why) > 10


def test_every_entry_of_the_table_is_an_option_or_a_group_with_options():
    names = [*options(), "user.anything", *(f"data.sources.<name>.{key}" for key in (*SOURCE_ONLY, *OWN))]
    for entry in (*FUTURE, *PAST):
        known = any(n.startswith(entry[:-1]) for n in names) if entry.endswith(".*") else entry in names
        assert known, entry
    assert not set(FUTURE) & set(PAST)


def test_an_unknown_group_is_not_guessed():
    with pytest.raises(KeyError):
        refusal_reason("engines.count")


def changed(**values):
    config = default_config()
    old = redacted(config)
    for name, value in values.items():
        put(config, name.replace("__", "."), value)
    return config_changes(old, redacted(config))


def test_the_same_config_changes_nothing():
    assert changed() == ([], [])


def test_the_past_is_refused_by_name_and_the_future_taken():
    refused, taken = changed(run__seed=1, model__config__hidden_size=64, data__seed=3, optimizer__name="sgd",
                             train__param_dtype="bf16", optimizer__lr=1e-5, train__steps=200, eval__every_steps=5,
                             checkpoint__keep=9, log__console="plain", user__mine=4, mesh__tp=2)
    assert [r.split(":")[0] for r in refused] == ["data.seed", "model.config.hidden_size", "optimizer.name", "run.seed",
                                                  "train.param_dtype"]
    assert taken == ["checkpoint.keep: 3 -> 9", "eval.every_steps: 10 -> 5", "log.console: 'auto' -> 'plain'",
                     "mesh.tp: 1 -> 2", "optimizer.lr: None -> 1e-05", "train.steps: None -> 200",
                     "user.mine: None -> 4"]
    assert refused[0].startswith("data.seed: None -> 3 (it decides which rows there are")


def test_how_a_source_is_learnt_from_may_change_and_which_rows_it_has_may_not():
    config = default_config()
    config.data.sources = {"a": {"weight": 1, "algorithm": {"advantage": "group"}}, "b": {"path": ("b.jsonl",), "coef": 1.0}}
    old = redacted(config)
    for entry, value in (("a.algorithm", {"advantage": "group", "advantage_std": False}), ("b.coef", 0.5),
                         ("b.rewards", ("exact",)), ("a.weight", 2)):
        put(config, f"data.sources.{entry}", value)
    refused, taken = config_changes(old, redacted(config))
    assert [text.split(":")[0] for text in refused] == ["data.sources.a.weight"]
    assert taken == ["data.sources.a.algorithm.advantage_std: None -> False", "data.sources.b.coef: 1.0 -> 0.5",
                     "data.sources.b.rewards: None -> ['exact']"]


def test_options_of_another_version():
    """A missing option had its default; an unknown one is said and ignored."""
    old = redacted(default_config())
    del old["optimizer"]["name"]
    old["engines"] = {"count": 3}
    refused, taken = config_changes(old, redacted(default_config()))
    assert refused == []
    assert taken == ["engines.count: 3 -> None (not an option of this jaxrl; ignored)"]
    new = default_config()
    new.optimizer.name = "lion"
    refused, _ = config_changes(old, redacted(new))
    assert refused[0].startswith("optimizer.name: 'adamw' -> 'lion'")
