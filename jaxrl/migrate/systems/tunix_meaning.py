"""What keys of Tunix mean together: the joint rules of its table. See systems/tunix.py."""

from __future__ import annotations

import ast
import math
import re

from jaxrl.migrate import common
from jaxrl.migrate.devices import count_gpus, mesh, ranges, rest
from jaxrl.migrate.table import Migration

MODEL, ACTOR, CRITIC = "model_config.", "actor_model_config.", "critic_model_config."
ROLLOUT, TRAINING = "rollout_config.", "rl_training_config."
OPT, VALUE = TRAINING + "actor_optimizer_config.", TRAINING + "critic_optimizer_config."
GRPO, AGENTIC, PPO = "grpo_config.", "agentic_grpo_config.", "ppo_config."
SYSTEM = (
    "You are given a problem. Think about the problem and provide your reasoning. Place it between <reasoning> and "
    "</reasoning>. Then, provide the final answer (i.e., just one numerical value) between <answer> and </answer>."
)
TARGETS = {  # names of Tunix's layers in module_path -> projections
    "q_einsum": ("q_proj",),
    "kv_einsum": ("k_proj", "v_proj"),
    "qkv_einsum": ("q_proj", "k_proj", "v_proj"),
    "attn_vec_einsum": ("o_proj",),
    **{n: (n,) for n in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")},
}
REWARD = '''"""Tunix's reward files, called as it does: each function gets lists, and a completion's score is their sum.

The files lie where Tunix was started; put its checkout's folder into the environment variable TUNIX. What they import
has to be in this environment; Tunix itself is found in the checkout.
"""

import importlib.util
import inspect
import os
import sys

FILES = {files!r}
_functions = []


def prepare():
    sys.path.append(os.path.abspath(os.environ.get("TUNIX", ".")))
    for file in FILES:
        place = os.path.join(os.environ.get("TUNIX", "."), file)
        if not os.path.exists(place):
            raise RuntimeError(f"{{place}}: not found; name the folder that {{file}} is below in the variable TUNIX")
        spec = importlib.util.spec_from_file_location(os.path.basename(file).removesuffix(".py"), place)
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except ImportError as e:
            what = "install what it imports in this environment, or write the reward in"
            raise RuntimeError(f"{{file}}: {{e}}: {{what}} {{__file__}}")
        own = (f for _, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__)
        _functions.extend(own)


def score(prompt, completion, answer=None, **columns):
    rows = {{name: [value] for name, value in columns.items()}}
    return float(sum(f(prompts=[prompt], completions=[completion], answer=[answer], **rows)[0] for f in _functions))


score.prepare = prepare
'''


def algorithm(m: Migration) -> str:
    """Returns the algorithm's table, "grpo_config.", "agentic_grpo_config." or "ppo_config.": the agentic one by
    training_mode or, without that, env_class_path; PPO's by the command or, without one, its table alone."""
    mode = m.text("training_mode")
    if mode.startswith("agentic") or not mode and m.given("env_class_path"):
        return AGENTIC
    tables = {s.key.partition(".")[0] + "." for s in m.singles.values()}
    return PPO if "ppo_main" in m.command or not m.command and PPO in tables and GRPO not in tables else GRPO


def unread(m: Migration, *names: str):
    """Marks the options `names` of the other algorithms' tables as inert."""
    own = algorithm(m)
    for place in (GRPO, AGENTIC, PPO):
        for name in names if place != own else ():
            m.mark(place + name, "inert", f"{own.strip('.')} is the one that is read")


def owner(m: Migration, name: str) -> str:
    """Returns the key of an option that counts for the actor: its own where it is not base_config.yaml's value, else
    the model's."""
    own = m[ACTOR + name]
    return ACTOR + name if own is not None and own != m.default(MODEL + name) else MODEL + name


OPTAX = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 1e-4, "end_value": 0.0, "alpha": 0.0}  # optax's, unset


