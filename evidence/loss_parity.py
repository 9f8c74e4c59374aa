"""Showing 5 of the algorithms: our losses and advantages beside TRL's and Tunix's on the same random batch.

    python evidence/loss_parity.py --trl PYTHON --tunix PYTHON     # interpreters with trl and google-tunix; a minute

Value and gradient with respect to the log-probs. Theirs come from their own code (peer_losses.py, in their environments,
TRL in float64, Tunix in its float32), ours from what the recipe runs: a preset's row through the update's loss and the
host's weights. Where the two differ the row says why, and the difference is undone on our side by that reason alone, so that
the explanation is checked, too. Exits with 1 where something is neither equal nor explained.

Legend: N answers, T tokens, padded on the right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [os.path.dirname(__file__), str(Path(__file__).resolve().parent.parent / "tests")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from common import commit, record, table  # noqa: E402
from helpers.training_helpers import policy_objective  # noqa: E402

from jaxrl.algorithms import (  # noqa: E402
    PRESETS,
    aggregation_weights,
    gae,
    group_advantages,
    kl_penalty,
    log_ratio,
    value_loss,
    whiten,
)

GROUP, GROUPS, T, LONGEST = 4, 4, 10, 16
LACKING = {"trl": "loss_type=vespo, top_entropy_quantile, normalize_then_sum, a lower bound of truncated weights",
           "tunix": "kl_clamp_value"}
CAP = 1.3  # of the mismatch weights: low enough to act on this batch
BOUNDS = {"trl": 1e-12, "tunix": 2e-5}  # largest relative L2 difference that is rounding


def random_batch(seed=0) -> dict:
    """Log-probs of policies that are a few steps apart, unequal lengths, a group of equal rewards, an absent reward."""
    rng, n = np.random.default_rng(seed), GROUP * GROUPS
    lengths = rng.integers(2, T + 1, n)
    lengths[0] = T
    mask = np.arange(T) < lengths[:, None]
    logp = -rng.exponential(1.0, (n, T)) - 0.05
    shift = lambda size: rng.normal(0, size, (n, 1)) + rng.normal(0, 2 * size, (n, T))  # noqa: E731
    old = logp - shift(0.15)
    behaviour, ref = old - shift(0.1), logp - shift(0.3)
    jump = old.copy()
    jump[1, 0] = logp[1, 0] - 25
    rewards = rng.normal(size=n).round(1)
    rewards[-GROUP:] = 0.7
    absent = rewards.copy()
    absent[2] = np.nan
    advantages = rng.normal(size=n)
    advantages[1] = -0.8
    tool = rng.random((n, T)) > 0.25
    tool[:, 0] = True
    token_rewards = np.where(np.arange(T) == lengths[:, None] - 1, rng.normal(size=(n, 1)), -0.01 * rng.random((n, T)))
    values = rng.normal(size=(n, T))
    return {
        "lengths": lengths, "mask": mask, "logp": logp, "old": old, "behaviour": behaviour, "ref": ref, "old_jump": jump,
        "rewards": absent, "rewards_present": rewards, "advantages": advantages, "tool": tool, "cut": rng.random(n) < 0.3,
        "entropy": rng.random((n, T)), "token_adv": rng.normal(size=(n, T)), "token_rewards": token_rewards * mask,
        "values": values, "old_values": values - 0.3 * rng.normal(size=(n, T)), "returns": rng.normal(size=(n, T)),
        "tis": np.minimum(np.exp(old - behaviour), CAP), "gamma": 0.99, "lam": 0.95, "group_size": GROUP, "max_tokens": LONGEST,
        "cap": CAP}


def loss(b: dict, preset: str, *, old="old", mask="mask", advantages="advantages", dropped=None, longest=LONGEST, extra=None,
         weights=None, **options):
    """(value, gradient [N, T]) of our loss with a preset's row.

    Args:
      options: algorithm options that replace the row's, dots as "__".
      dropped: [N] bool, answers without loss. longest: the constant of aggregation=constant.
      extra: f(logp, token weights) that is added. weights: [N, T] that replace the weights of the policy loss.
    """
    row = PRESETS[preset] | {"mismatch.cap": CAP} | {name.replace("__", "."): value for name, value in options.items()}
    counted = b["mask"] if mask == "mask" else b["mask"] & b[mask]
    numbers = counted.sum(1)
    spread = lambda kind: np.where(counted, aggregation_weights(numbers, kind, max_tokens=longest)[:, None], 0.0)  # noqa: E731
    policy = spread(row["aggregation"]) if weights is None else weights
    policy = policy if dropped is None else np.where(dropped[:, None], 0.0, policy)
    advantage = np.broadcast_to(b[advantages].reshape(len(counted), -1), counted.shape)
    batch = SimpleNamespace(
        weights={"policy": jnp.asarray(policy), "token": jnp.asarray(spread("token_mean"))},
        columns={k: jnp.asarray(v) for k, v in {"advantage": advantage, "old": b[old], "behaviour": b["behaviour"],
                                                "ref": b["ref"]}.items()},
        sequences=jnp.ones(counted.shape, jnp.int32))
    choice = row["mismatch.correction"]
    cfg = policy_objective(
        **{name: value for name, value in row.items() if "." not in name and name != "old_logprobs"},
        kl_coef=row["kl.coef"], kl_estimator=row["kl.estimator"], old="column",
        mismatch="none" if choice == "auto" else choice, mismatch_cap=row["mismatch.cap"], mismatch_low=row["mismatch.low"],
        sequence_delta=row["mismatch.sequence_delta"])

    def value(logp):
        total, _ = cfg.policy_terms(logp, jnp.asarray(b["entropy"]), batch, batch.weights["token"], jnp.asarray(counted), None)
        return total + (extra(logp, batch.weights["policy"]) if extra else 0.0)

    found, grad = jax.value_and_grad(value)(jnp.asarray(b["logp"]))
    return {"value": np.asarray(found), "grad": np.asarray(grad)}


def critic(b: dict):
    """(value, gradient) of the critic's loss, a token mean."""
    weight = jnp.asarray(b["mask"] * aggregation_weights(b["mask"].sum(1), "token_mean")[:, None])
    term = lambda v: jnp.sum(weight * value_loss(v, b["old_values"], b["returns"], b["mask"], 0.2)[0])  # noqa: E731
    found, grad = jax.value_and_grad(term)(jnp.asarray(b["values"]))
    return {"value": np.asarray(found), "grad": np.asarray(grad)}


