"""Rows with images, for the joint rules of the systems' tables: columns, sizes, what of a tower is frozen."""

from __future__ import annotations

from jaxrl.migrate import common, images
from jaxrl.migrate.systems.roll_layout import DATA, TRAIN, VALID
from jaxrl.migrate.systems.verl_engine import ACTOR, MODEL, ROLLOUT, backend, since
from jaxrl.migrate.table import Migration

ROWS = "data."  # table of rows: verl's, RLinf's
TRAINED = "train_dataset.path"


def verl(m: Migration):
    """Sets data.image_column, image_min_pixels, image_max_pixels, max_images and model.frozen for verl's rows with
    images.

    The column is set if data.image_key is, and it is not `images` or the model's name is of a family with a tower that
    jaxrl reads. A freeze_vision_tower that this engine or version of verl does not read is marked inert, and noted.
    """
    column = m.text(ROWS + "image_key")
    if m.given(ROWS + "image_key") and (column != "images" or images.has_tower(m.text(MODEL + "path"))):
        m.set("data.image_column", column, ROWS + "image_key")
    images.pixels(m, ROWS + "mm_processor_kwargs.min_pixels", ROWS + "mm_processor_kwargs.max_pixels")
    if m[ROLLOUT + "limit_images"] is not None:
        m.set("data.max_images", m.integer(ROLLOUT + "limit_images"), ROLLOUT + "limit_images")
    key = ACTOR + "freeze_vision_tower"
    if m.flag(key) and (backend(m) not in ("fsdp", "fsdp2") or since(m, "0.8")):
        m.mark(key, "inert", f"this engine of verl {m.version} does not read it")
        m.differs(
            f"{key} does nothing in this engine of verl {m.version}: the tower trains; model.frozen=('vision/.*',) "
            "keeps it"
        )
    elif m.flag(key):
        images.frozen(m, ["visual"], key)


def sees(m: Migration) -> bool:
    """Returns whether a job is of ROLL's pipeline of images: its command has rlvr_vl, it sets
    data_args.image_max_pixels, or its model's name is of a family with a tower that jaxrl reads."""
    named = images.has_tower(m.text("pretrain")) or images.has_tower(m.text(TRAIN + "model_args.model_name_or_path"))
    return named or "rlvr_vl" in m.command or m.given(TRAIN + DATA + "image_max_pixels")


def roll(m: Migration):
    """Sets data.image_column, image_min_pixels, image_max_pixels and image_root for a job of ROLL's pipeline of images
    (`sees`); otherwise does nothing. Other sizes of evaluation's images are reported as not carried over, and jaxrl
    asks for prompts with the words that ROLL adds. Before 0.3.0 the sizes are those of model_args."""
    if not sees(m):
        return
    d, old = TRAIN + DATA, m.table.versions.index(m.version) < m.table.versions.index("0.3.0")
    bounds = [TRAIN + "model_args." + n if old else d + "image_" + n for n in ("min_pixels", "max_pixels")]
    images.pixels(m, *bounds)
    m.set("data.image_column", "images", bounds[1])
    if m.text(d + "image_folder"):
        m.set("data.image_root", m.text(d + "image_folder"), d + "image_folder")
    for name in ("image_max_pixels", "image_min_pixels"):
        if m[VALID + DATA + name] not in (None, m[d + name]):
            m.lacks(VALID + DATA + name, "images of evaluation have the sizes of training's (data.image_max_pixels)")
    m.needs(
        "data.prompt_column: ROLL's pipeline of images puts its own words about <think> and <answer> behind a prompt "
        "that is text, and rewards may read them: write them into the rows or data.system_prompt"
    )


def roll_frozen(m: Migration):
    """Sets model.frozen from actor_train.model_args.freeze_module_prefix, names with commas between them; asks for
    jaxrl's names of those that are no part of a tower for images."""
    names = [n.strip() for n in m.text(TRAIN + "model_args.freeze_module_prefix").split(",") if n.strip()]
    images.frozen(m, names, TRAIN + "model_args.freeze_module_prefix")


