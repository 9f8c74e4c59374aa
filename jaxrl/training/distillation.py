"""The objective of distillation: a divergence between student and teacher at every loss token.

Formulas of the divergences are in algorithms.distillation; teachers are scored in roles.teachers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algorithms.distillation import sparse_divergence
from jaxrl.kernels.logprob import divergence
from jaxrl.models.placement import split_of
from jaxrl.training.objective import Objective
from jaxrl.training.score import logprobs_of

TEACHER = "teacher"  # node of the parameters that holds the teacher's head


@dataclasses.dataclass(frozen=True)
class Distillation(Objective):
    """Minimises (1 - ce) coef sum_t w_policy divergence_t - ce sum_t w_positive logp_t.

    With `teacher` the divergence is over the first `vocab` ids of the whole vocabulary, from the column
    "teacher_hidden" [R, S, E] and the head that the parameters hold under TEACHER (as wide as the student's). Without
    it, the divergence is over the columns "teacher_ids" [R, S, K] int (-1 = no token) and "teacher_logprobs" [R, S, K]
    (nats).

    Attributes:
      temperature: of the student.
      kind: "forward" KL(teacher || student), "reverse" KL(student || teacher), or "jsd".
      beta: the teacher's share of jsd's mixture, in (0, 1).
      tail: with columns of log-probs, one more outcome for all other tokens (algorithms.distillation.with_tail).
      coef: factor on the divergence.
      ce: share of the cross-entropy on demonstrations, whose weights are w_positive; read if > 0.
      teacher: the teacher's Model, or None.
      vocab: number of ids that student and teacher have in common; 0 = all. Read with `teacher` alone.
      teacher_temperature: of the teacher's whole distributions; columns of log-probs have it applied already.
    """

    kind: str = "forward"
    beta: float = 0.5
    coef: float = 1.0
    tail: bool = True
    ce: float = 0.0
    teacher: Any = None
    vocab: int = 0
    teacher_temperature: float = 1.0

    @property
    def columns(self) -> tuple[str, ...]:
        """Token columns that the loss reads: teacher_ids and teacher_logprobs, or with the teacher's head
        teacher_hidden."""
        return ("teacher_ids", "teacher_logprobs") if self.teacher is None else ("teacher_hidden",)

    @property
    def weights(self) -> tuple[str, ...]:
        """Token weights that the loss reads: "policy", "token", and "positive" if the cross-entropy has a share."""
        return ("policy", "token", *["positive"] * bool(self.ce))

    @jax.named_scope("loss")
    def loss(self, outputs, batch, entropy_coef=None):
        """Computes the sum of token divergences d (nats) weighted by "policy", mixed with the negative log-likelihood
        weighted by "positive"; the weights hold 1/denominator and are 0 outside the loss.

        Args:
          outputs: objective.Outputs of the student's forward pass. batch: PackedBatch with the columns and weights that
            this names.
          entropy_coef: not used.

        Returns ([] (1 - ce) coef sum w d + ce sum w nll, metrics: distill/divergence as a token mean, distill/nll if ce
        > 0; from columns of log-probs also policy/entropy, policy/logprob and distill/teacher_mass, the teacher's
        probability of the listed tokens, as token means).
        """
        apart, metrics = self._sparse(outputs, batch) if self.teacher is None else self._whole(outputs, batch)
        mean = lambda x: jnp.sum(outputs.token * jax.lax.stop_gradient(x))  # noqa: E731
        loss = (1 - self.ce) * self.coef * jnp.sum(batch.weights["policy"] * apart)
        metrics["distill/divergence"] = mean(apart)
        if self.ce:
            logp, _, _ = outputs.logprobs()
            nll = -jnp.sum(batch.weights["positive"] * logp)
            loss += self.ce * nll
            metrics["distill/nll"] = jax.lax.stop_gradient(nll)
        return loss, metrics

    def _sparse(self, outputs, batch):
        ids, known = batch.columns["teacher_ids"], batch.columns["teacher_logprobs"]
        logp, entropy, own = logprobs_of(
            outputs.model, outputs.params, outputs.hidden, batch, temperature=self.temperature, chunk=self.chunk,
            valid_RxS=outputs.mask, ids_RxSxK=jnp.where(outputs.mask[..., None], ids, -1))
        used = (ids >= 0) & outputs.mask[..., None]
        apart = sparse_divergence(own, known.astype(own.dtype), used, kind=self.kind, beta=self.beta, tail=self.tail)
        mean = lambda x: jnp.sum(outputs.token * jax.lax.stop_gradient(x))  # noqa: E731
        mass = jnp.sum(jnp.where(used, jnp.exp(known), 0), axis=-1)
        return jnp.where(outputs.mask, apart, 0), {"policy/entropy": mean(entropy), "policy/logprob": mean(logp),
                                                   "distill/teacher_mass": mean(mass)}

    def _whole(self, outputs, batch):
        model, teacher = outputs.model, self.teacher
        head, theirs = model.head(outputs.params), teacher.head(outputs.params[TEACHER])
        tied = model.config.tied
        return divergence(
            outputs.hidden, head, batch.columns["teacher_hidden"].astype(teacher.compute_dtype), theirs, outputs.mask,
            kind=self.kind, beta=self.beta, vocab=self.vocab, temperature=self.temperature,
            teacher_temperature=self.teacher_temperature, softcap=model.config.final_softcap,
            teacher_softcap=teacher.config.final_softcap, chunk=self.chunk,
            split=split_of(outputs.mask.shape, head.shape[0 if tied else 1]), transposed=tied,
            teacher_transposed=teacher.config.tied), {}