def estimate(b: dict, mask):
    """GAE, whitened, on a padded batch."""
    flat, offsets = mask.reshape(-1), np.arange(len(mask) + 1) * T
    rewards = (b["token_rewards"] * mask).reshape(-1)
    found, returns = gae(rewards, b["old_values"].reshape(-1), flat, offsets, b["gamma"], b["lam"])
    return {"advantages": whiten(found, flat).reshape(mask.shape)[mask], "returns": returns.reshape(mask.shape)[mask]}


def scores(b: dict, rewards="rewards", kl=0.0, **choice):
    """Advantages per answer."""
    penalty = kl * ((b["old"] - b["ref"]) * b["mask"]).sum(1)
    groups = np.repeat(np.arange(GROUPS), GROUP)
    return {"advantages": group_advantages(b[rewards] - penalty, groups, **choice)[0]}


def scaled(b: dict, eps: float, which: str):
    """Group-centred advantages over a standard deviation plus eps, where ours has 1e-6."""
    centred, rewards = scores(b, mean="group", std="none")["advantages"], b["rewards"]
    by_group = np.repeat([np.nanstd(r, ddof=1) for r in rewards.reshape(GROUPS, GROUP)], GROUP)
    return {"advantages": centred / ((by_group if which == "group" else np.nanstd(rewards, ddof=1)) + eps)}


def by_answer(b: dict):
    """Leave-one-out advantages, brought to mean 0 and variance 1 over answers."""
    found = scores(b, mean="leave_one_out", std="none")["advantages"]
    present = found[np.isfinite(b["rewards"])]
    return {"advantages": np.where(np.isfinite(b["rewards"]), (found - present.mean()) / (present.std(ddof=1) + 1e-4), 0.0)}


