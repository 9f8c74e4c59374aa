"""Devices, data, models, teachers, files of Cosmos-RL: the joint rules of its table. See systems/cosmos_rl.py."""

from __future__ import annotations

from jaxrl.migrate import common, devices, episodes, images
from jaxrl.migrate.source import switch
from jaxrl.migrate.systems.cosmos_rl_meaning import DISTILL, POLICY, ROLL, TRAIN, P, dense, recipe, sizes
from jaxrl.migrate.table import Migration

PAR, RPAR = POLICY + "parallelism.", ROLL + "parallelism."
PLACES = tuple(
    PAR + n
    for n in ("n_init_replicas", "tp_size", "ep_size", "dp_shard_size", "dp_replicate_size", "pp_size", "cp_size")
)


def layout(m: Migration):
    """Sets the mesh, the engine (outside SFT) and, with train.fsdp_offload, mesh.roles.policy (rest streamed).

    replicas x tp x cp x pp x shards x copies GPUs train; the engine has GPUs of its own unless mode is colocated. An
    ep_size that does not divide the GPUs of its experts, and a backend other than vllm, vllm_async and trtllm, are
    refused. The engine's pipelines are reported as not carried over.
    """
    replicas, workers = sizes(m)
    tp, cp, ep, pp = (m.integer(PAR + n) for n in ("tp_size", "cp_size", "ep_size", "pp_size"))
    gpus = replicas * workers * tp * cp * pp
    whole, samples = gpus, recipe(m) != "sft"
    engine_tp, engines = m.integer(RPAR + "tp_size"), m.integer(RPAR + "n_init_replicas")
    together = m.text("mode") == "colocated"
    if ep > 1 and workers * cp % ep:
        m.lacks(
            PAR + "ep_size", f"{ep} do not divide the {workers * cp} GPUs that the experts are spread over", refuse=True
        )
        return
    devices.mesh(m, (PAR + "dp_shard_size",), PLACES, tp=tp, pp=pp, cp=cp, ep=ep, gpus=gpus)
    copies = replicas * m.integer(PAR + "dp_replicate_size")
    if copies > 1 and gpus // (tp * ep) % copies == 0:
        m.set("mesh.dp", copies, PAR + "n_init_replicas", PAR + "dp_replicate_size")
    if samples:
        _engine(m, gpus, engine_tp, gpus // engine_tp or 1 if together else engines, together)
        whole = gpus if together else gpus + engine_tp * engines
    devices.count_gpus(m, 0 if m.integer(PAR + "dp_shard_size") == -1 else whole, whole, gpus)
    if m.flag(TRAIN + "fsdp_offload"):
        devices.rest(m, "streamed", TRAIN + "fsdp_offload")


def _engine(m: Migration, gpus: int, tp: int, engines: int, together: bool):
    backend = m.text(ROLL + "backend")
    if backend not in ("vllm", "vllm_async", "trtllm"):
        m.lacks(ROLL + "backend", f"{backend!r}: the engine is vLLM, for language models", refuse=True)
        return
    devices.engine(
        m,
        backend.removesuffix("_async"),
        ROLL + "backend",
        tp=tp,
        engines=engines,
        nodes=1,
        gpus=gpus,
        colocated=together,
        keys=(RPAR + "n_init_replicas", RPAR + "tp_size", "mode", *PLACES),
    )
    if m.integer(RPAR + "pp_size") > 1:
        m.lacks(RPAR + "pp_size", "vLLM's own pipelines are not tried with weight updates; give it tensor_parallel")
    m.set("rollout.vllm.memory_fraction", m.number(ROLL + "gpu_memory_utilization"), ROLL + "gpu_memory_utilization")
    m.set("rollout.vllm.chunked_prefill", m.flag(ROLL + "enable_chunked_prefill"), ROLL + "enable_chunked_prefill")
    kwargs = "rollout.vllm.engine_kwargs."
    m.set(kwargs + "enforce_eager", m.flag(ROLL + "enforce_eager"), ROLL + "enforce_eager")
    if m.text(ROLL + "quantization").lower() not in ("", "none"):
        m.set(kwargs + "quantization", m.text(ROLL + "quantization"), ROLL + "quantization")
    if m.integer(RPAR + "ep_size") > 1:
        m.set(kwargs + "enable_expert_parallel", True, RPAR + "ep_size")
    if m.flag(ROLL + "vllm_use_flashinfer"):
        m.set(kwargs + "attention_backend", "FLASHINFER", ROLL + "vllm_use_flashinfer")
    if m.flag(ROLL + "sampling_config.use_flashinfer"):
        m.set("rollout.vllm.env.VLLM_USE_FLASHINFER_SAMPLER", "1", ROLL + "sampling_config.use_flashinfer")
    if m.text(ROLL + "mode") == "async":
        most = m.integer(ROLL + "async_config.max_concurrent_requests")
        m.set("rollout.vllm.max_requests", most, ROLL + "async_config.max_concurrent_requests", ROLL + "mode")


def data(m: Migration):
    """Sets data.path, subset, revision, split, shuffle, workers, prefetch, cache and the columns from Cosmos-RL's data
    set and loader; in SFT also train_turns=all, system_prompt and drop_last. Asks for data.path if no data set is
    named."""
    d, sft = P + "dataset.", recipe(m) == "sft"
    place = m.text(d + "local_dir") or m.text(d + "name")
    common.data_files(m, [place], d + "name", d + "local_dir")
    if not place:
        m.needs("data.path: the source names no data set; the launcher's script gives it")
    if m.text(d + "subset"):
        m.set("data.subset", m.text(d + "subset"), d + "subset")
    if m.text(d + "revision"):
        m.set("data.revision", m.text(d + "revision"), d + "revision")
    splits = tuple(str(s) for s in m.list(d + "split") if s)
    if splits:
        m.set("data.split", splits, d + "split")
    m.set("data.shuffle", m.flag(P + "dataloader_shuffle"), P + "dataloader_shuffle")
    workers, ahead = m.integer(P + "dataloader_num_workers"), m.integer(P + "dataloader_prefetch_factor")
    m.set("data.workers", max(workers, 0), P + "dataloader_num_workers")
    if workers > 0 and ahead:
        m.set("data.prefetch", ahead, P + "dataloader_prefetch_factor")
    m.set("data.cache", "auto" if m.flag(P + "enable_dataset_cache") else "", P + "enable_dataset_cache")
    if sft:
        m.set("data.prompt_column", m.text(P + "conversation_column_name"), P + "conversation_column_name")
        m.set("data.train_turns", "all", P + "type")
        m.set("data.system_prompt", m.text(P + "system_prompt"), P + "system_prompt")
        m.set("data.drop_last", m.flag(P + "dataloader_drop_last"), P + "dataloader_drop_last")
        return
    for key, option in (("prompt", "data.prompt_column"), ("response", "data.answer_column")):
        if m.text(f"{P}{key}_column_name"):
            m.set(option, m.text(f"{P}{key}_column_name"), f"{P}{key}_column_name")


def saving(m: Migration):
    """Sets checkpoint.*, run.dir and run.resume from train.ckpt, train.output_dir and train.resume; without
    enable_checkpoint nothing is saved. Asks for an exported folder if train.resume is a path, and, where checkpoints
    are on, for the owner of hf_repo_name if it has none; then raises Unreadable for an upload_s3 other than false,
    final and all, or one of the last two without s3_bucket."""
    c = TRAIN + "ckpt."
    on, every, epochs = m.flag(c + "enable_checkpoint"), m.integer(c + "save_freq"), m.integer(c + "save_freq_in_epoch")
    enable = c + "enable_checkpoint"
    m.set(
        "checkpoint.every_steps", every if on and epochs <= 0 else 0, c + "save_freq", c + "save_freq_in_epoch", enable
    )
    m.set("checkpoint.every_minutes", 0.0, enable)
    m.set("checkpoint.at_end", on, enable)
    m.set("checkpoint.export_at_end", on, enable)
    if m.text(TRAIN + "output_dir"):
        m.set("run.dir", m.text(TRAIN + "output_dir").removeprefix("./").rstrip("/") or "outputs", TRAIN + "output_dir")
    at = m[TRAIN + "resume"]
    m.set("run.resume", "auto" if at else "never", TRAIN + "resume")
    if isinstance(at, str) and at:
        m.needs("train.resume: checkpoints of Cosmos-RL are not read; name its exported folder in model.path")
    if not on:
        return
    export = m.flag(c + "export_safetensors")
    if epochs > 0:
        m.set("checkpoint.every_epochs", float(epochs), c + "save_freq_in_epoch")
        m.set(
            "checkpoint.export_every_epochs",
            float(epochs) if export else 0.0,
            c + "export_safetensors",
            c + "save_freq_in_epoch",
        )
    else:
        m.set("checkpoint.export_every_steps", every if export else 0, c + "export_safetensors", c + "save_freq")
    m.set("checkpoint.asynchronous", m.text(c + "save_mode") != "sync", c + "save_mode")
    keep = m.integer(c + "max_keep")
    m.set("checkpoint.keep", keep if keep > 0 else -1, c + "max_keep")
    _uploads(m, c)


def _uploads(m: Migration, c: str):
    places, keys = [], []
    if m.flag(c + "upload_hf"):
        if "/" in m.text(c + "hf_repo_name"):
            places.append("hf://" + m.text(c + "hf_repo_name"))
            keys += [c + "upload_hf", c + "hf_repo_name"]
        else:
            m.needs("train.ckpt.hf_repo_name has no owner: name owner/name in checkpoint.upload.to=hf://owner/name")
    what = str(m[c + "upload_s3"]).lower()
    if what in ("final", "all") and m.text(c + "s3_bucket"):
        places.append("/".join(("s3:/", m.text(c + "s3_bucket"), m.text(c + "s3_prefix").strip("/"))).rstrip("/"))
        keys += [c + "upload_s3", c + "s3_bucket", c + "s3_prefix"]
        m.set("checkpoint.upload.checkpoints", what, c + "upload_s3")
        m.set("checkpoint.upload.exports", what, c + "upload_s3")
    elif what not in ("false", "final", "all"):
        raise m.wrong(c + "upload_s3", "false, final or all")
    elif what != "false":
        raise m.wrong(c + "upload_s3", "a bucket in train.ckpt.s3_bucket beside it")
    if places:
        m.set("checkpoint.upload.to", tuple(places), *keys)


def model(m: Migration):
    """Sets model.path, model.revision, model.trainable and model.frozen from policy; names of a tower's parts become
    jaxrl's. A model_safetensor_path is reported as not carried over."""
    key = POLICY + "model_name_or_path"
    name = m.text(key)
    m.set("model.path", name, key)
    if m.text(POLICY + "model_revision"):
        m.set("model.revision", m.text(POLICY + "model_revision"), POLICY + "model_revision")
    if m.text(POLICY + "model_safetensor_path"):
        m.lacks(POLICY + "model_safetensor_path", "weights lie in the folder of model.path")
    maps = {s.key[len(POLICY + "trainable_map.") :]: switch(s.value) for s in m.all(POLICY + "trainable_map.**")}
    for names, option in (
        ([n for n, on in maps.items() if on], "trainable"),
        ([n for n, on in maps.items() if not on], "frozen"),
    ):
        if names:
            m.set(f"model.{option}", tuple(images.tower(n) or n.replace(".", r"\.") for n in names),
                  POLICY + "trainable_map.**")
    for source, option in (("freeze_pattern", "frozen"), ("trainable_pattern", "trainable")):
        if m.list(POLICY + source):
            patterns = [str(x) for x in m.list(POLICY + source)]
            m.set(f"model.{option}", tuple(images.tower(x) or x for x in patterns), POLICY + source)


def adapters(m: Migration):
    """Sets lora.* if the source has a table policy.lora, an empty one too: rank and alpha are 8 unless it sets them.

    Without target_modules all-linear is written, and jaxrl asks for lora.targets. A dropout outside SFT and
    init_lora_weights=false are reported as not carried over; several lora_names are refused.
    """
    lo = POLICY + "lora."
    if not any(k.startswith(lo) for k in m.singles) and m[lo[:-1]] != {}:
        return
    targets = m[lo + "target_modules"]
    rank, alpha = (8 if m.number(lo + n) is None else m.number(lo + n) for n in ("r", "lora_alpha"))
    dropout = m.number(lo + "lora_dropout") or 0.0
    keys = (lo[:-1], *(lo + n for n in ("r", "lora_alpha", "target_modules")))
    common.lora(m, int(rank), alpha, targets or "all-linear", None, "", 0.0, keys)
    if not targets:
        m.needs(
            "lora.targets: policy.lora.target_modules is not set, and PEFT chooses by the model; all-linear was written"
        )
    if dropout and recipe(m) == "sft":
        m.set("lora.dropout", dropout, lo + "lora_dropout")
    elif dropout:
        m.lacks(lo + "lora_dropout", "dropout of adapters is for SFT alone here")
    if m.text(lo + "lora_path"):
        m.set("lora.path", m.text(lo + "lora_path"), lo + "lora_path")
    if len(m.list(lo + "lora_names")) > 1:
        m.lacks(
            lo + "lora_names", "several adapters are entries of lora.adapters, each with rows of its own", refuse=True
        )
    m.set("lora.rslora", m.flag(lo + "use_rslora"), lo + "use_rslora")
    if m.list(lo + "modules_to_save"):
        m.set("lora.modules_to_save", tuple(str(x) for x in m.list(lo + "modules_to_save")), lo + "modules_to_save")
    for source, option in (("alpha_pattern", "alpha_pattern"), ("r_pattern", "rank_pattern")):
        found = m.all(f"{lo}{source}.**")
        if found:
            entries = tuple(f"{s.key[len(lo + source) + 1 :]}={s.value}" for s in found)
            m.set(f"lora.{option}", entries, f"{lo}{source}.**")
    start = switch(m[lo + "init_lora_weights"])
    if start is False:
        m.lacks(lo + "init_lora_weights", "adapters that are no no-op at the start")
    elif start and isinstance(start, str):
        m.set("lora.init", start, lo + "init_lora_weights")


def distillation(m: Migration):
    """Sets teacher.*, distill.*, train.score_tokens_per_microbatch and, with fsdp_offload, mesh.roles.teacher if the
    recipe is distill.

    Without top_k the loss is sampled: the teacher's log-probs are the advantage of sampled tokens; include_prompt is
    then reported as not carried over. With top_k it is a divergence over so many tokens: forward for jsd_beta 0,
    reverse for 1, else jsd. What differs from Cosmos-RL's is noted, and kl_discount_factor beside it refused. If the
    source names no teacher, Cosmos-RL's default is set and jaxrl asks for another.
    """
    if recipe(m) != "distill":
        return
    d, key = DISTILL, DISTILL + "model_name_or_path"
    m.set("teacher.path", m.text(key), key)
    if not m.given(key):
        m.needs("teacher.path: distillation.model_name_or_path is not set; its default is a model of images and text")
    if m.text(d + "model_revision"):
        m.set("teacher.revision", m.text(d + "model_revision"), d + "model_revision")
    held = common.DTYPES.get(m.text(d + "master_dtype"), "fp32")
    m.set("teacher.dtype", held if held in ("fp32", "bf16") else "bf16", d + "master_dtype")
    m.set("distill.coef", m.number(d + "kl_penalty_coef"), d + "kl_penalty_coef")
    if m.flag(d + "fsdp_offload"):
        m.set("mesh.roles.teacher", {"rest": "host"}, d + "fsdp_offload")
    longest, capped = m.options["train.max_sequence_tokens"][0], m.integer(d + "max_token_len_per_mini_batch")
    tokens = max(capped, longest) if capped else m.integer(d + "mini_batch") * longest
    m.set("train.score_tokens_per_microbatch", tokens, d + ("max_token_len_per_mini_batch" if capped else "mini_batch"))
    gamma, top_k, beta = m.number(d + "kl_discount_factor"), m.integer(d + "top_k"), m.number(d + "jsd_beta")
    if not dense(m):
        m.set("distill.loss", "sampled", d + "top_k")
        m.set("distill.gamma", gamma, d + "kl_discount_factor")
        if m.flag(d + "include_prompt"):
            m.lacks(d + "include_prompt", "the loss of sampled tokens is taken where the student sampled")
        return
    m.set("distill.loss", "forward" if beta == 0 else "reverse" if beta == 1 else "jsd", d + "jsd_beta", d + "top_k")
    if m.options["distill.loss"][0] == "jsd":
        m.set("distill.beta", beta, d + "jsd_beta")
    m.set("distill.top_k", top_k, d + "top_k")
    m.set("distill.tail", False, d + "top_k")
    m.set("distill.on_prompt", m.flag(d + "include_prompt"), d + "include_prompt")
    if gamma:
        m.lacks(d + "kl_discount_factor", "a divergence over several tokens is credited to its own place", refuse=True)
    whose = "teacher's" if m.flag(d + "trainer_token_ids_from_teacher") else "student's"
    ours = "teacher's" if beta == 0 else "student's"
    m.differs(
        f"the divergence is the loss itself; in Cosmos-RL it is an advantage, times the ratio: its gradient has a term "
        f"more, of the tokens that were sampled. The {top_k} tokens are the {ours} most probable, in Cosmos-RL the "
        f"{whose}"
    )


def turns(m: Migration):
    """Sets env.function to a stub, env.max_turns and env.observations, data.add_generation_prompt, and the chat
    template and its enable_thinking, if multi_turn_config.enable is set outside SFT. Asks the user to write the
    stub."""
    t = ROLL + "multi_turn_config."
    if recipe(m) == "sft" or not m.flag(t + "enable"):
        return
    said = [(s.key, s.value) for s in m.singles.values() if s.key.startswith(t)]
    turns = m.integer(t + "max_assistant_turns")
    episodes.episode(m, "the launcher's script", said, turns, t + "enable", t + "max_assistant_turns")
    if m.flag(t + "enable_thinking"):
        m.set("data.chat_template_kwargs.enable_thinking", True, t + "enable_thinking")
    if m.text(t + "custom_chat_template_path"):
        common.chat_template(m, t + "custom_chat_template_path")
    m.set("data.add_generation_prompt", m.flag(t + "add_generation_prompt"), t + "add_generation_prompt")
    inline = m.flag(t + "continue_final_message")
    m.set("env.observations", "inline" if inline else "message", t + "continue_final_message")


def loggers(m: Migration):
    """Sets log.wandb, log.tensorboard (always on), log.wandb_project, log.wandb_name and log.wandb_group from logging.
    Loggers other than console, print, file, tensorboard and wandb are reported as not carried over. An experiment_name
    "None" counts as none."""
    g = "logging."
    names, run = m.list(g + "logger"), m.text(g + "experiment_name")
    run = "" if run == "None" else run  # its own examples write the word
    common.loggers(m, g + "logger", names, m.text(g + "project_name"), run, g + "project_name", g + "experiment_name")
    if m.text(g + "group_name"):
        m.set("log.wandb_group", m.text(g + "group_name"), g + "group_name")


def profiler(m: Migration):
    """Sets profile.steps and profile.python if profiler.enable_profiler is set, profile.memory with profile_memory and
    profile.processes with a rank_filter: active_steps steps, at least one, are traced after wait_steps and
    warmup_steps. rank_filter counts GPUs, profile.processes hosts, which is noted as a difference."""
    if not m.flag("profiler.enable_profiler"):
        return
    s = "profiler.sub_profiler_config."
    wait, warm, active = (m.integer(s + n) for n in ("wait_steps", "warmup_steps", "active_steps"))
    keys = ("profiler.enable_profiler", s + "wait_steps", s + "warmup_steps", s + "active_steps")
    span = (wait + warm + 1, wait + warm + max(active, 1))
    m.set("profile.steps", span, *keys)
    if m.flag(s + "profile_memory"):
        m.set("profile.memory", span, s + "profile_memory", *keys)
    m.set("profile.python", m.flag(s + "with_stack"), s + "with_stack")
    if m.list(s + "rank_filter"):
        m.set("profile.processes", tuple(int(r) for r in m.list(s + "rank_filter")), s + "rank_filter")
        m.differs("profile.processes are hosts; Cosmos-RL's ranks are GPUs")


def custom(m: Migration):
    """Sets user.NAME from every key custom.NAME."""
    for s in m.all("custom.**"):
        m.set("user." + s.key[len("custom.") :], s.value, s.key)
