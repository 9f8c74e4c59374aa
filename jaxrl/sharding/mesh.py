"""Makes the device mesh of every role from the config.

Axes: dp (replicas), fsdp (shards of parameters), cp (shards of rows along their tokens, and of parameters), ep (shards
of experts, and of all other parameters), tp (shards of heads, width, vocabulary).
"""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.errors import ConfigError

AXES = ("dp", "fsdp", "cp", "ep", "tp")
DATA_AXES = ("dp", "fsdp", "ep")  # the rows of a batch are split over all of them, and each row over cp
RANGE = re.compile(r"([0-9]+)(?:\s*-\s*([0-9]+))?")  # of devices, or one of them
ROLES = ("policy", "reference", "critic", "teacher", "sampler", "reward_model")  # whom mesh.roles can give devices


def mesh_shape(mesh_config, num_devices: int) -> tuple[int, ...]:
    """Returns the sizes of AXES, with -1 replaced so that the product is `num_devices`; missing axes are 1.

    Raises ConfigError for a size of 0 or below -1, for more than one -1, and when the sizes cannot cover the devices.
    """
    sizes = [getattr(mesh_config, a, 1) for a in AXES]
    text = ", ".join(f"mesh.{a}={s}" for a, s in zip(AXES, sizes, strict=True))
    if any(s == 0 or s < -1 for s in sizes):
        raise ConfigError(f"{text}: sizes are positive, or -1 for the rest of the devices")
    if sizes.count(-1) > 1:
        raise ConfigError(f"{text}: only one axis can be -1")
    known = math.prod(s for s in sizes if s > 0)
    if -1 in sizes:
        if num_devices % known:
            fixed = " x ".join(f"mesh.{a}" for a, s in zip(AXES, sizes, strict=True) if s > 1)
            raise ConfigError(f"{text}: {num_devices} device(s) cannot be divided by {fixed} = {known}; lower {fixed}")
        sizes[sizes.index(-1)] = num_devices // known
    elif known != num_devices:
        available = f"{num_devices} {'is' if num_devices == 1 else 'are'} available"
        raise ConfigError(f"{text}: mesh asks for {known} devices, {available}; set one axis to -1, e.g. mesh.fsdp=-1")
    return tuple(sizes)


