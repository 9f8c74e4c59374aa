"""Read by every Python that a test starts while evidence/mutations.py runs it: ignores the same option there."""

import os

if os.environ.get("JAXRL_IGNORED_OPTION"):
    import ignoring

    ignoring.install()
    ignoring.ignore(os.environ["JAXRL_IGNORED_OPTION"])
