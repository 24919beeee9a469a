"""Other programs' configuration files, as configurations of ours.

One module for each format, each a pure function: documents in, plain data of `metagpu/v1` and notes
out. A key is honoured, or one note says what it would have done. Nothing here reads a file, knows a
GPU, or knows which backends are installed.
"""
