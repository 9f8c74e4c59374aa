"""A service.trainer.Trainer on a tiny model, PEFT's model of the same base, and the protocol's losses in torch."""

import dataclasses
import functools

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from helpers.peft_cases import Imported, their_adapter
from helpers.tiny_models import VOCAB
from jaxrl import sharding, training
from jaxrl.algorithms.api_losses import API_LOSSES
from jaxrl.models import build
from jaxrl.models.adapters import Adapter, Target, peft
from jaxrl.models.adapters.selection import linears
from jaxrl.models.io import hf
from jaxrl.models.parameters import flattened
from jaxrl.service.trainer import LoraOptions, Trainer, lora_adapter, with_head
from jaxrl.service.wire import Datum

torch = Imported("torch")
RANK, LARGEST, LONGEST, BETA = 3, 5, 40, 0.3
CONFIGS = {"ppo": {"clip_low_threshold": 0.9}, "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.2}, "dro": {"beta": BETA},
           "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.2}}


def trainer_of(path, dtype, together=1, unembed=False):
    """A Trainer whose largest rank is LARGEST, on a mesh of one device. unembed: with adapters on the output matrix."""
    base = build(hf.load_config(str(path)), compute_dtype=dtype, scan_layers=True, attention="reference")
    params = flattened(hf.load_params(base, str(path), dtype=dtype))
    model = dataclasses.replace(base, adapter=Adapter(tuple(Target(name, LARGEST, 1.0) for name in linears(base))))
    model = with_head(model, LARGEST) if unembed else model
    mesh = sharding.make_mesh({"dp": 1, "fsdp": 1, "tp": 1, "cp": 1, "ep": 1}, jax.devices()[:1])
    jax.set_mesh(mesh)
    everywhere = NamedSharding(mesh, P())
    names = {"/".join(entry.path) for entry in model.entries}
    shapes = training.row_shapes((LONGEST,), LONGEST, 80, 1, sizes=1)
    return Trainer(model, {k: jax.device_put(x, everywhere) for k, x in params.items()},
                   dict.fromkeys(names, everywhere), everywhere, shapes, functools.partial(jax.device_put, device=everywhere),
                   chunk=16, together=together)


def data(rng, sizes=(9, 1, 16, 23, 5, 12)):
    """Data whose tensors every loss can read its own from: targets free of the input, weights of either sign."""
    out = []
    for n in sizes:
        ids = rng.integers(3, VOCAB, (2, n))
        out.append(Datum(ids[0].astype(np.int32), {
            "target_tokens": ids[1], "weights": rng.normal(size=n), "advantages": rng.normal(size=n),
            "logprobs": -4.5 + 0.3 * rng.normal(size=n), "sequence_ratio_mask": (np.arange(n) % 3 == 0) * 1.0}))
    return out


def of_loss(rows, name):
    """The data with the tensors that a loss reads."""
    names = ("target_tokens", "weights", *API_LOSSES[name].tensors)
    return [Datum(tokens, {key: tensors[key] for key in names}) for tokens, tensors, *_ in rows]


def their_loss(model, rows, name, low=0.8, high=1.2):
    """(log-probs of every datum, the documented sum over all of them)."""
    total, found = 0.0, []
    for tokens, tensors, *_ in rows:
        logits = model(torch.tensor(tokens[None]).long()).logits[0]
        logp = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tensors["target_tokens"])[:, None])[:, 0]
        w, a, q = (torch.tensor(tensors[key]) for key in ("weights", "advantages", "logprobs"))
        ratio = (logp - q).exp()
        gap = (logp - q).detach()[torch.tensor(tensors["sequence_ratio_mask"]) != 0].mean()
        sequence = (gap + logp - logp.detach()).exp()
        clipped = ratio.clamp(low, high)
        total = total - {"cross_entropy": w * logp, "importance_sampling": w * ratio * a,
                         "ppo": w * torch.minimum(ratio * a, clipped * a), "cispo": w * clipped.detach() * a * logp,
                         "gspo": w * torch.minimum(sequence * a, sequence.clamp(low, high) * a),
                         "dro": w * (a * logp - BETA / 2 * (logp - q) ** 2)}[name].sum()
        found.append(logp.detach().numpy())
    return found, total


def adopted(trainer, theirs):
    """A run with PEFT's numbers."""
    run = trainer.start(LoraOptions(RANK, unembed=trainer.unembed))
    own = dataclasses.replace(trainer.model, adapter=lora_adapter(trainer.model.base, run.options, trainer.alpha))
    stored = {name: Held(x) for name, x in their_adapter(theirs).items()}
    leaves = peft._values(own.adapter, own.base, stored)
    return trainer.restored(run.options, leaves)


@dataclasses.dataclass
class Held:
    """An array as tensorfile.Stored has it."""

    array: np.ndarray
    dtype = "F64"

    def read(self):
        return self.array


def under_peft_s_names(trainer, run, flat) -> dict:
    own = dataclasses.replace(trainer.model, adapter=run.adapter)
    return peft.hf_tensors(own, unflatten_dict(flat, sep="/"), np.dtype(np.float64), {})


def learning(theirs):
    return {name.replace(".default", ""): p for name, p in theirs.named_parameters() if p.requires_grad}
