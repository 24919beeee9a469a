"""The backend `whole`: GPUs in one piece, and the choice of well connected ones.

It changes nothing on the GPU and imports no other backend.
"""
