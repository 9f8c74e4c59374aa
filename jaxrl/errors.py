"""What ends a run before or after it began."""


class ConfigError(ValueError):
    """A config that cannot work. The message names the field, its value and the remedy, and stands alone: a traceback
    shows what it was raised from only where that is named (`raise ... from`)."""

    def __init__(self, *args):
        super().__init__(*args)
        self.__suppress_context__ = True


class RunStopped(RuntimeError):
    """A run that cannot go on (rewards fail, nothing is finite). The message says why and what to do."""


def type_of(value) -> str:
    """Returns the name of a value's type with its article, for messages: "an int", "a list"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
