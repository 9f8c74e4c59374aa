"""jaxrl.migrate: jobs whose rows hold images, of every system."""

import importlib.util
import os

import pytest
from test_migrate import migrated, values

from jaxrl.config.load import load_config
from jaxrl.migrate import __main__ as command
from jaxrl.migrate.images import has_tower, tower
from jaxrl.migrate.models import trained
from jaxrl.migrate.systems import table_of
from jaxrl.resolve.checks.common import check

VL = "Qwen/Qwen2.5-VL-7B-Instruct"
A, M, D = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "data."
VERL = {M + "path": VL, "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 8, D + "train_files": "a.parquet",
        D + "image_key": "images"}
AREAL = {"train_dataset.batch_size": 64, "gconfig.n_samples": 4, "actor.path": VL, "actor.kl_ctl": 0.0, "train_dataset.path": "hiyouga/geometry3k"}
ROLL = {"pretrain": VL, "adv_estimator": "grpo", "num_return_sequences_in_group": 8, "actor_train.data_args.file_name": ["a.parquet"],
        "actor_train.data_args.messages": "prompt", "rollout_batch_size": 64, "response_length": 512}
RLINF = {"data.type": "vlm", "data.image_keys": ["pictures"], "data.use_chat_template": True, "rollout.model.model_path": "/models/m",
         "data.train_data_paths": ["a.parquet"], "algorithm.adv_type": "grpo"}


def of(system, settings, version=None, cmd=""):
    return trained(migrated(system, {**table_of(system).required, **settings}, version, cmd))


@pytest.mark.parametrize(("system", "settings", "column"), [
    ("verl", VERL, "images"), ("verl", {**VERL, D + "image_key": "pictures"}, "pictures"), ("areal", AREAL, "images"), ("roll", ROLL, "images"),
    ("rlinf", RLINF, "pictures"), ("skyrl", {"trainer.policy.model.path": VL, "generator.vision_language_generator": True}, "images"),
])
def test_completions_of_images_are_drawn_by_vllm(system, settings, column):
    m = of(system, settings)
    v = values(m)
    assert not any(refuse for _, _, refuse in m.lacking), m.lacking
    assert v["data.image_column"] == column and v.get("rollout.engine", "vllm") == "vllm"
    assert not any("embedded sampler" in t for t in m.different)
    assert not [r for r in m.records() if r.kind == "equivalent" and not r.targets and r.key not in ("data.use_chat_template",)]


@pytest.mark.parametrize("name", ["Qwen/Qwen2-VL-2B", "q/Qwen2.5-VL-72B-Instruct-AWQ", "/x/Qwen3-VL-30B-A3B-Instruct/", "$HOME/qwen3-vl"])
def test_the_names_of_models_with_a_tower(name):
    assert has_tower(name)
    assert "rollout.engine" in values(of("verl", {**VERL, M + "path": name}))


@pytest.mark.parametrize("name", ["OpenGVLab/InternVL3-8B", "zai-org/GLM-4.1V-9B-Thinking", "google/gemma-3n-E4B-it", "deepseek-ai/deepseek-vl2"])
def test_models_of_images_of_other_families_are_refused_by_name(name):
    assert not has_tower(name)
    lacking = of("verl", {**VERL, M + "path": name}).lacking
    assert any(refuse and "of a family whose tower is not read here" in why for _, why, refuse in lacking)


@pytest.mark.parametrize("system, settings, size", [
    ("verl", {**VERL, M + "path": "google/gemma-3-12b-it", D + "mm_processor_kwargs.max_pixels": 500000}, D + "mm_processor_kwargs.max_pixels"),
    ("roll", {**ROLL, "pretrain": "google/gemma-3-4b-it", "actor_train.data_args.image_max_pixels": 99999,
              "actor_train.model_args.freeze_module_prefix": "vision_tower.encoder"}, "actor_train.data_args.image_max_pixels")])
def test_gemma_3_is_sampled_here_and_sees_squares(system, settings, size):
    """Its images have one size, and vLLM is not asked for completions behind them; text alone is drawn by vLLM."""
    m = of(system, settings)
    v = values(m)
    assert not any(refuse for _, _, refuse in m.lacking), m.lacking
    assert v["rollout.engine"] == "jax" and "data.image_max_pixels" not in v and m.marks[size][0] == "inert"
    assert m.image_tokens == 256 and any("see each other" in t for t in m.different)
    assert v.get("model.frozen", (r"vision/(group|layer)_\d+/.*",)) == (r"vision/(group|layer)_\d+/.*",)


