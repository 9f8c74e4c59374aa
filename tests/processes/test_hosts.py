"""Several processes of one run: how they find each other, what they agree on, and what happens when one dies.

Real processes with gloo on this machine. Whole jobs are in test_hosts_job.py and, over all shapes, in evidence/hosts.py.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import yaml
from helpers import tiny_job
from helpers.run_tools import ROOT, environment
from helpers.tiers import nightly

from jaxrl import launch
from jaxrl.config.load import default_config, put
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.processes import exchange, greeting, group
from jaxrl.processes.faults import Faults
from jaxrl.processes.group import Peers, Place, expand_nodes, find_place
from jaxrl.resolve.checks import common
from jaxrl.rl.trajectories import results_from_bytes, results_to_bytes
from jaxrl.rollout import Result
from jaxrl.rollout.shapes import from_config
from jaxrl.rollout.vllm.servers import servers_of_process
from jaxrl.telemetry import Telemetry
from jaxrl.telemetry.profiler import traced_steps


def options(**changes):
    c = default_config()
    for name, value in changes.items():
        c.launch[name] = value
    return c.launch


def place(environ, **changes):
    found = find_place(options(**changes), environ)
    return found and (found.source, found.coordinator, found.processes, found.process, found.hosts)


LOCAL = {"JAXRL_COORDINATOR": "127.0.0.1:4000", "JAXRL_PROCESSES": "4", "JAXRL_PROCESS": "2"}
SLURM = {"SLURM_JOB_ID": "70001", "SLURM_STEP_NODELIST": "gpu[09-10,12]", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1"}


def test_where_a_process_stands():
    assert place({}) is None and place(LOCAL, hosts="none") is None
    assert place({"JAXRL_PROCESSES": "1", "JAXRL_PROCESS": "0"}) is None and place({"JAXRL_PROCESSES": "2"}, processes=1, process=0) is None
    assert place({"JAXRL_PROCESSES": "2"}, hosts="none") is None
    assert place(LOCAL) == ("explicit", "127.0.0.1:4000", 4, 2, ())
    assert place({}, coordinator="a:1", processes=2, process=1) == ("explicit", "a:1", 2, 1, ())
    assert place(LOCAL, coordinator="a:1", processes=8, process=7) == ("explicit", "a:1", 8, 7, ())  # options win
    names = ("gpu09", "gpu10", "gpu12")
    assert place(SLURM) == ("slurm", f"gpu09:{61440 + 70001 % 4096}", 3, 1, names)
    assert place({**SLURM, "SLURM_STEP_NUM_TASKS": "6"})[4] == ()  # two processes on a node: no telling which is where
    assert place({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None  # an interactive step
    pod = {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"}
    assert place(pod) == ("tpu", "", 2, 1, ("t0", "t1"))
    assert place({"TPU_WORKER_HOSTNAMES": "t0"}) is None
    assert place({}, hosts="tpu") == ("tpu", "", 0, 0, ())  # of a pod whose metadata alone has the hosts


@pytest.mark.parametrize("environ, changes, complaint", [
    ({}, {"hosts": "explicit", "coordinator": "a:1"}, "JAXRL_PROCESSES is missing"),
    ({"JAXRL_PROCESSES": "2"}, {}, "this is process 0 of 2 .* without a coordinator: set launch.coordinator"),
    ({"JAXRL_PROCESS": "1"}, {}, "this is process 1 of 1 .* without a coordinator"), ({}, {"process": 1}, "this is process 1 of 1"),
    ({**LOCAL, "JAXRL_COORDINATOR": "node7"}, {}, "launch.coordinator='node7'.*host:port"),
    (LOCAL, {"process": 4}, "launch.process=4 of launch.processes=4"),
    ({}, {"hosts": "slurm"}, "SLURM_STEP_NUM_TASKS is missing"),
    ({"JOB_COMPLETION_INDEX": "0"}, {"hosts": "kubernetes"}, "JAXRL_COORDINATOR is missing"),
    ({**LOCAL, "JAXRL_PROCESSES": "four"}, {}, "launch.hosts=explicit: .*JAXRL_PROCESSES='four' is not a whole number; correct"),
    ({**SLURM, "SLURM_STEP_NUM_TASKS": "3(x2)"}, {}, r"launch.hosts=auto: .*SLURM_STEP_NUM_TASKS='3\(x2\)' is not a whole"),
    ({**SLURM, "SLURM_JOB_ID": ""}, {}, "launch.hosts=slurm: .*SLURM_JOB_ID='' is not a whole"),
    ({**SLURM, "SLURM_STEP_NODELIST": "gpu[a-c]"}, {}, r"SLURM_STEP_NODELIST='gpu\[a-c\]' is no list of nodes"),
    ({**LOCAL, "JOB_COMPLETION_INDEX": "x"}, {}, "launch.hosts=kubernetes: .*JOB_COMPLETION_INDEX='x' is not"),
    ({"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "t1"}, {}, "launch.hosts=tpu: .*TPU_WORKER_ID='t1' is not"),
])
def test_half_a_description_is_refused(environ, changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        find_place(options(**changes), environ)


def test_a_host_of_no_pod_is_told_so():
    code = ("from jaxrl.config.load import default_config; from jaxrl.processes import group; c = default_config(); "
            "c.launch.hosts = 'tpu'; group.start(c)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert "ConfigError: launch.hosts=tpu: jax finds no TPU pod from this host (" in done.stderr


def test_node_lists_of_slurm():
    assert expand_nodes("node1") == ["node1"] and expand_nodes("") == []
    assert expand_nodes("gpu[001-003,007],login") == ["gpu001", "gpu002", "gpu003", "gpu007", "login"]
    assert expand_nodes("a[8-11]x,b2") == ["a8x", "a9x", "a10x", "a11x", "b2"]
    for wrong in ("a[1,7-3]", "a[1-]", "a[x-2]", "a[1,]"):
        with pytest.raises(ConfigError, match="no number and no rising range; correct it, or set launch.hosts=none"):
            expand_nodes(wrong)


def test_the_jobset_gives_what_a_process_reads():
    job = yaml.safe_load((ROOT / "launch" / "jobset.yaml").read_text())
    (replicated,) = [r for r in job["spec"]["replicatedJobs"] if r["name"] == "train"]
    spec = replicated["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    environ = {e["name"]: e.get("value", "") for e in container["env"]} | {"JOB_COMPLETION_INDEX": "3"}
    name, count = f"{job['metadata']['name']}-{replicated['name']}-0", spec["parallelism"]
    assert spec["completions"] == count and spec["completionMode"] == "Indexed"
    assert job["spec"]["failurePolicy"]["maxRestarts"] > 0 and spec["backoffLimit"] == 0
    coordinator = f"{name}-0.{job['metadata']['name']}:8476"
    hosts = tuple(f"{name}-{i}" for i in range(count))
    assert place(environ) == place(environ, hosts="kubernetes") == ("kubernetes", coordinator, count, 3, hosts)
    assert "--config.launch.hosts=kubernetes" in container["args"]
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    (rule,) = spec["podFailurePolicy"]["rules"]  # a config that cannot work is not tried again
    assert rule["action"] == "FailJob" and rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2]}
    assert job["spec"]["failurePolicy"]["rules"] == [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]


def test_the_slurm_script_queues_itself_again(tmp_path):
    """With stand-ins for srun (it runs the one process it is told to) and scontrol, which says what it was asked."""
    script = (ROOT / "launch" / "slurm.sbatch").read_text()
    for line in ("--requeue", "--signal=TERM@300", "--cpus-per-task=64", "--mem=0"):
        assert f"#SBATCH {line}\n" in script
    stand_ins = {"srun": f"echo \"$@\" >> '{tmp_path}/ran'; exit $(cat '{tmp_path}/status')", "scontrol": f"echo $* >> '{tmp_path}/asked'"}
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "summary.json").write_text('{\n "finished": false\n}')
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_NUM_NODES": "2"}

    def again(status, restarts="0", flags=()):
        (tmp_path / "status").write_text(str(status))
        asked = tmp_path / "asked"
        asked.unlink(missing_ok=True)
        done = subprocess.run(["bash", str(ROOT / "launch" / "slurm.sbatch"), "--config=c.py", *flags], capture_output=True, text=True,
                              env={**env, "SLURM_RESTART_COUNT": restarts, "RESTARTS": "2"})
        assert done.returncode == status, done.stderr
        return asked.exists() and asked.read_text() == "requeue 7\n"

    assert not again(0) and again(1) and again(134) and not again(2)
    assert again(1, "1") and not again(1, "2")
    assert again(0, flags=[f"--config.run.dir={tmp_path}"])  # it was asked to stop
    (tmp_path / "summary.json").write_text('{\n "finished": true\n}')
    assert not again(0, flags=[f"--config.run.dir={tmp_path}"])
    assert "-m jaxrl.main --config=c.py --config.launch.hosts=slurm" in (tmp_path / "ran").read_text()


@pytest.mark.parametrize("changes, complaint", [
    ({"launch.wait_seconds": 5.0}, "launch.wait_seconds=5: below rollout.timeout_seconds=3600"),
    ({"launch.processes": 2, "launch.hosts": "none"}, "launch.processes=2 has no effect with launch.hosts=none"),
    ({"launch.process": -2}, "launch.process=-2: a count from 1"),
    ({"launch.heartbeat_seconds": 0.0}, "launch.heartbeat_seconds=0.0: must be above 0"),
    ({"launch.connect_seconds": -1.0}, "launch.connect_seconds=-1.0: must be above 0"),
    ({"profile.processes": (-1,)}, r"profile.processes=\(-1,\): numbers of processes, from 0"),
])
def test_what_cannot_be_meant_is_refused(changes, complaint):
    c = tiny_job.get_config()
    for name, value in changes.items():
        put(c, name, value)
    with pytest.raises(ConfigError, match=complaint):
        common.check(c)


@pytest.mark.full
def test_a_missing_process_is_named():
    port = launch_port()
    with pytest.raises(RunStopped, match=r"2 of 3 processes did not come within launch.connect_seconds=1: 1 \(b\), 2 \(c\)"):
        group.greet_all(Place("slurm", f"127.0.0.1:{port}", 3, 0, ("a", "b", "c")), 1.0)
    with pytest.raises(RunStopped, match=f"process 0 does not answer at 127.0.0.1:{port} within launch.connect_seconds=1"):
        group.greet_all(Place("explicit", f"127.0.0.1:{port}", 3, 1), 1.0)


@pytest.mark.full
def test_a_run_waits_connect_seconds_for_the_others(monkeypatch):
    monkeypatch.setattr(group.jax.config, "update", lambda *changes: None)  # what a job of several processes sets would stay for other tests
    config = default_config()
    config.launch.update({"hosts": "explicit", "coordinator": f"127.0.0.1:{launch_port()}", "processes": 2, "process": 1,
                          "connect_seconds": 1.0})
    with pytest.raises(RunStopped, match="process 0 does not answer at .* within launch.connect_seconds=1"):
        group.start(config)


def test_process_0_listens_where_the_others_look_for_it(monkeypatch):
    listen_address = group.listen_address
    assert listen_address("127.0.0.1") == listen_address("localhost") == "127.0.0.1" and listen_address("127.0.0.2") == "127.0.0.2"
    assert listen_address("192.0.2.1") == ""  # not an address of this machine: something stands before it
    for address in ("127.0.1.1", "192.0.2.1"):  # what /etc/hosts or a name service makes of this host's name
        rows = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *a, rows=rows, **k: rows)
        assert listen_address("gpu-0") == ""
    monkeypatch.undo()
    port = launch_port()
    greeting = threading.Thread(target=group.greet_all, args=(Place("explicit", f"127.0.0.1:{port}", 2, 0), 60.0))
    greeting.start()
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=300).close()
            break
        except ConnectionRefusedError:
            assert greeting.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=300)
    group.greet_all(Place("explicit", f"127.0.0.1:{port}", 2, 1), 60.0).close()
    greeting.join()


def launch_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# -- one process ------------------------------------------------------------------------------------------------------------


def test_alone_nothing_waits_and_nothing_is_sent():
    peers = Peers()
    assert peers.all_gather("here", 3) == [3] and peers.decide("there", lambda: "x") == "x" and peers.first
    assert exchange.gather(peers, "bytes", b"abc") == [b"abc"]
    exchange.check_equal(peers, {})
    peers.request_stop()
    peers.report(ValueError("unheard"))
    error = ValueError("gloo: connection closed")
    assert peers.explain(error) is error and peers.leave(0) is None


def test_results_survive_the_journey():
    rng = np.random.default_rng(0)

    def result(name, n, support):
        columns = [rng.integers(0, 9, n).astype(np.int32), *rng.normal(size=(2, n)).astype(np.float32), np.zeros(n, np.int32)]
        return Result(name, *columns, "stop", 2**32 - 1, support)

    for width in (None, 0, 3):
        sent = [result(f"train/0/{i}/0", n, None if width is None else rng.integers(0, 9, (n, width)).astype(np.int32))
                for i, n in enumerate((4, 0, 7))]
        meta = {"texts": ["ä\n", "", "x"], "greedy": [[1, 0.1 + 0.2]]}
        back, found = results_from_bytes(results_to_bytes(sent, meta))
        assert found == meta
        for a, b in zip(sent, back, strict=True):
            assert (a.id, a.finish, a.seed) == (b.id, b.finish, b.seed)
            for column in ("tokens", "logprobs", "log_kept_mass", "versions", "support"):
                x, y = getattr(a, column), getattr(b, column)
                assert (x is None and y is None) or (x.dtype == y.dtype and np.array_equal(x, y))
    assert results_from_bytes(results_to_bytes([], [1])) == ([], [1])


def test_arrays_of_any_shape_survive_the_journey():
    sent = {"scalar": np.array(1.5), "turned": np.arange(6).reshape(2, 3).T, "none": np.zeros((0, 2))}
    _, back = exchange.decode(exchange.encode({}, sent))
    assert all(back[name].shape == a.shape and np.array_equal(back[name], a) for name, a in sent.items())


def test_every_group_has_one_owner_and_slots_are_shared():
    assert sorted(p for i in range(3) for p in range(10) if exchange.owner_process(p, 3) == i) == list(range(10))
    c = default_config()
    c.rollout.slots = 100
    assert [from_config(c, 2, 1, processes).slots for processes in (1, 2, 4)] == [100, 50, 26]


def test_facts_leave_out_what_may_differ_between_hosts():
    config = {"launch": {"process": 1, "wait_seconds": 3.0}, "rollout": {"vllm": {"port": 7, "replicas": 1}}, "user": {}}
    found = exchange.facts(config)
    assert {"launch.wait_seconds", "rollout.vllm.replicas", "user", "version of jax", "code of jaxrl"} <= set(found)
    assert not {"launch.process", "rollout.vllm.port"} & set(found)


def test_servers_are_dealt_out():
    urls = ("http://a:1/", "http://b:1", "http://c:1")
    assert [servers_of_process(urls, Peers(i, 2)) for i in range(2)] == [["http://a:1", "http://c:1"], ["http://b:1"]]
    with pytest.raises(ConfigError, match="rollout.servers=.*3 for 4 processes"):
        servers_of_process(urls, Peers(0, 4))


def test_a_planned_fault_may_name_its_process():
    plan = ("update.raise@step=3,process=1",)
    Faults(plan, 0).fire("update", 3)
    with pytest.raises(RuntimeError, match="planned fault"):
        Faults(plan, 1).fire("update", 3)


def test_other_processes_write_and_show_nothing(tmp_path, capsys):
    c = default_config()
    c.log.console = "plain"
    t = Telemetry(tmp_path / "run", c, 10, silent=True)
    t.step(1, {"reward/mean": 1.0, "optim/grad_norm": 0.0, "rollout/zero_signal_fraction": 1.0})
    t.rollouts(1, [{"a": 1}])
    t.print("hello")
    assert t.summary({"steps": 1}) == {"steps": 1} and t.read_rollouts(1) == []
    t.close()
    assert not (tmp_path / "run").exists() and capsys.readouterr() == ("", "")


def test_only_the_processes_asked_for_are_traced():
    c = default_config()
    c.profile.steps = (2, 3)
    assert [traced_steps(c.profile, i) for i in range(3)] == [(2, 3), (), ()]
    c.profile.processes = (1, 2)
    assert [traced_steps(c.profile, i) for i in range(3)] == [(), (2, 3), (2, 3)]


def test_other_processes_warn_under_their_name():
    code = ("import logging\nfrom jaxrl.telemetry import setup_logging\nsetup_logging('info', 'process 3 on b')\n"
            "setup_logging('info')\nlog = logging.getLogger('jaxrl')\nlog.info('no')\nlog.warning('look')\nlog.error('fell')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.stderr == "jaxrl process 3 on b: warning: look\njaxrl process 3 on b: error: fell\n"


# -- the launcher ---------------------------------------------------------------------------------------------------------


def test_what_the_launcher_gives_each_process(monkeypatch):
    opts, rest = launch.parse(["--processes=2", "--devices=3", "--cpus=1", "--env=A=b=c", "--", "--config=x.py"])
    assert rest == ["--config=x.py"]
    monkeypatch.setattr(launch.glob, "glob", lambda pattern: [])
    envs = launch.environments(opts, 4000, {})
    assert [find_place(options(), e)[:4] for e in envs] == [("explicit", "127.0.0.1:4000", 2, i) for i in range(2)]
    assert all(e["JAX_NUM_CPU_DEVICES"] == "3" and e["A"] == "b=c" and e["OMP_NUM_THREADS"] == "1" for e in envs)
    monkeypatch.setattr(launch.glob, "glob", lambda pattern: [f"/dev/nvidia{i}" for i in range(8)])
    assert [e["CUDA_VISIBLE_DEVICES"] for e in launch.environments(opts, 4000, {})] == ["0,1,2", "3,4,5"]
    assert "CUDA_VISIBLE_DEVICES" not in launch.environments(opts, 4000, {"JAX_PLATFORMS": "cpu"})[0]
    with pytest.raises(SystemExit, match="there are 4 GPUs"):
        launch.environments(opts, 4000, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    for named, each in (("4,5", ["4", "5"]), (" 6, 7,-1,3", ["6", "7"]), ("-1", ["-1", "-1"]), ("", ["", ""])):  # of the user, for all
        opts, _ = launch.parse(["--processes=2", f"--env=CUDA_VISIBLE_DEVICES={named}", "--", "--config=x.py"])
        envs = launch.environments(opts, 4000, {"CUDA_VISIBLE_DEVICES": "0,1,2"})
        assert [e["CUDA_VISIBLE_DEVICES"] for e in envs] == each and ("JAX_NUM_CPU_DEVICES" in envs[0]) == (named in ("-1", ""))


@pytest.mark.parametrize("flags", [["--processes=0", "--", "x"], ["--processes=2"], ["--processes=2", "--env=A", "--", "x"]])
def test_flags_that_the_launcher_refuses(flags, capsys):
    with pytest.raises(SystemExit):
        launch.parse(flags)
    assert "error" in capsys.readouterr().err


LIVES = """
import os, pathlib, signal, sys, time
me, folder = os.environ["JAXRL_PROCESS"], pathlib.Path(sys.argv[1])
tries = len(list(folder.glob(f"try_{me}_*")))
(folder / f"try_{me}_{tries}").write_text(os.environ["JAXRL_COORDINATOR"])
print(f"I am {me}\\n", end="", flush=True)
if sys.argv[2] == "dies" and tries == 0:
    if me == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
