"""The declared arithmetic of latent attention kernels, stage by stage, and the envelope of any."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from cases.case import Inputs
from cases.mla import MlaCase, Step
from harness.arithmetic.dot import Accumulate, dot
from harness.arithmetic.formats import Format, round_scalar
from harness.arithmetic.midrad import MidRad, cat
from harness.arithmetic.mode import DET, Mode
from harness.arithmetic.softmax import SoftmaxPV, log_sum_exp, softmax_pv
from harness.programs.sdpa import Place, SdpaArithmetic, any_softmax, formats_of, multiplied
from references.mla import causal, gather_rows

EXACT = False
"""Whether the op has no rounding at all, so that its envelope is a single answer."""
LIMITS: dict[str, float] = {}
"""The largest strength of a fault that may pass this op's generator unseen, in the op's first dtype
under the envelope (harness.certificate): 1, the whole fault, where none is given; infinity: the
fault can't show in that dtype."""

Path = Literal["absorbed", "materialised", "by_length"]


@dataclass(frozen=True, kw_only=True)
class MlaArithmetic:
    """How a kernel gets from the latent rows to the output.

    `path`       absorbed: W_UK is applied to the query and W_UV to the latent output, each result
                 stored in the case's dtype; materialised: to the rows, keys and values stored;
                 by_length: absorbed where a call brings one token per request, else materialised.
    `project`    accumulation of the products with W_UK and W_UV.
    `attention`  the attention between, as `programs.sdpa` describes it.
    `left`       shorter requests are padded on the left to kv_len: where a key stands in its row.
    `apart`      the rotated columns' scores are a product of their own that is added to the other
                 as a mask is; False: a row is one key.
    """

    attention: SdpaArithmetic
    path: Path = "absorbed"
    project: Accumulate = field(default_factory=Accumulate)
    left: bool = False
    apart: bool = False

    def __call__(self, case: MlaCase, inputs: Inputs, mode: Mode) -> dict[str, MidRad]:
        own, compute = formats_of(case.dtype)
        flush = self.attention.flush_bf16
        project = multiplied(self.project, own, compute, flush=flush)
        q = {name: _by_head(inputs[name]) for name in ("q_nope", "q_pe")}
        w_uk, w_uv = MidRad(inputs["w_uk"][None]), MidRad(inputs["w_uv"][None])
        fresh = absorbed = dot(q["q_nope"], w_uk[0], project, mode)
        absorbed = _stored(absorbed, own, compute)
        if "q_latent" in inputs:
            absorbed = _by_head(inputs["q_latent"])
        cache = case.written(inputs)
        softmax = self.attention.softmax_of(own, compute)
        found = _Found(case)
        # Vectors and blocks of keys begin anew in every call, and the path may depend on it.
        steps = case.steps() if self._by_call(softmax) else (case.whole(),)
        for step in steps:
            keys = _Keys.of(case, inputs, cache, step, case.kv_len if self.left else None)
            c, k_pe = keys.columns(case)
            one = max(step.q_lens) == 1
            on_rows = self.path == "absorbed" or (self.path == "by_length" and one)
            if on_rows:  # one key for all heads: their queries are rows of one product
                query, pe = keys.folded(absorbed), keys.folded(q["q_pe"])
                key, value = c, c
            else:
                query, pe = keys.ask(q["q_nope"]), keys.ask(q["q_pe"])
                key = _stored(_unfolded(c, w_uk.mT, project, mode), own, compute)
                value = _stored(_unfolded(c, w_uv, project, mode), own, compute)
                k_pe = k_pe.expand(k_pe.shape[0], case.heads, *k_pe.shape[2:])
            scores = self._scores(case, query, key, pe, k_pe, mode)
            scores = scores.where(keys.visible(scores.shape), -torch.inf)
            independent = query.is_exact and key.is_exact and case.splits == 1
            if case.splits > 1:
                scores = MidRad(scores.mid, scores.rad + _merging(scores, compute))
            o = softmax_pv(scores, value, softmax, mode, independent=independent)
            if on_rows:
                o = keys.unfolded(o, case.heads)
                found.put("o_latent", keys, o)
                given = keys.given(inputs)
                o = dot(_stored(o, own, compute) if given is None else given, w_uv, project, mode)
            found.put("out", keys, o)
            if case.lse:
                lse = log_sum_exp(scores, softmax, mode, independent=independent)
                found.put("lse", keys, keys.unfolded(lse, case.heads))
        return found.all(fresh, cache)

    def _by_call(self, softmax: SoftmaxPV) -> bool:
        return self.path == "by_length" or softmax.block > 0 or softmax.exp.replica is not None

    def _scores(
        self, case: MlaCase, query: MidRad, key: MidRad, pe: MidRad, k_pe: MidRad, mode: Mode
    ) -> MidRad:
        """Scaled scores [..., Q, K] of query on key, and of the rotated columns with them."""
        own, compute = formats_of(case.dtype)
        spec = self.attention
        places: dict[Place, Format] = {"dtype": own, "compute": compute}
        stored = own is not compute and spec.scores == "dtype"
        scale = case.softmax_scale
        qk = multiplied(spec.qk, own, compute, flush=spec.flush_bf16)

        def product(a: MidRad, b: MidRad) -> MidRad:
            if spec.scale_at == "both":
                root = round_scalar(math.sqrt(scale), places[spec.scale_format])
                a = a.scale(root).round(places[spec.operands])
                b = b.scale(root).round(places[spec.operands])
            elif spec.scale_at == "query":
                a = a.scale(round_scalar(scale, places[spec.scale_format]))
                a = a.round(places[spec.operands])
            scores = dot(a, b.mT, qk, mode)
            scores = scores.round(own) if stored else scores
            if spec.scale_at == "scores":
                scores = scores.scale(round_scalar(scale, places[spec.scale_format]))
                # In float32 and then stored: two roundings, which differ from one near a tie.
                scores = scores.round(compute).round(own) if stored else scores.free(compute)
            return scores

        if not self.apart:
            return product(cat([query, pe]), cat([key, k_pe]))
        total = product(query, key).free(None if stored else compute)
        total = total + product(pe, k_pe).free(None if stored else compute)
        return total.round(compute).round(own) if stored else total.free(compute)


