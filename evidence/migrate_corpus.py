"""Showing 1, 2 and 5 of the migration: example configs of other systems at named commits, read by jaxrl.migrate.

    python evidence/migrate_corpus.py --clones=DIR [--seeds=DIR] [--systems=skyrl,verl] [--since=COMMIT]     # half a minute

DIR holds git clones named owner+name, with their history. Their files are taken from git into a temporary folder and are
never committed here (licences, size). For every config:

    outcome        full, partial or refused (exit 0 or 3); unreadable (2) only for those of UNREADABLE, with their reason
    keys           every key of the source stands in the report exactly once. What the source's keys are an independent reader
                   says: bash itself, which runs the script in a sandbox without commands (bubblewrap, no network, an empty
                   PATH; every command but awk, which some compute with, only prints its words), PyYAML for YAML, tomllib for TOML
    meaning        sequences per step, optimizer steps, learning rate, clips, KL, lengths, sampling, staleness, groups and
                   evaluation of the config that was written are what migrate_rules.py says, which was written down from the
                   sources' code and reads the independent reader's keys, not the tables; of Tunix and ROLL's agentic pipeline what
                   migrate_rules_agentic.py says, with the files below which a job's keys lie
    by rows        of 24 configs of the newest kinds what migrate_rules_second.py says; commands that a script's docstring prints and programs
                   are among them, whose keys no independent reader knows
    checks         the config passes jaxrl's own checks, for run.mode=plan where plans count what it has
    seconds        of the command alone, in a process of its own, for the first config of a system

migrate_plans.py plans the written ones.

With --seeds, a folder of the reference documents: every block of YAML in them is read, too, and must not end in a trace.
--since, a commit of this repository: the outcomes of the configs that stood here at it, then and now.
Exits with 1 where one of this does not hold.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path

import yaml

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(__file__))

from common import record, table  # noqa: E402
from migrate_rules import RULES, Keys, _settled, images  # noqa: E402
from migrate_rules_agentic import AGENTIC, agentic_keys, tunix, tunix_keys  # noqa: E402
from migrate_rules_images import seen  # noqa: E402
from migrate_rules_jobs import JOBS  # noqa: E402
from migrate_rules_rloo import AGAIN  # noqa: E402
from migrate_rules_second import SECOND  # noqa: E402

from jaxrl.config.load import load_config  # noqa: E402
from jaxrl.errors import ConfigError  # noqa: E402
from jaxrl.migrate import __main__ as command  # noqa: E402
from jaxrl.resolve.checks.common import check  # noqa: E402

# system -> (repository, commit or tag, --from-version, files)
CORPUS = {
    "skyrl": [
        ("NovaSky-AI/SkyRL", "a956457", "0.3", [f"examples/train/{n}.sh" for n in (
            "gsm8k/run_gsm8k", "gsm8k/run_32b_gsm8k", "algorithms/drgrpo/run_drgrpo_gsm8k", "algorithms/cispo/run_cispo_gsm8k",
            "algorithms/dapo/run_dapo_gsm8k", "algorithms/rloo/run_rloo", "algorithms/reinforce++/run_reinforce++",
            "algorithms/sapo/run_sapo_qwen3_4b_aime", "algorithms/clip_cov_kl_cov/run_clip_cov", "algorithms/maxrl/run_maxrl_gsm8k", "ppo/run_ppo",
            "megatron/run_megatron_dapo_qwen3_30b_a3b", "lora/run_qwen2_5_0.5b_gsm8k_grpo_lora", "async/async_run_gsm8k",
            "search/run_search", "geometry3k/run_geometry3k", "tis_correction/run_dapo_tis")]),
        ("NovaSky-AI/SkyRL", "a956457", "0.3", [f"examples/train/sft/{n}.sh" for n in (
            "run_sft_fsdp", "run_sft_lora", "run_sft_megatron", "run_sft_megatron_multi_dataset", "run_sft_megatron_tulu3_50k",
            "run_sft_megatron_tulu3_50k_packed", "run_sft_dummy_fsdp", "run_sft_megatron_vlm")]),
        ("NovaSky-AI/SkyRL", "skyrl_train-v0.1.0", "train-0.1", [f"skyrl-train/examples/{n}.sh" for n in (
            "gsm8k/run_gsm8k", "ppo/run_ppo", "text_to_sql/run_skyrl_sql")]),
    ],
    "verl": [("volcengine/verl", "b178a3c", "0.7", [f"examples/{n}.sh" for n in (
        "grpo_trainer/run_qwen2-7b_math", "grpo_trainer/run_qwen3-8b", "ppo_trainer/run_deepseek7b_llm",
        "grpo_trainer/run_deepseek671b_math_megatron_80gb", "gmpo_trainer/test_dapo_7b_math", "rloo_trainer/run_qwen2-7b",
        "remax_trainer/run_qwen2.5-3b_seq_balance", "gpg_trainer/run_qwen2-7b_math", "reinforce_plus_plus_trainer/run_qwen2-7b_math_rf",
        "cispo_trainer/run_cispo_qwen2_5_0_5b_gsm8k", "rollout_correction/run_with_rollout_corr",
        "grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora", "grpo_trainer/run_qwen2_5_vl-7b",
        "sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn")]),
        ("volcengine/verl", "b178a3c", "0.7", [f"examples/{n}.sh" for n in (
            "grpo_trainer/run_qwen2_5_vl-7b_freeze_vision", "grpo_trainer/run_qwen2_5_vl-7b_lora", "grpo_trainer/run_qwen2_5_vl-7b-sglang",
            "grpo_trainer/run_qwen3_vl-8b-megatron", "grpo_trainer/run_qwen3_vl-30b-megatron", "sft/vlm/run_qwen3_vl_2b")]),
        ("volcengine/verl", "v0.4.1", "0.4", [f"examples/{n}.sh" for n in (
            "grpo_trainer/run_qwen2-7b_math", "ppo_trainer/run_qwen2-7b_rm")]),
        ("verl-project/verl", "v0.9.0", "0.9", [f"examples/{n}.sh" for n in (
            "cispo_trainer/run_qwen3_8b_fsdp", "dppo_trainer/run_qwen3_30b_a3b_megatron", "gspo_trainer/run_qwen3_30b_a3b_megatron",
            "sapo_trainer/run_qwen3_30b_a3b_fsdp", "gmpo_trainer/run_qwen3_8b_fsdp", "ppo_trainer/run_qwen3_8b_megatron",
            "reinforce_plus_plus_trainer/run_qwen3_8b_fsdp", "rloo_trainer/run_qwen3_8b_fsdp",
            "gpg_trainer/run_qwen3_8b_fsdp", "gpg_trainer/run_qwen3_8b_megatron", "otb_trainer/run_qwen3_8b_fsdp",
            "grpo_trainer/run_qwen3_30b_a3b_megatron", "grpo_trainer/run_qwen3_5_35b_a3b_veomni",
            "grpo_trainer/run_mistral_nemo_12b_skyworkrm_fsdp", "grpo_trainer/run_hy_v3_megatron",
            "router_replay/run_qwen3_30b_a3b_megatron", "tuning/lora/run_qwen3_30b_a3b_megatron", "tuning/lora/run_qwen3_8b_fsdp",
            "rollout_correction/run_qwen2_5_7b_fsdp", "rollout_correction/run_qwen2_5_7b_fsdp_multi_rs",
            "on_policy_distillation_trainer/run_qwen3_8b_fsdp", "on_policy_distillation_trainer/run_qwen3_8b_mopd_fsdp",
            "on_policy_distillation_trainer/run_qwen3_8b_megatron",
            "ascend_extras/grpo_trainer/run_qwen3_30b_a3b_mindspeed", "generation/run_deepseek_llm_7b",
            "grpo_trainer/run_qwen2_5_vl_7b_fsdp", "grpo_trainer/run_qwen3_vl_8b_megatron", "tuning/lora/run_qwen2_5_vl_7b_fsdp",
            "sft/gsm8k/run_qwen3_5_397b_a17b_megatron", "sft/gsm8k/run_qwen_megatron_fsdp")]),
        ("verl-project/verl", "v0.7.1", "0.7", ["examples/sft/gsm8k/run_qwen3_5_megatron.sh"])],
    "tunix": [("google/tunix", "c7d8950", "0.1.7", [f"examples/{n}" for n in (
        *(f"rl/grpo/gsm8k/run_{m}.sh" for m in (
            "gemma2_2b", "gemma3_1b", "gemma3_4b", "gemma_7b", "llama3.1_8b", "qwen3", "qwen3_vllm_disagg")),
        *(f"rl/ppo/gsm8k/run_{m}.sh" for m in ("gemma2_2b", "llama3.1_8b", "qwen3_1.7b")), "rl/grpo/gsm8k/configs/llama3.2_1b.yaml",
        "rl/ppo/gsm8k/configs/qwen3_1.7b.yaml", "rl/grpo/gsm8k/configs/gemma2_2b.yaml",
        "rl/ppo/gsm8k/configs/llama3.1_8b.yaml", "sft/mtnt/run_llama3.2_3b.sh")])],
    "trl": [
        ("huggingface/open-r1", "1416fa0", "0.18", [f"recipes/{n}.yaml" for n in (
            "Qwen2.5-1.5B-Instruct/grpo/config_demo", "DeepSeek-R1-Distill-Qwen-1.5B/grpo/config_demo",
            "Qwen2.5-1.5B-Instruct/grpo/config_demo_code", "Qwen2.5-Coder-7B-Instruct/grpo/config_codeforces",
            "Qwen2.5-1.5B-Instruct/grpo/config_demo_code_ioi")]),
        ("huggingface/open-r1", "1416fa0", "0.18", [f"recipes/{n}.yaml" for n in (
            "OpenR1-Distill-7B/sft/config_distill", "OlympicCoder-7B/sft/config_v00.00", "OlympicCoder-32B/sft/config_v00.00")]),
        ("huggingface/trl", "f2cd577", "1.9", ["examples/cli_configs/example_config.yaml", "examples/scripts/rloo.py"]),
        ("huggingface/trl", "v0.22.0", "0.22", ["examples/scripts/rloo.py"]),
        ("huggingface/trl", "v1.0.0", "1.0", ["examples/scripts/rloo.py"]),
    ],
    "areal": [
        ("inclusionAI/AReaL", "4aef98d", "1.0", [f"examples/{n}.yaml" for n in (
            "math/gsm8k_grpo", "math/gsm8k_ppo", "math/gsm8k_drgrpo", "math/gsm8k_gspo", "math/gsm8k_liteppo", "math/gsm8k_rloo",
            "math/gsm8k_sapo", "math/gsm8k_m2po", "math/gsm8k_grpo_megatron", "math/gsm8k_grpo_lora", "math/boba_grpo",
            "math/gsm8k_reinforce", "math/gsm8k_sft", "math/gsm8k_dapo_dynamic_bs", "multi_turn_math/gsm8k_grpo_mt",
            "tau2/config_30b_moe_airline", "distillation/gsm8k_grpo_distill", "vlm/clevr_count_70k_grpo",
            "vlm/geometry3k_grpo", "vlm/clevr_count_70k_sft")]),
        ("inclusionAI/AReaL", "v1.0.4", "1.0", [f"examples/alignment/{n}.yaml" for n in ("hhrlhf_dpo", "hhrlhf_rw")]),
        ("inclusionAI/AReaL", "v0.4.1", "0.4", [f"examples/math/{n}.yaml" for n in ("gsm8k_sft", "gsm8k_sft_megatron")]),
        ("inclusionAI/AReaL", "v0.3.4", "0.3", ["examples/experimental/configs/gsm8k_sft_megatron.yaml"]),
        ("inclusionAI/AReaL", "v0.3.4", "0.3", [f"examples/{n}.yaml" for n in (
            "math/gsm8k_grpo", "math/gsm8k_ppo", "experimental/dapo/gsm8k_dapo", "experimental/dr.grpo/gsm8k_drgrpo",
            "legacy/configs/v0.3-qwen3-code/8b")]),
    ],
    "rlinf": [
        ("RLinf/RLinf", "a3816b5", "0.3", [f"examples/{n}.yaml" for n in (
            *(f"reasoning/config/math/{m}" for m in (
                "qwen2.5-1.5b-grpo-megatron", "qwen2.5-1.5b-grpo-fsdp", "qwen2.5-1.5b-grpo-megatron-dynamic", "qwen2.5-1.5b-is-megatron",
                "qwen2.5-1.5b-grpo-megatron-pipeline", "qwen2.5-1.5b-ppo-megatron", "qwen2.5-1.5b-reinpp-megatron",
                "qwen2.5-1.5b-single-gpu", "qwen2.5-32b-grpo-megatron", "qwen3-30b-grpo-megatron", "moonlight-16b-grpo-megatron")),
            "reasoning/config/vqa/qwen2.5-vl-3b-grpo-fsdp", "reasoning/config/vqa/qwen3-vl-2b-grpo-fsdp-geo3k",
            "agent/coding_online_rl/config/qwen2.5-1.5b-grpo-llm_judge",
            "agent/searchr1/config/train_qwen2.5", "embodiment/config/maniskill_grpo_openvla")]),
        ("RLinf/RLinf", "v0.1", "0.1", [f"examples/reasoning/config/math/{n}.yaml" for n in (
            "qwen2.5-1.5b-grpo-megatron", "qwen2.5-1.5b-grpo-fsdp", "qwen2.5-7b-grpo-megatron", "qwen2.5-1.5b-reinpp-megatron")]),
        ("RLinf/RLinf", "a3816b5", "0.3", [f"examples/sft/config/{n}.yaml" for n in (
            "qwen2_5_vl_sft_vlm", "qwen3_vl_sft_vlm", "qwen2_5_vl_megatron_sft_vlm", "qwen3_vl_moe_megatron_sft_vlm",
            "qwen3vl_sft_vlm_trend_reward", "libero_sft_openpi")]),
        ("RLinf/RLinf", "v0.2", "0.2", [f"examples/sft/config/{n}_sft_vlm.yaml" for n in ("qwen2_5", "qwen3")]),
    ],
    "roll": [
        ("alibaba/ROLL", "8eb27cc", "0.3.0", [f"examples/{n}.yaml" for n in (
            *(f"qwen2.5-7B-rlvr_megatron/{m}" for m in (
                "rlvr_config", "rlvr_config_8gpus", "rlvr_config_async", "rlvr_config_dynamic_batching", "rlvr_config_lora",
                "rlvr_config_sequence_packing", "rlvr_fsdp2_sp2", "rlvr_qwen2.5_7B_seperate")),
            *(f"docs_examples/example_{m}" for m in ("grpo", "gspo", "ppo", "raft_pp", "reinforce_pp", "topr", "total_rl_options")),
            "qwen2.5-7B-rlvr-offpolicy/rlvr_config", "qwen3-30BA3B-rlvr_fsdp2/rlvr_config", "qwen3-next-80BA3B-rlvr_megatron/rlvr_config",
            "qwen2.5-vl-7B-rlvr/rlvr_megatron", "qwen2.5-vl-7B-rlvr/rlvr_async", "qwen3-vl-30BA3B-rlvr_megatron/rlvr_megatron_80GB",
            "qwen2_5-vl-3B-rlvr_fsdp2/rlvr_fsdp2_offload", "qwen2.5-0.5B-agentic/agent_val_frozen_lake", "dpo_examples/qwen2.5-3B_dpo_megatron")]),
        ("alibaba/ROLL", "8eb27cc", "0.3.0", [f"examples/{n}.yaml" for n in (
            "dpo_examples/qwen3-30BA3B-dpo_megatron_80GB", "qwen2.5-7B-sft_megatron/sft_config", "qwen3.5-35BA3-sft_fsdp2/sft_config",
            "qwen2.5-7B-distill_megatron/distill_megatron", "qwen3-8B-onpolicy-distill-megatron/onpolicy_distill_config",
            "qwen3-8B-onpolicy-distill-megatron/multi_teacher_onpolicy_distill_config")]),
        ("alibaba/ROLL", "v0.2.1", "0.2.1", ["examples/qwen3-8B-onpolicy-distill-megatron/onpolicy_distill_config.yaml"]),
        ("alibaba/ROLL", "v0.1.0", "0.1.0", [f"examples/{n}.yaml" for n in (
            "qwen2.5-7B-rlvr_megatron/rlvr_config", "qwen2.5-7B-rlvr_megatron/rlvr_zero3_sp2", "docs_examples/example_ppo",
            "qwen3-30BA3B-rlvr_megatron/rlvr_config_sglang")]),
    ],
    "cosmos_rl": [
        ("nvidia-cosmos/cosmos-rl", "89f2e5b", "0.4.4", [f"configs/{n}.toml" for n in (
            *(f"qwen2-5/qwen2-5-{m}" for m in (
                "3b-p-fsdp1-tp1-r-tp1-pp1-grpo", "7b-p-fsdp4-r-tp2-pp1-grpo", "7b-p-fsdp4-r-tp2-grpo-trtllm", "32b-tp2-fsdp4-sft", "3b-tp1-sft",
                "1.5b-distill-countdown", "3b-p-fsdp2-colocated-separated-grpo", "multiturn-3b-p-fsdp1-tp1-r-tp1-pp1-grpo")),
            "qwen3/qwen3-8b-distill", "qwen3/qwen3-8b-p-tp4-r-tp2-pp1-grpo", "qwen3/qwen3-32b-tp8-sft", "qwen3-moe/qwen3-moe-30b-tp4-sft",
            "gpt-oss/gpt-oss-20b-p-fsdp4-r-tp4-pp1-grpo", "phi/phi4-14b-p-fsdp4-r-tp2-grpo", "sana/sana-image-sft",
            "pi05/pi05-libero10-grpo")]),
        ("nvidia-cosmos/cosmos-rl", "v0.1.3", "0.1", [f"configs/qwen2-5/qwen2-5-{n}.toml" for n in (
            "32b-p-fsdp2-tp4-r-tp4-pp1-dapo", "3b-p-fsdp1-tp1-r-tp1-pp1-grpo-aipo", "7b-p-fsdp2-tp2-r-tp2-pp1-grpo-fp8", "7b-pp2-tp2-sft")]),
    ],
}
DRAWN = {  # at random (random.Random(45)) from tags and from twelve commits of each repository, by the author of migrate_rules_agentic.py
    "tunix": [
        ("791d90c3", "0.1.6", ("sft/mtnt/run_qwen2.5_0.5b.sh",)),
        ("a52883ea", "0.1.6", ("sft/mtnt/run_qwen2.5_0.5b.sh", "sft/mtnt/configs/gemma2_2b.yaml", "rl/grpo/gsm8k/configs/gemma2_2b.yaml",)),
        ("d2b22f6c", "0.1.6", ("rl/grpo/gsm8k/run_llama3.2_8b.sh",)),
        ("e55ea3a4", "0.1.6", ("rl/grpo/gsm8k/run_gemma3_1b.sh", "rl/grpo/gsm8k/run_qwen3.sh",)),
        ("v0.1.0", "0.1.6", ("sft/mtnt/run_llama3.2_3b.sh",)),
        ("v0.1.6", "0.1.6", ("sft/mtnt/run_gemma2_2b.sh",)),
        ("56aa1f7f", "0.1.7", ("rl/grpo/gsm8k/run_gemma3_12b.sh", "rl/grpo/gsm8k/run_qwen3_8b_disagg_maxtext.sh",
            "rl/grpo/gsm8k/run_gemma3_1b.sh", "deepscaler/run_deepscaler_disagg_v5p16.sh", "sft/mtnt/run_gemma3_4b.sh",)),
        ("5dfd94f7", "0.1.7", ("sft/mtnt/run_gemma_2b.sh", "rl/ppo/gsm8k/configs/llama3.1_8b.yaml",)),
        ("e7286a20", "0.1.7", ("rl/ppo/gsm8k/run_qwen3_1.7b.sh",)),
        ("e7895739", "0.1.7", ("rl/grpo/gsm8k/run_qwen3.sh", "rl/grpo/gsm8k/run_gemma_7b.sh", "rl/ppo/gsm8k/run_gemma2_2b.sh",
            "rl/ppo/gsm8k/configs/gemma2_2b.yaml", "rl/ppo/gsm8k/configs/gemma3_1b.yaml",)),
        ("ec38e053", "0.1.7", ("rl/grpo/gsm8k/run_llama3.2_1b.sh",)),
        ("v0.1.7", "0.1.7", ("deepswe/run_deepswe_disagg_v5p_32.sh", "rl/grpo/gsm8k/configs/llama3.2_1b.yaml",
            "rl/grpo/gsm8k/run_qwen3_simplereward.sh",)),
    ],
    "roll": [
        ("6a49f4f0", "0.1.0", ("qwen2.5-0.5B-agentic/agent_val_frozen_lake_async_16gpus.yaml",
            "qwen2.5-vl-3B-agentic/agentic_val_sokoban_async_16gpus.yaml",)),
        ("beec1842", "0.1.0", ("qwen2.5-0.5B-agentic/agent_val_frozen_lake_async.yaml",)),
        ("e4d047c9", "0.1.0", ("qwen2.5-0.5B-agentic/agent_val_frozen_lake_gigpo.yaml",)),
        ("f0b7f91c", "0.1.0", ("qwen3_agentic_gem/gem_math_dapo_python_code.yaml", "qwen2.5-0.5B-agentic/agentic_val_sokoban.yaml",
            "qwen3_agentic_gem/gem_math_hotpotqa.yaml",)),
        ("f7456479", "0.1.0", ("qwen2.5-0.5B-agentic_ds/agentic_val_sokoban.yaml",)),
        ("v0.1.0", "0.1.0", ("agentic_demo/agent_val_frozen_lake_multi_nodes_demo.yaml",)),
        ("5d92cc0f", "0.1.1", ("qwen3_agentic_gem/gem_math_hotpotqa.yaml", "qwen3_agentic_gem/gem_rg_letter_counting.yaml",
            "qwen2.5-7B-agentic_megatron/agentic_val_webshop_gigpo.yaml", "agentic_demo/agent_val_frozen_lake_single_node_demo.yaml",)),
        ("94258f86", "0.1.1", ("agentic_demo/agent_val_frozen_lake_single_node_demo.yaml", "qwen2.5-0.5B-agentic/agent_val_frozen_lake.yaml",)),
        ("v0.1.1", "0.1.1", ("qwen3_agentic_gem/gem_rg_letter_counting.yaml", "qwen2.5-0.5B-agentic/agentic_rollout_sokoban.yaml",)),
        ("v0.1.3", "0.1.3", ("qwen3_agentic_gem/gem_math_hotpotqa_search.yaml", "qwen2.5-0.5B-agentic/agent_val_frozen_lake_amd.yaml",
            "agentic_demo/agent_val_sokoban_sandbox.yaml",)),
        ("53c6da31", "0.2.0", ("qwen2.5-0.5B-agentic/agent_val_frozen_lake_async.yaml", "qwen2.5-vl-3B-agentic/agentic_val_sokoban.yaml",)),
        ("v0.2.0", "0.2.0", ("qwen2.5-0.5B-agentic/agentic_val_sokoban_lora.yaml", "qwen2.5-0.5B-agentic/agent_val_frozen_lake.yaml",)),
        ("e91f69e3", "0.2.1", ("qwen2.5-0.5B-agentic/agentic_val_sokoban_dynamic_batching.yaml",
            "qwen3-30BA3B-agentic_fsdp2/agentic_val_sokoban_30a3.yaml", "agentic_deepeyes/deepeyes.yaml",)),
        ("v0.2.1", "0.2.1", ("qwen2.5-0.5B-agentic/agentic_val_sokoban_sandbox.yaml",
            "qwen2.5-7B-agentic_megatron/agentic_val_webshop_gigpo.yaml",)),
        ("v0.3.0", "0.3.0", ("qwen2.5-0.5B-agentic/agent_val_frozen_lake_gigpo.yaml", "agentic_demo/agent_val_rock_swe.yaml",
            "agentic_demo/agent_val_sokoban_sandbox.yaml",)),
    ],
}
for _system, _entries in DRAWN.items():
    _repository = CORPUS[_system][0][0]
    CORPUS[_system] += [(_repository, at, version, [f"examples/{n}" for n in names]) for at, version, names in _entries]
OUTCOMES = ("full", "partial", "refused", "unreadable")
GPUS = {"trl": 8}  # the scripts' own, which their YAML does not say: a node of eight
UNREADABLE = {"agentic_val_sokoban_async_16gpus.yaml": "no key max_actions_per_traj is set"}  # nor in the files that it includes


def clone(root: Path, repository: str) -> Path:
    """The git directory of a repository."""
    for place in (root / repository.replace("/", "+"), root / repository.replace("/", "+") / "repo", root / repository.split("/")[1]):
        if (place / "HEAD").exists() or (place / ".git").exists():
            return place
    raise SystemExit(f"{repository}: no clone in {root}")


def take(git: Path, commit: str, files: list[str], out: Path) -> None:
    """The text files of a commit that lie where these do, down to their folder of examples."""
    folders = sorted({re.match(r"(.*?(?:examples|recipes|configs))/", f)[1] for f in files})
    names = subprocess.run(["git", "-C", str(git), "ls-tree", "-r", "--name-only", commit, *folders], capture_output=True, text=True,
                           check=True).stdout.split("\n")
    texts = [n for n in names if n.endswith((".sh", ".yaml", ".toml")) or n in files]
    archive = subprocess.run(["git", "-C", str(git), "archive", commit, *texts], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(out)], input=archive, check=True)


# -- an independent reader ---------------------------------------------------------------------------------------------

BASH = r"""
exec 3>&1
command_not_found_handle() { printf '%s\0' "$@" >&3; printf '\1' >&3; }
python() { [ "$1" != -c ] && command_not_found_handle python "$@"; }  # a probe of a package fails
python3() { [ "$1" != -c ] && command_not_found_handle python3 "$@"; }
awk() { "$AWK" "$@"; }
set() { :; }
dirname() { echo "${1%/*}"; }
uv() { command_not_found_handle uv "$@"; }
bash() { shift 0; case "$1" in *.sh) source "$@";; *) command_not_found_handle bash "$@";; esac; }
HOME='$HOME'; PWD='$PWD'; set +e; PATH=/none
source "$SCRIPT"
"""


MODULE = "python -m"


def keys_of_script(path: Path, root: Path) -> dict[str, str]:
    """Keys and texts of the command with most `a.b=c`, as bash expands its words; under MODULE the module that it runs."""
    box = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr", "--ro-bind", str(root), str(root), "--tmpfs", "/tmp2",
           *(x for d in ("/lib", "/lib64", "/bin") if Path(d).exists() for x in ("--ro-bind", d, d)), "--proc", "/proc", "--dev", "/dev",
           "--clearenv", "--setenv", "SCRIPT", str(path), "--setenv", "PATH", "/none", "--setenv", "AWK",
           os.path.realpath(shutil.which("awk") or "/usr/bin/awk"), "--chdir", str(root), "/bin/bash", "-c", BASH]
    done = subprocess.run(box, capture_output=True, timeout=20)
    best: dict[str, str] = {}
    for one in done.stdout.split(b"\1"):
        words = one.decode("utf-8", "replace").split("\0")
        found = {}
        for word in words:
            if m := re.fullmatch(r"(?:\+\+|\+)?([A-Za-z_][\w./]*)=(.*)", word, re.S):
                found[m[1]] = m[2]
        if len(found) > len(best) and any("." in k for k in found):
            best = found | {MODULE: words[words.index("-m") + 1]} if "-m" in words else found
    return best


def keys_of_file(path: Path) -> dict[str, object]:
    """Keys of a file of YAML, TOML or Python, as PyYAML or Python itself reads it."""

    def walk(node, prefix):
        if isinstance(node, dict) and node:
            for k, v in node.items():
                yield from walk(v, f"{prefix}.{k}" if prefix else str(k))
        else:
            yield prefix, node

    text = path.read_text("utf-8")
    if path.suffix == ".py":  # literals of the call of the config's class
        calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "RLOOConfig"]
        return {w.arg: ast.literal_eval(w.value) for call in calls for w in call.keywords if w.arg and isinstance(w.value, ast.Constant)}
    return dict(walk(tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text), ""))


def same_keys(report: dict, mine: dict) -> list[str]:
    """Keys that are missing, or that stand twice; a table given as one word (a={b: c}) may stand as its entries."""
    theirs = Counter(k["key"] for k in report["keys"])
    twice = [k for k, n in theirs.items() if n > 1]
    whole = lambda k: any(t.startswith(k + ".") for t in theirs)  # noqa: E731
    return twice + [k for k in mine if k not in theirs and not whole(k) and not re.match(rf"hydra|defaults$|{MODULE}$", k)]


# -- one config against the rules -------------------------------------------------------------------------------------


def differ(rules: dict) -> list[str]:
    near = lambda a, b: a == b or isinstance(a, int | float) and isinstance(b, int | float) and abs(a - b) <= 1e-9 * abs(b)  # noqa: E731
    return [f"{what}: {ours} and not {theirs}" for what, (ours, theirs) in rules.items()
            if not (all(map(near, ours, theirs)) if isinstance(ours, tuple) else near(ours, theirs))]


# -- one config --------------------------------------------------------------------------------------------------------


def migrate(system: str, file: Path, version: str, out: Path, *given: str) -> tuple[int, str, dict]:
    """(exit status, what was printed, the report)."""
    argv = [system, str(file), *given, f"--from-version={version}", f"--out={out}", *([f"--gpus={GPUS[system]}"] if system in GPUS else [])]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = command.main(argv)
    report = json.loads((out / "report.json").read_text()) if (out / "report.json").exists() else {}
    return status, said.getvalue(), report


def problems(system: str, file: Path, root: Path, version: str, out: Path) -> tuple[str, list[str], dict]:
    """(outcome, what does not hold, the report)."""
    status, said, report = migrate(system, file, version, out)
    if status == 2:
        return "unreadable", [] if UNREADABLE.get(file.name, "?") in said else [said.strip()], report
    mine = keys_of_script(file, root) if file.suffix == ".sh" else keys_of_file(file)
    wrong = [f"key {k}" for k in same_keys(report, mine)] + (["no keys of its own were found"] if len(mine) < 5 else [])
    if report["outcome"] != "refused":
        here = os.getcwd()
        os.chdir(out)
        try:
            config = load_config(report["config"])
            rules = (JOBS | AGENTIC).get((system, report["job"])) if report["job"] else (RULES | {"tunix": tunix})[system]
            whole = tunix_keys(mine, root) if rules is tunix else agentic_keys(file) if rules in AGENTIC.values() else mine
            wrong += differ(images(system, Keys(mine), config, version))
            wrong += [f"by other rules: {text}" for text in differ(seen(system, Keys(mine), config, version, report, out))]
            if second := AGAIN.get((system, report["job"])):
                wrong += [f"by second rules: {text}" for text in differ(second(Keys(mine), config, version))]
            if rules:  # of Cosmos-RL's other jobs there are none yet
                wrong += differ(rules(Keys(whole), config, version))
            report["model"] = config.model.path
            config.log.wandb = False
            if any(text.startswith("model.chat_template") for text in report["needs_you"]):  # a file of the source's own
                config.model.chat_template = ""
            config.model.path = config.model.path or "a/model"
            planned = "plan" in report["commands"] and not config.reward.model.path  # what plans do not count
            config.run.mode, config.plan.target = ("plan", "h100:8") if planned else ("train", "")
            check(config)
        except ConfigError as e:
            wrong.append(str(e))
        finally:
            os.chdir(here)
    return report["outcome"], wrong, report


# -- configs of migrate_rules_second.py -------------------------------------------------------------------------------


def taken(git: Path, commit: str, name: str, root: Path) -> Path:
    """The file of a name at a commit; of path#n a script with the n-th command of the docstring of path."""
    path, _, number = name.partition("#")
    show = lambda at: subprocess.run(["git", "-C", str(git), "show", f"{commit}:{at}"], capture_output=True, text=True, check=True).stdout  # noqa: E731
    if path.startswith("examples/"):
        folder = path.rpartition("/")[0]
        beside = subprocess.run(["git", "-C", str(git), "ls-tree", "--name-only", commit, folder + "/"], capture_output=True, text=True, check=True)
        take(git, commit, [path, *(n for n in beside.stdout.split("\n") if n.endswith(".py"))], root)
    else:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(show(path))
    if not number:
        return root / path
    printed = re.findall(r"(?m)^(?:python|accelerate launch) (?:.*\\\n)*.*", ast.get_docstring(ast.parse(show(path))) or "")[int(number)]
    file = root / f"{Path(path).stem}_{number}.sh"
    file.write_text(re.sub(r"\btrl/scripts/(\w+)\.py", r"-m trl.scripts.\1", printed) + "\n")
    return file


