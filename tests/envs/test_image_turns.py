"""Images in turns: what the sampler saw is what training scores, whatever form they come in, and what cannot be shown is said."""

import contextlib
import dataclasses
import functools
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import picture_worlds, turn_cases
from helpers.episode_cases import Scripted
from helpers.rollout_helpers import random_params
from helpers.tiers import first_cases

from jaxrl import training
from jaxrl.config import load_config
from jaxrl.data import load_tokenizer
from jaxrl.data.images.expand import GEMMA, QWEN
from jaxrl.data.images.source import BLANK, SHOWN, ImageSource
from jaxrl.data.suffixes import QUESTION
from jaxrl.data.turns import FOLLOWS, TurnRenderer
from jaxrl.envs import pictures
from jaxrl.envs.pictures import result_content
from jaxrl.envs.pool import EpisodePool
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.models import build
from jaxrl.models.io import hf
from jaxrl.resolve.spec import resolve
from jaxrl.rl.trajectories import collect, results_from_bytes, results_to_bytes
from jaxrl.rollout import EngineContext, Key, Request, SamplingParams, generate, make_engine
from jaxrl.rollout.episodes import EpisodeEngine
from jaxrl.training.layout import RowShapes, make_layout
from jaxrl.types import Places

WORLDS = Path(picture_worlds.__file__).resolve()
TOKENS, LONGEST, END = 48, 192, 2
TURNS = 240  # of the fuzz that runs every day
USER = {"role": "user", "content": [{"type": "text", "text": "red"}, {"type": "image"}, {"type": "text", "text": "blue"}]}
REPLY = {"role": "tool", "name": "camera", "tool_call_id": "aaaaaaaaa", "content": [{"type": "text", "text": "1"}, {"type": "image"}]}


VARIANTS = {"qwen3_vl": "tiny", "qwen2_5_vl": "qwen2_5_tiny", "gemma3": "gemma3_tiny"}


def config(function, kind="qwen3_vl", **env):
    c = load_config(f"vision_sft:{VARIANTS[kind]}")
    c.run.recipe, c.reward.functions = "rl", ()
    if kind != "gemma3":
        c.data.image_min_pixels, c.data.image_max_pixels = 8 * 8, 24 * 24
    c.data.max_prompt_tokens, c.rollout.max_new_tokens, c.rollout.slots, c.rollout.prompt_lengths = 64, 6, 8, ()
    c.train.max_sequence_tokens, c.rollout.compaction, c.eval.sets, c.eval.controls = LONGEST, False, (), ()
    c.env.function, c.env.workers, c.env.max_turns, c.env.image_tokens = f"{WORLDS}:{function}" * bool(function), 1, 4, TOKENS
    for name, value in env.items():
        c.env[name] = value
    return c


@functools.cache
def model(kind="qwen3_vl"):
    given = load_config(f"vision_sft:{VARIANTS[kind]}").model.config.to_dict()
    return build(hf.load_config("", overrides=given, images=True), compute_dtype=jnp.float32, scan_layers=False)


@functools.cache
def weights(kind="qwen3_vl"):
    return random_params(model(kind), 0, 0.15)


@functools.cache
def tokenizer(kind="qwen3_vl"):
    return load_tokenizer(config("", kind))


@contextlib.contextmanager
def playing(function, keep=True, kind="qwen3_vl", images=True, says=None, speaks=None, **env):
    """(EpisodeEngine, ImageSource) of random weights, or of an engine that says these texts; speaks: another tokenizer."""
    given, speaks = config(function, kind, **env), speaks or tokenizer(kind)
    c = resolve(given)
    around = given.model.config.to_dict()
    of_tower = {**around["vision_config"], "mm_tokens_per_image": 9} if kind == "gemma3" else around["vision_config"]
    source = ImageSource(c, kind, speaks, None, of_tower)
    source.window, source.two_way = model(kind).config.vision.window, model(kind).config.vision.two_way
    pool = EpisodePool(c.env, c.user)
    try:
        pool.ready()
        renderer = TurnRenderer(c, speaks, pool.tools, images=source.tokens if images else None)
        engine = Scripted(says, speaks) if says else make_engine(
            EngineContext(c, model(kind), speaks, None, (END,), {}, TOKENS * source.merge**2))
        episodes = EpisodeEngine(engine, pool, renderer, c.env, longest=LONGEST, seed=0, keep=keep, images=source if images else None)
        episodes.publish(weights(kind), 0)
        yield episodes, source
        episodes.close()
    finally:
        pool.close()
        source.close()


