"""Protobuf messages of the protocol: forward_backward requests in, results of forward_backward and sampling out.

Descriptors are made from TABLE, in a pool of their own: no generated code, and no clash with a client in the same
process. Called by `routes`.

Legend: N positions of a datum.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxrl.service.refusals import Refused

CONTENT_TYPE = "application/x-protobuf"
PACKAGE = "tinker_public"
# message -> fields: number, name, type; "type*" is repeated, "type?" one of several or optional, "map:type" a map by
# string. Those of the SDK since 0.25; the fields of 0.38.
TABLE: dict[str, tuple[tuple[int, str, str], ...]] = {
    "SparseCsr": ((1, "values", "bytes"), (2, "crow_indices", "bytes"), (3, "col_indices", "bytes")),
    "Tensor": ((1, "dense", "bytes?"), (2, "sparse_csr", "SparseCsr?"), (3, "dtype", "DType"), (4, "shape", "int64*")),
    "EncodedTextChunk": ((1, "tokens", "bytes"),),
    "ImageDimensions": ((1, "width", "uint32"), (2, "height", "uint32")),
    "ImageChunk": ((1, "data", "bytes"), (2, "format", "string"), (3, "expected_tokens", "int32?"),
                   (4, "override_dimensions", "ImageDimensions?")),
    "DmelChunk": ((1, "dmel", "bytes"),),
    "Chunk": ((1, "encoded_text", "EncodedTextChunk?"), (2, "image", "ImageChunk?"), (3, "dmel", "DmelChunk?")),
    "Datum": ((1, "model_input", "Chunk*"), (2, "loss_fn_inputs", "map:Tensor")),
    "LossConfigValue": ((1, "number", "double?"), (2, "text", "string?")),
    "ForwardBackwardRequest": (
        (1, "model_id", "string"), (2, "seq_id", "int32"), (3, "data", "Datum*"), (4, "loss_fn", "string"),
        (5, "loss_fn_config", "map:double"), (6, "forward_only", "bool"),
        (7, "loss_fn_config_v2", "map:LossConfigValue")),
    "BatchedTensor": ((1, "data", "bytes"), (2, "offsets", "bytes"), (3, "dtype", "DType"),
                      (4, "trailing_shape", "int64*")),
    "ArrayRecord": ((1, "type_tag", "string"), (2, "fields", "map:BatchedTensor"), (3, "num_datums", "int64")),
    "ForwardBackwardOutput": ((1, "loss_fn_output_type", "string"), (2, "loss_fn_outputs", "ArrayRecord*"),
                              (3, "metrics", "map:double")),
    "SampledSequence": ((1, "stop_reason", "StopReason"), (2, "tokens", "bytes"), (3, "logprobs", "bytes?")),
    "SampleResponse": ((1, "sequences", "SampledSequence*"), (2, "prompt_logprobs", "bytes?")),
}
ENUMS = {"DType": ("UNSPECIFIED", "FLOAT32", "INT64", "INT32", "BFLOAT16"), "StopReason": ("STOP", "LENGTH")}
DTYPES = {1: np.dtype(np.float32), 2: np.dtype(np.int64), 3: np.dtype(np.int32)}
FLOAT32 = 1


class ImageChunk(NamedTuple):
    """An image of a model's input.

    Attributes:
      at: number of text tokens before it.
      data: its encoded bytes.
      expected: number of tokens that the client counts for it; None = the client does not say.
    """

    at: int
    data: bytes
    expected: int | None


class Datum(NamedTuple):
    """A training example.

    Attributes:
      tokens: [N] int32, the text of the model's input.
      tensors: name -> input of the loss, as `read_tensor` returns it.
      images: the images of the input, in order.
    """

    tokens: np.ndarray
    tensors: dict[str, np.ndarray]
    images: tuple[ImageChunk, ...] = ()


class ForwardBackward(NamedTuple):
    """A request to compute a loss, and its gradient unless `forward_only`.

    Attributes:
      model_id, seq_id: the run and the number of the request in it.
      data: Datum messages as they came; `read_data` checks and converts them.
      loss_fn, config: name of the loss and its options.
    """

    model_id: str
    seq_id: int
    data: list[Datum]
    loss_fn: str
    config: dict[str, float | str]
    forward_only: bool


@functools.cache
def messages() -> dict[str, Any]:
    """Returns {name: class} of every message of TABLE."""
    file = descriptor_pb2.FileDescriptorProto(name="jaxrl_service.proto", package=PACKAGE, syntax="proto3")
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=f"{name.upper()}_{value}", number=number)
    for name, fields in TABLE.items():
        message = file.message_type.add(name=name)
        for number, field, kind in fields:
            _add_field(message, name, number, field, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"{PACKAGE}.{name}") for name in TABLE}
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in found.items()}


def _add_field(message, owner: str, number: int, name: str, kind: str) -> None:
    proto = descriptor_pb2.FieldDescriptorProto
    label = proto.LABEL_REPEATED if kind.endswith("*") or kind.startswith("map:") else proto.LABEL_OPTIONAL
    one_of = kind.endswith("?")
    base = kind.rstrip("*?")
    if base.startswith("map:"):
        entry = message.nested_type.add(name=name.title().replace("_", "") + "Entry")
        entry.options.map_entry = True
        _add_field(entry, owner, 1, "key", "string")
        _add_field(entry, owner, 2, "value", base.removeprefix("map:"))
        message.field.add(name=name, number=number, label=label, type=proto.TYPE_MESSAGE,
                          type_name=f".{PACKAGE}.{owner}.{entry.name}")
        return
    field = message.field.add(name=name, number=number, label=label)
    if base in TABLE or base in ENUMS:
        field.type = proto.TYPE_ENUM if base in ENUMS else proto.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{base}"
    else:
        field.type = getattr(proto, f"TYPE_{base.upper()}")
    if one_of:  # each in a oneof of its own: presence is known, which is all that is read
        field.oneof_index, field.proto3_optional = len(message.oneof_decl), True
        message.oneof_decl.add(name=f"_{name}")


def parse(name: str, body: bytes):
    """Parses the message `name` of TABLE. Raises Refused (400) for a body that is not one."""
    try:
        return messages()[name].FromString(body)
    except DecodeError as e:
        raise Refused(400, f"the body is no {name} message ({e}); use a tinker SDK of 0.25 or later") from None


def parse_forward_backward(body: bytes) -> ForwardBackward:
    """Parses a request, but not its data: model and number are known even if the data are bad. `read_data` checks
    those.

    Raises Refused (400) for a body that is no such message, and for fields of a newer SDK in the message or its data.
    """
    message = parse("ForwardBackwardRequest", body)
    size = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        raise Refused(400, f"forward_backward: {_unknown(parse('ForwardBackwardRequest', body))} is not known here; it "
                      "is of a newer SDK, and this server ignores nothing: leave the option out that sets it")
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.HasField("text") else value.number
    return ForwardBackward(message.model_id, message.seq_id, message.data, message.loss_fn, config,
                           message.forward_only)


def _unknown(message, where: str = "") -> str:
    """Names the first unknown field of a message and of those in it; "" = there is none."""
    for field in UnknownFieldSet(message):
        return f"field number {field.field_number} of {where or 'the message'}"
    for field, value in message.ListFields():
        inner = value.values() if hasattr(value, "values") else value if hasattr(value, "__len__") else (value,)
        for i, one in enumerate(inner if field.message_type else ()):
            if hasattr(one, "ListFields") and (found := _unknown(one, f"{where}.{field.name}[{i}]".lstrip("."))):
                return found
    return ""


def read_data(data, most: int, longest: int) -> list[Datum]:
    """Converts the data of a request to arrays. Raises Refused (422) naming the datum and the field.

    Args:
      most: largest number of data in a request.
      longest: largest number of chunks in a datum; each has at least one token.
    """
    if len(data) > most:
        raise Refused(422, f"data has {len(data)} data: this server takes {most} in a request; send several requests")
    out = []
    for i, datum in enumerate(data):
        if len(datum.model_input) > longest:
            raise Refused(422, f"data[{i}].model_input has {len(datum.model_input)} chunks: this server takes "
                          f"sequences of at most {longest} tokens")
        tokens, images = read_tokens(datum.model_input, f"data[{i}].model_input")
        out.append(Datum(tokens, {name: read_tensor(tensor, f"data[{i}].loss_fn_inputs[{name!r}]")
                                  for name, tensor in datum.loss_fn_inputs.items()}, images))
    return out


def read_tokens(chunks, where: str) -> tuple[np.ndarray, tuple[ImageChunk, ...]]:
    """Returns ([N] int32 token ids of the text chunks, the images between them).

    Raises Refused (422), naming `where` and the chunk, for other kinds of chunks, and for text that is no whole number
    of int32 tokens.
    """
    parts, images, length = [], [], 0
    for k, chunk in enumerate(chunks):
        if chunk.HasField("dmel"):
            raise Refused(422, f"{where}[{k}] is a chunk of kind dmel: this server trains on text and images; leave it "
                          "out")
        if chunk.HasField("image"):
            own = chunk.image
            if own.HasField("override_dimensions"):
                raise Refused(422, f"{where}[{k}].override_dimensions is not served here: the image's own size counts; "
                              "leave it out, or resize the image")
            expected = own.expected_tokens if own.HasField("expected_tokens") else None
            images.append(ImageChunk(length, own.data, expected))
            continue
        if not chunk.HasField("encoded_text") or len(chunk.encoded_text.tokens) % 4:
            raise Refused(422, f"{where}[{k}]: expected an encoded_text chunk of whole int32 tokens")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
        length += len(parts[-1])
    return np.concatenate(parts) if parts else np.zeros(0, np.int32), tuple(images)


def read_tensor(tensor, where: str) -> np.ndarray:
    """Converts a dense Tensor message to an array of its shape, float32, int32 or int64; flat if it names no shape.

    Raises Refused (422), naming `where`, for a sparse tensor, another dtype, and bytes that do not fill the shape.
    """
    if tensor.HasField("sparse_csr"):
        raise Refused(422, f"{where} is a sparse tensor: this server takes dense ones; send .to_dense()")
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise Refused(422, f"{where}.dtype={tensor.dtype}: send float32 or int64")
    if len(tensor.dense) % dtype.itemsize:
        raise Refused(422, f"{where} has {len(tensor.dense)} bytes, no whole count of {dtype} numbers")
    flat, shape = np.frombuffer(tensor.dense, dtype), tuple(tensor.shape)
    if not shape:
        return flat
    if min(shape) < 0 or int(np.prod(shape, dtype=object)) != len(flat):
        raise Refused(422, f"{where}.shape={list(shape)} does not fit its {len(flat)} numbers")
    return flat.reshape(shape)


def forward_backward_output(logprobs: list[np.ndarray], metrics: dict[str, float]) -> bytes:
    """Serialises the reply to forward_backward: log-probs [N] of each datum, as float32, and metrics named
    `name:reduction`."""
    message = messages()["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    offsets = np.cumsum([0, *(4 * len(own) for own in logprobs)]).astype(np.int64)
    field = record.fields["logprobs"]
    field.data = b"".join(np.asarray(own, np.float32).tobytes() for own in logprobs)
    field.offsets, field.dtype = offsets.tobytes(), FLOAT32
    for name, value in metrics.items():
        message.metrics[name] = float(value)
    return message.SerializeToString()


def sample_response(sequences, prompt_logprobs: np.ndarray | None = None) -> bytes:
    """Serialises the reply to asample.

    Args:
      sequences: (tokens, log-probs, "stop" or "length") of each sample.
      prompt_logprobs: [P], one per prompt token, NaN where there is none; None = not requested.
    """
    message = messages()["SampleResponse"]()
    for tokens, logprobs, reason in sequences:
        message.sequences.add(stop_reason=0 if reason == "stop" else 1, tokens=np.asarray(tokens, np.int32).tobytes(),
                              logprobs=np.asarray(logprobs, np.float32).tobytes())
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(prompt_logprobs, np.float32).tobytes()
    return message.SerializeToString()
