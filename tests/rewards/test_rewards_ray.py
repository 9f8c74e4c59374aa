"""reward.executor=ray on a cluster of two nodes on this machine: the same scores and outcomes, and a node that dies."""

import threading

import pytest

from jaxrl.config.load import default_config
from jaxrl.errors import ConfigError
from jaxrl.rewards import RewardItem, RewardPool

pytestmark = [pytest.mark.compat, pytest.mark.slow]
FUNCTIONS = """
import os, pathlib, time

def odd(prompt, completion, n):
    if n == "none": return None
    if n == "raise": raise ValueError("no such thing")
    if n == "die": os._exit(7)
    if n == "sleep": time.sleep(60)
    return 2.0, {"secret": float(os.environ.get("SECRET", 0))}

def counted(prompt, completion, n, folder):
    (pathlib.Path(folder) / f"{n}-{os.getppid()}").write_text("begun")
    time.sleep(0.1)
    return float(n)

def together(prompts, completions, n, folder):
    return [counted("", "", one, place) for one, place in zip(n, folder)]
together.size = 2
"""


@pytest.fixture
def pool(cluster, nodes, tmp_path):
    made, path = [], tmp_path / "scores.py"
    path.write_text(FUNCTIONS)

    def make(*functions, **changes):
        config = default_config()
        config.reward.functions = tuple(f"{path}:{name}" for name in functions)
        config.reward.update({"executor": "ray", "ray_address": cluster.item_hash, "workers": 2, "trial": False} | changes)
        made.append(RewardPool(config))
        made[-1].wait()
        return made[-1]

    yield make
    for one in made:
        one.close()


def items(values, **columns):
    return [RewardItem("p", "c", {"n": n} | columns) for n in values]


def test_outcomes_are_those_of_local_workers(pool, monkeypatch):
    monkeypatch.setenv("SECRET", "5")
    there = pool("odd", timeout_seconds=2.0, max_failed_fraction=1.0, env=("SECRET",))
    result = there.score(items(["none", 1, "raise", "die", "sleep", 2]))
    outcomes = [record["outcomes"]["odd"] for record in result.records()]
    assert outcomes[:2] == ["none", "ok"] and outcomes[4:] == ["timeout", "ok"]
    assert "no such thing" in outcomes[2] and "it exited with status 7" in outcomes[3]
    assert list(result.total[[1, 5]]) == [2.0, 2.0] and result.records()[1]["metrics"]["odd"] == {"secret": 5.0}


@pytest.mark.parametrize("function", ["counted", "together"])
def test_a_node_that_is_killed_loses_no_score(pool, cluster, nodes, tmp_path, function):
    """All are there, each its own, none failed; both nodes had begun, and what the lost one was at was begun again."""
    folder = tmp_path / "begun"
    folder.mkdir()
    there, got = pool(function), []
    scored = threading.Thread(target=lambda: got.append(there.score(items(list(range(60)), folder=str(folder)))))
    scored.start()
    while len({path.name.split("-")[1] for path in folder.iterdir()}) < 2:
        assert scored.is_alive()
    cluster.remove_node(nodes[0], allow_graceful=False)
    scored.join(120)
    assert not scored.is_alive()
    assert list(got[0].total) == [float(n) for n in range(60)]
    assert {record["outcomes"][function] for record in got[0].records()} == {"ok"}


def test_too_few_cpus_are_said_before_anything_waits(pool):
    with pytest.raises(ConfigError, match="reward.workers=2 with reward.ray_cpus=30: the Ray cluster has .* CPUs; lower"):
        pool("odd", ray_cpus=30.0)
