"""The imports of all processes that measure on the CPU, with what torch imports and asks when it first compiles."""

import torch

from benchmarks import measuring

measuring.prepare()
with torch.no_grad():  # autograd has not run yet in a process that starts from here
    torch.compile(torch.nn.Linear(4, 4))(torch.ones(2, 4))
torch.compiler.reset()
