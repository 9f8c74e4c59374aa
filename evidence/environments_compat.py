"""gymnasium and textarena in real use: four games of each through the pool of episodes, played with scripted random actions.

    python evidence/environments_compat.py        (--python INTERPRETER: one that has both, instead of an environment of its own)

Each game: 32 episodes, eight groups of four. What is shown of each:
  equal to the library    turns and rewards are those of the library itself, driven by a plain loop with the same seeds and actions
  equal alone             32 at once in two workers see, text by text, what they see one after the other in one
  members equal           the members of a group see the same at first
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "evidence")]

PINS = ("gymnasium==1.4.0", "textarena==0.7.4")
EPISODES, GROUP, TURNS = 32, 4, 30
TOWERS = [f"[{a} {b}]" for a in "ABC" for b in "ABC" if a != b]
GAMES = {  # an action drawn at random, as text
    "gym:FrozenLake-v1": lambda rng: str(rng.randrange(4)),
    "gym:Taxi-v4": lambda rng: str(rng.randrange(6)),
    "gym:CliffWalking-v1": lambda rng: str(rng.randrange(4)),
    "gym:Blackjack-v1": lambda rng: str(rng.randrange(2)),
    "textarena:GuessTheNumber-v0": lambda rng: f"[{rng.randint(1, 20)}]",
    "textarena:Mastermind-v0": lambda rng: "[" + " ".join(map(str, rng.sample(range(1, 7), 4))) + "]",
    "textarena:TowerOfHanoi-v0": lambda rng: rng.choice(TOWERS),
    "textarena:Sokoban-v0": lambda rng: f"[{rng.choice(['up', 'down', 'left', 'right'])}]",
}
DIRECT = """
import json, random, sys
import numpy
kind, name, seeds, actions = json.load(sys.stdin)
out = []
for seed, mine in zip(seeds, actions):
    random.seed(seed)
    numpy.random.seed(seed)
    rewards = []
    if kind == "gym":
        import gymnasium
        env = gymnasium.make(name)
        env.reset(seed=seed)
        for action in mine:
            _, reward, terminated, truncated, _ = env.step(int(action))
            rewards.append(float(reward))
            if terminated or truncated:
                break
    else:
        import textarena
        env = textarena.make(name)
        env.reset(num_players=1, seed=seed)
        for action in mine:
            env.get_observation()
            done, _ = env.step(action=action)
            rewards.append(float(env.close()[0][0]) if done else 0.0)
            if done:
                break
    out.append([len(rewards), sum(rewards)])
print(json.dumps(out))
"""


def actions(game: str, k: int) -> list[str]:
    rng = random.Random(f"{game}/{k}")
    return [GAMES[game](rng) for _ in range(TURNS)]


def seed(k: int) -> int:
    return 1000 + k // GROUP


def play(game: str, python: str, workers: int, at_once: int) -> dict:
    """Per episode its texts, turns and total reward; seconds of all."""
    from jaxrl.config.load import default_config
    from jaxrl.envs.pool import EpisodePool

    env = SimpleNamespace(**default_config().env.to_dict() | {
        "function": game, "python": python, "workers": workers, "max_turns": TURNS})
    texts, rewards = [[] for _ in range(EPISODES)], [0.0] * EPISODES
    scripts, waiting, over = [actions(game, k) for k in range(EPISODES)], list(range(EPISODES)), 0
    with EpisodePool(env) as pool:
        pool.ready()
        began = time.monotonic()
        running = 0
        while over < EPISODES:
            while waiting and running < at_once:
                k = waiting.pop(0)
                pool.start(str(k), {"row": {}, "prompt": "", "seed": seed(k)})
                running += 1
            for event in pool.events(60.0):
                k = int(event.id)
                if event.kind == "failed":
                    raise RuntimeError(f"{game}: {event.data['cause']}\n{event.data['detail']}")
                rewards[k] += event.data["reward"]
                if event.kind == "done":
                    over, running = over + 1, running - 1
                    continue
                texts[k] += [message["content"] for message in event.data["messages"]]
                pool.reply(event.id, {"text": scripts[k][len(texts[k]) - 1], "thinking": "", "calls": [], "finish": "stop"})
        seconds = time.monotonic() - began
    return {"texts": texts, "turns": [len(t) for t in texts], "rewards": rewards, "seconds": seconds}


def show(game: str, python: str) -> dict:
    """One row of the table."""
    together, alone = play(game, python, 2, EPISODES), play(game, python, 1, 1)
    kind, _, name = game.partition(":")
    given = [kind, name, [seed(k) for k in range(EPISODES)], [actions(game, k) for k in range(EPISODES)]]
    direct = json.loads(subprocess.run([python or sys.executable, "-c", DIRECT], input=json.dumps(given), text=True,
                                       capture_output=True, check=True).stdout.splitlines()[-1])
    first = [t[0] for t in together["texts"]]
    return {
        "game": game, "turns": sum(together["turns"]), "mean_reward": round(sum(together["rewards"]) / EPISODES, 4),
        "equal_to_the_library": all(n == turns and abs(reward - total) < 1e-9 for (n, total), turns, reward in
                                    zip(direct, together["turns"], together["rewards"], strict=True)),
        "equal_alone": together["texts"] == alone["texts"] and together["rewards"] == alone["rewards"],
        "members_equal": all(first[k] == first[k - k % GROUP] for k in range(EPISODES)),
        "different_starts": len(set(first)), "turns_per_second": round(sum(together["turns"]) / together["seconds"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="")
    python = parser.parse_args().python
    from common import record, table

    with tempfile.TemporaryDirectory() as folder:
        if not python:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            python = str(Path(folder) / "bin/python")
            subprocess.run([python, "-m", "pip", "install", "-q", *PINS], check=True)
        code = ("import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in "
                "('gymnasium', 'textarena', 'numpy')}))")
        versions = json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)
        rows = [show(game, python) for game in GAMES]
    table(list(rows[0]), [list(row.values()) for row in rows])
    wrong = [row["game"] for row in rows if not (row["equal_to_the_library"] and row["equal_alone"] and row["members_equal"])]
    record("environments_compat", {"versions": versions, "episodes": EPISODES, "games": rows})
    if wrong:
        sys.exit(f"not equal: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
