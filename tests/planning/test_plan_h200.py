"""What a plan says of two jobs beside what one H200 measured (benchmarks/results/suite_nvidia_h200.jsonl)."""

import json
import sys
from pathlib import Path

import pytest

from jaxrl.planning import case as cases
from jaxrl.planning import plan, roofline, workload
from jaxrl.sharding import chips

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))


def planned(name, target="h200:1", **options):
    from gpu import cases as jobs

    config, described = jobs.job(name, "run"), jobs.described(jobs.CASES[name].model or name)
    config.plan.target, config.run.mode = target, "plan"
    config.rollout.update(options)
    return cases.case_of(config, described)


@pytest.mark.parametrize("name, commit", [("0.5B", "c48bb8e"), ("1.5B", "65a5bec")])
def test_seconds_are_within_a_quarter_of_an_h200(name, commit):
    """Its programs had some 15 launches a layer; they have fewer since, which the plan counts."""
    lines = (ROOT / "benchmarks/results/suite_nvidia_h200.jsonl").read_text().splitlines()
    measured = next(row for row in map(json.loads, lines) if (row["part"], row["name"], row["commit"]) == (name, "steps", commit))
    found = plan.times(planned(name), {})
    for phase in ("rollout", "update"):
        assert found["phases"][phase]["seconds"] == pytest.approx(measured[phase], rel=0.25), phase
    assert found["step_seconds"] == pytest.approx(measured["step"], rel=0.25)


def test_launches_count_where_the_embedded_sampler_decodes_on_a_gpu():
    """As many as a program has; none on a TPU, whose step is one program, nor of vLLM's servers, whose kernels are not ours."""
    own = planned("1.5B")
    decode, prefill = workload.rollout_work(own.config, own.model, *own.sampler[:2], 1, own.sampler[2])
    assert decode.launches == workload.decode_launches(own.model.config) == 33 + 28 * 13 and prefill.launches == 0
    found = plan.times(own, {})["phases"]["rollout"]
    assert found["launches"] == pytest.approx(512 * decode.launches * roofline.LAUNCH["gpu"]) and found["bound"] == "memory"
    few = planned("0.5B", slots=8)
    assert plan.times(few, {})["phases"]["rollout"]["bound"] == "launches"  # 8 completions at once, 32 times after each other
    on_tpu = roofline.phase(chips.CHIPS["v5p"], [(decode, decode.times)], 0.0)
    assert on_tpu["launches"] == 0
    served = planned("1.5B", engine="vllm")
    decode, _ = workload.rollout_work(served.config, served.model, *served.sampler[:2], 1, served.sampler[2])
    assert decode.launches == 0
