"""A finding as one script that needs an engine and torch, and nothing of this project.

`bundle` copies the source of a subject's call with all that it uses, `literals` writes values down,
`standalone` is what the script says and how it judges, `script` puts them together.
"""
