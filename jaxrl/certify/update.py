"""Claims about a config's update, tested on a tiny model: other layouts and meshes, scoring, repetition, a resume after
a kill. Called by certify.run."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from jaxrl import sharding, training
from jaxrl.certify import cases
from jaxrl.certify.claims import Broken, NotApplicable
from jaxrl.checkpoint.checkpointer import Checkpointer
from jaxrl.config.load import default_config, editable
from jaxrl.resolve.spec import here, resolve
from jaxrl.rewards import RewardResult
from jaxrl.rl.recording import Group, Source
from jaxrl.rl.roles import Roles
from jaxrl.rl.rollouts import Batch
from jaxrl.rl.step import lay_out, learn, make_loss_weigher, prepare
from jaxrl.run.setup import ModelInputs, open_job
from jaxrl.training.layout import row_shapes

MODEL = {"model_type": "qwen2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
         "tie_word_embeddings": True, "eos_token_id": 0}
ROUNDING = 2e-4  # of a gradient's length, in fp32
ROW, PROMPT, ANSWER, GROUP = 32, 8, 8, 4
STEPS = 100      # of the run that this would be, for schedules
MESHES = {"dp=2": (2, {"dp": 2}), "fsdp=2": (2, {"fsdp": 2}), "tp=2": (2, {"tp": 2}),
          "cp=2": (2, {"cp": 2}), "dp=2, tp=2": (4, {"dp": 2, "tp": 2})}


def small(config, folder: Path):
    """Returns the config with a tiny model and short completions on one device; other options of loss and update stay.

    It computes in fp32, has at most 2 epochs and minibatches, and no LoRA, router terms, optimizer groups, offload,
    replayed routes and sampled support. folder: run.dir of the tiny job."""
    c, fresh = editable(config), default_config()
    for group in ("model", "lora", "mesh", "checkpoint", "record", "faults", "env", "profile", "launch"):
        c[group] = fresh[group]
    c.model.init, c.model.config = "random", MODEL
    c.run.dir, c.run.mode, c.run.warm_start, c.checkpoint.keep = str(folder), "train", "", -1
    c.data.max_prompt_tokens, c.data.prompts_per_step, c.data.sources = PROMPT, 3, {}
    c.rollout.engine, c.rollout.group_size, c.rollout.max_new_tokens = "jax", GROUP, ANSWER
    c.critic.path = c.reference.path = ""
    c.reference.dtype, c.optimizer.offload, c.optimizer.groups = "fp32", False, {}
    t = c.train
    t.compute_dtype, t.param_dtype, t.matmul, t.matmul_emulated = "fp32", "fp32", "default", False
    t.row_lengths, t.row_counts, t.max_sequence_tokens, t.logprob_chunk = (ROW,), 1, 0, 0
    t.tokens_per_microbatch, t.score_tokens_per_microbatch = 4 * ROW, 0
    t.router_balance = t.router_z = t.router_bias_rate = 0.0
    c.algorithm.routes, c.algorithm.sampled_support = "own", False
    for name in ("ppo_epochs", "num_minibatches"):
        c.algorithm[name] = min(c.algorithm[name] or 1, 2)
    c.critic.num_minibatches = min(c.critic.num_minibatches, 2)
    return c


class Tiny:
    """The job of a `small` config with its roles.

    Args:
      config: the config to certify. folder: for its checkpoints. count: devices to use. axes: mesh axis -> size.

    Attributes:
      job: its run.setup.Job. spec: its Spec. roles: rl.roles.Roles, policy: of them, both made anew by `open`.
      turns: whether the config's completions are episodes.

    Side effect: sets jax's current mesh."""

    def __init__(self, config, folder: Path, count: int = 1, axes=None):
        self.config, self.folder, self.turns = config, folder, resolve(config, engine="jax").episodes
        c = small(config, folder)
        mesh = sharding.make_mesh(SimpleNamespace(**(axes or {})), jax.devices()[:count])
        jax.set_mesh(mesh)
        self.job = open_job(resolve(c, here(), MODEL, engine="jax"), ModelInputs(None, MODEL, (0,), None), mesh)
        self.spec = self.job.config
        self.open()

    def open(self) -> None:
        """Creates the roles as in a new process, without a state."""
        self.roles = Roles(self.job, STEPS)
        self.policy = self.roles.policy

    def start(self):
        """Starts all roles as at the beginning of a run; returns self."""
        self.policy.abstract()
        self.policy.start(None)
        for part in self.roles.parts:
            part.abstract()
            part.start(None, None)
        return self

    # ---- batches

    def case(self, seed: int = 3) -> cases.Case:
        """Returns the largest case, with random scores and behaviour log-probs (nats, float32) near those of the
        policy: each differs by a normal number times 0.05. The policy must be started. seed: of all random numbers."""
        case = cases.batch(cases.SMALLEST[-1], MODEL["vocab_size"], seed, self.turns)
        noise = np.random.default_rng(seed).normal(size=len(case.traj.tokens)).astype(np.float32)
        scored = self.policy.score(case.traj, training.make_layout(case.traj.sizes, self.job.row_shapes))
        case.traj.logprobs = np.where(case.traj.loss_mask, scored + 0.05 * noise, 0).astype(np.float32)
        return case

    def batch(self, case: cases.Case) -> Batch:
        """Returns the case as the Batch of a step."""
        n, none = case.traj.num_trajectories, [{} for _ in case.scores]
        name = self.spec.eval.accuracy_from or "score"
        result = RewardResult(case.scores, {name: case.scores}, none, none, {})
        staleness = (case.traj.tokens % 2).astype(np.float32) * case.traj.loss_mask if self.spec.ahead else None
        return Batch(case.traj, [Group(Source(""))] * n, [], result, case.scores, case.scores, case.baseline,
                     np.zeros(n, bool), staleness, n, n, {}, {})

    def weights(self, case: cases.Case) -> dict[str, np.ndarray]:
        """Returns {loss term: [T] float weights} of one optimizer step with all completions, divided by the config's
        own denominators (rl.step.make_loss_weigher)."""
        weigh, _ = make_loss_weigher(self.spec, self.batch(case), case.columns)
        return weigh(np.arange(case.traj.num_sequences))

    # ---- gradients

    def gradients(self, case, tokens: int = 4 * ROW, length: int = ROW, share=None, minibatches=None) -> list:
        """Computes the gradient of each minibatch at the current state.

        Returns a flat dict for each: parameter name -> array of its shape in host memory, and the loss as "loss".

        Args:
          tokens: per microbatch. length: of a row. share: train.share_prompts. minibatches: of the batch; None =
            as in the config.
        """
        options = {"train.share_prompts": share, "algorithm.num_minibatches": minibatches}
        c = editable(self.spec.options)
        for name, value in options.items():
            if value is not None:
                group, leaf = name.split(".")
                c[group][leaf] = value
        spec = dataclasses.replace(self.spec, options=type(self.spec.options)(c))
        shapes = row_shapes((length,), PROMPT + ANSWER, tokens, sharding.data_shards(self.job.mesh), 1)
        batch, critic = self.batch(case), self.roles.critic
        running = copy.copy(critic.running) if critic is not None else None
        prepared, out = prepare(spec, self.roles, batch, lay_out(spec, shapes, batch.traj, 0)), []
        weigh, _ = make_loss_weigher(spec, batch, prepared.columns)
        if critic is not None and running is not None:
            critic.running = running
        for minibatch in prepared.layout.update.minibatches:
            weights = weigh(minibatch.sequences)
            packed = (training.pack(case.traj, m, prepared.columns, weights) for m in minibatch.microbatches)
            grads, metrics = self.policy.gradients(self.policy.state, map(self.policy.put, packed))
            out.append({name: np.asarray(x) for name, x in grads.items()} | {"loss": np.asarray(metrics["loss"])})
        return out

    def state(self) -> dict[str, np.ndarray]:
        """Returns host copies of all arrays that a step changes, by path."""
        critic = self.roles.critic
        held = {"policy": self.policy.arrays()}
        if critic is not None:
            held |= {"critic": critic.arrays(), "returns": dataclasses.asdict(critic.running)}
        found, _ = jax.tree_util.tree_flatten_with_path(held)
        return {jax.tree_util.keystr(path): np.asarray(x) for path, x in found}


