"""Rows with images: every form gives the same ids and pixels, a cache gives them again, and what cannot be used is named."""

import io
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.data_cases import make_tokenizer
from PIL import Image as Pillow

from jaxrl.config import default_config
from jaxrl.data import load_eval_sets, load_tokenizer, load_train
from jaxrl.data.images.controls import CONTROLS
from jaxrl.data.images.decode import picture_of
from jaxrl.data.images.read import Image
from jaxrl.data.images.source import ImageSource
from jaxrl.data.sources import DataError
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.recipes.sft import demonstrations
from jaxrl.resolve.spec import resolve
from jaxrl.run.data import check_column, open_images

TOWER = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
MODEL = {"model_type": "qwen3_vl_text"}
SHAPES = "jaxrl://shapes"


def picture(number, height=16, width=24):
    return np.random.default_rng(number).integers(0, 255, (height, width, 3)).astype(np.uint8)


def png(pixels):
    out = io.BytesIO()
    Pillow.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def config(path=(), recipe="sft", **options):
    c = default_config()
    c.run.recipe, c.model.tokenizer, c.data.path = recipe, f"{SHAPES}/tokenizer", tuple(map(str, path))
    c.data.image_min_pixels, c.data.image_max_pixels = 64, 1024
    c.data.max_prompt_tokens, c.rollout.max_new_tokens = 64, 16
    for name, value in options.items():
        group, name = name.split("__")
        c[group][name] = value
    return c


def loaded(c, rows=None, refused=""):
    tokenizer = load_tokenizer(c)
    images = ImageSource(c, "qwen3_vl", tokenizer, tower=TOWER, refused=refused)
    return load_train(c, tokenizer, tokenizer.eos_token_id, rows, images=images), images


def written(folder, row, suffix="jsonl"):
    path = folder / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text(json.dumps(row) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    return path


ASK, SAY = "how many red shapes?", "\\boxed{2}"
FIRST, SECOND = picture(1), picture(2, 16, 8)
TURNS = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ASK}, {"type": "image"}]}]
FORMS = {
    "arrays": {"images": [FIRST, SECOND], "prompt": f"<image>{ASK}<image>"},
    "pillow": {"images": [Pillow.fromarray(FIRST), Pillow.fromarray(SECOND)], "prompt": TURNS},
    "bytes": {"image": [png(FIRST), {"bytes": png(SECOND), "path": None}], "prompt": TURNS},
    "in the messages": {"prompt": [{"role": "user", "content": [
        {"type": "image", "image": png(FIRST)}, {"type": "text", "text": ASK}, {"type": "image", "image": Pillow.fromarray(SECOND)}]}]},
}


