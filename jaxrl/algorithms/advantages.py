"""Advantages on the host, in float64.

Legend: N sequences, G groups.
"""

from __future__ import annotations

import numpy as np

STD_EPS = 1e-6
EQUAL = 1e-8  # a group whose rewards differ by less carries no signal; its advantage is exactly 0


def group_advantages(scores_N, groups_N, *, mean="group", std="group"):
    """Group-relative advantages, A_i = (R_i - mean_g R) / (std_g R + 1e-6)   (arXiv 2402.03300, eq. 4).

    Groups may be of any size. A missing score (NaN: the reward failed or did not apply) is left out of mean and
    standard deviation and gets advantage 0. The standard deviation has ddof 1. With `mean="group"`, rewards that are
    all equal give exactly 0, and so does a group with fewer than two scores.

    Args:
      scores_N: one score per sequence, NaN = absent.
      groups_N: group id per sequence, in any order.
      mean: "group" subtracts the group's mean, "none" subtracts nothing.
      std: "group" divides by the group's standard deviation, "none" does not divide.

    Returns:
      (advantages_N float64, zero_signal_N bool): the second marks sequences of groups that carry no signal.
    """
    scores = np.asarray(scores_N, np.float64)
    advantages = np.zeros_like(scores)
    zero_signal = np.zeros(len(scores), bool)
    for group in np.unique(groups_N):
        members = np.flatnonzero(np.asarray(groups_N) == group)
        known = members[np.isfinite(scores[members])]
        values = scores[known]
        flat = len(values) < 2 or values.max() - values.min() < EQUAL
        zero_signal[members] = flat if mean == "group" else not values.any()
        if mean == "group" and flat:
            continue
        centred = values - values.mean() if mean == "group" else values
        if std == "group":
            centred = centred / ((values.std(ddof=1) if len(values) > 1 else 0.0) + STD_EPS)
        advantages[known] = centred
    return advantages, zero_signal
