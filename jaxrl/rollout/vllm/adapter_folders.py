"""Adapters published separately from the base: vLLM servers keep the base and load a folder of each
version at run time.

The base is sent first, since every update of it drops a server's adapters; after that only adapters are published.
Each version has its own folder and name, because the prefix cache identifies an adapter by name and path.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import NamedTuple

from jaxrl.errors import ConfigError
from jaxrl.models.adapters import peft
from jaxrl.models.adapters.initialization import is_shifted
from jaxrl.models.adapters.selection import table
from jaxrl.rollout.vllm import adapter
from jaxrl.rollout.vllm.options import LORA_RANKS, lora_rank


def required_rank(found) -> int:
    """Returns the --max-lora-rank that a models.adapters.Adapter needs, one of LORA_RANKS; 0 without one. An adapter
    that began as a part of the base needs twice its rank.

    found: the model's Adapter, or None.

    Raises:
      ConfigError: vLLM does not serve such an adapter: whole modules, DoRA, a quantized base or too large a rank."""
    if found is None:
        return 0
    if found.saved:
        raise ConfigError(f"lora.publish=adapter: vLLM serves no modules that were trained whole ({found.saved[0]}, "
                          "lora.modules_to_save); set lora.publish=merged")
    if found.decomposed:
        raise ConfigError("lora.publish=adapter: vLLM serves no DoRA (lora.dora); set lora.publish=merged")
    if found.quantized:
        raise ConfigError(f"lora.publish=adapter: vLLM would hold another base than lora.base={found.quantized}; set "
                          "lora.publish=merged")
    rank = max(t.rank for t in found.targets) * (2 if found.shifted else 1)
    if not lora_rank(rank):
        twice = ", twice that of training since it began as a part of the base" * found.shifted
        raise ConfigError(f"lora.publish=adapter: vLLM serves adapters up to rank {LORA_RANKS[-1]}, not {rank}{twice}; "
                          "set lora.publish=merged, or lower lora.rank")
    return lora_rank(rank)


def configured_rank(options) -> int:
    """Returns the --max-lora-rank from config.lora alone, for servers started before there is a model: the largest rank
    that it names, or that of the folder lora.path, twice that if lora.init takes the adapter from the base; rounded up
    to one of LORA_RANKS. 0 if no server serves it.

    options: config.lora."""
    if options.path:
        config = peft.source(options.path).config
        ranks = (config["r"], *(config.get("rank_pattern") or {}).values())
    else:
        ranks = (options.rank, *table("rank_pattern", options.rank_pattern, int).values())
    return lora_rank(max(ranks) * (2 if is_shifted(options.init) else 1))


class Version(NamedTuple):
    """One version's adapter: its name for requests, its folder, SHA-256 (hex) of its two files and their bytes in
    all."""

    name: str
    path: Path
    digests: list[str]
    size: int


class AdapterFolders:
    """Writes a run's adapters as folders and loads them into servers.

    Args:
      model: with its adapter.
      dtype: of the engine.
      folder: where servers see it.

    Attributes:
      folder: as an absolute path. current: the Version written last, or None. loaded: server URL -> its adapter's name.
    """

    def __init__(self, model, dtype, folder: Path):
        self.model, self.dtype, self.folder = model, dtype, Path(folder).resolve()
        self.loaded: dict[str, str] = {}  # server -> name of the adapter that it has
        self.current: Version | None = None

    def write(self, params, name: str) -> Version:
        """Writes the folder of a version of the adapter and returns its Version; deletes earlier folders, which no
        request uses any more. Writes nothing if the last version has this name.

        params: the policy's parameter tree. name: unique per version."""
        path = self.folder / name
        if self.current is None or self.current.name != name:
            peft.write_plain(path, self.model, params, self.dtype)
            files = [(path / file).read_bytes() for file in (peft.CONFIG, peft.WEIGHTS)]
            self.current = Version(name, path, [hashlib.sha256(f).hexdigest() for f in files], sum(map(len, files)))
            for old in self.folder.iterdir():
                if old.name != name:
                    shutil.rmtree(old, ignore_errors=True)
        return self.current

    def load(self, control, version: Version, weight_version: str) -> None:
        """Loads an adapter into one server in place of the previous one, and sets the version of its weights.

        control: the server's adapter.Control. version: of `write`. weight_version: the text that the server's tokens
        carry from then on."""
        control.load_adapter(version.name, str(version.path))
        if (old := self.loaded.get(control.url, version.name)) != version.name:
            control.unload_adapter(old)
        self.loaded[control.url] = version.name
        control.update_version(weight_version)

    def check(self, control) -> str:
        """Returns "" if every worker of a server reads the files written last and holds an adapter, else what is wrong.
        Raises Refused if the server refuses the call.

        control: the server's adapter.Control."""
        version = self.current
        if version is None:
            return "no adapter has been written"
        try:
            for digests, loaded in control.adapter_digests(str(version.path)):
                if digests != version.digests:
                    return f"its {version.path} holds other files"
                if not loaded:
                    return "it holds no adapter"
        except adapter.ServerError as e:
            return f"it cannot read {version.path}: {e}"
        return ""

    def close(self) -> None:
        """Deletes all folders."""
        shutil.rmtree(self.folder, ignore_errors=True)
