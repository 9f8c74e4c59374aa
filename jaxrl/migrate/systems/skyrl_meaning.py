"""What keys of SkyRL mean together: the joint rules of its table. See systems/skyrl.py."""

from __future__ import annotations

import re

from jaxrl.migrate import common, devices, episodes
from jaxrl.migrate.table import Migration

TRAINER, ALGO, POLICY, GEN, ENGINE = (
    "trainer.",
    "trainer.algorithm.",
    "trainer.policy.",
    "generator.",
    "generator.inference_engine.",
)
MEGATRON = POLICY + "megatron_config."


def batch(m: Migration):
    prompts, mini = m.integer("trainer.train_batch_size"), m.integer("trainer.policy_mini_batch_size")
    epochs, group = m.integer("trainer.update_epochs_per_batch"), m.integer("generator.n_samples_per_prompt")
    stale = asynchronous(m)
    if stale:
        prompts = mini
        m.differs(
            "SkyRL's fully asynchronous trainer takes policy_mini_batch_size prompts per step; so is "
            "data.prompts_per_step"
        )
    common.batch(
        m,
        prompts,
        group,
        ("trainer.policy_mini_batch_size",) if stale else ("trainer.train_batch_size",),
        "generator.n_samples_per_prompt",
    )
    m.set("algorithm.ppo_epochs", epochs, "trainer.update_epochs_per_batch")
    common.minibatches(
        m,
        "algorithm.num_minibatches",
        prompts,
        mini,
        epochs,
        "trainer.train_batch_size",
        "trainer.policy_mini_batch_size",
    )
    if m.text(ALGO + "advantage_estimator") == "gae":
        common.minibatches(
            m,
            "critic.num_minibatches",
            prompts,
            min(m.integer("trainer.critic_mini_batch_size"), prompts),
            epochs,
            "trainer.critic_mini_batch_size",
        )


def asynchronous(m: Migration) -> bool:
    return m.flag("trainer.fully_async.enabled") or "fully_async" in m.command


def staleness(m: Migration):
    if re.search(r"\bmain_async\b", m.command):  # its example: a queue of one batch
        m.set("rollout.max_staleness", 1, "trainer.fully_async.max_staleness_steps")
        m.facts["staleness"] = 1
        return
    if not asynchronous(m):
        return
    stale = m.integer("trainer.fully_async.max_staleness_steps")
    m.set("rollout.max_staleness", stale, "trainer.fully_async.max_staleness_steps", "trainer.fully_async.enabled")
    m.set("rollout.partial", stale > 0, "trainer.fully_async.max_staleness_steps", "trainer.fully_async.enabled")
    m.facts["staleness"] = stale


def advantage(m: Migration):
    """Sets algorithm.advantage, advantage_mean, advantage_std and whiten, gamma for reinforce++ and gae, lam and
    critic.* for gae. Refuses estimators other than these, grpo, rloo and maxrl."""
    a = ALGO
    kind = m.choice(
        a + "advantage_estimator",
        {
            "grpo": ("outcome", "group", "none" if not m.flag(a + "grpo_norm_by_std") else "group", False),
            "rloo": ("outcome", "leave_one_out", "none", False),
            "maxrl": ("outcome", "group", "group_mean", False),
            "reinforce++": ("returns", "none", "none", True),
            "gae": ("gae", "none", "none", True),
        },
    )
    if kind is None:
        m.lacks(
            a + "advantage_estimator",
            f"{m.text(a + 'advantage_estimator')!r}: write it as a function and name it in "
            "algorithm.advantage (docs/guides/extend.md)",
            refuse=True,
        )
        return
    names, (estimator, mean, std, whiten) = (a + "advantage_estimator", a + "grpo_norm_by_std"), kind
    m.set("algorithm.advantage", estimator, names[0])
    m.set("algorithm.advantage_mean", mean, names[0])
    m.set("algorithm.advantage_std", std, *names)
    m.set(
        "algorithm.whiten", whiten or m.flag(a + "advantage_batch_normalize"), names[0], a + "advantage_batch_normalize"
    )
    m.facts["advantage"] = m.text(names[0])
    if estimator in ("returns", "gae"):
        m.set("algorithm.gamma", m.number(a + "gamma"), a + "gamma")
    if estimator == "gae":
        m.set("algorithm.lam", m.number(a + "lambd"), a + "lambd")
        clip = m.number(a + "value_clip")
        m.set("critic.value_clip", clip or 0, a + "value_clip")
        m.set("critic.normalize", m.flag(a + "normalize_reward"), a + "normalize_reward")
        critic(m)


