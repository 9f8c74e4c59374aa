"""Log-prob and entropy of chosen tokens, and divergence from a teacher, straight from hidden states."""

from jaxrl.kernels.logprob.api import logprob_and_entropy
from jaxrl.kernels.logprob.chunked import Split, held
from jaxrl.kernels.logprob.divergence import divergence

__all__ = ["Split", "divergence", "held", "logprob_and_entropy"]
