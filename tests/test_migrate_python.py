"""jaxrl.migrate: programs in Python, of which literals are read and nothing is executed; jobs of several turns."""

import asyncio

import pytest
from test_migrate import migrated, run, values

from jaxrl.config.load import load_config
from jaxrl.migrate import __main__ as command
from jaxrl.resolve.checks.common import check

GRPO = '''
import argparse
import sys
from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward
from peft import LoraConfig

sys.exit(open("/nowhere/touched", "w"))  # nothing of it is executed
GROUP = 8
NAME = "someone/small"

@dataclass
class Options:
    rate: float = field(default=2e-6)
    seed: int = 3

def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=50)
    return parser.parse_args()

def short(completions, **columns):
    return [-len(c) for c in completions]

def main():
    args, options = parse(), Options()
    data = load_dataset("someone/sums", "main", split=["train", "test"])
    data = data.map(lambda row: row)
    training = GRPOConfig(
        output_dir=f"runs/{NAME}-grpo", learning_rate=options.rate, seed=options.seed, max_steps=args.max_steps, num_generations=GROUP,
        per_device_train_batch_size=GROUP, max_completion_length=64 * 2, temperature=-1 * -0.7, bf16=torch.cuda.is_available(),
        lr_scheduler_kwargs={"min_lr_rate": 0.1}, lr_scheduler_type="cosine_with_min_lr")
    trainer = GRPOTrainer(model=NAME, args=training, reward_funcs=[accuracy_reward, short], train_dataset=data,
                          peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
    trainer.train()
'''


def test_literals_are_read_and_what_is_computed_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "job.py").write_text(GRPO)
    status, report, out = run(tmp_path, GRPO, "--gpus=2", name="job.py", system="trl")
    keys = {k["key"]: k["value"] for k in report["keys"]}
    assert status == 0 and report["outcome"] == "partial"
    assert keys == {
        "dataset_name": "someone/sums", "dataset_config": "main", "dataset_train_split": "train", "output_dir": "runs/someone/small-grpo",
        "learning_rate": 2e-6, "seed": 3, "max_steps": 50, "num_generations": 8, "per_device_train_batch_size": 8,
        "lr_scheduler_kwargs.min_lr_rate": 0.1, "lr_scheduler_type": "cosine_with_min_lr", "model_name_or_path": "someone/small",
        "reward_funcs": ["accuracy_reward", "job.short"], "use_peft": True, "lora_r": 16, "lora_alpha": 32,
        "lora_target_modules": ["q_proj", "v_proj"]}
    asked = [text.partition(" is computed")[0] for text in report["needs_you"] if " is computed" in text]
    assert asked == ["max_completion_length=64 * 2", "temperature=-1 * -0.7", "bf16=torch.cuda.is_available()"]
    assert any("rows are changed in Python, data.map(" in text for text in report["needs_you"])
    status, report, out = run(tmp_path, GRPO, "--gpus=2", "max_completion_length=128", "temperature=0.7", "bf16=true", name="job.py", system="trl")
    assert not any("is computed" in text for text in report["needs_you"])
    monkeypatch.chdir(out)
    config = load_config("job_job.py" if (out / "job_job.py").exists() else report["config"])
    assert config.rollout.max_new_tokens == 128 and config.optimizer.floor == 0.1 and config.lora.rank == 16
    check(config)


def test_a_program_is_the_job_that_its_trainer_is(tmp_path):
    sft = 'from trl import *\nSFTTrainer(model="a/b", args=SFTConfig(max_length=512, per_device_train_batch_size=4, completion_only_loss=True),\n' \
          '           train_dataset=load_dataset("a/rows"))\n'
    status, report, _ = run(tmp_path, sft, "--gpus=2", name="train.py", system="trl")
    assert status == 0 and report["job"] == "sft" and report["outcome"] == "full"
    flags = "from trl import *\nparser = TrlParser((ScriptArguments, SFTConfig))\na, b = parser.parse_args_and_config()\nSFTTrainer(args=b)\n"
    status, report, _ = run(tmp_path, flags, "--gpus=2", name="flags.py", system="trl")
    assert status == 2


