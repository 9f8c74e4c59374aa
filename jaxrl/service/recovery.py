"""Goes on from the journal and the snapshots of an earlier process of the same folder.

Requests that a run's newest snapshot holds are not run again; their results are those of the journal. Later ones are
run again, from their recorded bodies: on a CPU with the same bits. A result that the journal has stays as it was
delivered; what was accepted and never answered is answered now. Called by service.app.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future

from jaxrl.service import bodies
from jaxrl.service.journal import Journal, Record
from jaxrl.service.operations import Model, Operations, Promise, SamplingSession, settle
from jaxrl.service.owners import user
from jaxrl.service.refusals import Refused
from jaxrl.service.trainer import LoraOptions

log = logging.getLogger("jaxrl")


def recover(operations: Operations, journal: Journal) -> None:
    """Replays a journal into fresh operations, whose worker has not begun, and compacts it. Raises
    OSError for a damaged snapshot or if the disk fails."""
    begin, again = time.monotonic(), 0
    operations.recorded = {r.header["name"]: r for r in journal.records() if r.header["kind"] == "result"}
    for record in journal.records():
        header = record.header
        if header["kind"] == "session":
            operations.begin_session(header["id"], header["key"], header["about"], header.get("digest", ""))
        elif header["kind"] == "sampler":
            operations.begin_sampling_session(header["id"], SamplingSession(header["version"], header["path"]))
        elif header["kind"] == "request":
            again += _request(operations, record)
        elif sampler := (header.get("json") or {}).get("sampling_session_id"):
            operations.begin_sampling_session(sampler, SamplingSession(sampler, None))
    operations.recorded = None
    operations.snapshots.prune(operations.most_versions)
    operations.compact()
    if operations.sessions:
        log.info("recovered %d sessions and %d runs in %.1f s; %d requests run again or for the first time",
                 len(operations.sessions), len(operations.models), time.monotonic() - begin, again)


def _request(operations: Operations, record: Record) -> bool:
    """Restores the promise of a request; returns whether its work is to be done."""
    header, name = record.header, record.header["name"]
    result = (operations.recorded or {}).get(name)
    sampled = header["op"] == "asample" and result is not None
    if not sampled and ("run" not in header or header["number"] >= operations.snapshots.next(header["run"])):
        token = user.set(operations.owner(name.partition(":")[0]))  # what was another user's then is so now
        try:
            _again(operations, header["op"], record.body)
            return True
        except Refused as e:  # it was refused then, too
            log.debug("journal: %s: %s", name, e)
            return False
        finally:
            user.reset(token)
    if header.get("number") == 0:
        about, body = operations.snapshots.about(header["run"]), bodies.parse(record.body)
        session = header["run"].partition(":")[0]
        operations.models[header["run"]] = Model(session, LoraOptions(**about["lora"]), body.get("user_metadata"))
        operations.sessions[session]["runs"].append(header["run"])
    if result is not None:
        future: Future = Future()
        settle(future, result)
        operations.promises[name] = Promise(future, header["digest"])
    return False


def _again(operations: Operations, op: str, raw: bytes) -> None:
    if op in ("forward", "forward_backward"):
        operations.forward_backward(raw)
    else:
        getattr(operations, op)(bodies.parse(raw), raw)
