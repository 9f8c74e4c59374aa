"""jaxrl.migrate: values that a reader cut, passed over or read by one spelling, and said nothing of it."""

import json
import os

import pytest
from test_migrate import migrated, values

from jaxrl.errors import ConfigError
from jaxrl.migrate import __main__ as command
from jaxrl.migrate import images
from jaxrl.migrate.awk import computed
from jaxrl.migrate.report import literal, write
from jaxrl.migrate.shell import Script
from jaxrl.migrate.source import Setting, Unreadable, interpolate, scalar
from jaxrl.migrate.systems import table_of
from jaxrl.migrate.systems.roll_agentic_meaning import MOST_ROWS
from jaxrl.migrate.table import fitting
from jaxrl.migrate.yaml_files import YamlReader

PLACE = "trainer.placement.policy_num_"
R, A, S = "actor_rollout_ref.rollout.", "actor_train.training_args.", "algorithm.sampling_params."
SFT = {"data.train_files": "a.parquet", "data.max_length": 64, "model.path": "a/b"}
ROWS = {"sequence_length": 64, "pretrain": "a/b", "actor_train.data_args.file_name": ["a.json"]}
ALL = {"cluster.component_placement.actor,rollout": "all"}
SIZED = {  # table -> what says the number of GPUs, beside what it needs; and the number
    "verl": ({"trainer.nnodes": 2, "trainer.n_gpus_per_node": 8}, {}, 16),
    "verl/sft": ({"trainer.nnodes": 2, "trainer.n_gpus_per_node": 8}, SFT, 16),
    "skyrl": ({PLACE + "nodes": 2, PLACE + "gpus_per_node": 8}, {}, 16),
    "skyrl/sft": ({"placement.num_nodes": 2, "placement.num_gpus_per_node": 8}, {}, 16),
    "rlinf": ({"cluster.num_gpus_per_node": 8}, {"cluster.num_nodes": 2, **ALL}, 16),
    "areal": ({"actor.backend": "fsdp:d4t2", "rollout.backend": "vllm:d4"}, {}, 8),
    "areal/sft": ({"actor.backend": "fsdp:d4t2"}, {}, 8),
    "roll": ({"actor_train.device_mapping": "list(range(0,16))"}, {}, 16),
    "roll/sft": ({"sft_train.device_mapping": "list(range(0,16))"}, ROWS, 16),
    "trl": ({"num_processes": 16}, {"num_generations": 8}, 16),
}


def of(system, settings=None, **more):
    return migrated(system, {**table_of(system).required, **(settings or {})}, **more)


@pytest.mark.parametrize("system", SIZED)
def test_the_sources_gpus_win_and_gpus_stands_for_what_it_does_not_say(system):
    said, beside, count = SIZED[system]
    silent = lambda m: not any("--gpus" in text for text in m.different)  # noqa: E731
    m = of(system, {**beside, **said}, gpus=4)
    assert m.gpus == count and m.trained_on in (0, count)
    assert [t for t in m.different if t.startswith("--gpus=4 has no effect")] and silent(of(system, {**beside, **said}, gpus=count))
    required = {k: v for k, v in table_of(system).required.items() if k not in said}
    m = migrated(system, {**required, **beside}, gpus=4)
    assert m.gpus == 4 and m.trained_on in (0, 4) and silent(m)


def test_torchruns_number_wins_over_gpus():
    command = "torchrun --nnodes=2 --nproc_per_node=8 -m verl.trainer.sft_trainer"
    m = migrated("verl/sft", SFT, command=command, gpus=4)
    assert m.gpus == 16 and any(t.startswith("--gpus=4 has no effect") for t in m.different)


@pytest.mark.parametrize("system, settings", [
    ("verl", {"trainer.total_epochs": 0}), ("verl/sft", {**SFT, "trainer.total_epochs": 0}), ("skyrl", {"trainer.epochs": 0}),
    ("skyrl/sft", {"num_epochs": 0}), ("areal", {"total_train_epochs": 0}), ("cosmos_rl", {"train.epoch": 0}), ("rlinf", {"runner.max_epochs": 0}),
    ("trl", {"num_train_epochs": 0}), ("trl", {"num_train_epochs": -0.5}), ("tunix", {"num_train_epochs": 0}),
    ("roll/preference", {**ROWS, A + "num_train_epochs": 0.5}), ("roll/preference", {**ROWS, "max_steps": -1})])
def test_a_run_of_no_epoch_is_no_run_without_a_limit(system, settings):
    with pytest.raises(Unreadable, match="at least 1"):
        of(system, settings, gpus=8)


