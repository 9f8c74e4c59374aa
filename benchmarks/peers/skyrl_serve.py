"""Starts skyrl's training server (PyPI `skyrl[tinker,jax]`) on CPUs, without uv, for benchmarks/service_peers.py.

    python skyrl_serve.py MODEL PORT FOLDER

Its command line starts the engine with `uv run` and the extras of its repository; here the engine is started with this interpreter instead.
Nothing else of it is changed. FOLDER gets its database and checkpoints.
"""

import json
import sys

import uvicorn
from skyrl.tinker import api
from skyrl.tinker.config import EngineConfig, config_to_argv


def main(model: str, port: int, folder: str) -> None:
    """Serves until it is killed."""
    backend = {"max_lora_adapters": 10, "max_lora_rank": 16}
    api._build_uv_run_cmd_engine = lambda parent, config: [sys.executable, "-m", "skyrl.tinker.engine", *config_to_argv(config)]
    api.app.state.engine_config = EngineConfig.model_validate(
        {
            "base_model": model,
            "backend": "jax",
            "backend_config": backend,
            "checkpoints_base": f"{folder}/checkpoints",
            "database_url": f"sqlite:///{folder}/tinker.db",
        }
    )
    print(json.dumps({"backend_config": backend}), flush=True)
    uvicorn.run(api.app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
