"""Records of a run's steps, from which they can be computed again without an engine.

    files.py      one file for each step, named by its checksum (numpy; no jax)
    states.py     digests of parameters and optimizer states, the same on every mesh
    anomalies.py  what stands out in a step's numbers

rl/recording.py writes them; replay/ and report/ read them.
"""
