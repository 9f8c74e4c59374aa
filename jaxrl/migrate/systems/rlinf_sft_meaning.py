"""What keys of RLinf's supervised fine-tuning mean together. See systems/rlinf_sft.py."""

from __future__ import annotations

from jaxrl.migrate import common, devices, supervised
from jaxrl.migrate.systems import rlinf_meaning as rl
from jaxrl.migrate.systems.rlinf_meaning import ACTOR, DATA, MODEL, PLACEMENT, RUNNER
from jaxrl.migrate.table import Migration

HELD_OUT = 128  # tokens of a completion of its evaluation
ROWS = '''"""Writes the rows of RLinf's class `robo2vlmsft` as jaxrl reads them. Run it once, before you train:

    python {file}

Each file of FILES gets the columns `prompt` (the images' places, the question, its choices by letter), `completion`
(the letter and the right choice) and `images`.
"""

import ast
import json
import os

import pyarrow
import pyarrow.parquet

FILES = {files!r}  # what is read -> what is written beside this file
QUESTION, CHOICES, ANSWER, IMAGES = {question!r}, {choices!r}, {answer!r}, {images!r}


def row_of(row):
    choices = row[CHOICES]
    if isinstance(choices, str):
        try:
            choices = ast.literal_eval(choices)
        except (ValueError, SyntaxError):
            choices = [choices]
    answer = row[ANSWER]
    number = "ABCDE".find(answer) if isinstance(answer, str) else int(answer)
    letter = answer if isinstance(answer, str) else chr(65 + number)
    named = next((row[name] for name in ("images", "image") if name in row), [row.get(name) for name in IMAGES])
    pictures = [picture for picture in (named if isinstance(named, list) else [named]) if picture is not None]
    listed = "".join(f"{{chr(65 + i)}}. {{choice}}\\n" for i, choice in enumerate(choices))
    prompt = "<image>" * len(pictures) + f"{{row[QUESTION]}}\\nChoices:\\n" + listed
    return {{"prompt": prompt, "completion": f"{{letter}}. {{choices[max(number, 0)]}}", "images": pictures}}


def batches(path):
    if path.endswith(".parquet"):
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(256):
            yield batch.to_pylist()
    else:
        with open(path, encoding="utf-8") as text:
            found = json.load(text) if path.endswith(".json") else [json.loads(line) for line in text if line.strip()]
        yield found if isinstance(found, list) else [found]


def files_of(path):
    if not os.path.isdir(path):
        return [path]
    found = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sorted(name for name in found if name.lower().endswith((".parquet", ".json", ".jsonl")))


def write(paths, out):
    writer, count = None, 0
    for path in (file for one in paths for file in files_of(os.path.expandvars(one))):
        for rows in batches(path):
            table = pyarrow.Table.from_pylist([row_of(row) for row in rows])
            writer = writer or pyarrow.parquet.ParquetWriter(out, table.schema)
            writer.write_table(table.cast(writer.schema))
            count += table.num_rows
    if writer is None:
        raise SystemExit(f"{{paths}}: no rows")
    writer.close()
    print(f"{{out}}: {{count}} rows")


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    for name, paths in FILES.items():
        write(paths, os.path.join(here, name))
'''
REWARD = r'''"""RLinf's accuracy of its supervised fine-tuning: 1 where the last line of a completion, or what it marks
as its answer, is the row's completion. Case and spaces do not count."""

import re


def _plain(text):
    return " ".join(str(text).lower().split())


def _boxed(text):
    start = text.rfind("boxed{")
    depth = 0
    for end in range(start + 5, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + 6 : end].strip()
    return ""


def score(prompt, completion, answer=None, **columns):
    said = re.sub(r"<think>.*?</think>", "", completion, flags=re.S | re.I)
    said = re.sub(r"<\|[^>]+?\|>", " ", said).strip()
    for mark in (r"(?:final answer is|the answer is)\s*[:：]?\s*(\S.*)", r"answer\s*[:：]\s*(\S.*)"):
        if found := re.search(mark, said, flags=re.I):
            said = found[1].strip()
            break
    said = _boxed(said) or said
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    said = lines[-1].strip("`").strip().rstrip(".").rstrip("/") if lines else ""
    return float(_plain(said) == _plain(answer))
'''


