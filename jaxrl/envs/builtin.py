"""The environments that ship, small enough to train from nothing on two cores, one for each way to write one:

calc      a tool, `env.tools=jaxrl.envs.builtin:calculate`, with reward.functions that score the answer; or all in one,
          `env.function=calc`
library   an episode function with a tool that knows the row's facts, `env.function=library`
guess     a class with reset and step, `env.function=guess`
lake      the same with states that are met again, `env.function=lake`: mazes with holes to fall into, or a box to push
repair    what the model writes is run, `env.function=repair`: small functions that do not do what they are called

Their rows are `jaxrl://<name>/train.jsonl`, made by evidence/env_data.py; their runs configs/env.py:<name>.
"""

from __future__ import annotations

import functools
import json
import random
import re

from jaxrl import sandbox
from jaxrl.envs.api import Observation, Step, ToolError
from jaxrl.sandbox.grading import grade

# ---------------------------------------------------------------------------------------------------------------- calc


def calculate(expression: str) -> str:
    """The value of a sum of whole numbers.

    Args:
        expression: numbers with + or - between them, such as 12+34-5
    """
    if not re.fullmatch(r"-?[0-9]{1,40}([+-][0-9]{1,40}){0,9}", expression):
        raise ToolError("not a sum of whole numbers")
    return str(sum(map(int, re.findall(r"[+-]?[0-9]+", expression))))


async def calc(task, chat) -> float:
    """A sum, with `calculate` as a tool. 1 for the row's `answer`, else 0."""
    return await _answered(task, chat, calculate)


async def _answered(task, chat, tool) -> float:
    turn = await chat.send(task.prompt, tools=[tool])
    while turn.calls:
        turn = await chat.send(await turn.run())
    return float(turn.text.strip() == task.row["answer"])


# ------------------------------------------------------------------------------------------------------------- library

PEOPLE = ("ann", "ben", "eva", "ida", "kai", "leo", "liv", "max", "mia", "sam", "tom", "zoe")
RELATIONS = ("boss", "friend", "teacher")
ENTRIES = {"city": ("cairo", "delhi", "lima", "oslo", "paris", "quito", "rome", "tokyo"),
           "pet": ("bird", "cat", "dog", "fish", "frog", "goat", "horse", "mouse")}


def facts(seed: int) -> dict[tuple[str, str], str]:
    """(person, entry) -> what the library says: everybody's boss, friend, teacher, city and pet, drawn anew for each
    seed."""
    rng = random.Random(f"library/{seed}")
    drawn = {(person, relation): rng.choice([p for p in PEOPLE if p != person])
             for person in PEOPLE for relation in RELATIONS}
    return drawn | {(person, entry): rng.choice(values) for person in PEOPLE for entry, values in ENTRIES.items()}


async def library(task, chat) -> float:
    """'city of boss of friend of ann': from ann to another person, from that one to a third, then the city, each by a
    look-up. The question says how many relations are to be followed. 1 for the right answer, else 0.

    A row has `seed`, which decides the facts, and `answer`. Who guesses is right in one of eight.
    """
    known = facts(int(task.row["seed"]))

    def look_up(name: str, entry: str) -> str:
        """What the library knows of somebody.

        Args:
            name: a person
            entry: boss, friend, teacher, city or pet
        """
        if (name, entry) not in known:
            raise ToolError("unknown")
        return known[name, entry]

    return await _answered(task, chat, look_up)


# --------------------------------------------------------------------------------------------------------------- guess

class Guess:
    """A number from 1 to 32 is sought; each guess is answered with `higher` or `lower`. 1 for a hit, else 0.

    A row has `number`. env.max_turns is how many guesses may be made. The state is what is left: '17-32'.
    """

    def reset(self, row, seed):
        self.number, self.low, self.high = int(row["number"]), 1, 32
        return self.tell("1-32").observation

    def step(self, action):
        if not re.fullmatch("[0-9]{1,2}", action.strip()):
            return self.tell("a number")
        guessed = int(action)
        if guessed == self.number:
            return Step(reward=1.0, done=True)
        if guessed < self.number:
            self.low = max(self.low, guessed + 1)
            return self.tell("higher")
        self.high = min(self.high, guessed - 1)
        return self.tell("lower")

    def tell(self, text):
        return Step(Observation(text, state=f"{self.low}-{self.high}"))


