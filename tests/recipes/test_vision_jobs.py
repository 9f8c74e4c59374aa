"""Jobs on rows with images beside SFT and GRPO: each runs from a config to its end with blind controls, and goes on after a stop as if
there had been none."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.run_tools import fingerprint
from helpers.tiers import nightly
from safetensors.numpy import load_file

import jaxrl
from jaxrl.config import load_config
from jaxrl.errors import ConfigError
from jaxrl.models.families import FAMILIES
from jaxrl.recipes.distill import join_batches
from jaxrl.recipes.sft import demonstrations
from jaxrl.roles import teacher_files, towers
from jaxrl.roles.kept_features import KeptFeatures
from jaxrl.run import model_checks
from jaxrl.types import Places

QUIET = {"log.console": "off", "log.tensorboard": False}
MODEL = {"model_type": "qwen3_vl", "image_token_id": 5, "vision_start_token_id": 3, "vision_end_token_id": 4, "video_token_id": 5,
         "tie_word_embeddings": True,
         "text_config": {"model_type": "qwen3_vl_text", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                         "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 32, "max_position_embeddings": 256,
                         "tie_word_embeddings": True, "initializer_range": 0.2,
                         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
         "vision_config": {"model_type": "qwen3_vl_vision", "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "patch_size": 4,
                           "out_hidden_size": 32, "num_position_embeddings": 36, "deepstack_visual_indexes": [0], "initializer_range": 0.5}}
RANDOM = {"model.init": "random", "model.tokenizer": "jaxrl://shapes/tokenizer", "model.config": MODEL}


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly():
    """Programs that run for milliseconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def job(name, folder, **options):
    """A run of two steps of a one-layer model whose checkpoints are of every step."""
    return load_config(f"vision_jobs:{name}_tiny", {
        "run.dir": str(folder), "run.warm_start": "", "train.steps": 2, "checkpoint.every_steps": 1, "train.row_lengths": (128,),
        "train.tokens_per_microbatch": 256, "eval.max_rows": 8, **RANDOM, **QUIET, **options})


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


BOXED = {"reward.model.path": "", "reward.model.dtype": "bf16", "reward.weights": ()}
PAIRS = {"eval.sets": ("pairs=jaxrl://shapes/pairs_test.parquet",), "eval.before": False}


@pytest.mark.full
def test_pairs_of_a_picture_train_a_policy(tmp_path):
    """Policy and reference begin equal, pictures tell completions apart, and each control is measured."""
    summary = jaxrl.train(job("dpo", tmp_path / "run", **PAIRS))
    steps = [line for line in lines(tmp_path / "run") if "reward/margin" in line]
    assert summary["finished"] and steps[0]["loss"] == pytest.approx(np.log(2)) and steps[0]["reward/margin"] == pytest.approx(0.0, abs=1e-5)
    assert 0 < steps[0]["packing/patch_fill"] <= 1
    after = steps[-1]
    losses = [after[f"eval/pairs/{control}loss"] for control in ("", "blank/", "swapped/")]
    assert len(set(losses)) == 3 and {"eval/pairs/blank/accuracy", "eval/pairs/swapped/accuracy", "eval/pairs/reward/accuracy"} <= after.keys()


@pytest.mark.full
def test_a_reward_model_that_sees_is_trained_and_scores_a_policy(tmp_path):
    """Its export has tower and head; in GRPO its scores are those that it gives the sampled completions and their pictures."""
    jaxrl.train(job("reward_model", tmp_path / "scorer", **PAIRS))
    assert {"eval/pairs/accuracy", "eval/pairs/blank/accuracy", "eval/pairs/swapped/accuracy"} <= lines(tmp_path / "scorer")[-1].keys()
    config = json.loads((tmp_path / "scorer/export/config.json").read_text())
    assert config["architectures"] == ["Qwen3VLForSequenceClassification"] and config["text_config"]["num_hidden_layers"] == 1
    from safetensors import safe_open
    with safe_open(tmp_path / "scorer/export/model.safetensors", "np") as f:
        names = set(f.keys())
    assert {"score.weight", "model.visual.merger.linear_fc1.weight", "model.language_model.norm.weight"} <= names
    c = job("rl", tmp_path / "run", **{"reward.model.path": str(tmp_path / "scorer/export"), "eval.sets": (), "eval.controls": (), "train.steps": 1,
                                       "reward.model.weight": 3.0})
    jaxrl.train(c)
    scores = [row["reward"]["parts"]["reward_model"] for row in map(json.loads, next((tmp_path / "run/rollouts").iterdir()).read_text().splitlines())]
    assert len(scores) == 16 and len(set(scores)) > 8 and np.isfinite(scores).all()


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, nightly({"distill.loss": "forward", "distill.on_policy": 0.5,
                                                  "data.path": ("jaxrl://shapes/sft.parquet",)}),
                                     nightly({"distill.loss": "forward", "distill.top_k": 4, "distill.on_policy": 0.0,
                                              "data.path": ("jaxrl://shapes/sft.parquet",), "teacher.save": "said",
                                              "distill.on_prompt": True})])
