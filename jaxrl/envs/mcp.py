"""Servers of the Model Context Protocol as tools: a small client over standard streams or streamable HTTP.

Implements what tools need of the protocol (revision 2025-06-18): initialize, tools/list, tools/call. A result with
`isError` and invalid parameters are reported to the model like a ToolError; any other failure is the environment's.
Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import ssl
import sys
from urllib.parse import urlsplit

from jaxrl.envs.tools import BadEnvironment, Tool, ToolError
from jaxrl.workers import supervisor
from jaxrl.workers.loading import LoadError

VERSION = "2025-06-18"
MAX_MESSAGE_BYTES = 1 << 24        # bytes of a message
LIST_SECONDS = 60.0     # for a server to start and list its tools
SHUTDOWN_SECONDS = 2.0        # for a server to exit after its input is closed
INVALID = -32602         # JSON-RPC: invalid parameters
MAX_PAGES = 1000             # most pages of tools/list


class Server:
    """A connection to one server: `open`, then `tools` (schemas for the model) and `call`; `close` at the end.

    Notifications of the server are dropped, its requests are refused.

    Args:
      address: an http(s) URL, or a command line.

    Raises:
      BadEnvironment: from `open` and `call`, if the server cannot be reached or breaks the protocol.
    """

    def __init__(self, address: str):
        self.given, self.tools = address, []
        self._wire = Http(address) if is_url(address) else Stdio(address)
        self._ids = itertools.count(1)
        shown = address if is_url(address) else " ".join(map(os.path.basename, shlex.split(address)))
        self.name = f"MCP server {shown!r}"

    @property
    def broken(self) -> bool:
        """Whether the connection failed for good, so that the server must be opened again: its process ended or broke
        the protocol; over HTTP, where each message connects anew, whether it lost the session."""
        return self._wire.fault is not None

    async def open(self) -> Server:
        """Connects, lists the tools (at most MAX_PAGES pages), and returns the server. Raises BadEnvironment if that
        fails; the connection is closed then."""
        await self._wire.open(self.name)
        try:
            result = await self._ask("initialize", {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {
                "name": "jaxrl", "version": "1"}})
            self._wire.version = str(result.get("protocolVersion") or VERSION)
            await self._wire.notify({"jsonrpc": "2.0", "method": "notifications/initialized"})
            page: dict = {}
            for _ in range(MAX_PAGES):
                result = await self._ask("tools/list", page)
                self.tools += [self._schema(tool) for tool in result.get("tools") or ()]
                if not result.get("nextCursor"):
                    break
                page = {"cursor": result["nextCursor"]}
        except BaseException:
            await self.close()
            raise
        return self

    async def call(self, name: str, arguments: dict, images: bool = False) -> str | list:
        """Returns the tool's texts, or the JSON of structured content without text; with `images` parts where there is
        an image, else a note in its place.

        name, arguments: of the tool. Raises ToolError for a result with isError and for invalid parameters, with the
        server's text; BadEnvironment for any other failure."""
        result = await self._ask("tools/call", {"name": name, "arguments": arguments})
        parts = result.get("content") or []
        if images and not result.get("isError") and any(part.get("type") == "image" for part in parts):
            return [{"type": "image", "image": f"data:;base64,{part.get('data')}"} if part.get("type") == "image" else
                    {"type": "text", "text": str(part.get("text", f"({part.get('type')} content)"))} for part in parts]
        texts = [part.get("text") if part.get("type") == "text" else f"({part.get('type')} content)" for part in parts]
        text = "\n".join(map(str, texts))
        if not parts and result.get("structuredContent") is not None:
            text = json.dumps(result["structuredContent"], ensure_ascii=False)
        if result.get("isError"):
            raise ToolError(text or "error")
        return text

    async def close(self) -> None:
        """Ends the session."""
        await self._wire.close()

    async def _ask(self, method: str, params: dict) -> dict:
        number = next(self._ids)
        answer = await self._wire.ask({"jsonrpc": "2.0", "id": number, "method": method, "params": params}, number)
        if "error" in answer:
            error = answer["error"] if isinstance(answer["error"], dict) else {}
            if method == "tools/call" and error.get("code") == INVALID:
                raise ToolError(str(error.get("message", "invalid parameters")))
            raise BadEnvironment(f"{self.name} replied to {method} with error {error.get('code')}: "
                                 f"{str(error.get('message'))[:200]}")
        if not isinstance(answer.get("result"), dict):
            raise BadEnvironment(f"{self.name} replied to {method} without a result")
        return answer["result"]

    def _schema(self, tool) -> dict:
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise BadEnvironment(f"{self.name} lists a tool without a name")
        parameters = tool.get("inputSchema")
        kind = {"type": "object", "properties": {}}
        kind |= {k: v for k, v in parameters.items() if k != "$schema"} if isinstance(parameters, dict) else {}
        return {"type": "function", "function": {
            "name": tool["name"], "description": str(tool.get("description") or ""), "parameters": kind}}