def critic(m: Migration):
    c = "trainer.critic."
    path = m.text(c + "model.path")
    if path and path != m.text("trainer.policy.model.path"):
        m.set("critic.path", path, c + "model.path")
    m.set("critic.lr", m.number(c + "optimizer_config.lr"), c + "optimizer_config.lr")
    own, ours = {}, {}
    for name, key in (
        ("weight_decay", "weight_decay"),
        ("max_grad_norm", "max_grad_norm"),
        ("warmup_steps", "num_warmup_steps"),
    ):
        own[name], ours[name] = m.number(c + "optimizer_config." + key), m.number(POLICY + "optimizer_config." + key)
    betas, policy = m.list(c + "optimizer_config.adam_betas"), m.list(POLICY + "optimizer_config.adam_betas")
    different = {k: v for k, v in own.items() if v != ours[k]}
    different |= {n: b for n, b, p in zip(("b1", "b2"), betas, policy, strict=True) if b != p}
    for name, value in different.items():
        m.set(f"critic.optimizer.{name}", int(value) if name == "warmup_steps" else float(value), *CRITIC)


def critics_schedule(m: Migration):
    key = "trainer.critic.optimizer_config.scheduler"
    if m.options.get("algorithm.advantage", ("",))[0] == "gae" and (kind := m.choice(key, common.SCHEDULES)):
        common.critics_optimizer(m, {"schedule": (kind, (key,))})


CRITIC = tuple(
    "trainer.critic.optimizer_config." + n for n in ("adam_betas", "weight_decay", "max_grad_norm", "num_warmup_steps")
)


def loss(m: Migration):
    a, name = ALGO, ALGO + "policy_loss_type"
    kind = m.text(name)
    if kind not in ("regular", "dual_clip", "gspo", "cispo", "sapo", "dppo", "clip_cov", "rollout_is"):
        why = f"{kind!r} is none of the losses here; one of your own is a function (docs/guides/extend.md)"
        m.lacks(name, why, refuse=True)
        return
    if kind == "rollout_is":
        second = bool(m.text(a + "off_policy_correction.tis_ratio_type") or m.flag(a + "use_tis"))
        common.rollout_weights(m, name, a + "eps_clip_low", a + "eps_clip_high", second)
        return reduction(m)
    loss = kind if kind in ("cispo", "sapo", "dppo") else "clip"
    m.set("algorithm.policy_loss", loss, name)
    m.set("algorithm.ratio", "sequence_token" if kind == "gspo" else "token", name)
    m.set("algorithm.dual_clip", m.number(a + "clip_ratio_c") if kind == "dual_clip" else 0.0, name, a + "clip_ratio_c")
    if loss == "clip":
        m.set("algorithm.clip_low", m.number(a + "eps_clip_low"), a + "eps_clip_low")
        m.set("algorithm.clip_high", m.number(a + "eps_clip_high"), a + "eps_clip_high")
        m.facts["clip"] = f"{1 - m.number(a + 'eps_clip_low'):g} to {1 + m.number(a + 'eps_clip_high'):g}" + (
            f", dual {m.number(a + 'clip_ratio_c'):g}" if kind == "dual_clip" else ""
        )
    if kind == "clip_cov":
        common.clip_cov(m, a + "clip_cov.clip_ratio", a + "clip_cov.clip_cov_lb", a + "clip_cov.clip_cov_ub", name)
    if kind == "cispo":
        low, high = m.number(a + "cispo.cispo_eps_clip_low"), m.number(a + "cispo.cispo_eps_clip_high")
        m.set("algorithm.cispo_min_ratio", max(1.0 - low, 0.0), a + "cispo.cispo_eps_clip_low")
        m.set("algorithm.cispo_max_ratio", 1.0 + high, a + "cispo.cispo_eps_clip_high")
        if m.text(a + "cispo.cispo_anchor") == "rollout":
            m.set("algorithm.old_logprobs", "rollout", a + "cispo.cispo_anchor")
    if kind == "sapo":
        m.set("algorithm.sapo_tau_pos", m.number(a + "sapo.tau_pos"), a + "sapo.tau_pos")
        m.set("algorithm.sapo_tau_neg", m.number(a + "sapo.tau_neg"), a + "sapo.tau_neg")
    if kind == "dppo":
        if m.text(a + "dppo.dppo_type") != "binary_tv":
            m.lacks(a + "dppo.dppo_type", "of DPPO there is the binary total variation", refuse=True)
        m.set("algorithm.dppo_low", m.number(a + "dppo.delta_low"), a + "dppo.delta_low")
        m.set("algorithm.dppo_high", m.number(a + "dppo.delta_high"), a + "dppo.delta_high")
        m.set("algorithm.old_logprobs", "rollout", name)
    reduction(m)


