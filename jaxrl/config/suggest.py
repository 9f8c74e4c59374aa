"""Messages for names that are no options: the nearest option, the one that a key of another system stands for, and what
there is instead of what jaxrl lacks."""

from __future__ import annotations

import difflib
import re

from jaxrl.config.schema import SCHEMA, free_tables, options

# Names that the tables of jaxrl.migrate do not have -> option here.
ELSEWHERE = {
    "max_tokens": "rollout.max_new_tokens", "loss_type": "algorithm.preset", "model_name": "model.path", "clip_range": "algorithm.clip_low",
    "layers_to_transform": "lora.layers", "max_tool_response_length": "env.max_observation_tokens",
    "tool_config_path": "env.tools", "max_num_steps": "env.max_turns", "cpo_alpha": "preference.rpo_alpha",
    "domain_interleave_probs": "data.sources", "interleave_probs": "data.sources", "mixing_weights": "data.sources",
    "assistant_only_loss": "data.train_turns",
}

# Pattern of one part of a name -> what is not there, and what there is instead.
NOT_YET = (
    (r"qlora(_.*)?|ia3|prefix_tuning|prompt_tuning|adalora|lo?ha|lokr",
     "of adapters there is LoRA, lora.rank, on a base in fp32, bf16 or as lora.base says; model.trainable trains a part of the model"),
    (r"dpo|ipo|kto|orpo|simpo|cpo|preferences|preference_.*|dpo_.*",
     "DPO and its kin are run.recipe=preference with preference.loss=dpo, ipo, kto, orpo ..."),
    (r"online_dpo|nash_md|xpo",
     "online DPO is algorithm.preset=online_dpo, on the best and the worst of a group by a reward; Nash-MD and XPO are not there"),
    (r"ep_size|expert_.*|enable_ep.*",
     "experts are split over mesh.ep, whole ones, and by their width over mesh.tp; their other dimension over mesh.fsdp"),
    (r".+experts?|expert|moe|moe_.*|.*_moe|router_(?!balance$|z$|bias_rate$).*|deepseek.*|gpt_oss|kimi.*",
     "of mixtures of experts there are those of Qwen3-MoE, Qwen2-MoE, OLMoE, Mixtral, GLM-4.5, DeepSeek-V3 (Kimi-K2), gpt-oss, MiniMax-M2, split "
     "over mesh.ep, fsdp and tp"),
    (r"cp_size|context_parallel.*|sp|sp_size|sequence_parallel.*|ulysses.*",
     "rows are split over mesh.cp along their tokens (docs/explanations/sharding.md); between layers over mesh.tp, too"),
    (r"pp|pp_size|pipeline.*|num_stages",
     "there are no pipelines of layers: mesh.fsdp, mesh.ep and mesh.tp split a model as far, and run.mode=plan says what fits and "
     "what it costs (docs/guides/plan.md has layouts with pipelines and what stands for them)"),
    (r"quanti[sz].*|load_in_[48]bit|fp8|int8|int4|nf4|awq|gptq|bnb.*|bitsandbytes",
     "of quantised weights there is the frozen base of adapters, lora.base=int8 or nf4; train.matmul rounds what layers "
     "multiply to int8 or fp8; train.compute_dtype and rollout.dtype choose among bf16, fp16 and fp32"),
    (r"images?|image_(?!column$|marker$|root$|min_pixels$|max_pixels$|decode_limit$|tokens$|features$|cache_gb$).*|vision.*|vlm|multimodal"
     r"|pixel_.*",
     "images are read from the column data.image_column, and sizes set by data.image_min_pixels and data.image_max_pixels "
     "(docs/guides/vision.md)"),
    (r"videos?|audios?", "text and images are supported"),
)


LOSSES = {  # other systems' names of entries of preference.loss
    "sigmoid": "dpo", "cdpo": "dpo with preference.label_smoothing", "exo_pair": "exo", "nca_pair": "nca",
    "bco_pair": "bco", "sppo_hard": "sppo", "sigmoid_norm": "dpo_norm", "sft": "nll", "slic": "hinge",
    "aot_pair": "aot_unpaired", "rpo": "dpo with preference.rpo_alpha"}


