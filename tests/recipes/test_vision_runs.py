"""Jobs on rows with images: the sampler and the trainer see the same, an export does, too, and a killed run goes on bitwise."""

import json
import signal

import jax
import numpy as np
import pytest
from helpers.run_tools import fingerprint, ledger, run
from helpers.tiers import nightly

import jaxrl
from jaxrl.config import load_config
from jaxrl.errors import ConfigError
from jaxrl.models.vision.config import vision_config
from jaxrl.resolve.spec import resolve
from jaxrl.run.data import image_lines
from jaxrl.run.python_api import PythonInputs
from jaxrl.run.session import Session
from jaxrl.run.setup import open_run

QUIET = {"log.console": "off", "log.tensorboard": False}


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly():
    """Programs that run for milliseconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def rows_of(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.full
@pytest.mark.parametrize("variant", ["tiny", nightly("gemma3_tiny"), nightly("qwen2_5_tiny")])
def test_a_policy_learns_from_pictures_and_its_export_answers_alike(tmp_path, variant):
    """Warm start and GRPO: log-probs of sampler and trainer agree; controls are evaluated; the export brings tower and sizes of pictures."""
    c = load_config(f"vision:{variant}", {"run.dir": str(tmp_path / "run"), "log.thumbnails": 1, **QUIET})
    summary = jaxrl.train(c)
    steps = [row for row in rows_of(tmp_path / "run") if "loss" in row]
    assert summary["finished"] and len(steps) == 2
    assert all(row["gap/max"] < 1e-4 and 0 < row["packing/patch_fill"] <= 1 for row in steps)
    of_images = [(row["gap/images"] / row["gap/mean"], row["rollout/image_fraction"], "gap/text" in row) for row in steps]
    assert of_images == [pytest.approx((1, 1, False), rel=1e-4)] * 2
    kept = {f"images/{path.name}" for path in (tmp_path / "run/images").iterdir()}
    asked = {name for file in (tmp_path / "run/rollouts").iterdir() for row in rows_of(file.parent, file.name) for name in row["images"]}
    assert len(kept) == 3 and len(kept & asked) == 2  # one of each step, one of the held-out set
    after = summary["eval_after"]["sets"]["test"]
    assert {"blank/accuracy", "swapped/accuracy", "accuracy"} <= after.keys()
    again = jaxrl.train(load_config(f"vision:{variant}", {
        "run.dir": str(tmp_path / "again"), "run.mode": "eval", "run.warm_start": "", "model.path": str(tmp_path / "run/export"), **QUIET}))
    name = "eval/step_{:08d}_test.jsonl"
    first, second = (rows_of(tmp_path / folder, name.format(step)) for folder, step in (("run", 2), ("again", 0)))
    assert [row["tokens"] for row in first] == [row["tokens"] for row in second] and len(first) == 16
    np.testing.assert_allclose([row["logprobs"][0] for row in first], [row["logprobs"][0] for row in second], atol=1e-5)
    assert again["eval"]["sets"]["test"]["blank/accuracy"] == after["blank/accuracy"]


def killed_and_resumed(tmp_path, config, timeout=300):
    """Options of a run of three steps from a warm start; one was killed in its third update and run again, in the folder `killed`."""
    assert run(tmp_path / "warm", "train.steps=3", config="configs/vision_sft.py:tiny")[0] == 0
    (tmp_path / "mine.py").write_text("def score(prompt, completion):\n    return float(len(set(completion)))\n")
    short = ("train.steps=3", "eval.before=False", "run.warm_start=", f"model.path={tmp_path}/warm/export", "optimizer.lr=1e-2",
             f"reward.functions={tmp_path}/mine.py:score")
    status, text = run(tmp_path / "killed", *short, "faults.plan='update.kill9@step=3',", config=config, timeout=timeout)
    assert status == -signal.SIGKILL, text
    status, text = run(tmp_path / "killed", *short, config=config, timeout=timeout)
    assert status == 0 and "resumed" in text, text
    assert all(row["optim/grad_norm"] > 0 for row in rows_of(tmp_path / "killed") if "loss" in row)  # there is something to lose
    return short


@pytest.mark.slow
def test_killed_and_resumed_is_bitwise_an_unbroken_run(tmp_path):
    short = killed_and_resumed(tmp_path, "configs/vision.py:tiny")
    assert run(tmp_path / "unbroken", *short, config="configs/vision.py:tiny")[0] == 0
    assert fingerprint(tmp_path / "killed") == fingerprint(tmp_path / "unbroken")


@pytest.mark.vllm
@pytest.mark.slow
def test_killed_and_resumed_with_vllm(tmp_path):
    """A new server gets weights and pictures anew: every sample is used once, and its log-probs are the trainer's in every step."""
    killed_and_resumed(tmp_path, "configs/vision_vllm.py:tiny", timeout=900)
    steps = [row for row in rows_of(tmp_path / "killed") if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3] and all(row["gap/max"] < 1e-4 and row["publish/probe"] < 1e-5 for row in steps)
    sampled = ledger(tmp_path / "killed", 0)
    assert [len(rows) for rows in sampled] == [16] * 3 and all(row["images"] for rows in sampled for row in rows)


