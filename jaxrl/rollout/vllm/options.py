"""Values derived from rollout.servers and rollout.vllm. Imports neither jax nor vLLM."""

from __future__ import annotations

import re
from pathlib import Path

from jaxrl.config.lengths import longest_sequence

LOOPBACK = re.compile(r"(127\.[0-9.]+|localhost|\[?::1\]?)")
# share of a GPU, for a server with its own devices and for one that shares the trainer's
OWN_MEMORY, SHARED_MEMORY = 0.85, 0.45
BOTH_MEMORY = 0.9  # share of a GPU that jax and a vLLM server use together
PROBE_PROMPT, PROBE_TOKENS = 8, 16
PROBE_IMAGES = ((3, 2), (2, 5))  # rows and columns of image tokens in a probe's prompt, beside PROBE_PROMPT of text
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that a server can be started for (MaxLoRARanks in vllm/config)


def server_folder(servers) -> Path | None:
    """Returns the folder whose files name the servers, if rollout.servers is one (a path from / or .), else None."""
    return Path(servers[0]) if len(servers) == 1 and servers[0][:1] in ("/", ".") else None


def url_host(url: str) -> str:
    """Returns the host of http://host:port or https://host:port, an IPv6 address in its brackets; "" for another
    text."""
    address = re.fullmatch(r"https?://(\[[^]]+\]|[^/:]+)(:[0-9]+)?/?", url)
    return address[1] if address else ""


def read_urls(folder: Path) -> list[str]:
    """Returns the URLs in the files of a folder, each once, in the order of the files' names, several per file if white
    space separates them; [] without the folder. Files that begin with a dot are not ready yet."""
    files = sorted(p for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []
    return list(dict.fromkeys(url.rstrip("/") for file in files for url in file.read_text("utf-8").split()))


def memory_fraction(config) -> float:
    """Returns the share (0 to 1) of a GPU's memory that one of our servers uses: rollout.vllm.memory_fraction, or by
    default OWN_MEMORY with rollout.vllm.devices unless colocated, else SHARED_MEMORY."""
    own = config.rollout.vllm.devices and config.rollout.placement != "colocated"
    return config.rollout.vllm.memory_fraction or (OWN_MEMORY if own else SHARED_MEMORY)


def longest_request(config) -> int:
    """Returns the largest number of tokens of a prompt and its completion, in training or evaluation."""
    return longest_sequence(config, max(config.rollout.max_new_tokens, config.eval.max_new_tokens))


def max_model_len(config) -> int:
    """Returns --max-model-len of our servers, in tokens: rollout.vllm.max_model_len, by default the longest sequence of
    the run, but at least what the publisher's probe and one sampled token take."""
    probe = PROBE_PROMPT + sum(rows * columns for rows, columns in PROBE_IMAGES)
    return max(config.rollout.vllm.max_model_len or longest_request(config), probe + 1)


def lora_rank(rank: int) -> int:
    """Returns the --max-lora-rank of a server for adapters up to a rank; 0 if none serves it."""
    return next((r for r in LORA_RANKS if r >= rank), 0)
