"""Hostile requests to the training service, made by kind: a body that is accepted, and what each field, path or header of it is spoiled with."""

import collections
import json

import numpy as np

from helpers.tinker_cases import LONGEST, PROTO, VOCAB, forward_backward, next_tokens, text
from jaxrl.service import bodies, wire

ANNA, BEN, ROW = "tml-anna", "tml-ben", next_tokens([3, 10, 11, 12, 13, 14])
NUL, MIRROR, WIDE = "a\u0000b", "a\u202egnp.exe", "\uff0e\uff0e\uff0f\u2044\u2215"
WRONG = {  # kind of a field -> values that it never has
    bodies.TEXTS: (7, True, [], {"a": 1}, 1.5),
    bodies.INTEGER: ("1", 1.5, True, [], {}, 2**70, -(2**70), 10**300, "9" * 400),
    bodies.NUMBER: ("1", True, [], {}, 2**80, -(2**80)),
    bodies.FLAG: (1, "true", [], {}),
    bodies.TABLE: ([], "x", 1, True),
    bodies.LIST: ({}, "x", 1),
}
IDS = ("", "..", "../../etc/passwd", "/etc/passwd", NUL, MIRROR, WIDE, "%2e%2e%2f", "x" * 70_000, "none", "*", "a:train:0", "\n", "__proto__")
UNPARSED = (
    b"",
    b"{",
    b"null",
    b"[1]",
    b'"x"',
    b"\xff\xfe{}",
    b"\x00",
    b"{}" * 2,
    b'{"a": NaN}',
    b'{"a": -Infinity}',
    b'{"a": 1e999}',
    b'{"a": 1,}',
    b'{"a": ' + b"9" * 5000 + b"}",
    b"[" * 50_000,
    b'{"a":' * 50_000,
    b'{"a": "\\ud800"}',
    b'{"\\udfff": 1}',
    b"<?xml version='1.0'?>",
)


def accepted(b: dict) -> dict[str, dict]:
    """A body of every path that takes JSON, which Ben, who has `b`, may send. "seq_id" is put in where it is sent."""
    adapter = {"rank": 2, "seed": 1, "train_unembed": False}
    return {
        "client/config": {"sdk_version": "0.38.0"},
        "create_session": {"tags": [], "sdk_version": "0.38.0"},
        "session_heartbeat": {"session_id": b["session"]},
        "create_model": {"session_id": b["session"], "model_seq_id": 7, "base_model": "tiny", "lora_config": adapter},
        "get_info": {"model_id": b["run"]},
        "weights_info": {"tinker_path": b["path"]},
        "optim_step": {"model_id": b["run"], "seq_id": 0, "adam_params": {}},
        "save_weights": {"model_id": b["run"], "seq_id": 0, "path": "again"},
        "save_weights_for_sampler": {"model_id": b["run"], "seq_id": 0, "path": "again"},
        "load_weights": {"session_id": b["session"], "model_seq_id": 8, "path": b["path"], "optimizer": True},
        "create_sampling_session": {"session_id": b["session"], "sampling_session_seq_id": 9, "base_model": "tiny"},
        "asample": {"sampling_session_id": b["sampler"], "seq_id": 0, "prompt": text([3, 4]), "sampling_params": {"max_tokens": 1}},
        "retrieve_future": {"request_id": b["future"]},
        "cancel_future": {"request_id": "none"},
    }


PARSED = list(accepted(collections.defaultdict(str)))
KIND = {"session_heartbeat": "session", "get_info": "model"}  # path -> its row of bodies.BODIES


