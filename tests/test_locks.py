"""Locks between processes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from autodispatch.locks import timing_on


def test_two_processes_do_not_time_on_one_gpu_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = "from autodispatch.locks import timing_on\nwith timing_on('GPU-1'): print('mine', flush=True)"
    with timing_on("GPU-1"):
        other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.append(other.stdout.readline()))  # type: ignore[union-attr]
        reader.start()
        reader.join(1.5)
        assert not said
        with timing_on("GPU-2"), timing_on(""):
            pass  # another GPU, or the processor
    reader.join(10)
    assert said == ["mine\n"]
    assert other.wait(10) == 0


def test_a_process_that_is_killed_gives_the_gpu_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = "import time\nfrom autodispatch.locks import timing_on\n"
    code += "with timing_on('GPU-1'):\n  print(flush=True)\n  time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    other.kill()
    other.wait()
    with timing_on("GPU-1"):
        pass


def test_a_lock_that_another_user_made_serves_and_a_link_is_never_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings_logged: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with timing_on("GPU-1"):
        pass
    lock = tmp_path / "autodispatch-locks" / "GPU-1.lock"
    lock.chmod(0o444)
    with timing_on("GPU-1"):
        pass
    assert not warnings_logged.records
    victim = tmp_path / "victim"
    victim.write_text("precious")
    lock.unlink()
    lock.symlink_to(victim)
    with timing_on("GPU-1"):
        pass
    assert victim.read_text() == "precious"
    assert "going on without" in warnings_logged.text
