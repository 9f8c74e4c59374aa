"""An MCP server with the calculator, by the public package `mcp`: over standard streams, or on a port by streamable HTTP."""

import sys

from calculator import calculate as value
from mcp.server import MCPServer

server = MCPServer("sums", log_level="ERROR")


@server.tool()
def calculate(expression: str) -> str:
    """The value of a sum of whole numbers."""
    return value(expression)


if len(sys.argv) > 1:
    server.run(transport="streamable-http", port=int(sys.argv[1]))
else:
    server.run()
