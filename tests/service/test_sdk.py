"""The real tinker SDK and recipes of tinker-cookbook, unmodified, against a server on a tiny random model.

Needs `pip install tinker tinker-cookbook` beside jaxrl's own packages; .ci/run sdk installs them.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.compat, pytest.mark.torch]
ROOT = Path(__file__).resolve().parents[2]
NAMES = ("Qwen/Qwen3-8B-Base", "Qwen/Qwen2.5-0.5B-Instruct")  # of the cookbook's table, and of the page


def make_model(folder: Path) -> None:
    """A random Qwen3 of two layers whose tokens are bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    own = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<|endoftext|>", pad_token="<|endoftext|>",
                                   additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, tie_word_embeddings=False, eos_token_id=256,
        bos_token_id=None, pad_token_id=256, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working folder with the model under the names that clients ask for, and the recipes' data sets."""
    folder = tmp_path_factory.mktemp("place")
    for name in NAMES:
        make_model(folder / name)
    rng, rows = random.Random(0), folder / "HuggingFaceH4/no_robots"
    rows.mkdir(parents=True)
    talks = [[{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}]
             for word in rng.choices("red blue green one two three".split(), k=128)]
    (rows / "train.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return folder


@pytest.fixture(scope="module")
def server(place):
    """The environment of a client of a server that `jaxrl serve tinker` started."""
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jaxrl", "serve", "tinker", f"--model={place / NAMES[0]}", *(f"--name={name}" for name in NAMES),
               "--max-length=512", "--port=0", f"--dir={place / 'saved'}"]
    process = subprocess.Popen(command, cwd=place, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        told = dict(re.findall(r"(TINKER_\w+)=(\S+)", "".join(lines)))
        assert told.keys() == {"TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_TELEMETRY"}
        yield environ | told
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()


def client(server, place, *words) -> str:
    done = subprocess.run([sys.executable, *words], cwd=place, env=server, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_page_s_loop(server, place):
    block = re.search(r"```python\n(import tinker\n.*?)```", (ROOT / "docs/guides/service.md").read_text(), re.S)[1]
    (place / "loop.py").write_text(block)
    lines = client(server, place, "loop.py").splitlines()
    losses = [float(line.split()[0]) for line in lines[:10]]
    assert losses[-1] < 0.8 * losses[0] and lines[-1].endswith("/sampler_weights/sky")
    run = lines[-1].split("/")[2].replace(":", "_")
    import peft
    from transformers import AutoModelForCausalLM
    base = AutoModelForCausalLM.from_pretrained(place / NAMES[1])
    peft.PeftModel.from_pretrained(base, place / "saved" / run / "sampler_weights/sky")


def test_sl_loop_learns_and_resumes(server, place):
    words = ("-m", "tinker_cookbook.recipes.sl_loop", f"model_name={NAMES[0]}", "log_path=sl", "batch_size=16", "lora_rank=8",
             "learning_rate=3e-3", "save_every=2")
    client(server, place, *words, "max_steps=5")
    found = [row["train_mean_nll"] for row in metrics(place / "sl") if "train_mean_nll" in row]
    assert len(found) == 5 and found[-1] < found[0] - 0.5
    saved = [json.loads(line) for line in (place / "sl/checkpoints.jsonl").read_text().splitlines()]
    assert [row["name"] for row in saved] == ["000002", "000004", "final"] and saved[-1]["sampler_path"]
    (place / "sl/checkpoints.jsonl").write_text(json.dumps(saved[1]) + "\n")
    client(server, place, *words, "max_steps=6")
    again = [row["train_mean_nll"] for row in metrics(place / "sl") if "train_mean_nll" in row][5:]
    assert len(again) == 2 and again[0] == pytest.approx(found[4], rel=1e-6)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_math_rl(server, place, loss):
    folder = f"math_{loss}"
    client(server, place, "-m", "tinker_cookbook.recipes.math_rl.train", f"model_name={NAMES[0]}", f"log_path={folder}", "groups_per_batch=8",
           "group_size=4", "max_steps=3", f"loss_fn={loss}", "lora_rank=8", "learning_rate=1e-3", "eval_every=0")
    rows = [row for row in metrics(place / folder) if "optim/entropy" in row]
    assert len(rows) == 3
    assert all(abs(row["optim/kl_sample_train_v1"]) < 1e-3 for row in rows)  # the trainer's log-probs are the sampler's


def test_the_notebook_of_a_loss_of_one_s_own(server, place):
    """Cell by cell, with a server of its own; it asserts that the reward rises."""
    cells = json.loads((ROOT / "notebooks/own_loss_over_the_service.ipynb").read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (place / "notebook.py").write_text(source)
    lines = client({**server, "JAXRL_SERVICE_MODEL": NAMES[0]}, place, "notebook.py").splitlines()
    assert lines[-1].startswith("tinker://") and "adapter_model.safetensors" in lines[-1]
