"""The division of a layout's instances: ids, slots and memory of shares; options of MPS."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.backends.common.packing import PlacementPolicy
from metagpu.backends.mig.backend import MigBackend
from metagpu.backends.mig.options import MigOptions
from metagpu.backends.mig.sharing import MigMpsOptions
from metagpu.core.availability.conflict import conflicting_shares, conflicts, orphaned_leases
from metagpu.core.config.config import parse
from metagpu.core.config.errors import ConfigError
from metagpu.core.config.units import Bytes
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.checks import ID_LIMIT
from metagpu.core.model.gpu import MIB, Gpu
from metagpu.core.model.mig import is_mps_share, slot_of
from metagpu.core.model.shares import ShareId
from metagpu.core.state.facts import GpusFound, SharesClaimed
from metagpu.sim.machine.gpu_models import GPU_MODELS
from tests.backends.mig.gpus import mig_gpu
from tests.rigs.build import BACKENDS, METAGPU, after, offer

A = mig_gpu()
LAYOUT = {"2g.10gb": 2, "1g.5gb": 3}


def backend(layout: dict[str, int] | None = None, **mps: Any) -> MigBackend:  # noqa: ANN401
    """Create the backend of a pool that shares instances through MPS."""
    mps_options = MigMpsOptions(**mps)
    return MigBackend(MigOptions("mig", layout=layout or LAYOUT, mps=mps_options), Injection())


def slots(cutter: MigBackend, gpu: Gpu = A) -> list[str]:
    """Return the offered ids of a GPU, without its name."""
    return [share.id.partition("::")[2] for share in cutter.shares(gpu)]


def test_an_instance_has_units() -> None:
    """Ids have instance and unit, slots are those of no other unit, and memory is divided."""
    cutter = backend({"3g.20gb": 1}, units_per_instance=3)
    shares = list(cutter.shares(A))

    assert slots(cutter) == ["3g.20gb@4-p0", "3g.20gb@4-p1", "3g.20gb@4-p2"]
    assert {share.resource for share in shares} == {"nvidia.com/mig-3g.20gb.shared"}
    assert {share.memory for share in shares} == {(19968 - 64) * MIB // 3}
    assert shares[1].footprint == {"s4-p1", "s5-p1", "s6-p1", "s7-p1"}
    assert not any(conflicts(a, b) for a in shares for b in shares if a is not b)


def test_a_hundred_units_by_default() -> None:
    """Every instance of the layout has a hundred units, as a GPU under MPS has."""
    assert Counter(share.resource for share in backend().shares(A)) == {
        "nvidia.com/mig-2g.10gb.shared": 200,
        "nvidia.com/mig-1g.5gb.shared": 300,
    }


def test_each_profile_is_divided_in_its_own_way() -> None:
    """MPS units, MPS replicas, time slices and instances of one container exist side by side."""
    layout = {"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 1, "1g.5gb+me": 1}
    mps_options = MigMpsOptions(units_per_instance={"3g.20gb": 2}, replicas={"2g.10gb": 2})
    options = MigOptions("mig", layout=layout, mps=mps_options, replicas={"1g.5gb": 2})
    found = Counter(
        slot.partition("@")[0] + slot.partition("@")[2].lstrip("0123456789")
        for slot in slots(MigBackend(options, Injection()))
    )

    assert found == {
        **dict.fromkeys(("3g.20gb-p0", "3g.20gb-p1", "2g.10gb-p0", "2g.10gb-p1"), 1),
        **dict.fromkeys(("1g.5gb-t0", "1g.5gb-t1", "1g.5gb+me"), 1),
    }


@pytest.mark.parametrize(
    ("model", "profile", "usual", "most"),
    [
        ("a100-40gb", "1g.5gb", 6, 8),
        ("a100-40gb", "2g.10gb", 13, 17),
        ("a100-40gb", "3g.20gb", 20, 25),
        ("a100-40gb", "7g.40gb", 48, 60),
        ("a30", "1g.6gb", 12, 15),
        ("a30", "4g.24gb", 48, 60),
    ],
)
def test_clients_are_in_proportion_to_the_instance(
    model: str, profile: str, usual: int, most: int
) -> None:
    """An instance serves its compute slices' part of a GPU's 48 clients, or the pool's number."""
    gpu = mig_gpu(0, model)

    assert len(backend({profile: 1}, replicas=60).shares(gpu)) == usual
    assert len(backend({profile: 1}, replicas=60, max_clients=60).shares(gpu)) == most
    assert len(backend({profile: 1}, replicas=60, max_clients=1).shares(gpu)) == 1


def test_more_units_than_clients_are_fine() -> None:
    """A container may take several units: units are no clients."""
    assert len(backend({"1g.5gb": 1}, units_per_instance=100).shares(A)) == 100


def test_an_instance_without_memory_offers_nothing() -> None:
    """An instance with no more memory than the server's own has no shares."""
    assert backend(server_memory=Bytes(5000 * MIB), units_per_instance={"1g.5gb": 2}).shares(A)
    assert not backend({"1g.5gb": 1}, server_memory=Bytes(5000 * MIB)).shares(A)


@given(units=st.integers(1, 100), server=st.integers(0, 2000))
def test_all_units_fit(units: int, server: int) -> None:
    """The memory of all units and of the server is no more than the instance has."""
    shares = backend(
        {"1g.5gb": 1}, units_per_instance=units, server_memory=Bytes(server * MIB)
    ).shares(A)

    assert sum(share.memory for share in shares) <= (4864 - server) * MIB


