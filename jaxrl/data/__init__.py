"""Data: sources, columns, chat templates, the resumable stream."""

from jaxrl.data.dataset import Dataset, Example, day_of
from jaxrl.data.loading import check_paths, load_eval_sets, load_train
from jaxrl.data.mixture import Mixture
from jaxrl.data.sources import GIVEN, DataError, offline_if_unreachable, resolve
from jaxrl.data.stream import Interrupted, Stream, data_seed
from jaxrl.data.tokenizer import completion_texts, fingerprint, load_tokenizer, prepared, tokenizer_revision
from jaxrl.data.turns import end_of_turn

__all__ = ["GIVEN", "DataError", "Dataset", "Example", "Interrupted", "Mixture", "Stream", "check_paths",
           "completion_texts", "data_seed", "day_of", "end_of_turn", "fingerprint", "load_eval_sets", "load_tokenizer",
           "load_train", "offline_if_unreachable", "prepared", "resolve", "tokenizer_revision"]
