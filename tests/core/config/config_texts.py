"""Configurations for tests, and the messages that refuse them."""

from collections.abc import Sequence
from typing import ClassVar

import pytest

from metagpu.backends.fraction.backend import FractionOptions
from metagpu.core.config.config import parse
from metagpu.core.config.errors import ConfigError
from metagpu.core.contracts.backend import Backend, Options
from metagpu.core.grants.grant import Grant
from metagpu.core.grants.injection import Injection
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import ResourceName, Share
from metagpu.core.model.snapshot import Snapshot
from tests.rigs.build import BACKENDS, pool


class WholeBackend(Backend):
    """A second backend, so that tests can have two."""

    name: ClassVar[str] = "whole"
    options_type: ClassVar[type[Options]] = FractionOptions

    def __init__(self, resource: str) -> None:
        self.resource = ResourceName(resource)

    @classmethod
    def configured(cls, options: Options, injection: Injection) -> "WholeBackend":  # noqa: ARG003
        """Read the resource's name alone."""
        assert isinstance(options, FractionOptions)
        return cls(options.resource)

    @property
    def resources(self) -> tuple[ResourceName, ...]:
        """The one resource."""
        return (self.resource,)

    def shares(self, gpu: Gpu) -> Sequence[Share]:  # noqa: ARG002
        """Return no shares."""
        return ()

    async def grant(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:  # noqa: ARG002
        """Return nothing."""
        return Grant()


TWO_BACKENDS: dict[str, type[Backend]] = {**BACKENDS, "whole": WholeBackend}


def refusal(text: str) -> str:
    """Return the message with which a configuration is rejected."""
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml", TWO_BACKENDS)
    return str(caught.value)


HEAD = "version: metagpu/v1\n"
POOL = pool("sharesPerGpu: 10")


def backend(options: str) -> str:
    """Write a pool whose backend has this text, from line 5 on."""
    return f"{HEAD}pools:\n  - name: a\n    backends:\n      - {options}\n"


def selecting(gpus: str) -> str:
    """Write a pool with this selector, in line 4."""
    return f"{HEAD}pools:\n  - name: a\n    gpus: {gpus}\n    backends: [{{backend: fraction}}]\n"
