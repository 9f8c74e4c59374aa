"""The protocol over HTTP against a tiny model: loops, order, retries, saves, samples, refusals. test_sdk drives the real SDK."""

import json
import re
import time
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.tinker_cases import LONGEST, PROTO, VOCAB, Client, forward_backward, next_tokens, numbers, served, text

from jaxrl.errors import ConfigError
from jaxrl.service import app, bodies, wire
from jaxrl.service.operations import Operations
from jaxrl.service.refusals import Refused
from jaxrl.service.routes import make_app
from jaxrl.service.sampler import SampleJob, Sampler

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("the_mesh_as_it_was")]
ROWS = [next_tokens([3, 10, 11, 12, 13, 14]), next_tokens([3, 20, 21, 22])]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served(tmp_path_factory.mktemp("service")) as found:
        yield found


@pytest.fixture
def client(service):
    return service[1]


def test_a_loop_learns_saves_and_samples(client):
    session = client.session()
    run = client.run(session)
    info = client.ok("get_info", {"model_id": run})
    assert info["is_lora"] and info["lora_rank"] == 3 and info["model_name"] == "tiny"
    losses = []
    for step in range(6):
        promise = client.forward_backward(run, 2 * step + 1, ROWS)
        stepped = client.optim_step(run, 2 * step + 2)
        losses.append(client.result(promise).metrics["loss:sum"])
        assert client.result(stepped)["metrics"]["optim/step"] == step + 1
    assert losses[-1] < 0.6 * losses[0]
    path = client.result(client.ok("save_weights_for_sampler", {"model_id": run, "seq_id": 13, "path": "final"}))["path"]
    assert path == f"tinker://{run}/sampler_weights/final"
    sampler = client.sampler(session, 0, path)
    found = client.result(client.sample(sampler, 0, [3, 10, 11], num_samples=3, prompt_logprobs=True, params={"seed": 4}))
    prompt = np.frombuffer(found.prompt_logprobs, np.float32)
    assert np.isnan(prompt[0]) and len(prompt) == 3
    for number, own in enumerate(found.sequences):  # the trainer's log-probs of prompt and samples
        tokens, logprobs = np.frombuffer(own.tokens, np.int32), np.frombuffer(own.logprobs, np.float32)
        whole = np.array([3, 10, 11, *tokens])
        scored = numbers(client.result(client.forward_backward(run, 14 + number, [next_tokens(whole)], forward_only=True)))[0]
        np.testing.assert_allclose(np.concatenate([prompt[1:], logprobs]), scored, atol=1e-5)
    again = client.result(client.sample(sampler, 1, [3, 10, 11], num_samples=1, params={"seed": 4}))
    assert again.sequences[0].tokens == found.sequences[0].tokens


def test_a_request_that_is_sent_again_is_applied_once(client):
    session = client.session()
    run = client.run(session)
    for _ in range(3):
        client.forward_backward(run, 1, ROWS)
    first = client.optim_step(run, 2)
    assert client.result(client.optim_step(run, 2)) == client.result(first)
    loss = client.loss(run, 3, ROWS)
    other = client.run(session, 1)
    client.forward_backward(other, 1, ROWS)
    client.result(client.optim_step(other, 2))
    assert client.loss(other, 3, ROWS) == loss
    assert "another request with this number came before" in client.refused("optim_step", {
        "model_id": run, "seq_id": 2, "adam_params": {"learning_rate": 1.0}})
    assert client.run(session, 1) == other and client.loss(other, 4, ROWS) == loss
    body = {"model_id": other, "seq_id": 5, "sampling_session_seq_id": 3}  # the SDK counts on when it sends it again
    saved = client.result(client.ok("save_weights_for_sampler", body))
    assert client.result(client.ok("save_weights_for_sampler", body | {"sampling_session_seq_id": 4})) == saved
    assert saved["sampling_session_id"] == f"{session}:sample:3" and client.get(f"samplers/{session}:sample:4").status_code == 404
    key = {"X-Idempotency-Key": "a"}
    body = {"tags": [], "sdk_version": "0.38.0"}
    assert client.ok("create_session", body, headers=key) == client.ok("create_session", body, headers=key)


@pytest.mark.full
def test_requests_run_in_the_order_of_their_numbers(client):
    """Pieces of one call arrive with the first one last; a step before its gradients waits for them."""
    session = client.session()
    run, other = client.run(session), client.run(session, 1)
    step = client.optim_step(run, 3)
    late = client.forward_backward(run, 2, ROWS[1:])
    time.sleep(0.05)
    assert not any(client.http.app.state.operations.promises[p["request_id"]].future.done() for p in (step, late))
    client.forward_backward(run, 1, ROWS[:1])
    client.result(step)
    client.forward_backward(other, 1, ROWS)
    client.result(client.optim_step(other, 2))
    assert client.loss(run, 4, ROWS) == pytest.approx(client.loss(other, 3, ROWS), rel=1e-5)