def requests(groups, samples=2, prompt="how many red shapes ?", ids=(15, 16, 18, 21), places=None, grey=False):
    task = SimpleNamespace(prompt=prompt, answer="", columns={}, prompt_text="", grey=grey)
    keys = [Key("train", 0, g, k) for g in range(groups) for k in range(samples)]
    return [Request(str(key), np.array(ids, np.int32), SamplingParams(max_new_tokens=6), key.seed(0), key.prompt, key, task, pictures=places)
            for key in keys]


@functools.cache
def _score(kind):
    return training.make_score(model(kind), temperature=1.0, chunk=512, put=lambda x: x)


def rescored(traj, kind="qwen3_vl"):
    """[T] log-probs of the trainer: packed rows, prompts shared where they may be."""
    layout = make_layout(traj.sizes, RowShapes((256,), ((2,),), patches=(384,)), share_prompts=True)
    return _score(kind)(weights(kind), traj, layout)


def assert_seen(traj):
    """Image tokens stand where the table says, and nowhere else among tokens that were not sampled, but where an assistant's text in a
    rewritten history has one ("2 <|image_pad|>")."""
    own = np.zeros(len(traj.tokens), bool)
    if traj.pictures is not None:
        own[traj.pictures.tokens(traj.offsets)] = True
    pad = tokenizer().convert_tokens_to_ids(QWEN.pad)
    assert not (own & traj.loss_mask).any()
    assert (traj.tokens[own] == pad).all()
    for place in np.flatnonzero((traj.tokens == pad) & ~own & ~traj.loss_mask):
        assert tokenizer().decode(traj.tokens[place - 3:place]) == "\n2 "


def play(function, count, samples=2, kind="qwen3_vl", **options):
    with playing(function, kind=kind, **options) as (engine, source):
        asked = requests(count, samples)
        results = generate(engine, asked, max(600.0, 2.0 * len(asked)))
        traj = collect(asked, results, images=source)
        again = results_from_bytes(results_to_bytes(results, None))[0]
        return asked, results, traj, rescored(traj, kind), collect(asked, again, images=source), engine.engine.counters()


def check_fuzzed(groups, kind="qwen3_vl"):
    """Returns the number of turns of which nothing differed."""
    asked, results, traj, own, again, counters = play("fuzzed", groups, kind=kind)
    assert all(r.finish != "abort" for r in results), [r.outcome.cause for r in results if r.finish == "abort"]
    np.testing.assert_array_equal(traj.tokens[traj.loss_mask], np.concatenate([r.tokens for r in results]))
    np.testing.assert_allclose(own[traj.loss_mask], traj.logprobs[traj.loss_mask], atol=2e-5)
    np.testing.assert_array_equal(traj.tokens, again.tokens)  # through another process
    for name in ("sequences", "firsts", "grids", "numbers"):
        np.testing.assert_array_equal(getattr(traj.pictures, name), getattr(again.pictures, name))
    assert_seen(traj)
    assert counters["extended_prompts"] > 0
    assert (traj.pictures.firsts >= traj.prompt_lengths[traj.pictures.sequences]).any()
    return sum(len(r.turns) for r in results)


