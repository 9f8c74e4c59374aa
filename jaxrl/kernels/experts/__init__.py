"""A layer's experts: each token through the few that its router chose, dropless, in static memory."""

from jaxrl.kernels.experts.api import experts

__all__ = ["experts"]
