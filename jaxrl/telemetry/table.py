"""The live table of a terminal.

It keeps one row per step in the scroll-back; below it a panel shows progress and time left, where the last step's
seconds went, the course of the reward, and what is happening now.
"""

from __future__ import annotations

import time
from collections import deque

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from jaxrl.telemetry.console import (
    SPARKS,
    SilentConsole,
    completion_text,
    duration,
    evaluation_line,
    phase_seconds,
    sample_verdict,
    shortened,
    show,
)
from jaxrl.telemetry.names import COLUMNS

HEADER_EVERY = 20       # rows between two headers
PHASE_COLOURS = {"rollout": "cyan", "reward": "magenta", "score": "blue", "update": "green", "publish": "bright_blue",
                 "eval": "yellow", "checkpoint": "red", "export": "bright_red", "data": "bright_magenta"}
RANGES = {  # a value outside its range is shown in yellow
    "rollout/truncated_fraction": (0.0, 0.5), "rollout/zero_signal_fraction": (0.0, 0.8), "gap/mean": (0.0, 0.05),
    "policy/clip_fraction": (0.0, 0.3), "optim/grad_norm": (1e-12, 1e3), "policy/entropy": (0.02, float("inf")),
}


class TableConsole(SilentConsole):
    """The live table of a terminal: one row per step in the scroll-back, a panel with the progress below them.

    total_steps, title, stream: as SilentConsole."""

    def __init__(self, total_steps: int, title: str, stream):
        super().__init__(total_steps, title, stream)
        # Force: log.console=table asks for the table wherever the output goes.
        self._rich = Console(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._rows = 0
        self._columns: list = []
        self._curve: deque[float] = deque(maxlen=400)
        self._last: dict[str, float] = {}
        self._now, self._since = "starting", time.monotonic()
        self._live = Live(get_renderable=self._panel, console=self._rich, refresh_per_second=5)

    def phase(self, name: str) -> None:
        """Shows the phase of the run."""
        self._now, self._since = name, time.monotonic()
        self._start()

    def _start(self) -> None:
        if not self._live.is_started:
            self._live.start()
            self._rich.show_cursor(True)  # a killed process could not bring a hidden cursor back

    def step(self, step: int, scalars: dict[str, float]) -> None:
        """Adds a row with a step's metrics, if there are others than times and evaluations, and a line for an
        evaluation; updates the live display."""
        self.progress.advance(step)
        self._last = scalars
        curve = scalars.get("reward/mean", scalars.get("loss"))
        if curve is not None:
            self._curve.append(curve)
        self._start()
        if any(m.name in scalars for m in COLUMNS if not m.name.startswith(("time/", "eval/"))):
            self._row(step, scalars)
        if evaluation := evaluation_line(scalars):
            self._rich.print(Text.assemble((f"{step:>6}  ", "dim"), ("eval  ", "yellow"), (evaluation, "bold yellow")))

    def _fitting(self, scalars: dict[str, float]) -> list:
        """Returns the columns of existing metrics, without the least important ones that do not fit the terminal."""
        columns = [m for m in COLUMNS if m.name in scalars and not m.name.startswith("eval/")]
        while columns and 7 + sum(_width(m) + 2 for m in columns) > self._rich.width:
            worst = max(m.rank for m in columns)
            columns.remove([m for m in columns if m.rank == worst][-1])
        return columns

    def _row(self, step: int, scalars: dict[str, float]) -> None:
        columns = self._fitting(scalars)
        if columns != self._columns or self._rows % HEADER_EVERY == 0:
            self._columns, self._rows = columns, 0
            self._rich.print(self._header())
        self._rows += 1
        line = Text(f"{step:>6}", style="dim")
        for m in columns:
            value = scalars[m.name]
            low, high = RANGES.get(m.name, (float("-inf"), float("inf")))
            style = "bold" if m.name in ("reward/mean", "loss") else "default"
            line.append(f"  {show(m, value):>{_width(m)}}", style=style if low <= value <= high else "yellow")
        self._rich.print(line, no_wrap=True, overflow="ellipsis", crop=True)

    def _header(self) -> Text:
        heads = "".join(f"  {m.header:>{_width(m)}}" for m in self._columns)
        return Text(f"{'step':>6}{heads}", style="bold underline")

    def _panel(self):
        p, width = self.progress, max(30, self._rich.width - 4)
        done = min(1.0, p.step / p.total) if p.total else 0.0
        left = f"{duration(p.left)} left" if p.left is not None else "time left: after two steps"
        tail = f"  {p.step}/{p.total}  {100 * done:.0f}%  {duration(p.elapsed)} gone  {left}"
        bar = max(10, width - len(tail))
        full = round(bar * done)
        lines = [Text.assemble(("━" * full, "green"), ("━" * (bar - full), "bright_black"), tail)]
        lines += self._phase_lines(width)
        spent = time.monotonic() - self._since
        now = Text.assemble(("now ", "dim"), (self._now or "between phases", PHASE_COLOURS.get(self._now, "default")),
                            (f" {spent:.0f}s", "dim"))
        if len(self._curve) > 1:
            name = "reward" if "reward/mean" in self._last else "loss"
            room = max(8, width - 48)
            now.append(f"   {name} ", "dim")
            now.append(sparkline(list(self._curve), room), "green")
            now.append(f" {self._curve[0]:.3f} → {self._curve[-1]:.3f}", "dim")
        lines.append(now)
        panel = Panel(Group(*lines), title=self.title, title_align="left", border_style="bright_black", box=box.ROUNDED)
        # The names of the columns stay in sight when the printed header has scrolled away.
        return Group(self._header(), panel) if self._columns else panel

    def _phase_lines(self, width: int) -> list:
        """Returns a bar of the last step's seconds by phase, and its legend."""
        phases = {k: v for k, v in phase_seconds(self._last).items() if v >= 0.005}
        total = sum(phases.values())
        if not total:
            return []
        bar, legend = Text(), Text()
        for name, seconds in phases.items():
            colour = PHASE_COLOURS.get(name, "bright_black")
            bar.append("█" * round(width * seconds / total), colour)
            legend.append("■ ", colour)
            legend.append(f"{name} {seconds:.2f}s  ")
        speed = self._last.get("time/tokens_per_second")
        if speed is not None:
            legend.append(f"{speed:,.0f} tokens/s", "bold")
        bar.truncate(width)
        return [bar, legend]

    def print(self, text: str) -> None:
        """Prints a text above the live display."""
        self._rich.print(Text(text))

    def sample(self, step: int, name: str, record: dict) -> None:
        """Prints a prompt and its completion, shortened, in a frame. name: of the set. record: of
        rl.trajectories.records."""
        body = Text.assemble((shortened(str(record.get("prompt", ""))).strip(), "dim"), "\n",
                             shortened(completion_text(record)).strip())
        accurate = record.get("accurate")
        border = "bright_black" if accurate is None else "green" if accurate else "red"
        self._rich.print(Panel(body, title=Text(f"{name}, step {step}{sample_verdict(record)}"), title_align="left",
                               border_style=border))

    def close(self) -> None:
        """Stops the live display; the table stays."""
        self._now = "finished"
        if self._live.is_started:
            self._live.stop()


def _width(metric) -> int:
    return max(len(metric.header), {"percent": 6, "fixed": 7, "count": 7, "small": 6, "seconds": 6}[metric.format])


def sparkline(values: list[float], width: int) -> str:
    """Returns the course of a value in at most `width` characters, each the mean of its share of the points; values
    that are not finite are left out, "" without any."""
    values = [v for v in values if v == v and abs(v) != float("inf")]
    if not values:
        return ""
    n = min(width, len(values))
    edges = [len(values) * i // n for i in range(n + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(SPARKS[min(7, int(8 * (m - low) / span))] for m in means)
