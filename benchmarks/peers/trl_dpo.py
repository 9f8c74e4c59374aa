"""TRL's DPOTrainer on a shape with pairs.

    python benchmarks/peers/trl_dpo.py --work FOLDER --steps 2 [--microbatch 4]

Its defaults, but for what the work fixes and what would slow it down here: fp32, no gradient checkpointing, no reports. The reference
is a second copy of the model, computed in every step, as it is by default; its time is a part of the update, in whose loss it is.
"""

from __future__ import annotations

import tempfile

import measure
import numpy as np
import torch
from datasets import Dataset
from shapes import END
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl_step import Steps, wrap_optimizer


def main() -> None:
    args = measure.arguments()
    work, shape = args.work, args.work.shape
    gflops, clock = measure.torch_ceiling(), measure.Clock()
    tokenizer = AutoTokenizer.from_pretrained(work.folder / "tokenizer")
    rows = min(shape.prompts, args.microbatch // 2)
    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(
            output_dir=folder, per_device_train_batch_size=rows, gradient_accumulation_steps=shape.prompts // rows, beta=measure.BETA,
            learning_rate=args.lr, adam_epsilon=args.eps, weight_decay=measure.WEIGHT_DECAY, max_grad_norm=measure.CLIP_NORM,
            lr_scheduler_type="constant", max_steps=1 + args.steps, max_length=None, bf16=False, gradient_checkpointing=False,
            use_cpu=not torch.cuda.is_available(), report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1,
            seed=args.seed)
        model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.float32)
        trainer = Trainer(model=model, args=config, processing_class=tokenizer, callbacks=[Steps(clock)],
                          train_dataset=Dataset.from_json(str(work.folder / "pairs.jsonl")))
        row = trainer.train_dataset[0]
        chosen, rejected = work.lengths[:2]
        assert [len(row[k]) for k in ("prompt_ids", "chosen_ids", "rejected_ids")] == [shape.prompt_tokens, chosen, rejected]
        assert row["chosen_ids"][-1] == END
        clock.wrap(trainer, "training_step", "update")
        wrap_optimizer(trainer, clock)
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        if args.save:
            np.savez(args.save, **{name: p.detach().float().cpu().numpy() for name, p in model.named_parameters()})
        measure.report("trl_dpo", args, clock, ("trl", "torch", "transformers"), gflops, rewards=losses)


class Trainer(DPOTrainer):
    """Takes the rows in the order of the file."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


if __name__ == "__main__":
    main()
