"""SkyRL's supervised trainer (`skyrl.train.main_sft`). See systems/skyrl.py.

Read from its code at the tags v0.2.0, v0.3.0 and at a956457 (several data sets). A step is an optimizer step.
"""

from __future__ import annotations

from jaxrl.migrate.derived import defaults, derived, renamed, selected
from jaxrl.migrate.devices import MEGATRON
from jaxrl.migrate.supervised import recipe
from jaxrl.migrate.systems import skyrl_sft_meaning as meaning
from jaxrl.migrate.systems.skyrl import TABLE, changes_training, state_on_host
from jaxrl.migrate.table import Joint, Key, Since

K = Key
FSDP, MANY = {"strategy": "fsdp"}, {"train_datasets": ["a/b", "a/c"], "train_dataset_splits": ["train", "train"]}
OPTIMIZER = "trainer.policy.optimizer_config."
SAVE = {"ckpt_path": "runs/x"}

SFT = derived(TABLE, "sft", (
    recipe("sft"),
    Joint("lengths", (K("max_length", "equivalent", default=Since(("docs", 512), ("0.3", None)), other=700),), meaning.lengths),
    Joint("batch", (
        K("batch_size", "equivalent", default=4, other=16),
        K("micro_train_batch_size_per_gpu", "equivalent", default=2, other=4),
        K("use_sequence_packing", "equivalent", default=False, other=True, beside={"max_length": 512}),
        K("max_tokens_per_microbatch", "equivalent", other=4096, beside={"max_length": 512, "use_sequence_packing": True})), meaning.batch),
    Joint("length of the run", (
        K("num_steps", "equivalent", default=Since(("docs", 10), ("0.3", None)), other=7),
        K("num_epochs", "equivalent", default=1, other=3),
        K("max_training_steps", "equivalent", other=5)), meaning.length_of_run),
    Joint("data", (
        K("train_datasets", "equivalent", other=["a/b"], beside={"train_dataset_splits": ["train"]}),
        K("train_dataset_splits", "equivalent", default=["train[:100]"], other=["train"], beside={"train_datasets": ["a/b"]}),
        K("train_dataset_weights", "equivalent", other=[0.8, 0.2], beside=MANY),
        K("dataset_name", "equivalent", default="yahma/alpaca-cleaned", other="a/b"),
        K("dataset_split", "equivalent", default="train[:100]", other="train"),
        K("pretokenized_dataset_paths", "equivalent"),
        K("messages_key", "equivalent", default="messages", other="chat", beside={"dataset_name": "a/b"}),
        K("train_on_what", "equivalent", default="last_assistant_message", other="all_assistant_messages"),
        K("sampler", "equivalent", default="random", other="sequential")), meaning.data),
    K("tools_key", "unsupported", default="tools", fine=("tools",), why="tools are the column `tools`"),
    K("system_key", "unsupported", default="system", fine=("system",), why="a system message stands in the messages, or in data.system_prompt"),
    K("sampler_class_path", "inert", why="read with sampler=custom alone", also=("sampler_kwargs.**",)),
    Joint("evaluation", (
        K("eval_interval", "equivalent", default=0),
        K("eval_before_train", "equivalent", default=False),
        K("eval_datasets", "equivalent"),
        K("eval_dataset_name", "equivalent"),
        K("eval_pretokenized_dataset_paths", "equivalent")), meaning.evaluation),
    K("eval_dataset_splits", "inert", why="of the held-out rows", also=("eval_dataset_split", "eval_dataset_names")),
    Joint("layout", (
        K("placement.num_nodes", "equivalent", default=1),
        K("placement.num_gpus_per_node", "equivalent", default=4, other=8, beside=FSDP | {"fsdp_config.fsdp_size": 2}),
        K("strategy", "equivalent", default="megatron", other="fsdp"),
        *(K("megatron_config." + name, "equivalent", default=2 if axis in ("tp", "pp") else 1, other={"tp": 4, "ep": 2}.get(axis))
          for axis, name in MEGATRON.items()),
        K("sequence_parallel_size", "equivalent", default=1, other=2, beside=FSDP),
        K("fsdp_config.fsdp_size", "equivalent", default=-1, other=2, beside=FSDP),
        K("fsdp_config.cpu_offload", "equivalent", default=False, other=True, beside=FSDP)), meaning.layout),
    state_on_host("megatron_config.", "strategy"),
    *renamed(defaults(selected(TABLE, "optimizer", OPTIMIZER + "weight_decay", OPTIMIZER + "max_grad_norm", OPTIMIZER + "offload_after_step",
                      "trainer.policy.model.path", "adapters", "trainer.policy.model.lora.*"),
              {"trainer.policy.model.path": "Qwen/Qwen3-0.6B"}), {"trainer.policy.": "", "trainer.": ""}),
    *renamed(selected(TABLE, "trainer.seed"), {"trainer.": ""}),
    Joint("loggers", (
        K("logger", "equivalent", default="console", other="wandb"),
        K("project_name", "equivalent", default="skyrl_sft", other="mine"),
        K("run_name", "equivalent", default="skyrl_sft_run", other="mine")), meaning.loggers),
    Joint("saving", (
        K("ckpt_path", "equivalent", default="", other="runs/x"),
        K("ckpt_interval", "equivalent", default=0, other=10, beside=SAVE),
        K("hf_save_interval", "equivalent", default=0, other=10),
        K("max_ckpts_to_keep", "equivalent", default=-1, other=2),
        K("resume_from", "equivalent", default="", other="latest")), meaning.saving),
    K("dummy_run_full_ctx", "unsupported", fine=(False,), refuse=True, why="a run on made-up rows: run.mode=plan says what fits"),
    K("dummy_run_max_steps", "inert", why="read with dummy_run_full_ctx alone"),
    K("model_config_kwargs.**", "unsupported", fine=(None, {}), why="write it into model.config", also=("model_config_kwargs",)),
    *changes_training(""),
    K("model.fake_int4_qat.*", "unsupported", fine=(None, False), why="training against int4 experts"),
    *(K(name, "automatic", why=why, also=also) for name, why, also in (
        ("remove_microbatch_padding", "rows are always packed", ("use_sample_packing",)),
        ("export_path", "exports lie in the run's directory (run.dir)", ()),
        ("megatron_config.**", "the mesh and XLA decide", ("fsdp_config.**", "optimizer_config.**")),
        ("use_torch_compile", "every program is compiled", ()),
        ("record_memory", "profile.memory writes what device memory holds", ("torch_profiler_config.**",)),
        ("tags", "WANDB_TAGS in the environment", ()),
        ("enable_ray_gpu_monitor", "no Ray", ()),
        ("num_workers", "rows are tokenised once and kept (data.cache)", ("cache_dir", "force_recache", "disable_cache")),
        ("dataloader_num_workers", "rows are read ahead by data.workers", ("dataloader_persistent_workers", "async_batch_collation")))),
), command=r"main_sft|sft", prefixes=(), differs=(
    "weight decay spares norms, biases and other vectors",
    "the order of the data is drawn from another generator",
    "batches run on over the end of a pass; SkyRL's last batch of each pass has the rows that are left",
))
