"""Kernels run in Triton's interpreter here: the switch must be set before they are imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
