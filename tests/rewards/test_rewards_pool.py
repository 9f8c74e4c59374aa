"""The pool of reward workers: real processes, real kills."""

import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.tiers import first_cases

from jaxrl.config.load import default_config
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.rewards import RewardFailure, RewardItem, RewardPool
from jaxrl.rewards import workers as workers_module
from jaxrl.rewards.background import BackgroundScorer
from jaxrl.rl.evaluation import stop_overdue

FUNCTIONS = textwrap.dedent('''
    import asyncio, collections, itertools, multiprocessing, os, subprocess, sys, time

    def imports(prompt, completion):
        heavy = [m for m in ("jax", "jaxlib", "flax", "numpy", "pytest", "ml_collections") if m in sys.modules]
        return 1.0, {"heavy": len(heavy), "pid": os.getpid(), "parent": os.getppid()}

    def equals(prompt, completion, answer):
        return completion == answer

    def odd(prompt, completion, n):
        """A function with every kind of end."""
        if n == "none": return None
        if n == "nan": return float("nan")
        if n == "inf": return float("inf")
        if n == "text": return "3"
        if n == "raise": raise ValueError("no such thing")
        if n == "exit": sys.exit(3)
        if n == "die": os._exit(7)
        if n == "crash": os.kill(os.getpid(), 11)
        if n == "sleep": time.sleep(600)
        if n == "spin": collections.deque(itertools.count(), maxlen=0)  # C loop, never lets go of the interpreter
        if n == "print": print("hello from a worker", n); sys.stdout.write("{not json}\\\\n")
        if n == "input": return float(sys.stdin.read() == "")
        if n == "term": os.kill(os.getpid(), 15); time.sleep(0.01)
        if n == "bool": return True
        if n == "metrics": return 0.5, {"depth": 3}
        if n == "badmetric": return 0.5, {"depth": "deep"}
        return 2.0

    def slow_first(prompt, completion, n):
        time.sleep(0.2 if n == 0 else 0.0)
        return float(n)

    def naps(prompt, completion, n):
        time.sleep(n)
        return 1.0

    def knows(prompt, completion, token_ids, finish, group, sample, user, **columns):
        return (len(token_ids) + 10 * (finish == "length") + 100 * group + 1000 * sample + user["bonus"]
                + 0.5 * ("kind" in columns))

    def ranks(prompts, completions, answer, group):
        assert len(prompts) == len(completions) == len(answer) == len(group)
        return [float(sorted(completions).index(c)) for c in completions]

    def short(prompts, completions, **columns):
        return [1.0] * (len(completions) - 1)

    def scalar(prompts, completions, **columns):
        return 1.0

    def mixed(prompts, completions, **columns):
        return [None, 1.0, "x", (2.0, {"m": 4})][:len(completions)]

    inside = 0
    async def together(prompt, completion):
        global inside
        inside += 1
        while inside < 4:
            await asyncio.sleep(0.001)
        return 1.0

    async def waits(prompt, completion, n):
        await asyncio.sleep(600 if n == 1 else 0)
        return float(n)

    async def blocks(prompt, completion, n):
        await asyncio.sleep(0)
        if n == 1:
            collections.deque(itertools.count(), maxlen=0)
        return float(n)

    async def all_at_once(prompts, completions, **columns):
        await asyncio.sleep(0)
        return [float(len(c)) for c in completions]

    def counted(prompt, completion, log):
        with open(log, "a") as f:
            f.write(completion + "\\n")
        return float(len(completion))

    def child(prompt, completion, n, pidfile):
        """Leaves a process in a session of its own, whose parent is gone, and itself in one of two ways."""
        subprocess.run(["sh", "-c", f"sleep 600 & echo $! > '{pidfile}'"], start_new_session=True, stdout=subprocess.DEVNULL)
        if n == "die":
            os._exit(1)
        time.sleep(600)

    def grows(prompt, completion, n):
        if n == "child":
            subprocess.run([sys.executable, "-c", "import time; x = b'x' * (300 << 20); time.sleep(600)"])
        held = b"x" * (300 << 20) if n == "self" else b""
        time.sleep(600 if n else 0)
        return 1.0

    def forks(prompt, completion, n):
        os.fork()
        return float(n)

    def shares_out(prompt, completion, n):
        with multiprocessing.get_context("fork").Pool(2) as workers:
            return float(max(workers.map(abs, [n, n])))

    def intrudes(prompt, completion, n):
        """Writes to descriptors that it did not open, as careless clean-up code does."""
        for fd in range(3, 12) if n else ():
            try:
                os.write(fd, b'{"value": 1.0, "outcome": "ok", "metrics": {}}\\n' if n == 1 else b"x" * 10 + bytes(10) + b"\\n")
            except OSError:
                pass
        if n == 3:
            os.closerange(3, 40)
        return float(n)

    def strange(prompt, completion, n):
        deep = []
        for _ in range(100_000):
            deep = [deep]
        class Shy:
            def __str__(self): raise ValueError("no")
        return {"huge": 10**5000, "hugelist": [10**5000], "deep": deep, "shy": Shy(), "half": "a\\ud800",
                "name": (1.0, {"\\ud800": 2.0}), "metric": (1.0, {"m": 10**5000})}[n]

    def strange_batch(prompts, completions, n):
        return [strange("", "", k) for k in n]

    def sees(prompt, completion, n):
        return float(os.environ.get(n, -1))

    def insists(prompt, completion, n):
        return float(os.environ[n])

    def vanishes(prompt, completion):
        os.unlink(__file__)
        os._exit(1)

    def needs(prompt, completion, target):
        return 1.0

    def positional(question, response, /, answer):
        return float(response == answer)

    def patient(prompt, completion, n):
        time.sleep(2.5)
        return 1.0

    async def abides(prompt, completion, n):
        await asyncio.sleep(2.5)
        return 1.0

    def hasty(prompt, completion, n):
        time.sleep(n)
        return 1.0

    patient.seconds, abides.seconds, hasty.seconds = 300.0, 300.0, 0.5

    def only_completion(completion, answer):
        return float(completion == answer)
''')


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def pool(source):
    """pool('name', ..., option=value) -> RewardPool over functions of the file; closed at the end."""
    made = []

    def make(*names, functions=None, user=None, **options):
        config = default_config()
        config.reward.functions = tuple(f"{source}:{n}" if n in FUNCTIONS and n != "format" else n for n in names)
        config.reward.max_failed_fraction = 1.0
        for key, value in options.items():
            config.reward[key] = value
        for key, value in (user or {}).items():
            config.user[key] = value
        made.append(RewardPool(config, functions=functions))
        return made[-1]

    yield make
    for p in made:
        p.close()


