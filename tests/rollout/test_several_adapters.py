"""Several adapters in the embedded sampler: each request is answered by its own, whatever stands beside it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.lora_cases import all_linear, started
from helpers.rollout_helpers import END, HF, config, model, params, prompt, tokenizer

from jaxrl.models import adapters
from jaxrl.models.adapters import adapter_set
from jaxrl.rollout import EngineContext, Request, SamplingParams, generate, make_engine

PARTS = {"first": all_linear(2, rank=3, scale=4.0), "second": all_linear(2, rank=2, scale=6.0, skip=((0, "mlp.up_proj"),))}


def engine_row(own, values):
    c = config(slots=8, compaction=False, prompt_lengths=(20,), cache_lengths=(44,))
    made = make_engine(EngineContext(c, own, tokenizer(), None, (END,), HF))
    made.publish(values, 0)
    return made


def asked(number, *texts, after="", keep=False):
    """A request of each prompt."""
    return [Request(f"{number}/{i}/{len(text)}", text, SamplingParams(max_new_tokens=8, min_new_tokens=4), seed=i, adapter=number,
                    after=f"{number}/{after[i]}" if after else "", keep=keep) for i, text in enumerate(texts)]


@pytest.mark.slow
def test_each_request_is_answered_by_its_own_adapter():
    """The same prompts at the same time, of one adapter and of the other: what each of them says is what an engine says that has it
    alone, in prefill, decoding and conversations that go on in their slots."""
    both = dataclasses.replace(model(), adapter=adapter_set.combine_adapters(PARTS))
    alone = [adapter_set.select_model(both, k) for k in range(2)]
    own = [adapters.joined(params(), {n: x for n, x in _flat(started(one, k)).items() if adapters.is_adapter(n)}) for k, one in enumerate(alone)]
    values = adapters.joined(params(), adapter_set.join_leaves(both, [_flat(tree) for tree in own]))
    prompts = [prompt(i, 5 + 2 * i) for i in range(3)]
    engine, said, more = engine_row(both, values), {}, {}
    first = [request for pair in zip(*(asked(k, *prompts, keep=True) for k in (1, 2)), strict=True) for request in pair]
    for request, result in zip(first, generate(engine, first, 600.0), strict=True):
        said[request.adapter, request.seed] = result
    behind = [Request(f"more {k}/{i}", np.concatenate([prompts[i], said[k, i].tokens, [7, 9]]).astype(np.int32)[:20],
                      SamplingParams(max_new_tokens=4), seed=i, adapter=k, after=f"{k}/{i}/{len(prompts[i])}") for i in range(3) for k in (2, 1)]
    for request, result in zip(behind, generate(engine, behind, 600.0), strict=True):
        more[request.adapter, request.seed] = request, result
    assert engine.counters()["extended_prompts"] > 0
    different = 0
    for k in (1, 2):
        plain = engine_row(alone[k - 1], own[k - 1])
        want = generate(plain, [dataclasses.replace(r, adapter=0) for r in asked(k, *prompts)], 600.0)
        want += generate(plain, [dataclasses.replace(more[k, i][0], adapter=0, after="") for i in range(3)], 600.0)
        for found, result in zip([*(said[k, i] for i in range(3)), *(more[k, i][1] for i in range(3))], want, strict=True):
            np.testing.assert_array_equal(found.tokens, result.tokens)
            np.testing.assert_allclose(found.logprobs, result.logprobs, rtol=0, atol=1e-5)
        plain.close()
    different = [not np.array_equal(said[1, i].tokens, said[2, i].tokens) for i in range(3)]
    assert any(different)
    for wrong in (0, 3):
        with pytest.raises(ValueError, match=f"adapter {wrong} of 2 that this engine serves"):
            engine.submit(asked(wrong, prompts[0]))
    engine.close()


def _flat(tree):
    return {"/".join(p.key for p in path): jnp.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}
