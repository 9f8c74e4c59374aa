"""Objects of Tunix's programs that no single call gives a config: meshes of the roles, models, adapters. Read by `ast`
as keys of the command line; systems/tunix_calls.py names this reader."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxrl.migrate.python_values import Computed
from jaxrl.migrate.systems.tunix_meaning import ACTOR, MODEL

SHAPE, AXES = MODEL + "mesh.shape", MODEL + "mesh.axis_names"
SAMPLERS = "rollout_model_config.mesh."
LORA = ACTOR + "lora_config."
PARSER = "chat_parser_config.type"
Found = Iterator[tuple[str, Any, str]]


def read(nodes: list[ast.AST], known, file: str) -> Found:
    """Yields (key of the command line, value or Computed, place) for what no single call gives a config: meshes,
    models, adapters and chat parsers of a program. known: its names (python_values.Values). file: its name, for the places."""
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    yield from _meshes(calls, known, file)
    yield from _model(nodes, known, file)
    yield from _adapters(nodes, calls, known, file)
    yield from _parsers(calls, known, file)


def _last(node: ast.Call, known) -> str:
    return known.callees(node)[-1]


def _argument(node: ast.Call, at: int, *names: str) -> ast.AST | None:
    given = next((k.value for k in node.keywords if k.arg in names), None)
    return given if given is not None else node.args[at] if len(node.args) > at else None


def _followed(node: ast.AST | None, known) -> ast.AST | None:
    """Returns what a name stands for, where it is assigned once."""
    for _ in range(9):
        found = known.bound(node) if isinstance(node, ast.Name) else []
        if len(found) != 1:
            break
        node = found[0]
    return node


def _text(node: ast.AST | None) -> Computed:
    return Computed("?" if node is None else " ".join(ast.unparse(node).split())[:60])


class Mesh(NamedTuple):
    """A mesh of a program. shape, axes: values, or Computed. devices: its slice of the devices as text ("[4:]"); "" =
    all of them, the first ones first; "?" = not known. line: where it stands."""

    shape: Any
    axes: Any
    devices: str
    line: int


def _meshes(calls, known, file: str) -> Found:
    """The actor's mesh and the sampler's, by ClusterConfig's role_to_mesh; without it the program's one mesh."""
    roles = _roles(calls, known)
    made = [node for node in calls if _last(node, known) in ("make_mesh", "Mesh")]
    actor = roles.get("ACTOR") or (made[0] if len(made) == 1 else None)
    if actor is None:
        if made:
            yield SHAPE, Computed(f"one of {len(made)} meshes"), f"{file}:{made[0].lineno}"
        return
    mine = _mesh(actor, known)
    where = f"{file}:{mine.line}"
    yield SHAPE, mine.shape, where
    yield AXES, mine.axes, where
    other = roles.get("ROLLOUT")
    if other is None:
        return
    theirs = _mesh(other, known)
    where = f"{file}:{theirs.line}"
    if ast.dump(other) == ast.dump(actor) or theirs[:3] == mine[:3] and not isinstance(mine.shape, Computed):
        yield "rollout_model_config.same_mesh_as", "actor", where
        return
    yield SAMPLERS + "shape", theirs.shape, where
    yield SAMPLERS + "axis_names", theirs.axes, where
    yield SAMPLERS + "devices", _places(mine.devices, theirs.devices), where


def _places(mine: str, theirs: str) -> Any:
    """Whether the sampler has chips of its own ("own") or the actor's ("actor"); Computed where the text does not
    say."""
    ends = [("first" if not text or text.startswith("[:") and not text.startswith("[:-") else
             "last" if text.startswith("[") and text.endswith(":]") else "") for text in (mine, theirs)]
    if "" in ends:
        return Computed(f"own or actor, by {theirs or mine},")
    return "own" if ends[0] != ends[1] else "actor"


def _roles(calls, known) -> dict[str, ast.AST]:
    """Returns role -> expression of its mesh, of ClusterConfig(role_to_mesh={Role.ACTOR: ...})."""
    for node in calls:
        found = _followed(_argument(node, 0, "role_to_mesh"), known) if _last(node, known) == "ClusterConfig" else None
        if isinstance(found, ast.Dict):
            pairs = zip(found.keys, found.values, strict=True)
            return {key.attr: value for key, value in pairs if isinstance(key, ast.Attribute)}
    return {}


def _mesh(node: ast.AST, known) -> Mesh:
    call, line = _followed(node, known), getattr(node, "lineno", 1)
    if not isinstance(call, ast.Call) or _last(call, known) not in ("make_mesh", "Mesh"):
        return Mesh(_text(node), _text(node), "", line)
    args = [part for a in call.args for part in (known.parts(a.value) if isinstance(a, ast.Starred) else (a,))]
    call = ast.Call(call.func, args, call.keywords)
    first, axes = _argument(call, 0, "axis_shapes", "devices"), _argument(call, 1, "axis_names")
    devices = _argument(call, 9, "devices")
    if _last(call, known) == "Mesh":
        first, devices = _array(_followed(first, known), known)
    shape = _text(node) if first is None else known.value(first)
    names = _text(node) if axes is None else known.value(axes)
    cut = devices.slice if isinstance(devices, ast.Subscript) else None
    part = f"[{ast.unparse(cut)}]" if isinstance(cut, ast.Slice) else "" if _whole(devices) else "?"
    return Mesh(shape, names, part, line)


def _whole(devices: ast.AST | None) -> bool:
    return devices is None or isinstance(devices, ast.Call) and ast.unparse(devices) == "jax.devices()"


def _array(node: ast.AST | None, known) -> tuple[ast.AST | None, ast.AST | None]:
    """Returns (expression of the shape, that of the devices) of an array of devices."""
    if isinstance(node, ast.Call) and _last(node, known) == "create_device_mesh":
        return _argument(node, 0, "mesh_shape"), _argument(node, 1, "devices")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "reshape":
        shape = node.args[0] if len(node.args) == 1 else ast.Tuple(list(node.args), ast.Load())
        inner = _followed(node.func.value, known)
        inner = inner.args[0] if isinstance(inner, ast.Call) and _last(inner, known) == "array" else inner
        return shape, _followed(inner, known)
    return node, None


def _model(nodes, known, file: str) -> Found:
    """The name of a model's config, ModelConfig.NAME(), and what is assigned to its attributes."""
    configs = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _model_config(node.value):
            configs.add(node.targets[0].id)
        elif isinstance(node, ast.Call) and (name := _model_config(node)):
            yield MODEL + "model_name", name, f"{file}:{node.lineno}"
            for keyword in node.keywords:
                if keyword.arg:
                    yield MODEL + keyword.arg, known.value(keyword.value), f"{file}:{node.lineno}"
    for node in nodes:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if not isinstance(node, ast.Assign) or not isinstance(target, ast.Attribute):
            continue
        if isinstance(target.value, ast.Name) and target.value.id in configs:
            yield MODEL + target.attr, known.value(node.value), f"{file}:{node.lineno}"


