"""Sets up a job before its first step: reads and checks inputs, makes mesh, model and engine, describes the run.
Recipes call `open_run`, replay and the planner `open_job`. Parameters are made by jaxrl.roles."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from jaxrl import data as jaxrl_data
from jaxrl import models, sharding, training
from jaxrl.checkpoint.fingerprints import compare_inputs
from jaxrl.config.lengths import longest_sequence, made_of
from jaxrl.config.load import get
from jaxrl.config.registry import recipe_of, sequences
from jaxrl.config.run_length import ends
from jaxrl.errors import ConfigError
from jaxrl.kernels import check, low_precision
from jaxrl.kernels.attention.packed.api import ORDERS, XLA
from jaxrl.kernels.fallback import distrust
from jaxrl.kernels.platform import platform
from jaxrl.models import adapters
from jaxrl.models.feed_forward import activation_of
from jaxrl.models.io import hf
from jaxrl.models.value import ValueModel
from jaxrl.processes.exchange import put
from jaxrl.resolve.spec import here, resolve
from jaxrl.rewards import RewardPool
from jaxrl.rewards.items import trial_items
from jaxrl.roles.parameters import DTYPES, attach_adapter, dtype_of, engine_model, policy_tree, source_of, trained_names
from jaxrl.roles.reward_model import RewardModel, read_reward_model
from jaxrl.rollout import EngineContext, engine_row, make_engine
from jaxrl.rollout.engines import check_served, check_tower_served, shared_gpus
from jaxrl.rollout.threaded import ThreadedEngine
from jaxrl.rollout.vllm.options import BOTH_MEMORY, memory_fraction
from jaxrl.run.data import (
    check_column,
    check_controls,
    check_services,
    image_lines,
    load_data,
    most_patches,
    open_images,
    sets_to_complete,
    with_room,
    with_tower,
)
from jaxrl.run.environments import episode_engine, open_episode_pool
from jaxrl.run.heap import keep_freed_memory
from jaxrl.run.judge_server import JudgeServers
from jaxrl.run.model_checks import check_classifier, check_layers, check_tower
from jaxrl.run.session import Session
from jaxrl.sharding import memory
from jaxrl.sharding.mesh import processes_of
from jaxrl.telemetry import find_sink

log = logging.getLogger("jaxrl")
KERNELS = Path(os.path.expanduser("~/.cache/jaxrl/kernels.json"))  # verdicts on them, by device, jax and source


@dataclasses.dataclass
class Job:
    """The fixed parts of a run; parameters are in the TrainState of its roles.

    config: Spec. mesh: the policy's. model: models.Model with its adapters. hf_config: as hf.load_config returns it.
    eos_ids: as `eos_ids` returns them. row_shapes: RowShapes of updates. compute_dtype: of the forward pass."""

    config: Any
    run_dir: Path
    mesh: Any
    tokenizer: Any
    hf_config: dict
    model: Any
    eos_ids: tuple[int, ...]
    compute_dtype: Any
    row_shapes: Any
    # RowShapes of scoring; equal to row_shapes unless train.score_tokens_per_microbatch is set
    score_shapes: Any
    meshes: dict = dataclasses.field(default_factory=dict)  # role -> mesh, where it is not the policy's
    # Added by open_run: rewards of training and of evaluation, held-out sets, stream of training rows, engine.
    rewards: Any = None
    eval_rewards: Any = None
    eval_sets: dict = dataclasses.field(default_factory=dict)
    stream: Any = None
    engine: Any = None
    reward_model: Any = None  # roles.reward_model.RewardModel, or None
    images: Any = None  # data.images.source.ImageSource; None: no row has an image

    @property
    def decode(self):
        """A function: list of token ids per completion -> list of texts (see data.completion_texts)."""
        return jaxrl_data.completion_texts(self.tokenizer, (*self.eos_ids, *self.config.rollout.stop_token_ids))

    def mesh_of(self, role: str):
        """Returns the mesh of a role; the policy's unless mesh.roles says otherwise."""
        return self.meshes.get(role, self.mesh)

    def on(self, role: str):
        """Returns a context in which programs run on a role's mesh."""
        mesh = self.mesh_of(role)
        return contextlib.nullcontext() if mesh is self.mesh else jax.set_mesh(mesh)

    def here(self, role: str) -> bool:
        """Returns whether a role has devices in this process."""
        return jax.process_index() in processes_of(self.mesh_of(role))

    def apart(self, role: str) -> bool:
        """Returns whether a role has devices of its own that no other role uses."""
        others = [self.mesh, *(mesh for name, mesh in self.meshes.items() if name != role)]
        taken = {d for mesh in others for d in mesh.devices.flat}
        return role in self.meshes and not set(self.meshes[role].devices.flat) & taken

    def rests(self, role: str) -> bool:
        """Whether a role leaves its devices between its uses (mesh.roles.<role>.rest; rollout.placement=colocated)."""
        if role == "sampler" and self.config.rollout.placement == "colocated":
            return True
        return self.config.mesh.roles.get(role, {}).get("rest", "device") in ("host", "none")

    def streams(self, role: str) -> bool:
        """Whether a role's parameters stay in host memory and are streamed through the programs that use them."""
        return self.config.mesh.roles.get(role, {}).get("rest") == "streamed"

    def put(self, batch, role="policy"):
        """Puts a host PackedBatch, whole on every process, on a role's devices: rows over dp x fsdp x ep, each row
        over cp."""
        return put(batch, sharding.batch_sharding(self.mesh_of(role)))

    @property
    def tree(self):
        """Parameter table of the policy: the model, with the critic's value head if it shares the trunk."""
        return policy_tree(self.model, self.config.shares_trunk)


