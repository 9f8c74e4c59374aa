"""What ROLL's domains and their rewards mean: sources of rows, a file of rewards, a judge. See systems/roll.py."""

from __future__ import annotations

import re
from collections.abc import Callable

from jaxrl.migrate import common
from jaxrl.migrate.systems.images_meaning import sees
from jaxrl.migrate.systems.roll_layout import CONFIG, DATA, INFER, SAMPLE, TRAIN, devices, devices_of
from jaxrl.migrate.table import Migration

REWARDS = '''"""ROLL's rewards by domain: the domain is a row's column `domain`, else that of its column `tag`.

A domain without a rule here stops the run: write its reward.
"""

from jaxrl.rewards.builtin import math_reward
from jaxrl.rewards.published import crossthinkqa_reward, ifeval_reward, repetition_reward

DOMAINS = {tags}
MATH = {math}
IFEVAL = {ifeval}  # with ROLL's penalty of repeated 3-grams
CHOICES = {choices}  # domain -> reward_type; the penalty, too
JUDGED = {judged}  # by reward.judge, in training
WORKERS = {workers}


def score(prompt, completion, answer=None, domain=None, tag=None, data_source=None, token_ids=(), **columns):
    tag = tag or data_source
    name = domain or DOMAINS.get(tag, "math_rule")
    if name in MATH:
        return math_reward(prompt, completion, answer)
    if name in IFEVAL:
        return ifeval_reward(prompt, completion, answer) + repetition_reward(prompt, completion, token_ids, 3, -0.5)
    if name in CHOICES:
        right = crossthinkqa_reward(prompt, completion, answer, CHOICES[name])
        return right + repetition_reward(prompt, completion, token_ids, 3, -0.5)
    if name in JUDGED:
        return None
    if name not in WORKERS:
        raise RuntimeError(f"{{name}} (the row's tag: {{tag}}) is no domain of `rewards`: {{', '.join(WORKERS)}}")
    raise RuntimeError(f"{{name}}: this reward has to be written; in ROLL it was {{WORKERS[name]}}")
'''
KINDS = {  # end of a worker's class -> what judges its rows here
    "MathRuleRewardWorker": "math",
    "GeneralRuleRewardWorker": "ifeval",
    "CrossThinkQARuleRewardWorker": "choices",
    "LLMJudgeRewardWorker": "judge",
}
OWN = (
    "worker_cls",
    "tag_included",
    "reward_type",
    "query_filter_config",
    "response_length_penalty_coef",
    "format_pattern",
)
DTYPE, GPUS = "model_args.dtype", "num_gpus_per_worker"
# ROLL's defaults
DRAWN = {"temperature": 0.95, "top_p": 0.7, "top_k": 50, "repetition_penalty": 1.0, "do_sample": True}
SHARES = TRAIN + DATA + "domain_interleave_probs.*"
JUDGE_PROMPT = """Compare the final answer of a solution with the reference answer.

Question:
{prompt}

Solution:
{completion}

Reference answer:
{answer}

Reply with YES if they are the same, else, or if the solution is incomplete, with NO. Reply with this word alone.
"""


def reward(m: Migration):
    """Sets data.answer_column, reward.functions, and data.sources of domains by domain_interleave_probs.

    Without workers, whose names are then asked for, or if all domains are of math, the function is `math`. Otherwise it
    is a file with the rule of each domain, and errors in place of rewards that the user is asked to write. LLM judges
    become reward.judge, or reward.judges if their settings differ, and eval.rewards is then the file alone. Shares of
    domains without tags, or without files, are asked for.
    """
    workers = {s.key.split(".")[1]: str(s.value) for s in m.all("rewards.*.worker_cls")}
    tags = {str(t): s.key.split(".")[1] for s in m.all("rewards.*.tag_included") for t in (s.value or [])}
    kinds = {domain: KINDS.get(worker.rpartition(".")[2], "") for domain, worker in workers.items()}
    seen = sees(m)  # whose rows are told by another column, and have their answers in a table
    m.set("data.answer_column", "reward_model.ground_truth" if seen else "ground_truth", "rewards.*.worker_cls")
    if not workers:
        m.set("reward.functions", ("math",), "rewards.*.worker_cls")
        m.needs("rewards names no worker: reward.functions=math stands for it; name your own")
        return
    if "math" in kinds.values():
        m.differs("math is judged by math-verify as in ROLL; what it parses is jaxrl's choice (docs/guides/rewards.md)")
    judges: dict[str, str] = {}
    if set(kinds.values()) == {"math"}:
        m.set("reward.functions", ("math",), "rewards.*.worker_cls")
    else:
        judges = _file(m, workers, tags, kinds)
    _sources(m, tags, judges, len(workers), "data_source" if seen else "tag")


