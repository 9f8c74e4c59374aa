"""Shared by the rollout tests: a tiny model whose distributions are far from flat, its tokenizer, its scorer."""

import atexit
import dataclasses
import functools
import json
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from jaxrl import models
from jaxrl.config.load import default_config
from jaxrl.rollout import EngineContext, Request, SamplingParams, make_engine
from jaxrl.rollout.sampling import lanes_for, random_words
from jaxrl.rollout.vllm import adapter
from jaxrl.rollout.vllm.process import ServerProcess, free_port

VOCAB, END = 64, 1
HF = dict(model_type="qwen2", vocab_size=VOCAB, hidden_size=128, intermediate_size=48, num_hidden_layers=2,
          num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=256,
          rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act="silu")  # head size 32: vLLM's CPU attention serves it


@functools.cache
def model():
    return models.build(HF, compute_dtype=jnp.float32, scan_layers=False)


def random_params(m, seed, std):
    """Normal matrices and biases, norms that scale by one; made by numpy, which compiles nothing."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        if path[-1].key == "scale":  # a recurrence's norm scales by its parameter alone, whatever the family's others do
            offset = 0.0 if any(key.key == "recurrent" for key in path) else m.config.norm_offset
            return jnp.full(shape.shape, 1.0 - offset, jnp.float32)
        return jnp.asarray(rng.normal(size=shape.shape) * std, jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(m.init, jax.random.key(0)))


@functools.cache
def params(seed=0):
    """Random weights with a large head, so that probabilities spread over several orders of magnitude."""
    tree = random_params(model(), seed, 0.15)
    tree["head"]["kernel"] = tree["head"]["kernel"] * 3.0
    return tree


@functools.cache
def tokenizer():
    """One token per letter, plus pairs, two byte tokens of 'é', an end token; text is the plain concatenation."""
    words = ["<pad>", "<end>", "<0xC3>", "<0xA9>", " "] + [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words += [x + y for x in "abcdef" for y in "uvwxyz"][:VOCAB - len(words)]
    core = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<pad>")


def ids(*words):
    return tokenizer().convert_tokens_to_ids(list(words))


def config(**rollout):
    cfg = default_config()
    cfg.data.max_prompt_tokens = 20
    cfg.eval.top_p = 0.9  # programs hold all of sampling: requests of the tests use every option
    cfg.rollout.update({"max_new_tokens": 24, "group_size": 4, "decode_steps": 4, "slots": 16, **rollout})
    return cfg


def engine(eos=(END,), mesh=None, publish=True, **rollout):
    made = make_engine(EngineContext(config(**rollout), model(), tokenizer(), mesh, eos, HF))
    if publish:
        made.publish(params(), 0)
    return made


@functools.cache
def vllm_server():
    """URL of a real vLLM server with dummy weights of the tiny model; it ends with the tests."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-server-"))
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], **HF}))
    port = free_port("127.0.0.1")
    command, env = adapter.launch(config(), str(folder), "float32", 64, port, cpu=True, key="")
    process = ServerProcess(command, env, folder / "server.log")
    atexit.register(lambda: (process.stop(), shutil.rmtree(folder)))
    return f"http://127.0.0.1:{port}"


def prompt(seed, length=None):
    rng = np.random.default_rng(seed)
    return rng.integers(4, VOCAB, length or rng.integers(1, 21)).astype(np.int32)


def requests(count, seed=0, prompts=None, **sampling):
    """`count` requests with mixed prompts; `prompts` distinct ones, repeated in order."""
    return [Request(f"r{i}", prompt(1000 * seed + (i if prompts is None else i * prompts // count)),
                    SamplingParams(**{"max_new_tokens": 24, **sampling}), seed=7919 * seed + i) for i in range(count)]


@functools.cache
def _scorer():
    m = model()

    def logits(params, tokens_1xL):
        positions = jnp.arange(tokens_1xL.shape[1])[None]
        hidden = m.hidden(params, tokens_1xL, positions, jnp.ones_like(tokens_1xL), jnp.zeros_like(tokens_1xL))
        return m.logits(params, hidden)[0]

    return jax.jit(logits)


def teacher_logits(prompt_ids, answer, seed=0):
    """Logits [n, V] the full model gives for each answer position, float64."""
    whole = np.zeros(48, np.int32)
    n = len(prompt_ids) + len(answer)
    whole[:n] = np.concatenate([prompt_ids, answer])
    out = np.asarray(_scorer()(params(seed), whole[None]), np.float64)
    return out[len(prompt_ids) - 1:n - 1]


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def support(logits, p: SamplingParams):
    """Oracle of the kept set by sorting: min_p, then top_k, then top_p of the rest; bool [V]."""
    prob = np.exp(log_softmax(logits / p.temperature))
    keep = prob >= p.min_p * prob.max()
    if p.top_k > 0:
        keep &= prob >= np.sort(prob)[-min(p.top_k, len(prob))]
    if p.top_p < 1:
        order = np.argsort(-np.where(keep, prob, -1), kind="stable")
        mass = np.cumsum(np.where(keep, prob, 0)[order]) / prob[keep].sum()
        last = order[int(np.searchsorted(mass, p.top_p))]
        keep &= prob >= prob[last]
    return keep


def redraw(logits, p: SamplingParams, seed, index):
    """The draw repeated in float64: (token, margin), the margin being how far the two uniforms are from a boundary."""
    keep = support(logits, p)
    prob = np.where(keep, np.exp(log_softmax(logits / p.temperature)), 0)
    lanes = lanes_for(len(prob))
    folded = np.pad(prob, (0, -len(prob) % lanes)).reshape(-1, lanes)
    words = np.asarray(random_words(np.array([seed], np.uint32), np.array([index], np.int32)))[0] / 2.0**32

    def pick(weights, u):
        edges = np.cumsum(weights) / weights.sum()
        at = int(np.searchsorted(edges, u, side="right"))
        return at, min(abs(u - edges[at]), abs(u - (edges[at - 1] if at else 0.0)))

    lane, first = pick(folded.sum(0), words[0])
    row, second = pick(folded[:, lane], words[1])
    return row * lanes + lane, min(first, second)


def sampled_logprobs(logits, p: SamplingParams, token, slack=5e-5):
    """Log-probs of the token under the truncated distribution: with the options as they are, and moved by `slack`.

    The support is a step function: where a token lies on its border within the rounding of fp32 logits, the sampler
    and the oracle may differ by that token. A token outside a support has -inf.
    """
    logp = log_softmax(logits / p.temperature)
    out = []
    for sign in (0, -1, 1):
        moved = dataclasses.replace(p, top_p=min(1.0, p.top_p * (1 + sign * slack)) if p.top_p < 1 else 1.0,
                                    min_p=p.min_p * (1 + sign * slack))
        keep = support(logits, moved)
        out.append(logp[token] - np.log(np.exp(logp)[keep].sum()) if keep[token] else -np.inf)
    return out
