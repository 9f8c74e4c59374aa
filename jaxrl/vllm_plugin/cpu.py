"""What jaxrl's plugin changes in vLLM's build for CPUs, so that weights that arrive later are computed with.

vLLM packs weights of linear layers, convolutions, experts and, with AMX, latents at the first load. Here they stay as
they were loaded, and torch computes experts and gated delta rules from them; torch also rotates what vLLM's kernel
would rotate wrongly.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import typing


def change_vllm() -> None:
    """Replaces, in this process, what packs weights or needs packed ones, and what vLLM's build for CPUs computes
    wrongly or refuses: experts without a gate, sigmoid routers, rotation of latent attention, generators that are set
    back. Stands in for torchvision where it is missing."""
    import torch
    from vllm.model_executor.layers import utils

    def unpacked(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = unpacked
    # modules that have imported the name already
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    for module in (linear, vocab_parallel_embedding):
        if hasattr(module, "dispatch_cpu_unquantized_gemm"):
            module.dispatch_cpu_unquantized_gemm = unpacked
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts, FusedMoEConfig

    CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None  # it packs, at the first load only
    CPUUnquantizedExperts._supports_grouped_gemm = classmethod(lambda cls, config: (True, None))
    FusedMoEConfig.__post_init__ = _without_gates(FusedMoEConfig.__post_init__)
    supports = CPUUnquantizedExperts._supports_activation
    CPUUnquantizedExperts._supports_no_act_and_mul = staticmethod(lambda: True)
    CPUUnquantizedExperts._supports_activation = staticmethod(
        lambda kind: kind.value == "relu2_no_mul" or supports(kind))
    CPUUnquantizedExperts.apply = _experts
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    CPURouter._compute_routing = _in_one_group(CPURouter._compute_routing)
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    RotaryEmbedding.forward_cpu = _rotation(RotaryEmbedding.forward_cpu)
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.get_attn_backend_cls = classmethod(_unpacked_latents(CpuPlatform.get_attn_backend_cls.__func__))
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    kinds = typing.get_type_hints(gdn_attention.cpu_gdn_attention_core)
    _gated_delta_core.__annotations__ = kinds | {"return": None}  # torch makes the operator's signature of them
    gdn_attention.cpu_gdn_attention_core = _gated_delta_core
    _stand_in_for_torchvision()
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    GPUModelRunner._bookkeeping_sync = _rewinding(GPUModelRunner._bookkeeping_sync)


def _rewinding(whole):
    """A step that ends inside a prompt draws a token that is thrown away. vLLM sets the request's generator back by
    an offset, which generators of CPUs do not have: it would end the server. Before a request's first token it begins
    anew here; one that goes on after a publish draws on."""
    def _bookkeeping_sync(self, *args, **kwargs):
        batch = self.input_batch
        for i in self.discard_request_mask.np[:batch.num_reqs].nonzero()[0].tolist():
            generator = batch.generators.get(i)
            if generator is not None and not batch.req_output_token_ids[i]:
                generator.manual_seed(generator.initial_seed())
        generators, batch.generators = batch.generators, {}
        try:
            return whole(self, *args, **kwargs)
        finally:
            batch.generators = generators

    return _bookkeeping_sync


def _stand_in_for_torchvision() -> None:
    """Lets vLLM import Qwen3.5's text model where torchvision is not installed (launch/install_vllm_cpu.sh leaves it
    out): the file's tower imports it. transformers is asked first, and remembers that it is not there."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    from transformers.utils import import_utils

    for known in (import_utils.is_torchvision_available, import_utils.is_torchvision_v2_available):
        known()
    name, within = "torchvision", None
    for leaf in ("transforms", "v2", "functional", None):
        sys.modules[name] = module = types.ModuleType(name)
        if within is not None:
            setattr(within, name.rpartition(".")[2], module)
        name, within = f"{name}.{leaf}", module


def _unpacked_latents(choose):
    """Latent attention by the backend that computes with the weights as they are: the one that vLLM takes on CPUs with
    AMX packs them at the first load, and only in 16 bits."""
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, *args, **kwargs):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        wanted = AttentionBackendEnum.CPU_MLA if attn_selector_config.use_mla else selected_backend
        return choose(cls, wanted, attn_selector_config, *args, **kwargs)

    return get_attn_backend_cls


def _without_gates(check):
    """vLLM refuses experts without a gate (Nemotron's) on CPUs, whose kernel lacks them; `_experts` computes them."""
    def __post_init__(self):
        kind, told = type(self), type(self).is_act_and_mul
        kind.is_act_and_mul = True
        try:
            check(self)
        finally:
            kind.is_act_and_mul = told

    return __post_init__


def _in_one_group(choose):
    """vLLM's router for CPUs takes sigmoid scores in groups alone; all experts are one group (MiniMax-M2)."""
    def _compute_routing(self, *args, **kwargs):
        if self.scoring_func == "sigmoid" and not self.use_grouped_topk:
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1
        return choose(self, *args, **kwargs)

    return _compute_routing


