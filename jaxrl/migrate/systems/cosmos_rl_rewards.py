"""Rewards and evaluation of Cosmos-RL: the joint rules of its table. See systems/cosmos_rl.py."""

from __future__ import annotations

import re

from jaxrl.migrate.systems.cosmos_rl_meaning import DISTILL, REMOTE, ROLL, VALID, P, recipe
from jaxrl.migrate.table import Migration

HEAD = '''"""Rules of Cosmos-RL for rewards, in words of our own."""

import re
'''
RULES = {
    "single_choice": '''

def single_choice(prompt, completion, answer, **columns):
    """The text between <answer> and </answer>, or all of it, is the reference's, whatever the case."""

    def said(text):
        found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
        return (found[1] if found else text).strip().lower()

    return float(said(completion) == said(str(answer)))
''',
    "gsm8k": '''

def gsm8k(prompt, completion, answer, **columns):
    """The first "#### number" of the completion is that of the reference, without commas (neither: right, too)."""

    def number(text):
        found = re.search(r"#### (-?[0-9.,]+)", text)
        return found and found[1].replace(",", "")

    return float(number(completion) == number(str(answer)))
''',
    "direct_math": '''

def direct_math(prompt, completion, answer, **columns):
    """1 where the last line "Answer: ..." is the reference, else -1. Compared without blanks, commas in numbers, units
    in \\\\text and signs of LaTeX; Cosmos-RL normalises more words."""

    def plain(text):
        text = re.sub(r"\\\\text\\{[^}]*\\}|\\\\(boxed|mbox)|[\\s${}\\\\]", "", text.split("=")[-1])
        return text.replace(",", "") if re.fullmatch(r"[0-9,]+", text) else text

    found = re.findall(r"(?i)answer\\s*:\\s*([^\\n]+)", completion)
    return 1.0 if found and plain(found[-1]) == plain(str(answer)) else -1.0
''',
}
OTHER = """

def {name}(prompt, completion, answer=None, **columns):
    raise RuntimeError("{name}: write this reward; it returns a number")
"""
FORMAT = r"<think>(?:(?!</?think>).)*</think>\n\n<answer>.*</answer>"


def weighed(m: Migration, key: str) -> dict[str, float]:
    """Returns {name of a reward: weight} of a key that holds a name, a list of names (weight 1) or a table. Raises
    Unreadable for a weight that is no number."""
    table = {s.key[len(key) + 1 :]: s.value for s in m.all(f"{key}.*")}
    found = table or {str(n): 1.0 for n in m.list(key)}
    for name, weight in found.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise m.wrong(f"{key}.{name}", "a number")
    return {name: float(weight) for name, weight in found.items()}


def function(m: Migration, name: str, key: str) -> str:
    """Returns the entry of reward.functions for one of Cosmos-RL's rewards, which `key` names.

    boxed_math is `math`, with a note of what differs. format is `format`, and sets reward.format_pattern. Every other
    name is a function in the file NAME_reward.py beside the config: one of Cosmos-RL's RULES, or a stub that the user
    is asked to write.
    """
    if name == "boxed_math":
        m.differs("boxed_math is `math`: math-verify, too, which here also reads references that are no LaTeX")
        return "math"
    if name == "format":
        m.set("reward.format_pattern", FORMAT, key)
        return "format"
    own = re.sub(r"\W", "_", name, flags=re.ASCII) or "reward"
    file = f"{m.name}_reward.py"
    text = m.files.setdefault(file, HEAD)
    if f"\ndef {own}(" not in text:
        m.files[file] = text + (RULES.get(name) or OTHER.format(name=own))
    if name not in RULES:
        m.needs(f"{file}: write the reward {ascii(name)}; until then the run stops at its start")
    return f"./{file}:{own}"


