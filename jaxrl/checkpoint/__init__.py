"""Checkpoints: saved in one commit and restored (checkpointer), their files (files), which options may change when a
run is resumed (resume), and copies sent elsewhere (uploads).
"""
