"""The protocol of rollout engines, at the level of single requests.

An engine takes requests, works on them, and returns each result once. Several completions of a prompt are several
requests of one group; a turn of a conversation is a request. `generate` is the batch call on top.

A custom engine is built by a factory of an EngineContext (`engines`). `check_request` and `check_ids` reject what
cannot be served, `stops.find_stop` searches stop strings, `weights.chunks` turns what `publish` receives into Hugging
Face tensors; tests/helpers/numpy_engine.py is one that uses nothing else. Needs only numpy: a process without an
accelerator can use this protocol.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxrl.errors import RunStopped

if TYPE_CHECKING:  # it imports jax
    from jaxrl.types import Pictures

UNFINISHED = "unfinished"  # finish of the results of `Engine.unfinished_results`


class EngineLost(RunStopped):
    """The engine can no longer sample. The policy trained so far is intact."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one completion is sampled. Truncation follows penalties and temperature, in the order min_p, top_k, top_p.

    Attributes:
      temperature: 0 = greedy (log-probs are then those of temperature 1).
      top_p: after min_p and top_k, keep the most likely tokens until they hold this share of the remaining probability;
        in the embedded sampler tokens tied with the last of these stay, too.
      top_k: keep the k most likely tokens; -1 = all. Tokens tied with the last of these stay, too.
      min_p: keep tokens with at least this share of the most likely token's probability.
      repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or completion so far.
      frequency_penalty: subtracted from a token's logit once per earlier occurrence in the completion.
      max_new_tokens: most tokens of the completion, its end token included.
      min_new_tokens: before this many tokens, end tokens are not drawn and stop strings do not count.
      stop: strings that end a completion at the token that completes one; `keep_stop` False removes every token that
        holds a character of the string.
      stop_token_ids: end tokens besides the engine's end-of-text tokens; end tokens stay in the completion.

    Raises ValueError, naming the field, for a value out of range.
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
        """Whether the support is cut, so that `Result.log_kept_mass` can be below 0."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.min_new_tokens > 0)

    @property
    def penalised(self) -> bool:
        """Whether a penalty is set."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0


class Key(NamedTuple):
    """Identity of a completion within the run. Its text, stream/step/prompt/sample and from turn 1 on .turn, is the
    request's id, which engines, checkpoints and other processes use.

    turn: of an episode, from 0."""

    stream: str  # train, greedy, eval/<set> ...
    step: int    # the step it is planned for
    prompt: int  # position in the order of the data
    sample: int  # index within the group
    turn: int = 0

    def __str__(self) -> str:
        return "/".join(map(str, self[:4])) + (f".{self.turn}" if self.turn else "")

    def seed(self, root: int) -> int:
        """Returns the request's seed, an int in the range of uint32: a hash of `root` and all fields, the same on every
        host and every retry.

        Turn 0 is left out of the hash: the first turn of an episode has the seed of a request without turns.

        root: run.seed."""
        parts = (int(root), self.stream, *map(int, self[1:] if self.turn else self[1:4]))
        return int.from_bytes(hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=4).digest(), "little")


@dataclasses.dataclass(frozen=True)
class Request:
    """One completion to sample. Adjacent requests with equal prompts, pictures and adapters share one prefill."""

    id: str
    prompt: np.ndarray  # [P] int32
    sampling: SamplingParams = SamplingParams()
    seed: int = 0       # uint32; the embedded sampler draws token i of the completion by bits of (seed, i) alone
    group: int = 0      # for the caller's book-keeping, as are the key and the task
    key: Key = Key("", 0, 0, 0)
    task: Any = None    # the Example of the row: what an episode is about
    after: str = ""     # id of an earlier request: the prompt begins with its prompt and completion. An engine may go
                        # on from the conversation that it parked
    keep: bool = False  # another request may come after this one
    adapter: int = 0    # number of the adapter to sample from, if the published weights hold several; 0 = they do not
    pictures: Pictures | None = None  # the prompt's images, all of sequence 0