def clipped_sequences(b: dict, old: str):
    """TRL's RLOO loss: the ratio of whole answers, a product over tokens, clipped to 0.2."""
    mask = jnp.asarray(b["mask"])

    def value(logp):
        ratio = jnp.exp(jnp.sum(jnp.where(mask, logp - b[old], 0), 1))
        return -jnp.mean(jnp.minimum(ratio * b["advantages"], jnp.clip(ratio, 0.8, 1.2) * b["advantages"]))

    found, grad = jax.value_and_grad(value)(jnp.asarray(b["logp"]))
    return {"value": np.asarray(found), "grad": np.asarray(grad)}


def trl_cases(b: dict) -> dict:
    """case -> (what it is, ours, why it differs, ours with that undone)."""
    kept = np.where(b["cut"], 0, b["mask"].sum(1))
    shorter = np.where(b["mask"], aggregation_weights(kept, "token_mean")[:, None], 0.0)
    ratio = lambda logp: log_ratio(logp, b["old"], b["mask"], jnp.ones(b["mask"].shape, int), "sequence")  # noqa: E731
    k3 = lambda logp: kl_penalty(logp, b["ref"], b["old"], b["mask"], "k3")  # noqa: E731
    sequence = dict(ratio="sequence", aggregation="sequence_mean")
    even = np.where(b["mask"], aggregation_weights(b["mask"].sum(1), "sequence_mean")[:, None], 0.0)
    lifted = np.clip(np.exp(b["old"] - b["behaviour"]), 0.9, CAP) * even
    mean = dict(aggregation="sequence_mean")
    masked = lambda b: loss(b, "grpo", mismatch__sequence_delta=0.1, **mean)  # noqa: E731
    huge = np.abs(b["logp"] - b["old_jump"]) > 20
    exact = lambda logp, w: jnp.sum(jnp.where(huge, w * b["advantages"][:, None] * -(  # noqa: E731
        jnp.exp(logp - b["old_jump"]) - jnp.exp(20.0) * (logp - b["old_jump"] - 19)), 0))
    return {
        "grpo": ("loss_type=grpo, beta 0.04", loss(b, "grpo_paper")),
        "bnpo": ("loss_type=bnpo", loss(b, "grpo")),
        "dr_grpo": ("loss_type=dr_grpo", loss(b, "dr_grpo")),
        "dapo": ("loss_type=dapo, epsilon_high 0.28", loss(b, "dapo")),
        "cispo": ("loss_type=cispo, epsilon_high 2", loss(b, "cispo", cispo_max_ratio=2.0)),
        "gspo": ("importance_sampling_level=sequence", loss(b, "gspo", clip_low=0.03, clip_high=0.04)),
        "luspo": ("loss_type=luspo", loss(b, "grpo", ratio="sequence", aggregation="sequence_sum")),
        "sapo": ("loss_type=sapo", loss(b, "sapo")),
        "delta": ("delta 1.5", loss(b, "grpo", delta=1.5)),
        "gmpo": ("experimental GMPOTrainer", loss(b, "gmpo", clip_low=0.1, clip_high=0.1)),
        "kl_unbiased": ("use_bias_correction_kl", loss(b, "grpo_paper", kl__estimator="k3_unbiased")),
        "kl_unbiased_sequence": (
            "use_bias_correction_kl, sequence ratio", loss(b, "grpo_paper", kl__estimator="k3_unbiased", **sequence),
            "TRL weighs each token's KL by the sequence's ratio, we by the token's own",
            loss(b, "grpo", **sequence, extra=lambda logp, w: 0.04 * jnp.sum(w * jnp.exp(ratio(logp)) * k3(logp)))),
        "opsm": ("off_policy_mask_threshold 0.1, vLLM", masked(b)),
        "opsm_without_vllm": ("off_policy_mask_threshold 0.1, own engine", masked(b),
                              "TRL then measures from the old log-probs, we always from the sampler's",
                              masked(b | {"behaviour": b["old"]})),
        "entropy": ("entropy_coef 0.01", loss(b, "grpo", entropy_coef=0.01)),
        "holes": ("tool_mask, beta 0.04", loss(b, "grpo_paper", mask="tool")),
        "token_truncate": (f"vLLM token_truncate {CAP}, beta 0.04", loss(b, "grpo_paper", mismatch__correction="token_tis")),
        "token_truncate_low": (
            f"vLLM token_truncate 0.9 to {CAP}", loss(b, "grpo", mismatch__correction="token_tis", **mean),
            "TRL can lift small weights to a lower bound, we have none for truncation",
            loss(b, "grpo", weights=lifted, **mean)),
        "token_mask": (f"vLLM token_mask 0.8 to {CAP}",
                       loss(b, "grpo", mismatch__correction="token_mis", mismatch__low=0.8, **mean)),
        "sequence_truncate": (f"vLLM sequence_truncate {CAP}", loss(b, "grpo", mismatch__correction="sequence_tis", **mean)),
        "sequence_mask": (f"vLLM sequence_mask {CAP}", loss(b, "grpo", mismatch__correction="sequence_mis", **mean)),
        "mask_truncated_grpo": ("mask_truncated_completions", loss(b, "grpo", dropped=b["cut"], **mean)),
        "mask_truncated_dapo": ("the same, loss_type=dapo", loss(b, "grpo", dropped=b["cut"]),
                                "TRL takes cut answers out of the token count, we leave them in the denominator",
                                loss(b, "grpo", weights=shorter)),
        "log_ratio_25": ("a log-ratio of 25, A < 0", loss(b, "grpo", old="old_jump", **mean),
                         "above 20 our exponential goes on as its tangent, TRL's does not",
                         loss(b, "grpo", old="old_jump", extra=exact, **mean)),
        "rloo_on_policy": ("RLOOTrainer, old = current", loss(b, "rloo", old="logp"),
                           "ours is -A logp, TRL's -A times a ratio that is 1: gradients are equal, values are not",
                           loss(b, "rloo", old="logp") | {"value": clipped_sequences(b, "logp")["value"]}),
        "rloo_off_policy": ("RLOOTrainer, old behind", loss(b, "rloo"),
                            "TRL clips the ratio of the whole answer, a product over tokens; the paper and we have no ratio",
                            clipped_sequences(b, "old")),
        "adv_scale_group": ("scale_rewards=group", scores(b), "TRL adds 1e-4 to the std, we 1e-6", scaled(b, 1e-4, "group")),
        "adv_scale_batch": ("scale_rewards=batch", scores(b, std="batch"), "TRL adds 1e-4 to the std, we 1e-6",
                            scaled(b, 1e-4, "batch")),
        "adv_scale_none": ("scale_rewards=none", scores(b, std="none")),
        "adv_rloo": ("RLOO advantages", scores(b, mean="leave_one_out", std="none")),
        "adv_rloo_kl": ("RLOO advantages, beta 0.05", scores(b, kl=0.05, mean="leave_one_out", std="none")),
        "adv_rloo_normalized": ("RLOO normalize_advantages", scores(b, mean="leave_one_out", std="none"),
                                "TRL whitens over answers, we (whiten) over tokens only", by_answer(b)),
    }


