"""MIG instances on demand: offered, preferred, refused and granted shares."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from metagpu.backends.mig.backend import MigBackend
from metagpu.backends.mig.options import MigOptions
from metagpu.core.availability.conflict import conflicting_shares
from metagpu.core.config.config import parse
from metagpu.core.config.errors import ConfigError
from metagpu.core.contracts.capabilities import Provisions
from metagpu.core.grants.grant import DeviceNode
from metagpu.core.grants.injection import DeviceListStrategy, Injection
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.mig import slot_of
from metagpu.core.model.request_errors import SharesOverlap
from metagpu.core.model.shares import (
    HardwareDevice,
    Holder,
    ProvisionedState,
    Share,
    ShareId,
)
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import (
    GpuFaulted,
    GpusFound,
    LeasesObserved,
    ProvisioningReported,
    SharesClaimed,
)
from tests.backends.mig.gpus import instance, mig_gpu
from tests.rigs.build import BACKENDS, after, gpu, layout_of, offer, refusal

A, B = mig_gpu(0), mig_gpu(1)
ALL = ("1g.5gb", "1g.5gb+me", "2g.10gb", "3g.20gb", "7g.40gb")
POD = Holder("default", "pod", "main")


def backend(*profiles: str, injection: Injection | None = None, **options: Any) -> MigBackend:  # noqa: ANN401
    """Create the backend of a pool that allows these profiles."""
    said = MigOptions("mig", profiles=profiles or ALL, **options)
    return MigBackend(said, injection or Injection())


def node(*gpus: Gpu, mig: MigBackend | None = None) -> Snapshot:
    """Return the snapshot of GPUs with their offers."""
    mig = mig or backend()
    shares = [share for other in gpus for share in mig.shares(other)]
    return after(GpusFound(gpus, at=0), offer(*shares))


def named(snapshot: Snapshot, slot: str, of: Gpu = A) -> Share:
    """Find a share by its profile and slice."""
    return next(share for share in snapshot.gpus[of.id].shares if share.id == f"{of.id}::{slot}")


def free(snapshot: Snapshot, profile: str) -> list[Share]:
    """Return the shares of a profile that a kubelet would still have."""
    return [
        share
        for state in snapshot.gpus.values()
        for share in state.shares
        if share.id.partition("::")[2].startswith(f"{profile}@")
        and share.id not in state.leases
        and share.id not in conflicting_shares(state)
    ]


def preferred(snapshot: Snapshot, profile: str, size: int = 1) -> list[str]:
    """Return the preference among all free shares, by GPU and slot."""
    chosen = backend().prefer(free(snapshot, profile), (), size, snapshot)
    return [
        f"{snapshot.gpus[share.gpu].gpu.index}:{share.id.partition('::')[2]}" for share in chosen
    ]


def provisioned(
    of: Gpu,
    devices: Mapping[str, HardwareDevice] | None = None,
    **fields: Any,  # noqa: ANN401 - fields of several kinds
) -> ProvisioningReported:
    """Create the fact of the provisioned state, by profile and slice."""
    by_id = {ShareId(f"{of.id}::{slot}"): device for slot, device in (devices or {}).items()}
    return ProvisioningReported(of.id, "mig", ProvisionedState(by_id, **fields), at=1)


# --- what is offered ------------------------------------------------------------------------------


def test_every_placement_of_a_profile_is_a_share() -> None:
    """A share's id says profile and slice, its resource the profile, as NVIDIA's plugin does."""
    shares = backend("2g.10gb", "1g.5gb+me").shares(A)

    assert [(share.id.partition("::")[2], share.resource, share.number) for share in shares] == [
        *((f"1g.5gb+me@{n}", "nvidia.com/mig-1g.5gb.me", n) for n in range(7)),
        *((f"2g.10gb@{2 * n}", "nvidia.com/mig-2g.10gb", n) for n in range(3)),
    ]
    assert shares[-1].memory == 9856 * 2**20
    assert backend("2g.10gb", "1g.5gb+me").resources == (
        *("nvidia.com/mig-2g.10gb", "nvidia.com/mig-1g.5gb.me"),
    )


def test_shares_that_overlap_a_lease_are_unavailable() -> None:
    """A 3g at 4 blocks the shares over slices 4 to 7, and a second `+me` has no engine."""
    snapshot = node(A)
    held = named(snapshot, "3g.20gb@4"), named(snapshot, "1g.5gb+me@0")
    snapshot = after(SharesClaimed(held, at=1), since=snapshot)

    left = {share.id.partition("::")[2] for name in ALL for share in free(snapshot, name)}
    assert left == {"1g.5gb@1", "1g.5gb@2", "1g.5gb@3", "2g.10gb@2"}


def test_a_gpu_without_its_profiles_has_a_reason() -> None:
    """The reason names the GPU's profiles, or the lack of MIG."""
    text = (
        "version: metagpu/v1\npools: [{name: a, backends: [{backend: mig, profiles: [2g.20gb]}]}]"
    )
    layout = layout_of(A, gpu(1), text=text)

    assert not layout.shares
    assert [assignment.reason for assignment in layout.pool_assignments] == [
        (
            "all GPUs, but no shares: it has none of the MIG profiles 2g.20gb; it has "
            "1g.5gb, 1g.5gb+me, 1g.10gb, 2g.10gb, 3g.20gb, 4g.20gb, 7g.40gb"
        ),
        "all GPUs, but no shares: it does not support MIG, or NVML does not list its profiles",
    ]


