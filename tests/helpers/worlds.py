"""Episodes for tests: file-based environments of the tiny job (tests/helpers/tiny_job.py), and a chat template for its tokenizer."""

import asyncio
import os
import random
import signal
import time
from pathlib import Path

TEMPLATE = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}={{ m.content }}<eos>{{ '\\n' }}{%- else -%}{{ m.content }}{{ '\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}={%- endif -%}
"""
LETTERS = """\
{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ m.content }}<end>{%- else -%} {{ m.content }} {%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}q{%- endif -%}
"""


def share_of_digits(text):
    return sum(c.isdigit() for c in text) / max(len(text), 1)


NEWS = "Ann has 10 pens: a) buys 5, b) wins 4, c) loses 5"


async def single(task, chat):
    """One turn, scored as the tiny job's reward."""
    turn = await chat.send(task.prompt)
    return share_of_digits(turn.text)


async def several(task, chat):
    """Two to four turns, drawn from the seed; each is rewarded for its digits."""
    numbers = random.Random(task.seed)
    message = task.prompt
    for k in range(numbers.randint(2, 4)):
        turn = await chat.send(message)
        chat.reward(share_of_digits(turn.text) / 4)
        chat.note(odd=k % 2)
        if turn.finish == "length" and not turn.text:
            return None
        message = f"Max has {numbers.randint(0, 9)} apples"
    return 0.25


async def letters(task, chat):
    """Two or three turns for the letters' tokenizer of tests/helpers/rollout_helpers.py."""
    turn = await chat.send(task.prompt)
    for _ in range(random.Random(task.seed).randint(1, 2)):
        turn = await chat.send("xyz")
    return float(len(turn.text))


async def rewritten(task, chat):
    """Its second turn sees another history than the first one left."""
    await chat.send(task.prompt)
    chat.rewrite([{"role": "user", "content": "Ann has 3 pens"}])
    turn = await chat.send([])
    return share_of_digits(turn.text)


async def slow(task, chat):
    await asyncio.sleep(random.Random(task.seed).uniform(0.0, 0.05))
    return await several(task, chat)


async def patient(task, chat):
    """Asks the same for as long as it may."""
    turn = await chat.send(task.prompt)
    while turn.text:
        turn = await chat.send(NEWS)
    return 1.0


async def asleep(task, chat):
    await chat.send(task.prompt)
    chat.reward(0.5)
    await chat.send(NEWS)
    chat.reward(0.25)
    now = time.monotonic
    time.monotonic = lambda: now() + 1000  # on the worker's clock
    await asyncio.sleep(10**6)


async def insists(task, chat, late=False):
    """Two turns of malformed calls, each rewarded, and then more of them than there may be."""
    message = task.prompt
    for seen in range(1, 9):
        turn = await chat.send(message)
        if seen <= 2:
            chat.reward(1.0)
            chat.note(seen=seen)
        message = await turn.run() or NEWS
        if late and seen == 2:
            time.monotonic = lambda now=time.monotonic: now() + 1000  # on the worker's clock


async def dawdles(task, chat):
    await insists(task, chat, late=True)


async def broken(task, chat):
    await chat.send(task.prompt)
    raise OSError("the disk is gone")


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


async def broken_resets(task, chat):
    """Of ten tasks nine never begin."""
    if task.seed % 10:
        raise ConnectionError("no simulator")
    return await several(task, chat)


async def broken_sometimes(task, chat):
    """Fails on the first tries of some tasks, by all ways there are; the folder is where tries are counted."""
    marks = Path(os.environ["WORLD"]) / str(task.seed)
    if task.seed % 3 == 0:
        tries = int(marks.read_text()) if marks.exists() else 0
        if tries < 1:
            marks.write_text(str(tries + 1))
            await chat.send(task.prompt)
            kind = task.seed % 4
            if kind == 0:
                raise OSError("the disk is gone")
            if kind == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == 2:
                time.sleep(600)
            return float("nan")
    return await several(task, chat)


async def murderous(task, chat):
    """`several`, which ends the trainer with SIGKILL at its n-th message of all, n in the file that WORLD names (Linux)."""
    mark = Path(os.environ["WORLD"])

    class Counted:
        reward, note = chat.reward, chat.note

        async def send(self, message):
            turn = await chat.send(message)
            left = int(mark.read_text()) if mark.exists() else -1
            if left >= 0:
                mark.write_text(str(left - 1))
            if left == 0:
                supervisor = Path(f"/proc/{os.getppid()}/status").read_text()
                trainer = int(supervisor.split("PPid:")[1].split()[0])
                mark.unlink()
                os.kill(trainer, signal.SIGKILL)
                time.sleep(60)
            return turn

    return await several(task, Counted())
