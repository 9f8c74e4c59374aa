"""env.program: runs a command line that talks to OpenAI's API as an episode. Standard library only.

The program gets the row as JSON on standard input, `{column}` in its arguments replaced, the API in OPENAI_BASE_URL
and OPENAI_API_KEY, and a temporary working folder. Its result comes from env.score, or else from a file `reward.json`
in that folder with what an episode function would return.
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
from jaxrl.envs.openai import RequestError
from jaxrl.envs.proxy import CallQueue, PendingCall, Proxy
from jaxrl.envs.runner import EpisodeRunner
from jaxrl.workers import supervisor
from jaxrl.workers.loading import LoadError, load

REWARD = "reward.json"
MAX_OUTPUT_BYTES = 1 << 20      # last bytes kept of each output stream
PATIENCE = 3          # calls refused after turns or tokens are used up, before the program is killed
STDERR_CHARS = 2000           # characters of standard error in a failure's detail
FIELD = re.compile(r"\{(\w+)\}")


@dataclasses.dataclass
class ProgramResult:
    """A finished program, as `env.score(task, ran)` receives it.

    Attributes:
      exit: its status, negative for a signal; supervisor.TOO_LARGE if it used more than env.memory_gb, 0 if it was
        ended because it kept calling after turns or tokens were used up (both on Linux).
      stdout, stderr: text, the last MiB of each.
      messages: the conversation up to its last trained call and the reply to it.
      folder: its working folder.
    """

    exit: int
    stdout: str
    stderr: str
    messages: list[dict]
    folder: Path


class ProgramChat(Chat):
    """The chat of a program's episode: requests to the proxy carry whole conversations, of which only new messages
    are added. host, parallel: as Chat.

    Attributes:
      known: messages up to the latest trained turn, in the form of ChatRequest.messages.
      over: whether turns or tokens are used up."""

    def __init__(self, host, parallel: int):
        super().__init__(host, parallel)
        self.known: list[dict] = []   # messages so far, in the form of requests
        self._shown: list[dict] = []  # tools of the current sequence
        self.over, self._raw = False, {}

    async def ask(self, request: openai.ChatRequest, train: bool) -> dict:
        """Returns the model's turn for a request, as EpisodePool.reply sends it. A request that continues the latest
        trained turn is appended to it; any other starts a separate sequence. Untrained calls are not part of the
        conversation.

        train: whether the turn is trained.
        """
        new = None
        if train and self.known and request.tools == self._shown:
            new = openai.new_messages(request.messages, self.known)
        if new is None and (self.known or not train):
            self.rewrite(request.messages)
        messages = [] if self._history is not None else new or request.messages
        payload = self._payload(messages, request.tools, request.stop, request.max_tokens)
        turn = self._to_turn(await self._host.exchange(payload | {"train": train}))
        raw = self._raw
        if train:
            self._malformed += sum(call.arguments is None for call in turn.calls)
            self._shown = request.tools
            self.known = [*request.messages, openai.as_request_message(openai.assistant_message(raw, request.stop))]
            self.over = raw.get("over", False)
        return raw

    def _to_turn(self, turn: dict):
        self._raw = turn
        return super()._to_turn(turn)


class ProgramRunner(EpisodeRunner):
    """Runs programs as episodes.

    Args:
      setup: `program` (words), `score`, `train_calls` (specs or ""), `crash` ("scored": a failed program is scored as
        any other; else it is an error of the environment), `must_score` (whether an episode needs a score), `images`
        (whether messages may show any), `user` (config.user), and `memory_gb`, the limit in GiB of one program with
        its child processes, 0 = none.

    Raises LoadError if the program is not found, or a function cannot be loaded or has the wrong signature.
    """

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
            raise LoadError(f"program {self._words[0]!r} not found; install it or correct the path")
        self._proxy = Proxy(setup.get("images", False))

    def chat(self, running, parallel: int) -> Chat:
        """Returns the ProgramChat of one episode."""
        return ProgramChat(running, parallel)

    async def run(self, task, chat, running):
        """Runs the program until it ends, answers its calls with the model's turns, and returns the episode's result:
        that of env.score, else the content of reward.json. Without that file: 0.0 if the program failed, or if turns or
        tokens were used up and the episode must have a score, else None.

        Raises BadEnvironment if the program fails while turns and tokens are left (unless env.crash=scored), if
        reward.json is not JSON, and if the program ends by itself without a score that the episode must have.
        MissingColumn for a {column} of its arguments that the row lacks."""
        words = [FIELD.sub(lambda m: _field(m[1], task), word) for word in self._words]
        folder = Path(tempfile.mkdtemp(prefix="jaxrl_episode_"))
        try:
            with self._proxy.open() as (key, line):
                process = ProgramProcess(words, folder, task, self._memory, self._proxy.url(), key)
                try:
                    await process.start()
                    running.phase = "the program"
                    await self._serve(line, process, chat, running)
                finally:
                    await process.end()
            return await self._outcome(task, chat, running, process, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _serve(self, line: CallQueue, process: ProgramProcess, chat: ProgramChat, running) -> None:
        """Replies to calls until the program ends, or keeps calling although no turns or tokens are left."""
        pending, call, refused = None, None, 0
        try:
            while refused < PATIENCE:
                call = asyncio.ensure_future(line.calls.get())
                await asyncio.wait({call, process.ended}, return_when=asyncio.FIRST_COMPLETED)
                if process.ended.done():
                    return
                pending, call = call.result(), None
                try:
                    answer = await self._reply(pending, chat, running)
                    if not pending.answer.done():
                        pending.answer.set_result(answer)
                except RequestError as e:
                    pending.answer.set_exception(e)
                    refused += chat.over
        finally:
            if call is not None and not call.cancel():  # one came at the same moment
                pending = call.result()
            line.close(pending)

    async def _reply(self, pending: PendingCall, chat: ProgramChat, running) -> dict:
        if chat.over:
            raise RequestError("the turns or tokens of this episode are used up", kind="context_length_exceeded")
        train = pending.train
        if train and self._train is not None:
            train = bool(await running.call(self._train, "env.train_calls", pending.body))
        turn = await chat.ask(pending.asked, train)
        id = f"chatcmpl-{running.n}-{chat._turns}"
        return openai.completion_body(id, int(time.time()), pending.asked, turn)

    async def _outcome(self, task, chat, running, process: ProgramProcess, folder: Path):
        """Returns the episode's result."""
        out, err = map(_text, process.printed)
        ran = ProgramResult(process.status, out, err, chat.known, folder)
        if ran.exit and not chat.over and not self._scored:
            error = BadEnvironment(f"the program {self._how(ran.exit)}")
            error.add_note(f"End of standard error:\n{ran.stderr[-STDERR_CHARS:]}")
            raise error
        if self._score is not None:
            return await running.call(self._score, "env.score", task, ran)
        try:
            return json.loads((folder / REWARD).read_text("utf-8"))
        except (ValueError, RecursionError):
            raise BadEnvironment(f"{REWARD} is not JSON") from None
        except OSError:
            if ran.exit:
                return 0.0  # turns or tokens were used up, or env.crash=scored
            if self._must_score and not chat.over:
                raise BadEnvironment(f"the program ended without {REWARD}, there is no env.score, and no "
                                     "reward.functions") from None
            return 0.0 if self._must_score else None

    def _how(self, status: int) -> str:
        if status == supervisor.TOO_LARGE:
            return f"used more memory than env.memory_gb={self._memory_gb:g} allows"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


