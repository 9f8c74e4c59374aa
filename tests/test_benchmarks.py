"""The benchmarks run on a machine without an accelerator, too."""

import json
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))


@pytest.mark.nightly
def test_kernels(tmp_path):
    """Every op is timed, everything that can run here holds, and the table says what could not run. (.ci/run runs the same table
    by the GPU suite at its tiny shape, test_plan.py.)"""
    import kernel_table as kernels

    assert kernels.main(["--tiny", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "kernels_cpu.json").read_text())
    assert {row["op"] for row in result["rows"]} == {
        "matmul", "copy", "attention forward", "attention backward", "packed attention forward", "packed attention backward",
        "decoding", "decoding, shared prompts", "log-prob forward + backward"}
    assert all(row["milliseconds"] > 0 for row in result["rows"]) and not any(r["error"] for r in result["correctness"])
    assert "of 6 cases" in (tmp_path / "kernels_cpu.md").read_text()


@pytest.mark.slow
def test_experts(tmp_path):
    """Three ways that compute one function, timed at a size that says nothing."""
    import experts

    assert experts.main(["--tiny", "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())["tokens_per_second"]
    assert set(found) == {"4", "8"} and all(rate > 0 for ways in found.values() for way in ways.values() for rate in way.values())


def test_a_row_says_why_it_has_no_time(capsys):
    import kernel_table as kernels

    def missing():
        raise ImportError("No module named 'tokamax'")

    table = kernels.Table(1.0, quick=True)
    row = table.measure("attention forward", "tiny", "256 tokens", "tokamax mosaic", missing, flops=1)
    assert row["not_run"] == "ImportError: No module named 'tokamax'" and "milliseconds" not in row
    late = kernels.Table(0.0, quick=True).measure("copy", "", "", "xla", missing)
    assert late["not_run"] == "TimeoutError: out of time"
    assert kernels.rates(2.0, 4e12, 0, {"matmul": 8e12}) == {"milliseconds": 2000.0, "tflops": 2.0, "share": 0.25}
    assert capsys.readouterr().out.count("|") == 20


def test_exponents_of_growth():
    """Of straight lines they are exact; the table shows them below its points; scoring that costs nothing more has none."""
    import growth

    assert growth.exponent([1, 2, 4], [3, 6, 12]) == pytest.approx(1) and growth.exponent([2, 4], [5, 20]) == pytest.approx(2)
    rows = [{"prompts": 1, "group": n, "answer": 8, "tokens": 8 * n, **{phase: {"seconds": 0.1 * n**power, "bytes": 2**20 * n}
            for phase, power in (("generation", 1), ("scoring", 0), ("update", 2))}} for n in (2, 4, 8)]
    found = growth.fitted("group", rows)
    assert [round(found[phase]["seconds"]["last"], 6) for phase in ("generation", "scoring", "update")] == [1, 0, 2]
    text = growth.table({"series": {"group": {"grows": "answers", "points": rows, "exponents": found}}})
    assert "| 1 x 4 x 8 | 0.400 | 4 | 0.100 | 4 | 1.600 | 4 |" in text
    assert "| exponent, all points | 1.00 | 1.00 | 0.00 | 1.00 | 2.00 | 1.00 |" in text


@pytest.mark.nightly
def test_growth_at_two_small_points(tmp_path):
    import growth

    assert growth.main(["--tiny", "--out", str(tmp_path / "growth.json")]) == 0
    rows = json.loads((tmp_path / "growth.json").read_text())["series"]["tokens"]["points"]
    assert [row["tokens"] for row in rows] == [32, 64]
    assert all(row[phase]["seconds"] > 0 and row[phase]["bytes"] > 1 << 20 for row in rows for phase in growth.PHASES.values())


@pytest.mark.nightly
def test_startup_of_one_job():
    """Cold compiles what warm fetches, and the parts are the whole."""
    import startup

    config, options = startup.JOBS["sft"]
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = (startup.first_step(config, options, Path(folder) / name, Path(folder) / "cache") for name in ("cold", "warm"))
        assert list((Path(folder) / "cache").iterdir())
    for parts in (cold, warm):
        assert sum(v for k, v in parts.items() if k not in ("total", "programs")) == pytest.approx(parts["total"]) and min(parts.values()) >= 0
    assert cold["programs"] == warm["programs"] > 3