@pytest.mark.full
def test_rows_without_images_train_the_text_model_alone(tmp_path):
    """Of the same config: no parameter of the tower, and no patches in the rows."""
    rows = [{"prompt": f"how many {colour} shapes?", "completion": "\\boxed{2}"} for colour in ("red", "green", "blue", "red")]
    c = load_config("vision_sft:tiny", {"run.dir": str(tmp_path / "run"), "train.steps": 1, "data.prompts_per_step": 2, "eval.sets": (),
                                        "eval.controls": (), "checkpoint.at_end": False, **QUIET})
    jaxrl.train(c, data=rows)
    from safetensors import safe_open
    with safe_open(tmp_path / "run/export/model.safetensors", "np") as f:
        names = set(f.keys())
    assert names and not any("visual" in name for name in names)


def test_controls_without_images_are_refused(tmp_path):
    rows = [{"prompt": "how many red shapes?", "completion": "\\boxed{2}", "answer": "2"}] * 4
    c = load_config("vision_sft:tiny", {"run.dir": str(tmp_path / "run"), "data.prompts_per_step": 2, "eval.sets": (), **QUIET})
    with pytest.raises(ConfigError, match="eval.controls=.*no row of eval.sets has an image"):
        jaxrl.train(c, data=rows, eval={"text": rows})


def test_controls_without_held_out_rows_name_the_option_that_gives_some(tmp_path):
    rows = [{"prompt": "how many red shapes?", "completion": "\\boxed{2}"}] * 4
    c = load_config("vision_sft:tiny", {"run.dir": str(tmp_path / "run"), "data.prompts_per_step": 2, "eval.sets": (), **QUIET})
    with pytest.raises(ConfigError, match="eval.controls=.*there are none: set eval.sets"):
        jaxrl.train(c, data=rows)


@pytest.mark.parametrize(("column", "message"), [
    ("images", "column 'photo' holds an image .'IMG_1.jpg'.*set data.image_column='photo'"),
    ("picture", "column 'photo' holds an image .'IMG_1.jpg'.*set data.image_column='photo'"),
])
def test_images_in_a_column_that_is_not_read_are_refused(tmp_path, column, message):
    rows = [{"prompt": "how many red shapes?", "completion": "\\boxed{2}", "photo": "IMG_1.jpg"}] * 4
    c = load_config("vision_sft:tiny", {"run.dir": str(tmp_path / "run"), "data.prompts_per_step": 2, "eval.sets": (), "eval.controls": (),
                                        "data.image_column": column, **QUIET})
    with pytest.raises(ConfigError, match=message):
        jaxrl.train(c, data=rows)


