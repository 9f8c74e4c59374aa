"""Environments of gymnasium and textarena as classes with reset and step over text, or over gymnasium's pictures. Only
this module imports those packages.

gym:<id>        one agent, actions Discrete, MultiDiscrete, MultiBinary, Box or Text. env.options are those of
                gymnasium.make, plus `prompt`, which replaces the first lines that describe the actions. The reward of
                a turn is the step's. A turn without a valid action gets an error text and changes nothing. With
                env.options.render_mode=rgb_array each observation is the rendered picture.
textarena:<id>  one player. env.options are those of textarena.make. The reward is the game's, given to its last turn.
"""

from __future__ import annotations

import json
import re

from jaxrl.envs.api import Step
from jaxrl.workers.loading import LoadError, describe

INVALID = "There is no valid action in this answer."
ACTION_NAMES = {  # names of actions that are plain numbers in gymnasium
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "none", "right"),
}


def make_factory(kind: str, name: str, options: dict):
    """Returns a function without arguments that creates an environment, after trying it once.

    Args:
      kind: gym or textarena. name: the library's id. options: env.options.

    Raises LoadError if the library is not installed or the environment cannot be created."""
    package, adapter = {"gym": ("gymnasium", Gym), "textarena": ("textarena", Arena)}[kind]
    try:
        __import__(package)
    except ImportError as e:
        raise LoadError(f"{kind}:{name} needs the package {package} ({e}); install it, or set env.python to "
                        "the interpreter of an environment that has it") from None

    def make():
        return adapter(name, options)

    make.__module__ = __name__
    try:
        make().trial()
    except LoadError:
        raise
    except Exception as e:
        raise LoadError(f"{kind}:{name} cannot be created with env.options={options}: {describe(e)}") from None
    return make


class Gym:
    """One gymnasium environment as an environment of jaxrl.

    The observation is its text rendering, if any, and the observation itself; with render_mode=rgb_array its picture
    alone.

    Args:
      name: gymnasium's id, such as FrozenLake-v1.
      options: keyword arguments of gymnasium.make, and `prompt`, text in place of the generated instructions.

    Raises LoadError if its actions are not Discrete, MultiDiscrete, MultiBinary, Box or Text, and gymnasium's errors
    for an unknown id or option."""

    def __init__(self, name: str, options: dict):
        import gymnasium
        options = dict(options)
        self._prompt = options.pop("prompt", None)
        spec = gymnasium.spec(name)
        if "render_mode" not in options and "ansi" in _render_modes(gymnasium, spec):
            options["render_mode"] = "ansi"
        self._env = gymnasium.make(name, **options)
        self._space, self._ansi = self._env.action_space, self._env.render_mode == "ansi"
        self._shows = self._env.render_mode == "rgb_array"
        self._kind, self._invalid = type(self._space).__name__, 0
        if self._kind not in ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Text"):
            raise LoadError(f"gym:{name} has actions of kind {self._kind}, which cannot be parsed from text; wrap it "
                            "in a class with reset and step")
        self._names = ACTION_NAMES.get(spec.name, ()) if self._kind == "Discrete" else ()

    def reset(self, row, seed):
        """Resets the environment with seed modulo 2^31; returns instructions and the first observation: text, or parts
        of a message with render_mode=rgb_array. row is not read."""
        seen, _ = self._env.reset(seed=seed % 2**31)
        says = self._instructions() if self._prompt is None else self._prompt
        if self._shows:
            return [*([{"type": "text", "text": says + "\n\n"}] if says else []), self._picture()]
        return f"{says}\n\n{self._observation_text(seen)}"

    def step(self, action):
        """Takes the last action in the model's text (an action of kind Text: the whole text); returns a Step, done if
        gymnasium says terminated or truncated.

        A text without an action takes no step: it gets the text INVALID, reward 0, and is counted in the note
        `invalid`."""
        found = self._action(action)
        if found is None:
            self._invalid += 1
            return Step(INVALID, 0.0, False, {"invalid": self._invalid})
        seen, reward, terminated, truncated, _ = self._env.step(found)
        done = bool(terminated or truncated)
        shown = None if done else [self._picture()] if self._shows else self._observation_text(seen)
        return Step(shown, float(reward), done, {"invalid": self._invalid})

    def close(self):
        """Closes the environment."""
        self._env.close()

    trial = close

    def _instructions(self) -> str:
        """Returns the description of the actions."""
        if self._kind == "Discrete":
            first = int(self._space.start)
            kinds = [f"{first + k}" + (f" ({self._names[k]})" if k < len(self._names) else "")
                     for k in range(int(self._space.n))]
            return f"Answer with one action, its number or its name, each turn: {', '.join(kinds)}."
        if self._kind == "Text":
            return "Answer with the text of your action each turn."
        return f"Answer with one action each turn, a JSON list of shape {list(self._space.shape)}: {self._space}."

    def _action(self, text: str):
        """Returns the last action that a turn names, or None."""
        if self._kind == "Text":
            return str(text) if self._space.contains(str(text)) else None
        if self._kind == "Discrete":
            found = last_choice(text, self._names)
            number = None if found is None else int(self._space.start) * isinstance(found, str) + (
                self._names.index(found) if isinstance(found, str) else found)
            return number if number is not None and self._space.contains(number) else None
        import numpy
        for found in reversed(re.findall(r"\[[^\[\]]*\]", text)):
            try:
                value = numpy.asarray(json.loads(found), self._space.dtype).reshape(self._space.shape)
            except (ValueError, TypeError, OverflowError):
                continue
            return value if numpy.isfinite(value).all() and self._space.contains(value) else None
        return None

    def _picture(self) -> dict:
        return {"type": "image", "image": self._env.render()}

    def _observation_text(self, seen) -> str:
        text = str(seen.tolist() if hasattr(seen, "tolist") else seen)
        if not self._ansi:
            return text
        # Coloured cells, such as the agent's, are put in brackets.
        drawn = re.sub(r"\x1b\[[\d;]*m(.*?)\x1b\[0m", r"[\1]", str(self._env.render()))
        return f"{re.sub(chr(27) + r'.[0-9;]*m', '', drawn).strip()}\nobservation: {text}"