def items(*values, **columns):
    return [RewardItem("q", f"c{k}", {"n": v, **columns}) for k, v in enumerate(values)]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # before and after the file was opened
        return True


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def wait_until(condition, seconds=300.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.02)


def test_workers_are_spawned_and_hold_no_jax(pool):
    result = pool("imports").score(items(*range(8)))
    metrics = [m["imports"] for m in result.item_metrics]
    assert all(m["heavy"] == 0 for m in metrics)
    assert all(m["pid"] != os.getpid() and parent_of(parent_of(int(m["pid"]))) == os.getpid() for m in metrics)


def test_every_end_has_its_outcome(pool):
    p = pool("odd", timeout_seconds=300.0)
    kinds = ["none", "nan", "inf", "text", "raise", "exit", "die", "crash", "print", "input", "bool",
             "metrics", "badmetric", "term"]
    result = p.score(items(*kinds))
    outcome = {k: o["odd"] for k, o in zip(kinds, result.outcomes, strict=True)}
    part = dict(zip(kinds, result.parts["odd"], strict=True))
    assert {k for k in kinds if outcome[k] == "ok"} == {"print", "input", "bool", "metrics", "term"}
    assert (part["print"], part["input"], part["bool"], part["metrics"], part["term"]) == (2.0, 1.0, 1.0, 0.5, 2.0)
    assert all(math.isnan(part[k]) for k in kinds if outcome[k] != "ok")
    assert outcome["none"] == "none" and outcome["nan"] == outcome["inf"] == "nan"
    assert "returned str '3'" in outcome["text"] and "depth" in outcome["badmetric"]
    assert "ValueError: no such thing (my_rewards.py:" in outcome["raise"] and "SystemExit" in outcome["exit"]
    assert "exited with status 7" in outcome["die"] and "SIGSEGV" in outcome["crash"]
    m = result.metrics
    assert m["reward/none_fraction"] == 1 / 14 and m["reward/nan_fraction"] == 2 / 14
    assert m["reward/timeout_fraction"] == 0 and m["reward/error_fraction"] == 6 / 14
    assert m["reward/failed_fraction"] == 8 / 14 and m["reward/absent_fraction"] == 9 / 14
    assert m["reward/odd/depth"] == 3.0
    again = p.score(items("plain", "bool"))  # after all those kills
    np.testing.assert_array_equal(again.total, [2.0, 1.0])


