"""run.mode=certify: what a user's loss, advantages, rewards and layout must keep, tried on small cases until one breaks
it (docs/guides/certify.md). Knows arrays and functions; recipes/certify.py makes them of a config."""
