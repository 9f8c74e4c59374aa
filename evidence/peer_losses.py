"""The losses and advantages of another library on a given batch. Runs in that library's environment, without jaxrl.

    python evidence/peer_losses.py trl batch.npz answers.npz
    python evidence/peer_losses.py tunix batch.npz answers.npz

The library's own functions are called; only the model is a stand-in, whose log-probs are those of the batch. Answers:
<case>/value, <case>/grad (with respect to the log-probs, or the critic's values), or <case>/advantages, <case>/returns.

Legend: N answers, T tokens, padded on the right.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np

EOS, PAD, TOKEN = 1, 0, 5


# ---- TRL

TRL_LOSSES = {  # case -> attributes of the trainer; "args" are those of its config; "advantages", "tool" and "jump" pick inputs
    "grpo": {"beta": 0.04},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 2.0},
    "gspo": {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "sapo": {"loss_type": "sapo"},
    "delta": {"loss_type": "dapo", "args": {"delta": 1.5}},
    "kl_unbiased": {"beta": 0.04, "args": {"use_bias_correction_kl": True}},
    "kl_unbiased_sequence": {"beta": 0.04, "importance_sampling_level": "sequence", "args": {"use_bias_correction_kl": True}},
    "opsm": {"off_policy_mask_threshold": 0.1, "use_vllm": True, "vllm_importance_sampling_correction": False},
    "opsm_without_vllm": {"off_policy_mask_threshold": 0.1},
    "entropy": {"loss_type": "dapo", "_entropy_bonus_enabled": True, "entropy_coef": 0.01},
    "holes": {"tool": True, "beta": 0.04},
    "token_truncate": {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "beta": 0.04},
    "token_truncate_low": {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate",
                           "vllm_importance_sampling_clip_min": 0.9},
    "token_mask": {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.8},
    "sequence_truncate": {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate"},
    "sequence_mask": {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"},
    "mask_truncated_grpo": {"mask_truncated_completions": True},
    "mask_truncated_dapo": {"mask_truncated_completions": True, "loss_type": "dapo"},
    "log_ratio_25": {"jump": True},
}
TRL_ADVANTAGES = {  # case -> (trainer, attributes)
    "scale_group": ("grpo", {"scale_rewards": "group"}),
    "scale_batch": ("grpo", {"scale_rewards": "batch"}),
    "scale_none": ("grpo", {"scale_rewards": "none"}),
    "rloo": ("rloo", {}),
    "rloo_kl": ("rloo", {"beta": 0.05}),
    "rloo_normalized": ("rloo", {"normalize_advantages": True}),
}


def trl(batch: dict) -> dict:
    import torch
    from trl.experimental.gmpo import GMPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    torch.set_default_dtype(torch.float64)
    tensor = lambda name: torch.tensor(batch[name], dtype=torch.float64)  # noqa: E731
    lengths, group = batch["lengths"], int(batch["group_size"])
    n = len(lengths)
    model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    reference, same = object(), lambda x, *_, **__: x
    accelerator = SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same, reduce=same, num_processes=1,
                                  process_index=0, is_main_process=True, sync_gradients=True, unwrap_model=same)
    args = dict(delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, report_to=[],
                steps_per_generation=1, gradient_accumulation_steps=1, per_device_train_batch_size=n,
                gradient_checkpointing_kwargs=None)

    def trainer(kind, leaf=None, old="old", tool=False, **changes):
        """A trainer that was never initialised: attributes of its own, a batch for its engine, log-probs for its model."""
        it = object.__new__(kind)

        def scores(which, *_, **__):
            own = leaf if which == "current" else tensor("ref") if which is reference else tensor(old)
            return own, tensor("entropy"), None

        ids = [[TOKEN] * (length - 1) + [PAD + 9 if cut else EOS] for length, cut in zip(lengths, batch["cut"], strict=True)]
        holes = [row[:length].astype(int).tolist() for row, length in zip(batch["tool"], lengths, strict=True)]
        sampled = [row[:length].tolist() for row, length in zip(batch["behaviour"], lengths, strict=True)]
        sampled = sampled if changes.get("use_vllm") else None
        given = ([[TOKEN]] * n, ids, holes if tool else None, [""] * n, sampled, {}, None, None)
        if kind is RLOOTrainer:
            given = given[:2] + ([""] * n,)
        defaults = dict(
            model=model, ref_model=reference, accelerator=accelerator,
            args=SimpleNamespace(**{**args, **changes.pop("args", {})}),
            loss_type="grpo", beta=0.0, epsilon_low=0.2,
            epsilon_high=0.2, importance_sampling_level="token", top_entropy_quantile=1.0, off_policy_mask_threshold=None,
            use_vllm=False, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_min=None, vllm_importance_sampling_clip_max=float(batch["cap"]), aux_loss_enabled=False,
            max_completion_length=int(batch["max_tokens"]), current_gradient_accumulation_steps=1, num_iterations=2,
            _entropy_bonus_enabled=False, use_adaptive_entropy=False, entropy_coef=0.0, scale_rewards="group",
            multi_objective_aggregation="sum_then_normalize", reward_weights=torch.ones(1, dtype=torch.float64),
            num_generations=group, mask_truncated_completions=False, tools=None, environments=None, environment_factories=None,
            pad_to_multiple_of=None, eos_token_ids=[EOS], _is_vlm=False,
            reward_func_names=["r"], reward_funcs=[None], normalize_advantages=False, reward_clip_range=None,
            _metrics=Everything(), _logs=Everything(), _pending_extra_logs={}, _pending_metrics={},
            _tokenizer=SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS),
            _generate=lambda *_: given, _calculate_rewards=lambda *_: tensor("rewards")[:, None],
            _get_per_token_logps_and_entropies=scores)
        it.__dict__.update(defaults | changes)
        return it

    def gathered(it):
        return it._generate_and_score_completions([{"prompt": "x"}] * n)

    answers = {}

    def keep(case, leaf, it):
        loss = it._compute_loss("current", gathered(it) | {"advantages": tensor("advantages")})
        loss.backward()
        answers[f"{case}/value"], answers[f"{case}/grad"] = loss.item(), leaf.grad.numpy()

    for case, changes in TRL_LOSSES.items():
        changes = dict(changes)
        leaf = tensor("logp").requires_grad_()
        it = trainer(GRPOTrainer, leaf, "old_jump" if changes.pop("jump", False) else "old", **changes)
        keep(case, leaf, it)
    leaf = tensor("logp").requires_grad_()
    keep("gmpo", leaf, trainer(GMPOTrainer, leaf, epsilon_low=0.1, epsilon_high=0.1))
    for case, old in (("rloo_on_policy", "logp"), ("rloo_off_policy", "old")):
        leaf = tensor("logp").requires_grad_()
        keep(case, leaf, trainer(RLOOTrainer, leaf, old))
    for case, (kind, changes) in TRL_ADVANTAGES.items():
        it = trainer({"grpo": GRPOTrainer, "rloo": RLOOTrainer}[kind], **changes)
        answers[f"adv_{case}/advantages"] = gathered(it)["advantages"].numpy()
    return answers


class Everything(dict):
    """A table that has every key and takes whatever is logged."""

    def __missing__(self, key):
        return Everything()

    def append(self, _):
        pass

    extend = append


# ---- Tunix

TUNIX_LOSSES = {  # case -> GRPOConfig options; "jump" and "weights" pick inputs
    "grpo": {"kl_loss_mode": "low_var_kl"},
    "grpo_default_kl": {},
    "grpo_mse_kl": {"kl_loss_mode": "mse_kl"},
    "dapo": {"beta": 0.0, "loss_agg_mode": "token-mean", "epsilon_high": 0.28},
    "dual_clip": {"beta": 0.0, "loss_agg_mode": "token-mean", "epsilon_c": 1.5},
    "gspo_token": {"beta": 0.0, "loss_algo": "gspo-token", "epsilon": 0.03, "epsilon_high": 0.04},
    "dr_grpo": {"beta": 0.0, "loss_agg_mode": "sequence-mean-token-scale"},
    "sequence_sum": {"beta": 0.0, "loss_agg_mode": "seq-mean-token-sum"},
    "sequence_sum_norm": {"beta": 0.0, "loss_agg_mode": "sequence-mean-token-sum-norm"},
    "sampler_weights": {"beta": 0.0, "weights": True},
    "log_ratio_25": {"beta": 0.0, "jump": True},
}


def tunix(batch: dict) -> dict:
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from tunix.rl import algo_core, common

    class Given(nnx.Module):
        def __init__(self, x):
            self.x = nnx.Param(x)

    def logps(graphdef, state, **_):
        x = nnx.merge(graphdef, state).x[...]
        return x, jnp.zeros((*x.shape, 3))

    def score(model, prompt, completion, *_, **__):
        return jnp.pad(model.x[...], ((0, 0), (prompt.shape[1] - 1, 1)))  # a value is read where its token is predicted

    common.compute_per_token_logps, common.compute_score = logps, score
    array = lambda name: jnp.asarray(batch[name], jnp.float32)  # noqa: E731
    mask, group = array("mask"), int(batch["group_size"])
    prompts, completions = jnp.ones((len(mask), 2), jnp.int32), jnp.ones(mask.shape, jnp.int32)
    answers = {}

    def keep(case, function, leaf, **fields):
        example = SimpleNamespace(prompt_ids=prompts, completion_ids=completions, completion_mask=mask, **fields)
        value, grad = jax.value_and_grad(lambda x: function(Given(x), example))(leaf)
        answers[f"{case}/value"], answers[f"{case}/grad"] = np.asarray(value), np.asarray(grad)

    for case, options in TUNIX_LOSSES.items():
        options = dict(options)
        old = array("old_jump" if options.pop("jump", False) else "old")
        weights = array("tis") if options.pop("weights", False) else None
        config = SimpleNamespace(**{"beta": 0.04, "epsilon": 0.2, "loss_algo": "grpo", "kl_loss_mode": "kl", "temperature": 1.0,
                                    "loss_agg_mode": "sequence-mean-token-mean", "kl_clamp_value": None, **options})
        keep(case, lambda m, e, c=config: algo_core.grpo_loss_fn(m, e, c, PAD, EOS)[0], array("logp"), old_per_token_logps=old,
             ref_per_token_logps=array("ref"), advantages=array("advantages"), sampler_is_weights=weights)
    ppo = SimpleNamespace(epsilon_low=0.2, epsilon_high=0.28, epsilon_c=1.5, entropy_coef=0.0, kl_coef=0.0)
    keep("ppo", lambda m, e: algo_core.ppo_policy_loss_fn(m, e, ppo, PAD, EOS)[0], array("logp"), advantages=array("token_adv"),
         old_per_token_logps=array("old"), ref_per_token_logps=None)
    keep("value", lambda m, e: algo_core.ppo_value_loss_fn(m, e, 0.2, PAD, EOS)[0], array("values"),
         old_values=array("old_values"), returns=array("returns"))
    for case, which in (("gae", mask), ("gae_holes", mask * array("tool"))):
        advantages, returns = algo_core.compute_gae_advantages(
            array("token_rewards") * which, array("old_values"), which, float(batch["gamma"]), float(batch["lam"]))
        answers[f"{case}/advantages"], answers[f"{case}/returns"] = np.asarray(advantages), np.asarray(returns)
    rewards = np.asarray(batch["rewards_present"], np.float64)
    answers["adv_group/advantages"] = np.asarray(algo_core.compute_advantages(rewards, group))
    answers["adv_rloo/advantages"] = np.asarray(algo_core.compute_rloo_advantages(jnp.asarray(rewards), group))
    answers["adv_dr_grpo/advantages"] = np.asarray(algo_core.compute_drgrpo_advantages(jnp.asarray(rewards), group))
    return answers


def main():
    which, source, target = sys.argv[1:]
    np.savez(target, **{"trl": trl, "tunix": tunix}[which](dict(np.load(source))))


if __name__ == "__main__":
    main()