def rate(m: Migration, place: str, name: str):
    """Returns option `name` of an optimizer's table `place`. A source with a key of rl_training_config replaces that
    table of base_config.yaml: an option that it leaves out is optax's default (OPTAX; None for others) and put into
    m.replaced. Without such a key the critic's unset options are the actor's."""
    key = place + name
    if m.given(key) or not any(k.startswith(TRAINING) for k in m.singles):
        return m[key] if m[key] is not None or place == OPT else m[OPT + name]
    m.replaced.add(key)
    return OPTAX.get(name)


def model(m: Migration):
    name = owner(m, "model_id")
    path = m.text(name)
    m.set("model.path", path, name)
    m.set("run.seed", m.integer(MODEL + "rng_seed"), MODEL + "rng_seed")
    if "/" not in path or m.text(MODEL + "model_source") not in ("huggingface", ""):
        source = m.text(MODEL + "model_source")
        m.needs(f"model.path={path}: of {source}: name the Hugging Face folder or hub id of the same model")
    tokenizer = m.text("tokenizer_config.tokenizer_path")
    given = m.given("tokenizer_config.tokenizer_path")
    if given and m.text("tokenizer_config.tokenizer_type") == "huggingface" and tokenizer.lower() != path.lower():
        m.set("model.tokenizer", tokenizer, "tokenizer_config.tokenizer_path")


def file_of_keys(m: Migration):
    key = "override_config_file"
    found = not any(text.startswith(f"{m[key]}: ") for text in m.needs_you)
    said = ("automatic", "read, its keys among these") if found else ("ask", "not found: its keys are not read")
    m.mark(key, *said)


def ends(m: Migration):
    """Sets model.eos_tokens from a list of texts; other lists yield to the model's files, a known difference."""
    key = ROLLOUT + "eos_tokens"
    tokens = m.list(key)
    if tokens and all(isinstance(t, str) for t in tokens):
        m.set("model.eos_tokens", tuple(tokens), key)
    elif tokens:
        m.mark(key, "automatic", "the model's generation_config.json and its tokenizer say what ends a completion")
        m.differs(
            f"{key}={tokens}: here completions end at the tokens of the model's generation_config.json and tokenizer; "
            "if these are others, name them by their text in model.eos_tokens"
        )


def lengths(m: Migration):
    m.set("data.max_prompt_tokens", m.integer(ROLLOUT + "max_prompt_length"), ROLLOUT + "max_prompt_length")
    m.set("data.overlong_prompt", "filter", ROLLOUT + "max_prompt_length")
    m.set("rollout.max_new_tokens", m.integer(ROLLOUT + "total_generation_steps"), ROLLOUT + "total_generation_steps")
    own = AGENTIC + "max_response_length"
    if m[own] is not None and m.integer(own) != m.integer(ROLLOUT + "total_generation_steps"):
        m.lacks(own, "a response is bounded by rollout.max_new_tokens and train.max_sequence_tokens: set them by hand")


def batch(m: Migration):
    """Sets data.prompts_per_step, rollout.group_size (of PPO 1), algorithm.ppo_epochs and num_minibatches, a mini-batch
    being an optimizer step. Of GRPO and PPO a step is a mini-batch if the sampler reads the actor's own weights
    (`shares_weights`). Several passes over several mini-batches leave a known difference."""
    own = algorithm(m)
    group_key = own + "num_generations" if own != PPO else PPO + "num_iterations"
    prompts = m.integer("batch_size")
    common.batch(m, prompts, m.integer(group_key) if own != PPO else 1, ("batch_size",), group_key)
    epochs = m.integer(own + "num_iterations")
    m.set("algorithm.ppo_epochs", epochs, own + "num_iterations")
    size = m.integer(TRAINING + "mini_batch_size")
    common.minibatches(
        m, "algorithm.num_minibatches", prompts, size, epochs, "batch_size", TRAINING + "mini_batch_size"
    )
    if size and size < prompts and not prompts % size and own != AGENTIC and shares_weights(m):
        m.set_again("data.prompts_per_step", size)
        m.set_again("algorithm.num_minibatches", 1)
        m.facts |= {"prompts per step": size, "sequences per step": m.facts["sequences per step"] * size // prompts,
                    "optimizer steps per step": epochs}
        m.mark("batch_size", "equivalent", "Tunix samples a mini-batch at its turn, by the weights of that time")
    if epochs > 1 and size and size < prompts:
        m.differs("Tunix repeats each mini-batch before the next one; here the batch is gone through as often")
    unread(m, "num_generations", "num_iterations")
    m.mark("training_mode", "automatic", f"{own.strip('.')} is read")