def test_existing_instances_are_offered_once_they_are_finished() -> None:
    """A container can have one compute instance: none, two, or an unknown profile is no offer."""
    halves = [instance(A, "2g.10gb@2", computes=0), instance(A, "2g.10gb@4", computes=2)]
    unknown = replace(instance(A, "1g.5gb@1"), profile=99)
    found = {A: [instance(A, "2g.10gb@0"), *halves, unknown]}
    pool = MigBackend(MigOptions("mig", existing=True), Injection())
    _, offering = pool.with_existing(A, found)

    assert [slot_of(share.id) for share in offering.shares(A)] == ["2g.10gb@0"]


def test_a_size_is_the_own_profile_of_each_gpu() -> None:
    """`1g` is each GPU's smallest profile of one slice, by its name or the pool's."""
    sizes = backend("1g", "3g", resource={"3g": "a.b/large"})
    h200, a30 = mig_gpu(0, "h200"), mig_gpu(1, "a30")

    assert Counter(share.resource for share in sizes.shares(h200)) == {
        "nvidia.com/mig-1g.18gb": 7,
        "a.b/large": 2,
    }
    assert Counter(share.resource for share in sizes.shares(a30)) == {"nvidia.com/mig-1g.6gb": 4}
    assert sizes.resources == ("a.b/large",)
    assert "none of the MIG profiles 3g" in backend("3g").misfit_reason(a30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("profiles: []", "profiles is empty; give at least one, such as 1g.5gb"),
        ("profiles: [2gb]", "'2gb' is not a MIG profile such as 1g.5gb or 1g.5gb\\+me"),
        ("profiles: [1g.5gb.me]", "'1g.5gb.me' is not a MIG profile"),
        ("profiles: [1g.5gb, 1g.5gb]", "profiles contains a profile twice"),
        ("profiles: [1g.5gb], deadline: 1m", "deadline is 60s; allowed: 1s to 15s"),
        ("enableMig: true", r"give either profiles, such as \[1g.5gb\], of which instances are"),
        ("profiles: [1g.5gb], layout: {1g.5gb: 7}", "give either profiles, .* or a layout"),
        ("profiles: [1g.5gb], resource: {2g.10gb: a.b/c}", "resource names 2g.10gb, which this"),
        ("profiles: [1g.5gb], replicas: 2", "an instance created on demand belongs to one pod"),
        (
            "profiles: [1g.5gb], failRequestsGreaterThanOne: true",
            "replicas and failRequestsGreaterThanOne are for a layout",
        ),
        ("disableMig: true, layout: {1g.5gb: 7}", "give either profiles, such as"),
        ("disableMig: true, enableMig: true", "enableMig and disableMig contradict each other"),
        ("disableMig: true, keepWarm: 1s", "keepWarm is for profiles"),
        ("layout: {1g.5gb: 0}", "layout has 0 of 1g.5gb; give at least 1, or leave it out"),
        ("layout: {1g: 7}", "'1g' is not a MIG profile such as 1g.5gb"),
        ("layout: {1g.5gb: 7}, keepWarm: 1s", "keepWarm is for profiles; the instances of a"),
        ("layout: {1g.5gb: 7}, create: start", "create is for profiles; the instances of a"),
        (
            "layout: {1g.5gb: 3, 2g.10gb: 2}, resource: a.b/c",
            "resource a.b/c is one name for instances of one size, and is given to 1g.5gb and 2g",
        ),
    ],
)
def test_options_that_make_no_sense(options: str, message: str) -> None:
    """Wrong options are refused with file, line and path."""
    text = f"version: metagpu/v1\npools: [{{name: a, backends: [{{backend: mig, {options}}}]}}]"

    with pytest.raises(ConfigError, match=rf"t.yaml: 2: pools\[0\].backends\[0\].*{message}"):
        parse(text, "t.yaml", BACKENDS)