@pytest.mark.parametrize("longest, planned", [(256, 0), (257, 256), (4096, 256)])
def test_the_printed_plan_of_gemma_3_has_a_whole_image_or_none(longest, planned):
    assert of("verl", {**VERL, M + "path": "google/gemma-3-12b-it", D + "max_prompt_length": longest}).image_tokens == planned




@pytest.mark.parametrize(("pattern", "want"), [
    ("visual", "vision/.*"), ("model.visual", "vision/.*"), ("^visual", "vision/.*"), (r"^model\.visual\..*", "vision/.*"),
    ("vision_model", "vision/.*"), ("vision_model.blocks", r"vision/(group|layer)_\d+/.*"), ("vision_model.patch_embed", "vision/patch/.*"),
    ("visual.merger", "vision/merger/.*"), ("multi_modal_projector", "vision/merger/.*"), ("vision_projection", "vision/merger/.*"),
    ("visual.deepstack_merger_list", r"vision/tap_\d+/.*"), ("model.layers", ""), ("visual.unheard_of", ""), ("audio_model", ""),
])
def test_towers_by_their_names_elsewhere(pattern, want):
    assert tower(pattern) == want


def test_patterns_of_towers_are_of_parameters_that_models_have():
    """Of every family, and of both ways to lay out layers: each pattern takes some parameter and blocks take no merger."""
    import re

    from jaxrl import models
    from jaxrl.models.io import hf
    for kind in ("qwen3", "qwen2_5", "gemma3"):
        text = load_config(f"configs/vision_sft.py:{'' if kind == 'qwen3' else f'{kind}_'}tiny").model.config.to_dict()
        table = models.build(hf.load_config("", None, text, weights=False, images=True), compute_dtype="float32", scan_layers=True)
        names = ["/".join(entry.path) for entry in table.entries]
        parts = ("vision_tower", "vision_tower.encoder", "vision_tower.embeddings", "multi_modal_projector") if kind == "gemma3" else (
            "visual", "visual.blocks", "visual.patch_embed", "visual.merger")
        for part in parts:
            assert any(re.fullmatch(tower(part), name) for name in names), (kind, part)
        assert not any("merger" in name for name in names if re.fullmatch(tower(parts[1]), name))
        if kind == "gemma3":  # whose projector is no part of vision_tower
            rest = {name for name in names if name.startswith("vision/") and not re.fullmatch(tower("vision_tower"), name)}
            assert rest == {"vision/merger/soft_norm/scale", "vision/merger/project/kernel"}


def test_frozen_towers_of_verl_and_roll():
    frozen = {**VERL, A + "freeze_vision_tower": True}
    assert values(of("verl", frozen, "0.7"))["model.frozen"] == ("vision/.*",)
    m = of("verl", frozen, "0.9")  # whose engines do not read it
    assert "model.frozen" not in values(m) and any("freeze_vision_tower does nothing" in t for t in m.different)
    assert "model.frozen" not in values(of("verl", {**frozen, A + "strategy": "megatron"}, "0.7"))
    key = "actor_train.model_args.freeze_module_prefix"
    assert values(of("roll", {**ROLL, key: "vision_model"}))["model.frozen"] == ("vision/.*",)
    two = values(of("roll", {**ROLL, key: "vision_model.blocks,vision_model.patch_embed"}))["model.frozen"]
    assert two == (r"vision/(group|layer)_\d+/.*", "vision/patch/.*")
    m = of("roll", {**ROLL, key: "vision_model,audio_model"})
    assert values(m)["model.frozen"] == ("vision/.*",) and any("audio_model" in t for t in m.needs_you)
    assert "model.frozen" not in values(of("roll", {**ROLL, "pretrain": "Qwen/Qwen2.5-7B", key: "vision_model"}))


