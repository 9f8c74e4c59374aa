"""Built-in rewards of papers and of other libraries, by name: formats, shapes of a length, repetition, IFEval, choices.

Each gives 0.0 for what a completion does wrong and None without a reference answer, as those of builtin.py. Arguments
with defaults are set by reward.arguments, {name: {argument: value}}. Standard library only, except what `math` loads.
"""

from __future__ import annotations

import math
import re

from jaxrl.rewards import images as row_images
from jaxrl.rewards.builtin import load_math_verify, math_reward, register_reward
from jaxrl.rewards.ifeval import follows

UNITS = ("characters", "words", "tokens")


def length(completion: str, token_ids, unit: str) -> int:
    """Returns the length of a completion in a unit: "characters", "words" (divided by white space) or "tokens" (of
    token_ids). Raises ValueError for another unit."""
    if unit not in UNITS:
        raise ValueError(f"unit={unit!r}: choose from {', '.join(UNITS)}")
    return len(token_ids) if unit == "tokens" else len(completion.split() if unit == "words" else completion)


@register_reward("think_format")
def think_format_reward(prompt, completion):
    """Scores 1.0 if a completion begins with <think>, has it once, and closes it, else 0.0 (TRL 1.9,
    think_format_reward)."""
    head, found, rest = completion.partition("<think>")
    return float(bool(found) and not head and "<think>" not in rest and "</think>" in rest)


@register_reward("answer_format")
def answer_format_reward(prompt, completion):
    """Scores 1.0 if a completion is <think>, lines, </think>, <answer>, lines, </answer>, each tag on a line of its
    own, else 0.0 (open-r1's reward `format`). What follows the line of </answer> is not read."""
    head, found, rest = completion.partition("<think>\n")
    _, closed, tail = rest.partition("\n</think>\n<answer>\n")
    ends = re.search(r"\n</answer>(?:\n|\Z)", tail)
    return float(bool(found and closed and ends) and not head)


@register_reward("tag_count")
def tag_count_reward(prompt, completion):
    """Scores a quarter for each of <think>, </think>, <answer> and </answer> that is there exactly once, in 0..1
    (open-r1's `tag_count`). A tag counts only with its line breaks: one after <think>, one before and after </think>
    and <answer>, one before </answer>."""
    tags = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
    return sum(completion.count(tag) == 1 for tag in tags) / 4


@register_reward("reasoning_steps")
def reasoning_steps_reward(prompt, completion):
    """Scores a third for each mark of a step, at most 1 in all (open-r1's `reasoning_steps`).

    Marks: `Step 1:`, a number and a point at the very start, a further line that begins with - or *, and `First,`,
    `Second,`, `Next,`, `Finally,` with their commas."""
    marks = re.findall(r"Step \d+:|\A\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,", completion)
    return min(1.0, len(marks) / 3)


@register_reward("length_ranked")
def length_ranked_reward(prompts, completions, answer, group, token_ids, unit="tokens"):
    """Scores each completion by its length among the completions of its prompt, in -0.5..0.5 (Kimi k1.5, arXiv
    2501.12599, section 2.3.3).

    Returns a list of floats. lambda = 0.5 - (length - shortest) / (longest - shortest). Right completions, and those of
    rows without a reference answer, score lambda; others min(0, lambda). If all are equally long, lambda is 0.

    Args:
      answer: reference answer of each completion, None without one; math_reward decides what is right.
      group: number of the prompt of each completion. token_ids: ids of each completion, counted with unit="tokens".
      unit: what the length counts: characters, words or tokens. Raises ValueError for another unit.
    """
    sizes = [length(c, ids, unit) for c, ids in zip(completions, token_ids, strict=True)]
    bounds: dict = {}
    for g, size in zip(group, sizes, strict=True):
        low, high = bounds.get(g, (size, size))
        bounds[g] = min(low, size), max(high, size)
    out = []
    for prompt, completion, right, g, size in zip(prompts, completions, answer, group, sizes, strict=True):
        low, high = bounds[g]
        shape = 0.5 - (size - low) / (high - low) if high > low else 0.0
        out.append(shape if right is None or math_reward(prompt, completion, right) else min(0.0, shape))
    return out


@register_reward("cosine")
def cosine_reward(prompt, completion, answer, token_ids, max_length=1000, unit="tokens", bounded=True,
                  wrong=(-1.0, -0.5), right=(0.5, 1.0)):
    """Scores right completions higher the shorter they are, and wrong ones lower the shorter (arXiv 2502.03373,
    appendix C.1).

    The score is b + (a - b) (1 + cos(pi length / max_length)) / 2, which is a at length 0 and b at max_length. Whether
    a completion is right, math_reward decides; without a reference answer the score is None.

    Args:
      token_ids: ids of the completion, counted with unit="tokens".
      max_length: in `unit`.
      unit: what the length counts: characters, words or tokens. Raises ValueError for another unit.
      wrong: (a, b) of wrong completions. right: (b, a) of right ones, so that both are given lowest first.
      bounded: whether longer completions keep the score at max_length; False: the cosine continues, as in open-r1.
    """
    correct = math_reward(prompt, completion, answer)
    if correct is None:
        return None
    share = length(completion, token_ids, unit) / max_length
    at_0, at_end = (right[1], right[0]) if correct else wrong
    shape = (1.0 + math.cos(math.pi * (min(share, 1.0) if bounded else share))) / 2
    return at_end + (at_0 - at_end) * shape


cosine_reward.prepare = length_ranked_reward.prepare = load_math_verify