def reduction(m: Migration):
    name, length = ALGO + "loss_reduction", ALGO + "max_seq_len"
    kind = m.choice(
        name,
        {
            "token_mean": "token_mean",
            "token_mean_legacy": "token_mean",
            "sequence_mean": "sequence_mean",
            "seq_mean_token_sum_norm": "constant",
            "prompt_mean": "prompt_mean",
        },
    )
    if kind is None:
        return
    versions, micro = m.table.versions, "trainer.micro_train_batch_size_per_gpu"
    old = versions.index(m.version) < versions.index("0.2")
    if m.text(name) == "token_mean_legacy" or kind == "token_mean" and old:
        common.token_mean(m, m.integer(micro), name, micro)
    else:
        m.set("algorithm.aggregation", kind, name)
    if kind == "constant":
        total = m.integer(length) or (input_length(m) + m.integer("generator.sampling_params.max_generate_length"))
        keys = (
            (length,)
            if m.given(length)
            else (
                length,
                "generator.max_input_length",
                "trainer.max_prompt_length",
                "generator.sampling_params.max_generate_length",
            )
        )
        m.set("algorithm.aggregation_constant", total, name, *keys)
        m.facts["Dr.GRPO's constant"] = total


def input_length(m: Migration) -> int:
    return m.integer("generator.max_input_length") or m.integer("trainer.max_prompt_length")


def kl(m: Migration):
    a = ALGO
    loss, reward = m.flag(a + "use_kl_loss"), m.flag(a + "use_kl_in_reward")
    if loss and reward:
        m.lacks(a + "use_kl_in_reward", "the KL is in the loss or in the reward, not in both", refuse=True)
        return
    if m.text(a + "kl_ctrl.type") == "adaptive" and reward:
        m.lacks(a + "kl_ctrl.type", "the coefficient of the KL is fixed here")
    estimator, key = m.text(a + "kl_estimator_type"), a + "kl_estimator_type"
    if m.given(a + "use_kl_estimator_k3") or m.given(a + "use_abs_kl"):
        estimator = "k3" if m.flag(a + "use_kl_estimator_k3") else "abs" if m.flag(a + "use_abs_kl") else "k1"
        key = a + "use_kl_estimator_k3"
    estimator = {"k3": "low_var"}.get(estimator, estimator)  # theirs is clipped
    coef = m.number(a + "kl_loss_coef") if loss or reward else 0.0
    keys = (a + "use_kl_loss", a + "use_kl_in_reward", a + "kl_loss_coef", key)
    common.kl(m, coef, estimator, "reward" if reward else "loss", *keys)
    if loss and coef:
        m.differs(
            "SkyRL averages the KL in the loss over sequences of token means, whatever loss_reduction says; here it "
            "is aggregated as the policy's loss is"
        )
    m.set(
        "algorithm.entropy_coef",
        m.number(a + "entropy_loss_coef") if m.flag(a + "use_entropy_loss") else 0.0,
        a + "use_entropy_loss",
        a + "entropy_loss_coef",
    )
    path = m.text("trainer.ref.model.path")
    if coef and path and path != m.text("trainer.policy.model.path"):
        m.set("reference.path", path, "trainer.ref.model.path")
    if coef and m.flag("trainer.update_ref_every_epoch"):
        m.set("reference.reset_epochs", 1.0, "trainer.update_ref_every_epoch")