@pytest.mark.parametrize(("column", "held", "message"), [
    ("videos", [{"video": "clip", "fps": 2}], "column 'clips' holds a video that nothing reads: set data.video_column='clips', or"),
    ("videos", ["1.jpg", "2.jpg"], "set data.image_column='clips', or data.video_column='clips' if these are frames of a video, or"),
    ("", [{"video": "clip", "fps": 2}], None),  # left out on purpose
])
def test_videos_in_a_column_that_is_not_read_are_refused(tmp_path, column, held, message):
    row = {"prompt": "how many red shapes?", "completion": "\\boxed{2}", "clips": held}
    c = load_config("vision_sft:tiny", {"run.dir": str(tmp_path / "run"), "data.prompts_per_step": 2, "eval.sets": (), "eval.controls": (),
                                        "data.video_column": column, "data.max_prompt_tokens": 64, **QUIET})
    with Session(resolve(c), PythonInputs(data=[row] * 4)) as s:
        if message is None:
            assert open_run(s, with_engine=False).images is None
            return
        with pytest.raises(ConfigError, match=message):
            open_run(s, with_engine=False)


def test_a_column_of_images_that_no_row_has_is_refused(tmp_path):
    rows = [{"prompt": "how many red shapes?", "completion": "\\boxed{2}"}] * 4
    c = load_config("vision_sft:tiny", {"run.dir": str(tmp_path / "run"), "data.prompts_per_step": 2, "eval.sets": (), "eval.controls": (),
                                        "data.image_column": "photo", **QUIET})
    with pytest.raises(ConfigError, match="data.image_column='photo': no row has an image.*columns found: prompt, completion"):
        jaxrl.train(c, data=rows)


def test_a_held_out_set_whose_images_are_in_another_column_is_refused(tmp_path):
    rows = [{"prompt": "how many red shapes?", "completion": "\\boxed{2}", "answer": "2"}] * 4
    dot = np.zeros((24, 24, 3), np.uint8)
    c = load_config("vision_sft:tiny", {"run.dir": str(tmp_path / "run"), "data.prompts_per_step": 2, "eval.sets": (), "eval.controls": (), **QUIET})
    with pytest.raises(ConfigError, match="column 'picture' holds an image .'a.png'"):
        jaxrl.train(c, data=[row | {"images": [dot]} for row in rows], eval={"test": [row | {"picture": "a.png"} for row in rows]})


def test_the_start_says_which_images_are_read(tmp_path):
    """A job names its rows with images, their sizes and tokens; one of text on the same model says that there are none."""
    def started(name, **columns):
        rows = [{"prompt": "how many red shapes?", "completion": "\\boxed{2}"} | {k: v[i] for k, v in columns.items()} for i in range(3)]
        c = load_config("vision_sft:tiny", {
            "run.dir": str(tmp_path / name), "data.prompts_per_step": 2, "eval.sets": (), "eval.controls": (),
            "data.max_prompt_tokens": 64, "data.image_min_pixels": 64, "data.image_max_pixels": 4096, **QUIET})
        with Session(resolve(c), PythonInputs(data=rows)) as s:
            return image_lines(open_run(s, with_engine=False))

    dots = [np.zeros((h, w, 3), np.uint8) for h, w in ((24, 24), (32, 48), (24, 24))]
    assert started("with", images=[[dots[0]], [dots[1], dots[2]], []]) == [
        "images    2 of 3 rows, 1 to 2 a row, 24 x 24 to 48 x 32 pixels after resizing, 9 to 33 image tokens a row"]
    assert started("without") == ["images    none in the rows: the model trains on text alone, without its tower (data.image_column)"]


