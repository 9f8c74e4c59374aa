"""Loading a config: files, flags and values of the options in `schema`.

`default_config()` is the whole schema as a locked `ConfigDict`; a config file under `configs/` changes what it needs in
`get_config(arg)`; `--config.group.option=value` changes it again on the command line.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from ml_collections import config_dict

from jaxrl.config.option import Option
from jaxrl.config.schema import SCHEMA, element_kind, free_tables, options
from jaxrl.config.suggest import not_yet, unknown_flag, unknown_option
from jaxrl.errors import ConfigError, type_of

PACKAGE = Path(__file__).parents[1]
FOLDERS = (PACKAGE / "configs", PACKAGE.parent / "configs")  # of shipped configs: installed, in a checkout

if TYPE_CHECKING:
    from jaxrl.config.typed import Config
else:
    Config = config_dict.ConfigDict


def _build(tree: dict) -> Any:
    out = config_dict.ConfigDict()
    for name, node in tree.items():
        if isinstance(node, Option):
            if node.default is None:
                out[name] = config_dict.placeholder(node.kind)
            elif isinstance(node.default, dict):
                out[name] = config_dict.ConfigDict(node.default)
            else:
                out[name] = node.default
        else:
            out[name] = _build(node)
    return out


def default_config() -> Config:
    """Returns the whole schema at its defaults, locked except `user` and the free-form tables (`model.config`, ...)."""
    cfg = _build(SCHEMA)
    cfg.lock()
    for path in free_tables():
        get(cfg, path).unlock()
    return cfg


def editable(config) -> Config:
    """Returns a copy of a config, or of a Spec's decided options, that may be changed."""
    copied: Any = config_dict.ConfigDict(getattr(config, "options", config))
    return copied.copy_and_resolve_references()


def frozen(config) -> config_dict.FrozenConfigDict:
    """Returns an immutable copy of a config, with tuples in the place of lists."""
    config = editable(config)
    _replace_empty_lists(config)
    return config_dict.FrozenConfigDict(config)


def _replace_empty_lists(node) -> None:
    """Puts empty tuples in the place of a table's empty lists: FrozenConfigDict fails for a list that becomes a tuple
    it has met before, as there is only one empty tuple."""
    def without(value):
        return (type(value)(map(without, value)) if value else ()) if isinstance(value, (list, tuple)) else value

    for value in node.values():
        if isinstance(value, config_dict.ConfigDict):
            _replace_empty_lists(value)
    entries = {name: without(value) for name, value in node.items()}
    if any(isinstance(value, list) and entries[name] != value for name, value in node.items()):
        with node.unlocked():
            for name in entries:  # else a tuple would become the list that was there
                del node[name]
            node.update(entries)


def get(cfg, dotted: str):
    """Returns the value of an option by dotted name. Raises KeyError for an unknown one."""
    for part in dotted.split("."):
        cfg = cfg[part]
    return cfg


def put(cfg, dotted: str, value) -> None:
    """Sets a dotted option; {} for a table of options sets all of them to their defaults.

    A text for a list is split at commas (entries stay text), any other single value becomes a list of one, an int for
    a float is converted. Raises ConfigError for an unknown name, naming the nearest known one, and for a value of
    another type; None passes for any. Whether an option may be None, choices, bounds, the
    entries of lists and what a free table holds are checked later (resolve.checks).
    """
    if value == {} and (below := _below(dotted)):
        for name in below:
            put(cfg, name, options()[name].default)
        return
    *groups, leaf = dotted.split(".")
    known = options()
    table = next((t for t in free_tables() if dotted.startswith(t + ".")), None)
    if table is None and dotted not in known:
        raise ConfigError(unknown_option(dotted))
    node = cfg
    for part in groups:
        if table is not None and part not in node:
            node[part] = config_dict.ConfigDict()
        node = node[part]
    if table is not None:
        with node.ignore_type():  # a table says nothing of kinds: 1 may become 0.5
            node[leaf] = value
        return
    try:
        node[leaf] = _coerce(dotted, value, known[dotted])
    except (TypeError, ValueError, OverflowError) as e:
        raise ConfigError(f"{dotted}={value!r}: {e}") from None


