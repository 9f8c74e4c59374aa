"""How long sequences may be, from the config alone: one completion behind a prompt, or episodes of several turns."""

from __future__ import annotations

from jaxrl.config.registry import recipe_of


def episodes(config) -> bool:
    """Returns whether completions are episodes (env.function, env.program, env.tools, env.mcp)."""
    return bool(config.env.function or config.env.program or config.env.tools or config.env.mcp)


def longest_completion(config, new_tokens: int = 0) -> int:
    """Returns the most tokens after a prompt: of a turn (rollout.max_new_tokens, or `new_tokens` if it is not 0), or of
    all turns of an episode and the observations between them.

    In an episode env.max_sampled_tokens bounds the tokens of the turns, if set, and env.image_tokens are added once for
    the images of all observations.
    """
    turn, env = new_tokens or config.rollout.max_new_tokens, config.env
    if not episodes(config):
        return turn
    sampled = turn * env.max_turns
    observed = (env.max_turns - 1) * env.max_observation_tokens + env.image_tokens
    return min(sampled, env.max_sampled_tokens or sampled) + observed


def longest_sequence(config, new_tokens: int = 0) -> int:
    """Returns the bound on prompt + completion in tokens, and the slot after them if a score is read there.

    It is train.max_sequence_tokens if set, else the sum of the longest prompt and completion. new_tokens: longest turn
    in place of rollout.max_new_tokens (for evaluation); the bound is then the smaller of the two.
    """
    whole = config.data.max_prompt_tokens + longest_completion(config, new_tokens)
    longest = config.train.max_sequence_tokens or whole
    return (min(whole, longest) if new_tokens else longest) + int(recipe_of(config).scores)


def made_of(config) -> str:
    """Returns the options that determine `longest_sequence` with their values, as a sum in text; the slot of a score
    and `new_tokens` are left out."""
    env, name = config.env, "train.max_sequence_tokens"
    if config.train.max_sequence_tokens:
        return f"{name}={config.train.max_sequence_tokens}"
    parts = [f"data.max_prompt_tokens={config.data.max_prompt_tokens}"]
    turn = f"rollout.max_new_tokens={config.rollout.max_new_tokens}"
    if not episodes(config):
        return " + ".join([*parts, turn])
    turns = f"{turn} x env.max_turns={env.max_turns}"
    if env.max_sampled_tokens and env.max_sampled_tokens < config.rollout.max_new_tokens * env.max_turns:
        turns = f"env.max_sampled_tokens={env.max_sampled_tokens}"
    seen = f"env.max_observation_tokens={env.max_observation_tokens} x {env.max_turns - 1}"
    shown = [f"env.image_tokens={env.image_tokens}"] * bool(env.image_tokens)
    return " + ".join([*parts, turns, *([seen] if env.max_turns > 1 else []), *shown])


def longest_prompt(config) -> int:
    """Returns the most tokens before those that a request samples: data.max_prompt_tokens, or in an episode of several
    turns everything before its last one: one token less than the longest sequence (that of evaluation, if longer), at
    most env.max_input_tokens if set, at least the prompt.
    """
    if not episodes(config) or config.env.max_turns == 1:
        return config.data.max_prompt_tokens
    new_tokens = max(config.rollout.max_new_tokens, config.eval.max_new_tokens)
    return max(config.data.max_prompt_tokens, min(longest_sequence(config, new_tokens) - 1,
                                                  config.env.max_input_tokens or 2**31))
