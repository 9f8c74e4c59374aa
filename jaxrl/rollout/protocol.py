"""What every rollout engine promises, at the level of single requests.

An engine takes requests, works on them, and hands back each result once. Several samples of a prompt are several
requests of one group; a turn of a conversation is a request. `generate` is the batch call on top.

An engine of your own is made by a factory of an EngineContext (`engines`). `check_request` and `check_ids` refuse what
cannot be served, `stops.find_stop` looks for stop strings, `weights.chunks` has what `publish` brings as a Hugging Face
folder would; tests/helpers/numpy_engine.py is one that uses nothing else.

Only numpy here: a process without an accelerator can speak this protocol.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.errors import RunStopped

UNFINISHED = "unfinished"  # finish of what `Engine.under_way` gives


class EngineLost(RunStopped):
    """An engine that can answer no more. What was trained so far is intact."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one completion is sampled. Truncations act in the order min_p, top_k, top_p, after penalties and temperature.

    temperature: 0 = greedy (log-probs are then those of temperature 1).
    top_p: keep the smallest set of most likely tokens whose share of the mass left by min_p and top_k reaches this.
    top_k: keep the k most likely tokens; -1 = all. Tokens tied with the last one kept are kept.
    min_p: keep tokens with at least this share of the best token's probability.
    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the completion so
    far.
    frequency_penalty: subtracted from a token's logit once per earlier occurrence in the completion.
    min_new_tokens: end tokens cannot be drawn, and stop strings do not count, before this many tokens.
    stop: strings that end an answer at the token that completes one; `keep_stop` False removes every token that
      holds a character of the string.
    stop_token_ids: end tokens besides the engine's end-of-text tokens; end tokens stay in the completion.

    Raises ValueError naming the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    max_new_tokens: int = 1024
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    keep_stop: bool = True
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        for name, ok, need in (
            ("temperature", self.temperature >= 0, "at least 0 (0 = greedy)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (all) or at least 1"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", self.repetition_penalty > 0, "positive"),
            ("frequency_penalty", np.isfinite(self.frequency_penalty), "finite"),
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "between 0 and max_new_tokens"),
            ("stop", not isinstance(self.stop, str) and all(self.stop), "a tuple of non-empty strings"),
        ):
            if not ok:
                raise ValueError(f"SamplingParams.{name}={getattr(self, name)!r}: must be {need}")

    @property
    def truncated(self) -> bool:
        """Whether the support is cut, so that `Result.kept` can be below 0."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.min_new_tokens > 0)

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0


class Key(NamedTuple):
    """Whose completion a request asks for. Its text is the request's id, which engines, checkpoints and other processes
    carry."""

    stream: str  # train, greedy, eval/<set> ...
    step: int    # that it was meant for
    prompt: int  # position in the order of the data
    sample: int  # index within the group
    turn: int = 0

    def __str__(self) -> str:
        return "/".join(map(str, self[:4])) + (f".{self.turn}" if self.turn else "")

    def seed(self, root: int) -> int:
        """Seed (uint32) of the request: a hash of where it stands in the run, the same on every host and every
        retry."""
        parts = (int(root), self.stream, *map(int, self[1:] if self.turn else self[1:4]))
        return int.from_bytes(hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=4).digest(), "little")


@dataclasses.dataclass(frozen=True)
class Request:
    """One completion to be sampled. Requests with equal prompts share one prefill where they stand together."""

    id: str
    prompt: np.ndarray  # [P] int32
    sampling: SamplingParams = SamplingParams()
    seed: int = 0       # uint32; token i of the completion uses random bits of (seed, i) only
    group: int = 0      # for the caller's book-keeping, as are the key and the task
    key: Key | None = None
    task: Any = None    # the Example of the row: what an episode is about
    after: str = ""     # id of an earlier request: the prompt begins with its prompt and completion. An engine may go
                        # on from what it kept of it
    keep: bool = False  # another request may come after this one
    adapter: int = 0    # number of the adapter that answers, where the published weights hold several; 0 = they do not


def check_request(request: Request, longest: int, total: int, vocab: int, has_text: bool,
                  adapters: int = 0) -> np.ndarray:
    """The prompt as int32, or ValueError naming the request and the remedy.

    longest: prompt tokens; total: tokens of prompt and completion together; has_text: whether stop strings can be
    looked for; adapters: how many the engine serves side by side.
    """
    prompt = np.ascontiguousarray(request.prompt, np.int32)
    p, who = request.sampling, f"request {request.id!r}"
    if prompt.ndim != 1 or not len(prompt):
        raise ValueError(f"{who}: the prompt is empty; give at least one token")
    if len(prompt) > longest:
        raise ValueError(f"{who}: the prompt has {len(prompt)} tokens, the longest length served is {longest}; "
                         "raise data.max_prompt_tokens (and rollout.prompt_lengths), or shorten the prompt")
    if len(prompt) >= total:
        raise ValueError(f"{who}: a prompt of {len(prompt)} tokens leaves no room for an answer within {total} "
                         "tokens; raise train.max_sequence_tokens or rollout.max_new_tokens")
    for name, ids in (("prompt", prompt), ("stop_token_ids", np.asarray(p.stop_token_ids, np.int64))):
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab):
            raise ValueError(f"{who}: {name} holds token {ids[(ids < 0) | (ids >= vocab)][0]}, outside the "
                             f"vocabulary of {vocab}")
    if p.stop and not has_text:
        raise ValueError(f"{who}: stop strings need a tokenizer, and the engine was made without one")
    if not min(1, adapters) <= request.adapter <= adapters:
        raise ValueError(f"{who}: adapter {request.adapter}, of {adapters} that this engine serves side by side; "
                         "several adapters (lora.adapters) take rollout.engine=jax, and every row then names its own")
    if not 0 <= request.seed < 2**32:
        raise ValueError(f"{who}: seed {request.seed} is not a uint32")
    return prompt


def check_ids(requests: list[Request], unfinished) -> list[str]:
    """The ids of new requests; ValueError where one is used twice or is still unfinished."""
    ids = [r.id for r in requests]
    twice = [i for i, n in collections.Counter(ids).items() if n > 1 or i in unfinished]
    if twice:
        raise ValueError(f"request {twice[0]!r}: an unfinished request has the same id; ids are unique")
    return ids


class Turn(NamedTuple):
    """One turn of an episode: what was put behind the tokens before, and how many were sampled then."""

    added: np.ndarray   # [a] int32
    opens: bool         # whether a new sequence begins with `added`: the first turn, and where history was rewritten
    size: int           # sampled tokens
    finish: str = "stop"
    reward: float = 0.0
    anchor: int = 0     # names the state it was decided in; 0 = none
    seen: str = ""      # hash of the messages that `added` tells


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an episode came to. value: its score, turns' rewards included; None = absent. rewards: further ones, by
    name. notes: numbers that it noted. counts: what was counted and timed. cause, detail: why it failed by its
    environment's fault; "" = it did not."""

    value: float | None = None
    rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)
    notes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    cause: str = ""
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """One finished (or aborted) completion of n tokens, or an episode: the tokens of its `turns`, one behind the other.

    The distribution a token was drawn from is softmax(logits / temperature) cut to a support and renormalised; with
    penalties off its log-prob is `logprobs - kept`.
    """

    id: str
    tokens: np.ndarray    # [n] int32, the end token included
    logprobs: np.ndarray  # [n] float32: log softmax(logits / temperature) over the whole vocabulary, no penalties
    kept: np.ndarray      # [n] float32: log of the mass inside the support (top-p, top-k, min-p, forbidden end tokens)
                          # vLLM knows the difference only: there `logprobs` is that of the draw, and `kept` is 0
    versions: np.ndarray  # [n] int32: weight version each token was drawn from
    finish: str           # "stop" | "length" | "abort"
    seed: int
    support: np.ndarray | None = None  # [n, K] int32: ids of the support each token was drawn from, -1 = unused;
                          # K = 0 or None where the engine was not asked for it
    routes: np.ndarray | None = None  # [P + n, W] int16: experts of the prompt's (of an episode: what its turns added)
                          # and the completion's tokens, in their order, in all layers that have experts; -1 = not known
    turns: tuple[Turn, ...] = ()
    outcome: Outcome | None = None


