"""Rewards with images: what functions that name them receive, and boxes and points in every frame."""

import base64
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.image_functions import blind, brightness, widths
from helpers.service_cases import Scripted, service_scores
from PIL import Image as Pillow

from jaxrl.config.load import default_config
from jaxrl.data import load_tokenizer, load_train
from jaxrl.data.dataset import Example
from jaxrl.data.images.controls import CONTROLS, with_own_pictures
from jaxrl.data.images.source import BLANK, ImageSource
from jaxrl.errors import ConfigError
from jaxrl.recipes.sft import demonstrations
from jaxrl.resolve.spec import resolve
from jaxrl.rewards import RewardItem, RewardPool, images
from jaxrl.rewards import published as p
from jaxrl.rewards.calling import Call
from jaxrl.rewards.images import Sizes, as_stored, iou, last_numbers, reference_box
from jaxrl.rewards.items import item_hash, item_json, trial_items
from jaxrl.rewards.services import find_services
from jaxrl.rl.trajectories import reward_items
from jaxrl.run.data import check_services
from jaxrl.types import Places

SIZES = [Sizes(stored=(100, 400), seen=(50, 100))]
TOWER = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}


@pytest.mark.parametrize("a, b, value", [
    ((0, 0, 4, 4), (0, 0, 4, 4), 1.0), ((0, 0, 4, 4), (2, 2, 6, 6), 4 / 28), ((0, 0, 4, 4), (4, 0, 8, 4), 0.0), ((0, 0, 4, 4), (5, 5, 6, 6), 0.0),
    ((0, 0, 10, 10), (2, 2, 4, 4), 0.04), ((1, 1, 1, 1), (1, 1, 1, 1), 0.0)])
def test_iou_by_hand(a, b, value):
    assert iou(a, b) == iou(b, a) == pytest.approx(value)


def test_iou_counts_pixels():
    """Of whole boxes it is what counting cells gives."""
    rng, grid = np.random.default_rng(0), np.indices((12, 12))
    for _ in range(200):
        a, b = (images.ordered(rng.integers(0, 12, 4).tolist()) for _ in range(2))
        own, other = (((grid[1] >= x1) & (grid[1] < x2) & (grid[0] >= y1) & (grid[0] < y2)) for x1, y1, x2, y2 in (a, b))
        whole = (own | other).sum()
        assert iou(a, b) == pytest.approx((own & other).sum() / whole if whole else 0.0)


@pytest.mark.parametrize("text, four, two", [
    ("[10, 20, 30, 40]", (10, 20, 30, 40), (30, 40)), ("a box (10,20),(30,40).", (10, 20, 30, 40), (30, 40)), ("37 62", None, (37, 62)),
    ('{"bbox_2d": [1.5, 2, 3, 4], "label": "x"}', (1.5, 2, 3, 4), (3, 4)), ("first [1,2,3,4] then [5,6,7,8]", (5, 6, 7, 8), (7, 8)),
    ("-3, 4", None, (-3, 4)), ("3.", None, None), ("", None, None), ("v1 2", None, None), ("1,2,3", None, (2, 3)), ("9" * 3000, None, None),
    ("2 [10, 20, 30, 40]", (10, 20, 30, 40), (30, 40)), ("Image 1 (37, 62)", None, (37, 62)), ("[10, 20, 30, 40] 2", (10, 20, 30, 40), (40, 2)),
    ("(37, 62) 0.9", None, (37, 62)), ("2 (10,20),(30,40) (0.9)", (10, 20, 30, 40), (30, 40)), ("[[1, 2], [3, 4]], 5", (1, 2, 3, 4), (3, 4)),
    ("(1) 37 62", None, (37, 62)), ("1 2 3 4 5 6", (3, 4, 5, 6), (5, 6)), ("(" * 4000 + "1 2", None, (1, 2))])
def test_numbers_of_a_completion(text, four, two):
    """Numbers before and after the coordinates, as of an image or a confidence, do not shift them."""
    assert last_numbers(text, 4) == four and last_numbers(text, 2) == two


@pytest.mark.parametrize("frame, values, stored", [
    ("stored", (10, 20), (10, 20)), ("seen", (50, 25), (200, 50)), ("thousandths", (500, 500), (200, 50)), ("thousandths", (1000, 250), (400, 25))])
def test_frames(frame, values, stored):
    assert as_stored(values, frame, SIZES[0]) == pytest.approx(stored)


