"""Helm with the administrator's kubeconfig."""

import os
import subprocess
from pathlib import Path

from tests.e2e.rig.errors import RigError
from tests.e2e.rig.tools import REPOSITORY

CALL_S = 180.0


class Helm:
    """Helm, for releases of one namespace; paths of charts are those in the repository."""

    def __init__(self, program: str, kubeconfig: str, home: Path, namespace: str) -> None:
        self._command = [program, f"--kubeconfig={kubeconfig}", f"--namespace={namespace}"]
        folders = {f"HELM_{kind}_HOME": str(home) for kind in ("CACHE", "CONFIG", "DATA")}
        self._environment = os.environ | folders

    def __call__(self, *arguments: str) -> str:
        """Run `helm ARGUMENTS`; return its output.

        Raises:
            RigError: helm failed; the text is its own.
        """
        done = subprocess.run(
            [*self._command, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=CALL_S,
            env=self._environment,
            cwd=REPOSITORY,
        )
        if done.returncode != 0:
            raise RigError(f"helm {arguments[0]}: {done.stderr.strip()}")
        return done.stdout