def written(config, report: dict, name: str):
    """What stands for a row of SECOND (see there)."""
    what, _, option = name.rpartition(" ") if not name.startswith(("says ", "asks ")) else name.partition(" ")
    if what in ("says", "asks"):
        return any(option in text for text in report["needs_you"]) if what == "asks" else option in json.dumps(report)
    if name == "shares":
        weights = {domain: source["weight"] for domain, source in config.data.sources.items()}
        return tuple(w / sum(weights.values()) for _, w in sorted(weights.items()))
    node = config
    for part in option.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part)
    node = tuple(node) if isinstance(node, list) else node
    return len(node) if what == "len" else bool(node) if what == "given" else node


def same(ours, theirs) -> bool:
    if isinstance(theirs, set):
        return any(same(ours, one) for one in theirs)
    if isinstance(theirs, tuple):
        return isinstance(ours, tuple) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    number = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (ours, theirs))
    return abs(ours - theirs) <= 1e-6 * abs(theirs) if number else ours == theirs


def by_rows(clones: Path, systems: list[str]) -> dict:
    """label -> (outcome, rows, those that do not hold) of SECOND's configs."""
    results = {}
    for (system, repository, commit_, version, name), rows in SECOND.items():
        if system not in systems:
            continue
        outcomes = [value for option, value, _ in rows if option == "outcome"] or ["full", "partial"]
        with tempfile.TemporaryDirectory() as tmp:
            root, out = Path(tmp) / "tree", Path(tmp) / "out"
            root.mkdir()
            file, *given = name.split()
            status, said, report = migrate(system, taken(clone(clones, repository), commit_, file, root), version, out, *given)
            wrong = [] if report.get("outcome") in outcomes else [said.strip()]
            if not wrong and status == 0:
                with contextlib.chdir(out):
                    config = _settled(load_config(report["config"]))
                    ours = {option: written(config, report, option) for option, _, _ in rows}
                wrong = [f"{option}: {ours[option]} and not {value} ({place})" for option, value, place in rows if not same(ours[option], value)]
        results[f"{repository}@{commit_}:{name}"] = (report.get("outcome", "unreadable"), len(rows), wrong)
    return results


