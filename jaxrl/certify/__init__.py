"""run.mode=certify: what a user's loss, advantages, rewards and layout must keep, tried on small cases until one breaks
it (docs/guides/certify.md). `run` makes the cases of a config; the others know arrays and functions.
"""
