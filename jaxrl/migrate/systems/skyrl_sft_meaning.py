"""What keys of SkyRL's supervised trainer mean together. See systems/skyrl_sft.py."""

from __future__ import annotations

from jaxrl.migrate import common, devices, supervised
from jaxrl.migrate.table import Migration

MEGATRON = "megatron_config."
PLACE = ("placement.num_nodes", "placement.num_gpus_per_node")
MESH = (*PLACE, *(MEGATRON + n for n in devices.MEGATRON.values()), "sequence_parallel_size", "fsdp_config.fsdp_size")


def lengths(m: Migration):
    """Sets train.max_sequence_tokens from max_length, the longest prompt and completion to one token less, and
    data.overlong_completion=truncate. Without max_length it writes 8192 tokens and asks for the longest row. Raises
    Unreadable below 2."""
    supervised.sequence(m, m.integer("max_length"), "max_length", cut="truncate")


def batch(m: Migration):
    """Sets data.prompts_per_step and train.tokens_per_microbatch. Raises Unreadable for fewer than 1 row.

    With use_sequence_packing the tokens are max_tokens_per_microbatch, or max_length without it, and at least
    train.max_sequence_tokens; else, or where both are null, micro_train_batch_size_per_gpu times the latter.
    """
    supervised.rows(m, m.integer("batch_size"), "rows", "batch_size")
    packed = m.flag("use_sequence_packing")
    tokens = (m.integer("max_tokens_per_microbatch") or m.integer("max_length")) if packed else 0
    if tokens:
        longest = m.options["train.max_sequence_tokens"][0]
        m.set("train.tokens_per_microbatch", max(tokens, longest), "max_tokens_per_microbatch", "use_sequence_packing")
    else:
        supervised.memory(
            m, m.integer("micro_train_batch_size_per_gpu"), "micro_train_batch_size_per_gpu", "max_length"
        )


def length_of_run(m: Migration):
    """Sets train.steps from num_steps, else data.epochs (with data.drop_last=False) from num_epochs; max_training_steps
    bounds train.steps in both. With neither number of steps it notes of a schedule that is not constant that it falls
    over all updates here."""
    steps, most = m.integer("num_steps"), m.integer("max_training_steps")
    epochs = m.integer("num_epochs")
    if steps:
        m.set("train.steps", min(steps, most or steps), "num_steps", *(("max_training_steps",) if most else ()))
        m.mark("num_epochs", "inert", "num_steps wins")
        return
    m.set("data.epochs", epochs, "num_epochs")
    m.set("data.drop_last", False, "num_epochs")
    if not most and m.text("optimizer_config.scheduler") not in ("", "constant", "constant_with_warmup"):
        m.differs(
            "the learning rate falls over all updates; SkyRL tells its schedule their number with num_steps or "
            "max_training_steps alone, not with num_epochs"
        )
    if most:
        m.set("train.steps", most, "max_training_steps")


def data(m: Migration):
    """Sets data.path or data.sources with weights, splits and columns, data.train_turns and data.shuffle.

    Refuses rows of token ids, and another number of splits than of data sets; asks for a column where rows are
    Alpaca's; a sampler in Python is not carried over. Raises Unreadable for another number of weights, or another
    train_on_what than last_assistant_message and all_assistant_messages.
    """
    tokenised = m.list("pretokenized_dataset_paths")
    if tokenised:
        m.lacks(
            "pretokenized_dataset_paths",
            "rows of token ids: rows are tokenised here, from text or messages",
            refuse=True,
        )
        return
    many = m["train_datasets"] is not None
    name, split_key = ("train_datasets", "train_dataset_splits") if many else ("dataset_name", "dataset_split")
    places, splits = [str(p) for p in m.list(name)], [str(s) for s in m.list(split_key)]
    if len(splits) != len(places):
        m.lacks(split_key, f"{len(splits)} splits for {len(places)} data sets, which SkyRL refuses, too", refuse=True)
        return
    weights = [float(w) for w in m.list("train_dataset_weights")] or [1 / max(len(places), 1)] * len(places)
    if len(weights) != len(places):
        raise m.wrong("train_dataset_weights", f"{len(places)} numbers")
    column, sets = m.text("messages_key"), []
    for place, split, weight in zip(places, splits, weights, strict=True):
        alpaca = "alpaca" in place.lower()
        columns = (
            {"prompt_column": "instruction", "completion_column": "output"} if alpaca else {"prompt_column": column}
        )
        columns = columns if alpaca or column != "messages" else {}
        sets.append({"path": place, "weight": weight, "split": (split,), **columns})
        if alpaca:
            m.needs(
                "data.prompt_column: rows of Alpaca have `instruction`, `input` and `output`, which SkyRL joins to a "
                "prompt "
                "and a completion; join `input` to the instruction in a file of your own"
            )
    more = ("train_dataset_weights",) if len(places) > 1 else ()
    supervised.mixture(m, sets, name, split_key, *(("messages_key",) if column != "messages" else ()), *more)
    m.set("data.train_turns", "all" if m.text("train_on_what") == "all_assistant_messages" else "last", "train_on_what")
    if m.text("train_on_what") not in ("all_assistant_messages", "last_assistant_message"):
        raise m.wrong("train_on_what", "last_assistant_message or all_assistant_messages")
    sampler = m.text("sampler")
    m.set("data.shuffle", sampler != "sequential", "sampler")
    if sampler == "custom":
        m.lacks("sampler", "a sampler of its own in Python; data.difficulty orders rows by a column")