def test_a_teacher_that_sees_teaches(tmp_path, options):
    """A teacher that is the student agrees with it; another one does not. A file of what it said teaches the same."""
    jaxrl.train(job("dpo", tmp_path / "teacher", **{**PAIRS, "run.seed": 1, "eval.sets": (), "eval.controls": (), "train.steps": 1}))
    none = {"eval.sets": (), "eval.controls": (), "teacher.path": str(tmp_path / "teacher/export"), "distill.on_policy": 1.0, **options}
    none |= {"teacher.save": str(tmp_path / "said")} if "teacher.save" in options else {}
    jaxrl.train(job("distill", tmp_path / "run", **none))
    apart = [line["distill/divergence"] for line in lines(tmp_path / "run") if "distill/divergence" in line]
    assert len(apart) == 2 and min(apart) > 1e-3
    same = {**none, **{"model.path": none["teacher.path"], "model.init": "pretrained", "model.config": {}, "model.tokenizer": ""}}
    same.pop("teacher.save", None)
    jaxrl.train(job("distill", tmp_path / "same", **same, **{"train.steps": 1}))
    assert abs([line["distill/divergence"] for line in lines(tmp_path / "same") if "distill/divergence" in line][0]) < 1e-5
    if "teacher.save" in options:
        files = {**none, "teacher.save": "", "teacher.path": "", "teacher.files": str(tmp_path / "said")}
        jaxrl.train(job("distill", tmp_path / "again", **files, **{"teacher.dtype": "bf16"}))
        assert fingerprint(tmp_path / "again")["export/model.safetensors"] == fingerprint(tmp_path / "run")["export/model.safetensors"]


@pytest.mark.nightly
@pytest.mark.parametrize("name, options", [("dpo", PAIRS), ("reward_model", PAIRS)])
def test_a_stopped_job_goes_on_bitwise(tmp_path, name, options):
    options = {**options, "optimizer.schedule": "constant"}
    jaxrl.train(job(name, tmp_path / "whole", **options))
    jaxrl.train(job(name, tmp_path / "parts", **{**options, "train.steps": 1, "eval.sets": (), "eval.controls": ()}))
    jaxrl.train(job(name, tmp_path / "parts", **options))
    last = [{k: v for k, v in lines(tmp_path / run)[-1].items() if k != "time"} for run in ("whole", "parts")]
    assert last[0] == last[1]
    assert fingerprint(tmp_path / "whole")["export/model.safetensors"] == fingerprint(tmp_path / "parts")["export/model.safetensors"]


@pytest.mark.nightly
@pytest.mark.parametrize("shared", [False, nightly(True)])
def test_a_critic_sees(tmp_path, shared):
    """PPO with a critic of its own trunk and tower, and with the policy's: values are trained, and differ with the picture alone."""
    c = job("rl", tmp_path / "run", **BOXED, **{"algorithm.preset": "ppo", "critic.shared": shared, "eval.sets": (), "eval.controls": ()})
    jaxrl.train(c)
    steps = [line for line in lines(tmp_path / "run") if "value/loss" in line]
    assert len(steps) == 2 and all(np.isfinite(line["value/loss"]) and line["packing/patch_fill"] > 0 for line in steps)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [nightly("dpo"), "rl", nightly("distill")])
def test_a_frozen_tower_is_computed_once_for_each_picture(tmp_path, name, monkeypatch):
    """Whatever passes read it, over both passes over the data; the run is the one with fresh features."""
    made, make = [], KeptFeatures._make
    monkeypatch.setattr(KeptFeatures, "_make", lambda self, pictures, rows: (
        made.extend(pictures.numbers[[i for row in rows for i in row]].tolist()), make(self, pictures, rows)))
    options = {"model.frozen": ("vision/.*",), "eval.sets": (), "eval.controls": (), "train.steps": 3, "data.max_rows": 8, "checkpoint.at_end": False,
               "optimizer.lr": 1e-4} | ({} if name == "distill" else {"reference.dtype": "fp32"})
    if name == "distill":
        jaxrl.train(job("dpo", tmp_path / "teacher", **{**PAIRS, "run.seed": 1, "eval.sets": (), "eval.controls": (), "train.steps": 1}))
        options |= {"teacher.path": str(tmp_path / "teacher/export"), "distill.on_policy": 0.0, "distill.loss": "forward",
                    "data.path": ("jaxrl://shapes/sft.parquet",)}
    if name == "rl":
        options |= {**BOXED, "algorithm.kl.coef": 0.1, "algorithm.kl.placement": "loss"}
    losses = []
    for kind in ("auto", "fresh"):
        jaxrl.train(job(name, tmp_path / kind, **options, **{"train.image_features": kind}))
        losses.append([line["loss"] for line in lines(tmp_path / kind) if "loss" in line])
        assert len(made) == len(set(made)) == 8
    assert len(losses[0]) == 3
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4, atol=1e-5)
    weights = [load_file(tmp_path / kind / "export/model.safetensors") for kind in ("auto", "fresh")]
    assert all(np.abs(a - weights[1][k]).max() < 1e-3 for k, a in weights[0].items())


