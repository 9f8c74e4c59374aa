"""Log-prob and entropy of chosen tokens, straight from hidden states."""

from jaxrl.kernels.logprob.api import logprob_and_entropy

__all__ = ["logprob_and_entropy"]
