"""verl's on-policy distillation as our recipe of that name: the last joint rule of its table. See systems/verl.py."""

from __future__ import annotations

from jaxrl.migrate import common, supervised
from jaxrl.migrate.systems.verl_engine import ACTOR
from jaxrl.migrate.table import Key, Migration

D = "distillation."
LOSS, TEACHERS = D + "distillation_loss.", D + "teacher_models.*."
ON = {D + "enabled": True, D + "teacher_models.teacher_model.model_path": "a/teacher", LOSS + "use_task_rewards": False}
POLICY = {**ON, LOSS + "use_policy_gradient": True, LOSS + "loss_mode": "k1"}
DENSE = {**ON, LOSS + "loss_mode": "forward_kl_topk"}
COMMON = ("aggregation", "aggregation_constant", "aggregation_sequences", "ppo_epochs", "num_minibatches")
SAMPLED = (*COMMON, "policy_loss", "ratio", "clip_low", "clip_high", "dual_clip", "old_logprobs", "mismatch")

KEYS = (
    Key(D + "enabled", "equivalent", default=False, other=True, beside={**POLICY, D + "enabled": False}),
    Key(TEACHERS + "model_path", "equivalent"),
    Key(TEACHERS + "inference.dtype", "equivalent"),
    Key(LOSS + "loss_mode", "equivalent", default="k3", other="forward_kl_topk", beside=ON),
    Key(LOSS + "topk", "equivalent", default=32, other=64, beside=DENSE),
    Key(LOSS + "use_task_rewards", "equivalent", default=True),
    Key(LOSS + "distillation_loss_coef", "equivalent", default=1.0),
    Key(LOSS + "use_policy_gradient", "equivalent", default=False),
    Key(LOSS + "policy_loss_mode", "equivalent", default="vanilla"),
    Key(LOSS + "loss_max_clamp", "equivalent"),
    Key(LOSS + "log_prob_min_clamp", "equivalent"),
    Key(LOSS + "clip_ratio", "equivalent", default=0.2),
    Key(LOSS + "clip_ratio_low", "equivalent", default=0.2, other=0.1, beside=POLICY),
    Key(LOSS + "clip_ratio_high", "equivalent", default=0.2, other=0.3, beside=POLICY),
)


def distillation(m: Migration):
    """Sets run.recipe=distill, teacher.path, teacher.dtype and distill.loss if distillation.enabled is on.

    k1 with use_policy_gradient is the loss `sampled`, under the clipped loss with bounds of its own; forward_kl_topk
    without it is `forward`, with distill.top_k and tail=False. Refuses other losses, task rewards and several teachers.
    Asks for a teacher without a path. Removes the options of rewards that the rules before it set.
    """
    if not m.flag(D + "enabled"):
        return
    mode, sampled = m.text(LOSS + "loss_mode"), m.flag(LOSS + "use_policy_gradient")
    teachers = m.all(TEACHERS + "model_path")
    if m.flag(LOSS + "use_task_rewards"):
        m.lacks(LOSS + "use_task_rewards", "a teacher beside rewards: run.recipe=distill has none", refuse=True)
    elif len(teachers) > 1:
        m.lacks(teachers[-1].key, "several teachers, by the row: there is one (teacher.path)", refuse=True)
    elif sampled and mode in ("k1", "kl"):
        _sampled(m)
    elif not sampled and mode == "forward_kl_topk":
        m.set("distill.loss", "forward", LOSS + "loss_mode")
        m.set("distill.top_k", m.integer(LOSS + "topk"), LOSS + "topk")
        m.set("distill.tail", False, LOSS + "loss_mode")
        m.differs("a token's divergence over the teacher's most probable is not cut at 0 here, where the sum is below")
        _only(m, COMMON)
    else:
        m.lacks(
            LOSS + "loss_mode",
            f"{mode} {'as an advantage' if sampled else 'as a loss'}: there are k1 with use_policy_gradient "
            "(distill.loss=sampled) and forward_kl_topk without (forward)",
            refuse=True,
        )
        return
    if not teachers and not m.lacking:
        m.needs("teacher.path: no model_path of distillation.teacher_models is set")
    for s in teachers[:1]:
        m.set("teacher.path", str(s.value or ""), TEACHERS + "model_path", s.key)
    m.set("run.recipe", "distill", D + "enabled")
    for s in m.all(TEACHERS + "inference.dtype")[:1]:
        common.frozen_dtype(m, "teacher.dtype", str(s.value), TEACHERS + "inference.dtype", s.key)
    for name, near in (("loss_max_clamp", "10 nats"), ("log_prob_min_clamp", "-10")):
        if m.number(LOSS + name) is not None:
            m.lacks(LOSS + name, f"log-probs and their differences are not cut here; at {near} few tokens are there")
    m.differs("the teacher lies on the policy's devices, in turns; there it has GPUs of its own (mesh.roles.teacher)")
    m.differs("rewards are metrics; adv_estimator, KL and entropy beside the teacher do nothing, as there")


def _sampled(m: Migration):
    """Its advantage is the difference of log-probs, under the clipped loss with bounds of its own."""
    _only(m, SAMPLED)
    m.set("distill.loss", "sampled", LOSS + "loss_mode", LOSS + "use_policy_gradient")
    for name in ("policy_loss", "ratio", "clip_low", "clip_high", "dual_clip"):
        m.options.pop(f"algorithm.{name}", None)
    if m.text(LOSS + "policy_loss_mode") != "vanilla":
        m.lacks(LOSS + "policy_loss_mode", "there is the clipped loss alone, there too", refuse=True)
    m.set("algorithm.policy_loss", "clip", LOSS + "policy_loss_mode")
    m.set("algorithm.ratio", "token", LOSS + "policy_loss_mode")
    m.set("algorithm.dual_clip", 3.0, LOSS + "policy_loss_mode")
    for side in ("low", "high"):
        key = LOSS + "clip_ratio_" + side
        key = key if m[key] is not None else LOSS + "clip_ratio"
        m.set("algorithm.clip_" + side, m.number(key), key)
    low, high = (m.options[f"algorithm.clip_{side}"][0] for side in ("low", "high"))
    m.facts["clip"] = f"{1 - low:g} to {1 + high:g}, dual 3"


def _only(m: Migration, names: tuple[str, ...]):
    supervised.without_rewards(m, names)
    m.mark(ACTOR + "entropy_coeff", "inert", "the policy's own loss is left out beside a teacher")