def _below(table: str) -> list[str]:
    """Returns the options in a table; [] where it is an option itself, or unknown."""
    return [] if table in options() else [name for name in options() if name.startswith(f"{table}.")]


def _coerce(name: str, value, opt: Option):
    kind = opt.kind or type(opt.default)
    if isinstance(opt.default, tuple):
        if isinstance(value, str):
            value = tuple(v for v in value.split(",") if v)
        return tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
        remedy = f"; write {{'key': value}}, or --config.{name}.key=value for one entry" if kind is dict else ""
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}{remedy}")
    return value


def find_config(spec: str) -> tuple[Path, str | None]:
    """Converts 'configs/grpo.py:tiny' or 'grpo:tiny' to (path, 'tiny'); without ':' the second is None.

    A name that is no file here is looked up among the shipped configs, a path by its last part. Raises ConfigError,
    with the nearest name, if there is no such file.
    """
    name, _, arg = spec.partition(":")
    stem = name if name.endswith(".py") else name + ".py"
    for path in (Path(name), *(folder / Path(stem).name for folder in FOLDERS)):
        if path.is_file():
            return path, arg or None
    near = difflib.get_close_matches(Path(stem).stem, shipped_configs(), n=1)
    preset = name in (options()["algorithm.preset"].choices or ())
    hint = f"{name} is a preset: algorithm.preset={name}" if preset else not_yet(name)
    hint = hint or near and f"did you mean --config={near[0]}{':' if arg else ''}{arg}?"
    hint = f"; {hint}" if hint else ""
    raise ConfigError(f"--config={spec}: no such file; shipped configs: {', '.join(shipped_configs())}{hint}")


def shipped_configs() -> list[str]:
    """Returns the names of the configs that ship with jaxrl."""
    return sorted({path.stem for folder in FOLDERS for path in folder.glob("*.py")})


def _is_config(value) -> TypeGuard[Config]:
    return isinstance(value, config_dict.ConfigDict) and set(value) == set(SCHEMA)


def load_config(spec: str, overrides: dict[str, Any] | None = None) -> Config:
    """Loads `get_config(arg)` from a config file and applies dotted overrides, e.g. {"optimizer.lr": 1e-5}.

    `spec` is a path or the bare name of a shipped config, optionally with ':arg', or a run's config.json. An empty
    `run.dir` becomes `runs/<file name>`, with _<arg> if there is one. The file is executed.

    Raises ConfigError for a file that is missing, fails, or has no get_config that returns a changed default_config(),
    and for overrides that no option takes.
    """
    if spec.endswith("config.json"):
        return recorded_config(spec, overrides or {})
    path, arg = find_config(spec)
    module_spec = importlib.util.spec_from_file_location(f"jaxrl_config_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"--config={spec}: {path} is no Python file; give one with get_config(arg), as "
                          "configs/grpo.py, or the config.json of a run")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as e:  # it is the user's code: anything may go wrong in it
        raise ConfigError(f"--config={spec}: {path} cannot be loaded: {_failure(e, path)}") from e
    if not hasattr(module, "get_config"):
        raise ConfigError(f"--config={spec}: {path} defines no get_config(arg); see configs/grpo.py for one")
    try:
        cfg = module.get_config(arg)
    except Exception as e:
        raise ConfigError(f"--config={spec}: get_config({arg!r}) failed: {_failure(e, path)}") from e
    if not _is_config(cfg):
        raise ConfigError(
            f"--config={spec}: get_config({arg!r}) must return jaxrl.default_config() with changes, not"
            f" {type(cfg).__name__}"
        )
    for name, value in (overrides or {}).items():
        put(cfg, name, value)
    if not cfg.run.dir:
        cfg.run.dir = f"runs/{path.stem}" + (f"_{arg}" if arg else "")
    return cfg


def recorded_config(path: str, overrides: dict[str, Any]) -> Config:
    """Returns the config of a run, from the config.json in its directory (without secrets), with dotted overrides.

    Options that the file lacks have their defaults. Raises ConfigError for a file that is no run's, or has options that
    this version lacks.
    """
    try:
        config = json.loads(Path(path).read_text("utf-8"))["config"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"--config={path}: no config.json of a run ({type(e).__name__}: {e})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--config={path}: no config.json of a run (its config is {type_of(config)}, not a table)")
    cfg = default_config()
    for name, value in [*_by_name(config), *overrides.items()]:
        put(cfg, name, value)
    return cfg