def test_a_gap_that_never_closes_is_an_error(client, service, monkeypatch):
    session = client.session()
    run = client.run(session)
    monkeypatch.setattr("jaxrl.service.worker.GAP_SECONDS", 0.0)
    promise = client.optim_step(run, 4)
    answer = client.post("retrieve_future", {"request_id": promise["request_id"]}).json()
    assert "request 1 of this run has not come" in answer["error"]
    client.forward_backward(run, 5, ROWS)
    assert client.loss(run, 6, ROWS) > 0


@pytest.mark.parametrize("evicted", ["before the gap", "after it"])
def test_gradients_dropped_at_a_gap_do_not_come_back_from_the_disk(client, service, monkeypatch, evicted):
    worker, session = service[0].worker, client.session()
    monkeypatch.setattr("jaxrl.service.worker.RESIDENT", 1)
    monkeypatch.setattr(worker.trainer, "together", 1)
    run, other = client.run(session), client.run(session, 1)
    client.result(client.forward_backward(run, 1, ROWS))
    client.loss(other, 1, ROWS)  # the run goes to the disk, with its gradients
    if evicted == "after it":
        client.loss(run, 2, ROWS)
    seq = 3 if evicted == "after it" else 2
    with monkeypatch.context() as hasty:
        hasty.setattr("jaxrl.service.worker.GAP_SECONDS", 0.0)
        answer = client.retrieve(client.forward_backward(run, seq + 1, ROWS[:1])).json()
    assert f"request {seq} of this run has not come" in answer["error"]
    found = worker.snapshots.about(run)  # a restart goes on behind the gap
    assert found["next"] == seq + 2 and f"request {seq} of this run" in found["failure"]
    client.loss(other, 2, ROWS)
    told = client.refused("optim_step", {"model_id": run, "seq_id": seq + 2, "adam_params": {}})
    assert f"nothing was applied, because request {seq} of this run has not come" in told
    assert "there are no gradients" in client.refused("optim_step", {"model_id": run, "seq_id": seq + 3, "adam_params": {}})


def test_after_a_failure_nothing_is_applied_and_later_numbers_go_on(client):
    run = client.run(client.session())
    before = client.loss(run, 1, ROWS)
    client.forward_backward(run, 2, ROWS)
    bad = [(np.array([3, 5]), {"target_tokens": np.array([5, VOCAB])})]
    assert f"data[0].loss_fn_inputs.target_tokens[1]={VOCAB}" in client.refused("forward_backward", forward_backward(run, 3, bad), headers=PROTO)
    told = client.refused("optim_step", {"model_id": run, "seq_id": 4, "adam_params": {}})
    assert "nothing was applied, because forward_backward (seq_id=3) before it failed: data[0]" in told
    assert client.loss(run, 5, ROWS) == before
    assert "there are no gradients" in client.refused("optim_step", {"model_id": run, "seq_id": 6, "adam_params": {}})
    client.forward_backward(run, 7, ROWS)
    client.result(client.optim_step(run, 8))
    assert client.loss(run, 9, ROWS) < before


def test_no_failure_applies_a_part_of_the_gradients(client, service, monkeypatch):
    """A forward that fails takes none away; a forward_backward that fails takes all, also of a run that is on the disk."""
    worker, session = service[0].worker, client.session()
    runs = [client.run(session, number) for number in range(3)]

    def failing(where, name, promise):
        with monkeypatch.context() as broken:
            broken.setattr(where, name, lambda *_: 1 / 0)
            assert "ZeroDivisionError" in client.retrieve(promise()).json()["error"]

    for run in runs[:2]:
        client.result(client.forward_backward(run, 1, ROWS))
        if run == runs[0]:
            failing(worker.trainer, "_evaluate", lambda: client.forward_backward(runs[0], 2, ROWS[:1], forward_only=True))
        else:
            client.loss(run, 2, ROWS[:1])
        client.result(client.forward_backward(run, 3, ROWS[1:]))
    norms = [client.result(client.optim_step(run, 4))["metrics"]["optim/grad_norm"] for run in runs[:2]]
    assert norms[0] == norms[1]

    monkeypatch.setattr("jaxrl.service.worker.RESIDENT", 1)
    monkeypatch.setattr(worker.trainer, "together", 1)
    client.result(client.forward_backward(runs[2], 1, ROWS))
    client.loss(runs[0], 5, ROWS)  # the other run goes to the disk
    failing(worker.snapshots, "load", lambda: client.forward_backward(runs[2], 2, ROWS[:1]))
    client.result(client.forward_backward(runs[2], 3, ROWS[1:]))
    told = client.refused("optim_step", {"model_id": runs[2], "seq_id": 4, "adam_params": {}})
    assert "nothing was applied, because forward_backward (seq_id=2) before it failed: forward_backward (seq_id=2): ZeroDiv" in told
    client.result(client.forward_backward(runs[2], 5, ROWS))
    assert client.result(client.optim_step(runs[2], 6))["metrics"]["optim/step"] == 1


