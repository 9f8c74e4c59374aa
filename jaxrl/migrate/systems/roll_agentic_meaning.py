"""What keys of ROLL's agentic pipeline mean together: the joint rules of its table. See systems/roll_agentic.py."""

from __future__ import annotations

import json
import math
import pprint
from typing import Any

from jaxrl.migrate import common, episodes, secret_values
from jaxrl.migrate.systems import roll_meaning
from jaxrl.migrate.systems.roll_layout import ARGS, EPISODE, INFER, SAMPLE, TRAIN
from jaxrl.migrate.table import Migration

ENV, VAL, NORM = "train_env_manager.", "val_env_manager.", "reward_normalization."
MANAGERS = "roll.pipeline.agentic.env_manager."
TRAJECTORIES = {"TrajEnvManager", "VLTrajEnvManager"}
STEPS = {"StepEnvManager", "StepConcatEnvManager"}
MOST_ROWS = 65_536  # of a file, about 4 MB

STUB = '''"""Episodes of ROLL's agentic pipeline ({what}): name what makes the environments.

Turns, templates and bounds are those of the config. As it stands every episode ends after the model's first turn, with
the score 0. Names and formats: docs/guides/environments.md.
"""

{imports}ENVS = {envs}


class Ends:
    """Ends at once; it stands in until `make` is written."""

    def reset(self, seed=None):
        return "", {{}}

    def step(self, action):
        return "", 0.0, True, False, {{}}


def make(env_type, config{tools}):
    """Returns an environment with gem's `reset(seed)` and `step(action)`{wrapped}."""
    # WRITE HERE. ROLL's environments run as they are, where its package is installed:
    #     import gem
    #     import roll.pipeline.agentic.env  # registers env_type
{made}
    return Ends()


async def episode(task, chat):
    """One trajectory of the environment that the row's tag names, by the group's seed. Scored by the sum of
    rewards{whose}."""
    said = ENVS[task.row["tag"]]
    env = make(said["env_type"], {config}{given})
    observation, info = env.reset(seed=task.seed % 2**31)
    instruction, suffix, tool{zero} = info.get("env_instruction", ""), info.get("suffix", ""), False{nought}
    for step in range(said["max_steps"]):
{messages}
        turn = await chat.send(messages, max_tokens=said["max_tokens"])
        observation, reward, ended, _, info = env.step(turn.text)
        {count}
        tool, suffix = info.get("use_tool", False), info.get("suffix", "")
        if ended:
            break
{total}'''
PLAIN = {"tools": "", "wrapped": "", "given": "", "made": "    #     return gem.make(env_id=env_type, **config)"}
# tools of tool_wrapper, which ROLL puts around the environment
TOOLS = {
    "tools": ", tools",
    "wrapped": ", in its tools where it has any",
    "given": ', said["tools"]',
    "made": """\
    #     from roll.pipeline.agentic.tools.tool_env_wrapper import tool_wrapper
    #     env = gem.make(env_id=env_type, **config)
    #     return tool_wrapper(env, **tools) if tools else env""",
}
SEEDED = """{**said["config"], "seed": task.seed % 2**31} if "seed" in said["config"] else said["config"]"""
BY_TURN = {
    "whose": ", each that of its turn",
    "zero": "",
    "nought": "",
    "count": "chat.reward(float(reward))",
    "total": "",
}
# ROLL puts the whole score on an episode's last token: what remains from a turn on does not lack earlier turns'
AT_THE_END = {
    "whose": ", all on its last token", "zero": ", total", "nought": ", 0.0", "count": "total += float(reward)",
    "total": "    return total\n"}
TURNS = """        text = said["template"].format(
            observation=observation, suffix=suffix, turn_idx=step + 1, actions_left=said["max_steps"] - step,
            max_response_length=said["max_tokens"])
        if tool:
            messages = [{"role": "tool", "content": observation}]
        elif step:
            messages = [{"role": "user", "content": text}]
        else:
            text = f"{instruction}\\n{text}" if instruction else text
            messages = [{"role": "system", "content": said["system"]}, {"role": "user", "content": text}]"""
