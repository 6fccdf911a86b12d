"""The MLP of Qwen2-1.5B, as Hugging Face has it and swapped: one token in a CUDA graph, and 4096 tokens eagerly.

Eight blocks with random weights of their own take turns, so that no weight is still in L2 when it is read again.
"""

import statistics

import torch
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from autodispatch import Problem, dispatcher
from autodispatch.torch import swap_mlps

BLOCKS, ROUNDS = 8, 20
config = Qwen2Config(hidden_size=1536, intermediate_size=8960)


def blocks() -> torch.nn.ModuleList:
    torch.manual_seed(0)
    return torch.nn.ModuleList(Qwen2MLP(config) for _ in range(BLOCKS)).to("cuda", torch.bfloat16).eval()


def run(model: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in model:
        y = block(x)
    return y


def microseconds(call: object) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / BLOCKS


models = {"Hugging Face": blocks(), "swapped": blocks()}
swap_mlps(models["swapped"])
dispatcher.warmup([Problem(m, 8960, 1536, "bfloat16", "nk") for m in (1, 4096)])
with torch.no_grad():
    for m, how in ((1, "in a CUDA graph"), (4096, "eager")):
        x = torch.randn(m, 1536, device="cuda", dtype=torch.bfloat16)
        calls = {}
        for name, model in models.items():
            run(model, x)
            calls[name] = lambda model=model, x=x: run(model, x)
            if m == 1:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    run(model, x)
                calls[name] = graph.replay
        before, after = (run(model, x) for model in models.values())
        torch.testing.assert_close(after, before, rtol=5e-2, atol=5e-2)
        times = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                times[name].append(microseconds(call))
        medians = {name: statistics.median(t) for name, t in times.items()}
        told = ", ".join(f"{name} {us:.1f} us" for name, us in medians.items())
        print(f"{m} tokens {how}: {told}, {medians['Hugging Face'] / medians['swapped']:.3f}x")
