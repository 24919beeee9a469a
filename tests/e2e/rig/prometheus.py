"""Prometheus and promtool: those in PATH, or Debian's, unpacked into the cache, not installed."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.rig.errors import RigError
from tests.e2e.rig.go_programs import cache_root
from tests.e2e.rig.programs import Program, tail
from tests.e2e.rig.waiting import wait_for

PACKAGE = "prometheus"
START_S = 30.0
DOWNLOAD_S = 180
SCRAPE_S = 1


def provide(program: str) -> str:
    """Return the path of `prometheus` or `promtool`; download Debian's package if need be.

    Raises:
        RigError: this machine has neither the program nor Debian's archive.
    """
    if there := shutil.which(program):
        return there
    root = cache_root() / PACKAGE
    if not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=root.parent) as folder:
            _unpack(Path(folder)).rename(root)
    return str(root / "usr" / "bin" / program)


def _unpack(work: Path) -> Path:
    if shutil.which("apt-get") is None:
        raise RigError("there is no apt-get here to download Debian's prometheus")
    _run(["apt-get", "update", "-q"], work)
    # The download runs as root: apt's own download user may not enter a home folder.
    _run(["apt-get", "-o", "APT::Sandbox::User=root", "download", "-q", PACKAGE], work)
    [package] = work.glob("*.deb")
    _run(["dpkg-deb", "-x", str(package), str(work / "root")], work)
    return work / "root"


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=DOWNLOAD_S
    )
    if done.returncode != 0:
        raise RigError(f"`{' '.join(command)}` failed: {(done.stdout + done.stderr)[-500:]}")


def promtool(*arguments: str, feed: str | None = None) -> tuple[int, str]:
    """Run promtool; return its exit status and its output."""
    done = subprocess.run(
        [provide("promtool"), *arguments],
        input=feed,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


class Prometheus:
    """A running Prometheus.

    Attributes:
        port: the port of its API.
    """

    def __init__(self, port: int) -> None:
        self.port = port

    def query(self, expression: str) -> Sequence[Mapping[str, Any]]:
        """Return the series of an expression, now.

        Raises:
            RigError: the expression is wrong; the text is Prometheus' own.
        """
        return self._get("query", query=expression)["result"]  # type: ignore[no-any-return]

    def targets(self) -> Mapping[str, str]:
        """Return the last error of each target by its address, empty for a good scrape."""
        found = self._get("targets", state="active")["activeTargets"]
        return {
            document["scrapeUrl"]: document["lastError"] or document["health"] for document in found
        }

    def rules(self) -> Mapping[str, str]:
        """Return the state of each alert by its name."""
        groups = self._get("rules")["groups"]
        return {
            rule["name"]: rule.get("lastError") or rule["state"]
            for g in groups
            for rule in g["rules"]
        }

    def _get(self, call: str, **arguments: str) -> Any:  # noqa: ANN401 - JSON
        query = urllib.parse.urlencode(arguments)
        address = f"http://127.0.0.1:{self.port}/api/v1/{call}?{query}"
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise RigError(error.read().decode()) from error


_OWN_POD = {"namespace": "kube-system", "pod": "metagpu-1", "container": "metagpu"}
"""Labels of the scraped pod, as a PodMonitor adds them."""


@contextmanager
def prometheus_of(folder: Path, addresses: Mapping[str, str], rules: Path) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes addresses by path, until the block ends.

    It scrapes as by the chart's PodMonitor: the names of dcgm-exporter without `honorLabels`.

    Args:
        folder: an empty folder for its data.
        addresses: a path, such as `/metrics` -> host and port.
        rules: a file of rules.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    scrapes = [
        {
            "job_name": f"kube-system/metagpu{path.replace('/', '-')}",
            "metrics_path": path,
            "honor_labels": path != "/dcgm",
            "static_configs": [{"targets": [address], "labels": {"node": "gpu-1", **_OWN_POD}}],
        }
        for path, address in addresses.items()
    ]
    times = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config = folder / "prometheus.yml"
    config.write_text(
        yaml.safe_dump({"global": times, "rule_files": [str(rules)], "scrape_configs": scrapes})
    )
    command = [provide("prometheus"), f"--config.file={config}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    program = Program(PACKAGE, command, logs=folder, pids=folder, environment=dict(os.environ))
    program.start()
    prometheus = Prometheus(port)

    def scrapes_all() -> bool:
        program.require_alive()
        try:
            states = prometheus.targets()
        except OSError as error:
            raise RigError(f"{error}: {tail(program.log)}") from error
        if set(states.values()) != {"up"}:
            raise RigError(f"the targets are {states}")
        return len(states) == len(addresses)

    try:
        wait_for("Prometheus to scrape", scrapes_all, within_s=START_S)
        yield prometheus
    finally:
        program.stop()
