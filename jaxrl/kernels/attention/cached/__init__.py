"""Attention of one query per slot over a key-value cache, without gradients: the op of decoding."""