@pytest.mark.parametrize("form", [*FORMS, "parquet", "paths"])
def test_every_form_gives_the_same_example(form, tmp_path):
    """Ids with one token per feature, places, completion, pixels; and no column holds an image."""
    row = {**FORMS["bytes" if form in ("parquet", "paths") else form], "completion": SAY, "level": 3}
    path = ()
    if form == "parquet":
        path, row = [written(tmp_path, row | {"image": [{"bytes": png(FIRST)}, {"bytes": png(SECOND)}]}, "parquet")], None
    elif form == "paths":
        for name, pixels in (("a.png", FIRST), ("b.png", SECOND)):
            (tmp_path / name).write_bytes(png(pixels))
        path, row = [written(tmp_path, row | {"image": ["a.png", "b.png"]})], None
    dataset, images = loaded(config(path), row and [row])
    example, ids = dataset[0], load_tokenizer(config()).convert_tokens_to_ids
    pad = ids("<|image_pad|>")
    text = [*map(ids, ("<|im_start|>", "user", "\n", "<|vision_start|>")), *[pad] * 6, ids("<|vision_end|>"),
            *map(ids, ("how", " ", "many", " ", "red", " ", "shapes", "?", "<|vision_start|>")), *[pad] * 2,
            *map(ids, ("<|vision_end|>", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"))]
    assert example.prompt_ids.tolist() == text and example.columns == {"level": 3, "answer": None} | example.columns
    assert {"image", "images"}.isdisjoint(example.columns) and json.dumps(example.prompt)
    assert example.target_ids.tolist() == [ids("\\boxed{"), ids("2"), ids("}"), ids("<|im_end|>")]
    assert example.images.firsts.tolist() == [4, 20] and example.images.grids.tolist() == [[4, 6], [4, 2]]
    expected = [picture_of(Image(pixels=p), images.rule, 1 << 20).patches for p in (FIRST, SECOND)]
    for got, want in zip(images.patches(example.images.numbers), expected, strict=True):
        assert np.array_equal(got, want)
    assert dataset.patches.tolist() == [32] and images.used
    images.close()


def test_a_cache_gives_rows_and_pixels_again(tmp_path):
    """Of Parquet and of rows in memory; another picture under the same text is another entry and fingerprint."""
    rows = [{"images": [picture(i)], "prompt": ASK, "completion": SAY} for i in range(4)]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([r | {"images": [{"bytes": png(r["images"][0])}]} for r in rows]), path)
    for given, files in ((rows, ()), (None, [path])):
        c = config(files, data__cache=str(tmp_path / f"cache{bool(files)}"))
        found = [loaded(c, given), loaded(c, given)]
        assert type(found[1][0].tables).__name__ == "CachedRows"
        for i in range(4):
            first, second = ((one[i], images) for one, images in found)
            assert np.array_equal(first[0].prompt_ids, second[0].prompt_ids)
            a, b = (images.patches(e.images.numbers)[0] for e, images in (first, second))
            assert np.array_equal(a, b)
        assert found[0][0].fingerprint == found[1][0].fingerprint
    other, _ = loaded(config(data__cache=str(tmp_path / "cacheFalse")), [*rows[:3], rows[3] | {"images": [picture(9)]}])
    assert other.fingerprint != found[0][0].fingerprint
    split = config([path], data__eval_fraction=2.0)  # prompts of one text and different pictures are different prompts
    train, images = loaded(split)
    tokenizer = load_tokenizer(split)
    assert (len(train), len(load_eval_sets(split, tokenizer, 2, train, images=images)["heldout"])) == (2, 2)


BROKEN = {
    "more markers": ({"prompt": f"<image><image>{ASK}", "images": [FIRST]}, "more markers"),
    "fewer markers": ({"prompt": f"<image>{ASK}", "images": [FIRST, SECOND]}, "1 markers"),
    "too many": ({"prompt": ASK, "images": [FIRST] * 9}, "data.max_images=8"),
    "no image": ({"prompt": ASK, "images": [b"GIF89a nothing"]}, "cannot be read"),
    "cut": ({"prompt": ASK, "images": [png(FIRST)[:400]]}, "cannot be read"),
    "large": ({"prompt": ASK, "images": [np.zeros((70, 70, 3), np.uint8)]}, "data.image_decode_limit=4096"),
    "a URL": ({"prompt": ASK, "images": ["https://example.org/a.png"]}, "nothing is fetched"),
    "outside": ({"prompt": ASK, "images": ["../secret.png"]}, "no such file"),
    "of the model": ({"prompt": [*TURNS, {"role": "assistant", "content": [{"type": "image"}]}, {"role": "user", "content": "x"}],
                      "images": [FIRST, FIRST, FIRST]}, "models write text alone"),
    "a video": ({"prompt": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}, "'a.mp4' is a video file, which is not decoded"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_image_that_cannot_be_used_is_a_bad_row(name):
    row, message = BROKEN[name]
    good = {"prompt": ASK, "images": [FIRST], "completion": SAY}
    with pytest.raises(DataError, match=message):
        loaded(config(data__image_decode_limit=4096), [row | {"completion": SAY}])
    dataset, _ = loaded(config(data__image_decode_limit=4096, data__bad_rows="skip"), [row | {"completion": SAY}, good])
    assert len(dataset) == dataset.bad_rows.count == 1


def test_paths_lie_below_the_root(tmp_path):
    """Of the data file's folder, or of data.image_root; a link that leads out of it is refused."""
    (tmp_path / "data").mkdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_bytes(png(FIRST))
    (tmp_path / "data/b.png").symlink_to(tmp_path / "pictures/a.png")
    path = written(tmp_path / "data", {"prompt": ASK, "images": ["a.png"], "completion": SAY})
    with pytest.raises(DataError, match="no such file"):
        loaded(config([path]))
    dataset, _ = loaded(config([path], data__image_root=str(tmp_path / "pictures")))
    assert dataset[0].images.grids.tolist() == [[4, 6]]
    with pytest.raises(DataError, match="lies outside"):
        loaded(config([written(tmp_path / "data", {"prompt": ASK, "images": ["b.png"], "completion": SAY})]))


def test_paths_of_rows_from_python_are_relative_to_the_working_directory(tmp_path, monkeypatch):
    """Of a list as of a datasets.Dataset, also beside a folder that has the name of the argument."""
    import datasets
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for folder, number in ((tmp_path, 1), (tmp_path / "data", 2)):
        (folder / "a.png").write_bytes(png(picture(number)))
    rows = [{"prompt": "what?", "completion": "\\boxed{1}", "images": ["a.png"]}]
    want = picture_of(Image(encoded=png(picture(1))), loaded(config(), rows)[1].rule, 1 << 20).patches
    for given in (rows, datasets.Dataset.from_list(rows)):
        dataset, images = loaded(config(), given)
        assert np.array_equal(images.patches(dataset[0].images.numbers)[0], want) and dataset[0].where == "data[0]"


def test_sources_that_read_the_same_rows_keep_their_own_columns_of_images():
    said = {"completion": "\\boxed{1}"}
    parts = [{"role": "user", "content": [{"type": "image", "image": png(picture(3))}, {"type": "text", "text": "what?"}]}]
    c = config()
    c.data.sources = {"a": {"where": {"kind": "a"}, "prompt_column": "question"}, "b": {"where": {"kind": "b"}, "prompt_column": "ask"}}
    rows = [{"kind": "a", "question": "what?", "ask": "", **said}, {"kind": "b", "question": "", "ask": parts, **said}]
    mixture, _ = loaded(c, rows)
    assert [example.images is not None for example in (mixture[0], mixture[1])] == [False, True]



def test_bounds_on_pixels_decide_the_tokens():
    """A picture of 16 x 24 pixels, made smaller and larger; the checkpoint's own bounds hold where none is given."""
    row = {"prompt": ASK, "images": [FIRST], "completion": SAY}
    for bounds, grid in (((64, 128), [2, 2]), ((1024, 2048), [8, 10]), ((64, 1024), [4, 6])):
        dataset, _ = loaded(config(data__image_min_pixels=bounds[0], data__image_max_pixels=bounds[1]), [row])
        assert dataset[0].images.grids.tolist() == [grid]
    c = config(data__image_min_pixels=None, data__image_max_pixels=None, data__max_prompt_tokens=4096)
    assert loaded(c, [row])[0][0].images.grids.prod() * 16 >= 256 * 256


def test_markers_alone_are_text_where_they_are_turned_off():
    dataset, images = loaded(config(data__image_marker=""), [{"prompt": f"<image> {ASK}", "completion": SAY}])
    assert dataset[0].images is None and not images.used


@pytest.mark.parametrize("options, message", [
    (dict(data__overlong_prompt="truncate_left"), "data.overlong_prompt=truncate_left could cut"),
    (dict(data__overlong_completion="split"), "data.overlong_completion=split could cut"),
    (dict(data__image_min_pixels=5000, data__image_max_pixels=4000), "0 < min <= max"),
])
def test_options_that_do_not_go_with_images_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        loaded(config(**options), [{"prompt": ASK, "images": [FIRST], "completion": SAY}])


def test_jobs_that_do_not_take_images_say_so(tmp_path):
    """And go on with text; a column that is set for a model without a tower is refused."""
    make_tokenizer(tmp_path / "t")
    row = {"prompt": ASK, "images": [FIRST], "chosen": "a", "rejected": "b", "completion": SAY}
    outer = {"source": {"outer": {"model_type": "qwen3_vl", "vision_config": TOWER}}}
    from jaxrl.models.io import hf
    described = {"model_type": "qwen3_vl_text", hf.SOURCE: outer["source"]}
    served = dict(teacher__servers=("http://localhost:1",), teacher__path="x")
    for recipe, options, name in (("distill", served, "teacher.servers="), ("rl", dict(run__mode="parity"), "run.mode='parity'"),
                                  ("sft", dict(lora__rank=2, lora__init="eva"), "lora.init='eva' does not train on images yet; change it"),
                                  ("rl", dict(record__every=2), "record.every=2 does not train on images yet")):
        spec = resolve(config(recipe=recipe, model__init="random", model__config={"model_type": "qwen3_vl"}, **options))
        tokenizer = load_tokenizer(spec)
        images = open_images(spec, described, tokenizer)
        with pytest.raises(ConfigError, match=name):
            load_train(spec, tokenizer, 2, [row], images=images)
    spec = resolve(config(data__image_column="photo", model__init="random", model__config={"model_type": "qwen3"}))
    with pytest.raises(ConfigError, match="without a tower for images"):
        open_images(spec, {"model_type": "qwen3"}, None)
    with pytest.raises(ConfigError, match="env.image_tokens=4: model_type=qwen3 is read without a tower.*env.image_tokens=0"):
        turns = dict(env__image_tokens=4, env__function="x.py:f", recipe="rl")
        open_images(resolve(config(model__init="random", model__config={"model_type": "qwen3"}, **turns)), {"model_type": "qwen3"}, None)
    for column, said in (("images", True), ("", False)):
        spec = resolve(config(data__image_column=column, model__init="random", model__config={"model_type": "qwen3"}))
        rows = load_train(spec, load_tokenizer(spec), 2, [{"prompt": "what is it?", "completion": SAY, "images": ["a.png"]}])
        with pytest.raises(ConfigError, match="'images' holds an image .'a.png'., and model_type=qwen3.*model.path") if said else nullcontext():
            check_column(spec, None, rows, {}, {"model_type": "qwen3"})
        if said:
            with pytest.raises(ConfigError, match="'image' holds an image"):
                check_column(spec, None, None, {"held": load_train(spec, load_tokenizer(spec), 2, [
                    {"prompt": "what?", "completion": SAY}, {"prompt": "what?", "completion": SAY, "image": "b.jpg"}])}, {"model_type": "qwen3"})
    c = config()
    c.model.tokenizer = str(tmp_path / "t")
    with pytest.raises(ConfigError, match="is not one token of the tokenizer"):
        loaded(c, [row])


def test_controls_change_pictures_alone():
    """eval.controls: grey ones of the same sizes; of another row where one has the same sizes."""
    rows = [{"prompt": ASK, "images": [picture(i)], "completion": SAY} for i in range(3)]
    rows += [{"prompt": ASK, "images": [picture(7, 16, 8)], "completion": SAY}, {"prompt": ASK, "completion": SAY}]
    dataset, images = loaded(config(), rows)
    batch = [(i, dataset[i]) for i in range(5)]
    blank, swapped = (CONTROLS[name](batch) for name in ("blank", "swapped"))
    assert [i for i, _ in blank] == [0, 1, 2, 3] and [i for i, _ in swapped] == [0, 1, 2]
    own = {i: images.patches(e.images.numbers)[0] for i, e in batch[:4]}
    for i, e in blank:
        assert np.all(images.patches(e.images.numbers)[0] == 128) and np.array_equal(e.prompt_ids, batch[i][1].prompt_ids)
    for i, e in swapped:
        got = images.patches(e.images.numbers)[0]
        assert not np.array_equal(got, own[i]) and any(np.array_equal(got, other) for other in own.values())


def test_images_are_no_targets_and_stand_where_they_belong():
    rows = [{"prompt": ASK, "images": [picture(i)], "completion": SAY} for i in range(2)] + [{"prompt": ASK, "completion": SAY}]
    dataset, images = loaded(config(), rows)
    examples = [dataset[i] for i in (2, 0, 1)]
    for loss_on_prompt in (False, True):
        traj = demonstrations(examples, [2, 0, 1], loss_on_prompt, images)
        pad = load_tokenizer(config()).convert_tokens_to_ids("<|image_pad|>")
        assert not traj.loss_mask[traj.tokens == pad].any() and traj.loss_mask.any()
        assert traj.pictures.sequences.tolist() == [1, 2] and traj.patches.tolist() == [[0, 0], [24, 0], [24, 0]]
    changed = traj.pictures.patches(traj.pictures.numbers)
    assert not np.array_equal(*changed)


@pytest.mark.parametrize("marked", [f"<image>{ASK}<image>", ASK])
def test_images_in_a_text_without_a_chat_template(marked):
    """As AReaL's loader of clevr_count_70k writes them: the text as it is, with the model's tokens in place of the markers."""
    rows = [{"prompt": marked, "images": [FIRST, SECOND], "completion": SAY}, {"prompt": ASK, "completion": SAY}]
    dataset, images = loaded(config(data__chat="false"), rows)
    ids = load_tokenizer(config()).convert_tokens_to_ids
    first, second = ([ids("<|vision_start|>"), *[ids("<|image_pad|>")] * n, ids("<|vision_end|>")] for n in (6, 2))
    asked = [*map(ids, ("how", " ", "many", " ", "red", " ", "shapes", "?"))]
    want = [*first, *asked, *second] if marked != ASK else [*first, *second, *asked]
    assert dataset[0].prompt_ids.tolist() == want and dataset[1].prompt_ids.tolist() == asked
    assert dataset[0].images.grids.tolist() == [[4, 6], [4, 2]] and dataset[0].target_ids.tolist() == dataset[1].target_ids.tolist()
    images.close()
    with pytest.raises(DataError, match="chat messages need a chat template"):
        loaded(config(data__chat="false"), [rows[0] | {"prompt": TURNS}])


def test_files_of_images_are_read_anew(tmp_path):
    """Also where rows would come from a cache: another picture in a file of the same name is another content."""
    found, c = [], config([written(tmp_path, {"prompt": ASK, "images": ["a.png"], "completion": SAY})], data__cache=str(tmp_path / "cache"))
    for pixels in (picture(1, 16, 16), picture(2, 16, 16), picture(3, 8, 16)):
        (tmp_path / "a.png").write_bytes(png(pixels))
        dataset, images = loaded(c)
        found.append((dataset.fingerprint, tuple(dataset[0].images.grids[0].tolist())))
        assert np.array_equal(images.patches(dataset[0].images.numbers)[0], picture_of(Image(pixels=pixels), images.rule, 1 << 20).patches)
    assert len({print_ for print_, _ in found}) == 3 and [grid for _, grid in found] == [(4, 4), (4, 4), (2, 4)]


def test_pillow_images_of_every_mode_are_cached(tmp_path):
    """Those that PNG does not have, too; what is no image stays a bad row."""
    images = [Pillow.fromarray(FIRST).convert(mode) for mode in ("CMYK", "RGBA", "L", "YCbCr", "1")]
    rows = [{"prompt": ASK, "images": [image], "completion": SAY} for image in images]
    rows.append({"prompt": ASK, "images": [np.zeros((4, 4, 3), np.float32)], "completion": SAY})
    c, found = config(data__cache=str(tmp_path / "cache"), data__bad_rows="skip"), []
    for _ in range(2):
        dataset, source = loaded(c, rows)
        found.append([source.patches(dataset[i].images.numbers)[0] for i in range(len(dataset))])
        assert (len(dataset), dataset.bad_rows.count) == (5, 1)
    assert type(dataset.tables).__name__ == "CachedRows" and all(map(np.array_equal, *found))


def test_a_file_that_was_changed_stops_the_run(tmp_path):
    (tmp_path / "a.png").write_bytes(png(FIRST))
    dataset, images = loaded(config([written(tmp_path, {"prompt": ASK, "images": ["a.png"], "completion": SAY})]))
    example = dataset[0]
    (tmp_path / "a.png").write_bytes(png(picture(3, 8, 8)))
    with pytest.raises(RunStopped, match="rows.jsonl:1"):
        images.patches(example.images.numbers)


def test_a_conversation_whose_later_turns_show_images():
    """data.train_turns=all: tokens and places as an episode puts them there; image tokens are not trained, a turn of the model is; images
    behind the last trained turn are left out."""
    def says(text, **more):
        return {"role": "assistant", "content": text, **more}
    ask = [{"role": "user", "content": f"<image>{ASK}"}, says("2"), {"role": "user", "content": [{"type": "image"}, {"type": "image"}]}, says("3"),
           {"role": "user", "content": "<image>"}, says("1", train=False)]
    pictures = [FIRST, SECOND, FIRST, SECOND]
    dataset, images = loaded(config(data__train_turns="all", rollout__max_new_tokens=64), [{"prompt": ask, "images": pictures}])
    example, pad = dataset[0], images.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    ids = np.concatenate([example.prompt_ids, example.target_ids])
    assert example.images.grids.tolist() == [[4, 6], [4, 2], [4, 6]] and example.images.firsts[1] > len(example.prompt_ids)
    own = np.concatenate([first + np.arange(h * w // 4) for first, (h, w) in zip(example.images.firsts, example.images.grids, strict=True)])
    assert sorted(own) == np.flatnonzero(ids == pad).tolist()
    traj = demonstrations([example], [0], False, images)
    assert images.tokenizer.decode(traj.tokens[traj.loss_mask]) == "2<|im_end|>3<|im_end|>" and dataset.patches.tolist() == [56]
    got = images.patches(traj.pictures.numbers)
    for patches, value in zip(got, pictures, strict=False):
        assert np.array_equal(patches, picture_of(Image(pixels=value), images.rule, 1 << 20).patches)
    from jaxrl.data.turns import TurnRenderer
    renderer = TurnRenderer(config(), images.tokenizer, images=images.tokens)
    head, at = renderer.first_with_images([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ASK}]}])
    whole = np.concatenate([head, images.tokenizer("2<|im_end|>")["input_ids"]])
    behind, more = renderer.extend_with_images(whole, [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}])
    repeats = np.ones(len(whole) + len(behind), int)
    repeats[[*at, *(len(whole) + more)]] = [6, 2, 6]
    np.testing.assert_array_equal(ids[:repeats.sum()], np.repeat(np.concatenate([whole, behind]), repeats))
    images.close()


@pytest.mark.full
def test_thousands_of_large_pictures_are_read_by_their_headers(tmp_path):
    """Rows of pictures of a million pixels take no memory for these, and none is decoded before a step takes its row: 9 GB if all were."""
    for k in range(20):
        (tmp_path / f"{k}.png").write_bytes(png(np.full((1000, 1000, 3), k, np.uint8)))
    (tmp_path / "few.jsonl").write_text("".join(json.dumps({"image": f"{k % 20}.png", "prompt": ASK, "completion": SAY}) + "\n" for k in range(150)))
    (tmp_path / "many.jsonl").write_text((tmp_path / "few.jsonl").read_text() * 20)
    code = f"""
import resource, sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]}
import test_image_rows as cases
from jaxrl.data.images import decode, source
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
cases.loaded(cases.config(["{tmp_path}/few.jsonl"]))
before, made = peak(), []
whole = source.picture_of_frames
source.picture_of_frames = lambda *args: made.append(1) or whole(*args)
dataset, images = cases.loaded(cases.config(["{tmp_path}/many.jsonl"]))
print(len(dataset), len(made), round(peak() - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=True)
    rows, made, more = map(int, done.stdout.split()[-3:])
    assert rows == 3_000 and made == 0 and more < 60
