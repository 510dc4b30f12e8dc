"""What a kernel variant is: its name, the C++ line that defines it, and where it is compiled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """One kernel.

    Attributes
    ----------
    name
        Unique name; also the exported function.
    module
        Module that holds it.
    definition
        The line of C++ that defines it.
    symbol
        A part of its mangled kernel name that no other variant's has.
    header
        Header that its definition needs; one a module.
    smem_dynamic
        Bytes of shared memory that its launch asks for; the definition states the same number and
        does not compile with another.
    """

    name: str
    module: str
    definition: str
    symbol: str
    header: str = "exports.h"
    smem_dynamic: int = 0
    architectures: tuple[str, ...] | None = None

    def runs_on(self, architecture: str) -> bool:
        """Return whether an architecture has it."""
        return self.architectures is None or architecture in self.architectures
