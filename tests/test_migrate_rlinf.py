"""jaxrl.migrate: what is easy to get wrong in configs of RLinf. Every key of its table is tested in test_migrate.py."""

import importlib.util
import json

import pytest

from jaxrl.config.load import load_config
from jaxrl.migrate import __main__ as command
from jaxrl.migrate.source import Setting, Source, Unreadable
from jaxrl.migrate.systems import table_of
from jaxrl.migrate.table import Migration
from jaxrl.resolve.checks.common import check

NEEDED = {"data.rollout_batch_size": 512, "algorithm.group_size": 16, "data.max_prompt_length": 1024, "runner.seq_length": 2048,
          "actor.optim.lr": 2e-5}
CONFIG = """
cluster: {num_nodes: 1, num_gpus_per_node: 8, component_placement: {"actor,inference,rollout": all}}
runner:
  seq_length: 300
  output_dir: runs
  experiment_name: small
algorithm:
  group_size: 4
  n_minibatches: 2
  recompute_logprobs: true
  clip_ratio_c: null
  sampling_params: {top_k: 1000000, max_new_tokens: "${subtract:${runner.seq_length}, ${data.max_prompt_length}}"}
rollout:
  model_dir: some/model/
  return_logprobs: ${not:${algorithm.recompute_logprobs}}
data: {max_prompt_length: 100, rollout_batch_size: 8, train_data_paths: [a.jsonl]}
actor:
  model: {precision: fp16, recompute_granularity: full}
  optim: {lr: 2e-05, clip_grad: 0.8}
  lr_sched: {lr_warmup_fraction: 0.01, lr_decay_iters: 10}
  tokenizer: {tokenizer_model: some/model/}
reward: {reward_type: math, reward_scale: 5.0}
"""


def migrated(settings=None, version=None):
    table = table_of("rlinf")
    rows = {k: Setting(k, v, "test:1") for k, v in {**NEEDED, **(settings or {})}.items()}
    return Migration(table, Source(rows, []), version or table.versions[-1]).run()


def values(m):
    return {option: value for option, (value, _) in m.options.items()}


def test_a_batch_is_of_prompts_and_minibatches_are_counted():
    m = migrated({"algorithm.n_minibatches": 4})
    assert m.facts["sequences per step"] == 8192 and values(m)["algorithm.num_minibatches"] == 4
    assert values(m)["data.prompts_per_step"] == 512 and values(m)["rollout.max_new_tokens"] == 1024
    assert migrated({"algorithm.n_minibatches": 3}).outcome(False) == "refused"


def test_a_token_mean_of_one_sequence_is_a_mean_over_sequences():
    assert values(migrated())["algorithm.aggregation"] == "sequence_mean"
    assert values(migrated({"algorithm.use_valid_token_scale": True}))["algorithm.aggregation"] == "token_mean"
    several = migrated({"algorithm.training_batch_size_per_gpu": 4})
    assert (values(several)["algorithm.aggregation"], values(several)["algorithm.aggregation_sequences"]) == ("token_mean", 4)
    many = migrated({"algorithm.training_batch_size_per_gpu": 4, "runner.enable_dynamic_batch_size": True})
    assert values(many)["algorithm.aggregation"] == "token_mean" and "algorithm.aggregation_sequences" not in values(many)
    assert values(migrated({"algorithm.loss_agg_func": "seq-mean-token-sum"}))["algorithm.aggregation"] == "sequence_sum"


def test_fsdps_workers_do_not_scale_by_tokens_and_have_a_schedule_of_their_own():
    fsdp, o = {"actor.training_backend": "fsdp"}, "actor.optim."
    m = migrated({**fsdp, "algorithm.use_valid_token_scale": True})
    assert values(m)["algorithm.aggregation"] == "sequence_mean" and values(m)["algorithm.dual_clip"] == 3.0
    assert {r.key: r.kind for r in m.records()}["algorithm.use_valid_token_scale"] == "inert"
    assert values(migrated({"algorithm.use_valid_token_scale": True}))["algorithm.aggregation"] == "token_mean"
    assert values(migrated({**fsdp, "algorithm.clip_ratio_c": None}))["algorithm.dual_clip"] == 0
    cosine = {**fsdp, o + "lr_scheduler": "cosine", o + "lr_warmup_steps_ratio": 0.1, o + "total_training_steps": 100, o + "min_lr": 2e-6}
    v = values(migrated(cosine))
    assert (v["optimizer.warmup_steps"], v["optimizer.decay_steps"], round(v["optimizer.floor"], 9)) == (10, 90, 0.1)
    rarely = values(migrated({**cosine, "actor.lr_sched_sync_with_optim": False, "algorithm.n_minibatches": 4}))
    assert (rarely["optimizer.warmup_steps"], rarely["optimizer.decay_steps"]) == (40, 360)
    assert migrated({"runner.task_type": "coding_online_rl"}).outcome(False) == "refused"
    assert migrated({"runner.task_type": "math"}).outcome(False) == migrated({}).outcome(False) != "refused"


