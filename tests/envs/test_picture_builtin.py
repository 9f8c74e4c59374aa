"""The shipped environments that show pictures: their rules and pictures, their rows, and that these fit the configs."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers.tiers import first_cases
from PIL import Image
from transformers import AutoTokenizer

import jaxrl
from jaxrl.config.load import load_config, put
from jaxrl.data import resolve
from jaxrl.envs import builtin, pixels

sys.path.insert(0, str(Path(__file__).parents[2] / "evidence"))
import env_data  # noqa: E402
import picture_env_data as make  # noqa: E402

NAMES = ("lake_pixels", "spot")
ROW = {"scene": [[4.0, 12.0, 3.0, "red", "circle"], [20.0, 20.0, 3.0, "blue", "square"]], "target": 0,
       "side": 24, "ground": 128}


def read(name, file):
    if file in ("sft", "lazy"):
        return pq.read_table(resolve(f"jaxrl://{name}/{file}.parquet")).to_pylist()
    return [json.loads(line) for line in Path(resolve(f"jaxrl://{name}/{file}.jsonl")).read_text().splitlines()]


def shown(observation):
    part, = [part for part in observation.text if part["type"] == "image"]
    return np.asarray(Image.open(io.BytesIO(part["image"])))


# -- rules ---------------------------------------------------------------------------------------------------------------

def test_a_lake_is_drawn():
    """Every cell of a map has its own look, the state is the map, and a step is that of `lake`."""
    world, cells = builtin.LakePixels(), ".#OGBTP*+WX"
    drawn = shown(builtin.drawn(cells))
    tiles = [drawn[:, 8 * i:8 * i + 8].tobytes() for i in range(len(cells))]
    assert drawn.shape == (8, 88, 3) and len(set(tiles)) == len(cells) and set(pixels.THINGS) == set(cells)
    seen = world.reset({"map": "PG\nO#"}, 3)
    assert seen.state == "PG\nO#" and shown(seen).shape == (16, 16, 3)
    step = world.step("right")
    assert (step.reward, step.done, step.observation.state) == (1.0, True, ".W\nO#")


def test_spot_is_won_by_a_point_in_the_box():
    world = builtin.Spot()
    first = shown(world.reset(ROW, 0))
    assert first.shape == (24, 24, 3) and tuple(first[12, 4]) == pixels.RED and tuple(first[20, 20]) == pixels.BLUE
    assert tuple(first[0, 0]) == (128,) * 3
    missed = world.step("8 8")
    again = shown(missed.observation)
    assert not missed.done and missed.reward == 0 and missed.observation.text[1] == {"type": "text", "text": "click the red circle"}
    assert (again != first).any() and (again[20, 20] == 0).all(), "a cross where it clicked"
    for said in ("", "12", "the 1 4", "1 2 3", "10 4", "-1 4", "1 4 "):
        step = builtin.Spot.step(world, said)
        assert step.done == (said == "1 4 ") == (step.reward == 1.0)


@pytest.mark.parametrize("x, y, inside", [(1.0, 9.0, True), (7.0, 15.0, True), (7.1, 12.0, False), (4.0, 15.1, False)])
def test_the_box_has_its_edges(x, y, inside):
    assert builtin.in_box(ROW["scene"][0], x, y) == inside


# -- rows ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
def test_rows_are_what_the_script_makes_and_fit_the_configs(name, tmp_path):
    """The first rows of every file again; the longest of them, and the number of steps of the warm start."""
    import random
    tokenizer = AutoTokenizer.from_pretrained(resolve("jaxrl://pictures/tokenizer"))
    rl, sft = load_config(f"env:{name}"), load_config(f"env_sft:{name}")
    for file, count in make.COUNTS[name].items():
        rows = read(name, file)
        assert len(rows) == count and rows[:20] == getattr(make, name)(file, 20, random.Random(f"{name}/{file}"))
        for row in sorted(rows, key=lambda row: -len(row["prompt"]))[:20]:
            prompt = row["prompt"]
            messages = [{"role": "user", "content": f"<image>{prompt}"}] if isinstance(prompt, str) else prompt
            text = tokenizer.apply_chat_template(messages, tokenize=False).replace("<image>", "")
            ids, pictures = tokenizer(text, add_special_tokens=False)["input_ids"], sum(m["role"] == "user" for m in messages)
            assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text
            assert len(ids) + 16 * pictures <= min(rl.train.max_sequence_tokens, sft.data.max_prompt_tokens + sft.rollout.max_new_tokens)
            assert {"spot": 9, "lake_pixels": 16}[name] * pictures <= rl.env.image_tokens and len(row.get("images", ())) in (0, pictures)
    for name_, text in make.tokenizer_files().items():
        assert (Path(resolve("jaxrl://pictures/tokenizer")) / name_).read_text("utf-8") == text
    rows = sum(len(read(name, Path(path).stem)) for path in sft.data.path)
    assert sft.train.steps * sft.data.prompts_per_step == rows and len(tokenizer) <= sft.model.config.text_config.vocab_size


def test_demonstrations_do_what_pays_and_the_lazy_ones_seldom():
    """Of `spot`, the first click; a picture is the one that the environment shows after the clicks before. (Maps are those of `lake`.)"""
    shares = []
    for file in ("sft", "lazy"):
        rows, hits = read("spot", file), 0
        for row in rows:
            said = [m["content"] for m in row["prompt"] if m["role"] == "assistant"]
            hits += len(said) == 1
        shares.append(hits / len(rows))
    assert shares[0] == 1.0 and 0.35 < shares[1] < 0.6, shares
    assert {row["map"] for row in read("lake_pixels", "train")}.isdisjoint(row["map"] for row in read("lake_pixels", "test"))
    assert all(2 <= len(env_data.ways(row["map"])[0]) <= 6 for row in read("lake_pixels", "test"))


# -- a run ---------------------------------------------------------------------------------------------------------------

@pytest.mark.full
@first_cases(1, "name", NAMES, full=0)
def test_it_trains(tmp_path, name):
    trains(tmp_path, name)


@pytest.mark.vllm
@pytest.mark.slow
def test_it_trains_through_vllm(tmp_path):
    """Each turn's request has all pictures of its conversation: a map for each turn."""
    trains(tmp_path, "lake_pixels", {"rollout.engine": "vllm", "rollout.slots": 0, "rollout.compaction": True, "rollout.vllm.setup_seconds": 600.0})


