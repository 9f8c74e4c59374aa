"""What a person sees: a live table on a terminal, one plain line per step elsewhere, and the log's messages.

The table keeps one row per step in the scroll-back; below it a panel shows progress and time left, where the last
step's seconds went, the course of the reward, and what is happening now.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from jaxrl.telemetry.names import COLUMNS, duration, show
from jaxrl.telemetry.still import Still

HEADER_EVERY = 20       # rows between two headers
SAMPLE_CHARACTERS = 700  # shown of a prompt and of an answer
PHASE_COLOURS = {"rollout": "cyan", "reward": "magenta", "score": "blue", "update": "green", "publish": "bright_blue",
                 "eval": "yellow", "checkpoint": "red", "export": "bright_red", "data": "bright_magenta"}
SPARKS = "▁▂▃▄▅▆▇█"
RANGES = {  # a value outside its range is shown in yellow
    "rollout/truncated_fraction": (0.0, 0.5), "rollout/zero_signal_fraction": (0.0, 0.8), "gap/mean": (0.0, 0.05),
    "policy/clip_fraction": (0.0, 0.3), "optim/grad_norm": (1e-12, 1e3), "policy/entropy": (0.02, float("inf")),
}


def make_console(mode: str, total_steps: int, title: str, stream=None):
    """Console for `log.console`: auto is the table on a terminal that can show it and plain lines elsewhere (notebooks included).

    What the stream's encoding lacks is shown as a question mark there, instead of ending the run.
    """
    stream = stream or sys.stdout
    if mode == "auto":
        mode = "table" if stream.isatty() and os.environ.get("TERM") != "dumb" and encodes(stream, SPARKS) else "plain"
    if not encodes(stream, SPARKS) and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    return {"table": TableConsole, "plain": PlainConsole, "off": SilentConsole}[mode](total_steps, title, stream)


def encodes(stream, text: str) -> bool:
    """Whether a stream can show a text: it cannot where a locale has another encoding than UTF-8."""
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


class Progress:
    """Counts this process's steps and guesses the time left from all but the first, which compiles."""

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic):
        self.total, self._clock = total_steps, clock
        self.begin = clock()
        self.step = 0
        self._first: tuple[int, float] | None = None

    def advance(self, step: int) -> None:
        self.step = step
        if self._first is None and step > 0:
            self._first = (step, self._clock())

    @property
    def elapsed(self) -> float:
        return self._clock() - self.begin

    @property
    def left(self) -> float | None:
        """Seconds, or None before the second step."""
        if self._first is None or self.step <= self._first[0]:
            return None
        pace = (self._clock() - self._first[1]) / (self.step - self._first[0])
        return max(0.0, pace * (self.total - self.step))


