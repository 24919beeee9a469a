"""Alert rules in deploy/monitoring: their cases, their form, and their pages."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.test_docs import anchors

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "deploy" / "monitoring" / "alerts.yaml"
ALERTS: Mapping[str, Mapping[str, Any]] = {
    rule["alert"]: rule for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
}
GPU = 'gpu="0",uuid="GPU-a",instance="gpu-1"'
NODE = 'instance="gpu-1"'
RESOURCE = 'resource="cnvrg.io/metagpu",instance="gpu-1"'
CONTAINER = f'namespace="team",pod="a",container="main",{GPU}'


class Case(NamedTuple):
    """A series by which an alert fires, and one by which it does not, in minutes.

    Attributes:
        firing: the values of the series, in promtool's words.
        quiet: values that are no reason: a blip, or a counter that stands or rises slowly.
    """

    series: str
    firing: str
    quiet: str


CASES: Mapping[str, Sequence[Case]] = {
    "MetagpuDown": [Case('up{job="kube-system/metagpu"}', "0x60", "1 0 0 1x60")],
    "MetagpuGone": [Case(f"metagpu_build_info{{{NODE}}}", "1x3 _x60", "1 _ _ _ 1x60")],
    "MetagpuNvmlUnavailable": [
        Case(f"metagpu_nvml_up{{{NODE}}}", "0x60", "1 0 0 1x60"),
        Case(f"metagpu_nvml_overdue_calls{{{NODE}}}", "2x60", "0 2 2 0x60"),
    ],
    "MetagpuGpuUnhealthy": [Case(f"metagpu_gpu_healthy{{{GPU}}}", "0x60", "1 0 1x60")],
    "MetagpuGpuUnreadable": [Case(f"metagpu_unreadable_gpus{{{NODE}}}", "1x60", "0 1 0x60")],
    "MetagpuFatalXid": [
        Case(f'metagpu_gpu_xid_events_total{{severity="fatal",{GPU}}}', "0x15 1x60", "4x60")
    ],
    "MetagpuMemoryErrors": [
        Case(f'metagpu_gpu_ecc_errors_total{{kind="uncorrected",{GPU}}}', "0x15 1x60", "2x60")
    ],
    "MetagpuNvlinkErrors": [
        Case(f'metagpu_gpu_nvlink_errors_total{{kind="replay",{GPU}}}', "0+120x80", "0+12x80")
    ],
    "MetagpuPcieReplays": [Case(f"metagpu_gpu_pcie_replays_total{{{GPU}}}", "0+120x80", "0+12x80")],
    "MetagpuThrottledByHeat": [
        Case(f'metagpu_gpu_clocks_throttled{{reason="{reason}",{GPU}}}', "1x60", "0 1x5 0x60")
        for reason in ("hardware_thermal", "software_thermal")
    ],
    "MetagpuPowerBrake": [
        Case(f'metagpu_gpu_clocks_throttled{{reason="power_brake",{GPU}}}', "1x60", "0 1 1 0x60")
    ],
    "MetagpuResourceNotRegistered": [
        Case(f"metagpu_resource_registered{{{RESOURCE}}}", "0x60", "1 0 0 1x60"),
        Case(f"metagpu_resource_registration_problem{{{RESOURCE}}}", "1x60", "_ 1 1 stale"),
    ],
    "MetagpuCompetingPlugin": [
        Case(f"metagpu_resource_served_by_other_plugin{{{RESOURCE}}}", "1x60", "_ 1 stale")
    ],
    "MetagpuPodsRefused": [
        Case(
            f'metagpu_kubelet_calls_total{{call="Allocate",outcome="refused",{RESOURCE}}}',
            *("0+1x60", "0x10 1x60"),
        )
    ],
    "MetagpuConfigRejected": [
        Case(f"metagpu_config_last_reload_successful{{{NODE}}}", "0x60", "1 0 1x60")
    ],
    "MetagpuApiServerUnreachable": [
        Case(f"metagpu_api_server_connected{{{NODE}}}", "0x60", "1 0x5 1x60")
    ],
    "MetagpuFeatureFailing": [
        Case(f'metagpu_api_server_feature_healthy{{feature="labels",{NODE}}}', "0x60", "1 0x5 1x60")
    ],
    "MetagpuDriverHeld": [
        Case(f"metagpu_driver_upgrade_holding_pods{{{NODE}}}", "0 2x60", "0 2x5 0x60")
    ],
    "MetagpuUnauthorizedUse": [
        Case(f"metagpu_gpu_unauthorized_containers_total{{{GPU}}}", "0x15 1x60", "3x60")
    ],
    "MetagpuProcessEnded": [
        Case(f'metagpu_enforcement_signals_total{{signal="SIGKILL",{GPU}}}', "0x15 1x60", "3x60")
    ],
    "MetagpuMpsDaemonDown": [Case(f"metagpu_mps_control_daemon_up{{{GPU}}}", "0x60", "1 0 1x60")],
    "MetagpuOrphanedLeases": [
        Case(f"metagpu_gpu_orphaned_leases{{{GPU}}}", "2x900", "2x120 0x900")
    ],
    "MetagpuIdleShares": [
        Case(f"metagpu_container_processes{{{CONTAINER}}}", "0x900", "0x200 1 0x900")
    ],
    "MetagpuWebhookDown": [
        Case('up{job="kube-system/metagpu-webhook",instance="10.0.0.9"}', "0x60", "1 0 0 1x60"),
        Case('metagpu_webhook_nodes_watched{instance="10.0.0.9"}', "0x60", "1 0 0 1x60"),
    ],
    "MetagpuWebhookCertificateEnds": [
        Case(
            'metagpu_webhook_certificate_expiry_timestamp_seconds{instance="10.0.0.9"}',
            *("86400x60", "2000000x60"),
        )
    ],
}
"""A case for each half of a rule: what joins two conditions fires by either alone."""


def test_every_rule_has_its_case() -> None:
    """Prometheus' own test of rules has a cause and a blip for each alert, by every metric."""
    assert CASES.keys() == ALERTS.keys()
    for name, cases in CASES.items():
        in_rule = set(re.findall(r"\bmetagpu_\w+|\bup\b", ALERTS[name]["expr"]))
        assert {re.split(r"\W", other.series)[0] for other in cases} == in_rule, name


def test_the_page_says_how_many_rules_there_are() -> None:
    """The number in metrics.md is that of the rules."""
    assert f"has {len(ALERTS)} rules" in (ROOT / "docs" / "metrics.md").read_text()


def test_a_blip_is_shorter_than_the_pause_of_its_rule() -> None:
    """Rules of a state wait, so that a restart of the daemon wakes nobody."""
    counters = {
        name for name, cases in CASES.items() if all("_total" in other.series for other in cases)
    }
    assert {name for name, document in ALERTS.items() if "for" not in document} <= counters


@pytest.mark.parametrize("alert", ALERTS.values(), ids=ALERTS)
def test_a_rule_leads_to_its_page(alert: Mapping[str, Any]) -> None:
    """Each alert has a severity, a summary, and a heading of its own on an existing page."""
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert alert["annotations"]["summary"]
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert anchor == alert["alert"].lower()
    assert anchor in anchors(ROOT / page)
    text = (ROOT / page).read_text()
    assert f"`{alert['expr']}`" in text
    assert f"`{alert['labels']['severity']}`" in text
