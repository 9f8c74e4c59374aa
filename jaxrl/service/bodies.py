"""Checks JSON bodies against tables of fields, and turns their parts into values of trainer and sampler.

A field that is not known is refused by name, unless it is null: nothing is ignored silently but metadata.

Legend: N positions of a datum, P prompt tokens.
"""

from __future__ import annotations

import base64
import json
import math
import re
from typing import Any, NamedTuple

import numpy as np

from jaxrl.algorithms.api_losses import API_LOSSES
from jaxrl.config.option import is_finite
from jaxrl.rollout.protocol import SamplingParams
from jaxrl.service.images import Sight, expanded
from jaxrl.service.packing import Batch
from jaxrl.service.refusals import Refused
from jaxrl.service.sampler import ENDS
from jaxrl.service.trainer import COLUMNS, AdamSettings, LoraOptions
from jaxrl.service.wire import ImageChunk
from jaxrl.types import Pictures, Places

TEXTS, INTEGER, NUMBER, FLAG, TABLE, LIST, ANY = (str,), (int,), (int, float), (bool,), (dict,), (list,), (object,)
WORDS = {TEXTS: "a text", INTEGER: "a whole number", NUMBER: "a number", FLAG: "true or false", TABLE: "an object",
         LIST: "a list"}
MOST_SAMPLES, MOST_STOPS, MOST_STOP = 1024, 16, 256
MOST_DATA = 4096  # of a forward_backward; the client sends at most 1,024
MOST_NOTES = 65536  # characters of JSON of a field that is kept and returned


class Field(NamedTuple):
    """A field of a body.

    Attributes:
      kind: types that a value may have. default: of an absent or null field; REQUIRED = it must be there.
      low, high: bounds of numbers, low <= value < high.
    """

    kind: tuple[type, ...]
    default: Any = None
    low: float = -2.0**63
    high: float = 2.0**64


REQUIRED = object()
SURROGATE = re.compile(rb"\\u[dD][89abAB]")  # half of a character, which no text has alone
ID, SEQ, RANK = Field(TEXTS, REQUIRED), Field(INTEGER, REQUIRED, 0, 1e9), Field(INTEGER, REQUIRED)
NUMBERED = Field(INTEGER, None, 0, 1e9)
NOTES = {"type": Field(ANY), "user_metadata": Field(TABLE), "ttl_seconds": Field(INTEGER, None, -1e9, 1e9)}
BODIES: dict[str, dict[str, Field]] = {
    "client/config": {"sdk_version": Field(TEXTS, "")},
    "create_session": {"tags": Field(LIST), "user_metadata": Field(TABLE), "sdk_version": Field(TEXTS, ""),
                       "project_id": Field(TEXTS), "display_name": Field(TEXTS), "type": Field(ANY)},
    "session": {"session_id": ID, "type": Field(ANY)},
    "create_model": {"session_id": ID, "model_seq_id": SEQ, "base_model": ID, "lora_config": Field(TABLE, REQUIRED),
                     "optimizer_config": Field(TABLE), **NOTES},
    "lora_config": {"rank": RANK, "seed": Field(INTEGER), "train_unembed": Field(FLAG, True),
                    "train_mlp": Field(FLAG, True), "train_attn": Field(FLAG, True)},
    "model": {"model_id": ID, "type": Field(ANY)},
    "weights_info": {"tinker_path": ID},
    "optim_step": {"model_id": ID, "seq_id": SEQ, "adam_params": Field(TABLE), "optimizer_params": Field(TABLE),
                   "type": Field(ANY)},
    "adam_params": {name: Field(NUMBER, default) for name, default in AdamSettings()._asdict().items()},
    "save_weights": {"model_id": ID, "seq_id": SEQ, "path": ID, "overwrite": Field(FLAG, False), **NOTES},
    "save_weights_for_sampler": {"model_id": ID, "seq_id": SEQ, "path": Field(TEXTS),
                                 "sampling_session_seq_id": NUMBERED, "kind": Field(TEXTS, "snapshot"), **NOTES},
    "load_weights": {"model_id": Field(TEXTS), "seq_id": NUMBERED, "session_id": Field(TEXTS),
                     "model_seq_id": NUMBERED, "base_model": Field(TEXTS), "path": ID,
                     "optimizer": Field(FLAG, REQUIRED), "optimizer_config": Field(TABLE), **NOTES},
    "create_sampling_session": {"session_id": ID, "sampling_session_seq_id": SEQ, "base_model": Field(TEXTS),
                                "model_path": Field(TEXTS), "type": Field(ANY)},
    "asample": {"sampling_session_id": ID, "seq_id": SEQ, "num_samples": Field(INTEGER, 1),
                "prompt": Field(TABLE, REQUIRED), "sampling_params": Field(TABLE, REQUIRED),
                "prompt_logprobs": Field(FLAG, False), "topk_prompt_logprobs": Field(INTEGER, 0),
                "topk_sample_logprobs": Field(INTEGER, 0), "prompt_alt_tokens_k": Field(INTEGER, 0),
                "prompt_logprobs_last_n": Field(INTEGER), "record_stability_info": Field(FLAG, False),
                "type": Field(ANY)},
    "sampling_params": {"max_tokens": Field(INTEGER), "seed": Field(INTEGER), "stop": Field(ANY),
                        "temperature": Field(NUMBER, 1.0), "top_k": Field(INTEGER, -1), "top_p": Field(NUMBER, 1.0)},
    "prompt": {"chunks": Field(LIST, REQUIRED), "type": Field(ANY)},
    "image": {"data": ID, "format": Field(TEXTS), "expected_tokens": Field(INTEGER), "type": Field(ANY)},
    "retrieve_future": {"request_id": ID, "allow_metadata_only": Field(FLAG, False)},
    "cancel_future": {"request_id": ID},
}
# loss -> why it is not served, and the one flag of a recipe that changes it
UNKNOWN_LOSSES = {
    "stable_reinforce": " (its objective is not published; a recipe takes loss_fn=importance_sampling in its place)"}
