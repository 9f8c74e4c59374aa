"""Images over the protocol: the model sees what transformers' sees, samples and gradients are of the same policy, and the rest is refused."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from helpers import vision_cases
from helpers.tinker_cases import PROTO, QUICK, next_tokens, numbers, served

from jaxrl.data.images.decode import picture_of
from jaxrl.data.images.read import Image
from jaxrl.errors import ConfigError
from jaxrl.service import wire

pytestmark = [pytest.mark.torch, pytest.mark.full, pytest.mark.usefixtures("the_mesh_as_it_was")]
TOKENS, LEFT, RIGHT = 6, [3, 10, 92], [93, 11, 12, 13]  # of the image, and ids before and after it
SMALL = {"data.image_min_pixels": 64, "data.image_max_pixels": 1024}


def png(seed=0, size=(16, 24)) -> bytes:
    from PIL import Image as Pillow

    file = io.BytesIO()
    Pillow.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3)).astype(np.uint8)).save(file, "png")
    return file.getvalue()


def chunks(*parts) -> list[dict]:
    """JSON of a model input; bytes are images."""
    return [{"type": "image", "format": "png", "data": base64.b64encode(part).decode(), "expected_tokens": TOKENS} if isinstance(part, bytes)
            else {"type": "encoded_text", "tokens": list(map(int, part))} for part in parts]


def request(run, seq, *parts, targets=None, forward_only=False, expected=TOKENS, wide=0) -> bytes:
    """A forward_backward of cross_entropy on one datum; the targets are the next tokens, 7 at those of images."""
    message = wire.messages()["ForwardBackwardRequest"](model_id=run, seq_id=seq, loss_fn="cross_entropy", forward_only=forward_only)
    datum = message.data.add()
    for part in parts:
        chunk = datum.model_input.add()
        if isinstance(part, bytes):
            chunk.image.data, chunk.image.format, chunk.image.expected_tokens = part, "png", expected
            if wide:
                chunk.image.override_dimensions.width = wide
        else:
            chunk.encoded_text.tokens = np.asarray(part, np.int32).tobytes()
    flat = [t for part in parts for t in ([7] * TOKENS if isinstance(part, bytes) else part)]
    tensor = datum.loss_fn_inputs["target_tokens"]
    array = np.asarray(targets if targets is not None else [*flat[1:], 5], np.int64)
    tensor.dense, tensor.dtype = array.tobytes(), 2
    tensor.shape.extend(array.shape)
    return message.SerializeToString()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """(a server of a tiny Qwen3-VL, its client, transformers' model)."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("seeing")
    theirs = vision_cases.make(folder / "model")
    special = {90: "<|image_pad|>", 92: "<|vision_start|>", 93: "<|vision_end|>", 1: "<|endoftext|>"}
    own = Tokenizer(models.WordLevel({special.get(i, f"w{i}"): i for i in range(96)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=own, eos_token=special[1], additional_special_tokens=[special[i] for i in (90, 92, 93)]).save_pretrained(
        folder / "model")
    with served(folder, image_tokens=12, config=QUICK | SMALL) as (server, client):
        yield server, client, theirs


def test_log_probs_are_transformers(seeing):
    server, client, theirs = seeing
    run = client.run(client.session())
    found = numbers(client.result(client.ok("forward_backward", request(run, 1, LEFT, png(), RIGHT, forward_only=True), headers=PROTO)))[0]
    rule = server.app.state.operations.sight.source.rule
    picture = picture_of(Image(encoded=png()), rule, 1 << 20)
    ids = np.array([*LEFT, *[vision_cases.PAD] * TOKENS, *RIGHT], np.int32)
    logits = vision_cases.theirs(theirs, ids, [3], [picture.grid], [picture.patches])
    targets = [*ids[1:3], *[7] * TOKENS, *RIGHT, 5]
    wanted = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(len(ids)), targets]
    assert picture.grid == (4, 6) and np.abs(found - wanted).max() < 1e-4
    other = numbers(client.result(client.ok("forward_backward", request(run, 2, LEFT, png(1), RIGHT, forward_only=True), headers=PROTO)))[0]
    assert np.abs(found[3:] - other[3:]).max() > 1e-2 and np.array_equal(found[:2], other[:2])


def test_a_loop_learns_from_an_image_and_samples_of_it(seeing):
    """After steps the log-probs of prompt and sample are the trainer's; of another image they are not. A run of text goes on beside it."""
    _, client, _ = seeing
    session = client.session()
    run, text = client.run(session), client.run(session, 1)
    before = client.loss(text, 1, [next_tokens([3, 10, 11, 12])])
    losses = []
    for step in range(4):
        promise = client.ok("forward_backward", request(run, 2 * step + 1, LEFT, png(), RIGHT), headers=PROTO)
        client.result(client.optim_step(run, 2 * step + 2))
        losses.append(client.result(promise).metrics["loss:sum"])
    assert losses[-1] < 0.8 * losses[0] and client.loss(text, 2, [next_tokens([3, 10, 11, 12])]) == before
    path = client.result(client.ok("save_weights_for_sampler", {"model_id": run, "seq_id": 9, "path": "seen"}))["path"]
    sampler, gaps = client.sampler(session, 0, path), []
    for seq, shown in enumerate((png(), png(1))):
        body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": chunks(LEFT, shown, RIGHT)}, "num_samples": 2,
                "prompt_logprobs": True, "sampling_params": {"max_tokens": 5, "seed": 4}}
        found = client.result(client.ok("asample", body))
        own = found.sequences[1]
        tokens = np.frombuffer(own.tokens, np.int32)
        targets = [*LEFT[1:], *[vision_cases.PAD] * TOKENS, *RIGHT, *tokens]
        parts = (LEFT, png(), [*RIGHT, *tokens[:-1]])
        scored = numbers(client.result(client.ok("forward_backward", request(run, 10 + seq, *parts, targets=targets, forward_only=True),
                                                 headers=PROTO)))[0]
        logprobs = np.frombuffer(found.prompt_logprobs, np.float32)[1:], np.frombuffer(own.logprobs, np.float32)
        gaps.append(np.abs(np.concatenate(logprobs) - scored).max())
    assert gaps[0] < 1e-5 < 1e-2 < gaps[1]


def test_images_that_cannot_be_served_are_refused(seeing):
    _, client, _ = seeing
    run = client.run(client.session())
    for seq, (parts, more, what) in enumerate((
            ((LEFT, png(), RIGHT), {"expected": 7}, "image 0 has 6 tokens here, the client expects 7"),
            ((LEFT, png(), RIGHT), {"wide": 8}, "override_dimensions is not served here"),
            ((LEFT, b"no image", RIGHT), {}, "data[0].model_input: image 0: "),
            ((LEFT, png(), [4], png(1), [4], png(2), RIGHT), {}, "18 image tokens: this server has room for 12"),
            ((LEFT, png(size=(40, 64)), RIGHT), {"expected": 40}, "larger --image-tokens")), 1):
        told = client.refused("forward_backward", request(run, seq, *parts, **more), headers=PROTO)
        assert what in told, told
    sampler = client.sampler(client.session(), 0)
    body = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "sampling_params": {"max_tokens": 2}}
    bad = chunks(LEFT, png(), RIGHT)
    for change, what in (({"data": "%%"}, "prompt.chunks[1].data is no base64"), ({"location": "a.png"}, "the field 'location' is not known")):
        told = client.refused("asample", body | {"prompt": {"chunks": [bad[0], bad[1] | change, bad[2]]}})
        assert what in told, told
    assert "a prompt ends with a token of text" in client.refused("asample", body | {"prompt": {"chunks": bad[:2]}})


