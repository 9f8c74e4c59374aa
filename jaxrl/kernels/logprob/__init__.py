"""Log-prob and entropy of chosen tokens, straight from hidden states."""

from jaxrl.kernels.logprob.api import logprob_and_entropy
from jaxrl.kernels.logprob.chunked import Split, held

__all__ = ["Split", "held", "logprob_and_entropy"]
