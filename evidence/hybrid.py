"""Recurrent layers: what the backward pass keeps, and a training step beside transformers' and beside copies of prompts.

python evidence/hybrid.py                    all parts
python evidence/hybrid.py temporaries        compiled, nothing is run; minutes on 2 idle cores
python evidence/hybrid.py temporaries --tpu v5e     the same for a TPU that is not here; needs libtpu
python evidence/hybrid.py times              runs: an idle machine
python evidence/hybrid.py slots              counts: seconds

temporaries: of the rule of Qwen3.5-4B's layer (16 key heads, 32 value heads, 128 x 128, v in bf16), forward and backward,
by row length: its own backward pass; differentiated through its chunks, nothing computed again; through its tokens.
times: log-probs of completions and their gradients, 4 groups of 8 completions, fp32, no optimizer: rows in which a group
shares its prompt; rows in which every completion has a copy; transformers in a torch loop, one group at a time.
slots: of the embedded sampler of Qwen3.5-4B on an H100, prompts of 1,024 tokens and completions of 3,072: bytes of states and of keys and
values, and the plan's roofline of a rollout, in which every step reads all of them.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "HF_HUB_OFFLINE": "1"}
sys.path[:0] = [str(Path(__file__).parents[1]), os.path.dirname(__file__)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from common import commit, record, table  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jaxrl.kernels.recurrence import api, chunks_of, xla  # noqa: E402

HEADS, REPEATS, SIZE = 16, 2, 128
LENGTHS = (1024, 2048, 4096, 8192)
TOKENS_AT_MOST = 1024  # of the form by tokens, whose temporaries grow by 10 MiB a token
GROUPS, MEMBERS, PROMPT, COMPLETION = 4, 8, 384, 64
MODEL = {
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "full_attention_interval": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}
ROUNDS = 5
SLOTS = (64, 256, 1024)


# ---- temporaries


def temporaries(length: int, implementation: str, device, whole: bool = False) -> int:
    """Bytes of the compiled gradient of one row; whole: without computing anything again."""
    def both(q, k, v, g, beta, segments, weight):
        chunks = chunks_of(segments)
        rule = lambda *a: api.IMPLEMENTATIONS[implementation](*a, chunks)[0]  # noqa: E731
        out, back = jax.vjp(rule, q, k, v, g, beta)
        return out, back(weight)

    keys, values = (1, length, HEADS, SIZE), (1, length, HEADS * REPEATS, SIZE)
    shapes = [(keys, jnp.float32)] * 2 + [(values, jnp.bfloat16)] + [(values[:3], jnp.float32)] * 2
    shapes += [((1, length), jnp.int32), (values, jnp.bfloat16)]
    one = Mesh(np.array([device]), ("one",), axis_types=(AxisType.Auto,))
    given = [jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(one, P())) for s, d in shapes]
    kept = mock.patch.object(xla, "_through", through) if whole else contextlib.nullcontext()
    with kept, jax.sharding.use_abstract_mesh(one.abstract_mesh):
        return jax.jit(both).lower(*given).compile().memory_analysis().temp_size_in_bytes


def through(delta, given, arrays, rest, used):
    """`xla._through` without a backward pass of its own."""
    (now, _), out = jax.lax.scan(lambda pair, own: xla._STRETCHES[delta](pair, given, *own), (given, jnp.zeros_like(given)), (arrays, rest))
    return out, now


def all_temporaries(chip: str) -> list[dict]:
    if chip:
        from jax.experimental import topologies

        device = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip}:2x2" + "x1" * (chip == "v5p")).devices[0]
    else:
        device = jax.devices("cpu")[0]
    found = []
    for length in LENGTHS:
        forms = {"own": ("xla", False), **({"kernel": ("tpu", False)} if chip else {}), "through chunks": ("xla", True)}
        if length <= TOKENS_AT_MOST and not chip:
            forms["through tokens"] = ("reference", False)
        sizes = {name: temporaries(length, form[0], device, form[1]) for name, form in forms.items()}
        found.append({"length": length, "device": chip or "cpu", **{name: round(n / 2**20, 1) for name, n in sizes.items()}})
        print(found[-1], flush=True)
    names = [name for name in ("own", "kernel", "through chunks", "through tokens") if name in found[0]]
    table(["tokens", *(f"{n}, MiB" for n in names), "own over chunks"],
          [[r["length"], *(r.get(n, "") for n in names), round(r["own"] / r["through chunks"], 3)] for r in found])
    return found


# ---- times


def rows(tokens, shared: bool):
    """(tokens, positions, segments, prefixes, completion mask) of groups, one row each, or one row for each completion."""
    prompts, completions = tokens
    copies = prompts[:, None].repeat(MEMBERS, axis=1)
    if not shared:
        ids = np.concatenate([copies, completions], axis=2).reshape(GROUPS * MEMBERS, -1)
        ones = np.ones_like(ids)
        mask = np.arange(ids.shape[1]) >= PROMPT
        return ids, np.arange(ids.shape[1]) * ones, ones, 0 * ones, mask * ones
    ids = np.concatenate([prompts, completions.reshape(GROUPS, -1)], axis=1)
    segments = np.concatenate([np.ones(PROMPT, int), 2 + np.arange(MEMBERS).repeat(COMPLETION)]) * np.ones_like(ids)
    positions = np.concatenate([np.arange(PROMPT), np.tile(PROMPT + np.arange(COMPLETION), MEMBERS)]) * np.ones_like(ids)
    return ids, positions, segments, (segments > 1).astype(int), segments > 1


def targets(tokens, shared: bool):
    """(row, place of the hidden state, token that it predicts) of every token of completions behind the first."""
    ids, _, segments, _, mask = rows(tokens, shared)
    row, place = np.nonzero(mask[:, 1:] & mask[:, :-1] & (segments[:, 1:] == segments[:, :-1]))
    return row, place, ids[row, place + 1]


def jaxrl_step(folder: str, tokens, shared: bool):
    """A function that computes the loss and the gradients, and waits for them."""
    from jaxrl.models import build
    from jaxrl.models.io import hf

    model = build(hf.load_config(folder), compute_dtype=jnp.float32, scan_layers=False)
    params = jax.device_put(hf.load_params(model, folder, dtype=jnp.float32))
    *arrays, _ = (jnp.asarray(x, jnp.int32) for x in rows(tokens, shared))
    row, place, wanted = targets(tokens, shared)

    @jax.jit
    def step(params, *arrays):
        def loss(params):
            logits = model.logits(params, model.hidden(params, *arrays)[row, place])
            return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(wanted)), wanted])

        return jax.value_and_grad(loss)(params)

    return lambda: float(jax.block_until_ready(step(params, *arrays))[0])


def torch_step(folder: str, tokens):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    ids, *_ = rows(tokens, shared=False)
    groups = torch.tensor(ids).reshape(GROUPS, MEMBERS, -1)

    def step():
        model.zero_grad()
        total = 0.0
        for group in groups:
            logits = model(group, use_cache=False).logits[:, PROMPT:-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), group[:, PROMPT + 1:].flatten()) / GROUPS
            loss.backward()
            total += float(loss.detach())
        return total

    return step


def times() -> list[dict]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    print("load:", *(round(x, 2) for x in os.getloadavg()), "of", os.cpu_count(), "cores", flush=True)
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, MODEL["vocab_size"], (GROUPS, PROMPT)), draw.integers(0, MODEL["vocab_size"], (GROUPS, MEMBERS, COMPLETION))
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        own = {k: v for k, v in MODEL.items() if k != "architectures"}
        AutoModelForCausalLM.from_config(AutoConfig.for_model(own.pop("model_type"), **own)).save_pretrained(folder)
        steps = {"shared prompts": jaxrl_step(folder, tokens, True), "copies of prompts": jaxrl_step(folder, tokens, False),
                 "transformers": torch_step(folder, tokens)}
        losses = {name: step() for name, step in steps.items()}  # compiles
        spent = {name: [] for name in steps}
        for _ in range(ROUNDS):  # in turn, so that what else runs here falls on all
            for name, step in steps.items():
                begin = time.perf_counter()
                step()
                spent[name].append(time.perf_counter() - begin)
    assert max(losses.values()) - min(losses.values()) < 1e-4, losses
    found = [{"step": name, "loss": losses[name], "median_s": float(np.median(s)), "all_s": s} for name, s in spent.items()]
    first = found[0]["median_s"]
    table(["step", "loss", "median s", "over shared prompts"],
          [[r["step"], round(r["loss"], 5), round(r["median_s"], 3), round(r["median_s"] / first, 2)] for r in found])
    return found


# ---- slots


def slots() -> list[dict]:
    from plan_shapes import grpo, job

    from jaxrl.planning import plan, workload
    from jaxrl.planning.case import open_case

    found = []
    for count in SLOTS:
        case = open_case(job("3.5-4B", "h100:1", **grpo(128, 8, 1024, 3072, 8192, rollout__engine="jax", rollout__slots=count)))
        cfg, (_, shapes, width) = case.model.config, case.rollout
        states = count * workload.state_bytes(cfg, case.mesh, width)
        cached = count * shapes.cache_lengths[-1] * sum(cfg.cache_widths.values()) * len(cfg.windows) * width
        rollout = plan.times(case, {})["phases"]["rollout"]
        found.append({"slots": count, "states_gib": states / 2**30, "kv_gib": cached / 2**30, "rollout_s": rollout["seconds"],
                      "bound": rollout["bound"], "tokens_per_second": 128 * 8 * 3072 / rollout["seconds"]})
    table(["slots", "states, GiB", "keys and values at 4,096, GiB", "rollout s", "bound", "tokens a second"],
          [[r["slots"], *(round(r[n], 1) for n in ("states_gib", "kv_gib", "rollout_s")), r["bound"], round(r["tokens_per_second"])] for r in found])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("temporaries", "times", "slots"))
    parser.add_argument("--tpu", default="", help="v5e, v5p or v6e, for temporaries")
    asked, at = parser.parse_args(), commit()
    if asked.part in (None, "slots"):
        record("hybrid_slots", slots(), at)
    if asked.part in (None, "temporaries"):
        record("hybrid_temporaries" + f"_{asked.tpu}" * bool(asked.tpu), all_temporaries(asked.tpu), at)
    if asked.part in (None, "times"):
        record("hybrid_times", times(), at)


if __name__ == "__main__":
    main()