def test_valid_tokens_are_those_of_the_step_and_in_a_pipeline_the_longest_completions():
    scaled = {"algorithm.use_valid_token_scale": True, "algorithm.n_minibatches": 4, "actor.optim.clip_grad": 0.8, "actor.optim.adam_eps": 1e-5}
    v = values(migrated(scaled))
    assert v["algorithm.aggregation"] == "token_mean" and (v["optimizer.max_grad_norm"], v["optimizer.eps"]) == (3.2, 4e-5)
    unscaled = values(migrated({**scaled, "algorithm.use_valid_token_scale": False}))
    assert (unscaled["optimizer.max_grad_norm"], unscaled["optimizer.eps"]) == (0.8, 1e-5)
    apart = {"cluster.component_placement.actor": "0-3", "cluster.component_placement.rollout": "4-7",
             "actor.model.tensor_model_parallel_size": 2}
    v = values(migrated({**scaled, **apart}))
    assert (v["algorithm.aggregation"], v["algorithm.aggregation_constant"]) == ("constant", 512)  # (2048 - 1024) / 2 ranks
    assert (v["optimizer.max_grad_norm"], v["optimizer.eps"]) == (0.8, 1e-5)
    assert "algorithm.aggregation_constant" not in values(migrated({**scaled, "cluster.component_placement.actor,rollout": "all"}))
    sgd = migrated({**scaled, "actor.optim.optimizer": "sgd"})
    assert [k for k, _, _ in sgd.lacking] == ["algorithm.use_valid_token_scale", "actor.optim.weight_decay"]


def test_what_rlinfs_workers_do_not_read_does_nothing():
    m = migrated({"actor.training_backend": "fsdp", "algorithm.n_minibatches": 4, "algorithm.early_stop_imp_ratio": 5.0,
                  "algorithm.sampling_params.min_new_tokens": 1, "algorithm.sampling_params.stop_token_ids": [1]})
    assert not {"algorithm.early_stop_ratio", "rollout.min_new_tokens", "rollout.stop_token_ids"} & values(m).keys()
    assert {r.kind for r in m.records() if r.key.rpartition(".")[2] in ("early_stop_imp_ratio", "min_new_tokens", "stop_token_ids")} == {"inert"}
    megatron = migrated({"algorithm.n_minibatches": 4, "algorithm.early_stop_imp_ratio": 5.0})
    assert values(megatron)["algorithm.early_stop_ratio"] == 5.0


def test_a_reward_that_is_not_of_math_is_scaled_alone():
    code = values(migrated({"reward.reward_type": "code_offline", "reward.reward_scale": 2.0, "reward.reward_min_val": -1.0}))
    assert (code["reward.scale"], code["reward.bias"]) == (2.0, 0.0)


def test_clips_rewards_and_warm_up():
    v = values(migrated({"algorithm.clip_ratio_high": 0.28, "algorithm.clip_ratio_c": 3.0, "reward.reward_scale": 5.0}))
    assert (v["algorithm.clip_low"], v["algorithm.clip_high"], v["algorithm.dual_clip"]) == (0.2, 0.28, 3.0)
    assert (v["reward.scale"], v["reward.bias"]) == (10.0, -5.0) and v["algorithm.kl.coef"] == 0
    warm = {"actor.lr_sched.lr_warmup_fraction": 0.01}
    assert values(migrated({**warm, "actor.lr_sched.lr_decay_iters": 10}))["optimizer.warmup_steps"] == 0
    assert values(migrated({**warm, "actor.lr_sched.lr_decay_iters": 3000}))["optimizer.warmup_steps"] == 30
    assert values(migrated(warm))["optimizer.warmup_steps"] == 1000  # of 100 000 iterations
    share = {"lr_warmup_fraction": 0.0, "lr_warmup_iters": 7}  # a share of 0 is one, too
    both = {f"{of}.lr_sched.{k}": x for of in ("actor", "critic") for k, x in share.items()}
    v = values(migrated({**both, "algorithm.adv_type": "gae"}))
    assert v["optimizer.warmup_steps"] == 0 and not v.get("critic.optimizer.warmup_steps")
    assert values(migrated({"algorithm.adv_type": "grpo", "algorithm.normalize_advantages": False}))["algorithm.advantage_std"] == "group"