def rewards(m: Migration):
    """Sets reward.functions and reward.weights, the overlong penalty, reward.remote.* of a remote service, and
    algorithm.keep_group of DAPO's filter_reward_metric. SFT has none of them, distillation no reward function.

    bypass_reward, and a job without a named reward, are refused. Other filters are reported as not carried over; jaxrl
    asks for rewards to be written, and for the addresses of a service.
    """
    if recipe(m) == "sft":
        return
    key = P + "reward_function"
    keys = (key, key + ".*")
    if recipe(m) == "distill":
        m.set("reward.functions", (), DISTILL + "enable")
        return
    if m.flag(P + "bypass_reward"):
        m.lacks(P + "bypass_reward", "every reward is 0: nothing would be learnt", refuse=True)
        return
    named = weighed(m, key)
    overlong = named.pop("overlong", None)
    _overlong(m, overlong, keys)
    if m.flag(P + "use_remote_reward"):
        _remote(m)
        return
    if not named:
        m.lacks(key, "no reward is named", refuse=True)
        return
    functions = tuple(function(m, n, key) for n in named)
    if len(set(functions)) < len(functions):
        m.lacks(key, f"two of the names {', '.join(named)} would be one function in Python: rename one", refuse=True)
    m.set("reward.functions", functions, *keys)
    m.set("reward.weights", () if set(named.values()) == {1.0} else tuple(named.values()), *keys)
    asked = [str(n) for n in m.list(P + "filter_reward_metric")]
    if asked and m.text(P + "variant") == "dapo":
        if len(asked) == 1 and asked[0] in named:
            m.set("algorithm.keep_group", function(m, asked[0], key).rpartition(":")[2], P + "filter_reward_metric")
        else:
            m.lacks(
                P + "filter_reward_metric",
                "groups are kept where one reward of the run differs, or by a function of "
                "your own in algorithm.keep_group",
            )


def _overlong(m: Migration, weight: float | None, keys):
    o = P + "overlong_reward."
    asked = m.flag(o + "enable_overlong_penalty")
    if weight is None and not asked:
        return
    length, most = m.integer(o + "buffer_length"), m.options["rollout.max_new_tokens"][0]
    factor = m.number(o + "penalty_factor") * (1.0 if weight is None else weight)
    # Its buffer ends at max_response_length, though the model's length may cut completions before.
    left = most - m.integer(ROLL + "max_response_length") + length
    if left > most:
        m.lacks(o + "buffer_length", f"a buffer of {length} tokens in completions of {most}: {most} is set")
    elif left <= 0:
        m.differs(
            f"overlong_reward never acts: it would begin {-left} tokens after the longest completion that "
            "model_max_length allows"
        )
    else:
        factor *= left / length
    sources = (o + "buffer_length", o + "enable_overlong_penalty", ROLL + "max_response_length", *keys)
    m.set("reward.overlong_buffer", min(max(left, 0), most), *sources)
    m.set("reward.overlong_penalty", factor, o + "penalty_factor", *keys)
    if weight is None:
        m.needs(
            "overlong_reward.enable_overlong_penalty: Cosmos-RL does not read it; its penalty acts only if `overlong` "
            "is among the rewards, or a script calls it. The config has the penalty: set reward.overlong_buffer=0 if "
            "neither is so in your job"
        )


def _remote(m: Migration):
    """A service that is asked and polled; the addresses are in the environment there."""
    key = P + "use_remote_reward"
    m.set("reward.functions", ("remote",), key)
    m.set("reward.remote.format", "cosmos", key)
    tables = [dict(t) for t in m.list(REMOTE + "reward_fns") if isinstance(t, dict)]
    old = {s.key.rpartition(".")[2]: s.value for s in m.all(REMOTE + "reward_fn.*")}
    default = not tables and not old
    tables = tables or [{"name": n, "weight": w} for n, w in (old or {"dance_grpo": 1.0}).items()]
    names = (REMOTE + "reward_fns", REMOTE + "reward_fn.*")
    m.set("reward.remote.functions", tuple(str(t.get("name", "")) for t in tables), *names)
    m.set("reward.remote.weights", tuple(float(t.get("weight", 1.0)) for t in tables), *names)
    for bound, option in (("clip_min", "part_min"), ("clip_max", "part_max")):
        found = {float(t.get(bound, -5.0 if bound == "clip_min" else 5.0)) for t in tables}
        if len(found) > 1:
            m.lacks(REMOTE + "reward_fns", f"{bound} is one for all functions here; {sorted(found)} are asked for")
        m.set(f"reward.remote.{option}", min(found) if bound == "clip_min" else max(found), *names)
    score = m.text(REMOTE + "score_key") or ("overall_reward" if default else "")
    keys = {str(t["score_key"]) for t in tables if t.get("score_key")} or ({score} if score else set())
    if len(keys) > 1 or not keys and len(tables) > 1:
        m.lacks(REMOTE + "reward_fns", "one score_key is read of all functions: name them in reward.remotes")
    elif keys or tables:
        m.set("reward.remote.score_key", next(iter(keys), str(tables[0].get("name", ""))), REMOTE + "score_key", *names)
    m.set("reward.remote.scale", m.number(REMOTE + "scale"), REMOTE + "scale")
    m.set("reward.remote.clip_min", m.number(REMOTE + "reward_clip_min"), REMOTE + "reward_clip_min")
    m.set("reward.remote.clip_max", m.number(REMOTE + "reward_clip_max"), REMOTE + "reward_clip_max")
    m.set(
        "reward.remote.batch",
        max(m.integer(REMOTE + "batch_size"), m.integer(ROLL + "n_generation")),
        REMOTE + "batch_size",
        ROLL + "n_generation",
    )
    m.needs(
        "reward.remote.servers, fetch_url and key_env: Cosmos-RL has the addresses and the token of the service in "
        "environment variables"
    )


