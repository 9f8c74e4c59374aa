"""Distillation from end to end: short runs of a tiny student under a tiny teacher, looked at from outside."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.distill_job import job, make_models, trained
from helpers.tiny_job import get_config

from jaxrl import training
from jaxrl.algorithms.distillation import sampled_advantages
from jaxrl.data import load_tokenizer
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.models.io.tensorfile import list_folder
from jaxrl.recipes import distill
from jaxrl.recipes.sft import demonstrations
from jaxrl.resolve.spec import resolve
from jaxrl.roles import teachers
from jaxrl.rollout.vllm.scoring import PromptScorer
from jaxrl.run import setup


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly():
    """Programs that run for milliseconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


FROM_ROWS = dict(distill__loss="forward", distill__top_k=8, distill__on_policy=0.0)


@pytest.mark.slow
def test_a_teacher_and_the_file_of_what_it_said_train_the_same(folder, tmp_path):
    """teacher.save writes the teacher's top_k of the data's rows; a run from teacher.files has no teacher, and its weights are
    bitwise the same. A file of other rows ends it with the remedy."""
    first, weights = trained(job(folder, tmp_path / "a", teacher__save=str(tmp_path / "said"), **FROM_ROWS))
    assert len(list((tmp_path / "said").iterdir())) == 2
    assert 0.01 < first[0]["distill/teacher_mass"] < 1 and first[1]["distill/divergence"] < first[0]["distill/divergence"]
    files = dict(teacher__path="", teacher__dtype="bf16", teacher__files=str(tmp_path / "said"))
    again, same = trained(job(folder, tmp_path / "b", **files, **FROM_ROWS))
    assert [line["loss"] for line in first] == [line["loss"] for line in again]
    assert all(np.array_equal(weights[name], same[name]) for name in weights)
    with pytest.raises(ConfigError, match="the files were written for other rows"):
        trained(job(folder, tmp_path / "c", data__seed=5, data__max_rows=0, **files, **FROM_ROWS))


@pytest.mark.slow
def test_a_mixed_run_resumes_bitwise(folder, tmp_path):
    """Half of the rows answered by the student, jsd over the whole vocabulary of a teacher at rest in host memory with padded
    ids of its own, prompt tokens too, a share of likelihood: four steps are two steps and two resumed ones, bitwise."""
    how = dict(distill__loss="jsd", distill__on_policy=0.5, distill__ce=0.2, distill__on_prompt=True, distill__beta=0.3,
               distill__teacher_temperature=1.5, mesh__roles={"teacher": {"rest": "host"}}, train__steps=4)
    lines, weights = trained(job(folder, tmp_path / "whole", **how))
    cut = how | dict(train__steps=2, checkpoint__at_end=True)
    trained(job(folder, tmp_path / "parts", **cut))
    resumed, same = trained(job(folder, tmp_path / "parts", **how))
    assert [line["loss"] for line in lines] == [line["loss"] for line in resumed]
    assert all(np.array_equal(weights[name], same[name]) for name in weights)
    assert {"distill/nll", "distill/divergence", "rollout/tokens", "length/mean"} <= set(lines[0])
    assert lines[0]["data/samples"] == 2 * 2 + 2  # two prompts twice, two rows


@pytest.mark.slow
def test_adapters_learn_from_a_teacher(folder, tmp_path):
    """The loss falls, and the export is the student with kernels moved by at most rank 4."""
    lines, weights = trained(job(folder, tmp_path / "run", lora__rank=4, train__steps=4, optimizer__lr=3e-2, **FROM_ROWS))
    assert lines[-1]["distill/divergence"] < 0.9 * lines[0]["distill/divergence"]
    start = {name: np.asarray(t.read()) for name, t in list_folder(folder / "student").items()}
    moved = [name for name in start if not np.array_equal(start[name], weights[name])]
    assert moved and all("_proj" in name and np.linalg.matrix_rank(weights[name] - start[name], tol=1e-5) <= 4 for name in moved)


@pytest.mark.slow
def test_a_student_that_is_its_teacher_stays_bitwise_where_it_is(folder, tmp_path):
    """Sampled: in fp32 its advantages are rounding errors, and without rewards nothing else moves it. Of another teacher they
    are not."""
    how = dict(reward__functions=(), data__path=("jaxrl://arith/train.jsonl",), data__prompts_per_step=2, train__steps=1)
    lines, weights = trained(job(folder, tmp_path / "same", teacher__path=str(folder / "student"), optimizer__name="sgd", **how))
    start = {name: np.asarray(t.read()) for name, t in list_folder(folder / "student").items()}
    assert abs(lines[0]["distill/divergence"]) < 1e-6 and lines[0]["advantage/abs_mean"] < 1e-5
    assert max(np.abs(weights[name] - start[name]).max() for name in start) < 1e-7
    assert not [name for name in lines[0] if name.startswith("reward/") and name not in ("reward/mean", "reward/std")
                and not name.endswith("_fraction")]
    lines, weights = trained(job(folder, tmp_path / "other", **how))
    assert lines[0]["distill/divergence"] > 0.1 and lines[0]["advantage/abs_mean"] > 0.01


