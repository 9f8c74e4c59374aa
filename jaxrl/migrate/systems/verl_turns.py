"""verl's tools and interactions of several turns: a joint rule of its table. See systems/verl.py."""

from __future__ import annotations

from jaxrl.migrate import episodes
from jaxrl.migrate.source import switch
from jaxrl.migrate.systems.verl_engine import ROLLOUT
from jaxrl.migrate.table import Key, Migration

T = ROLLOUT + "multi_turn."
ON = {T + "enable": True}
KEYS = (
    Key(T + "enable", "equivalent", default=False, other=True),
    Key(T + "max_assistant_turns", "equivalent", other=4, beside=ON, also=(T + "max_turns",)),
    Key(T + "max_user_turns", "equivalent"),
    Key(T + "tool_config_path", "equivalent"),
    Key(T + "interaction_config_path", "equivalent"),
    Key(T + "format", "equivalent", default="hermes", other="mistral", beside=ON),
    Key(T + "max_parallel_calls", "equivalent", default=1, other=3, beside=ON),
)
PARSERS = {"hermes": "hermes", "llama3_json": "llama", "mistral": "mistral", "qwen": "qwen", "qwen3_coder": "qwen"}


def turns(m: Migration):
    """Adds NAME_env.py, an episode to be written, if multi_turn.enable is on. Sets env.function, max_turns, parser and
    max_parallel_calls, and train.max_sequence_tokens where a prompt and completion are less than all turns may have.

    verl's tools are Python classes named in a YAML: they are quoted in the file, not carried over. An unknown format of
    calls becomes env.parser=auto. Where the source sets keys of the table but not multi_turn.enable, it asks for that.
    """
    if not m.flag(T + "enable"):
        bounds = [
            s.key
            for s in m.singles.values()
            if s.key.startswith(T) and switch(s.value) not in (None, 1, False, "") and s.key != T + "format"
        ]
        if bounds and not m.given(T + "enable"):
            m.needs(
                f"{bounds[0]} is read with multi_turn.enable alone, which this file does not set: if the config that "
                "the "
                f"command names sets it, give {T}enable=True after the file"
            )
        return
    said = [(s.key, s.value) for s in m.singles.values() if s.key.startswith(T)]
    episodes.episode(
        m,
        "verl's tools and interactions",
        said,
        m.integer(T + "max_assistant_turns"),
        T + "enable",
        T + "max_assistant_turns",
    )
    m.set("env.parser", PARSERS.get(m.text(T + "format"), "auto"), T + "format")
    m.set("env.max_parallel_calls", m.integer(T + "max_parallel_calls"), T + "max_parallel_calls")
    both = m.options["data.max_prompt_tokens"][0] + m.options["rollout.max_new_tokens"][0]  # of all turns there
    episodes.longest(m, both, T + "enable")
    for name in ("tool_config_path", "interaction_config_path", "max_user_turns"):
        if m.given(T + name) and m[T + name] is not None:
            m.mark(T + name, "ask", "written into the stub of the episode")
