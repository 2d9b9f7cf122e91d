"""Our attention kernels for torch and MLX, by themselves: against the reference, and exactly."""

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from harness.engines.native.mlx import banded_mask as mlx_mask
from harness.engines.native.mlx import sdpa as mlx_sdpa
from harness.engines.native.torch import banded_mask as torch_mask
from harness.engines.native.torch import sdpa as torch_sdpa
from harness.runtimes import mlx as mlx_runtime
from harness.runtimes import torch as torch_runtime
from references import banded_mask as reference_mask
from references import sdpa as reference

RUNTIMES: dict[str, Any] = {"torch": torch_runtime, "mlx": mlx_runtime}
SDPA: dict[str, ModuleType] = {"torch": torch_sdpa, "mlx": mlx_sdpa}
MASK: dict[str, ModuleType] = {"torch": torch_mask, "mlx": mlx_mask}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNIT = 2.0**-24
LARGEST = "the largest finite number"

each_runtime = pytest.mark.parametrize("runtime", ["torch", "mlx"])
each_path = pytest.mark.parametrize("path", ["fused", "plain"])


def call(runtime: str, function: str, *args: Any, **options: Any) -> Any:
    """Call a kernel with torch tensors: sent to the runtime, and its results fetched from there."""

    def send(x: Any) -> Any:
        if isinstance(x, Tensor):
            return RUNTIMES[runtime].send(x, "cpu")
        return [send(y) for y in x] if isinstance(x, list) and x and not is_count(x[0]) else x

    options = {name: send(x) for name, x in options.items()}
    result = getattr(SDPA[runtime], function)(*(send(x) for x in args), **options)
    if isinstance(result, tuple):
        return tuple(RUNTIMES[runtime].fetch(x) for x in result)
    return RUNTIMES[runtime].fetch(result)


def is_count(x: Any) -> bool:
    return isinstance(x, int)


