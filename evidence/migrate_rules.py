"""What configs of other systems mean, written down from those systems' code: the rules of migrate_corpus.py.

A rule takes the keys of a config as an independent reader found them (Keys), the config that was written and the version.
It returns name -> (what is written, what the source's code makes of its keys). It does not look at jaxrl.migrate.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np

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


SEEN = r"(?i).*qwen(2|2\.5|3)-?vl[^/]*/?"  # models whose tower is trained here


def images(system: str, k: Keys, c, version: str) -> dict:
    """What jobs of images have of their own; {} of others."""
    if not re.fullmatch(SEEN, c.model.path) and not (system == "rlinf" and k("data.type") == "vlm"):
        return {}
    out = {"sampler": (c.rollout.engine, "vllm")} if c.run.recipe == "rl" else {}
    if system == "verl":  # utils/dataset/rl_dataset.py; workers/fsdp_workers.py, which the engines of 0.8 and 0.9 replace
        out["column"] = (c.data.image_column, k("data.image_key", default="images"))
        freezes = version < "0.8" and _engine_of_verl(k) == "fsdp" and k("actor_rollout_ref.actor.freeze_vision_tower", default=False)
        out["frozen"] = (tuple(c.model.frozen), ("vision/.*",) if freezes else ())
    if system == "rlinf" and c.run.recipe == "rl":  # data/datasets/vlm/base.py
        out["column"] = (c.data.image_column, (k.raw("data.image_keys") or ["images"])[0])
        out["chat"] = (c.data.chat, "auto" if k("data.use_chat_template") else "false")
    if system == "roll" and c.run.recipe == "rl" and not c.env.function:  # datasets/vlm_dataset_utils.py, configs/data_args.py; RLVR's
        d = "actor_train.data_args.image_"
        out["pixels"] = ((c.data.image_min_pixels, c.data.image_max_pixels), (
            k(d + "min_pixels", default=4 * 28 * 28), k(d + "max_pixels", default=4096 * 4096)))
        first = str(k("actor_train.model_args.freeze_module_prefix", default="")).split(",")[0]
        out["frozen"] = (c.model.frozen[:1] and c.model.frozen[0], "vision/.*" if first in ("vision_model", "model.visual") else ())
    if system == "areal":  # dataset/clevr_count_70k.py
        out["pixels"] = (c.data.image_max_pixels, 336 * 336 if str(k("train_dataset.path")).endswith("70k") else None)
    return out


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


def _advantages(c) -> tuple:
    """What the file of the config's advantage says of two groups of four, with one right and all right."""
    path, _, name = str(c.algorithm.advantage).rpartition(":")
    if not path.endswith(".py"):
        return ()
    space: dict = {}
    exec(Path(path).read_text(), space)
    inputs = SimpleNamespace(scores=np.array([1.0, 0, 0, 0, 1, 1, 1, 1]), groups=np.repeat([0, 1], 4))
    return tuple(round(float(x), 9) for x in space[name](inputs))


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
        # compute_gpg_outcome_advantage: alpha = 8 completions / 5 of a score other than 0; less the group's mean, divided by 1; not whitened
        "gpg": ((_advantages(c), al.whiten), ((1.2, -0.4, -0.4, -0.4, 0.0, 0.0, 0.0, 0.0), False)),
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
                                                "cispo": ("cispo", "token"), "dppo_tv": ("dppo", "token"),
                                                "gpg": ("pg", "token")}.get(mode, ("clip", "token")))
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
        "most sequences": (0, 0) if c.rollout.engine == "jax" else (
            c.rollout.vllm.max_running, k(r + "max_num_seqs", default=256 if version >= "0.9" else 1024)),
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
    # of a trajectory of several turns (workflow/multi_turn.py: one reward) what is to go is the reward, wherever there is no discount and no KL
    whole = c.env.function and not critic and gamma * lam == 1 and not k(a + "kl_ctl", default=0.1)
    out["advantage"] = ((al.advantage, al.gamma, al.lam if critic else None),
                        ("gae", gamma, lam) if critic else ("outcome", None, None) if whole else ("returns", gamma * lam, None))
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
        "template": (c.data.chat != "false", bool(k("data.use_chat_template") if k("data.type") == "vlm" else k(
            "data.apply_chat_template", default=False)) and (
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


def roll_packed(k, c, role: str) -> dict:
    """ROLL at v0.2.0 to 8eb27cc: utils/sequence_packing.py, LoadBalancePacker; megatron_strategy.py, where dynamic batching comes first."""
    at = role + "sequence_packing_args."
    packs = k(role + "use_sequence_packing", default=False) and k(at + "algorithm", default="none") == "load_balance"
    if not packs or "megatron" not in str(k(role + "strategy_args.strategy_name")) or k(role + "use_dynamic_batching_in_train", default=False):
        return {}
    return {"tokens of a micro-batch": ((c.train.tokens_per_microbatch, c.train.score_tokens_per_microbatch), tuple(
        k(f"{at}max_packed_sequence_length_{n}") for n in ("train", "forward")))}


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
    out |= roll_packed(k, c, "actor_train.")
    # distributed/scheduler/generate_scheduler.py: what was begun more than so many steps ago is not used
    apart = c.rollout.engine != "jax" or "sampler" in c.mesh.roles  # else nothing is sampled ahead, as the report says
    out["staleness"] = (c.rollout.max_staleness, -(-k("async_generation_ratio", default=0) // 1) if apart else 0)
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
