"""A server of OpenEnv's documented protocol by the standard library, which can also do what no server should:
`python openenv_server.py PORT [KIND [CAPACITY]]`."""

import asyncio
import base64
import hashlib
import json
import sys

from openenv_world import World

FIELDS = {"text": {"say": "string"}, "number": {"number": "integer"}, "both": {"number": "integer", "why": "string"}}
TYPES = {"string": str, "integer": int}
WRONG = {"garbage": "no json", "other": json.dumps({"type": "state", "data": {}}), "nothing": json.dumps({"type": "observation"}),
         "odd": json.dumps({"type": "observation", "data": {"observation": "x", "reward": 1, "done": False}}),
         "words": json.dumps({"type": "observation", "data": {"observation": {}, "reward": "high", "done": False}})}


class Server:
    def __init__(self, kind, capacity):
        self.fields, self.capacity, self.open = FIELDS[kind], capacity, 0

    async def serve(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if head.startswith("GET /ws "):
                key = next(line for line in head.split("\r\n") if line.lower().startswith("sec-websocket-key")).split(": ")[1]
                accept = base64.b64encode(hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest())
                writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                             b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n")
                await self.session(reader, writer)
            elif head.startswith("GET /schema "):
                properties = {"metadata": {"type": "object"}} | {n: {"type": t} for n, t in self.fields.items()}
                data = json.dumps({"action": {"properties": properties}, "observation": {}, "state": {}})
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n{data}".encode())
            else:
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        except (EOFError, ConnectionError):
            pass
        finally:
            writer.close()

    async def session(self, reader, writer):
        if self.open >= self.capacity:
            say(writer, json.dumps({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED",
                                                              "max_sessions": self.capacity}}))
            return
        self.open += 1
        try:
            world = World()
            while (text := await hear(reader)) is not None:
                message = json.loads(text)
                if message["type"] == "close":
                    return
                said = message["data"].get("say") if message["type"] == "step" else None
                if said == "hang":
                    await asyncio.sleep(600)
                if said == "break":
                    writer.write(b"\x81\x7e\xff")  # a message that ends in its head
                    return
                writer.write(b"\x89\x01x")  # a ping
                say(writer, WRONG[said] if said in WRONG else json.dumps(self.answer(world, message)), parts=said == "1")
                await writer.drain()
        finally:
            self.open -= 1

    def answer(self, world, message):
        data = message.get("data") or {}
        if message["type"] == "state":
            return {"type": "state", "data": world.state()}
        if message["type"] == "step" and {n: type(v) for n, v in data.items()} != {n: TYPES[t] for n, t in self.fields.items()}:
            return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": []}}
        try:
            seen, reward, done = (world.reset(data["seed"], data.get("level", 1)) if message["type"] == "reset"
                                  else world.step(next(iter(data.values()))))
        except Exception as e:
            return {"type": "error", "data": {"message": str(e), "code": "EXECUTION_ERROR"}}
        return {"type": "observation", "data": {"observation": seen, "reward": reward, "done": done}}


async def hear(reader):
    """A text, or None at the end."""
    first, second = await reader.readexactly(2)
    assert second & 128, "a client's frames are masked"
    size = second & 127
    if size > 125:
        size = int.from_bytes(await reader.readexactly(2 if size == 126 else 8), "big")
    mask = await reader.readexactly(4)
    data = bytes(b ^ mask[k % 4] for k, b in enumerate(await reader.readexactly(size)))
    if first & 15 == 10:  # a pong
        assert data == b"x"
        return await hear(reader)
    return data.decode() if first & 15 == 1 else None


def say(writer, text, parts=False):
    """In one frame, or in two."""
    data = text.encode()
    for kind, piece in (((1, data[:3]), (128, data[3:])) if parts else ((129, data),)):
        size = len(piece)
        writer.write(bytes([kind, size]) + piece if size < 126 else bytes([kind, 126]) + size.to_bytes(2, "big") + piece)


async def main(port, kind="text", capacity="64"):
    server = await asyncio.start_server(Server(kind, int(capacity)).serve, "127.0.0.1", int(port))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
