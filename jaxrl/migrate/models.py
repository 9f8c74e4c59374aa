"""Models that the sources train and jaxrl does not, known by the names of their checkpoints."""

from __future__ import annotations

import re

from jaxrl.migrate.table import Migration

_VISION = "is a model of images and text; text models alone are trained here"
# names of checkpoints without their owners, in lower case, and what the model is; none of models/families.py
NOT_TRAINED = (
    (r".*(^|[-_.\d])vl([-_.\d].*|$)", _VISION),
    (r".*(internvl|llava|minicpm-[ov]|openvla|molmo|-omni|smolvlm|idefics|paligemma|kimi-vl|glm-4\.\dv).*", _VISION),
    (r"(gemma-3-(4|12|27)b|gemma-?3n|gemma-?4|llama-3\.2-(11|90)b|llama-4|mistral-small-3\.|kimi-k2\.5).*", _VISION),
    (r"qwen-?3\.8-flash-next.*", "is of the family qwen4_exp, which is not trained here"),
    (
        r"(.*mamba|jamba|.*nemotron-(h|3)|falcon-h|bamba|granite-4|kimi-linear|lfm2|recurrentgemma|olmo-hybrid"
        r"|minimax-(text|m1)).*",
        "has layers that are no attention",
    ),
    (r"phi-?([12]|3\.5-moe|3\.5-vision|3-vision|3-small|4-multimodal).*", "is of another phi family than phi3"),
    (r"deepseek-(v2|coder-v2|v3\.2|v4).*", "is of another deepseek family than deepseek_v3"),
    (
        r"(chatglm|glm-4-9b-chat(-1m)?$|glm-4-9b$|glm-5|baichuan|internlm"
        r"|gpt2|gpt-?j|gpt-neo|pythia|opt-\d|bloom|falcon|starcoder|command-"
        r"|c4ai|olmo-\d+b|minicpm|stablelm|dbrx|grok|arctic|ernie-4\.5-(21|300)b|hunyuan-(a13b|large)"
        r"|hy\d|exaone|minimax-(?!m2)|kimi-k3|bailing|ling-|ring-|mimo-v2).*",
        "is of a family that is not trained here",
    ),
)


RECURRENT = r"qwen-?3(\.[5-9]|-next).*"  # checkpoints whose weights vLLM is not given here


def trained(m: Migration) -> Migration:
    """Refuses a job whose `model.path` names a model that jaxrl has no family for; where the source leaves it to its
    default, the model is asked for. Models with recurrent layers are sampled by the embedded engine."""
    path, keys = m.options.get("model.path", ("", ()))
    name = str(path).rstrip("/").rsplit("/", 1)[-1].lower()
    what = next((what for pattern, what in NOT_TRAINED if re.fullmatch(pattern, name)), None)
    key = next((k for k in keys if m.given(k)), None)
    if what and key:
        m.lacks(key, f"{ascii(path)} {what}", refuse=True)
    elif what:
        m.needs(f"model.path={ascii(path)} {what} (it is the default of {m.table.name})")
    elif re.fullmatch(RECURRENT, name):
        _sample_on_the_mesh(m, ascii(path), key or "model.path")
    return m


def _sample_on_the_mesh(m: Migration, path: str, key: str) -> None:
    """Puts rollout.engine=jax in the place of vLLM and its options; refuses a job whose servers have devices of their
    own."""
    engine, keys = m.options.get("rollout.engine", ("", ()))
    if engine != "vllm":
        return
    why = f"{path} has recurrent layers, which rollout.engine=jax alone samples"
    if m.elsewhere or m.options.get("rollout.placement", ("",))[0] == "disaggregated":
        m.lacks(key, f"{why}, on the devices that train: give training and sampling the same devices", refuse=True)
        return
    gone = [option for option in m.options if option.startswith("rollout.vllm.") or option == "rollout.placement"]
    for option in gone:
        keys += m.options.pop(option)[1]
    m.options["rollout.engine"] = "jax", tuple(dict.fromkeys(keys))
    m.differs(f"{why}: completions are sampled there, not by vLLM"
              + (f", and {', '.join(gone)} have no place" if gone else ""))
