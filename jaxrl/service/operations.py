"""The operations of the protocol: from checked bodies to tasks of the worker, and to the answers of the client.

A request that is sent again gets the promise of the first one: promises have derived names, `<run>:<number>`,
`<sampler>:<number>`. A request that is wrong in itself, but names its run and number, uses the number up: its promise
is the error, so that later numbers go on.

An accepted request is in the journal before its promise is answered, and a result before it can be fetched;
service.recovery calls these operations again with what a journal holds.

Called by service.routes, from one thread. Results come from the worker's thread, through futures.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from jaxrl.service import bodies, wire
from jaxrl.service.journal import Journal, Record
from jaxrl.service.owners import is_visible, user
from jaxrl.service.refusals import Refused
from jaxrl.service.sampler import BASE, SampleJob
from jaxrl.service.store import KINDS, Address, check_name
from jaxrl.service.trainer import LoraOptions
from jaxrl.service.worker import ALONE, Pass, Task, refusal

log = logging.getLogger("jaxrl")
RESULTS_SECONDS = 3600.0  # results are kept for as long
NO_UNEMBED = "this server was started with --unembed=leave-out: train_unembed=True trains no output matrix here"
JOURNAL_BYTES = 256 << 20  # of the journal, from which it is compacted
VERSIONS, FULL_VERSIONS = 64, 3  # versions of weights that the sampler keeps, in host memory: adapters, whole models


@dataclasses.dataclass(eq=False)
class Promise:
    """The answer to a request: a Future of bytes (protobuf) or of a dict (JSON), or of a Refused as its exception.

    digest: SHA-256 of the request's body, or of the part by which it is recognised. made: by time.monotonic."""

    future: Future
    digest: str
    made: float = dataclasses.field(default_factory=time.monotonic)


@dataclasses.dataclass(eq=False)
class Model:
    """The options and metadata of a run; its parameters are the trainer's.

    Attributes:
      session: its id. options: LoraOptions; None before it was created. used: time of its last request, seconds since
        1970.
    """

    session: str
    options: LoraOptions | None = None
    user_metadata: dict | None = None
    used: float = dataclasses.field(default_factory=time.time)


@dataclasses.dataclass(eq=False)
class SamplingSession:
    """The weights that a sampling session samples from.

    version: their name in the sampler. path: their tinker:// path; None = the base, or saved without one."""

    version: str
    path: str | None


