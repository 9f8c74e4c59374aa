"""Serves the protocol of the `tinker` SDK on this machine: training and sampling over one base model.

    jaxrl serve tinker --model=PATH [--name=NAME] [--rank=32] [--max-length=2048] [--port=8317] [--dir=runs/service]

The SDK's loops and the recipes of tinker-cookbook run against it unmodified:

    export TINKER_BASE_URL=http://127.0.0.1:8317 TINKER_API_KEY=tml-local TINKER_TELEMETRY=0

  --model=PATH        Hugging Face folder or hub id of the base model
  --name=NAME         a further name of the model, for clients that ask for another one; may be given again
  --rank=32           largest rank of an adapter: memory and time are those of this rank; 0: a run has no adapter but
                      trains all parameters (clients ask for rank=0), and one run at a time is on the devices
  --alpha=32          of every adapter; its scale is alpha / rank
  --unembed=train     what a run that asks for an adapter on the output matrix has (train_unembed=True, the SDK's
                      default): one; or leave-out: none, and the client's log has a warning. train costs every run
                      rank x vocabulary numbers, and their moments and gradients
  --together=8        most requests of several runs in one forward and backward pass, which needs memory for as many
                      adapters and their gradients; 1 = each by itself
  --sampler=jax       what samples: the embedded sampler, or vllm: a vLLM server that this command starts (or those of
                      --config.rollout.servers), which gets the adapter of the weights whose turn it is
  --max-length=2048   most tokens of a sequence, prompt and completion; longer requests are refused, none is cut
  --image-tokens=0    most image tokens of a sequence, of a model with a tower for images (Qwen-VL); 0 = text alone
  --host=127.0.0.1    address to listen on; another than loopback needs keys
  --port=8317
  --dir=runs/service  folder of saved weights (adapters in PEFT's files, one folder for each tinker:// path) and of the
                      journal that a restart goes on from
  --sync=0.1          seconds within which the disk has what was accepted and answered, against power failure; 0 =
                      before every answer, never = whenever the system writes it (kill -9 loses nothing in any case)
  --config.X=Y        options of jaxrl that the base, the devices and the sampler have, such as
                      --config.mesh.tp=2, --config.train.tokens_per_microbatch=8192, --config.rollout.slots=64

Keys are read from $JAXRL_SERVICE_KEYS, separated by commas; clients then need one of them. NAME:KEY is the key of a
user, who sees what was made with keys of the same name alone. Without keys, the server answers this machine alone.
Needs the extra `service` (pip install 'jaxrl[service]').

SIGTERM or Ctrl-C ends it with status 0 after the request at work. The same command goes on with all runs, sessions and
results of the last hour, also after kill -9: clients wait and send again by themselves. Status 1: the disk is full; 2:
invalid options.

docs/guides/service.md walks from the installation to a trained adapter, and lists what is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import logging
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.config.load import default_config, parse_flags, put
from jaxrl.errors import ConfigError
from jaxrl.processes.addresses import join_host_port
from jaxrl.service.owners import parse_keys

log = logging.getLogger("jaxrl")
KEYS = "JAXRL_SERVICE_KEYS"
CHOICES = {"unembed": ("train", "leave-out"), "sampler": ("jax", "vllm")}


class Options(NamedTuple):
    """The command line of `jaxrl serve tinker`, by the names of its options.

    Attributes:
      model: folder or hub id of the base. names: of the base model for clients; () = `model`.
      rank: largest of an adapter; 0 = all parameters are trained. alpha: of every adapter, of scale alpha / rank.
      max_length: most tokens of a sequence. image_tokens: most of a sequence, 0 = text alone.
      together: most requests of one forward and backward pass.
      sync: seconds within which the disk has a record of the journal; None = when the system writes it.
      config: further options of jaxrl by dotted name. host, port, dir, unembed, sampler: as the module describes them.
    """

    model: str
    names: tuple[str, ...] = ()
    rank: int = 32
    alpha: float = 32.0
    max_length: int = 2048
    host: str = "127.0.0.1"
    port: int = 8317
    dir: str = "runs/service"
    unembed: str = "train"
    sampler: str = "jax"
    image_tokens: int = 0
    together: int = 8
    sync: float | None = 0.1
    config: dict = {}


def parse(argv: list[str]) -> Options:
    """Parses the arguments of `jaxrl serve tinker`. Raises ConfigError for unknown options, a missing --model, and
    values of another type or out of bounds."""
    found: dict = {"config": {}, "names": ()}
    kinds = {"model": str, "rank": int, "alpha": float, "max-length": int, "host": str, "port": int, "dir": str,
             "unembed": str, "sampler": str, "image-tokens": int, "together": int, "sync": _seconds}
    for argument in argv:
        flag, given, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not given:
            raise ConfigError(f"{argument}: expected --NAME=VALUE; see jaxrl serve tinker --help")
        if flag.startswith("config."):
            found["config"] |= parse_flags([argument])[1]
        elif flag == "name":
            found["names"] += (value,)
        elif flag in kinds:
            try:
                found[flag.replace("-", "_")] = kinds[flag](value)
            except ValueError:
                raise ConfigError(f"--{flag}={value}: expected a number") from None
        else:
            raise ConfigError(f"--{flag}: no such option; see jaxrl serve tinker --help")
    if not found.get("model"):
        raise ConfigError("--model is missing: name the folder or hub id of the base model, --model=PATH")
    options = Options(**found)
    if options.sync is not None and not 0 <= options.sync <= 60:
        raise ConfigError(f"--sync={options.sync:g}: must be 0 to 60 seconds, or never")
    for name, choices in CHOICES.items():
        if getattr(options, name) not in choices:
            raise ConfigError(f"--{name}={getattr(options, name)}: choose {' or '.join(choices)}")
    for name, least in (("rank", 0), ("together", 1), ("max_length", 2), ("alpha", 1e-9), ("port", 0),
                        ("image_tokens", 0)):
        if not least <= getattr(options, name) < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')}={getattr(options, name)}: must be at least {least:g}, and "
                              "finite")
    if not options.rank and options.unembed != "train":
        raise ConfigError(f"--unembed={options.unembed}: --rank=0 trains all parameters, the output matrix too; leave "
                          "it out")
    return options


def _seconds(text: str) -> float | None:
    return None if text == "never" else float(text)


def config_of(options: Options):
    """Returns the config (editable) of the base, the devices and the sampler.

    Raises ConfigError for an unknown option or a wrong value in options.config, and for --rank=0 with train.param_dtype
    other than fp32."""
    from jaxrl.service.sampler import ENDS  # imports jax

    c = default_config()
    c.model.path, c.run.dir = options.model, options.dir
    if options.rank:
        c.lora.rank, c.lora.publish = options.rank, "adapter"  # of scale 1; runs have their own
    length = options.max_length
    c.data.max_prompt_tokens, c.rollout.max_new_tokens = length - 1, length - 1
    c.eval.max_new_tokens, c.train.max_sequence_tokens = length - 1, length
    c.train.row_lengths = tuple(sorted({-(-length // 32) * 8, -(-length // 8) * 8}))  # a quarter of the longest, and it
    c.rollout.engine = options.sampler
    if options.sampler == "jax":
        c.rollout.slots, c.rollout.stop_token_ids = 32, (0,) * ENDS
    for name, value in options.config.items():
        put(c, name, value)
    if not options.rank and c.train.param_dtype != "fp32":
        raise ConfigError(f"--config.train.param_dtype={c.train.param_dtype}: with --rank=0 all parameters are trained "
                          "and saved in fp32; leave it out")
    return c


class Server(NamedTuple):
    """A server that is built and not started.

    Attributes:
      app: the ASGI application. worker: service.worker.Worker, which runs in the main thread. names: of the base model.
    """

    app: Any
    worker: Any
    names: tuple[str, ...]


def build(options: Options, keys: dict[str, str] | None = None) -> Server:
    """Loads the base, builds trainer, sampler and application, and restores what the journal of options.dir holds.

    keys: key -> user, as owners.parse_keys returns it; None or {} = none. Raises ConfigError for a base that does not
    fit the options, and a folder of other runs or of a running server.
    """
    import jax

    from jaxrl import sharding, training
    from jaxrl.models.parameters import flattened
    from jaxrl.roles import parameters
    from jaxrl.rollout import EngineContext, make_engine
    from jaxrl.rollout.engines import engine_row
    from jaxrl.service.full import FullTrainer
    from jaxrl.service.images import Sight
    from jaxrl.service.journal import Journal
    from jaxrl.service.operations import Operations
    from jaxrl.service.recovery import recover
    from jaxrl.service.routes import make_app
    from jaxrl.service.sampler import Sampler
    from jaxrl.service.snapshots import Snapshots
    from jaxrl.service.store import Store
    from jaxrl.service.trainer import Trainer
    from jaxrl.service.worker import Worker

    job, patches = open_base(options)
    base = flattened(parameters.base_params(job) if options.rank else parameters.initial_params(job))
    digest = bytes(parameters.base_digest(base)).hex()
    places = flattened(parameters.param_shardings(job))
    chunk = job.config.train.logprob_chunk
    devices = (places, sharding.replicated(job.mesh), job.row_shapes, job.put)
    if options.rank:
        trainer = Trainer(job.model, base, *devices, options.alpha, chunk, options.together)
    else:
        trainer = FullTrainer(job.model, base, *devices, chunk, *full_files(job))
    del base
    engine = make_engine(EngineContext(job.config, job.model, job.tokenizer, job.mesh, (), job.hf_config, patches))
    read = training.make_reader(job.model, temperature=1.0, chunk=chunk, put=job.put)
    params = trainer.params if options.sampler == "jax" else trainer.params_without_scales
    sampler = Sampler(engine, read, job.row_shapes, params, trainer.base_leaves(),
                      turn=max(64, 2 * engine_row(job.config).slots(job.config.rollout, 0)))
    journal = Journal(Path(options.dir) / "journal", options.sync)
    check_folder(journal.path.parent, options, digest)
    worker = Worker(trainer, sampler, Snapshots(journal.path.parent, trainer, journal.sync))
    names = (options.names[0] if options.names else options.model, *options.names[1:],
             *([options.model] if options.names else []))
    operations = Operations(worker, Store(Path(options.dir)), names, job.eos_ids, options.max_length,
                            job.model.config.vocab_size, journal=journal, leave_out=options.unembed == "leave-out",
                            sight=Sight(job.images, options.image_tokens) if patches else None)
    log.info("%d x %s, %.2f M parameters, %s", jax.device_count(), jax.devices()[0].device_kind,
             job.model.base.num_parameters / 1e6,
             f"adapters of rank 1 to {options.rank}" if options.rank else "all are trained")
    recover(operations, journal)
    return Server(make_app(operations, keys or {}), worker, names)


def full_files(job):
    """Returns (write(parameter tree, folder), read(folder) -> parameters by flat name) of Hugging Face folders.

    Written in float32. job: of `open_base`."""
    from jaxrl.models.io import hf
    from jaxrl.models.parameters import flattened
    from jaxrl.roles import parameters

    def write(params, folder) -> None:
        hf.export(job.model, params, folder, job.hf_config, "float32", job.tokenizer, eos_ids=job.eos_ids)

    return write, lambda folder: flattened(parameters.initial_params(job, str(folder)))


def open_base(options: Options):
    """Returns (Job of base, adapters, devices and rows; most patches of a sequence, 0 without images).

    Raises ConfigError for a base that cannot be read or that does not fit the options."""
    from jaxrl.resolve.spec import resolve
    from jaxrl.run.setup import check_weights, open_job, read_model_inputs, start_jax
    from jaxrl.service.trainer import with_head

    config = config_of(options)
    start_jax(resolve(config))
    inputs = read_model_inputs(config)
    check_weights(resolve(config), inputs)
    job, patches = open_job(resolve(config), with_sight(options, resolve(config), inputs)), 0
    if (images := job.images) is not None:
        patches, unit = options.image_tokens * images.merge**2, 8 * images.merge**2 * job.row_shapes.ranks
        room = (-(-patches // unit) * unit,) * len(job.row_shapes.lengths)
        job = dataclasses.replace(job, row_shapes=dataclasses.replace(job.row_shapes, patches=room))
    if options.unembed == "train" and options.rank:
        job = dataclasses.replace(job, model=with_head(job.model, options.rank))
    return job, patches


def with_sight(options: Options, spec, inputs):
    """Returns the ModelInputs with the tower for images; as they are with options.image_tokens 0.

    spec: of the config. inputs: run.setup's ModelInputs. Raises ConfigError for a base without a tower."""
    from jaxrl.run.data import open_images, with_tower
    from jaxrl.run.setup import check_weights

    if not options.image_tokens:
        return inputs
    images = open_images(spec, inputs.hf_config, inputs.tokenizer)
    if images is None:
        raise ConfigError(f"--image-tokens={options.image_tokens}: --model={options.model} is read without a tower for "
                          "images; leave the option out")
    images.use(f"--image-tokens={options.image_tokens}")
    inputs = with_tower(spec, inputs, images)
    check_weights(spec, inputs)
    return inputs


