"""Candidates that are right on whole prompts and wrong between calls."""

from collections.abc import Mapping

from torch import Tensor

from needlepoint.optimized.candidates.emulated import EmulatedCandidate, Order
from needlepoint.optimized.emulation.scoring import fused_scores
from needlepoint.optimized.protocol.interface import CandidateInfo
from needlepoint.optimized.protocol.serving import CacheSpec, LayerParameters, Place, TokenRows
from needlepoint.optimized.serving.cache import new_cache
from needlepoint.optimized.serving.emulated import EmulatedServer


class QueueServer(EmulatedServer):
    """Appends tokens to the ring of their slot; ``accept`` should move the end back."""

    rejected = 0

    def ring_places(self, place: Place, positions: Tensor) -> Tensor:
        """Return where positions lie: behind everything that was ever appended."""
        return super().ring_places(place, positions + self.rejected)

    def accept(self, place: Place, drafted: int, kept: int) -> None:
        """Keep what was accepted, and by mistake the rest too."""
        self.rejected += drafted - kept


class WindowServer(EmulatedServer):
    """Keeps the tokens of the open window alone; the overlap needs those of the one before too."""

    def write_state(self, path: str, place: Place, first: int, rows: TokenRows) -> None:
        """Keep the tail of a call, and zeros where the window before it was."""
        super().write_state(path, place, first, rows)
        done = (first + len(rows.kv)) // 4 * 4
        lost = [p for p in range(done - 4, done) if p >= 0 and self.parameters.ratio == 4]
        self.cache.state[path][place.slot, [p % 16 for p in lost]] = 0.0


class PagesServer(EmulatedServer):
    """Takes a prefix from the page cache; the state of its last tokens is not part of it."""

    def fork(self, source: Place, target: Place, tail: Mapping[str, TokenRows]) -> None:
        """Copy the pages, and the state as the source has it now."""
        super().fork(source, target, tail)
        for state in self.cache.state.values():
            state[target.slot] = state[source.slot]


class Broken(EmulatedCandidate):
    """An emulated candidate with another server."""

    server: type[EmulatedServer] = EmulatedServer

    def __init__(self) -> None:
        super().__init__("fp8", Order.FUSED)

    @property
    def info(self) -> CandidateInfo:
        """Identity."""
        name = self.server.__name__
        return CandidateInfo(name, "fp8", "cpu", "needlepoint", "example", "")

    def serve(self, parameters: LayerParameters, spec: CacheSpec) -> EmulatedServer:
        """Open a server of one layer."""
        return self.server(parameters, new_cache(parameters, spec, "fp8"), "fp8", fused_scores)


class KeepsDrafts(Broken):
    """Keeps rejected drafts in its state."""

    server = QueueServer


class LosesOverlap(Broken):
    """Loses the overlap where a call begins."""

    server = WindowServer


class StalePrefix(Broken):
    """Starts from a prefix with the state of another moment."""

    server = PagesServer
