"""Two streams and two threads at once: each call is ordered on the current stream of its thread."""

import threading

import cupy

from autodispatch import Problem, dispatcher
from autodispatch.device import cuda_device
from autodispatch.reference import make_inputs

problem = Problem(64, 512, 256, "float16")
inputs = make_inputs(problem, cuda_device(0))
expected = dispatcher.run(inputs.a, inputs.b1, inputs.b2)
cupy.cuda.Device().synchronize()
results = [None, None]


def work(i: int) -> None:
    with cupy.cuda.Stream(non_blocking=True) as stream:
        results[i] = dispatcher.run(inputs.a, inputs.b1, inputs.b2)
        stream.synchronize()


threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert all(bool((r == expected).all()) for r in results)
print("both right")
