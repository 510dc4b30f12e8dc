from __future__ import annotations

import getpass
import socket
from pathlib import Path

import pytest
import torch

from needlepoint.verify.schema.environment import collect_environment, cpu_name


def test_environment_says_versions_and_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    found = collect_environment()

    assert found.torch == torch.__version__
    assert found.threads == torch.get_num_threads()
    assert found.cpu
    assert (found.device, found.world) == ("cpu", 1)


def test_environment_names_no_host_user_or_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "5.4.0-host-name")
    text = collect_environment().model_dump_json()

    assert socket.gethostname() not in text
    assert f'"{getpass.getuser()}"' not in text
    assert str(Path.home()) not in text
    assert "host-name" not in text


def test_world_size_of_torchrun_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")

    assert collect_environment("Example GPU").world == 8


@pytest.mark.parametrize("size", ["0", "-1", "many", ""])
def test_wrong_world_size_is_named(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)

    with pytest.raises(ValueError, match=f"WORLD_SIZE '{size}'"):
        collect_environment()


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("processor\t: 0\nmodel name\t: Example CPU @ 2.0GHz\nmodel name\t: Other\n", True),
        ("processor\t: 0\nmodel name\t: \n", False),
        (None, False),
    ],
)
def test_processor_name_comes_from_the_kernel_or_the_architecture(
    content: str | None, name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if content is not None:
        cpuinfo.write_text(content)
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "arm64")

    expected = "Example CPU @ 2.0GHz" if name else "arm64"
    assert cpu_name(cpuinfo) == expected
