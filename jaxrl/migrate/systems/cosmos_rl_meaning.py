"""What keys of Cosmos-RL mean together: the joint rules of its table. See systems/cosmos_rl.py."""

from __future__ import annotations

from jaxrl.migrate import common
from jaxrl.migrate.table import Migration

TRAIN, ROLL, POLICY, DISTILL, VALID = "train.", "rollout.", "policy.", "distillation.", "validation."
P = TRAIN + "train_policy."
REMOTE = P + "remote_reward."
TELLS_RL = ("temperature", "epsilon_low", "epsilon_high", "kl_beta", "use_remote_reward")


def recipe(m: Migration) -> str:
    """Returns run.recipe (rl, sft or distill), which the rule `job` has set."""
    return m.options["run.recipe"][0]


def dense(m: Migration) -> bool:
    """Returns whether the job distills with a divergence over distillation.top_k tokens at each position. It has no
    loss of sampled tokens then."""
    return recipe(m) == "distill" and m.integer(DISTILL + "top_k") > 0


def job(m: Migration):
    """Sets run.recipe: sft, distill (grpo with distillation.enable) or rl (grpo). A table train_policy without a type
    is grpo if it has one of TELLS_RL, else sft; without such a table the type's default, grpo, counts.

    A trainer_type other than the type, and an algo other than grpo, are refused. Raises Unreadable for another type.
    """
    kind = m.text(P + "type")
    if not m.given(P + "type") and any(k.startswith(P) for k in m.singles):
        kind = "grpo" if any(m.given(P + n) for n in TELLS_RL) else "sft"
    if kind not in ("grpo", "sft"):
        raise m.wrong(P + "type", "grpo or sft")
    distilled = kind == "grpo" and m.flag(DISTILL + "enable")
    m.set("run.recipe", "distill" if distilled else "rl" if kind == "grpo" else "sft", P + "type", DISTILL + "enable")
    trainer, algo = m.text(P + "trainer_type"), m.text(P + "algo")
    if trainer not in ("", kind):
        m.lacks(P + "trainer_type", f"{trainer!r}: a trainer of its own is not read", refuse=True)
    if algo not in ("", "grpo"):
        m.lacks(P + "algo", f"{algo!r}: advantages of your own are functions (docs/guides/extend.md)", refuse=True)
    m.facts["job"] = {"rl": "GRPO", "sft": "supervised", "distill": "on-policy distillation"}[recipe(m)]


VIDEO = (
    "job",
    "model",
    "dataloader_train",
    "dataloader_val",
    "trainer",
    "model_parallel",
    "scheduler",
    "optimizer",
    "checkpoint",
)


def video(m: Migration):
    """Refuses a file with a table of Cosmos-RL's trainer of video models (VIDEO)."""
    found = [s for name in VIDEO for s in m.all(f"{name}.**")]
    if found:
        m.lacks(found[0].key, f"and {len(found) - 1} keys more are of its trainer of video models", refuse=True)


def lengths(m: Migration):
    """Sets data.max_prompt_tokens, rollout.max_new_tokens and train.max_sequence_tokens. model_max_length bounds prompt
    and completion together: a shorter prompt leaves room, a long one cuts; max_response_length bounds completions
    outside SFT. SFT truncates longer rows; the other recipes leave longer prompts out (data.overlong_prompt=filter).
    Raises Unreadable for a model_max_length below 2."""
    longest, completion = m.integer(POLICY + "model_max_length"), m.integer(ROLL + "max_response_length")
    if longest < 2:
        raise m.wrong(POLICY + "model_max_length", "at least 2")
    key = POLICY + "model_max_length"
    m.set("data.max_prompt_tokens", longest - 1, key)
    m.set("train.max_sequence_tokens", longest, key)
    if recipe(m) == "sft":
        m.set("rollout.max_new_tokens", longest - 1, key)
        m.set("data.overlong_completion", "truncate", key)
    else:
        m.set("rollout.max_new_tokens", min(completion, longest - 1), ROLL + "max_response_length", key)
        m.set("data.overlong_prompt", "filter", key)
    m.facts["longest prompt and completion"] = longest


