"""Prometheus and promtool: those in PATH, or Debian's, unpacked into the cache, not installed."""

import json
import os
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.rig import debian
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.programs import Program, tail
from tests.e2e.rig.waiting import wait_for

PACKAGE = "prometheus"
START_S = 30.0
SCRAPE_S = 1


def provide(program: str) -> str:
    """Return the path of `prometheus` or `promtool`.

    Raises:
        RigError: this machine has neither the program nor Debian's archive.
    """
    return debian.provide(program, PACKAGE)


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


def backfill(folder: Path, series: Mapping[str, Iterable[tuple[float, float]]]) -> None:
    """Write samples of past hours into the data of a Prometheus that does not run yet.

    Args:
        folder: as for `prometheus_of`.
        series: a name with its labels -> times in seconds and values.

    Raises:
        RigError: promtool does not take them.
    """
    families: dict[str, list[str]] = {}
    for name, samples in series.items():
        lines = families.setdefault(name.partition("{")[0], [])
        lines += [f"{name} {value} {when:.3f}" for when, value in samples]
    text = []
    for family, lines in families.items():
        kind = "counter" if family.endswith("_total") else "gauge"
        text += [f"# TYPE {family.removesuffix('_total')} {kind}", *lines]
    file = folder / "samples.txt"
    file.write_text("\n".join([*text, "# EOF\n"]))
    status, output = promtool(
        "tsdb", "create-blocks-from", "openmetrics", str(file), str(folder / "data")
    )
    if status != 0:
        raise RigError(output)


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
        if set(states.values()) - {"up"}:
            raise RigError(f"the targets are {states}")
        return len(states) == len(addresses)

    try:
        wait_for("Prometheus to scrape", scrapes_all, within_s=START_S)
        yield prometheus
    finally:
        program.stop()
