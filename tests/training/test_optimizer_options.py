"""Options of an optimizer that the chosen one does not read are refused, wherever they were written."""

import pytest

from jaxrl.config.load import default_config, put
from jaxrl.resolve.checks import common
from jaxrl.resolve.checks.adapters import several_adapters

PATH = "optax.contrib.muon"
TO = "set optimizer.name=adamw, lion or adafactor"


def problems(changes):
    c = default_config()
    c.model.path, c.data.path = "some/model", ("some.jsonl",)
    for name, value in changes.items():
        put(c, name, value)
    return [p for rule in (common._types, common._unread, common._optimizer) for p in rule(c)]


@pytest.mark.parametrize("changes, text", [
    ({"optimizer.name": PATH, "optimizer.weight_decay": 0.1}, f"optimizer.weight_decay=0.1 has no effect with optimizer.name={PATH}; set "),
    ({"optimizer.name": PATH, "optimizer.weight_decay": 0.0}, "optimizer.weight_decay=0.0 has no effect"),  # the factory has its own
    ({"optimizer.name": PATH, "optimizer.b1": 0.8}, "optimizer.b1=0.8 has no effect"),
    ({"optimizer.name": "sgd", "optimizer.b2": 0.9},
     "optimizer.b2=0.9 has no effect with optimizer.name=sgd; set optimizer.name=adamw, adam or lion"),
    ({"optimizer.name": "lion", "optimizer.eps": 1e-6}, "optimizer.eps=1e-06 has no effect with optimizer.name=lion"),
    ({"optimizer.name": "adafactor", "optimizer.b1": 0.8}, "optimizer.b1=0.8 has no effect"),
    ({"optimizer.name": "adam", "optimizer.weight_decay": 0.1}, f"optimizer.weight_decay=0.1 has no effect with optimizer.name=adam; {TO}"),
    ({"optimizer.name": PATH, "optimizer.groups": {"embed": {"weight_decay": 0.0}}}, "optimizer.groups['embed']['weight_decay']=0.0 has no"),
    ({"optimizer.name": "sgd", "optimizer.groups": {"embed": {"weight_decay": 0.1}}}, "optimizer.groups['embed']['weight_decay']=0.1 has no"),
    ({"algorithm.preset": "ppo", "critic.optimizer": {"name": "sgd", "b2": 0.9}}, "critic.optimizer.b2=0.9 has no effect with optimizer.name=sgd"),
    ({"algorithm.preset": "ppo", "critic.optimizer": {"name": "adam", "weight_decay": 0.1}}, "critic.optimizer.weight_decay=0.1 has no effect")])
def test_what_an_optimizer_does_not_read_is_refused(changes, text):
    found = problems(changes)
    assert len(found) == 1 and found[0].startswith(text) and found[0].endswith("leave it out"), found


@pytest.mark.parametrize("changes", [
    {"optimizer.name": PATH}, {"optimizer.name": PATH, "optimizer.groups": {"embed": {"lr": 0.1}}},
    {"optimizer.name": "sgd", "optimizer.weight_decay": 0.0, "optimizer.b1": 0.0},  # as it is
    {"optimizer.name": "adam", "optimizer.groups": {"embed": {"weight_decay": 0.0}}},
    {"optimizer.name": "adafactor", "optimizer.weight_decay": 0.1}, {"optimizer.b2": 0.95, "optimizer.eps": 1e-6},
    {"algorithm.preset": "ppo", "optimizer.b2": 0.9, "optimizer.weight_decay": 0.3, "optimizer.schedule": "wsd", "optimizer.decay_shape": "sqrt",
     "critic.optimizer": {"name": "sgd", "schedule": "constant"}}])  # what the policy alone reads
def test_what_is_read_or_as_it_is_is_accepted(changes):
    assert problems(changes) == []


def test_entries_of_an_adapter_are_held_against_its_own_optimizer():
    def found(**entries):
        c = default_config()
        put(c, "optimizer.b2", 0.9)
        put(c, "data.sources", {"math": {"path": ("a.jsonl",)}})
        put(c, "lora.adapters", {"one": {"sources": ("math",), **entries}})
        return [p for p in several_adapters(c) if p.startswith("lora.adapters.one.")]

    assert found(name="sgd", lr=0.1) == found(b2=0.8) == []
    (idle,) = found(name="sgd", b2=0.8)
    assert idle.startswith("lora.adapters.one.b2=0.8 has no effect with optimizer.name=sgd")
    (decay,) = found(name="adam", weight_decay=0.1)
    assert decay.startswith("lora.adapters.one.weight_decay=0.1 has no effect with optimizer.name=adam")
    (unknown,) = found(name="adamm")
    assert unknown.startswith("lora.adapters.one.name='adamm': not one of adamw")
    (shape,) = found(floor=0.1)
    assert shape.startswith("lora.adapters.one.floor=0.1 has no effect with optimizer.schedule=constant")
