"""One GRPO update of groups of eight with images, beside TRL's on the same model, weights, rows and advantages.

    taskset -c 0 python benchmarks/vision.py       # pip install trl==1.16.0 accelerate (torch); minutes; writes benchmarks/results/vision.json

A random Qwen2.5-VL in fp32 on CPUs: PROMPTS prompts of one image of SIDE x SIDE tokens and TEXT tokens of text, eight completions of
ANSWER tokens each, one optimizer step of AdamW without a reference. TRL's side is GRPOTrainer._compute_loss with loss_type="grpo" on a
batch as its collator makes it (each prompt and its pixels once per completion), backward and torch's AdamW; of the trainer only what
carries metrics and options is stood in for. Ours is training.make_update on packed rows. Measured is the processor time of this process,
which other processes on the machine do not enter, in turns, and the medians are compared; both have the one core that taskset leaves.
The gradients' norms must agree, or nothing is written. `frozen`: nothing of the tower trains, and ours keeps its features.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import MethodType, SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "evidence"), str(ROOT / "tests")]
os.environ |= {"JAX_PLATFORMS": "cpu", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from common import commit, machine  # noqa: E402
from helpers.training_helpers import policy_objective  # noqa: E402
from trl.trainer import add_fused_lm_head  # noqa: E402

from jaxrl import training  # noqa: E402
from jaxrl.models import build  # noqa: E402
from jaxrl.models.io import hf  # noqa: E402
from jaxrl.roles.kept_features import KeptFeatures  # noqa: E402
from jaxrl.training.layout import RowShapes, make_layout, row_patches  # noqa: E402
from jaxrl.types import Pictures, Trajectories  # noqa: E402

torch.set_num_threads(1)  # whose idle threads would spin on a busy machine
PROMPTS, GROUP, SIDE, TEXT, ANSWER, ROUNDS, LR = 2, 8, 12, 20, 64, 7, 1e-4
PAD, VOCAB, PATCH = 90, 512, 14


def make(folder: Path):
    """Returns transformers' model, which is saved."""
    text = dict(vocab_size=VOCAB, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2,
                max_position_embeddings=2048, rope_scaling={"type": "mrope", "mrope_section": [4, 6, 6], "rope_theta": 1e4})
    tower = dict(depth=4, hidden_size=160, num_heads=4, intermediate_size=320, patch_size=PATCH, out_hidden_size=192, window_size=112,
                 fullatt_block_indexes=[3], hidden_act="silu")
    config = transformers.AutoConfig.for_model("qwen2_5_vl", image_token_id=PAD, video_token_id=91, vision_start_token_id=92,
                                               vision_end_token_id=93, tie_word_embeddings=False, text_config=text, vision_config=tower)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
    model.save_pretrained(folder)
    return model


