"""Owns the meaning of a batched matrix product with scale and addend."""

from torch import Tensor


def bmm(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    c: Tensor | None = None,
    beta: float = 1.0,
) -> Tensor:
    """A batched matrix product in float64.

        out[i, r, s] = alpha * sum over k of a[i, r, k] * b[i, k, s]  +  beta * c[i, r, s]

    Shapes: a `[B, M, K]`, b `[B, K, N]`, c broadcastable to `[B, M, N]`; out `[B, M, N]`, float64
    whatever the inputs' dtype. The inputs are read exactly.

    **Contract**

    - Strides never matter: a transposed, sliced or expanded tensor means its elements. What lies
      in the gaps of a tensor's memory is not read.
    - K is a plain sum: a packed kernel that pads K to its tile adds zeros, so nothing that stands
      beyond K may reach the result, not even as NaN or inf.
    - Integer inputs: the sum itself, of any sign and size; nothing saturates and nothing wraps.
      int8 products are exact in int32 as long as K < 2**17; a float64 result holds them all.
    - alpha scales the product, not the addend; beta the addend alone. Both are real numbers, of
      no dtype; a kernel that stores them in one rounds them (its arithmetic, not its meaning).
    - Without `c` beta has no effect. With `beta=0`, c is not read: NaN there reaches nothing
      (BLAS and torch agree).
    - K == 0 is allowed: zeros, or the scaled addend. So are B, M or N == 0.
    - Subnormal inputs and results count at their value. (AMX's tile products read bfloat16
      subnormals as zero and flush float32 results below 2**-126; Metal flushes float32 too.)
    - NaN and inf propagate as IEEE arithmetic has it.
    - B is matched element by element: no batch of 1 is expanded, pass an expanded tensor.

    Raises:
        ValueError: shapes that do not fit together.
    """
    if a.ndim != 3 or b.ndim != 3:
        raise ValueError(
            f"a has shape {tuple(a.shape)}, b {tuple(b.shape)}, expected 3 axes each: "
            "pass [batch, rows, columns]"
        )
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise ValueError(
            f"a has shape {tuple(a.shape)}, b {tuple(b.shape)}: pass [B, M, K] and [B, K, N] with "
            "equal B and K; expand a batch of 1 yourself"
        )
    out = alpha * (a.double() @ b.double())
    if c is None or beta == 0:
        return out
    short = zip(reversed(c.shape), reversed(out.shape), strict=False)
    if c.ndim > 3 or any(size not in (1, full) for size, full in short):
        raise ValueError(
            f"c has shape {tuple(c.shape)}, expected one that broadcasts to {tuple(out.shape)}"
        )
    return out + beta * c.double()