def printable(text: str) -> str:
    """Text of a model without control characters: an answer must not be able to drive the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def shortened(text: str, limit: int = SAMPLE_CHARACTERS) -> str:
    text, half = printable(text), limit // 2
    return text if len(text) <= limit else f"{text[:half]} [... {len(text) - limit} characters ...] {text[-half:]}"


def evaluation_line(scalars: dict[str, float]) -> str:
    """'accuracy 53.1% (test 50.0%, hard 61.0%)' with pass@k where there are several samples; '' without evaluation."""
    if "eval/accuracy" not in scalars:
        return ""
    parts = {k[5:]: v for k, v in scalars.items() if k.startswith("eval/")}
    line = f"accuracy {100 * parts['accuracy']:.1f}%"
    sets = {k.split("/")[0]: v for k, v in parts.items() if k.count("/") == 1 and k.endswith("/accuracy")}
    if len(sets) > 1:
        line += " (" + ", ".join(f"{k} {100 * v:.1f}%" for k, v in sets.items()) + ")"
    return line + "".join(f"  {k} {100 * v:.1f}%" for k, v in parts.items() if k.startswith(("pass@", "mean@")))


def phase_seconds(scalars: dict[str, float]) -> dict[str, float]:
    """Seconds by phase, longest first."""
    skip = ("time/step", "time/wall", "time/tokens_per_second", "time/compiled_programs", "time/compilations", "time/compilations_beside")
    phases = {k[5:]: v for k, v in scalars.items() if k.startswith("time/") and k not in skip}
    return dict(sorted(phases.items(), key=lambda kv: -kv[1]))


class SilentConsole:
    """log.console=off, and the interface of all consoles."""

    def __init__(self, total_steps: int, title: str, stream):
        self.progress = Progress(total_steps)
        self.title, self.stream = title, stream

    def start(self, name: str = "start") -> None:
        """A phase outside of steps has just begun."""

    def phase(self, name: str) -> None:
        """The phase that has just begun; "" between phases."""

    def step(self, step: int, scalars: dict[str, float]) -> None:
        """The metrics of a finished step."""

    def print(self, text: str) -> None:
        """A message to the person."""

    def sample(self, step: int, name: str, record: dict) -> None:
        """A sampled conversation of an evaluation."""

    def close(self) -> None:
        """Leaves the terminal as it was."""


class PlainConsole(SilentConsole):
    """One line per step, greppable: `step 12/100  reward 0.512  acc 45.0% ... 1.92s (rollout 1.10 update 0.75)`."""

    LABELS = {"policy/kl": "kl", "optim/grad_norm": "grad", "rollout/zero_signal_fraction": "zero-signal",
              "rollout/truncated_fraction": "truncated", "accuracy/train": "accuracy", "value/loss": "value-loss",
              "value/explained_variance": "explained"}

    def __init__(self, total_steps: int, title: str, stream):
        super().__init__(total_steps, title, stream)
        self._still = Still(self._write)

    def start(self, name: str = "start") -> None:
        self.phase(name)

    def phase(self, name: str) -> None:
        self._still.phase(name)

    def step(self, step: int, scalars: dict[str, float]) -> None:
        self.progress.advance(step)
        shown = [m for m in COLUMNS if m.name in scalars and not m.name.startswith(("time/", "eval/"))]
        parts = [f"step {step}/{self.progress.total}"]
        parts += [f"{self.LABELS.get(m.name, m.header)} {show(m, scalars[m.name])}" for m in shown]
        if evaluation := evaluation_line(scalars):
            parts.append(f"eval {evaluation}")
        if "time/step" in scalars:
            phases = " ".join(f"{k} {v:.2f}" for k, v in phase_seconds(scalars).items() if v >= 0.005)
            parts.append(f"{scalars['time/step']:.2f}s ({phases})")
        if "time/tokens_per_second" in scalars:
            parts.append(f"{scalars['time/tokens_per_second']:,.0f} tok/s")
        if self.progress.left is not None:
            parts.append(f"left {duration(self.progress.left)}")
        self._still.step()
        self.print("  ".join(parts))

    def print(self, text: str) -> None:
        self._still.line()
        self._write(text)

    def _write(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()

    def close(self) -> None:
        self._still.close()

    def sample(self, step: int, name: str, record: dict) -> None:
        lines = [f"sample of {name} at step {step}{sample_verdict(record)}"]
        for part in ("prompt", "completion"):
            body = shortened(str(record.get(part, ""))).replace("\n", "\n    ")
            lines.append(f"  {part}:\n    {body}")
        self.print("\n".join(lines))


def sample_verdict(record: dict) -> str:
    out = f", score {record['score']:.3g}" if isinstance(record.get("score"), int | float) else ""
    if "accurate" in record:
        out += ", right" if record["accurate"] else ", wrong"
    return out + (", cut by the length limit" if record.get("finish") == "length" else "")


class TableConsole(SilentConsole):
    """Rows in the scroll-back, a live panel below them."""

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
        self._now, self._since = name, time.monotonic()
        self._start()

    def _start(self) -> None:
        if not self._live.is_started:
            self._live.start()
            self._rich.show_cursor(True)  # a killed process could not bring a hidden cursor back

    def step(self, step: int, scalars: dict[str, float]) -> None:
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
        """Columns whose metric is there, the least important left out until the row fits the terminal."""
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
        """A bar of the last step's seconds by phase, and its legend."""

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

        self._rich.print(Text(text))

    def sample(self, step: int, name: str, record: dict) -> None:

        body = Text.assemble((shortened(str(record.get("prompt", ""))).strip(), "dim"), "\n",
                             shortened(str(record.get("completion", ""))).strip())
        border = {True: "green", False: "red"}.get(record.get("accurate"), "bright_black")
        self._rich.print(Panel(body, title=Text(f"{name}, step {step}{sample_verdict(record)}"), title_align="left",
                               border_style=border))

    def close(self) -> None:
        self._now = "finished"
        if self._live.is_started:
            self._live.stop()


def _width(metric) -> int:
    return max(len(metric.header), {"percent": 6, "fixed": 7, "count": 7, "small": 6, "seconds": 6}[metric.format])


def sparkline(values: list[float], width: int) -> str:
    """The course of a value in at most `width` characters, each the mean of its share of the points."""
    values = [v for v in values if v == v and abs(v) != float("inf")]
    if not values:
        return ""
    n = min(width, len(values))
    edges = [len(values) * i // n for i in range(n + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(SPARKS[min(7, int(8 * (m - low) / span))] for m in means)


class _Handler(logging.Handler):
    """Writes to whatever sys.stderr is now, so that messages appear above a live table."""

    process = ""
    COLOURS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31m"}

    def emit(self, record: logging.LogRecord) -> None:
        label = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        colour = self.COLOURS.get(record.levelno, "") if sys.stderr.isatty() else ""
        try:
            label = f"{self.process}: " * bool(self.process) + label
            print(f"{colour}jaxrl {label}{self.format(record)}{chr(27) + '[0m' if colour else ''}", file=sys.stderr)
        except (OSError, ValueError):
            self.handleError(record)


def setup_logging(level: str, process: str = "") -> None:
    """Sends jaxrl's log to stderr at `log.level`, unless the application has set up logging itself.

    process: name of a process other than the first of several: it sends warnings and errors only, under this name.
    """
    logger = logging.getLogger("jaxrl")
    logger.setLevel(level.upper())
    if process or _Handler.process:
        _Handler.process = process or _Handler.process
        logger.setLevel(max(logger.level, logging.WARNING))
    if not logger.handlers and not logging.getLogger().handlers:
        logger.addHandler(_Handler())
        logger.propagate = False  # libraries may give the root logger a handler later: no message twice
