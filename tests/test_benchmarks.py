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
    masks = (", window 64, sinks", ", window 64")
    assert {row["op"] for row in result["rows"]} == {
        "matmul", "copy", "decoding", "decoding, shared prompts", "log-prob forward + backward", "experts forward", "experts forward + backward",
        *(f"{kind}attention{mask} {way}ward" for kind in ("", "packed ") for way in ("for", "back") for mask in ("", *masks)),
        *(f"decoding{mask}" for mask in masks)} and not result["failed"]
    assert all(row["milliseconds"] > 0 for row in result["rows"]) and not any(r["error"] for r in result["correctness"])
    assert "of 11 cases" in (tmp_path / "kernels_cpu.md").read_text()


def test_a_part_that_ends_early_leaves_what_it_and_others_found(monkeypatch, capsys):
    import kernel_table as kernels

    row = dict(op="copy", model="experts", shape="", implementation="xla", milliseconds=1.0)
    told = {"held": ([{"environment": {"device": "cpu"}}], "Traceback\nits process ended with -11"),
            "experts": ([{"rows": row}], "not done after 3 s"), "masks": ([{"rows": row | {"op": "matmul"}}], "")}
    written = []
    monkeypatch.setattr(kernels, "part_in_a_process", lambda name, *_: told[name])
    found = kernels.run(True, 1.0, list(told), lambda result: written.append(kernels.markdown(result)))
    assert [r["op"] for r in found["rows"]] == ["copy", "matmul"] and set(found["failed"]) == {"held", "experts"} and len(written) == 3
    assert "part `held` ended early: its process ended with -11" in written[-1] and "| matmul |" in written[-1]
    monkeypatch.undo()
    lines, why = kernels.part_in_a_process("no such part", True, 1.0)
    assert lines == [] and why.endswith("its process ended with 2")


def test_a_case_keeps_the_stages_that_were_done(tmp_path):
    import gpu_suite as suite

    out, file = {}, tmp_path / "out.json"
    with suite.stage(out, "measured", file):
        out["measured"] = {"step": 1.0}
    with suite.stage(out, "planned", file):
        raise ValueError("no such chip")
    assert json.loads(file.read_text()) == {"measured": {"step": 1.0}, "failed": "planned: ValueError: no such chip\n"}
    assert suite.in_a_process("no such case")["failed"].startswith("its process ended with 2")


def test_pairs_that_a_query_sees():
    import kernel_table as kernels

    for length, window in ((5, 0), (5, 2), (2, 5), (7, 7)):
        assert kernels.visible_pairs(length, window) == sum(
            q - k < (window or length) for q in range(length) for k in range(q + 1))


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


def test_what_the_device_has_no_room_for_is_said_and_passed_over(monkeypatch, capsys):
    """jax.lax.ragged_dot asks for 64 GiB on a GPU (Qwen3-30B-A3B, 16k tokens): that is its row, and the next one runs."""
    import experts
    import jax
    import kernel_table as kernels

    class Full:
        def memory_stats(self):
            return {"bytes_limit": 3 * 2**20, "bytes_in_use": 2 * 2**20}

    table, x = kernels.Table(1.0, quick=True), jax.numpy.ones((1024, 1024))
    with monkeypatch.context() as patch:
        patch.setattr(kernels.jax, "devices", lambda: [Full()])
        large = table.measure("experts forward", "", "", "jax.lax.ragged_dot", lambda: kernels.compiled(lambda x: x + 1, x))
        small = table.measure("experts forward", "", "", "blocks", lambda: kernels.compiled(lambda x: x[:8] + 1, x))
    assert large["not_run"] == "MemoryError: asks for 0.0 GiB beside its arguments; 0.0 are free" and small["milliseconds"] > 0

    def refuses(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 64.00GiB\nmore")

    monkeypatch.setitem(experts.WAYS, "ragged_dot", refuses)
    assert experts.main(["--tiny"]) == 0
    said = capsys.readouterr().out
    assert said.count("does not run") == 8
    assert "8 experts, ragged_dot forward: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 64.00GiB\n" in said


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
def test_growth_at_small_points(tmp_path):
    """Every series; a point of several processes among them."""
    import growth

    assert growth.main(["--tiny", "--out", str(tmp_path / "growth.json")]) == 0
    series = json.loads((tmp_path / "growth.json").read_text())["series"]
    assert set(series) == set(growth.SERIES) - {"length", "group"}
    assert [row["tokens"] for name in ("tokens", "turns") for row in series[name]["points"]] == [32, 64, 32, 64]
    rows = [row for found in series.values() for row in found["points"]]
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
