"""Files of a run directory that hold JSON of another shape (overwritten, merged by hand) are refused or left out by name, as
broken JSON is."""

import json
import zipfile

import numpy as np
import pytest

from jaxrl import diff
from jaxrl.checkpoint.files import MANIFEST, DamagedCheckpoint, verify
from jaxrl.config.load import load_config
from jaxrl.errors import ConfigError
from jaxrl.planning.asynchrony import read_recorded_run
from jaxrl.records import files
from jaxrl.report.runs import read_run
from jaxrl.service import app
from jaxrl.telemetry.run_dir import merge_json, read_json
from jaxrl.telemetry.sinks import JsonLines

SHAPES = [[1], 3, "text", None, [["a", 1]]]


def written(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value) + "\n", "utf-8")
    return path


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_whose_config_is_no_table_is_refused(tmp_path, shape):
    for content in (shape, {"config": shape}):
        path = written(tmp_path / "config.json", content)
        with pytest.raises(ConfigError, match=r"config.json: no config.json of a run"):
            load_config(str(path))
        written(tmp_path / "metrics.jsonl", {"step": 1})
        with pytest.raises(ConfigError, match="no config.json and metrics.jsonl of a run"):
            read_recorded_run(tmp_path)
        with pytest.raises(ConfigError, match="no run directory"):
            diff.Run(tmp_path)
        found = read_run(tmp_path)
        assert (found.config, found.versions) == ({}, {})


@pytest.mark.parametrize("shape", SHAPES)
def test_files_that_hold_no_table_count_as_damaged(tmp_path, shape):
    summary = written(tmp_path / "summary.json", shape)
    assert read_json(summary) == {} and merge_json(summary, {"a": 1}) == {"a": 1}
    with zipfile.ZipFile(tmp_path / "step_00000001.npz", "w") as file:
        file.writestr(files.HEADER, json.dumps(shape))
    with pytest.raises(ConfigError, match="its header cannot be read"):
        files.header(tmp_path / "step_00000001.npz")
    for manifest in (shape, {"arrays": shape}):
        written(tmp_path / MANIFEST, manifest)
        with pytest.raises(DamagedCheckpoint):
            verify(tmp_path)
    written(tmp_path / "base.json", shape)
    with pytest.raises(ConfigError, match="base.json: damaged"):
        app.check_folder(tmp_path, app.Options("model"), "00")


@pytest.mark.parametrize("shape", [*SHAPES, {"loss": 1.0}, {"step": None}])
def test_lines_without_a_step_end_a_resumed_runs_metrics(tmp_path, shape):
    path = written(tmp_path / "metrics.jsonl", {"step": 1, "loss": 2.0})
    whole = path.read_bytes()
    path.write_bytes(whole + json.dumps(shape).encode() + b"\n")
    JsonLines(path, last_step=5).close()
    assert path.read_bytes() == whole


def test_a_record_whose_bytes_are_damaged_is_told_by_its_path(tmp_path):
    files.write(tmp_path, files.Record(1, {"format": 1, "step": 1}, {"a": np.arange(3)}))
    (path,) = tmp_path.glob("*.npz")
    whole = path.read_bytes()
    for content in (whole[:i] + bytes([whole[i] ^ bit]) + whole[i + 1:] for i in range(len(whole)) for bit in (1, 0xFF)):
        path.write_bytes(content)
        for read in (files.header, files.read):
            try:
                found = read(path)
                assert read is files.header and found == {"format": 1, "step": 1}
            except ConfigError as e:
                assert str(path) in str(e)
