"""Verifiers and shaping: closed forms."""

import re
from pathlib import Path

import numpy as np
import pytest

from jaxrl.config.load import default_config
from jaxrl.errors import RunStopped
from jaxrl.rewards import RewardResult, shape
from jaxrl.rewards.builtin import boxed_reward, choice_reward, exact_reward, format_reward, last_boxed, math_reward
from jaxrl.rewards.calling import outcome
from jaxrl.rewards.items import overlong_penalty, weighted_sum


@pytest.mark.parametrize("completion, answer, score", [
    ("so it is 18", "18", 1.0), ("so it is 18", "19", 0.0), ("so it is 18", 18, 1.0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1.0), (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0), (r"\boxed{x+1}", "$1+x$", 1.0),
    (r"first 3, then \boxed{4}", "3", 0.0), ("The answer is $1,000$.", "1000", 1.0), ("no idea", "7", 0.0),
    ("", "7", 0.0),
    (r"\boxed{(1, 2)}", "(1,2)", 1.0), (r"\boxed{50\%}", "50%", 1.0), ("anything", None, None),
])
def test_math(completion, answer, score):
    assert math_reward("q", completion, answer) == score


@pytest.mark.parametrize("completion, answer, score", [
    (r"\boxed{18}", "18", 1.0), (r"\boxed{18.0}", 18, 1.0), (r"\boxed{36/2}", "18", 1.0),
    (r"\boxed{1,800}", "1800", 1.0),
    (r"\boxed{1} or \boxed{2}", "1", 0.0), (r"\boxed{1} or \boxed{2}", "2", 1.0), (r"\boxed{2", "2", 0.0),
    (r"\boxed{2} and \boxed{", "2", 1.0), (r"\boxed{ a {b} c }", "a{b}c", 1.0), ("18", "18", 0.0),
    (r"\boxed{1/0}", "1", 0.0),
    (r"\boxed{$ 7 $}", "7", 1.0), (r"\boxed{-7}", "7", 0.0), (r"\boxed{" + "9" * 5000 + "}", "9", 0.0),
    (r"\boxed{7}", None, None),
])
def test_boxed(completion, answer, score):
    assert boxed_reward("q", completion, answer) == score


def test_last_boxed_takes_balanced_braces():
    assert last_boxed(r"\boxed{a}{b} \boxed{\frac{1}{2}} end") == r"\frac{1}{2}"
    assert last_boxed("none") is None


@pytest.mark.parametrize("completion, answer, score", [
    (r"\boxed{B}", "B", 1.0), (r"\boxed{\text{B}}", "(B)", 1.0), ("The answer is (C).", "C", 1.0),
    ("Answer: **D**", "d", 1.0),
    ("B", "B", 1.0), ("(B)", "B", 1.0), ("B. because A is wrong", "B", 1.0), ("A dog barks", "A", 0.0),
    ("the answer is A, no, the answer is B", "B", 1.0), ("the answer is Apple", "A", 0.0),
    (r"the answer is A \boxed{B}", "A", 0.0),
    ("", "A", 0.0), ("A", None, None),
    ("Answer: I think it must be (B)", "B", 1.0), ("The answer is A car, so B", "B", 1.0), ("Answer: I would choose **C**.", "C", 1.0),
    ("Option A seems right to me", "A", 1.0), ("The answer is A because (B) is wrong", "A", 1.0), ("The answer is A with force B.", "A", 1.0),
    ("Answer: A obviously, not B.", "A", 1.0), ("Answer: I", "I", 1.0), ("Answer: I, not (B)", "I", 1.0),
])
def test_choice(completion, answer, score):
    assert choice_reward("q", completion, answer) == score


def test_choice_needs_a_letter():
    with pytest.raises(ValueError, match="needs a letter"):
        choice_reward("q", "A", "Paris")


def test_exact_and_format():
    assert exact_reward("q", " 7\n", 7) == 1.0 and exact_reward("q", "07", "7") == 0.0
    assert exact_reward("q", "7", None) is None
    assert format_reward("q", "<a>x\ny</a>", "<a>.*</a>") == 1.0
    assert format_reward("q", "<a>x</a> and more", "<a>.*</a>") == 0.0


def test_weighted_sum_skips_absent_parts():
    parts = {"a": np.array([1.0, np.nan, np.nan, 0.0]), "b": np.array([2.0, 2.0, np.nan, 0.0])}
    np.testing.assert_array_equal(weighted_sum(parts, {"a": 10.0, "b": 1.0}, 4), [12.0, 2.0, np.nan, 0.0])
    np.testing.assert_array_equal(weighted_sum({}, {}, 2), [np.nan, np.nan])


def test_overlong_penalty_is_the_papers():
    lengths = np.array([0, 80, 81, 90, 100, 120])
    np.testing.assert_allclose(overlong_penalty(lengths, 100, 20, 2.0), [0, 0, 0.1, 1.0, 2.0, 2.0], rtol=1e-15)
    np.testing.assert_array_equal(overlong_penalty(lengths, 100, 0, 2.0), np.zeros(6))


def shaped(total, lengths, truncated, **options):
    reward = default_config().reward
    for key, value in options.items():
        reward[key] = value
    total = np.array(total, float)
    return shape(RewardResult(total, {}, [], [], {}), np.array(lengths), np.array(truncated), reward, 100)


