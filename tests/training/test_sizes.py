"""Sizes that a config leaves to jaxrl."""

import pytest
from helpers.tiny_job import MODEL

from jaxrl.config.load import default_config
from jaxrl.resolve.spec import Platform, resolve


def decided(config, kind, hf_config=None):
    return resolve(config, Platform(kind, "fp32"), hf_config)


def config(prompt=64, answer=64, group=8, **train):
    c = default_config()
    c.data.max_prompt_tokens, c.rollout.max_new_tokens, c.rollout.group_size = prompt, answer, group
    for name, value in train.items():
        c.train[name] = value
    return c


@pytest.mark.parametrize("made, row", [
    (config(), 64 + 8 * 64),                                   # a prompt and its whole group
    (config(answer=512), 2048),                                # as much of it as a row may hold
    (config(prompt=1000, answer=3001), 4008),                  # the longest sequence, in whole 8s
    (config(group=1), 128), (config(share_prompts=False), 128),
    (config(tokens_per_microbatch=300), 304),                  # no more than a microbatch that was asked for
    (config(max_sequence_tokens=100), 64 + 8 * 36),
    (config(row_lengths=(256, 1024)), 1024),
])
def test_rows(made, row):
    assert decided(made, "cpu").train.row_lengths[-1] == row
    assert not made.train.row_lengths or row == 1024  # the config itself stays


def test_microbatches_by_platform():
    found = {p: decided(config(), p).train for p in ("cpu", "gpu", "tpu")}
    assert [t.tokens_per_microbatch for t in found.values()] == [2048, 16384, 16384]
    wide = MODEL | {"hidden_size": 512}
    assert [decided(config(), p, wide).train.tokens_per_microbatch for p in found] == [1024, 16384, 16384]
    experts = wide | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    assert decided(config(), "cpu", experts).train.tokens_per_microbatch == 2048
    assert decided(config(), "cpu", wide | {"hidden_size": 508}).train.tokens_per_microbatch == 2048
    assert [found[p].logprob_chunk for p in ("cpu", "gpu", "tpu")] == [512, 1024, 1024]
    assert decided(config(logprob_chunk=77), "cpu").train.logprob_chunk == 77
    assert decided(config(tokens_per_microbatch=777), "cpu").train.tokens_per_microbatch == 777
    assert decided(config(answer=4000), "cpu").train.tokens_per_microbatch == 4064  # one row at least
