"""Warnings: conditions of the first steps that make learning impossible, and mechanisms without effect.

The rules are data. Each reads the metrics of one step. A missing metric disables its rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from jaxrl.config.registry import RECIPES

FIRST_STEPS = 3


class Rule(NamedTuple):
    """A warning's condition.

    Attributes:
      wrong: reader -> whether it holds; the reader returns a metric by name, nan if absent; comparisons with nan are
        False.
      message: format text, whose fields are metrics, config options and run_dir.
    """

    name: str
    wrong: Callable[[Callable[[str], float]], bool]
    message: str  # format fields are metrics, config options and run_dir


RULES: tuple[Rule, ...] = (
    Rule("equal_rewards", lambda m: m("rollout/zero_signal_fraction") == 1.0 or
         (m("reward/std") == 0.0 and not m("rollout/zero_signal_fraction") < 1.0),
         "all rewards within every group are equal (mean {reward/mean:.3g}), so nothing can be learnt from this step. "
         "Read a few completions in {run_dir}/rollouts and check reward.functions={reward.functions}; if the task is"
         " too hard start from SFT (run.warm_start) or easier prompts, if it is too easy use harder ones; else raise "
         "rollout.group_size (now {rollout.group_size}) or rollout.temperature (now {rollout.temperature})"),
    Rule("truncated", lambda m: m("rollout/truncated_fraction") > 0.5,
         "{rollout/truncated_fraction:.0%} of the completions were cut by the length limit before their end: raise "
         "rollout.max_new_tokens (now {rollout.max_new_tokens}), and check that model.eos_tokens names the token your "
         "model ends with"),
    Rule("zero_gradient", lambda m: m("optim/grad_norm") == 0.0,
         "the gradient is exactly zero: the update changes nothing. Look for equal rewards, for "
         "algorithm.mask_truncated with all completions cut, and at model.trainable / model.frozen"),
    Rule("zero_learning_rate", lambda m: m("optim/lr") == 0.0 and m("seen") == FIRST_STEPS,
         "the learning rate is still 0: shorten optimizer.warmup_steps (now {optimizer.warmup_steps}) or set "
         "optimizer.warmup_start above 0, and look at optimizer.floor and optimizer.decay_steps"),
    Rule("nonfinite", lambda m: m("optim/skipped") > 0.0,
         "an update was skipped because its loss or gradient was not finite: {finite}"),
    Rule("filtered_prompts", lambda m: m("data/filtered_fraction") > 0.05,
         "{data/filtered_fraction:.0%} of the prompts are longer than data.max_prompt_tokens (now "
         "{data.max_prompt_tokens}) and left out: raise it, or set data.overlong_prompt=truncate_left"),
    Rule("absent_rewards", lambda m: m("rollout/absent_fraction") > 0.05,
         "{rollout/absent_fraction:.0%} of the completions got no reward: `outcomes` in {run_dir}/rollouts says for"
         " each whether the function returned None, failed or timed out (reward.timeout_seconds is"
         " {reward.timeout_seconds})"),
    Rule("gap", lambda m: m("gap/mean") > 0.05 and not m("staleness/max") >= 0,
         "the sampler's log-probs differ from the trainer's by {gap/mean:.2g} per token on average: set "
         "rollout.dtype=fp32 to see whether precision is the cause, and keep algorithm.mismatch.correction=token_tis"),
    Rule("low_entropy", lambda m: m("policy/entropy") < 0.01,
         "the policy is almost deterministic (entropy {policy/entropy:.2g} nats per token), so the completions of a"
         " group will be equal: raise rollout.temperature (now {rollout.temperature}) or start from a less"
         " trained model"),
    Rule("clipped", lambda m: m("policy/clip_fraction") > 0.5,
         "{policy/clip_fraction:.0%} of the tokens are clipped: lower optimizer.lr (now {optimizer.lr}) or "
         "algorithm.ppo_epochs"),
)


IDLE_STEPS = 50


class Mechanism(NamedTuple):
    """An enabled mechanism that shows in a metric. It is idle while the metric is 0; steps without the metric do not
    count."""

    option: str  # below `algorithm`
    metric: str


OFF = (0.0, None, "", "off", False, "none", "auto")
MECHANISMS: tuple[Mechanism, ...] = (
    Mechanism("clip_low", "policy/clip_low_fraction"),
    Mechanism("clip_high", "policy/clip_high_fraction"),
    Mechanism("dual_clip", "policy/dual_clip_fraction"),
    Mechanism("delta", "policy/dual_clip_fraction"),
    Mechanism("mismatch.sequence_delta", "policy/sequence_masked_fraction"),
    Mechanism("mismatch.correction", "gap/corrected_fraction"),
    Mechanism("dynamic_sampling", "rollout/masked_fraction"),
    Mechanism("dynamic_sampling", "rollout/discarded_fraction"),
    Mechanism("early_stop_ratio", "policy/early_stopped"),
    Mechanism("early_stop_kl", "policy/early_stopped"),
    Mechanism("entropy_target", "policy/entropy_coef"),
    Mechanism("positive_nll_coef", "policy/positive_nll"),
    Mechanism("kl.coef", "policy/kl"),
    Mechanism("advantage", "advantage/anchored_fraction"),
)


def mechanisms() -> tuple[Mechanism, ...]:
    """Returns MECHANISMS and one Mechanism for each token mask (algorithms.TOKEN_MASKS)."""
    from jaxrl.algorithms import TOKEN_MASKS  # not at every reading of a report: it imports jax

    return (*MECHANISMS, *(Mechanism(option, mask.metric) for option, mask in TOKEN_MASKS.items()))


class IdleMechanisms:
    """Warns once about each mechanism that had no effect for IDLE_STEPS steps.

    Args:
      chosen: options below `algorithm` that were set explicitly -> value (see Spec.chosen).

    Attributes:
      watched: Mechanism -> steps in a row that it did nothing, of those that no warning named yet.
    """

    def __init__(self, chosen: dict):
        self.watched = {m: 0 for m in mechanisms() if chosen.get(m.option) not in OFF}  # -> steps that it did nothing
        self._given = chosen

    def check(self, step: int, scalars: dict[str, float]) -> list[str]:
        """Returns the warnings about this step. A step without an update (optim/grad_norm) or without the metric of a
        mechanism does not count for it. scalars: metric -> value."""
        if "optim/grad_norm" not in scalars:
            return []
        out = []
        for m in list(self.watched):
            if m.metric not in scalars:  # another form of the same mechanism
                continue
            self.watched[m] = 0 if scalars[m.metric] else self.watched[m] + 1
            if self.watched[m] == IDLE_STEPS:
                del self.watched[m]
                out.append(f"step {step}: algorithm.{m.option}={self._given[m.option]} has done nothing for"
                           f" {IDLE_STEPS} steps ({m.metric} is 0): it is not needed, or its bound is too far away")
        return out


class Divergence:
    """Warns once each that the loss has risen, or that a held-out accuracy has collapsed, as with too
    large a learning rate.

    The loss: the mean of the last five finite ones is above three times that of the first three and of the lowest three
    in a row, if these are above 0 (for recipes that do not sample, whose loss is a likelihood or close to one). An
    accuracy: below half of the best one so far, and more than 0.1 below it.

    Args:
      config: the whole config. samples: whether the recipe samples; its loss is not watched then.

    Attributes:
      found: the first warning, "" before.
    """

    LATEST, EARLIER = 5, 3

    def __init__(self, config, samples: bool):
        self.found = ""
        self._lr, self._norm, self._samples = config.optimizer.lr, config.optimizer.max_grad_norm, samples
        self._losses: list[float] = []
        self._first = self._lowest = float("inf")
        self._best: dict[str, float] = {}
        self._said: set[str] = set()

    def check(self, step: int, scalars: dict[str, float]) -> list[str]:
        """Returns the warnings about this step. scalars: metric -> value; a loss that is not finite is left out."""
        out = []
        if not self._samples and math.isfinite(loss := scalars.get("loss", float("nan"))):
            self._losses = [*self._losses[1 - self.LATEST:], loss]
            if len(self._losses) >= self.EARLIER:
                mean = sum(self._losses[-self.EARLIER:]) / self.EARLIER
                self._first = mean if self._first == float("inf") else self._first
                self._lowest = min(self._lowest, mean)
            latest = sum(self._losses) / len(self._losses)
            if len(self._losses) == self.LATEST and latest > 3 * self._first and latest > 3 * self._lowest > 0:
                out += self._warning("loss", step, f"the loss rose from {self._lowest:.3g} to {latest:.3g}", scalars)
        for name, value in scalars.items():
            if name.startswith("eval/") and name.endswith("accuracy"):
                best = self._best[name] = max(value, self._best.get(name, value))
                if value < best / 2 and value < best - 0.1:
                    out += self._warning(name, step, f"{name} fell from {best:.1%} to {value:.1%}", scalars)
        return out

    def _warning(self, name: str, step: int, what: str, scalars) -> list[str]:
        if name in self._said:
            return []
        self._said.add(name)
        norm = scalars.get("optim/grad_norm", float("nan"))
        text = (f"{what}: training diverges, or unlearns. Lower optimizer.lr (now {self._lr:g}); the gradient's norm is"
                f" {norm:.3g}, optimizer.max_grad_norm={self._norm:g}. Go on from an earlier checkpoint; with"
                " train.stop_on_divergence=True a run ends here")
        self.found = self.found or f"step {step}: {what}"
        return [f"step {step}: {text}"]


class Health:
    """Applies RULES to the first FIRST_STEPS steps of a process; each rule warns once.

    Args:
      config: the whole config, for the remedies. run_dir: named in messages.

    Attributes:
      over: whether the first steps are over, so that `check` finds nothing more.
    """

    def __init__(self, config, run_dir):
        self._config, self._run_dir = config, run_dir
        self._seen, self.over = 0, False  # over: the first steps are
        self._said: set[str] = set()

    def check(self, step: int, scalars: dict[str, float]) -> list[str]:
        """Returns the warnings about this step; [] after the first steps. Lines without an update
        (evaluation) do not count.
        """
        if self.over or "optim/grad_norm" not in scalars:
            return []
        self._seen += 1
        self.over = self._seen >= FIRST_STEPS
        values = {**scalars, "seen": self._seen}
        broken = [r for r in RULES if r.name not in self._said and r.wrong(lambda n: values.get(n, float("nan")))]
        self._said |= {r.name for r in broken}
        return [f"step {step}: {message(r, self._config, self._run_dir, values)}" for r in broken]


def message(rule: Rule, config, run_dir, values: dict[str, float]) -> str:
    """Returns the text of a violated rule.

    Args:
      config: group -> object whose attributes are the group's options.
      run_dir: named in the text. values: metric -> value; an absent one is shown as nan.
    """
    # "{rollout.temperature}" reads the attribute of a config group, "{reward/mean}" a metric.
    return rule.message.format_map(_Known(config.items(), **values, run_dir=run_dir, finite=finite(config, run_dir)))


def finite(config, run_dir) -> str:
    """Returns the remedy for losses or gradients that are not finite, for this job. config: as in `message`; missing
    options count as not set.
    """
    groups = dict(config.items())
    read = lambda group, name: getattr(groups.get(group), name, None)  # noqa: E731
    recipe, own = RECIPES.get(read("run", "recipe") or ""), read("algorithm", "policy_loss") or ""
    samples = recipe is None or recipe.samples
    out = [f"look for 0 x inf, log(0) and 0 / 0 in algorithm.policy_loss={own}"] * (samples and ":" in own)
    out += [f"lower optimizer.lr (now {read('optimizer', 'lr')})"]
    out += ["use train.compute_dtype=fp32"] * (read("train", "compute_dtype") in ("bf16", "fp16"))
    rollouts = samples and read("log", "rollouts")
    return ", or ".join(out + [f"look at the rewards in {run_dir}/rollouts"] * bool(rollouts))


class _Known(dict):
    def __missing__(self, metric):
        return float("nan")