# field -> (value that asks for nothing, what to do instead), of asample
NOT_SERVED = {"topk_prompt_logprobs": (0, "leave it out"), "topk_sample_logprobs": (0, "leave it out"),
              "prompt_alt_tokens_k": (0, "leave it out"),
              "record_stability_info": (False, "train with loss_fn=importance_sampling or ppo")}


def parse(body: bytes) -> dict:
    """Parses a JSON object. Raises Refused (400) for other bodies, and for numbers that are not finite."""
    try:
        found = json.loads(body, parse_constant=_finite, parse_float=_finite)
        if SURROGATE.search(body):
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise Refused(400, f"the body is no JSON: {str(e)[:200]}") from None
    if not isinstance(found, dict):
        raise Refused(400, "the body is no JSON object")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(found := float(text)):
        raise ValueError(f"{text[:40]} is no number of JSON, or beyond float64")
    return found


def read(kind: str, body: dict, where: str = "") -> dict:
    """Returns the fields of a body with their defaults, by name.

    kind: name of a table of BODIES. where: prefix of error messages; "" = kind.

    Raises Refused (422) naming field, value and remedy: for an unknown or missing field, another type, a number out of
    bounds, notes that are too long."""
    fields, where = BODIES[kind], where or kind
    for name, value in body.items():
        if name not in fields and value is not None:
            raise Refused(422, f"{where}: the field {name!r} is not known here, and nothing is ignored; leave it out "
                          f"(known: {', '.join(fields)})")
    out = {}
    for name, field in fields.items():
        value = body.get(name)
        if value is None:
            if field.default is REQUIRED:
                raise Refused(422, f"{where}.{name} is missing; send {WORDS.get(field.kind, 'a value')}")
            out[name] = field.default
            continue
        bounded = field.kind in (INTEGER, NUMBER)
        wrong = bounded and isinstance(value, bool) or not isinstance(value, field.kind)
        if wrong or bounded and not field.low <= value < field.high:
            bounds = f" from {field.low:.0f} to below {field.high:.0f}" * (not wrong)
            raise Refused(422, f"{where}.{name}={str(value)[:80]!r}: expected {WORDS[field.kind]}{bounds}")
        if name in ("user_metadata", "display_name", "tags") and len(json.dumps(value)) > MOST_NOTES:
            raise Refused(422, f"{where}.{name} has more than {MOST_NOTES} characters: shorten it")
        out[name] = value
    return out


