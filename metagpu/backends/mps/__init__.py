"""The backend `mps`: units of one GPU through NVIDIA's Multi-Process Service.

The commands to the control daemon and its supervision live in `backends.common.mps_daemon`.
"""
