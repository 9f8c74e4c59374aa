"""A service on a tiny model in this process, and a client of the protocol that knows no SDK."""

from __future__ import annotations

import contextlib
import threading

import jax
import numpy as np
from starlette.testclient import TestClient

from helpers.tiny_models import make_tiny
from jaxrl.service import app, wire

LONGEST, VOCAB = 48, 96
QUICK = {"train.row_lengths": (LONGEST,), "train.row_counts": 1, "train.tokens_per_microbatch": 192, "rollout.slots": 4,
         "rollout.compaction": False, "rollout.prompt_lengths": (LONGEST - 1,), "run.compile_cache": "auto"}


@contextlib.contextmanager
def served(folder, keys=None, **options):
    """A server whose worker runs in a thread of its own, and a Client of it."""
    model = folder / "model"
    if not model.exists():
        make_tiny("llama", model)
    given = app.Options(str(model), ("tiny",), rank=4, max_length=LONGEST, dir=str(folder / "saved"), config=QUICK)._replace(**options)
    server = app.build(given, keys)
    mesh = jax.sharding.get_mesh()
    thread = threading.Thread(target=lambda: (jax.set_mesh(mesh), server.worker.serve()), daemon=True)
    thread.start()
    try:
        with TestClient(server.app, base_url="http://127.0.0.1:8317") as http:
            yield server, Client(http)
    finally:
        server.worker.stop()
        thread.join(60)
        server.worker.sampler.engine.close()


class Client:
    """Requests as the SDK sends them."""

    def __init__(self, http, key="tml-test"):
        self.http, self.headers = http, {"X-API-Key": key}

    def post(self, path, body, **more):
        headers = {**self.headers, **more.pop("headers", {})}
        how = {"content": body} if isinstance(body, bytes) else {"json": body}
        return self.http.post(f"/api/v1/{path}", **how, headers=headers)

    def get(self, path):
        return self.http.get(f"/api/v1/{path}", headers=self.headers)

    def ok(self, path, body, **more) -> dict:
        answer = self.post(path, body, **more)
        assert answer.status_code == 200, (path, answer.status_code, answer.text)
        return answer.json()

    def refused(self, path, body, **more) -> str:
        """The error of a request that is refused, at once or by its promise."""
        answer = self.post(path, body, **more)
        if answer.status_code == 200 and "request_id" in answer.json():
            answer = self.retrieve(answer.json())
        else:
            assert 400 <= answer.status_code < 500 and answer.status_code not in (402, 408, 409), answer.text
        found = answer.json()
        assert found["category"] == "user"
        return found["error"]

    def retrieve(self, promise: dict):
        """The answer to a promise, which is asked for until it is there."""
        while (answer := self.post("retrieve_future", {"request_id": promise["request_id"], "allow_metadata_only": True})).status_code == 408:
            assert answer.json()["type"] == "try_again"
        assert answer.status_code == 200, answer.text
        return answer

    def result(self, promise: dict):
        """The result of a promise: a dict, or a message of protobuf."""
        answer = self.retrieve(promise)
        if answer.headers["content-type"].startswith("application/json"):
            assert "error" not in answer.json(), answer.text
            return answer.json()
        name = "SampleResponse" if "sample_sequence_ids" in promise else "ForwardBackwardOutput"
        return wire.parse(name, answer.content)

    def session(self) -> str:
        return self.ok("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"})["session_id"]

    def run(self, session: str, number=0, rank=3, **lora) -> str:
        lora = {"rank": rank, "seed": 5, "train_unembed": False, **lora}
        body = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": lora,
                "optimizer_config": {"type": "adamw"}, "type": "create_model"}
        return self.result(self.ok("create_model", body))["model_id"]

    def forward_backward(self, run, seq, rows, loss="cross_entropy", **more) -> dict:
        return self.ok("forward_backward", forward_backward(run, seq, rows, loss, **more), headers=PROTO)

    def optim_step(self, run, seq, **adam) -> dict:
        return self.ok("optim_step", {"model_id": run, "seq_id": seq, "adam_params": {"learning_rate": 1e-2, **adam}, "type": "optim_step"})

    def loss(self, run, seq, rows) -> float:
        return self.result(self.forward_backward(run, seq, rows, forward_only=True)).metrics["loss:sum"]

    def sampler(self, session, number, path=None) -> str:
        body = {"session_id": session, "sampling_session_seq_id": number, "base_model": "tiny", "model_path": path}
        return self.ok("create_sampling_session", body)["sampling_session_id"]

    def sample(self, sampler, seq, prompt, **more) -> dict:
        params = {"max_tokens": 6, "temperature": 1.0, "top_k": -1, "top_p": 1.0, **more.pop("params", {})}
        return self.ok("asample", {"sampling_session_id": sampler, "seq_id": seq, "prompt": text(prompt), "sampling_params": params, **more})


PROTO = {"Content-Type": wire.CONTENT_TYPE}


def text(ids) -> dict:
    return {"chunks": [{"type": "encoded_text", "tokens": [int(i) for i in ids]}]}


def forward_backward(run, seq, rows, loss="cross_entropy", config=None, forward_only=False) -> bytes:
    """A request; rows: (tokens, {name: array}) each."""
    message = wire.messages()["ForwardBackwardRequest"](model_id=run, seq_id=seq, loss_fn=loss, forward_only=forward_only)
    for name, value in (config or {}).items():
        message.loss_fn_config[name] = value
    for tokens, tensors in rows:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
        for name, array in tensors.items():
            tensor = datum.loss_fn_inputs[name]
            array = np.asarray(array, np.int64 if np.asarray(array).dtype.kind in "iu" else np.float32)
            tensor.dense, tensor.dtype = array.tobytes(), 2 if array.dtype == np.int64 else 1
            tensor.shape.extend(array.shape)
    return message.SerializeToString()


def next_tokens(ids) -> tuple:
    """A datum that learns every next token."""
    return np.array(ids[:-1]), {"target_tokens": np.array(ids[1:])}


def numbers(output) -> list[np.ndarray]:
    """The log-probs of each datum in a ForwardBackwardOutput."""
    field = output.loss_fn_outputs[0].fields["logprobs"]
    ends = np.frombuffer(field.offsets, np.int64) // 4
    return np.split(np.frombuffer(field.data, np.float32), ends[1:-1])