DOCUMENTS = {"skyrl": ("skyrl.rst", "docs"), "areal": ("areal.md", "0.3"), "rlinf": ("rlinf.rst", "docs"), "roll": ("roll.md", "0.1.0")}


def blocks_of(text: str) -> list[str]:
    """The blocks of YAML of a page in Markdown or reStructuredText; lines of dots are left out."""
    blocks = re.findall(r"```ya?ml\n(.*?)```", text, re.S)
    for found in re.findall(r"\.\. code(?:-block)?:: yaml *\n\n((?:[ ]+.*\n|\s*\n)+)", text):
        least = min(len(line) - len(line.lstrip()) for line in found.splitlines() if line.strip())
        blocks.append("\n".join(line[least:] for line in found.splitlines()))
    return [re.sub(r"(?m)^ *\.\.\.$", "", block) for block in blocks]


def together(blocks: list[str]) -> str:
    """One config of all blocks of a page: tables are merged, later values win."""

    def merge(into, new):
        for k, v in new.items():
            if isinstance(v, dict) and isinstance(into.get(k), dict):
                merge(into[k], v)
            elif v is not None or k not in into:
                into[k] = v

    whole: dict = {}
    for block in blocks:
        merge(whole, yaml.safe_load(block))
    return yaml.safe_dump(whole, sort_keys=False)