def trains(tmp_path, name, changes=()):
    """Two steps from random weights: log-probs of sampler and trainer agree, grey pictures are a control."""
    few = {"data.prompts_per_step": 2, "rollout.group_size": 2, "rollout.slots": 4, "train.steps": 2, "env.workers": 1, "eval.max_rows": 2,
           "log.tensorboard": False, "log.console": "off", "run.dir": str(tmp_path / "run"), "run.warm_start": "", "model.init": "random",
           "model.tokenizer": "jaxrl://pictures/tokenizer",
           "rollout.stop_token_ids": tuple(range(3, 60)), **dict(changes)}  # or no turn of random weights would end before its limit
    config = load_config(f"env:{name}", few)
    put(config, "model.config", load_config(f"env_sft:{name}").model.config.to_dict())
    summary = jaxrl.train(config)
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in steps if "loss" in row]
    assert summary["finished"] and len(steps) == 2 and "blank/accuracy" in summary["eval_after"]["sets"]["test"]
    assert all(row["gap/max"] < 1e-4 and row["packing/patch_fill"] > 0 for row in steps)
    asked = [json.loads(line) for line in (tmp_path / "run/rollouts/step_00000002.jsonl").read_text().splitlines()]
    assert any(sum(piece["trained"] for piece in row["episode"]) > 1 for row in asked) and any((tmp_path / "run/images").iterdir())
