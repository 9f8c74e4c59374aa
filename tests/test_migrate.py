"""jaxrl.migrate: configs of other systems. The tables are tested by themselves: every key, its default, another value."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiers import first_cases

from jaxrl.config.load import is_secret, load_config
from jaxrl.config.schema import free_tables, options
from jaxrl.migrate import __main__ as command
from jaxrl.migrate.models import trained
from jaxrl.migrate.report import because, left_out, name_of
from jaxrl.migrate.shell import commands
from jaxrl.migrate.source import Setting, Source, Unreadable, arithmetic, override
from jaxrl.migrate.systems import SYSTEMS, table_of, tables
from jaxrl.migrate.table import ANYBODYS, KINDS, MISSING, Migration, Since, names_of
from jaxrl.resolve.checks.common import check

# Keys whose default, written down, is not what they are when left out: that is their point.
NOT_THE_SAME = {"roll": ("actor_train.data_args.image_",), "roll/on_policy_distill": ("student_train.data_args.image_",),
                "roll/agentic": ("actor_infer.generating_args.",),
                "tunix": ("ppo_config.", "rl_training_config.", "tokenizer_config.tokenizer_path"),
                "tunix/program": ("ppo_config.", "rl_training_config.", "tokenizer_config.tokenizer_path"),
                "trl/preference": ("desirable_", "undesirable_", "cpo_alpha", "simpo_gamma"),
                "skyrl": ("generator.eval_sampling_params.",),
                "areal": ("actor.reward_norm.", "actor.adv_norm.", "critic.", "eval_gconfig.", "gconfig.max_tokens", "sglang.context")}


def migrated(system, settings=None, version=None, command="", gpus=0):
    """The Migration of a few settings."""
    table = table_of(system)
    rows = {k: Setting(k, v, "test:1") for k, v in (settings or {}).items()}
    return Migration(table, Source(rows, [], command), version or table.versions[-1], gpus).run()


def values(m):
    return {option: value for option, (value, _) in m.options.items()}


def result(m):
    return values(m), m.files


# -- every table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", tables())
def test_every_key_is_owned_once_and_says_why(system):
    table = table_of(system)
    names = [n for key in table.keys() for n in key.names()]
    assert sorted(n for n in set(names) if names.count(n) > 1) == []
    for key in table.keys():
        assert key.kind in KINDS and key.kind != "unknown", key
        assert key.kind in ("exact", "equivalent") or key.why, key
        assert not key.to or key.to in options() or any(key.to.startswith(t + ".") for t in free_tables()), key
        assert not isinstance(key.default, Since) or key.default.at(table.versions, table.versions[0]) is not MISSING


@pytest.mark.parametrize("system", tables())
def test_an_empty_config_is_the_table_of_defaults_and_passes_the_checks(system, tmp_path):
    for version in table_of(system).versions:
        m = migrated(system, table_of(system).required, version)
        assert set(values(m)) <= set(options()) | {o for o in values(m) if any(o.startswith(t + ".") for t in free_tables())}
        assert m.outcome(False) != "refused", m.lacking


@pytest.mark.full
@pytest.mark.parametrize("system", tables())
def test_another_value_gives_another_config(system):
    """Mutation: unless its row says automatic, inert or unsupported."""
    same, base = [], {}
    for key in table_of(system).keys():
        if key.other is None or key.kind not in ("exact", "equivalent") or "*" in key.name:
            continue
        beside = {**table_of(system).required, **key.beside}
        case = json.dumps(beside, default=str)
        if case not in base:
            try:
                base[case] = result(migrated(system, beside))
            except Unreadable:  # a default that the source refuses, too
                base[case] = None
        changed = migrated(system, {**beside, key.name: key.other})
        if result(changed) == base[case]:
            same.append(key.name)
        assert any(r.key == key.name and r.targets for r in changed.records()), key.name
    assert same == []


@pytest.mark.parametrize("system", tables())
def test_the_default_written_down_changes_nothing(system):
    """Deletion: a key that is left out is the source's default."""
    table, other = table_of(system), []
    base = values(migrated(system, table_of(system).required))
    for key in table.keys():
        its_point = key.name in table_of(system).required or key.name.startswith(NOT_THE_SAME.get(system, ("-",)))
        if key.default in (None, MISSING) or "*" in key.name or its_point:
            continue
        default = key.default.at(table.versions, table.versions[-1]) if isinstance(key.default, Since) else key.default
        if default is not None and values(migrated(system, {**table_of(system).required, key.name: default})) != base:
            other.append(key.name)
    assert other == []


# -- SkyRL -------------------------------------------------------------------------------------------------------------


def test_skyrl_counts_batches_and_minibatches_in_prompts():
    m = migrated("skyrl", {"trainer.train_batch_size": 256, "trainer.policy_mini_batch_size": 64,
                           "generator.n_samples_per_prompt": 4, "trainer.update_epochs_per_batch": 2})
    v = values(m)
    assert v["data.prompts_per_step"] == 256 and v["rollout.group_size"] == 4 and m.facts["sequences per step"] == 1024
    assert v["algorithm.num_minibatches"] == 4 and v["algorithm.ppo_epochs"] == 2
    assert m.facts["optimizer steps per step"] == 8
    assert migrated("skyrl", {"trainer.train_batch_size": 100, "trainer.policy_mini_batch_size": 64}).outcome(False) == "refused"


def test_skyrls_kl_is_on_and_its_sampler_is_not_corrected():
    v = values(migrated("skyrl"))
    assert (v["algorithm.kl.coef"], v["algorithm.kl.estimator"], v["algorithm.kl.placement"]) == (0.001, "low_var", "loss")
    assert v["algorithm.mismatch.correction"] == "none" and v["eval.temperature"] == 0
    off = values(migrated("skyrl", {"trainer.algorithm.use_kl_loss": False}))
    assert off["algorithm.kl.coef"] == 0 and "algorithm.kl.estimator" not in off


def test_skyrls_evaluation_is_sampled_once_a_key_of_its_table_is_set():
    top_p = {"generator.eval_sampling_params.top_p": 0.9}
    assert values(migrated("skyrl", top_p))["eval.temperature"] == 1.0
    assert values(migrated("skyrl", top_p, "train-0.3"))["eval.temperature"] == 0.0  # a default of its own, key by key
    assert values(migrated("skyrl", {}, "docs"))["eval.temperature"] == 1.0


def test_skyrls_example_of_one_step_ahead_and_its_checkpoints_of_epochs():
    """main_async queues one batch and saves by steps alone; the trainer saves at an epoch's end, too, from 0.2 on."""
    one = values(migrated("skyrl", {"trainer.placement.colocate_all": False}, command="python -m examples.train.async.main_async"))
    assert one["rollout.max_staleness"] == 1 and "checkpoint.every_epochs" not in one
    v = values(migrated("skyrl", command="python -m skyrl.train.entrypoints.main_base"))
    assert "rollout.max_staleness" not in v and (v["checkpoint.every_epochs"], v["checkpoint.export_every_epochs"]) == (1.0, 0.0)
    assert values(migrated("skyrl", {"trainer.ckpt_interval": -1}))["checkpoint.every_epochs"] == 0
    assert "checkpoint.every_epochs" not in values(migrated("skyrl", version="0.1"))


def test_skyrls_constant_of_dr_grpo():
    norm = {"trainer.algorithm.loss_reduction": "seq_mean_token_sum_norm", "trainer.algorithm.grpo_norm_by_std": False}
    v = values(migrated("skyrl", {**norm, "trainer.max_prompt_length": 300}))
    assert v["algorithm.aggregation"] == "constant" and v["algorithm.aggregation_constant"] == 300 + 1024
    assert v["algorithm.advantage_std"] == "none"
    assert values(migrated("skyrl", {**norm, "trainer.algorithm.max_seq_len": 77}))["algorithm.aggregation_constant"] == 77


# -- verl --------------------------------------------------------------------------------------------------------------