def shares_weights(m: Migration) -> bool:
    """Whether the sampler reads the actor's own weights: of the vanilla engine, on the actor's mesh."""
    near = m.version == "0.1.6" or m.text("rollout_model_config.same_mesh_as") == "actor"
    return m.text("rollout_engine") == "vanilla" and (near or m.given("rollout_model_config.mesh"))


def advantage(m: Migration):
    """Sets algorithm.advantage (PPO's gae, with critic.value_clip, or outcome), its mean, std and whiten. An unknown
    advantage_estimator is not carried over: the group's mean and deviation are set."""
    own = algorithm(m)
    unread(m, "advantage_estimator", "gae_lambda", "gamma", "clip_range_value")
    if own == PPO:
        for option, name in (("lam", "gae_lambda"), ("gamma", "gamma")):
            m.set(f"algorithm.{option}", m.number(PPO + name), PPO + name)
        m.set("algorithm.advantage", "gae", PPO + "gae_lambda")
        for option in ("advantage_mean", "advantage_std"):
            m.set(f"algorithm.{option}", "none", PPO + "gae_lambda")
        m.set("algorithm.whiten", True, PPO + "gae_lambda")
        m.set("critic.value_clip", float(m.number(PPO + "clip_range_value") or 0), PPO + "clip_range_value")
        m.facts["advantage"] = "gae, whitened"
        return
    kinds = {
        "grpo": ("group", "group"),
        "agentic_grpo": ("group", "group"),
        "rloo": ("leave_one_out", "none"),
        "agentic_rloo": ("leave_one_out", "none"),
        "drgrpo": ("group", "none"),
    }
    found = m.choice(own + "advantage_estimator", kinds)
    mean, std = found or ("group", "group")
    m.set("algorithm.advantage", "outcome", own + "advantage_estimator")
    m.set("algorithm.advantage_mean", mean, own + "advantage_estimator")
    m.set("algorithm.advantage_std", std, own + "advantage_estimator")
    m.set("algorithm.whiten", False, own + "advantage_estimator")
    m.facts["advantage"] = f"mean {mean}, deviation {std}"


AGGREGATIONS = {
    "token-mean": "token_mean",
    "sequence-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "sequence-mean-token-sum-norm": "sequence_sum",  # by the rows of the batch
    "sequence-mean-token-scale": "constant",  # by the longest completion that may be sampled
}


def loss(m: Migration):
    """Sets algorithm.policy_loss=clip with its clip bounds, dual_clip, ratio, aggregation and entropy_coef. Refuses
    another policy_loss_fn; an unknown loss_algo (token) or loss_agg_mode (sequence_mean) is not carried over."""
    own = algorithm(m)
    unread(m, "loss_algo", "epsilon", "epsilon_low", "epsilon_high", "epsilon_c")
    unread(m, "loss_agg_mode", "entropy_coef", "policy_loss_fn")
    m.set("algorithm.policy_loss", "clip", own + "epsilon")
    if own == PPO:
        m.set("algorithm.ratio", "token", own + "epsilon")
        m.set("algorithm.aggregation", "token_mean", own + "epsilon")
        m.set("algorithm.entropy_coef", float(m.number(PPO + "entropy_coef") or 0), PPO + "entropy_coef")
    else:
        ratio = m.choice(own + "loss_algo", {"grpo": "token", "gspo-token": "sequence_token"})
        m.set("algorithm.ratio", ratio or "token", own + "loss_algo")
        kind = m.choice(own + "loss_agg_mode", AGGREGATIONS)
        m.set("algorithm.aggregation", kind or "sequence_mean", own + "loss_agg_mode")
        m.set("algorithm.entropy_coef", 0.0, own + "loss_algo")
        if m.text(own + "policy_loss_fn") not in ("grpo", "agentic_grpo"):
            m.lacks(
                own + "policy_loss_fn", "a loss of its own: write it as a function (docs/guides/extend.md)", refuse=True
            )
    for side in ("low", "high"):
        key = own + f"epsilon_{side}"
        key = key if (own == PPO or side == "high") and m[key] is not None else own + "epsilon"
        m.set(f"algorithm.clip_{side}", m.number(key), key)
    dual = m.number(own + "epsilon_c")
    m.set("algorithm.dual_clip", float(dual or 0), own + "epsilon_c")
    low, high = (m.options[f"algorithm.clip_{side}"][0] for side in ("low", "high"))
    m.facts["clip"] = f"{1 - low:g} to {1 + high:g}" + (f", dual {dual:g}" if dual else "")