def check_folder(folder: Path, options: Options, digest: str) -> None:
    """Notes what the runs of a folder depend on, in base.json, or raises ConfigError if it differs from what was noted;
    a rank above the noted one takes its place. The folder must exist. digest: of the base's parameters.
    """
    from jaxrl.service.files import write
    from jaxrl.telemetry.run_dir import read_json

    file = folder / "base.json"
    now = {"digest": digest, "alpha": options.alpha, "rank": options.rank, "unembed": options.unembed}
    was = read_json(file) if file.exists() else now
    if not was.keys() >= {"digest", "alpha", "rank"}:
        raise ConfigError(f"{file}: damaged: it does not name the base model of the runs in its folder; restore it, or "
                          "choose another --dir")
    if was["digest"] != digest:
        raise ConfigError(f"--model={options.model}: the runs in {folder} are of another base model (or of another "
                          "dtype of it); name that one, or choose another --dir")
    if (was["rank"] == 0) != (options.rank == 0):
        raise ConfigError(f"--rank={options.rank}: the runs in {folder} were trained with --rank={was['rank']}, and 0 "
                          "trains all parameters, without adapters; set that, or choose another --dir")
    if options.rank and (was["alpha"] != options.alpha or was["rank"] > options.rank):
        raise ConfigError(f"--rank={options.rank} --alpha={options.alpha:g}: the runs in {folder} were trained with "
                          f"--rank={was['rank']} --alpha={was['alpha']:g}; set at least this rank and this alpha, or "
                          "choose another --dir")
    if (unembed := was.get("unembed", "leave-out")) != options.unembed:
        raise ConfigError(f"--unembed={options.unembed}: the runs in {folder} were trained with --unembed={unembed}; "
                          "set that, or choose another --dir")
    if not file.exists() or was != now:
        write(file, (json.dumps(now) + "\n").encode())


