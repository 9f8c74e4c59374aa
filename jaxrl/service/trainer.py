"""Trains LoRA runs of any rank over one frozen base, with the jitted functions of training.make_update.

Requests of several runs share a forward and backward pass: their adapters are a bank (models.adapters.bank), their data
rows of the same microbatches. The gradient of each request is taken out of the bank and added to its run's window, so a
run has nothing of another, not even what is not finite.

The model has one adapter of the largest rank on every linear map of its layers, and on the output matrix if its runs
may have one there. A run of a smaller rank, or on fewer
modules, leaves the other columns of A and B at zero: both of their gradients are zero there, so they stay zero, and
every run shares the same few programs. The scale of the adapter and the settings of the optimizer are data, too.

Gradients of a run add up in its window, from forward_backward to forward_backward, until optim_step applies them.

Knows values only: no HTTP, no files, no order of requests. Called by service.worker, from one thread.

Legend: T tokens of a ragged batch, N positions of a datum, R rows, S loss slots per row, K requests.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import unflatten_dict

from jaxrl import training
from jaxrl.algorithms.api_losses import mean_by_sequence, token_losses
from jaxrl.models import adapters
from jaxrl.models.adapters import bank, peft
from jaxrl.models.adapters.initialization import initial
from jaxrl.models.adapters.selection import Selection, linears, resolved
from jaxrl.processes.exchange import to_host
from jaxrl.service.packing import Batch, Packed, pack_together, place_again, ragged
from jaxrl.service.refusals import Refused
from jaxrl.training.objective import Objective
from jaxrl.training.update import make_scaled
from jaxrl.types import TrainState, merge

OF_TOKENS = ("sampled", "advantage", "weight", "loss", "low", "high")  # of token_losses, in its order
COLUMNS = (*OF_TOKENS, "marked")  # marked: tokens of the sequence's ratio


class AdamSettings(NamedTuple):
    """Options of one optim_step, torch's AdamW: numbers, or scalar arrays in an AdamState.

    Attributes:
      weight_decay: decoupled, multiplied by the learning rate.
      grad_clip_norm: global norm to which the gradient is clipped; 0 = not clipped.
    """

    learning_rate: Any = 1e-4
    beta1: Any = 0.9
    beta2: Any = 0.95
    eps: Any = 1e-12
    weight_decay: Any = 0.0
    grad_clip_norm: Any = 0.0


class AdamState(NamedTuple):
    """State of `adam`: optax's state of Adam (count, mu, nu), and the settings of the next update as scalar arrays."""

    moments: Any
    settings: AdamSettings


class LoraOptions(NamedTuple):
    """Describes the adapter of a run.

    Attributes:
      rank: 0 = no adapter, all parameters are trained (service.full). seed: of the initial A.
      attention, mlp, unembed: whether the linear maps of attention and of the MLP, and the output matrix, have one.
    """

    rank: int
    seed: int = 0
    attention: bool = True
    mlp: bool = True
    unembed: bool = False


@dataclasses.dataclass
class Run:
    """One adapter in training.

    Attributes:
      options: its LoraOptions. adapter: the same as models.adapters has it; None = all parameters are trained.
      state: TrainState without the base: `frozen` holds the scales alone.
      window: gradients since the last optim_step; None = none. loss: their sum of losses.
    """

    options: LoraOptions
    adapter: adapters.Adapter | None
    state: TrainState
    window: Any = None
    loss: float = 0.0


def adam() -> optax.GradientTransformation:
    """Returns AdamW (Loshchilov and Hutter, arXiv 1711.05101) after clipping by the gradient's global L2 norm.

    The settings are scalar arrays in the state (AdamState.settings, jax's default float): a step uses those that the
    state holds, so changing them compiles nothing. Gradients are multiplied by min(1, grad_clip_norm / norm), not at
    grad_clip_norm 0; weight decay is decoupled and reads `params`, which update needs. Updates have the parameters'
    dtypes."""

    def init(params) -> Any:
        kind = jnp.result_type(float)
        return AdamState(optax.scale_by_adam().init(params), AdamSettings(*(jnp.asarray(x, kind) for x in DEFAULTS)))

    def update(updates, state, params=None) -> Any:
        s, norm = state.settings, optax.global_norm(updates)
        factor = jnp.where(s.grad_clip_norm > 0, jnp.minimum(1.0, s.grad_clip_norm / jnp.maximum(norm, 1e-12)), 1.0)
        grads = jax.tree.map(lambda g: g * factor.astype(g.dtype), updates)
        steps, moments = optax.scale_by_adam(s.beta1, s.beta2, s.eps).update(grads, state.moments)
        step = lambda u, p: (-s.learning_rate * (u + s.weight_decay * p)).astype(p.dtype)  # noqa: E731
        return jax.tree.map(step, steps, params), AdamState(moments, s)

    return optax.GradientTransformation(init, update)