def kl(m: Migration):
    """Sets algorithm.kl.* by beta: of PPO in the reward, else in the loss, where k1 is not carried over: no KL."""
    own, kinds = algorithm(m), {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}
    unread(m, "beta", "kl_loss_mode", "kl_method")
    name, coef = own + ("kl_method" if own == PPO else "kl_loss_mode"), float(m.number(own + "beta"))
    estimator = m.choice(name, kinds) or "k1"
    if own != PPO and estimator == "k1" and coef:
        m.lacks(
            own + "beta",
            "k1 in the loss has no gradient on average: there is no KL here, as in effect there; one that acts is "
            "algorithm.kl.coef with algorithm.kl.estimator=low_var",
        )
        coef = 0.0
    common.kl(m, coef, estimator, "reward" if own == PPO else "loss", own + "beta", name)


def mismatch(m: Migration):
    """Sets algorithm.old_logprobs (recompute with token weights and for PPO, rollout by return_logprobs and
    use_rollout_logps, else auto) and algorithm.mismatch.correction (token_tis if sampler_is=token gets log-probs)."""
    own, drawn = algorithm(m), m.flag(ROLLOUT + "return_logprobs")
    unread(m, "use_rollout_logps", "sampler_is", "sampler_is_threshold")
    if own == PPO:
        m.set("algorithm.old_logprobs", "recompute", ROLLOUT + "return_logprobs")
        m.set("algorithm.mismatch.correction", "none", ROLLOUT + "return_logprobs")
        return
    weighed = m.text(own + "sampler_is") == "token" and drawn
    if m.text(own + "sampler_is") == "token" and not drawn:
        m.mark(own + "sampler_is", "inert", "the sampler returns no log-probs (return_logprobs)")
    if weighed:
        m.set("algorithm.mismatch.correction", "token_tis", own + "sampler_is", ROLLOUT + "return_logprobs")
        m.set("algorithm.mismatch.cap", float(m.number(own + "sampler_is_threshold")), own + "sampler_is_threshold")
        m.set("algorithm.old_logprobs", "recompute", own + "sampler_is")
    elif drawn and m.flag(own + "use_rollout_logps"):
        m.set("algorithm.old_logprobs", "rollout", ROLLOUT + "return_logprobs", own + "use_rollout_logps")
        m.set("algorithm.mismatch.correction", "none", ROLLOUT + "return_logprobs")
    else:
        m.set("algorithm.old_logprobs", "auto", ROLLOUT + "return_logprobs", own + "use_rollout_logps")
        m.set("algorithm.mismatch.correction", "none", ROLLOUT + "return_logprobs")


