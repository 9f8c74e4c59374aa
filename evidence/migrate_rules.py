"""What configs of other systems mean, written down from those systems' code: the rules of migrate_corpus.py.

A rule takes the keys of a config as an independent reader found them (Keys), the config that was written and the version.
It returns name -> (what is written, what the source's code makes of its keys). It does not look at jaxrl.migrate.
"""

from __future__ import annotations

import contextlib
import math
import os
import re


class Keys:
    """The independent reader's keys as numbers and flags, references within the file followed."""

    def __init__(self, keys: dict):
        self.keys = keys

    def raw(self, name, default=None):
        """The value as it stands in the file."""
        return self.keys.get(name, default)

    def __call__(self, *names, default=None):
        value = next((self.keys[n] for n in names if n in self.keys), default)
        for _ in range(9):
            m = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
            value = self.keys.get(m[1]) if m else value
        if isinstance(value, str):
            text = value.strip("'\"")
            if text.lower() in ("true", "false", "null", "none", ""):
                return {"true": True, "false": False}.get(text.lower())
            with contextlib.suppress(ValueError):
                return float(text)
            return text
        return value


def _mean_of(c):
    """Completions of a token mean; None: all of an optimizer step."""
    return 1 if c.algorithm.aggregation == "sequence_mean" else c.algorithm.aggregation_sequences or None


def skyrl(k: Keys, c, version: str) -> dict:
    """skyrl/train/trainer.py, utils/utils.py (validate_batch_sizes), utils/ppo_utils.py."""
    a, s, o = "trainer.algorithm.", "generator.sampling_params.", "trainer.policy.optimizer_config."
    out = {
        "prompts": (c.data.prompts_per_step, k("trainer.train_batch_size", default=1024)),
        "group": (c.rollout.group_size, k("generator.n_samples_per_prompt", default=5)),
        "updates": (c.algorithm.num_minibatches * c.algorithm.ppo_epochs, k("trainer.train_batch_size", default=1024)
                    / k("trainer.policy_mini_batch_size", default=256) * k("trainer.update_epochs_per_batch", default=1)),
        "lr": (c.optimizer.lr, k(o + "lr", default=1e-6)),
        "warmup": (c.optimizer.warmup_steps, k(o + "num_warmup_steps", "trainer.num_warmup_steps", default=0)),
        "longest": (c.rollout.max_new_tokens, k(s + "max_generate_length", default=1024)),
        "prompt": (c.data.max_prompt_tokens, k("trainer.max_prompt_length", default=512)),
        "temperature": (c.rollout.temperature, k(s + "temperature", default=1.0)),
        "epochs": (c.data.epochs, k("trainer.epochs", default=1)),
        "eval every": (c.eval.every_steps, max(k("trainer.eval_interval", default=5), 0)),
    }
    kind, old = k(a + "loss_reduction", default="token_mean"), version.startswith("train") or version in ("docs", "0.1")
    if kind == "token_mean_legacy" or kind == "token_mean" and old:
        out["token mean"] = (_mean_of(c), k("trainer.micro_train_batch_size_per_gpu", default=1))
    on = k(a + "use_kl_loss", default=True) or k(a + "use_kl_in_reward", default=False)
    out["kl"] = (c.algorithm.kl.coef, k(a + "kl_loss_coef", default=0.001) if on else 0.0)
    if c.algorithm.policy_loss == "clip":
        out["clip"] = ((c.algorithm.clip_low, c.algorithm.clip_high),
                       (k(a + "eps_clip_low", default=0.2), k(a + "eps_clip_high", default=0.2)))
    own = any(name.startswith("generator.eval_sampling_params.") for name in k.keys)
    greedy = 0.0 if version.startswith("train") or not own else 1.0
    out["eval temperature"] = (c.eval.temperature, k("generator.eval_sampling_params.temperature", default=greedy))
    return out


