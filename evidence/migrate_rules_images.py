"""What a config of images means, from the sources' code alone. Written by someone who had read neither jaxrl's reader of images
(migrate/systems/images_meaning.py) nor its first rules (migrate_rules.images); who had read migrate/images.py, which all systems share.

verl b178a3c, v0.9.0: utils/dataset/rl_dataset.py, vision_utils.py, workers/fsdp_workers.py, vllm_async_server.py, utils/reward_score/geo3k.py;
ROLL 8eb27cc: datasets/vlm_dataset_utils.py, configs/data_args.py, models/model_providers.py; RLinf a3816b5: data/datasets/vlm/base.py, robo2vlm.py,
algorithms/rewards/vqa; AReaL 4aef98d: dataset/clevr_count_70k.py, geometry3k.py, reward/ of the same names; SkyRL a956457.
What the config cannot hold has to be said in the report: `said` looks for a word in what it asks, lacks and names as different.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

SEES = re.compile(r"(?i).*qwen(2|2\.5|3)-?vl.*")
GEO3K = "hiyouga/geometry3k"


def seen(system: str, k, c, version: str, report: dict, out: Path) -> dict:
    """what -> (ours, theirs) of a job of images; {} of others."""
    if not SEES.match(str(c.model.path)) or c.data.image_column == "":
        return {}
    rules = {"verl": _verl, "roll": _roll, "rlinf": _rlinf, "areal": _areal, "skyrl": _skyrl}.get(system)
    return rules(k, c, version, report, out) if rules else {}


def said(report: dict, *words: str) -> bool:
    texts = [*report["needs_you"], *report["differs"], *(e["why"] for e in report["lacks"]), *(key["note"] for key in report["keys"])]
    return any(word.lower() in text.lower() for text in texts for word in words)


def score(c, out: Path, completion: str, answer: str, **row) -> float | None:
    """What the migrated reward says; None where it is no file beside the config."""
    name = next((f for f in c.reward.functions if "_reward.py" in str(f)), None)
    if name is None:
        return None
    space: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(Path(str(name).partition(":")[0]).read_text(), space)
        found = space["score"]
        getattr(found, "prepare", lambda: None)()
        return found("a question", completion, answer, **row)


def frozen(c) -> bool:
    return any("vision" in str(p) for p in c.model.frozen)


def _verl(k, c, version, report, out) -> dict:
    a, r = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    if c.run.recipe == "sft":
        return {"image column": (c.data.image_column, k("data.image_key", default="images")), "all turns": (c.data.train_turns, "all")}
    megatron = k(a + "strategy") == "megatron" or "megatron" in str(k.raw("--config-name", "")) + str(k.raw("model_engine", ""))
    rows = {
        "image column": (c.data.image_column, k("data.image_key", default="images")),
        "tower frozen": (frozen(c), bool(k(a + "freeze_vision_tower", default=False)) and not megatron and float(version) < 0.8),
        "engine": (c.rollout.engine, "vllm"),
        "never cut": (c.data.overlong_prompt in ("filter", "error"), True),
    }
    if k(r + "limit_images"):
        rows["most images"] = (c.data.max_images, k(r + "limit_images"))
    if "visual" in str(k.raw("actor_rollout_ref.model.exclude_modules", "")):
        rows["adapters of the tower"] = (any("visual" in str(p) for p in c.lora.exclude), True)  # names of modules there and here
    if "geo3k" in str(k.raw("data.train_files", "")):  # rows of examples/data_preprocess/geo3k.py
        rows["rewards"] = (
            tuple(
                score(c, out, text, "5", data_source=GEO3K)
                for text in ("<think>a</think> \\boxed{5}", "\\boxed{5}", "<think>a</think> \\boxed{4}", "5")
            ),
            (1.0, 0.9, 0.1, 0.0),
        )
    return rows


def _roll(k, c, version, report, out) -> dict:
    data, args = "actor_train.data_args.", "actor_train.model_args."
    video = k.raw(data + "custom_data_kwargs_func") is not None
    if video or report["job"]:
        return {}
    return {
        "image column": (c.data.image_column, "images"),
        "prompt column": (c.data.prompt_column, "prompt"),
        "answer": (c.data.answer_column, "reward_model.ground_truth"),
        "most pixels": (c.data.image_max_pixels, k(data + "image_max_pixels", default=4096 * 4096)),
        "least pixels": (c.data.image_min_pixels, k(data + "image_min_pixels", default=4 * 28 * 28)),
        "tower frozen": (frozen(c), bool(re.search("vision|visual", str(k.raw(args + "freeze_module_prefix", ""))))),
        "its template of questions is said or set": (said(report, "<think>") or "<think>" in c.data.system_prompt, True),
    }


ROBO = {"question": "Is it open?", "choices": "['yes', 'no', 'neither']", "correct_answer": 2, "image": {"bytes": b"", "path": None}}


def _rlinf_sft(report, out: Path) -> dict:
    """data/datasets/vlm/robo2vlm.py: encode_prompt puts the images before the question, choices by letter below it, and learns `C. neither`."""
    file = next((name for name in report["files"] if name.endswith("_rows.py")), None)
    space: dict = {"__name__": "rows"}
    exec((out / file).read_text() if file else "row_of = dict", space)
    row = space["row_of"]({space["QUESTION"]: ROBO["question"], space["CHOICES"]: ROBO["choices"], space["ANSWER"]: 2, "image": ROBO["image"]})
    return {"prompt": (row["prompt"], "<image>Is it open?\nChoices:\nA. yes\nB. no\nC. neither\n"), "target": (row["completion"], "C. neither"),
            "images": (len(row["images"]), 1), "header behind the answer, said": (said(report, "header"), True)}


def _rlinf(k, c, version, report, out) -> dict:
    if c.run.recipe == "sft":
        return _rlinf_sft(report, out)
    keys = str(k.raw("data.image_keys", "[]"))
    name = str(k.raw("data.dataset_name", ""))
    rows = {
        "image column": (c.data.image_column, re.findall(r"\w+", keys)[0] if re.findall(r"\w+", keys) else "images"),
        "prompts too long": (c.data.overlong_prompt, "filter" if k("data.filter_prompt_by_length", default=False) else c.data.overlong_prompt),
    }
    if k.raw("data.choice_key"):  # appended to the prompt by the data set
        rows["choices are said"] = (said(report, "choice"), True)
    if name == "robo2vlm":
        own = "You are a helpful robotic vision assistant specialized in answering questions about robotic manipulation tasks. "
        rows["system prompt"] = (c.data.system_prompt.startswith(own) or said(report, "robo2vlm"), True)
    return rows


CLEVR = "Solve the following question: count the number of items in the image and provide the final answer in [ ] format"


def _areal(k, c, version, report, out) -> dict:
    path = str(k("train_dataset.path"))
    clevr, geometry, sft = "clevr_count_70k" in path, "geometry3k" in path, c.run.recipe == "sft"
    rows = {"image column": (c.data.image_column, "images"), "question": (c.data.prompt_column, "problem")}
    if clevr:
        rows |= {"most pixels": (c.data.image_max_pixels, 336 * 336), "the word `different` is taken out, said": (said(report, "different"), True)}
    if geometry:
        rows |= {"its middle of 512 or 448 pixels, said": (said(report, "512" if sft else "448"), True)}
    if sft:
        return rows | {"target": (c.data.completion_column, "answer"), "rows too long": (c.data.overlong_completion, "filter")}
    rows["answer"] = (c.data.answer_column, "answer")
    if clevr:
        rows["system prompt"] = (c.data.system_prompt.startswith(CLEVR), True)
        rows["rewards"] = (tuple(score(c, out, text, "3") for text in ("there are [3]", "3", "[3] or [2]", "[2] or [3]")), (1.0, 0.0, 0.0, 1.0))
    if geometry:
        rows["instruction is said or set"] = (said(report, "monologue", "instruction") or "boxed" in c.data.system_prompt, True)
        rows["rewards"] = (
            tuple(
                score(c, out, text, "5")
                for text in (  # the function of examples/vlm/geometry3k_grpo.py, not reward/'s
                    "<think>a</think> \\boxed{5}",
                    "\\boxed{5}",
                    "<think>a</think> \\boxed{4}",
                    "5",
                )
            ),
            (1.0, 0.9, 0.1, 0.0),
        )
    return rows


def _skyrl(k, c, version, report, out) -> dict:
    rows = {"image column": (c.data.image_column != "", True)}
    if c.run.recipe == "rl":
        rows["turns"] = (c.env.max_turns if c.env.function else 1, k("generator.max_turns", default=1))
        rows["room for pictures"] = (bool(c.env.image_tokens), bool(c.env.function))
    return rows
