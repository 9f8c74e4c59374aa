"""Jobs that the suite runs: models with random weights, batches, row lengths.

Completions end where the limit is: of random weights one token in some 75,000 is an end token, so that a few of the 256
completions of a step are shorter. (rollout.min_new_tokens would forbid that, and cost 0.47 ms a token on an H200.)
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "evidence"))


class Case(NamedTuple):
    prompts: int
    group: int
    answer: int
    microbatch: int
    row: int          # tokens of a packed row
    steps: int
    model: str = ""   # of evidence/plan_shapes.py or MODELS; empty: the case's name
    kind: str = "samples"  # or "given": completions are given; or "pairs": DPO
    options: tuple = ()  # further (option, value)

    @property
    def sequences(self) -> int:
        return self.prompts * self.group

    @property
    def tokens(self) -> int:
        """Of a step, prompts and completions."""
        return self.sequences * (PROMPT + self.answer)


MODELS = {  # beside those of evidence/plan_shapes.py
    "1B of 64 experts": {"like": "30B-A3B", "num_experts": 64, "hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 8,
                         "num_attention_heads": 16},
    "tiny of 4 experts": {"like": "30B-A3B", "vocab_size": 256, "num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64,
                          "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
                          "eos_token_id": 1},
    "tiny": {"like": "tiny", "eos_token_id": 1},  # the embedded tokenizer's
    "tiny of two heads": {"like": "tiny", "eos_token_id": 1, "num_attention_heads": 2, "num_key_value_heads": 2},  # of 32, as vLLM wants
}
ADAPTERS = (("lora.rank", 16), ("lora.export", "adapter"))
PROMPT = 40
CASES = {  # by the model of evidence/plan_shapes.py
    "0.5B": Case(32, 8, 256, 16384, 2048, 20),
    "1.5B": Case(32, 8, 512, 16384, 16384, 4),
    "0.6B": Case(32, 8, 512, 16384, 16384, 4),
    "lora": Case(32, 8, 512, 16384, 16384, 4, model="1.5B", kind="given", options=ADAPTERS),
    "experts": Case(32, 8, 512, 16384, 16384, 4, model="1B of 64 experts", kind="given"),
    "dpo": Case(64, 2, 256, 16384, 2048, 4, model="0.5B", kind="pairs"),
    "tiny": Case(4, 4, 32, 256, 256, 4),
    "tiny lora": Case(4, 4, 32, 256, 256, 3, model="tiny", kind="given", options=ADAPTERS),
    "tiny experts": Case(4, 4, 32, 256, 256, 3, model="tiny of 4 experts", kind="given"),
    "tiny vllm": Case(4, 4, 32, 256, 256, 4, model="tiny of two heads"),
    "tiny dpo": Case(4, 2, 32, 256, 256, 3, model="tiny", kind="pairs"),
}


def described(model: str) -> dict:
    """The config.json of a model."""
    import plan_shapes

    own = dict(MODELS.get(model, {"like": model}))
    return {**plan_shapes.MODELS[own.pop("like")], **own}


def job(name: str, folder: str, steps: int = 0):
    """GRPO on the embedded problems, or DPO on pairs of sums; nothing but steps: no evaluation, checkpoint or export."""
    import jaxrl
    from jaxrl.config.load import put

    case = CASES[name]
    c = jaxrl.default_config()
    c.run.dir, c.rollout.engine = folder, "jax"
    c.model.init, c.model.config, c.model.tokenizer = "random", described(case.model or name), "jaxrl://arith/tokenizer"
    c.data.path, c.data.prompts_per_step, c.data.max_prompt_tokens = ("jaxrl://arith/train.jsonl",), case.prompts, PROMPT
    c.rollout.group_size, c.rollout.max_new_tokens = case.group, case.answer
    c.rollout.prompt_lengths, c.rollout.compaction = (PROMPT,), False
    c.train.steps = steps or case.steps
    if case.kind == "given":
        c.rollout.engine, c.algorithm.mismatch.correction, c.algorithm.mismatch.warn = f"{__file__}:engine", "none", 0.0
    if case.kind == "pairs":
        c.run.recipe, c.data.path = "preference", (pairs(case, c.train.steps, f"{folder}.jsonl"),)
    c.reward.functions = (f"{__file__}:varied",)
    c.train.tokens_per_microbatch, c.train.row_lengths, c.train.row_counts = case.microbatch, (case.row,), 1
    c.eval.before = c.eval.after = False
    c.checkpoint.every_steps, c.checkpoint.every_minutes, c.checkpoint.at_end, c.checkpoint.export_at_end = 0, 0.0, False, False
    c.log.console, c.log.tensorboard = "off", False
    c.run.compile_cache = ""  # first steps are those of a machine that has compiled nothing yet
    for option, value in case.options:
        put(c, option, value)
    return c


def pairs(case: Case, steps: int, file: str) -> str:
    """Writes pairs of sums for all steps, whose digits and signs are tokens of the embedded tokenizer; an answer's end is one more."""
    draw = np.random.default_rng(0)
    sums = lambda n: "".join("+" if i % 2 else str(draw.integers(0, 10)) for i in range(n))  # noqa: E731
    rows = [{"prompt": sums(PROMPT), "chosen": sums(case.answer - 1), "rejected": sums(case.answer - 1)}
            for _ in range(case.prompts * steps)]
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def varied(prompt, completion, **columns) -> float:
    """A reward that differs between completions, so that weights change and engines are given new ones."""
    return zlib.crc32(completion.encode()) % 100 / 100


def engine(context):
    """An engine that answers at once, with tokens drawn from the request's seed: rollout.engine of the cases that only train."""
    from jaxrl.rollout import Engine, Health, Result

    class Given(Engine):
        def __init__(self):
            self.done, self.version = [], -1

        def submit(self, requests):
            for r in requests:
                n = r.sampling.max_new_tokens
                tokens = np.random.default_rng(r.seed).integers(3, context.hf_config["vocab_size"], n).astype(np.int32)
                zeros = np.zeros(n, np.float32)
                self.done.append(Result(r.id, tokens, zeros, zeros, np.full(n, self.version, np.int32), "length", r.seed))

        def poll(self, deadline_s):
            done, self.done = self.done, []
            return done

        def publish(self, params, version):
            self.version = version

        def abort(self, ids=None):
            self.done = []

        def health(self):
            return Health(True, version=self.version)

        def close(self): ...

    return Given()
