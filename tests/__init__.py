"""The questions put to the engines, and the harness itself on trial."""
