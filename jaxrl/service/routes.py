"""The protocol over HTTP: paths, keys, bodies and answers. The one file that imports starlette.

Every request is answered: a bug is an answer with an incident number, because the client sends a request whose
connection broke, or whose status is 5xx, again in silence for minutes.

Called by service.app.
"""

from __future__ import annotations

import asyncio
import datetime
import hmac
import json
import re
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxrl.service import bodies, owners, wire
from jaxrl.service.operations import Operations
from jaxrl.service.refusals import Refused
from jaxrl.service.store import Address
from jaxrl.service.worker import refusal

LONG_POLL = 30.0  # seconds; the client gives up after 45
ROOT = "/api/v1/"
BODY_BYTES, BODY_SECONDS = 1 << 20, 120.0  # of a request
# path -> bytes of those that are larger; the client cuts training data into pieces of 5 MB
LARGE_BYTES = {"forward_backward": 32 << 20, "asample": 16 << 20}
LOOPBACK = re.compile(r"(127(\.\d+){3}|localhost|\[::1\]|::1)(:\d+)?")
OLDEST = (0, 25)  # SDK whose forward_backward is protobuf


class Api:
    """Handlers of the routes: (request, raw body) -> a JSON-able dict or a Response; a Refused becomes its HTTP status.

    Args:
      operations: service.operations.Operations.
      keys: key that is accepted -> user; {} = any key, from names of this machine alone.
    """

    def __init__(self, operations: Operations, keys: dict[str, str]):
        self.operations, self.keys = operations, keys

    # ---- requests in, answers out

    async def body(self, request: Request) -> bytes:
        """Reads a body, raw bytes. Raises Refused before it is read whole: 413 for one that is too large, 408 for one
        that takes longer than BODY_SECONDS, 415 for a Content-Encoding."""
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refused(415, f"Content-Encoding {request.headers['content-encoding']!r}: send the body as it is")
        parts, size, most = [], 0, LARGE_BYTES.get(request.url.path.removeprefix(ROOT), BODY_BYTES)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise Refused(413, f"the body has more than {most} bytes; send fewer data in a request")
                    parts.append(part)
        except TimeoutError:
            raise Refused(408, f"the body has not come in {BODY_SECONDS:g} s; send the request again") from None
        return b"".join(parts)

    def user(self, request: Request) -> str | None:
        """Returns the name of the user whose key the header X-API-Key has; None (owners.ANYONE) if the server has no
        keys.

        A server without keys accepts any key, but from this machine only (Host 127.0.0.1 or localhost). It still needs
        the header, which a web page in a browser cannot send to it.

        Raises Refused: 401 for a missing or unknown key, 403 for another host at a server without keys."""
        key = request.headers.get("x-api-key", "")
        if self.keys:
            found = [name for own, name in self.keys.items() if hmac.compare_digest(key.encode(), own.encode())]
            if not found:
                raise Refused(401, "X-API-Key is not a key of this server: set TINKER_API_KEY to one of those in its "
                              "JAXRL_SERVICE_KEYS")
            return found[0]
        if not key:
            raise Refused(401, "the header X-API-Key is missing: set TINKER_API_KEY to any key that begins with tml-")
        if not LOOPBACK.fullmatch(request.headers.get("host", "")):
            raise Refused(403, f"Host {request.headers.get('host', '')!r}: without JAXRL_SERVICE_KEYS the server "
                          "answers requests to 127.0.0.1 and localhost alone")
        return owners.ANYONE

    # ---- POST

    async def client_config(self, request, raw):
        """Returns the flags that this server wants of a client. Raises Refused (422) for an SDK older than OLDEST."""
        version = bodies.read("client/config", bodies.parse(raw))["sdk_version"]
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers and tuple(map(int, numbers.groups())) < OLDEST:
            raise Refused(422, f"tinker {version}: this server speaks the protocol of 0.25 and later; pip install -U "
                          "tinker")
        return {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": False, "sample_use_retrieve_futures": False,
                "custom_loss_server_side": False, "sample_join_sampling_session": False,
                "use_pyqwest_transport": True, "parallel_fwdbwd_chunks": True}

    async def dynamic_config(self, request, raw):
        """Returns the flags that a client asks for again and again."""
        return {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}

    async def create_session(self, request, raw):
        """Creates a session, once for each X-Idempotency-Key; returns its id. Raises Refused (422) for a key that came
        with another request."""
        return self.operations.create_session(bodies.parse(raw), raw, request.headers.get("x-idempotency-key", ""))

    async def heartbeat(self, request, raw):
        """Answers that a session lives. Raises Refused (404) for one that is not known."""
        self.operations.session(bodies.read("session", bodies.parse(raw))["session_id"])
        return {"type": "session_heartbeat"}

    async def finish_session(self, request, raw):
        """Ends a session; its runs and weights stay. Raises Refused (404) for one that is not known."""
        self.operations.session(request.path_params["session"])
        return {}

    async def get_info(self, request, raw):
        """Returns base model and rank of a run; the rank is None before it was created. Raises Refused (404) for a run
        that is not known."""
        model_id = bodies.read("model", bodies.parse(raw))["model_id"]
        options, name = self.operations.model(model_id).options, self.operations.names[0]
        rank = None if options is None else options.rank
        return {"type": "get_info", "model_id": model_id, "is_lora": bool(rank), "model_name": name, "lora_rank": rank,
                "model_data": {"model_name": name, "tokenizer_id": name}}

    async def weights_info(self, request, raw):
        """Returns base model, rank and trained modules of saved weights. Raises Refused: 422 for a path that is none,
        404 for weights that are not there."""
        address = Address.parse(bodies.read("weights_info", bodies.parse(raw))["tinker_path"])
        about = self.operations.store.about(address)
        lora = about["lora"]
        return {"base_model": about["base_model"], "is_lora": bool(lora["rank"]), "lora_rank": lora["rank"],
                "train_unembed": lora.get("unembed", False), "train_mlp": lora["mlp"], "train_attn": lora["attention"]}

    async def forward_backward(self, request, raw):
        """Accepts a forward_backward request and returns its promise. Raises Refused (415) for a body that is not
        protobuf, and as Operations.forward_backward."""
        if not request.headers.get("content-type", "").startswith(wire.CONTENT_TYPE):
            raise Refused(415, f"forward_backward takes {wire.CONTENT_TYPE}: use a tinker SDK of 0.25 or later")
        return self.operations.forward_backward(raw)

    async def cancel_future(self, request, raw):
        """Ends sampling that nobody waits for."""
        self.operations.cancel_future(bodies.parse(raw))
        return {}

    async def telemetry(self, request, raw):
        """Accepts the client's telemetry and drops it."""
        return {"status": "accepted"}

    async def retrieve_future(self, request, raw):
        """Waits for a result for up to LONG_POLL seconds; without one the reply has status 408, and the client asks
        again.

        A refusal is returned as {"error", "category"}: "user" for a status below 500, else "server". Raises Refused:
        410 for an unknown request, 503 while the server stops."""
        name = bodies.read("retrieve_future", bodies.parse(raw))["request_id"]
        promise = self.operations.promise(name)
        waiting = asyncio.wrap_future(promise.future)
        await asyncio.wait([waiting], timeout=LONG_POLL)
        if not waiting.done():
            return JSONResponse({"type": "try_again", "request_id": name, "queue_state": "active"}, 408)
        if (error := waiting.exception()) is not None:
            reason = refusal(error, name)
            if reason.status == 503:
                raise reason
            return {"error": str(reason), "category": "user" if reason.status < 500 else "server"}
        result = waiting.result()
        return Response(result, media_type=wire.CONTENT_TYPE) if isinstance(result, bytes) else result

    # ---- GET and DELETE

    async def health(self, request, raw):
        """Answers that the server lives."""
        return {"status": "ok"}

    async def capabilities(self, request, raw):
        """Returns the models that a client may name."""
        o = self.operations
        return {"supported_models": [{"model_name": name, "max_context_length": o.longest, "trainable": True,
                                      "sampleable": True} for name in o.names]}

    async def get_session(self, request, raw):
        """Returns the runs and samplers of a session, with its metadata. Raises Refused (404) for one that is not
        known."""
        found = self.operations.session(request.path_params["session"])
        return {"training_run_ids": found["runs"], "sampler_ids": found["samplers"],
                "user_metadata": found["user_metadata"], "display_name": found["display_name"]}

    async def get_sampler(self, request, raw):
        """Returns the base and the weights of a sampling session. Raises Refused (404) for one that is not known."""
        sampler_id = request.path_params["sampler"]
        found = self.operations.sampling_session(sampler_id)
        return {"sampler_id": sampler_id, "base_model": self.operations.names[0], "model_path": found.path}

    async def training_run(self, request, raw):
        """Returns one run of this process, or of saved weights. Raises Refused (404) if there is none of this name."""
        return self._run(request.path_params["run"])

    async def training_runs(self, request, raw):
        """Returns the runs of this process and of saved weights that the user may see, a page of `limit` (default 20)
        from `offset`. Raises Refused (422) for a limit or offset that is no whole number."""
        names = dict.fromkeys([*self.operations.runs(), *(Address.parse(about["address"]).run
                                                          for about in self.operations.store.list())])
        limit, offset = (_number(request, name, default) for name, default in (("limit", 20), ("offset", 0)))
        return {"training_runs": [self._run(name) for name in list(names)[offset:offset + limit]],
                "cursor": {"offset": offset, "limit": limit, "total_count": len(names)}}

    async def checkpoints(self, request, raw):
        """Returns saved weights, the newest first: all that the user may see, or those of the run in the path. Raises
        Refused (404) for a run whose name cannot be one."""
        found = [_checkpoint(about) for about in self.operations.store.list(request.path_params.get("run", ""))]
        return {"checkpoints": found, "cursor": {"offset": 0, "limit": len(found), "total_count": len(found)}}

    async def delete_checkpoint(self, request, raw):
        """Deletes saved weights; the reply has status 204. Raises Refused: 422 for a path that is none, 404 for weights
        that are not there."""
        p = request.path_params
        self.operations.store.delete(Address.parse(f"tinker://{p['run']}/{p['kind']}/{p['name']}"))
        return Response(status_code=204)

    def _run(self, run: str) -> dict:
        saved = self.operations.store.list(run)
        model = self.operations.runs().get(run)
        if model is None and not saved:
            raise Refused(404, f"training run {run!r}: there is none of this name")
        rank = saved[0]["lora"]["rank"] if model is None or model.options is None else model.options.rank
        by_kind = {about["kind"]: _checkpoint(about) for about in reversed(saved)}
        return {"training_run_id": run, "base_model": self.operations.names[0], "model_owner": "local",
                "is_lora": bool(rank), "lora_rank": rank,
                "last_request_time": _time(saved[0]["time"] if model is None else model.used),
                "last_checkpoint": by_kind.get("training"), "last_sampler_checkpoint": by_kind.get("sampler"),
                "user_metadata": saved[0]["user_metadata"] if model is None else model.user_metadata}


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not re.fullmatch(r"\d{1,9}", text):
        raise Refused(422, f"{name}={text!r}: expected a whole number")
    return int(text)


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _checkpoint(about: dict) -> dict:
    address = Address.parse(about["address"])
    return {"checkpoint_id": f"{address.kind}/{address.name}", "checkpoint_type": about["kind"],
            "time": _time(about["time"]), "tinker_path": str(address), "user_metadata": about["user_metadata"],
            "expires_at": None if about["expires"] is None else _time(about["expires"])}


