"""The benchmarks run on a machine without an accelerator, too."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))


@pytest.mark.nightly
def test_kernels(capsys):
    """Every op is timed, everything that can run here holds, and the table says what could not run."""
    import kernel_table as kernels

    rows = []
    table = kernels.Table(kernels.UNLIMITED, quick=True, note=rows.append)
    for name in kernels.PARTS:
        kernels.run(name, table, kernels.TINY)
    masks = (", window 64, sinks", ", window 64")
    assert {row["op"] for row in rows} == {
        "matmul", "copy", "decoding", "decoding, shared prompts", "log-prob forward + backward", "experts forward", "experts forward + backward",
        "recurrence forward", "recurrence forward + backward",
        *(f"{kind}attention{mask} {way}ward" for kind in ("", "packed ") for way in ("for", "back") for mask in ("", *masks)),
        *(f"decoding{mask}" for mask in masks)} and rows == table.rows
    assert all(row["milliseconds"] > 0 for row in rows)
    shares = [kernels.correctness(kernels.held_here(), share=(i, 2), threads=2) for i in range(2)]
    assert [len(share) for share in shares] == [7, 7] and not any(row["error"] for share in shares for row in share)


@pytest.fixture
def suite():
    import gpu_suite

    return gpu_suite


ORIGIN = {"commit": "aaaaaaa", "device": "NVIDIA H200", "devices": 1, "jax": "0.11.2"}


def test_rows_of_several_runs_merge_into_one_file_of_a_device(suite, tmp_path, capsys):
    """A newer row replaces that of its part, name and commit; those of other parts, commits and devices stay."""
    from gpu import rows

    here, there = tmp_path / "here", tmp_path / "there"
    file = rows.file_of(here, "NVIDIA H200")
    first = rows.Report("0.5B", file, ORIGIN)
    first("steps", step=2.0, rollout=1.0 / 3)
    with first.stage("trace"):
        raise ValueError("no such plane")
    first.end()
    later = rows.Report("0.5B", rows.file_of(there, "NVIDIA H200"), ORIGIN)
    later("steps", step=1.0)
    later.end()
    rows.Report("1.5B", later.file, ORIGIN | {"commit": "bbbbbbb"})("decoding", tokens_per_second=64000.0)
    rows.Report("1.5B", rows.file_of(there, "cpu"), ORIGIN | {"device": "cpu"}).end()
    assert file.name == "suite_nvidia_h200.jsonl" and not rows.is_done(rows.read(file), "0.5B", "aaaaaaa")
    assert suite.main(["--merge", *map(str, there.iterdir()), "--out", str(here)]) == 0
    found = rows.read(file)
    assert [(r["part"], r["name"], r["commit"]) for r in found] == [
        ("0.5B", "steps", "aaaaaaa"), ("0.5B", "trace", "aaaaaaa"), ("0.5B", "part", "aaaaaaa"), ("1.5B", "decoding", "bbbbbbb")]
    assert found[0]["step"] == 1.0 and found[1]["failed"] == "ValueError: no such plane" and found[2]["state"] == rows.DONE
    assert rows.is_done(found, "0.5B", "aaaaaaa") and not rows.is_done(found, "0.5B", "bbbbbbb")
    assert rows.merged(rows.read(later.file), [first.rows[0]])[0]["step"] == 1.0  # an older row replaces none
    absent = rows.Report("1.5B", later.file, ORIGIN | {"commit": "bbbbbbb"})
    assert not absent.needs("decoding", "no-such-package") and rows.read(later.file)[-1]["tokens_per_second"] == 64000.0
    absent.end()
    assert rows.read(later.file)[-1]["state"] == "not run: not installed: no-such-package"
    page = file.with_suffix(".md").read_text()
    assert "jaxrl, embedded 64,000 (bbbbbbb); vLLM alone not measured" in page and "| steps | step 1 | aaaaaaa |" in page


def test_a_part_that_ends_early_leaves_what_it_found_and_is_run_again(suite, tmp_path, monkeypatch, capsys):
    from gpu import rows

    monkeypatch.setitem(suite.PARTS, "no such part", suite.Part("", "training:run", (), ()))
    file = rows.file_of(tmp_path, "cpu")
    origin = ORIGIN | {"device": "cpu"}
    rows.Report("no such part", file, origin)("steps", step=1.0)
    done = rows.Report("0.5B", file, origin)
    done.end()
    assert suite.run(["no such part", "0.5B"], tmp_path, True, True, 0.0, origin) == 1
    found = rows.read(file)
    assert [(r["part"], r["name"]) for r in found] == [("no such part", "steps"), ("0.5B", "part"), ("no such part", "part")]
    assert found[-1]["state"].startswith("its process ended with 2") and found[1] == done.rows[0]
    assert "0.5B: done at aaaaaaa" in capsys.readouterr().out
    assert suite.run(["0.5B"], tmp_path, False, False, 1.0, origin) == 1  # three minutes do not fit into one
    assert "not begun" in capsys.readouterr().out and rows.read(file) == found


def test_a_trace_is_read_into_tables(tmp_path):
    import jax
    from gpu import rows, trace

    event = lambda program, kernel, start, end: trace.Event(program, kernel, 1e3 * start, 1e3 * end)  # noqa: E731
    found = [event("decode", "gemm", 0, 10), event("decode", "memcpy128", 12, 14), event("decode", "gemm", 30, 40),
             event("", "MemcpyD2H", 35, 36), event("update", "gemm", 60, 70)]
    programs = trace.programs(found)
    assert programs["decode"] == dict(launches=3, busy_ms=0.022, copies=1, copies_ms=0.002, gaps_ms=pytest.approx(0.018), long_gaps=1)
    assert programs["update"]["gaps_ms"] == 0 and list(trace.kernels(found))[0] == ("decode", "gemm")
    assert trace.kernels(found)["decode", "gemm"] == dict(launches=2, ms=0.02, us_each=10.0)
    assert trace.device_time(found) == pytest.approx(dict(span_ms=0.07, busy_ms=0.032, idle_ms=0.038))

    squared = jax.jit(lambda x: jax.numpy.tanh(x @ x))
    x = jax.numpy.ones((64, 64))
    squared(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        squared(x).block_until_ready()
    report = rows.Report("tiny", tmp_path / "rows.jsonl", ORIGIN)
    trace.report_trace(report, tmp_path)
    own = [row for row in rows.read(report.file) if "<lambda>" in row["name"] or "_lambda" in row["name"]]
    assert own[0]["launches"] >= 1 and own[0]["busy_ms"] > 0 and any("kernel" in row["name"] for row in own)


def test_a_part_writes_what_the_card_did_meanwhile(suite, tmp_path, monkeypatch):
    """Of the moments at which it worked; a machine without nvidia-smi has no row."""
    from gpu import card, rows

    report = rows.Report("tiny", tmp_path / "rows.jsonl", ORIGIN)
    monkeypatch.setenv("PATH", str(tmp_path))
    with card.watched(report):
        pass
    assert rows.read(report.file) == []
    moments = ["1980, 3201, 120.5, 700.00, 40, 12", "1410, 3201, 690.0, 700.00, 66, 100", "1380, 3201, 698.0, 700.00, 67, 97",
               "1500, 3201, [N/A], 700.00, 66, 100", "1395, 3201, 69"]
    tool = tmp_path / "nvidia-smi"
    lines = [f"echo '{line}'" for line in moments[:-1]] + [f"printf '{moments[-1]}'", f"echo $* > {tmp_path}/asked", "exec /bin/sleep 60"]
    tool.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    tool.chmod(0o755)
    with card.watched(report):
        while not (tmp_path / "asked").exists():
            time.sleep(0.01)
    row, = rows.read(report.file)
    assert (row["name"], row["moments"], row["sm_mhz"], row["sm_mhz_lowest"], row["watts_highest"]) == ("card", 2, 1395.0, 1380.0, 698.0)
    assert row["watts_allowed"] == 700.0 and "--query-gpu=clocks.sm," in (tmp_path / "asked").read_text()


def test_a_part_that_was_out_of_time_goes_on_where_it_stopped(suite, tmp_path, monkeypatch, capsys):
    import kernel_table
    from gpu import kernels, rows

    asked = []

    def two(table, sizes):
        for name in sizes["layers"]:
            table.measure("experts forward", name, "tiny", "gpu", lambda name=name: asked.append(name) or (lambda: 0, {}))

    monkeypatch.setitem(kernel_table.PARTS, "experts", two)
    monkeypatch.setitem(kernel_table.FULL, "matmul", 64)
    monkeypatch.setitem(kernel_table.FULL, "copy", 1 << 12)
    measured = kernel_table.Table.seconds

    def late(table, call):
        table.deadline = 0.0 if asked else table.deadline
        return measured(table, call)

    monkeypatch.setattr(kernel_table.Table, "seconds", late)
    for done in (["a"], ["b"]):
        asked.clear()
        report = rows.Report("experts-counts", tmp_path / "rows.jsonl", ORIGIN)
        kernels.timed(report, "experts", False, ("a", "b"))
        report.end()
        assert asked == done
        assert rows.is_done(rows.read(report.file), "experts-counts", "aaaaaaa") == (done == ["b"])
    found = {row["name"]: row for row in rows.read(report.file)}
    assert found["experts forward, a, tiny, gpu"]["milliseconds"] >= 0 and "not_run" not in found["experts forward, b, tiny, gpu"]


@pytest.mark.slow
def test_the_gpu_suite_runs_at_a_tiny_shape(suite, tmp_path):
    """Predicted and measured stand beside each other; figures mean something on an accelerator only."""
    from gpu import rows

    names = ["0.5B", "decode-both", "first-0.5B", "lora", "experts", "dpo", "ahead", "plan", "logprob", "vllm-nccl"]
    done = subprocess.run([sys.executable, suite.__file__, "--tiny", "--out", tmp_path, *names], capture_output=True, text=True,
                          env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.jsonl")
    found = {(row["part"], row["name"]): row for row in rows.read(file)}
    assert all(found[name, "part"]["state"] == rows.DONE for name in names[:-1]) and not any("failed" in row for row in found.values())
    assert all(found[name, "update"]["tokens_per_second"] > 0 for name in ("0.5B", "lora", "experts", "dpo"))
    assert found["decode-both", "decoding"]["tokens_per_second"] > 0 and "WHILE" in found["decode-both", "first rollout"]["xla_flags"]
    assert all(found["first-0.5B", f"{cache} cache: first step"]["rollout"] > 0 for cache in ("empty", "filled"))
    assert found["0.5B", "steps"]["compilations_after_warm_up"] == 0 and found["0.5B", "predicted"]["peak_gib"] > 0
    assert {"decode_part", "accumulate"} <= {name.removeprefix("trace: program ") for part, name in found if part == "0.5B"}
    assert found["ahead", "max_staleness=2 beside 0"]["step_of_sum"] > 0 and found["plan", "0.5B"]["update_of_measured"] > 0
    assert found["vllm-nccl", "part"]["state"].startswith(rows.NOT_RUN) and "not_run" in found["vllm-nccl", "steps"]
    assert file.with_suffix(".md").exists()


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


@pytest.mark.full
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
