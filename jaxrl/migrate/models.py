"""Models that the sources train and jaxrl does not, known by the names of their checkpoints."""

from __future__ import annotations

import re

from jaxrl.migrate import images
from jaxrl.migrate.table import Migration

_VISION = (
    "is a model of images and text of a family whose tower is not read here; those of Qwen2-VL, Qwen2.5-VL, Qwen3-VL "
    "and Gemma 3 are"
)
# names of checkpoints without their owners, in lower case, and what the model is; none of models/families.py
NOT_TRAINED = (
    (r"(?!qwen(2|2\.5|3)-?vl).*(^|[-_.\d])vl([-_.\d].*|$)", _VISION),
    (r".*(internvl|llava|minicpm-[ov]|openvla|molmo|-omni|smolvlm|idefics|paligemma|kimi-vl|glm-4\.\dv).*", _VISION),
    (r"(gemma-?3n|gemma-?4|llama-3\.2-(11|90)b|llama-4|mistral-small-3\.|kimi-k2\.5).*", _VISION),
    (r"qwen-?3\.8-flash-next.*", "is of the family qwen4_exp, which is not trained here"),
    (
        r"(.*mamba|jamba|bamba|kimi-linear|lfm2|recurrentgemma|olmo-hybrid"
        r"|minimax-(text|m1)).*",
        "has layers that are no attention",
    ),
    (r"phi-?([12]|3\.5-moe|3\.5-vision|3-vision|3-small|4-multimodal).*", "is of another phi family than phi3"),
    (r"deepseek-(v2|coder-v2|v3\.2|v4).*", "is of another deepseek family than deepseek_v3"),
    (
        r"(chatglm|glm-4-9b-chat(-1m)?$|glm-4-9b$|glm-5|baichuan|internlm"
        r"|gpt2|gpt-?j|gpt-neo|pythia|opt-\d|bloom|falcon(?!-h1)|starcoder|command-"
        r"|c4ai|olmo-\d+b|minicpm|stablelm|dbrx|grok|arctic|ernie-4\.5-(21|300)b|hunyuan-(a13b|large)"
        r"|hy\d|exaone|minimax-(?!m2)|kimi-k3|bailing|ling-|ring-|mimo-v2).*",
        "is of a family that is not trained here",
    ),
)


def trained(m: Migration) -> Migration:
    """Refuses a job whose `model.path` names a model of a family that jaxrl does not train (NOT_TRAINED); where the
    source leaves the model to its default, the user is asked for one instead. Returns m.

    A model with a vision tower that jaxrl reads, and a model not refused whose rows have an image column, are left to
    `images.settle` and checked no further; of every other model `images.without` takes out the options of a tower."""
    path, keys = m.options.get("model.path", ("", ()))
    name = str(path).rstrip("/").rsplit("/", 1)[-1].lower()
    what = next((what for pattern, what in NOT_TRAINED if re.fullmatch(pattern, name)), None)
    key = next((k for k in keys if m.given(k)), None)
    if images.has_tower(path) or "data.image_column" in m.options and not what:
        images.settle(m)
        return m
    images.without(m)
    if what and key:
        m.lacks(key, f"{ascii(path)} {what}", refuse=True)
    elif what:
        m.needs(f"model.path={ascii(path)} {what} (it is the default of {m.table.name})")
    return m
