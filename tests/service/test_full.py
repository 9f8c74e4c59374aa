"""Runs that train all parameters (`--rank=0`): steps beside torch's, saves, runs that take turns, refusals."""

import functools

import jax
import numpy as np
import pytest
from helpers.peft_cases import Imported, checkpoint, in_float64, torch_model
from helpers.tinker_cases import Client, next_tokens, numbers, served
from helpers.tiny_models import VOCAB
from helpers.trainer_cases import LONGEST, data, of_loss, their_loss
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from jaxrl import sharding, training
from jaxrl.errors import ConfigError
from jaxrl.models import build
from jaxrl.models.io import hf
from jaxrl.models.parameters import flattened
from jaxrl.service import app, bodies
from jaxrl.service.full import FullTrainer
from jaxrl.service.operations import Operations
from jaxrl.service.routes import make_app
from jaxrl.service.trainer import AdamSettings, LoraOptions

torch, transformers = Imported("torch"), Imported("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("the_mesh_as_it_was")]
ROWS = [next_tokens([3, 10, 11, 12, 13, 14]), next_tokens([3, 20, 21, 22])]
ALL = LoraOptions(0, unembed=True)


def trainer_of(path):
    """A FullTrainer in float64 on one device."""
    config = hf.load_config(str(path))
    model = build(config, compute_dtype=np.float64, scan_layers=True, attention="reference")
    params = flattened(hf.load_params(model, str(path), dtype=np.float64))
    mesh = sharding.make_mesh({"dp": 1, "fsdp": 1, "tp": 1, "cp": 1, "ep": 1}, jax.devices()[:1])
    jax.set_mesh(mesh)
    everywhere = NamedSharding(mesh, P())
    return FullTrainer(model, params, dict.fromkeys(params, everywhere), everywhere, training.row_shapes((LONGEST,), LONGEST, 80, 1, sizes=1),
                       functools.partial(jax.device_put, device=everywhere), 16,
                       lambda tree, folder: hf.export(model, tree, folder, config, "float64"),
                       lambda folder: flattened(hf.load_params(model, str(folder), dtype=np.float64)))


@pytest.mark.full
def test_steps_are_torch_s_and_saves_go_on(tmp_path):
    """Every parameter after three steps whose losses and settings differ, clipped and not, with decay; then a step of what was saved."""
    path, rows = checkpoint(tmp_path), data(np.random.default_rng(5))
    with jax.enable_x64(True):
        trainer, theirs = trainer_of(path), in_float64(torch_model(path, "sdpa"))
        for p in theirs.parameters():
            p.requires_grad_(True)
        run, rule = trainer.start(ALL), torch.optim.AdamW(theirs.parameters())

        def step(run, name, settings):
            found = trainer.forward_backward(run, bodies.batch(of_loss(rows, name), name, {}, LONGEST, VOCAB), True)
            return found, trainer.optim_step(run, settings)

        for name, settings in (("cross_entropy", AdamSettings(1e-3, 0.9, 0.95, 1e-8)),
                               ("importance_sampling", AdamSettings(3e-3, 0.8, 0.99, 1e-8, 0.1, 2.0))):
            (logprobs, loss), found = step(run, name, settings)
            rule.zero_grad()
            wanted, total = their_loss(theirs, rows, name)
            total.backward()
            norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), settings.grad_clip_norm or 1e30).item()
            rule.param_groups[0].update(lr=settings.learning_rate, betas=settings[1:3], eps=settings.eps, weight_decay=settings.weight_decay)
            rule.step()
            assert loss == pytest.approx(total.item(), rel=1e-10) and found["optim/grad_norm"] == pytest.approx(norm, rel=1e-9)
            for own, other in zip(logprobs, wanted, strict=True):
                np.testing.assert_allclose(own, other, rtol=1e-10)
        trainer.export(run, tmp_path / "saved")
        ours, state = load_file(tmp_path / "saved/model.safetensors"), theirs.state_dict()
        assert ours.keys() <= state.keys()
        for key, value in ours.items():
            np.testing.assert_allclose(value, state[key].numpy(), atol=1e-8, err_msg=key)  # torch clips by norm + 1e-6
        kept = trainer.moments(run)
        moments = (kept["count"], *({n.removeprefix(f"{kind}/"): x for n, x in kept.items() if n.startswith(f"{kind}/")} for kind in ("mu", "nu")))
        loaded, copy = trainer.restored(ALL, trainer.read(tmp_path / "saved"), moments), trainer.from_arrays(ALL, trainer.arrays(run))
        for each in (run, loaded, copy):
            step(each, "ppo", AdamSettings())
        for name, x in trainer.leaves(run).items():
            np.testing.assert_array_equal(trainer.leaves(loaded)[name], x)
            np.testing.assert_array_equal(trainer.leaves(copy)[name], x)
        again = trainer.leaves(trainer.start(ALL))  # the base is what it was
        assert all((x == trainer.initial[name]).all() for name, x in again.items()) and len(again) == len(trainer.leaves(run))


