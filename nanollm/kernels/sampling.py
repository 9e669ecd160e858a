"""Gumbel-max sampling with counter-based noise: argmax(logits / temperature + Gumbel noise).

The noise is a function of (seed, choice, position, token id) and of nothing else: not of the batch, the step or the
rank. So a seeded request draws the same tokens alone or in any batch, whole or chunked, on one GPU or many.
"""

import torch
from torch import Tensor

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


def best_candidate(
    logits_SV: Tensor, temperature_S: Tensor, seed_S: Tensor, choice_S: Tensor, position_S: Tensor, first_id: int = 0
) -> tuple[Tensor, Tensor]:
    """The winner among this shard's tokens: (value float32 [S], token id int64 [S]).

    Value is logit / temperature + noise, or the logit itself where the temperature is 0 (exact greedy). Values of
    different shards compare, so the best of the shards' winners is the whole vocabulary's. Of equals the lowest id wins.
    """
    values_SV = logits_SV.float()
    if drawn := temperature_S.nonzero()[:, 0].tolist():
        values_SV = values_SV.clone() if values_SV is logits_SV else values_SV
        for row in drawn:  # one at a time: the integers take 8 bytes a token, and a large batch many
            one = slice(row, row + 1)
            noise_1V = gumbel(
                noise_words(seed_S[one], choice_S[one], position_S[one], first_id, values_SV.shape[1])
            )
            values_SV[one] = values_SV[one] / temperature_S[one, None] + noise_1V
    value_S, index_S = values_SV.max(dim=-1)
    return value_S, index_S + first_id
