"""A minimal WebSocket client (RFC 6455) for text messages, for environment services. Standard library only."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import ssl
from urllib.parse import urlsplit

MAX_MESSAGE_BYTES = 1 << 26  # bytes of a message
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # fixed by the RFC
CONTINUATION, TEXT, CLOSE, PING, PONG = 0, 1, 8, 9, 10  # kinds of frames


class ConnectionClosed(ConnectionError):
    """The other side closed the connection or broke the protocol."""


class WebSocket:
    """A client's WebSocket connection (RFC 6455): `open`, then `send` and `receive` texts; `close` at the end.

    reader, writer: asyncio's streams after the handshake, which `open` makes."""

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, url: str) -> WebSocket:
        """Connects to a ws or wss URL and returns the connection. Raises OSError if that fails, also if the server
        declines."""
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
            first, *lines = (await _read_exactly(reader.readuntil(b"\r\n\r\n"))).decode("latin-1").split("\r\n")
            headers = {n.strip().lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
            if first.split(" ")[1:2] != ["101"]:
                raise ConnectionClosed(f"no WebSocket at this address: {' '.join(first.split(' ')[:2])[:40]!r}")
            wanted = base64.b64encode(hashlib.sha1(key + GUID).digest()).decode()
            if headers.get("sec-websocket-accept") != wanted:
                raise ConnectionClosed("the handshake violates RFC 6455")
        except BaseException:
            writer.close()
            raise
        return cls(reader, writer)

    async def send(self, text: str) -> None:
        """Sends a text message and waits until the transport takes more. Raises ConnectionError if it is broken."""
        self._frame(TEXT, text.encode())
        await self._writer.drain()

    async def receive(self) -> str:
        """Returns the next text message. Raises ConnectionClosed if the other side closes or breaks the protocol."""
        message = None  # the frames of a text received so far
        while True:
            first, second = await _read_exactly(self._reader.readexactly(2))
            kind, length = first & 15, second & 127
            if length > 125:
                length = int.from_bytes(await _read_exactly(self._reader.readexactly(2 if length == 126 else 8)), "big")
            begins = {TEXT: message is None, CONTINUATION: message is not None}.get(kind, kind in (CLOSE, PING, PONG))
            if second & 128 or first & 0x70 or not begins:
                raise ConnectionClosed("it sent a frame that is not part of a text")
            if len(message or b"") + length > MAX_MESSAGE_BYTES:
                raise ConnectionClosed(f"it sent a message of more than {MAX_MESSAGE_BYTES} bytes")
            data = await _read_exactly(self._reader.readexactly(length))
            if kind == CLOSE:
                raise ConnectionClosed("it has closed the connection")
            if kind == PING:
                self._frame(PONG, data)
            elif kind != PONG:
                message = (message or b"") + data
                if first & 128:
                    return message.decode("utf-8", "replace")

    def close(self) -> None:
        """Closes the connection without waiting."""
        with contextlib.suppress(OSError, RuntimeError):
            self._frame(CLOSE, (1000).to_bytes(2, "big"))
        self._writer.close()

    def _frame(self, kind: int, data: bytes) -> None:
        """Sends a message in one frame, masked as the protocol requires of clients."""
        size = len(data)
        code, width = (size, 0) if size < 126 else (126, 2) if size < 1 << 16 else (127, 8)
        head = bytes([128 | kind, 128 | code]) + size.to_bytes(8, "big")[8 - width:]
        mask = os.urandom(4)
        masked = int.from_bytes(data, "big") ^ int.from_bytes((mask * (size // 4 + 1))[:size], "big")
        self._writer.write(head + mask + masked.to_bytes(size, "big"))


async def _read_exactly(reading) -> bytes:
    try:
        return await reading
    except (EOFError, asyncio.LimitOverrunError, ConnectionError):
        raise ConnectionClosed("the connection broke") from None