@register_reward("repetition")
def repetition_reward(prompt, completion, token_ids, size=3, penalty=-1.0, unit="words"):
    """Scores penalty x the share of n-grams that were there before, 1 - different ones / all (arXiv 2502.03373,
    appendix C.2); 0 without n-grams.

    Args:
      token_ids: ids of the completion, read with unit="tokens".
      size: n. penalty: negative, the score of a text that repeats itself throughout. unit: "words" (lower-cased) or
        "tokens".

    Raises ValueError for another unit."""
    if unit not in ("words", "tokens"):
        raise ValueError(f"unit={unit!r}: choose from words, tokens")
    parts = completion.lower().split() if unit == "words" else list(token_ids)
    grams = [tuple(parts[i : i + size]) for i in range(len(parts) - size + 1)]
    return penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0


@register_reward("soft_overlong")
def soft_overlong_reward(prompt, completion, token_ids, max_length=16384, buffer=4096):
    """Scores 0 up to max_length - buffer tokens, then a line down to -1 at max_length (DAPO, arXiv 2503.14476, Eq. 13).

    With buffer 0 a completion of more than max_length tokens scores -1."""
    over = len(token_ids) - (max_length - buffer)
    return -min(over / buffer, 1.0) if over > 0 and buffer else -float(over > 0)


@register_reward("ifeval")
def ifeval_reward(prompt, completion, answer):
    """Scores 1.0 if what follows the last </think> obeys the row's constraint, else 0.0 (IFEval, arXiv 2311.07911).

    `answer` is JSON or a dict with func_name and its arguments, as in the rows of RLVR-IFeval; None without one. Raises
    ValueError for a func_name that is no check, or lacks an argument."""
    if answer is None:
        return None
    return float(follows(final_part(completion), answer))


@register_reward("crossthinkqa")
def crossthinkqa_reward(prompt, completion, answer, kind="soft"):
    r"""Scores the first capital letter of the last \boxed{}, else of what follows "answer is", else of all (ROLL).

    It is right if it is the first character of `answer`. What precedes the last </think> is not read. None without an
    answer. Raises ValueError for another kind.

    Args:
      kind: of right and boxed, right alone, boxed alone, neither: soft 1, 0.5, -0.5, -1; loose 1, 1, -1, -1; strict 1,
        -1, -1, -1; binary 1, 0, 0, 0.
    """
    if answer is None:
        return None
    scores = {"soft": (1.0, 0.5, -0.5, -1.0), "loose": (1.0, 1.0, -1.0, -1.0), "strict": (1.0, -1.0, -1.0, -1.0),
              "binary": (1.0, 0.0, 0.0, 0.0)}
    if kind not in scores:
        raise ValueError(f"kind={kind!r}: choose from {', '.join(scores)}")
    text = final_part(completion)
    boxes = re.findall(r"\\boxed\{([^}]+)\}", text)
    said = boxes[-1] if boxes else text[text.lower().rfind("answer is") + 9 :] if "answer is" in text.lower() else text
    letter = next((c for c in said if c.isupper()), "")
    right = bool(letter) and letter == str(answer)[:1]
    return scores[kind][2 * (not right) + (not boxes)]


def final_part(completion: str) -> str:
    """Returns what follows the last </think>, without line breaks before it; all of a completion without one."""
    return completion.rpartition("</think>")[2].lstrip("\n") if "</think>" in completion else completion


@register_reward("iou")
def iou_reward(prompt, completion, answer, image_sizes=(), frame="thousandths", image=0, threshold=0.0):
    """Scores a box, the last four numbers x1, y1, x2, y2 of a completion (`images.last_numbers`), by its intersection
    over union with `answer` (VLM-R1, arXiv 2504.07615, reward of referring expressions).

    Args:
      image_sizes: Sizes of the row's images, not needed for the frame `stored`.
      answer: [x1, y1, x2, y2] in pixels of the stored image, or text with them.
      frame: what a completion's numbers count: thousandths of the sides (Qwen3-VL), pixels of the image as the model
        sees it (`seen`, Qwen2.5-VL), or pixels of the stored one (`stored`).
      image: number of the row's image, from 0. threshold: from which the score is 1, and 0 below; 0 = the score is the
        IoU.

    None without an answer, 0 without four numbers. Raises ValueError for another frame, an answer that is no box
    (TypeError if it is neither text nor a sequence), and a frame that needs the size of an image that the row does not
    have."""
    if answer is None:
        return None
    found = row_images.last_numbers(completion, 4)
    if found is None:
        return 0.0
    sizes = image_sizes[image] if len(image_sizes) > image else None
    own = row_images.ordered(row_images.as_stored(found, frame, sizes))
    score = row_images.iou(own, row_images.reference_box(answer))
    return float(score >= threshold) if threshold else score


@register_reward("point_in_box")
def point_in_box_reward(prompt, completion, answer, image_sizes=(), frame="thousandths", image=0):
    """Scores 1.0 if a point, the last two numbers x, y of a completion (`images.last_numbers`), lies in the box
    `answer`, else 0.0; None without an answer.

    UI-R1's reward of a click's coordinates (arXiv 2503.21620).

    Args:
      answer: [x1, y1, x2, y2] in pixels of the stored image, or text with them; its edges belong to the box.
      image_sizes: Sizes of the row's images, not needed for the frame `stored`.
      frame: what a completion's numbers count: thousandths of the sides, pixels of the image as the model sees it
        (`seen`), or of the stored one (`stored`).
      image: number of the row's image, from 0.

    0.0 without two numbers. Raises ValueError for another frame, an answer that is no box (TypeError if it is neither
    text nor a sequence), and a frame that needs the size of an image that the row does not have."""
    if answer is None:
        return None
    found = row_images.last_numbers(completion, 2)
    if found is None:
        return 0.0
    x, y = row_images.as_stored(found, frame, image_sizes[image] if len(image_sizes) > image else None)
    left, top, right, bottom = row_images.reference_box(answer)
    return float(left <= x <= right and top <= y <= bottom)
