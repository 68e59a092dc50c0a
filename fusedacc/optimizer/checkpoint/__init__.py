"""Saves the wrapper's state inside the inner optimizer's state_dict, and loads it.

A state_dict gets these additional entries:

- in each parameter's state, the sum of a partly filled window under `SUM` and the float32 master under
  `MASTER`;
- the counters at the top level under `TOP_LEVEL`, in each group as text and with each sum as bytes under
  `COUNTERS`. Distributed checkpoint drops unknown top-level keys and loads only the entries that a new
  optimizer has too. A group's counters then show that sums were lost.

The inner optimizer loads the rest. It does not get our entries, because torch would cast them to the
parameters' dtype. If the inner optimizer loads our checkpoint without a wrapper, it keeps the entries in
groups and state, and saves them again after any number of updates. We recognise this stale checkpoint: the
top level is missing, the entries were cast, or the optimizer's own count of updates is higher.

Some inner optimizers have a state_dict of another form, for example pytorch_optimizer's Lookahead. It stays
as it is, and the entries for the parameters' state are saved under `OTHER_FORM`, by the parameters'
positions.

The files: `format.py` has the entries, `window_fields.py` the counters of a window, `checks.py` and
`inner_checks.py` what a checkpoint must satisfy, `ranks.py` the windows of several ranks, and `copies.py`
pickles and deep copies.
"""

from .copies import Snapshot
from .format import forget_stale
from .load import load
from .save import save

__all__ = ["Snapshot", "forget_stale", "load", "save"]