def documents(folder: Path) -> list[dict]:
    """Every block of YAML in the reference documents, and all of a page together: none may end in a trace (an excerpt
    that refers to another block is unreadable by itself, and says so), and every key of the whole is in the report once, none of
    them unknown. AReaL's and Cosmos-RL's have no block."""
    rows = []
    for system, (name, version) in DOCUMENTS.items():
        blocks = blocks_of((folder / name).read_text("utf-8"))
        statuses: Counter = Counter()
        row = {"document": name, "blocks": len(blocks)}
        for block in blocks + ([together(blocks)] if blocks else []):
            with tempfile.TemporaryDirectory() as tmp:
                (Path(tmp) / "block.yaml").write_text(block)
                status, said, report = migrate(system, Path(tmp) / "block.yaml", version, Path(tmp) / "out")
                statuses[{0: "read", 2: "unreadable", 3: "refused"}[status]] += 1
                if status == 2:
                    print(name, said)
                elif block == (blocks and together(blocks)):
                    missing = same_keys(report, keys_of_file(Path(tmp) / "block.yaml"))
                    row |= {"together": report["outcome"], "keys": len(report["keys"]), "missing": missing,
                            "unknown": [k["key"] for k in report["keys"] if k["kind"] == "unknown"]}
        rows.append({**row, **statuses})
    return rows