def mismatch(m: Migration):
    o = ALGO + "off_policy_correction."
    ratio, mask = m.text(o + "tis_ratio_type"), m.text(o + "sequence_mask_metric")
    cap, key = {
        "token": (o + "token_tis_ratio_clip_high", o + "tis_ratio_type"),
        "sequence": (o + "sequence_tis_ratio_clip_high", o + "tis_ratio_type"),
    }.get(ratio, ("", ""))
    if not ratio and m.flag(ALGO + "use_tis"):
        ratio, cap, key = "token", ALGO + "tis_imp_ratio_cap", ALGO + "use_tis"
    for name in (f"{kind}_is_threshold_{side}" for kind in ("outlier_token", "token_mask") for side in ("low", "high")):
        if m[o + name] is not None and (ratio or mask or name.startswith("token")):
            m.lacks(
                o + name,
                "tokens outside bounds are masked by algorithm.mismatch.correction=token_mis, which weighs the "
                "others, too",
                refuse=True,
            )
    if m.options.get("algorithm.old_logprobs", ("", ()))[0] == "rollout":
        m.set("algorithm.mismatch.correction", "none", o + "tis_ratio_type")
        if key or mask:
            why = "a loss whose ratios are to the sampler's log-probs has no further weight or mask of them"
            m.lacks(key or o + "sequence_mask_metric", why)
        return
    if mask in ("geometric", "product"):
        low, high = (f"{o}{'geo' if mask == 'geometric' else 'product'}_mask_{side}" for side in ("low", "high"))
        m.set("algorithm.sequence_ratio", mask, o + "sequence_mask_metric")
        m.set("algorithm.sequence_low", float(m.number(low)), low)
        m.set("algorithm.sequence_high", float(m.number(high)), high)
        m.set("algorithm.old_logprobs", "recompute", o + "sequence_mask_metric")
    if "algorithm.mismatch.correction" in m.options:  # the loss rollout_is itself
        return
    if ratio in ("token", "sequence"):
        m.set("algorithm.mismatch.correction", f"{ratio}_tis", key)
        m.set("algorithm.mismatch.cap", m.number(cap), cap)
    else:
        which = (o + "tis_ratio_type", o + "sequence_mask_metric", ALGO + "use_tis")
        m.set("algorithm.mismatch.correction", "none", *which)


def filtering(m: Migration):
    d = ALGO + "dynamic_sampling."
    kind = m.text(d + "type")
    if kind == "replace":
        m.lacks(
            d + "type",
            "groups without signal are masked or replaced by fresh ones, not by copies of others",
            refuse=True,
        )
    elif kind == "filter":
        m.set("algorithm.dynamic_sampling", "refill", d + "type")
        rounds = m.integer(d + "max_sample_batches")
        m.set("algorithm.dynamic_sampling_rounds", rounds if rounds > 0 else 1000, d + "max_sample_batches")
    else:
        mask = m.flag(ALGO + "zero_variance_filter")
        m.set("algorithm.dynamic_sampling", "mask" if mask else "off", ALGO + "zero_variance_filter", d + "type")
    m.set("algorithm.mask_truncated", m.flag(GEN + "apply_overlong_filtering"), GEN + "apply_overlong_filtering")


def lengths(m: Migration):
    m.set("data.max_prompt_tokens", m.integer("trainer.max_prompt_length"), "trainer.max_prompt_length")
    m.set(
        "rollout.max_new_tokens",
        m.integer("generator.sampling_params.max_generate_length"),
        "generator.sampling_params.max_generate_length",
    )
    m.set("data.overlong_prompt", "filter", "trainer.max_prompt_length")


