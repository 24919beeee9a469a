"""Availability of shares: the table of reasons, the rule of sharing, exact offers.

Pure functions of snapshots: lists, amounts, grants and reports follow from them.
"""
