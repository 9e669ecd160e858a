"""All-reduce through the peers' own memory, alone or with the residual add and RMSNorm that follow; one kernel each.

Every rank has three buffers, which calls use in turn, and can write into those of the others. A kernel writes its data
into its slot of each peer's buffer (a push), then polls its own buffer until the peers' data is there. There is no
barrier and no flag: an empty buffer holds the sentinel, and data never does.

The sentinel is -0.0 in every 16-bit lane: -0.0 is sent as +0.0, which adds the same. In 32-bit lanes it is 0x80008000:
as a float a denormal of -4.6e-41, sent as zero; as an integer negative, and we send none. Each lane is looked at on its
own, so that nothing depends on how many bytes the hardware moves at once, or in which order.

Why nothing is lost or overwritten: whoever reads a lane puts the sentinel back at once, so a call empties whatever it
was sent, and sizes, dtypes and kernels may change from call to call. Say we emptied a lane in call n. A peer writes to
it again in call n + 3, after it had all our data of call n + 2, which we sent after our kernel of call n had ended:
kernels of a stream follow each other (gdc_wait waits for the end too). Two buffers would do for that; with the third, a
whole kernel of ours lies between emptying a lane and sending anything that lets a peer go on. The turn is counted on
the device, so graphs can be replayed between eager calls.

All ranks run the same machine code, add in the order of ranks, and so get the same bits.

The rules: all ranks make the same calls in the same order, on one stream each. A program that polls holds its place on
the GPU, so a grid has no more programs than fit at once. They start in order, those of one number have the same rows on
all ranks, and send before they wait for what others send as early: so the first that isn't done always goes on. Where
ranks share a GPU in one process, load every kernel before the first poll: loading waits for what runs. Ranks of their
own processes can't block each other so: what is polled for was sent, or will be.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import torch
from torch import Tensor

from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, gpu, overlap, power_of_2, tl, triton
from nanollm.kernels.rms_norm import load_parts

BUFFERS = 3
SENTINEL = {2: -0x8000, 4: 0x80008000 - 2**32}  # by bytes of a lane, as a signed integer
_POLLS = tl.constexpr(1024)  # between two looks at the abort word, which is in host memory and far away
_CHOICE_TILE = 256  # rows a program


@dataclass
class PeerMemory:
    """The buffers of all ranks, as one rank's kernels see them.

    addresses: int64 [size + 1] on the device: where each rank's buffers are, then the abort word, an int32 in host
    memory. Once it isn't zero, kernels stop waiting, and what they return is worthless.
    turns: int32 on the device: the buffer to use next, once for each program, always the same number.
    capacity: bytes of one buffer, a multiple of 16.
    num_programs: the most that a kernel may have, one on each multiprocessor; twice as many where two fit.
    share: how many ranks' kernels must fit on this GPU together.
    """

    rank: int
    size: int
    addresses: Tensor
    turns: Tensor
    capacity: int
    num_programs: int
    share: int

    def overlap(self) -> dict[str, bool]:
        """Launch arguments. Kernels that were started early hold their places too, which another rank's may need."""
        return overlap(self.addresses.device) if self.share == 1 else {"PDL": False}

    @staticmethod
    def of(
        rank: int, buffers: list[int], abort: Tensor, nbytes: int, device: torch.device, share: int = 1
    ) -> "PeerMemory":
        """buffers: addresses of every rank's memory of `nbytes` bytes, emptied already, as they are mapped here."""
        addresses = torch.tensor([*buffers, abort.data_ptr()], dtype=torch.int64, device=device)
        num_programs = max(gpu(device).num_sms // share, 1)
        turns = torch.zeros(power_of_2(2 * num_programs), dtype=torch.int32, device=device)
        return PeerMemory(rank, len(buffers), addresses, turns, nbytes // BUFFERS // 16 * 16, num_programs, share)


def empty_buffers(memory: Tensor) -> None:
    """Fill a rank's buffers with the sentinel, before any peer may write to them."""
    memory.view(torch.int16).fill_(SENTINEL[2])


def all_reduce_reference(
    parts_RTD: Tensor, residual_TD: Tensor | None = None, weight_D: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The definition: (rms_norm(total) * weight, total) for total = residual + the parts of ranks 0, 1, … in turn.

    Sums in float32, rounds once at the end; without a weight both are the total.
    """
    total_TD = torch.zeros_like(parts_RTD[0], dtype=torch.float32)
    for part_TD in parts_RTD:
        total_TD = total_TD + part_TD
    if residual_TD is not None:
        total_TD = total_TD + residual_TD
    rounded_TD = total_TD.to(parts_RTD.dtype)
    if weight_D is None:
        return rounded_TD, rounded_TD
    scale_T1 = torch.rsqrt(total_TD.square().mean(-1, keepdim=True) + eps)
    return (total_TD * scale_T1 * weight_D).to(parts_RTD.dtype), rounded_TD


def best_of_ranks_reference(values_RS: Tensor, ids_RS: Tensor) -> Tensor:
    """The definition: the id whose value is largest; of equals the lowest rank's."""
    return ids_RS.gather(0, values_RS.argmax(0, keepdim=True))[0]


@triton.jit
def _bases(addresses, SIZE: tl.constexpr):
    """The addresses of all ranks' buffers, and of the abort word. Load them early: they are seldom in a cache."""
    found = ()
    for i in tl.static_range(SIZE + 1):
        found = found + (tl.load(addresses + i),)  # type: ignore[assignment]  # noqa: RUF005, Triton unpacks nothing
    return found


@triton.jit
def _sendable(x, LANE: tl.constexpr, SENTINEL: tl.constexpr):
    """x as bits, which are never the sentinel; senders too go on with these."""
    bits = x.to(LANE, bitcast=True)
    return tl.where(bits == SENTINEL, 0, bits).to(LANE)


@triton.jit
def _load_sendable(
    x_ZTD, at, inside, part_stride, PARTS: tl.constexpr, dtype: tl.constexpr, LANE: tl.constexpr, SENTINEL: tl.constexpr
):
    return _sendable(load_parts(x_ZTD, at, inside, part_stride, PARTS).to(dtype), LANE, SENTINEL)


@triton.jit
def _send(address, index, bits, inside):
    """Write lanes to a buffer; address is a multiple of 16."""
    pointer = tl.multiple_of(address.to(tl.pointer_type(bits.dtype)), 16)
    tl.store(pointer + index, bits, mask=inside)


@triton.jit
def _receive(address, index, inside, abort, LANE: tl.constexpr, SENTINEL: tl.constexpr):
    """Wait until all lanes inside are there, empty them for the next turn, and return them."""
    pointer = tl.multiple_of(address.to(tl.pointer_type(LANE)), 16) + index
    bits = tl.load(pointer, mask=inside, other=0, volatile=True)
    missing = tl.max((bits == SENTINEL).to(tl.int32), 0)
    polls = 0
    while missing != 0:
        bits = tl.load(pointer, mask=inside, other=0, volatile=True)
        missing = tl.max((bits == SENTINEL).to(tl.int32), 0)
        polls += 1
        if polls % _POLLS == 0:
            aborted = tl.load(abort.to(tl.pointer_type(tl.int32)), volatile=True)
            missing = tl.where(aborted != 0, 0, missing)
    # All threads agreed on `missing`, so all have loaded.
    tl.store(pointer, tl.full(bits.shape, SENTINEL, LANE), mask=inside)
    return bits


@triton.jit
def _next_turn(turns, turn, WORDS: tl.constexpr):
    """Each program writes its share of the words, so that all say the same whatever the next grid is."""
    tl.debug_barrier()  # all threads have read this program's word
    word = tl.arange(0, WORDS)
    following = tl.where(turn == 2, 0, turn + 1)
    tl.store(turns + word, following + word * 0, mask=word % tl.num_programs(0) == tl.program_id(0))


@triton.jit
def _finish(y_TD, sum_TD, residual, weight, start, total, column, inside, size, eps, NORM: tl.constexpr):
    """Add the residual, store the sum, and store its norm."""
    total += residual.to(tl.float32)
    tl.store(sum_TD + start + column, total.to(sum_TD.dtype.element_ty), mask=inside)
    if NORM:
        scale = tl.rsqrt(tl.sum(total * total) / size + eps)
        tl.store(y_TD + start + column, (total * scale * weight).to(y_TD.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rank", "num_rows"])
def _one_shot_kernel(
    y_TD, sum_TD, x_ZTD, residual_TD, weight_D, eps, addresses, turns, capacity, slot, rank, num_rows, size,
    part_stride,
    PARTS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, SIZE: tl.constexpr, LANE: tl.constexpr,
    SENTINEL: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # A buffer has a slot of `slot` bytes for each rank's x. One program a row, or every num_programs-th row: first it
    # sends all of them, then it waits for the first.
    first, step = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, TILE)
    inside = column < size
    stride = tl.cast(size, tl.int64)
    dtype = sum_TD.dtype.element_ty
    base, mine = _bases(addresses, SIZE), tl.load(addresses + rank)
    weight = column
    if NORM:
        weight = tl.load(weight_D + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    turn = tl.load(turns + first, volatile=True)
    buffer = turn.to(tl.int64) * capacity
    for row in range(first, num_rows, step):
        start = row * stride
        bits = _load_sendable(x_ZTD, start + column, inside, part_stride, PARTS, dtype, LANE, SENTINEL)
        for peer in tl.static_range(SIZE):
            if peer != rank:
                _send(base[peer] + buffer + rank * slot, start + column, bits, inside)
    _next_turn(turns, turn, WORDS)
    for row in range(first, num_rows, step):
        start = row * stride
        own = _load_sendable(x_ZTD, start + column, inside, part_stride, PARTS, dtype, LANE, SENTINEL)
        residual = tl.load(residual_TD + start + column, mask=inside & ADD, other=0.0)  # while the peers' is on its way
        total = tl.zeros([TILE], tl.float32)
        for peer in tl.static_range(SIZE):
            if peer == rank:
                bits = own
            else:
                bits = _receive(mine + buffer + peer * slot, start + column, inside, base[SIZE], LANE, SENTINEL)
            total += bits.to(dtype, bitcast=True).to(tl.float32)
        _finish(y_TD, sum_TD, residual, weight, start, total, column, inside, size, eps, NORM)


@triton.jit(do_not_specialize=["rank", "num_rows"])
def _two_shot_kernel(
    y_TD, sum_TD, x_ZTD, residual_TD, weight_D, eps, addresses, turns, capacity, slot, rank, num_rows, size,
    part_stride,
    PARTS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, SIZE: tl.constexpr, LANE: tl.constexpr,
    SENTINEL: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Row `SIZE * group + owner` is summed by its owner only, rounded, and sent to all. A buffer has a slot of `slot`
    # bytes for each rank's share of the owner's rows, then room for all rows' sums.
    first, step = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, TILE)
    inside = column < size
    stride = tl.cast(size, tl.int64)
    dtype = sum_TD.dtype.element_ty
    base, mine = _bases(addresses, SIZE), tl.load(addresses + rank)
    weight = column
    if NORM:
        weight = tl.load(weight_D + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    turn = tl.load(turns + first, volatile=True)
    buffer = turn.to(tl.int64) * capacity
    _next_turn(turns, turn, WORDS)
    num_groups = tl.cdiv(num_rows, SIZE)
    # Each round sends the shares of one group, sums the group before, and takes the sums of the one before that: so
    # the links are busy throughout. Of a few rows, each program has one group, and takes three rounds for it.
    for ahead in range(first, num_groups + 2 * step, step):
        if ahead < num_groups:
            in_slot = ahead * stride + column
            for owner in tl.static_range(SIZE):
                if owner != rank:
                    row = ahead * SIZE + owner
                    start, there = row * stride, inside & (row < num_rows)
                    bits = _load_sendable(x_ZTD, start + column, there, part_stride, PARTS, dtype, LANE, SENTINEL)
                    _send(base[owner] + buffer + rank * slot, in_slot, bits, there)
        group = ahead - step
        row = group * SIZE + rank
        if (group >= 0) & (row < num_rows):
            start = row * stride
            in_slot = group * stride + column
            own = _load_sendable(x_ZTD, start + column, inside, part_stride, PARTS, dtype, LANE, SENTINEL)
            residual = tl.load(residual_TD + start + column, mask=inside & ADD, other=0.0)
            total = tl.zeros([TILE], tl.float32)
            for peer in tl.static_range(SIZE):
                if peer == rank:
                    bits = own
                else:
                    bits = _receive(mine + buffer + peer * slot, in_slot, inside, base[SIZE], LANE, SENTINEL)
                total += bits.to(dtype, bitcast=True).to(tl.float32)
            rounded = _sendable(total.to(dtype), LANE, SENTINEL)
            for peer in tl.static_range(SIZE):
                if peer != rank:
                    _send(base[peer] + buffer + SIZE * slot, start + column, rounded, inside)
            total = rounded.to(dtype, bitcast=True).to(tl.float32)
            _finish(y_TD, sum_TD, residual, weight, start, total, column, inside, size, eps, NORM)
        group = ahead - 2 * step
        if group >= 0:
            for owner in tl.static_range(SIZE):
                row = group * SIZE + owner
                if (owner != rank) & (row < num_rows):
                    start = row * stride
                    residual = tl.load(residual_TD + start + column, mask=inside & ADD, other=0.0)
                    bits = _receive(mine + buffer + SIZE * slot, start + column, inside, base[SIZE], LANE, SENTINEL)
                    total = bits.to(dtype, bitcast=True).to(tl.float32)
                    _finish(y_TD, sum_TD, residual, weight, start, total, column, inside, size, eps, NORM)


@triton.jit(do_not_specialize=["rank", "num_rows"], do_not_specialize_on_alignment=["out_S", "value_S", "id_S"])
def _best_of_ranks_kernel(
    out_S, value_S, id_S, addresses, turns, capacity, slot, rank, num_rows,
    SIZE: tl.constexpr, SENTINEL: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # A buffer has two slots for each rank: values, then ids.
    first, step = tl.program_id(0), tl.num_programs(0)
    base, mine = _bases(addresses, SIZE), tl.load(addresses + rank)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    turn = tl.load(turns + first, volatile=True)
    buffer = turn.to(tl.int64) * capacity
    _next_turn(turns, turn, WORDS)
    for tile in range(first, tl.cdiv(num_rows, TILE), step):
        row = tile * TILE + tl.arange(0, TILE)
        inside = row < num_rows
        value = _sendable(tl.load(value_S + row, mask=inside, other=0.0), tl.int32, SENTINEL)
        token_id = tl.load(id_S + row, mask=inside, other=0).to(tl.int32)
        for peer in tl.static_range(SIZE):
            if peer != rank:
                _send(base[peer] + buffer + 2 * rank * slot, row, value, inside)
                _send(base[peer] + buffer + (2 * rank + 1) * slot, row, token_id, inside)
        best, best_id = value, token_id
        for peer in tl.static_range(SIZE):
            if peer == rank:
                peer_value, peer_id = value, token_id
            else:
                here = mine + buffer + 2 * peer * slot
                peer_value = _receive(here, row, inside, base[SIZE], tl.int32, SENTINEL)
                peer_id = _receive(here + slot, row, inside, base[SIZE], tl.int32, SENTINEL)
            if peer == 0:
                best, best_id = peer_value, peer_id
            else:
                larger = peer_value.to(tl.float32, bitcast=True) > best.to(tl.float32, bitcast=True)
                best, best_id = tl.where(larger, peer_value, best), tl.where(larger, peer_id, best_id)
        tl.store(out_S + row, best_id.to(tl.int64), mask=inside)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def rows_that_fit(peers: PeerMemory, row_bytes: int, *, two_shot: bool) -> int:
    """The most rows of one call: a larger all-reduce is done in pieces."""
    if two_shot:  # a slot of every size-th row from each rank, rounded up, and all rows
        return max((peers.capacity - peers.size * (row_bytes + 16)) // (2 * row_bytes), 0)
    return (peers.capacity // peers.size - 16) // row_bytes


def peer_all_reduce(
    x_ZTD: Tensor,
    residual_TD: Tensor | None,
    weight_D: Tensor | None,
    eps: float,
    peers: PeerMemory,
    *,
    two_shot: bool,
) -> tuple[Tensor, Tensor]:
    """all_reduce_reference of this rank's x_TD and the peers', [T, D], both results new and bitwise equal on all ranks.

    x may also be parts [Z, T, D], which are added up first, in float32, and rounded to the residual's dtype.

    One-shot: everyone sends everything to everyone: one trip, (size - 1) * T * D elements out and in. Two-shot: each
    row is summed by one rank, rounded and sent back: two trips, 2 * (size - 1) / size * T * D elements.
    """
    num_tokens, size = x_ZTD.shape[-2:]
    x_ZTD = x_ZTD.contiguous().view(-1, num_tokens, size)
    no_residual = residual_TD is None
    residual_TD = x_ZTD[0] if residual_TD is None else residual_TD.contiguous()
    itemsize = residual_TD.element_size()
    sum_TD = torch.empty_like(residual_TD)
    y_TD = sum_TD if weight_D is None else torch.empty_like(sum_TD)
    kernel = _two_shot_kernel if two_shot else _one_shot_kernel
    tile = power_of_2(size)
    most = rows_that_fit(peers, size * itemsize, two_shot=two_shot)
    if num_tokens > most:  # pieces of one size, not one of a few rows at the end
        most = -(-num_tokens // -(-num_tokens // most))
    two_fit = peers.size == 2 and tile <= 4096  # on a multiprocessor, by their registers
    programs = peers.num_programs * (1 + two_fit)
    # As measured: more warps send a lot sooner, and end a row later.
    num_warps = min(max(tile // (512 if num_tokens <= 8 else 256), 1), 16)
    for start in range(0, num_tokens, most):
        piece = slice(start, start + most)
        num_rows = min(most, num_tokens - start)
        in_slot = -(-num_rows // peers.size) if two_shot else num_rows  # rows, and a program's turns
        kernel[(min(in_slot, programs),)](
            y_TD[piece],
            sum_TD[piece],
            x_ZTD[:, piece],
            residual_TD[piece],
            weight_D,
            eps,
            peers.addresses,
            peers.turns,
            peers.capacity,
            _round_up(in_slot * size * itemsize),
            peers.rank,
            num_rows,
            size,
            num_tokens * size,
            PARTS=len(x_ZTD),
            ADD=not no_residual,
            NORM=weight_D is not None,
            SIZE=peers.size,
            LANE={2: tl.int16, 4: tl.int32}[itemsize],
            SENTINEL=SENTINEL[itemsize],
            WORDS=len(peers.turns),
            TILE=tile,
            num_warps=num_warps,
            maxnreg=min(1024 // num_warps, 255) if two_fit else None,
            **peers.overlap(),
        )
    return y_TD, sum_TD


def peer_best_of_ranks(value_S: Tensor, id_S: Tensor, peers: PeerMemory) -> Tensor:
    """best_of_ranks_reference of this rank's candidates and the peers': float32 values, int64 ids below 2**31."""
    num_rows = len(value_S)
    out_S = torch.empty_like(id_S)
    most = (peers.capacity // (2 * peers.size) - 16) // 4
    for start in range(0, num_rows, most):
        piece = slice(start, start + most)
        rows = min(most, num_rows - start)
        _best_of_ranks_kernel[(min(-(-rows // _CHOICE_TILE), peers.num_programs),)](
            out_S[piece],
            value_S[piece],
            id_S[piece],
            peers.addresses,
            peers.turns,
            peers.capacity,
            _round_up(4 * rows),
            peers.rank,
            rows,
            SIZE=peers.size,
            SENTINEL=SENTINEL[4],
            WORDS=len(peers.turns),
            TILE=_CHOICE_TILE,
            num_warps=2,
            **peers.overlap(),
        )
    return out_S
