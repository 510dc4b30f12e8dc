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

    def of(x: Tensor, weight: Tensor) -> Tensor:
        return project(x, weight, arithmetic.projected, first_position=first_position)

    def key(compressor: CompressorWeights | None) -> KeyProjections | None:
        if compressor is None:
            return None
        return KeyProjections(of(hidden, compressor.wkv), of(hidden, compressor.wgate))

    down = rms_norm(of(hidden, weights.wq_a), weights.q_norm, config.norm_eps)
    latent = round_to(down, arithmetic.latent)
    query = None
    if weights.index_wq_b is not None and weights.weights_proj is not None:
        q = of(latent, weights.index_wq_b)
        q = q.view(-1, config.index_n_heads, config.index_head_dim)
        query = QueryProjections(q, of(hidden, weights.weights_proj))
    return Projected(
        first_position=first_position,
        index=key(weights.index),
        main=key(weights.main),
        query=query,
        latent=latent,
        window=of(hidden, weights.wkv),
    )
