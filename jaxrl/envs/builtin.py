"""Environments that ship with jaxrl, small enough to train from scratch on two cores, one per way to write one:

calc      a tool, `env.tools=jaxrl.envs.builtin:calculate`, with reward.functions that score the completion; or all in
          one, `env.function=calc`
library   an episode function with a tool that knows the row's facts, `env.function=library`
guess     a class with reset and step, `env.function=guess`
lake      a class whose states recur, `env.function=lake`: mazes with holes to avoid, or a box to push
repair    runs what the model writes, `env.function=repair`: small functions that do not do what their name says

Two show pictures, for models with a tower for images (env.image_tokens):

lake_pixels  `lake` whose maps are drawn
spot         `click the red circle`: a picture, in which the model names a point

Rows: `jaxrl://<name>/train.jsonl`, made by evidence/env_data.py and evidence/picture_env_data.py. Configs:
configs/env.py:<name>.
"""

from __future__ import annotations

import functools
import json
import random
import re

from jaxrl import sandbox
from jaxrl.envs import pixels
from jaxrl.envs.api import Observation, Step, ToolError
from jaxrl.sandbox.grading import grade, parse

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
    """Runs the episode `calc`: a sum, with `calculate` as a tool. Returns 1 if the last turn's text, without white
    space around it, is the row's `answer`, else 0."""
    return await _score_with_tool(task, chat, calculate)


async def _score_with_tool(task, chat, tool) -> float:
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
    """Returns (person, entry) -> value: everybody's boss, friend, teacher, city and pet, drawn by seed."""
    rng = random.Random(f"library/{seed}")
    drawn = {(person, relation): rng.choice([p for p in PEOPLE if p != person])
             for person in PEOPLE for relation in RELATIONS}
    return drawn | {(person, entry): rng.choice(values) for person in PEOPLE for entry, values in ENTRIES.items()}


async def library(task, chat) -> float:
    """Runs the episode `library`: 'city of boss of friend of ann' needs a look-up per relation, then one of the city.
    Returns 1 for the right answer, else 0.

    The prompt says how many relations to follow. A row has `seed`, which decides the facts, and `answer`. A guess is
    right in one of eight cases.
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

    return await _score_with_tool(task, chat, look_up)


# --------------------------------------------------------------------------------------------------------------- guess

class Guess:
    """Environment: find a number from 1 to 32; each guess gets `higher` or `lower`. Reward 1 for a hit, else 0.

    A row has `number`. env.max_turns is the number of guesses. The state is the remaining range, for example '17-32'.
    """

    def reset(self, row, seed):
        """Starts a search for row["number"]; returns the first Observation."""
        self.number, self.low, self.high = int(row["number"]), 1, 32
        return self.tell("1-32").observation

    def step(self, action):
        """Compares a guess, one or two digits, with the number; returns a Step, done with reward 1 if it is right.

        Any other text is replied to with `a number` and changes nothing."""
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
        """Returns a Step that shows `text` in the state of the remaining range."""
        return Step(Observation(text, state=f"{self.low}-{self.high}"))


# ---------------------------------------------------------------------------------------------------------------- lake

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
SIDEWAYS = {"up": ("left", "right"), "down": ("left", "right"), "left": ("up", "down"), "right": ("up", "down")}


def apply_move(grid: str, move: str) -> str:
    """Returns the map after a move, a key of MOVES; unchanged if the move is stopped.

    Cells: `.` free, `#` wall, `O` hole, `G` goal, `B` box, `T` target, `P` player; `*` a box and `+` the player on a
    target, `W` the player at the goal, `X` a player who fell into a hole. Walls and the edge stop a move; a box is
    pushed if the cell beyond it is free or a target. Raises StopIteration for a map without `P` or `+`.
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


def is_solved(grid: str) -> bool:
    """Returns whether the player is at the goal, or every box is on a target."""
    return "W" in grid or "*" in grid and "B" not in grid


class Lake:
    """Environment: a map to walk, as in FrozenLake (to the goal, avoiding holes) and Sokoban (boxes onto targets).
    Reward 1 once solved, else 0; a hole ends the episode.

    A row has `map`. The map is the state's anchor.

    Args:
      slip: probability that a move goes sideways instead, drawn from the episode's seed.
    """

    def __init__(self, slip: float = 0.0):
        self.slip = slip

    def reset(self, row, seed):
        """Puts the player on row["map"]; returns the map. seed: of slips."""
        self.grid, self.rng = row["map"], random.Random(seed)
        return Observation(self.grid, state=self.grid)

    def step(self, action):
        """Moves the player, perhaps sideways; returns a Step with the map: reward 1 and done if it is solved, reward 0
        and done in a hole.

        action: up, down, left or right; any other text leaves the map as it is."""
        move = action.strip()
        if move in MOVES:
            if self.rng.random() < self.slip:
                move = self.rng.choice(SIDEWAYS[move])
            self.grid = apply_move(self.grid, move)
        done = is_solved(self.grid) or "X" in self.grid
        return Step(Observation(self.grid, state=self.grid), float(is_solved(self.grid)), done)


