"""Owns the witness for attention: transformers' own eager attention, in float64."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import masking_utils
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mpt import modeling_mpt

EAGER: dict[str, Any] = {
    "llama": modeling_llama.eager_attention_forward,
    "gemma2": modeling_gemma2.eager_attention_forward,
    "gpt_oss": modeling_gpt_oss.eager_attention_forward,
}
"""Model name -> its eager attention. gemma2 has the softcap, gpt_oss the sinks; none has both."""


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    model: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Output `[B, H, Lq, Dv]` and weights `[B, H, Lq, Lk]` of a model's eager attention, float64.

    Arguments as for `references.sdpa.sdpa`, but for `visible`, which has one head axis of size 1 at
    most (transformers' masks have no more), and `model`, a key of EAGER; left out, the first that
    has the features asked for. Eager attention returns its weights, not a log-sum-exp: the two say
    the same, for `ln(weights) = s - lse` at each visible key.

    **Where transformers means something else**

    - A dead row gives the mean of V over all Lk keys, hidden ones included: the mask adds the most
      negative finite number, which swallows each score, so the softmax is uniform. With sinks, it
      gives zeros, as the reference does: the sink's logit stays above that number.
    - NaN and inf in a hidden slot reach the result (0 * inf); large finite values do not.
    - Llama and Gemma 2 take the softmax in float32 whatever the inputs: 24 bits in a float64
      witness. Here, that one argument is widened; all else runs as it stands.
    - There is no way to leave the scale to eager attention; 1 / sqrt(D) is what the models pass.

    Raises:
        ValueError: softcap with sinks, a model that has not the feature, or a mask per head.
    """
    if softcap is not None and sinks is not None:
        raise ValueError("softcap with sinks: no eager attention has both; ask for one at a time")
    if model is None:
        model = "gpt_oss" if sinks is not None else "gemma2" if softcap is not None else "llama"
    if (softcap is not None and model != "gemma2") or (sinks is not None and model != "gpt_oss"):
        raise ValueError(f"model={model!r} has no such feature: gemma2 has softcap, gpt_oss sinks")
    if model == "gpt_oss" and sinks is None:
        sinks = torch.full((q.shape[1],), -torch.inf)

    module = SimpleNamespace(
        num_key_value_groups=q.shape[1] // k.shape[1],
        sinks=None if sinks is None else sinks.double(),
        head_dim=q.shape[-1],
        training=False,
    )
    attention_mask = None if visible is None else _additive(visible, q, k)
    options = {} if softcap is None else {"softcap": softcap}
    with _SoftmaxInFloat64():
        out, weights = EAGER[model](
            module,
            q.double(),
            k.double(),
            v.double(),
            attention_mask,
            scaling=q.shape[-1] ** -0.5 if scale is None else scale,
            **options,
        )
    return out.transpose(1, 2), weights


def _additive(visible: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """`visible` as transformers' own `eager_mask` puts it: 0 or the most negative float64."""
    if visible.ndim == 4 and visible.shape[1] != 1:
        raise ValueError(f"visible has shape {tuple(visible.shape)}: give its head axis the size 1")
    full = visible.broadcast_to(q.shape[0], 1, q.shape[2], k.shape[2])
    return masking_utils.eager_mask(
        batch_size=q.shape[0],
        q_length=q.shape[2],
        kv_length=k.shape[2],
        mask_function=lambda batch, head, row, key: full[batch, head, row, key],
        dtype=torch.float64,
    )


def alibi_slopes(heads: int, model: str, bias_max: float = 8.0) -> Tensor:
    """The slopes `[heads]` that "bloom", "falcon" or "mpt" makes: float32, of Falcon bfloat16."""
    if model == "mpt":
        build: Any = modeling_mpt.build_mpt_alibi_tensor  # it says int, and takes any number
        return -build(heads, 2, bias_max)[:, 0, 0]
    module = {"bloom": modeling_bloom, "falcon": modeling_falcon}[model]
    return module.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32).view(heads, 2)[:, 1]


def alibi(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slopes: Tensor,
    visible: Tensor,
    scale: float | None = None,
    positions: Tensor | None = None,
    model: str = "bloom",
) -> tuple[Tensor, Tensor]:
    """As `sdpa`, with ALiBi: the attention of "bloom" or "mpt" between its two linear layers.

    slopes `[H]`; visible `[B, 1, Lq, Lk]`; positions `[B, Lk]`, of the keys within their requests,
    0, 1, 2, ... if None. MPT takes none.

    **Where transformers means something else**

    - The bias is slope * position of the key: in BLOOM from the request's first key
      (`(mask.cumsum(-1) - 1) * mask`), in MPT from the last column, padding or not. The weights of
      a row are the same; its log-sum-exp would not be.
    - Falcon scales the bias with the scores: its slopes are the published ones times the scale. It
      is no witness of attention here, but of slopes.
    - There are as many kv heads as query heads, and one head size: k and v are repeated here, and
      narrower ones filled up with zeros.
    - The models make the bias in float32, and BLOOM and Falcon store it in their own dtype. Here
      slope and position are multiplied in float64.
    """
    batch, heads, q_len = q.shape[:3]
    kv_len, v_dim, width = k.shape[2], v.shape[3], max(q.shape[3], v.shape[3])
    scale = q.shape[3] ** -0.5 if scale is None else scale
    q, k, v = (
        F.pad(x.double().repeat_interleave(heads // x.shape[1], 1), (0, width - x.shape[3]))
        for x in (q, k, v)
    )
    cache: Any = SimpleNamespace(update=lambda *_, **__: (k, v), get_seq_length=lambda: kv_len)
    hidden = q.transpose(1, 2).flatten(2)
    if positions is None or model == "mpt":
        positions = torch.arange(kv_len)[None] - (kv_len - 1 if model == "mpt" else 0)
    bias = slopes.double()[:, None] * positions[:, None].double()
    if model == "mpt":
        module: Any = SimpleNamespace(
            Wqkv=lambda x: torch.cat([x, x, x], -1), out_proj=lambda x: x, clip_qkv=None,
            n_heads=heads, head_dim=width, softmax_scale=scale, layer_idx=0, training=False,
            attn_dropout_p=0.0,
        )  # fmt: skip
        with _SoftmaxInFloat64():
            out, weights = modeling_mpt.MptAttention.forward(
                module, hidden, bias.view(heads, 1, kv_len), cache, ~visible
            )
    else:
        module = SimpleNamespace(
            query_key_value=lambda x: x, _reshape=lambda x: (q, k, v),
            _merge_heads=lambda x: x.unflatten(0, (batch, heads)).transpose(1, 2).flatten(2),
            dense=lambda x: x, attention_dropout=lambda x: x, hidden_dropout=0.0, training=False,
            num_heads=heads, head_dim=width, inv_norm_factor=scale, beta=1.0, layer_idx=0,
            pretraining_tp=1, slow_but_exact=False,
        )  # fmt: skip
        with _SoftmaxInFloat64():
            out, weights = modeling_bloom.BloomAttention.forward(
                module, hidden, torch.zeros_like(hidden),
                bias.expand(batch, -1, -1).reshape(batch * heads, 1, kv_len),
                _additive(visible, q, k), layer_past=cache,
            )  # fmt: skip
    return out.view(batch, q_len, heads, width).transpose(1, 2)[..., :v_dim], weights


class _SoftmaxInFloat64(TorchFunctionMode):
    """Widens `softmax(..., dtype=torch.float32)` and `x.float()`, which the models write down."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.nn.functional.softmax and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if func is torch.Tensor.float and args[0].dtype is torch.float64:
            return args[0]
        return func(*args, **kwargs)
