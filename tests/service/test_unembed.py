"""Adapters on the output matrix, the SDK's default: of a head of its own and of one that is the embedding."""

import json

import jax
import numpy as np
import pytest
from helpers.peft_cases import ATTENTION, Imported, checkpoint, in_float64, lora_config, torch_model, wrapped
from helpers.tiers import nightly
from helpers.tinker_cases import next_tokens, numbers, served
from helpers.tiny_models import VOCAB, make_tiny
from helpers.trainer_cases import (
    CONFIGS,
    LARGEST,
    LONGEST,
    RANK,
    adopted,
    data,
    learning,
    of_loss,
    their_loss,
    trainer_of,
    under_peft_s_names,
)

from jaxrl.errors import ConfigError
from jaxrl.models.adapters import peft
from jaxrl.service import app, bodies
from jaxrl.service.refusals import Refused
from jaxrl.service.trainer import AdamSettings, LoraOptions

torch, theirs_peft = Imported("torch"), Imported("peft")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("the_mesh_as_it_was")]
TARGETS = [*ATTENTION, "gate_proj", "up_proj", "down_proj", "lm_head"]
ROWS = [next_tokens([3, 10, 11, 12, 13, 14]), next_tokens([3, 20, 21, 22])]
HEAD = ("base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight")


@pytest.fixture(scope="module", params=[False, True], ids=["a head of its own", "the embedding"])
def models(request, tmp_path_factory):
    """(a trainer in float64 with two runs together, PEFT's model of the same base)."""
    path = checkpoint(tmp_path_factory.mktemp("base"), tie_word_embeddings=request.param)
    with jax.enable_x64(True):
        trainer = trainer_of(path, np.float64, together=2, unembed=True)
        assert trainer.model.config.tied == request.param
        config = lora_config(r=RANK, lora_alpha=32, target_modules=TARGETS)
        yield trainer, in_float64(wrapped(torch_model(path, "sdpa"), config))


def tuned(theirs, seed):
    """PEFT's model with other numbers in its adapters."""
    torch.manual_seed(seed)
    for p in learning(theirs).values():
        p.data.normal_(0, 0.2)
    theirs.zero_grad()
    return theirs


def batch_of(seed, name, sizes):
    rows = data(np.random.default_rng(seed), sizes)
    return rows, bodies.batch(of_loss(rows, name), name, CONFIGS.get(name, {}), LONGEST, VOCAB)


@pytest.mark.full
def test_gradients_and_steps_are_torch_s(models):
    """Apart and in the bank, in float64: log-probs, losses, gradients of A and B of every map; then AdamW."""
    trainer, theirs = models
    runs, again, batches, wanted = [], [], [], []
    for seed, (name, sizes) in enumerate((("cross_entropy", (9, 1, 23)), ("ppo", (16, 30, 5)))):
        tuned(theirs, seed)
        runs.append(adopted(trainer, theirs))
        again.append(adopted(trainer, theirs))
        rows, batch = batch_of(seed, name, sizes)
        batches.append(batch)
        logprobs, loss = their_loss(theirs, rows, name, low=0.9)
        loss.backward()
        wanted.append((logprobs, loss.item(), {key: p.grad.numpy().copy() for key, p in learning(theirs).items()}))
    apart = [trainer.forward_backward(run, batch, True) for run, batch in zip(runs, batches, strict=True)]
    both = trainer.forward_backward_together(list(zip(again, batches, strict=True)), True)
    for run, found, (logprobs, loss, grads) in zip([*runs, *again], [*apart, *both], wanted * 2, strict=True):
        assert found[1] == pytest.approx(loss, rel=1e-10)
        for ours, other in zip(found[0], logprobs, strict=True):
            np.testing.assert_allclose(ours, other, atol=1e-10)
        own = under_peft_s_names(trainer, run, run.window | dict(run.state.frozen))
        assert own.keys() == grads.keys() and min(np.abs(own[key]).max() for key in HEAD) > 0.1
        for key, gradient in own.items():
            np.testing.assert_allclose(gradient, grads[key], atol=1e-10 * max(1, np.abs(gradient).max()), err_msg=key)
    rule = torch.optim.AdamW(learning(theirs).values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    rule.step()
    for run in (runs[1], again[1]):
        trainer.optim_step(run, AdamSettings(1e-2, 0.9, 0.95, 1e-8))
        ours = under_peft_s_names(trainer, run, trainer.leaves(run))
        for key, other in learning(theirs).items():
            np.testing.assert_allclose(ours[key], other.detach().numpy(), atol=1e-8, err_msg=key)
    assert not any(x[..., RANK:].any() for name, x in trainer.leaves(runs[1]).items() if name == "head/lora/a")


@pytest.mark.full
def test_what_is_not_finite_in_one_head_reaches_no_other_run(models):
    trainer, theirs = models
    good, bad = adopted(trainer, tuned(theirs, 3)), adopted(trainer, theirs)
    _, batch = batch_of(3, "cross_entropy", (9, 12))
    alone = trainer.forward_backward_together([(good, batch), (adopted(trainer, theirs), batch)], True)
    before, good.window = good.window, None
    leaves = trainer.leaves(bad)
    leaves["head/lora/b"][0, 5] = np.inf
    bad = trainer.restored(bad.options, leaves)
    one, other = trainer.forward_backward_together([(good, batch), (bad, batch)], True)
    assert isinstance(other, Refused) and "nothing was added" in str(other)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(one[0], alone[0][0], strict=True))
    assert all(np.asarray(good.window[name]).tobytes() == np.asarray(x).tobytes() for name, x in before.items())


