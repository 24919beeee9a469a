"""The containers' side: the folder with `mgctl` in each pod, and its server.

A caller learns about its own pod alone, and cannot change anything here.
"""
