"""From parts to one score per answer. Pure functions on numpy arrays.

Legend: N answers.
"""

from __future__ import annotations

import numpy as np


def weighted_sum(parts: dict[str, np.ndarray], weights: dict[str, float], count: int) -> np.ndarray:
    """[N] float64: sum of weight x part over the parts that are present (not NaN); NaN where none is."""
    total, present = np.zeros(count), np.zeros(count, bool)
    for name, values in parts.items():
        here = ~np.isnan(values)
        total[here] += weights[name] * values[here]
        present |= here
    return np.where(present, total, np.nan)


def overlong_penalty(lengths: np.ndarray, max_tokens: int, buffer: int, penalty: float) -> np.ndarray:
    """[N]: 0 up to max_tokens - buffer, then linear, `penalty` at max_tokens and beyond (arXiv 2503.14476, eq. 13).

    Subtracted from the score. buffer 0 = off.
    """
    if buffer <= 0:
        return np.zeros(len(lengths))
    return penalty * np.clip((np.asarray(lengths, np.float64) - (max_tokens - buffer)) / buffer, 0.0, 1.0)


def shape(result, lengths, truncated, reward, max_new_tokens: int, buffer: int | None = None) -> np.ndarray:
    """Shaped scores [N] float64 of a RewardResult; a score that is absent (NaN) stays absent throughout.

    In this order: 1. the weighted sum, `result.total`; 2. zero_without_end: 0 where `truncated`; 3. times scale;
    4. plus bias; 5. clipped to [-clip, clip]; 6. minus the DAPO overlong penalty. (Then reward.norm_mean and norm_std,
    over the whole batch; see recipes/rollouts.)

    Args:
      result: RewardResult. lengths: [N] tokens of the answers. truncated: [N] bool, cut by the length limit.
      reward: config.reward. max_new_tokens: the limit the answers were sampled under. buffer: of the overlong penalty,
        in tokens; None = reward.overlong_buffer.
    """
    score = np.array(result.total, np.float64)
    if reward.zero_without_end:
        score = np.where(truncated & ~np.isnan(score), 0.0, score)
    score = score * reward.scale + reward.bias
    if reward.clip is not None:
        score = np.clip(score, -reward.clip, reward.clip)
    buffer = reward.overlong_buffer if buffer is None else buffer
    return score - overlong_penalty(lengths, max_new_tokens, buffer, reward.overlong_penalty)