def pipeline(m: Migration):
    """Refuses jobs whose model or rows are not those of robo2vlmsft: rows of images and text for a Qwen model."""
    kind, name = m.text(DATA + "type"), m.text(DATA + "dataset_name")
    family = next((str(s.value) for s in m.all(MODEL + "model_type") if s.value), "qwen")
    if not family.startswith("qwen"):
        why = f"{family}: SFT of RLinf is read for models of images and text (qwen2.5_vl, qwen3_vl, qwen3_vl_moe)"
        m.lacks(MODEL + "model_type", why, refuse=True)
    if kind != "vlm":
        m.lacks(DATA + "type", f"{kind}: rows of images and text are read (vlm)", refuse=True)
    elif "video" in name or name == "vlm_trend_reward_sft":
        why = f"{name}: its rows are videos, and a job with videos is not translated"
        m.lacks(DATA + "dataset_name", why, refuse=True)
    elif name != "robo2vlmsft":
        m.lacks(DATA + "dataset_name", f"{name}: of RLinf's classes of rows robo2vlmsft is for this job", refuse=True)


def lengths(m: Migration):
    """Sets the longest prompt and completion from data.max_prompt_length, which RLinf's class for these rows does not
    apply: here a longer prompt is an error, and a longer row is left out. Without it (unset, 0) it is 8192, and the
    user is asked. Raises Unreadable for other numbers below 2."""
    key = DATA + "max_prompt_length"
    supervised.sequence(m, m.integer(key), key, cut="filter")
    m.set("data.overlong_prompt", "error", key)
    m.differs(
        f"RLinf's class for these rows does not read {key}, and bounds no row; here a longer prompt stops the run, and "
        "a row that is longer with its completion is left out: give the length of your longest row, image tokens too"
    )


def layout(m: Migration):
    """Sets the mesh from the placement of the actor and, with Megatron, its parallel sizes, and mesh.roles.policy as in
    RL. A placement that cannot be read is refused. Raises Unreadable for a training_backend other than fsdp, fsdp2 and
    megatron."""
    total = rl.cluster(m)
    roles, unread = rl.placed(m, total)
    if unread:
        text = f"{str(m[unread]).strip()!r}: expected all, 0-7 or numbers with commas, of devices of one kind"
        m.lacks(unread, text, refuse=True)
    devices.count_gpus(m, len(roles.get("actor", [])) or total)
    backend = ACTOR + "training_backend"
    if m.text(backend) not in ("fsdp", "fsdp2", "megatron"):
        raise m.wrong(backend, "fsdp, fsdp2 or megatron")
    sizes = devices.megatron_sizes(m, MODEL, m.text(backend) == "megatron")
    keys = (*rl.CLUSTER, PLACEMENT)
    names = [MODEL + name for name in devices.MEGATRON.values()]
    devices.mesh(m, (backend,), (*keys, *names), **sizes, gpus=m.gpus)
    rl.rest(m)


def batch(m: Migration):
    """Sets data.prompts_per_step to actor.global_batch_size rows, and train.tokens_per_microbatch to
    actor.micro_batch_size rows of the longest kind. Raises Unreadable for a batch below 1."""
    size, micro = (ACTOR + name for name in ("global_batch_size", "micro_batch_size"))
    supervised.rows(m, m.integer(size), "rows", size)
    supervised.memory(m, m.integer(micro), micro, DATA + "max_prompt_length")


def model(m: Migration):
    """Sets model.path, model.tokenizer, model.remat and train.compute_dtype as in RLinf's RL jobs, without
    rollout.dtype. Asks for model.path if it is not set."""
    rl.model(m)
    m.options.pop("rollout.dtype")


