"""A daemon that fails to take a node over tries again, ever later."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from metagpu.agent.tenure import TenureEnd
from metagpu.cli import metagpu


def test_failed_takeovers_are_repeated_ever_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delay doubles from 10 s to 10 min."""
    ends = [*[TenureEnd.FAILED] * 8, TenureEnd.STOPPED]
    built: list[SimpleNamespace] = []

    async def run() -> None:
        pass

    def build(*_: object, **__: object) -> SimpleNamespace:
        tenure = SimpleNamespace(end=ends[len(built)])
        driver = SimpleNamespace(has_threads=False)
        built.append(SimpleNamespace(run=run, tenure=tenure, driver=driver))
        return built[-1]

    monkeypatch.setattr(metagpu, "_agent", build)
    folders = ["--kubelet-dir", str(tmp_path), "--run-dir", str(tmp_path)]
    assert metagpu.main(["run", "--simulate", "a100-40gb:1", "--take-over", *folders]) == 0
    assert [it.asks_after for it in built] == [0, 10, 20, 40, 80, 160, 320, 600, 600]