def evaluation(m: Migration):
    interval, before = m.integer("trainer.eval_interval"), m.flag("trainer.eval_before_train")
    common.triggers(m, "eval.every_steps", interval, "trainer.eval_interval")
    m.set("eval.before", before and interval > 0, "trainer.eval_before_train", "trainer.eval_interval")
    m.set("eval.after", interval > 0, "trainer.eval_interval")
    m.set("eval.samples", m.integer("generator.eval_n_samples_per_prompt"), "generator.eval_n_samples_per_prompt")
    e, names = "generator.eval_sampling_params.", ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    table = m.table.versions.index(m.version) >= m.table.versions.index("0.1")
    keys = [e + n for n in (*names, "max_generate_length", "logprobs", "stop") if m.given(e + n)]
    fresh = table and bool(keys)  # a table of its own, with the defaults of training
    values = {}
    for name in names:
        values[name] = m.number(e + name)
        if fresh and not m.given(e + name):
            values[name] = {"temperature": 1.0, "top_k": -1, "min_p": 0.0}.get(name, 1.0)
        if values[name] is not None:
            m.set(f"eval.{name}", values[name], e + name, *(keys if fresh and not m.given(e + name) else ()))
    if fresh and not m.given(e + "temperature"):
        m.differs(
            "evaluation has temperature 1: here any key of SkyRL's eval_sampling_params replaces the greedy "
            "default by a table whose temperature is 1"
        )
    if m.list(e + "stop"):
        m.set("eval.stop", tuple(str(x) for x in m.list(e + "stop")), e + "stop")
    longest = m.integer(e + "max_generate_length")
    if longest is None and fresh:
        longest = 1024
    if longest is not None:
        m.set("eval.max_new_tokens", longest, e + "max_generate_length", *(keys if fresh else ()))
    m.facts["evaluation"] = (
        f"every {interval} steps, temperature {values['temperature']}, "
        f"{m.integer('generator.eval_n_samples_per_prompt')} completions"
        if interval > 0
        else "none"
    )
    if m.options["eval.samples"][0] > 1 and not values["temperature"]:
        m.lacks(
            "generator.eval_n_samples_per_prompt",
            "several greedy completions are all the same, and are refused: one is sampled",
        )
        m.options["eval.samples"] = (1, ("generator.eval_n_samples_per_prompt",))


def sampling(m: Migration):
    s = "generator.sampling_params."
    for name in ("temperature", "top_p", "top_k", "min_p"):
        m.set(f"rollout.{name}", m.number(s + name), s + name)
    penalty = m.number(s + "repetition_penalty")
    if penalty and penalty != 1:
        m.set("rollout.repetition_penalty", penalty, s + "repetition_penalty")
        m.set("rollout.penalties_in_training", True, s + "repetition_penalty")
    if m[s + "stop"]:
        m.set("rollout.stop", tuple(str(x) for x in m.list(s + "stop")), s + "stop")
    m.facts["sampling"] = f"temperature {m[s + 'temperature']}, top_p {m[s + 'top_p']}, top_k {m[s + 'top_k']}"
    apart = m.number(ALGO + "temperature")
    if apart is not None:
        common.temperatures(m, apart, m.number(s + "temperature"), ALGO + "temperature")


def optimizer(m: Migration):
    o = POLICY + "optimizer_config."
    m.set("optimizer.lr", m.number(o + "lr"), o + "lr")
    betas = m.list(o + "adam_betas")
    m.set("optimizer.b1", float(betas[0]), o + "adam_betas")
    m.set("optimizer.b2", float(betas[1]), o + "adam_betas")
    common.schedule(
        m,
        o + "scheduler",
        m.text(o + "scheduler"),
        m.integer(o + "num_warmup_steps"),
        None,
        o + "scheduler",
        o + "num_warmup_steps",
    )


