"""What a release consists of, written into one folder of `dist/` from a commit and the lock files.

`images` makes one archive of the images of both processors, `plugin` the program of kubectl,
`documents` chart, notes and statements; CONTRIBUTING.md says how a release is made.
"""