def make_app(operations: Operations, keys: dict[str, str] | None = None) -> Starlette:
    """Returns the ASGI application. keys: accepted key -> user; None or {} = any key, from this machine only."""
    api = Api(operations, keys or {})
    o = operations
    posts = {
        "client/config": api.client_config, "client/dynamic_config": api.dynamic_config,
        "create_session": api.create_session, "session_heartbeat": api.heartbeat,
        "sessions/{session}/finish": api.finish_session, "create_model": _with_body(o.create_model),
        "get_info": api.get_info, "weights_info": api.weights_info, "forward_backward": api.forward_backward,
        "optim_step": _with_body(o.optim_step), "save_weights": _with_body(o.save_weights),
        "save_weights_for_sampler": _with_body(o.save_weights_for_sampler), "load_weights": _with_body(o.load_weights),
        "create_sampling_session": _with_body(lambda body, raw: o.create_sampling_session(body)),
        "asample": _with_body(o.asample), "retrieve_future": api.retrieve_future, "cancel_future": api.cancel_future,
        "telemetry": api.telemetry}
    gets = {"healthz": api.health, "get_server_capabilities": api.capabilities, "sessions/{session}": api.get_session,
            "samplers/{sampler}": api.get_sampler, "training_runs": api.training_runs, "checkpoints": api.checkpoints,
            "training_runs/{run}": api.training_run, "training_runs/{run}/checkpoints": api.checkpoints}
    one = "training_runs/{run}/checkpoints/{kind}/{name}"
    tables = {"POST": posts, "GET": gets, "DELETE": {one: api.delete_checkpoint}}
    routes = [Route(f"{ROOT}{path}", _answering(api, handler), methods=[method])
              for method, table in tables.items() for path, handler in table.items()]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
    app.router.redirect_slashes = False
    app.state.operations = operations
    return app


