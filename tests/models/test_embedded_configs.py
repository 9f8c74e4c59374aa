"""The shipped configs: each one loads, says what it needs, and runs; the GSM8K one on files of the same shape."""

import ast
import json
from pathlib import Path

import pytest
from helpers import tiny_models
from helpers.run_tools import ROOT, run

import jaxrl
from jaxrl.config.load import load_config
from jaxrl.errors import ConfigError
from jaxrl.resolve.checks import common

CONFIGS = sorted(p.stem for p in (ROOT / "configs").glob("*.py"))
GAMES = [f"{name}:{game}" for name in ("env", "env_sft") for game in ("calc", "guess", "library", "lake", "lake_pixels", "spot")]
VARIANTS = [*(name for name in CONFIGS if not name.startswith(("env", "vision_jobs"))), "dpo:tiny", "grpo:tiny", "grpo_sft:tiny", "grpo_vllm:tiny",
            *(f"reward_model:{name}" for name in ("weak", "rl", "rl_weak", "tiny")),
            *(f"vision_jobs:{name}" for name in ("dpo", "reward_model", "rl", "distill")), *GAMES]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_shipped_config_can_work(name):
    config = load_config(name)
    common.check(config)
    assert config.run.dir == "runs/" + name.replace(":", "_")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_docstring_says_command_hardware_and_outcome(name):
    doc = ast.get_docstring(ast.parse((ROOT / "configs" / f"{name}.py").read_text()))
    assert f"configs/{name}.py" in doc
    for heading in ("Command:", "Hardware:", "Expected:"):
        assert heading in doc


@pytest.mark.parametrize("name", CONFIGS)
def test_a_variant_that_does_not_exist_is_refused(name):
    with pytest.raises(ConfigError, match="huge"):
        load_config(f"{name}:huge")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "run"
    config = load_config("grpo:tiny", {"run.dir": str(folder), "log.console": "off"})
    return config, folder, jaxrl.train(config)


@pytest.mark.slow
def test_the_tiny_run_goes_from_warm_start_to_export(tiny):
    _, folder, summary = tiny
    first = json.loads((folder / "warm_start" / "summary.json").read_text())
    assert first["finished"] and first["steps"] == 30 and summary["finished"] and summary["steps"] == 3
    assert summary["eval_before"]["sets"].keys() == summary["eval_after"]["sets"].keys() == {"test"}
    resolved = json.loads((folder / "config.json").read_text())
    assert str(folder / "warm_start" / "export") in json.dumps(resolved)
    for place in (folder / "warm_start" / "export", folder / "export"):
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in place.iterdir()}


@pytest.mark.slow
def test_the_warm_start_learns_the_demonstrations(tiny):
    _, folder, _ = tiny
    lines = (folder / "warm_start" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.slow
def test_a_finished_warm_start_is_not_run_again(tiny):
    config, folder, _ = tiny
    before = {p: p.stat().st_mtime_ns for p in (folder / "warm_start").rglob("*") if p.is_file()}
    config = config.copy_and_resolve_references()
    config.train.steps = 4
    assert jaxrl.train(config)["steps"] == 4
    assert before == {p: p.stat().st_mtime_ns for p in (folder / "warm_start").rglob("*") if p.is_file()}


QUESTIONS = [("Ann has 3 pens and buys 4 more. How many pens has she?", "She has 3 + 4 = <<3+4=7>>7 pens.\n#### 7"),
             ("A box holds 1,200 nuts. How many nuts are in 2 boxes?", "2 boxes hold 2*1200=<<2*1200=2400>>2400.\n#### 2,400")]


@pytest.mark.slow
def test_gsm8k_runs_on_files_of_its_shape_by_overrides_alone(tmp_path):
    """Three steps of configs/grpo_gsm8k.py: a random model of Qwen2.5's shape, rows with GSM8K's columns, KL on."""
    model = Path(tiny_models.make_tokenizer(tmp_path / "model"))
    shape = dict(model_type="qwen2", vocab_size=tiny_models.VOCAB, hidden_size=48, num_hidden_layers=2, num_attention_heads=6,
                 num_key_value_heads=1, intermediate_size=96, tie_word_embeddings=True, max_position_embeddings=1024)
    (model / "config.json").write_text(json.dumps(shape))
    data = tmp_path / "gsm8k.jsonl"
    data.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in QUESTIONS * 8))
    code, printed = run(
        tmp_path / "run", f"model.path={model}", "model.init=random", f"data.path={data}", "data.subset=",
        f"eval.sets=test={data}", "data.prompts_per_step=4", "data.max_prompt_tokens=192", "rollout.group_size=2",
        "rollout.max_new_tokens=16", "rollout.cache_lengths=", "rollout.prompt_lengths=192", "train.row_lengths=",
        "train.tokens_per_microbatch=1024", "train.steps=3", "eval.max_rows=2", config="configs/grpo_gsm8k.py")
    assert code == 0, printed
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert any("kl" in name for name in lines[-1])  # the reference is held and read
    records = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "step_00000001.jsonl").read_text().splitlines()]
    assert {r["answer"] for r in records} == {"7", "2,400"}
    assert all("put your final answer within" in r["prompt"] and r["prompt"].endswith("assistant: ") for r in records)
