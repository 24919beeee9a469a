"""A pod of a simulated cluster, as a user requests it."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from metagpu.core.config.config import name_problem
from metagpu.sim.machine.bounds import check_duration, check_name, check_range
from metagpu.sim.machine.gpu import SimError

CONTAINER: Final = "main"
"""The name of a simulated pod's only container."""
SLEEP: Final = "sleep"
"""The program of a container that ends by itself, after so many seconds."""
MAX_DEVICES: Final = 1_000_000
"""Devices of a resource that one pod may request."""


class PodManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pod as a user requests it.

    Attributes:
        resources: the number of devices by resource name.
        seconds: after which the container ends by itself; `None` for never.
    """

    name: str
    resources: Mapping[str, int]
    namespace: str = "default"
    annotations: Mapping[str, str] = {}
    seconds: float | None = None

    def check(self) -> None:
        """Refuse what an API server would refuse.

        Raises:
            SimError: a name, a number or the duration is not valid; the error states the rule.
        """
        check_name("the pod", self.name)
        check_name("the namespace", self.namespace)
        for resource, count in self.resources.items():
            if problem := name_problem(resource):
                raise SimError(f"{resource!r} is not an extended resource: {problem}")
            check_range(f"the number of {resource}", count, 1, MAX_DEVICES)
        if self.seconds is not None:
            check_duration(self.seconds)

    def document(self) -> Mapping[str, Any]:
        """Return the Pod."""
        counts = {resource: str(count) for resource, count in self.resources.items()}
        seconds = "infinity" if self.seconds is None else f"{self.seconds:g}"
        container = {"command": [SLEEP, seconds], "resources": {"limits": counts}}
        metadata = {"name": self.name, "namespace": self.namespace}
        return {
            "kind": "Pod",
            "metadata": metadata | {"annotations": dict(self.annotations)},
            "spec": {"containers": [{"name": CONTAINER, **container}]},
        }
