"""MIG instances made when a pod asks: what is offered, preferred, refused and given."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from metagpu.backends.mig import MigBackend
from metagpu.backends.mig.options import MigOptions
from metagpu.core.config import parse
from metagpu.core.errors import ConfigError, Overlap
from metagpu.core.facts import GpuFaulted, GpusFound, LeasesObserved, SharesGranted, StockTold
from metagpu.core.gpu import Gpu
from metagpu.core.grant import DeviceNode
from metagpu.core.injection import DeviceListStrategy, Injection
from metagpu.core.model import Holder, Made, Share, ShareId, Stock
from metagpu.core.report import hindrance
from metagpu.core.snapshot import Snapshot
from tests.backends.mig.gpus import mig_gpu
from tests.build import BACKENDS, after, gpu, laid_out, offer

A, B = mig_gpu(0), mig_gpu(1)
ALL = ("1g.5gb", "1g.5gb+me", "2g.10gb", "3g.20gb", "7g.40gb")
POD = Holder("default", "pod", "main")


def backend(*profiles: str, injection: Injection | None = None, **options: Any) -> MigBackend:  # noqa: ANN401
    """Make the backend of a pool that allows these profiles."""
    said = MigOptions("mig", profiles=profiles or ALL, **options)
    return MigBackend(said, injection or Injection())


def node(*gpus: Gpu, cutter: MigBackend | None = None) -> Snapshot:
    """Give what is known of GPUs that are cut."""
    mig = cutter or backend()
    shares = [share for it in gpus for share in mig.shares(it)]
    return after(GpusFound(gpus, at=0), offer(*shares))


def named(snapshot: Snapshot, slot: str, of: Gpu = A) -> Share:
    """Find a share by its profile and slice."""
    return next(it for it in snapshot.gpus[of.id].shares if it.id == f"{of.id}::{slot}")


def free(snapshot: Snapshot, profile: str) -> list[Share]:
    """List what a kubelet would still have of a profile."""
    return [
        share
        for state in snapshot.gpus.values()
        for share in state.shares
        if share.id.partition("::")[2].startswith(f"{profile}@")
        and share.id not in state.leases
        and share.id not in state.withheld
    ]


def preferred(snapshot: Snapshot, profile: str, size: int = 1) -> list[str]:
    """Say what is preferred of all that is free, by GPU and slot."""
    chosen = backend().prefer(free(snapshot, profile), (), size, snapshot)
    return [f"{snapshot.gpus[it.gpu].gpu.index}:{it.id.partition('::')[2]}" for it in chosen]


def told(of: Gpu, made: Mapping[str, Made] | None = None, **stock: Any) -> StockTold:  # noqa: ANN401
    """Make the fact of what was made, by profile and slice."""
    by_id = {ShareId(f"{of.id}::{slot}"): it for slot, it in (made or {}).items()}
    return StockTold(of.id, "mig", Stock(by_id, **stock), at=1)


# --- what is offered ------------------------------------------------------------------------------


def test_every_placement_of_a_profile_is_a_share() -> None:
    """A share's id says profile and slice, its resource the profile, as NVIDIA's plugin does."""
    shares = backend("2g.10gb", "1g.5gb+me").shares(A)

    assert [(it.id.partition("::")[2], it.resource, it.number) for it in shares] == [
        *((f"1g.5gb+me@{n}", "nvidia.com/mig-1g.5gb.me", n) for n in range(7)),
        *((f"2g.10gb@{2 * n}", "nvidia.com/mig-2g.10gb", n) for n in range(3)),
    ]
    assert shares[-1].memory == 9856 * 2**20
    assert backend("2g.10gb", "1g.5gb+me").resources == (
        *("nvidia.com/mig-2g.10gb", "nvidia.com/mig-1g.5gb.me"),
    )


def test_what_overlaps_a_lease_is_withheld() -> None:
    """A 3g at 4 takes the places over slices 4 to 7, and a second `+me` has no engine."""
    snapshot = node(A)
    held = named(snapshot, "3g.20gb@4"), named(snapshot, "1g.5gb+me@0")
    snapshot = after(SharesGranted(held, at=1), since=snapshot)

    left = {it.id.partition("::")[2] for name in ALL for it in free(snapshot, name)}
    assert left == {"1g.5gb@1", "1g.5gb@2", "1g.5gb@3", "2g.10gb@2"}


def test_a_gpu_without_its_profiles_says_why() -> None:
    """The reason names what the GPU has, or that it has no MIG."""
    text = (
        "version: metagpu/v1\npools: [{name: a, backends: [{backend: mig, profiles: [2g.20gb]}]}]"
    )
    layout = laid_out(A, gpu(1), text=text)

    assert not layout.shares
    assert [assignment.why for assignment in layout.assignments] == [
        (
            "all GPUs, but nothing is cut: it has none of the MIG profiles 2g.20gb; it has "
            "1g.5gb, 1g.5gb+me, 1g.10gb, 2g.10gb, 3g.20gb, 4g.20gb, 7g.40gb"
        ),
        "all GPUs, but nothing is cut: it has no MIG, or NVML does not tell its profiles",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("profiles: []", "profiles is empty; give at least one, such as 1g.5gb"),
        ("profiles: [2g]", "'2g' is no MIG profile such as 1g.5gb or 1g.5gb\\+me"),
        ("profiles: [1g.5gb.me]", "'1g.5gb.me' is no MIG profile"),
        ("profiles: [1g.5gb, 1g.5gb]", "profiles names one twice"),
        ("profiles: [1g.5gb], deadline: 1m", "deadline is 60s; allowed: 1s to 15s"),
        ("enableMig: true", r"give either profiles, such as \[1g.5gb\], of which instances are"),
        ("profiles: [1g.5gb], layout: {1g.5gb: 7}", "give either profiles, .* or a layout"),
        ("profiles: [1g.5gb], resource: a.b/c", "resource is for a layout; instances made when"),
        ("profiles: [1g.5gb], replicas: 2", "an instance made when a pod asks is that pod's"),
        (
            "profiles: [1g.5gb], failRequestsGreaterThanOne: true",
            "replicas and failRequestsGreaterThanOne are for a layout",
        ),
        ("layout: {}", "layout is empty; give at least one instance, as in 1g.5gb: 7"),
        ("layout: {1g.5gb: 0}", "layout has 0 of 1g.5gb; give at least 1, or leave it out"),
        ("layout: {1g: 7}", "'1g' is no MIG profile such as 1g.5gb"),
        ("layout: {1g.5gb: 7}, keepWarm: 1s", "keepWarm is for profiles; the instances of a"),
        ("layout: {1g.5gb: 7}, create: start", "create is for profiles; the instances of a"),
        (
            "layout: {1g.5gb: 3, 2g.10gb: 2}, resource: a.b/c",
            "resource a.b/c is one name for instances of one size, and layout has 1g.5gb, 2g.10gb;",
        ),
    ],
)
def test_options_that_make_no_sense(options: str, message: str) -> None:
    """Wrong options are told with file, line and path."""
    text = f"version: metagpu/v1\npools: [{{name: a, backends: [{{backend: mig, {options}}}]}}]"

    with pytest.raises(ConfigError, match=rf"t.yaml: 2: pools\[0\].backends\[0\].*{message}"):
        parse(text, "t.yaml", BACKENDS)


def by_cdi(more: str = "", strategies: str = "cdi-cri", kind: str = "metagpu.io/gpu") -> str:
    """Write a configuration that gives instances by CDI."""
    return (
        f"version: metagpu/v1\ndeviceListStrategy: [{strategies}]\ncdiKind: {kind}\n"
        f"pools: [{{name: a, backends: [{{backend: mig, {more or 'profiles: [1g.5gb]'}}}]}}]"
    )


def test_names_in_the_files_of_others_are_refused() -> None:
    """Nobody else's CDI specification has an instance that was just made; the file is told so."""
    message = "are in no CDI specification of others; leave cdiKind out, or use deviceListStrategy"
    with pytest.raises(ConfigError, match=message):
        parse(by_cdi(kind="nvidia.com/gpu"), "t.yaml", BACKENDS)