def test_boxes():
    """The answer is in pixels of the stored image; the same box in each frame has the same score, in another frame another."""
    answer = [100, 20, 200, 60]
    said = {"stored": "[100, 20, 200, 60]", "seen": "[25, 10, 50, 30]", "thousandths": "[250, 200, 500, 600]"}
    for frame, text in said.items():
        assert p.iou_reward("q", text, answer, SIZES, frame) == pytest.approx(1.0)
        assert all(p.iou_reward("q", text, answer, SIZES, other) < 0.9 for other in said if other != frame)
        middle = {"stored": "150 40", "seen": "37 20", "thousandths": "375 400"}[frame]
        assert p.point_in_box_reward("q", middle, str(answer), SIZES, frame) == 1.0
        assert p.point_in_box_reward("q", "999 999", answer, SIZES, frame) == 0.0
    assert p.iou_reward("q", "[300, 200, 550, 600]", answer, SIZES) == pytest.approx(0.8 / 1.2)
    assert [p.iou_reward("q", "[300, 200, 550, 600]", answer, SIZES, threshold=t) for t in (0.5, 0.7)] == [1.0, 0.0]
    assert p.iou_reward("q", "nothing", answer, SIZES) == 0.0 and p.iou_reward("q", "1 2 3 4", None) is None
    assert p.iou_reward("q", "[200, 60, 100, 20]", answer, frame="stored") == 1.0  # corners in any order
    with pytest.raises(ValueError, match="needs the image's size, and the row has no such image"):
        p.iou_reward("q", "1 2 3 4", answer)
    with pytest.raises(ValueError, match="frame='pixels': choose from thousandths, seen, stored"):
        p.iou_reward("q", "1 2 3 4", answer, SIZES, "pixels")
    with pytest.raises(ValueError, match="expected a box"):
        reference_box("left")


def data():
    """(rows of pictures of several forms, their ImageSource, their pixels)."""
    c = default_config()
    c.run.recipe, c.model.tokenizer = "sft", "jaxrl://shapes/tokenizer"
    c.data.image_min_pixels, c.data.image_max_pixels, c.data.max_prompt_tokens, c.data.completion_column = 64, 1024, 64, "completion"
    pixels = [np.random.default_rng(i).integers(0, 255, (16, 24 + 8 * i, 3)).astype(np.uint8) for i in range(3)]
    out = io.BytesIO()
    Pillow.fromarray(pixels[1]).save(out, "PNG")
    rows = [{"images": [pixels[0], out.getvalue()], "prompt": "red <image> blue <image>", "completion": "1", "answer": "1"},
            {"images": [Pillow.fromarray(pixels[2])], "prompt": "red", "completion": "1", "answer": "1"},
            {"prompt": "red", "completion": "1", "answer": "1"}]
    tokenizer = load_tokenizer(c)
    source = ImageSource(c, "qwen3_vl", tokenizer, tower=TOWER)
    return load_train(c, tokenizer, tokenizer.eos_token_id, rows, images=source), source, pixels, tokenizer


@pytest.mark.full
def test_functions_get_the_pictures_of_their_row():
    """Through real workers: pixels as the data have them, sizes without any file read, nothing for a function that names neither."""
    dataset, source, pixels, tokenizer = data()
    items = trial_items(dataset, tokenizer, images=source) + [
        RewardItem("q", "x", images=source.row_files(dataset[2].images)), RewardItem("q", "x")]
    c = default_config()
    c.reward.workers, c.reward.arguments = 1, {"brightness": {"scale": 2.0}}
    with RewardPool(resolve(c), functions=[brightness, widths, blind]) as pool:
        result = pool.score(items[:3])
    means = [float(one.mean()) for one in pixels]
    assert result.parts["brightness"] == pytest.approx([2 * (means[0] + means[1]) + 2000, 2 * means[2] + 1000, 0.0])
    assert result.parts["widths"].tolist() == [(24 + 32) * 1000 + 24 + 32, 40 * 1000 + 40, 0] and result.parts["blind"].tolist() == [1, 1, 1]
    read = []
    source.file = lambda number: read.append(number) or b""
    c.reward.arguments = {}
    with RewardPool(resolve(c), functions=[widths, blind]) as pool:
        pool.score(items[:3])
    assert read == []
    source.close()


def test_what_a_text_job_sends_is_as_before():
    """No field is added; pictures are part of what identifies an item."""
    item, files = RewardItem("q", "x"), SimpleNamespace(numbers=[7], sizes=lambda: [], files=lambda: [])
    assert "image" not in item_json(item, 0, ("context_ids", "images", "image_sizes"))
    hashes = {item_hash(RewardItem("q", "x", images=one)) for one in (None, SimpleNamespace(numbers=[]), files, SimpleNamespace(numbers=[8]))}
    assert len(hashes) == 3


