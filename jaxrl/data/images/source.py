"""The images of a job: those of its rows, found when a row is read, sized from file headers, decoded when a step takes
the row; and those that environments show, which come as files and are kept as long as their turns."""

from __future__ import annotations

import base64
import hashlib
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl.config import lengths
from jaxrl.data.chat_template import PromptError
from jaxrl.data.images.decode import Picture, picture_of_frames, pixels_of, png_of, size_of, together
from jaxrl.data.images.expand import TOKENS, Tokens, escape, expand, restore
from jaxrl.data.images.read import VALUES, Image, ImageError, image_of, images_of, split_prompt
from jaxrl.data.images.resize import rule_of
from jaxrl.data.images.store import Store
from jaxrl.data.images.video import Clip, Sampling, Video, sampling_of, video_of, videos_of
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.types import Pictures, Places

COLUMN, SINGLE = "images", "image"  # the column that is read where the other is missing
VIDEO_COLUMN, ONE_VIDEO = "videos", "video"
OF_NUMBER, OF_ROW = 12, 32  # bits of a picture's number that say which one of its row it is, and which row
KEPT_BYTES = 1 << 30  # of pictures in host memory
BLANK = 1 << 62  # added to a picture's number: a grey picture of its size
SHOWN = 1 << 61  # in the number of a picture that an environment shows, which is a hash of its file
GREY = 128


class RowImages(NamedTuple):
    """The pictures of a row, unread.

    Attributes:
      images: its images, and the groups of frames of its videos.
      marks: for each image or video token in the prompt's rendered text whether it is a picture's; else it is text.
      tokens: what the model's family writes for an image."""

    images: list[Image | Clip]
    marks: list[bool]
    tokens: Tokens


