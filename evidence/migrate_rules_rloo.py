"""What configs of TRL's RLOO and RLinf's SFT of images and text mean, by someone who wrote neither reader: rules of migrate_corpus.py
beside those of migrate_rules_jobs.py. They do not look at jaxrl.migrate."""

from __future__ import annotations

PROCESSES = 8  # of TRL, by migrate_corpus.GPUS


def rloo(k, c, version: str) -> dict:
    """TRL at v0.22.0, v1.0.0 and f2cd577: trainer/rloo_config.py, rloo_trainer.py, examples/scripts/rloo.py. A generation is of
    per_device_train_batch_size (transformers' 8) x processes x steps_per_generation completions, an optimizer step of as many as
    gradient_accumulation_steps say. The ratio is that of whole completions, the KL a sum that is taken from the score before the mean of
    the group's others. peft_config=LoraConfig() has PEFT's defaults, and PEFT holds adapters of a base in bf16 in fp32."""
    accumulate, group = k("gradient_accumulation_steps", default=1), k("num_generations", default=2)
    ahead = k("steps_per_generation") or accumulate
    a, o = c.algorithm, c.optimizer
    saved = k("save_steps", default=500)
    return {
        "sequences of a step": (c.data.prompts_per_step * c.rollout.group_size, 8 * PROCESSES * ahead),
        "group": (c.rollout.group_size, group),
        "optimizer steps of a step": (a.ppo_epochs * a.num_minibatches, k("num_iterations", default=1) * ahead // accumulate),
        "longest completion": (c.rollout.max_new_tokens, k("max_completion_length", default=256)),
        "longest prompt": (c.data.max_prompt_tokens, k("max_prompt_length", default=2048)),  # 1.0 and later have no bound
        "longer prompts": (c.data.overlong_prompt, "truncate_left" if version < "1" else "error"),
        "sampling": ((c.rollout.temperature, c.rollout.top_p, c.rollout.top_k, c.rollout.min_p), (1.0, 1.0, -1, 0.0)),
        "advantage": ((a.advantage, a.advantage_mean, a.advantage_std, a.whiten), ("outcome", "leave_one_out", "none", False)),
        "KL": ((a.kl.coef, a.kl.estimator, a.kl.placement), (k("beta", default=0.05), "k1", "reward")),
        "clip": ((a.clip_low, a.clip_high, a.dual_clip or 0.0), (k("epsilon", default=0.2), k("epsilon_high") or k("epsilon", default=0.2), 0.0)),
        "mean": (a.aggregation, "sequence_mean"),
        "cut completions": (a.mask_truncated, k("mask_truncated_completions", default=False)),
        "correction": (a.mismatch.correction, "none"),
        "learning rate": (o.lr, k("learning_rate", default=1e-6)),
        "schedule": ((o.schedule, o.warmup_steps, o.warmup_fraction, o.floor), ("linear", 0, 0.0, 0.0)),
        "optimizer": ((o.name, o.b1, o.b2, o.eps, o.weight_decay, o.max_grad_norm), ("adamw", 0.9, 0.999, 1e-8, 0.0, 1.0)),
        "epochs": (c.data.epochs, 3),
        "adapters": ((c.lora.rank, c.lora.alpha, c.lora.targets, c.lora.dropout), (8, 8.0, ("q_proj", "v_proj"), 0.0)),
        "dtypes": ((c.train.param_dtype, c.train.compute_dtype, c.lora.base_dtype), ("fp32", "bf16", "auto")),
        "checkpoints": (c.checkpoint.every_steps, saved * accumulate // ahead),
        "engine": ((c.rollout.engine, c.rollout.vllm.memory_fraction), ("vllm", k("vllm_gpu_memory_utilization", default=0.3))),
        "seed": (c.run.seed, 42),
    }


def sft_of_pictures(k, c, version: str) -> dict:
    """RLinf at v0.2 and a3816b5: runners/sft_runner.py (max_epochs counts steps at v0.2), workers/sft/fsdp_sft_worker.py,
    megatron_vlm_sft_worker.py, hybrid_engines/fsdp/fsdp_model_manager.py. Steps of global_batch_size rows; transformers' cosine ends at
    total_training_steps, its warm-up among them; only FSDP's worker evaluates, on val_data_paths (v0.2:
    eval_data_paths)."""
    mega = k("actor.training_backend") == "megatron"
    o, p, s = c.optimizer, "actor.optim.", "actor.lr_sched."
    most, passes = k("runner.max_steps", default=-1), k("runner.max_epochs", default=-1)
    if version == "0.2":
        most, passes = passes if most < 0 else min(most, passes), -1
    warm = k(s + "lr_warmup_iters") if mega else k(p + "lr_warmup_steps")
    whole = k(s + "lr_decay_iters") if mega else k(p + "total_training_steps")
    held = not mega and k("data.eval_data_paths" if version == "0.2" else "data.val_data_paths") is not None and k("runner.val_check_interval") > 0
    return {
        "rows of a step": (c.data.prompts_per_step, k("actor.global_batch_size")),
        "steps": (c.train.steps or 0, max(most, 0)),
        "epochs": (c.data.epochs if passes > 0 else 0, max(passes, 0)),
        "learning rate": (o.lr, k(p + "lr")),
        "warm-up": (o.warmup_steps, warm),
        "schedule": (o.schedule, k(s + "lr_decay_style") if mega else k(p + "lr_scheduler")),
        "updates of the decay": (o.decay_steps, whole - warm),
        "floor": (o.floor, k(s + "min_lr", default=0.0) / k(p + "lr") if mega else 0.0),
        "optimizer": ((o.name, o.b1, o.b2, o.eps, o.weight_decay, o.max_grad_norm),
                      ("adamw", k(p + "adam_beta1"), k(p + "adam_beta2"), k(p + "adam_eps"), k(p + "weight_decay"), k(p + "clip_grad"))),
        "columns": ((c.data.prompt_column, c.data.completion_column, c.data.image_column), ("prompt", "completion", "images")),
        "learnt": (c.data.train_turns, "last"),
        "evaluation": (c.eval.every_steps, k("runner.val_check_interval") if held else 0),
        "checkpoints": (c.checkpoint.every_steps, k("runner.save_interval")),
        "order": ((c.data.shuffle, c.data.seed, c.data.drop_last), (True, k("data.seed", default=42), True)),
        "parallel": ((c.mesh.tp, c.mesh.ep), (k("actor.model.tensor_model_parallel_size", default=1) if mega else 1,
                                              k("actor.model.expert_model_parallel_size", default=1) if mega else 1)),
        "no adapters": (c.lora.rank, 0),
    }


AGAIN = {("trl", "rloo"): rloo, ("rlinf", "sft"): sft_of_pictures}
