"""What keys of TRL mean together: the joint rules of its table. See systems/trl.py."""

from __future__ import annotations

import math
import re

from jaxrl.migrate import common, devices
from jaxrl.migrate.source import Unreadable, switch
from jaxrl.migrate.table import Migration
from jaxrl.processes.addresses import join_host_port

# names of models that have experts
EXPERTS = r"(?i)[-_]a\d+(\.\d+)?b\b|moe|mixtral|gpt-oss|deepseek-(v[23]|r1(?!-distill))|moonlight|kimi"


def before(m: Migration, version: str) -> bool:
    """Whether the job's TRL version is older than `version`."""
    return [int(n) for n in m.version.split(".")] < [int(n) for n in version.split(".")]


def processes(m: Migration) -> int:
    """Returns the number of processes that train, num_processes or else --gpus, and makes it m.gpus and a fact of the
    report. Raises Unreadable where neither is given."""
    if not m.given("num_processes") and not m.gpus:
        raise Unreadable(
            m.table.name,
            "num_processes",
            "is not set, and batches are completions per process: give --gpus=N, the processes that train (without the "
            "GPUs of vLLM in server mode)",
        )
    devices.count_gpus(m, m.integer("num_processes") if m.given("num_processes") else 0)
    apart = m.flag("use_vllm") and m.text("vllm_mode") == "server"
    m.facts["GPUs"] = f"{m.gpus} that train; vLLM has its own" if apart else m.gpus
    return m.gpus


