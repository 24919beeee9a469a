"""The admission webhook: pods of other projects get resources of the nodes.

`server` alone knows aiohttp; `reviews` and `translator` are pure, and answer from memory.
"""
