"""Banded masks: every subject against the reference, on every lane, bit for bit."""


def test_agrees_with_reference(cell, campaign):
    campaign.judge(cell)
