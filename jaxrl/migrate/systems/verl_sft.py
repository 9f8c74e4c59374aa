"""verl's supervised trainers: fsdp_sft_trainer (to 0.7) and sft_trainer over its engines (from 0.6). See systems/verl.py.

Read from its code at the tags v0.3.0.post1 to v0.9.0. A step is an optimizer step.
"""

from __future__ import annotations

from dataclasses import replace

from jaxrl.migrate import common
from jaxrl.migrate.derived import derived
from jaxrl.migrate.supervised import recipe
from jaxrl.migrate.systems import verl_sft_meaning as meaning
from jaxrl.migrate.systems.verl import TABLE, megatrons_own, offloaded_state, optimizer_keys, optimizer_rest, overridden
from jaxrl.migrate.systems.verl_engine import SETTING
from jaxrl.migrate.systems.verl_sft_meaning import DATA, TRAINER
from jaxrl.migrate.table import Joint, Key, Since

K = Key
MEGA, LORA = {"engine": "megatron"}, {"model.lora_rank": 8}
FIXED = {DATA + "use_dynamic_bsz": False}
OTHERS = {"megatron": ("tensor_model_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
          "veomni": ("ulysses_parallel_size", "expert_parallel_size"),
          "torchtitan": ("tensor_parallel_size", "pipeline_parallel_size")}
DIFFERS = ("weight decay spares norms, biases and other vectors; verl's does not", "the order of the data is drawn from another generator")


def trainer(gpus: int, *more: Key | Joint) -> tuple:
    """Returns the rules that both trainers have, after those in `more`.

    gpus: default of GPUs per node, 8 of the first trainer, 1 of the other; above 1 data.val_files has a default.
    """
    return (
        *more,
        Joint("evaluation", (
            K(DATA + "val_files", "equivalent", default="~/data/gsm8k/test.parquet" if gpus > 1 else None),
            K(TRAINER + "test_freq", "equivalent", default=-1)), meaning.evaluation),
        Joint("saving", (
            K(TRAINER + "default_local_dir", "equivalent", other="runs/x"),
            K(TRAINER + "save_freq", "equivalent", default=-1, other=10),
            K(TRAINER + "max_ckpt_to_keep", "equivalent", other=2),
            K(TRAINER + "resume_mode", "equivalent", default="auto", other="disable")), meaning.saving),
        Joint("length of the run", (
            K(TRAINER + "total_epochs", "equivalent", default=4, other=2),
            K(TRAINER + "total_training_steps", "equivalent", other=9)), meaning.length_of_run),
        Joint("loggers", (
            K(TRAINER + "logger", "equivalent", default=Since(("0.3", ["console"]), ("0.4", ["console", "wandb"])), other="console"),
            K(TRAINER + "project_name", "equivalent", default="gsm8k-sft", other="mine"),
            K(TRAINER + "experiment_name", "equivalent", default="test", other="mine")), next(
                r.by for r in TABLE.rules if isinstance(r, Joint) and r.title == "loggers")),
        K(TRAINER + "seed", to="run.seed", default=1, other=7),
        K("optim.weight_decay", to="optimizer.weight_decay", default=0.01, other=0.1),
        K("model.trust_remote_code", to="model.trust_remote_code", default=False, other=True),
        K("model.enable_gradient_checkpointing", "equivalent", "model.remat", lambda on: "full" if on else "none",
          default=Since(("0.3", False), ("0.4", True)), other=False),
        K(TRAINER + "checkpoint.**", "automatic", why="a checkpoint is whole; export is checkpoint.export_*", also=("checkpoint.**",)),
        K(TRAINER + "default_hdfs_dir", "unsupported", fine=("",), why="name the place in checkpoint.upload.to"),
        K(DATA + "enable_thinking_key", "automatic", why="data.chat_template_kwargs", also=(DATA + "tools_key", DATA + "multiturn.tools_key",
                                                                                          DATA + "multiturn.enable_thinking_key")),
        K(DATA + "enable_thinking_default", "unsupported", fine=("none", "None"), why="set data.chat_template_kwargs.enable_thinking by hand"),
        K("model.external_lib", "unsupported", why="models are of jaxrl's families"),
        *overridden("model."),
        *(K(name, "automatic", why=why, also=also) for name, why, also in (
            ("use_remove_padding", "rows are packed", ("model.use_remove_padding",)),
            ("model.use_liger", "kernels are the platform's", ("model.use_shm", "model.use_fused_kernels", "model.fused_kernel_options.**",
                                                             "model.tiled_mlp.**")),
            ("profiler.**", "profile.steps", (TRAINER + "profile_interval",)),
            (TRAINER + "device", "the devices that JAX finds", ()),
            (DATA + "ignore_input_ids_mismatch", "a turn is rendered after what came before it", ()),
            (DATA + "balance_dp_token", "the loss is a mean over all tokens of the step", ()))),
    )


def places(prefix: str = "") -> tuple[Key, ...]:
    """Returns the rows of nodes and of GPUs per node, which are 8 by default with a prefix (any text), else 1."""
    return (K(TRAINER + "nnodes", "equivalent", default=1), K(TRAINER + "n_gpus_per_node", "equivalent", default=8 if prefix else 1))


def lora(*more: Key) -> tuple[Key, ...]:
    """Returns the rows of adapters and of the chat template that both trainers have, before those in `more`."""
    return (
        K("model.lora_rank", "equivalent", default=0, other=16),
        K("model.lora_alpha", "equivalent", default=16, other=32, beside=LORA),
        K("model.target_modules", "equivalent", default="all-linear", other=["q_proj"], beside=LORA),
        K("model.exclude_modules", "equivalent", other=["lm_head"], beside=LORA),
        K("model.lora_adapter_path", "equivalent", other="a/adapter"),
        K("model.custom_chat_template", "equivalent", other="{{ messages }}"), *more)


def _own(key: Key) -> Key:
    """A row of an optimizer, whose engine is named by the group `engine`."""
    return replace(key, beside={"engine" if k in (SETTING, "model_engine") else k: v for k, v in key.beside.items()})


SFT = derived(TABLE, "sft", (
    recipe("sft"),
    Joint("lengths", (
        K(DATA + "max_length", "equivalent", default=1024, other=700),
        K(DATA + "truncation", "equivalent", default="error", other="right"),
        K(DATA + "pad_mode", "equivalent", default="no_padding")), meaning.lengths),
    Joint("layout", (
        *places(),
        K("engine", "equivalent", default="fsdp"),
        *(K("engine." + name, "equivalent", default=1, other=None if name.startswith("pipeline") else 2, beside={"engine": kind})
          for kind, names in OTHERS.items() for name in names),
        K("engine.ulysses_sequence_parallel_size", "equivalent", default=1, other=2),
        K("engine.fsdp_size", "equivalent", default=-1, other=4, beside={TRAINER + "n_gpus_per_node": 8}),
        K("engine.param_offload", "equivalent", default=False, other=True),
        K("engine.optimizer_offload", "equivalent", default=False, other=True),
        K("engine.offload_policy", "equivalent", default=False, other=True)), meaning.layout),
    Joint("batch", (
        K(DATA + "train_batch_size", "equivalent", default=256, other=64),
        K(DATA + "use_dynamic_bsz", "equivalent", default=True, other=False),
        K(DATA + "max_token_len_per_gpu", "equivalent", default=8192, other=16384),
        K(DATA + "micro_batch_size_per_gpu", "equivalent", default=4, other=2, beside=FIXED)), meaning.batch),
    Joint("data", (
        K(DATA + "train_files", "equivalent", default="~/data/gsm8k/train.parquet", other="b.parquet"),
        K(DATA + "train_max_samples", "equivalent", default=-1, other=100),
        K(DATA + "messages_key", "equivalent", default="messages", other="chat"),
        K(DATA + "image_key", "equivalent", default="images", other="pictures"),
        K(DATA + "custom_cls.path", "equivalent"),
        K(DATA + "apply_chat_template_kwargs.*", "equivalent")), meaning.data),
    Joint("optimizer", (
        K("optim.lr", "equivalent", default=1e-3, other=1e-4),
        *map(_own, optimizer_keys("optim.", {}, "0.5"))), meaning.optimizer),
    offloaded_state("optim."), *optimizer_rest("optim."),
    K("optim", "automatic", why="the options below it say what it is", also=("model",)),
    K("optim.num_cycles", "unsupported", fine=(0.5,), why="a cosine falls once"),
    K("optim.optimizer_impl", "unsupported", fine=("torch.optim",), why="AdamW's moments are in fp32, whatever package it is of"),
    K("optim.total_training_steps", "automatic", why="schedules know the run's updates"),
    K("optim.**", "unsupported", fine=(None, {}, False, "constant", -1), why="an option of its optimizers"),
    Joint("model", lora(
        K("model.path", "equivalent", default="~/models/deepseek-llm-7b-chat", other="a/b"),
        K("engine.model_dtype", "equivalent", default="fp32", other="bf16")), meaning.model),
    K("engine.dtype", "equivalent", "train.compute_dtype", lambda d: common.DTYPES.get(str(d), str(d)), default="bfloat16", other="float16"),
    K("model.tokenizer_path", to="model.tokenizer", other="a/tokenizer"),
    K("model.hf_config_path", "unsupported", why="a model's config lies in its folder"),
    K("model.mtp.enable", "unsupported", fine=(False,), why="multi-token prediction", also=("model.mtp.enable_train",)),
    K("model.mtp.*", "inert", why="read with model.mtp.enable alone"),
    K("model.lora.rank", "unsupported", fine=(0,), why="Megatron's adapters: set lora.rank and lora.targets by hand"),
    K("model.lora.**", "inert", why="read with model.lora.rank alone"),
    *megatrons_own("engine."),
    K("engine.override_transformer_config.**", "automatic", why="the mesh and XLA decide", also=("engine.override_ddp_config.**", "engine.**")),
    K("engine.qat.enable", "unsupported", fine=(False,), why="training against quantised weights"),
    *trainer(1),
    Joint("offloaded activations", (K("model.enable_activation_offload", "equivalent", default=False, other=True),),
          lambda m: common.offloaded(m, "model.enable_activation_offload")),
    K(DATA + "num_workers", to="data.workers", default=8, other=2),
), required={}, differs=DIFFERS)

FIRST = derived(TABLE, "first_sft", (
    recipe("sft"),
    Joint("lengths", (
        K(DATA + "max_length", "equivalent", default=1024, other=700),
        K(DATA + "truncation", "equivalent", default="error", other="right")), meaning.lengths),
    Joint("layout", (
        *places("first"),
        K("ulysses_sequence_parallel_size", "equivalent", default=1, other=2),
        K("model.strategy", "equivalent", default="fsdp2"),
        K("model.fsdp_config.cpu_offload", "equivalent", default=False, other=True),
        K("model.fsdp_config.offload_params", "equivalent", default=False, other=True)), meaning.layout),
    Joint("batch", (
        K(DATA + "train_batch_size", "equivalent", default=256, other=64),
        K(DATA + "micro_batch_size", "equivalent", other=32),
        K(DATA + "micro_batch_size_per_gpu", "equivalent", default=4, other=2)), meaning.batch),
    Joint("data", (
        K(DATA + "train_files", "equivalent", default="~/data/gsm8k/train.parquet", other="b.parquet"),
        K(DATA + "train_max_samples", "equivalent", default=-1, other=100),
        K(DATA + "prompt_key", "equivalent", default="question", other="q"),
        K(DATA + "response_key", "equivalent", default="answer", other="r"),
        K(DATA + "prompt_dict_keys", "equivalent", other=["question"], beside={DATA + "prompt_key": "extra_info"}),
        K(DATA + "response_dict_keys", "equivalent", other=["answer"], beside={DATA + "response_key": "extra_info"}),
        K(DATA + "multiturn.enable", "equivalent", default=False, other=True),
        K(DATA + "multiturn.messages_key", "equivalent", default="messages", other="chat", beside={DATA + "multiturn.enable": True}),
        K(DATA + "custom_cls.path", "equivalent"),
        K(DATA + "apply_chat_template_kwargs.*", "equivalent")), meaning.data),
    Joint("optimizer", (
        K("optim.lr", "equivalent", default=1e-5, other=1e-4),
        K("optim.betas", "equivalent", default=[0.9, 0.95], other=[0.9, 0.98]),
        K("optim.lr_warmup_steps_ratio", "equivalent", default=0.1, other=0.2, also=("optim.warmup_steps_ratio",)),
        K("optim.lr_scheduler", "equivalent", default="cosine", other="wsd"),
        K("optim.clip_grad", "equivalent", default=1.0, other=0.5)), meaning.optimizer),
    K("optim", "automatic", why="the options below it say what it is", also=("model",)),
    Joint("model", lora(
        K("model.partial_pretrain", "equivalent", default="~/models/gemma-1.1-7b-it", other="a/b"),
        K("model.fsdp_config.model_dtype", "equivalent", default=Since(("0.3", "fp32")), other="bf16")), meaning.model),
    K("model.fsdp_config.**", "automatic", why="the mesh and XLA decide"),
    K(DATA + "chat_template", "unsupported", why="name a Jinja file in model.chat_template"),
    *trainer(8),
), required={}, differs=DIFFERS, versions=TABLE.versions[:5])