class McpTool(Tool):
    """A tool of an MCP server, which checks its arguments.

    server: where it runs. schema: {"type": "function", "function": ...}. images: whether images in its results are
    shown to the model."""

    def __init__(self, server: Server, schema: dict, images: bool = False):
        self.schema, self.name = schema, schema["function"]["name"]

        async def run(arguments):
            return await server.call(self.name, arguments, images)

        self.fn = run

    def arguments(self, arguments: dict) -> dict:
        """Returns the keyword arguments of `fn`; the server checks the tool's own."""
        return {"arguments": arguments}


async def open_servers(addresses: list[str]) -> list[Server]:
    """Connects to all servers and returns them with their tools; closes them again if one fails.

    addresses: URLs or command lines. Raises BadEnvironment."""
    servers = []
    try:
        for one in addresses:
            servers.append(await Server(one).open())
    except BaseException:
        await close_servers(servers)
        raise
    return servers


async def close_servers(servers: list[Server]) -> None:
    """Closes the connections of all servers at the same time."""
    await asyncio.gather(*(server.close() for server in servers))


def needs_restart(opening: asyncio.Future) -> bool:
    """Returns whether servers shared by several episodes have to be restarted: opening failed, or a connection broke.

    opening: the future of `open_servers`; False while it is not done."""
    if not opening.done():
        return False
    return opening.cancelled() or opening.exception() is not None or any(s.broken for s in opening.result())


def command_files(servers: list[str]) -> list[str]:
    """Returns the words of the servers' command lines that are existing files."""
    return [word for one in servers if not is_url(one) for word in shlex.split(one) if os.path.isfile(word)]


def is_url(address: str) -> bool:
    """Returns whether a server is given as an http(s) URL."""
    return address.startswith(("http://", "https://"))


def list_tools(servers: list[str]) -> list[dict]:
    """Starts and stops each server once and returns the schemas of their tools.

    servers: URLs or command lines. Raises LoadError if one fails or they take more than LIST_SECONDS together."""
    async def list_all():
        found = await open_servers(servers)
        await close_servers(found)
        return [schema for server in found for schema in server.tools]

    try:
        return asyncio.run(asyncio.wait_for(list_all(), LIST_SECONDS))
    except TimeoutError:
        raise LoadError(f"its servers did not list their tools within {LIST_SECONDS:g} s") from None
    except BadEnvironment as e:
        raise LoadError(str(e)) from None


# -- transports: open, ask (a numbered message -> its reply), notify, close -------------------------------------------


def _message(name: str, data) -> dict:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise BadEnvironment(f"{name} wrote invalid JSON: {bytes(data)[:60].decode('utf-8', 'replace')!r}") from None
    if not isinstance(message, dict):
        raise BadEnvironment(f"{name} wrote JSON that is not a JSON-RPC message")
    return message


def _refusal(message: dict) -> dict | None:
    """Returns the reply to a server's request, None if the message is not one."""
    if "method" not in message or message.get("id") is None:
        return None
    if message["method"] == "ping":
        return {"jsonrpc": "2.0", "id": message["id"], "result": {}}
    return {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "not offered"}}


class Stdio:
    """Connection to an MCP server process, one message per line. On Linux no child process outlives it.

    command: its command line, split as a shell does.

    Attributes:
      fault: why the connection is broken, for good; None while it is not."""

    version = VERSION

    def __init__(self, command: str):
        self._words = shlex.split(command)
        self._process: asyncio.subprocess.Process | None = None
        self._waiting, self.fault = {}, None

    async def open(self, name: str) -> None:
        """Starts the server. Raises BadEnvironment if its program is not found. name: of the server, for messages."""
        self._name = name
        if shutil.which(self._words[0]) is None:
            raise BadEnvironment(f"{name}: program {self._words[0]!r} not found; install it or correct the path")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", supervisor.__file__, "0", *self._words, stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, start_new_session=True, limit=MAX_MESSAGE_BYTES)
        assert self._process.stdin and self._process.stdout  # both are pipes
        self._into = self._process.stdin
        self._reader = asyncio.ensure_future(self._read(self._process.stdout))

    async def ask(self, message: dict, number: int) -> dict:
        """Sends a JSON-RPC request and waits for the reply with this id. Raises BadEnvironment if the server has ended,
        or wrote what is no JSON-RPC message or more than MAX_MESSAGE_BYTES.

        Args:
          message: the request, with its id.
          number: the id.
        """
        if self.fault is not None:
            raise BadEnvironment(self.fault)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self.notify(message)
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def notify(self, message: dict) -> None:
        """Sends a JSON-RPC message that has no reply."""
        with contextlib.suppress(ConnectionError):  # the reader notices the end
            self._into.write(json.dumps(message).encode() + b"\n")
            await self._into.drain()

    async def _read(self, out_of: asyncio.StreamReader) -> None:
        try:
            while line := await out_of.readline():
                message = _message(self._name, line)
                if (refusal := _refusal(message)) is not None:
                    await self.notify(refusal)
                answer = self._waiting.get(message.get("id")) if "method" not in message else None
                if answer is not None and not answer.done():
                    answer.set_result(message)
            self.fault = f"{self._name} ended"
        except BadEnvironment as e:
            self.fault = str(e)
        except ValueError:
            self.fault = f"{self._name} wrote a line of more than {MAX_MESSAGE_BYTES} bytes"
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(BadEnvironment(self.fault))

    async def close(self) -> None:
        """Closes the server's input, and ends it if it does not exit within SHUTDOWN_SECONDS."""
        if self._process is None:
            return
        with contextlib.suppress(ConnectionError):
            self._into.close()
        ended = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({ended}, timeout=SHUTDOWN_SECONDS)
        finally:
            if not ended.done():
                with contextlib.suppress(OSError):
                    if sys.platform == "linux":
                        self._process.send_signal(supervisor.END)
                    else:
                        os.killpg(self._process.pid, signal.SIGKILL)
            await ended
            self._reader.cancel()


