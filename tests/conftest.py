"""What all tests share."""

from importlib import metadata


def _has_ascend_compiler() -> bool:
    try:
        metadata.version("triton-ascend")
    except metadata.PackageNotFoundError:
        return False
    return True


# triton-ascend replaces triton, so its tests have an environment of their own: make test-ascend.
collect_ignore = [] if _has_ascend_compiler() else ["ascend"]
