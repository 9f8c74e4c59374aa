"""CPU offload during an update, by the TPU's compiler: what one device and its host hold, with the state on the device
(none), with the optimizer's state in host memory (optimizer.offload=True) and with all of it there
(mesh.roles.policy.rest=streamed).

python evidence/offload.py [MODEL ...]          (wants libtpu; a quarter of an hour on a quiet machine with 2 cores)

One update of an SFT job of one v5p chip: AdamW, fp32 masters, bf16 compute, layers recomputed, microbatches of 4 rows (W2: of
512 tokens, the 1.5B model: of 2,048). Compiled ahead of time; nothing ran on a TPU or a GPU. A program's figure: what is live on
the device beside it, its arguments, what it returns anew and its temporaries. With the optimizer's state alone in host memory the
microbatch's program is that of `none`, and is not compiled again.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))

QWEN = {"model_type": "qwen2", "tie_word_embeddings": True, "eos_token_id": 2, "max_position_embeddings": 32768}
MODELS = {  # name: (config, tokens of a row, of a microbatch)
    "W2, 39 M": (QWEN | {"vocab_size": 32768, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
                         "num_attention_heads": 8, "num_key_value_heads": 2}, 512, 2048),
    "1.5B": (QWEN | {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                     "num_attention_heads": 12, "num_key_value_heads": 2}, 2048, 8192),
}
MODES = {"none": {}, "optimizer": {"optimizer.offload": True}, "all": {"mesh.roles": {"policy": {"rest": "streamed"}}}}
HEADER = ["model", "offload", "device: update", "optimizer step", "peak", "host"]


def compiled(model: tuple, mode: str) -> dict:
    """compiling.finish of one update."""
    import jaxrl
    from jaxrl.config.load import put
    from jaxrl.planning import case, compiling

    c = jaxrl.default_config()
    c.run.mode, c.run.recipe, c.plan.target = "plan", "sft", "v5p:1"
    c.model.init, c.model.config, c.model.tokenizer, c.model.remat = "random", model[0], "jaxrl://arith/tokenizer", "full"
    c.model.scan_layers, c.train.row_lengths, c.train.tokens_per_microbatch = "true", model[1:2], model[2]
    c.data.path, c.train.max_sequence_tokens = ("jaxrl://arith/train.jsonl",), model[1]
    for name, value in MODES[mode].items():
        put(c, name, value)
    found = case.open_case(c)
    started = compiling.start(found.config, found.hf_config, "tpu", found.target, found.mesh, None,
                              {"update", "update_apply"} - ({"update"} if mode == "optimizer" else set()))
    return compiling.finish(started, mode, 3600)


def main():
    from common import record, table

    from jaxrl.planning import memory

    rows, programs = [], {}
    for name, model in MODELS.items():
        if sys.argv[1:] and not any(a in name for a in sys.argv[1:]):
            continue
        for mode in MODES:
            found = compiled(model, mode)
            programs[f"{name}, {mode}"] = found
            found["programs"] = programs[f"{name}, none"]["programs"] | found["programs"]
            peaks = memory.peaks(found["live"], found["programs"])
            host = sum(found["host"].values()) + max(p["host_temporaries"] for p in found["programs"].values())
            sizes = [peaks["update"], peaks["update_apply"], max(peaks.values()), host]
            rows.append([name, mode, *(round(n / 2**30, 3) for n in sizes)])
            print(rows[-1], flush=True)
            if not sys.argv[1:]:
                record("offload", {"target": "v5p:1", "columns": HEADER, "rows": rows, "compiled": programs})
    print("\nGiB of one device and of its host's memory, as compiled for v5p")
    table(HEADER, rows)


if __name__ == "__main__":
    main()
