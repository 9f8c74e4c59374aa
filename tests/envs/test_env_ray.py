"""env.executor=ray on a cluster of two nodes on this machine: the same episodes, the same faults, and a node that dies."""

import time

import pytest
from helpers import env_cases
from helpers.env_cases import play, texts, turn

from jaxrl.errors import ConfigError

pytestmark = [pytest.mark.compat, pytest.mark.slow]
WORLD = """
import asyncio, os, signal, sys
async def counts(task, chat):
    for k in range(task.row["turns"]):
        turn = await chat.send(f"{k} {os.getppid()} {os.environ.get('WORLD', '')}")
        await asyncio.sleep(task.row.get("seconds", 0))
        assert turn.text == f"{task.row['name']}-{k}", turn
    if task.row.get("how") == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if task.row.get("how") == "raise":
        raise ConnectionError("no")
    if task.row.get("how") == "hang":
        import time
        chat.reward(0.5)
        time.sleep(60)
    print("played", flush=True)
    return task.row["turns"]
"""


@pytest.fixture
def made(cluster, nodes, tmp_path):
    path, pools = tmp_path / "my_world.py", []
    path.write_text(WORLD)

    def make(**changes):
        pools.append(env_cases.pool(f"{path}:counts", executor="ray", ray_address=cluster.address, **{
            "workers": 2, "step_seconds": 20.0} | changes))
        pools[-1].ready()
        return pools[-1]

    yield make, nodes
    for pool in pools:
        pool.close()


def names(id, k, said):
    return turn(f"{id}-{k}")


def test_episodes_and_faults_are_those_of_local_workers(made, monkeypatch):
    monkeypatch.setenv("WORLD", "here")
    pool = made[0](variables=("WORLD",), step_seconds=3.0)
    rows = {f"e{k}": {"name": f"e{k}", "turns": 1 + k % 5} for k in range(100)}
    rows |= {how: {"name": how, "turns": 2, "how": how} for how in ("raise",)}
    ends, said = play(pool, rows, names)
    assert all(ends[id].kind == "done" and ends[id].data["value"] == row["turns"] for id, row in rows.items() if "how" not in row)
    assert ends["raise"].data["cause"] == "ConnectionError in counts" and all(t.endswith(" here") for t in texts(said["e3"]))
    assert len({text.split()[1] for sends in said.values() for text in texts(sends)}) == 2  # workers
    for how, fault, cause in (("kill", "env", "it was killed by SIGKILL"), ("hang", "late", "blocked its worker")):
        ends, _ = play(pool, {how: {"name": how, "turns": 1, "how": how}}, names)
        assert ends[how].data["fault"] == fault and cause in ends[how].data["cause"]
        assert ends[how].data["reward"] == (0.5 if how == "hang" else 0)
    assert play(pool, {"z": {"name": "z", "turns": 1}}, names)[0]["z"].kind == "done"


def test_a_node_that_is_killed_loses_and_doubles_no_episode(made, cluster):
    """Its episodes fail by nobody's fault, once each; started again they end; the others never noticed."""
    make, nodes = made
    pool = make()
    rows = {f"e{k}": {"name": f"e{k}", "turns": 6, "seconds": 0.2} for k in range(40)}
    for id, row in rows.items():
        pool.start(id, {"row": row, "prompt": "", "seed": 1})
    ended, turns, failed, killed, deadline = {}, dict.fromkeys(rows, 0), [], False, time.monotonic() + 120
    while len(ended) < len(rows):
        assert time.monotonic() < deadline, (len(ended), failed)
        for event in pool.events(0.2):
            assert event.id not in ended
            if event.kind == "send":
                pool.reply(event.id, turn(f"{event.id}-{turns[event.id]}"))
                turns[event.id] += 1
            elif event.kind == "done":
                ended[event.id] = event.data["value"]
            else:
                assert event.data["fault"] == "neighbour" and "Ray" in event.data["detail"], event
                failed.append(event.id)
                turns[event.id] = 0
                pool.start(event.id, {"row": rows[event.id], "prompt": "", "seed": 1})
        if not killed and min(turns.values()) >= 1:
            cluster.remove_node(nodes[0], allow_graceful=False)
            killed = True
    assert killed and 0 < len(failed) < len(rows) and len(set(failed)) == len(failed)
    assert set(ended.values()) == {6.0}


def test_too_few_cpus_are_said_before_anything_waits(made):
    with pytest.raises(ConfigError, match="the Ray cluster has .* CPUs; lower"):
        made[0](ray_cpus=30.0)