def test_shaping_by_default_changes_nothing():
    np.testing.assert_array_equal(shaped([1.0, np.nan, -3.0], [1, 2, 100], [False, False, True]), [1.0, np.nan, -3.0])


def test_shaping_order():
    """zero_without_end, scale, bias, clip, length penalty: any other order gives other numbers here."""
    total = [1.0, 1.0, 4.0, np.nan, 1.0]
    lengths = [10, 100, 10, 100, 95]
    truncated = [False, True, False, True, False]
    out = shaped(total, lengths, truncated, zero_without_end=True, scale=2.0, bias=0.5, clip=3.0, overlong_buffer=10,
                 overlong_penalty=4.0)
    np.testing.assert_allclose(out, [2.5, 0.5 - 4.0, 3.0, np.nan, 2.5 - 2.0], rtol=1e-15)


def test_a_score_that_fp32_cannot_square_is_named():
    """Advantages of it would be 0, and the run would say that all rewards are equal."""
    with pytest.raises(RunStopped, match=r"score of completion 1 of the batch is 1e\+20 .*reward.scale=1e\+10.*reward.clip"):
        shaped([1.0, 1e10], [1, 1], [False, False], scale=1e10)
    np.testing.assert_array_equal(shaped([1.0, 1e10], [1, 1], [False, False], scale=1e10, clip=5.0), [5.0, 5.0])
    for value in (1e300, -1e300, 10**20):
        found = outcome(value)
        assert found["value"] is None and found["outcome"].startswith(f"error: returned {float(value):g}, expected a number of at most 1e+15")
    assert outcome(1e15)["value"] == 1e15


def test_shaping_is_pure():
    total = np.array([1.0, 2.0])
    result = RewardResult(total, {}, [], [], {})
    reward = default_config().reward
    reward.scale = 3.0
    shape(result, np.array([1, 2]), np.array([False, True]), reward, 10)
    np.testing.assert_array_equal(total, [1.0, 2.0])


def math_pairs():
    """(reference answer, answer, whether they are equal): words, money, percents, numbers, intervals, algebra, units ..."""
    rows = [line.split("\t") for line in (Path(__file__).parent / "math_pairs.tsv").read_text("utf-8").splitlines()]
    assert len(rows) > 300
    return [(gold, said, float(equal)) for gold, said, equal in rows]


@pytest.mark.full
def test_math_is_right_for_every_labelled_pair():
    wrong = [(gold, said, equal) for gold, said, equal in math_pairs()
             if math_reward("q", "So the answer is \\boxed{" + said + "}", gold) != equal]
    assert wrong == []


MARKERS = [r"\boxed{", "{", "}", "[", "(", "$", "$$", r"\frac{", r"\sqrt{", "<think>", "<answer>", "```\n", "```python\n", "7", "-", "9^", "x^",
           r"\left(", "answer is ", "Answer: (", "\0", "\ud800", "1e9", r"\text{", "!", "\n"]


@pytest.mark.full
@pytest.mark.parametrize("marker", MARKERS)
def test_no_completion_is_absent(marker):
    """100 kB of whatever a model can write, alone, before an answer and behind one: a score, and the right one where it is plain."""
    long = marker * (100_000 // len(marker))
    for text in (long, "so it is 18 " + long, long + "\n so it is \\boxed{18}"):
        for score in (lambda c: math_reward("q", c, "18"), lambda c: math_reward("q", c, "Paris"), lambda c: boxed_reward("q", c, "18"),
                      lambda c: choice_reward("q", c, "B"), lambda c: exact_reward("q", c, "18"),
                      lambda c: format_reward("q", c, "<think>.*</think>.*")):
            assert score(text) in (0.0, 1.0)
    if marker not in (r"\boxed{", "}", r"\text{", "{", r"\frac{", r"\sqrt{"):
        assert boxed_reward("q", long + "\n so it is \\boxed{18}", "18") == 1.0
    assert boxed_reward("q", r"\boxed{" * 10_000 + r"\boxed{18}", "18") == 1.0  # the last one that is closed
    assert math_reward("q", r"\boxed{18} " + marker, "18") in (0.0, 1.0)


@pytest.mark.full
@pytest.mark.parametrize("said", ["9" * 400, "9" * 100_000, "10^{10^{10}}", "9^{9^{9^{9}}}", "0." + "0" * 5000 + "1", "1/" + "7" * 400, "99999!",
                                  "((((" * 500 + "1" + "))))" * 500, r"\frac{1}{" * 300 + "2" + "}" * 300])
def test_what_cannot_be_computed_is_wrong(said):
    said = "\\boxed{" + said + "}"
    assert math_reward("q", said, "18") == boxed_reward("q", said, "18") == 0.0


@pytest.mark.full
def test_a_pattern_without_end_is_no_match():
    """A completion that sends a pattern backtracking is one that does not match; a pattern that is none is an error."""
    assert format_reward("q", "a" * 60 + "!", "(a+)+b") == 0.0
    with pytest.raises(re.error):
        format_reward("q", "a", "(")


def test_what_the_reference_causes_is_raised():
    with pytest.raises(ValueError, match="needs a letter as reference answer"):
        choice_reward("q", "B", "seven")
