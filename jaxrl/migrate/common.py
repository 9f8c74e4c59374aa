"""Meanings that several systems share, for the joint rules of their tables. Each takes the Migration, the meaning, and
the keys of the source that it comes from."""

from __future__ import annotations

import copy
import math
import re
import textwrap
from pathlib import PurePosixPath

from jaxrl.migrate.table import OPTIONS, Joint, Migration

DTYPES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "auto": "auto",
}
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}


def data_files(m: Migration, paths: list, *keys: str) -> None:
    """Sets data.path to these files, folders or hub ids as texts. Empty ones are left out; without any, nothing is
    set."""
    paths = [str(p) for p in paths if p]
    if paths:
        m.set("data.path", tuple(paths), *keys)


def eval_sets(m: Migration, paths: list, *keys: str) -> None:
    """Sets eval.sets to `name=path` for each path. A name is the file's, without its ending and with `_` for unusual
    characters; of files of the same name the folder's name or a number makes it another. Empty paths are left out;
    without any, nothing is set."""
    out: dict[str, str] = {}
    for path in (str(p) for p in paths if p):
        stem = PurePosixPath(path).name
        stem = re.sub(r"[^A-Za-z0-9_.-]", "_", stem.rsplit(".", 1)[0] if "." in stem else stem) or "eval"
        name, n = stem, 2
        while name in out:
            parent = re.sub(r"[^A-Za-z0-9_.-]", "_", PurePosixPath(path).parent.name)
            name = f"{parent}_{stem}" if parent and n == 2 and f"{parent}_{stem}" not in out else f"{stem}{n}"
            n += 1
        out[name] = path
    if out:
        m.set("eval.sets", tuple(f"{name}={path}" for name, path in out.items()), *keys)


def batch(m: Migration, prompts: int, group: int, keys: tuple[str, ...], group_key: str) -> None:
    """Sets data.prompts_per_step to `prompts` and rollout.group_size to `group`, the completions per prompt. The
    report's facts have both, and their product as the sequences per step."""
    m.set("data.prompts_per_step", prompts, *keys)
    m.set("rollout.group_size", group, group_key)
    m.facts["prompts per step"] = prompts
    m.facts["completions per prompt"] = group
    m.facts["sequences per step"] = prompts * group


