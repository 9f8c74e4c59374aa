"""What a config comes to: every "auto", preset value and default decided once, with where each came from.

    spec = resolve(config)                      what no device and no model has a say in: preset, recipe, engine
    spec = resolve(config, platform, hf_config) all of it: dtypes, sizes, recomputation, too

A Spec has the groups of the config as attributes (`spec.algorithm.kl.coef`, `spec.train.logprob_chunk`) and may be
handed to whatever takes a config. Runs, plans, servers and launches read it; nothing else decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ml_collections import ConfigDict, FrozenConfigDict

from jaxrl.algorithms.preference import needs_reference
from jaxrl.algorithms.presets import PRESETS
from jaxrl.algorithms.presets import resolve as resolve_preset
from jaxrl.config import lengths
from jaxrl.config.load import editable, frozen, get, put
from jaxrl.config.registry import Recipe, recipe_of
from jaxrl.config.schema import options
from jaxrl.models.families import FAMILIES
from jaxrl.rollout.engines import engine_name, engine_row
from jaxrl.rollout.vllm.options import lora_rank
from jaxrl.sharding.mesh import row_parts
from jaxrl.training.layout import row_unit

ROW = 2048  # a row is made longer than the longest sequence up to this, to hold a group and its one prompt
MICROBATCH, MICROBATCH_CPU = 16384, 2048  # tokens held at once
WIDE, MICROBATCH_WIDE = 512, 1024  # on CPUs, of dense models from this hidden size on: as fast, in less memory
CHUNK, CHUNK_CPU = 1024, 512  # tokens that meet the head at once: the last chunk of a microbatch is rarely full
SMALL_MODEL = 50_000_000  # parameters below which nothing is recomputed in the backward pass
SHALLOW = 8  # layers up to which CPUs get them unrolled


class Platform(NamedTuple):
    """What a decision may depend on.

    Attributes:
      kind: the kind of device: cpu, gpu or tpu. dtype: the one it computes in best: bf16, fp16 or fp32.
    """

    kind: str
    dtype: str


if TYPE_CHECKING:
    from jaxrl.config.typed import Options
else:
    Options = object


@dataclasses.dataclass(frozen=True)
class Spec(Options):
    """A job with nothing left to decide. Frozen.

    Groups of options are attributes (`spec.train.steps`) and items (`spec["train"]`).

    Attributes:
      asked: the config as it was given, with the recipe's defaults; checkpoints keep it.
      options: all options as decided.
      recipe: the registry's row of run.recipe.
      origins: dotted name -> who decided it, where it was not the config or the schema's default, such as "preset
        grpo", "default of rl", "cpu", "model", "engine".
      platform: that it was resolved for; None = what depends on it is still "auto" or 0.
    """

    asked: ConfigDict
    options: FrozenConfigDict
    recipe: Recipe
    origins: Mapping[str, str]
    platform: Platform | None = None

    def __post_init__(self):
        vars(self).update({group: self.options[group] for group in self.options})

    def __getattr__(self, name):  # of a config
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.options, name)

    def __getitem__(self, group):
        return self.options[group]

    def origin(self, name: str) -> str:
        """Returns the origin of an option: as in `origins`, else "config" or "default"."""
        if name in self.origins:
            return self.origins[name]
        return "default" if get(self.asked, name) in (None, options()[name].default) else "config"

    @cached_property
    def longest(self) -> int:
        """Largest number of tokens of prompt and completion together, and a slot more for models with a score head."""
        return lengths.longest_sequence(self)

    @cached_property
    def episodes(self) -> bool:
        """Whether a completion is an episode of several turns."""
        return self.recipe.samples and lengths.episodes(self)

    @cached_property
    def completions(self) -> int:
        """Completions to a prompt in one step: rollout.group_size for jobs that sample, 2 for pairs, else 1."""
        return self.rollout.group_size if self.recipe.samples else 2 if self.recipe.pairs else 1

    @cached_property
    def ahead(self) -> bool:
        """Whether completions may be sampled before the step that uses them (rollout.max_staleness, sync_every)."""
        return self.rollout.max_staleness > 0 or self.rollout.sync_every > 1

    @cached_property
    def updates(self) -> tuple[int, int]:
        """(passes over a step's batch, optimizer steps per pass); (1, 1) for jobs that do not sample."""
        return (self.algorithm.ppo_epochs, self.algorithm.num_minibatches) if self.recipe.samples else (1, 1)

    @property
    def needs_critic(self) -> bool:
        """Whether the job reads values of states, from a critic or a value head of the policy: its advantage is gae."""
        return self.recipe.samples and self.algorithm.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether the job reads log-probs of a reference: for KL, or for a preference loss that takes it."""
        if self.recipe.pairs and "reference" in self.recipe.roles:
            return needs_reference(self.preference)
        return self.recipe.samples and bool(self.algorithm.kl.coef)

    @property
    def shares_trunk(self) -> bool:
        """Whether the policy has a value head of its own (critic.shared) in place of a critic model."""
        return self.needs_critic and self.critic.shared

    @cached_property
    def kl_in_reward(self) -> bool:
        """Whether the KL penalty is subtracted from the rewards (kl.placement=reward) rather than part of the loss."""
        return bool(self.algorithm.kl.coef) and self.algorithm.kl.placement == "reward"

    def row(self) -> dict[str, tuple]:
        """Returns the options below `algorithm` that presets set -> (value, origin: "config", "preset <name>"
        or "advantage <name>"), for printing."""
        return algorithm_row(self.asked)

    def chosen(self) -> dict:
        """Returns the options below `algorithm` that the user set, or that make the preset another one than grpo ->
        value.

        {} for a job that does not sample.
        """
        if not self.recipe.samples:
            return {}
        known = self.row()
        out = {name: value for name, (value, origin) in known.items()
               if origin == "config" or value != PRESETS["grpo"][name]}
        for name, opt in options().items():
            group, _, short = name.partition(".")
            if group == "algorithm" and short not in (*known, "preset") and get(self.asked, name) != opt.default:
                out[short] = get(self.asked, name)
        return out


ADAPTERS_LR = 10  # adapters learn at so many times the rate of full training (LoRA primers of Tinker and TRL)


def resolve(config, platform: Platform | None = None, hf_config: dict | None = None, engine: str = "") -> Spec:
    """Returns the Spec with every option decided that a config leaves open. The config is neither changed nor checked
    (see checks), but an unknown preset or recipe raises KeyError, and a recipe's import path what its import raises.

    Args:
      config: a ConfigDict, or a Spec, whose config is decided again.
      platform: where it runs; None: what depends on it stays "auto" or 0.
      hf_config: the model's description; None: recomputation and scanning of layers stay "auto". Not read without a
        platform.
      engine: what rollout.engine=auto is; "" = a Spec's engine, or found out on this machine.
    """
    asked = editable(config.asked if isinstance(config, Spec) else config)
    recipe, origins = recipe_of(asked), dict(config.origins) if isinstance(config, Spec) else {}
    if asked.optimizer.lr is None:
        times, with_ = (ADAPTERS_LR, " with adapters") if lora_on(asked) else (1, "")
        asked.optimizer.lr, origins["optimizer.lr"] = times * recipe.lr, f"default of {asked.run.recipe}{with_}"
    c = asked.copy_and_resolve_references()

    def decide(name, value, origin):
        if get(c, name) != value:
            put(c, name, value)
            origins[name] = origin

    for name, (value, origin) in algorithm_row(asked).items():
        if origin != "config":
            decide(f"algorithm.{name}", value, origin)
    if asked.rollout.engine == "auto":
        engine = engine or (config.rollout.engine if isinstance(config, Spec) else engine_name(asked))
        decide("rollout.engine", engine, "this machine")
    gives = "env.function" if c.env.function else "env.program" if c.env.program else ""
    if gives and c.reward.functions == options()["reward.functions"].default:
        decide("reward.functions", (), gives)
    if c.algorithm.old_logprobs == "auto":  # the ratio is 1 by construction where a batch gets one update
        several = c.algorithm.ppo_epochs * c.algorithm.num_minibatches > 1
        in_reward = c.algorithm.kl.coef and c.algorithm.kl.placement == "reward"
        decide("algorithm.old_logprobs", "recompute" if several or in_reward else "current", "updates per batch")
    if platform is not None:
        _of_platform(c, recipe, platform, hf_config or {}, decide)
        if hf_config is not None:
            _of_model(c, platform, hf_config, decide)
    return Spec(asked, frozen(c), recipe, origins, platform)


def _of_platform(c, recipe: Recipe, platform: Platform, hf_config: dict, decide) -> None:
    """Dtypes, and the sizes of training's pieces.

    Rows: the longest sequence; longer, for a whole group that shares its prompt, up to ROW and the microbatch.
    Attention's work follows the documents in a row, not its length, so that long rows cost nothing and waste less at
    their ends. CPUs are fast while a microbatch stays in their cache, and slow where gradients of all weights are added
    up too often (benchmarks/peers, 2 cores).
    """
    t, kind, longest = c.train, platform.kind, lengths.longest_sequence(c)
    if t.compute_dtype == "auto":
        decide("train.compute_dtype", platform.dtype, kind)
    if c.run.matmul_precision == "auto":
        precision = "highest" if t.compute_dtype == "fp32" else "default"
        decide("run.matmul_precision", precision, f"compute dtype {t.compute_dtype}")
    if c.rollout.dtype == "auto":
        decide("rollout.dtype", t.compute_dtype, "train.compute_dtype")
    if lora_on(c):
        if c.lora.publish == "auto":
            apart = c.rollout.dtype != "fp32" if engine_row(c).on_mesh else kind == "gpu" and serves_apart(c, hf_config)
            why = "lora.adapters" if c.lora.adapters else f"rollout.dtype {c.rollout.dtype}, {kind}"
            decide("lora.publish", "adapter" if apart or c.lora.adapters else "merged", why)
        if c.lora.base_dtype == "auto":
            decide("lora.base_dtype", t.compute_dtype, "train.compute_dtype")
    if c.algorithm.mismatch.correction == "auto":
        now = not (c.rollout.max_staleness or c.rollout.sync_every > 1)
        exact = c.rollout.dtype == "fp32" and engine_row(c).info.exact and now and t.matmul == "default"
        none = exact or c.algorithm.old_logprobs == "rollout"
        decide("algorithm.mismatch.correction", "none" if none else "token_tis", "engine")
    if not t.row_lengths:
        prompt = min(c.data.max_prompt_tokens, longest - 1)
        several = c.rollout.group_size if recipe.samples else 2 if recipe.pairs else 1
        shared = several if t.share_prompts else 1
        whole = prompt + shared * (longest - prompt)
        length = max(longest, min(whole, t.tokens_per_microbatch or ROW, ROW))
        unit = row_unit(row_parts(c.mesh))
        decide("train.row_lengths", (-(-length // unit) * unit,), "lengths")
    if not t.tokens_per_microbatch:
        wide = hf_config.get("hidden_size", 0) >= WIDE and "num_experts_per_tok" not in hf_config
        least = MICROBATCH if kind != "cpu" else MICROBATCH_WIDE if wide else MICROBATCH_CPU
        decide("train.tokens_per_microbatch", max(*t.row_lengths, least), kind)
    if not t.logprob_chunk:
        decide("train.logprob_chunk", CHUNK_CPU if kind == "cpu" else CHUNK, kind)


def _of_model(c, platform: Platform, hf_config: dict, decide) -> None:
    """Resolves the options that decide how the model is computed."""
    if c.model.scan_layers == "auto":
        unrolled = platform.kind == "cpu" and hf_config.get("num_hidden_layers", 0) <= SHALLOW
        decide("model.scan_layers", "false" if unrolled else "true", "model")
    if c.model.remat == "auto":
        streams = any(options.get("rest") == "streamed" for options in c.mesh.roles.values())
        fits = platform.kind == "cpu" or not streams and _parameters(hf_config) < SMALL_MODEL
        decide("model.remat", "none" if fits else "full", "model")


def serves_apart(c, hf_config: dict) -> bool:
    """Returns whether vLLM servers that jaxrl starts would serve the adapters of a config apart from their base.

    False for models, ranks, options of `lora` and rollout.partial, with which the merged weights are sent instead, and
    for rollout.servers and engines without servers of the run's own. hf_config: the model's description.
    """
    family = FAMILIES.get(hf_config.get("model_type", ""))
    if family is not None and family.merged_only:
        return False
    ranks = [c.lora.rank, *(int(entry.rpartition("=")[2]) for entry in c.lora.rank_pattern)]
    twice = 2 if c.lora.init.startswith(("pissa", "olora")) else 1
    plain = not (c.lora.path or c.lora.dora or c.lora.modules_to_save or c.rollout.partial or c.rollout.servers
                 or c.lora.base != "none")
    return engine_row(c).starts_servers and plain and bool(lora_rank(twice * max(ranks)))


def lora_on(config) -> bool:
    """Returns whether adapters train instead of the model (lora.rank or lora.path)."""
    return bool(config.lora.rank or config.lora.path)


def adapters_option(config) -> str:
    """Returns the option by which adapters train, with its value, as messages name it."""
    return f"lora.path={config.lora.path!r}" if config.lora.path else f"lora.rank={config.lora.rank}"


def _parameters(hf_config: dict) -> int:
    from jaxrl import models

    return models.build(hf_config, compute_dtype="float32", scan_layers=True).num_parameters


def algorithm_row(config) -> dict[str, tuple]:
    """Returns the options below `algorithm` that presets set, short name -> (value, origin): "config", "preset <name>",
    or "advantage <name>" for what the kind of advantage implies. Raises KeyError for an unknown preset."""
    preset = config.algorithm.preset
    return resolve_preset(preset, {name: get(config.algorithm, name) for name in PRESETS[preset]})


def here() -> Platform:
    """Returns the platform of the run's first device (jax.devices()[0], of any process). Its dtype is fp32 on CPUs,
    fp16 on GPUs before compute capability 8, else bf16, also where the capability is no number. Starts jax's backend.
    """
    import jax

    device = jax.devices()[0]
    try:
        capability = float(getattr(device, "compute_capability", 8.0))
    except ValueError:  # AMD's GPUs have names, such as gfx942
        capability = 8.0
    new = device.platform != "gpu" or capability >= 8
    return Platform(device.platform, "fp32" if device.platform == "cpu" else "bf16" if new else "fp16")


