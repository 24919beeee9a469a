"""The DRA driver: the kubelet's side of ResourceClaims.

It stands on the kubelet's side of the device plugin API, and shares its server, waits and checks.
The slices that the scheduler reads are written by `plugins/cluster`.
"""
