"""What is trained on is what the chat template writes, whatever a job reads: one answer, all of them, pairs."""

import json
import random

import numpy as np
import pytest
from helpers.data_cases import make_config, write_jsonl
from helpers.turn_cases import FAMILIES, TOOLS, make_tokenizer

from jaxrl.data import DataError, end_of_turn, load_tokenizer, load_train

HEADER = "<|start_header_id|>%s<|end_header_id|>\n\n"
TEMPLATES = {  # of the shapes of public templates -> (template, special tokens: the first ends texts), beside those of FAMILIES
    "llama2": ("{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}"
               "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}", ("</s>",)),
    "llama3": ("{{ bos_token }}{% for m in messages %}" + HEADER % "{{ m.role }}" + "{{ m.content | trim }}<|eot_id|>{% endfor %}"
               "{% if add_generation_prompt %}" + HEADER % "assistant" + "{% endif %}",
               ("<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")),
    "qwen3": ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% if loop.last or m.reasoning_content %}"
              "<think>\n{{ m.reasoning_content | default('', true) | trim('\n') }}\n</think>\n\n{% endif %}{{ m.content | trim('\n') }}"
              "{% for c in m.tool_calls or [] %}\n<tool_call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": "
              "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}"
              "}\n</tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
              "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", ("<|endoftext|>", "<|im_end|>", "<|im_start|>")),
    "mistral1": ("{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ ' [INST] ' + m.content + ' [/INST]' }}"
                 "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}", ("</s>",)),
    "phi3": ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}"
             "<|assistant|>\n{% else %}{{ eos_token }}{% endif %}", ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>")),
    "zephyr": ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content + eos_token }}\n{% endfor %}{% if add_generation_prompt %}"
               "<|assistant|>\n{% endif %}", ("</s>", "<|user|>", "<|assistant|>")),
}
ALL = {name: (row[0], row[1], row[2]) for name, row in FAMILIES.items() if name not in ("opened", "plain")}
ALL |= {name: (template, special, ()) for name, (template, special) in TEMPLATES.items()}
SPELLED = ["Four.", "  Four. ", "\nFour\n", "4 🙂 数", "a\n\n b", " ", "'quoted' \"text\" {x}"]


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(value, arguments=lambda a: a):
    return [{"id": "ABCDEFGH1", "type": "function", "function": {"name": "add", "arguments": arguments({"a": value})}}]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Name -> (folder, tokenizer)."""
    made = {}
    for name, (template, special, added) in ALL.items():
        folder = tmp_path_factory.mktemp(name)
        make_tokenizer(template, special, added).save_pretrained(folder)
        made[name] = folder, load_tokenizer(make_config(folder))
    return made


def load(folder, tokenizer, tmp_path, rows, **options):
    config = make_config(folder, write_jsonl(tmp_path / "rows.jsonl", rows), **{"run__recipe": "sft", **options})
    end = end_of_turn(config, tokenizer)
    return list(load_train(config, tokenizer, tokenizer.eos_token_id if end is None else end))


def written(tokenizer, messages, **kwargs):
    return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)


def check(tokenizer, messages, prompt_ids, target_ids, **kwargs):
    """Prompt and target together are what the template writes, up to the end of its turn; and spelled by its own ids."""
    text = written(tokenizer, messages, **kwargs)
    ids = [*prompt_ids, *target_ids]
    mine = tokenizer.decode(ids, skip_special_tokens=False)
    rest = text.removeprefix(mine) if text.startswith(mine) else None
    ended = mine.endswith(tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special))
    assert rest is not None or (ended and mine.startswith(text.rstrip("\n"))), (mine, text)
    assert ended and not (rest or "").strip("\n").replace(tokenizer.eos_token, ""), (mine, text)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[:len(whole)] == whole[:len(ids)]
    before = written(tokenizer, messages[:-1], add_generation_prompt=True, **kwargs)
    assert tokenizer.decode(prompt_ids, skip_special_tokens=False) == before


@pytest.mark.parametrize("family", ALL)
def test_last_and_all_train_the_templates_own_ids(tokenizers, tmp_path, family):
    """Of one answer behind one question, of text that templates trim and pad; rows as messages, as prompt and completion."""
    folder, tokenizer = tokenizers[family]
    texts = SPELLED if family not in ("gemma", "llama") else SPELLED[:-2]
    asked = [[user("2+2?"), said(text)] for text in texts]
    rows = [{"prompt": messages} for messages in asked] + [{"prompt": "2+2?", "completion": text} for text in texts]
    last = load(folder, tokenizer, tmp_path, rows)
    every = load(folder, tokenizer, tmp_path, [{"prompt": messages} for messages in asked], data__train_turns="all")
    for k, messages in enumerate(asked):
        check(tokenizer, messages, last[k].prompt_ids, last[k].target_ids)
        for other in (last[k + len(asked)], every[k]):
            assert np.array_equal(other.prompt_ids, last[k].prompt_ids)
            assert np.array_equal(other.target_ids, last[k].target_ids), texts[k]
        assert every[k].trained.all()
    pairs = [{"prompt": "2+2?", "chosen": text, "rejected": "Five."} for text in texts]
    for recipe in ("preference", "reward_model"):
        for k, example in enumerate(load(folder, tokenizer, tmp_path, pairs, run__recipe=recipe)):
            assert np.array_equal(example.target_ids, last[k].target_ids)
            check(tokenizer, [user("2+2?"), said("Five.")], example.prompt_ids, example.rejected_ids)


def test_calls_thoughts_and_null_content_are_trained_on_as_written(tokenizers, tmp_path):
    """As messages, and as the completion; calls as objects or JSON text; the row's tools reach the template."""
    for family, kwargs in (("qwen3", {}), ("hermes", {"tools": TOOLS}), ("mistral", {})):
        folder, tokenizer = tokenizers[family]
        answers = [said(None, tool_calls=call(2)), said(None, tool_calls=call(2, json.dumps))]
        answers += [said("4", reasoning_content="2+2=4"), said("4", reasoning_content=None, tool_calls=None)]
        for k, answer in enumerate(answers):
            more = {"tools": kwargs["tools"]} if kwargs else {}
            rows = [{"prompt": [user("2+2?"), answer], **more}, {"prompt": "2+2?", "completion": [answer], **more}]
            found = load(folder, tokenizer, tmp_path, rows)
            found += load(folder, tokenizer, tmp_path, rows[:1], data__train_turns="all")
            if k < 2:
                found += load(folder, tokenizer, tmp_path, [{"chosen": rows[0]["prompt"], "rejected": [user("2+2?"), said("no")],
                                                             **more}], run__recipe="preference")
            plain = {name: value for name, value in answer.items() if value is not None}
            plain |= {"content": answer["content"] or ""} | ({"tool_calls": call(2)} if k < 2 else {})
            for example in found:
                check(tokenizer, [user("2+2?"), plain], example.prompt_ids, example.target_ids, **kwargs)
            text = tokenizer.decode(found[0].target_ids)
            assert ("add" in text) == (k < 2) and (k != 2 or family != "qwen3" or "2+2=4" in text)


