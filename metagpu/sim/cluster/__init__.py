"""A cluster of one simulated node: API server, scheduler, kubelet.

`metagpu run --simulate … --with-kubelet` runs it beside the agent, and `metagpu sim` changes it.
"""
