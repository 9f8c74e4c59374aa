"""The losses of run.recipe=preference beside TRL's: loss and gradient by the answers' sums of log-probs, in float64.

    python evidence/trl_parity.py        # pip install trl==1.16.0 (torch); a minute

Writes evidence/results/trl_parity.json. TRL's own trainers compute (`_compute_loss` of DPO and KTO, `odds_ratio_loss` of ORPO,
`cpo_loss` of CPO), with a model that answers with given log-probs; of its trainers only the model and what carries metrics are stood in
for. Differences in what is meant, by name, are in DIFFERENCES and docs/guides/preferences.md.
"""

from __future__ import annotations

import collections
import os
from types import SimpleNamespace

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
import numpy as np
import torch
from trl import DPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from jaxrl.algorithms.preference import Table, preference_loss
from jaxrl.config.schema import SCHEMA

PAIRS, PROMPT, LONGEST = 6, 3, 12
DIFFERENCES = {
    "dpo": "TRL 1.16 has no label_smoothing in `sigmoid` (conservative DPO)",
    "orpo": "TRL computes odds in float32 (the cast is taken out here) and its NLL has the prompt's tokens; ours is of the chosen answers",
    "kto": "TRL's z0 is of a microbatch (over devices), ours of the step",
    "aot, aot_unpaired": "TRL sorts within a microbatch, ours over the step",
    "simpo, cpo": "TRL's rewards are beta times what the loss compares; so are ours",
    "bco": "`bco_pair`, whose reward shift is 0; TRL 1.16 has no BCO with a running shift",
    "nll": "TRL's rewards are relative to a reference, which ours does not load",
    "reward/accuracy": "TRL counts ties as wrong, we as half",
}
# ours -> (TRL's loss_type, what TRL needs beside it, our options)
DPO = {"dpo": ("sigmoid", {}), "hinge": ("hinge", {}), "ipo": ("ipo", {}), "dpo_norm": ("sigmoid_norm", {}),
       "exo": ("exo_pair", {"label_smoothing": 0.1}), "nca": ("nca_pair", {}), "robust": ("robust", {"label_smoothing": 0.2}),
       "bco": ("bco_pair", {}), "sppo": ("sppo_hard", {}), "aot": ("aot", {"label_smoothing": 0.1}),
       "aot_unpaired": ("aot_unpaired", {"label_smoothing": 0.1}), "apo_zero": ("apo_zero", {}), "apo_down": ("apo_down", {}),
       "discopop": ("discopop", {"discopop_tau": 0.3}), "nll": ("sft", {})}


class Accelerator:
    """Of one process: what is gathered is what there is."""

    device = torch.device("cpu")

    @staticmethod
    def gather(x):
        return x

    gather_for_metrics = gather


class Model(torch.nn.Module):
    """Answers with given log-probs [N, T - 1], 0 where nothing is asked for."""

    is_gradient_checkpointing = False

    def __init__(self, logps):
        super().__init__()
        self.logps = logps

    def forward(self, input_ids, labels, **ignored):
        mask = labels[:, 1:] != -100
        zero = torch.zeros_like(self.logps)
        return SimpleNamespace(log_probs=torch.where(mask, self.logps, zero), entropy=zero, mean_logits=zero, is_top1=mask)


