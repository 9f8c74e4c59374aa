"""What of five other systems works here, and that no option of ours is without a test.

seed_parameters.csv       the parameters of AReaL, RLinf, SkyRL, Cosmos-RL and ROLL
coverage.csv              those that work, as an option of ours or an `equivalent: ...`, each with a test that shows it
coverage_excluded.csv     the others, with the reason
options.csv               our own options, each with tests that show that it acts
"""

import ast
import csv
import functools
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from helpers.tiers import first_cases

import jaxrl
from jaxrl.config.schema import SCHEMA, options

HERE = Path(__file__).parent
REASONS = ("automatic", "out of scope", "not done")

# Equivalents that are no option but what the code always does: text in coverage.csv -> where it is documented.
BEHAVIOURS = {
    "log-probs that are not finite end the run": ("rollout/embedded.py", "non-finite log-probs"),
    "seconds by phase in every line of metrics.jsonl": ("telemetry/sinks.py", "Everything measured with a clock"),
    "the rollout metrics in every line of metrics.jsonl": ("telemetry/names.py", "rollout/tokens"),
    "operations and their speed in every line of metrics.jsonl": ("telemetry/flops.py", "Counted is what the mathematics needs"),
    "policy/entropy is in every line of metrics.jsonl": ("telemetry/names.py", "policy/entropy"),
    "every evaluation writes its completions and scores": ("rl/evaluation.py", "def write_records"),
    "every step samples from the weights of the step before": ("recipes/rl.py", "sync the new weights"),
    "tokens in, tokens out": ("rl/trajectories.py", "never re-encoded"),
    "the sampler's log-probs are always kept": ("rollout/protocol.py", "logprobs: np.ndarray"),
    "one denominator for all microbatches and devices": ("training/update.py", "weights 1/denominator"),
    "log-probs are at least fp32": ("algorithms/losses.py", "fp32 or better"),
    "each process gives its devices their rows": ("processes/exchange.py", "each process gives its devices their rows"),
}

# Options whose whole effect is what a config may say.
CHECKED_ONLY = {
    "rollout.penalties_in_training",  # consent
}
# Files of the rooms that list and check options in which some act.
ACTS = ("config/run_length.py", "resolve/checks/replay.py")
# Names under which files hold a group of the config.
ALIASES = {
    "run/session.py": {"c": "checkpoint", "e": "eval"},
    "roles/role.py": {"c": "checkpoint", "options": "lora"},
    "algorithms/losses.py": {"cfg": "algorithm"},
    "algorithms/preference.py": {"o": "preference", "options": "preference"},
    "training/objective.py": {"o": "algorithm algorithm.mismatch", "options": "algorithm"},
    "training/update.py": {"how": "train.loss_scale"},
    "training/optimizer.py": {"c": "optimizer", "config": "optimizer"},
    "rollout/shapes.py": {"roll": "rollout"},
    "rl/trajectories.py": {"group": "rollout eval"},
    "run/setup.py": {"c": "model"},
    "rl/step.py": {"a": "algorithm"},
    "rl/roles.py": {"options": "algorithm reference"},
    "rl/advantages.py": {"options": "algorithm"},
    "rl/metrics.py": {"limits": "algorithm.mismatch"},
    "rl/recording.py": {"options": "record"},
    "workers/ray_process.py": {"options": "env reward"},
    "algorithms/token_masks.py": {"options": "algorithm"},
    "roles/reference.py": {"options": "reference"},
    "roles/critic.py": {"options": "critic"},
    "recipes/distill.py": {"d": "distill", "t": "teacher"},
    "roles/teachers.py": {"d": "distill", "t": "teacher", "options": "teacher"},
    "roles/teacher_files.py": {"options": "distill"},
    "roles/reward_model.py": {"o": "reward.model"},
    "recipes/reward_model.py": {"options": "reward_model"},
    "data/scored.py": {"o": "reward_model"},
    "data/stream.py": {"d": "data"},
    "models/adapters/peft.py": {"options": "lora"},
    "models/adapters/selection.py": {"options": "lora"},
    "rollout/vllm/adapter_folders.py": {"options": "lora"},
    "checkpoint/checkpointer.py": {"_options": "checkpoint"},
    "checkpoint/uploads.py": {"options": "checkpoint.upload", "o": "checkpoint.upload"},
    "telemetry/telemetry.py": {"_log": "log"},
    "telemetry/sinks.py": {"log_config": "log"},
    "rewards/pool.py": {"_reward": "reward"},
    "rewards/workers.py": {"_reward": "reward"},
    "rewards/specs.py": {"r": "reward"},
    "sandbox/api.py": {"settings": "sandbox"},
    "sandbox/bwrap.py": {"settings": "sandbox", "limits": "sandbox"},
    "sandbox/remote.py": {"settings": "sandbox"},
    "sandbox/watch.py": {"limits": "sandbox"},
    "rewards/http.py": {"o": "reward.remote reward.judge"},
    "rewards/remote.py": {"o": "reward.remote"},
    "rewards/judge.py": {"o": "reward.judge"},
    "rewards/agreement.py": {"o": "reward.judge"},
    "rewards/services.py": {"o": "reward.remote reward.judge"},
    "run/judge_server.py": {"o": "reward.judge"},
    "sharding/mesh.py": {"mesh_config": "mesh"},
    "processes/group.py": {"options": "launch"},
    "rollout/vllm/adapter.py": {"v": "rollout.vllm", "options": "rollout.vllm"},
    "rollout/vllm/engine.py": {"v": "rollout.vllm", "options": "rollout.vllm"},
    "rollout/vllm/publish.py": {"options": "rollout.vllm"},
    "rollout/vllm/router.py": {"options": "rollout.vllm"},
    "rollout/vllm/servers.py": {"v": "rollout.vllm", "options": "rollout.vllm"},
}