def sizes(m: Migration) -> tuple[int, int]:
    """Returns (replicas of the policy, data-parallel workers of one: shards x copies). dp_shard_size=-1 is what remains
    of --gpus; without --gpus it is 1, and jaxrl asks for them if the source sets -1. Raises Unreadable for other sizes
    below 1."""
    par = POLICY + "parallelism."
    shard, replicas = m.integer(par + "dp_shard_size"), m.integer(par + "n_init_replicas")
    each = m.integer(par + "tp_size") * m.integer(par + "cp_size") * m.integer(par + "pp_size")
    copies = m.integer(par + "dp_replicate_size")
    if min(each, copies, replicas) < 1 or shard < -1 or shard == 0:
        raise m.wrong(par + "dp_shard_size", "sizes of at least 1, or -1 for what is left")
    if shard == -1:
        shard = max(m.gpus // (replicas * each * copies), 1)
        if not m.gpus and m.given(par + "dp_shard_size"):
            m.needs(
                "policy.parallelism.dp_shard_size=-1 is what is left: say --gpus=N, GPUs of the policy; 1 was taken"
            )
    return replicas, shard * copies


def batch(m: Migration):
    """Sets data.prompts_per_step, train.tokens_per_microbatch and, outside SFT, rollout.group_size,
    algorithm.num_minibatches and algorithm.ppo_epochs.

    train_batch_per_replica counts samples of a replica, all its GPUs together; in SFT rows of one data-parallel worker.
    Fewer samples than a group become one group, which is reported. Groups of one (in RL), other samples that are no
    whole groups, and optimizer steps that are not equal or not of whole groups are refused.
    """
    size, key = m.integer(TRAIN + "train_batch_per_replica"), TRAIN + "train_batch_per_replica"
    par = POLICY + "parallelism."
    replicas, workers = sizes(m)
    longest, mini = m.options["train.max_sequence_tokens"][0], max(m.integer(P + "mini_batch"), 1)
    capped = m.integer(P + "max_token_len_per_mini_batch")
    tokens = max(capped, longest) if capped else mini * longest
    m.set("train.tokens_per_microbatch", tokens, P + ("max_token_len_per_mini_batch" if capped else "mini_batch"))
    if recipe(m) == "sft":
        rows = size * workers * replicas
        m.set("data.prompts_per_step", rows, key, *(par + n for n in ("dp_shard_size", "dp_replicate_size")))
        m.facts["rows per update"] = rows
        return
    group, whole = m.integer(ROLL + "n_generation"), size * replicas
    if group < 2 and recipe(m) == "rl":
        m.lacks(ROLL + "n_generation", "the advantages of a group of one are 0: nothing would be learnt", refuse=True)
    if whole < group:
        m.lacks(key, f"{whole} samples are part of a group of {group}: a step has one group at least, and is one")
    elif whole % group:
        m.lacks(key, f"{whole} samples are no whole number of groups of {group}", refuse=True)
    keys = (key, par + "n_init_replicas", ROLL + "n_generation")
    common.batch(m, -(-whole // group), group, keys, ROLL + "n_generation")
    own, part = size // workers, m.integer(P + "batch_size_per_optimize")
    count = -(-own // part) if part and 0 < part < own else 1
    prompts = m.options["data.prompts_per_step"][0]
    if size % workers or (count > 1 and (own % part or prompts % count)):
        m.lacks(
            P + "batch_size_per_optimize",
            f"{own} samples of a GPU make no equal optimizer steps of {part} here, "
            f"in whole groups of {prompts} prompts",
            refuse=True,
        )
        return
    m.set("algorithm.num_minibatches", count, P + "batch_size_per_optimize", key)
    m.set("algorithm.ppo_epochs", m.integer(P + "mu_iterations"), P + "mu_iterations")
    m.facts["optimizer steps per step"] = count * m.integer(P + "mu_iterations")


def loss(m: Migration):
    """Sets algorithm.aggregation and its constants, policy_loss=clip with its bounds, ratio and entropy_coef; in RL
    also shared_prefix_tokens, advantage_std and positive_nll_coef. A divergence over top_k tokens has the aggregation
    alone, SFT none of them.

    A variant other than grpo, gspo and dapo is refused, as are aipo_rho and (but in gspo) lower_bound_ratio of at most
    1. Another loss_type is reported, with token_mean in its place. Raises Unreadable for an epsilon of 0 and an
    epsilon_low above 1.
    """
    if recipe(m) == "sft":
        m.mark(P + "balance_dp_token", "automatic", "one denominator for all microbatches and devices")
        return
    variant = m.text(P + "variant")
    if variant not in ("grpo", "gspo", "dapo"):
        m.lacks(P + "variant", f"{variant!r} is none of grpo, gspo, dapo", refuse=True)
        return
    _aggregation(m)
    if dense(m):
        return
    if m.number(P + "aipo_rho") is not None:
        _aipo(m)
    else:
        _clip(m, variant)
    m.set("algorithm.ratio", "sequence" if variant == "gspo" else "token", P + "variant")
    m.set("algorithm.entropy_coef", m.number(P + "entropy_coeff"), P + "entropy_coeff")
    prefix = m.integer(P + "min_filter_prefix_tokens")
    if recipe(m) == "distill":
        return
    m.set("algorithm.shared_prefix_tokens", prefix or 0, P + "min_filter_prefix_tokens")
    plain = m.flag(P + "unbiased_advantage")
    m.set("algorithm.advantage_std", "none" if plain else "group_population", P + "unbiased_advantage")
    positive = m.number(P + "positive_nll_coef")
    if positive:
        m.set("algorithm.positive_nll_coef", positive, P + "positive_nll_coef")
        m.differs("positive examples reach reward.pass_mark (1); in Cosmos-RL their reward is above 0")


def first(m: Migration) -> bool:
    """Whether the source is Cosmos-RL 0.1. There the token mean is of each completion first, schedules move with every
    update, and parameters have one dtype, without master weights."""
    return m.version == "0.1"


def _aggregation(m: Migration):
    kind, most = m.text(P + "loss_type"), m.integer(P + "unbiased_loss_max_tokens")
    mini = max(m.integer(P + "mini_batch"), 1)
    if kind == "seq-mean-token-mean" and most and most > 0:
        m.set("algorithm.aggregation", "constant", P + "loss_type", P + "unbiased_loss_max_tokens")
        m.set("algorithm.aggregation_constant", float(most), P + "unbiased_loss_max_tokens")
    elif kind == "token-sum":  # of a mini-batch; mini-batches are averaged
        m.set("algorithm.aggregation", "constant", P + "loss_type")
        m.set("algorithm.aggregation_constant", 1.0 / mini, P + "loss_type", P + "mini_batch")
    elif kind == "token-mean" and first(m):
        m.set("algorithm.aggregation", "sequence_mean", P + "loss_type")
        m.differs("the token mean of Cosmos-RL 0.1 is of each completion, and then of the completions")
    elif kind == "token-mean":
        replicas, workers = sizes(m)
        balanced, par = m.flag(P + "balance_dp_token"), POLICY + "parallelism."
        capped = m.integer(P + "max_token_len_per_mini_batch")
        many = ("dp_shard_size", "n_init_replicas") if balanced else ()
        keys = (P + "mini_batch", P + "balance_dp_token", *(par + n for n in many))
        size = mini * (replicas * workers if balanced else 1)
        common.token_mean(m, 0 if capped else size, P + "loss_type", *(() if capped else keys))
    else:
        names = {
            "seq-mean-token-sum": "sequence_sum",
            "seq-mean-token-mean": "sequence_mean",
        }
        found = m.choice(P + "loss_type", names)
        m.set("algorithm.aggregation", found or "token_mean", P + "loss_type")
        if found and first(m):
            m.lacks(P + "loss_type", "its seq-mean of 0.1 is divided by the longest row of a mini-batch")


def _clip(m: Migration, variant: str):
    """A bound that is negative is none. The dual clip is always on, but in GSPO."""
    low, high, dual = (m.number(P + n) for n in ("epsilon_low", "epsilon_high", "lower_bound_ratio"))
    if low == 0 or high == 0 or low > 1:
        raise m.wrong(
            P + ("epsilon_high" if high == 0 else "epsilon_low"),
            "a bound above 0 (below at most 1), or a negative number for none",
        )
    m.set("algorithm.policy_loss", "clip", P + "variant")
    m.set("algorithm.clip_low", low if low > 0 else 1.0, P + "epsilon_low")
    m.set("algorithm.clip_high", high if high > 0 else UNBOUNDED, P + "epsilon_high")
    if variant == "gspo":
        m.set("algorithm.dual_clip", 0.0, P + "variant")
    elif dual > 1:
        m.set("algorithm.dual_clip", dual, P + "lower_bound_ratio")
    else:
        m.lacks(P + "lower_bound_ratio", f"{dual:g}: the bound of the dual clip lies above 1", refuse=True)
    below, above = (f"{bound:g}" if side > 0 else "no bound" for side, bound in ((low, 1 - low), (high, 1 + high)))
    m.facts["clip"] = f"{below} to {above}" if low > 0 or high > 0 else "none"


UNBOUNDED = 1e9  # a ratio is exp of at most 20 there


def _aipo(m: Migration):
    """-min(ratio, rho) A, as a clip without a lower bound whose dual clip is rho too: a token above rho has no
    gradient, whatever its sign."""
    rho, key = m.number(P + "aipo_rho"), P + "aipo_rho"
    if rho <= 1:
        m.lacks(key, f"{rho:g}: a bound above 1 is meant", refuse=True)
        return
    for option, value in (("policy_loss", "clip"), ("clip_low", 1.0), ("clip_high", rho - 1), ("dual_clip", rho)):
        m.set(f"algorithm.{option}", value, key)
    m.facts["clip"] = f"ratio at most {rho:g} (AIPO)"


def kl(m: Migration):
    """Sets algorithm.kl.* from kl_beta in RL: in the loss, by low_var, or k3_unbiased with unbiased_kl_estimate. With a
    kl_beta and a reference_reset_interval above 0 it also sets reference.reset_steps and reset_optimizer. A kl_beta
    beside a teacher is refused."""
    if recipe(m) != "rl":
        if recipe(m) == "distill" and m.number(P + "kl_beta"):
            m.lacks(P + "kl_beta", "a KL to the start beside the teacher", refuse=True)
        return
    beta, unbiased = m.number(P + "kl_beta"), m.flag(P + "unbiased_kl_estimate")
    common.kl(m, beta, "k3_unbiased" if unbiased else "low_var", "loss", P + "kl_beta", P + "unbiased_kl_estimate")
    every = m.integer(P + "reference_reset_interval") or 0
    if beta and every > 0:
        m.set("reference.reset_steps", every, P + "reference_reset_interval")
        m.set(
            "reference.reset_optimizer",
            m.flag(P + "reset_optimizer_with_reference"),
            P + "reset_optimizer_with_reference",
        )


def mismatch(m: Migration):
    """Sets algorithm.old_logprobs and algorithm.mismatch.* outside SFT and divergences over top_k tokens.

    Without Cosmos-RL's options the sampler's log-probs are not read: ratios are to the trainer's own, before the update
    (auto, no correction). use_rollout_logprobs_for_loss is rollout. use_decoupled_loss is recompute and token_mis, with
    behav_imp_weight_cap or, if that is null, 1e9 as its cap. Both together are refused. off_policy_masking_delta is
    mismatch.sequence_delta; 0 is reported as not carried over.
    """
    if recipe(m) == "sft" or dense(m):
        return
    decoupled, own = m.flag(P + "use_decoupled_loss"), m.flag(P + "use_rollout_logprobs_for_loss")
    if decoupled and own:
        m.lacks(P + "use_decoupled_loss", "Cosmos-RL refuses it beside use_rollout_logprobs_for_loss", refuse=True)
        return
    m.set(
        "algorithm.old_logprobs",
        "rollout" if own else "recompute" if decoupled else "auto",
        P + "use_rollout_logprobs_for_loss",
        P + "use_decoupled_loss",
    )
    m.set("algorithm.mismatch.correction", "token_mis" if decoupled else "none", P + "use_decoupled_loss")
    cap = m.number(P + "behav_imp_weight_cap")
    if decoupled:
        m.set("algorithm.mismatch.cap", UNBOUNDED if cap is None else cap, P + "behav_imp_weight_cap")
    delta = m.number(P + "off_policy_masking_delta")
    if delta is not None:
        m.set("algorithm.mismatch.sequence_delta", delta, P + "off_policy_masking_delta")
        if not delta:
            m.lacks(P + "off_policy_masking_delta", "a threshold of 0 is off here: name a small one")


def groups(m: Migration):
    """Sets algorithm.dynamic_sampling in RL: refill in DAPO, whose groups of equal rewards are replaced until a step is
    full, else off. With DAPO also dynamic_sampling_rounds: max_retry_for_on_policy, or 1000 if that is not above 0."""
    if recipe(m) != "rl":
        return
    on = m.text(P + "variant") == "dapo"
    m.set("algorithm.dynamic_sampling", "refill" if on else "off", P + "variant")
    if not on:
        return
    rounds = m.integer(P + "max_retry_for_on_policy")
    m.set("algorithm.dynamic_sampling_rounds", rounds if rounds > 0 else 1000, P + "max_retry_for_on_policy")
    # filter_reward_metric: with the rewards, whose names it takes


def staleness(m: Migration):
    """Sets rollout.max_staleness (in weight syncs) and rollout.sync_every (in steps) outside SFT.

    The staleness is allowed_outdated_steps, but at least sync_weight_interval - 1, divided by sync_weight_interval and
    rounded down. It is 0 with on_policy and with mode=colocated, which publishes weights every step and reports another
    sync_weight_interval. Raises Unreadable for an unknown mode, a negative allowed_outdated_steps and a
    sync_weight_interval below 1.
    """
    if recipe(m) == "sft":
        return
    mode = m.text("mode")
    if mode not in ("disaggregated", "colocated", "colocated_separated"):
        raise m.wrong("mode", "disaggregated, colocated or colocated_separated")
    steps, every = m.integer(P + "allowed_outdated_steps"), m.integer(TRAIN + "sync_weight_interval")
    if steps < 0 or every < 1:
        raise m.wrong(P + "allowed_outdated_steps" if steps < 0 else TRAIN + "sync_weight_interval", "a count")
    steps = 0 if m.flag(P + "on_policy") else max(steps, every - 1)
    keys = (P + "allowed_outdated_steps", P + "on_policy", TRAIN + "sync_weight_interval", "mode")
    turns = mode == "colocated"  # sampling and training take turns
    m.set("rollout.max_staleness", 0 if turns else steps // every, *keys)
    m.set("rollout.sync_every", 1 if turns else every, TRAIN + "sync_weight_interval", "mode")
    if turns and every > 1:
        m.lacks(TRAIN + "sync_weight_interval", "where engine and trainer share GPUs, weights are published every step")
    m.facts["staleness"] = f"{m.options['rollout.max_staleness'][0]} weight syncs"


def sampling(m: Migration):
    """Sets rollout.temperature, top_p, top_k, keep_stop and, if it is not 1, repetition_penalty (in training too)
    outside SFT. Where train_policy.temperature (1 if it is at most 1e-6) is another, it becomes algorithm.temperature,
    with a note, or is reported as not carried over if the loss compares the trainer's log-probs with the sampler's or a
    teacher's."""
    if recipe(m) == "sft":
        return
    s = ROLL + "sampling_config."
    for name in ("temperature", "top_p"):
        m.set(f"rollout.{name}", m.number(s + name), s + name)
    m.set("rollout.top_k", m.integer(s + "top_k") or -1, s + "top_k")
    penalty = m.number(s + "repetition_penalty")
    if penalty != 1:
        m.set("rollout.repetition_penalty", penalty, s + "repetition_penalty")
        m.set("rollout.penalties_in_training", True, s + "repetition_penalty")
    m.set("rollout.keep_stop", m.flag(ROLL + "include_stop_str_in_output"), ROLL + "include_stop_str_in_output")
    drawn, trained = m.number(s + "temperature"), m.number(P + "temperature")
    trained = trained if trained > 1e-6 else 1.0
    m.facts["sampling"] = f"temperature {drawn:g}, top_p {m[s + 'top_p']}, top_k {m[s + 'top_k']}"
    if trained == drawn:
        m.set("rollout.temperature", drawn, P + "temperature")
    common.temperatures(m, trained, drawn, P + "temperature")


def optimizer(m: Migration):
    """Sets optimizer.name, lr, b1, b2, max_grad_norm, the warm-up, and the schedule with its floor and decay from
    train.optm_*.

    Of several rates for parts of a model optm_lr.global is taken, else the first of a list; of a table without `global`
    optm_lr's default. The others are reported, as are an unknown optimizer (AdamW is set) and an unknown decay (none is
    set). jaxrl asks for optimizer.decay_steps if the decay is a share of a run whose steps are not set. Raises
    Unreadable if optm_lr is no number.
    """
    o, names = TRAIN + "optm_", {"AdamW": "adamw", "Adam": "adam"}
    m.set("optimizer.name", m.choice(o + "name", names) or "adamw", o + "name")
    tables = {s.key[len(o + "lr.") :]: s.value for s in m.all(o + "lr.**")}
    rates = [tables["global"]] if "global" in tables else m.list(o + "lr")
    key = o + ("lr.global" if "global" in tables else "lr")
    if any(isinstance(r, bool) or not isinstance(r, int | float) for r in rates) or not rates:
        raise m.wrong(o + "lr", "a number")
    m.set("optimizer.lr", float(rates[0]), key)
    if len(set(rates)) > 1:
        m.lacks(key, "one rate per part of a model: the first is taken; optimizer.groups has rates by parameter names")
    for name in tables:
        if name != "global":
            m.lacks(f"{o}lr.{name}", "a rate of its own: write it into optimizer.groups")
    betas = m.list(o + "betas")
    m.set("optimizer.b1", float(betas[0]), o + "betas")
    m.set("optimizer.b2", float(betas[1]), o + "betas")
    m.set("optimizer.max_grad_norm", max(m.number(o + "grad_norm_clip"), 0.0), o + "grad_norm_clip")
    warmup = m.number(o + "warmup_steps")
    share = isinstance(warmup, float) and warmup <= 1
    per = 1 if first(m) else common.updates(m)  # its schedules move once per step, in 0.1 with every update
    ramp = int(warmup) + first(m) if warmup else 0  # update n has (n + 1) / (warm-up + 1) of the rate there
    m.set("optimizer.warmup_steps", 0 if share else ramp * per, o + "warmup_steps")
    if share and warmup:
        m.set("optimizer.warmup_fraction", warmup, o + "warmup_steps")
    m.set("optimizer.warmup_start", m.number(o + "warmup_start_factor"), o + "warmup_start_factor")
    _decay(m, o)
    m.facts["learning rate"] = (
        f"{rates[0]}, {m.options['optimizer.schedule'][0]}, warm-up "
        f"{f'{warmup} of all updates' if share else f'{ramp * per} updates'}"
    )


def _decay(m: Migration, o: str):
    """No type, no decay. Without a ratio it lasts from the warm-up to the end; else that share of all updates."""
    kind, ratio = m.text(o + "decay_type") or "none", m.number(o + "decay_ratio")
    if kind not in ("none", "linear", "cosine", "sqrt"):
        m.lacks(o + "decay_type", f"{kind!r} is none of linear, cosine, sqrt, none")
        kind = "none"
    if kind == "none" or ratio == 0:
        m.set("optimizer.schedule", "constant", o + "decay_type", *((o + "decay_ratio",) if kind != "none" else ()))
        return
    m.set("optimizer.floor", m.number(o + "min_lr_factor"), o + "min_lr_factor")
    if ratio is None and kind != "sqrt":
        m.set("optimizer.schedule", kind, o + "decay_type")
        return
    m.set("optimizer.schedule", "wsd", o + "decay_type", o + "decay_ratio")
    m.set("optimizer.decay_shape", kind, o + "decay_type")
    updates, key = m.integer(TRAIN + "max_num_steps"), o + ("decay_ratio" if ratio is not None else "decay_type")
    if updates:
        m.set(
            "optimizer.decay_steps",
            max(round(updates * (1 if ratio is None else ratio)), 1) * common.updates(m),
            key,
            TRAIN + "max_num_steps",
        )
    else:
        m.needs(
            f"optimizer.decay_steps: {key} is a share of all updates, whose number the source does not say "
            "(max_num_steps); unset it is the last tenth"
        )


def numbers(m: Migration):
    """Sets train.param_dtype, train.compute_dtype, train.matmul (fp8, fp4), run.deterministic, run.seed and
    model.remat. Dtypes that jaxrl does not have are reported as not carried over (fp32 weights and bf16 are set). The
    seed is 42 if it is negative, or null in a deterministic run."""
    t = TRAIN
    held = t + ("param_dtype" if first(m) else "master_dtype")  # 0.1 has parameters in one dtype alone
    master = common.DTYPES.get(m.text(held))
    compute = common.DTYPES.get(m.text(t + "param_dtype"))
    if first(m):
        m.mark(t + "master_dtype", "inert", "Cosmos-RL 0.1 does not read it")
    if master not in ("fp32", "bf16") or compute is None:
        m.lacks(
            held if compute else t + "param_dtype",
            "weights are held in float32 or bfloat16, computed in those or float16",
        )
    m.set("train.param_dtype", master if master in ("fp32", "bf16") else "fp32", held)
    m.set("train.compute_dtype", compute or "bf16", t + "param_dtype")
    if m.flag(t + "fp8.enable_fp8"):
        kind = {"rowwise": "fp8", "tensorwise": "fp8_tensor"}
        m.set(
            "train.matmul",
            m.choice(t + "fp8.quant_recipe", kind) or "fp8",
            t + "fp8.enable_fp8",
            t + "fp8.quant_recipe",
        )
    elif m.flag(t + "fp4.enable_fp4"):
        m.set("train.matmul", "nvfp4", t + "fp4.enable_fp4")
    fixed, seed = m.flag(t + "deterministic"), m.integer(t + "seed")
    m.set("run.deterministic", fixed, t + "deterministic")
    if fixed and seed is None or seed is not None and seed < 0:
        m.set("run.seed", 42, t + "seed", t + "deterministic")
    elif seed is not None:
        m.set("run.seed", seed, t + "seed")
    remat = "full" if m.flag(POLICY + "model_gradient_checkpointing") else "none"
    remat = "offload" if m.flag(t + "activation_offload") else remat
    m.set("model.remat", remat, t + "activation_offload", POLICY + "model_gradient_checkpointing")
