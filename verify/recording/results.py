"""Results to files and back: JSON, its JSON Schema, and per-row errors beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ValidationError
from safetensors import safe_open
from safetensors.numpy import save

from needlepoint.verify.recording.safetensors_header import read_header
from needlepoint.verify.schema.result import SCHEMA, Result
from needlepoint.verify.schema.selftest_result import SelftestResult

MODELS: Final[Mapping[str, type[BaseModel]]] = {"result": Result, "selftest": SelftestResult}
"""What a command writes and a JSON Schema describes, by the name of its schema file."""
MAX_RESULT_BYTES = 256 << 20
"""Refuse to parse anything larger; a result of 43 layers is a few MiB."""


_SCHEMA_FIELD = re.compile(r'"schema"\s*:\s*"([^"]{1,100})"')


def schema_text(name: str = "result") -> str:
    """Return the JSON Schema of ``needlepoint.NAME/1``, made from the models.

    Fields that came later are not required, so that older results validate too.
    """
    schema = MODELS[name].model_json_schema(mode="validation")
    title = schema["properties"]["schema"]["const"]
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": title, **schema}
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


def shipped_schema(name: str = "result") -> str:
    """Return the JSON Schema of ``needlepoint.NAME/1`` that ships in the package."""
    return (
        files("needlepoint.verify.schema")
        .joinpath(f"{name}.schema.json")
        .read_text(encoding="utf-8")
    )


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
        # Fields are added without another name of the schema.
        newer = first["type"] == "extra_forbidden"
        raise ValueError(
            f"result {path}: {place}: {first['msg']} ({error.error_count()} faults in all); "
            f"expected schema {SCHEMA}"
            + ("; read it with the version that wrote it" if newer else "")
        ) from error


def load_rows(path: Path) -> dict[str, NDArray[np.floating]]:
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
    with safe_open(file, framework="np") as tensors:
        return {name: tensors.get_tensor(name) for name in header}


def rows_path(path: Path) -> Path:
    """Return where the per-row errors of the result ``path`` go: ``RESULT.rows.safetensors``."""
    stem = path.name.removesuffix(".json")
    return path.with_name(f"{stem}.rows.safetensors")


def result_files(result: Result, rows: Mapping[str, ArrayLike], path: Path) -> dict[Path, bytes]:
    """Return the files of one result, for :func:`needlepoint.verify.base.atomic.write_files`.

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
    tensors = {name: np.ascontiguousarray(rows[name]) for name in sorted(rows)}
    return {
        rows_path(path): save(tensors, metadata={"schema": SCHEMA}),
        path: result_json(result).encode(),
    }
