"""Uploads copies of exports and checkpoints to a repository of the Hugging Face hub, or to a prefix of any store that
fsspec knows (s3://, gs://, file://, ...), in the background. Uploads neither fail nor delay the run.

Below a prefix files have the paths that they have below the run's folder (`export/`, `export_00000020/`,
`checkpoints/00000020/`); in a repository the final export is at the top, where `from_pretrained` looks for it. A
folder is complete if it has `uploaded.json`, with size and SHA-256 of every file: a store gets it last (an older
one is deleted first), the hub in one commit with the files. Each destination has its own thread and queue. A
failed upload is retried after 2, 4, 8 ... seconds; a folder that fails at all tries is counted, logged at the end
and listed in summary.json.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from pathlib import Path

from jaxrl.errors import ConfigError

log = logging.getLogger("jaxrl")

MARKER = "uploaded.json"
FIRST_WAIT, LONGEST_WAIT = 2.0, 120.0  # seconds between attempts, doubled each time
HUB = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(@(?P<branch>[^/]+))?/?(?P<below>.*)")


class Hub:
    """hf://OWNER/NAME[@BRANCH][/FOLDER]: a model repository, created if necessary. Credentials (HF_TOKEN, `hf auth
    login`) and server ($HF_ENDPOINT) are the hub library's.

    url: such an address. private: whether a repository that has to be created is private. Raises ConfigError for
    another address."""

    def __init__(self, url: str, private: bool):
        found = HUB.fullmatch(url)
        if not found:
            raise ConfigError(f"checkpoint.upload.to entry {url!r}: expected hf://owner/name or hf://owner/name/folder")
        self.url, self.repo, self.branch, self.below = url, found["repo"], found["branch"], found["below"].strip("/")
        self._private, self._api = private, None

    def send(self, folder: Path, name: str, marker: dict) -> None:
        """Uploads the files that the marker lists, and the marker, in one commit. Creates repository and branch if
        necessary.

        Large files are sent first, unless they exist already. Raises what huggingface_hub raises.

        Args:
          folder: local folder. name: folder in the repository; "export" = its top. marker: see `marker_of`."""
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.utils import disable_progress_bars

        if self._api is None:
            disable_progress_bars()  # they would be written into the run's console
            api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
            api.create_repo(self.repo, private=self._private, exist_ok=True)
            if self.branch:
                api.create_branch(self.repo, branch=self.branch, exist_ok=True)
            self._api = api
        top = "/".join(part for part in (self.below, "" if name == "export" else name) if part)
        at = lambda file: f"{top}/{file}" if top else file  # noqa: E731
        files = [CommitOperationAdd(at(file), str(folder / file)) for file in marker["files"]]
        files.append(CommitOperationAdd(at(MARKER), _text(marker)))
        self._api.create_commit(self.repo, files, commit_message=f"{name} of step {marker['step']}",
                                revision=self.branch)


class Store:
    """A prefix of a file system that fsspec knows, with that store's credentials.

    url: such a prefix, s3://bucket/folder. Raises ConfigError if fsspec cannot open it."""

    def __init__(self, url: str):
        try:
            import fsspec

            options = {"auto_mkdir": True} if url.startswith("file://") else {}
            self._fs, root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError) as e:
            raise ConfigError(f"checkpoint.upload.to entry {url!r}: {e}; install what fsspec needs for it (s3fs, "
                              "gcsfs, ...), or name another place") from None
        self.url, self._root = url, root.rstrip("/")

    def send(self, folder: Path, name: str, marker: dict) -> None:
        """Uploads the files that the marker lists, then the marker; returns at once if the same marker exists.

        Args:
          folder: local folder. name: folder below the store's prefix. marker: see `marker_of`.

        Raises OSError if a file has another size in the store, and what the store's library raises."""
        top, fs = f"{self._root}/{name}", self._fs
        fs.invalidate_cache()
        if fs.exists(f"{top}/{MARKER}"):
            if json.loads(fs.cat_file(f"{top}/{MARKER}")) == marker:
                return
            fs.rm_file(f"{top}/{MARKER}")  # before any file is another one
        for file in marker["files"]:
            fs.put_file(str(folder / file), f"{top}/{file}")
        fs.invalidate_cache()
        for file, (size, _) in marker["files"].items():
            if (there := fs.size(f"{top}/{file}")) != size:
                raise OSError(f"{top}/{file} has {there} bytes instead of {size}")
        fs.pipe_file(f"{top}/{MARKER}", _text(marker))


def place_of(url: str, private: bool = True) -> Hub | Store:
    """Returns the Hub or Store of an address. Raises ConfigError for an invalid address, or a store
    whose package is missing.

    private: whether a repository that has to be created is private."""
    if "://" not in url:
        raise ConfigError(f"checkpoint.upload.to entry {url!r}: expected hf://owner/name, or a prefix such as "
                          "s3://bucket/folder, gs://bucket/folder or file:///folder")
    return Hub(url, private) if url.startswith("hf://") else Store(url)


def marker_of(folder: Path, step: int) -> dict:
    """Returns the content of `uploaded.json`: {"step": step, "files": {path below the folder: [bytes, SHA-256]}}.

    Raises FileNotFoundError if the folder holds no file."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    if not files:
        raise FileNotFoundError(f"{folder} is not there any more")
    return {"step": step, "files": {p.relative_to(folder).as_posix(): [p.stat().st_size, _sha256(p)] for p in files}}


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _text(marker: dict) -> bytes:
    return json.dumps(marker, indent=1).encode()


class Uploads:
    """Sends folders to all places of `checkpoint.upload` in the background, with retries. The constructor starts a
    thread for each place, which `close` ends, and raises ConfigError as `place_of`; the methods do not raise.

    Args:
      options: config.checkpoint.upload.
      first_wait: seconds before the second attempt."""

    def __init__(self, options, first_wait: float | None = None):
        self.options, self._first_wait = options, FIRST_WAIT if first_wait is None else first_wait
        self._places = [place_of(url, options.private) for url in options.to]
        self._change = threading.Condition()
        self._queues: dict[str, list[tuple[Path, str, int]]] = {place.url: [] for place in self._places}
        self._done, self._problems, self._logged, self._closed = 0, [], False, False
        for place in self._places:
            threading.Thread(target=self._serve, args=(place,), name="upload", daemon=True).start()

    def wants(self, kind: str, last: bool) -> bool:
        """Returns whether a folder of this kind ("exports", "checkpoints") is to be sent; last: whether it is the
        run's final one.
        """
        o = self.options
        return {"none": False, "final": last, "all": True}[o.exports if kind == "exports" else o.checkpoints]

    def add(self, folder: Path, name: str, step: int) -> None:
        """Queues a folder, which must not change from now on, under `name`. Returns at once. step: completed steps, for
        the marker."""
        with self._change:
            for queue in self._queues.values():
                queue.append((Path(folder), name, step))
            self._change.notify_all()

    def holds(self, folder: Path) -> bool:
        """Returns whether the folder is still to be sent to at least one place."""
        with self._change:
            return any(folder == waiting for queue in self._queues.values() for waiting, _, _ in queue)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics upload/done, upload/failed and upload/waiting: folders times places so far."""
        with self._change:
            return {"upload/done": float(self._done), "upload/failed": float(len(self._problems)),
                    "upload/waiting": float(sum(map(len, self._queues.values())))}

    def end(self, seconds: float) -> dict:
        """Waits up to `seconds` until every folder is sent or has failed.

        Returns the entry of summary.json: {"to": places, "done": count, "failed": [text], "unfinished": [text]}.
        Failed and unfinished uploads are logged as errors too."""
        with self._change:
            self._change.wait_for(lambda: not any(self._queues.values()), seconds)
            left = [f"{name} to {url}" for url, queue in self._queues.items() for _, name, _ in queue]
            out = {"to": list(self.options.to), "done": self._done, "failed": list(self._problems), "unfinished": left}
        for text in (*out["failed"], *(f"{what}: not done in time" for what in left)):
            log.error("NOT UPLOADED: %s", text)
        return out

    def close(self) -> None:
        """Starts no further upload. A running one ends with the process."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def _serve(self, place) -> None:
        queue = self._queues[place.url]
        while True:
            with self._change:
                self._change.wait_for(lambda: queue or self._closed)
                if self._closed:
                    return
                folder, name, step = queue[0]
            problem = self._send(place, folder, name, step)
            with self._change:
                queue.pop(0)
                self._done += not problem
                self._problems += [f"{name} to {place.url}: {problem}"] if problem else []
                self._change.notify_all()

    def _send(self, place, folder: Path, name: str, step: int) -> str:
        """Sends a folder, with retries. Returns "" or the last attempt's error."""
        problem, pause = "", self._first_wait
        for attempt in range(self.options.attempts):
            if attempt:
                with self._change:
                    if self._change.wait_for(lambda: self._closed, pause):
                        return problem
                pause = min(2 * pause, LONGEST_WAIT)
            try:
                place.send(folder, name, marker_of(folder, step))
                return ""
            except BaseException as e:  # noqa: B036  (any error of a store's library: the run continues)
                lines = str(e).strip().splitlines()
                problem = f"{type(e).__name__}: {lines[0][:300] if lines else ''}"
                if not folder.is_dir():
                    return f"{folder} was deleted before it was sent (checkpoint.keep)"
                self._warn_once(name, place.url, problem)
        return problem

    def _warn_once(self, name: str, url: str, problem: str) -> None:
        with self._change:
            logged, self._logged = self._logged, True
        if not logged:
            log.warning("upload of %s to %s failed (%s); it is tried %d times in total, and the run continues. "
                        "Further failures are counted (upload/failed) and logged at the end", name, url, problem,
                        self.options.attempts)
