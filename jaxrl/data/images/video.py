"""Videos of data rows as frames: which there are, which are taken, their times, and the groups that one patch holds.

Video files are not decoded: what a decoder makes of a file differs between its versions, so that a row would not show
the same pixels on every host. Frames that were extracted once do.

Legend: T frames of a group (Rule.frames), G groups of a video.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl.data.images.decode import animation
from jaxrl.data.images.read import SUFFIXES, Image, ImageError, image_of
from jaxrl.data.images.resize import READ_SIZE, Rule, rule_of
from jaxrl.data.images.resize import as_fields as fields_of_images
from jaxrl.errors import ConfigError, type_of

RATES = ("fps", "sample_fps")  # fields that say how many frames a second has; sample_fps as in qwen-vl-utils
FILES = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".flv", ".wmv", ".ts")
RATE = 2.0  # frames a second that are taken where nothing says otherwise, and of frames without times


@dataclasses.dataclass(frozen=True, eq=False)
class Video:
    """A video that is not read yet.

    Attributes:
      frames: in order of time.
      times: of each frame, in seconds; None = not known.
    """

    frames: tuple[Image, ...]
    times: tuple[float, ...] | None = None

    @property
    def fps(self) -> float | None:
        """Frames a second: the number of frames less one over (last time - first time); None if times are not known or
        do not rise."""
        if self.times is None or self.times[-1] <= self.times[0]:
            return None
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])


@dataclasses.dataclass(frozen=True, eq=False)
class Clip:
    """T frames of a video that one patch holds together, unread.

    Attributes:
      frames: T of them; where the video ends before, its last one again.
      first: the first frame that is taken of the whole video. count: how many are, which decides their size.
      delay: position in time behind the first group of its video, of groups that follow each other without text; -2
        for the first group, and for all where a group's time is written before it (Sampling.whole).
    """

    frames: tuple[Image, ...]
    first: Image
    count: int
    delay: int

    path = property(lambda self: self.frames[0].path)
    content = property(lambda self: [frame.content for frame in self.frames])

    def __str__(self):
        return f"frames that begin with {self.frames[0]}"


class Sampling(NamedTuple):
    """Which frames of a video are taken, how large they become, and what is written before them.

    Attributes:
      rule: its least and most bound the pixels of a frame; of a video as a whole if `whole`.
      whole: whether the bounds are those of the whole video (Qwen3-VL). Then a group is preceded by its time, too
        ("<0.5 seconds>"), and is an image of its own.
      fps: frames taken a second; None = all frames.
      least, most: bounds of the number of frames taken.
      per_second: positions that a second takes where groups follow each other without text; 0 = a group takes one.
    """

    rule: Rule
    whole: bool
    fps: float | None
    least: int
    most: int
    per_second: float = 0.0

    def taken(self, video: Video) -> np.ndarray:
        """Returns the [n] int indices of the frames that are taken, as transformers' video processors take them: all if
        they are no more than one group, or if `fps` is None and there are at most `most`; otherwise evenly spaced, as
        many as `fps` asks of the video's duration, between `least` and `most`; unless `whole`, a multiple of T."""
        total, group = len(video.frames), self.rule.frames
        rate = video.fps or self.fps or RATE
        wanted = rate if self.fps is None else self.fps
        if total <= group or (self.fps is None and total <= self.most):
            return np.arange(total)
        if self.whole:
            count = min(max(int(total / rate * wanted), self.least), self.most, total)
            return np.linspace(0, total - 1, count).round().astype(int)
        most = min(self.most, total) // group * group
        count = math.floor(min(max(total / rate * wanted, self.least), most, total) / group) * group
        step = total / max(count, group)
        return np.float32(np.arange(math.ceil(total / step)) * step).astype(int)  # as torch.arange rounds

    def clips(self, video: Video) -> tuple[list[Clip], list[float]]:
        """Returns (its groups of frames [G], of each the mean time of its first and last frame in seconds).

        The last group is filled up with the last frame that is taken. Frames without times are counted as taken at
        `fps`, or RATE, a second."""
        indices, group = self.taken(video), self.rule.frames
        rate = video.fps or self.fps or RATE
        times = indices / rate if video.times is None else np.array(video.times)[indices]
        padding = np.full(-len(indices) % group, len(indices) - 1)
        places = np.append(np.arange(len(indices)), padding).reshape(-1, group)
        delays = np.full(len(places), -2)
        if not self.whole:
            seconds = group / (len(indices) / len(video.frames) * rate)
            step = np.float32(seconds) * np.float32(self.per_second) if self.per_second else np.float32(1)
            delays[1:] = (np.arange(1, len(places), dtype=np.float32) * step).astype(int)
        taken = [video.frames[i] for i in indices]
        clips = [Clip(tuple(taken[k] for k in own), taken[0], len(taken), int(delay))
                 for own, delay in zip(places, delays, strict=True)]
        return clips, [float(times[own[0]] + times[own[-1]]) / 2 for own in places]

    def size(self, height: int, width: int, count: int) -> tuple[int, int]:
        """Returns (height, width) of the resized frames of a video of `count` taken ones, multiples of rule.factor.

        rule.least and most bound the pixels of one frame, or, if `whole`, of all frames together. Raises ImageError for
        sizes that rule.size refuses."""
        if not self.whole:
            return self.rule.size(height, width)
        factor, group = self.rule.factor, self.rule.frames
        if height and width and (height < factor or width < factor):
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        frames = max(group, count)
        # least and most are compared with a rounded number of frames, shares computed with the number itself
        bounds = dataclasses.replace(self.rule, least=0, most=2**62)
        new = bounds.size(height, width)
        total = round(frames / group) * group * math.prod(new)
        if self.rule.least <= total <= self.rule.most:
            return new
        far = total > self.rule.most
        own = frames * height * width
        scale = math.sqrt(own / self.rule.most if far else self.rule.least / own)
        sides = (height / scale, width / scale) if far else (height * scale, width * scale)
        new = [max(factor, math.floor(s / factor) * factor) if far else math.ceil(s / factor) * factor for s in sides]
        return new[0], new[1]


