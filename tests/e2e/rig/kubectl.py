"""The API server by kubectl with `-o json`."""

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tests.e2e.rig.errors import RigError
from tests.e2e.rig.waiting import wait_for

Document = dict[str, Any]
"""A Kubernetes object as JSON has it."""

CALL_S = 240.0
"""More than the longest wait that a command is told: kubectl's own error says more."""
NAMESPACE_S = 30.0


class Kubectl:
    """kubectl with the administrator's kubeconfig."""

    def __init__(self, program: str, kubeconfig: str, cache: str) -> None:
        self._command = [program, f"--kubeconfig={kubeconfig}", f"--cache-dir={cache}"]

    def __call__(self, *arguments: str, feed: str | None = None) -> str:
        """Run `kubectl ARGUMENTS`, with FEED on its standard input; return its output.

        Raises:
            RigError: kubectl failed; the text is its own.
        """
        command = [*self._command, *arguments]
        try:
            done = subprocess.run(
                command, input=feed, capture_output=True, text=True, check=False, timeout=CALL_S
            )
        except subprocess.TimeoutExpired as error:
            raise RigError(f"kubectl {' '.join(arguments)}: no answer in {CALL_S:g} s") from error
        if done.returncode != 0:
            raise RigError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, kind: str, name: str, namespace: str = "") -> Document:
        """Return one object.

        Raises:
            RigError: there is none, or the API server did not answer.
        """
        document: Document = json.loads(self("get", kind, name, *_in(namespace), "-o", "json"))
        return document

    def list(self, kind: str, namespace: str, *arguments: str) -> list[Document]:
        """Return all objects of a kind in a namespace, filtered by further arguments."""
        answer = self("get", kind, *_in(namespace), "-o", "json", *arguments)
        items: list[Document] = json.loads(answer)["items"]
        return items

    @contextmanager
    def watching(self, kind: str, name: str) -> Iterator[Callable[[], Sequence[Document]]]:
        """Watch an object; yield a function that returns every version since the start."""
        command = [*self._command, "get", kind, name, "--watch", "-o", "json"]
        with tempfile.TemporaryFile("a+") as output:
            watch = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output)

            def seen() -> Sequence[Document]:
                output.seek(0)
                return _documents(output.read())

            try:
                wait_for("the watch to begin", seen, within_s=CALL_S)
                yield seen
            finally:
                watch.kill()
                watch.wait()

    def apply(self, *manifests: str | Mapping[str, object]) -> None:
        """Create or change objects, given as YAML text or as documents, in one call."""
        texts = [m if isinstance(m, str) else json.dumps(m) for m in manifests]
        self("apply", "-f", "-", feed="\n---\n".join(texts))

    def create_namespace(self, name: str) -> None:
        """Create a namespace, and wait until pods can start in it."""
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        self.await_namespace(name)

    def await_namespace(self, name: str) -> None:
        """Wait until the controllers have created the objects that every pod mounts."""
        wait_for(
            f"namespace {name} to have what every pod mounts",
            lambda: (
                self.get("serviceaccount", "default", name)
                and self.get("configmap", "kube-root-ca.crt", name)
            ),
            within_s=NAMESPACE_S,
        )


def _documents(text: str) -> Sequence[Document]:
    """Parse one object after the other; the last may be incomplete."""
    decoder, found, at = json.JSONDecoder(), list[Document](), 0
    while (at := text.find("{", at)) >= 0:
        try:
            document, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            break
        found.append(document)
    return found


def _in(namespace: str) -> tuple[str, ...]:
    return (f"--namespace={namespace}",) if namespace else ()
