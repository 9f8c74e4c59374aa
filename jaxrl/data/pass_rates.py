"""How often each training row was solved when it was last asked, and which rows later epochs leave out for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class PassRates:
    """A part of a run's checkpoints: the pass rate of every row and the epochs that have begun with what they hold,
    from which the order of the data goes on exactly.

    sizes: rows of each source. low, high: data.pass_rate_min and pass_rate_max; a row whose last measured rate lies
    outside is left out of the epochs that begin from then on, and so is not measured again. held() -> this part's
    `host` in the checkpoint that is resumed, or None.
    """

    name = "pass_rates"

    def __init__(self, sizes, low: float, high: float, held: Callable[[], dict | None] = lambda: None):
        self.sizes, self.low, self.high, self._held = list(sizes), low, high, held
        self.starts = np.cumsum([0, *self.sizes])
        self.rates = np.full(self.starts[-1], np.nan, np.float32)
        self.orders: list = []  # order.Epochs of each source

    def keep(self, source: int) -> np.ndarray:
        """[rows] bool: the rows of a source that an epoch beginning now has."""
        rates = self.rates[self.starts[source]:self.starts[source + 1]]
        return np.isnan(rates) | ((rates >= self.low) & (rates <= self.high))

    def metrics(self) -> dict[str, float]:
        known = self.rates[~np.isnan(self.rates)]
        left_out = sum(int((~order.begun[-1][2]).sum()) for order in self.orders)
        return {"data/left_out_fraction": left_out / len(self.rates),
                **({"data/pass_rate": float(known.mean())} if len(known) else {})}

    # -- a part of checkpoints

    def abstract(self) -> dict:
        epochs = (self._held() or {"epochs": [[]] * len(self.sizes)})["epochs"]
        kept = sum(len(begun) * n for begun, n in zip(epochs, self.sizes, strict=True))
        return {"rates": np.zeros(len(self.rates), np.float32), "kept": np.zeros(kept, bool)}

    def start(self, arrays, host: dict | None) -> None:
        if host is None:
            return
        self.rates, at = np.array(arrays["rates"], np.float32), 0
        for order, begun, n in zip(self.orders, host["epochs"], self.sizes, strict=True):
            masks = [np.array(arrays["kept"][at + i * n:at + (i + 1) * n], bool) for i in range(len(begun))]
            order.begun = [(*place, mask) for place, mask in zip(map(tuple, begun), masks, strict=True)]
            at += len(begun) * n

    def host(self) -> dict:
        return {"epochs": [[[number, first] for number, first, _ in order.begun] for order in self.orders]}

    def arrays(self) -> dict:
        return {"rates": self.rates.copy(), "kept": np.concatenate([m for o in self.orders for _, _, m in o.begun])}
