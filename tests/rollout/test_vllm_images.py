"""Images through vLLM: finished items, weights of towers, the probe with pictures. The parts marked `vllm` take a real server."""

import base64
import dataclasses
import functools
import json
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from helpers import vision_cases
from helpers.rollout_helpers import config, random_params
from helpers.tiers import first_cases
from helpers.vllm_cases import own_servers
from safetensors.numpy import load_file

from jaxrl import models, vllm_plugin
from jaxrl.data.images.decode import picture_of
from jaxrl.data.images.read import Image
from jaxrl.data.images.resize import RULES
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.models.families import FAMILIES, IMAGES
from jaxrl.models.io import hf
from jaxrl.rollout import Request, SamplingParams, generate, weights
from jaxrl.rollout.engines import check_tower_served
from jaxrl.rollout.vllm import adapter, items, servers
from jaxrl.rollout.vllm.publish import Publisher, WeightMismatch, sequence_logprobs
from jaxrl.types import Pictures

TIMEOUT, END, PAD, VOCAB = 300.0, 1, 5, 64
TEXT = dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=48,
            max_position_embeddings=128, tie_word_embeddings=False, rms_norm_eps=1e-6)  # heads of 32, the least of vLLM's for CPUs
TOWER = dict(depth=3, hidden_size=48, num_heads=2, patch_size=4, spatial_merge_size=2)
ROPE = dict(rope_type="default", rope_theta=5000.0, mrope_section=[6, 5, 5])
QWEN3 = dict(head_dim=32, rope_parameters=dict(**ROPE, mrope_interleaved=True))
TOWER3 = dict(**TOWER, intermediate_size=40, out_hidden_size=64, num_position_embeddings=25, deepstack_visual_indexes=[0, 2])
KINDS = {  # model_type -> text_config, vision_config
    "qwen3_vl": (QWEN3, TOWER3),
    "qwen2_5_vl": (dict(rope_parameters=ROPE), dict(**TOWER, intermediate_size=40, out_hidden_size=64, window_size=16, fullatt_block_indexes=[1])),
    "qwen3_vl_moe": (dict(**QWEN3, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24), TOWER3),
    "qwen2_vl": (dict(rope_parameters=ROPE), dict(**{k: v for k, v in TOWER.items() if k != "hidden_size"}, embed_dim=48, hidden_size=64,
                                                  mlp_ratio=1)),
}
GRIDS = ((4, 6), (2, 2), (8, 2))


def described(kind):
    text, tower = KINDS[kind]
    given = dict(model_type=kind, image_token_id=PAD, video_token_id=6, vision_start_token_id=7, vision_end_token_id=8, tie_word_embeddings=False,
                 text_config={**TEXT, **text}, vision_config=tower)
    out = hf.load_config("", overrides=given, images=True)
    return {**out, IMAGES: {**out[IMAGES], "mean": (0.4, 0.5, 0.6), "std": (0.3, 0.5, 0.4)}}


@functools.cache
def built(kind, scan=False):
    return models.build(described(kind), compute_dtype=jnp.float32, scan_layers=scan)


def moved(tree, factor=1.5):
    """Other parameters of the tower."""
    return {**tree, "vision": jax.tree.map(lambda x: x * factor, tree["vision"])}


def patches(numbers):
    return [np.random.default_rng([7, n]).integers(0, 256, (np.prod(GRIDS[n % 3]), 48), np.uint8) for n in numbers.tolist()]


