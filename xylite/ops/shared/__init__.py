"""What tables are made of and has a file of its own.

These lie in a package because every module of `ops` is a device.
"""