def verl(k: Keys, c, version: str) -> dict:
    """0.4 and 0.7: trainer/config/ppo_trainer.yaml (0.7: _generated_*), trainer/ppo/ray_trainer.py and core_algos.py, workers/fsdp_workers.py,
    megatron_workers.py, actor/dp_actor.py, critic/dp_critic.py, utils/megatron/optimizer.py, experimental/agent_loop/agent_loop.py.
    0.9: workers/engine_workers.py, engine/*/transformer_impl.py and utils/losses.py in place of the workers' files."""
    a, r, al = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", c.algorithm
    engines = version >= "0.8" or k("trainer.use_legacy_worker_impl", default="auto") == "disable"
    megatron = _engine_of_verl(k) in ("megatron", "mindspeed")
    mode, agg = k(a + "policy_loss.loss_mode", default="vanilla"), k(a + "loss_agg_mode", default="token-mean")
    estimator, n = k("algorithm.adv_estimator", default="gae"), k(r + "n", default=1)
    prompts, length = k("data.train_batch_size", default=1024), k("data.max_response_length", default=512)
    in_loss, in_reward = k(a + "use_kl_loss", default=False), k("algorithm.use_kl_in_reward", default=False)
    high, low = k(a + "clip_ratio_high", default=0.2), k(a + "clip_ratio_low", default=0.2)
    low, high = (k(a + "clip_ratio", default=0.2) if x is None else x for x in (low, high))
    steps = k("trainer.total_training_steps")
    freq = k("trainer.test_freq", default=-1)
    val = r + "val_kwargs."
    out = {
        # ray_trainer.py: a step is train_batch_size prompts x n, ppo_mini_batch_size prompts an update; drop_last=True
        "prompts": (c.data.prompts_per_step, prompts),
        "group": (c.rollout.group_size, n),
        "updates": (al.num_minibatches * al.ppo_epochs, prompts / k(a + "ppo_mini_batch_size", default=256) * k(a + "ppo_epochs", default=1)),
        "epochs": (c.data.epochs, k("trainer.total_epochs", default=30)),
        "steps": (c.train.steps, steps),
        "last step": (c.data.drop_last, True),
        "shuffled": (c.data.shuffle, k("data.shuffle", default=True)),
        "prompt": (c.data.max_prompt_tokens, k("data.max_prompt_length", default=512)),
        "filter": (c.data.overlong_prompt, "filter" if k("data.filter_overlong_prompts", default=False) else {
            "left": "truncate_left"}.get(k("data.truncation", default="error"), k("data.truncation", default="error"))),
        "rows": (c.data.max_rows, max(k("data.train_max_samples", default=-1), 0)),
        # rollout
        "longest": (c.rollout.max_new_tokens, length),
        "shortest": (c.rollout.min_new_tokens, 0),
        "temperature": (c.rollout.temperature, k(r + "temperature", default=1.0)),
        "trainer's temperature": (al.temperature or c.rollout.temperature, k(r + "temperature", default=1.0)),
        "top_p": (c.rollout.top_p, k(r + "top_p", default=1.0)),
        "top_k": (c.rollout.top_k, k(r + "top_k", default=-1)),
        "repetition": (c.rollout.repetition_penalty, 1.0),  # agent_loop.py hands 1.0 to the engine
        "staleness": ((c.rollout.max_staleness, c.rollout.sync_every), (0, 1)),
        "dynamic": (al.dynamic_sampling or "off", "off"),
        # rewards: fixed kl_ctrl; the penalty is of the tokens' rewards
        "kl": (al.kl.coef, k(a + "kl_loss_coef", default=0.001) if in_loss else
               k("algorithm.kl_ctrl.kl_coef", default=0.001) if in_reward else 0.0),
        "reward's rest": ((c.reward.norm_mean, c.reward.norm_std, c.reward.zero_without_end, c.reward.clip), ("none", "none", False, None)),
        "entropy": (al.entropy_coef or 0.0, k(a + "entropy_coeff", default=0)),
        "old log-probs": (al.old_logprobs in (None, "auto", "recompute"), True),  # the trainer's own, the update's where there is one
        "truncated": (bool(al.mask_truncated), False),
        # optimizer: AdamW of torch or Megatron with the eps of both
        "lr": (c.optimizer.lr, k(a + "optim.lr", default=1e-6)),
        "warmup": ((c.optimizer.warmup_steps, c.optimizer.warmup_fraction), _warmup_of_verl(k, a + "optim.", c, version, megatron)),
        "weight decay": (c.optimizer.weight_decay, k(a + "optim.weight_decay", default=0.01)),
        "betas": ((c.optimizer.b1, c.optimizer.b2), tuple(_list(k.raw(a + "optim.betas"), (0.9, 0.999)))),
        "eps": (c.optimizer.eps, 1e-8),
        # dp_actor.py reads actor.grad_clip, Megatron and the later engines optim.clip_grad alone
        "gradient's clip": (c.optimizer.max_grad_norm, k(a + ("optim.clip_grad" if megatron or engines else "grad_clip"), default=1.0)),
        "schedule": (c.optimizer.schedule, _schedule_of_verl(k, a + "optim.", megatron, version)),
        # ray_trainer.py: test_freq and the last step; agent_loop.py: val_kwargs
        "eval every": (c.eval.every_steps if c.eval.sets else max(freq, 0), max(freq, 0)),
        "eval after": (c.eval.after, freq > 0),
        "eval before": (c.eval.before, k("trainer.val_before_train", default=True)),
        "saved every": (c.checkpoint.every_steps, max(k("trainer.save_freq", default=-1), 0)),
        "adapters": (c.lora.rank, k("actor_rollout_ref.model." + ("lora.rank" if megatron and version >= "0.7" else "lora_rank"), default=0)),
    }
    if c.eval.sets:
        greedy = version < "0.7" and not k(val + "do_sample", default=False)  # vllm_rollout_spmd.py
        asked = (c.eval.temperature, c.eval.top_p, c.eval.top_k, c.eval.samples)
        out["eval sampling"] = (asked, (0, 1.0, -1, 1) if greedy else (
            k(val + "temperature", default=0), k(val + "top_p", default=1.0), k(val + "top_k", default=-1), k(val + "n", default=1)))
    if megatron:
        out["floor"] = (c.optimizer.floor if out["schedule"][1] != "constant" else 0.0,
                        k(a + "optim.min_lr", default=0.0) / k(a + "optim.lr", default=1e-6) if out["schedule"][1] != "constant" else 0.0)
    elif k(a + "optim.lr_scheduler_type") == "cosine":
        out["floor"] = (c.optimizer.floor, k(a + "optim.min_lr_ratio", default=0.0) or 0.0)
    if al.kl.coef:
        name = k(a + "kl_loss_type", default="low_var_kl") if in_loss else k("algorithm.kl_penalty", default="kl")
        out["estimator"] = ((al.kl.estimator, al.kl.placement), ({"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "low_var",
                                                                  "k3": "low_var", "abs": "abs"}.get(name, name), "loss" if in_loss else "reward"))
    # core_algos.py. ReMax is a reward to go less the greedy completion's reward: a sum of the completion only without a KL in it
    alone = n == 1  # of a group of one the mean is 0 and the deviation 1
    std = "none" if alone else "group" if k("algorithm.norm_adv_by_std_in_grpo", default=True) else "none"
    to_go = (al.advantage, al.advantage_mean, al.advantage_std, al.whiten, al.gamma)
    whole = to_go[:4]
    gamma = k("algorithm.gamma", default=1.0)
    out["advantage"] = {
        "gae": ((al.advantage, al.gamma, al.lam, al.whiten), ("gae", gamma, k("algorithm.lam", default=1.0), True)),
        "grpo": (whole, ("outcome", "none" if alone else "group", std, False)),
        "rloo": (whole, ("outcome", "none" if alone else "leave_one_out", "none", False)),
        "remax": (to_go, ("returns", "greedy", "none", False, 1.0)) if in_reward else (whole, ("outcome", "greedy", "none", False)),
        "reinforce_plus_plus_baseline": (whole, ("outcome", "group", "none", True)),
        "reinforce_plus_plus": (to_go, ("returns", "none", "none", True, gamma)),
    }[estimator]
    # one micro-batch's mean, and the mean of those (workers), or the mini-batch's over all ranks (engines)
    size = None if engines or k(a + "use_dynamic_bsz", default=False) else k(a + "ppo_micro_batch_size_per_gpu")
    agg = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}.get(mode, agg)
    factor = k(a + "loss_scale_factor") or length
    out["mean"] = ((al.aggregation, al.aggregation_sequences, al.aggregation_constant or 0.0), {
        "token-mean": ("sequence_mean", 0, 0.0) if size == 1 else ("token_mean", size or 0, 0.0), "seq-mean-token-sum": ("sequence_sum", 0, 0.0),
        "seq-mean-token-mean": ("sequence_mean", 0, 0.0),
        # the workers divide a micro-batch's sum by the length alone
        "seq-mean-token-sum-norm": ("constant", 0, factor if engines else factor / (size or 1))}[agg])
    out["loss"] = ((al.policy_loss, al.ratio), {"gspo": ("clip", "sequence_token"), "geo_mean": ("clip", "geometric"), "sapo": ("sapo", "token"),
                                                "cispo": ("cispo", "token"), "dppo_tv": ("dppo", "token")}.get(mode, ("clip", "token")))
    if mode in ("vanilla", "gspo", "geo_mean"):
        out["clip"] = ((al.clip_low, al.clip_high), (low, high))
        out["dual clip"] = (al.dual_clip, k(a + "clip_ratio_c", default=3.0) if mode == "vanilla" else 0.0)
    elif mode == "cispo":  # clamp(ratio, 1 - low, 1 + high), which a ratio below 0 never meets
        out["clip"] = ((al.cispo_min_ratio, al.cispo_max_ratio), (max(1 - low, 0.0), 1 + high))
    elif mode == "sapo":
        out["gates"] = ((al.sapo_tau_pos, al.sapo_tau_neg), (k(a + "tau_pos", default=1.0), k(a + "tau_neg", default=1.05)))
    buffer = next((p for p in ("reward.reward_kwargs.overlong_buffer_cfg.", "reward_model.reward_kwargs.overlong_buffer_cfg.")
                   if k(p + "enable", default=False)), None)  # reward_manager/dapo.py: overlong_buffer_cfg
    out["overlong"] = ((c.reward.overlong_buffer, c.reward.overlong_penalty if buffer else 0.0),
                       (k(buffer + "len"), k(buffer + "penalty_factor")) if buffer else (0, 0.0))
    if estimator == "gae":
        v, theirs = "critic.optim.", k("critic.strategy", default="megatron" if megatron else "fsdp") in ("megatron", "mindspeed")
        clip = "clip_grad" if theirs or engines else None
        out |= {
            "critic's lr": (c.critic.lr, k(v + "lr", default=1e-5)),
            "critic's clip": (c.critic.value_clip, k("critic.cliprange_value", default=0.5)),
            "critic": (c.critic.path or c.model.path, _place(k("critic.model.path", "actor_rollout_ref.model.path"))),
            "critic alone": ((c.critic.warmup_steps, c.critic.normalize, c.critic.shared), (
                max(k("trainer.critic_warmup", default=0) - 1, 0), False, False)),  # critic_warmup <= global_steps, from 1
            "critic's updates": (c.critic.num_minibatches or al.num_minibatches, prompts / k(
                "critic.ppo_mini_batch_size", a + "ppo_mini_batch_size", default=256)),
            "critic's warmup": ((_scale_of(c, "warmup_steps") if not _scale_of(c, "warmup_fraction") else 0, _scale_of(c, "warmup_fraction")),
                                _warmup_of_verl(k, v, c, version, theirs)),
            "critic's decay": (_scale_of(c, "weight_decay"), k(v + "weight_decay", default=0.01)),
            "critic's gradient": (_scale_of(c, "max_grad_norm"), k(v + clip if clip else "critic.grad_clip", default=1.0)),
            "critic's schedule": (_scale_of(c, "schedule"), _schedule_of_verl(k, v, theirs, version)),
        }
    if k("reward.reward_model.enable", "reward_model.enable", default=False):
        out["reward model"] = (c.reward.model.path, _place(k("reward.reward_model.model_path", "reward_model.model.path")))
    if out["adapters"][1] and not megatron:
        out["adapted"] = (c.lora.alpha, k("actor_rollout_ref.model.lora_alpha", default=16))
    correction = "algorithm.rollout_correction."  # rollout_corr_helper.py, of 0.7 on; two numbers are a mask, one is a cap
    out["corrected"] = (al.mismatch.correction, "none" if k(correction + "bypass_mode", default=False) or not k(correction + "rollout_is")
                        else k(correction + "rollout_is") + ("_mis" if "_" in str(k.raw(correction + "rollout_is_threshold")) else "_tis"))
    if out["corrected"][1] != "none":
        bounds = [float(x) for x in str(k.raw(correction + "rollout_is_threshold", 2.0)).split("_")]
        out["bounds"] = ((al.mismatch.cap, al.mismatch.low or 0.0), (bounds[-1], bounds[0] if len(bounds) > 1 else 0.0))
    if k("distillation.enabled", default=False):  # the policy's loss is dropped
        del out["advantage"]
    if version >= "0.8":
        out |= _later_verl(k, c, version, mode)
    return out


