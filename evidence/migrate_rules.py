"""What configs of other systems mean, written down from those systems' code: the rules of migrate_corpus.py.

A rule takes the keys of a config as an independent reader found them (Keys), the config that was written and the version.
It returns name -> (what is written, what the source's code makes of its keys). It does not look at jaxrl.migrate.
"""

from __future__ import annotations

import contextlib
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
    """verl/trainer/ppo/ray_trainer.py, core_algos.py, the generated configs of the tags."""
    a, r = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    out = {
        "prompts": (c.data.prompts_per_step, k("data.train_batch_size", default=1024)),
        "group": (c.rollout.group_size, k(r + "n", default=1)),
        "updates": (c.algorithm.num_minibatches * c.algorithm.ppo_epochs, k("data.train_batch_size", default=1024)
                    / k(a + "ppo_mini_batch_size", default=256) * k(a + "ppo_epochs", default=1)),
        "longest": (c.rollout.max_new_tokens, k("data.max_response_length", default=512)),
        "prompt": (c.data.max_prompt_tokens, k("data.max_prompt_length", default=512)),
        "temperature": (c.rollout.temperature, k(r + "temperature", default=1.0)),
        "lr": (c.optimizer.lr, k(a + "optim.lr", default=1e-6)),
        "warmup": ((c.optimizer.warmup_steps, c.optimizer.warmup_fraction), _warmup_of_verl(k, a + "optim.", c)),
        "epochs": (c.data.epochs, k("trainer.total_epochs", default=30)),
        "eval every": (c.eval.every_steps, max(k("trainer.test_freq", default=-1), 0)),
        "kl": (c.algorithm.kl.coef, k(a + "kl_loss_coef", default=0.001) if k(a + "use_kl_loss", default=False) else
               k("algorithm.kl_ctrl.kl_coef", default=0.001) if k("algorithm.use_kl_in_reward", default=False) else 0.0),
    }
    mode = k(a + "policy_loss.loss_mode", default="vanilla")
    if mode == "vanilla" and k(a + "loss_agg_mode", default="token-mean") == "token-mean":
        legacy = k("trainer.use_legacy_worker_impl", default="auto") != "disable" and not k(a + "use_dynamic_bsz", default=False)
        legacy = legacy and version < "0.8"
        out["token mean"] = (_mean_of(c), k(a + "ppo_micro_batch_size_per_gpu") if legacy else None)
    if mode in ("vanilla", "gspo", "geo_mean"):
        out["clip"] = ((c.algorithm.clip_low, c.algorithm.clip_high),
                       (k(a + "clip_ratio_low", default=0.2), k(a + "clip_ratio_high", default=0.2)))
        out["dual clip"] = (c.algorithm.dual_clip, k(a + "clip_ratio_c", default=3.0) if mode == "vanilla" else 0.0)
    if version >= "0.8":
        out |= _later_verl(k, c, version, mode)
    return out


def _later_verl(k: Keys, c, version: str, mode: str) -> dict:
    """workers/engine/*/transformer_impl.py, engine_workers.py, trainer/distillation/losses.py, rollout_corr_helper.py,
    config/model_engine, engine and model of 0.8 and 0.9."""
    a, r, m = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
    engine = k(a + "strategy") or {"dp": "fsdp"}.get(k("model_engine", default="dp"), k("model_engine", default="dp"))
    mega = engine in ("megatron", "mindspeed")
    tp, cp = {"megatron": ("tensor_model_parallel_size", "context_parallel_size"), "veomni": ("", "ulysses_parallel_size"),
              "mindspeed": ("tensor_model_parallel_size", "context_parallel_size")}.get(engine, ("", ""))
    ulysses = k(a + "ulysses_sequence_parallel_size", a + "fsdp_config.ulysses_sequence_parallel_size", default=1)
    correction = "algorithm.rollout_correction."
    out = {
        "tp": (c.mesh.tp, k(f"{a}{engine}.{tp}", default=1)),
        "cp": (c.mesh.cp, k(f"{a}{engine}.{cp}", default=1) if cp else ulysses),
        "most sequences": (c.rollout.vllm.max_running, k(r + "max_num_seqs", default=256 if version >= "0.9" else 1024)),
        "gradient's clip": (c.optimizer.max_grad_norm, k(a + "optim.clip_grad", default=1.0)),  # grad_clip is read nowhere
        "adapters": (c.lora.rank, k(m + ("lora.rank" if mega else "lora_rank"), default=0)),
        "schedule": (c.optimizer.schedule, k(a + "optim.lr_decay_style", default="constant") if mega else
                     k(a + "optim.lr_scheduler_type", default="cosine" if engine == "veomni" else "constant")),
        "reward model": (c.reward.model.path, (k("reward.reward_model.model_path", "reward_model.model.path") or "")
                         if k("reward.reward_model.enable", "reward_model.enable", default=False) else ""),
        "corrected": (c.algorithm.mismatch.correction, "none" if k(correction + "bypass_mode", default=False) or
                      not k(correction + "rollout_is") else k(correction + "rollout_is") + (
                          "_mis" if "_" in str(k.raw(correction + "rollout_is_threshold")) else "_tis")),
        "taught": (c.run.recipe == "distill", k("distillation.enabled", default=False)),
    }
    if mode == "dppo_tv":
        out["trust region"] = ((c.algorithm.dppo_low, c.algorithm.dppo_high), (k(a + "clip_ratio_low"), k(a + "clip_ratio_high")))
    if k("algorithm.adv_estimator", default="gae") == "gae":
        out["critic's lr"] = (c.critic.lr, k("critic.optim.lr", default=1e-5))
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


