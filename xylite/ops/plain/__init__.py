"""Parts of the reference table that have a file of their own.

They lie in a package because every module of `ops` is a device.
"""