@pytest.mark.full
def test_a_sampler_that_is_too_far_from_the_trainer_ends_the_run(folder, tmp_path):
    """algorithm.mismatch.stop bounds the gap of each step of distill.loss=sampled."""
    c = job(folder, tmp_path / "run", reward__functions=(), data__path=("jaxrl://arith/train.jsonl",), data__prompts_per_step=2,
            algorithm__mismatch__stop=1e-12, algorithm__mismatch__warn=0)
    with pytest.raises(RunStopped, match="step 1: .*more than algorithm.mismatch.stop=1e-12"):
        trained(c)


@pytest.mark.slow
def test_the_student_s_own_tokens_are_looked_up_in_the_teacher(folder, tmp_path):
    """reverse with top_k on rows that bring completions: the loss of the first step is the one of full distributions, cut to the
    student's eight tokens and the tail."""
    c = job(folder, tmp_path / "run", distill__loss="reverse", distill__top_k=8, distill__on_policy=0.0, train__steps=1)
    lines, _ = trained(c)
    assert 0 < lines[0]["distill/divergence"] and lines[0]["distill/teacher_mass"] < 1
    full = trained(job(folder, tmp_path / "full", distill__loss="reverse", distill__on_policy=0.0, train__steps=1))[0]
    assert lines[0]["distill/divergence"] < full[0]["distill/divergence"]
    clipped = trained(job(folder, tmp_path / "sum", distill__loss="reverse", distill__top_k=8, distill__tail=False,
                          distill__on_policy=0.0, train__steps=1))[0]
    assert abs(clipped[0]["distill/divergence"] - lines[0]["distill/divergence"]) > 1e-3