def test_optimizers_and_where_the_warm_up_starts():
    warm = {"actor.lr_sched.lr_warmup_iters": 10, "actor.lr_sched.lr_warmup_init": 5e-6}
    assert values(migrated(warm))["optimizer.warmup_start"] == 0.25  # of 2e-5
    none = migrated({"actor.lr_sched.lr_warmup_init": 5e-6})
    assert "optimizer.warmup_start" not in values(none) and [r.kind for r in none.records() if r.key.endswith("init")] == ["inert"]
    with pytest.raises(Unreadable, match="lr_warmup_init: 0.1: expected at most the learning rate"):
        migrated({**warm, "actor.lr_sched.lr_warmup_init": 0.1})
    sgd = values(migrated({"actor.optim.optimizer": "sgd", "actor.optim.adam_beta1": 0.5}))
    assert (sgd["optimizer.name"], sgd["optimizer.b1"]) == ("sgd", 0.9)
    assert not sgd.keys() & {"optimizer.b2", "optimizer.eps", "optimizer.weight_decay"}  # which it does not read, and jaxrl refuses
    fsdp = migrated({"actor.optim.optimizer": "sgd", "actor.training_backend": "fsdp"})
    assert (values(fsdp)["optimizer.name"], values(fsdp)["optimizer.b1"]) == ("adamw", 0.9)
    assert [k for k, _, _ in migrated({"actor.optim.optimizer": "lion"}).lacking] == ["actor.optim.optimizer"]


def place(**roles):
    return migrated({f"cluster.component_placement.{k}": v for k, v in roles.items()})


def test_placements():
    assert values(migrated({"cluster.component_placement.actor,rollout,reward": "all"}))["rollout.placement"] == "colocated"
    v = values(place(actor="0-3", rollout="4-6,7", reward="all"))
    assert v["mesh.roles.policy"] == {"devices": "0-3"} and v["rollout.vllm.devices"] == ("4", "5", "6", "7")
    assert v["rollout.placement"] == "disaggregated"
    one = place(**{"actor,rollout": 0})
    assert one.facts["GPUs"] == 1 and values(one)["rollout.placement"] == "colocated"
    assert place(actor="node0:0-3", rollout="4-7").outcome(False) == "refused"
    assert place(actor="0-3", rollout="7-4").outcome(False) == "refused"


@pytest.mark.parametrize("key", ["env.train.env_type", "vla.vla_type", "diffusers.dtype", "data.video_keys", "actor.model.num_action_chunks",
                                 "agentloop.group_name", "tools.search.server_addr"])
def test_robots_images_and_agents_are_refused_by_name(key):
    m = migrated({key: "x"})
    assert m.outcome(False) == "refused" and [k for k, _, refuse in m.lacking if refuse] == [key]



def test_a_config_with_its_resolvers_passes_the_checks_and_a_robots_has_no_trace(tmp_path):
    (tmp_path / "job.yaml").write_text(CONFIG)
    out = tmp_path / "out"
    assert command.main(["rlinf", str(tmp_path / "job.yaml"), f"--out={out}"]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["outcome"] == "full" and report["facts"]["GPUs"] == 8
    assert {k["key"]: k["value"] for k in report["keys"]}["rollout.return_logprobs"] is False
    c = load_config(str(out / "job.py"))
    assert (c.rollout.max_new_tokens, c.rollout.top_k, c.optimizer.b2, c.optimizer.eps, c.run.dir) == (200, -1, 0.999, 1e-8, "runs/small")
    assert (c.train.compute_dtype, c.model.path, c.algorithm.aggregation) == ("fp16", "some/model", "sequence_mean")
    c.run.mode, c.plan.target = "plan", "h100:8"
    check(c)
    spec = importlib.util.spec_from_file_location("job_reward", out / "job_reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.score("", "so \\boxed{4}", answer=["\\boxed{3}", "4"]) == 1.0 and module.score("", "\\boxed{5}", answer='["3", "4"]') == 0.0
    (tmp_path / "robot.yaml").write_text("env: {train: {env_type: maniskill}}\nactor: {model: {action_dim: 7}}\n")
    assert command.main(["rlinf", str(tmp_path / "robot.yaml"), f"--out={out}"]) == 3


@pytest.mark.full
def test_the_critics_optimizer_is_its_own():
    own = {"algorithm.adv_type": "gae", "actor.optim.adam_beta2": 0.999, "actor.optim.adam_eps": 1e-8, "actor.optim.weight_decay": 0.01}
    assert not any(option.startswith("critic.optimizer.") for option in values(migrated(own)))  # as the policy's
    sched = {"critic.lr_sched." + n: v for n, v in (("lr_decay_style", "linear"), ("lr_decay_iters", 1650), ("lr_warmup_iters", 50),
                                                    ("lr_warmup_init", 1e-6), ("min_lr", 1e-6))}
    v = values(migrated({**own, **sched, "critic.optim.adam_beta1": 0.8, "critic.optim.clip_grad": 0.5}))
    found = {k.removeprefix("critic.optimizer."): x for k, x in v.items() if k.startswith("critic.optimizer.")}
    assert found == {"b1": 0.8, "max_grad_norm": 0.5, "schedule": "linear", "decay_steps": 1600, "warmup_steps": 50,
                     "warmup_start": pytest.approx(0.1), "floor": pytest.approx(0.1)}
