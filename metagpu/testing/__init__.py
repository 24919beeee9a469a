"""Public API for tests of backends: values, a simulated node, the contract suite.

This package imports `core`, `nvml` and `sim`, and no test framework. The agent never imports it.
docs/development/your-own-backend.md shows its use.
"""
