"""The operation in PyTorch: right in eager, compiled, exported and captured, forwards and backwards, without copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autodispatch.dispatcher import counters
from autodispatch.problem import ACTIVATIONS, Problem

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def ours() -> Any:
    from autodispatch import torch as module

    return module


def tensors(dtype: Any, m: int = 24, n: int = 40, k: int = 32, device: str = "cuda", **options: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    shapes = ((m, k), (n, k), (n, k))
    made = (torch.randn(s, generator=generator, dtype=torch.float64) * s[1] ** -0.5 for s in shapes)
    return [x.to(device, dtype).requires_grad_(options.get("grad", False)) for x in made]


def expected(ours: Any, a: Any, gate: Any, up: Any, activation: str = "silu") -> Any:
    a, gate, up = (x.detach().double().cpu() for x in (a, gate, up))
    return ours._FORWARD[activation](a @ gate.t()) * (a @ up.t())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_op_is_right_on_the_gpu_and_on_the_cpu(ours: Any, dtype: Any, activation: str) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for device in ("cuda", "cpu"):
        a, gate, up = tensors(dtype, device=device)
        out = torch.ops.autodispatch.swiglu(a, gate.t(), up.t(), activation)
        assert (out.dtype, out.device.type) == (dtype, device)
        truth = expected(ours, a, gate, up, activation)
        torch.testing.assert_close(out.double().cpu(), truth, rtol=tolerance, atol=tolerance)


def test_torchs_own_checks_of_an_op_pass(ours: Any) -> None:
    for device in ("cuda", "cpu"):
        a, gate, up = tensors(torch.float32, device=device, grad=True)
        torch.library.opcheck(torch.ops.autodispatch.swiglu.default, (a, gate.t(), up.t()), {"activation": "silu"})


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_pass_gradcheck_in_float64(ours: Any, activation: str) -> None:
    a, gate, up = tensors(torch.float64, 3, 5, 4, "cpu", grad=True)
    assert torch.autograd.gradcheck(lambda x, y, z: ours.gated(x, y, z, activation), (a, gate, up))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_on_the_gpu_are_those_of_float64(ours: Any, activation: str) -> None:
    found = tensors(torch.float32, grad=True)
    ours.gated(*found, activation).square().sum().backward()
    truth = [x.detach().double().cpu().requires_grad_() for x in found]
    expected_out = ours._FORWARD[activation](truth[0] @ truth[1].t()) * (truth[0] @ truth[2].t())
    expected_out.square().sum().backward()
    for x, y in zip(found, truth, strict=True):
        torch.testing.assert_close(x.grad.double().cpu(), y.grad, rtol=1e-4, atol=1e-5)


def test_compiled_and_exported_whole(ours: Any) -> None:
    a, gate, up = tensors(torch.bfloat16, grad=True)
    layer = ours.SwiGLU(gate.detach(), up.detach())
    truth = expected(ours, a, gate, up)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(a).double().cpu(), truth, rtol=2e-2, atol=2e-2)
    compiled(a).float().sum().backward()
    assert a.grad is not None
    exported = torch.export.export(layer, (a.detach(),))
    assert any("swiglu" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(a.detach()).double().cpu(), truth, rtol=2e-2, atol=2e-2)


def test_a_module_takes_weights_over_without_copies(ours: Any) -> None:
    x, gate, up = tensors(torch.bfloat16)
    packed = torch.cat([gate, up])
    pair, one = ours.SwiGLU(gate, up), ours.SwiGLU(packed)
    assert pair.gate.data_ptr() == gate.data_ptr() and one.gate.data_ptr() == packed.data_ptr()
    before = counters().copies
    with torch.no_grad():
        results = [layer(x.reshape(2, 12, 32)) for layer in (pair, one)]
    assert counters().copies == before
    assert [r.shape for r in results] == [(2, 12, 40)] * 2
    for result in results:
        torch.testing.assert_close(
            result.reshape(24, 40).double().cpu(), expected(ours, x, gate, up), rtol=2e-2, atol=2e-2
        )
    for bad in ((gate, up[:, :16]), (gate[:5],), (gate[0],)):
        with pytest.raises(ValueError, match="gate and up must both be"):
            ours.SwiGLU(*bad)
    with pytest.raises(ValueError, match="activation must be one of"):
        ours.SwiGLU(gate, up, activation="tanh")


def test_torchs_current_stream_orders_the_work(ours: Any) -> None:
    a, gate, up = tensors(torch.float32, 512, 512, 512)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(20):
            torch.cuda._sleep(1_000_000)  # the kernel must wait for what comes before it on this stream
            a.fill_(i / 512)
            out = torch.ops.autodispatch.swiglu(a, gate.t(), up.t(), "relu")
            truth = torch.relu(a @ gate.t()) * (a @ up.t())
            torch.testing.assert_close(out, truth, rtol=1e-3, atol=1e-3)


def test_a_captured_graph_replays_right(ours: Any) -> None:
    from autodispatch import dispatcher

    a, gate, up = tensors(torch.float16)
    dispatcher.warmup([Problem(24, 40, 32, "float16", "nk")])
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = ours.gated(a, gate, up)
    for scale in (1.0, 2.0):
        a *= scale
        graph.replay()
        torch.testing.assert_close(out.double().cpu(), expected(ours, a, gate, up), rtol=2e-3, atol=2e-3)


def test_an_untuned_problem_is_refused_in_a_capture_which_goes_on(ours: Any) -> None:
    from autodispatch import LaunchError, dispatcher

    a, gate, up = tensors(torch.float16)
    others = tensors(torch.float16, 7, 248, 136)
    dispatcher.warmup([Problem(24, 40, 32, "float16", "nk")])
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        with pytest.raises(LaunchError, match="warmup"):
            ours.gated(*others)
        out = ours.gated(a, gate, up)
    a *= 2
    graph.replay()
    torch.testing.assert_close(out.double().cpu(), expected(ours, a, gate, up), rtol=2e-3, atol=2e-3)


def test_the_mlps_of_a_model_are_swapped_and_give_the_same(ours: Any) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 50}
    for config, kind in (
        (transformers.LlamaConfig(**sizes), transformers.LlamaForCausalLM),
        (transformers.Qwen2Config(**sizes), transformers.Qwen2ForCausalLM),
    ):
        torch.manual_seed(0)
        model = kind(config).to("cuda", torch.float32).eval()
        tokens = torch.arange(20, device="cuda").reshape(1, 20)
        with torch.no_grad():
            before = model(tokens).logits
            weights = {name: x.data_ptr() for name, x in model.state_dict().items()}
            assert ours.swap_mlps(model) == 2
            after = model(tokens).logits
        assert {name: x.data_ptr() for name, x in model.state_dict().items()} == weights
        torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4)
        with pytest.raises(ValueError, match="must have MLPs"):
            ours.swap_mlps(model)


def test_numbers_of_rows_that_change_are_one_export(ours: Any) -> None:
    a, gate, up = tensors(torch.bfloat16)
    layer = ours.SwiGLU(gate, up)
    rows = torch.export.Dim("rows", min=2, max=1024)
    exported = torch.export.export(layer, (a,), dynamic_shapes=({0: rows},)).module()
    for m in (2, 24, 100):
        x = torch.from_numpy(np.random.default_rng(m).standard_normal((m, 32))).to("cuda", torch.bfloat16)
        with torch.no_grad():
            truth = expected(ours, x, gate, up)
            torch.testing.assert_close(exported(x).double().cpu(), truth, rtol=3e-2, atol=3e-2)


class LikeAnMlp(torch.nn.Module):
    def __init__(self, act: Any, factor: float = 1.0) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(16, 24, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(24, 16, bias=False)
        self.act_fn, self.factor = act, factor

    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * self.factor


@pytest.mark.parametrize("act", [torch.nn.SiLU(), torch.nn.GELU(), torch.nn.GELU(approximate="tanh")])
def test_a_swap_keeps_the_activation_of_the_module(ours: Any, act: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(LikeAnMlp(act)).double()
    x = 4 * torch.randn(50, 16, dtype=torch.float64)
    before = model(x)
    assert ours.swap_mlps(model) == 1
    torch.testing.assert_close(model(x), before, rtol=1e-9, atol=1e-9)


def test_what_only_looks_like_an_mlp_is_left_alone(ours: Any) -> None:
    hooked = LikeAnMlp(torch.nn.SiLU())
    hooked.gate_proj.register_forward_hook(lambda module, inputs, output: output * 2)
    for module in (LikeAnMlp(torch.nn.SiLU(), 2.0), LikeAnMlp(torch.nn.Tanh()), hooked):
        with pytest.raises(ValueError, match="must have MLPs"):
            ours.swap_mlps(torch.nn.Sequential(module))
