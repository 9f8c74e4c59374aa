"""A new loss option, a new recipe and a new kind of objective need what belongs to them and no change elsewhere."""

import json
import runpy

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_job
from helpers.data_cases import write_jsonl
from test_docs import ROOT, blocks_of

import jaxrl
from jaxrl.algorithms import POLICY_LOSSES, TOKEN_MASKS, PolicyLoss, TokenMask
from jaxrl.config.load import put
from jaxrl.config.option import Option
from jaxrl.config.registry import RECIPES
from jaxrl.config.schema import SCHEMA, options
from jaxrl.config.user_code import imported
from jaxrl.errors import ConfigError
from jaxrl.resolve.checks import common
from jaxrl.telemetry.health import mechanisms
from jaxrl.telemetry.names import describe


@pytest.fixture
def add_option(monkeypatch):
    """add_option(group, name, option) writes a row into the schema, as an edit of jaxrl/config would; the flat view, which is made once,
    is made again with it, and without it after the test."""

    def add(group, name, option):
        monkeypatch.setitem(SCHEMA[group], name, option)
        options.cache_clear()

    yield add
    monkeypatch.undo()
    options.cache_clear()


@pytest.mark.slow
def test_a_loss_option_is_a_row_and_what_reads_it(add_option, monkeypatch, tmp_path):
    """Place one: the option, with default, bound and meaning. Place two: the loss, with its row. A run trains with it, its bound is
    kept, and it is refused where another loss is chosen, or a ratio that it does not take."""
    add_option("algorithm", "haste", Option(1.0, "factor on every token's loss", bound=">0"))

    def hasty(tokens, cfg):
        loss = -cfg.haste * jnp.where(tokens.mask, tokens.advantage * tokens.logp, 0)
        return loss, {}

    monkeypatch.setitem(POLICY_LOSSES, "hasty", PolicyLoss(hasty, ("token",), ("haste",)))
    norms = {}
    for haste in (1.0, 3.0):
        c = tiny_job.get_config()
        c.run.dir, c.log.console, c.eval.sets, c.train.steps = str(tmp_path / str(haste)), "off", (), 1
        put(c, "algorithm.policy_loss", "hasty")
        put(c, "algorithm.haste", haste)
        jaxrl.train(c)
        line = json.loads((tmp_path / str(haste) / "metrics.jsonl").read_text().splitlines()[-1])
        norms[haste] = line["optim/grad_norm"]
    assert norms[3.0] == pytest.approx(3 * norms[1.0], rel=1e-5) and norms[1.0] > 0
    put(c, "algorithm.haste", -1.0)
    put(c, "algorithm.policy_loss", "clip")
    put(c, "algorithm.ratio", "sequence")
    with pytest.raises(ConfigError) as refused:
        common.check(c)
    assert "algorithm.haste=-1.0: must be above 0" in str(refused.value)
    assert "algorithm.haste=-1.0 has no effect with algorithm.policy_loss=clip; it belongs to hasty" in str(refused.value)
    put(c, "algorithm.policy_loss", "hasty")
    with pytest.raises(ConfigError, match="algorithm.ratio=sequence with algorithm.policy_loss=hasty: set algorithm.ratio=token"):
        common.check(c)
    options_page = runpy.run_path(str(ROOT / "docs" / "generate.py"))["options_page"]()
    (row,) = (line for line in options_page.splitlines() if line.startswith("| `algorithm.haste`"))
    assert "`algorithm.policy_loss=hasty`" in row


@pytest.mark.slow
def test_a_token_mask_is_an_option_and_a_row(add_option, monkeypatch, tmp_path):
    """Place one: the option. Place two: the mask, with its row. A run leaves the tokens out, says how many, and would say that none is."""
    add_option("algorithm", "skip", Option(0, "no loss on every so many-th token; 0 = off", bound=">=0"))

    def skip(tokens):
        return np.arange(len(tokens.tokens)) % tokens.options.skip > 0

    monkeypatch.setitem(TOKEN_MASKS, "skip", TokenMask(skip, "policy/skip_masked_fraction", ("old",)))
    c = tiny_job.get_config()
    c.run.dir, c.log.console, c.eval.sets, c.train.steps = str(tmp_path / "run"), "off", (), 1
    put(c, "algorithm.skip", 4)
    with pytest.raises(ConfigError, match="algorithm.skip=4 with algorithm.old_logprobs=auto: it reads the trainer's log-probs"):
        common.check(c)
    c.algorithm.old_logprobs = "recompute"
    jaxrl.train(c)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < line["policy/skip_masked_fraction"] < 0.5
    assert ("skip", "policy/skip_masked_fraction") in mechanisms() and describe("policy/skip_masked_fraction")


@pytest.mark.slow
def test_a_recipe_is_a_file_of_its_own(monkeypatch, tmp_path):
    """Weighted SFT as docs/guides/extend.md prints it trains, resumes and is planned; jaxrl has no line about it.
    Its row may stand in RECIPES, too."""
    (block,) = (b for b in blocks_of(ROOT / "docs" / "guides" / "extend.md") if b.saved_as == "weighted_sft.py")
    (tmp_path / block.saved_as).write_text(block.text)
    assert len(block.text.splitlines()) < 150
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}+{i}=", "completion": str(2 * i), "score": (i % 3) / 2} for i in range(12)]
    write_jsonl(tmp_path / "scored.jsonl", rows)

    def config(steps, power, recipe="./weighted_sft.py:RECIPE"):
        c = tiny_job.get_config("sft")
        c.run.recipe, c.run.dir, c.log.console = recipe, f"runs/{power}", "off"
        c.data.path, c.data.prompts_per_step, c.train.steps, c.optimizer.lr = ("scored.jsonl",), 4, steps, None
        c.user.power, c.checkpoint.every_steps = power, 1
        return c

    assert jaxrl.train(config(2, 1.0))["steps"] == 2
    done = jaxrl.train(config(3, 1.0))
    lines = [json.loads(x) for x in (tmp_path / "runs/1.0/metrics.jsonl").read_text().splitlines()]
    assert done["steps"] == 3 and [x["step"] for x in lines] == [1, 2, 3] and lines[0]["optim/lr"] == pytest.approx(1e-3)
    monkeypatch.setitem(RECIPES, "weighted_sft", imported("./weighted_sft.py:RECIPE"))
    jaxrl.train(config(1, 0.0, recipe="weighted_sft"))  # all weigh the same: another loss
    other = json.loads((tmp_path / "runs/0.0/metrics.jsonl").read_text().splitlines()[0])
    assert other["loss"] > lines[0]["loss"] > 0
    c = config(3, 1.0)
    c.run.mode, c.plan.target = "plan", "cpu:1"
    plan = jaxrl.train(c)
    assert plan["fits"] and set(plan["phases"]) == {"update"}


def test_a_recipe_that_is_none_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("RECIPE = 3\n")
    for path, why in (("./mine.py:RECIPE", "is an int, not a Recipe"), ("./mine.py:OTHER", "cannot be imported"), ("./no.py:RECIPE", "No such file")):
        c = tiny_job.get_config("sft")
        c.run.recipe = path
        with pytest.raises(ConfigError, match=f"run.recipe='{path}'.*{why}"):
            common.check(c)
