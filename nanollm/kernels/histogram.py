"""How many logits a program sees in each bin: counted in shared memory, as they pass.

A bin holds 2**16 neighbours among the keys, integers that order as float32 numbers do: of bfloat16 that is one value.
There are bins for both signs of the magnitudes from 2**-24 to 2**8. What is nearer to zero or farther away is in the
nearest of them, which holds more. Additions in shared memory are quick, as nobody waits for them, and may come in any
order.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from nanollm.kernels.backend import tl, triton

BINS = 2 * 128 * (24 + 8)  # bfloat16 has 128 numbers an octave
_LEAST = (127 - 24) * 128  # the upper half of the bits of 2**-24
# Of magnitudes between these, one value of bfloat16 is in a bin.
NEAREST, FARTHEST = tl.constexpr(2.0**-24), tl.constexpr(254.0)
NUM_BINS, BIN, _HALF, _LOW = (tl.constexpr(value) for value in (BINS, 1 << 16, BINS // 2, _LEAST))

# Triton itself has no shared memory that programs can address. Where nothing comes out, it wants a zero.
_PLACE = tl.constexpr(f"{{ .shared .align 16 .b32 bins[{BINS}]; mov.u32 $0, bins; }}")
_SET = tl.constexpr("st.shared.b32 [$1], 0; mov.b32 $0, 0;")
_GET = tl.constexpr("ld.volatile.shared.b32 $0, [$1];")
_ADD = tl.constexpr("red.shared.add.u32 [$1], 1; mov.b32 $0, 0;")
# Both halves at once: the magnitude less that of the least bin, kept within the bins, and the sign.
_ADD_PAIR = tl.constexpr(f"""{{
.reg .b32 slot, sign, least, most, first, second;
and.b32 slot, $1, 0x7FFF7FFF;
mov.b32 least, {-_LEAST % 2**16 * 0x10001};
mov.b32 most, {(BINS // 2 - 1) * 0x10001};
add.s16x2 slot, slot, least;
min.relu.s16x2 slot, slot, most;
shr.u32 sign, $1, {17 - BINS.bit_length()};
and.b32 sign, sign, {BINS // 2 * 0x10001};
or.b32 slot, slot, sign;
and.b32 first, slot, 0xFFFF;
shr.u32 second, slot, 16;
mad.lo.u32 first, first, 4, $2;
mad.lo.u32 second, second, 4, $2;
red.shared.add.u32 [first], 1;
red.shared.add.u32 [second], 1;
mov.b32 $0, 0;
}}""")


@triton.jit
def key_of(x):
    """int32 that order as the float32 numbers do; of both zeros 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def number_of(key):
    """The inverse of key_of."""
    magnitude = tl.where(key < 0, -key, key)
    return (magnitude | (key & -(2**31))).to(tl.float32, bitcast=True)


@triton.jit
def first_key(bin):
    """The least key of a bin. Bins ascend with the keys."""
    up = bin - _HALF
    key = tl.where(up < 0, up + 1 - _LOW, tl.where(up > 0, up + _LOW, 0)) << 16
    return tl.where(bin == 0, -0x7F800000, key)


@triton.jit
def _slot(bin):
    """Where a bin is in shared memory: magnitudes ascend, positive numbers first."""
    return tl.where(bin < _HALF, NUM_BINS - 1 - bin, bin - _HALF)


@triton.jit
def place(SHARED: tl.constexpr):
    """The address of the program's bins in shared memory: `at` of the others. Without it, as the interpreter is, they
    count where the counts are to be."""
    at = tl.full((), 0, tl.int32)
    if SHARED:
        at = tl.inline_asm_elementwise(_PLACE, "=r", [], tl.int32, is_pure=False, pack=1)
    return at


@triton.jit
def clear(counts, at, SHARED: tl.constexpr):
    """counts: a pointer to NUM_BINS int32 of this program."""
    bin = tl.arange(0, NUM_BINS)
    if SHARED:
        tl.inline_asm_elementwise(_SET, "=r,r", [at + bin * 4], tl.int32, is_pure=False, pack=1)
    else:
        tl.store(counts + bin, tl.zeros_like(bin))
    tl.debug_barrier()


@triton.jit
def add(counts, at, x, SHARED: tl.constexpr):
    """Counts float32 numbers."""
    cell = key_of(x) >> 16
    up, down = tl.maximum(cell - _LOW, 0), tl.maximum(-cell - _LOW, 0)
    bin = tl.where(cell < 0, _HALF - 1 - tl.minimum(down, _HALF - 1), _HALF + tl.minimum(up, _HALF - 1))
    if SHARED:
        tl.inline_asm_elementwise(_ADD, "=r,r", [at + _slot(bin) * 4], tl.int32, is_pure=False, pack=1)
    else:
        tl.atomic_add(counts + bin, 1, sem="relaxed")


@triton.jit
def add_pairs(at, pair):
    """Counts pairs of bfloat16, each an int32, none of them NaN. Of both zeros -0 is in the bin below 0's."""
    tl.inline_asm_elementwise(_ADD_PAIR, "=r,r,r", [pair, at], tl.int32, is_pure=False, pack=1)


@triton.jit
def finish(counts, at, SHARED: tl.constexpr):
    """Leaves in counts what was counted."""
    tl.debug_barrier()
    if SHARED:
        bin = tl.arange(0, NUM_BINS)
        found = tl.inline_asm_elementwise(_GET, "=r,r", [at + _slot(bin) * 4], tl.int32, is_pure=False, pack=1)
        tl.store(counts + bin, found)
