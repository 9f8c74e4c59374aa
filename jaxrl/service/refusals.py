"""The error that every layer of the service raises for a request that cannot be served."""

from __future__ import annotations


class Refused(Exception):
    """A request is refused: field, value and remedy in the message.

    Attributes:
      status: HTTP status. The client sends 408, 409, 429 and 5xx again for minutes, and never the others.
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status