def minibatches(m: Migration, option: str, prompts: int, size: int | None, epochs: int, *keys: str) -> None:
    """Sets `option` to the optimizer steps of a pass over the batch, prompts / size. size: prompts of one optimizer
    step; None or 0 = all. Where that is no whole number it sets nothing and refuses the job, by the last key. Of
    algorithm.num_minibatches the report's facts have the optimizer steps of a step, `epochs` times as many."""
    size = size or prompts
    if size > prompts or prompts % size:
        m.lacks(keys[-1], f"{prompts} prompts are no multiple of mini-batches of {size}", refuse=True)
        return
    m.set(option, prompts // size, *keys)
    if option == "algorithm.num_minibatches":
        m.facts["optimizer steps per step"] = prompts // size * epochs


def updates(m: Migration) -> int:
    """Returns the optimizer steps of a step: algorithm.num_minibatches times algorithm.ppo_epochs, as rules have set
    them. One that is not set (as in a refused config), or 0, counts 1."""
    return math.prod(m.options.get(f"algorithm.{n}", (1,))[0] or 1 for n in ("num_minibatches", "ppo_epochs"))


def critics_optimizer(m: Migration, own: dict[str, tuple]) -> None:
    """Sets critic.optimizer.NAME where the value is another than the policy's optimizer.NAME, which rules have set by
    now (else its default). own: NAME -> (value, its keys). Where own's schedule is constant, floor, decay_steps and
    decay_shape are left out."""
    constant = own.get("schedule", ("",))[0] == "constant"
    for option, (value, keys) in own.items():
        if constant and option in ("floor", "decay_steps", "decay_shape"):  # what only a decay reads
            continue
        name = f"optimizer.{option}"
        if value != m.options.get(name, (OPTIONS()[name].default,))[0]:
            m.set("critic." + name, value, *keys)


def frozen_dtype(m: Migration, option: str, computed: str, *keys: str, held: str = "") -> None:
    """Sets `option`, the dtype of a frozen model (reference.dtype, teacher.dtype, reward.model.dtype), where the job
    has one. computed, held: the source's dtypes of its computation and of its weights; held "" = computed.

    The option is bf16 if one of the two is bf16, auto or not known, else fp32: a bf16 cast at each use gives bf16's
    numbers. A computation in another dtype than the job's train.compute_dtype is a known difference; auto and unknown
    ones are none."""
    role = option.removesuffix(".dtype")
    if not _has(m, role):
        return
    held, computed = DTYPES.get(held or computed, "auto"), DTYPES.get(computed, "auto")
    m.set(option, "bf16" if {"bf16", "auto"} & {held, computed} else "fp32", *keys)
    here = m.options.get("train.compute_dtype", ("auto",))[0]
    if computed not in ("auto", "bf16" if here == "auto" else here):
        m.differs(f"the {role} computes in {computed} there; here all compute in train.compute_dtype={here}")


def _has(m: Migration, role: str) -> bool:
    """Whether a job has a frozen model of a role. The reference of adapters is their base."""
    recipe = m.options.get("run.recipe", ("rl", ()))[0]
    if role == "reference":
        base = m.options.keys() & {"lora.rank", "lora.path"} and "reference.path" not in m.options
        return not base and (recipe == "preference" or bool(m.options.get("algorithm.kl.coef", (0,))[0]))
    if role == "teacher":
        return recipe == "distill"
    return bool(m.options.get(f"{role}.path", ("",))[0])


REFERENCE_AS_TRAINER = Joint(  # where the source gives it no dtype of its own
    "dtype of the reference",
    (),
    lambda m: frozen_dtype(m, "reference.dtype", *of(m, "train.compute_dtype")),
)


def of(m: Migration, option: str) -> tuple[str, ...]:
    """Returns (value, key, ...) of an option that a rule has set: its value and the source's keys. Raises KeyError
    where none has."""
    value, keys = m.options[option]
    return (value, *keys)


def critics_dtype(m: Migration, key: str, option: str) -> None:
    """Records `key`, a critic's dtype of computation, as not carried over where it is another than the policy's, the
    only one in jaxrl. option: the policy's; its auto is bf16. Does nothing without a critic (algorithm.advantage is not
    gae) or where the key is null."""
    if m.options.get("algorithm.advantage", ("",))[0] != "gae" or m[key] is None:
        return
    here = m.options.get(option, ("bf16",))[0]
    if DTYPES.get(m.text(key), "") not in (here, "bf16" if here == "auto" else here):
        m.lacks(key, f"{m[key]}: the critic has the policy's dtype ({option}={here})")


def critics_weights(m: Migration, held: str | None, key: str) -> None:
    """Records `key` as not carried over where a critic holds and trains its weights in another dtype than the policy's
    train.param_dtype. held: the critic's, by jaxrl's name; None is another. Does nothing without a critic
    (algorithm.advantage is not gae)."""
    here = m.options.get("train.param_dtype", ("fp32",))[0]
    if m.options.get("algorithm.advantage", ("",))[0] == "gae" and held != here:
        m.lacks(
            key, f"the critic's weights are learnt in {held} there, here as the policy's (train.param_dtype={here})"
        )


def token_mean(m: Migration, sequences: int, *keys: str) -> None:
    """Sets algorithm.aggregation for a source that takes a token mean of each micro-batch and averages these by their
    sequences. sequences: of a micro-batch; 0 where that number is not in the config, as with micro-batches of so many
    tokens.

    1 sets sequence_mean; other numbers set token_mean, and above 1 algorithm.aggregation_sequences. All but 1 leave a
    known difference."""
    m.set("algorithm.aggregation", "sequence_mean" if sequences == 1 else "token_mean", *keys)
    if sequences > 1:
        m.set("algorithm.aggregation_sequences", sequences, *keys)
        m.differs(
            f"a token mean is one of every {sequences} completions that follow each other, as one of each micro-batch "
            f"is in {m.table.title}; which ones meet is another draw. Lengths of neighbours then decide a completion's "
            "weight: algorithm.aggregation_sequences=0 is the mean over all tokens of the optimizer step"
        )
    elif not sequences:
        m.differs(
            f"{m.table.title}'s token mean is one per micro-batch, of no fixed number of sequences; here it is one "
            "over the optimizer step"
        )


def kl(m: Migration, coef: float, estimator: str, placement: str, *keys: str) -> None:
    """Sets algorithm.kl.coef and, where it is not 0, algorithm.kl.estimator and algorithm.kl.placement (loss or
    reward). With a coefficient of 0 there is no reference, and the other keys do nothing. k1 in the loss refuses the
    job by its last key. The report's facts have the KL."""
    m.set("algorithm.kl.coef", coef, *keys)
    m.facts["KL to the reference"] = f"{coef} x {estimator} in the {placement}" if coef else "none"
    if not coef:
        return
    if placement == "loss" and estimator == "k1":
        m.lacks(
            keys[-1],
            "k1 in the loss has no gradient on average and is refused here; k2 has the KL's gradient",
            refuse=True,
        )
        return
    m.set("algorithm.kl.estimator", estimator, *keys)
    m.set("algorithm.kl.placement", placement, *keys)


def temperatures(m: Migration, trained: float, drawn: float, key: str) -> None:
    """Sets algorithm.temperature, by which the trainer divides logits, where `trained` is another than `drawn`, the
    sampler's, and leaves a known difference.

    It is recorded as not carried over instead where there can be one temperature only: the loss compares the trainer's
    log-probs with the sampler's (algorithm.old_logprobs=rollout, a mismatch correction, algorithm.m2_threshold), or the
    recipe is not rl. Called after the rules that set these."""
    if trained == drawn:
        return
    set_to = lambda option, value: m.options.get(option, (value, ()))[0] == value  # noqa: E731
    to_sampler = m.options.get("algorithm.old_logprobs", ("",))[0] == "rollout"
    compares = to_sampler or not set_to("algorithm.mismatch.correction", "none")
    if compares or not set_to("run.recipe", "rl") or "algorithm.m2_threshold" in m.options:
        _one_temperature(m, trained, drawn, key)
        return
    m.set("algorithm.temperature", float(trained), key)
    m.differs(_apart(trained, drawn))


def _apart(trained: float, drawn: float) -> str:
    return (
        f"the trainer divides logits by {trained:g} and completions are drawn at {drawn:g}, as in the source: a policy "
        "is trained that is not the one that is sampled. If you meant one temperature, take algorithm.temperature out"
    )


def _one_temperature(m: Migration, trained: float, drawn: float, key: str) -> None:
    m.lacks(
        key,
        f"the trainer's temperature is {trained:g} and the sampler's {drawn:g}: beside a loss that compares their "
        "log-probs, or a teacher's, there is one, the sampler's",
    )


def leave_out_temperature(m: Migration) -> None:
    """Removes the algorithm.temperature that `temperatures` set, and its known difference, from a job that turns out to
    have a teacher instead of rewards; its key is recorded as not carried over. Does nothing where none is set."""
    if "algorithm.temperature" not in m.options:
        return
    trained, keys = m.options.pop("algorithm.temperature")
    drawn = m.options["rollout.temperature"][0]
    m.different = [text for text in m.different if text != _apart(trained, drawn)]
    _one_temperature(m, trained, drawn, keys[0])


def triggers(m: Migration, option: str, steps: int | None, *keys: str) -> None:
    """Sets `option` to a period in steps; None and numbers below 1 set 0, which is never."""
    m.set(option, steps if steps and steps > 0 else 0, *keys)


def schedule(m: Migration, name: str, kind: str, warmup: float | None, fraction: float | None, *keys: str) -> None:
    """Sets optimizer.schedule, optimizer.warmup_steps and, above 0, optimizer.warmup_fraction; optimizer.lr has been
    set. kind: the source's name, one of SCHEDULES; of another, `name` (its key) is recorded as not carried over and
    nothing is set. warmup: updates; fraction: a share of all updates, which counts where it is above 0. None = 0. The
    report's facts have the learning rate."""
    if kind not in SCHEDULES:
        m.lacks(name, f"of schedules there are constant, linear, cosine and wsd, not {kind!r}")
        return
    m.set("optimizer.schedule", SCHEDULES[kind], *keys)
    m.set("optimizer.warmup_steps", int(warmup or 0), *keys)
    if fraction:
        m.set("optimizer.warmup_fraction", fraction, *keys)
    m.facts["learning rate"] = f"{m.options['optimizer.lr'][0]}, {SCHEDULES[kind]}, warm-up " + (
        f"{fraction} of all updates" if fraction else f"{int(warmup or 0)} updates"
    )


def checkpoints(m: Migration, every: str, keep: str) -> None:
    """Sets checkpoint.every_steps by the key `every` (null, 0 and below: never) and checkpoint.keep by the key `keep`
    (null, 0 and below: -1, all of them). checkpoint.every_minutes is 0, never."""
    triggers(m, "checkpoint.every_steps", m.integer(every), every)
    m.set("checkpoint.every_minutes", 0.0, every)
    most = m.integer(keep)
    m.set("checkpoint.keep", most if most and most > 0 else -1, keep)


def engine_kwarg(m: Migration, key: str, name: str, value) -> None:
    """Sets rollout.vllm.engine_kwargs.NAME, an option of vLLM's own; a dotted name sets an entry of the table NAME.

    limit_mm_per_prompt.image sets data.max_images instead, and other limits of it are inert. speculative_config is
    recorded as not carried over."""
    if name == "limit_mm_per_prompt.image":
        m.set("data.max_images", int(value), key)
    elif name.startswith("limit_mm_per_prompt."):
        m.mark(key, "inert", "servers are sent images alone")
    elif name.startswith("speculative_config"):
        m.lacks(key, "speculative decoding")
    elif "." in name:  # a table within vLLM's options, which it takes as JSON
        table, *inner, leaf = name.split(".")
        option = f"rollout.vllm.engine_kwargs.{table}"
        before, keys = m.options.pop(option, ({}, ()))
        place = whole = copy.deepcopy(before)
        for part in inner:
            place = place.setdefault(part, {})
        place[leaf] = value
        m.set(option, whole, key, *keys)
    else:
        m.set(f"rollout.vllm.engine_kwargs.{name}", value, key)


def template_kwargs(m: Migration, pattern: str) -> None:
    """Sets data.chat_template_kwargs.NAME for each key that the row `pattern` owns, NAME the key's last part. Null is
    left out."""
    for s in m.all(pattern):
        if s.value is not None:
            m.set(f"data.chat_template_kwargs.{s.key.rpartition('.')[2]}", s.value, s.key)


def sampled_experts(m: Migration, *keys: str) -> None:
    """Sets algorithm.routes=sampled: the update, and the pass that scores old log-probs, replay the sampler's choice of
    experts. Removes a rollout.vllm.prefix_caching=False that has been set, with a known difference."""
    m.set("algorithm.routes", "sampled", *keys)
    if m.options.get("rollout.vllm.prefix_caching", (True,))[0] is False:
        m.options.pop("rollout.vllm.prefix_caching")
        m.differs("vLLM keeps its prefix cache on: it holds the experts of tokens (algorithm.routes=sampled)")


def router_bias(m: Migration, on: str, rate: str) -> None:
    """Sets train.router_bias_rate, Megatron's change of the bias by which routers choose experts, by the key `rate`, if
    the key `on` is true and the rate is not 0."""
    if m.flag(on) and m.number(rate):
        m.set("train.router_bias_rate", float(m.number(rate)), on, rate)


def offloaded(m: Migration, key: str) -> None:
    """Sets model.remat=offload, in place of what is set, if the key is true: what the backward pass needs is kept in
    host memory. The numbers stay the same."""
    if m.flag(key):
        m.set("model.remat", "offload", key, *m.options.pop("model.remat", ("", ()))[1])


def context(m: Migration, longest: int, option: str = "rollout.vllm.max_model_len", *keys: str) -> None:
    """Sets a source's bound on prompt and completion together. `option` gets it if it is at least
    data.max_prompt_tokens + rollout.max_new_tokens, which have been set; a lower bound becomes
    train.max_sequence_tokens. None and 0 set nothing."""
    needed = m.options["data.max_prompt_tokens"][0] + m.options["rollout.max_new_tokens"][0]
    if longest and longest >= needed:
        m.set(option, longest, *keys)
    elif longest:
        m.set("train.max_sequence_tokens", longest, *keys)


def loggers(m: Migration, key: str, names: list, project: str, run: str, project_key: str, run_key: str) -> None:
    """Sets log.wandb (whether "wandb" is among the names), log.tensorboard=True and, where they are not empty,
    log.wandb_project and log.wandb_name. A name that jaxrl has no sink of is recorded as not carried over; JSON lines
    are always written."""
    names = [str(n).lower() for n in names]
    m.set("log.wandb", "wandb" in names, key)
    m.set("log.tensorboard", True, key)
    other = [n for n in names if n not in ("wandb", "console", "tensorboard", "file", "print", "none", "")]
    if other:
        m.lacks(
            key,
            f"of sinks there are console, TensorBoard, JSONL and wandb, not {', '.join(other)}; log.sinks takes one of "
            "your own",
        )
    if project:
        m.set("log.wandb_project", project, project_key)
    if run:
        m.set("log.wandb_name", run, run_key)


def lora(
    m: Migration, rank: int, alpha: float, targets, exclude, init: str, dropout: float, keys: tuple[str, ...]
) -> None:
    """Sets lora.rank, lora.alpha, lora.targets (all-linear where there are none) and, where they are given,
    lora.exclude and lora.init. rank: 0 and None set nothing. init: "", kaiming, default and true are jaxrl's own.

    dropout above 0 sets lora.dropout if the recipe is sft, and else is recorded as not carried over, by the last key.
    """
    if not rank:
        return
    m.set("lora.rank", rank, *keys)
    m.set("lora.alpha", float(alpha), *keys)
    targets = targets if isinstance(targets, list) else [targets]
    m.set("lora.targets", tuple(str(t) for t in targets if t) or ("all-linear",), *keys)
    if exclude:
        m.set("lora.exclude", tuple(exclude if isinstance(exclude, list) else [str(exclude)]), *keys)
    if init not in ("kaiming", "true", "True", "", "default"):
        m.set("lora.init", init, *keys)
    if dropout and m.options.get("run.recipe", ("",))[0] == "sft":
        m.set("lora.dropout", float(dropout), keys[-1])
    elif dropout:
        m.lacks(keys[-1], "dropout of adapters is for SFT alone here")


LOSS = '''"""The policy gradient, weighed by the ratio of policy to sampler within bounds, by 0 outside: {title}'s."""

import jax
import jax.numpy as jnp

from jaxrl.algorithms import masked_exp

LOW, HIGH = {low}, {high}


def weighed(tokens, cfg):
    ratio = masked_exp(jnp.clip(tokens.logp - tokens.behaviour, -20, 20), tokens.mask)
    weight = jax.lax.stop_gradient(jnp.where((ratio > LOW) & (ratio < HIGH), ratio, 0))
    advantage, logp = (jnp.where(tokens.mask, x, 0) for x in (tokens.advantage, tokens.logp))
    return -weight * advantage * logp, {{"ratio": ratio}}
'''


def rollout_weights(m: Migration, loss: str, low: str, high: str, second: bool) -> None:
    """Sets a policy gradient whose tokens are weighed by their ratio of policy to sampler, by 0 outside of the bounds 1
    - low (at least 0) and 1 + high. low, high: keys of these numbers; loss: the key that chooses the loss.

    With one optimizer step per batch it is algorithm.policy_loss=pg, algorithm.ratio=token and
    algorithm.mismatch.correction=token_mis with its low and cap. With several, or a second weight (`second`), it is a
    function in NAME_loss.py beside the config. Both set algorithm.old_logprobs=recompute."""
    least, most = max(1 - m.number(low), 0.0), 1 + m.number(high)
    m.set("algorithm.old_logprobs", "recompute", loss)
    m.facts["clip"] = f"weights against the sampler of {least:g} to {most:g}, others 0"
    if second or updates(m) > 1:
        file = f"{m.name}_loss.py"
        m.files[file] = LOSS.format(title=m.table.title, low=least, high=most)
        m.set("algorithm.policy_loss", f"./{file}:weighed", loss, low, high)
        return
    m.set("algorithm.policy_loss", "pg", loss)
    m.set("algorithm.ratio", "token", loss)
    m.set("algorithm.mismatch.correction", "token_mis", loss)
    m.set("algorithm.mismatch.low", least, low)
    m.set("algorithm.mismatch.cap", most, high)


def clip_cov(m: Migration, share: str, low: str, high: str, loss: str) -> None:
    """Sets algorithm.cov_share, algorithm.cov_low and algorithm.cov_high, of Clip-Cov, by these keys, and
    algorithm.old_logprobs=recompute, as it reads the trainer's log-probs before the update. Leaves a known difference.
    """
    m.set("algorithm.cov_share", m.number(share), share, loss)
    m.set("algorithm.cov_low", m.number(low), low)
    m.set("algorithm.cov_high", m.number(high), high)
    m.set("algorithm.old_logprobs", "recompute", loss)
    m.differs("Clip-Cov draws from all tokens of a step, by their log-probs before it; there from a micro-batch's")


def chat_template(m: Migration, key: str) -> None:
    """Sets model.chat_template to the file that the key names. A relative path is of the folder where the source is
    started: the user is asked to copy the file."""
    path = m.text(key)
    m.set("model.chat_template", path, key)
    if not path.startswith(("/", "~", "$")):
        m.needs(f"model.chat_template={path}: copy {m.table.title}'s file to where you start jaxrl, or give its place")


STUB = '''"""The reward of {what}: write it before you run.

Called once per completion with the row's columns by name; see docs/guides/rewards.md.
"""


def score(prompt, completion, answer=None, **columns):
    raise RuntimeError("{file}: this reward has to be written: it stood in {where}")
'''


def reward_stub(m: Migration, what: str, where: str, key: str) -> None:
    """Adds the file NAME_reward.py, for a reward that cannot be carried over, sets reward.functions to it and asks the
    user to write it; until then the run stops before the model is loaded. what: the reward; where: its place in the
    source, cut at 160 characters."""
    clean = " ".join(ascii(where).strip("'").replace('"', "").replace("\\", "/").split())
    clean = textwrap.shorten(clean, 160, placeholder=" ...")
    file = reward_file(m, STUB.format(what=what.replace('"', ""), file=f"{m.name}_reward.py", where=clean), key)
    m.needs(f"{file}: write the reward ({clean}); until then the run stops before the model is loaded")


def reward_file(m: Migration, text: str, *keys: str) -> str:
    """Adds the file NAME_reward.py, whose text has a function `score`, beside the config, and sets reward.functions to
    it by these keys. The text of an earlier call is replaced. Returns the file's name."""
    file = f"{m.name}_reward.py"
    m.files[file] = text
    m.set("reward.functions", (f"./{file}:score",), *keys)
    return file