def _place(path: str | None) -> str:
    return os.path.expanduser(os.path.expandvars(path or ""))


def _list(value, default):
    """A list that stands in a file, or as a word [0.9,0.98]."""
    return default if value is None else [float(x) for x in value.strip("[] ").split(",")] if isinstance(value, str) else value


def _engine_of_verl(k: Keys) -> str:
    """fsdp, megatron, ...: strategy, or the config that a script starts from (--config-name, model_engine)."""
    of = "actor_rollout_ref.actor."
    engine = k(of + "strategy") or {"dp": "fsdp"}.get(k("model_engine", default="dp"), k("model_engine", default="dp"))
    if engine == "fsdp" and k(of + "strategy") is None and any(name.startswith(of + "megatron.") for name in k.keys):
        return "megatron"  # ppo_megatron_trainer.yaml, the one config that has such a table
    return engine


def _schedule_of_verl(k: Keys, o: str, megatron: bool, version: str) -> str:
    """fsdp_workers.py: warmup_style in 0.4, later lr_scheduler_type (warmup_style, if it is there, wins); Megatron: lr_decay_style."""
    if megatron:  # ppo_megatron_trainer.yaml: linear in 0.4
        return k(o + "lr_decay_style", default="constant" if version >= "0.7" else "linear")
    if version < "0.7":
        return k(o + "warmup_style", default="constant")
    veomni = version >= "0.8" and _engine_of_verl(k) == "veomni"
    return k(o + "warmup_style") or k(o + "lr_scheduler_type", default="cosine" if veomni else "constant")


def _later_verl(k: Keys, c, version: str, mode: str) -> dict:
    """workers/engine/*/transformer_impl.py, engine_workers.py, trainer/distillation/losses.py, rollout_corr_helper.py,
    config/model_engine, engine and model of 0.8 and 0.9."""
    a, r, engine = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", _engine_of_verl(k)
    tp, cp = {"megatron": ("tensor_model_parallel_size", "context_parallel_size"), "veomni": ("", "ulysses_parallel_size"),
              "mindspeed": ("tensor_model_parallel_size", "context_parallel_size")}.get(engine, ("", ""))
    ulysses = k(a + "ulysses_sequence_parallel_size", a + "fsdp_config.ulysses_sequence_parallel_size", default=1)
    out = {
        "tp": (c.mesh.tp, k(f"{a}{engine}.{tp}", default=1)),
        "cp": (c.mesh.cp, k(f"{a}{engine}.{cp}", default=1) if cp else ulysses),
        "most sequences": (c.rollout.vllm.max_running, k(r + "max_num_seqs", default=256 if version >= "0.9" else 1024)),
        "taught": (c.run.recipe == "distill", k("distillation.enabled", default=False)),
    }
    if mode == "dppo_tv":
        out["trust region"] = ((c.algorithm.dppo_low, c.algorithm.dppo_high), (k(a + "clip_ratio_low"), k(a + "clip_ratio_high")))
    if out["taught"][1]:  # the teacher's advantage under a clip of its own; the policy's loss, its KL and entropy are dropped
        d = "distillation.distillation_loss."
        dense = k(d + "loss_mode") == "forward_kl_topk"  # the loss itself: no ratio, and nothing to correct
        out["kl"] = (c.algorithm.kl.coef or 0.0, 0.0)
        out["clip"] = ((c.algorithm.clip_low, c.algorithm.clip_high), (None, None) if dense else (
            k(d + "clip_ratio_low", default=0.2), k(d + "clip_ratio_high", default=0.2)))
        out["dual clip"] = (c.algorithm.dual_clip, None if dense else 3.0)
        if dense:
            out["corrected"] = (c.algorithm.mismatch.correction, None)
            out["teacher's tokens"] = (c.distill.top_k, k(d + "topk", default=32))
        out["loss"] = (c.distill.loss, {"k1": "sampled", "forward_kl_topk": "forward"}[k(d + "loss_mode")])
        out["teacher"] = (c.teacher.path, k("distillation.teacher_models.teacher_model.model_path"))
    return out


def _warmup_of_verl(k: Keys, o: str, c, version: str, megatron: bool) -> tuple[float, float]:
    """The schedule moves once per step, whatever its mini-batches. lr_warmup_steps of 0 is none in the FSDP workers of 0.4 and 0.7
    (num_warmup_steps < 0 asks for the share), and the share elsewhere (<= 0)."""
    steps, share = k(o + "lr_warmup_steps", default=-1), k(o + "lr_warmup_steps_ratio", default=0.0)
    counts = steps is not None and (steps > 0 or steps == 0 and version < "0.8" and not megatron)
    return (steps * c.algorithm.num_minibatches * c.algorithm.ppo_epochs, 0.0) if counts else (0, share or 0.0)