def last_choice(text: str, names: tuple[str, ...]) -> int | str | None:
    """Returns the last whole number (int) or the last of `names` (str) in a text, whichever comes later; None without
    one. The text is read in lower case, so `names` must be. Numbers are cut after 20 characters, the sign included."""
    words = "|".join(map(re.escape, names)) or "(?!)"
    found = re.findall(rf"(?<![\w.-])(?:-?\d++(?![\w.]*\d)|{words})(?!\w)", text.lower())
    if not found:
        return None
    return found[-1] if found[-1] in names else int(found[-1][:20])


def _render_modes(gymnasium, spec) -> list[str]:
    entry = spec.entry_point
    creator = entry if callable(entry) else gymnasium.envs.registration.load_env_creator(entry)
    return getattr(creator, "metadata", {}).get("render_modes", [])


class Arena:
    """One textarena game with one player. The observation is what the game has written since the last turn.

    name: textarena's id of the game. options: keyword arguments of textarena.make."""

    def __init__(self, name: str, options: dict):
        import textarena
        self._env = self._game = textarena.make(name, **options)
        while isinstance(self._game, textarena.Wrapper):  # some wrappers repeat everything shown before
            self._game = self._game.env
        self._own, self._name = textarena.core.ObservationType.PLAYER_ACTION, name

    def reset(self, row, seed):
        """Starts a game with this seed; returns what it has written."""
        self._env.reset(num_players=1, seed=seed)
        return self._new_text()

    def step(self, action):
        """Plays a turn; returns a Step with what the game has written since, reward 0. At the end of the game: the
        player's reward, no observation, and the note `invalid`, 1 after an invalid move, else 0."""
        done, _ = self._env.step(action=str(action))
        if not done:
            return Step(self._new_text())
        rewards, info = self._env.close()
        info = (info or {}).get(0, {})
        return Step(None, float((rewards or {}).get(0, 0.0)), True, {"invalid": float(bool(info.get("invalid_move")))})

    def trial(self):
        """Raises LoadError if this is not a one-player game."""
        try:
            self._env.reset(num_players=1, seed=0)
        except AssertionError as e:
            raise LoadError(f"textarena:{self._name} is not a one-player game: {e}") from None

    def _new_text(self) -> str:
        _, entries = self._game.get_observation()
        return "\n".join(text for _, text, kind in entries if kind is not self._own).strip() or "(nothing)"
