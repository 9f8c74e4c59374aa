"""The programs of an update are compiled beside the first rollout, and are those that the update calls."""

import json
import logging

import jax
import pytest
from helpers import tiny_job
from helpers.tiers import nightly

import jaxrl
from jaxrl.config.load import put
from jaxrl.rl import precompile

KINDS = {"grpo": {}, "ppo": {"algorithm.preset": "ppo"}, "lora": {"lora.rank": 4},
         "kl and staleness": {"algorithm.kl.coef": 0.01, "rollout.max_staleness": 1}}


def run(folder, **changes):
    c = tiny_job.get_config()
    for name, value in {"run.dir": str(folder), "run.compile_cache": "", "train.steps": 2, "eval.sets": (), "eval.every_steps": 0,
                        "checkpoint.at_end": False, "checkpoint.export_at_end": False, **changes}.items():
        put(c, name, value)
    jaxrl.train(c)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def compiled(caplog):
    """What jax says of its compilations, those of other threads, too."""
    jax.config.update("jax_log_compiles", True)
    with caplog.at_level(logging.WARNING):
        yield lambda: [r.getMessage() for r in caplog.records]
    jax.config.update("jax_log_compiles", False)


@pytest.mark.parametrize("kind", ["ppo", "lora", nightly("grpo"), nightly("kl and staleness")])
@pytest.mark.slow
def test_an_update_calls_what_was_compiled_ahead(kind, tmp_path, compiled):
    """No shape of microbatch is lowered or compiled twice: what was made from shapes alone is what the call looks for."""
    run(tmp_path, **KINDS[kind])
    told = compiled()
    shapes = [m.partition("with global shapes")[2] for m in told if m.startswith("Compiling jit(accumulate)")]
    assert 1 <= len(shapes) == len(set(shapes)), len(shapes)
    assert sum(m.startswith("Compiling jit(apply)") for m in told) == (2 if kind == "ppo" else 1)


@pytest.mark.slow
def test_without_it_the_run_is_the_same(tmp_path, monkeypatch):
    one = run(tmp_path / "with")
    monkeypatch.setattr(precompile, "may_precompile", lambda platform, processes: False)
    other = run(tmp_path / "without")
    of_update = ("loss", "optim", "reward/mean")
    plain = lambda lines: [{k: v for k, v in line.items() if k.startswith(of_update)} for line in lines]  # noqa: E731
    assert len(one) == 2 and plain(one) == plain(other) and len(plain(one)[0]) > 3


@pytest.mark.parametrize("platform, processes, may", [("cpu", 1, True), ("cpu", 2, True), ("tpu", 4, True), ("gpu", 1, True), ("gpu", 2, False)])
def test_a_process_of_several_does_not_compile_for_gpus_at_its_own_time(platform, processes, may):
    assert precompile.may_precompile(platform, processes) == may


@pytest.mark.slow
def test_what_cannot_be_made_from_shapes_is_left_to_the_call(tmp_path, monkeypatch):
    """A batch that lacks a column of the loss, say: the run goes on, and compiles when it has one."""
    monkeypatch.setattr(precompile, "columns", lambda c, objective: {})
    assert len(run(tmp_path, **{"train.steps": 1})) == 1
