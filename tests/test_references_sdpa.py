"""The reference attention: equal to transformers' eager attention, and to its own docstring."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from references.banded_mask import banded_mask
from references.hf import sdpa as witness
from references.sdpa import alibi_slopes, distances, sdpa, visible_keys

UNIT = 2.0**-53


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One attention with a mask in which rows may be dead; `loud` puts the scores far apart."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor
    distance: Tensor
    scale: float | None
    loud: float

    @property
    def reach(self) -> Tensor:
        """`max over visible j of |scale| * sum_d |q_d k_d|`, `[B, H, Lq]`: bounds the scores."""
        scale = self.q.shape[-1] ** -0.5 if self.scale is None else abs(self.scale)
        k = self.k.repeat_interleave(self.q.shape[1] // self.k.shape[1], dim=1)
        sizes = scale * (self.q.abs() @ k.abs().mT)
        return sizes.masked_fill(~self.visible, 0.0).amax(dim=-1)

    def bound(self, sinks: Tensor | None = None, softcap: float | None = None) -> Tensor:
        """How far two float64 evaluations of `out` may be apart, `[B, H, Lq, Dv]`.

        With u = 2^-53, D the head size, n = Lk + 1 the number of keys with the sink, A = reach (or
        the sink, if that is larger), to first order in u, in whatever order each sum is taken:

            score    D products and D-1 additions, the scale and its own rounding: (D+2) u A;
                     a softcap has a slope of at most 1 and adds a division, a tanh (3 u taken)
                     and a product of something no larger: (D+8) u A in all
            weight   exp(s - m): the difference is rounded, 2 u A, the exp adds 2 u: relative to
                     itself, w moves by e = (D+10) u A + 2 u
            out      sum w v / sum w: twice e, n u for either sum and its products, u for the
            division:
                     (2 e + (2 n + 3) u) * sum p |v|

        and both sides may err that much. What a weight loses to underflow is below 2^-1070 of the
        largest weight. Higher orders fit in the 1 that rounds 2*2 u + (2n+3) u up to (2n+8) u, as
        long as A (D + n) < 2^20.
        """
        n, head_dim = self.k.shape[2] + 1, self.q.shape[-1]
        size = self.reach if sinks is None else torch.maximum(self.reach, sinks.abs()[:, None])
        relative = 2 * UNIT * (2 * (head_dim + 10) * size + 2 * n + 8)
        v = self.v.abs()
        options: dict[str, Any] = {"scale": self.scale, "softcap": softcap, "sinks": sinks}
        weighed, _ = sdpa(self.q, self.k, v, visible=self.visible, **options)
        return relative[..., None] * weighed + 2.0**-1070 * v.sum()


@st.composite
def attention(draw: st.DrawFn) -> Drawn:
    batch, kv_heads, group = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    q_len, kv_len = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    head_dim, v_dim = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = st.lists(st.integers(0, 12), min_size=batch, max_size=batch)
    counts: Any = (
        [min(q_len, n) for n in draw(lengths)],
        [min(kv_len, n) for n in draw(lengths)],
        q_len,
        kv_len,
    )
    causal, side = draw(st.booleans()), draw(st.sampled_from(["right", "left"]))
    visible = visible_keys(*counts, causal=causal, side=side)
    loud = draw(st.sampled_from([0.0, 1.0, 8.0, 100.0]))
    return Drawn(
        q=loud * normal(batch, kv_heads * group, q_len, head_dim),
        k=normal(batch, kv_heads, kv_len, head_dim),
        v=normal(batch, kv_heads, kv_len, v_dim),
        visible=visible[:, None],
        distance=distances(*counts, side=side)[:, None],
        scale=draw(st.sampled_from([None, 0.5, 1.4852])),
        loud=loud,
    )


def sinks_for(case: Drawn) -> Tensor:
    return torch.linspace(-1.0, 1.0 + case.loud, case.q.shape[1], dtype=torch.float64)


def dead(case: Drawn) -> Tensor:
    """Rows that see no key, `[B, 1, Lq]`."""
    return ~case.visible.any(dim=-1)


@pytest.mark.parametrize(
    ("model", "feature"),
    [("llama", ""), ("gemma2", ""), ("gpt_oss", ""), ("gemma2", "softcap"), ("gpt_oss", "sinks")],
)
@given(attention())
def test_agrees_with_transformers(model: str, feature: str, case: Drawn) -> None:
    softcap = 2.5 if feature == "softcap" else None
    sinks = sinks_for(case) if feature == "sinks" else None
    options = {"visible": case.visible, "scale": case.scale, "softcap": softcap, "sinks": sinks}
    out, lse = sdpa(case.q, case.k, case.v, **options)
    theirs, weights = witness.sdpa(case.q, case.k, case.v, model=model, **options)

    # A dead row means something else in transformers (see the witness), unless there is a sink.
    compared = torch.ones_like(dead(case)) if feature == "sinks" else ~dead(case)
    excess = (out - theirs).abs() - case.bound(sinks, softcap)
    assert excess.masked_fill(~compared[..., None], 0.0).max() <= 0

    # exp(score - lse) is the weight: equal up to the error of a score, of the lse and of
    # the weight, each at most e + n u of the weight itself (`Drawn.bound`): three times that.
    k = case.k.repeat_interleave(case.q.shape[1] // case.k.shape[1], dim=1)
    scores = (case.q.shape[-1] ** -0.5 if case.scale is None else case.scale) * (case.q @ k.mT)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    size = case.reach if sinks is None else torch.maximum(case.reach, sinks.abs()[:, None])
    relative = 3 * UNIT * ((case.q.shape[-1] + 12) * size + case.k.shape[2] + 8)[..., None]
    apart = (torch.exp(scores - lse[..., None]) - weights).abs() - relative * weights - 2.0**-1070
    shown = case.visible & compared[..., None]
    assert apart.masked_fill(~shown, 0.0).max() <= 0


@pytest.mark.parametrize("model", ["bloom", "mpt"])
@given(attention(), st.sampled_from([8.0, 4.0, 0.5]))
def test_alibi_agrees_with_transformers(model: str, case: Drawn, bias_max: float) -> None:
    """The same weights, by a bias that is a constant of the row away.

    The product and the sum round once each, at a size of |s| + a, a = slope * span of positions:
    2 u (|s| + a) in a score, twice that and n u in a weight, on both sides. `Drawn.bound` at a
    `reach` that is a larger has room for D + 10 of these where 2 are needed.
    """
    slopes = alibi_slopes(case.q.shape[1], bias_max)
    out, lse = sdpa(
        case.q, case.k, case.v, visible=case.visible, scale=case.scale, alibi=slopes,
        distance=case.distance,
    )  # fmt: skip
    positions = case.distance[:, 0, 0, :1] - case.distance[:, 0, 0]
    theirs, weights = witness.alibi(
        case.q, case.k, case.v, visible=case.visible, scale=case.scale, slopes=slopes,
        positions=positions, model=model,
    )  # fmt: skip
    span = float(case.distance.abs().max()) + case.k.shape[2]
    size = case.reach + slopes[:, None] * span
    relative = 2 * UNIT * (2 * (case.q.shape[-1] + 10) * size + 2 * case.k.shape[2] + 10)
    v = case.v.abs()
    weighed, _ = sdpa(
        case.q, case.k, v, visible=case.visible, scale=case.scale, alibi=slopes,
        distance=case.distance,
    )  # fmt: skip
    allowed = relative[..., None] * weighed + 2.0**-1070 * v.sum()
    apart = (out - theirs).abs() - allowed
    assert apart.masked_fill(dead(case)[..., None], 0.0).max() <= 0

    k = case.k.repeat_interleave(case.q.shape[1] // case.k.shape[1], dim=1)
    scores = (case.q.shape[-1] ** -0.5 if case.scale is None else case.scale) * (case.q @ k.mT)
    scores = scores - slopes[:, None, None] * case.distance
    off = (torch.exp(scores - lse[..., None]) - weights).abs() - 2.0**-1070
    off = off - 1.5 * relative[..., None] * weights
    assert off.masked_fill(~case.visible | dead(case)[..., None], 0.0).max() <= 0


@pytest.mark.parametrize("model", ["bloom", "falcon", "mpt"])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 8, 12, 15, 16, 24, 32, 40, 71, 112, 128])
def test_alibi_slopes_agree_with_transformers(model: str, heads: int) -> None:
    """BLOOM raises a rounded base to the power i <= 2 n in float32: (i + 2) u, u = 2^-24, and so
    does Falcon, but for the bfloat16 that it takes then; MPT rounds an exponent of at most 8: 8 u.
    """
    theirs, ours = witness.alibi_slopes(heads, model).double(), alibi_slopes(heads)
    units = 2.0**-8 if model == "falcon" else (2 * heads + 2) * 2.0**-24
    assert ((theirs - ours).abs() <= units * ours).all()


def test_alibi_bias_max_is_that_of_mpt() -> None:
    for heads in (4, 6):
        theirs = witness.alibi_slopes(heads, "mpt", 4.0).double()
        assert ((theirs - alibi_slopes(heads, 4.0)).abs() <= 2.0**-20 * theirs).all()


def test_alibi_slopes_are_the_published_ones() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(6).tolist() == [2.0**-i for i in (2, 4, 6, 8, 1, 3)]
    assert alibi_slopes(1).tolist() == [2.0**-8]
    with pytest.raises(ValueError, match="heads=0 must be at least 1"):
        alibi_slopes(0)


def test_alibi_slopes_round_to_the_same_float32_on_every_machine() -> None:
    """A libm may be off by an ulp or two of float64; none of the slopes is that near to a tie."""
    for heads in range(1, 129):
        for bias_max in (8.0, 4.0):
            slopes = alibi_slopes(heads, bias_max)
            for moved in (slopes * (1 - 2.0**-51), slopes * (1 + 2.0**-51)):
                assert torch.equal(moved.float(), slopes.float())


def test_alibi_comes_after_scale_and_softcap_and_spares_the_sink() -> None:
    q, k = torch.full((1, 2, 1, 1), 6.0), torch.ones(1, 1, 2, 1)
    v = torch.tensor([[[[1.0], [0.0]]]])
    slopes, sinks = torch.tensor([0.5, 0.25]), torch.tensor([9.0, 9.0])
    out, lse = sdpa(q, k, v, scale=0.5, softcap=2.0, sinks=sinks, alibi=slopes)
    capped = 2.0 * math.tanh(6.0 * 0.5 / 2.0)
    for head, slope in enumerate(slopes.tolist()):
        total = math.exp(capped - slope) + math.exp(capped) + math.exp(9.0)
        assert abs(out[0, head].item() - math.exp(capped - slope) / total) <= 64 * UNIT
        assert abs(lse[0, head].item() - math.log(total)) <= 64 * UNIT * 10


@given(attention(), st.integers(-9, 9))
def test_another_origin_moves_the_lse_alone(case: Drawn, moved: int) -> None:
    slopes = alibi_slopes(case.q.shape[1])
    options: dict[str, Any] = {"visible": case.visible, "scale": case.scale, "alibi": slopes}
    out, lse = sdpa(case.q, case.k, case.v, distance=case.distance, **options)
    other, shifted = sdpa(case.q, case.k, case.v, distance=case.distance + moved, **options)
    size = (case.reach + slopes[:, None] * (case.distance.abs().max() + 10))[..., None]
    units = UNIT * (8 * (case.q.shape[-1] + 10) * size + 8 * case.k.shape[2] + 40)
    assert ((out - other).abs() <= units * (1 + case.v.abs().max())).all()
    apart = (lse - slopes[:, None] * moved - shifted).nan_to_num()
    assert (apart.abs() <= units[..., 0]).all()


@pytest.mark.parametrize("side", ["right", "left"])
def test_distances_are_counted_within_the_request(side: str) -> None:
    options: dict[str, Any] = {"side": side}
    apart = distances([2, 3], [3, 5], 3, 5, **options)
    seen = visible_keys([2, 3], [3, 5], 3, 5, causal=True, **options)
    assert apart[1].tolist() == [[2, 1, 0, -1, -2], [3, 2, 1, 0, -1], [4, 3, 2, 1, 0]]
    kept = (slice(0, 2), slice(0, 3)) if side == "right" else (slice(1, 3), slice(2, 5))
    assert apart[0][kept].tolist() == [[1, 0, -1], [2, 1, 0]]
    assert (apart[seen] >= 0).all()


def test_transformers_gives_a_dead_row_the_mean_of_v() -> None:
    v = torch.tensor([1.0, 2.0, 9.0, 4.0])[:, None].expand(1, 1, 4, 1)
    q, k = torch.ones(1, 1, 1, 2), torch.ones(1, 1, 4, 2)
    hidden = torch.zeros(1, 4, dtype=torch.bool)
    for model in ("llama", "gemma2", "gpt_oss"):
        theirs, _ = witness.sdpa(q, k, v, visible=hidden, model=model)
        assert theirs.item() == 4.0
    ours, lse = sdpa(q, k, v, visible=hidden)
    assert ours.item() == 0.0
    assert lse.item() == -math.inf
    theirs, _ = witness.sdpa(q, k, v, visible=hidden, sinks=torch.zeros(1))
    assert theirs.item() == 0.0


def test_transformers_lets_a_hidden_nan_through() -> None:
    q, k, v = torch.ones(1, 1, 1, 2), torch.ones(1, 1, 2, 2), torch.tensor([[[[1.0], [math.nan]]]])
    first = torch.tensor([[True, False]])
    assert witness.sdpa(q, k, v, visible=first)[0].isnan().all()
    assert sdpa(q, k, v, visible=first)[0].item() == 1.0
    huge = torch.tensor([[[[1.0], [2.0**127]]]])
    assert witness.sdpa(q, k, huge, visible=first)[0].item() == 1.0


@given(attention(), st.sampled_from([math.nan, math.inf, -math.inf, 3e38]))
def test_hidden_slots_never_matter(case: Drawn, poison: float) -> None:
    shown = case.visible.any(dim=-2)[:, 0]
    k, v = case.k.clone(), case.v.clone()
    for b in range(len(shown)):
        k[b, :, ~shown[b]] = poison
        v[b, :, ~shown[b]] = poison
    clean = sdpa(case.q, case.k, case.v, visible=case.visible)
    poisoned = sdpa(case.q, k, v, visible=case.visible)
    # Setting hidden keys apart changes the order of the sum, hence one bound and not bit equality.
    assert ((clean[0] - poisoned[0]).abs() - case.bound()).max() <= 0
    assert torch.equal(clean[1], poisoned[1])


def test_key_hidden_from_one_row_reaches_the_other() -> None:
    q, k = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    v = torch.tensor([[[[1.0], [math.nan]]]])
    out, _ = sdpa(q, k, v, visible=banded_mask(2))
    assert out[0, 0, 0].item() == 1.0
    assert out[0, 0, 1].isnan().all()


@given(attention())
def test_order_of_keys_does_not_matter(case: Drawn) -> None:
    order = torch.randperm(case.k.shape[2], generator=torch.Generator().manual_seed(1))
    out, _ = sdpa(case.q, case.k, case.v, visible=case.visible, scale=case.scale)
    other, _ = sdpa(
        case.q,
        case.k[:, :, order],
        case.v[:, :, order],
        visible=case.visible[..., order],
        scale=case.scale,
    )
    assert ((out - other).abs() - case.bound()).max() <= 0


@given(attention(), st.data())
def test_parts_merge_by_lse(case: Drawn, data) -> None:
    """Attention over two parts of the keys, weighed by exp(lse), is attention over all keys.

    The lse of a part errs by e + n u and its own rounding, u A + u ln n: within three times the
    bound, the weights of the merge included. The sink counts in one part only.
    """
    cut = data.draw(st.integers(0, case.k.shape[2]))
    sinks = sinks_for(case)
    whole, whole_lse = sdpa(
        case.q, case.k, case.v, visible=case.visible, scale=case.scale, sinks=sinks
    )
    parts = [
        sdpa(
            case.q,
            case.k[:, :, part],
            case.v[:, :, part],
            visible=case.visible[..., part],
            scale=case.scale,
            sinks=sinks if part.start is None else None,
        )
        for part in (slice(None, cut), slice(cut, None))
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(torch.exp(part_lse - lse)[..., None] * out for out, part_lse in parts)
    assert ((whole - merged).abs() - 4 * case.bound(sinks)).max() <= 0
    size = torch.maximum(case.reach, sinks.abs()[:, None])
    lse_bound = 4 * UNIT * ((case.q.shape[-1] + 12) * size + case.k.shape[2] + 8)
    assert ((whole_lse - lse).abs() - lse_bound).max() <= 0


@given(attention())
def test_sink_is_a_key_with_value_zero(case: Drawn) -> None:
    """One more axis of D, 1 in each query and the sink in one more key, gives the sink as logit."""
    heads = case.q.shape[1]
    k = case.k.repeat_interleave(heads // case.k.shape[1], dim=1)
    v = case.v.repeat_interleave(heads // case.v.shape[1], dim=1)
    scale = 0.5
    sinks = sinks_for(case)
    q = torch.cat([case.q, torch.ones_like(case.q[..., :1])], dim=-1)
    k = torch.cat([k, torch.zeros_like(k[..., :1])], dim=-1)
    sink_key = torch.zeros_like(k[:, :, :1])
    sink_key[..., -1] = (sinks / scale)[:, None]
    as_key, lse_as_key = sdpa(
        q,
        torch.cat([k, sink_key], dim=2),
        torch.cat([v, torch.zeros_like(v[:, :, :1])], dim=2),
        visible=torch.cat([case.visible, torch.ones_like(case.visible[..., :1])], dim=-1),
        scale=scale,
    )
    options = {"visible": case.visible, "scale": scale, "sinks": sinks}
    out, lse = sdpa(case.q, case.k, case.v, **options)
    halved = replace(case, scale=scale)
    assert ((out - as_key).abs() - halved.bound(sinks)).max() <= 0
    size = torch.maximum(halved.reach, sinks.abs()[:, None])
    lse_bound = 4 * UNIT * ((case.q.shape[-1] + 12) * size + case.k.shape[2] + 8)
    assert ((lse - lse_as_key).abs() - lse_bound).max() <= 0


@given(attention())
def test_dead_rows_are_zero_and_their_lse_is_the_sink(case: Drawn) -> None:
    rows = dead(case).expand(case.q.shape[:3])
    out, lse = sdpa(case.q, case.k, case.v, visible=case.visible)
    assert (out[rows] == 0).all()
    assert (lse[rows] == -math.inf).all()
    assert lse[~rows].isfinite().all()
    sinks = sinks_for(case)
    out, lse = sdpa(case.q, case.k, case.v, visible=case.visible, sinks=sinks)
    assert (out[rows] == 0).all()
    assert torch.equal(lse[rows], sinks[:, None].expand_as(lse)[rows])


@given(attention())
def test_sink_of_minus_infinity_is_none(case: Drawn) -> None:
    none = sdpa(case.q, case.k, case.v, visible=case.visible)
    sinks = torch.full((case.q.shape[1],), -math.inf)
    minus_infinity = sdpa(case.q, case.k, case.v, visible=case.visible, sinks=sinks)
    assert all(torch.equal(a, b) for a, b in zip(none, minus_infinity, strict=True))


@pytest.mark.parametrize("keys", [1, 2, 8, 64])
def test_equal_scores_give_the_mean_exactly(keys: int) -> None:
    q, k = torch.zeros(1, 2, 1, 4), torch.randn(1, 1, keys, 4)
    v = torch.arange(keys * 3).reshape(1, 1, keys, 3)
    out, lse = sdpa(q, k, v.float())
    assert torch.equal(out, v.double().mean(dim=2, keepdim=True).expand_as(out))
    assert torch.equal(lse, torch.full((1, 2, 1), float(keys)).double().log())


def test_query_heads_share_kv_heads_in_blocks() -> None:
    v = torch.tensor([1.0, 2.0])[None, :, None, None]
    out, _ = sdpa(torch.zeros(1, 6, 1, 1), torch.zeros(1, 2, 1, 1), v)
    assert out.flatten().tolist() == [1, 1, 1, 2, 2, 2]


def test_softcap_comes_after_the_scale_and_spares_sink_and_mask() -> None:
    q, k = torch.full((1, 1, 1, 1), 6.0), torch.tensor([[[[1.0], [1.0], [-1e30]]]])
    v = torch.tensor([[[[1.0], [1.0], [1.0]]]])
    visible = torch.tensor([[True, True, False]])
    out, lse = sdpa(q, k, v, visible=visible, scale=0.5, softcap=2.0, sinks=torch.tensor([9.0]))
    capped = 2.0 * math.tanh(6.0 * 0.5 / 2.0)
    total = 2 * math.exp(capped) + math.exp(9.0)
    # A handful of operations on numbers below 10: 64 units is their sum of roundings, rounded up.
    assert abs(out.item() - 2 * math.exp(capped) / total) <= 64 * UNIT
    assert abs(lse.item() - math.log(total)) <= 64 * UNIT * 10


def test_no_keys_at_all() -> None:
    q, k, v = torch.ones(1, 2, 3, 4), torch.ones(1, 1, 0, 4), torch.ones(1, 1, 0, 5)
    out, lse = sdpa(q, k, v, sinks=torch.tensor([1.0, 2.0]))
    assert out.shape == (1, 2, 3, 5)
    assert (out == 0).all()
    assert lse[0, :, 0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_everything_is_float64(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 3, 4).to(dtype) for _ in range(3))
    out, lse = sdpa(q, k, v)
    assert out.dtype == lse.dtype == torch.float64
    exact, _ = sdpa(q.double(), k.double(), v.double())
    assert torch.equal(out, exact)


ONES = torch.ones(2, 2, 3, 4)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"q": torch.ones(2, 3, 4)}, r"q has shape \(2, 3, 4\), expected 4 axes.*pass"),
        ({"q": torch.ones(2, 3, 3, 4)}, r"3 query heads on 2 kv heads: pass a multiple"),
        ({"k": torch.ones(2, 2, 3, 5)}, r"k has shape .* batch and head_dim must be equal"),
        ({"v": torch.ones(2, 2, 4, 4)}, r"v has shape .* all but head_dim must be equal"),
        ({"visible": torch.ones(3, 3)}, r"dtype torch.float32, expected torch.bool"),
        ({"visible": torch.ones(2, 3, 3).bool()}, r"\(2, 3, 3\), expected .*mask\[:, None\]"),
        ({"softcap": 0.0}, r"softcap=0.0 must be positive: pass None"),
        ({"sinks": torch.ones(3)}, r"sinks has shape \(3,\), expected \(2,\)"),
        ({"alibi": torch.ones(3)}, r"alibi has shape \(3,\), expected \(2,\)"),
        ({"distance": torch.ones(3, 3)}, r"distance without alibi: pass the slopes"),
        (
            {"alibi": torch.ones(2), "distance": torch.ones(2, 3, 3)},
            r"distance has shape \(2, 3, 3\), expected .*distances\(\.\.\.\)\[:, None\]",
        ),
    ],
)
def test_bad_input_names_value_expectation_and_remedy(changed: dict, words: str) -> None:
    inputs: dict[str, Any] = {"q": ONES, "k": ONES, "v": ONES} | changed
    with pytest.raises(ValueError, match=words):
        sdpa(**inputs)
