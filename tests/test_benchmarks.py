"""The benchmarks run on a machine without an accelerator, too."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))


@pytest.mark.nightly
def test_kernels(tmp_path):
    """Every op is timed, everything that can run here holds, and the table says what could not run. (.ci/run runs the same table
    by the GPU suite at its tiny shape, test_plan.py.)"""
    import kernels

    assert kernels.main(["--tiny", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "kernels_cpu.json").read_text())
    assert {row["op"] for row in result["rows"]} == {
        "matmul", "copy", "attention forward", "attention backward", "packed attention forward", "packed attention backward",
        "decoding", "decoding, shared prompts", "log-prob forward + backward"}
    assert all(row["milliseconds"] > 0 for row in result["rows"]) and not any(r["error"] for r in result["correctness"])
    assert "of 6 cases" in (tmp_path / "kernels_cpu.md").read_text()


def test_a_row_says_why_it_has_no_time(capsys):
    import kernels

    def missing():
        raise ImportError("No module named 'tokamax'")

    table = kernels.Table(1.0, quick=True)
    row = table.measure("attention forward", "tiny", "256 tokens", "tokamax mosaic", missing, flops=1)
    assert row["not_run"] == "ImportError: No module named 'tokamax'" and "milliseconds" not in row
    late = kernels.Table(0.0, quick=True).measure("copy", "", "", "xla", missing)
    assert late["not_run"] == "TimeoutError: out of time"
    assert kernels.rates(2.0, 4e12, 0, {"matmul": 8e12}) == {"milliseconds": 2000.0, "tflops": 2.0, "share": 0.25}
    assert capsys.readouterr().out.count("|") == 20
