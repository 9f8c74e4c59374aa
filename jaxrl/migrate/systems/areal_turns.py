"""AReaL's agents and workflows of several turns: a joint rule of its table. See systems/areal.py."""

from __future__ import annotations

from jaxrl.migrate import episodes
from jaxrl.migrate.table import Migration

BOUNDS = ("agent_run_args.max_turns", "max_turns", "tir.max_turns", "max_llm_calls_per_run")
SAID = (
    "agent_run_args.**",
    "econfig.**",
    "tir.**",
    "judge_engine.**",
    "workflow",
    "eval_workflow",
    "agent_builder_path",
    "n_trajs",
    "max_tokens_per_trajectory",
    "export_style",
    "reward_fn_path",
    "workflow_kwargs.**",
)


def turns(m: Migration):
    """Sets env.function to a stub and env.max_turns to the source's bound, if the source sets a key of agents,
    workflows or turns (BOUNDS, SAID) other than export_style and reward_fn_path; otherwise does nothing. The user is
    asked to write the stub, or to run the agent as it is (env.program), and for rollout.group_size where n_trajs is
    another number.

    max_tokens_per_trajectory may lower train.max_sequence_tokens. A trajectory has one reward in AReaL: without
    discount and KL, algorithm.advantage=returns becomes outcome; otherwise reward.norm_std becomes none, which is
    reported.
    """
    found = [s for name in (*BOUNDS, *SAID) for s in m.all(name) if s.value is not None]
    agents = [s for s in found if s.key not in ("export_style", "reward_fn_path")]
    if not agents:
        return
    bound = next((name for name in BOUNDS if m.given(name) and m.integer(name)), "")
    what = next(
        (str(s.value) for s in found if s.key in ("workflow", "agent_builder_path")),
        "the workflow of its training script",
    )
    said = [(s.key, s.value) for s in found]
    keys = (bound,) if bound else ("workflow", "agent_builder_path")
    episodes.episode(m, what, said, m.integer(bound) if bound else None, *keys)
    for s in found:
        if s.key != bound:
            m.mark(s.key, "ask", "written into the stub of the episode")
    group = m.integer("n_trajs") if m.given("n_trajs") else 0
    if group and group != m.options["rollout.group_size"][0]:
        m.needs(
            f"rollout.group_size: n_trajs={group} episodes of a prompt are compared there, beside gconfig.n_samples"
        )
    most = m.integer("max_tokens_per_trajectory") if m.given("max_tokens_per_trajectory") else 0
    if most:
        episodes.longest(m, most, "max_tokens_per_trajectory")
    _one_reward(m)
    m.needs("an agent that speaks to OpenAI's API may run as it is: env.program in place of env.function")


def _one_reward(m: Migration):
    """The reward of a trajectory is one number there: without a discount and a KL in it, the return is the outcome."""
    o = m.options
    plain = o.get("algorithm.advantage", ("",))[0] == "returns" and o.get("algorithm.gamma", (1.0,))[0] == 1
    if plain and not o.get("algorithm.kl.coef", (0,))[0]:
        o["algorithm.advantage"] = ("outcome", o["algorithm.advantage"][1])
        o.pop("algorithm.gamma", None)
    elif o.get("reward.norm_std", ("none",))[0] != "none":
        o["reward.norm_std"] = ("none", o["reward.norm_std"][1])
        m.lacks(
            "actor.reward_norm.std_level", "the rewards of turns are discounted, or have a KL: they are not divided"
        )
