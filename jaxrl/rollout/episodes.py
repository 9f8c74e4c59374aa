"""Episodes as requests: an engine whose completions take several turns, around one that samples a turn.

    episode (a worker's process) --messages--> prompt: the tokens so far and the new messages
    a request to the inner engine --result--> the model's message --> the episode, until it ends
    one Result: the tokens of all turns, the tokens between them, the episode's outcome

Everything that drives an engine drives episodes: admission, staleness, weight syncs, evaluation, checkpoints. Sampled
tokens are never tokenised again, and each is in exactly one turn of one result.

A failure of the environment (an exception, a lost worker, a timeout) is not the policy's: the episode is tried again
with the same seeds, its recorded turns replayed while it sends the same messages. After `env.retries` it is absent:
finish "abort", with the reason in `Outcome.cause`. What the policy does is never a failure: bad calls get a reply, and
an episode that runs out of turns or tokens ends as "length" and is scored.

Messages may hold images beside text. They become image tokens of the prompt and entries of `Turn.images`, as those of a
row's prompt; a request holds all that stand in its prompt.

No jax here. One thread drives it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import random
import time
from collections import deque
from typing import Any

import numpy as np

from jaxrl.rollout.episode_results import join_results, recorded_turns
from jaxrl.rollout.protocol import (
    UNFINISHED,
    Engine,
    Health,
    Key,
    Outcome,
    Request,
    Result,
    Turn,
    TurnImage,
    check_ids,
)
from jaxrl.rollout.turn_images import TurnImages, images_of_row, sequence_images

log = logging.getLogger("jaxrl")
PROBE = "probe"            # id of the replay of the first episode
LINGER_SECONDS = 0.002             # seconds to wait for further messages before a turn is sampled
BACKOFF_SECONDS = 0.5              # seconds before the first retry, about
SIDE_CALL = 1 << 20            # number of an episode's first untrained turn, for its key


@dataclasses.dataclass(eq=False)
class Episode:
    """An unfinished episode: its request, its turns so far, and the sequence that it stands at."""

    request: Request
    record: deque = dataclasses.field(default_factory=deque)  # (Turn, its part of a Result) to replay
    turns: list[Turn] = dataclasses.field(default_factory=list)
    parts: list[Result] = dataclasses.field(default_factory=list)  # what each turn sampled
    ids: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))  # of the current sequence
    images: list[TurnImage] = dataclasses.field(default_factory=list)  # in `ids`: `first` counts from their begin
    messages: list[dict] = dataclasses.field(default_factory=list)  # of env.history=template
    tools: list[dict] | None = None  # of the current sequence
    pending: tuple = ()  # (Turn without its size, request, tools) of the turn that is being sampled
    noted: dict = dataclasses.field(default_factory=dict)  # notes and counts when it last sent messages
    side_calls: int = 0         # completions outside the episode
    over: bool = False          # turns or tokens are used up: nothing more is sampled
    tries: int = 0
    not_before: float = 0.0     # time of the next try
    began: float = 0.0          # time of the first start; 0 = not yet
    since: float = 0.0          # time from which it waits for the engine
    waited: float = 0.0         # seconds that it waited for the engine
    first: Result | None = None  # of a replay: the result of the first run

    @property
    def sampled(self) -> int:
        """Number of tokens sampled in all turns."""
        return sum(turn.size for turn in self.turns)


class EpisodeEngine(Engine):
    """Runs episodes as requests; see protocol.Engine. A request is an episode about `request.task`, an Example. Its key
    must differ from those of all other unfinished requests: the ids and seeds of its turns are made of it.

    Args:
      engine: samples the turns; this engine owns it.
      pool: envs.pool.EpisodePool, ready.
      renderer: data.turns.TurnRenderer.
      env: the options below `env`.
      longest: most tokens of a sequence.
      images: the job's ImageSource; None: messages are text.
      seed: root of the turns' and environments' seeds.
      keep: whether the engine may continue parked conversations. Which turns are still parked depends on its other
        requests, and so do the last bits of the results.
      clock: returns seconds.
    """

    def __init__(self, engine: Engine, pool, renderer, env, *, longest: int, seed: int, keep: bool = True,
                 clock=time.monotonic, images=None):
        self.engine, self.pool, self.renderer, self.env = engine, pool, renderer, env
        self.images = TurnImages(images, env)
        self.longest, self.seed, self.keep, self.clock = longest, int(seed), keep, clock
        self._waiting: deque[Episode] = deque()
        self._begun: dict[str, Episode] = {}  # episodes that a worker runs, by request id
        self._turns: dict[str, Episode] = {}  # id of a request to the inner engine -> its episode
        self._recorded: dict[str, Result] = {}  # of `restore_unfinished`, by request id
        self._done: list[Result] = []
        self._ids: set[str] = set()
        self._held = False
        self._probed = env.resume == "restart"  # such an environment is not replayed
        self._logged_causes: set[str] = set()  # causes already logged
        self._version = -1
        self._closed = False

    # ---- the protocol -------------------------------------------------------------------------------------------

    @property
    def info(self):
        """The engine's EngineInfo, with `holds`."""
        return dataclasses.replace(self.engine.info, holds=True)

    def submit(self, requests: list[Request]) -> None:
        """Queues episodes. Raises ValueError, queueing none, for a prompt that leaves no room for a completion or an id
        in use, RuntimeError if the engine is closed."""
        self._check_open()
        ids = check_ids(requests, self._ids)
        for request in requests:
            if len(request.prompt) >= self.longest:
                raise ValueError(f"request {request.id!r}: a prompt of {len(request.prompt)} tokens leaves no room for "
                                 f"a completion within {self.longest}; raise train.max_sequence_tokens")
        self._ids.update(ids)
        self._waiting.extend(Episode(r, recorded_turns(self._recorded.pop(r.id, None))) for r in requests)

    def poll(self, deadline_s: float) -> list[Result]:
        """Runs episodes until one has finished or `deadline_s` seconds have passed; returns results since the last
        poll. Raises RuntimeError if the engine is closed or has episodes and no weights, RunStopped if one shows images
        that the model or env.image_tokens does not allow, and what the engine of turns raises."""
        self._check_open()
        end = self.clock() + deadline_s
        if self._ids and self._version < 0:
            raise RuntimeError("rollout: no weights yet; call publish(params, version) before polling")
        while True:
            self._begin()
            self._take_events(0.0)
            left = end - self.clock()
            if self._turns:
                others = len(self._begun) > len(self._turns)
                patience = 0.0 if not self.engine.info.concurrent else 0.01 if others else min(1.0, max(0.0, left))
                self._take(self.engine.poll(patience))
            elif self._begun:
                self._take_events(max(LINGER_SECONDS, min(left, 0.25)))
            elif self._waiting:  # until the next try
                time.sleep(max(0.0, min(left, 0.01)))
            if self._done or left <= 0 or not (self._begun or any(map(self._may_begin, self._waiting))):
                break
        done, self._done = self._done, []
        return done

    def abort(self, ids: list[str] | None = None) -> None:
        """Ends episodes (None = all); the next poll returns each as "abort", without tokens. Raises RuntimeError if the
        engine is closed."""
        self._check_open()
        gone = self._ids if ids is None else self._ids.intersection(ids)
        begun = [e for e in self._begun.values() if e.request.id in gone]
        self.pool.cancel([e.request.id for e in begun])
        self._take_back(begun)
        for episode in [*begun, *(e for e in self._waiting if e.request.id in gone)]:
            self._finish(episode, "abort")
        self._waiting = deque(e for e in self._waiting if e.request.id in self._ids)

    def _take_back(self, episodes: list[Episode]) -> None:
        """Aborts the turns of these episodes that are being sampled."""
        pending = [e.pending[1].id for e in episodes if e.pending]
        for episode in episodes:
            if episode.pending:
                del self._turns[episode.pending[1].id]
                episode.pending = ()
        if pending:
            self.engine.abort(pending)
            self._take(self.engine.poll(0.0))  # so that their ids are free

    def hold(self, on: bool) -> None:
        """Prevents new episodes from starting while on; with env.publish=turn also new turns. Raises RuntimeError if
        the engine is closed."""
        self._check_open()
        self._held = on
        if self.env.publish == "turn":
            self.engine.hold(on)

    def publish(self, params: Any, version: int) -> None:
        """Gives the engine of turns new weights; running episodes go on under them. Raises RuntimeError if the engine
        is closed."""
        self._check_open()
        self.engine.publish(params, version)
        self._version = int(version)

    def health(self) -> Health:
        """Returns the engine's health. `running`: what a weight sync has to wait for while this
        engine is held (env.publish).
        """
        inner = self.engine.health()
        again = sum(e.began > 0 for e in self._waiting)
        running = again + sum(e.first is None for e in self._begun.values())
        if self.env.publish == "turn" and self._held:
            running = inner.running
        return dataclasses.replace(inner, ok=inner.ok and not self._closed, closed=inner.closed or self._closed,
                                   waiting=len(self._waiting) - again, running=running)

    def close(self) -> None:
        """Closes the pool of environments and the engine of turns."""
        self._closed = True
        self.pool.close()
        self.engine.close()

    def sleep(self) -> None:
        """Frees the devices of the engine of turns until the next publish. Raises RuntimeError if the engine is
        closed."""
        self._check_open()
        self.engine.sleep()

    def weights_moved(self, params: Any) -> None:
        """Passes the new place of the weights to the engine of turns. Raises RuntimeError if the engine is closed."""
        self._check_open()
        self.engine.weights_moved(params)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the engine of turns. Raises RuntimeError if the engine is closed."""
        self._check_open()
        return self.engine.metrics()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("rollout: the engine is closed")

    # ---- a checkpoint -------------------------------------------------------------------------------------------

    def unfinished_results(self) -> list[Result]:
        """Returns the finished turns of unfinished episodes; none with env.resume=restart. Raises RuntimeError if the
        engine is closed."""
        self._check_open()
        if self.env.resume == "restart":
            return []
        out = []
        for episode in (*self._begun.values(), *self._waiting):
            recorded = [*zip(episode.turns, episode.parts, strict=True), *episode.record]
            if recorded and episode.first is None:
                turns, parts = zip(*recorded, strict=True)
                out.append(join_results(episode.request, list(parts), turns, UNFINISHED))
        return out

    def restore_unfinished(self, results: list[Result]) -> None:
        """Keeps recorded turns, which are replayed when requests with their ids are submitted. Raises RuntimeError if
        the engine is closed."""
        self._check_open()
        self._recorded |= {r.id: r for r in results}

    # ---- an episode begins --------------------------------------------------------------------------------------

    def _may_begin(self, episode: Episode) -> bool:
        """Returns whether an episode may start; while held, only one that started before."""
        room = not self.env.in_flight or len(self._begun) < self.env.in_flight
        return room and (not self._held or episode.began > 0)

    def _begin(self) -> None:
        now, left = self.clock(), deque()
        while self._waiting:
            episode = self._waiting.popleft()
            if episode.not_before > now or not self._may_begin(episode):
                left.append(episode)
                if self.env.in_flight and len(self._begun) >= self.env.in_flight:
                    break
                continue
            episode.began = episode.began or now
            self._start(episode)
        self._waiting = left + self._waiting

    def _start(self, episode: Episode) -> None:
        self._begun[episode.request.id] = episode
        self.pool.start(episode.request.id, self._task(episode.request))

    def _task(self, request: Request) -> dict:
        """Returns the worker's task. Members of a group, and later tries, have one seed."""
        key, example = request.key, request.task
        columns = {"answer": example.answer, **example.columns}
        stream = key.stream if key.stream.startswith("eval") else "env"
        seed = Key(stream, 0, key.prompt, 0).seed(self.seed)
        return {"row": columns, "prompt": example.prompt, "seed": seed}

    # ---- events of the workers -----------------------------------------------------------------------------------

    def _take_events(self, seconds: float) -> None:
        """Handles events of workers, waiting shortly for more: turns that are sampled together cost less."""
        events = self.pool.events(seconds)
        while events:
            sent = []
            for event in events:
                episode = self._begun.get(event.id)
                if episode is not None:
                    sent += {"send": self._send, "done": self._over, "failed": self._failed}[event.kind](
                        episode, event.data) or []
            if sent:
                self.engine.submit(sent)
            events = self.pool.events(LINGER_SECONDS) if len(self._begun) > len(self._turns) else []

    def _send(self, episode: Episode, data: dict) -> list[Request]:
        """Replies from the record, or returns the request for the next turn; [] if none may be sampled."""
        self._reward(episode, data["reward"])
        episode.noted = {"notes": data["notes"], "counts": data["counts"]}
        if not data["train"]:
            return self._side_call(episode, data)
        episode.tools = data["tools"]
        seen = _digest([data["messages"], data["rewrite"], data["tools"], data["stop"], data["max_tokens"]])
        if episode.record:
            turn, part = episode.record[0]
            if turn.seen == seen:
                episode.record.popleft()
                self._remember(episode, turn._replace(reward=0.0), part, data)
                self._reply(episode, part, turn.finish, len(episode.ids) - len(part.tokens), episode.tools)
                return []
            episode.record.clear()
        if episode.first is not None:
            if len(episode.turns) == len(episode.first.turns) and episode.first.finish == "length":
                self._end(episode)
            else:
                self._warn_differs(episode, f"what it shows before turn {len(episode.turns) + 1}")
            return []
        try:
            added, opens, images = self._render(episode, data)
        except ValueError as e:
            return self._fail(episode, f"turn {len(episode.turns) + 1}: its messages cannot be rendered: {e}")
        whole = (0 if opens else len(episode.ids)) + len(added)
        room = min(self.longest, (self.env.max_input_tokens or self.longest) + 1) - whole
        sequence = sequence_images(episode.images, len(episode.ids), opens, images)
        if images and not self.images.have_room(sequence, first=not episode.turns):
            room = 0
        left = (self.env.max_sampled_tokens or self.longest * self.env.max_turns) - episode.sampled
        sampling = episode.request.sampling
        most = min(sampling.max_new_tokens, self.longest - whole, left, data["max_tokens"] or sampling.max_new_tokens)
        if len(episode.turns) >= self.env.max_turns or room < 1 or most < 1:
            if not episode.turns:
                return self._fail(episode, f"its first prompt has {whole} tokens, which leaves no room for a "
                                           "completion")
            self._end(episode)
            return []
        turn = Turn(np.asarray(added, np.int32), opens, 0, seen=seen, images=images)
        return [self._ask(episode, turn, self.images.pictures(sequence), most, data)]

    def _fail(self, episode: Episode, cause: str) -> list[Request]:
        """Ends an episode whose messages cannot be taken, as its environment's failure. Returns no request."""
        self.pool.cancel([episode.request.id])
        self._failed(episode, {"fault": "env", "cause": cause, "detail": ""})
        return []

    def _end(self, episode: Episode) -> None:
        """Ends an episode whose turns or tokens are used up. The worker is informed once, so that it
        can report an outcome.
        """
        if episode.over:
            self.pool.cancel([episode.request.id])
            self._finish(episode, "length", self._cut_outcome(episode, {}))
        else:
            episode.over = True
            self.pool.reply(episode.request.id, {"text": "", "thinking": "", "calls": [], "finish": "length",
                                                 "over": True, "tokens": [len(episode.ids), 0]})

    def _ask(self, episode: Episode, turn: Turn, pictures, most: int, data: dict) -> Request:
        first, added = episode.request, turn.added
        before = None if turn.opens else episode.request.key._replace(turn=len(episode.turns) - 1)
        key = first.key._replace(turn=len(episode.turns))
        prompt = added if turn.opens else np.concatenate([episode.ids, added]).astype(np.int32)
        request = Request(str(key), prompt, self._sampling(first, most, data),
                          key.seed(self.seed) if key.turn else first.seed, first.group, key,
                          after="" if before is None else str(before), keep=self.keep and self.env.max_turns > 1,
                          adapter=first.adapter, pictures=pictures)
        anchor = int.from_bytes(bytes.fromhex(_digest(data["anchor"]))[:7], "big") + 1 if data["anchor"] else 0
        episode.pending = turn._replace(anchor=anchor), request, data["tools"]
        self._turns[request.id] = episode
        episode.since = self.clock()
        if self.env.history == "template":
            self._say(episode, data)
        return request

    def _sampling(self, first: Request, most: int, data: dict):
        ends = tuple(dict.fromkeys((*first.sampling.stop_token_ids, *self.renderer.stop_ids_with(bool(data["tools"])))))
        return dataclasses.replace(
            first.sampling, max_new_tokens=most, min_new_tokens=min(first.sampling.min_new_tokens, most),
            stop=tuple(dict.fromkeys((*first.sampling.stop, *data["stop"]))), stop_token_ids=ends)

    def _side_call(self, episode: Episode, data: dict) -> list[Request]:
        """Returns the request for a completion outside the episode: neither recorded nor trained on, at most
        env.max_turns of them.
        """
        if episode.first is not None:  # its next messages may depend on this completion, which is not recorded
            self.pool.cancel([episode.request.id])
            self._finish(episode, "abort")
            return []
        try:
            messages, found = self.images.found(data["messages"])
            ids, at = self.renderer.first_with_images(messages, data["tools"] or [])
            ids, images = self.images.expanded(ids, at, found, episode.request, 0)
        except ValueError as e:
            return self._fail(episode, f"an untrained call: its messages cannot be rendered: {e}")
        first, most = episode.request, self.longest - len(ids)
        most = min(first.sampling.max_new_tokens, most, data["max_tokens"] or most)
        if episode.side_calls >= self.env.max_turns or most < 1:
            self.pool.reply(first.id, {"text": "", "thinking": "", "calls": [], "finish": "length", "tokens": [0, 0]})
            return []
        key = first.key._replace(turn=SIDE_CALL + episode.side_calls)
        episode.side_calls += 1
        request = Request(str(key), ids, self._sampling(first, most, data), key.seed(self.seed), first.group, key,
                          adapter=first.adapter, pictures=self.images.pictures(images))
        episode.pending, self._turns[request.id] = (None, request, data["tools"]), episode
        episode.since = self.clock()
        return [request]

    def _render(self, episode: Episode, data: dict) -> tuple[np.ndarray, bool, tuple[TurnImage, ...]]:
        """Returns (token ids to append to the context, whether they open a new sequence instead, images in them)."""
        messages, task = data["messages"], episode.request.task
        if not episode.turns and messages == as_messages(task.prompt) and (data["tools"] or []) == self.pool.tools:
            return episode.request.prompt, True, images_of_row(episode.request.pictures)
        whole = data["rewrite"] or not episode.turns
        if not whole and self.env.history == "append":
            messages, found = self.images.found(messages)
            ids, at = self.renderer.extend_with_images(episode.ids, messages, self.env.max_observation_tokens)
            shown = sum(image.held is None for image in episode.images)
            ids, images = self.images.expanded(ids, at, found, episode.request, shown)
            return ids, False, images
        messages, found = self.images.found(messages if whole else [*episode.messages, *messages])
        ids, at = self.renderer.first_with_images(messages, data["tools"] or [])
        ids, images = self.images.expanded(ids, at, found, episode.request, 0)
        known, same = len(episode.ids), len(episode.images)
        before = [(image.first, image.number) for image in images[:same]]
        if known and len(ids) > known and np.array_equal(ids[:known], episode.ids) and before == [
                (image.first, image.number) for image in episode.images]:
            return ids[known:], False, tuple(i._replace(first=i.first - known) for i in images[same:])
        return ids, True, images

    def _say(self, episode: Episode, data: dict) -> None:
        episode.messages = list(data["messages"]) if data["rewrite"] else episode.messages + list(data["messages"])

    def _remember(self, episode: Episode, turn: Turn, part: Result, data: dict | None) -> None:
        episode.turns.append(turn)
        episode.parts.append(part)
        episode.images = sequence_images(episode.images, len(episode.ids), turn.opens, turn.images)
        episode.ids = np.concatenate([*([] if turn.opens else [episode.ids]), turn.added, part.tokens]).astype(np.int32)
        if self.env.history == "template":
            if data is not None:
                self._say(episode, data)
            episode.messages.append(self.renderer.message(part.tokens, episode.tools))

    def _reply(self, episode: Episode, part: Result, finish: str, before: int, tools) -> None:
        """Sends a sampled turn to the worker. before: number of tokens of the turn's prompt."""
        message = self.renderer.read(part.tokens, tools)
        self.pool.reply(episode.request.id, {**message, "finish": finish, "tokens": [before, len(part.tokens)]})

    def _reward(self, episode: Episode, reward: float) -> None:
        if episode.turns and reward:
            last = episode.turns[-1]
            episode.turns[-1] = last._replace(reward=last.reward + float(reward))

    # ---- results of the engine -----------------------------------------------------------------------------------

    def _take(self, results: list[Result]) -> None:
        for result in results:
            episode = self._turns.pop(result.id, None)
            if episode is None:  # of an episode that was aborted
                continue
            turn, request, tools = episode.pending
            episode.pending = ()
            episode.waited += self.clock() - episode.since
            if result.finish == "abort":
                self.pool.cancel([episode.request.id])
                self._finish(episode, "abort")
                continue
            if turn is not None:
                self._remember(episode, turn._replace(size=len(result.tokens), finish=result.finish), result, None)
            self._reply(episode, result, result.finish, len(request.prompt), tools)

    # ---- the end ------------------------------------------------------------------------------------------------

    def _over(self, episode: Episode, data: dict) -> None:
        self._reward(episode, data["reward"])
        if episode.first is not None:
            self._compare(episode, episode.first, data)
            return
        if not episode.turns:
            self._failed(episode, {"fault": "env", "cause": "it ended without a turn of the model", "detail": ""})
            return
        outcome = self._outcome(episode, data["value"], data)
        cut = episode.over or episode.turns[-1].finish == "length"
        self._finish(episode, "length" if cut else "stop", outcome)

    def _outcome(self, episode: Episode, value: float | None, data: dict) -> Outcome:
        rewards = [turn.reward for turn in episode.turns]
        if any(rewards) or data.get("rewarded") or data.get("counts", {}).get("cut_off"):
            value = math.fsum([value or 0.0, *rewards])
        counts = {"calls": 0, "malformed": 0} | dict(data.get("counts", {}))
        if value is None and not (self.env.function or self.env.program) and self.env.malformed_penalty:
            value = 0.0  # beside what reward functions say
        if value is not None:
            value -= self.env.malformed_penalty * counts["malformed"]
        took = self.clock() - episode.began
        counts |= {"engine_seconds": episode.waited, "environment_seconds": max(0.0, took - episode.waited)}
        return Outcome(value, dict(data.get("rewards", {})), dict(data.get("notes", {})), counts)

    def _cut_outcome(self, episode: Episode, counts: dict) -> Outcome:
        """Returns the outcome of an episode that reported none: its turns' rewards, notes and counts so far."""
        known = episode.noted
        return self._outcome(episode, None, known | {"counts": {**known.get("counts", {}), "cut_off": 1, **counts}})

    def _failed(self, episode: Episode, data: dict) -> None:
        """Retries an episode that its environment failed; after env.retries it is absent."""
        if episode.first is not None:
            self._finish(episode, "abort")
            return
        fault, cause = data["fault"], data["cause"]
        self._take_back([episode])
        if fault != "neighbour":
            self._log(cause, data["detail"])
            if fault == "late" and self.env.late == "truncated" and episode.turns:
                self._reward(episode, data["reward"])
                if data.get("counts"):
                    episode.noted = {"notes": data["notes"], "counts": data["counts"]}
                self._finish(episode, "length", self._cut_outcome(episode, {"late": 1}))
                return
            episode.tries += 1
            if episode.tries > self.env.retries:
                late = {"late": 1.0} if fault == "late" else {}
                self._finish(episode, "abort", Outcome(counts=late, cause=cause, detail=data["detail"][-2000:]))
                return
            wait = BACKOFF_SECONDS * 2 ** (episode.tries - 1) * random.uniform(0.5, 1.5)
            episode.not_before = self.clock() + wait
        again = zip(episode.turns, episode.parts, strict=True)
        record = deque([*again, *episode.record])
        del self._begun[episode.request.id]
        self._waiting.append(Episode(episode.request, record, tries=episode.tries, not_before=episode.not_before,
                                     began=episode.began))

    def _log(self, cause: str, detail: str) -> None:
        if cause not in self._logged_causes:
            self._logged_causes.add(cause)
            log.warning("an environment failed: %s%s", cause, f"\n{detail}" if detail else "")

    def _finish(self, episode: Episode, finish: str, outcome: Outcome | None = None) -> None:
        request = episode.request
        self._begun.pop(request.id, None)
        if episode.first is not None:
            return
        self._ids.discard(request.id)
        self.engine.forget([str(request.key._replace(turn=k)) for k in range(len(episode.turns))])
        if finish == "abort":
            self._done.append(join_results(request, [], [], finish, outcome))
            return
        self._done.append(join_results(request, episode.parts, episode.turns, finish, outcome))
        if not self._probed:
            self._probed = True
            self._start(Episode(dataclasses.replace(request, id=PROBE), recorded_turns(self._done[-1]),
                                first=self._done[-1]))

    # ---- the same actions, the same observations? ------------------------------------------------------------------

    def _compare(self, episode: Episode, before: Result, data: dict) -> None:
        """Compares the first finished episode with its replay; warns if they differ."""
        now, then = self._outcome(episode, data["value"], data), before.outcome and before.outcome.value
        if len(episode.turns) != len(before.turns):
            self._warn_differs(episode, f"its number of turns ({len(before.turns)}, then {len(episode.turns)})")
        elif [t.reward for t in episode.turns] != [t.reward for t in before.turns] or now.value != then:
            self._warn_differs(episode, f"its score ({then}, then {now.value})")
        else:
            self._finish(episode, "abort")

    def _warn_differs(self, episode: Episode, what: str) -> None:
        log.warning("the environment is not deterministic: the same episode with the same seed and the same turns of "
                    "the model differs in %s. Resumed runs and retries will differ too. Draw its random numbers from "
                    "task.seed, or set env.resume=restart if an episode cannot be repeated", what)
        self.pool.cancel([episode.request.id])
        self._finish(episode, "abort")


def as_messages(prompt) -> list[dict]:
    """Returns a row's prompt as chat messages; text becomes one message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _digest(value) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()
