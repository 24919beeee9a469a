"""MetaGPU's config.yaml: honoured keys, notes and refusals."""

import pytest

from tests.compat.rig import FILES, converted, notes, offered, pools, refusal
from tests.rigs.build import gpu

SHIPPED = (FILES / "metagpu-config.yaml").read_text(encoding="utf-8")
ONE = """\
deviceSharing:
  - resourceName: example.com/part
    uuid: ["*"]
    metagpusPerGpu: 8
"""


def test_the_shipped_file_gives_the_shares_of_its_manual() -> None:
    """The shipped file gives 200 shares of cnvrg.io/metagpu on two GPUs."""
    assert offered(converted(SHIPPED), gpu(0), gpu(1)) == {"cnvrg.io/metagpu": 200}


def test_every_key_without_effect_has_one_note() -> None:
    """Each key of the shipped file without effect has one note on its effect in MetaGPU."""
    lines = notes(SHIPPED)

    assert [line.split(": ")[2] for line in lines] == [
        "processesDiscoveryPeriod",
        "deviceCacheTTL",
        "jwtSecret",
        "deviceToken",
        "containerToken",
        "mgctlTar",
        "serverAddr",
        "deviceSharing[0].metaGpus",
    ]
    assert lines[1] == (
        "f.yaml: 3: deviceCacheTTL: has no effect here; it would have set how often GPUs are read; "
        "see `health.rescanPeriod`"
    )


@pytest.mark.parametrize(
    ("said", "policy"),
    [("memoryEnforcer: true\n", "kill"), ("memoryEnforcer: false\n", "off"), ("", None)],
)
def test_the_memory_enforcer_becomes_a_policy(said: str, policy: str | None) -> None:
    """MetaGPU's enforcer becomes `kill`, or `off` without it; the default is ours."""
    [pool] = pools(said + ONE)

    assert pool.get("memoryEnforcement") == (None if policy is None else {"policy": policy})
    assert offered(converted(said + ONE), gpu(0)) == {"example.com/part": 8}


def test_containers_get_the_names_that_metagpus_images_read() -> None:
    """MetaGPU's file asks for MetaGPU's variables, which metagpu's own leaves out."""
    [pool] = pools(ONE)
    assert pool["backends"][0]["metagpuEnv"] is True


@pytest.mark.parametrize("wanted", [True, False])
def test_mgctl_is_in_containers_where_it_was(wanted: bool) -> None:  # noqa: FBT001 - the key's value
    """The folders that MetaGPU copied into containers are mounted there, or not."""
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


def test_the_unread_key_has_its_evident_meaning() -> None:
    """`metaGpus`, which MetaGPU never read, counts where no other key does, with a note."""
    text = ONE.replace("metagpusPerGpu", "metaGpus")

    assert offered(converted(text), gpu(0)) == {"example.com/part": 8}
    assert notes(text) == [
        (
            "f.yaml: 4: deviceSharing[0].metaGpus: taken for metagpusPerGpu, the only key of the "
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
    """An unknown key has a note with the nearest known key."""
    assert notes("memoryEnforcr: true\n" + ONE) == [
        "f.yaml: 1: memoryEnforcr: unknown key, has no effect; did you mean memoryEnforcer?"
    ]
    assert notes("memoryEnforcer: false\nmgctlAutoInject: false\nnodename: ''\n" + ONE) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "accelerator: amd\n" + ONE,
            "f.yaml: 1: accelerator: 'amd' is unknown; allowed: nvidia",
        ),
        (
            "deviceSharing: []",
            "f.yaml: 1: deviceSharing: there is no entry; give at least one",
        ),
        ("accelerator: nvidia", "f.yaml: 1: deviceSharing: there is no entry; give at least one"),
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
            "f.yaml: 4: deviceSharing[0].metagpusPerGpu: metagpusPerGpu is 0; allowed: 1 to 70000",
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
                "f.yaml: 2: deviceSharing[0].resourceName: invalid resource name 'part': it needs "
                "a domain, one `/` and a name, as in cnvrg.io/metagpu"
            ),
        ),
    ],
)
def test_a_mistake_is_refused_with_the_operators_own_line(text: str, message: str) -> None:
    """Each refusal names file, line and path in the file as the operator wrote it."""
    assert refusal(text) == message


def test_several_entries_of_one_name_have_pools_of_their_own() -> None:
    """Pools are named after the resource, each once."""
    entry = "  - {resourceName: a.b/c, uuid: ['*'], metagpusPerGpu: 1}\n"

    assert [pool["name"] for pool in pools("deviceSharing:\n" + 2 * entry)] == ["c", "c (2)"]


def test_the_older_form_has_one_entry() -> None:
    """`resourceName` and `autoReshare` at the top, as in MetaGPU's static.yaml, are of all GPUs."""
    text = "accelerator: nvidia\nresourceName: cnvrg.io/metagpu\nmetaGpus: 2\nautoReshare: true\n"

    assert offered(converted(text), gpu(0), gpu(1)) == {"cnvrg.io/metagpu": 200}
    assert offered(converted(text.replace("true", "false")), gpu(0)) == {"cnvrg.io/metagpu": 2}


def test_variables_of_the_daemon_win_over_the_file() -> None:
    """METAGPU_DEVICE_PLUGIN_MEMORYENFORCER and MGCTLAUTOINJECT count more; others have a note."""
    environment = {
        "METAGPU_DEVICE_PLUGIN_MEMORYENFORCER": "false",
        "METAGPU_DEVICE_PLUGIN_MGCTLAUTOINJECT": "false",
        "METAGPU_DEVICE_PLUGIN_NODENAME": "n",
        "METAGPU_DEVICE_PLUGIN_SERVERADDR": ":1",
    }
    conversion = converted(f"memoryEnforcer: true\n{ONE}", environment=environment)

    assert conversion.data["pools"][0]["memoryEnforcement"] == {"policy": "off"}
    assert conversion.data["mgctl"] == {"inPods": False}
    assert list(map(str, conversion.notes)) == [
        (
            "environment: METAGPU_DEVICE_PLUGIN_SERVERADDR: has no effect here; docs/compat.md has "
            "each key"
        )
    ]
    assert refusal(ONE, environment={"METAGPU_DEVICE_PLUGIN_ACCELERATOR": "amd"}) == (
        "environment: METAGPU_DEVICE_PLUGIN_ACCELERATOR: 'amd' is unknown; allowed: nvidia"
    )
