"""Replicas of a layout's instances: offer, preference and grant."""

from collections import Counter
from typing import Any

import pytest

from metagpu.backends.common.packing import AllocationPolicy
from metagpu.backends.mig.backend import MigBackend
from metagpu.backends.mig.options import MigOptions
from metagpu.core.availability.conflict import conflicts
from metagpu.core.config.config import parse
from metagpu.core.config.errors import ConfigError
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.checks import ID_LIMIT
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.request_errors import TooManyReplicas
from metagpu.core.model.shares import HardwareDevice, ProvisionedState, Share
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import GpusFound, ProvisioningReported, SharesClaimed
from metagpu.sim.machine.gpu_models import GPU_MODELS
from tests.backends.mig.gpus import mig_gpu
from tests.rigs.build import BACKENDS, after, offer

A, B = mig_gpu(0), mig_gpu(1)


def backend(layout: dict[str, int] | None = None, **options: Any) -> MigBackend:  # noqa: ANN401
    """Create the backend of a pool, by default with three replicas of each instance."""
    said = {"replicas": 3, **options}
    return MigBackend(MigOptions("mig", layout=layout or {"3g.20gb": 2}, **said), Injection())


def node(*gpus: Gpu, cutter: MigBackend | None = None) -> Snapshot:
    """Return the snapshot of GPUs with their offers."""
    shares = [share for gpu in gpus for share in (cutter or backend()).shares(gpu)]
    return after(GpusFound(gpus, at=0), offer(*shares))


def slots(shares: list[Share]) -> list[str]:
    """Return the instances of shares, without the GPU."""
    return [share.id.partition("::")[2] for share in shares]


def test_each_instance_is_offered_several_times() -> None:
    """Ids have instance and replica, memory is divided, and the name is the shared one."""
    shares = list(backend().shares(A))

    assert slots(shares) == [f"3g.20gb@{at}-t{n}" for at in (0, 4) for n in range(3)]
    assert {share.resource for share in shares} == {"nvidia.com/mig-3g.20gb.shared"}
    assert [share.number for share in shares] == list(range(6))
    assert {share.memory for share in shares} == {19968 * 2**20 // 3}
    assert not any(conflicts(a, b) for a in shares for b in shares if a is not b)


def test_only_some_profiles_are_shared() -> None:
    """Replicas may be of some profiles; other instances are one container's, by their own name."""
    cutter = backend({"2g.10gb": 2, "1g.5gb": 3}, replicas={"1g.5gb": 4})
    counted = Counter(share.resource for share in cutter.shares(A))

    assert counted == {"nvidia.com/mig-1g.5gb.shared": 12, "nvidia.com/mig-2g.10gb": 2}
    assert set(cutter.resources) == {"nvidia.com/mig-1g.5gb.shared", "nvidia.com/mig-2g.10gb"}


def test_names_can_be_chosen() -> None:
    """Names are set by profile, as by NVIDIA's plugin without renaming, or one for all."""
    plain = backend(resource={"3g.20gb": "nvidia.com/mig-3g.20gb"})

    assert plain.resources == ("nvidia.com/mig-3g.20gb",)
    assert backend(resource="nvidia.com/gpu.shared").resources == ("nvidia.com/gpu.shared",)


def test_the_longest_ids_are_legal() -> None:
    """Ids have legal length with the most replicas of every profile of every GPU model."""
    gpus = [mig_gpu(0, name) for name, model in GPU_MODELS.items() if model.mig_profiles]
    lengths = [
        max(len(share.id) for share in backend({profile.name: 1}, replicas=1000).shares(gpu))
        for gpu in gpus
        for profile in gpu.mig_profiles
    ]
    assert max(lengths) <= ID_LIMIT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("replicas: 1001", "replicas is 1001; allowed: 1 to 1000"),
        ("replicas: {1g.5gb: 0}", "replicas is 0; allowed: 1 to 1000"),
        ("replicas: {2g.10gb: 2}", "replicas names 2g.10gb, which this backend does not offer"),
        ("resource: {2g.10gb: a.b/c}", "resource names 2g.10gb, which this backend does not offer"),
    ],
)
def test_options_that_make_no_sense(options: str, message: str) -> None:
    """Wrong options are refused with file, line and path."""
    text = (
        "version: metagpu/v1\n"
        f"pools: [{{name: a, backends: [{{backend: mig, layout: {{1g.5gb: 7}}, {options}}}]}}]"
    )
    with pytest.raises(ConfigError, match=rf"t.yaml: 2: pools\[0\].backends\[0\].*{message}"):
        parse(text, "t.yaml", BACKENDS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("replicas: 1001", "replicas is 1001; allowed: 1 to 1000"),
        ("replicas: {1g.5gb: 0}", "replicas is 0; allowed: 1 to 1000"),
        ("replicas: {small: 2}", "'small' is not a MIG profile"),
        ("replicas: 2, mps: {}", "containers of a MIG instance either take turns"),
        ("replicas: {1g.5gb: 2}, mps: {replicas: {1g.5gb: 2}}", "containers of a 1g.5gb either"),
    ],
)
def test_options_of_existing_instances_that_make_no_sense(options: str, message: str) -> None:
    """Wrong options are refused before the instances are known."""
    backends = f"[{{backend: mig, existing: true, {options}}}]"
    text = f"version: metagpu/v1\npools: [{{name: a, backends: {backends}}}]"

    with pytest.raises(ConfigError, match=message):
        parse(text, "t.yaml", BACKENDS)


