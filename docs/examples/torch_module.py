"""The operation in PyTorch: as an op under torch.compile, as a module, and in a captured graph."""

import torch

from autodispatch import Problem, dispatcher
from autodispatch.torch import SwiGLU

torch.manual_seed(0)
n, k = 512, 256
gate, up = (torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(2))
layer = SwiGLU(gate.weight, up.weight)  # the same memory
assert layer.gate.data_ptr() == gate.weight.data_ptr()
x = torch.randn(2, 8, k, device="cuda", dtype=torch.bfloat16)

eager = torch.nn.functional.silu(gate(x)) * up(x)
compiled = torch.compile(layer, fullgraph=True)
with torch.no_grad():
    torch.testing.assert_close(compiled(x), eager, rtol=2e-2, atol=2e-2)

layer(x).float().square().mean().backward()  # by the library
assert gate.weight.grad is not None

token = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
dispatcher.warmup([Problem(1, n, k, "bfloat16", "nk")])
graph = torch.cuda.CUDAGraph()
with torch.no_grad(), torch.cuda.graph(graph):
    out = layer(token)
graph.replay()
torch.testing.assert_close(out, torch.nn.functional.silu(gate(token)) * up(token), rtol=2e-2, atol=2e-2)
print("compiled, differentiated and captured")