def corpus_at(commit: str) -> tuple[set[tuple[str, str, str]], dict]:
    """The configs (repository, commit, file) that CORPUS had at a commit of this repository, and their outcomes as recorded then."""

    def text(path: str) -> str:
        return subprocess.run(["git", "show", f"{commit}:./{path}"], capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout

    value = next(n.value for n in ast.parse(text("migrate_corpus.py")).body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "CORPUS")
    corpus = eval(compile(ast.Expression(value), "CORPUS", "eval"))
    rows = [row for name, row in json.loads(text("results/migrate_corpus.json"))["results"].items() if name in corpus]
    return ({(repository, at, name) for entries in corpus.values() for repository, at, _, names in entries for name in names},
            {o: sum(row.get(o, 0) for row in rows) for o in ("configs", *OUTCOMES)})


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clones", type=Path, required=True)
    parser.add_argument("--seeds", type=Path)
    parser.add_argument("--systems", default=",".join(CORPUS))
    parser.add_argument("--since", default="0dfe9509")
    args = parser.parse_args()
    earlier, then = corpus_at(args.since)
    now: Counter = Counter()
    results, bad = {}, 0
    for system in args.systems.split(","):
        outcomes, wrong, count, seconds = Counter(), {}, 0, None
        for repository, commit_, version, files in CORPUS[system]:
            with tempfile.TemporaryDirectory() as tmp:
                root = Path(tmp) / "tree"
                root.mkdir()
                take(clone(args.clones, repository), commit_, files, root)
                for i, name in enumerate(files):
                    label = f"{repository}@{commit_}:{name}"
                    outcome, found, _ = problems(system, root / name, root, version, Path(tmp) / f"out{i}")
                    outcomes[outcome] += 1
                    now[outcome] += (repository, commit_, name) in earlier
                    count += 1
                    if found:
                        wrong[label] = found
                    if seconds is None:
                        start = time.perf_counter()
                        subprocess.run([sys.executable, "-m", "jaxrl.migrate", system, str(root / name), f"--out={tmp}/timed",
                                        *([f"--gpus={GPUS[system]}"] if system in GPUS else [])], capture_output=True)
                        seconds = round(time.perf_counter() - start, 2)
        results[system] = {"configs": count, **outcomes, "seconds": seconds, "wrong": wrong}
        bad += len(wrong)
        for name, found in wrong.items():
            print(name, *found, sep="\n    ")
    table(["system", "configs", *OUTCOMES, "wrong", "seconds"],
          [[s, r["configs"], *(r.get(o, 0) for o in OUTCOMES), len(r["wrong"]), r["seconds"]]
           for s, r in results.items()])
    rows = by_rows(args.clones, args.systems.split(","))
    for name, (_, _, found) in rows.items():
        if found:
            print(name, *found, sep="\n    ")
    table(["by rows", "outcome", "rows", "wrong"], [[name, outcome, n, len(found)] for name, (outcome, n, found) in rows.items()])
    results["by rows"] = {name: {"outcome": outcome, "rows": n, "wrong": found} for name, (outcome, n, found) in rows.items()}
    bad += sum(bool(found) for _, _, found in rows.values())
    if args.seeds:
        results["documents"] = documents(args.seeds)
        print(*results["documents"], sep="\n")
        bad += sum(bool(r.get("missing") or r.get("unknown")) for r in results["documents"])
    results["since"] = {"commit": args.since, "then": then, "now": {"configs": sum(now.values()), **{o: now[o] for o in OUTCOMES}}}
    print(results["since"])
    record("migrate_corpus", results)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
