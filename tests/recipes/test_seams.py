"""A new loss option, a new recipe and a new kind of objective need what belongs to them and no change elsewhere."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_job
from data_cases import write_jsonl
from test_docs import ROOT, blocks_of
from test_training import LAYOUTS, gradient, layout_of
from training_helpers import batch_of_groups, params_of, tiny_model

import jaxrl
from jaxrl import config_checks, training
from jaxrl.algorithms import POLICY_LOSSES, register_policy_loss
from jaxrl.algorithms.preference import dpo
from jaxrl.config import put
from jaxrl.errors import ConfigError
from jaxrl.imports import imported
from jaxrl.registry import RECIPES
from jaxrl.schema import SCHEMA, Option
from jaxrl.training.score import make_score


def test_a_loss_option_is_a_row_and_what_reads_it(monkeypatch, tmp_path):
    """Place one: its row, with default, bound and meaning. Place two: the function. A run trains with it, and its bound is kept."""
    monkeypatch.setitem(SCHEMA["algorithm"], "haste", Option(1.0, "factor on every token's loss", bound=">0"))

    @register_policy_loss("hasty")
    def hasty(tokens, cfg):
        loss = -cfg.haste * jnp.where(tokens.mask, tokens.advantage * tokens.logp, 0)
        return loss, {}

    monkeypatch.setitem(POLICY_LOSSES, "hasty", hasty)
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
    with pytest.raises(ConfigError, match="algorithm.haste=-1.0: must be above 0"):
        config_checks.check(c)
    del POLICY_LOSSES["hasty"]


def test_a_recipe_is_a_file_of_its_own(monkeypatch, tmp_path):
    """Weighted SFT as docs/extend.md prints it trains, resumes and is planned; jaxrl has no line about it. Its row may stand in RECIPES, too."""
    (block,) = (b for b in blocks_of(ROOT / "docs" / "extend.md") if b.saved_as == "weighted_sft.py")
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
    for path, why in (("./mine.py:RECIPE", "is a int, not a Recipe"), ("./mine.py:OTHER", "cannot be imported"), ("./no.py:RECIPE", "No such file")):
        c = tiny_job.get_config("sft")
        c.run.recipe = path
        with pytest.raises(ConfigError, match=f"run.recipe='{path}'.*{why}"):
            config_checks.check(c)


@pytest.mark.parametrize("layout", ["padded", "packed", "packed_shared_8_microbatches"])
def test_a_loss_of_sequences_is_a_weighted_update(layout):
    """DPO: score, derivative on [N] numbers, and NextToken's update give the gradient of the whole loss, however it is packed."""
    assert layout in LAYOUTS
    with jax.enable_x64(True):
        model = tiny_model(jnp.float64)
        params = params_of(model, jnp.float64)
        traj, _ = batch_of_groups(groups=4, size=2)
        chosen, rejected = np.arange(0, 8, 2), np.arange(1, 8, 2)
        reference = -np.linspace(20, 40, 8)
        score = make_score(model, temperature=1.0, chunk=64, put=lambda batch: batch)
        found = layout_of(traj, layout)
        sums = traj.total(score(params, traj, found).astype(np.float64))
        loss, derivative = dpo(sums, reference, chosen, rejected, beta=0.3)
        got, _ = gradient(model, params, traj, {}, training.sequence_weights(traj, derivative), found, np.float64,
                          training.NextToken(chunk=64, max_grad_norm=0.0))

        def whole(params):
            ones = {"token": traj.loss_mask.astype(float), "policy": traj.loss_mask.astype(float)}
            plain = layout_of(traj, "padded")
            total = 0.0
            lead = []
            for micro in plain.minibatches[0].microbatches:
                batch = jax.tree.map(jnp.asarray, training.pack(traj, micro, {}, ones, np.float64))
                logp = training.objective.Outputs(model, params, batch, training.NextToken(chunk=64)).logprobs()[0]
                order = [i for row in micro.rows for block in row for i in block.sequences]
                per = [jnp.sum(jnp.where(batch.sequences[r] == k + 1, logp[r], 0)) for r, row in enumerate(micro.rows)
                       for k in range(sum(len(block.sequences) for block in row))]
                lead += list(zip(order, per, strict=True))
            s = jnp.stack([x for _, x in sorted(lead, key=lambda one: one[0])]) - reference
            total = jnp.mean(jnp.logaddexp(0.0, -0.3 * (s[chosen] - s[rejected])))
            return total

        assert float(whole(params)) == pytest.approx(loss, rel=1e-6)
        want = training.partition(jax.grad(whole)(params), (".*",), ())[0]
        for name, grad in want.items():
            np.testing.assert_allclose(np.asarray(got[name]), np.asarray(grad), rtol=1e-6, atol=1e-9, err_msg=name)


def test_the_derivative_of_dpo_is_the_difference_quotient():
    rng = np.random.default_rng(0)
    s, r, chosen, rejected = rng.normal(size=6) * 5, rng.normal(size=6) * 5, [0, 2], [1, 5]
    _, derivative = dpo(s, r, chosen, rejected, 0.7)
    for i in range(6):
        step = np.eye(6)[i] * 1e-6
        slope = (dpo(s + step, r, chosen, rejected, 0.7)[0] - dpo(s - step, r, chosen, rejected, 0.7)[0]) / 2e-6
        assert derivative[i] == pytest.approx(slope, rel=1e-6, abs=1e-9)
    far, _ = dpo([1e4, -1e4], [0, 0], [1], [0], 1.0)
    assert far == pytest.approx(2e4)  # no overflow