def test_verls_group_is_one_and_clip_ratio_does_nothing():
    v = values(migrated("verl", {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.clip_ratio": 0.4}))
    assert v["rollout.group_size"] == 1 and (v["algorithm.advantage_mean"], v["algorithm.advantage_std"]) == ("none", "none")
    assert (v["algorithm.clip_low"], v["algorithm.clip_high"], v["algorithm.dual_clip"]) == (0.2, 0.2, 3.0)
    m = migrated("verl", {"actor_rollout_ref.actor.clip_ratio": 0.4})
    assert [r.kind for r in m.records()] == ["inert"]
    old = values(migrated("verl", {"actor_rollout_ref.actor.clip_ratio": 0.4}, "0.3"))
    assert (old["algorithm.clip_low"], old["algorithm.clip_high"], old["algorithm.dual_clip"]) == (0.4, 0.4, 0)


def test_verl_counts_in_prompts_and_warms_up_by_steps_or_a_share():
    m = migrated("verl", {"data.train_batch_size": 256, "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
                          "actor_rollout_ref.rollout.n": 4, "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.05})
    v = values(m)
    assert m.facts["sequences per step"] == 1024 and v["algorithm.num_minibatches"] == 4
    assert v["optimizer.warmup_fraction"] == 0.05 and v["optimizer.warmup_steps"] == 0
    both = {"actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.05, "actor_rollout_ref.actor.optim.lr_warmup_steps": 9}
    assert values(migrated("verl", both))["optimizer.warmup_steps"] == 9 * 4  # its steps, of four optimizer steps
    assert "optimizer.warmup_fraction" not in values(migrated("verl", both))


def test_what_the_optimizer_or_the_adapters_folder_decides_is_not_written():
    """jaxrl refuses what nothing reads; the critic keeps what its own optimizer reads."""
    a = "actor_rollout_ref."
    m = migrated("verl", {a + "model.lora_rank": 16, a + "model.lora_adapter_path": "an/adapter"})
    assert values(m)["lora.path"] == "an/adapter" and "lora.rank" not in values(m) and "lora.targets" not in values(m)
    sgd = {"algorithm.adv_estimator": "gae", a + "actor.optim.optimizer": "SGD", a + "actor.optim.betas": [0.9, 0.95],
           "critic.optim.betas": [0.9, 0.95]}
    m = migrated("verl", sgd)
    assert (values(m)["optimizer.name"], values(m)["critic.optimizer.name"]) == ("sgd", "adamw")
    assert "optimizer.b2" not in values(m) and values(m)["critic.optimizer.b2"] == 0.95
    (why,) = [why for key, why, _ in m.lacking if key == a + "actor.optim.weight_decay"]
    assert why.startswith("sgd has no weight decay here")


def test_verls_schedules_and_its_critics_own():
    a, c = "actor_rollout_ref.actor.", "critic.optim."
    v = values(migrated("verl", {a + "optim.warmup_style": "cosine", a + "optim.min_lr_ratio": 0.1}))
    assert (v["optimizer.schedule"], v["optimizer.floor"]) == ("cosine", 0.1)  # it wins over lr_scheduler_type
    mega = {a + "strategy": "megatron", a + "optim.lr": 1e-6, a + "optim.lr_decay_style": "linear", a + "optim.min_lr": 1e-7,
            a + "optim.lr_warmup_init": 2e-7, a + "optim.lr_decay_steps": 100, a + "optim.lr_warmup_steps_ratio": 0.1,
            a + "optim.optimizer": "sgd"}
    v = values(migrated("verl", mega))
    assert (v["optimizer.schedule"], v["optimizer.warmup_steps"], v["optimizer.decay_steps"]) == ("linear", 10 * 4, 90 * 4)
    assert abs(v["optimizer.floor"] - 0.1) < 1e-9 and abs(v["optimizer.warmup_start"] - 0.2) < 1e-9
    assert (v["optimizer.name"], v["optimizer.b1"]) == ("sgd", 0.9)
    assert values(migrated("verl", {a + "strategy": "megatron"}, "0.4"))["optimizer.schedule"] == "linear"
    assert migrated("verl", {a + "optim.optimizer": "AdamW8bit"}).outcome(False) == "partial"
    warm = {"algorithm.adv_estimator": "gae", a + "optim.lr_warmup_steps_ratio": 0.1}
    assert values(migrated("verl", warm))["critic.optimizer.warmup_fraction"] == 0  # the critic's is not the actor's
    assert values(migrated("verl", {**warm, c + "lr_warmup_steps_ratio": 0.05}))["critic.optimizer.warmup_fraction"] == 0.05
    same = values(migrated("verl", {**warm, c + "lr_warmup_steps_ratio": 0.1}))
    assert not any(option.startswith("critic.optimizer.") for option in same)


def test_the_plan_leaves_out_roles_that_it_does_not_count():
    offload = {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.ref.fsdp_config.param_offload": True}
    assert left_out(migrated("verl", offload)) == ' --config.mesh.roles="{}"'
    both = left_out(migrated("verl", {**offload, "actor_rollout_ref.actor.fsdp_config.param_offload": True}))
    assert both == """ --config.mesh.roles="{'policy': {'rest': 'host'}}\""""
    assert left_out(migrated("verl")) == ""
    judged = {"reward_model.enable": True, "reward_model.model.path": "a/rm"}
    assert left_out(migrated("verl", judged)) == " --config.reward.model.path= --config.reward.functions=math"
    hosts = {"cluster.n_nodes": 2, "rollout.backend": "sglang:d8", "actor.backend": "fsdp:d8", **table_of("areal").required}
    assert left_out(migrated("areal", hosts)) == " --config.plan.part=training"  # servers are named later


def test_experts_are_split_over_as_many_gpus_as_there_are():
    """Megatron lays parts of experts over the GPUs of tensors too: 4 x 8 are no 16."""
    p = "trainer.policy.megatron_config."
    of = {"trainer.strategy": "megatron", "trainer.placement.policy_num_gpus_per_node": 16, p + "tensor_model_parallel_size": 4,
          p + "expert_model_parallel_size": 8}
    m = migrated("skyrl", of)
    assert (values(m)["mesh.tp"], values(m)["mesh.ep"]) == (4, 4) and any("mesh.ep=4 x mesh.tp=4" in text for text in m.different)
    assert values(migrated("skyrl", {**of, "trainer.placement.policy_num_gpus_per_node": 32}))["mesh.ep"] == 8


@pytest.mark.parametrize("name", ["Qwen/Qwen1.5-VL-Chat", "OpenGVLab/InternVL3-1B",
                                  "Qwen/Qwen3.8-Flash-Next", "microsoft/phi-2", "google/gemma-3n-E4B-it",
                                  "google/recurrentgemma-2b-it", "allenai/OLMo-7B-hf", "XiaomiMiMo/MiMo-V2-Flash",
                                  "zai-org/GLM-4.1V-9B-Thinking", "Qwen/Qwen3-Omni-30B-A3B-Instruct",
                                  "openbmb/MiniCPM-o-2_6", "tencent/Hy3", "tiiuae/falcon-7b", "tiiuae/falcon-mamba-7b"])
def test_models_that_are_not_trained_are_refused_by_name(name):
    m = trained(migrated("skyrl", {"trainer.policy.model.path": name}))
    assert m.outcome(False) == "refused" and name in m.lacking[0][1]


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-Coder-7B", "Qwen/Qwen3-30B-A3B-Base", "Qwen/QwQ-32B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
                                  "deepseek-ai/DeepSeek-V3-0324", "moonshotai/Moonlight-16B-A3B", "zai-org/GLM-4.7-Flash", "zai-org/GLM-4.5-Air",
                                  "google/gemma-2-2b-it", "google/gemma-3-1b-it", "google/gemma-2b-it", "google/codegemma-7b",
                                  "moonshotai/Kimi-K2-Instruct-0905", "allenai/OLMo-2-1124-7B", "allenai/Olmo-3-7B-Think",
                                  "HuggingFaceTB/SmolLM3-3B",
                                  "ibm-granite/granite-3.3-8b-instruct", "tencent/Hunyuan-7B-Instruct", "MiniMaxAI/MiniMax-M2",
                                  "microsoft/phi-4", "microsoft/Phi-4-mini-instruct", "zai-org/GLM-4-32B-0414",
                                  "mistralai/Ministral-3-8B-Instruct-2512-BF16",
                                  "Qwen/Qwen3.5-9B", "/m/Qwen3-Next-80B-A3B-Instruct/",
                                  "XiaomiMiMo/MiMo-7B-RL", "ByteDance-Seed/Seed-OSS-36B-Instruct",
                                  "meta-llama/Llama-3.2-3B", "nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16",
                                  "ibm-granite/granite-4.0-h-tiny", "tiiuae/Falcon-H1-1.5B-Instruct",
                                  "mistralai/Mistral-7B-Instruct-v0.3", "allenai/OLMoE-1B-7B", "openai/gpt-oss-20b", "Qwen/Qwen1.5-MoE-A2.7B-Chat"])
def test_models_that_are_trained_are_not(name):
    assert not trained(migrated("skyrl", {"trainer.policy.model.path": name})).lacking


def test_a_default_model_that_reads_images_is_a_job_of_images():
    m = trained(migrated("cosmos_rl", {k: v for k, v in table_of("cosmos_rl").required.items() if k != "policy.model_name_or_path"}))
    assert values(m)["model.path"] == "Qwen/Qwen2.5-VL-7B-Instruct" and values(m)["rollout.engine"] == "vllm"


def test_verls_reward_model_is_alone():
    both = {"reward_model.enable": True, "reward_model.model.path": "a/rm", "custom_reward_function.path": "mine.py"}
    assert migrated("verl", both).outcome(False) == "refused"  # its function asks the model
    v = values(migrated("verl", {**both, "reward_model.use_reward_loop": False}))
    assert (v["reward.functions"], v["reward.model.path"]) == ((), "a/rm")


def test_verls_kl_in_the_reward_is_k1_and_two_kls_are_refused():
    reward = {"algorithm.use_kl_in_reward": True}
    v = values(migrated("verl", reward))
    assert (v["algorithm.kl.coef"], v["algorithm.kl.estimator"], v["algorithm.kl.placement"]) == (0.001, "k1", "reward")
    assert migrated("verl", {**reward, "actor_rollout_ref.actor.use_kl_loss": True}).outcome(False) == "refused"
    assert values(migrated("verl"))["algorithm.kl.coef"] == 0


def test_a_token_mean_of_each_micro_batch_is_one_of_as_many_completions():
    def of(system, key, size, version=None, **more):
        v = values(migrated(system, {key: size, **table_of(system).required, **more}, version))
        return v["algorithm.aggregation"], v.get("algorithm.aggregation_sequences")

    micro, whole = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", ("token_mean", None)
    assert of("verl", micro, 4, "0.7") == ("token_mean", 4) and of("verl", micro, 1, "0.7") == ("sequence_mean", None)
    assert of("verl", micro, 4) == whole == of("verl", micro, 4, "0.7", **{"actor_rollout_ref.actor.use_dynamic_bsz": True})
    assert of("verl", micro, 4, "0.7", **{"trainer.use_legacy_worker_impl": "disable"}) == whole
    micro, legacy = "trainer.micro_train_batch_size_per_gpu", {"trainer.algorithm.loss_reduction": "token_mean_legacy"}
    assert of("skyrl", micro, 4) == whole and of("skyrl", micro, 4, **legacy) == of("skyrl", micro, 4, "train-0.4") == ("token_mean", 4)
    assert of("trl", "per_device_train_batch_size", 4, "0.18") == ("token_mean", 4) and of("trl", "per_device_train_batch_size", 4) == whole
    job = {"rollout_batch_size": 64, "num_return_sequences_in_group": 8, "response_length": 99, "loss_agg_mode": "token-mean"}
    micro = "actor_train.training_args.per_device_train_batch_size"
    assert of("roll", micro, 4, **job) == whole and of("roll", micro, 4, "0.1.3", **job) == ("token_mean", 4)


# -- TRL ---------------------------------------------------------------------------------------------------------------


def test_trls_batches_are_completions_per_process_and_its_steps_are_optimizer_steps():
    keys = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "num_generations": 14, "num_processes": 7}
    m = migrated("trl", {**keys, "max_steps": 100})
    v = values(m)
    assert v["data.prompts_per_step"] == 32 and m.facts["sequences per step"] == 448  # 16 x 7 x 4 / 14
    assert v["algorithm.num_minibatches"] == 1 and v["train.steps"] == 100
    more = migrated("trl", {**keys, "steps_per_generation": 16, "num_iterations": 2, "max_steps": 800, "save_steps": 80})
    v = values(more)
    assert v["data.prompts_per_step"] == 128 and v["algorithm.num_minibatches"] == 4 and v["algorithm.ppo_epochs"] == 2
    assert v["train.steps"] == 100 and v["checkpoint.every_steps"] == 10
    assert migrated("trl", {**keys, "num_processes": 8}).outcome(False) == "refused"  # 512 / 14
    assert values(migrated("trl", {k: n for k, n in keys.items() if k != "num_processes"}, gpus=7))["data.prompts_per_step"] == 32
    alone = migrated("trl", {}, gpus=8)
    assert because(alone, alone.options["data.prompts_per_step"][1]).endswith("num_processes by --gpus=8, ...")
    with pytest.raises(Unreadable, match="num_processes"):
        migrated("trl", {"num_generations": 8})


def test_trls_defaults_by_version():
    what = ("algorithm.kl.coef", "algorithm.aggregation", "rollout.temperature", "rollout.top_k", "data.overlong_prompt",
            "optimizer.schedule", "model.remat")
    by = {version: tuple(values(migrated("trl", {"num_processes": 8}, version))[o] for o in what)
          for version in ("0.17", "0.18", "0.19", "0.22", "1.9", "1.16")}
    assert by["0.17"] == (0.04, "token_mean", 0.9, 50, "truncate_left", "linear", "none")
    assert by["0.18"] == (0.04, "token_mean", 1.0, -1, "truncate_left", "linear", "none")
    assert by["0.19"] == (0.0, "token_mean", 1.0, -1, "truncate_left", "linear", "none")
    assert by["0.22"] == (0.0, "token_mean", 1.0, -1, "truncate_left", "linear", "full")
    assert by["1.9"] == by["1.16"] == (0.0, "token_mean", 1.0, -1, "error", "linear", "full")
    vllm = {"num_processes": 8, "use_vllm": True, "vllm_mode": "colocate"}
    of = lambda version: tuple(values(migrated("trl", vllm, version)).get(f"algorithm.mismatch.{n}") for n in ("correction", "cap"))  # noqa: E731
    assert of("0.22") == ("none", None) and of("0.23") == ("token_tis", 2.0) and of("0.26") == ("sequence_mis", 3.0)
    served = lambda host: {"num_processes": 8, "use_vllm": True, "vllm_mode": "server", "vllm_server_host": host, "vllm_server_port": 8001}  # noqa: E731
    for host, url in (("::1", "http://[::1]:8001"), ("::", "http://127.0.0.1:8001"), ("gpu7", "http://gpu7:8001")):
        assert values(migrated("trl", served(host)))["rollout.servers"] == (url,)
    table = table_of("trl")
    assert command.version_of(table, "0.24.1") == "0.23"
    assert command.version_of(table, "1.9.2") == "1.9" and command.version_of(table, "1.13") == "1.10"
    with pytest.raises(Unreadable):
        command.version_of(table, "0.9")


def test_trls_flags_of_a_script(tmp_path):
    text = ("accelerate launch --multi_gpu --num_processes 4 grpo.py \\\n  --config job.yaml --learning_rate=2e-6 \\\n"
            "  --reward-funcs accuracy_reward mine.rewards.short --bf16\n")
    (tmp_path / "job.yaml").write_text("model_name_or_path: a/b\nlearning_rate: 1e-6\nnum_generations: 4\n")
    status, report, out = run(tmp_path, text, system="trl")
    found = {k["key"]: k["value"] for k in report["keys"]}
    assert status == 0 and found["learning_rate"] == 2e-6 and found["num_generations"] == 4 and found["num_processes"] == 4
    assert load_config(str(out / "job.py")).reward.functions == ("math", f"{out / 'job_reward.py'}:short")
    assert "called" in (out / "job_reward.py").read_text()


# -- AReaL -------------------------------------------------------------------------------------------------------------

AREAL = {"train_dataset.batch_size": 256, "gconfig.n_samples": 4}


def test_a_critic_has_an_optimizer_of_its_own():
    v = values(migrated("areal", {**table_of("areal").required, "critic.path": "a/b", "critic.optimizer.beta2": 0.95, "critic.optimizer.lr": 1e-5,
                                  "actor.optimizer.warmup_steps_proportion": 0.1}))
    assert {k: x for k, x in v.items() if k.startswith("critic.optimizer")} == {
        "critic.optimizer.b2": 0.95, "critic.optimizer.warmup_fraction": 0.001}
    gae = {"trainer.algorithm.advantage_estimator": "gae", "trainer.policy.optimizer_config.scheduler": "cosine"}
    assert values(migrated("skyrl", gae))["critic.optimizer.schedule"] == "constant"
    v = values(migrated("roll", {"actor_train.training_args.warmup_steps": 20, "critic.training_args.adam_beta2": 0.95}))
    assert (v["critic.optimizer.warmup_steps"], v["critic.optimizer.b2"]) == (0, 0.95)


def test_what_a_source_leaves_to_you_is_said():
    judge = {"environment.env_class": "llm_as_a_judge", "environment.skyrl_gym.llm_as_a_judge.model": "gpt"}
    m = migrated("skyrl", judge)
    assert any("reward.judge" in text for text in m.needs_you)
    assert {r.key: r.kind for r in m.records()}["environment.skyrl_gym.llm_as_a_judge.model"] == "ask"
    every = {**table_of("areal").required, "evaluator.freq_epochs": 1, "evaluator.freq_steps": None, "evaluator.freq_secs": None}
    assert migrated("areal", every).facts["evaluation"] == "every 1 epochs"
    worker = {"rewards.mine.worker_cls": "a.Judge", "rewards.mine.tag_included": ["x"]}
    assert {r.key: r.kind for r in migrated("roll", worker).records()}["rewards.mine.tag_included"] == "equivalent"


def test_areals_m2po_has_no_clip_of_its_own():
    m2 = {**AREAL, "actor.m2_threshold": 0.04, "actor.eps_clip": 0.0, "actor.kl_ctl": 0.0}
    v = values(migrated("areal", {**m2, "actor.recompute_logprob": True}))
    assert v["algorithm.m2_threshold"] == 0.04 and 0 < v["algorithm.clip_low"] == v["algorithm.clip_high"] < 1e-8
    assert "algorithm.m2_threshold" not in values(migrated("areal", m2))  # no log-probs before the update


def test_areals_reward_is_r_and_bias_times_scale_and_bounded():
    v = values(migrated("areal", {**AREAL, "actor.reward_scaling": 10.0, "actor.reward_bias": -0.5}))
    assert (v["reward.scale"], v["reward.bias"], v["reward.clip"]) == (10.0, -5.0, 20.0)  # 10 r - 5 = (r - 0.5) 10
    assert values(migrated("areal", AREAL))["reward.clip"] == 20.0


def test_areals_kl_is_on_and_batches_are_prompts():
    m = migrated("areal", AREAL)
    v = values(m)
    assert m.facts["sequences per step"] == 1024 and v["algorithm.num_minibatches"] == 4
    assert (v["algorithm.kl.coef"], v["algorithm.kl.estimator"], v["algorithm.kl.placement"]) == (0.1, "k1", "reward")
    assert m.outcome(False) == "partial"  # without ref.* it is a bonus for unlikely tokens there
    assert values(migrated("areal", {**AREAL, "actor.kl_ctl": 0.0}))["algorithm.kl.coef"] == 0
    old = values(migrated("areal", AREAL, "0.3"))
    assert (old["optimizer.lr"], old["optimizer.b2"], old["optimizer.eps"]) == (2e-5, 0.95, 1e-5)
    assert (v["optimizer.lr"], v["optimizer.b2"], v["optimizer.eps"]) == (1e-3, 0.999, 1e-8)


def test_areals_ratios():
    base = {**AREAL, "actor.kl_ctl": 0.0}
    of = lambda **keys: tuple(values(migrated("areal", {**base, **{f"actor.{k}": v for k, v in keys.items()}})).get(  # noqa: E731
        f"algorithm.{n}") for n in ("old_logprobs", "mismatch.correction", "mismatch.cap"))
    assert of() == ("rollout", "none", None)
    assert of(recompute_logprob=True) == ("recompute", "none", None)
    assert of(use_decoupled_loss=True) == ("recompute", "none", None)
    assert of(use_decoupled_loss=True, behav_imp_weight_cap=5.0) == ("recompute", "token_mis", 5.0)
    assert of(use_decoupled_loss=True, **{"rejection_sampling.upper": 3.0, "rejection_sampling.action": "clamp"}) == (
        "recompute", "token_tis", 3.0)
    assert values(migrated("areal", base, "0.4"))["algorithm.mismatch.correction"] == "none"


def test_areals_defaults_act_where_a_key_is_absent():
    group = {**AREAL, "gconfig.n_samples": 4, "actor.reward_norm.mean_level": "group", "actor.reward_norm.std_level": "group"}
    lacks = lambda **keys: [k for k, _, _ in migrated("areal", {**group, **{k.replace("__", "."): v for k, v in keys.items()}}).lacking]  # noqa: E731
    assert "actor.reward_norm.group_size" in lacks() and "actor.reward_norm.group_size" not in lacks(actor__reward_norm__group_size=4)
    warm = migrated("areal", {**AREAL, "gconfig.temperature": 0.7})  # actor.temperature is 1
    assert values(warm).get("algorithm.temperature") == 1.0 or "actor.temperature" in [k for k, _, _ in warm.lacking]
    critic = {**AREAL, "critic.path": "a/b"}
    assert values(migrated("areal", critic))["critic.lr"] == 1e-3 and values(migrated("areal", critic, "0.3"))["critic.lr"] == 2e-5


def test_areals_floor_is_read_with_a_cosine_or_by_megatron():
    linear = {**AREAL, "actor.optimizer.min_lr_ratio": 0.1, "actor.optimizer.lr_scheduler_type": "linear", "actor.backend": "fsdp:d4"}
    floor = lambda **keys: values(migrated("areal", {**linear, **{f"actor.{k}": v for k, v in keys.items()}})).get("optimizer.floor")  # noqa: E731
    assert floor() == 0 and floor(backend="megatron:d4") == 0.1 and floor(**{"optimizer.lr_scheduler_type": "cosine"}) == 0.1


def test_areals_staleness_counts_consumer_batches_and_needs_asynchronous_training():
    ahead = {**AREAL, "train_dataset.batch_size": 64, "rollout.max_head_offpolicyness": 2}
    of = lambda **keys: values(migrated("areal", {**ahead, **{k.replace("__", "."): v for k, v in keys.items()}}))["rollout.max_staleness"]  # noqa: E731
    assert (of(), of(rollout__consumer_batch_size=64), of(rollout__consumer_batch_size=128), of(rollout__consumer_batch_size=32)) == (2, 2, 5, 1)
    assert of(async_training=False) == 0


def test_areals_allocations():
    m = migrated("areal", {**AREAL, "allocation_mode": "sglang.d2p1t2+d2p2t1"})
    v = values(m)
    assert v["rollout.vllm.replicas"] == 2 and v["rollout.vllm.tensor_parallel"] == 2 and "mesh.tp" not in v
    assert v["mesh.roles.policy"] == {"devices": "0-3"} and v["rollout.vllm.devices"] == ("4,5", "6,7")
    assert any("pipeline" in text for text in m.different)
    new = values(migrated("areal", {**AREAL, "rollout.backend": "vllm:d4", "actor.backend": "megatron:(attn:d1p1t2c1|ffn:d1p1t1e2)"}))
    assert new["mesh.tp"] == 2 and "mesh.ep" not in new and new["rollout.vllm.replicas"] == 4  # of 2 GPUs: tensors, experts over both


# -- rewards that are written --------------------------------------------------------------------------------------------


def scorer(system, settings, tmp_path):
    """The function `score` of the reward file that a config gets."""
    m = migrated(system, settings)
    (tmp_path / "job_reward.py").write_text(m.files["job_reward.py"])
    spec = importlib.util.spec_from_file_location(f"job_reward_{system}", tmp_path / "job_reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.score


def test_rewards_of_skyrl_and_verl_are_their_rules(tmp_path):
    gsm8k = scorer("skyrl", {}, tmp_path)
    assert [gsm8k("p", c, "1234") for c in ("so #### 1,234", "#### 12", "1234", "#### 12 then #### 1234")] == [1, 0, 0, 0]
    aime = scorer("skyrl", {"environment.env_class": "aime"}, tmp_path)
    assert [aime("p", c, "33") for c in ("Answer: $33$.", "answer: \\boxed{33}", "33", "Answer: 33\nAnswer: 34")] == [1, 1, -1, -1]
    rules = scorer("verl", {}, tmp_path)
    assert [rules("p", c, "7", data_source="openai/gsm8k") for c in ("#### 6 #### 7", "7")] == [1, 0]
    assert [rules("p", c, "7", data_source="lighteval/MATH") for c in ("so \\boxed{7}", "\\boxed{8}", "7")] == [1, 0, 0]
    assert [rules("p", c, "7", data_source="aime24") for c in ("Answer: 7", "7")] == [1, -1]
    with pytest.raises(RuntimeError, match="searchR1"):
        rules("p", "c", "7", data_source="searchR1_nq")
    (tmp_path / "mine.py").write_text("def f(data_source, solution_str, ground_truth, extra_info, k=1):\n"
                                      "    return {'score': k * (solution_str == ground_truth), 'x': data_source}\n")
    own = {"custom_reward_function.path": str(tmp_path / "mine.py"), "custom_reward_function.name": "f",
           "custom_reward_function.reward_kwargs.k": 3}
    assert [scorer("verl", own, tmp_path)("p", c, "7", data_source="s") for c in ("7", "8")] == [3, 0]
    with pytest.raises(RuntimeError, match="has to be written"):
        scorer("skyrl", {"environment.env_class": "mine"}, tmp_path)("p", "c", "7")


# -- readers -----------------------------------------------------------------------------------------------------------

SCRIPT = """#!/bin/bash
set -x
: "${DATA:=$HOME/data}"
: ${GPUS:=4}
MODEL=${MODEL:-Qwen/Qwen3-0.6B}
MINI=$((64 / 2)) # prompts
EXTRA=(
    trainer.epochs=3   # a comment
    trainer.project_name="two words"
)
if [ "$GPUS" -gt 2 ]; then BATCH=128; else BATCH=64; fi
case $MODEL in
  Qwen/*) LR=1e-6 ;;
  *) LR=2e-6 ;;
esac
python -m skyrl.train.entrypoints.main_base \\
  data.train_data="['$DATA/a.parquet','$DATA/b.parquet']" \\
  trainer.policy.model.path=$MODEL \\
  trainer.train_batch_size=$BATCH trainer.policy_mini_batch_size=$MINI \\
  +trainer.policy.optimizer_config.lr=$LR trainer.algorithm.use_kl_loss=false \\
  trainer.placement.policy_num_gpus_per_node=$GPUS "${EXTRA[@]}" \\
  trainer.run_name="run-$(date +%s)" \\
  $@
"""


def run(tmp_path, text, *more, name="job.sh", system="skyrl"):
    (tmp_path / name).write_text(text)
    out = tmp_path / "out"
    status = command.main([system, str(tmp_path / name), *more, f"--out={out}"])
    return status, json.loads((out / "report.json").read_text()) if (out / "report.json").exists() else None, out


def test_a_script_is_read_as_the_shell_would(tmp_path, capsys):
    status, report, out = run(tmp_path, SCRIPT, "trainer.epochs=5")
    assert status == 0
    found = {k["key"]: k["value"] for k in report["keys"]}
    assert found["trainer.train_batch_size"] == 128 and found["trainer.policy_mini_batch_size"] == 32
    assert found["trainer.policy.optimizer_config.lr"] == 1e-6 and found["trainer.epochs"] == 5
    assert found["data.train_data"] == ["$HOME/data/a.parquet", "$HOME/data/b.parquet"]
    assert found["trainer.project_name"] == "two words" and found["trainer.policy.model.path"] == "Qwen/Qwen3-0.6B"
    assert len(report["keys"]) == len(found) and any("date" in note for note in report["notes"])
    where = {k["key"]: k["where"] for k in report["keys"]}
    assert where["trainer.train_batch_size"] == "job.sh:19" and where["trainer.epochs"] == "the command line"
    config = load_config(str(out / "job.py"))
    assert config.data.prompts_per_step == 128 and config.optimizer.lr == 1e-6
    config.run.mode, config.plan.target, config.log.wandb = "plan", "h100:4", False
    config.log.wandb_project = "jaxrl"
    check(config)
    again = run(tmp_path, SCRIPT, "GPUS=2", "MODEL=other/model")[1]
    found = {k["key"]: k["value"] for k in again["keys"]}
    assert found["trainer.train_batch_size"] == 64 and found["trainer.policy.optimizer_config.lr"] == 2e-6


def test_an_array_without_entries_is_unset(tmp_path):
    text = "#!/bin/bash\nSIZES=()\npython -m skyrl.train trainer.epochs=${SIZES:-8} trainer.project_name=a${SIZES}b\n"
    (tmp_path / "job.sh").write_text(text)
    words = commands(tmp_path / "job.sh", {}, [])[0].words
    assert [text for text, _ in words][3:] == ["trainer.epochs=8", "trainer.project_name=ab"]


def test_yaml_of_hydra(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "small.yaml").write_text("# @package _global_\ntrainer:\n  epochs: 9\n  seed: 3\n")
    (tmp_path / "base" / "opt.yaml").write_text("lr: 3e-6\n")
    text = ("defaults:\n  - base: small\n  - base@trainer.policy.optimizer_config: opt\n  - _self_\n  - missing: one\n"
            "trainer:\n  seed: 4\n  max_prompt_length: 2_00\n  train_batch_size: ${.policy_mini_batch_size}\n"
            "  policy_mini_batch_size: 32\ngenerator:\n  sampling_params:\n    max_generate_length: ${oc.env:LENGTH,77}\n"
            "    temperature: 1e-1\n")
    status, report, _ = run(tmp_path, text, name="job.yaml")
    assert status == 0
    found = {k["key"]: k["value"] for k in report["keys"]}
    assert found == {"trainer.epochs": 9, "trainer.seed": 4, "trainer.policy.optimizer_config.lr": 3e-6,
                     "trainer.max_prompt_length": 200, "trainer.train_batch_size": 32, "trainer.policy_mini_batch_size": 32,
                     "generator.sampling_params.max_generate_length": 77, "generator.sampling_params.temperature": 0.1}
    assert any("missing/one" in note for note in report["notes"])


def test_overrides():
    assert override("+a.b={c: 1e-6, d: [x, 'y, z', null]}", "w") == [Setting("a.b.c", 1e-6, "w"),
                                                                    Setting("a.b.d", ["x", "y, z", None], "w")]
    assert override("python", "w") == []
    with pytest.raises(Unreadable, match="a.b"):
        override("a.b=[1, 2", "here")


@pytest.mark.parametrize("text, status, said", [
    ("trainer:\n  train_batch_size: abc\n", 2, "job.yaml:2: trainer.train_batch_size: 'abc': expected a number"),
    ("trainer:\n  seed: [1\n", 2, "job.yaml:"),
    ("trainer:\n  seed: 1\n  seed: 2\n", 2, "job.yaml:3: trainer.seed: stands twice"),
    ("trainer: {seed: 1}\ntrainer: {seed: 2}\n", 2, "job.yaml:2: trainer: stands twice"),
    ("trainer:\n  seed: 1\n  seed: 1\n  trian_batch_size: 4\n", 0, "partial"),
    ("trainer:\n  epochs: ${trainer.epochs}\n", 2, "job.yaml:2: trainer.epochs"),
    ("trainer:\n  policy:\n    optimizer_config:\n      lr: -1\n", 2, "job.yaml:4: trainer.policy.optimizer_config.lr: -1"),
    ("trainer: !!python/object/apply:os.system ['true']\n", 2, "job.yaml:1: trainer: the tag"),
    ("trainer:\n  algorithm:\n    policy_loss_type: kl_cov\n", 3, "lacks trainer.algorithm.policy_loss_type"),
    ("trainer:\n  trian_batch_size: 4\n", 0, "partial"),
])
def test_what_cannot_be_read_is_said_with_line_and_key(tmp_path, capsys, text, status, said):
    assert run(tmp_path, text, name="job.yaml")[0] == status
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    assert status != 0 or "trainer.train_batch_size" in (tmp_path / "out" / "report.md").read_text()


HOSTILE = """
import sys
def hook(event, args):
    if event.split(".")[0] in ("socket",) or event in ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "os.fork", "os.remove"):
        print("CAUGHT", event); sys.stdout.flush()
        import os; os._exit(9)
sys.addaudithook(hook)
from jaxrl.migrate.__main__ import main
status = main(sys.argv[1:])
assert "jax" not in sys.modules
sys.exit(status)
"""


STARTS = {  # system -> a command that starts a job
    "skyrl": SCRIPT,
    "verl": "python3 -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "trl": "trl grpo --model_name_or_path a/b --dataset_name c/d --reward_funcs accuracy_reward --num_processes 4",
    "areal": "python3 examples/math/gsm8k_rl.py --config job.yaml train_dataset.batch_size=64 gconfig.n_samples=4 actor.path=a/b",
    "rlinf": "python examples/reasoning/main_grpo.py data.rollout_batch_size=64 algorithm.group_size=8 data.max_prompt_length=512 "
             "runner.seq_length=2048 actor.optim.lr=2e-5",
    "roll": "python examples/start_rlvr_pipeline.py --config_name job rollout_batch_size=64 actor_train.training_args.learning_rate=1e-6",
    "tunix": "python3 -m tunix.cli.grpo_main base_config.yaml batch_size=64 model_config.model_id=a/b grpo_config.num_generations=4",
    "cosmos_rl": "cosmos-rl --config job.toml train.train_policy.type=grpo train.train_batch_per_replica=64",
}


@first_cases(2, "system", SYSTEMS)
def test_a_hostile_script_leaves_nothing_behind_and_two_runs_the_same_bytes(system, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("touch $PWD/made; X=$(touch made2; echo 5)\n`touch made3`\ncat <(touch made4) > made5 &\n"
                      "eval 'touch made6'; exec 3<>/dev/tcp/127.0.0.1/9\ntrap 'touch made7' EXIT\n" + STARTS[system] +
                      "\nrm -rf \"$HOME\"; python -c 'open(\"made8\", \"w\")'\n")
    runs = []
    for _ in range(2):  # the second into a folder that is new again
        done = subprocess.run([sys.executable, "-c", HOSTILE, system, str(script), f"--out={tmp_path / 'out'}"],
                              capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert sorted(p.name for p in tmp_path.iterdir()) == ["job.sh", "out"]
        runs.append({p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()})
        shutil.rmtree(tmp_path / "out")
    assert {"job.py", "report.json", "report.md"} <= set(runs[0]) <= {"job.py", "job_reward.py", "report.json", "report.md"}
    assert runs[0] == runs[1]


def test_what_was_edited_is_not_overwritten_and_strict_refuses_what_is_partial(tmp_path, capsys):
    status, _, out = run(tmp_path, SCRIPT)
    assert status == 0 and run(tmp_path, SCRIPT, "trainer.seed=1")[0] == 0  # nobody touched it
    (out / "job.py").write_text((out / "job.py").read_text() + "# mine\n")
    (out / "job_reward.py").write_text("mine\n")
    assert run(tmp_path, SCRIPT)[0] == 2 and "was edited" in capsys.readouterr().err
    (out / "job.py").unlink()
    assert run(tmp_path, SCRIPT)[0] == 0 and (out / "job_reward.py").read_text() == "mine\n"
    status, report, _ = run(tmp_path, SCRIPT, "generator.step_wise_trajectories=true", "--strict")
    assert status == 3 and report["outcome"] == "refused" and report["commands"] == {}


def test_secrets_are_not_in_reports_and_texts_do_not_become_code(tmp_path):
    evil = "x'); import os  # \\n\u2028"
    status, report, out = run(tmp_path, SCRIPT, "trainer.wandb_api_key=abcdef", f"trainer.project_name='{evil}'")
    assert status == 0 and "abcdef" not in (out / "report.json").read_text() + (out / "report.md").read_text()
    assert load_config(str(out / "job.py")).log.wandb_project.startswith("x'); import os")


SECRET = re.compile(r"(^|_)token$|_pem$|(^|_)(password|secrets?|credentials?|credentials_json|authorization|private_key)$|api_?key$|"
                    r"access_key_(id|secret)$|credential_path$")


@pytest.mark.parametrize("system", tables())
def test_names_that_are_redacted_are_those_of_secrets(system):
    """Columns of data (choice_key, image_key) and counts (chars_per_token) are shown, in every key that a system has or had."""
    names = {name.rpartition(".")[2] for key in table_of(system).keys() for name in key.names()} | names_of(table_of(system).name).leaves
    hidden = {re.sub(r"(?<=[a-z])(?=[A-Z])|-", "_", name).lower() for name in names if is_secret(name)}
    shown = {name for name in names if re.search("_(key|token)$", name)} - {name for name in names if is_secret(name)}
    assert all(SECRET.search(name) for name in hidden), {name for name in hidden if not SECRET.search(name)}
    assert not any(re.search(r"api|secret|private|access|^(hub|github|hf)_", name) for name in shown), shown
    assert (hidden or system == "tunix" or "/" in system) and not is_secret("choice_key") and is_secret("my_choice_api_key")


def test_secrets_within_values_are_not_in_reports(tmp_path):
    url = "trainer.logger='https://me:abcdef@host/x'"
    status, report, out = run(tmp_path, SCRIPT, url)
    assert status == 0 and "abcdef" not in (out / "report.json").read_text() + (out / "report.md").read_text()


def test_commands_of_a_script_that_calls_another(tmp_path):
    (tmp_path / "inner.sh").write_text("python -m skyrl.main trainer.seed=$1 trainer.epochs=${N:-2} \"${@:2}\"\n")
    (tmp_path / "outer.sh").write_text("export N=4\nbash inner.sh 7\n")
    words = [w for c in commands(Path(tmp_path / "outer.sh"), {}, []) for w, _ in c.words]
    assert "trainer.seed=7" in words and "trainer.epochs=4" in words


@pytest.mark.parametrize("file, name", [("run-gsm8k.v2.sh", "run_gsm8k_v2"), ("7b.yaml", "job_7b"), ("code.sh", "job_code"), ("jax.toml", "job_jax")])
def test_a_config_hides_no_module_that_a_run_imports(file, name):
    assert name_of(file) == name


@pytest.mark.full
@first_cases(2, "system", tables(), full=6)
def test_a_name_that_no_version_has_is_unknown(system):
    """Behind every pattern that passes keys over: a name of the system's own is passed over, an invented one is named."""
    table = table_of(system)
    patterns = [n for key in table.keys() if key.kind in ("automatic", "inert") for n in key.names() if "*" in n]
    known = names_of(table.name)
    assert known or not patterns
    for pattern in patterns:
        for invented in ("micro_group_jitter", "warp_ratio", "enable_zz_shuffle"):
            assert invented not in known
            name = re.sub(r"\*\*?$", invented, pattern).replace("*", "one")
            if name.rpartition(".")[2] != invented:
                continue  # the pattern is in the middle
            if any(map(ANYBODYS.search, name.split(".")[:-1])) or any(open_.fullmatch(name) for open_ in known.patterns):
                continue  # a table of anybody's names
            m = migrated(system, {**table_of(system).required, name: 3})
            kinds = {record.key: record.kind for record in m.records()}
            assert kinds[name] == "unknown", name


def test_areals_masks_of_1_0_1_and_rlinfs_whitening():
    base = {"actor.use_decoupled_loss": True, "actor.kl_ctl": 0.0}
    for more, want in (({"actor.behave_imp_weight_cap": 4.0}, ("token_mis", 4.0)),
                       ({"actor.behave_imp_weight_mode": "token_truncate"}, ("token_tis", 5.0)),
                       ({"actor.behave_imp_weight_mode": "disabled"}, ("none", None))):
        options = migrated("areal", base | more).options
        assert options["algorithm.mismatch.correction"][0] == want[0] and options.get("algorithm.mismatch.cap", (None,))[0] == want[1]
    assert any("1.0.0.post1 to 1.0.3" in text for text in migrated("areal", base).different)
    assert migrated("areal", {"actor.use_cispo_loss": True}).options["algorithm.policy_loss"][0] == "cispo"
    assert migrated("areal", {"actor.optimizer.warmup_steps": 20}).options["optimizer.warmup_steps"][0] == 20
    assert migrated("rlinf", {"algorithm.adv_type": "grpo", "algorithm.normalize_advantages": True}).options["algorithm.whiten"][0] is True
    assert migrated("rlinf", {"algorithm.adv_type": "grpo", "algorithm.normalize_advantages": False}).options["algorithm.whiten"][0] is False
    assert migrated("roll", {"actor_train.model_update_frequency": 4}).options["rollout.sync_every"][0] == 4


def test_shares_of_a_run_are_steps_or_passes_and_jobs_of_another_kind_are_said():
    """TRL's steps below 1; a file that SFT's could be; SkyRL's generation alone."""
    base = {"num_processes": 8, "num_generations": 8, "reward_funcs": ["accuracy_reward"]}
    m = migrated("trl", base | {"save_strategy": "steps", "save_steps": 0.05, "eval_strategy": "steps", "eval_steps": 0.1})
    v = values(m)  # of three passes, unless it says
    assert not m.lacking and v["eval.every_steps"] == v["checkpoint.every_steps"] == 0
    assert (round(v["eval.every_epochs"], 9), round(v["checkpoint.every_epochs"], 9)) == (0.3, 0.15)
    bounded = values(migrated("trl", base | {"save_strategy": "steps", "save_steps": 0.05, "max_steps": 210}))
    assert bounded["checkpoint.every_steps"] == 11 and "checkpoint.every_epochs" not in bounded  # ceil(10.5)
    assert migrated("trl", {"num_processes": 8, "dataset_name": "some/set"}).outcome(False) == "refused"
    assert migrated("skyrl", command="python -m skyrl.train.entrypoints.main_generate").outcome(False) == "refused"


MISPLACED = {  # keys of each system, below a table that does not have them
    "areal": (
        "actor.n_samples actor.max_head_offpolicyness actor.total_train_epochs rollout.temperature "
        "rollout.eps_clip rollout.lr ref.n_samples critic.n_samples train_dataset.n_samples gconfig.eps_clip "
        "gconfig.batch_size saver.lr"),
    "cosmos_rl": (
        "train.kl_beta train.temperature rollout.train_batch_per_replica rollout.kl_beta policy.optm_lr "
        "policy.n_generation validation.optm_lr logging.output_dir"),
    "rlinf": (
        "actor.group_size actor.ratio_clip_eps rollout.group_size rollout.kl_beta data.group_size data.lr "
        "actor.optim.temperature actor.model.lr critic.kl_beta"),
    "roll": (
        "actor_train.rollout_batch_size actor_train.pg_clip actor_train.adv_estimator "
        "actor_infer.rollout_batch_size actor_infer.pg_clip reference.kl_loss_coef critic.ppo_epochs "
        "actor_train.training_args.rollout_batch_size actor_train.data_args.prompt_length "
        "actor_infer.generating_args.response_length"),
    "skyrl": (
        "trainer.policy.fsdp_config.lr trainer.ref.eps_clip_low trainer.critic.train_batch_size "
        "generator.inference_engine.temperature data.dataloader.epochs trainer.policy.train_batch_size "
        "generator.train_batch_size trainer.algorithm.epochs"),
    "trl": (
        "fsdp_config.learning_rate deepspeed_config.num_generations parallelism_config.max_steps "
        "training.learning_rate grpo.num_generations"),
    "tunix": "rl_training_config.num_generations rollout_config.beta model_config.total_generation_steps",
    "verl": (
        "data.ppo_mini_batch_size data.n data.use_kl_loss trainer.train_batch_size trainer.max_response_length "
        "actor_rollout_ref.actor.train_batch_size actor_rollout_ref.actor.adv_estimator "
        "actor_rollout_ref.rollout.ppo_mini_batch_size actor_rollout_ref.rollout.max_response_length "
        "actor_rollout_ref.ref.clip_ratio critic.adv_estimator actor_rollout_ref.model.use_kl_loss"),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_key_in_another_table_than_its_own_is_named_with_the_place_where_it_belongs(system):
    for key in MISPLACED[system].split():
        m = migrated(system, {**table_of(system).required, key: 3})
        record = next(r for r in m.records() if r.key == key)
        assert record.kind == "unknown" and "unknown here; " in record.note and " belongs at " in record.note, (key, record)
        assert m.outcome(False) != "full"
    assert sum(len(keys.split()) for keys in MISPLACED.values()) >= 60


def test_where_a_key_belongs():
    def note(system, key):
        return next(r.note for r in migrated(system, {**table_of(system).required, key: 3}).records() if r.key == key)

    assert note("verl", "data.ppo_mini_batch_size").endswith("belongs at actor_rollout_ref.actor.ppo_mini_batch_size")
    assert note("roll", "actor_train.rollout_batch_size").endswith("belongs at the top level")
    assert note("areal", "rollout.eps_clip").endswith("belongs at actor.eps_clip")
    areal = migrated("areal", {**AREAL, "actor.max_new_tokens": 512})  # a field of the actor, too: of its overlong penalty
    assert any("belongs at gconfig.max_new_tokens" in text for text in areal.needs_you)
    same = migrated("areal", {**AREAL, "actor.max_new_tokens": 512, "gconfig.max_new_tokens": 512})
    assert not any("max_new_tokens" in text for text in same.needs_you)
    penalty = {"actor.overlong_reward_penalty": True, "actor.overlong_tokens": 100, "actor.overlong_penalty_factor": 1.0}
    assert [key for key, *_ in migrated("areal", AREAL | penalty).lacking if "max_new" in key] == ["actor.max_new_tokens"]


@pytest.mark.parametrize("system, key, value, of", [
    ("trl", "max_prompt_length", 700, "0.27"), ("verl", "data.chat_template", "x", "0.7"), ("skyrl", "generator.num_inference_engines", 1, "0.2"),
    ("cosmos_rl", "train.validation_step", 5, "0.2.9"), ("areal", "actor.group_reward_norm", True, "0.3"),
    ("roll", "alive_check_interval", 9, "0.1.3")])
def test_keys_of_another_version_ask_for_the_version(tmp_path, capsys, system, key, value, of):
    settings = {**table_of(system).required, "reward_funcs": ["accuracy_reward"]} if system == "trl" else table_of(system).required
    tree: dict = {}
    for name, x in {**settings, key: value}.items():
        *above, leaf = name.split(".")
        table = tree
        for part in above:
            table = table.setdefault(part, {})
        table[leaf] = x
    (tmp_path / "old.yaml").write_text(json.dumps(tree))
    for flags, asked in (([], True), ([f"--from-version={of}"], False)):
        command.main([system, str(tmp_path / "old.yaml"), f"--out={tmp_path / str(asked)}", *flags])
        said = [line for line in capsys.readouterr().out.splitlines() if "needs you: version" in line]
        assert len(said) == asked and all(key in line and line.endswith(f"give --from-version={of}") for line in said)


@pytest.mark.parametrize("system, key, value, kind, note", [
    ("trl", "benchmarks", ["math_500_v1"], "unsupported", "benchmarks"), ("trl", "do_eval", True, "inert", "eval_strategy"),
    ("trl", "overwrite_output_dir", True, "automatic", "run.resume"), ("trl", "torch_empty_cache_steps", 5, "automatic", "allocator"),
    ("trl", "load_best_model_at_end", True, "unsupported", "checkpoint.keep_best"), ("trl", "push_to_hub_revision", True, "automatic", "upload"),
    ("trl", "remove_unused_columns", False, "automatic", "column"), ("areal", "actor.adv_norm.mean_leave1out", True, "unsupported", "mean of all"),
    ("areal", "evaluator.fileroot", "x", "automatic", "evaluations"), ("areal", "weight_update_mode", "disk", "automatic", "transport"),
    ("cosmos_rl", "policy.parallelism.cp_rotate_method", "allgather", "automatic", "mesh.cp"),
    ("rlinf", "rollout.print_outputs", True, "automatic", "log.print_samples"), ("roll", "alive_check_interval", 9, "automatic", "heartbeat"),
    ("roll", "router_args.router_name", "x", "automatic", "server"), ("skyrl", "trainer.tags", ["a"], "automatic", "TAGS"),
    ("verl", "transfer_queue.enable", True, "automatic", "rows")])
def test_the_note_beside_a_key_is_about_it(system, key, value, kind, note):
    record = next(r for r in migrated(system, {**table_of(system).required, key: value}).records() if r.key == key)
    assert record.kind == kind and note in record.note


JOBS = [  # system, what is not RL of a language model there, the recipe that does it
    ("trl", {"learning_rate": 2e-5, "teacher_model_name_or_path": "a/b"}, "trl distillation", "run.recipe=distill"),
    ("trl", {"learning_rate": 1e-5}, "accelerate launch examples/scripts/prm.py", "run.recipe=reward_model"),
    ("trl", {"max_length": 1024, "beta": 0.1}, "", "trl/preference"),
    ("areal", {"model.path": "a/b", "model.optimizer.lr": 1e-5}, "", "run.recipe=sft"),
    ("areal", {"teacher.path": "a/b", "actor.path": "a/c", "rollout.backend": "sglang:d4"}, "", "run.recipe=distill"),

    ("skyrl", {"data.val_data": ["v"]}, "python -m skyrl.train.entrypoints.main_generate", "run.mode=eval"),
    ("verl", {"actor_rollout_ref.model.path": "a/b"}, "python -m verl.trainer.main_generation_server", "run.mode=eval"),
    ("rlinf", {"runner.task_type": "reasoning_eval", "actor.optim.lr": 1e-5}, "", "run.mode=eval"),
    ("cosmos_rl", {"train.train_policy.type": "sft", "train.train_policy.trainer_type": "dpo"}, "", "run.recipe=preference"),
]


@pytest.mark.parametrize("system, settings, program, recipe", JOBS)
def test_another_job_is_refused_for_its_own_reason_alone(system, settings, program, recipe):
    m = migrated(system, settings, command=program)
    (key, why, refuse), = m.lacking
    assert refuse and recipe in why and "is not carried over" in why and (key in settings or key in program)
    assert m.needs_you == m.different == [] and not m.unknown and m.outcome(False) == "refused"
    assert [r.key for r in m.records()] == sorted(settings)  # every key is in the report, and none as RL's
    assert {(r.kind, r.note) for r in m.records()} <= {("unsupported", "of that job"), ("unsupported", why)}


def test_words_without_a_dot_are_keys_of_the_systems_own_command(tmp_path):
    status, report, _ = run(tmp_path, "NAME=x LIMIT=3 python -m skyrl.train.main_sft strategy=fsdp num_steps=10 optimizer_config.lr=1e-6\n")
    assert status == 0 and [k["key"] for k in report["keys"]] == ["num_steps", "optimizer_config.lr", "strategy"]


def test_a_config_that_logs_to_wandb_says_the_package(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    script = "python -m skyrl.train.entrypoints.main_base trainer.logger={} data.train_data=['a.parquet']\n"
    for logger, named in (("wandb", True), ("console", False)):
        _, report, out = run(tmp_path, script.format(logger))
        assert ("not installed: wandb, by log.wandb=True: pip install 'jaxrl[wandb]'" in capsys.readouterr().out) is named
        assert bool(report["packages"]) is ("## Packages" in (out / "report.md").read_text()) is named
        assert all(("--config.log.wandb=false" in line) is named for line in report["commands"].values())  # they run as printed


def test_the_report_says_the_outcome_first(tmp_path, capsys):
    """What runs, what you must do, what is lost and what differs, before any table of keys."""
    script = "python -m skyrl.train.entrypoints.main_base trainer.logger=console environment.env_class=search generator.max_turns=3 trainer.warp=1\n"
    _, report, out = run(tmp_path, script)
    text = (out / "report.md").read_text()
    said = f"The config is written: {len(report['needs_you'])} to be done by you, 1 unknown; {len(report['differs'])} known differences."
    assert f"Outcome: **partial**. {said}" in text and f"partial: {said}" in capsys.readouterr().out
    order = [text.index(part) for part in ("Outcome:", "```bash", "## Needs you", "## Known differences", "## Equivalent", "## Unknown")]
    assert order == sorted(order)
    _, report, out = run(tmp_path, "python -m skyrl.train.entrypoints.main_generate data.val_data=['v']\n")
    assert "No config is written" in (out / "report.md").read_text()


def test_what_decides_a_branch_is_named(tmp_path, capsys):
    script = ("DEVICE=${DEVICE:-$(lspci | tail -1)}\ncase \"${DEVICE}\" in\n  gpu) n=8 ;;\n  npu) n=16 ;;\n"
              "esac\npython3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=$n actor_rollout_ref.rollout.gpu_memory_utilization=0.$n\n")
    assert run(tmp_path, script, system="verl")[0] == 2
    assert capsys.readouterr().err.endswith("give what decides there, DEVICE=gpu or DEVICE=npu\n")
    status, report, _ = run(tmp_path, script, "DEVICE=npu", system="verl")
    assert status == 0 and report["facts"]["GPUs"] == 16


def test_trls_gpus_are_the_processes_that_train(tmp_path, capsys):
    job = "num_generations: 8\nreward_funcs: [accuracy_reward]\nper_device_train_batch_size: 8\nuse_vllm: true\nvllm_mode: server\n"
    assert run(tmp_path, job, name="job.yaml", system="trl")[0] == 2
    assert "give --gpus=N, the processes that train (without the GPUs of vLLM in server mode)" in capsys.readouterr().err
    facts = run(tmp_path, job, "--gpus=7", name="job.yaml", system="trl")[1]["facts"]
    assert facts["sequences per step"] == 7 * 8 and facts["GPUs"] == "7 that train; vLLM has its own"
    facts = run(tmp_path, job + "num_processes: 4\n", "--gpus=7", name="job.yaml", system="trl")[1]["facts"]
    assert facts["sequences per step"] == 4 * 8  # the file says it
    command.main(["--help"])
    assert "TRL: the processes that train" in capsys.readouterr().out


def test_an_escaped_interpolation_is_its_text(tmp_path, monkeypatch):
    monkeypatch.setenv("name", "of this machine")
    job = (r"data: {system_prompt: 'Say \${name:x}, then \${name} \\${trainer.total_epochs}', train_files: '${oc.env:HOME}/a.parquet'}" "\n"
           "trainer: {total_epochs: 3}\n")
    status, report, out = run(tmp_path, job, name="job.yaml", system="skyrl")
    assert status == 0  # of any system: what is asked is the value
    values = {k["key"]: k["value"] for k in report["keys"]}
    assert values["data.system_prompt"] == r"Say ${name:x}, then ${name} \3" and values["data.train_files"] == "$HOME/a.parquet"
    tree = {"data": {"rollout_batch_size": 64, "max_prompt_length": 512, "system_prompt": r"Say \${name} $HOME"}, "algorithm": {"group_size": 8},
            "runner": {"seq_length": 2048}, "actor": {"optim": {"lr": 2e-5}}, "rollout": {"model": {"model_path": "$HOME/m"}}}
    _, _, out = run(tmp_path, json.dumps(tree), name="own.yaml", system="rlinf")
    config = load_config(str(out / "own.py"))
    assert config.data.system_prompt == "Say ${name} $HOME" and config.model.path == os.path.expandvars("$HOME/m")


@pytest.mark.parametrize("text", ["${oc.env:}", "${oc.select:}"])
def test_an_interpolation_that_names_nothing_is_refused(tmp_path, capsys, text):
    status, _, _ = run(tmp_path, f"trainer: {{total_epochs: '{text}'}}\n", name="job.yaml", system="skyrl")
    assert status == 2 and f"{text} names nothing" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["~a.b", "~a/b", "~a.b=1"])
def test_a_deleted_key_is_null(word):
    assert [(s.key, s.value) for s in override(word, "here")] == [("a.b", None)]


@pytest.mark.parametrize("text, want", [("-7 / 2", -3), ("7 / -2", -3), ("-7 % 2", -1), ("7 % -2", 1), ("-8 / 2", -4), ("7 // 2 * (3 - 5)", -6)])
def test_arithmetic_is_a_shells(text, want):
    assert arithmetic(text) == want


def test_areals_weights_in_bfloat16_are_said():
    def said(**keys):
        m = migrated("areal", AREAL | {k.replace("__", "."): v for k, v in keys.items()})
        return any("bfloat16" in text for text in m.different)

    assert said(allocation_mode="sglang.d4p1t1+d4p1t1") and said(rollout__backend="sglang:d4", actor__backend="fsdp:d4")
    assert not said(rollout__backend="sglang:d4", actor__backend="megatron:d4") and not said(allocation_mode="sglang.d4+d2p2t1")
    assert not said(rollout__backend="sglang:d4", actor__backend="fsdp:d4", actor__dtype="float32")


@pytest.mark.parametrize("text", ["$(" * 3000 + ")" * 3000, "${X:-" * 2000 + "}" * 2000 + "\npython -m skyrl trainer.seed=1"])
def test_a_script_without_end_of_nesting_is_one_line_that_names_it(tmp_path, capsys, text):
    assert run(tmp_path, text)[0] == 2
    err = capsys.readouterr().err
    assert "job.sh: " in err and err.endswith("nested too deeply\n") and err.count("\n") == 1


@pytest.mark.full
def test_the_printed_command_works_where_the_migration_ran(tmp_path, monkeypatch, capsys):
    """A config in another folder finds the reward file beside it, and that one the user's, by the path of the source."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_text("python3 -m verl.trainer.main_ppo data.train_files=rows.jsonl data.val_files=rows.jsonl data.prompt_key=q "
                                     "custom_reward_function.path=./own/mine.py custom_reward_function.name=mine trainer.n_gpus_per_node=1 "
                                     "actor_rollout_ref.rollout.tensor_model_parallel_size=1 trainer.logger=console\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.py").write_text("raise RuntimeError('the own reward is reached')\n")
    (tmp_path / "rows.jsonl").write_text('{"q": "1+1", "reward_model": {"ground_truth": "2"}, "data_source": "x"}\n' * 1024)
    assert command.main(["verl", "job.sh", "--out=some where"]) == 0
    printed = next(line.strip() for line in capsys.readouterr().out.splitlines() if "jaxrl.main" in line and "plan" not in line)
    assert printed == "python -m jaxrl.main --config='some where/job.py'"
    small = ["model.path=", "model.init=random", "model.tokenizer=jaxrl://arith/tokenizer", "data.chat=false", "rollout.engine=jax", "mesh.roles={}",
             "rollout.placement=auto", "rollout.vllm.devices=", "model.config={'model_type': 'qwen2', 'hidden_size': 32, 'num_hidden_layers': 1,"
             " 'num_attention_heads': 2, 'num_key_value_heads': 1, 'intermediate_size': 64, 'vocab_size': 512}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(command.__file__).parents[2])}
    done = subprocess.run([sys.executable, *shlex.split(printed)[1:], *(f"--config.{o}" for o in small)], capture_output=True, text=True,
                          env=environment)
    assert done.returncode and "the own reward is reached (mine.py:1" in done.stderr + done.stdout


def test_a_key_has_one_answer():
    """Not inert and asked for at once; used where a reward file uses it."""
    def kinds(system, keys):
        return {r.key: r.kind for r in migrated(system, {**table_of(system).required, **keys}).records()}

    assert kinds("trl", {"reward_funcs": ["accuracy_reward"], "push_to_hub": True})["push_to_hub"] == "ask"
    own = {"custom_reward_function.path": "mine.py", "custom_reward_function.name": "f", "custom_reward_function.reward_kwargs.scale": 2}
    assert {k: v for k, v in kinds("verl", own).items() if k in own} == dict.fromkeys(own, "equivalent")


def test_a_program_in_python_is_refused_with_the_page(tmp_path, capsys):
    assert run(tmp_path, "GRPOConfig()\n", name="train.py", system="areal")[0] == 2
    assert "train.py: a program in Python is not read: docs/guides/from_areal.md says" in capsys.readouterr().err


def test_trls_defaults_of_1_10_and_1_14():
    """Completions of 512 tokens, KL terms weighed by the ratio, the loss of an optimizer step by its own tokens."""
    base = {"num_processes": 8, "reward_funcs": ["accuracy_reward"], "beta": 0.1, "steps_per_generation": 4}
    of = {v: migrated("trl", base, v) for v in ("1.9", "1.10", "1.16")}
    assert [values(m)["rollout.max_new_tokens"] for m in of.values()] == [256, 512, 512]
    assert [values(m)["algorithm.kl.estimator"] for m in of.values()] == ["k3", "k3_unbiased", "k3_unbiased"]
    assert [any("gradient is 1/4" in text for text in m.different) for m in of.values()] == [True, False, False]
    moe = base | {"router_aux_loss_coef": 0.001}
    assert migrated("trl", moe, "1.9").lacking == [] and [key for key, *_ in migrated("trl", moe, "1.16").lacking] == ["router_aux_loss_coef"]


def test_the_terminal_shows_twenty_unknown_keys(tmp_path, capsys):
    run(tmp_path, "trainer: {seed: 1}\n" + "".join(f"zz_{i}: 1\n" for i in range(30)), name="job.yaml", system="verl")
    out = capsys.readouterr().out
    assert out.count("  unknown zz_") == 20 and "10 further unknown keys; is job.yaml a config of verl?" in out


def test_named_rewards_of_trl_and_open_r1_are_built_in():
    base = {"num_processes": 8, "num_generations": 8}
    m = migrated("trl", base | {"reward_funcs": ["accuracy", "format", "tag_count", "cosine", "repetition_penalty", "length"],
                                "reward_weights": [1, 1, 1, 2, 1, 0.5], "cosine_max_len": 4096, "repetition_n_grams": 4})
    v = values(m)
    assert v["reward.functions"] == ("math", "answer_format", "tag_count", "cosine", "repetition", "length_ranked") and not m.files
    assert v["reward.arguments.cosine"] == {"unit": "characters", "bounded": False, "max_length": 4096, "wrong": [0.0, -0.5], "right": [0.5, 1.0]}
    assert v["reward.arguments.repetition"] == {"size": 4, "penalty": -1.0} and v["reward.weights"] == (1, 1, 1, 2, 1, 0.5)
    assert not m.lacking and not m.needs_you[1:]


def test_areals_norm_of_advantages_by_group_over_tokens():
    base = AREAL | {"actor.kl_ctl": 0.0}
    for mean, std, want in (("group", "group", ("group", "group")), ("group", None, ("group", "none")), ("batch", "batch", ("step", "step"))):
        v = values(migrated("areal", base | {"actor.adv_norm.mean_level": mean, "actor.adv_norm.std_level": std, "actor.adv_norm.group_size": 4}))
        assert v["algorithm.whiten"] and (v["algorithm.whiten_mean"], v["algorithm.whiten_std"]) == want
    other = migrated("areal", base | {"actor.adv_norm.mean_level": "group", "actor.adv_norm.group_size": 3})
    assert [key for key, *_ in other.lacking] == ["actor.adv_norm.group_size"]
