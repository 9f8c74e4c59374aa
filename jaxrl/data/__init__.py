"""Data of a run: sources, columns, chat templates, the resumable stream.

`jaxrl.run.setup` calls it. Scoring belongs to `jaxrl.rewards`, batching to `jaxrl.training`.
"""

from jaxrl.data.chat_template import template_date
from jaxrl.data.dataset import Dataset, Example
from jaxrl.data.loading import check_paths, load_eval_sets, load_train
from jaxrl.data.mixture import Mixture
from jaxrl.data.sources import IN_MEMORY, DataError, offline_if_unreachable, resolve
from jaxrl.data.stream import Interrupted, Stream, data_seed
from jaxrl.data.tokenizer import apply_overrides, completion_texts, fingerprint, load_tokenizer, tokenizer_revision
from jaxrl.data.turns import end_of_turn

__all__ = ["IN_MEMORY", "DataError", "Dataset", "Example", "Interrupted", "Mixture", "Stream", "apply_overrides",
           "check_paths", "completion_texts", "data_seed", "end_of_turn", "fingerprint", "load_eval_sets",
           "load_tokenizer", "load_train", "offline_if_unreachable", "resolve", "template_date", "tokenizer_revision"]
