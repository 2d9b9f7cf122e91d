"""Numbers as a person writes them down."""


def ranges(numbers: list[int]) -> str:
    """Ascending numbers as runs: [2, 3, 4, 9] is "2..4, 9"; "none" without any."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("..".join(map(str, run)) for run in runs) or "none"
