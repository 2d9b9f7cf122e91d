"""Our latent attention kernels used by themselves, as a server would."""

import pytest
import torch

from harness.engines.native.torch import mla

L, R, H = 8, 4, 3


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_split_weights_takes_a_checkpoints_rows_head_by_head() -> None:
    kv_b = torch.arange(2 * (3 + 2) * 4.0).reshape(-1, 4)
    w_uk, w_uv = mla.split_weights(kv_b, heads=2, nope_dim=3)
    assert w_uk.shape == (2, 3, 4)
    assert w_uv.shape == (2, 4, 2)
    assert w_uk[1, 0].tolist() == kv_b[5].tolist()
    assert w_uv[1, :, 1].tolist() == kv_b[9].tolist()


@pytest.mark.parametrize("slots", [[-1, 5, -1], [-1, -1, -1], [2, 0, 4]])
def test_write_leaves_everything_else(slots: list[int]) -> None:
    cache = torch.full((3, 2, L + R), torch.nan)
    latent, k_pe = normal(3, L), normal(3, R)
    mla.write_cache(cache, latent, k_pe, torch.tensor(slots))
    rows = cache.flatten(0, 1)
    for token, slot in enumerate(slots):
        if slot >= 0:
            assert torch.equal(rows[slot], torch.cat([latent[token], k_pe[token]]))
    assert int(rows.isnan().all(-1).sum()) == 6 - sum(slot >= 0 for slot in slots)


def test_write_goes_into_a_view_of_a_larger_pool() -> None:
    pool = torch.zeros(3, 2, 2 * (L + R))
    mla.write_cache(pool[..., L + R :], normal(1, L), normal(1, R), torch.tensor([3]))
    assert not pool[..., : L + R].any()
    assert pool[1, 1, L + R :].all()


def test_a_request_without_rows_is_zero() -> None:
    cache = torch.full((2, 2, L + R), torch.nan)
    out, lse = mla.decode(
        normal(1, H, L), normal(1, H, R), cache, torch.tensor([[1]]), torch.tensor([0]), scale=1.0
    )
    assert not out.any()
    assert bool((lse == -torch.inf).all())


def test_an_empty_part_counts_nothing_whatever_it_holds() -> None:
    full = torch.tensor([1.0, 2.0])
    out, lse = mla.merge(
        [torch.full_like(full, torch.nan), full], [torch.tensor(-torch.inf), torch.tensor(0.5)]
    )
    assert out.tolist() == [1.0, 2.0]
    assert lse == 0.5
    out, lse = mla.merge([full, full], [torch.tensor(-torch.inf)] * 2)
    assert out.tolist() == [0.0, 0.0]
    assert lse == -torch.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: mla.write_cache(c, normal(1, L), normal(1, L), torch.tensor([0])), "columns"),
        (lambda c: mla.write_cache(c, normal(1, L), normal(1, R), torch.tensor([0, 1])), "slots"),
        (
            lambda c: mla.extend(
                normal(2, H, L), normal(2, H, R), c, torch.tensor([[0]]), [2], [1], scale=1.0
            ),
            "write the new",
        ),
        (
            lambda c: mla.decode(
                normal(1, H, L), normal(1, H, R), c, torch.tensor([[0]]), torch.tensor([1]),
                scale=1.0, splits=0,
            ),
            "splits=0",
        ),
        (
            lambda c: mla.decode(
                normal(1, H, L), normal(1, H, L), c, torch.tensor([[0]]), torch.tensor([1]),
                scale=1.0,
            ),
            "latent and then the rotated",
        ),
        (lambda c: mla.merge([], []), "one of each"),
        (lambda c: mla.split_weights(c[0], heads=3, nope_dim=9), "expected"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 2, L + R))