def test_sizes_and_numbers_of_images():
    v = values(of("roll", {**ROLL, "actor_train.data_args.image_max_pixels": 1048576}))
    assert (v["data.image_min_pixels"], v["data.image_max_pixels"]) == (3136, 1048576)
    v = values(of("roll", ROLL, "0.2.1"))  # before they were options of the data
    assert (v["data.image_min_pixels"], v["data.image_max_pixels"]) == (56 * 56, 1024 * 1024)
    other = {"validation.data_args.image_max_pixels": 9999, "actor_train.data_args.image_max_pixels": 1048576}
    assert "validation.data_args.image_max_pixels" in [k for k, _, _ in of("roll", {**ROLL, **other}).lacking]
    assert values(of("areal", {**AREAL, "train_dataset.path": "x/clevr_count_70k"}))["data.image_max_pixels"] == 336 * 336
    v = values(of("verl", {**VERL, D + "mm_processor_kwargs.max_pixels": 500000, "actor_rollout_ref.rollout.limit_images": 3}))
    assert v["data.image_max_pixels"] == 500000 and v["data.max_images"] == 3
    most = "actor_rollout_ref.rollout.engine_kwargs.vllm.limit_mm_per_prompt.image"
    assert values(of("verl", {**VERL, most: 5}))["data.max_images"] == 5
    most = "actor_infer.strategy_args.strategy_config.limit_mm_per_prompt."
    m = of("roll", {**ROLL, most + "image": 4, most + "video": 1})
    assert values(m)["data.max_images"] == 4 and not any("limit_mm" in k for k, _, _ in m.lacking)


TEACHER = "distillation.teacher_models.teacher_model.model_path"
ON_POLICY = {**VERL, "actor_rollout_ref.rollout.n": 1, "distillation.enabled": True, TEACHER: "Qwen/Qwen2.5-VL-32B-Instruct",
             "distillation.distillation_loss.loss_mode": "k1", "distillation.distillation_loss.use_task_rewards": False,
             "distillation.distillation_loss.use_policy_gradient": True}
OF_ROWS = {"num_processes": 8, "model_name_or_path": VL, "dataset_name": "a/b", "max_length": 1024, "bf16": True}
COSMOS = {"train.train_policy.type": "grpo", "policy.model_name_or_path": VL, "train.train_policy.dataset.name": "a/b"}


@pytest.mark.parametrize(("system", "settings", "cmd", "want"), [
    ("verl", {**VERL, "algorithm.adv_estimator": "gae"}, "", {"algorithm.advantage": "gae", "data.image_column": "images"}),
    ("verl", ON_POLICY, "", {"run.recipe": "distill", "distill.loss": "sampled", "data.image_column": "images"}),
    ("roll", {**ROLL, "adv_estimator": "gae", "num_return_sequences_in_group": 1, "critic.training_args.learning_rate": 1e-5,
              "actor_train.data_args.image_max_pixels": 99999}, "",
     {"algorithm.advantage": "gae", "data.image_column": "images", "data.image_max_pixels": 99999}),
    ("rlinf", {**RLINF, "rollout.model.model_path": VL, "algorithm.adv_type": "gae", "algorithm.group_size": 1}, "",
     {"algorithm.advantage": "gae", "data.image_column": "pictures"}),
    ("trl/preference", {**OF_ROWS, "max_prompt_length": None}, "", {"run.recipe": "preference", "preference.loss": ("dpo",)}),
    ("trl/reward_model", OF_ROWS, "", {"run.recipe": "reward_model"}),
    ("trl/distill", {**OF_ROWS, "teacher_model_name_or_path": "Qwen/Qwen2.5-VL-32B-Instruct", "max_new_tokens": 1023}, "", {"run.recipe": "distill"}),
    ("cosmos_rl", {**COSMOS, "distillation.enable": True, "distillation.model_name_or_path": "Qwen/Qwen2.5-VL-32B-Instruct"}, "",
     {"run.recipe": "distill", "teacher.path": "Qwen/Qwen2.5-VL-32B-Instruct"}),
])
def test_other_jobs_see_images_too(system, settings, cmd, want):
    """PPO's critic, pairs, reward models and distillation: the rows' images, nothing refused, and a config that jaxrl takes."""
    m = of(system, settings, cmd=cmd)
    assert not [text for _, text, refuse in m.lacking if refuse] and m.facts["images"]
    v = values(m)
    assert {option: v.get(option) for option in want} == want
    assert not any("has a tower" in t for t in m.needs_you)


@pytest.mark.parametrize("name", ["model.path", "reward_model"])
def test_models_beside_the_policy_need_a_tower(name):
    """A teacher and a reward model by whose names no tower is read are asked for."""
    text = "Qwen/Qwen2.5-7B-Instruct"
    m = of("verl", {**ON_POLICY, TEACHER: text}) if name == "model.path" else of(
        "verl", {**VERL, "reward_model.enable": True, "reward_model.model.path": text}, "0.4")
    assert any(text in t and "with a tower" in t for t in m.needs_you)