def test_saved_weights_go_on_bit_for_bit_after_a_restart(client, service):
    """In another server's sessions and from the same folder: the next step is the one that the run itself takes."""
    server, _ = service
    run = client.run(client.session())
    for seq in (1, 3):
        client.forward_backward(run, seq, ROWS)
        client.result(client.optim_step(run, seq + 1))
    path = client.result(client.ok("save_weights", {"model_id": run, "seq_id": 5, "path": "one"}))["path"]
    assert "exists; choose another name, or set overwrite=True" in client.refused(
        "save_weights", {"model_id": run, "seq_id": 6, "path": "one"})
    old = client.http.app.state.operations
    fresh = Operations(server.worker, old.store, old.names, old.eos_ids, old.longest, old.vocab)
    with type(client.http)(make_app(fresh), base_url="http://localhost") as http:
        anew = Client(http)
        session = anew.session()
        assert anew.ok("weights_info", {"tinker_path": path})["lora_rank"] == 3
        assert [c["tinker_path"] for c in anew.get(f"training_runs/{run}/checkpoints").json()["checkpoints"]] == [path]
        found = {}
        for number, optimizer in enumerate((True, False)):
            body = {"session_id": session, "model_seq_id": number, "path": path, "optimizer": optimizer}
            loaded = anew.result(anew.ok("load_weights", body))["model_id"]
            anew.forward_backward(loaded, 1, ROWS)
            anew.result(anew.optim_step(loaded, 2))
            found[optimizer] = anew.loss(loaded, 3, ROWS)
        assert anew.get(f"training_runs/{run}").json()["last_checkpoint"]["tinker_path"] == path
        assert anew.http.delete(f"/api/v1/training_runs/{run}/checkpoints/weights/one", headers=anew.headers).status_code == 204
        assert "no such weights" in anew.refused("load_weights", {"session_id": session, "model_seq_id": 9, "path": path, "optimizer": True})
    client.forward_backward(run, 7, ROWS)
    client.result(client.optim_step(run, 8))
    assert client.loss(run, 9, ROWS) == found[True] != found[False]
    body = {"model_id": run, "seq_id": 10, "path": "short", "ttl_seconds": -1}
    path = client.result(client.ok("save_weights", body))["path"]
    assert "no such weights" in client.refused("weights_info", {"tinker_path": path})


def test_samplers_keep_their_weights_while_the_run_goes_on(client):
    session = client.session()
    run, prompt = client.run(session), [3, 10, 11, 12]

    def scored(sampler, seq):
        found = client.result(client.sample(sampler, seq, prompt, prompt_logprobs=True, params={"max_tokens": 1}))
        return np.frombuffer(found.prompt_logprobs, np.float32)[1:]

    base = client.sampler(session, 7)
    unchanged = scored(base, 0)
    client.forward_backward(run, 1, ROWS)
    client.optim_step(run, 2)
    early = client.result(client.ok("save_weights_for_sampler", {"model_id": run, "seq_id": 3, "sampling_session_seq_id": 0}))
    early = early["sampling_session_id"]
    assert client.get(f"samplers/{early}").json() == {"sampler_id": early, "base_model": "tiny", "model_path": None}
    first = scored(early, 0)
    client.forward_backward(run, 4, ROWS)
    client.optim_step(run, 5)
    client.result(client.ok("save_weights_for_sampler", {"model_id": run, "seq_id": 6, "sampling_session_seq_id": 1}))
    later = scored(f"{session}:sample:1", 0)
    assert np.array_equal(scored(early, 1), first) and np.array_equal(scored(base, 1), unchanged)
    assert unchanged.sum() < first.sum() < later.sum()


