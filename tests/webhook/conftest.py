"""Certificates for the tests of the webhook."""

from pathlib import Path

import pytest

from tests.webhook.rig import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return an authority that all tests share."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def folder(tmp_path: Path, authority: Authority) -> Path:
    """Return a folder with a good certificate."""
    authority.issue(tmp_path / "tls")
    return tmp_path / "tls"
