"""The work that every system is given, to the token: model folders, prompts, answer lengths, recorded answers.

A folder of a shape is a Hugging Face checkpoint of the Qwen2 architecture with random weights, a tokenizer whose token i is the
word "t<i>", prompts.jsonl for libraries that read text, and work.npz with the same as arrays. All of it follows from the
shape and a seed; numpy draws it, so that no library is needed to make it.

How all systems are brought to the same lengths:

  the end     No sample ends by itself. Channel 0 of the residual stream is a constant that nothing writes to, and the rows of
              the end and padding tokens in the tied embedding have a large negative entry there: their logits lie more than 15
              nats below all others, in every library, without an option that costs something in one and nothing in another.
  full        Every answer then has the longest length.
  long tail   (W3) Answer i of a group ends after its own number of tokens. jaxrl and vLLM take that as the sample's own limit
              (max_new_tokens, max_tokens) and use the place for others. transformers' generate and Tunix's sampler decode a batch
              until its last answer ends, whichever row ended before, and one answer always has the longest length; so their
              rows are cut afterwards, at no cost and no gain to them.
  recorded    (W2, W4, and --replay) The tokens of prompts and answers are given and only training runs.
  pairs       (W7) Recorded answers, the first of a prompt's two chosen, the other rejected, each with the end token last;
              pairs.jsonl has them as text, PAIRED_STEPS steps of them, so that no step meets a pair whose reference is known.
  turns       (W6) Every system samples so many tokens in each of two turns and pays for them; then the recorded ones, of which the
              first turn ends in a call (`turns`), take their place, and its own loop calls the tool and puts the reply behind them.

Legend: P prompts, G answers to each, N = P x G.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import numpy as np
import turns

PAD, END, FIRST = 0, 1, 2  # the first token of prompts and answers
END_ROW, CONSTANT = -25.0, 0.5  # entries of channel 0: of the two special rows, of all others
SEED = 7
PAIRED_STEPS = 8  # that pairs.jsonl has pairs for


@dataclasses.dataclass(frozen=True)
class Shape:
    """One piece of work. `microbatch`: sequences that systems without packing hold at once in training."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int  # of the longest answer
    microbatch: int
    lengths: str = "full"  # or "long_tail"
    generates: bool = True  # False: answers are recorded, only training runs
    dtype: str = "float32"
    lora: int = 0  # rank of adapters on all linear maps of the layers, which train instead of the model; alpha is the rank
    experts: int = 0  # of every layer, each `intermediate` wide; the architecture is then Qwen3-MoE's
    chosen: int = 0  # experts of a token
    pairs: bool = False  # the two answers of a prompt are a pair, for DPO
    turns: tuple[int, ...] = ()  # tokens sampled in each of two turns; `new_tokens` has the tool's reply between them, too

    @property
    def sequences(self) -> int:
        return self.prompts * self.group

    @property
    def observed(self) -> int:
        """Tokens of an answer that were not sampled."""
        return self.new_tokens - sum(self.turns) if self.turns else 0

    def answer_lengths(self) -> np.ndarray:
        """[N] tokens of each answer. Long tail: log-normal with median 1/8 of the longest and sigma 1, from 1/64 of the longest to
        the longest, which one answer has (512 tokens: 8 to 512, median 64)."""
        longest = self.new_tokens
        if self.lengths == "full":
            return np.full(self.sequences, longest, np.int32)
        drawn = np.random.default_rng(SEED).lognormal(np.log(longest / 8), 1.0, self.sequences)
        drawn = np.clip(drawn.round(), max(longest // 64, 1), longest).astype(np.int32)
        drawn[drawn.argmax()] = self.new_tokens
        return drawn

    def counts(self) -> dict[str, int]:
        """Tokens of one step; `answer`: those sampled; `padded` is what rows of the longest length would hold."""
        answers = int(self.answer_lengths().sum())
        return {"sequences": self.sequences, "prompt": self.prompts * self.prompt_tokens,
                "answer": answers - self.sequences * self.observed, "trained": self.sequences * self.prompt_tokens + answers,
                "padded": self.sequences * (self.prompt_tokens + self.new_tokens)}

    def flops(self) -> dict[str, float]:
        """Floating-point operations that a step cannot do without: each prompt once per group, the head where a token is
        predicted, attention to earlier positions only, backward twice the forward; nothing recomputed, nothing padded. A matrix that
        does not train has no gradient: its backward is once the forward."""
        d, p, lengths = self.hidden, self.prompt_tokens, self.answer_lengths().astype(np.float64)
        head_size = d // self.heads
        inner = 3 * d * self.intermediate * max(self.chosen, 1) + d * self.experts
        weights = self.layers * (2 * d * d + 2 * d * self.kv_heads * head_size + inner)
        positions = self.prompts * p + lengths.sum()
        pairs = self.prompts * p * (p + 1) / 2 + (lengths * p + lengths * (lengths + 1) / 2).sum()
        predicted = lengths.sum() - self.sequences * self.observed
        forward = 2 * weights * positions + 4 * d * self.layers * pairs + 2 * d * self.vocab * predicted
        if self.pairs:  # and once under the reference
            return {"generation": 0.0, "scoring": forward, "update": 3 * forward}
        if not self.lora:
            return {"generation": forward if self.generates else 0.0, "update": 3 * forward}
        adapters = 2 * positions * sum(self.lora * (rows + columns) for rows, columns in self.linear().values()) * self.layers
        attention = 4 * d * self.layers * pairs
        return {"generation": forward + adapters if self.generates else 0.0, "update": 2 * forward + attention + 3 * adapters}

    def linear(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of a layer's linear maps by their HF names."""
        d, kv, wide = self.hidden, self.kv_heads * self.hidden // self.heads, self.intermediate
        return {"self_attn.q_proj": (d, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d), "self_attn.o_proj": (d, d),
                "mlp.gate_proj": (wide, d), "mlp.up_proj": (wide, d), "mlp.down_proj": (d, wide)}

    def traffic(self) -> float:
        """Bytes that decoding one token after the other cannot do without: all weights once per token of the longest answer, and the
        keys and values of every earlier position of a sample once per token of its own (a group's prompt once for all of it)."""
        d, size, lengths = self.hidden, {"float32": 4, "bfloat16": 2}[self.dtype], self.answer_lengths().astype(np.int64)
        narrow = self.kv_heads * d // self.heads
        weights = self.layers * (2 * d * d + 2 * d * narrow + 3 * d * self.intermediate) + d * self.vocab
        groups = lengths.reshape(self.prompts, self.group).max(axis=1) - self.observed
        positions = (groups * self.prompt_tokens).sum() + (lengths * (lengths - 1) // 2).sum()
        if self.turns:  # nothing is decoded where the reply stands
            first, reply = self.turns[0], self.observed
            positions -= self.sequences * (reply * first + reply * (reply - 1) // 2)
        steps = int(lengths.max()) - self.observed
        return float(size * (weights * steps + 2 * self.layers * narrow * int(positions))) if self.generates else 0.0

    def config(self) -> dict:
        """The model's config.json."""
        if self.experts:
            return {**self._dense(), "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
                    "num_experts": self.experts, "num_experts_per_tok": self.chosen, "moe_intermediate_size": self.intermediate,
                    "norm_topk_prob": True, "head_dim": self.hidden // self.heads, "decoder_sparse_step": 1, "mlp_only_layers": []}
        return self._dense()

    def _dense(self) -> dict:
        return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": self.hidden,
                "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
                "intermediate_size": self.intermediate, "vocab_size": self.vocab, "tie_word_embeddings": True,
                "max_position_embeddings": max(2048, self.prompt_tokens + self.new_tokens), "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0, "hidden_act": "silu", "use_sliding_window": False, "attention_dropout": 0.0,
                "pad_token_id": PAD, "eos_token_id": END, "torch_dtype": self.dtype, "initializer_range": 0.02}


W1 = Shape(256, 4, 4, 2, 704, 8192, prompts=16, group=8, prompt_tokens=64, new_tokens=64, microbatch=32)
W2 = Shape(512, 8, 8, 2, 1408, 32768, prompts=16, group=1, prompt_tokens=256, new_tokens=256, microbatch=4, generates=False)
GPU_05 = Shape(896, 24, 14, 2, 4864, 151936, prompts=4, group=1, prompt_tokens=256, new_tokens=256, microbatch=4, generates=False,
               dtype="bfloat16")
GPU_15 = dataclasses.replace(GPU_05, hidden=1536, layers=28, heads=12, intermediate=8960)
SHAPES = {
    "W1": W1,  # equal lengths
    "W2": W2,  # training only
    "W3": dataclasses.replace(W1, new_tokens=512, lengths="long_tail"),  # lengths as RL has them
    "W4": dataclasses.replace(W2, lora=16),  # W2 with adapters
    "W5": dataclasses.replace(W2, intermediate=W2.intermediate // 4, experts=16, chosen=4),  # of W2's width for a token
    "W6": dataclasses.replace(W1, prompt_tokens=128, new_tokens=128, turns=(64, 48)),  # with a calculator
    "W7": dataclasses.replace(W2, prompts=8, group=2, pairs=True),  # W2's model and tokens in pairs
    "tiny_turns": Shape(32, 2, 2, 1, 64, 1024, prompts=2, group=4, prompt_tokens=128, new_tokens=80, microbatch=4, turns=(40, 24)),
    "tiny_pairs": Shape(32, 2, 2, 1, 64, 256, prompts=4, group=2, prompt_tokens=8, new_tokens=64, microbatch=4, lengths="long_tail",
                        generates=False, pairs=True),
    "tiny_experts": Shape(32, 2, 2, 1, 16, 256, prompts=2, group=4, prompt_tokens=8, new_tokens=64, microbatch=4, lengths="long_tail",
                          experts=6, chosen=3),
    "tiny": Shape(32, 2, 2, 1, 64, 256, prompts=2, group=4, prompt_tokens=8, new_tokens=8, microbatch=4),
    "tiny_tail": Shape(32, 2, 2, 1, 64, 256, prompts=2, group=4, prompt_tokens=8, new_tokens=64, microbatch=4, lengths="long_tail"),
    "tiny_lora": Shape(32, 2, 2, 1, 64, 256, prompts=2, group=4, prompt_tokens=8, new_tokens=64, microbatch=4, lengths="long_tail",
                       lora=4),
    "learning": Shape(64, 2, 2, 1, 128, 256, prompts=8, group=8, prompt_tokens=8, new_tokens=16, microbatch=64),
    # For accelerators, by tokens that are trained on at once.
    "0.5B_2k": GPU_05,
    "0.5B_16k": dataclasses.replace(GPU_05, prompts=32),
    "1.5B_2k": GPU_15,
    "1.5B_16k": dataclasses.replace(GPU_15, prompts=32),
}


class Work:
    """A folder of a shape, opened: prompts_PxL, answers (list of N arrays), lengths_N, `shape`, `folder`."""

    def __init__(self, folder):
        self.folder = Path(folder)
        written = json.loads((self.folder / "shape.json").read_text())
        self.shape = Shape(**{**written, "turns": tuple(written.get("turns", ()))})
        held = np.load(self.folder / "work.npz")
        self.prompts, self.lengths = held["prompts"], held["lengths"]
        self.answers = np.split(held["answers"], np.cumsum(self.lengths)[:-1])

    def prompt_of(self, sequence: int) -> np.ndarray:
        return self.prompts[sequence // self.shape.group]

    def turn(self, sequence: int, turn: int) -> np.ndarray:
        """What is recorded as sampled in a turn; all of an answer where there is one."""
        if not self.shape.turns:
            return self.answers[sequence]
        return self.answers[sequence][:self.shape.turns[0]] if turn == 0 else self.answers[sequence][-self.shape.turns[1]:]

    def before(self, sequence: int, turn: int) -> np.ndarray:
        """The tokens from which a turn is sampled."""
        known = self.answers[sequence][:len(self.answers[sequence]) - self.shape.turns[1]] if turn else []
        return np.concatenate([self.prompt_of(sequence), known]).astype(np.int32)

    def check(self, answers, sampled: bool = False) -> None:
        """Raises AssertionError unless `answers` (N sequences of tokens; `sampled`: without replies) have the lengths of the work."""
        found, need = [len(a) for a in answers], self.lengths - self.shape.observed * sampled
        assert found == need.tolist(), f"{sum(found)} answer tokens, {need.sum()} are the work"


def words(tokens) -> str:
    return " ".join(f"t{i}" for i in tokens)


def make(shape: Shape, folder) -> Path:
    """Writes the folder of a shape unless it is there; the same bytes wherever and whenever."""
    folder = Path(folder)
    if folder.exists():
        return folder
    from safetensors.numpy import save_file

    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    save_file(_weights(shape), part / "model.safetensors", metadata={"format": "pt"})
    (part / "config.json").write_text(json.dumps(shape.config(), indent=1))
    (part / "generation_config.json").write_text(json.dumps({"eos_token_id": END, "pad_token_id": PAD}))
    (part / "shape.json").write_text(json.dumps(dataclasses.asdict(shape)))
    for place in (part, part / "tokenizer"):
        turns.write_tokenizer(shape.vocab, place) if shape.turns else _write_tokenizer(shape, place)
    if shape.lora:
        _write_adapter(shape, part / "adapter")
    draw, lengths = np.random.default_rng([SEED, 1]), shape.answer_lengths()
    if shape.turns:
        recorded = turns.record(shape, part / "tokenizer", draw)
        prompts, answers, texts = recorded["prompts"], recorded["answers"].ravel(), recorded["questions"]
    else:
        prompts = draw.integers(FIRST, shape.vocab, (shape.prompts, shape.prompt_tokens), np.int32)
        answers = draw.integers(FIRST, shape.vocab, lengths.sum(), np.int32)
        texts = map(words, prompts)
    np.savez(part / "work.npz", prompts=prompts, answers=answers, lengths=lengths)
    (part / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    if shape.pairs:
        (part / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _pairs(shape)))
    part.rename(folder)
    return folder


def _pairs(shape: Shape):
    """Rows of text; of every step answers of the shape's lengths."""
    draw, lengths = np.random.default_rng([SEED, 3]), shape.answer_lengths().reshape(-1, 2)
    token_ids = lambda n: draw.integers(FIRST, shape.vocab, n, np.int32)  # noqa: E731
    for _ in range(PAIRED_STEPS):
        for chosen, rejected in lengths:
            yield {"prompt": words(token_ids(shape.prompt_tokens)), "chosen": " " + words(token_ids(chosen - 1)),
                   "rejected": " " + words(token_ids(rejected - 1))}


def _weights(shape: Shape) -> dict[str, np.ndarray]:
    """HF names -> arrays: normal(0, 0.02), norms 1, biases 0, channel 0 as the module's text says."""
    import ml_dtypes

    draw, d, kv = np.random.default_rng([SEED, 0]), shape.hidden, shape.kv_heads * shape.hidden // shape.heads
    dtype = ml_dtypes.bfloat16 if shape.dtype == "bfloat16" else np.float32

    def normal(*size, closed=False):
        out = draw.standard_normal(size, np.float32) * 0.02
        out[0] = 0 if closed else out[0]
        return out.astype(dtype)

    embed = normal(shape.vocab, d)
    embed[:, 0] = CONSTANT
    embed[:len(turns.CONTROL) if shape.turns else FIRST, 0] = END_ROW
    out = {"model.embed_tokens.weight": embed, "model.norm.weight": np.ones(d, dtype)}
    for i in range(shape.layers):
        name = f"model.layers.{i}."
        for part, size in (("q", d), ("k", kv), ("v", kv)):
            out[f"{name}self_attn.{part}_proj.weight"] = normal(size, d)
            if not shape.experts:
                out[f"{name}self_attn.{part}_proj.bias"] = np.zeros(size, dtype)
        out[f"{name}self_attn.o_proj.weight"] = normal(d, d, closed=True)
        if shape.experts:
            out |= {f"{name}self_attn.{x}_norm.weight": np.ones(d // shape.heads, dtype) for x in ("q", "k")}
            out[f"{name}mlp.gate.weight"] = normal(shape.experts, d)
        for part in [f"experts.{e}." for e in range(shape.experts)] or [""]:
            out[f"{name}mlp.{part}gate_proj.weight"], out[f"{name}mlp.{part}up_proj.weight"] = (
                normal(shape.intermediate, d) for _ in range(2))
            out[f"{name}mlp.{part}down_proj.weight"] = normal(d, shape.intermediate, closed=True)
        out[f"{name}input_layernorm.weight"], out[f"{name}post_attention_layernorm.weight"] = (np.ones(d, dtype) for _ in range(2))
    return out


def _write_adapter(shape: Shape, folder: Path) -> None:
    """A PEFT folder: A as PEFT draws it, B normal(0, 0.02), so that every gradient is there at the first update; of what closes
    a block the row of channel 0, which nothing may write to, is 0."""
    from safetensors.numpy import save_file

    draw, out = np.random.default_rng([SEED, 2]), {}
    for i in range(shape.layers):
        for name, (outputs, inputs) in shape.linear().items():
            a = draw.uniform(-1, 1, (shape.lora, inputs)) / inputs**0.5
            b = draw.standard_normal((outputs, shape.lora)) * 0.02
            b[0] = 0 if name.endswith(("o_proj", "down_proj")) else b[0]
            for letter, x in (("A", a), ("B", b)):
                out[f"base_model.model.model.layers.{i}.{name}.lora_{letter}.weight"] = x.astype(np.float32)
    folder.mkdir()
    save_file(out, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    modules = sorted(name.rsplit(".")[-1] for name in shape.linear())
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": shape.lora, "lora_alpha": shape.lora, "lora_dropout": 0.0, "bias": "none",
        "target_modules": modules, "inference_mode": False}))


def _write_tokenizer(shape: Shape, folder: Path) -> None:
    """Token i is the word t<i>; a text of such words has exactly their tokens, and the other way round.

    It is read from the folder `tokenizer`. Beside a config.json transformers 5 takes the tokenizer for Qwen's own kind and splits
    words otherwise; there it only serves vLLM, which asks for one, and is given tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(exist_ok=True)
    vocab = {"<pad>": PAD, "<end>": END, **{f"t{i}": i for i in range(FIRST, shape.vocab)}}
    t = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    t.add_special_tokens(["<pad>", "<end>"])
    t.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<pad>", "unk_token": "<pad>",
        "model_max_length": shape.config()["max_position_embeddings"], "clean_up_tokenization_spaces": False}))
