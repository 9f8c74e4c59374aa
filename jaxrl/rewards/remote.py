"""The reward `remote`: sends batches of completions to a service and receives scores. One function per wire format.

Every key of reward.remote.score_key is a part: clipped to part_min..part_max and multiplied by its weight. Their sum
is clipped to clip_min..clip_max and multiplied by scale (the order of Cosmos-RL's remote_calculator.py, where a
function's keys are one part). A part that is not a finite number fails the completion: its score is absent, not 0.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import urllib.parse
import uuid

from jaxrl.rewards.calling import ServiceError
from jaxrl.rewards.http import Budget, Service, check_count, get_field, rotate_urls
from jaxrl.workers.loading import number

POLL_SECONDS = 0.25
PENDING = ("http_202", "http_204", "http_404", "http_409", "http_425")  # cosmos: the score is not computed yet
FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


class Remote(Service):
    """A batched reward of a service that reads text; scores prompts, completions and the columns of the option
    `columns`. A column that no row of the batch has is not sent; a job is refused if no row of its data has it.

    Args:
      o: the service's options (see services.service_options); they decide scores.
      place: {urls: addresses of the servers, key_env: environment variable with the secret, "" = none}.

    Attributes:
      size: completions per call: those of a batch times the batches in flight.
      keys: names in a reply whose values are the parts of a score (score_key, divided by "+"); [] = a plain number.
    """

    def __init__(self, o: dict, place: dict):
        super().__init__(o, place)
        self.size = o["batch"] * o["concurrency"]
        self.keys = [key.strip() for key in o["score_key"].split("+") if key.strip()]
        self._batches = 0

    async def __call__(self, prompts, completions, *, finish, group, sample, **columns):
        """Returns per completion a number, None (no score), or the ServiceError."""
        sent = {name: columns[name] for name in self.o["columns"] if name in columns}
        return await self.score_batches([
            {"prompt": p, "completion": c, "finish": finish[i], "group": group[i], "sample": sample[i],
             "columns": {name: values[i] for name, values in sent.items()}}
            for i, (p, c) in enumerate(zip(prompts, completions, strict=True))])

    async def score_batches(self, items: list[dict]) -> list:
        """Returns one value per item, a score, None (the service gives none) or a ServiceError, sending batches
        concurrently. A batch that fails as a whole gives its ServiceError to each of its items."""
        step = 1 if self.o["format"] == "areal" else self.o["batch"]
        async with self.client() as client:
            batches = (self._batch(client, items[k:k + step]) for k in range(0, len(items), step))
            return [value for values in await asyncio.gather(*batches) for value in values]

    async def _batch(self, client, items: list[dict]) -> list:
        self._batches += 1
        turn = self._batches
        values = await self.run_until_deadline(lambda budget: FORMATS[self.o["format"]](self, client, budget, items,
                                                                                        turn))
        return [values] * len(items) if isinstance(values, ServiceError) else values

    def score(self, parts: list, where: str) -> float | ServiceError:
        """Combines the values of all parts, in the order of their weights, into one score.

        The sum of weight times the part clipped to [part_min, part_max], clipped to [clip_min, clip_max], times
        scale; weights are 1 without the option. Returns a ServiceError if a value is not a finite number. where: the
        server, for its text. Raises ValueError for another number of weights than of parts."""
        weights, total = self.o["weights"] or [1.0] * len(parts), 0.0
        for value, weight in zip(parts, weights, strict=True):
            found = number(value)
            if found is None or not math.isfinite(found):
                return ServiceError("type", f"{where}: a score is {type(value).__name__} {str(value)[:40]!r}, "
                                    "expected a finite number")
            total += weight * clip(found, self.o["part_min"], self.o["part_max"])
        return clip(total, self.o["clip_min"], self.o["clip_max"]) * self.o["scale"]


def clip(x: float, lowest: float | None, highest: float | None) -> float:
    """Returns x limited to [lowest, highest]; None means no limit."""
    x = x if lowest is None else max(x, lowest)
    return x if highest is None else min(x, highest)


# -- formats: (remote, client, budget, items, turn) -> list of one value per item --------------------------------------


async def jaxrl_format(self: Remote, client, budget: Budget, items, turn):
    """Scores items in jaxrl's format: {"items": [...]} -> {"scores": [number, table of numbers, or
    null, ...]}, in order.

    client: of Service.client. budget: time left. items: as JSON. turn: number of the request, from which URLs are
    rotated. Returns per item a score, None where the service gives null, or a ServiceError. Raises ServiceError without
    a usable reply in time, and for one that does not have one entry per item."""
    urls = rotate_urls(self.urls, turn)
    reply = await self.ask(client, budget, urls, {"items": items})
    values = check_count(get_field(reply, "scores", list, urls[0]), len(items), urls[0])
    return [None if value is None else _value_score(self, value, urls[0]) for value in values]


def _value_score(self, value, where: str) -> float | ServiceError:
    if not self.keys:
        return self.score([value], where)
    if not isinstance(value, dict):
        return ServiceError("type", f"{where}: a score is {type(value).__name__}, expected a table with "
                            f"{', '.join(self.keys)}")
    if lacks := [key for key in self.keys if key not in value]:
        return ServiceError("key", f"{where}: a score has no {lacks[0]!r}; it has: {', '.join(value)[:100]}")
    return self.score([value[key] for key in self.keys], where)


async def cosmos(self: Remote, client, budget: Budget, items, turn):
    """Scores items in Cosmos-RL's format.

    Sends a line of JSON with the texts, followed by the tensor that other clients send, empty here -> {"uuid"}; then
    for each function {uuid, type} as a form -> {"scores": {key: [number, ...]}}, polled until available. A function's
    keys (score_key, else overall_reward) are added up to one part.

    client: of Service.client. budget: time left. items: as JSON. turn: number of the request, from which URLs are
    rotated. Returns per item a score or a ServiceError. Raises ServiceError without a usable reply in time."""
    urls = rotate_urls(self.urls, turn, "/api/reward/enqueue")
    functions = self.o["functions"]
    weights = self.o["weights"] or [1.0] * len(functions)
    columns = {name: [item["columns"][name] for item in items] for name in items[0]["columns"]}
    body = {"prompts": [item["prompt"] for item in items], "completions": [item["completion"] for item in items],
            "reward_fn": dict(zip(functions, weights, strict=True)), "media_type": "text", **columns}
    reply = await self.ask(client, budget, urls[:1], json.dumps(body).encode() + b"\n", "application/octet-stream")
    name = get_field(reply, "uuid", str, urls[0])
    fetch = self.o["fetch_url"] or re.sub(r"enqueue$", "pull", urls[0])
    replica = (reply or {}).get("replica_id")
    headers = {"X-Lepton-Replica-Target": replica} if isinstance(replica, str) else {}
    parts = [await _poll(self, client, budget, fetch, name, function, headers, len(items)) for function in functions]
    return [self.score(list(values), fetch) for values in zip(*parts, strict=True)]


async def _poll(self, client, budget, fetch, name, function, headers, count) -> list:
    """Returns one function's scores for all items, summed over its keys."""
    form = urllib.parse.urlencode({"uuid": name, "type": function}).encode()
    while True:
        try:
            reply = await self.ask(client, budget, [fetch], form, "application/x-www-form-urlencoded", headers)
            break
        except ServiceError as e:
            if e.cause not in PENDING:
                raise
            budget.last = e
            await asyncio.sleep(POLL_SECONDS)
    scores, keys = get_field(reply, "scores", dict, fetch), self.keys or ["overall_reward"]
    keys = [self.o["score_key"]] if self.o["score_key"] in scores else keys
    columns = [check_count(get_field(scores, key, list, fetch), count, fetch) for key in keys]
    return [values[0] if len(values) == 1 else _sum(values) for values in zip(*columns, strict=True)]