def batch() -> tuple[Trajectories, np.ndarray]:
    """Returns a step's completions and an advantage for each."""
    rng, n, merge = np.random.default_rng(0), PROMPTS * GROUP, 2
    prompts = [np.concatenate([rng.integers(100, VOCAB, TEXT // 2), [PAD] * SIDE**2, rng.integers(100, VOCAB, TEXT - TEXT // 2)])
               for _ in range(PROMPTS)]
    rows = [np.concatenate([prompts[i // GROUP], rng.integers(100, VOCAB, ANSWER)]) for i in range(n)]
    length, grid = len(rows[0]), SIDE * merge
    pixels = [rng.integers(0, 256, (grid * grid, 3 * PATCH**2)).astype(np.uint8) for _ in range(PROMPTS)]
    flat = np.zeros(n * length, np.float32)
    pictures = Pictures(np.arange(n), np.full(n, TEXT // 2), np.full((n, 2), grid), np.arange(n) // GROUP, merge, 3 * PATCH**2,
                        lambda wanted: [pixels[int(i)] for i in wanted], 4)
    traj = Trajectories(
        tokens=np.concatenate(rows).astype(np.int32), offsets=length * np.arange(n + 1), loss_mask=np.tile(np.arange(length) >= length - ANSWER, n),
        logprobs=flat, versions=flat.astype(np.int32), prompt_lengths=np.full(n, length - ANSWER, np.int32), group=np.arange(n) // GROUP,
        sample=np.arange(n) % GROUP, seed=np.zeros(n, np.uint32), finish=np.zeros(n, np.int8), pictures=pictures)
    return traj, rng.normal(size=n).astype(np.float32)


class Theirs:
    """TRL's loss, backward pass and torch's AdamW."""

    def __init__(self, model, traj, advantages, frozen: bool):
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        for name, weight in model.named_parameters():
            weight.requires_grad_(not (frozen and "visual" in name))
        self.model, self.optimizer = model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)
        rows = torch.tensor(traj.tokens.reshape(len(advantages), -1).astype(np.int64))
        pixels = np.concatenate(traj.pictures.patches(traj.pictures.numbers)).reshape(-1, 3, 1, PATCH**2) / np.float32(255)
        mean, std = (np.float32(0.5), np.float32(0.5))
        values = np.broadcast_to((pixels - mean) / std, (len(pixels), 3, 2, PATCH**2)).reshape(len(pixels), -1)
        ones = torch.ones_like(rows)
        self.inputs = {
            "prompt_ids": rows[:, :-ANSWER], "prompt_mask": ones[:, :-ANSWER], "completion_ids": rows[:, -ANSWER:],
            "completion_mask": ones[:, -ANSWER:], "advantages": torch.tensor(advantages), "pixel_values": torch.tensor(values),
            "image_grid_thw": torch.tensor([(1, *grid) for grid in traj.pictures.grids.tolist()]), "num_images": [1] * len(rows),
            "mm_token_type_ids": (rows == PAD).long()}
        same = lambda x, **_: x  # noqa: E731
        self.trainer = SimpleNamespace(
            model=model, beta=0.0, loss_type="grpo", importance_sampling_level="token", epsilon_low=0.2, epsilon_high=0.2, top_entropy_quantile=1.0,
            off_policy_mask_threshold=None, use_vllm=False, aux_loss_enabled=False, router_aux_loss_coef=0.0, use_adaptive_entropy=False,
            entropy_coef=0.0, current_gradient_accumulation_steps=1, max_completion_length=ANSWER, vllm_importance_sampling_correction=False,
            _entropy_bonus_enabled=False, _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
            args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
            accelerator=SimpleNamespace(autocast=contextlib.nullcontext, gather=same, gather_for_metrics=same, reduce=same, num_processes=1,
                                        is_main_process=True, sync_gradients=True, device="cpu"))
        self.trainer._get_per_token_logps_and_entropies = MethodType(trl.GRPOTrainer._get_per_token_logps_and_entropies, self.trainer)

    def __call__(self) -> tuple[float, float]:
        """Runs an optimizer step; returns (loss, the gradient's norm)."""
        self.optimizer.zero_grad()
        loss = trl.GRPOTrainer._compute_loss(self.trainer, self.model, self.inputs)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf"))
        self.optimizer.step()
        return float(loss.detach()), float(norm)


class Ours:
    """The update on packed rows."""

    def __init__(self, folder: Path, traj, advantages, frozen: bool):
        described = hf.load_config(str(folder), images=True)
        model = build(described, compute_dtype=jnp.float32, scan_layers=False)
        params = hf.load_params(model, str(folder), dtype=jnp.float32)
        objective = policy_objective(aggregation="sequence_mean", clip_high=0.2)
        optimizer = optax.adamw(LR, weight_decay=0.0)
        self.update = training.make_update(model, optimizer, lambda i: LR, objective)
        trainable, rest = training.partition(params, (".*",), ("vision/.*",) if frozen else ())
        self.state = training.init_state(trainable, rest, optimizer)
        whole = int(traj.prompt_lengths[0]) + GROUP * ANSWER  # a row holds a group: its prompt once
        length = -(-whole // 128) * 128
        patches = row_patches((length,), np.stack([traj.patches[:, 0], 0 * traj.patches[:, 0]], 1)[:1], np.array([whole]), 32)
        shapes = RowShapes((length,), ((PROMPTS,),), patches=patches)
        layout = make_layout(traj.sizes, shapes)
        self.fill = layout.metrics()
        weights = training.loss_weights(traj, np.arange(traj.num_sequences), "sequence_mean")
        columns = {"advantage": traj.spread(advantages)}
        self.kept = None
        if frozen:
            job = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(image_cache_gb=1.0)), model=model, row_shapes=shapes,
                                  on=lambda role: contextlib.nullcontext())
            self.kept = KeptFeatures(job, lambda: params["vision"], lambda x: jax.tree.map(jnp.asarray, x))
        self.parts = traj, layout, columns, {name: weights[name] for name in objective.weights}

    def __call__(self) -> tuple[float, float]:
        """Runs an optimizer step, packing included; returns (loss, the gradient's norm)."""
        traj, layout, columns, weights = self.parts
        traj = traj if self.kept is None else self.kept.shown(traj)
        packed = [jax.tree.map(jnp.asarray, training.pack(traj, m, columns, weights)) for m in layout.minibatches[0].microbatches]
        self.state, metrics = self.update(self.state, packed)
        return float(metrics["loss"]), float(metrics["optim/grad_norm"])


def measured(run) -> tuple[float, tuple[float, float]]:
    since = time.process_time()
    out = run()
    return time.process_time() - since, out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "vision.json")
    out = parser.parse_args().out
    traj, advantages = batch()
    result = {"prompts": PROMPTS, "group": GROUP, "image_tokens": SIDE**2, "text_tokens": TEXT, "completion_tokens": ANSWER, "cases": {}}
    for case in ("trained", "frozen"):
        with tempfile.TemporaryDirectory() as folder:
            theirs = Theirs(make(Path(folder)), traj, advantages, case == "frozen")
            ours = Ours(Path(folder), traj, advantages, case == "frozen")
        first = theirs(), ours()
        assert abs(first[0][1] - first[1][1]) < 1e-3 * first[0][1], first
        ours()  # compiled again for the state that an update returns
        seconds = [(measured(theirs)[0], measured(ours)[0]) for _ in range(ROUNDS)]
        a, b = (float(np.median(column)) for column in zip(*seconds, strict=True))
        result["cases"][case] = {"trl_cpu_seconds": round(a, 3), "jaxrl_cpu_seconds": round(b, 3), "ratio": round(a / b, 2),
                                 "grad_norm": first[0][1], "loss": first[0][0], "packing": ours.fill,
                                 "rounds": [list(map(float, s)) for s in seconds]}
        print(case, json.dumps(result["cases"][case]), flush=True)
    result |= {"commit": commit(), "machine": machine(), "cores_used": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[1], 1),
               "versions": {m.__name__: m.__version__ for m in (jax, torch, transformers, trl)}}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
