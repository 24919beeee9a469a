"""Monitoring over HTTP: metrics for Prometheus, probes for the kubelet.

`exporter` and its libraries are loaded only with an address (`--metrics`).
"""
