"""How the programs of a node are, for those who wait, and for a person when it went wrong."""

import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from tests.e2e.rig import settings
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Kubectl
from tests.e2e.rig.programs import tail

LINES = 40
QUESTIONS = (("pods", "-o=wide"), ("events", "--sort-by=.lastTimestamp"))


def kubelet_is_healthy() -> bool:
    """Whether the kubelet says so itself."""
    url = f"http://{settings.LOOPBACK}:{settings.KUBELET_HEALTH_PORT}/healthz"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def told(kubectl: Kubectl) -> str:
    """What the API server says of pods and events."""
    parts = []
    for question in QUESTIONS:
        try:
            answer = kubectl("get", *question, "--all-namespaces")
        except RigError as error:
            answer = str(error)
        last = "\n".join(answer.splitlines()[-LINES:])
        parts.append(f"--- {question[0]}\n{last}")
    return "\n".join(parts)


def logged(folder: Path, names: Iterable[str]) -> str:
    """The ends of these programs' logs."""
    return "\n".join(f"--- {name}.log\n{tail(folder / f'{name}.log')}" for name in names)