def lora_options(config: dict, seed: int, leave_out: bool) -> LoraOptions:
    """Returns the adapter that a lora_config describes. Raises Refused (422) for a field that `read` refuses.

    Args:
      config: the lora_config of a body.
      seed: uint32 for a config that names none; its own is taken modulo 2^32.
      leave_out: train_unembed=True trains no output matrix.
    """
    c = read("lora_config", config)
    own = seed if c["seed"] is None else c["seed"] % 2**32
    return LoraOptions(c["rank"], own, c["train_attn"], c["train_mlp"], c["train_unembed"] and not leave_out)


def check_optimizer(config: dict | None) -> None:
    """Raises Refused (422) for an optimizer_config other than {"type": "adamw"} or None."""
    if config is not None and config != {"type": "adamw"}:
        raise Refused(422, f"optimizer_config={config!r}: this server has adamw; leave it out")


def adam_settings(body: dict) -> AdamSettings:
    """Returns the settings of an optim_step, from a body that `read` has checked.

    Raises Refused (422) for optimizer_params, for adam_params that `read` refuses, for numbers below 0, and for betas
    that are not below 1."""
    if body["optimizer_params"] is not None:
        raise Refused(422, f"optim_step.optimizer_params.type={body['optimizer_params'].get('type')!r}: this server "
                      "has AdamW; send tinker.AdamParams")
    found = AdamSettings(**read("adam_params", body["adam_params"] or {}))
    for name, value in found._asdict().items():
        high = 1.0 if name in ("beta1", "beta2") else math.inf
        if not (0 <= value < high):
            raise Refused(422, f"adam_params.{name}={value}: must be at least 0" + " and below 1" * (high == 1.0))
    return found


# ---- data of a loss


def batch(data, loss_fn: str, config: dict, longest: int, vocab: int, sight: Sight | None = None) -> Batch:
    """Returns the data of a forward_backward as the trainer takes them. Raises Refused (422) naming datum, field and
    value.

    Weights of a datum are 1 if it sends none; log-probs and advantages that the loss does not read are 0.

    Args:
      data: wire.Datum list.
      loss_fn: name of API_LOSSES. config: option of the loss -> number, at least 0.
      longest: most tokens of a sequence, the last target included. vocab: ids are below it.
      sight: service.images.Sight, which reads images; None = none are served.
    """
    loss = API_LOSSES.get(loss_fn)
    if loss is None:
        why = UNKNOWN_LOSSES.get(loss_fn, "")
        raise Refused(422, f"loss_fn={loss_fn!r} is not served here{why}: choose {', '.join(API_LOSSES)}, or compute "
                      "any loss of log-probs with forward_backward_custom")
    bounds = dict(loss.thresholds)
    for name, value in config.items():
        if name not in bounds:
            known = f"it has {', '.join(bounds)}" if bounds else "it has no options"
            raise Refused(422, f"loss_fn_config.{name}={value!r}: not an option of {loss_fn}; {known}")
        if isinstance(value, str) or not is_finite(value) or value < 0:
            raise Refused(422, f"loss_fn_config.{name}={value!r}: must be a number of at least 0")
        bounds[name] = value
    if missing := [name for name, value in bounds.items() if value is None]:
        raise Refused(422, f"loss_fn_config.{missing[0]} is missing: {loss_fn} needs it, such as "
                      f"loss_fn_config={{{missing[0]!r}: 0.05}}")
    if not data:
        raise Refused(422, "data is empty: send at least one datum")
    low, high = (*bounds.values(), 0.0, 0.0)[:2]
    tokens, targets, columns, places = [], [], {name: [] for name in COLUMNS}, []
    for i, datum in enumerate(data):
        seen, its_places = expanded(datum.tokens, datum.images, sight, f"data[{i}].model_input")
        datum, count = datum._replace(tokens=seen), len(seen)
        places.append(its_places)
        own = _datum(datum, f"data[{i}]", loss_fn, loss.tensors, longest, vocab)
        tokens.append(datum.tokens)
        targets.append(own.pop("target_tokens").astype(np.int32))
        own = {"sampled": own.get("logprobs", np.zeros(count)), "advantage": own.get("advantages", np.zeros(count)),
               "weight": own.get("weights", np.ones(count)), "loss": np.full(count, loss.number),
               "low": np.full(count, low), "high": np.full(count, high),
               "marked": own.get("sequence_ratio_mask", np.zeros(count)) != 0}
        for name in COLUMNS:
            columns[name].append(own[name])
    return Batch(tokens, targets, columns, sight and sight.pictures(places))


