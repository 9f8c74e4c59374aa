"""RLinf's supervised fine-tuning of models of images and text (train_vlm_sft.py): its table, made of the reasoning
pipeline's. See systems/rlinf.py.

Read from its code and example configs at the tags v0.2 and v0.3 and at a3816b5. Robots' SFT (train_vla_sft.py) is refused.
"""

from __future__ import annotations

from jaxrl.migrate.derived import derived, from_version, selected
from jaxrl.migrate.supervised import recipe
from jaxrl.migrate.systems import rlinf_sft_meaning as meaning
from jaxrl.migrate.systems.rlinf import DTYPES, FSDP, ON_FSDP, ROBOTS, TABLE
from jaxrl.migrate.systems.rlinf_meaning import ACTOR, ALGO, DATA, MODEL, OPTIM, PLACEMENT, RUNNER, SAMPLE
from jaxrl.migrate.table import MISSING, Joint, Key

K = Key
FIRST, SYNCED = "0.2", ACTOR + "lr_sched_sync_with_optim"
HELD = {**ON_FSDP, DATA + "val_data_paths": "held", RUNNER + "val_check_interval": 10}
READ = ("optimizer", OPTIM + "num_cycles", OPTIM + "adam_beta2", OPTIM + "weight_decay", OPTIM + "optimizer_cpu_offload", "places", "loggers",
        ACTOR + "seed", ACTOR + "tokenizer.trust_remote_code", MODEL + "is_lora", MODEL + "moe_aux_loss_coeff",
        MODEL + "moe_router_bias_update_rate", MODEL + "megatron_checkpoint", DATA + "video_*", MODEL + "num_action_chunks")
OF_RL = tuple(n for key in TABLE.keys() for n in key.names() if n.startswith((ALGO, "rollout.", "reward.", "critic.")) and "**" not in n
              and n != SAMPLE + "temperature")

SFT = derived(TABLE, "sft", (
    recipe("sft"),
    Joint("pipeline", (
        K(RUNNER + "task_type", "automatic", default="sft", why="supervised fine-tuning"),
        K(DATA + "type", "equivalent", default="vlm"),
        K(DATA + "dataset_name", "equivalent", default="robo2vlmsft")), meaning.pipeline),
    Joint("lengths", (K(DATA + "max_prompt_length", "equivalent", other=700),), meaning.lengths),
    Joint("layout", (
        K("cluster.num_nodes", "equivalent", default=1),
        K("cluster.num_gpus_per_node", "equivalent", default=8),
        K(PLACEMENT, "equivalent"),
        K(ACTOR + "training_backend", "equivalent", default=MISSING),
        K(MODEL + "tensor_model_parallel_size", "equivalent", default=1, other=2, beside={ACTOR + "training_backend": "megatron"}),
        K(MODEL + "pipeline_model_parallel_size", "equivalent", default=1),
        K(MODEL + "expert_model_parallel_size", "equivalent", default=1, other=2, beside={ACTOR + "training_backend": "megatron"}),
        K(MODEL + "context_parallel_size", "equivalent", default=1, other=2, beside={ACTOR + "training_backend": "megatron"}),
        K(ACTOR + "offload_optimizer", "equivalent", default=False, other=True, beside={ACTOR + "offload_weight": True}),
        K(ACTOR + "offload_weight", "equivalent", default=False, other=True, beside={ACTOR + "offload_optimizer": True}),
        K(ACTOR + "enable_offload", "equivalent", default=False, other=True),
        K(FSDP + "cpu_offload", "equivalent", default=False, other=True)), meaning.layout),
    Joint("batch", (
        K(ACTOR + "global_batch_size", "equivalent", default=MISSING, other=128),
        K(ACTOR + "micro_batch_size", "equivalent", default=MISSING, other=2)), meaning.batch),
    *from_version(selected(TABLE, *READ, without=(SYNCED,)), TABLE.versions, FIRST),
    K(SYNCED, "inert", why="its rate is one of every optimizer step"),
    Joint("model", (
        K(MODEL + "model_path", "equivalent", other="another/model"),
        K(ACTOR + "tokenizer.tokenizer_model", "equivalent", other="a/tokenizer", beside={MODEL + "model_path": "a/model"}),
        K(MODEL + "recompute_granularity", "equivalent", other="full", beside={ACTOR + "training_backend": "megatron"}),
        *DTYPES), meaning.model),
    Joint("rows", (
        K(DATA + "train_data_paths", "equivalent", other=["a.parquet", "b.parquet"]),
        K(DATA + "prompt_key", "equivalent", default="question", other="query"),
        K(DATA + "choice_key", "equivalent", default="choices", other="options"),
        K(DATA + "answer_key", "equivalent", default="correct_answer", other="right"),
        K(DATA + "image_keys", "equivalent", default=[], other=["picture"]),
        K(DATA + "shuffle", "equivalent", default=True, other=False),
        K(DATA + "seed", "equivalent", default=42, other=7),
        K(DATA + "val_data_paths", "equivalent", other=["c.parquet"], beside={**ON_FSDP, RUNNER + "val_check_interval": 10},
          also=(DATA + "eval_data_paths",))), meaning.rows),
    Joint("evaluation", (
        K(RUNNER + "val_check_interval", "equivalent", default=-1, other=20, beside=HELD),
        K(ACTOR + "eval_batch_size", "automatic", why="evaluation asks all rows at once, within what the engine takes")), meaning.evaluation),
    Joint("length of the run", (
        K(RUNNER + "max_epochs", "equivalent", default=-1, other=3),
        K(RUNNER + "max_steps", "equivalent", default=-1, other=9)), meaning.length_of_run),
    K(RUNNER + "early_stop.**", "unsupported", why="a run ends by its steps; eval.stop_at is a mark that it reaches"),
    K(SAMPLE + "temperature", "unsupported", fine=(1, 1.0), refuse=True, why="Megatron's loss divides logits by it; here they are not divided"),
    K(DATA + "use_chat_template", "automatic", why="rows are chats", also=(DATA + "apply_chat_template", DATA + "answer_separator")),
    K(DATA + "lazy_loading", "automatic", why="images are read when a step takes their row"),
    K(DATA + "system_prompt", "inert", why="RLinf's class for these rows puts none into the prompt"),
    K("env.**", "unsupported", refuse=True, why=ROBOTS),
    K(ALGO + "**", "inert", why="of RL", also=("rollout.**", "reward.**", "critic.**", *OF_RL)),
), required={ACTOR + "training_backend": "megatron", ACTOR + "global_batch_size": 64, ACTOR + "micro_batch_size": 4,
             DATA + "train_data_paths": "rows.parquet",
             DATA + "max_prompt_length": 512, OPTIM + "lr": 1e-5},
    versions=TABLE.versions[TABLE.versions.index(FIRST):], differs=(
    "the gradient does not depend on micro-batches and the number of GPUs: the mean is over all tokens of the step, RLinf's over the token means "
    "of micro-batches",
    "RLinf renders a row with the assistant's header behind its answer, and learns these tokens too; here the completion ends with its turn",
    "weight decay spares norms, biases and other vectors",
    "the order of the data is drawn from another generator",
))
