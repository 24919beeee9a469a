"""Tables and text for people, drawn from plain data; no library is needed.

`mgctl`, `metagpu status` and the daemon draw with it, so nothing here may load a plugin.
"""
