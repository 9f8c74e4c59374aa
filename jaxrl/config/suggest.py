"""Names that other libraries use, for messages: what such an option is called here, and what there is instead of what
is missing."""

from __future__ import annotations

import re

# Name there -> option here.
ELSEWHERE = {
    "learning_rate": "optimizer.lr", "lr_scheduler_type": "optimizer.schedule", "warmup_ratio": "optimizer.warmup_fraction",
    "adam_beta1": "optimizer.b1", "adam_beta2": "optimizer.b2", "max_steps": "train.steps", "total_training_steps": "train.steps",
    "num_train_epochs": "data.epochs", "total_epochs": "data.epochs", "batch_size": "data.prompts_per_step",
    "train_batch_size": "data.prompts_per_step", "per_device_train_batch_size": "data.prompts_per_step",
    "ppo_mini_batch_size": "algorithm.num_minibatches", "num_iterations": "algorithm.ppo_epochs",
    "gradient_accumulation_steps": "train.tokens_per_microbatch", "gradient_checkpointing": "model.remat",
    "num_generations": "rollout.group_size", "n_samples_per_prompt": "rollout.group_size",
    "max_prompt_length": "data.max_prompt_tokens", "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens", "max_tokens": "rollout.max_new_tokens", "use_vllm": "rollout.engine",
    "vllm_gpu_memory_utilization": "rollout.vllm.memory_fraction", "gpu_memory_utilization": "rollout.vllm.memory_fraction",
    "kl_coef": "algorithm.kl.coef", "epsilon": "algorithm.clip_low", "epsilon_high": "algorithm.clip_high",
    "loss_type": "algorithm.preset", "adv_estimator": "algorithm.advantage", "scale_rewards": "algorithm.advantage_std",
    "lora_r": "lora.rank", "lora_rank": "lora.rank", "lora_alpha": "lora.alpha", "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.targets", "target_modules": "lora.targets", "use_rslora": "lora.rslora", "use_peft": "lora.rank",
    "init_lora_weights": "lora.init", "layers_to_transform": "lora.layers", "r_pattern": "lora.rank_pattern",
    "exclude_modules": "lora.exclude", "lora_path": "lora.path", "use_lora": "lora.rank",
    "reward_funcs": "reward.functions", "output_dir": "run.dir", "checkpoint_dir": "run.dir", "model_name": "model.path",
    "model_name_or_path": "model.path", "dataset_name": "data.path", "train_files": "data.path", "val_files": "eval.sets",
    "logging_steps": "log.every_steps", "eval_steps": "eval.every_steps", "save_steps": "checkpoint.every_steps",
    "max_assistant_turns": "env.max_turns", "max_tool_response_length": "env.max_observation_tokens",
    "max_tool_calling_iterations": "env.max_turns", "environment_factory": "env.function", "tool_config_path": "env.tools",
    "max_num_steps": "env.max_turns", "max_parallel_calls_per_turn": "env.max_parallel_calls",
    "cpo_alpha": "preference.rpo_alpha",
    "domain_interleave_probs": "data.sources", "interleave_probs": "data.sources", "mixing_weights": "data.sources",
    "enable_dataset_cache": "data.cache", "assistant_only_loss": "data.train_turns",
    "difficulty_low_threshold": "data.pass_rate_min", "difficulty_high_threshold": "data.pass_rate_max",
    "use_dora": "lora.dora",
    "save_total_limit": "checkpoint.keep", "report_to": "log.wandb", "bf16": "train.compute_dtype", "fp16": "train.compute_dtype",
}

# Pattern of one part of a name -> what is not there, and what there is instead.
NOT_YET = (
    (r"qlora(_.*)?|ia3|prefix_tuning|prompt_tuning|adalora|lo?ha|lokr",
     "of adapters there is LoRA, lora.rank, on a base in fp32, bf16 or as lora.base says; model.trainable trains a part of the model"),
    (r"dpo|ipo|kto|orpo|simpo|cpo|preferences|preference_.*|dpo_.*",
     "DPO and its kin are run.recipe=preference with preference.loss=dpo, ipo, kto, orpo ..."),
    (r"online_dpo|nash_md|xpo",
     "online DPO is algorithm.preset=online_dpo, on the best and the worst of a group by a reward; Nash-MD and XPO are not there"),
    (r"ep_size|expert_.*|enable_ep.*",
     "experts are split over mesh.ep, whole ones, and by their width over mesh.tp; their other dimension over mesh.fsdp"),
    (r".+experts?|expert|moe|moe_.*|.*_moe|router_(?!balance$|z$|bias_rate$).*|deepseek.*|gpt_oss|kimi.*",
     "of mixtures of experts there are those of Qwen3-MoE, Qwen2-MoE, OLMoE, Mixtral, GLM-4.5, DeepSeek-V3, gpt-oss, split "
     "over mesh.ep, fsdp and tp"),
    (r"cp_size|context_parallel.*|sp|sp_size|sequence_parallel.*|ulysses.*",
     "rows are split over mesh.cp along their tokens (docs/sharding.md); between layers over mesh.tp, too"),
    (r"pp|pp_size|pipeline.*|num_stages",
     "there are no pipelines of layers: mesh.fsdp, mesh.ep and mesh.tp split a model as far, and run.mode=plan says what fits and "
     "what it costs (docs/plan.md has layouts with pipelines and what stands for them)"),
    (r"quanti[sz].*|load_in_[48]bit|fp8|int8|int4|nf4|awq|gptq|bnb.*|bitsandbytes",
     "of quantised weights there is the frozen base of adapters, lora.base=int8 or nf4; train.matmul rounds what layers "
     "multiply to int8 or fp8; train.compute_dtype and rollout.dtype choose among bf16, fp16 and fp32"),
    (r"images?|image_.*|videos?|audios?|vision.*|vlm|multimodal|pixel_.*",
     "only text is supported"),
)


def not_yet(name: str) -> str | None:
    """What is missing, and what there is instead, if one part of a dotted name asks for something that jaxrl lacks."""
    for part in re.split(r"[./]", name.lower().replace("-", "_")):
        for pattern, answer in NOT_YET:
            if re.fullmatch(pattern, part):
                return answer
    return None