class Operations:
    """Sessions, runs, sampling sessions and promises of a server.

    Args:
      worker: service.worker.Worker. store: service.store.Store.
      names: names of the base model, the first one its own.
      eos_ids: end tokens. longest: most tokens of a sequence. vocab: token ids are below it. has_text: whether stop
        texts can be searched.
      journal: service.journal.Journal; None = nothing survives this process.
      leave_out: whether a run that asks for train_unembed=True is trained without it.
      sight: service.images.Sight; None = images are refused.

    Operations of a run raise Refused: 404 for an unknown session or run, 422 for a body of another form or a used
    number, 429 if too many bytes wait, 503 while the server stops; and OSError if the journal cannot be written.

    Attributes:
      sessions, models, samplers, promises: by id or name. snapshots: of the worker. most_versions: of weights that the
        sampler keeps. recorded: name -> result, set by service.recovery while it replays a journal, to which nothing is
        written then; else None.
    """

    def __init__(self, worker, store, names: tuple[str, ...], eos_ids: tuple[int, ...], longest: int, vocab: int,
                 has_text: bool = True, journal: Journal | None = None, leave_out: bool = False, sight=None):
        self.worker, self.trainer, self.sampler, self.store = worker, worker.trainer, worker.sampler, store
        self.names, self.eos_ids, self.longest, self.vocab, self.has_text = names, eos_ids, longest, vocab, has_text
        self.sessions: dict[str, dict] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, SamplingSession] = {}
        self.promises: dict[str, Promise] = {}
        self.created: dict[tuple[str | None, str], tuple[str, str]] = {}  # (user, idempotency key) -> session, digest
        self.journal, self.snapshots, self.leave_out = journal, worker.snapshots, leave_out
        self.sight = sight
        self.most_versions = VERSIONS if worker.trainer.rank else FULL_VERSIONS
        self.recorded: dict[str, Record] | None = None  # results of an earlier process, while its journal is replayed
        self._swept = time.monotonic()

    # ---- promises

    def _write_down(self, header: dict, body: bytes = b"") -> None:
        if self.journal is not None and self.recorded is None:
            self.journal.append(header | {"time": time.time()}, body)

    def _promise(self, name: str, body: bytes, begin: Callable[[Future, Record | None], None],
                 identity: bytes | None = None, **about) -> dict:
        """Returns the promise of a request as the client gets it; `begin` starts the work of a new one.

        Args:
          begin: gets the future and, if the journal has the result already, that: the work is done for its effects
            alone.
          identity: what a request that is sent again has in common with the first one; None = the whole body.
          about: of the request, for the journal.
        """
        digest = hashlib.sha256(body if identity is None else identity).hexdigest()
        if (known := self.promises.get(name)) is not None:
            if known.digest != digest:
                raise Refused(422, f"{name}: another request with this number came before (SHA-256 "
                              f"{known.digest[:12]}, now {digest[:12]}); numbers are used once")
            return {"request_id": name}
        self._sweep()
        self._write_down({"kind": "request", "name": name, "digest": digest, **about}, body)
        future: Future = Future()
        if (recorded := (self.recorded or {}).get(name)) is not None:
            settle(future, recorded)
            begin(Future(), recorded)
        else:
            begin(future, None)
        self.promises[name] = Promise(future, digest)
        return {"request_id": name}

    def _recorder(self, name: str, **about) -> Callable[..., None]:
        """Returns a function that writes a result, or the Refused in its place, and its placement into the journal."""
        def record(result, placement=None):
            header = {"kind": "result", "name": name, "time": time.time(), **about}
            if placement:
                header["placement"] = placement
            if isinstance(result, Refused):
                header |= {"error": str(result), "status": result.status}
            elif not isinstance(result, bytes):
                header["json"] = result
            if self.journal is not None:
                self.journal.append(header, result if isinstance(result, bytes) else b"")

        return record

    def _sweep(self) -> None:
        now = time.monotonic()
        if now - self._swept > 60:
            self._swept = now
            self.promises = {name: p for name, p in self.promises.items()
                             if not p.future.done() or now - p.made < RESULTS_SECONDS}
            if self.journal is not None and self.journal.bytes > JOURNAL_BYTES:
                self.compact()

    def compact(self) -> None:
        """Drops from the journal requests and results that are older than RESULTS_SECONDS and that nothing needs again;
        of such requests that are younger, the bodies alone."""
        young = time.time() - RESULTS_SECONDS
        unanswered = {name for name, p in self.promises.items() if not p.future.done()}

        def needed(record: Record) -> Record | None:
            header = record.header
            if header["kind"] in ("session", "sampler") or header.get("number") == 0:
                return record
            sampler = (header.get("json") or {}).get("sampling_session_id")
            if sampler and self.snapshots.has_version(sampler):
                return record
            waits = header["name"] in unanswered
            if "run" in header:
                waits = header["number"] >= self.snapshots.next(header["run"])
            if waits:
                return record
            if header["time"] < young:
                return None
            return record if header["kind"] == "result" else record._replace(body=b"")

        if self.journal is not None:
            self.journal.compact(needed)

    def promise(self, name: str) -> Promise:
        """Returns a promise by name. Raises Refused (410) for one that is not known or another user's."""
        found = self.promises.get(name)
        if found is None or not self._sees(name):
            raise Refused(410, f"request_id={name!r} is not known here: the server was restarted, or the result is "
                          f"older than {RESULTS_SECONDS:g} s; send the request again")
        return found

    def _task(self, kind: str, model_id: str, number: int, body: bytes, prepare: Callable[[], Callable | Pass],
              changes: bool = True, identity: bytes | None = None, **options) -> dict:
        """Returns the promise of a run's task.

        Args:
          prepare: checks the request and returns the work of Task.
          changes: whether it changes the run; else it is not done again if its result is known.
          identity: as in _promise.
          options: of Task.
        """
        self.model(model_id).used = time.time()
        name, title = f"{model_id}:{number}", f"{kind} (seq_id={number})"

        def begin(future, recorded):
            try:
                work = prepare()
            except Exception as e:  # uses the number up, whatever it is
                work = _failing(refusal(e, title))
            record = self._recorder(name, run=model_id, number=number)
            if recorded is not None:
                record = _nothing
                if "error" in recorded.header:
                    work = _failing(Refused(recorded.header["status"], recorded.header["error"]))
                elif not changes:
                    work = _nothing
                elif isinstance(work, Pass):
                    work = work._replace(placement=recorded.header.get("placement", ALONE))
            self.worker.post(Task(title, work, future, record=record, size=len(body), **options), model_id, number)

        if name not in self.promises and self.recorded is None:
            self.worker.check_room(model_id.partition(":")[0], model_id, number, len(body), title)
        promise = self._promise(name, body, begin, identity, op=kind, run=model_id, number=number)
        return promise | {"model_id": model_id}

    # ---- sessions

    def create_session(self, body: dict, raw: bytes, key: str) -> dict:
        """Creates a session; returns {"type", "session_id"} and a warning if output matrices are left out.

        body: the JSON; raw: its bytes. key: of the request, the same if it is sent again, which gives the same session;
        "" = none, a new session each time. Raises Refused (422) for a key that came with another request."""
        b, digest = bodies.read("create_session", body), hashlib.sha256(raw).hexdigest()
        session, before = self.created.get((user.get(), key), ("", digest))
        if before not in ("", digest):
            raise Refused(422, f"X-Idempotency-Key {key[:80]!r}: another request with this key came before; keys are "
                          "used once")
        if not session:
            session = secrets.token_hex(16)
            about = {"user_metadata": b["user_metadata"], "display_name": b["display_name"], "owner": user.get()}
            self._write_down({"kind": "session", "id": session, "key": key, "digest": digest, "about": about})
            self.begin_session(session, key, about, digest)
        warning = {"warning_message": NO_UNEMBED} if self.leave_out else {}
        return {"type": "create_session", "session_id": session, **warning}

    def begin_session(self, session: str, key: str, about: dict, digest: str) -> None:
        """Notes a session. key: of the request, which finds it again; "" = none. about: user_metadata, display_name and
        owner. digest: of the request, "" = not known."""
        self.sessions[session] = {"owner": None, **about, "runs": [], "samplers": []}
        if key:
            self.created[about.get("owner"), key] = session, digest

    def owner(self, session_id: str) -> str | None:
        """Returns the user of a session; None if it was made without keys, or is not known."""
        return self.sessions.get(session_id, {}).get("owner")

    def _sees(self, name: str) -> bool:
        """Whether the request at work may see a session, or a run, sampler or promise, whose names begin with it."""
        return is_visible(self.owner(name.partition(":")[0]))

    def runs(self) -> dict[str, Model]:
        """Returns the runs of this process that the user may see, and that were created, by id."""
        return {name: model for name, model in self.models.items() if model.options is not None and self._sees(name)}

    def session(self, session_id: str) -> dict:
        """Returns a session of the user by id. Raises Refused (404) for one that is not known or another user's."""
        if session_id not in self.sessions or not self._sees(session_id):
            raise Refused(404, f"session_id={session_id!r}: there is no such session; the server may have been "
                          "restarted")
        return self.sessions[session_id]

    def model(self, model_id: str) -> Model:
        """Returns a run of the user by id. Raises Refused (404) for one that is not known or another user's."""
        if model_id not in self.models or not self._sees(model_id):
            raise Refused(404, f"model_id={model_id!r}: there is no such run; after a restart of the server create one "
                          "from saved weights (create_training_client_from_state_with_optimizer)")
        return self.models[model_id]

    def _check_base(self, name: str | None, field: str = "base_model") -> None:
        if name is not None and name not in self.names:
            raise Refused(422, f"{field}={name!r}: this server has {', '.join(self.names)}; name one of these, or "
                          f"start the server with --name={name} to lend the name")

    # ---- runs

    def create_model(self, body: dict, raw: bytes) -> dict:
        """Creates a run with a new adapter; returns the promise {"request_id", "model_id"}, whose result is the error
        for a wrong base, optimizer or adapter. Raises Refused (404 for an unknown session) as Operations says."""
        b = bodies.read("create_model", body)
        session, model_id = self.session(b["session_id"]), f"{b['session_id']}:train:{b['model_seq_id']}"

        def prepare():
            self._check_base(b["base_model"])
            bodies.check_optimizer(b["optimizer_config"])
            options = bodies.lora_options(b["lora_config"], _seed_of(model_id), self.leave_out)

            def work(_):
                run = self.trainer.start(options)
                self.models[model_id].options = options
                return run, {"model_id": model_id, "type": "create_model"}

            return work

        return self._begin_run(session, b, model_id, raw, prepare, "create_model")

    def load_weights(self, body: dict, raw: bytes) -> dict:
        """Creates a run from saved weights, or loads them into a run as its first request (the older form).

        Returns the promise {"request_id", "model_id"}; what is wrong with path, base or optimizer is its result. Raises
        Refused as Operations says, also (422) for a body that names neither session nor run."""
        b = bodies.read("load_weights", body)
        session: str | None = b["session_id"]
        if session is None:
            if b["model_id"] is None or b["seq_id"] is None:
                raise Refused(422, "load_weights: send session_id and model_seq_id, or model_id and seq_id")
            model_id, number = b["model_id"], b["seq_id"]
        elif b["model_seq_id"] is None:
            raise Refused(422, "load_weights.model_seq_id is missing; send a whole number")
        else:
            model_id, number = f"{session}:train:{b['model_seq_id']}", 0

        def prepare():
            self._check_base(b["base_model"])
            bodies.check_optimizer(b["optimizer_config"])
            address = Address.parse(b["path"])
            about = self.store.about(address)
            if number and number != 1:
                raise Refused(422, f"load_weights: seq_id={number} of a run: weights are loaded as its first request "
                              "alone; create a run with create_training_client_from_state")

            def work(run):
                loaded = self._load(address, about, b["optimizer"])
                answer = {"path": b["path"], "model_id": model_id, "type": "load_weights"}
                if run is None:
                    self.models[model_id].options = loaded.options
                    return loaded, answer
                if loaded.options._replace(seed=0) != run.options._replace(seed=0):
                    raise Refused(422, f"path={b['path']!r} has the adapter {loaded.options}, the run {run.options}: "
                                  "create the run with the same rank and modules")
                run.state = loaded.state
                return answer

            return work

        if session is None:
            return self._task("load_weights", model_id, number, raw, prepare, snapshot=True)
        return self._begin_run(self.session(session), b, model_id, raw, prepare, "load_weights", snapshot=True)

    def _begin_run(self, session, b, model_id: str, raw: bytes, prepare, kind: str, **options) -> dict:
        if model_id not in self.models:
            self.models[model_id] = Model(b["session_id"], user_metadata=b["user_metadata"])
            session["runs"].append(model_id)
        return self._task(kind, model_id, 0, raw, prepare, **options)

    def _load(self, address: Address, about: dict, optimizer: bool):
        """Returns a run with saved weights. Called in the worker's thread."""
        options = LoraOptions(**about["lora"])
        leaves = self.trainer.read(self.store.adapter(address))
        moments = None
        if optimizer:
            saved = self.store.moments(address)
            moments = (saved["count"], *({name.removeprefix(f"{kind}/"): x for name, x in saved.items()
                                          if name.startswith(f"{kind}/")} for kind in ("mu", "nu")))
            moments = (moments[0], *(self.trainer.fitted(part) for part in moments[1:]))
        return self.trainer.restored(options, leaves, moments)

    def forward_backward(self, raw: bytes) -> dict:
        """Computes a loss and its gradient, or the loss alone; returns the promise, whose result is the error for wrong
        data. raw: the protobuf message. Raises Refused (400 for another message) as Operations says."""
        request = wire.parse_forward_backward(raw)
        kind = "forward" if request.forward_only else "forward_backward"

        def prepare():
            data = wire.read_data(request.data, bodies.MOST_DATA, self.longest)
            batch = bodies.batch(data, request.loss_fn, request.config, self.longest, self.vocab, self.sight)
            return Pass(batch, not request.forward_only,
                        lambda logprobs, loss: wire.forward_backward_output(logprobs, {"loss:sum": loss}))

        learns = not request.forward_only
        return self._task(kind, request.model_id, request.seq_id, raw, prepare, changes=learns, clears=learns)

    def optim_step(self, body: dict, raw: bytes) -> dict:
        """Applies the gradients of a run; returns the promise, whose result is the error for wrong settings. body: the
        JSON; raw: its bytes. Raises Refused as Operations says."""
        b = bodies.read("optim_step", body)

        def prepare():
            settings = bodies.adam_settings(b)
            return lambda run: {"type": "optim_step", "metrics": self.trainer.optim_step(run, settings)}

        return self._task("optim_step", b["model_id"], b["seq_id"], raw, prepare, clears=True, applies=True)

    # ---- saved weights

    def save_weights(self, body: dict, raw: bytes) -> dict:
        """Saves a run's weights and optimizer under a name; returns the promise of their tinker:// path, or of the
        error for a wrong or taken name. Raises Refused as Operations says."""
        b = bodies.read("save_weights", body)

        def prepare():
            address = Address(b["model_id"], "weights", check_name(b["path"]))

            def work(run):
                self._save(address, run, b, self.trainer.moments(run), b["overwrite"])
                return {"path": str(address), "type": "save_weights"}

            return work

        return self._task("save_weights", b["model_id"], b["seq_id"], raw, prepare, changes=False)

    def _save(self, address: Address, run, b: dict, moments=None, overwrite: bool = False) -> None:
        now = time.time()
        about = {"base_model": self.names[0], "lora": run.options._asdict(), "kind": KINDS[address.kind], "time": now,
                 "owner": self.owner(b["model_id"].partition(":")[0]),
                 "user_metadata": b["user_metadata"], "step": int(run.state.step),
                 "expires": None if b["ttl_seconds"] is None else now + b["ttl_seconds"],
                 "request": f"{b['model_id']}:{b['seq_id']}"}
        self.store.write(address, about, lambda folder: self.trainer.export(run, folder), moments, overwrite)

    def save_weights_for_sampler(self, body: dict, raw: bytes) -> dict:
        """Keeps the run's present weights for sampling: under a name on the disk, or for one sampling session; returns
        the promise of their path or session id, or of the error. Raises Refused as Operations says."""
        b = bodies.read("save_weights_for_sampler", body)

        def prepare():
            if b["kind"] != "snapshot":
                raise Refused(422, f"save_weights_for_sampler.kind={b['kind']!r} is not served here; leave it out: a "
                              "snapshot is taken")
            if b["path"] is None and b["sampling_session_seq_id"] is None:
                raise Refused(422, "save_weights_for_sampler: send a path, or a sampling_session_seq_id")
            address = None if b["path"] is None else Address(b["model_id"], "sampler_weights", check_name(b["path"]))
            session = self.model(b["model_id"]).session
            sampler_id = f"{session}:sample:{b['sampling_session_seq_id']}"
            if address is None and self.recorded is None:
                self._check_new(sampler_id, None)

            def work(run):
                leaves = self.trainer.leaves(run)
                if address is not None:
                    self._save(address, run, b)
                    self._keep(str(address), leaves)
                    return {"path": str(address), "type": "save_weights_for_sampler"}
                self.snapshots.keep_version(sampler_id, leaves)
                self._keep(sampler_id, leaves)
                self.begin_sampling_session(sampler_id, SamplingSession(sampler_id, None))
                return {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}

            return work

        # the SDK counts its sampling sessions on when it sends the same request again
        same = json.dumps({k: v for k, v in b.items() if k != "sampling_session_seq_id"}, sort_keys=True).encode()
        return self._task("save_weights_for_sampler", b["model_id"], b["seq_id"], raw, prepare, changes=False,
                          identity=same)

    def _keep(self, name: str, leaves: dict) -> None:
        """Gives the sampler a version, and drops the oldest ones beyond most_versions that no job needs."""
        self.sampler.keep(name, leaves)
        old = [other for other in self.sampler.versions if other not in (BASE, name, *self.sampler.needed())]
        for other in old[:max(0, len(self.sampler.versions) - self.most_versions)]:
            self.sampler.forget(other)
            if not other.startswith("tinker://"):
                self.snapshots.forget_version(other)

    def _check_new(self, sampler_id: str, found: SamplingSession | None) -> None:
        """Raises Refused if the number of a sampling session was used for other weights than `found`."""
        known = self.samplers.get(sampler_id)
        if known is not None and (found is None or (known.version, known.path) != (found.version, found.path)):
            raise Refused(422, f"{sampler_id}: another request with this sampling_session_seq_id came before; numbers "
                          "are used once")

    def begin_sampling_session(self, sampler_id: str, found: SamplingSession) -> None:
        """Notes a sampling session under its id, in place of an earlier one."""
        session = self.sessions.get(sampler_id.partition(":")[0], {"samplers": []})
        if sampler_id not in self.samplers:
            session["samplers"].append(sampler_id)
        self.samplers[sampler_id] = found

    # ---- sampling

    def create_sampling_session(self, body: dict) -> dict:
        """Opens a sampling session on saved weights or on the base; returns {"type", "sampling_session_id"}.

        Raises Refused: 404 for an unknown session or weights, 422 for another base, path or a number that was used."""
        b = bodies.read("create_sampling_session", body)
        self.session(b["session_id"])
        if b["model_path"] is None:
            self._check_base(b["base_model"] or "")
            found = SamplingSession(BASE, None)
        else:
            address = Address.parse(b["model_path"])
            self.store.about(address)
            found = SamplingSession(str(address), str(address))
        sampler_id = f"{b['session_id']}:sample:{b['sampling_session_seq_id']}"
        self._check_new(sampler_id, found)
        self._write_down({"kind": "sampler", "id": sampler_id, "version": found.version, "path": found.path})
        self.begin_sampling_session(sampler_id, found)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def sampling_session(self, sampler_id: str) -> SamplingSession:
        """Returns a sampling session of the user by id. Raises Refused (404) if there is none."""
        if sampler_id not in self.samplers or not self._sees(sampler_id):
            raise Refused(404, f"sampling_session_id={sampler_id!r}: there is no such sampling session; create one")
        return self.samplers[sampler_id]

    def asample(self, body: dict, raw: bytes) -> dict:
        """Samples from the weights of a sampling session; returns the promise with the ids of the samples.

        Raises Refused: 404 for an unknown sampling session, 422 for a used number and a body that is not served
        (bodies.sample), 503 while the server stops."""
        b = bodies.read("asample", body)
        session = self.sampling_session(b["sampling_session_id"])
        sample = bodies.sample(b, self.eos_ids, self.longest, self.vocab, self.has_text, self.sight)
        name = f"{b['sampling_session_id']}:{b['seq_id']}"

        def begin(future, recorded):
            if recorded is not None:
                return
            inner, record = Future(), self._recorder(name)
            inner.add_done_callback(lambda done: _answer(done, future, record))
            job = SampleJob(name, session.version, *sample, future=inner)

            def work(_):
                self._fetch(session)
                self.sampler.submit(job)

            self.worker.post(Task("asample", work, inner))

        promise = self._promise(name, raw, begin, op="asample")
        return promise | {"sample_sequence_ids": [f"{name}/{i}" for i in range(sample.count)]}

    def _fetch(self, session: SamplingSession) -> None:
        """Gives the sampler the weights of a sampling session from the disk, if it has them no longer."""
        if session.version in self.sampler.versions:
            return
        if session.path is not None:
            address = Address.parse(session.path)
            self._keep(session.version, self.trainer.leaves(self._load(address, self.store.about(address), False)))
        elif (leaves := self.snapshots.version(session.version)) is not None:
            self._keep(session.version, self.trainer.fitted(leaves))

    def cancel_future(self, body: dict) -> None:
        """Ends sampling that nobody waits for; an unknown request_id changes nothing. Raises Refused: 422 for another
        body, 503 while the server stops."""
        name = bodies.read("cancel_future", body)["request_id"]
        if name in self.promises and self._sees(name):
            self.worker.post(Task("cancel_future", lambda _: self.sampler.cancel(name), Future()))


