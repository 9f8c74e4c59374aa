"""Frames of videos as transformers' video processors take, size and cut them, and the text around them."""

import importlib
import json
import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.tiers import first_cases

from jaxrl.data.images.decode import picture_of_frames
from jaxrl.data.images.read import Image, ImageError
from jaxrl.data.images.resize import rule_of
from jaxrl.data.images.video import Sampling, Video, as_fields, sampling_of, videos_of
from jaxrl.errors import ConfigError

RNG = np.random.default_rng(0)
OPTIONS = dict(video_fps=None, video_max_frames=None, video_max_pixels=None)


def sampling(family="qwen3_vl", folder=None, **options) -> Sampling:
    return sampling_of(SimpleNamespace(**{**OPTIONS, **options}), family, rule_of(family), folder, None)


@pytest.fixture(scope="module")
def processors():
    """transformers' video processors. Without torchvision their module does not import, though sampling, sizes and the order of patches do
    not use it."""
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional"]
    importlib.import_module("transformers.image_utils")  # which would take the stand-ins for torchvision itself
    added = [name for name in names if name not in sys.modules]
    for name in added:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    for whole, part in zip(names, names[1:], strict=False):
        setattr(sys.modules[whole], part.rpartition(".")[2], sys.modules[part])
    modules = {kind: importlib.import_module(f"transformers.models.{kind}.video_processing_{kind}") for kind in ("qwen2_vl", "qwen3_vl")}
    yield modules["qwen2_vl"].Qwen2VLVideoProcessor, modules["qwen3_vl"].Qwen3VLVideoProcessor, modules["qwen3_vl"].smart_resize
    for name in added:
        del sys.modules[name]


def video(count, fps=None, times=None):
    frames = tuple(Image(pixels=np.zeros((2, 2, 3), np.uint8)) for _ in range(count))
    return Video(frames, times or (fps and tuple(k / fps for k in range(count))) or None)


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_the_frames_of_transformers_are_taken(processors, family):
    """Of 3 to 400 frames at 1 to 60 a second, with few and with many frames wanted: the same indices."""
    from transformers.video_utils import VideoMetadata
    theirs = processors[1] if family == "qwen3_vl" else processors[0]
    differ = 0
    for count in [3, 4, 5, 7, 8, 30, 31, 64, 150, 399]:
        for rate in (1.0, 2.0, 7.0, 24.0, 29.97, 60.0):
            for fps, most in ((2.0, 768), (0.5, 16), (3.0, 9), (1.0, 4)):
                own = sampling(family, video_fps=fps, video_max_frames=most)
                fields = SimpleNamespace(fps=fps, num_frames=None, temporal_patch_size=2, min_frames=4, max_frames=most)
                want = theirs.sample_frames(fields, VideoMetadata(total_num_frames=count, fps=rate), fps=fps)
                got = own.taken(video(count, rate))
                assert got.tolist() == np.asarray(want).tolist(), (count, rate, fps, most)
                differ += len(got) < count
    assert differ > 100


@pytest.mark.torch
def test_frames_are_sized_as_by_transformers(processors):
    """A Qwen3-VL bounds the pixels of all frames, the others those of a frame."""
    whole, single = sampling(), sampling("qwen2_5_vl")
    for height, width, count in zip(*RNG.integers(4, 900, (2, 300)), RNG.integers(1, 90, 300), strict=True):
        theirs = processors[2](max(2, count), int(height), int(width), 2, 32, whole.rule.least, whole.rule.most)
        assert whole.size(int(height), int(width), int(count)) == theirs
    assert single.size(480, 640, 7) == single.rule.size(480, 640) and single.rule.most == 768 * 28**2
    assert whole.size(480, 640, 64) < whole.size(480, 640, 4)


@pytest.mark.torch
def test_patches_are_in_the_order_of_transformers(processors):
    """Of frames that have their size: every number, an odd last frame once more."""
    import torch
    own = sampling("qwen2_5_vl")
    frames = RNG.integers(0, 256, (5, 56, 84, 3)).astype(np.uint8)
    want, *grid = processors[0].patchify(None, torch.tensor(frames).permute(0, 3, 1, 2)[None], 14, 2, 2)
    clips, _ = own.clips(Video(tuple(Image(pixels=f) for f in frames)))
    pictures = [picture_of_frames(clip.frames, own.rule, 1 << 20, lambda h, w: (h, w)) for clip in clips]
    assert grid == [3, *pictures[0].grid] and np.array_equal(np.concatenate([p.patches for p in pictures]), want[0].numpy())


