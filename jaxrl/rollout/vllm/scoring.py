"""Log-probs of given tokens from running vLLM servers: any `vllm serve MODEL`, without jaxrl's plugin.

They are raw, at temperature 1, from `prompt_logprobs` of the completions endpoint; a
request samples one token, which is dropped. As JSON that is some 80 bytes per token and
log-prob. (vllm/entrypoints/openai/completion/protocol.py of 0.32)
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx
import numpy as np

from jaxrl.errors import ConfigError, RunStopped

MAX_CONCURRENT, TRIES = 16, 4  # concurrent requests per server; tries per request
UNREADABLE = ValueError, LookupError, TypeError, AttributeError  # of a reply in another form than expected


class TokenScores(NamedTuple):
    """Log-probs of a sequence of n tokens at temperature 1, in nats; `logprobs` is 0 where `ids` is -1."""

    own: np.ndarray       # [n] float32: log-prob of each; 0 at the first, which nothing predicts
    ids: np.ndarray       # [n, top] int32: the most probable tokens, the highest first; -1 = none
    logprobs: np.ndarray  # [n, top] float32


class PromptScorer:
    """Scores sequences on servers in turn.

    Args:
      urls: http://host:port of servers of one model; $VLLM_API_KEY is sent if set.
      timeout: seconds of one request.
      longest: tokens of the longest sequence.

    Attributes:
      model: name of the model that the servers serve.

    Raises:
      ConfigError: a server does not reply, has another model, or takes shorter sequences only.
    """

    def __init__(self, urls, timeout: float, longest: int):
        self.urls = [url.rstrip("/") for url in urls]
        key = os.environ.get("VLLM_API_KEY", "")
        self._http = httpx.Client(timeout=timeout, headers={"Authorization": f"Bearer {key}"} if key else {},
                                  trust_env=False)
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT * len(self.urls), "teacher")
        served = [self._model(url, longest) for url in self.urls]
        if len(set(served)) > 1:
            raise ConfigError(f"teacher.servers={tuple(urls)}: they serve different models, {sorted(set(served))}")
        self.model = served[0]

    def _model(self, url: str, longest: int) -> str:
        try:
            reply = self._http.get(f"{url}/v1/models")
            reply.raise_for_status()
            row = reply.json()["data"][0]
            model, most = row["id"], row.get("max_model_len") or longest + 1
        except (httpx.HTTPError, *UNREADABLE) as e:
            raise ConfigError(f"teacher.servers entry {url!r} does not reply like a vLLM server ({type(e).__name__}: "
                              f"{e}); start it with vllm serve, or name another") from None
        if most <= longest:
            raise ConfigError(f"teacher.servers entry {url!r} takes sequences of {most} tokens; the "
                              f"longest here has {longest}, and one more is sampled: raise its --max-model-len")
        return model

    def score(self, sequences, top: int) -> list[TokenScores]:
        """Returns the TokenScores of sequences, in order. Servers take them in turn; at most MAX_CONCURRENT requests
        times the number of servers run at a time, more than MAX_CONCURRENT of them on a server that is slower.

        sequences: token ids [n] of each. top: number of most probable tokens to return, at most the servers'
        --max-logprobs. Raises RunStopped if a server fails TRIES times or refuses a request.
        """
        jobs = [(self.urls[i % len(self.urls)], tokens, top) for i, tokens in enumerate(sequences)]
        return list(self._threads.map(lambda job: self._one(*job), jobs))

    def _one(self, url: str, tokens, top: int) -> TokenScores:
        body = {"model": self.model, "prompt": [int(t) for t in tokens], "max_tokens": 1, "temperature": 0.0,
                "prompt_logprobs": top}
        for attempt in range(TRIES):
            try:
                reply = self._http.post(f"{url}/v1/completions", json=body)
                if 400 <= reply.status_code < 500:
                    raise RunStopped(f"teacher.servers entry {url!r} refuses a request of {len(tokens)} tokens with "
                                     f"distill.top_k={top}: {reply.text[:300]} (its --max-logprobs must reach top_k)")
                reply.raise_for_status()
                return parse_scores(tokens, reply.json()["choices"][0]["prompt_logprobs"], top)
            except (httpx.HTTPError, *UNREADABLE) as e:
                if attempt == TRIES - 1:
                    raise RunStopped(f"teacher.servers entry {url!r} failed {TRIES} times: {type(e).__name__}: {e}; "
                                     "bring it back and resume") from e
        raise AssertionError

    def close(self) -> None:
        """Cancels waiting requests and closes the HTTP client."""
        self._threads.shutdown(cancel_futures=True)
        self._http.close()


def parse_scores(tokens, prompt_logprobs: list, top: int) -> TokenScores:
    """Returns the TokenScores of a reply's `prompt_logprobs`. Raises ValueError for none, another number of tokens or
    one without log-probs, KeyError where those of the token itself are missing.

    tokens: [n] int token ids. top: K, columns of the result. prompt_logprobs: per token None (the first), or
    {id: {"logprob", "rank"}} of the most probable tokens and the token itself."""
    if not isinstance(prompt_logprobs, list):
        raise ValueError(f"prompt_logprobs is {type(prompt_logprobs).__name__}, expected a list")
    if len(prompt_logprobs) != len(tokens):
        raise ValueError(f"{len(prompt_logprobs)} log-probs for {len(tokens)} tokens")
    own = np.zeros(len(tokens), np.float32)
    ids, logprobs = np.full((len(tokens), top), -1, np.int32), np.zeros((len(tokens), top), np.float32)
    for t, entry in enumerate(prompt_logprobs):
        if entry is None and t == 0:
            continue
        if entry is None:
            raise ValueError(f"no log-probs for token {t}")
        own[t] = entry[str(int(tokens[t]))]["logprob"]
        ranked = sorted(entry.items(), key=lambda item: item[1]["rank"])[:top]
        for rank, (token, one) in enumerate(ranked):
            ids[t, rank], logprobs[t, rank] = int(token), one["logprob"]
    return TokenScores(own, ids, logprobs)