def start_jax(config) -> None:
    """Applies process-wide settings (determinism, memory, compile cache), before the first device use."""
    keep_freed_memory()
    if config.run.deterministic:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"
    share_gpus(shared_gpus(config), memory_fraction(config), os.environ)
    cache = config.run.compile_cache
    path = Path.home() / ".cache" / "jaxrl" / "xla" if cache == "auto" else Path(cache).expanduser()
    directory = str(path) if cache else None
    if jax.config.jax_compilation_cache_dir != directory:  # an earlier job of this process may have used another
        compilation_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", directory)
    least = min(0.3, jax.config.jax_persistent_cache_min_compile_time_secs)  # the environment may set less
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    if cache and config.run.compile_cache_gb:
        trim_cache(path, config.run.compile_cache_gb)


def trim_cache(folder: Path, limit_gb: float) -> None:
    """Deletes the least recently used compiled programs, so that the cache takes at most limit_gb GB (1e9 bytes).

    (jax's own limit, jax_compilation_cache_max_size, stops writing into a folder that was begun without it.)
    """
    with contextlib.suppress(OSError):  # another run may trim, too; a deleted program is compiled again
        found = [(max(s.st_atime, s.st_mtime), s.st_size, p) for p in folder.glob("*-cache") for s in [p.stat()]]
        total = 0
        for _, size, path in sorted(found, reverse=True):
            total += size
            if total > limit_gb * 1e9:
                path.unlink(missing_ok=True)


def share_gpus(how: str, fraction: float, environ) -> None:
    """Limits jax's memory on GPUs of which vLLM servers take the share `fraction`, by setting variables in `environ`.

    Values that the user set stay. how (engines.shared_gpus): "": nothing. "turns": memory returns to the device once
    it is free, which of jax's allocators only `platform` does (jax's documentation, "GPU memory allocation"), at a
    cost per allocation. "halves": jax takes a fixed part."""
    if how == "turns":
        environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    elif how == "halves" and "XLA_CLIENT_MEM_FRACTION" not in environ:
        environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{max(0.05, BOTH_MEMORY - fraction):.2f}")


def first_prompt(s, job) -> str:
    """Returns a console line with the first rendered prompt and its tokens; "" if resumed or without rows."""
    if job.stream is None or s.step:
        return ""
    example = job.stream.dataset[0]
    text = example.prompt_text if example.images else job.tokenizer.decode(example.prompt_ids)  # an image is one token
    return f"first prompt ({len(example.prompt_ids)} tokens): {text!r}"