def test_stops_are_the_protocol_s(client):
    """None: the model's end tokens; [] nothing; ids and texts beside the end tokens. The stop stays in the sample."""
    sampler = client.sampler(client.session(), 0)

    def sampled(seq, **params):
        found = client.result(client.sample(sampler, seq, [3, 4], params={"seed": 9, "max_tokens": 12, **params})).sequences[0]
        return np.frombuffer(found.tokens, np.int32).tolist(), found.stop_reason

    free, reason = sampled(0, stop=[])
    assert len(free) == 12 and reason == 1
    stop = next(t for t in free[2:] if t not in free[:2])
    found, reason = sampled(1, stop=[stop])
    assert found == free[:free.index(stop) + 1] and reason == 0
    greedy = {sampled(seq, temperature=0.0, seed=seq, stop=[])[0].__repr__() for seq in (2, 3)}
    assert len(greedy) == 1


@pytest.mark.full
def test_a_full_queue_is_429_and_goes_on(client, monkeypatch):
    """The request that the others wait for has room always; a refused one is accepted once they have run."""
    run = client.run(client.session())
    body = forward_backward(run, 3, ROWS)
    monkeypatch.setattr("jaxrl.service.worker.WAITING_BYTES", len(body))
    last = client.ok("forward_backward", body, headers=PROTO)
    full = client.post("forward_backward", forward_backward(run, 4, ROWS), headers=PROTO)
    assert full.status_code == 429 and full.headers["Retry-After"] == "2" and "requests of this session wait already" in full.text
    for seq in (1, 2):
        client.forward_backward(run, seq, ROWS)
    client.result(last)
    assert client.loss(run, 4, ROWS) > 0