def _datum(datum, where: str, loss_fn: str, needed, longest: int, vocab: int) -> dict[str, np.ndarray]:
    """Returns the checked tensors of one datum, [N] each."""
    count, names = len(datum.tokens), ("target_tokens", *needed, "weights")
    if not 1 <= count < longest:
        raise Refused(422, f"{where}.model_input has {count} tokens: this server trains 1 to {longest - 1} and a last "
                      "target (max_context_length); shorten it, or start the server with a larger "
                      "--max-length")
    _check_ids(datum.tokens, vocab, f"{where}.model_input")
    out = {}
    for name in datum.tensors:
        if name not in names:
            raise Refused(422, f"{where}.loss_fn_inputs has {name!r}: {loss_fn} reads {', '.join(names)}; leave it out")
    for name in names:
        own = datum.tensors.get(name)
        if own is None:
            if name == "weights":
                continue
            raise Refused(422, f"{where}.loss_fn_inputs.{name} is missing: {loss_fn} needs it")
        if own.shape != (count,):
            more = "; several targets a position are not served yet" * (own.ndim == 2)
            raise Refused(422, f"{where}.loss_fn_inputs.{name} has the shape {list(own.shape)}: expected [{count}], "
                          f"one number for each token of model_input{more}")
        if name == "target_tokens":
            if own.dtype.kind != "i":
                raise Refused(422, f"{where}.loss_fn_inputs.target_tokens is {own.dtype}: send int64")
            _check_ids(own, vocab, f"{where}.loss_fn_inputs.target_tokens")
        elif not np.isfinite(own).all():
            at = int(np.flatnonzero(~np.isfinite(own))[0])
            raise Refused(422, f"{where}.loss_fn_inputs.{name}[{at}]={own[at]}: must be finite")
        if name == "sequence_ratio_mask" and not own.any():
            raise Refused(422, f"{where}.loss_fn_inputs.{name} marks no token: {loss_fn} needs at least one, of which "
                          "the sequence's ratio is the mean")
        out[name] = own
    return out


def _check_ids(ids: np.ndarray, vocab: int, where: str) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab):
        at = int(np.flatnonzero((ids < 0) | (ids >= vocab))[0])
        raise Refused(422, f"{where}[{at}]={ids[at]}: token ids are 0 to {vocab - 1}; is it another model's tokenizer?")


# ---- sampling


class Sample(NamedTuple):
    """A checked asample.

    Attributes:
      prompt: [P] int32, with image tokens. count: samples. seed: of all of them, None = by the request's name.
      scores: return log-probs of the prompt. last: of its last tokens alone; None = of all.
      pictures: the prompt's images; None = there is none.
    """

    prompt: np.ndarray  # [P] int32
    count: int
    params: SamplingParams
    seed: int | None
    scores: bool
    last: int | None
    pictures: Pictures | None = None


def sample(body: dict, eos_ids: tuple[int, ...], longest: int, vocab: int, has_text: bool,
           sight: Sight | None = None) -> Sample:
    """Returns the sampling request of a body that `read` has checked. Raises Refused (422), naming the field, for
    options that are not served, values out of bounds, ids beyond the vocabulary, and a prompt that is too long.

    At most the tokens that are left of `longest` after the prompt are sampled; max_tokens may ask for more.

    Args:
      eos_ids: the model's end tokens, which end a sample as those of the request do; none does with stop=[].
      longest: most tokens of prompt and sample. vocab: ids are below it. has_text: whether stop texts can be searched.
      sight: service.images.Sight, which reads images; None = none are served.
    """
    for name, (nothing, remedy) in NOT_SERVED.items():
        if body[name] != nothing:
            raise Refused(422, f"asample.{name}={body[name]!r} is not served here; {remedy}")
    prompt, places = prompt_tokens(body["prompt"], longest, vocab, sight)
    if not 1 <= body["num_samples"] <= MOST_SAMPLES:
        raise Refused(422, f"asample.num_samples={body['num_samples']}: must be 1 to {MOST_SAMPLES}")
    last = body["prompt_logprobs_last_n"]
    if last is not None and not (body["prompt_logprobs"] and 1 <= last < len(prompt)):
        raise Refused(422, f"asample.prompt_logprobs_last_n={last}: must be 1 to {len(prompt) - 1}, with "
                      "prompt_logprobs")
    p = read("sampling_params", body["sampling_params"])
    room = longest - len(prompt)
    wanted = room if p["max_tokens"] is None else p["max_tokens"]
    if wanted < 1:
        raise Refused(422, f"sampling_params.max_tokens={wanted}: must be at least 1")
    texts, ids = _stops(p["stop"], eos_ids, vocab)
    if texts and not has_text:
        raise Refused(422, f"sampling_params.stop={list(texts)!r}: the server has no tokenizer; send token ids")
    try:
        params = SamplingParams(float(p["temperature"]), float(p["top_p"]), -1 if p["top_k"] == 0 else p["top_k"],
                                max_new_tokens=min(wanted, room), stop=texts, stop_token_ids=ids)
    except ValueError as e:
        raise Refused(422, f"asample: {e}") from None
    return Sample(prompt, body["num_samples"], params, p["seed"], body["prompt_logprobs"], last,
                  sight and sight.pictures([places]))


