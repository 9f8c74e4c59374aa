"""Rewards of papers and other libraries, against values that their formulas give by hand."""

import json
import math

import pytest

from jaxrl.errors import ConfigError
from jaxrl.rewards import published as p
from jaxrl.rewards.builtin import registered_rewards
from jaxrl.rewards.calling import Call
from jaxrl.rewards.ifeval import CHECKS, follows
from jaxrl.workers.loading import LoadError

GOOD = "<think>\na\nb\n</think>\n<answer>\n7\n</answer>"


@pytest.mark.parametrize("text, think, both, tags", [
    (GOOD, 1, 1, 1.0), (GOOD + "\nmore", 1, 1, 1.0), (GOOD + " more", 1, 0, 1.0), ("x" + GOOD, 0, 0, 1.0),
    ("<think>a</think>b", 1, 0, 0.0), ("<think>a<think></think>", 0, 0, 0.0), ("<think>a", 0, 0, 0.0), ("", 0, 0, 0.0),
    ("<think>\n<think>\n\n</think>\n<answer>\n\n</answer>", 0, 1, 0.75), ("<think>\n</think>\n<answer>\n1\n</answer>", 1, 0, 1.0)])
def test_formats(text, think, both, tags):
    """TRL's pattern ^<think>(?!.*<think>)(.*?)</think>.*$ and open-r1's, as the regular expressions themselves find them."""
    import re

    flags = re.DOTALL | re.MULTILINE
    assert p.think_format_reward("q", text) == think == float(bool(re.match(r"^<think>(?!.*<think>)(.*?)</think>.*$", text, flags)))
    pattern = r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"
    assert p.answer_format_reward("q", text) == both == float(bool(re.match(pattern, text, flags)))
    assert p.tag_count_reward("q", text) == tags


def test_steps_are_thirds():
    assert p.reasoning_steps_reward("q", "") == 0.0
    assert p.reasoning_steps_reward("q", "1. x\n2. y") == pytest.approx(1 / 3)  # at the very start alone, as there
    assert p.reasoning_steps_reward("q", "First, a\n- b") == pytest.approx(2 / 3)
    assert p.reasoning_steps_reward("q", "Step 1: a Step 2: b Step 3: c Step 4: d") == 1.0


def test_the_cosine_of_a_length():
    """Published example of TRL: half of max_length is 0.75 where right, -0.75 where wrong; the ends are the bounds."""
    right, wrong = r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}"

    def at(text, count, **more):
        return p.cosine_reward("q", text, r"\frac{1}{3}", [1] * count, max_length=100, **more)

    assert (at(right, 50), at(wrong, 50)) == (pytest.approx(0.75), pytest.approx(-0.75))
    assert (at(right, 0), at(right, 100), at(wrong, 0), at(wrong, 100)) == pytest.approx((1.0, 0.5, -1.0, -0.5))
    assert at(right, 150) == pytest.approx(0.5) and at(right, 150, bounded=False) == pytest.approx(0.5 + 0.25 * (1 + math.cos(1.5 * math.pi)))
    r1 = dict(unit="characters", bounded=False, wrong=[0.0, -0.5], right=[0.5, 1.0])  # open-r1: max_value_wrong .. min_value_wrong
    assert at(wrong, 9, **r1) == pytest.approx(-0.5 + 0.5 * (0.0 + 0.5) * (1 + math.cos(math.pi * len(wrong) / 100)))
    assert p.cosine_reward("q", right, None, [1]) is None
    with pytest.raises(ValueError, match="unit='lines'"):
        at(right, 3, unit="lines")


def test_lengths_are_ranked_within_a_prompt():
    """Kimi k1.5: 0.5 - (l - min) / (max - min); wrong completions at most 0; all as long: 0."""
    texts = [r"\boxed{1}", r"\boxed{1} " + "x" * 10, r"\boxed{2} " + "x" * 20, r"\boxed{2}", r"\boxed{1}", r"\boxed{1}"]
    out = p.length_ranked_reward(["q"] * 6, texts, ["1"] * 6, [0, 0, 0, 0, 1, 1], [[0] * n for n in (10, 20, 30, 10, 5, 5)])
    assert out == pytest.approx([0.5, 0.0, -0.5, 0.0, 0.0, 0.0])


def test_repetition_is_the_share_of_ngrams_that_came_back():
    assert p.repetition_reward("q", "A b a B a b", [], size=2) == pytest.approx(-(1 - 2 / 5))
    assert p.repetition_reward("q", "a b", [], size=3) == p.repetition_reward("q", "a b c", [], size=3) == 0.0
    assert p.repetition_reward("q", "", [1, 1, 1, 1], size=2, penalty=-0.5, unit="tokens") == pytest.approx(-0.5 * (1 - 1 / 3))


def test_the_soft_punishment_of_dapo():
    def at(count):
        return p.soft_overlong_reward("q", "", [0] * count, max_length=100, buffer=20)

    assert [at(n) for n in (0, 80, 90, 100, 120)] == pytest.approx([0, 0, -0.5, -1, -1])


