"""Log-prob and entropy of chosen tokens, straight from hidden states."""

from jaxrl.kernels.logprob.api import logprob_and_entropy
from jaxrl.kernels.logprob.chunked import Split

__all__ = ["Split", "logprob_and_entropy"]