class JobInputs(NamedTuple):
    """The inputs of a job, read and checked: tokenizer and model description, rewards of training and evaluation,
    held-out sets, stream of training rows, workers of episodes, description of a reward model."""

    model_inputs: ModelInputs
    rewards: Any
    eval_rewards: Any
    eval_sets: dict
    stream: Any
    pool: Any = None
    reward_model: Any = None


def read_job_inputs(s, with_rewards: bool = True) -> JobInputs:
    """Reads and checks all inputs of a Session before any device work, and sets its stream. Raises ConfigError.
    with_rewards: also opens rewards, unless the job trains on pairs and no held-out set needs completions."""
    c, inputs, pool = s.spec, s.inputs, None
    rewards: Any = None
    eval_rewards: Any = None
    servers: Any = None
    for sink in c.log.sinks:
        find_sink(sink)
    if with_rewards and not c.recipe.pairs:  # workers start while the rest is read
        pool, rewards, eval_rewards, servers = _start_workers(s)
    model_inputs = read_model_inputs(c, inputs.tokenizer)
    jaxrl_data.template_date(model_inputs.tokenizer, (s.resumed and s.resumed.host.get("read") or {}).get("day", ""))
    if s.resumed is None:
        check_weights(c, model_inputs)
    if pool is not None:
        pool.ready()
    if (images := open_images(c, model_inputs.hf_config, model_inputs.tokenizer)) is not None:
        s.close_at_end(images)
    tools = pool.tools if pool is not None else ()
    train_set, eval_sets = load_data(c, inputs, model_inputs.tokenizer, model_inputs.eos_ids[0], tools, images)
    check_column(c, images, train_set, eval_sets, model_inputs.hf_config)
    check_controls(c, eval_sets)
    check_services(c, images, [one for one in (train_set, *eval_sets.values()) if one is not None])
    if images is not None and images.used:  # else a job of text, whose model is read without its tower
        model_inputs = with_tower(c, model_inputs, images)
        if s.resumed is None:
            check_weights(c, model_inputs)
    elif models.FAMILIES[model_inputs.hf_config["model_type"]].vision:
        check_classifier(c, model_inputs.hf_config["model_type"])
    reward_model = read_reward_model(c, model_inputs.tokenizer, model_inputs.images) if with_rewards else None
    if models.FAMILIES[model_inputs.hf_config["model_type"]].vision:
        adapted = attach_adapter(c, dataclasses.replace(model_inputs.table, scan_layers=False))
        adapters.check(adapted)
        check_tower(adapted)
        check_tower_served(c, model_inputs.hf_config, model_inputs.table.config.vision)
    workers = {"env.*": pool, "reward.functions": rewards, "eval.rewards": eval_rewards}
    workers = {option: its for option, its in workers.items()
               if its is not None and (option != "eval.rewards" or its is not rewards)}
    fingerprints = compare_inputs(c, s.peers, model_inputs, train_set, eval_sets, s.resumed, workers)
    stream = None if train_set is None else s.close_at_end(jaxrl_data.Stream.from_config(c, train_set, s.resumed_part))
    s.set_stream(stream, fingerprints)
    with_rewards = with_rewards and (not c.recipe.pairs or bool(sets_to_complete(c, eval_sets)))
    if with_rewards:
        if rewards is None:
            pool, rewards, eval_rewards, servers = _start_workers(s)
        servers.wait()
        first = next(iter(sets_to_complete(c, eval_sets).values()), None)
        scored = train_set if c.recipe.samples and train_set is not None else first
        for scorer, dataset in dict.fromkeys([(eval_rewards, first), (rewards, scored)]):
            scorer.wait()
            # a reward that fails on the first rows of its data stops the run here
            if c.reward.trial and dataset is not None:
                scorer.trial(trial_items(dataset, model_inputs.tokenizer, c.data.response_prefix, images))
        for scorer in dict.fromkeys([eval_rewards, rewards]) if s.peers.first else ():
            for found in scorer.agreements():
                log.info(found.text())
    return JobInputs(model_inputs, rewards, eval_rewards, eval_sets, stream, pool, reward_model)