def check_request(request: Request, longest: int, total: int, vocab: int, has_text: bool,
                  adapters: int = 0, patches: int = 0) -> np.ndarray:
    """Returns the prompt [P] int32, contiguous, after checking that an engine can serve the request.

    Args:
      longest: most prompt tokens.
      total: most tokens of prompt and completion together; a prompt must leave room for one more.
      vocab: size of the vocabulary.
      has_text: whether stop strings can be searched.
      adapters: number of adapters the engine serves, numbered from 1; 0: only adapter 0.
      patches: most patches of a prompt's images; 0: the engine serves text only.

    Raises ValueError, naming the request and the remedy: the prompt is empty, not one-dimensional or too long, a prompt
    or stop token is outside the vocabulary, stop strings cannot be searched, the adapter or the seed is out of range,
    or the images are not served, too many, or at the end of the prompt."""
    prompt = np.ascontiguousarray(request.prompt, np.int32)
    p, who = request.sampling, f"request {request.id!r}"
    if prompt.ndim != 1 or not len(prompt):
        raise ValueError(f"{who}: the prompt is empty; give at least one token")
    if len(prompt) > longest:
        raise ValueError(f"{who}: the prompt has {len(prompt)} tokens, the longest length served is {longest}; "
                         "raise data.max_prompt_tokens (and rollout.prompt_lengths), or shorten the prompt")
    if len(prompt) >= total:
        raise ValueError(f"{who}: a prompt of {len(prompt)} tokens leaves no room for a completion within {total} "
                         "tokens; raise train.max_sequence_tokens or rollout.max_new_tokens")
    for name, ids in (("prompt", prompt), ("stop_token_ids", np.asarray(p.stop_token_ids, np.int64))):
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab):
            raise ValueError(f"{who}: {name} holds token {ids[(ids < 0) | (ids >= vocab)][0]}, outside the "
                             f"vocabulary of {vocab}")
    if p.stop and not has_text:
        raise ValueError(f"{who}: stop strings need a tokenizer, and the engine was made without one")
    if not min(1, adapters) <= request.adapter <= adapters:
        raise ValueError(f"{who}: adapter {request.adapter} of {adapters} that this engine serves; "
                         "several adapters (lora.adapters) take rollout.engine=jax, and every row then names its own")
    if not 0 <= request.seed < 2**32:
        raise ValueError(f"{who}: seed {request.seed} is not a uint32")
    if request.pictures is not None:
        _check_pictures(who, len(prompt), request.pictures, patches)
    return prompt


def _check_pictures(who: str, length: int, pictures: Pictures, patches: int) -> None:
    if not patches:
        raise ValueError(f"{who}: the prompt has images, and this engine serves text only; images take a model with a "
                         "tower and rollout.engine=jax, made with EngineContext.patches")
    counts = pictures.counts
    if counts.sum() > patches:
        raise ValueError(f"{who}: the prompt's images have {counts.sum()} patches, at most {patches} are served "
                         "(EngineContext.patches); give fewer or smaller images")
    ends = pictures.firsts + counts // pictures.merge**2
    if len(ends) and ends[-1] >= length:
        raise ValueError(f"{who}: the last image ends at token {ends[-1]} of {length}; a prompt ends with a token of "
                         "text, from which the completion goes on")


def check_ids(requests: list[Request], unfinished) -> list[str]:
    """Returns the ids of new requests. Raises ValueError if one is used twice or is in `unfinished`, a set of ids."""
    ids = [r.id for r in requests]
    twice = [i for i, n in collections.Counter(ids).items() if n > 1 or i in unfinished]
    if twice:
        raise ValueError(f"request {twice[0]!r}: an unfinished request has the same id; ids are unique")
    return ids


class TurnImage(NamedTuple):
    """An image among the tokens that a turn adds."""

    first: int             # index of its first token in `added`
    grid: tuple[int, int]  # rows and columns of patches
    number: int            # of the picture, see types.Places
    held: Any = None       # data.images.read.Image with the file that an environment made; None: the row's own image


