"""What configs of jobs of rows mean (SFT, preferences, reward models, distillation), written down from the sources' code:
rules of migrate_corpus.py beside migrate_rules.py, of the same kind. They do not look at jaxrl.migrate."""

from __future__ import annotations

import os
import re

from migrate_rules import roll_packed

UNBOUND = 8192  # what is written where the source bounds no row, which the report asks about


def _shared(c, rows, longest, rate, decay, clip, betas, schedule, warm, share, seed, model) -> dict:
    """The names that all rules have. warm, share: updates of warm-up, or their share of all."""
    o = c.optimizer
    return {
        "rows per optimizer step": (c.data.prompts_per_step, rows),
        "longest": (c.train.max_sequence_tokens, longest),
        "learning rate": (o.lr, rate),
        "weight decay": (o.weight_decay, decay),
        "clip": (o.max_grad_norm, clip),
        "betas": ((o.b1, o.b2), tuple(betas)),
        "schedule": (o.schedule, "constant" if schedule == "constant_with_warmup" else schedule),
        "warm-up": ((0 if o.warmup_fraction else o.warmup_steps, o.warmup_fraction), (0 if share else warm, share)),
        "seed": (c.run.seed, seed),
        "model": (c.model.path, os.path.expandvars(str(model or ""))),
    }


def _numbers(value, default) -> tuple:
    return tuple(map(float, re.findall(r"[\d.]+", value))) if isinstance(value, str) else tuple(value or default)


