"""Another thread reads the wrapper's state while the main thread trains."""

import subprocess
import sys

import pytest

#: A read of freed memory ends the process, so each case runs in its own.
TRAINING = """
import sys, threading, traceback
import torch
from torch import nn
import fusedacc

torch.set_num_threads(1)
sys.setswitchinterval(1e-5)
counted, with_model, dtype, options = {case}
layers = nn.Linear(10, 160), nn.Tanh(), nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 3)
model = nn.Sequential(*layers).to(dtype)
inner = torch.optim.SGD(model.parameters(), 0.05)
options["model"] = model if with_model else None
optimizer = fusedacc.AccumulatingOptimizer(inner, 4 if counted else None, **options)
names = ["micro_step", "num_updates", "num_skipped", "has_updated", "will_update", "has_partial_window"]
names += ["grad_norm", "accumulator_bytes"]
stopped, errors, rounds = threading.Event(), [], 0

def read():
    global rounds
    try:
        while not stopped.is_set():
            for name in names:
                getattr(optimizer, name)
            if rounds % 10 == 0:
                repr(optimizer), optimizer.explain()
            rounds += 1
    except BaseException:
        errors.append(traceback.format_exc())

thread = threading.Thread(target=read)
thread.start()
for index in range(400):
    x, y = torch.randn(6, 10, dtype=dtype), torch.randint(3, (6,))
    nn.functional.cross_entropy(model(x).float(), y).backward()
    if counted or index % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
    if index in (100, 200):
        model[0].weight.requires_grad_(index == 200)
    if index == 300:
        optimizer.load_state_dict(optimizer.state_dict())
    if index == 350:
        optimizer.add_param_group({{"params": [nn.Parameter(torch.zeros(3, dtype=dtype))]}})
stopped.set()
thread.join()
assert not errors, errors[0]
assert rounds > 20, rounds
"""
CASES = [
    "True, False, torch.float32, {}",
    "True, True, torch.bfloat16, {'max_grad_norm': 1.0}",
    "False, True, torch.float32, {}",
    "False, False, torch.bfloat16, {'master_weights': True}",
]


@pytest.mark.parametrize("case", CASES)
def test_every_state_is_readable_from_another_thread(case):
    run = subprocess.run(
        [sys.executable, "-c", TRAINING.format(case=case)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
