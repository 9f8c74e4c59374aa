"""vLLM's models with a tower for images, for servers that get finished images: patches, grids and places.

The trainer cuts images into patches (data.images) and sends these, so a server needs neither a tokenizer nor an image
processor, and its own would be another preprocessing. vLLM imports this module where a config.json names one of
ARCHITECTURES (see `register`); the models it has under its own names stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from transformers import BatchFeature
from vllm.inputs import mm_input
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

from jaxrl.vllm_plugin import IMAGE_TOKENS

REFUSED = "jaxrl: this server takes finished images alone (`features` of /inference/v1/generate)"


class Info(BaseProcessingInfo):
    """Tells vLLM how many images, and tokens of one, a prompt may have."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Returns {"image": None}: a prompt may have any number of images. Part of vLLM's interface."""
        return {"image": None}

    @property
    def image_tokens(self) -> int:
        """Most tokens of an image, for which vLLM reserves memory: `image_tokens` of --mm-processor-kwargs, at most
        (and by default) max_model_len - 1."""
        given = self.ctx.get_mm_config().mm_processor_kwargs or {}
        return min(int(given.get(IMAGE_TOKENS, 2**30)), self.ctx.model_config.max_model_len - 1)

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """Returns {"image": the largest number of tokens of an image, `image_tokens`}. Part of vLLM's interface."""
        return {"image": self.image_tokens}


class NoInputs(BaseDummyInputsBuilder[Info]):
    """Makes no inputs: `Finished.get_dummy_mm_inputs` makes those of vLLM's memory profile."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """Returns "": prompts are token ids."""
        return ""

    def get_dummy_mm_data(self, seq_len, mm_counts, mm_options):
        """Returns {}: Finished makes the inputs for vLLM's memory profile."""
        return {}


class Finished(BaseMultiModalProcessor[Info]):
    """Makes the image with which vLLM measures its memory, and refuses to make one of a picture."""

    requires_tokenizer = False

    def get_dummy_mm_inputs(self, mm_counts: Mapping[str, int], *, cache=None, scheduler_config=None):
        """Returns inputs for vLLM's memory profile: max_model_len zeros as a prompt and one image, whatever `mm_counts`
        asks.

        The image is as square as whole rows allow, of nearly `Info.image_tokens` tokens: isqrt(n) rows of n // rows."""
        tower, most = self.info.get_hf_config().vision_config, self.info.image_tokens
        merge, channels = tower.spatial_merge_size, getattr(tower, "in_channels", 3)
        height = math.isqrt(most)
        sides = height * merge, most // height * merge
        count = math.prod(sides)
        data = {"pixel_values": torch.zeros(count, channels * tower.patch_size**2, dtype=torch.uint8),
                "image_grid_thw": torch.tensor([[1, *sides]])}
        fields = {"pixel_values": MultiModalFieldConfig.flat("image", [slice(0, count)]),
                  "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True)}
        items = MultiModalKwargsItems.from_hf_inputs(BatchFeature(data), fields)
        tokens = count // merge**2
        return mm_input(prompt_token_ids=[0] * self.info.ctx.model_config.max_model_len, mm_kwargs=items,
                        mm_hashes={"image": ["jaxrl-profile"]},
                        mm_placeholders={"image": [PlaceholderRange(offset=0, length=tokens)]})

    def apply(self, *args, **kwargs):
        """Raises ValueError: the server takes encoded images only."""
        raise ValueError(REFUSED)

    def _get_mm_fields_config(self, *args):
        raise ValueError(REFUSED)

    def _get_prompt_updates(self, *args):
        raise ValueError(REFUSED)


class TakesPatches:
    """Mixin for vLLM's models with a tower: a still image comes as one frame, which it repeats `temporal_patch_size`
    times, as the tower's first product needs."""

    takes_patches = True  # jaxrl_info tells it

    def __init__(self, *, vllm_config, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        norm = self.visual.input_norm  # dummy weights fill every persistent buffer with noise, its two among them
        for name, buffer in list(norm.named_buffers()):
            norm.register_buffer(name, buffer, persistent=False)

    def _parse_and_validate_image_input(self, **kwargs):
        patches = kwargs.get("pixel_values")
        if patches is not None:
            tower = self.config.vision_config
            by_channel = patches.unflatten(1, (-1, 1, tower.patch_size**2))
            kwargs["pixel_values"] = by_channel.expand(-1, -1, tower.temporal_patch_size, -1).flatten(1)
        return super()._parse_and_validate_image_input(**kwargs)


takes_finished = MULTIMODAL_REGISTRY.register_processor(Finished, info=Info, dummy_inputs=NoInputs)


@takes_finished
class Qwen3VL(TakesPatches, Qwen3VLForConditionalGeneration):
    """vLLM's Qwen3-VL, served with finished images."""


@takes_finished
class Qwen3VLMoe(TakesPatches, Qwen3VLMoeForConditionalGeneration):
    """vLLM's Qwen3-VL with experts, served with finished images."""


@takes_finished
class Qwen2_5_VL(TakesPatches, Qwen2_5_VLForConditionalGeneration):
    """vLLM's Qwen2.5-VL, served with finished images."""


@takes_finished
class Qwen2VL(TakesPatches, Qwen2VLForConditionalGeneration):
    """vLLM's Qwen2-VL, served with finished images."""
