"""How many small faults the tests find: mutants of heinsen, each run against its package's tests.

    python -m tests.mutation.run --out=tests/mutation/FILE.jsonl [--mutants=150] [--seed=0] [--jobs=1]

A mutant is the package with one operator, number, condition, keyword or statement changed. They are drawn from all
such places, as many of each package as its share of them (at least 5), and always the same for a seed and a package.
Every verdict is appended to FILE.jsonl as it is reached: rerun the command to resume. The tests run in copies of the
files that git tracks, and stop at their first failure.
"""

import argparse
import ast
import concurrent.futures
import dataclasses
import json
import os
import queue
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FEWEST = 5  # mutants of a package
SILENCE = 600  # seconds in which some test must end: a mutant that hangs is found

# Package -> where its tests are, the quickest first. What is not listed belongs to "rest".
TESTS = {
    "ops": ["tests/ops", "tests/test_logspace.py"],
    "models": [
        "tests/models",
        "tests/ops/test_sharded.py",
        "tests/test_parallel.py",
        "tests/decoding",
        "tests/training",
        "tests/test_architecture.py",
    ],
    "data": ["tests/data", "tests/faults/test_fuzz.py"],
    "training": ["tests/training", "tests/scripts/test_flags.py", "tests/test_parallel.py"],
    "evaluation": ["tests/evaluation", "tests/scripts/test_entry_points.py"],
    "decoding": ["tests/decoding", "tests/scripts/test_entry_points.py"],
    "export": ["tests/export"],
    "plan": ["tests/plan"],
    "contrib": [
        *("tests/plan/test_costs.py", "tests/plan/test_hlo.py"),
        *("tests/export/test_onnx.py", "tests/ops/test_mosaic_gpu.py"),
    ],
    "sweep": ["tests/sweep"],
    "rest": [
        *("tests/test_architecture.py", "tests/test_errors.py", "tests/test_files.py", "tests/test_figures.py"),
        *("tests/test_host.py", "tests/test_distributed.py", "tests/test_parallel.py", "tests/test_package.py"),
        *("tests/scripts", "tests/training", "tests/data"),
    ],
}
ELSEWHERE = {"logspace": "ops", "weights": "export", "chips": "plan", "figures": "evaluation"}
# Run by PyTorch, which the quick tests do without (`make transformers`).
LEFT_OUT = ("export/pytorch",)

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
COMPARISONS |= {"in": "not in", "not in": "in"}
SYMBOLS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is"}
SYMBOLS |= {ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}
ARITHMETIC = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.Mod: ("%", "//")}
ARITHMETIC |= {ast.FloorDiv: ("//", "%"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.Pow: ("**", "*")}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """The text of a file from `start` to `stop`, in characters, and what stands there instead."""

    path: str
    line: int
    kind: str
    start: int
    stop: int
    before: str
    after: str

    def apply(self, source: str) -> str:
        assert source[self.start : self.stop] == self.before
        return source[: self.start] + self.after + source[self.stop :]


class _Places(ast.NodeVisitor):
    """Collects the mutants of a file. Annotations, decorators, assertions and texts of errors have none."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source, self.found = path, source, list[Mutant]()
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        text = self.source[self.lines[line - 1] : self.lines[line]]
        return self.lines[line - 1] + len(text.encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def add(self, kind: str, line: int, start: int, stop: int, after: str) -> None:
        self.found.append(Mutant(self.path, line, kind, start, stop, self.source[start:stop], after))

    def replace(self, kind: str, node: ast.AST, after: str) -> None:
        self.add(kind, node.lineno, *self.span(node), after)

    def replace_between(self, kind: str, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        start, stop = self.span(left)[1], self.span(right)[0]
        pattern = r"\b" + old.replace(" ", r"\s+") + r"\b" if old[0].isalpha() else re.escape(old)
        if found := re.search(pattern, self.source[start:stop]):
            self.add(kind, left.end_lineno, start + found.start(), start + found.end(), new)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        decorators = {ast.unparse(x) for x in node.decorator_list}
        if not decorators & {"overload", "abc.abstractmethod", "abstractmethod"}:
            for part in (*node.args.defaults, *(x for x in node.args.kw_defaults if x), *node.body):
                self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(x, ast.Name) and x.id == "__all__" for x in node.targets):
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.replace("statement", node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.replace("statement", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.replace("statement", node, "pass")
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.replace("condition", node.test, f"(not ({ast.get_source_segment(self.source, node.test)}))")
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            symbol = SYMBOLS[type(op)]
            self.replace_between("comparison", left, right, symbol, COMPARISONS[symbol])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = [
            isinstance(x, ast.JoinedStr) or getattr(x, "value", None).__class__ is str for x in (node.left, node.right)
        ]
        if type(node.op) in ARITHMETIC and not any(is_text) and not self.is_type(node):
            self.replace_between("arithmetic", node.left, node.right, *ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def is_type(self, node: ast.BinOp) -> bool:
        """Whether this is a union of types, outside an annotation."""
        if not isinstance(node.op, ast.BitOr):
            return False
        names = [ast.unparse(x) for x in (node.left, node.right)]
        return any(name == "None" or name[0].isupper() for name in names)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self.replace_between("boolean", node.values[0], node.values[1], old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if not isinstance(node.op, ast.UAdd):
            self.replace("unary", node, f"({ast.get_source_segment(self.source, node.operand)})")
        if not isinstance(node.operand, ast.Constant):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        starts = [*node.args, *(x.value for x in node.keywords)]
        for keyword in node.keywords:
            if keyword.arg is not None and len(starts) > 1:
                start, stop = self.span(keyword)
                rest = re.match(r"\s*,\s*", self.source[stop:])
                if rest:
                    self.add("keyword", keyword.lineno, start, stop + rest.end(), "")
                else:
                    before = re.search(r",\s*$", self.source[:start])
                    if before:
                        self.add("keyword", keyword.lineno, before.start(), stop, "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace("number", node, str(not node.value))
        elif isinstance(node.value, int):
            self.replace("number", node, str(node.value + 1))
        elif isinstance(node.value, float):
            self.replace("number", node, repr(node.value * 2 if node.value else 1.0))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass


def package_of(path: Path) -> str:
    """The key of TESTS for a file of heinsen."""
    unit = path.relative_to("heinsen").with_suffix("").parts[0]
    unit = ELSEWHERE.get(unit, unit)
    return unit if unit in TESTS else "rest"


def find_mutants(root: Path) -> dict[str, list[Mutant]]:
    """All mutants of each package."""
    found: dict[str, list[Mutant]] = {}
    for file in sorted((root / "heinsen").rglob("*.py")):
        path = file.relative_to(root)
        if any(part in path.as_posix() for part in LEFT_OUT):
            continue
        places = _Places(str(path), source := file.read_text())
        places.visit(ast.parse(source))
        tree = ast.dump(ast.parse(source))
        for mutant in places.found:
            try:
                changed = ast.dump(ast.parse(mutant.apply(source)))
            except SyntaxError:
                continue
            if changed != tree:
                found.setdefault(package_of(path), []).append(mutant)
    return found


def draw(places: dict[str, list[Mutant]], n: int, seed: int) -> list[tuple[str, Mutant]]:
    """n mutants with their packages, in an order in which every beginning is a sample too."""
    total = sum(map(len, places.values()))
    drawn = []
    for package, mutants in sorted(places.items()):
        size = min(len(mutants), max(FEWEST, round(n * len(mutants) / total)))
        drawn += [(package, mutant) for mutant in random.Random(f"{seed} {package}").sample(mutants, size)]
    random.Random(seed).shuffle(drawn)
    return drawn


def tests_of(package: str, mutant: Mutant, root: Path) -> list[str]:
    """The package's tests; those named like the mutant's file come first."""
    paths = [path for path in TESTS[package] if (root / path).exists()]
    stem = Path(mutant.path).stem
    files = [file for path in paths for file in sorted((root / path).rglob("test_*.py")) or [root / path]]
    first = [str(file.relative_to(root)) for file in files if stem in file.stem]
    return list(dict.fromkeys(first + paths))


def run_tests(folder: Path, tests: list[str], seconds: float) -> tuple[str, str]:
    """(killed, survived or timeout; the test that failed) of the copy in `folder`."""
    command = [sys.executable, "-m", "pytest", "-x", "-v", "--seed=0", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command, *tests],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    failed, verdict, end = "", "", time.monotonic() + seconds
    assert process.stdout is not None
    while not verdict:
        ready, _, _ = select.select([process.stdout], [], [], min(SILENCE, max(0.0, end - time.monotonic())))
        line = process.stdout.readline() if ready else None
        if line is None:
            verdict = "timeout"
        elif not line:
            verdict = "survived" if process.wait() == 0 else "killed"
        elif " FAILED" in line or " ERROR" in line:
            failed = failed or line.split()[0]
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    return verdict, failed


def copy_files(folder: Path) -> None:
    """Copy the files that git tracks."""
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def try_mutant(package: str, mutant: Mutant, folder: Path, seconds: float) -> dict[str, object]:
    """Run the mutant's tests in a copy, which is as before afterwards."""
    file = folder / mutant.path
    source, begin = file.read_text(), time.monotonic()
    try:
        file.write_text(mutant.apply(source))
        verdict, failed = run_tests(folder, tests_of(package, mutant, folder), seconds)
    finally:
        file.write_text(source)
    result = {"package": package, **dataclasses.asdict(mutant), "verdict": verdict, "failed": failed}
    return result | {"seconds": round(time.monotonic() - begin)}


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summarize(results: list[dict[str, object]]) -> Iterator[str]:
    """Lines of a table: mutants and killed ones of each package. A mutant that hangs counts as killed."""
    packages = sorted({str(x["package"]) for x in results})
    yield f"{'package':12} {'mutants':>8} {'killed':>8} {'share':>7}"
    for package in [*packages, "all"]:
        of = [x for x in results if package in (x["package"], "all")]
        killed = sum(x["verdict"] != "survived" for x in of)
        yield f"{package:12} {len(of):8} {killed:8} {killed / len(of):7.1%}"
    for x in results:
        if x["verdict"] == "survived":
            yield f"survived: {x['path']}:{x['line']}: {x['before']!r} -> {x['after']!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="verdicts, a JSON object per line; resumed")
    parser.add_argument("--mutants", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="mutants that are tested at a time")
    parser.add_argument("--seconds", type=float, default=3600, help="time limit of a mutant")
    flags = parser.parse_args()
    drawn = draw(find_mutants(ROOT), flags.mutants, flags.seed)
    key = lambda x: (x["path"], x["start"], x["stop"], x["after"])
    done = {key(x) for x in read(flags.out)}
    left = [(package, x) for package, x in drawn if key(dataclasses.asdict(x)) not in done]
    print(f"{len(drawn)} mutants, {len(left)} to test", flush=True)
    begin, folders = time.monotonic(), queue.SimpleQueue[Path]()
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(flags.jobs) as pool:
        for i in range(flags.jobs):
            folders.put(folder := Path(scratch, str(i)))
            copy_files(folder)

        def work(package: str, mutant: Mutant) -> dict[str, object]:
            folder = folders.get()
            try:
                return try_mutant(package, mutant, folder, flags.seconds)
            finally:
                folders.put(folder)

        for n, future in enumerate(concurrent.futures.as_completed([pool.submit(work, *x) for x in left]), start=1):
            with flags.out.open("a") as file:
                file.write(json.dumps(result := future.result()) + "\n")
            eta = (time.monotonic() - begin) / n * (len(left) - n) / 60
            where = f"{result['path']}:{result['line']}"
            print(f"{n}/{len(left)} {result['verdict']} {where} {result['seconds']} s, {eta:.0f} min left", flush=True)
    print("\n".join(summarize(read(flags.out))))


if __name__ == "__main__":
    main()