@pytest.mark.nightly
def test_a_teacher_on_devices_of_its_own_changes_nothing(folder, tmp_path):
    """Four devices, the policy over two: mesh.roles puts the teacher on the same, or on the two others, split in another way and at
    rest in host memory. Loss and weights agree, over the whole vocabulary and its top."""
    make_models(tmp_path)
    worker = Path(__file__).parents[1] / "helpers" / "distill_job.py"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, worker.parents[1:3])), "JAX_PLATFORMS": "cpu"}
    shared, apart = ([json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")] for done in [
        subprocess.run([sys.executable, worker, tmp_path, layout], capture_output=True, text=True, env=env, check=True)
        for layout in ("shared", "apart")])
    assert len(shared) == len(apart) == 2 and min(row["loss"] for row in shared) > 0.01
    for a, b in zip(shared, apart, strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
        np.testing.assert_allclose(a["sum"], b["sum"], rtol=1e-6)


# ---- what options come to, without a run


def asked(c):
    """(job, teacher, columns that a local teacher says of nine rows, microbatches it took)"""
    here = setup.open_job(resolve(c, engine="jax"))
    teacher = teachers.open_teacher(here)
    rows = [SimpleNamespace(prompt_ids=np.arange(3, 9), target_ids=np.arange(9, 40 + k), trained=None) for k in range(9)]
    traj = demonstrations(rows, range(9), False)
    layout = training.make_layout(traj.sizes, here.score_shapes, share_prompts=False)
    return teacher, teacher.targets(traj, layout, None), sum(len(m.microbatches) for m in layout.minibatches)


@pytest.mark.slow
def test_a_local_teacher_is_held_as_asked(folder, tmp_path):
    """dtype: of its weights; it computes as the policy does, and its log-probs are float32."""
    said = {}
    for dtype in ("fp32", "bf16"):
        teacher, columns, _ = asked(job(folder, tmp_path, teacher__dtype=dtype, distill__loss="forward", distill__top_k=4))
        assert {x.dtype.name for x in jax.tree.leaves(teacher.state)} == {{"fp32": "float32", "bf16": "bfloat16"}[dtype]}
        said[dtype] = columns["teacher_logprobs"]
        assert said[dtype].dtype == np.float32
    assert 0 < np.abs(said["fp32"] - said["bf16"]).max() < 0.2


@pytest.mark.slow
def test_how_a_teacher_is_asked_does_not_change_what_it_says(folder, tmp_path):
    said = []
    for tokens in (128, 512):
        c = job(folder, tmp_path, train__score_tokens_per_microbatch=tokens, train__row_lengths=(128,), distill__loss="forward",
                distill__top_k=4)
        _, columns, count = asked(c)
        said.append((columns, count))
    (few, many), (all_, one) = said
    assert many > one == 1 and np.array_equal(few["teacher_ids"], all_["teacher_ids"])
    np.testing.assert_allclose(few["teacher_logprobs"], all_["teacher_logprobs"], atol=1e-5)




def test_the_objective_is_what_the_options_say():
    c = get_config()
    c.run.recipe, c.distill.loss, c.distill.beta, c.distill.coef = "distill", "jsd", 0.2, 3.0
    c.distill.tail, c.distill.ce, c.distill.top_k = False, 0.1, 4
    c.distill.temperature, c.distill.teacher_temperature = 0.9, 1.1
    spec = resolve(c, engine="jax")
    assert teachers.needed_part(spec) == "at"
    stub = SimpleNamespace(config=spec, compute_dtype=jnp.float32)
    teacher = SimpleNamespace(model="model", vocab=7)
    found = distill.objective(stub, None, teacher)
    assert found == training.Distillation(kind="jsd", beta=0.2, coef=3.0, tail=False, ce=0.1, temperature=0.9, vocab=7,
                                          teacher_temperature=1.1, chunk=spec.train.logprob_chunk)
    c.distill.top_k, c.distill.tail = 0, True
    assert distill.objective(SimpleNamespace(config=resolve(c, engine="jax"), compute_dtype=jnp.float32), None, teacher).teacher == "model"
    c.distill.loss = "sampled"
    spec = resolve(c, engine="jax")
    algorithm = SimpleNamespace(loss="policy gradient")
    assert distill.objective(SimpleNamespace(config=spec), algorithm, teacher) == "policy gradient"
    assert teachers.needed_part(spec) == "logprob"


def test_sampled_advantages_take_coef_and_gamma():
    logp, logq = np.log([0.5, 0.4, 0.3, 0.2]), np.log([0.25, 0.4, 0.6, 0.1])
    mask, spans = np.array([True, True, False, True]), np.array([0, 4])
    r = -2.0 * (logp - logq)
    found = sampled_advantages(logp, logq, mask, spans, coef=2.0, gamma=0.5)
    np.testing.assert_allclose(found, [r[0] + 0.5 * (r[1] + 0.5 * r[3]), r[1] + 0.5 * r[3], 0, r[3]], rtol=1e-14)
    np.testing.assert_allclose(sampled_advantages(logp, logq, mask, spans, coef=1.0, gamma=0.0), np.where(mask, r / 2, 0), rtol=1e-14)


@pytest.mark.full
def test_a_teacher_s_revision_and_tokens_are_looked_at(folder, tmp_path, monkeypatch):
    """A hub cache with two revisions of the teacher, read without a network: one has the student's tokens, one has not."""
    import huggingface_hub.constants

    repo = tmp_path / "models--somebody--teacher"
    for name, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        (repo / "refs").mkdir(parents=True, exist_ok=True)
        (repo / "refs" / name).write_text(commit)
        (repo / "snapshots" / commit).mkdir(parents=True)
        for file in (folder / "teacher").iterdir():
            text = file.read_bytes()
            if name == "v2" and file.name == "tokenizer.json":
                table = json.loads(text)
                table["model"]["vocab"]["plus"] = table["model"]["vocab"].pop("+")
                text = json.dumps(table).encode()
            (repo / "snapshots" / commit / file.name).write_bytes(text)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    c = job(folder, tmp_path / "run", teacher__path="somebody/teacher")
    tokenizer = load_tokenizer(c)
    teachers.check(resolve(c, engine="jax"), tokenizer)
    c.teacher.revision = "v2"
    with pytest.raises(ConfigError, match="teacher.path='somebody/teacher': its tokenizer is not the student's"):
        teachers.check(resolve(c, engine="jax"), tokenizer)


@pytest.mark.full
def test_a_teacher_whose_rotary_scaling_depends_on_the_length_is_refused(folder, tmp_path):
    """As a policy is: beyond the original window its numbers would be others than transformers'."""
    shutil.copytree(folder / "teacher", tmp_path / "teacher")
    told = json.loads((tmp_path / "teacher" / "config.json").read_text())
    told["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (tmp_path / "teacher" / "config.json").write_text(json.dumps({**told, "max_position_embeddings": 8}))
    c = job(folder, tmp_path / "run", teacher__path=str(tmp_path / "teacher"))
    with pytest.raises(ConfigError, match="teacher.path=.*: rope_type=dynamic serves sequences up to its original window of 8 tokens"):
        teachers.check(resolve(c, engine="jax"), load_tokenizer(c))


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"teacher.servers entry 'http://127.0.0.1:9' does not reply like a vLLM server"):
        PromptScorer(("http://127.0.0.1:9",), timeout=2.0, longest=10)


@pytest.mark.full
def test_a_server_that_does_not_answer_is_given_up(folder, tmp_path):
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        url = f"http://127.0.0.1:{door.getsockname()[1]}"
        c = resolve(job(folder, tmp_path, teacher__servers=(url,), teacher__timeout_seconds=0.2), engine="jax")
        with pytest.raises(ConfigError, match=r"does not reply like a vLLM server \(ReadTimeout"):
            teachers.ServerTeacher(SimpleNamespace(config=c, model=SimpleNamespace(config=SimpleNamespace(vocab_size=9))))
