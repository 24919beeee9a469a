"""What monitoring sees of a node: metrics for Prometheus, probes for the kubelet, over HTTP.

Nothing of it is loaded where no address is given (`--metrics`); `exporter` is where it begins.
"""
