"""A tiny student and its teachers, for tests of distillation. As a script: one step of it on four devices, printed as JSON.

    python distill_job.py FOLDER shared|apart     the teacher on the policy's two devices, or on two others in another shape
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl
from helpers.tiny_job import MODEL, get_config
from jaxrl import models
from jaxrl.config.load import put
from jaxrl.data import load_tokenizer
from jaxrl.models.io import hf
from jaxrl.models.io.tensorfile import list_folder

WIDER = MODEL | {"hidden_size": 48, "num_hidden_layers": 1, "tie_word_embeddings": False, "vocab_size": 200}


def make_models(top: Path) -> Path:
    """`teacher`, larger than the student and with padded ids of its own; `student`."""
    for name, described, seed in (("teacher", WIDER, 1), ("student", MODEL, 0)):
        model = models.build(described, compute_dtype=jnp.float32, scan_layers=False)
        params = jax.tree.map(lambda x: 2 * x, model.init(jax.random.key(seed)))
        hf.export(model, params, top / name, hf.load_config("", None, described), tokenizer=load_tokenizer(get_config()))
    return top


def job(folder, run, **options):
    c = get_config()
    c.run.recipe, c.run.dir, c.model.init, c.model.path, c.model.config = "distill", str(run), "pretrained", str(folder / "student"), {}
    c.model.tokenizer = ""
    c.teacher.path, c.teacher.dtype = str(folder / "teacher"), "fp32"
    c.data.path, c.data.max_prompt_tokens, c.rollout.max_new_tokens = ("jaxrl://arith/sft.jsonl",), 40, 72
    c.rollout.prompt_lengths, c.rollout.group_size, c.eval.sets = (40,), 2, ()
    c.train.steps, c.log.console, c.checkpoint.every_steps, c.checkpoint.at_end = 2, "off", 0, False
    c.optimizer.lr, c.optimizer.weight_decay, c.rollout.engine = 1e-2, 0.0, "jax"
    for name, value in options.items():
        put(c, name.replace("__", "."), value)
    return c


def trained(c):
    """(lines of metrics, exported weights)"""
    jaxrl.train(c)
    with open(f"{c.run.dir}/metrics.jsonl") as f:
        lines = [json.loads(line) for line in f]
    return lines, {name: np.asarray(t.read()) for name, t in list_folder(Path(c.run.dir) / "export").items()}


if __name__ == "__main__":
    where, layout = Path(sys.argv[1]), sys.argv[2]
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_disable_most_optimizations", True)
    roles = {"policy": {"devices": "0-1"}, "sampler": {"devices": "0-1"}, "teacher": {"devices": "0-1"}}
    if layout == "apart":
        roles["teacher"] = {"devices": "2-3", "tp": 2, "fsdp": 1, "rest": "host"}
    for loss, top in (("jsd", 0), ("forward", 8)):
        found, weights = trained(job(where, where / f"{layout}_{loss}", distill__loss=loss, distill__top_k=top, distill__on_policy=0.0,
                                     mesh__roles=roles, run__compile_cache="", train__steps=1))
        print(json.dumps({"loss": found[0]["loss"], "sum": float(sum(np.abs(w).sum() for w in weights.values()))}), flush=True)
