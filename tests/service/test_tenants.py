"""Several runs in one forward and backward pass are the same runs one after the other, and never meet."""

from concurrent.futures import Future
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.peft_cases import Imported, checkpoint, in_float64, lora_config, torch_model, wrapped
from helpers.tiers import nightly
from helpers.tiny_models import VOCAB
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

from jaxrl.algorithms.api_losses import API_LOSSES
from jaxrl.service import bodies
from jaxrl.service.packing import Batch
from jaxrl.service.refusals import Refused
from jaxrl.service.snapshots import Snapshots
from jaxrl.service.trainer import AdamSettings, LoraOptions
from jaxrl.service.worker import Pass, Task, Worker

torch = Imported("torch")
pytestmark = [pytest.mark.torch, pytest.mark.full, pytest.mark.usefixtures("the_mesh_as_it_was")]
TENANTS = 8
LOSSES = [list(API_LOSSES)[k % len(API_LOSSES)] for k in range(TENANTS)]
SIZES = [(9, 1), (16, 23, 5, 12), (30,), (39, 39, 3), (2,) * 9, (7, 8), (20, 21), (11,)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def models(base):
    """(a trainer in float64 with TENANTS together, PEFT's model of the same base)."""
    with jax.enable_x64(True):
        trainer = trainer_of(base, np.float64, TENANTS)
        yield trainer, in_float64(wrapped(torch_model(base, "sdpa"), lora_config(r=RANK, lora_alpha=32)))


def batch_of(k, seed=0):
    """The data of tenant k under its own loss."""
    rows = of_loss(data(np.random.default_rng(100 * seed + k), SIZES[k]), LOSSES[k])
    return bodies.batch(rows, LOSSES[k], CONFIGS.get(LOSSES[k], {}), LONGEST, VOCAB)


def trained(run):
    return {name: np.asarray(x) for name, x in run.state.trainable.items()}


def same_bits(one, two):
    return one.keys() == two.keys() and all(np.asarray(one[k]).tobytes() == np.asarray(two[k]).tobytes() for k in one)


def test_eight_losses_together_are_torch_s(models):
    """Eight adapters, six losses: log-probs, losses and gradients of one pass against eight passes of torch in float64."""
    trainer, theirs = models
    runs, wanted = [], []
    for k in range(TENANTS):
        torch.manual_seed(k)
        for p in learning(theirs).values():
            p.data.normal_(0, 0.2)
        theirs.zero_grad()
        runs.append(adopted(trainer, theirs))
        rows = data(np.random.default_rng(k), SIZES[k])
        logprobs, loss = their_loss(theirs, rows, LOSSES[k], low=0.9)
        loss.backward()
        wanted.append((logprobs, loss.item(), {name: p.grad.numpy().copy() for name, p in learning(theirs).items()}))
    found = trainer.forward_backward_together([(run, batch_of(k)) for k, run in enumerate(runs)], True)
    for run, (logprobs, loss, _), (their_logprobs, their_sum, grads) in zip(runs, found, wanted, strict=True):
        for ours, other in zip(logprobs, their_logprobs, strict=True):
            np.testing.assert_allclose(ours, other, atol=1e-10)
        assert loss == pytest.approx(their_sum, rel=1e-10)
        ours = under_peft_s_names(trainer, run, run.window | dict(run.state.frozen))
        assert ours.keys() == grads.keys() and max(np.abs(g).max() for g in ours.values()) > 0.1
        for key, gradient in ours.items():
            np.testing.assert_allclose(gradient, grads[key], atol=1e-10 * max(1, np.abs(gradient).max()), err_msg=key)


def test_eight_runs_together_are_eight_runs_apart(models):
    """Of ranks 1 to the largest, with settings of their own, over three steps; one more run compiles nothing."""
    trainer, _ = models
    options = [LoraOptions(1 + k % LARGEST, seed=k, mlp=k != 3) for k in range(TENANTS)]
    together, apart = ([trainer.start(o) for o in options] for _ in range(2))
    settings = [AdamSettings(1e-2 / (k + 1), 0.9 - 0.05 * k, 0.95, 1e-8, 0.1 * (k % 2), 0.5 * (k % 3)) for k in range(TENANTS)]

    def step(number):
        found = trainer.forward_backward_together([(run, batch_of(k, number)) for k, run in enumerate(together)], True)
        for k, (run, own) in enumerate(zip(apart, found, strict=True)):
            logprobs, loss = trainer.forward_backward(run, batch_of(k, number), True)
            assert own[1] == pytest.approx(loss, rel=1e-10)
            for a, b in zip(own[0], logprobs, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-10)
            steps = [trainer.optim_step(one, settings[k]) for one in (run, together[k])]
            assert steps[0] == pytest.approx(steps[1], rel=1e-9)

    def programs():
        state = together[0].state.replace(frozen={**trainer.base, **together[0].state.frozen})
        both = (trainer.shared_update.compiled(state.replace(opt_state=())), trainer.update.compiled(state))
        return [program._cache_size() for update in both for program in update]

    step(0)
    count = programs()
    step(1)
    fresh = trainer.start(LoraOptions(2, seed=77))
    alone = trainer.start(LoraOptions(2, seed=77))
    runs = [*together[:5], fresh]
    trainer.forward_backward_together([(run, batch_of(k, 2)) for k, run in enumerate(runs)], True)
    trainer.forward_backward_together([(run, batch_of(k, 3)) for k, run in enumerate(runs[3:])], True)
    trainer.forward_backward(alone, batch_of(5, 2), True)
    trainer.forward_backward(alone, batch_of(2, 3), True)
    for name, x in alone.window.items():
        np.testing.assert_allclose(x, fresh.window[name], atol=1e-10 * max(1, np.abs(x).max()))
    for run in together[:5]:
        trainer.empty_window(run)
    trainer.optim_step(fresh, AdamSettings())
    assert programs() == count
    for one, other in zip(together, apart, strict=True):
        for name, x in trained(one).items():
            np.testing.assert_allclose(x, trained(other)[name], atol=1e-10)


def test_what_is_not_finite_stays_with_its_run(base):
    """In fp32: with a ruined adapter or a loss of inf among them, the others have the same bits, and a result."""
    trainer = trainer_of(base, np.float32, 4)
    good, bad = (of_loss(data(np.random.default_rng(1), (6,)), "ppo") for _ in range(2))
    bad[0].tensors["logprobs"][2], bad[0].tensors["advantages"][2] = -1e4, -1.0
    good, bad = (bodies.batch(rows, "ppo", {}, LONGEST, VOCAB) for rows in (good, bad))

    def play(spoilt):
        runs = [trainer.start(LoraOptions(RANK, seed=k)) for k in range(4)]
        batches = [batch_of(0), batch_of(1), bad if spoilt == "loss" else good, batch_of(3)]
        if spoilt == "adapter":
            runs[2].state = runs[2].state.replace(trainable={k: x * np.nan for k, x in runs[2].state.trainable.items()})
        found = trainer.forward_backward_together(list(zip(runs, batches, strict=True)), True)
        assert isinstance(found[2], Refused) == bool(spoilt) == (runs[2].window is None)
        others = [run for k, run in enumerate(runs) if k != 2]
        windows = [{k: np.asarray(x) for k, x in run.window.items()} for run in others]
        for run in others:
            trainer.optim_step(run, AdamSettings(1e-2))
        answers = [{"loss": found[k][1], **dict(enumerate(found[k][0]))} for k in (0, 1, 3)]
        return [*answers, *windows, *map(trained, others)]

    run = trainer.start(LoraOptions(RANK, seed=4))
    trainer.forward_backward(run, good, True)
    kept = {k: np.asarray(x) for k, x in run.window.items()}
    with pytest.raises(Refused):  # a forward pass alone takes nothing away, by itself as with others
        trainer.forward_backward(run, bad, False)
    assert isinstance(trainer.forward_backward_together([(run, bad)], False)[0], Refused) and same_bits(kept, run.window)
    clean = play("")
    for spoilt in ("adapter", "loss"):
        assert all(same_bits(a, b) for a, b in zip(play(spoilt), clean, strict=True)), spoilt


@pytest.mark.parametrize("dtype", [np.float32, nightly(np.float64)])
def test_a_placement_gives_the_same_bits_without_the_others(base, dtype):
    """What a restart needs: requests of a pass, each computed again by itself."""
    with jax.enable_x64(dtype is np.float64):
        trainer = trainer_of(base, dtype, TENANTS)
        runs, again = ([trainer.start(LoraOptions(1 + k % LARGEST, seed=k)) for k in range(TENANTS)] for _ in range(2))
        found = trainer.forward_backward_together([(run, batch_of(k)) for k, run in enumerate(runs)], True)
        for k in reversed(range(TENANTS)):
            logprobs, loss, placement = found[k]
            (own,) = trainer.forward_backward_together([(again[k], batch_of(k))], True, placement)
            assert own[1] == loss and own[2] == placement
            assert all(a.tobytes() == b.tobytes() for a, b in zip(own[0], logprobs, strict=True))
            assert same_bits(again[k].window, runs[k].window)


def posted(worker, run, number, tokens, learn=True):
    batch = Batch([np.zeros(tokens - 1, np.int32)], [], {})
    worker.post(Task(f"{run}:{number}", Pass(batch, learn, tuple), Future(), size=tokens), run, number)


def queue(tmp_path, together):
    """A worker whose tasks are taken and not run."""
    return Worker(SimpleNamespace(together=together), None, Snapshots(tmp_path, None))


def taken(worker):
    return [(turn.model_id, turn.task.name) for turn in worker._take()]


@pytest.mark.parametrize("together", [1, TENANTS])
def test_a_long_queue_does_not_starve_others(tmp_path, together):
    """By tokens: whoever sends little waits for about one cycle, however much another has sent, large or small requests."""
    worker, quiet = queue(tmp_path, together), ["b:1", "c:1", "d:1"]
    for number in range(400):
        posted(worker, "a:1", number, 2000 if number % 2 else 20)
    for _ in range(10):
        worker._take()
    next_number = dict.fromkeys(quiet, 0)
    served = {"a:1": 0} | dict.fromkeys(quiet, 0)
    for round_ in range(40):
        run = quiet[round_ % 3]
        for _ in range(5):  # five small ones at a time
            posted(worker, run, next_number[run], 100)
            next_number[run] += 1
        cycles = 0
        while worker._lines[run].held:
            group = worker._take()
            cycles += 1
            for turn in group:
                served[turn.model_id] += turn.task.work.tokens
        assert cycles <= 7
    assert served["a:1"] > 0 and all(worker._lines[run].next == next_number[run] for run in quiet)
    busy = [f"e:{k}" for k in range(4)]  # with full queues, in equal parts
    for k, run in enumerate(busy):
        for number in range(1000 // (k + 1)):
            posted(worker, run, number, 100 * (k + 1))
    parts = dict.fromkeys(busy, 0)
    while all(worker._lines[run].held for run in busy):
        for turn in worker._take():
            if turn.model_id in parts:
                parts[turn.model_id] += turn.task.work.tokens
    assert min(parts.values()) > 0.9 * max(parts.values())


def test_a_cycle_has_what_fits_and_each_run_s_order(tmp_path):
    worker = queue(tmp_path, 3)
    for run, numbers in (("a:1", (0, 1, 3)), ("b:1", (0,)), ("c:1", (0,))):
        for number in numbers:
            posted(worker, run, number, 100, learn=run != "c:1")
    assert taken(worker) == [("a:1", "a:1:0"), ("a:1", "a:1:1"), ("b:1", "b:1:0")]
    assert taken(worker) == [("c:1", "c:1:0")] and not worker._take()
    posted(worker, "d:1", 0, 1 << 20)
    posted(worker, "b:1", 1, 100)
    assert sorted(len(worker._take()) for _ in range(2)) == [1, 1]  # too large for company


def test_waiting_requests_of_a_session_are_limited(tmp_path, monkeypatch):
    """But for the one that its run waits for, which lets the others run."""
    monkeypatch.setattr("jaxrl.service.worker.WAITING_BYTES", 1000)
    worker = queue(tmp_path, 1)
    for number in (1, 2, 3):
        worker.check_room("a", "a:train:0", number, 300, "forward")
        posted(worker, "a:train:0", number, 300)
    with pytest.raises(Refused, match="900 bytes of requests of this session wait already") as found:
        worker.check_room("a", "a:train:0", 4, 300, "forward")
    assert found.value.status == 429
    worker.check_room("a", "a:train:0", 0, 300, "forward")
    worker.check_room("b", "b:train:0", 4, 300, "forward")
