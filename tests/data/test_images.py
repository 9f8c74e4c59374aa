"""Images of rows: pixels as transformers' Pillow class makes them, forms of cells and messages, files that are no images."""

import base64
import dataclasses
import io
import itertools
import json
import re
import struct
import subprocess
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.tiers import first_cases
from PIL import GifImagePlugin, ImageOps
from PIL import Image as Pillow

from jaxrl.data.images import decode
from jaxrl.data.images.decode import Picture, animation, as_text, picture_of, pixels_of, png_of, size_of
from jaxrl.data.images.expand import GEMMA, QWEN, escape, expand, restore
from jaxrl.data.images.read import Image, ImageError, image_of, images_of, split_prompt
from jaxrl.data.images.resize import RULES, Rule, as_fields, join, rule_of
from jaxrl.data.images.store import Store
from jaxrl.data.sources import BadRows, DataError
from jaxrl.errors import ConfigError

LIMIT = 1 << 20
RNG = np.random.default_rng(0)


def array(height, width, channels=3):
    """Noise over a ramp: neither flat nor white."""
    ramp = np.linspace(0, 200, height * width * channels).reshape(height, width, channels)
    return (ramp + RNG.integers(0, 55, ramp.shape)).astype(np.uint8)


def encoded(pixels=None, kind="PNG", **options):
    out = io.BytesIO()
    image = pixels if isinstance(pixels, Pillow.Image) else Pillow.fromarray(array(20, 30) if pixels is None else pixels)
    image.save(out, kind, **options)
    return out.getvalue()


# -- pixels ----------------------------------------------------------------------------------------------------------


FILES = [("JPEG", {"quality": 90}), ("PNG", {}), ("WEBP", {"quality": 80}), ("PNG", {"mode": "L"}), ("JPEG", {"mode": "CMYK"}), ("BMP", {}),
         ("PNG", {"mode": "RGBA"}), ("GIF", {"mode": "P"}), ("JPEG", {"turned": 6}), ("WEBP", {"lossless": True})]


def theirs(rule: Rule):
    if rule.side:
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
        return Gemma3ImageProcessorPil(size={"height": rule.side, "width": rule.side}, resample=rule.resample, image_mean=list(rule.mean),
                                       image_std=list(rule.std), do_pan_and_scan=False)
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    return Qwen2VLImageProcessorPil(patch_size=rule.patch, merge_size=rule.merge, temporal_patch_size=rule.frames,
                                    min_pixels=rule.least, max_pixels=rule.most, image_mean=list(rule.mean), image_std=list(rule.std))


