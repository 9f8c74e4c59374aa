"""What decides whether adapters are published apart from their base, and what of them is refused before a run starts."""

import json

import pytest
from helpers import tiny_job, vision_cases

from jaxrl.config.load import put
from jaxrl.errors import ConfigError
from jaxrl.resolve.checks import common
from jaxrl.resolve.spec import Platform, resolve
from jaxrl.run.setup import read_model_inputs


def config(folder, **changes):
    c = tiny_job.get_config(None)
    c.run.dir, c.log.console, c.eval.sets = str(folder), "off", ()
    c.data.prompts_per_step, c.rollout.group_size = 2, 4
    c.train.steps, c.reward.workers, c.lora.rank, c.lora.export = 1, 1, 4, "adapter"
    for name, value in changes.items():
        put(c, name.replace("__", "."), value)
    return c


@pytest.mark.parametrize("changes, said", [
    ({"lora__init": "xavier"}, "lora.init='xavier': choose default, gaussian, orthogonal, pissa"),
    ({"lora__init": "pissa_niter_0"}, "lora.init='pissa_niter_0': choose"),
    ({"lora__init": "orthogonal", "lora__rank_pattern": ("q_proj=3",)}, "lora.init=orthogonal with the odd rank 3"),
    ({"lora__init": "olora", "lora__rslora": True, "lora__alpha_pattern": ("q_proj=3",)}, "PEFT has no plain LoRA for it"),
    ({"lora__rank_pattern": ("q_proj:3",)}, "lora.rank_pattern entry 'q_proj:3': write 'pattern=number'"),
    ({"lora__rank_pattern": ("q_proj=2.5",)}, "lora.rank_pattern entry"),
    ({"lora__targets": ()}, "lora.targets is empty"),
    ({"rollout__engine": "vllm", "lora__publish": "adapter", "lora__modules_to_save": ("lm_head",)}, "serves no modules that were trained whole"),
    ({"rollout__engine": "vllm", "lora__publish": "adapter", "lora__dora": True}, "serves no DoRA"),
    ({"rollout__engine": "vllm", "lora__publish": "adapter", "lora__rank": 513}, "serves adapters up to rank 512; set lora.publish=merged"),
    ({"rollout__engine": "vllm", "lora__publish": "adapter", "lora__rank": 300, "lora__init": "pissa"}, "512 \\(twice that of training"),
    ({"rollout__engine": "vllm", "lora__publish": "adapter", "rollout__partial": True, "rollout__max_staleness": 1},
     "rollout.partial=True: completions"),
])
def test_what_cannot_work_is_refused(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        common.check(config(tmp_path, **changes))


def test_publish_auto_is_by_what_the_engine_can_serve(tmp_path):
    def chosen(platform, **changes):
        return resolve(config(tmp_path, **changes), Platform(*platform)).lora.publish

    gpu, cpu, vllm = ("gpu", "bf16"), ("cpu", "fp32"), {"rollout__engine": "vllm"}
    assert chosen(gpu, **vllm) == "adapter" and chosen(cpu, **vllm) == "merged"
    assert chosen(gpu, rollout__engine="jax") == "adapter" and chosen(cpu, rollout__engine="jax") == "merged"
    for changes in ({"lora__rank": 513}, {"lora__rank_pattern": ("q_proj=600",)}, {"lora__modules_to_save": ("lm_head",)}, {"lora__dora": True},
                    {"rollout__servers": ("http://127.0.0.1:8000",)}, {"rollout__partial": True, "rollout__max_staleness": 1},
                    {"lora__init": "pissa", "lora__rank": 300}):
        assert chosen(gpu, **vllm, **changes) == "merged", changes
    assert chosen(gpu, lora__publish="merged", **vllm) == "merged"


def test_adapters_of_a_model_with_a_tower_go_merged(tmp_path):
    """vLLM leaves out adapters on a tower without a word: none is sent apart from its base, by itself or asked for."""
    (tmp_path / "config.json").write_text(json.dumps(vision_cases.config()))
    c = config(tmp_path / "run", rollout__engine="vllm", lora__publish="adapter", model__path=str(tmp_path))
    c.model.config, c.model.init = {}, "random"
    with pytest.raises(ConfigError, match="lora.publish=adapter with a tower for images.*set lora.publish=merged"):
        read_model_inputs(c)
    c.lora.publish = "auto"
    told = read_model_inputs(c).hf_config
    assert resolve(c, Platform("gpu", "bf16"), told).lora.publish == "merged"
    text = {**told, "model_type": "qwen3"}
    assert resolve(c, Platform("gpu", "bf16"), text).lora.publish == "adapter"