def trl(k: Keys, c, version: str) -> dict:
    """trl/trainer/grpo_config.py (__post_init__) and grpo_trainer.py, eight processes."""
    accumulated = k("gradient_accumulation_steps", default=1)
    whole = k("per_device_train_batch_size", default=8) * 8 * accumulated
    bnpo = k("loss_type", default="bnpo" if version in ("0.17", "0.18", "0.19") else "dapo") == "bnpo"
    return {
        "token mean": (_mean_of(c) if bnpo else 0, k("per_device_train_batch_size", default=8) if bnpo else 0),
        "sequences": (c.data.prompts_per_step * c.rollout.group_size, whole),
        "group": (c.rollout.group_size, k("num_generations", default=8)),
        "updates": (c.algorithm.num_minibatches * c.algorithm.ppo_epochs, k("num_iterations", default=1)),
        "lr": (c.optimizer.lr, k("learning_rate", default=1e-6)),
        "longest": (c.rollout.max_new_tokens, k("max_completion_length", default=256)),
        "temperature": (c.rollout.temperature, k("temperature", default=1.0)),
        "kl": (c.algorithm.kl.coef, k("beta", default=0.04 if version == "0.18" else 0.0)),
        "warmup": (c.optimizer.warmup_fraction, k("warmup_ratio", default=0.0)),
    }


def _scale_of(c, name: str):
    """An option of the critic's optimizer, which is the policy's where it is not the critic's own."""
    return c.critic.optimizer.get(name, getattr(c.optimizer, name))


def _table(k: Keys, name: str) -> str:
    """The name of a table, references to a whole table (`optimizer: ${actor.optimizer}`) followed."""
    m = re.fullmatch(r"\$\{([\w.]+)\}", str(k.raw(name, "")))
    return m[1] if m else name


def _norm_of_areal(k: Keys, name: str) -> dict | None:
    """NormConfig (api/cli_args.py), None where its table is absent or null."""
    if not any(key.startswith(name + ".") for key in k.keys):
        return None
    return {"mean": k(name + ".mean_level", default="batch"), "std": k(name + ".std_level", default="batch"),
            "others": k(name + ".mean_leave1out", default=False), "ddof": 1 if k(name + ".std_unbiased", default=True) else 0,
            "size": k(name + ".group_size", default=1)}


def _correction_of_areal(k: Keys, version: str) -> tuple[str, float, float]:
    """(correction, cap, low): ppo_actor_loss_fn of utils/functional; without the decoupled loss both policies are the same."""
    a, r = "actor.", "actor.rejection_sampling."
    if not k(a + "use_decoupled_loss", default=False):
        return "none", 0.0, 0.0
    if version < "1":  # areal/utils/functional.py: weights above the cap are dropped; without a cap all of them are applied
        cap = k(a + "behav_imp_weight_cap")
        return ("token_mis", cap, 0.0) if cap else ("token_tis", float("inf"), 0.0)
    if not any(key.startswith(r) for key in k.keys):  # 1.0.1 to 1.0.3 and two examples that still have it: the cap of before
        cap = k(a + "behave_imp_weight_cap", a + "behav_imp_weight_cap")
        return ("token_mis", cap, 0.0) if cap else ("none", 0.0, 0.0)
    level = {"token": "token", "sequence": "geometric"}[k(r + "level", default="token")]  # metric=ratio, agg=mean
    return f"{level}_{'mis' if k(r + 'action', default='mask') == 'mask' else 'tis'}", k(r + "upper", default=5.0), k(r + "lower") or 0.0


