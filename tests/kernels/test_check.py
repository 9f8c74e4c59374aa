"""Kernels beside the reference before a run trains on them: broken ones are found, kept in mind, and passed over."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiers import first_cases

from jaxrl.kernels import check, fallback
from jaxrl.kernels.attention.cached import api as cached
from jaxrl.kernels.attention.packed import api as packed
from jaxrl.kernels.experts import api as experts
from jaxrl.kernels.experts import tpu
from jaxrl.kernels.recurrence import api as recurrences
from jaxrl.kernels.recurrence.chunks import PROMPT, ZERO
from jaxrl.run import setup


def unshared(q, k, v, ids, **how):
    """Answers that do not see their prompt."""
    return packed.reference.attention(q, k, v, ids._replace(q_prefixes=None), **how)


def leaking(q, k, v, ids, **how):
    """Sequences that see each other."""
    return packed.reference.attention(q, k, v, ids._replace(q_segments=None, k_segments=None, q_prefixes=None), **how)


def windowless(q, k, v, ids, **how):
    return packed.reference.attention(q, k, v, ids, **(how | {"window": 0}))


def no_gradient_of_values(q, k, v, ids, **how):
    import jax

    return packed.reference.attention(q, k, jax.lax.stop_gradient(v), ids, **how)


def raising(*_, **__):
    raise RuntimeError("illegal memory access")


def refusing(*_, **__):
    raise NotImplementedError("not on this chip")


HEADS = check.Heads(2, 1, 8)


@pytest.fixture
def kernel(monkeypatch):
    """kernel(f): from now on this platform's first choice for rows is f, under the name `made`."""
    def make(function):
        monkeypatch.setitem(packed.IMPLEMENTATIONS, "made", function)
        monkeypatch.setitem(packed.ORDERS, "cpu", ("made", *packed.XLA))

    yield make
    fallback.distrust("attention", ())


@pytest.mark.full
@first_cases(1, "broken", [unshared, raising, *(pytest.param(f, marks=pytest.mark.nightly) for f in (
    leaking, windowless, no_gradient_of_values))], ids=lambda f: f.__name__)
def test_a_broken_kernel_is_found(kernel, broken):
    kernel(broken)
    wrong = check.first_use(jnp.float32, HEADS)
    assert list(wrong) == ["made"]
    assert ("illegal memory access" if broken is raising else "attention in rows wrong: off by") in wrong["made"]


@pytest.mark.full
def test_a_kernel_that_reads_images_causally_is_found_where_a_model_has_them(kernel):
    def causal(q, k, v, ids, **how):
        return packed.reference.attention(q, k, v, ids._replace(q_reach=None), **how)

    kernel(causal)
    assert check.first_use(jnp.float32, HEADS) == {} and list(check.first_use(jnp.float32, HEADS, reach=True)) == ["made"]


@pytest.mark.full
def test_right_ones_and_those_that_refuse_are_not_blamed(kernel):
    assert check.first_use(jnp.float32, HEADS) == {}  # CPUs have no kernels: nothing is computed
    for function in (packed.reference.attention, refusing):
        kernel(function)
        assert check.first_use(jnp.float32, HEADS) == {}


@pytest.mark.full
def test_slots_that_see_what_lies_behind_them_are_found(monkeypatch):
    def late(q, k, v, positions, *rest, **how):
        return cached.reference.attention(q, k, v, positions + 1, *rest, **how)

    monkeypatch.setitem(cached.IMPLEMENTATIONS, "made", late)
    assert check.cached_attention("made", jnp.float32, HEADS).state == "wrong"
    assert check.cached_attention("xla", jnp.float32, HEADS).state == "right"


@pytest.mark.full
def test_verdicts_are_kept_by_what_they_depend_on(kernel, tmp_path, monkeypatch):
    kernel(unshared)
    memory = tmp_path / "there" / "kernels.json"
    wrong = check.first_use(jnp.float32, HEADS, memory=memory)
    monkeypatch.setattr(check, "packed_attention", None)  # would fail where it is asked again
    assert check.first_use(jnp.float32, HEADS, memory=memory) == wrong
    for other in (check.Heads(2, 1, 16), HEADS):
        with pytest.raises(TypeError):
            check.first_use(jnp.float32, other, 30.0, memory=memory)
    for broken in ("{ cut off", memory.read_text().replace("off by", "is by"), "{}"):
        memory.write_text(broken)
        with pytest.raises(TypeError):
            check.first_use(jnp.float32, HEADS, memory=memory)