def by_cdi(more: str = "", strategies: str = "cdi-cri", kind: str = "metagpu.io/gpu") -> str:
    """Write a configuration that passes instances by CDI."""
    return (
        f"version: metagpu/v1\ndeviceListStrategy: [{strategies}]\ncdiKind: {kind}\n"
        f"pools: [{{name: a, backends: [{{backend: mig, {more or 'profiles: [1g.5gb]'}}}]}}]"
    )


def test_names_in_the_files_of_others_are_refused() -> None:
    """A foreign CDI file has no instance created on demand, so its kind is refused."""
    message = "metagpu creates; leave cdiKind out, or use deviceListStrategy"
    with pytest.raises(ConfigError, match=message):
        parse(by_cdi(kind="nvidia.com/gpu"), "t.yaml", BACKENDS)


@pytest.mark.parametrize("strategies", ["envvar", "envvar, cdi-cri", "volume-mounts, cdi-cri"])
def test_creation_at_start_needs_cdi_alone(strategies: str) -> None:
    """Variables and mounts name existing devices, so `create: start` needs CDI alone."""
    with pytest.raises(ConfigError, match=r"create: start gives .* set deviceListStrategy to cdi"):
        parse(by_cdi("profiles: [1g.5gb], create: start", strategies), "t.yaml", BACKENDS)


@pytest.mark.parametrize(
    ("options", "strategies", "defers"),
    [
        ("profiles: [1g.5gb]", "cdi-cri", True),
        ("profiles: [1g.5gb]", "cdi-annotations", True),
        ("profiles: [1g.5gb], create: start", "cdi-cri", True),
        ("profiles: [1g.5gb], create: allocate", "cdi-cri", False),
        ("profiles: [1g.5gb]", "envvar", False),
        ("profiles: [1g.5gb]", "envvar, cdi-cri", False),
        ("layout: {1g.5gb: 7}", "cdi-cri", False),
    ],
)
def test_a_container_waits_at_its_start_where_that_can_be(
    options: str, strategies: str, *, defers: bool
) -> None:
    """Without an option, `create` is `start` where CDI alone passes requested instances."""
    backends = layout_of(A, text=by_cdi(options, strategies)).backends.values()
    assert [isinstance(other, Provisions) and other.provisions_at_start for other in backends] == [
        defers
    ]


# --- what is preferred ----------------------------------------------------------------------------


def test_the_planner_chooses() -> None:
    """A 1g goes where it costs the rest least, and the next beside it."""
    snapshot = node(A, B)
    assert preferred(snapshot, "1g.5gb") == ["0:1g.5gb@3"]

    snapshot = after(SharesClaimed((named(snapshot, "1g.5gb@3"),), at=1), since=snapshot)
    assert preferred(snapshot, "1g.5gb") == ["0:1g.5gb@2"]


