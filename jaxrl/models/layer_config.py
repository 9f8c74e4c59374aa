"""The layers of a model, with mixer, window, feed-forward, norms and rotary embedding of each, from an HF config."""

from __future__ import annotations

import dataclasses

from jaxrl.errors import ConfigError
from jaxrl.models.families import number
from jaxrl.models.rope import Rope
from jaxrl.models.rope_config import ropes

BESIDE = "falcon_h1"  # a recurrence and attention side by side
RECURRENT = ("gated_delta", "gated_delta_by_head", "mamba2", "nemotron_mamba2", BESIDE)  # mixers that carry a state
DENSE = ("mlp", "falcon_mlp", "granite_mlp", "nemotron_mlp", "none")  # feed-forwards without experts


@dataclasses.dataclass(frozen=True)
class Layer:
    """The fields that differ between the layers of one model: rotary embedding, window in positions, and by name mixer,
    feed-forward and norms.
    """

    rope: Rope | None  # None = it does not see positions
    window: int = 0  # positions a token sees, itself included; 0 = all
    mixer: str = "attention"   # rows of models.decoder.MIXERS and FEED_FORWARDS
    feed_forward: str = "mlp"
    norms: str = "pre"         # row of models.parameters.NORMS

    @property
    def recurs(self) -> bool:
        """Whether its mixer carries a state from token to token."""
        return self.mixer in RECURRENT

    @property
    def attends(self) -> bool:
        """Whether its mixer has keys and values."""
        return self.mixer == BESIDE or self.mixer not in (*RECURRENT, "none")

    @property
    def has_experts(self) -> bool:
        """Whether its feed-forward has experts."""
        return self.feed_forward not in DENSE


def layers_of(hf, family) -> tuple[Layer, ...]:
    """Returns the layers of a config, in order. hf: HF config with the family's defaults. family: families.Family.

    Raises ConfigError naming a field that is malformed or contradicts another.
    """
    if family.one_part:
        listed = listed_parts(hf)
        if "moe" in listed:
            _feed_forwards(hf, family)  # which checks the sizes of experts
        return tuple(_PARTS[kind] for kind in listed)
    kinds = _feed_forwards(hf, family)
    if family.recurrent:
        turns = not family.may_turn or hf.get("position_embedding_type") == "rope"
        rope, attention = ropes(hf, family)[0] if turns else None, "attention" if family.is_mamba else "gated_attention"
        return tuple(Layer(rope, 0, attention if full else family.recurrent, kind, family.norms)
                     for full, kind in zip(_full(hf, family), kinds, strict=True))
    sliding, window = _windows(hf, family)
    full, local = ropes(hf, family)
    mixer, turning = "latent_attention" if family.latent else "attention", _turning(hf, family)
    return tuple(Layer((local if windowed else full) if turns else None, window * windowed, mixer, kind, family.norms)
                 for windowed, turns, kind in zip(sliding, turning, kinds, strict=True))


_PARTS = {  # layers of one part, which see no positions; by transformers' name and by the letter of a pattern
    "linear_attention": Layer(None, mixer="nemotron_mamba2", feed_forward="none", norms="mixer"),
    "full_attention": Layer(None, mixer="nemotron_attention", feed_forward="none", norms="mixer"),
    "moe": Layer(None, mixer="none", feed_forward="nemotron_experts", norms="feed_forward"),
    "mlp": Layer(None, mixer="none", feed_forward="nemotron_mlp", norms="feed_forward")}
_LETTERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
_OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


def listed_parts(hf) -> list[str]:
    """Returns what each layer of a model whose layers are one part is, from `layers_block_type` (or `layer_types`) or
    `hybrid_override_pattern`: linear_attention, full_attention, moe or mlp.

    hf: HF config. Raises ConfigError for other names and letters, for no list, and for lists of another length than
    num_hidden_layers.
    """
    pattern = "hybrid_override_pattern"
    key = next((key for key in ("layers_block_type", "layer_types") if hf.get(key) is not None), pattern)
    given, known = hf.get(key), _LETTERS if key == pattern else {**_OLD_NAMES, **dict.fromkeys(_PARTS)}
    wanted = str if known is _LETTERS else list | tuple
    if not isinstance(given, wanted) or not given or set(given) - known.keys():
        raise ConfigError(f"model config: {key}={given!r}; give one of {', '.join(known)} for each layer")
    if hf.get("num_hidden_layers") not in (None, len(given)):
        raise ConfigError(f"model config: num_hidden_layers={hf['num_hidden_layers']!r}, but {key} has {len(given)} "
                          "layers; leave num_hidden_layers out")
    return [known[kind] or kind for kind in given]


