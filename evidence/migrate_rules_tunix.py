"""What keys of Tunix mean, from its code at c7d8950: cli/config.py, cli/base_rl_pipeline.py, rl/grpo/grpo_learner.py,
rl/ppo/ppo_learner.py, rl/algo_core.py, rl/rl_learner.py and optax. Written beside the reader, by its author. What a script leaves to a
file that it names (override_config_file), or to awk, is not compared: the independent reader has the script's own words alone."""

from __future__ import annotations

import ast


def tunix(k, c, version: str) -> dict:
    """what -> (ours, theirs)."""
    partly = "override_config_file" in k.keys
    ppo = "ppo_main" in str(k.raw("python -m", "")) or any(name.startswith("ppo_config.") for name in k.keys)
    agentic = str(k("training_mode", default="")).startswith("agentic")
    own = "ppo_config." if ppo else "agentic_grpo_config." if agentic else "grpo_config."
    opt = "rl_training_config.actor_optimizer_config."

    def of(*names, default=None):
        return k(*names, default=None if partly else default)

    prompts, group = of("batch_size", default=16), 1 if ppo else of(own + "num_generations", default=2)
    mini = k("rl_training_config.mini_batch_size") or prompts
    kl = {"kl": 0.0}.get(of(own + "kl_loss_mode", default="kl"), of(own + "beta", default=0.04 if agentic else 0.08))
    lr = of(opt + "peak_value") if k(opt + "schedule_type") else of(opt + "learning_rate")
    rows = {
        "prompts": (c.data.prompts_per_step, prompts),
        "group": (c.rollout.group_size, group),
        "mini-batches": (c.algorithm.num_minibatches, prompts and prompts / mini),
        "passes": (c.algorithm.ppo_epochs, of(own + "num_iterations", default=1)),
        "prompt": (c.data.max_prompt_tokens, of("rollout_config.max_prompt_length", default=256)),
        "longest": (c.rollout.max_new_tokens, of("rollout_config.total_generation_steps", default=768)),
        "temperature": (c.rollout.temperature, of("rollout_config.temperature", default=0.9)),
        "its loss's": (c.algorithm.temperature, 0.0),
        "top_k": (c.rollout.top_k, of("rollout_config.top_k", default=50)),
        "lr": (c.optimizer.lr, lr),
        "b2": (c.optimizer.b2, of(opt + "b2", default=0.999)),
        "weight decay": (c.optimizer.weight_decay, of(opt + "weight_decay", default=1e-4)),
        "clip of gradients": (c.optimizer.max_grad_norm, 0.0),
        "clip": (c.algorithm.clip_low, of(own + "epsilon", default=0.2)),
        "dual clip": (c.algorithm.dual_clip, k(own + "epsilon_c") or 0.0),
        "KL": (c.algorithm.kl.coef, of(own + "beta", default=0.08) if ppo else kl if not partly else None),
        "advantage": (c.algorithm.advantage, "gae" if ppo else "outcome"),
        "whitened": (c.algorithm.whiten, ppo),
        "LoRA": (c.lora.rank, of("actor_model_config.lora_config.rank")),
        "seed": (c.run.seed, of("model_config.rng_seed", default=0)),
        "model": (c.model.path, of("model_config.model_id", default="meta-llama/Llama-3.1-8B")),
    }
    if shape := k.raw("actor_model_config.mesh.shape") or k.raw("model_config.mesh.shape"):
        axes = ast.literal_eval(str(k.raw("actor_model_config.mesh.axis_names", k.raw("model_config.mesh.axis_names", "('fsdp','tp')"))).strip("\"'"))
        sizes = dict(zip(axes, ast.literal_eval(str(shape).strip("\"'")), strict=False))
        rows["tp"] = (c.mesh.tp, sizes.get("tp", 1))
    return {name: pair for name, pair in rows.items() if pair[1] is not None and "awk" not in str(pair[1])}
