"""Makes the embedded task `shapes`: questions about small pictures, which are answered by looking.

    python evidence/shapes_data.py           # rewrites jaxrl/data/embedded/shapes; the same pictures on every machine

Files (Parquet, one question per row, with the picture's PNG file in the column `image`):
    sft.parquet    demonstrations: image, prompt, completion
    train.parquet  RL prompts: image, prompt, answer
    pairs.parquet  a right and a wrong completion each: image, prompt, chosen, rejected
    test.parquet   held-out prompts, of pictures that occur nowhere else; pairs_test.parquet held-out pairs
    tokenizer/         word-level tokenizer in HF format, with Qwen's tokens around images
    tokenizer_gemma3/  the same with Gemma 3's tokens and turns

A picture has 24 x 24 pixels in 3 x 3 cells, of which 4 to 8 hold a circle, a square or a triangle in red, green or blue,
each of its own size, place and shade. A question names a colour and asks how many there are: 0 to 4, about equally
often, so that a policy that does not look is right once in five times. `JUMP` of the demonstrations give the number at
once, the others name the cells first. So do pairs, both completions alike; the wrong one has another number, or has left
a cell out or named an empty one.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import zlib
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent.parent / "jaxrl" / "data" / "embedded" / "shapes"
CELLS, SIDE = 3, 8  # cells per side, pixels per side of a cell
COLOURS = {"red": (210, 60, 50), "green": (60, 170, 70), "blue": (60, 90, 210)}
SHAPES = ("circle", "square", "triangle")
MOST = 4            # of what a question asks for
PICTURES = {"sft": 2500, "train": 1200, "test": 300, "pairs": 400, "pairs_test": 100}  # held-out prompts: one question each
JUMP = 0.5          # share of demonstrations that do not name cells


def inside(shape: str, size: float, x, y):
    """Returns where the points x, y, counted from the centre of a shape, lie inside it."""
    half = size / 2
    if shape == "circle":
        return x**2 + y**2 <= half**2
    if shape == "square":
        return (abs(x) <= 0.86 * half) & (abs(y) <= 0.86 * half)
    return (y <= half * 0.9) & (abs(x) <= (y + half) * 0.58)


def drawn(cells: dict, rng: random.Random) -> np.ndarray:
    """Returns a picture, uint8 [24, 24, 3]. cells: (row, column) -> (colour, shape)."""
    ground = rng.randint(118, 138)
    out = np.full((CELLS * SIDE, CELLS * SIDE, 3), ground, np.float64)
    fine = (np.arange(4 * SIDE) + 0.5) / 4 - SIDE / 2  # four points per pixel and side smooth the edges
    for (row, column), (colour, shape) in sorted(cells.items()):
        size, shift = rng.uniform(5.2, 7.0), (rng.uniform(-0.6, 0.6), rng.uniform(-0.6, 0.6))
        shade = np.clip(np.array(COLOURS[colour]) + rng.randint(-30, 30), 0, 255)
        y, x = fine[:, None] - shift[0], fine[None, :] - shift[1]
        share = inside(shape, size, x, y).reshape(SIDE, 4, SIDE, 4).mean((1, 3))[..., None]
        part = out[row * SIDE:(row + 1) * SIDE, column * SIDE:(column + 1) * SIDE]
        part[:] = part * (1 - share) + shade * share
    return np.rint(out).astype(np.uint8)


def grey_png(pixels: np.ndarray) -> bytes:
    """Returns a grey picture as a PNG file."""
    return png(pixels, colours=0)


def png(pixels: np.ndarray, colours: int = 2) -> bytes:
    """Returns an RGB picture as a PNG file. colours: PNG's number of its kind of colours."""
    height, width = pixels.shape[:2]
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, colours, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")


def name(cell: tuple[int, int]) -> str:
    return "abc"[cell[1]] + str(cell[0] + 1)


def picture(rng: random.Random, questions: int):
    """Returns (pixels, [(question, cells that it asks for)]): colours occur 0 to MOST times."""
    while True:
        counts = {colour: rng.randint(0, MOST) for colour in COLOURS}
        if 4 <= sum(counts.values()) < CELLS**2:
            break
    free = [(r, c) for r in range(CELLS) for c in range(CELLS)]
    rng.shuffle(free)
    cells = {free.pop(): (colour, rng.choice(SHAPES)) for colour, count in counts.items() for _ in range(count)}
    asked = rng.sample(sorted(COLOURS), questions)
    found = {colour: sorted(cell for cell, own in cells.items() if own[0] == colour) for colour in asked}
    return drawn(cells, rng), [(f"how many {colour} shapes?", found[colour]) for colour in asked]


