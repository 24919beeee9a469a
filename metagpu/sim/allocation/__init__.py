"""Allocation of ResourceClaims as in kube-scheduler 1.36.3, for one node. Pure.

The modules follow `k8s.io/dynamic-resource-allocation/structured`, the allocator "incubating", in
all that DeviceClasses and claims of GPUs use. tests/e2e/test_claim_decisions.py compares both.
"""
