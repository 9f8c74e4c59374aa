"""Kill -9 at ten moments of a run of episodes, three of them inside episodes: after a resume the final parameters, metrics
(but time) and rollouts are bitwise those of an unbroken run.

    python evidence/episodes_resume.py

Environments of two to four turns (tests/helpers/worlds.py) on tests/helpers/tiny_job.py, rollout.compaction=False, one prompt and one
cache length. Inside episodes: the environment itself ends the trainer after its n-th turn.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [os.path.dirname(__file__), str(Path(__file__).parent.parent / "tests")]

from common import record, table  # noqa: E402
from helpers.run_tools import command, environment, fingerprint  # noqa: E402
from helpers.worlds import TEMPLATE  # noqa: E402

WORLDS = Path(__file__).parent.parent / "tests" / "helpers" / "worlds.py"
PLANNED = ("rollout.kill9@step=3", "reward.kill9@step=5", "update.kill9@step=2", "update.kill9@step=6",
           "checkpoint.kill9@step=4,phase=tensors", "checkpoint.kill9@step=4,phase=commit", "checkpoint.kill9@step=6,phase=after")
INSIDE = (20, 90, 170)  # turns of all episodes, of some 200


def options(folder: Path):
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    return (f"model.chat_template={template}", "rollout.compaction=False", "train.steps=6", "eval.every_steps=3",
            "checkpoint.every_steps=2", f"env.function={WORLDS.resolve()}:murderous", "env.variables=('WORLD',)",
            "env.max_turns=4", "env.max_observation_tokens=8", "rollout.prompt_lengths=(167,)", "rollout.cache_lengths=(168,)",
             "reward.functions=()", "algorithm.advantage=turn")


def run(folder, mark, *more):
    done = subprocess.run(command(folder, *options(mark.parent), *more), env=environment() | {"WORLD": str(mark)},
                          capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


def main():
    folder = Path(tempfile.mkdtemp(prefix="jaxrl_episodes_"))
    mark, rows, equal = folder / "left", [], 0
    status, text = run(folder / "whole", mark)
    assert status == 0, text
    want = fingerprint(folder / "whole")
    for k, case in enumerate([*PLANNED, *INSIDE]):
        own = folder / f"case{k}"
        if isinstance(case, int):
            mark.write_text(str(case))
            died, text = run(own, mark)
            name = f"inside an episode, after turn {case}"
        else:
            died, text = run(own, mark, f"faults.plan={case!r}")
            name = case
        assert died == -signal.SIGKILL, (case, died, text)
        status, text = run(own, mark)
        assert status == 0, text
        same = fingerprint(own) == want
        equal += same
        rows.append([name, "bitwise equal" if same else "DIFFERS"])
        shutil.rmtree(own)
    table(["killed at", "after the resume"], rows)
    record("episodes_resume", {"cases": len(rows), "bitwise_equal": equal, "files": len(want)})
    shutil.rmtree(folder)
    return 0 if equal == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