PICTURES = '''        before = (instruction if not step else "") + said["before"].format(turn_idx=step + 1)
        after = said["after"].format(actions_left=said["max_steps"] - step, max_response_length=said["max_tokens"])
        kind = "prompt" if isinstance(observation, str) else "image"
        shown = observation if isinstance(observation, dict) else {kind: observation}
        found = shown.get("image", [])
        found = found if isinstance(found, (list, tuple)) else [found]
        parts = [{"type": "text", "text": before}, *({"type": "image", "image": one} for one in found)]
        parts.append({"type": "text", "text": f"{shown.get('prompt') or ''}{after}"})
        system = [{"role": "system", "content": said["system"]}] if not step and said["system"] else []
        messages = [*system, {"role": "user", "content": parts}]'''
STEP = """        chat.state(str(observation))
        text = said["template"].format(
            env_instruction=instruction, current_observation=observation, current_step=step + 1, step_count=step,
            history="", history_length=0, max_response_length=said["max_tokens"])
        messages = [{"role": "system", "content": said["system"]}] if said["system"] else []
        messages.append({"role": "user", "content": text})
        if step:  # every turn reads the present alone, and is trained as a sequence of its own
            chat.rewrite(messages)
            messages = []"""

SHOWN = 'shown = f"{observation}\\n{suffix}"\n        chat.state(shown)'
STEPS_CONCAT = STEP.replace("chat.state(str(observation))", SHOWN).replace("n=observation,", "n=shown,")


def table_of(m: Migration, tag: str) -> dict[Any, Any]:
    """Returns an entry of custom_envs as a nested table, {} if there is none. Keys are integers where all of a table's
    are digits; floats that are not finite are text."""
    out: dict[Any, Any] = {}
    for s in m.all("custom_envs.**"):
        if s.key.startswith(f"custom_envs.{tag}."):
            rest = s.key.removeprefix(f"custom_envs.{tag}.")
            *above, leaf = [*rest[:-2].split("."), "."] if rest.endswith("..") else rest.split(".")
            at = out
            for name in above:
                at = at.setdefault(name, {})
            at[leaf] = str(s.value) if isinstance(s.value, float) and not math.isfinite(s.value) else s.value
    return _numbered(out)


def turns_of(table: dict) -> Any:
    """Returns the most turns of an entry of custom_envs: its max_steps, else its env_config's, which ROLL 0.1.0 reads;
    None without either."""
    own = table.get("env_config")
    return table.get("max_steps") or (own.get("max_steps") if isinstance(own, dict) else None)


def _numbered(table):
    """Returns a table whose keys are numbers where all of a table's are: YAML has them so."""
    if not isinstance(table, dict):
        return table
    whole = table and all(str(k).isdigit() for k in table)
    return {int(k) if whole else k: _numbered(v) for k, v in table.items()}


def tags(m: Migration, role: str) -> list[str]:
    """Returns the tags of a role's environments. role: train_env_manager. or val_env_manager., with the dot."""
    return [str(t) for t in m.list(role + "tags")]


def drawn_at(m: Migration, role: str) -> str:
    """Returns the prefix of the generating_args that count: actor_infer's if the source sets any, else the role's.
    Marks the role's inert if actor_infer's win. role: with its dot."""
    own = [s.key for s in m.singles.values() if s.key.startswith(INFER + SAMPLE)]
    if own and any(s.key.startswith(role + SAMPLE) for s in m.singles.values()):
        for s in [s for s in m.singles.values() if s.key.startswith(role + SAMPLE)]:
            m.mark(s.key, "inert", "actor_infer.generating_args is set, and wins")
    return (INFER if own else role) + SAMPLE