WEIGHTS = {"target_tokens": np.array([4, 5])}
BAD_DATA = {
    "image": lambda m: m.data[0].model_input[0].image.__setattr__("data", b"x"),
    "the shape [7] does not fit|shape=[7]": lambda m: m.data[0].loss_fn_inputs["target_tokens"].shape.__setitem__(0, 7),
    "float32 or int64": lambda m: m.data[0].loss_fn_inputs["target_tokens"].__setattr__("dtype", 4),
    "no whole count": lambda m: m.data[0].loss_fn_inputs["target_tokens"].__setattr__("dense", b"123"),
    "is a sparse tensor": lambda m: m.data[0].loss_fn_inputs["target_tokens"].sparse_csr.__setattr__("values", b""),
    "whole int32 tokens": lambda m: m.data[0].model_input[0].encoded_text.__setattr__("tokens", b"123"),
    "loss_fn_config.clip_low_threshold is missing: gspo needs it": lambda m: m.__setattr__("loss_fn", "gspo"),
    "a recipe takes loss_fn=importance_sampling": lambda m: m.__setattr__("loss_fn", "stable_reinforce"),
    "loss_fn='other' is not served here: choose cross_entropy": lambda m: m.__setattr__("loss_fn", "other"),
    "loss_fn_config.beta is missing: dro needs it": lambda m: m.__setattr__("loss_fn", "dro"),
    "loss_fn_config.beta=1.0: not an option of cross_entropy": lambda m: m.loss_fn_config.__setitem__("beta", 1.0),
    "data is empty": lambda m: m.ClearField("data"),
}
BAD_ROWS = {
    "has the shape [2, 3]": (np.array([3, 4]), {"target_tokens": np.zeros((2, 3), int)}),
    "target_tokens is missing": (np.array([3, 4]), {}),
    "must be finite": (np.array([3, 4]), WEIGHTS | {"weights": np.array([1.0, np.nan])}),
    "has 'mask'": (np.array([3, 4]), WEIGHTS | {"mask": np.array([1.0, 1.0])}),
    "is float32: send int64": (np.array([3, 4]), {"target_tokens": np.array([1.0, 2.0])}),
    "model_input has 0 tokens": (np.zeros(0, int), {"target_tokens": np.zeros(0, int)}),
    f"model_input has {LONGEST} tokens": (np.full(LONGEST, 3), {"target_tokens": np.full(LONGEST, 3)}),
    "model_input[1]=-1": (np.array([3, -1]), WEIGHTS),
}
SAMPLE = {"prompt": text([3]), "sampling_params": {"max_tokens": 1}}
BAD_BODIES = [
    ("create_model", {"session_id": "no"}, "model_seq_id is missing"),
    ("create_model", {"session_id": "no", "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}, "there is no such session"),
    ("optim_step", {"model_id": "x:train:0", "seq_id": 1, "adam_params": {}}, "there is no such run"),
    ("optim_step", {"model_id": 7, "seq_id": 1}, "optim_step.model_id='7': expected a text"),
    ("optim_step", {"model_id": "a", "seq_id": True}, "expected a whole number"),
    ("optim_step", {"model_id": "a", "seq_id": 2**70}, "expected a whole number"),
    ("retrieve_future", {"request_id": "none"}, "is not known here"),
    ("create_sampling_session", {"session_id": "SESSION", "sampling_session_seq_id": 0, "base_model": "other"}, "start the server with --name=other"),
    ("create_sampling_session", {"session_id": "SESSION", "sampling_session_seq_id": 0, "model_path": "tinker://../weights/a"}, "expected tinker://"),
    ("create_sampling_session", {"session_id": "SESSION", "sampling_session_seq_id": 0, "model_path": "tinker://a/weights/.."}, "expected tinker://"),
    ("create_sampling_session", {"session_id": "SESSION", "sampling_session_seq_id": 0, "model_path": "tinker://a/weights/b"}, "no such weights"),
    ("weights_info", {"tinker_path": "tinker://a/weights/b\u0000"}, "expected tinker://"),
    ("asample", {**SAMPLE, "num_samples": 0}, "num_samples=0: must be 1"),
    ("asample", {**SAMPLE, "num_samples": 10**6}, "must be 1 to"),
    ("asample", {**SAMPLE, "prompt": text([VOCAB])}, f"prompt[0]={VOCAB}"),
    ("asample", {**SAMPLE, "prompt": {"chunks": [{"type": "image", "data": ""}]}}, "prompt has an image, and this server reads text"),
    ("asample", {**SAMPLE, "prompt": text([3] * LONGEST)}, "serves 1 to"),
    ("asample", {**SAMPLE, "topk_prompt_logprobs": 3}, "topk_prompt_logprobs=3 is not served here"),
    ("asample", {**SAMPLE, "surprise": 1}, "the field 'surprise' is not known here"),
    ("asample", {**SAMPLE, "sampling_params": {"top_p": 1.5}}, "top_p=1.5"),
    ("asample", {**SAMPLE, "sampling_params": {"temperature": -1}}, "temperature=-1"),
    ("asample", {**SAMPLE, "sampling_params": {"stop": [1, "a"]}}, "not both"),
    ("asample", {**SAMPLE, "sampling_params": {"stop": list(range(3, 19))}}, "token ids: at most"),
    ("client/config", {"sdk_version": "0.18.1"}, "0.25 and later"),
    ("create_session", {"tags": [], "sdk_version": "9", "new_field": 1}, "'new_field' is not known"),
    ("optim_step", b"{", "no JSON"), ("optim_step", b"[" * 100_000, "no JSON"), ("optim_step", b"[1]", "no JSON object"),
    ("optim_step", b'{"model_id": NaN}', "NaN is no number"), ("optim_step", b"\xff\xfe", "no JSON"),
    ("forward_backward", {"model_id": "a"}, "0.25 or later"),
    ("create_custom_loss", {}, "is not served here"), ("save_weights_external", {}, "is not served here"),
]


def test_bad_requests_name_field_value_and_remedy(client):
    """And change nothing: the run's next step is that of a run without them."""
    session = client.session()
    run, sampler = client.run(session), client.sampler(session, 1)
    client.forward_backward(run, 1, ROWS)
    before = client.result(client.optim_step(run, 2)) and client.loss(run, 3, ROWS)
    seq = 4
    for what, row in BAD_ROWS.items():
        assert what in client.refused("forward_backward", forward_backward(run, seq, [row]), headers=PROTO)
        seq += 1
    for what, spoil in BAD_DATA.items():
        message = wire.messages()["ForwardBackwardRequest"].FromString(forward_backward(run, seq, [(np.array([3, 4]), WEIGHTS)]))
        spoil(message)
        told = client.refused("forward_backward", message.SerializeToString(), headers=PROTO)
        assert any(part in told for part in what.split("|")), (what, told)
        seq += 1
    assert "no ForwardBackwardRequest message" in client.refused("forward_backward", b"\xff\xff\xff", headers=PROTO)
    unknown = forward_backward(run, seq, [(np.array([3, 4]), WEIGHTS)]) + b"\xf8\x01\x01"
    assert "field number 31 of the message is not known" in client.refused("forward_backward", unknown, headers=PROTO)
    assert "data is empty" in client.refused("optim_step", {"model_id": run, "seq_id": seq, "adam_params": {}})
    seq += 1
    for adam, what in (({"beta1": 1.0}, "beta1=1.0: must be at least 0 and below 1"), ({"learning_rate": -1}, "learning_rate=-1"),
                       ({"lr": 1}, "the field 'lr' is not known here")):
        told = client.refused("optim_step", {"model_id": run, "seq_id": seq, "adam_params": adam})
        assert what in told
        seq += 1
    for name in ("..", "a/b", "", "a" * 129, ".hidden", "a\n"):
        assert "a name has 1 to 128" in client.refused("save_weights", {"model_id": run, "seq_id": seq, "path": name})
        seq += 1
    for path, body, what in BAD_BODIES:
        if path == "asample":
            body = {"sampling_session_id": sampler, "seq_id": 0, **body}
        if isinstance(body, dict) and body.get("session_id") == "SESSION":
            body = body | {"session_id": session}
        told = client.refused(path, body)
        assert what in told, (path, body, told)
    for number, lora, what in ((10, {"rank": 0}, "rank=0"), (11, {"rank": 5}, "start it with --rank=5"),
                               (12, {"rank": 2, "train_attn": False, "train_mlp": False}, "leave nothing to train here"),
                               (13, {"rank": 2, "train_unembed": 1}, "lora_config.train_unembed='1': expected true or false")):
        body = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": {"train_unembed": False, **lora}}
        assert what in client.refused("create_model", body)
    assert client.loss(run, seq, ROWS) == before


def test_an_output_matrix_may_be_left_out(service):
    """By the option of the server: the client is warned, and the run is that of train_unembed=False."""
    server, client = service
    old = client.http.app.state.operations
    fresh = Operations(server.worker, old.store, old.names, old.eos_ids, old.longest, old.vocab, leave_out=True)
    with type(client.http)(make_app(fresh), base_url="http://localhost") as http:
        anew = Client(http)
        found = anew.ok("create_session", {"tags": [], "sdk_version": "0.38.0"})
        assert "--unembed=leave-out" in found["warning_message"]
        whole, part = (anew.run(found["session_id"], number, train_unembed=asked) for number, asked in enumerate((True, False)))
        losses = []
        for run in (whole, part):
            anew.forward_backward(run, 1, ROWS)
            anew.result(anew.optim_step(run, 2))
            losses.append(anew.loss(run, 3, ROWS))
        assert losses[0] == losses[1]


def test_large_bodies_and_encodings_are_refused(client):
    assert "more than" in client.refused("optim_step", b"x" * (33 << 20))
    assert "send the body as it is" in client.refused("optim_step", b"{}", headers={"Content-Encoding": "zstd"})


def test_keys_and_hosts(client, service):
    old = client.http.app.state.operations
    assert client.http.get("/api/v1/healthz").json() == {"status": "ok"}
    assert client.http.get("/api/v1/get_server_capabilities").status_code == 401
    assert "127.0.0.1 and localhost alone" in client.refused("create_session", {}, headers={"Host": "evil.example:8317"})
    with type(client.http)(make_app(old, {"tml-a": "", "tml-b": ""}), base_url="http://anywhere") as http:
        assert Client(http, "tml-b").get("get_server_capabilities").json()["supported_models"][0]["max_context_length"] == LONGEST
        for key in ("", "tml-", "tml-a,tml-b", "tml-\u00e9".encode()):
            assert "is not a key of this server" in json.loads(http.get("/api/v1/checkpoints", headers={"X-API-Key": key}).text)["error"]


def test_samples_of_other_weights_are_an_error(service):
    """Whatever an engine does: an answer is of the weights that were asked for, or none."""
    old, begun = service[0].worker.sampler, []
    shift = {"a": 0, "b": -1}  # version b is sampled from the weights before it
    engine = SimpleNamespace(submit=begun.extend, publish=lambda tree, count: versions.append(count), poll=lambda seconds: [
        SimpleNamespace(id=r.id, tokens=np.array([5, 6]), logprobs=np.zeros(2), finish="stop",
                        versions=np.array([versions[-1], versions[-1] + shift[r.id[0]]])) for r in [begun.pop(0)]])
    versions, sampler = [], Sampler(engine, old.read, old.row_shapes, lambda leaves: leaves, {})
    for name in "ab":
        sampler.keep(name, {})
        job = SampleJob(name, name, np.array([3]), 1, None, 0, False, None, None, Future())
        sampler.submit(job)
        sampler.work(0.0)
        if name == "a":
            assert len(job.future.result(0)[0]) == 1
        else:
            with pytest.raises(Refused, match=r"from the weights \[1, 2\], not from 2"):
                job.future.result(0)


def test_weights_take_turns_in_the_sampler(service):
    """A request for other weights waits for two turns at most, whatever was sent before it; those for the same weights keep their order."""
    old, begun, ended = service[0].worker.sampler, [], []
    engine = SimpleNamespace(  # that of the server is at work in its thread
        submit=begun.extend, publish=lambda tree, count: None,
        poll=lambda seconds: [SimpleNamespace(id=begun.pop(0).id, tokens=[], logprobs=[], finish="stop", versions=np.zeros(0, int))])
    sampler = Sampler(engine, old.read, old.row_shapes, lambda leaves: leaves, {}, turn=8)
    for name in "ab":
        sampler.keep(name, {})

    def submit(version, *numbers):
        for number in numbers:
            job = SampleJob(f"{version}{number}", version, np.array([3]), 2, None, 0, False, None, None, Future())
            job.future.add_done_callback(lambda done, name=job.id: ended.append(name))
            sampler.submit(job)

    submit("a", *range(40))
    sampler.work(0.0)
    submit("b", 0, 1)
    while sampler.busy:
        sampler.work(0.0)
    assert len(ended) == 42 and ended.index("b1") <= 9 and [x for x in ended if x[0] == "a"] == [f"a{n}" for n in range(40)]


@pytest.mark.parametrize("breaks", ["submit", "result"])
def test_no_sample_waits_for_ever_behind_one_that_fails(service, breaks):
    """Whatever the engine raises: `fail` finds the job, and those of the same turn behind it."""
    old, begun = service[0].worker.sampler, []

    def submit(requests):
        if breaks == "submit" and requests[0].id == "a1/0":
            raise RuntimeError("the servers are lost")
        begun.extend(requests)

    engine = SimpleNamespace(submit=submit, publish=lambda tree, count: None, abort=begun.clear, poll=lambda seconds: [
        SimpleNamespace(id=r.id, tokens=[], logprobs=[], versions=np.zeros(0, int)) for r in begun[:1]])  # without a finish
    sampler = Sampler(engine, old.read, old.row_shapes, lambda leaves: leaves, {})
    jobs = [SampleJob(f"a{n}", "", np.array([3]), 1, None, 0, False, None, None, Future()) for n in range(3)]
    for job in jobs:
        sampler.submit(job)
    with pytest.raises(RuntimeError if breaks == "submit" else AttributeError) as found:
        sampler.work(0.0)
    sampler.fail(found.value)
    assert not sampler.busy and all(job.future.exception(0) is found.value for job in jobs)


def test_a_cancelled_sample_ends(client):
    sampler = client.sampler(client.session(), 0)
    promises = [client.sample(sampler, seq, [3, 4], num_samples=8, params={"max_tokens": 40, "stop": []}) for seq in range(6)]
    assert client.ok("cancel_future", {"request_id": promises[-1]["request_id"]}) == {}
    answer = client.post("retrieve_future", {"request_id": promises[-1]["request_id"]})
    assert answer.headers["content-type"] != "application/json" or answer.json()["error"] == "asample: the client cancelled it"
    assert [len(client.result(p).sequences) for p in promises[:-1]] == [8] * 5


def test_a_bug_is_answered_with_an_incident(client, monkeypatch):
    """Never by a 5xx, which the client would send again for minutes; and the worker goes on."""
    run = client.run(client.session())
    monkeypatch.setattr(client.http.app.state.operations.trainer, "optim_step", lambda *a: 1 / 0)
    promise = client.optim_step(run, 1)
    answer = client.post("retrieve_future", {"request_id": promise["request_id"]})
    assert answer.status_code == 200 and answer.json()["category"] == "server" and "incident" in answer.json()["error"]
    monkeypatch.undo()
    assert client.loss(run, 2, ROWS) > 0
    monkeypatch.setattr(client.http.app.state.operations, "session", lambda *a: 1 / 0)
    answer = client.post("session_heartbeat", {"session_id": "a"})
    assert answer.status_code == 422 and "incident" in answer.json()["error"]


@pytest.mark.parametrize("argv, what", [
    ([], "--model is missing"), (["--model=a", "x"], "x: expected --NAME=VALUE"), (["--model=a", "--rank=two"], "--rank=two: expected a number"),
    (["--model=a", "--rank=-1"], "--rank=-1: must be at least 0"),
    (["--model=a", "--alpha=nan"], "--alpha=nan: must be at least 1e-09, and finite"), (["--model=a", "--alpha=inf"], "--alpha=inf: must be"),
    (["--model=a", "--sync=90"], "--sync=90: must be 0 to 60 seconds, or never"), (["--model=a", "--sync=soon"], "expected a number"),
    (["--model=a", "--unembed=yes"], "choose train or leave-out"), (["--model=a", "--colour=1"], "--colour: no such option"),
    (["--model=a", "--config.rollout.slot=3"], "rollout.slot")])
def test_the_command_line_is_checked(argv, what):
    with pytest.raises(ConfigError, match=what.replace("(", r"\(")):
        app.config_of(app.parse(argv))


def test_a_folder_belongs_to_one_base(tmp_path):
    options = app.Options("a", rank=4, dir=str(tmp_path))
    app.check_folder(tmp_path, options, "one")
    app.check_folder(tmp_path, options._replace(rank=8), "one")
    for other, digest, what in ((options._replace(rank=8), "two", "of another base model"), (options, "one", "--rank=8 --alpha=32"),
                                (options._replace(rank=8, alpha=16.0), "one", "at least this rank and this alpha")):
        with pytest.raises(ConfigError, match=what):
            app.check_folder(tmp_path, other, digest)


def test_a_start_that_is_killed_leaves_the_note_of_the_base_whole(tmp_path, monkeypatch):
    options = app.Options("a", rank=4)
    app.check_folder(tmp_path, options, "one")
    before = (tmp_path / "base.json").read_bytes()
    with monkeypatch.context() as killed:
        killed.setattr("os.replace", lambda *_: 1 / 0)
        app.check_folder(tmp_path, options, "one")  # writes nothing: nothing has changed
        with pytest.raises(ZeroDivisionError):
            app.check_folder(tmp_path, options._replace(rank=8), "one")
    assert (tmp_path / "base.json").read_bytes() == before
    app.check_folder(tmp_path, options._replace(rank=8), "one")
    assert (tmp_path / "base.json").read_bytes() != before


@pytest.mark.parametrize("where, place", [
    ("data[0]", lambda m: m.data[0]), ("data[0].model_input[0]", lambda m: m.data[0].model_input[0]),
    ("data[0].model_input[0].encoded_text[0]", lambda m: m.data[0].model_input[0].encoded_text),
    ("data[0].loss_fn_inputs[0]", lambda m: m.data[0].loss_fn_inputs["target_tokens"])])
def test_a_field_of_a_newer_sdk_is_refused_wherever_it_is(where, place):
    body = forward_backward("a:train:0", 1, [(np.array([3, 4]), {"target_tokens": np.array([4, 5])})])
    assert wire.parse_forward_backward(body).seq_id == 1
    message = wire.parse("ForwardBackwardRequest", body)
    place(message).MergeFromString(b"\xf8\x01\x01")
    with pytest.raises(Refused, match=re.escape(f"field number 31 of {where} is not known here")):
        wire.parse_forward_backward(message.SerializeToString())


def test_a_field_of_any_kind_has_no_bounds():
    assert bodies.read("session", {"session_id": "a", "type": 1e30})["type"] == 1e30


def test_other_addresses_need_keys(capsys, caplog, monkeypatch):
    monkeypatch.delenv(app.KEYS, raising=False)
    assert app.main(["--model=a", "--host=0.0.0.0"]) == 2 and "other machines could train and read here" in caplog.text
    monkeypatch.setenv(app.KEYS, "secret")
    assert app.main(["--model=a"]) == 2 and "does not begin with tml-" in caplog.text and "secret" not in caplog.text
    assert app.main(["--help"]) == 0 and "jaxrl serve tinker --model=PATH" in capsys.readouterr().out


def test_a_bug_before_the_work_uses_the_number_up(client, monkeypatch):
    """Else later numbers would wait for it, and a restart would end with it."""
    run = client.run(client.session())
    monkeypatch.setattr("jaxrl.service.bodies.adam_settings", lambda b: {}["beta3"])
    answer = client.retrieve(client.optim_step(run, 1)).json()
    assert answer["category"] == "server" and "optim_step (seq_id=1): KeyError: 'beta3' (incident" in answer["error"]
    monkeypatch.undo()
    client.forward_backward(run, 2, ROWS)
    assert client.result(client.optim_step(run, 3))["metrics"]


def test_weights_of_another_adapter_change_nothing_of_the_run(client):
    session = client.session()
    small, large = client.run(session, rank=2), client.run(session, 1, rank=4)
    path = client.result(client.ok("save_weights", {"model_id": large, "seq_id": 1, "path": "w"}))["path"]
    told = client.refused("load_weights", {"model_id": small, "seq_id": 1, "path": path, "optimizer": False})
    assert "create the run with the same rank and modules" in told
    assert client.ok("get_info", {"model_id": small})["lora_rank"] == 2


def test_the_journal_forgets_samples_once_their_results_are_old(client, monkeypatch):
    operations = client.http.app.state.operations
    sampler = client.sampler(client.session(), 0)
    assert client.result(client.sample(sampler, 0, [3, 4])).sequences
    name, kept = f"{sampler}:0", lambda: {r.header.get("name") for r in operations.journal.records()}
    assert name in kept()
    monkeypatch.setattr("jaxrl.service.operations.RESULTS_SECONDS", -10.0)  # all are old
    monkeypatch.setattr("jaxrl.service.operations.JOURNAL_BYTES", 0)
    monkeypatch.setattr(operations, "_swept", -1e9)
    operations._sweep()
    assert name not in operations.promises and name not in kept()
