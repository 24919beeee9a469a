"""The backend `fraction`: equal shares of a GPU's memory.

It changes nothing on the GPU and imports no other backend.
"""
