"""The schema of a daemon's reports: status and usage, as structs.

The daemon writes them; kubectl, the page, tables and the doctor read them.

A field without a default is in every report of this release. docs/status.md is made of this
package: after a change run `make reasons`.
"""
