"""What runs inside vLLM's processes. vLLM loads it through the entry point `vllm.general_plugins`.

It imports the standard library, and torch and vllm inside functions, nothing else: `pip install --no-deps jaxrl` into
an engine's own environment is enough. It

- registers the weight transfer backend `jaxrl`, which takes tensors from a file in shared memory, over HTTP or by NCCL,
- has the middleware that asks for a key at every door of the server (`Guard`),
- adds worker methods that tell what is loaded (`jaxrl_info`), its checksums per HF tensor (`jaxrl_digests`) and those
  of an adapter's files (`jaxrl_adapter`),
- registers models that take finished images under names of their own (`images`, ARCHITECTURES),
- changes what vLLM's build for CPUs computes (`cpu`): it packs weights, after which no reload would reach them,
- ends the process when the trainer that started it is gone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import hmac
import http.client
import importlib.util
import json
import mmap
import os
import re
import socket
import threading
import time
from collections.abc import Iterator

from jaxrl.vllm_plugin import cpu, loading

BACKEND = "jaxrl"
PROTOCOL = 5  # of the payloads below; the trainer refuses another one
OWNER = "JAXRL_OWNER"  # environment: "pid:start time" of the trainer that started this server
IMAGE_TOKENS = "image_tokens"  # of --mm-processor-kwargs: most tokens of an image
# HF's architectures with a tower -> the class of `images` that serves them with finished images
ARCHITECTURES = {"Qwen3VLForConditionalGeneration": "Qwen3VL", "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoe",
                 "Qwen2_5_VLForConditionalGeneration": "Qwen2_5_VL", "Qwen2VLForConditionalGeneration": "Qwen2VL"}


def architecture(name: str) -> str:
    """Returns the name, in `architectures` of config.json, of jaxrl's model for one of ARCHITECTURES."""
    return f"Jaxrl{name}"


def register() -> None:
    """Adds jaxrl to vLLM: weight transfer backend, worker methods, models with finished images, and the CPU build's
    changes.

    vLLM's entry point: it runs in every process of the server, sometimes twice, with the same result. Also starts the
    thread that ends the process when the trainer that started it is gone."""
    _watch_owner()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        cpu.change_vllm()
    _add_worker_methods()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "TransferEngine")
    from vllm import ModelRegistry

    for name, own in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture(name), f"{__name__}.images:{own}")


# ---- the life of the process -----------------------------------------------------------------------------------------