if sys.argv[2] == "refuses":
    sys.exit(2)
if sys.argv[2] == "waits":
    signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))
    (folder / f"ready_{me}").touch()
    time.sleep(600)
"""


def launched(tmp_path, what, *flags):
    (tmp_path / "lives.py").write_text(LIVES)
    return [sys.executable, "-m", "jaxrl.launch", "--processes=2", *flags, "--", str(tmp_path / "lives.py"), str(tmp_path), what]


def test_the_launcher_says_who_died_first_and_tries_again(tmp_path):
    done = subprocess.run(launched(tmp_path, "dies", "--retries=1", "--grace=0.5"), capture_output=True, text=True, env=environment(),
                          timeout=300)
    assert done.returncode == 0
    assert re.search(r"process 1 of 2 \(pid \d+\) failed first: killed by SIGKILL", done.stderr)
    assert "still run --grace=0.5 s after" in done.stderr and "restarting from the latest checkpoint (1 of" in done.stderr
    assert "[1] I am 1\n" in done.stdout and "\nI am 0\n" in "\n" + done.stdout
    ports = {f.name: f.read_text() for f in tmp_path.glob("try_*")}
    assert sorted(ports) == ["try_0_0", "try_0_1", "try_1_0", "try_1_1"] and ports["try_0_0"] == ports["try_1_0"]


def test_the_launcher_does_not_repeat_what_cannot_work(tmp_path):
    done = subprocess.run(launched(tmp_path, "refuses", "--retries=3"), capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 2 and "again" not in done.stderr


def test_the_launcher_passes_a_stop_on(tmp_path):
    process = subprocess.Popen(launched(tmp_path, "waits", "--retries=3"), env=environment(), stderr=subprocess.PIPE, text=True)
    while len(list(tmp_path.glob("ready_*"))) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 0 and "again" not in process.stderr.read()


# -- processes that talk ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What two processes of two devices each say to the questions of hosts_peers.py."""
    folder = tmp_path_factory.mktemp("peers")
    command = [sys.executable, "-m", "jaxrl.launch", "--processes=2", "--devices=2", "--", str(ROOT / "tests" / "helpers" / "hosts_peers.py"),
               str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600)
    assert done.returncode == 3, done.stdout + done.stderr
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