@pytest.mark.full
def test_a_loop_trains_all_parameters(tmp_path):
    """Two runs take turns on the devices; samples have the trainer's log-probs; what is saved opens in transformers and goes on."""
    with served(tmp_path, rank=0) as (server, client):
        session = client.session()
        one, other = (client.run(session, number, rank=0, train_unembed=True) for number in (0, 1))
        assert client.ok("get_info", {"model_id": one})["is_lora"] is False
        for seq in (1, 3, 5):
            for run in (one, other):
                client.forward_backward(run, seq, ROWS)
                client.result(client.optim_step(run, seq + 1))
        first = client.loss(one, 7, ROWS)
        assert first == client.loss(other, 7, ROWS) < 20
        path = client.result(client.ok("save_weights", {"model_id": one, "seq_id": 8, "path": "one"}))["path"]
        own = client.result(client.ok("save_weights_for_sampler", {"model_id": one, "seq_id": 9, "sampling_session_seq_id": 0}))
        found = client.result(client.sample(own["sampling_session_id"], 0, [3, 10, 11], num_samples=1, prompt_logprobs=True))
        whole = np.array([3, 10, 11, *np.frombuffer(found.sequences[0].tokens, np.int32)])
        sampled = np.concatenate([np.frombuffer(found.prompt_logprobs, np.float32)[1:], np.frombuffer(found.sequences[0].logprobs, np.float32)])
        scored = numbers(client.result(client.forward_backward(one, 10, [next_tokens(whole)], forward_only=True)))[0]
        np.testing.assert_allclose(sampled, scored, atol=1e-5)
        base = numbers(client.result(client.forward_backward(client.run(session, 2, rank=0, train_unembed=True), 1, [next_tokens(whole)],
                                                             forward_only=True)))[0]
        assert np.abs(base - scored).max() > 0.1
        folder = server.worker.snapshots.runs.parent.parent / one.replace(":", "_") / "weights/one"
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        logp = torch.log_softmax(theirs(torch.tensor(whole[None])).logits[0], -1).detach().numpy()
        np.testing.assert_allclose(logp[np.arange(len(whole) - 1), whole[1:]], scored, atol=1e-5)
        old = client.http.app.state.operations
        fresh = Operations(server.worker, old.store, old.names, old.eos_ids, old.longest, old.vocab)
        with type(client.http)(make_app(fresh), base_url="http://localhost") as http:
            anew = Client(http)
            body = {"session_id": anew.session(), "model_seq_id": 0, "path": path, "optimizer": True}
            loaded = anew.result(anew.ok("load_weights", body))["model_id"]
            anew.forward_backward(loaded, 1, ROWS)
            anew.result(anew.optim_step(loaded, 2))
            after = anew.loss(loaded, 3, ROWS)
        client.forward_backward(one, 11, ROWS)
        client.result(client.optim_step(one, 12))
        assert client.loss(one, 13, ROWS) == after < first
        assert "create the run with rank=0, or start the server with --rank=8" in refused(client, session, rank=8)
        assert "rank=0 trains all parameters" in refused(client, session, rank=0, train_mlp=False)
        assert "rank=0 trains all parameters" in refused(client, session, rank=0, train_unembed=False)


def refused(client, session, **lora):
    body = {"session_id": session, "model_seq_id": 10 + len(client.http.app.state.operations.models), "base_model": "tiny",
            "lora_config": {"train_unembed": True, **lora}}
    return client.refused("create_model", body)


def test_a_folder_has_adapters_or_whole_models(tmp_path):
    for name, rank, other in (("a", 0, 32), ("b", 8, 0)):
        app.check_folder(tmp_path, app.Options("base", rank=rank), name)
        with pytest.raises(ConfigError, match=f"--rank={other}: the runs in .* were trained with --rank={rank}.*choose another --dir"):
            app.check_folder(tmp_path, app.Options("base", rank=other), name)
        (tmp_path / "base.json").unlink()
    with pytest.raises(ConfigError, match="param_dtype=bf16: with --rank=0 all parameters are trained and saved in fp32; leave it out"):
        app.config_of(app.Options("base", rank=0, config={"train.param_dtype": "bf16"}))
    with pytest.raises(ConfigError, match="--unembed=leave-out: --rank=0 trains all parameters"):
        app.parse(["--model=base", "--rank=0", "--unembed=leave-out"])
