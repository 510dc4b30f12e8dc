"""A package of one kernel: pooled main rows of ratio-128 layers."""

from torch import Tensor, cat, split

from needlepoint import CandidateInfo, LayerInputs, Observed


def my_kernel(kv: Tensor, score: Tensor, ape: Tensor) -> Tensor:
    """Pool windows of 128 tokens; put your launch here."""
    windows = len(kv) // 128
    kv, score = (x[: windows * 128].view(windows, 128, x.shape[1]) for x in (kv, score))
    return (kv * (score + ape).softmax(1)).sum(1)


class Pool:
    """All that the judge asks for."""

    info = CandidateInfo("mykernel:pool", "bf16", "cpu", "needlepoint", "torch", "")

    def stages(self, ratio: int) -> frozenset[tuple[str, str]]:
        """Return what :meth:`run` hands back."""
        return frozenset({("main", "pooled")} if ratio == 128 else ())

    def run(self, inputs: LayerInputs) -> Observed:
        """Compute one layer."""
        if inputs.ratio != 128:
            return Observed()
        given, lengths = inputs.main, list(inputs.lengths)
        requests = zip(split(given.kv, lengths), split(given.score, lengths), strict=True)
        rows = cat([my_kernel(kv, score, given.ape) for kv, score in requests])
        return Observed(dense={("main", "pooled"): rows}, path_taken="my_kernel")