# ---- claims


def far(a: list[dict], b: list[dict]) -> tuple[float, str]:
    """Returns (largest distance of two lists of gradients, name of the parameter that is furthest away).

    a, b: gradients as of Tiny.gradients, compared in pairs. A distance is the global L2 norm of b - a over that of a,
    inf where it is not finite; the entry "loss" does not count."""
    worst = (0.0, "")
    for one, other in zip(a, b, strict=True):
        size = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for n, x in one.items() if n != "loss"))
        apart = {n: float(np.linalg.norm((one[n] - other[n]).ravel())) for n in one if n != "loss"}
        total = np.sqrt(sum(x * x for x in apart.values())) / max(size, 1e-12)
        worst = max(worst, (total if np.isfinite(total) else np.inf, max(apart, key=apart.__getitem__)))
    return worst


def within(base, other, how: str, case, worst: float) -> float:
    """Returns the larger of `worst` and the distance of two lists of gradients (`far`: relative to the norm of `base`).

    Args:
      base, other: gradients as of Tiny.gradients, of the case as it is and of the changed one.
      how: the change, for the message. case: the cases.Case, for the counterexample.
      worst: largest distance so far.

    Raises Broken if the distance exceeds ROUNDING."""
    distance, name = far(base, other)
    if distance > ROUNDING:
        raise Broken(f"update of a tiny model {how}: the gradient is {distance:.3g} of its length away",
                     {**case.summary(), "how": how, "distance": distance, "parameter": name,
                      "losses": [float(g["loss"]) for g in base], "losses then": [float(g["loss"]) for g in other]})
    return max(worst, distance)


