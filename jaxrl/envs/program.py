"""env.program: a command line that talks to OpenAI's API, as an episode. Standard library only.

It gets the row as JSON on standard input, `{column}`s of its words filled in, the API in OPENAI_BASE_URL and
OPENAI_API_KEY, and a working folder of its own. What it came to is said by env.score, or else by a file `reward.json`
in that folder, which holds what an episode function returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from jaxrl.envs import openai
from jaxrl.envs.api import BadEnvironment, Chat
from jaxrl.envs.openai import Refused
from jaxrl.envs.play import Play
from jaxrl.envs.proxy import Line, Pending, Proxy
from jaxrl.workers import supervisor
from jaxrl.workers.loading import LoadError, load

REWARD = "reward.json"
OUTPUT = 1 << 20      # bytes of each of its streams that are kept: the last ones
PATIENCE = 3          # calls that are refused when turns or tokens are used up, before the program is ended
TOLD = 2000           # characters of standard error that a failure tells
FIELD = re.compile(r"\{(\w+)\}")


@dataclasses.dataclass
class Ran:
    """A program that has ended, as `env.score(task, ran)` gets it.

    exit: its status, negative where a signal ended it. stdout, stderr: text, of each the last MiB. messages: the
    conversation as its last trained call and the reply to it left it. folder: where it ran.
    """

    exit: int
    stdout: str
    stderr: str
    messages: list[dict]
    folder: Path


class ProgramChat(Chat):
    """The model as the proxy talks to it: requests with whole conversations."""

    def __init__(self, host, parallel: int):
        super().__init__(host, parallel)
        self.known: list[dict] = []   # what was said so far, as requests tell it
        self._shown: list[dict] = []  # tools of the present sequence
        self.over, self._raw = False, {}

    async def ask(self, asked: openai.Asked, train: bool) -> dict:
        """The model's turn. What goes on from the latest trained turn is put behind it; anything else opens a
        sequence of its own. Calls that are not trained are no part of the conversation."""
        new = None
        if train and self.known and asked.tools == self._shown:
            new = openai.follows(asked.messages, self.known)
        if new is None and (self.known or not train):
            self.rewrite(asked.messages)
        messages = [] if self._history is not None else new or asked.messages
        payload = self._payload(messages, asked.tools, asked.stop, asked.max_tokens)
        turn = self._received(await self._host.exchange(payload | {"train": train}))
        raw = self._raw
        if train:
            self._malformed += sum(call.arguments is None for call in turn.calls)
            self._shown = asked.tools
            self.known = [*asked.messages, openai.remembered(openai.said(raw, asked.stop))]
            self.over = raw.get("over", False)
        return raw

    def _received(self, turn: dict):
        self._raw = turn
        return super()._received(turn)


class Program(Play):
    """The Play. setup: `program` (words), `score`, `train_calls` (specs or ""), `crash`, `must_score`,
    `memory_gb` of one program with all it started."""

    name = "starting it"

    def __init__(self, setup: dict):
        self._words, self._memory = setup["program"], round(setup["memory_gb"] * 2**30)
        self._scored, self._must_score = setup["crash"] == "scored", setup["must_score"]
        self._score = load(setup["score"]) if setup["score"] else None
        self._train = load(setup["train_calls"]) if setup["train_calls"] else None
        self._memory_gb, self._user = setup["memory_gb"], setup["user"]
        for fn, what, count in ((self._score, "env.score: score(task, ran)", 2),
                                (self._train, "env.train_calls: trained(request)", 1)):
            if fn is not None:
                _check_signature(fn, what, count)
        self.functions = [fn for fn in (self._score, self._train) if fn is not None]
        self.files = [word for word in self._words if os.path.isfile(word)]
        if shutil.which(self._words[0]) is None:
            raise LoadError(f"there is no program {self._words[0]!r}")
        self._proxy = Proxy()

    def chat(self, running, parallel: int) -> Chat:
        return ProgramChat(running, parallel)

    async def run(self, task, chat, running):
        words = [FIELD.sub(lambda m: _field(m[1], task), word) for word in self._words]
        folder = Path(tempfile.mkdtemp(prefix="jaxrl_episode_"))
        try:
            with self._proxy.open() as (key, line):
                process = Process(words, folder, task, self._memory, self._proxy.url(), key)
                try:
                    await process.start()
                    running.phase = "the program"
                    await self._serve(line, process, chat, running)
                finally:
                    await process.end()
            return await self._outcome(task, chat, running, process, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _serve(self, line: Line, process: Process, chat: ProgramChat, running) -> None:
        """Answers calls until the program has ended, or asks on though nothing is left."""
        pending, refused = None, 0
        try:
            while refused < PATIENCE:
                call = asyncio.ensure_future(line.calls.get())
                await asyncio.wait({call, process.ended}, return_when=asyncio.FIRST_COMPLETED)
                if process.ended.done():
                    call.cancel()
                    return
                pending = call.result()
                try:
                    answer = await self._answered(pending, chat, running)
                    if not pending.answer.done():
                        pending.answer.set_result(answer)
                except Refused as e:
                    pending.answer.set_exception(e)
                    refused += chat.over
        finally:
            line.close(pending)

    async def _answered(self, pending: Pending, chat: ProgramChat, running) -> dict:
        if chat.over:
            raise Refused("the turns or tokens of this episode are used up", kind="context_length_exceeded")
        train = pending.train
        if train and self._train is not None:
            train = bool(await running.call(self._train, "env.train_calls", pending.body))
        turn = await chat.ask(pending.asked, train)
        id = f"chatcmpl-{running.n}-{chat._turns}"
        return openai.completion(id, int(time.time()), pending.asked, turn)

    async def _outcome(self, task, chat, running, process: Process, folder: Path):
        """What the episode returns."""
        ran = Ran(process.status, *map(_text, process.printed), chat.known, folder)
        if ran.exit and not chat.over and not self._scored:
            error = BadEnvironment(f"the program {self._how(ran.exit)}")
            error.add_note(f"It wrote last to standard error:\n{ran.stderr[-TOLD:]}")
            raise error
        if self._score is not None:
            return await running.call(self._score, "env.score", task, ran)
        try:
            return json.loads((folder / REWARD).read_text("utf-8"))
        except (ValueError, RecursionError):
            raise BadEnvironment(f"{REWARD} holds no JSON") from None
        except OSError:
            if ran.exit:
                return 0.0  # turns and tokens were used up, or env.crash=scored
            if self._must_score and not chat.over:
                raise BadEnvironment(f"the program ended without {REWARD}, there is no env.score, and no "
                                     "reward.functions") from None
            return 0.0 if self._must_score else None

    def _how(self, status: int) -> str:
        if status == supervisor.TOO_LARGE:
            return f"held more memory than env.memory_gb={self._memory_gb:g} allows"
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


class Process:
    """A program with all that it starts. On Linux a supervisor stands before it, which ends whatever is left."""

    def __init__(self, words: list[str], folder: Path, task, memory: int, url: str, key: str):
        self._words, self._folder, self._memory = words, folder, memory
        self._task = {"row": task.row, "prompt": task.prompt, "seed": task.seed, "user": task.user}
        self._env = os.environ | {
            "OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "OPENAI_API_KEY": key, "TMPDIR": str(folder),
            "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        self._process, self.status, self.printed = None, 0, (bytearray(), bytearray())
        self._readers: list[asyncio.Task] = []
        self.ended: asyncio.Future | None = None

    async def start(self) -> None:
        given = self._folder / "task.json"
        given.write_text(json.dumps(self._task), "utf-8")
        with given.open("rb") as stdin:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", supervisor.__file__, str(self._memory), *self._words, stdin=stdin,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=self._folder, env=self._env,
                start_new_session=True)
        streams = (self._process.stdout, self._process.stderr)
        self._readers = [asyncio.ensure_future(_drain(s, kept))
                         for s, kept in zip(streams, self.printed, strict=True)]
        self.ended = asyncio.ensure_future(self._process.wait())

    async def end(self) -> None:
        """Returns when it and all it started are gone."""
        if self._process is None:
            return
        if not self.ended.done():
            self._signal()
            await asyncio.wait({self.ended}, timeout=2 * supervisor.END_SECONDS)
            if not self.ended.done():
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, signal.SIGKILL)
        self.status = await self.ended
        await asyncio.wait(self._readers, timeout=supervisor.END_SECONDS)
        for reader in self._readers:
            reader.cancel()

    def _signal(self) -> None:
        with contextlib.suppress(OSError):
            if sys.platform == "linux":
                self._process.send_signal(supervisor.END)
            else:
                os.killpg(self._process.pid, signal.SIGKILL)


async def _drain(stream, kept: bytearray) -> None:
    """Reads all; the last of it is kept."""
    while data := await stream.read(1 << 16):
        kept += data
        del kept[:-OUTPUT]


def _text(data: bytearray) -> str:
    return data.decode("utf-8", "replace")


def _field(name: str, task) -> str:
    """What stands for `{name}` in a word: the prompt, the seed or a column; what is no text as JSON."""
    known = {"prompt": task.prompt, "seed": task.seed}
    value = known[name] if name in known else task.row[name]
    return value if isinstance(value, str) else json.dumps(value)


def _check_signature(fn, what: str, count: int) -> None:
    try:
        inspect.signature(fn).bind(*[None] * count)
    except TypeError as e:
        raise LoadError(f"{what}: {e}") from None
