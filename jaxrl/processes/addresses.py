"""Hosts and ports as text. An IPv6 address has brackets in front of a port or in a URL, and none where a socket binds.
Standard library only: workers import it.
"""

from __future__ import annotations

import socket


def bare_host(host: str) -> str:
    """Returns a host without the brackets of an IPv6 address, as sockets and command lines take it."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def join_host_port(host: str, port: int) -> str:
    """Returns host:port as in a URL, an IPv6 address in brackets; host with or without them."""
    host = bare_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_family(host: str) -> socket.AddressFamily:
    """Returns AF_INET6 for an IPv6 address without brackets, AF_INET for every other host."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