def request(name, seed, numbers, window, **sampling):
    """A prompt with these pictures between text."""
    rng, ids, firsts = np.random.default_rng(seed), [3], []
    for n in numbers:
        firsts.append(len(ids))
        ids += [PAD] * (int(np.prod(GRIDS[n % 3])) // 4) + rng.integers(9, VOCAB, 2).tolist()
    own = Pictures(np.zeros(len(numbers), int), np.array(firsts), np.array([GRIDS[n % 3] for n in numbers]), np.array(numbers), 2, 48, patches,
                   window) if numbers else None
    return Request(name, np.array([*ids, 9], np.int32), SamplingParams(**{"max_new_tokens": 12, **sampling}), seed, pictures=own)


def asked(model, rounds=2, **sampling):
    """Groups of two completions: without images, with one, three, and the same words with another picture."""
    numbers = ([], [0], [1, 2, 3], [3])
    return [dataclasses.replace(request(f"{g}/{k}", g if g < 3 else 1, own, model.config.vision.window, **sampling), group=g, seed=10 * g + k)
            for g, own in enumerate(numbers) for k in range(rounds)]


def gaps(model, params, q, r):
    """|log-prob of the trainer - of the server| of a completion's tokens."""
    ours = sequence_logprobs(model, params, np.concatenate([q.prompt, r.tokens]).astype(np.int32), q.pictures)
    return np.abs(np.asarray(ours)[len(q.prompt) - 1:] - r.logprobs)


# ---- a real server --------------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["qwen3_vl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2_5_vl", "qwen3_vl_moe", "qwen2_vl"))])
def test_a_server_computes_the_trainers_log_probs(kind):
    """Of completions behind images, after every publish; what the probe finds where pictures, tower or features are others."""
    model, told = built(kind), described(kind)
    first, second = (random_params(model, seed, 0.15) for seed in (0, 1))
    for tree in (first, second):  # a policy that writes the image token as text
        tree["head"]["kernel"] = tree["head"]["kernel"].at[:, PAD].mul(3.0)
    with own_servers(of=(model, first), hf_config=told, patches=64, eos=(), rollout_verify_weights="always", max_running=3,
                     setup_seconds=500.0, engine_kwargs={"max_num_batched_tokens": 20}) as engine:  # prompts come in pieces
        publisher, replica = engine.publisher, engine.router.replicas[0]
        assert publisher.last_probe < 1e-5 and engine.info.images

        def agree(params, version):
            pairs = list(zip(asked(model), generate(engine, asked(model), TIMEOUT), strict=True))
            apart = [gaps(model, params, q, r) for q, r in pairs]
            assert max(x.mean() for x in apart) < 1e-5 and max(x.max() for x in apart) < 5e-5
            assert all((r.versions == version).all() for _, r in pairs)
            return pairs

        pairs = agree(first, 0)
        assert any(PAD in r.tokens for _, r in pairs)
        one, other = pairs[2], pairs[6]
        assert one[0].prompt.tolist() == other[0].prompt.tolist() and gaps(model, first, one[0], other[1]).mean() > 1e-3
        whole = publisher.last_publish["bytes"]
        for wrong in wrong_pictures(publisher._probe_images):
            with mock.patch.object(publisher, "_params", first), mock.patch.object(engine.router.items, "features", lambda _, f=wrong: f):
                assert publisher.probe(replica, publisher._probe_images) > 0.01

        engine.submit(asked(model, 3, max_new_tokens=24))  # unfinished ones go on with the new tower
        engine.publish(second, 1)
        left = {q.id for q in asked(model, 3)}
        while left:
            left -= {r.id for r in engine.poll(5.0) if r.finish != "abort"}
        agree(second, 1)

        text = {**second, "embed": jax.tree.map(lambda x: x * 1.1, second["embed"])}
        with mock.patch.object(adapter.Control, "reset_encoder_cache", side_effect=AssertionError("the tower did not move")):
            engine.publish(text, 2)  # the same tower
        assert publisher.last_publish["bytes"] < 0.8 * whole
        assert {name for found in engine.fleet.controls[0].digests() for name in found} == set(publisher._digests)
        agree(text, 2)

        with mock.patch.object(adapter.Control, "reset_encoder_cache", lambda control: None):
            with pytest.raises(WeightMismatch, match="keeps the features of .* images that an older tower made"):
                engine.publish(moved(text), 3)
            engine.fleet.controls[0].resume()
            publisher.probe(replica, publisher._probe_images)  # its images are the newest ones there
            with mock.patch("jaxrl.rollout.vllm.publish._forget_features", lambda control: None), \
                    pytest.raises(WeightMismatch, match="features of images are those of older weights"):
                engine.publish(moved(text, 2.0), 4)
        engine.publish(moved(text), 5)
        agree(moved(text), 5)


def wrong_pictures(right):
    """Items that are not those of the probe's pictures, under names of their own."""
    def others(change):
        return items.ItemWriter().features(right._replace(patches=lambda numbers: [change(x) for x in right.patches(numbers)]))

    yield others(lambda x: np.full_like(x, 128))
    yield others(lambda x: np.roll(x, 1, axis=0))                               # patches in another order
    yield others(lambda x: x.reshape(-1, 3, 16)[:, ::-1].reshape(x.shape))      # channels, too
    yield others(lambda x: x.astype(np.float32) / 255)                          # normalised twice
    turned = items.ItemWriter().features(right._replace(grids=right.grids[:, ::-1]))
    yield turned


# ---- without one ----------------------------------------------------------------------------------------------------------


def test_items_hold_what_the_tower_takes():
    """The digest is the picture's; the rest is what vLLM's decoder reads: dtype, shape and bytes of each field."""
    pixels = np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)
    picture = picture_of(Image(pixels=pixels), RULES["qwen3_vl"], 10**6)
    item = items.encode(picture.patches, picture.grid)
    assert item.digest == picture.digest.hex()
    fields = msgpack.unpackb(base64.b64decode(item.data))
    dtype, shape, raw = fields["pixel_values"]["data"]
    assert (dtype, shape, raw.code) == ("uint8", list(picture.patches.shape), 3) and raw.data == picture.patches.tobytes()
    assert fields["pixel_values"]["field"] == ["flat", {"keep_on_cpu": False, "slices": [[0, len(picture.patches), None]], "dim": 0}]
    dtype, shape, raw = fields["image_grid_thw"]["data"]
    assert (dtype, shape) == ("int64", [3]) and np.frombuffer(raw.data, np.int64).tolist() == [1, *picture.grid]
    assert fields["image_grid_thw"]["field"] == ["batched", {"keep_on_cpu": True}]