def lengths(m: Migration):
    """Sets rollout.max_new_tokens, the most tokens of a turn, and data.max_prompt_tokens.

    A trajectory has sequence_length tokens, else prompt_length + response_length; a source with neither sequence_length
    nor response_length is refused. A turn has the fewest of generating_args.max_new_tokens, the trajectory's tokens
    less 1, and the largest max_tokens_per_step of the environments. Prompts have prompt_length tokens, at most the
    trajectory's less a turn's (or 64 if that is fewer). val_prompt_length and val_sequence_length are marked inert.
    """
    whole = m.integer("sequence_length")
    keys = ("sequence_length",)
    if not whole:
        if not m.integer("response_length"):
            m.lacks("sequence_length", "neither it nor response_length is set: ROLL does not start", refuse=True)
        whole, keys = (
            m.integer("prompt_length") + (m.integer("response_length") or 1024),
            ("prompt_length", "response_length"),
        )
    elif m.given("response_length"):
        m.mark("response_length", "inert", "sequence_length is set, and wins")
    drawn = drawn_at(m, ENV) + "max_new_tokens"
    of = {f"custom_envs.{tag}.max_tokens_per_step": table_of(m, tag).get("max_tokens_per_step") for tag in tags(m, ENV)}
    bounds = {key: n for key, n in of.items() if isinstance(n, int)}
    turn = min(int(m.integer(drawn)), whole - 1, max(bounds.values(), default=whole))
    m.set("rollout.max_new_tokens", max(turn, 1), drawn, *keys, *bounds)
    m.set("data.max_prompt_tokens", min(m.integer("prompt_length"), max(whole - turn, 64)), "prompt_length", *keys)
    m.facts[EPISODE] = whole
    for key in ("val_prompt_length", "val_sequence_length"):
        m.mark(key, "inert", "the agentic pipeline bounds evaluation by sequence_length, too")


