"""An engine of someone else's: a Qwen2 decoder in numpy that runs the whole model for every token it samples.

Written against the text of jaxrl/rollout/protocol.py alone. It keeps a model of its own, made of the HF tensors of
jaxrl.rollout.weights, and works inside `poll`, one token of every running request at a time.

    rollout.engine=tests/helpers/numpy_engine.py:NumpyEngine
"""

import collections
import dataclasses
import time

import numpy as np

from jaxrl.rollout import Engine, EngineInfo, Health, Result
from jaxrl.rollout.protocol import check_ids, check_request
from jaxrl.rollout.stops import find_stop, text_decoder
from jaxrl.rollout.weights import chunks


@dataclasses.dataclass
class Sample:
    """A request under way, and its tokens."""

    request: object
    tokens: list = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    log_kept_mass: list = dataclasses.field(default_factory=list)
    versions: list = dataclasses.field(default_factory=list)

    def result(self, finish, length=None) -> Result:
        columns, types = (self.tokens, self.logprobs, self.log_kept_mass, self.versions), ("i4", "f4", "f4", "i4")
        return Result(self.request.id, *(np.array(c[:length], t) for c, t in zip(columns, types, strict=True)), finish,
                      self.request.seed)


class NumpyEngine(Engine):
    info = EngineInfo(holds=True, sleeps=True, exact=True)

    def __init__(self, context):
        config = context.config
        self.model, self.hf, self.ends = context.model, context.hf_config, tuple(context.eos_ids)
        self.longest = config.data.max_prompt_tokens
        self.total = self.longest + max(config.rollout.max_new_tokens, config.eval.max_new_tokens)
        self.slots = config.rollout.slots or 16
        self.decode = text_decoder(context.tokenizer) if context.tokenizer is not None else None
        self.weights, self.version, self.closed, self.held = None, -1, False, False
        self.waiting, self.running, self.done = collections.deque(), [], []

    def submit(self, requests):
        self.check_open()
        for r in requests:
            check_request(r, self.longest, self.total, self.hf["vocab_size"], self.decode is not None)
        check_ids(requests, {s.request.id for s in (*self.waiting, *self.running)})
        self.waiting += [Sample(r) for r in requests]

    def poll(self, deadline_s):
        self.check_open()
        end = time.monotonic() + deadline_s
        while self.running or (self.waiting and not self.held):
            if self.weights is None:
                raise RuntimeError("no weights yet; call publish(params, version) before polling")
            while self.waiting and not self.held and len(self.running) < self.slots:
                self.running.append(self.waiting.popleft())
            for sample in list(self.running):
                self.advance(sample)
            if self.done or time.monotonic() >= end:
                break
        done, self.done = self.done, []
        return done

    def abort(self, ids=None):
        self.check_open()
        for samples in (self.running, self.waiting):
            for sample in [s for s in samples if ids is None or s.request.id in ids]:
                samples.remove(sample)
                self.done.append(sample.result("abort"))

    def hold(self, on):
        self.check_open()
        self.held = on

    def publish(self, params, version):
        self.check_open()
        self.weights = dict(pair for chunk in chunks(self.model, params, "float32", 1_000_000) for pair in chunk)
        self.version = version

    def sleep(self):
        self.check_open()
        self.weights = None

    def health(self):
        return Health(self.weights is not None, self.closed, self.version, len(self.waiting), len(self.running))

    def close(self):
        self.closed, self.weights = True, None

    def check_open(self):
        if self.closed:
            raise RuntimeError("the engine is closed")

    # ---- one token

    def advance(self, sample):
        r, p = sample.request, sample.request.sampling
        logits = forward(self.weights, self.hf, np.concatenate([r.prompt, sample.tokens]).astype(int)).astype(float)
        ends = (*self.ends, *p.stop_token_ids)
        token, logprob, kept = draw(logits, r, sample.tokens, ends)
        for column, value in zip((sample.tokens, sample.logprobs, sample.log_kept_mass, sample.versions),
                                 (token, logprob, kept, self.version), strict=True):
            column.append(value)
        count = len(sample.tokens)
        found = find_stop(self.decode, sample.tokens, 1, p.stop, p.min_new_tokens) if p.stop else None
        if found:
            self.finish(sample, "stop", found[0] if p.keep_stop else found[1])
        elif token in ends:
            self.finish(sample, "stop")
        elif count >= min(p.max_new_tokens, self.total - len(r.prompt)):
            self.finish(sample, "length")

    def finish(self, sample, reason, length=None):
        self.running.remove(sample)
        self.done.append(sample.result(reason, length))