def _file(m: Migration, workers: dict, tags: dict, kinds: dict) -> dict[str, str]:
    """Writes the file of rewards by domain; judges are rewards beside it. Returns domain -> its judge's reward."""
    of = {
        kind: tuple(sorted(d for d, k in kinds.items() if k == kind))
        for kind in ("math", "ifeval", "choices", "judge", "")
    }
    types = {s.key.split(".")[1]: str(s.value) for s in m.all("rewards.*.reward_type") if s.value}
    text = REWARDS.format(
        tags=_table(tags),
        math=repr(of["math"]),
        ifeval=repr(of["ifeval"]),
        choices=_table({d: types.get(d, "soft") for d in of["choices"]}),
        judged=repr(of["judge"]),
        workers=_table(workers),
    )
    file = common.reward_file(m, text, "rewards.*.worker_cls", "rewards.*.reward_type")
    judges = _judges(m, of["judge"])
    functions = (f"./{file}:score", *dict.fromkeys(judges.values()))
    m.options["reward.functions"] = (functions, m.options["reward.functions"][1])
    m.set("reward.functions", functions, "rewards.*.tag_included")
    if of[""]:
        m.needs(f"{file}: write the rewards of {', '.join(of[''])}; until then a row of theirs stops the run")
    if of["ifeval"]:
        m.differs("ifeval: verify_keyword_frequency counts the word of the row, ROLL's all words of the completion")
    if judges:
        m.set("eval.rewards", (f"./{file}:score",), "rewards.*.worker_cls")
    return judges


class Judge:
    """Holds what the source says of one LLM judge, and where its options are written.

    Attributes:
      place: reward.judge or reward.judges.NAME. at: the domain's table, with a dot. found: its keys there -> values.
      taken: devices of the judges before it; its own are added. set: sets (option, value, *keys), of an option of the
      judge. file: name of its prompt's file.
    """

    def __init__(self, m: Migration, domain: str, place: str, taken: set[int], set_: Callable):
        self.place, self.taken, self.set = place, taken, set_
        self.at, self.found = f"rewards.{domain}.", _settings(m, domain)
        self.file = f"{m.name}_{place.rpartition('.')[2]}.txt"


def _settings(m: Migration, domain: str) -> dict:
    """Returns a domain's keys, without its table, -> values."""
    at = f"rewards.{domain}."
    return {s.key.removeprefix(at): s.value for s in m.singles.values() if s.key.startswith(at)}


def _judges(m: Migration, domains: tuple[str, ...]) -> dict[str, str]:
    """Writes the judges of domains: reward.judge where all are set alike, else one of reward.judges each. Returns
    domain -> name of its reward."""
    own = [{k: v for k, v in _settings(m, domain).items() if not k.startswith(OWN)} for domain in domains]
    if all(settings == own[0] for settings in own):
        for domain in domains:
            _judge(m, Judge(m, domain, "reward.judge", set(), lambda o, v, *keys: m.set(f"reward.judge.{o}", v, *keys)))
        return dict.fromkeys(domains, "judge")
    names: dict[str, str] = {}
    taken: set[int] = set()
    for domain in domains:
        name = "judge_" + re.sub(r"\W", "_", domain, flags=re.ASCII)
        while name in names.values():
            name += "_"
        names[domain] = name
        options, because = {}, [f"rewards.{domain}.worker_cls"]

        def collect(option, value, *keys, options=options, because=because):
            options[option] = value
            because.extend(keys)

        judge = Judge(m, domain, f"reward.judges.{name}", taken, collect)
        because.extend(judge.at + key for key in judge.found if key.startswith("judge_"))
        _judge(m, judge)
        m.set(judge.place, options, *(key for key in because if "*" not in key))
    m.differs(f"judges of settings of their own are rewards of their own: {', '.join(names.values())} (reward.judges)")
    return names


