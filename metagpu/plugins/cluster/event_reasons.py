"""The reasons of Kubernetes Events, by which people filter: they never change.

docs/events.md has the meaning of each.
"""

from enum import StrEnum
from typing import Final


class EventReason(StrEnum):
    """The reason of an Event."""

    COMPETING_PLUGIN = "CompetingDevicePlugin"
    CONFIG_APPLIED = "ConfigApplied"
    CONFIG_REJECTED = "ConfigRejected"
    DRIVER_UPGRADE_ENDED = "DriverUpgradeEnded"
    DRIVER_UPGRADE_UNDER_WAY = "DriverUpgradeUnderWay"
    GPU_CLAIM_REFUSED = "GPUClaimRefused"
    GPU_CORDONED = "GPUCordoned"
    GPU_DEVICE_LOST = "GPUDeviceLost"
    GPU_DRIVER_UPGRADE = "GPUDriverUpgrade"
    GPU_EVENTS_UNAVAILABLE = "GPUEventsUnavailable"
    GPU_MEMORY_ANNOTATION_REJECTED = "GPUMemoryAnnotationRejected"
    GPU_MEMORY_EXCEEDED = "GPUMemoryExceeded"
    GPU_NOT_VISIBLE = "GPUNotVisible"
    GPU_PREFERENCE_NOT_MET = "GPUPreferenceNotMet"
    GPU_PROCESS_SIGNALED = "GPUProcessSignaled"
    GPU_RECOVERED = "GPURecovered"
    GPU_REQUEST_IMPOSSIBLE = "GPURequestImpossible"
    GPU_REQUEST_REFUSED = "GPURequestRefused"
    GPU_REQUEST_TOO_LARGE = "GPURequestTooLarge"
    GPU_RESET_NEEDED = "GPUResetNeeded"
    GPU_SHARE_WITHOUT_CONTAINER = "GPUShareWithoutContainer"
    GPU_UNCORDONED = "GPUUncordoned"
    GPU_UNHEALTHY = "GPUUnhealthy"
    GPU_UNREADABLE = "GPUUnreadable"
    GPU_USED_WITHOUT_SHARE = "GPUUsedWithoutShare"
    MIG_DEVICE_RECOVERED = "MIGDeviceRecovered"
    MIG_DEVICE_UNHEALTHY = "MIGDeviceUnhealthy"
    MIG_LAYOUT_REJECTED = "MIGLayoutRejected"
    NODE_AMOUNT_DIFFERS = "NodeAmountDiffers"
    REGISTRATION_PROBLEM = "RegistrationProblem"
    REJECTED_POD_DELETED = "RejectedPodDeleted"
    REJECTED_POD_FOUND = "RejectedPodFound"
    RESOURCE_SLICE_FIELDS_DROPPED = "ResourceSliceFieldsDropped"


SEVERE: Final = frozenset(
    (
        *(EventReason.GPU_UNHEALTHY, EventReason.GPU_UNREADABLE, EventReason.GPU_RESET_NEEDED),
        *(EventReason.MIG_DEVICE_UNHEALTHY, EventReason.GPU_DEVICE_LOST),
    )
)
"""Reasons of a fault of hardware: errors where others are warnings."""
