"""Latent attention of acme."""

import torch

from cases.mla import MlaCase
from harness.subject import Subject, Tensors


def _decode(
    q: torch.Tensor, rows: torch.Tensor, latent: int, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Put the package's own call in the place of this one: a request's queries on its rows.

    q [new tokens, heads, latent + rope], rows [keys, latent + rope]; in float32.
    """
    scores = torch.einsum("thw,kw->htk", q, rows) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("htk,kl->thl", weights, rows[:, :latent])


def _run(case: MlaCase, t: Tensors) -> Tensors:
    """Write the new rows, absorb, attend request by request, project."""
    _, page, width = t["cache"].shape
    cache = t["cache"].reshape(-1, width).clone()
    cache[t["slots"]] = torch.cat([t["latent"], t["k_pe"]], -1)
    q_latent = torch.einsum("thn,hnl->thl", t["q_nope"].float(), t["w_uk"].float())
    q = torch.cat([q_latent, t["q_pe"].float()], -1)
    outs, start = [], 0
    for request, (new, keys) in enumerate(zip(*case.lengths(), strict=True)):
        at = torch.arange(keys, device=q.device)
        where = t["table"][request, at // page].long() * page + at % page
        visible = at <= at[keys - new :, None]
        mine = q[start : start + new]
        rows = cache[where].float()
        outs.append(_decode(mine, rows, case.latent_dim, visible, case.softmax_scale))
        start += new
    out = torch.einsum("thl,hlv->thv", torch.cat(outs), t["w_uv"].float())
    return {"out": out.to(t["q_nope"].dtype)}


SUBJECTS = (
    Subject(
        name="acme.mla.decode",
        run=_run,
        claims=frozenset({"q_len", "mscale", "q_lens", "kv_lens", "page_size", "layout"}),
        dtypes=("float32", "bfloat16", "float16"),
        lanes=("cpu", "cuda"),
    ),
)
