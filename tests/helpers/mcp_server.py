"""A server of the Model Context Protocol, standard library only, that can also misbehave: `mcp_server.py stdio [how]`, or `http [how]`,
which prints its port. Sessions count their own calls."""

import http.server
import json
import os
import sys
import time
import uuid

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
NOTHING = {"type": "object", "properties": {}}
TOOLS = [{"name": "add", "description": "Adds.", "inputSchema": NUMBERS},
         {"name": "count", "description": "Counts the calls.", "inputSchema": NOTHING},
         {"name": "act", "description": "Does something.", "inputSchema": {"type": "object", "properties": {"how": {"type": "string"}}}}]


def answer(message, state):
    """The reply to a message, None to a notification."""
    method, params = message.get("method"), message.get("params") or {}
    if message.get("id") is None or method is None:
        return None
    return {"jsonrpc": "2.0", "id": message["id"], **told(method, params, state)}


def told(method, params, state):
    if method == "initialize":
        return {"result": {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                           "serverInfo": {"name": "test", "version": "1"}}}
    if method == "tools/list":  # one on each page
        at = int(params.get("cursor", 0))
        return {"result": {"tools": TOOLS[at:at + 1], **({"nextCursor": str(at + 1)} if at + 1 < len(TOOLS) else {})}}
    arguments, state["calls"] = params["arguments"], state.get("calls", 0) + 1
    if params["name"] == "count":
        return text(state["calls"])
    if params["name"] == "add":
        if set(arguments) != {"a", "b"}:
            return {"error": {"code": -32602, "message": "a and b are needed"}}
        return text(arguments["a"] + arguments["b"])
    how = arguments["how"]
    if how == "die":
        os._exit(3)
    if how == "hang":
        time.sleep(600)
    if how == "garbage":
        sys.stdout.write("no json\n")
    if how == "refuse":
        return text("not today", isError=True)
    if how == "error":
        return {"error": {"code": -32000, "message": "out of order"}}
    if how == "structured":
        return {"result": {"content": [], "structuredContent": {"x": 1}}}
    return {"result": [1]}


def text(value, **more):
    return {"result": {"content": [{"type": "text", "text": str(value)}], **more}}


def stdio():
    state = {}
    print(json.dumps({"jsonrpc": "2.0", "id": 77, "method": "roots/list"}), flush=True)  # what it asks is refused
    for line in sys.stdin:
        reply = answer(json.loads(line), state)
        if reply is not None:
            print(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}}), flush=True)
            print(json.dumps(reply), flush=True)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version, sessions = "HTTP/1.1", {}

    def do_POST(self):
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        id = self.headers.get("Mcp-Session-Id")
        if message["method"] == "initialize":
            self.sessions[id := uuid.uuid4().hex] = {}
        if id not in self.sessions:
            return self.say(404, b"", "text/plain")
        assert message["method"] == "initialize" or self.headers["MCP-Protocol-Version"]
        reply = answer(message, self.sessions[id])
        if reply is None:
            return self.say(202, b"", "text/plain")
        data = json.dumps(reply).encode()
        if (message.get("params") or {}).get("arguments", {}).get("how") == "truncated":
            data = data[:len(data) // 2]
        if message["method"] == "tools/call":  # as events, of which the first is no answer
            note = json.dumps({"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}).encode()
            return self.say(200, b"event: message\r\ndata: " + note + b"\r\n\r\nid: 1\ndata: " + data + b"\n\n", "text/event-stream", id)
        return self.say(200, data, "application/json", id)

    def do_DELETE(self):
        self.sessions.pop(self.headers.get("Mcp-Session-Id"), None)
        self.say(204, b"", "text/plain")

    def say(self, status, data, kind, session=None):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if session:
            self.send_header("Mcp-Session-Id", session)
        if kind == "text/event-stream":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            half = len(data) // 2
            for part in (data[:half], data[half:], b""):
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            return
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        stdio()
    else:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        print(server.server_address[1], flush=True)
        server.serve_forever()
