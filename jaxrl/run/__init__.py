"""The parts of a run that every recipe shares: the session (directory, log, stop, processes, checkpoints), a job's
inputs (setup), the loop (fit), objects passed from Python, and closing. Nothing here knows an algorithm.
"""
