"""The page: GPUs, their shares and their pods in a browser.

`server` and its libraries are loaded only with an address (`--web`).
"""
