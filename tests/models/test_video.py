"""Videos through towers and decoders against transformers' models: logits and positions."""

import numpy as np
import pytest
from helpers import video_cases as cases
from helpers import vision_cases
from helpers.tiers import first_cases
from helpers.video_cases import Video

from jaxrl.models.vision.positions import rotary_positions, rotary_shift

pytestmark = pytest.mark.torch
KINDS = ["qwen3_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl_moe"]


@first_cases(2, "kind", KINDS)
def test_logits_equal_transformers(tmp_path, kind):
    """Videos alone, beside an image, and rows of text beside them: packed into rows and each in its own."""
    theirs = vision_cases.make(tmp_path, kind=kind)
    model, params = cases.ours(tmp_path)
    own = cases.sequences(kind)
    for into in (None, [0, 0, 1]):
        arrays, images, places = cases.rows(own, model.config.vision.window, into)
        got = np.asarray(vision_cases.logits(model, params, arrays, images))
        for one, place in zip(own, places, strict=True):
            np.testing.assert_allclose(got[place], cases.theirs(theirs, one), atol=1e-5)
    exchanged = [images.patches.reshape(*images.patches.shape[:2], 3, 2, -1)[..., ::-1, :].reshape(images.patches.shape)]
    other = np.asarray(vision_cases.logits(model, params, arrays, images.replace(patches=exchanged[0])))
    assert np.abs(other - got)[places[0]].max() > 1e-2  # the order of two frames of one patch is seen


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS[:3])
def test_stills_are_the_same_where_videos_are_read(tmp_path, kind):
    """An image whose frame is repeated in a job with videos, and once in a job without."""
    vision_cases.make(tmp_path, kind=kind)
    model, params = vision_cases.ours(tmp_path)
    arrays, images, places = vision_cases.rows_for(model, vision_cases.sequences())
    want = np.asarray(vision_cases.logits(model, params, arrays, images))
    doubled = np.repeat(images.patches.reshape(*images.patches.shape[:2], 3, 1, -1), 2, axis=3).reshape(*images.patches.shape[:2], -1)
    got = np.asarray(vision_cases.logits(cases.ours(tmp_path)[0], params, arrays, images.replace(patches=doubled)))
    for place in places:
        np.testing.assert_allclose(got[place], want[place], atol=1e-5)


# -- positions -------------------------------------------------------------------------------------------------------

LAYOUTS = [[4, Video((4, 6), 3), 5], [Video((2, 2), 4), 1], [1, (4, 4), 2, Video((6, 2), 2), 1, Video((2, 4), 2), 3, (2, 2), 1],
           [2, Video((2, 2), 1), 3], [3, Video((12, 4), 5, 0.4), 2]]


def of_the_paper(one, intervals):
    """Positions by the rule of Qwen2-VL's paper: what follows begins behind the largest of what came before."""
    ids, firsts, grids, delays, *_ = one
    out, at, k = [], 0, 0
    while at < len(ids):
        start = max((max(p) for p in out), default=-1) + 1
        if at not in firsts:
            out.append((start,) * 3)
            at += 1
            continue
        k, run = firsts.index(at), [firsts.index(at)]
        while run[-1] + 1 < len(firsts) and delays[run[-1] + 1] >= 0:
            run.append(run[-1] + 1)
        for j in run:
            height, width = (side // 2 for side in grids[j])
            out += [(start + int((j - k) * intervals[k]), start + y, start + x) for y in range(height) for x in range(width)]
            at += height * width
    return np.array(out)


@pytest.mark.parametrize("counts", [(2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 1, 2), (2, 1, None), (1, 2, None)])
def test_positions_of_lists_that_differ_in_length_are_refused(counts):
    """firsts, grids and delays (None: no videos); equal ones are not."""
    def arguments(firsts, grids, delays):
        return [1, 5][:firsts], np.array([[4, 4], [2, 2]])[:grids], delays and np.full(delays, -1)

    rotary_positions(8, *arguments(2, 2, 2)[:2], 2, arguments(2, 2, 2)[2])
    firsts, grids, delays = arguments(*counts)
    with pytest.raises(ValueError, match="zip"):
        rotary_positions(8, firsts, grids, 2, delays)
    if delays is not None and len(grids) != len(delays):
        with pytest.raises(ValueError, match="zip"):
            rotary_shift(grids, 2, delays)


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("pieces", [*LAYOUTS, [2, Video((2, 2), 5, 2.0), 4], [Video((4, 2), 4, 1.5), 2, (2, 2), 3]], ids=repr)
def test_positions(kind, pieces):
    """Integer by integer those of the paper, which are transformers' where a video lasts no longer than its longer side has tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText
    one = cases.sequence(0, pieces, kind == "qwen3_vl")
    ids, firsts, grids, delays, kinds, _ = one
    intervals = [1 if k == "image" else k.interval for k in kinds]
    got = rotary_positions(len(ids), firsts, grids, 2, delays)
    np.testing.assert_array_equal(got, of_the_paper(one, intervals))
    assert rotary_positions(len(ids) + 1, firsts, grids, 2, delays)[-1].tolist() == [len(ids) + rotary_shift(grids, 2, delays)] * 3
    if kind == "qwen2_vl" and any(k != "image" and k.interval != 1 for k in kinds):
        return  # it has no seconds
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**vision_cases.config(kind=kind)))
    values = cases.inputs(one)
    seconds = [v.interval / 4 for v in dict.fromkeys(k for k in kinds if k != "image")]  # tokens_per_second is 4
    if kind == "qwen2_5_vl":
        values["second_per_grid_ts"] = torch.tensor(seconds)
    wanted = {k: v for k, v in values.items() if not k.startswith("pixel")}
    expected = model.model.get_rope_index(**wanted)[0][:, 0].T.numpy()
    longer = any(d >= max(g) // 2 for d, g in zip(delays, grids, strict=True))
    assert np.array_equal(got, expected) != longer
