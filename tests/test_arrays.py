"""Arrays on a machine without a GPU: NumPy, and clear words for everything else."""

from __future__ import annotations

import sys
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from autodispatch.arrays import NumpyFamily, TorchFamily, family_of
from autodispatch.device import import_cupy
from autodispatch.dispatcher import Dispatcher
from autodispatch.errors import DeviceError
from autodispatch.reference import decode


def test_numpy_arrays_and_their_subclasses_are_one_family(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(2, 2))
    assert isinstance(family_of(np.zeros((2, 2))), NumpyFamily)
    assert isinstance(family_of(mapped), NumpyFamily)


@pytest.mark.parametrize("thing", [None, 1.0, [[1.0]], "a", object()])
def test_what_is_no_array_is_refused_by_name(dispatcher: Dispatcher, thing: Any) -> None:
    with pytest.raises(TypeError, match="a must be a CuPy array"):
        dispatcher.run(thing, thing, thing)


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.complex64, ">f2", ">f4", bool])
def test_other_dtypes_are_refused_with_the_allowed_ones(dispatcher: Dispatcher, dtype: Any) -> None:
    x = np.ones((2, 2), dtype)
    with pytest.raises(TypeError, match="a must have a dtype out of bfloat16, float16, float32, in native byte order"):
        dispatcher.run(x, x, x)


def test_mixed_kinds_are_refused_by_name(dispatcher: Dispatcher) -> None:
    x = np.ones((2, 2), np.float32)
    with pytest.raises(TypeError, match=r"b2 must be a NumPy array like the other arguments \(got builtins.list\)"):
        dispatcher.run(x, x, [[1.0, 1.0], [1.0, 1.0]])


def test_an_array_not_aligned_to_its_items_is_refused(dispatcher: Dispatcher) -> None:
    raw = np.zeros(4 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(2, 2)
    with pytest.raises(ValueError, match="a must be aligned to its item size"):
        dispatcher.run(raw, raw, raw)


def test_a_gpu_array_without_cupy_says_what_to_install(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    class GpuArray:
        __cuda_array_interface__ = {}  # noqa: RUF012

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match="install the extra cuda12 or cuda13") as error:
        dispatcher.run(GpuArray(), GpuArray(), GpuArray())
    assert isinstance(error.value.__cause__, ImportError)


@pytest.mark.parametrize("error", [ImportError("libcuda"), RuntimeError("driver"), OSError("no such file")])
def test_a_cupy_that_breaks_at_import_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, error: Exception
) -> None:
    name = type(error).__name__
    (tmp_path / "cupy.py").write_text(f"raise {name}({str(error)!r})")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DeviceError, match=str(error)) as found:
        import_cupy()
    assert type(found.value.__cause__) is type(error)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_numpy_results_have_the_callers_kind_and_dtype(dispatcher: Dispatcher, dtype: Any, layout: str) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((9, 20)).astype(dtype)
    b1, b2 = (rng.standard_normal((20, 12) if layout == "kn" else (12, 20)).astype(dtype) for _ in range(2))
    b1, b2 = (b1, b2) if layout == "kn" else (b1.T, b2.T)
    out = dispatcher.run(a, b1, b2)
    gate, up = decode(a) @ decode(b1), decode(a) @ decode(b2)
    assert isinstance(out, np.ndarray)
    assert out.dtype == dtype
    np.testing.assert_allclose(decode(out), gate / (1 + np.exp(-gate)) * up, rtol=2.0**-7, atol=1e-4)


class FakeTorch(types.ModuleType):
    """Enough of PyTorch to ask the family about tensors that it must refuse."""

    float32, float16, bfloat16, float64 = "torch.float32", "torch.float16", "torch.bfloat16", "torch.float64"

    class Tensor:
        def __init__(self, where: str = "cuda", dtype: str = "torch.float16", requires_grad: bool = False) -> None:
            self.device = types.SimpleNamespace(type=where, index=0)
            self.dtype, self.requires_grad, self.shape = dtype, requires_grad, (2, 2)

        def element_size(self) -> int:
            return 2

        def stride(self) -> tuple[int, int]:
            return 2, 1

        def data_ptr(self) -> int:
            return 256

    @staticmethod
    def is_grad_enabled() -> bool:
        return True


def test_torch_tensors_are_read_without_copies_and_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTorch("torch")
    monkeypatch.setitem(sys.modules, "torch", fake)
    family = TorchFamily()
    assert family.matrix("a", FakeTorch.Tensor())[:7] == (256, 2, 2, 2, 1, "float16", 0)
    with pytest.raises(TypeError, match="b1 must be on a GPU"):
        family.matrix("b1", FakeTorch.Tensor("cpu"))
    with pytest.raises(TypeError, match="b1 must have a dtype"):
        family.matrix("b1", FakeTorch.Tensor(dtype="torch.float64"))
    with pytest.raises(ValueError, match="b1 must not require grad"):
        family.matrix("b1", FakeTorch.Tensor(requires_grad=True))
    with pytest.raises(TypeError, match="b1 must be a PyTorch tensor"):
        family.matrix("b1", np.zeros((2, 2), np.float16))
