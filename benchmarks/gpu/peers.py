"""The same shapes in other libraries, where they are installed: a torch loop's update, transformers' generate, vLLM alone.

What a user of torch gets without further work: transformers' model with random weights, SDPA, bf16 autocast over fp32
weights and fused AdamW for the update; bf16 weights for generation.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from gpu.cases import CASES, PROMPT, described

STEPS, CLIP, LOW, HIGH = 3, 1.0, 0.8, 1.2


def torch_model(name: str, dtype: str):
    """(model, its config, device) with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    own = described(CASES[name].model or name)
    config = AutoConfig.for_model(own.pop("model_type"), **own)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return model, config, device


def wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def update(report, name: str) -> None:
    """An optimizer step of GRPO's clipped loss on the case's sequences, in microbatches of as many tokens as jaxrl's."""
    if not report.needs("update", "torch", "transformers"):
        return
    import torch

    case = CASES[name]
    with report.stage("update"):
        model, config, device = torch_model(name, "float32")
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-6, fused=device.type == "cuda")
        length = PROMPT + case.answer
        rows = max(1, case.microbatch // length)
        ids = torch.randint(3, config.vocab_size, (case.sequences, length), device=device)
        advantages = torch.randn(case.sequences, 1, device=device)

        def log_probs(part):
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(input_ids=part, logits_to_keep=case.answer + 1, use_cache=False).logits[:, :-1]
            flat = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), part[:, -case.answer:].flatten(),
                                                     reduction="none")
            return -flat.view(len(part), -1)

        seconds = []
        for _ in range(1 + STEPS):
            wait()
            started = time.perf_counter()
            for part, own in zip(ids.split(rows), advantages.split(rows), strict=True):
                scores = log_probs(part)
                ratio = torch.exp(scores - scores.detach())
                loss = -torch.minimum(ratio * own, ratio.clamp(LOW, HIGH) * own).mean(1).sum() / case.sequences
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            wait()
            seconds.append(time.perf_counter() - started)
            middle = statistics.median(seconds[1:] or seconds)
            report("update", steps=len(seconds), seconds=middle, first=seconds[0], tokens_per_second=case.tokens / middle,
                   **torch_peak())


def torch_peak() -> dict:
    import torch

    return {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if torch.cuda.is_available() else {}


def generate(report, name: str) -> None:
    """The case's completions by transformers' generate, all at once (what TRL samples with, without vLLM)."""
    if not report.needs("generation", "torch", "transformers"):
        return
    import torch

    case = CASES[name]
    with report.stage("generation"):
        model, config, device = torch_model(name, "bfloat16")
        ids = torch.randint(3, config.vocab_size, (case.sequences, PROMPT), device=device)
        for tokens in (8, case.answer):
            wait()
            started = time.perf_counter()
            with torch.no_grad():
                model.eval().generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                      max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0)
            wait()
            seconds = time.perf_counter() - started
        report("generation", seconds=seconds, tokens_per_second=case.sequences * case.answer / seconds, **torch_peak())


def vllm_alone(report, name: str) -> None:
    """The case's completions by vLLM in this process: dummy weights, CUDA graphs, the prefix cache emptied for every batch, a
    log-prob for each token as RL needs it."""
    if not report.needs("generation", "vllm"):
        return
    case, more = CASES[name], {}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if report.origin["device"].startswith("cpu"):  # vLLM takes a machine with libtpu for a TPU's; compiling takes longer than it saves
        os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}
        more = {"enforce_eager": True, "block_size": 32}
    with report.stage("generation"), tempfile.TemporaryDirectory() as folder:
        from vllm import LLM, SamplingParams

        own = described(case.model or name)
        (Path(folder) / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16", **own}))
        started = time.perf_counter()
        llm = LLM(model=folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=case.sequences,
                  max_model_len=PROMPT + case.answer, enable_prefix_caching=True, seed=0, **more)
        report("start", seconds=time.perf_counter() - started)
        prompts = [{"prompt_token_ids": [3 + (7 * row + i) % 200 for i in range(PROMPT)]}
                   for row in range(case.prompts) for _ in range(case.group)]
        sampling = SamplingParams(temperature=1.0, max_tokens=case.answer, ignore_eos=True, logprobs=0, detokenize=False)
        seconds = []
        for _ in range(1 + STEPS):
            llm.reset_prefix_cache()
            started = time.perf_counter()
            done = llm.generate(prompts, sampling, use_tqdm=False)
            seconds.append(time.perf_counter() - started)
            tokens, middle = sum(len(out.outputs[0].token_ids) for out in done), statistics.median(seconds[1:] or seconds)
            report("generation", batches=len(seconds), seconds=middle, tokens_per_second=tokens / middle)
