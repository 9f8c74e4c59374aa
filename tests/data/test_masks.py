"""Which tokens of a conversation are trained on, against conversations marked by hand, and rows that are too long."""

import numpy as np
import pytest
from helpers.data_cases import make_config, write_jsonl
from helpers.turn_cases import FAMILIES, make_tokenizer

from jaxrl.data import DataError, load_tokenizer, load_train
from jaxrl.data.mixture import Mixture
from jaxrl.data.overlong import Limits, fit_completion
from jaxrl.errors import ConfigError
from jaxrl.resolve.checks.common import check

ZEPHYR = ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
          "{% if add_generation_prompt %}<|assistant|>\n{% endif %}")
TEMPLATES = {name: row[:3] for name, row in FAMILIES.items()} | {
    "zephyr": (ZEPHYR, ("</s>", "<|user|>", "<|assistant|>", "<|system|>"), ())}
ASKED = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "Four."},
         {"role": "user", "content": "And 3+3?"}, {"role": "assistant", "content": "Six."}]
CHATML = ("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n«Four.<|im_end|>»\n<|im_start|>user\nAnd 3+3?<|im_end|>\n"
          "<|im_start|>assistant\n«Six.<|im_end|>»")
LLAMA = "<|start_header_id|>%s<|end_header_id|>\n\n"
BY_HAND = {  # what is trained on stands in «»
    "hermes": CHATML,
    "thoughts": CHATML,
    "pythonic": CHATML,
    "llama": "<bos>" + LLAMA % "user" + "2+2?<|eot_id|>" + LLAMA % "assistant" + "«Four.<|eot_id|>»" + LLAMA % "user"
             + "And 3+3?<|eot_id|>" + LLAMA % "assistant" + "«Six.<|eot_id|>»",
    "mistral": "<bos>[INST]2+2?[/INST]«Four.</s>»[INST]And 3+3?[/INST]«Six.</s>»",
    "gemma": "<bos><start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n«Four.<end_of_turn>»\n<start_of_turn>user\n"
             "And 3+3?<end_of_turn>\n<start_of_turn>model\n«Six.<end_of_turn>»",
    "opener": "<|user|>\n2+2?<|assistant|>\n«Four.<|endoftext|>»<|user|>\nAnd 3+3?<|assistant|>\n«Six.<|endoftext|>»",
    "command": "<bos><|turn|><|user|>2+2?<|over|><|turn|><|bot|><|begin|>«Four.<|finish|><|over|>»<|turn|><|user|>And 3+3?"
               "<|over|><|turn|><|bot|><|begin|>«Six.<|finish|><|over|>»",
    "plain": "user: 2+2?\nassistant: «Four.<eos>»\nuser: And 3+3?\nassistant: «Six.<eos>»",
    "zephyr": "<|user|>\n2+2?</s>\n<|assistant|>\n«Four.</s>»\n<|user|>\nAnd 3+3?</s>\n<|assistant|>\n«Six.</s>»",
}


def load(tmp_path, template, special, added, rows, **options):
    make_tokenizer(template, special, added).save_pretrained(tmp_path / "t")
    config = make_config(tmp_path / "t", write_jsonl(tmp_path / "rows.jsonl", rows), run__recipe="sft",
                         **{"data__train_turns": "all", **options})
    config.model.path = "some/model"
    check(config)
    tokenizer = load_tokenizer(config)
    return load_train(config, tokenizer, tokenizer.eos_token_id), tokenizer


def shown(example, tokenizer):
    """The whole sequence as text, what is trained on in «»."""
    mask = np.concatenate([np.zeros(len(example.prompt_ids), bool), example.trained])
    ids, text = np.concatenate([example.prompt_ids, example.target_ids]), ""
    for piece, own in zip(*(np.split(a, np.flatnonzero(np.diff(mask)) + 1) for a in (ids, mask)), strict=True):
        text += "«" * bool(own[0]) + tokenizer.decode(piece) + "»" * bool(own[0])
    return text


