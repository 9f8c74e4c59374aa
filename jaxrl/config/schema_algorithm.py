"""Options of the group `algorithm`. See schema.py, of which this is a part."""

from __future__ import annotations

from jaxrl.config.option import Option as O
from jaxrl.config.option import Rows, shared

EPISODES = "env.function or env.program or env.tools or env.mcp"  # a condition, as Option.needs has it
SEVERAL_UPDATES = "algorithm.num_minibatches>1 or algorithm.ppo_epochs>1"


def UpdateOption(*args, **more) -> O:
    """Returns an Option that any loss of sampled tokens reads: that of rl or distill. Arguments are those of Option."""
    return O(*args, **{"read_by": ("rl", "distill"), **more})


def LossOption(*args, needs: str = "", **more) -> O:
    """Returns an Option of the policy gradient, which distillation reads with the loss `sampled`.

    needs: a further condition. The other arguments are those of Option.
    """
    return UpdateOption(*args, needs=" and ".join(filter(None, ("run.recipe=rl or distill.loss=sampled", needs))), **more)


ALGORITHM = shared({
    "preset": UpdateOption("grpo", "row of algorithms/presets.py that fills the options left at None",
                           choices=Rows("jaxrl.algorithms.presets:PRESETS")),
    "advantage": O(None, "outcome: one advantage per completion; returns: reward to go per token; gae: with a critic; turn: reward to go"
                         " per turn less that of the group's others; gigpo: outcome and, per turn, that among turns of the same"
                         " state; dpo: DPO's weight on the best and the worst of a group, beta is kl.coef; or a function of your own", str,
                   Rows("jaxrl.rl.advantages:ESTIMATORS", "jaxrl.algorithms.advantages:ADVANTAGES"), or_path=True),
    "advantage_mean": O(None, "baseline of the score; greedy: the score of a greedy completion", str,
                        ("none", "group", "batch", "leave_one_out", "greedy")),
    "advantage_std": O(None, "scale of the score: standard deviation (ddof 1; group_population: ddof 0) of the group or batch, the mean of"
                            " the group (MaxRL), or none", str, ("none", "group", "batch", "group_population", "group_mean")),
    "whiten": O(None, "bring advantages to mean 0 and variance 1 over all loss tokens of the step", bool),
    "whiten_mean": O("step", "whose mean is subtracted: that of the loss tokens of the step, of the prompt's group, or none",
                     choices=("step", "group", "none"), needs="algorithm.whiten"),
    "whiten_std": O("step", "whose root mean square about that (ddof 1) is divided by, likewise", choices=("step", "group", "none"),
                    needs="algorithm.whiten"),
    "advantage_low": O(None, "advantages are clipped below this", float),
    "advantage_high": O(None, "advantages are clipped above this", float),
    "gamma": O(None, "discount per token of returns and gae", float, bound="0..1", needs="algorithm.advantage=returns|gae"),
    "lam": O(None, "lambda of gae", float, bound="0..1", needs="algorithm.advantage=gae"),
    "lam_alpha": O(None, "VAPO: lambda of the policy is 1 - 1/(lam_alpha x completion length); 0 = off", float, bound=">=0",
                   needs="algorithm.advantage=gae"),
    "critic_lam": O(None, "lambda of the critic's returns; None = lam", float, bound="0..1", needs="algorithm.advantage=gae"),
    "turn_gamma": O(None, "discount per turn of turn and gigpo", float, bound="0..1",
                    needs=f"algorithm.advantage=turn|gigpo and algorithm.advantage=gigpo or {EPISODES}"),
    "anchor_coef": O(None, "gigpo: weight of the advantage among turns of the same state (chat.state)", float, bound=">0",
                     needs="algorithm.advantage=gigpo"),
    "policy_loss": LossOption(None, "loss of a token from its ratio and advantage (docs/explanations/algorithms.md), or a function of your own",
                              str, Rows("jaxrl.algorithms.losses:POLICY_LOSSES"), or_path=True),
    "ratio": LossOption(None, "policy ratio by token, by sequence (GSPO), as GSPO-token, or as geometric mean (GMPO); of topr a sequence's is the"
                              " product", str,
                        ("token", "sequence", "sequence_token", "geometric")),
    "clip_low": LossOption(None, "ratio is clipped below 1 - clip_low (geometric: log-ratio below -clip_low)", float),
    "clip_high": LossOption(None, "ratio is clipped above 1 + clip_high (geometric: log-ratio above clip_high)", float, bound=">0"),
    "dual_clip": LossOption(None, "loss of a negative advantage is at most this times it; 0 = off", float, bound="0 or >1"),
    "delta": LossOption(None, "largest ratio of the unclipped branch; 0 = off", float),
    "cispo_max_ratio": LossOption(None, "largest weight of cispo, an absolute ratio", float, bound=">0"),
    "cispo_min_ratio": LossOption(None, "smallest weight of cispo", float, bound=">=0"),
    "sapo_tau_pos": LossOption(None, "temperature of sapo's gate for positive advantages", float, bound=">0"),
    "sapo_tau_neg": LossOption(None, "temperature of sapo's gate for the others", float, bound=">0"),
    "dppo_low": LossOption(None, "dppo leaves out a token with A <= 0 whose probability fell by more than this", float, bound=">0"),
    "dppo_high": LossOption(None, "dppo leaves out a token with A > 0 whose probability rose by more than this", float, bound=">0"),
    "m2_threshold": O(None, "M2PO: the tokens with the largest squared log-ratio of trainer to sampler add no policy loss, until the"
                            " mean of the others is below; needs old_logprobs=recompute; 0 = off", float, bound=">=0"),
    "sequence_high": O(None, "completions whose ratio of trainer to sampler is above this, or below sequence_low, add no policy loss; needs"
                             " old_logprobs=recompute; 0 = off", float, bound=">=0"),
    "sequence_low": O(None, "smallest ratio of a completion under sequence_high", float, bound=">=0", needs="algorithm.sequence_high"),
    "sequence_ratio": O(None, "a completion's ratio of sequence_high: the geometric mean of its tokens', or their product", str,
                        ("geometric", "product"), needs="algorithm.sequence_high"),
    "cov_share": O(None, "Clip-Cov: share of a step's tokens that add no policy loss, drawn among those whose covariance of log-prob"
                         " and advantage lies between cov_low and cov_high; 0 = off", float, bound="0..1"),
    "cov_low": O(None, "smallest covariance that cov_share draws from", float, needs="algorithm.cov_share"),
    "cov_high": O(None, "largest covariance that cov_share draws from", float, needs="algorithm.cov_share"),
    "temperature": O(0.0, "temperature of the trainer's log-probs where it is not the sampler's: the policy that is trained is then"
                          " not the one that is sampled, which biases the gradient (docs/explanations/algorithms.md);"
                          " 0 = rollout.temperature", bound=">=0"),
    "aggregation": UpdateOption(None, "how token losses become one number; constant: by aggregation_constant per completion", str,
                                ("token_mean", "sequence_mean", "sequence_sum", "constant", "prompt_mean")),
    "aggregation_constant": UpdateOption(0.0, "what aggregation=constant divides a completion's sum by; 0 = rollout.max_new_tokens", bound=">=0",
                                         needs="algorithm.aggregation=constant"),
    "aggregation_sequences": UpdateOption(0, "aggregation=token_mean over every so many completions, and the mean of these: what a token mean of each"
                                             " micro-batch is in other systems; 0 = one token mean of the optimizer step", bound=">=0",
                                  needs="algorithm.aggregation=token_mean"),
    "kl": {
        "coef": O(None, "weight of the KL to the reference; 0 loads no reference", float, bound=">=0"),
        "estimator": O(None, "KL estimator; k1 in the reward only, k3_unbiased in the loss only", str,
                       ("k1", "k2", "k3", "k3_unbiased", "abs", "low_var"), needs="algorithm.kl.coef"),
        "placement": O(None, "the KL is a term of the loss, or is subtracted from the reward", str, ("loss", "reward"),
                       needs="algorithm.kl.coef"),
    },
    "entropy_coef": LossOption(None, "entropy bonus, token mean", float, bound=">=0"),
    "entropy_target": LossOption(None, "nats per token: the coefficient grows while the entropy is below; 0 = constant", float, bound=">=0"),
    "entropy_rate": LossOption(0.005, "change of the adaptive coefficient per update", bound=">=0", needs="algorithm.entropy_target"),
    "entropy_max": LossOption(0.05, "largest adaptive coefficient", bound=">=0", needs="algorithm.entropy_target"),
    "positive_nll_coef": O(None, "VAPO: weight of the NLL of completions that reach reward.pass_mark", float, bound=">=0"),
    "dynamic_sampling": O(None, "groups without signal are masked, or replaced by others until the step is full", str,
                          ("off", "mask", "refill")),
    "dynamic_sampling_rounds": O(10, "refill: most rounds of a step; what is then missing is filled with the groups left out", bound=">0",
                                 needs="algorithm.dynamic_sampling=refill"),
    "keep_group": O("", "what dynamic sampling asks: empty = scores that differ; the name of a reward whose values must"
                        " differ; or an import path: f(group: dict) -> bool", needs="algorithm.dynamic_sampling!=off"),
    "shared_prefix_tokens": O(0, "no loss on openings of this many tokens that completions of different score share; 0 = off", bound=">=0"),
    "sampled_support": O(False, "log-probs over the tokens that rollout.top_k (at most 128), top_p and min_p left, as the completion"
                                " was sampled (DeepSeek-V3.2's keep sampling mask); embedded sampler only"),
    "routes": O("own", "a token's experts in the update: its router's own choice; scored: that of the scoring of old log-probs; sampled:"
                       " that of the sampler; gates are the trainer's own in any case (docs/explanations/experts.md)",
                choices=("own", "scored", "sampled")),
    "early_stop_ratio": LossOption(0.0, "a step's further updates are left out once an update's mean ratio is above; 0 = off", bound=">=0",
                                   needs=SEVERAL_UPDATES),
    "early_stop_kl": LossOption(0.0, "the same for policy/approx_kl, in nats per token; 0 = off", bound=">=0", needs=SEVERAL_UPDATES),
    "ppo_epochs": UpdateOption(None, "passes over one batch", int, bound=">=1"),
    "num_minibatches": UpdateOption(None, "optimizer steps per pass", int, bound=">=1"),
    "old_logprobs": LossOption(None, "auto: no scoring pass when a batch gets one optimizer step; recompute: always score;"
                                     " rollout: ratios are taken to the sampler's log-probs", str, ("auto", "recompute", "rollout")),
    "mismatch": {
        "correction": LossOption(None, "weight on the policy loss for sampler-trainer differences, truncated (tis) or masked (mis), by"
                                       " token, sequence or geometric mean; auto: token_tis for vLLM and wherever the sampler does not"
                                       " decode in fp32", str, ("auto", "none", *(f"{level}_{action}" for action in ("tis", "mis")
                                                                         for level in ("token", "sequence", "geometric")))),
        "cap": LossOption(None, "largest mismatch weight", float, bound=">0", needs="algorithm.mismatch.correction!=none"),
        "low": LossOption(None, "mis: weights below this are masked too (IcePop: low 0.5, cap 5)", float, bound=">=0",
                          needs="algorithm.mismatch.correction=token_mis|sequence_mis|geometric_mis"),
        "sequence_delta": LossOption(None, "completions with negative advantage whose mean log-prob fell by more than this since they were"
                                           " sampled add no policy loss; 0 = off", float, bound=">=0"),
        "warn": LossOption(0.1, "mean sampler-trainer difference of log-probs, in nats, above which a step warns; 0 = never", bound=">=0"),
        "stop": LossOption(0.0, "the same difference that stops the run; 0 = never", bound=">=0"),
    },
    "mask_truncated": UpdateOption(None, "completions cut by the length limit add no loss (they stay in the denominators)", bool),
    "overlong_buffer_fraction": O(None, "reward.overlong_buffer as a share of max_new_tokens, where that is 0", float, bound="0..1"),
}, read_by=("rl",))
