"""Losses of pairs of sequences: (loss, derivative) on [N] numbers, on the host in float64.

training.objective.sequence_weights makes an update of them.

Notation: s = sum of a completion's log-probs under the policy, r = under the reference, both in nats.
"""

from __future__ import annotations

import numpy as np


def dpo(policy_N, reference_N, chosen_P, rejected_P, beta: float):
    """DPO (arXiv 2305.18290, eq. 7): mean over pairs of -log sigmoid(beta ((s - r)_chosen - (s - r)_rejected)).

    Args:
      policy_N, reference_N: s and r of each sequence.
      chosen_P, rejected_P: indices into them, one pair each.
      beta: strength of the pull towards the reference, > 0.

    Returns:
      (loss, dloss/ds [N] float64; 0 for sequences of no pair).
    """
    lead = np.asarray(policy_N, np.float64) - np.asarray(reference_N, np.float64)
    margin = beta * (lead[chosen_P] - lead[rejected_P])
    loss = np.logaddexp(0.0, -margin).mean()
    slope = -beta * np.exp(-np.logaddexp(0.0, margin)) / len(margin)  # of the chosen: -beta sigmoid(-margin) / pairs
    derivative = np.zeros(len(lead))
    np.add.at(derivative, chosen_P, slope)
    np.add.at(derivative, rejected_P, -slope)
    return float(loss), derivative
