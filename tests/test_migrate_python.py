"""jaxrl.migrate: programs in Python, of which literals are read and nothing is executed; jobs of several turns."""

import asyncio
import json

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


def known_keys(report):
    return {k["key"]: k["value"] for k in report["keys"] if not k["note"].startswith("computed")}


def test_literals_are_read_and_what_is_computed_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "job.py").write_text(GRPO)
    status, report, out = run(tmp_path, GRPO, "--gpus=2", name="job.py", system="trl")
    keys = known_keys(report)
    assert status == 0 and report["outcome"] == "partial"
    assert keys == {
        "dataset_name": "someone/sums", "dataset_config": "main", "dataset_train_split": "train", "output_dir": "runs/someone/small-grpo",
        "learning_rate": 2e-6, "seed": 3, "max_steps": 50, "num_generations": 8, "per_device_train_batch_size": 8,
        "lr_scheduler_kwargs.min_lr_rate": 0.1, "lr_scheduler_type": "cosine_with_min_lr", "model_name_or_path": "someone/small",
        "reward_funcs": ["accuracy_reward", "job.short"], "use_peft": True, "lora_r": 16, "lora_alpha": 32,
        "lora_target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0, "max_completion_length": 128, "temperature": 0.7}
    asked = [text.partition(" is computed")[0] for text in report["needs_you"] if " is computed" in text]
    assert asked == ["bf16=torch.cuda.is_available()"]
    assert any("rows are changed in Python, data.map(" in text for text in report["needs_you"])
    status, report, out = run(tmp_path, GRPO, "--gpus=2", "bf16=true", name="job.py", system="trl")
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


ASSIGNED = """
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

args = SFTConfig(output_dir="out", max_length=512, learning_rate=1e-4, completion_only_loss=True)
args.warmup_steps = 7
args.lr_scheduler_kwargs = dict(min_lr_rate=0.1)
args.lr_scheduler_type = "cosine_with_min_lr"
args.learning_rate = 2e-4
args.max_length = find_length()
lora = LoraConfig(r=8)
lora.lora_alpha = 64
other.weight_decay = 0.5
SFTTrainer(model="a/b", args=args, peft_config=lora, train_dataset=load_dataset("a/rows"))
"""


def test_values_that_a_program_assigns_to_its_config_are_read_or_asked_for(tmp_path):
    _, report, _ = run(tmp_path, ASSIGNED, "--gpus=2", name="job.py", system="trl")
    keys = known_keys(report)
    assert keys["warmup_steps"] == 7 and keys["lora_alpha"] == 64 and keys["lr_scheduler_kwargs.min_lr_rate"] == 0.1
    assert keys.keys().isdisjoint(("learning_rate", "max_length", "weight_decay"))
    asked = [text for text in report["needs_you"] if text.startswith(("learning_rate", "max_length="))]
    assert len(asked) == 2 and "has several values, 0.0001" in asked[1] and "find_length() is computed" in asked[0]
    parsed = "from trl import *\nparser = TrlParser((ScriptArguments, SFTConfig))\nscript, args = parser.parse_args_and_config()\n" \
             "args.max_length = None\nargs.model_init_kwargs = dict(dtype=script.dtype)\nargs.packing = True\nSFTTrainer(args=args)\n"
    _, report, _ = run(tmp_path, parsed, "--gpus=2", "dataset_name=a/rows", name="parsed.py", system="trl")
    assert {k["key"]: k["value"] for k in report["keys"]} == {"dataset_name": "a/rows", "max_length": None, "packing": True}
    assert any("rows have no bound" in text for text in report["needs_you"]) and not any("script.dtype" in text for text in report["needs_you"])


def test_adapters_of_a_program_have_the_defaults_of_peft_and_not_those_of_flags(tmp_path, monkeypatch):
    program = 'from trl import *\nfrom peft import LoraConfig\nSFTTrainer(model="a/b", args=SFTConfig(completion_only_loss=True), ' \
              'train_dataset=load_dataset("a/rows"), peft_config=LoraConfig({}))\n'
    for given, (rank, alpha, dropout) in {"": (8, 8, 0.0), "r=4, lora_dropout=0.1": (4, 8, 0.1)}.items():
        _, report, out = run(tmp_path, program.format(given), "--gpus=2", name="job.py", system="trl")
        monkeypatch.chdir(out)
        adapters = load_config(report["config"]).lora
        assert (adapters.rank, adapters.alpha, adapters.dropout) == (rank, alpha, dropout)
    flags = "trl sft --model_name_or_path a/b --dataset_name a/rows --use_peft --completion_only_loss true --num_processes 2\n"
    _, report, out = run(tmp_path, flags, name="job.sh", system="trl")
    monkeypatch.chdir(out)
    assert load_config(report["config"]).lora.alpha == 32


def test_rows_that_a_commands_program_changes_are_asked_for(tmp_path):
    text = "python train.py --model_name_or_path a/b --dataset_name a/rows --learning_rate 1e-4 --num_processes 2\n"
    for program, changed in {"rows = 1 +": False, "print(dataset)\n": False, "\ndataset = dataset.map(merge)\n": True}.items():
        (tmp_path / "train.py").write_text(program)
        _, report, _ = run(tmp_path, text, name="job.sh", system="trl")
        asked = [need for need in report["needs_you"] if need.startswith("train.py:2: rows are changed in Python, ")]
        assert len(asked) == changed, report["needs_you"]
@pytest.mark.parametrize(("call", "given", "want"), [
    ("LoraConfig()", (), (8, 8.0, 0.0)), ("LoraConfig(r=32, lora_dropout=0.1)", (), (32, 8.0, 0.1)),
    ("LoraConfig(lora_alpha=size())", ("lora_alpha=24",), (8, 24.0, 0.0)), ("LoraConfig(**more)", ("lora_r=4",), (4, 32.0, 0.05))])
def test_adapters_of_a_program_have_pefts_defaults_and_those_of_flags_trls(tmp_path, call, given, want):
    """16, 32 and 0.05 are of TRL's flags (ModelConfig); PEFT upcasts adapters on a base in bf16."""
    text = ("from peft import LoraConfig\nfrom trl import SFTConfig, SFTTrainer\nargs = SFTConfig(max_length=512, "
            "model_init_kwargs={'dtype': 'bfloat16'})\n"
            f"SFTTrainer(model='a/b', args=args, peft_config={call}, train_dataset=load_dataset('a/rows'))\n")
    status, _, out = run(tmp_path, text, "--gpus=2", *given, name="rows.py", system="trl")
    c = load_config(str(out / "rows.py"))
    assert (status, (c.lora.rank, c.lora.alpha, c.lora.dropout)) == (0, want)
    assert (c.train.param_dtype, c.train.compute_dtype, c.lora.base_dtype) == ("fp32", "bf16", "auto")


LOADED = """
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

NAME = "a/b"
few = BitsAndBytesConfig(load_in_4bit=True, KIND bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained(NAME, revision="abc", device_map="auto", torch_dtype=torch.bfloat16, BASE attn_implementation="sdpa")
WRAPPED
trainer = SFTTrainer(model=model, args=SFTConfig(max_length=512), ADAPTERS train_dataset=load_dataset("a/rows", split="train"))
trainer.train()
model = AutoModelForCausalLM.from_pretrained("out", dtype="float32")
"""
WRAP = "model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(r=16))"


@pytest.mark.parametrize(("base", "kind", "wrap", "want", "lacks"), [
    ("", "", "", (0, "none", "bf16"), []),
    ("quantization_config=few,", "bnb_4bit_quant_type='nf4',", "", (16, "nf4", "bf16"), []),
    ("quantization_config=few,", "", WRAP, (16, "nf4", "bf16"), ["bnb_4bit_quant_type"])])
def test_a_model_that_a_program_loads_itself_keeps_its_dtype_revision_and_few_bits(tmp_path, base, kind, wrap, want, lacks):
    """It is the one that the trainer is given, adapters put around it or not; what is loaded later, to try it, is another."""
    text = LOADED.replace("KIND", kind).replace("BASE", base).replace("WRAPPED", wrap)
    text = text.replace("ADAPTERS", "" if wrap or not base else "peft_config=LoraConfig(r=16),")
    text = text if base else text.replace("few = Bits", "few = None and Bits")
    status, report, out = run(tmp_path, text, "--gpus=2", name="rows.py", system="trl")
    c = load_config(str(out / "rows.py"))
    assert (status, c.model.path, c.model.revision) == (0, "a/b", "abc")
    assert (c.lora.rank, c.lora.base if base else "none", c.train.param_dtype) == want
    assert [entry["key"] for entry in report["lacks"]] == lacks and not [k for k in report["keys"] if k["kind"] == "unknown"]


SURGERY = """
from datasets import concatenate_datasets, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

tokenizer = AutoTokenizer.from_pretrained("a/b")
model = AutoModelForCausalLM.from_pretrained("a/b")
train = load_dataset("a/rows", split="train")
LINE
SFTTrainer(model=model, args=SFTConfig(max_length=8), train_dataset=train, processing_class=tokenizer)
"""


@pytest.mark.parametrize(("line", "asked"), [
    ("train = train.shuffle(seed=3).select(range(1000))", "data.path"), ("few = train.take(8)", "data.path"),
    ("train = concatenate_datasets([train, train])", "data.sources"), ("held = load_dataset('a/two')", "data.sources or eval.sets"),
    ("tokenizer.chat_template = '{{ messages }}'", "model.chat_template"), ("model.lm_head.requires_grad_(False)", "model.frozen"),
    ("model.lm_head.weight.requires_grad = False", "model.frozen"), ("model.resize_token_embeddings(9)", "not carried over"),
    ("tokenizer = AutoTokenizer.from_pretrained('a/c')", "model.tokenizer"),
    ("train = train.shuffle(seed=3)", ""), ("sizes = [1, 2].index(2)", ""),
    ("if tokenizer.chat_template is None:\n    tokenizer.chat_template = 'x'", "")])
def test_what_a_program_does_to_rows_tokenizer_and_model_is_asked_for(tmp_path, line, asked):
    """No argument of a call says it, and the config would train on other rows, templates or parameters in silence."""
    (tmp_path / "plain").mkdir(), (tmp_path / "line").mkdir()
    _, plain, _ = run(tmp_path / "plain", SURGERY.replace("LINE", ""), "--gpus=2", name="job.py", system="trl")
    _, report, _ = run(tmp_path / "line", SURGERY.replace("LINE", line), "--gpus=2", name="job.py", system="trl")
    new = [text for text in report["needs_you"] if text not in plain["needs_you"]]
    assert len(new) == bool(asked) and all(asked in text and text.startswith("job.py:") for text in new), new


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


TUNIX = '''
import argparse
import os

import jax
import jax.numpy as jnp
import optax
from orbax import checkpoint as ocp
from tunix.rl import rl_engine as rl_engine_lib
from tunix.rl.rollout import base_rollout
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig, GRPOLearner
from tunix.utils import math_rewards
from transformers import AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--beta", type=float, default=0.01)
args = parser.parse_args()
MESH = [(2, 4), ("fsdp", "tp")]
BATCH, STEPS, RATE, NORM, DEBUG = 32, 10 * 4, 3e-6, 0.5, False
BATCH = BATCH if DEBUG else 16
SIZE = 16
ENGINE = os.getenv("ENGINE", "vanilla")
mesh = jax.make_mesh(*MESH)
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
actor = params.create_model_from_safe_tensors("/w", config, mesh, dtype=jnp.float32)
data = data.batch(SIZE)
optimizer = optax.adamw(optax.schedules.warmup_cosine_decay_schedule(init_value=0.0, peak_value=RATE, warmup_steps=int(0.1 * 40),
                        decay_steps=40), b2=0.95, eps=1e-7)
if NORM is not None:
    optimizer = optax.chain(optax.clip_by_global_norm(max_norm=NORM), optimizer)
if DEBUG:
    debug = base_rollout.RolloutConfig(max_tokens_to_generate=1, temperature=0.1)
base = {"max_prompt_length": 128, "max_tokens_to_generate": 256, "temperature": 1.0, "top_p": None, "return_logprobs": True}
if ENGINE == "vllm":
    rollout = base_rollout.RolloutConfig(**base, rollout_vllm_hbm_utilization=0.3, tensor_parallel_size=MESH[0][1])
else:
    rollout = base_rollout.RolloutConfig(**base)
cluster = rl_engine_lib.ClusterConfig(role_to_mesh={}, rollout_engine=ENGINE, offload_to_cpu=True, training_config=rl_engine_lib.RLTrainingConfig(
    actor_optimizer=optimizer, eval_every_n_steps=10, max_steps=40, mini_batch_size=8,
    checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=20, max_to_keep=2)), rollout_config=rollout)

class Mine(GRPOLearner):
    pass

def short(prompts, completions, **rows):
    open("/nowhere/touched", "w")

learner = Mine(rl_engine=None, reward_fns=[math_rewards.math_reward, short], algo_config=GRPOConfig(
    num_generations=4, beta=args.beta, kl_loss_mode="low_var_kl", epsilon=0.1, max_response_length=256))
learner.train(data)
'''


def tunix(tmp_path, text, *overrides):
    return run(tmp_path, text, *overrides, name="job.py", system="tunix")


def test_programs_of_tunix_are_read(tmp_path, monkeypatch):
    """Config classes, optax, meshes and the learner, with the classes' own defaults; the branch that is not taken is not read."""
    status, report, out = tunix(tmp_path, TUNIX)
    assert status == 0 and report["outcome"] == "partial" and report["job"] == "program"
    assert not [k for k in report["keys"] if k["kind"] == "unknown"]
    asked = [text.partition("=")[0] for text in report["needs_you"] if " is computed" in text]
    assert any(text.startswith("Mine (job.py:") for text in report["needs_you"])
    assert asked == [] and any("math_rewards.math_reward, short)" in text for text in report["needs_you"])
    monkeypatch.chdir(out)
    c = load_config("job.py")
    c.data.path, c.reward.functions = ("a.parquet",), ("math",)
    check(c)
    assert (c.model.path, c.data.prompts_per_step, c.rollout.group_size, c.rollout.max_new_tokens, c.data.max_prompt_tokens) == (
        "Qwen/Qwen2.5-0.5B", 16, 4, 256, 128)
    assert (c.rollout.temperature, c.rollout.top_p, c.rollout.top_k, c.rollout.engine) == (1.0, 1.0, -1, "jax")
    assert (c.optimizer.lr, c.optimizer.warmup_steps, c.optimizer.decay_steps, c.optimizer.schedule) == (3e-6, 4, 36, "cosine")
    assert (c.optimizer.b1, c.optimizer.b2, c.optimizer.eps, c.optimizer.weight_decay, c.optimizer.max_grad_norm) == (0.9, 0.95, 1e-7, 1e-4, 0.5)
    assert (c.algorithm.num_minibatches, c.algorithm.clip_low, c.algorithm.kl.coef, c.train.steps) == (2, 0.1, 0.01, 40)
    assert (c.mesh.tp, c.checkpoint.every_steps, c.checkpoint.keep, c.train.param_dtype) == (4, 10, 2, "fp32")  # each 20 of 2 updates a step
    assert c.mesh.roles.policy.rest == "host"
    tunix(tmp_path, TUNIX.replace("agentic.agentic_grpo_learner", "grpo.grpo_learner").replace(", max_response_length=256", ""))
    assert load_config("job.py").train.steps == 20  # where max_steps counts optimizer steps, two a step


def test_prompts_of_a_program_of_tunix_are_rendered_as_its_learner_gets_them(tmp_path):
    """Texts as they are but for agents, which have a parser of messages; evaluation counts updates, two of a step."""
    parser = TUNIX.replace("algo_config=GRPOConfig(", "chat_parser=reader, algo_config=GRPOConfig(")
    own = parser.replace("class Mine(", "class Raw:\n    pass\n\nreader = Raw()\n\nclass Mine(")
    qwen = parser.replace("class Mine(", "reader = chat.QwenChatTemplateParser(tokenizer)\n\nclass Mine(")
    texts = TUNIX.replace("agentic.agentic_grpo_learner", "grpo.grpo_learner").replace(", max_response_length=256", "")
    for text, rendered, asked in ((TUNIX, "auto", False), (qwen, "auto", False), (own, "false", True), (texts, "false", False)):
        _, report, out = tunix(tmp_path, text)
        assert load_config(str(out / "job.py")).data.chat == rendered
        assert any("Raw, a class of the program's own" in text for text in report["needs_you"]) == asked
        assert any("eval.every_steps=5:" in text for text in report["needs_you"])


@pytest.mark.parametrize(("change", "asked"), [
    (("temperature=0.1)", "temperature=0.1)\nother = base_rollout.RolloutConfig(temperature=0.2)"),
     "rollout_config.temperature=... has several values"),
    (("mini_batch_size=8", "mini_batch_size=SIZE // int(os.getenv('N'))"), "rl_training_config.mini_batch_size"),
    (("base = {", "base = {}\nbase = {"), "rollout_config.**=base is computed"),
    (("return_logprobs\": True}", "return_logprobs\": True}\nbase[\"temperature\"] = 0.3"), "rollout_config.**=base is computed"),
    (("data = data.batch(SIZE)", ""), "data.prompts_per_step"),
    (("cluster =", "provider = qwix.LoraProvider(rank=4)\ncluster ="), "actor_model_config.lora_config.rank=4, if the policy"),
])
def test_what_a_program_of_tunix_computes_is_asked_for(tmp_path, change, asked):
    assert change[0] in TUNIX
    status, report, _ = tunix(tmp_path, TUNIX.replace(*change))
    assert status == 0 and any(text.startswith(asked) for text in report["needs_you"]), report["needs_you"]


@pytest.mark.parametrize(("text", "recipe"), [
    ("import tunix\ntrainer = tunix.PeftTrainer(model, optimizer, config)", "sft"),
    ("from tunix.sft.dpo import DPOTrainer\nDPOTrainer(model=1)", "preference")])
def test_trainers_of_tunix_that_are_not_read_are_refused_by_name(tmp_path, text, recipe):
    status, report, _ = tunix(tmp_path, text + "\nimport optax\noptax.adamw(learning_rate=1e-5)")
    assert status == 3 and f"run.recipe={recipe}" in report["lacks"][0]["why"]


def test_a_trainer_of_the_programs_own_is_no_trainer_of_trls(tmp_path):
    """Its loss may be another one."""
    own = GRPO.replace("def main():", "class Mine(GRPOTrainer):\n    pass\n\ndef main():").replace("trainer = GRPOTrainer(", "trainer = Mine(")
    assert "Mine(" in own
    _, report, _ = run(tmp_path, own, "--gpus=2", name="job.py", system="trl")
    assert "reward_funcs" not in {k["key"] for k in report["keys"]}


def test_a_notebook_is_read_as_its_code(tmp_path):
    at = TUNIX.index("base = {")
    cells = [{"cell_type": "markdown", "source": ["# not code ("]}, {"cell_type": "code", "source": ["%pip install tunix\n", "!ls\n", TUNIX[:at]]},
             {"cell_type": "code", "source": TUNIX[at:]}]
    status, report, _ = run(tmp_path, json.dumps({"cells": cells, "nbformat": 4}), name="job.ipynb", system="tunix")
    keys = {k["key"]: k["value"] for k in report["keys"]}
    assert status == 0 and keys["rollout_config.total_generation_steps"] == 256 and keys["optax.clip_by_global_norm"] == 0.5
    status, _, _ = run(tmp_path, "[1, 2", name="bad.ipynb", system="tunix")
    assert status == 2


MESHES = """
import jax, math, os
from jax.sharding import Mesh
ROLLOUT_MESH = [(4, 1), ("fsdp", "tp")]
TRAINER_MESH = [(2, 2), ("fsdp", "tp")]
n = math.prod(ROLLOUT_MESH[0])
if os.getenv("ENGINE", "vllm") in ("vllm", "sglang_jax"):
    rollout_mesh = jax.sharding.Mesh(jax._src.mesh_utils.create_device_mesh(ROLLOUT_MESH[0], jax.devices()[:n]), axis_names=ROLLOUT_MESH[1])
    trainer_mesh = Mesh(jax._src.mesh_utils.create_device_mesh(TRAINER_MESH[0], jax.devices()[-4:]), axis_names=TRAINER_MESH[1])
else:
    rollout_mesh = trainer_mesh = None
"""
CLUSTER = "cluster = rl_engine_lib.ClusterConfig(role_to_mesh={},"
ROLES = "cluster = rl_engine_lib.ClusterConfig(role_to_mesh={Role.ACTOR: trainer_mesh, Role.ROLLOUT: rollout_mesh},"


def with_meshes(change=("", "")):
    return TUNIX.replace("mesh = jax.make_mesh(*MESH)", MESHES.replace(*change) if change[0] else MESHES).replace(CLUSTER, ROLES)


def test_meshes_of_a_programs_roles_are_read(tmp_path):
    """jax.sharding.Mesh as make_mesh: literals become the mesh and the roles' chips, whose places the slices say."""
    assert ROLES in with_meshes()
    _, report, out = tunix(tmp_path, with_meshes())
    c = load_config(str(out / "job.py"))
    assert (c.mesh.tp, c.mesh.roles.policy.devices, c.mesh.roles.sampler.devices, report["gpus"]) == (2, "0-3", "4-7", 4)
    assert not any("mesh" in text for text in report["needs_you"])
    _, report, out = tunix(tmp_path, with_meshes(("jax.devices()[-4:]", "jax.devices()[:4]")))
    c = load_config(str(out / "job.py"))
    assert c.mesh.tp == 2 and "sampler" not in c.mesh.roles and "policy" in c.mesh.roles  # rests on the host
    assert any("over the actor's chips there" in text for text in report["differs"])


def test_a_mesh_that_is_computed_is_asked_for_until_it_is_answered(tmp_path):
    text = with_meshes(("TRAINER_MESH = [(2, 2), ", "TRAINER_MESH = [(1, jax.device_count()), "))
    asked = "model_config.mesh.shape=TRAINER_MESH[0] is computed"
    _, report, _ = tunix(tmp_path, text)
    assert any(need.startswith(asked) and need.endswith("after the file, or --gpus=N") for need in report["needs_you"])
    for answer in ("model_config.mesh.shape=(1,8)", "--gpus=8"):
        _, report, out = tunix(tmp_path, text, answer)
        assert load_config(str(out / "job.py")).mesh.tp == 8 and not any("mesh" in need for need in report["needs_you"])
    _, report, _ = tunix(tmp_path, with_meshes(("jax.devices()[-4:]", "chips")))
    assert any(text.startswith("rollout_model_config.mesh.devices=own or actor, by ") for text in report["needs_you"])
    m = migrated("tunix", {"model_config.model_id": "a/b", "model_config.mesh.shape": "(1,8)"})
    assert values(m)["mesh.tp"] == 8


def test_variables_of_a_program_are_read_and_given(tmp_path, capsys):
    """A variable's literal default holds until NAME=value gives another; a constant is given in the same way; others are an error."""
    def keys(*given):
        return known_keys(tunix(tmp_path, TUNIX.replace("mini_batch_size=8", "mini_batch_size=int(os.getenv('N', '8'))"), *given)[1])

    assert (keys()["rollout_engine"], keys()["rl_training_config.mini_batch_size"]) == ("vanilla", 8)
    given = keys("ENGINE=vllm", "N=4", "NORM=2.5")
    assert (given["rollout_engine"], given["rl_training_config.mini_batch_size"], given["optax.clip_by_global_norm"]) == ("vllm", 4, 2.5)
    assert "rollout_config.rollout_vllm_hbm_utilization" in given  # the other branch
    capsys.readouterr()
    assert tunix(tmp_path, TUNIX, "ENGIN=vllm")[0] == 2
    assert "ENGIN: job.py reads no variable ENGIN and has no constant of this name" in capsys.readouterr().err


MODELS = """
def with_adapters(base):
    return qwix.apply_lora_to_model(base, qwix.LoraProvider(module_path=".*q_einsum", rank=8, alpha=16.0))

LORA = True
config = model_lib.ModelConfig.deepseek_r1_distill_qwen_1p5b()
config.remat_config = model_lib.RematConfig.BLOCK
policy = with_adapters(actor) if LORA else actor
engine = rl_engine_lib.RLEngine(actor=with_adapters(actor), reference=actor)
parser = chat.QwenChatTemplateParser(tokenizer, enable_thinking=False)
base = {"""


def test_models_adapters_and_parsers_of_a_program_are_read(tmp_path):
    _, report, out = tunix(tmp_path, TUNIX.replace("base = {", MODELS, 1).replace("offload_to_cpu=True", "offload_to_cpu=False"))
    c, keys = load_config(str(out / "job.py")), known_keys(report)
    assert (c.train.compute_dtype, c.rollout.dtype, c.run.matmul_precision, c.model.remat) == ("fp32", "fp32", "default", "full")
    assert (c.lora.rank, c.lora.alpha, c.lora.targets) == (8, 16.0, ("q_proj",))
    assert c.data.chat_template_kwargs.enable_thinking is False and keys["chat_parser_config.enable_thinking"] is False
    assert not any("adapters" in text or "compute_dtype" in text for text in report["needs_you"])
    uncalled = MODELS.replace("with_adapters(actor) if LORA else actor", "actor").replace("actor=with_adapters(actor)", "actor=actor")
    _, report, _ = tunix(tmp_path, TUNIX.replace("base = {", uncalled, 1))
    assert not any("lora_config" in key["key"] for key in report["keys"])


def test_computed_keys_are_in_the_report(tmp_path):
    text = TUNIX.replace("rollout = base_rollout.RolloutConfig(**base)", "rollout = base_rollout.RolloutConfig(**base, "
                         "tensor_parallel_size=find(), eos_tokens=[tokenizer.eos_id()], rollout_vllm_kwargs={'dtype': 'bfloat16', 'x': 1})")
    _, report, _ = tunix(tmp_path, text)
    rows = {k["key"]: k for k in report["keys"]}
    assert rows["rollout_config.tensor_parallel_size"]["kind"] == "automatic" and rows["rollout_config.rollout_vllm_kwargs.x"]["kind"] == "automatic"
    assert rows["rollout_config.eos_tokens"]["kind"] == "ask" and rows["rollout_config.eos_tokens"]["value"] == "[tokenizer.eos_id()]"
    asked = [text for text in report["needs_you"] if " is computed" in text]
    assert len(asked) == 1 and asked[0].startswith("rollout_config.eos_tokens")
    _, report, out = tunix(tmp_path, text, 'rollout_config.eos_tokens=["<end_of_turn>"]')
    assert not any(" is computed" in need for need in report["needs_you"])
    assert load_config(str(out / "job.py")).model.eos_tokens == ("<end_of_turn>",)


def test_places_of_a_notebook_are_cells_and_lines(tmp_path):
    at = TUNIX.index("base = {")
    cells = [{"cell_type": "markdown", "source": ["a"]}, {"cell_type": "code", "source": TUNIX[:at]},
             {"cell_type": "code", "source": TUNIX[at:].replace("mini_batch_size=8", "mini_batch_size=find()")}]
    _, report, _ = run(tmp_path, json.dumps({"cells": cells, "nbformat": 4}), name="job.ipynb", system="tunix")
    line = TUNIX[at:].split("mini_batch_size")[0].count("\n") + 1
    assert any(f"mini_batch_size=find() is computed (job.ipynb cell 3, line {line})" in text for text in report["needs_you"])
    assert any("job_reward.py: write the reward (job.ipynb: tunix.utils.math_rewards.math_reward, short)" in text for text in report["needs_you"])
