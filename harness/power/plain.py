"""Each op as a person writes it for comparison: plain PyTorch, every result in the case's dtype.

It stands for the second kernel that some rules ask for, as `attention_ref(upcast=False)` does in
flash-attention's tests. It is a correct kernel: the envelopes hold for it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cases.banded_mask import BandedMaskCase
from cases.bmm import BmmCase
from cases.case import Inputs
from cases.mla import MlaCase
from cases.sdpa import SdpaCase
from cases.yarn import YarnCase
from references.mla import gather_rows


def sdpa(case: SdpaCase, inputs: Inputs) -> dict[str, Tensor]:
    group = case.heads // case.kv_heads
    k, v = (inputs[name].repeat_interleave(group, 1) for name in ("k", "v"))
    scores = inputs["q"] @ k.mT * case.softmax_scale
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if case.alibi is not None:
        bias = inputs["alibi"][:, None, None] * inputs["distance"]
        scores = scores - bias.to(scores.dtype)
    scores = scores.masked_fill(~inputs["visible"], -torch.inf)
    if case.sinks is not None:
        sink = inputs["sinks"][None, :, None, None].expand(*scores.shape[:3], 1)
        scores, v = torch.cat([scores, sink], -1), F.pad(v, (0, 0, 0, 1))
    out = {"out": torch.softmax(scores, -1).nan_to_num() @ v}
    return out | ({"lse": scores.float().logsumexp(-1)} if case.lse else {})


def yarn(case: YarnCase, inputs: Inputs) -> dict[str, Tensor]:
    rope = case.rope
    table = case.table(inputs).float()

    def turned(name: str) -> Tensor:
        x = inputs[name]
        start, stop = rope.start, rope.start + rope.rotary_dim
        angles = (inputs[f"{name}_positions"].float()[..., None] * table[:, None])[:, None]
        cos, sin = ((f(angles) * rope.attention_factor).to(x.dtype) for f in (torch.cos, torch.sin))
        part = x[..., start:stop]
        a, b = (part[..., 0::2], part[..., 1::2]) if rope.interleaved else part.chunk(2, -1)
        pair = a * cos - b * sin, b * cos + a * sin
        part = torch.stack(pair, -1).flatten(-2) if rope.interleaved else torch.cat(pair, -1)
        return torch.cat((x[..., :start], part, x[..., stop:]), -1)

    q, k = turned("q"), turned("k")
    if case.temperature is not None:
        q = q * case.growth(inputs)[:, None, :, None].to(q.dtype)
    wide = k.repeat_interleave(case.heads // case.kv_heads, 1)
    out = {"logits": q.float() @ wide.float().mT * rope.softmax_scale}
    if case.frequencies:
        out["inv_freq"] = case.padded(table)
    if case.composed:
        out["scale"] = case.expected_scale().float()
    return out | ({"q": q, "k": k} if case.rotated else {})


def mla(case: MlaCase, inputs: Inputs) -> dict[str, Tensor]:
    cache = case.written(inputs)
    absorbed = torch.einsum("thn,hnl->thl", inputs["q_nope"], inputs["w_uk"])
    latent, lse = torch.zeros_like(absorbed), torch.full(absorbed.shape[:2], -math.inf)
    start = 0
    for request, seen in enumerate(case.visible(inputs)):
        mine = slice(start, start + len(seen))
        start += len(seen)
        rows = gather_rows(cache, inputs["table"][request], seen.shape[1])
        c, k_pe = rows.split((case.latent_dim, case.rope_dim), -1)
        scores = (absorbed[mine] @ c.mT + inputs["q_pe"][mine] @ k_pe.mT) * case.softmax_scale
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        latent[mine] = torch.softmax(scores, -1) @ c
        lse[mine] = scores.float().logsumexp(-1)
    out = {
        "out": torch.einsum("thl,hlv->thv", latent, inputs["w_uv"]),
        "lse": lse,
        "q_latent": absorbed,
        "o_latent": latent,
        "cache": cache,
    }
    return {name: out[name] for name in case.output_dtypes()}


def bmm(case: BmmCase, inputs: Inputs) -> dict[str, Tensor]:
    wider = torch.int32 if case.integral else torch.float32 if case.wide else inputs["a"].dtype
    out = inputs["a"].to(wider) @ inputs["b"].to(wider)
    out = out if case.alpha == 1 else out * case.alpha
    if case.addend is not None:
        c = inputs["c"].to(wider)
        out = out + (c if case.beta == 1 else c * case.beta)
    return {"out": out}


def banded_mask(case: BandedMaskCase, inputs: Inputs) -> dict[str, Tensor]:
    """There is no arithmetic: the right answer."""
    return {name: x.bool() for name, x in case.expected(inputs).items()}


OPS: dict[str, Callable[[Any, Inputs], dict[str, Tensor]]] = {
    "banded_mask": banded_mask,
    "bmm": bmm,
    "mla": mla,
    "sdpa": sdpa,
    "yarn": yarn,
}