def test_a_part_of_an_epoch():
    m = of("roll/preference", {**ROWS, A + "num_train_epochs": 1.5, "max_steps": 7}, gpus=8)
    assert (values(m)["data.epochs"], values(m)["train.steps"]) == (1, 7)
    m = of("trl", {"num_train_epochs": 0.5})
    assert values(m)["data.epochs"] == 1 and [key for key, *_ in m.lacking] == ["num_train_epochs"]


def test_the_factor_of_the_loss_is_read_beside_a_kl_in_the_reward():
    kl = {"rollout_batch_size": 64, "response_length": 64, "add_token_level_kl": True, "init_kl_coef": 0.1}
    for factor in (0, 1, 2):
        m = of("roll", {**kl, "rl_loss_coef": factor}, gpus=8)
        assert values(m)["algorithm.kl.placement"] == "reward"
        assert [(key, refuse) for key, _, refuse in m.lacking] == [("rl_loss_coef", factor == 0)] * (factor != 1)


def test_a_correction_beside_ratios_to_the_sampler_is_not_passed_over():
    a, o = "trainer.algorithm.", "trainer.algorithm.off_policy_correction."
    for more in ({o + "tis_ratio_type": "token"}, {o + "sequence_mask_metric": "geometric"}, {a + "use_tis": True}):
        m = of("skyrl", {a + "policy_loss_type": "dppo", **more})
        assert values(m)["algorithm.mismatch.correction"] == "none" and [key for key, *_ in m.lacking] == list(more)
    assert not of("skyrl", {a + "policy_loss_type": "dppo"}).lacking


@pytest.mark.parametrize("system, key, option, off", [
    ("roll", "resume_from_checkpoint", "run.resume", "never"), ("trl", "resume_from_checkpoint", "run.resume", "never"),
    ("cosmos_rl", "train.resume", "run.resume", "never"), ("verl", "trainer.val_before_train", "eval.before", False),
    ("verl", "actor_rollout_ref.model.enable_gradient_checkpointing", "model.remat", "none"),
    ("skyrl", "trainer.bf16", "train.compute_dtype", "fp32"), ("rlinf", "actor.optim.optimizer_cpu_offload", "optimizer.offload", False)])
def test_a_switch_is_off_by_any_spelling(system, key, option, off):
    """Quoted text, in capitals too, and the empty text of a variable that a script does not set."""
    on = values(of(system, {key: True}, gpus=8))[option]
    for value in (False, "false", "False", "FALSE", ""):
        m = of(system, {key: value}, gpus=8)
        assert values(m)[option] == off != on, value
        assert not any(key in text for text in m.needs_you)
    assert all(values(of(system, {key: value}, gpus=8))[option] == on for value in ("true", "True"))


def test_a_switch_that_is_off_asks_for_nothing():
    for value in ("False", ""):
        assert table_of("roll").jobs and of("roll", {"is_pure_opd": value}, gpus=8).job is None
        m = of("cosmos_rl", {"policy.trainable_map.a.b": value, "policy.trainable_map.c": True})
        assert (values(m)["model.trainable"], values(m)["model.frozen"]) == (("c",), (r"a\.b",))
        m = of("verl", {"data.val_files": value or "", **{R + "multi_turn.use_inference_chat_template": value}})
        assert not any("multi_turn" in text for text in m.needs_you)
        m = of("rlinf", {"rollout.vllm.enable_prefix_caching": value, "rollout.rollout_backend": "vllm"})
        assert values(m)["rollout.vllm.prefix_caching"] is False
    m = migrated("verl/sft", {**SFT, "data.val_files": ""})
    assert not m.lacking and values(m)["eval.after"] is False
    assert "rollout.vllm.engine_kwargs.quantization" not in values(of("cosmos_rl", {"rollout.quantization": "None"}))


GAMES = {"rollout_batch_size": 64, "sequence_length": 2048, "train_env_manager.group_size": 8, "train_env_manager.tags": ["x"],
         "train_env_manager.num_groups_partition": [8], "train_env_manager.num_env_groups": 8, "val_env_manager.group_size": 1,
         "val_env_manager.tags": ["x"], "val_env_manager.num_groups_partition": [8], "eval_steps": 5, "custom_envs.x.env_type": "sokoban"}


def test_rows_of_episodes_are_as_many_as_a_step_and_an_evaluation_have():
    def lines(m, name):
        return len(m.files[f"{m.name}_{name}.jsonl"].splitlines())

    m = of("roll/agentic", {**GAMES, "val_batch_size": 8192, "rollout_batch_size": 8 * 5000}, gpus=1)
    assert (lines(m, "eval"), lines(m, "rows"), values(m)["data.prompts_per_step"]) == (8192, 5000, 5000)
    assert "8192 groups" in m.facts["evaluation"] and not any(str(MOST_ROWS) in text for text in m.different)
    many = MOST_ROWS + 1
    m = of("roll/agentic", {**GAMES, "val_batch_size": many, "rollout_batch_size": 8 * many}, gpus=1)
    assert (lines(m, "eval"), lines(m, "rows")) == (MOST_ROWS, MOST_ROWS) and f"{MOST_ROWS} groups" in m.facts["evaluation"]
    assert len([text for text in m.different if f"{many} groups" in text and f"{MOST_ROWS} rows" in text]) == 2
    assert json.loads(m.files[f"{m.name}_eval.jsonl"].splitlines()[0]) == {"prompt": "x", "tag": "x"}