@pytest.mark.nightly
def test_what_hangs_is_late_and_nothing_else(pool):
    p = pool("odd", timeout_seconds=20.0)
    result = p.score(items("sleep", "plain", "spin", "bool"))
    assert [o["odd"] for o in result.outcomes] == ["timeout", "ok", "timeout", "ok"]
    assert result.metrics["reward/timeout_fraction"] == result.metrics["reward/failed_fraction"] == 2 / 4
    np.testing.assert_array_equal(p.score(items("plain", "bool")).total, [2.0, 1.0])


def test_the_limit_of_an_answers_reward_is_the_configs(pool):
    """Ten minutes are too long under a limit of one second."""
    assert pool("naps", timeout_seconds=1.0).score(items(600.0)).outcomes == [{"naps": "timeout"}]


@pytest.mark.parametrize("functions, n, limit, outcomes", [
    (("odd", "patient", "abides"), 0, 1.5, ("ok", "ok", "ok")), (("slow_first", "hasty"), 20, 300.0, ("ok", "timeout"))])
def test_every_job_of_a_task_has_the_limit_of_its_own_function(pool, functions, n, limit, outcomes):
    """Whichever function the task begins with; without a limit of its own it has reward.timeout_seconds."""
    p = pool(*functions, workers=1, timeout_seconds=limit)
    p.wait()
    p._workers._seconds_per_job = 1e-6  # all jobs of functions that are called one after the other are one task
    assert p.score(items(n)).outcomes == [dict(zip(functions, outcomes, strict=True))]


@pytest.mark.full
def test_a_catastrophic_format_pattern_is_a_wrong_answer(pool):
    """After two seconds of processor time."""
    p = pool("format", format_pattern=r"(a+)+b", timeout_seconds=300.0)
    result = p.score([RewardItem("q", "aab"), RewardItem("q", "a" * 64), RewardItem("q", "x")])
    np.testing.assert_array_equal(result.parts["format"], [1.0, 0.0, 0.0])
    assert [o["format"] for o in result.outcomes] == ["ok", "ok", "ok"]


def test_results_keep_the_order_of_the_items(pool):
    result = pool("slow_first").score(items(*range(64)))
    np.testing.assert_array_equal(result.total, np.arange(64.0))


@pytest.mark.full
def test_the_clock_starts_with_the_scoring_not_with_the_queue(pool):
    p = pool("naps", workers=1, timeout_seconds=12.0)
    for _ in range(2):  # 16 s of work for one worker: handed out one by one, and at once when it has got fast
        result = p.score(items(*[2.0] * 8))
        assert [o["naps"] for o in result.outcomes] == ["ok"] * 8
        p.score(items(*[0.0] * 64))