def prompt_tokens(prompt: dict, longest: int, vocab: int, sight: Sight | None) -> tuple[np.ndarray, Places | None]:
    """Returns (the token ids [P] int32 of a prompt's chunks, the Places of its images; None without images).

    Args:
      longest: ids and image tokens are fewer than it. vocab: ids are below it. sight: reads images; None = refuses
        them.

    Raises Refused (422) for other chunks, ids out of range, and a prompt that is empty or too long."""
    parts, images = [], []
    chunks = read("prompt", prompt)["chunks"]
    if len(chunks) > longest:
        raise Refused(422, f"prompt.chunks has {len(chunks)} chunks: this server serves at most {longest} tokens")
    for k, chunk in enumerate(chunks):
        if isinstance(chunk, dict) and chunk.get("type") == "image":
            images.append(_image(chunk, len(parts), f"prompt.chunks[{k}]"))
            continue
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            kind = chunk.get("type") if isinstance(chunk, dict) else chunk
            raise Refused(422, f"prompt.chunks[{k}] is of the type {kind!r}: this server takes encoded_text and image")
        tokens = chunk.get("tokens")
        if not isinstance(tokens, list) or not all(type(t) is int for t in tokens):
            raise Refused(422, f"prompt.chunks[{k}].tokens: expected a list of whole numbers")
        parts += tokens
    _check_ids(np.array(parts, object), vocab, "prompt")
    tokens, places = expanded(np.array(parts, np.int32), tuple(images), sight, "prompt")
    if not 1 <= len(tokens) < longest:
        raise Refused(422, f"prompt has {len(tokens)} tokens: this server serves 1 to {longest - 1}, so that one can "
                      "be sampled; shorten it, or start the server with a larger --max-length")
    return tokens, places


def _image(chunk: dict, at: int, where: str) -> ImageChunk:
    """Returns an image chunk of JSON, whose data are base64."""
    b = read("image", chunk, where)
    try:
        return ImageChunk(at, base64.b64decode(b["data"], validate=True), b["expected_tokens"])
    except ValueError as e:
        raise Refused(422, f"{where}.data is no base64: {e}") from None


def _stops(stop, eos_ids, vocab: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns (stop texts, end tokens): the model's end tokens, without any for [] (the protocol's "nothing ends")."""
    if stop is None:
        return (), eos_ids
    if stop == []:
        return (), ()
    stops = [stop] if isinstance(stop, (str, int)) else stop
    if not isinstance(stops, list) or len(stops) > MOST_STOPS:
        raise Refused(422, f"sampling_params.stop: expected at most {MOST_STOPS} texts or token ids")
    texts = tuple(s for s in stops if isinstance(s, str) and 0 < len(s) <= MOST_STOP)
    ids = tuple(s for s in stops if type(s) is int)
    if len(texts) == len(stops):
        return texts, eos_ids
    if len(ids) == len(stops):
        _check_ids(np.array(ids, object), vocab, "sampling_params.stop")
        ids = tuple(dict.fromkeys((*ids, *eos_ids)))
        if len(ids) > ENDS:
            raise Refused(422, f"sampling_params.stop has {len(stops)} token ids: at most {ENDS - len(eos_ids)} are "
                          "served")
        return (), ids
    raise Refused(422, f"sampling_params.stop: expected texts of 1 to {MOST_STOP} characters, or token ids, not both")
