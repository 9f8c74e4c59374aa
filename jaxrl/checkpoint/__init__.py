"""Checkpoints: save and restore in one commit (checkpointer), their files (files), fingerprints of a run's inputs
(fingerprints), which options may change on resume (resume), and copies sent elsewhere (uploads).
"""
