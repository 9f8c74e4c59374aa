"""Worker processes that run user code: processes and their supervisor, streams, and passing the
user's functions to them.

Knows nothing of rewards or environments. Standard library only.
"""
