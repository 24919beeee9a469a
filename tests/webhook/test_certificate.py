"""The certificate in force: exchanged while the webhook serves, never by a worse one."""

import asyncio
import ssl
import time
from pathlib import Path

import aiohttp
import pytest
import structlog
from anyio import to_thread

from metagpu.webhook.certificate import ServingCertificate
from tests.rigs.waiting import becomes
from tests.webhook.rig import NAME, Authority, pod, review, webhook_at_work

DAY = 86_400.0
BODY = review(pod({"nvidia.com/gpumem": "8000"}))


def mounted(folder: Path, source: Path, name: str) -> None:
    """Replace the files of a folder as the kubelet does with a Secret: by a link to a folder."""
    folder.mkdir(exist_ok=True)
    source.rename(folder / name)
    fresh = folder / "..data_tmp"
    fresh.symlink_to(name)
    fresh.rename(folder / "..data")
    for file in ("tls.crt", "tls.key"):
        if not (folder / file).is_symlink():
            (folder / file).symlink_to(f"..data/{file}")


async def test_a_new_certificate_serves_new_connections(
    tmp_path: Path, authority: Authority
) -> None:
    """A renewed Secret is in force without a restart, and no request is lost meanwhile."""
    authority.issue(tmp_path / "first", days=7)
    authority.issue(tmp_path / "second", days=30)
    mounted(tmp_path / "tls", tmp_path / "first", "..1")

    async with webhook_at_work(tmp_path / "tls", authority) as webhook:
        before = webhook.certificate.expires
        await webhook.review(BODY)
        mounted(tmp_path / "tls", tmp_path / "second", "..2")
        await becomes(lambda: webhook.certificate.expires != before)
        await webhook.review(BODY)  # on the connection that was open
        _, writer = await asyncio.open_connection(
            "127.0.0.1", webhook.server.port, ssl=webhook.trust, server_hostname=NAME
        )
        shown = writer.get_extra_info("peercert")
        writer.transport.abort()

    assert ssl.cert_time_to_seconds(shown["notAfter"]) == webhook.certificate.expires
    assert webhook.certificate.expires - time.time() == pytest.approx(30 * DAY, abs=DAY)


@pytest.mark.parametrize("fault", ["expired", "other key", "no file", "no certificate"])
async def test_a_bad_pair_changes_nothing(folder: Path, authority: Authority, fault: str) -> None:
    """The last good certificate stays in force, one line of the log says why, and only one."""
    certificate = ServingCertificate(folder)
    await certificate.reload()
    before = certificate.expires

    def spoil() -> None:
        if fault == "expired":
            authority.issue(folder, days=-1)
        elif fault == "other key":
            authority.issue(folder.parent / "other")
            (folder.parent / "other" / "tls.key").replace(folder / "tls.key")
        elif fault == "no file":
            (folder / "tls.crt").unlink()
        else:
            (folder / "tls.crt").write_text("no certificate")

    await to_thread.run_sync(spoil)
    with structlog.testing.capture_logs() as logs:
        await certificate.reload()
        await certificate.reload()

    assert [it["event"] for it in logs] == ["certificate rejected"]
    assert str(folder) in certificate.error
    assert certificate.expires == before
    assert certificate.problem == ""


async def test_an_expired_certificate_is_a_problem(folder: Path) -> None:
    """A webhook whose certificate has expired is not ready: no client would trust it."""
    now = time.time()
    certificate = ServingCertificate(folder, clock=lambda: now)
    assert "no certificate" in certificate.problem
    await certificate.reload()
    assert certificate.problem == ""
    now += 8 * DAY
    assert "expired" in certificate.problem


async def test_without_a_certificate_no_handshake_succeeds(
    tmp_path: Path, authority: Authority
) -> None:
    """Before the first good pair clients get an alert of TLS; with it they get their answer."""
    (tmp_path / "tls").mkdir()
    async with webhook_at_work(tmp_path / "tls", authority) as webhook:
        with pytest.raises(aiohttp.ClientConnectorError):
            await webhook.review(BODY)
        await to_thread.run_sync(authority.issue, tmp_path / "tls")
        await becomes(lambda: webhook.certificate.expires)
        await webhook.review(BODY)