def envelope(
    case: MlaCase, inputs: Inputs, mode: Mode, accumulate: Accumulate | None = None
) -> dict[str, MidRad]:
    """Any kernel in the case's dtype with float32 accumulators, by either path; rigorous.

    Radii are those of det mode whatever `mode` says. Rounded into the dtype, at unknown points,
    may be: absorbed queries or materialised keys, the scale constant, two scaled operands, the
    products of latent and rotated columns and their sum, s - max, the weights, the latent output or
    the materialised values, and one stored copy of each output.

    Errors of scores and weights are common to all columns of a row, so they reach `out` through
    the spread of the materialised values c W_UV, whichever path is taken:
    sum_j p'_j c_j W = sum_j p'_j (c_j W).
    """
    del mode
    own, compute = formats_of(case.dtype)
    accumulate = multiplied(accumulate or Accumulate(order="any"), own, compute, flush=True)
    scale = case.softmax_scale
    q_nope, q_pe = _by_head(inputs["q_nope"]), _by_head(inputs["q_pe"])
    w_uk, w_uv = MidRad(inputs["w_uk"][None]), MidRad(inputs["w_uv"][None])
    fresh = dot(q_nope, w_uk[0], accumulate, DET).free(own)
    anchored = "q_latent" in inputs
    absorbed = _by_head(inputs["q_latent"]) if anchored else MidRad(fresh.mid)
    cache = case.written(inputs)
    found = _Found(case)
    keys = _Keys.of(case, inputs, cache, case.whole())
    c, k_pe = keys.columns(case)
    query, pe = keys.folded(absorbed), keys.folded(q_pe)
    latent, rotated = dot(query, c.mT, accumulate, DET), dot(pe, k_pe.mT, accumulate, DET)
    sums = latent.mid.abs() + rotated.mid.abs()
    # Factors stored in the dtype: q_latent, and two operands times parts of the scale.
    products = _magnitude(query, c) + _magnitude(pe, k_pe)
    crumbs = own.tiny * (_sums(query, pe) + _sums(c, k_pe).mT) / min(scale, 1)
    rad = latent.rad + rotated.rad
    rounded = math.expm1(3 * math.log1p(own.u)) * products
    if not anchored:
        raw, raw_pe = keys.ask(q_nope), keys.ask(q_pe)
        key = _unfolded(c, w_uk.mT, accumulate, DET).free(own)
        there = _magnitude(raw, key) + _magnitude(raw_pe, k_pe)
        spread = raw.mid.abs() @ key.rad.mT + dot(raw, MidRad(key.mid.mT), accumulate, DET).rad
        spread = spread + math.expm1(3 * math.log1p(own.u)) * there
        spread = spread + own.tiny * (_sums(raw, raw_pe) + _sums(key, k_pe).mT) / min(scale, 1)
        rad = rad + spread.flatten(1, 2)[:, None] + keys.folded(fresh).rad @ c.mid.abs().mT
    rad = (rad + rounded) * (1 + 3 * own.u) + 2 * own.u * sums
    rad = rad + crumbs + 2.0**-50 * sums
    scores = MidRad(latent.mid + rotated.mid, rad).scale(scale).free(own, 4)
    scores = scores.where(keys.visible(scores.shape), -torch.inf)
    if case.splits > 1:
        scores = MidRad(scores.mid, scores.rad + 2 * _merging(scores, compute))
    spec = any_softmax(accumulate, own, compute)
    o_latent = softmax_pv(scores, c, spec, DET, independent=False).free(own)
    o_latent = keys.unfolded(o_latent, case.heads)
    found.put("o_latent", keys, o_latent)
    given = keys.given(inputs)
    if given is not None:
        out = dot(given, w_uv, accumulate, DET)
    else:
        by_head = keys.unfolded(scores, case.heads)
        out = _projected(o_latent, c, w_uv, by_head, spec, accumulate, own)
    found.put("out", keys, out.free(own))
    if case.lse:
        lse = log_sum_exp(scores, spec, DET, independent=False)
        found.put("lse", keys, keys.unfolded(lse, case.heads))
    return found.all(fresh, cache)


