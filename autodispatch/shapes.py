"""Which problems a command line names: `M,N,K`, lists of m, and the MLP of a Hugging Face model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from autodispatch.problem import (
    ACTIVATIONS,
    ITEM_BYTES,
    MATHS,
    PRECISIONS,
    Problem,
    check_choice,
    natural_alignment,
)

# of gated MLPs; models with a plain gelu or relu have no gate
HF_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
LADDER = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def parse_shape(text: str) -> tuple[int, int, int]:
    """`M,N,K` as integers. Raises ValueError."""
    parts = text.split(",")
    if len(parts) != 3 or not all(p.strip().isdigit() and int(p) > 0 for p in parts):
        raise ValueError(f"a shape must be M,N,K with positive integers (got {text!r})")
    m, n, k = (int(p) for p in parts)
    return m, n, k


def from_file(path: Path) -> list[tuple[int, int, int]]:
    """The shapes of a file, one `M,N,K` a line; `#` begins a comment. Raises ValueError that names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as cause:
        raise ValueError(f"{path} must be a text file of shapes (got {cause})") from cause
    found = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if text:
            try:
                found.append(parse_shape(text))
            except ValueError as cause:
                raise ValueError(f"{path}, line {number}: {cause}") from None
    if not found:
        raise ValueError(f"{path} must hold shapes (got none)")
    return found


def parse_sizes(text: str) -> tuple[int, ...]:
    """`1,16,128` as integers. Raises ValueError."""
    parts = text.split(",")
    if not all(p.strip().isdigit() and int(p) > 0 for p in parts):
        raise ValueError(f"a list of sizes must be positive integers with commas between (got {text!r})")
    return tuple(int(p) for p in parts)


def from_hf_config(path: Path, activation: str | None = None) -> tuple[int, int, str]:
    """(n, k, activation) of the gated MLP that a Hugging Face `config.json` describes: n its width, k the hidden size.

    An `activation` that is given takes the place of the file's. Raises ValueError if the file does not describe an MLP
    with an activation that is known.
    """
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ValueError(f"{path} must be a Hugging Face config.json (got {cause})") from cause
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object (got {type(config).__name__})")
    k = config.get("hidden_size")
    n = config.get("moe_intermediate_size") or config.get("intermediate_size")
    if not isinstance(n, int) or not isinstance(k, int):
        raise ValueError(f"{path} must have hidden_size and intermediate_size (got {k!r} and {n!r})")
    if activation is not None:
        return n, k, activation
    its_own = config.get("hidden_activation") or config.get("hidden_act") or "silu"  # Gemma has both
    if its_own not in HF_ACTIVATIONS:
        known = ", ".join(HF_ACTIVATIONS)
        raise ValueError(f"{path} must have hidden_act {known}, or an activation must be given (got {its_own!r})")
    return n, k, HF_ACTIVATIONS[its_own]


def problems(
    shapes: Iterable[tuple[int, int, int]],
    dtypes: Sequence[str],
    layouts: Sequence[str],
    activation: str = ACTIVATIONS[0],
    math: str = MATHS[0],
    precision: str = PRECISIONS[0],
    alignment: int | None = None,
) -> list[Problem]:
    """Every combination, in a stable order, without repetitions.

    The alignment is that of packed arrays of the shape unless one is given.
    """
    found = []
    for dtype in dtypes:
        check_choice("dtype", dtype, tuple(ITEM_BYTES))
        for layout in layouts:
            for m, n, k in shapes:
                bytes_ = natural_alignment(m, n, k, dtype, layout) if alignment is None else alignment
                found.append(Problem(m, n, k, dtype, layout, bytes_, activation, precision, math))
    return list(dict.fromkeys(found))
