"""A person's own function on trial: right ones pass, wrong ones are named, and misuse is told."""

import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import cases
from harness import signatures
from harness.given import Given
from harness.record import Status
from harness.run import judge
from tests.test_cli import ROOT, Parity, parity  # noqa: F401 - the fixture

SDPA = '''
import os

import torch


def right(q, k, v, scale, causal, window, block_size=64):
    return attend(q, k, v, scale, causal, window)


def wide(q, k, v, scale, causal, window):
    return attend(q, k, v, scale, causal, window and window + 1)


def always_causal(q, k, v, window):
    return attend(q, k, v, q.shape[-1] ** -0.5, True, window)


def masked(q, k, v, visible):
    return attend(q, k, v, q.shape[-1] ** -0.5, False, None, visible)


def attend(q, k, v, scale, causal, window, visible=None):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).float() for x in (k, v))
    i = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2])[None]
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if causal:
        seen &= j <= i
    if window is not None:
        seen &= j > i - window
    if visible is not None:
        seen = visible
    scores = (q.float() @ k.mT * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ v).to(q.dtype)


def online(q, k, v, scale, causal, window):
    """Over blocks of 7 keys, with powers of two."""
    dtype = q.dtype
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).float() for x in (k, v))
    q = q.float() * (scale * 1.4426950408889634)
    i = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    top = q.new_full((*q.shape[:-1], 1), -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for start in range(0, k.shape[2], 7):
        j = torch.arange(k.shape[2])[None, start : start + 7]
        hidden = (j > i) if causal else torch.zeros_like(j > i)
        if window is not None:
            hidden |= j <= i - window
        s = (q @ k[:, :, start : start + 7].mT).masked_fill(hidden, -torch.inf)
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        safe = new.masked_fill(new == -torch.inf, 0.0)
        p, shrink = torch.exp2(s - safe), torch.exp2(top - safe)
        total, out, top = total * shrink + p.sum(-1, keepdim=True), out * shrink, new
        out = out + p @ v[:, :, start : start + 7]
    return (out / total.masked_fill(total == 0, 1.0)).to(dtype)


def raises(q, k, v):
    raise KeyError("no such block")


def leaves(q, k, v):
    raise SystemExit(0)


def ends(q, k, v):
    os._exit(0)


def forks(q, k, v):
    if (child := os.fork()) == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    raise RuntimeError("the child has ended")


def short(q, k, v):
    return q[:, :1, :1]


def nothing(q, k, v):
    pass


def three(q, k, v):
    return q, q, q


def positional(q, k, v, /):
    return q


def queries(query, key, value):
    return query


def no_values(q, k):
    return q


number = 3
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SDPA)
    return path


@pytest.fixture
def check(parity: Parity, tmp_path: Path):  # noqa: F811
    def call(source: object, *words: str, op: str = "sdpa") -> tuple[int, str, str]:
        corpus = str(tmp_path / "corpus")
        return parity("check", str(source), "--op", op, "--corpus", corpus, *words)

    return call


@pytest.mark.parametrize("name", ["right", "online", "always_causal", "masked"])
def test_a_right_function_is_green(check, file, name):
    code, out, err = check(f"{file}:{name}", "--cases", "40")
    assert code == 0, out + err
    assert f"mine.{name}" in out
    assert "nothing wrong" in out


def test_a_wrong_window_is_named_shrunk_kept_and_replayed(check, parity, file, tmp_path):  # noqa: F811
    code, out, _ = check(f"{file}:wide")
    assert code == 1
    assert "window off by one: W+1 keys visible" in out
    again = next(line for line in out.splitlines() if line.startswith("again: parity "))
    words = shlex.split(again)[2:]
    case_id = words[1]
    (path,) = (tmp_path / "corpus" / "sdpa").iterdir()
    assert path.stem == case_id
    (shown,) = [line for line in out.splitlines() if line.startswith("smallest case")]
    case = cases.load("sdpa").CASE.from_json(shown.split(": ", 1)[1])
    assert case.features() == {"causal", "window"}
    assert (case.q_len, case.batch, case.heads) == (1, 1, 1)
    assert case.kv_len <= 3

    corpus = ("--corpus", str(tmp_path / "corpus"))
    assert parity(*words)[0] == 1
    code, out, _ = parity("replay", case_id[:6], *corpus)
    assert code == 1
    assert "mine.sdpa.wide@cpu (hardware): disagree" in out
    assert "window off by one" in out
    assert parity("replay", case_id, "--subject", f"{file}:right", *corpus)[0] == 0
    assert parity("replay", case_id, "--subject", "torch.sdpa.math", *corpus)[0] == 0
    code, _, err = parity("replay", case_id, "--subject", f"{file}:masked", *corpus)
    assert code == 0, err
    # Another function that is wrong in the same way takes the entry over: replay means the latest.
    file.with_name("other.py").write_text(SDPA)
    assert check(f"{file.with_name('other.py')}:wide")[0] == 1
    assert "other.sdpa.wide@cpu" in parity("replay", case_id, *corpus)[1]
    file.with_name("other.py").write_text(SDPA.replace("window + 1", "window"))
    assert parity("replay", case_id, *corpus)[0] == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "KeyError: 'no such block'"),
        ("leaves", "the subject raised SystemExit: 0"),
        ("ends", "the subject raised SystemExit: os._exit(0)"),
        ("forks", "RuntimeError: the child has ended"),
        ("short", "out has shape [1, 1, 1], expected"),
        ("nothing", "output out: expected a torch.Tensor, got NoneType"),
        ("three", "the function returned 3 values, expected at most out, lse"),
    ],
)
def test_a_function_that_does_not_answer_is_a_finding(check, file, name, said):
    file.write_text(SDPA.replace("return q[:, :1, :1]", "return q[0, :1, :1, :1]"))
    code, out, _ = check(f"{file}:{name}", "--cases", "5")
    assert code == 1
    assert said in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mine.py"], "names no function; expected FILE.py:FUNCTION"),
        (["mine.py:"], "names no function"),
        (["mine.txt:right"], "names no function"),
        (["nine.py:right"], "is no file; expected a Python file"),
        (["mine.py:rihgt"], "has no 'rihgt'; expected one of always_causal, attend, "),
        (["mine.py:number"], "is a int, expected a function"),
        (["broken.py:right"], "can't be imported: ModuleNotFoundError: No module named 'nowhere'"),
        (["syntax.py:right"], "can't be imported: SyntaxError: "),
        (["exits.py:right"], "can't be imported: SystemExit: "),
        (["skips.py:right"], "can't be imported: Skipped: no torch"),
        (["mine.py:queries"], "needs an argument 'query', which sdpa has not; expected some of q"),
        (["mine.py:no_values"], "has no parameter v; expected some of q, k, v"),
        (["mine.py:positional"], "takes 'q' by position only, expected by keyword"),
        (["mine.py:right", "--features", "sinks"], "the function has no parameter sinks"),
        (["mine.py:right", "--features", "windwo"], "--features windwo: sdpa has no such feature"),
        (["mine.py:right", "--dtype", "fp8"], "--dtype fp8: sdpa is not asked in it; expected"),
        (["mine.py:right", "--lane", "gpu"], "lane='gpu' is unknown"),
        (["mine.py:right", "--lane", "mps"], "lane='mps' is absent for torch"),
        (["mine.py:right", "--runtime", "jax"], "runtime='jax' is unknown; expected one of mlx"),
        (["mine.py:right", "--cases", "0"], "--cases 0 must be at least 1"),
        (["mine.py:right", "--program", "no.py:program"], "no.py is no file"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_misuse_is_one_sentence(check, file, monkeypatch, words, said):
    monkeypatch.chdir(file.parent)
    Path("broken.py").write_text("import nowhere\n")
    Path("syntax.py").write_text("def right(:\n")
    Path("exits.py").write_text("raise SystemExit('usage: exits.py')\n")
    Path("skips.py").write_text("import pytest\npytest.skip('no torch', allow_module_level=True)\n")
    code, out, err = check(*words)
    assert code == 2, out + err
    assert out == ""
    assert said in err
    assert err.startswith("parity: ")
    assert len(err.splitlines()) == 1


def test_features_narrow_what_is_asked(file):
    source = f"{file}:right"
    asked = {
        features: set(Given(source=source, op="sdpa", features=features).cell().subject.claims)
        for features in (None, ("scale",), ("window",), ("scale", "layout"), ())
    }
    assert asked == {
        None: {"causal", "scale", "window"},
        ("scale",): {"scale"},
        ("window",): {"causal", "window"},
        ("scale", "layout"): {"scale", "layout"},
        (): set(),
    }


PROGRAM = """
import dataclasses

import torch

from harness.arithmetic.midrad import MidRad
from harness.programs import sdpa as programs

honest = programs.program(programs.TORCH_MATH)


def hides(case, inputs, mode):
    wide = dataclasses.replace(case, window=case.window and case.window + 1)
    return honest(wide, {**inputs, "visible": wide.inputs()["visible"]}, mode)


def unbounded(case, inputs, mode):
    out = honest(case, inputs, mode)["out"]
    return {"out": MidRad(out.mid, torch.full_like(out.rad, torch.inf))}


def raises(case, inputs, mode):
    return inputs["nothing"]


def leaves(case, inputs, mode):
    raise SystemExit(0)
"""


def test_a_program_is_used_and_can_hide_nothing(check, file):
    program = file.with_name("replicated.py")
    program.write_text(PROGRAM)
    torch_math = "import torch\n\n\ndef f(q, k, v, scale, visible):\n    from torch.nn.attention " \
        "import SDPBackend, sdpa_kernel\n    with sdpa_kernel(SDPBackend.MATH):\n        return " \
        "torch.nn.functional.scaled_dot_product_attention(\n            q, k, v, " \
        "attn_mask=visible, scale=scale, enable_gqa=True)\n"  # fmt: skip
    file.write_text(torch_math)
    words = ("--cases", "20", "--program")
    code, out, err = check(f"{file}:f", *words, f"{program}:honest")
    assert code == 0, out + err
    assert "declared" in out
    file.write_text(SDPA)
    code, _, err = check(f"{file}:wide", *words, f"{program}:hides")
    assert code == 2
    assert "replicated.py:hides does not mean sdpa: out[" in err
    code, _, err = check(f"{file}:wide", *words, f"{program}:unbounded")
    assert code == 2
    assert "have no declared bound" in err
    code, _, err = check(f"{file}:right", *words, f"{program}:raises")
    assert code == 2
    assert "replicated.py:raises raised KeyError" in err
    code, _, err = check(f"{file}:right", *words, f"{program}:leaves")
    assert code == 2
    assert "replicated.py:leaves raised SystemExit" in err


OTHERS = {
    "bmm": """
        def right(a, b, alpha, c, beta):
            out = alpha * (a.float() @ b.float())
            return (out if c is None else out + beta * c.float()).to(a.dtype)
        def wrong(a, b, alpha, c, beta):
            return right(a, b, alpha, c, 1.0)
    """,
    "banded_mask": """
        import torch
        def right(n, offset, window):
            i, j = torch.arange(n)[:, None] + offset, torch.arange(offset + n)[None]
            return (j <= i) & (j > i - (window or offset + n))
        def wrong(n, offset, window):
            return right(n, offset, window if n > 1 else None)
    """,
    "yarn": """
        import math, torch
        def right(q, k, q_positions, k_positions, base, factor, original_max, beta_fast, beta_slow):
            dim = q.shape[-1]
            pair = torch.arange(dim // 2, dtype=torch.float64)
            plain = base ** (-2 * pair / dim)
            def at(turns):
                return dim * math.log(original_max / (turns * 2 * math.pi)) / (2 * math.log(base))
            low, high = max(math.floor(at(beta_fast)), 0), min(math.ceil(at(beta_slow)), dim - 1)
            keep = 1 - ((pair - low) / (max(high - low, 0) or 0.001)).clamp(0, 1)
            table = plain / factor * (1 - keep) + plain * keep
            grow = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
            def turn(x, positions):
                angle = positions.double()[:, None, :, None] * table
                cos, sin = angle.cos() * grow, angle.sin() * grow
                a, b = x.double().chunk(2, -1)
                return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
            return turn(q, q_positions), turn(k, k_positions)
        def wrong(q, k, q_positions, k_positions, base, factor, original_max, beta_fast, beta_slow):
            q, k = right(q, k, q_positions, k_positions, base, factor, original_max,
                         beta_fast, beta_slow)
            return q, k, q.shape[-1] ** -0.5 * (0.1 * math.log(factor) + 1)
    """,
    "mla": """
        import torch
        def right(q_nope, q_pe, latent, k_pe, w_uk, w_uv, cache, slots, table, q_lens, kv_lens,
                  scale):
            pages, size, width = cache.shape
            rows = cache.view(pages * size, width)
            live = slots >= 0
            rows[slots[live]] = torch.cat([latent, k_pe], -1)[live]
            out, start = [], 0
            for b, (n, m) in enumerate(zip(q_lens, kv_lens)):
                at = torch.arange(m)
                mine = rows[table[b, at // size].long() * size + at % size].double()
                q = torch.einsum("thn,hnl->thl", q_nope[start:start + n].double(), w_uk.double())
                q = torch.cat([q, q_pe[start:start + n].double()], -1)
                s = torch.einsum("thw,mw->htm", q, mine) * scale
                seen = at[None] <= torch.arange(m - n, m)[:, None] + SHIFT
                p = s.masked_fill(~seen, -torch.inf).softmax(-1)
                o = torch.einsum("htm,ml->htl", p, mine[:, :latent.shape[-1]])
                out.append(torch.einsum("htl,hlv->thv", o, w_uv.double()))
                start += n
            return torch.cat(out).to(q_nope.dtype)
        SHIFT = 0
        def wrong(q_nope, q_pe, latent, k_pe, w_uk, w_uv, cache, slots, table, q_lens, kv_lens,
                  scale):
            return right(q_nope, q_pe, latent, k_pe, w_uk, w_uv, cache, slots, table, q_lens,
                         kv_lens, scale * 1.1)
    """,
}  # fmt: skip


@pytest.mark.parametrize("op", OTHERS)
def test_functions_of_the_other_ops(check, file, op):
    file.write_text(textwrap.dedent(OTHERS[op]))
    code, out, err = check(f"{file}:right", "--cases", "40", op=op)
    assert code == 0, out + err
    code, out, err = check(f"{file}:wrong", "--cases", "60", op=op)
    assert code == 1, out + err


MLX = """
import mlx.core as mx


def right(q, k, v, scale, causal):
    mask = "causal" if causal else None
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


def wrong(q, k, v, scale):
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5)
"""


def test_a_function_of_mlx(check, file):
    file.write_text(MLX)
    words = ("--runtime", "mlx", "--dtype", "fp32", "--cases", "30")
    code, out, err = check(f"{file}:wrong", *words)
    assert code == 1, out + err
    assert "@mps" in out
    code, out, err = check(f"{file}:right", *words, "--features", "scale")
    assert code == 0, out + err


@pytest.mark.parametrize("op", cases.OPS)
def test_every_parameter_has_an_argument_and_every_feature_a_meaning(op):
    module = signatures.load(op)
    case = next(case for _, case in cases.load(op).PINNED)
    assert set(module.arguments(case, case.inputs())) == set(module.PARAMETERS)
    features = {f for parameter in module.PARAMETERS.values() for f in parameter.features}
    assert features | set(module.FREE) <= set(cases.load(op).FEATURES)
    assert all(parameter.meaning for parameter in module.PARAMETERS.values())


def test_a_case_that_needs_another_feature_is_refused(file):
    cell = Given(source=f"{file}:always_causal", op="sdpa").cell()
    case = next(case for name, case in cases.load("sdpa").PINNED if name == "gpt-oss-decode")
    assert judge(case, cell).status is Status.REFUSED


def test_explain_shows_the_arguments(parity):  # noqa: F811
    code, out, _ = parity("explain", "mla")
    assert code == 0
    for part in ("parity check FILE.py:FUNCTION --op mla", "w_uk", "needed: ", "returns", "joined"):
        assert part in out


def test_the_readme_s_example_is_found_named_and_reproduced(parity, tmp_path, monkeypatch):  # noqa: F811
    """Its code and its commands, as they stand there, in a folder of their own."""
    section = (ROOT / "README.md").read_text().split("## Your own function")[1].split("\n## ")[0]
    parts = re.findall(r"```(?:python|sh|)\n(.*?)```", section, re.DOTALL)
    code, commands, ending, arithmetic = parts
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    check_, repro = (shlex.split(line)[1:] for line in commands.splitlines())
    kept = ("--corpus", str(tmp_path / "corpus"))
    status, out, _ = parity(*check_, *kept)
    assert status == 1
    for line in ending.splitlines():
        assert line.split("(1.00")[0] in out  # z depends on the machine's rounding
    assert f"alone: parity {shlex.join(repro)}" in out
    status, out, err = parity(*repro, *kept)
    assert status == 0, out + err
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [sys.executable, "-I", str(tmp_path / "repro.py")],
        cwd=elsewhere, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "fault: window off by one: W+1 keys visible" in done.stdout
    assert "  observed " in done.stdout
    right = code.replace(">= row", "> row")
    (tmp_path / "mine.py").write_text(right)
    assert parity(*check_, *kept, "--cases", "20")[0] == 0
    (tmp_path / "arithmetic.py").write_text(arithmetic)
    declared = ("mine.py:attention", "--op", "sdpa", "--program", "arithmetic.py:float32", *kept)
    assert parity("check", *declared, "--cases", "20")[0] == 0
    weights = "scores.softmax(-1).nan_to_num()"
    (tmp_path / "mine.py").write_text(right.replace(weights, f"{weights}.to(q.dtype).float()"))
    assert parity(*check_, *kept, "--cases", "20", "--dtype", "bf16")[0] == 0
    status, out, _ = parity("check", *declared, "--cases", "20", "--dtype", "bf16")
    assert (status, "drift" in out) == (1, True)
    (tmp_path / "mine.py").write_text(right)
    status, _, err = parity(*repro, *kept)
    assert status == 2
    assert "answers case cf03c064033a with agree now" in err
