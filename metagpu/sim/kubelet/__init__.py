"""The device manager of a kubelet, with its hazards.

Nothing here knows metagpu's agent.
"""