def layout(m: Migration):
    p = "trainer.placement."
    place = (p + "policy_num_nodes", p + "policy_num_gpus_per_node")
    nodes, per = map(m.integer, place)
    gpus = devices.count_gpus(m, nodes * per if any(map(m.given, place)) else 0, nodes * per)
    mega = m.text("trainer.strategy") == "megatron"
    sizes = devices.megatron_sizes(m, MEGATRON, mega)
    if not mega:
        sizes["cp"] = m.integer(POLICY + "sequence_parallel_size")
    devices.mesh(
        m,
        ("trainer.strategy",),
        (*place, *MESH),
        **sizes,
        fsdp=m.integer(POLICY + "fsdp_config.fsdp_size") or 0,
        gpus=gpus,
    )
    backend = m.text(ENGINE + "backend")
    devices.engine(
        m,
        backend,
        ENGINE + "backend",
        tp=m.integer(ENGINE + "tensor_parallel_size"),
        engines=m.integer(ENGINE + "num_engines") * m.integer(ENGINE + "data_parallel_size"),
        nodes=nodes,
        gpus=gpus,
        colocated=m.flag(p + "colocate_all"),
        keys=(
            p + "policy_num_nodes",
            ENGINE + "num_engines",
            ENGINE + "tensor_parallel_size",
            ENGINE + "data_parallel_size",
            p + "colocate_all",
            p + "policy_num_gpus_per_node",
        ),
    )
    if m.flag(POLICY + "fsdp_config.cpu_offload"):
        devices.rest(m, "streamed", POLICY + "fsdp_config.cpu_offload")
    if not m.flag(ENGINE + "run_engines_locally"):
        urls = [u if "://" in str(u) else f"http://{u}" for u in m.list(ENGINE + "external_server_urls")]
        for option in ("rollout.vllm.devices", "rollout.vllm.replicas", "rollout.placement", "mesh.roles.policy"):
            m.options.pop(option, None)
        named = tuple(u for u in urls if "$" not in u and re.fullmatch(r"\w+://[^/:]+.*", u))
        m.set("rollout.servers", named, ENGINE + "external_server_urls", ENGINE + "run_engines_locally")
        m.needs("rollout.servers: name the servers, started with jaxrl's plugin (docs/guides/vllm.md)")


MESH = tuple(MEGATRON + name for name in devices.MEGATRON.values()) + (
    POLICY + "fsdp_config.fsdp_size",
    POLICY + "sequence_parallel_size",
)


def memory(m: Migration):
    longest = m.options["data.max_prompt_tokens"][0] + m.options["rollout.max_new_tokens"][0]
    tokens = m.integer("trainer.max_tokens_per_microbatch")
    train, score = (m.integer(f"trainer.micro_{n}_batch_size_per_gpu") for n in ("train", "forward"))
    if tokens and tokens > 0:
        m.set("train.tokens_per_microbatch", max(tokens, longest), "trainer.max_tokens_per_microbatch")
        return
    m.set("train.tokens_per_microbatch", train * longest, "trainer.micro_train_batch_size_per_gpu")
    if score != train:
        m.set("train.score_tokens_per_microbatch", score * longest, "trainer.micro_forward_batch_size_per_gpu")


GSM8K = '''"""SkyRL's rule for GSM8K: the first "#### number" of a completion, without commas, is the answer's text."""

import re


def score(prompt, completion, answer, **columns):
    found = re.search(r"#### (-?[0-9.,]+)", completion)
    return float(found is not None and found[1].replace(",", "") == str(answer))
'''
MINERVA = '''"""SkyRL's rule for AIME: the last "Answer: ..." of a completion; 1 where it is right, else -1.

Texts are compared without blanks, commas and signs of LaTeX; SkyRL normalises more, which whole numbers do not need.
"""

import re


def plain(text):
    return re.sub(r"\\\\boxed|[\\s,${}\\\\]", "", str(text)).rstrip(".").lower()


def score(prompt, completion, answer, **columns):
    found = re.findall(r"(?i)answer\\s*:\\s*([^\\n<]+)", completion[-300:])
    return 1.0 if found and plain(found[-1]) == plain(answer) else -1.0
'''


