"""Engines in a Python of their own: how one is declared, built, started, and asked.

`worker` and what it imports run there, with torch, safetensors and this checkout alone; it must
not print before its streams are safe, so nothing is imported here.
"""