def test_shares_of_domains_without_files_ask_for_files():
    of_domains = {f"rewards.{d}.{k}": v for d in "ab" for k, v in (("worker_cls", "x.MathRuleRewardWorker"), ("tag_included", [d]))}
    shares = {f"actor_train.data_args.domain_interleave_probs.{d}": 0.5 for d in "ab"}
    asked = [t for t in of("roll", {**of_domains, **shares}, gpus=8).needs_you if "domain_interleave_probs" in t]
    assert len(asked) == 1 and "names no files (actor_train.data_args.file_name)" in asked[0] and "rows of ;" not in asked[0]


def test_greedy_sampling_is_reported_under_its_key():
    assert [key for key, *_ in of("rlinf", {S + "do_sample": False}).lacking] == [S + "do_sample"]
    assert [key for key, *_ in of("rlinf", {S + "use_greedy": True}).lacking] == [S + "use_greedy"]


@pytest.mark.parametrize("key", [f"actor.{table}.{of}_level" for table in ("reward_norm", "adv_norm") for of in ("mean", "std")])
def test_an_unknown_level_is_reported_under_its_key(key):
    assert [name for name, _, refuse in of("areal", {key: "token"}).lacking if refuse] == [key]


def skyrl(folder, low, *more):
    """(exit status, report, the config's text) of SkyRL's rollout_is with a lower bound, in several steps per batch."""
    settings = {"policy_loss_type": "rollout_is", "eps_clip_low": low, "eps_clip_high": 0.3}
    lines = "".join(f"    {key}: {value}\n" for key, value in settings.items())
    (folder / "job.yaml").write_text(f"trainer:\n  train_batch_size: 64\n  policy_mini_batch_size: 16\n  algorithm:\n{lines}")
    status = command.main(["skyrl", str(folder / "job.yaml"), "--gpus=8", f"--out={folder / 'out'}", *more])
    return status, json.loads((folder / "out" / "report.json").read_text()), (folder / "out" / "job.py").read_text()


def test_files_beside_a_config_are_written_again_unless_edited(tmp_path, capsys):
    kept = lambda data: [t for t in data["needs_you"] if "stays as it is" in t]  # noqa: E731
    loss = tmp_path / "out" / "job_loss.py"
    assert skyrl(tmp_path, 0.2)[0] == 0 and "LOW, HIGH = 0.8," in loss.read_text()
    status, data, config = skyrl(tmp_path, 0.5)
    assert status == 0 and not kept(data) and "eps_clip_low=0.5" in config and "LOW, HIGH = 0.5," in loss.read_text()

    loss.write_text(loss.read_text() + "# mine\n")  # edited: it stays, and is asked about where this job has another text
    assert not kept(skyrl(tmp_path, 0.5)[1])
    for _ in range(2):
        status, data, _ = skyrl(tmp_path, 0.4)
        assert status == 0 and len(kept(data)) == 1 and data["outcome"] == "partial" and loss.read_text().endswith("# mine\n")
    assert skyrl(tmp_path, 0.4, "--strict")[0] == 3 and not kept(skyrl(tmp_path, 0.5)[1])
    loss.unlink()
    assert not kept(skyrl(tmp_path, 0.4)[1]) and "LOW, HIGH = 0.6," in loss.read_text()

    (tmp_path / "out" / "job.py").unlink()  # of what nothing says where it is from
    loss.write_text("LOW = 0\n")
    assert kept(skyrl(tmp_path, 0.4)[1]) and kept(skyrl(tmp_path, 0.4)[1]) and loss.read_text() == "LOW = 0\n"


