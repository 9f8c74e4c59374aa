"""Writes a report as one self-contained HTML file: data, style, code, the plot library. It makes no network request."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
from pathlib import Path

from jaxrl.report.content import content
from jaxrl.telemetry.run_dir import jsonable, write_atomic

log = logging.getLogger("jaxrl")
ASSETS = Path(__file__).parent / "assets"
SCRIPTS, STYLES = ("uPlot.iife.min.js", "page.js"), ("uPlot.min.css", "page.css")

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">
<title>{title}</title>
{styles}</head><body>
<noscript><p>This page draws its data with JavaScript, which is off here; the same numbers stand in metrics.jsonl of the
run.</p></noscript>
<main id="page"></main>
<script type="application/json" id="data">{data}</script>
{scripts}</body></html>
"""


def embedded(data: dict) -> str:
    """Returns JSON for a script element. Model output may contain `</script>`: no "<" is left that could begin a tag;
    unpaired surrogates become question marks.
    """
    text = json.dumps(jsonable(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode().replace("<", "\\u003c")


def page(data: dict) -> str:
    """Returns the whole HTML document. data: of report.content.

    Texts of runs reach the page as JSON and are shown as text nodes. In addition the document's policy runs only the
    scripts whose digests it names and loads nothing, so that injected markup could neither run nor connect.
    """
    scripts, styles = ([(ASSETS / name).read_text("utf-8") for name in names] for names in (SCRIPTS, STYLES))
    asks = "'self'" if data["watch"] else "'none'"
    policy = (f"default-src 'none'; script-src {' '.join(map(_digest, scripts))}; "
              f"style-src {' '.join(map(_digest, styles))}; img-src data:; base-uri 'none'; form-action 'none'; "
              f"connect-src {asks}")
    title = "jaxrl: " + ", ".join(run["name"] for run in data["runs"])
    return PAGE.format(policy=policy, title=html.escape(title), data=embedded(data),
                       styles="".join(f"<style>{text}</style>\n" for text in styles),
                       scripts="".join(f"<script>{text}</script>\n" for text in scripts))


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def report_of(run_dir) -> None:
    """Writes the report of a finished run. If it cannot be written, a warning is logged; the exit
    status does not change.
    """
    try:
        write_report([run_dir])
    except Exception as e:
        log.warning("no report of %s: %s: %s; jaxrl report %s tries again", run_dir, type(e).__name__, e,
                    run_dir)


def write_report(folders, out=None, steps: list[int] | None = None) -> Path:
    """Writes the page of these runs atomically and returns its path.

    out: file to write, None = report.html in the first folder. steps: training steps whose completions are shown, None
    = some, evenly spaced. Raises ConfigError for a folder that is no run directory, OSError if the page cannot be
    written."""
    folders = list(folders)
    path = Path(out) if out else Path(folders[0]) / "report.html"
    write_atomic(path, page(content(folders, steps)))
    return path