def _turning(hf, family) -> list[bool]:
    """Returns which layers have a rotary embedding."""
    count, given = hf["num_hidden_layers"], hf.get("no_rope_layers") if family.no_rope else None
    if not family.no_rope:
        return [True] * count
    if given is None:
        every = number(hf, "no_rope_layer_interval", least=1, kind=int)
        return [(i + 1) % every != 0 for i in range(count)]
    if not isinstance(given, list | tuple) or len(given) != count or set(given) - {0, 1}:
        raise ConfigError(f"model config: no_rope_layers={given!r}; give {count} entries, each 1 (a layer with rotary "
                          "embedding) or 0")
    return [bool(turns) for turns in given]


def _full(hf, family) -> list[bool]:
    """Returns which layers of a model with recurrent ones have attention: by `layer_types`, an interval, or none."""
    count, kinds = hf["num_hidden_layers"], hf.get("layer_types")
    if family.is_mamba:
        kinds = hf.get("layers_block_type") if kinds is None else kinds
        kinds = [_OLD_NAMES.get(kind, kind) for kind in kinds] if isinstance(kinds, list | tuple) else kinds
        kinds = ["linear_attention"] * count if kinds is None else kinds
    if kinds is None:
        every = number(hf, "full_attention_interval", least=1, kind=int)
        return [(i + 1) % every == 0 for i in range(count)]
    known = {"full_attention", "linear_attention"}
    if not isinstance(kinds, list | tuple) or len(kinds) != count or set(kinds) - known:
        raise ConfigError(f"model config: layer_types={kinds!r}; give {count} entries, each full_attention or "
                          "linear_attention")
    return [kind == "full_attention" for kind in kinds]


def prefix_of(layers) -> int:
    """Returns the number of first layers outside the repetition: dense ones before the first expert layer, if the
    others then have a shorter period.
    """
    dense = next((i for i, layer in enumerate(layers) if layer.has_experts), 0)
    period = lambda rest: next((n for n in range(1, len(rest)) if all(  # noqa: E731
        layer == rest[i % n] for i, layer in enumerate(rest))), len(rest))
    return dense if period(layers[dense:]) < period(layers) else 0


def expert_count(hf, family) -> int:
    """Returns the number of experts; both of its names are in use, and transformers itself writes either.

    hf: HF config without defaults. family: families.Family, whose default holds where neither name is given. Raises
    ConfigError where the two differ.
    """
    own = family.experts_count
    found = {key: hf[key] for key in (own, "num_local_experts") if hf.get(key) is not None}
    if len(set(found.values())) > 1:
        raise ConfigError(f"model config: {own}={found[own]!r} beside num_local_experts="
                          f"{found['num_local_experts']!r}; leave one of them out")
    return next(iter(found.values()), family.defaults[own])


def _feed_forwards(hf, family) -> list[str]:
    """Returns which layers are dense and which have experts, from the fields that the family uses."""
    layers = hf["num_hidden_layers"]
    if not family.expert_size:
        return [family.feed_forward] * layers
    for key in filter(None, (family.expert_size, family.shared_expert_size, family.shared_experts)):
        number(hf, key, least=1, kind=int)
    name = family.experts_count
    experts = number(hf, name, least=0, kind=int)
    chosen = number(hf, "num_experts_per_tok", least=0 if family.dense and not experts else 1, kind=int)
    step = number(hf, "decoder_sparse_step", least=1, kind=int) if "decoder_sparse_step" in family.defaults else 1
    dense = hf.get("mlp_only_layers") or [] if "mlp_only_layers" in family.defaults else []
    first = number(hf, family.dense_first, least=0, kind=int) if family.dense_first else 0
    dense = _listed_dense(hf, family, layers) if family.listed_kinds else dense
    if not isinstance(dense, list | tuple) or not all(type(i) is int for i in dense):
        raise ConfigError(f"model config: mlp_only_layers={dense!r}; give a list of layers' numbers from 0")
    kinds = [family.feed_forward if experts and i >= first and i not in dense and (i + 1) % step == 0 else
             family.dense or "mlp" for i in range(layers)]
    if "decoder_sparse_step" not in family.defaults and not experts and not family.dense:
        raise ConfigError(f"model config: {name}=0, but a {hf['model_type']} model has nothing beside experts")
    if experts and chosen > experts:
        raise ConfigError(f"model config: num_experts_per_tok={chosen} is more than {name}={experts}")
    if family.router == "sigmoid" and "n_group" in family.defaults:
        _check_groups(hf, experts, chosen)
    return kinds


