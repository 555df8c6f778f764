from __future__ import annotations

import ast
import asyncio
import copy
import json
import os
import runpy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import ConfigError
from headwater.rewards.sandbox.isolation import ACCEPTED, Isolation
from headwater.rewards.sandbox.pool import working_isolation
from headwater.rewards.sandbox.programs import Stopped, run_script
from headwater.rewards.verifiers.code import Code, Policy, code
from headwater.types import Group, Signal, Span, Task, Trajectory

PROGRAMS = runpy.run_path(str(Path(__file__).with_name("honest.py")))
CALLS, SCRIPTS, WRONG_SCRIPTS = PROGRAMS["CALLS"], PROGRAMS["SCRIPTS"], PROGRAMS["WRONG_SCRIPTS"]
ADD = "def add(a, b):\n    return a + b\n"
TRIPLES = [{"fn": "add", "args": [1, 2], "expected": 3}, {"fn": "add", "args": [-7, 40], "expected": 33}]


@pytest.fixture(scope="module", autouse=True)
def isolated() -> None:
    try:
        working_isolation()
    except ConfigError as error:
        pytest.skip(f"no isolation on this machine: {error}")


@pytest.fixture(scope="module")
def source(isolated: None):
    made = code(seconds=3, total_seconds=20)
    yield made
    made.sandbox.close()


def signals(source: Code, texts: Sequence[str], prompt: str = "?", stop: Any = "done", **meta: Any) -> list[Signal]:
    task = Task(id="t", prompt=prompt, meta=meta)
    spans = [(Span(author="policy", tokens=(1,), text=text),) for text in texts]
    group = Group(task=task, trajectories=tuple(Trajectory(task_id="t", spans=s, stop=stop) for s in spans))
    return list(asyncio.run(source(group)))


def verdict(source: Code, text: str, **meta: Any) -> float:
    (signal,) = signals(source, [text], **meta)
    assert signal.status == "ok", signal.note
    assert bool(signal.note) == (signal.values == (0.0,))
    return signal.values[0]


def fenced(program: str) -> str:
    return f"Here it is:\n\n```python\n{program}\n```\n"


# --- honest programs -------------------------------------------------------------------------------


