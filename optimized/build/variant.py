"""What a kernel variant is, and the C++ that a module of them consists of."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from needlepoint.optimized.build.arguments import Arguments, cpp_fields

_MODULE = """\
// Kernel module {module}, written by needlepoint.optimized.build from its list of variants; the
// fields of arguments are those of needlepoint.optimized.build.arguments.
{includes}

namespace needlepoint {{

{structs}

// A kernel's mangled name tells its variant.
namespace variant {{
{variants}
}}  // namespace variant

{functions}

}}  // namespace needlepoint

{exports}
"""


@dataclass(frozen=True)
class Variant:
    """One kernel.

    Attributes
    ----------
    name
        Unique name; also the exported function, and the struct that its kernels are made for.
    module
        Module that holds it.
    header
        Header of its kernel.
    run
        C++ function template that launches it.
    traits
        C++ struct that says what is special about it.
    arguments
        What a launch is given.
    smem_dynamic
        Bytes of shared memory that its launch asks for; the module does not compile if the traits
        state another number.
    architectures
        Those that have it; None for all.
    """

    name: str
    module: str
    header: str
    run: str
    traits: str
    arguments: type[Arguments]
    smem_dynamic: int = 0
    architectures: tuple[str, ...] | None = None

    @property
    def symbol(self) -> str:
        """The part of its mangled kernel names that no other variant's have: length, then name."""
        return f"{len(self.name)}{self.name}"

    def runs_on(self, architecture: str) -> bool:
        """Return whether an architecture has it."""
        return self.architectures is None or architecture in self.architectures


def module_source(module: str, variants: Sequence[Variant]) -> str:
    """Return the C++ of a module: argument structs, one struct and one export a variant."""
    return _MODULE.format(
        module=module,
        includes="\n".join(dict.fromkeys(f'#include "{v.header}"' for v in variants)),
        structs="\n\n".join(_struct(kind) for kind in dict.fromkeys(v.arguments for v in variants)),
        variants="\n".join(_variant_struct(v) for v in variants),
        functions="\n\n".join(_function(v) for v in variants),
        exports="\n".join(
            f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({v.name}, needlepoint::{v.name})" for v in variants
        ),
    )


def _struct(kind: type[Arguments]) -> str:
    fields = "\n".join(f"  {cpp} {name};" for cpp, name in cpp_fields(kind))
    return f"struct {kind.__name__} {{\n{fields}\n}};"


def _variant_struct(variant: Variant) -> str:
    line = f"struct {variant.name} : {variant.traits} {{}};"
    if variant.smem_dynamic:
        line += (
            f"\nstatic_assert({variant.name}::kSharedBytes == {variant.smem_dynamic},"
            f'\n              "{variant.name}: optimized/build states another size");'
        )
    return line


def _function(variant: Variant) -> str:
    kind, fields = variant.arguments.__name__, list(cpp_fields(variant.arguments))
    parameters = _filled([f"{cpp} {name}" for cpp, name in fields])
    names = _filled([name for _, name in fields])
    return (
        f"static void {variant.name}(\n{parameters}) {{\n"
        f"  const {kind} arguments{{\n{names}}};\n"
        f'  {variant.run}<variant::{variant.name}>("{variant.name}", arguments);\n}}'
    )


def _filled(parts: Sequence[str]) -> str:
    return textwrap.fill(", ".join(parts), 96, initial_indent=" " * 4, subsequent_indent=" " * 4)