def completion(cells: list, jump: bool) -> str:
    """Returns the answer that cells give, which it names first unless jump."""
    work = "" if jump else (" ".join(map(name, sorted(cells))) or "none") + "\n"
    return f"{work}\\boxed{{{len(cells)}}}"


def pair(cells: list, rng: random.Random) -> dict:
    """Returns a right and a wrong completion."""
    if rng.random() < JUMP:
        other = rng.choice([n for n in range(MOST + 1) if n != len(cells)])
        return {"chosen": completion(cells, True), "rejected": completion([(0, 0)] * other, True)}
    wrong = list(cells)
    if cells and (len(cells) == MOST or rng.random() < 0.5):
        wrong.remove(rng.choice(wrong))
    else:
        wrong.append(rng.choice([(r, c) for r in range(CELLS) for c in range(CELLS) if (r, c) not in cells]))
    return {"chosen": completion(cells, False), "rejected": completion(wrong, False)}


def rows(file: str) -> list[dict]:
    """Returns the rows of a file."""
    rng, out = random.Random(f"shapes {file}"), []
    for _ in range(PICTURES[file]):
        pixels, questions = picture(rng, 1 if file == "test" else len(COLOURS))
        image = {"bytes": png(pixels), "path": None}
        for prompt, cells in questions:
            row: dict = {"image": image, "prompt": prompt}
            if file == "sft":
                row["completion"] = completion(cells, rng.random() < JUMP)
            elif file.startswith("pairs"):
                row |= pair(cells, rng)
            else:
                row["answer"] = str(len(cells))
            out.append(row)
    rng.shuffle(out)
    return out


QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<unk>"]
GEMMA = ["<pad>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>", "<unk>"]


def tokenizer_files(special: list[str] = QWEN, image: str = "<|vision_start|><|image_pad|><|vision_end|>",
                    answers: str = "assistant", words: list[str] | None = None, video: str = "",
                    pattern: str = r"\\boxed\{|[a-c][1-3]|[a-z]+|[0-9]|[^a-z0-9]") -> dict[str, str]:
    """Returns name -> text of the tokenizer's files. special: padding, begin and end of a turn, begin and end of an image, an image token,
    the unknown word. image: what the chat template writes for one. answers: its name of the role assistant. words: all but
    the special ones; None = those of this task. video: what the template writes for one. pattern: of words."""
    words = words or ["\n", " ", "\\boxed{", "}", "?", "user", answers, "system", "how", "many", "none", *COLOURS, "shapes",
             *map(str, range(10)), *(name((r, c)) for r in range(CELLS) for c in range(CELLS))]
    added = [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": True} for i, token in enumerate(special)]
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
             "pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern},
                               "behavior": "Isolated", "invert": False},
             "post_processor": None, "decoder": {"type": "Fuse"},
             "model": {"type": "WordLevel", "vocab": {t: i for i, t in enumerate(special + words)}, "unk_token": "<unk>"}}
    begin, end = special[1:3]
    role = "{{ message.role }}" if answers == "assistant" else "{{ '" + answers + "' if message.role == 'assistant' else message.role }}"
    template = ("{%- for message in messages -%}" + begin + role + "{{ '\\n' }}"
                "{%- if message.content is string -%}{{ message.content }}{%- else -%}{%- for part in message.content -%}"
                "{%- if part.type == 'image' -%}" + image + ("{%- elif part.type == 'video' -%}" + video if video else "")
                + "{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}"
                + end + "{{ '\\n' }}{%- endfor -%}"
                "{%- if add_generation_prompt -%}" + begin + answers + "{{ '\\n' }}{%- endif -%}")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": special[0], "eos_token": end,
              "unk_token": "<unk>", "additional_special_tokens": special[1:-1], "clean_up_tokenization_spaces": False,
              "model_max_length": 256, "chat_template": template}
    return {"tokenizer.json": json.dumps(whole, indent=1, ensure_ascii=False) + "\n",
            "tokenizer_config.json": json.dumps(config, indent=1) + "\n"}


def tokenizers() -> dict[str, dict[str, str]]:
    """Returns folder -> files."""
    return {"tokenizer": tokenizer_files(), "tokenizer_gemma3": tokenizer_files(GEMMA, "<start_of_image>", "model")}


def main():
    import pyarrow as pa
    import pyarrow.parquet as pq
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    out = parser.parse_args().out
    for file in PICTURES:
        pq.write_table(pa.Table.from_pylist(rows(file)), out / f"{file}.parquet", compression="zstd", use_dictionary=True)
    for folder, files in tokenizers().items():
        (out / folder).mkdir(parents=True, exist_ok=True)
        for name_, text in files.items():
            (out / folder / name_).write_text(text, "utf-8")
    print({p.name: p.stat().st_size for p in sorted(out.glob("*.parquet"))})


if __name__ == "__main__":
    main()