def serve(server: Server, options: Options) -> None:
    """Answers requests until SIGTERM or SIGINT, then closes the engine. The calling thread, which must be the main one,
    handles these signals and issues all device programs.

    Raises ConfigError if the port is taken, OSError if a result or snapshot cannot be written."""
    import uvicorn

    http = uvicorn.Server(uvicorn.Config(server.app, options.host, options.port, log_level="warning", lifespan="off",
                                         timeout_graceful_shutdown=2))
    http.capture_signals = _nothing  # the worker ends first
    thread = threading.Thread(target=http.run, name="http", daemon=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: server.worker.stop())
    thread.start()
    while not http.started:
        if not thread.is_alive():
            raise ConfigError(f"--port={options.port}: cannot listen on {join_host_port(options.host, options.port)}; "
                              "if another server runs there, choose another port")
        thread.join(0.05)
    port = http.servers[0].sockets[0].getsockname()[1]
    url = f"http://{join_host_port(options.host, port)}"
    print(f"export TINKER_BASE_URL={url}\nexport TINKER_API_KEY=tml-local TINKER_TELEMETRY=0", flush=True)
    log.info("ready: %s at %s, sequences of up to %d tokens", ", ".join(server.names), url, options.max_length)
    try:
        server.worker.serve()
    finally:
        server.worker.sampler.engine.close()
    http.should_exit = True
    thread.join(5.0)