def sampling(m: Migration):
    top_k = m.integer(ROLLOUT + "top_k")
    m.set("rollout.temperature", m.number(ROLLOUT + "temperature"), ROLLOUT + "temperature")
    m.set("rollout.top_p", 1.0 if m[ROLLOUT + "top_p"] is None else m.number(ROLLOUT + "top_p"), ROLLOUT + "top_p")
    m.set("rollout.top_k", top_k if top_k and top_k > 0 else -1, ROLLOUT + "top_k")
    m.facts["sampling"] = (
        f"temperature {m[ROLLOUT + 'temperature']}, top_p {m[ROLLOUT + 'top_p']}, top_k {m[ROLLOUT + 'top_k']}"
    )
    if algorithm(m) == GRPO and m.version == "0.1.6":  # whose loss does not divide logits
        common.temperatures(m, 1.0, m.number(ROLLOUT + "temperature"), ROLLOUT + "temperature")
    if algorithm(m) == PPO and m.number(ROLLOUT + "temperature") != 1:
        m.differs(
            "Tunix's PPO takes the loss's log-probs at temperature 1 and the old ones at the sampler's; here both are "
            "the sampler's"
        )


def data(m: Migration):
    """Sets data.* and a reward file by the command line's source; rows that it does not name are asked for."""
    source, name = m.text("data_source"), m.text("dataset_name")
    gsm8k = name in ("gsm8k", "openai/gsm8k", "openai/gsm8k:main")
    module = m.text("data_module")
    if module:
        m.needs(
            f"data.path: rows are made by the module {module}: write them as it does into a file, and name it here"
        )
    elif source == "local" and m.text("data_directory"):
        common.data_files(m, [m.text("data_directory")], "data_directory")
    elif gsm8k:
        m.set("data.path", ("openai/gsm8k",), "dataset_name")
        m.set("data.subset", "main", "dataset_name")
    elif source == "huggingface":
        path, _, subset = name.partition(":")
        m.set("data.path", (path,), "dataset_name")
        if subset:
            m.set("data.subset", subset, "dataset_name")
    else:
        m.needs(f"data.path: {name} of {source or 'no source'}: name its rows on the Hugging Face hub or as a file")
    split = m.text("train_split")
    if split and split != "train":
        m.set("data.split", split, "train_split")
    if not module and source != "local":
        m.set("data.prompt_column", "question", "dataset_name")
        if algorithm(m) == AGENTIC:
            m.differs("answers are whole rows, as there; of GSM8K data.answer_pattern='#### (.*)' takes the number")
        else:
            m.set("data.answer_pattern", "#### (.*)", "dataset_name")
        own = m.text(AGENTIC + "system_prompt") if algorithm(m) == AGENTIC else SYSTEM
        if own:
            m.set("data.system_prompt", own, AGENTIC + "system_prompt", "dataset_name")
    elif m.text("prompt_key") != "prompts":
        m.set("data.prompt_column", m.text("prompt_key"), "prompt_key")
    files = [str(f) for f in m.list("reward_functions")]
    if files:
        common.reward_file(m, REWARD.format(files=files), "reward_functions")
        m.set("reward.env", ("TUNIX",), "reward_functions")  # workers see no other variable
        m.needs(
            f"{m.name}_reward.py calls {', '.join(files)} where Tunix's checkout lies: export TUNIX=FOLDER, in an "
            "environment that has what they import"
        )
    if m.flag("verl_compatible"):
        m.lacks("verl_compatible", "its reward files have verl's signature: call compute_score in the reward file")


def whole_updates(m: Migration) -> int:
    """Returns the optimizer steps of a run: max_steps (set or base_config.yaml's) if not 0, else num_batches x
    num_train_epochs x train_fraction; 0 where the rows decide."""
    key = TRAINING + "max_steps"
    own = m.given(key) or not any(k.startswith(TRAINING) for k in m.singles)
    if own and (steps := m.integer(key)):
        return steps
    if not own:
        m.replaced.add(key)
    share = m.number("train_fraction") or 0.8
    return int((m.integer("num_batches") or 0) * passes(m) * share)


def passes(m: Migration) -> int:
    """Returns the passes over the rows, 1 unless the source sets them. Raises Unreadable for less than one."""
    count = m.integer("num_train_epochs")
    if count is not None and count < 1:
        raise m.wrong("num_train_epochs", "at least 1")
    return count or 1


