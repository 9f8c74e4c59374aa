"""The embedded sampler: a continuous batch over KV-cache slots on the policy's own devices.

Requests wait in order. A prompt is prefilled once into a stash, with others of its length class, and copied
from there into the slot of every request that has it. Slots decode together in chunks; between chunks the host
takes what has finished, looks for stop strings, and refills. Once no request waits, the last completions move
through smaller slot counts.

Prompts with images have a prefill program of their own per length class; a call without any image takes that of text.
Behind its images a slot needs no more of them than the shift of its positions (`Progress.shift`). New tokens of a
conversation that hold images are encoded once and then extend its slot piece by piece.

A conversation keeps its slot: where another request may come after one (`Request.keep`), the slot is parked, and the
next request (`Request.after`) runs only its new tokens (`Programs.extend`). Parking is best effort. Requests that wait
for a slot evict parked slots, least recently parked first. A weight sync evicts all of them: their keys and values
belong to the old weights. The next turn of an evicted conversation is prefilled like any prompt.

Results depend on the order of calls alone, never on time, so a repeated run repeats every sample.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter, deque
from collections.abc import Sequence

import jax
import numpy as np

from jaxrl.errors import ConfigError, RunStopped
from jaxrl.kernels.attention import shares_prompts
from jaxrl.kernels.low_precision import sampled
from jaxrl.models.adapters import adapter_set
from jaxrl.models.decoder import Seen
from jaxrl.models.vision.positions import rotary_shift
from jaxrl.processes.exchange import local_mesh
from jaxrl.rollout.engines import ENGINES, EngineContext
from jaxrl.rollout.programs import Progress, programs
from jaxrl.rollout.prompt_images import identity, prompt_images, rows_of_slots, suffix_images, suffix_pieces
from jaxrl.rollout.protocol import (
    Engine,
    EngineInfo,
    Health,
    Request,
    Result,
    SamplingParams,
    check_ids,
    check_request,
)
from jaxrl.rollout.sampling import Controls
from jaxrl.rollout.shapes import ALL, Shapes, from_config, work_of
from jaxrl.rollout.slot_requests import Parked, Sample, nothing_sampled
from jaxrl.rollout.stops import find_stop, text_decoder
from jaxrl.sharding import data_shards, make_mesh, rollout_mesh
from jaxrl.types import Images, Pictures

COUNTERS = ("requests", "finished", "aborted", "tokens", "slot_steps", "decode_steps", "chunks", "tokens_queued",
            "slot_steps_queued", "prefill_calls", "prefilled_prompts", "prefilled_tokens", "parked", "parked_past",
            "evicted", "extend_calls", "extended_prompts", "extended_tokens")
NOT_FINITE = ("rollout: non-finite log-probs under weight version {}; the weights, or logits in this dtype, are not "
              "finite: check model.path and optimizer.lr, or set a wider rollout.dtype")


def make_engine(*fields):
    """Returns the embedded sampler of an EngineContext, or of a context's fields in order.

    On a mesh over several processes each has its own engine over its devices; publish is collective, all else is local.
    Raises ConfigError for shapes that cannot hold the config's lengths, tensor or expert parallelism across processes,
    or images for a model without a tower."""
    context = EngineContext.of(*fields)
    config, model, eos_ids = context.config, context.model, context.eos_ids
    if context.patches and model.config.vision is None:
        raise ConfigError("rollout: prompts have images, and the model has no tower for them: choose a model.path "
                          "with one, or leave the images out")
    joint = make_mesh(config.mesh, jax.local_devices()[:1]) if context.mesh is None else rollout_mesh(context.mesh)
    mesh = local_mesh(joint)
    shapes = from_config(config, data_shards(mesh), len(eos_ids), joint.size // mesh.size,
                         not shares_prompts(model.attention, mesh), model.config.routes, context.patches)
    model = dataclasses.replace(model, compute_dtype=np.dtype(context.dtype), remat="none",
                                matmul=sampled(model.matmul))
    return EmbeddedEngine(model, shapes, mesh, context.tokenizer, eos_ids, joint)


class EmbeddedEngine(Engine):
    """The embedded sampler; see protocol.Engine. It works inside `poll`, at least one chunk per call. tokenizer: None =
    no stop strings. eos_ids: end-of-text token ids. joint: mesh of all processes that publish together; None = mesh."""

    def __init__(self, model, shapes: Shapes, mesh, tokenizer, eos_ids, joint=None):
        self.shapes = shapes
        self._programs = programs(model, shapes, mesh, model.compute_dtype, joint)
        self._vocab, self._recurrent = model.config.vocab_size, bool(model.config.num_recurrent)
        self._vision = model.config.vision if shapes.patches else None
        self._eos = tuple(int(i) for i in eos_ids)
        self._decode_text = text_decoder(tokenizer) if tokenizer is not None else None
        self._params, self._version, self._published = None, -1, 0
        self._cache, self._stash = self._programs.new_caches()
        self._stashed: list[dict[tuple, int]] = [{} for _ in shapes.prompt_lengths]
        self._routes = [np.zeros((0, 0, 0), np.int16) for _ in shapes.prompt_lengths]  # of the prompts there
        self._waiting: deque[Sample] = deque()
        self._running: dict[int, Sample] = {}
        self._parked: dict[str, Parked] = {}  # by request id, the least recently parked first
        self._keeps = False  # whether a request had `keep`
        self._served: set[SamplingParams] = set()  # those that the decode programs are known to serve
        self._prepared = False  # whether every program is compiled or is being compiled
        self._done: list[Result] = []
        self._ids: set[str] = set()
        self._held = self._closed = False
        self._counts = Counter({name: 0 for name in COUNTERS})
        self._table = _empty_table(shapes)
        self._nothing = nothing_sampled(shapes.support, shapes.routes)
        self._adapters = len(adapter_set.adapter_names(model))
        self._whose = np.zeros(shapes.slots, np.int32)  # number of the adapter of the request in each slot
        self._no_history: dict[int, jax.Array] = {}
        self._ended_at: set[int] = set()  # up to two different lengths of completions

    # ---- the protocol -------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """The registry's EngineInfo of rollout.engine=jax."""
        return ENGINES["jax"].info

    def submit(self, requests: list[Request]) -> None:
        """Queues requests in order. Raises ValueError naming one that does not fit; then none is queued."""
        self._check_open()
        if new := {r.sampling for r in requests} - self._served:
            self._serve(new)
        samples = [self._sample(r) for r in requests]
        ids = check_ids(requests, self._ids)
        self._ids.update(ids)
        self._waiting.extend(samples)
        if not self._keeps and any(r.keep for r in requests):
            self._keeps, self._prepared = True, False
        self._counts["requests"] += len(samples)

    def poll(self, deadline_s: float) -> list[Result]:
        """Works until a request has finished or `deadline_s` seconds have passed; returns new results. Raises
        RuntimeError without weights, RunStopped if log-probs are not finite, which aborts all requests."""
        self._check_open()
        end = time.monotonic() + deadline_s
        while (self._waiting and not self._held) or self._running:
            if self._params is None:
                raise RuntimeError("rollout: no weights yet; call publish(params, version) before polling")
            if not self._held:
                self._admit()
            self._decode()
            if self._done or time.monotonic() >= end:
                break
        done, self._done = self._done, []
        return done

    def abort(self, ids: list[str] | None = None) -> None:
        """Ends requests at once (None = all): the next poll returns each, with its tokens so far, as "abort". Frees the
        conversations kept for these ids."""
        self._check_open()
        gone = self._ids if ids is None else self._ids.intersection(ids)
        for sample in [s for s in (*self._running.values(), *self._waiting) if s.request.id in gone]:
            self._counts["aborted"] += 1
            self._finish(sample, "abort")
        self._waiting = deque(s for s in self._waiting if s.request.id in self._ids)
        self.forget(list(self._parked) if ids is None else ids)

    def forget(self, ids: list[str]) -> None:
        """Frees the conversations kept for these request ids."""
        self._check_open()
        for name in ids:
            self._parked.pop(name, None)

    def hold(self, on: bool) -> None:
        """Prevents new completions from starting while `on`."""
        self._check_open()
        self._held = on

    def publish(self, params, version: int) -> None:
        """Copies the weights to the sampling dtype and layout, and evicts parked slots. Running completions keep their
        keys and values, which are those of earlier weights. Collective over processes."""
        self._check_open()
        self._params = None  # the old copy goes before the new one comes
        if self._cache is None:
            self._cache, self._stash = self._programs.new_caches()
        if self._programs.ahead and not self._published:
            self._programs.prepare_first(self._calls(0, self._programs.published_shapes(params)))
        self._params = self._programs.publish(params)
        self._version = int(version)
        self._published += 1
        self._stashed = [{} for _ in self._stashed]
        self._parked.clear()
        # A run of many batches of different lengths: any program may come.
        if not self._prepared and self._published > 1 and len(self._ended_at) > 1:
            self._programs.prepare(self._calls(1))
            kinds = {"prefill", "decode", *(["prefill_images"] if self.shapes.patches else [])}
            self._prepared = kinds <= {kind for kind, *_ in self._programs.compiled}

    def sleep(self) -> None:
        """Frees weights and caches until the next publish. Raises RuntimeError while there are requests."""
        self._check_open()
        if self._waiting or self._running:
            raise RuntimeError(f"rollout: {len(self._ids)} requests are unfinished; abort them first")
        self._params = self._cache = self._stash = None
        self._parked.clear()

    def health(self) -> Health:
        """Returns the state of the engine, also when closed."""
        return Health(not self._closed and self._params is not None, self._closed, self._version, len(self._waiting),
                      len(self._running), len(self._programs.compiled), parked=len(self._parked))

    def counters(self) -> dict:
        """Returns totals since the start.

        compiled: programs of these shapes so far. slot_steps: decode steps times slots of the program that ran. The two
        `_queued` counters cover chunks during which requests waited for a slot. parked: how often a slot was parked;
        parked_past: how often not, because a recurrence was past the stop string; evicted: parked slots given to
        waiting requests. extended: prompts that continued in a parked slot, and their tokens run there."""
        return {**self._counts, "compiled": len(self._programs.compiled)}

    def close(self) -> None:
        """Frees weights and caches; safe to call twice."""
        if not self._closed:
            self._programs.compiler.stop()
            for array in jax.tree.leaves((self._params, self._cache, self._stash, self._no_history)):
                array.delete()
            self._params = self._cache = self._stash = None
            self._closed = True

    # ---- a request comes in ---------------------------------------------------------------------------------------

    def _check_open(self):
        if self._closed:
            raise RuntimeError("rollout: the engine is closed")

    def _serve(self, new: set[SamplingParams]) -> None:
        """Makes the decode programs ones that can sample like this; they are compiled again if they cannot."""
        self._served |= new
        work = max(work_of(p, p.min_new_tokens) for p in new)
        if work > self.shapes.work:  # more than the run's options need
            old, self.shapes = self._programs, dataclasses.replace(self.shapes, work=work)
            self._programs = programs(old.published, self.shapes, old.mesh, old.dtype, old.joint)
            others = {key: program for key, program in old.compiled.items() if key[0] != "decode"}
            self._programs.compiled, self._prepared = others | self._programs.compiled, False

    def _sample(self, request: Request) -> Sample:
        """Checks a request against the static shapes. Raises ValueError naming it and the remedy."""
        p, total = request.sampling, self.shapes.max_total
        longest, has_text = self.shapes.prompt_lengths[-1], self._decode_text is not None
        prompt = check_request(request, longest, total, self._vocab, has_text, self._adapters, self.shapes.patches)
        if len(self._eos) + len(p.stop_token_ids) > self.shapes.end_columns:
            raise ValueError(f"request {request.id!r}: {len(p.stop_token_ids)} stop_token_ids, at most "
                             f"{self.shapes.end_columns - len(self._eos)}; as many as rollout.stop_token_ids are fine")
        bucket = next(i for i, n in enumerate(self.shapes.prompt_lengths) if n >= len(prompt))
        key = prompt.tobytes(), request.pictures and identity(request.pictures), request.adapter
        return Sample(dataclasses.replace(request, prompt=prompt), key, bucket,
                      min(p.max_new_tokens, total - len(prompt)), [self._nothing])

    def _images(self, pictures: Sequence[Pictures | None], lengths, width: int) -> Images:
        """Returns the images of prompts of a class of `width` tokens."""
        assert self._vision is not None
        room = self.shapes.patch_room(width, self._vision.merge)
        return prompt_images(self._vision, pictures, lengths, width, room)

    def _numbers(self, numbers) -> np.ndarray | None:
        """Returns int32 adapter numbers for a program; None without an adapter set."""
        return np.asarray(numbers, np.int32) if self._adapters else None

    def _shifts(self, slots) -> np.ndarray | None:
        shift = self._table[0].shift
        return None if shift is None else shift[slots]

    # ---- from the queue into slots --------------------------------------------------------------------------------

    def _admit(self):
        """Continues parked conversations, then fills free slots from the queue's head, `insert_width` at a time."""
        if self._parked:
            self._continue()
        kept = {p.slot for p in self._parked.values()}
        free = deque(s for s in range(self.shapes.slots) if s not in self._running and s not in kept)
        if self._parked and len(self._waiting) > len(free):
            free = self._evict(free)
        while self._waiting and free:
            rows, slots = [], []
            while self._waiting and free and len(rows) < self.shapes.insert_width:
                sample = self._waiting[0]
                if sample.key not in self._stashed[sample.bucket]:
                    if rows:
                        break  # a prefill may take the place of rows chosen already
                    self._prefill(sample.bucket)
                sample = self._waiting.popleft()
                sample.slot, sample.weights = free.popleft(), self._published
                rows.append(self._stashed[sample.bucket][sample.key])
                if self.shapes.routes:
                    prompt = rows[-1] - sample.bucket * self.shapes.prefill_rows
                    sample.known = self._routes[sample.bucket][prompt, :len(sample.request.prompt) - 1]
                slots.append(sample.slot)
                self._running[sample.slot] = sample
                self._write_table(sample)
            idle = [self.shapes.slots] * (self.shapes.insert_width - len(rows))  # beyond the cache: dropped
            self._cache = self._programs.insert(
                self._cache, self._stash, np.array(rows + [0] * len(idle), np.int32), np.array(slots + idle, np.int32))

    def _evict(self, free: deque[int]) -> deque[int]:
        """Returns the free slots after evicting as many parked slots as waiting requests still need."""
        slots = [self._parked.pop(name).slot for name in list(self._parked)[:len(self._waiting) - len(free)]]
        self._counts["evicted"] += len(slots)
        return deque(sorted([*free, *slots]))

    def _continue(self):
        """Starts waiting requests whose conversation is parked: prefills the new prompt tokens but the last, which
        decoding reads. If the prompt does not begin with the parked tokens, or its new tokens hold an image whose
        tokens see each other, the slot is freed and the prompt is prefilled whole."""
        work, shown = [], []
        for sample in [s for s in self._waiting if s.request.after in self._parked]:
            parked = self._parked.pop(sample.request.after, None)
            known = 0 if parked is None else len(parked.tokens)
            shows = (pictures := sample.request.pictures) is not None and bool((pictures.firsts >= known).any())
            if parked is None or not np.array_equal(sample.request.prompt[:known], parked.tokens) \
                    or parked.images != identity(pictures, known) or shows and self._vision and self._vision.two_way:
                continue
            self._waiting.remove(sample)
            sample.slot, sample.weights, sample.continued = parked.slot, self._published, True
            self._running[sample.slot] = sample
            self._write_table(sample)
            new = sample.request.prompt[known - 1:-1]
            sample.known = np.full((len(sample.request.prompt) - 1, self.shapes.routes), -1, np.int16)
            self._counts.update(extended_prompts=1, extended_tokens=len(new))
            if shows:
                shown.append((sample, pictures, known - 1))
            elif len(new):
                work.append((sample.slot, known - 1, new))
        self._extend(work)
        self._extend_images(shown)

    def _extend(self, work: list[tuple[int, int, np.ndarray]]):
        """Prefills each (slot, first position, tokens); tokens beyond the width of one call go into further calls."""
        while work:
            call, work = self._call_of(work)
            self._run_extend(*call)

    def _run_extend(self, *call):
        """Runs one extend call; call: the arguments of Programs.extend after the cache."""
        known = len(self._programs.compiled)
        self._cache, routes = self._programs.extend(self._params, self._cache, *call)
        if len(self._programs.compiled) > known:
            self._programs.prepare(self._calls(2))
        self._counts["extend_calls"] += 1
        if routes is not None:
            for own, positions, slot in zip(jax.device_get(routes), *call[1:3], strict=True):
                if slot in self._running:
                    real = positions < self.shapes.cache_lengths[-1]
                    self._running[int(slot)].known[positions[real]] = own[real]

    def _extend_images(self, work: list[tuple[Sample, Pictures, int]]):
        """Prefills the new tokens of each (sample, images of its prompt, first new position), of which some are an
        image's: encodes the images of a call's samples once, then runs their tokens in as many calls as they need."""
        (rows, width), (shards, slots) = self.shapes.extend, (self._programs.data_shards, self.shapes.slots)
        while work:
            chosen, left = rows_of_slots([sample.slot for sample, *_ in work], rows, shards, slots)
            taken, work = [(row, *work[i]) for i, row in chosen], [work[i] for i in left]
            assert self._vision is not None
            rooms = self.shapes.turn_rooms(self._vision.merge)
            images = suffix_images(self._vision, [(row, pictures, start, len(s.request.prompt) - 1)
                                                  for row, s, pictures, start in taken], rows, rooms)
            features, taps = self._programs.encode(
                self._params, images.replace(inserts=images.inserts[:, :1], rotary=images.rotary[:, :1]),
                rooms[-1] // self._vision.merge**2)
            new = [(row, s.slot, start, s.request.prompt[start:-1]) for row, s, _, start in taken]
            length = self.shapes.cache_lengths[-1]
            for call, inserts, rotary in suffix_pieces(images, new, (rows, width), slots, length):
                own = np.minimum(call[2], slots - 1)  # rows beyond the cache are dropped
                self._run_extend(*call, self._numbers(self._whose[own]), None, Seen(features, taps, inserts, rotary))

    def _call_of(self, work):
        """Splits work into (arguments of one extend call, remaining work).

        Takes entries in order, at most rows / shards of each data shard. The arguments are
        (tokens, positions, slots, adapters, shifts)."""
        (rows, width), (shards, slots) = self.shapes.extend, (self._programs.data_shards, self.shapes.slots)
        free, left = [range(i, i + rows // shards) for i in range(0, rows, rows // shards)], []
        tokens, which = np.zeros((rows, width), np.int32), np.full(rows, slots, np.int32)
        beyond = self.shapes.cache_lengths[-1] + np.arange(width, dtype=np.int32)
        positions = np.tile(beyond, (rows, 1))
        for slot, start, new in work:
            shard = slot * shards // slots
            n = min(len(new), width) if free[shard] else 0
            if n:
                row, free[shard] = free[shard][0], free[shard][1:]
                tokens[row, :n], positions[row, :n], which[row] = new[:n], start + np.arange(n), slot
            if n < len(new):
                left.append((slot, start + n, new[n:]))
        own = np.minimum(which, slots - 1)  # rows beyond the cache are dropped
        return (tokens, positions, which, self._numbers(self._whose[own]), self._shifts(own)), left

    def _prefill(self, bucket: int):
        """Prefills the next distinct prompts of a length class, in queue order; they replace those of its last call."""
        width, length = self.shapes.prefill_rows, self.shapes.prompt_lengths[bucket]
        prompts: dict[tuple, Request] = {}
        for sample in self._waiting:
            if sample.bucket == bucket:
                prompts.setdefault(sample.key, sample.request)
                if len(prompts) == width:
                    break
        tokens, lengths, adapters = np.zeros((width, length), np.int32), np.ones(width, np.int32), np.zeros(width)
        for i, request in enumerate(prompts.values()):
            tokens[i, :len(request.prompt)], lengths[i] = request.prompt, len(request.prompt)
            adapters[i] = request.adapter
        pictures = [request.pictures for request in prompts.values()] + [None] * (width - len(prompts))
        images = self._images(pictures, lengths, length) if any(own is not None for own in pictures) else None
        rows = np.arange(bucket * width, (bucket + 1) * width, dtype=np.int32)
        known = len(self._programs.compiled)
        self._stash, routes = self._programs.prefill(self._params, self._stash, tokens, lengths, rows,
                                                     self._numbers(adapters), images)
        if len(self._programs.compiled) > known:
            self._programs.prepare(self._calls(2))
        if routes is not None:
            self._routes[bucket] = jax.device_get(routes)
        self._stashed[bucket] = {key: int(row) for key, row in zip(prompts, rows, strict=False)}
        self._counts.update(prefill_calls=1, prefilled_prompts=len(prompts),
                            prefilled_tokens=sum(len(request.prompt) for request in prompts.values()))

    def _write_table(self, sample: Sample):
        p, progress, controls = sample.request.sampling, *self._table
        s, prompt = sample.slot, sample.request.prompt
        self._whose[s] = sample.request.adapter
        pictures, tower = sample.request.pictures, self._vision
        shift = None if tower is None else 0
        if tower is not None and pictures is not None and not tower.two_way:
            shift = rotary_shift(pictures.grids, tower.merge, pictures.delays)
        for column, value in zip(progress, (prompt[-1], len(prompt) - 1, 0, sample.limit, True, shift), strict=True):
            if column is not None:
                column[s] = value
        ends = np.full(self.shapes.end_columns, -1, np.int32)
        ids = self._eos + tuple(p.stop_token_ids)
        ends[:len(ids)] = ids
        values = (p.temperature, p.top_p, p.top_k, p.min_p, p.repetition_penalty, p.frequency_penalty, p.min_new_tokens,
                  ends, sample.request.seed)
        for column, value in zip(controls, values, strict=True):
            column[s] = value

    # ---- decoding ---------------------------------------------------------------------------------------------------

    def _decode(self):
        """Decodes one chunk, appends its tokens to their samples, and finishes samples that have ended."""
        count, leave_at = self._plan()
        slots = sorted(self._running)
        if count < self.shapes.slots:
            idle = (s for s in range(self.shapes.slots) if s not in self._running)
            rows = np.array(slots + [next(idle) for _ in range(count - len(slots))], np.int32)
        else:
            rows = np.arange(count, dtype=np.int32)
        progress, controls = jax.tree.map(lambda column: column[rows], self._table)
        longest = progress.position - progress.produced + progress.limit
        need = np.minimum(progress.position + self.shapes.decode_steps, longest)[progress.active].max()
        lengths = self.shapes.lengths_of[count]
        length = next((n for n in lengths if n >= need), lengths[-1])  # the shortest that holds what the chunk writes
        history = self._no_history.get(count)
        if history is None or self.shapes.work == ALL:
            history = self._history(rows)
        shared = self._shared(rows) if self._programs.shares else None
        known = len(self._programs.compiled)
        self._cache, chunk = self._programs.decode(self._params, self._cache, progress, controls, history, leave_at,
                                                   rows, length, shared, self._numbers(self._whose[rows]))
        if len(self._programs.compiled) > known:
            self._programs.prepare(self._calls(2))
        chunk = jax.device_get(chunk)
        emitted = (chunk.tokens >= 0).sum(axis=0)
        if not np.isfinite(chunk.logprobs).all():
            self.abort()
            self._cache, self._stash = self._programs.new_caches()  # masked keys must be finite too
            raise RunStopped(NOT_FINITE.format(self._version))
        queued, tokens = bool(self._waiting), 0
        for column, slot in enumerate(rows.tolist()):
            if slot in self._running:
                n = int(emitted[column])
                tokens += self._take(self._running[slot], *(a[:n, column].copy() for a in chunk[:5]))
        steps = int(chunk.steps)
        self._counts.update(decode_steps=steps, slot_steps=steps * count, chunks=1, tokens=tokens)
        if queued:
            self._counts.update(slot_steps_queued=steps * count, tokens_queued=tokens)

    def _plan(self) -> tuple[int, int]:
        """Returns (slot count to decode with, number of active slots at which the chunk ends early)."""
        active = len(self._running)
        if self._waiting and not self._held:
            return self.shapes.slots, max(0, self.shapes.slots - self.shapes.insert_width)
        count = next(n for n in self.shapes.slot_counts if n >= active)
        return count, max((n for n in self.shapes.slot_counts if n < active), default=0)

    def _calls(self, least: int, params=None):
        """Yields arguments of `Programs.run` for programs not compiled yet: of kinds with at least `least` compiled
        ones (others may be needed soon), and extend if requests are kept. Allocates nothing if all are compiled.
        params: the weights' shapes before they are published."""
        shapes, params = self.shapes, self._params if params is None else params
        width, used = shapes.prefill_rows, Counter(kind for kind, *_ in self._programs.compiled)
        kinds = ("prefill", *(["prefill_images"] if shapes.patches else []))
        for kind, length in itertools.product(kinds, shapes.prompt_lengths):
            if used[kind] >= least and self._programs.missing((kind, length)):
                ones, none = np.ones(width, np.int32), [None] * width
                yield self._programs.prefill_call(params, self._stash, np.zeros((width, length), np.int32), ones,
                                                  np.arange(width, dtype=np.int32), self._numbers(0 * ones),
                                                  None if kind == "prefill" else self._images(none, ones, length))
        if self._keeps and self._programs.missing(("extend",)):
            blank = np.zeros(shapes.extend, np.int32)
            yield self._programs.extend_call(params, self._cache, blank, blank, blank[:, 0],
                                             self._numbers(blank[:, 0]), self._shifts(blank[:, 0]))
        for count in reversed(shapes.slot_counts) if used["decode"] >= least else ():
            rows = np.arange(count, dtype=np.int32)
            part = jax.tree.map(lambda column, rows=rows: column[rows], self._table)
            for length in (n for n in shapes.lengths_of[count] if self._programs.missing(("decode", count, n))):
                yield self._programs.decode_call(params, self._cache, part[0], part[1], self._history(rows), 0,
                                                 rows, length, self._shared(rows), self._numbers(self._whose[rows]))

    def _shared(self, rows):
        """Returns which rows share a prompt (same tokens, same weights), whose keys and values are then read once. The
        last prompt token is excluded: every slot writes it itself. Continued conversations share nothing, because
        `extend` computed their keys."""
        samples = [self._running.get(slot) for slot in rows.tolist()]
        return self._programs.shared([s and (s.key, s.weights, s.slot if s.continued else -1) for s in samples],
                                     [len(s.request.prompt) - 1 if s else 0 for s in samples])

    def _history(self, rows):
        """Returns int32 [S, C], tokens by position of slots with penalties; one device array if no slot has one."""
        sharding = self._programs.by_slot
        shape = (len(rows), self.shapes.cache_lengths[-1])
        if not any(s.request.sampling.penalised for s in self._running.values()):
            if len(rows) not in self._no_history:
                self._no_history[len(rows)] = self._programs.put(np.zeros(shape, np.int32), sharding)
            return self._no_history[len(rows)]
        history = np.zeros(shape, np.int32)
        for i, slot in enumerate(rows.tolist()):
            sample = self._running.get(slot)
            if sample is not None and sample.request.sampling.penalised:
                tokens = np.concatenate([sample.request.prompt, *(part[0] for part in sample.parts)])
                history[i, :len(tokens)] = tokens
        return self._programs.put(history, sharding)

    def _take(self, sample: Sample, tokens, logprobs, log_kept, support, routes) -> int:
        """Appends sampled tokens to a sample and finishes it at its end. Returns the number of tokens up to the end."""
        before = sample.produced
        sample.produced = total = before + len(tokens)
        versions = np.full(len(tokens), self._version, np.int32)
        sample.parts.append((tokens, logprobs, log_kept, support, routes, versions))
        progress = self._table[0]
        progress.token[sample.slot] = tokens[-1]
        progress.position[sample.slot] += len(tokens)
        progress.produced[sample.slot] += len(tokens)
        p = sample.request.sampling
        if p.stop and self._decode_text is not None:
            completion = np.concatenate([part[0] for part in sample.parts]).tolist()
            stop = find_stop(self._decode_text, completion, len(tokens), p.stop, p.min_new_tokens)
            if stop:
                self._finish(sample, "stop", stop[0] if p.keep_stop else stop[1])
                return stop[0] - before
        if int(tokens[-1]) in self._eos + p.stop_token_ids:
            self._finish(sample, "stop")
        elif total >= sample.limit:
            self._finish(sample, "length")
        return len(tokens)

    def _finish(self, sample: Sample, reason: str, length: int | None = None):
        columns = (np.concatenate(chunks)[:length] for chunks in zip(*sample.parts, strict=True))
        tokens, logprobs, log_kept, support, routes, versions = columns
        routes = self._all_routes(sample, routes) if self.shapes.routes else None
        self._done.append(Result(sample.request.id, tokens, logprobs, log_kept, versions, reason, sample.request.seed,
                                 support, routes))
        self._ids.discard(sample.request.id)
        if len(self._ended_at) < 2:
            self._ended_at.add(len(versions))
        self._counts["finished"] += reason != "abort"
        if self._running.get(sample.slot) is sample:
            del self._running[sample.slot]
            self._table[0].active[sample.slot] = False
            parks = sample.request.keep and reason != "abort" and sample.weights == self._published
            if parks and self._recurrent and len(versions) < sample.produced:
                self._counts["parked_past"] += 1  # the state has gone past the stop string, and does not come back
            elif parks:
                known = np.concatenate([sample.request.prompt, tokens])
                self._parked.pop(sample.request.id, None)  # of a request of the same id before: the newest comes last
                self._parked[sample.request.id] = Parked(sample.slot, known, identity(sample.request.pictures))
                self._counts["parked"] += 1

    def _all_routes(self, sample: Sample, routes) -> np.ndarray:
        """Returns int16 [P + n, W], the expert ids of prompt and completion tokens; -1 in the last row, never run."""
        count = len(sample.request.prompt) + len(routes)
        out = np.full((count, self.shapes.routes), -1, np.int16)
        if len(routes):
            out[:count - 1] = np.concatenate([sample.known, routes])
        return out


def _empty_table(shapes: Shapes) -> tuple[Progress, Controls]:
    """Returns host rows of all slots, idle and with options that need no work."""
    def full(value, dtype):
        return np.full(shapes.slots, value, dtype)

    progress = Progress(full(0, np.int32), full(0, np.int32), full(0, np.int32), full(0, np.int32), full(False, bool),
                        full(0, np.int32) if shapes.patches else None)
    controls = Controls(
        temperature=full(1, np.float32), top_p=full(1, np.float32), top_k=full(-1, np.int32), min_p=full(0, np.float32),
        repetition=full(1, np.float32), frequency=full(0, np.float32), minimum=full(0, np.int32),
        end_ids=np.full((shapes.slots, shapes.end_columns), -1, np.int32), seed=full(0, np.uint32))
    return progress, controls
