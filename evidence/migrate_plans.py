"""A plan of every written config of migrate_corpus.py: the printed command that plans, for the model that the source names.

    nice python evidence/migrate_plans.py --clones=DIR [--only=PATTERN] [--minutes=60] [--again]

Half a minute to four minutes of processor time a plan. The command is the report's `plan`; --config.model.path is the only thing
added: a folder that has nothing but the model's config.json (SHAPES, as published). A plan ends in one of

    fits            on the GPUs that the source names, H100s of 80 GB
    does not fit    the last line names what does not, and the nearest that does
    none            no command plans the job: preferences, reward models and distillation
    wrong           another error, or a trace

Configs with the same command, model and options, but for those of UNREAD, on which neither shapes nor programs nor sizes depend, are one
group. The first of a group is planned; the results name it for the others. Every result is written when it is there, with its commit, so
the script may be stopped at any time and started again: it plans what has no result (--again: everything). Exits with 1 after a wrong one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(__file__))

from common import RESULTS, commit, record, table  # noqa: E402
from migrate_corpus import CORPUS, clone, migrate, take  # noqa: E402
from plan_shapes import MODELS, QWEN, QWEN3  # noqa: E402

from jaxrl.config.load import load_config  # noqa: E402

# config.json by the name of the checkpoint, as its owners published it
_QWEN7 = {**QWEN, "vocab_size": 152064, "tie_word_embeddings": False}
_LONG = {"max_position_embeddings": 131072}
_MOONLIGHT = {**MODELS["671B"], "vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
              "num_hidden_layers": 27, "first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
              "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446,
              "q_lora_rank": None, "max_position_embeddings": 8192}
_VL_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16, "spatial_merge_size": 2,
             "temporal_patch_size": 2, "in_channels": 3, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
             "hidden_act": "gelu_pytorch_tanh"}


def _qwen_vl(kind: str, text: dict, sections: list[int], **tower) -> dict:
    """Of Qwen2-VL and Qwen2.5-VL, whose text's entries lie beside the tower's."""
    return {**text, "model_type": kind, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "image_token_id": 151655, "video_token_id": 151656,
            "vision_start_token_id": 151652, "vision_end_token_id": 151653, "rope_scaling": {"type": "mrope", "mrope_section": sections},
            "vision_config": {"in_chans": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, **tower}}


def _qwen25_vl(text: dict) -> dict:
    return _qwen_vl("qwen2_5_vl", text | {"max_position_embeddings": 128000}, [16, 24, 24], depth=32, hidden_size=1280, intermediate_size=3420,
                    num_heads=16, out_hidden_size=text["hidden_size"], window_size=112, fullatt_block_indexes=[7, 15, 23, 31],
                    tokens_per_second=2, hidden_act="silu")


def _qwen3_vl(text: dict, kind: str = "qwen3_vl", **tower) -> dict:
    own = {**text, "model_type": f"{kind}_text", "rope_theta": 5e6, "max_position_embeddings": 262144,
           "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}}
    return {"model_type": kind, "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
            "tie_word_embeddings": text.get("tie_word_embeddings", False), "text_config": own,
            "vision_config": {"model_type": kind, **_VL_TOWER, "out_hidden_size": text["hidden_size"], **tower}}


_LINEAR = {"head_dim": 256, "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
           "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "partial_rotary_factor": 0.25, "rope_theta": 1e7, "norm_topk_prob": True,
           "max_position_embeddings": 262144, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "eos_token_id": 1, "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA3 = {**_GEMMA, "model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 10000, "sliding_window_pattern": 6,
           "query_pre_attn_scalar": 256}


def _gemma3(text: dict) -> dict:
    """Of Gemma 3 with its tower."""
    own = {**_GEMMA3, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window": 1024,
           "rope_scaling": {"rope_type": "linear", "factor": 8.0}, **text}
    return {"model_type": "gemma3", "mm_tokens_per_image": 256, "image_token_index": 262144, "boi_token_index": 255999, "eoi_token_index": 256000,
            "text_config": own,
            "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
                              "num_attention_heads": 16, "image_size": 896, "patch_size": 14, "vision_use_head": False}}


_LLAMA3 = {**MODELS["70B"], "rope_theta": 5e5}
_3B = {**QWEN, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
_7B = {**_QWEN7, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
_4B = {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "tie_word_embeddings": True}
_1_7B = {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16, "tie_word_embeddings": True}
SHAPES = (
    (r"qwen2\.5-vl-7b", _qwen25_vl(_7B)), (r"qwen2\.5-vl-3b", _qwen25_vl(_3B)),
    (r"qwen2-vl-7b", _qwen_vl("qwen2_vl", _7B, [16, 24, 24], depth=32, embed_dim=1280, mlp_ratio=4, num_heads=16, hidden_size=3584)),
    (r"qwen3-vl-2b", _qwen3_vl(_1_7B, depth=24, hidden_size=1024, intermediate_size=4096, deepstack_visual_indexes=[5, 11, 17])),
    (r"qwen3-vl-4b", _qwen3_vl(_4B, depth=24, hidden_size=1024, intermediate_size=4096, deepstack_visual_indexes=[5, 11, 17])),
    (r"qwen3-vl-8b", _qwen3_vl(MODELS["8B"] | {"tie_word_embeddings": False})),
    (r"qwen3-vl-30b-a3b", _qwen3_vl(MODELS["30B-A3B"], "qwen3_vl_moe")),
    (r"qwen3-1\.7b", _1_7B),
    (r"qwen3\.5-35b-a3b", MODELS["3.5-35B-A3B"]), (r"qwen3\.5-397b", MODELS["3.5-397B-A17B"]),
    (r"qwen3-next-80b", {**_LINEAR, "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
                         "num_hidden_layers": 48, "num_attention_heads": 16, "linear_num_value_heads": 32, "num_experts": 512,
                         "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
                         "decoder_sparse_step": 1, "mlp_only_layers": []}),
    (r"gemma-?2[-_]2b", {**_GEMMA, "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
                     "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
                        "max_position_embeddings": 8192, "sliding_window": 4096,
                     "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    (r"gemma-3-1b", {**_GEMMA3, "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
                     "num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 32768, "sliding_window": 512}),
    (r"gemma-3-4b", _gemma3({"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8,
                           "num_key_value_heads": 4})),
    (r"gemma-3-12b", _gemma3({"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16,
                            "num_key_value_heads": 8})),
    (r"gemma.?7b", {**_GEMMA, "model_type": "gemma", "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
                    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 8192}),
    (r"llama-3\.1-8b", {**_LLAMA3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}),
    (r"llama-3\.2-1b", {**_LLAMA3, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64,
                        "tie_word_embeddings": True}),
    (r"phi-4$", {"model_type": "phi3", "vocab_size": 100352, "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40,
                 "num_attention_heads": 40, "num_key_value_heads": 10, "max_position_embeddings": 16384, "rope_theta": 250000.0,
                 "tie_word_embeddings": False, "eos_token_id": 100265, "sliding_window": None, "pad_token_id": 100257}),
    (r"qwen2(\.5)?-0\.5b", MODELS["0.5B"]),
    (r"r1-distill-qwen-1\.5b", MODELS["1.5B"] | _LONG | {"tie_word_embeddings": False}),
    (r"qwen2\.5-(coder-|math-)?1\.5b", MODELS["1.5B"]),
    (r"qwen2\.5-3b", {**QWEN, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}),
    (r"qwen2\.5-math-7b", {**_QWEN7, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                           "num_key_value_heads": 4}),  # 32768 positions, as its script asks for
    (r"qwen(2|2\.5)-(coder-)?7b|r1-distill-qwen-7b", {**_QWEN7, **_LONG, "hidden_size": 3584, "intermediate_size": 18944,
                                                     "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}),
    (r"qwen2\.5-(coder-)?32b|r1-distill-qwen-32b", {**_QWEN7, **_LONG, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
                                           "num_attention_heads": 40, "num_key_value_heads": 8}),
    (r"qwen3-0\.6b", {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
                      "tie_word_embeddings": True}),
    (r"qwen3-4b", _4B),
    (r"qwen3[-_]8b", MODELS["8B"]), (r"qwen3-32b", MODELS["32B"]), (r"qwen3-30b-a3b", MODELS["30B-A3B"]),
    (r"mistral-nemo", {"model_type": "mistral", "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40,
                       "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
                       "sliding_window": None, "tie_word_embeddings": False, "eos_token_id": 2}),
    (r"moonlight-16b", _MOONLIGHT), (r"dsv3", MODELS["671B"]),
    (r"gpt-oss-20b", MODELS["gpt-oss-120b"] | {"num_hidden_layers": 24, "num_local_experts": 32}),
    (r"deepseek-llm-7b", MODELS["7B"] | {"vocab_size": 102400, "num_hidden_layers": 30}),
)

UNREAD = re.compile(  # where rows come from, what they are worth, when something is written, and numbers that a program is given
    r"(log|run(?!\.recipe|\.warm)|checkpoint|reward(?!\.judge)|eval(?!\.max_new|\.samples)|sandbox|record|profile)\..*"
    r"|optimizer\.(lr|b1|b2|eps|weight_decay|schedule|warmup.*|decay_.*|floor|max_grad_norm)|data\.(path|sources|subset|split|revision|.*_column|system_prompt|seed|shuffle|chat|chat_template_kwargs"
    r"|image_root|max_images|max_rows|overlong_.*|epochs|workers|eval_fraction|drop_last)|model\.(path|revision|tokenizer.*|chat_template"
    r"|trust_remote_code|eos_tokens|pad_token)|env\.(function|tools|options|program|variables|workers|.*seconds|executor)|lora\.(alpha|dropout|init)"
    r"|rollout\.(temperature|top_.|min_p|stop|seeded|.*_penalty)|algorithm\.(aggregation|aggregation_constant|clip_.*|gamma|lam|advantage_(mean|std))"
    r"|train\.steps|critic\.(lr|path)")

SAMPLED = re.compile(r"(rollout|eval)\.(temperature|top_.|min_p|stop|seeded|.*_penalty)")  # decide what the embedded sampler compiles


def flat(options: dict, prefix: str = "") -> dict:
    """Options by their dotted names."""
    out: dict = {}
    for name, value in options.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value}
    return out


def shape_of(report: dict, model: str) -> dict | None:
    """config.json of the model that the source names; of /path/to/model the file says what it is."""
    names = (model.lower(), report["file"].lower())
    return next((s for name in names for pattern, s in SHAPES if re.search(pattern, name)), None)


def write_all(clones: Path, out: Path) -> dict[str, dict]:
    """Migrates the corpus. label -> {"report", "out" of a written config, "model", "group": what decides its plan}."""
    written: dict[str, dict] = {}
    for system, entries in CORPUS.items():
        for n, (repository, at, version, files) in enumerate(entries):
            with tempfile.TemporaryDirectory() as tmp:
                take(clone(clones, repository), at, files, Path(tmp))
                for i, name in enumerate(files):
                    folder = out / f"{system}-{n}-{i}"
                    status, _, report = migrate(system, Path(tmp) / name, version, folder)
                    if status:
                        continue
                    config = load_config(str(folder / report["config"]))
                    if config.model.chat_template.endswith(".jinja2"):  # a file of the repository, which the job is started in
                        text = subprocess.run(["git", "-C", str(clone(clones, repository)), "show", f"{at}:{config.model.chat_template}"],
                                              check=True, capture_output=True).stdout
                        (folder / config.model.chat_template).parent.mkdir(parents=True, exist_ok=True)
                        (folder / config.model.chat_template).write_bytes(text)
                    shape, options = shape_of(report, config.model.path), flat(config.to_dict())
                    here = config.rollout.engine != "vllm"
                    read = sorted((k, str(v)) for k, v in options.items() if not UNREAD.fullmatch(k) or here and SAMPLED.fullmatch(k))
                    flags = report["commands"].get("plan", "").partition("--config.run.mode=plan")[2]
                    written[f"{repository}@{at}:{name}"] = {"report": report, "out": folder, "model": config.model.path, "shape": shape,
                                                            "group": json.dumps([flags, shape, read])}
    return written


def plan(job: dict) -> dict:
    """Runs the printed command. Returns {"plan": verdict, "said": the last line unless it fits, "cpu_seconds"}."""
    if "plan" not in job["report"]["commands"]:
        return {"plan": "none"}
    if job["shape"] is None:
        return {"plan": "wrong", "said": f"SHAPES has no {job['model']}"}
    (job["out"] / "shape").mkdir(exist_ok=True)
    (job["out"] / "shape" / "config.json").write_text(json.dumps(job["shape"]))
    command = [sys.executable, *shlex.split(job["report"]["commands"]["plan"])[1:], "--config.model.path=shape"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=job["out"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(__file__)))})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = {"cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)}
    if done.returncode == 0:
        return {"plan": "fits", **spent}
    last = done.stdout.strip().split("\n")[-1]
    return {"plan": "does not fit" if "it does not fit" in last else "wrong", "said": last, **spent}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clones", type=Path, required=True)
    parser.add_argument("--only", default=".")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    file, started = RESULTS / "migrate_plans.json", time.monotonic()
    before = json.loads(file.read_text())["results"]["configs"] if file.exists() else {}
    with tempfile.TemporaryDirectory() as tmp:
        written = write_all(args.clones.absolute(), Path(tmp))
        results = {label: before[label] for label in written if label in before}
        open_ = [k for k in written if (args.again or k not in results) and re.search(args.only, k)]
        groups: dict[str, list[str]] = {}
        for label in open_:
            groups.setdefault(written[label]["group"], []).append(label)
        for members in sorted(groups.values(), key=lambda m: ("plan" in written[m[0]]["report"]["commands"], -len(m))):
            if time.monotonic() - started > 60 * args.minutes:
                break
            found = plan(written[members[0]]) | {"commit": commit()}
            print(f"{found['plan']:>12}: {', '.join(members)} {found.get('said', '') if found['plan'] == 'wrong' else ''}", flush=True)
            results |= {m: found | ({"planned_as": members[0]} if m != members[0] else {}) for m in members}
            counts = Counter(r["plan"] for r in results.values())
            record("migrate_plans", {"written": len(written), "planned": len(results), **counts, "configs": results})
    rows = {system: Counter(results[k]["plan"] if k in results else "not planned" for k in written if k.startswith(names))
            for system, names in ((s, tuple(f"{e[0]}@{e[1]}:" for e in entries)) for s, entries in CORPUS.items())}
    verdicts = ("fits", "does not fit", "none", "wrong", "not planned")
    table(["system", *verdicts], [[s, *(r[v] for v in verdicts)] for s, r in rows.items()])
    return int(any(r["plan"] == "wrong" for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
