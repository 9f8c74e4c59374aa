"""Reward models as Hugging Face sequence classifiers: read, scored, written, beside transformers' own models."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiers import first_only
from helpers.tiny_models import SIZES, make_tokenizer
from transformers import PreTrainedTokenizerFast

from jaxrl import training
from jaxrl.errors import ConfigError
from jaxrl.models import build
from jaxrl.models.io import hf
from jaxrl.models.value import ValueModel
from jaxrl.training.score import make_value_score

pytestmark = pytest.mark.torch
KINDS = {"qwen2": {"tie_word_embeddings": True}, "llama": {}, "gemma3_text": {}}
PAD = 3


@pytest.fixture(scope="module", params=first_only(KINDS))
def classifier(request, tmp_path_factory):
    """(transformers' classifier with random weights, its folder)."""
    return made(tmp_path_factory.mktemp(request.param), request.param, **KINDS[request.param])


def made(folder, kind="qwen2", labels=1, **options):
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **{**SIZES, **options, "num_labels": labels, "pad_token_id": PAD})
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(folder)
    return model, folder


def sequences():
    """Eight prompts with completions, of 2 to 20 tokens, none of them padding."""
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(PAD + 1, SIZES["vocab_size"], n).astype(np.int32)  # noqa: E731
    return [draw(n) for n in (1, 4, 4, 9, 0, 2, 7, 3)], [draw(n) for n in (1, 5, 0, 11, 6, 13, 2, 3)]


def theirs(model):
    """Scores of a padded batch of them."""
    import torch

    whole = [np.concatenate(pair) for pair in zip(*sequences(), strict=True)]
    ids = np.full((len(whole), max(map(len, whole)) + 2), PAD)
    for row, tokens in zip(ids, whole, strict=True):
        row[:len(tokens)] = tokens
    with torch.no_grad():
        return model(torch.tensor(ids), attention_mask=torch.tensor(ids != PAD)).logits[:, 0].numpy()


def read(folder, name="score"):
    config = hf.load_config(folder)
    tree = ValueModel(build(config, compute_dtype=jnp.float32, scan_layers=True), name=name, bias=False)
    return tree, hf.load_critic(tree, folder), config


def ours(tree, params):
    """Scores of them in packed rows, some prompts in a row of another sequence."""
    traj = training.scored_behind(*sequences(), np.arange(8))
    layout = training.make_layout(traj.sizes, training.row_shapes((24, 48), 24, 96, 1))
    assert sum(len(row) > 1 for m in layout.minibatches[0].microbatches for row in m.rows) > 1
    return make_value_score(tree.model, put=lambda batch: batch)(params, traj, layout)[traj.loss_mask]


@pytest.mark.full
def test_a_sequence_classifier_scores_and_is_written_as_transformers_has_it(classifier, tmp_path):
    """Scores behind the last token of packed sequences equal transformers' of a padded batch; the folder that we write of it
    scores the same there, and its tensors are bitwise those read."""
    from transformers import AutoModelForSequenceClassification

    model, folder = classifier
    tree, params, config = read(folder)
    expected = theirs(model)
    assert expected.std() > 0.1
    np.testing.assert_allclose(ours(tree, params), expected, atol=1e-5 * max(1, np.abs(expected).max()))
    hf.export(tree, params, tmp_path / "out", config)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert type(again) is type(model) and again.config.num_labels == 1
    for name, tensor in model.state_dict().items():
        assert (again.state_dict()[name] == tensor).all(), name
    np.testing.assert_array_equal(theirs(again), expected)


@pytest.mark.full
def test_the_head_may_have_another_name(tmp_path):
    """value_head.weight, as critics of other libraries have it: read and written; without the name it is a stray tensor."""
    _, folder = made(tmp_path / "in")
    tree, params, config = read(folder)
    other = ValueModel(tree.model, name="value_head", bias=False)
    hf.export(other, params, tmp_path / "out", config)
    np.testing.assert_array_equal(ours(*read(tmp_path / "out", "value_head")[:2]), ours(tree, params))
    with pytest.raises(ConfigError, match="1 tensors have no place in a qwen2 model: value_head.weight"):
        read(tmp_path / "out")


@pytest.mark.parametrize("labels, name, said", [
    (2, "score", r"score.weight has shape \(2, \d+\), one label is needed"),
    (1, "v_head", "there is no v_head.weight, the head that scores"),
])
def test_what_is_no_reward_model_is_refused(tmp_path, labels, name, said):
    _, folder = made(tmp_path, labels=labels)
    tree = ValueModel(build(hf.load_config(folder), compute_dtype=jnp.float32, scan_layers=True), name=name, bias=False)
    with pytest.raises(ConfigError, match=said):
        hf.check_critic(tree, folder, scores=True)


@pytest.mark.full
def test_padding_that_is_the_end_token_is_not_named(tmp_path):
    """transformers reads at the last token that is not padding: with the end token as padding, before the end. Then that of the
    tokenizer (here 0) is named where it is another one, else none."""
    _, folder = made(tmp_path / "in")
    tree, params, config = read(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(make_tokenizer(tmp_path / "tokenizer"))
    assert tokenizer.pad_token_id == 0
    for pad, ends, given, written in ((PAD, (5,), None, PAD), (5, (5,), None, None), (5, (5,), tokenizer, 0), (None, (5, 0), tokenizer, None)):
        hf.export(tree, params, tmp_path / "out", {**config, "pad_token_id": pad}, eos_ids=ends, tokenizer=given)
        assert hf.load_config(tmp_path / "out")["pad_token_id"] == written
