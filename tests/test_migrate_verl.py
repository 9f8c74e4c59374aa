"""jaxrl.migrate: verl from 0.8 on, whose engines, tables of rewards and teachers are others."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from test_migrate import migrated, values

from jaxrl.migrate import __main__ as command
from jaxrl.migrate.read import read
from jaxrl.migrate.source import Unreadable
from jaxrl.migrate.systems import table_of
from jaxrl.migrate.systems.verl_distill import DENSE, LOSS, POLICY

A, R, M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
C = "algorithm.rollout_correction."


def verl(settings, version="0.9", command=""):
    return migrated("verl", settings, version, command, 8)


def test_a_token_mean_is_one_of_the_optimizer_step_and_a_token_sum_of_it_is_a_constant():
    micro = {A + "ppo_micro_batch_size_per_gpu": 4}
    assert "algorithm.aggregation_sequences" in values(verl(micro, "0.7"))
    assert "algorithm.aggregation_sequences" not in values(verl(micro, "0.8"))
    v = values(verl({A + "loss_agg_mode": "token-sum", A + "ppo_mini_batch_size": 64, R + "n": 8}))
    assert (v["algorithm.aggregation"], v["algorithm.aggregation_constant"]) == ("constant", 1 / 512)
    norm = {A + "loss_agg_mode": "seq-mean-token-sum-norm", A + "loss_scale_factor": 700}
    said = {version: any("adds up" in text for text in verl(norm, version).different) for version in ("0.7", "0.8", "0.9")}
    assert said == {"0.7": True, "0.8": False, "0.9": False}
    assert values(verl({**norm, **micro}, "0.7"))["algorithm.aggregation_constant"] == 175  # 4 completions are added up


def test_the_engines_read_the_optimizers_clip_and_a_warm_up_of_0_is_a_share():
    both = {A + "grad_clip": 0.3, A + "optim.clip_grad": 0.5, "algorithm.adv_estimator": "gae", "critic.grad_clip": 0.2}
    v = values(verl(both))
    assert v["optimizer.max_grad_norm"] == 0.5 and v["critic.optimizer.max_grad_norm"] == 1.0
    old = values(verl({A + "grad_clip": 0.3, "algorithm.adv_estimator": "gae", "critic.grad_clip": 0.2}, "0.7"))
    assert (old["optimizer.max_grad_norm"], old["critic.optimizer.max_grad_norm"]) == (0.3, 0.2)
    share = {A + "optim.lr_warmup_steps": 0, A + "optim.lr_warmup_steps_ratio": 0.1}
    assert values(verl(share))["optimizer.warmup_fraction"] == 0.1
    assert "optimizer.warmup_fraction" not in values(verl(share, "0.7"))
    assert [values(verl({}, version))["rollout.vllm.max_running"] for version in ("0.8", "0.9")] == [1024, 256]


def test_the_group_of_configs_or_the_named_config_is_the_engine():
    tp = {A + "megatron.tensor_model_parallel_size": 2}
    assert "mesh.tp" not in values(verl(tp))
    assert values(verl({**tp, "model_engine": "megatron"}))["mesh.tp"] == 2
    named = "python -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_megatron_trainer'"
    assert values(verl(tp, "0.7", named))["mesh.tp"] == 2
    v = values(verl({"model_engine": "veomni", A + "veomni.ulysses_parallel_size": 4, A + "optim.lr": 1e-5, A + "optim.lr_min": 1e-6}))
    assert (v["mesh.cp"], v["optimizer.schedule"]) == (4, "cosine") and abs(v["optimizer.floor"] - 0.1) < 1e-9
    v = values(verl({"model_engine": "torchtitan", A + "torchtitan.tensor_parallel_size": 2, A + "optim.min_lr_factor": 0.1}))
    assert (v["mesh.tp"], v["optimizer.schedule"], v["optimizer.floor"]) == (2, "linear", 0.1)
    assert verl({A + "strategy": "automodel"}).outcome(False) == "partial"
    experts = {"model_engine": "megatron", A + "megatron.expert_model_parallel_size": 8, **tp}
    assert values(verl(experts))["mesh.ep"] == 4  # two of eight GPUs are tp's


def test_a_group_without_a_dot_and_a_named_config_are_read_from_a_script(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m verl.trainer.main_ppo --config-name=ppo_trainer model_engine=megatron {A}optim.lr=1e-5\n")
    source = read(table_of("verl"), script, [])
    assert source.settings["model_engine"].value == "megatron" and "--config-name=ppo_trainer" in source.command


def test_a_gradients_clip_is_read_where_the_worker_reads_it():
    clips = {A + "grad_clip": 0.5, A + "optim.clip_grad": 0.25, "critic.grad_clip": 0.2, "critic.optim.clip_grad": 0.1}
    of = lambda version, **keys: values(verl({**clips, A + "optim.lr": 1e-6, **keys}, version))["optimizer.max_grad_norm"]  # noqa: E731
    assert (of("0.4"), of("0.7"), of("0.9")) == (0.5, 0.5, 0.25)
    assert of("0.7", **{A + "strategy": "megatron"}) == 0.25


def test_remax_counts_the_kl_of_a_token_and_of_those_behind_it():
    remax, kl = {"algorithm.adv_estimator": "remax"}, {"algorithm.use_kl_in_reward": True, "algorithm.gamma": 0.9}
    v = values(verl({**remax, **kl}))
    assert (v["algorithm.advantage"], v["algorithm.advantage_mean"], v["algorithm.gamma"]) == ("returns", "greedy", 1.0)
    assert values(verl(remax))["algorithm.advantage"] == "outcome"


def test_gpg_is_a_function_of_the_batch_beside_the_config():
    """By hand: 8 completions, 5 of a score other than 0, and one without a score, of a group of its own."""
    gpg, n = {"algorithm.adv_estimator": "gpg", A + "policy_loss.loss_mode": "gpg"}, float("nan")
    m = verl({**gpg, R + "n": 4, "algorithm.norm_adv_by_std_in_grpo": True})
    v, space = values(m), {}
    exec(m.files[v["algorithm.advantage"][2:].partition(":")[0]], space)
    batch = SimpleNamespace(scores=[1, 0, 0, 0, 1, 1, 1, 1, n], groups=[0, 0, 0, 0, 1, 1, 1, 1, 2])
    np.testing.assert_allclose(space["gpg"](batch), [1.2, -0.4, -0.4, -0.4, 0, 0, 0, 0, 0], atol=1e-12)
    np.testing.assert_allclose(space["gpg"](SimpleNamespace(scores=[0.5, 0.0], groups=[0, 1])), [1.0, 0.0])  # groups of one
    np.testing.assert_allclose(space["gpg"](SimpleNamespace(scores=[0.0, 0.0], groups=[0, 0])), [0.0, 0.0])
    assert (v["algorithm.policy_loss"], v["algorithm.ratio"], v["algorithm.whiten"]) == ("pg", "token", False)
    assert m.marks["algorithm.norm_adv_by_std_in_grpo"][0] == "inert"
    assert verl(gpg, "0.4").outcome(False) == "refused"


def test_megatrons_adapters_are_of_a_table_of_their_own():
    lora = {"model_engine": "megatron", M + "lora.rank": 32, M + "lora.target_modules": ["linear_qkv", "linear_proj"]}
    v = values(verl(lora))
    assert (v["lora.rank"], v["lora.alpha"], v["lora.targets"]) == (32, 32.0, ("q_proj", "k_proj", "v_proj", "o_proj"))
    assert "lora.rank" not in values(verl({M + "lora.rank": 32}))  # FSDP's rank is lora_rank
    assert "lora.rank" not in values(verl({"model_engine": "megatron", M + "lora_rank": 32}))


def test_icepop_is_a_mask_and_rejection_is_refused():
    v = values(verl({C + "rollout_is": "token", C + "rollout_is_threshold": "0.5_5.0"}))
    assert [v["algorithm.mismatch." + n] for n in ("correction", "low", "cap")] == ["token_mis", 0.5, 5.0]
    v = values(verl({C + "rollout_is": "sequence", C + "rollout_is_threshold": "3.0"}))
    assert [v["algorithm.mismatch." + n] for n in ("correction", "cap")] == ["sequence_tis", 3.0]
    rejecting = verl({C + "rollout_rs": "seq_mean_k1", C + "rollout_rs_threshold": "0.999_1.001"})
    assert rejecting.outcome(False) == "refused" and "seq_mean_k1" in rejecting.lacking[0][1]


def test_rewards_stand_in_their_new_table_or_in_the_old_one():
    for table, path in (("reward_model.", "reward_model.model.path"), ("reward.reward_model.", "reward.reward_model.model_path")):
        v = values(verl({table + "enable": True, path: "a/rm"}))
        assert (v["reward.model.path"], v["reward.functions"]) == ("a/rm", ())
    buffer = "reward.reward_kwargs.overlong_buffer_cfg."
    assert values(verl({buffer + "enable": True, buffer + "len": 512}))["reward.overlong_buffer"] == 512
    own = verl({"reward.custom_reward_function.path": "mine.py", "reward.custom_reward_function.name": "f"})
    assert "mine.py" in own.files["job_reward.py"] and "'f'" in own.files["job_reward.py"]
    assert verl({"reward.reward_manager.source": "importlib"}).outcome(False) == "refused"


def test_a_teacher_is_the_recipe_of_distillation_without_what_is_made_of_rewards():
    m = verl({**POLICY, LOSS + "clip_ratio_high": 0.3, A + "entropy_coeff": 0.01, A + "use_kl_loss": True,
              "algorithm.adv_estimator": "grpo"})
    v = values(m)
    assert (v["run.recipe"], v["distill.loss"], v["teacher.path"]) == ("distill", "sampled", "a/teacher")
    assert (v["algorithm.clip_low"], v["algorithm.clip_high"], v["algorithm.dual_clip"]) == (0.2, 0.3, 3.0)
    assert not {"algorithm.advantage", "algorithm.kl.coef", "algorithm.entropy_coef", "algorithm.whiten"} & set(v)
    v = values(verl(DENSE))
    assert (v["distill.loss"], v["distill.top_k"], v["distill.tail"]) == ("forward", 32, False)
    assert "algorithm.policy_loss" not in v
    assert verl({**POLICY, LOSS + "loss_max_clamp": 10.0}).outcome(False) == "partial"
    for other in ({LOSS + "use_task_rewards": True}, {LOSS + "loss_mode": "k3"},
                  {"distillation.teacher_models.second.model_path": "b/teacher"}):
        assert verl({**POLICY, **other}).outcome(False) == "refused", json.dumps(other)


@pytest.mark.parametrize("settings", [
    {"trainer.v1.trainer_mode": "separate_async"}, {"trainer.v1.sampler.custom_sampler.path": "mine.py"}, {A + "qat.enable": True},
    {A + "policy_loss.loss_mode": "dro"}, {A + "policy_loss.loss_mode": "dppo_kl"}, {"algorithm.adv_estimator": "gdpo"},
    {"skip.rollout.enable": True}, {"async_training.staleness_threshold": 0.5, "data.train_batch_size": 0}])
def test_what_would_be_another_job_is_refused(settings):
    assert verl(settings).outcome(False) == "refused"


def test_the_total_variation_of_dppo_and_filters_without_a_bound_on_rounds():
    dppo = {A + "policy_loss.loss_mode": "dppo_tv", A + "clip_ratio_low": 0.15, A + "clip_ratio_high": 0.15, A + "clip_ratio_c": 20}
    v = values(verl(dppo))
    assert (v["algorithm.policy_loss"], v["algorithm.dppo_low"], v["algorithm.dppo_high"]) == ("dppo", 0.15, 0.15)
    assert verl(dppo).outcome(False) == "full" and verl({**dppo, A + "clip_ratio_c": 3.0}).outcome(False) == "partial"
    assert verl(dppo, "0.7").outcome(False) == "refused"
    rounds = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 10}
    assert [values(verl(rounds, version))["algorithm.dynamic_sampling_rounds"] for version in ("0.8", "0.9")] == [10, 1000]
    assert values(verl({**rounds, "trainer.use_v1": False}))["algorithm.dynamic_sampling"] == "off"


@pytest.mark.parametrize("program", ["verl.trainer.main_generation_server", "verl.experimental.fully_async_policy.fully_async_main",
                                     "verl.experimental.one_step_off_policy.main_ppo"])
def test_a_program_that_is_another_job_is_refused(program):
    both_kls = {A + "use_kl_loss": True, "algorithm.use_kl_in_reward": True, "actor_rollout_ref.ref.fsdp_config.param_offload": True}
    assert verl({M + "path": "a/b", **both_kls}, "0.9", f"python -m {program}").outcome(False) == "refused"
    if "fully" in program:
        assert verl({"data.train_batch_size": 0}, "0.9", f"python -m {program}").outcome(False) == "refused"


def test_what_the_critic_has_of_its_own_and_we_do_not_is_said():
    gae = {"algorithm.adv_estimator": "gae", R + "n": 8}
    assert values(verl({**gae, "trainer.critic_warmup": 5}))["critic.warmup_steps"] == 4  # steps 1 to 4
    assert verl({**gae, "critic.ppo_epochs": 1, "critic.loss_agg_mode": "token-mean"}).outcome(False) == "full"
    for key, value in (("critic.ppo_epochs", 2), ("critic.loss_agg_mode", "seq-mean-token-mean"), ("critic.model.lora_rank", 8)):
        assert verl({**gae, key: value}).outcome(False) == "partial", key


@pytest.mark.full
def test_null_under_an_older_name_says_nothing():
    old, new = "custom_reward_function.path", "reward.custom_reward_function.path"
    for first, second in ((old, new), (new, old)):
        assert "mine.py" in verl({first: "mine.py", second: None}).files["job_reward.py"]
    with pytest.raises(Unreadable, match="another version"):
        verl({old: "mine.py", new: "yours.py"})


def test_a_probe_for_npus_fails_and_weights_on_the_host_are_computed_again(tmp_path):
    """Scripts of verl 0.9 decide by a probe; a policy whose weights are streamed keeps no layer's activations."""
    (tmp_path / "run.sh").write_text("""DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
case $DEVICE in gpu) n=8;; npu) n=16;; *) exit 1;; esac
python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=$n algorithm.adv_estimator=grpo actor_rollout_ref.actor.fsdp_config.offload_policy=True \\
    actor_rollout_ref.model.enable_gradient_checkpointing=False actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.model.path=a/b
""")
    out = tmp_path / "out"
    assert command.main(["verl", str(tmp_path / "run.sh"), f"--out={out}"]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["gpus"] == 8 and any("taken for a machine without NPUs" in text for text in report["notes"])
    assert "c.model.remat = 'full'" in (out / "run.py").read_text() and any("model.remat=full" in text for text in report["differs"])


def test_a_config_of_verls_own_is_not_asked_for(tmp_path):
    """Its values are the defaults here; another one that is not found is asked for."""
    for name, asked in (("ppo_megatron_trainer.yaml", False), ("mine", True)):
        (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo --config-path=config --config-name={name} data.train_batch_size=8\n")
        command.main(["verl", str(tmp_path / "run.sh"), "--gpus=8", f"--out={tmp_path / 'out'}"])
        needs = json.loads((tmp_path / "out" / "report.json").read_text())["needs_you"]
        assert any(text.startswith(f"{name}: run.sh names this config, and it was not found") for text in needs) == asked