def evaluation(m: Migration):
    """Switches evaluation off (eval.every_steps=0, before and after False). Held-out sets are not carried over: jaxrl
    measures no loss of their rows."""
    sets = [key for key in ("eval_datasets", "eval_dataset_name", "eval_pretokenized_dataset_paths") if m[key]]
    m.set("eval.every_steps", 0, "eval_interval")
    if sets:
        supervised.no_loss_of_held_out_rows(m, *sets)
        return
    m.set("eval.before", False, "eval_before_train")
    m.set("eval.after", False, "eval_interval")


def layout(m: Migration):
    """Sets mesh.* from the sizes of Megatron or FSDP, and mesh.roles.policy rest=streamed for FSDP's cpu_offload.

    GPUs are nodes x GPUs per node if the source sets one of them, else --gpus, else their defaults. Raises Unreadable
    for another strategy than megatron, fsdp and fsdp2.
    """
    nodes, per = (m.integer(key) for key in PLACE)
    devices.count_gpus(m, nodes * per if any(map(m.given, PLACE)) else 0, nodes * per)
    strategy = m.text("strategy")
    if strategy not in ("megatron", "fsdp", "fsdp2"):
        raise m.wrong("strategy", "megatron or fsdp")
    sizes = devices.megatron_sizes(m, MEGATRON, strategy == "megatron")
    if strategy != "megatron":
        sizes["cp"] = m.integer("sequence_parallel_size")
    shards = 0 if strategy == "megatron" else m.integer("fsdp_config.fsdp_size") or 0
    devices.mesh(m, ("strategy",), MESH, **sizes, fsdp=shards, gpus=m.gpus)
    if strategy != "megatron" and m.flag("fsdp_config.cpu_offload"):
        devices.rest(m, "streamed", "fsdp_config.cpu_offload")


def saving(m: Migration):
    """Sets run.dir, checkpoint.every_steps, every_minutes=0, export_every_steps and keep, and run.resume: auto for
    resume_from=latest, else never. Without ckpt_path there are no checkpoints. A path in resume_from is asked for as
    an export, as SkyRL's checkpoints are not read."""
    if m.text("ckpt_path"):
        m.set("run.dir", m.text("ckpt_path").rstrip("/"), "ckpt_path")
    common.triggers(m, "checkpoint.export_every_steps", m.integer("hf_save_interval"), "hf_save_interval")
    every = m.integer("ckpt_interval") if m.text("ckpt_path") else 0
    common.triggers(m, "checkpoint.every_steps", every, "ckpt_interval", "ckpt_path")
    m.set("checkpoint.every_minutes", 0.0, "ckpt_interval")
    most = m.integer("max_ckpts_to_keep")
    m.set("checkpoint.keep", most if most and most > 0 else -1, "max_ckpts_to_keep")
    at = m.text("resume_from")
    m.set("run.resume", "auto" if at == "latest" else "never", "resume_from")
    if at not in ("", "latest"):
        m.needs(
            f"resume_from={at}: SkyRL's checkpoints are not read; export it to a Hugging Face folder and name that in "
            "model.path"
        )


def loggers(m: Migration):
    """Sets log.wandb with project and run name, and log.tensorboard=True. Other sinks are not carried over."""
    names = m.list("logger")
    common.loggers(m, "logger", names, m.text("project_name"), m.text("run_name"), "project_name", "run_name")
