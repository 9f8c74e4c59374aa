"""jaxrl.migrate: dtypes of frozen models and of critics, of every system."""

import re

import pytest
from test_migrate import migrated, values

from jaxrl.migrate.systems import SYSTEMS, table_of
from jaxrl.migrate.table import names_of

ROLES = re.compile(r"((actor_rollout_ref\.)?(ref|actor|critic)|reference|actor_train|actor_infer|teacher|student_train|sglang|vllm|train"
                   r"|trainer\.(ref|policy|critic))\.(.*\.)?((param_)?dtype|precision)")
OTHER = re.compile(r"lora|turbo|action_head|actor\.sglang|ref\.dtype$|ref\.actor\.dtype$|autocast")  # of nothing that trains or is frozen here


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_dtype_of_a_role_is_taken_by_a_pattern_that_passes_it_over(system):
    exact, wild = table_of(system).owners
    kinds = {key.name: key.kind for key in table_of(system).keys()}
    passed = []
    for name in names_of(system).keys:
        if "*" in name or not ROLES.fullmatch(name) or OTHER.search(name) and name not in ("ref.dtype", "actor.dtype"):
            continue
        owner = exact.get(name) or next((own for pattern, own in wild if pattern.fullmatch(name)), "")
        if kinds.get(owner) == "automatic":
            passed.append(name)
    assert passed == []


KL = {
    "areal": {"ref.path": "a/b", "train_dataset.batch_size": 64, "gconfig.n_samples": 4},
    "roll": {"add_token_level_kl": True, "num_return_sequences_in_group": 8},
    "verl": {"actor_rollout_ref.actor.use_kl_loss": True},
}
REF = "actor_rollout_ref.ref.fsdp_config."


@pytest.mark.parametrize(("system", "settings", "version", "dtype", "said"), [
    ("roll", {}, None, "bf16", False),
    ("roll", {"reference.model_args.dtype": "fp32"}, None, "fp32", True),  # the policy computes in bf16 here
    ("roll", {"reference.model_args.dtype": "fp32", "actor_train.model_args.dtype": "fp32",
              "actor_train.strategy_args.strategy_name": "megatron_train"}, None, "fp32", False),
    ("roll", {"reference.model_args.dtype": "fp32", "reference.strategy_args.strategy_name": "fsdp2_infer"}, None, "bf16", False),
    ("areal", {"ref.dtype": "float32"}, None, "fp32", True),
    ("areal", {"ref.dtype": "float32", "actor.dtype": "float32"}, None, "fp32", False),
    ("verl", {}, None, "bf16", False),  # held in fp32, cast to bf16 at each use
    ("verl", {REF + "mixed_precision.param_dtype": "fp32", "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32"}, None,
     "fp32", False),
    ("verl", {REF + "mixed_precision.param_dtype": "fp32", REF + "model_dtype": "bf16"}, None, "bf16", True),
    ("verl", {REF + "dtype": "float16"}, "0.7", "fp32", True),
    ("verl", {REF + "dtype": "float16"}, "0.9", "bf16", False),  # which no longer reads it
])
def test_the_references_dtype(system, settings, version, dtype, said):
    m = migrated(system, {**KL[system], **settings}, version)
    assert values(m)["reference.dtype"] == dtype
    assert any("the reference computes in" in text for text in m.different) == said
    assert "reference.dtype" not in values(migrated(system, {"train_dataset.batch_size": 64, "gconfig.n_samples": 4, "actor.kl_ctl": 0.0,
                                                             **settings} if system == "areal" else settings, version))


@pytest.mark.parametrize(("system", "settings", "dtype"), [
    ("skyrl", {"trainer.bf16": False}, "fp32"), ("skyrl", {}, "bf16"),
    ("trl", {"beta": 0.1, "num_processes": 8, "bf16": False}, "fp32"), ("trl", {"beta": 0.1, "num_processes": 8}, "bf16"),
    ("trl", {"beta": 0.1, "num_processes": 8, "bf16": False, "dtype": "bfloat16"}, "bf16"),
    ("cosmos_rl", {"train.train_policy.kl_beta": 0.1, "train.param_dtype": "float32"}, "fp32"),
])
def test_a_reference_without_a_dtype_of_its_own_computes_as_the_policy(system, settings, dtype):
    assert values(migrated(system, {**table_of(system).required, **settings}))["reference.dtype"] == dtype


def test_the_reference_of_adapters_is_their_base_and_a_teacher_has_its_own():
    lora = {"actor_train.model_args.lora_target": "all-linear", "actor_train.model_args.lora_rank": 8}
    assert "reference.dtype" not in values(migrated("roll", {**KL["roll"], **lora, "reference.model_args.dtype": "fp32"}))
    m = migrated("roll", {"is_pure_opd": True, "teacher.model_args.model_name_or_path": "a/t",
                          "student_train.model_args.model_name_or_path": "a/s", "teacher.model_args.dtype": "fp32"})
    assert values(m)["teacher.dtype"] == "fp32"
    m = migrated("roll", {"teacher_pretrain": "a/t", "student_pretrain": "a/s", "kd_objective": "reverse_kl", "sequence_length": 512,
                          "teacher.model_args.dtype": "fp32"})
    assert values(m)["teacher.dtype"] == "fp32"
    m = migrated("trl", {"teacher_model_name_or_path": "a/t", "num_processes": 8, "bf16": False, "teacher_model_init_kwargs.revision": "abc"},
                 command="trl gkd")
    assert values(m)["teacher.dtype"] == "fp32" and values(m)["teacher.revision"] == "abc"


@pytest.mark.parametrize(("system", "settings", "key"), [
    ("verl", {"algorithm.adv_estimator": "gae"}, {"critic.model.fsdp_config.model_dtype": "bf16"}),
    ("verl", {"algorithm.adv_estimator": "gae", "model_engine": "megatron"}, {"critic.megatron.dtype": "float16"}),
    ("areal", {"critic.path": "a/critic", "train_dataset.batch_size": 64, "gconfig.n_samples": 4}, {"critic.dtype": "float32"}),
    ("roll", {"adv_estimator": "gae"}, {"critic.model_args.dtype": "fp32"}),
])
def test_a_critic_has_the_policys_dtype_and_another_is_named(system, settings, key):
    assert [k for k, _, _ in migrated(system, {**settings, **key}).lacking if "dtype" in k] == list(key)
    assert not [k for k, _, _ in migrated(system, settings).lacking if "dtype" in k]


def test_the_engines_dtype_of_areal_is_the_samplers():
    job = {"train_dataset.batch_size": 64, "gconfig.n_samples": 4}
    assert values(migrated("areal", job))["rollout.dtype"] == "bf16"
    assert values(migrated("areal", {**job, "sglang.dtype": "float32"}))["rollout.dtype"] == "fp32"
    assert values(migrated("areal", {**job, "rollout.backend": "vllm:d2p1t1", "vllm.dtype": "float16"}))["rollout.dtype"] == "fp16"