def rlinf(m: Migration):
    """Sets data.image_column and data.chat for rows of type vlm, or with image_keys; otherwise does nothing.

    Such rows are a chat of the prompt's text, whose <image> marks are the images' places; use_chat_template, not
    apply_chat_template, decides data.chat (auto or false). Several image_keys, and those of type vlm_sft, are refused.
    jaxrl asks for rows with choices and system prompt if dataset_name is not base, or choice_key is set.
    """
    names = [str(n) for n in m.list(ROWS + "image_keys")]
    if m.text(ROWS + "type") != "vlm" and not names:
        return
    if m.text(ROWS + "type") == "vlm_sft" or len(names) > 1:
        why = f"{', '.join(names)}: images are of one column, a list: data.image_column"
        m.lacks(ROWS + "image_keys", why, refuse=True)
        return
    m.set("data.image_column", names[0] if names else "images", ROWS + "image_keys", ROWS + "type")
    m.set_again("data.chat", "auto" if m.flag(ROWS + "use_chat_template") else "false")
    m.mark(ROWS + "use_chat_template", "equivalent", "data.chat")
    if m.text(ROWS + "dataset_name") not in ("base", "") or m.text(ROWS + "choice_key"):
        key = ROWS + ("dataset_name" if m.text(ROWS + "dataset_name") not in ("base", "") else "choice_key")
        m.needs(
            f"{key}={m[key]}: RLinf's class for these rows puts choices and a system prompt into the prompt: write "
            "them into the rows and data.system_prompt"
        )


def skyrl(m: Migration):
    """Sets data.image_column: `images` with generator.vision_language_generator, else "" (text alone) with
    trainer.policy.language_model_only; nothing without either."""
    only, seen = "trainer.policy.language_model_only", "generator.vision_language_generator"
    if m.flag(seen):
        m.set("data.image_column", "images", seen)
    elif m.flag(only):
        m.set("data.image_column", "", only)


PICTURES = {  # its example data sets with images
    "geometry3k": {"data.system_prompt": (
        "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. The "
        "reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}.")},
    "clevr_count_70k": {"data.image_max_pixels": 336 * 336, "data.system_prompt": (
        "Solve the following question: count the number of items in the image and provide the final answer in [ ] "
        "format, ensuring that only the number is inside the brackets without any additional text or explanations. ")},
}
GEOMETRY = r'''"""AReaL's reward of geometry3k: 0.9 for the right box, 0.1 for <think>...</think> before a box."""

import re

from jaxrl.rewards.builtin import boxed_reward

FORM = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.S)


def score(prompt, completion, answer=None, **columns):
    return 0.9 * boxed_reward(prompt, completion, answer) + 0.1 * bool(FORM.fullmatch(completion))
'''
COUNT = r'''"""AReaL's reward of clevr_count_70k: 1 where the last number in [brackets] is the answer's."""

import re


def last(text):
    found = re.findall(r"\[([0-9\.]+)\]", str(text))
    return found[-1] if found else ""


def score(prompt, completion, answer=None, **columns):
    return float(last(completion) == str(answer).strip())
'''


def areal(m: Migration, path: str) -> bool:
    """Sets the columns of AReaL's example data sets with images (PICTURES, by the end of `path`), their system prompt,
    of clevr_count_70k the largest image, and the reward, a file beside the config; notes what AReaL's loader changes.
    Returns whether `path` is one of them; if not, sets nothing."""
    known = next((known for name, known in PICTURES.items() if path.rstrip("/").endswith(name)), None)
    if known is None:
        return False
    geometry = "geometry" in path
    of_rows = {"data.prompt_column": "problem", "data.answer_column": "answer", "data.image_column": "images"}
    for option, value in {**known, **of_rows}.items():
        m.set(option, value, TRAINED)
    common.reward_file(m, GEOMETRY if geometry else COUNT, TRAINED)
    m.differs(
        'AReaL\'s loader takes the word "different" out of these questions'
        + (
            ", cuts the middle of 448 x 448 pixels out of images and asks for <think> and a box behind the question; "
            "here images are whole, and the system prompt asks"
            if geometry
            else " and saves images as JPEG; here the rows stay as they are"
        )
    )
    return True