DEFAULTS = AdamSettings()


@dataclasses.dataclass(frozen=True)
class SumOfTokens(Objective):
    """Minimises sum_t token_losses: the losses of the protocol. The metrics "logprob", "losses" are [R, S], of every
    slot.

    A batch needs the token columns COLUMNS; its weights only mark loss tokens."""

    weights = ("token",)
    columns = COLUMNS
    routers = False

    @jax.named_scope("loss")
    def loss(self, outputs, batch, entropy_coef=None):
        """Returns (sum of the loss tokens' losses, divided by nothing; {"logprob": [R, S] nats, "losses": [R, S], 0
        where no token is in the loss}).

        The gap of a sequence, a mean over its marked tokens of current minus sampling log-prob, has no gradient.

        outputs: of the model's forward pass (training.objective). batch: PackedBatch. entropy_coef: not read."""
        logp, _, _ = outputs.logprobs()
        marked = outputs.mask & (batch.columns["marked"] != 0)
        gap = mean_by_sequence(logp - batch.columns["sampled"], marked, batch.sequences)
        given = [batch.columns[name] for name in OF_TOKENS]
        own = token_losses(logp, *given, sequence_gap=jax.lax.stop_gradient(gap))
        losses = jnp.where(outputs.mask, own, 0)
        return jnp.sum(losses), jax.lax.stop_gradient({"logprob": logp, "losses": losses})


def lora_adapter(model, options: LoraOptions, alpha: float) -> adapters.Adapter:
    """Returns the adapter of `options` on a model without one; scale alpha / rank.

    Raises Refused (422) if the options leave no linear map to train."""
    found = resolved(Selection(options.rank, alpha), model, strict=True)
    in_mlp = {name for name, places in linears(model).items() if "mlp" in places[0].entry.path}
    chosen = tuple(t for t in found.targets if (options.mlp if t.name in in_mlp else options.attention))
    if options.unembed:
        chosen += (adapters.Target(adapters.HEAD, options.rank, found.targets[0].scale),)
    if not chosen:
        raise Refused(422, "lora_config: train_mlp=False and train_attn=False leave nothing to train here")
    return dataclasses.replace(found, targets=chosen)


def with_head(model, rank: int):
    """Returns a model with an adapter of this rank on the output matrix, too, of scale 1. The model must have an
    adapter."""
    head = adapters.Target(adapters.HEAD, rank, 1.0)
    adapter = dataclasses.replace(model.adapter, targets=(*model.adapter.targets, head))
    return dataclasses.replace(model, adapter=adapter)


def rows_mix(model, unembed: bool) -> bool:
    """Returns whether other rows of a pass decide the bits of a row (experts, recurrent layers), or a bank of adapters
    on the output matrix would have to cross devices, since rows are split over them (jax's current mesh).

    unembed: whether adapters may be on the output matrix."""
    mesh = jax.sharding.get_mesh()
    split = not mesh.empty and any(mesh.shape.get(axis, 1) > 1 for axis in ("dp", "fsdp", "cp", "ep"))
    return bool(model.config.num_expert_layers or model.config.num_recurrent or unembed and split)


