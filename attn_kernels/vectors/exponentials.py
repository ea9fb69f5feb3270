"""The exponential of vectors, and the hyperbolic tangent with its derivative."""

from __future__ import annotations

from llvmlite import ir

from ..compiler.language import Value, like

_LARGEST = 7.90531110763549805
"""Where tanh rounds to 1 in float32."""

_SMALL = 1.6e-7
"""The square of the argument below which tanh is the argument itself; products would be subnormal there."""

# The highest power first: of the numerator, whose powers are odd, and of the denominator, whose powers are even.
_ODD = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
_EVEN = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


def exp(x: Value) -> Value:
    """Return the exponential within 1e-7 of itself; below e**-87.3, the least number of full precision, it is 0.

    The polynomial on plus or minus log(2) / 2 is that of Cephes' expf.
    """
    code, ints = x.code, like(x.type, ir.IntType(32))
    # 1.5 * 2**23: the sum's last bits are the nearest whole number, and with 127 the exponent of its power of two.
    magic = 12582912.0 + 127.0
    # No bound above: the callers subtract a largest value, so that x is at most 0. From 88.8 on the exponent would
    # overflow.
    shifted = code.times_plus(x, 1.4426950408889634, magic)
    power = shifted - magic
    # log(2) in two parts (Cody and Waite). The first has 15 bits, a power at most 8, so their product is exact in
    # float32 without a fused operation, too; both parts together are 6e-14 off.
    rest = code.times_plus(power, -0.693145751953125, x)
    rest = code.times_plus(power, -1.428606765330187e-06, rest)
    total = code.times_plus(rest, 1.9875691500e-4, 1.3981999507e-3)
    for factor in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        total = code.times_plus(total, rest, factor)
    total = code.times_plus(total, rest * rest, rest) + 1.0
    scaled = total * (shifted.bits_as(ints) << 23).bits_as(x.type)  # a product, so that a NaN stays one
    # The choice is last, since the polynomial of -inf is NaN. log(2**-126) = -87.34: below, the bits of the exponent
    # would wrap around.
    return code.choose(x < -87.3, 0.0, scaled)


def tanh(x: Value) -> Value:
    """Return the hyperbolic tangent, whose error is 3e-7 of it: the rational function that XLA and Eigen take."""
    code = x.code
    near = code.largest(code.vector(-_LARGEST, x.type.count), code.least(code.vector(_LARGEST, x.type.count), x))
    square = near * near
    odd, even = (code.vector(factors[0], x.type.count) for factors in (_ODD, _EVEN))
    for factor in _ODD[1:]:
        odd = code.times_plus(odd, square, factor)
    for factor in _EVEN[1:]:
        even = code.times_plus(even, square, factor)
    return code.choose(square < _SMALL, x, near * odd / even)


def slope_of_tanh(x: Value) -> Value:
    """Return the derivative of the hyperbolic tangent, whose error is 5e-7 of it, and 0 where that is below e**-87."""
    # 1 - tanh(x)**2 as 4 t / (1 + t)**2 with t = exp(-2 |x|): where tanh is nearly 1, the difference would be its
    # rounding error, which large queries and keys multiply.
    faded = exp(x.code.largest(x, 0.0 - x) * -2.0)
    whole = faded + 1.0
    return 4.0 * faded / (whole * whole)