def test_rewards_of_one_name_all_count():
    m = of("trl", {"reward_funcs": ["pkg_a.score", "pkg_b.score", "my fmt", "my-fmt", "pkg_a.score", "p.sys"]})
    names = [f.partition(":")[2] for f in values(m)["reward.functions"]]
    assert names == ["score", "pkg_b_score", "my_fmt", "my_fmt_2", "p_sys"] and values(m)["reward.weights"] == (2, 1, 1, 1, 1)
    made = {}
    exec(m.files["job_reward.py"], made)  # noqa: S102
    assert all(callable(made[name]) for name in names) and made["sys"].path
    assert m.files["job_reward.py"].count("_called('pkg_b.score'") == m.files["job_reward.py"].count("_called('pkg_a.score'") == 1
    same = {"reward_funcs": ["accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"]}
    for weights, expected in (({}, (2, 1)), ({"reward_weights": [0.25, 0.5, 3]}, (0.75, 3))):
        m = of("trl", {**same, **weights})
        assert values(m)["reward.functions"] == ("math", "think_format") and values(m)["reward.weights"] == expected
        assert any("sum of the weights" in text for text in m.different) and not m.lacking
    m = of("cosmos_rl", {f"train.train_policy.reward_function.{n}": 1.0 for n in ("a-b", "a_b")})
    assert any(refuse and "one function" in why for _, why, refuse in m.lacking)


def yaml_values(folder, notes=None, **files):
    """{key: value} of main.yaml; names of files have __ for /."""
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {s.key: s.value for s in YamlReader([] if notes is None else notes).file(folder / "main.yaml")}


def test_a_tables_own_keys_win_over_merged_ones(tmp_path):
    notes = []
    found = yaml_values(tmp_path, notes, main="a: &a {lr: 1, wd: 2}\nb: &b {wd: 3, q: 4}\nt:\n  lr: 5\n  <<: *a\nu:\n  <<: [*b, *a]\n"
                        "w: &w {n: {x: 1, y: 2}}\nz:\n  <<: *w\n  n: {x: 9}\nc: &c\n  <<: *c\n  k: 1\nl: [{lr: 7, <<: *a}]\n'<<': 8\n")
    tables = {name: {k[2:]: v for k, v in found.items() if k.startswith(name + ".")} for name in "tuzc"}
    assert tables == {"t": {"lr": 5, "wd": 2}, "u": {"wd": 3, "q": 4, "lr": 1}, "z": {"n.x": 9}, "c": {"k": 1}}
    assert found["l"] == [{"lr": 7, "wd": 2}] and found["<<"] == 8
    assert len(notes) == 1 and "wd stands in several tables" in notes[0]
    for wrong in ("5", "[*a, 5]"):
        with pytest.raises(Unreadable, match="names no table"):
            yaml_values(tmp_path, main=f"a: &a {{lr: 1}}\nt: {{<<: {wrong}}}\n")


M = {"opt__a": "x: 1\nk: 1\n", "opt__b": "y: 2\nx: 3\n", "opt__p": "# @package bar\nx: 1\n", "m__o__a": "q: 1\n"}


@pytest.mark.parametrize("defaults, nested, expected", [  # as hydra 1.3.8 composes them
    ("[{opt: [a, b]}]", "", {"opt.x": 3, "opt.k": 1, "opt.y": 2}),
    ("[{m: m}]", "[{/opt@_global_: a}]", {"x": 1, "k": 1}),
    ("[{m: m}]", "[{/opt@_global_.g.h: a}]", {"g.h.x": 1, "g.h.k": 1}),
    ("[{m: m}]", "[{/opt: a}, {o: a}]", {"m.opt.x": 1, "m.opt.k": 1, "m.o.q": 1}),
    ("[{m: m}]", "[{/opt@r: p}, {/opt@_here_: b}]", {"m.r.x": 1, "m.y": 2, "m.x": 3}),
    ("[{m: m}]", "[/opt/a@_here_, {/opt: p}]", {"m.x": 1, "m.k": 1, "bar.x": 1}),
    ("[{opt@_group_.u: a}, opt/b]", "", {"opt.u.x": 1, "opt.u.k": 1, "opt.y": 2, "opt.x": 3}),
    ("[{opt: a}, {override opt: b}]", "", {"opt.x": 3, "opt.y": 2}),
    ("[{opt: a}, {override opt: null}, {hydra: x}, {override hydra/launcher: y}]", "", {}),
    ("[{m: m}, {override /opt@m.opt: b}]", "[{/opt: a}]", {"m.opt.x": 3, "m.opt.y": 2}),
    ("[{override opt: b}]", "", {"opt.x": 3, "opt.y": 2}),  # of a list that is not at hand
    ("[{hydra_opt: a}]", "", {"hydra_opt.w": 1})])
def test_entries_of_defaults_lists(tmp_path, defaults, nested, expected):
    notes = []
    files = {"main": f"defaults: {defaults}\n", "hydra_opt__a": "w: 1\n", "m__m": f"defaults: {nested}\n" if nested else "", **M}
    assert yaml_values(tmp_path, notes, **files) == expected and not notes