@pytest.mark.slow
def test_processes_meet_and_gather(told):
    host = told[0]["who"][2].removeprefix("process 1 on ")
    assert host and [t["who"] for t in told] == [[i, 2, f"process 1 on {host}", 2, 4] for i in range(2)]
    for answers in told:
        assert answers["meet"] == [{"mine": 0}, {"mine": 1}] and answers["decide"] == ["by", 0]
        assert answers["gather"] == [[3, 1, 1, 1], [exchange.CHUNK + 5, 2, 2, 1]] and answers["gather nothing"] == [0, 0]
        assert answers["stop"] is True and answers["still together"] == [0, 1]
        assert answers["another address"] == "refused"


def test_processes_that_disagree_are_named_and_do_not_hang(told):
    for answers in told:
        assert "version of jax: 0.10.2 on process 1 on " in answers["other facts"] and "optimizer" not in answers["other facts"]
        assert re.search("process 0 on .* is at 'step 3, weights 2: the answers', process 1 on .* at 'step 4,", answers["other places"])
    assert told[0]["wait"] == 4000.0  # launch.wait_seconds
    assert re.match("process 1 on .* did not reach 'the answers of step 7' within launch.wait_seconds=1", told[0]["late"])


def test_arrays_go_where_they_belong(told):
    for answers in told:
        assert answers["put"] == [False, [[2, 4], [2, 4]], True]
        assert answers["local"] == [[1, 1, 1, 1, 2], True, "bfloat16", True, True, "P(None, 'tp')"]
        assert "mesh.tp=4" in answers["crossing"] and "rollout.engine=vllm" in answers["crossing"]
        assert answers["crossing copy"] == [[2, 1, 1, 1, 1], True]