def environment(m: Migration):
    key, turns, name = "environment.env_class", m.integer("generator.max_turns"), m.text("environment.env_class")
    m.set("data.answer_column", "reward_model.ground_truth" if name == "aime" else "reward_spec.ground_truth", key)
    if turns > 1:
        m.set("reward.functions", (), key)
        tables = ("environment.", "generator.max_turns")
        said = ((s.key, s.value) for s in m.singles.values() if s.key.startswith(tables))
        episodes.episode(m, f"SkyRL's environment {ascii(name)}", said, turns, "generator.max_turns", key)
        longest = m.integer("generator.max_input_length")
        if longest:
            m.set("env.max_input_tokens", longest, "generator.max_input_length")
            episodes.longest(m, longest + m.options["rollout.max_new_tokens"][0], "generator.max_input_length")
    elif name in ("gsm8k", "aime"):
        common.reward_file(m, GSM8K if name == "gsm8k" else MINERVA, key)
    else:
        common.reward_stub(m, f"SkyRL's environment {ascii(name)}", f"environment.env_class={name}", key)
        if "judge" in name:
            m.needs("a model that judges completions is reward.judge here (docs/guides/rewards.md), not that file")
        for s in m.all("environment.skyrl_gym.**"):
            m.mark(s.key, "ask", "an option of that environment: its reward is yours to write")


def adapters(m: Migration):
    p = POLICY + "model.lora."
    common.lora(
        m,
        m.integer(p + "rank"),
        m.number(p + "alpha"),
        m[p + "target_modules"],
        m[p + "exclude_modules"],
        m.text(p + "init_method"),
        m.number(p + "dropout"),
        tuple(p + n for n in ("rank", "alpha", "target_modules", "exclude_modules", "init_method", "dropout")),
    )


def length_penalty(m: Migration):
    length, factor = ALGO + "overlong_buffer_len", ALGO + "overlong_buffer_penalty_factor"
    if m.integer(length):
        m.set("reward.overlong_buffer", m.integer(length), length)
        m.set("reward.overlong_penalty", m.number(factor), factor)
        if "main_tis_dapo" in m.command:
            m.lacks(
                length, "main_tis_dapo counts prompt and completion together: less penalty behind shorter prompts there"
            )


def resume(m: Migration):
    """Sets run.resume: never for none and "", else auto. For from_path it asks for an export, as SkyRL's checkpoints
    are not read."""
    mode = m.text("trainer.resume_mode")
    if mode == "from_path":
        m.needs(
            f"trainer.resume_path={m['trainer.resume_path']}: SkyRL's checkpoints are not read; export it to a Hugging "
            "Face folder and name that in model.path"
        )
    m.set("run.resume", "never" if mode.lower() in ("", "none") else "auto", "trainer.resume_mode")


def places(m: Migration):
    if m.given("trainer.ckpt_path"):
        m.set("run.dir", m.text("trainer.ckpt_path").rstrip("/"), "trainer.ckpt_path")
    every = m.integer("trainer.hf_save_interval") or 0
    common.triggers(m, "checkpoint.export_every_steps", every, "trainer.hf_save_interval")
    common.checkpoints(m, "trainer.ckpt_interval", "trainer.max_ckpts_to_keep")
    ends = m.table.versions.index(m.version) >= m.table.versions.index("0.2")
    if ends and not re.search(r"\bmain_async\b", m.command):  # an epoch's end is saved, too, from 0.2 on
        for option, key in (("every", "trainer.ckpt_interval"), ("export_every", "trainer.hf_save_interval")):
            m.set(f"checkpoint.{option}_epochs", float((m.integer(key) or 0) > 0), key)


def loggers(m: Migration):
    common.loggers(
        m,
        "trainer.logger",
        m.list("trainer.logger"),
        m.text("trainer.project_name"),
        m.text("trainer.run_name"),
        "trainer.project_name",
        "trainer.run_name",
    )


def engine_options(m: Migration):
    prefix = ENGINE + "engine_init_kwargs."
    for s in m.all(ENGINE + "engine_init_kwargs.**"):
        name = s.key.rsplit("engine_init_kwargs.", 1)[1]
        if name == "max_model_len":
            common.context(m, int(s.value), "rollout.vllm.max_model_len", prefix + "**")
        else:
            common.engine_kwarg(m, s.key, name, s.value)


def routes(m: Migration):
    """Sets algorithm.routes=sampled with moe_enable_routing_replay, enable_return_routed_experts and the strategy
    megatron, all three; a prefix cache that is off is then left on, with a note."""
    keys = MEGATRON + "moe_enable_routing_replay", ENGINE + "enable_return_routed_experts"
    if m.text("trainer.strategy") == "megatron" and all(map(m.flag, keys)):
        common.sampled_experts(m, *keys)
