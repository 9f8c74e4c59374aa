"""Rows with videos: every form gives the same ids and pixels, a cache gives them again, and what does not read videos is named."""

import importlib
import io
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from jaxrl.config import default_config
from jaxrl.data import load_tokenizer, load_train
from jaxrl.data.images.controls import CONTROLS
from jaxrl.data.images.decode import together
from jaxrl.data.images.resize import cut
from jaxrl.data.images.source import ImageSource
from jaxrl.data.sources import DataError
from jaxrl.errors import ConfigError
from jaxrl.types import Pictures

TOWER = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2}
ASK, SAY = "which way does it move?", "\\boxed{left}"


def frame(number, height=16, width=24):
    return np.random.default_rng([7, number]).integers(0, 255, (height, width, 3)).astype(np.uint8)


FRAMES = [frame(k) for k in range(5)]


def png(pixels):
    out = io.BytesIO()
    Pillow.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def config(path=(), recipe="sft", family="qwen3_vl", **options):
    c = default_config()
    c.run.recipe, c.model.tokenizer, c.data.path = recipe, "jaxrl://moving/tokenizer", tuple(map(str, path))
    c.data.image_min_pixels, c.data.video_max_pixels = 64, 16 * 24 * (4 if family.startswith("qwen3") else 1)
    c.data.max_prompt_tokens, c.rollout.max_new_tokens = 99, 16
    for name, value in options.items():
        group, name = name.split("__")
        c[group][name] = value
    return c


def loaded(c, rows=None, family="qwen3_vl"):
    tokenizer = load_tokenizer(c)
    images = ImageSource(c, family, tokenizer, tower=TOWER)
    return load_train(c, tokenizer, tokenizer.eos_token_id, rows, images=images), images


def part(value, **more):
    return {"prompt": [{"role": "user", "content": [{"type": "video", "video": value, **more}, {"type": "text", "text": ASK}]}]}


