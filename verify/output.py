"""Results to files and back: JSON, its JSON Schema, and per-row errors beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from needlepoint.verify.recordings_file import read_header
from needlepoint.verify.result import SCHEMA, Result

SCHEMA_FILE = "result.schema.json"
MAX_RESULT_BYTES = 256 << 20
"""Refuse to parse anything larger; a result of 43 layers is a few MiB."""


_SCHEMA_FIELD = re.compile(r'"schema"\s*:\s*"([^"]{1,100})"')


def schema_text() -> str:
    """Return the JSON Schema of ``needlepoint.result/1``, made from the models.

    Fields that came later are not required, so that older results validate too.
    """
    schema = Result.model_json_schema(mode="validation")
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA, **schema}
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


def shipped_schema() -> str:
    """Return the JSON Schema that ships in the package."""
    return files("needlepoint.verify").joinpath(SCHEMA_FILE).read_text(encoding="utf-8")


def result_json(result: Result) -> str:
    """Return the JSON of a result, validated by reading it back."""
    text = result.model_dump_json(by_alias=True, indent=1) + "\n"
    Result.model_validate_json(text)
    return text


def load_result(path: Path) -> Result:
    """Read a result.

    Raises
    ------
    ValueError
        Where the file is missing, too large, not JSON, or not ``needlepoint.result/1``; the
        message names the file and the first field that is wrong.
    """
    try:
        size = path.stat().st_size
        if size > MAX_RESULT_BYTES:
            raise ValueError(
                f"result {path}: {size} bytes, expected at most {MAX_RESULT_BYTES}; "
                "is this a JSON written by needlepoint?"
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"result {path}: {error.strerror}; give a file written by --json"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"result {path}: not UTF-8 text; expected a file of --json") from error
    try:
        return Result.model_validate_json(text)
    except ValidationError as error:
        found = _SCHEMA_FIELD.search(text[:4096])
        if found is not None and found[1] != SCHEMA:
            raise ValueError(
                f"result {path}: schema {found[1]!r}, this version reads {SCHEMA!r}; read it with "
                "the version that wrote it, or a newer one"
            ) from error
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "document"
        raise ValueError(
            f"result {path}: {place}: {first['msg']} ({error.error_count()} faults in all); "
            f"expected schema {SCHEMA}"
        ) from error


def load_rows(path: Path) -> dict[str, Tensor]:
    """Read the row errors beside the result ``path``.

    Raises
    ------
    ValueError
        Where the file is missing, corrupt or no file of row errors.
    """
    file = rows_path(path)
    try:
        header = read_header(file)
    except ValueError as error:
        raise ValueError(f"{error}; it is written beside the result of --json") from error
    for name, entry in header.items():
        if entry.dtype not in ("F32", "F64") or len(entry.shape) != 1:
            raise ValueError(
                f"{file}: tensor {name} is {entry.dtype} {list(entry.shape)}, expected one number "
                "a row; is this the row file of a result?"
            )
    with safe_open(file, framework="pt") as tensors:
        return {name: tensors.get_tensor(name) for name in header}


def rows_path(path: Path) -> Path:
    """Return where the per-row errors of the result ``path`` go: ``RESULT.rows.safetensors``."""
    stem = path.name.removesuffix(".json")
    return path.with_name(f"{stem}.rows.safetensors")


def result_files(result: Result, rows: Mapping[str, Tensor], path: Path) -> dict[Path, bytes]:
    """Return the files of one result, for :func:`needlepoint.verify.atomic.write_files`.

    Parameters
    ----------
    result
        The result.
    rows
        Row errors by ``candidate/layerN/path/stage/local|accumulated``: [rows] float32 or
        float64. Unlike numbers in the JSON, these may be infinite.
    path
        The JSON file.
    """
    tensors = {name: rows[name].detach().contiguous() for name in sorted(rows)}
    return {
        rows_path(path): save(tensors, metadata={"schema": SCHEMA}),
        path: result_json(result).encode(),
    }
