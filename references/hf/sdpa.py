"""Owns the witness for attention: the eager attention of Llama, Gemma 2 and gpt-oss, in float64."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import masking_utils
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

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


class _SoftmaxInFloat64(TorchFunctionMode):
    """Widens `softmax(..., dtype=torch.float32)`, which the models write down, to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.nn.functional.softmax and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