def _sum(values):
    numbers = [n for n in map(number, values) if n is not None]
    return sum(numbers) if len(numbers) == len(values) else None


async def areal(self: Remote, client, budget: Budget, items, turn):
    """Scores one completion in AReaL's format: {uid, language, code, ...columns} -> {"success": bool, "results"}.

    A SystemError reported by the service is the service's failure, not the code's. Completions are sent one by one,
    so that code that hangs does not cost others their score.

    client: of Service.client. budget: time left. items: one, as JSON. turn: number of the request, from which URLs are
    rotated. Returns [score or ServiceError]. The code is the last block between ``` fences, else the whole completion.
    Raises ServiceError without a usable reply in time, with cause `system` for a SystemError."""
    urls, key = rotate_urls(self.urls, turn, "/apis/functioncalls"), (self.keys or ["success"])[0]
    text = items[0]["completion"]
    blocks = FENCED.findall(text)
    body = items[0]["columns"] | {"uid": uuid.uuid4().hex, "language": self.o["language"].upper(),
                                  "code": blocks[-1] if blocks else text}
    reply = await self.ask(client, budget, urls, body)
    results = reply.get("results") if isinstance(reply, dict) else None
    for result in results if isinstance(results, list) else ():
        if isinstance(result, dict) and result.get("errorType") == "SystemError":
            raise ServiceError("system", f"{urls[0]} reports SystemError: {str(result.get('reason'))[:100]}")
    return [self.score([get_field(reply, key, (bool, int, float), urls[0])], urls[0])]


async def classify(self: Classifier, client, budget: Budget, items, turn):
    """Scores items with vLLM's /classify: {"input": [[token id, ...], ...]} -> {"data": [{"index", "probs"}]}; the
    values are logits, since activation is off.

    client: of Service.client. budget: time left. items: with `ids`, the token ids of prompt and completion. turn:
    number of the request, from which URLs are rotated. Returns per item a score or a ServiceError. Raises ServiceError
    without a usable reply in time, and if the server has another tokenizer."""
    urls = rotate_urls(self.urls, turn, "/classify")
    await self.check_tokens(client, budget, urls[0], items)
    body = {"input": [item["ids"] for item in items], "use_activation": False} | self.model
    return self.labels(await self.ask(client, budget, urls, body), "probs", len(items), urls[0])


