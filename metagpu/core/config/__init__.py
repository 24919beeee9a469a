"""The configuration file: parsing, validation, errors with their place, profiles.

Options of one backend belong to that backend; files of other projects to `compat`.
"""