def test_rolls_distillation_of_images_has_columns_and_sizes_of_its_own():
    settings = {"teacher_pretrain": VL, "student_pretrain": VL, "kd_objective": "reverse_kl", "sequence_length": 512, "question_key": "q",
                "student.data_args.file_name": ["a.json"], "student.device_mapping": "list(range(0,8))"}
    m = of("roll", settings)
    v = values(m)
    assert (v["data.prompt_column"], v["data.completion_column"], v["data.image_column"]) == ("problem", "solution", "image")
    assert (v["data.image_min_pixels"], v["data.image_max_pixels"]) == (56 * 56, 1024 * 1024)
    assert v["train.max_sequence_tokens"] == 1024 and v["distill.on_prompt"] and m.marks["question_key"][0] == "inert"  # prompt_length's default
    assert any("<answer>" in t for t in m.needs_you)
    text = of("roll", {**settings, "student_pretrain": "Qwen/Qwen2.5-7B", "teacher_pretrain": "Qwen/Qwen2.5-7B"})
    assert values(text)["data.prompt_column"] == "q" and values(text)["train.max_sequence_tokens"] == 512


@pytest.mark.parametrize("settings", [
    {"pretrain": VL, "reference.training_args.x": 1, "chosen_key": "c", "sequence_length": 512, "actor_train.data_args.file_name": ["a.json"]},
    {"pretrain": VL, "sft_train.data_args.file_name": ["a.json"], "sequence_length": 512, "response_key": "output"}])
def test_pipelines_of_roll_that_read_no_images_stay_of_text(settings):
    assert values(of("roll", settings))["data.image_column"] == ""


def test_several_columns_of_images_are_refused_by_name_alone():
    m = of("rlinf", {**RLINF, "data.image_keys": ["left", "right"]})
    assert [text for _, text, refuse in m.lacking if refuse and "images are of one column" in text] and m.outcome(False) == "refused"


def test_an_episode_has_room_for_a_picture_in_every_turn():
    m = of("skyrl", {"trainer.policy.model.path": VL, "generator.vision_language_generator": True, "generator.max_turns": 3,
                     "environment.env_class": "geometry3k"})
    assert m.outcome(False) == "partial" and values(m)["env.image_tokens"] == 3 * 384 and "job_env.py" in m.files


def test_rows_with_images_are_not_cut_and_are_trained_on_all_turns():
    m = of("verl", {"model.path": VL, "data.messages_key": "messages", "data.train_files": "a.parquet"}, cmd="sft_trainer")
    assert values(m)["data.train_turns"] == "all"
    m = of("verl", {**VERL, D + "truncation": "left"})
    assert values(m)["data.overlong_prompt"] == "filter" and D + "truncation" in [k for k, _, _ in m.lacking]


def test_servers_of_images_keep_their_devices():
    v = values(of("areal", {**AREAL, "rollout.backend": "vllm:d4p1t1", "actor.backend": "fsdp:d4p1t1", "rollout.max_head_offpolicyness": 2,
                            "cluster.n_nodes": 1, "actor.recompute_logprob": True, "actor.use_decoupled_loss": True}))
    assert v["mesh.roles.policy"] == {"devices": "0-3"} and v["rollout.vllm.devices"] == ("4", "5", "6", "7")
    assert v["rollout.max_staleness"] == 2 and v["rollout.placement"] == "disaggregated"


def test_the_sampler_of_text_alone_has_the_devices_of_the_servers():
    v = values(of("skyrl", {"trainer.policy.model.path": VL, "trainer.policy.language_model_only": True, "trainer.placement.colocate_all": False,
                            "trainer.placement.policy_num_gpus_per_node": 4, "generator.num_inference_engines": 4}))
    assert v["mesh.roles.policy"] == {"devices": "0-3"} and v["mesh.roles.sampler"] == {"devices": "4-7"}
    assert v["rollout.engine"] == "jax" and v["rollout.placement"] == "disaggregated"


def test_text_alone_of_a_model_with_a_tower():
    v = values(of("skyrl", {"trainer.policy.model.path": VL, "trainer.policy.language_model_only": True, "generator.max_turns": 3,
                            "environment.env_class": "search"}))
    assert v["data.image_column"] == "" and v["rollout.engine"] == "jax" and v["env.max_turns"] == 3