def attend(runtime: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return call(runtime, "lower_right_sdpa", q, k, v, **options)


def bound(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """How far the documented fp32 arithmetic may be from the reference: of out, and of lse.

    As in test_references_sdpa.Drawn.bound, for one side and u = 2^-24: a score errs by (D+8) u A,
    its difference to the largest is rounded (2 u A), and exp adds 2 u and, in MLX, u |x| <= 2 u A
    (its argument times log2 e is rounded): e = (D+12) u A + 2 u relative to the weight, twice that
    and (2 n + 3) u after the two sums. One rounding to the dtype of q at the end. Weights below
    2^-125 of the largest may be lost. ALiBi's product and sum err by 2 u (A + slope * distance),
    taken as two more of an A that is so much larger. lse errs by a weight's error, n u, and its
    rounding.
    """
    sinks = options.get("sinks")
    dtype, head_dim, n = q.dtype, q.shape[-1], k.shape[2] + 1
    q, k, v = q.double(), k.double(), v.double()
    size = (q.abs() @ k.abs().repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT) / head_dim**0.5
    size = size.masked_fill(~visible, 0.0).amax(dim=-1)
    if sinks is not None:
        size = torch.maximum(size, sinks.double().abs()[:, None])
    steps = head_dim + 12
    if options.get("alibi") is not None:
        size, steps = size + options["alibi"][:, None] * options["distance"].abs().max(), steps + 2
    shown = visible.any(dim=-2)[:, 0, :, None].expand(-1, v.shape[2], v.shape[-1])[:, None]
    v = v.masked_fill(~shown, 0.0)
    weighed, _ = reference.sdpa(q, k, v.abs(), visible=visible, **options)
    exact, lse = reference.sdpa(q, k, v, visible=visible, **options)
    e = steps * size + 2
    out_bound = (2 * e + 2 * n + 4)[..., None] * UNIT * weighed + 2.0**-125 * v.abs().sum()
    info = torch.finfo(dtype)
    rounding = info.eps / 2 * (exact.abs() + out_bound) + info.smallest_normal * info.eps
    finite_lse = lse.masked_fill(lse == -math.inf, 0.0).abs()
    return out_bound + rounding, (e + n + 4 + 2 * finite_lse) * UNIT


@st.composite
def attention(draw: st.DrawFn, *, ragged: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    batch, kv_heads, group = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    q_len, kv_len = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    head_dim, v_dim = draw(st.sampled_from([8, 5])), draw(st.sampled_from([8, 3]))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    loud = draw(st.sampled_from([1.0, 8.0]))
    causal = draw(st.booleans())
    options: dict[str, Any] = {
        "causal": causal,
        "window": draw(st.none() | st.integers(1, 8)) if causal else None,
        "q_lens": None,
        "kv_lens": None,
        "side": draw(st.sampled_from(["right", "left"])),
    }
    for name, most in (("q_lens", q_len), ("kv_lens", kv_len)):
        if ragged and draw(st.booleans()):
            counts = st.lists(st.integers(0, most), min_size=batch, max_size=batch)
            options[name] = draw(counts)
    shapes = {
        "q": (batch, kv_heads * group, q_len, head_dim),
        "k": (batch, kv_heads, kv_len, head_dim),
        "v": (batch, kv_heads, kv_len, v_dim),
    }
    tensors = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    tensors["q"] *= loud
    return {name: x.to(dtype) for name, x in tensors.items()}, options


def visible_of(tensors: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    (batch, _, q_len, _), kv_len = tensors["q"].shape, tensors["k"].shape[2]
    return reference.visible_keys(
        options["q_lens"] or [q_len] * batch,
        options["kv_lens"] or [kv_len] * batch,
        q_len,
        kv_len,
        causal=options["causal"],
        window=options["window"],
        side=options["side"],
    )[:, None]


def in_padding(x: Tensor, lens: list[int] | None, side: str) -> Tensor:
    """The slots of x that hold no token, broadcastable to it."""
    slot, length = torch.arange(x.shape[2]), x.shape[2]
    kept = torch.tensor([length] * len(x) if lens is None else lens)[:, None]
    hidden = slot >= kept if side == "right" else slot < length - kept
    return hidden[:, None, :, None]


@each_runtime
@given(drawn=attention(), softcap=st.sampled_from([None, 2.0]), with_sinks=st.booleans())
def test_plain_agrees_with_reference(
    runtime: str, drawn: Any, softcap: float | None, with_sinks: bool
) -> None:
    tensors, options = drawn
    heads = tensors["q"].shape[1]
    sinks = torch.linspace(-1, 3, heads).to(tensors["q"].dtype) if with_sinks else None
    visible = visible_of(tensors, options)
    expected, expected_lse = reference.sdpa(
        **tensors, visible=visible, softcap=softcap, sinks=sinks
    )
    out, lse = attend(
        runtime, **tensors, **options, softcap=softcap, sinks=sinks, return_lse=True, path="plain"
    )
    assert out.dtype == tensors["q"].dtype
    assert lse.dtype == torch.float32
    allowed, allowed_lse = bound(**tensors, visible=visible, softcap=softcap, sinks=sinks)
    assert ((out.double() - expected).abs() - allowed).max() <= 0
    assert torch.equal(lse == -math.inf, expected_lse == -math.inf)
    apart = (lse.double() - expected_lse).nan_to_num().abs()
    assert (apart - allowed_lse).max() <= 0


@given(drawn=attention(), softcap=st.sampled_from([None, 2.0]), with_sinks=st.booleans())
def test_alibi_of_torch_agrees_with_reference(
    drawn: Any, softcap: float | None, with_sinks: bool
) -> None:
    tensors, options = drawn
    (batch, heads, q_len, _), kv_len = tensors["q"].shape, tensors["k"].shape[2]
    alibi = reference.alibi_slopes(heads).float()
    distance = reference.distances(
        options["q_lens"] or [q_len] * batch, options["kv_lens"] or [kv_len] * batch,
        q_len, kv_len, side=options["side"],
    )[:, None]  # fmt: skip
    sinks = torch.linspace(-1, 3, heads).to(tensors["q"].dtype) if with_sinks else None
    biased: dict[str, Any] = {
        "visible": visible_of(tensors, options), "softcap": softcap, "sinks": sinks,
        "alibi": alibi, "distance": distance,
    }  # fmt: skip
    expected, expected_lse = reference.sdpa(**tensors, **biased)
    out, lse = attend(
        "torch", **tensors, **options, softcap=softcap, sinks=sinks, alibi=alibi, return_lse=True
    )
    allowed, allowed_lse = bound(**tensors, **biased)
    assert ((out.double() - expected).abs() - allowed).max() <= 0
    assert torch.equal(lse == -math.inf, expected_lse == -math.inf)
    apart = (lse.double() - expected_lse).nan_to_num().abs()
    assert (apart - allowed_lse).max() <= 0


def test_alibi_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"alibi has shape \(3,\), expected \(2,\): pass"):
        torch_sdpa.lower_right_sdpa(ONES, ONES, ONES, alibi=torch.ones(3))
    with pytest.raises(ValueError, match=r"path='fused' has no softcap.*pass"):
        torch_sdpa.lower_right_sdpa(ONES, ONES, ONES, alibi=torch.ones(2), path="fused")


@each_runtime
@given(drawn=attention())
def test_fused_fp32_agrees_with_reference(runtime: str, drawn: Any) -> None:
    """Both libraries keep all in fp32 here and add what `bound` allows once more at most: torch's
    fused exp errs by 3.1 u instead of 2 u.
    """
    tensors, options = drawn
    tensors = {name: x.float() for name, x in tensors.items()}
    visible = visible_of(tensors, options)
    expected, _ = reference.sdpa(**tensors, visible=visible)
    out = attend(runtime, **tensors, **options, path="fused")
    allowed, _ = bound(**tensors, visible=visible)
    assert ((out.double() - expected).abs() - 2 * allowed).max() <= 0


@each_runtime
@each_path
@pytest.mark.parametrize("poison", [math.nan, math.inf, LARGEST])
@given(drawn=attention())
def test_padding_is_never_read(runtime: str, path: str, poison: Any, drawn: Any) -> None:
    tensors, options = drawn
    wild = dict(tensors)
    if poison == LARGEST:
        poison = torch.finfo(tensors["q"].dtype).max
    for name, lens in (("q", "q_lens"), ("k", "kv_lens"), ("v", "kv_lens")):
        x = tensors[name]
        wild[name] = x.masked_fill(in_padding(x, options[lens], options["side"]), poison)
    clean = attend(runtime, **tensors, **options, path=path)
    assert clean.isfinite().all()
    assert torch.equal(attend(runtime, **wild, **options, path=path), clean)


@each_runtime
@each_path
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 2, 4, 8, 16, None])
def test_equal_scores_give_the_mean_exactly(
    runtime: str, path: str, dtype: torch.dtype, window: int | None
) -> None:
    """One decoded token, cache of 16, equal scores: the mean of the last W values, exactly.

    W is a power of two. With v[j] = j, the mean has 5 bits at most, and so has each sum before it.
    """
    q, k = torch.zeros(1, 4, 1, 8, dtype=dtype), torch.ones(1, 2, 16, 8, dtype=dtype)
    v = torch.arange(16, dtype=dtype)[:, None].expand(1, 2, 16, 8)
    shown = range(16)[-(window or 16) :]
    out = attend(runtime, q, k, v, window=window, path=path)
    assert (out == sum(shown) / len(shown)).all()


@each_runtime
@each_path
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_queries_than_keys(runtime: str, path: str, dtype: torch.dtype) -> None:
    q, k = torch.zeros(1, 1, 4, 8, dtype=dtype), torch.ones(1, 1, 2, 8, dtype=dtype)
    v = torch.tensor([3.0, 5.0], dtype=dtype)[:, None].expand(1, 1, 2, 8)
    out = attend(runtime, q, k, v, path=path)
    assert out[0, 0, :, 0].tolist() == [0.0, 0.0, 3.0, 4.0]


@each_runtime
@each_path
def test_no_keys_at_all(runtime: str, path: str) -> None:
    q, k = torch.ones(2, 4, 3, 8), torch.ones(2, 2, 0, 8)
    out = attend(runtime, q, k, k, path=path)
    assert out.shape == q.shape
    assert (out == 0).all()


@each_runtime
def test_row_without_keys_has_the_sink_as_lse(runtime: str) -> None:
    q, k = torch.ones(2, 2, 1, 8), torch.ones(2, 1, 3, 8)
    sinks = torch.tensor([0.25, -7.0])
    for options, lse in (({"sinks": sinks}, [0.25, -7.0]), ({}, [-math.inf, -math.inf])):
        result = attend(runtime, q, k, k, kv_lens=[0, 2], return_lse=True, **options)
        assert (result[0][0] == 0).all()
        assert result[1][0, :, 0].tolist() == lse


@each_runtime
@given(drawn=attention(ragged=False), window=st.none() | st.integers(1, 8), data=st.data())
def test_ragged_decode_agrees_with_each_request_alone(
    runtime: str, drawn: Any, window: int | None, data: Any
) -> None:
    tensors, _ = drawn
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    lengths = [data.draw(st.integers(0, k.shape[2])) for _ in k]
    keys = [k[b, :, :length] for b, length in enumerate(lengths)]
    values = [v[b, :, :length] for b, length in enumerate(lengths)]
    sinks = torch.linspace(-1, 3, q.shape[1]).to(q.dtype)
    out = call(runtime, "ragged_decode", q, keys, values, window=window, sinks=sinks, path="plain")
    for b, length in enumerate(lengths):
        q_len = q.shape[2]
        visible = reference.visible_keys(
            [q_len], [length], q_len, length, causal=True, window=window
        )[:, None]
        alone = (q[b : b + 1], keys[b][None], values[b][None])
        expected, _ = reference.sdpa(*alone, visible=visible, sinks=sinks)
        # `bound` needs a key; without one, the result is zero exactly.
        allowed = bound(*alone, visible=visible, sinks=sinks)[0] if length else 0.0
        assert ((out[b : b + 1].double() - expected).abs() - allowed).max() <= 0


@each_runtime
@each_path
@pytest.mark.parametrize(("n", "window"), [(1, 4), (3, 4), (4, 1)])
def test_ragged_decode_reads_no_more_than_the_window(
    runtime: str, path: str, n: int, window: int
) -> None:
    """Keys that no query's window reaches are NaN, and the oldest that one does reach counts."""
    lengths = [20, 2, 7]
    q = torch.zeros(3, 2, n, 8)
    caches = [torch.ones(1, length, 8) for length in lengths]
    values = []
    for length in lengths:
        v = torch.arange(length, dtype=torch.float32)[:, None].expand(1, length, 8).clone()
        v[:, : max(0, length - (window + n - 1))] = math.nan
        values.append(v)
    out = call(runtime, "ragged_decode", q, caches, values, window=window, path=path)
    for b, length in enumerate(lengths):
        for i in range(n):
            end = length - n + i + 1
            shown = range(max(0, end - window), max(0, end))
            mean = sum(shown) / len(shown) if shown else 0.0
            # A mean of 3 integers below 20 may be rounded: weights, two sums and a division.
            assert (out[b, :, i] - mean).abs().max() <= 8 * UNIT * mean


@each_runtime
@given(
    n=st.integers(1, 9), offset=st.integers(0, 20), window=st.none() | st.integers(1, 12),
    data=st.data(),
)  # fmt: skip
def test_banded_mask_is_the_reference(
    runtime: str, n: int, offset: int, window: int | None, data: Any
) -> None:
    batch = data.draw(st.integers(1, 3))
    sides = data.draw(st.sets(st.sampled_from(["left_padding", "right_padding"])))
    counts = st.lists(st.integers(0, offset + n), min_size=batch, max_size=batch)
    padding = {side: data.draw(counts) for side in sorted(sides)}
    ours = MASK[runtime].banded_mask(n, offset, window=window, **padding)
    expected = reference_mask.banded_mask(n, offset, window=window, **padding)
    expected = expected[:, None] if padding else expected
    assert torch.equal(RUNTIMES[runtime].fetch(ours), expected)


@each_runtime
@given(drawn=attention())
def test_ragged_mask_is_the_reference(runtime: str, drawn: Any) -> None:
    tensors, options = drawn
    sizes = {"q_len": tensors["q"].shape[2], "kv_len": tensors["k"].shape[2]}
    ours = MASK[runtime].ragged_mask(**options, **sizes, batch=len(tensors["q"]))
    assert torch.equal(RUNTIMES[runtime].fetch(ours), visible_of(tensors, options))


ONES = torch.ones(2, 2, 3, 4)


@each_runtime
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"q": torch.ones(2, 3, 4)}, r"q has shape \(2, 3, 4\), expected 4 axes: pass"),
        ({"q": torch.ones(2, 3, 3, 4)}, r"3 query heads on 2 kv heads: pass q"),
        ({"k": torch.ones(2, 2, 3, 5)}, r"k has shape .* must be equal"),
        ({"v": torch.ones(2, 2, 4, 4)}, r"v has shape .* must be equal"),
        ({"window": 0}, r"window=0 must be at least 1: .* pass None"),
        ({"window": 2, "causal": False}, r"window=2 needs causal=True"),
        ({"softcap": 0.0}, r"softcap=0.0 must be positive: pass None"),
        ({"sinks": torch.ones(3)}, r"sinks has shape \(3,\), expected \(2,\): pass"),
        ({"kv_lens": [1]}, r"kv_lens has 1 counts, expected 2: pass one per request"),
        ({"kv_lens": [1, 4]}, r"kv_lens\[1\]=4 must be in 0..3"),
        ({"q_lens": [-1, 1]}, r"q_lens\[0\]=-1 must be in 0..3"),
        ({"side": "top"}, r"side='top' must be 'right' or 'left'"),
        ({"path": "fast"}, r"path='fast' must be"),
        ({"path": "fused", "return_lse": True}, r"path='fused' has no softcap.*pass"),
    ],
)
def test_bad_input_names_value_expectation_and_remedy(
    runtime: str, changed: dict[str, Any], words: str
) -> None:
    inputs: dict[str, Any] = {"q": ONES, "k": ONES, "v": ONES} | changed
    with pytest.raises(ValueError, match=words):
        attend(runtime, **inputs)


@each_runtime
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 0}, r"n=0 must be at least 1"),
        ({"n": 1, "offset": -1}, r"offset=-1 must be at least 0"),
        ({"n": 1, "window": 0}, r"window=0 must be at least 1"),
        ({"n": 1, "left_padding": [2]}, r"left_padding\[0\]=2 must be in 0..1"),
        (
            {"n": 1, "left_padding": [0], "right_padding": [0, 1]},
            r"right_padding has 2 counts, expected 1",
        ),
    ],
)
def test_bad_mask_names_value_and_expectation(
    runtime: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        MASK[runtime].banded_mask(**options)


@each_runtime
def test_caches_must_be_one_per_request(runtime: str) -> None:
    cache = torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match=r"1 key and 2 value caches for 2 queries: pass one"):
        call(runtime, "ragged_decode", ONES, [cache], [cache, cache])
