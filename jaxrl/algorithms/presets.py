"""Published algorithms as rows of independent choices. An option the user sets wins over its preset's value.

Keys are option names below `algorithm`; every row has all of them. None means off. What no row sets:

    Optimizer steps per batch (ppo_epochs, num_minibatches) are 1, since they depend on the batch. Papers take 4 (GSPO),
    16 (DAPO), 4 (AReaL). With 1 and on-policy samples the ratio is 1, so bounds on it act only on stale or mismatched
    samples. The KL to the reference is on only where it belongs to what the algorithm is known for, since it costs a
    second model. Old log-probs and the sampler's mismatch: by what is known at start (auto), unless they are it.
"""

from __future__ import annotations

from types import MappingProxyType

_GRPO = {
    "advantage": "outcome",  # outcome | returns | gae | turn | gigpo | dpo
    "advantage_mean": "group",
    "advantage_std": "group",
    "whiten": False,
    "advantage_low": None,
    "advantage_high": None,
    "gamma": 1.0,
    "lam": 1.0,
    "lam_alpha": 0.0,  # VAPO's length-adaptive lambda; 0 = off
    "critic_lam": None,  # lambda of the critic's returns; None = lam
    "turn_gamma": 1.0,  # discount per turn of turn and gigpo
    "anchor_coef": 1.0,  # gigpo: weight of the advantage among turns of one state
    "policy_loss": "clip",
    "ratio": "token",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": 0.0,
    "delta": 0.0,
    "cispo_max_ratio": 5.0,
    "cispo_min_ratio": 0.0,
    "sapo_tau_pos": 1.0,
    "sapo_tau_neg": 1.05,
    "dppo_low": 0.2,
    "dppo_high": 0.2,
    "m2_threshold": 0.0,  # M2PO: largest mean of squared log-ratios to the sampler; 0 = off
    "sequence_high": 0.0,  # largest ratio of a completion to the sampler; 0 = off
    "sequence_low": 0.0,
    "sequence_ratio": "geometric",
    "cov_share": 0.0,  # Clip-Cov: share of tokens left out; 0 = off
    "cov_low": 1.0,
    "cov_high": 5.0,
    "aggregation": "token_mean",
    "kl.coef": 0.0,
    "kl.estimator": "k3_unbiased",
    "kl.placement": "loss",  # loss | reward
    "entropy_coef": 0.0,
    "entropy_target": 0.0,  # 0 = constant coefficient
    "positive_nll_coef": 0.0,
    "dynamic_sampling": "off",  # off | mask | refill
    "mask_truncated": False,
    "ppo_epochs": 1,
    "num_minibatches": 1,
    "old_logprobs": "auto",
    "mismatch.correction": "auto",
    "mismatch.cap": 2.0,
    "mismatch.low": 0.0,
    "mismatch.sequence_delta": 0.0,  # off-policy sequence masking; 0 = off
    "overlong_buffer_fraction": 0.0,  # DAPO's length penalty, as a share of max_new_tokens
}

_PPO = {**_GRPO, "advantage": "gae", "advantage_mean": "none", "advantage_std": "none", "whiten": True}

