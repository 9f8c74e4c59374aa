"""The command of "Try it small" (docs/guides/migrate.md) on the kinds that the page names: domains with a judge, a teacher."""

import re
import shlex
from pathlib import Path

import pytest
from test_migrate import migrated, values

from jaxrl.config.load import load_config, parse_flags
from jaxrl.errors import ConfigError
from jaxrl.migrate import __main__ as command
from jaxrl.resolve.checks.common import check

HOST = "trainer.policy.megatron_config.optimizer_config_kwargs."
AREAL = {"train_dataset.batch_size": 64, "gconfig.n_samples": 4, "rollout.backend": "vllm:d2p1t1"}
PAGE = Path(__file__).parents[1] / "docs" / "guides" / "migrate.md"
SHARED = """
rollout_batch_size: 64
num_return_sequences_in_group: 8
prompt_length: 100
response_length: 200
adv_estimator: reinforce
pretrain: some/model
"""
ROLE = """
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 1, gradient_accumulation_steps: 64}
  data_args: {file_name: [a.jsonl, b.jsonl], messages: messages, domain_interleave_probs: {m: 0.5, j: 0.5}}
  strategy_args: {strategy_name: megatron_train, strategy_config: {context_parallel_size: 2}}
  device_mapping: list(range(0,8))
"""
DOMAINS = SHARED + "actor_train:" + ROLE + """
rewards:
  m: {worker_cls: a.MathRuleRewardWorker, tag_included: [x]}
  j: {worker_cls: a.LLMJudgeRewardWorker, tag_included: [y], judge_model_type: inference, model_args: {model_name_or_path: a/judge},
      generating_args: {max_new_tokens: 100, temperature: 0.3}}
"""
TEACHER = SHARED + "is_pure_opd: true\nstudent_train:" + ROLE.replace(", domain_interleave_probs: {m: 0.5, j: 0.5}", "") + """
student_infer: {generating_args: {temperature: 0.99}}
teacher: {model_args: {model_name_or_path: a/teacher}}
rewards: {m: {worker_cls: a.MathRuleRewardWorker}}
"""


@pytest.fixture(autouse=True)
def template(tmp_path, monkeypatch):
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    monkeypatch.chdir(tmp_path)


def small(tmp_path, text, *has):
    """The config of a job with the page's overrides and those of its table's rows that begin with these names."""
    (tmp_path / "job.yaml").write_text(text)
    assert command.main(["roll", str(tmp_path / "job.yaml"), f"--out={tmp_path}"]) == 0
    page = PAGE.read_text()
    line = re.search(r"\n    (JAX_PLATFORMS=cpu jaxrl train --config=NAME.*?)\n\n", page, re.DOTALL)
    words = shlex.split(line[1].replace("\\\n", " ").replace("NAME.py", str(tmp_path / "job.py")))[3:]
    rows = [row for row in re.findall(r"^\| (.*) \|$", page, re.MULTILINE) if row.startswith(has)] if has else []
    assert len(rows) == len(has)
    words += [w for row in rows for w in shlex.split(" ".join(re.findall(r"`(--config[^`]*)`", row)))]
    return load_config(*parse_flags(words))


def test_a_job_of_domains_with_a_judge(tmp_path):
    c = small(tmp_path, DOMAINS, "a judge")
    assert c.data.sources.to_dict() == {} and c.data.path == ("rows.parquet",) and c.mesh.cp == 1
    assert c.reward.functions == ("math",) and (c.reward.judge.words.to_dict(), c.reward.judge.highest) == ({}, 10.0)
    check(c)
    c = small(tmp_path, DOMAINS)
    c.reward.functions = ("math",)
    with pytest.raises(ConfigError) as e:  # every option at once, and what leaves them all out
        check(c)
    lines = [line for line in str(e.value).splitlines() if "reward.judge" in line]
    assert len(lines) == 1 and "reward.judge.highest" in lines[0] and "reward.judge.words" in lines[0]
    assert lines[0].endswith("(all at once: --config.reward.judge={})")