def batch(m: Migration):
    """Sets the batch as roll_meaning.prompts_of_step, from rollout_batch_size, which counts trajectories: prompts are
    groups of train_env_manager.group_size of them. A batch that is no multiple of the groups is refused."""
    total, group = m.integer("rollout_batch_size"), max(m.integer(ENV + "group_size"), 1)
    if total < 1 or total % group:
        m.lacks("rollout_batch_size", f"{total} trajectories are no multiple of groups of {group}", refuse=True)
        return
    roll_meaning.prompts_of_step(m, total // group, group, ENV + "group_size", filled=True)


def _norms(m: Migration) -> dict[str, str]:
    """Returns what rewards are brought to, mean and std: none, group or batch."""
    grouping, method = m.text(NORM + "grouping"), m.text(NORM + "method")
    whole, first = grouping.lower() == "batch", m.version in ("0.1.0", "0.1.1")
    own = {"mean": ("mean", "mean_std", "asym_clip"), "std": ("mean_std", "asym_clip")}
    out = {}
    for name, methods in own.items():
        key = NORM + f"norm_{name}_type"
        given = "" if first else m.text(key)
        out[name] = given or (("batch" if whole else "group") if method in methods else "none")
        if out[name] == "group" and grouping in ("batch", "tags"):
            out[name] = "batch"
    if method == "asym_clip" and first:
        m.lacks(NORM + "method", "asym_clip: advantages are not clipped between their norm and what follows")
    if grouping == "tags" and len(tags(m, ENV)) > 1 and "batch" in out.values():
        m.lacks(
            NORM + "grouping", "tags: rewards are normalised within each environment there, here over the whole batch"
        )
    if grouping not in ("batch", "tags", "traj_group_id") and set(out.values()) & {"group"}:
        m.lacks(NORM + "grouping", f"{grouping!r} is none of traj_group_id, tags and batch", refuse=True)
    if out["std"] == "group" and out["mean"] != "group":
        m.lacks(NORM + "norm_std_type", "the group's deviation without its mean", refuse=True)
    return out


def advantage(m: Migration):
    """Sets algorithm.advantage, its norms, discounts, bounds and whitening from adv_estimator and reward_normalization.

    grpo, reinforce, gae, and agentic_reinforce with gamma 1, are set as in the RLVR pipeline; step_reinforce without
    discount and norms is returns. gigpo is gigpo, with the group's mean, episode_reward_weight 1 and a
    step_reward_weight. Everything else is refused, as are groups of one that are normed by group (but in gigpo). Keys
    that the estimator does not read are marked inert.
    """
    name, group = m.text("adv_estimator"), max(m.integer(ENV + "group_size"), 1)
    norms = _norms(m)
    keys = {option: (NORM + "grouping", NORM + "method", NORM + f"norm_{option}_type") for option in norms}
    if group < 2 and "group" in norms.values() and name != "gigpo":
        m.lacks(NORM + "grouping", "the norm of groups of one: every advantage is 0 there", refuse=True)
        norms = {"mean": "none", "std": "none"}
    if name != "gigpo":
        m.mark("step_reward_weight", "inert", "read by gigpo alone")
        m.mark("episode_reward_weight", "inert", "read by gigpo alone")
    if name not in ("gigpo", "step_reinforce"):
        m.mark("step_reward_gamma", "inert", "read by gigpo and step_reinforce alone")
    if name in ("grpo", "reinforce", "gae") or name == "agentic_reinforce" and m.number("gamma") == 1:
        roll_meaning.normalised(m, name, norms, keys, group)
        if m.number("gamma") != 1 and name != "gae":
            m.differs("ROLL discounts over the environment's tokens, too; here over those that were sampled")
    elif name == "gigpo":
        _gigpo(m, norms, keys)
    elif name == "step_reinforce" and m.number("step_reward_gamma") == 1 and set(norms.values()) == {"none"}:
        m.set("algorithm.advantage", "returns", "adv_estimator")
        m.set("algorithm.gamma", 1.0, "step_reward_gamma")
        for option in norms:
            m.set(f"algorithm.advantage_{option}", "none", "adv_estimator", *keys[option])
        roll_meaning.bounded(m, norms, group)
        m.facts["advantage"] = "rewards to go of turns" + (", whitened" if m.flag("whiten_advantages") else "")
    elif name == "step_reinforce":
        key = NORM + "method" if set(norms.values()) != {"none"} else "step_reward_gamma"
        m.lacks(
            key,
            "returns of steps that are discounted, or normalised over steps: there are those of whole episodes, of"
            " turns of a group (algorithm.advantage=turn) and of turns in one state (gigpo)",
            refuse=True,
        )
    else:
        why = f"{name!r} is none of grpo, reinforce, gae, gigpo, step_reinforce and, with gamma=1, agentic_reinforce"
        m.lacks("adv_estimator", why, refuse=True)


def _gigpo(m: Migration, norms: dict[str, str], keys: dict[str, tuple[str, ...]]):
    if norms["mean"] != "group":
        m.lacks(NORM + "grouping", "gigpo compares the episodes of a group", refuse=True)
        return
    m.set("algorithm.advantage", "gigpo", "adv_estimator")
    for option, value in norms.items():
        m.set(f"algorithm.advantage_{option}", value, *keys[option])
    m.set("algorithm.turn_gamma", m.number("step_reward_gamma"), "step_reward_gamma")
    step, whole = m.number("step_reward_weight"), m.number("episode_reward_weight")
    if not step or whole != 1:
        m.lacks(
            "episode_reward_weight", "the episode's advantage has weight 1, the step's another one above 0", refuse=True
        )
        return
    m.set("algorithm.anchor_coef", float(step), "step_reward_weight")
    roll_meaning.bounded(m, norms, m.integer(ENV + "group_size"))
    m.facts["advantage"] = "gigpo" + (", whitened" if m.flag("whiten_advantages") else "")
    m.differs("ROLL's mean and deviation of episodes count an episode once for each of its steps; here once")


def loss(m: Migration):
    """Sets the loss as roll_meaning.loss, with ratio_type in place of importance_sampling: other ratios than those of
    tokens are refused. The constant of seq-mean-token-sum-norm is that of a trajectory's tokens less 1."""
    roll_meaning.loss(m, "ratio_type")
    if m.text("ratio_type") != "token":
        m.lacks(
            "ratio_type",
            f"{m['ratio_type']}: a ratio of each turn: there are those of tokens and of sequences",
            refuse=True,
        )
    if m.options.get("algorithm.aggregation", ("",))[0] == "constant":
        whole = m.facts[EPISODE]
        constant = roll_meaning.divisor(m, whole - 1)
        m.options["algorithm.aggregation_constant"] = (constant, ("loss_agg_mode", "sequence_length"))
        m.facts["Dr.GRPO's constant"] = constant


def sampling(m: Migration):
    """Sets how completions are drawn as roll_meaning.drawn_by, from the generating_args that count (`drawn_at`)."""
    roll_meaning.drawn_by(m, drawn_at(m, ENV))


def evaluation(m: Migration):
    """Sets eval.sets to a file of rows, which it writes, eval.every_steps, before, after, and how completions are
    drawn. If eval_steps is below 1, it sets eval.every_steps=0 alone.

    A row is a group: val_batch_size divided by val_env_manager.group_size, or num_env_groups if val_batch_size is not
    above 0, at most MOST_ROWS. eval.samples is the size of a group, 1 if sampling is greedy.
    """
    interval, group = m.integer("eval_steps"), max(m.integer(VAL + "group_size"), 1)
    groups, count = m.integer(VAL + "num_env_groups"), m.integer("val_batch_size")
    if interval < 1:
        common.triggers(m, "eval.every_steps", 0, "eval_steps")
        m.facts["evaluation"] = "none"
        return
    rows = max(count // group, 1) if count > 0 else groups
    of = _shares(m, VAL)
    file = f"{m.name}_eval.jsonl"
    m.files[file] = _rows(m, of, rows, "evaluation has")
    rows = min(rows, MOST_ROWS)
    m.set(
        "eval.sets",
        (f"val=./{file}",),
        VAL + "tags",
        VAL + "num_groups_partition",
        "val_batch_size",
        VAL + "num_env_groups",
    )
    common.triggers(m, "eval.every_steps", interval, "eval_steps")
    m.set("eval.before", True, "eval_steps")
    m.set("eval.after", False, "eval_steps")
    at = drawn_at(m, VAL)
    for option, (value, *keys) in roll_meaning.drawn(m, at).items():
        m.set(f"eval.{option}", value, *keys)
    m.set("eval.samples", group if m.options["eval.temperature"][0] else 1, VAL + "group_size")
    m.facts["evaluation"] = (
        f"every {interval} steps and before, {rows} groups of {group}, temperature {m.options['eval.temperature'][0]}"
    )


def _shares(m: Migration, role: str) -> list[tuple[str, int]]:
    """Returns (tag, groups of it) of a role."""
    names, parts = tags(m, role), [int(n) for n in m.list(role + "num_groups_partition")]
    return list(zip(names, parts, strict=False)) or [(names[0] if names else "", 1)]


def _rows(m: Migration, shares: list[tuple[str, int]], count: int, what: str) -> str:
    """Returns JSON lines of count rows with tags by their shares, in turn; of MOST_ROWS if it is more, which is noted.
    what: that has so many groups, with its verb."""
    if count > MOST_ROWS:
        m.differs(f"{what} {count} groups of environments there; here the file has {MOST_ROWS} rows: write the others")
    total, out, done = sum(n for _, n in shares) or 1, [], [0] * len(shares)
    for i in range(min(count, MOST_ROWS)):
        behind = [n * (i + 1) / total - have for (_, n), have in zip(shares, done, strict=True)]
        at = behind.index(max(behind))
        done[at] += 1
        out.append(json.dumps({"prompt": shares[at][0], "tag": shares[at][0]}))
    return "\n".join(out) + "\n"


def _asked(m: Migration, found: dict[str, dict], named: set[str], bound: str):
    """What the episode's source asks of its reader, and what stays otherwise of the environment managers in `named`."""
    penalty = ENV + "format_penalty"
    if m.version == "0.1.0" and m.number(penalty):
        m.mark(penalty, "ask", "a part of the score")
        m.needs(
            f"{penalty}={m[penalty]}: ROLL 0.1.0 adds it to the score for every turn without a valid action: do so in "
            f"{m.name}_env.py"
        )
    if not any(key.startswith(TRAIN) for key in m.singles):
        m.needs(
            "actor_train is not set, so that this file trains nothing there (start_agentic_rollout_pipeline.py): to "
            "play episodes without training, run.mode=eval"
        )
    estimator = m.text("adv_estimator")
    if named & STEPS and estimator in ("grpo", "reinforce", "gae", "agentic_reinforce"):
        m.lacks(
            "adv_estimator",
            f"{estimator} beside {', '.join(sorted(named & STEPS))}: each step is scored by its own reward there, here "
            "by the episode's; there are gigpo and algorithm.advantage=turn",
            refuse=True,
        )
    if named & STEPS:
        m.lacks(
            TRAIN + ARGS + "gradient_accumulation_steps"
            if m.given(TRAIN + ARGS + "gradient_accumulation_steps")
            else bound,
            "each step of an episode is a sample there, so that optimizer steps follow from how many there are; "
            "here an episode is one,"
            " of as many sequences",
        )
    if named & STEPS and any("history_length" in t for t in found.values()):
        m.needs(
            f"{m.name}_env.py: add the last history_length steps, which ROLL writes into the prompt as {{history}}"
        )


def environments(m: Migration):
    """Writes the rows (one for each group of environments, at least a step's, at most MOST_ROWS) and the episode. Sets
    data.path and its columns, reward.functions to none, env.function, max_turns and max_observation_tokens.

    The user is asked to write what makes the environments, and for their keys that the stub does not have. Environment
    managers of single steps beside grpo, reinforce, gae and agentic_reinforce are refused.
    """
    prompts = m.options.get("data.prompts_per_step", (1,))[0]
    file = f"{m.name}_rows.jsonl"
    count = max(min(m.integer(ENV + "num_env_groups"), MOST_ROWS), prompts)  # more than a step has are drawn anew
    m.files[file] = _rows(m, _shares(m, ENV), count, "a step has")
    m.set("data.path", (f"./{file}",), ENV + "tags", ENV + "num_groups_partition", ENV + "num_env_groups")
    m.set("data.prompt_column", "prompt", ENV + "tags")
    m.set("data.answer_column", "", ENV + "tags")
    m.set("reward.functions", (), ENV + "tags")
    evaluated = tags(m, VAL) if m.integer("eval_steps") > 0 else []
    found: dict[str, dict] = {tag: table_of(m, tag) for tag in [*tags(m, ENV), *evaluated]}
    named = {str(t.get("env_manager_cls") or "TrajEnvManager").rpartition(".")[2] for t in found.values()}
    turns = [n for t in found.values() if isinstance(n := turns_of(t), int)]
    places = list(found)
    used = sorted(
        (s for s in m.all("custom_envs.**") if s.key.split(".")[1] in found),
        key=lambda s: places.index(s.key.split(".")[1]),
    )
    what = ", ".join(dict.fromkeys(str(t.get("env_type") or tag) for tag, t in found.items()))
    bound = next((s.key for s in used if s.key.endswith(".max_steps")), ENV + "tags")
    said = [(f"custom_envs.{tag}.{key}", value) for tag, t in found.items() for key, value in t.items()]
    m.set(
        "env.max_observation_tokens",
        max(m.facts[EPISODE] - m.options["rollout.max_new_tokens"][0], 1),
        "sequence_length",
    )
    episodes.episode(m, f"ROLL's {what}", said, max(turns) if turns else None, bound)
    episodes.longest(m, m.facts[EPISODE], "sequence_length")
    if missing := [tag for tag, t in found.items() if not t]:
        m.needs(
            f"custom_envs.{missing[0]}: not in the file, though tags name it: fill it in in {m.name}_env.py"
        )
    plays = named <= TRAJECTORIES or named <= STEPS
    if plays:
        pictured = named == {"VLTrajEnvManager"}
        steps = STEPS_CONCAT if named == {"StepConcatEnvManager"} else STEP
        messages = steps if named <= STEPS else PICTURES if pictured else TURNS
        m.files[f"{m.name}_env.py"] = _stub(m, found, what, messages)
    for s in m.all("custom_envs.**"):
        if s not in used:
            m.mark(s.key, "inert", "no role names its tag")
        elif s.key != bound:
            _written(m, s.key, messages if plays else "")
    _asked(m, found, named, bound)
    m.needs_you.sort(key=lambda text: "WRITE HERE" in text)
    m.differs("an environment reads a completion's text, in ROLL with the special tokens at its end")
    m.differs("seeds of environments are others; one group has one, as there")


# keys of an entry of custom_envs that the stub's messages are made of
READ = ("env_type", "env_config", "max_steps", "max_tokens_per_step", "agent_system_template")
TEMPLATES = {PICTURES: ("pre_step_template", "next_step_template")}
HANDLED = {  # key -> what is said of it
    "env_manager_cls": "the stub plays as it does",
    "use_thread_lock": "environments run in processes of their own (env.workers)",
    "max_env_step_concurrent": "env.in_flight bounds episodes, env.workers the processes that play them",
}


def _written(m: Migration, key: str, messages: str):
    """Says what became of a key of an environment. messages: those of the stub; "": the source's lines are its text."""
    name = key.split(".")[2] if key.count(".") > 1 else ""
    tools = name == "tool_wrapper" and messages != PICTURES
    if not messages or tools or name in (*READ, *TEMPLATES.get(messages, ("agent_template",))):
        m.set("env.function", m.options["env.function"][0], key)
        m.mark(key, "equivalent", "written into the stub of the episode")
    elif name in HANDLED:
        m.mark(key, "automatic", HANDLED[name])
    elif name in ("agent_template", *TEMPLATES[PICTURES], "agent_runner_cls", "tool_wrapper"):
        m.mark(key, "inert", "its environment manager does not read it")
    elif name != "history_length" or messages not in (STEP, STEPS_CONCAT):
        m.mark(key, "ask", "not in the stub")
        m.needs(f"{key}: {m.name}_env.py has nothing of it: carry it over where your environment reads it")
    else:
        m.mark(key, "ask", 'said under "Needs you"')


def _tools(found: dict[str, dict]) -> dict[str, dict]:
    """Returns tag -> its tool_wrapper, of those that have one."""
    return {tag: t["tool_wrapper"] for tag, t in found.items() if isinstance(t.get("tool_wrapper"), dict)}


def _ask_tools(m: Migration, found: dict[str, dict]):
    for tag, wrapper in _tools(found).items():
        configs = [c for c in wrapper.get("tool_configs") or [] if isinstance(c, dict)]
        names = ", ".join(str(c.get("tool_id")) for c in configs) or "no tool_id"
        m.needs(
            f"{m.name}_env.py: {tag} plays with tools ({names}): `make` gets them as `tools` and wraps the environment "
            "in them; without that it is another job"
        )


def _stub(m: Migration, found: dict[str, dict], what: str, messages: str) -> str:
    """Returns the episode of environments that are made by their type, with what the config says of them."""
    tools = _tools(found) if messages != PICTURES else {}  # VLTrajEnvManager has none
    _ask_tools(m, found if tools else {})
    file = f"{m.name}_env.py"

    def hidden(tag: str, key: str, value):
        return secret_values.without_secrets(m, f"custom_envs.{tag}.{key}", value, file)

    envs = {
        tag: {
            "env_type": str(t.get("env_type") or tag),
            "max_steps": turns_of(t) or m.options.get("env.max_turns", (8,))[0],
            "max_tokens": t.get("max_tokens_per_step") or 0,
            "system": t.get("agent_system_template") or "",
            **(
                {"before": t.get("pre_step_template") or "", "after": t.get("next_step_template") or ""}
                if messages == PICTURES
                else {"template": t.get("agent_template") or "{observation}"}
            ),
            "config": hidden(tag, "env_config", t.get("env_config") or {}),
            **({"tools": hidden(tag, "tool_wrapper", tools.get(tag))} if tools else {}),
        }
        for tag, t in found.items()
    }
    text = ascii(what).strip("'").replace('"', "").replace("\\", "/")
    literal = pprint.pformat(envs, width=112, sort_dicts=False)
    late = messages not in (STEP, STEPS_CONCAT) and m.options.get("algorithm.advantage", ("",))[0] in ("returns", "gae")
    parts = {**(AT_THE_END if late else BY_TURN), **(TOOLS if tools else PLAIN)}
    seeded = messages != PICTURES and any("seed" in e["config"] for e in envs.values())  # ROLL gives the group's
    config = SEEDED if seeded else 'said["config"]'
    imports = "import os\n\n" if "os.environ[" in literal else ""
    return STUB.format(what=text[:80], imports=imports, envs=literal, messages=messages, config=config, **parts)