def _with_body(operation):
    async def handler(request, raw):
        return operation(bodies.parse(raw), raw)

    return handler


def _answering(api: Api, handler):
    """Returns an endpoint: key, body, handler; a Refused is its status and message, any other error an incident."""
    async def endpoint(request: Request) -> Response:
        try:
            if handler != api.health:
                owners.user.set(api.user(request))
            raw = await api.body(request)
            if raw and handler != api.forward_backward:
                _check_json(request)
            found: Any = await handler(request, raw)
            return found if isinstance(found, Response) else JSONResponse(found)
        except Refused as e:
            return _error(e)
        except ClientDisconnect:
            return _error(Refused(400, "the connection broke before the whole body came"))
        except OSError as e:  # of the journal: nothing was accepted, and the client sends it again
            return _error(Refused(503, f"{request.url.path}: {e.strerror or e}; free space on the server's disk"))
        except Exception as e:
            reason = refusal(e, request.url.path)
            return _error(Refused(422, str(reason)))  # 5xx would be sent again

    return endpoint


def _check_json(request: Request) -> None:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, f"Content-Type {kind[:80]!r}: {request.url.path[:200]} takes application/json")


def _error(e: Refused) -> Response:
    headers = {"Retry-After": "2"} if e.status in (429, 503) else None
    return JSONResponse({"error": str(e), "category": "user" if e.status < 500 else "server"}, e.status, headers)


async def _no_route(request: Request, e: Exception) -> Response:
    status = getattr(e, "status_code", 404)
    text = f"{request.method} {request.url.path[:200]} is not served here; docs/guides/service.md lists what is"
    return Response(json.dumps({"error": text, "category": "user"}), status, media_type="application/json")