def verl_sft(k, c, version: str) -> dict:
    """verl at v0.6.1, v0.7.1, v0.9.0 and 1dda039: trainer/config/sft_trainer_engine.yaml, config/optim/*.yaml, sft_trainer.py,
    utils/dataset/multiturn_sft_dataset.py (in 0.6 rows without padding are cut whatever `truncation` says)."""
    kind = k("optim", default="fsdp")
    mega = kind == "megatron"
    schedule = None if mega else k("optim.warmup_style")  # workers/config/optimizer.py: the older name wins where it is set
    schedule = schedule or k("optim.lr_decay_style" if mega else "optim.lr_scheduler_type", default="cosine" if kind == "veomni" else "constant")
    warm, share = k("optim.lr_warmup_steps", default=-1), k("optim.lr_warmup_steps_ratio", default=0.0)
    rate, cut = k("optim.lr", default=1e-3), k("data.truncation", default="error")
    cuts = cut == "right" or k("data.pad_mode", default="no_padding") == "no_padding" and (cut == "left" or version == "0.6")
    counts = warm is not None and warm > 0 or warm == 0 and not mega and version < "0.8"
    out = _shared(c, k("data.train_batch_size", default=256), k("data.max_length", default=1024), rate,
                  k("optim.weight_decay", default=0.01), k("optim.clip_grad", default=1.0), _numbers(k.raw("optim.betas"), (0.9, 0.999)),
                  schedule, int(warm) if counts else 0, 0.0 if counts else share, k("trainer.seed", default=1), k("model.path") or "")
    return out | {
        "longer rows": (c.data.overlong_completion, "truncate" if cuts else "filter"),
        "epochs": (c.data.epochs, k("trainer.total_epochs", default=4)),
        "steps": (c.train.steps or None, k("trainer.total_training_steps")),
        "last batch": (c.data.drop_last, True),
        "trained": (c.data.train_turns, "all"),
        "messages": (c.data.prompt_column, k("data.messages_key", default="messages")),
        "floor": (c.optimizer.floor if schedule != "constant" else 0.0,
                  (k("optim.min_lr", default=0.0) / rate if mega else k("optim.min_lr_ratio", default=0.0)) if schedule != "constant" else 0.0),
        "adapters": (c.lora.rank, k("model.lora_rank", default=0)),
        "dtype": (c.train.compute_dtype, {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[k("engine.dtype", default="bfloat16")]),
        "checkpoints": (c.checkpoint.every_steps, max(_steps(k("trainer.save_freq", default=-1)), 0)),
    }


def _steps(value) -> int:
    return 0 if isinstance(value, str) else int(value)


def verl_first_sft(k, c, version: str) -> dict:
    """verl to v0.7.1: trainer/config/sft_trainer.yaml and fsdp_sft_trainer.py (its schedule is a cosine to 0)."""
    turns = bool(k("data.multiturn.enable", default=False))
    share = k("optim.lr_warmup_steps_ratio", "optim.warmup_steps_ratio", default=0.1)
    out = _shared(c, k("data.train_batch_size", default=256), k("data.max_length", default=1024), k("optim.lr", default=1e-5),
                  k("optim.weight_decay", default=0.01), k("optim.clip_grad", default=1.0), _numbers(k.raw("optim.betas"), (0.9, 0.95)),
                  k("optim.lr_scheduler", default="cosine"), 0, share, k("trainer.seed", default=1), c.model.path)
    return out | {
        "longer rows": (c.data.overlong_completion, "truncate" if k("data.truncation", default="error") == "right" else "filter"),
        "epochs": (c.data.epochs, k("trainer.total_epochs", default=4)),
        "steps": (c.train.steps or None, k("trainer.total_training_steps")),
        "trained": (c.data.train_turns, "all" if turns else "last"),
        "adapters": (c.lora.rank, k("model.lora_rank", default=0)),
    }


def areal(k, c, version: str) -> dict:
    """AReaL at v0.3.4, v0.4.1, v1.0.4 and 4aef98d: api/cli_args.py, trainer/{sft,dpo,rw}_trainer.py, dataset/{gsm8k,hhrlhf}.py."""
    p, d, e = ("actor." if any(n.startswith("actor.") for n in k.keys) else "model."), "train_dataset.", "evaluator."
    o, longest = p + "optimizer.", k("train_dataset.max_length") or UNBOUND
    out = _shared(c, k(d + "batch_size", default=1), longest, k(o + "lr", default=1e-3), k(o + "weight_decay", default=0.01),
                  k(o + "gradient_clipping", default=1.0), (k(o + "beta1", default=0.9), k(o + "beta2", default=0.999)),
                  k(o + "lr_scheduler_type", default="constant"), 0, k(o + "warmup_steps_proportion", default=0.001), k("seed", default=1),
                  k(p + "path"))
    out |= {
        "eps": (c.optimizer.eps, k(o + "eps", default=1e-8)),
        "epochs": (c.data.epochs, k("total_train_epochs", default=1)),
        "shuffled": (c.data.shuffle, k(d + "shuffle", default=True)),
        "last batch": (c.data.drop_last, k(d + "drop_last", default=True)),
        "exports": (c.checkpoint.export_every_epochs, k("saver.freq_epochs") or 0),
        "dtype": (c.train.compute_dtype, {"bfloat16": "bf16", "float16": "fp16"}[k(p + "dtype", default="bfloat16")]),
    }
    if k(d + "type") == "dpo":
        out |= {"beta": (c.preference.beta, k(p + "beta", default=0.1)),
                "loss": (tuple(c.preference.loss), ({"sigmoid": "dpo", "ipo": "ipo"}[k(p + "loss_type", default="sigmoid")],)),
                "evaluation": (c.eval.every_epochs, k(e + "freq_epochs") or 0)}
    elif k(d + "type") == "sft":
        out["longer rows"] = (c.data.overlong_completion, "filter")
    sizes = k("allocation_mode") or k(p + "backend") or ""
    out["tensor parallel"] = (c.mesh.tp, int(m[1]) if (m := re.search(r"t(\d+)", sizes.split(":")[-1])) else 1)
    return out


def skyrl_sft(k, c, version: str) -> dict:
    """SkyRL at skyrl-v0.2.0, v0.3.0 and a956457: train/config/sft_config.py, train/sft_trainer.py (its last batch of a pass is small)."""
    o = "optimizer_config."
    steps, most = k("num_steps", default=10 if version < "0.3" else None), k("max_training_steps")
    out = _shared(c, k("batch_size", default=4), k("max_length", default=512 if version < "0.3" else None) or UNBOUND,
                  k(o + "lr", default=1e-6), k(o + "weight_decay", default=0.01), k(o + "max_grad_norm", default=1.0),
                  _numbers(k.raw(o + "adam_betas"), (0.9, 0.999)), k(o + "scheduler", default="constant_with_warmup"),
                  k(o + "num_warmup_steps", default=0), 0.0, k("seed", default=42), k("model.path", default="Qwen/Qwen3-0.6B"))
    return out | {
        "steps": (c.train.steps or None, min(steps or most, most or steps) if steps or most else None),
        "epochs": (c.data.epochs or None, None if steps else k("num_epochs", default=1)),
        "trained": (c.data.train_turns, "all" if k("train_on_what") == "all_assistant_messages" else "last"),
        "longer rows": (c.data.overlong_completion, "truncate"),
        "shuffled": (c.data.shuffle, k("sampler", default="random") != "sequential"),
        "adapters": (c.lora.rank, k("model.lora.rank", default=0)),
        "exports": (c.checkpoint.export_every_steps, max(k("hf_save_interval", default=0), 0)),
        "checkpoints": (c.checkpoint.every_steps, max(k("ckpt_interval", default=0), 0) if k("ckpt_path") else 0),
    }


def _roll(k, c, role: str, clip: float, model) -> dict:
    """What ROLL's three pipelines share: configs/training_args.py, distributed/strategy/*.py (world / (tp x pp x cp) ranks of data)."""
    a, s = role + "training_args.", role + "strategy_args.strategy_config."
    devices = k.raw(role + "device_mapping")
    found = re.fullmatch(r"list\(range\((\d+),\s*(\d+)\)\)", devices) if isinstance(devices, str) else None
    world = int(found[2]) - int(found[1]) if found else len(devices)
    mega = "megatron" in k(role + "strategy_args.strategy_name", default="")
    sizes = [s + n for n in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")] if mega else [
        role + "model_args.ulysses_size"]
    for name in sizes:
        world //= int(k(name, default=1))
    warm, share = k(a + "warmup_steps", default=0), k(a + "warmup_ratio", default=0.0)
    rows = k(a + "per_device_train_batch_size", default=8) * k(a + "gradient_accumulation_steps", default=1) * world
    longest = k("sequence_length") or k("response_length") + k("prompt_length", default=1024)
    out = _shared(c, rows, longest, k(a + "learning_rate", default=5e-5), k(a + "weight_decay", default=0.0),
                  k("max_grad_norm", default=clip), (k(a + "adam_beta1", default=0.9), k(a + "adam_beta2", default=0.999)),
                  k(a + "lr_scheduler_type", default="linear"), warm, 0.0 if warm else share, k("seed", default=42), model)
    return out | {
        "epochs": (c.data.epochs, int(k(a + "num_train_epochs", default=1))),
        "last batch": (c.data.drop_last, True),
        "checkpoints": (c.checkpoint.every_steps, max(k("save_steps", default=50), 0)),
    }


def roll_sft(k, c, version: str) -> dict:
    """ROLL at v0.1.3 to 8eb27cc: pipeline/sft/*.py."""
    return _roll(k, c, "sft_train.", 1.0, k("pretrain")) | {
        # sft_pipeline.py, build_conversation: a prompt of one column, or of several, which rows here do not have in one yet
        "columns": ((c.data.prompt_column, c.data.completion_column), ("+".join(filter(None, (
            k("prompt_key", default="instruction"), k("query_key"), k("system_key")))), k("response_key", default="output"))),
        "shuffled": (c.data.shuffle, False),
        "longer rows": (c.data.overlong_completion, "truncate"),
    }


def roll_preference(k, c, version: str) -> dict:
    """ROLL at v0.1.0 to 8eb27cc: pipeline/dpo/*.py; evaluation comes before the step, the first one's too."""
    held = k.raw("validation.data_args.file_name")
    return _roll(k, c, "actor_train.", 1.0, k("pretrain")) | {
        "steps": (c.train.steps, k("max_steps", default=500)),
        "loss": ((tuple(c.preference.loss), c.preference.beta), (("ipo",) if k("ipo", default=False) else ("dpo",), k("beta", default=0.1))),
        "smoothing": (c.preference.label_smoothing, k("label_smoothing", default=0.0)),
        "columns": ((c.data.prompt_column, c.data.chosen_column, c.data.rejected_column),
                    ("instruction", k("chosen_key", default="chosen"), k("rejected_key", default="rejected"))),
        "evaluation": ((c.eval.every_steps, c.eval.before), (k("eval_steps", default=10), True) if held else (0, False)),
    }


def roll_distill(k, c, version: str) -> dict:
    """ROLL at v0.1.0 to 8eb27cc: pipeline/distill/*.py; the teacher's logits are divided by both temperatures."""
    d, share, warm = c.distill, k("distill_loss_weight", default=0.5), k("kd_temperature", default=1)
    return _roll(k, c, "student.", 0.0, k("student_pretrain")) | {
        "objective": (d.loss, {"forward_kl": "forward", "reverse_kl": "reverse", "js_divergence": "jsd"}[k("kd_objective", default="forward_kl")]),
        "top k": (d.top_k, k("logits_topk", default=64)),
        "likelihood": (d.ce, 1 - share),
        "temperatures": ((d.temperature, d.teacher_temperature), (warm, warm * k("teacher_temperature", default=1))),
        "prompt": (d.on_prompt, k("distill_on_prompt", default=False)),
        "rows' own completions": (d.on_policy, 0.0),
        "teacher": (c.teacher.path, k("teacher_pretrain")),
        "columns": ((c.data.prompt_column, c.data.completion_column), ("+".join(filter(None, (
            k("question_key", default="question"), k("prompt_key"), k("system_key")))), k("answer_key", default="answer"))),
    }


def roll_on_policy(k, c, version: str) -> dict:
    """ROLL at v0.2.1 and 8eb27cc: utils/functionals.py, compute_advantage (in 0.2 the coefficient is of the mixed mode alone)."""
    return {
        "prompts": (c.data.prompts_per_step, k("rollout_batch_size", default=128)),
        "group": (c.rollout.group_size, k("num_return_sequences_in_group", default=1)),
        "longest": (c.rollout.max_new_tokens, k("response_length")),
        "steps": (c.train.steps, k("max_steps", default=500)),
        "loss": ((c.distill.loss, c.distill.coef), ("sampled", k("teacher.opd_kl_coef", default=1.0))),
        "teacher": (c.teacher.path, k("teacher.model_args.model_name_or_path")),
        "learning rate": (c.optimizer.lr, k("student_train.training_args.learning_rate", default=5e-5)),
        # base_config.py, set_old_logprobs_status: init_kl_coef above 0 has the student's tokens scored by the trainer
        "the student's log-probs": (c.algorithm.old_logprobs, "recompute" if k("init_kl_coef", default=0.2) else "auto"),
        "temperature": ((c.rollout.temperature, c.algorithm.temperature), (
            k("student_infer.generating_args.temperature", default=0.95), 0.0)),  # 0: a teacher is compared at the sampler's
    } | roll_packed(k, c, "student_train.")


def trl_sft(k, c, version: str) -> dict:
    """TRL at v0.17.0 to v1.9.0: trainer/sft_config.py, transformers' TrainingArguments and Trainer (the last batch of a pass is small).
    Of eight processes."""
    warm, share = k("warmup_steps", default=0), k("warmup_ratio", default=0.0)
    rows = k("per_device_train_batch_size", default=8) * k("gradient_accumulation_steps", default=1) * 8
    out = _shared(c, rows, k("max_length", "max_seq_length", default=1024), k("learning_rate", default=2e-5), k("weight_decay", default=0.0),
                  k("max_grad_norm", default=1.0), (k("adam_beta1", default=0.9), k("adam_beta2", default=0.999)),
                  k("lr_scheduler_type", default="linear"), warm, 0.0 if warm else share, k("seed", default=42), k("model_name_or_path"))
    if k("lr_scheduler_type") == "cosine_with_min_lr":
        out["schedule"] = (c.optimizer.schedule, "cosine")
        out["floor"] = (c.optimizer.floor, k("lr_scheduler_kwargs.min_lr_rate"))
    return out | {
        "steps": (c.train.steps or None, k("max_steps") if (k("max_steps") or -1) > 0 else None),
        "last batch": (c.data.drop_last, k("dataloader_drop_last", default=False)),
        "longer rows": (c.data.overlong_completion, "truncate"),
        "adapters": (c.lora.rank, k("lora_r", default=16) if k("use_peft") else 0),
    }


def trl_rloo(k, c, version: str) -> dict:
    """TRL at v0.22.0 to v1.9.0 and 1.10 to 1.16: trainer/rloo_config.py, rloo_trainer.py (_prepare_inputs: a generation batch of
    steps_per_generation batches is used num_iterations times; _generate_and_score_completions: rewards, clamp, KL, baseline; _compute_loss: the
    mean over completions of the clipped ratio of whole ones). Of eight processes."""
    now = tuple(map(int, version.split(".")))
    per, accumulated = k("per_device_train_batch_size", default=8), k("gradient_accumulation_steps", default=1)
    group, again = k("num_generations", default=2), k("num_iterations", default=1)
    whole = k("generation_batch_size") or per * 8 * (k("steps_per_generation") or accumulated)
    several = (whole // (per * 8 * accumulated)) * again > 1
    a, longest = c.algorithm, k("max_prompt_length", default=512 if now < (0, 27) else None)
    loss = ("_loss.py:clipped", "sequence_mean") if several else ("pg", "sequence_sum")
    normalised = "_advantage.py:normalized" if k("normalize_advantages", default=False) else "outcome"
    return {
        "prompts": (c.data.prompts_per_step, whole // group),
        "group": (c.rollout.group_size, group),
        "optimizer steps": ((a.num_minibatches, a.ppo_epochs), (whole // (per * 8 * accumulated), again)),
        "loss": ((re.sub(r".*/\w+(?=_loss)", "", a.policy_loss), a.aggregation), loss),
        "bounds": ((a.clip_low, a.clip_high) if several else (), (k("epsilon", default=0.2), k("epsilon_high") or k("epsilon", default=0.2))
                   if several else ()),
        "advantage": ((re.sub(r".*/\w+(?=_adv)", "", a.advantage), a.advantage_mean, a.advantage_std, a.whiten),
                      (normalised, "leave_one_out", "none", False)),
        "KL": ((a.kl.coef, a.kl.estimator, a.kl.placement), (k("beta", default=0.05), "k1", "reward")),
        "sampler's ratio": (a.mismatch.correction, "none"),
        "longest": ((c.rollout.max_new_tokens, c.data.max_prompt_tokens), (k("max_completion_length", default=256 if now < (1, 10) else 512),
                                                                          longest or 2048)),
        "temperature": (c.rollout.temperature, k("temperature", default=1.0)),
        "learning rate": ((c.optimizer.lr, c.optimizer.schedule), (k("learning_rate", default=1e-6), k("lr_scheduler_type", default="linear"))),
        "masked": (a.mask_truncated, k("mask_truncated_completions", default=False)),
        "clipped rewards": (c.reward.clip, None),
    }


def rlinf_sft(k, c, version: str) -> dict:
    """RLinf at v0.2, v0.3 and a3816b5: runners/sft_runner.py, workers/sft/*.py, hybrid_engines/fsdp (its optimizer is AdamW, its rate that of
    transformers' cosine), hybrid_engines/megatron (OptimizerParamScheduler), data/datasets/vlm/robo2vlm.py."""
    a, o, s = "actor.", "actor.optim.", "actor.lr_sched."
    mega = k(a + "training_backend") == "megatron"
    schedule = k(s + "lr_decay_style", default="constant") if mega else k(o + "lr_scheduler", default="constant")
    warm = k(s + "lr_warmup_iters", default=0) if mega else k(o + "lr_warmup_steps", default=0)
    out = _shared(c, k(a + "global_batch_size"), k("data.max_prompt_length"), k(o + "lr"), k(o + "weight_decay", default=0.01),
                  k(o + "clip_grad", default=1.0), (k(o + "adam_beta1", default=0.9), k(o + "adam_beta2", default=0.999)),
                  schedule, int(warm), 0.0, k(a + "seed", default=1234), k(a + "model.model_path"))
    epochs, steps, every = (k("runner." + n) for n in ("max_epochs", "max_steps", "val_check_interval"))
    if version == "0.2":  # num_steps_per_epoch is 1
        steps, epochs = min(epochs, steps) if steps is not None and steps >= 0 else epochs, -1
    held = not mega and (every or -1) > 0 and k("data.eval_data_paths" if version == "0.2" else "data.val_data_paths")
    decay = k(s + "lr_decay_iters") if mega else k(o + "total_training_steps")
    precision = k(a + "model.precision") if mega else k(a + "fsdp_config.mixed_precision.param_dtype")
    return out | {
        "steps": (c.train.steps or None, steps if (steps or -1) > 0 else None),
        "epochs": (c.data.epochs or None, epochs if epochs > 0 else None if (steps or -1) > 0 else 1),
        "end of the cosine": ((c.optimizer.decay_steps + c.optimizer.warmup_steps, decay) if schedule == "cosine" else (0, 0)),
        "floor": (c.optimizer.floor, 0.0),
        "eps": (c.optimizer.eps, k(o + "adam_eps", default=1e-8)),
        "tensor parallel": (c.mesh.tp, k(a + "model.tensor_model_parallel_size", default=1) if mega else 1),
        "evaluation": ((c.eval.every_steps, c.eval.before, c.eval.after, c.eval.temperature),
                       (every, False, True, 0.0) if held else (0, False, False, 0.0)),
        "checkpoints": (c.checkpoint.every_steps, max(k("runner.save_interval"), 0)),
        "dtype": (c.train.compute_dtype, precision),
        "trained": (c.data.train_turns, "last"),
        "shuffled": ((c.data.shuffle, c.data.seed), (k("data.shuffle", default=True), k("data.seed", default=42))),
        "last batch": (c.data.drop_last, True),
    }


JOBS = {("rlinf", "sft"): rlinf_sft, ("trl", "rloo"): trl_rloo,
        ("verl", "sft"): verl_sft, ("verl", "first_sft"): verl_first_sft, ("skyrl", "sft"): skyrl_sft, ("trl", "sft"): trl_sft,
        **{("areal", job): areal for job in ("sft", "preference", "reward_model")}, ("roll", "sft"): roll_sft,
        ("roll", "preference"): roll_preference, ("roll", "distill"): roll_distill, ("roll", "on_policy_distill"): roll_on_policy}
