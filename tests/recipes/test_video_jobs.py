"""The supervised job on videos: the everyday case of jobs with videos."""

import pytest

import jaxrl
from jaxrl.config import load_config


@pytest.mark.full
def test_a_supervised_job_on_videos_runs_and_is_evaluated_blind(tmp_path):
    """Frames of the rows become patches of two frames each, which loss and sampler read; the report keeps the pictures of a video."""
    c = load_config("video:tiny", {"run.dir": str(tmp_path / "run"), "log.console": "off", "log.tensorboard": False, "eval.max_rows": 4,
                                   "eval.before": False})
    summary = jaxrl.train(c)
    after = summary["eval_after"]["sets"]["test"]
    assert summary["finished"] and {"accuracy", "blank/accuracy", "swapped/accuracy"} <= after.keys()
    assert len(list((tmp_path / "run/images").iterdir())) == 8 and (tmp_path / "run/export/video_preprocessor_config.json").exists()