def rows(m: Migration):
    """Sets data.path, the columns, data.shuffle, data.seed and, if the job evaluates, eval.sets for Parquet files, and
    writes the program that makes them: RLinf's class builds a prompt from several columns.

    The user is asked to run that program once. Jobs without rows to train on are refused.
    """
    train, held, file = DATA + "train_data_paths", DATA + "val_data_paths", f"{m.name}_rows.py"
    written = {f"{m.name}_train.parquet": [str(path) for path in m.list(train)]}
    if not m.list(train):
        m.lacks(train, "is not set: RLinf then evaluates alone; here that is run.mode=eval", refuse=True)
        return
    m.set("data.path", (f"./{m.name}_train.parquet",), train)
    if m.list(held) and _evaluates(m):
        written[f"{m.name}_held_out.parquet"] = [str(path) for path in m.list(held)]
        m.set("eval.sets", (f"held_out=./{m.name}_held_out.parquet",), held)
    elif m.list(held):
        m.mark(held, "inert", "there is no evaluation")
    names = {"question": "prompt_key", "choices": "choice_key", "answer": "answer_key"}
    columns = {what: m.text(DATA + key) for what, key in names.items()}
    images = [str(name) for name in m.list(DATA + "image_keys")]
    m.made += written
    m.files[file] = ROWS.format(file=file, files=written, images=images, **columns)
    m.set("data.image_column", "images", DATA + "image_keys", *(DATA + key for key in names.values()))
    m.set("data.prompt_column", "prompt", DATA + "prompt_key")
    m.set("data.completion_column", "completion", DATA + "answer_key")
    m.set("data.answer_column", "completion", DATA + "answer_key")
    m.set("data.shuffle", m.flag(DATA + "shuffle"), DATA + "shuffle")
    m.set("data.seed", m.integer(DATA + "seed"), DATA + "seed")
    m.needs(f"run `python {file}` beside the config before you train: it writes the rows as RLinf's class makes them")


def _evaluates(m: Migration) -> bool:
    return m.text(ACTOR + "training_backend") != "megatron" and (m.integer(RUNNER + "val_check_interval") or 0) > 0


def evaluation(m: Migration):
    """Sets eval.every_steps to runner.val_check_interval, eval.before=False, eval.after, eval.max_new_tokens (128 at
    most) and the reward, a file that compares a greedy completion with the held-out row's.

    Without held-out rows or an interval above 0 there is no evaluation, nor with Megatron, whose worker in RLinf
    evaluates nothing.
    """
    key, there = RUNNER + "val_check_interval", "eval.sets" in m.options
    m.set("eval.every_steps", m.integer(key) if there else 0, key)
    m.set("eval.before", False, key)
    m.set("eval.after", there, key)
    m.set("eval.max_new_tokens", min(HELD_OUT, m.options["rollout.max_new_tokens"][0]) if there else 0, key)
    m.facts["evaluation"] = f"every {m.integer(key)} steps and at the end" if there else "none"
    if there:
        common.reward_file(m, REWARD, DATA + "val_data_paths")
    elif m.text(ACTOR + "training_backend") == "megatron" and m.given(key):
        m.mark(key, "inert", "RLinf's Megatron worker evaluates nothing")


def length_of_run(m: Migration):
    """Sets train.steps and data.epochs: whichever of runner.max_steps and runner.max_epochs comes first ends the run,
    one pass if neither is set. max_steps=0 is refused.

    In RLinf 0.2 an epoch is an optimizer step, which is noted.
    """
    epochs, steps = RUNNER + "max_epochs", RUNNER + "max_steps"
    passes, most = m.integer(epochs) or -1, m.integer(steps)
    most = -1 if most is None else most
    if m.version == "0.2" and passes > 0:
        m.differs("in RLinf 0.2 max_epochs counts optimizer steps")
        most, passes = passes if most < 0 else min(most, passes), -1
    if most == 0:
        m.lacks(steps, "0: a run without steps", refuse=True)
    elif most > 0:
        m.set("train.steps", most, steps, *((epochs,) if m.version == "0.2" else ()))
    if passes > 0 or most < 0:
        m.set("data.epochs", max(passes, 1), epochs, steps)