# -- parts -------------------------------------------------------------------------------------------------------------


def example(number, prompt=6, completion=3):
    ids = np.arange(10, 10 + prompt + completion, dtype=np.int32)
    return SimpleNamespace(prompt_ids=ids[:prompt], target_ids=ids[prompt:], trained=None,
                           images=Places(np.array([1]), np.array([[2, 4]]), np.array([number])))


SOURCE = SimpleNamespace(merge=2, width=48, window=0, two_way=False, frames=1,
                         patches=lambda numbers: [np.full((8, 48), n % 100, np.uint8) for n in numbers])


def test_batches_of_both_kinds_keep_their_pictures():
    """Of the student's completions and of rows; no image token is scored with the prompt."""
    a, b = (demonstrations([example(n) for n in numbers], range(len(numbers)), False, SOURCE) for numbers in ((1, 2), (3, 4, 5)))
    joined = join_batches([a, b], on_prompt=True)
    assert joined.pictures.sequences.tolist() == [0, 1, 2, 3, 4] and joined.pictures.numbers.tolist() == [1, 2, 3, 4, 5]
    assert [np.flatnonzero(mask).tolist() for mask in joined.loss_mask.reshape(5, 9)] == [[3, 4, 5, 6, 7, 8]] * 5
    assert join_batches([b], on_prompt=True).pictures.numbers.tolist() == [3, 4, 5]
    assert joined.pictures.select([4, 0]).numbers.tolist() == [5, 1] and joined.pictures.select([4, 0]).sequences.tolist() == [0, 1]


def test_what_a_teacher_said_belongs_to_its_picture():
    """The same words behind another picture are another key in its files; the same picture under another number is not."""
    keys = [teacher_files.keys_of(demonstrations([example(n)], [0], False, SOURCE))[0] for n in (1, 2, 101)]
    text = demonstrations([SimpleNamespace(**{**vars(example(1)), "images": None})], [0], False)
    assert keys[0] != keys[1] and keys[0] == keys[2]
    assert teacher_files.keys_of(text)[0] == teacher_files.key(text.tokens, text.loss_mask) not in keys


def test_models_that_see_other_images_are_refused(tmp_path):
    """A teacher or reward model without a tower, or with one that cuts or normalises otherwise."""
    half = dict(mean=(0.5,) * 3, std=(0.5,) * 3)
    images = SimpleNamespace(rule=SimpleNamespace(patch=4, merge=2, frames=2, **half), **half, window=0, videos=False)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    assert towers.read_tower_config(str(tmp_path), None, images)["jaxrl_images"]["depth"] == 2
    assert "jaxrl_images" not in towers.read_tower_config(str(tmp_path), None)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.4, 0.5, 0.5]}))
    with pytest.raises(ConfigError, match=r"sees other images than the policy's: mean is \(0.4, 0.5, 0.5\)"):
        towers.read_tower_config(str(tmp_path), None, images)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "vision_config": {**MODEL["vision_config"], "patch_size": 8}}))
    with pytest.raises(ConfigError, match="patch is 8 and the policy's 4"):
        towers.read_tower_config(str(tmp_path), None, images)
    text = {k: v for k, v in MODEL["text_config"].items() if k not in ("rope_parameters",)} | {"model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(text))
    with pytest.raises(ConfigError, match="the data holds images, and this model .model_type=qwen3. is read without a tower"):
        towers.read_tower_config(str(tmp_path), None, images)


def test_teachers_on_servers_are_refused_with_images(tmp_path):
    with pytest.raises(ConfigError, match=r"the data holds images, and teacher.servers=\('http://localhost:1',\) does not"):
        jaxrl.train(job("distill", tmp_path, **{"teacher.servers": ("http://localhost:1",), "teacher.path": "x", "teacher.dtype": "bf16",
                                                "eval.sets": (), "eval.controls": ()}))


def test_a_family_without_a_classifier_is_refused_with_the_remedy():
    """Read without its tower, a reward model would have no class to be written as."""
    with pytest.raises(ConfigError, match="model_type=qwen3_vl_text: transformers has no sequence classifier .*; rows with images train one"):
        model_checks.check_classifier(load_config("vision_jobs:reward_model"), "qwen3_vl_text")
    with pytest.raises(ConfigError, match="choose a model of another family$"):
        model_checks.check_classifier(load_config("reward_model"), next(k for k, f in FAMILIES.items() if not f.classifies and not f.vision))