def _start_workers(s):
    """Starts workers; returns (pool of episodes or None, training rewards, evaluation rewards, judge servers)."""
    pool = open_episode_pool(s)
    functions = s.inputs.rewards if s.inputs.rewards is not None else s.spec.reward.functions
    named = {f for f in (*functions, *s.spec.eval.rewards) if isinstance(f, str)}
    servers = s.close_at_end(JudgeServers(s.spec, named, s.peers.count))
    rewards = eval_rewards = s.close_at_end(RewardPool(s.spec, functions=s.inputs.rewards, servers=servers.servers))
    if s.spec.eval.rewards:
        eval_rewards = s.close_at_end(RewardPool(s.spec, names=s.spec.eval.rewards, servers=servers.servers))
    return pool, rewards, eval_rewards, servers


def check_inputs(config, inputs=None, with_rewards: bool = True) -> None:
    """Reads and checks inputs as `read_job_inputs`, then closes them. Raises ConfigError; touches no device."""
    with Session(resolve(config), inputs) as s:
        read_job_inputs(s, with_rewards)


def open_run(s, with_engine: bool = True) -> Job:
    """Opens the job of a Session: all inputs, devices and model, then the engine, without weights, and the reward model
    if with_engine is set and something is to be completed (without it no rewards either). Raises ConfigError."""
    read = read_job_inputs(s, with_engine)
    job = open_job(s.spec, read.model_inputs)
    if job.images is not None:
        job = with_room(job, read.stream and read.stream.dataset, read.eval_sets.values())
    s.set_spec(job.config)
    check_kernels(s, job)
    engine, most = None, most_patches(read.stream, read.eval_sets, job.images,
                                      job.config.env.image_tokens * job.config.episodes)
    if with_engine and read.rewards is not None:
        engine = make_engine(EngineContext(job.config, engine_model(job), job.tokenizer, job.mesh_of("sampler"),
                                           job.eos_ids, job.hf_config, most))
        overlaps = job.apart("sampler")
        if read.pool is not None:
            engine = episode_engine(engine, read.pool, job.config, job.tokenizer, job.images)
            overlaps = overlaps or engine.info.concurrent
        engine = s.close_at_end(ThreadedEngine(engine) if job.config.ahead and overlaps else engine)
        if job.rests("sampler"):
            if not engine.info.sleeps:
                raise ConfigError(f"rollout.placement=colocated: the engine {job.config.rollout.engine!r} cannot rest "
                                  "(EngineInfo.sleeps)")
            engine.sleep()  # frees its devices for the parameters that are loaded next
    reward_model = RewardModel(job, read.reward_model, most) if read.reward_model is not None else None
    return dataclasses.replace(job, rewards=read.rewards, eval_rewards=read.eval_rewards, eval_sets=read.eval_sets,
                               stream=read.stream, engine=engine, reward_model=reward_model)