@pytest.mark.parametrize("name", BY_HAND)
def test_masks_are_those_marked_by_hand(tmp_path, name):
    """Ten templates: the generation prompt masked, the end token trained on, whatever the template calls them."""
    (example,), tokenizer = load(tmp_path, *TEMPLATES[name], [{"prompt": ASKED}])
    assert shown(example, tokenizer) == BY_HAND[name]
    assert example.prompt_text == BY_HAND[name].partition("«")[0]


def test_a_template_that_begins_turns_otherwise_than_it_writes_them_is_refused(tmp_path):
    with pytest.raises(DataError, match="rows.jsonl:1: the chat template does not write the turn after its generation prompt"):
        load(tmp_path, *TEMPLATES["opened"], [{"prompt": ASKED}])


def test_thoughts_of_earlier_turns_are_trained_on_as_they_are_sampled(tmp_path):
    """The template drops them once a user answers, so that the conversation rendered whole holds them no more."""
    messages = [ASKED[0], {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nFour."}, *ASKED[2:]]
    (example,), tokenizer = load(tmp_path, *TEMPLATES["thoughts"], [{"prompt": messages}])
    assert shown(example, tokenizer) == CHATML.replace("«Four.", "«<think>\nHm.\n</think>\n\nFour.")
    assert "Hm." not in tokenizer.apply_chat_template(messages, tokenize=False)


G, END = "{% generation %}", "{% endgeneration %}"
NEWLINE = "{{ '\\n' }}"  # behind a tag Jinja eats a plain one
MARKED = {  # how a template marks its answers: pieces of it -> with marks
    "hermes": {"assistant\n{{ m.content }}": "assistant\n" + G + "{{ m.content }}", "{% endfor %}<|im_end|>\n{% else": "{% endfor %}"
               "<|im_end|>" + END + NEWLINE + "{% else"},
    "thoughts": {"{% set last = ": G + "{% set last = ", "{% endfor %}<|im_end|>\n{% else": "{% endfor %}" + END + "<|im_end|>\n{% else"},
    "llama": {"{{ m.content | trim }}<|eot_id|>{% endif %}": "{% if m.role == 'assistant' %}" + G + "{{ m.content | trim }}" + END
              + "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endif %}"},
    "mistral": {"{{ m.content }}</s>{% else": G + "{{ m.content }}</s>" + END + "{% else"},
    "gemma": {"{{ m.content | trim }}<end_of_turn>\n": "{% if m.role == 'assistant' %}" + G + "{{ m.content | trim }}<end_of_turn>" + END
              + "{% else %}{{ m.content | trim }}<end_of_turn>{% endif %}" + NEWLINE},
    "command": {"{{ m.content }}<|finish|>": G + "{{ m.content }}<|finish|>" + END},
}


def marked(name, pieces=None):
    template, special, added = TEMPLATES[name]
    for before, after in (pieces or MARKED[name]).items():
        assert before in template
        template = template.replace(before, after)
    return template, special, added


@pytest.mark.parametrize("name", MARKED)
def test_the_templates_own_marks_say_the_same(tmp_path, name):
    """Whether the end token stands inside the marks or behind them."""
    (example,), tokenizer = load(tmp_path, *marked(name), [{"prompt": ASKED}], data__assistant_mask="template")
    assert shown(example, tokenizer) == BY_HAND[name]


def test_a_generation_prompt_inside_the_marks_is_masked(tmp_path):
    wrapped = {"<|im_start|>assistant\n{{ m.content }}": G + "<|im_start|>assistant\n{{ m.content }}",
               "{% endfor %}<|im_end|>\n{% else": "{% endfor %}<|im_end|>" + END + NEWLINE + "{% else"}
    (example,), tokenizer = load(tmp_path, *marked("hermes", wrapped), [{"prompt": ASKED}], data__assistant_mask="template")
    assert shown(example, tokenizer) == CHATML


def test_a_turn_without_an_end_in_the_template(tmp_path):
    """The tokenizer's end token behind the last one; before it, what begins the next message where that is an end token."""
    pieces = {"<|assistant|>\n{{ m.content }}": "<|assistant|>\n" + G + "{{ m.content }}", "{% endfor %}{% endif %}{% endfor %}":
              "{% endfor %}" + END + "{% endif %}{% endfor %}"}
    options = {"data__assistant_mask": "template", "model__eos_tokens": ("<|endoftext|>", "<|user|>")}
    (example,), tokenizer = load(tmp_path, *marked("opener", pieces), [{"prompt": ASKED}], **options)
    assert shown(example, tokenizer) == ("<|user|>\n2+2?<|assistant|>\n«Four.<|user|>»\nAnd 3+3?<|assistant|>\n«Six.<|endoftext|>»")
    with pytest.raises(DataError, match="no end token follows the assistant message 'Four.'"):
        load(tmp_path, *marked("opener", pieces), [{"prompt": ASKED}], data__assistant_mask="template")


@pytest.mark.parametrize("mask", ["turns", "template"])
def test_messages_that_are_read_and_not_learnt(tmp_path, mask):
    template = marked("hermes") if mask == "template" else TEMPLATES["hermes"]
    flagged = lambda *flags: [m | ({} if f is None else {"train": f}) for m, f in zip(ASKED, flags, strict=True)]  # noqa: E731
    rows = [{"prompt": flagged(None, False, False, True)}, {"prompt": flagged(None, True, None, False)}]
    (second, first), tokenizer = load(tmp_path, *template, rows, data__assistant_mask=mask)
    assert shown(second, tokenizer) == CHATML.replace("«Four.<|im_end|>»", "Four.<|im_end|>")
    assert shown(first, tokenizer) == CHATML.partition("»")[0] + "»"  # what is behind the last trained token teaches nothing
    for flags, what in (((None, False, None, False), "rows.jsonl:1: no token of this conversation is trained on"),
                        ((True, None, None, None), "message 0 \\(user\\) has train=True"),
                        ((None, None, None, "no"), "message 3 \\(assistant\\) has train='no'")):
        with pytest.raises(DataError, match=what):
            load(tmp_path, *template, [{"prompt": flagged(*flags)}], data__assistant_mask=mask)
    with pytest.raises(DataError, match="the last assistant message has train=false"):
        load(tmp_path, *TEMPLATES["hermes"], [{"prompt": flagged(None, None, None, False)}], data__train_turns="last")


def test_marks_that_do_not_tell(tmp_path):
    last_only = {"{{ m.content }}</s>{% else": "{% if loop.last %}" + G + "{{ m.content }}</s>" + END + "{% else %}{{ m.content }}</s>"
                 "{% endif %}{% else"}
    (example,), tokenizer = load(tmp_path, *marked("mistral", last_only), [{"prompt": ASKED}], data__assistant_mask="template")
    assert shown(example, tokenizer) == "<bos>[INST]2+2?[/INST]Four.</s>[INST]And 3+3?[/INST]«Six.</s>»"
    flagged = [ASKED[0], {**ASKED[1], "train": False}, *ASKED[2:]]
    with pytest.raises(DataError, match="marks 1 spans for 2 assistant messages, so train=false cannot be matched"):
        load(tmp_path, *marked("mistral", last_only), [{"prompt": flagged}], data__assistant_mask="template")
    never = {"{{ m.content }}</s>{% else": "{% if m.marked %}" + G + "{{ m.content }}</s>" + END + "{% else %}{{ m.content }}</s>{% endif %}{% else"}
    with pytest.raises(DataError, match="rows.jsonl:1: no token of this conversation is trained on"):
        load(tmp_path, *marked("mistral", never), [{"prompt": ASKED}], data__assistant_mask="template")
    smuggled = [{**ASKED[0], "content": "2</s>2?"}, *ASKED[1:]]
    with pytest.raises(DataError, match="message 0 \\(user\\) spells the control token '</s>'"):
        load(tmp_path, *marked("mistral"), [{"prompt": smuggled}], data__assistant_mask="template")
    with pytest.raises(ConfigError, match="has no {% generation %}"):
        load(tmp_path, *TEMPLATES["mistral"], [{"prompt": ASKED}], data__assistant_mask="template")
    with pytest.raises(ConfigError, match="data.assistant_mask='template' has no effect with data.train_turns=last"):
        load(tmp_path, *marked("mistral"), [{"prompt": ASKED}], data__assistant_mask="template", data__train_turns="last")


# -- rows that are too long --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("total", [0, 24])
def test_pieces_of_a_row_hold_each_token_once_behind_what_came_before(seed, total):
    rng = np.random.default_rng(seed)
    prompt, target = rng.integers(0, 99, rng.integers(1, 12)).tolist(), rng.integers(0, 99, rng.integers(20, 90))
    trained = None if seed % 2 else rng.random(len(target)) < 0.7
    limits = Limits(12, 16, total, "filter", "split")
    pieces, whole, at = fit_completion(limits, prompt, target, trained), np.concatenate([prompt, target]), len(prompt)
    assert len(pieces) > 1
    for piece in pieces:
        assert len(piece.prompt) <= 12 and 0 < len(piece.target) <= 16 and (not total or len(piece.prompt) + len(piece.target) <= total)
        assert piece.prompt and np.array_equal(np.concatenate([piece.prompt, piece.target]),
                                               whole[at - len(piece.prompt):at + len(piece.target)])
        if trained is not None:
            assert np.array_equal(piece.trained, trained[at - len(prompt):at - len(prompt) + len(piece.target)])
        at += len(piece.target)
    assert at == len(whole)
    (cut,) = fit_completion(limits._replace(completion="truncate"), prompt, target, trained)
    assert np.array_equal(cut.target, target[:len(pieces[0].target)]) and cut.prompt == prompt
    assert fit_completion(limits._replace(completion="filter"), prompt, target, trained) == []
    assert fit_completion(limits, prompt * 13, target, trained) == []  # the prompt alone is too long
    dark = np.zeros(len(target), bool)
    dark[-1] = True
    assert len(fit_completion(limits, prompt, target, dark)) == 1
    assert fit_completion(limits._replace(completion="truncate"), prompt, target, dark) == []


@pytest.mark.parametrize("policy, expected", [
    ("filter", ["«Six.<|im_end|>»"]),
    ("truncate", ["«Four, which i»", "«Six.<|im_end|>»"]),
    ("split", ["«Four, which i»", "«s twice two.<»", "«|im_end|>»", "«Six.<|im_end|>»"]),
])
def test_overlong_completions_are_counted_and_shown(tmp_path, caplog, policy, expected):
    caplog.set_level("INFO")
    rows = [{"prompt": ASKED[:1], "completion": "Four, which is twice two."}, {"prompt": ASKED[2:3], "completion": "Six."}]
    found, tokenizer = load(tmp_path, *TEMPLATES["hermes"], rows, data__overlong_completion=policy, data__train_turns="last",
                            rollout__max_new_tokens=13)
    texts = ["«" + tokenizer.decode(e.target_ids) + "»" for e in found]
    if policy == "split":
        expected = ["«Four, which i»", "«s twice two.<|im_end|>»", "«Six.<|im_end|>»"]
        assert found[1].prompt_text.endswith("assistant\nFour, which i") and found.split == [f"{tmp_path}/rows.jsonl:1"]
        assert "split into several rows" in caplog.text and "1 rows split" in found.describe()
    elif policy == "truncate":
        assert found.shortened == [f"{tmp_path}/rows.jsonl:1"] and "1 completions cut" in found.describe()
        assert tokenizer.eos_token_id not in found[0].target_ids
    assert texts == expected and found.filtered_fraction == (0.5 if policy == "filter" else 0)
    found.filtered = ["another row"]
    found.set_arrays(found.arrays)
    share = 1 / (2 if policy == "filter" else 3)  # a row that was split is one row, also among those of several sources
    assert Mixture({"a": found, "b": found}, {}).filtered_fraction == found.filtered_fraction == share