def start_time(pid: int) -> str:
    """Returns when a process was started, in clock ticks since boot; "" if it does not run. Tells a pid from its later
    reuse."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _watch_owner() -> None:
    pid, _, started = os.environ.get(OWNER, "").partition(":")
    if not pid or any(t.name == OWNER for t in threading.enumerate()):
        return

    def watch():
        while start_time(int(pid)) == started:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name=OWNER, daemon=True).start()


def _add_worker_methods() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    WorkerBase.jaxrl_info = info
    WorkerBase.jaxrl_digests = digests
    WorkerBase.jaxrl_adapter = adapter


# ---- the doors -------------------------------------------------------------------------------------------------------

KEY = "VLLM_API_KEY"  # environment: what requests have to show; vLLM itself reads it too


class Guard:
    """ASGI middleware, for vLLM's --middleware: whoever does not show `Authorization: Bearer
    <$VLLM_API_KEY>` reaches /health alone.

    vLLM's own key covers the paths of requests; weights, sleep and remote calls in the workers stay open beside it.
    Raises RuntimeError without a key, so that such a server does not start."""

    def __init__(self, app):
        key = os.environ.get(KEY, "")
        if not key:
            raise RuntimeError(f"jaxrl's guard needs a key in the environment variable {KEY}")
        self.app, self._wanted = app, hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan" or scope["path"] == "/health" or self._shows_key(scope["headers"]):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = b'{"error": "Unauthorized"}'
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)),
                       (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _shows_key(self, headers) -> bool:
        kind, _, given = dict(headers).get(b"authorization", b"").partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(hashlib.sha256(given).digest(), self._wanted)


# ---- receiving weights -----------------------------------------------------------------------------------------------

@dataclasses.dataclass
class InitInfo:
    """Announces a trainer. `protocol`: its PROTOCOL. `names`: every tensor a publish must bring. `folder`: its folder's
    name in /dev/shm. `address`, `key`: of its HTTP server, host:port. `nccl`: id (hex), size and rank of this server's
    first worker in a new communicator. Empty: not used."""

    protocol: int
    names: list[str]
    folder: str = ""
    address: str = ""
    key: str = ""
    nccl: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class UpdateInfo:
    """Describes one chunk. `source`: "shm:<number>", "http:<number>" or "nccl:"; numbers are of the announced trainer.
    `size`: bytes. `tensors`: [name, dtype, shape, offset, bytes, SHA-256 or empty] each."""

    source: str
    size: int
    tensors: list[list]


class Receiver:
    """Receives a trainer's weights; vLLM's base class brings the rest (model, device, parallel_config). names: tensors
    that the trainer announced. received: those that arrived since the last update began."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    names = received = frozenset()
    dtypes: dict = {}  # of what was received, by name: vLLM may hold it in another one
    rates: dict = {}  # A_log as it was received, by name: Mamba-2 holds another number
    nccl = None

    def init_transfer_engine(self, init_info):
        """Connects to the trainer that `init_info` describes. Raises ValueError for another protocol and what Reader
        and Nccl raise. Part of vLLM's interface."""
        if init_info.protocol != PROTOCOL:
            raise ValueError(f"jaxrl: the trainer speaks transfer protocol {init_info.protocol}, this plugin "
                             f"{PROTOCOL}; install the same jaxrl on both sides")
        self.names, self.reader = set(init_info.names), Reader(init_info.folder, init_info.address, init_info.key)
        self.received = set()
        if init_info.nccl:
            here = self.parallel_config
            rank = init_info.nccl["rank"] + here.data_parallel_index * here.world_size + here.rank
            self.nccl = self.nccl or Nccl()
            self.nccl.abort()
            self.nccl.join(init_info.nccl["size"], bytes.fromhex(init_info.nccl["id"]), rank)

    def start_weight_update(self):
        """Begins vLLM's layer-wise loading, after closing what a failed update left open; a tower of which nothing was
        announced stays loaded. Part of vLLM's interface."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload, layerwise

        model = self.model
        self.received, self.gates, self.dtypes, self.rates = set(), {}, {}, {}
        for layer in model.modules():  # an update that failed halfway leaves them open, with what had arrived
            info = layerwise.get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
                info.reset()
        loading.name_loaders(model)
        leaves_tower = hasattr(model, "visual") and not any(is_of_tower(name) for name in self.names)
        initialize_layerwise_reload(model.language_model if leaves_tower else model)

    def receive_weights(self, update_info):
        """Receives one chunk as `update_info` describes it and loads its tensors. Raises what `load` and Reader.open
        raise. Part of vLLM's interface."""
        import torch

        if update_info.source == "nccl:":
            return self.receive_broadcast(update_info)
        with self.reader.open(update_info.source, update_info.size) as buffer:
            for name, dtype, shape, offset, size, expected in update_info.tensors:
                # a copy: vLLM may keep the tensor until its layer is complete, the buffer is used again before
                part = bytearray(buffer[offset:offset + size])
                self.load(name, torch.frombuffer(part, dtype=getattr(torch, dtype)).reshape(shape), expected)

    def receive_broadcast(self, update_info):
        """Receives one chunk by NCCL and loads its tensors. Raises RuntimeError without a communicator or if NCCL
        fails."""
        import torch

        if self.nccl is None:
            raise RuntimeError("jaxrl: a broadcast was announced before its communicator")
        buffer = torch.empty(update_info.size, dtype=torch.uint8, device=self.device)
        if buffer.is_cuda:  # NCCL works on the default stream; nothing before it may still use the memory
            torch.cuda.synchronize(self.device)
        self.nccl.broadcast(buffer.data_ptr(), update_info.size)
        if buffer.is_cuda:
            torch.cuda.synchronize(self.device)
        for name, dtype, shape, offset, size, expected in update_info.tensors:
            self.load(name, buffer[offset:offset + size].view(getattr(torch, dtype)).reshape(shape), expected)

    def load(self, name, tensor, expected):
        """Loads one tensor into the model. expected: its SHA-256, "" = not checked.

        Raises ValueError for a tensor that was not announced or arrived damaged."""
        if name not in self.names:
            raise ValueError(f"jaxrl: tensor {name} was not announced")
        if expected and digest(tensor) != expected:
            raise ValueError(f"jaxrl: tensor {name} arrived damaged")
        loading.load(self.model, name, tensor.to(self.device), self.gates)
        self.received.add(name)
        if name.endswith(".A_log"):
            self.rates[name] = tensor.to(self.device, copy=True)
        self.dtypes[name] = tensor.dtype

    def finish_weight_update(self):
        """Finishes vLLM's layer-wise loading after the last chunk; `info` lists missing tensors. Part of vLLM's
        interface."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        # an error here would leave vLLM in the middle of an update for good: what is missing is told by `info`
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            # some kernels read a copy in another dtype
            if getattr(module, "sinks", None) is not None and hasattr(module, "attn"):
                module.attn.impl.sinks.data.copy_(module.sinks)

    def shutdown(self):
        """Leaves the communicator. Part of vLLM's interface."""
        if self.nccl is not None:
            self.nccl.abort()


def __getattr__(name):
    if name == "TransferEngine":  # its base class is vLLM's, so it is made when vLLM asks for it
        from vllm.distributed.weight_transfer.base import WeightTransferEngine

        class TransferEngine(Receiver, WeightTransferEngine):
            pass

        return globals().setdefault(name, TransferEngine)
    raise AttributeError(name)


class Nccl:
    """What a broadcast needs of NCCL, through ctypes: the same few calls for the trainer and for vLLM's workers.

    One communicator at a time, on the device and the default stream of the calling thread. The library is that of the
    environment variable JAXRL_NCCL, of the package nvidia-nccl, or whatever the loader finds. Raises OSError without
    one, RuntimeError with NCCL's own words where a call fails."""

    BYTES = 1  # ncclUint8

    class Id(ctypes.Structure):
        _fields_ = [("data", ctypes.c_byte * 128)]

    def __init__(self):
        self._library = ctypes.CDLL(self.find())
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._library.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, self.Id, ctypes.c_int]
        self._communicator = ctypes.c_void_p()

    @staticmethod
    def find() -> str:
        """Returns the path of NCCL: $JAXRL_NCCL, the installed package's, or the bare name "libnccl.so.2"."""
        try:
            package = importlib.util.find_spec("nvidia.nccl")
        except ModuleNotFoundError:
            package = None
        folders = list(package.submodule_search_locations or ()) if package else []
        packaged = [path for f in folders if os.path.exists(path := os.path.join(f, "lib", "libnccl.so.2"))]
        return os.environ.get("JAXRL_NCCL") or (packaged or ["libnccl.so.2"])[0]

    def _call(self, name, *args):
        status = getattr(self._library, name)(*args)
        if status:
            raise RuntimeError(f"{name}: {self._library.ncclGetErrorString(status).decode()}")

    def unique_id(self) -> bytes:
        """Returns NCCL's 128 bytes that name a new communicator. Raises RuntimeError if NCCL fails."""
        out = self.Id()
        self._call("ncclGetUniqueId", ctypes.byref(out))
        return bytes(out)

    def join(self, size: int, unique_id: bytes, rank: int) -> None:
        """Joins the communicator `unique_id` as `rank`; waits, without a limit, for all `size` members. Raises
        RuntimeError."""
        own = self.Id.from_buffer_copy(unique_id)
        self._call("ncclCommInitRank", ctypes.byref(self._communicator), size, own, rank)

    def broadcast(self, pointer: int, count: int) -> None:
        """Queues a broadcast of `count` bytes from `pointer` of rank 0 to `pointer` of the others; does not wait."""
        at, stream = ctypes.c_void_p(pointer), ctypes.c_void_p()
        self._call("ncclBroadcast", at, at, ctypes.c_size_t(count), self.BYTES, 0, self._communicator, stream)

    def abort(self) -> None:
        """Aborts the communicator, if there is one. Raises RuntimeError if NCCL fails."""
        if self._communicator:
            self._call("ncclCommAbort", self._communicator)
            self._communicator = ctypes.c_void_p()


class Reader:
    """Reads chunks of one trainer as memoryviews, from its folder in shared memory or over one kept connection to its
    address, with its key.

    Raises ValueError for a folder, an address or a source that no trainer of jaxrl announces: a server must not read
    other files or call other hosts because a request asks for it."""

    FOLDER, ADDRESS = r"jaxrl-\w+", r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d{1,5}"

    def __init__(self, folder: str = "", address: str = "", key: str = ""):
        for value, pattern in ((folder, self.FOLDER), (address, self.ADDRESS)):
            if value and not re.fullmatch(pattern, value, re.ASCII):
                raise ValueError(f"jaxrl: {value!r} is no place from which weights are taken")
        self.folder, self.address, self.key, self.connection = folder, address, key, None

    def open(self, source: str, size: int) -> memoryview:
        """Returns a chunk's `size` bytes, a context. source: "shm:N" or "http:N". Raises ValueError for one that was
        not announced or a file that is shorter, OSError or HTTPException if it cannot be read."""
        kind, _, number = source.partition(":")
        if not {"shm": self.folder, "http": self.address}.get(kind) or not re.fullmatch(r"\d+", number, re.ASCII):
            raise ValueError(f"jaxrl: weights from {source!r} were not announced")
        return _mapped(self.folder, number, size) if kind == "shm" else memoryview(self._download(number, size))

    def _download(self, number: str, size: int) -> bytearray:
        for fresh in (False, True):
            try:
                if self.connection is None or fresh:
                    self.connection = http.client.HTTPConnection(self.address, timeout=600)
                self.connection.request("GET", "/" + number, headers={"Authorization": f"Bearer {self.key}"})
                answer = self.connection.getresponse()
                break
            except (http.client.HTTPException, ConnectionError):
                if fresh:
                    raise
        if answer.status != 200:
            answer.read()
            raise ConnectionError(f"jaxrl: the trainer answered {answer.status} to {number}")
        out = bytearray(size)
        view, at = memoryview(out), 0
        while at < size:
            count = answer.readinto(view[at:])
            if not count:
                raise ConnectionError(f"jaxrl: the trainer sent {at} of {size} bytes")
            at += count
        answer.read()
        return out


def _mapped(folder: str, name: str, size: int) -> memoryview:
    """A file of a folder in /dev/shm, mapped until the view is released; links are not followed, in neither place."""
    there = os.open(f"/dev/shm/{folder}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=there)
    finally:
        os.close(there)
    try:
        return memoryview(mmap.mmap(file, size, access=mmap.ACCESS_READ))
    finally:
        os.close(file)


# ---- telling what is loaded ------------------------------------------------------------------------------------------

def info(worker) -> dict:
    """Returns what the trainer checks of this worker, a dict: versions, model, dtypes, lengths, host, adapter rank,
    images, sleep mode, the number of images with cached features, and announced weights that are missing."""
    import vllm
    from vllm.platforms import current_platform

    config, engine = worker.vllm_config, worker.weight_transfer_engine
    transfer = config.weight_transfer_config
    return {
        "protocol": PROTOCOL, "vllm": vllm.__version__, "rank": worker.rank, "pid": os.getpid(),
        "host": socket.gethostname(), "backend": transfer.backend if transfer else "",
        "model": type(worker.get_model()).__name__, "quantized": config.model_config.quantization or "",
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "cache_dtype": str(config.cache_config.cache_dtype), "vocab_size": config.model_config.get_vocab_size(),
        "max_model_len": config.model_config.max_model_len, "machine": machine(),
        "sleeps": config.model_config.enable_sleep_mode or current_platform.is_cpu(),  # the CPU's has nothing to free
        "missing": sorted(getattr(engine, "names", set()) - getattr(engine, "received", set())),
        "lora_rank": config.lora_config.max_lora_rank if config.lora_config else 0,
        "query_growth": getattr(config.model_config.hf_text_config, "llama_4_scaling", None),
        "images": getattr(worker.get_model(), "takes_patches", False), "features": _kept_features(worker),
    }


def _kept_features(worker) -> int:
    """Of how many images this worker keeps what its tower made."""
    cache = getattr(worker.model_runner, "encoder_cache", None) or {}
    return len(getattr(cache, "encoder_outputs", cache))


def machine() -> str:
    """Returns the boot id and the device of /dev/shm, or else the host name. Processes with the same value share
    memory; those with the same host name are taken to."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            return f"{f.read().strip()}:{os.stat('/dev/shm').st_dev}"
    except OSError:
        return socket.gethostname()


def digests(worker) -> str:
    """Returns JSON: HF tensor name -> [SHA-256 of the loaded piece, dtype, shape, axis, [[start, stop], ...]].

    The piece is these slices of the HF tensor, joined along `axis` (axis -1: all of it), as this worker holds them;
    `dtype` is its dtype. If it was sent in another dtype, its hash is taken after a cast to that. Raises what `pieces`
    raises."""
    model, engine = worker.get_model(), worker.weight_transfer_engine
    sent, names = getattr(engine, "dtypes", {}), getattr(engine, "names", frozenset())
    rates = getattr(engine, "rates", {})
    return json.dumps({name: [digest(piece.to(sent.get(name, piece.dtype))), str(piece.dtype).removeprefix("torch."),
                              list(piece.shape), *place] for name, piece, place in pieces(model, names, rates)})


def adapter(worker, path: str) -> str:
    """Returns JSON: [[SHA-256 of adapter_config.json, of adapter_model.safetensors], number of adapters the worker
    holds].

    path: the adapter's folder, as this worker's machine sees it. Raises OSError if a file cannot be read."""
    sums = []
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        with open(os.path.join(path, name), "rb") as f:
            sums.append(hashlib.file_digest(f, "sha256").hexdigest())
    return json.dumps([sums, len(worker.list_loras())])


def digest(tensor) -> str:
    """Returns the SHA-256, in hex, of a torch tensor's bytes in C order."""
    import torch

    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()


def is_of_tower(name: str) -> bool:
    """Returns whether an HF tensor belongs to a tower of ARCHITECTURES: its name begins with model.visual."""
    return name.startswith("model.visual.")


def pieces(model, sent=frozenset(), rates=None) -> Iterator[tuple]:
    """Yields (HF name, loaded piece, (axis, [(start, stop), ...])) of every loaded parameter; see `digests` for the
    slices.

    Fused parameters are taken apart, except those that the HF folder holds fused. sent: names of that folder's tensors.
    rates: Receiver.rates. Raises ValueError if matrices, sinks or rates made of loaded weights do not match them."""
    for name, piece, place in _pieces(model, sent):
        name = loading.sent_name(model, name)
        if name.endswith(".A"):
            name, piece = f"{name}_log", loading.rates(f"{name}_log", piece, place, rates or {})
        if loading.is_gpt_oss(model):  # its modules have other names than its checkpoint
            name = name.replace(".attn.", ".self_attn.").replace("model.embedding.", "model.embed_tokens.")
        yield (_name_beside_tower(name) if hasattr(model, "visual") else name), piece, place


def _name_beside_tower(name: str) -> str:
    """HF's name of a parameter of a model with a tower: the inverse of its `hf_to_vllm_mapper`."""
    pairs = (("visual.", "model.visual."), ("language_model.lm_head.", "lm_head."),
             ("language_model.model.", "model.language_model."))
    return next((theirs + name.removeprefix(own) for own, theirs in pairs if name.startswith(own)), name)


def _pieces(model, sent) -> Iterator[tuple]:
    inner = getattr(model, "language_model", model)  # Qwen2-VL's outer model does not name them
    packed = {**getattr(inner, "packed_modules_mapping", {}), **getattr(model, "packed_modules_mapping", {})}
    modules = dict(model.named_modules())
    for full, parameter in model.named_parameters():
        path, _, leaf = full.rpartition(".")
        module, path = modules[path], path.removesuffix(".base_layer")  # what vLLM wraps for adapters
        full, (parent, _, own) = f"{path}.{leaf}", path.rpartition(".")
        data = parameter.data
        if leaf in ("W_UK_T", "W_UV"):  # of latent attention, made of kv_b_proj when all had arrived
            _check_derived(full, module, leaf, data)
            continue
        if hasattr(module, "expert_map_manager"):
            yield from _expert_pieces(path.removesuffix(".routed_experts"), module, leaf, data)
            continue
        if hasattr(module, "shard_indices"):  # VocabParallelEmbedding and head
            rows = module.shard_indices
            count = rows.org_vocab_end_index - rows.org_vocab_start_index
            yield full, data[:count], (0, [(rows.org_vocab_start_index, rows.org_vocab_end_index)])
        elif parts := _parts(module, own, modules.get(parent)):
            names, at = [own] if full in sent else packed.get(own, [own]), 0
            more = len(parts) - len(names) + 1  # HF's first tensor has what is left to it: in_proj_qkv, or all
            for name, some in zip(names, [parts[:more], *([part] for part in parts[more:])], strict=True):
                ranges, first, start = [], 0, at
                for total, size, rank in some:
                    ranges.append((first + rank * size, first + (rank + 1) * size))
                    first, at = first + total, at + size
                yield ".".join(filter(None, (parent, name, leaf))), data[start:at], (0, ranges)
        else:
            axis = None
            if leaf == "sinks":
                _check_sinks(full, module, data)
                axis, module = 0, module.qkv_proj
            elif leaf in ("A_log", "A", "D", "dt_bias") or hasattr(module, "per_rank_hidden_size"):
                axis = 0  # one number a head, and Mamba-2's gated norm
            elif hasattr(module, "input_is_parallel"):  # RowParallelLinear; its bias is whole
                axis = 1 if leaf == "weight" else None
            elif hasattr(module, "gather_output"):  # ColumnParallelLinear; routers are replicated
                axis = 0
            split = axis is not None and getattr(module, "tp_size", 1) > 1
            start = getattr(module, "in_proj", module).tp_rank * data.shape[axis] if split else 0
            yield full, data, (axis, [(start, start + data.shape[axis])]) if split else (-1, [])


def _parts(module, own: str, parent) -> list[tuple[int, int, int]]:
    """(outputs, those of one worker, number of this one's share) of every matrix that a module holds one behind the
    other; [] for a module that holds one."""
    if hasattr(module, "total_num_kv_heads"):  # QKVParallelLinear
        size, rank = module.head_size, module.tp_rank
        kv_rank, values = rank // module.num_kv_head_replicas, getattr(module, "v_head_size", size)
        return [(module.total_num_heads * size, module.num_heads * size, rank),
                (module.total_num_kv_heads * size, module.num_kv_heads * size, kv_rank),
                (module.total_num_kv_heads * values, module.num_kv_heads * values, kv_rank)]
    totals = getattr(module, "output_sizes", ())  # MergedColumnParallelLinear
    if own == "conv1d" and hasattr(parent, "key_dim"):
        totals = parent.key_dim, parent.key_dim, parent.value_dim
    return [(total, total // module.tp_size, module.tp_rank) for total in totals]


def _check_derived(name: str, module, leaf: str, data) -> None:
    """Raises ValueError where a matrix that latent attention computes with is not of the weights that were loaded."""
    import torch

    heads = module.kv_b_proj.weight.view(module.num_heads, -1, module.kv_lora_rank)
    keys, values = heads.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
    if not torch.equal(data, (keys if leaf == "W_UK_T" else values.transpose(1, 2)).to(data.dtype)):
        raise ValueError(f"jaxrl: {name} was made of other weights than are loaded")


def _check_sinks(name: str, module, data) -> None:
    """Raises ValueError where the sinks that attention computes with are not those that were loaded."""
    if (module.attn.impl.sinks.to(data.dtype) != data).any():
        raise ValueError(f"jaxrl: attention computes with other sinks than {name}")


def _expert_pieces(path: str, module, leaf: str, data) -> Iterator[tuple]:
    """`pieces` of a layer of experts: w13_weight [experts, 2 x inner, hidden] holds gate and up, one behind the other
    or, of gpt-oss, in turns, w2_weight [experts, hidden, inner] down, and gpt-oss's w13_bias and w2_bias one number for
    each row of these; of the experts that this worker has, and of their inner size its share."""
    config, (matrix, _, kind) = module.moe_config, leaf.partition("_")
    if matrix not in ("w13", "w2") or kind not in ("weight", "bias"):
        raise ValueError(f"jaxrl: {path}.{leaf}: only weights and biases of experts can be told, not this")
    parallel, count = config.moe_parallel_config, config.intermediate_size_per_partition_unpadded
    inner = config.hidden_dim_unpadded if matrix == "w13" else count  # of a row
    place: tuple = (-1, [])
    if parallel.tp_size > 1 and leaf != "w2_bias":
        place = (0 if matrix == "w13" else 1, [(parallel.tp_rank * count, (parallel.tp_rank + 1) * count)])
    elif leaf == "w2_bias" and parallel.tp_rank:  # added behind the sum over workers, by the first
        return
    for expert in range(module.global_num_experts):
        own = expert if module.expert_map is None else int(module.expert_map[expert])
        if own < 0:
            continue
        held = data[own] if kind == "bias" else data[own][:, :inner]
        if matrix == "w2":
            parts = {module.ckpt_down_proj_name: held[:config.hidden_dim_unpadded]}
        else:
            half, turns = held.shape[0] // 2, config.activation.value == "swigluoai"
            gate, up = (held[::2], held[1::2]) if turns else (held[:half], held[half:])
            parts = {module.ckpt_gate_proj_name: gate[:count], module.ckpt_up_proj_name: up[:count]}
            if not module.ckpt_up_proj_name:  # Nemotron's have no gate: the first of the two names is theirs
                parts = {module.ckpt_gate_proj_name: held[:count]}
        for name, piece in parts.items():
            yield f"{path}.{expert}.{name}.{kind}", piece, place