def evaluation(m: Migration):
    on, every = m.flag(VALID + "enable"), m.integer(VALID + "freq")
    if on and every < 1:
        raise m.wrong(VALID + "freq", "a number of steps above 0")
    m.set("eval.every_steps", every if on else 0, VALID + "freq", VALID + "enable")
    m.set("eval.before", on and m.flag(VALID + "val_before_train"), VALID + "val_before_train", VALID + "enable")
    m.set("eval.after", on, VALID + "enable")
    if not on:
        m.facts["evaluation"] = "none"
        return
    _held_out(m)
    if recipe(m) == "sft":
        m.facts["evaluation"] = f"loss, every {every} steps"
        return
    temperature = m.number(VALID + "temperature")
    m.set("eval.temperature", temperature, VALID + "temperature")
    for name in ("top_p", "top_k"):
        value, source = m.number(VALID + name), VALID + name
        if value is None:
            value, source = m.number(ROLL + "sampling_config." + name), ROLL + "sampling_config." + name
        m.set(f"eval.{name}", value or -1 if name == "top_k" else value, VALID + name, source)
    m.set("eval.repetition_penalty", m.number(VALID + "repetition_penalty"), VALID + "repetition_penalty")
    samples = m.integer(VALID + "n_generation")
    greedy = not temperature or m.options["eval.top_k"][0] == 1
    if samples > 1 and greedy:
        m.lacks(
            VALID + "n_generation",
            "several greedy completions are all the same, and are refused: one is sampled "
            "(validation.top_k is 1 unless it is set)",
        )
        samples = 1
    m.set("eval.samples", samples, VALID + "n_generation")
    longest = m.integer(VALID + "max_response_length")
    if longest:
        m.set(
            "eval.max_new_tokens",
            min(longest, m.options["train.max_sequence_tokens"][0] - 1),
            VALID + "max_response_length",
        )
    key = VALID + "reward_function"
    named = weighed(m, key)
    named.pop("overlong", None)
    if named and not m.flag(P + "use_remote_reward"):
        functions = tuple(function(m, n, key) for n in named)
        if functions != m.options.get("reward.functions", ((), ()))[0]:
            m.set("eval.rewards", functions, key, key + ".*")
        if set(named.values()) != {1.0}:
            m.lacks(key, "weights of an evaluation's rewards: they are reported one by one")
    elif recipe(m) == "distill":
        trained = [n for n in weighed(m, P + "reward_function") if n != "overlong"]
        m.set(
            "eval.rewards",
            tuple(function(m, n, P + "reward_function") for n in trained),
            P + "reward_function",
            P + "reward_function.*",
            key,
        )
    m.facts["evaluation"] = (
        f"every {every} steps, temperature {temperature:g}, top_k {m.options['eval.top_k'][0]}, {samples} completions"
    )


def _held_out(m: Migration):
    """A set of its own, or a part of the training rows (its test_size, or training's)."""
    d = VALID + "dataset."
    place = m.text(d + "local_dir") or m.text(d + "name")
    if place:
        splits = [str(x) for x in m.list(d + "split") if x]
        sets = [f"{place}@{s}" for s in splits] or [place]
        names = splits if len(splits) > 1 else ["validation"]
        entries = tuple(f"{re.sub(r'[^A-Za-z0-9_.-]', '_', n)}={s}" for n, s in zip(names, sets, strict=True))
        m.set("eval.sets", entries, d + "name", d + "local_dir", d + "split")
        for name in ("subset", "revision"):
            if m.text(d + name) != m.text(f"{P}dataset.{name}") and m.given(d + name):
                m.lacks(
                    d + name,
                    f"data.{name} is one for training and evaluation: write the rows of this one to a file, or "
                    "name another set",
                )
        if m[d + "test_size"] is not None:
            m.mark(d + "test_size", "inert", "validation.dataset.name wins")
        return
    key = d + "test_size" if m[d + "test_size"] is not None else P + "dataset.test_size"
    size = m.number(key)
    if size:
        m.set("data.eval_fraction", float(size), key)
    else:
        m.needs(
            "eval.sets: validation.enable is set, and no held-out rows are named (validation.dataset.name, test_size): "
            "the launcher's script may give them"
        )
