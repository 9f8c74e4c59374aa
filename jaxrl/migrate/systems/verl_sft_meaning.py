"""What keys of verl's supervised trainers mean together. See systems/verl_sft.py."""

from __future__ import annotations

import re

from jaxrl.migrate import common, devices, images, supervised
from jaxrl.migrate.systems.verl_engine import LAYOUTS
from jaxrl.migrate.systems.verl_optimizer import learning
from jaxrl.migrate.table import Migration

DATA, TRAINER = "data.", "trainer."
PLACE = (TRAINER + "nnodes", TRAINER + "n_gpus_per_node")


def first(m: Migration) -> bool:
    """Returns whether the job is of verl's first supervised trainer, fsdp_sft_trainer, which has no engines."""
    return m.table.job == "first_sft"


def lengths(m: Migration):
    """Sets train.max_sequence_tokens from data.max_length, the longest prompt and completion to one token less, and
    data.overlong_completion: truncate where verl cuts on the right, else filter.

    Without padding verl also cuts on the right for left and, in 0.6, error. Notes rows that are an error in verl; a cut
    on the left is not carried over. Raises Unreadable for a bound below 2, or another truncation.
    """
    kind = m.text(DATA + "truncation")
    unpadded = not first(m) and m.text(DATA + "pad_mode") == "no_padding"
    right = kind == "right" or unpadded and (kind == "left" or kind == "error" and m.version == "0.6")
    keys = (DATA + "max_length", DATA + "truncation")
    supervised.sequence(m, m.integer(keys[0]), *keys, cut="truncate" if right else "filter")
    if kind not in ("error", "left", "right"):
        raise m.wrong(DATA + "truncation", "error, left or right")
    if kind == "error" and not right:
        m.differs("a row of more than data.max_length tokens is an error in verl; here it is left out and counted")
    elif kind == "left" and not right:
        m.lacks(DATA + "truncation", "a row that is too long loses its beginning there; here it is left out")