class ProgramProcess:
    """A program with its child processes. On Linux a supervisor process kills whatever is left.

    Args:
      words: the command. folder: where it runs. task: an api.Task. memory: its limit in bytes, 0 = none. url, key: of
        the proxy.

    Attributes:
      ended: future that is done once it has ended; from `start` on.
      status: its exit status, once `end` has returned. printed: (stdout, stderr), the last MiB of each."""

    ended: asyncio.Future  # once it was started

    def __init__(self, words: list[str], folder: Path, task, memory: int, url: str, key: str):
        self._words, self._folder, self._memory = words, folder, memory
        self._task = {"row": task.row, "prompt": task.prompt, "seed": task.seed, "user": task.user}
        self._env = os.environ | {
            "OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "OPENAI_API_KEY": key, "TMPDIR": str(folder),
            "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        self._process: asyncio.subprocess.Process | None = None
        self.status, self.printed = 0, (bytearray(), bytearray())
        self._readers: list[asyncio.Task] = []

    async def start(self) -> None:
        """Starts the program, with its task as JSON on standard input and in task.json."""
        task_file = self._folder / "task.json"
        task_file.write_text(json.dumps(self._task), "utf-8")
        with task_file.open("rb") as stdin:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", supervisor.__file__, str(self._memory), *self._words, stdin=stdin,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=self._folder, env=self._env,
                start_new_session=True)
        streams = (self._process.stdout, self._process.stderr)
        self._readers = [asyncio.ensure_future(_drain(s, buffer))
                         for s, buffer in zip(streams, self.printed, strict=True)]
        self.ended = asyncio.ensure_future(self._process.wait())

    async def end(self) -> None:
        """Ends the program with its child processes, killing them if necessary; sets `status`, its exit status."""
        if self._process is None:
            return
        if not self.ended.done():
            _signal(self._process)
            await asyncio.wait({self.ended}, timeout=2 * supervisor.END_SECONDS)
            if not self.ended.done():
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, signal.SIGKILL)
        self.status = await self.ended
        await asyncio.wait(self._readers, timeout=supervisor.END_SECONDS)
        for reader in self._readers:
            reader.cancel()


def _signal(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(OSError):
        if sys.platform == "linux":
            process.send_signal(supervisor.END)
        else:
            os.killpg(process.pid, signal.SIGKILL)


async def _drain(stream, buffer: bytearray) -> None:
    """Reads a stream to its end and keeps the last MAX_OUTPUT_BYTES."""
    while data := await stream.read(1 << 16):
        buffer += data
        del buffer[:-MAX_OUTPUT_BYTES]


def _text(data: bytearray) -> str:
    return data.decode("utf-8", "replace")


def _field(name: str, task) -> str:
    """Returns the value of `{name}` in an argument: the prompt, the seed or a column, as JSON if it is not text."""
    known = {"prompt": task.prompt, "seed": task.seed}
    value = known[name] if name in known else task.row[name]
    return value if isinstance(value, str) else json.dumps(value)


def _check_signature(fn, what: str, count: int) -> None:
    try:
        inspect.signature(fn).bind(*[None] * count)
    except TypeError as e:
        raise LoadError(f"{what}: {e}") from None