def _failing(error: Refused) -> Callable[[Any], Any]:
    def work(_):
        raise error

    return work


def _nothing(*_) -> None:
    """Does nothing, as the work or the record of a task whose result is known."""


def _seed_of(model_id: str) -> int:
    """Returns the seed (uint32) of a run that names none: by its id, so that a restart draws the same adapter."""
    return int.from_bytes(hashlib.blake2b(model_id.encode(), digest_size=4).digest(), "little")


def settle(future: Future, record: Record) -> None:
    """Gives a future the result that a journal has: the Refused, the JSON, or the bytes of the record."""
    header = record.header
    if "error" in header:
        future.set_exception(Refused(header["status"], header["error"]))
    else:
        future.set_result(header["json"] if "json" in header else record.body)


def _answer(done: Future, future: Future, record: Callable[[Any], None]) -> None:
    """Serialises the samples of a job, writes them down, and gives them to the future of its promise."""
    result: Any = None
    try:
        samples, logprobs = done.result()
        result = wire.sample_response(samples, None if logprobs is None else np.asarray(logprobs))
    except Exception as e:
        result = refusal(e, "asample")
    try:
        if not isinstance(result, Refused) or result.status != 503:
            record(result)
    except OSError as e:  # a restart draws the same samples again
        log.warning("journal: %s; free space on the disk", e)
    (future.set_exception if isinstance(result, Refused) else future.set_result)(result)
