"""The admission webhook: pods of other projects get resources of the nodes.

`connection` and `messages` alone know aiohttp; `reviews` is pure, and `translator` answers from
memory.
"""