# ---------------------------------------------------------------------------------------------------------------- lake

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
ASIDE = {"up": ("left", "right"), "down": ("left", "right"), "left": ("up", "down"), "right": ("up", "down")}


def moved(grid: str, move: str) -> str:
    """The map after a move: lines of `.` free, `#` wall, `O` hole, `G` goal, `B` box, `T` target, `P` player; `*` a box
    and `+` the player on a target, `W` the player at the goal, `X` one who fell into a hole.

    Walls and the edge stop a move; a box is pushed where the place behind it is free or a target.
    """
    cells = [list(line) for line in grid.split("\n")]
    row, column = next((r, line.index(c)) for r, line in enumerate(cells) for c in "P+" if c in line)

    def at(r, c):
        return cells[r][c] if 0 <= r < len(cells) and 0 <= c < len(cells[r]) else "#"

    down, right = MOVES[move]
    to, behind = (row + down, column + right), (row + 2 * down, column + 2 * right)
    found = at(*to)
    if found == "#" or found in "B*" and at(*behind) not in ".T":
        return grid
    if found in "B*":
        cells[behind[0]][behind[1]] = "*" if at(*behind) == "T" else "B"
    cells[to[0]][to[1]] = {".": "P", "B": "P", "T": "+", "*": "+", "O": "X", "G": "W"}[found]
    cells[row][column] = "T" if cells[row][column] == "+" else "."
    return "\n".join(map("".join, cells))


def solved(grid: str) -> bool:
    """Whether the player is at the goal, or every box on a target."""
    return "W" in grid or "*" in grid and "B" not in grid


class Lake:
    """A map to walk, as FrozenLake (to the goal, past the holes) and Sokoban (boxes onto targets) have them. 1 once it
    is solved, else 0; a hole ends the episode.

    A row has `map`. slip: the chance that a move goes to one of its sides instead, drawn from the episode's seed. The
    map is the state's anchor.
    """

    def __init__(self, slip: float = 0.0):
        self.slip = slip

    def reset(self, row, seed):
        self.grid, self.rng = row["map"], random.Random(seed)
        return Observation(self.grid, state=self.grid)

    def step(self, action):
        move = action.strip()
        if move in MOVES:
            if self.rng.random() < self.slip:
                move = self.rng.choice(ASIDE[move])
            self.grid = moved(self.grid, move)
        done = solved(self.grid) or "X" in self.grid
        return Step(Observation(self.grid, state=self.grid), float(solved(self.grid)), done)


# -------------------------------------------------------------------------------------------------------------- repair

@functools.lru_cache(maxsize=4096)
def failing(source: str, expression: str, tests: str) -> int:
    """The first of a repaired function's unit tests, as JSON, that it fails; -1 = none. (Members of a group often say
    the same: it is run once.)"""
    head, _, _ = source.rpartition(" return ")
    passed = grade(f"{head} return {expression}", tests).passed
    return -1 if all(passed) else passed.index(False)


class Repair:
    """A function whose name says what it should do, and whose one expression does something else: 'def add(x,y):' and
    ' return x*y'. The model says the expression that belongs there; the row's unit tests are run on it in the sandbox.
    1 once all are passed, else 0; another try is told a test that failed.

    A row has `source`, and `tests`, of reward code's forms, with fn_name.
    """

    prepare = staticmethod(sandbox.prepare)

    def reset(self, row, seed):
        self.source, self.tests = row["source"], row["tests"]
        return Observation(self.source)

    def step(self, action):
        test = failing(self.source, action.strip(), json.dumps(self.tests))
        if test < 0:
            return Step(reward=1.0, done=True)
        arguments = ",".join(map(str, self.tests["inputs"][test]))
        return Step(Observation(f"{self.tests['fn_name']}({arguments}) is {self.tests['outputs'][test]}"))


guess, lake, repair = Guess, Lake, Repair  # as env.function names them
