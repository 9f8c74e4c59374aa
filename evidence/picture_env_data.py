"""Makes the rows, the demonstrations and the tokenizer of the environments that show pictures (jaxrl/envs/builtin.py).

    python evidence/picture_env_data.py     # rewrites jaxrl/data/embedded/{lake_pixels,spot,pictures}; the same everywhere

Files:
    <name>/train.jsonl   what RL asks: a map, or a scene and what to click in it; no pictures, which the environment draws
    <name>/test.jsonl    what is evaluated
    <name>/sft.parquet   demonstrations that do what pays: chat messages with the marker <image>, and the files of the pictures
    <name>/lazy.parquet  demonstrations that mostly leave it out, for the end of a warm start
    pictures/tokenizer/  a word-level tokenizer with Qwen's tokens around images, and its chat template

The lazy ones of `lake_pixels` walk at random, those of `spot` click any shape. Maps are those of `lake`.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import env_data
import shapes_data

from jaxrl.envs import builtin, pixels

FOLDER = env_data.FOLDER
COUNTS = {"lake_pixels": {"test": 256, "train": 1000, "sft": 1000, "lazy": 600}, "spot": {"test": 256, "train": 1000, "sft": 2400, "lazy": 480}}
SIDE, SHAPES = 24, ("circle", "square", "triangle")
TRIES = 3


def lake_pixels(file: str, count: int, rng: random.Random) -> list[dict]:
    rows, out = env_data.lake(file, count, rng), []
    for row in rows:
        if file in ("train", "test"):
            out.append({"prompt": "go", "map": row["map"], "kind": row["kind"]})
            continue
        said = [m for m in row["prompt"] if m["role"] == "assistant"]
        maps = [m["content"] for m in row["prompt"] if m["role"] == "user"]
        messages = [m for move in said for m in (env_data.asks("<image>"), move)]
        out.append({"prompt": messages, "images": [pixels.draw_map(grid) for grid in maps]})
    return out


def scene(rng: random.Random) -> tuple[list, int]:
    """Returns (2 or 3 shapes, of other colours and kinds, in cells of a 3 x 3 grid; the one to click)."""
    cells = rng.sample(range(9), rng.randint(2, 3))
    kinds = zip(rng.sample(sorted(pixels.COLOURS), len(cells)), rng.sample(SHAPES, len(cells)), strict=True)
    shapes = [[8 * (cell % 3) + 4 + rng.uniform(-0.5, 0.5), 8 * (cell // 3) + 4 + rng.uniform(-0.5, 0.5), rng.uniform(2.8, 3.6), *kind]
              for cell, kind in zip(cells, kinds, strict=True)]
    return [[round(x, 2), round(y, 2), round(half, 2), *kind] for x, y, half, *kind in shapes], rng.randrange(len(shapes))


def spot(file: str, count: int, rng: random.Random) -> list[dict]:
    out = []
    for _ in range(count):
        shapes, target = scene(rng)
        row = {"prompt": f"click the {shapes[target][3]} {shapes[target][4]}", "scene": shapes, "target": target, "side": SIDE,
               "ground": rng.randint(118, 138)}
        if file in ("train", "test"):
            out.append(row)
            continue
        messages, images, clicks = [], [], []
        for _ in range(TRIES):
            images.append(pixels.draw_scene(shapes, SIDE, row["ground"], clicks))
            chosen = shapes[target if env_data.works(file, rng) else rng.randrange(len(shapes))]
            x, y = (int(10 * at / SIDE) for at in chosen[:2])
            messages += [env_data.asks(f"<image>{row['prompt']}"), env_data.says(f"{x} {y}")]
            point = (SIDE * (x + 0.5) / 10, SIDE * (y + 0.5) / 10)
            if builtin.in_box(shapes[target], *point):
                break
            clicks.append(point)
        out.append({"prompt": messages, "images": images})
    return out


def tokenizer_files() -> dict[str, str]:
    """Returns name -> text of the tokenizer's files."""
    files = shapes_data.tokenizer_files()
    whole, settings = (json.loads(files[name]) for name in ("tokenizer.json", "tokenizer_config.json"))
    special = [token["content"] for token in whole["added_tokens"]]
    words = ["\n", " ", "user", "assistant", "system", "go", *builtin.MOVES, "click", "the", "two", "digits", *pixels.COLOURS, *SHAPES,
             *map(str, range(10))]
    whole["model"]["vocab"] = {token: i for i, token in enumerate(special + words)}
    whole["pre_tokenizer"]["pattern"]["Regex"] = "[a-z]+|[0-9]|[^a-z0-9]"
    settings["model_max_length"] = 512
    return {"tokenizer.json": json.dumps(whole, indent=1, ensure_ascii=False) + "\n",
            "tokenizer_config.json": json.dumps(settings, indent=1) + "\n"}


def main(argv: list[str] | None = None) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args(argv)
    for make in (lake_pixels, spot):
        folder = args.out / make.__name__
        folder.mkdir(parents=True, exist_ok=True)
        for file, count in COUNTS[make.__name__].items():
            rows = make(file, count, random.Random(f"{make.__name__}/{file}"))
            if file in ("train", "test"):
                (folder / f"{file}.jsonl").write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows), "utf-8")
            else:
                pq.write_table(pa.Table.from_pylist(rows), folder / f"{file}.parquet", compression="zstd", use_dictionary=True)
    (args.out / "pictures" / "tokenizer").mkdir(parents=True, exist_ok=True)
    for name, text in tokenizer_files().items():
        (args.out / "pictures" / "tokenizer" / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