class Trainer:
    """The programs and the base that all runs share.

    Args:
      model: jaxrl.models.Model whose adapter has the largest rank on every linear map; see `with_head`.
      base: flat dict of the base's parameters, on the devices.
      places: flat name -> sharding of the model's parameters. everywhere: sharding of small arrays.
      row_shapes: training.RowShapes; a datum and its last target fit the longest row.
      put: host PackedBatch -> device PackedBatch.
      alpha: of every adapter; its scale is alpha / rank.
      chunk: loss tokens whose logits exist at once.
      together: most requests of one forward and backward pass; 1 if rows of a pass mix (`rows_mix`).

    Attributes:
      rank: the largest of an adapter; 0 without adapters. unembed: whether the output matrix may have one.
      dtype: of trained leaves, columns and losses: float32, or float64 if the base has it.
    """

    def __init__(self, model, base, places, everywhere, row_shapes, put, alpha: float = 32.0, chunk: int = 1024,
                 together: int = 1):
        self.model, self.base, self.places, self.everywhere = model, base, places, everywhere
        self.row_shapes, self.put, self.alpha = row_shapes, put, alpha
        adapter = model.adapter
        self.rank = 0 if adapter is None else max(t.rank for t in adapter.targets)
        objective = SumOfTokens(chunk=chunk, max_grad_norm=0.0)
        self.optimizer = adam()
        self.update = training.make_update(model, self.optimizer, lambda step: 0.0 * step, objective)
        self.shared_update = training.make_update(model, self.optimizer, lambda step: 0.0 * step, objective)
        self.unembed = adapter is not None and adapters.adapts_head(adapter)
        self.together = 1 if not self.rank or rows_mix(model, self.unembed) else together
        scaled = make_scaled(model, objective)
        self._evaluate = jax.jit(lambda trainable, frozen, stats, batch: scaled(trainable, frozen, batch, stats)[1])
        self._start = jax.jit(lambda trainable, frozen: training.init_state(trainable, frozen, self.optimizer))
        self._zeros: dict[tuple, Any] = {}  # shape of a microbatch -> metrics to add to
        self._stack: Any
        self._take: Any
        self._stack, self._take = self._bank_programs() if self.rank else (None, None)
        self._add = jax.jit(lambda window, more: jax.tree.map(jnp.add, window, more), donate_argnums=0)
        self.dtype = jnp.result_type(jnp.float32, *(x.dtype for x in base.values() if x.dtype == jnp.float64))

    @property
    def longest(self) -> int:
        """Returns the most tokens of a sequence: of a datum's input and its last target."""
        return self.row_shapes.lengths[-1]

    # ---- a run begins

    def start(self, options: LoraOptions) -> Run:
        """Starts a run: A drawn from the seed, B zero.

        Raises Refused (422) for a rank that is not served, options that leave nothing to train, or an adapter on an
        output matrix that has none here."""
        if not 1 <= options.rank <= self.rank:
            raise Refused(422, f"lora_config.rank={options.rank}: this server trains ranks 1 to {self.rank}; start it "
                          f"with --rank={max(options.rank, 0)}" + " to train all parameters" * (options.rank == 0))
        adapter = lora_adapter(self.model.base, options, self.alpha)
        self._check_head(options)
        own = dataclasses.replace(self.model, adapter=adapter)
        key = jax.random.fold_in(jax.random.key(options.seed), LORA_STREAM)
        return self.restored(options, initial(own, key, self.base, "default"))

    def restored(self, options: LoraOptions, leaves: dict, moments=None) -> Run:
        """Starts a run from the leaves of its own rank; columns up to the largest rank are zero.

        Args:
          leaves: flat name -> array, cast to the trainer's dtype.
          moments: a save's (count, mu, nu) as the optimizer has them, of the largest rank; None = zeros.

        Raises Refused (422) as `start` does for the output matrix."""
        self._check_head(options)
        adapter = lora_adapter(self.model.base, options, self.alpha)
        padded = self._padded({name: np.asarray(x, self.dtype) for name, x in leaves.items()})
        trainable = {name: x for name, x in padded.items() if not name.endswith("/scale")}
        state = self._start(trainable, {name: x for name, x in padded.items() if name not in trainable})
        return self._run(options, adapter, jax.device_put(state, self._places_of(state)), moments)

    def _run(self, options: LoraOptions, adapter, state: TrainState, moments) -> Run:
        """Returns a run of a state on the devices, with the moments of a save if given."""
        run = Run(options, adapter, state)
        if moments is not None:
            count, mu, nu = moments
            kept = state.opt_state.moments._replace(count=np.array(count, np.int32), mu=mu, nu=nu)
            was = jax.tree.map(lambda x: x.sharding, state.opt_state.moments)
            opt_state = state.opt_state._replace(moments=jax.device_put(kept, was))
            step = jax.device_put(np.array(count, np.int32), state.step.sharding)  # a buffer of its own: it is donated
            run.state = state.replace(opt_state=opt_state, step=step)
        return run

    def _check_head(self, options: LoraOptions) -> None:
        if options.unembed and not self.unembed:
            raise Refused(422, "the adapter has columns of the output matrix (train_unembed=True), and this server was "
                          "started with --unembed=leave-out: start it with --unembed=train")

    def _padded(self, leaves: dict) -> dict:
        """Returns all leaves of the model's adapter; columns and modules that `leaves` lacks are zero."""
        out = {}
        for entry in self.model.entries:
            if entry.row.init != "adapter":
                continue
            name = "/".join(entry.path)
            whole = np.zeros(entry.shape, self.dtype)
            if (own := leaves.get(name)) is not None:
                whole[tuple(slice(0, n) for n in own.shape)] = own
            out[name] = whole
        return out

    def _places_of(self, state: TrainState):
        """Returns the sharding of every leaf: moments as their parameter, whose name ends their path."""
        def place(path, x):
            name = getattr(path[-1], "key", None)
            return self.places[name] if name in self.places else self.everywhere

        return jax.tree_util.tree_map_with_path(place, state)

    # ---- requests

    def forward_backward(self, run: Run, batch: Batch, learn: bool) -> tuple[list[np.ndarray], float]:
        """Computes a loss, and adds its gradient to the run's window if `learn`.

        The loss and its gradient are sums over all targets of the batch, divided by nothing.

        Returns (log-probs [N] of each datum's targets in nats, sum of losses). Raises Refused (422) if the loss is not
        finite; with `learn` the window is emptied then, and gradients of earlier calls are lost, too, as they are if
        the pass itself raises. Without `learn` the window stays as it is, whatever happens."""
        traj, columns = ragged(batch, self.dtype)
        layout = training.make_layout(traj.sizes, self.row_shapes, share_prompts=False)
        packed = Packed(traj, columns, list(layout.minibatches[0].microbatches), [[]], [0, len(batch.tokens)])
        state = run.state.replace(frozen={**self.base, **run.state.frozen})
        window = run.window if learn else None
        if learn:
            run.window = None  # donated
        grads, logprobs, losses = self._pass(self.update, state, packed, learn, window)
        loss = float(losses.sum(dtype=np.float64))
        if learn:
            run.window, run.loss = grads, run.loss + loss
        if not np.isfinite(loss):
            if learn:
                self.empty_window(run)
            raise Refused(422, NOT_FINITE.format(loss))
        return self._of_data(packed, 0, logprobs), loss

    def forward_backward_together(self, requests: list[tuple[Run, Batch]], learn: bool, placement=None) -> list:
        """Computes the losses of 1 to `together` requests in one pass; a run's gradients are added in their order.

        Args:
          requests: (run, its Batch without images); a run may come several times.
          placement: of one request, which is computed as it was with others; see service.packing.

        Returns of each request (log-probs [N] of each datum in nats, sum of losses, placement), or a Refused: 422 if
        its loss is not finite, 500 if its gradient could not be added. With `learn` that run's window is empty then."""
        runs, batches = [run for run, _ in requests], [batch for _, batch in requests]
        packed = place_again(batches[0], placement, self.row_shapes, self.dtype) if placement else None
        packed = packed or pack_together(batches, self.row_shapes, self.dtype)
        of_bank = runs + runs[:1] * (max(self.together, 2) - len(runs))
        trainable, scales = (self._stack(*(getattr(run.state, part) for run in of_bank))
                             for part in ("trainable", "frozen"))
        state = TrainState(trainable, {**self.base, **scales}, (), runs[0].state.step, runs[0].state.stats)
        grads, logprobs, losses = self._pass(self.shared_update, state, packed, learn)
        offsets = packed.traj.offsets
        sums = [float(losses[offsets[packed.ends[k]]:offsets[packed.ends[k + 1]]].sum(dtype=np.float64))
                for k in range(len(runs))]
        own = [self._take(grads, jax.device_put(np.int32(k), self.everywhere)) if learn and np.isfinite(loss) else None
               for k, loss in enumerate(sums)]
        return [self._settle(run, loss, gradient, learn) or (self._of_data(packed, k, logprobs), loss,
                                                             packed.placements[k])
                for k, (run, loss, gradient) in enumerate(zip(runs, sums, own, strict=True))]

    def _settle(self, run: Run, loss: float, gradient, learn: bool) -> Refused | None:
        """Adds a gradient to the run's window; returns a Refused, with the window empty, if that is not possible."""
        reason = None if np.isfinite(loss) else Refused(422, NOT_FINITE.format(loss))
        if learn and reason is None:
            try:
                run.window = gradient if run.window is None else self._add(run.window, gradient)
                run.loss += loss
            except Exception as e:  # the other requests of the pass go on
                reason = Refused(500, f"the gradient could not be added: {type(e).__name__}: {str(e)[:300]}")
        if learn and reason is not None:
            self.empty_window(run)
        return reason

    def _pass(self, update, state, packed: Packed, learn: bool, grads=None):
        """Computes all microbatches; returns (gradients added to `grads`, log-probs [T], losses [T])."""
        token = {"token": packed.traj.loss_mask.astype(self.dtype)}
        empty, accumulate, _ = update.compiled(state)
        params, pending = (state.trainable, state.frozen, state.stats), []
        for micro in packed.microbatches:
            rows = training.pack(packed.traj, micro, packed.columns, token, self.dtype)
            rows = rows.replace(targets=rows.columns.pop("target"))
            device = self.put(rows)
            if not learn:
                metrics = self._evaluate(*params, device)
            else:
                if grads is None or rows.tokens.shape not in self._zeros:
                    zeros, metrics = empty(state.trainable, state.frozen, device)
                    grads = zeros if grads is None else grads
                    self._zeros.setdefault(rows.tokens.shape, jax.device_get(metrics))
                sums = jax.device_put(self._zeros[rows.tokens.shape], self.everywhere)
                grads, metrics = accumulate(*params, grads, sums, (device,), None)
            pending.append((micro, metrics))
        out = {name: np.zeros(len(packed.traj.tokens), self.dtype) for name in ("logprob", "losses")}
        for micro, metrics in pending:
            for name, values in out.items():
                training.unpack(packed.traj, micro, to_host(metrics[name]), values)
        return grads, out["logprob"], out["losses"]

    def _of_data(self, packed: Packed, k: int, values_T: np.ndarray) -> list[np.ndarray]:
        """Returns the values [N] of each datum of request k."""
        offsets = packed.traj.offsets[packed.ends[k]:packed.ends[k + 1] + 1]
        return [values_T[a + 1:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]

    def _bank_programs(self):
        """Returns (stack(*leaves of each adapter) -> leaves of the bank, take(bank, number) -> leaves of one)."""
        axes = bank.axes(self.model)
        stack = {}
        for scales in (False, True):
            names = [name for name in axes if name.endswith("/scale") == scales]
            stack[scales] = jax.jit(
                lambda *each: {name: jnp.stack([one[name] for one in each], axes[name]) for name in each[0]},
                out_shardings={name: bank.sharding(self.places[name], axes[name]) for name in names})
        trained = {name: self.places[name] for name in axes if not name.endswith("/scale")}
        take = jax.jit(lambda grads, number: {
            name: jax.lax.dynamic_index_in_dim(x, number, axes[name], keepdims=False) for name, x in grads.items()},
            out_shardings=trained)
        return lambda *each: stack[next(iter(each[0])).endswith("/scale")](*each), take

    def empty_window(self, run: Run) -> None:
        """Drops the gradients that were not applied, and their sum of losses."""
        run.window, run.loss = None, 0.0

    def optim_step(self, run: Run, settings: AdamSettings) -> dict[str, float]:
        """Applies the gradients of the window, a sum over its forward_backward calls, and empties it.

        Returns {"optim/grad_norm": global L2 norm before clipping, "optim/step": steps of the run}. Raises Refused
        (422) without gradients, and if they are not finite; nothing is applied then, and the window is empty."""
        if run.window is None:
            raise Refused(422, "optim_step: there are no gradients; call forward_backward before it")
        old = run.state.opt_state.settings
        arrays = AdamSettings(*(jax.device_put(np.asarray(x, was.dtype), was.sharding)
                                for x, was in zip(settings, old, strict=True)))
        state = run.state.replace(opt_state=run.state.opt_state._replace(settings=arrays))
        apply = self.update.compiled(state)[2]
        grads, loss = run.window, np.asarray(run.loss, self.dtype)
        run.state, metrics = apply(state, grads, {"loss": loss})
        self.empty_window(run)
        if float(metrics["optim/skipped"]):
            raise Refused(422, "optim_step: the gradient is not finite; nothing was applied")
        return {"optim/grad_norm": float(metrics["optim/grad_norm"]), "optim/step": float(run.state.step)}

    # ---- what is kept

    def leaves(self, run: Run) -> dict[str, np.ndarray]:
        """Returns copies of the adapter's leaves in host memory, flat name -> array of the largest rank, with its
        scales."""
        return {name: np.array(to_host(x)) for name, x in {**run.state.trainable, **run.state.frozen}.items()}

    def arrays(self, run: Run) -> dict[str, np.ndarray]:
        """Returns host copies of all arrays of a run: "adapter/<name>", those of `moments`, "window/<name>". Its
        options and its sum of losses are not among them."""
        out = {f"adapter/{name}": x for name, x in self.leaves(run).items()} | self.moments(run)
        return out | {f"window/{name}": np.array(to_host(x)) for name, x in (run.window or {}).items()}

    def from_arrays(self, options: LoraOptions, arrays: dict) -> Run:
        """Returns the run that `arrays` was called with, bit for bit; arrays of another largest rank are padded or cut.

        options: LoraOptions of the run. arrays: name -> array in host memory. The window's sum of losses is not in
        them."""
        def part(kind):
            return self.fitted({name.removeprefix(kind): x for name, x in arrays.items() if name.startswith(kind)})

        run = self.restored(options, part("adapter/"), (arrays["count"], part("mu/"), part("nu/")))
        if window := part("window/"):
            run.window = {name: jax.device_put(x, self.places[name]) for name, x in window.items()}
        return run

    def moments(self, run: Run) -> dict[str, np.ndarray]:
        """Returns copies of the optimizer's moments in host memory: "count", "mu/<name>", "nu/<name>"."""
        kept = run.state.opt_state.moments
        out = {"count": np.array(to_host(kept.count))}
        for kind in ("mu", "nu"):
            out |= {f"{kind}/{name}": np.array(to_host(x)) for name, x in getattr(kept, kind).items()}
        return out

    def params(self, leaves: dict):
        """Returns the parameter tree of the model: the base with `leaves`, flat name -> array of the largest rank."""
        placed = {name: jax.device_put(x, self.places[name]) for name, x in leaves.items()}
        return merge(placed, self.base)

    def params_without_scales(self, leaves: dict):
        """Returns `params` of the same products with every scale 1, in B: for engines that have one scale for all runs,
        that of the model's adapter."""
        first, out = adapters.first_parts(self.model.base.entries), dict(leaves)
        for name in leaves:
            module, _, leaf = name.rpartition(f"/{adapters.NODE}/")
            if leaf == "b":
                scale = leaves[f"{first.get(module, module)}/{adapters.NODE}/scale"]
                out[name] = leaves[name] * scale.reshape(scale.shape + (1,) * (leaves[name].ndim - scale.ndim))
            elif leaf == "scale":
                out[name] = np.ones_like(leaves[name])
        return self.params(out)

    def read(self, folder) -> dict:
        """Returns the leaves that `export` wrote, flat name -> array of the run's own rank."""
        return peft.read(folder, self.model.base, head=True)[1]

    def export(self, run: Run, folder) -> None:
        """Writes the adapter in PEFT's files to a folder, with its own rank and scale, in the trainer's dtype."""
        own = dataclasses.replace(self.model, adapter=run.adapter)
        peft.write_plain(folder, own, unflatten_dict(self.leaves(run), sep="/"), self.dtype)

    def fitted(self, moments: dict) -> dict:
        """Returns saved moments of a server with another largest rank, padded or cut (what is cut is zero).

        moments: flat name -> array; the result has this server's shapes and the arrays' dtypes."""
        shapes = {"/".join(entry.path): entry.shape for entry in self.model.entries}
        out = {}
        for name, own in moments.items():
            whole, common = np.zeros(shapes[name], own.dtype), tuple(map(slice, map(min, own.shape, shapes[name])))
            whole[common] = own[common]
            out[name] = whole
        return out

    def base_leaves(self) -> dict[str, np.ndarray]:
        """Returns the leaves of an adapter that changes nothing: flat name -> zeros of the largest rank."""
        return self._padded({})


NOT_FINITE = ("the loss is {}: nothing was added; look for log-probs far below those of the policy, very large "
              "advantages, or a learning rate that destroyed the adapter")
LORA_STREAM = zlib.crc32(b"lora")  # of the seed, as roles.parameters draws the adapters of a run