@pytest.mark.parametrize("dies, how", [
    (1, "kill9"), pytest.param(1, "raise", marks=pytest.mark.slow), pytest.param(0, "kill9", marks=pytest.mark.slow),
    pytest.param(0, "raise", marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_the_death_of_one_ends_the_others_and_names_it(tmp_path, dies, how):
    """By themselves, also one that waits where nothing can wake it. (Of process 0 the others
    hear from jax; the launcher says it plainly.)"""
    heartbeat_seconds = 3.0
    command = [sys.executable, "-m", "jaxrl.launch", "--processes=2", "--grace=60", "--", str(ROOT / "tests" / "helpers" / "hosts_dies.py"),
               str(dies), how, str(heartbeat_seconds), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600)
    said = done.stdout + done.stderr
    if how == "raise":
        assert f"process {dies} on " in said and "gave up: FaultError: planned fault" in said and done.returncode == 1
    elif dies:
        assert re.search(r"process 1 on .* is gone: no sign of life for 3 s", said)
        assert "process 1 of 2 (pid" in said and "killed by SIGKILL" in said and done.returncode == 137
    else:
        assert "leader" in said and re.search(r"process 0 of 2 \(pid \d+\) failed first: killed by SIGKILL", said)
    assert (tmp_path / "died").exists() and "still run" not in said  # the others ended within --grace, by themselves


def test_connections_that_say_nothing_keep_nobody_apart():
    """More of them than the port holds at once, before and beside a greeting; one that says something else is closed."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    met = []
    first = threading.Thread(target=lambda: met.append(group.greet_all(Place("explicit", f"127.0.0.1:{port}", 2, 0), 120.0)))
    first.start()
    silent = []
    while len(silent) < 140:
        try:
            silent.append(socket.create_connection(("127.0.0.1", port)))
        except OSError:
            time.sleep(0.01)  # it does not listen yet
    silent[-1].sendall(b"hello")
    assert silent[-1].recv(10) == b""
    group.greet_all(Place("explicit", f"127.0.0.1:{port}", 2, 1), 120.0).close()
    first.join(120.0)
    met[0].close()
    for connection in silent:
        connection.close()


# -- lost between the greeting and jax --------------------------------------------------------------------------------------


def gathering(port, processes, seconds=600.0):
    """(the thread of process 0, [what became of it])."""
    out = []

    def run():
        try:
            out.append(group.greet_all(Place("explicit", f"127.0.0.1:{port}", processes, 0), seconds))
        except RunStopped as e:
            out.append(str(e))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, out


def greet(port, process, processes, host="there"):
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=300.0)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)  # it does not listen yet
    connection.sendall(f"jaxrl {process} {processes} {host}".encode())
    return connection


def test_a_process_that_came_and_went_is_named_to_all(monkeypatch):
    monkeypatch.setattr(greeting, "RETURN_SECONDS", 0.5)
    port = launch_port()
    first, out = gathering(port, 4)
    waits = greet(port, 2, 4)
    greet(port, 1, 4, "gpu7").close()
    line = waits.makefile().read()
    first.join()
    assert out[0].startswith("process 1 (gpu7) was lost while the processes connected") and line == f"stop {out[0]}\n"


def test_a_process_that_comes_again_is_one_process():
    """After its connection broke, or while an earlier one is still open: that one is closed."""
    port = launch_port()
    first, out = gathering(port, 3)
    greet(port, 1, 3).close()
    earlier = greet(port, 1, 3)
    again = greet(port, 1, 3)
    assert earlier.recv(10) == b""
    other = group.greet_all(Place("explicit", f"127.0.0.1:{port}", 3, 2), 600.0)
    first.join()
    assert again.recv(10) == b"go\n" and len(out[0]._connections) == 2
    for one in (other, out[0], again):
        one.close()


DIES = """
import os, sys
from jaxrl.config.load import default_config
from jaxrl.processes import group
me, dies, count, port = map(int, sys.argv[1:])
if me == dies:  # killed after its greeting, while jax would join it
    joining = group.greet_all(group.Place("explicit", f"127.0.0.1:{port}", count, me), 600.0)
    os.kill(os.getpid(), 9)
config = default_config()
config.launch.update({"hosts": "explicit", "coordinator": f"127.0.0.1:{port}", "processes": count, "process": me,
                      "connect_seconds": 600.0})
group.start(config)
print("started")
"""


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, nightly(1)])
def test_who_is_killed_while_jax_joins_them_is_named_by_the_others(dies):
    """Long before launch.connect_seconds, and by more than jax's own words."""
    count, port = 3, launch_port()
    started = [subprocess.Popen([sys.executable, "-c", DIES, str(i), str(dies), str(count), str(port)],
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()) for i in range(count)]
    said = [p.communicate(timeout=300)[0] for p in started]
    for i in set(range(count)) - {dies}:
        assert re.search(rf"jaxrl: stopped: process {dies} \(.+\) was lost while the processes connected", said[i]), said[i]
        assert "started" not in said[i] and started[i].returncode == 1
    assert started[dies].returncode == -9
