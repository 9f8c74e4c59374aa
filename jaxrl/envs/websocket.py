"""A client of WebSocket (RFC 6455) for texts, as small as environments' services need it. Standard library only."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import ssl
from urllib.parse import urlsplit

LONGEST = 1 << 26  # bytes of a message
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of the RFC
MORE, TEXT, CLOSE, PING, PONG = 0, 1, 8, 9, 10  # kinds of frames


class Closed(ConnectionError):
    """The other side has ended the connection, or does not keep to the protocol."""


class WebSocket:
    """A connection. `open`, then `send` and `receive` texts; `close` at the end."""

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, url: str) -> WebSocket:
        """url: ws or wss. Raises OSError."""
        parts = urlsplit(url)
        secure = parts.scheme == "wss"
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        key = base64.b64encode(os.urandom(16))
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or (443 if secure else 80),
                                                       ssl=ssl.create_default_context() if secure else None)
        try:
            head = [f"GET {path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}", "Upgrade: websocket",
                    "Connection: Upgrade", f"Sec-WebSocket-Key: {key.decode()}", "Sec-WebSocket-Version: 13"]
            writer.write("\r\n".join([*head, "", ""]).encode())
            await writer.drain()
            first, *lines = (await _exactly(reader.readuntil(b"\r\n\r\n"))).decode("latin-1").split("\r\n")
            headers = {n.strip().lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
            if first.split(" ")[1:2] != ["101"]:
                raise Closed(f"no WebSocket is there: {' '.join(first.split(' ')[:2])[:40]!r}")
            wanted = base64.b64encode(hashlib.sha1(key + GUID).digest()).decode()
            if headers.get("sec-websocket-accept") != wanted:
                raise Closed("it does not accept as RFC 6455 says")
        except BaseException:
            writer.close()
            raise
        return cls(reader, writer)

    async def send(self, text: str) -> None:
        self._frame(TEXT, text.encode())
        await self._writer.drain()

    async def receive(self) -> str:
        """The next message. Raises Closed."""
        message = None  # of a text in several frames what has come
        while True:
            first, second = await _exactly(self._reader.readexactly(2))
            kind, length = first & 15, second & 127
            if length > 125:
                length = int.from_bytes(await _exactly(self._reader.readexactly(2 if length == 126 else 8)), "big")
            begins = {TEXT: message is None, MORE: message is not None}.get(kind, kind in (CLOSE, PING, PONG))
            if second & 128 or first & 0x70 or not begins:
                raise Closed("it sent what is no frame of a text")
            if len(message or b"") + length > LONGEST:
                raise Closed(f"it sent a message of more than {LONGEST} bytes")
            data = await _exactly(self._reader.readexactly(length))
            if kind == CLOSE:
                raise Closed("it has closed the connection")
            if kind == PING:
                self._frame(PONG, data)
            elif kind != PONG:
                message = (message or b"") + data
                if first & 128:
                    return message.decode("utf-8", "replace")

    def close(self) -> None:
        """Waits for nothing."""
        with contextlib.suppress(OSError, RuntimeError):
            self._frame(CLOSE, (1000).to_bytes(2, "big"))
        self._writer.close()

    def _frame(self, kind: int, data: bytes) -> None:
        """A whole message, masked as those of clients must be."""
        size = len(data)
        code, width = (size, 0) if size < 126 else (126, 2) if size < 1 << 16 else (127, 8)
        head = bytes([128 | kind, 128 | code]) + size.to_bytes(8, "big")[8 - width:]
        mask = os.urandom(4)
        masked = int.from_bytes(data, "big") ^ int.from_bytes((mask * (size // 4 + 1))[:size], "big")
        self._writer.write(head + mask + masked.to_bytes(size, "big"))


async def _exactly(reading) -> bytes:
    try:
        return await reading
    except (EOFError, asyncio.LimitOverrunError, ConnectionError):
        raise Closed("the connection broke") from None
