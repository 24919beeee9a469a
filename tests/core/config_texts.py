"""Configurations for tests, and the words in which they are refused."""

from collections.abc import Sequence
from typing import ClassVar

import pytest

from metagpu.backends.fraction import FractionOptions
from metagpu.core.backend import Backend, Options
from metagpu.core.config import parse
from metagpu.core.errors import ConfigError
from metagpu.core.gpu import Gpu
from metagpu.core.grant import Grant
from metagpu.core.injection import Injection
from metagpu.core.model import ResourceName, Share
from metagpu.core.snapshot import Snapshot
from tests.build import BACKENDS, pool


class WholeBackend(Backend):
    """A second backend, so that tests can have two."""

    name: ClassVar[str] = "whole"
    options_type: ClassVar[type[Options]] = FractionOptions

    def __init__(self, resource: str) -> None:
        self.resource = ResourceName(resource)

    @classmethod
    def configured(cls, options: Options, injection: Injection) -> "WholeBackend":  # noqa: ARG003
        """Take the resource's name and nothing else."""
        assert isinstance(options, FractionOptions)
        return cls(options.resource)

    @property
    def resources(self) -> tuple[ResourceName, ...]:
        """The one resource."""
        return (self.resource,)

    def shares(self, gpu: Gpu) -> Sequence[Share]:  # noqa: ARG002
        """Cut nothing."""
        return ()

    async def grant(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:  # noqa: ARG002
        """Give nothing."""
        return Grant()


TWO_BACKENDS: dict[str, type[Backend]] = {**BACKENDS, "whole": WholeBackend}


def refusal(text: str) -> str:
    """Give the message with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml", TWO_BACKENDS)
    return str(caught.value)


HEAD = "version: metagpu/v1\n"
POOL = pool("sharesPerGpu: 10")


def backend(options: str) -> str:
    """Write a pool whose backend says this, from line 5 on."""
    return f"{HEAD}pools:\n  - name: a\n    backends:\n      - {options}\n"


def selecting(gpus: str) -> str:
    """Write a pool that selects GPUs so, in line 4."""
    return f"{HEAD}pools:\n  - name: a\n    gpus: {gpus}\n    backends: [{{backend: fraction}}]\n"
