"""Counts the arithmetic of a step, and the achieved share of the devices' peak.

Counted is what the mathematics needs: matrix products of every token that is not padding, attention of each token to
what it may see, recurrences, the tower for every image once per copy of its prompt, the head where a token is sampled
or scored; a multiply and an add are two operations.
Not counted: recomputation, padding, masked pairs, elementwise work, the gradient that frozen matrices do without, and
features of images that are kept (train.image_features).

Legend: N sequences.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from jaxrl.models.recurrent import rule_flops
from jaxrl.models.vision.rows import multiplied_by_patch
from jaxrl.sharding.chips import CHIPS
from jaxrl.sharding.targets import name_of
from jaxrl.telemetry.timing import training_seconds

PHASES = ("rollout", "score", "update")


class Operations:
    """Floating-point operations of one model, summed over all devices; see the module for what is counted.

    Args:
      model: jaxrl.models.Model.
      trainable: flat names of the trained parameters.
      keeps_features: no pass but a rollout computes the tower, which does not train.

    Attributes:
      head: operations of the output matrix for one token.
    """

    def __init__(self, model, trainable, keeps_features: bool = False):
        cfg = model.config
        self._windows = Counter(cfg.windows)
        self._pair = cfg.pair_flops
        self.head = 2 * cfg.hidden_size * cfg.vocab_size
        self._rule = rule_flops(cfg)
        self._token = model.flops_per_token(1) - self.head - self._pair * len(cfg.windows) - self._rule
        linear = {"/".join(e.path): float(e.multiplied)
                  for e in model.entries if e.multiplied and e.path[0] not in ("head", "vision")}
        self._trains = sum(size for name, size in linear.items() if name in trainable) / sum(linear.values())
        tower = {} if cfg.vision is None else {"/".join(e.path): multiplied_by_patch(cfg.vision, e)
                                               for e in model.entries if e.path[0] == "vision"}
        self._patch, self._vision = model.flops_per_patch, cfg.vision
        self._tower_learns = any(name in trainable for name in tower)
        self._tower_trains = sum(n for name, n in tower.items() if name in trainable) / (sum(tower.values()) or 1)
        self._kept = keeps_features and not self._tower_learns
        self._head_trains = ("embed/embedding" if cfg.tied else "head/kernel") in trainable

    def layers(self, first_N, end_N) -> tuple[float, float]:
        """Returns (matrix products, attention and recurrences) of all layers' forward pass, in floating-point
        operations summed over N sequences.

        first_N, end_N: [N] positions from 0; counted are the tokens at first ... end - 1.
        """
        first_N, end_N = np.asarray(first_N, float), np.asarray(end_N, float)
        seen = 0.0  # pairs of tokens: position p (from 1) sees min(p, window) of them, all where window is 0
        for window, layers in self._windows.items():
            for sign, count_N in ((1, end_N), (-1, first_N)):
                inside = np.minimum(count_N, window) if window else count_N
                seen += sign * layers * (inside * (inside + 1) / 2 + (count_N - inside) * window).sum()
        tokens = (end_N - first_N).sum()
        return float(self._token * tokens), float(self._pair * seen + self._rule * tokens)

    def generation(self, traj) -> float:
        """Returns the operations of a rollout (Trajectories): each shared prompt once, then every token after the
        prompts except the last of each sequence; the head once for each loss token."""
        first = np.unique(traj.prefix, return_index=True)[1]
        prompts = self.layers(np.zeros(len(first)), traj.prompt_lengths[first])
        sampled = self.layers(traj.prompt_lengths, traj.lengths - 1)
        tower = 0.0 if traj.pictures is None else sum(self.tower(traj, first))
        return sum(prompts) + sum(sampled) + tower + self.head * float(traj.loss_mask.sum())

    def tower(self, traj, rows) -> tuple[float, float]:
        """Returns (matrix products, attention), in floating-point operations, of the forward pass of a tower over the
        images of a batch: those in the prompts of the sequences `rows`, and those after the prompts of all.

        traj: Trajectories with pictures. rows: int indices of sequences."""
        assert self._vision is not None
        pictures = traj.pictures
        behind = pictures.firsts >= traj.prompt_lengths[pictures.sequences]
        grids = pictures.grids[behind | np.isin(pictures.sequences, rows)]
        kinds, times = np.unique(grids, axis=0, return_counts=True)
        pairs = sum(n * self._vision.pair_flops(tuple(grid))
                    for grid, n in zip(kinds.tolist(), times.tolist(), strict=True))
        return self._patch * float(grids.prod(axis=1).sum()), float(pairs)

    def _forward(self, traj, shared: bool) -> tuple[float, float, float, float]:
        """Returns (matrix products, attention) of the layers, then those of the tower."""
        rows = np.unique(traj.prefix, return_index=True)[1] if shared else np.arange(traj.num_sequences)
        prompts = self.layers(np.zeros(len(rows)), traj.prompt_lengths[rows])
        completions = self.layers(traj.prompt_lengths, traj.lengths)
        tower = (0.0, 0.0) if traj.pictures is None else self.tower(traj, rows)
        return prompts[0] + completions[0], prompts[1] + completions[1], *tower

    def scoring(self, traj, shared: bool, head: bool = True) -> float:
        """Returns the operations of one forward pass over a batch, with the head for each loss token.

        Args:
          traj: Trajectories.
          shared: count each shared prompt once.
          head: log-probs are computed (else values); then without the tower where its features are kept.
        """
        matrices, attention, of_patches, pairs = self._forward(traj, shared)
        if self._kept and head:
            of_patches = pairs = 0.0
        scored = self.head * float(traj.loss_mask.sum())
        return matrices + attention + (of_patches + pairs) + head * scored

    def update(self, traj, shared: bool, head: bool = True) -> float:
        """Returns the operations of one forward and backward pass over a batch.

        The backward pass of a matrix is its input's gradient and, if it trains, its own. The head's are for the
        log-probs of the loss tokens. A tower of which nothing trains has no backward pass.

        Args:
          traj: Trajectories.
          shared: count each shared prompt once.
          head: the policy's update; False = a critic's, which trains as a whole and has no head.
        """
        matrices, attention, of_patches, pairs = self._forward(traj, shared)
        if not head:
            return 3 * (matrices + attention + of_patches + pairs)
        scored = self.head * float(traj.loss_mask.sum())
        layers = (2 + self._trains) * matrices + 3 * attention + (2 + self._head_trains) * scored
        if self._kept:
            return layers
        if not self._tower_learns:
            return layers + of_patches + pairs
        return layers + (2 + self._tower_trains) * of_patches + 3 * pairs


class Speed:
    """Metrics of a step: `flops/<phase>` of the required operations, and with the seconds of the
    phases `perf/...` (see names.py).

    job: run.setup.Job. trainable: flat names of the policy's trained parameters. Attribute operations: those of its
    model, by which recipes make `flops/<phase>`."""

    def __init__(self, job, trainable):
        self.operations = Operations(job.model, trainable, job.config.train.image_features != "fresh")
        self._devices = {phase: job.mesh_of("sampler" if phase == "rollout" else "policy").size for phase in PHASES}
        name = name_of(job.mesh.devices.flat[0])
        chip = CHIPS.get(name or "")  # a CPU's figure in the table is that of one machine, so no share is taken of it
        self._peak = chip.flops if chip is not None and chip.kind != "cpu" else 0.0

    def rates(self, metrics: dict, phases: dict[str, float]) -> dict[str, float]:
        """Returns the metrics perf/* of a step: TFLOP/s and tokens/s per device, mfu as a share of the chip's peak.

        perf/tflops, perf/mfu and perf/tokens_per_second divide by the seconds of the step without evaluation,
        checkpoint and export, perf/<phase>_* by those of the phase. A metric is absent without its operations or
        seconds, mfu also where the chip's peak is unknown.

        Args:
          metrics: flops/<phase> (FLOPs over all devices), rollout/tokens and rollout/prompt_tokens.
          phases: seconds by phase, and `step`, their sum."""
        needed = {phase: metrics.get(f"flops/{phase}", 0.0) / self._devices[phase] for phase in PHASES}
        speeds = {f"perf/{phase}_": flops / phases[phase]
                  for phase, flops in needed.items() if flops and phases.get(phase)}
        out, seconds = {}, training_seconds(phases)
        if seconds > 0 and any(needed.values()):
            speeds["perf/"] = sum(needed.values()) / seconds
            tokens = metrics.get("rollout/tokens", 0.0) + metrics.get("rollout/prompt_tokens", 0.0)
            out["perf/tokens_per_second"] = tokens / seconds / self._devices["update"]
            if metrics.get("flops/update") and phases.get("update"):
                out["perf/update_tokens_per_second"] = tokens / phases["update"] / self._devices["update"]
        for prefix, speed in speeds.items():
            out |= {f"{prefix}tflops": speed / 1e12} | ({f"{prefix}mfu": speed / self._peak} if self._peak else {})
        return out