def rows(name):
    with open(HERE / f"{name}.csv", newline="") as f:
        return list(csv.DictReader(f))


def parameters(name):
    return [(r["system"], r["section"], r["parameter"]) for r in rows(name)]


def named_options(text):
    """The options that a text names."""
    return {n for n in options() if n in text and re.search(rf"(?<![\w.]){re.escape(n)}(?!\w)", text)}


# -- tests by name -----------------------------------------------------------------------------------------------------


@functools.cache
def definitions(path):
    """Name -> source of all that a test file or a helper module defines at its top or imports from helper modules."""
    source, out = path.read_text("utf-8"), {}
    lines = source.split("\n")  # whole lines: what stands at the top stands alone
    text = lambda node: "\n".join(lines[node.lineno - 1:node.end_lineno])  # noqa: E731
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            out[node.name] = "\n".join(map(text, (*node.decorator_list, node)))
            if isinstance(node, ast.ClassDef):
                out |= {f"{node.name}::{m.name}": out[node.name] for m in node.body if isinstance(m, ast.FunctionDef)}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                out |= {n.id: text(node) for n in ast.walk(target) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and node.module == "helpers":
            out |= {a.asname or a.name: (HERE / "helpers" / f"{a.name}.py").read_text("utf-8") for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            for file in (HERE / f"{node.module.replace('.', '/')}.py", path.with_name(f"{node.module}.py")):
                if file.is_file():
                    helpers = definitions(file)
                    out |= {a.asname or a.name: _with_helpers(a.name, helpers) for a in node.names}
    return out


@functools.cache
def words(source):
    return frozenset(re.findall(r"[A-Za-z_]\w*", source))


def _with_helpers(name, known):
    """The source of `name` and of everything it uses, directly or not."""
    seen, todo = {}, [name]
    while todo:
        one = todo.pop()
        if one in known and one not in seen:
            seen[one] = known[one]
            todo += words(known[one])
    return "\n".join(seen.values())


@functools.cache
def test_source(test):
    """All that a test runs of the tests' own code; KeyError where there is no such test."""
    path, _, name = test.partition("::")
    known = definitions(HERE.parent / path)
    if not name.rsplit("::", 1)[-1].startswith("test_") or name not in known:
        raise KeyError(test)
    return _with_helpers(name, known)


test_source.__test__ = False


def mentions(test, option):
    """Whether a test's code has the option's own name in it."""
    name, source = option.rsplit(".", 1)[-1], test_source(test)
    return name in source and re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9_])", source)


# -- the tables --------------------------------------------------------------------------------------------------------


def test_every_parameter_is_in_one_table_once():
    together = Counter(parameters("coverage") + parameters("coverage_excluded"))
    assert [p for p, n in together.items() if n > 1] == []
    wanted = parameters("seed_parameters")
    assert len(wanted) == len(set(wanted)) == 854
    assert set(together) == set(wanted)


