"""A group of which one process dies: python -m jaxrl.launch ... -- tests/helpers/hosts_dies.py PROCESS HOW HEARTBEAT_SECONDS FOLDER

The others wait for it, process 1 in a call of the coordinator that nothing interrupts.
"""

import sys
import time
from pathlib import Path

from jaxrl.config.load import default_config
from jaxrl.errors import RunStopped
from jaxrl.processes import group
from jaxrl.processes.faults import Faults


def main(process, how, heartbeat, folder):
    config = default_config()
    config.launch.heartbeat_seconds = float(heartbeat)
    group.start(config)
    peers = group.peers()
    peers.all_gather("the start")
    try:
        if peers.index == int(process):
            time.sleep(0.5)
            (Path(folder) / "died").touch()
            Faults((f"update.{how}@step=1,process={process}",), peers.index).fire("update", 1)
        if peers.index:
            peers._client.wait_at_barrier("never", 600_000)
        peers.all_gather("what does not come")
    except Exception as e:
        reason = peers.explain(e)
        peers.report(reason)
        print("jaxrl: stopped:" if isinstance(reason, RunStopped) else "jaxrl:", reason, file=sys.stderr, flush=True)
        peers.leave(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