def config_of(config) -> Config:
    """Returns an editable config from a ConfigDict, the name of a config, options by name on top of the defaults, or
    None (the defaults).

    A ConfigDict is copied, also a frozen one; options may be dotted or nested. Raises ConfigError for other types, for
    what `put` refuses, and for a name as load_config does.
    """
    if isinstance(config, str | Path):
        return load_config(str(config))
    if isinstance(config, config_dict.FrozenConfigDict):
        return editable(config)
    if isinstance(config, config_dict.ConfigDict):
        copied: Any = config.copy_and_resolve_references()
        return copied
    if not isinstance(config, dict | None):
        raise ConfigError(f"config is {type_of(config)}: expected the name of a config, options by name, or a "
                          "ConfigDict")
    cfg = default_config()
    for name, value in _by_name(config or {}):
        put(cfg, name, value)
    return cfg


def _by_name(table: dict, prefix: str = ""):
    """Yields (dotted name, value) of {"optimizer.lr": 1} and {"optimizer": {"lr": 1}}."""
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and (name == "user" or any(option.startswith(f"{name}.") for option in options())):
            yield from _by_name(value, name + ".")
        else:
            yield name, value


def _failure(error: Exception, path: Path) -> str:
    """Returns the error of a config file and its line in the file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} (line {error.lineno})"
    where = f" (line {lines[-1]})" if lines else ""
    # A locked ConfigDict says what it lacks, or what it cannot cast, beside a dump of all it holds.
    lacks = re.search(r'Key "(\w+)" does not exist|^"\'(\w+)\'"$', str(error))
    if lacks and isinstance(error, AttributeError):
        return unknown_option(lacks[1] or lacks[2]) + where
    cast = re.search(r"field '(\w+)'.*?\. (.*) is of original type <class '(\w+)'>.* type <class '([\w.]+)'>",
                     str(error), re.S)
    if cast and isinstance(error, TypeError):
        leaf, value, got, kind = cast[1], cast[2], cast[3], cast[4].rpartition(".")[2]
        names = [n for n, o in options().items()
                 if n.endswith(f".{leaf}") and (o.kind or type(o.default)).__name__ == kind]
        remedy = f"; write ({value!r},)" if (kind, got) == ("tuple", "str") else ""
        return f"{' or '.join(names) or leaf}={value}: expected {kind}, got {got}{remedy}{where}"
    return f"{type(error).__name__}: {error}{where}"


def parse_flags(argv: list[str]) -> tuple[str | None, dict[str, Any]]:
    """Parses ['--config=FILE', '--config.optimizer.lr=1e-5', ...]; returns (FILE, {'optimizer.lr': 1e-5}).

    FILE is None without --config. Values are read by the option's type, and may be the next argument. Raises
    ConfigError on anything else, with the right flag in the message.
    """
    spec, overrides, args = None, {}, list(argv)
    while args:
        arg = args.pop(0)
        name, eq, text = arg.partition("=")
        if name != "--config" and not name.startswith("--config."):
            if arg.partition(":")[0].endswith(".py") or arg.partition(":")[0] in shipped_configs():
                raise ConfigError(f"{arg}: a config is given as --config={arg}")
            raise ConfigError(unknown_flag(name, eq + text))
        if not eq:
            if not args:
                raise ConfigError(f"{name}: a value is missing")
            text = args.pop(0)
        if name == "--config":
            spec = text
        else:
            dotted = name[len("--config."):]
            overrides[dotted] = parse_value(dotted, text)
    return spec, overrides


def parse_value(dotted: str, text: str):
    """Reads the text of a flag as the type the option has; free tables take Python literals, else text.

    Lists are written a,b or as a Python literal; None (none, null) is None where that is the default; {} for a group
    of options is {}. Raises ConfigError for an unknown option and for other text.
    """
    opt = options().get(dotted)
    if opt is None:
        if text == "{}" and _below(dotted):
            return {}
        if not any(dotted.startswith(t + ".") for t in free_tables()):
            raise ConfigError(unknown_option(dotted))
        return _literal(text)
    kind = opt.kind or type(opt.default)
    try:
        if isinstance(opt.default, tuple):
            kind = element_kind(dotted)
            return _parse_list(text, kind)
        if text in ("None", "none", "null") and opt.default is None:
            return None
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return kind(text) if kind in (int, float, str) else _literal(text)
    except (ValueError, KeyError):
        wanted = f"a list of {kind.__name__}" if isinstance(opt.default, tuple) else kind.__name__
        raise ConfigError(f"--config.{dotted}={text}: expected {wanted}; {opt.doc}") from None


def _parse_list(text: str, kind: type) -> tuple:
    """Parses 'a,b', "('a', 'b')", "'a,b'" (one entry) or '3' as a tuple. Raises ValueError for text
    where numbers are expected.
    """
    value = _literal(text)
    if text[:1] in ("(", "[") or (isinstance(value, tuple) and all(isinstance(v, str) for v in value)):
        return tuple(value) if isinstance(value, tuple | list) else (value,)
    if isinstance(value, str) and value != text:  # it was quoted
        return (value,)
    return tuple(kind(v) for v in text.split(",") if v)


def _literal(text: str):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# Names whose value is a secret, in words joined by "_" (so that hyphens, dots and capitals count as joints); and among
# them names of harmless things: special tokens, columns and options of data, parts of a mapping.
_SECRET = re.compile(r"(^|_)(token|pass(word|wd|phrase)?|pwd|secrets?|credentials?|authorization|bearer|cookies?|"
                     r"api_?key|apikeys?|keys?_?ids?|key_material|connection_strings?|sas|dsns?)$|"
                     r"(^|_)(password|passwd|passphrase|secret|credential|api_?key|apikey)s?(_|$)|._key$")
_HARMLESS = re.compile(r"(pad|bos|eos|unk|sep|cls|mask|stop|start|end|begin|think|image|audio|video|vision|"
                       r"boi|eoi|boa|eoa|fim|tool|"
                       r"prefix|suffix|middle|special|decoder_start|(.+_)?per|(max|min|balance)(_.+)?|num|last|first|"
                       r"next|new)_token"
                       r"|((data|reward|input|output|main|extra|view|wrist|node)_)*"
                       r"(sort|group|primary|foreign|answer|prompt|label|column|row|cache|dict|index|image|"
                       r"text|data|dataset|metric|score|chosen|rejected|question|response|query|system|tools|"
                       r"enable_thinking|choice|audio|video|source|fn|reward_model|teacher|solution|input|output|"
                       r"caption|camera|state|action|arm|unnorm|count|sum|instance|instance_id|route|selector|"
                       r"reward|public|message|messages|completion|sample|task|id|lookup|map|partition|(.+_)?per)_key")
# Plural keys and tokens are mostly columns and counts: secrets are those of services, and environment variables.
_ISSUED = re.compile(r"(^|_)(api|access|auth|service|server|secret|private|ssh|signing|encryption|client|admin|master|"
                     r"license|hf|hub|huggingface|gh|github|gitlab|wandb|openai|anthropic|tinker|bearer|session|"
                     r"refresh|security|deploy|account|storage|webhook)_(key|token)$")
_COUNTED = re.compile(r"(^|_)(max|min|num|per|new|batched|prompt|completion|stop)_(.+_)?(key|token)$")
# what may stand in any text: URLs with a password or token, headers, name=value, and keys of well-known shapes
_IN_TEXT = (
    (re.compile(r"([a-z][a-z0-9+.-]*://)[^\s/?#@]*:[^\s/?#]*@", re.I), r"\1<redacted>@"),
    (re.compile(r"(https?://)[^\s/?#@]+@", re.I), r"\1<redacted>@"),
    (re.compile(r"\b(authorization[\"']?\s*[:=]\s*[\"']?(?:\w+\s+)?)[^\s\"']+", re.I), r"\1<redacted>"),
    (re.compile(r"\b(bearer\s+)[\w.~+/=-]{16,}", re.I), r"\1<redacted>"),
    (re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|ya29\.|GOCSPX-|tml-)"
                r"[\w-]{16,}"), "<redacted>"),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+"), "<redacted>"),  # a JSON Web Token
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S), "<redacted>"),
    # of signed URLs (Azure, AWS, Google, CloudFront)
    (re.compile(r"([?&](?:sig|signature|x-amz-signature|x-amz-credential|x-amz-security-token|x-goog-signature|"
                r"x-goog-credential|policy|key-pair-id)=)[^&\s\"'#]+", re.I), r"\1<redacted>"),
)
# name=value; a list a,b is one value, a=1,b=2 are two
_NAMED = re.compile(r"([\w-]+)(=)((?:[^\s&;,\"']|,(?!\s|$|[\w.-]+=[^=,\s]))+)")
_QUOTED = re.compile(r"([\"'])([\w.-]+)\1(\s*:\s*)"  # of JSON, of a dict
                     r"(?:\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|[\[(]\s*[\"'][^\])]*[\])])")
_HEADER = re.compile(r"(?m)(?<![\w\"'-])([A-Za-z][\w-]+)(:\s*)([^\s\"',;{}\[\]/]{6,})")  # X-Api-Key: value
_FLAG = re.compile(r"((?<![\w-])--?[A-Za-z][\w-]*)(\s+)([^\s-][^\s]*)")  # --password value


def is_secret(name: str) -> bool:
    """Returns whether a value under this name is a secret: True for `api_key`, `api_keys` or the environment variable
    `MY_KEYS`, False for `pad_token`, `prompt_key` or `missing_keys`.
    """
    words = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()).strip("_")
    if re.search("(key|token)s$", words):
        words = words[:-1]
        if not _ISSUED.search(words) and (not name.isupper() or _COUNTED.search(words)):
            return False
    return bool(_SECRET.search(words)) and not _HARMLESS.fullmatch(words)


def redacted_text(text: str, prose: bool = False) -> str:
    """Returns a text with `<redacted>` in place of what looks like a secret.

    prose: sentences of jaxrl's own about keys, in which `my_key: words` is no header.
    """
    for pattern, instead in _IN_TEXT:
        text = pattern.sub(instead, text)
    text = _QUOTED.sub(lambda m: f"{m[1]}{m[2]}{m[1]}{m[3]}{m[1]}<redacted>{m[1]}" if is_secret(m[2]) else m[0], text)
    for pattern in (_FLAG,) if prose else (_HEADER, _FLAG):
        text = pattern.sub(lambda m: f"{m[1]}{m[2]}<redacted>" if is_secret(m[1]) else m[0], text)
    return _NAMED.sub(lambda m: f"{m[1]}=<redacted>" if is_secret(m[1]) else m[0], text)


def redacted(cfg) -> dict:
    """Returns the config as plain dicts without secrets: values under secret-looking names, and secret-looking
    parts of any text.
    """
    return redacted_tree(json.loads(cfg.to_json_best_effort()))


def redacted_tree(node, prose: bool = False) -> Any:
    """Returns plain data, nested as it is, without secrets.

    In tables values under secret-looking names are hidden, in lists the entry after a flag of such a name (--api-key),
    and in any text what `redacted_text` finds (prose: see there). None, "" and booleans stay.
    """

    def hidden(node):
        if isinstance(node, dict):
            return {k: hidden(v) for k, v in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(hidden(v) for v in node)
        return node if node is None or node == "" or isinstance(node, bool) else "<redacted>"

    if isinstance(node, dict):
        return {k: hidden(v) if is_secret(str(k)) else redacted_tree(v, prose) for k, v in node.items()}
    if isinstance(node, list | tuple):  # of a command line: --api-key, its value
        flags = [None, *node[:-1]]
        after = [isinstance(f, str) and f.startswith("-") and "=" not in f and is_secret(f) for f in flags]
        walked = zip(node, after, strict=False)
        return type(node)(hidden(v) if secret else redacted_tree(v, prose) for v, secret in walked)
    return redacted_text(node, prose) if isinstance(node, str) else node


def flat(table: dict, prefix: str = "") -> dict:
    """Returns dotted name -> value of nested dicts; empty dicts are values. prefix: text before each name."""
    out = {}
    for key, value in table.items():
        if isinstance(value, dict) and value:
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out