def _warmup_of_verl(k: Keys, o: str, c) -> tuple[float, float]:
    """fsdp_workers.py, megatron_workers.py: lr_scheduler.step() once per update_actor, whatever its mini-batches."""
    steps, share = k(o + "lr_warmup_steps", default=-1), k(o + "lr_warmup_steps_ratio", default=0.0)
    counts = steps is not None and (steps > 0 or steps == 0 and k("actor_rollout_ref.actor.strategy", default="fsdp") != "megatron")
    return (steps * c.algorithm.num_minibatches * c.algorithm.ppo_epochs, 0.0) if counts else (0, share)


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


def areal(k: Keys, c, version: str) -> dict:
    """areal/trainer/ppo/actor.py, areal/utils/functional, api/cli_args.py."""
    a, o = "actor.", "actor.optimizer."
    scale, bias = k(a + "reward_scaling", default=1.0), k(a + "reward_bias", default=0.0)
    out = {
        "prompts": (c.data.prompts_per_step, k("train_dataset.batch_size", default=1)),
        "group": (c.rollout.group_size, k("gconfig.n_samples", default=1)),
        "updates": (c.algorithm.num_minibatches, k(a + "ppo_n_minibatches", default=4)),
        "lr": (c.optimizer.lr, k(o + "lr", default=1e-3)),
        "longest": (c.rollout.max_new_tokens, k("gconfig.max_new_tokens", default=16384)),
        "temperature": (c.rollout.temperature, k("gconfig.temperature", default=1.0)),
        "staleness": (c.rollout.max_staleness, k("rollout.max_head_offpolicyness", default=0)),
        "kl": (c.algorithm.kl.coef, k(a + "kl_ctl", default=0.1)),
        "reward of 1": (min(max(c.reward.scale + c.reward.bias, -c.reward.clip), c.reward.clip),
                        min(max((1 + bias) * scale, -k(a + "reward_clip", default=20.0)), k(a + "reward_clip", default=20.0))),
        "epochs": (c.data.epochs, k("total_train_epochs", default=1)),
    }
    if c.algorithm.policy_loss == "clip":
        low = k(a + "eps_clip", default=0.2) or 1e-9  # 0 (M2PO's example) is a clip to 1, which 1 + 1e-9 is in fp32
        out["clip"] = ((c.algorithm.clip_low, c.algorithm.clip_high), (low, k(a + "eps_clip_higher") or low))
    return out


def rlinf(k: Keys, c, version: str) -> dict:
    """rlinf/config.py (validate_cfg), workers/actor/*_actor_worker.py, algorithms/rewards/math, megatron's OptimizerParamScheduler."""
    a, s, f = "algorithm.", "algorithm.sampling_params.", k("actor.training_backend", default="megatron") == "fsdp"
    low, high = (k(a + n) if k(a + n) is not None else k(a + "ratio_clip_eps", default=0.2) for n in ("clip_ratio_low", "clip_ratio_high"))
    warm = k("actor.lr_sched.lr_warmup_iters", default=0) or int(
        (k("actor.lr_sched.lr_warmup_fraction") or 0) * (k("actor.lr_sched.lr_decay_iters") or 0))
    scale, best, worst = k("reward.reward_scale", default=1.0), k("reward.reward_max_val", default=1.0), k("reward.reward_min_val", default=-1.0)
    kind = k(a + "adv_type", default="grpo")
    scaled = k(a + "use_valid_token_scale", default=False) and not f  # read in megatron's workers alone
    whole = scaled or k("runner.enable_dynamic_batch_size", default=False)
    dual = k(a + "clip_ratio_c", default=3.0 if f or version in ("docs", "0.1") else 0.0)
    mean = k(a + "loss_agg_func", default="token-mean") == "token-mean"
    return {
        "token mean": (_mean_of(c) if mean else 0, (None if whole else k(a + "training_batch_size_per_gpu", default=1)) if mean else 0),
        "prompts": (c.data.prompts_per_step, k("data.rollout_batch_size")),
        "group": (c.rollout.group_size, k(a + "group_size")),
        "updates": (c.algorithm.num_minibatches * c.algorithm.ppo_epochs, k(a + "n_minibatches", default=1)),
        "lr": (c.optimizer.lr, k("actor.optim.lr")),
        "warmup": (c.optimizer.warmup_steps, max(k("actor.optim.lr_warmup_steps", default=-1), 0) if f else warm),
        "prompt": (c.data.max_prompt_tokens, k("data.max_prompt_length")),
        "longest": (c.rollout.max_new_tokens, k("runner.seq_length") - k("data.max_prompt_length")),
        "temperature": (c.rollout.temperature, k(s + "temperature", default=1.0)),
        "top_p": (c.rollout.top_p, k(s + "top_p", default=1.0)),
        "clip": ((c.algorithm.clip_low, c.algorithm.clip_high), (low, high)),
        "dual clip": (c.algorithm.dual_clip, dual or 0.0),
        "kl": (c.algorithm.kl.coef, k(a + "reinpp_kl_beta", default=0.0) if kind == "reinpp" else k(a + "kl_beta", default=0.0)),
        "right and wrong": ((c.reward.scale + c.reward.bias, c.reward.bias), (best * scale, worst * scale)),
        "corrected": (c.algorithm.mismatch.correction != "none", k(a + "importance_sampling_fix", default=False)),
        "whitened": (c.algorithm.whiten, kind == "reinpp" or k(a + "normalize_advantages", default=True)),
        "staleness": (c.rollout.max_staleness, 0),
        "eval every": (c.eval.every_steps, 0),
        "epochs": (c.data.epochs, k("runner.max_epochs", default=1)),
    }


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