def png_head(width: int, height: int) -> bytes:
    """A PNG of this size without its pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))


def test_hostile_images_are_refused_and_change_nothing(seeing):
    server, client, _ = seeing
    run = client.run(client.session())
    sampler, before = client.sampler(client.session(), 0), None
    bad = [b"", b"\0" * 64, png()[:40], png()[:-300], png_head(50_000, 50_000), png_head(0, 4), png_head(4, 0), png_head(2**31 - 1, 1),
           png_head(24, 16),
           b"GIF89a" + b"\xff" * 20, b"\xff\xd8\xff\xe0" + b"\0" * 40, b"BM" + b"\xff" * 60, b"<svg><image href='/etc/passwd'/></svg>",
           b"PK\x03\x04" * 16, b"../../etc/passwd", b"RIFF\xff\xff\xff\xffWEBPVP8 ", b"II*\0" + b"\xff" * 40]
    for seq, data in enumerate(bad, 1):
        told = client.refused("forward_backward", request(run, seq, LEFT, data, RIGHT), headers=PROTO)
        assert told.startswith("data[0].model_input: image 0") and "incident" not in told and "root:" not in told, (data[:40], told)
        body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": chunks(LEFT, data, RIGHT)}, "sampling_params": {"max_tokens": 2}}
        told = client.refused("asample", body)
        assert told.startswith("prompt: image 0") and "incident" not in told, (data[:40], told)
        line = server.worker._lines[run]
        now = {name: x.tobytes() for name, x in server.worker.trainer.arrays(line.run).items()}
        before = before or now
        assert now == before
    assert client.result(client.ok("forward_backward", request(run, len(bad) + 1, LEFT, png(), RIGHT), headers=PROTO)).metrics["loss:sum"] > 0


def test_text_models_refuse_images(tmp_path):
    with pytest.raises(ConfigError, match="--image-tokens=8: --model=.* is read without a tower"):
        with served(tmp_path, image_tokens=8):
            pass
    with served(tmp_path) as (_, client):
        run = client.run(client.session())
        told = client.refused("forward_backward", request(run, 1, LEFT, png(), RIGHT), headers=PROTO)
        assert "data[0].model_input has an image, and this server reads text" in told and "--image-tokens=1024" in told
