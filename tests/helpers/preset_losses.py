"""The loss of every preset, off-policy, and two more with the bounds and the means that no preset has."""

import numpy as np

from helpers.training_helpers import policy_objective
from jaxrl import training
from jaxrl.algorithms import PRESETS


def loss_of(preset):
    """The loss of a preset off-policy, with what it leaves to others switched on: entropy, both kinds of clipping."""
    v = PRESETS[preset]
    correction = v["mismatch.correction"]
    in_loss = v["kl.placement"] == "loss"
    return policy_objective(
        **{name: value for name, value in v.items() if "." not in name and name != "old_logprobs"}
        | {"entropy_coef": 0.01}, old="column", chunk=32, max_grad_norm=0.0,
        kl_coef=(v["kl.coef"] or 0.1) * in_loss, kl_estimator=v["kl.estimator"],
        mismatch="token_tis" if correction == "auto" else correction, mismatch_cap=v["mismatch.cap"])


LOSSES = {name: loss_of(name) for name in PRESETS}
LOSSES["bounds"] = policy_objective(LOSSES["grpo"], dual_clip=1.1, delta=1.3, mismatch="sequence_mis", mismatch_cap=4.0,
                                       mismatch_low=0.3, sequence_delta=0.05)
LOSSES["means"] = policy_objective(LOSSES["gspo"], ratio="sequence_token", mismatch="geometric_tis", mismatch_cap=1.01)


def weights_of(traj, preset):
    v = PRESETS.get(preset, PRESETS["grpo"])
    positive = np.arange(traj.num_sequences) % 3 == 0 if v["positive_nll_coef"] else None
    return training.loss_weights(traj, np.arange(traj.num_sequences), v["aggregation"], max_tokens=14, positive=positive,
                                 dropped=np.arange(traj.num_sequences) == 4)
