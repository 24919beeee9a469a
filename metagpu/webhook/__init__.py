"""The admission webhook: pods of other projects get resources of the nodes.

`server` alone knows aiohttp; `reviews` is pure, and `translator` answers from memory.
"""
