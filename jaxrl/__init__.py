"""jaxrl: reinforcement-learning post-training of language models in JAX.

    import jaxrl

    def reward(prompt, completion, answer, **columns):
        return float(completion.strip().endswith(answer))

    jaxrl.train(model="path/to/hf_model", data=rows, rewards=[reward])

train            runs a job: a config (a name, options by name, or a ConfigDict), rows, rewards, a tokenizer, callbacks
load_config      a config file or shipped config, with options changed
default_config   every option at its default, to be changed and given to `train`
register_reward  gives a reward function a name for `reward.functions`
Step             the run as a callback sees it
ConfigError      a config, data or checkpoint that cannot work; names field, value and remedy
RunStopped       a run that had to stop; its checkpoints are whole

Nothing heavy is imported here: processes that only need one file of jaxrl (reward workers, inference engines)
must not pull in jax. The names above load on first use.
"""

import importlib

__version__ = "0.1.0"

_LAZY = {
    "train": "jaxrl.api",
    "load_config": "jaxrl.config.load",
    "default_config": "jaxrl.config.load",
    "register_reward": "jaxrl.rewards",
    "Step": "jaxrl.run.callbacks",
    "ConfigError": "jaxrl.errors",
    "RunStopped": "jaxrl.errors",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'jaxrl' has no attribute {name!r}; it has {', '.join(_LAZY)}")


def __dir__():
    return sorted({*globals(), *_LAZY})
