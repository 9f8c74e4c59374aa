"""What configs of other systems mean, written down from those systems' code: the rules of migrate_corpus.py.

A rule takes the keys of a config as an independent reader found them (Keys), the config that was written and the version.
It returns name -> (what is written, what the source's code makes of its keys). It does not look at jaxrl.migrate.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from types import SimpleNamespace

from jaxrl.algorithms.presets import PRESETS


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


_DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32", "float16": "fp16", "fp16": "fp16"}


def _of_critic(c):
    """The critic's options of optimizer.*: its own, and the policy's where it has none."""
    own = dict(c.critic.optimizer)
    names = ("name", "warmup_steps", "warmup_fraction", "schedule", "floor", "b1", "b2", "eps", "weight_decay", "max_grad_norm")
    return SimpleNamespace(lr=c.critic.lr, **{n: own.get(n, getattr(c.optimizer, n)) for n in names})


def _settled(c):
    """A copy whose algorithm's options are the preset's where they are None."""
    c = copy.deepcopy(c)
    for name, value in PRESETS[c.algorithm.preset].items():
        group, _, last = name.rpartition(".")
        group = c.algorithm[group] if group else c.algorithm
        if group[last] is None:
            group[last] = value
    return c


def _warmup(optimizer) -> tuple:
    """(updates, share) of the warm-up; a share wins."""
    return 0 if optimizer.warmup_fraction else optimizer.warmup_steps, optimizer.warmup_fraction


def _lengths(longest) -> tuple:
    """Lengths at which penalties are compared."""
    return tuple(round(longest * share) for share in (0.25, 0.5, 0.75, 1))


def _overlong(c) -> tuple:
    """The length penalty that was written, at these lengths."""
    longest, buffer = c.rollout.max_new_tokens, c.reward.overlong_buffer
    return tuple(max(n - longest + buffer, 0) / buffer * c.reward.overlong_penalty if buffer else 0.0 for n in _lengths(longest))


def skyrl(k: Keys, c, version: str) -> dict:
    """SkyRL at a956457 and skyrl_train-v0.1.0. Every option by the file that decides it; train/ is skyrl/train (skyrl-train/skyrl_train
    before), workers/ is skyrl/backends/skyrl_train/workers."""
    c = _settled(c)
    a, s, p, e = "trainer.algorithm.", "generator.sampling_params.", "trainer.policy.", "generator.eval_sampling_params."
    first = version.startswith("train") or version in ("docs", "0.1")
    batch, group = k("trainer.train_batch_size", default=1024), k("generator.n_samples_per_prompt", default=5)
    longest, kind, loss = k(s + "max_generate_length", default=1024), k(a + "advantage_estimator", default="grpo"), k(
        a + "policy_loss_type", default="regular")
    # train/utils/utils.py, validate_batch_sizes; backends/.../fsdp_strategy.py, optimizer_step: the scheduler moves once per mini-batch
    out = {
        "prompts": (c.data.prompts_per_step, batch),
        "group": (c.rollout.group_size, group),
        "mini-batches": (c.algorithm.num_minibatches, batch // k("trainer.policy_mini_batch_size", default=256)),
        "passes": (c.algorithm.ppo_epochs, k("trainer.update_epochs_per_batch", default=1)),
        "epochs": (c.data.epochs, k("trainer.epochs", default=1)),
        "steps": (c.train.steps, k("trainer.max_training_steps")),
        "seed": (c.run.seed, k("trainer.seed", default=42)),
        "prompt": (c.data.max_prompt_tokens, k("trainer.max_prompt_length", default=512)),
        "longer prompts": (c.data.overlong_prompt, "filter"),  # train/dataset/dataset.py
    }
    out |= _optimizer_of_skyrl(k, p + "optimizer_config.", c.optimizer, 1e-6, "")
    # train/config/config.py (SamplingParams; a repetition penalty is not forwarded), ppo_base_config.yaml before
    out |= {
        "longest": (c.rollout.max_new_tokens, longest),
        "temperature": (c.rollout.temperature, k(s + "temperature", default=1.0)),
        "top_p": (c.rollout.top_p, k(s + "top_p", default=1.0)),
        "top_k": (c.rollout.top_k, k(s + "top_k", default=-1)),
        "min_p": (c.rollout.min_p, k(s + "min_p", default=0.0)),
        "trainer's temperature": (c.algorithm.temperature or c.rollout.temperature,
                                  k(a + "temperature") or k(s + "temperature", default=1.0)),
        "reward of the cut": (c.reward.zero_without_end, k("generator.zero_reward_on_non_stop", default=False)),
        "cut answers masked": (c.algorithm.mask_truncated, k("generator.apply_overlong_filtering", default=False)),
    }
    # train/utils/ppo_utils.py (backends/skyrl_train/utils now): one estimator each, whitened over the whole batch for two of them
    advantage = {"grpo": ("outcome", "group", "group" if k(a + "grpo_norm_by_std", default=True) else "none"),
                 "rloo": ("outcome", "leave_one_out", "none"), "maxrl": ("outcome", "group", "group_mean"),
                 "reinforce++": ("returns", "none", "none"), "gae": ("gae", "none", "none")}[kind]
    out["advantage"] = ((c.algorithm.advantage, c.algorithm.advantage_mean, c.algorithm.advantage_std), advantage)
    out["whitened"] = (c.algorithm.whiten, kind in ("gae", "reinforce++") or k(a + "advantage_batch_normalize", default=False))
    if kind in ("gae", "reinforce++"):
        out["gamma"] = (c.algorithm.gamma, k(a + "gamma", default=1.0))
    if kind == "gae":  # trainer.py: the critic has its own mini-batches; ppo_critic_loss clips by value_clip
        out |= {"lambda": (c.algorithm.lam, k(a + "lambd", default=1.0)),
                "value clip": (c.critic.value_clip, k(a + "value_clip", default=0.2)),
                "critic's mini-batches": (c.critic.num_minibatches or c.algorithm.num_minibatches,
                                          batch // k("trainer.critic_mini_batch_size", default=256))}
        out |= _optimizer_of_skyrl(k, "trainer.critic.optimizer_config.", _of_critic(c), 5e-6, "critic's ")
    # train/utils/ppo_utils.py, the losses
    clip = (k(a + "eps_clip_low", default=0.2), k(a + "eps_clip_high", default=0.2))
    out["loss"] = (c.algorithm.policy_loss, {"cispo": "cispo", "sapo": "sapo", "dppo": "dppo"}.get(loss, "clip"))
    out["ratio"] = (c.algorithm.ratio, "sequence_token" if loss == "gspo" else "token")
    if out["loss"][1] == "clip":
        out["clip"] = ((c.algorithm.clip_low, c.algorithm.clip_high), clip)
        out["dual clip"] = (c.algorithm.dual_clip, k(a + "clip_ratio_c", default=3.0) if loss == "dual_clip" else 0.0)
    if loss == "cispo":
        out["weights"] = ((c.algorithm.cispo_min_ratio, c.algorithm.cispo_max_ratio),
                          (1 - k(a + "cispo.cispo_eps_clip_low", default=1.0), 1 + k(a + "cispo.cispo_eps_clip_high", default=4.0)))
    if loss == "sapo":
        out["gate"] = ((c.algorithm.sapo_tau_pos, c.algorithm.sapo_tau_neg),
                       (k(a + "sapo.tau_pos", default=1.0), k(a + "sapo.tau_neg", default=1.05)))
    out["covariance's share"] = (c.algorithm.cov_share, k(a + "clip_cov.clip_ratio", default=2e-4) if loss == "clip_cov" else 0.0)
    if loss == "clip_cov":
        out["covariance"] = ((c.algorithm.cov_low, c.algorithm.cov_high),
                             (k(a + "clip_cov.clip_cov_lb", default=1.0), k(a + "clip_cov.clip_cov_ub", default=5.0)))
    # reduce_loss; apply_loss_reduction_to_advantages_minibatch now. A token mean was one of a micro-batch first
    how = k(a + "loss_reduction", default="token_mean")
    micro = k("trainer.micro_train_batch_size_per_gpu", default=1)
    if how == "token_mean_legacy" or how == "token_mean" and first:
        out["aggregation"] = (_mean_of(c), micro)
    else:
        out["aggregation"] = ((c.algorithm.aggregation, _mean_of(c)), {
            "token_mean": ("token_mean", None), "sequence_mean": ("sequence_mean", 1), "prompt_mean": ("prompt_mean", None),
            "seq_mean_token_sum_norm": ("constant", None)}[how])
    if how == "seq_mean_token_sum_norm":  # validate_cfg: first the longest input and answer, now its own key
        whole = k("generator.max_input_length", default=k("trainer.max_prompt_length", default=512)) + longest
        out["constant"] = (c.algorithm.aggregation_constant or longest, whole if first else k(a + "max_seq_len"))
    # trainer.py, apply_reward_kl_penalty; workers/worker.py, the terms of the loss
    rewarded, lost = k(a + "use_kl_in_reward", default=False), k(a + "use_kl_loss", default=True)
    out["kl"] = (c.algorithm.kl.coef, k(a + "kl_loss_coef", default=0.001) if rewarded or lost else 0.0)
    if out["kl"][1]:
        estimator = k(a + "kl_estimator_type", default="k3")
        if first and k(a + "use_abs_kl", default=False):
            estimator = "abs"
        out["kl's kind"] = ((c.algorithm.kl.estimator, c.algorithm.kl.placement),  # k3 is bounded there: difference 20, value 10
                            ("low_var" if estimator == "k3" else estimator, "reward" if rewarded else "loss"))
    out["entropy"] = (c.algorithm.entropy_coef, k(a + "entropy_loss_coef", default=0.01) if k(a + "use_entropy_loss", default=False) else 0.0)
    # off_policy_correction_utils.py; validate_cfg for use_tis
    o = a + "off_policy_correction."
    how = "token" if k(a + "use_tis", default=False) else k(o + "tis_ratio_type")
    cap = k(a + "tis_imp_ratio_cap", default=-1.0) if k(a + "use_tis", default=False) else k(
        f"{o}{how}_tis_ratio_clip_high", default={"token": 2.0, "sequence": 5.0}.get(how))
    out["corrected"] = ((c.algorithm.mismatch.correction, c.algorithm.mismatch.cap if how else None), (f"{how}_tis", cap) if how else ("none", None))
    out["old log-probs"] = (c.algorithm.old_logprobs in ("auto", "recompute"), True)  # trainer.py: the trainer's own, before the updates
    # trainer_utils.py, handle_dynamic_sampling: filter takes batches until there are enough groups
    kept = k(a + "dynamic_sampling.type")
    out["dynamic sampling"] = (c.algorithm.dynamic_sampling, "refill" if kept == "filter" else "off")
    if kept == "filter":
        out["rounds"] = (c.algorithm.dynamic_sampling_rounds, k(a + "dynamic_sampling.max_sample_batches", default=30))
    entry = str(k("python -m"))
    if "dapo" in entry:  # examples/train/algorithms/dapo/main_dapo.py; tis_correction's is the same behind the longest prompt alone
        length, factor = k(a + "overlong_buffer_len", default=512), k(a + "overlong_buffer_penalty_factor", default=1.0)
        begins = longest - length
        out["overlong"] = (_overlong(c), tuple(max(n - begins, 0) / length * factor for n in _lengths(longest)))
    # examples/train/async/async_trainer.py: a queue of one batch; trainer.py waits for the weights
    out["staleness"] = (c.rollout.max_staleness, 1 if "main_async" in entry else 0)
    # trainer.py, train: evaluation by steps, before the first and after the last; checkpoints by steps and, now, at the end of an epoch
    every, saved, exported = (k(f"trainer.{n}_interval", default=d) for n, d in (("eval", 5), ("ckpt", 10), ("hf_save", -1)))
    out |= {
        "eval every": (c.eval.every_steps, max(every, 0)),
        "eval before": (c.eval.before, every > 0 and k("trainer.eval_before_train", default=True)),
        "eval after": (c.eval.after, every > 0),
        "saved every": (c.checkpoint.every_steps, max(saved, 0)),
        "saved at an epoch's end": (c.checkpoint.every_epochs, float(saved > 0 and not first and "main_async" not in entry)),
        "exported every": (c.checkpoint.export_every_steps, max(exported, 0)),
        "kept": (c.checkpoint.keep, k("trainer.max_ckpts_to_keep", default=-1)),
    }
    # GeneratorConfig.__post_init__: greedy and as long as in training; one key of its own makes all others SamplingParams' defaults.
    # The first version's YAML has a default for each key
    own = not first and any(name.startswith(e) for name in k.keys)
    out |= {
        "eval temperature": (c.eval.temperature, k(e + "temperature", default=1.0 if own else 0.0)),
        "eval top_p": (c.eval.top_p, k(e + "top_p", default=1.0)),
        "eval top_k": (c.eval.top_k, k(e + "top_k", default=-1)),
        "eval min_p": (c.eval.min_p, k(e + "min_p", default=0.0)),
        "eval longest": (c.eval.max_new_tokens or c.rollout.max_new_tokens, k(e + "max_generate_length", default=1024 if own else longest)),
        "eval answers": (c.eval.samples, k("generator.eval_n_samples_per_prompt", default=1)),
    }
    # config.py, SkyRLLoraConfig; fsdp_strategy.py: bf16 for products, fp32 for masters and sums
    rank = k(p + "model.lora.rank", default=0)
    out["adapters"] = ((c.lora.rank, c.lora.alpha if rank else None), (rank, k(p + "model.lora.alpha", default=16) if rank else None))
    out["dtypes"] = ((c.train.compute_dtype, c.train.param_dtype), ("bf16", "fp32"))
    mega = k("trainer.strategy", default="fsdp") == "megatron"
    out["tp"] = (c.mesh.tp, k(p + "megatron_config.tensor_model_parallel_size", default=1) if mega else 1)
    return out


def _optimizer_of_skyrl(k: Keys, o: str, optimizer, lr: float, of: str) -> dict:
    """OptimizerConfig of train/config/config.py; torch's AdamW (eps 1e-8) and transformers' scheduler, fsdp_strategy.py."""
    betas = k.raw(o + "adam_betas")
    return {
        of + "optimizer": (optimizer.name, "adamw"),
        of + "lr": (optimizer.lr, k(o + "lr", default=lr)),
        of + "warmup": (_warmup(optimizer), (k(o + "num_warmup_steps", default=0), 0.0)),
        of + "schedule": (optimizer.schedule, {"constant_with_warmup": "constant"}.get(
            k(o + "scheduler", default="constant_with_warmup"), k(o + "scheduler"))),
        of + "betas": ((optimizer.b1, optimizer.b2), tuple(map(float, re.findall(r"[\d.]+", str(betas)))) if betas else (0.9, 0.999)),
        of + "eps": (optimizer.eps, 1e-8),
        of + "weight decay": (optimizer.weight_decay, k(o + "weight_decay", default=0.01)),
        of + "gradient's clip": (optimizer.max_grad_norm, k(o + "max_grad_norm", default=1.0)),
    }


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
    """TRL v0.18.0 (what open-r1 1416fa0 pins) to v1.9, eight processes: trl/trainer/grpo_config.py and grpo_trainer.py; the rest is
    transformers' TrainingArguments and Trainer."""
    c = _settled(c)
    micro, accumulated = k("per_device_train_batch_size", default=8), k("gradient_accumulation_steps", default=1)
    old = version.startswith("0.") and float(version[2:]) < 20
    # __post_init__: completions of a generation; RepeatSampler: each is used num_iterations times
    whole = k("generation_batch_size") or micro * 8 * (k("steps_per_generation") or accumulated)
    longest, beta = k("max_completion_length", default=256), k("beta", default=0.04 if old else 0.0)
    out = {
        "sequences": (c.data.prompts_per_step * c.rollout.group_size, whole),
        "group": (c.rollout.group_size, k("num_generations", default=8)),
        "mini-batches": (c.algorithm.num_minibatches, whole / (micro * 8 * accumulated)),
        "passes": (c.algorithm.ppo_epochs, k("num_iterations", default=1)),
        "epochs": (c.data.epochs, 0 if k("max_steps", default=-1) > 0 else k("num_train_epochs", default=3.0)),
        "steps": (c.train.steps, k("max_steps") if k("max_steps", default=-1) > 0 else None),
        "seed": (c.run.seed, k("seed", default=42)),
        "prompt": (c.data.max_prompt_tokens, k("max_prompt_length", default=512)),
        "longer prompts": (c.data.overlong_prompt, "truncate_left"),  # prompt_ids[:, -max_prompt_length:]
        "data": ((c.data.prompt_column, c.data.subset, c.data.split), (
            k("dataset_prompt_column", default="prompt"), k("dataset_config") or "", (k("dataset_train_split", default="train"),))),
        "system prompt": (c.data.system_prompt, k.raw("system_prompt", "")),  # open_r1/grpo.py, make_conversation
        "longest": (c.rollout.max_new_tokens, longest),
        "temperature": (c.rollout.temperature, k("temperature", default=1.0)),
        "trainer's temperature": (c.algorithm.temperature or c.rollout.temperature, k("temperature", default=1.0)),  # logits / temperature
        "top_p": (c.rollout.top_p, k("top_p", default=1.0)),
        "top_k": (c.rollout.top_k, k("top_k") or -1),
        "min_p": (c.rollout.min_p, k("min_p") or 0.0),
        "repetition": (c.rollout.repetition_penalty, k("repetition_penalty", default=1.0)),
        # _generate_and_score_completions: rewards less the group's mean, over torch's std
        "advantage": ((c.algorithm.advantage, c.algorithm.advantage_mean, c.algorithm.advantage_std),
                      ("outcome", "group", "group" if k("scale_rewards", default=True) else "none")),
        "whitened": (c.algorithm.whiten, False),
        "weights": (tuple(c.reward.weights) or (1.0,) * len(c.reward.functions), tuple(k.raw("reward_weights") or (
            1.0,) * len(k.raw("reward_funcs")))),
        # _compute_loss
        "loss": ((c.algorithm.policy_loss, c.algorithm.ratio), ("clip", "token")),
        "clip": ((c.algorithm.clip_low, c.algorithm.clip_high), (k("epsilon", default=0.2), k("epsilon_high") or k("epsilon", default=0.2))),
        "dual clip": ((c.algorithm.dual_clip, c.algorithm.delta), (0.0, k("delta") or 0.0)),
        "kl": (c.algorithm.kl.coef, beta),
        "entropy": (c.algorithm.entropy_coef, 0.0),
        "cut answers masked": (c.algorithm.mask_truncated, k("mask_truncated_completions", default=False)),
        "dynamic sampling": (c.algorithm.dynamic_sampling, "off"),
        "staleness": (c.rollout.max_staleness, 0),
        "old log-probs": (c.algorithm.old_logprobs in ("auto", "recompute"), True),
    }
    if beta:
        out["kl's kind"] = ((c.algorithm.kl.estimator, c.algorithm.kl.placement), ("k3", "loss"))
    # loss_type: bnpo's token mean is one of a micro-batch, dapo's of the optimizer step
    kind = k("loss_type", default="bnpo" if old else "dapo")
    out["aggregation"] = ((c.algorithm.aggregation, _mean_of(c)), {
        "grpo": ("sequence_mean", 1), "dr_grpo": ("constant", c.algorithm.aggregation_sequences or None)}.get(kind) or (
            c.algorithm.aggregation, micro if kind == "bnpo" else None))
    if kind == "dr_grpo":
        out["constant"] = (c.algorithm.aggregation_constant or c.rollout.max_new_tokens, longest)
    if old or not k("use_vllm", default=False):  # vllm_importance_sampling_correction is of later versions
        out["corrected"] = (c.algorithm.mismatch.correction, "none")
    # transformers/training_args.py, optimization.py: the scheduler moves once per optimizer step; a decay to 0 unless it says a floor
    schedule = k("lr_scheduler_type", default="linear")
    out |= {
        "optimizer": (c.optimizer.name, {"adamw_torch": "adamw", "adamw_torch_fused": "adamw"}.get(k("optim", default="adamw_torch"))),
        "lr": (c.optimizer.lr, k("learning_rate", default=1e-6)),
        "schedule": (c.optimizer.schedule, {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}.get(schedule, schedule)),
        "floor": (c.optimizer.floor, k("lr_scheduler_kwargs.min_lr_rate", default=0.0)),
        "warmup": (_warmup(c.optimizer), (0, 0.0) if schedule == "constant" else (
            k("warmup_steps", default=0), 0.0 if k("warmup_steps", default=0) else k("warmup_ratio", default=0.0))),
        "betas": ((c.optimizer.b1, c.optimizer.b2), (k("adam_beta1", default=0.9), k("adam_beta2", default=0.999))),
        "eps": (c.optimizer.eps, k("adam_epsilon", default=1e-8)),
        "weight decay": (c.optimizer.weight_decay, k("weight_decay", default=0.0)),
        "gradient's clip": (c.optimizer.max_grad_norm, k("max_grad_norm", default=1.0)),
        "dtypes": ((c.train.compute_dtype, c.train.param_dtype), ("bf16" if k("bf16") else "fp32", _DTYPES.get(
            k("torch_dtype", "dtype", default="float32"), "fp32"))),
    }
    # Trainer: eval_strategy no unless said; a number of steps below 1 is a share of all
    asked = k("eval_strategy", default="no")
    out["eval"] = ((c.eval.every_steps, c.eval.every_epochs, c.eval.before, c.eval.after),
                   (*_every_of_trl(k, asked, "eval_steps", k("logging_steps", default=500)), k("eval_on_start", default=False), False))
    out["saved"] = ((c.checkpoint.every_steps, c.checkpoint.every_epochs), _every_of_trl(k, k("save_strategy", default="steps"), "save_steps", 500))
    out["kept"] = (c.checkpoint.keep, k("save_total_limit") or -1)
    return out


