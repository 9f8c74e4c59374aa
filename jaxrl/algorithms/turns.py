"""Credit by turn: one advantage for all tokens that a turn of an episode sampled. Host numpy, float64.

Turns are numbered by the token column `turn`; without one each trajectory is a single turn. A turn's reward r_k is the
sum of its tokens' rewards (`token_rewards`), and what follows from it is the reward to go over turns

    G_k = r_k + turn_gamma * G_(k+1)

which is 0 after a trajectory's last turn. Tokens that were not sampled are not read.

Legend: N trajectories, T tokens of the ragged batch, K = largest number of a turn + 1; trajectory i owns tokens
offsets[i]:offsets[i+1], over all its sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxrl.algorithms.advantages import EQUAL, _members, _scored, group_advantages


class _Cells(NamedTuple):
    """The positions of loss tokens in a table [N, K] of turns."""

    at: np.ndarray  # [S] in the batch
    trajectory: np.ndarray  # [S]
    number: np.ndarray  # [S] of their turn
    shape: tuple[int, int]

    @property
    def flat(self):
        return self.trajectory * self.shape[1] + self.number


def _cells(turn_T, mask_T, offsets) -> _Cells:
    at, (counts, _) = np.flatnonzero(mask_T), _scored(np.asarray(mask_T, bool), offsets)
    number = np.zeros(len(at), np.int64) if turn_T is None else np.asarray(turn_T, np.int64)[at]
    if (number < 0).any():
        raise ValueError(f"turn={number.min()} on a sampled token: turns count from 0")
    return _Cells(at, np.repeat(np.arange(len(counts)), counts), number, (len(counts), int(number.max(initial=0)) + 1))


def _to_go(rewards_T, cells: _Cells, gamma):
    """Returns the reward to go G [N, K]; 0 after the last turn."""
    rewards = np.asarray(rewards_T, np.float64)[cells.at]
    out = np.bincount(cells.flat, rewards, cells.shape[0] * cells.shape[1]).reshape(cells.shape)
    for k in range(cells.shape[1] - 2, -1, -1):
        out[:, k] += gamma * out[:, k + 1]
    return out


def turn_advantages(rewards_T, turn_T, mask_T, offsets, groups_N, present_N, gamma):
    """Returns advantages, float64 [T]: reward to go minus the mean reward to go of the group's other members at that
    turn.

        A_k = G_k - 1/(n-1) sum over the n-1 other members of their G_k,  0 for those that have ended before turn k

    with G_k = r_k + gamma * G_(k+1), r_k the sum of the turn's token rewards, n the scored members of the group.

    The baseline of a turn does not depend on its own trajectory, so with gamma 1 the expected gradient is that of the
    sum of rewards, also where the policy decides how many turns there are. (Not so where rewards are normalised per
    turn number first and summed afterwards: how many baselines are subtracted is then the trajectory's own choice,
    https://github.com/verl-project/verl/issues/7244.) With one turn each it is the leave-one-out baseline of RLOO.

    Args:
      rewards_T: [T] of `token_rewards`, read at loss tokens.
      turn_T: [T] int numbers of turns, from 0, read at loss tokens; None = each trajectory is one turn.
      mask_T: [T] bool, loss tokens. offsets: [N+1]; trajectory i owns tokens offsets[i]:offsets[i+1].
      groups_N: [N] group of each trajectory. present_N: [N] bool; those absent are no members and get 0.
      gamma: discount per turn.

    The result is 0 where not scored, outside mask_T, in groups of fewer than two, and where all members have the same
    to go (within 1e-8). Raises ValueError for a loss token whose turn is negative.
    """
    cells = _cells(turn_T, mask_T, offsets)
    to_go, centred = _to_go(rewards_T, cells, gamma), np.zeros(cells.shape)
    for members in _members(groups_N):
        known = members[np.asarray(present_N, bool)[members]]
        if len(known) > 1:
            own = to_go[known]
            less = (own - own.mean(0)) * (len(known) / (len(known) - 1))
            centred[known] = np.where(np.ptp(own, axis=0) < EQUAL, 0.0, less)
    out = np.zeros(len(mask_T))
    out[cells.at] = centred.ravel()[cells.flat]
    return out


def anchor_advantages(rewards_T, turn_T, anchor_T, mask_T, offsets, groups_N, present_N, gamma, *, mean, std):
    """Returns GiGPO's advantages, float64 [T], of a step among those taken in the same state (arXiv 2505.10978):

        A_S(k) = (G_k - mean of G over the anchor group) / std of G over the anchor group

    with G_k = r_k + gamma * G_(k+1), r_k the sum of the turn's token rewards. An anchor group is the set of turns, over
    all members of a group, taken in one anchor state; a trajectory that visits the state twice counts twice, as in the
    paper, verl-agent and ROLL. GiGPO is the group advantage of the trajectory plus this, each with weight 1 in the
    paper and in ROLL's examples, with gamma 0.95.

    Args:
      rewards_T: [T] of `token_rewards`, read at loss tokens.
      turn_T: [T] int numbers of turns, from 0, read at loss tokens; None = each trajectory is one turn.
      anchor_T: [T] int, id of the state in which a token's turn was decided, 0 = none.
      mask_T: [T] bool, loss tokens. offsets: [N+1]; trajectory i owns tokens offsets[i]:offsets[i+1].
      groups_N: [N] group of each trajectory. present_N: [N] bool; those absent are no members and get 0.
      gamma: discount per turn.
      mean, std: names of `group_advantages`, taken of anchor groups (the paper's F_norm is the std or 1; std with ddof
        1, plus 1e-6).

    The result is 0 where not scored, outside mask_T and without an anchor state; with mean group or leave_one_out also
    where a turn is alone in its state or all there have the same to go (within 1e-8). Raises ValueError for a loss
    token whose turn is negative, for unknown names and for mean greedy.
    """
    cells = _cells(turn_T, mask_T, offsets)
    turns, first, turn_of = np.unique(cells.flat, return_index=True, return_inverse=True)
    trajectory, anchors = cells.trajectory[first], np.asarray(anchor_T)[cells.at][first]
    to_go = np.where(np.asarray(present_N, bool)[trajectory], _to_go(rewards_T, cells, gamma).ravel()[turns], np.nan)
    named, found, out = anchors != 0, np.zeros(len(turns)), np.zeros(len(mask_T))
    states, state = np.unique(anchors[named], return_inverse=True)
    _, group = np.unique(np.asarray(groups_N)[trajectory[named]], return_inverse=True)
    found[named], _ = group_advantages(to_go[named], group * len(states) + state, mean=mean, std=std)
    out[cells.at] = found[turn_of]
    return out