LAYOUTS = {"microbatches": {"with one row in each microbatch": {"tokens": ROW},
                            "with all rows in one microbatch": {"tokens": 16 * ROW}},
           "packing": {"in rows of 72 tokens": {"tokens": 4 * 72, "length": 72},
                       "with the other sharing of prompts": {"share": True}},
           "padding": {"with more empty rows than others": {"tokens": 32 * ROW},
                       "in rows of 160 tokens": {"tokens": 2 * 160, "length": 160}}}


class Base:
    """A tiny job, its batch and gradients, computed when the first claim needs them; its methods test the claims and
    return what was found, as text.

    config: the config to certify. folder: for checkpoints. Attribute tiny: the Tiny job."""

    def __init__(self, config, folder: Path):
        self.config, self.folder, self.tiny = config, folder, Tiny(config, folder)
        self._first = None

    def first(self):
        """Returns (job at its start, case, its gradients)."""
        if self._first is None:
            tiny = self.tiny.start()
            case = tiny.case()
            self._first = tiny, case, tiny.gradients(case)
        jax.set_mesh(self.tiny.job.mesh)
        return self._first

    def unchanged(self, claim: str) -> str:
        """Tests the claim `microbatches`, `packing` or `padding` of the update. Raises Broken."""
        (tiny, case, base), worst = self.first(), 0.0
        for how, changes in LAYOUTS[claim].items():
            if "share" in changes:
                changes = {"share": not tiny.spec.train.share_prompts}
            worst = within(base, tiny.gradients(case, **changes), how, case, worst)
        return f"update in fp32 within {worst:.1g}"

    def order(self) -> str:
        """Tests the claim `order`: the order of completions does not change the update. Raises Broken."""
        (tiny, case, _), worst = self.first(), 0.0
        base = tiny.gradients(case, minibatches=1)
        for how, ranks in cases.orders(case.traj).items():
            changed, _ = cases.select_completions(case, ranks)
            worst = within(base, tiny.gradients(changed, minibatches=1), f"with {how}", case, worst)
        return f"update in fp32 within {worst:.1g}"

    def meshes(self) -> str:
        """Tests the claim `meshes`: on other meshes of simulated devices the update is the same. Raises Broken, and
        NotApplicable with a single device."""
        tiny, case, base = self.first()
        known = {how: given for how, given in MESHES.items() if given[0] <= jax.device_count()}
        if not known:
            raise NotApplicable("there is one device, and jax was used before: run it in a process of its own")
        worst = 0.0
        for how, (count, axes) in known.items():
            other = Tiny(self.config, self.folder, count, axes).start()
            worst = within(base, other.gradients(case), f"on {count} devices, {how}", case, worst)
        return f"{'; '.join(known)}: update in fp32 within {worst:.1g}"

    def scoring(self) -> str:
        """Tests the claim `scoring`: log-probs of packed rows are those of each sequence alone, within 1e-4 nats at
        loss tokens. Raises Broken."""
        tiny, case, _ = self.first()
        model, params, traj, worst = tiny.job.model, tiny.policy.params(), case.traj, 0.0
        layout = training.make_layout(traj.sizes, tiny.job.row_shapes)
        packed, head, heat = tiny.policy.score(traj, layout), model.head(params), tiny.spec.rollout.temperature
        for i, (start, stop) in enumerate(zip(traj.offsets[:-1], traj.offsets[1:], strict=True)):
            ids = np.zeros((1, ROW), np.int32)  # one program for all
            ids[0, :stop - start] = traj.tokens[start:stop]
            ones = np.ones_like(ids)
            hidden, _ = model.forward(params, ids, np.arange(ROW, dtype=np.int32)[None], ones, 0 * ones, None)
            table = jax.nn.log_softmax(hidden[0] @ (head.T if model.config.tied else head) / heat)
            alone = np.asarray(table)[np.arange(stop - start - 1), ids[0, 1:stop - start]]
            own = traj.loss_mask[start + 1:stop]
            apart = np.abs(np.where(own, packed[start + 1:stop] - alone, 0))
            worst = max(worst, float(apart.max()))
            if not worst <= 1e-4:
                t = int(apart.argmax())
                raise Broken(f"a token has the log-prob {packed[start + 1 + t]:.5g} packed and {alone[t]:.5g} alone",
                             {**case.summary(), "answer": i, "position": t + 1, "packed": float(packed[start + 1 + t]),
                              "alone": float(alone[t])})
        return f"within {worst:.1g} nats"

    def repeat(self) -> str:
        """Tests the claim `repeat`: the same batch gives the same gradients twice, to the bit. Raises Broken."""
        tiny, case, base = self.first()
        again = tiny.gradients(case)
        for one, other in zip(base, again, strict=True):
            if wrong := [name for name in one if not np.array_equal(one[name], other[name], equal_nan=True)]:
                distance, _ = far(base, again)
                raise Broken(f"the second time the gradient of {wrong[0]} is another one: {distance:.3g} away",
                             {**case.summary(), "parameters": wrong, "distance": distance})
        return "update bitwise"

    def resume(self) -> str:
        """Tests the claim `resume`: after a step and a checkpoint, new roles that read the checkpoint compute the same
        second step. Raises Broken."""
        self.first()
        tiny = Tiny(self.config, self.folder).start()
        batches = [tiny.batch(tiny.case(seed)) for seed in (3, 4)]
        self.step(tiny, batches[0], 0)
        with contextlib.closing(Checkpointer(self.folder, tiny.spec)) as disk:
            kept = {part.name: host for part in tiny.roles.parts if (host := part.host()) is not None}
            arrays = {part.name: part.arrays() for part in tiny.roles.parts if part.name in kept}
            disk.save(1, tiny.policy.arrays() | arrays, {"step": 1, "parts": kept})
            disk.wait()
        metrics, state = self.step(tiny, batches[1], 1), tiny.state()
        tiny.open()
        own, parts = tiny.policy.abstract(), tiny.roles.parts
        abstract = own | {part.name: part.abstract() for part in parts if part.name in kept}
        for part in parts:
            part.abstract()
        with contextlib.closing(Checkpointer(self.folder, tiny.spec)) as disk:
            restored: Any = disk.restore(abstract, "must")
        tiny.policy.start({name: restored.arrays[name] for name in own})
        for part in parts:
            if part.name in kept:
                part.start(restored.arrays[part.name], restored.host["parts"][part.name])
            else:
                part.start(None, None)
        again, other = self.step(tiny, batches[1], 1), tiny.state()
        wrong = [name for name in state if not np.array_equal(state[name], other[name], equal_nan=True)]
        told = {n: [metrics[n], again[n]] for n in metrics if n in again and metrics[n] != again[n]}
        if wrong or told:
            raise Broken(f"step 2 after a kill and a resume differs: {len(wrong)} of {len(state)} arrays and "
                         f"{len(told)} metrics differ; something that the step reads is in no checkpoint",
                         {"arrays": wrong[:8], "metrics, without and with the kill": dict(list(told.items())[:8])})
        return f"{len(state)} arrays bitwise"

    @staticmethod
    def step(tiny, batch, step: int) -> dict[str, float]:
        """Runs one step (prepare, learn, after_step) of a tiny job on a Batch; returns its metrics. step: number, from
        0."""
        spec, roles = tiny.spec, tiny.roles
        prepared = prepare(spec, roles, batch, lay_out(spec, tiny.job.row_shapes, batch.traj, step))
        return learn(spec, roles, batch, prepared, step) | roles.after_step(step + 1, 0.0)