def test_a_job_with_a_teacher(tmp_path):
    c = small(tmp_path, TEACHER, "`teacher.path`")
    assert c.run.recipe == "distill" and c.teacher.path == "runs/grpo_tiny/export"
    check(c)


def test_a_job_with_images(tmp_path):
    """A small model with a tower, in place of the one from scratch."""
    c = small(tmp_path, DOMAINS, "a judge", "rows with images")
    assert (c.model.path, c.model.init, c.model.config.to_dict(), c.model.tokenizer) == ("runs/vision_sft_tiny/export", "pretrained", {}, "")
    assert (c.data.image_min_pixels, c.data.image_max_pixels, c.model.chat_template) == (256, 1024, "") and c.data.image_column
    check(c)


def test_a_path_beside_sources_names_the_option_that_leaves_them_out(tmp_path):
    c = small(tmp_path, DOMAINS, "a judge")
    c.data.sources = {"a": {"path": ("x.jsonl",), "weight": 1.0}}
    with pytest.raises(ConfigError, match="every one of data.sources has a path of its own; leave it out, or set data.sources={}"):
        check(c)


def test_a_table_goes_back_to_its_defaults():
    c = load_config(*parse_flags(["--config=grpo", "--config.reward.judge.words={'a': 1}", "--config.reward.judge={}", "--config.mesh.cp=4",
                                  "--config.mesh={}", "--config.mesh.tp=2"]))
    assert (c.reward.judge.words.to_dict(), c.mesh.cp, c.mesh.tp) == ({}, 1, 2)
    with pytest.raises(ConfigError, match="optimizer is a group of options"):
        parse_flags(["--config=grpo", "--config.optimizer=3"])


def test_a_file_of_another_system_is_refused_with_the_one_that_has_its_keys(tmp_path, capsys):
    (tmp_path / "job.yaml").write_text(DOMAINS)
    assert command.main(["tunix", str(tmp_path / "job.yaml"), f"--out={tmp_path}"]) == 3
    said = capsys.readouterr().out
    assert "are in no version of Tunix: it is a config of another system; roll has" in said and "needs you" not in said
    assert not (tmp_path / "job.py").exists()


@pytest.mark.parametrize(("version", "said"), [("0.9", True), ("0.3.0", False), ("0.1.2", False)])
def test_a_version_above_the_newest_is_said(tmp_path, capsys, version, said):
    (tmp_path / "job.yaml").write_text(TEACHER)
    command.main(["roll", str(tmp_path / "job.yaml"), f"--out={tmp_path}", f"--from-version={version}"])
    assert ("--from-version=0.9: the newest version of ROLL that jaxrl reads is 0.3.0" in capsys.readouterr().out) == said


@pytest.mark.parametrize(("system", "settings", "option", "value"), [
    ("skyrl", {"trainer.strategy": "megatron", HOST + "optimizer_cpu_offload": True, HOST + "optimizer_offload_fraction": 1.0},
     "optimizer.offload", True),
    ("skyrl", {"trainer.strategy": "megatron", HOST + "optimizer_cpu_offload": True}, "optimizer.offload", None),  # a share of 0
    ("skyrl", {HOST + "optimizer_cpu_offload": True, HOST + "optimizer_offload_fraction": 1.0}, "optimizer.offload", None),  # FSDP
    ("areal", AREAL | {"vllm.no_enable_prefix_caching": True}, "rollout.vllm.prefix_caching", False),
    ("areal", AREAL | {"vllm.enable_chunked_prefill": False}, "rollout.vllm.chunked_prefill", False),
    ("areal", AREAL | {"rollout.backend": "sglang:d2p1t1", "vllm.no_enable_prefix_caching": True}, "rollout.vllm.prefix_caching", None)])
def test_what_a_pattern_passed_over_has_an_option(system, settings, option, value):
    assert values(migrated(system, settings)).get(option) == value
