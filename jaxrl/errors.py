"""What ends a run before or after it began."""


class ConfigError(ValueError):
    """A config that cannot work. The message names the field, its value and the remedy."""


class RunStopped(RuntimeError):
    """A run that cannot go on (rewards fail, nothing is finite). The message says why and what to do."""