def _model_config(node: ast.AST) -> str:
    """Returns NAME of ModelConfig.NAME(), "" of anything else."""
    func = node.func if isinstance(node, ast.Call) else None
    of = ast.unparse(func.value).rpartition(".")[2] if isinstance(func, ast.Attribute) else ""
    return func.attr if isinstance(func, ast.Attribute) and of == "ModelConfig" else ""


def _adapters(nodes, calls, known, file: str) -> Found:
    """Rank, alpha and modules of LoraProvider, where the policy has them or the text does not say that it has none."""
    providers = [node for node in calls if _last(node, known) == "LoraProvider"]
    actors = [_followed(_argument(node, 0, "actor"), known) for node in calls if _last(node, known) == "RLEngine"]
    for node in providers:
        makers = {f.name for f in nodes if isinstance(f, ast.FunctionDef) and any(n is node for n in ast.walk(f))}
        if makers and not any(_last(n, known) in makers for n in calls):
            continue  # in a function that nothing calls
        places = {"rank": _argument(node, 1, "rank"), "alpha": _argument(node, 2, "alpha"),
                  "module_path": _argument(node, 0, "module_path")}
        makers.add("apply_lora_to_model")
        trained = any(isinstance(a, ast.Call) and _last(a, known) in makers for a in actors)
        if not trained:
            where, rank = f"{file}:{node.lineno}", places.pop("rank")
            what = "?" if rank is None else ast.unparse(rank)
            yield LORA + "rank", Computed(f"{what}, if the policy has the adapters of LoraProvider, or 0,"), where
        for name, value in places.items():
            if value is not None:
                yield LORA + name, known.value(value), f"{file}:{getattr(value, 'lineno', node.lineno)}"


def _parsers(calls, known, file: str) -> Found:
    """The class of a learner's chat_parser, where it is the program's own."""
    for node in calls:
        parser = _followed(next((k.value for k in node.keywords if k.arg == "chat_parser"), None), known)
        if isinstance(parser, ast.Call) and (name := _last(parser, known)) in known.bases:
            yield PARSER, name, f"{file}:{parser.lineno}"
