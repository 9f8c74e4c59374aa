"""A teacher behind a real `vllm serve` says what the same weights say here."""

import sys
import time
from types import SimpleNamespace

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.rollout_helpers import HF, random_params
from helpers.tiny_job import get_config

from jaxrl import models, training
from jaxrl.config.load import default_config
from jaxrl.data import load_tokenizer
from jaxrl.errors import RunStopped
from jaxrl.models.io import hf
from jaxrl.recipes.sft import demonstrations
from jaxrl.resolve.spec import resolve
from jaxrl.roles import teachers
from jaxrl.rollout.vllm.process import ServerProcess, free_port
from jaxrl.rollout.vllm.scoring import PromptScorer
from jaxrl.run import setup

VOCAB = 96


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(folder of a model, URL of a server of it)"""
    top = tmp_path_factory.mktemp("served")
    folder, port = top / "model", free_port("127.0.0.1")
    described = HF | {"vocab_size": VOCAB}
    model = models.build(described, compute_dtype=jnp.float32, scan_layers=False)
    params = random_params(model, 0, 0.15)
    params["head"]["kernel"] = params["head"]["kernel"] * 3.0  # probabilities spread over several orders of magnitude
    hf.export(model, params, folder, hf.load_config("", None, described), tokenizer=load_tokenizer(get_config()))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port), "--host", "127.0.0.1",
               "--dtype", "float32", "--enforce-eager", "--max-model-len", "64", "--max-logprobs", "8", "--block-size", "32"]
    process = ServerProcess(command, {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1"}, top / "log")
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 300
    while time.monotonic() < end and process.exit_status() is None:
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                break
        except httpx.HTTPError:
            time.sleep(1)
    assert process.exit_status() is None, process.last_errors()
    yield folder, url
    process.stop()


def config(folder, url="", **options):
    c = default_config()
    c.run.recipe, c.model.path, c.teacher.path, c.data.path = "distill", str(folder), str(folder), ("none.jsonl",)
    c.data.max_prompt_tokens, c.rollout.max_new_tokens, c.teacher.servers = 16, 40, (url,) if url else ()
    c.distill.update(options)
    c.teacher.dtype = "fp32" if not url else "bf16"
    return resolve(c, engine="jax")


@pytest.mark.vllm
@pytest.mark.parametrize("options", [{"loss": "sampled"}, {"loss": "forward", "top_k": 5}])
def test_servers_and_a_local_teacher_agree(served, options):
    """The token's own log-prob, and the five most probable ones, within 1e-3 nats."""
    folder, url = served
    rng = np.random.default_rng(0)
    rows = [SimpleNamespace(prompt_ids=rng.integers(4, VOCAB, 6), target_ids=rng.integers(4, VOCAB, 20 + k), trained=None) for k in range(9)]
    traj = demonstrations(rows, range(9), False)
    here = setup.open_job(config(folder, **options))
    layout = training.make_layout(traj.sizes, here.row_shapes, share_prompts=False)
    local = teachers.open_teacher(here).targets(traj, layout, None)
    far = teachers.ServerTeacher(SimpleNamespace(config=config(folder, url, **options), model=here.model))
    said = far.targets(traj, layout, None)
    assert set(said) == set(local)
    for name, column in local.items():
        mine, theirs = (x[name][traj.loss_mask] for x in (local, said))
        if column.dtype.kind == "i":
            assert (mine == theirs).mean() > 0.99  # of two that are as probable, either comes first
        else:
            np.testing.assert_allclose(mine, theirs, atol=1e-3)
            assert np.ptp(mine) > 1
    far.close()


@pytest.mark.vllm
def test_more_than_a_server_says_is_refused_with_the_remedy(served):
    scorer = PromptScorer((served[1],), 60.0, 40)
    with pytest.raises(RunStopped, match=r"refuses a request of 5 tokens with distill.top_k=9.*--max-logprobs"):
        scorer.score([np.arange(4, 9)], 9)
    scorer.close()
