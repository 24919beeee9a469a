"""The configuration in force, applied to the GPUs of this host."""

import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from metagpu.agent import layout_manager
from metagpu.agent.layout_manager import Existing
from metagpu.core.config.config import Config
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.layout import Layout, build_layout
from metagpu.core.model.gpu import Gpu
from tests.rigs.agent import agent_at_work


async def test_a_layout_is_computed_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shares of a configuration are made in a thread: the kubelet is answered meanwhile."""
    threads: list[threading.Thread] = []

    def recorded(
        config: Config, gpus: Iterable[Gpu], injection: Injection, existing: Existing
    ) -> Layout:
        threads.append(threading.current_thread())
        return build_layout(config, gpus, injection, existing)

    monkeypatch.setattr(layout_manager, "build_layout", recorded)
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)

    assert threads
    assert threading.main_thread() not in threads