def _judge(m: Migration, judge: Judge):
    """A judge that says YES or NO; a server of the run's own, or an endpoint."""
    at, found, keys = judge.at, judge.found, "rewards.*.judge_*"
    judge.set("pattern", r"(?i)\b(yes|no)\b", keys)
    judge.set("words", {"yes": 1, "no": 0}, keys)
    judge.set("highest", 1.0, keys)
    m.files[judge.file] = JUDGE_PROMPT
    judge.set("prompt_file", f"./{judge.file}", keys)
    if found.get("judge_model_type", "api") == "api":
        judge.set("servers", (str(found.get("judge_api_url") or "http://127.0.0.1:8000/v1"),), keys)
        judge.set("model", str(found.get("judge_model_name") or ""), keys)
        m.needs(f"{judge.place}: judge_api_key is not written into a config: name a variable in its key_env")
        if not found.get("judge_api_url"):
            m.needs(f"{judge.place}.servers: judge_api_url is not set")
        for name in found:
            if "judge_" not in name and not name.startswith(OWN):
                m.mark(at + name, "inert", "the judge is asked over the network: its server's options are its own")
        m.differs("a judge is asked greedily; ROLL leaves its sampling to the server (reward.judge.extra)")
    else:
        _served(m, judge)
    if found.get("judge_prompt"):
        m.needs(
            f"{judge.file}: its text is jaxrl's; ROLL's is prompt_maps[{str(found['judge_prompt'])!r}] of "
            "roll/utils/prompt.py"
        )
    else:
        m.differs("without judge_prompt ROLL asks a judge for a number, and counts a YES; here it asks for YES or NO")
    m.differs(
        "a judge's last YES or NO counts, in ROLL a YES anywhere in its text; one that says neither has no score, in "
        "ROLL 0"
    )


def _served(m: Migration, judge: Judge):
    """The server of a judge that is a model: its sampling, engine and devices."""
    at, found = judge.at, judge.found
    for name in found:
        if "judge_" not in name and not name.startswith(OWN):
            m.mark(at + name, "automatic", "nothing to set for a judge's server (reward.judge)")

    def carry(option: str, value, *names: str):
        judge.set(option, value, *(at + n for n in names))
        for name in names:
            m.mark(at + name, "equivalent", "")

    name, most = "model_args.model_name_or_path", SAMPLE + "max_new_tokens"
    carry("model", str(found.get(name) or ""), name if name in found else "judge_model_type")
    if isinstance(found.get(most), int):
        carry("max_new_tokens", found[most], most)
    given = [n for n in DRAWN if SAMPLE + n in found]
    if any(n.startswith(SAMPLE) for n in found):  # what is not set has ROLL's default
        of = {n: default if found.get(SAMPLE + n) is None else found[SAMPLE + n] for n, default in DRAWN.items()}
        greedy = str(of["do_sample"]).lower() == "false"
        extra = {"temperature": 0.0 if greedy else of["temperature"], "top_p": of["top_p"], "top_k": of["top_k"]}
        extra |= {} if of["repetition_penalty"] == 1 else {"repetition_penalty": of["repetition_penalty"]}
        carry("extra", extra, *(SAMPLE + n for n in given))
    _judge_engine(m, judge, carry)


