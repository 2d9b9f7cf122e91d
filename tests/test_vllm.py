"""vLLM on trial, where its environment is built: bugs planted into it, and our words for it."""

import pytest

from harness import profiles
from harness.record import Status
from harness.run import judge
from harness.search import search
from tests import planted_vllm, translated_vllm
from tests.planted_cells import beside, caught, planted

PLANTS = pytest.mark.parametrize(
    "plant", [pytest.param(plant, id=plant.name) for plant in planted_vllm.PLANTS]
)
SHOWN_BY = {
    "softcap ignored": {"softcap"},
    "softcap ignored by the kernel": {"softcap"},
    "scale off by 0.1 %": set(),
    "W+1 keys": {"causal", "window"},
    "window one key more than the kernel is planned for": {"causal", "window"},
    "sinks dropped": {"sinks"},
    "one page entry off by one": set(),
    "one page entry off by one in latent decode": {"page_size"},
    "one page entry off by one under AMX": {"page_size"},
}
"""By the plant, what the smallest case has beyond a single query over a few keys."""


@PLANTS
def test_a_bug_planted_into_vllm_is_caught_and_shrunk(plant):
    case, _ = caught(plant, planted_vllm.__name__)
    assert case.features() == SHOWN_BY[plant.name]
    assert case.heads == case.q_len == 1
    assert case.batch == 1 or "page" in plant.name  # the page may have to be another request's
    assert case.kv_len <= 16


@PLANTS
def test_a_bug_planted_into_vllm_is_named(plant):
    """By the fault dictionary, or in the words of a probe that reads what happened."""
    record = judge(plant.telling, planted(plant, planted_vllm.__name__))
    assert record.status is Status.DISAGREE, record.why
    assert record.fault in plant.faults or (plant.reading and plant.reading in record.why), (
        record.why
    )


def test_the_words_for_vllm_mean_the_same_in_vllm():
    """Real get_rope with the arguments of the native translator, on published and drawn configs."""
    (subject,) = translated_vllm.SUBJECTS
    cell = beside(translated_vllm.NAME, subject, translated_vllm.__name__)
    tried = []
    assert search(cell, profiles.load("premerge"), 0, tried.append) is None
    assert sum(record.status is Status.AGREE for record in tried) >= 30
