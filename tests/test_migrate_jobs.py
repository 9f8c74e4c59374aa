"""jaxrl.migrate: jobs of rows (SFT, preferences, reward models, distillation) of five systems. Every key, its default and
another value are tested with the other tables, in test_migrate.py."""

import pytest
from test_migrate import migrated, run, values

from jaxrl.config.load import load_config
from jaxrl.migrate.read import read
from jaxrl.migrate.source import Setting, Unreadable, merge
from jaxrl.migrate.systems import table_of
from jaxrl.migrate.table import Migration
from jaxrl.resolve.checks.common import check

FILES = {  # name -> (system, name of the file, its text, recipe, what the config has, by the source's code)
    "trl_sft": ("trl", "j.yaml", """
model_name_or_path: a/b
dataset_name: a/rows
max_length: 2048
packing: false
assistant_only_loss: true
num_processes: 8
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
use_peft: true
""", "sft", {"data.prompts_per_step": 128, "train.max_sequence_tokens": 2048, "data.overlong_completion": "truncate",
             "data.train_turns": "all", "data.assistant_mask": "template", "train.loss_on_prompt": False, "optimizer.lr": 2e-5,
             "optimizer.schedule": "linear", "lora.dropout": 0.05, "train.tokens_per_microbatch": 4096, "log.every_steps": 10}),
    "trl_dpo": ("trl", "j.sh", "accelerate launch --num_processes 4 dpo.py --dataset_name a/pairs --model_name_or_path a/b --loss_type sigmoid sft"
                " --loss_weights 1.0 0.2 --eval_strategy steps --eval_steps 50\n", "preference",
                {"preference.loss": ("dpo", "nll"), "preference.loss_weights": (1.0, 0.2), "preference.beta": 0.1, "optimizer.lr": 1e-6,
                 "data.prompts_per_step": 32, "train.tokens_per_microbatch": 8 * 2 * 1024, "eval.sets": ("test=a/pairs@test",),
                 "eval.every_steps": 50, "eval.before": False}),
    "trl_simpo": ("trl", "j.sh", "trl cpo --dataset_name a/pairs --model_name_or_path a/b --num_processes 1 --loss_type simpo --simpo_gamma 1.0"
                  " --cpo_alpha 0.0 --beta 2.0\n", "preference",
                  {"preference.loss": ("simpo",), "preference.beta": 2.0, "preference.simpo_gamma": 1.0, "preference.rpo_alpha": 0.0}),
    "trl_kto": ("trl", "j.sh", "trl kto --dataset_name a/pairs --model_name_or_path a/b --num_processes 2 --desirable_weight 1.5\n", "preference",
                {"preference.loss": ("kto",), "preference.desirable_weight": 1.5, "preference.undesirable_weight": 1.0}),
    "trl_reward": ("trl", "j.sh", "python reward_modeling.py --dataset_name a/pairs --model_name_or_path a/b --num_processes 8"
                   " --center_rewards_coefficient 0.01\n", "reward_model",
                   {"reward_model.center": 0.01, "optimizer.lr": 1e-4, "data.prompts_per_step": 64}),
    "trl_gkd": ("trl", "j.sh", "python gkd.py --dataset_name a/rows --model_name_or_path a/b --teacher_model_name_or_path a/t --num_processes 8"
                " --lmbda 0.25 --beta 1.0\n", "distill",
                {"distill.on_policy": 0.25, "distill.loss": "reverse", "teacher.path": "a/t", "distill.temperature": 1.0,
                 "distill.teacher_temperature": 1.0, "rollout.temperature": 0.9, "rollout.group_size": 1}),
    "skyrl": ("skyrl", "j.sh", "python -m skyrl.train.main_sft strategy=megatron model.path=a/b train_datasets=\"['a/x','a/y']\""
              " train_dataset_splits=\"['train','train[:10]']\" train_dataset_weights='[0.8,0.2]' batch_size=24 max_length=4096 num_steps=9"
              " use_sequence_packing=true train_on_what=all_assistant_messages\n", "sft",
              {"data.prompts_per_step": 24, "train.steps": 9, "mesh.tp": 2, "train.tokens_per_microbatch": 4096, "data.train_turns": "all",
               "optimizer.lr": 1e-6, "optimizer.schedule": "constant",
               "data.sources.x": {"path": "a/x", "weight": 0.8, "split": ("train",)},
               "data.sources.y": {"path": "a/y", "weight": 0.2, "split": ("train[:10]",)}}),
    "verl": ("verl", "j.sh", "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_files=a.parquet model.path=a/b optim=megatron"
             " optim.lr=1e-5 optim.lr_warmup_steps_ratio=0.2 optim.lr_decay_style=cosine optim.min_lr=1e-6 'optim.betas=\"[0.9,0.95]\"'"
             " engine=megatron engine.tensor_model_parallel_size=4\n", "sft",
             {"mesh.tp": 4, "optimizer.lr": 1e-5, "optimizer.schedule": "cosine", "optimizer.warmup_fraction": 0.2, "optimizer.floor": 0.1,
              "optimizer.b2": 0.95, "data.prompts_per_step": 256, "train.tokens_per_microbatch": 8192, "data.train_turns": "all",
              "data.overlong_completion": "filter"}),
    "verl_first": ("verl", "j.sh", "torchrun --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet data.prompt_key=q"
                   " data.response_key=r model.partial_pretrain=a/b data.micro_batch_size=16 data.truncation=right\n", "sft",
                   {"optimizer.lr": 1e-5, "optimizer.b2": 0.95, "optimizer.schedule": "cosine", "optimizer.warmup_fraction": 0.1,
                    "data.prompt_column": "q", "data.completion_column": "r", "train.tokens_per_microbatch": 4 * 1024,
                    "data.overlong_completion": "truncate"}),
    "areal": ("areal", "j.yaml", """
total_train_epochs: 1
actor: {backend: "fsdp:d4p1t2", path: a/b, dtype: bfloat16, mb_spec: {max_tokens_per_mb: 4096},
        optimizer: {lr: 2.0e-5, lr_scheduler_type: cosine}}
train_dataset: {path: openai/gsm8k, type: sft, batch_size: 128, max_length: 1024}
""", "sft", {"mesh.tp": 2, "data.prompt_column": "question", "data.completion_column": "answer", "data.chat": "false",
             "data.prompts_per_step": 128, "data.overlong_completion": "filter", "train.tokens_per_microbatch": 4096, "data.subset": "main"}),
    "areal_dpo": ("areal", "j.yaml", """
actor: {backend: "fsdp:d8p1t1", path: a/b, beta: 0.2, loss_type: ipo, optimizer: {lr: 5.0e-6}}
ref: {path: a/c}
train_dataset: {path: Anthropic/hh-rlhf, type: dpo, batch_size: 64, max_length: 2048}
valid_dataset: {path: Anthropic/hh-rlhf, type: dpo}
evaluator: {freq_epochs: 1}
""", "preference", {"preference.loss": ("ipo",), "preference.beta": 0.2, "reference.path": "a/c", "data.prompts_per_step": 64,
                    "eval.sets": ("valid=Anthropic/hh-rlhf@test",), "eval.every_epochs": 1.0}),
    "areal_rw": ("areal", "j.yaml", """
model: {backend: fsdp, path: a/b, optimizer: {lr: 2.0e-5}}
allocation_mode: d8p1t1
train_dataset: {path: Anthropic/hh-rlhf, type: rw, batch_size: 256, max_length: 512}
""", "reward_model", {"model.path": "a/b", "optimizer.lr": 2e-5, "data.prompts_per_step": 256}),
    "roll_sft": ("roll", "j.yaml", """
sequence_length: 2048
pretrain: a/b
sft_train:
  training_args: {num_train_epochs: 1, per_device_train_batch_size: 2, gradient_accumulation_steps: 16, learning_rate: 5.0e-6}
  data_args: {file_name: a.json, template: qwen2_5}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}}
  device_mapping: list(range(0,8))
""", "sft", {"data.prompts_per_step": 2 * 16 * 2, "mesh.tp": 2, "data.prompt_column": "instruction", "data.completion_column": "output",
             "data.shuffle": False, "optimizer.lr": 5e-6, "train.tokens_per_microbatch": 4096}),
    "roll_dpo": ("roll", "j.yaml", """
max_steps: 500
sequence_length: 512
pretrain: a/b
chosen_key: good
rejected_key: bad
ipo: true
actor_train:
  training_args: {per_device_train_batch_size: 16, learning_rate: 1.0e-6, num_train_epochs: 10}
  data_args: {file_name: [a.json]}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 1}}
  device_mapping: list(range(0,8))
""", "preference", {"data.prompts_per_step": 128, "preference.loss": ("ipo",), "preference.ipo_mean": False, "train.steps": 500,
                    "data.chosen_column": "good", "data.rejected_column": "bad", "train.tokens_per_microbatch": 16 * 2 * 512}),
    "roll_distill": ("roll", "j.yaml", """
student_pretrain: a/b
teacher_pretrain: a/t
logits_topk: 0
distill_loss_weight: 0.75
kd_objective: reverse_kl
kd_temperature: 2
sequence_length: 2048
question_key: q
student:
  training_args: {per_device_train_batch_size: 8, gradient_accumulation_steps: 4}
  data_args: {file_name: [a.json]}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2, context_parallel_size: 2}}
  device_mapping: list(range(0,8))
teacher: {device_mapping: "list(range(0,8))"}
""", "distill", {"distill.loss": "reverse", "distill.ce": 0.25, "distill.on_policy": 0.0, "distill.temperature": 2.0, "teacher.path": "a/t",
                 "data.prompts_per_step": 8 * 4 * 2, "data.prompt_column": "q", "data.completion_column": "answer", "model.path": "a/b"}),
    "roll_on_policy": ("roll", "j.yaml", """
pretrain: a/b
rollout_batch_size: 16
prompt_length: 512
response_length: 1024
num_return_sequences_in_group: 4
adv_estimator: reinforce
student_train:
  training_args: {per_device_train_batch_size: 4, gradient_accumulation_steps: 2, learning_rate: 5.0e-7}
  data_args: {file_name: [a.jsonl]}
  device_mapping: list(range(0,8))
student_infer: {device_mapping: "list(range(0,8))"}
teacher: {model_args: {model_name_or_path: a/t}, opd_kl_coef: 0.5}
""", "distill", {"distill.loss": "sampled", "distill.coef": 0.5, "teacher.path": "a/t", "data.prompts_per_step": 16, "rollout.group_size": 4,
                 "algorithm.num_minibatches": 1}),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_the_recipes_config_and_passes_the_checks(name, tmp_path, monkeypatch):
    system, file, text, recipe, want = FILES[name]
    status, report, out = run(tmp_path, text, name=file, system=system)
    assert status == 0, report.get("lacks")
    assert not [k["key"] for k in report["keys"] if k["kind"] == "unknown"] and report["job"] and report["facts"]["job"]
    table = table_of(system)
    found = values(Migration(table, read(table, tmp_path / file, []), table.versions[-1]).run())
    assert found["run.recipe"] == recipe
    assert {option: pytest.approx(found[option]) if isinstance(found[option], float) else found[option] for option in want} == want
    monkeypatch.chdir(out)
    config = load_config("j.py")
    assert config.run.recipe == recipe
    check(config)


def test_what_a_job_of_rows_loses_is_said():
    held = migrated("skyrl", {"train_datasets": ["a/b"], "train_dataset_splits": ["train"], "eval_datasets": ["a/b"], "max_length": 9})
    assert [key for key, *_ in held.lacking] == ["eval_datasets"] and held.outcome(False) == "partial"
    packed = migrated("trl", {"packing": True, "max_length": 512, "dataset_name": "a/b", "num_processes": 8, "completion_only_loss": True})
    assert any(text.startswith("data.prompts_per_step=64: with packing") for text in packed.needs_you)
    dft = migrated("trl", {"packing": False, "loss_type": "dft", "dataset_name": "a/b", "num_processes": 8})
    assert dft.outcome(False) == "refused"
    adaptive = migrated("roll", {"kd_objective": "adaptive_kl", "student.device_mapping": "[0]", "sequence_length": 64})
    assert adaptive.outcome(False) == "refused"
    many = migrated("roll", {"student_train.device_mapping": "[0]", "teacher.one.model_args.model_name_or_path": "a"}, gpus=1)
    assert many.outcome(False) == "refused"


def test_a_job_is_named_behind_its_system(tmp_path):
    """A file of SFT and DPO that has no key of its own: refused with the names of both, read under one of them."""
    text = "dataset_name: a/b\nmodel_name_or_path: a/c\nmax_length: 64\nnum_processes: 2\n"
    status, report, _ = run(tmp_path, text, name="j.yaml", system="trl")
    assert status == 3 and "trl/preference" in report["lacks"][0]["why"]
    for job, recipe in (("sft", "sft"), ("preference", "preference"), ("reward_model", "reward_model")):
        (tmp_path / job).mkdir()
        status, report, _ = run(tmp_path / job, text, name="j.yaml", system=f"trl/{job}")
        assert status == 0 and report["defaults_written"]["run.recipe"]["value"] == recipe


def test_a_group_of_configs_stands_beside_its_options(tmp_path):
    into = {}
    merge(into, [Setting("engine.a", 1, ""), Setting("engine", "megatron", ""), Setting("engine.b", 2, "")], ("engine",))
    assert {k: s.value for k, s in into.items()} == {"engine.a": 1, "engine": "megatron", "engine.b": 2}
    merge(into, [Setting("other", 1, ""), Setting("other.a", 2, "")], ("engine",))
    assert "other" not in into


ROWS = {"dataset_name": "a/b", "model_name_or_path": "a/c", "num_processes": 8}
HELD = {"eval_strategy": "steps", "eval_steps": 50}
TAUGHT = ROWS | {"teacher_model_name_or_path": "a/t", "temperature": 0.7}
STUDENT = {"student.device_mapping": "[0]", "student_pretrain": "a/b", "teacher_pretrain": "a/t", "sequence_length": 64}
PAIRS = {"chosen_key": "c", "pretrain": "a/b", "actor_train.device_mapping": "list(range(0,8))", "sequence_length": 64}
OWN = {"actor_train.model_args.model_name_or_path": "a/mine"}
SMALL = {"train_dataset.type": "sft", "train_dataset.path": "openai/gsm8k", "train_dataset.batch_size": 8}


@pytest.mark.parametrize("system, settings, version, command, want", [
    ("trl", ROWS, "0.17", "dpo.py", {"data.max_prompt_tokens": 512, "data.overlong_prompt": "truncate_left", "log.every_steps": 500}),
    ("trl", ROWS, "1.0", "dpo.py", {"data.max_prompt_tokens": 1023, "log.every_steps": 10}),
    ("trl", ROWS | {"max_prompt_length": 300, "max_completion_length": 200}, "0.17", "orpo.py",
     {"data.max_prompt_tokens": 1023, "rollout.max_new_tokens": 1023}),
    ("trl", ROWS | {"loss_type": "exo_pair"}, "0.17", "dpo.py", {"preference.label_smoothing": 1e-3}),
    ("trl", ROWS, "0.23", "reward_modeling.py", {"optimizer.lr": 5e-5}),
    ("trl", ROWS, "0.26", "reward_modeling.py", {"optimizer.lr": 1e-4}),
    ("trl", ROWS, "1.9", "sft.py", {"data.drop_last": False}),
    ("trl", ROWS | {"dataloader_drop_last": True}, "1.9", "sft.py", {"data.drop_last": True}),
    ("trl", ROWS | {"mixed_precision": "'fp16'"}, "0.17", "sft.py", {"train.compute_dtype": "fp16"}),
    ("trl", ROWS | {"mixed_precision": "fp16"}, "1.9", "sft.py", {"train.compute_dtype": "bf16"}),
    ("trl", ROWS, "0.22", "kto.py", {"data.shuffle": False}),
    ("trl", ROWS, "1.9", "kto.py", {"data.shuffle": False}),
    ("trl", ROWS, "1.9", "dpo.py", {"data.shuffle": True}),
    ("trl", ROWS | {"train_sampling_strategy": "sequential"}, "1.9", "sft.py", {"data.shuffle": False}),
    ("trl", ROWS | HELD, "1.0", "trl.scripts.dpo", {"eval.after": True}),
    ("trl", ROWS | HELD, "1.9", "trl.scripts.dpo", {"eval.after": False}),
    ("trl", ROWS | HELD, "1.9", "reward_modeling.py", {"eval.after": True}),
    ("trl", TAUGHT, "1.9", "gkd.py", {"distill.temperature": 1.0, "distill.teacher_temperature": 1.0, "rollout.temperature": 0.7}),
    ("trl", TAUGHT | {"use_liger_kernel": True}, "0.22", "gkd.py", {"distill.temperature": 0.7, "distill.teacher_temperature": 0.7}),
    ("trl", TAUGHT | {"use_liger_kernel": True}, "1.9", "gkd.py", {"distill.temperature": 1.0, "distill.teacher_temperature": 1.0}),
    ("verl", {"data.train_files": "a", "engine": "fsdp"}, "0.6", "sft_trainer", {"data.overlong_completion": "truncate"}),
    ("verl", {"data.train_files": "a", "engine": "fsdp"}, "0.7", "sft_trainer", {"data.overlong_completion": "filter"}),
    ("areal", SMALL | {"model.backend": "megatron", "allocation_mode": "d2p2t2", "model.path": "a/b"}, "0.3", "", {"mesh.tp": 2}),
    ("roll", STUDENT | {"kd_temperature": 2, "teacher_temperature": 3}, "", "", {"distill.teacher_temperature": 6.0, "distill.temperature": 2.0}),
    ("roll", STUDENT, "", "", {"optimizer.max_grad_norm": 0.0}),
    ("roll", PAIRS, "", "", {"optimizer.max_grad_norm": 1.0, "data.epochs": 1}),
    ("roll", PAIRS | {"sequence_length": None, "response_length": 100}, "", "", {"train.max_sequence_tokens": 1124}),
    ("roll", PAIRS | OWN, "", "", {"model.path": "a/b"}),
    ("roll", PAIRS | OWN | {"reference.model_args.model_name_or_path": "a/ref"}, "", "", {"model.path": "a/mine", "reference.path": "a/ref"}),
    ("roll", {"sft_train.model_args.model_name_or_path": "a/mine", "pretrain": "a/b", "sft_train.device_mapping": "[0]", "sequence_length": 9},
     "", "", {"model.path": "a/b"}),
    ("skyrl", {"num_epochs": 2, "max_length": 64}, "", "main_sft", {"data.epochs": 2, "data.drop_last": False, "model.path": "Qwen/Qwen3-0.6B"}),
    ("verl", {"data.train_files": "a"}, "0.3", "fsdp_sft_trainer", {"model.remat": "none", "log.wandb": False}),
])
def test_a_default_or_a_key_means_what_the_sources_code_makes_of_it(system, settings, version, command, want):
    """Defaults of a version, keys that others outrank, and keys that only one trainer reads."""
    found = values(migrated(system, settings, version, command))
    assert {option: found[option] for option in want} == want


def test_what_a_source_does_other_than_its_keys_say_is_said():
    smoothed = migrated("roll", PAIRS | {"beta": 0.2, "actor_train.training_args.lr_scheduler_type": "cosine"})
    assert any("does not hand them to its loss" in text for text in smoothed.different)
    assert any("divides max_steps by the data-parallel ranks" in text for text in smoothed.different)
    assert not any("hand them" in text or "max_steps" in text for text in migrated(
        "roll", PAIRS | {"actor_train.training_args.lr_scheduler_type": "constant"}).different)
    epochs = {"num_epochs": 2, "max_length": 64, "optimizer_config.scheduler": "cosine"}
    assert any("tells its schedule" in text for text in migrated("skyrl", epochs, command="main_sft").different)
    assert not any("tells its schedule" in text for text in migrated("skyrl", epochs | {"max_training_steps": 9}, command="main_sft").different)
    with pytest.raises(Unreadable, match="label_smoothing"):
        migrated("trl", ROWS | {"loss_type": "exo_pair"}, "1.9", "dpo.py")
    for name, version, said in (("a/b-30B-A3B", "1.9", True), ("a/b-8B", "1.9", False), ("a/b-30B-A3B", "1.0", False)):
        routed = migrated("trl", ROWS | {"model_name_or_path": name}, version, "sft.py")
        assert any("spreads tokens over experts" in text for text in routed.different) == said
    clipped = migrated("roll", STUDENT | {"student.strategy_args.strategy_name": "fsdp2_train"})
    assert any(text.startswith("max_grad_norm is 0") for text in clipped.needs_you)


def test_a_flag_that_is_on_is_turned_off_by_no(tmp_path):
    text = "python dpo.py --dataset_name a/b --model_name_or_path a/c --num_processes 8"
    text += " --no_gradient_checkpointing --no_remove_unused_columns --no_sense\n"
    _, report, _ = run(tmp_path, text, name="j.sh", system="trl")
    kinds = {k["key"]: (k["value"], k["kind"]) for k in report["keys"]}
    assert kinds["gradient_checkpointing"] == (False, "equivalent") and kinds["remove_unused_columns"] == (False, "automatic")
    assert kinds["no_sense"] == (True, "unknown")


@pytest.mark.parametrize("system, settings, command", [
    ("skyrl", {"megatron_config.freeze_moe_router": True, "max_length": 64}, "main_sft"),
    ("skyrl", {"megatron_config.transformer_config_kwargs.moe_aux_loss_coeff": 0.01, "max_length": 64}, "main_sft"),
    ("skyrl", {"fsdp_config.mixed_precision.param_dtype": "fp32", "max_length": 64}, "main_sft"),
    ("skyrl", {"trainer.policy.megatron_config.moe_aux_loss_coeff": 0.01}, ""),
    ("roll", STUDENT | {"teacher.model_args.adapter_name_or_path": "a/adapter"}, ""),
    ("roll", PAIRS | {"reference.model_args.adapter_name_or_path": "a/adapter"}, ""),
])
def test_a_key_of_a_backend_that_changes_what_is_learnt_is_said(system, settings, command):
    said = migrated(system, settings, command=command)
    assert {key for key, *_ in said.lacking} & set(settings)


def test_the_version_is_asked_for_within_those_of_the_job(tmp_path):
    """verl's first trainer ended before the newest version: keys that later versions have, too, end in no trace."""
    text = "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet model.partial_pretrain=a/b data.micro_batch_size_per_gpu=8"
    text += " optim.lr=1e-4 data.max_length=64 trainer.device=npu trainer.checkpoint.mbridge_config=1\n"
    status, report, _ = run(tmp_path, text, name="j.sh", system="verl")
    assert status == 0 and report["job"] == "first_sft"


@pytest.mark.parametrize("nodes, gpus", [("--nnodes=16 ", 128), ("--nnodes 2 ", 16), ("", 8)])
def test_the_nodes_of_torchrun_count(nodes, gpus, tmp_path):
    """In words of a=b and of two; without them one node."""
    text = f"torchrun {nodes}--nproc_per_node=8 -m verl.trainer.sft_trainer data.train_files=a.parquet model.path=a/b engine=megatron"
    status, report, _ = run(tmp_path, f"{text} engine.tensor_model_parallel_size=2\n", name="j.sh", system="verl")
    assert status == 0
    assert report["facts"]["GPUs"] == gpus and f"--config.plan.target=h100:{gpus}" in report["commands"]["plan"]


def test_a_key_of_another_job_is_said_to_be_one():
    """It is where it belongs: the note names no other place."""
    notes = {r.key: (r.kind, r.note) for r in migrated("trl/sft", {"cpo_alpha": 0.5, "max_length": 8, "trackio_space_id": "a/b"}, gpus=1).records()}
    assert notes["cpo_alpha"] == ("unknown", "of TRL, but not read for this job") and notes["trackio_space_id"][0] == "inert"


def test_a_key_of_the_top_level_within_a_table_is_unknown():
    for system, settings, key in (("roll", PAIRS, "reference.ipo"), ("roll", STUDENT, "teacher.kd_objective"),
                                  ("skyrl", {"max_length": 64}, "optimizer_config.batch_size")):
        m = migrated(system, settings | {key: 3}, command="main_sft" if system == "skyrl" else "")
        assert [(s.key, note) for s, note in m.unknown] == [(key, f"unknown here; {key.rpartition('.')[2]} belongs at the top level")]


def test_a_bound_that_a_loss_has_not_is_not_written():
    """A config that names it beside another loss is refused by the checks."""
    assert "algorithm.dual_clip" not in values(migrated("skyrl", {"trainer.algorithm.policy_loss_type": "cispo"}))
    assert values(migrated("skyrl", {"trainer.algorithm.policy_loss_type": "regular"}))["algorithm.dual_clip"] == 0.0