def hostile_bodies(a: dict, b: dict):
    """(what, path, JSON) of Ben; a: what Anna has."""
    good = accepted(b)
    for path in PARSED:
        fields = bodies.BODIES[KIND.get(path, path)]
        for name, field in fields.items():
            for value in WRONG.get(field.kind, ()):
                yield f"wrong type of {name}", path, good[path] | {name: value}
        yield "unknown field", path, good[path] | {"__class__": 1}
        if required := [name for name, field in fields.items() if field.default is bodies.REQUIRED]:
            yield "missing field", path, {k: v for k, v in good[path].items() if k != required[-1]}
        for name in ("session_id", "model_id", "sampling_session_id", "request_id"):
            if name in good[path] and path != "cancel_future":
                foreign = {"session_id": "session", "model_id": "run", "sampling_session_id": "sampler", "request_id": "future"}[name]
                for value in (*IDS, a[foreign]):
                    yield "another's id" if value == a[foreign] else "hostile id", path, good[path] | {name: value}
    run, name = a["path"].split("/")[2], "weights/secret"
    hostile = [
        *IDS,
        "tinker://",
        "file:///etc/passwd",
        f"tinker://../{name}",
        f"tinker://{run}/weights/..",
        f"tinker://{run}/../{name}",
        a["path"],
        a["path"].replace(":train:", "_train_"),
        a["path"] + "/",
        a["path"].upper(),
        a["path"].replace("weights", "sampler_weights"),
        f"tinker://{run}/weights/%73ecret",
        f"tinker://{run}/weights/secret\u0000",
        f"tinker://{run}/weights/secret\n",
        f"tinker://link/{name}",
        f"tinker://{b['run']}/weights/link",
        f"tinker://{run}/weights/.secret.new",
        f"tinker://{run}\\weights\\secret",
        "tinker://" + "a" * 5000,
    ]
    for field, path in (("tinker_path", "weights_info"), ("path", "load_weights"), ("model_path", "create_sampling_session")):
        for value in hostile:
            yield "hostile path", path, good[path] | {field: value, **({"base_model": None} if field == "model_path" else {})}
    for path in ("save_weights", "save_weights_for_sampler"):
        for value in (*IDS[:9], *IDS[10:], "a/b", "a\\b", ".hidden", "a\n", "a" * 129, a["path"], "\u0430\u0301", "CON:", "~root"):
            yield "hostile name", path, good[path] | {"path": value}
        for value in (10**12, -(10**12)):
            yield "hostile time to live", path, good[path] | {"ttl_seconds": value}
    for path in ("create_session", "create_model", "save_weights"):
        yield "huge notes", path, good[path] | {"user_metadata": {"a": "x" * 100_000}}
        yield "deep notes", path, good[path] | {"user_metadata": json.loads('{"a":' * 900 + "1" + "}" * 900), "b": 1}
    for adam in (
        {"learning_rate": -1},
        {"learning_rate": 2**70},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"eps": "0"},
        {"weight_decay": [1]},
        {"grad_clip_norm": -1},
        {"lr": 1},
        {"beta1": True},
    ):
        yield "adam", "optim_step", good["optim_step"] | {"adam_params": adam}
    for number, lora in enumerate(
        (
            {"rank": 0},
            {"rank": -1},
            {"rank": 5},
            {"rank": 2**62},
            {"rank": "2"},
            {"rank": 2, "train_mlp": False, "train_attn": False, "train_unembed": False},
            {"rank": 2, "x": 1},
            {"rank": 2, "seed": 1.5},
            {},
        ),
        100,
    ):
        yield "lora", "create_model", good["create_model"] | {"model_seq_id": number, "lora_config": lora}
    params = good["asample"]["sampling_params"]
    for more in (
        {"max_tokens": 0},
        {"max_tokens": -5},
        {"temperature": -1},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 2},
        {"top_k": -7},
        {"stop": {}},
        {"stop": 1.5},
        {"stop": [[1]]},
        {"stop": [1, "a"]},
        {"stop": [-1]},
        {"stop": [2**70]},
        {"stop": [""]},
        {"stop": ["x" * 5000]},
        {"stop": list(range(3, 60))},
        {"stop": True},
        {"seed": 1.5},
        {"x": 1},
    ):
        yield "sampling", "asample", good["asample"] | {"sampling_params": params | more}
    chunk = {"type": "encoded_text"}
    for prompt in (
        {},
        {"chunks": []},
        {"chunks": 3},
        {"chunks": "ab"},
        {"chunks": [3]},
        {"chunks": [None]},
        {"chunks": [{"type": []}]},
        {"chunks": [chunk]},
        {"chunks": [chunk | {"tokens": 3}]},
        {"chunks": [chunk | {"tokens": ["3"]}]},
        {"chunks": [chunk | {"tokens": [1.0]}]},
        text([VOCAB]),
        text([-1]),
        text([2**70]),
        text([3] * LONGEST),
        text([3] * 200_000),
        {"chunks": [chunk | {"tokens": [True]}]},
        {"chunks": [chunk | {"tokens": [[3]]}]},
        *({"chunks": [{"type": "image", "data": d, "format": "png"}]} for d in ("", "%%%%", "iVBORw0KGgo=", "../../etc/passwd", 7)),
        {"chunks": [{"type": "image_asset_pointer", "location": "file:///etc/passwd"}]},
        {"chunks": [{"type": "dmel", "dmel": []}]},
    ):
        yield "prompt", "asample", good["asample"] | {"prompt": prompt}
    for name, value in (
        ("num_samples", 0),
        ("num_samples", 10**9),
        ("topk_prompt_logprobs", 3),
        ("prompt_logprobs_last_n", 1),
        ("record_stability_info", True),
    ):
        yield "asample", "asample", good["asample"] | {name: value}
    for value in (-1, 2**31, 10**18):
        yield "number out of order", "optim_step", good["optim_step"] | {"seq_id": value}
        yield "number out of order", "create_model", good["create_model"] | {"model_seq_id": value}


