"""Pairs with images: every form gives the same rows and pictures, keys of the reference's sums tell pictures apart, and a pair's picture
lies once beside its row."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.test_image_rows import ASK, FIRST, SAY, SECOND, TOWER, config, picture, png

from jaxrl.data import DataError, load_eval_sets, load_tokenizer, load_train
from jaxrl.data.images.controls import CONTROLS
from jaxrl.data.images.source import ImageSource
from jaxrl.recipes import preference, reward_model
from jaxrl.roles.sums import completion_keys
from jaxrl.training import pack
from jaxrl.training.layout import RowShapes

OTHER = "\\boxed{3}"
IMAGES = [{"type": "image", "image": png(FIRST)}, {"type": "text", "text": ASK}, {"type": "image", "image": png(SECOND)}]
USER, GOOD, BAD = ({"role": "user", "content": IMAGES}, {"role": "assistant", "content": SAY},
                   {"role": "assistant", "content": [{"type": "text", "text": OTHER}]})
FORMS = {
    "a column": {"images": [FIRST, SECOND], "prompt": f"<image>{ASK}<image>", "chosen": SAY, "rejected": OTHER},
    "messages": {"images": [FIRST, SECOND], "chosen": [GOOD], "rejected": [BAD],
                 "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ASK}, {"type": "image"}]}]},
    "both with the prompt": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "a prompt beside them": {"prompt": ASK, "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "in memory": {"chosen": [{"role": "user", "content": [{**IMAGES[0], "image": FIRST.copy()}, *IMAGES[1:]]}, GOOD],
                  "rejected": [{"role": "user", "content": [{**IMAGES[0], "image": FIRST.copy()}, *IMAGES[1:]]}, BAD]},
}


def opened(c, rows=None):
    tokenizer = load_tokenizer(c)
    images = ImageSource(c, "qwen3_vl", tokenizer, tower=TOWER)
    return load_train(c, tokenizer, tokenizer.eos_token_id, rows, images=images), images


@pytest.mark.parametrize("recipe", ["preference", "reward_model"])
@pytest.mark.parametrize("form", [*FORMS, "parquet"])
def test_every_form_of_a_pair_gives_the_same_row(form, recipe, tmp_path):
    row, path = FORMS["both with the prompt" if form == "parquet" else form], ()
    if form == "parquet":
        bare = [{"type": p["type"], "image": p.get("image"), "text": p.get("text")} for p in IMAGES]
        user = {"role": "user", "content": bare}
        says = lambda text: {"role": "assistant", "content": [{"type": "text", "image": None, "text": text}]}  # noqa: E731
        path, row = [tmp_path / "pairs.parquet"], None
        pq.write_table(pa.Table.from_pylist([{"chosen": [user, says(SAY)], "rejected": [user, says(OTHER)]}]), path[0])
    dataset, images = opened(config(path, recipe), row and [row])
    example, tokenizer = dataset[0], load_tokenizer(config())
    assert tokenizer.decode(example.target_ids) == f"{SAY}<|im_end|>" and tokenizer.decode(example.rejected_ids) == f"{OTHER}<|im_end|>"
    assert example.images.firsts.tolist() == [4, 20] and example.images.grids.tolist() == [[4, 6], [4, 2]]
    alone, source = opened(config((), "sft"), [{"images": [FIRST, SECOND], "prompt": f"<image>{ASK}<image>", "completion": SAY}])
    assert np.array_equal(example.prompt_ids, alone[0].prompt_ids)
    for got, want in zip(images.patches(example.images.numbers), source.patches(alone[0].images.numbers), strict=True):
        assert np.array_equal(got, want)


@pytest.mark.parametrize("changed, message", [
    ({"chosen": [USER, {"role": "assistant", "content": [{"type": "image"}]}]}, "completion holds an image: models write text alone"),
    ({"rejected": [{"role": "user", "content": [*IMAGES[:2], {"type": "image", "image": png(FIRST)}]}, BAD]},
     "the messages before the completion differ"),
    ({"prompt": "how many blue shapes?"}, "are not those of column 'prompt'"),
])
def test_what_is_no_pair_of_one_prompt_is_named(changed, message):
    with pytest.raises(DataError, match=message):
        opened(config((), "preference"), [FORMS["both with the prompt"] | changed])


def test_held_out_pairs_are_of_other_pictures():
    """Prompts of one text and different pictures are different prompts, those of one picture are not, in messages, too."""
    def row(number, say):
        user = {"role": "user", "content": [{"type": "image", "image": png(picture(number))}, {"type": "text", "text": ASK}]}
        return {"chosen": [user, {"role": "assistant", "content": say}], "rejected": [user, BAD]}

    c = config((), "preference", data__eval_fraction=2.0)
    train, images = opened(c, [row(i // 2, f"\\boxed{{{i % 2}}}") for i in range(8)])
    held = load_eval_sets(c, load_tokenizer(c), 2, train, images=images)["heldout"]
    digests = [{images._store.get([int(e.images.numbers[0])])[0].digest for e in (data[i] for i in range(len(data)))} for data in (train, held)]
    assert (len(train), len(held)) == (6, 2) and not digests[0] & digests[1] and len(digests[1]) == 1


def job_of(images, share=True):
    c = SimpleNamespace(train=SimpleNamespace(share_prompts=share), data=SimpleNamespace(label_column="label", margin_column="margin"), longest=64,
                        reward_model=SimpleNamespace(kind="pairs", center=0.0))
    return SimpleNamespace(config=c, images=images, row_shapes=RowShapes((128,), ((2, 1),), patches=(96,)))


def test_a_pair_has_its_picture_once_and_its_own_key():
    """Both completions of a pair read one copy of its patches; without shared prompts each has its own. The reference's sums of a pair belong to
    its pixels: other ones, grey ones and exchanged ones are other keys, the same file under another number is the same."""
    rows = [{"images": [picture(n)], "prompt": ASK, "chosen": SAY, "rejected": OTHER} for n in (1, 2, 1)]
    data, images = opened(config((), "preference"), rows)
    examples = [data[i] for i in range(3)]
    for share, copies in ((True, 1), (False, 2)):
        step = preference.PreferenceStep(job_of(images, share), examples)
        assert step.layout.used_patches == copies * 3 * 24
        packed = [pack(step.traj, m, {}, {}) for m in step.layout.minibatches[0].microbatches]
        assert sum(int((p.images.segments > 0).sum()) for p in packed) == copies * 3 * 24
        scored = reward_model.make_batch(examples, job_of(images).config, images).traj
        assert np.array_equal(scored.pictures.sequences, step.traj.pictures.sequences) and len(scored.patches) == 6
    keys = completion_keys(step.traj)
    assert keys[0] == keys[4] and keys[1] == keys[5] and len(set(keys)) == 4
    for control in CONTROLS.values():
        shown = preference.PreferenceStep(job_of(images), [e for _, e in control(list(enumerate(examples)))])
        other = completion_keys(shown.traj)
        assert not set(keys[2:4]) & set(other[2:4])
    text = dataclasses.replace(step.traj, pictures=None)
    assert not set(completion_keys(text)) & set(keys)
    before, _ = step.mismatched_prompts()  # KTO's other prompt comes with its pictures
    assert before.pictures.numbers[::2].tolist() == [examples[i].images.numbers[0] for i in (2, 0, 1)]
    assert images.patches(before.pictures.numbers[:1])[0].tolist() == images.patches(examples[2].images.numbers)[0].tolist()