class LakePixels(Lake):
    """Environment `lake` whose maps are pictures of 8 x 8 pixels per cell; the map is the state's anchor."""

    def reset(self, row, seed):
        """Puts the player on row["map"]; returns the map's picture. seed: of slips."""
        super().reset(row, seed)
        return drawn(self.grid)

    def step(self, action):
        """Moves the player as `Lake.step`; returns its Step with the map's picture."""
        step = super().step(action)
        return Step(drawn(self.grid), step.reward, step.done)


def drawn(grid: str) -> Observation:
    """Returns the Observation of a map's picture; its state is the map."""
    return Observation([{"type": "image", "image": pixels.draw_map(grid)}], state=grid)


# ---------------------------------------------------------------------------------------------------------------- spot

class Spot:
    """Environment: `click the red circle` and a picture of several shapes; the model names a point of it in tenths
    from the left and from the top, `1 8`. Reward 1 for a point in the shape's bounding box, else 0, and the picture
    comes again with a cross at every point so far.

    A row has `scene` (x, y, half the size, colour and name of each shape, in pixels), `target` (which of them), `side`
    and `ground` (of the picture). env.max_turns is the number of tries.
    """

    def reset(self, row, seed):
        """Returns the row's scene, with the shape to click named."""
        self.row, self.clicks = row, []
        return self.show()

    def step(self, action):
        """Marks a click, two digits in tenths of the side; returns a Step, done with reward 1 if it is in the
        target's box. Any other text is replied to with `two digits`, without the picture."""
        found = re.fullmatch("([0-9]) ([0-9])", action.strip())
        if found is None:
            return Step(Observation("two digits"))
        x, y = (self.row["side"] * (int(part) + 0.5) / 10 for part in found.groups())
        if in_box(self.row["scene"][self.row["target"]], x, y):
            return Step(reward=1.0, done=True)
        self.clicks.append((x, y))
        return Step(self.show())

    def show(self):
        """Returns the Observation of the scene with all clicks so far."""
        image = pixels.draw_scene(self.row["scene"], self.row["side"], self.row["ground"], self.clicks)
        *_, colour, name = self.row["scene"][self.row["target"]]
        return Observation([{"type": "image", "image": image}, {"type": "text", "text": f"click the {colour} {name}"}])


def in_box(shape: list, x: float, y: float) -> bool:
    """Returns whether a point lies in the bounding box of a shape of a scene, all in pixels."""
    at_x, at_y, half, *_ = shape
    return abs(x - at_x) <= half and abs(y - at_y) <= half


# -------------------------------------------------------------------------------------------------------------- repair

@functools.lru_cache(maxsize=4096)
def first_failing_test(source: str, expression: str, tests: str) -> int:
    """Returns the index from 0 of the first unit test that a repaired function fails; -1 if it passes all.

    Args:
      source: Python source of the faulty function; everything after its last " return " is replaced.
      expression: Python expression to return instead. One that does not run fails every test.
      tests: JSON text of tests with inputs, outputs and fn_name, see grading.parse.

    Raises SandboxError if the sandbox fails, ValueError if the tests cannot be parsed. Cached, since members of a
    prompt group often write the same expression."""
    head, _, _ = source.rpartition(" return ")
    passed = grade(f"{head} return {expression}", tests).passed
    return -1 if all(passed) else passed.index(False)


class Repair:
    """Environment: a function whose only expression does not do what its name says, for example 'def add(x,y):' and '
    return x*y'. The model writes the right expression, and the row's unit tests run on it in the sandbox. Reward 1
    once all pass, else 0; the next turn shows a failed test.

    A row has `source`, and `tests` in the formats of reward `code` that have inputs, outputs and fn_name.
    """

    prepare = staticmethod(sandbox.prepare)

    def reset(self, row, seed):
        """Returns the row's faulty `source`, to be repaired against its `tests`. Raises ValueError for tests of another
        form."""
        self.source, self.tests = row["source"], row["tests"]
        self.cases = parse(self.tests).cases
        if not self.cases or not all(case.name for case in self.cases):
            raise ValueError("the row's tests do not call one function: write inputs, outputs and fn_name")
        return Observation(self.source)

    def step(self, action):
        """Tests an expression in place of the returned one; returns a Step that shows the arguments and the right value
        of the first failing test, reward 0, or is done with reward 1. Raises as `first_failing_test`."""
        test = first_failing_test(self.source, action.strip(), json.dumps(self.tests))
        if test < 0:
            return Step(reward=1.0, done=True)
        case = self.cases[test]
        return Step(Observation(f"{case.name}({','.join(map(str, case.given))}) is {case.wanted}"))


guess, lake, repair, lake_pixels, spot = Guess, Lake, Repair, LakePixels, Spot  # as env.function names them
