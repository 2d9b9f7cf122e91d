"""transformers' mask functions, and its caches with the masks that models make for them.

A mask function is asked alone. A cache is driven through the case's schedule, with tokens that
carry their number; the mask of the last step is made before the update, as models do, and read
together with the keys and values that the update returns.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.models.llama import LlamaConfig

from cases.banded_mask import BandedMaskCase, observed
from harness.subject import Subject, Tensors

LANES = ("cpu", "mps", "cuda")
SPARE = 3
"""Slots of a static cache that stay empty: a mask must hide them."""
KEYS = ("float32", "bfloat16", "float16")
ALONE = frozenset({"offset", "window", "left_padding", "right_padding", "chunk"})
CACHED = frozenset({"offset", "window", "steps", "left_padding", "chunk"})


def _padding(case: BandedMaskCase, device: torch.device) -> torch.Tensor | None:
    """The 2-D attention mask of the tokens seen so far, as tokenizers give it."""
    if case.batch is None:
        return None
    slot, length = torch.arange(case.offset + case.n), case.offset + case.n
    left, right = (
        torch.tensor(padding or (0,) * case.batch)[:, None]
        for padding in (case.left_padding, case.right_padding)
    )
    return ((slot >= left) & (slot < length - right)).long().to(device)


def _alone(interface: Callable[..., Any]) -> Callable[[BandedMaskCase, Tensors], Tensors]:
    """A mask interface with the mask function that the layer's kind uses."""

    def run(case: BandedMaskCase, t: Tensors) -> Tensors:
        device = t["tokens"].device
        if case.chunk is not None:
            first = torch.tensor(case.left_padding or (0,) * (case.batch or 1), device=device)
            function = masking_utils.chunked_causal_mask_function(case.chunk, first)
        elif case.window is not None:
            function = masking_utils.sliding_window_causal_mask_function(case.window)
        else:
            function = masking_utils.causal_mask_function
        padding = _padding(case, device)
        mask = interface(
            batch_size=case.batch or 1,
            q_length=case.n,
            kv_length=case.written,
            q_offset=case.offset,
            mask_function=function,
            attention_mask=None if padding is None else padding.bool(),
            allow_is_causal_skip=False,
            dtype=t["tokens"].dtype,
            device=device,
        )
        visible = _bool(mask, case.n, case.written)
        return {"visible": visible if case.batch is not None else visible[0]}

    return run


def _bool(mask: torch.Tensor | None, rows: int, slots: int) -> torch.Tensor:
    """What the attention function takes a mask to mean: `[batch, n, slots]`.

    None is left to the kernel (`sdpa_attention_forward`): one query sees every slot, several are
    causal over as many first slots. A float mask is added: 0 shows.
    """
    if mask is None:
        shown = torch.ones(1, rows, slots, dtype=torch.bool)
        return shown if rows == 1 else shown.tril()
    return mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0


def _cached(
    attention: str, make: Callable[[LlamaConfig, BandedMaskCase], Cache]
) -> Callable[[BandedMaskCase, Tensors], Tensors]:
    """Through the schedule, then the mask and the keys of the last step."""

    def run(case: BandedMaskCase, t: Tensors) -> Tensors:
        tokens, config = t["tokens"], _config(case, attention)
        store, start = make(config, case), 0
        if case.trims:
            store.activate_past_recording()
        for step in case.steps or ((case.offset,) if case.offset else ()):
            if step < 0:
                store.crop(step)
                continue
            chunk = tokens[:, :, start : start + step]
            store.update(chunk, chunk, 0)
            start += step
        new = tokens[:, :, start:]
        masks: Any = masking_utils.create_masks_for_generate(
            config, new[:, 0], _padding(case, tokens.device), store
        )
        keys, values = store.update(new, new, 0)
        shown = _bool(masks[config.layer_types[0]], case.n, keys.shape[2])
        found = observed(case, shown.cpu(), keys.cpu(), values.cpu())
        return {name: x.to(tokens.device) for name, x in found.items()}

    return run


def _config(case: BandedMaskCase, attention: str) -> Any:
    """One layer of the kind that the case is about."""
    config: Any = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    config._attn_implementation = attention
    config.sliding_window, config.attention_chunk_size = case.window, case.chunk
    kind = "chunked" if case.chunk else "sliding" if case.window else "full"
    config.layer_types = [f"{kind}_attention"]
    return config


def _dynamic(config: LlamaConfig, case: BandedMaskCase) -> Cache:
    return DynamicCache(config=config)


def _static(config: LlamaConfig, case: BandedMaskCase) -> Cache:
    return StaticCache(config, max_cache_len=case.written + SPARE)


def _recorded(case: BandedMaskCase) -> str | None:
    """A sliding layer that records its past forgets it at each crop."""
    written = 0
    for step in case.steps:
        if step < 0 and -step > written and (case.window or case.chunk):
            return "a sliding layer can't be cropped beyond what was written since the last crop"
        written = written + step if step > 0 else 0
    return None


def _croppable(case: BandedMaskCase) -> str | None:
    reach = case.window or case.chunk
    if case.trims and reach is not None and reach < case.written + SPARE:
        return "a static sliding layer says that it can't be cropped"
    return None


def _subject(name: str, run: Any, claims: frozenset[str], dtypes: Any, **more: Any) -> Subject:
    return Subject(
        name=f"transformers.banded_mask.{name}",
        run=run,
        claims=claims,
        dtypes=dtypes,
        lanes=LANES,
        **more,
    )


SUBJECTS = (
    _subject("sdpa_mask", _alone(masking_utils.sdpa_mask), ALONE, ("bool",)),
    _subject("eager_mask", _alone(masking_utils.eager_mask), ALONE, KEYS),
    _subject("dynamic_cache", _cached("sdpa", _dynamic), CACHED, KEYS, refusal=_recorded),
    _subject("dynamic_cache_eager", _cached("eager", _dynamic), CACHED, KEYS, refusal=_recorded),
    _subject("static_cache", _cached("sdpa", _static), CACHED, KEYS, refusal=_croppable),
)
