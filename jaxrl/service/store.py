"""Saved weights on the disk: one folder for each `tinker://` path, which appears at once and is never half written.

    <folder>/<run>/weights/<name>/           adapter in PEFT's files, optimizer.npz, about.json
    <folder>/<run>/sampler_weights/<name>/   adapter in PEFT's files, about.json

Names are matched against NAME before a path is made of them. Called by service.worker and, to list, by service.routes.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl.service.files import DAMAGED, replace, sync_tree
from jaxrl.service.owners import is_visible
from jaxrl.service.refusals import Refused

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(:train:[0-9]{1,9})?")
KINDS = {"weights": "training", "sampler_weights": "sampler"}  # part of a path -> the protocol's type of a checkpoint
ABOUT, OPTIMIZER = "about.json", "optimizer.npz"


class Address(NamedTuple):
    """Where weights are: a run, a kind of KINDS, and a name within both."""

    run: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @classmethod
    def parse(cls, path: str) -> Address:
        """Parses a path of the form tinker://run/kind/name. Raises Refused (422) for others."""
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in KINDS or not (
                RUN.fullmatch(parts[0]) and NAME.fullmatch(parts[2])):
            raise Refused(422, f"path={path!r}: expected tinker://RUN/{'|'.join(KINDS)}/NAME")
        return cls(*parts)


def check_name(name) -> str:
    """Returns a name for saved weights as it is. Raises Refused (422) if NAME does not match it."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise Refused(422, f"path={name!r}: a name has 1 to 128 letters, digits, '.', '_' and '-', and begins with a "
                      "letter or digit")
    return name


class Store:
    """The folder of saved weights. Raises Refused(404) for addresses that are not there, or another user's.

    Symbolic links in the folder are not followed.
    """

    def __init__(self, folder: Path):
        self.folder = folder.absolute()

    def _of(self, address: Address) -> Path:
        return self.folder / address.run.replace(":", "_") / address.kind / address.name

    def write(self, address: Address, about: dict, write_adapter: Callable[[Path], None], moments=None,
              overwrite: bool = False) -> None:
        """Writes weights, unless the same request did. Raises Refused (422) if the name is taken and not to be
        overwritten.

        Args:
          address: where to; overwrite: replace other weights there.
          about: what `about` returns, JSON; its entries "request" and "owner" name the request and its user, "expires"
            the time when they are deleted (seconds since 1970), or None.
          write_adapter: writes PEFT's files into a folder that it makes.
          moments: arrays of the optimizer by name; None = none.
        """
        folder = self._of(address)
        if (before := self._read(folder)) is not None and before.get("request") == about["request"]:
            return  # a restart does it again
        if folder.exists() and not overwrite:
            raise Refused(422, f"path={address.name!r}: {address} exists; choose another name, or set overwrite=True")
        temporary = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            write_adapter(temporary)
            if moments is not None:
                with open(temporary / OPTIMIZER, "wb") as f:
                    np.savez(f, **moments)
            (temporary / ABOUT).write_text(json.dumps(about | {"address": str(address)}, indent=1) + "\n", "utf-8")
            sync_tree(temporary)
            old = folder.with_name(f".{folder.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                folder.rename(old)
            replace(temporary, folder)
            shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def about(self, address: Address) -> dict:
        """Returns what was written about weights, with their "address". Raises Refused (404) for weights that are not
        there, are another user's, or have expired, which are deleted."""
        found = self._read(self._of(address))
        if found is None or not is_visible(found.get("owner")):
            raise Refused(404, f"path={str(address)!r}: there are no such weights on this server")
        return found

    def adapter(self, address: Address) -> Path:
        """Returns the folder of weights: PEFT's files, or a whole model's from a server of rank 0. Raises Refused (404)
        as `about`."""
        self.about(address)
        return self._of(address)

    def moments(self, address: Address) -> dict[str, np.ndarray]:
        """Returns the optimizer's arrays by name: "count", "mu/<name>", "nu/<name>". Raises Refused: 404 as `about`,
        422 if the weights have none, or it is damaged."""
        self.about(address)
        try:
            with np.load(self._of(address) / OPTIMIZER, allow_pickle=False) as found:
                return {name: found[name] for name in found.files}
        except FileNotFoundError:
            raise Refused(422, f"path={str(address)!r} has no optimizer state: load it without the optimizer") from None
        except DAMAGED as e:
            raise Refused(422, f"path={str(address)!r}: its optimizer state is damaged ({type(e).__name__}: {e}): load "
                          "it without the optimizer") from None

    def delete(self, address: Address) -> None:
        """Deletes weights from the disk. Raises Refused (404) as `about`."""
        self.about(address)
        shutil.rmtree(self._of(address))

    def list(self, run: str = "") -> list[dict]:
        """Returns what was written about the user's weights, the newest first; of one run if given.

        Weights that have expired are deleted. Raises Refused (404) for a run whose name RUN does not match."""
        if run and not RUN.fullmatch(run):
            raise Refused(404, f"training run {run!r}: there is none of this name")
        folders = sorted(self.folder.glob(f"{run.replace(':', '_') or '*'}/*/*/"))
        found = [self._read(folder) for folder in folders if not folder.name.startswith(".")]
        return sorted((about for about in found if about is not None and is_visible(about.get("owner"))),
                      key=lambda about: -about["time"])

    def _read(self, folder: Path) -> dict | None:
        """Returns what was written about a folder's weights, or None; deletes those that have expired."""
        parts = (folder / ABOUT, folder, folder.parent, folder.parent.parent)  # within self.folder
        if any(part.is_symlink() for part in parts):
            return None
        try:
            about = json.loads((folder / ABOUT).read_text("utf-8"))
            expires = about["expires"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if expires is not None and expires < time.time():
            shutil.rmtree(folder, ignore_errors=True)
            return None
        return about