def _rotation(whole):
    """vLLM's kernel for CPUs takes the heads of a token to be one axis, the last. Of latent attention a part of each
    head is rotated, and heads are an axis of their own: torch rotates that."""
    def forward_cpu(self, positions, query, key=None):
        parts = any(x is not None and x.dim() > 2 for x in (query, key))
        return self.forward_native(positions, query, key) if parts else whole(self, positions, query, key)

    return forward_cpu


def _experts(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts,
                 expert_map, a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta,
                 apply_router_weight_on_input):
    """vLLM's CPUUnquantizedExperts.apply on weights as they were loaded: an expert at a time, added up in fp32."""
    import torch
    from torch.nn import functional

    activations = {"silu": functional.silu, "gelu": functional.gelu,
                   "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh")}

    def gated(inner):
        if activation.value == "swigluoai":  # gpt-oss's
            gate, up = inner[:, ::2].clamp(max=7.0), inner[:, 1::2].clamp(-7.0, 7.0)
            return gate * torch.sigmoid(1.702 * gate) * (up + 1)
        if activation.value == "relu2_no_mul":  # Nemotron's, without a gate
            return functional.relu(inner).square()
        gate, up = inner.chunk(2, dim=-1)
        return activations[activation.value](gate) * up

    total = torch.zeros(output.shape, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        own = expert if expert_map is None else int(expert_map[expert])
        if own < 0:  # another worker's
            continue
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        inner = functional.linear(hidden_states[token], w1[own], None if self.w1_bias is None else self.w1_bias[own])
        out = functional.linear(gated(inner), w2[own], None if self.w2_bias is None else self.w2_bias[own]).float()
        weight = 1.0 if apply_router_weight_on_input else topk_weights[token, slot, None].float()
        total.index_add_(0, token, out * weight)
    output.copy_(total)


def _gated_delta_core(mixed_qkv, b, a, core_attn_out, layer_name) -> None:
    """Computes vLLM's cpu_gdn_attention_core in torch: convolution and gated delta rule of a batch, in fp32, from the
    weights as they were loaded. Decoding sequences come first, a token each, then those with a piece of a prompt."""
    import torch
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # a run that only measures memory
        return
    batch = context.attn_metadata[layer.prefix]
    if batch.num_actual_tokens == 0:
        return
    if batch.spec_sequence_masks is not None:
        raise RuntimeError("jaxrl: no speculative decoding of models with recurrent layers on the CPU")
    windows, states = layer.kv_cache[:2]  # [slots, channels, taps - 1], [slots, value heads, value size, key size]
    windows = windows if is_conv_state_dim_first() else windows.transpose(1, 2)
    starts = batch.non_spec_query_start_loc.tolist()
    slots = batch.non_spec_state_indices_tensor.long()
    decoding, count = batch.num_decodes, batch.num_decodes + batch.num_prefills
    groups = [(0, decoding, True)] if decoding else []
    groups += [(i, i + 1, bool(batch.has_initial_state[i])) for i in range(decoding, count)]
    for first, last, goes_on in groups:
        own, (start, stop) = slots[first:last], (starts[first], starts[last])
        qkv, write, decay = (x[start:stop].unflatten(0, (last - first, -1)) for x in (mixed_qkv, b, a))
        window, state = windows[own], states[own].float()
        if not goes_on:
            window, state = torch.zeros_like(window), torch.zeros_like(state)
        out, window, state = _gated_delta(layer, qkv, write, decay, window, state)
        windows[own], states[own] = window.to(windows.dtype), state.to(states.dtype)
        core_attn_out[start:stop] = out.flatten(0, 1).to(core_attn_out.dtype)


def _gated_delta(layer, mixed, b, a, window, state):
    """Returns (out [n, tokens, value heads, value size], window, state) of n sequences; window, state: before them."""
    import torch
    from torch.nn import functional

    wide = torch.cat([window.to(mixed.dtype), mixed.transpose(1, 2)], dim=-1)
    taps = layer.conv1d.weight.reshape(wide.shape[1], 1, -1)
    out = functional.conv1d(wide.float(), taps.float(), groups=len(taps)).to(mixed.dtype)
    sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
    q, k, v = functional.silu(out).transpose(1, 2).float().split([n // layer.tp_size for n in sizes], dim=-1)
    q, k = (x.unflatten(-1, (-1, layer.head_k_dim)) for x in (q, k))
    v = v.unflatten(-1, (-1, layer.head_v_dim))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q * layer.head_k_dim ** -0.5, k))
    decay = torch.exp(-layer.A_log.float().exp() * functional.softplus(a.float() + layer.dt_bias.float()))
    beta, outs = torch.sigmoid(b.float()), []
    for t in range(mixed.shape[1]):
        state = state * decay[:, t, :, None, None]
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("nhvk,nhk->nhv", state, k[:, t]))
        state = state + change[..., None] * k[:, t, :, None, :]
        outs.append(torch.einsum("nhvk,nhk->nhv", state, q[:, t]))
    return torch.stack(outs, dim=1), wide[..., mixed.shape[1]:], state
