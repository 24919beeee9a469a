"""MetaGPU's config.yaml: what is honoured, what is told, what is refused."""

import pytest

from tests.build import gpu
from tests.compat.rig import FILES, converted, notes, offered, pools, refusal

SHIPPED = (FILES / "metagpu-config.yaml").read_text(encoding="utf-8")
ONE = """\
deviceSharing:
  - resourceName: example.com/part
    uuid: ["*"]
    metagpusPerGpu: 8
"""


def test_what_metagpu_ships_gives_what_its_manual_says() -> None:
    """Two GPUs are 200 shares of cnvrg.io/metagpu."""
    assert offered(converted(SHIPPED), gpu(0), gpu(1)) == {"cnvrg.io/metagpu": 200}


def test_every_key_without_effect_is_told_once() -> None:
    """Of the shipped file each key that does nothing here has one note that says what it did."""
    told = notes(SHIPPED)

    assert [line.split(": ")[2] for line in told] == [
        "processesDiscoveryPeriod",
        "deviceCacheTTL",
        "jwtSecret",
        "deviceToken",
        "containerToken",
        "mgctlTar",
        "serverAddr",
        "deviceSharing[0].metaGpus",
    ]
    assert told[1] == (
        "f.yaml: 3: deviceCacheTTL: has no effect here; it would have set how often GPUs are read; "
        "see `health.rescanPeriod`"
    )


@pytest.mark.parametrize(
    ("said", "policy"),
    [("memoryEnforcer: true\n", "kill"), ("memoryEnforcer: false\n", "off"), ("", None)],
)
def test_the_memory_enforcer_ends_processes_or_nobody(said: str, policy: str | None) -> None:
    """MetaGPU's enforcer is our policy `kill`, without it `off`; unsaid, our default holds."""
    [pool] = pools(said + ONE)

    assert pool.get("memoryEnforcement") == (None if policy is None else {"policy": policy})
    assert offered(converted(said + ONE), gpu(0)) == {"example.com/part": 8}


@pytest.mark.parametrize("wanted", [True, False])
def test_mgctl_is_in_containers_where_it_was(wanted: bool) -> None:  # noqa: FBT001 - the key's value
    """What MetaGPU copied into containers is mounted there, or is not."""
    read = converted(f"mgctlAutoInject: {str(wanted).lower()}\n" + ONE)

    assert read.data["mgctl"] == {"inPods": wanted}
    assert offered(read, gpu(0)) == {"example.com/part": 8}


def test_gpus_by_uuid_in_the_order_of_entries() -> None:
    """Each entry is a pool of its own, of its GPUs, shares and name."""
    text = f"""\
deviceSharing:
  - {{resourceName: example.com/a, uuid: [{gpu(1).id}], metagpusPerGpu: 3}}
  - {{resourceName: example.com/b, uuid: ["*"], autoReshare: true}}
"""

    assert offered(converted(text), gpu(0), gpu(1)) == {"example.com/a": 3, "example.com/b": 100}


def test_the_dead_key_means_what_people_meant() -> None:
    """`metaGpus`, which MetaGPU never read, counts where nothing else does, and is told."""
    text = ONE.replace("metagpusPerGpu", "metaGpus")

    assert offered(converted(text), gpu(0)) == {"example.com/part": 8}
    assert notes(text) == [
        (
            "f.yaml: 4: deviceSharing[0].metaGpus: taken for metagpusPerGpu, the only one of the "
            "two that MetaGPU reads"
        )
    ]
    assert notes(ONE + "    metaGpus: 2\n") == [
        (
            "f.yaml: 5: deviceSharing[0].metaGpus: has no effect, as in MetaGPU: metagpusPerGpu is "
            "given"
        )
    ]


def test_an_unknown_key_is_a_note() -> None:
    """A key that nobody knows is told, with the one that was meant."""
    assert notes("memoryEnforcr: true\n" + ONE) == [
        "f.yaml: 1: memoryEnforcr: unknown key, has no effect; did you mean memoryEnforcer?"
    ]
    assert notes("memoryEnforcer: false\nmgctlAutoInject: false\nnodename: ''\n" + ONE) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "accelerator: amd\n" + ONE,
            "f.yaml: 1: accelerator: 'amd' is not known here; allowed: nvidia",
        ),
        (
            "deviceSharing: []",
            "f.yaml: 1: deviceSharing: there is no entry; give at least one",
        ),
        ("accelerator: nvidia", "f.yaml: 1: missing key `deviceSharing`"),
        (
            ONE.replace('["*"]', f'["*", {gpu(0).id}]'),
            'f.yaml: 3: deviceSharing[0].uuid: "*" is all GPUs and stands alone; name GPUs or all',
        ),
        (
            ONE.replace('["*"]', "[]"),
            'f.yaml: 3: deviceSharing[0].uuid: no GPU is named; write ["*"] for all',
        ),
        (
            ONE.replace("    metagpusPerGpu: 8\n", ""),
            (
                "f.yaml: 2: deviceSharing[0]: no number of shares; give metagpusPerGpu, or "
                "autoReshare: true for 100"
            ),
        ),
        (
            ONE.replace("8", "0"),
            "f.yaml: 2: deviceSharing[0]: sharesPerGpu is 0; allowed: 1 to 100000",
        ),
        (
            ONE.replace("8", "many"),
            (
                "f.yaml: 4: deviceSharing[0].metagpusPerGpu: expected a whole number or nothing, "
                "got a text"
            ),
        ),
        (
            ONE.replace("example.com/part", "part"),
            (
                "f.yaml: 2: deviceSharing[0]: 'part' is no resource name: it needs a domain, one "
                "`/` and a name, as in cnvrg.io/metagpu"
            ),
        ),
    ],
)
def test_a_mistake_is_told_of_the_operators_own_line(text: str, message: str) -> None:
    """Each refusal names file, line and path in the file as the operator wrote it."""
    assert refusal(text) == message


def test_several_entries_of_one_name_have_pools_of_their_own() -> None:
    """Pools are named after the resource, each once."""
    entry = "  - {resourceName: a.b/c, uuid: ['*'], metagpusPerGpu: 1}\n"

    assert [pool["name"] for pool in pools("deviceSharing:\n" + 2 * entry)] == ["c", "c (2)"]
