"""Which cases of a test `pytest` runs as README calls it: the first ones. The others are marked `full`, a tier of .ci/run, or `nightly`."""

import pytest


def first_only(cases, count=1, several=False, full=None):
    """Marks the cases after the first `count` as full. A case with a mark (slow, nightly ...) keeps it and does not count.

    several: a case is a tuple of arguments. full: how many of the cases after the first are full, all without it; the others are nightly.
    """
    out, place = [], 0
    for case in cases:
        given = case if hasattr(case, "marks") else pytest.param(*case) if several else pytest.param(case)
        if not given.marks:
            if place >= count:
                given = given._replace(marks=(pytest.mark.full if full is None or place < count + full else pytest.mark.nightly,))
            place += 1
        out.append(given)
    return out


def first_cases(count, names, cases, full=None, **options):
    """`pytest.mark.parametrize`, whose cases after the first `count` are marked full, or nightly after `full` more."""
    return pytest.mark.parametrize(names, first_only(cases, count, "," in names, full), **options)


def nightly(*arguments):
    """A case that is marked nightly, in a list for `first_cases` or `pytest.mark.parametrize`."""
    return pytest.param(*arguments, marks=pytest.mark.nightly)
