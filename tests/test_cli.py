"""The command line: what it prints, what it stores, and exit codes that a script can rely on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from autodispatch import cli
from autodispatch.benchmark import FINAL_ROUNDS
from autodispatch.device import cpu_device
from autodispatch.dispatcher import Dispatcher
from autodispatch.errors import AutodispatchError
from autodispatch.problem import Problem
from autodispatch.report import plan, plan_table
from autodispatch.runner import LocalRunner
from autodispatch.settings import Settings
from autodispatch.store import TuningStore
from autodispatch.tuner import Tuner
from autodispatch.variants import VARIANTS, Registry
from tests.fakes import H200, FakeWorkbench

RUNNER = CliRunner()
CPU = ["--device", "cpu"]


def run(*words: str, expect: int = 0) -> Any:
    result = RUNNER.invoke(cli.app, list(words), env={"COLUMNS": "200"})
    assert result.exit_code == expect, result.output + str(result.exception)
    return result


def tuned(*shapes: str) -> None:
    run("tune", *shapes, *CPU, "--quiet")


def test_tune_stores_and_list_and_explain_show_it() -> None:
    result = run("tune", "8,32,16", "16,32,16", *CPU)
    assert "[2/2] 16,32,16 float32 kn:" in result.output
    listed = run("list").output
    assert "8,32,16 float32 kn" in listed
    assert "user" in listed
    rows = json.loads(run("list", "--json").stdout)
    assert [(r["m"], r["n"], r["k"], r["stale"], r["layer"]) for r in rows] == [
        (8, 32, 16, False, "user"),
        (16, 32, 16, False, "user"),
    ]
    assert all(r["median_us"] > 0 and r["gain_over_other_path"] > 0 for r in rows)
    assert "tuned: measured" in run("explain", "8,32,16", *CPU).output
    (explained,) = json.loads(run("explain", "9,32,16", *CPU, "--json").stdout)
    assert explained["origin"] == "bucket"
    assert explained["alternatives"]


def test_list_shows_every_measurement_where_asked() -> None:
    tuned("8,32,16")
    assert "cpu_split" in run("list", "--measurements").output
    records = json.loads(run("list", "--measurements", "--json").stdout)
    assert {r["stage"] for r in records} == {"screen", "final"}
    assert max(len(r["samples_us"]) for r in records if r["stage"] == "final") == FINAL_ROUNDS


def test_an_empty_list_says_what_to_run() -> None:
    assert "autodispatch tune M,N,K" in run("list").output
    assert json.loads(run("list", "--json").stdout) == []


def test_bench_times_all_against_all_and_stores_nothing(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    result = run("bench", "8,32,16", *CPU, "--rounds", "2", "--output", str(output))
    assert "cpu_split" in result.output
    assert "vs library" in result.output
    content = json.loads(output.read_text())
    (survey,) = content["surveys"]
    assert survey["library"] == "cpu_split"
    assert {r["status"] for r in survey["results"]} == {"ok"}
    assert {r["path"] for r in survey["results"]} == {"split", "fused"}
    assert json.loads(run("list", "--json").stdout) == []


def test_full_bench_times_what_no_tuning_would_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autodispatch.tuner._QUICK_PER_PATH", 0)
    monkeypatch.setattr("autodispatch.tuner._FULL_WITHIN", 0.0)

    def timed(*options: str) -> int:
        printed = json.loads(run("bench", "8,32,16", *CPU, "--rounds", "1", *options, "--json").stdout)
        return len(printed["surveys"][0]["results"])

    assert (timed(), timed("--full")) == (2, 10)


def test_bench_of_some_variants_has_the_library_beside_them() -> None:
    printed = json.loads(run("bench", "8,32,16", *CPU, "--rounds", "1", "--variant", "cpu_fused", "--json").stdout)
    assert {r["variant"] for r in printed["surveys"][0]["results"]} == {"cpu_fused", "cpu_split"}
    printed = json.loads(run("bench", "8,32,16", *CPU, "--rounds", "1", "--variant", "cpu_split", "--json").stdout)
    assert {r["variant"] for r in printed["surveys"][0]["results"]} == {"cpu_split"}
    assert "cpu_fused" in run("bench", "8,32,16", *CPU, "--variant", "nobody", expect=2).output


@pytest.mark.parametrize("name", ["x.jsonl", "x.db"])
def test_export_and_import_carry_the_records(tmp_path: Path, name: str) -> None:
    tuned("8,32,16")
    path = tmp_path / name
    assert "records written" in run("export", str(path)).output
    other = str(tmp_path / "other.db")
    assert "kept: 0; rejected: 0" in run("import", str(path), "--database", other).output
    assert "added: nothing" in run("import", str(path), "--database", other).output
    assert json.loads(run("list", "--json", "--database", other).stdout)[0]["m"] == 8


def test_an_export_onto_itself_and_of_unknown_kinds_is_wrong_usage(tmp_path: Path) -> None:
    tuned("8,32,16")
    own = str(Settings.from_environment().database)
    assert "must not be the database" in run("export", own, "--m", "16", expect=2).output.replace("\n", " ")
    assert TuningStore(Path(own)).counts()["decisions"] == 1
    run("export", str(tmp_path / "x.jsonl"), "--dtype", "bf16", expect=2)


def test_a_dry_run_of_an_import_makes_no_database(tmp_path: Path) -> None:
    tuned("8,32,16")
    run("export", str(tmp_path / "x.jsonl"))
    other = tmp_path / "folder" / "other.db"
    assert "would be added" in run("import", str(tmp_path / "x.jsonl"), "--dry-run", "--database", str(other)).output
    assert not other.parent.exists()


def test_info_names_the_device_and_what_can_be_built() -> None:
    content = json.loads(run("info", *CPU, "--json").stdout)
    assert content["device"]["kind"] == "cpu"
    assert content["variants"]["cpu_fused"]["float32"] == "yes"
    assert set(content["variants"]) == {"cpu_fused", "cpu_split"}
    assert content["key"] in run("info", *CPU).output


@pytest.mark.parametrize(
    "words",
    [
        ["tune"],
        ["tune", "8,32"],
        ["tune", "8,32,x"],
        ["tune", "0,32,16"],
        ["tune", "--m", "1,2"],
        ["tune", "8,32,16", "--dtype", "float64"],
        ["tune", "8,32,16", "--layout", "mn"],
        ["tune", "8,32,16", "--effort", "some"],
        ["tune", "8,32,16", "--device", "tpu"],
        ["tune", "--hf-config", "absent.json"],
        ["bench", "8,32,16", "--rounds", "0"],
        ["export", "x.csv"],
        ["nonsense"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(words: list[str]) -> None:
    run(*words, *(CPU if "--device" not in words and words[0] in ("tune", "bench") else []), expect=2)


def test_export_without_a_database_is_wrong_usage(tmp_path: Path) -> None:
    result = run("export", str(tmp_path / "x.jsonl"), expect=2)
    assert "there is no tuning database" in result.output


def test_a_bad_setting_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTODISPATCH_MODE", "sometimes")
    assert "AUTODISPATCH_MODE must be one of" in run("list", expect=2).output


def test_a_failure_exits_with_1_and_a_message(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("nothing")
    words = [sys.executable, "-m", "autodispatch", "import", str(bad)]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "StoreError" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_interruption_exits_with_130_and_keeps_what_was_finished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from autodispatch.tuner import Tuner

    tune = Tuner.tune

    def interrupted_at_the_second(self: Tuner, problem: Any, **options: Any) -> Any:
        if problem.m == 16:
            raise KeyboardInterrupt
        return tune(self, problem, **options)

    monkeypatch.setattr(Tuner, "tune", interrupted_at_the_second)
    monkeypatch.setattr(sys, "argv", ["autodispatch", "tune", "8,32,16", "16,32,16", *CPU])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 130
    assert TuningStore(tmp_path / "tuning.db").counts()["decisions"] == 1


def test_a_budget_is_for_all_problems_and_more_of_it_tunes_what_was_left() -> None:
    command = ("tune", "8,32,16", "16,32,16", "24,32,16", *CPU, "--budget", "0")
    first = run(*command)
    assert "the budget is used up, 2 of 3 problems are left" in first.output.replace("\n", " ")
    assert TuningStore(Settings.from_environment().database).counts()["decisions"] == 1
    assert "left" not in run(*command[:-2], "--budget", "1000").output
    assert TuningStore(Settings.from_environment().database).counts()["decisions"] == 3


def test_a_problem_that_fails_does_not_take_the_step_that_a_used_up_budget_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Tuner.tune

    def failing(self: Tuner, problem: Problem, **options: Any) -> Any:
        if problem.m == 8:
            raise AutodispatchError("as the test says")
        return whole(self, problem, **options)

    monkeypatch.setattr(Tuner, "tune", failing)
    result = run("tune", "8,32,16", "16,32,16", "24,32,16", *CPU, "--budget", "0", expect=1)
    assert "the budget is used up, 1 of 3 problems are left" in result.output.replace("\n", " ")
    assert "tuned: measured" in run("explain", "16,32,16", *CPU).output


def test_a_budget_goes_to_what_is_not_tuned_yet() -> None:
    run("tune", "8,32,16", *CPU)
    command = ("tune", "8,32,16", "16,32,16", "24,32,16", *CPU, "--budget", "0", "--json")
    for complete in (["8,32,16"], ["8,32,16"]):  # first those without any decision
        found = json.loads(run(*command).stdout)
        assert [row["problem"].split()[0] for row in found if row["complete"]] == complete
    assert [row["problem"].split()[0] for row in json.loads(run("list", "--json").stdout)] == [
        "8,32,16",
        "16,32,16",
        "24,32,16",
    ]


def test_demo_tunes_dispatches_checks_and_explains() -> None:
    result = run("demo", *CPU)
    assert result.output.count("tuned: measured") == 3
    assert result.output.count("against float64") == 3
    assert "the best of the other path" in result.output


def test_help_is_there_for_every_command() -> None:
    for command in ("demo", "info", "tune", "list", "explain", "bench", "export", "import"):
        assert "Usage" in run(command, "--help").output


def test_results_that_could_not_be_stored_are_an_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way of a folder")
    words = [sys.executable, "-m", "autodispatch", "tune", "8,8,8", *CPU, "--database", str(blocked / "t.db")]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "StoreError" in result.stderr
    words = [sys.executable, "-m", "autodispatch", "export", str(tmp_path / "absent" / "x.jsonl")]
    tuned("8,32,16")
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    run("bench", "8,8,8", *CPU, "--output", str(tmp_path / "absent" / "x.json"), expect=2)


def test_brackets_in_foreign_text_are_no_markup(tmp_path: Path) -> None:
    tuned("8,32,16")
    path = tmp_path / "x.jsonl"
    run("export", str(path))
    path.write_text(path.read_text().replace('{"record":"device",', '{"record":"device","[/b]":1,'))
    assert "[/b]" in run("import", str(path), "--database", str(tmp_path / "other.db")).output
    odd = tmp_path / "[" / "b]"
    odd.mkdir(parents=True)
    assert "[/b]" in run("export", str(odd / "x.jsonl")).output


def test_tune_json_gives_the_decisions_of_the_shapes_it_was_given() -> None:
    tuned("3,8,8")
    rows = json.loads(run("tune", "8,32,16", *CPU, "--json").stdout)
    assert [row["problem"] for row in rows] == [row["problem"] for row in rows if "8,32,16" in row["problem"]]
    assert len(rows) == 1
    assert rows[0]["complete"] is True
    assert rows[0]["ties"] >= 1


def test_a_dry_run_lists_what_would_be_tried_and_measures_nothing(tmp_path: Path) -> None:
    result = run("tune", "8,32,16", *CPU, "--dry-run")
    assert "cpu_split" in result.output
    assert "predicted us" in result.output
    (plan,) = json.loads(run("tune", "64,4096,4096", *CPU, "--dry-run", "--json").stdout)
    assert plan["candidates"][0]["predicted_us"] > 0
    assert plan["not_legal"] == plan["cannot_serve"] == {}
    assert TuningStore(tmp_path / "tuning.db").counts()["measurements"] == 0


def test_a_plan_says_why_the_rest_would_not_be_tried() -> None:
    problem = Problem(128, 8960, 1536, "bfloat16")
    chosen = Tuner(TuningStore(), LocalRunner(FakeWorkbench(H200))).shortlist(problem, "quick")
    content = plan(problem, chosen, Registry(), H200, "quick")
    legal = Registry().candidates(problem, H200)
    left = [sum(content[reason].values()) for reason in ("slower_by_the_model", "of_tiles_that_are_tried")]
    assert all(left) and len(chosen) + sum(left) == len(list(legal))
    assert "fused_gemv" in content["cannot_serve"]
    assert any(message.startswith("a tile of all rows") for message in content["not_legal"]["fused_decode"])
    for name, counts in content["not_legal"].items():
        space = VARIANTS[name].space
        sound = [c for c in space if not any(r.is_fixed and not r.holds(c, problem, H200) for r in space.restrictions)]
        assert sum(counts.values()) == len(sound) - len(list(space.legal(problem, H200)))
    caption = plan_table(content).caption
    assert isinstance(caption, str)
    assert "slower by the model: " in caption and "more of tiles that are tried: " in caption
    assert "fused_gemv needs " in caption and "do not)" in caption


def test_a_plan_of_full_effort_leaves_out_what_is_slower_by_the_model_alone() -> None:
    problem = Problem(1024, 8960, 1536, "bfloat16", "nk")
    chosen = Tuner(TuningStore(), LocalRunner(FakeWorkbench(H200))).shortlist(problem, "full")
    content = plan(problem, chosen, Registry(), H200, "full")
    slower = content["slower_by_the_model"]
    assert slower["fused_mma"] > 0 and content["of_tiles_that_are_tried"] == {}
    assert len(chosen) + sum(slower.values()) == len(list(Registry().candidates(problem, H200)))


def test_misses_of_calls_are_tuned_and_then_are_none(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s).astype(np.float32) for s in ((8, 16), (16, 32), (16, 32))]
    dispatcher = Dispatcher(Settings(tmp_path / "tuning.db", record_misses=True))
    dispatcher.run(*arrays)
    dispatcher.close()
    assert len(json.loads(run("tune", "--misses", *CPU, "--json").stdout)) == 1
    assert json.loads(run("tune", "--misses", *CPU, "--json").stdout) == []


def test_without_isolation_the_result_is_the_same() -> None:
    run("tune", "8,32,16", *CPU, "--no-isolate", "--quiet")
    assert "tuned: measured" in run("explain", "8,32,16", *CPU).output


def test_tune_in_a_program(tmp_path: Path) -> None:
    import autodispatch

    heard: list[Any] = []
    (decision,) = autodispatch.tune(
        [Problem(8, 32, 16, "float32")],
        device=cpu_device(),
        database=tmp_path / "mine.db",
        isolate=False,
        listener=heard.append,
    )
    assert decision.ties
    assert heard[-1].record.id == decision.leader
