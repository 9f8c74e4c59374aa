"""One request over HTTP by the rule of ours: no redirects (a key would go elsewhere, and another's answer would be
believed), a deadline over the whole answer, a limit of its size. Standard library only: workers import it.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request

LONGEST = 1 << 26  # bytes of an answer


class _Here(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, request, fp, code, msg, headers, newurl):
        return None  # which leaves the answer an HTTPError of its own status


def answer(request: urllib.request.Request | str, seconds: float, longest: int = LONGEST) -> bytes:
    """The body of an answer.

    Args:
      request: or a URL.
      seconds: from now to its last byte.
      longest: bytes.

    Raises urllib.error.HTTPError for a status that is none of success, redirects included; TimeoutError; ValueError
    where it is longer; OSError and http.client's errors where there is none.
    """
    deadline = time.monotonic() + seconds
    parts, size = [], 0
    with urllib.request.build_opener(_Here).open(request, timeout=seconds) as reply:
        while part := reply.read1(1 << 16):
            parts.append(part)
            size += len(part)
            if size > longest:
                raise ValueError(f"an answer of more than {longest} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no whole answer within {seconds:g} s")
    return b"".join(parts)