def batch(m: Migration):
    """Sets data.prompts_per_step and train.tokens_per_microbatch. Raises Unreadable for fewer than 1 row.

    With use_dynamic_bsz the tokens are max_token_len_per_gpu, at least one longest sequence; else longest sequences:
    micro_batch_size_per_gpu of them, or the first trainer's micro_batch_size, if set, divided by the GPUs. Notes that
    the first trainer's rows have other weights.
    """
    supervised.rows(m, m.integer(DATA + "train_batch_size"), "rows", DATA + "train_batch_size")
    micro, longest = DATA + "micro_batch_size_per_gpu", m.options["train.max_sequence_tokens"][0]
    if not first(m) and m.flag(DATA + "use_dynamic_bsz"):
        most = m.integer(DATA + "max_token_len_per_gpu")
        m.set(
            "train.tokens_per_microbatch", max(most, longest), DATA + "max_token_len_per_gpu", DATA + "use_dynamic_bsz"
        )
        m.mark(micro, "inert", "use_dynamic_bsz counts tokens")
        return
    if first(m) and m.integer(DATA + "micro_batch_size"):
        supervised.memory(m, max(m.integer(DATA + "micro_batch_size") // max(m.gpus, 1), 1), DATA + "micro_batch_size")
        m.mark(micro, "inert", "data.micro_batch_size, of all GPUs, wins")
    else:
        supervised.memory(m, m.integer(micro), micro, *(() if first(m) else (DATA + "use_dynamic_bsz",)))
    if first(m):
        m.differs(
            "a row's weight: verl's first trainer averages the token means of micro-batches and GPUs, here the mean is "
            "over all tokens of the step"
        )


def data(m: Migration):
    """Sets data.path, max_rows, columns of text and images, and variables of the chat template.

    With messages data.train_turns is all. Refuses a data set class of the user's own. Asks for a column of its own
    where the first trainer's prompt or response is a field inside a column.
    """
    common.data_files(m, m.list(DATA + "train_files"), DATA + "train_files")
    rows = m.integer(DATA + "train_max_samples")
    m.set("data.max_rows", rows if rows and rows > 0 else 0, DATA + "train_max_samples")
    multi = DATA + "multiturn."
    if first(m) and not m.flag(multi + "enable"):
        _prompt_and_response(m)
    else:
        key = multi + "messages_key" if first(m) else DATA + "messages_key"
        m.set("data.prompt_column", m.text(key), key)
        m.set("data.train_turns", "all", multi + "enable" if first(m) else key)
    column = "images" if first(m) else m.text(DATA + "image_key")
    if not first(m) and m.given(DATA + "image_key") and (column != "images" or images.has_tower(m.text("model.path"))):
        m.set("data.image_column", column, DATA + "image_key")
    if m.text(DATA + "custom_cls.path"):
        m.lacks(
            DATA + "custom_cls.path", "a data set class of its own: write the rows as JSONL or Parquet", refuse=True
        )
    for s in m.all(DATA + "apply_chat_template_kwargs.*"):
        m.set("data.chat_template_kwargs." + s.key.rpartition(".")[2], s.value, s.key)


def _prompt_and_response(m: Migration):
    for what, option in (("prompt", "data.prompt_column"), ("response", "data.completion_column")):
        key, inner = f"{DATA}{what}_key", m.list(f"{DATA}{what}_dict_keys")
        if inner:
            path = ".".join((m.text(key), *map(str, inner)))
            m.needs(f"{option}: the {what} is the field {path} of a row; write it as a column of its own and name that")
            m.set(option, str(inner[-1]), key, f"{DATA}{what}_dict_keys")
        else:
            m.set(option, m.text(key), key)


def evaluation(m: Migration):
    """Switches evaluation off. Validation files that the source sets are not carried over: jaxrl measures no loss of
    held-out rows."""
    m.set("eval.every_steps", 0, TRAINER + "test_freq")
    if m.given(DATA + "val_files") and m.list(DATA + "val_files"):
        supervised.no_loss_of_held_out_rows(m, DATA + "val_files", TRAINER + "test_freq")
        return
    m.set("eval.before", False, DATA + "val_files")
    m.set("eval.after", False, DATA + "val_files")


def gpus(m: Migration) -> int:
    """Returns the number of GPUs: torchrun's --nproc-per-node x --nnodes (1 without) if the command has the number,
    else trainer.nnodes x n_gpus_per_node if the source sets one of them, else 0."""
    if found := re.search(r"--nproc[-_]per[-_]node[= ](\d+)", m.command):
        nodes = re.search(r"--nnodes[= ](\d+)", m.command)
        return int(found[1]) * (int(nodes[1]) if nodes else 1)
    if any(m.given(key) for key in PLACE):
        return m.integer(PLACE[0]) * m.integer(PLACE[1])
    return 0


def layout(m: Migration):
    """Sets mesh.* from the engine's sizes, and mesh.roles.policy: rest=streamed or host where parameters or optimizer
    state are offloaded. The GPUs are those of `gpus`, else --gpus. The sizes of an unknown engine are not carried
    over."""
    devices.count_gpus(m, gpus(m))
    if first(m):
        devices.mesh(
            m,
            ("model.strategy",),
            ("ulysses_sequence_parallel_size",),
            cp=m.integer("ulysses_sequence_parallel_size"),
            gpus=m.gpus,
        )
        if m.flag("model.fsdp_config.cpu_offload") or m.flag("model.fsdp_config.offload_params"):
            devices.rest(m, "streamed", "model.fsdp_config.cpu_offload", "model.fsdp_config.offload_params")
        return
    kind, e = m.text("engine"), "engine."
    axes = LAYOUTS.get(kind, ("", {}))[1]
    if kind not in LAYOUTS and kind not in ("fsdp", "fsdp2"):
        m.lacks("engine", f"the sizes of the engine {kind!r} are not read: set the mesh by hand")
    sizes = {axis: m.integer(e + name) or 1 for axis, name in axes.items()}
    if not axes:
        sizes["cp"] = m.integer(e + "ulysses_sequence_parallel_size") or 1
    shards = (m.integer(e + "fsdp_size") or 0) if kind in ("fsdp", "fsdp2", "veomni") else 0
    names = [e + n for n in (*axes.values(), *(() if axes else ("ulysses_sequence_parallel_size",)), "fsdp_size")]
    devices.mesh(m, ("engine",), (*PLACE, *names), **sizes, fsdp=shards, gpus=m.gpus)
    if m.flag(e + "offload_policy"):
        devices.rest(m, "streamed", e + "offload_policy")
    elif m.flag(e + "param_offload") or m.flag(e + "optimizer_offload"):
        devices.rest(m, "host", e + "param_offload", e + "optimizer_offload")


def optimizer(m: Migration):
    """Sets optimizer.lr, max_grad_norm, betas, schedule and warm-up.

    The first trainer has the schedules cosine and wsd (with a cosine's decay): another one is not carried over and
    becomes cosine. For the other trainer see verl_optimizer.learning.
    """
    o = "optim."
    rate = m.number(o + "lr")
    m.set("optimizer.lr", rate, o + "lr")
    m.set("optimizer.max_grad_norm", float(m.number(o + "clip_grad")), o + "clip_grad")
    if not first(m):
        found = learning(m, o, rate)
    else:
        kind = m.choice(o + "lr_scheduler", {"cosine": "cosine", "wsd": "wsd"}) or "cosine"
        betas = m.list(o + "betas")
        found = {
            "b1": (float(betas[0]), (o + "betas",)),
            "b2": (float(betas[1]), (o + "betas",)),
            "schedule": (kind, (o + "lr_scheduler",)),
            "warmup_steps": (0, (o + "lr_warmup_steps_ratio",)),
            "warmup_fraction": (m.number(o + "lr_warmup_steps_ratio") or 0.0, (o + "lr_warmup_steps_ratio",)),
        }
        if kind == "wsd":
            found["decay_shape"] = ("cosine", (o + "lr_scheduler",))
    for option, (value, keys) in found.items():
        m.set(f"optimizer.{option}", value, *keys)
    m.facts["learning rate"] = f"{rate}, {found['schedule'][0]}"


def model(m: Migration):
    """Sets model.path (or asks for it), lora.*, model.chat_template with its file, and train.param_dtype: the source's
    if that is fp32 or bf16, else fp32."""
    supervised.model_path(m, "model.partial_pretrain" if first(m) else "model.path")
    rank = m.integer("model.lora_rank") or 0
    keys = ("model.lora_rank", "model.lora_alpha", "model.target_modules", "model.exclude_modules")
    common.lora(m, rank, m.number(keys[1]), m[keys[2]], m[keys[3]], "", 0.0, keys)
    if m.text("model.lora_adapter_path"):
        m.set("lora.path", m.text("model.lora_adapter_path"), "model.lora_adapter_path")
    if m.text("model.custom_chat_template"):
        m.files[f"{m.name}_template.jinja"] = m.text("model.custom_chat_template")
        m.set("model.chat_template", f"{m.name}_template.jinja", "model.custom_chat_template")
    held = "model.fsdp_config.model_dtype" if first(m) else "engine.model_dtype"
    dtype = common.DTYPES.get(m.text(held))
    m.set("train.param_dtype", dtype if dtype in ("fp32", "bf16") else "fp32", held)


def saving(m: Migration):
    """Sets run.dir, checkpoint.every_steps (every_epochs=1 for after_each_epoch), every_minutes=0, checkpoint.keep
    and run.resume: never for disable, else auto. For resume_path it asks for an exported folder, as verl's
    checkpoints are not read."""
    t = TRAINER
    if m.given(t + "default_local_dir"):
        m.set("run.dir", m.text(t + "default_local_dir").rstrip("/"), t + "default_local_dir")
    every = m[t + "save_freq"]
    m.set("checkpoint.every_minutes", 0.0, t + "save_freq")
    if every == "after_each_epoch":
        m.set("checkpoint.every_steps", 0, t + "save_freq")
        m.set("checkpoint.every_epochs", 1.0, t + "save_freq")
    else:
        common.triggers(m, "checkpoint.every_steps", m.integer(t + "save_freq"), t + "save_freq")
    most = m.integer(t + "max_ckpt_to_keep")
    m.set("checkpoint.keep", most if most and most > 0 else -1, t + "max_ckpt_to_keep")
    mode = m.text(t + "resume_mode")
    m.set("run.resume", "never" if mode == "disable" else "auto", t + "resume_mode")
    if mode == "resume_path":
        m.needs(
            "trainer.resume_mode=resume_path: verl's checkpoints are not read; name an exported folder in model.path"
        )


def length_of_run(m: Migration):
    """Sets data.epochs from total_epochs, and train.steps if total_training_steps is set."""
    steps = m.integer(TRAINER + "total_training_steps")
    m.set("data.epochs", m.integer(TRAINER + "total_epochs"), TRAINER + "total_epochs")
    if steps:
        m.set("train.steps", steps, TRAINER + "total_training_steps")
