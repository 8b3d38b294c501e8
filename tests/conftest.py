"""What all tests share."""

import os
from importlib import metadata, util


def _has_ascend_compiler() -> bool:
    try:
        metadata.version("triton-ascend")
    except metadata.PackageNotFoundError:
        return False
    return True


# triton-ascend replaces triton, so its tests have an environment of their own: make test-ascend.
collect_ignore = [] if _has_ascend_compiler() else ["ascend"]

if not _has_ascend_compiler():
    # Kernels run in Triton's interpreter, which is chosen when triton itself is imported: before
    # any test's imports, whichever comes first.
    os.environ["TRITON_INTERPRET"] = "1"

if util.find_spec("hypothesis"):  # the Ascend environment has none
    from hypothesis import HealthCheck, settings

    # The same examples in every run, however slow the machine is and however large they are.
    settings.register_profile(
        "fixed",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("fixed")