async def pooling(self: Classifier, client, budget: Budget, items, turn):
    """Scores items with vLLM's /pooling: {"input": [[token id, ...], ...]} -> {"data": [{"index", "data"}]}, one number
    per label, or a list of those per token, of which the last counts; activation is off.

    client: of Service.client. budget: time left. items: with `ids`, the token ids of prompt and completion. turn:
    number of the request, from which URLs are rotated. Returns per item a score or a ServiceError. Raises ServiceError
    without a usable reply in time, and if the server has another tokenizer."""
    urls = rotate_urls(self.urls, turn, "/pooling")
    await self.check_tokens(client, budget, urls[0], items)
    body = {"input": [item["ids"] for item in items], "use_activation": False, "encoding_format": "float"} | self.model
    body |= {"task": self.o["task"]} if self.o["task"] else {}
    return self.labels(await self.ask(client, budget, urls, body), "data", len(items), urls[0])


class Classifier(Remote):
    """A batched reward: a vLLM server with a sequence classifier that has the policy's tokenizer.

    It receives the token ids of prompt and completion.

    o: the service's options (see services.service_options), of which `model` is named in requests. place: {urls:
    addresses of the servers, key_env: environment variable with the secret, "" = none}."""

    def __init__(self, o: dict, place: dict):
        super().__init__(o, place)
        self.model, self._known = ({"model": o["model"]} if o["model"] else {}), False

    async def __call__(self, prompts, completions, *, token_ids, context_ids):
        return await self.score_batches([
            {"completion": text, "own": own, "ids": [*before, *own]}
            for text, own, before in zip(completions, token_ids, context_ids, strict=True)])

    async def check_tokens(self, client, budget: Budget, url: str, items) -> None:
        """Checks, until it has passed once, that the server decodes the ids of one completion to a text that holds it.
        Raises ServiceError otherwise, with cause `tokenizer`, since scores of other words would look valid, and the
        ServiceError of a request that a retry might mend. A server that cannot decode passes; of several servers only
        the one at `url` is asked.

        client: of Service.client. budget: time left. url: of the scoring request; /detokenize beside it is asked.
        items: dicts with `completion` and `ids`, of which four readable ones at most are tried; one that fits is
        enough."""
        if self._known:
            return
        read = []
        readable = [item for item in items if item["completion"].strip() and "\ufffd" not in item["completion"]]
        for item in readable[:4]:
            try:
                text = await self.ask(client, budget, [url.rpartition("/")[0] + "/detokenize"],
                                      {"tokens": item["ids"]} | self.model)
                text = get_field(text, "prompt", str, url)
            except ServiceError as e:
                if e.again:
                    raise
                self._known = True  # it cannot decode, or has no tokenizer
                return
            if "".join(item["completion"].split()) in "".join(text.split()):
                self._known = True
                return
            read.append((item["completion"], text))
        if read:
            raise ServiceError("tokenizer", f"{url} has another tokenizer than the policy: it decodes "
                               f"{read[0][1][-60:]!r}, the completion is {read[0][0][-60:]!r}")

    def labels(self, reply, name: str, count: int, where: str) -> list:
        """Returns the score of each of `count` completions from a reply's rows, which hold index and the field `name`:
        the label that score_key numbers (without it there must be one), of a list of labels per token the last.

        A label that is not there gives a ServiceError in its place. where: the server, for messages. Raises
        ServiceError if indices are missing or repeated."""
        scores: list = [None] * count
        for row in check_count(get_field(reply, "data", list, where), count, where):
            i = get_field(row, "index", int, where)
            if not 0 <= i < count or scores[i] is not None:
                raise ServiceError("count", f"{where}: index {i} of {count} completions")
            scores[i] = self._label(get_field(row, name, list, where), where)
        return scores

    def _label(self, values: list, where: str) -> float | ServiceError:
        values = values[-1] if values and isinstance(values[-1], list) else values
        if not self.keys and len(values) != 1:
            return ServiceError("key", f"{where} gives {len(values)} labels; set score_key to the index of one")
        label = int(self.keys[0]) if self.keys else 0
        if label >= len(values):
            return ServiceError("key", f"{where} gives {len(values)} labels; score_key={label} is out of range")
        return self.score([values[label]], where)


FORMATS = {"own": jaxrl_format, "cosmos": cosmos, "areal": areal, "classify": classify, "pooling": pooling}


def make(o: dict, place: dict) -> Remote:
    """Returns the Remote, or for the formats classify and pooling the Classifier, of a reward.remote's options and
    its place."""
    return (Classifier if o["format"] in ("classify", "pooling") else Remote)(o, place)
