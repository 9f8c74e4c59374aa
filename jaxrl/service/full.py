"""Trains all parameters of the base: what `jaxrl serve tinker --rank=0` does in place of adapters.

A run is a whole model with its moments, so one run at a time is on the devices; the worker keeps the others in
snapshots. The base itself is kept in host memory. Saved weights are folders that transformers opens, in float32: a run
that is loaded from one goes on with the same numbers.

Knows values only, as service.trainer. Called by service.app, then as its Trainer.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from jaxrl import training
from jaxrl.processes.exchange import to_host
from jaxrl.service.refusals import Refused
from jaxrl.service.trainer import LoraOptions, Run, Trainer
from jaxrl.types import merge


class FullTrainer(Trainer):
    """A Trainer whose runs have no adapter: LoraOptions of rank 0.

    Args:
      model: jaxrl.models.Model without an adapter.
      base: flat dict of its parameters, on the devices; copied to host memory, where each run starts from them.
      places, everywhere, row_shapes, put, chunk: shardings, rows, transfer and logits per chunk, as Trainer explains
        them.
      write: (parameter tree, folder) -> writes a folder. read: folder -> flat dict of what it holds, on the devices.
    """

    def __init__(self, model, base, places, everywhere, row_shapes, put, chunk: int, write: Callable, read: Callable):
        super().__init__(model, base, places, everywhere, row_shapes, put, chunk=chunk)
        self.initial = {name: np.array(to_host(x)) for name, x in base.items()}
        self.base, self._write, self._read = {}, write, read
        make = lambda trainable: training.init_state(trainable, {}, self.optimizer)  # noqa: E731
        self._begin = jax.jit(make, out_shardings=self._places_of(jax.eval_shape(make, self.initial)))

    def start(self, options: LoraOptions) -> Run:
        """Starts a run at the base. Raises Refused (422) for an adapter, or a part of the parameters."""
        if options.rank != 0:
            raise Refused(422, f"lora_config.rank={options.rank}: this server trains all parameters; create the run "
                          f"with rank=0, or start the server with --rank={options.rank}")
        if not (options.attention and options.mlp and options.unembed):
            raise Refused(422, "lora_config: rank=0 trains all parameters; leave train_attn, train_mlp and "
                          "train_unembed out, or start the server with a --rank above 0")
        return self.restored(options, self.initial)

    def restored(self, options: LoraOptions, leaves: dict, moments=None) -> Run:
        """Starts a run from all parameters, by flat name; `moments` are a save's (count, mu, nu), None = zeros."""
        placed = {name: jax.device_put(leaves[name], self.places[name]) for name in self.initial}
        return self._run(options, None, self._begin(placed), moments)

    def params_without_scales(self, leaves: dict):
        """Returns the parameter tree of all leaves: without adapters there are no scales."""
        return self.params(leaves)

    def read(self, folder) -> dict:
        """Returns the parameters of a folder that `export` wrote, by flat name."""
        return self._read(folder)

    def export(self, run: Run, folder) -> None:
        """Writes all parameters of a run as a Hugging Face folder."""
        self._write(merge(run.state.trainable, {}), folder)

    def fitted(self, moments: dict) -> dict:
        """Returns saved moments as they are: without adapters there is no rank to fit."""
        return moments

    def base_leaves(self) -> dict[str, np.ndarray]:
        """Returns the base's parameters in host memory, flat name -> array."""
        return self.initial