@pytest.mark.parametrize("text, scores", [
    (r"so \boxed{B}", (1, 1, 1, 1)), ("so the answer is B", (0.5, 1, -1, 0)), (r"so \boxed{C}", (-0.5, -1, -1, 0)),
    ("the answer is C", (-1, -1, -1, 0)), (r"B</think> \boxed{c}", (-0.5, -1, -1, 0))])
def test_choices_of_crossthinkqa(text, scores):
    assert tuple(p.crossthinkqa_reward("q", text, "B", kind) for kind in ("soft", "loose", "strict", "binary")) == scores
    assert p.crossthinkqa_reward("q", text, None) is None


OBEYED = {  # func_name -> (arguments, a text that obeys, one that does not)
    "verify_keywords": ({"keyword_list": ["Sun", "moon"]}, "the SUN and the Moon", "the sun"),
    "verify_keyword_frequency": ({"word": "sun", "N": 2}, "Sun, sunny sun", "sun sunny"),
    "validate_forbidden_words": ({"forbidden_words": ["rain"]}, "sun", "Rain"),
    "verify_letter_frequency": ({"letter": "a", "N": 2}, "banAa", "banAaa"),
    "verify_paragraph_count": ({"N": 2}, "a\n* * *\nb", "a\n* * *\n"),
    "validate_word_constraint": ({"N": 20, "quantifier": "around"}, "w " * 18, "w " * 17),
    "verify_sentence_constraint": ({"N": 2, "quantifier": "at least"}, "Dr. No came. He left.", "One."),
    "validate_paragraphs": ({"N": 2, "first_word": "So", "i": 2}, "a\n\nSo b", "So a\n\nb"),
    "verify_postscript": ({"postscript_marker": "P.S."}, "a P.S. b", "a P.S. "),
    "validate_placeholders": ({"N": 2}, "[name] and [place]", "[name]"),
    "verify_bullet_points": ({"N": 2}, "* a\n - b\nc", "* a"),
    "validate_title": ({}, "<<A>> b", "<A> b"),
    "validate_choice": ({"options": ["My answer is yes.", "My answer is no."]}, "My answer is no.", "Maybe."),
    "validate_highlighted_sections": ({"N": 2}, "*a* and *b*", "*a*"),
    "validate_sections": ({"N": 2, "section_splitter": "SECTION"}, "SECTION 1 a SECTION 2 b", "SECTION 1 a"),
    "validate_json_format": ({}, '{"a": [1]}', "{a: 1}"),
    "validate_repeat_prompt": ({"original_prompt": "Say it."}, "Say it. Yes.", "Yes."),
    "validate_two_responses": ({}, "a ****** b", "a ****** a"),
    "validate_uppercase": ({}, "A 1!", "Aa"),
    "validate_lowercase": ({}, "a 1!", "aA"),
    "validate_frequency_capital_words": ({"N": 2, "quantifier": "at most"}, "AB c D", "AB C D"),
    "validate_end": ({"end_phrase": "Bye."}, "a Bye.", "Bye. a"),
    "validate_quotation": ({}, '"a"', 'a"'),
    "validate_no_commas": ({}, "a b", "a, b"),
}


@pytest.mark.parametrize("name", OBEYED)
def test_an_instruction_is_obeyed_or_not(name):
    arguments, obeys, breaks = OBEYED[name]
    row = {"func_name": name, "N": None, "quantifier": None, **arguments}  # rows have all arguments, most null
    assert p.ifeval_reward("q", f"<think>{breaks}</think>\n\n{obeys}", json.dumps(row)) == 1.0
    assert p.ifeval_reward("q", breaks, row) == 0.0
    assert set(CHECKS) - set(OBEYED) == {"validate_response_language"}  # langdetect, which is not installed with jaxrl


def test_a_row_that_cannot_be_checked_is_its_own_fault():
    with pytest.raises(ValueError, match="func_name='sing' is none of"):
        follows("a", {"func_name": "sing"})
    with pytest.raises(ValueError, match="validate_end: the constraint has no end_phrase"):
        follows("a", {"func_name": "validate_end", "end_phrase": None})


def test_an_empty_text_is_no_choice():
    assert not any(follows(text, {"func_name": "validate_choice", "options": ["yes", "no"]}) for text in ("", " \n"))


def test_arguments_of_a_reward_are_set_by_name():
    call = Call("repetition", "repetition", {"arguments": {"repetition": {"size": 2, "penalty": -3.0}}})
    item = {"prompt": "q", "completion": "a b a b", "columns": {"size": 9}, "token_ids": [1]}
    assert call.call_one(item, {}) == pytest.approx(-3.0 * (1 - 2 / 3))
    with pytest.raises(LoadError, match="repetition has no argument 'sice'; it has prompt, completion, token_ids, size"):
        Call("repetition", "repetition", {"arguments": {"repetition": {"sice": 2}}})
    assert {"cosine", "ifeval", "crossthinkqa", "answer_format"} <= set(registered_rewards())


def test_arguments_of_a_function_that_is_not_named_are_refused():
    from jaxrl.config import default_config
    from jaxrl.rewards.specs import check_specs

    c = default_config()
    c.reward.functions = ("exact",)
    c.reward.arguments = {"cosine": {"max_length": 5}}
    with pytest.raises(ConfigError, match="reward.arguments: 'cosine' is none of the reward functions exact"):
        check_specs(c, ["exact"], ["exact"], False)