def test_a_history_of_calls_is_rendered_alike_by_every_job(tokenizers, tmp_path):
    """RL, SFT of the last answer and of all, preferences: arguments as JSON text are parsed, tools reach the template."""
    folder, tokenizer = tokenizers["hermes"]
    history = [user("2+2?"), said("", tool_calls=call(2, json.dumps)), {"role": "tool", "content": "4"}]
    right = written(tokenizer, [history[0], said("", tool_calls=call(2)), history[2]], tools=TOOLS, add_generation_prompt=True)
    kinds = {"rl": {"prompt": history, "answer": "4"}, "sft": {"prompt": [*history, said("Four.")]},
             "preference": {"prompt": history, "chosen": "Four.", "rejected": "Five."},
             "reward_model": {"prompt": history, "chosen": "Four.", "rejected": "Five."}}
    for recipe, row in kinds.items():
        example, = load(folder, tokenizer, tmp_path, [{**row, "tools": TOOLS}], run__recipe=recipe)
        assert tokenizer.decode(example.prompt_ids) == example.prompt_text == right


def test_different_calls_and_thoughts_are_different_answers(tokenizers, tmp_path):
    folder, tokenizer = tokenizers["qwen3"]
    pair = lambda a, b: {"chosen": [user("2+2?"), a], "rejected": [user("2+2?"), b]}  # noqa: E731
    rows = [pair(said(None, tool_calls=call(2)), said(None, tool_calls=call(3))),
            pair(said("4", reasoning_content="yes"), said("4", reasoning_content="no"))]
    for example in load(folder, tokenizer, tmp_path, rows, run__recipe="preference"):
        assert not np.array_equal(example.target_ids, example.rejected_ids)
    with pytest.raises(DataError, match="hold the same completion"):
        load(folder, tokenizer, tmp_path, [pair(said("4", reasoning_content="yes"), said("4", reasoning_content="yes"))],
             run__recipe="preference")


@pytest.mark.full
def test_random_conversations(tokenizers, tmp_path):
    """200 of one to three rounds: the last answer is trained on as the template writes it."""
    rng = random.Random(5)
    words = ["a", "Zahl 7", "é", "数", "🙂", "\n", " ", '"', "{x}", "<", "'", "4.", "  "]
    for k in range(200):
        folder, tokenizer = tokenizers[family := rng.choice(list(ALL))]
        text = lambda: "x" + "".join(rng.choice(words) for _ in range(rng.randrange(8)))  # noqa: E731, B023
        messages = [m for _ in range(rng.randrange(1, 4)) for m in (user(text()), said(text()))]
        example, = load(folder, tokenizer, tmp_path, [{"prompt": messages}])
        check(tokenizer, messages, example.prompt_ids, example.target_ids), (k, family)


def test_what_cannot_be_trained_on_whole_is_refused_by_name(tokenizers, tmp_path):
    folder, tokenizer = tokenizers["hermes"]
    for row, what in (({"prompt": "q", "completion": [said("a"), user("b"), said("c")]}, "messages of assistant, user, assistant"),
                      ({"prompt": "q", "completion": [user("a")]}, "expected one of the assistant")):
        with pytest.raises(DataError, match=what):
            load(folder, tokenizer, tmp_path, [row])
    template, special, added, *_ = FAMILIES["opened"]
    make_tokenizer(template, special, added).save_pretrained(tmp_path / "opened")
    opened = load_tokenizer(make_config(tmp_path / "opened"))
    with pytest.raises(DataError, match="other tokens than sampling: use another model.chat_template"):
        load(tmp_path / "opened", opened, tmp_path, [{"prompt": "q", "completion": "a"}])
    with pytest.raises(DataError, match="which only a chat template can write"):
        load(folder, tokenizer, tmp_path, [{"prompt": "q", "completion": [said(None, tool_calls=call(2))]}], data__chat="false")


def test_the_template_ends_the_turn_whatever_the_model_names_first(tokenizers):
    for family in ("llama3", "qwen3", "phi3", "hermes"):
        folder, tokenizer = tokenizers[family]
        ends = {"llama3": "<|eot_id|>", "phi3": "<|end|>"}.get(family, "<|im_end|>")
        assert tokenizer.decode([end_of_turn(make_config(folder), tokenizer)]) == ends
    folder, tokenizer = tokenizers["llama3"]
    assert end_of_turn(make_config(folder, data__chat="false"), tokenizer) is None
