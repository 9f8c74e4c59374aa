"""The update alone in a minimal torch loop: transformers' model, its head at the answers' positions only, AdamW; with adapters
where the shape has them, by PEFT.

    python benchmarks/peers/torch_loop.py --work FOLDER --steps 2

What a careful person writes in an afternoon: microbatches of --microbatch sequences padded to their own longest answer, the
policy-gradient loss of GRPO at ratio 1 (clipping has no effect there), token mean over the batch. Answers are the recorded ones.
"""

from __future__ import annotations

import measure
import numpy as np
import torch
from shapes import PAD
from transformers import AutoModelForCausalLM


def decayed(model) -> list[dict]:
    """Weight decay on matrices only."""
    groups = {True: [], False: []}
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        groups[parameter.ndim > 1].append(parameter)
    return [{"params": groups[True], "weight_decay": measure.WEIGHT_DECAY}, {"params": groups[False], "weight_decay": 0.0}]


def advantages(work, unscaled: bool) -> np.ndarray:
    """[N] rewards less the mean, over the standard deviation (ddof 1) unless `unscaled`, of their group; of the batch where groups
    are of one."""
    scores = np.array([measure.reward(" ".join(f"t{i}" for i in answer)) for answer in work.answers])
    groups = scores.reshape(-1, work.shape.group if work.shape.group > 1 else len(scores))
    spread = 1.0 if unscaled else groups.std(1, ddof=1, keepdims=True) + 1e-6
    return ((groups - groups.mean(1, keepdims=True)) / spread).reshape(-1)


def microbatches(work, size: int):
    """(ids, mask of answer tokens, sequence numbers), padded on the right to the longest of each."""
    for start in range(0, work.shape.sequences, size):
        rows = range(start, min(start + size, work.shape.sequences))
        longest = max(int(work.lengths[i]) for i in rows)
        ids = np.full((len(rows), work.shape.prompt_tokens + longest), PAD, np.int64)
        mask = np.zeros((len(rows), longest), np.float32)
        for row, i in enumerate(rows):
            tokens = np.concatenate([work.prompt_of(i), work.answers[i]])
            ids[row, :len(tokens)], mask[row, :len(work.answers[i])] = tokens, 1
        yield torch.from_numpy(ids), torch.from_numpy(mask), list(rows)


def load(work):
    """(the model whose `model` and `lm_head` are called, all that is trained or saved)."""
    model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=getattr(torch, work.shape.dtype)).train()
    if not work.shape.lora:
        return model, model
    from peft import PeftModel

    whole = PeftModel.from_pretrained(model, str(work.folder / "adapter"), is_trainable=True).train()
    return whole.get_base_model(), whole


def parameters_of(whole) -> dict[str, np.ndarray]:
    """What trains, as its folder names it."""
    named = dict(whole.named_parameters())
    if hasattr(whole, "peft_config"):
        from peft import get_peft_model_state_dict

        named = get_peft_model_state_dict(whole)
    return {own: x for name, p in named.items() for own, x in apart(name, p.detach().float().numpy())}


def apart(name: str, x: np.ndarray):
    """transformers holds a layer's experts in two tensors; a checkpoint has three for each of them."""
    module, _, kind = name.rpartition(".experts.")
    if not module:
        yield name, x
        return
    for expert, own in enumerate(x):
        parts = zip(("gate_proj", "up_proj"), np.split(own, 2), strict=True) if kind == "gate_up_proj" else [(kind, own)]
        for part, values in parts:
            yield f"{module}.experts.{expert}.{part}.weight", values


def update(model, optimizer, work, args) -> None:
    weights, total = torch.tensor(advantages(work, args.unscaled), dtype=torch.float32), float(work.lengths.sum())
    for ids, mask, rows in microbatches(work, args.microbatch):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        # Position i predicts token i + 1; padding is on the right, where no query of an answer looks.
        logits = model.lm_head(hidden[:, work.shape.prompt_tokens - 1:-1]).float()
        targets = ids[:, work.shape.prompt_tokens:]
        logp = torch.gather(logits, 2, targets[..., None])[..., 0] - torch.logsumexp(logits, 2)
        ratio = torch.exp(logp - logp.detach())
        loss = -(ratio * weights[rows][:, None] * mask).sum() / total
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), measure.CLIP_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main() -> None:
    args = measure.arguments()
    gflops = measure.torch_ceiling()
    model, whole = load(args.work)
    optimizer = torch.optim.AdamW(decayed(model), lr=args.lr, eps=args.eps)
    clock = measure.Clock()
    for _ in range(1 + args.steps):
        with clock.part("update"):
            update(model, optimizer, args.work, args)
        clock.step()
    if args.save:
        np.savez(args.save, **parameters_of(whole))
    packages = ("torch", "transformers", *["peft"] * bool(args.work.shape.lora))
    measure.report("torch_loop", args, clock, packages, gflops)


if __name__ == "__main__":
    main()