@dataclasses.dataclass(frozen=True)
class EngineInfo:
    """What callers may count on. Nobody asks an engine for its class or its methods."""

    concurrent: bool = False  # it works while nobody polls it
    holds: bool = False       # `hold` keeps it from beginning
    sleeps: bool = False      # `rest` frees its devices until the next `publish`
    support: bool = False     # `Result.support` and `Result.kept` tell what each token was drawn from
    routes: bool = False      # `Result.routes` tells the experts of each token, where algorithm.routes=sampled
    exact: bool = False       # in fp32 its log-probs are the trainer's, but for rounding
    quantized: bool = False   # it samples from other numbers than the weights it was given; known after a publish


@dataclasses.dataclass(frozen=True)
class Health:
    """How an engine is."""

    ok: bool
    closed: bool = False
    version: int = -1  # of the published weights; -1 = none yet
    waiting: int = 0   # requests that are not begun
    running: int = 0   # requests that are
    compiled: int = 0  # programs of this process so far
    parked: int = 0    # conversations kept for requests that come after them
    servers: Mapping[str, str] = dataclasses.field(default_factory=dict)  # URL -> state, where it has some


class Engine(abc.ABC):
    """A rollout engine. One thread drives it. Six methods are its own to write; the others do nothing by default.

    Weights must have been published before the first `poll` that works.
    """

    @property
    def info(self) -> EngineInfo:
        return EngineInfo()

    @abc.abstractmethod
    def submit(self, requests: list[Request]) -> None:
        """Queues requests in order. Raises ValueError, queueing none, naming the request that cannot be served."""

    @abc.abstractmethod
    def poll(self, deadline_s: float) -> list[Result]:
        """Results finished since the last poll; waits until something has finished or the deadline has passed."""

    @abc.abstractmethod
    def abort(self, ids: list[str] | None = None) -> None:
        """Ends requests (None = all): the next poll returns each with what it has and finish "abort"."""

    @abc.abstractmethod
    def publish(self, params: Any, version: int) -> None:
        """Makes these weights (the model's parameter tree) the ones sampled from. Unfinished completions go on under
        the new version."""

    @abc.abstractmethod
    def health(self) -> Health:
        """At any time, closed too."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees everything; any later call but `health` raises RuntimeError."""

    def hold(self, on: bool) -> None:  # noqa: B027
        """While on, no completion is begun; those begun (health().running) are finished. If info says `holds`."""

    def forget(self, ids: list[str]) -> None:  # noqa: B027
        """No request will come after these any more."""

    def under_way(self) -> list[Result]:
        """Of unfinished requests what a checkpoint should keep, for `go_on`: whole turns, their finish UNFINISHED."""
        return []

    def go_on(self, results: list[Result]) -> None:  # noqa: B027
        """What `under_way` gave of requests that come again, with the same ids."""

    def rest(self) -> None:  # noqa: B027
        """Frees the devices until the next `publish`; nothing may be under way. If info says `sleeps`."""

    def moved(self, params: Any) -> None:  # noqa: B027
        """The published weights lie here from now on, in host memory perhaps."""

    def metrics(self) -> dict[str, float]:
        """For the line of a step."""
        return {}


