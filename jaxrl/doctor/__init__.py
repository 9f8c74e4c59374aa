"""Checks in about a minute whether a machine can run jaxrl: jaxrl doctor

Each examination (`examinations.py`) runs in its own process (`__main__.py`), so one that crashes or hangs is reported
and the others continue. No examination needs a config or a model.
"""
