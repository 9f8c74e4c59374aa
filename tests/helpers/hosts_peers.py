"""What processes of a group say to each other: python -m jaxrl.launch ... -- tests/helpers/hosts_peers.py FOLDER

Each writes FOLDER/<process>.json: question -> answer.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.config.load import default_config
from jaxrl.errors import ConfigError
from jaxrl.processes import exchange, group
from jaxrl.processes.group import PeerLost
from jaxrl.sharding.mesh import AXES


def main():
    config = default_config()
    config.launch.heartbeat_seconds, config.launch.connect_seconds, config.launch.wait_seconds = 20.0, 60.0, 4000.0
    group.start(config)
    group.start(config)  # a warm start comes here twice
    peers = group.peers()
    me = peers.index

    answers = {}

    def say(question, answer):
        answers[question] = answer
        (Path(sys.argv[1]) / f"{me}.json").write_text(json.dumps(answers))

    def refused(question, kind, action):
        try:
            action()
            say(question, "went through")
        except kind as e:
            say(question, str(e))

    say("who", [peers.index, peers.count, peers.who(1), jax.process_count(), jax.device_count()])
    try:  # the coordinator is at 127.0.0.1
        socket.create_connection(("127.0.0.2", int(os.environ["JAXRL_COORDINATOR"].rpartition(":")[2])), timeout=300).close()
        say("another address", "open")
    except ConnectionRefusedError:
        say("another address", "refused")
    say("meet", peers.all_gather("one", {"mine": me}))
    say("decide", peers.decide("two", lambda: ["by", me]))
    sizes = [3, exchange.CHUNK + 5]  # one of them needs two rounds
    found = exchange.gather(peers, "three", bytes([me + 1]) * sizes[me])
    say("gather", [[len(b), b[0], b[-1], len(set(b))] for b in found])
    say("gather nothing", [len(b) for b in exchange.gather(peers, "four", b"")])
    arrays(peers, say, refused)
    facts = {"optimizer.lr": "1e-05", "version of jax": "0.10.2" if me else "0.11"}
    refused("other facts", ConfigError, lambda: exchange.check_equal(peers, facts))
    exchange.check_equal(peers, {"optimizer.lr": "1e-05"})
    refused("other places", PeerLost, lambda: peers.all_gather(f"step {3 + me}, weights 2: the answers"))
    say("still together", peers.all_gather("five", me))
    if me == 1:
        peers.request_stop()
    end = time.monotonic() + 300
    while not peers.stop_requested and time.monotonic() < end:
        time.sleep(0.05)
    say("stop", peers.stop_requested)
    peers.all_gather("before one is late")
    say("wait", peers.wait_seconds)
    peers.wait_seconds = 1.0
    if me == 0:
        refused("late", PeerLost, lambda: peers.all_gather("the answers of step 7"))
    else:
        time.sleep(2.5)
    peers.leave(3)


def arrays(peers, say, refused):
    """Rows of a host array to the devices that hold them, and back; the rollout layout as a process sees it alone."""
    def mesh_of(*shape):
        return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    mesh = mesh_of(1, 2, 1, 1, 2)
    whole = np.arange(32.0).reshape(4, 8)
    split = exchange.put({"x": whole}, NamedSharding(mesh, P(("dp", "fsdp"), "tp")))["x"]
    say("put", [split.is_fully_addressable, [np.asarray(s.data).shape for s in split.addressable_shards],
                bool(np.array_equal(exchange.to_host(split), whole))])
    here = exchange.local_mesh(mesh)
    program, same = exchange.local_copies(mesh, {"w": ("embed", "mlp")}, {"w": split}, jnp.bfloat16)
    own = program({"w": split})["w"]
    say("local", [list(here.devices.shape), own.is_fully_addressable, str(own.dtype), same == here,
                  bool(np.array_equal(np.asarray(own, np.float32), whole)), str(own.sharding.spec)])
    crossing = mesh_of(1, 1, 1, 1, 4)
    refused("crossing", ConfigError, lambda: exchange.local_mesh(crossing))
    spread = exchange.put(whole, NamedSharding(crossing, P(None, "tp")))
    program, alone = exchange.local_copies(crossing, {"w": ("embed", "mlp")}, {"w": spread}, jnp.float32)
    say("crossing copy", [list(alone.devices.shape), bool(np.array_equal(np.asarray(program({"w": spread})["w"]), whole))])


if __name__ == "__main__":
    main()