def hostile_messages(a: dict, b: dict):
    """(what, protobuf) for forward_backward, of Ben."""
    two, kinds = (np.array([3, 4]), {"target_tokens": np.array([4, 5])}), ("logprobs", "advantages")
    good = forward_backward(b["run"], b["next"], [two])
    for cut in range(1, len(good), 9):
        yield "cut short", good[:cut]
    for junk in (
        b"",
        b"\xff" * 64,
        b"{}",
        good + b"\xf8\x01\x01",
        good.replace(b"target_tokens", b"target_t\xffkens"),
        b"\x1a\x00" * 5000,
        b"\x1a\xff\xff\xff\xff\x0f",
    ):
        yield "no message", junk
    for row in (
        (np.array([3, 4]), {}),
        (np.zeros(0, int), {"target_tokens": np.zeros(0, int)}),
        (np.array([3, -1]), two[1]),
        (np.array([3, 2**31 - 1]), two[1]),
        (np.full(LONGEST, 3), {"target_tokens": np.full(LONGEST, 3)}),
        (np.full(10**6, 3), {"target_tokens": np.full(10**6, 3)}),
        (two[0], {"target_tokens": np.array([4])}),
        (two[0], {"target_tokens": np.array([[4], [5]])}),
        (two[0], {"target_tokens": np.array([4, -(2**63)])}),
        (two[0], two[1] | {"mask": np.ones(2)}),
        (two[0], two[1] | {NUL: np.ones(2)}),
        (two[0], {"target_tokens": np.array([4.0, 5.0])}),
    ):
        yield "data", forward_backward(b["run"], b["next"], [row])
    for loss in ("cross_entropy", "importance_sampling", "ppo", "cispo"):
        for bad in (np.nan, np.inf, -np.inf):
            tensors = {name: np.array([0.0, bad]) for name in (("weights",) if loss == "cross_entropy" else kinds)}
            yield "not finite", forward_backward(b["run"], b["next"], [(two[0], two[1] | tensors)], loss)
    for loss in ("", "__import__", "stable_reinforce", "CROSS_ENTROPY", NUL, WIDE, "x" * 10**5):
        yield "loss", forward_backward(b["run"], b["next"], [two], loss)
    for config in ({"x": 1.0}, {"clip_low_threshold": np.nan}, {"clip_low_threshold": -1.0}, {"clip_high_threshold": np.inf}):
        yield "config", forward_backward(b["run"], b["next"], [(two[0], two[1] | dict.fromkeys(kinds, np.zeros(2)))], "ppo", config)

    def spoiled(spoil):
        message = wire.messages()["ForwardBackwardRequest"].FromString(good)
        tensor = message.data[0].loss_fn_inputs["target_tokens"]
        spoil(message, message.data[0].model_input[0], tensor)
        return message.SerializeToString()

    for shape in ((7,), (-2,), (2**62, 2), (0,), (-1, -2), (1,) * 400 + (2,)):
        yield "shape", spoiled(lambda m, c, t, shape=shape: (t.ClearField("shape"), t.shape.extend(shape)))
    for spoil in (
        lambda m, c, t: setattr(t, "dtype", 4),
        lambda m, c, t: setattr(t, "dtype", 0),
        lambda m, c, t: setattr(t, "dense", b"123"),
        lambda m, c, t: setattr(t.sparse_csr, "values", b"1"),
        lambda m, c, t: setattr(c.encoded_text, "tokens", b"123"),
        lambda m, c, t: m.ClearField("data"),
        lambda m, c, t: setattr(c.image, "data", b"\x89PNG"),
        lambda m, c, t: setattr(c.dmel, "dmel", b"x"),
        lambda m, c, t: c.Clear(),
        lambda m, c, t: [m.data[0].model_input.add() for _ in range(5000)],
        lambda m, c, t: m.loss_fn_config_v2["beta"].__setattr__("text", "x"),
    ):
        yield "field", spoiled(spoil)
    for run in (*IDS[:8], a["run"]):
        yield "another's id" if run == a["run"] else "hostile id", forward_backward(run, b["next"], [two])
    for number in (-1, -(2**31), 2**31 - 1, 1):
        yield "number out of order", forward_backward(b["run"], number, [two])


