"""Arithmetic: where a computation rounds, and to what.

One frozen record describes both kinds of arithmetic that Needlepoint knows:

* a *contract* (``exact``, ``bf16``, ``official``), which measures the cost of a candidate;
* a *profile*, which a candidate declares; the reference in that profile decides the verdict.

Every rounding point of the mechanism is one field. The reference computes in float64 between two
rounding points and rounds once at each. So a field says where a result is rounded, and not in which
order a kernel computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from needlepoint.reference.formats import (
    BF16,
    FLOAT64,
    FP4_OFFICIAL,
    FP8_PLAIN,
    FP8_POW2,
    MAIN_FP8,
    Format,
)


class Precision(Enum):
    """Precision of an unscaled rounding point."""

    FLOAT64 = "float64"
    FP32 = "fp32"
    BF16 = "bf16"


class ApePlacement(Enum):
    """When the absolute position embedding joins the score: as it is read from state or written."""

    READ = "read"
    WRITE = "write"


class Accumulator(Enum):
    """What a score kernel sums in."""

    FP32 = "fp32"
    SM90_FP8 = "sm90-fp8"  # FP8 wgmma of Hopper: products aligned to about 14 bits, then added


@dataclass(frozen=True)
class Arithmetic:
    """Every rounding point from the projections to the attention output.

    Attributes
    ----------
    name
        Contract or profile name, as printed in results.
    projected
        Projections (``wkv``, ``wgate``, ``wq_b``, ``weights_proj``) after float64 accumulation.
    pooled, normed, roped, rotated
        The compressed row after each step; ``roped`` also rounds the query after RoPE and
        ``rotated`` after the Hadamard rotation.
    index_key, index_query
        Storage format of the 128-wide index key and query.
    main_nope
        Storage format of the leading ``head_dim - rope_head_dim`` dims of the main row.
    main_rope
        Precision of the trailing RoPE dims of the main row as stored.
    weights
        Head weights after the constant ``index_head_dim**-0.5 * index_n_heads**-0.5``.
    dot, weighted, head_sum
        ``q.k`` per head, ``relu(q.k) * w`` per head, and the sum over heads.
    probabilities
        Attention probabilities before the value product.
    rope_table
        cos and sin: ``FLOAT64`` keeps them in float64 of the fp32 angle, ``FP32`` rounds them.
    hadamard
        Whether index keys and queries are rotated by the 128-point Hadamard transform.
    ape
        Where the absolute position embedding is added; matters when ``state`` rounds.
    state
        Precision of the compressor state between calls.
    latent
        Query latent ``q_norm(wq_a(x))`` that the query projections read.
    key_input, query_input
        What a compressor reads of ``wkv`` and ``wgate``, and what the query side reads of ``wq_b``
        and ``weights_proj``: ``BF16`` where the engine's product hands its result over in bf16.
    pool_weights, pool_terms
        Softmax weights of the pooling, and weight times value; only ``BF16`` is a rounding point.
    query_roped, query_rotated
        The query after RoPE and after the Hadamard rotation; None for the precision of the key.
    accumulator
        What the score kernel sums in. It moves no rounding point: the bound of scores pays for it.
    """

    name: str
    projected: Precision
    pooled: Precision
    normed: Precision
    roped: Precision
    rotated: Precision
    index_key: Format
    index_query: Format
    main_nope: Format
    main_rope: Precision
    weights: Precision
    dot: Precision
    weighted: Precision
    head_sum: Precision
    probabilities: Precision
    rope_table: Precision
    hadamard: bool = True
    ape: ApePlacement = ApePlacement.READ
    state: Precision = Precision.FP32
    latent: Precision = Precision.BF16
    key_input: Precision = Precision.FP32
    query_input: Precision = Precision.FP32
    pool_weights: Precision = Precision.FP32
    pool_terms: Precision = Precision.FP32
    query_roped: Precision | None = None
    query_rotated: Precision | None = None
    accumulator: Accumulator = Accumulator.FP32

    @property
    def of_query(self) -> Arithmetic:
        """The same arithmetic with ``roped`` and ``rotated`` as the query has them."""
        return replace(
            self,
            roped=self.roped if self.query_roped is None else self.query_roped,
            rotated=self.rotated if self.query_rotated is None else self.query_rotated,
            query_roped=None,
            query_rotated=None,
        )

    def switches(self) -> dict[str, str | bool]:
        """Return every field but the name as plain data, for results and recordings."""
        out: dict[str, str | bool] = {}
        query = self.of_query
        own = {"query_roped": query.roped, "query_rotated": query.rotated}
        for key, value in (self.__dict__ | own).items():
            if key == "name":
                continue
            if isinstance(value, Enum):
                out[key] = str(value.value)
            elif isinstance(value, Format):
                out[key] = value.name
            else:
                out[key] = bool(value)
        return out


EXACT = Arithmetic(
    name="exact",
    projected=Precision.FLOAT64,
    pooled=Precision.FLOAT64,
    normed=Precision.FLOAT64,
    roped=Precision.FLOAT64,
    rotated=Precision.FLOAT64,
    index_key=FLOAT64,
    index_query=FLOAT64,
    main_nope=FLOAT64,
    main_rope=Precision.FLOAT64,
    weights=Precision.FLOAT64,
    dot=Precision.FLOAT64,
    weighted=Precision.FLOAT64,
    head_sum=Precision.FLOAT64,
    probabilities=Precision.FLOAT64,
    rope_table=Precision.FLOAT64,
    state=Precision.FLOAT64,
    latent=Precision.FLOAT64,
    key_input=Precision.FLOAT64,
    query_input=Precision.FLOAT64,
    pool_weights=Precision.FLOAT64,
    pool_terms=Precision.FLOAT64,
)

BF16_CONTRACT = Arithmetic(
    name="bf16",
    projected=Precision.FP32,
    pooled=Precision.BF16,
    normed=Precision.BF16,
    roped=Precision.BF16,
    rotated=Precision.BF16,
    index_key=BF16,
    index_query=BF16,
    main_nope=BF16,
    main_rope=Precision.BF16,
    weights=Precision.FP32,
    dot=Precision.FP32,
    weighted=Precision.FP32,
    head_sum=Precision.FP32,
    probabilities=Precision.FP32,
    rope_table=Precision.FP32,
)

OFFICIAL = replace(
    BF16_CONTRACT,
    name="official",
    index_key=FP4_OFFICIAL,
    index_query=FP4_OFFICIAL,
    main_nope=MAIN_FP8,
    weights=Precision.BF16,
    dot=Precision.BF16,
    weighted=Precision.BF16,
    head_sum=Precision.BF16,
    probabilities=Precision.BF16,
)

CONTRACTS: dict[str, Arithmetic] = {c.name: c for c in (EXACT, BF16_CONTRACT, OFFICIAL)}

OFFICIAL_PER_TOKEN = replace(
    BF16_CONTRACT,
    name="official",
    key_input=Precision.BF16,
    query_input=Precision.BF16,
    index_key=FP8_POW2,
    index_query=FP8_POW2,
)
"""``official`` of layers with one key a token: what DeepSeek-V3.2's published code computes."""


