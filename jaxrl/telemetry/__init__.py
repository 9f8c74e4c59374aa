"""Telemetry: what a run says and writes about itself.

    telemetry = Telemetry(run_dir, config, total_steps, resume_step=None)
    phases = Phases(watch=telemetry.console.phase)
    with phases("rollout"): ...
    telemetry.step(step, scalars, phases.take())

Sinks: the console (`console.py`, `table.py`), metrics.jsonl, TensorBoard, W&B, the user's own (`sinks.py`); rollouts as
JSONL, summary.json and config.json (`run_dir.py`). Warnings of the first steps are rules in `health.py`.

Metric names are `group/name`; `NAMES` says what each means, and `metrics_table()` is that table as text. Everything
measured with a clock is under `time/` (in metrics.jsonl: inside the key "time"), so all else is reproducible.
"""

from jaxrl.telemetry.console import setup_logging
from jaxrl.telemetry.health import Health
from jaxrl.telemetry.names import COLUMNS, METRICS, NAMES, describe, metrics_table
from jaxrl.telemetry.run_dir import dumps, merge_json, read_json, require_free, write_atomic, write_config
from jaxrl.telemetry.sinks import find_sink
from jaxrl.telemetry.telemetry import Telemetry, make_console, open_console
from jaxrl.telemetry.timing import Every, Phases, per_step

__doc__ = f"{__doc__}\n{metrics_table()}"
__all__ = ["COLUMNS", "METRICS", "NAMES", "Every", "Health", "Phases", "Telemetry", "describe", "dumps", "find_sink",
           "make_console", "merge_json", "metrics_table", "open_console", "per_step", "read_json", "require_free",
           "setup_logging", "write_atomic", "write_config"]