def test_an_entry_that_is_not_read_is_noted(tmp_path):
    notes = []
    assert yaml_values(tmp_path, notes, main="defaults: [{opt: [a, c]}, {a: 1, b: 2}, 1.5]\n", **M) == {"opt.x": 1, "opt.k": 1}
    assert len(notes) == 3 and "opt/c.yaml" in notes[-1] and all("defaults list" in note for note in notes)


PROGRAM = """
import argparse
from dataclasses import dataclass, replace
from trl import GRPOConfig, GRPOTrainer
@dataclass
class A:
    lr: float = 1e-5
    wd: float = 0.5
class B(A):
    pass
parser = argparse.ArgumentParser()
parser.add_argument("--rate", default=1e-6)
lr = 1e-6
{before}
config = GRPOConfig(learning_rate={value}, num_generations=8)
{after}
GRPOTrainer(model="a/b", args=config, reward_funcs=["accuracy_reward"])
"""
ONCE = "args = parser.parse_args()"
INSIDE = "def main({0}):\n    config = GRPOConfig(learning_rate=lr)\n{1}"


def learning_rate(tmp_path, before="", value="1", after=""):
    """The learning rate that is read from a program; "asked" where it is asked for and not read."""
    (tmp_path / "job.py").write_text(PROGRAM.format(before=before, value=value, after=after))
    command.main(["trl", str(tmp_path / "job.py"), "--gpus=8", f"--out={tmp_path / 'out'}"])
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    key = next(k for k in data["keys"] if k["key"] == "learning_rate")
    asked = any(text.startswith("learning_rate=") for text in data["needs_you"])
    return "asked" if asked else key["value"]


@pytest.mark.parametrize("before, value, expected", [
    ("", "lr", 1e-6), ("lr: float = 5e-6", "lr", "asked"), ("for lr, x in [(5e-6, 1)]: pass", "lr", "asked"),
    ("print(lr := 3e-6)", "lr", "asked"), ("with open('x') as lr: pass", "lr", "asked"), ("b = lr = 5e-6", "lr", "asked"),
    ("lr, *x = 5e-6, 1", "lr", "asked"), ("(lr, (b, c)) = 5e-6, (1, 2)", "lr", "asked"), ("from x import lr", "lr", "asked"),
    ("def f():\n    global lr\n    lr = 5e-6", "lr", "asked"), ("def f():\n    lr = 5e-6", "lr", 1e-6),
    ("x = [lr for lr in (1, 2)]", "lr", 1e-6), ("f = lambda lr: lr", "lr", 1e-6), ("rate: float = 5e-6", "rate", 5e-6),
    ("d = {'a': 5e-6}\nd['a'] = 1\nl = [2]\nl.append(3)", "d['a']", "asked"), ("l = [5e-6]\ndel l[0]", "l[0]", "asked"),
    ("a = A(lr=5e-6)", "a.lr", 5e-6), ("a = A(wd=1)", "a.lr", 1e-5), ("a = B()", "a.lr", 1e-5), ("a = A(5e-6)", "a.lr", "asked"),
    ("a = A()\na.lr = 5e-6", "a.lr", "asked"), ("a = A()\na.lr *= 2", "a.lr", "asked"), ("a = A()\nsetattr(a, 'lr', 2)", "a.lr", "asked"),
    ("a = A()\nb = a\nb.lr = 5e-6", "a.lr", "asked"), ("a = A()\nb = A()\nb.lr = 5e-6", "a.lr", 1e-5),
    ("a = make(A(lr=5e-6))", "a.lr", "asked"), ("a = replace(A(), lr=5e-6)", "a.lr", "asked"),
    ("class C(A):\n    def __post_init__(self):\n        self.lr = 5e-6\na = C()", "a.lr", 1e-5),
    ("class C:\n    def __init__(self):\n        self.lr = 5e-6\na = A()", "a.lr", 1e-5),
    (ONCE, "args.rate", 1e-6), (ONCE + "\nargs.rate = 5e-6", "args.rate", "asked"),
    ("args = parser.parse_args(['--rate', '5e-6'])", "args.rate", "asked"),
    (ONCE + "\ndef f(proto):\n    for k in x:\n        setattr(proto, k, 1)\nf(args)", "args.rate", "asked"),
    (ONCE + "\ndef f():\n    proto = ws.protocol\n    for k in x:\n        setattr(proto, k, 1)", "args.rate", 1e-6),
    (ONCE + "\ndef f(o):\n    o.rate = 5e-6\nf(args)\nf(x)", "args.rate", "asked"), (ONCE + "\ndef f(o):\n    o.rate = 1\nf(A())", "args.rate", 1e-6),
    (ONCE + "\nclass C:\n    def f(self):\n        a = self.args\n        a.rate = 1", "args.rate", "asked"),
    (ONCE + "\nargs.__dict__['rate'] = 1", "args.rate", "asked"), (ONCE + "\nargs.__dict__.update(x)", "args.rate", "asked"),
    (ONCE + "\nx.args.rate = 1", "args.rate", "asked"),
    (ONCE + "\nmodel.config.rate = 1", "args.rate", 1e-6),
    (ONCE + "\nvars(args).update(x)", "args.rate", "asked"), ("parser.set_defaults(rate=5e-6)\n" + ONCE, "args.rate", "asked"),
    ("x = 3", "float(f'{x:.2f}')", 3.0), ("x = 'a'", "f'{x!r:>5}'.strip()", "asked"), ("x = 2", "float(f'{x:03d}')", 2.0)])
