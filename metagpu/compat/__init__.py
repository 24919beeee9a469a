"""Conversion of other programs' configuration files to `metagpu/v1`.

Each format has a module with a pure function: documents in, plain data and notes out. A key is
honoured, or one note names the effect that the key would have had. Nothing here reads a file, knows
a GPU, or knows which backends are installed.
"""
