"""A whole job over two processes that is asked to stop, and goes on alone on another mesh. evidence/hosts.py does more shapes."""

import json
import subprocess
import sys

import pytest
from helpers.run_tools import ROOT, environment
from helpers.worlds import TEMPLATE

STEPS, HALF = 4, 2
OPTIONS = ("algorithm.entropy_coef=0.01", "algorithm.num_minibatches=2", "checkpoint.export_at_end=false", f"train.steps={STEPS}",
           "checkpoint.every_steps=100", "eval.every_steps=0", "eval.after=false", "launch.heartbeat_seconds=30")


def job(folder, processes, *flags):
    command = [sys.executable, "-m", "jaxrl.launch", f"--processes={processes}", f"--devices={4 // processes}", "--",
               str(ROOT / "tests" / "helpers" / "hosts_job.py"), str(folder), *[f"--config.{o}" for o in OPTIONS], *flags]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows(folder):
    """(answers by step, in order; losses by step; what each process saw)."""
    answers = [[(r["group"], r["sample"], r["seed"], r["tokens"], r["score"]) for r in map(json.loads, f.read_text().splitlines())]
               for f in sorted((folder / "rollouts").glob("*.jsonl"))]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return answers, {r["step"]: r["loss"] for r in lines if r["step"]}, [
        json.loads(f.read_text()) for f in sorted(folder.glob("seen_*.json"))]


@pytest.mark.vllm
def test_two_processes_drive_their_own_vllm_servers(tmp_path):
    """Each gives its server a copy of a policy that is spread over both, and the checksums are those of the trainer."""
    flags = ("mesh.fsdp=2", "mesh.tp=2", "model.config.hidden_size=128", "rollout.engine=vllm", "train.steps=2", "eval.before=false",
             "rollout.verify_weights=always", "rollout.timeout_seconds=600", "rollout.prompt_lengths=")
    job(tmp_path / "run", 2, *[f"--config.{f}" for f in flags])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in lines] == [1, 2] and all(r["gap/mean"] < 1e-3 and r["publish/probe"] < 1e-3 for r in lines)
    assert {p.name for p in (tmp_path / "run" / "vllm").iterdir()} == {"process_0", "process_1"}
    answers, _, seen = rows(tmp_path / "run")
    assert [len(a) for a in answers] == [32, 32] and all(len({r[:3] for r in a}) == 32 for a in answers)
    assert {s[0] for s in seen[0]["seeds"]} == {s[0] for s in seen[1]["seeds"]}  # all know all requests, each sent its own


@pytest.mark.slow
def test_two_processes_train_stop_and_one_goes_on(tmp_path):
    job(tmp_path / "one", 1, "--config.mesh.fsdp=4")
    text = job(tmp_path / "two", 2, "--config.mesh.fsdp=4", f"--config.faults.plan='update.term@step={HALF},process=1',")
    assert "SIGTERM: saving, then leaving" in text and f"stopped at step {HALF} of {STEPS}" in text
    answers, losses, seen = rows(tmp_path / "two")
    whole, wanted, (alone,) = rows(tmp_path / "one")
    assert answers == whole[:HALF]  # each sampled its half, with the same seeds and to the same tokens
    for s in seen:
        assert s["layouts"] == alone["layouts"][:HALF] and s["rows"] == alone["rows"][:len(s["rows"])]
    assert [s["held"][0] for s in seen] == [[0, 1], [2, 3]] and alone["held"][0] == [0, 1, 2, 3]
    assert max(abs(losses[k] - wanted[k]) for k in losses) < 1e-6
    ((step, saved),) = seen[0]["saved"]

    job(tmp_path / "two", 1, f"--recorded={tmp_path / 'one'}", "--config.mesh.dp=2", "--config.mesh.fsdp=2")
    answers, losses, seen = rows(tmp_path / "two")
    assert seen[0]["restored"] == [[step, saved]] == [[HALF, saved]]  # bit-equal on the other mesh
    assert answers == whole and set(losses) == set(wanted) == set(range(1, STEPS + 1))
    assert max(abs(losses[k] / wanted[k] - 1) for k in losses) < 1e-5


