"""Log-probabilities and gradients of models with a tower in float64, against transformers' torch models computed in float64 throughout."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import video_cases
from helpers import vision_cases as cases
from helpers.tiers import first_cases
from helpers.vision_cases import rows_for, sequences, value_and_gradients

from jaxrl.models import build
from jaxrl.models.io import hf, tensorfile
from jaxrl.models.rope import Rope, frequencies

pytestmark = pytest.mark.torch


class Doubled:
    """torch as a module of transformers sees it, whose float32 is float64: norms, angles and softmaxes name it."""

    def __init__(self, torch):
        self.torch = torch

    def __getattr__(self, name):
        return getattr(self.torch, {"float32": "float64", "float": "float64"}.get(name, name))


@pytest.fixture
def in_float64(monkeypatch):
    """Has transformers' modules of a kind compute in float64 where they ask for fp32."""
    import torch

    def patch(kind):
        for name in (f"models.{kind}.modeling_{kind}", "vision_utils"):
            monkeypatch.setattr(importlib.import_module(f"transformers.{name}"), "torch", Doubled(torch))
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield patch
    torch.set_default_dtype(default)


@pytest.mark.full
@first_cases(1, "kind", ["qwen2_5_vl", "qwen3_vl_moe", "qwen3_vl", "qwen2_vl"], full=2)
def test_every_gradient_equals_transformers(tmp_path, in_float64, kind):
    """Of tower, mergers, taps and decoder: relative to the parameter's largest, 1e-10; of 0, 1 and 2 images, packed into two rows here."""
    own = sequences()
    check(tmp_path, in_float64, kind, cases.ours, own, lambda model, one: cases.theirs(model, *one, grad=True),
          lambda model: rows_for(model, own, rows=[0, 0, 1, 1])[:2])


@pytest.mark.full
def test_every_gradient_of_videos_equals_transformers(tmp_path, in_float64):
    """Of rows with two videos, an image and text, packed into two; frames of one patch differ."""
    own = video_cases.sequences("qwen2_5_vl")
    check(tmp_path, in_float64, "qwen2_5_vl", video_cases.ours, own, lambda model, one: video_cases.theirs(model, one, grad=True),
          lambda model: video_cases.rows(own, model.config.vision.window, [0, 0, 1])[:2])


def check(tmp_path, in_float64, kind, ours, sequences, theirs_of, rows_of):
    import torch
    theirs = cases.make(tmp_path / "model", kind=kind).double()
    if kind == "qwen3_vl_moe":  # torch's grouped product has no float64
        theirs.set_experts_implementation("eager")
    table = build(hf.load_config(str(tmp_path / "model"), images=True), compute_dtype=jnp.float32, scan_layers=False).config
    for name, buffer in theirs.named_buffers():  # torch's and numpy's fp32 powers differ in the last bit
        rope, size = (Rope(theta=table.vision.theta), table.vision.head_dim // 2) if "visual" in name else (table.ropes[0], table.head_dim)
        assert name.endswith("inv_freq"), name
        np.testing.assert_allclose(buffer.numpy(), own := frequencies(rope, size), rtol=3e-7)
        buffer.copy_(torch.tensor(own))
    in_float64(kind)
    value = 0.0
    for own in sequences:
        out = torch.log_softmax(theirs_of(theirs, own), -1).sin().sum()
        out.backward()
        value += float(out.detach())
    with jax.enable_x64(True):
        model, params = ours(tmp_path / "model", dtype=jnp.float64)
        found, grads = value_and_gradients(model, params, *rows_of(model))
        hf.export(model, grads, tmp_path / "grads", hf.load_config(str(tmp_path / "model"), images=True), dtype="float64")
    got = {name: t.read() for name, t in tensorfile.list_folder(tmp_path / "grads").items()}
    assert abs(found - value) < 1e-10 * abs(value)
    stored = {cases.stored_name(kind, name): weight.grad.numpy() for name, weight in theirs.named_parameters()}
    assert got.keys() == stored.keys()
    worst = {name: float(np.abs(got[name] - x).max() / max(np.abs(x).max(), 1e-6)) for name, x in stored.items()}
    assert max(worst.values()) < 1e-10, sorted(worst.items(), key=lambda one: -one[1])[:5]