def areal(k: Keys, c, version: str) -> dict:
    """1.0: areal/api/cli_args.py (defaults), trainer/rl_trainer.py, trainer/ppo/actor.py and critic.py, utils/functional/functional.py,
    utils/data.py (Normalization), engine/fsdp_engine.py and megatron_engine.py (optimizer), infra/staleness_manager.py and
    remote_inf_engine.py, examples/math/gsm8k_rl.py and boba_grpo.py (evaluation and filter). 0.3: areal/engine/ppo/actor.py,
    areal/utils/functional.py, areal/engine/base_hf_engine.py and the same scripts."""
    a, o, g, al = "actor.", _table(k, "actor.optimizer") + ".", "gconfig.", c.algorithm
    scale, bias, clip = k(a + "reward_scaling", default=1.0), k(a + "reward_bias", default=0.0), k(a + "reward_clip", default=20.0)
    within = lambda r: min(max(r, -clip), clip)  # noqa: E731
    written = lambda r: min(max(c.reward.scale * r + c.reward.bias, -c.reward.clip), c.reward.clip)  # noqa: E731
    decoupled, critic = k(a + "use_decoupled_loss", default=False), any(key.startswith("critic.") for key in k.keys)
    rescored = decoupled or k(a + "recompute_logprob", default=False)
    asynchronous = version >= "1" or k("async_training", default=True)  # 1.0 has prepare_batch alone; 0.3's scripts ask
    batch, gamma, lam = k("train_dataset.batch_size", default=1), k(a + "discount", default=1.0), k(a + "gae_lambda", default=1.0)
    top_k = k(g + "top_k", default=1e8)
    out = {
        "recipe": (c.run.recipe, "rl"),
        # data and batch arithmetic: a step is train_dataset.batch_size prompts over all ranks; drop_last and shuffle of the dataclass
        "prompts": (c.data.prompts_per_step, batch),
        "epochs": (c.data.epochs, k("total_train_epochs", default=1)),
        "steps": (c.train.steps, k("total_train_steps")),
        "samples": (c.train.max_samples, k("total_train_n_seqs") or 0),
        "shuffled": (c.data.shuffle, k("train_dataset.shuffle", default=True)),
        "last step": (c.data.drop_last, k("train_dataset.drop_last", default=True)),
        "seed": (c.run.seed, k("seed", default=1)),
        # sampling: GenerationHyperparameters
        "group": (c.rollout.group_size, k(g + "n_samples", default=1)),
        "longest": (c.rollout.max_new_tokens, k(g + "max_new_tokens", default=16384)),
        "shortest": (c.rollout.min_new_tokens, 0),  # the engines' requests do not have min_new_tokens
        "temperature": (c.rollout.temperature, 0.0 if k(g + "greedy", default=False) else k(g + "temperature", default=1.0)),
        "trainer's temperature": (al.temperature or c.rollout.temperature, k(a + "temperature", default=1.0)),
        "top_p": (c.rollout.top_p, k(g + "top_p", default=1.0)),
        "top_k": (c.rollout.top_k, -1 if top_k >= 1e8 else top_k),
        "frequency": (c.rollout.frequency_penalty, k(g + "frequency_penalty", default=0.0)),
        "minima": ((c.rollout.min_p, c.rollout.repetition_penalty), (0.0, 1.0)),  # it has none
        # staleness_manager.py: (head + version + 1) consumer batches may have been begun; pause() hands what is begun to the new weights
        "staleness": (c.rollout.max_staleness, math.ceil((k("rollout.max_head_offpolicyness", default=0) + 1) * k(
            "rollout.consumer_batch_size", default=batch) / batch) - 1 if asynchronous else 0),
        "synced": (c.rollout.sync_every, 1),
        # actor.py: (reward + bias) * scaling, clipped, then reward_norm; overlong_reward_penalty comes before all of it
        "reward of 1": (written(1), within((1 + bias) * scale)),
        "reward of 0": (written(0), within(bias * scale)),
        "without an end": (c.reward.zero_without_end, k(a + "mask_no_eos_with_zero", default=False)),
        "truncated": (bool(al.mask_truncated), False),
        "dynamic": (al.dynamic_sampling, "mask" if version < "1" and k(a + "dynamic_sampling", default=False) else "off"),
        # actor.py: the whole batch is split into ppo_n_minibatches, one pass
        "updates": (al.num_minibatches * (al.ppo_epochs or 1), k(a + "ppo_n_minibatches", default=4)),
        "loss": (al.policy_loss, "sapo" if k(a + "use_sapo_loss", default=False) else "clip"),
        "ratio": (al.ratio, k(a + "importance_sampling_level", default="token")),
        "mean": ((al.aggregation, al.aggregation_sequences), ("token_mean", 0)),  # loss_weight_fn: tokens of all microbatches and ranks
        "second moment": (al.m2_threshold or 0.0, k(a + "m2_threshold") or 0.0),
        "old log-probs": (al.old_logprobs, "recompute" if rescored else "rollout"),
        "correction": ((al.mismatch.correction, al.mismatch.cap or 0.0, al.mismatch.low or 0.0), _correction_of_areal(k, version)),
        "entropy": (al.entropy_coef or 0.0, 0.0),  # detached in grpo_loss_fn
        # rl_trainer.py makes a reference for kl_ctl > 0 alone; KLEstimator's terms are subtracted from the rewards
        "kl": (al.kl.coef, k(a + "kl_ctl", default=0.1)),
        # optimizer and scheduler; step_lr_scheduler() is called once per RL step, so that a share of them is a share of updates
        "optimizer": (c.optimizer.name, {"adam": "adamw", "adam_bf16": "adamw", "sgd": "sgd"}[k(o + "type", default="adam")]),
        "lr": (c.optimizer.lr, k(o + "lr", default=1e-3 if version >= "1" else 2e-5)),
        "betas": ((c.optimizer.b1, c.optimizer.b2), (k(o + "beta1", default=0.9), k(o + "beta2", default=0.999 if version >= "1" else 0.95))),
        "eps": (c.optimizer.eps, k(o + "eps", default=1e-8 if version >= "1" else 1e-5)),
        "weight decay": (c.optimizer.weight_decay, k(o + "weight_decay", default=0.01 if version >= "1" else 0.05)),
        "gradient's clip": (c.optimizer.max_grad_norm, k(o + "gradient_clipping", default=1.0)),
        "schedule": (c.optimizer.schedule, k(o + "lr_scheduler_type", default="constant")),
        "warmup": (c.optimizer.warmup_fraction or c.optimizer.warmup_steps, k(o + "warmup_steps_proportion", default=0.001)),
        # evaluator.py, timeutil.py
        "eval every": ((c.eval.every_steps, c.eval.every_epochs, c.eval.every_seconds) if c.eval.sets else (0, 0, 0), tuple(
            k(f"evaluator.freq_{x}") or 0 for x in ("steps", "epochs", "secs")) if c.eval.sets else (0, 0, 0)),
        "eval before": (c.eval.before, k("evaluator.eval_before_train", default=False)),
        "eval after": (c.eval.after, False),
        # saver.py writes HF folders, recover.py what a run goes on from
        "exports": ((c.checkpoint.export_every_steps, c.checkpoint.export_every_epochs, c.checkpoint.export_every_minutes), (
            k("saver.freq_steps") or 0, k("saver.freq_epochs") or 0, (k("saver.freq_secs") or 0) / 60)),
    }
    if k("train_dataset.max_length") is not None:  # dataset/gsm8k.py: filter
        out["prompt"] = ((c.data.max_prompt_tokens, c.data.overlong_prompt), (k("train_dataset.max_length"), "filter"))
    else:  # no bound of its own; what a training script filters (boba_grpo.py: beyond 1024) is the script's, which is asked for
        out["prompt"] = (c.data.overlong_prompt, "error")
    if c.eval.sets:  # the scripts: gconfig.new(temperature=0.6); rl_trainer.py: eval_gconfig.n_samples, which is gconfig's unless set
        n = k(g + "n_samples", default=1)
        out["eval sampling"] = ((c.eval.temperature, c.eval.samples, c.eval.max_new_tokens or c.rollout.max_new_tokens), (
            0.6, k("eval_gconfig.n_samples", default=n) if version >= "1" else n, k(g + "max_new_tokens", default=16384)))
    if k(a + "kl_ctl", default=0.1):
        out["estimator"] = ((al.kl.estimator, al.kl.placement), (k(a + "kl_estimator", default="k1"), "reward"))
        out["reference"] = (c.reference.path or c.model.path, k("ref.path"))
    if k(a + "use_sapo_loss", default=False):
        out["gates"] = ((al.sapo_tau_pos, al.sapo_tau_neg), (k(a + "sapo_tau_pos", default=1.0), k(a + "sapo_tau_neg", default=1.05)))
    else:
        low = k(a + "eps_clip", default=0.2) or 1e-9  # 0 (M2PO's example) is a clip to 1, which 1 + 1e-9 is in fp32
        high = k(a + "eps_clip_higher")
        out["clip"] = ((al.clip_low, al.clip_high), (low, low if high is None else high or 1e-9))
        out["dual clip"] = (al.dual_clip, k(a + "c_clip") or 0.0)
    if k(a + "overlong_reward_penalty", default=False):  # before bias and scale, of the longest that actor.max_new_tokens says
        out["overlong"] = ((c.reward.overlong_buffer, c.reward.overlong_penalty), (
            k(a + "overlong_tokens"), k(a + "overlong_penalty_factor") * scale))
        out["overlong from"] = (c.rollout.max_new_tokens, k(a + "max_new_tokens", default=1024))
    else:
        out["overlong"] = (c.reward.overlong_buffer + (al.overlong_buffer_fraction or 0.0), 0)
    # actor.py: rewards at the last token, GAE without values is discount * lambda to go; then adv_norm over the batch's tokens
    out["advantage"] = ((al.advantage, al.gamma, al.lam if critic else None), ("gae", gamma, lam) if critic else ("returns", gamma * lam, None))
    whole = _norm_of_areal(k, a + "adv_norm")
    out["whitened"] = (al.whiten, {None: False, ("batch", "batch", False): True}.get(whole and (whole["mean"], whole["std"], whole["others"]), whole))
    reward = _norm_of_areal(k, a + "reward_norm") or {"mean": None, "std": None, "others": False, "ddof": 1, "size": 1}
    mean, std = reward["mean"] or "none", reward["std"] or "none"
    if reward["others"]:  # the mean of the group's others, with the deviation of all
        out["scores"] = ((c.reward.norm_mean, c.reward.norm_std, al.advantage_mean, al.advantage_std), (
            "none", "none", "leave_one_out", std if reward["ddof"] else std + "_population"))
    else:
        out["scores"] = ((c.reward.norm_mean, c.reward.norm_std, al.advantage_mean, al.advantage_std), (
            mean, std if reward["ddof"] else std + "_population", "none", "none"))
    if "group" in (mean, std):  # a size that refers to what is not set is gconfig's default
        out["group of scores"] = (c.rollout.group_size, reward["size"] or 1)
    if critic:
        v = _table(k, "critic.optimizer") + "."
        out |= {
            "critic's lr": (c.critic.lr, k(v + "lr", default=1e-3 if version >= "1" else 2e-5)),
            "critic's clip": (c.critic.value_clip, k("critic.eps_clip", default=0.5)),
            "critic's updates": (c.critic.num_minibatches or al.num_minibatches, k("critic.ppo_n_minibatches", default=4)),
            "critic": (c.critic.path or c.model.path, k("critic.path")),
            "critic alone": ((c.critic.shared, c.critic.warmup_steps, c.critic.normalize), (False, 0, False)),
            "critic's lambda": (al.lam if al.critic_lam is None else al.critic_lam, lam),
            "critic's decay": (_scale_of(c, "weight_decay"), k(v + "weight_decay", default=0.01 if version >= "1" else 0.05)),
            "critic's betas": ((_scale_of(c, "b1"), _scale_of(c, "b2")), (
                k(v + "beta1", default=0.9), k(v + "beta2", default=0.999 if version >= "1" else 0.95))),
            "critic's schedule": (_scale_of(c, "schedule"), k(v + "lr_scheduler_type", default="constant")),
            "critic's warmup": (_scale_of(c, "warmup_fraction"), k(v + "warmup_steps_proportion", default=0.001)),
            "critic's gradient": (_scale_of(c, "max_grad_norm"), k(v + "gradient_clipping", default=1.0)),
        }
    if k(o + "lr_scheduler_type", default="constant") != "constant":  # fsdp_engine.py hands min_lr_ratio to cosine alone
        megatron = "megatron" in str(k(a + "backend"))
        out["floor"] = (c.optimizer.floor, k(o + "min_lr_ratio", default=0.0) if megatron or k(o + "lr_scheduler_type") == "cosine" else 0.0)
    if k(a + "use_lora", default=False):
        out["adapters"] = ((c.lora.rank, c.lora.alpha), (k(a + "lora_rank", default=32), k(a + "lora_alpha", default=16)))
        out["adapted"] = (list(c.lora.targets), list(k.raw(a + "target_modules") or ["all-linear"]))
    else:
        out["adapters"] = (c.lora.rank, 0)
    return out