@first_cases(2, "family", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl"])
def test_pixels_and_grids_equal_transformers(family):
    """Every value, over sizes that shrink, grow and stay, at odd bounds, and their normalised values to fp32."""
    rule = rule_of(family, least=40 * 40, most=120 * 150)
    processor, values = theirs(rule), 0
    sizes = [*RNG.integers(5, 300, (60, 2)).tolist(), [9, 900], [900, 9], [rule.factor * 3, rule.factor * 2], [1, 2], [200, 1]]
    for height, width in sizes:
        pixels = array(height, width)
        own = picture_of(Image(pixels=pixels), rule, LIMIT)
        raw = processor(Pillow.fromarray(pixels), do_rescale=False, do_normalize=False, return_tensors="np")
        assert tuple(raw["image_grid_thw"][0]) == (1, *own.grid) == (1, *rule.grid(height, width))
        assert processor.get_number_of_image_patches(height, width) == len(own.patches) == rule.tokens(own.grid) * rule.merge**2
        want = raw["pixel_values"].reshape(len(own.patches), 3, rule.frames, rule.patch**2)
        assert np.array_equal(want, np.broadcast_to(own.patches.reshape(len(want), 3, 1, -1), want.shape))
        values += own.patches.size
    assert values > 1_000_000
    normal = processor(Pillow.fromarray(pixels), return_tensors="np")["pixel_values"].reshape(want.shape)[:, :, 0]
    ours = own.patches.reshape(len(want), 3, -1) / np.float32(255)
    ours = (ours - np.float32(rule.mean)[:, None]) / np.float32(rule.std)[:, None]
    np.testing.assert_allclose(ours, normal, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("family", [name for name, rule in RULES.items() if not rule.side])
def test_sizes_equal_transformers(family):
    """At the bounds of checkpoints: 2,000 sizes, those around every rounding of a side among them."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
    rule = RULES[family]
    edges = [(a, b) for a in range(rule.factor // 2, 40 * rule.factor, rule.factor // 2) for b in (1, rule.factor, 700, 4099)]
    for height, width in [*RNG.integers(1, 6000, (2000, 2)).tolist(), *edges]:
        if max(height, width) <= 200 * min(height, width):
            assert rule.size(height, width) == smart_resize(height, width, rule.factor, rule.least, rule.most)


@pytest.mark.full
@pytest.mark.parametrize("family", list(RULES))
def test_ten_million_pixels_equal_transformers(family):
    """At the published bounds, of files as cameras and web pages have them: 10,000,000 values or more per family, and none differs."""
    rule, rng, values, kinds = RULES[family], np.random.default_rng(43), 0, itertools.cycle(FILES)
    their_class = theirs(rule)
    while values < 10_000_000:
        height, width = (int(side) for side in rng.integers(20, 1300, 2))
        kind, options = next(kinds)
        coarse = Pillow.fromarray(rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3)).astype(np.uint8)).resize((width, height), 2)
        pixels = np.clip(np.asarray(coarse, int) + rng.integers(-20, 21, (height, width, 3)), 0, 255).astype(np.uint8)
        image = Pillow.fromarray(pixels).convert(options.get("mode", "RGB"))
        exif = image.getexif()
        exif[decode.ORIENTATION] = options.get("turned", 1)
        content = encoded(image, kind, **{name: v for name, v in options.items() if name in ("quality", "lossless")},
                          **({"exif": exif} if "turned" in options else {}))
        own = picture_of(Image(encoded=content), rule, 1 << 24)
        shown = ImageOps.exif_transpose(Pillow.open(io.BytesIO(content))).convert("RGB")
        raw = their_class(shown, do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"]
        if rule.side:
            want, got = raw[0].transpose(1, 2, 0), join(own.patches, own.grid, rule.merge)
        else:
            want, got = raw.reshape(len(own.patches), 3, rule.frames, -1), own.patches.reshape(len(own.patches), 3, 1, -1)
        assert not np.count_nonzero(want != got), (kind, height, width)
        values += own.patches.size


def test_a_checkpoint_says_how_its_images_are_made(tmp_path):
    file = tmp_path / "preprocessor_config.json"
    published = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
                 "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "processor_class": "Qwen3VLProcessor",
                 "image_processor_type": "Qwen2VLImageProcessorFast"}
    file.write_text(json.dumps(published))
    assert rule_of("qwen3_vl", tmp_path) == RULES["qwen3_vl"] == rule_of("qwen3_vl")
    file.write_text(json.dumps({"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "image_mean": [0.1, 0.2, 0.3], "resample": 3,
                                "rescale_factor": 0.00392156862745098, "do_resize": True}))
    found = rule_of("qwen2_5_vl", tmp_path)
    assert (found.least, found.most, found.mean) == (3136, 12845056, (0.1, 0.2, 0.3))
    for key, value in (("resample", 2), ("do_normalize", False), ("do_pad", True), ("sharpen", 3), ("patch_size", 0),
                       ("rescale_factor", 0.5), ("image_std", [0, 1, 1]), ("image_processor_type", "SiglipImageProcessor")):
        file.write_text(json.dumps({key: value}))
        with pytest.raises(ConfigError, match=key):
            rule_of("qwen3_vl", tmp_path)
    file.unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"patch_size": 8}, "processor_class": "X"}))
    assert rule_of("qwen3_vl", tmp_path).patch == 8
    theirs(rule := Rule(patch=4, least=64, most=1024)).save_pretrained(tmp_path)
    assert rule_of("qwen3_vl", tmp_path) == rule
    with pytest.raises(ConfigError, match="image_max_pixels"):
        rule_of("qwen3_vl", most=100)
    with pytest.raises(ConfigError, match="'llama'"):
        rule_of("llama")


def test_squares_equal_transformers(tmp_path):
    """Gemma 3's Pillow class: every pixel of images of many shapes, which all become one square, and what a checkpoint's
    file may say."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    tower = {"image_size": 112, "patch_size": 14, "mm_tokens_per_image": 4}
    file, size = tmp_path / "preprocessor_config.json", {"height": 112, "width": 112}
    published = {"do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True, "do_resize": True,
                 "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "Gemma3ImageProcessor", "image_seq_length": 256, "image_std": [0.5, 0.5, 0.5],
                 "pan_and_scan_max_num_crops": None, "processor_class": "Gemma3Processor", "resample": 2, "rescale_factor": 0.00392156862745098}
    file.write_text(json.dumps({**published, "size": {"height": 896, "width": 896}}))
    assert rule_of("gemma3", tmp_path) == RULES["gemma3"] == rule_of("gemma3")
    assert RULES["gemma3"].tokens(RULES["gemma3"].grid(30, 4000)) == 256
    file.write_text(json.dumps({**published, "size": size}))
    rule = rule_of("gemma3", tmp_path, tower=tower)
    assert rule == rule_of("gemma3", tower=tower) and (rule.side, rule.merge, rule.tokens(rule.grid(9, 9))) == (112, 4, 4)
    processor, values = Gemma3ImageProcessorPil(**published | {"size": size}), 0
    for height, width in [(112, 112), (1, 7), (5, 900), (900, 5), (200, 301), (640, 480), (113, 111), *RNG.integers(2, 400, (21, 2)).tolist()]:
        pixels = array(height, width)
        own = picture_of(Image(pixels=pixels), rule, LIMIT)
        raw = processor(Pillow.fromarray(pixels), do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"][0]
        assert np.array_equal(raw.transpose(1, 2, 0), join(own.patches, own.grid, rule.merge))
        values += own.patches.size
    assert values > 1_000_000
    as_written(file, rule)
    assert rule_of("gemma3", tmp_path, tower=tower) == rule
    for given, reason in (({"do_pan_and_scan": True}, "do_pan_and_scan=True"), ({"resample": 3}, "resample=3"), ({"patch_size": 14}, "patch_size"),
                          ({"size": {"height": 112, "width": 28}}, "squares"), ({"size": {"height": 28, "width": 28}}, "image_size=112"),
                          ({"image_processor_type": "SiglipImageProcessor"}, "image_processor_type")):
        file.write_text(json.dumps({**published, "size": size, **given}))
        with pytest.raises(ConfigError, match=reason):
            rule_of("gemma3", tmp_path, tower=tower)
    with pytest.raises(ConfigError, match="data.image_max_pixels=100: .* 112 x 112 pixels"):
        rule_of("gemma3", most=100, tower=tower)


def as_written(file, rule):
    """Writes what an export writes of a rule."""
    file.write_text(json.dumps(as_fields(rule)))


# -- files -----------------------------------------------------------------------------------------------------------


def png(*chunks):
    pieces = [struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(pieces)


def head(width, height):
    return b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)


def turned(kind, orientation, **options):
    exif = Pillow.Exif()
    exif[decode.ORIENTATION] = orientation
    return encoded(array(20, 30), kind, exif=exif, **options)


def late_exif():
    """A PNG that says behind its pixels how it is turned."""
    exif = Pillow.Exif()
    exif[decode.ORIENTATION] = 6
    whole, data = encoded(), exif.tobytes().removeprefix(b"Exif\0\0")
    return whole[:-12] + png((b"eXIf", data))[8:] + whole[-12:]


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1:]


SIXTEEN = Pillow.fromarray(RNG.integers(0, 65535, (20, 30)).astype(np.uint16))
GOOD = {  # file -> whether it is taller than wide
    "png": (encoded(), False), "jpeg": (encoded(kind="JPEG"), False), "webp": (encoded(kind="WEBP"), False), "bmp": (encoded(kind="BMP"), False),
    "gif": (encoded(kind="GIF"), False), "turned.jpeg": (turned("JPEG", 6), True), "turned.webp": (turned("WEBP", 8), True),
    "turned.png": (turned("PNG", 5), True), "mirrored.jpeg": (turned("JPEG", 2), False), "late.png": (late_exif(), True),
    "cmyk.jpeg": (encoded(Pillow.fromarray(array(20, 30)).convert("CMYK"), "JPEG"), False), "grey.png": (encoded(array(20, 30)[..., 0]), False),
    "alpha.png": (encoded(array(20, 30, 4)), False), "palette.png": (encoded(Pillow.fromarray(array(20, 30)).convert("P")), False),
    "sixteen.png": (encoded(SIXTEEN), False), "bits.png": (encoded(Pillow.fromarray(array(20, 30)).convert("1")), False),
    "tail.jpeg": (encoded(kind="JPEG") + b"\0" * 5000, False),
    "animated.gif": (encoded(kind="GIF", save_all=True, append_images=[Pillow.fromarray(array(20, 30))]), False),
    "no_trailer.gif": (encoded(kind="GIF")[:-1], False), "progressive.jpeg": (encoded(kind="JPEG", progressive=True), False),
}
BAD = {  # name -> (content, what the reason says, whether the header shows it)
    "empty.png": (b"", "no bytes|another format", True), "text.png": (b"hello", "another format", True),
    "page.jpeg": (b"<!doctype html><title>404</title>", "another format", True), "svg.png": (b"<svg xmlns='x'/>", "another format", True),
    "head.png": (encoded()[:20], "another format|cannot be read", True), "cut.png": (encoded(array(99, 99))[:9000], "truncated|cannot be read", True),
    "no_end.png": (png(head(20, 30), (b"IDAT", zlib.compress(b"\0" * 50))), "cannot be read", True),
    "cut.jpeg": (encoded(array(99, 99), "JPEG", quality=95)[:3000], "truncated", True),
    "cut.webp": (encoded(array(99, 99), "WEBP")[:2000], "cannot be read", True),
    "cut.bmp": (encoded(array(99, 99), "BMP")[:2000], "truncated|cannot be read", True),
    "cut.gif": (encoded(array(99, 99), "GIF")[:2000], "truncated|cannot be read", True),
    "huge.png": (png(head(60000, 60000), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")), "image_decode_limit|decompression bomb", True),
    "large.png": (png(head(2000, 2000), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")), "2000x2000 pixels, data.image_decode_limit=1048576", True),
    "zero.png": (png(head(0, 20), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")), "0x20|cannot be read", True),
    "one.png": (encoded(array(1, 1)), "1x1 pixels", True), "thin.png": (encoded(array(1, 201)), "201x1 pixels: one side is more than 200", True),
    "picture.tiff": (encoded(kind="TIFF"), "another format", True), "picture.ppm": (encoded(kind="PPM"), "another format", True),
    "picture.ico": (encoded(kind="ICO"), "another format", True), "picture.pdf": (encoded(kind="PDF"), "another format", True),
    "damaged.png": (flipped(encoded(array(99, 99)), 9000), "cannot be read", False),
    "garbage.png": (png(head(20, 30), (b"IDAT", b"no zlib data"), (b"IEND", b"")), "cannot be read", False),
    "few.png": (png(head(20, 30), (b"IDAT", zlib.compress(b"\0" * 50)), (b"IEND", b"")), "truncated|cannot be read", False),
}
CELLS = {  # cells without a usable file
    "nowhere.png": "no such file", "../outside.png": "lies outside data.image_root", "/etc/hostname": "outside|no such file",
    "link.png": "lies outside data.image_root", ".": "no such file", "https://example.com/a.png": "nothing is fetched",
    "file:///etc/hostname": "nothing is fetched", "data:image/png,abc": "only base64", "data:image/png;base64,@@": "base64 text of 2 characters",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    top = tmp_path_factory.mktemp("images")
    (top / "root").mkdir()
    (top / "outside.png").write_bytes(encoded())
    (top / "root" / "link.png").symlink_to(top / "outside.png")
    for name, content in {**GOOD, **BAD}.items():
        (top / "root" / name).write_bytes(content[0])
    return top / "root"


def transformers_pixels(source):
    from transformers.image_utils import load_image
    return np.asarray(load_image(source))


@pytest.mark.parametrize("name", GOOD)
def test_odd_files_are_read_as_transformers_reads_them(name, root, monkeypatch):
    """Upright pixels to the bit, and the size of the upright image without decoding it."""
    content, tall = GOOD[name]
    want = transformers_pixels(str(root / name))
    for image in (image_of(name, root), image_of(content, root)):
        assert np.array_equal(pixels_of(image, LIMIT), want)
    if name not in ("late.png", "no_trailer.gif", "tail.jpeg"):  # whose pixels are needed to be sure
        monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("pixels were decoded"))
    assert size_of(image_of(name, root), LIMIT) == want.shape[:2] == ((30, 20) if tall else (20, 30))


def test_bad_pictures_are_bad_rows(root):
    """32 kinds, each a row named by file, number and reason; in mode error the first one ends the run."""
    rule, cells = RULES["qwen3_vl"], {**{name: (reason, shown) for name, (_, reason, shown) in BAD.items()},
                                      **{name: (reason, True) for name, reason in CELLS.items()}}
    assert len(cells) >= 30
    for number, (cell, (reason, in_header)) in enumerate(cells.items(), 1):
        for form in (cell, BAD[cell][0]) if cell in BAD else (cell,):
            skip, strict = BadRows("skip"), BadRows("error")
            for bad in (skip, strict):
                try:
                    image, = images_of([form], root)
                    rule.size(*size_of(image, LIMIT))
                    assert not in_header, f"{cell}: nothing is wrong with its header"
                    picture_of(image, rule, LIMIT)
                except ImageError as e:
                    if bad is strict:
                        with pytest.raises(DataError, match=f"rows.parquet:{number}: .*data.bad_rows='skip'"):
                            bad.add(f"rows.parquet:{number}", str(e))
                    else:
                        bad.add(f"rows.parquet:{number}", str(e))
                        assert re.search(reason, str(e)), (cell, str(e))
            assert skip.count == 1, cell


def read_so_far():
    """Bytes that this process read from files."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def test_sizes_come_from_the_header(tmp_path):
    """Of a file of 40 MB, of which a few KB are read."""
    rows = RNG.integers(0, 256, (4000, 10001), np.uint8)
    file = tmp_path / "large.png"
    file.write_bytes(png((b"IHDR", struct.pack(">IIBBBBB", 10000, 4000, 8, 0, 0, 0, 0)),
                         *((b"IDAT", part.tobytes()) for part in np.array_split(rows, 40)), (b"IEND", b"")))
    before = read_so_far()
    assert size_of(image_of("large.png", tmp_path), 1 << 26) == (4000, 10000)
    assert file.stat().st_size > 4e7 and read_so_far() - before < 1e6


def test_arrays_in_memory():
    grey, alpha = array(8, 9)[..., 0], array(8, 9, 4)
    assert np.array_equal(pixels_of(image_of(grey, None), LIMIT), np.stack([grey] * 3, -1))
    assert np.array_equal(pixels_of(image_of(alpha, None), LIMIT), alpha[..., :3])
    assert size_of(image_of(grey, None), LIMIT) == (8, 9)
    with pytest.raises(ImageError, match="image_decode_limit=50"):
        pixels_of(image_of(grey, None), 50)
    for wrong in (grey.astype(np.float32), array(8, 9, 2), grey[0], 7, object()):
        with pytest.raises(ImageError, match="expected"):
            image_of(wrong, None)


# -- forms -----------------------------------------------------------------------------------------------------------


def test_every_form_of_a_cell_is_the_same_picture(root):
    content = GOOD["png"][0]
    text = base64.b64encode(content).decode()
    forms = [content, bytearray(content), "png", {"path": "png"}, {"bytes": content, "path": None}, {"bytes": content, "path": "gone.png"},
             f"data:image/png;base64,{text}", text, "\n".join([text[:60], text[60:]]), Pillow.open(io.BytesIO(content)),
             np.asarray(Pillow.open(io.BytesIO(content)))]
    digests = {picture_of(image_of(form, root), RULES["qwen3_vl"], LIMIT).digest for form in forms}
    assert len(digests) == 1
    assert images_of(None, root) == [] and len(images_of(forms[0], root)) == 1 and len(images_of(forms, root)) == len(forms)
    with pytest.raises(ImageError, match="a table with format"):
        image_of({"bytes": None, "format": "png"}, root)


def parts(prompt, column, root=None):
    messages, images = split_prompt(prompt, column, "<image>", root)
    return ["".join("#" if part["type"] == "image" else part["text"] for part in message["content"]) for message in messages], images


def test_markers_and_parts_take_the_columns_images():
    a, b = Image(encoded=b"a"), Image(encoded=b"b")
    typed = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x", "image": None}, {"type": "image"},
                                                                          {"type": "text", "text": "y<image>"}]}]
    assert parts(typed, [a, b]) == (["s", "x#y#"], [a, b])
    assert parts("one <image> and <image>.", [a, b]) == (["one # and #."], [a, b])
    assert parts("how many?", [a, b]) == (["##how many?"], [a, b])
    assert parts([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], [a]) == (["s", "#u"], [a])
    own = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, {"type": "text", "text": "t"},
                                        {"type": "image", "image": b"x"}, {"type": "image"}]}]
    shown, images = parts(own, [a])
    assert shown == ["#t##"] and [image.encoded for image in images] == [b"\0\0\0", b"x", b"a"]
    assert split_prompt("plain", [], "<image>", None) == ("plain", [])


@pytest.mark.parametrize("prompt, count, reason", [
    ("<image>", 2, "1 markers .* for 2 images"), ("<image><image>", 1, "more markers"), ("<image>", 0, "more markers"),
    ([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}], 0, "'video'"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}], 0, "nothing is fetched"),
    ([{"role": "user", "content": ["text"]}], 0, "part of type None"), ([{"content": "x"}], 0, "message 0")])
def test_wrong_forms_are_named(prompt, count, reason):
    with pytest.raises(ValueError, match=reason):
        split_prompt(prompt, [Image(encoded=b"a")] * count, "<image>", None)


# -- tokens ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = ["<unk>", *QWEN, "a", "b", ":", " ", "\n", "<", ">"]
    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>", additional_special_tokens=list(QWEN))
    fast.chat_template = ("{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
                          "{% if p.type == 'image' %}" + QWEN.text + "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}")
    return fast


def test_image_tokens_are_a_table(tokenizer):
    """Ids and places as transformers expands them, and a user's own image token stays one token of text."""
    pad = tokenizer.convert_tokens_to_ids(QWEN.pad)
    prompt = [{"role": "a", "content": f"a{QWEN.pad}b<image>a"}, {"role": "b", "content": [{"type": "image"}, {"type": "text", "text": QWEN.text}]}]
    messages, images = split_prompt(prompt, [Image(encoded=b"")] * 2, "<image>", None)
    escaped = escape(messages, QWEN)
    rendered = tokenizer.apply_chat_template(escaped.messages, tokenize=False)
    text, marks = restore(rendered, escaped.stand_ins, QWEN, len(images))
    assert marks == [False, True, True, False]
    ids, firsts = expand(tokenizer(text, add_special_tokens=False)["input_ids"], marks, [3, 2], [pad])
    pieces = text.split(QWEN.pad)  # as transformers: the text is expanded, then tokenised
    want = tokenizer("".join(piece + QWEN.pad * n for piece, n in zip(pieces, (1, 3, 2, 1, 0), strict=True)), add_special_tokens=False)
    assert ids == want["input_ids"] and [ids[f - 1] for f in firsts] == [tokenizer.convert_tokens_to_ids(QWEN.start)] * 2
    assert all(ids[f:f + n] == [pad] * n and ids[f + n] != pad for f, n in zip(firsts, (3, 2), strict=True))
    with pytest.raises(ImageError, match="writes 0 of 1 images"):
        restore("a:b", escaped.stand_ins, QWEN, 1)
    with pytest.raises(ImageError, match="makes 0 image tokens"):
        expand([4, 5], [True], [1], [pad])


GEMMA_TEMPLATE = ("{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
                  "{% if p.type == 'image' %}<start_of_image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}")


def test_a_marker_becomes_the_whole_image():
    """Gemma 3: ids as those of the text that transformers' processor writes, its newlines merged with a text's; a user's
    own marker and image token are text."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = ["<unk>", "<start_of_image>", "<image_soft_token>", "<end_of_image>", "\n", "\n\n", "\n\n\n", "\n\n\n\n", "a", "b", ":", "x"]
    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>", additional_special_tokens=words[1:4])
    fast.chat_template = GEMMA_TEMPLATE
    user = f"a{GEMMA.pad}b<start_of_image>x\n"
    parts = [{"type": "text", "text": user}, {"type": "image"}, {"type": "image"}]
    prompt = [{"role": "a", "content": parts}, {"role": "b", "content": "\n<image>a"}]
    messages, images = split_prompt(prompt, [Image(encoded=b"")] * 3, "<image>", None)
    escaped = escape(messages, GEMMA)
    text, marks = restore(fast.apply_chat_template(escaped.messages, tokenize=False), escaped.stand_ins, GEMMA, len(images))
    assert marks == [False, True, True, True] and text.startswith(f"a:{user}\n\n<start_of_image>")
    pad = fast.convert_tokens_to_ids(GEMMA.pad)
    ids, firsts = expand(fast(text, add_special_tokens=False)["input_ids"], marks, [4] * 3, [pad])
    whole = f"\n\n<start_of_image>{GEMMA.pad * 4}<end_of_image>\n\n"
    want = fast(f"a:{user}{whole}{whole}\nb:\n{whole}a\n", add_special_tokens=False)["input_ids"]
    assert ids == want and all(ids[f - 1] == 1 and ids[f:f + 5] == [2, 2, 2, 2, 3] for f in firsts) and ids.count(6) == 3
    with pytest.raises(ImageError, match="writes 0 of 1 images.*one that writes <start_of_image>"):
        restore("a:b", escaped.stand_ins, GEMMA, 1)


# -- the store -------------------------------------------------------------------------------------------------------


def test_the_store_makes_each_picture_once_and_is_bounded():
    made, gate = [], threading.Barrier(2, timeout=30)

    def make(key):
        if key in ("left", "right"):
            gate.wait()  # passes only where two are made at once
        if key == "bad":
            raise ImageError("broken")
        made.append(key)
        return Picture(b"", (1, 1), (1, 1), np.zeros((1, 100), np.uint8))

    store = Store(350, 2, make)
    store.get(["left", "right"])
    assert [p.patches.nbytes for p in store.get([1, 2, 1])] == [100] * 3 and made.count(1) == 1
    for _ in range(2):
        with pytest.raises(ImageError, match="broken"):
            store.get([3, "bad"])
    assert made.count(3) == 1 and store._bytes <= 350 and len(store._kept) == 3 == store._bytes // 100
    before = len(made)
    store.get([3])
    assert len(made) == before
    store.close()


def test_one_file_imports_pillow_and_only_where_an_image_is_opened():
    import jaxrl
    root = Path(jaxrl.__file__).parent
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if re.search(r"(from|import) PIL", path.read_text("utf-8"))}
    assert found == {"data/images/decode.py"}
    code = "import sys, jaxrl.data.images.decode, jaxrl.data.images.store; sys.exit('PIL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- Pillow images in memory -------------------------------------------------------------------------------------------


def animated(kind="GIF", count=4):
    """(a Pillow animation in memory, its frames [H, W, 3]); two neighbours are equal."""
    frames = [Pillow.fromarray(np.full((12, 16, 3), shade, np.uint8)) for shade in (10, 90, 90, 200)[:count]]
    out = io.BytesIO()
    lossless = {"lossless": True} if kind == "WEBP" else {}
    durations = [40, 70, 110, 250][:count]
    frames[0].save(out, kind, save_all=True, append_images=frames[1:], duration=durations, **lossless)
    return Pillow.open(io.BytesIO(out.getvalue()))


def test_threads_see_the_frame_that_they_ask_for():
    """A Pillow object shows one frame at a time: each reader seeks its own, also the first, and others wait."""
    moving = animated()
    frames = [Image(pixels=moving, frame=number) for number in range(moving.n_frames)]
    want = [pixels_of(frame, LIMIT) for frame in frames]
    assert len({one.tobytes() for one in want}) == len({frame.content for frame in frames}) == len(frames)
    assert np.array_equal(pixels_of(frames[0], LIMIT), want[0]) and moving.seek(1) is None
    contents, file = [frame.content for frame in frames], png_of(frames[0])
    assert np.array_equal(np.asarray(Pillow.open(io.BytesIO(file)).convert("RGB")), want[0])
    with ThreadPoolExecutor(8) as threads:
        numbers = [number % len(frames) for number in range(200)]
        assert all(threads.map(lambda n: np.array_equal(pixels_of(frames[n], LIMIT), want[n]), numbers))
        assert list(threads.map(lambda n: frames[n].content, numbers)) == [contents[n] for n in numbers]


def test_pictures_of_other_shapes_and_palettes_have_other_fingerprints():
    pixels, turned = array(8, 12), Pillow.Exif()
    turned[0x0112] = 6
    palettes = [Pillow.fromarray(array(8, 12)[..., 0]).convert("P") for _ in range(2)]
    palettes[1].putpalette([255 - k for k in range(256) for _ in range(3)])
    upright, sideways = (Pillow.fromarray(pixels) for _ in range(2))
    sideways.info["exif"] = turned.tobytes()
    shown = [pixels, pixels.reshape(12, 8, 3), pixels.reshape(8, 36), *palettes, upright, sideways]
    assert len({image_of(one, None).content for one in shown}) == len(shown)
    assert image_of(pixels.copy(), None).content == image_of(pixels, None).content


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animations_in_memory_become_text_with_every_frame(kind):
    """As data.cache stores them: pixels and times of each frame."""
    moving = animated(kind)
    if kind == "GIF":  # Pillow wrote equal neighbours as one
        moving = Pillow.open(io.BytesIO(equal_frames()))
    given, read = image_of(moving, None), image_of(as_text(moving), None)
    times = animation(given)
    assert len(times) >= 3 and animation(read) == pytest.approx(times)
    for number in range(len(times)):
        one, other = (pixels_of(dataclasses.replace(image, frame=number), LIMIT) for image in (given, read))
        assert np.array_equal(one, other)
    assert size_of(read, LIMIT) == (12, 16)


def equal_frames():
    """A GIF with two equal frames, which Pillow would write as one."""
    out = io.BytesIO()
    first, last = (Pillow.fromarray(np.full((12, 16, 3), shade, np.uint8)).quantize() for shade in (10, 200))
    for data in GifImagePlugin.getheader(first)[0]:
        out.write(data)
    for one in (first, first, last):
        for data in GifImagePlugin.getdata(one, include_color_table=True, duration=70):
            out.write(data)
    return out.getvalue() + b";"
