"""The state of a node's programs, for waiting functions and for reports of failures."""

import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from tests.e2e.rig import settings
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Kubectl
from tests.e2e.rig.programs import tail

LINES = 40
QUERIES = (("pods", "-o=wide"), ("events", "--sort-by=.lastTimestamp"))


def kubelet_is_healthy() -> bool:
    """Return whether the kubelet's health endpoint answers 200."""
    url = f"http://{settings.LOOPBACK}:{settings.KUBELET_HEALTH_PORT}/healthz"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def describe_cluster(kubectl: Kubectl) -> str:
    """Return the pods and Events of the API server, as text."""
    parts = []
    for query in QUERIES:
        try:
            answer = kubectl("get", *query, "--all-namespaces")
        except RigError as error:
            answer = str(error)
        last = "\n".join(answer.splitlines()[-LINES:])
        parts.append(f"--- {query[0]}\n{last}")
    return "\n".join(parts)


def describe_logs(folder: Path, names: Iterable[str]) -> str:
    """Return the ends of these programs' logs."""
    return "\n".join(f"--- {name}.log\n{tail(folder / f'{name}.log')}" for name in names)
