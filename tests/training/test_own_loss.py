"""A policy loss of the user's own: what it does wrong is said before anything is compiled."""

import types

import jax.numpy as jnp
import pytest

from jaxrl.algorithms import Tokens
from jaxrl.errors import ConfigError
from jaxrl.training.objective import applied_policy_loss

RIGHT = "    return -jnp.where(tokens.mask, tokens.logp, 0) * cfg.user.scale, {}"
WRONG = [
    ("    return jnp.mean(tokens.logp), {}", r"the loss has shape \(\) and dtype float32, tokens.logp has \(2, 3\)"),
    ("    return tokens.logp.sum(axis=-1), {}", r"the loss has shape \(2,\)"),
    ("    return tokens.mask, {}", "dtype bool"),
    ("    return -tokens.logp", "it returned .*; expected a loss per token"),
    ("    return -tokens.logp, None", "it returned tuple; expected a loss per token"),
    ("    return -tokens.logpp, {}", r"line 3, 'return -tokens.logpp, {}': AttributeError: .*logpp"),
    ("    return -tokens.logp * cfg.user.missing, {}", "line 3, .*missing.*options of your own are user"),
    ("    return jnp.dot(tokens.logp, tokens.logp), {}", "line 3, .*TypeError"),
]


def applied(tmp_path, body):
    file = tmp_path / f"own_{abs(hash(body))}.py"
    file.write_text("import jax.numpy as jnp\ndef loss(tokens, cfg):\n" + body + "\n")
    ones = jnp.ones((2, 3), jnp.float32)
    tokens = Tokens(ones, ones, ones, None, ones, ones > 0, None, ones, {})
    return applied_policy_loss(tokens, types.SimpleNamespace(policy_loss=f"{file}:loss", user=types.SimpleNamespace(scale=2.0)))


@pytest.mark.parametrize("body, what", WRONG)
def test_what_is_wrong_with_a_loss_is_named(tmp_path, body, what):
    with pytest.raises(ConfigError, match=rf"algorithm.policy_loss=.*own_\d+.py:loss.*{what}"):
        applied(tmp_path, body)


def test_a_loss_per_token_is_taken(tmp_path):
    loss, stats = applied(tmp_path, RIGHT)
    assert loss.shape == (2, 3) and float(loss[0, 0]) == -2.0 and stats == {}
