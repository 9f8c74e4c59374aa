"""How tensors enter vLLM's models where its loaders do not take them as the trainer sends them: other names (NAMES),
gpt-oss's experts and sinks, Mamba-2's rates, which vLLM holds as -exp(A_log)."""

from __future__ import annotations

import functools

# class of a model -> (how its parameters' names begin, how the trainer's do)
NAMES = {"NemotronHForCausalLM": (("model.norm_f.", "model.norm."),),
         "FalconH1ForCausalLM": (("model.final_layernorm.", "model.norm."),)}


def loaded_name(model, name: str) -> str:
    """Returns the name under which vLLM's loader takes a tensor that the trainer sends."""
    for theirs, ours in NAMES.get(type(model).__name__, ()):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def sent_name(model, name: str) -> str:
    """Returns the trainer's name of one of vLLM's parameters: vLLM's own name except in NAMES, Granite's routers and
    Falcon-H1's mixers."""
    for theirs, ours in NAMES.get(type(model).__name__, ()):
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    if type(model).__name__ == "GraniteMoeHybridForCausalLM":
        return name.replace(".block_sparse_moe.gate.", ".block_sparse_moe.router.layer.")
    return name.replace(".mamba.mamba.", ".mamba.")  # Falcon-H1's


def rates(name: str, held, place, received: dict):
    """Returns the piece of A_log that a worker's rates were made of, [heads] of this worker, as it was received.

    Args:
      name: of the tensor that the trainer sent.
      held: [heads] of this worker, -exp(A_log).
      place: (axis, [(start, stop)]) of the piece; axis -1 = all of it.
      received: tensors of the last update by name.

    Raises ValueError if `name` was not received or the rates were made of other numbers."""
    import torch

    if name not in received:
        raise ValueError(f"jaxrl: {name} was not received")
    axis, ranges = place
    own = received[name] if axis < 0 else torch.cat([received[name][start:stop] for start, stop in ranges])
    if not torch.allclose(held, -torch.exp(own.float()).to(held.device), rtol=1e-6, atol=0.0):
        raise ValueError(f"jaxrl: the rates beside {name} were made of other numbers than were received")
    return own


def is_gpt_oss(model) -> bool:
    """Returns whether vLLM's model is gpt-oss."""
    return type(model).__name__ == "GptOssForCausalLM"


def load(model, name: str, tensor, gates: dict) -> None:
    """Loads one of the trainer's tensors into vLLM's model; of gpt-oss's gates and ups, the pair once both have come.

    vLLM's loader of gpt-oss copies sinks, and experts in one stack, past their parameters' loaders, which a reload
    needs. So sinks go through theirs, and experts one by one, as vLLM takes them too: transposed, gate and up in turns.
    Sinks of a layer that another pipeline stage holds are skipped.

    Args:
      name: the trainer's name.
      tensor: torch tensor, whole, on the worker's device; of one expert if `name` has its number.
      gates: (path of the expert, "weight" or "bias") -> ("gate_proj" or "up_proj", tensor) of the half that came first,
        until the other comes; changed."""
    import torch
    from vllm.model_executor.models.utils import is_pp_missing_parameter

    name = loaded_name(model, name)
    path, _, leaf = name.rpartition(".")
    expert, _, kind = path.rpartition(".")
    if not is_gpt_oss(model) or leaf != "sinks" and ".experts." not in name:
        model.load_weights([(name, tensor)])
    elif leaf == "sinks":
        if not is_pp_missing_parameter(own := f"{path.removesuffix('.self_attn')}.attn", model):
            module = model.get_submodule(own)
            start = module.qkv_proj.tp_rank * len(module.sinks)
            module.sinks.weight_loader(module.sinks, tensor[start:start + len(module.sinks)])
    elif kind == "down_proj":
        model.load_weights([(f"{expert}.w2_{leaf}", tensor.t())])  # of a bias, itself
    elif (other := gates.pop((expert, leaf), None)) is None:
        gates[expert, leaf] = kind, tensor
    else:
        pair = [tensor, other[1]] if kind == "gate_proj" else [other[1], tensor]
        model.load_weights([(f"{expert}.w13_{leaf}", torch.stack(pair, dim=1).flatten(0, 1).t())])


def name_loaders(model) -> None:
    """Gives a name to loaders of parameters that have none: vLLM's layer-wise reload asks each for it, and those of
    MiniMax-M2's norms are partial functions."""
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
            vars(loader)["__name__"] = loader.func.__name__
