"""Sends one HTTP request: no redirects (a key would go elsewhere, and another server's reply would be trusted), a
deadline for the whole reply, and a size limit. Standard library only: workers import it.
"""

from __future__ import annotations

import functools
import http.client
import io
import time
import urllib.error
import urllib.request
from typing import Any

MAX_REPLY_BYTES = 1 << 26  # bytes of a reply


class _Here(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, request, fp, code, msg, headers, newurl):
        return None  # which leaves the answer an HTTPError of its own status


class _TimedReader(io.RawIOBase):
    """Reads of a socket, none of which lasts beyond a time."""

    def __init__(self, raw, sock, deadline: float):
        self._raw, self._sock, self._deadline = raw, sock, deadline

    def readable(self):
        return True

    def readinto(self, buffer):
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self):
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    def __init__(self, sock, *args, deadline: float, **kwargs):
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_TimedReader(self.fp.detach(), sock, deadline))


def _timed(kind) -> Any:
    """Returns a maker of connections of this kind whose replies have to be complete `timeout` seconds later."""
    def connection(host: str, timeout: float, **kwargs):
        made = kind(host, timeout=timeout, **kwargs)
        made.response_class = functools.partial(_TimedResponse, deadline=time.monotonic() + timeout)
        return made

    return connection


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request):
        return self.do_open(_timed(http.client.HTTPConnection), request)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request):
        return self.do_open(_timed(http.client.HTTPSConnection), request)


def fetch(request: urllib.request.Request | str, seconds: float, longest: int = MAX_REPLY_BYTES) -> bytes:
    """Returns the body of a reply.

    Args:
      request: a request or a URL.
      seconds: from the request to the last byte of the reply. Only connecting and sending may take longer, each of
        them as long again.
      longest: largest body in bytes.

    Raises:
      urllib.error.HTTPError: a status other than success, including redirects.
      TimeoutError: no complete reply in time.
      ValueError: the reply is longer.
      OSError and http.client's errors: no reply, or one that ends early.
    """
    parts, size = [], 0
    try:
        with urllib.request.build_opener(_Here, _Http, _Https).open(request, timeout=seconds) as reply:
            while part := reply.read1(1 << 16):
                parts.append(part)
                size += len(part)
                if size > longest:
                    raise ValueError(f"a reply of more than {longest} bytes")
            if reply.length:  # of Content-Length; read1 raises nothing at an early end
                raise http.client.IncompleteRead(b"".join(parts), reply.length)
    except TimeoutError:
        raise TimeoutError(f"no complete reply within {seconds:g} s") from None
    return b"".join(parts)
