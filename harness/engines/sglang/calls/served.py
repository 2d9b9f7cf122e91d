"""Attention of sglang's MLX server: a tiny mlx_lm model behind its own runner, caches and wrapper.

The model is mlx_lm's, the runner patches it as it patches any model. What projects the hidden state
to q, k and v is replaced by what returns the case's own, and the rotation by none, so that the
attention in between is asked the case's question: prefill, extend and batched decode.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import gpt_oss, llama, qwen3
from sglang.srt.hardware_backend.mlx.kv_cache.attention_kv_cache import ContiguousAttentionKVCache
from sglang.srt.hardware_backend.mlx.model_runner import MlxModelRunner

from cases import values
from cases.sdpa import SdpaCase
from harness.subject import Tensors

OTHER_WINDOW = 3
"""Window of the layer that is not asked, in models that always have one of either kind."""
SMALL = 8
"""Tokens that a cache holds before it grows (4096 in the server)."""
POISON = 2.0**14
"""Keys and values of a request that has left its caches behind for the next one to use."""

Model = Callable[[SdpaCase], Any]
Rows = tuple[mx.array, mx.array, mx.array]
"""q, k and v of one request, `[heads, len, head_dim]`."""


def _gpt_oss(case: SdpaCase) -> Any:
    """Two layers, of which the second is asked; windows under `window_size`, scale `sm_scale`."""
    return gpt_oss.Model(
        gpt_oss.ModelArgs(
            num_hidden_layers=2,
            num_local_experts=2,
            num_experts_per_tok=1,
            vocab_size=2,
            hidden_size=1,
            intermediate_size=1,
            head_dim=case.head_dim,
            num_attention_heads=case.heads,
            num_key_value_heads=case.kv_heads,
            sliding_window=case.window or OTHER_WINDOW,
            layer_types=_layers(case),
        )
    )


def _llama(case: SdpaCase) -> Any:
    """The same with windows under `sliding_window`, scale `scale`."""
    return llama.Model(
        llama.ModelArgs(
            **_SMALL,
            model_type="llama",
            num_hidden_layers=2,
            head_dim=case.head_dim,
            num_attention_heads=case.heads,
            num_key_value_heads=case.kv_heads,
            sliding_window=case.window or OTHER_WINDOW,
            layer_types=_layers(case),
        )
    )


def _qwen3(case: SdpaCase) -> Any:
    """One layer without a window, with norms of q and k (which are replaced by none)."""
    return qwen3.Model(
        qwen3.ModelArgs(
            **_SMALL,
            model_type="qwen3",
            num_hidden_layers=1,
            head_dim=case.head_dim,
            num_attention_heads=case.heads,
            num_key_value_heads=case.kv_heads,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            rope_theta=10000.0,
        )
    )


_SMALL: dict[str, Any] = {
    "hidden_size": 1,
    "intermediate_size": 1,
    "vocab_size": 2,
    "rms_norm_eps": 1e-6,
}


def _layers(case: SdpaCase) -> list[str]:
    kinds = ["sliding_attention", "full_attention"]
    return kinds if case.window is None else kinds[::-1]


MODELS: dict[str, Model] = {"gpt_oss": _gpt_oss, "llama": _llama, "qwen3": _qwen3}


class _Given:
    """Stands where a module projects the hidden state, and returns what it was given."""

    def __init__(self) -> None:
        self.answer: Any = None

    def __call__(self, hidden: mx.array) -> mx.array:
        del hidden
        return self.answer


class _Seen:
    """Stands for the output projection, and keeps what it was to project."""

    def __init__(self) -> None:
        self.rows: Any = None

    def __call__(self, rows: mx.array) -> mx.array:
        self.rows = rows
        return mx.zeros((*rows.shape[:2], 1), rows.dtype)


def _as_it_is(x: mx.array, *args: Any, **more: Any) -> mx.array:
    """Stands for a rotation, or for a norm of q or k."""
    del args, more
    return x


class Runner(MlxModelRunner):
    """The server's runner over a model that it is handed, where it would load a checkpoint.

    contiguous: layers with a window keep all keys, as they do in a cache of the other kind.
    """

    def __init__(self, model: Any, *, contiguous: bool, slots: int | None) -> None:
        self._handed, self._contiguous = model, contiguous
        super().__init__("given", disable_radix_cache=slots is None, pool_size=slots or 1)
        self._max_seq_len = SMALL
        self.init_cache_pools(None)

    def _load_model(self) -> None:
        self.model, self._trunk = self._handed, self._handed.model

    def _new_native_cache(self) -> list[Any]:
        if not self._contiguous:
            return super()._new_native_cache()
        layers = range(self._cache_layout.num_layers)
        return [ContiguousAttentionKVCache(max_seq_len=self._max_seq_len) for _ in layers]


class _Server:
    """The runner, the layer of its model that is asked, and the requests that it serves."""

    def __init__(self, model: Model, case: SdpaCase, t: Tensors, **more: Any) -> None:
        built = model(case)
        built.set_dtype(t["q"].dtype)
        attentions = [layer.self_attn for layer in built.layers]
        for attention in attentions:
            scale = "sm_scale" if hasattr(attention, "sm_scale") else "scale"
            setattr(attention, scale, case.softmax_scale)
            if hasattr(attention, "sinks"):
                none = mx.full((case.heads,), -mx.inf, t["q"].dtype)
                attention.sinks = t.get("sinks", none)
        self.runner = Runner(built, **more)
        self.given = {name: _Given() for name in ("q_proj", "k_proj", "v_proj")}
        self.seen = _Seen()
        for attention in attentions:
            for name, stand_in in (self.given | {"o_proj": _Seen()}).items():
                setattr(attention, name, stand_in)
            attention.rope = _as_it_is
            if hasattr(attention, "q_norm"):
                attention.q_norm = attention.k_norm = _as_it_is
        for layer in built.layers:
            layer.mlp = _as_it_is
        attentions[-1].o_proj = self.seen
        self.started: set[str] = set()

    def prompt(self, name: str, rows: Rows, prefix: list[int], new: list[int]) -> mx.array:
        """A request's next chunk: its first, behind cached slots that hold a prefix, or another."""
        self._give([rows])
        tokens = [0] * rows[0].shape[1]
        if name in self.started:
            self.runner.extend(name, tokens, new)
        else:
            every = [0] * (len(prefix) + len(tokens))
            self.runner.prefill(name, tokens, every, prefix, new, len(self.started))
            self.started.add(name)
        return self.seen.rows

    def decode(self, names: list[str], rows: list[Rows]) -> mx.array:
        """One token of each request, in a batch."""
        self._give(rows)
        self.runner.decode_batch(names)
        return self.seen.rows

    def leave(self, name: str) -> None:
        """The request is done; its caches serve others."""
        self.runner.remove_request(name)

    def _give(self, rows: list[Rows]) -> None:
        for stand_in, parts in zip(self.given.values(), zip(*rows, strict=True), strict=True):
            stand_in.answer = mx.stack([_flat(x) for x in parts])