def run(m: Migration):
    """Sets train.steps to max_steps, or the batches, rounded up from optimizer steps; those of the agentic learner are
    steps. Without either data.epochs is set. data.max_rows is set or asked for where not all rows are used."""
    key, whole, epochs = TRAINING + "max_steps", whole_updates(m), passes(m)
    each = 1 if algorithm(m) == AGENTIC else common.updates(m)
    if whole:
        m.set("train.steps", -(-whole // each), key, "num_batches", "num_train_epochs", "train_fraction")
    else:
        m.set("data.epochs", epochs, "num_train_epochs")
        m.facts["passes over the rows"] = epochs
    limit = m.integer("num_batches") or 0
    share = m.number("train_fraction") or 0.8
    if epochs > 1 and whole and limit:
        rows = int(limit * m.integer("batch_size") * share)
        m.set("data.max_rows", rows, "num_batches", "batch_size", "train_fraction")
    elif not whole and share < 1:
        m.needs(
            f"data.max_rows: Tunix trains on the first {share:g} of the rows alone (train_fraction): set their number"
        )
    if m.given(key) and whole:
        for name in ("num_batches", "num_train_epochs", "train_fraction"):
            m.mark(name, "automatic", "max_steps ends the run")
    common.triggers(m, "eval.every_steps", 0, TRAINING + "eval_every_n_steps", "num_test_batches")
    m.set("eval.after", False, TRAINING + "eval_every_n_steps")
    m.facts["evaluation"] = "none: its command line hands the trainer no held-out rows"


AXES = ("fsdp", "tp")  # of a mesh, Tunix's usual ones


def _sizes(m: Migration, key: str, names: str) -> dict[str, int]:
    """Returns axis -> size of a mesh, of texts such as "(2,4)" and "('fsdp','tp')"."""

    def parts(text) -> list:
        found = ast.literal_eval(str(text)) if isinstance(text, str) else text
        return list(found) if isinstance(found, list | tuple) else [found]

    try:
        sizes, axes = [int(s) for s in parts(m[key])], [str(a) for a in parts(m[names])]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise m.wrong(key, 'sizes such as "(2,4)"') from None
    if len(sizes) != len(axes) and not (m.given(names) and m.given(key)) and len(sizes) <= len(AXES):
        axes = list(AXES)[: len(sizes)]
    if len(sizes) != len(axes):
        raise m.wrong(key, f"a size for each of {names}={tuple(axes)}")
    return dict(zip(axes, sizes, strict=True))


def layout(m: Migration):
    """Sets mesh.* by the actor's mesh, mesh.roles.* for a sampler with chips of its own or offload_to_cpu (rest=host),
    and rollout.engine=jax. Raises Unreadable for a mesh that is no sizes with an axis each."""
    shape, names = owner(m, "mesh.shape"), owner(m, "mesh.axis_names")
    sizes = _sizes(m, shape, names)
    known = m.table.job != "program" or m.given(shape)  # a program has no usual mesh
    count = math.prod(sizes.values()) if known else 0
    tp, keys = sizes.get("tp", sizes.get("tensor", 1)), (shape, names)
    mesh(m, keys, keys, tp=tp, gpus=count_gpus(m, count), fsdp=sizes.get("fsdp", 0))
    m.set("rollout.engine", "jax", "rollout_engine")
    other, places = "rollout_model_config.mesh.shape", "rollout_model_config.mesh.devices"
    if m[other] is not None and m.text(places) == "actor":
        m.differs(f"the sampler has the mesh {m[other]} over the actor's chips there; here it has the policy's mesh")
        for key in (other, "rollout_model_config.mesh.axis_names"):
            m.mark(key, "automatic", "the sampler is on the policy's chips")
    elif m[other] is not None and known:
        axes = "rollout_model_config.mesh.axis_names"
        theirs = _sizes(m, other, axes if m[axes] is not None else names)
        more = math.prod(theirs.values())
        m.set("mesh.roles.policy", {"devices": ranges(list(range(count)))}, *keys)
        m.set("mesh.roles.sampler", {"devices": ranges(list(range(count, count + more)))}, other)
        m.facts["GPUs"] = f"{count + more}: {count} that train and {more} that sample"
    if m.text("rollout_engine") != "vanilla":
        m.differs(
            "completions are sampled by jaxrl's embedded sampler, not by vLLM or SGLang-JAX: the same distribution"
        )
    if m.flag("offload_to_cpu"):
        rest(m, "host", "offload_to_cpu")


PARSERS = ("qwen", "gemma4")  # classes of Tunix that a program's call names


def chat(m: Migration):
    """Sets data.chat and data.chat_template_kwargs.enable_thinking, which the command line reads for Gemma 4's parser
    alone. A learner takes prompts as they are (data.chat=false); the command line renders its rows before, agents their
    messages. Of a parser of the program's own the user is asked for rendered rows."""
    key, own = "chat_parser_config.enable_thinking", "chat_parser_config.type"
    rendered = "apply_chat_template_to_dataset"
    program, agents = m.table.job == "program", algorithm(m) == AGENTIC
    if not agents and (program or not m.flag(rendered)):
        m.set("data.chat", "false", "training_mode" if program else rendered)
    else:
        m.mark(rendered, "automatic", "data.chat=auto")
    if not (program and agents and m.text(own) not in ("", *PARSERS)):
        m.mark(own, "automatic", "messages are rendered by the chat template")
    else:
        m.set("data.chat", "false", own)
        m.needs(
            f"data.prompt_column: {m.text(own)}, a class of the program's own, renders messages; here a prompt is "
            "taken as it is (data.chat=false): write the rows as it renders them"
        )
    if m.given(key) and (program or m.text(own) == "gemma4"):
        m.set("data.chat_template_kwargs.enable_thinking", m.flag(key), key)


def adapters(m: Migration):
    """Sets lora.* by the actor's adapters, else the model's; layers without a known projection are asked for."""
    place = ACTOR if m[ACTOR + "lora_config.rank"] is not None else MODEL
    if not m[place + "lora_config.rank"]:
        return
    alpha, modules = place + "lora_config.alpha", place + "lora_config.module_path"
    names = re.split(r"\|", m.text(modules) or m.text(ACTOR + "lora_config.module_path"))
    found = [TARGETS.get(n.strip().removeprefix(".*").strip("/"), ()) for n in names]
    if not all(found):
        m.needs(f"lora.targets: {m[modules]}: name these layers by projections (q_proj ...)")
    targets = list(dict.fromkeys(t for part in found for t in part))
    common.lora(
        m,
        m.integer(place + "lora_config.rank"),
        float(m[alpha] or 2.0),
        targets,
        None,
        "",
        0.0,
        (place + "lora_config.rank", alpha, modules),
    )
    if algorithm(m) == PPO and m[CRITIC + "lora_config.rank"] is not None:
        m.lacks(CRITIC + "lora_config.rank", "a critic trains whole")


def remat(m: Migration):
    key = owner(m, "remat_config")
    value = m[key]
    kinds = {"1": "none", "NONE": "none", "2": "full", "BLOCK": "full", "3": "full", "DECODER": "full"}
    if value is not None:
        m.set("model.remat", kinds.get(str(value).upper(), "auto"), key)


# Tunix's table of names (models/naming.py): beginnings of a checkpoint's or a config's name -> the class of the model's
# config
CLASSES = {
    "gemma": ("gemma-", "gemma-1.1-", "gemma-2-", "gemma_", "gemma1p1_", "gemma2_"),
    "gemma3": ("gemma-3-", "gemma3_"),
    "gemma4": ("gemma-4-", "gemma4_"),
    "llama3": ("llama-3-", "llama-3.1-", "llama-3.2-", "llama3_", "llama3p1_", "llama3p2_"),
    "qwen2": ("qwen2.5-", "deepseek-r1-distill-qwen-", "qwen2p5_", "deepseek_r1_distill_qwen_"),
    "qwen3": ("qwen3-", "qwen3.5-", "qwen3_", "qwen3p5_"),
}
IN_FP32 = ("qwen2", "qwen3", "gemma4")  # classes that compute in fp32 unless the config says otherwise


def class_of(model: str) -> str:
    """Returns Tunix's class of a model's config by the model's id or name, "" where its table has none."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    name = "llama-" + name.removeprefix("meta-llama-") if name.startswith("meta-llama-") else name
    found = [(len(start), kind) for kind, starts in CLASSES.items() for start in starts if name.startswith(start)]
    return max(found)[1] if found else ""


def computed(m: Migration, key: str, kind: str, usual: str, *keys: str) -> str:
    """Sets and returns train.compute_dtype: by its key, else fp32 for classes (`kind`) IN_FP32 from 0.1.7 on, but not
    of maxtext, with run.matmul_precision=default and a known difference, else `usual`."""
    named = common.DTYPES.get(m.text(key))
    wide = m.version != "0.1.6" and kind in IN_FP32 and m.text(MODEL + "model_source") != "maxtext"
    found = named or ("fp32" if wide else usual)
    m.set("train.compute_dtype", found, key, *keys)
    if wide and not named:
        m.set("run.matmul_precision", "default", key, *keys)
        m.differs(
            "Tunix computes this model in fp32, with products at the platform's default precision, where "
            "model_config.dtype is not set; so does this config. bf16 is faster: train.compute_dtype, rollout.dtype"
        )
    return found


def dtypes(m: Migration):
    """Sets rollout.dtype, train.compute_dtype (`computed`) and train.param_dtype (the actor's load_dtype, else bf16).
    From 0.1.7 some models multiply in their config's dtype, fp32 if it is not set, others in their weights' dtype."""
    key = owner(m, "dtype")
    kind = class_of(m.text(owner(m, "model_id")) or m.text(MODEL + "model_name"))
    m.set("rollout.dtype", computed(m, key, kind, "bf16"), key)
    loaded = m[ACTOR + "load_dtype"]
    held = common.DTYPES.get(str(loaded), "bf16") if loaded is not None else "bf16"
    m.set("train.param_dtype", held, ACTOR + "load_dtype")


def memory(m: Migration):
    """Sets train.tokens_per_microbatch and, if it is another, train.score_tokens_per_microbatch, for one data shard, by
    the micro-batches in prompts (rounded up to whole sequences); where one is not set, nothing for it."""
    longest = m.options["data.max_prompt_tokens"][0] + m.options["rollout.max_new_tokens"][0]
    key, scored = TRAINING + "train_micro_batch_size", TRAINING + "compute_logps_micro_batch_size"
    size, group = m.integer(key), m.options["rollout.group_size"][0]
    shards = max((m.trained_on or 1) // m.options.get("mesh.tp", (1,))[0], 1)  # of the data

    def held(prompts: int) -> int:
        return -(-prompts * group // shards) * longest

    if size:
        m.set("train.tokens_per_microbatch", held(size), key)
        m.differs(
            f"micro-batches of {size * group} sequences over {shards} data shards there: here "
            f"{held(size) // longest} on each, of {longest} tokens (train.tokens_per_microbatch)"
        )
    other = m.integer(scored)
    if other and held(other) != (held(size) if size else 0):
        m.set("train.score_tokens_per_microbatch", held(other), scored)
    else:
        m.mark(scored, "automatic", "as many as the update's")
    m.mark(TRAINING + "gradient_accumulation_steps", "automatic", "it follows from the micro-batch")


def places(m: Migration):
    key = TRAINING + "checkpoint_root_directory"
    if m.given(key):
        m.set("run.dir", m.text(key).rstrip("/"), key)
    options = TRAINING + "checkpointing_options."
    common.checkpoints(m, options + "save_interval_steps", options + "max_to_keep")
    every = m.options["checkpoint.every_steps"][0]
    if every and common.updates(m) > 1:  # counted in updates there
        m.set_again("checkpoint.every_steps", max(round(every / common.updates(m)), 1))
