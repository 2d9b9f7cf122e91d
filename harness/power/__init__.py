"""What the harness would have caught: defects planted behind ordinary subjects, and counted.

planted.py     wrong and right kernels, as cells
questions.py   the cases that a cell is asked: pinned, found earlier, drawn
trial.py       every defect put to the same questions, judged by the ordinary path
statistics.py  what counts say of a probability
rules.py       what other harnesses' rules say of the same answers
plain.py       each op in plain PyTorch in the case's own dtype, for the rules that need it
"""