def _every_of_trl(k: Keys, strategy, key: str, default) -> tuple:
    """(steps, epochs) of transformers' strategies; a share of the run is that share of its steps, or else of its epochs."""
    strategy = {None: "no", False: "no"}.get(strategy, strategy)
    every = k(key, default=default)
    if strategy == "steps" and every < 1:  # TrainerState.compute_steps: ceil(max_steps * share)
        whole = k("max_steps", default=-1)
        return (-(-whole * every // 1), 0.0) if whole > 0 else (0, every * k("num_train_epochs", default=3.0))
    return (every if strategy == "steps" else 0, 1.0 if strategy == "epoch" else 0.0)


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
    """ROLL at 8eb27cc and v0.1.0, its RLVR pipeline. Every option by the file of roll/ that decides it."""
    c = _settled(c)
    t, s, g, v = "actor_train.training_args.", "actor_infer.generating_args.", "actor_train.strategy_args.strategy_config.", "validation."
    first, strategy = version < "0.2", str(k("actor_train.strategy_args.strategy_name"))
    # configs/base_config.py, set_old_logprobs_status: ranks are devices / (tp pp cp), of FSDP2 / ulysses_size
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")

    def shards(role):  # of FSDP2 and DeepSpeed: rank_info in distributed/strategy
        if "megatron" in str(k(role + ".strategy_args.strategy_name")):
            return [k(f"{role}.strategy_args.strategy_config.{n}") or 1 for n in names]
        return [1, 1, k(role + ".model_args.ulysses_size") or 1]

    def ranks(role):
        return _devices(k(role + ".device_mapping")) / math.prod(shards(role))

    group, passes = k("num_return_sequences_in_group", default=1), k("ppo_epochs", default=1)
    prompts = k("rollout_batch_size", default=128)

    def updates(role):
        of = role + ".training_args."
        return prompts * group / (k(of + "per_device_train_batch_size", default=8) * k(of + "gradient_accumulation_steps", default=1) * ranks(role))

    # pipeline/base_worker.py, train_step; base_config.py, BaseConfig.__post_init__ (the whole less the prompt)
    prompt = k("prompt_length", default=1024)
    longest = (k("sequence_length") or k("response_length") + prompt) - prompt
    out = {
        "prompts": (c.data.prompts_per_step, prompts),
        "group": (c.rollout.group_size, group),
        "mini-batches": (c.algorithm.num_minibatches, updates("actor_train")),
        "passes": (c.algorithm.ppo_epochs, passes),
        "steps": (c.train.steps, k("max_steps", default=500)),
        "epochs": (c.data.epochs, 0),
        "seed": (c.run.seed, k("seed", default=42)),
        "prompt": (c.data.max_prompt_tokens, prompt),
        "longer prompts": (c.data.overlong_prompt, "filter"),  # rlvr_pipeline.py, preprocess_dataset, get_encode_function
        "prompts' column": (c.data.prompt_column, k("actor_train.data_args.messages", default="messages")),
        "longest": (c.rollout.max_new_tokens, longest),
    }
    out |= _optimizer_of_roll(k, t, strategy, first, c.optimizer, "")
    # configs/generating_args.py
    out |= {
        "temperature": (c.rollout.temperature, k(s + "temperature", default=0.95)),
        "top_p": (c.rollout.top_p, k(s + "top_p", default=0.7)),
        "top_k": (c.rollout.top_k, k(s + "top_k", default=50)),
        "repetition": (c.rollout.repetition_penalty, k(s + "repetition_penalty", default=1.0)),
        # distributed/strategy: only vLLM and SGLang are told the temperature; the trainer's logits are not divided by it
        "trainer's temperature": (c.algorithm.temperature or c.rollout.temperature, 1.0),
    }
    # utils/functionals.py, reward_postprocess and compute_advantage: normalised, clipped, returns, whitened, clipped. Before 0.2 by
    # reward_norm, less its mean alone with reward_shift; 'running' has no counterpart
    kind, gamma = k("adv_estimator", default="gae"), k("gamma", default=1)
    if first:
        norm = "group" if kind == "grpo" else k("reward_norm")
        normal = (norm or "none", "none" if not norm or k("reward_shift", default=False) else norm)
    else:
        normal = ("group", "group") if kind == "grpo" else (k("norm_mean_type") or "none", k("norm_std_type") or "none")
    out["advantage"] = (c.algorithm.advantage, "gae" if kind == "gae" else "outcome" if gamma == 1 and not k("add_token_level_kl") else "returns")
    if kind == "gae":  # the score itself is normalised, whatever comes of it
        out["normalised"] = ((c.reward.norm_mean, c.reward.norm_std), normal)
        out |= {"gamma": (c.algorithm.gamma, gamma), "lambda": (c.algorithm.lam, k("lambd", default=0.95)),
                "value clip": (c.critic.value_clip, k("value_clip") or 0.0),  # base_worker.py, CriticWorker.loss_func
                "critic's warm-up": (c.critic.warmup_steps, k("critic_warmup", default=0))}
        n = "critic.training_args."
        out["critic's mini-batches"] = (c.critic.num_minibatches or c.algorithm.num_minibatches, updates("critic"))
        out |= _optimizer_of_roll(k, n, str(k("critic.strategy_args.strategy_name")), first, _of_critic(c), "critic's ")
    else:
        out["normalised"] = (tuple(a if a != "none" else b for a, b in zip(
            (c.algorithm.advantage_mean, c.algorithm.advantage_std), (c.reward.norm_mean, c.reward.norm_std), strict=True)), normal)
    out["reward's clip"] = (c.reward.clip if normal == ("none", "none") else None, k("reward_clip") if normal == ("none", "none") else None)
    bound = k("advantage_clip")
    out["whitened"] = (c.algorithm.whiten, bool(k("whiten_advantages", default=False)))
    out["advantage's clip"] = ((c.algorithm.advantage_low, c.algorithm.advantage_high), (-bound, bound) if bound else (None, None))
    # pipeline/rlvr/actor_worker.py, loss_func; actor_pg_worker.py for its variants
    variant = k("actor_train.pg_variant", default="vanilla") if "ActorPGWorker" in str(k("actor_train.worker_cls")) else "ppo"
    out["loss"] = (c.algorithm.policy_loss, {"ppo": "clip", "vanilla": "pg"}.get(variant, variant))
    if variant == "ppo":
        clip = k("pg_clip", default=0.2)
        wide = (k("pg_clip_low", default=0.2), k("pg_clip_high", default=0.2))
        out["ratio"] = (c.algorithm.ratio, {"token": "token", "seq": "sequence"}[k("importance_sampling", default="token")])
        out["clip"] = ((c.algorithm.clip_low, c.algorithm.clip_high), wide if k("use_pg_clip_range", default=False) else (clip, clip))
        out["dual clip"] = (c.algorithm.dual_clip, 1 + 2 * clip if k("dual_clip_loss", default=False) else 0.0)
    # functionals.py, agg_loss: before 0.2 of a micro-batch, so that a token mean is one of each
    mode = k("loss_agg_mode", default="seq-mean-token-sum" if first else "seq-mean-token-mean")
    if mode == "token-mean":
        micro = k(t + "per_device_train_batch_size", default=8) if first and not k("actor_train.use_dynamic_batching_in_train") else None
        out["aggregation"] = (_mean_of(c), micro)
    else:
        out["aggregation"] = (c.algorithm.aggregation, {"seq-mean-token-sum": "sequence_sum", "seq-mean-token-mean": "sequence_mean",
                                                        "seq-mean-token-sum-norm": "constant"}[mode])
    # actor_worker.py: k3 up to 10 in the loss; functionals.py, compute_token_reward: kl_penalty in the reward
    rewarded, lost = k("add_token_level_kl", default=False), k("use_kl_loss", default=False)
    coef = k("init_kl_coef", default=0.2) if rewarded else k("kl_loss_coef", default=0.0) if lost else 0.0
    out["kl"] = (c.algorithm.kl.coef, coef)
    if coef:
        out["kl's kind"] = ((c.algorithm.kl.estimator, c.algorithm.kl.placement), (
            {"kl": "k1", "abs": "abs", "mse": "k2"}[k("kl_penalty", default="kl")], "reward") if rewarded else ("low_var", "loss"))
    out["entropy"] = (c.algorithm.entropy_coef, k("entropy_loss_coef", default=0.0))
    # functionals.py, get_sample_level_mask and difficulty_mask (of groups of more than one)
    out["cut answers masked"] = (c.algorithm.mask_truncated, k("max_len_mask", default=False))
    out["groups masked"] = (c.algorithm.dynamic_sampling, "mask" if k("difficulty_mask", default=False) and group > 1 else "off")
    # utils/train_infer_corrections.py; base_worker.py, get_old_log_probs_with_cache: the trainer's own, the first pass's where it is one
    w = "train_infer_correction.is_weight."
    on = k(w + "enabled", default=False)
    out["corrected"] = (c.algorithm.mismatch.correction, k(w + "weight_type", default="token") + "_tis" if on else "none")
    if on:
        out["cap"] = (c.algorithm.mismatch.cap, k(w + "upper_bound", default=1.2))
    out["old log-probs"] = (c.algorithm.old_logprobs in ("auto", "recompute"), True)
    # distributed/scheduler/generate_scheduler.py: what was begun more than so many steps ago is not used
    out["staleness"] = (c.rollout.max_staleness, -(-k("async_generation_ratio", default=0) // 1))
    # rlvr_pipeline.py, run: evaluation at the begin of steps 0, n, 2n ..., none at the end; base_pipeline.py, do_checkpoint
    held = bool(k.raw(v + "data_args.file_name"))
    every = k("eval_steps", default=10) if held else 0
    out |= {
        "eval every": (c.eval.every_steps, every),
        "eval before and after": ((c.eval.before, c.eval.after), (held, False)),
        "saved every": (c.checkpoint.every_steps, k("save_steps", default=50)),
        "saved at the end": (c.checkpoint.at_end, True),
        "kept": (c.checkpoint.keep, k("max_ckpt_to_keep") or -1),
    }
    if held:
        e = v + "generating_args."
        out |= {
            "eval temperature": (c.eval.temperature, k(e + "temperature", default=0.95)),
            "eval top_p": (c.eval.top_p, k(e + "top_p", default=0.7)),
            "eval top_k": (c.eval.top_k, k(e + "top_k", default=50)),
            "eval longest": (c.eval.max_new_tokens or c.rollout.max_new_tokens,
                             k("val_sequence_length") - k("val_prompt_length") if k("val_sequence_length") else longest),
            "eval answers": (c.eval.samples, k(e + "num_return_sequences", default=1)),
        }
    # configs/model_args.py
    rank = k("actor_train.model_args.lora_rank") or 0
    out["adapters"] = ((c.lora.rank, c.lora.alpha if rank else None), (rank, (k("actor_train.model_args.lora_alpha") or 2 * rank) if rank else None))
    # strategy/fsdp2_strategy.py: parameters are loaded, and learnt, in the strategy's param_dtype; Megatron and DeepSpeed keep fp32 beside bf16
    sharded = _DTYPES[str(k(g + "param_dtype", default="fp32"))] if "fsdp2" in strategy else "fp32"
    out["dtypes"] = ((c.train.compute_dtype, c.train.param_dtype), (k("actor_train.model_args.dtype", default="bf16"), sharded))
    out["tp and cp"] = ((c.mesh.tp, c.mesh.cp), tuple(shards("actor_train")[::2]))
    return out


def _optimizer_of_roll(k: Keys, t: str, strategy: str, first: bool, optimizer, of: str) -> dict:
    """configs/training_args.py; AdamW and transformers' scheduler (fsdp2_strategy.py, deepspeed_strategy.py), megatron's (mcore_adapter's
    trainer/utils.py), which move once per optimizer step; max_grad_norm is the pipeline's."""
    kind, steps = k(t + "lr_scheduler_type", default="linear"), k(t + "warmup_steps", default=0)
    share = 0.0 if steps else k(t + "warmup_ratio", default=0.03 if first else 0.0)
    if kind == "constant" and "megatron" not in strategy:  # transformers' constant has no warm-up
        steps, share = 0, 0.0
    return {
        of + "optimizer": (optimizer.name, "adamw"),
        of + "lr": (optimizer.lr, k(t + "learning_rate", default=5e-5)),
        of + "warmup": (_warmup(optimizer), (steps, share)),
        of + "schedule": (optimizer.schedule, {"constant_with_warmup": "constant"}.get(kind, kind)),
        of + "floor": (optimizer.floor, 0.0),
        of + "betas": ((optimizer.b1, optimizer.b2), (k(t + "adam_beta1", default=0.9), k(t + "adam_beta2", default=0.999))),
        of + "eps": (optimizer.eps, 1e-8),
        of + "weight decay": (optimizer.weight_decay, k(t + "weight_decay", default=0.0)),
        of + "gradient's clip": (optimizer.max_grad_norm, k("max_grad_norm", default=1.0)),
    }


def cosmos_rl(k: Keys, c, version: str) -> dict:
    """Cosmos-RL at 89f2e5b and v0.1.3. Every option by the file of cosmos_rl/ that decides it; policy/trainer's files moved to its
    llm_trainer/."""
    c = _settled(c)
    p, s, par, v = "train.train_policy.", "rollout.sampling_config.", "policy.parallelism.", "validation."
    first, sft = version == "0.1", k(p + "type") == "sft"
    replicas, size = k(par + "n_init_replicas", default=1), k("train.train_batch_per_replica", default=8)
    whole = k("policy.model_max_length", default=4096)
    shard = max(k(par + "dp_shard_size", default=1), 1) * k(par + "dp_replicate_size", default=1)
    each, passes = size / shard, k(p + "mu_iterations", default=1)  # completions of a rank
    batches = 1 if sft else each / min(k(p + "batch_size_per_optimize") or each, each)
    # policy/trainer/optm/__init__.py, build_optimizers and build_lr_schedulers. First (n + 1) / (warm-up + 1) of lr in update n, the
    # scheduler with the optimizer; now n / (warm-up - 1), of GRPO's steps, whatever their updates (grpo_trainer.py). Here (n + 1) / warm-up
    warm = k.raw("train.optm_warmup_steps", 20)
    share = isinstance(warm, float) and warm <= 1
    warm = warm + (warm > 0) if first else warm if share or sft else warm * batches * passes
    decay, ratio = k("train.optm_decay_type"), k("train.optm_decay_ratio")
    decays = decay not in (None, "none") and ratio != 0
    out = {
        "optimizer": (c.optimizer.name, k("train.optm_name", default="AdamW").lower()),
        "lr": (c.optimizer.lr, k("train.optm_lr", default=1e-6)),
        "warmup": (_warmup(c.optimizer), (0, warm) if share else (warm, 0.0)),
        "warmup's start": (c.optimizer.warmup_start, 0.0 if first else k("train.optm_warmup_start_factor", default=0.0)),
        "schedule": (c.optimizer.schedule, ("wsd" if ratio is not None or decay == "sqrt" else decay) if decays else "constant"),
        "floor": (c.optimizer.floor, k("train.optm_min_lr_factor", default=0.0)),
        "betas": ((c.optimizer.b1, c.optimizer.b2), tuple(k.raw("train.optm_betas", (0.9, 0.999)))),
        "eps": (c.optimizer.eps, k("train.epsilon", default=1e-6)),
        "weight decay": (c.optimizer.weight_decay, k("train.optm_weight_decay", default=0.01)),
        "gradient's clip": (c.optimizer.max_grad_norm, k("train.optm_grad_norm_clip", default=1.0)),
        "epochs": (c.data.epochs, k("train.epoch", default=1)),
        "steps": (c.train.steps, k("train.max_num_steps")),
        "whole": (c.train.max_sequence_tokens, whole),
        # policy/model/base.py: parameters are made in param_dtype first, in master_dtype now
        "dtypes": ((c.train.compute_dtype, c.train.param_dtype), tuple(_DTYPES[k(n, default=d)] for n, d in (
            ("train.param_dtype", "bfloat16"), ("train.param_dtype" if first else "train.master_dtype", "bfloat16" if first else "float32")))),
        # dispatcher/data (data_fetcher.py; controller.py first); sft: torch's DistributedSampler, which shuffles unless it is told
        "shuffled": (c.data.shuffle, True if sft and first else k(p + "dataloader_shuffle", default=True)),
        # dispatcher/status.py, check_checkpoint_saving (controller.py first); policy/worker/sft_worker.py
        "saved every": ((c.checkpoint.every_steps, c.checkpoint.at_end), (k("train.ckpt.save_freq", default=20), True) if k(
            "train.ckpt.enable_checkpoint", default=False) else (0, False)),
        "kept": (c.checkpoint.keep if c.checkpoint.every_steps else 0, k("train.ckpt.max_keep", default=5) if k(
            "train.ckpt.enable_checkpoint", default=False) else 0),
        # save_checkpoint: an export beside each, and always of the last, which needs enable_checkpoint, too
        "exported every": ((c.checkpoint.export_every_steps, c.checkpoint.export_at_end), (
            k("train.ckpt.save_freq", default=20) if k("train.ckpt.export_safetensors", default=True) else 0, True) if k(
                "train.ckpt.enable_checkpoint", default=False) else (0, False)),
        "seed": (c.run.seed, k("train.seed", default=42 if k("train.deterministic", default=False) else c.run.seed)),
        "data": ((c.data.subset, c.data.split), (k(p + "dataset.subset") or "", (k(p + "dataset.split", default="train"),))),
        "fp8": (c.train.matmul, "default" if not k("train.fp8.enable_fp8", default=False) else {"rowwise": "fp8", "tensorwise": "fp8_tensor"}[
            k("train.fp8.quant_recipe", default="rowwise")]),
        "tp": (c.mesh.tp, k(par + "tp_size", default=2)),
        "cp": (c.mesh.cp, k(par + "cp_size", default=1)),
    }
    # status.py and sft_worker.py: every so many steps and after the last, before the first if asked. First [train] had enable_validation
    asked = k("train.enable_validation" if first else v + "enable", default=False)
    if asked and c.eval.sets:
        out |= {
            "eval every": (c.eval.every_steps, k("train.validation_step" if first else v + "freq", default=20)),
            "eval before and after": ((c.eval.before, c.eval.after), (k(v + "val_before_train", default=False), True)),
        }
    else:
        out["eval every"] = (c.eval.every_steps, 0)
    if sft:  # sft_trainer.py: batches of a data-parallel worker, one mean over all their tokens
        return {**out, "recipe": (c.run.recipe, "sft"), "rows": (c.data.prompts_per_step, size * shard * replicas),
                # dispatcher/data/packer/decoder_only_llm_data_packer.py: all answers are learnt, what is too long loses its end
                "answers": ((c.data.prompt_column, c.data.train_turns, c.data.overlong_completion), (
                    k(p + "conversation_column_name", default="conversations"), "all", "truncate"))}
    if asked and c.eval.sets:  # rollout/vllm_rollout/vllm_rollout.py, val_sampling_params
        longest = k(v + "max_response_length") or k("rollout.max_response_length", default=2048)
        out |= {
            "eval temperature": (c.eval.temperature, k(v + "temperature", default=0.9 if first else 0.0)),
            "eval top_k": (c.eval.top_k, k(v + "top_k", default=10 if first else 1)),
            "eval top_p": (c.eval.top_p, k(v + "top_p") or k(s + "top_p", default=1.0)),
            "eval longest": (c.eval.max_new_tokens or c.rollout.max_new_tokens, min(longest, whole - 1)),
            "eval answers": (c.eval.samples, k(v + "n_generation", default=1)),
        }
    group, distilled = k("rollout.n_generation", default=16), k("distillation.enable", default=False)
    # dispatcher/controller.py and status.py: how far ahead is sampled; trainers and samplers of mode=colocated have turns
    ahead, sync = k(p + "allowed_outdated_steps", default=4), k("train.sync_weight_interval", default=1)
    stale = 0 if k(p + "on_policy", default=False) or k("mode", default="disaggregated") == "colocated" else max(ahead, sync - 1) // sync
    answer = min(k("rollout.max_response_length", default=2048), whole - 1)  # vLLM's max_model_len is the whole
    out |= {
        "recipe": (c.run.recipe, "distill" if distilled else "rl"),
        "sequences": (c.data.prompts_per_step * group, max(size * replicas, group)),
        "group": (c.rollout.group_size, group),
        "mini-batches": (c.algorithm.num_minibatches, batches),
        "passes": (c.algorithm.ppo_epochs, passes),
        "staleness": (c.rollout.max_staleness, stale),
        "sync": (c.rollout.sync_every, sync),
        "longest": (c.rollout.max_new_tokens, answer),
        "prompt": ((c.data.max_prompt_tokens, c.data.prompt_column), (whole - 1, k(p + "prompt_column_name") or "prompt")),
        "stop": (c.rollout.keep_stop, k("rollout.include_stop_str_in_output", default=False)),
        "temperature": (c.rollout.temperature, k(s + "temperature", default=1.0)),
        # grpo_trainer.py: the trainer's logits are divided by a temperature of their own
        "trainer's temperature": (c.algorithm.temperature or c.rollout.temperature, k(p + "temperature", default=1.0)),
        "top_p": (c.rollout.top_p, k(s + "top_p", default=1.0)),
        "top_k": (c.rollout.top_k, k(s + "top_k", default=-1)),
        "repetition": (c.rollout.repetition_penalty, k(s + "repetition_penalty", default=1.0)),
        # grpo_trainer.py, compute_loss: ratios to the first pass's log-probs; what the sampler said is read for the decoupled loss
        "old log-probs": (c.algorithm.old_logprobs, "rollout" if k(p + "use_rollout_logprobs_for_loss", default=False) else
                          "recompute" if k(p + "use_decoupled_loss", default=False) else "auto"),
        "corrected": (c.algorithm.mismatch.correction, "token_mis" if k(p + "use_decoupled_loss", default=False) else "none"),
        "entropy": (c.algorithm.entropy_coef, k(p + "entropy_coeff", default=0.0)),
        # reward/local_calculator.py: of groups whose rewards differ; a teacher's are all 0 (reward/dispatcher.py, bypass_reward)
        "prefixes": (c.algorithm.shared_prefix_tokens, 0 if distilled else k(p + "min_filter_prefix_tokens") or 0),
        "dynamic sampling": (c.algorithm.dynamic_sampling, "refill" if k(p + "variant") == "dapo" else "off"),
        "whitened": (c.algorithm.whiten, False),
    }
    if not (distilled and k("distillation.top_k", default=0)):  # else a divergence at every token, without a ratio
        out |= _loss_of_cosmos(k, c, p, first)
    if distilled:  # grpo_trainer.py, post_process_teacher_kl_advantages; bypass_reward: advantages of 0 beside it
        top, jsd = k("distillation.top_k", default=0), k("distillation.jsd_beta", default=0.5)
        out |= {
            "teacher": ((c.teacher.path, c.teacher.dtype), (k("distillation.model_name_or_path", default="Qwen/Qwen2.5-VL-7B-Instruct"),
                                                            _DTYPES[k("distillation.master_dtype", default="float32")])),
            "teaching": ((c.distill.loss, c.distill.top_k), ({0: "forward", 1: "reverse"}.get(jsd, "jsd") if top else "sampled", top)),
            "teaching's weight": ((c.distill.coef, c.distill.gamma, c.distill.on_policy), (
                k("distillation.kl_penalty_coef", default=1.0), k("distillation.kl_discount_factor", default=0.0), 1.0)),
        }
        return out
    out["kl"] = (c.algorithm.kl.coef, k(p + "kl_beta", default=0.0))
    if out["kl"][1]:
        out["kl's kind"] = ((c.algorithm.kl.estimator, c.algorithm.kl.placement), (
            "k3" if first else "k3_unbiased" if k(p + "unbiased_kl_estimate", default=False) else "low_var", "loss"))
    # dispatcher/algo/grpo.py: numpy's std
    out["advantage"] = ((c.algorithm.advantage, c.algorithm.advantage_mean, c.algorithm.advantage_std), (
        "outcome", "group", "none" if k(p + "unbiased_advantage", default=False) else "group_population"))
    # dispatcher/algo/reward.py, overlong_reward_fn: from the longest answer of the config, though the model's length may cut it before.
    # Only the name among the functions asks for it
    length, factor = k(p + "overlong_reward.buffer_length", default=4096), k(p + "overlong_reward.penalty_factor", default=1.0)
    begins = k("rollout.max_response_length", default=2048) - length
    asked = "overlong" in str(k.raw(p + "reward_function")) or any(n.startswith(p + "reward_function.overlong") for n in k.keys)
    out["overlong"] = (_overlong(c), tuple(asked * max(n - begins, 0) / length * factor for n in _lengths(answer)))
    return out


def _loss_of_cosmos(k: Keys, c, p: str, first: bool) -> dict:
    """policy/trainer/grpo_trainer.py, compute_loss of both versions, and the scaling of mini-batches."""
    low, high, rho = k(p + "epsilon_low", default=0.2), k(p + "epsilon_high", default=0.2), k(p + "aipo_rho")
    gspo = k(p + "variant", default="grpo") == "gspo"
    out = {"loss": ((c.algorithm.policy_loss, c.algorithm.ratio), ("clip", "sequence" if gspo else "token"))}
    if rho is not None:  # -min(ratio, rho) A, of either sign: no lower bound, rho above, and rho for the negative
        out["clip"] = ((c.algorithm.clip_low >= 1, c.algorithm.clip_high, c.algorithm.dual_clip), (True, rho - 1, rho))
    else:  # a negative bound is none
        out["clip"] = (tuple(None if a is None else min(a, 1e6) for a in (min(c.algorithm.clip_low, 1.0), c.algorithm.clip_high)),
                       (1.0 if low < 0 else low, 1e6 if high < 0 else high))
        out["dual clip"] = (c.algorithm.dual_clip, 0.0 if gspo else k(p + "lower_bound_ratio", default=3.0))
    kind, batch, constant = k(p + "loss_type", default="token-mean"), k(p + "mini_batch", default=2), k(p + "unbiased_loss_max_tokens")
    if kind == "token-mean" and first:  # first each sequence's mean
        out["aggregation"] = (_mean_of(c), 1)
    elif kind == "token-mean":  # now of a mini-batch, or of those of all workers
        out["aggregation"] = (c.algorithm.aggregation, "token_mean") if k(p + "balance_dp_token", default=False) else (_mean_of(c), batch)
    elif kind == "token-sum":  # sums of mini-batches, scaled by their share: 1 / (n / mini_batch)
        out["aggregation"] = ((c.algorithm.aggregation, c.algorithm.aggregation_constant), ("constant", 1 / batch))
    elif kind == "seq-mean-token-mean" and constant:
        out["aggregation"] = ((c.algorithm.aggregation, c.algorithm.aggregation_constant), ("constant", constant))
    else:
        out["aggregation"] = (c.algorithm.aggregation, {"seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum": "sequence_sum"}[kind])
    return out


RULES = {"skyrl": skyrl, "verl": verl, "trl": trl, "areal": areal, "rlinf": rlinf, "roll": roll, "cosmos_rl": cosmos_rl}