def test_reasons_are_of_the_known_kinds():
    for row in rows("coverage_excluded"):
        kind, _, why = row["reason"].partition(": ")
        assert kind in REASONS and why, row


def test_every_covered_parameter_names_an_option_or_a_documented_behaviour():
    used = set()
    for row in rows("coverage"):
        text = row["option"].removeprefix("equivalent: ")
        if text == row["option"]:
            assert text in options(), row
        elif not named_options(text) and text.split(" ")[0] not in SCHEMA:
            assert text in BEHAVIOURS, row
            used.add(text)
    assert used == set(BEHAVIOURS)


@pytest.mark.parametrize("text", BEHAVIOURS)
def test_behaviours_are_documented_where_they_are(text):
    file, phrase = BEHAVIOURS[text]
    assert phrase in (Path(jaxrl.__file__).parent / file).read_text("utf-8")


@pytest.mark.parametrize("table", ["coverage", "options"])
@pytest.mark.slow
def test_every_named_test_exists(table):
    missing = []
    for row in rows(table):
        try:
            test_source(row["test"])
        except (KeyError, FileNotFoundError):
            missing.append(row["test"])
    assert sorted(set(missing)) == []


def test_every_option_has_a_test():
    shown = {r["option"] for r in rows("options")} | {r["option"] for r in rows("coverage")}
    assert sorted(set(options()) - shown) == []
    assert sorted(r["option"] for r in rows("options") if r["option"] not in options()) == []


def test_an_option_is_named_in_a_test_that_shows_it():
    """It is set or passed by its name, by the test itself or in what that uses."""
    covered = {(r["option"], r["test"]) for r in rows("coverage") if r["option"] in options()}
    assert sorted(pair for pair in covered if not mentions(pair[1], pair[0])) == []
    tests = defaultdict(list)
    for row in rows("options"):
        tests[row["option"]].append(row["test"])
    assert sorted(option for option, mine in tests.items() if not any(mentions(t, option) for t in mine)) == []


@pytest.mark.slow
def test_every_option_is_read_where_it_acts():
    """No option is only parsed, checked and listed."""
    root, seen = Path(jaxrl.__file__).parent, set()
    for path in root.rglob("*.py"):
        file = str(path.relative_to(root))
        says_only = file.startswith(("config/", "resolve/checks/")) and file not in ACTS or file == "checkpoint/resume.py"
        if not says_only:
            tree = ast.parse(path.read_text("utf-8"))
            seen |= _reads(tree, ALIASES.get(file, {}))
    assert sorted(set(options()) - seen - CHECKED_ONLY) == []


def _reads(tree, aliases):
    """'group.option' of every attribute and every subscript by a text, read off what it is taken from."""

    def name(node):
        return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""

    out = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            leaf = node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            leaf = node.slice.value
        else:
            continue
        group = name(node.value)
        for one in (group, *aliases.get(group, "").split()):
            out.add(f"{one}.{leaf}")
            if isinstance(node.value, ast.Attribute):
                out.add(f"{name(node.value.value)}.{one}.{leaf}")
    return out


# -- evidence/mutations.py ---------------------------------------------------------------------------------------------


READS = """
import ignoring, sys
from jaxrl.config.load import default_config, redacted
from jaxrl.resolve.checks.common import check
from jaxrl.config.lengths import longest_sequence
from jaxrl.errors import ConfigError
c = default_config()
c.data.max_prompt_tokens, c.rollout.max_new_tokens = 7, -1
print(longest_sequence(c), c.rollout.max_new_tokens, redacted(c)["rollout"]["max_new_tokens"])
c = c.copy_and_resolve_references()
try:
    check(c)
except ConfigError as e:
    print("rollout.max_new_tokens=-1" in str(e))
"""


@pytest.mark.full
@first_cases(1, "option, read", [("rollout.max_new_tokens", 7 + 1024), ("optimizer.lr", 7 - 1)])
def test_an_ignored_option_is_its_default_where_jaxrl_acts(option, read):
    """The instrument of evidence/mutations.py, in a process that a test starts: what sets, shows and checks a config sees what was set."""
    env = {**os.environ, "JAXRL_IGNORED_OPTION": option,
           "PYTHONPATH": os.pathsep.join([str(HERE.parent / "evidence" / "ignored"), str(HERE.parent)])}
    done = subprocess.run([sys.executable, "-c", READS], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(read), "-1", "-1", "True"]
