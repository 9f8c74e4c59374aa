"""Losses of reward models: closed forms, finite differences, TRL's own loss."""

import numpy as np
import pytest

from jaxrl.algorithms.scores import bradley_terry, step_labels

RNG = np.random.default_rng(0)
SCORES = RNG.normal(size=14) * 3
CHOSEN, REJECTED = np.arange(0, 12, 2), np.arange(1, 12, 2)  # two sequences are of no pair
MARGIN = RNG.normal(size=6)
LABELS = np.array([1, 0, 1, 1, 0, 0.25, 0.9, 0, 1, 1, 0, 0, 1, 0.5])


def slopes(loss):
    """Central differences of a loss of the scores."""
    out = np.zeros(len(SCORES))
    for i in range(len(SCORES)):
        step = 1e-5 * (np.arange(len(SCORES)) == i)
        out[i] = (loss(SCORES + step) - loss(SCORES - step)) / 2e-5
    return out


@pytest.mark.parametrize("loss", [
    lambda s: bradley_terry(s, CHOSEN, REJECTED), lambda s: bradley_terry(s, CHOSEN, REJECTED, MARGIN),
    lambda s: bradley_terry(s, CHOSEN, REJECTED, MARGIN, 0.3), lambda s: bradley_terry(s, CHOSEN[[0, 0, 1]], REJECTED[[1, 2, 1]], 0.5, 0.1),
    lambda s: step_labels(s, LABELS)])
def test_derivatives_are_those_of_the_loss(loss):
    found = loss(SCORES)[1]
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, slopes(lambda s: loss(s)[0]), atol=1e-9)


def test_closed_forms():
    """A pair of equal scores costs log 2 and pulls by a half; a constant on all scores changes nothing but the centring; far-off
    scores neither overflow nor vanish."""
    loss, slope, found = bradley_terry([0.7, 0.7], [0], [1])
    assert loss == pytest.approx(np.log(2)) and slope.tolist() == [-0.5, 0.5] and found == {"accuracy": 0.0, "margin": 0.0}
    plain, moved = bradley_terry(SCORES, CHOSEN, REJECTED, MARGIN), bradley_terry(SCORES + 9, CHOSEN, REJECTED, MARGIN)
    assert moved[0] == pytest.approx(plain[0], rel=1e-12) and plain[1].sum() == pytest.approx(0, abs=1e-15)
    assert plain[2]["accuracy"] == np.mean(SCORES[CHOSEN] > SCORES[REJECTED])
    assert bradley_terry(SCORES + 9, CHOSEN, REJECTED, 0, 0.1)[0] > 30
    assert bradley_terry([-1e3, 1e3], [0], [1])[0] == 2e3 and bradley_terry([1e3, -1e3], [0], [1])[0] == 0.0
    loss, slope, found = step_labels([0.0, 0.0, 2.0], [1, 0, 1])
    assert loss == pytest.approx((2 * np.log(2) + np.log1p(np.exp(-2))) / 3) and slope[:2].tolist() == [-1 / 6, 1 / 6]
    assert found["accuracy"] == pytest.approx(2 / 3) and found["margin"] == 1.0
    assert step_labels([1e4, -1e4], [0, 1])[0] == 1e4 and "margin" not in step_labels([1.0], [1])[2]


@pytest.mark.torch
@pytest.mark.compat  # trl is in no extra
@pytest.mark.parametrize("margin, center", [(None, None), (MARGIN, 0.3)])
def test_loss_and_gradient_are_trls(tmp_path, margin, center):
    """RewardTrainer's compute_loss around a table of scores in float64."""
    torch, trl = pytest.importorskip("torch"), pytest.importorskip("trl")
    from datasets import Dataset
    from helpers.tiny_models import SIZES, make_tokenizer
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

    model = Qwen2ForSequenceClassification(Qwen2Config(**SIZES, num_labels=1))
    rows = Dataset.from_list([{"chosen_ids": [4], "rejected_ids": [5]}])
    args = trl.RewardConfig(output_dir=str(tmp_path / "out"), center_rewards_coefficient=center, report_to="none", use_cpu=True, bf16=False,
                            gradient_checkpointing=False)
    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(tmp_path / "tokenizer"))
    trainer = trl.RewardTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)

    class Table(torch.nn.Module):
        """The score of a sequence is that of its first token."""

        def __init__(self):
            super().__init__()
            self.scores = torch.nn.Parameter(torch.tensor(SCORES))

        def forward(self, input_ids, **others):
            from transformers.modeling_outputs import SequenceClassifierOutputWithPast
            return SequenceClassifierOutputWithPast(logits=self.scores[input_ids[:, :1]])

    table, ids = Table(), torch.tensor(np.concatenate([CHOSEN, REJECTED]))[:, None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {} if margin is None else {"margin": torch.tensor(margin)}
    theirs = trainer.compute_loss(table, inputs)
    theirs.backward()
    loss, slope, found = bradley_terry(SCORES, CHOSEN, REJECTED, 0.0 if margin is None else margin, center or 0.0)
    assert loss == pytest.approx(theirs.item(), rel=1e-12)
    np.testing.assert_allclose(slope, table.scores.grad.numpy(), atol=1e-12)
    mode = "train" if trainer.model.training else "eval"
    assert found["accuracy"] == pytest.approx(trainer._metrics[mode]["accuracy"][0]) and found["margin"] == pytest.approx(
        trainer._metrics[mode]["margin"][0])