@pytest.mark.parametrize("strategies", ["envvar", "envvar, cdi-cri", "volume-mounts, cdi-cri"])
def test_a_name_before_there_is_anything_needs_cdi_alone(strategies: str) -> None:
    """A variable or a mount names what exists; so a start cannot be waited for by these."""
    with pytest.raises(ConfigError, match=r"create: start tells .* set deviceListStrategy to cdi"):
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
    """Left out, `create` is `start` where CDI alone gives the instances that pods ask for."""
    backends = laid_out(A, text=by_cdi(options, strategies)).backends.values()
    assert [it.defers for it in backends] == [defers]


# --- what is preferred ----------------------------------------------------------------------------


def test_the_planner_chooses() -> None:
    """A 1g goes where it costs the rest least, and the next beside it."""
    snapshot = node(A, B)
    assert preferred(snapshot, "1g.5gb") == ["0:1g.5gb@6"]

    snapshot = after(SharesGranted((named(snapshot, "1g.5gb@6"),), at=1), since=snapshot)
    assert preferred(snapshot, "2g.10gb", 2) == ["0:2g.10gb@2", "0:2g.10gb@4"]


def test_a_warm_instance_is_preferred_to_a_new_one() -> None:
    """What exists and is idle is taken, where that costs the rest nothing."""
    warm = after(told(B, {"1g.5gb@6": Made("MIG-w", 13, 0, idle=True)}), since=node(A, B))

    assert preferred(warm, "1g.5gb") == ["1:1g.5gb@6"]


