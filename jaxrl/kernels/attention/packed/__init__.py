"""Attention over packed rows, with gradients: the op of training and scoring."""
