"""Forty-eight layers in one CUDA graph, with CuPy. What is captured must be ready: warmup() makes it so."""

import cupy

from autodispatch import Problem, dispatcher
from autodispatch.device import cuda_device
from autodispatch.reference import make_inputs

problem = Problem(1, 512, 256, "float16", "nk")
dispatcher.warmup([problem])
stream = cupy.cuda.Stream(non_blocking=True)
with stream:  # the layers too are made on it, or it would have to wait for them
    layers = [make_inputs(problem, cuda_device(0), seed) for seed in range(48)]
    outs = [cupy.empty((problem.m, problem.n), cupy.float16) for _ in layers]
    stream.begin_capture()
    for layer, out in zip(layers, outs, strict=True):
        dispatcher.run(layer.a, layer.b1, layer.b2, out=out)
    graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
layer = layers[-1]
assert bool((outs[-1] == dispatcher.run(layer.a, layer.b1, layer.b2)).all())
print(f"{len(layers)} layers replayed")
