"""Plain data as JSON and back: what a program under test may be given and may answer, and nothing else.

Runs inside of the sandbox, too, beside inside.py and judge.py: standard library only, no jaxrl.
"""

DEEPEST = 60
LONGEST_INT = 10_000  # bits; Python writes and reads no decimal number of more than 4300 digits


class Opaque(Exception):
    """A value that is no plain data."""


def encode(value, depth=0):
    """None, bool, int, float and str as they are; list, tuple, set, frozenset, dict, bytes, complex and a long int as
    {kind: content}. Subclasses become their base, arrays and their scalars lists and numbers.

    Raises Opaque for all else."""
    if depth > DEEPEST:
        raise Opaque("it is nested too deep")
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            value = kind(value)
            return {"int": hex(value)} if kind is int and value.bit_length() > LONGEST_INT else value
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
    """Raises ValueError, TypeError or KeyError for what `encode` does not make."""
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