class Turn(NamedTuple):
    """One turn of an episode: the tokens added to the context before it, and the number of sampled tokens.

    finish: why sampling ended, as in Result. reward: of the turn."""

    added: np.ndarray   # [a] int32
    opens: bool         # whether a new sequence begins with `added`: the first turn, and where history was rewritten
    size: int           # sampled tokens
    finish: str = "stop"
    reward: float = 0.0
    anchor: int = 0     # names the state it was decided in; 0 = none
    seen: str = ""      # hash of what the episode sent for it: messages, rewrite, tools, stop, max_tokens
    images: tuple[TurnImage, ...] = ()  # in `added`, in their order


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of an episode.

    Attributes:
      value: its score, including the turns' rewards, less env.malformed_penalty for each malformed call; None = absent.
      rewards: further rewards by name.
      notes: numbers it recorded.
      counts: counters, and times in seconds (engine_seconds, environment_seconds).
      cause, detail: why it failed through its environment's fault; "" if it did not.
    """

    value: float | None = None
    rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)
    notes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    cause: str = ""
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """One finished (or aborted) completion of n tokens, or an episode: the tokens of its `turns` in order, with its
    `outcome`.

    The distribution a token was drawn from is softmax(logits / temperature) cut to a support and renormalised; without
    penalties its log-prob is `logprobs - log_kept_mass`.

    Where a stop string ends a completion of vLLM, a token has the version that its server had when the token came."""

    id: str
    tokens: np.ndarray    # [n] int32, the end token included
    logprobs: np.ndarray  # [n] float32: log softmax(logits / temperature) over the whole vocabulary, no penalties
    log_kept_mass: np.ndarray  # [n] float32: log of the mass in the support (top-p, top-k, min-p, barred end tokens).
                          # vLLM reports the difference only: its `logprobs` are those of the draw, `log_kept_mass` is 0
    versions: np.ndarray  # [n] int32: weight version each token was drawn from
    finish: str           # "stop" | "length" | "abort"; UNFINISHED in `Engine.unfinished_results`
    seed: int
    support: np.ndarray | None = None  # [n, K] int32: ids of the support each token was drawn from, -1 = unused;
                          # K = 0 or None if it was not requested
    routes: np.ndarray | None = None  # [P + n, W] int16: experts of the prompt's (of an episode: what its turns added)
                          # and the completion's tokens, in their order, in all layers that have experts; -1 = not known
    turns: tuple[Turn, ...] = ()
    outcome: Outcome | None = None


@dataclasses.dataclass(frozen=True)
class EngineInfo:
    """The abilities of an engine. Callers read these, never its class or methods."""

    concurrent: bool = False  # works without being polled
    holds: bool = False       # `hold` prevents new completions from starting
    sleeps: bool = False      # `sleep` frees its devices until the next `publish`
    support: bool = False     # reports `Result.support` and `Result.log_kept_mass`
    routes: bool = False      # reports `Result.routes` if algorithm.routes=sampled
    exact: bool = False       # in fp32 its log-probs are the trainer's, but for rounding
    images: bool = False      # serves Request.pictures, of a model with a tower
    quantized: bool = False   # samples from quantized weights or cache; known after a publish


@dataclasses.dataclass(frozen=True)
class Health:
    """The state of an engine. ok: whether it can sample now."""

    ok: bool
    closed: bool = False
    version: int = -1  # of the published weights; -1 = none yet
    waiting: int = 0   # requests not started
    running: int = 0   # requests started
    compiled: int = 0  # programs of the embedded sampler's shapes that this process has compiled so far
    parked: int = 0    # conversations whose keys and values stay for a next request
    servers: Mapping[str, str] = dataclasses.field(default_factory=dict)  # URL -> state, where it has some


class Engine(abc.ABC):
    """A rollout engine, driven by one thread. Six methods are abstract; the others do nothing by default. Weights
    must be published before the first `poll` that works.
    """

    @property
    def info(self) -> EngineInfo:
        """The engine's abilities, on which callers may rely."""
        return EngineInfo()

    @abc.abstractmethod
    def submit(self, requests: list[Request]) -> None:
        """Queues requests in order. Raises ValueError, queueing none, naming a request that cannot be served."""

    @abc.abstractmethod
    def poll(self, deadline_s: float) -> list[Result]:
        """Returns results finished since the last poll; waits until one has finished or `deadline_s` seconds have
        passed. Returns at once if there is nothing to work on: no request, or none started while on hold.

        Raises RuntimeError if there are requests and no weights, RunStopped for what ends the run: EngineLost if the
        engine can no longer sample."""

    @abc.abstractmethod
    def abort(self, ids: list[str] | None = None) -> None:
        """Ends requests (None = all): the next poll returns each that had not finished with finish "abort", with its
        tokens so far or, as from vLLM and of episodes, with none. Other ids are ignored."""

    @abc.abstractmethod
    def publish(self, params: Any, version: int) -> None:
        """Makes these weights (the model's parameter tree) the ones sampled from. Unfinished completions continue
        under the new version.
        """

    @abc.abstractmethod
    def health(self) -> Health:
        """Returns the engine's state; may be called at any time, also when closed."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees everything. A second call does nothing. Any other later call, except of `health` and of methods that do
        nothing, raises RuntimeError."""

    def hold(self, on: bool) -> None:  # noqa: B027
        """Prevents new completions from starting while on; started ones (health().running) are finished. Called only if
        info has `holds`.
        """

    def forget(self, ids: list[str]) -> None:  # noqa: B027
        """Declares that no request will continue the requests with these ids."""

    def unfinished_results(self) -> list[Result]:
        """Returns the finished turns of unfinished requests for a checkpoint (see
        `restore_unfinished`), with finish UNFINISHED.
        """
        return []

    def restore_unfinished(self, results: list[Result]) -> None:  # noqa: B027
        """Restores `unfinished_results` of an earlier run, for requests that will be submitted again with the same ids.
        """

    def sleep(self) -> None:  # noqa: B027
        """Frees the devices until the next `publish`; no request may be unfinished. Called only if info has `sleeps`.
        """

    def weights_moved(self, params: Any) -> None:  # noqa: B027
        """Receives the parameter tree published last at its present place, possibly host memory; the caller has
        moved or copied it. The version stays.
        """

    def metrics(self) -> dict[str, float]:
        """Returns the engine's own metrics, name -> value, which are logged with a step's."""
        return {}


def generate(engine: Engine, requests: Sequence[Request], timeout: float, stop: Callable[[], bool] = lambda: False,
             others: Callable[[list[Result]], None] | None = None) -> list[Result] | None:
    """Submits requests and waits for all of them; returns results in request order, also those that the engine gave up
    (finish "abort"), or None if stopped.

    Args:
      timeout: seconds.
      stop: checked before every poll, of at most a second each; when true, the unfinished requests are aborted and None
        is returned.
      others: receives the results of requests that were unfinished before; None = there are none.

    Raises:
      TimeoutError: the batch is not done in time; the unfinished requests are aborted.
      RuntimeError: the engine returned a completion that was not requested here, and `others` is None.

    Also raises what the engine's submit and poll raise; unfinished requests then stay with the engine."""
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
        left, stopped, count = end - time.monotonic(), stop(), len(missing)
        if stopped or left <= 0:
            engine.abort(sorted(missing))
            poll(0.0)
            if stopped:
                return None
            raise TimeoutError(
                f"rollout: {count} of {len(requests)} completions are missing after {timeout:g} s; raise "
                "rollout.timeout_seconds, or sample fewer or shorter completions")
        poll(min(left, 1.0))
    return [done[r.id] for r in requests]
