"""What the programs beside it came to."""

import json


def printed(task, ran) -> float:
    """The last line that it printed is the answer."""
    lines = ran.stdout.strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == task.row["answer"])


def rewarded(task, ran) -> float:
    """What an environment of verifiers gave itself, as it wrote it down."""
    (path,) = ran.folder.glob("outputs/**/traces.jsonl")
    episode = json.loads(path.read_text())
    if not episode["ok"]:
        raise RuntimeError(f"verifiers: {episode['errors']} {[trace['errors'] for trace in episode['traces']]}")
    return sum(one["score"] * one["weight"] for one in episode["traces"][0]["rewards"].values())