@pytest.mark.parametrize("state, again", [("failed", True), ("wrong", False), ("right", False), ("refused", False)])
def test_a_kernel_that_failed_is_looked_at_again(kernel, tmp_path, monkeypatch, state, again):
    """Memory that was short once says nothing of the kernel; what was compared, or refused, is known."""
    kernel(unshared)
    looked, memory = [], tmp_path / "kernels.json"

    def look(name, *_):
        looked.append(name)
        return check.Verdict("attention in rows", name, state, text="RESOURCE_EXHAUSTED")

    monkeypatch.setattr(check, "packed_attention", look)
    monkeypatch.setattr(check, "cached_attention", lambda name, *_: check.Verdict("attention to a cache", name, "right"))
    found = [check.first_use(jnp.float32, HEADS, memory=memory) for _ in range(2)]
    assert found == [{"made": f"attention in rows {state}: RESOURCE_EXHAUSTED"} if state in ("failed", "wrong") else {}] * 2
    assert looked == ["made"] * (1 + again)


@pytest.mark.full
def test_a_run_passes_over_what_any_process_found_broken(kernel, tmp_path, monkeypatch, caplog):
    kernel(packed.reference.attention)
    monkeypatch.setattr(setup, "KERNELS", tmp_path / "kernels.json")
    model = SimpleNamespace(num_heads=2, num_kv_heads=1, head_dim=8, attention_softcap=0.0, sinks=False, vision=None, num_experts=0,
                            num_recurrent=0)

    def look(attention, others):
        job = SimpleNamespace(model=SimpleNamespace(config=model), compute_dtype=jnp.dtype(np.float32),
                              config=SimpleNamespace(model=SimpleNamespace(attention=attention)))
        setup.check_kernels(SimpleNamespace(peers=SimpleNamespace(all_gather=lambda what, value: [value, *others])), job)
        return packed.order("auto")

    assert look("auto", []) == ("made", *packed.XLA)
    assert look("auto", [{"made": "attention in rows wrong: off by 2"}]) == packed.XLA
    assert "made does not agree with the reference" in caplog.text
    assert packed.order("made")[0] == "made"  # who asks for it by name gets it
    assert look("made", [{"made": "?"}]) == ("made", *packed.XLA)  # nothing is looked at, and the earlier job's verdict is gone


@pytest.mark.full
def test_experts_have_verdicts_of_their_own(monkeypatch):
    """A kernel of experts that loses what a second block adds to a weight's gradient; attention's of the same name stays."""
    sums = tpu.sums

    def last_block_only(interpret, call, lay, left, right, total):
        return sums(interpret, call, lay, left.at[:call.block].set(0), right, total)

    monkeypatch.setitem(experts.ORDERS, "cpu", ("tpu", "blocks"))
    assert check.first_use_of_experts(jnp.bfloat16, check.Experts(biases=True)) == {}
    monkeypatch.setattr(tpu, "sums", last_block_only)
    tpu._made.cache_clear()
    try:
        wrong = check.first_use_of_experts(jnp.bfloat16, check.Experts())
    finally:
        tpu._made.cache_clear()
    assert list(wrong) == ["tpu"] and "experts wrong: off by" in wrong["tpu"]
    fallback.distrust("experts", wrong)
    assert experts.order("auto") == ("blocks",) and experts.order("tpu")[0] == "tpu" and packed.order("tpu")[0] == "tpu"
    fallback.distrust("experts", ())


@pytest.mark.full
def test_recurrences_have_verdicts_of_their_own(monkeypatch):
    """A kernel whose completions do not begin with their prompt's state."""
    layer = check.Recurrence(1, 8, 8)
    monkeypatch.setitem(recurrences.ORDERS, "cpu", ("tpu", "xla"))
    assert check.first_use_of_recurrence(jnp.bfloat16, layer) == {}

    def unshared(*arrays, delta):
        *arrays, chunks = arrays
        chunks = chunks._replace(start=jnp.where(chunks.start == PROMPT, ZERO, chunks.start))
        return recurrences.xla.recurrence(*arrays, chunks, delta=delta)

    monkeypatch.setitem(recurrences.IMPLEMENTATIONS, "tpu", unshared)
    wrong = check.first_use_of_recurrence(jnp.bfloat16, layer)
    assert list(wrong) == ["tpu"] and "recurrence wrong: off by" in wrong["tpu"]
    fallback.distrust("recurrence", wrong)
    try:
        assert recurrences.order("auto") == ("xla",)
    finally:
        fallback.distrust("recurrence", ())
