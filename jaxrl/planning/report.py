"""Formats a plan as text."""

from __future__ import annotations

ORDER = ("parameters", "optimizer", "gradients", "critic", "reference", "publish", "kv_cache", "vllm", "batch",
         "activations", "other")
MEANING = {"vllm": "vLLM's part", "publish": "rollout copy", "kv_cache": "KV cache", "activations": "temporaries"}


def table(plan: dict) -> str:
    """Returns the text of a plan, about forty lines, without the simulation of running ahead. plan: of plan.make."""
    d = plan["per_device"]
    active = f" ({plan['active_parameters'] / 1e9:.2f} B for one token)" if "active_parameters" in plan else ""
    lines = [f"plan for {plan['target']}: mesh " + " x ".join(f"{a}={n}" for a, n in plan["mesh"].items())
             + f", {plan['parameters'] / 1e9:.2f} B parameters{active}", plan["basis"], "", "memory of one device"]
    lines += [f"  {MEANING.get(name, name):14s}{gib(d[name]):>13s}" for name in ORDER if d.get(name)]
    bound = plan.get("error", {}).get("peak_bytes")
    lines.append(f"  {'peak':14s}{gib(d['peak_bytes']):>13s}  in `{d['peak_in']}`, {gib(d['usable_bytes'])} usable "
                 f"of {gib(d['memory_bytes'])}: {'fits' if plan['fits'] else 'DOES NOT FIT'}"
                 + (f" (between {gib(bound[0])} and {gib(bound[1])})" if bound else ""))
    phases = d["by_phase"]
    if host := d.get("in_host"):
        lines.append(f"  {'in host memory':14s}{gib(sum(host.values())):>13s}  ("
                     + ", ".join(f"{name} {gib(n)}" for name, n in host.items())
                     + "); what it takes to send it is not in the seconds below")
    lines.append(f"  {'by phase':14s}  " + ", ".join(f"{name} {gib(size)}" for name, size in phases.items()))
    for name, check in plan.get("cross_check", {}).items():
        lines.append(f"  what is counted was not checked: {check}" if name == "missing" else
                     f"  temporaries of `{name}`: {gib(check['counted'])} counted, {gib(check['tpu'])} "
                     "by the TPU's compiler for the same program")
    if found := plan.get("recurrences"):
        rule = f"{found['rule_flops_per_token'] / 1e6:.0f} MFLOP a token forward ({found['rule_share']:.1%})"
        lines.append(f"  {'recurrences':14s}  {found['layers']} layers, {rule}, workspace of the update "
                     f"{gib(found['workspace_bytes'])}")
        if "state_bytes" in found:
            lines.append(f"  {'states':14s}  {size(found['state_bytes']).strip()} a slot, as much as "
                         f"{found['equals_tokens']:,d} tokens of keys and values; all slots "
                         f"{gib(found['slots_bytes'])}, stash {gib(found['stash_bytes'])} (in the KV cache above)")
    lines += ["", "collectives of one run of each program (arrays, bytes each device sends)"]
    for program, found in plan["collectives"].items():
        for one in found[:4]:
            lines.append(f"  {program:16s}{one['kind']:20s}over {one['group']:4d} devices on {one['hosts']:3d} hosts  "
                         f"{one['count']:7,d} x  {size(one['sent'])}")
    if not any(plan["collectives"].values()):
        lines.append("  none")
    columns = ["seconds", "ideal", "compute", "memory", "network"]
    if any(p["launches"] for p in plan["phases"].values()):
        columns.append("launches")
    lines += ["", f"{'phase':10s}" + "".join(f"{name:>10s}" for name in columns)
              + "  bound   (ideal: at the chip's peak; seconds: as published runs attain)"]
    for name, p in plan["phases"].items():
        lines.append(f"{name:10s}" + "".join(f"{p[k]:10.3g}" for k in columns) + f"  {p['bound']}")
    lines += [f"{name:10s}not planned: {why}" for name, why in plan.get("not_planned", {}).items()]
    bound = plan.get("error", {}).get("step_seconds")
    lines += ["", f"step {plan['step_seconds']:.3g} s"
              + (f" (between {bound[0]:.3g} and {bound[1]:.3g})" if bound else "")
              + f", {plan['tokens_per_second_per_chip']:,.0f} tokens/s/chip, update {plan['mfu']:.1%} MFU, "
              f"communication {plan['communication_share']:.1%}"]
    if run := plan.get("run"):
        lines.append(f"{run['steps']:,d} steps take {_hours(run['hours'])}, without evaluations, checkpoints "
                     "and compilation")
    if "largest" in plan:
        shown = ", ".join(f"{name} {n:,d}" for name, n in plan["largest"].items() if n is not None)
        lines.append(f"largest that fit, one at a time: {shown}")
    lines += [f"note: {text}" for text in plan.get("advice", []) if plan["fits"]]
    return "\n".join(lines)


def _hours(hours: float) -> str:
    return f"{hours:,.3g} hours" if hours >= 1 else f"{60 * hours:.3g} minutes"


def gib(n: float) -> str:
    """Returns a number of bytes as text in GiB."""
    return f"{n / 2**30:.2f} GiB"


def size(n: float) -> str:
    """Returns a number of bytes as text in the largest of GiB, MiB, KiB and B that fits, the number 8 columns wide."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= step:
            return f"{n / step:8.2f} {unit}"
    return f"{n:8.0f} B"
