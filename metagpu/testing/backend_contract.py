"""The contract suite of a backend: a base class for a class of tests.

    class TestStripes(BackendContract):
        backend = StripesBackend

pytest collects the inherited tests. The suite itself imports no test framework.
"""

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import anyio
from msgspec.structs import replace

from metagpu.core.config.config import parse
from metagpu.core.config.errors import ConfigError
from metagpu.core.contracts.backend import Backend, Options, installed_backends
from metagpu.core.contracts.capabilities import (
    Provisions,
    members_without_effect,
    no_shares_reason,
)
from metagpu.core.grants.grant import Grant
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.checks import ID_LIMIT
from metagpu.core.layout.layout import Layout, build_layout
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import ResourceName, Share
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.state.facts import GpusFound
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from metagpu.testing.node import (
    NVML_DEADLINE,
    BackendRig,
    one_pool,
    report_no_leases,
    run_backends,
    snapshot_after,
)

_ID: Final = re.compile(r"GPU-[0-9a-f-]{36}(::[\w.+@-]+)?")
"""A whole GPU, or one slot of it: characters that are legal in CDI names and file names too."""
_RESOURCE: Final = re.compile(r"[a-z0-9.-]+\.[a-z]+/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


class BackendContract:
    """The checks that each backend passes; a subclass names the backend.

    Attributes:
        backend: the class under test.
        options: keys of the backend's entry in a pool, as the configuration spells them.
        refused: such keys that the backend refuses, each set alone.
        gpu_models: the GPUs of the simulated node, as for `--simulate`.
        mig_enabled: whether MIG mode is on.
    """

    backend: ClassVar[type[Backend]]
    options: ClassVar[Mapping[str, Any]] = {}
    refused: ClassVar[Sequence[Mapping[str, Any]]] = ()
    gpu_models: ClassVar[str] = "a100-40gb:2"
    mig_enabled: ClassVar[bool] = False

    # --- configuration ----------------------------------------------------------------------------

    def test_the_entry_point_names_the_backend(self) -> None:
        """Metagpu finds the backend by its name under the entry-point group."""
        found = installed_backends().get(self.backend.name)
        _require(found is self.backend, f"the entry point {self.backend.name!r} is {found}")

    def test_unknown_options_are_refused(self) -> None:
        """The configuration names the file and the key that no option has."""
        self._refusal({**self.options, "noSuchOption": 1}, names="noSuchOption")

    def test_wrong_options_are_refused(self) -> None:
        """The configuration refuses each set of `refused`, and names file and place."""
        for options in self.refused:
            self._refusal(options, names="pools[0].backends[0]")

    def test_options_have_their_own_type(self) -> None:
        """The options are a subclass of `Options`."""
        kind = self.backend.options_type
        _require(issubclass(kind, Options), f"options_type is {kind}, no subclass of Options")

    def test_abilities_have_their_classes(self) -> None:
        """Each member of an optional ability comes with the ability's class."""
        idle = members_without_effect(self.backend)
        _require(not idle, f"{self.backend.__name__}: {', '.join(idle)}")

    # --- shares -----------------------------------------------------------------------------------

    def test_resources_are_legal(self) -> None:
        """Each resource name is one that Kubernetes accepts, whatever GPUs there are."""
        backends = set(self._layout([]).backends.values())
        _require(bool(backends), "the backend offers no resource name")
        [backend] = backends
        for name in backend.resources:
            _require(bool(_RESOURCE.fullmatch(name)), f"{name!r} is not a legal resource name")

    def test_ids_are_legal_and_unique(self) -> None:
        """Each id names its GPU and one slot, in at most 63 legal characters, once."""
        ids = [share.id for share in self._shares()]
        _require(bool(ids), "the GPUs of `gpu_models` have no shares")
        _require(len(set(ids)) == len(ids), "two shares have the same id")
        for share in self._shares():
            _require(bool(_ID.fullmatch(share.id)), f"{share.id!r} is not a legal id")
            _require(share.id.partition("::")[0] == share.gpu, f"{share.id} is of {share.gpu}")
            _require(len(share.id) <= ID_LIMIT, f"{share.id} has more than {ID_LIMIT} characters")

    def test_shares_are_described(self) -> None:
        """Each share has the backend, one of its resources, and a part of the memory."""
        gpus = {gpu.id: gpu for gpu in self._gpus()}
        [backend] = set(self._layout(list(gpus.values())).backends.values())
        for share in self._shares():
            _require(share.backend == self.backend.name, f"{share.id} names {share.backend}")
            _require(share.resource in backend.resources, f"{share.id} has {share.resource}")
            whole = gpus[share.gpu].memory or 0
            _require(0 < share.memory <= whole, f"{share.id}: {share.memory} B")

    def test_shares_have_footprints(self) -> None:
        """Each share occupies at least one slot of its GPU."""
        for share in self._shares():
            _require(bool(share.footprint), f"the footprint of {share.id} is empty")

    def test_shares_are_pure(self) -> None:
        """The same GPU and options have the same shares, with the same ids."""
        _require(self._shares() == self._shares(), "a second backend has other shares")
        moved = [replace(gpu, index=gpu.index + 4) for gpu in self._gpus()]
        ids = [share.id for share in self._layout(moved).shares]
        _require(
            ids == [share.id for share in self._shares()], "ids change with the index of the GPU"
        )

    def test_a_gpu_in_mig_mode_is_left_alone(self) -> None:
        """A GPU in MIG mode has no shares, unless the backend creates MIG instances.

        CUDA sees instances only, and there may be none.
        """
        if issubclass(self.backend, Provisions):
            return
        gpus = [replace(gpu, mig_enabled=True) for gpu in self._gpus()]
        layout = self._layout(gpus)
        _require(not layout.shares, "a GPU in MIG mode has shares")
        for backend in set(layout.backends.values()):
            _require(bool(no_shares_reason(backend, gpus[0])), "there is no reason for no shares")

    # --- requests ---------------------------------------------------------------------------------

    def test_preferences_are_complete(self) -> None:
        """A preference has exactly `size` shares, each once, the required ones among them."""
        layout, snapshot = self._offered()
        for resource, shares in _by_resource(layout).items():
            backend = layout.backends[resource]
            for required in ([], shares[-1:]):
                for size in {len(required), 1, 2, len(shares) // 2, len(shares)}:
                    question = partial(backend.prefer, shares, required, size, snapshot)
                    _check_preference(question, shares, required, size)

    def test_preferences_never_fail(self) -> None:
        """A preference for more shares than there are has all of them."""
        layout, snapshot = self._offered()
        for resource, shares in _by_resource(layout).items():
            chosen = layout.backends[resource].prefer(shares, [], len(shares) + 7, snapshot)
            _require(set(chosen) == set(shares), f"prefer leaves out shares of {resource}")
            _require(len(chosen) == len(shares), f"prefer repeats shares of {resource}")

    def test_a_preferred_share_may_be_granted(self) -> None:
        """One preferred share passes the backend's own check."""
        layout, snapshot = self._offered()
        for resource, shares in _by_resource(layout).items():
            backend = layout.backends[resource]
            backend.check(backend.prefer(shares, [], 1, snapshot), snapshot)

    def test_the_life_of_a_gpu(self) -> None:
        """A share is granted, always in the same way; after its end the GPU is idle again."""
        with tempfile.TemporaryDirectory(prefix="metagpu-") as run_dir:
            anyio.run(self._live, Injection(run_dir=run_dir))

    async def _live(self, injection: Injection) -> None:
        text = one_pool(self.backend.name, self.options)
        running = run_backends(
            text,
            self._kinds,
            gpu_models=self.gpu_models,
            mig_enabled=self.mig_enabled,
            injection=injection,
        )
        async with running as rig:
            report_no_leases(rig)
            layout = rig.apply(text)
            await rig.wait_until(lambda now: self.backend.name not in _state(rig, now).suspended)
            share = rig.share(self.backend.name)
            backend = layout.backends[share.resource]
            backend.check([share], rig.registry.snapshot)

            rig.claim(share)
            _require(rig.state().owner == self.backend.name, "the GPU of a lease has no owner")
            if isinstance(backend, Provisions):
                await rig.wait_until(
                    lambda now: (
                        self.backend.name in _state(rig, now).provisioned
                        and share.id in _state(rig, now).provisioned[self.backend.name].devices
                    ),
                    backend.provision_timeout,
                )
            first = await backend.grant([share], rig.registry.snapshot)
            again = (
                await rig.apply(text).backends[share.resource].grant([share], rig.registry.snapshot)
            )
            _require(first == again, "the same share has two grants")
            _require(first != Grant(), "the grant gives nothing")

            rig.release(share)
            await rig.wait_until(lambda now: _state(rig, now).owner is None)

    # --- helpers ----------------------------------------------------------------------------------

    @property
    def _kinds(self) -> Mapping[str, type[Backend]]:
        return {self.backend.name: self.backend}

    def _gpus(self) -> list[Gpu]:
        return list(anyio.run(_survey, self.gpu_models, self.mig_enabled))

    def _layout(self, gpus: Sequence[Gpu]) -> Layout:
        config = parse(one_pool(self.backend.name, self.options), "test.yaml", self._kinds)
        return build_layout(config, gpus, Injection())

    def _shares(self) -> tuple[Share, ...]:
        return self._layout(self._gpus()).shares

    def _offered(self) -> tuple[Layout, Snapshot]:
        gpus = self._gpus()
        layout = self._layout(gpus)
        return layout, snapshot_after(GpusFound(tuple(gpus), at=0), layout.offer_fact)

    def _refusal(self, options: Mapping[str, Any], names: str) -> None:
        try:
            parse(one_pool(self.backend.name, options), "test.yaml", self._kinds)
        except ConfigError as error:
            text = str(error)
            _require("test.yaml" in text and names in text, f"the error names no place: {text}")
            return
        raise AssertionError(f"the options {dict(options)} are accepted")


def _check_preference(
    question: Callable[[], Sequence[Share]],
    shares: Sequence[Share],
    required: Sequence[Share],
    size: int,
) -> None:
    chosen = question()
    count = min(size, len(shares))
    _require(len(set(chosen)) == len(chosen) == count, f"{len(chosen)} shares, not {count}")
    _require(set(chosen) <= set(shares), "prefer chooses a share that is not available")
    if size >= len(required):
        _require(set(required) <= set(chosen), "prefer leaves out a required share")
    _require(list(question()) == list(chosen), "prefer has two answers to one question")


def _by_resource(layout: Layout) -> Mapping[ResourceName, list[Share]]:
    return {
        name: [share for share in layout.shares if share.resource == name]
        for name in layout.backends
    }


def _state(rig: BackendRig, snapshot: Snapshot) -> GpuState:
    return snapshot.gpus[rig.gpus[0].id]


async def _survey(gpu_models: str, mig_enabled: bool) -> tuple[Gpu, ...]:  # noqa: FBT001
    node = build_node(gpu_models)
    for gpu in node.gpus:
        gpu.mig.enabled = gpu.mig.pending = mig_enabled
    driver = NvmlDriver(SimLibrary(node), NVML_DEADLINE)
    async with driver.session():
        return (await driver.survey()).gpus


def _require(held: bool, otherwise: str) -> None:  # noqa: FBT001 - as `assert`
    if not held:
        raise AssertionError(otherwise)