@first_cases(1, "times", [None, (0.0, 0.4, 1.0, 1.25, 3.5)])
def test_times_and_delays(times):
    """The mean of a group's first and last frame; seconds between groups times tokens_per_second, whole numbers as in transformers."""
    own = sampling(video_fps=4.0)
    _, seconds = own.clips(video(5, 4.0, times))
    assert np.allclose(seconds, [0.125, 0.625, 1.0] if times is None else [0.2, 1.125, 3.5])
    clips, _ = sampling("qwen2_5_vl").clips(video(12, 3.0))
    assert [clip.delay for clip in clips] == [-2, *(int(np.float32(k) * np.float32(4 * 2 / 3)) for k in range(1, 6))]
    assert [clip.delay for clip in sampling("qwen2_vl").clips(video(6, 3.0))[0]] == [-2, 1, 2]
    assert [clip.delay for clip in own.clips(video(6, 3.0))[0]] == [-2] * 3


def test_what_the_folder_says(tmp_path):
    """video_preprocessor_config.json, or what a folder without one says of images; options replace it, and other fields are refused."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 14, "min_pixels": 3136, "max_pixels": 12845056}))
    assert sampling("qwen2_5_vl", tmp_path).rule.most == 12845056 and sampling("qwen2_5_vl", tmp_path).fps is None
    given = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "fps": 1,
             "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "max_frames": 30, "min_frames": 2, "video_processor_type": "Qwen3VLVideoProcessor"}
    name = tmp_path / "video_preprocessor_config.json"
    name.write_text(json.dumps(given))
    own = sampling("qwen3_vl", tmp_path)
    assert (own.rule.least, own.rule.most, own.fps, own.least, own.most) == (4096, 25165824, 1, 2, 30)
    own = sampling("qwen3_vl", tmp_path, video_fps=0.5, video_max_frames=6, video_max_pixels=8192)
    assert (own.fps, own.most, own.rule.most) == (0.5, 6, 8192)
    name.write_text(json.dumps(as_fields(own)))  # what an export writes
    assert sampling("qwen3_vl", tmp_path) == own
    with pytest.raises(ConfigError, match="data.video_max_pixels=2000"):
        sampling("qwen3_vl", tmp_path, video_max_pixels=2000)
    for field, value in (("cap_pixels_per_frame", True), ("num_frames", 8), ("max_frames", -1), ("image_mean", [0.1] * 3), ("do_pad", True)):
        name.write_text(json.dumps({**given, field: value}))
        with pytest.raises(ConfigError, match=f"video_preprocessor_config.json: (.*{field}|videos are)"):
            sampling("qwen3_vl", tmp_path)
    assert sampling_of(SimpleNamespace(**OPTIONS), "gemma3", rule_of("gemma3"), None, None) is None


REFUSED = {"one picture": ("", "one picture is no video"), "no pictures": ("empty", "holds no pictures"),
           "a file": ("x/clip.mp4", "ffmpeg -i x/clip"),
           "outside": ("../other", "lies outside"), "a URL": ("https://x/y", "nothing is fetched"), "rate": ({"video": ["a.png"], "fps": 0}, "fps=0"),
           "times": ({"video": ["a.png", "a.png"], "times": [0.0]}, "2 frames has 1 times"),
           "order": ({"video": ["a.png", "a.png"], "times": [1.0, 0.5]}, "do not rise"), "nothing": ([[]], "without frames")}


@pytest.mark.parametrize("name", REFUSED)
def test_videos_that_cannot_be_read(tmp_path, name):
    from PIL import Image as Pillow
    cell, message = REFUSED[name]
    (tmp_path / "top" / "empty").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    Pillow.new("RGB", (4, 4)).save(tmp_path / "top" / "a.png")
    with pytest.raises(ImageError, match=message):
        videos_of({"video": "a.png"} if name == "one picture" else cell, tmp_path / "top")


def test_a_time_beyond_float64_is_an_error_of_its_row():
    frames = [np.zeros((4, 4, 3), np.uint8)] * 2
    with pytest.raises(ImageError, match="times of a video"):
        videos_of({"frames": frames, "times": [0, 10**400]}, None)
