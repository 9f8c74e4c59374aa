"""Compares a plan's predictions of a training run with the run's measured times and memory."""

from __future__ import annotations

import logging
import statistics

import jax

from jaxrl.errors import ConfigError

log = logging.getLogger("jaxrl")
PHASES = ("rollout", "score", "update", "publish")
WARM_UP = 2  # lines of metrics that hold compilations


def comparison(spec, job, step: int) -> PlanComparison:
    """Returns the PlanComparison of a run that starts after `step` completed steps."""
    return PlanComparison(spec, job, step)


class PlanComparison:
    """Puts the median seconds of each phase and the highest device memory next to `plan.predict`.

    Predictions are upper bounds at maximum lengths, with counted temporaries; nothing is compiled for
    them. On CPUs only memory is predicted, and nothing with adapters, with mesh.roles, on devices missing in the table
    of chips, or if the prediction fails.

    Args:
      config: the run's Spec. job: its Job. step: completed steps at the start.

    Attributes:
      predicted: what `plan.predict` returned, with a critic's update added to that of the policy; {} if nothing is.
    """

    def __init__(self, config, job, step: int):
        self.predicted, self._step = {}, step
        self._device = job.mesh.devices.flat[0]
        try:
            self.predicted = _predict(config, job)
        except ConfigError as e:  # a job that runs and cannot be planned
            log.debug("no prediction: %s", e)
        except Exception as e:  # a prediction is only advice
            log.warning("no prediction beside this run: %r", e)

    def start(self) -> str:
        """Returns the line before the first step; "" if nothing is predicted."""
        if not self.predicted:
            return ""
        return (f"planned   {_said(self.predicted)}; upper bound at maximum lengths "
                "(docs/guides/plan.md)")

    def measured(self, lines) -> dict[str, float]:
        """Returns {"peak_bytes" if the device reports it, "<phase>_seconds", "step_seconds" their sum}.

        Seconds are medians over the lines after the first WARM_UP, per step; a phase that no such line has is left out,
        without any of them "step_seconds", too. The peak is that of the mesh's first
        device, which only its own process has.

        lines: (step, seconds by phase since the last line) of each line of metrics.
        """
        seconds, last = {}, self._step
        for number, (step, phases) in enumerate(lines, 1):
            if step > last and number > WARM_UP:
                for name in PHASES:
                    if name in phases:
                        seconds.setdefault(name, []).append(phases[name] / (step - last))
            last = step
        out = {f"{name}_seconds": statistics.median(values) for name, values in seconds.items()}
        if out:
            out["step_seconds"] = sum(out.values())
        stats = (self._device.memory_stats() or {}) if self._device.process_index == jax.process_index() else {}
        if stats.get("peak_bytes_in_use"):
            out["peak_bytes"] = float(stats["peak_bytes_in_use"])
        return out

    def end(self, lines) -> str:
        """Returns the two lines after the last step, predicted and measured; "" if they have nothing in common.

        lines: (step, seconds by phase since the last line) of each line of metrics.
        """
        found = self.measured(lines)
        if not set(self.predicted) & set(found):
            return ""
        return f"planned   {_said(self.predicted)}\nmeasured  {_said(found)}; medians of {len(lines) - WARM_UP}"


def _predict(config, job) -> dict[str, float]:
    """Returns plan.predict with the critic's update added to `update`, as on the run's clock."""
    from jaxrl.planning import plan

    found = plan.predict(config, job.mesh, job.model)
    if "critic_seconds" in found:
        found["update_seconds"] += found.pop("critic_seconds")
    if job.mesh.devices.flat[0].platform == "cpu":  # a roofline says little of its cores, which devices may share
        found = {name: x for name, x in found.items() if name == "peak_bytes"}
    return found


def _said(found: dict[str, float]) -> str:
    parts = [f"{name} {found[f'{name}_seconds']:.3g}" for name in PHASES if f"{name}_seconds" in found]
    said = [f"step {found['step_seconds']:.3g} s ({', '.join(parts)})"] if "step_seconds" in found else []
    said += [f"{found['peak_bytes'] / 2**20:,.0f} MiB on a device"] if "peak_bytes" in found else []
    return ", ".join(said)