def test_a_group_encodes_its_images_once():
    writer, q = items.ItemWriter(limit=4_000), request("a", 0, [0, 1, 2], 0)
    found = writer.features(q.pictures)
    assert found == writer.features(q.pictures) and writer.made == 3
    assert found["mm_placeholders"] == {"image": [{"offset": 1, "length": 6}, {"offset": 9, "length": 1}, {"offset": 12, "length": 4}]}
    assert len(set(found["mm_hashes"]["image"])) == 3
    writer.features(request("b", 0, [3, 4, 5], 0).pictures)
    assert writer.made == 6 and writer._bytes == sum(len(item.data) for item in writer._kept.values()) <= 4_000
    writer.features(q.pictures)  # they have left meanwhile
    assert writer.made > 6


@first_cases(1, "scan", [True, False])
@first_cases(1, "kind", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl"])
def test_chunks_are_a_folders_tensors(kind, scan, tmp_path):
    """Under transformers' names of a model with a tower, and without the tower those of the rest."""
    model = built(kind, scan)
    params = random_params(model, 3, 0.1)
    hf.export(model, params, tmp_path / "m", described(kind), "float32")
    want = load_file(tmp_path / "m" / "model.safetensors")
    rest = [name for name in want if not vllm_plugin.is_of_tower(name)]
    assert 10 < len(rest) < len(want) - 10
    for tower, expected in ((True, want), (False, rest)):
        got = {n: a for chunk in weights.chunks(model, params, "float32", 1, tower=tower) for n, a in chunk}
        assert set(got) == set(expected) == set(weights.names(model, tower))
        for name, array in got.items():
            np.testing.assert_array_equal(array, want[name], err_msg=name)


def test_the_servers_folder_names_our_model(tmp_path):
    """It needs no tokenizer and no image processor; of the latter it has the numbers by which pixels are normalised."""
    servers.write_model_folder(tmp_path / "m", described("qwen3_vl_moe"))
    found = json.loads((tmp_path / "m/config.json").read_text())
    assert found["architectures"] == ["JaxrlQwen3VLMoeForConditionalGeneration"] and found["model_type"] == "qwen3_vl_moe"
    assert found["vision_config"] == TOWER3 and found["text_config"]["num_experts"] == 4 and found["text_config"]["norm_topk_prob"] is True
    assert json.loads((tmp_path / "m/preprocessor_config.json").read_text()) == {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.3, 0.5, 0.4]}
    assert not any(key.startswith("jaxrl") for table in (found, found["text_config"]) for key in table)
    command, _ = adapter.launch(config(engine="vllm"), "m", "float32", 64, 1, cpu=True, key="k", image_tokens=20)
    assert "--mm-device-do-normalize" in command and command[command.index("--mm-processor-kwargs") + 1] == '{"image_tokens": 20}'
    assert not any(word.startswith("--mm") for word in adapter.launch(config(engine="vllm"), "m", "float32", 64, 1, cpu=True, key="k")[0])


