"""GRPO on the embedded task with a small mixture of experts: configs/grpo.py, and 8 experts per layer of which a token has 2.

Command:   jaxrl train --config=configs/grpo_moe.py
Hardware:  any; two CPU cores.
Expected:  15.6 -> 91.3 % held-out accuracy in three minutes, warm start included (seed 0, busy cores).

The warm start trains the router with a balance term (train.router_balance); in RL it is 0, as everywhere by default.

Variants:  sft (the warm start alone), tiny (a few seconds, learns next to nothing; for tests), tiny_sft (its warm start).
"""

from jaxrl.config import load_config
from jaxrl.errors import ConfigError

EXPERTS = dict(model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)


def get_config(arg=None):
    """arg: None, 'sft', 'tiny' or 'tiny_sft'."""
    if arg not in (None, "sft", "tiny", "tiny_sft"):
        raise ConfigError(f"grpo_moe has the variants 'sft', 'tiny' and 'tiny_sft', not {arg!r}")
    tiny = ":tiny" if arg and arg.startswith("tiny") else ""
    if arg and arg.endswith("sft"):
        c = load_config("grpo_sft" + tiny)
        width = c.model.config.intermediate_size // 2  # of two experts together as much as of the dense layer
        c.model.config.update({**EXPERTS, "moe_intermediate_size": width})
        c.train.router_balance = 0.01
    else:
        c = load_config("grpo" + tiny)
        c.run.warm_start = "grpo_moe:tiny_sft" if tiny else "grpo_moe:sft"
    c.run.dir = ""
    return c
