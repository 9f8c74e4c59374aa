"""The state of the card while a part runs, from nvidia-smi: clocks, power and temperature decide what its figures mean."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import tempfile

FIELDS = {"clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz", "power.draw": "watts", "enforced.power.limit": "watts_allowed",
          "temperature.gpu": "celsius", "utilization.gpu": "busy"}
EVERY = 500  # ms
BUSY = 90.0  # % of the time; of other moments a clock says nothing


@contextlib.contextmanager
def watched(report):
    """Writes the row `card` at the end; none where nvidia-smi is missing."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", f"-lms={EVERY}"]
    with tempfile.TemporaryFile("w+") as said:
        try:
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.DEVNULL)
        except OSError:
            yield
            return
        try:
            yield
        finally:
            process.terminate()
            process.wait()
            said.seek(0)
            if found := summary(said.read()):
                report("card", **found)


def summary(text: str) -> dict:
    """Of the moments at which the card was busy (of all, if it never was): the median of each field, the lowest clock, the
    highest power, and how many moments there were."""
    moments = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # "[N/A]", a line that was cut off
            moments.append(dict(zip(FIELDS.values(), map(float, line.split(",")), strict=True)))
    if not moments:
        return {}
    busy = [moment for moment in moments if moment["busy"] >= BUSY] or moments
    middle = {name: statistics.median(moment[name] for moment in busy) for name in FIELDS.values()}
    return {"moments": len(busy), **middle, "sm_mhz_lowest": min(m["sm_mhz"] for m in busy), "watts_highest": max(m["watts"] for m in busy)}