@pytest.mark.parametrize("text", ["def f(:\n", "x = " + "(" * 3000, "\0"])
def test_what_is_no_program_is_one_line(tmp_path, capsys, text):
    status, *_ = run(tmp_path, text, "--gpus=2", name="job.py", system="trl")
    said = capsys.readouterr().err
    assert status == 2 and said.count("\n") == 1 and "job.py" in said


TURNS = [  # system, settings, turns, what the stub says
    ("skyrl", {"environment.env_class": "search", "generator.max_turns": 4}, 4, "generator.max_turns=4"),
    ("verl", {"actor_rollout_ref.rollout.multi_turn.enable": True, "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 5,
              "actor_rollout_ref.rollout.multi_turn.tool_config_path": "tools.yaml"}, 5, "tool_config_path=tools.yaml"),
    ("areal", {"max_turns": 32, "gconfig.n_samples": 4, "train_dataset.batch_size": 8, "n_trajs": 5}, 32, "n_trajs=5"),
    ("areal", {"workflow": "a.b.Agent", "gconfig.n_samples": 4, "train_dataset.batch_size": 8}, None, "workflow=a.b.Agent"),
    ("cosmos_rl", {"train.train_policy.type": "grpo", "rollout.multi_turn_config.enable": True,
                   "rollout.multi_turn_config.max_assistant_turns": 3}, 3, "max_assistant_turns=3"),
    ("trl", {"num_processes": 8, "num_generations": 8, "reward_funcs": ["accuracy"], "tools": "[search, book]",
             "max_tool_calling_iterations": 6}, 6, "tools=[search, book]"),
]


@pytest.mark.parametrize("system, settings, turns, said", TURNS)
def test_several_turns_are_an_environment_with_a_stub_that_runs(system, settings, turns, said):
    m = migrated(system, settings)
    v, text = values(m), m.files["job_env.py"]
    assert v["env.function"] == "./job_env.py:episode" and v.get("env.max_turns") == turns and m.outcome(False) == "partial"
    assert said in text and text.count("WRITE HERE") == 1 and any("job_env.py" in need for need in m.needs_you)
    space: dict = {}
    exec(text, space)
    sent, notes = [], {}

    class Chat:
        async def send(self, messages):
            sent.append(messages)
            return type("Turn", (), {"text": "hello"})()

        def note(self, **more):
            notes.update(more)

    assert asyncio.run(space["episode"](type("Task", (), {"prompt": "hi", "row": {}})(), Chat())) == 0.0
    assert sent == ["hi"] and notes == {"turn_characters": 5}


def test_bounds_of_turns_without_the_switch_are_asked_about():
    m = migrated("verl", {"actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 5})
    assert any("multi_turn.enable=True after the file" in text for text in m.needs_you)


def test_a_program_without_a_trainer_is_no_job(tmp_path):
    (tmp_path / "rows.py").write_text('from datasets import load_dataset\nload_dataset("a/rows").push_to_hub("b/rows")\n')
    assert command.main(["trl", str(tmp_path / "rows.py"), "--gpus=2", f"--out={tmp_path / 'out'}"]) == 2


def test_options_of_accelerate_are_no_job():
    m = migrated("trl", {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 8})
    assert m.outcome(False) == "refused" and "accelerate" in m.lacking[0][1]


def test_rows_that_no_file_names_are_asked_for(tmp_path):
    unnamed = GRPO.replace('load_dataset("someone/sums", "main", split=["train", "test"])', "None").replace("data = data.map(lambda row: row)", "")
    _, report, _ = run(tmp_path, unnamed, "--gpus=2", name="job.py", system="trl")
    assert any(text.startswith("data.path: the source names no data set") for text in report["needs_you"])
