"""The layout: the configuration applied to the GPUs of this node.

Its diff and the backend runner live here too.

Reading configurations is `core.config`'s work; the agent decides when a layout is applied.
"""
