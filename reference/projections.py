"""The projections of a layer: hidden states become everything that later stages read."""

from __future__ import annotations

from torch import Tensor

from needlepoint.reference.config import ModelConfig
from needlepoint.reference.linear import project
from needlepoint.reference.norm import rms_norm
from needlepoint.reference.profile import Arithmetic
from needlepoint.reference.rounding import round_to
from needlepoint.reference.stages import KeyProjections, Projected, QueryProjections
from needlepoint.reference.weights import CompressorWeights, LayerWeights


def project_inputs(
    hidden: Tensor,
    weights: LayerWeights,
    config: ModelConfig,
    arithmetic: Arithmetic,
    first_position: int = 0,
) -> Projected:
    """Project consecutive tokens of one request.

    Index and main queries share one latent, ``q_norm(wq_a(x))``. Main queries are not projected
    here: they are the widest tensor of a layer and attention makes them in blocks.

    Parameters
    ----------
    hidden
        ``[n, hidden_size]`` of any float dtype, normalised input of the attention block.
    weights
        The layer's tensors.
    config
        Model shapes.
    arithmetic
        ``projected`` and ``latent`` apply.
    first_position
        Position of the first token in its request.

    Raises
    ------
    ValueError
        If there are no tokens, the width is wrong, or a value is NaN or infinite.
    """
    latent, query = project_queries(hidden, weights, config, arithmetic, first_position)

    def key(compressor: CompressorWeights | None) -> KeyProjections | None:
        if compressor is None:
            return None
        return project_keys(hidden, compressor, arithmetic, first_position)

    return Projected(
        first_position=first_position,
        index=key(weights.index),
        main=key(weights.main),
        query=query,
        latent=latent,
        window=project(hidden, weights.wkv, arithmetic.projected, first_position=first_position),
    )


def project_keys(
    hidden: Tensor, weights: CompressorWeights, arithmetic: Arithmetic, first_position: int = 0
) -> KeyProjections:
    """Project consecutive tokens for one compressor; arguments as :func:`project_inputs`."""
    kv, score = (
        project(hidden, weight, arithmetic.projected, first_position=first_position)
        for weight in (weights.wkv, weights.wgate)
    )
    return KeyProjections(kv, score)


def project_queries(
    hidden: Tensor,
    weights: LayerWeights,
    config: ModelConfig,
    arithmetic: Arithmetic,
    first_position: int = 0,
) -> tuple[Tensor, QueryProjections | None]:
    """Return the query latent of tokens, and what the index queries read of it.

    Arguments as :func:`project_inputs`. Rows do not depend on each other: tokens of any positions
    may stand side by side, and are then equal to those of consecutive calls but for the order in
    which float64 sums are added up.

    Returns
    -------
    tuple
        float64 ``[n, q_lora_rank]``, and the queries; None in a layer without an indexer.
    """

    def of(x: Tensor, weight: Tensor) -> Tensor:
        return project(x, weight, arithmetic.projected, first_position=first_position)

    down = rms_norm(of(hidden, weights.wq_a), weights.q_norm, config.norm_eps)
    latent = round_to(down, arithmetic.latent)
    if weights.index_wq_b is None or weights.weights_proj is None:
        return latent, None
    q = of(latent, weights.index_wq_b)
    q = q.view(-1, config.index_n_heads, config.index_head_dim)
    return latent, QueryProjections(q, of(hidden, weights.weights_proj))