def check_kernels(s, job) -> None:
    """Disables kernels, of options that are auto, that disagree with the reference on these devices, on every process
    if one finds so. Checks once per device, jax version and kernel source; CPUs have no kernels."""
    wrong: dict[str, dict[str, str]] = {"attention": {}, "experts": {}, "recurrence": {}}
    c, kernels = job.model.config, [name for name in ORDERS[platform()] if name not in XLA]
    if kernels and job.config.model.attention == "auto":
        heads = check.Heads(2 * c.num_heads // c.num_kv_heads, 2, c.head_dim)
        found = check.first_use(job.compute_dtype, heads, c.attention_softcap, c.sinks, KERNELS,
                                reach=c.vision is not None and c.vision.two_way)
        for disagreeing in s.peers.all_gather("kernels of attention", found):
            wrong["attention"] |= disagreeing
    if kernels and c.num_experts and job.config.model.experts == "auto":
        tp = job.mesh.shape["tp"]
        width = c.expert_size // tp if c.expert_size % tp == 0 else c.expert_size
        layer = check.Experts(c.expert_inputs, width, activation_of(c), f"{c.activation} {c.gate_alpha} {c.gate_limit}",
                              c.expert_bias, c.expert_gate)
        found = check.first_use_of_experts(job.compute_dtype, layer, KERNELS)
        for disagreeing in s.peers.all_gather("kernels of experts", found):
            wrong["experts"] |= disagreeing
    if kernels and c.num_recurrent and job.config.model.recurrence == "auto":
        rule = check.Recurrence(c.linear_value_heads // c.linear_key_heads, c.linear_key_size, c.linear_value_size,
                                not c.is_mamba)
        found = check.first_use_of_recurrence(job.compute_dtype, rule, KERNELS)
        for disagreeing in s.peers.all_gather("kernels of recurrence", found):
            wrong["recurrence"] |= disagreeing
    for op, names in wrong.items():
        distrust(op, names)
        for name, why in names.items():
            log.warning("%s: %s does not agree with the reference on this device, or failed (%s); the next "
                        "implementation runs. Report it with the file that jaxrl doctor writes", op, name, why)


class ModelInputs(NamedTuple):
    """Tokenizer and model description, read before any device work. table: the model, for its parameter table only.
    images: the ImageSource of a job whose rows hold images."""

    tokenizer: Any
    hf_config: dict
    eos_ids: tuple[int, ...]
    table: Any
    images: Any = None


def read_model_inputs(config, tokenizer=None) -> ModelInputs:
    """Reads the tokenizer (unless passed) and the model description. Touches no device, loads no weights.

    Raises ConfigError if one cannot be read or they do not fit each other.
    """
    m = config.model
    try:
        hf_config = hf.load_config(source_of(m.path), m.revision, m.config.to_dict(), weights=m.init == "pretrained")
        table = models.build(hf_config, compute_dtype=jnp.float32, scan_layers=True)
    except ConfigError as e:
        raise e if m.path in str(e) else ConfigError(f"model.path={m.path!r}: {e}") from None
    unrolled = dataclasses.replace(table, scan_layers=False)  # whether layers are scanned is not decided yet
    if not models.FAMILIES[hf_config["model_type"]].vision:  # of those it is known later whether the tower is read
        adapters.check(attach_adapter(config, unrolled))
    experts = table.config.num_expert_layers
    check_layers(config, unrolled)
    table.check_length(longest_sequence(config))
    if experts and config.lora.adapters:
        raise ConfigError(f"lora.adapters with experts (model_type={hf_config['model_type']}): the load of the experts "
                          "is that of all adapters' tokens; train one adapter at a time")
    family = models.FAMILIES[hf_config["model_type"]]
    merged, publish = family.merged_only, config.lora.publish
    if merged and publish == "adapter" and engine_row(config).servers and recipe_of(config).samples:
        raise ConfigError(f"lora.publish=adapter with {merged} (model_type={hf_config['model_type']}): adapters on "
                          f"them are not known to work in {engine_row(config).title}; set lora.publish=merged")
    check_served(config, hf_config, family)
    if not family.vision:  # with its tower jaxrl writes one that it reads itself
        check_classifier(config, hf_config["model_type"])
    own = tokenizer is not None
    tokenizer = jaxrl_data.apply_overrides(config, copy.deepcopy(tokenizer)) if own else (
        jaxrl_data.load_tokenizer(config))
    if len(tokenizer) > table.config.vocab_size:
        raise ConfigError(
            f"model.tokenizer has {len(tokenizer)} entries, the model's vocab_size is {table.config.vocab_size};"
            " use the model's own tokenizer or set model.config.vocab_size"
        )
    return ModelInputs(tokenizer, hf_config, eos_ids(config, hf_config, tokenizer), table)


def check_weights(config, inputs: ModelInputs) -> None:
    """Raises ConfigError if weights of policy, reference or critic do not fit the model, by their files' headers."""
    if config.model.init == "pretrained":
        check, table = hf.check_weights, inputs.table
        if recipe_of(config).scores:  # a language model or a sequence classifier
            check, table = hf.check_critic, ValueModel(table, name=config.reward_model.head, bias=False)
        check(table, source_of(config.model.path), config.model.revision)
    critic = ValueModel(inputs.table, name=config.critic.head)
    for role, check, table in (("reference", hf.check_weights, inputs.table), ("critic", hf.check_critic, critic)):
        if path := config[role].path:
            try:
                check(table, source_of(path), config[role].revision)
            except ConfigError as e:
                raise hf.error_of(f"{role}.path", path, e) from None


def open_job(config, model_inputs: ModelInputs | None = None, mesh=None) -> Job:
    """Makes mesh and fixed parts of a run; loads no weights. Sets jax's mesh (unless `mesh` is passed, for plans: its
    devices need not exist) and matmul precision. config: a Spec or ConfigDict, resolved against the devices.
    model_inputs: None = read here.

    Raises ConfigError if the devices do not fit the mesh, and as read_model_inputs does.
    """
    tokenizer, hf_config, ends, _, images = model_inputs or read_model_inputs(config)
    meshes = {}
    if mesh is None:
        meshes = sharding.role_meshes(config.mesh)
        mesh = meshes.pop("policy")
        meshes = {role: own for role, own in meshes.items() if own is not mesh}
        jax.set_mesh(mesh)
    spec = resolve(config, getattr(config, "platform", None) or here(), hf_config)
    if not isinstance(mesh, jax.sharding.AbstractMesh) and mesh is jax.sharding.get_mesh():
        check_roles(spec)
    precision = spec.run.matmul_precision
    jax.config.update("jax_default_matmul_precision", None if precision == "default" else precision)
    model = build_model(spec, hf_config)
    named = {"mesh": mesh} | {f"mesh.roles.{role}": meshes[role]  # the others may have models of their own
                              for role in sorted(set(meshes) & {"reference", "sampler"})}
    for where, one in named.items():
        sharding.check_experts(one.shape["ep"], model.config.num_experts, f"{where}.ep")
        sharding.check_recurrent(one.shape, model.config.recurrent_heads, where)
    if beyond := model.config.beyond(spec.longest, made_of(spec)):
        if spec.recipe.samples and not engine_row(spec).beyond_context:
            raise ConfigError(f"{beyond}; {engine_row(spec).title} does not serve such sequences")
        log.warning("%s", beyond)
    theirs: list[Any] = [meshes.get(role, mesh) for role in ("policy", "reference", "critic", "teacher")]
    shards, ranks = math.lcm(*map(sharding.data_shards, theirs)), math.lcm(*(m.shape["cp"] for m in theirs))
    windows = [layer.window for layer in model.config.layers]

    def shapes_of(tokens):
        return training.row_shapes(spec.train.row_lengths, spec.longest, tokens, shards, spec.train.row_counts, ranks,
                                   windows, bool(model.config.num_recurrent))

    shapes = shapes_of(spec.train.tokens_per_microbatch)
    scored = shapes_of(spec.train.score_tokens_per_microbatch) if spec.train.score_tokens_per_microbatch else shapes
    if spec.train.tokens_per_microbatch < shapes.lengths[-1]:
        log.warning("train.tokens_per_microbatch=%d is raised to %d, one row of the longest sequence",
                    spec.train.tokens_per_microbatch, shapes.lengths[-1])
    return Job(spec, Path(spec.run.dir), mesh, tokenizer, hf_config, model, ends, model.compute_dtype, shapes, scored,
               meshes, images=images)


def check_roles(config) -> None:
    """Raises ConfigError for options of host memory that the platform lacks, and for mesh.roles.sampler with an engine
    that has its own devices."""
    if "sampler" in config.mesh.roles and not engine_row(config).on_mesh:
        raise ConfigError(f"mesh.roles.sampler: rollout.engine=auto is {config.rollout.engine} here, which has its own "
                          "devices; leave it out, or set rollout.engine=jax")
    on_host = ["optimizer.offload"] * config.optimizer.offload
    on_host += ["model.remat=offload"] * (config.model.remat == "offload")
    on_host += [f"mesh.roles.{role}.rest" for role, options in config.mesh.roles.items()
                if options.get("rest") in ("host", "streamed")]
    if on_host and not memory.can_rest(jax.local_devices()[0]):
        raise ConfigError(f"{', '.join(on_host)}: a {jax.devices()[0].device_kind} cannot keep arrays in its host's "
                          "memory; leave it out")


def build_model(spec, hf_config):
    """Returns the models.Model of a Spec, with its dtypes, attention, remat and adapters. Raises ConfigError."""
    c = spec.model
    if spec.origin("model.remat") == "model" and c.remat == "none" and c.remat_every > 1:
        log.warning("model.remat_every=%d has no effect: model.remat=auto is none here; set model.remat=full",
                    c.remat_every)
    every = 1 if c.remat == "none" else c.remat_every
    if spec.platform is not None:
        low_precision.check(spec.train.matmul, spec.platform.kind, spec.train.matmul_emulated)
    model = models.build(hf_config, compute_dtype=DTYPES[spec.train.compute_dtype], scan_layers=c.scan_layers == "true",
                         remat=c.remat, remat_every=every, attention=c.attention, matmul=spec.train.matmul,
                         experts=c.experts, recurrence=c.recurrence, ring=c.ring_attention)
    return attach_adapter(spec, model)


def eos_ids(config, hf_config, tokenizer) -> tuple[int, ...]:
    """Returns the token ids that end a completion; training appends the first to a target: model.eos_tokens, else the
    chat template's end of turn and the end-of-text tokens of model and tokenizer.

    Raises ConfigError for an unknown token or if there is none."""
    if config.model.eos_tokens:
        ids = []
        for token in config.model.eos_tokens:
            i = tokenizer.convert_tokens_to_ids(token)
            if i is None or (i == tokenizer.unk_token_id and token != tokenizer.unk_token):
                raise ConfigError(f"model.eos_tokens: {token!r} is not one token of the tokenizer")
            ids.append(int(i))
        return tuple(ids)
    turn = jaxrl_data.end_of_turn(config, tokenizer)
    ids = tuple(dict.fromkeys((*(() if turn is None else (turn,)), *hf.eos_token_ids(hf_config, tokenizer))))
    if not ids:
        raise ConfigError("model.eos_tokens is empty and neither model nor tokenizer names an end-of-text token")
    return ids


def _size(model) -> str:
    active = f" ({model.num_active / 1e6:.2f} M for one token)" if model.num_active < model.num_parameters else ""
    return f"{model.num_parameters / 1e6:.2f} M parameters{active}"


def describe(job: Job) -> str:
    """Returns the start-up summary of a run: devices, model, adapters, algorithm, resolved options, derived numbers."""
    c = job.config
    device = jax.devices()[0]
    lines = [
        f"jaxrl {c.run.recipe}: {job.run_dir}",
        f"devices   {jax.device_count()} x {device.device_kind} ({device.platform}), mesh "
        + " x ".join(f"{a}={n}" for a, n in job.mesh.shape.items()),
        *(f"          {role}: {own.size} devices, " + " x ".join(f"{a}={n}" for a, n in own.shape.items())
          for role, own in job.meshes.items()),
        f"model     {job.hf_config.get('model_type')}, {_size(job.model.base)}, compute "
        f"{jnp.dtype(job.compute_dtype).name}, master {c.train.param_dtype}",
        *adapter_lines(job),
        *staleness_lines(job),
    ]
    if c.recipe.samples and c.recipe.judged:
        lines += algorithm_lines(c)
    decided = [f"{name}={get(c, name)} ({origin})" for name, origin in c.origins.items()
               if not name.startswith(("algorithm.", "optimizer.lr"))]
    lines.append("decided   " + ", ".join(decided))
    numbers = derived_numbers(c) | ({"training rows": len(job.stream.dataset)} if job.stream is not None else {})
    if job.stream is not None and job.stream.mix is not None:
        numbers |= {f"rows of {name}": len(part) for name, part in job.stream.dataset.parts.items()}
    lines.append("derived   " + ", ".join(f"{k} {v}" for k, v in numbers.items()))
    return "\n".join([*lines, *image_lines(job)])


def staleness_lines(job: Job) -> list[str]:
    """Returns a note if rollout.max_staleness overlaps nothing: the engine samples only while the trainer waits."""
    stale = job.config.rollout.max_staleness
    if not stale or job.engine is None or job.engine.info.concurrent:
        return []
    return [f"staleness rollout.max_staleness={stale} on the trainer's devices: rollout and update take turns, so a "
            "step takes the sum of both",
            "          and only slots that would wait for the longest completion gain. To overlap the two: "
            "mesh.roles.sampler.devices or",
            "          rollout.vllm.devices on other devices; if completions are of one length: "
            "rollout.max_staleness=0 (docs/explanations/asynchrony.md)"]


def adapter_lines(job: Job) -> list[str]:
    """Returns lines about adapters: which parameters train, how the base is stored; [] without adapters."""
    if (adapter := job.model.adapter) is None:
        return []
    own, ranks = trained_names(job), sorted({target.rank for target in adapter.targets})
    each = {name: ", ".join(f"{key}={value}" for key, value in sorted(job.config.lora.adapters[name].items()))
            for name, _ in adapter.parts}
    size = sum(math.prod(e.shape) for e in job.tree.entries if "/".join(e.path) in own)
    kind, base = dtype_of(job), [e for e in job.model.entries if "/".join(e.path) not in own]
    weight = sum(math.prod(e.shape) * jnp.dtype(kind(e)).itemsize for e in base)
    bits = (job.config.lora.base != "none") * f"{job.config.lora.base}, the rest of it in "
    ranks = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    return [f"adapters  rank {ranks} on {len(adapter.targets)} modules, {size / 1e6:.3f} M parameters train; the base "
            f"is frozen in {bits}{job.config.lora.base_dtype} ({weight / 1e6:.2f} MB), the engine gets "
            f"{job.config.lora.publish} weights",
            *(f"          {k} {name}: {options}" for k, (name, options) in enumerate(each.items(), 1))]


ALWAYS_SHOWN = ("advantage", "advantage_mean", "advantage_std", "policy_loss", "ratio", "clip_low", "clip_high",
                "aggregation", "kl.coef", "ppo_epochs", "num_minibatches", "old_logprobs", "mismatch.correction")


def algorithm_lines(spec) -> list[str]:
    """Returns console lines with the preset's main choices, those that differ from grpo, and options that the user
    set."""
    picked, row = spec.chosen(), spec.row()
    parts = [f"{name}={value}" + (" (config)" if origin == "config" else "")
             for name, (value, origin) in row.items() if name in ALWAYS_SHOWN or name in picked]
    parts += [f"{name}={value} (config)" for name, value in picked.items() if name not in row]
    return [f"algorithm {spec.algorithm.preset}: " + ", ".join(parts[:9]), *[
        "          " + ", ".join(parts[i:i + 9]) for i in range(9, len(parts), 9)]]


def derived_numbers(spec) -> dict[str, float]:
    """Returns numbers that follow from the config (sequences, updates, lengths), printed at start."""
    out: dict[str, float] = {"sequences per step": sequences(spec)}
    if spec.recipe.samples:
        out["optimizer steps per step"] = math.prod(spec.updates)
        out["sequences per optimizer step"] = out["sequences per step"] // spec.updates[1]
    out["longest sequence"] = spec.longest
    if spec.train.tokens_per_microbatch:
        out["tokens per microbatch (per data shard)"] = max(spec.train.tokens_per_microbatch, spec.longest)
    if known := ends(spec):
        out["optimizer updates in all"] = min(known.values()) * math.prod(spec.updates)
    return out