TOWERS = ("model.visual.", "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folder of a tiny Qwen2.5-VL that a job wrote, and its tensors."""
    return made(tmp_path_factory, "qwen2_5")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """The same of a tiny Gemma 3."""
    return made(tmp_path_factory, "gemma3")


def made(tmp_path_factory, kind):
    folder = tmp_path_factory.mktemp("base")
    jaxrl.train(load_config(f"vision_sft:{kind}_tiny", {"run.dir": str(folder), "train.steps": 1, "eval.sets": (), "eval.controls": (), **QUIET}))
    return folder / "export", tensors(folder / "export")


def tensors(folder):
    from safetensors.numpy import load_file
    return load_file(folder / "model.safetensors")


def moved(tmp_path, checkpoint, kind="qwen2_5", **options):
    """Largest change of (the tower, the language model) after two updates of a checkpoint."""
    c = load_config(f"vision_sft:{kind}_tiny", {
        "run.dir": str(tmp_path / "run"), "train.steps": 2, "eval.sets": (), "eval.controls": (), "model.path": str(checkpoint[0]),
        "model.init": "pretrained", "model.config": {}, "optimizer.weight_decay": 0.0, "optimizer.schedule": "constant", "optimizer.floor": 0.0,
        "optimizer.warmup_steps": 0, "optimizer.max_grad_norm": 0.0, **options, **QUIET})
    jaxrl.train(c)
    after, out = tensors(tmp_path / "run/export"), {True: 0.0, False: 0.0}
    assert after.keys() == checkpoint[1].keys()
    for name, before in checkpoint[1].items():
        out[name.startswith(TOWERS)] = max(out[name.startswith(TOWERS)], float(np.abs(after[name] - before).max()))
    return out[True], out[False], c.optimizer.lr


@pytest.mark.nightly  # of Cosmos-RL's freeze_pattern below, too, name by name
def test_a_frozen_tower_does_not_move(tmp_path, checkpoint):
    tower, text, _ = moved(tmp_path, checkpoint, **{"model.frozen": ("vision/.*",)})
    assert tower == 0 and text > 1e-4


@pytest.mark.nightly  # the paths of parameters are those of other towers
def test_the_tower_of_gemma_3_stays_or_moves(tmp_path, gemma):
    """Frozen, tower and projector are the checkpoint's to the bit; else they train."""
    tower, text, _ = moved(tmp_path, gemma, "gemma3", **{"model.frozen": ("vision/.*",)})
    assert tower == 0 and text > 1e-4
    tower, text, _ = moved(tmp_path / "again", gemma, "gemma3")
    assert tower > 1e-4 < text


@pytest.mark.nightly
def test_a_tower_learns_at_its_own_rate(tmp_path, checkpoint):
    """optimizer.groups: the first two steps of Adam are at most its rate long each."""
    tower, text, lr = moved(tmp_path, checkpoint, **{"optimizer.groups": {"vision": {"lr": 0.01}}})
    assert 0 < tower < 2.2 * 0.01 * lr and text > 0.5 * lr


@pytest.mark.nightly
@pytest.mark.parametrize("exclude", [(), nightly((".*visual.*",))])
def test_adapters_of_a_job_with_images(tmp_path, checkpoint, exclude):
    """GRPO: sampler and trainer agree, and the merged export has a tower that moved only if it is adapted."""
    c = load_config("vision:qwen2_5_tiny", {
        "run.dir": str(tmp_path / "run"), "run.warm_start": "", "model.path": str(checkpoint[0]), "lora.rank": 4, "lora.exclude": exclude,
        "lora.export": "merged", "optimizer.lr": 1e-2, "reward.functions": ("tests/recipes/test_vision_runs.py:many_tokens",), **QUIET})
    assert jaxrl.train(c)["finished"]
    steps = [row for row in rows_of(tmp_path / "run") if "loss" in row]
    assert len(steps) == 2 and all(row["gap/max"] < 1e-4 for row in steps)
    after = tensors(tmp_path / "run/export")
    same = {name for name, before in checkpoint[1].items() if np.array_equal(after[name], before)}
    assert {n for n in after if n.startswith("model.visual.")} <= same or not exclude
    assert any(n.startswith("model.visual.blocks") and n not in same for n in after) == (not exclude)
    assert any("layers" in n and n not in same for n in after)


def many_tokens(completion):
    """A reward that tells random completions apart."""
    return float(len(set(completion)))


@pytest.mark.vllm
@pytest.mark.slow
def test_rollouts_with_pictures_by_vllm(tmp_path):
    """GRPO through a real server: its log-probs are the trainer's, in training and evaluation; the tower trains and every publish is probed."""
    c = load_config("vision_vllm:tiny", {"run.dir": str(tmp_path / "run"), "rollout.verify_weights": "always", **QUIET})
    summary = jaxrl.train(c)
    steps = [row for row in rows_of(tmp_path / "run") if "loss" in row]
    assert summary["finished"] and len(steps) == 2 and all(row["gap/max"] < 1e-4 and row["publish/probe"] < 1e-5 for row in steps)
    assert {"blank/accuracy", "swapped/accuracy", "accuracy"} <= summary["eval_after"]["sets"]["test"].keys()


COSMOS = """[train]
train_batch_per_replica = 8
[train.train_policy]
type = "{type}"
dataset.name = "rows.jsonl"
conversation_column_name = "messages"
[policy]
model_name_or_path = "{model}"
{policy}
"""


def of_cosmos_rl(tmp_path, checkpoint, policy="", kind="sft", more="", name="Qwen2.5-VL-tiny"):
    """Options that a Cosmos-RL config of a checkpoint becomes. name: the trained one's; the teacher's is Qwen2.5-VL-tiny."""
    from jaxrl.migrate import __main__ as command
    for one in {name, "Qwen2.5-VL-tiny"}:
        (tmp_path / one).symlink_to(checkpoint[0], target_is_directory=True)
    model, teacher = tmp_path / name, tmp_path / "Qwen2.5-VL-tiny"
    (tmp_path / "job.toml").write_text(COSMOS.format(type=kind, model=model, policy=policy) + more.format(model=teacher))
    assert command.main(["cosmos_rl", str(tmp_path / "job.toml"), "--gpus=1", f"--out={tmp_path / 'out'}"]) == 0
    c = load_config(str(tmp_path / "out" / "job.py"))
    assert c.model.path == str(model)
    return c


@pytest.mark.full
@pytest.mark.parametrize(("policy", "moves"), [
    nightly('freeze_pattern = ["^visual"]', lambda name: not name.startswith("model.visual.")),
    ('trainable_map = { "visual.merger" = true }', lambda name: name.startswith("model.visual.merger.")),
    nightly("trainable_map = { visual = false }", lambda name: not name.startswith("model.visual.")),
    nightly("", lambda name: True),
])
def test_what_cosmos_rl_freezes_of_a_qwen2_5_vl_stays_where_it_is(tmp_path, checkpoint, policy, moves):
    """policy.model_name_or_path, freeze_pattern and trainable_map, as its documents set them, by what two updates change."""
    c = of_cosmos_rl(tmp_path, checkpoint, policy)
    moved(tmp_path, checkpoint, **{"model.frozen": tuple(c.model.frozen), "model.trainable": tuple(c.model.trainable), "model.path": c.model.path})
    after = tensors(tmp_path / "run/export")
    still = {name for name, before in checkpoint[1].items() if np.array_equal(after[name], before)}
    assert still == {name for name in after if not moves(name)}, sorted(still ^ {n for n in after if not moves(n)})[:5]


@pytest.mark.nightly
def test_a_qwen2_5_vl_is_the_teacher_that_a_cosmos_rl_config_names(tmp_path, checkpoint):
    """distillation.model_name_or_path: of rows of text, which its text model judges. A student that is its teacher has nothing to learn."""
    c = of_cosmos_rl(tmp_path, checkpoint, kind="grpo", more='[distillation]\nenable = true\nmodel_name_or_path = "{model}"\n', name="student")
    assert c.teacher.path == str(tmp_path / "Qwen2.5-VL-tiny") and c.run.recipe == "distill"
    rows = [{"prompt": f"how many {colour} shapes?"} for colour in ("red", "green", "blue", "red")]
    job = load_config("vision:qwen2_5_tiny", {
        "run.dir": str(tmp_path / "run"), "run.recipe": "distill", "run.warm_start": "", "model.path": c.model.path, "teacher.path": c.teacher.path,
        "teacher.dtype": "fp32", "distill.loss": c.distill.loss, "data.image_column": "", "data.image_min_pixels": None,
        "data.image_max_pixels": None, "reward.functions": (), "data.answer_column": "", "train.steps": 1, "data.prompts_per_step": 2,
        "eval.sets": (), "eval.controls": (),
        "eval.before": False, "eval.after": False, **QUIET})
    jaxrl.train(job, data=rows)
    step = next(row for row in rows_of(tmp_path / "run") if "distill/divergence" in row)
    assert abs(step["distill/divergence"]) < 1e-5 and step["advantage/abs_mean"] < 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize("variant", ["tiny_rl", nightly("tiny_qwen2_5_rl"), nightly("tiny_qwen2_rl")])
def test_a_policy_learns_from_videos_and_its_export_answers_alike(tmp_path, variant):
    """Warm start and GRPO on configs/video.py: sampler and trainer agree, controls are evaluated, and the export takes videos as the job did."""
    c = load_config(f"video:{variant}", {"run.dir": str(tmp_path / "run"), **QUIET})
    summary = jaxrl.train(c)
    steps = [row for row in rows_of(tmp_path / "run") if "loss" in row]
    assert summary["finished"] and len(steps) == 2 and all(row["gap/max"] < 1e-4 for row in steps)
    stored = json.loads((tmp_path / "run/export/video_preprocessor_config.json").read_text())
    assert stored["size"]["longest_edge"] == c.data.video_max_pixels and stored["temporal_patch_size"] == 2
    again = jaxrl.train(load_config(f"video:{variant}", {
        "run.dir": str(tmp_path / "again"), "run.mode": "eval", "run.warm_start": "", "model.path": str(tmp_path / "run/export"),
        "data.video_max_pixels": None, **QUIET}))
    after, before = again["eval"]["sets"]["test"], summary["eval_after"]["sets"]["test"]
    assert {name: after[name] for name in ("accuracy", "blank/accuracy", "swapped/accuracy")} == {
        name: before[name] for name in ("accuracy", "blank/accuracy", "swapped/accuracy")}


@pytest.mark.nightly  # images with adapters, kept features and videos have cases of their own
@pytest.mark.parametrize("options", [{"lora.rank": 4, "lora.export": "merged"}, {"model.frozen": ("vision/.*",)}], ids=["adapters", "frozen"])
def test_videos_with_adapters_and_with_kept_features(tmp_path, options, monkeypatch):
    """GRPO: sampler and trainer agree behind an update that moves the tower or leaves it; the features of a frozen one are made once for each
    video, and the run is the one with fresh features."""
    from jaxrl.roles.kept_features import KeptFeatures
    made, make = [], KeptFeatures._make
    monkeypatch.setattr(KeptFeatures, "_make", lambda self, pictures, rows: (
        made.extend(pictures.numbers[[i for row in rows for i in row]].tolist()), make(self, pictures, rows))[1])
    jaxrl.train(load_config("video:tiny_short", {"run.dir": str(tmp_path / "warm"), "eval.sets": (), "eval.controls": (), **QUIET}))
    before, losses = tensors(tmp_path / "warm/export"), []
    for features in ("auto", "fresh")[:2 if "model.frozen" in options else 1]:
        jaxrl.train(load_config("video:tiny_rl", {
            "run.dir": str(tmp_path / features), "run.warm_start": "", "model.path": str(tmp_path / "warm/export"), "eval.sets": (),
            "eval.controls": (), "train.steps": 3, "data.max_rows": 4, "optimizer.lr": 1e-3, "optimizer.warmup_steps": 0,
            "reward.functions": ("tests/recipes/test_vision_runs.py:many_tokens",), "train.image_features": features, **options, **QUIET}))
        steps, after = [row for row in rows_of(tmp_path / features) if "loss" in row], tensors(tmp_path / features / "export")
        assert len(steps) == 3 and all(row["gap/max"] < 1e-4 for row in steps) and any(row["loss"] for row in steps)
        losses.append([row["loss"] for row in steps])
        moved = {name.startswith(TOWERS) for name, leaf in before.items() if not np.array_equal(after[name], leaf)}
        assert moved == ({False} if "model.frozen" in options else {False, True})
    if "model.frozen" in options:
        assert made and len(made) == len(set(made))
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4, atol=1e-5)
    else:
        assert not made


def test_vllm_refuses_videos_by_name():
    from jaxrl.rollout.engines import check_tower_served
    c = load_config("video:rl", {"rollout.engine": "vllm"})
    tower = vision_config({"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16, "num_position_embeddings": 4,
                           "deepstack_visual_indexes": [], "video": True}, "qwen3", 16, 2)
    with pytest.raises(ConfigError, match="rollout.engine=vllm with model_type=qwen3_vl_text and rows with videos"):
        check_tower_served(c, {"model_type": "qwen3_vl_text"}, tower)
