"""One step of reinforcement learning: rollouts, trajectories, advantages, the step itself, evaluation, recording."""
