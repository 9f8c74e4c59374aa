"""data.train_turns=all: every answer of a conversation is trained on, and nothing else."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data_cases import make_config, write_jsonl
from helpers.turn_cases import FAMILIES, TOOLS, make_tokenizer

from jaxrl import models, training
from jaxrl.data import DataError, load_eval_sets, load_tokenizer, load_train
from jaxrl.errors import ConfigError
from jaxrl.recipes.sft import demonstrations
from jaxrl.training import update


def said(content, *calls):
    tools = {"tool_calls": [{"id": f"ABCDEFGH{i}", "type": "function", "function": {"name": "add", "arguments": a}}
                            for i, a in enumerate(calls)]}
    return {"role": "assistant", "content": content, **(tools if calls else {})}


def user(content):
    return {"role": "user", "content": content}


def reply(content, i=0):
    return {"role": "tool", "content": content, "name": "add", "tool_call_id": f"ABCDEFGH{i}"}


TWO = [user("2+2?"), said("Four."), user("And 3+3?"), said("Six.")]
CALLED = [user("2+2?"), said(None, {"a": 2}), reply("4<|im_end|>"), said("Four.")]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    def made(family):
        template, special, added, *_ = FAMILIES[family]
        folder = tmp_path_factory.mktemp(family)
        make_tokenizer(template, special, added).save_pretrained(folder)
        return folder
    return {family: made(family) for family in FAMILIES}


def config_of(tokenizer, path, **options):
    return make_config(tokenizer, path, run__recipe="sft", **{"data__train_turns": "all", **options})


def load(tokenizer, tmp_path, rows, **options):
    config = config_of(tokenizer, write_jsonl(tmp_path / "rows.jsonl", rows), **options)
    tokenizer = load_tokenizer(config)
    return load_train(config, tokenizer, tokenizer.eos_token_id), tokenizer


def pieces(example, tokenizer):
    """Texts of what is trained on and of what stands between, in order."""
    edges = np.flatnonzero(np.diff(example.trained)) + 1
    parts = np.split(example.target_ids, edges)
    return [(bool(m[0]), tokenizer.decode(ids)) for ids, m in zip(parts, np.split(example.trained, edges), strict=True)]


def test_all_answers_are_trained_on_or_the_last_one(tokenizers, tmp_path):
    rows = [{"prompt": TWO}, {"prompt": TWO[:3], "completion": "Six."}]
    every, tokenizer = load(tokenizers["hermes"], tmp_path, rows)
    for example in every:
        assert tokenizer.decode(example.prompt_ids) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        assert pieces(example, tokenizer) == [
            (True, "Four.<|im_end|>"), (False, "\n<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n"),
            (True, "Six.<|im_end|>")]
    last, _ = load(tokenizers["hermes"], tmp_path, rows, data__train_turns="last")
    for example in last:
        assert tokenizer.decode(example.target_ids) == "Six.<|im_end|>" and example.trained is None
        assert "Four." in example.prompt_text
    assert last.fingerprint != every.fingerprint
    text, _ = load(tokenizers["hermes"], tmp_path, [{"prompt": "2+2?", "completion": "4"}])  # no messages: as ever
    assert text[0].trained is None and tokenizer.decode(text[0].target_ids) == "4<|im_end|>"


@pytest.mark.parametrize("family", ["hermes", "opener", "mistral", "llama", "pythonic"])
def test_calls_and_replies(tokenizers, tmp_path, family):
    """The template writes calls, whether their arguments are objects or JSON text; replies are masked, and their text
    makes no control token."""
    as_text = [CALLED[0], said("", json.dumps({"a": 2})), *CALLED[2:]]
    options = {"tools": json.dumps(TOOLS)} if family == "hermes" else {}
    (first, second), tokenizer = load(tokenizers[family], tmp_path, [{"prompt": c, **options} for c in (CALLED, as_text)])
    assert np.array_equal(first.target_ids, second.target_ids)
    (_, call), (masked, between), (_, answer) = pieces(first, tokenizer)
    assert "add" in call and not masked and "4<|im_end|>" in between and answer.startswith("Four.")
    whole = tokenizer.decode([*first.prompt_ids, *first.target_ids])
    rendered = tokenizer.apply_chat_template([CALLED[0], said("", {"a": 2}), *CALLED[2:]], tokenize=False,
                                             tools=TOOLS if options else None)
    assert (whole.replace(tokenizer.eos_token, "") if family == "opener" else whole) == rendered.removesuffix("\n")
    assert list(first.target_ids).count(tokenizer.convert_tokens_to_ids("<|im_end|>") or -1) == {
        "hermes": 3, "pythonic": 3}.get(family, 0)
    assert call.endswith(tokenizer.eos_token) and answer == "Four." + tokenizer.eos_token
    assert ('"add"' in tokenizer.decode(first.prompt_ids)) == bool(options)


def test_held_out_rows_are_as_ever(tokenizers, tmp_path):
    config = config_of(tokenizers["hermes"], write_jsonl(tmp_path / "rows.jsonl", [{"prompt": TWO}]),
                       eval__sets=(f"held={tmp_path}/rows.jsonl",))
    tokenizer = load_tokenizer(config)
    held = load_eval_sets(config, tokenizer, tokenizer.eos_token_id)["held"][0]
    assert "Four." in held.prompt_text and tokenizer.decode(held.target_ids) == "Six.<|im_end|>"


BAD = [  # family, messages, further columns, what is said
    ("hermes", TWO[:3], {}, "end with the role 'user'"),
    ("hermes", TWO[1:], {}, "begin with an answer"),
    ("hermes", [*TWO, said("Seven?")], {}, "messages 3 and 4 are both answers"),
    ("hermes", [user("?"), said("", "{broken"), reply("4"), said("Four.")], {}, "the arguments of 'add' are no JSON"),
    ("hermes", TWO, {"tools": "[{"}, "column 'tools' is no JSON"),
    ("hermes", TWO, {"tools": [3]}, "no list of JSON schemas"),
    ("gemma", CALLED, {}, "roles alternate"),
    ("opened", TWO, {}, "does not write the turn behind what a turn begins with"),
    ("hermes", [user("?"), {"role": "assistant"}], {}, "has no text content"),
]


def test_what_begins_the_next_message_ends_a_turn_where_it_is_an_end_token(tokenizers, tmp_path):
    (example,), tokenizer = load(tokenizers["opener"], tmp_path, [{"prompt": TWO}], model__eos_tokens=("<|endoftext|>", "<|user|>"))
    assert pieces(example, tokenizer) == [(True, "Four.<|user|>"), (False, "\nAnd 3+3?<|assistant|>\n"), (True, "Six.<|endoftext|>")]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_rows_that_cannot_be_trained_on(tokenizers, tmp_path, case):
    family, messages, more, what = BAD[case]
    with pytest.raises(DataError, match=what):
        load(tokenizers[family], tmp_path, [{"prompt": messages, **more}])


def test_without_a_chat_template(tmp_path):
    make_tokenizer(None).save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigError, match="data.train_turns=all.* need a chat template"):
        load(tmp_path / "bare", tmp_path, [{"prompt": TWO}])


def test_the_limit_holds_for_all_that_stands_behind_the_prompt(tokenizers, tmp_path):
    rows = [{"prompt": TWO}, {"prompt": TWO[:2]}]
    (example, short), _ = load(tokenizers["hermes"], tmp_path, rows)
    kept, _ = load(tokenizers["hermes"], tmp_path, rows, rollout__max_new_tokens=len(example.target_ids) - 1)
    assert len(kept) == 1 and len(kept.filtered) == 1 and np.array_equal(kept[0].target_ids, short.target_ids)
    with pytest.raises(DataError, match="the completion has"):
        load(tokenizers["hermes"], tmp_path, rows, rollout__max_new_tokens=3, data__overlong_prompt="error")


@pytest.mark.slow
def test_the_loss_is_that_of_the_models_turns(tokenizers, tmp_path):
    """Value and gradient of a batch of conversations: the mean over their trained tokens alone, from full sequences."""
    rows = [{"prompt": TWO}, {"prompt": CALLED}, {"prompt": "2?", "completion": "Two."}]
    dataset, _ = load(tokenizers["hermes"], tmp_path, rows)
    examples = [dataset[i] for i in range(3)]
    traj = demonstrations(examples, [0, 1, 2], loss_on_prompt=False)
    by_hand = [[*[False] * len(e.prompt_ids), *(e.trained if e.trained is not None else [True] * len(e.target_ids))]
               for e in examples]
    assert traj.loss_mask.tolist() == sum(by_hand, [])
    assert demonstrations(examples, [0, 1, 2], loss_on_prompt=True).loss_mask.sum() == len(traj.tokens) - 3

    hf = {"model_type": "llama", "vocab_size": 272, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
          "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "tie_word_embeddings": True}
    model = models.build(hf, compute_dtype=jnp.float32, scan_layers=False, remat="none", attention="auto")
    params = model.init(jax.random.key(0))
    layout = training.make_layout(traj.sizes, training.row_shapes((), int(traj.lengths.max()), 4096, 1), share_prompts=False)
    (micro,) = layout.minibatches[0].microbatches
    batch = training.pack(traj, micro, {}, training.loss_weights(traj, np.arange(3), "token_mean"))

    def trained(params):
        return update.loss_and_metrics(*training.partition(params, (".*",), ()), batch, model, training.NextToken())[0]

    def dense(params):
        total, count = 0.0, 0
        for e, mask in zip(examples, by_hand, strict=True):
            ids = np.concatenate([e.prompt_ids, e.target_ids])[None]
            hidden = model.hidden(params, ids, np.arange(ids.shape[1])[None], np.ones_like(ids), np.zeros_like(ids))
            logp = jax.nn.log_softmax(hidden @ params["embed"]["embedding"].T)[0, :-1]
            total -= jnp.sum(jnp.where(np.array(mask[1:]), jnp.take_along_axis(logp, ids[0, 1:, None], 1)[:, 0], 0.0))
            count += sum(mask)
        return total / count

    (value, got), (want, expected) = (jax.jit(jax.value_and_grad(f))(params) for f in (trained, dense))
    assert float(value) == pytest.approx(float(want), rel=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