def _judge_engine(m: Migration, judge: Judge, carry: Callable):
    """The engine and the devices of a judge's server."""
    at, found = judge.at, judge.found
    engine = str(found.get("strategy_args.strategy_name") or "")
    passed = ("automatic", "as servers are started") if engine == "vllm" else ("inert", "an option of another engine")
    args, names = {}, []
    for name in (n for n in found if n.startswith(CONFIG)):
        option, value = name.removeprefix(CONFIG), found[name]
        if engine != "vllm" or value is None or option in ("load_format", "sleep_level"):
            m.mark(at + name, *passed)
        else:
            args[option] = value
            names.append(name)
    if engine not in ("vllm", ""):
        m.differs(f"the judge's model is served by vLLM here, by {engine} there")
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(str(found.get(DTYPE)))
    args, names = (args | {"dtype": dtype}, [*names, DTYPE]) if dtype else (args, names)
    each = found.get(GPUS, 1) if isinstance(found.get(GPUS, 1), int) else 1
    if each > 1 and "tensor_parallel_size" not in args:
        args, names = args | {"tensor_parallel_size": each}, [*names, GPUS]
    own = devices_of(m, at + "device_mapping") if found.get("device_mapping") else []
    wide = args.get("tensor_parallel_size")
    engines = len(own) // wide if isinstance(wide, int) and wide > 1 else len(own)
    if engines > 1:
        args, names = args | {"data_parallel_size": engines}, [*names, "device_mapping"]
    if args:
        carry("server_args", args, *names)
    others = judge.taken | {d for role in (TRAIN, INFER) for d in devices(m, role)}
    judge.taken |= set(own)
    if own and others and not others & set(own) and max({*own, *others}) < m.integer("num_gpus_per_node"):
        carry("devices", ",".join(map(str, own)), "device_mapping")
        return
    m.needs(
        f"{judge.place}.devices: GPUs of the judge's server, beside those of training"
        + (f" ({at}device_mapping: {', '.join(map(str, own))})" if own else "")
    )
    if own:
        m.mark(at + "device_mapping", "ask", 'said under "Needs you"')


def _sources(m: Migration, tags: dict, judges: dict[str, str], domains: int, column: str):
    """Shares of domains as weights of sources, each with the rows of its tags. domains: those that have a reward; rows
    of the ones without a share are left out."""
    shares = {s.key.rsplit(".", 1)[1]: s.value for s in m.all(SHARES)}
    if not shares or len(shares) == domains == 1:
        return
    files = tuple(str(f) for f in m.list(TRAIN + DATA + "file_name"))
    functions = m.options["reward.functions"][0]
    untagged = [domain for domain in shares if domain not in tags.values()]
    if not files or untagged:
        said = ", ".join(f"{name} {value}" for name, value in shares.items())
        what = f"no tags (rewards.*.tag_included) name the rows of {', '.join(untagged)}; give each domain a file and"
        if not untagged:
            what = f"the source names no files ({TRAIN + DATA}file_name): give the rows of each domain a file, and"
        m.needs(
            f"domain_interleave_probs ({said}): {what} name it in data.sources with this weight"
            + f", and its reward in `rewards` (until then a row is scored by {' and '.join(functions)})"
            * (len(functions) > 1)
        )
        return
    m.options.pop("data.path", None)
    prompts = m.integer("rollout_batch_size")
    each = [int(float(share) * prompts) for share in shares.values()][:-1]  # as its pipeline rounds
    each.append(prompts - sum(each))
    weights = [n / prompts for n in each] if min(each) > 0 else [float(share) for share in shares.values()]
    for (domain, share), weight in zip(shares.items(), weights, strict=True):
        weight = float(share) if abs(weight - float(share)) < 1e-9 else weight
        table = {"path": files, "weight": weight, "where": {column: [t for t, d in tags.items() if d == domain]}}
        if len(functions) > 1:
            table["rewards"] = [judges.get(domain, "score")]
        keys = (SHARES[:-1] + domain, TRAIN + DATA + "file_name", "rewards.*.tag_included", "rollout_batch_size")
        m.set(f"data.sources.{domain}", table, *keys)
    counts = f" ({', '.join(map(str, each))} of {prompts} prompts)"
    m.facts["domains"] = ", ".join(f"{domain} {share}" for domain, share in shares.items()) + counts
    m.differs(
        f"a domain's share of a step is drawn by its weight; in ROLL it is fixed. Rows are told by their `{column}`; "
        "where yours have a column `domain`, which wins there, change `where` of data.sources"
    )


def _table(pairs: dict) -> str:
    return "{" + ", ".join(f"{ascii(k)}: {ascii(v)}" for k, v in pairs.items()) + "}"