def generate(engine: Engine, requests: Sequence[Request], timeout: float, stop: Callable[[], bool] = lambda: False,
             others: Callable[[list[Result]], None] | None = None) -> list[Result] | None:
    """Submits requests and waits for all of them; results in request order.

    `stop` is asked about once a second; when it turns true the rest is aborted and None is returned. `others` is handed
    the results of requests that were under way before; None = there are none.

    Raises TimeoutError (after aborting what is left) when the batch is not done `timeout` seconds from now, and
    RuntimeError when the engine returns a completion that nobody here asked for.
    """
    end = time.monotonic() + timeout
    engine.submit(list(requests))
    missing = {r.id for r in requests}
    done: dict[str, Result] = {}

    def poll(seconds):
        results = engine.poll(seconds)
        if strangers := [r for r in results if r.id not in missing]:
            if others is None:
                raise RuntimeError(f"rollout: the engine returned {strangers[0].id!r}, which is not part of this batch")
            others(strangers)
        done.update((r.id, r) for r in results if r.id in missing)
        missing.difference_update(done)

    while missing:
        left, stopped, late = end - time.monotonic(), stop(), len(missing)
        if stopped or left <= 0:
            engine.abort(sorted(missing))
            poll(0.0)
            if stopped:
                return None
            raise TimeoutError(
                f"rollout: {late} of {len(requests)} completions are missing after {timeout:g} s; raise "
                "rollout.timeout_seconds, or ask for fewer or shorter answers")
        poll(min(left, 1.0))
    return [done[r.id] for r in requests]
