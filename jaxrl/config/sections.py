"""What the groups of options are about, and headings within the larger ones: for `--help=GROUP` and
docs/reference/options.md."""

from __future__ import annotations

GROUPS = {
    "run": "what to do, where to write, seeds, resume",
    "model": "the policy: weights, tokenizer, attention, what trains",
    "lora": "adapters: rank, targets, quantised base, adapter sets",
    "mesh": "devices: replicas, shards, long rows, experts, roles",
    "data": "prompts and rows: files, columns, lengths, mixing, order",
    "rollout": "completions: engine, sampling, lengths; rollout.vllm: servers",
    "env": "episodes of several turns: environments, tools, limits",
    "sandbox": "where programs written by the model run",
    "reward": "reward functions, judges, services, shaping",
    "reward_model": "training a reward model on pairs (run.recipe=reward_model)",
    "algorithm": "preset, advantages, policy loss, clipping, KL, mismatch",
    "preference": "DPO and its relatives (run.recipe=preference)",
    "critic": "the value model of PPO and its relatives",
    "reference": "the reference policy of KL terms and preferences",
    "distill": "learning from a teacher's log-probs (run.recipe=distill)",
    "teacher": "the teacher's model",
    "optimizer": "optimizer, learning rate, schedule, clipping of gradients",
    "train": "steps, precision, tokens per microbatch, what ends a run",
    "eval": "held-out sets, how often, how they are sampled",
    "checkpoint": "how often, how many, exports, uploads",
    "log": "console, TensorBoard, W&B, report, rollouts on disk",
    "plan": "devices to plan for (run.mode=plan)",
    "profile": "traces of steps and of device memory",
    "launch": "how the processes of a run find each other",
    "record": "what a step leaves for replay",
    "replay": "recorded steps computed again (run.mode=replay, explain)",
    "fork": "a run that begins at a step of another",
    "certify": "claims about your own code, tested (run.mode=certify)",
    "faults": "faults to inject, for tests",
    "user": "options of your own, read by your files",
}

# group -> {its first option: what this and the next ones are about}
SECTIONS = {
    "model": {
        "path": "weights, config, tokenizer",
        "scan_layers": "how it is computed",
        "trainable": "what trains",
    },
    "data": {
        "path": "files and sources",
        "prompt_column": "columns",
        "image_column": "images",
        "system_prompt": "the text of a prompt",
        "prompts_per_step": "how many rows, how long",
        "difficulty": "which rows, in what order",
        "bad_rows": "reading",
    },
    "rollout": {
        "engine": "engine",
        "group_size": "completions",
        "temperature": "sampling",
        "stop": "where a completion ends",
        "slots": "memory and speed of the embedded sampler",
        "timeout_seconds": "beside training",
        "servers": "engines, their hosts and weights",
        "vllm.replicas": "vLLM: servers",
        "vllm.host": "vLLM: addresses and weights",
        "vllm.setup_seconds": "vLLM: waiting and failures",
    },
    "env": {
        "function": "what an episode is made of",
        "options": "what the policy sees and what it trains on",
        "workers": "workers",
        "in_flight": "limits of episodes",
        "step_seconds": "waiting and failures",
    },
    "reward": {
        "functions": "functions",
        "workers": "workers",
        "zero_without_end": "shaping",
        "model.path": "a reward model",
        "remote.servers": "services: requests",
        "remote.score_key": "services: scores",
        "remotes": "services: further ones",
        "judge.servers": "judges: requests",
        "judge.pattern": "judges: scores",
        "judge.concurrency": "judges: waiting and failures",
        "judge.labelled": "judges: agreement, servers of their own",
    },
    "algorithm": {
        "preset": "preset",
        "advantage": "advantages",
        "policy_loss": "policy loss and clipping",
        "m2_threshold": "tokens that add no policy loss",
        "temperature": "temperature and means",
        "kl.coef": "KL to the reference",
        "entropy_coef": "further terms of the loss",
        "dynamic_sampling": "which completions are used",
        "sampled_support": "what is kept from sampling",
        "early_stop_ratio": "updates of a batch",
        "mismatch.correction": "mismatch of sampler and trainer",
        "mask_truncated": "completions without an end",
    },
    "train": {
        "steps": "length of a run",
        "tokens_per_microbatch": "microbatches and rows",
        "compute_dtype": "precision",
        "stop_on_divergence": "what ends a run early",
        "param_dtype": "parameters and memory",
        "loss_on_prompt": "further terms of the loss",
    },
    "eval": {
        "sets": "which sets, when",
        "max_rows": "how they are sampled",
        "rewards": "what is counted",
    },
    "checkpoint": {
        "dir": "checkpoints",
        "export_every_steps": "exports",
        "upload.to": "uploads",
    },
    "lora": {
        "rank": "adapters",
        "init": "how they begin",
        "publish": "what engines and exports get",
        "adapters": "several adapters, the base",
    },
    "optimizer": {
        "name": "optimizer",
        "schedule": "schedule",
        "offload": "memory, learning rates of groups, failures",
    },
}


def headings() -> dict[str, str]:
    """Returns the heading that stands before an option: dotted name -> `group: what the next options are about`."""
    return {f"{group}.{first}": f"{group}: {title}" for group, sections in SECTIONS.items()
            for first, title in sections.items()}