def tunix_cases(b: dict) -> dict:
    """As trl_cases."""
    mean = dict(aggregation="sequence_mean")
    jump = np.abs(b["logp"] - b["old_jump"]) <= 20
    flat = lambda logp, w: jnp.sum(jnp.where(~jump, w * -b["advantages"][:, None] * jnp.exp(20.0), 0))  # noqa: E731
    whole = lambda **more: loss(b, "grpo", old="old_jump", **mean, **more)  # noqa: E731
    weights = np.where(b["mask"], aggregation_weights(b["mask"].sum(1), "sequence_mean")[:, None], 0.0)
    k1 = lambda logp, w: 0.04 * jnp.sum(w * (logp - b["ref"]))  # noqa: E731
    return {
        "grpo": ("grpo, low_var_kl 0.04", loss(b, "grpo_paper")),
        "grpo_mse_kl": ("grpo, mse_kl 0.04", loss(b, "grpo_paper", kl__estimator="k2")),
        "grpo_default_kl": ("grpo, kl (its default) 0.04", loss(b, "grpo", **mean),
                            "k1 as a loss: its expected gradient is 0; we refuse it", loss(b, "grpo", **mean, extra=k1)),
        "dapo": ("token-mean, epsilon_high 0.28", loss(b, "dapo")),
        "dual_clip": ("epsilon_c 1.5", loss(b, "grpo", dual_clip=1.5)),
        "gspo_token": ("gspo-token", loss(b, "gspo", ratio="sequence_token", clip_low=0.03, clip_high=0.04)),
        "dr_grpo": ("Dr.GRPO, sequence-mean-token-scale", loss(b, "dr_grpo"),
                    "Tunix divides by the padded width of the batch, we by max_new_tokens", loss(b, "dr_grpo", longest=T)),
        "sequence_sum": ("seq-mean-token-sum", loss(b, "grpo", aggregation="sequence_sum")),
        "sequence_sum_norm": ("sequence-mean-token-sum-norm", loss(b, "grpo", aggregation="sequence_sum")),
        "sampler_weights": (f"sampler_is_weights min(r, {CAP})", loss(b, "grpo", mismatch__correction="token_tis", **mean)),
        "log_ratio_25": ("a log-ratio of 25, A < 0", whole(),
                         "Tunix clamps log-ratios to +-20, where the gradient ends; ours goes on as a tangent",
                         whole(weights=weights * jump, extra=lambda logp, w: flat(logp, jnp.asarray(weights)))),
        "ppo": ("ppo, epsilon_c 1.5", loss(b, "ppo", advantages="token_adv", clip_high=0.28, dual_clip=1.5)),
        "value": ("ppo's value loss, clip 0.2", critic(b)),
        "gae": ("GAE, whitened", estimate(b, b["mask"])),
        "gae_holes": ("GAE through observations", estimate(b, b["mask"] & b["tool"])),
        "adv_group": ("grpo advantages", scores(b, "rewards_present")),
        "adv_rloo": ("rloo advantages", scores(b, "rewards_present", mean="leave_one_out", std="none")),
        "adv_dr_grpo": ("drgrpo advantages", scores(b, "rewards_present", std="none")),
    }


