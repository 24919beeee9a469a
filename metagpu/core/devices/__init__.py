"""Devices of DRA, computed from shares: the scheduler allocates them.

The modules know neither the API server nor gRPC. A device's name is for ever: ResourceClaims that
are allocated have it.
"""
