"""Rewards and states that an episode tells reach the advantages of a run."""

import numpy as np
import pytest
from helpers.algorithm_runs import job, watched
from helpers.worlds import TEMPLATE

WORLD = """
async def crossroads(task, chat):
    chat.state("start")
    turn = await chat.send(task.prompt)
    chat.reward(len(turn.text) / 8)
    chat.state("odd" if len(turn.text) % 2 else "even")
    turn = await chat.send("Max has 1 pens")
    chat.reward(-len(turn.text) / 4)
    return 0.25
"""


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    folder = tmp_path_factory.mktemp("credit")
    (folder / "world.py").write_text(WORLD, "utf-8")
    (folder / "chat.jinja").write_text(TEMPLATE, "utf-8")
    _, steps, _ = watched(job(folder / "run", {
        "env.function": f"{folder / 'world.py'}:crossroads", "env.max_turns": 2, "env.max_observation_tokens": 24, "env.workers": 1,
        "model.chat_template": str(folder / "chat.jinja"), "rollout.prompt_lengths": (), "reward.functions": (), "reward.scale": 0.5,
        "algorithm.preset": "gigpo", "algorithm.advantage_std": "none", "algorithm.anchor_coef": 0.25, "train.steps": 1}))
    return steps[0]


@pytest.mark.slow
def test_what_episodes_tell_of_their_turns_is_what_gigpo_learns_from(step):
    """From the texts' lengths alone: reward.scale is 0.5, the value 0.25, and the discount 0.95."""
    traj, batch, found = step.batch.traj, step.batch, step.columns["advantage"]
    turn, reward = traj.columns["turn"], traj.columns["reward"]
    assert traj.num_trajectories == 16 and set(turn[traj.loss_mask]) == {0, 1}
    told = np.array([[reward[at[turn[at] == k][-1]] for k in (0, 1)] for at in traj.sampled()])
    sizes = told * [8, -4]
    np.testing.assert_allclose(sizes, np.round(sizes), atol=1e-5)
    np.testing.assert_allclose(batch.scores, 0.5 * (0.25 + told.sum(1)), atol=1e-6)
    last = 0.5 * (0.25 + told[:, 1])
    to_go = np.stack([0.5 * told[:, 0] + 0.95 * last, last], axis=1)
    states = np.stack([np.zeros(16), 1 + np.round(sizes[:, 0]) % 2], axis=1)
    company = 0
    for i, at in enumerate(traj.sampled()):
        group = traj.group == traj.group[i]
        for k in (0, 1):
            same = to_go[group, k][states[group, k] == states[i, k]]
            mine = at[turn[at] == k]
            want = batch.scores[i] - batch.scores[group].mean() + 0.25 * (to_go[i, k] - same.mean())
            np.testing.assert_allclose(found[mine], want, atol=1e-6)
            company += len(mine) * (np.ptp(same) > 1e-6)
    assert company and step.metrics["advantage/anchored_fraction"] == pytest.approx(company / traj.loss_mask.sum())
