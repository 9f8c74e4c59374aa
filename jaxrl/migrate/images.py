"""Jobs whose rows hold images: columns, sizes and towers by their names elsewhere, and what such a job is here."""

from __future__ import annotations

import re

from jaxrl.migrate.devices import ranges
from jaxrl.migrate.table import Migration

SQUARES = re.compile(r"gemma-3-(4|12|27)b.*")  # names, in lower case, of checkpoints that see every image as one square
READ = re.compile(rf"qwen(2|2\.5|3)-?vl.*|{SQUARES.pattern}")  # and of all whose tower is read
TOWER = re.compile(
    r"\^?(?:model\\?\.)?(visual|vision_model|vision_tower|multi_modal_projector|vision_projection)(?:\\?\.([a-z]\w*))?"
    r"(?:\\?\.|\.\*|\\?\.\.\*)?\$?"
)
PARTS = {  # of a tower, by transformers' names
    None: "vision/.*",
    "encoder": r"vision/(group|layer)_\d+/.*",
    "embeddings": r"vision/(patch|positions)/.*",
    "blocks": r"vision/(group|layer)_\d+/.*",
    "patch_embed": "vision/patch/.*",
    "pos_embed": "vision/positions/.*",
    "merger": "vision/merger/.*",
    "deepstack_merger_list": r"vision/tap_\d+/.*",
}
BESIDE = "vision/(?!merger/(soft_norm|project)/).*"  # SigLIP, beside which lies Gemma 3's projector
VLLM = "an option of vLLM's servers; jaxrl's own sampler does without"
PREPROCESSING = re.compile(r"rollout\.vllm\.engine_kwargs\.(.*_)?mm_.*")  # of images, by vLLM


def has_tower(path: str) -> bool:
    """Whether jaxrl reads the vision tower of a model, by the name of its checkpoint (the path's last part)."""
    return bool(READ.fullmatch(_name(path)))


def _name(path) -> str:
    return str(path).rstrip("/").rsplit("/", 1)[-1].lower()


def tower(pattern: str) -> str:
    """Returns the pattern of jaxrl's parameters that transformers' name, or a pattern of names, of a vision tower or a
    part of it means; "" for other names."""
    found = TOWER.fullmatch(pattern)
    if found is None:
        return ""
    if found[1].endswith(("projector", "projection")):
        return PARTS["merger"]
    return BESIDE if found[1] == "vision_tower" and not found[2] else PARTS.get(found[2], "")


def frozen(m: Migration, names: list[str], *keys: str) -> None:
    """Sets model.frozen to the parameters that do not train, by prefixes of the source's names. The user is asked to
    name those that are of no vision tower."""
    found = [tower(name) for name in names]
    if unknown := [name for name, pattern in zip(names, found, strict=True) if not pattern]:
        m.needs(f"model.frozen: {', '.join(unknown)}: name these parameters by jaxrl's names (docs/guides/vision.md)")
    if any(found):
        m.set("model.frozen", tuple(dict.fromkeys(pattern for pattern in found if pattern)), *keys)


def pixels(m: Migration, least: str, most: str) -> None:
    """Sets data.image_min_pixels by the key `least` and data.image_max_pixels by the key `most`; null sets nothing."""
    for key, option in ((least, "data.image_min_pixels"), (most, "data.image_max_pixels")):
        if m[key] is not None:
            m.set(option, m.integer(key), key)


def without(m: Migration) -> None:
    """Removes the patterns of a vision tower from model.frozen and model.trainable, of a model whose name and options
    say that it has none. Marks the keys that set such an option inert, or where other patterns stay in it as set
    without these."""
    for option in ("model.frozen", "model.trainable"):
        found, keys = m.options.get(option, ((), ()))
        kept = tuple(p for p in found if not str(p).startswith("vision/"))
        if len(kept) == len(found):
            continue
        if kept:
            m.options[option] = (kept, keys)
        else:
            del m.options[option]
        what = "a tower for images, which the model is read without"
        for key in (k for k in keys if m.given(k)):
            m.mark(key, *(("equivalent", f"but for {what}") if kept else ("inert", what)))


