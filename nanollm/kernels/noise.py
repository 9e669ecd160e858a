"""Counter-based noise: random numbers that are a function of what they are for, and of nothing else.

A number belongs to (seed, choice, position, stream, id). It doesn't depend on the batch, the step or the rank, so a
request draws the same tokens alone or in any batch, whole or chunked, on one GPU or many. The integers are bitwise
equal everywhere and will stay what they are; a test has some of them written down.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor

from nanollm.kernels.backend import tl, triton

# What a number is for; other uses of randomness take other streams.
TOKENS, TILES = 0, 1
TOKEN_STREAM, TILE_STREAM = tl.constexpr(TOKENS), tl.constexpr(TILES)
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


def noise_words(seed_S: Tensor, choice_S: Tensor, position_S: Tensor, ids_SN: Tensor, stream: int) -> Tensor:
    """The 32-bit integers behind the noise, int64 [S, N]; all arguments int64.

    The first word of Philox. Counter: (id, position, choice, stream); key: the seed's low and high words.
    """
    counter = (ids_SN & _MASK, position_S[:, None] & _MASK, choice_S[:, None] & _MASK, torch.full_like(ids_SN, stream))
    return philox(counter, ((seed_S & _MASK)[:, None], (seed_S >> 32 & _MASK)[:, None]))[0]


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, from uniform 32-bit integers.

    u = (word + 1/2) / 2**32 is kept off 0 and 1; -log1p(-u) is exponential, with fine steps where it is small, and
    those are the values that win.
    """
    u = ((words.double() + 0.5) / 2**32).float().clamp(max=1 - 2**-24)
    return -torch.log(-torch.log1p(-u))


@triton.jit
def noise_word(seed_low, seed_high, choice, position, ids, stream: tl.constexpr):
    """noise_words on the device: uint32, of the shape of ids."""
    c0 = ids.to(tl.uint32)
    c1, c2, c3 = c0 * 0 + position.to(tl.uint32), c0 * 0 + choice.to(tl.uint32), c0 * 0 + stream
    k0, k1 = seed_low.to(tl.uint32), seed_high.to(tl.uint32)
    m0, m1 = tl.full((), 0xD2511F53, tl.uint64), tl.full((), 0xCD9E8D57, tl.uint64)
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * m0, c2.to(tl.uint64) * m1  # an instruction each
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        k0 += tl.full((), 0x9E3779B9, tl.uint32)
        k1 += tl.full((), 0xBB67AE85, tl.uint32)
    return c0


@triton.jit
def gumbel_noise(word):
    """gumbel() on the device: the same u, bit for bit, and its logarithms to about 2**-21."""
    # (word + 1/2) / 2**32 = (2 * word + 1) / 2**33, rounded once, when the integer becomes a float.
    u = tl.minimum((word.to(tl.int64) * 2 + 1).to(tl.float32) * (1 / 2**33), 1 - 1 / 2**24)
    # -log1p(-u): its series, or the logarithm where 1 - u loses nothing that matters.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return -tl.log(tl.where(u < 1 / 16, series, -tl.log(1 - u)))