def _listed_dense(hf, family, layers: int) -> list[int]:
    """Returns the layers that a list names as dense; without a list, the first one. It
    has precedence over `first_k_dense_replace`.
    """
    kinds = hf.get(family.listed_kinds) or ["dense"] + ["sparse"] * (layers - 1)
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        raise ConfigError(f"model config: {family.listed_kinds}={kinds!r}; give {layers} entries, each dense or sparse")
    dense = [i for i, kind in enumerate(kinds) if kind == "dense"]
    if (first := hf.get("first_k_dense_replace")) is not None and dense != list(range(layers))[:first]:
        raise ConfigError(f"model config: first_k_dense_replace={first!r}, but {family.listed_kinds} (left out: the "
                          f"first layer) makes layers {dense} dense, and that is what is read; leave one of them out")
    return dense


def _check_groups(hf, experts: int, chosen: int) -> None:
    groups, taken = (number(hf, key, least=1, kind=int) for key in ("n_group", "topk_group"))
    if experts % groups or experts // groups < 2:
        raise ConfigError(f"model config: n_group={groups} does not cut n_routed_experts={experts} into equal "
                          "groups of two or more")
    if taken > groups or chosen > taken * (experts // groups):
        raise ConfigError(f"model config: topk_group={taken} of n_group={groups} groups of {experts // groups} "
                          f"experts, of which num_experts_per_tok={chosen} are taken; there are not so many")


def _windows(hf, family) -> tuple[list[bool], int]:
    """Returns (which layers have a sliding window, its size): by `layer_types` if given, else by
    the family's older keys.
    """
    count, kinds, window = hf["num_hidden_layers"], hf.get("layer_types"), hf.get("sliding_window")
    if kinds is not None and (not isinstance(kinds, list | tuple) or len(kinds) != count
                              or set(kinds) - {"full_attention", "sliding_attention"}):
        raise ConfigError(f"model config: layer_types={kinds!r}; give {count} entries, each full_attention or "
                          "sliding_attention")
    if family.windows == "none" and window is not None and hf.get("use_sliding_window") is not False:
        raise ConfigError(f"model config: sliding_window={window!r}, but a {hf['model_type']} model has no windows; "
                          "leave it out")
    if family.windows == "none" or (family.windows in ("switched", "from_layer", "alternate", "no_rope")
                                    and not hf["use_sliding_window"]):
        window = None
    listed = [kind == "sliding_attention" for kind in kinds or ()]
    if family.windows in ("none", "all", "switched"):
        sliding = [window is not None] * count
        if listed and listed != sliding:
            raise ConfigError(f"model config: layer_types={kinds!r}: all layers of a {hf['model_type']} model are "
                              f"alike, here {'sliding' if sliding[0] else 'full'}_attention; leave it out")
    elif listed:
        sliding = listed
    elif family.windows == "from_layer":
        first = number(hf, "max_window_layers", kind=int)
        sliding = [window is not None and i >= first for i in range(count)]
    elif family.windows == "alternate":
        first = number(hf, "max_window_layers", kind=int)
        sliding = [window is not None and i % 2 == 0 and i < first for i in range(count)]
    elif family.windows == "no_rope":
        sliding = [window is not None and not turns for turns in _turning(hf, family)]
    else:
        sliding = [(i + 1) % _pattern(hf, family) != 0 for i in range(count)]
    if not any(sliding) and family.windows != "pattern":  # whose models ask for a window even where no layer uses it
        return sliding, 0
    if window is None and any(sliding):
        why = "use_sliding_window=False" if hf.get("use_sliding_window") is False else "sliding_window=None"
        raise ConfigError(f"model config: {'layer_types has' if listed else 'the model has'} sliding_attention "
                          f"while {why}; give a window, or make all entries of layer_types full_attention")
    return sliding, number(hf, "sliding_window", least=1, kind=int)


def _pattern(hf, family) -> int:
    """Returns the interval of layers with full attention."""
    every = family.pattern
    if isinstance(every, str):
        return number(hf, every, least=1, kind=int)
    if hf.get("sliding_window_pattern", every) != every:
        raise ConfigError(f"model config: sliding_window_pattern={hf['sliding_window_pattern']!r}: in transformers one "
                          f"of {every} layers of a {hf['model_type']} model has no window, whatever it says; say it "
                          "with layer_types")
    return every