def draw(logits, request, before, ends):
    """(token, log-prob over the whole vocabulary, log of the mass of the support), as SamplingParams and Result say."""
    p, greedy = request.sampling, request.sampling.temperature == 0
    scale = 1.0 if greedy else p.temperature
    logp, q = log_softmax(logits / scale), logits.copy()
    seen = np.unique(np.concatenate([request.prompt, before]).astype(int))
    q[seen] = np.where(q[seen] > 0, q[seen] / p.repetition_penalty, q[seen] * p.repetition_penalty)
    q -= p.frequency_penalty * np.bincount(np.asarray(before, int), minlength=len(q))
    if len(before) < p.min_new_tokens:
        q[list(ends)] = -np.inf
    if greedy:
        token = int(q.argmax())
        return token, logp[token], 0.0
    inside = support(log_softmax(q / scale), p)
    mass = np.where(inside, np.exp(log_softmax(q / scale)), 0.0).cumsum()
    uniform = np.random.Generator(np.random.Philox(key=np.array([request.seed, len(before)], np.uint64))).random()
    token = int(np.searchsorted(mass, uniform * mass[-1], side="right"))
    kept = min(0.0, float(np.log(np.exp(logp[inside]).sum()))) if p.truncated and not inside.all() else 0.0
    return token, logp[token], kept


def support(logp, p):
    """[V] bool: what min_p, then top_k, then top_p leave; ties with the last one stay."""
    inside = logp > -np.inf
    if p.min_p > 0:
        inside &= logp >= logp.max() + np.log(p.min_p)
    if p.top_k > 0:
        inside &= logp >= np.sort(logp)[-min(p.top_k, len(logp))]
    if p.top_p < 1:
        order = np.argsort(-np.where(inside, logp, -np.inf), kind="stable")
        mass = np.where(inside, np.exp(logp), 0.0)[order].cumsum()
        inside &= logp >= logp[order[np.searchsorted(mass, p.top_p * mass[-1])]]
    return inside


def log_softmax(x):
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


# ---- the model, as transformers' Qwen2 has it


def forward(w, hf, tokens):
    """[V] float32 logits of the token after `tokens` [L]."""
    heads, kv_heads, eps = hf["num_attention_heads"], hf["num_key_value_heads"], hf.get("rms_norm_eps", 1e-6)
    size, length = hf["hidden_size"] // heads, len(tokens)
    turn = rotary(length, size, hf.get("rope_theta", 10000.0))
    later = np.triu(np.full((length, length), -np.inf, np.float32), 1)
    x = w["model.embed_tokens.weight"][tokens]
    for i in range(hf["num_hidden_layers"]):
        def project(name, y, i=i):
            found = y @ w[f"model.layers.{i}.{name}.weight"].T
            return found + w.get(f"model.layers.{i}.{name}.bias", np.float32(0))

        h = rms_norm(x, w[f"model.layers.{i}.input_layernorm.weight"], eps)
        q, k, v = (project(f"self_attn.{n}_proj", h).reshape(length, -1, size).swapaxes(0, 1) for n in "qkv")
        q, k = turn(q), turn(k)
        k, v = (np.repeat(a, heads // kv_heads, axis=0) for a in (k, v))
        scores = q @ k.swapaxes(1, 2) / np.float32(np.sqrt(size)) + later
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True)) @ v
        x = x + project("self_attn.o_proj", mixed.swapaxes(0, 1).reshape(length, -1))
        h = rms_norm(x, w[f"model.layers.{i}.post_attention_layernorm.weight"], eps)
        gate = project("mlp.gate_proj", h)
        x = x + project("mlp.down_proj", gate / (1 + np.exp(-gate)) * project("mlp.up_proj", h))
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return rms_norm(x[-1], w["model.norm.weight"], eps) @ head.T


def rms_norm(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * scale


def rotary(length, size, theta):
    """Turns [heads, length, size] by position, halves against each other."""
    angle = np.arange(length)[:, None] / theta ** (np.arange(0, size, 2) / size)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def turn(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    return turn
