"""Flip one byte of one tensor in a safetensors file: a fault to try ``needlepoint diff`` on.

python flip_byte.py FILE TENSOR OFFSET
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path


def main(file: Path, tensor: str, offset: int) -> None:
    """Invert the bits of byte ``offset`` of ``tensor``; nothing else of the file changes."""
    data = bytearray(file.read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    start, stop = json.loads(data[8 : 8 + length])[tensor]["data_offsets"]
    if not 0 <= offset < stop - start:
        raise SystemExit(f"offset {offset}: {tensor} has {stop - start} bytes")
    data[8 + length + start + offset] ^= 0xFF
    file.write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
