"""Two rewards of the runs that evidence/fork.py leaves; it writes this file again with one of them edited."""


def digits(prompt, completion, **columns):
    """Share of the answer's characters that are digits."""
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)


def short(prompt, completion, **columns):
    """0 for an answer of a dozen characters or more, 1 for an empty one."""
    return max(0.0, 1 - len(completion) / 12)
