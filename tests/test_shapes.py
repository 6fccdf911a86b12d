"""Which problems a command means: shapes, files of them, configs of models, options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autodispatch.dispatcher import Dispatcher
from autodispatch.problem import Problem
from autodispatch.selection import Origin
from autodispatch.settings import Settings
from autodispatch.shapes import LADDER, from_hf_config, parse_shape, parse_sizes, problems
from tests.test_cli import CPU, run, tuned


def test_shapes_and_lists_of_sizes() -> None:
    assert parse_shape("1, 2,3") == (1, 2, 3)
    assert parse_sizes("1,16") == (1, 16)
    for text in ("", "1,2", "1,2,3,4", "a,b,c", "-1,2,3", "1.5,2,3"):
        with pytest.raises(ValueError, match="must be M,N,K"):
            parse_shape(text)


def test_problems_are_every_combination_once() -> None:
    found = problems([(1, 2, 3), (1, 2, 3), (4, 5, 6)], ["float16", "bfloat16"], ["kn", "nk"])
    assert len(found) == len(set(found)) == 8


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_size": 1536, "intermediate_size": 8960, "hidden_act": "silu"}, (8960, 1536, "silu")),
        ({"text_config": {"hidden_size": 64, "intermediate_size": 128}}, (128, 64, "silu")),
        ({"hidden_size": 64, "intermediate_size": 999, "moe_intermediate_size": 96}, (96, 64, "silu")),
        (
            {"hidden_size": 64, "intermediate_size": 128, "hidden_activation": "gelu_pytorch_tanh"},
            (128, 64, "gelu_tanh"),
        ),
        (
            {"hidden_size": 64, "intermediate_size": 8, "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
            (8, 64, "gelu_tanh"),
        ),
    ],
)
def test_a_hugging_face_config_gives_n_k_and_activation(
    tmp_path: Path, config: dict[str, Any], expected: tuple[int, int, str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert from_hf_config(path) == expected
    result = json.loads(run("explain", "--hf-config", str(path), *CPU, "--json").stdout)
    found = [tuple(e["problem"][x] for x in ("m", "n", "k", "activation")) for e in result]
    assert found == [(m, *expected) for m in LADDER]


@pytest.mark.parametrize(
    "text", ["{}", "[]", "nonsense", '{"hidden_size": 4, "intermediate_size": 8, "hidden_act": "gelu"}']
)
def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="must"):
        from_hf_config(path)


def test_an_activation_that_is_given_takes_the_place_of_the_configs(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 4, "intermediate_size": 8, "hidden_act": "quick_gelu"}')
    result = run("explain", "--hf-config", str(path), "--activation", "gelu", "--m", "1", *CPU, "--json")
    assert json.loads(result.stdout)[0]["problem"]["activation"] == "gelu"


def test_what_is_tuned_is_what_a_call_with_packed_arrays_asks_for() -> None:
    tuned("3,5,7", "64,100,64")
    d = Dispatcher(Settings.from_environment())
    for m, n, k in ((3, 5, 7), (64, 100, 64)):
        a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
        assert d.explain(a, b, b).selection.origin is Origin.TUNED
    d.close()
    (explained,) = json.loads(run("explain", "8,32,16", *CPU, "--alignment", "4", "--json").stdout)
    assert explained["problem"]["alignment"] == 4


@pytest.mark.parametrize(
    "problem",
    [
        Problem(3, 5, 7, "float32", "kn", 4),
        Problem(8, 32, 16, "float16", "nk", 2),
        Problem(8, 32, 16, "bfloat16", math="fast"),
        Problem(8, 32, 16, "float32", precision="tf32"),
    ],
    ids=str,
)
def test_the_command_that_a_warning_names_means_the_same_problem(problem: Problem) -> None:
    (explained,) = json.loads(run("explain", *problem.options.split(), *CPU, "--json").stdout)
    assert Problem(**explained["problem"]) == problem


def test_shapes_come_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "shapes.txt"
    path.write_text("# ours\n8,32,16\n\n16,32,16  # the other\n")
    plans = json.loads(run("tune", "--shapes", str(path), "4,8,8", *CPU, "--dry-run", "--json").stdout)
    assert [plan["problem"].split()[0] for plan in plans] == ["4,8,8", "8,32,16", "16,32,16"]
    path.write_text("8,32,16\n8,32\n")
    assert "line 2" in run("tune", "--shapes", str(path), *CPU, expect=2).output
    path.write_text("# nothing\n")
    assert "got none" in run("tune", "--shapes", str(path), *CPU, expect=2).output
    assert "absent" in run("tune", "--shapes", str(tmp_path / "absent"), *CPU, expect=2).output