def test_names_and_attributes_have_a_value_where_nothing_else_gives_them_one(tmp_path, before, value, expected):
    assert learning_rate(tmp_path, before, value) == expected


@pytest.mark.parametrize("before, after, expected", [
    (INSIDE.format("lr=5e-6", "main()"), "", 5e-6), (INSIDE.format("lr=5e-6", "main(7e-6)"), "", 7e-6),
    (INSIDE.format("lr", "main(lr=lr)"), "", 1e-6),
    (INSIDE.format("lr=5e-6", "main(*x)"), "", "asked"), (INSIDE.format("lr=5e-6", "fire(main)"), "", "asked"),
    (INSIDE.format("lr=5e-6", "main()\nmain(1)"), "", "asked"), (INSIDE.format("**lr", "main(lr=2)"), "", "asked"),
    ("class C:\n    def f(self, lr):\n        GRPOConfig(learning_rate=lr)\nf(2)", "", "asked"),
    ("config = GRPOConfig(learning_rate=lr)", "config.learning_rate *= 2", "asked"),
    ("config = GRPOConfig(learning_rate=lr)", "config.learning_rate, x = 5e-6, 2", "asked"),
    ("config = GRPOConfig(learning_rate=lr)", "x, config.learning_rate = f()", "asked"),
    ("config = GRPOConfig(learning_rate=lr)", "setattr(config, 'learning_rate', 5e-6)", "asked"),
    ("config: GRPOConfig = GRPOConfig(learning_rate=lr)", "config.learning_rate = 5e-6", "asked")])
def test_parameters_have_the_value_of_their_functions_one_call(tmp_path, before, after, expected):
    text = PROGRAM.replace("config = GRPOConfig(learning_rate={value}, num_generations=8)", "{value}")
    (tmp_path / "job.py").write_text(text.format(before=before, value="", after=after))
    command.main(["trl", str(tmp_path / "job.py"), "--gpus=8", f"--out={tmp_path / 'out'}"])
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    asked = any("learning_rate=" in text for text in data["needs_you"])
    assert ("asked" if asked else next(k["value"] for k in data["keys"] if k["key"] == "learning_rate")) == expected


def variables(folder, text, **environment):
    """(variables after a script, its commands as texts, its notes)."""
    (folder / "job.sh").write_text(text)
    script = Script(environment, [])
    script.run(folder / "job.sh")
    return script.variables, [" ".join(word for word, _ in c.words) for c in script.commands], script.notes


def test_variables_before_a_command_and_in_a_subshell_are_of_these_alone(tmp_path):
    (tmp_path / "other.sh").write_text("echo other $LR\nSEED=1\n")
    text = "LR=1e-6\nLR=5e-6 NEW=1 python prepare.py $LR\n( LR=7e-6; SEED=2; echo in $LR )\n(( N = 1 ))\n"
    found, commands, _ = variables(tmp_path, text + "LR=6e-6 bash other.sh\nLR=8e-6 source other.sh\necho end $LR $NEW\n")
    assert found == {"LR": "1e-6", "SEED": "1"}
    assert [c for c in commands if "echo" in c or "prepare" in c] == [
        "python prepare.py 1e-6", "echo in 7e-6", "echo other 6e-6", "echo other 8e-6", "echo end 1e-6 $NEW"]
    found, _, _ = variables(tmp_path, "case $M in (a|b) X=1; ( Y=2 ) ;; (c) X=3 ;; esac\ncase $M in\n c | a ) Z=1 ;;\nesac\n(\nX=4\n)\n", M="a")
    assert found == {"M": "a", "X": "1", "Z": "1"}