def test_what_is_taken_otherwise_is_not_preferred() -> None:
    """Blocked slots, and what was just given back, are taken for the planner too."""
    snapshot = node(A)
    taken = after(told(A, blocked={"s4": "foreign", "s5": "foreign"}), since=snapshot)
    dirty = after(told(A, {"2g.10gb@4": Made("MIG-d", 5, 0)}), since=snapshot)

    for it in (taken, dirty):
        chosen = backend().prefer(free(snapshot, "2g.10gb"), (), 2, it)
        assert sorted(share.number for share in chosen) == [0, 1]


def test_a_gpu_that_is_shut_comes_last() -> None:
    """A faulty GPU is named only if the others do not suffice."""
    snapshot = after(GpuFaulted(A.id, "XID 79", at=1), since=node(A, B))

    assert preferred(snapshot, "7g.40gb") == ["1:7g.40gb@0"]
    assert preferred(snapshot, "7g.40gb", 2) == ["0:7g.40gb@0", "1:7g.40gb@0"]


def test_what_must_be_is_among_the_chosen() -> None:
    """A device that the kubelet hands on from an init container is kept."""
    snapshot = node(A, B)
    must = named(snapshot, "2g.10gb@0", B)
    chosen = backend().prefer(free(snapshot, "2g.10gb"), (must,), 2, snapshot)

    assert must in chosen
    assert {share.gpu for share in chosen} == {B.id}


# --- what is refused and given --------------------------------------------------------------------


def test_instances_that_exclude_each_other_are_refused() -> None:
    """Two `+me` of one GPU want one engine: the refusal names them."""
    snapshot = node(A)
    two = [named(snapshot, "1g.5gb+me@0"), named(snapshot, "1g.5gb+me@1")]

    message = r"GPU 0 \(.*\) has room for one of 1g.5gb\+me@0, 1g.5gb\+me@1 at a time"
    with pytest.raises(Overlap, match=message):
        backend().check(two, snapshot)
    backend().check([named(snapshot, "2g.10gb@0"), named(snapshot, "2g.10gb@2")], snapshot)


async def test_a_container_is_given_its_mig_devices() -> None:
    """Uuids, memory of each, and the nodes of the GPU and its instances that exist."""
    injection = Injection(
        dev_root="/host",
        present=frozenset(
            (
                "/dev/nvidiactl",
                "/dev/nvidia0",
                *(f"/dev/nvidia-caps/nvidia-cap{n}" for n in (30, 31)),
            )
        ),
        capabilities={"gpu0/gi5/access": 30, "gpu0/gi5/ci0/access": 31, "gpu0/gi3/access": 21},
    )
    cutter = backend(injection=injection)
    made = {"2g.10gb@4": Made("MIG-b", 5, 0), "2g.10gb@0": Made("MIG-a", 3, 0)}
    snapshot = after(told(A, made), since=node(A))
    shares = [named(snapshot, "2g.10gb@4"), named(snapshot, "2g.10gb@0")]

    grant = await cutter.grant(shares, snapshot)
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
    assert await cutter.grant(shares[::-1], snapshot) == grant


