"""How fast each op of a device table is, against the device's own roofline, torch, and plain
kernels: see `python -m bench.ops --help`."""