PRESETS = MappingProxyType(
    {
        # What users of today's libraries get: group mean and std, one token mean over the batch, no reference model.
        "grpo": _GRPO,
        # Shao et al. 2024 (arXiv 2402.03300), eq. 3-4: mean over sequences of token means, k3 in the loss.
        "grpo_paper": {**_GRPO, "aggregation": "sequence_mean", "kl.coef": 0.04, "kl.estimator": "k3"},
        # arXiv 2503.20783: no division by the group's std, and by a constant, max_new_tokens, instead of the length (as
        # its code and TRL; verl divides by the padded width unless told otherwise).
        "dr_grpo": {**_GRPO, "advantage_std": "none", "aggregation": "constant"},
        # arXiv 2503.14476: clip-higher, token mean, dynamic sampling, soft overlong penalty (4096 of 20480 tokens), no
        # KL. Overlong filtering (mask_truncated) is in its ablation only. verl drops groups by the shaped reward
        # or by the raw one; here by the raw one.
        "dapo": {**_GRPO, "clip_high": 0.28, "dynamic_sampling": "refill", "overlong_buffer_fraction": 0.2},
        # arXiv 2507.18071: ratio of whole sequences, its bounds, mean over sequences. verl and Tunix always take the
        # token form (sequence_token), which has the same gradient while advantages are per sequence.
        "gspo": {**_GRPO, "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"},
        # arXiv 2507.20673: geometric mean of ratios clipped by token within exp(-0.4), exp(0.4); bounds in nats.
        "gmpo": {**_GRPO, "ratio": "geometric", "clip_low": 0.4, "clip_high": 0.4, "aggregation": "sequence_mean"},
        # arXiv 2506.13585: clipped weight on logp, no lower bound. The upper bound is not in the paper; 5 is TRL's
        # example. verl, SkyRL and slime bound both sides, counted from 1. Without its dynamic sampling and penalty.
        "cispo": {**_GRPO, "policy_loss": "cispo"},
        # arXiv 2402.14740: REINFORCE by sequence, leave-one-out baseline, no clipping. The paper keeps a KL (k1) in the
        # reward: set kl.coef, with kl.placement=reward (this row's). TRL and verl clip and average over tokens.
        "rloo": {**_GRPO, "advantage_mean": "leave_one_out", "advantage_std": "none", "policy_loss": "pg",
                 "aggregation": "sequence_sum", "kl.estimator": "k1", "kl.placement": "reward"},
        # arXiv 2501.03262: returns of token rewards, whitened over all tokens of the batch, clip, k1 in the reward. The
        # coefficient 0.001 is RLinf's. Returns are carried through observations (as verl; SkyRL resets them there).
        "reinforce_pp": {**_GRPO, "advantage": "returns", "advantage_mean": "none", "advantage_std": "none",
                         "whiten": True, "kl.coef": 0.001, "kl.estimator": "k1", "kl.placement": "reward"},
        # The same paper's variant for several completions per prompt: group mean, then whitened over all tokens of the
        # batch. k2 in the loss is OpenRLHF's pairing, its coefficient a choice of ours; ms-swift: k1 in the reward.
        "reinforce_pp_baseline": {**_GRPO, "advantage_std": "none", "whiten": True, "kl.coef": 0.001,
                                  "kl.estimator": "k2"},
        # arXiv 2310.10505: REINFORCE minus the greedy completion's score. The paper has a KL in the reward: kl.coef.
        "remax": {**_GRPO, "advantage_mean": "greedy", "advantage_std": "none", "policy_loss": "pg",
                  "aggregation": "sequence_sum", "kl.estimator": "k1", "kl.placement": "reward"},
        # arXiv 1707.06347, 1506.02438: GAE and a critic; lambda 0.95 as in the paper and TRL (verl 1), whitened as
        # everyone does for language models. InstructGPT's KL (k1 in the reward): set kl.coef.
        "ppo": {**_PPO, "lam": 0.95, "kl.estimator": "k1", "kl.placement": "reward"},
        # arXiv 2504.05118: critic's lambda 1, policy's 1 - 1/(0.05 |y|), clip-higher, token mean, NLL on correct
        # completions. The paper has no KL and does not speak of whitening: on, as in PPO. Pre-training of the critic
        # is the recipe's.
        "vapo": {**_PPO, "lam_alpha": 0.05, "critic_lam": 1.0, "clip_high": 0.28, "positive_nll_coef": 0.1},
        # arXiv 2110.00641, 2505.24298 (AReaL): clip around recomputed log-probs, times the behaviour weight, which
        # drops tokens above 5 (AReaL's earlier default; the papers have no cap). Advantages: GRPO's, our choice.
        "decoupled_ppo": {**_GRPO, "old_logprobs": "recompute", "mismatch.correction": "token_mis",
                          "mismatch.cap": 5.0},
        # arXiv 2505.24034 (LlamaRL): CISPO's formula around the sampler's log-probs, one-sided. The bound is a choice
        # of ours (Cosmos-RL suggests 2 to 10, and lets the gradient end there, which the paper does not).
        "aipo": {**_GRPO, "policy_loss": "cispo", "old_logprobs": "rollout"},
        # arXiv 2511.20347: soft gate, temperatures 1 and 1.05, mean over sequences. verl's default for both is 1.
        "sapo": {**_GRPO, "policy_loss": "sapo", "aggregation": "sequence_mean"},
        # arXiv 2602.04879, binary total variation, anchored at the sampler's log-probs (verl: at the proximal
        # policy's). The bound 0.2 is verl's default; rLLM runs 0.1. Token mean is a choice of ours.
        "dppo": {**_GRPO, "policy_loss": "dppo", "old_logprobs": "rollout"},
        # arXiv 2602.02710: the group's mean as scale, so that rare successes count more; rewards of 0 and 1.
        "maxrl": {**_GRPO, "advantage_std": "group_mean"},
        # arXiv 2503.14286: REINFORCE whose negative examples are tapered by the ratio of whole completions; no
        # baseline, so rewards of 1 and -1 are meant (reward.scale=2, reward.bias=-1 for 1 and 0).
        "topr": {**_GRPO, "advantage_mean": "none", "advantage_std": "none", "policy_loss": "topr",
                 "ratio": "sequence", "aggregation": "sequence_sum", "old_logprobs": "rollout"},
        # arXiv 2510.01161: tokens are left out until the second moment of the log-ratios to the sampler is 0.04. The
        # rest (recomputed proximal policy, PPO's clip, behaviour weight) is AReaL's example.
        "m2po": {**_GRPO, "old_logprobs": "recompute", "m2_threshold": 0.04, "mismatch.correction": "token_mis",
                 "mismatch.cap": 5.0},
        # arXiv 2505.22617: GRPO with 2e-4 of the tokens, of high covariance of log-prob and advantage, left out.
        "clip_cov": {**_GRPO, "old_logprobs": "recompute", "cov_share": 2e-4},
        # arXiv 2508.08221: group mean, std of the batch, token mean, PPO's clip. The std is of the raw rewards.
        "lite_ppo": {**_GRPO, "advantage_std": "batch"},
        # arXiv 2505.10978: GRPO's advantage plus that among turns decided in the same state, both over their std (the
        # paper also runs without: advantage_std=none). Discount 0.95 and weights 1 are the paper's and ROLL's. Its KL
        # (in the loss) is not what it is known for: kl.coef. Episodes only.
        "gigpo": {**_GRPO, "advantage": "gigpo", "turn_gamma": 0.95},
        # arXiv 2402.04792 (OAIF): DPO on the best and the worst of a group, as they are sampled; beta (kl.coef) is
        # the paper's and TRL's 0.1. Of more than two completions TRL takes two; groups of equals have no pair.
        "online_dpo": {**_GRPO, "advantage": "dpo", "advantage_mean": "none", "advantage_std": "none",
                       "policy_loss": "pg", "aggregation": "sequence_sum", "kl.coef": 0.1, "kl.estimator": "k1",
                       "kl.placement": "reward"},
    }
)


# Options that an estimator sets, overriding the preset.
IMPLIED = {"turn": {"advantage_mean": "leave_one_out", "advantage_std": "none"}}


def resolve(preset: str, chosen: dict) -> dict[str, tuple]:
    """Returns option -> (value, origin) of the options that a preset or the advantage's kind decides.

    origin is 'config', 'preset <name>' or 'advantage <name>' (of IMPLIED). A value of the user's comes first, then the
    advantage's, then the preset's.

    Args:
      preset: a key of PRESETS. Raises KeyError for another one.
      chosen: option -> value or None (None = not set by the user)."""
    out = {name: (value, f"preset {preset}") for name, value in PRESETS[preset].items()}
    kind = chosen.get("advantage") or PRESETS[preset]["advantage"]
    out |= {name: (value, f"advantage {kind}") for name, value in IMPLIED.get(kind, {}).items()}
    return out | {name: (chosen[name], "config") for name in out if chosen.get(name) is not None}