def hostile_http(a: dict, b: dict):
    """(what, method, path, headers, body); the path is below /api/v1/ unless it begins with a slash."""
    good, ben = {path: json.dumps(body).encode() for path, body in accepted(b).items()}, {"X-API-Key": BEN}
    for path in PARSED:
        for raw in UNPARSED:
            yield "no JSON", "POST", path, ben, raw
    for path in PARSED[1::3]:
        for key in (
            None,
            "",
            "tml-",
            BEN[:-1],
            BEN + "x",
            f"{ANNA},{BEN}",
            "anna:" + ANNA,
            "eyJhbGciOiJub25lIn0.e30.",
            "\u00e9".encode("latin-1"),
            "x" * 5000,
        ):
            yield "key", "POST", path, {} if key is None else {"X-API-Key": key}, good[path]
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", wire.CONTENT_TYPE, "application/json2", "*/*"):
        for path in ("create_session", "optim_step", "asample"):
            yield "content type", "POST", path, ben | {"Content-Type": kind}, good[path]
    for kind in ("application/json", "text/plain", "", "x" * 3000):
        yield "content type", "POST", "forward_backward", ben | {"Content-Type": kind}, forward_backward(b["run"], b["next"], [ROW])
    for coding in ("gzip", "zstd", "br", "identity, gzip"):
        yield "encoding", "POST", "optim_step", ben | {"Content-Encoding": coding}, good["optim_step"]
    for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"):
        for path in ("optim_step", "create_session", "retrieve_future"):
            yield "verb", method, path, ben, None
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        for path in ("healthz", "training_runs", f"training_runs/{b['run']}"):
            yield "verb", method, path, ben, b"{}"
    for path in (
        "/",
        "/api",
        "/api/v1",
        "/api/v1/",
        "/api/v2/healthz",
        "/.env",
        "/etc/passwd",
        "/api/v1/../../etc/passwd",
        "/api/v1/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/api/v1/healthz/",
        "/api/v1/HEALTHZ",
        "/api/v1/training_runs/",
        "/docs",
        "/openapi.json",
        "/metrics",
        "/api/v1/create_custom_loss",
        "/api/v1/save_weights_external",
        "/api/v1/copy_weights",
        "/api/v1/forward",
        "/api/v1/asample/1",
    ):
        yield "unknown path", "GET", path, ben, None
    parts = (
        "..",
        "%2e%2e",
        "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "%00",
        "%0a",
        "*",
        "?x",
        "a%2fb",
        "%ff%fe",
        "%E2%80%AE",
        "x" * 3000,
        "~root",
        "link",
        "[a]",
        a["run"],
        a["run"].replace(":", "_"),
        a["run"].replace(":", "%3A"),
    )
    for part in parts:
        yield "run", "GET", f"training_runs/{part}" if part != "?x" else "training_runs/%3Fx", ben, None
        yield "weights", "DELETE", f"training_runs/{part}/checkpoints/weights/secret", ben, None
        yield "weights", "DELETE", f"training_runs/{a['run']}/checkpoints/{part}/secret", ben, None
        yield "weights", "DELETE", f"training_runs/{b['run']}/checkpoints/weights/{part}", ben, None
    for part in (*parts[:6], a["session"], a["sampler"]):
        yield "session", "GET", f"sessions/{part}", ben, None
        yield "session", "POST", f"sessions/{part}/finish", ben, b"{}"
        yield "sampler", "GET", f"samplers/{part}", ben, None
    for query in ("limit=-1", "limit=x", "offset=1e9", "limit=99999999999999999999", "limit=%00", "offset="):
        yield "query", "GET", f"training_runs?{query}", ben, None
    yield "replayed key", "POST", "create_session", ben | {"X-Idempotency-Key": "first of ben"}, b'{"tags": ["other"]}'
    for path, size in (("optim_step", (1 << 20) + 1), ("create_session", 2 << 20), ("asample", (16 << 20) + 1), ("forward_backward", (32 << 20) + 1)):
        yield "large body", "POST", path, ben | (PROTO if path == "forward_backward" else {}), b" " * size