def test_replicas_are_of_layouts() -> None:
    """An instance that is created for a pod has no replicas."""
    with pytest.raises(ValueError, match="failRequestsGreaterThanOne are for a layout"):
        MigOptions("mig", profiles=("1g.5gb",), replicas=2)


def test_a_container_gets_the_instance_that_the_fewest_have() -> None:
    """The instance with fewest holders of all GPUs is taken; the first GPU's of equal ones."""
    snapshot, given = node(A, B), list[str]()
    for _ in range(6):
        free = [
            share
            for state in snapshot.gpus.values()
            for share in state.shares
            if share.id not in state.leases
        ]
        [share] = backend().prefer(free, (), 1, snapshot)
        given.append(f"{snapshot.gpus[share.gpu].gpu.index}:{slots([share])[0]}")
        snapshot = after(SharesClaimed((share,), at=1), since=snapshot)

    assert given == [
        *("0:3g.20gb@0-t0", "0:3g.20gb@4-t0", "1:3g.20gb@0-t0", "1:3g.20gb@4-t0"),
        *("0:3g.20gb@0-t1", "0:3g.20gb@4-t1"),
    ]


def test_packed_replicas_fill_an_instance_first() -> None:
    """With `packed` the instance with the most holders is taken until it is full."""
    packed = backend(allocation_policy=AllocationPolicy.PACKED)
    snapshot, given = node(A, B), list[str]()
    for _ in range(2):
        free = [share for state in snapshot.gpus.values() for share in state.shares]
        free = [share for share in free if share.id not in snapshot.gpus[share.gpu].leases]
        shares = packed.prefer(free, (), 2, snapshot)
        given += [f"{snapshot.gpus[share.gpu].gpu.index}:{slots([share])[0]}" for share in shares]
        snapshot = after(SharesClaimed(tuple(shares), at=1), since=snapshot)

    assert given == ["0:3g.20gb@0-t0", "0:3g.20gb@0-t1", "0:3g.20gb@0-t2", "0:3g.20gb@4-t0"]


def test_blocked_shares_come_last() -> None:
    """Shares that cannot be granted now are named only if the others do not suffice."""
    blocked = {f"s{n}-t{k}": "foreign" for n in range(4) for k in range(3)}
    snapshot = after(
        ProvisioningReported(A.id, "mig", ProvisionedState(blocked=blocked), at=1), since=node(A)
    )
    shares = list(snapshot.gpus[A.id].shares)

    assert slots(list(backend().prefer(shares, (), 1, snapshot))) == ["3g.20gb@4-t0"]
    assert slots(list(backend().prefer(shares, shares[:1], 2, snapshot))) == [
        "3g.20gb@0-t0",
        "3g.20gb@4-t0",
    ]


def test_several_replicas_are_refused_where_the_pool_refuses_them() -> None:
    """The refusal has NVIDIA's words; several instances of one container are allowed."""
    snapshot = node(A)
    shares = list(snapshot.gpus[A.id].shares)

    backend().check(shares[:2], snapshot)
    with pytest.raises(TooManyReplicas, match="maximum request size for shared resources is 1"):
        backend(fail_requests_greater_than_one=True).check(shares[:2], snapshot)

    alone = backend(replicas=1, fail_requests_greater_than_one=True)
    alone.check(alone.shares(A), node(A, cutter=alone))


async def test_an_instance_is_given_once() -> None:
    """Two replicas of one instance are one device, with the memory of both."""
    snapshot = node(A)
    shares = list(snapshot.gpus[A.id].shares)
    made = dict.fromkeys((share.id for share in shares[:2]), HardwareDevice("MIG-a", 1, 0))
    snapshot = after(
        ProvisioningReported(A.id, "mig", ProvisionedState(made), at=1), since=snapshot
    )
    grant = await backend().grant(shares[:2], snapshot)

    assert grant.envs == {"NVIDIA_VISIBLE_DEVICES": "MIG-a", "METAGPU_MEMORY_MIB": "MIG-a=13312"}
