"""Gumbel-max sampling with counter-based noise: argmax(logits / temperature + Gumbel noise).

The noise is a function of (seed, choice, position, token id) and of nothing else: not of the batch, the step or the
rank. So a seeded request draws the same tokens alone or in any batch, whole or chunked, on one GPU or many.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor

from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, overlap, power_of_2, runs_triton, tl, triton

_TILE = 2048  # tokens of the vocabulary a program, a multiple of 4
_MASK = 0xFFFFFFFF
_ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al., 2011): four 32-bit words from a 128-bit counter and a 64-bit key.

    All int64 tensors holding values below 2**32, broadcast against each other. A product may wrap in int64: its bits
    are those of the unsigned product, and only its bits are used.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32 & _MASK) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def noise_words(seed_B: Tensor, choice_B: Tensor, position_B: Tensor, first_id: int, num_ids: int) -> Tensor:
    """The 32-bit integers behind the noise: int64 [B, num_ids] for token ids first_id …, first_id a multiple of 4.

    Counter: (token id // 4, position, choice, 0); key: the seed's low and high words. Word id % 4 is the token's.
    """
    quads = torch.arange(first_id // 4, (first_id + num_ids + 3) // 4, device=seed_B.device)
    counter = (quads[None], position_B[:, None], choice_B[:, None], torch.zeros_like(position_B)[:, None])
    words = philox(counter, ((seed_B & _MASK)[:, None], (seed_B >> 32 & _MASK)[:, None]))
    return torch.stack(words, dim=-1).flatten(1)[:, :num_ids]


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, from uniform 32-bit integers.

    u = (word + 1/2) / 2**32 is kept off 0 and 1; -log1p(-u) is exponential, with fine steps where it is small, and
    those are the values that win.
    """
    u = ((words.double() + 0.5) / 2**32).float().clamp(max=1 - 2**-24)
    return -torch.log(-torch.log1p(-u))


def best_candidate_reference(
    logits_SV: Tensor, temperature_S: Tensor, seed_S: Tensor, choice_S: Tensor, position_S: Tensor, first_id: int = 0
) -> tuple[Tensor, Tensor]:
    """The definition; arguments as in best_candidate."""
    values_SV = logits_SV.float()
    if drawn := temperature_S.nonzero()[:, 0].tolist():
        values_SV = values_SV.clone() if values_SV is logits_SV else values_SV
        for row in drawn:  # one at a time: the integers take 8 bytes a token, and a large batch many
            one = slice(row, row + 1)
            noise_1V = gumbel(noise_words(seed_S[one], choice_S[one], position_S[one], first_id, values_SV.shape[1]))
            values_SV[one] = values_SV[one] / temperature_S[one, None] + noise_1V
    value_S, index_S = values_SV.max(dim=-1)
    return value_S, index_S + first_id


@triton.jit
def _noise_words(quad, position, choice, seed):
    """noise_words for whole quads of token ids: four uint32 tensors, of ids 4 * quad + 0, 1, 2 and 3."""
    c0 = quad.to(tl.uint32)
    c1, c2, c3 = c0 * 0 + position.to(tl.uint32), c0 * 0 + choice.to(tl.uint32), c0 * 0
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    m0, m1 = tl.full((), 0xD2511F53, tl.uint32), tl.full((), 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        low0, low1 = c0 * m0, c2 * m1
        c0, c2 = tl.umulhi(c2, m1) ^ c1 ^ k0, tl.umulhi(c0, m0) ^ c3 ^ k1
        c1, c3 = low1, low0
        k0 += tl.full((), 0x9E3779B9, tl.uint32)
        k1 += tl.full((), 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _gumbel(word, FAST: tl.constexpr):
    """gumbel(): the same u, bit for bit, and its logarithms to about 2**-21."""
    # (word + 1/2) / 2**32 = (2 * word + 1) / 2**33, rounded once, when the integer becomes a float.
    u = tl.minimum((word.to(tl.int64) * 2 + 1).to(tl.float32) * (1 / 2**33), 1 - 1 / 2**24)
    # -log1p(-u): its series, or the logarithm where 1 - u loses nothing that matters.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    exponential = tl.where(u < 1 / 16, series, -0.6931471805599453 * _log2(1 - u, FAST))
    return -0.6931471805599453 * _log2(exponential, FAST)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    # One instruction of the GPU, good to 2**-22, instead of the 20 that the last bit would take.
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505, Triton compiles one of them
        return tl.log2(x)


@triton.jit(do_not_specialize_on_alignment=["temperature_S", "seed_S", "choice_S", "position_S"])
def _best_of_tile_kernel(
    value_ST,
    id_ST,
    logits_SV,
    temperature_S,
    seed_S,
    choice_S,
    position_S,
    first_id,
    size,
    row_stride,
    TILE: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program a tile of one row's vocabulary; a second kernel takes the best tile, so the order is always the same.
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    column = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(logits_SV + row * row_stride + column, mask=column < size, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperature_S + row)
    if temperature != 0:
        quad = (first_id + tile * TILE) // 4 + tl.arange(0, TILE // 4)
        w0, w1, w2, w3 = _noise_words(quad, tl.load(position_S + row), tl.load(choice_S + row), tl.load(seed_S + row))
        word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
        logit = logit / temperature + _gumbel(word, FAST)
    value, index = tl.max(logit, 0, return_indices=True, return_indices_tie_break_left=True)
    # NaN compares with nothing, so it may let a padding column win: name a token that there is, whatever the logits.
    tl.store(value_ST + row * tl.num_programs(1) + tile, value)
    tl.store(id_ST + row * tl.num_programs(1) + tile, first_id + tl.minimum(tile * TILE + index, size - 1))


@triton.jit
def _best_tile_kernel(value_S, id_S, value_ST, id_ST, num_tiles, TILES: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(value_ST + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    value, best = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(value_S + row, value)
    tl.store(id_S + row, tl.load(id_ST + row * num_tiles + tl.minimum(best, num_tiles - 1)).to(tl.int64))


def _best_candidate_triton(
    logits_SV: Tensor, temperature_S: Tensor, seed_S: Tensor, choice_S: Tensor, position_S: Tensor, first_id: int = 0
) -> tuple[Tensor, Tensor]:
    num_rows, size = logits_SV.shape
    num_tiles = -(-size // _TILE)
    value_ST = logits_SV.new_empty(num_rows, num_tiles, dtype=torch.float32)
    id_ST = logits_SV.new_empty(num_rows, num_tiles, dtype=torch.int32)
    value_S = logits_SV.new_empty(num_rows, dtype=torch.float32)
    id_S = logits_SV.new_empty(num_rows, dtype=torch.int64)
    if num_rows:
        pdl = overlap(logits_SV.device)
        _best_of_tile_kernel[(num_rows, num_tiles)](
            value_ST,
            id_ST,
            logits_SV,
            temperature_S,
            seed_S,
            choice_S,
            position_S,
            first_id,
            size,
            logits_SV.stride(0),
            TILE=_TILE,
            FAST=logits_SV.is_cuda,
            num_warps=4,
            **pdl,
        )
        _best_tile_kernel[(num_rows,)](
            value_S, id_S, value_ST, id_ST, num_tiles, TILES=power_of_2(num_tiles), num_warps=1, **pdl
        )
    return value_S, id_S


def best_candidate(
    logits_SV: Tensor, temperature_S: Tensor, seed_S: Tensor, choice_S: Tensor, position_S: Tensor, first_id: int = 0
) -> tuple[Tensor, Tensor]:
    """The winner among this shard's tokens: (value float32 [S], token id int64 [S]).

    Value is logit / temperature + noise, or the logit itself where the temperature is 0 (exact greedy). Values of
    different shards compare, so the best of the shards' winners is the whole vocabulary's. Of equals the
    lowest id wins.
    logits_SV: any float dtype, columns adjacent. first_id: this shard's first token, a multiple of 4.
    Floor on a GPU: one read of the logits, or 10 rounds of Philox for every four of them.
    """
    run = _best_candidate_triton if runs_triton(logits_SV) else best_candidate_reference
    return run(logits_SV, temperature_S, seed_S, choice_S, position_S, first_id)
