"""Pure array functions: advantages, policy losses, KL, aggregation weights, presets. Nothing else of jaxrl is used."""
# ruff: noqa: F401

from jaxrl.algorithms.advantages import (
    ADVANTAGES,
    adaptive_lambda,
    clip_advantages,
    gae,
    group_advantages,
    preferred_advantages,
    register_advantage,
    shared_prefix_mask,
    token_returns,
    token_rewards,
    whiten,
)
from jaxrl.algorithms.aggregation import aggregation_weights
from jaxrl.algorithms.entropy import adaptive_entropy_coef
from jaxrl.algorithms.kl import kl_penalty, kl_value
from jaxrl.algorithms.losses import (
    POLICY_LOSSES,
    PolicyLoss,
    cispo_loss,
    clipped_policy_loss,
    dppo_loss,
    explained_variance,
    gmpo_loss,
    nll_loss,
    policy_gradient_loss,
    policy_loss,
    register_policy_loss,
    sapo_loss,
    topr_loss,
    value_loss,
)
from jaxrl.algorithms.mismatch import mismatch_ratio, mismatch_weight, off_policy_sequence_mask
from jaxrl.algorithms.numerics import masked_exp, masked_expm1, sequence_mean, sequence_sum
from jaxrl.algorithms.presets import PRESETS, resolve
from jaxrl.algorithms.ratios import geometric_log_ratio, log_ratio
from jaxrl.algorithms.token_masks import TOKEN_MASKS, StepTokens, TokenMask, covariance_mask, second_moment_mask
from jaxrl.algorithms.tokens import AdvantageInputs, Tokens
from jaxrl.algorithms.turns import anchor_advantages, turn_advantages
