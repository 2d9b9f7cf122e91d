"""Batched matrix products: every subject against the reference, on every lane."""

import os
from contextlib import nullcontext

import pytest
import torch

from cases.bmm import BmmCase
from harness.engines.torch import bmm as adapter


def test_agrees_with_reference(cell, campaign):
    campaign.judge(cell)


# The proof that oneDNN ran its AMX kernels; the lane itself is rarely there.


@pytest.fixture
def prove():
    adapter._prove_amx.cache_clear()
    yield adapter._prove_amx
    adapter._prove_amx.cache_clear()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_onednn_must_name_amx(prove, monkeypatch, dtype):
    said = ["onednn_verbose,primitive,exec,cpu,matmul,brg_matmul:avx10_1_512_amx,undef,"]
    monkeypatch.setattr(adapter, "_onednn_says", lambda: nullcontext(said))
    prove(dtype)


@pytest.mark.parametrize(
    ("kernel", "raises"),
    [("brg_matmul:avx10_1_512_amx", nullcontext()), ("gemm:jit:bf16", pytest.raises(RuntimeError))],
)
def test_an_int8_gemm_without_a_name_is_as_good_as_the_named_kernel(
    prove, monkeypatch, kernel, raises
):
    lines = iter(
        [
            ["onednn_verbose,v1,primitive,exec,cpu,gemm_api,,undef,src_s8::blocked:ab:f0 "],
            [f"onednn_verbose,v1,primitive,exec,cpu,matmul,{kernel},undef,src:bf16"],
        ]
    )
    monkeypatch.setattr(adapter, "_onednn_says", lambda: nullcontext(next(lines)))
    with raises:
        prove("int8")


def test_a_silent_onednn_is_no_proof(prove, monkeypatch):
    monkeypatch.setattr(adapter, "_onednn_says", lambda: nullcontext([]))
    with pytest.raises(RuntimeError, match=r"does not use AMX for bfloat16: it did not run; unset"):
        prove("bfloat16")


def test_what_onednn_writes_is_read_and_standard_output_comes_back(capfd):
    before = torch.backends.mkldnn.enabled
    with adapter._onednn_says() as said:
        os.write(1, b"onednn_verbose,exec\n")
    os.write(1, b"after\n")
    assert "onednn_verbose,exec\n" in said
    assert capfd.readouterr().out.endswith("after\n")
    assert torch.backends.mkldnn.enabled == before


def test_onednn_is_off_during_the_call_alone():
    seen = []

    def run(case, tensors):
        seen.append(torch.backends.mkldnn.enabled)
        raise LookupError

    case = BmmCase(dtype="float32", seed=0, values="normal", batch=1, m=1, n=1, k=1)
    with pytest.raises(LookupError):
        adapter._without_onednn(run)(case, {})
    assert seen == [False]
    assert torch.backends.mkldnn.enabled