def not_yet(name: str) -> str | None:
    """Returns the missing feature and its substitute, if a part of a dotted name means something that
    jaxrl lacks; else None.
    """
    for part in re.split(r"[./]", name.lower().replace("-", "_")):
        for pattern, instead in NOT_YET:
            if re.fullmatch(pattern, part):
                return instead
    return None


def unknown_option(dotted: str) -> str:
    """Returns the message for an option that does not exist: the option that a key of this name in another system
    stands for, what jaxrl lacks, or the nearest names by leaf and by whole path. For a group of options it says so.
    """
    if dotted in SCHEMA:
        return f"{dotted} is a group of options; jaxrl train --help={dotted} lists them"
    rows = _rows(dotted)
    text, whole = f"config has no option {dotted!r}", any(row.whole and row.options for row in rows)
    if not whole and (missing := not_yet(dotted)):
        return f"{text}: {missing}"
    near = suggestions(dotted)
    if not near and (row := next((row for row in rows if row.whole and row.why and row.kind != "inert"), None)):
        return f"{text}; {row.key} of {row.system} has no option of its own here: {row.why}"
    origin = {row.options[0]: f" ({row.key} in {row.system})" for row in reversed(rows) if row.whole and row.options}
    near = " or ".join(option + origin.get(option, "") for option in near)
    return f"{text}; did you mean {near}?" if near else f"{text}; `jaxrl train --help=all` lists every option"


def suggestions(dotted: str) -> list[str]:
    """Returns at most three options for a name that does not exist, the nearest first; [] if none is near."""
    rows, names, leaf = _rows(dotted), list(options()), _leaf(dotted)
    whole, theirs = [row for row in rows if row.whole and row.options], [row.options[0] for row in rows if row.options]

    def distance(name):
        likeness = difflib.SequenceMatcher(None, name, dotted).ratio()
        return likeness < 0.85, theirs.index(name) if name in theirs else len(theirs), -likeness

    near = [ELSEWHERE[leaf]] if leaf in ELSEWHERE else []
    near += [row.options[0] for row in whole] + [option for row in whole for option in row.options]
    near += sorted((n for n in names if _leaf(n) == leaf), key=distance)
    near += [] if whole else theirs
    if not whole and (near or not any(row.whole and row.why for row in rows)):
        near += difflib.get_close_matches(dotted, names, n=3, cutoff=0.6)
        leaves = difflib.get_close_matches(leaf, map(_leaf, names), n=2, cutoff=0.75)
        near += [n for n in names if sorted(_leaf(n)) == sorted(leaf)]  # letters that changed places
        near += [n for n in names if _leaf(n) in leaves]
    return list(dict.fromkeys(near))[:3]


def unknown_flag(name: str, value: str) -> str:
    """Returns the message for an argument of the command line that is no flag. value: the text after the name, "=3"."""
    head, _, option = name.lstrip("-").replace("-", "_").partition(".")
    if not (difflib.get_close_matches(head, ["config"], cutoff=0.8) and head not in SCHEMA):  # --config, nearly
        option = ".".join(filter(None, (head, option)))
    if not option:
        return f"{name}{value}: did you mean --config{value or '=FILE'}?"
    if option in options() or any(option.startswith(f"{table}.") for table in free_tables()):
        return f"{name}{value}: options are given as --config.{option}{value}"
    if near := suggestions(option):
        return f"{name}{value}: did you mean --config.{near[0]}{value or '=VALUE'}?"
    return f"{name}{value}: unknown argument; use --config=FILE and --config.GROUP.OPTION=VALUE"


def unknown_argument(name: str, value, known: list[str]) -> str:
    """Returns the message for a keyword argument that `jaxrl.train` does not have.

    value: the value that was given for it. known: the arguments that there are.
    """
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.7):
        return f"jaxrl.train({name}=...): did you mean {near[0]}=...?"
    if not (near := suggestions(name)):
        return f"jaxrl.train({name}=...): {unknown_option(name)}"
    shown = repr(value) if isinstance(value, bool | int | float | str | tuple) else "..."
    return f'jaxrl.train({name}=...): options are given by name: jaxrl.train({{"{near[0]}": {shown}}})'


def _rows(dotted: str) -> tuple:
    from jaxrl.migrate.counterparts import counterparts  # the tables of seven systems: only when a name is unknown

    return counterparts(dotted)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
