"""run.mode=certify: claims hold of what is sound, and the claim that a defect breaks finds it, with a case that shows it."""

import contextlib
import json

import pytest
from helpers import certify_defects as defects
from helpers import tiny_job
from helpers.tiers import first_cases, nightly

import jaxrl
from jaxrl import main
from jaxrl.certify import claims, run
from jaxrl.certify.update import Base
from jaxrl.config.load import config_of, put
from jaxrl.errors import ConfigError
from jaxrl.resolve.spec import resolve

OF_LOSS = {name: given for name, given in defects.DEFECTS.items() if "reward.functions" not in given[0]}
OF_REWARDS = {name: given for name, given in defects.DEFECTS.items() if "reward.functions" in given[0]}
# Found by the claim that finds another one of the list, at the same place.
ALIKE = {"mean over slots that hold padding", "ratio summed over a row instead of an answer", "KL whose expected gradient is 0",
         "advantage that takes every group for full", "reward that depends on order", "reward that fails on other digits"}
BARE = ("mask", "tokens", "objective", "terms", "groups")  # what needs no model


def made(tmp_path, options):
    c = tiny_job.get_config()
    c.run.dir = str(tmp_path / "run")
    for name, value in options.items():
        put(c, name, value)
    return config_of(c)


def checks_of(tmp_path, options) -> dict:
    config = made(tmp_path, options)
    base = Base(config, tmp_path)
    return run.of_update(base, run.loss_of(base), resolve(config, engine="jax"))


@first_cases(1, "what", [nightly(w) if w in ALIKE else w for w, (_, claim) in OF_LOSS.items() if claim != "resume"])
def test_a_defect_of_loss_or_advantage_is_found(what, tmp_path):
    options, claim = OF_LOSS[what]
    found = claims.found(claim, checks_of(tmp_path, options)[claim])
    assert found.verdict == claims.FAILS
    assert found.case, found.told  # with numbers
    json.dumps(claims.jsonable(found.case))


@pytest.mark.full
@pytest.mark.parametrize("what", defects.SOUND)
def test_a_sound_loss_of_a_users_own_breaks_nothing(what, tmp_path):
    checks = checks_of(tmp_path, defects.SOUND[what])
    assert {name: claims.found(name, checks[name]).verdict for name in BARE} == dict.fromkeys(BARE, claims.HOLDS)


@pytest.mark.full
@pytest.mark.parametrize("preset", ["lite_ppo", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "rloo", "reinforce_pp", "vapo", "online_dpo"))])
def test_presets_are_what_they_say(preset, tmp_path):
    checks = checks_of(tmp_path, {"algorithm.preset": preset})
    found = {name: claims.found(name, checks[name]) for name in BARE}
    assert not [f.told for f in found.values() if f.verdict == claims.FAILS]
    assert (found["groups"].verdict == claims.NONE) == (preset in ("lite_ppo", "online_dpo"))
    assert ("its gradient itself" in found["objective"].told) == (preset == "rloo")
    assert ("KL (k1, in the reward)" in found["terms"].told) == (preset == "reinforce_pp")


@pytest.mark.full
@first_cases(1, "what", [nightly(w) if w in ALIKE else w for w in OF_REWARDS])
def test_a_defect_of_a_reward_is_found(what, tmp_path):
    options, claim = OF_REWARDS[what]
    with contextlib.ExitStack() as stack:
        checks = run.of_rewards(run.Rewards(made(tmp_path, options), None, stack))
        found = claims.found(claim, checks[claim])
    assert found.verdict == claims.FAILS and found.case["reward"]


def test_a_name_that_is_no_claim_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="certify.accept.*'reword'.*packing"):
        jaxrl.train(made(tmp_path, {"certify.accept": ("reword",), "run.mode": "certify"}))


@pytest.mark.slow
def test_a_run_says_it_all_and_ends_with_1_unless_it_is_accepted(tmp_path, capsys):
    flags = ["--config=tests/helpers/tiny_job.py", "--config.run.mode=certify", f"--config.run.dir={tmp_path}",
             f"--config.algorithm.advantage={defects.HERE}:remembers"]
    assert main.main(flags) == 1
    told = json.loads((tmp_path / "certify.json").read_text())
    assert [c["name"] for c in told["claims"]] == list(claims.CLAIMS)
    broken = {c["name"] for c in told["claims"] if c["verdict"] == claims.FAILS}
    # what it remembers differs from call to call, so that layouts' updates may part, too
    assert {"order", "repeat", "resume", "groups"} <= broken <= set(list(claims.CLAIMS)[:8]) | {"groups"}
    assert told["certified"] is False
    assert "## resume: the counterexample" in (tmp_path / "certify.md").read_text()
    assert "does not hold" in capsys.readouterr().out
    assert main.main([*flags, f"--config.certify.accept={','.join(claims.CLAIMS)}"]) == 0
    assert "does not hold (accepted)" in capsys.readouterr().out