def distance(got, wanted) -> float:
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-300))


def compare(peer: str, cases: dict, theirs: dict, masks: dict) -> list[dict]:
    results = []
    for case, (name, ours, *rest) in cases.items():
        why, undone = rest if rest else (None, None)

        def away(found, case=case):
            of = {part: theirs[f"{case}/{part}"] for part in found}
            of = {part: x[masks[case]] if part in ("advantages", "returns") and x.ndim == 2 else x for part, x in of.items()}
            return {part: distance(found[part], of[part]) for part in found}

        as_is, after = away(ours), away(undone) if undone else None
        equal = max(as_is.values()) < BOUNDS[peer]
        explained = bool(after) and max(after.values()) < BOUNDS[peer]
        results.append({"peer": peer, "case": case, "name": name, "difference": as_is, "why": why, "undone": after,
                        "verdict": "equal" if equal else "explained" if explained else "NOT EXPLAINED"})
    return results


def versions(python: str, packages: tuple) -> dict:
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {packages}}}))"
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trl", default=sys.executable, help="interpreter with trl")
    parser.add_argument("--tunix", default=sys.executable, help="interpreter with google-tunix")
    args = parser.parse_args()
    at = commit()
    jax.config.update("jax_enable_x64", True)
    b = random_batch()
    masks = {"gae": b["mask"], "gae_holes": b["mask"] & b["tool"]}
    results, seen = [], {}
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "batch.npz", **b)
        for peer, python, packages in (("trl", args.trl, ("trl", "torch", "transformers")),
                                       ("tunix", args.tunix, ("google-tunix", "jax", "flax"))):
            script, out = Path(__file__).parent / "peer_losses.py", Path(folder) / f"{peer}.npz"
            subprocess.run([python, str(script), peer, str(Path(folder) / "batch.npz"), str(out)], check=True)
            cases = {"trl": trl_cases, "tunix": tunix_cases}[peer](b)
            results += compare(peer, cases, dict(np.load(out)), masks)
            seen[peer] = versions(python, packages)
    figures = lambda d: " / ".join(f"{x:.0e}" for x in d.values()) if d else ""  # noqa: E731
    table(["library", "case", "difference of value / gradient", "verdict", "undone", "why"],
          [[r["peer"], r["name"], figures(r["difference"]), r["verdict"], figures(r["undone"]), r["why"] or ""]
           for r in results])
    for peer, names in LACKING.items():
        print(f"{peer} also has what we do not offer: {names}")
    record("loss_parity", {"versions": seen, "bounds": BOUNDS, "cases": results, "lacking": LACKING}, at)
    return 0 if all(r["verdict"] != "NOT EXPLAINED" for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