def _numbers(text) -> int:
    """How many GPUs a placement names: 0-3,6."""
    return sum(int(b or a) - int(a) + 1 for a, b in re.findall(r"(\d+)(?:-(\d+))?", str(text)))


def rlinf(k: Keys, c, version: str) -> dict:
    """0.3: rlinf/config.py (validate_reasoning_cfg, validate_megatron_cfg), runners/reasoning_runner.py, data/datasets/reasoning,
    workers/megatron_worker.py, actor/megatron_actor_worker.py and fsdp_actor_worker.py, critic/megatron_critic_worker.py,
    algorithms/advantages.py, losses.py and rewards, utils/placement.py and utils.py, hybrid_engines/fsdp/fsdp_model_manager.py, Megatron's
    get_optimizer_param_scheduler. 0.1: the same names, workers/actor/megatron_actor_worker.py for both."""
    a, s, o, sched, al = "algorithm.", "algorithm.sampling_params.", "actor.optim.", "actor.lr_sched.", c.algorithm
    fsdp = k("actor.training_backend", default="megatron") == "fsdp"
    mean = lambda low, high: (k(a + n) if k(a + n) is not None else k(a + "ratio_clip_eps", default=0.2) for n in (low, high))  # noqa: E731
    low, high = mean("clip_ratio_low", "clip_ratio_high")
    length, longest = k("runner.seq_length") - k("data.max_prompt_length"), k("algorithm.sampling_params.max_new_tokens")
    batches = k(a + "n_minibatches", default=1)
    # placement.py: where the actor has GPUs of its own, or the scheduler moves them, workers train while others sample (is_pipeline)
    together = any("actor" in name and "rollout" in name for name in k.keys if name.startswith("cluster.component_placement."))
    pipeline = k("cluster.auto_scheduler", default=False) or not together
    scaled = k(a + "use_valid_token_scale", default=False) and not fsdp  # fsdp_actor_worker.py does not read it
    size = None if k("runner.enable_dynamic_batch_size", default=False) else k(a + "training_batch_size_per_gpu", default=1)
    kind, agg = k(a + "adv_type", default="grpo"), k(a + "loss_agg_func", default="token-mean")
    # _setup_valid_token_scale: tokens of the whole step, not of the mini-batch, so that a gradient is 1 / n_minibatches of the token
    # mean's: a clip and an eps n_minibatches as large do the same. In a pipeline the tokens are the longest completion's x the sequences
    # of one rank's mini-batch: a constant per completion over the number of ranks.
    share = batches if scaled and not pipeline else 1
    if scaled and pipeline:
        ranks = _numbers(k.raw("cluster.component_placement.actor")) / (
            k("actor.model.tensor_model_parallel_size", default=1) * k("actor.model.pipeline_model_parallel_size", default=1))
        whole = ("constant", 0, length / ranks)
    elif agg != "token-mean":
        whole = ({"seq-mean-token-sum": "sequence_sum", "seq-mean-token-mean": "sequence_mean"}[agg], 0, 0.0)
    else:  # masked_mean of a micro-batch, and the mean of those
        whole = ("sequence_mean", 0, 0.0) if size == 1 and not scaled else ("token_mean", 0 if scaled or not size else size, 0.0)
    corrected = k(a + "importance_sampling_fix", default=False)
    recomputed = k(a + "recompute_logprobs", default=False) or corrected
    kl = k(a + "reinpp_kl_beta", default=0.0) if kind == "reinpp" else k(a + "kl_beta", default=0.0)
    scale = k("reward.reward_scale", default=1.0)
    if k("reward.reward_type") == "math":  # rewards/math: two values times the scale; in 0.1 1 and -1
        right, wrong = (k("reward.reward_max_val", default=1.0), k("reward.reward_min_val", default=-1.0)) if version >= "0.3" else (1, -1)
    else:  # rewards/code: what the judge says times the scale
        right, wrong = 1, 0
    steps = k("runner.max_steps", default=-1)
    precision = k("actor.model.precision")
    if fsdp:
        amp, mixed = "actor.fsdp_config.amp_autocast.", "actor.fsdp_config.mixed_precision.param_dtype"
        precision = k(amp + "precision") if k(amp + "enabled", default=False) else k(mixed, default=precision)
    out = {
        "recipe": (c.run.recipe, "rl"),
        # validate_reasoning_cfg: rollout_batch_size prompts x group_size over n_minibatches, one pass; reasoning_runner.py: drop_last=True
        "prompts": (c.data.prompts_per_step, k("data.rollout_batch_size")),
        "group": (c.rollout.group_size, k(a + "group_size")),
        "updates": (al.num_minibatches * al.ppo_epochs, batches),
        "epochs": (c.data.epochs, k("runner.max_epochs", default=1)),
        "steps": (c.train.steps, steps if steps >= 0 else None),
        "last step": (c.data.drop_last, True),
        "shuffled": (c.data.shuffle, k("data.shuffle", default=True)),
        "order's seed": (c.run.seed if c.data.seed is None else c.data.seed, k("data.seed", default=1234)),
        "prompt": (c.data.max_prompt_tokens, k("data.max_prompt_length")),
        "filter": (c.data.overlong_prompt, "filter"),  # without filter_prompt_by_length the end is cut off, which nothing here does
        "template": (c.data.chat != "false", bool(k("data.apply_chat_template", default=False)) and (
            version >= "0.3" or bool(k("data.filter_prompt_by_length", default=False)))),  # 0.1 renders while it filters
        # get_sampling_param(s)_from_config of sglang_worker.py and vllm_worker.py: these six alone
        "longest": (c.rollout.max_new_tokens, longest if isinstance(longest, float | int) else length),  # else ${subtract:...}, the same
        "shortest": (c.rollout.min_new_tokens, 0),  # min_new_tokens is read nowhere, nor are stop_token_ids
        "temperature": (c.rollout.temperature, k(s + "temperature", default=1.0) if k(s + "do_sample", default=True) else 0.0),
        "trainer's temperature": (al.temperature or c.rollout.temperature, k(s + "temperature", default=1.0)),
        "top_p": (c.rollout.top_p, k(s + "top_p", default=1.0)),
        "top_k": (c.rollout.top_k, -1 if k(s + "top_k", default=1e6) >= 1e6 else k(s + "top_k")),
        "repetition": (c.rollout.repetition_penalty, k(s + "repetition_penalty", default=1.0)),
        "ends": (list(c.rollout.stop_token_ids), []),
        "staleness": (c.rollout.max_staleness, 0),  # a step waits for its rollouts, in a pipeline, too
        "synced": (c.rollout.sync_every, 1),
        # losses.py, and the workers' clip_ratio_*
        "loss": (al.policy_loss, "clip"),
        "ratio": (al.ratio, "token"),
        "clip": ((al.clip_low, al.clip_high), (low, high)),
        "dual clip": (al.dual_clip, k(a + "clip_ratio_c", default=3.0 if fsdp or version == "0.1" else None) or 0.0),
        "mean": ((al.aggregation, al.aggregation_sequences, al.aggregation_constant), whole),
        "entropy": (al.entropy_coef or 0.0, k(a + "entropy_bonus", default=0.0) if k(a + "calculate_entropy", default=False) else 0.0),
        "old log-probs": (al.old_logprobs in ("auto", "recompute"), bool(recomputed)),
        # recomputed - rollout log-probs of a token, clamped above, times its advantage
        "correction": ((al.mismatch.correction, al.mismatch.cap or 0.0), ("token_tis", k(a + "importance_sampling_clip")) if corrected
                       else ("none", al.mismatch.cap or 0.0)),
        # workers: masked_normalization over the tokens of the step; advantages.py whitens reinpp itself
        "whitened": (al.whiten, kind == "reinpp" or bool(k(a + "normalize_advantages", default=True))),
        "kl": (al.kl.coef, kl),
        "right and wrong": ((c.reward.scale + c.reward.bias, c.reward.bias), (right * scale, wrong * scale)),
        "reward's rest": ((c.reward.norm_mean, c.reward.norm_std, c.reward.overlong_buffer, c.reward.zero_without_end, c.reward.clip),
                          ("none", "none", 0, False, None)),
        "dynamic": (al.dynamic_sampling or "off", "off"),
        # optim: torch's and Megatron's AdamW
        "lr": (c.optimizer.lr, k(o + "lr")),
        "betas": ((c.optimizer.b1, c.optimizer.b2), (k(o + "adam_beta1", default=0.9), k(o + "adam_beta2", default=0.999))),
        "eps": (c.optimizer.eps, k(o + "adam_eps", default=1e-8) * share),
        "weight decay": (c.optimizer.weight_decay, k(o + "weight_decay", default=0.01)),
        "gradient's clip": (c.optimizer.max_grad_norm, k(o + "clip_grad", default=1.0) * share),
        "schedule": (c.optimizer.schedule, k(o + "lr_scheduler", default="constant") if fsdp else k(sched + "lr_decay_style", default="constant")),
        "warmup": (c.optimizer.warmup_steps, _warmup_of_rlinf(k, o, sched, fsdp) * (  # once a step without sync, else once an update
            1 if not fsdp or k("actor.lr_sched_sync_with_optim", default=True) else batches)),
        "dtype": (c.train.compute_dtype, precision),
        "eval every": ((c.eval.every_steps, c.eval.every_epochs, c.eval.before, c.eval.after), (0, 0, False, False)),  # nothing evaluates
        "saved every": (c.checkpoint.every_steps, max(k("runner.save_interval", default=-1), 0)),
    }
    if batches > 1:  # megatron_actor_worker.py drops the micro-batch; FSDP's worker does not read it
        out["early stop"] = (al.early_stop_ratio, 0.0 if fsdp else k(a + "early_stop_imp_ratio") or 0.0)
    out["advantage"] = {  # advantages.py: group's deviation with ddof 1
        "grpo": ((al.advantage, al.advantage_mean, al.advantage_std), ("outcome", "group", "group")),
        "gae": ((al.advantage, al.gamma, al.lam), ("gae", k(a + "gamma", default=1), k(a + "gae_lambda", default=1))),
        "reinpp": ((al.advantage, al.advantage_mean, al.advantage_std, al.gamma), (
            "returns", "group" if k(a + "use_reinpp_baseline", default=False) else "none", "none", 1.0)),
    }[kind]
    if kl:
        out["estimator"] = ((al.kl.estimator, al.kl.placement), ({"kl": "k1", "mse": "k2", "low_var_kl": "low_var", "k3": "low_var"}.get(
            k(a + "kl_penalty_type"), k(a + "kl_penalty_type")), "reward" if kind == "reinpp" else "loss"))
    if not fsdp and k("actor.model.moe_aux_loss_coeff") is not None:
        out["balance"] = (c.train.router_balance, k("actor.model.moe_aux_loss_coeff"))
    if k("critic.use_critic_model", default=False):
        v, w = "critic.optim.", "critic.lr_sched."
        out |= {
            "critic's lr": (c.critic.lr, k(v + "lr")),
            "critic's clip": (c.critic.value_clip, k(a + "value_cliprange")),  # huber_delta 10000: squares
            "critic's updates": (c.critic.num_minibatches or al.num_minibatches, batches),
            "critic alone": (c.critic.warmup_steps, k(a + "critic_warmup_steps", default=0)),
            "critic's betas": ((_scale_of(c, "b1"), _scale_of(c, "b2")), (k(v + "adam_beta1", default=0.9), k(v + "adam_beta2", default=0.999))),
            "critic's eps": (_scale_of(c, "eps"), k(v + "adam_eps", default=1e-8)),
            "critic's decay": (_scale_of(c, "weight_decay"), k(v + "weight_decay", default=0.01)),
            "critic's gradient": (_scale_of(c, "max_grad_norm"), k(v + "clip_grad", default=1.0)),
            "critic's schedule": (_scale_of(c, "schedule"), k(w + "lr_decay_style", default="constant")),
            "critic's warmup": (_scale_of(c, "warmup_steps"), _warmup_of_rlinf(k, v, w, False)),
        }
        if k(w + "lr_decay_style", default="constant") != "constant":
            out["critic's end"] = ((_scale_of(c, "decay_steps"), _scale_of(c, "floor")), (
                k(w + "lr_decay_iters", default=100_000) - _warmup_of_rlinf(k, v, w, False), k(w + "min_lr", default=0.0) / k(v + "lr")))
    return out