def test_a_warm_instance_is_preferred_to_a_new_one() -> None:
    """An idle instance is taken where the choice costs the rest nothing."""
    warm = after(
        provisioned(B, {"1g.5gb@3": HardwareDevice("MIG-w", 13, 0, idle=True)}), since=node(A, B)
    )

    assert preferred(warm, "1g.5gb") == ["1:1g.5gb@3"]


def test_blocked_and_released_slots_are_not_preferred() -> None:
    """Blocked slots and just released ones are taken for the planner too."""
    snapshot = node(A)
    taken = after(provisioned(A, blocked={"s4": "foreign", "s5": "foreign"}), since=snapshot)
    dirty = after(provisioned(A, {"2g.10gb@4": HardwareDevice("MIG-d", 5, 0)}), since=snapshot)

    for other in (taken, dirty):
        chosen = backend().prefer(free(snapshot, "2g.10gb"), (), 2, other)
        assert sorted(share.number for share in chosen) == [0, 1]


def test_an_unavailable_gpu_comes_last() -> None:
    """A faulty GPU is named only if the others do not suffice."""
    snapshot = after(GpuFaulted(A.id, "XID 79", at=1), since=node(A, B))

    assert preferred(snapshot, "7g.40gb") == ["1:7g.40gb@0"]
    assert preferred(snapshot, "7g.40gb", 2) == ["0:7g.40gb@0", "1:7g.40gb@0"]


def test_required_shares_are_among_the_chosen() -> None:
    """A device that the kubelet hands on from an init container stays chosen."""
    snapshot = node(A, B)
    must = named(snapshot, "2g.10gb@0", B)
    chosen = backend().prefer(free(snapshot, "2g.10gb"), (must,), 2, snapshot)

    assert must in chosen
    assert {share.gpu for share in chosen} == {B.id}


# --- what is refused and given --------------------------------------------------------------------


def test_instances_that_exclude_each_other_are_refused() -> None:
    """Two `+me` of one GPU need one engine: the refusal names them."""
    snapshot = node(A)
    two = [named(snapshot, "1g.5gb+me@0"), named(snapshot, "1g.5gb+me@1")]

    message = r"GPU 0 \(.*\) has room for one of 1g.5gb\+me@0, 1g.5gb\+me@1 at a time"
    with pytest.raises(SharesOverlap, match=message):
        backend().check(two, snapshot)
    backend().check([named(snapshot, "2g.10gb@0"), named(snapshot, "2g.10gb@2")], snapshot)


async def test_a_container_is_given_its_mig_devices() -> None:
    """A grant has uuids, memory of each, and the existing nodes of the GPU and its instances."""
    injection = Injection(
        dev_root="/host",
        device_nodes_present=frozenset(
            (
                "/dev/nvidiactl",
                "/dev/nvidia0",
                *(f"/dev/nvidia-caps/nvidia-cap{n}" for n in (30, 31)),
            )
        ),
        capabilities={"gpu0/gi5/access": 30, "gpu0/gi5/ci0/access": 31, "gpu0/gi3/access": 21},
    )
    mig = backend(injection=injection)
    devices = {
        "2g.10gb@4": HardwareDevice("MIG-b", 5, 0),
        "2g.10gb@0": HardwareDevice("MIG-a", 3, 0),
    }
    snapshot = after(provisioned(A, devices), since=node(A))
    shares = [named(snapshot, "2g.10gb@4"), named(snapshot, "2g.10gb@0")]

    grant = await mig.grant(shares, snapshot)
    assert grant.envs == {
        "NVIDIA_VISIBLE_DEVICES": "MIG-a,MIG-b",
        "METAGPU_MEMORY_MIB": "MIG-a=9856,MIG-b=9856",
    }
    paths = [
        "/dev/nvidiactl",
        "/dev/nvidia0",
        *(f"/dev/nvidia-caps/nvidia-cap{n}" for n in (30, 31)),
    ]
    assert grant.nodes == tuple(DeviceNode(path, f"/host{path}") for path in paths)
    assert await mig.grant(shares[::-1], snapshot) == grant


