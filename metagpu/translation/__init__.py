"""Requests in HAMi's terms become requests for resources of the nodes.

A pod names GPUs, MiB and percents; the scheduler counts resources. Everything here is pure: a pod
and the Nodes go in, a JSON Patch and sentences come out.
"""