def test_the_longest_ids_are_legal() -> None:
    """Ids have legal length with the most units of every profile of every GPU model."""
    gpus = [mig_gpu(0, name) for name, model in GPU_MODELS.items() if model.mig_profiles]
    lengths = [
        max(len(share.id) for share in backend({profile.name: 1}).shares(gpu))
        for gpu in gpus
        for profile in gpu.mig_profiles
    ]
    assert max(lengths) <= ID_LIMIT


@pytest.mark.parametrize("slot", ["1g.24gb-me@3", "2g.10gb@4", "1g.5gb+me@0"])
@pytest.mark.parametrize(("ending", "mps"), [("", False), ("-t3", False), ("-p12", True)])
def test_an_id_has_instance_and_mps(slot: str, ending: str, *, mps: bool) -> None:
    """The instance and MPS are read back from an id, also where a profile's name has a dash."""
    share = ShareId(f"{A.id}::{slot}{ending}")

    assert (slot_of(share), is_mps_share(share)) == (slot, mps)


@pytest.mark.parametrize("share", [f"{A.id}::m07", f"{A.id}::p12", A.id])
def test_ids_of_others_are_none_of_ours(share: str) -> None:
    """A fraction, a unit of a whole GPU and a GPU have no ending."""
    assert not is_mps_share(share)


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("mps: {unitsPerInstance: 101}", "unitsPerInstance is 101; allowed: 1 to 100"),
        ("mps: {replicas: {1g.5gb: 61}}", "replicas is 61; allowed: 1 to 60"),
        ("mps: {sharedMemory: 1Mi}", "sharedMemory is 1048576 bytes; allowed: 64Mi or more"),
        ("mps: {maxClients: 0}", "maxClients is 0; allowed: 1 to 60"),
        (
            "mps: {unitsPerInstance: 10, replicas: 2}",
            "unitsPerInstance and replicas contradict each other; give one of them, or each for o",
        ),
        (
            "mps: {unitsPerInstance: {1g.5gb: 10}, replicas: {1g.5gb: 2}}",
            "unitsPerInstance and replicas contradict each other",
        ),
        (
            "mps: {replicas: {3g.20gb: 2}}",
            "mps.replicas names 3g.20gb, which this backend does not offer; it has 1g.5gb",
        ),
        (
            "mps: {}, replicas: 2",
            r"containers of a 1g.5gb either take turns \(replicas\) or compute at the same time \(",
        ),
        ("mps: {units: 3}", "unknown key; allowed: maxClients, placement, replicas, serverMemory"),
    ],
)
def test_options_that_make_no_sense(options: str, problem: str) -> None:
    """Wrong options are refused with file, line and path."""
    text = (
        "version: metagpu/v1\n"
        f"pools: [{{name: a, backends: [{{backend: mig, layout: {{1g.5gb: 7}}, {options}}}]}}]"
    )
    with pytest.raises(ConfigError, match=rf"t.yaml: 2: pools\[0\].backends\[0\].*{problem}"):
        parse(text, "t.yaml", BACKENDS)


def test_mps_is_of_layouts() -> None:
    """An instance that is created for a pod has no MPS."""
    with pytest.raises(ValueError, match="mps is for a layout; an instance created on demand"):
        MigOptions("mig", profiles=("1g.5gb",), mps=MigMpsOptions())


def test_every_mps_key_is_read() -> None:
    """Every key of `mps` is read from a file."""
    text = (
        "version: metagpu/v1\npools: [{name: a, backends: [{backend: mig, layout: {1g.5gb: 7}, "
        "mps: {replicas: {1g.5gb: 4}, placement: spread, maxClients: 60, serverMemory: 128Mi, "
        "sharedMemory: 256Mi}}]}]"
    )
    [[options]] = parse(text, "t.yaml", BACKENDS).options.values()
    assert isinstance(options, MigOptions)
    assert options.mps == MigMpsOptions(
        replicas={"1g.5gb": 4},
        placement=PlacementPolicy.SPREAD,
        max_clients=60,
        server_memory=Bytes(128 * MIB),
        shared_memory=Bytes(256 * MIB),
    )


DIVISIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "two units": {"mps": MigMpsOptions(units_per_instance=2)},
    "four units": {"mps": MigMpsOptions(units_per_instance=4)},
    "two replicas": {"replicas": 2},
    "four replicas": {"replicas": 4},
}


@pytest.mark.parametrize("layout", [{"1g.5gb": 7}, {"2g.10gb": 3}])
@given(st.sampled_from(sorted(DIVISIONS)), st.sampled_from(sorted(DIVISIONS)), st.data())
def test_no_instance_is_given_twice_by_a_reload(
    layout: dict[str, int], before: str, now: str, data: st.DataObject
) -> None:
    """A reload divides instances in another way: nothing of a GPU with held ones is free.

    Shares of one instance cannot be counted against those of another.
    """
    old, new = (
        list(
            MigBackend(
                MigOptions("mig", layout=layout, resource=METAGPU, **DIVISIONS[text]), Injection()
            ).shares(A)
        )
        for text in (before, now)
    )
    held = data.draw(st.lists(st.sampled_from(old), min_size=1, unique=True))
    claimed = SharesClaimed(tuple(held), at=1)
    state = after(GpusFound((A,), at=0), offer(*old), claimed, offer(*new)).gpus[A.id]
    unchanged = {(share.id, share.footprint) for share in new} >= {
        (share.id, share.footprint) for share in held
    }

    if before == now or (unchanged and "replicas" in before and "replicas" in now):
        assert orphaned_leases(state.shares, state.leases) == ()
    else:
        assert {share.id for share in new} <= conflicting_shares(state) | state.leases.keys()