def _warmup_of_rlinf(k: Keys, o: str, sched: str, fsdp: bool) -> int:
    """Megatron: a share of lr_decay_iters (100000 unless said) wins over lr_warmup_iters; FSDP: optim.lr_warmup_steps, or a share of
    total_training_steps, which is 0 unless said."""
    if fsdp:
        steps = k(o + "lr_warmup_steps", default=-1)
        return int(steps if steps >= 0 else k(o + "lr_warmup_steps_ratio", default=0.0) * k(o + "total_training_steps", default=0))
    share = k(sched + "lr_warmup_fraction")
    return int(share * (k(sched + "lr_decay_iters") or 100_000)) if share is not None else k(sched + "lr_warmup_iters", default=0)


def _devices(text) -> int:
    """How many devices ROLL's expression names: a sum of list(range(a,b)) and [a, b]."""
    ranges = re.findall(r"range\((\d+)\s*,\s*(\d+)\)", str(text))
    return sum(int(b) - int(a) for a, b in ranges) + sum(len(x.split(",")) for x in re.findall(r"\[([\d, ]+)\]", str(text)))


def roll(k: Keys, c, version: str) -> dict:
    """roll/configs/base_config.py, generating_args.py, training_args.py, pipeline/rlvr/rlvr_config.py, actor_worker.py."""
    t, s, g = "actor_train.training_args.", "actor_infer.generating_args.", "actor_train.strategy_args.strategy_config."
    mega = "megatron" in str(k("actor_train.strategy_args.strategy_name"))
    ulysses = k("actor_train.model_args.ulysses_size") or 1 if "fsdp" in str(k("actor_train.strategy_args.strategy_name")) else 1
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    split = [k(g + n) or 1 for n in names] if mega else [ulysses, 1, 1]
    ranks = _devices(k("actor_train.device_mapping")) / (split[0] * split[1] * split[2])
    group = k("num_return_sequences_in_group", default=1)
    sequences = k("rollout_batch_size", default=128) * group
    size = k(t + "per_device_train_batch_size", default=8) * k(t + "gradient_accumulation_steps", default=1) * ranks
    wide, clip = k("use_pg_clip_range", default=False), k("pg_clip", default=0.2)
    whole = k("sequence_length") or k("response_length") + k("prompt_length")
    out = {
        "prompts": (c.data.prompts_per_step, k("rollout_batch_size", default=128)),
        "group": (c.rollout.group_size, group),
        "updates": (c.algorithm.num_minibatches * c.algorithm.ppo_epochs, sequences / size * k("ppo_epochs", default=1)),
        "lr": (c.optimizer.lr, k(t + "learning_rate", default=5e-5)),
        "warmup": (c.optimizer.warmup_steps, k(t + "warmup_steps", default=0)),
        "weight decay": (c.optimizer.weight_decay, k(t + "weight_decay", default=0.0)),
        "schedule": (c.optimizer.schedule, k(t + "lr_scheduler_type", default="linear")),
        "longest": (c.rollout.max_new_tokens, whole - k("prompt_length")),
        "prompt": (c.data.max_prompt_tokens, k("prompt_length")),
        "temperature": (c.rollout.temperature, k(s + "temperature", default=0.95)),
        "top_p": (c.rollout.top_p, k(s + "top_p", default=0.7)),
        "top_k": (c.rollout.top_k, k(s + "top_k", default=50)),
        "kl": (c.algorithm.kl.coef, k("init_kl_coef", default=0.2) if k("add_token_level_kl") else
               k("kl_loss_coef", default=0.0) if k("use_kl_loss") else 0.0),
        "aggregation": (c.algorithm.aggregation, {"token-mean": "token_mean", "seq-mean-token-sum": "sequence_sum",
                        "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum-norm": "constant"}[
                            k("loss_agg_mode", default="seq-mean-token-mean" if version > "0.1.0" else "seq-mean-token-sum")]),
        "whitened": (c.algorithm.whiten, bool(k("whiten_advantages", default=False))),
        "eval every": (c.eval.every_steps, k("eval_steps", default=10) if k("validation.data_args.file_name") else 0),
        "least staleness": (c.rollout.max_staleness >= k("async_generation_ratio", default=0), True),
    }
    if out["aggregation"][1] == "token_mean" and version < "0.2" and not k("actor_train.use_dynamic_batching_in_train"):
        out["aggregation"] = (_mean_of(c), k(t + "per_device_train_batch_size", default=8))
    if c.algorithm.policy_loss == "clip":
        out["clip"] = ((c.algorithm.clip_low, c.algorithm.clip_high),
                       (k("pg_clip_low", default=0.2), k("pg_clip_high", default=0.2)) if wide else (clip, clip))
        out["dual clip"] = (c.algorithm.dual_clip, 1 + 2 * clip if k("dual_clip_loss") else 0.0)
    return out


