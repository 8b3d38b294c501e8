"""Records the names that torch_npu wheels define: python -m tests.ops.record_torch_npu WHEEL...

torch_npu needs CANN to be imported, but its Python sources can be read. Writes
tests/data/torch_npu/names.json, which test_devices.py compares with what ops/npu.py uses.
"""

import ast
import json
import re
import sys
import zipfile
from pathlib import Path

TARGET = Path(__file__).parent.parent / "data" / "torch_npu" / "names.json"
# Where torch_npu itself reads properties of a device, which are defined in C++.
PROPERTIES = "torch_npu/_inductor/config.py"


def exported(source: str) -> list[str]:
    """Names in __all__, or else the functions and classes of a module."""
    body = ast.parse(source).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    return sorted(n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef))


def record(wheel: Path) -> dict[str, list[str]]:
    with zipfile.ZipFile(wheel) as archive:
        npu = archive.read("torch_npu/npu/__init__.py").decode()
        utils = archive.read("torch_npu/npu/utils.py").decode()
        config = archive.read(PROPERTIES).decode()
    return {
        "torch_npu": ["npu"],
        "torch_npu.npu": sorted({*exported(npu), "utils"}),
        "torch_npu.npu.utils": sorted(
            n.name for n in ast.parse(utils).body if isinstance(n, ast.FunctionDef)
        ),
        "properties": sorted(set(re.findall(r"\bprop\.(\w+)", config))),
    }


def main() -> None:
    wheels = [Path(name) for name in sys.argv[1:]]
    names = {wheel.name.split("-")[1]: record(wheel) for wheel in wheels}
    TARGET.write_text(json.dumps(names, indent=1) + "\n")


if __name__ == "__main__":
    main()
