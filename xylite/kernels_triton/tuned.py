"""The file of measured tiles: rows of `tiles.Tiles` for exact shapes, with what they hold for."""

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from xylite import config
from xylite.kernels_triton import tiles
from xylite.kernels_triton.tiles import Tiles

VERSION: Final = 2
KERNELS: Final = ("smooth_gemm.py", "grouped_gemm.py")
GEMM_OPS: Final = ("linear", "epilogue", "gated")
LARGEST: Final = {"TILE_M": 1024, "TILE_N": 1024, "TILE_K": 1024, "BAND": 64}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TunedFile:
    """Where the measured rows of one device are. They hold for this device, compiler and source
    of the kernels, and for nothing else."""

    path: Path
    chip: str
    device: str
    compiler: str

    def rows(self) -> tuple[Tiles, ...]:
        """The rows that hold here; none if there is no file. One that cannot be used is named in
        one warning."""
        try:
            held = json.loads(self.path.read_text())
            for name, here in self._head().items():
                if held[name] != here:
                    raise ValueError(f"its {name} is {held[name]!r}, here it is {here!r}")
            return tuple(_row(row, self.chip) for row in held["rows"])
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError) as e:
            why = f"{e} is missing" if isinstance(e, KeyError) else e
            log.warning("%s is not used: %s", self.path, why)
            return ()

    def keep(self, row: Tiles) -> None:
        """Write the row beside those that are there, in place of one for the same; the file
        appears whole or not at all. OSError if it cannot be written."""
        self.write(tiles.merge((row,), self.rows()))

    def write(self, rows: Iterable[Tiles]) -> None:
        """Replace the file."""
        content = self._head() | {"rows": [asdict(row) for row in rows]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as f:
            try:
                json.dump(content, f, indent=1)
                f.close()
                os.replace(f.name, self.path)
            except BaseException:
                os.unlink(f.name)
                raise

    def _head(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "device": self.device,
            "compiler": self.compiler,
            "kernels": kernels_hash(),
        }


def file_of(chip: str, device: str, compiler: str) -> TunedFile:
    """The file of a device in the cache directory.

    device    its name, such as NVIDIA H200
    compiler  name and version
    """
    name = re.sub(r"[^a-z0-9]+", "-", f"{chip} {device}".lower()).strip("-")
    return TunedFile(Path(config.cache_dir()) / "tiles" / f"{name}.json", chip, device, compiler)


def kernels_hash() -> str:
    """Changes with the source of the kernels that tiles are for."""
    digest = hashlib.sha256()
    for name in KERNELS:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]


def _row(held: Any, chip: str) -> Tiles:
    """A row that the kernels can be launched with; ValueError or TypeError if it is none."""
    row = Tiles(**held)
    known = {name for r in tiles.builtin() if r.chip == chip for name in r.options}
    if row.chip != chip or row.op not in GEMM_OPS or not isinstance(row.dtype, str):
        raise ValueError(f"no row of GEMM tiles for {chip}: {held}")
    if not isinstance(row.sizes, Mapping) or row.sizes.keys() != LARGEST.keys():
        raise ValueError(f"sizes must be {', '.join(LARGEST)}: {held}")
    for name, size in row.sizes.items():
        least = 1 if name == "BAND" else 16
        if not (_whole(size) and least <= size <= LARGEST[name] and size & (size - 1) == 0):
            raise ValueError(
                f"{name} must be a power of two from {least} to {LARGEST[name]}: {held}"
            )
    if not isinstance(row.options, Mapping) or not row.options.keys() <= known:
        raise ValueError(f"options must be among {', '.join(sorted(known)) or 'none'}: {held}")
    if not all(isinstance(v, bool) or (_whole(v) and 0 < v <= 64) for v in row.options.values()):
        raise ValueError(f"options must be from 1 to 64: {held}")
    if not all(_whole(v) and v >= 0 for v in (row.max_rows, row.n, row.k)):
        raise ValueError(f"max_rows, n and k must be whole numbers: {held}")
    return row


def _whole(x: Any) -> bool:
    return type(x) is int
