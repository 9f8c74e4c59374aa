"""Pictures of a run's completions, kept as small files and shown in its report."""

import io
import json

import numpy as np
import PIL.Image
import pytest

from jaxrl.data.images import thumbnails
from jaxrl.data.images.resize import RULES, cut, join
from jaxrl.report import content
from jaxrl.types import Pictures, Trajectories

PATCH, MERGE, GRID = 2, 2, (4, 4)


def pixels_of(number):
    return np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)


def patches_of(numbers):
    if 99 in numbers:
        raise OSError("the image is gone")
    rule = RULES["qwen3_vl"].__class__(patch=PATCH, merge=MERGE)
    return [cut(pixels_of(n), rule) for n in numbers]


def batch(numbers, groups):
    """Trajectories of one token; each sequence shows one picture, the second trajectory has two sequences."""
    owners = [0, 1, 1, *range(2, len(numbers) - 1)]
    n, q = len(numbers) - 1, len(numbers)
    pictures = Pictures(np.arange(q), np.zeros(q, int), np.array([GRID] * q), np.array(numbers), MERGE, 3 * PATCH**2, patches_of)
    return Trajectories(
        tokens=np.zeros(q, np.int32), offsets=np.arange(q + 1), loss_mask=np.zeros(q, bool), logprobs=np.zeros(q, np.float32),
        versions=np.zeros(q, np.int32), prompt_lengths=np.ones(q, np.int32), group=np.array(groups), sample=np.arange(n, dtype=np.int32),
        seed=np.zeros(n, np.uint32), finish=np.zeros(n, np.int8), trajectory=np.array(owners), prefix=np.arange(q), pictures=pictures)


@pytest.mark.parametrize("patch,merge,rows,columns", [(2, 2, 3, 2), (3, 1, 1, 4), (14, 2, 1, 1)])
def test_what_was_cut_is_joined(patch, merge, rows, columns):
    pixels = np.random.default_rng(0).integers(0, 256, (rows * merge * patch, columns * merge * patch, 3), np.uint8)
    rule = RULES["qwen2_vl"].__class__(patch=patch, merge=merge)
    np.testing.assert_array_equal(join(cut(pixels, rule), (rows * merge, columns * merge), merge), pixels)


def test_the_first_pictures_are_kept_and_groups_with_different_scores_come_first(tmp_path, caplog):
    traj = batch([5, 6, 7, 8, 8], groups=[0, 0, 1, 1])
    kept = thumbnails.save(tmp_path, traj, [1, 1, 0, 1], most=2)
    assert list(kept) == [8, 5] and thumbnails.file_names(traj, kept) == [[kept[5]], ["", ""], [kept[8]], [kept[8]]]
    assert {f"images/{p.name}" for p in (tmp_path / "images").iterdir()} == set(kept.values())
    np.testing.assert_array_equal(np.asarray(PIL.Image.open(tmp_path / kept[8])), pixels_of(8))
    (tmp_path / kept[5]).write_bytes(b"as it was")
    assert thumbnails.save(tmp_path, traj, [1, 1, 0, 1], most=9).items() > kept.items()
    assert (tmp_path / kept[5]).read_bytes() == b"as it was"
    assert len(list((tmp_path / "images").iterdir())) == 4
    thumbnails.save(tmp_path, batch([99, 1, 2], groups=[0, 0]), [0, 1], most=9)
    assert "the image is gone" in caplog.text


def test_a_number_that_means_another_picture_has_another_file(tmp_path):
    """Numbers count the data sets of a process: an evaluation by itself has others than its run."""
    first, other = batch([5, 6, 7], groups=[0, 0]), batch([5, 6, 7], groups=[0, 0])
    other.pictures = other.pictures._replace(patches=lambda numbers: patches_of([n + 10 for n in numbers]))
    a, b = (thumbnails.save(tmp_path, one, [0, 1], most=3) for one in (first, other))
    assert a.keys() == b.keys() and not set(a.values()) & set(b.values())
    np.testing.assert_array_equal(np.asarray(PIL.Image.open(tmp_path / a[5])), pixels_of(5))


def test_large_pictures_are_made_smaller():
    made = thumbnails.thumbnail(np.zeros((100, 700, 3), np.uint8), thumbnails.LONGEST)
    assert PIL.Image.open(io.BytesIO(made)).size == (256, 37)


def test_the_report_shows_what_was_kept_of_its_own_folder(tmp_path):
    run = tmp_path / "run"
    kept = thumbnails.save(run_folder(run), batch([5, 6, 7], groups=[0, 0]), [0, 1], most=1)
    (tmp_path / "secret.png").write_bytes(b"secret")
    rows = [{"group": 0, "sample": i, "prompt": "?", "completion": "!", "score": i, "finish": "stop", "images": names}
            for i, names in enumerate(([kept[5], ""], ["../secret.png"]))]
    (run / "rollouts").mkdir()
    (run / "rollouts/step_00000001.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    told = content([run])
    assert [row["images"] for row in told["samples"][0]["rows"]] == [[kept[5], ""], ["../secret.png"]]
    assert list(told["pictures"][0]) == [kept[5]]
    assert told["pictures"][0][kept[5]].startswith("data:image/png;base64,iVBOR")


def run_folder(folder):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"config": {"run": {"dir": str(folder)}}, "versions": {}}))
    return folder