@pytest.mark.full
@first_cases(1, "kind", ["qwen3_vl", "qwen2_5_vl"], full=0)
def test_fuzzed_turns(kind):
    """0 mismatches: log-probs of sampler and trainer agree, image tokens stand where the table says; what a user or the policy writes as
    one is text."""
    assert check_fuzzed(TURNS // 5, kind) >= TURNS / 2


@pytest.mark.slow
def test_ten_thousand_fuzzed_turns():
    assert check_fuzzed(2200) >= 10_000


@pytest.mark.full
def test_turns_of_a_tower_read_both_ways_are_prefilled_whole():
    """Gemma 3: a turn that shows an image is not appended to its slot, where tokens of an image could not see those of a later call."""
    _, results, traj, own, _, counters = play("board", 2, kind="gemma3")
    assert all(r.finish != "abort" and len(r.turns) == 3 for r in results) and counters["extended_prompts"] == 0
    np.testing.assert_allclose(own[traj.loss_mask], traj.logprobs[traj.loss_mask], atol=2e-5)
    tokens, pad = traj.pictures.tokens(traj.offsets), tokenizer("gemma3").convert_tokens_to_ids(GEMMA.pad)
    assert (traj.tokens[tokens] == pad).all() and len(tokens) == 9 * len(traj.pictures.numbers) and not traj.loss_mask[tokens].any()
    starts = traj.offsets[traj.pictures.sequences] + traj.pictures.firsts
    assert (traj.tokens[starts - 1] == tokenizer("gemma3").convert_tokens_to_ids("<start_of_image>")).all()


@pytest.mark.full
def test_a_prompt_that_holds_all_is_what_its_turns_were():
    """Turns that go on in their slot, and the same turns each prefilled whole, have the same tokens and log-probs."""
    (_, kept, traj, own, _, counters), (_, whole, _, _, _, others) = (play("board", 2, keep=keep) for keep in (True, False))
    assert counters["extended_prompts"] > 0 == others["extended_prompts"]
    np.testing.assert_allclose(own[traj.loss_mask], traj.logprobs[traj.loss_mask], atol=2e-5)
    for one, other in zip(kept, whole, strict=True):
        assert len(one.turns) == 3 and [len(t.images) for t in one.turns] == [1, 1, 1] and one.outcome.value == 1.5
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert len(np.unique(traj.pictures.numbers)) == 3 and (traj.pictures.numbers & SHOWN).all()
    assert len(traj.pictures.patches(traj.pictures.numbers[:1])[0]) == 4 * 4  # 12 x 12 pixels become 16 x 16


def test_classes_show_images():
    """Observations that are one part, and parts."""
    with playing("Board", says=["red"]) as (engine, source):
        result, = generate(engine, requests(1, 1), 600.0)
    assert [len(t.images) for t in result.turns] == [1, 1, 1] and result.outcome.value == 1.5 and result.finish == "stop"


def test_programs_show_images():
    """env.program: images in calls of OpenAI's API become tokens and pictures of their turns."""
    shown = pictures.as_text(picture_worlds.picture(random.Random(0), "array"), "")
    with playing("", program=f"{sys.executable} {WORLDS.parent / 'programs.py'}", says=["red"]) as (engine, source):
        asked = requests(1, 1)
        asked[0].task.columns = {"kind": "pictures", "shown": shown}
        result, = generate(engine, asked, 600.0)
    (first,), (second,) = (t.images for t in result.turns)
    assert first.number == second.number and first.grid == source.grid(first.number) and result.outcome.value == 0.5
    pad = engine.renderer.tokenizer.convert_tokens_to_ids(QWEN.pad)
    for turn, image in zip(result.turns, (first, second), strict=True):
        assert np.flatnonzero(turn.added == pad).tolist() == list(range(image.first, image.first + int(np.prod(image.grid)) // 4))


CALL = '<tool_call>\n{"name": "%s", "arguments": {"angle": 7}}\n</tool_call>'


@pytest.mark.parametrize("drops", [False, True])
def test_tools_that_reply_with_images(drops):
    """One, and two with a text between them, in the reply, or behind it where the template leaves them out of replies."""
    with playing("calls", says=[[CALL % "camera"], [CALL % "views"], ["ok"]], speaks=bytes_tokenizer(drops)) as (engine, source):
        asked = [dataclasses.replace(q, sampling=SamplingParams(max_new_tokens=80)) for q in requests(1, 1)]
        engine.longest = 4096
        result, = generate(engine, asked, 600.0)
    assert [len(t.images) for t in result.turns] == [0, 1, 2] and result.outcome.counts["malformed"] == 0
    for turn in result.turns[1:]:
        text = engine.renderer.tokenizer.decode(turn.added)
        for image in turn.images:
            count = int(np.prod(image.grid)) // 4
            assert (turn.added[image.first:image.first + count] == engine.renderer.tokenizer.convert_tokens_to_ids(QWEN.pad)).all()
        assert ("</tool_response>" in text.split(QWEN.start)[0]) == drops
    assert (f"{QWEN.end}red{QWEN.start}" in text) != drops and ("<tool_response>\nred\n" in text) == drops


@pytest.mark.full
def test_pictures_of_the_row_are_shown_again():
    """A prompt as the row has it, text behind it, and in a new conversation a part without a value, which is the row's picture."""
    with playing("rows_picture") as (engine, source):
        number, held = source.hold(picture_worlds_image())
        grid = source.grid(number)
        count = grid[0] * grid[1] // 4
        prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "red ?"}]}]
        ids, at = engine.renderer.first_with_images(prompt)
        whole = np.insert(ids, at[0], [ids[at[0]]] * (count - 1)).astype(np.int32)
        places = Places(at, np.array([grid]), np.array([number]), (held,))
        own = source.pictures([places])
        results = generate(engine, requests(1, 2, prompt, whole, own), 600.0)
        traj = collect(requests(1, 2, prompt, whole, own), results, images=source)
        values = rescored(traj)
    for result in results:
        assert [[i.number for i in t.images] for t in result.turns][:2] == [[number], []]
        assert result.turns[2].images[1].number == number and result.turns[2].images[0].number != number
    np.testing.assert_allclose(values[traj.loss_mask], traj.logprobs[traj.loss_mask], atol=2e-5)
    assert traj.sizes.prefixes.tolist() == [0, 1, 0, 1], "prompts of the same words and other pictures are not one"


