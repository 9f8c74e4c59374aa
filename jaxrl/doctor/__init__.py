"""What a machine can do for jaxrl, found out in a minute: jaxrl doctor

Each examination (`examinations.py`) runs in a process of its own (`__main__.py`), so that one that crashes or hangs is
named and the others go on. Nothing of it needs a config or a model.
"""
