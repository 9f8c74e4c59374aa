"""Every option is ignored in turn, and a test of its row must fail.

    python evidence/mutations.py [--options rollout.top_p,...] [--again]     # all: 33 minutes on two cores with other work

The rows are those of tests/options.csv and tests/coverage.csv. A copy of the tree is tested in one warm process; jaxrl's reading of
one option at a time gives its default, whatever was set (ignored/ignoring.py). The tests of the option run, the quickest first,
until one fails: then its loss would be noticed. Each test must pass first while nothing is ignored; those that drive real vLLM
servers do not count. Exits with 1 where an option has no test that fails.
--again: only the options that the last result lists as unnoticed, or does not list; with --options (a name ends in .* for all of a
group) these, and the rows of all others stay as they are. Tests that want ray or openenv are passed in an interpreter that has it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
IGNORED = str(HERE / "ignored")
LIMIT, HARD_LIMIT = 180, 360  # seconds per option: the test is failed; the process is killed
NOT_HERE = "not vllm and not nightly and not mosaic"


# -- in the warm process: reads {"option", "tests"} a line, answers {"outcome", "test", "seconds", ...} a line ---------------------


def serve(top: Path) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:0] = [IGNORED, str(top)]
    os.environ["PYTHONPATH"] = os.pathsep.join([IGNORED, str(top), os.environ.get("PYTHONPATH", "")])
    import ignoring

    ignoring.install()
    keep_programs(top / "programs")
    signal.signal(signal.SIGALRM, does_not_end)
    for line in sys.stdin:
        job = json.loads(line)
        ignoring.ignore(job["option"])
        os.environ["JAXRL_IGNORED_OPTION"] = job["option"]
        limit = LIMIT if job["option"] else 0
        signal.setitimer(signal.ITIMER_REAL, limit, limit and 10)
        started = time.monotonic()
        found = run_tests(top, job["tests"], job["costs"], stop=bool(job["option"]))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(found | {"option": job["option"], "seconds": round(time.monotonic() - started, 1)}), file=answers, flush=True)


def does_not_end(signum, frame):
    import pytest

    pytest.fail(f"not done after {LIMIT} s")


def keep_programs(folder: Path) -> None:
    """Programs that were compiled once are taken from `folder`, whatever cache directory a test has."""
    from jax._src import compilation_cache as caching

    folder.mkdir(exist_ok=True)
    get, put = caching.get_executable_and_time, caching.put_executable_and_time

    def get_kept(key, options, backend, *more):
        cache = caching._get_cache(backend)
        if cache is not None and cache.get(key) is None and (folder / key).exists():
            cache.put(key, (folder / key).read_bytes())
        return get(key, options, backend, *more)

    def put_kept(key, name, executable, backend, seconds):
        put(key, name, executable, backend, seconds)
        cache = caching._get_cache(backend)
        found = cache.get(key) if cache is not None else None
        if found:
            (folder / key).write_bytes(found)

    caching.get_executable_and_time, caching.put_executable_and_time = get_kept, put_kept


class Watch:
    """A pytest plugin: the quickest test first; what a test costs with its fixtures; who failed."""

    def __init__(self, costs: dict):
        self.costs, self.failed, self.passed, self.calls, self.fixtures, self.needs = costs, {}, [], {}, {}, {}

    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: self.costs.get(function_of(item.nodeid), 1e9))
        for item in items:
            self.needs.setdefault(function_of(item.nodeid), set()).update(
                (f[-1].baseid, name) for name, f in item._fixtureinfo.name2fixturedefs.items())

    def pytest_fixture_setup(self, fixturedef, request):
        from _pytest.fixtures import pytest_fixture_setup

        started = time.monotonic()
        try:
            return pytest_fixture_setup(fixturedef, request)
        finally:
            key = (fixturedef.baseid, fixturedef.argname)
            self.fixtures[key] = max(self.fixtures.get(key, 0), time.monotonic() - started)

    def pytest_runtest_logreport(self, report):
        test = function_of(report.nodeid)
        if report.when == "call":
            self.calls[test] = self.calls.get(test, 0) + report.duration
            if report.passed:
                self.passed.append(test)
        if report.failed:
            text = str(getattr(report.longrepr, "reprcrash", None) and report.longrepr.reprcrash.message or report.longrepr)
            text = text.replace(sys.executable, "python")  # no place of this machine in the results
            self.failed.setdefault(test, f"{report.when}: {text.strip().splitlines()[0][:160] if text.strip() else ''}")

    def cost(self) -> dict:
        return {test: round(seconds + sum(self.fixtures.get(f, 0) for f in self.needs.get(test, ())), 2)
                for test, seconds in self.calls.items()}


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def run_tests(top: Path, tests: list[str], costs: dict, stop: bool) -> dict:
    import pytest

    watch = Watch(costs)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        code = pytest.main([*tests, f"--rootdir={top}", "-c", str(top / "pyproject.toml"), "-m", NOT_HERE, "-p", "no:cacheprovider",
                            "--tb=short", *["-x"] * stop], plugins=[watch])
    first = next(iter(watch.failed), None)
    outcome = "noticed" if first else {0: "unnoticed", 5: "no test here"}.get(int(code), f"pytest ended with {int(code)}")
    out = {"outcome": outcome, "test": first, "how": watch.failed.get(first)}
    return out if stop else out | {"failed": watch.failed, "passed": sorted(set(watch.passed) - set(watch.failed)), "costs": watch.cost()}


# -- the driver --------------------------------------------------------------------------------------------------------------------


class Warm:
    """The warm process; started again where it dies or hangs."""

    def __init__(self, top: Path):
        self.top, self.process = top, None

    def ask(self, option: str, tests: list[str], costs: dict, limit: float | None) -> dict:
        if self.process is None or self.process.poll() is not None:
            self.start()
        try:
            self.process.stdin.write(json.dumps({"option": option, "tests": tests, "costs": costs}) + "\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=limit)
        except (queue.Empty, BrokenPipeError):
            line = ""
        if line:
            return json.loads(line)
        alive = self.process.poll() is None
        self.stop()
        return {"outcome": "noticed", "option": option, "test": None, "seconds": limit if alive else 0,
                "how": f"hangs: not done after {limit} s" if alive else f"the process died with {self.process.returncode}"}

    def start(self) -> None:
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}
        with open(self.top / "worker.log", "ab") as log:
            self.process = subprocess.Popen([sys.executable, __file__, "--serve", str(self.top)], cwd=self.top, env=env, text=True, stderr=log,
                                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self.lines = queue.Queue()

        def read(process=self.process, lines=self.lines):
            for line in process.stdout:
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()


def tests_by_option(names) -> dict[str, list[str]]:
    """Option -> tests of its rows; of the rows that name it in words where it has none of its own."""
    own, beside = {n: [] for n in names}, {n: [] for n in names}
    for table in ("options", "coverage"):
        with open(HERE.parent / "tests" / f"{table}.csv", newline="") as f:
            for row in csv.DictReader(f):
                for name in names:
                    if row["option"] == name:
                        own[name].append(row["test"])
                    elif re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", row["option"]):
                        beside[name].append(row["test"])
    return {n: sorted(set(own[n] or beside[n])) for n in names}


def copy_of_the_tree(top: Path) -> None:
    root = HERE.parent
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (root / name).is_file():
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, top / name)
    for folder in (top, top / "tests"):  # which tests that start a Python put on its path
        for file in Path(IGNORED).glob("*.py"):
            shutil.copy2(file, folder)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--options", default="")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--serve", default="")
    args = parser.parse_args()
    if args.serve:
        serve(Path(args.serve))
        return 0
    sys.path.insert(0, str(HERE.parent))
    from common import RESULTS, commit, record, table

    from jaxrl.config.schema import options

    at, last = commit(), {}
    if args.again and (RESULTS / "mutations.json").exists():
        before = json.loads((RESULTS / "mutations.json").read_text())
        last = {r["option"]: {"commit": before["commit"]} | r for r in before["results"]["options"]
                if r["outcome"] == "noticed" or args.options}
    named = args.options.split(",") if args.options else []
    wanted = [n for n in (*options(), "user") if n in named or any(w.endswith("*") and n.startswith(w[:-1]) for w in named)]
    wanted = wanted or [n for n in (*options(), "user") if n not in last]
    tests, started = tests_by_option([*options(), "user"]), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutations") as folder:
        top, warm = Path(folder), Warm(Path(folder))
        copy_of_the_tree(top)
        try:
            every = sorted({t for n in wanted for t in tests[n]})
            whole = warm.ask("", every, {}, None)
            good, costs = set(whole.get("passed", ())), whole.get("costs", {})
            print(f"{len(every)} tests in {whole['seconds']} s; {len(whole.get('failed', ()))} fail while nothing is ignored", flush=True)
            for test, how in whole.get("failed", {}).items():
                print(" ", test, how)
            found = []
            for name in wanted:
                mine = sorted((t for t in tests[name] if t in good), key=lambda t: costs.get(t, 1e9))
                found.append(warm.ask(name, mine, costs, HARD_LIMIT) if mine else
                             {"option": name, "outcome": "no test here", "test": None, "how": None, "seconds": 0})
                r = found[-1]
                print(f"{name:45} {r['outcome']:12} {r['seconds']:6.1f} s  {r['test'] or ''}  {r['how'] or ''}", flush=True)
        finally:
            warm.stop()
    missing = [r for r in found if r["outcome"] != "noticed"]
    print()
    table(["option", "outcome", "tests"], [[r["option"], r["outcome"], " ".join(tests[r["option"]])] for r in missing])
    print(f"{len(found)} options, {len(missing)} unnoticed, {time.monotonic() - started:.0f} s")
    if args.again or not args.options:
        rows = [r for n, r in last.items() if n in tests and n not in wanted] + [r | {"commit": at} for r in found]
        unnoticed = [r["option"] for r in rows if r["outcome"] != "noticed"]
        record("mutations", {"options": rows, "unnoticed": unnoticed, "fail_unignored": whole.get("failed", {}),
                             "seconds": round(time.monotonic() - started)}, at)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