@pytest.mark.full
def test_peft_reads_what_is_written(models, tmp_path):
    """Its logits are those of the policy, of numbers that it rounds to fp32; and what is read back is what was written, bit for bit."""
    trainer, theirs = models
    run = adopted(trainer, tuned(theirs, 4))
    trainer.export(run, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert "lm_head" in config["target_modules"]
    fresh = in_float64(theirs_peft.PeftModel.from_pretrained(torch_model(theirs.config._name_or_path, "sdpa"), tmp_path / "adapter"))
    ids = torch.tensor(data(np.random.default_rng(1), (20,))[0].tokens[None]).long()
    with torch.no_grad():
        found, wanted = fresh(ids).logits.numpy(), theirs(ids).logits.numpy()
        with fresh.disable_adapter():
            without = fresh(ids).logits.numpy()
    assert np.abs(found - wanted).max() < 1e-4 < 0.1 < np.abs(found - without).max()
    _, leaves = peft.read(tmp_path / "adapter", trainer.model.base, head=True)
    back = trainer.restored(run.options, leaves)
    assert all(np.array_equal(x, trainer.leaves(run)[name]) for name, x in trainer.leaves(back).items())
    with pytest.raises(ConfigError, match="those on output matrices by jaxrl serve tinker alone"):
        peft.read(tmp_path / "adapter", trainer.model.base)


@pytest.mark.full
def test_a_server_without_such_adapters_refuses_their_weights(tmp_path):
    trainer = trainer_of(checkpoint(tmp_path), np.float32)
    for start in (trainer.start, lambda options: trainer.restored(options, {})):
        with pytest.raises(Refused, match="start it with --unembed=train"):
            start(LoraOptions(LARGEST, unembed=True))


@pytest.mark.full
@pytest.mark.parametrize("tied", [nightly(False), True], ids=["a head of its own", "the embedding"])
def test_samples_are_of_what_was_trained(tmp_path, tied):
    """After a step of the head alone, the sampler's log-probs of prompt and samples are the trainer's, and not the base's."""
    make_tiny("llama", tmp_path / "model", tie_word_embeddings=tied)
    with served(tmp_path) as (_, client):
        session = client.session()
        run = client.run(session, train_unembed=True, train_attn=False, train_mlp=False)
        client.forward_backward(run, 1, ROWS)
        client.result(client.optim_step(run, 2, learning_rate=0.1))
        path = client.result(client.ok("save_weights_for_sampler", {"model_id": run, "seq_id": 3, "path": "head"}))["path"]
        assert client.ok("weights_info", {"tinker_path": path})["train_unembed"] is True
        gaps = []
        for number, weights in enumerate((path, None)):
            sampler = client.sampler(session, number, weights)
            found = client.result(client.sample(sampler, 0, [3, 10, 11], num_samples=1, prompt_logprobs=True, params={"seed": 4}))
            own = found.sequences[0]
            whole = np.array([3, 10, 11, *np.frombuffer(own.tokens, np.int32)])
            scored = numbers(client.result(client.forward_backward(run, 4 + number, [next_tokens(whole)], forward_only=True)))[0]
            parts = np.frombuffer(found.prompt_logprobs, np.float32)[1:], np.frombuffer(own.logprobs, np.float32)
            gaps.append(np.abs(np.concatenate(parts) - scored).max())
        assert gaps[0] < 1e-5 < 0.1 < gaps[1]


def test_runs_of_a_folder_keep_their_output_matrix(tmp_path):
    """Else a restart would go on with other adapters than it trained."""
    options = app.Options("model")
    app.check_folder(tmp_path, options, "00")
    app.check_folder(tmp_path, options, "00")
    with pytest.raises(ConfigError, match="were trained with --unembed=train; set that"):
        app.check_folder(tmp_path, options._replace(unembed="leave-out"), "00")
    (tmp_path / "base.json").write_text(json.dumps({"digest": "00", "alpha": 32.0, "rank": 32}))  # before there was a choice
    with pytest.raises(ConfigError, match="--unembed=leave-out"):
        app.check_folder(tmp_path, options, "00")