def batch(m: Migration):
    """Sets data.prompts_per_step, rollout.group_size, algorithm.num_minibatches and algorithm.ppo_epochs
    (num_iterations).

    Batches are completions per process: a generation batch, a step of jaxrl, is per_device x processes x
    steps_per_generation of them, an optimizer step per_device x processes x gradient_accumulation_steps. Batches that
    are no whole numbers of groups or do not divide refuse the job, as do steps_per_generation and generation_batch_size
    together. Before TRL 1.10 dapo and cispo with several optimizer steps leave a known difference. Raises Unreadable as
    `processes`."""
    per, accumulated = m.integer("per_device_train_batch_size"), m.integer("gradient_accumulation_steps")
    group, count = m.integer("num_generations"), processes(m)
    steps, whole = m.integer("steps_per_generation"), m.integer("generation_batch_size")
    if steps and whole:
        m.lacks("steps_per_generation", "TRL refuses it beside generation_batch_size", refuse=True)
        return
    whole = whole or per * count * (steps or accumulated)
    step, keys = (
        per * count * accumulated,
        ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes"),
    )
    if whole % group or step % group or whole % step:
        m.lacks(
            "num_generations" if whole % group or step % group else "generation_batch_size",
            f"{whole} completions are generated at once and {step} make an optimizer step: neither is a whole "
            f"number of groups of {group}, or they do not divide",
            refuse=True,
        )
        return
    bigger = [k for k in ("generation_batch_size", "steps_per_generation") if m[k]]
    common.batch(m, whole // group, group, (*keys, *bigger, "num_generations"), "num_generations")
    m.set("algorithm.num_minibatches", whole // step, *keys, *bigger)
    if whole > step and m.text("loss_type") in ("dapo", "cispo") and before(m, "1.10"):
        m.differs(
            f"before 1.10 TRL divides the loss of an optimizer step by the tokens of all {whole // step} of a "
            f"generation batch: its gradient is 1/{whole // step} of the one here, which AdamW undoes and "
            "optimizer.max_grad_norm sees"
        )
    m.set("algorithm.ppo_epochs", m.integer("num_iterations"), "num_iterations")
    m.facts["optimizer steps per step"] = updates(m)


def updates(m: Migration) -> int:
    """Returns the optimizer steps, which TRL counts as steps, of one jaxrl step: algorithm.num_minibatches times
    algorithm.ppo_epochs as set so far, 1 each where they are not."""
    found = [m.options.get(f"algorithm.{n}", (1, ()))[0] for n in ("num_minibatches", "ppo_epochs")]
    return found[0] * found[1]


def in_steps(m: Migration, key: str, count: int) -> int:
    """Returns `count` optimizer steps as steps of jaxrl, rounded, at least one; a known difference, by `key`, where
    they are no whole number."""
    ours = max(round(count / updates(m)), 1)
    if ours * updates(m) != count:
        m.differs(f"{key}={count} optimizer steps are {ours} steps of {updates(m)}")
    return ours


def length_of_run(m: Migration):
    """Sets train.steps by max_steps if it is above 0, else data.epochs by num_train_epochs. A fraction of an epoch is
    rounded up and recorded as not carried over."""
    steps, epochs = m.integer("max_steps"), m.number("num_train_epochs")
    if steps and steps > 0:
        m.set("train.steps", in_steps(m, "max_steps", steps), "max_steps")
        m.mark("num_train_epochs", "inert", "max_steps wins")
    elif epochs != int(epochs):
        m.lacks("num_train_epochs", "passes over the data are whole here: rounded up")
        m.set("data.epochs", math.ceil(epochs), "num_train_epochs")
    else:
        m.set("data.epochs", int(epochs), "num_train_epochs")


def lengths(m: Migration):
    """Sets rollout.max_new_tokens, and data.max_prompt_tokens with data.overlong_prompt=truncate_left. Without a
    max_prompt_length it is 2048 and longer prompts are an error, which is a known difference."""
    longest = m.integer("max_prompt_length")
    m.set("rollout.max_new_tokens", m.integer("max_completion_length"), "max_completion_length")
    if longest:
        m.set("data.max_prompt_tokens", longest, "max_prompt_length")
        m.set("data.overlong_prompt", "truncate_left", "max_prompt_length")
    else:
        m.set("data.overlong_prompt", "error", "max_prompt_length")
        m.set("data.max_prompt_tokens", 2048, "max_prompt_length")
        m.differs("prompts have no bound in TRL: here one of more than data.max_prompt_tokens=2048 tokens is an error")


OF_GRPO = (  # keys that RLOO has not
    "loss_type",
    "importance_sampling_level",
    "scale_rewards",
    "delta",
    "top_entropy_quantile",
    "use_bias_correction_kl",
    "vllm_importance_sampling_correction",
    "multi_objective_aggregation",
    "off_policy_mask_threshold",
    "tools",
)
LOSSES = {  # loss_type -> (loss, aggregation)
    "grpo": ("clip", "sequence_mean"),
    "bnpo": ("clip", "token_mean"),
    "dapo": ("clip", "token_mean"),
    "dr_grpo": ("clip", "constant"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "sequence_mean"),
}


def loss(m: Migration):
    """Sets GRPO's loss: algorithm.policy_loss and aggregation by loss_type, the bounds or temperatures that this loss
    reads, algorithm.ratio, advantage_std, mask_truncated and the entropy's options.

    An unknown loss_type refuses the job and sets nothing; a top_entropy_quantile other than 1 refuses it, too. A file
    that may be RLOO's leaves a known difference. Raises Unreadable for an unknown scale_rewards."""
    name = m.text("loss_type")
    if name not in LOSSES:
        m.lacks(
            "loss_type",
            f"{name!r} is none of {', '.join(LOSSES)}; a loss of your own is a function (docs/guides/extend.md)",
            refuse=True,
        )
        return
    if not m.command and not any(m.given(key) for key in OF_GRPO):
        m.differs(
            "the file names no trainer and has no key of GRPO alone: it is read as one of GRPO; if it is of RLOO, read "
            "it with `jaxrl migrate trl/rloo`"
        )
    kind, aggregation = LOSSES[name]
    m.set("algorithm.policy_loss", kind, "loss_type")
    if name == "bnpo":
        common.token_mean(m, m.integer("per_device_train_batch_size"), "loss_type", "per_device_train_batch_size")
    else:
        m.set("algorithm.aggregation", aggregation, "loss_type")
    if aggregation == "constant":
        m.set(
            "algorithm.aggregation_constant", m.integer("max_completion_length"), "max_completion_length", "loss_type"
        )
    level = m.choice(
        "importance_sampling_level", {"token": "token", "sequence": "sequence", "sequence_token": "sequence_token"}
    )
    m.set("algorithm.ratio", level or "token", "importance_sampling_level")
    low, high = m.number("epsilon"), m.number("epsilon_high")
    if kind == "clip":
        m.set("algorithm.clip_low", low, "epsilon")
        m.set("algorithm.clip_high", low if high is None else high, "epsilon" if high is None else "epsilon_high")
        m.set("algorithm.delta", m.number("delta") or 0.0, "delta")
        m.facts["clip"] = f"{1 - low:g} to {1 + (low if high is None else high):g}"
    elif kind == "cispo":
        m.set("algorithm.cispo_max_ratio", low if high is None else high, "epsilon" if high is None else "epsilon_high")
    else:
        m.set("algorithm.sapo_tau_pos", m.number("sapo_temperature_pos"), "sapo_temperature_pos")
        m.set("algorithm.sapo_tau_neg", m.number("sapo_temperature_neg"), "sapo_temperature_neg")
    scale = {"group": "group", "batch": "batch", "none": "none", "true": "group", "false": "none"}
    text = str(m["scale_rewards"]).lower()
    if text not in scale:
        raise m.wrong("scale_rewards", "group, batch or none")
    m.set("algorithm.advantage_std", scale[text], "scale_rewards")
    m.set("algorithm.mask_truncated", m.flag("mask_truncated_completions"), "mask_truncated_completions")
    quantile = m.number("top_entropy_quantile")
    if quantile != 1:
        m.lacks("top_entropy_quantile", "all tokens are trained, not those of highest entropy alone", refuse=True)
    _entropy(m)


def _entropy(m: Migration):
    if m.flag("use_adaptive_entropy"):
        m.set("algorithm.entropy_target", m.number("entropy_target"), "entropy_target", "use_adaptive_entropy")
        m.set("algorithm.entropy_max", m.number("entropy_coef_max"), "entropy_coef_max")
        m.set("algorithm.entropy_rate", m.number("entropy_coef_delta"), "entropy_coef_delta")
    else:
        m.set("algorithm.entropy_coef", m.number("entropy_coef"), "entropy_coef")


def kl(m: Migration):
    """Sets algorithm.kl.* by beta: k3 in the loss, with use_bias_correction_kl k3_unbiased; and as
    `synced_reference`."""
    unbiased = m.flag("use_bias_correction_kl")
    common.kl(m, m.number("beta"), "k3_unbiased" if unbiased else "k3", "loss", "beta", "use_bias_correction_kl")
    synced_reference(m)


def synced_reference(m: Migration):
    """Sets reference.reset_steps if sync_ref_model is on, beta is not 0 and ref_model_mixup_alpha is 1; another
    ref_model_mixup_alpha, which mixes the reference, is recorded as not carried over."""
    if m.number("beta") and m.flag("sync_ref_model"):
        if m.number("ref_model_mixup_alpha") == 1:
            m.set(
                "reference.reset_steps",
                in_steps(m, "ref_model_sync_steps", m.integer("ref_model_sync_steps")),
                "sync_ref_model",
                "ref_model_sync_steps",
            )
        else:
            m.lacks(
                "ref_model_mixup_alpha",
                "the reference becomes the policy (reference.reset_steps), or stays; it is not mixed",
            )


MODES = {
    "token_truncate": "token_tis",
    "token_mask": "token_mis",
    "sequence_truncate": "sequence_tis",
    "sequence_mask": "sequence_mis",
}


def mismatch(m: Migration):
    """Sets algorithm.mismatch.correction, with its cap and low, by vllm_importance_sampling_*; none without use_vllm
    and before TRL 0.23. off_policy_mask_threshold sets algorithm.mismatch.sequence_delta.

    Recorded as not carried over are an unknown mode, with which nothing is set, a missing upper bound, for which the
    cap is 1000, and a lower bound of weights that are truncated."""
    v = "vllm_importance_sampling_"
    if m.flag("use_vllm") and not before(m, "0.23") and m.flag(v + "correction"):
        mode = m.choice(v + "mode", MODES)
        if mode is None:
            return
        m.set("algorithm.mismatch.correction", mode, v + "correction", v + "mode", "use_vllm")
        cap = m.number(v + "clip_max")
        if cap is None:
            m.lacks(v + "clip_max", "a weight without a bound above: the bound is 1000")
        m.set("algorithm.mismatch.cap", 1000.0 if cap is None else cap, v + "clip_max")
        low = m.number(v + "clip_min")
        if low and mode.endswith("_mis"):
            m.set("algorithm.mismatch.low", low, v + "clip_min")
        elif low:
            m.lacks(v + "clip_min", "weights that are truncated have a bound above alone")
    else:
        m.set("algorithm.mismatch.correction", "none", v + "correction", "use_vllm")
    threshold = m.number("off_policy_mask_threshold")
    if threshold:
        m.set("algorithm.mismatch.sequence_delta", threshold, "off_policy_mask_threshold")


def sampling(m: Migration):
    """Sets rollout.temperature, top_p (null: 1), top_k (null and 0: -1, all), min_p and, where it is not 1,
    repetition_penalty with rollout.penalties_in_training. The report's facts have the first three."""
    m.set("rollout.temperature", m.number("temperature"), "temperature")
    m.set("rollout.top_p", 1.0 if m["top_p"] is None else m.number("top_p"), "top_p")
    m.set("rollout.top_k", int(m.number("top_k") or -1), "top_k")
    m.set("rollout.min_p", m.number("min_p") or 0.0, "min_p")
    penalty = m.number("repetition_penalty")
    if penalty != 1:
        m.set("rollout.repetition_penalty", penalty, "repetition_penalty")
        m.set("rollout.penalties_in_training", True, "repetition_penalty")
    m.facts["sampling"] = f"temperature {m['temperature']}, top_p {m['top_p']}, top_k {m['top_k']}"


def engine(m: Migration):
    """Translates use_vllm and TRL's vLLM options. Without use_vllm nothing is set, and there is a known difference.

    vllm_mode=colocate sets servers on the trainer's GPUs in turns with it (`devices.engine`) and
    rollout.vllm.memory_fraction. Else rollout.engine=vllm is set, and rollout.servers where the file names a server,
    and the user is asked for servers of `vllm serve`, or GPUs."""
    if not m.flag("use_vllm"):
        m.differs("completions come from jaxrl's engine (rollout.engine=auto), not from generate() of transformers")
        return
    if m.text("vllm_mode") == "colocate":
        tp = m.integer("vllm_tensor_parallel_size")
        devices.engine(
            m,
            "vllm",
            "use_vllm",
            tp=tp,
            engines=max(m.gpus // tp, 1),
            nodes=1,
            gpus=m.gpus,
            colocated=True,
            keys=("vllm_mode", "vllm_tensor_parallel_size", "num_processes"),
        )
        m.set("rollout.vllm.memory_fraction", m.number("vllm_gpu_memory_utilization"), "vllm_gpu_memory_utilization")
        return
    m.set("rollout.engine", "vllm", "use_vllm", "vllm_mode")
    host = m.text("vllm_server_host")
    if m.text("vllm_server_base_url"):
        m.set("rollout.servers", (m.text("vllm_server_base_url"),), "vllm_server_base_url")
    elif m.given("vllm_server_host"):
        host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        m.set(
            "rollout.servers",
            (f"http://{join_host_port(host, m.integer('vllm_server_port'))}",),
            "vllm_server_host",
            "vllm_server_port",
        )
    m.needs(
        "vLLM has GPUs of its own: `trl vllm-serve` is not spoken to; name servers of `vllm serve` in "
        "rollout.servers (docs/guides/vllm.md), or GPUs in rollout.vllm.devices"
    )


def optimizer(m: Migration):
    """Sets optimizer.lr, the schedule and its warm-up, optimizer.floor by min_lr or min_lr_rate, and optimizer.name. A
    warmup_steps between 0 and 1 is a share of the run, one of 1 or more wins over warmup_ratio. An unknown schedule or
    optimizer (adamw is then set) and other lr_scheduler_kwargs are recorded as not carried over."""
    m.set("optimizer.lr", m.number("learning_rate"), "learning_rate")
    warmup, share = m.number("warmup_steps") or 0, m.number("warmup_ratio") or 0
    if 0 < warmup < 1:
        warmup, share = 0, warmup
    if warmup:
        share = 0
    common.schedule(
        m,
        "lr_scheduler_type",
        m.text("lr_scheduler_type"),
        warmup,
        share,
        "lr_scheduler_type",
        "warmup_steps",
        "warmup_ratio",
    )
    for s in m.all("lr_scheduler_kwargs.*"):
        if s.key.endswith((".min_lr_rate", ".min_lr")):
            value = float(s.value) if s.key.endswith("rate") else float(s.value) / m.number("learning_rate")
            m.set("optimizer.floor", value, s.key)
        else:
            m.lacks(s.key, "of schedules there are shapes, a floor and decay_steps")
    names = {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_hf": "adamw",
        "adamw": "adamw",
        "sgd": "sgd",
        "adafactor": "adafactor",
        "lion_32bit": "lion",
    }
    name = m.choice("optim", names)
    m.set("optimizer.name", name or "adamw", "optim")


def evaluation(m: Migration):
    """Sets eval.every_steps or eval.every_epochs, eval.before, eval.after and, unless eval_strategy is no,
    eval.temperature, eval.samples and eval.sets. Steps are optimizer steps there, a share of the run below 1."""
    kind, every = m.text("eval_strategy") or "no", m.number("eval_steps") or m.number("logging_steps")
    keys = ("eval_strategy", "eval_steps")
    said = "none" if kind == "no" else "every epoch, as training"
    if kind == "steps":
        said = f"every {_every(m, 'eval_steps', every, 'eval.every_steps', *keys)}, as training"
    else:
        m.set("eval.every_steps", 0, *keys)
    m.set("eval.before", m.flag("eval_on_start") and kind != "no", "eval_on_start", "eval_strategy")
    m.set("eval.after", kind == "epoch", "eval_strategy")
    if kind == "epoch":
        m.set("eval.every_epochs", 1.0, "eval_strategy")
    m.facts["evaluation"] = said
    if kind != "no":
        m.set("eval.temperature", m.number("temperature"), "temperature")
        m.set("eval.samples", m.integer("num_generations_eval") or m.integer("num_generations"), "num_generations_eval")
        if m.text("dataset_name"):
            split = m.text("dataset_test_split")
            m.set("eval.sets", (f"test={m.text('dataset_name')}@{split}",), "dataset_name", "dataset_test_split")


def _every(m: Migration, key: str, every: float, option: str, *keys: str) -> str:
    """Sets `option` to a number of steps; below 1 it is a share of the run, of max_steps or of its epochs."""
    whole, passes = m.integer("max_steps") or 0, m.number("num_train_epochs")
    if not 0 < every < 1:
        m.set(option, in_steps(m, key, int(every)), *keys)
        return f"{every:g} steps"
    if whole > 0:
        m.set(option, in_steps(m, key, math.ceil(whole * every)), *keys, "max_steps")
        return f"{math.ceil(whole * every)} steps"
    m.set(option, 0, *keys)
    m.set(option.replace("_steps", "_epochs"), every * passes, *keys, "num_train_epochs")
    return f"{every * passes:g} epochs"


def saving(m: Migration):
    """Sets checkpoint.every_steps or every_epochs (every_minutes=0), checkpoint.keep (-1 = all), run.dir,
    checkpoint.upload.to and run.resume. The user is asked for the owner of hub_model_id, and for the model where a
    TRL checkpoint is to be resumed."""
    kind, every = m.text("save_strategy"), m.number("save_steps")
    if kind == "steps":
        _every(m, "save_steps", every, "checkpoint.every_steps", "save_strategy", "save_steps")
    else:
        m.set("checkpoint.every_steps", 0, "save_strategy", "save_steps")
    m.set("checkpoint.every_minutes", 0.0, "save_strategy")
    if kind == "epoch":
        m.set("checkpoint.every_epochs", 1.0, "save_strategy")
    keep = m.integer("save_total_limit")
    m.set("checkpoint.keep", keep if keep and keep > 0 else -1, "save_total_limit")
    if m.text("output_dir"):
        m.set("run.dir", m.text("output_dir").rstrip("/"), "output_dir")
    if m.flag("push_to_hub"):
        if "/" in m.text("hub_model_id"):
            m.set("checkpoint.upload.to", ("hf://" + m.text("hub_model_id"),), "push_to_hub", "hub_model_id")
        else:
            m.needs(
                "push_to_hub without an owner in hub_model_id: name owner/name in checkpoint.upload.to=hf://owner/name"
            )
    at = switch(m["resume_from_checkpoint"])
    if at is not None:
        m.set("run.resume", "auto" if at else "never", "resume_from_checkpoint")
        if at and isinstance(at, str):
            m.needs("resume_from_checkpoint: TRL's checkpoints are not read; name the folder in model.path")


def data(m: Migration):
    """Sets data.path, data.subset, data.split, data.shuffle and data.answer_column=solution. Without dataset_name the
    user is asked for data.path."""
    common.data_files(m, [m["dataset_name"]], "dataset_name")
    if not m.text("dataset_name"):
        m.needs("data.path: the source names no data set (dataset_name)")
    if m.text("dataset_config"):
        m.set("data.subset", m.text("dataset_config"), "dataset_config")
    m.set("data.split", (m.text("dataset_train_split"),), "dataset_train_split")
    m.set("data.shuffle", m.flag("shuffle_dataset"), "shuffle_dataset")
    m.set("data.answer_column", "solution", "reward_funcs")


def model(m: Migration):
    """Sets train.param_dtype by dtype, train.compute_dtype by bf16 and fp16 (else accelerate's mixed_precision),
    model.revision and model.chat_template. bf16 is on by default from TRL 0.19."""
    dtype = {"float32": "fp32", "bfloat16": "bf16", "auto": "", "": "", "float16": ""}.get(m.text("dtype").lower(), "")
    if dtype:
        m.set("train.param_dtype", dtype, "dtype")
    bf16 = m["bf16"]
    fp16 = m.flag("fp16")
    bf16 = (not before(m, "0.19") and not fp16) if bf16 is None else m.flag("bf16")
    compute = "fp16" if fp16 else "bf16" if bf16 else "fp32"
    launched = m.text("mixed_precision").strip("'\"")
    if compute == "fp32" and launched in ("fp16", "bf16"):  # where the trainer has none accelerate's counts
        m.set("train.compute_dtype", launched, "mixed_precision", "bf16", "fp16")
    else:
        m.set("train.compute_dtype", compute, "bf16", "fp16")
    revision = m.text("model_revision")
    if revision and revision != "main":
        m.set("model.revision", revision, "model_revision")
    if m.text("chat_template_path"):
        common.chat_template(m, "chat_template_path")
    if m.text("chat_template"):
        m.files[f"{m.name}_template.jinja"] = m.text("chat_template")
        m.set("model.chat_template", f"{m.name}_template.jinja", "chat_template")


def reference_dtype(m: Migration):
    """Sets reference.dtype where the job has a reference, which is loaded as the policy is (dtype, else float32) and
    computes as it does (`common.frozen_dtype`)."""
    common.frozen_dtype(m, "reference.dtype", *common.of(m, "train.compute_dtype"), held=m.text("dtype") or "float32")


def routers(m: Migration):
    """Leaves a known difference for TRL's loss that spreads tokens over experts, where its default is on and the
    model's name is one of a model with experts; a router_aux_loss_coef other than the default and 0 is recorded as not
    carried over."""
    key = "router_aux_loss_coef"
    value, usual = m.number(key) or 0.0, m.default(key)
    if value and value != usual:
        m.lacks(key, "set train.router_balance by hand: its scale is another")
    elif value and re.search(EXPERTS, m.text("model_name_or_path")):
        m.differs(
            f"TRL adds {value:g} times the loss that spreads tokens over experts (router_aux_loss_coef, its default); "
            "here none is added: train.router_balance has another scale"
        )


def adapters(m: Migration):
    """Sets lora.* where use_peft is on: rank, alpha, targets (q_proj and v_proj where none are named, a known
    difference), rslora, dora, modules_to_save and base (nf4, int8, none). lora_dropout sets lora.dropout for SFT; else
    it is left out, a known difference.

    Adapters on a base in bf16 are trained in fp32, a known difference: train.param_dtype becomes fp32, and
    lora.base_dtype bf16 unless train.compute_dtype is. fp4 is recorded as not carried over."""
    if not m.flag("use_peft"):
        return
    keys = ("use_peft", "lora_r", "lora_alpha", "lora_target_modules", "lora_dropout")
    targets = m["lora_target_modules"] or ["q_proj", "v_proj"]
    common.lora(m, m.integer("lora_r"), m.number("lora_alpha"), targets, None, "", 0.0, keys)
    if not m["lora_target_modules"]:
        m.differs(
            "lora_target_modules is not set: PEFT chooses, for Llama and Qwen q_proj, v_proj, which are written out"
        )
    if m.options.get("run.recipe", ("",))[0] == "sft":
        m.set("lora.dropout", float(m.number("lora_dropout") or 0), "lora_dropout")
    elif m.number("lora_dropout"):
        m.differs("dropout of adapters is left out: it is for supervised training alone here")
    m.set("lora.rslora", m.flag("use_rslora"), "use_rslora")
    m.set("lora.dora", m.flag("use_dora"), "use_dora")
    if m["lora_modules_to_save"]:
        m.set("lora.modules_to_save", tuple(m.list("lora_modules_to_save")), "lora_modules_to_save")
    base = "nf4" if m.flag("load_in_4bit") else "int8" if m.flag("load_in_8bit") else "none"
    if base == "nf4" and any(s.value == "fp4" for s in m.all("bnb_4bit_quant_type")):
        m.lacks("bnb_4bit_quant_type", "fp4, bitsandbytes' own default: a base of 4 bits is nf4 here (lora.base)")
    if base == "none" and m.options.get("train.param_dtype", ("",))[0] == "bf16":
        m.set_again("train.param_dtype", "fp32")
        if m.options["train.compute_dtype"][0] != "bf16":
            m.set("lora.base_dtype", "bf16", "dtype")
        m.differs("adapters on a base in bf16 are learnt in fp32, as PEFT has them; with ZeRO-3 TRL keeps them in bf16")
    m.set("lora.base", base, "load_in_4bit", "load_in_8bit")


def loggers(m: Migration):
    """Sets log.wandb, log.wandb_project and log.wandb_name by report_to, wandb_project and run_name (`common.loggers`);
    "all" is wandb."""
    names = [str(n) for n in m.list("report_to")]
    names = ["wandb"] if names == ["all"] else [n for n in names if n != "none"]
    common.loggers(m, "report_to", names, m.text("wandb_project"), m.text("run_name"), "wandb_project", "run_name")


def memory(m: Migration):
    """Sets train.tokens_per_microbatch to per_device_train_batch_size sequences of the longest prompt and
    completion."""
    longest = m.options["data.max_prompt_tokens"][0] + m.options["rollout.max_new_tokens"][0]
    m.set(
        "train.tokens_per_microbatch", m.integer("per_device_train_batch_size") * longest, "per_device_train_batch_size"
    )