@pytest.mark.full
def test_slow_imports_do_not_count(pool, tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(25)\ndef f(prompt, completion):\n    return 1.0\n")
    result = pool(f"{tmp_path / 'slow.py'}:f", timeout_seconds=20.0).score(items(1, 2))
    np.testing.assert_array_equal(result.total, [1.0, 1.0])


def test_functions_get_what_they_name(pool):
    item = RewardItem("q", "c", {"kind": "k", "answer": "c"}, finish="length", group=np.int64(3), sample=2,
                      token_ids=np.arange(7))
    p = pool("knows", "positional", "only_completion", user={"bonus": 0.25})
    result = p.score([item])
    assert result.parts["knows"][0] == 7 + 10 + 300 + 2000 + 0.25 + 0.5
    assert result.parts["positional"][0] == result.parts["only_completion"][0] == 1.0


def test_missing_argument_names_the_columns(pool):
    outcome = pool("needs").score(items(1, answer="a")).outcomes[0]["needs"]
    assert "'target'" in outcome and "n, answer" in outcome


def test_batched_functions(pool):
    p = pool("ranks", "mixed", "all_at_once")
    result = p.score([RewardItem("q", c, {"answer": "x"}) for c in ("bb", "d", "a", "ccc")])
    np.testing.assert_array_equal(result.parts["ranks"], [1, 3, 0, 2])
    np.testing.assert_array_equal(result.parts["all_at_once"], [2, 1, 1, 3])
    np.testing.assert_array_equal(result.parts["mixed"], [np.nan, 1.0, np.nan, 2.0])
    outcomes = [o["mixed"] for o in result.outcomes]
    assert outcomes[0] == "none" and outcomes[1] == outcomes[3] == "ok"
    assert "item 2" in outcomes[2] and "str" in outcomes[2]
    assert result.metrics["reward/mixed/m"] == 4.0


@pytest.mark.parametrize("name, text", [("short", "returned 3 scores for 4 completions"),
                                        ("scalar", "returned float, expected a list of 4 scores")])
def test_wrong_batch_results_are_errors(pool, name, text):
    with pytest.raises(RewardFailure, match=f"'{name}' {text}"):
        pool(name).score(items(*range(4)))


def test_async_functions_run_together(pool):
    result = pool("together", workers=1, timeout_seconds=300.0).score(items(*range(4)))
    np.testing.assert_array_equal(result.total, [1.0] * 4)


@pytest.mark.full
@first_cases(1, "name", ["waits", "blocks"], full=0)
def test_async_timeouts_hit_the_guilty_one_only(pool, name):
    result = pool(name, timeout_seconds=15.0).score(items(*range(6)))
    assert [o[name] for o in result.outcomes] == ["ok", "timeout", "ok", "ok", "ok", "ok"]
    np.testing.assert_array_equal(result.parts[name], [0, np.nan, 2, 3, 4, 5])


def test_a_reward_that_forks_scores_its_own_answers(pool):
    """The children come back from the function, too; and a worker's tasks and replies are not theirs."""
    p = pool("forks", "shares_out", timeout_seconds=300.0)
    for _ in range(2):
        result = p.score(items(*range(7)))
        for name in ("forks", "shares_out"):
            np.testing.assert_array_equal(result.parts[name], np.arange(7.0))


@pytest.mark.full
def test_foreign_text_among_the_replies_is_no_score(pool):
    result = pool("intrudes").score(items(0, 1, 0, 2, 0, 3, 0))
    outcomes = [o["intrudes"] for o in result.outcomes]
    assert [o == "ok" for o in outcomes] == [True, False] * 3 + [True]
    assert all("file descriptors that it did not open" in o for o in outcomes if o != "ok")
    np.testing.assert_array_equal(result.parts["intrudes"][::2], [0.0] * 4)


def test_results_that_cannot_be_sent_are_errors_of_their_item(pool):
    kinds = ["huge", "hugelist", "deep", "shy", "half", "name", "metric"]
    result = pool("strange", "strange_batch").score(items(*kinds))
    for name in ("strange", "strange_batch"):
        outcome = {k: o[name] for k, o in zip(kinds, result.outcomes, strict=True)}
        assert [k for k in kinds if outcome[k] == "ok"] == ["name"]
        assert "too large" in outcome["huge"] and "too large" in outcome["metric"] and "returned list" in outcome["deep"]
        assert "ud800" in outcome["half"] and all(str(o).isascii() for o in outcome.values())


@pytest.mark.full
def test_weights_absent_parts_and_column(pool):
    p = pool("exact", "boxed", weights=(2.0, 0.5))
    r = p.score([RewardItem("q", "7", {"answer": "7"}), RewardItem("q", r"\boxed{7}", {"answer": 7}),
                 RewardItem("q", "7", {"answer": None})])
    np.testing.assert_array_equal(r.total, [2.0, 0.5, np.nan])
    p = pool("exact", "boxed", weights=(2.0, 0.5), column="verifier")
    rows = [("exact", 2.0), ("boxed", 0.0), (["boxed", "exact"], 2.0), ("exact, boxed", 2.0)]
    r = p.score([RewardItem("q", "7", {"answer": "7", "verifier": v}) for v, _ in rows])
    np.testing.assert_array_equal(r.total, [t for _, t in rows])
    assert [sorted(o) for o in r.outcomes] == [["exact"], ["boxed"], ["boxed", "exact"], ["boxed", "exact"]]
    with pytest.raises(ConfigError, match="item 1: reward.column='verifier' holds 'math'.*exact, boxed"):
        p.score([RewardItem("q", "7", {"answer": "7", "verifier": v}) for v in ("exact", "math")])


def test_no_functions_is_no_score(pool):
    result = pool().score(items(1, 2))
    assert np.isnan(result.total).all() and result.parts == {} and result.metrics["reward/failed_fraction"] == 0.0


@pytest.mark.full
def test_recorded_outcomes_are_taken_verbatim(pool, tmp_path):
    log = tmp_path / "calls"
    p = pool("counted", "odd", timeout_seconds=20.0)
    batch = items("metrics", "sleep", "raise", "plain", log=str(log))
    first = p.score(batch)
    assert first.outcomes[1]["odd"] == "timeout"
    calm = items("plain", "plain", "plain", "plain", log=str(log))  # would all be fine now
    kept = first.records()
    second = p.score(calm, recorded=[*kept[:3], None])
    assert second.outcomes == first.outcomes and second.item_metrics == first.item_metrics
    np.testing.assert_array_equal(second.total, first.total)
    assert second.metrics == first.metrics
    assert sorted(log.read_text().split()) == ["c0", "c1", "c2", "c3", "c3"]


@pytest.mark.full
def test_too_many_failures_stop_the_run(pool):
    p = pool("odd", "exact", max_failed_fraction=0.25, timeout_seconds=20.0)
    assert p.score(items("raise", 1, 1, 1, answer="x")).metrics["reward/failed_fraction"] == 0.25
    with pytest.raises(RewardFailure) as e:
        p.score(items("raise", "raise", "raise", 1, answer="x"))
    for text in ("max_failed_fraction=0.25", "odd: error: ValueError: no such thing", "None"):
        assert text in str(e.value)
    with pytest.raises(RewardFailure, match="reward.timeout_seconds=20 "):
        p.score(items("sleep", "sleep", 1, 1, answer="x"))
    with pytest.raises(RewardFailure):
        late = {"parts": {}, "outcomes": {"odd": "timeout"}}
        p.score(items(1, 1, 1, 1, answer="x"), recorded=[late, late, None, None])
    np.testing.assert_array_equal(p.score(items(1, 1, answer="x")).parts["odd"], [2.0, 2.0])


def test_prints_go_to_the_log(pool, caplog):
    """Step after step, and without the zeros of a file that was emptied while a worker held its place in it."""
    p = pool("odd", workers=1)
    with caplog.at_level("INFO", logger="jaxrl.rewards"):
        for _ in range(3):
            p.score(items("print"))
    assert caplog.text.count("hello from a worker") == 3 and caplog.text.count("\0") == 0


@pytest.mark.full
def test_slow_rewards_and_timeouts_are_said_and_prints_are_bounded(pool, caplog, monkeypatch):
    monkeypatch.setattr(workers_module, "PROGRESS_SECONDS", 0.3)
    monkeypatch.setattr(workers_module, "PRINTED_BYTES", 4)
    p, sizes = pool("odd", "naps", timeout_seconds=20.0), []
    with caplog.at_level("INFO", logger="jaxrl.rewards"):
        for _ in range(2):
            p.score([RewardItem("q", "c", {"n": "print"}), RewardItem("q", "c", {"n": 600.0})],
                    stop=lambda: sizes.append(os.fstat(p._workers.printed.file.fileno()).st_size))
    assert "rewards: " in caplog.text and " done after " in caplog.text and set(sizes) == {0}
    assert caplog.text.count("calls exceeded reward.timeout_seconds=20 (naps)") == 1


def test_a_stop_leaves_rewards_alone(pool):
    """A training step's at once; an evaluation's after run.stop_seconds."""
    asked = []
    assert pool("naps", timeout_seconds=300.0).score(items(200.0), stop=lambda: asked.append(1) or len(asked) > 1) is None
    group, begun, done = SimpleNamespace(position=0), threading.Event(), threading.Event()
    scorer = BackgroundScorer(lambda groups: begun.set() or done.wait())
    scorer.add(group)
    begun.wait()
    assert not scorer.wait([group], stop=lambda: True)
    left = SimpleNamespace(position=1)
    scorer.add(left)
    threading.Timer(0.1, scorer.close).start()
    with pytest.raises(RuntimeError, match="closed before it scored these groups"):
        scorer.wait([left])
    assert not scorer.wait([left], stop=lambda: True)
    done.set()
    assert scorer.wait([group])
    run = SimpleNamespace(spec=default_config(), interrupted=lambda: stopped)
    stopped, run.spec.run.stop_seconds = False, 0.0
    over = stop_overdue(run)
    assert not over()
    stopped = True
    assert over()
    run.spec.run.stop_seconds = 1e6
    assert not over() and not stop_overdue(run)()


@pytest.mark.full
def test_a_number_as_reference_answer_that_scores_nothing_is_said(pool, caplog):
    """"8" == 8 is False: such a reward gave 0 to everything, and the first sign was a flat curve."""
    pool("equals").trial([RewardItem("q", "8", {"answer": "8"})])
    pool("equals").trial([RewardItem("q", "8", {"answer": [9]})] * 2 + [RewardItem("q", "8", {"answer": "8"})])
    assert not caplog.text
    pool("equals").trial([RewardItem("q", "8", {"answer": 8})] * 2)
    assert "reward equals gives 0 to the reference answers themselves: 8 is int and never equals" in caplog.text


def test_workers_see_only_the_environment_they_are_given(pool, monkeypatch, caplog):
    for name in ("A_SECRET", "A_NUMBER", "LC_NUMBER"):
        monkeypatch.setenv(name, "3")
    names = items("A_SECRET", "A_NUMBER", "LC_NUMBER", "PATH")
    p = pool("sees", env=("A_NUMBER", "NOT_SET"))
    np.testing.assert_array_equal(p.score(names).parts["sees"], [-1, 3, 3, np.nan])  # PATH is there, and no number
    assert "not set on this host: NOT_SET" in caplog.text
    with pytest.raises(ConfigError, match="do not see the variable A_SECRET of this environment unless reward.env names it"):
        pool("insists").trial(names[:1])


def test_a_worker_that_cannot_start_again_is_no_fault_of_the_config(pool, tmp_path):
    path = tmp_path / "gone.py"
    path.write_text(FUNCTIONS)
    with pytest.raises(RunStopped, match="gone.py"):
        pool(f"{path}:vanishes", workers=1).score(items(0, 0))


@pytest.mark.full
@pytest.mark.parametrize("end, outcome", [("sleep", "timeout"), ("die", "error: the worker process died: it exited with status 1")])
def test_what_a_worker_started_ends_with_it(pool, tmp_path, end, outcome):
    pidfile = tmp_path / "pid"
    result = pool("child", timeout_seconds=20.0).score(items(end, pidfile=str(pidfile)))
    assert result.outcomes[0]["child"] == outcome
    wait_until(lambda: gone(int(pidfile.read_text())))


def test_a_worker_that_grows_is_killed_and_says_so(pool):
    result = pool("grows", timeout_seconds=300.0, memory_gb=0.2).score(items("self", "child", ""))
    wanted = "error: the worker process died: it used more memory than reward.memory_gb=0.2 allows"
    assert [o["grows"] for o in result.outcomes] == [wanted, wanted, "ok"]


@pytest.mark.full
def test_workers_are_replaced_after_many_calls(pool):
    """Not before, and none is at fault for it."""
    def pids(p):
        result = p.score(items(*range(6)))
        assert [o["imports"] for o in result.outcomes] == ["ok"] * 6
        return {m["imports"]["pid"] for m in result.item_metrics}

    often, seldom = pool("imports", workers=1, recycle=6), pool("imports", workers=1, recycle=7)
    assert len(pids(often) | pids(often) | pids(often)) == 3 and len(pids(seldom) | pids(seldom) | pids(seldom)) == 2


def test_a_worker_that_died_idle_is_no_ones_fault(pool):
    p = pool("imports", workers=1)
    (pid,) = {int(m["imports"]["pid"]) for m in p.score(items(1, 2)).item_metrics}
    os.kill(pid, 9)
    wait_until(lambda: gone(pid))
    result = p.score(items(1, 2))
    assert [o["imports"] for o in result.outcomes] == ["ok", "ok"] and result.item_metrics[0]["imports"]["pid"] != pid


def test_close_ends_the_workers(pool):
    p = pool("imports", workers=2)
    pids = {int(m["imports"]["pid"]) for m in p.score(items(*range(16))).item_metrics}
    p.close()
    assert all(gone(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        p.score(items(1))


PARENT = textwrap.dedent('''
    import sys, threading, time
    from jaxrl.config.load import default_config
    from jaxrl.rewards import RewardItem, RewardPool
    config = default_config()
    config.reward.functions = (sys.argv[1] + ":imports", sys.argv[1] + ":odd")
    config.reward.workers = 1
    pool = RewardPool(config)
    result = pool.score([RewardItem("q", "c", {"n": 1})])
    if sys.argv[2] == "busy":
        threading.Thread(target=pool.score, args=([RewardItem("q", "c", {"n": "spin"})],), daemon=True).start()
        time.sleep(0.5)
    print(int(result.item_metrics[0]["imports"]["pid"]), flush=True)
    time.sleep(600)
''')


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_workers_end_with_a_parent_that_is_killed(source, tmp_path, state):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script), str(source), state], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(parent.stdout.readline())
        assert not gone(pid)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_until(lambda: gone(pid))


def test_without_functions_nothing_is_waited_for():
    """As in runs whose environment gives the score."""
    config = default_config()
    config.reward.functions = ()
    with RewardPool(config) as pool:
        pool.trial([RewardItem("q", "a", {"answer": "a"})])
        result = pool.score([RewardItem("q", "a")])
    assert np.isnan(result.total).all() and result.outcomes == [{}]