@pytest.mark.parametrize("value, expected", [
    ("${X,,}", "org/qwen-7b"), ("${X^^}", "ORG/QWEN-7B"), ("${Y^}", "Abc"), ("${X,}", "org/Qwen-7B"), ("${X:0:3}", "Org"), ("${X: -2}", "7B"),
    ("${X:4}", "Qwen-7B"), ("${X:1:-3}", "rg/Qwen"), ("${X:N*2:N}", "Qw"), ("${X//\\//_}", "Org_Qwen-7B"), ("\"${X//\\//_}\"", "Org_Qwen-7B"),
    ("${X/\\//}", "OrgQwen-7B"), ("${X//[0-9Q]/.}", "Org/.wen-.B"), ("${X/#Org/o}", "o/Qwen-7B"), ("${X/%B/b}", "Org/Qwen-7b"),
    ("${X//$Q/q}", "Org/q-7B"),
    ("${X/Q*-/}", "Org/7B"), ("${X/\"*\"/}", "Org/Qwen-7B"), ("${X##*/}", "Qwen-7B"), ("${X%-*}", "Org/Qwen"), ("${X//[[:digit:]]/}", "Org/Qwen-B"),
    ("${!P}", "abc"), ("${A[@]:1}", "b c"), ("${A[*]:0:2}", "a b"), ("${A[@]/#/x}", "xa xb xc"), ("${A[1]^}", "B"), ("${#X}", "11"),
    ("${U:-d}", "d"), ("${@:2}x", "x")])
def test_parts_of_variables_are_those_of_the_shell(tmp_path, value, expected):
    text = "X=Org/Qwen-7B\nY=abc\nN=2\nQ=Qwen\nP=Y\nA=(a b c)\nprintf '%s' "
    _, commands, notes = variables(tmp_path, text + value + "\n")
    assert commands[-1] == f"printf %s {expected}" and not notes


def test_parts_of_variables_that_are_not_read_are_noted(tmp_path):
    for value, kept in (("${X@Q}", "Ab"), ("${X^^[a]}", "Ab"), ("${U,,}", "$U"), ("${U:0:4}", "$U"), ("${!A[@]}", "${!A[@]}")):
        _, commands, notes = variables(tmp_path, f"X=Ab\necho {value}\n")
        assert commands == [f"echo {kept}"] and len(notes) == 1, (value, commands, notes)


KEY = "sk-abc"


@pytest.mark.parametrize("system, settings", [
    ("verl", {R + "multi_turn.enable": True, R + "multi_turn.max_assistant_turns": 2, R + "multi_turn.api_key": KEY}),
    ("skyrl", {"generator.max_turns": 2, "environment.skyrl_gym.x.api_key": KEY}),
    ("areal", {"agent_run_args.max_turns": 2, "econfig.api_key": KEY}),
    ("cosmos_rl", {f"rollout.multi_turn_config.{k}": v for k, v in {"enable": True, "api_key": KEY}.items()}),
    ("roll/agentic", {**GAMES, "custom_envs.x.env_config.api_key": KEY, "custom_envs.x.env_config.judge.url": f"http://me:{KEY}@there/v1"}),
    ("roll/agentic", {**GAMES, "custom_envs.x.env_manager_cls": "mine.Manager", "custom_envs.x.env_config.api_key": KEY})])
def test_secrets_are_variables_of_the_environment(system, settings, tmp_path):
    m = of(system, settings, gpus=8)
    assert all(KEY not in text for text in m.files.values()) and values(m)["env.variables"] == ("API_KEY",)
    text = m.files[f"{m.name}_env.py"]
    assert "API_KEY" in text and "os.environ" in text.replace("\n", "")
    assert len([t for t in m.needs_you if "variable API_KEY" in t and "api_key" in t]) == 1
    if "import os" in text:
        os.environ["API_KEY"] = "x"
        made = {}
        try:
            exec(text, made)  # noqa: S102
        finally:
            del os.environ["API_KEY"]
        assert made["ENVS"]["x"]["config"] == {"api_key": "x", "judge": {"url": "http://<redacted>@there/v1"}}
    data = write(tmp_path, m, "job.yaml", False)
    assert KEY not in "".join(path.read_text() for path in tmp_path.iterdir()) and data["outcome"] == "partial"


def test_a_config_holds_no_secret(tmp_path):
    write(tmp_path / "w", of("cosmos_rl", {"custom.api_key": KEY, "custom.judge.hf_token": "$MY_TOKEN"}, gpus=8), "job.yaml", False)
    text = (tmp_path / "w" / "job.py").read_text()
    assert KEY not in text and "here('$API_KEY')" in text and "here('$MY_TOKEN')" in text
    assert "the variable API_KEY" in (tmp_path / "w" / "report.md").read_text()


def test_a_text_answer_that_begins_with_a_bracket_is_one_answer():
    made = {}
    exec(of("rlinf").files["job_reward.py"], made)  # noqa: S102
    score = lambda completion, answer: made["score"]("", f"\\boxed{{{completion}}}", answer)  # noqa: E731
    assert [score(c, "[1, 2]") for c in ("[1, 2]", "1")] == [1, 0] and [score(c, "[0, 1)") for c in ("[0, 1)", "1")] == [1, 0]
    assert [score(c, ["3", "4"]) for c in ("4", "5")] == [1, 0]