def _check_keys(options: Options, keys: dict[str, str]) -> None:
    if not keys and options.host not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(f"--host={options.host}: other machines could train and read here; set ${KEYS} to keys that "
                          "clients must send (tml-...), or leave --host out")


def _check_installed() -> None:
    if missing := [name for name in ("starlette", "uvicorn", "google.protobuf") if not importlib.util.find_spec(name)]:
        raise ConfigError(f"the package {missing[0]} is missing: pip install 'jaxrl[service]'")


@contextlib.contextmanager
def _nothing():
    yield


def main(argv: list[str]) -> int:
    """Runs `jaxrl serve tinker`; returns its exit status: 0 after a stop or --help, 2 for a ConfigError, 1 if the disk
    fails."""
    if any(argument in ("-h", "--help") for argument in argv):
        print((__doc__ or "").rstrip())
        return 0
    logging.basicConfig(level=logging.WARNING, format="jaxrl.service: %(message)s")
    log.setLevel(logging.INFO)
    try:
        options, keys = parse(argv), parse_keys(os.environ.get(KEYS, ""))
        _check_keys(options, keys)
        _check_installed()
        server = build(options, keys)
        serve(server, options)
    except ConfigError as e:
        log.error("%s", e)
        return 2
    except OSError as e:
        log.error("%s: %s; free space and start the server again: it goes on without a loss", e.filename or options.dir,
                  e.strerror or e)
        return 1
    return 0
