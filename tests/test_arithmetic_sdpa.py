"""Programs of attention kernels: real kernels lie within them, the ideal within the envelope."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cases.sdpa import SdpaCase
from harness.arithmetic.midrad import MidRad
from harness.arithmetic.mode import DET, PROB, Mode
from harness.arithmetic.verdict import exact_share, excess
from harness.programs.sdpa import (
    HF_EAGER,
    HF_EAGER_SINKS,
    MLX,
    TORCH_FLASH,
    TORCH_MATH,
    SdpaArithmetic,
    by_request,
    envelope,
    program,
    torch_flash,
)

SPECS = {
    "torch_math": TORCH_MATH,
    "torch_flash": TORCH_FLASH,
    "mlx": MLX,
    "hf_eager": HF_EAGER,
    "hf_eager_sinks": HF_EAGER_SINKS,
}
DTYPES = ["float32", "bfloat16", "float16"]
PLAIN: dict[str, Any] = {
    "dtype": "float32",
    "seed": 3,
    "values": "normal",
    "batch": 2,
    "q_len": 5,
    "kv_len": 21,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "lse": True},
    "dead_rows": {"causal": True, "q_len": 9, "kv_len": 4, "lse": True},
    "window": {"causal": True, "window": 3},
    "sinks": {"causal": True, "sinks": 1.0, "q_len": 9, "kv_len": 4, "lse": True},
    "softcap": {"softcap": 5.0, "scale": 0.7},
    "alibi": {"alibi": 8.0, "causal": True, "softcap": 5.0, "sinks": 1.0, "heads": 12, "lse": True},
    "alibi_padded": {"alibi": 4.0, "kv_lens": (3, 20), "side": "left", "lse": True},
    "padded": {"kv_lens": (3, 0), "q_lens": (3, 2), "lse": True},
    "loud": {"values": "loud", "causal": True, "lse": True},
    "blocks": {"kv_len": 1100, "q_len": 2},
    "mqa": {"kv_heads": 1},
}


def _case(dtype: str, name: str, **more: Any) -> SdpaCase:
    return SdpaCase(**{**PLAIN, **CASES[name], **more, "dtype": dtype})


def _within(a: Tensor, b: MidRad) -> bool:
    """Every element of `a` in `b`; equal infinities are."""
    return bool(((a == b.mid) | ((a - b.mid).abs() <= b.rad)).all())


@pytest.mark.parametrize("mode", [PROB, DET], ids=lambda m: m.kind)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_envelopes_midpoint_and_programs_lie_within(
    name: str, dtype: str, mode: Mode
) -> None:
    case = _case(dtype, name)
    inputs = case.inputs()
    expected = case.expected(inputs)
    wide = envelope(case, inputs, mode)
    assert set(wide) == set(expected)
    for key, want in expected.items():
        assert wide[key].shape == want.shape
        # Nothing is replayed in the envelope: its midpoint is float64 softmax and products.
        size = want[want.isfinite()].abs().max() + 1
        close = (want == wide[key].mid) | ((want - wide[key].mid).abs() <= 1e-12 * size)
        assert bool(close.all())
    for spec in SPECS.values():
        got = program(spec)(case, inputs, mode)
        for key in expected:
            assert not bool((got[key].mid.isnan() | got[key].rad.isnan()).any())
            assert bool(got[key].rad.isfinite().all())
            assert _within(got[key].mid, wide[key])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_prob_is_never_wider_than_det(spec: SdpaArithmetic, dtype: str) -> None:
    for name in ("causal", "sinks", "softcap", "loud", "alibi"):
        case = _case(dtype, name)
        prob, det = (program(spec)(case, case.inputs(), mode) for mode in (PROB, DET))
        for key, narrow in prob.items():
            # Where both are only float64 noise they differ in its last bits.
            assert bool((narrow.rad <= det[key].rad * (1 + 2.0**-20)).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_in_hidden_slots_changes_nothing(dtype: str) -> None:
    case = _case(dtype, "padded")
    inputs = case.inputs()
    hidden = ~inputs["visible"].any(-2).unsqueeze(-1)
    for poison in (0.0, torch.finfo(getattr(torch, dtype)).max, float("nan"), float("inf")):
        dirty = {**inputs, **{x: inputs[x].masked_fill(hidden, poison) for x in "kv"}}
        for run in (envelope, *(program(spec) for spec in SPECS.values())):
            clean, got = run(case, inputs, PROB), run(case, dirty, PROB)
            for key in clean:
                assert torch.equal(clean[key].mid, got[key].mid)
                assert torch.equal(clean[key].rad, got[key].rad)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_rows_are_judged_alone(spec: SdpaArithmetic) -> None:
    case = _case("bfloat16", "causal")
    inputs = case.inputs()
    one = replace(case, q_len=1)
    whole = program(spec)(case, inputs, DET)["out"]
    alone = program(spec)(
        one, {**inputs, "q": inputs["q"][:, :, 2:3], "visible": inputs["visible"][:, :, 2:3]}, DET
    )["out"]
    # The same numbers, up to the order in which float64 adds them.
    assert bool(((whole.mid[:, :, 2:3] - alone.mid).abs() <= 1e-14).all())
    assert bool(((whole.rad[:, :, 2:3] - alone.rad).abs() <= 1e-12).all())


def _torch(case: SdpaCase, inputs: dict[str, Tensor], backend: SDPBackend) -> Tensor:
    q, k, v = (inputs[x].contiguous() for x in "qkv")
    group = case.heads // case.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=inputs["visible"], scale=case.softmax_scale
        )


@pytest.mark.parametrize("mode", [PROB, DET], ids=lambda m: m.kind)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_torch_kernels_are_covered(backend: SDPBackend, dtype: str, mode: Mode) -> None:
    spec = TORCH_MATH if backend == SDPBackend.MATH else TORCH_FLASH
    for name in ("plain", "causal", "window", "dead_rows", "loud", "blocks", "mqa"):
        case = _case(dtype, name)
        inputs = case.inputs()
        out = _torch(case, inputs, backend)
        got = program(spec)(case, inputs, mode)["out"]
        assert bool((excess(out, got) <= 1).all()), f"{name}: {float(excess(out, got).max())}"
        assert bool((excess(out, envelope(case, inputs, mode)["out"]) <= 1).all())
        # The radius is small: a scale off by 1 % is outside.
        wrong = _torch(replace(case, scale=case.softmax_scale * 1.01), inputs, backend)
        assert bool((excess(wrong, got) > 1).any())


def _biased(case: SdpaCase, inputs: dict[str, Tensor], origin: str, fmt: torch.dtype) -> Tensor:
    """Plain attention with the bias from the query, the first key or the last, stored in `fmt`."""
    group = case.heads // case.kv_heads
    k, v = (inputs[x].repeat_interleave(group, 1) for x in "kv")
    away = inputs["distance"]
    if origin != "query":
        away = -torch.arange(case.kv_len)[None] + (case.kv_len - 1 if origin == "last" else 0)
    bias = (-inputs["alibi"][:, None, None] * away).to(fmt)
    scores = (inputs["q"].float() @ k.float().mT) * case.softmax_scale
    scores = (scores.to(fmt) + bias).float().masked_fill(~inputs["visible"], -torch.inf)
    return (torch.softmax(scores, -1) @ v.float()).to(inputs["q"].dtype)


FAR: dict[str, Any] = {"alibi": 8.0, "causal": True, "kv_len": 1000, "q_len": 2, "heads": 16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("origin", ["query", "first", "last"])
def test_the_envelope_lets_alibi_count_from_anywhere(origin: str, dtype: str) -> None:
    """With the bias in float32, whatever the dtype; that of the distance may be stored in it."""
    for seed in range(3):
        case = _case(dtype, "plain", **FAR, seed=seed)
        inputs = case.inputs()
        wide = envelope(case, inputs, DET)["out"]
        assert bool((excess(_biased(case, inputs, origin, torch.float32), wide) <= 1).all())
        own = getattr(torch, dtype)
        stored = excess(_biased(case, inputs, origin, own), wide)
        if origin == "query" or dtype == "float32":
            assert bool((stored <= 1).all())
        if origin == "first" and dtype != "float32":
            assert bool((stored > 1).any())


def test_the_flash_program_replays_the_kernel_bit_for_bit() -> None:
    case = _case("bfloat16", "plain", kv_len=130, q_len=16, head_dim=64, kv_heads=4)
    inputs = case.inputs()
    out = _torch(case, inputs, SDPBackend.FLASH_ATTENTION)
    shares = {
        name: exact_share(out, program(spec)(case, inputs, DET)["out"])
        for name, spec in SPECS.items()
    }
    assert max(shares, key=lambda name: shares[name]) == "torch_flash"
    assert shares["torch_flash"] > 0.99


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_kernel_called_for_each_request_has_its_tail_at_the_end_of_each(side: str) -> None:
    """31 of 33 keys: three vectors of 8 and a tail of 7, where the padded row ends in one of 1."""
    case = _case("float16", "plain", q_len=1, kv_len=33, kv_lens=(33, 31), side=side, heads=2)
    inputs = case.inputs()
    out = torch.cat(
        [
            F.scaled_dot_product_attention(
                *(inputs[x][b, None, :, at].contiguous() for x, at in (("q", ...), *keys)),
                attn_mask=inputs["visible"][b, None, :, :, keys[0][1]],
            )
            for b, (first, n) in enumerate(zip(case.first_keys, (33, 31), strict=True))
            for keys in [[(x, slice(first, first + n)) for x in "kv"]]
        ]
    )
    whole = program(torch_flash())
    assert bool((excess(out, by_request(whole)(case, inputs, DET)["out"]) <= 1).all())
    assert bool((excess(out, whole(case, inputs, DET)["out"]) > 1).any())
