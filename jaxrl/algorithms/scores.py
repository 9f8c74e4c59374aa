"""Losses of reward models: (loss, derivative, metrics) on [N] scores, on the host in float64.

training.objective.score_weights makes an update of them.

Notation: s = score of a sequence, read after its last token, or of a step, read after the step's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def bradley_terry(scores_N, chosen_P, rejected_P, margin_P: ArrayLike = 0.0, center: float = 0.0):
    """Computes the mean over pairs of -log sigmoid(s_chosen - s_rejected - margin) + center (s_chosen + s_rejected)^2.

    Bradley and Terry's model of comparisons with Llama 2's margin (arXiv 2307.09288, eq. 2) and the centring term of
    arXiv 2312.09244, eq. 2; TRL's RewardTrainer has the same.

    Args:
      scores_N: [N] score s of each sequence.
      chosen_P, rejected_P: [P] int indices into the scores, one pair each; P at least 1.
      margin_P: [P] or one number: by how much the chosen one must be ahead.
      center: pulls the sum of a pair's scores to 0, >= 0; without it scores are defined up to a constant.

    Returns:
      (loss, dloss/ds [N] float64, metrics: accuracy = share of pairs with s_chosen > s_rejected, margin = mean of
        s_chosen - s_rejected, without margin_P)."""
    scores = np.asarray(scores_N, np.float64)
    lead, both = scores[chosen_P] - scores[rejected_P], scores[chosen_P] + scores[rejected_P]
    rest = lead - np.asarray(margin_P, np.float64)
    loss = np.logaddexp(0.0, -rest).mean() + center * np.square(both).mean()
    slope = -np.exp(-np.logaddexp(0.0, rest)) / len(rest)  # of the chosen: -sigmoid(-rest) / pairs
    pull = 2.0 * center * both / len(rest)
    derivative = np.zeros(len(scores))
    np.add.at(derivative, chosen_P, slope + pull)
    np.add.at(derivative, rejected_P, pull - slope)
    return float(loss), derivative, {"accuracy": float((lead > 0).mean()), "margin": float(lead.mean())}


def step_labels(scores_S, labels_S):
    """Computes the mean over steps of the binary cross-entropy of sigmoid(s) with the step's label (arXiv 2312.08935,
    eq. 2).

    Args:
      scores_S: [S] score s of each step.
      labels_S: [S] 1 = right, 0 = wrong, or a probability between.

    Returns:
      (loss, dloss/ds [S] float64, metrics: accuracy = share of steps whose score is above 0 where the label is above
        1/2, else at most 0; margin = mean score of the steps with a label above 1/2 less that of the others, absent
        unless there are both)."""
    scores, labels = np.asarray(scores_S, np.float64), np.asarray(labels_S, np.float64)
    loss = (np.logaddexp(0.0, scores) - labels * scores).mean()
    derivative = (np.exp(-np.logaddexp(0.0, -scores)) - labels) / len(scores)
    right = labels > 0.5
    metrics = {"accuracy": float(((scores > 0) == right).mean())}
    if right.any() and not right.all():
        metrics["margin"] = float(scores[right].mean() - scores[~right].mean())
    return float(loss), derivative, metrics
