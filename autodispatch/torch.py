"""PyTorch: the operation as `torch.ops.autodispatch.swiglu`, a module, and a swap into the MLPs of a model.

Importing this module registers the op, which torch.compile and torch.export take as it is. On a GPU it runs what the
process's own dispatcher picks, on the current stream and without copies; on the CPU, and in the backward, PyTorch's own
operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autodispatch import dispatcher
from autodispatch.problem import ACTIVATIONS, check_choice

_aten = torch.ops.aten
_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
    "sigmoid": torch.sigmoid,
}
_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda grad, x: _aten.silu_backward(grad, x),
    "gelu": lambda grad, x: _aten.gelu_backward(grad, x),
    "gelu_tanh": lambda grad, x: _aten.gelu_backward(grad, x, approximate="tanh"),
    "relu": lambda grad, x: _aten.threshold_backward(grad, x, 0),
    "sigmoid": lambda grad, x: _aten.sigmoid_backward(grad, torch.sigmoid(x)),
}
# the activation modules of PyTorch and Transformers by the names of their classes
_BY_CLASS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "Sigmoid": "sigmoid",
}


@torch.library.custom_op("autodispatch::swiglu", mutates_args=(), device_types="cuda")
def swiglu(a: Tensor, b1: Tensor, b2: Tensor, activation: str = "silu", math: str = "exact") -> Tensor:
    """activation(a @ b1) * (a @ b2) with a (m, k), b1 and b2 (k, n); see `dispatcher.run`. Differentiable."""
    with torch.no_grad():
        return dispatcher.run(a, b1, b2, activation=activation, math=math)


@swiglu.register_kernel("cpu")
def _on_cpu(a: Tensor, b1: Tensor, b2: Tensor, activation: str = "silu", math: str = "exact") -> Tensor:
    check_choice("activation", activation, ACTIVATIONS)
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    x, y1, y2 = (t.to(wide) for t in (a, b1, b2))
    return (_FORWARD[activation](x @ y1) * (x @ y2)).to(a.dtype)


@swiglu.register_fake
def _fake(a: Tensor, b1: Tensor, b2: Tensor, activation: str = "silu", math: str = "exact") -> Tensor:
    return a.new_empty((a.shape[0], b1.shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b1, b2, activation, _ = inputs
    ctx.save_for_backward(a, b1, b2)
    ctx.activation = activation


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
    """By the library: the two products are computed again rather than kept."""
    a, b1, b2 = ctx.saved_tensors
    gate, up = a @ b1, a @ b2
    grad_gate = _BACKWARD[ctx.activation](grad * up, gate)
    grad_up = grad * _FORWARD[ctx.activation](gate)
    needs_a, needs_b1, needs_b2, *_ = ctx.needs_input_grad
    return (
        grad_gate @ b1.t() + grad_up @ b2.t() if needs_a else None,
        a.t() @ grad_gate if needs_b1 else None,
        a.t() @ grad_up if needs_b2 else None,
        None,
        None,
    )


swiglu.register_autograd(_backward, setup_context=_setup_context)


def gated(x: Tensor, gate: Tensor, up: Tensor, activation: str = "silu", math: str = "exact") -> Tensor:
    """activation(x @ gate.T) * (x @ up.T) for x (..., k) and weights as `nn.Linear` keeps them, (n, k): (..., n)."""
    rows = x.reshape(-1, x.shape[-1])
    return swiglu(rows, gate.t(), up.t(), activation, math).reshape(*x.shape[:-1], gate.shape[0])


class SwiGLU(nn.Module):
    """The gated layer with weights that exist already, which are taken over without copies.

    Args:
        gate: (n, k), or the packed (2n, k) of gate and up, in this order, where `up` is None.
        up: (n, k).
        activation, math: see `dispatcher.run`.

    Raises ValueError for weights that do not fit together.
    """

    def __init__(
        self, gate: Tensor, up: Tensor | None = None, *, activation: str = "silu", math: str = "exact"
    ) -> None:
        super().__init__()
        check_choice("activation", activation, ACTIVATIONS)
        if gate.ndim != 2 or (up is None and gate.shape[0] % 2) or (up is not None and up.shape != gate.shape):
            got = tuple(gate.shape) if up is None else (tuple(gate.shape), tuple(up.shape))
            raise ValueError(f"gate and up must both be (n, k), or gate the packed (2n, k) (got {got})")
        self.activation, self.math = activation, math
        self.gate = _parameter(gate)
        self.up = None if up is None else _parameter(up)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., k) to (..., n)."""
        if self.up is not None:
            return gated(x, self.gate, self.up, self.activation, self.math)
        n = self.gate.shape[0] // 2
        return gated(x, self.gate[:n], self.gate[n:], self.activation, self.math)


def _parameter(weight: Tensor) -> nn.Parameter:
    if isinstance(weight, nn.Parameter):
        return weight
    return nn.Parameter(weight, requires_grad=weight.requires_grad and weight.is_leaf)


class GatedMLP(nn.Module):
    """An MLP of a Hugging Face Llama, Qwen2 or the like with its first layer by `swiglu`. The projections are the
    original's own, under the same names, so that a state dict fits as before."""

    def __init__(self, gate_proj: nn.Linear, up_proj: nn.Linear, down_proj: nn.Module, activation: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """x (..., k) to (..., k)."""
        out: Tensor = self.down_proj(gated(x, self.gate_proj.weight, self.up_proj.weight, self.activation))
        return out


def swap_mlps(model: nn.Module) -> int:
    """Replaces every gated MLP in a model, in place, by a GatedMLP with the same weights; returns how many.

    An MLP is what has `gate_proj` and `up_proj`, both `nn.Linear` without bias and hooks, a `down_proj`, an `act_fn`
    that is known, and gives what these should on a few random rows; others are left alone. Raises ValueError if there
    is none.
    """
    found = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            activation = _activation_of(child)
            if activation is not None and _computes(child, activation):
                setattr(parent, name, GatedMLP(child.gate_proj, child.up_proj, child.down_proj, activation))
                found += 1
    if not found:
        raise ValueError("the model must have MLPs with gate_proj, up_proj and down_proj without bias (got none)")
    return found


def _activation_of(module: nn.Module) -> str | None:
    """The activation of an MLP that can be replaced; None if it cannot, or is none."""
    pair: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj")]
    plain = all(type(x) is nn.Linear and x.bias is None and not _has_hooks(x) for x in pair)
    if not plain or not hasattr(module, "down_proj") or _has_hooks(module) or isinstance(module, GatedMLP):
        return None
    act = getattr(module, "act_fn", None)
    if isinstance(act, nn.GELU):
        return "gelu_tanh" if act.approximate == "tanh" else "gelu"
    return _BY_CLASS.get(type(act).__name__) or next((k for k, f in _FORWARD.items() if f is act), None)


def _has_hooks(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _computes(module: Any, activation: str) -> bool:
    """Whether a module's forward is that of a gated MLP, by a few random rows; on the meta device by its looks."""
    weight = module.gate_proj.weight
    if weight.device.type == "meta":
        return True
    with torch.no_grad():
        x = torch.randn(3, weight.shape[1], dtype=torch.float32).to(weight)
        expected = module.down_proj(_FORWARD[activation](module.gate_proj(x)) * module.up_proj(x))
        found = module(x)
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    return bool(torch.allclose(found.float(), expected.float(), rtol=2e-2, atol=2e-2 * float(expected.abs().max())))
