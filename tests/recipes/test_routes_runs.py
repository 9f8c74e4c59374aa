"""algorithm.routes in a run from end to end, resumed with completions ahead."""

import json

import jax
import pytest
from helpers import tiny_job

import jaxrl
from jaxrl.config.load import put

MOE = {**tiny_job.MODEL, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
       "norm_topk_prob": True, "head_dim": 8}
OPTIONS = {"model.config": MOE, "train.steps": 3, "eval.sets": (), "eval.every_steps": 0, "algorithm.num_minibatches": 2,
           "checkpoint.export_at_end": False, "checkpoint.every_steps": 1, "log.console": "off", "rollout.engine": "jax"}


def lines(folder, **options):
    c = tiny_job.get_config()
    for name, value in (OPTIONS | {"run.dir": str(folder)} | options).items():
        put(c, name, value)
    jaxrl.train(c)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("routes", ("scored", "sampled"))
def test_replayed_experts(routes, tmp_path):
    """All are replayed; before the router has moved none is another than its own, afterwards some are. A run goes on with
    the completions that were ahead and their experts."""
    ahead = {"rollout.max_staleness": 1} if routes == "sampled" else {}
    rows = lines(tmp_path, **{"algorithm.routes": routes, "train.steps": 2}, **ahead)
    rows += lines(tmp_path, **{"algorithm.routes": routes}, **ahead)[2:]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["router/replayed"] == pytest.approx(1) for row in rows)
    assert all(row["router/mismatch"] < 0.5 for row in rows) and any(row["router/mismatch"] > 0 for row in rows)
    jax.clear_caches()
