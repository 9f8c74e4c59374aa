"""Episodes that show images, for tests: file-based environments, and their messages in every form that an image may have."""

import base64
import io
import random

import numpy as np

TEXTS = ("red", "how many shapes ?", "<|image_pad|>", "<image>", "blue <|vision_start|><|image_pad|><|vision_end|> green", "1 2 3")


def picture(rng, form=None):
    """An image of random size and content, in one of the forms that a part may hold."""
    from PIL import Image
    height, width = rng.randint(6, 30), rng.randint(6, 30)
    form = form or rng.choice(("array", "grey", "alpha", "pillow", "cmyk", "bytes", "jpeg", "uri", "table"))
    drawn = np.random.default_rng(rng.getrandbits(32))
    channels = {"grey": (), "alpha": (4,)}.get(form, (3,))
    array = drawn.integers(0, 256, (height, width, *channels)).astype(np.uint8)
    if form in ("array", "grey", "alpha"):
        return array
    image = Image.fromarray(array)
    if form == "pillow":
        return image
    if form == "cmyk":
        return image.convert("CMYK")
    out = io.BytesIO()
    image.save(out, "JPEG" if form == "jpeg" else "PNG")
    if form == "uri":
        return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    return {"bytes": out.getvalue(), "path": None} if form == "table" else out.getvalue()


def content(rng):
    """Text, or parts of text and images by turns."""
    if rng.random() < 0.25:
        return rng.choice(TEXTS)
    parts = [{"type": "image", "image": picture(rng)} if rng.random() < 0.5 else {"type": "text", "text": rng.choice(TEXTS)}
             for _ in range(rng.randint(1, 4))]
    return parts


async def fuzzed(task, chat):
    """One to four turns of text and images; some rewrite the history, some show the same picture again."""
    rng, again = random.Random(task.seed), None
    for _ in range(rng.randint(1, 4)):
        parts = again if again is not None and rng.random() < 0.2 else content(rng)
        again = parts
        if rng.random() < 0.2:
            chat.rewrite([{"role": "user", "content": content(rng)}, {"role": "assistant", "content": "2 <|image_pad|>"}])
        turn = await chat.send([{"role": "user", "content": parts}])
        if turn.finish == "length" and not turn.text:
            return 0.0
    return 1.0


async def rows_picture(task, chat):
    """The row's prompt with its picture, then text, then the row's picture again behind another one, in a new conversation."""
    await chat.send(task.prompt)
    await chat.send("how many blue shapes ?")
    chat.rewrite([])
    await chat.send([{"type": "image", "image": picture(random.Random(1), "array")}, {"type": "image"}, {"type": "text", "text": "?"}])
    return 1.0


async def board(task, chat):
    """Three pictures in three turns, of which the first comes alone."""
    shown = Board()
    seen = shown.reset({}, 0)
    for _ in range(3):
        turn = await chat.send(seen)
        if turn.finish == "length" and not turn.text:
            return None
        chat.reward(0.5)
        seen = shown.step("").observation.text
    return 0.0


class Board:
    """Shows the same board with a count; an image alone, then parts."""

    def reset(self, row, seed):
        self.turn = 0
        return {"type": "image", "image": np.zeros((12, 12, 3), np.uint8)}

    def step(self, action):
        from jaxrl.envs.api import Observation, Step
        self.turn += 1
        board = np.full((12, 12, 3), 40 * self.turn, np.uint8)
        return Step(Observation([{"type": "image", "image": board}, {"type": "text", "text": str(self.turn)}]), 0.5, self.turn == 3)


class Broken:
    """Its second picture is no image."""

    def reset(self, row, seed):
        return "red"

    def step(self, action):
        from jaxrl.envs.api import Step
        return Step([{"type": "text", "text": "blue"}, {"type": "image", "image": b"\x89PNG\r\n\x1a\n and nothing"}])


def camera(angle: int):
    """A view.

    Args:
        angle: where to
    """
    return np.full((12, 8, 3), angle, np.uint8)


def views(angle: int):
    """Two views with a text between them.

    Args:
        angle: where to
    """
    return [camera(angle), "red", camera(angle + 1)]


async def calls(task, chat):
    """Tools' pictures."""
    turn = await chat.send(task.prompt, tools=[camera, views])
    while turn.calls:
        turn = await chat.send(await turn.run())
    return 1.0