async def test_mig_devices_may_be_named_by_mounts() -> None:
    """With volume-mounts each MIG device is a mount, as NVIDIA's runtime reads it."""
    injection = Injection(strategies=frozenset({DeviceListStrategy.VOLUME_MOUNTS}))
    snapshot = after(provisioned(A, {"7g.40gb@0": HardwareDevice("MIG-a", 0, 0)}), since=node(A))
    grant = await backend(injection=injection).grant([named(snapshot, "7g.40gb@0")], snapshot)

    assert [mount.container_path for mount in grant.mounts] == [
        "/var/run/nvidia-container-devices/MIG-a"
    ]


# --- unavailable shares ---------------------------------------------------------------------------


def test_released_slices_are_unavailable_until_a_scan() -> None:
    """Slices of an ended lease are unavailable until a scan finds them idle."""
    share = named(node(A), "3g.20gb@0")
    held = after(
        SharesClaimed((share,), at=1),
        provisioned(A, {"3g.20gb@0": HardwareDevice("MIG-a", 1, 0)}),
        LeasesObserved({share.id: POD}, at=2),
        since=node(A),
    )
    released = after(LeasesObserved({}, at=3), since=held)
    idle = after(
        provisioned(A, {"3g.20gb@0": HardwareDevice("MIG-a", 1, 0, idle=True)}), since=released
    )

    assert not released.gpus[A.id].leases
    assert [other.number for other in free(released, "3g.20gb")] == [1]
    assert refusal(released.gpus[A.id], share).endswith(
        "was just released and is being checked for processes"
    )
    assert [other.number for other in free(idle, "3g.20gb")] == [0, 1]


def test_a_released_share_may_be_granted_again() -> None:
    """A reusable share blocks other shares, not itself, until a device blocks it."""
    left = HardwareDevice("MIG-a", 1, 0, reusable=True)
    snapshot = after(provisioned(A, {"3g.20gb@0": left}), since=node(A))
    used = after(
        provisioned(A, {"3g.20gb@0": left}, blocked={"s0": "process 7 runs"}), since=node(A)
    )

    assert [share.number for share in free(snapshot, "3g.20gb")] == [0, 1]
    assert not free(snapshot, "7g.40gb")
    assert [share.number for share in free(snapshot, "2g.10gb")] == [2]
    assert [share.number for share in free(used, "3g.20gb")] == [1]


def test_a_share_before_its_stagger_is_unavailable() -> None:
    """A share whose staggered offer has not come is unavailable; its holder keeps it."""
    share = named(node(A), "3g.20gb@0")
    late = provisioned(A, delayed=frozenset((share.id,)))

    assert [other.number for other in free(after(late, since=node(A)), "3g.20gb")] == [1]
    held = after(SharesClaimed((share,), at=1), late, since=node(A))
    assert share.id not in conflicting_shares(held.gpus[A.id])


def test_blocked_slots_are_unavailable_with_their_reason() -> None:
    """Slots of a foreign instance are unavailable, and the refusal names the instance."""
    snapshot = after(provisioned(A, blocked={"s0": "instance 1g.5gb@0 is there"}), since=node(A))

    assert not free(snapshot, "7g.40gb")
    assert refusal(snapshot.gpus[A.id], named(snapshot, "7g.40gb@0")).endswith(
        f": GPU {A}: instance 1g.5gb@0 is there"
    )


def test_a_gpu_in_mig_mode_is_of_no_other_backend() -> None:
    """Shares that other backends offer of a GPU are unavailable while MIG owns the GPU."""
    text = (
        "version: metagpu/v1\npools:\n  - name: all\n    backends:\n"
        "      - {backend: whole}\n      - {backend: mig, profiles: [7g.40gb]}\n"
    )
    plain = replace(A, mig_enabled=False)
    snapshot = after(
        GpusFound((plain,), at=0),
        layout_of(plain, text=text).offer_fact,
        provisioned(A, exclusive=True),
    )

    assert list(conflicting_shares(snapshot.gpus[A.id])) == [ShareId(A.id)]
    assert "reserved by mig" in refusal(snapshot.gpus[A.id])
