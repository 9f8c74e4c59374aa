"""Makes the embedded task `moving`: which way a square moves, which no single frame of a video tells.

    python evidence/moving_data.py           # rewrites jaxrl/data/embedded/moving; the same videos on every machine

Files (Parquet, one question per row, with the PNG files of the video's frames in the column `video`):
    sft.parquet    demonstrations: video, prompt, completion
    train.parquet  RL prompts: video, prompt, answer
    test.parquet   held-out prompts
    tokenizer/     word-level tokenizer in HF format, with Qwen's tokens around images and videos

A video has four frames of 24 x 24 pixels, two a second. A bright square moves STEP pixels a frame, and comes in again
where it leaves, so that in each frame it is everywhere equally often whichever way it moves: up, down, left or right.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
from shapes_data import QWEN, grey_png, tokenizer_files

FOLDER = Path(__file__).resolve().parent.parent / "jaxrl" / "data" / "embedded" / "moving"
SIDE, FRAMES, STEP = 24, 4, 3  # pixels per side, frames, pixels a frame
WAYS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
ROWS = {"sft": 1600, "train": 800, "test": 200}
PROMPT = "which way does it move?"
WORDS = ["\n", " ", "\\boxed{", "}", "?", "user", "assistant", "system", *PROMPT[:-1].split(), *WAYS, "<", ">", ".", "seconds",
         *map(str, range(10))]


def frames(way: str, rng: random.Random) -> list[np.ndarray]:
    """Returns FRAMES pictures, uint8 [24, 24]."""
    size, ground, bright = rng.randint(6, 9), rng.randint(20, 60), rng.randint(160, 250)
    begin, out = [rng.randrange(SIDE), rng.randrange(SIDE)], []
    for k in range(FRAMES):
        picture = np.full((SIDE, SIDE), ground, np.uint8)
        rows, columns = ((begin[axis] + k * STEP * WAYS[way][axis] + np.arange(size)) % SIDE for axis in (0, 1))
        picture[np.ix_(rows, columns)] = bright
        out.append(picture)
    return out


def rows(file: str) -> list[dict]:
    """Returns the rows of a file."""
    rng, out = random.Random(f"moving {file}"), []
    for number in range(ROWS[file]):
        way = list(WAYS)[number % len(WAYS)]
        row = {"video": {"frames": [grey_png(picture) for picture in frames(way, rng)], "fps": 2.0}, "prompt": PROMPT}
        out.append(row | ({"completion": f"\\boxed{{{way}}}"} if file == "sft" else {"answer": way}))
    rng.shuffle(out)
    return out


def tokenizer() -> dict[str, str]:
    """Returns name -> text of the tokenizer's files."""
    special = [*QWEN[:6], "<|video_pad|>", QWEN[6]]
    return tokenizer_files(special, words=WORDS, video="<|vision_start|><|video_pad|><|vision_end|>",
                           pattern=r"\\boxed\{|[a-z]+|[0-9]|[^a-z0-9]")


def main():
    import pyarrow as pa
    import pyarrow.parquet as pq
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    out = parser.parse_args().out
    (out / "tokenizer").mkdir(parents=True, exist_ok=True)
    for file in ROWS:
        pq.write_table(pa.Table.from_pylist(rows(file)), out / f"{file}.parquet", compression="zstd", use_dictionary=True)
    for name, text in tokenizer().items():
        (out / "tokenizer" / name).write_text(text, "utf-8")
    print({p.name: p.stat().st_size for p in sorted(out.glob("*.parquet"))})


if __name__ == "__main__":
    main()
