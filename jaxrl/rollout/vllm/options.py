"""What the options of rollout.servers and rollout.vllm come to. Imports neither jax nor anything of vLLM's."""

from __future__ import annotations

import re
from pathlib import Path

from jaxrl.config.lengths import longest_sequence

LOOPBACK = re.compile(r"(127\.[0-9.]+|localhost|\[?::1\]?)")
OWN_MEMORY, SHARED_MEMORY = 0.85, 0.45  # of a GPU, for a server with devices of its own and for one beside the trainer
BOTH_MEMORY = 0.9  # of a GPU that jax and a vLLM server share side by side
PROBE_PROMPT, PROBE_TOKENS = 8, 16
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that a server can be started for (MaxLoRARanks in vllm/config)


def server_folder(servers) -> Path | None:
    """The folder whose files name the servers, where rollout.servers is one (a path from / or .)."""
    return Path(servers[0]) if len(servers) == 1 and servers[0][:1] in ("/", ".") else None


def listed(folder: Path) -> list[str]:
    """The URLs in the files of a folder, in the files' order; files that begin with a dot are not ready yet."""
    files = sorted(p for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []
    return [url.rstrip("/") for file in files for url in file.read_text("utf-8").split()]


def memory_fraction(config) -> float:
    """Share of a GPU's memory that a server of ours takes."""
    own = config.rollout.vllm.devices and config.rollout.placement != "colocated"
    return config.rollout.vllm.memory_fraction or (OWN_MEMORY if own else SHARED_MEMORY)


def longest(config) -> int:
    """Most tokens of a prompt and its completion."""
    return longest_sequence(config, max(config.rollout.max_new_tokens, config.eval.max_new_tokens))


def served(config) -> int:
    """Longest sequence of a server of ours: that of the run, or the publisher's probe."""
    return config.rollout.vllm.max_model_len or max(longest(config), PROBE_PROMPT + 1)


def lora_rank(rank: int) -> int:
    """The --max-lora-rank of a server for adapters up to a rank; 0 where none serves it."""
    return next((r for r in LORA_RANKS if r >= rank), 0)