class Http:
    """Connection to an MCP server by streamable HTTP: each message is a POST, answered by JSON or an event stream.

    With a session if the server has them.

    url: the server's endpoint.

    Attributes:
      fault: that the session was lost; None until then. version: of the protocol, which later messages name; `Server`
        sets it."""

    def __init__(self, url: str):
        self._url, self._session, self.version, self.fault = urlsplit(url), "", "", None

    async def open(self, name: str) -> None:
        """Sets the server's name for messages; the first request connects."""
        self._name = name

    async def ask(self, message: dict, number: int) -> dict:
        """Sends a JSON-RPC request and returns the reply with this id.

        message: the request, with its id. number: the id. Raises BadEnvironment if the connection fails, for an HTTP
        status other than 200, a lost session, invalid JSON, and a response without this reply."""
        async with self._request("POST", message) as (status, headers, parts):
            if status == 404 and self._session:
                self.fault = f"{self._name} has lost the session"
                raise BadEnvironment(self.fault)
            if status != 200:
                raise BadEnvironment(f"{self._name} replied to {message['method']} with HTTP {status}")
            self._session = headers.get("mcp-session-id", self._session)
            stream = headers.get("content-type", "").startswith("text/event-stream")
            async for data in (_events(parts) if stream else _whole_body(parts)):
                message_in = _message(self._name, data)
                if "method" not in message_in and message_in.get("id") == number:
                    return message_in
        raise BadEnvironment(f"{self._name} did not reply to {message['method']}")

    async def notify(self, message: dict) -> None:
        """Sends a JSON-RPC message that has no reply. Raises BadEnvironment if the connection fails, and for an HTTP
        status other than 200, 202 and 204."""
        async with self._request("POST", message) as (status, _, _):
            if status not in (200, 202, 204):
                raise BadEnvironment(f"{self._name} replied to {message.get('method')} with HTTP {status}")

    async def close(self) -> None:
        """Ends the session if there is one; failures are ignored."""
        if self._session:  # a server need not support DELETE
            with contextlib.suppress(BadEnvironment, TimeoutError):
                async with asyncio.timeout(SHUTDOWN_SECONDS), self._request("DELETE", None):
                    self._session = ""

    @contextlib.asynccontextmanager
    async def _request(self, method: str, message: dict | None):
        """Yields (status, headers, parts of the body) of a request."""
        url, data = self._url, b"" if message is None else json.dumps(message).encode()
        secure = url.scheme == "https"
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        head = [f"{method} {path} HTTP/1.1", f"Host: {url.netloc.rpartition('@')[2]}", "Connection: close",
                "Accept: application/json, text/event-stream", "Content-Type: application/json",
                f"Content-Length: {len(data)}"]
        head += [f"Mcp-Session-Id: {self._session}"] * bool(self._session)
        head += [f"MCP-Protocol-Version: {self.version}"] * bool(self.version)
        writer = None
        try:
            reader, writer = await asyncio.open_connection(
                url.hostname, url.port or (443 if secure else 80), limit=MAX_MESSAGE_BYTES,
                ssl=ssl.create_default_context() if secure else None)
            writer.write("\r\n".join([*head, "", ""]).encode() + data)
            await writer.drain()
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {n.strip().lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
            yield int(first.split(" ")[1]), headers, _parts(reader, headers)
        except (OSError, EOFError, asyncio.LimitOverrunError, ValueError, IndexError) as e:
            raise BadEnvironment(f"{self._name}: {type(e).__name__}") from e
        finally:
            if writer is not None:
                writer.close()


async def _parts(reader, headers: dict):
    """Yields a body as it arrives."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).partition(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readline()
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while data := await reader.read(1 << 16):
            yield data


async def _whole_body(parts):
    yield b"".join([part async for part in parts])


async def _events(parts):
    """Yields the data of server-sent events."""
    buffer, data = b"", []
    async for part in parts:
        *lines, buffer = (buffer + part).split(b"\n")
        for line in (line.rstrip(b"\r") for line in lines):
            if line.startswith(b"data:"):
                data.append(line[5:].strip())
            elif not line and data:
                yield b"\n".join(data)
                data = []