def cosmos_rl(k: Keys, c, version: str) -> dict:
    """cosmos_rl/policy/config/__init__.py, policy/trainer/llm_trainer (grpo, sft), dispatcher/data, rollout/vllm_rollout."""
    p, s, par = "train.train_policy.", "rollout.sampling_config.", "policy.parallelism."
    replicas, size = k(par + "n_init_replicas", default=1), k("train.train_batch_per_replica", default=8)
    shard = max(k(par + "dp_shard_size", default=1), 1) * k(par + "dp_replicate_size", default=1)
    warm = k.raw("train.optm_warmup_steps", default=20)
    share = isinstance(warm, float) and warm <= 1
    warm = warm if share or k(p + "type") == "sft" else warm * c.algorithm.num_minibatches * c.algorithm.ppo_epochs  # one move a step
    out = {
        "lr": (c.optimizer.lr, k("train.optm_lr", default=1e-6)),
        "warmup": ((c.optimizer.warmup_steps, c.optimizer.warmup_fraction), (0, warm) if share else (warm, 0.0)),
        "weight decay": (c.optimizer.weight_decay, k("train.optm_weight_decay", default=0.01)),
        "epochs": (c.data.epochs, k("train.epoch", default=1)),
        "whole": (c.train.max_sequence_tokens, k("policy.model_max_length", default=4096)),
    }
    if k(p + "type") == "sft":
        return {**out, "recipe": (c.run.recipe, "sft"), "rows": (c.data.prompts_per_step, size * shard * replicas)}
    group, distilled = k("rollout.n_generation", default=16), k("distillation.enable", default=False)
    stale = 0 if k(p + "on_policy", default=False) or k("mode", default="disaggregated") == "colocated" else k(
        p + "allowed_outdated_steps", default=4) // k("train.sync_weight_interval", default=1)
    asked = k("validation.enable", default=False)
    out |= {
        "recipe": (c.run.recipe, "distill" if distilled else "rl"),
        "sequences": (c.data.prompts_per_step * group, max(size * replicas, group)),
        "group": (c.rollout.group_size, group),
        "longest": (c.rollout.max_new_tokens, min(k("rollout.max_response_length", default=2048), k("policy.model_max_length", default=4096) - 1)),
        "temperature": (c.rollout.temperature, k(s + "temperature", default=1.0)),
        "epochs of a batch": (c.algorithm.ppo_epochs, k(p + "mu_iterations", default=1)),
        "staleness": (c.rollout.max_staleness, stale),
        "eval every": (c.eval.every_steps, k("validation.freq", default=20) if asked and c.eval.sets else 0),
    }
    if asked and c.eval.sets:
        out["eval temperature"] = (c.eval.temperature, k("validation.temperature", default=0.0))
    if not distilled:
        out["kl"] = (c.algorithm.kl.coef, k(p + "kl_beta", default=0.0))
        out["deviation"] = (c.algorithm.advantage_std, "none" if k(p + "unbiased_advantage", default=False) else "group_population")
        if k(p + "aipo_rho") is None:
            out["clip"] = ((c.algorithm.clip_low, c.algorithm.clip_high),
                           (k(p + "epsilon_low", default=0.2), k(p + "epsilon_high", default=0.2)))
            out["dual clip"] = (c.algorithm.dual_clip, 0.0 if k(p + "variant", default="grpo") == "gspo" else k(p + "lower_bound_ratio", default=3.0))
    return out


RULES = {"skyrl": skyrl, "verl": verl, "trl": trl, "areal": areal, "rlinf": rlinf, "roll": roll, "cosmos_rl": cosmos_rl}