def settle(m: Migration) -> None:
    """Changes the options of a job with images, which its rules have set, to what jaxrl can run.

    A prompt with images is not cut (data.overlong_prompt=truncate_left becomes filter) and a row not split
    (data.overlong_completion=split becomes truncate, which drops its end). vLLM's options of preprocessing are removed,
    and m.image_tokens gets an estimate for a plan. Of Gemma 3 the options of image sizes are removed, and jobs that
    sample (rl, or with a rollout.engine) do so by the embedded sampler. In an environment env.image_tokens is set and
    asked for; a teacher or reward model without a vision tower is asked for.

    data.image_column="" (text alone) changes nothing but that rl and distill jobs of other models than Gemma 3 sample
    by the embedded sampler."""
    recipe = m.options.get("run.recipe", ("rl", ()))[0]
    squares = SQUARES.fullmatch(_name(m.options.get("model.path", ("",))[0]))
    if m.options.get("data.image_column", ("images",))[0] == "":  # text alone
        if recipe in ("rl", "distill") and not squares:
            _sampler(m, "which has this family with its tower alone")
        return
    _of_rows(m)
    for option in [name for name in m.options if PREPROCESSING.fullmatch(name)]:
        for key in m.options.pop(option)[1]:
            m.mark(key, "automatic", "servers get finished patches, and preprocess no image")
    column = m.options.get("data.image_column", ("images",))[0]
    m.image_tokens = m.options.get("data.max_prompt_tokens", (512, ()))[0] * 3 // 4
    if most := m.options.get("data.image_max_pixels", (0, ()))[0]:
        m.image_tokens = max(min(m.image_tokens, most // 28**2), 1)
    if squares:
        _squares(m)
        if recipe == "rl" or "rollout.engine" in m.options:
            _sampler(m, "whose image tokens do not see each other on every device")
    m.facts["images"] = f"column {column}; if no row has an image, the model trains on text alone"
    _seen_by_others(m)
    if any(option.startswith("env.") for option in m.options):
        m.facts["images"] = f"those that the environment shows, and of column {column} where rows have it"
        _in_turns(m)


def _seen_by_others(m: Migration) -> None:
    """Asks for models beside the policy that see the rows' images, where their names say that they have no tower."""
    for option, what in (("teacher.path", "a teacher"), ("reward.model.path", "a reward model")):
        path = m.options.get(option, ("", ()))[0]
        if path and not has_tower(path):
            m.needs(
                f"{option}={path}: {what} of rows with images gets the policy's patches: name one with a tower of the "
                "policy's family and its tokenizer, or leave the images out with data.image_column=''"
            )


def _in_turns(m: Migration) -> None:
    """Gives an episode room for a picture in every turn, as far as its length allows."""
    turns = m.options.get("env.max_turns", (8,))[0]
    prompt, new = (m.options.get(o, (512,))[0] for o in ("data.max_prompt_tokens", "rollout.max_new_tokens"))
    whole = m.options.get("train.max_sequence_tokens", (0,))[0] or prompt + turns * new
    room = max(min(m.image_tokens * turns, whole * 3 // 4), 1)
    m.set("env.image_tokens", room, *m.options.get("env.max_turns", (0, ()))[1])
    m.needs(
        f"env.image_tokens={room}: the most image tokens of an episode, its row's images and those of {turns} turns, "
        "by estimate; an episode that shows more ends as one that is too long: set what yours shows"
    )


def _squares(m: Migration) -> None:
    """A model that sees every image as one square has no sizes of images."""
    for option in ("data.image_min_pixels", "data.image_max_pixels"):
        for key in m.options.pop(option, (None, ()))[1]:
            if m.given(key):
                m.mark(key, "inert", "Gemma 3 sees every image as 896 x 896 pixels, 256 tokens")
    longest = m.options.get("data.max_prompt_tokens", (512, ()))[0]
    m.image_tokens = 256 if longest > 256 else 0  # a plan takes whole images


def _of_rows(m: Migration) -> None:
    """Rows with images are never cut."""
    for option, value, ours, why in (
        ("data.overlong_prompt", "truncate_left", "filter", "a prompt with images is not cut: it is left out"),
        ("data.overlong_completion", "split", "truncate", "a row with images is not split: it loses its end"),
    ):
        found, keys = m.options.get(option, ("", ()))
        if found == value:
            m.options[option] = (ours, keys)
            given = next((k for k in keys if m.given(k)), "")
            if given:
                m.lacks(given, why)
            else:
                m.needs(f"{option}={ours}: {why}")


def _sampler(m: Migration, why: str) -> None:
    """Completions that vLLM is not asked for are drawn by the embedded sampler, on the trainer's devices or on those of
    the servers. why: what of vLLM."""
    o = m.options
    own = [int(n) for row in o.get("rollout.vllm.devices", ((), ()))[0] for n in str(row).split(",")]
    apart, keys = o.get("rollout.placement", ("", ()))
    m.set_again("rollout.engine", "jax")
    for option in [name for name in o if name.startswith("rollout.vllm.") or name in ("rollout.servers",)]:
        for key in o.pop(option)[1]:
            if not any(key in of for _, of in o.values()):
                m.marks.setdefault(key, ("automatic", VLLM))
    m.needs_you = [t for t in m.needs_you if "rollout.servers" not in t and "rollout.vllm." not in t]
    m.different = [t for t in m.different if "sampled by vLLM" not in t]
    m.differs(
        f"completions are sampled by jaxrl's embedded sampler (rollout.engine=jax), not by vLLM, {why}: the same "
        "distribution, other random numbers, and slower"
    )
    if apart == "disaggregated" and own:
        m.set("mesh.roles.sampler", {"devices": ranges(sorted(own))}, *keys)
        return
    if apart == "disaggregated" or m.elsewhere:
        o.pop("rollout.placement", None)
        m.elsewhere = False
    if o.get("rollout.max_staleness", (0, ()))[0]:
        behind = next((k for k in o["rollout.max_staleness"][1] if m.given(k)), "")
        m.lacks(behind or "rollout.max_staleness", "the embedded sampler has no devices of its own in this layout, so "
                "that nothing is sampled ahead: give it some by mesh.roles.sampler")
        for option in ("rollout.max_staleness", "rollout.partial", "rollout.sync_every"):
            o.pop(option, None)