def attention(
    model: str, *, contiguous: bool = False, pooled: bool = False
) -> Callable[[SdpaCase, Tensors], Tensors]:
    """Cached keys first, then every query of the case: chunks of a schedule by request, single
    tokens in a batch of all requests.

    pooled: the cached keys are those of a request that is gone; they come out of the pool, from
    slots in no order.
    """

    def run(case: SdpaCase, t: Tensors) -> Tensors:
        lens = case.kv_lens or (case.kv_len,) * case.batch
        slots = _slots(case, lens) if pooled else [[] for _ in lens]
        size = sum(lens) if pooled else None
        server = _Server(MODELS[model], case, t, contiguous=contiguous, slots=size)
        _go_before(server, case, t)
        requests = [f"request {b}" for b in range(case.batch)]
        rows = [_Request(case, t, b, lens[b], slots[b]) for b in range(case.batch)]
        for name, request in zip(requests, rows, strict=True):
            if request.first:
                request.cached(server, name, pooled)
        outs: list[list[mx.array]] = [[] for _ in requests]
        start, every = 0, range(case.batch)
        for step in case.schedule or (1,) * case.q_len:
            stop = start + step
            alone = [b for b in every if step > 1 or requests[b] not in server.started]
            together = [b for b in every if b not in alone]
            for b in alone:
                outs[b].append(rows[b].chunk(server, requests[b], start, stop)[0])
            if together:
                names = [requests[b] for b in together]
                found = server.decode(names, [rows[b].asked(start, stop) for b in together])
                for b, out in zip(together, found, strict=True):
                    outs[b].append(out)
            start = stop
        out = mx.stack([mx.concatenate(parts) for parts in outs])
        out = out.reshape(case.batch, case.q_len, case.heads, case.head_dim)
        return {"out": out.transpose(0, 2, 1, 3)}

    return run


class _Request:
    """q, k and v of one request, without padding; `first` keys stand before its queries."""

    def __init__(self, case: SdpaCase, t: Tensors, b: int, length: int, slots: list[int]) -> None:
        held = slice(0, length) if case.side == "right" else slice(case.kv_len - length, None)
        self.q, self.k, self.v = t["q"][b], t["k"][b][:, held], t["v"][b][:, held]
        self.first, self.slots = length - case.q_len, slots
        self.prefix: list[int] = []

    def asked(self, start: int, stop: int) -> Rows:
        at = slice(self.first + start, self.first + stop)
        return self.q[:, start:stop], self.k[:, at], self.v[:, at]

    def cached(self, server: _Server, name: str, pooled: bool) -> None:
        """The keys before the first query, by a prompt whose queries ask nothing."""
        at = slice(0, self.first)
        q = mx.zeros((self.q.shape[0], self.first, self.q.shape[2]), self.q.dtype)
        who = f"{name}, earlier" if pooled else name
        server.prompt(who, (q, self.k[:, at], self.v[:, at]), [], self.slots[at])
        if pooled:
            self.prefix = self.slots[at]
            server.leave(who)

    def chunk(self, server: _Server, name: str, start: int, stop: int) -> mx.array:
        new = self.slots[self.first + start : self.first + stop]
        return server.prompt(name, self.asked(start, stop), self.prefix, new)


def _go_before(server: _Server, case: SdpaCase, t: Tensors) -> None:
    """A request that fills caches with poison and leaves them to the next one."""
    q = mx.zeros((case.heads, case.kv_len, case.head_dim), t["q"].dtype)
    k = mx.full((case.kv_heads, case.kv_len, case.head_dim), POISON, q.dtype)
    server.prompt("a request before", (q, k, k), [], [])
    server.leave("a request before")


def _slots(case: SdpaCase, lens: tuple[int, ...]) -> list[list[int]]:
    """Slots of the pool for each request's keys, in no order; slot 0 is the server's own."""
    order = values.integers(case.seed, "slots", (sum(lens),), 0, 2**31 - 1).argsort() + 1
    return [slots.tolist() for slots in order.split(list(lens))]


def _flat(x: mx.array) -> mx.array:
    """`[heads, len, head_dim]` as a projection gives it, `[len, heads * head_dim]`."""
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)
