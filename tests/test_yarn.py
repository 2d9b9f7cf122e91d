"""Rotary embeddings: every subject against the reference, on every lane."""


def test_agrees_with_reference(cell, campaign):
    campaign.judge(cell)
