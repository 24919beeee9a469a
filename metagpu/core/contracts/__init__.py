"""Protocols and base classes for the driver, the host, and backends.

Contracts only: implementations live in `nvml`, `host`, `backends`, and `sim`.
"""
