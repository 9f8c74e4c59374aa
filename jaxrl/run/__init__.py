"""What stands around every training loop and knows no algorithm: the session (directory, log, stop, processes,
checkpoints), a job's inputs (setup), objects handed over from Python, and how a run ends.
"""
