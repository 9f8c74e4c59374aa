"""TRL's RLOO (`trl rloo`, RLOOTrainer of 0.22 and later): its table, made of GRPO's. See systems/trl.py.

Read from its code at the releases 0.22.0 to 1.16.0. Until 0.21 another trainer had the name, with other keys.
"""

from __future__ import annotations

from jaxrl.migrate.derived import defaults, derived, from_version, selected
from jaxrl.migrate.systems import trl_rloo_meaning as meaning
from jaxrl.migrate.systems.trl import TABLE
from jaxrl.migrate.table import Joint, Key, Since

K = Key
FIRST = "0.22"
SEVERAL = {"num_iterations": 2}
SYNCED = {"ref_model_mixup_alpha": 1.0}
AS_GRPO = (
    "lengths", "batch", "length of the run", "sampling", "engine", "vllm_max_model_length", "optimizer", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "max_grad_norm", "evaluation", "saving", "data", "system_prompt", "dataset_prompt_column", "rewards", "model_name_or_path",
    "model", "trust_remote_code", "gradient_checkpointing", "adapters", "lora_*", "loggers", "memory", "seed", "data_seed", "generation_kwargs.*",
    "variables of the template", "router_aux_loss_coef", "formatting_func", "ref_model", "compute_loss_func", "optimizers",
    "dtype of the reference", "load_best_model_at_end", "benchmarks", "callbacks", "model_init_kwargs.**")
BEFORE = {  # of the trainer before 0.22 -> its name since
    "rloo_k": "num_generations", "cliprange": "epsilon", "kl_coef": "beta", "normalize_reward": "normalize_advantages",
    "num_ppo_epochs": "num_iterations", "num_mini_batches": "steps_per_generation", "total_episodes": "max_steps",
    "response_length": "max_completion_length", "token_level_kl": "", "local_rollout_forward_batch_size": "", "num_sample_generations": "",
    "stop_token": "", "stop_token_id": "", "missing_eos_penalty": "", "sft_model_path": "model_name_or_path",
    "reward_model_path": "reward_model_name_or_path"}
DEFAULTS = {"num_generations": 2, "max_prompt_length": Since(("0.22", 512), ("0.27", None))}

RLOO = derived(TABLE, "rloo", (
    *from_version(defaults(selected(TABLE, *AS_GRPO), DEFAULTS), TABLE.versions, FIRST),
    Joint("loss", (
        K("epsilon", "equivalent", default=0.2, other=0.1, beside=SEVERAL),
        K("epsilon_high", "equivalent", other=0.28, beside=SEVERAL),
        K("mask_truncated_completions", "equivalent", default=False, other=True)), meaning.loss),
    Joint("advantages", (
        K("normalize_advantages", "equivalent", default=False, other=True),
        K("reward_clip_range", "equivalent", other=[-2, 2])), meaning.advantages),
    Joint("KL", (
        K("beta", "equivalent", default=0.05, other=0.0),
        K("sync_ref_model", "equivalent", default=False, other=True, beside=SYNCED),
        K("ref_model_mixup_alpha", "equivalent", default=0.6),
        K("ref_model_sync_steps", "equivalent", default=512, other=64, beside={**SYNCED, "sync_ref_model": True})), meaning.kl),
    Joint("mismatch", (K("use_vllm", "equivalent", default=False, other=True),), meaning.mismatch),
    K("vllm_importance_sampling_*", "unsupported", refuse=True, why="of GRPO: RLOO has no such key"),
    K("vllm_structured_outputs_regex", "unsupported", fine=("",), why="completions are not bound to a pattern",
      also=("vllm_guided_decoding_regex",)),
    *(K(name, "unsupported", refuse=True, why="of the trainer before TRL 0.22, which is not read" + (f"; RLOO has {new}" if new else ""))
      for name, new in BEFORE.items()),
), command=r"rloo", versions=TABLE.versions[TABLE.versions.index(FIRST):], required={"num_processes": 8, "num_generations": 8}, differs=(
    "no weight decay on norms, biases and other vectors (as transformers)",
    "the order of the data is drawn from another generator",
))
