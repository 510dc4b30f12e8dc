"""Make docs/reference/: results from JSON Schemas, stages from their registry, Python docstrings.

Run ``python docs/make_reference.py``; a test holds the pages to what it makes.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from needlepoint.optimized.protocol.stages import REGISTRY
from needlepoint.verify.cli import python as functions
from needlepoint.verify.recording.results import shipped_schema

FOLDER: Final = Path(__file__).parent / "reference"
PUBLIC: Final = {
    "needlepoint": (
        "check",
        "verify",
        "diff",
        "load_result",
        "Result",
        "Candidate",
        "CandidateInfo",
        "LayerInputs",
        "CompressorInputs",
        "QueryInputs",
        "Observed",
        "PagedRows",
        "QueryRows",
        "StatefulCandidate",
        "ComputesRows",
        "SelectsEntries",
        "SpreadsLayers",
        "MeasuresTransients",
        "MeasuresPrompts",
        "Capture",
        "Tap",
        "first_input",
    ),
    "needlepoint.optimized.candidates.catalogue": ("create", "names"),
    "needlepoint.verify.inputs.load": ("load_inputs", "Inputs"),
    "needlepoint.verify.recording.results": ("result_files", "shipped_schema"),
    "needlepoint.verify.goldens.manifest": ("load_golden", "Loaded"),
    "needlepoint.verify.cli.pytest_judge": ("Judge",),
}
"""What other programs may rely on, by module."""
EXPLAINED: Final = {
    "result": "[Verdicts](../verdicts.md)",
    "selftest": "[Self-test](../selftest.md)",
}
"""Pages that say what the fields of a schema mean."""


def pages() -> dict[str, str]:
    """Return the text of every page by file name."""
    schemas = {f"{name}.md": schema_page(name) for name in EXPLAINED}
    return {**schemas, "python.md": python_page(), "stages.md": stages_page()}


def schema_page(name: str) -> str:
    """Return the page of ``needlepoint.NAME/1``."""
    schema = json.loads(shipped_schema(name))
    file = f"../../verify/schema/{name}.schema.json"
    lines = [
        f"# {schema['$id']}",
        "",
        f"Made from [the JSON Schema]({file}) by `docs/make_reference.py`.",
        f"{EXPLAINED[name]} says what the figures mean. A field with a default may be",
        "absent in results of earlier versions.",
    ]
    lines += _fields("The whole", schema)
    for name, part in sorted(schema["$defs"].items()):
        lines += _fields(name, part)
    return "\n".join(lines) + "\n"


def stages_page() -> str:
    """Return the page of the stages, from the registry."""
    lines = [
        "# Stages",
        "",
        "Made from `REGISTRY` in `optimized/protocol/stages.py` by `docs/make_reference.py`, in",
        "the order in which a token passes them. [Add a stage](../extend.md#add-a-stage).",
        "",
        "| stage | layers that have it | a row each | tensors | compared as | the limit is 1 |",
        "|---|---|---|---|---|---|",
    ]
    for stage in REGISTRY:
        where = "; ".join(
            f"`{path}` of ratio {', '.join(str(r) for r in stage.feeds if path in stage.feeds[r])}"
            for path in stage.paths
        )
        parts = dict.fromkeys(
            ".".join(part for part in (path, stage.name, tensor.part) if part)
            for path in stage.paths
            for tensor in stage.tensors_of(path)
        )
        limit = f"{stage.limit_unit}: {stage.derivation}".replace("|", "\\|")
        lines.append(
            f"| `{stage.name}`, {stage.kind} | {where} | {stage.rows} | {', '.join(parts)} | "
            f"{stage.canonical} | {limit} |"
        )
    return "\n".join(lines) + "\n"


def python_page() -> str:
    """Return the page of the Python interface."""
    lines = ["# Python interface", "", "Made from docstrings by `docs/make_reference.py`.", ""]
    for module, listed in PUBLIC.items():
        lines += [f"## `{module}`", ""]
        for name in listed:
            found = getattr(importlib.import_module(module), name)
            # `needlepoint.verify` is the package of the verifier, which can be called.
            lines += _object(functions.verify if inspect.ismodule(found) else found, name)
    return "\n".join(lines).rstrip() + "\n"


def _fields(title: str, part: dict[str, Any]) -> list[str]:
    lines = ["", f"## {title}", "", *_said(part), "| field | type | holds |", "|---|---|---|"]
    for name, field in part.get("properties", {}).items():
        optional = "" if name in part.get("required", ()) else ", has a default"
        text = " ".join(str(field.get("description", "")).split()).replace("|", "\\|")
        lines.append(f"| `{name}` | {_type(field)}{optional} | {text} |")
    return lines


def _said(part: dict[str, Any]) -> list[str]:
    text = str(part.get("description", "")).strip()
    return [text.splitlines()[0], ""] if text else []


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"]).rsplit("/", 1)[-1]
    if "anyOf" in field:
        return " or ".join(_type(option) for option in field["anyOf"])
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        if "prefixItems" in field:
            return f"[{', '.join(_type(item) for item in field['prefixItems'])}]"
        return f"list of {_type(field.get('items', {}))}"
    if field.get("type") == "object":
        return f"object of {_type(field.get('additionalProperties', {}))}"
    return str(field.get("type", "any"))


def _object(found: Any, name: str) -> list[str]:  # noqa: ANN401
    lines = [f"### `{name}`", "", "```text"]
    if inspect.isfunction(found):
        lines.append(f"{name}{_signature(found)}")
        lines.append("")
    lines += [*inspect.cleandoc(found.__doc__ or "").splitlines(), *_members(found), "```", ""]
    return lines


def _signature(function: Callable[..., object]) -> str:
    """Return a signature with its annotations as the source has them, without quotes."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))


def _members(found: Any) -> Iterator[str]:  # noqa: ANN401
    """Yield fields and documented methods of a class."""
    if not inspect.isclass(found):
        return
    fields = getattr(found, "__dataclass_fields__", {})
    if fields:
        yield ""
        yield from (f"{field.name}: {field.type}" for field in fields.values())
    for name, member in vars(found).items():
        if name.startswith("_") and name != "__call__":
            continue
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function) and function.__doc__:
            signature = "" if isinstance(member, property) else _signature(function)
            yield ""
            yield f"{name}{signature}"
            yield from (
                f"    {line}".rstrip() for line in inspect.cleandoc(function.__doc__).splitlines()
            )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in pages().items():
        (FOLDER / file).write_text(text)