FORMS = {
    "arrays": {"videos": [{"video": FRAMES, "fps": 2}], "prompt": f"<video>{ASK}"},
    "one array": {"video": {"frames": np.stack(FRAMES), "fps": 2.0}, "prompt": ASK},
    "list of lists": {"videos": [FRAMES], "prompt": ASK},  # without times two a second
    "pillow": {"video": [Pillow.fromarray(f) for f in FRAMES],
               "prompt": [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": ASK}]}]},
    "in the messages": part([png(f) for f in FRAMES], fps=2),
    "sample_fps": part([png(f) for f in FRAMES], sample_fps=2.0),
    "times": part(FRAMES, times=[0, 0.5, 1.0, 1.5, 2.0]),
}


def expected_patches():
    return [together([cut(f, SimpleNamespace(merge=2, patch=4)) for f in pair]) for pair in (FRAMES[:2], FRAMES[2:4], [FRAMES[4]] * 2)]


@pytest.mark.parametrize("form", [*FORMS, "paths", "folder", "parquet"])
def test_every_form_gives_the_same_example(form, tmp_path, monkeypatch):
    """Ids with the time before each group of frames and one token per feature, places, pixels; no column holds a video."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip").mkdir()
    names = [f"clip/{k}.png" for k in range(8, 13)]  # by their numbers, not as text
    for name, pixels in zip(names, FRAMES, strict=True):
        (tmp_path / name).write_bytes(png(pixels))
    row, path = {"paths": part(names, fps=2), "folder": {"videos": ["clip"], "prompt": ASK}, "parquet": FORMS["arrays"]}.get(form) or FORMS[form], ()
    row = {**row, "completion": SAY, "level": 3}
    if form == "parquet":
        path, row["videos"] = [tmp_path / "rows.parquet"], [{"video": [png(f) for f in FRAMES], "fps": 2}]
        pq.write_table(pa.Table.from_pylist([row]), path[0])
    dataset, images = loaded(config(path), None if form == "parquet" else [row])
    example, tokenizer = dataset[0], load_tokenizer(config())
    of_video = "".join(f"<{t} seconds><|vision_start|>{'<|video_pad|>' * 6}<|vision_end|>" for t in ("0.2", "1.2", "2.0"))
    text = f"<|im_start|>user\n<|vision_start|>{of_video}<|vision_end|>{ASK}<|im_end|>\n<|im_start|>assistant\n"
    assert example.prompt_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert {"video", "videos"}.isdisjoint(example.columns) and example.columns["level"] == 3
    assert example.target_ids.tolist() == tokenizer(SAY + "<|im_end|>", add_special_tokens=False)["input_ids"]
    assert example.images.grids.tolist() == [[4, 6]] * 3 and example.images.delays is None and images.videos and images.frames == 2
    for got, want in zip(images.patches(example.images.numbers), expected_patches(), strict=True):
        assert np.array_equal(got, want)
    images.close()


@pytest.mark.torch
def test_the_text_is_transformers(tmp_path):
    """What its processor makes of the template's text, in ids; transformers' video processor is not asked, which needs torchvision."""
    processing = importlib.import_module("transformers.models.qwen3_vl.processing_qwen3_vl")
    row = {**part(FRAMES, fps=3), "completion": SAY}
    dataset, images = loaded(config(data__video_fps=3.0), [row])
    tokenizer = images.tokenizer
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2), vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token="<|video_pad|>", _calculate_timestamps=lambda *a: processing.Qwen3VLProcessor._calculate_timestamps(None, *a))
    inside = processing.Qwen3VLProcessor.replace_video_token(processor, {
        "video_grid_thw": np.array([[3, 4, 6]]), "video_metadata": [SimpleNamespace(fps=3, frames_indices=list(range(5)))]}, 0)
    whole = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True).replace("<|video_pad|>", inside)
    assert dataset[0].prompt_ids.tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_groups_of_frames_follow_each_other(tmp_path):
    """Qwen2.5-VL: one run of tokens, groups delayed by tokens_per_second times the seconds between them; Qwen2-VL: by one."""
    for family, delays in (("qwen2_5_vl", [-1, 2, 4]), ("qwen2_vl", [-1, 1, 2])):
        dataset, images = loaded(config(family=family), [{**part(FRAMES, fps=2), "completion": SAY}], family)
        example, pad = dataset[0], images.tokenizer.convert_tokens_to_ids("<|video_pad|>")
        assert np.flatnonzero(example.prompt_ids == pad).tolist() == list(range(4, 22)) and example.images.firsts.tolist() == [4, 10, 16]
        assert example.images.delays.tolist() == delays
        joined = Pictures.of([None, example.images, example.images], images)
        assert joined.delays.tolist() == delays * 2 and joined.select([2]).delays.tolist() == delays and joined.frames == 2
        assert len(set(joined.digests(3))) == 2


def test_an_animation_is_a_video(tmp_path, monkeypatch):
    """GIF and WebP: all frames at the file's times, as a cell and in a list."""
    monkeypatch.chdir(tmp_path)
    for name, options in (("a.gif", {"duration": 250}), ("a.webp", {"duration": 250, "lossless": True})):
        first, *others = [Pillow.fromarray(np.full((16, 24, 3), 40 * k + 20, np.uint8)) for k in range(4)]
        first.save(tmp_path / name, save_all=True, append_images=others, **options)
        for cell in (name, [(tmp_path / name).read_bytes()]):
            dataset, images = loaded(config(data__video_fps=4.0), [{"video": cell, "prompt": ASK, "completion": SAY}])
            assert "<0.1 seconds>" in dataset[0].prompt_text and "<0.6 seconds>" in dataset[0].prompt_text
            own = images.patches(dataset[0].images.numbers)
            seen = [np.unique(p.reshape(len(p), 3, 2, -1)[:, :, t]).tolist() for p in own for t in range(2)]
            assert [len(s) for s in seen] == [1] * 4 and [s[0] for s in seen] == sorted(s[0] for s in seen) and seen[0] != seen[3]


def test_frames_are_sampled_and_videos_shortened():
    """data.video_fps and data.video_max_frames; data.video_max_pixels makes frames smaller."""
    row = {"video": {"frames": np.stack([frame(k, 32, 32) for k in range(16)]), "fps": 8}, "prompt": ASK, "completion": SAY}
    roomy = dict(data__video_max_pixels=16 * 32**2, data__max_prompt_tokens=400)
    count = lambda **o: len(loaded(config(**roomy, **o), [row])[0][0].images.firsts)  # noqa: E731
    with pytest.raises(DataError, match="lower data.video_max_frames"):
        loaded(config(data__overlong_prompt="error", data__video_fps=8.0, data__video_max_pixels=16 * 32**2), [row])
    assert count() == 2 and count(data__video_fps=8.0) == 8 and count(data__video_fps=8.0, data__video_max_frames=6) == 3
    small, _ = loaded(config(data__video_max_pixels=4 * 8 * 16), [row])
    assert small[0].images.grids.tolist() == [[2, 2]] * 2


def test_images_beside_videos_and_controls(tmp_path):
    """Each of an image's frames is the image; in rows of images alone nothing is repeated. Grey and exchanged videos change pixels alone."""
    rows = [{"images": [frame(10 + k, 8, 8)], "videos": [[frame(20 + 4 * k + i, 8, 8) for i in range(4)]],
             "prompt": f"<video>{ASK}<image>", "completion": SAY} for k in range(2)]
    dataset, images = loaded(config(data__video_max_pixels=256), rows)
    own = images.patches(dataset[0].images.numbers)
    assert [p.shape for p in own] == [(4, 96)] * 3 and np.array_equal(own[2].reshape(4, 3, 2, 16)[:, :, 0], own[2].reshape(4, 3, 2, 16)[:, :, 1])
    assert np.array_equal(own[2].reshape(4, 3, 2, 16)[:, :, 0].reshape(4, 48), cut(frame(10, 8, 8), SimpleNamespace(merge=2, patch=4)))
    batch = [(i, dataset[i]) for i in range(2)]
    grey = images.patches(CONTROLS["blank"](batch)[0][1].images.numbers)
    other = images.patches(CONTROLS["swapped"](batch)[0][1].images.numbers)
    assert all((p == 128).all() for p in grey) and np.array_equal(other[0], images.patches(dataset[1].images.numbers)[0])
    alone, images = loaded(config(), [{"images": [frame(1)], "prompt": ASK + "<video>", "completion": SAY}])
    assert images.patches(alone[0].images.numbers)[0].shape[1] == 48 and not images.videos and alone[0].prompt_text.count("<video>") == 1


def test_a_cache_gives_videos_again(tmp_path):
    rows = [{"video": {"frames": [png(frame(5 * k + i)) for i in range(4)], "fps": 2}, "prompt": ASK, "completion": SAY} for k in range(2)]
    c = config(data__cache=str(tmp_path / "cache"))
    (first, one), (second, two) = loaded(c, rows), loaded(c, rows)
    assert type(second.tables).__name__ == "CachedRows" and two.videos and two.frames == 2
    for a, b in zip(one.patches(first[1].images.numbers), two.patches(second[1].images.numbers), strict=True):
        assert np.array_equal(a, b)


BROKEN = {
    "a file": (part("clip.mp4"), "'clip.mp4' is a video file, which is not decoded here. Extract its frames once, ffmpeg"),
    "markers": ({"videos": [FRAMES], "prompt": f"<video><video>{ASK}"}, "more markers"),
    "too many": ({"videos": [FRAMES, FRAMES], "prompt": f"<video>{ASK}"}, "1 markers .* for 2 videos"),
    "sizes": ({"video": [frame(1), frame(2, 8, 8)], "prompt": ASK}, "a frame of 8x8 pixels in a video whose first has 24x16"),
    "no column": ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "more markers .* than videos"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_video_that_cannot_be_used_is_a_bad_row(name):
    row, message = BROKEN[name]
    good = {**part(FRAMES), "completion": SAY}
    with pytest.raises(DataError, match=message):
        loaded(config(), [good, {**row, "completion": SAY}])
    dataset, images = loaded(config(data__bad_rows="skip"), [good, {**row, "completion": SAY}])
    assert len(dataset) == 1 and dataset.bad_rows.count == 1
    images.close()


def test_jobs_that_do_not_read_videos_say_so():
    row = {**part(FRAMES), "completion": SAY}
    turns = config(data__train_turns="all")
    for c, message in ((turns, "data.train_turns='all'"), (config(recipe="distill"), "run.recipe='distill'"),
                       (config(model__tokenizer="jaxrl://shapes/tokenizer"), "'<.video_pad.>' is not one token")):
        with pytest.raises(ConfigError, match=f"the data holds videos, and {message}"):
            loaded(c, [row])
    left_out = {"videos": [FRAMES], "images": [frame(1)], "prompt": ASK, "completion": SAY}
    dataset, images = loaded(config(data__video_column=""), [left_out])
    assert len(dataset[0].images.firsts) == 1 and not images.videos
    c = config(model__tokenizer="jaxrl://shapes/tokenizer_gemma3", data__image_min_pixels=None)
    tokenizer = load_tokenizer(c)
    with pytest.raises(DataError, match="part of type 'video': text and images are read, and videos by Qwen's towers"):
        load_train(c, tokenizer, 1, [row], images=ImageSource(c, "gemma3", tokenizer))