def contract_of(name: str, ratio: int) -> Arithmetic:
    """Return the contract of a name as a layer of this ratio has it.

    Raises
    ------
    KeyError
        For a name that is no contract.
    """
    return OFFICIAL_PER_TOKEN if (name, ratio) == ("official", 1) else CONTRACTS[name]


_KEY_FORMATS = {"bf16": BF16, "fp8": FP8_PLAIN, "fp4": FP4_OFFICIAL}


def needlepoint_profile(key_format: str) -> Arithmetic:
    """Return the profile of Needlepoint's own kernels for one index-key format.

    The row stays in fp32 from the pooled value to the store and is rounded once, into ``bf16``
    (256 bytes), ``fp8`` (E4M3 with one plain fp32 scale a row, 132 bytes) or ``fp4`` (E2M1 with a
    UE8M0 scale per 32, 68 bytes). Main rows are bf16 beside bf16 keys and 584-byte rows otherwise.

    Parameters
    ----------
    key_format
        ``"bf16"``, ``"fp8"`` or ``"fp4"``.

    Raises
    ------
    ValueError
        For any other format.
    """
    if key_format not in _KEY_FORMATS:
        raise ValueError(f"key format {key_format!r}: expected one of {sorted(_KEY_FORMATS)}")
    key = _KEY_FORMATS[key_format]
    return replace(
        BF16_CONTRACT,
        name="needlepoint",
        pooled=Precision.FP32,
        normed=Precision.FP32,
        roped=Precision.FP32,
        rotated=Precision.FP32,
        index_key=key,
        index_query=key,
        main_nope=BF16 if key_format == "bf16" else MAIN_FP8,
    )
