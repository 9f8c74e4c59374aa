"""jaxrl on a shape: a run of GRPO, in episodes with a tool where the shape has turns, or of DPO where it has pairs, by `jaxrl.train`,
with every file that a run writes, its seconds read from its metrics.jsonl.

    python benchmarks/peers/ours.py --work FOLDER --steps 2 [--config.train.tokens_per_microbatch=4096 ...]

Further --config options win over those below. Only what the work fixes is set; all else is as users get it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import measure
import numpy as np

from jaxrl.rollout import Engine, Health, Result

HERE = Path(__file__).resolve()
PHASES = {"rollout": "generation", "publish": "generation", "score": "scoring", "update": "update"}


def config_of(args, folder: str):
    """The run's config. Group baselines need groups: with one answer per prompt the baseline is the batch's."""
    import jaxrl

    work, shape, c = args.work, args.work.shape, jaxrl.default_config()
    c.run.dir, c.run.compile_cache = folder, f"{folder}_xla"  # a cache of its own: the first step compiles, as others' does
    c.run.seed = args.seed
    c.model.path, c.model.tokenizer = str(work.folder), str(work.folder / "tokenizer")
    c.data.path = (str(work.folder / "prompts.jsonl"),)
    c.data.answer_column, c.data.shuffle = "", False
    c.data.prompts_per_step, c.data.max_prompt_tokens = shape.prompts, shape.prompt_tokens
    c.rollout.group_size, c.rollout.max_new_tokens = shape.group, shape.new_tokens
    c.rollout.engine = "jax"
    c.user.peers_work = str(work.folder)
    if shape.turns:
        c.env.tools, c.env.max_turns = (f"{HERE.parent / 'turns.py'}:add",), 2
        c.rollout.max_new_tokens, c.train.max_sequence_tokens = max(shape.turns), shape.prompt_tokens + shape.new_tokens
    if shape.pairs:
        c.run.recipe, c.data.path, c.preference.beta = "preference", (str(work.folder / "pairs.jsonl"),), measure.BETA
        c.reference.dtype = "fp32"
    elif args.replay:
        c.rollout.engine, c.algorithm.mismatch.correction = f"{HERE}:recorded_engine", "none"  # its log-probs are no one's
        c.algorithm.mismatch.warn = 0.0
    elif shape.turns:
        c.rollout.engine, c.algorithm.mismatch.correction = f"{HERE}:engine_with_turns", "none"  # its log-probs are of other tokens
        c.algorithm.mismatch.warn = 0.0
    elif shape.lengths != "full":
        c.rollout.engine = f"{HERE}:engine_with_lengths"
    if shape.group == 1:
        c.algorithm.advantage_mean = c.algorithm.advantage_std = "batch"
    if args.unscaled:
        c.algorithm.advantage_std = "none"
    c.reward.functions = (f"{HERE.parent / 'measure.py'}:reward",)
    c.optimizer.lr, c.optimizer.warmup_steps = args.lr, 0
    c.optimizer.eps, c.optimizer.weight_decay, c.optimizer.max_grad_norm = args.eps, measure.WEIGHT_DECAY, measure.CLIP_NORM
    c.algorithm.clip_low = c.algorithm.clip_high = measure.CLIP_RATIO
    c.train.steps, c.train.compute_dtype = 1 + args.steps, {"float32": "fp32", "bfloat16": "bf16"}[shape.dtype]
    c.eval.every_steps = c.checkpoint.every_steps = 0
    c.checkpoint.at_end, c.checkpoint.export_at_end = False, bool(args.save)
    c.log.console, c.log.level = "off", "warning"
    if shape.lora:
        c.lora.path, c.lora.export = str(work.folder / "adapter"), "adapter"
    return c


# ---- engines, named by rollout.engine


class Lengths:
    """The embedded sampler, but answer i of a group ends after the number of tokens that the work gives it."""

    def __init__(self, inner, work):
        self._inner, self._work = inner, work

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def submit(self, requests) -> None:
        self._inner.submit([_limited(r, len(self._work.turn(*_place(self._work, r)))) for r in requests])


class Turns(Lengths):
    """The same of every turn; then what the work has recorded takes the place of what was sampled. The sampler itself goes on from what
    it sampled, and kept, as it does where nobody comes between."""

    def __init__(self, inner, work):
        super().__init__(inner, work)
        self._asked, self._sampled = {}, {}

    def submit(self, requests) -> None:
        self._inner.submit([self._as_sampled(r) for r in requests])

    def _as_sampled(self, request):
        sequence, turn = self._asked[request.id] = _place(self._work, request)
        prompt = np.array(request.prompt, np.int32)
        if turn:
            at, own = self._work.shape.prompt_tokens, self._sampled.pop(request.after)
            prompt[at:at + len(own)] = own
        return _limited(dataclasses.replace(request, prompt=prompt), len(self._work.turn(sequence, turn)))

    def poll(self, deadline_s):
        return [self._recorded(result) for result in self._inner.poll(deadline_s)]

    def _recorded(self, result):
        sequence, turn = self._asked.pop(result.id)
        tokens = self._work.turn(sequence, turn)
        assert len(result.tokens) == len(tokens), (len(result.tokens), len(tokens))
        if turn == 0:
            self._sampled[result.id] = result.tokens
        return dataclasses.replace(result, tokens=tokens.astype(np.int32), finish="stop")


def _place(work, request) -> tuple[int, int]:
    """(sequence, turn) of a request, which must have exactly the tokens before that turn."""
    prompt = np.asarray(request.prompt, np.int32)
    place = next(i for i, p in enumerate(work.prompts) if np.array_equal(p, prompt[:len(p)]))
    sequence, turn = place * work.shape.group + request.key.sample, request.key.turn
    assert np.array_equal(prompt, work.before(sequence, turn)), "the turn begins with other tokens than the work's"
    return sequence, turn


def _limited(request, tokens: int):
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, max_new_tokens=tokens))


class Recorded(Engine):
    """Answers every request with what the work has recorded, at once. Versions are those last published."""

    def __init__(self, work):
        self._work, self._done, self._version = work, [], -1

    def submit(self, requests) -> None:
        for r in requests:
            tokens = self._work.turn(*_place(self._work, r)).astype(np.int32)
            zeros = np.zeros(len(tokens), np.float32)
            versions = np.full(len(tokens), self._version, np.int32)
            self._done.append(Result(r.id, tokens, zeros, zeros, versions, "stop" if self._work.shape.turns else "length", r.seed))

    def poll(self, deadline_s):
        done, self._done = self._done, []
        return done

    def publish(self, params, version) -> None:
        self._version = version

    def health(self) -> Health:
        return Health(True, version=self._version)

    def abort(self, ids=None) -> None:
        self._done = []

    def close(self) -> None: ...


def engine_with_lengths(config, model, tokenizer, mesh, eos_ids, hf_config):
    from jaxrl.rollout.embedded import make_engine

    return Lengths(make_engine(config, model, tokenizer, mesh, eos_ids), measure.Work(config.user.peers_work))


def engine_with_turns(config, model, tokenizer, mesh, eos_ids, hf_config):
    from jaxrl.rollout.embedded import make_engine

    return Turns(make_engine(config, model, tokenizer, mesh, eos_ids), measure.Work(config.user.peers_work))


def recorded_engine(config, model, tokenizer, mesh, eos_ids, hf_config):
    return Recorded(measure.Work(config.user.peers_work))


# ---- the run


def answers_of(run_dir: Path, step: int) -> list:
    """What a step trained on, from the file of its rollouts."""
    lines = (run_dir / "rollouts" / f"step_{step:08d}.jsonl").read_text().splitlines()
    return [json.loads(line)["tokens"] for line in lines]


def save(export: Path, file: str) -> None:
    from safetensors.numpy import load_file

    tensors = {}
    for part in sorted(export.glob("*.safetensors")):
        tensors |= load_file(part)
    np.savez(file, **tensors)


def main(argv=None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = measure.arguments([a for a in argv if not a.startswith("--config.")])

    import jaxrl
    from jaxrl.config.load import parse_flags, put

    gflops = measure.jax_ceiling(args.work.shape.dtype)
    clock = measure.Clock()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        config = config_of(args, str(run_dir))
        for name, value in parse_flags([a for a in argv if a.startswith("--config.")])[1].items():
            put(config, name, value)
        config.log.sinks = (f"{HERE}:Peak",)
        jaxrl.train(config)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            seconds = {"step": line["time"]["step"]}
            for phase, name in PHASES.items():
                seconds[name] = seconds.get(name, 0.0) + line["time"].get(phase, 0.0)
            clock.add(seconds)
        if not args.work.shape.pairs:
            args.work.check(answers_of(run_dir, 1 + args.steps), sampled=True)
        if args.save:
            save(run_dir / "export", args.save)
        peak = float((run_dir / "peak").read_text())
    measure.report("jaxrl", args, clock, ("jax", "jaxlib", "numpy"), gflops, peak,
                   [line["loss" if args.work.shape.pairs else "reward/mean"] for line in lines])


class Peak:
    """A sink that notes the highest memory of the run while its workers are still there."""

    def __init__(self, run_dir, config):
        self._file = Path(run_dir) / "peak"

    def write(self, step, scalars) -> None:
        self._file.write_text(str(measure.peak_rss_mib()))

    def close(self) -> None: ...


if __name__ == "__main__":
    main()
