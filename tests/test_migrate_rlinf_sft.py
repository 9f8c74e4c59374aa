"""jaxrl.migrate: RLinf's supervised fine-tuning of models of images and text. Its keys are tested with the other tables', in test_migrate.py."""

import importlib.util
import json

import pyarrow
import pyarrow.parquet
import pytest
from test_migrate import migrated, run, values

from jaxrl.config.load import load_config
from jaxrl.migrate.models import trained
from jaxrl.migrate.source import Unreadable
from jaxrl.migrate.systems import table_of
from jaxrl.resolve.checks.common import check

JOB = """
cluster: {num_nodes: 1, component_placement: {actor: all}}
runner:
  {task_type: sft, max_epochs: -1, max_steps: 6000, val_check_interval: 1000, save_interval: 1000, output_dir: out, experiment_name: x}
data:
  type: vlm
  dataset_name: robo2vlmsft
  train_data_paths: rows
  val_data_paths: held.jsonl
  prompt_key: question
  choice_key: choices
  answer_key: correct_answer
  image_keys: [image]
  max_prompt_length: 1024
actor:
  training_backend: fsdp
  micro_batch_size: 4
  global_batch_size: 256
  model: {model_path: /m/Qwen2.5-VL-3B-Instruct, model_type: qwen2.5_vl, precision: fp32, is_lora: False}
  optim: {lr: 1.0e-5, adam_beta2: 0.95, lr_scheduler: cosine, total_training_steps: "${runner.max_steps}", lr_warmup_steps: 200}
  fsdp_config: {mixed_precision: {param_dtype: bf16, reduce_dtype: fp32, buffer_dtype: bf16}}
"""
MEGATRON = JOB.replace("training_backend: fsdp", "training_backend: megatron\n  lr_sched: {lr_decay_style: constant, lr_warmup_iters: 5}").replace(
    "precision: fp32", "precision: bf16, tensor_model_parallel_size: 2")
WANT = {"run.recipe": "sft", "data.prompts_per_step": 256, "train.tokens_per_microbatch": 4096, "train.max_sequence_tokens": 1024,
        "data.prompt_column": "prompt", "data.completion_column": "completion", "data.image_column": "images", "train.steps": 6000,
        "optimizer.lr": 1e-5, "optimizer.b2": 0.95, "data.overlong_prompt": "error", "data.seed": 42, "checkpoint.every_steps": 1000}


def sft(settings=None, version=None):
    whole = {**table_of("rlinf/sft").required, "actor.model.model_path": "a/Qwen2.5-VL-3B", **(settings or {})}
    return trained(migrated("rlinf/sft", whole, version))


@pytest.mark.parametrize(("text", "more"), [
    (JOB, {"optimizer.schedule": "cosine", "optimizer.warmup_steps": 200, "optimizer.decay_steps": 5800, "eval.every_steps": 1000, "eval.after": True,
           "eval.max_new_tokens": 128, "train.compute_dtype": "bf16"}),
    (JOB.replace("training_backend: fsdp", "training_backend: fsdp2"), {"optimizer.schedule": "cosine", "optimizer.warmup_steps": 200}),
    (MEGATRON, {"optimizer.schedule": "constant", "optimizer.warmup_steps": 5, "mesh.tp": 2, "eval.sets": (), "eval.every_steps": 0}),
])
def test_a_file_becomes_a_config_of_sft_that_passes_the_checks(text, more, tmp_path, monkeypatch):
    status, report, out = run(tmp_path, text, name="job.yaml", system="rlinf")
    assert (status, report["job"], report["lacks"]) == (0, "sft", []) and len(report["needs_you"]) == 1
    assert not [k["key"] for k in report["keys"] if k["kind"] == "unknown"]
    monkeypatch.chdir(out)
    config = load_config(report["config"])
    check(config)
    assert config.data.path[0].endswith("out/job_train.parquet")
    found = {}
    for option in WANT | more:
        group, _, name = option.partition(".")
        found[option] = config[group][name]
    assert found == WANT | more


