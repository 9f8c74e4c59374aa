"""Packing, the jitted scoring and update steps, optimizer and schedules."""
# ruff: noqa: F401

from jaxrl.training import adapter_set, router, streaming
from jaxrl.training.distillation import Distillation
from jaxrl.training.layout import Layout, Minibatch, make_layout, row_shapes
from jaxrl.training.objective import (
    LossScale,
    NextToken,
    Objective,
    PolicyGradient,
    Score,
    Value,
    score_weights,
    sequence_weights,
)
from jaxrl.training.optimizer import in_parts, make_optimizer, make_schedule
from jaxrl.training.pack import loss_weights, pack, unpack
from jaxrl.training.score import make_reader, make_score
from jaxrl.training.slots import scored_behind
from jaxrl.training.state import init_state, partition, split
from jaxrl.training.update import make_update, microbatches_per_call
from jaxrl.types import merge