def test_domains_of_rolls_images_are_told_by_their_source():
    m = of("roll", {**ROLL, "rewards.math.worker_cls": "x.MathRuleRewardWorker", "rewards.math.tag_included": ["mm_math"],
                    "rewards.det.worker_cls": "x.DetectionRewardWorker", "rewards.det.tag_included": ["coco"],
                    "actor_train.data_args.domain_interleave_probs.math": 0.5, "actor_train.data_args.domain_interleave_probs.det": 0.5})
    v = values(m)
    assert v["data.sources.math"]["where"] == {"data_source": ["mm_math"]} and v["data.answer_column"] == "reward_model.ground_truth"


def load(text, tmp_path):
    (tmp_path / "reward.py").write_text(text)
    spec = importlib.util.spec_from_file_location("reward_of_images", tmp_path / "reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.score


def test_rewards_of_geometry3k_and_counts(tmp_path):
    answer, form = r"\boxed{45}", r"<think>half</think> \boxed{45}"
    verl, areal = (load(next(iter(of(s, c).files.values())), tmp_path) for s, c in (("verl", VERL), ("areal", AREAL)))
    for text, want in ((form, 1.0), (answer, 0.9), (r"<think>x</think> \boxed{44}", 0.1), ("45", 0.0)):
        assert verl("q", text, "45", data_source="hiyouga/geometry3k") == pytest.approx(want), text
        assert areal("q", text, "45") == pytest.approx(want), text
    count = load(next(iter(of("areal", {**AREAL, "train_dataset.path": "x/clevr_count_70k"}).files.values())), tmp_path)
    assert [count("q", t, "3") for t in ("[2] no, [3]", "[3] no, [4]", "3", "")] == [1.0, 0.0, 0.0, 0.0]


SCRIPT = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$HOME/data/geo3k/train.parquet \\
 data.val_files=$HOME/data/geo3k/test.parquet data.train_batch_size=512 data.max_prompt_length=1024 data.max_response_length=2048 \\
 data.filter_overlong_prompts=True data.image_key=images actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct \\
 actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10 actor_rollout_ref.rollout.n=5 \\
 actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.tensor_model_parallel_size=2 trainer.n_gpus_per_node=8 trainer.nnodes=1 \\
 +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True actor_rollout_ref.actor.freeze_vision_tower=True \\
 trainer.test_freq=5 trainer.save_freq=20 trainer.total_epochs=15 trainer.logger=console
"""


def test_a_script_of_images_passes_the_checks_and_plans_with_image_tokens(tmp_path, monkeypatch, capsys):
    (tmp_path / "geo.sh").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    assert command.main(["verl", "geo.sh", "--from-version=0.7", "--out=out"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("full") and "--config.plan.image_tokens=768" in said
    config = load_config(os.path.join("out", "geo.py"))
    check(config)
    assert tuple(config.model.frozen) == ("vision/.*",) and config.rollout.engine == "vllm" and config.rollout.placement == "colocated"
    assert "disable_mm_preprocessor_cache" not in config.rollout.vllm.engine_kwargs


TRL = {"num_processes": 8, "model_name_or_path": VL, "dataset_name": "a/rows"}


def test_trls_scripts_for_rows_with_images_are_their_jobs(tmp_path, capsys):
    """sft_vlm.py sets max_length to None itself, and loses on the places of images; mpo_vlm.py is DPO with several losses."""
    sft = of("trl", {**TRL, "max_length": 2048}, cmd="accelerate launch examples/scripts/sft_vlm.py")
    v = values(sft)
    assert v["run.recipe"] == "sft" and v["train.max_sequence_tokens"] == 8192 and sft.marks["max_length"][0] == "inert"
    assert any("places of images" in text for text in sft.different) and sft.facts["images"].startswith("column images")
    text = of("trl", {**TRL, "max_length": 2048, "completion_only_loss": True}, cmd="trl sft")
    assert values(text)["train.max_sequence_tokens"] == 2048 and not any("places of images" in said for said in text.different)
    mpo = of("trl", {**TRL, "loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}, cmd="python mpo_vlm.py")
    assert values(mpo)["preference.loss"] == ("dpo", "bco", "nll") and values(mpo)["preference.loss_weights"] == (0.8, 0.2, 1.0)
    for job in ("sft", "dpo", "rloo"):
        other = of("trl", {**TRL, "model_name_or_path": "HuggingFaceTB/SmolVLM2-2.2B-Instruct"}, cmd=f"python {job}_vlm.py")
        assert other.outcome(False) == "refused" and "whose tower is not read" in other.lacking[-1][1]