def test_the_file_of_rows_writes_what_rlinfs_class_makes_of_them(tmp_path):
    """Read from Robo2VLMSFTDataset.encode_prompt: letters before choices, the answer by letter or by number, choices as text, images."""
    here = JOB.replace("rows\n", f"{tmp_path}/rows\n").replace("held.jsonl", f"{tmp_path}/held.jsonl")
    _, _, out = run(tmp_path, here, name="job.yaml", system="rlinf")
    (tmp_path / "rows").mkdir()
    table = pyarrow.Table.from_pylist([
        {"question": "Where?", "choices": ["left", "right"], "correct_answer": 1, "image": {"bytes": b"one", "path": None}},
        {"question": "What?", "choices": ["a cup", "a bowl", "none"], "correct_answer": 0, "image": {"bytes": b"two", "path": None}}])
    pyarrow.parquet.write_table(table, tmp_path / "rows" / "a.parquet")
    (tmp_path / "rows" / "notes.txt").write_text("no rows")
    held = {"question": "Which?", "choices": "['up', 'down']", "correct_answer": "B", "images": ["x.png", "y.png"]}
    (tmp_path / "held.jsonl").write_text(json.dumps(held) + "\n\n" + json.dumps({**held, "choices": "only", "correct_answer": "A"}) + "\n")
    spec = importlib.util.spec_from_file_location("written_rows", out / "job_rows.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, paths in module.FILES.items():
        module.write(paths, str(tmp_path / name))
    train = pyarrow.parquet.read_table(tmp_path / "job_train.parquet").to_pylist()
    assert train == [
        {"prompt": "<image>Where?\nChoices:\nA. left\nB. right\n", "completion": "B. right", "images": [{"bytes": b"one", "path": None}]},
        {"prompt": "<image>What?\nChoices:\nA. a cup\nB. a bowl\nC. none\n", "completion": "A. a cup", "images": [{"bytes": b"two", "path": None}]}]
    rows = pyarrow.parquet.read_table(tmp_path / "job_held_out.parquet").to_pylist()
    assert [(r["prompt"], r["completion"]) for r in rows] == [("<image><image>Which?\nChoices:\nA. up\nB. down\n", "B. down"),
                                                             ("<image><image>Which?\nChoices:\nA. only\n", "A. only")]
    (tmp_path / "none").mkdir()
    with pytest.raises(SystemExit, match="no rows"):
        module.write([str(tmp_path / "none")], str(tmp_path / "x.parquet"))


def test_held_out_completions_are_judged_as_rlinf_judges_them(tmp_path):
    space: dict = {}
    exec(sft({"actor.training_backend": "fsdp", "data.val_data_paths": "held", "runner.val_check_interval": 5}).files["job_reward.py"], space)
    right = ["B. right", "b.  RIGHT<|im_end|>", "<think>A. left</think>\nB. right.", "The answer is: B. right", "So \\boxed{B. right}",
             "well\nB. right"]
    assert [space["score"]("?", text, "B. right") for text in right] == [1.0] * 6
    assert [space["score"]("?", text, "B. right") for text in ("", "A. left", "B", "B. right\nor not", "\\boxed{A. left} B. right")] == [0.0] * 5


@pytest.mark.parametrize(("settings", "version", "steps", "epochs"), [
    ({}, "0.3", None, 1), ({"runner.max_epochs": 3}, "0.3", None, 3), ({"runner.max_epochs": 3, "runner.max_steps": 9}, "0.3", 9, 3),
    ({"runner.max_epochs": -1, "runner.max_steps": 9}, "0.3", 9, None), ({"runner.max_epochs": 6000}, "0.2", 6000, None),
    ({"runner.max_epochs": 60, "runner.max_steps": 9}, "0.2", 9, None),
])
def test_passes_and_steps_end_a_run_and_in_0_2_an_epoch_is_a_step(settings, version, steps, epochs):
    v = values(sft(settings, version))
    assert (v.get("train.steps"), v.get("data.epochs")) == (steps, epochs)


@pytest.mark.parametrize(("settings", "key"), [
    ({"data.dataset_name": "vlm_trend_reward_sft"}, "data.dataset_name"), ({"data.dataset_name": "base"}, "data.dataset_name"),
    ({"data.type": "lerobot"}, "data.type"), ({"data.train_data_paths": None}, "data.train_data_paths"),
    ({"algorithm.sampling_params.temperature": 0.7}, "algorithm.sampling_params.temperature"), ({"env.train.x": 1}, "env.train.x"),
    ({"data.video_nframes": 5}, "data.video_nframes"), ({"actor.model.model_path": "OpenGVLab/InternVL3-8B"}, "actor.model.model_path"),
])
def test_what_would_be_another_job_is_refused_by_its_key(settings, key):
    m = sft(settings)
    assert m.outcome(False) == "refused" and key in [k for k, _, refuse in m.lacking if refuse]


def test_backends_and_batches_that_rlinf_refuses_are_unreadable():
    with pytest.raises(Unreadable, match="training_backend"):
        sft({"actor.training_backend": "ddp"})
    with pytest.raises(Unreadable, match="global_batch_size"):
        sft({"actor.global_batch_size": 0})


def test_robots_are_no_such_job():
    m = migrated("rlinf", {**table_of("rlinf").required, "runner.task_type": "sft", "actor.model.action_dim": 7, "actor.model.num_action_chunks": 8})
    assert m.outcome(False) == "refused" and m.table.job == ""


def test_sft_of_another_model_is_refused_and_a_job_without_a_model_asks_for_it(tmp_path):
    """RLinf trains classifiers of pictures with the same runner; their files name no checkpoint."""
    other = JOB.replace("model_path: /m/Qwen2.5-VL-3B-Instruct, model_type: qwen2.5_vl", "model_path: null, model_type: resnet")
    status, report, _ = run(tmp_path, other, name="job.yaml", system="rlinf")
    assert (status, [e["key"] for e in report["lacks"]]) == (3, ["actor.model.model_type"])
    status, report, _ = run(tmp_path, JOB.replace("model_path: /m/Qwen2.5-VL-3B-Instruct, ", ""), name="job.yaml", system="rlinf")
    assert (status, report["outcome"]) == (0, "partial") and any("name the model in model.path" in text for text in report["needs_you"])
