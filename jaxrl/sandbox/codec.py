"""Encodes plain data as JSON and back: the values a program under test may receive and return.

Also runs inside the sandbox, next to inside.py and judge.py: standard library only, no jaxrl.
"""

MAX_DEPTH = 60
MAX_INT_BITS = 10_000  # bits; Python writes and reads no decimal number of more than 4300 digits


class Opaque(Exception):
    """A value that is not plain data."""


def encode(value, depth=0):
    """Returns plain data as JSON values. Raises Opaque for anything else, and for more than MAX_DEPTH levels.

    None, bool, int, float and str stay; list, tuple, set, frozenset, dict, bytes, complex and long ints become {kind:
    content}. Subclasses become their base, a bytearray bytes, numpy's arrays and scalars lists and numbers. depth: of
    the levels around the value.
    """
    if depth > MAX_DEPTH:
        raise Opaque("it is nested too deep")
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            value = kind(value)
            return {"int": hex(value)} if kind is int and value.bit_length() > MAX_INT_BITS else value
    if value is None:
        return None
    for kind in (list, tuple):
        if isinstance(value, kind):
            return {kind.__name__: [encode(one, depth + 1) for one in value]}
    for kind in (set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(one, depth + 1) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), depth + 1)
    raise Opaque(type(value).__name__)


def decode(value):
    """Returns the value that `encode` encoded. Raises ValueError, TypeError, KeyError, AttributeError or RecursionError
    for anything else."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    (kind, content), = value.items()
    if kind == "dict":
        return {decode(k): decode(v) for k, v in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "int":
        return int(content, 16)
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(decode, content))