def batch(seed=0):
    """(log-probs of the policy's tokens [N, T - 1], the reference's, mask of completions [N, T]), the chosen half first."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((2 * PAIRS, PROMPT + LONGEST), int)
    for row in mask:
        row[PROMPT:PROMPT + rng.integers(3, LONGEST + 1)] = 1
    policy, reference = (-rng.uniform(0.1, 2.0, (2 * PAIRS, PROMPT + LONGEST - 1)) for _ in range(2))
    return policy, reference, mask


def trainer(kind, policy, reference, **attributes):
    out = object.__new__(kind)
    vars(out).update(accelerator=Accelerator(), model=Model(logps=policy), ref_model=Model(logps=reference), aux_loss_enabled=False,
                     precompute_ref_logps=False, args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None,
                                                                      discopop_tau=attributes.get("discopop_tau", 0.05)),
                     _metrics=collections.defaultdict(lambda: collections.defaultdict(list)), _total_train_tokens=0, _tp_size=1, **attributes)
    return out


def of_dpo(loss_types, weights, policy, reference, mask, beta, **more):
    t = trainer(DPOTrainer, policy, reference, ld_alpha=None, f_divergence_type="reverse_kl", use_weighting=False, beta=beta,
                loss_types=loss_types, loss_weights=weights, **{"label_smoothing": 0.0, **more})
    inputs = {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    return t._compute_loss(t.model, inputs, False), t._metrics["train"]


def of_kto(kind, policy, reference, mask, beta, mismatched, **more):
    """mismatched: (policy's, reference's) sums of prompts with answers of other prompts."""
    t = trainer(KTOTrainer, policy, reference, calculate_KL=kind == "kto", loss_type=kind, beta=beta, **more)
    sums = iter(torch.tensor(x) for x in mismatched)
    t._compute_kl_logps = lambda model, batch: next(sums)
    labels = torch.tensor([True] * PAIRS + [False] * PAIRS)
    inputs = {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask, "label": labels}
    return t._compute_loss(t.model, inputs, False), t._metrics["train"]


def ours(loss, policy, reference, mask, z0=0.0, **changes):
    options = {name: option.default for name, option in SCHEMA["preference"].items()} | {"loss": loss} | changes
    first = np.arange(PAIRS)
    which = Table(first, first + PAIRS, np.arange(2 * PAIRS) < PAIRS)
    sums = lambda x: (x * mask[:, 1:]).sum(1)  # noqa: E731
    return preference_loss(sums(policy), sums(reference), mask.sum(1), which, SimpleNamespace(**options), z0)


def row(name, theirs, logps, mask, found, metrics=None):
    """Differences of the loss and of the gradient by single log-probs, which our derivative by their sum is."""
    theirs.backward()
    gradient = np.where(mask[:, 1:] > 0, found[1][:, None], 0.0)
    out = {"loss": name, "theirs": theirs.item(), "loss_difference": abs(theirs.item() - found[0]),
           "gradient_difference": float(np.abs(logps.grad.numpy() - gradient).max())}
    for key, name in (("rewards/chosen", "reward/chosen"), ("rewards/rejected", "reward/rejected"), ("rewards/margins", "reward/margin")):
        if metrics and key in metrics:
            assert abs(metrics[key][0] - found[2][name]) < 1e-10, (name, key)
    return out


def compared(beta=0.3) -> list[dict]:
    """A row for each loss of ours."""
    policy, reference, mask = batch()
    torch_mask, rows = torch.tensor(mask), []

    def leaf():
        return torch.tensor(policy, requires_grad=True)

    for name, (theirs, more) in DPO.items():
        logps = leaf()
        loss, metrics = of_dpo([theirs], [1.0], logps, torch.tensor(reference), torch_mask, beta, **more)
        found = ours((name,), policy, reference, mask, beta=beta, **more)
        rows.append(row(name, loss, logps, mask, found, metrics if name != "nll" else None))
    logps = leaf()
    loss, metrics = of_dpo(["sigmoid", "ipo", "sft"], [1.0, 0.5, 0.2], logps, torch.tensor(reference), torch_mask, beta)
    weights = {"loss_weights": (1.0, 0.5), "rpo_alpha": 0.2}
    rows.append(row("dpo + ipo, rpo_alpha", loss, logps, mask, ours(("dpo", "ipo"), policy, reference, mask, beta=beta, **weights), metrics))

    rng = np.random.default_rng(1)
    other = sorted((rng.normal(size=2 * PAIRS) for _ in range(2)), key=np.mean)
    for sign, pair in (("", other[::-1]), (" z0 < 0", other)):
        z0, weight, logps = max(0.0, float((pair[0] - pair[1]).mean())), {"desirable_weight": 1.5, "undesirable_weight": 0.7}, leaf()
        assert (z0 > 0) == (not sign)
        loss, metrics = of_kto("kto", logps, torch.tensor(reference), torch_mask, beta, pair, **weight)
        rows.append(row(f"kto{sign}", loss, logps, mask, ours(("kto",), policy, reference, mask, z0=z0, beta=beta, **weight), metrics))
    logps = leaf()
    loss, metrics = of_kto("apo_zero_unpaired", logps, torch.tensor(reference), torch_mask, beta, other, desirable_weight=1.0,
                           undesirable_weight=1.0)
    rows.append(row("apo_zero_unpaired", loss, logps, mask, ours(("apo_zero_unpaired",), policy, reference, mask, beta=beta), metrics))
    return rows + without_reference(policy, reference, mask, leaf, beta)


def without_reference(policy, reference, mask, leaf, beta) -> list[dict]:
    """ORPO, SimPO, CPO: functions of the answers' means or sums."""
    asked, rows = torch.tensor(mask[:, 1:]), []
    sums = lambda logps: (logps * asked).sum(1)  # noqa: E731
    means = lambda logps: sums(logps) / asked.sum(1)  # noqa: E731
    cast, torch.Tensor.float = torch.Tensor.float, lambda x: x
    try:
        logps = leaf()
        odds = object.__new__(ORPOTrainer)
        vars(odds).update(accelerator=Accelerator(), beta=beta)
        gain = odds.odds_ratio_loss(*means(logps).chunk(2))[0]
        nll = -(logps * asked)[:PAIRS].sum() / asked[:PAIRS].sum()
        rows.append(row("orpo", nll - gain.mean(), logps, mask, ours(("orpo",), policy, reference, mask, beta=beta)))
    finally:
        torch.Tensor.float = cast
    for name, kind, per, more in (("simpo", "simpo", means, {"label_smoothing": 0.1, "simpo_gamma": 0.8}), ("cpo", "sigmoid", sums, {})):
        logps = leaf()
        t = object.__new__(CPOTrainer)
        vars(t).update(accelerator=Accelerator(), beta=beta, alpha=0.0, loss_type=kind, **{"label_smoothing": 0.0, **more})
        loss, *rewards = t.cpo_loss(*per(logps).chunk(2))
        found = ours((name,), policy, reference, mask, beta=beta, **more)
        metrics = {f"rewards/{side}": [float(x.mean())] for side, x in zip(("chosen", "rejected"), rewards, strict=True)}
        rows.append(row(name, loss.mean(), logps, mask, found, metrics))
    return rows


if __name__ == "__main__":
    import trl
    from common import record, table

    found = compared()
    table(["loss", "theirs", "|difference|", "of the gradient"],
          [[r["loss"], f"{r['theirs']:.6f}", f"{r['loss_difference']:.1e}", f"{r['gradient_difference']:.1e}"] for r in found])
    record("trl_parity", {"trl": trl.__version__, "torch": torch.__version__, "pairs": PAIRS, "rows": found, "differences": DIFFERENCES})
