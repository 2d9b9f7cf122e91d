"""vLLM's get_rope with what the native translator says; read in vLLM's worker too."""

from dataclasses import replace
from typing import Any

from cases.yarn import Claims, YarnCase
from harness.engines.native.torch import yarn as native
from harness.engines.vllm import part, yarn

NAME = "vllm.yarn.get_rope"


def _build(case: YarnCase, config: Any) -> yarn.Built:
    told = native.to_vllm(native.read(case.config(), case.layer_type))
    # The context is as in the ordinary subject, whose refusal knows how long a table it makes.
    context = config.model_config.hf_config.max_position_embeddings
    rope = part("model_executor.layers.rotary_embedding").get_rope(
        **{**told.arguments, "max_position": context}
    )
    return yarn._module(rope), told.softmax_scale


(_RIGHT,) = [subject for subject in yarn.SUBJECTS if subject.name == NAME]
SUBJECTS = (
    replace(
        _RIGHT,
        name=f"{NAME} + the native translator",
        run=yarn._answer(_build),
        claims=Claims(_RIGHT.claims - {"dynamic", "proportional"}),
    ),
)
