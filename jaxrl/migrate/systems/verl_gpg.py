"""verl's GPG (arXiv 2504.02546), whose advantages are a function of the whole batch in a file beside the config."""

from __future__ import annotations

from jaxrl.migrate.table import Migration

GPG = '''"""verl's advantage GPG: a score less its group's mean, times the completions of the step over those whose score
is not 0. A group of one has no mean taken off."""

import numpy as np


def gpg(inputs):
    scores, groups = np.asarray(inputs.scores), np.asarray(inputs.groups)
    present = np.isfinite(scores)
    scale = present.sum() / max(np.count_nonzero(scores[present]), 1)
    advantages = np.zeros(len(scores))
    for group in np.unique(groups[present]):
        own = present & (groups == group)
        advantages[own] = scores[own] - (scores[own].mean() if own.sum() > 1 else 0.0)
    return scale * advantages
'''


def advantage(m: Migration, name: str, std: str) -> None:
    """Sets algorithm.advantage to the function `gpg` of a file NAME_advantage.py that it adds, and whiten=False.

    name: key of the estimator. std: key of the division by the deviation, which GPG does not make: marked as without
    effect if the source sets it.
    """
    file = f"{m.name}_advantage.py"
    m.files[file] = GPG
    m.set("algorithm.advantage", f"./{file}:gpg", name)
    m.set("algorithm.whiten", False, name)
    m.facts["advantage"] = "gpg"
    if m.given(std):
        m.mark(std, "inert", "GPG divides by no deviation")