async def test_mig_devices_may_be_named_by_mounts() -> None:
    """With volume-mounts each MIG device is a mount, as NVIDIA's runtime reads it."""
    injection = Injection(strategies=frozenset({DeviceListStrategy.VOLUME_MOUNTS}))
    snapshot = after(told(A, {"7g.40gb@0": Made("MIG-a", 0, 0)}), since=node(A))
    grant = await backend(injection=injection).grant([named(snapshot, "7g.40gb@0")], snapshot)

    assert [mount.container_path for mount in grant.mounts] == [
        "/var/run/nvidia-container-devices/MIG-a"
    ]


# --- what stock does to others --------------------------------------------------------------------


def test_what_was_given_back_is_withheld_until_it_is_idle() -> None:
    """In the turn in which a lease ends nobody gets its slices: first somebody looks at them."""
    share = named(node(A), "3g.20gb@0")
    held = after(
        SharesGranted((share,), at=1),
        told(A, {"3g.20gb@0": Made("MIG-a", 1, 0)}),
        LeasesObserved({share.id: POD}, at=2),
        since=node(A),
    )
    released = after(LeasesObserved({}, at=3), since=held)
    idle = after(told(A, {"3g.20gb@0": Made("MIG-a", 1, 0, idle=True)}), since=released)

    assert not released.gpus[A.id].leases
    assert [it.number for it in free(released, "3g.20gb")] == [1]
    assert hindrance(released.gpus[A.id], share).endswith("was just given back, and is looked at")
    assert [it.number for it in free(idle, "3g.20gb")] == [0, 1]


def test_a_share_that_was_just_left_may_be_had_again() -> None:
    """What may be had again is in nobody's way but that of others, until something blocks it."""
    left = Made("MIG-a", 1, 0, again=True)
    snapshot = after(told(A, {"3g.20gb@0": left}), since=node(A))
    used = after(told(A, {"3g.20gb@0": left}, blocked={"s0": "process 7 runs"}), since=node(A))

    assert [it.number for it in free(snapshot, "3g.20gb")] == [0, 1]
    assert not free(snapshot, "7g.40gb")
    assert [it.number for it in free(snapshot, "2g.10gb")] == [2]
    assert [it.number for it in free(used, "3g.20gb")] == [1]


def test_what_is_late_is_not_had_yet() -> None:
    """A share that has not had its turn is withheld; who holds it keeps it."""
    share = named(node(A), "3g.20gb@0")
    late = told(A, late=frozenset((share.id,)))

    assert [it.number for it in free(after(late, since=node(A)), "3g.20gb")] == [1]
    held = after(SharesGranted((share,), at=1), late, since=node(A))
    assert share.id not in held.gpus[A.id].withheld


def test_blocked_slots_are_withheld_with_their_reason() -> None:
    """Nobody gets what a foreign instance is on, and the refusal says what is there."""
    snapshot = after(told(A, blocked={"s0": "instance 1g.5gb@0 is there"}), since=node(A))

    assert not free(snapshot, "7g.40gb")
    assert hindrance(snapshot.gpus[A.id], named(snapshot, "7g.40gb@0")) == (
        f"GPU {A}: instance 1g.5gb@0 is there"
    )


def test_a_gpu_in_mig_mode_is_nobody_elses() -> None:
    """Shares that other backends offer of a GPU are withheld once MIG has it alone."""
    text = (
        "version: metagpu/v1\npools:\n  - name: all\n    backends:\n"
        "      - {backend: whole}\n      - {backend: mig, profiles: [7g.40gb]}\n"
    )
    plain = replace(A, mig_enabled=False)
    snapshot = after(
        GpusFound((plain,), at=0), laid_out(plain, text=text).offered, told(A, alone=True)
    )

    assert list(snapshot.gpus[A.id].withheld) == [ShareId(A.id)]
    assert "in the hands of mig" in hindrance(snapshot.gpus[A.id])