def picture_worlds_image():
    from jaxrl.data.images.read import Image
    return Image(encoded=pictures.png(picture_worlds.picture(random.Random(0), "array")))


def test_grey_pictures_of_a_control():
    """Other pixels, hence other samples, from the same messages and grids."""
    with playing("Board") as (engine, source):
        seen, grey = (generate(engine, requests(1, 1, grey=grey), 600.0)[0] for grey in (False, True))
        numbers = [[i.number for t in r.turns for i in t.images] for r in (seen, grey)]
        assert numbers[0][0] | BLANK == numbers[1][0] and (source.patches(numbers[1])[0] == 128).all()
    assert seen.logprobs[0] != grey.logprobs[0]


@pytest.mark.parametrize("function, options, error", [
    ("Board", {"image_tokens": 0}, r"env.function=.*:Board.*shows an image, and env.image_tokens=0 leaves no room"),
    ("Board", {"images": False}, r"shows an image, and the model has no tower"),
    ("Board", {"image_tokens": 3}, r"env.function=.*turn 1 shows images of 4 tokens.*room for 3.*set env.image_tokens"),
    ("Broken", {"retries": 0}, r"turn 2: its messages cannot be rendered: image 1: .*cannot be read")])
def test_what_cannot_be_shown(function, options, error):
    with playing(function, says=["red"], **options) as (engine, _):
        if function == "Board":
            with pytest.raises(RunStopped, match=error):
                generate(engine, requests(1, 1), 600.0)
            return
        cause, = {r.outcome.cause for r in generate(engine, requests(1, 2), 600.0)}
    assert re.search(error, cause)


def test_an_episode_ends_where_its_pictures_have_no_more_room():
    """As one whose tokens are used up: cut, and scored."""
    with playing("Board", image_tokens=9, says=["red"]) as (engine, _):
        result, = generate(engine, requests(1, 1), 600.0)
    assert result.finish == "length" and [len(t.images) for t in result.turns] == [1, 1]


SAY = ("{%- macro say(c, images) -%}{%- if c is string -%}{{ c }}{%- else -%}{%- for p in c -%}{%- if p.type == 'text' -%}{{ p.text }}"
       "{%- elif images -%}<|vision_start|><|image_pad|><|vision_end|>{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}")


def bytes_tokenizer(tool_drops=False, drops=False):
    """A token per byte; its template drops images of tools' replies, or all."""
    images = "false" if drops else "m.role != 'tool'" if tool_drops else "true"
    template = turn_cases.chatml("{{ m.content }}" + turn_cases.JSON_CALLS, "").replace("{{ m.content }}", "{{ say(m.content, IMAGES) }}")
    return turn_cases.make_tokenizer(SAY + template.replace("IMAGES", images), ("<|im_end|>", "<|im_start|>", *QWEN), ("<tool_call>", "</tool_call>"))


