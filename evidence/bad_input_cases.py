"""The wrong inputs of bad_input.py: what is set up, what is called, and which texts the message must hold."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers import tiny_job  # noqa: E402

TOKENIZER = Path(tiny_job.__file__).parents[2] / "jaxrl/data/embedded/arith/tokenizer"
ROW = {"prompt": "2 + 2 =", "answer": "4"}


class Unavailable(Exception):
    """This machine cannot run the case."""


class Place:
    """The folder of one case: `inputs` is what the user brings, `run_dir` where the run would write."""

    def __init__(self, root: Path, good: Path):
        self.root, self.good, self.inputs, self.run_dir = root, good, root / "in", root / "run"
        self._undo: list[Callable] = []
        self._helpers: list[int] = []

    def write(self, name: str, content) -> Path:
        path = self.inputs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def rows(self, name: str, rows) -> Path:
        return self.write(name, "".join(json.dumps(r) + "\n" for r in rows))

    def model(self, change=lambda folder: None) -> list[str]:
        """The exported model of the good run, changed; overrides that start from it."""
        folder = self.inputs / "model"
        shutil.copytree(self.good / "export", folder)
        change(folder)
        return [f"model.path={folder}", "model.init=pretrained", "model.config={}", "model.tokenizer="]

    def reward(self, body: str, *overrides: str) -> list[str]:
        return [f"reward.functions={self.write('reward.py', body)}:score", "reward.timeout_seconds=1", *overrides]

    def resumed(self, change=lambda folder: None) -> None:
        """A copy of the good run in the run directory, changed."""
        shutil.copytree(self.good, self.run_dir)
        change(self.run_dir)

    def tmpfs(self, size: str) -> bool:
        """Mounts a small file system as the run directory; False where that is not allowed."""
        self.run_dir.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(self.run_dir)], capture_output=True
        )
        if done.returncode == 0:
            self._undo.append(lambda: subprocess.run(["umount", str(self.run_dir)], check=True))
        return done.returncode == 0

    def lock(self) -> None:
        """Holds the run directory as another run does."""
        self.run_dir.mkdir()
        file = open(self.run_dir / ".lock", "w")  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("process 1 on another-host")
        file.flush()
        self._undo.append(file.close)

    def helpers(self) -> list[int]:
        return self._helpers

    def cleanup(self) -> None:
        for undo in self._undo:
            undo()


@dataclasses.dataclass(frozen=True)
class Case:
    """says: texts of the message (field or file, value, remedy). prepare: makes files, returns overrides. device: what has
    to be done before the mistake can be seen."""

    group: str
    name: str
    says: tuple[str, ...]
    prepare: Callable[[Place], list[str]] = lambda place: []
    command: list[str] | None = None
    status: int = 2
    seconds: float = 8.0
    device: str = ""
    env: dict = dataclasses.field(default_factory=dict)


CASES: list[Case] = []


def case(group, name, says, **options):
    """Decorator: the function prepares the place and returns overrides."""

    def add(prepare):
        CASES.append(Case(group, name, says, lambda p: prepare(p) or [], **options))
        return prepare

    return add


def flags(name, says, *overrides, group="config", **options):
    CASES.append(Case(group, name, says, lambda p: list(overrides), **options))


def config_file(name, says, text, named=("--config=", "mine.py")):
    CASES.append(
        Case(
            "config",
            name,
            (*named, *says),
            lambda p: [] if p.write("mine.py", text) else [],
            command=["--config={inputs}/mine.py"],
        )
    )


# -- flags and configs ---------------------------------------------------------------------------------------------------

flags("mistyped option", ("optimizer.rl", "did you mean optimizer.lr"), "optimizer.rl=1e-5")
flags("mistyped group", ("optimiser.lr", "did you mean optimizer.lr"), "optimiser.lr=1e-5")
flags(
    "option without --config.",
    ("optimizer.lr=1e-5", "--config.optimizer.lr=1e-5"),
    command=["--config={tiny}", "--optimizer.lr=1e-5"],
)
flags(
    "unknown flag", ("--resume", "unknown argument", "--config.group.option"), command=["--config={tiny}", "--resume"]
)
flags("no --config", ("--config=FILE is missing", "usage:"), command=[])
flags(
    "no such config file", ("--config=nowhere.py", "no such file", "shipped configs: "), command=["--config=nowhere.py"]
)
flags("wrong type: 1.5 steps", ("train.steps=1.5", "expected int", "steps of the job"), "train.steps=1.5")
flags("wrong type: maybe", ("log.wandb=maybe", "expected bool"), "log.wandb=maybe")
flags("wrong type in a list", ("train.row_lengths=long", "expected a list of int"), "train.row_lengths=long")
flags("eval set without a name", ("eval.sets", "'3'", "expected 'name=path'"), "eval.sets=3")
flags("learning rate not a number", ("optimizer.lr=nan", "finite"), "optimizer.lr=nan")
flags(
    "impossible arithmetic",
    ("algorithm.num_minibatches=3", "data.prompts_per_step=4", "choose a divisor of 4"),
    "algorithm.num_minibatches=3",
)
flags("unknown preset", ("algorithm.preset='gpro'", "choose one of grpo, grpo_paper"), "algorithm.preset=gpro")
flags(
    "estimator without its coefficient",
    ("algorithm.kl.estimator='k3'", "no effect", "set algorithm.kl.coef"),
    "algorithm.kl.estimator=k3",
)
flags(
    "cap without its correction",
    ("algorithm.mismatch.cap=5.0", "no effect", "token_tis"),
    "algorithm.mismatch.cap=5",
    "algorithm.mismatch.correction=none",
)
flags(
    "three mistakes at once",
    ("optimizer.lr=-1.0", "rollout.top_p=0.0", "rollout.group_size=1"),
    "optimizer.lr=-1",
    "rollout.top_p=0",
    "rollout.group_size=1",
)
flags(
    "mesh larger than the machine",
    ("mesh.tp=3", "devices", "set one axis to -1"),
    "mesh.tp=3",
    "mesh.fsdp=1",
    device="backend",
)
flags("unknown optimizer", ("optimizer.name='adamm'", "adamw"), "optimizer.name=adamm")
flags(
    "group that matches nothing",
    ("optimizer.groups", "'no_such'", "names look like"),
    "optimizer.groups={'no_such': {'lr': 0.1}}",
    device="backend",
)
flags(
    "nothing to train", ("model.trainable", "'no_such'", "names look like"), "model.trainable=no_such", device="backend"
)
flags(
    "metric sink that cannot be imported",
    ("log.sinks", "no_such_module", "cannot be imported"),
    "log.sinks=no_such_module:Sink",
)
flags("planned fault without a step", ("faults.plan", "update.kill9", "step"), "faults.plan=update.kill9")
flags("warm start that is no config", ("run.warm_start='nowhere.py'", "no such file"), "run.warm_start=nowhere.py")
config_file("config file without get_config", ("defines no get_config(arg)",), "steps = 3\n")
config_file("syntax error in the config file", ("SyntaxError", "line 2"), "def get_config(arg=None):\n    c = = 3\n")
config_file("config file imports what is not there", ("no_such_module", "line 1"), "import no_such_module\n")
config_file(
    "config file that fails",
    ("ZeroDivisionError", "line 4"),
    "from jaxrl.config.load import default_config\ndef get_config(arg=None):\n    c = default_config()\n    c.train.steps = 1 // 0\n    return c\n",
)
config_file(
    "config file sets an unknown option",
    ("'rl'", "did you mean critic.lr or optimizer.lr"),
    "from jaxrl.config.load import default_config\ndef get_config(arg=None):\n    c = default_config()\n    c.optimizer.rl = 1\n    return c\n",
)
config_file(
    "config file sets the wrong type",
    ("train.steps", "int", "many"),
    "from jaxrl.config.load import default_config\ndef get_config(arg=None):\n    c = default_config()\n    c.train.steps = 'many'\n    return c\n",
)
config_file(
    "config file: number where text is meant",
    ("eval.sets=(3,)", "every entry must be text"),
    "from helpers import tiny_job\ndef get_config(arg=None):\n    c = tiny_job.get_config()\n    c.eval.sets = (3,)\n    return c\n",
    named=(),
)
config_file(
    "get_config returns nothing",
    ("must return", "NoneType"),
    "from jaxrl.config.load import default_config\ndef get_config(arg=None):\n    default_config()\n",
)


# -- data ----------------------------------------------------------------------------------------------------------------

flags("missing file", ("data.path=nowhere.jsonl", "no such file"), "data.path=nowhere.jsonl", group="data")
flags(
    "missing eval file", ("eval.sets test=nowhere.jsonl", "no such file"), "eval.sets=test=nowhere.jsonl", group="data"
)
flags(
    "two eval sets of one name",
    ("eval.sets", "'a' is used twice", "another"),
    "eval.sets=a=jaxrl://arith/test.jsonl,a=jaxrl://arith/train.jsonl",
    group="data",
)


@case("data", "unknown kind of file", ("data.path=", "train.txt", "known: .jsonl"))
def _(p):
    return [f"data.path={p.write('train.txt', 'x')}"]


@case(
    "data",
    "missing column",
    ("rows.jsonl:1", "'prompt' is missing", "columns found: question, answer", "data.prompt_column"),
)
def _(p):
    return [f"data.path={p.rows('rows.jsonl', [{'question': 'x', 'answer': '1'}])}"]


@case("data", "broken JSON line", ("rows.jsonl:2", "not JSON", "data.bad_rows='skip'"))
def _(p):
    return [f"data.path={p.write('rows.jsonl', json.dumps(ROW) + chr(10) + '{not json')}"]


@case("data", "empty file", ("data.path", "rows.jsonl", "no rows"))
def _(p):
    return [f"data.path={p.write('rows.jsonl', '')}"]


@case("data", "binary garbage as Parquet", ("rows.parquet", "not a readable Parquet file"))
def _(p):
    return [f"data.path={p.write('rows.parquet', np.random.default_rng(0).bytes(4096))}"]


@case("data", "binary garbage as JSONL", ("rows.jsonl:1", "not JSON"))
def _(p):
    return [f"data.path={p.write('rows.jsonl', np.random.default_rng(0).bytes(4096))}"]


@case(
    "data",
    "CSV without a header",
    ("rows.csv", "'prompt' is missing", "columns found: 2 + 2 =, 4", "data.prompt_column"),
)
def _(p):
    return [f"data.path={p.write('rows.csv', '2 + 2 =,4' + chr(10) + '3 + 3 =,6' + chr(10))}"]


@case("data", "all prompts too long", ("train: no usable row", "rows.jsonl:1", "data.max_prompt_tokens=96"))
def _(p):
    return [f"data.path={p.rows('rows.jsonl', [{'prompt': '1 + ' * 400, 'answer': '1'}] * 3)}"]


@case("data", "prompt column of numbers", ("rows.jsonl:1", "'prompt'", "text or a list of chat messages, found int"))
def _(p):
    return [f"data.path={p.rows('rows.jsonl', [{'prompt': 5, 'answer': '1'}])}"]


@case("data", "folder without data files", ("data.path=", "in/folder", "check the path"))
def _(p):
    return [f"data.path={p.write('folder/readme.md', 'x').parent}"]


@case(
    "data",
    "answer pattern that finds nothing",
    ("rows.jsonl:1", "data.answer_pattern='#### (.*)'", "'answer'", "data.bad_rows"),
)
def _(p):
    return [f"data.path={p.rows('rows.jsonl', [ROW])}", "data.answer_pattern=#### (.*)"]


@case(
    "data",
    "SFT rows without a completion",
    ("rows.jsonl:1", "'completion' is missing", "data.completion_column"),
    command=["--config={tiny}:sft"],
)
def _(p):
    return [f"data.path={p.rows('rows.jsonl', [ROW])}"]


# -- models and tokenizers -----------------------------------------------------------------------------------------------


def edit(**entries):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))

    return change


def tensors(change):
    def edit_file(folder):
        values = load_file(folder / "model.safetensors")
        change(values)
        save_file(values, folder / "model.safetensors", {"format": "pt"})

    return edit_file


def truncated(folder):
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size // 2)


NORM = "model.norm.weight"
MODELS = {
    "folder without config.json": (
        lambda f: (f / "config.json").unlink(),
        ("in/model", "no config.json", "give a folder"),
    ),
    "config.json that is no JSON": (
        lambda f: (f / "config.json").write_text("{"),
        ("in/model/config.json", "not valid JSON"),
    ),
    "unknown architecture": (
        edit(model_type="mamba", architectures=["MambaForCausalLM"]),
        ("model_type='mamba'", "choose", "qwen2"),
    ),
    "text where a number is meant": (
        edit(rope_theta="big", rope_parameters=None),
        ("model config", "rope_theta", "'big'"),
    ),
    "no weights in the folder": (
        lambda f: (f / "model.safetensors").unlink(),
        ("in/model", "no model.safetensors", "model.init=random"),
    ),
    "missing tensor": (tensors(lambda t: t.pop(NORM)), ("in/model", "lacks 1 tensors", NORM, "is config.json the one")),
    "extra tensor": (
        tensors(lambda t: t.update({"model.extra": np.zeros(3, np.float32)})),
        ("in/model", "model.extra", "no place in a qwen2"),
    ),
    "wrong shape": (
        tensors(lambda t: t.update({NORM: np.zeros(31, np.float32)})),
        ("in/model", NORM, "(31,)", "(32,)"),
    ),
    "truncated safetensors": (truncated, ("in/model/model.safetensors", "cut short", "fetch it again")),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), ("in/model", "holds no readable tokenizer")),
}
for _name, (_change, _says) in MODELS.items():
    CASES.append(Case("model", _name, _says, lambda p, change=_change: p.model(change)))

flags(
    "no such model folder",
    ("model.path='./nowhere'", "no such folder"),
    "model.path=./nowhere",
    "model.init=pretrained",
    group="model",
)
flags(
    "hub id without a network",
    ("model.path='some-org/some-model'", "hub", "give a folder"),
    "model.path=some-org/some-model",
    "model.init=pretrained",
    "model.config={}",
    group="model",
    env={"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "https://hub.invalid", "HF_HOME": "/nonexistent"},
)
flags(
    "tokenizer without a network",
    ("model.tokenizer='some-org/some-model'", "neither a folder nor a hub id in reach"),
    "model.tokenizer=some-org/some-model",
    group="model",
    env={"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "https://hub.invalid", "HF_HOME": "/nonexistent"},
)
flags(
    "tokenizer larger than the vocabulary",
    ("model.tokenizer has", "entries", "vocab_size is 16", "model.config.vocab_size"),
    "model.config.vocab_size=16",
    group="model",
)
flags(
    "heads that do not divide",
    ("hidden_size=33", "num_attention_heads=4", "change one"),
    "model.config.hidden_size=33",
    group="model",
)
flags(
    "unknown end token", ("model.eos_tokens='<nope>'", "special tokens there"), "model.eos_tokens=<nope>", group="model"
)
flags(
    "chat template that is not there",
    ("model.chat_template='nowhere.jinja'", "no such file"),
    "model.chat_template=nowhere.jinja",
    group="model",
)


@case("model", "chat template that fails", ("rows.jsonl:1", "the chat template refuses it", "TemplateSyntaxError"))
def _(p):
    return [f"data.path={p.rows('rows.jsonl', [ROW])}", f"model.chat_template={p.write('bad.jinja', '{% for m in %}')}"]


# -- reward functions ----------------------------------------------------------------------------------------------------

flags(
    "module that cannot be imported",
    ("reward", "no_such_module", "ModuleNotFoundError"),
    "reward.functions=no_such_module:score",
    group="reward",
)
flags(
    "unknown name",
    ("there is no reward 'maths'", "did you mean 'math'", "./file.py:function"),
    "reward.functions=maths",
    group="reward",
)
flags(
    "file that is not there",
    ("nowhere.py does not exist", "'score'"),
    "reward.functions=./nowhere.py:score",
    group="reward",
)
flags(
    "two weights for one function",
    ("reward.weights=(1.0, 2.0)", "2 weights for 1 functions"),
    "reward.weights=1,2",
    group="reward",
)

REWARDS = {
    "function not in the file": (
        "def other(prompt, completion):\n    return 1.0\n",
        ("has no function 'score'", "it has: other"),
        {},
    ),
    "syntax error in the file": (
        "def score(prompt, completion)\n    return 1.0\n",
        ("reward.py", "SyntaxError", "line 1"),
        {},
    ),
    "file that ends the process": (
        "import os\nos._exit(3)\n",
        ("reward.py", "a reward worker cannot start", "exited with status 3"),
        {},
    ),
    "asks for a column that is not there": (
        "def score(prompt, completion, solution):\n    return 1.0\n",
        ("score", "'solution'", "neither a data column", "answer"),
        {},
    ),
    "raises always": (
        "def score(prompt, completion, **c):\n    return c['nope']\n",
        ("score", "KeyError: 'nope'", "reward.py:2", "mend the function", "reward.trial=false"),
        {},
    ),
    "returns text": (
        "def score(prompt, completion, **c):\n    return 'good'\n",
        ("score", "returned str 'good'", "expected a number or None", "mend the function"),
        {},
    ),
    "batched, wrong count": (
        "def score(prompts, completions, **c):\n    return [1.0]\n",
        ("'score'", "returned 1 scores for 2 completions", "one score (or None) per completion"),
        {},
    ),
    "hangs": (
        "import time\ndef score(prompt, completion, **c):\n    time.sleep(1000)\n",
        ("score", "timeout", "reward.timeout_seconds=1"),
        {},
    ),
    "fails on what the model answers": (
        "def score(prompt, completion, answer, **c):\n    return {answer: 1.0}[completion]\n",
        ("score", "KeyError", "reward.max_failed_fraction=0.2", "mend the function"),
        {"device": "answers", "status": 1, "seconds": 30.0},
    ),
}
for _name, (_body, _says, _options) in REWARDS.items():
    CASES.append(Case("reward", _name, _says, lambda p, body=_body: p.reward(body), **_options))


# -- checkpoints and the run directory -----------------------------------------------------------------------------------


def break_one(folder: Path) -> None:
    """The largest file of a checkpoint loses its second half."""
    victim = max((p for p in (folder / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(victim, victim.stat().st_size // 2)


flags(
    "resume=must without a checkpoint",
    ("run.resume=must", "holds no checkpoint", "auto"),
    "run.resume=must",
    group="checkpoint",
)
flags(
    "resume path that is not there",
    ("run.resume='/no/such/run'", "auto, must, never, or the path"),
    "run.resume=/no/such/run",
    group="checkpoint",
)


@case(
    "checkpoint",
    "resume path without checkpoints",
    ("run.resume=", "in/empty", "neither a checkpoint nor a run directory"),
)
def _(p):
    return [f"run.resume={p.write('empty/file', 'x').parent}"]


@case(
    "checkpoint", "checkpoint of another model", ("run", "model.config.hidden_size", "32 -> 64", "Use another run.dir")
)
def _(p):
    p.resumed()
    return ["model.config.hidden_size=64"]


@case("checkpoint", "another seed", ("run.seed: 0 -> 1", "Use another run.dir, or run.resume=never"))
def _(p):
    p.resumed()
    return ["run.seed=1"]


@case("checkpoint", "damaged checkpoint, named", ("run.resume=", "00000004", "damaged", "bytes instead of", "another"))
def _(p):
    p.resumed(lambda f: break_one(f / "checkpoints/00000004"))
    return [f"run.resume={p.run_dir / 'checkpoints/00000004'}"]


@case("checkpoint", "all checkpoints damaged", ("all 2 checkpoints", "are damaged", "run.resume=never"))
def _(p):
    p.resumed(lambda f: [break_one(f / f"checkpoints/0000000{k}") for k in (2, 4)])


@case("checkpoint", "checkpoint of a newer jaxrl", ("00000004", "format 99", "upgrade jaxrl"))
def _(p):
    def newer(folder):
        from jaxrl.checkpoint.files import manifest_of

        folder = folder / "checkpoints/00000004"
        (file,) = [f for f in (folder / "host").iterdir() if '"format": 1' in f.read_text()]
        file.write_text(file.read_text().replace('"format": 1', '"format": 99'))
        (folder / "manifest.json").write_text(json.dumps(manifest_of(folder)))

    p.resumed(newer)


@case("run dir", "run.dir is a file", ("run.dir=", "in/file", "is not a folder", "another"))
def _(p):
    return [f"run.dir={p.write('file', 'x')}"]


@case("run dir", "run.dir cannot be made", ("run.dir='/proc/nowhere/run'", "cannot be written", "another"))
def _(p):
    return ["run.dir=/proc/nowhere/run"]


@case(
    "run dir",
    "another run writes there",
    ("run.dir=", "process 1 on another-host is writing there", "choose another run.dir"),
)
def _(p):
    p.lock()


@case(
    "run dir",
    "disk too small for a checkpoint",
    ("run.dir=", "free", "needed", "choose another run.dir"),
    device="backend",
)
def _(p):
    if not p.tmpfs("64k"):
        raise Unavailable("a small file system cannot be mounted")


@case(
    "run dir",
    "disk that gets full while training",
    ("stopped", "3 saves in a row failed", "Free space in", "the run resumes"),
    status=1,
    seconds=60.0,
    device="training",
)
def _(p):
    if not p.tmpfs("1m"):
        raise Unavailable("a small file system cannot be mounted")
    return ["checkpoint.every_steps=1", "eval.before=false", "eval.every_steps=0", "train.steps=30"]