def sampling_of(data, model_type: str, rule: Rule, folder: Path | None, tower: dict | None) -> Sampling | None:
    """Returns how a family takes videos; None if it reads none.

    Args:
      data: options data.video_fps, data.video_max_frames and data.video_max_pixels.
      model_type: of config.json, the family's name there.
      rule: how images are resized and cut, from resize.rule_of.
      folder: of the checkpoint, of which is read, in this order: the video_processor of processor_config.json,
        video_preprocessor_config.json, preprocessor_config.json; None or without one: the family's defaults.
      tower: vision_config of its config.json.

    Raises ConfigError for unreadable files, fields that would take or change frames otherwise, numbers that are not
    positive, and data.video_max_pixels below the smallest frame or video.
    """
    if rule.side:
        return None
    whole, side = model_type.startswith("qwen3"), rule.patch * rule.merge
    name, given = _stored(folder)
    own = {key: given.pop(key) for key in list(given) if key in ("fps", "min_frames", "max_frames", "do_sample_frames")}
    for key, served in (("num_frames", None), ("cap_pixels_per_frame", False), ("return_metadata", False),
                        ("video_metadata", None)):
        if given.pop(key, None) not in (None, served):
            raise ConfigError(f"{name}: {key} is not read here and would take other frames; leave it out")
    for key in ("max_video_tokens", "max_image_size", "max_duration", "video_processor_type"):
        given.pop(key, None)
    plain = {"min_pixels": 128 * side**2, "max_pixels": 768 * side**2}
    bounds = {**plain, **{k: v for k, v in given.items() if k in plain and v is not None}}
    of_size = given.get("size") or {}
    bounds |= {READ_SIZE[name]: value for name, value in of_size.items() if name in READ_SIZE and value is not None}
    checked = rule_of(model_type, None, None, None, tower, stored=(name, {**given, "size": None, **bounds}))
    if (checked.patch, checked.merge, checked.frames, checked.mean, checked.std) != (
            rule.patch, rule.merge, rule.frames, rule.mean, rule.std):
        raise ConfigError(f"{name}: videos are cut or normalised otherwise than images, which one tower does not read")
    samples = own.get("do_sample_frames", whole)
    fps = data.video_fps or ((own.get("fps") or (RATE if whole else None)) if samples else None)
    most = data.video_max_frames or own.get("max_frames") or 768
    least = min(own.get("min_frames") or 4, most)
    for key, value in (("fps", fps), ("max_frames", most), ("min_frames", least)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise ConfigError(f"{name}: {key}={value!r}; give a positive number")
    if data.video_max_pixels is not None:
        smallest = side**2 * (rule.frames if whole else 1)
        if data.video_max_pixels < smallest:
            raise ConfigError(f"data.video_max_pixels={data.video_max_pixels}: the smallest "
                              f"{'video' if whole else 'frame'} has {smallest}; give at least these")
        least_pixels = min(checked.least, data.video_max_pixels)
        checked = dataclasses.replace(checked, most=data.video_max_pixels, least=least_pixels)
    per_second = float((tower or {}).get("tokens_per_second", 4)) if model_type == "qwen2_5_vl" else 0.0
    return Sampling(checked, whole, fps, int(least), int(most), per_second)


def as_fields(sampling: Sampling) -> dict:
    """Returns the fields of a video_preprocessor_config.json that says how frames are taken, resized and normalised by
    a Sampling."""
    kind = "Qwen3VLVideoProcessor" if sampling.whole else "Qwen2VLVideoProcessor"
    taken = {"fps": sampling.fps} if sampling.fps else {}
    own = {k: v for k, v in fields_of_images(sampling.rule).items() if k != "image_processor_type"}
    return own | taken | {"do_sample_frames": bool(taken), "min_frames": sampling.least, "max_frames": sampling.most,
                          "video_processor_type": kind}


def _stored(folder: Path | None) -> tuple[str, dict]:
    """Returns (file, its fields) of a folder's video processor, in the order in which transformers looks for it."""
    if folder is None:
        return "", {}
    for name, key in (("processor_config.json", "video_processor"), ("video_preprocessor_config.json", ""),
                      ("preprocessor_config.json", "")):
        if not (folder / name).is_file():
            continue
        try:
            found = json.loads((folder / name).read_text("utf-8"))
            found = found.get(key) if key else dict(found)
        except (ValueError, TypeError, AttributeError) as e:
            raise ConfigError(f"{folder / name}: not a JSON object ({e}); fetch the checkpoint again") from None
        if found is not None:
            return str(folder / name), {k: v for k, v in found.items() if v is not None and k != "image_processor_type"}
    return "", {}


# ---- forms of cells and content parts


def videos_of(cell, root: Path | None) -> list[Video]:
    """Returns the videos of a column's cell: none for None, else one or those of a list, each as `video_of` takes it.
    A list whose first entry is a still picture is one video, an empty list one without frames, which is an ImageError.

    root: folder that paths are relative to and must lie in; None refuses paths. Raises ImageError as `video_of`."""
    if cell is None:
        return []
    if isinstance(cell, list | tuple) and cell and (_holds_videos(cell[0]) or _moves(cell[0], root)):
        return [video_of(value, root) for value in cell]
    return [video_of(cell, root)]


def _holds_videos(value) -> bool:
    """Returns whether the first entry of a list is a video, not a frame."""
    if isinstance(value, dict):
        return any(value.get(name) is not None for name in ("video", "frames"))
    if isinstance(value, np.ndarray):
        return value.ndim == 4
    return isinstance(value, list | tuple) or (isinstance(value, str) and not value.startswith("data:")
                                               and not value.lower().endswith(SUFFIXES))


def _moves(value, root: Path | None) -> bool:
    """Returns whether the first entry of a list is an animated file."""
    try:
        image = image_of(value, root)
    except ImageError:
        return False  # which is told where it is read
    name = image.path.suffix.lower() if image.path else ""
    if name not in (".gif", ".webp") and not (image.encoded or b"").startswith((b"GIF8", b"RIFF")):
        return False
    return animation(image) is not None


def video_of(value, root: Path | None, extra: dict | None = None) -> Video:
    """Returns one video: a list of frames, each in a form of read.image_of; a uint8 array [T, H, W, 3] or [T, H, W, 4];
    a folder of frames; an animated GIF or WebP; or a table {"video" or "frames": one of these, "fps" or "sample_fps":
    frames a second, or "times": seconds of each frame}.

    Args:
      root: folder that paths are relative to and must lie in; None refuses paths.
      extra: a content part, whose fps or times hold unless a table brings its own.

    Times or fps, if given, go before the times of an animated file; other frames without them have none
    (Video.times None).

    Raises ImageError for a value in no known form, a video file, a video without frames, an fps that is not positive,
    and times that do not rise from 0 or later or are not one per frame.
    """
    given = dict(extra or {})
    if isinstance(value, dict) and any(value.get(name) is not None for name in ("video", "frames")):
        given |= {k: v for k, v in value.items() if v is not None}
        value = next(value[name] for name in ("video", "frames") if value.get(name) is not None)
    frames, times = _frames(value, root)
    if not frames:
        raise ImageError("a video without frames")
    rate = next((given[name] for name in RATES if given.get(name) is not None), None)
    if given.get("times") is not None:
        times = _times(given["times"], len(frames))
    elif rate is not None:
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
            raise ImageError(f"a video has fps={rate!r}; give frames a second, a positive number")
        times = tuple(k / rate for k in range(len(frames)))
    return Video(tuple(frames), times)


def _times(value, count: int) -> tuple[float, ...]:
    try:
        times = tuple(float(t) for t in value)
    except (TypeError, ValueError, OverflowError):
        raise ImageError(f"times of a video are {type_of(value)}; give the seconds of each frame") from None
    if len(times) != count:
        raise ImageError(f"a video of {count} frames has {len(times)} times; give one of each frame")
    rise = all(b > a for a, b in zip((-1.0, *times), times, strict=False))
    if not rise or times[0] < 0 or not math.isfinite(times[-1]):
        raise ImageError("times of a video do not rise from 0 or later; give the seconds of each frame, in order")
    return times


def _frames(value, root: Path | None) -> tuple[list[Image], tuple[float, ...] | None]:
    """Returns (frames, their times where the value tells them)."""
    if isinstance(value, np.ndarray) and value.ndim == 4:
        return [image_of(frame, root) for frame in value], None
    if isinstance(value, list | tuple):
        return [image_of(frame, root) for frame in value], None
    if isinstance(value, str):
        local = value.removeprefix("file://")
        if local.lower().split("?")[0].endswith(FILES):
            raise _not_decoded(local)
        if root is not None and "\0" not in local and len(local) < 4096 and (root / local).is_dir():
            return _folder(local, root), None
    found = image_of(value, root)
    times = animation(found)
    if times is None:
        raise ImageError(f"{found}: one picture is no video; give a list of frames, a folder of frames or an animated "
                         "GIF or WebP. Of a video file extract frames: ffmpeg -i clip.mp4 -vf fps=2 clip/%05d.png")
    return [dataclasses.replace(found, frame=k) for k in range(len(times))], times


def _not_decoded(name: str) -> ImageError:
    stem = Path(name).stem
    return ImageError(f"{name!r} is a video file, which is not decoded here. Extract its frames once, ffmpeg -i {name} "
                      f"-vf fps=2 {stem}/%05d.png, and name the folder: {{\"video\": \"{stem}\", \"fps\": 2}}")


def _folder(name: str, root: Path) -> list[Image]:
    """Returns the pictures of a folder as frames, by name, numbers in names by their value. Raises ImageError."""
    folder = (root / name).resolve()
    if not folder.is_relative_to(root.resolve()):
        raise ImageError(f"{name!r}: lies outside data.image_root={root}; set it to a folder that holds all videos")
    names = [path.name for path in folder.iterdir() if path.suffix.lower() in SUFFIXES]
    if not names:
        raise ImageError(f"{name!r}: the folder holds no pictures ({', '.join(SUFFIXES)})")
    return [image_of(str(Path(name) / one), root) for one in sorted(names, key=_natural)]


def _natural(name: str) -> list[Any]:
    return [(0, int(part), part) if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]
