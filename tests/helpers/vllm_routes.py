"""Middleware of the tests' own: tells every route that a running vLLM server has. It stands behind jaxrl's guard."""

import json


def walk(routes, prefix=""):
    for route in routes:
        path = prefix + (getattr(route, "path", "") or "")
        inner = getattr(route, "routes", None) or getattr(getattr(route, "original_router", None), "routes", None)
        if inner:
            yield from walk(inner, path)
        elif path:
            yield path, sorted(getattr(route, "methods", None) or ["GET"])


class Routes:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope.get("path") != "/routes":
            return await self.app(scope, receive, send)
        body = json.dumps(list(walk(scope["app"].routes))).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})
