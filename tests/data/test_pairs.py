"""Rows with a chosen and a rejected answer, or with an answer and a label: what they are read as, and what is refused."""

import json

import numpy as np
import pytest
from helpers.data_cases import TEMPLATE, make_config, make_tokenizer, write_jsonl

from jaxrl.data import DataError, load_eval_sets, load_tokenizer, load_train, make_pairs

USER, GOOD, BAD = ({"role": "user", "content": "Q"}, {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"})
ASIDE = {"role": "system", "content": "S"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {"plain": make_tokenizer(tmp_path_factory.mktemp("plain")),
            "chat": make_tokenizer(tmp_path_factory.mktemp("chat"), template=TEMPLATE)}


def read(tokenizer, tmp_path, *rows, **options):
    config = make_config(tokenizer, write_jsonl(tmp_path / "r.jsonl", rows), run__recipe="preference", **options)
    tok = load_tokenizer(config)
    return load_train(config, tok, tok.eos_token_id), tok


def test_a_pair_of_texts(tokenizers, tmp_path):
    """Both end with the end token; the prompt's beginning in an answer stays there; other columns are kept, the answers are not among them."""
    row = {"prompt": "2+2", "chosen": "2+2=4", "rejected": "2+2=5", "margin": 2, "answer": "4"}
    data, tok = read(tokenizers["plain"], tmp_path, row, {**row, "prompt": "other"})
    e = data[0]
    assert tok.decode(e.target_ids) == "2+2=4<eos>" and tok.decode(e.rejected_ids) == "2+2=5<eos>" and e.prompt == "2+2"
    assert e.columns == {"margin": 2.0, "answer": "4"} and isinstance(e.columns["margin"], float) and e.trained is None
    assert list(data.target_lengths) == list(data.rejected_lengths) == [6, 6] and list(data.prompt_lengths) == [3, 5]
    np.testing.assert_array_equal(data[1].rejected_ids, e.rejected_ids)


@pytest.mark.parametrize("row, prompt", [
    ({"prompt": "Q", "chosen": [GOOD], "rejected": [BAD]}, "<user>Q<end><assistant>"),
    ({"prompt": [ASIDE, USER], "chosen": "yes", "rejected": "no"}, "<system>S<end><user>Q<end><assistant>"),
    ({"prompt": "Q", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "<user>Q<end><assistant>"),
    ({"prompt": "Q", "chosen": [ASIDE, USER, GOOD], "rejected": [ASIDE, USER, BAD]}, "<system>S<end><user>Q<end><assistant>"),
    ({"prompt": [ASIDE, USER], "chosen": [ASIDE, USER, GOOD], "rejected": [ASIDE, USER, BAD]}, "<system>S<end><user>Q<end><assistant>"),
    ({"chosen": [USER, BAD, USER, GOOD], "rejected": [USER, BAD, USER, BAD]},
     "<user>Q<end><assistant>no<end><user>Q<end><assistant>"),
])
def test_the_prompt_stands_apart_or_before_both_answers(tokenizers, tmp_path, row, prompt):
    data, tok = read(tokenizers["chat"], tmp_path, row)
    e = data[0]
    assert e.prompt_text == tok.decode(e.prompt_ids) == prompt
    assert tok.decode(e.target_ids) == "yes<end>" and tok.decode(e.rejected_ids) == "no<end>"


@pytest.mark.parametrize("chosen, rejected, prompt", [
    ("H: hi\n\nA: the cat", "H: hi\n\nA: the dog", "H: hi\n\nA: the"), ("H: 4\nA: 41", "H: 4\nA: 42", "H: 4\nA:"), ("P yes", "P yes indeed", "P"),
])
def test_texts_without_a_prompt_share_its_words(tokenizers, tmp_path, chosen, rejected, prompt):
    data, tok = read(tokenizers["plain"], tmp_path, {"chosen": chosen, "rejected": rejected})
    e = data[0]
    assert e.prompt == prompt and prompt + tok.decode(e.target_ids) == chosen + "<eos>"
    assert prompt + tok.decode(e.rejected_ids) == rejected + "<eos>"


def test_an_answer_with_a_label(tokenizers, tmp_path):
    rows = [{"prompt": "Q", "completion": "a", "label": label} for label in (True, False, 1, 0.0)]
    data, tok = read(tokenizers["plain"], tmp_path, *rows, preference__loss=("kto", "nll"))
    assert [data[i].columns["label"] for i in range(4)] == [True, False, True, False]
    assert data[0].rejected_ids is None and tok.decode(data[0].target_ids) == "a<eos>" and list(data.rejected_lengths) == [0] * 4


def test_columns_of_pairs_are_mapped(tokenizers, tmp_path):
    names = {"data__chosen_column": "good", "data__rejected_column": "bad", "data__label_column": "fine", "data__margin_column": "lead"}
    rows = [{"prompt": "Q", "good": "a", "bad": "b", "lead": 3, "chosen": "x", "label": 7}, {"prompt": "Q", "completion": "c", "fine": 0}]
    data, tok = read(tokenizers["plain"], tmp_path, *rows, **names, preference__loss=("kto",))
    assert tok.decode(data[0].target_ids) == "a<eos>" and tok.decode(data[0].rejected_ids) == "b<eos>"
    assert data[0].columns == {"lead": 3.0, "chosen": "x", "label": 7, "answer": None} and data[1].columns == {"fine": False, "answer": None}
    with pytest.raises(DataError, match="column 'lead' .data.margin_column. holds 'much'"):
        read(tokenizers["plain"], tmp_path, {**rows[0], "lead": "much"}, **names)


@pytest.mark.parametrize("row, why", [
    ({"prompt": "Q", "chosen": "a"}, "column 'rejected' is missing.*data.rejected_column"),
    ({"prompt": "Q", "rejected": "a"}, "column 'chosen' is missing"), ({"prompt": "Q"}, "column 'chosen' is missing"),
    ({"prompt": "Q", "completion": "a", "label": True}, "preference.loss=dpo compares two.*set preference.loss=kto"),
    ({"prompt": "Q", "chosen": "a", "rejected": "a"}, "the same completion"),
    ({"prompt": "Q", "chosen": "a", "rejected": [BAD]}, "one is text, the other is not"),
    ({"prompt": "Q", "chosen": [USER, GOOD], "rejected": [ASIDE, USER, BAD]}, "the messages before the completion differ"),
    ({"prompt": "R", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "not those of column 'prompt'"),
    ({"prompt": "Q", "chosen": [USER, GOOD], "rejected": [USER]}, "'rejected' ends with the role 'user'"),
    ({"chosen": [GOOD], "rejected": [BAD]}, "there is no prompt"), ({"chosen": "yes", "rejected": "no"}, "there is no prompt"),
    ({"prompt": "Q", "chosen": "a", "rejected": "b", "margin": float("nan")}, "margin.*holds nan"),
    ({"prompt": "Q", "chosen": "a", "rejected": "b", "margin": 10**400}, "margin.*holds an integer beyond float64"),
])
def test_bad_rows_are_named(tokenizers, tmp_path, row, why):
    with pytest.raises(DataError, match=f"r.jsonl:1.*{why}"):
        read(tokenizers["chat"], tmp_path, row)


@pytest.mark.parametrize("row, why", [
    ({"prompt": "Q", "completion": "a"}, "column 'label' is missing.*data.label_column"),
    ({"prompt": "Q", "label": True}, "column 'completion' is missing"),
    ({"prompt": "Q", "completion": "a", "label": "good"}, "column 'label' .data.label_column. holds 'good'"),
    ({"prompt": "Q", "completion": "a", "label": 0.5}, "holds 0.5, expected true or false"),
])
def test_bad_labels_are_named(tokenizers, tmp_path, row, why):
    with pytest.raises(DataError, match=f"r.jsonl:1.*{why}"):
        read(tokenizers["chat"], tmp_path, row, preference__loss=("kto",))


def test_both_answers_are_held_to_the_limits(tokenizers, tmp_path):
    """A pair is left out whole, and counted, where one of its answers is too long alone or with the prompt."""
    rows = [{"prompt": "ab", "chosen": "x" * n, "rejected": "y" * m} for n, m in ((3, 3), (9, 3), (3, 9))]
    data, _ = read(tokenizers["plain"], tmp_path, *rows, rollout__max_new_tokens=9)
    assert len(data) == 1 and data.filtered_rows == [1, 2]
    assert len(read(tokenizers["plain"], tmp_path, *rows, rollout__max_new_tokens=99, train__max_sequence_tokens=10)[0]) == 1
    with pytest.raises(DataError, match="r.jsonl:3: the rejected completion has 10 tokens, rollout.max_new_tokens=9"):
        read(tokenizers["plain"], tmp_path, rows[0], rows[0], rows[2], rollout__max_new_tokens=9, data__overlong_prompt="error")


def test_the_fingerprint_sees_the_rejected_answer(tokenizers, tmp_path):
    row = {"prompt": "Q", "chosen": "a", "rejected": "b"}
    one, other = (read(tokenizers["plain"], tmp_path, {**row, "rejected": text})[0].fingerprint for text in "bc")
    assert one != other


def test_held_out_sets_are_of_pairs_or_of_prompts(tokenizers, tmp_path):
    rows = [{"prompt": "Q", "answer": "4", "completion": "ignored"}, {"prompt": "Q", "answer": "4", "label": "a class"},
            {"prompt": "Q", "chosen": "a", "rejected": "b"}]
    path = write_jsonl(tmp_path / "e.jsonl", rows)
    config = make_config(tokenizers["plain"], path, run__recipe="preference", eval__sets=(f"test={path}",))
    tok = load_tokenizer(config)
    data = load_eval_sets(config, tok, tok.eos_token_id)["test"]
    assert data[0].target_ids is None and data[0].answer == "4" and list(data.target_lengths) == [0, 0, 2]


def test_pairs_of_one_prompt_stay_on_one_side(tokenizers, tmp_path):
    """Also where the prompt stands in the answers alone."""
    rows = [{"chosen": [{**USER, "content": f"Q{i // 2}"}, GOOD], "rejected": [{**USER, "content": f"Q{i // 2}"}, BAD]} for i in range(12)]
    data, _ = read(tokenizers["chat"], tmp_path, *rows, data__eval_fraction=0.5)
    train, held = ({ds[i].prompt_text for i in range(len(ds))} for ds in (data, data.heldout))
    assert not train & held and len(train) == len(held) == 3 and len(data) == 6


def record(prompt, completion, score, finish="stop", **parts):
    return {"prompt": f"<{prompt}>", "asked": prompt, "completion": completion, "score": score, "answer": "4", "finish": finish,
            "reward": {"parts": parts}}


def test_pairs_are_made_of_scored_completions(tmp_path, capsys):
    """The best against the worst of a prompt, however its answers lie; what cannot be compared is counted. They are read as they were asked."""
    records = [record("p", "good", 1.0, style=0.0), record("q", "so", 1.0), record("p", "bad", 0.0, style=0.0), record("p", "fine", 1.0, style=0.4),
               record("p", "good", 1.0), record("p", "endless", -1.0, finish="length"), record("p", "failed", None), record("q", "lala", 1.0),
               record("p", "worst", -0.5, style=1.0)]
    first, second = write_jsonl(tmp_path / "a.jsonl", records[:4]), write_jsonl(tmp_path / "b.jsonl", records[4:])
    make_pairs.main([str(first), str(second), "--out", str(tmp_path / "pairs.jsonl"), "--per-prompt=3"])
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert rows == [{"prompt": "p", "chosen": "good", "rejected": "worst", "margin": 1.5, "answer": "4"},
                    {"prompt": "p", "chosen": "fine", "rejected": "bad", "margin": 1.0, "answer": "4"}]
    said = capsys.readouterr().out
    for text in ("2 pairs in", "1 without a score", "1 cut by the length limit", "1 equal texts", "2 prompts", "1 prompts without a pair"):
        assert text in said
    assert make_pairs.make_pairs(records, gap=1.4)[0] == rows[:1] and make_pairs.make_pairs(records, gap=1.5)[0] == []
    assert [r["chosen"] for r in make_pairs.make_pairs(records, reward="style")[0]] == ["worst"]
    third = tmp_path / "c.jsonl"  # line ends of Unicode within a text end no line
    third.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in (
        record("p", "a\u2028b\x85c", 1.0), record("p", "d", 0.0))), "utf-8")
    make_pairs.main([str(third), "--out", str(tmp_path / "pairs.jsonl")])
    assert json.loads((tmp_path / "pairs.jsonl").read_text("utf-8"))["chosen"] == "a\u2028b\x85c"
    for gap in (-0.1, float("nan")):
        with pytest.raises(ValueError, match=f"gap={gap}: must be at least 0"):
            make_pairs.make_pairs(records, gap=gap)
    with pytest.raises(SystemExit):
        make_pairs.main([str(first), "--gap=-1", "--out", str(tmp_path / "pairs.jsonl")])


@pytest.mark.full
def test_the_embedded_pairs_are_right_against_wrong(tokenizers):
    """Prompts of the task's own files, the held-out ones apart; `boxed` tells every pair apart."""
    from jaxrl.rewards.builtin import boxed_reward

    prompts = {}
    for name, source in (("pairs", "train"), ("pairs_test", "test")):
        c = make_config("jaxrl://arith/tokenizer", f"jaxrl://arith/{name}.jsonl", run__recipe="preference", data__max_prompt_tokens=40,
                        rollout__max_new_tokens=72)
        tok = load_tokenizer(c)
        data = load_train(c, tok, tok.eos_token_id)
        assert not data.filtered and not data.unknown_prompts
        c.data.path, c.run.recipe = (f"jaxrl://arith/{source}.jsonl",), "rl"
        known = load_train(c, tok)
        answers = {known[i].prompt: known[i].answer for i in range(len(known))}
        for i in range(len(data)):
            e = data[i]
            assert answers[e.prompt] == e.answer
            good, bad = (tok.decode(ids, skip_special_tokens=True) for ids in (e.target_ids, e.rejected_ids))
            assert boxed_reward(e.prompt, good, e.answer) == 1 and boxed_reward(e.prompt, bad, e.answer) == 0
        prompts[name] = {data[i].prompt for i in range(len(data))}
    assert len(prompts["pairs"]) > 1000 and len(prompts["pairs_test"]) > 300 and not prompts["pairs"] & prompts["pairs_test"]