def _projected(
    o_latent: MidRad,
    c: MidRad,
    w_uv: MidRad,
    scores: MidRad,
    spec: SoftmaxPV,
    accumulate: Accumulate,
    own: Format,
) -> MidRad:
    """The output by either path: score errors act through the spread of the values c W_UV.

    On top come, on the latent side, the sums over keys (any weighting of them is at most max |c|),
    the rounding of the latent output, and the last product.
    """
    value = _unfolded(c, w_uv, accumulate, DET).free(own)
    out = softmax_pv(scores, value, spec, DET, independent=False)
    keys = c.shape[-2]
    sums = accumulate.growth(keys, 2 * -(-keys // 16)) * c.mid.abs().amax(-2, keepdim=True)
    reach, weights = o_latent.mid.abs() + o_latent.rad, w_uv.mid.abs()
    latent = own.u * reach + own.tiny + sums
    last = accumulate.growth(w_uv.shape[-2])
    slack = (latent * (1 + last) + last * reach) @ weights + accumulate.underflow(w_uv.shape[-2])
    return MidRad(out.mid, out.rad + slack)


def _unfolded(c: MidRad, weights: MidRad, accumulate: Accumulate, mode: Mode) -> MidRad:
    """c [B, 1, K, L] times weights [1, H, L, C], [B, H, K, C]: one product for all heads."""
    batch, _, keys, latent = c.shape
    heads, columns = weights.shape[1], weights.shape[3]
    flat = weights[0]._map(lambda x: x.transpose(0, 1).reshape(latent, heads * columns))
    x = dot(c.reshape(batch * keys, latent), flat, accumulate, mode)
    return x.reshape(batch, keys, heads, columns)._map(lambda x: x.transpose(1, 2))


@dataclass(frozen=True, kw_only=True)
class _Keys:
    """The rows that one call attends to, request by request, padded to the longest.

    rows: [B, 1, K, L + R], zero where no token of the request sees them.
    seen: bool [B, Q, K]. token: int64 [B, Q], the packed row of each query. valid: bool [B, Q].
    """

    rows: MidRad
    seen: Tensor
    token: Tensor
    valid: Tensor

    @classmethod
    def of(
        cls, case: MlaCase, inputs: Inputs, cache: Tensor, step: Step, left: int | None = None
    ) -> _Keys:
        """left: the length to which shorter requests are padded on the left, if they are."""
        q, k = max(step.q_lens), max(max(step.kv_lens), 1)
        if left is not None and not case.schedule:
            k = left
        batch = len(step.q_lens)
        rows = torch.zeros(batch, k, cache.shape[-1], dtype=torch.float64)
        seen = torch.zeros(batch, q, k, dtype=torch.bool)
        token = torch.zeros(batch, q, dtype=torch.int64)
        valid = torch.zeros(batch, q, dtype=torch.bool)
        start = 0
        for b, (n, length) in enumerate(zip(step.q_lens, step.kv_lens, strict=True)):
            mine = torch.tensor(step.tokens[start : start + n], dtype=torch.int64)
            start += n
            token[b, :n], valid[b, :n] = mine, True
            if n == 0:
                continue
            mask = causal(n, length)
            if "visible" in inputs:
                mask = inputs["visible"][mine, :length]
            here = slice(0, length) if left is None else slice(k - length, k)
            seen[b, :n, here] = mask
            held = gather_rows(cache, inputs["table"][b], length).double()
            rows[b, here] = held.masked_fill(~mask.any(0)[:, None], 0.0)
        return cls(rows=MidRad(rows[:, None]), seen=seen, token=token, valid=valid)

    def columns(self, case: MlaCase) -> tuple[MidRad, MidRad]:
        """The latent and the rotated columns, [B, 1, K, L] and [B, 1, K, R]."""
        return self.rows[..., : case.latent_dim], self.rows[..., case.latent_dim :]

    def ask(self, q: MidRad) -> MidRad:
        """[H, T, C] to [B, H, Q, C]."""
        return q._map(lambda x: x[:, self.token].transpose(0, 1))

    def folded(self, q: MidRad) -> MidRad:
        """[H, T, C] to [B, 1, H Q, C]."""
        return self.ask(q)._map(lambda x: x.flatten(1, 2)[:, None])

    def unfolded(self, x: MidRad, heads: int) -> MidRad:
        """[B, 1, H Q, C] to [B, H, Q, C]; what has its heads already stays."""
        batch, queries = self.token.shape
        return x.reshape(batch, heads, queries, x.shape[-1])

    def visible(self, shape: torch.Size) -> Tensor:
        """`seen` for scores of either form."""
        batch, queries, keys = self.seen.shape
        heads = shape[1] * shape[2] // queries
        return self.seen[:, None].expand(batch, heads, queries, keys).reshape(shape)

    def given(self, inputs: Inputs) -> MidRad | None:
        """The observed latent output of this call's tokens, [B, H, Q, L]."""
        return self.ask(_by_head(inputs["o_latent"])) if "o_latent" in inputs else None


class _Found:
    """Outputs of all calls, brought back into packed rows [T, H, ...]."""

    def __init__(self, case: MlaCase) -> None:
        self.case = case
        self.parts: dict[str, tuple[Tensor, Tensor]] = {}

    def put(self, name: str, keys: _Keys, x: MidRad) -> None:
        """x: [B, H, Q, C]."""
        if name not in self.parts:
            shape = (self.case.rows, x.shape[1], x.shape[3])
            self.parts[name] = (torch.zeros(shape).double(), torch.zeros(shape).double())
        mid, rad = self.parts[name]
        at = keys.token[keys.valid]
        mid[at] = x.mid.transpose(1, 2)[keys.valid]
        rad[at] = x.rad.transpose(1, 2)[keys.valid]

    def all(self, q_latent: MidRad, cache: Tensor) -> dict[str, MidRad]:
        found = {name: MidRad(mid, rad) for name, (mid, rad) in self.parts.items()}
        if "lse" in found:
            found["lse"] = found["lse"][..., 0]
        found["q_latent"] = q_latent._map(lambda x: x.transpose(0, 1))
        found["cache"] = MidRad(cache)
        return {name: found[name] for name in self.case.output_dtypes()}


def _merging(scores: MidRad, compute: Format) -> Tensor:
    """How far merging parts by their log-sum-exp moves the log-weight of a whole part, [..., m, 1].

    lse_s = m_s + log l_s, then exp(lse_s - top) and the sum of parts: a rounding of lse_s and of
    the difference, which is at most 2 (max |s| + log n), two units of the logarithm, four of the
    exponential, and four of products and divisions.
    """
    hidden = scores.mid == -torch.inf
    reach = (scores.mid.abs() + scores.rad).masked_fill(hidden, 0.0).amax(-1, keepdim=True)
    count = math.log(scores.shape[-1] + 1)
    return compute.u * (4 * (reach + count) + 2 * count + 8)


def _sums(a: MidRad, b: MidRad) -> Tensor:
    """Sum of |x| over all columns of both, [..., rows, 1]."""
    return a.mid.abs().sum(-1, keepdim=True) + b.mid.abs().sum(-1, keepdim=True)


def _magnitude(a: MidRad, b: MidRad) -> Tensor:
    """sum |a b| over the columns, [..., Q, K]."""
    return a.mid.abs() @ b.mid.abs().mT


def _by_head(x: Tensor) -> MidRad:
    """[T, H, C] to [H, T, C]."""
    return MidRad(x.transpose(0, 1))


def _stored(x: MidRad, own: Format, compute: Format) -> MidRad:
    """Rounded into the case's dtype: replayed where that is short, a free rounding in float32."""
    return x.round(own) if own is not compute else x.free(own)