def test_lengths_that_leave_no_completion_are_refused():
    for settings, key in (({"prompt_length": 64, "sequence_length": 64}, "sequence_length"), ({"response_length": -1}, "response_length"),
                          ({"response_length": 64, "val_prompt_length": 64, "val_sequence_length": 64}, "val_sequence_length")):
        m = of("roll", settings, gpus=8)
        assert [name for name, _, refuse in m.lacking if refuse] == [key] and not any("neither" in text for text in m.needs_you)
    assert any("neither" in text for text in of("roll", {"sequence_length": None, "response_length": None}, gpus=8).needs_you)


@pytest.mark.parametrize("program, expected", [
    ("print 1234567", "1234567"), ("print 1234567.5", "1.23457e+06"), ("print 3 * 0.1", "0.3"), ("x = 6; print x / 2", "3"), ("print 2e20", None),
    ("print 1; print 2", "1\n2"), ('printf \\"%.1f\\", 1; printf \\"%.0f\\n\\", 2; print 3', "1.02\n3"), ("print 1; exit", None), ("x = 1", None)])
def test_awk_prints_numbers_as_it_does(program, expected):
    assert computed(f'awk "BEGIN {{{program}}}"') == expected


def test_references_in_tables_within_lists_are_followed(tmp_path):
    (tmp_path / "job.yaml").write_text(
        "lr: 1e-6\ndata: [{name: a, share: '${.weight}', weight: 0.5, rate: '${lr}', in: [{b: 'x${lr}'}]}, '${lr}']\n")
    settings = {s.key: s for s in YamlReader([]).file(tmp_path / "job.yaml")}
    found = {key: s.value for key, s in interpolate(settings).items()}
    assert found["data"] == [{"name": "a", "share": 0.5, "weight": 0.5, "rate": 1e-6, "in": [{"b": "x1e-06"}]}, 1e-6]
    with pytest.raises(Unreadable, match="has no entry"):
        interpolate({"a": Setting("a", [{"b": "${.c}"}], "x")})


def test_a_file_of_another_job_of_the_system_is_said_to_be_one(tmp_path, capsys):
    settings = {"num_generations": 8, "beta": 0.1, "max_completion_length": 64, "epsilon": 0.2, "epsilon_high": 0.3, "loss_type": "dapo",
                "num_iterations": 2, "reward_weights": [1], "use_vllm": True, "vllm_mode": "colocate", "scale_rewards": False,
                "temperature": 0.9, "top_p": 0.9, "mask_truncated_completions": True}
    (tmp_path / "job.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items()))
    for table, what in (("trl/sft", "a config of another job; jaxrl migrate trl FILE"), ("skyrl/sft", "jaxrl migrate trl FILE")):
        assert command.main([table, str(tmp_path / "job.yaml"), "--gpus=8", f"--out={tmp_path / 'out'}"]) == 3
        assert what in capsys.readouterr().out
    (tmp_path / "job.yaml").write_text("".join(f"no_key_{i}: 1\n" for i in range(20)))
    assert command.main(["trl/sft", str(tmp_path / "job.yaml"), "--gpus=8", f"--out={tmp_path / 'out'}"]) == 3
    assert "a file of another program" in capsys.readouterr().out


def test_infinite_and_endless_numbers(tmp_path, capsys):
    endless = "9" * 5000
    assert scalar(endless) == endless and literal("user.a", [float("inf"), {"b": float("-inf")}])[0] == "[float('inf'), {'b': float('-inf')}]"
    for option, value in (("run.seed", float("inf")), ("rollout.group_size", float("nan"))):
        with pytest.raises((ConfigError, ValueError), match="a number"):
            fitting(option, value)
    for name, text in (("job.yaml", "trainer: {seed: .inf}\n"), ("job.yaml", f"trainer: {{seed: {endless}}}\n"), ("job.toml", f"a = {endless}\n")):
        (tmp_path / name).write_text(text)
        assert command.main(["skyrl" if name.endswith("yaml") else "cosmos_rl", str(tmp_path / name), f"--out={tmp_path / 'out'}"]) == 2
        assert name in capsys.readouterr().err


def test_a_key_that_freezes_more_than_a_tower_is_not_inert():
    key = "actor_rollout_ref.model.path"
    for frozen, kind, kept in ((("vision/.*", "embed/.*"), "equivalent", ("embed/.*",)), (("vision/.*",), "inert", ())):
        m = of("verl", {key: "a/b"})
        m.options["model.frozen"] = (frozen, (key,))
        images.without(m)
        assert m.marks[key][0] == kind and values(m).get("model.frozen", ()) == kept
