"""The plan's compiling subprocess with a sharding rule broken on purpose. Run by test_collectives.py.

Usage: broken_rule.py RULE JOB.json RESULT.json
"""

import sys

from jaxrl.models import decoder, model, placement
from jaxrl.planning import compiling
from jaxrl.sharding import rules

rule = sys.argv.pop(1)
if rule == "weights are not gathered before use":
    for room in (placement, decoder, model):
        room.gathered = lambda weight, axes, dtype: weight.astype(dtype)
elif rule == "rows are not split":
    placement._data_axes = lambda mesh, rows: None
elif rule == "the MLP is not split over tp":
    for table in (rules.TRAIN_RULES, rules.ROLLOUT_RULES):
        table["mlp"] = None
else:
    raise SystemExit(f"no such rule: {rule}")
compiling.main(*sys.argv[1:])