def test_a_judge_is_shown_the_images_of_the_row(tmp_path):
    """As data URIs of their files before the text, in which they are numbered; other pictures are other requests; without the option none."""
    def answer(number, path, headers, body):
        content = json.loads(body)["messages"][0]["content"]
        if isinstance(content, str):
            return chat("Score: 1")
        *shown, text = content
        assert "user: [image 1]same as[image 2]?" in text["text"] and "system" not in text["text"]
        files = [base64.b64decode(part["image_url"]["url"].removeprefix("data:image/png;base64,")) for part in shown]
        sizes = [Pillow.open(io.BytesIO(file)).size for file in files]
        return chat(f"Score: {sum(width for width, _ in sizes) // 16}")

    def row(*widths):
        files = [base64.b64encode(png_file(width)).decode() for width in widths]
        parts = [{"type": "image"}, {"type": "text", "text": "same as"}, {"type": "image"}, {"type": "text", "text": "?"}]
        prompt = [{"role": "user", "content": parts}]
        fields = {"images": files, "image_sizes": [[[16, w], [16, w]] for w in widths]}
        return vars(RewardItem(prompt, "yes", {"answer": "yes"})) | fields

    with Scripted(answer) as server:
        given = dict(model="m", servers=(server.url,), cache=str(tmp_path))
        rows = [SimpleNamespace(**row(16, 32)), SimpleNamespace(**row(16, 64)), SimpleNamespace(**row(16, 32))]
        assert [score for score, _ in service_scores("judge", rows, show_images=True, **given)] == [0.3, 0.5, 0.3]
        assert 2 <= len(server.requests) <= 3  # equal ones may be asked for at once
        assert [score for score, _ in service_scores("judge", rows, **given)] == [0.1] * 3
        c = default_config()
        c.reward.judge.update({**given, "show_images": True})
        options = [find_services(one, {"judge"}, {}).options["judge"] for one in (c, default_config_of(given))]
        assert options[0]["show_images"] and "show_images" not in options[1]  # a job of text has the key that it had
        traits = Call("judge", "judge", {"services": {"judge": options[0]}, "places": {"judge": {"urls": [server.url], "cache": "", "key_env": ""}}})
        assert traits.traits()["images"] and traits.batched
    c.reward.functions = ("judge",)
    for found in (None, SimpleNamespace(used=False, videos=False)):
        with pytest.raises(ConfigError, match="the judge 'judge' has show_images=True .*and no row has an image"):
            check_services(c, found, [])
    check_services(c, SimpleNamespace(used=True, videos=False), [])


def test_columns_that_a_service_is_sent_are_columns_of_the_data():
    """A name that no row has is refused before the run, one that a late row has is not."""
    c = default_config()
    c.reward.functions, c.reward.remote.columns = ("remote",), ("answer", "dificulty")
    rows = [SimpleNamespace(columns={"answer": "1"}), SimpleNamespace(columns={"answer": "1", "difficulty": 2})]
    with pytest.raises(ConfigError, match="reward 'remote': columns: no row has the column 'dificulty'; .*answer, difficulty"):
        check_services(c, None, [rows])
    c.reward.remote.columns = ("answer", "difficulty")
    check_services(c, None, [rows])
    c.reward.functions, c.reward.judge.rubric_column = ("judge",), "rubrics"
    with pytest.raises(ConfigError, match="reward 'judge': rubric_column: no row has the column 'rubrics'"):
        check_services(c, None, [rows])


def default_config_of(given):
    c = default_config()
    c.reward.judge.update(given)
    return c


def chat(text):
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def png_file(width):
    out = io.BytesIO()
    Pillow.fromarray(np.full((16, width, 3), 90, np.uint8)).save(out, "PNG")
    return out.getvalue()


def test_controls_are_judged_by_the_rows_own_pictures():
    """Rewards, judges and reward models get what the row holds, whatever the policy was shown: else a control would ask about other pictures."""
    places = [Places(np.array([1]), np.array([[2, 2]]), np.array([n])) for n in (1, 2, 3)]
    rows = [(i, Example(np.arange(4), "", "q", None, {}, "", images=one)) for i, one in enumerate(places)]
    source = SimpleNamespace(merge=2, width=48, window=0, two_way=False, frames=1, patches=None, row_files=lambda places: places.numbers.tolist())
    for name, control in CONTROLS.items():
        shown = [e for _, e in control(rows)]
        traj = demonstrations([SimpleNamespace(prompt_ids=e.prompt_ids, target_ids=e.prompt_ids, trained=None, images=e.images) for e in shown],
                              range(3), False, source)
        assert set(traj.pictures.numbers.tolist()) != {1, 2, 3} or traj.pictures.numbers.tolist() != [1, 2, 3], name
        assert with_own_pictures(traj, shown).pictures.numbers.tolist() == [1, 2, 3]
        _, items = reward_items(traj, shown, lambda ids: [""] * 3, images=source)
        assert [item.images[0] & ~BLANK for item in items] == [1, 2, 3]