class ImageSource:
    """Finds, sizes and makes the images of data rows.

    A picture's number names the data set, the row and the image in the row. So nothing of an image is kept but a
    bounded number of made pictures, and every process can make those of its rows. The number of a picture that an
    environment shows is a hash of its file, which whoever uses the number keeps (`hold`).

    Args:
      config: of the job: options `data.image_*`, `data.video_*`, data.max_images and data.workers; data.overlong_*, env
        and run.recipe decide what is refused.
      model_type: of config.json, the family's name there.
      tokenizer: whose image token must be one token.
      folder: of the checkpoint, whose preprocessor_config.json is read; None: the family's defaults.
      tower: vision_config of its config.json.
      refused: option whose value does not allow images, as "run.recipe=dpo"; "" if they are allowed.

    Attributes:
      used: whether a row with images was read. videos: whether one with a video was.
      rule: the resize.Rule. sampling: the video.Sampling, None if the family reads no videos. tokens: what the family
        writes for an image.
      frames: that a patch holds: 1 in a job without videos.
      merge: patches per side of an image token. width: numbers of a patch. mean, std: of its pixels.
      window: image tokens per side of the tower's windows, 0 = it has none; two_way: whether the tokens of an image see
        each other; both set by run.data.with_tower.

    Raises ConfigError as resize.rule_of and video.sampling_of.
    """

    def __init__(self, config, model_type: str, tokenizer, folder: Path | None = None, tower: dict | None = None,
                 refused: str = ""):
        data, self.refused, self.used = config.data, refused, False
        self.rule = rule_of(model_type, folder, data.image_min_pixels, data.image_max_pixels, tower)
        self.sampling = sampling_of(data, model_type, self.rule, folder, tower)
        self.tokens, self.tokenizer, self.videos = TOKENS[model_type], tokenizer, False
        if not self._is_token(self.tokens.video):
            self.tokens = self.tokens._replace(video="")
        self.video_column, self.no_videos = data.video_column, _without_videos(config, self.sampling, self.tokens)
        self.column, self.marker, self.root = data.image_column, data.image_marker, data.image_root
        self.most, self.limit = data.max_images, data.image_decode_limit
        self.cuts = [f"data.{name}={data[name]}" for name, bad in (
            ("overlong_prompt", "truncate_left"), ("overlong_completion", "split")) if data[name] == bad]
        self.merge, self.window, self.two_way = self.rule.merge, 0, False
        self.mean, self.std = self.rule.mean, self.rule.std
        self._sets: list = []
        self._held = weakref.WeakValueDictionary[int, Image]()
        self._store = Store(KEPT_BYTES, data.workers, self._make)

    @property
    def frames(self) -> int:
        """Frames that a patch holds: 1 until a video is read, then the rule's."""
        return self.rule.frames if self.videos else 1

    @property
    def width(self) -> int:
        """Numbers of a patch, uint8: 3 channels x frames x patch side^2."""
        return 3 * self.frames * self.rule.patch**2

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that may hold images."""
        return (self.column, SINGLE) if self.column == COLUMN else (self.column,)

    @property
    def video_columns(self) -> tuple[str, ...]:
        """Names of the columns that may hold videos; () if the family reads none, or data.video_column is ''."""
        if not self.video_column or self.sampling is None:
            return ()
        return (VIDEO_COLUMN, ONE_VIDEO) if self.video_column == VIDEO_COLUMN else (self.video_column,)

    def column_of(self, row: dict) -> str:
        """Returns the name of the column that holds a row's images; data.image_column if none does."""
        return next((name for name in self.columns if row.get(name) is not None), self.column)

    def register(self, dataset) -> int:
        """Returns the number of a data set, which becomes a part of its pictures' numbers; its `tables` and `reader`
        make its pictures later."""
        self._sets.append(dataset)
        return len(self._sets) - 1

    # ---- while a row is read

    def split(self, row: dict, prompt, where: str) -> tuple[Any, list[Image | Video]]:
        """Returns (prompt, its images and videos, unread): messages whose contents are text, or lists of text, image
        and video parts where a message has an image or a video; the prompt as it is where there is none.

        where: place of the row, "file:line", to whose folder paths are relative without data.image_root; those of
        rows from Python, "data[3]", to the working directory. Raises PromptError for what cannot be used,
        ConfigError where the options do not allow images.
        """
        if not isinstance(prompt, str | list):
            return prompt, []
        root = Path(self.root) if self.root else _folder(where)
        column = self.column_of(row)
        shown = next((row[name] for name in self.video_columns if row.get(name) is not None), None)
        try:
            messages, found = split_prompt(prompt, images_of(row.get(column), root), self.marker, root,
                                           videos_of(shown, root), None if self.sampling is None else video_of)
        except ImageError as e:
            if row.get(column) is not None or "more markers" not in str(e):
                raise
            raise ImageError(f"{e}; the row has no column {' or '.join(map(repr, self.columns))} "
                             f"(data.image_column); columns found: {', '.join(map(str, row))}") from None
        if not found:
            return prompt, []
        self._check(messages, found)
        return [_joined(message) for message in messages], found

    def _check(self, messages, found) -> None:
        if self.refused:
            raise ConfigError(f"the data holds images, and {self.refused} does not train on images yet; change "
                              "it, or leave images out with data.image_column='' and prompts without image parts")
        if self.cuts:
            raise ConfigError(f"{self.cuts[0]} could cut the data's images in two; choose another policy")
        if len(found) > self.most:
            raise ImageError(f"{len(found)} images, data.max_images={self.most}")
        for number, message in enumerate(messages):
            if message["role"] == "assistant" and any(part["type"] != "text" for part in message["content"]):
                raise ImageError(f"message {number} (assistant) holds an image: models write text alone")
        self.use("the data holds images")
        if any(isinstance(one, Video) for one in found):
            self.use_videos()

    def use(self, why: str) -> None:
        """Declares that the job has images. Raises ConfigError for a tokenizer without an image token. why: begin of
        its message."""
        if not self._is_token(self.tokens.pad):
            raise ConfigError(f"{why}, and {self.tokens.pad!r} is not one token of the tokenizer; give "
                              "model.tokenizer, that of a model with a tower for images")
        self.used = True

    def use_videos(self) -> None:
        """Declares that the job has videos. Raises ConfigError naming what does not read them."""
        if self.no_videos:
            raise ConfigError(f"the data holds videos, and {self.no_videos}; data.video_column='' and prompts without "
                              "video parts leave them out")
        self.videos = True

    def _is_token(self, text: str) -> bool:
        token = self.tokenizer.convert_tokens_to_ids(text) if text else None
        return token is not None and self.tokenizer(text, add_special_tokens=False)["input_ids"] == [token]

    def flat(self, found: list[Image | Video]) -> list[Image | Clip]:
        """Returns the pictures of a prompt: its images, and of each video the groups of frames that are taken. Raises
        ImageError for more than fit into a picture's number (1 << OF_NUMBER)."""
        out = []
        for one in found:
            out += self.sampling.clips(one)[0] if isinstance(one, Video) and self.sampling else [one]
        if len(out) > 1 << OF_NUMBER:
            raise ImageError(f"videos of {len(out)} groups of frames, at most {1 << OF_NUMBER} are read; lower "
                             "data.video_max_frames")
        return out

    def rendered(self, images: list[Image | Video], messages, render) -> tuple[str, RowImages]:
        """Returns (the text of a prompt, its RowImages).

        Args:
          images: of the prompt, and of the messages after it where those are trained on.
          messages: of `split`.
          render: messages -> text, as the chat template writes it.

        Raises ImageError if the template does not write every image and every video once, PromptError as expand.escape,
        and what `render` raises.
        """
        clean = escape(messages, self.tokens)
        parts = [part["type"] for m in messages if isinstance(m["content"], list) for part in m["content"]]
        videos = [one for one in images if isinstance(one, Video)]
        text, marks = restore(render(clean.messages), clean.stand_ins, self.tokens, parts.count("image"),
                              [self._video_text(one) for one in videos])
        return text, RowImages(self.flat(images), marks, self.tokens)

    def written(self, parts: list[dict]) -> str:
        """Returns a message's parts as one text, with what a chat template writes for an image or a video. parts: of a
        message of `split`."""
        own = self.tokens
        pictures = {"image": own.marker or own.text, "video": own.start + own.video + own.end}
        return "".join(pictures.get(part["type"]) or part["text"] for part in parts)

    def _video_text(self, video: Video) -> str:
        """Returns what the token of a video becomes, with one for each group of frames."""
        assert self.sampling is not None
        own, (_, times) = self.tokens, self.sampling.clips(video)
        if not self.sampling.whole:
            return own.video * len(times)
        return "".join(f"<{time:.1f} seconds>{own.start}{own.video}{own.end}" for time in times)

    def grids(self, found: RowImages) -> np.ndarray:
        """Returns of a row's pictures [I, 3] int64: rows and columns of patches, from their headers, and the delay of a
        group of frames (Clip.delay; of an image -1). Raises ImageError for a file that cannot be used, and for frames
        of one video with different sizes. found: the row's pictures, unread."""
        out, seen = [], {}
        for image in found.images:
            if isinstance(image, Clip):
                for frame in (image.first, *image.frames):
                    if frame not in seen:
                        seen[frame] = size_of(frame, self.limit)
                    _check_equal(seen[image.first], seen[frame], frame)
                out.append((*self._grid(image, *seen[image.first]), image.delay))
            else:
                out.append((*self._grid(image, *size_of(image, self.limit)), -1))
        return np.array(out, np.int64).reshape(-1, 3)

    def _size(self, image: Image | Clip, height: int, width: int) -> tuple[int, int]:
        if isinstance(image, Clip) and self.sampling is not None:
            return self.sampling.size(height, width, image.count)
        return self.rule.size(height, width)

    def _grid(self, image: Image | Clip, height: int, width: int) -> tuple[int, int]:
        new = self._size(image, height, width)
        return new[0] // self.rule.patch, new[1] // self.rule.patch

    def expand(self, ids: list[int], found: RowImages, grids) -> tuple[list[int], list[int]]:
        """Returns (ids with an image token for each feature, index of each image's first token).

        Args:
          ids: of the rendered prompt, with one image token per picture.
          found: the row's pictures. grids: [I, 3] of `grids`, or more: those of later messages are left out.

        Raises ImageError if the tokenizer does not make one id of each image token."""
        counts = [self.rule.tokens(tuple(grid)) for grid in grids[:sum(found.marks)]]
        return expand(ids, found.marks, counts, [self.tokenizer.convert_tokens_to_ids(pad) for pad in self.tokens.pads])

    # ---- while an episode is played

    def shown(self, messages: list[dict]) -> tuple[list[dict], list[Image | None]]:
        """Returns (messages of an environment, with contents that are text or lists of text and image parts; their
        images in order, None where a part brings none, which stands for the next image of the row).

        Paths are relative to data.image_root; without it they are refused. Raises ImageError for parts in no known
        form, an image that cannot be used or is an assistant's, and more than data.max_images.
        """
        root, out, found = Path(self.root) if self.root else None, [], []
        for message in messages:
            content = message.get("content")
            if not isinstance(content, list):
                out.append(message)
                continue
            parts = []
            for part in content:
                kind = part.get("type", "text") if isinstance(part, dict) else None
                if kind == "text" and isinstance(part.get("text"), str):
                    parts.append({"type": "text", "text": part["text"]})
                elif kind in ("image", "image_url"):
                    value = next((part[name] for name in VALUES if part.get(name) is not None), None)
                    value = value.get("url", value) if isinstance(value, dict) else value
                    found.append(None if value is None else image_of(value, root))
                    parts.append({"type": "image"})
                else:
                    raise ImageError(f"a message of the role {message.get('role')} has a part of type {kind!r}: text "
                                     "and images are read")
            if message.get("role") == "assistant" and any(part["type"] == "image" for part in parts):
                raise ImageError("a message of the role assistant holds an image: models write text alone")
            out.append({**message, "content": parts})
        if len(found) > self.most:
            raise ImageError(f"{len(found)} images at once, data.max_images={self.most}")
        return out, found

    def hold(self, image: Image, grey: bool = False) -> tuple[int, Image]:
        """Returns (number of a picture that an environment shows, what the caller keeps as long as it uses the number).

        Only a weak reference is kept here: the picture cannot be made once nobody holds the second value.

        image: a file, or its bytes; an image in memory fails an assertion. grey: the number of a grey picture of its
        size. Raises OSError for a file that cannot be read.
        """
        encoded = image.encoded if image.path is None else image.path.read_bytes()
        assert encoded is not None, "an image in memory has a file first, see jaxrl.envs.pictures"
        number = SHOWN | int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little") % SHOWN
        held = self._held.setdefault(number, Image(encoded=encoded))
        return number | BLANK * grey, held

    def grid(self, number: int) -> tuple[int, int]:
        """Returns the (rows, columns) of patches of a picture that is held, which is made now. Raises ImageError if it
        cannot be, KeyError if nobody holds it any more. number: of `hold`."""
        return self._store.get([number])[0].grid

    def places_of(self, images) -> Places | None:
        """Returns the Places of a sequence's images; None without images.

        images: with the fields of rollout.TurnImage; pictures that they hold (`held`) are kept by the Places."""
        if not images:
            return None
        kept = tuple(self.hold(image.held)[1] for image in images if image.held is not None)
        firsts, numbers = (np.array([getattr(i, name) for i in images], np.int64) for name in ("first", "number"))
        return Places(firsts, np.array([image.grid for image in images], np.int64), numbers, kept)

    def pictures(self, places: list[Places | None]) -> Pictures | None:
        """Returns the images of sequences, in their order; None if there is none. places: of each sequence."""
        return Pictures.of(places, self)

    # ---- while a step is made

    def places(self, number: int, row: int, firsts, grids) -> Places:
        """Returns the Places of a row's images.

        Args:
          number: of its data set, see `register`. row: its number there.
          firsts: [I] index of each picture's first token. grids: [I, 3] rows and columns of patches and delays, as
            `grids` returns them; Places.delays is -1 where they are negative, None if all are."""
        numbers = (((number << OF_ROW) + row) << OF_NUMBER) + np.arange(len(firsts))
        grids, delays = np.asarray(grids, np.int64)[:, :2], np.maximum(np.asarray(grids, np.int64)[:, 2], -1)
        return Places(np.asarray(firsts, np.int64), grids, numbers, delays=delays if (delays >= 0).any() else None)

    def patches(self, numbers) -> list[np.ndarray]:
        """Returns the [N, width] uint8 patches of each picture, in the order of `numbers`. Raises RunStopped for one of
        a row that cannot be decoded any more, or has another grid than when the data was prepared; for one that an
        environment shows ImageError if it cannot be decoded, KeyError if nobody holds it any more."""
        return [picture.patches for picture in self._store.get([int(n) for n in numbers])]

    def row_files(self, places: Places | None) -> RowFiles:
        """Returns the files and sizes of a row's images, which are read when they are asked for; never grey ones.
        places: of the row's images, None without any."""
        return RowFiles(self, [] if places is None else (places.numbers & ~BLANK).tolist())

    def _image(self, number: int) -> Image | Clip:
        """Returns an image of a row, unread."""
        dataset, row, place = self._place(number)
        raw, where = dataset.tables[row]
        return dataset.reader.images_in(raw, where)[place]

    def _place(self, number: int) -> tuple[Any, int, int]:
        """Returns (the data set of a picture, the number of its row, its place in the row)."""
        row = number >> OF_NUMBER
        return self._sets[row >> OF_ROW], row & (1 << OF_ROW) - 1, number & (1 << OF_NUMBER) - 1

    def sizes(self, number: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns ((height, width) of an image of a row as it is stored, (height, width) as the model sees it), in
        pixels; of a group of frames those of its first frame. Raises ImageError. number: of the picture."""
        image = self._image(number)
        stored = size_of(_first(image), self.limit)
        return stored, self._size(image, *stored)

    def file(self, number: int) -> bytes:
        """Returns the file of an image of a row, of a group of frames that of the first; of one in memory, and of a
        frame of an animation after the first, as PNG. number: of the picture. Raises OSError or ImageError if it cannot
        be read."""
        image = _first(self._image(number))
        if image.frame:
            image = Image(pixels=pixels_of(image, self.limit))
        if image.path is not None:
            return image.path.read_bytes()
        return image.encoded if image.encoded is not None else png_of(image)

    def _make(self, number: int) -> Picture:
        if number & SHOWN:
            picture = self._picture(self._held[number & ~BLANK])
            return _grey(picture) if number & BLANK else picture
        dataset, row, place = self._place(number & ~BLANK)
        raw, where = dataset.tables[row]
        try:
            image = dataset.reader.images_in(raw, where)[place]
            picture = self._picture(image)
        except PromptError as e:
            raise RunStopped(f"{where}: an image that was whole when the data was prepared cannot be used: {e}; take "
                             "the row out of the data") from None
        if picture.grid != (expected := dataset.grid_of(row, place)):
            raise RunStopped(f"{where}: {image} has {picture.grid} patches and had {expected} when the data was "
                             "prepared; start again, without changing images meanwhile")
        return _grey(picture) if number & BLANK else picture

    def _picture(self, image: Image | Clip) -> Picture:
        frames = image.frames if isinstance(image, Clip) else (image,)
        picture = picture_of_frames(frames, self.rule, self.limit, lambda *stored: self._size(image, *stored))
        if len(frames) < self.frames:  # an image beside videos
            return picture._replace(patches=together([picture.patches] * self.frames))
        return picture

    def close(self) -> None:
        """Stops the threads, as Store.close."""
        self._store.close()


class RowFiles(NamedTuple):
    """The images of a row as reward workers get them. source: reads them. numbers: of its pictures."""

    source: ImageSource
    numbers: list[int]

    def sizes(self) -> list:
        """Returns of each image (stored, seen), each (height, width) in pixels; stored upright."""
        return [self.source.sizes(number) for number in self.numbers]

    def files(self) -> list[str]:
        """Returns each image's file as base64 text."""
        return [base64.b64encode(self.source.file(number)).decode() for number in self.numbers]


def _first(image: Image | Clip) -> Image:
    return image.frames[0] if isinstance(image, Clip) else image


def _check_equal(first: tuple[int, int], size: tuple[int, int], frame: Image) -> None:
    """Raises ImageError for a frame of another size than its video's first."""
    if size != first:
        one, two = (f"{width}x{height}" for height, width in (first, size))
        raise ImageError(f"{frame}: a frame of {two} pixels in a video whose first has {one}; give all one size")


def _without_videos(config, sampling: Sampling | None, tokens: Tokens) -> str:
    """Returns what of a job does not read videos, in words; "" if everything does."""
    if sampling is None:
        return "the model's family reads none"
    if not tokens.video:
        return "'<|video_pad|>' is not one token of the tokenizer: give model.tokenizer, that of a model for videos"
    if lengths.episodes(config):
        return "episodes (env.*) do not read them yet"
    if config.run.recipe == "sft" and config.data.train_turns == "all":
        return "data.train_turns='all' does not read them yet"
    if config.run.recipe not in ("sft", "rl"):
        return f"run.recipe={config.run.recipe!r} does not read them yet"
    return ""


def _grey(picture: Picture) -> Picture:
    return picture._replace(patches=np.full_like(picture.patches, GREY))


def _joined(message: dict) -> dict:
    """Returns a message with its content as text, unless it holds an image."""
    parts = message["content"]
    if any(part["type"] != "text" for part in parts):
        return message
    return {**message, "content": "".join(part["text"] for part in parts)}


def _folder(where: str) -> Path | None:
    """Returns the folder of the file that a row's place "file:line" names, of a row from Python the working directory;
    None if the place is no local file or folder."""
    path = Path(where.rpartition(":")[0])  # "" = here
    return path if path.is_dir() else path.parent if path.is_file() else None