@pytest.mark.parametrize("drops", [False, True])
def test_images_of_tools_are_not_lost(drops):
    """A template that leaves them out of replies has them in a user's message behind these, in order. A whole conversation ends as the
    same messages behind recorded ids."""
    renderer = turn_cases.make_renderer(bytes_tokenizer(drops), turn_cases.TOOLS)
    renderer = TurnRenderer(renderer.config, renderer.tokenizer, turn_cases.TOOLS, images=QWEN)
    renderer.check(True, images=True)
    alone, pad, texts = {**REPLY, "content": [{"type": "image"}]}, renderer.tokenizer.convert_tokens_to_ids(QWEN.pad), []
    calls = {"role": "assistant", "content": "", "tool_calls": [{"id": "b", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
    for ids, at in (renderer.extend_with_images(np.array([5]), [REPLY, alone, USER]),
                    renderer.first_with_images([QUESTION, calls, REPLY, alone, USER])):
        assert len(at) == 3 and (ids[at] == pad).all()
        texts.append(renderer.tokenizer.decode(ids))
    assert renderer.tool_images != drops and texts[1].endswith(texts[0].removeprefix("<|im_end|>"))
    image = QWEN.text
    assert (f"user\n{image}{image}<|im_end|>\n<|im_start|>user\nred{image}blue" in texts[0]) == drops == (FOLLOWS in texts[0])


def test_what_spells_an_image_token_is_text():
    """In a user's text, and in an assistant's of a history that is written again."""
    renderer = TurnRenderer(turn_cases.make_renderer(bytes_tokenizer()).config, bytes_tokenizer(), images=QWEN)
    pad = renderer.tokenizer.convert_tokens_to_ids(QWEN.pad)
    spelled = {"role": "user", "content": f"a {QWEN.pad} b"}
    ids, at = renderer.first_with_images([spelled, {"role": "assistant", "content": f"c {QWEN.pad}"}, USER])
    assert (ids == pad).sum() == 2 and len(at) == 1 and at[0] == np.flatnonzero(ids == pad)[1]
    ids, at = renderer.extend_with_images(np.array([5]), [spelled, USER])
    assert (ids == pad).sum() == 1 == len(at)


def test_a_template_that_drops_images_is_refused_at_start():
    renderer = TurnRenderer(turn_cases.make_renderer(bytes_tokenizer()).config, bytes_tokenizer(drops=True), images=QWEN)
    renderer.check(False)
    with pytest.raises(ConfigError, match=r"several turns do not work with it \(an image\): .*writes 0 of 1 images"):
        renderer.check(False, images=True)


def test_results_of_tools():
    """An image, a part, and a list with one are parts; everything else is text as before."""
    array = np.zeros((4, 4, 3), np.uint8)
    assert result_content("f", array) == [{"type": "image", "image": array}]
    assert result_content("f", ["a", array])[0] == {"type": "text", "text": "a"}
    assert result_content("f", [{"type": "image", "image": b"x"}, "a"]) == [{"type": "image", "image": b"x"}, {"type": "text", "text": "a"}]
    assert result_content("f", [{"type": "text", "text": "a"}]) == '[{"type": "text", "text": "a"}]'
    assert result_content("f", {"type": "image", "image": "x"}) == [{"type": "image", "image": "x"}]
    for value in ("a", 3, [1, 2], {"a": 1}):
        assert isinstance(result_content("f", value), str)


@pytest.mark.parametrize("form", ["array", "grey", "alpha", "pillow", "cmyk", "bytes", "jpeg", "uri", "table"])
def test_every_form_keeps_its_pixels(form):
    """What a worker writes is what data.images reads of the value itself."""
    from jaxrl.data.images.decode import pixels_of
    from jaxrl.data.images.read import image_of
    value = picture_worlds.picture(random.Random(3), form)
    part, = pictures.content_of([{"type": "image", "image": value}], "message 0")
    np.testing.assert_array_equal(pixels_of(image_of(part["image"], None), 10**6), pixels_of(image_of(value, None), 10**6))