def test_every_family_with_a_tower_has_a_model_in_the_plugin():
    wanted = {family.architecture for family in FAMILIES.values() if family.vision}
    wanted -= {"Gemma3ForConditionalGeneration"}  # refused for its two-way mask, see rollout.engines
    assert wanted == set(vllm_plugin.ARCHITECTURES)


@pytest.mark.parametrize("name,theirs", [
    ("visual.blocks.0.attn.qkv.weight", "model.visual.blocks.0.attn.qkv.weight"), ("language_model.lm_head.weight", "lm_head.weight"),
    ("language_model.model.layers.1.mlp.down_proj.weight", "model.language_model.layers.1.mlp.down_proj.weight")])
def test_names_are_those_of_the_folder(name, theirs):
    assert vllm_plugin._name_beside_tower(name) == theirs


def test_a_tower_is_sent_where_it_changed_or_a_server_lacks_it():
    publisher, memory = Publisher.__new__(Publisher), SimpleNamespace(state="awake")
    publisher.model = SimpleNamespace(config=SimpleNamespace(vision="a tower"))
    publisher.fleet, publisher.verified, publisher._tower = SimpleNamespace(memories={"u": memory, "v": memory}), set(), b""
    one, other = SimpleNamespace(index=0, url="u"), SimpleNamespace(index=1, url="v")
    tower = {"a": jnp.ones(3), "b": {"c": jnp.zeros(2)}}

    def changed(tree, *replicas):
        publisher._params = {"vision": tree, "embed": jnp.ones(1)}
        return publisher._changed_tower(replicas)[0]

    assert changed(tower, one)
    publisher._tower, publisher.verified = publisher._changed_tower([one])[1], {0}
    assert not changed(jax.tree.map(lambda x: x + 0, tower), one)       # an update returns arrays of its own
    assert changed({**tower, "a": tower["a"].at[1].add(1e-7)}, one)
    assert changed(tower, one, other)                                   # a server that joined
    memory.state = "asleep"                                             # it has dropped its weights
    assert changed(tower, one)
    publisher.model.config.vision = None                                # a model of text
    assert not changed(tower, one)


def test_what_vllm_would_compute_otherwise_is_refused():
    cfg, told, tower = config(engine="vllm"), described("qwen3_vl"), built("qwen3_vl").config.vision
    check_tower_served(cfg, told, tower)
    with pytest.raises(ConfigError, match="model_type=qwen3_vl_text and data without images.*rollout.engine=jax"):
        check_tower_served(cfg, told, None)
    with pytest.raises(ConfigError, match="rope_theta=50: vLLM computes towers with 10000"):
        check_tower_served(cfg, told, dataclasses.replace(tower, theta=50.0))
    check_tower_served(config(), told, None)  # the embedded sampler serves both


@pytest.mark.torch
def test_a_tower_read_both_ways_is_refused(tmp_path):
    """Gemma 3: with images by name; without, vLLM gets the text model by itself."""
    given = vision_cases.config(kind="gemma3")
    told, cfg = hf.load_config("", overrides=given, images=True), config(engine="vllm")
    with pytest.raises(ConfigError, match="images, whose tokens see each other.*rollout.engine=jax"):
        check_tower_served(cfg, told, models.build(told, compute_dtype=jnp.float32, scan_layers=False).config.vision)
    text = hf.load_config("", overrides=given)
    check_tower_served(cfg, text, None)
    servers.write_model_folder(tmp_path / "m", text)
    written = json.loads((tmp_path / "m" / "config.json").read_text())
    assert written["model_type"] == "gemma3_text" and written["architectures"] == ["Gemma3ForCausalLM"] and "vision_config" not in written


def test_an_image_that_cannot_be_read_any_more_stops_the_run():
    from jaxrl.rollout.vllm.router import Router

    def broken(numbers):
        raise RunStopped("row 7: an image that was whole when the data was prepared cannot be used")

    options = SimpleNamespace(max_requests=4, retries=1, health_seconds=60.0)
    router = Router(["http://127.0.0.1:1"], "", options, 5.0, True, (END,), None, int)
    try:
        router.set_state(router.replicas[0], "ready")
        q = request("a", 0, [0], 0)
        router.submit([dataclasses.replace(q, pictures=q.pictures._replace(patches=broken))])
        assert "row 7" in str(router.results.get(timeout=30))
    finally:
        router.close()
