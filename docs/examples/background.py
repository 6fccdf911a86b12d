"""Serve at once, tune beside the calls, and go on with what won. Runs on a GPU, or on the CPU where there is none."""

import time
from dataclasses import replace

from autodispatch import Origin, Problem, Settings, counters, dispatcher
from autodispatch.device import default_device
from autodispatch.reference import make_inputs

dispatcher.configure(replace(Settings.from_environment(), mode="background"))
device = default_device()
problem = Problem(64, 512, 256, "float32" if device.kind == "cpu" else "bfloat16")
inputs = make_inputs(problem, device)

out = dispatcher.run(inputs.a, inputs.b1, inputs.b2)  # nothing is tuned yet, and this does not wait for it
for _ in range(600):
    dispatcher.run(inputs.a, inputs.b1, inputs.b2, out=out)
    if dispatcher.explain(inputs.a, inputs.b1, inputs.b2).selection.origin is Origin.TUNED:
        break
    time.sleep(0.1)
print(dispatcher.explain(inputs.a, inputs.b1, inputs.b2))
print(counters())
