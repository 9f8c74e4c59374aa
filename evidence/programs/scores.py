"""What the programs beside it came to: the last line that they print is the answer."""


def printed(task, ran) -> float:
    lines = ran.stdout.strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == task.row["answer"])
