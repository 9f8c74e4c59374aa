"""Pass rates of the training rows, measured in rollouts, and the rows that later epochs drop because of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class PassRates:
    """Pass rate of every row and the epochs started so far; a checkpoint part from which the
    data order resumes exactly.

    Args:
      sizes: number of rows of each source.
      low, high: data.pass_rate_min and pass_rate_max. A row whose last measured rate lies outside is dropped from
        epochs that start later, and so is not measured again.
      resumed: () -> this part's `host` entry in the resumed checkpoint, or None.

    Attributes:
      rates: [rows of all sources] float32, the last measured pass rate of each; NaN = not measured.
      orders: order.Epochs of each source, to be set before `start`, `host`, `arrays` and `metrics` are called.
    """

    name = "pass_rates"

    def __init__(self, sizes, low: float, high: float, resumed: Callable[[], dict | None] = lambda: None):
        self.sizes, self.low, self.high, self._resumed = list(sizes), low, high, resumed
        self.starts = np.cumsum([0, *self.sizes])
        self.rates = np.full(self.starts[-1], np.nan, np.float32)
        self.orders: list = []  # order.Epochs of each source

    def keep(self, source: int) -> np.ndarray:
        """Returns [rows] bool: the rows of a source that an epoch starting now has, those not measured and those with
        low <= rate <= high."""
        rates = self.rates[self.starts[source]:self.starts[source + 1]]
        return np.isnan(rates) | ((rates >= self.low) & (rates <= self.high))

    def metrics(self) -> dict[str, float]:
        """Returns data/left_out_fraction, the share of rows that the current epochs leave out, and data/pass_rate,
        the mean over the measured rows of their last rate, if any row is measured."""
        known = self.rates[~np.isnan(self.rates)]
        left_out = sum(int((~order.started_epochs[-1][2]).sum()) for order in self.orders)
        return {"data/left_out_fraction": left_out / len(self.rates),
                **({"data/pass_rate": float(known.mean())} if len(known) else {})}

    # -- checkpoint part

    def abstract(self) -> dict:
        """Returns the arrays of the checkpoint to restore, as zeros: rates [rows] float32, and kept, bool, with one
        mask of its rows for each epoch that the checkpoint's sources have started."""
        epochs = (self._resumed() or {"epochs": [[]] * len(self.sizes)})["epochs"]
        size = sum(len(started_epochs) * n for started_epochs, n in zip(epochs, self.sizes, strict=True))
        return {"rates": np.zeros(len(self.rates), np.float32), "kept": np.zeros(size, bool)}

    def start(self, arrays, host: dict | None) -> None:
        """Restores the rates, and the started epochs of `orders`, from `arrays` and `host` of a checkpoint; does
        nothing if host is None."""
        if host is None:
            return
        self.rates, at = np.array(arrays["rates"], np.float32), 0
        for order, started_epochs, n in zip(self.orders, host["epochs"], self.sizes, strict=True):
            masks = [np.array(arrays["kept"][at + i * n:at + (i + 1) * n], bool) for i in range(len(started_epochs))]
            order.started_epochs = [(*place, mask)
                                    for place, mask in zip(map(tuple, started_epochs), masks, strict=True)]
            at += len(started_epochs) * n

    def host(self) -> dict:
        """Returns the JSON-able state: per source [number, first position] of each started epoch."""
        return {"epochs": [[[number, first] for number, first, _ in order.started_epochs] for order in self.orders]}

    def arrays(self) -> dict:
        """Returns "rates" (float32 [rows], NaN = not measured) and "kept" (bool, the row masks of
        all started epochs, concatenated).
        """
        return {"rates": self.rates.copy(),
                "kept": np.concatenate([m for o in self.orders for _, _, m in o.started_epochs])}