def literal_tests(program: str, calls: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Calls with what the program gives here, as literals of Python."""
    namespace: dict[str, Any] = {"__name__": "solution_here"}
    module = type(os)("solution_here")
    namespace = module.__dict__
    import sys

    sys.modules["solution_here"] = module
    exec(compile(program, "solution.py", "exec", dont_inherit=True), namespace)
    try:
        found = [(args, namespace["f"](*copy.deepcopy(args))) for args in calls]
    finally:
        del sys.modules["solution_here"]
    return [{"fn": "f", "args": repr(list(args)), "expected": value} for args, value in found]


def as_literal(value: Any) -> str:
    """Python's text for a value: also of what repr() has no literal for."""
    if isinstance(value, list | tuple):
        inner = ", ".join(map(as_literal, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "1e999" if value > 0 else "-1e999"
    return repr(value)


NO_LITERAL = (bytearray, frozenset)


def holds_no_literal(value: Any) -> bool:
    if isinstance(value, NO_LITERAL) or (value == set() and isinstance(value, set)):
        return True
    if isinstance(value, list | tuple | set):
        return any(map(holds_no_literal, value))
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_an_honest_program_is_accepted(source: Code, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    program, calls = CALLS[name]
    tests = literal_tests(program, calls)
    if any(holds_no_literal(test["expected"]) for test in tests):
        lines = [f"    assert candidate(*{test['args']}) == {test['expected']!r}\n" for test in tests]
        meta: dict[str, Any] = {"test": "def check(candidate):\n" + "".join(lines), "entry_point": "f"}
    else:
        meta = {"tests": [test | {"expected": as_literal(test["expected"]), "literal": True} for test in tests]}
    assert verdict(source, fenced(program), **meta) == 1.0
    # Other values are refused, so the tests mean something.
    other = program + "\n_f = f\ndef f(*a, **k): return [_f(*a, **k)]\n"
    assert verdict(source, fenced(other), **meta) == 0.0


def test_there_are_a_hundred():
    assert len(CALLS) + len(SCRIPTS) >= 100


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_honest_script_is_accepted(source: Code, name: str):
    program, stdin, stdout = SCRIPTS[name]
    tests = [{"stdin": stdin, "stdout": stdout}] * 2
    assert verdict(source, fenced(program), tests=tests) == 1.0


@pytest.mark.parametrize("name", WRONG_SCRIPTS)
def test_a_wrong_script_is_refused(name: str):
    source = code(seconds=0.7, workers=1)
    program, stdin, stdout = WRONG_SCRIPTS[name]
    assert verdict(source, fenced(program), tests=[{"stdin": stdin, "stdout": stdout}]) == 0.0
    source.sandbox.close()


def test_output_may_have_to_be_exact():
    source = code(output="exact", workers=1)
    tests = [{"stdin": "", "stdout": "1\n"}]
    assert verdict(source, fenced("print(1)"), tests=tests) == 1.0
    assert verdict(source, fenced("print('1 ')"), tests=tests) == 0.0
    assert verdict(source, fenced("print(1, end='')"), tests=tests) == 0.0
    source.sandbox.close()


# --- which part of an answer is the program --------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (ADD, 1.0),
        (fenced(ADD), 1.0),
        (f"```\n{ADD}```", 1.0),
        (f"~~~py\n{ADD}~~~", 1.0),
        (f"````python\n{ADD}````", 1.0),
        (f"```python\n{ADD}s = '''\n  ``` x\n'''\n```", 1.0),
        (fenced("def add(a, b): return 0") + fenced(ADD), 1.0),  # the last fence counts
        (fenced(ADD) + fenced("def add(a, b): return 0"), 0.0),
        (fenced(ADD) + "and its output:\n```\n3\n```", 0.0),  # always the last
        (ADD + fenced("def add(a, b): return 0"), 0.0),  # not what is outside of it
        ("def add(a, b): return 0\n" + fenced(ADD), 1.0),
        (fenced("It adds two numbers.\n" + ADD), 0.0),  # prose in the fence
        ("It adds.\n" + ADD, 0.0),  # prose without a fence
        (f"```python\n{ADD}", 0.0),  # never closed
        (fenced(ADD) + "```python\ndef add(a, b):", 0.0),
        (fenced(""), 0.0),
        ("", 0.0),
        (f"<think>{fenced(ADD)}</think> I do not know.", 0.0),
        (f"<think>{fenced(ADD)}", 0.0),
        (f"<think>hm</think>\n{fenced(ADD)}", 1.0),
        (fenced(ADD.replace("\n", "\r\n")), 1.0),
        (fenced("s = '\x0c'; assert len(s) == 1\n" + ADD), 1.0),
    ],
)
def test_which_part_is_the_program(source: Code, text: str, reward: float):
    assert verdict(source, text, tests=TRIPLES) == reward


def test_a_program_stands_on_the_tasks_text(source: Code):
    prompt = "import math\ndef half(x):\n    return x / 2\n\ndef f(x):\n    '''The root of half of x.'''\n"
    meta = {"prompt": prompt, "entry_point": "f", "tests": [{"args": [32], "expected": 4.0}]}
    right = [
        "    return math.sqrt(half(x))\n",
        "def f(x): return math.sqrt(half(x))",
        prompt + "    return half(x) ** 0.5",
    ]
    assert [verdict(source, text, **meta) for text in right] == [1.0, 1.0, 1.0]
    assert [verdict(source, fenced(text), **meta) for text in right] == [1.0, 1.0, 1.0]
    asked = f"Complete this function:\n```python\n{prompt}```\n"
    assert verdict(source, fenced(right[1]), **meta | {"prompt": asked}) == 1.0
    assert verdict(source, fenced(right[1]), **meta | {"prompt": "?", "context": prompt}) == 1.0
    for wrong in ("pass", "x = 1", "", "    return half(x)"):
        assert verdict(source, wrong, **meta) == 0.0


# --- what counts as the same -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "given", "exact", "equal"),
    [
        ("1", "1", 1, 1),
        ("1", "True", 0, 1),
        ("True", "1", 0, 1),
        ("3", "3.0", 0, 1),
        ("3.0", "3", 0, 1),
        ("3.0", "3.0", 1, 1),
        ("0.0", "-0.0", 1, 1),
        ("[1, 2]", "(1, 2)", 0, 0),
        ("(1, 2)", "(1, 2)", 1, 1),
        ("[1, 2]", "[1, 2.0]", 0, 1),
        ("[1, 2]", "[2, 1]", 0, 0),
        ("{1, 2}", "{2, 1}", 1, 1),
        ("{1, 2}", "{1.0, 2}", 0, 1),
        ("{1, 2}", "frozenset([1, 2])", 0, 1),
        ("{1, 2}", "{1}", 0, 0),
        ("{1: 'a', 2: 'b'}", "{2: 'b', 1: 'a'}", 1, 1),
        ("{1: 'a'}", "{True: 'a'}", 0, 1),
        ("{1: 'a'}", "{1: 'a', 2: 'b'}", 0, 0),
        ("{(1, 2): [3]}", "{(1, 2): [3]}", 1, 1),
        ("'a'", "b'a'", 0, 0),
        ("None", "0", 0, 0),
        ("1", "float('nan')", 0, 0),
        ("1e999", "float('inf')", 1, 1),
        ("2j", "2j", 1, 1),
        ("{'a': 2}", "__import__('collections').Counter('aa')", 0, 1),
        ("5", "type('I', (int,), {})(5)", 0, 1),
        ("5", "type('I', (int,), {'__eq__': lambda *_: True, '__hash__': int.__hash__})(6)", 0, 0),
        ("0.3", "0.1 + 0.2", 0, 0),
    ],
)
def test_types_are_compared_as_the_policy_says(source: Code, expected: str, given: str, exact: int, equal: int):
    text = fenced(f"def f(): return {given}")
    tests = [{"fn": "f", "args": "[]", "expected": expected, "literal": True}]
    check = f"def check(candidate):\n    assert candidate() == {expected}\n"
    for types, reward in (("exact", exact), ("equal", equal)):
        assert verdict(source, text, tests=tests, types=types) == reward
        assert verdict(source, text, test=check, entry_point="f", types=types) == reward


def test_nan_is_not_nan(source: Code):
    check = "def check(candidate):\n    assert candidate() == float('nan')\n"
    inside = "def check(candidate):\n    assert candidate() == {float('nan')}\n"
    assert verdict(source, fenced("def f(): return float('nan')"), test=check, entry_point="f") == 0.0
    assert verdict(source, fenced("def f(): return {float('nan')}"), test=inside, entry_point="f") == 0.0


@pytest.mark.parametrize(
    ("expected", "given", "tolerance", "reward"),
    [(0.3, "0.1 + 0.2", 1e-9, 1), (0.3, "0.31", 1e-9, 0), (3, "3.0", 0.1, 0), (10, "11", 0.2, 0),
     (1e6, "1e6 + 1", 1e-5, 1)],
)  # fmt: skip
def test_a_tolerance_is_for_floats(source: Code, expected: float, given: str, tolerance: float, reward: int):
    tests = [{"fn": "f", "expected": expected}]
    assert verdict(source, fenced(f"def f(): return {given}"), tests=tests, tolerance=tolerance) == reward


# --- forms of tests --------------------------------------------------------------------------------


def test_methods_keywords_and_exceptions(source: Code):
    program = (
        "class Solution:\n    def two(self, a, *, b=1):\n        if a < 0: raise KeyError(a)\n        return a + b\n"
    )
    tests = [
        {"fn": "Solution.two", "args": [1], "kwargs": {"b": 5}, "expected": 6},
        {"fn": "Solution.two", "args": [-1], "raises": "KeyError"},
    ]
    assert verdict(source, fenced(program), tests=tests) == 1.0
    assert verdict(source, fenced(program), tests=json.dumps(tests)) == 1.0
    assert verdict(source, fenced(program.replace("KeyError", "ValueError")), tests=tests) == 0.0
    assert verdict(source, fenced(program.replace("raise KeyError(a)", "return 'KeyError'")), tests=tests) == 0.0


def test_assertions_alone(source: Code):
    lines = ["assert add(1, 2) == 3", "assert set(add([1], [2])) == {1, 2}"]
    assert verdict(source, fenced(ADD), test_list=lines) == 1.0
    assert verdict(source, fenced(ADD), tests=lines) == 1.0
    assert verdict(source, fenced("def add(a, b): return 3"), test_list=lines) == 0.0
    assert verdict(source, fenced("add = lambda a, b: undefined"), test_list=lines) == 0.0


def test_hidden_inputs_catch_what_knows_the_visible_ones(source: Code):
    check = (
        "import random\ndef check(candidate):\n    assert candidate(1, 2) == 3\n    for _ in range(20):\n"
        "        a, b = random.randrange(10**9), random.randrange(10**9)\n        assert candidate(a, b) == a + b\n"
    )
    assert verdict(source, fenced(ADD), test=check, entry_point="add") == 1.0
    knows = "def add(a, b): return {(1, 2): 3}.get((a, b), 0)"
    assert verdict(source, fenced(knows), test=check, entry_point="add") == 0.0
    first = signals(source, [fenced(knows)], test=check, entry_point="add")
    assert first == signals(source, [fenced(knows)], test=check, entry_point="add"), (
        "the same inputs for the same program"
    )


@pytest.mark.parametrize(
    "error", ["NameError", "ImportError", "SyntaxError", "AssertionError", "KeyError", "Exception"]
)
def test_what_a_program_raises_into_the_tests_is_its_own_fault(source: Code, error: str):
    check = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    assert verdict(source, fenced(f"def add(a, b): raise {error}('x')"), test=check, entry_point="add") == 0.0


def test_values_that_the_tests_do_not_survive(source: Code):
    check = "def check(candidate):\n    assert sum(range(candidate(1, 2))) == 3\n"
    assert verdict(source, fenced("def add(a, b): return 10**15"), test=check, entry_point="add") == 0.0


# --- what is no verdict ----------------------------------------------------------------------------


def test_abstains_without_tests(source: Code):
    assert [s.status for s in signals(source, [ADD])] == ["abstained"]
    assert [s.status for s in signals(source, [ADD], tests=[], test="  ")] == ["abstained"]


@pytest.mark.parametrize(
    ("meta", "note"),
    [
        ({"tests": [{"fn": "add", "args": [1]}]}, "either expected, or raises"),
        ({"tests": [{"args": [1], "expected": 1}]}, "names no function"),
        ({"tests": [{"fn": "add", "expectd": 1}]}, "unknown field 'expectd'"),
        ({"tests": [{"stdin": "1"}]}, "must be texts"),
        ({"tests": [5]}, "wanted an object"),
        ({"tests": "{"}, "cannot be used"),
        ({"tests": [{"fn": "add", "args": "[", "expected": "1", "literal": True}]}, "no literal"),
        ({"test": "def check(candidate):\n    pass", "entry_point": "add"}, "never call"),
        ({"test": "def check(candidate):\n    assert undefined", "entry_point": "add"}, "NameError"),
        ({"test": "def check(candidate):\n    while True: pass", "entry_point": "add"}, "more than"),
        ({"test": "def check(candidate) pass", "entry_point": "add"}, "no Python"),
        ({"test": "def check(candidate): pass"}, "names no function"),
        ({"test_list": ["x = add(1, 2)"]}, "assert nothing"),
        ({"tests": TRIPLES, "types": "loose"}, "meta.types"),
        ({"tests": TRIPLES, "tolerance": -1}, "meta.tolerance"),
    ],
)
def test_broken_tests_are_no_verdict(source: Code, meta: dict[str, Any], note: str):
    (signal,) = signals(source, [fenced(ADD)], **meta)
    assert (signal.status, signal.values) == ("failed", ())
    assert note in signal.note


def test_an_episode_that_broke_is_not_judged(source: Code):
    assert signals(source, [ADD], stop="error", tests=TRIPLES)[0].status == "failed"


def test_a_sandbox_that_cannot_start_is_no_verdict():
    source = code(workers=1)
    source.sandbox.isolation = Isolation("/bin/false")
    (signal,) = signals(source, [ADD], tests=TRIPLES)
    assert signal.status == "failed"
    assert "did not start" in signal.note
    source.sandbox.close()


# --- settings --------------------------------------------------------------------------------------


def test_refuses_without_isolation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headwater.rewards.sandbox.isolation.find_bwrap", lambda: None)
    working_isolation.cache_clear()
    with pytest.raises(
        ConfigError, match=r"pip install headwater\[sandbox\].*settings.isolation = \"none, and I accept"
    ):
        code()
    source = code(isolation=ACCEPTED, workers=1)
    assert verdict(source, fenced(ADD), tests=TRIPLES) == 1.0
    assert verdict(source, fenced("def add(a, b): return 3"), tests=TRIPLES) == 0.0
    assert verdict(source, fenced("import os\ndef add(a, b): os.kill(os.getpid(), 9)"), tests=TRIPLES) == 0.0
    source.sandbox.close()
    working_isolation.cache_clear()


@pytest.mark.parametrize(
    "settings", [{"tolerance": 1}, {"seconds": 0}, {"memory": 10}, {"workers": 0}, {"processes": float("inf")}]
)
def test_impossible_settings_are_refused(settings: dict[str, Any]):
    with pytest.raises(ConfigError):
        code(**settings)


def test_many_at_once_do_not_wait_for_the_slow_ones(source: Code):
    slow = fenced("import time\ndef add(a, b):\n    time.sleep(1)\n    return a + b")
    started = time.monotonic()
    found = signals(source, [slow] + [fenced(ADD)] * 6, tests=TRIPLES[:1])
    assert [signal.values for signal in found] == [(1.0,)] * 7
    assert time.monotonic() - started < 3


# --- HumanEval -------------------------------------------------------------------------------------


def human_eval() -> list[dict[str, str]]:
    folder = Path(os.environ.get("HEADWATER_DATA", Path(__file__).parents[4] / "shared" / "data"))
    path = folder / "humaneval" / "HumanEval.jsonl"
    if not path.exists():
        pytest.skip(f"no HumanEval at {path}; set HEADWATER_DATA")
    return [json.loads(line) for line in path.read_text().splitlines()]


MUTANTS = {
    "other": "\n_right = {0}\ndef {0}(*a):\n    v = _right(*a)\n    return (not v) if v in (True, False) else [v]\n",
    "another type": "\n_right = {0}\ndef {0}(*a):\n    return type('Any', (), {{'__eq__': lambda *_: True}})()\n",
    "nothing": "\ndef {0}(*a): return None\n",
    "leaves": "\nimport sys\ndef {0}(*a): sys.exit(0)\n",
}


def judged(source: Code, rows: Sequence[dict[str, str]], ending: str) -> dict[str, Signal]:
    async def one(row: dict[str, str]) -> Signal:
        meta = {"entry_point": row["entry_point"], "test": row["test"]}
        task = Task(id=row["task_id"], prompt=row["prompt"], meta=meta)
        program = row["prompt"] + row["canonical_solution"] + ending.format(row["entry_point"])
        spans = (Span(author="policy", tokens=(1,), text=fenced(program)),)
        (signal,) = await source(Group(task=task, trajectories=(Trajectory(task_id=task.id, spans=spans),)))
        return signal

    async def every() -> list[Signal]:
        return await asyncio.gather(*map(one, rows))

    return dict(zip([row["task_id"] for row in rows], asyncio.run(every()), strict=True))


def test_every_canonical_solution_of_human_eval_passes(source: Code):
    rows = human_eval()
    assert len(rows) == 164
    found = judged(source, rows, "")
    assert {name: signal for name, signal in found.items() if signal.values != (1.0,)} == {}


@pytest.mark.parametrize(("name", "step"), [("other", 1), ("another type", 4), ("nothing", 4), ("leaves", 4)])
def test_mutants_of_human_eval_fail(source: Code, name: str, step: int):
    found = judged(source, human_eval()[::step], MUTANTS[name])
    assert {task: signal for task, signal in found.items() if signal.values != (0.0,)} == {}


SWAPS: dict[type, type] = {
    ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def mutants(program: str) -> list[str]:
    """The program with one operator swapped, or one whole number moved by one: every such program."""
    found: list[str] = []
    for place in range(len(list(ast.walk(ast.parse(program))))):
        tree = ast.parse(program)
        node: Any = list(ast.walk(tree))[place]
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            node.ops[0] = SWAPS[type(node.ops[0])]()
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
            node.op = SWAPS[type(node.op)]()
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            node.value += 1
        else:
            continue
        found.append(ast.unparse(tree))
    return found


def test_mutants_are_judged_as_the_plain_tests_judge_them(source: Code):
    """Honest, mostly wrong programs: a script that runs the tests itself, and ends with 0 where they pass, agrees."""
    lenient = Code(sandbox=source.sandbox, policy=Policy(types="equal"))

    async def plainly(program: str, row: dict[str, str]) -> float:
        async with source.sandbox.slot(), source.sandbox.worker() as worker:
            script = f"{program}\n{row['test']}\ncheck({row['entry_point']})\n"
            try:
                ended = await run_script(worker, script, b"")
            except Stopped:
                return 0.0
            return float(ended.code == 0 and not ended.reason)

    found: list[tuple[float, float]] = []
    for number, row in enumerate(human_eval()[1::6]):
        programs = mutants(row["prompt"] + row["canonical_solution"])
        for program in programs[number % 2 :: max(2, len(programs) // 2)]:
            ours = verdict(lenient, fenced(program), entry_point=row["entry_point"], test=row["test"])
            found.append((ours, asyncio.run(plainly(program, row))))
            assert found[-1][0] == found[-1][1], program
    assert len(found) > 25
    assert sum(ours for ours, _ in found) < len(found) / 2


def test_the_canonical_solutions_alone_are_continuations(source: Code):
    for row in human_eval()[::16]:
        meta = {"entry_point": row["entry_point"], "test": row["test"], "prompt": row["prompt"]}
        assert ast.parse(row["prompt"] + row["canonical_solution"])
        assert verdict(source, row["canonical_solution"], **meta) == 1.0