def make_mesh(mesh_config, devices=None) -> Mesh:
    """Makes the mesh over all devices (or `devices`), in the order jax finds best for the topology.

    If the devices are several TPU slices, joined by the data centre's network, dp runs over slices first, then fsdp;
    cp, ep and tp stay inside a slice. GPUs come in the order of their hosts: tp, the innermost axis, and around it ep,
    then cp join neighbours.

    mesh_config: has the sizes of AXES, -1 for the rest of the devices, as `mesh_shape` reads them.

    Raises ConfigError as `mesh_shape` does, and where cp, ep or tp would have to cross slices.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(mesh_config, len(devices))
    kinds = (AxisType.Auto,) * len(AXES)
    slices = len({getattr(d, "slice_index", 0) for d in devices})
    if slices == 1:
        try:
            return jax.make_mesh(shape, AXES, axis_types=kinds, devices=devices)
        except NotImplementedError:  # an axis of the mesh is only a part of one of the TPU's torus
            order = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
            return Mesh(order, AXES, axis_types=kinds)
    dp, fsdp, *inner = shape
    across_dp = math.gcd(dp, slices)
    across_fsdp = slices // across_dp
    if fsdp % across_fsdp:
        sizes = ", ".join(f"mesh.{a}={n}" for a, n in zip(AXES, shape, strict=True))
        raise ConfigError(f"{sizes}: the devices are {slices} slices, which cp, ep and tp cannot cross; make mesh.dp a "
                          f"multiple of {slices}")
    inside = (dp // across_dp, fsdp // across_fsdp, *inner)
    order = mesh_utils.create_hybrid_device_mesh(inside, (across_dp, across_fsdp, *(1 for _ in inner)), devices)
    return Mesh(order, AXES, axis_types=kinds)


def row_parts(mesh_config) -> int:
    """Returns the number of equal parts rows are cut into: the least common multiple of mesh.cp of the policy and of
    the cp that mesh.roles gives to reference, critic and teacher. None of them may be -1 (resolve.checks refuses it).
    """
    roles = mesh_config.roles
    policy = roles.get("policy", {}).get("cp", mesh_config.cp)
    theirs = (roles.get(role, {}).get("cp", 1) for role in ("reference", "critic", "teacher"))
    return math.lcm(policy, *theirs)


def check_experts(ep: int, experts: int, name: str = "mesh.ep") -> None:
    """Raises ConfigError where a model's number of experts (0: it has none) cannot be split over `ep` devices: `ep`
    must divide it, and be 1 without experts. name: of the option, for the message.
    """
    if ep > 1 and not experts:
        raise ConfigError(f"{name}={ep}: the model has no experts to split; leave it at 1 and raise mesh.fsdp instead")
    if experts % max(1, ep):
        fit = [n for n in range(1, experts + 1) if experts % n == 0]
        raise ConfigError(f"{name}={ep} does not divide the model's {experts} experts; choose one of "
                          f"{', '.join(map(str, fit))}, and give the other devices to mesh.fsdp")


def check_recurrent(sizes, heads: int, where: str = "mesh") -> None:
    """Raises ConfigError where a mesh of these sizes, by axis, cannot split recurrent layers: cp times tp must divide
    `heads`.

    heads: their key heads, of which the value heads are a multiple, or these where one key head serves all; 0: the
    model has no such layers, and nothing is refused. where: of the mesh, for the message.
    """
    if not heads:
        return
    if heads % (sizes["cp"] * sizes["tp"]):
        fit = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        which, of = (f"{where}.tp={sizes['tp']}", "it") if sizes["cp"] == 1 else (
            f"{where}.cp={sizes['cp']} times {where}.tp={sizes['tp']}", "their product")
        raise ConfigError(f"{which} does not divide the model's {heads} heads of recurrent layers; make {of} one "
                          f"of {fit}, and give the other devices to {where}.fsdp")


def indices(text: str, count: int, what: str = "device", of: str = "a process has") -> list[int]:
    """Parses numbers of devices or processes in mesh.roles.<role>: "all", or ranges such as "0-3,6" (last one
    included).

    count: how many there are. what, of: words for messages.

    Raises ValueError for text that is neither, for a range that ends before it begins, for a number that occurs twice,
    and for numbers beyond `count`.
    """
    if text == "all":
        return list(range(count))
    out = []
    for part in text.split(","):
        found = RANGE.fullmatch(part.strip())
        if not found:
            raise ValueError('is neither "all" nor ranges such as "0-3,6"')
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ValueError(f'has a range that ends before it begins, "{part.strip()}"; write "{last}-{first}"')
        if last >= count:
            raise ValueError(f"names {what} {last}, but {of} {count}, from 0 to {count - 1}")
        out += range(first, last + 1)
    if len(set(out)) < len(out):
        raise ValueError(f"names a {what} twice")
    return out


def role_meshes(mesh_config, devices=None) -> dict[str, Mesh]:
    """Returns {role: mesh}; roles to which mesh.roles gives no sizes, devices or processes share the policy's mesh
    object.

    A role has the same slice of the devices of every process, or of some processes. Axes that an entry leaves out are
    1, but fsdp, which takes the devices that the others leave (1 if another axis is -1); the policy's entry leaves out
    none, since mesh's own sizes stand there.

    Raises ConfigError for devices or processes that do not exist, and for sizes that do not fit them.
    """
    devices = jax.devices() if devices is None else devices
    meshes = {}
    for role in ROLES:
        options = mesh_config.roles.get(role, {})
        sizes = {a: options[a] for a in AXES if a in options}
        if role == "policy":
            sizes = {a: mesh_config[a] for a in AXES} | sizes
        elif not sizes and not {"devices", "processes"} & set(options):
            meshes[role] = meshes["policy"]
            continue
        rest = 1 if -1 in sizes.values() else -1
        mine = _slice_of(devices, role, options)
        try:
            meshes[role] = make_mesh(SimpleNamespace(**{"fsdp": rest, **sizes}), mine)
        except ConfigError as e:
            raise ConfigError(f"mesh.roles.{role} on {len(mine)} of {len(devices)} devices: {e}") from None
    return meshes


def _slice_of(devices, role: str, options):
    by_process: dict[int, list] = {}
    for d in devices:
        by_process.setdefault(d.process_index, []).append(d)
    key = "processes"
    try:
        some = indices(options.get(key, "all"), len(by_process), "process", "the job has")
        some, key = [list(by_process.values())[i] for i in some], "devices"
        return [own[i] for own in some for i in indices(options.get(key, "all"), len(own))]
    except ValueError as e:
        raise ConfigError(f"mesh.roles.{role}.{key}={options[key]!r} {e}") from None


def processes_of(mesh: Mesh) -> list[int]:
    """Returns the sorted numbers of the processes that have devices of a mesh."""
    return sorted({d.process_index for d in mesh.devices.flat})


def data_shards(mesh: Mesh) -> int:
    """Returns the number of shards a batch's rows are split into (dp x fsdp x ep)."""
    return math.prod(mesh.shape[a] for a in DATA_AXES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns a batch's sharding: rows over dp x fsdp x ep, tokens or loss slots (axis 1) over cp, the rest whole."""
    return NamedSharding(mesh, P(DATA_AXES, "cp") if mesh.shape["cp"] > 1 else P(DATA_AXES))


def rollout_mesh(mesh: Mesh) -> Mesh:
    """Returns the mesh of the same devices, in the same order, for the embedded sampler: cp becomes a part of fsdp. It
    is `mesh` itself where cp is 1.

    Rows are not split over cp there. Weights keep their placement, since the rollout layout splits them over neither.
    """
    if mesh.shape["cp"] == 1:
        return mesh
    shape = rollout_shape(dict(mesh.shape))
    return Mesh(mesh.devices.reshape([shape[a] for a in AXES]), AXES, axis_types=mesh.axis_types)


def rollout_shape(sizes: dict) -> dict:
    """Returns the axis sizes of `rollout_mesh` for those of the training mesh."""
    return {**sizes, "fsdp": sizes["fsdp"] * sizes["cp"], "cp": 1}


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that keeps an array whole on every device of a mesh."""
    return NamedSharding(mesh, P())
