"""Which cases of a test `pytest` runs as README calls it: the first ones. The others are marked `full`, a tier of .ci/run."""

import pytest


def first_only(cases, count=1, several=False):
    """Marks the cases after the first `count` as full. A case with a mark (slow, nightly ...) keeps it and does not count.

    several: a case is a tuple of arguments.
    """
    out, left = [], count
    for case in cases:
        given = case if hasattr(case, "marks") else pytest.param(*case) if several else pytest.param(case)
        if not given.marks:
            if left <= 0:
                given = given._replace(marks=(pytest.mark.full,))
            left -= 1
        out.append(given)
    return out


def first_cases(count, names, cases, **options):
    """`pytest.mark.parametrize`, whose cases after the first `count` are marked full."""
    return pytest.mark.parametrize(names, first_only(cases, count, several="," in names), **options)