@pytest.mark.nightly
def test_episodes_of_two_processes_are_those_of_one(tmp_path):
    """Each process plays the episodes of its groups, in workers of its own: same turns and scores, losses within rounding."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE, encoding="utf-8")
    episodes = ("train.steps=2", f"model.chat_template={tmp_path / 'chat.jinja'}", f"env.function={ROOT / 'tests/helpers/worlds.py'}:several",
                "env.max_turns=4", "env.max_observation_tokens=8", "env.workers=1", "reward.functions=()", "rollout.compaction=False",
                "algorithm.advantage=turn", "mesh.fsdp=4", "eval.before=false")
    flags = [f"--config.{f}" for f in episodes]
    for processes, name in ((1, "one"), (2, "two")):
        job(tmp_path / name, processes, *flags)
    (whole, wanted, _), (answers, losses, seen) = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert answers == whole and [len(a) for a in answers] == [32, 32] and [s["held"][0] for s in seen] == [[0, 1], [2, 3]]
    assert max(abs(losses[k] - wanted[k]) for k in wanted) < 1e-6
    told = [[json.loads(line)["episode"] for line in (tmp_path / name / "rollouts" / "step_00000001.jsonl").read_text().splitlines()]
            for name in ("one", "two")]
    assert told[0] == told[1] and max(len(pieces) for pieces in told[0]) > 4


@pytest.mark.nightly
def test_a_reference_on_one_host_alone_changes_nothing(tmp_path):
    """mesh.roles.reference.processes: host 1 scores for both, and losses and tokens are those of a reference on all devices."""
    kl = ("--config.algorithm.kl.coef=0.1", "--config.reference.dtype=fp32", "--config.mesh.fsdp=4", "--config.train.steps=3")
    job(tmp_path / "all", 2, *kl)
    text = job(tmp_path / "one", 2, *kl, "--config.mesh.roles={'reference': {'processes': '1'}}")
    assert "reference: 2 devices" in text
    (answers, losses, _), (wanted, known, _) = rows(tmp_path / "one"), rows(tmp_path / "all")
    assert answers == wanted and set(losses) == set(known) == {1, 2, 3}
    assert max(abs(losses[k] - known[k]) for k in losses) < 1e-6
    kls = [[json.loads(line).get("policy/kl") for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in ("one", "all")]
    assert kls[0][-1] > 0 and kls[0] == pytest.approx(kls[1], abs=1e-6)


EXPERTS = tuple(f"--config.model.config.{entry}" for entry in (
    "model_type=qwen3_moe", "num_experts=4", "num_experts_per_tok=2", "moe_intermediate_size=32"))


@pytest.mark.nightly
def test_experts_over_the_devices_of_two_processes(tmp_path):
    """mesh.ep=2 in each process, then across both, then 4 in one that goes on from their checkpoint: losses are those of whole
    experts on the same answers. What the sampler says of its own tokens is what the trainer says."""
    job(tmp_path / "one", 1, *EXPERTS, "--config.mesh.fsdp=4")
    whole, wanted, (alone,) = rows(tmp_path / "one")
    recorded = f"--recorded={tmp_path / 'one'}"
    job(tmp_path / "two", 2, *EXPERTS, recorded, "--config.mesh.ep=2", f"--config.faults.plan='update.term@step={HALF},process=1',")
    ((step, saved),) = rows(tmp_path / "two")[2][0]["saved"]
    job(tmp_path / "two", 1, *EXPERTS, recorded, "--config.mesh.ep=4")
    answers, losses, seen = rows(tmp_path / "two")
    assert seen[0]["restored"] == [[step, saved]] == [[HALF, saved]] and answers == whole
    job(tmp_path / "across", 2, *EXPERTS, recorded, "--config.mesh.ep=4", "--config.train.steps=1")
    losses |= {-k: loss for k, loss in rows(tmp_path / "across")[1].items()}
    assert set(losses) == {-1, *range(1, STEPS + 1)}
    assert max(abs(loss / wanted[abs(k)] - 1) for k, loss in losses.items()) < 1e-5
    job(tmp_path / "sampled", 2, *EXPERTS, "--config.mesh.ep=2", "--config.train.steps=1")
    lines = [json.loads(line) for line in (tmp_path / "sampled" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 1 and lines[-1]["gap/max"] < 2e-5


@pytest.mark.nightly
def test_rows_cut_over_two_processes(tmp_path):
    """mesh.cp=4 over both, so that every row lies on both: the same layouts in each, and losses those of whole rows."""
    short = "--config.train.steps=2", "--config.eval.before=false", "--config.train.row_lengths=256"
    job(tmp_path / "one", 1, *short, "--config.mesh.fsdp=4")
    whole, wanted, (alone,) = rows(tmp_path / "one")
    job(tmp_path / "two", 2, *short, f"--recorded={tmp_path / 'one'}", "--config.mesh.cp=4")
    answers, losses, seen = rows(tmp_path / "two")
    assert answers == whole and set(losses) == set(wanted) == {1, 2}
    assert seen[0]["layouts"] == seen[1]["layouts"] and len(alone["layouts"]) == 2
    assert max(abs(losses[k] / wanted[k] - 1) for k in wanted) < 1e-5
