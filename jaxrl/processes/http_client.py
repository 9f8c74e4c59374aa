"""Sends one HTTP request: no redirects (a key would go elsewhere, and another server's reply would be trusted), a
deadline for the whole reply, and a size limit. Standard library only: workers import it.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request

MAX_REPLY_BYTES = 1 << 26  # bytes of a reply


class _Here(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, request, fp, code, msg, headers, newurl):
        return None  # which leaves the answer an HTTPError of its own status


def fetch(request: urllib.request.Request | str, seconds: float, longest: int = MAX_REPLY_BYTES) -> bytes:
    """Returns the body of a reply.

    Args:
      request: a request or a URL.
      seconds: until the last byte, looked at after each part; a connection that stalls may take as long again.
      longest: largest body in bytes.

    Raises:
      urllib.error.HTTPError: a status other than success, including redirects.
      TimeoutError: no complete reply in time.
      ValueError: the reply is longer.
      OSError and http.client's errors: no reply.
    """
    deadline = time.monotonic() + seconds
    parts, size = [], 0
    with urllib.request.build_opener(_Here).open(request, timeout=seconds) as reply:
        while part := reply.read1(1 << 16):
            parts.append(part)
            size += len(part)
            if size > longest:
                raise ValueError(f"a reply of more than {longest} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no complete reply within {seconds:g} s")
    return b"".join(parts)
