"""The latent attention reference: equal to itself by every path, and to DeepSeek's own modules."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from references import mla as reference
from references.hf import mla as witness

QUICK = settings(max_examples=60, deadline=None, derandomize=True)
UNIT = 2.0**-53
PRECISE = 2 * UNIT * 2.0**8 * 2.0**8 * 2.0**4
"""Two float64 evaluations, each of sums of at most 2**8 products: their scores, below 2**8, differ
by 2 * UNIT * 2**8 * 2**8 at most, and so do the logarithms of the weights of values below 2**4."""


@dataclass
class Request:
    q_nope: Tensor
    q_pe: Tensor
    rows: Tensor
    w_uk: Tensor
    w_uv: Tensor
    scale: float
    mscale: float

    @property
    def latent(self) -> int:
        return self.w_uk.shape[-1]

    @property
    def tokens(self) -> int:
        return len(self.q_nope)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    heads, nope, latent, v_dim = (
        draw(st.sampled_from(sizes)) for sizes in ((1, 3, 4), (2, 8), (8, 16), (2, 8, 5))
    )
    rope = draw(st.sampled_from((2, 4)))
    tokens = draw(st.integers(1, 6))
    keys = tokens + draw(st.integers(0, 9))
    mscale = draw(st.sampled_from((1.0, 1.2608, 1.3689)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()  # float32 values

    return Request(
        q_nope=normal(tokens, heads, nope),
        q_pe=normal(tokens, heads, rope),
        rows=normal(keys, latent + rope),
        w_uk=normal(heads, nope, latent) / 2,
        w_uv=normal(heads, latent, v_dim) / 2,
        scale=mscale**2 / math.sqrt(nope + rope),
        mscale=mscale,
    )


def whole(r: Request, **more: Tensor) -> reference.Latent:
    """The request by the reference, its rows in one page."""
    return reference.mla(
        r.q_nope,
        r.q_pe,
        r.rows[None],
        torch.zeros(1, 1, dtype=torch.int32),
        r.w_uk,
        r.w_uv,
        q_lens=[r.tokens],
        kv_lens=[len(r.rows)],
        scale=r.scale,
        **more,  # pyright: ignore[reportArgumentType]
    )


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= PRECISE * (1 + b.abs())).all())


@QUICK
@given(requests())
def test_absorbed_is_materialised(r: Request) -> None:
    seen = reference.causal(r.tokens, len(r.rows))
    out, lse = reference.attend_materialised(
        r.q_nope, r.q_pe, r.rows, r.w_uk, r.w_uv, seen, r.scale
    )
    got = whole(r)
    assert close(got.out, out)
    assert close(got.lse, lse)


@settings(QUICK, max_examples=20)
@given(requests(), st.sampled_from(["v2", "v3"]), st.booleans())
def test_agrees_with_deepseek(r: Request, model: str, stepwise: bool) -> None:
    out = witness.mla(
        r.q_nope,
        r.q_pe,
        r.rows[:, : r.latent],
        r.rows[:, r.latent :],
        r.w_uk,
        r.w_uv,
        mscale=r.mscale,
        model=model,
        steps=(1,) * r.tokens if stepwise else None,
    )
    assert close(whole(r).out, out)


@QUICK
@given(requests(), st.data())
def test_stepwise_is_full(r: Request, data) -> None:
    """Each chunk is written, then attends; the cache is paged and its pages are out of order."""
    page = data.draw(st.sampled_from((1, 2, 4)))
    pages = -(-len(r.rows) // page)
    order = torch.tensor(data.draw(st.permutations(range(pages + 2))))[:pages]
    cache = torch.full((pages + 2, page, r.rows.shape[1]), torch.nan, dtype=torch.float64)
    position = torch.arange(len(r.rows))
    slots = order[position // page] * page + position % page
    before = len(r.rows) - r.tokens
    c, k_pe = r.rows[:, : r.latent], r.rows[:, r.latent :]
    cache = reference.write_cache(cache, c[:before], k_pe[:before], slots[:before])
    outs = []
    for i in range(r.tokens):
        new = slice(before + i, before + i + 1)
        cache = reference.write_cache(cache, c[new], k_pe[new], slots[new])
        step = reference.mla(
            r.q_nope[i : i + 1],
            r.q_pe[i : i + 1],
            cache,
            order[None],
            r.w_uk,
            r.w_uv,
            q_lens=[1],
            kv_lens=[before + i + 1],
            scale=r.scale,
        )
        outs.append(step.out)
    assert close(torch.cat(outs), whole(r).out)


@QUICK
@given(requests(), st.integers(1, 12))
def test_merged_splits_are_the_whole(r: Request, splits: int) -> None:
    keys = len(r.rows)
    seen = reference.causal(r.tokens, keys)
    q_latent = reference.absorb(r.q_nope, r.w_uk)
    part = torch.arange(keys) * splits // keys
    outs, lses = zip(
        *(
            reference.attend(q_latent, r.q_pe, r.rows, seen & (part == s), r.scale)
            for s in range(splits)
        ),
        strict=True,
    )
    out, lse = reference.merge(torch.stack(outs), torch.stack(lses))
    got = whole(r)
    assert close(out, got.o_latent)
    assert close(lse, got.lse)


def test_an_empty_part_counts_nothing_whatever_it_holds() -> None:
    outs = torch.stack([torch.tensor([2.0, 3.0]), torch.full((2,), torch.nan)]).double()
    out, lse = reference.merge(outs, torch.tensor([0.5, -torch.inf]))
    assert out.tolist() == [2.0, 3.0]
    assert lse == 0.5
    out, lse = reference.merge(outs, torch.full((2,), -torch.inf))
    assert out.tolist() == [0.0, 0.0]
    assert lse == -torch.inf


@QUICK
@given(requests())
def test_later_stages_start_from_what_is_given(r: Request) -> None:
    got = whole(r)
    other = whole(r, q_latent=got.q_latent * 2)
    assert torch.equal(other.q_latent, got.q_latent * 2)
    assert not close(other.lse, got.lse)
    fixed = whole(r, o_latent=torch.ones_like(got.o_latent))
    assert close(fixed.o_latent, got.o_latent)
    assert close(fixed.out, r.w_uv.sum(1).expand_as(fixed.out))


def test_write_keeps_everything_else() -> None:
    cache = torch.full((3, 2, 5), torch.nan, dtype=torch.bfloat16)
    latent, k_pe = torch.arange(9.0).reshape(3, 3), -torch.arange(6.0).reshape(3, 2)
    after = reference.write_cache(cache, latent, k_pe, torch.tensor([3, -1, 0]))
    assert after[1, 1].tolist() == [0, 1, 2, 0, -1]
    assert after[0, 0].tolist() == [6, 7, 8, -4, -5]
    assert int(after.isnan().all(-1).sum()) == 4
    assert cache.isnan().all()


def test_a_slot_named_twice_is_refused() -> None:
    row = torch.ones(2, 1)
    with pytest.raises(ValueError, match="twice"):
        reference.write_cache(torch.zeros(1, 2, 2), row, row, torch.tensor([1, 1]))


def test_tokens_that_are_not_in_the_cache_are_refused() -> None:
    q = torch.ones(2, 1, 1)
    w = torch.ones(1, 1, 1)
    with pytest.raises(ValueError, match="count the new"):
        reference.mla(
            q, q, torch.zeros(1, 2, 2), torch.zeros(1, 1).int(), w, w,
            q_lens=[2], kv_lens=[1], scale=1.0,
        )  # fmt: skip


def test_rows_that_nobody_names_do_not_matter() -> None:
    cache = torch.full((4, 2, 3), torch.nan)
    cache[2, 0], cache[2, 1], cache[1, 0] = torch.ones(3), 2 * torch.ones(3), torch.ones(3)
    q, w = torch.ones(2, 1, 1), torch.ones(1, 1, 2)
    got = reference.mla(
        q, q, cache, torch.tensor([[2, 1], [3, 3]]), w, w.mT,
        q_lens=[1, 0], kv_lens=[3, 0], scale=1.0,
    )  # fmt: skip
    assert got.out[0].isfinite().all()
    assert got.out[1].tolist() == [[0.0]]
